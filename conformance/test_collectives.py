"""Where ranks wait for each other: how many collectives construction, forward and backward start."""

import time
from collections import namedtuple

import torch
import torch.distributed as dist
from ddp_conformance import HAZARD, MUST, OBSERVED, case
from ddp_conformance.models import Buffered, Opaque, Scalars, linear

DELAY = 0.15
"""Seconds by which one rank is late, so that a rank which does not wait for it is seen not to."""


def late(rank):
    """Say that this rank is about to begin, the first rank only after a while; returns how to ask who has begun."""
    store = dist.distributed_c10d._get_default_store()
    if rank.index == 0:
        time.sleep(DELAY)
    store.add(f"begun{rank.index}", 1)
    return lambda: [store.add(f"begun{r}", 0) for r in range(rank.world_size)]


@case(
    "collectives.constructor_waits",
    level=MUST,
    source="DistributedDataParallel",
    world=(2, 3),
    catalogue=("B08",),
    lanes=("*:cpu",),
)
def test_the_constructor_waits_for_every_rank(rank):
    """The constructor is a synchronization point: when it returns on one rank, every rank has entered it.

    No time is measured: each rank says in a store that it enters, the first rank after 0.15 s.
    """
    model = linear(1)
    begun = late(rank)
    rank.wrap(model)
    rank.law("every rank has entered the constructor", begun(), [1] * rank.world_size)


@case(
    "collectives.backward_waits",
    level=MUST,
    source="DistributedDataParallel",
    world=(2, 3),
    catalogue=("B08",),
    lanes=("*:cpu",),
)
def test_backward_waits_for_every_rank(rank):
    """Backward is a synchronization point: when it returns on one rank, every rank has entered it."""
    ddp = rank.wrap(linear(1))
    loss = ddp(rank.batch(1)).sum()
    begun = late(rank)
    loss.backward()
    rank.law("every rank has entered backward", begun(), [1] * rank.world_size)


@case(
    "collectives.forward_waits_for_buffers",
    level=MUST,
    source="DistributedDataParallel",
    world=(2, 3),
    catalogue=("B08",),
    lanes=("*:cpu",),
)
def test_forward_waits_for_the_first_ranks_buffers(rank):
    """The forward of a module with buffers is a synchronization point: when it returns, the first rank has entered it."""
    ddp = rank.wrap(Buffered())
    begun = late(rank)
    ddp(rank.batch(1))
    rank.law("the first rank has entered forward", begun()[0], 1)


@case(
    "collectives.forward_alone",
    level=HAZARD,
    source="DistributedDataParallel",
    world=(2, 3),
    catalogue=("B08",),
)
def test_the_forward_of_a_module_without_buffers_waits_for_nobody(rank):
    """The first forward of a module without buffers is no synchronization point, though the documentation calls the forward method one.

    All other ranks finish theirs before the first rank begins. The sentence holds for modules with buffers, and for the
    forward that rebuilds buckets.
    """
    ddp = rank.wrap(linear(1))
    store = dist.distributed_c10d._get_default_store()
    if rank.index == 0:
        store.wait([f"finished{r}" for r in range(1, rank.world_size)])
    output = ddp(rank.batch(1))
    store.set(f"finished{rank.index}", "yes")
    if rank.index == 0:
        others = [store.get(f"finished{r}") for r in range(1, rank.world_size)]
        rank.law("all others have finished before the first begins", others, [b"yes"] * (rank.world_size - 1))
    output.sum().backward()
    rank.law("the iteration ends with the mean", ddp.module.weight.grad, rank.mean(lambda r: rank.batch(1, of=r)))


@case(
    "collectives.counted",
    level=OBSERVED,
    source="DistributedDataParallel",
    each={
        "default": {},
        "find_unused": {"find_unused_parameters": True},
        "static_graph": {"static_graph": True},
        "view": {"gradient_as_bucket_view": True},
    },
    reports=("pytorch/pytorch#79049", "pytorch/pytorch#76043"),
)
def test_collectives_are_counted(rank, options):
    """Construction, forwards and backwards start a fixed number of collectives: one all-reduce a bucket, two broadcasts in the forward that rebuilds buckets, one all-reduce more a backward where unused parameters are looked for."""
    before = rank.collectives()
    ddp = rank.wrap(Scalars("a", "b"), **options)
    rank.show("constructor", rank.collectives() - before)
    forwards, backwards = count(rank, ddp, rank.batch(1))
    rank.show("forwards", forwards)
    rank.show("backwards", backwards)
    extra = 1 if options.get("find_unused_parameters") else 0
    rank.law("later backwards reduce one bucket", backwards[2:], [1 + extra] * 2)
    rank.law("the first and the last forward start none", [forwards[0], forwards[-1]], [0, 0])


def count(rank, ddp, x):
    """The collectives started by each of four forwards, and by each of their backwards."""
    forwards, backwards = [], []
    for _ in range(4):
        before = rank.collectives()
        loss = ddp(x).sum()
        forwards.append(rank.collectives() - before)
        before = rank.collectives()
        loss.backward()
        backwards.append(rank.collectives() - before)
    return forwards, backwards


@case("collectives.buffers", level=OBSERVED, source="DistributedDataParallel", catalogue=("D01",))
def test_buffers_add_one_broadcast_a_forward(rank):
    """A module with buffers starts one broadcast more in every synchronized forward."""
    with_buffers, without = rank.wrap(Buffered()), rank.wrap(linear(1))
    ours, theirs = count(rank, with_buffers, rank.batch(1)), count(rank, without, rank.batch(1))
    rank.law("one collective more a forward", ours[0], [each + 1 for each in theirs[0]])
    rank.law("none more a backward", ours[1], theirs[1])


@case("collectives.no_sync", level=MUST, source="DistributedDataParallel.no_sync", world=(2, 3), catalogue=("C01",))
def test_no_sync_starts_no_collective(rank):
    """Inside no_sync, forward and backward of a module without buffers start no collective, so ranks may take different numbers of steps."""
    model = linear(1)
    ddp = rank.wrap(model)
    ddp(rank.batch(1)).sum().backward()
    ddp(rank.batch(1)).sum().backward()
    model.weight.grad = None
    before = rank.collectives()
    with ddp.no_sync():
        for _ in range(1 + rank.index):
            ddp(rank.batch(1)).sum().backward()
    rank.law("none was started", rank.collectives() - before, 0)
    ddp(rank.batch(1)).sum().backward()
    expected = rank.mean(lambda r: (2 + r) * rank.batch(1, of=r))
    rank.law("the next step reduces what each has accumulated", model.weight.grad, expected)


@case(
    "collectives.profiler_ranges",
    level=OBSERVED,
    source="nn/parallel/distributed.py: DistributedDataParallel.forward",
    each={"default": {}, "find_unused": {"find_unused_parameters": True}},
    catalogue=("U26",),
    lanes=("gloo:cpu",),
)
def test_the_profiler_names_what_ddp_does(rank, options):
    """In a profile the forward, the search for unused parameters, the copies back and each all-reduce have ranges of their own."""
    ddp = rank.wrap(Scalars("a", "b"), **options)
    with torch.autograd.profiler.profile() as profile:
        for _ in range(2):
            ddp(rank.batch(1)).backward()
    names = [event.name for event in profile.function_events]
    ours = sorted({name for name in names if "istributed" in name or name.startswith("gloo:")})
    rank.show("ranges", ours)
    rank.law("a range for each forward", names.count("DistributedDataParallel.forward"), 2)
    searched = names.count("torch.distributed.ddp.reducer::search_unused_parameters")
    rank.law("unused parameters are searched for when asked", searched, 2 if options else 0)


Pair = namedtuple("Pair", ("one", "two"))


@case(
    "collectives.inputs_moved",
    level=MUST,
    source="DistributedDataParallel",
    each={
        "tuple": lambda x: (x, x),
        "list": lambda x: [x, x],
        "dict": lambda x: {"one": x, "two": x},
        "namedtuple": lambda x: Pair(x, x),
        "packed_sequence": lambda x: torch.nn.utils.rnn.pack_sequence([x[0], x[0]]),
    },
    needs=("device:cuda",),
    lanes=("*:cuda",),
    catalogue=("B15",),
    torch_tests=(
        "torch/testing/_internal/distributed/distributed_test.py::DistributedTest._DistTestBase::test_ddp_device",
        "torch/testing/_internal/distributed/distributed_test.py::DistributedTest._DistTestBase::test_ddp_namedtuple",
        "test/distributed/test_c10d_nccl.py::DistributedDataParallelTest::test_ddp_packed_sequence",
    ),
)
def test_inputs_are_moved_to_the_device(rank, pack):
    """With device_ids, inputs on the CPU are moved to that device, in containers too, which keep their type; objects that DDP does not know are left alone."""

    class Model(torch.nn.Linear):
        def forward(self, packed, opaque):
            inputs = (
                packed.values() if isinstance(packed, dict) else packed
            )  # a PackedSequence is a tuple of its data first
            first = next(iter(inputs))
            rank.law("the input is on the device", first.device, rank.device)
            rank.law("the container keeps its type", type(packed).__name__, type(pack(torch.ones(1, 1))).__name__)
            rank.law("an unknown object stays where it was", opaque.tensor.device, torch.device("cpu"))
            return super().forward(first)

    ddp = rank.wrap(Model(1, 1))
    ddp(pack(torch.ones(1, 1)), Opaque(torch.ones(1))).sum().backward()
