"""After the first iteration buckets are rebuilt, once, in the order in which rank 0's gradients became ready."""

import torch
import torch.distributed as dist
from ddp_conformance import MUST, OBSERVED, case
from ddp_conformance.models import Scalars, linear, three_layers
from ddp_conformance.reference import (
    DEFAULT_LIMIT,
    FIRST_LIMIT,
    MIB,
    built,
    carried,
    every_bucket,
    rebuilt,
    sizes,
)
from torch import nn

ONCE = "include/torch/csrc/distributed/c10d/reducer.hpp: Returns true if we should rebuild buckets, else false. We only rebuild"
NEVER = (
    "include/torch/csrc/distributed/c10d/reducer.hpp: buckets once after the first iteration and never rebuild them if"
)
RANK_0 = "include/torch/csrc/distributed/c10d/reducer.hpp: Broadcast rebuilt buckets from rank 0 to other ranks before initializing"
READY = (
    "include/torch/csrc/distributed/c10d/reducer.hpp: according to when tensors received grads in the backward pass."
)
CPU_LOGGING = "distributed_test.py::DistributedTest._DistTestBase::test_ddp_logging_data_cpu"
BACKWARD = [5, 4, 3, 2, 1, 0]
"""In which order the gradients of three layers become ready."""


def steps(rank, ddp, count, own, *uses):
    """Forward and backward `count` times; how many collectives each forward started."""
    started = []
    for step in range(count):
        ddp.module.zero_grad(set_to_none=True)
        before = rank.collectives()
        loss = ddp(own, *uses[step : step + 1]).sum()
        started.append(rank.collectives() - before)
        loss.backward()
    return started


@case(
    "rebuild.twelve_steps",
    level=OBSERVED,
    source=READY,
    needs=("_get_ddp_logging_data",),
    catalogue=("H05", "H01", "U06"),
    torch_tests=(CPU_LOGGING,),
)
def test_the_logging_data_of_twelve_steps_tells_of_the_rebuild(rank):
    """
    After twelve steps of three layers under a 1 MiB cap the logging data tells of rebuilt buckets, 5 4, 3 2 and 1 0, of
    1050624 bytes each, filled in the order in which gradients became ready.

    `iteration` is 10 and not 11: it is sampled in the first ten iterations, then once in a hundred. `bucket_sizes` is the
    one bucket of the first iteration.
    """
    model = three_layers()
    ddp = rank.wrap(model, bucket_cap_mb=1)
    steps(rank, ddp, 12, rank.batch(512, rows=8))
    data = rank.log(
        ddp,
        "bucket_cap_bytes",
        "bucket_sizes",
        "gradient_as_bucket_view",
        "has_rebuilt_buckets",
        "iteration",
        "prev_iteration_grad_ready_order_indices",
        "rebuilt_bucket_sizes",
        "rebuilt_per_bucket_param_indices",
    )
    for key, value in data.items():
        rank.show(key, value)
    bytes_of = sizes(model.parameters())
    buckets = rebuilt(model.parameters(), BACKWARD, [FIRST_LIMIT, MIB])
    rank.law("rebuilt", data["has_rebuilt_buckets"], 1)
    rank.law("ready last layer first", data["prev_iteration_grad_ready_order_indices"], "5, 4, 3, 2, 1, 0")
    rank.law("filled in that order", data["rebuilt_per_bucket_param_indices"], ", ".join(carried(buckets)))
    in_each = [str(sum(bytes_of[at] for at in bucket)) for bucket in buckets]
    rank.law("bytes in each", data["rebuilt_bucket_sizes"], ", ".join(in_each))
    rank.law("bytes in the first iteration's one", data["bucket_sizes"], str(sum(bytes_of)))
    rank.law("the cap in bytes", data["bucket_cap_bytes"], MIB)


@case(
    "rebuild.second_forward",
    level=OBSERVED,
    source="nn/parallel/distributed.py: Calling _rebuild_buckets before forward computation,",
    each={
        "default": ({}, 1),
        "static_graph": ({"static_graph": True}, 2),
        "static_graph_find_unused": ({"static_graph": True, "find_unused_parameters": True}, 2),
    },
    needs=("register_comm_hook",),
    catalogue=("H05", "U05", "F08"),
    reports=("pytorch/pytorch#79049", "pytorch/pytorch#76043", "pytorch/PiPPy#665", "pytorch/torchft#41"),
)
def test_the_forward_that_rebuilds_starts_two_collectives_once(rank, facet):
    """
    The second forward rebuilds, with `static_graph` the third: it starts two collectives, and no other forward starts one.

    Rank 0 broadcasts the order in them. A rank that skips this forward, or whose group is gone by then, hangs the others
    there.
    """
    options, at = facet
    model = three_layers()
    ddp = rank.wrap(model, bucket_cap_mb=1, **options)
    buckets = rank.buckets(ddp)
    started = steps(rank, ddp, 5, rank.batch(512))
    rank.show("started", started)
    rank.law("one forward starts collectives", list(map(bool, started)), [step == at for step in range(5)])
    full = carried(rebuilt(model.parameters(), BACKWARD, [FIRST_LIMIT, MIB]))
    rank.law("one bucket before, rebuilt ones after", buckets, ["0 1 2 3 4 5"] * at + full * (5 - at))


@case(
    "rebuild.once",
    level=OBSERVED,
    source=ONCE,
    needs=("register_comm_hook",),
    catalogue=("H05",),
)
def test_buckets_are_rebuilt_once(rank):
    """
    Buckets are rebuilt once: an order of gradients that changes after the first iteration changes them no more.
    """
    uses = ["abcd", "dcba", "bdac", "dcba", "acbd"]
    ddp = rank.wrap(Scalars(*"abcd"), **every_bucket(8))
    buckets = rank.buckets(ddp)
    started = steps(rank, ddp, 5, rank.batch(1), *map(tuple, uses))
    rank.show("buckets", buckets)
    rank.law("as the first backward had them", buckets, ["0 1 2 3"] + ["3 2", "1 0"] * 4)
    rank.law("one rebuild", list(map(bool, started)), [False, True, False, False, False])


@case(
    "rebuild.ready_order",
    level=OBSERVED,
    source=READY,
    world=(1, 2),
    needs=("register_comm_hook",),
    catalogue=("H05", "U06"),
)
def test_rebuilt_buckets_follow_the_order_in_which_gradients_became_ready(rank):
    """
    Rebuilt buckets hold parameters in the order in which their gradients became ready in the first backward, not in the
    order of registration or its reverse.
    """
    used = ("c", "a", "e", "b", "d")
    ready = ["abcde".index(name) for name in reversed(used)]
    model = Scalars(*"abcde")
    ddp = rank.wrap(model, **every_bucket(8))
    buckets = rank.buckets(ddp)
    steps(rank, ddp, 4, rank.batch(1), *[used] * 4)
    rank.show("buckets", buckets[1:4])
    rank.law("filled in ready order", buckets[1:], carried(rebuilt(model.parameters(), ready, [8])) * 3)


@case(
    "rebuild.order_from_rank_0",
    level=OBSERVED,
    source=RANK_0,
    world=3,
    needs=("register_comm_hook",),
    catalogue=("H05",),
)
def test_all_ranks_take_the_order_of_rank_0(rank):
    """
    Where gradients become ready in another order on each rank, all ranks rebuild by that of rank 0, and means stay right.
    """
    orders = ["cabd", "abcd", "dbac"]
    model = Scalars(*"abcd")
    ddp = rank.wrap(model, **every_bucket(8))
    buckets = rank.buckets(ddp)
    steps(rank, ddp, 4, rank.batch(1), *[tuple(orders[rank.index])] * 4)
    rank.show("buckets", buckets[1:3])
    ready = ["abcd".index(name) for name in reversed(orders[0])]
    rank.law("rank 0's order", buckets[1:], carried(rebuilt(model.parameters(), ready, [8])) * 3)
    rank.law("the mean", model.c.grad, rank.mean(lambda r: rank.batch(1, of=r)[0]))


@case(
    "rebuild.order_from_first_of_group",
    level=OBSERVED,
    source=RANK_0,
    world=3,
    needs=("process_group", "register_comm_hook"),
    catalogue=("H05", "A04"),
)
def test_in_a_sub_group_all_ranks_take_the_order_of_its_first_rank(rank):
    """In a sub-group all ranks rebuild by the order of the group's first rank, whatever its number is outside the group."""
    group = dist.new_group([1, 2])
    rank.show("member", rank.index in (1, 2))
    if rank.index not in (1, 2):
        return
    orders = {1: "cabd", 2: "dbac"}
    model = Scalars(*"abcd")
    ddp = rank.wrap(model, process_group=group, **every_bucket(8))
    buckets = rank.buckets(ddp, group)
    for _ in range(4):
        model.zero_grad(set_to_none=True)
        ddp(rank.batch(1), use=tuple(orders[rank.index])).backward()
    rank.show("buckets", buckets[1:3])
    ready = ["abcd".index(name) for name in reversed(orders[1])]
    rank.law("rank 1's order", buckets[1:], carried(rebuilt(model.parameters(), ready, [8])) * 3)
    rank.law("the mean of the two", model.c.grad, rank.mean(lambda r: rank.batch(1, of=r)[0], ranks=[1, 2]))


@case(
    "rebuild.after_no_sync",
    level=OBSERVED,
    source=ONCE,
    needs=("no_sync", "register_comm_hook"),
    catalogue=("H05", "C01"),
)
def test_steps_under_no_sync_do_not_count_as_the_first_iteration(rank):
    """
    Steps under `no_sync` record no order, so buckets are rebuilt in the forward after the first synchronized backward,
    be it under `no_sync` itself.

    The steps under `no_sync` that come first use another order, and leave no trace.
    """
    model = Scalars(*"abcd")
    ddp = rank.wrap(model, **every_bucket(8))
    buckets = rank.buckets(ddp)
    with ddp.no_sync():
        inside = steps(rank, ddp, 2, rank.batch(1), tuple("dcba"), tuple("dcba"))
    synced = steps(rank, ddp, 1, rank.batch(1), tuple("bacd"))
    with ddp.no_sync():
        inside += steps(rank, ddp, 2, rank.batch(1), tuple("dcba"), tuple("dcba"))
    synced += steps(rank, ddp, 2, rank.batch(1), tuple("abcd"), tuple("abcd"))
    rank.show("started_inside", inside)
    rank.show("buckets", buckets)
    rank.law("the forward after the synced backward rebuilds", list(map(bool, inside)), [False, False, True, False])
    rank.law("no other does", synced, [0, 0, 0])
    rank.law("by the order of the synced backward", buckets, ["0 1 2 3"] + ["3 2", "0 1"] * 2)


@case(
    "rebuild.not_without_grad",
    level=OBSERVED,
    source="nn/parallel/distributed.py: if torch.is_grad_enabled() and self.reducer._rebuild_buckets():",
    needs=("register_comm_hook",),
    catalogue=("H05",),
)
def test_a_forward_without_gradients_does_not_rebuild(rank):
    """
    A forward under `no_grad` rebuilds nothing, so that a rank may evaluate alone between the first and the second step;
    neither does an iteration without backward count as the first.
    """
    ddp = rank.wrap(Scalars(*"abcd"), **every_bucket(8))
    buckets = rank.buckets(ddp)
    before = rank.collectives()
    ddp(rank.batch(1))
    ddp(rank.batch(1)).backward()
    if rank.index == 1:
        with torch.no_grad():
            ddp(rank.batch(1))
    rank.law("one all-reduce and no more", rank.collectives() - before, 1)
    started = steps(rank, ddp, 3, rank.batch(1))
    rank.show("started", started)
    rank.law("the next forward with gradients rebuilds", list(map(bool, started)), [True, False, False])
    rank.law("one bucket, then two", buckets, ["0 1 2 3"] + ["3 2", "1 0"] * 3)


@case(
    "rebuild.values_unchanged",
    level=MUST,
    source="DistributedDataParallel",
    each={"default": {}, "view": {"gradient_as_bucket_view": True}, "static_graph": {"static_graph": True}},
    catalogue=("B01", "H05"),
)
def test_training_across_the_rebuild_is_that_of_one_process(rank, options):
    """
    Training gives the same gradients and weights as one process on the whole batch, bit for bit, before and after buckets
    are rebuilt.

    Six SGD steps on a quadratic loss over three layers side by side, each in a bucket of its own once they are rebuilt; in
    float64, with small integers and a rate of 1/32, so that no gradient is rounded.
    """
    alone, model = SideBySide().to(rank.device), SideBySide()
    ddp = rank.wrap(model, **every_bucket(16), **options)
    batches = [rank.tensor(of, 1, 1, -of, dtype=torch.float64).reshape(2, 2) for of in range(rank.world_size)]
    for step in range(6):
        for module, forward, batch in ((alone, alone, torch.cat(batches)), (model, ddp, batches[rank.index])):
            module.zero_grad(set_to_none=True)
            (forward(batch) - 2).pow(2).mean().backward()
        for got, expected in zip(model.parameters(), alone.parameters(), strict=True):
            rank.law(f"step {step}: the gradient of one process", got.grad, expected.grad)
            for parameter in (got, expected):
                parameter.data -= parameter.grad / 32
    rank.law("the weights of one process", model.layers[0].weight, alone.layers[0].weight)
    rank.show("weight", model.layers[0].weight)


class SideBySide(nn.Module):
    """The sum of three bias-free Linear(2, 1), which starts at other weights in each."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(linear(2, 1, dtype=torch.float64, start=start) for start in (1, 2, 4))

    def forward(self, x):
        return sum(layer(x) for layer in self.layers)


@case(
    "rebuild.never_with_find_unused",
    level=OBSERVED,
    source=NEVER,
    needs=("find_unused_parameters", "register_comm_hook"),
    catalogue=("H06",),
    torch_tests=("distributed_test.py::DistributedTest._DistTestBase::test_different_graph_across_ranks",),
)
def test_with_find_unused_parameters_buckets_are_never_rebuilt(rank):
    """
    With `find_unused_parameters=True` and no static graph buckets are never rebuilt: they stay as the constructor made them,
    whatever order gradients become ready in.
    """
    model = Scalars(*"abcde")
    ddp = rank.wrap(model, find_unused_parameters=True, **every_bucket(8))
    buckets = rank.buckets(ddp)
    started = steps(rank, ddp, 4, rank.batch(1), *[tuple("caebd")] * 4)
    rank.show("buckets", buckets[:3])
    rank.law("as the constructor made them", buckets, carried(built(model.parameters(), [8])) * 4)
    rank.law("no forward starts a collective", started, [0] * 4)


@case(
    "rebuild.dtypes",
    level=OBSERVED,
    source=READY,
    needs=("register_comm_hook",),
    catalogue=("H05", "B04", "U01"),
)
def test_each_dtype_is_rebuilt_into_buckets_of_its_own_in_the_order_they_are_full(rank):
    """
    Each dtype is rebuilt into buckets of its own under the same limits, and all buckets stand in the order in which they
    were full.
    """
    model = Scalars(*"abcdef")
    for name in "bc":
        setattr(model, name, nn.Parameter(torch.ones(1, dtype=torch.float64)))
    ddp = rank.wrap(model, **every_bucket(8))
    buckets = rank.buckets(ddp)
    steps(rank, ddp, 4, rank.batch(1), *[tuple("abdcef")] * 4)
    rank.show("buckets", buckets)
    ready = ["abcdef".index(name) for name in reversed("abdcef")]
    rank.law("floats in pairs, doubles alone", buckets[2:], carried(rebuilt(model.parameters(), ready, [8])) * 3)


def blocks():
    """Six parameters of 512 KiB each."""
    model = Scalars(*"abcdef")
    for parameter in model.parameters():
        parameter.data = torch.ones(MIB // 8)
    return model


@case(
    "rebuild.cap_and_first_limit",
    level=OBSERVED,
    source="nn/parallel/distributed.py: first_bucket_bytes_cap",
    each={"half_mib": 0.5, "two_mib": 2, "default_given": 25},
    needs=("register_comm_hook",),
    catalogue=("H04",),
    reports=("pytorch/pytorch#121640", "pytorch/pytorch#48880"),
)
def test_whether_the_users_cap_bounds_the_first_rebuilt_bucket_too(rank, cap):
    """
    Where the user gives a cap, either it bounds every rebuilt bucket, or the first is bounded by 1 MiB; which of them
    depends on the release.

    So an explicit cap of 25 MiB, the default's value, is not the same as none where the cap bounds them all. Six parameters
    of 512 KiB.
    """
    model = blocks()
    ddp = rank.wrap(model, bucket_cap_mb=cap)
    buckets = rank.buckets(ddp)
    steps(rank, ddp, 2, rank.batch(1))
    rank.show("buckets", buckets[1:])
    limits = ([int(cap * MIB)], [FIRST_LIMIT, int(cap * MIB)])
    readings = [carried(rebuilt(model.parameters(), BACKWARD, each)) for each in limits]
    rank.law("one of the two readings", buckets[1:] in readings, True)


@case(
    "rebuild.small_bucket_first",
    level=OBSERVED,
    source="nn/parallel/distributed.py: first_bucket_bytes_cap",
    needs=("register_comm_hook",),
    catalogue=("H04", "H05"),
    reports=("pytorch/pytorch#62232",),
)
def test_without_a_cap_the_first_rebuilt_bucket_is_bounded_by_one_mebibyte(rank):
    """
    Without a cap 1 MiB bounds the first rebuilt bucket and 25 MiB the others, so the small bucket is now the one reduced
    first.

    That is the bucket of the parameters used last. Comments in torch still speak of those "defined first", which is true
    only of the buckets at construction.
    """
    model = blocks()
    ddp = rank.wrap(model)
    buckets = rank.buckets(ddp)
    steps(rank, ddp, 2, rank.batch(1))
    rank.show("buckets", buckets[1:])
    full = carried(rebuilt(model.parameters(), BACKWARD, [FIRST_LIMIT, DEFAULT_LIMIT]))
    rank.law("two of 512 KiB, then the rest", buckets[1:], full)


@case(
    "rebuild.tuned_first_limit",
    level=OBSERVED,
    source="include/torch/csrc/distributed/c10d/reducer.hpp: Bytes capacity of first bucket, can be configured by user",
    needs=("register_comm_hook",),
    catalogue=("H04",),
    reports=("pytorch/pytorch#62748", "pytorch/pytorch#61353"),
)
def test_the_first_limit_is_read_from_a_module_variable(rank):
    """
    Without a cap `dist._DEFAULT_FIRST_BUCKET_BYTES`, as it is when DDP is constructed, bounds the first rebuilt bucket.
    """
    dist._DEFAULT_FIRST_BUCKET_BYTES = 1
    model = blocks()
    ddp = rank.wrap(model)
    dist._DEFAULT_FIRST_BUCKET_BYTES = 2 * MIB  # too late
    buckets = rank.buckets(ddp)
    steps(rank, ddp, 2, rank.batch(1))
    rank.show("buckets", buckets[1:])
    rank.law("one parameter, then the rest", buckets[1:], ["5", "4 3 2 1 0"])


@case(
    "rebuild.unused_message_first",
    level=OBSERVED,
    source="DistributedDataParallel",
    catalogue=("E01", "H05"),
    reports=("pytorch/pytorch#45933", "pytorch/pytorch#46099"),
)
def test_a_parameter_without_gradient_is_reported_before_anything_is_rebuilt(rank):
    """
    Where a parameter got no gradient in the first iteration, the second forward says so, and does not fail in the rebuild.

    For a while users saw a size mismatch of the rebuild instead.
    """
    model = Scalars("a", "b")
    ddp = rank.wrap(model)
    ddp(rank.batch(1), use="a").backward()
    before = rank.collectives()
    with rank.raises(
        "second_forward", RuntimeError, match="Expected to have finished reduction in the prior iteration"
    ):
        ddp(rank.batch(1), use="a")
    rank.law("no collective of a rebuild", rank.collectives() - before, 0)


@case(
    "rebuild.static_graph_unused",
    level=OBSERVED,
    source=ONCE,
    needs=("static_graph", "register_comm_hook"),
    catalogue=("F01", "F08"),
)
def test_under_static_graph_unused_parameters_have_a_place_in_rebuilt_buckets(rank):
    """
    Under `static_graph` buckets are rebuilt also where a parameter is never used; it comes last.
    """
    model = Scalars(*"abcd")
    ddp = rank.wrap(model, static_graph=True, **every_bucket(4))
    buckets = rank.buckets(ddp)
    steps(rank, ddp, 4, rank.batch(1), *[tuple("acd")] * 4)
    rank.show("buckets", buckets[2:6])
    rank.law("the three used ones in ready order, then the unused one", buckets[2:6], ["3", "2", "0", "1"])
    rank.law("the mean of a used one", model.d.grad, rank.mean(lambda r: rank.batch(1, of=r)[0]))
