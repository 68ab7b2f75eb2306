"""Where the broadcast of buffers blocks, kills or silently spoils something."""

import torch
from ddp_conformance import HAZARD, OBSERVED, case
from ddp_conformance.models import WithBuffers


@case(
    "buffer_traps.no_grad_forward_communicates",
    level=OBSERVED,
    source="nn/parallel/distributed.py: self._sync_buffers()",
    each={"with": True, "without": False},
    catalogue=("D01", "U12"),
    reports=("pytorch/pytorch#54059", "pytorch/pytorch#59666"),
)
def test_a_forward_under_no_grad_communicates_only_to_broadcast_buffers(rank, buffers):
    """A forward under no_grad communicates when it broadcasts buffers, and not at all in a module without buffers."""
    ddp = rank.wrap(WithBuffers(b=rank.tensor(0.0)) if buffers else WithBuffers())
    ddp(rank.batch(1)).backward()
    ddp(rank.batch(1)).backward()  # the bucket rebuild communicates too, and is now over
    before = rank.collectives()
    with torch.no_grad():
        ddp(rank.batch(1))
    rank.law("one broadcast, or nothing", rank.collectives() - before, int(buffers))


@case(
    "buffer_traps.one_rank_alone_waits",
    level=HAZARD,
    source="DistributedDataParallel",
    each={"rank_0": 0, "rank_1": 1},
    may=("hang",),
    catalogue=("D01", "D03", "B08"),
    reports=("pytorch/pytorch#54059", "pytorch/pytorch#53979", "pytorch/pytorch#89716", "pytorch/pytorch#143647"),
)
def test_one_rank_that_evaluates_a_model_with_buffers_alone_waits_for_ever(rank, alone):
    """A rank that evaluates a model with buffers alone, be it rank 0, waits for the others in the broadcast; without buffers, or by ddp.module, it does not.

    A hang takes 1 s to be seen.
    """
    bare, model = rank.wrap(WithBuffers()), WithBuffers(b=rank.tensor(0.0))
    ddp = rank.wrap(model)
    if rank.index == alone:
        with torch.no_grad():
            rank.law("without buffers", bare(rank.batch(1)), rank.batch(1).sum())
            rank.law("by ddp.module", ddp.module(rank.batch(1)), rank.batch(1).sum())
            with rank.may_wait():
                ddp(rank.batch(1))


@case(
    "buffer_traps.one_rank_alone_breaks_training",
    level=HAZARD,
    source="DistributedDataParallel",
    may=("die", "hang"),
    lanes=("gloo:cpu",),
    catalogue=("D01", "D03"),
    reports=("pytorch/pytorch#54059", "pytorch/pytorch#53979", "pytorch/pytorch#59666"),
)
def test_training_after_rank_0_evaluated_alone_dies(rank):
    """When rank 0 alone evaluates a model with buffers and training goes on, its broadcast meets another collective of its peer, which dies by SIGABRT on gloo."""
    model = WithBuffers(b=rank.tensor(0.0))
    ddp = rank.wrap(model)
    ddp(rank.batch(1)).backward()
    with rank.may_wait():
        if rank.index == 0:
            with torch.no_grad():
                ddp(rank.batch(1))
        ddp(rank.batch(1)).backward()


@case(
    "buffer_traps.version_counter",
    level=OBSERVED,
    source="nn/parallel/distributed.py: with torch.autograd._unsafe_preserve_version_counter(",
    catalogue=("D06",),
    reports=("pytorch/pytorch#22095", "pytorch/pytorch#175024"),
)
def test_how_often_a_broadcast_counts_as_a_change(rank):
    """How far one broadcast moves the version counter of the buffer, by which autograd notices changes in place."""
    model = WithBuffers(b=rank.tensor(0.0))
    ddp = rank.wrap(model)
    before = model.b._version
    ddp(rank.batch(1))
    rank.show("moved_by", model.b._version - before)


@case(
    "buffer_traps.overwritten_under_the_graph",
    level=HAZARD,
    source="nn/parallel/distributed.py: with torch.autograd._unsafe_preserve_version_counter(",
    catalogue=("D06",),
    reports=("pytorch/pytorch#22095",),
)
def test_a_broadcast_overwrites_what_an_earlier_forward_saved(rank):
    """A broadcast overwrites a buffer that an earlier forward saved for its backward; where the version counter is kept, that backward uses the new value without an error.

    Rank 0 assigns its buffer anew between two forwards. The gradient of the first forward's output is then the input
    times the old value on rank 0 and times the new one on rank 1. Taken by autograd.grad, which nothing reduces.
    """

    class Scaled(WithBuffers):
        def forward(self, x):
            return (self.weight * self.b * x).sum()

    model = Scaled(b=rank.tensor(2.0))
    ddp = rank.wrap(model)
    own = rank.batch(1)
    first = ddp(own)
    if rank.index == 0:
        model.b = rank.tensor(5.0)
    ddp(own)
    try:
        (gradient,) = torch.autograd.grad(first, model.weight)
        rank.show("gradient_per_input", gradient / own[0])
    except RuntimeError as error:
        refused = "modified by an inplace operation" in str(error)
        rank.show("gradient_per_input", "refused: modified in place" if refused else "another error")
    rank.law("the second forward brought rank 0's new buffer", model.b.detach(), rank.tensor(5.0))


@case(
    "buffer_traps.sets_are_not_compared",
    level=HAZARD,
    source="DistributedDataParallel",
    lanes=("gloo:cpu",),
    each={"fewer_on_rank_0": 1, "more_on_rank_0": 0},
    may=("die",),
    catalogue=("D01", "A05"),
    reports=("Tencent/YOLO-Master#154",),
)
def test_buffers_are_not_compared_at_construction(rank, richer):
    """Whether ranks have the same buffers is not verified: where rank 0 has fewer, the surplus keeps its own values; where it has more, gloo kills the peer by SIGABRT."""
    own = rank.index + 1.0
    model = WithBuffers(a=rank.tensor(own), **({"b": rank.tensor(own)} if rank.index == richer else {}))
    ddp = rank.wrap(model)
    for _ in range(2):
        model.a.fill_(own)
        ddp(rank.batch(1)).backward()
        expected = {"a": rank.tensor(1.0)}
        rank.law("rank 0's, and the surplus", model.seen, expected | ({"b": rank.tensor(own)} if rank.index else {}))
    rank.show("seen", model.seen)
