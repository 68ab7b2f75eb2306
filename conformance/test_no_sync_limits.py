"""How far no_sync reaches: which modules, which calls, and what it leaves on each rank."""

import torch
from ddp_conformance import HAZARD, OBSERVED, case
from ddp_conformance.models import Scalars, linear
from torch import nn


@case(
    "no_sync_limits.rebuild_happens_inside",
    level=OBSERVED,
    source="nn/parallel/distributed.py: self.reducer._rebuild_buckets()",
    needs=("no_sync",),
    catalogue=("C01", "H05"),
)
def test_the_bucket_rebuild_communicates_even_inside(rank):
    """The bucket rebuild that the second forward is due for communicates even when that forward is inside no_sync.

    What follows it inside no_sync stays local.
    """
    ddp = rank.wrap(Scalars("a", "b"))
    own = rank.batch(1)
    ddp(own).backward()
    ddp.zero_grad(set_to_none=True)
    before = rank.collectives()
    with ddp.no_sync():
        out = ddp(own)
        rank.show("in_the_second_forward", rank.collectives() - before)
        rank.differs("the second forward communicates inside no_sync", rank.collectives() - before, 0)
        before = rank.collectives()
        out.backward()
        ddp(own).backward()
    rank.law("the rest does not", rank.collectives() - before, 0)
    rank.law("gradients stay local", ddp.module.a.grad, 2 * own[0])


@case(
    "no_sync_limits.off_by_one",
    level=HAZARD,
    source="DistributedDataParallel.no_sync",
    needs=("no_sync",),
    catalogue=("C01",),
    reports=("modelscope/FunASR#3472",),
)
def test_what_is_accumulated_after_the_last_sync_stays_local(rank):
    """A window that syncs its first micro-batch and runs the last one under no_sync leaves each rank its own last gradient, and weights part without an error."""
    model = linear(2, dtype=torch.float64)
    ddp = rank.wrap(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1 / 16)
    own = rank.batch(2, dtype=torch.float64)
    local = torch.zeros_like(model.weight)
    for _ in range(4):
        optimizer.zero_grad()
        ddp(own).sum().backward()
        with ddp.no_sync():
            ddp(own).sum().backward()
        expected = rank.mean(lambda r: rank.batch(2, of=r, dtype=torch.float64)) + own
        rank.law("the mean of the first and the rank's own last", model.weight.grad, expected)
        optimizer.step()
        local -= expected / 16
    rank.show("weights", model.weight)
    rank.law("weights go the rank's own way", model.weight.data, 1 + local)


@case(
    "no_sync_limits.silences_its_own_module_only",
    level=OBSERVED,
    source="nn/parallel/distributed.py: self.require_backward_grad_sync = False",
    needs=("no_sync",),
    catalogue=("C01",),
    reports=("huggingface/accelerate#1708",),
)
def test_no_sync_of_one_module_does_not_silence_another(rank):
    """The no_sync of one DDP module does not silence another: two models in one loop need two contexts."""
    first, second = linear(2), linear(2)
    ddp, other = rank.wrap(first), rank.wrap(second)
    own, mean = rank.batch(2), rank.mean(lambda r: rank.batch(2, of=r))
    with ddp.no_sync():
        (ddp(own) + other(own)).sum().backward()
    rank.law("the silenced module keeps its own gradient", first.weight.grad, own)
    rank.law("the other is synced", second.weight.grad, mean)
    with ddp.no_sync(), other.no_sync():
        (ddp(own) + other(own)).sum().backward()
    rank.law("both silenced", [first.weight.grad, second.weight.grad], [2 * own, mean + own])


@case(
    "no_sync_limits.does_not_reach_an_inner_module",
    level=OBSERVED,
    source="nn/parallel/distributed.py: self.require_backward_grad_sync = False",
    needs=("no_sync",),
    catalogue=("C01",),
    reports=("huggingface/accelerate#1708",),
)
def test_no_sync_of_the_outer_module_does_not_silence_a_ddp_inside_it(rank):
    """The no_sync of an outer DDP module does not silence a DDP module inside it: the inner gradients are averaged, the others stay local."""
    inner, head = linear(2, 2), linear(2)
    outer = rank.wrap(nn.Sequential(rank.wrap(inner), head))
    own = rank.batch(2)
    with outer.no_sync():
        outer(own).sum().backward()
    rank.show("gradients", [inner.weight.grad, head.weight.grad])
    rank.law(
        "the inner module's gradients are the mean",
        inner.weight.grad,
        rank.mean(lambda r: rank.batch(2, of=r)).repeat(2, 1),
    )
    rank.law("the outer module's own stay local", head.weight.grad, 2 * own)


@case(
    "no_sync_limits.windows_may_differ",
    level=OBSERVED,
    source="DistributedDataParallel.no_sync",
    world=3,
    needs=("no_sync",),
    catalogue=("C01",),
)
def test_ranks_may_accumulate_different_numbers_of_micro_batches(rank):
    """Nothing is communicated inside no_sync, so ranks may accumulate different numbers of micro-batches; the divisor stays the world size."""
    model = linear(2)
    ddp = rank.wrap(model)
    with ddp.no_sync():
        for _ in range(rank.index):  # none on rank 0, one on rank 1, two on rank 2
            ddp(rank.batch(2)).sum().backward()
    ddp(rank.batch(2)).sum().backward()
    expected = rank.mean(lambda r: (r + 1) * rank.batch(2, of=r))
    rank.law("the mean of what each rank accumulated", model.weight.grad, expected)


@case(
    "no_sync_limits.inner_call_is_local",
    level=OBSERVED,
    source="DistributedDataParallel",
    needs=("no_sync",),
    catalogue=("C01", "B13"),
    torch_tests=("test_c10d_nccl.py::DistributedDataParallelTest::test_accumulate_gradients_module",),
    reports=("pytorch/pytorch#21736", "pytorch/pytorch#20282"),
)
def test_calling_the_inner_module_accumulates_like_no_sync(rank):
    """Calling the wrapped module itself accumulates local gradients as no_sync does; the next synced step reduces their sum."""
    model = linear(2)
    ddp = rank.wrap(model)
    own = rank.batch(2)
    for _ in range(2):
        before = rank.collectives()
        ddp.module(own).sum().backward()
        rank.law("the inner module communicates nothing", rank.collectives() - before, 0)
        rank.law("its gradient is the rank's own", model.weight.grad, own)
        ddp(own).sum().backward()
        rank.law("the synced step reduces the sum", model.weight.grad, 2 * rank.mean(lambda r: rank.batch(2, of=r)))
        ddp.zero_grad(set_to_none=True)
