"""Whatever values ranks hold, of parameters and of buffers, they go on with those of rank 0."""

import torch
from ddp_conformance import MUST, case
from ddp_conformance.models import WithBuffers, linear
from torch import nn

VALUES = {
    "f64": (torch.float64, 1 + 2.0**-40),
    "bf16": (torch.bfloat16, 2.0**20),
    "i64": (torch.int64, 2**53 + 1),
    "i32": (torch.int32, 2**24 + 1),
}
"""A dtype and a value of it that is lost, rounded or infinite, in any narrower one and in single or half precision."""


@case(
    "rank0_broadcast.every_bit",
    level=MUST,
    source="DistributedDataParallel",
    each=VALUES,
    catalogue=("A02", "A05", "D01"),
    reports=("pytorch/pytorch#113557",),
)
def test_values_that_need_every_bit_arrive_as_they_are(rank, chosen):
    """Values that need every bit of their dtype, or all of its range, arrive as rank 0 holds them: in parameters and in buffers, at construction and in a forward."""
    dtype, value = chosen
    held = torch.full((2,), value if rank.index == 0 else 1, dtype=dtype)
    model = WithBuffers(b=held)
    model.frozen = nn.Parameter(held.clone(), requires_grad=False)
    ddp = rank.wrap(model)
    expected = torch.full((2,), value, dtype=dtype, device=rank.device)
    rank.law("the parameter", model.frozen, expected)
    rank.law("the buffer at construction", model.b, expected)
    if rank.index:
        model.b.fill_(1)
    ddp(rank.batch(1))
    rank.law("the buffer in a forward", model.seen["b"], expected)


@case(
    "rank0_broadcast.over_any_value",
    level=MUST,
    source="DistributedDataParallel",
    each={"nan": float("nan"), "inf": float("inf")},
    world=(2, 3),
    catalogue=("A02", "A05", "D01"),
)
def test_what_other_ranks_hold_does_not_matter(rank, value):
    """Where other ranks hold infinity or what is not a number, they go on with rank 0's parameters and buffers all the same, at construction and in a forward."""
    model = WithBuffers(b=rank.tensor(value if rank.index else 5.0))
    nn.init.constant_(model.weight, value if rank.index else 3.0)
    ddp = rank.wrap(model)
    rank.law("rank 0's parameter", model.weight, rank.tensor(3.0))
    rank.law("rank 0's buffer at construction", model.b, rank.tensor(5.0))
    model.b.fill_(value if rank.index else 7.0)
    ddp(rank.batch(1))
    rank.law("rank 0's buffer in a forward", model.seen["b"], rank.tensor(7.0))


@case("rank0_broadcast.frozen_layer", level=MUST, source="DistributedDataParallel", catalogue=("A03", "A05"))
def test_a_frozen_layer_with_buffers_begins_as_on_rank_0(rank):
    """A frozen layer that has parameters and buffers, as a BatchNorm, begins with rank 0's in both."""
    model = nn.Sequential(linear(2), nn.BatchNorm1d(1).requires_grad_(False))
    nn.init.constant_(model[1].weight, rank.index + 5.0)
    nn.init.constant_(model[1].running_mean, rank.index + 7.0)
    rank.wrap(model)
    rank.law("its weight", model[1].weight, rank.tensor(5.0))
    rank.law("its running mean", model[1].running_mean, rank.tensor(7.0))
