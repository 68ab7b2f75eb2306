"""A fused optimizer in more than the simplest place: several buckets, and an optimizer with a state of its own."""

import torch
from ddp_conformance import MUST, case
from ddp_conformance.models import Quadratic
from torch import nn

FUSED = "nn/parallel/distributed.py: Registers an optimizer with DDP such that the optimization for a"
FSDP = ("build:fsdp",)


class TwoKinds(nn.Module):
    """A parameter in single and one in double precision, each 1.0, so that there are two buckets; the gradient of each is x."""

    def __init__(self):
        super().__init__()
        self.a = nn.Parameter(torch.ones(1))
        self.b = nn.Parameter(torch.ones(1, dtype=torch.float64))

    def forward(self, x):
        return (self.a * x).sum() + (self.b * x).sum()


@case("optimizer_overlap.fused_buckets", level=MUST, source=FUSED, needs=FSDP, world=(1, 2), catalogue=("O01",))
def test_a_fused_optimizer_steps_the_parameters_of_every_bucket(rank):
    """A fused optimizer steps the parameters of every bucket, in each iteration."""
    model = TwoKinds()
    ddp = rank.wrap(model)
    ddp._register_fused_optim(torch.optim.SGD, lr=1 / 64)
    mean = float(rank.mean(lambda r: rank.batch(1, of=r)))
    for count in range(1, 4):
        ddp.zero_grad()
        ddp(rank.batch(1)).backward()
        stepped = rank.tensor(1 - count * mean / 64)
        rank.law("both have stepped", [model.a, model.b], [stepped, stepped.double()])


@case(
    "optimizer_overlap.fused_kinds",
    level=MUST,
    source=FUSED,
    needs=FSDP,
    world=1,
    each={"adam": torch.optim.Adam, "adamw": torch.optim.AdamW},
    catalogue=("O01",),
)
def test_a_fused_optimizer_is_the_one_that_was_registered(rank, kind):
    """The optimizer that is registered is the one that steps: with Adam or AdamW and weight decay parameters go where that optimizer alone takes them."""
    model, alone = Quadratic(), Quadratic().to(rank.device)
    ddp = rank.wrap(model)
    ddp._register_fused_optim(kind, lr=1 / 8, weight_decay=0.25)
    optimizer = kind(alone.parameters(), lr=1 / 8, weight_decay=0.25)
    x = rank.batch(1, dtype=torch.float64)
    for _ in range(3):
        ddp.zero_grad()
        ddp(x).backward()
        optimizer.zero_grad()
        alone(x).backward()
        optimizer.step()
        rank.law("as the optimizer alone", [model.v, model.w], [alone.v, alone.w])
