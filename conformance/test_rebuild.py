"""After the first iteration buckets are rebuilt: in which forward, once, and with no change to any value."""

import torch
from ddp_conformance import MUST, OBSERVED, case
from ddp_conformance.models import Scalars, linear, three_layers
from ddp_conformance.reference import (
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
