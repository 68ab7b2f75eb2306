"""A fused optimizer beside options, and in a process group of its own."""

import torch
import torch.distributed as dist
from ddp_conformance import HAZARD, MUST, case
from ddp_conformance.models import Scalars, linear

FUSED = "nn/parallel/distributed.py: Registers an optimizer with DDP such that the optimization for a"
FSDP = ("build:fsdp",)


@case(
    "optimizer_overlap.fused_options",
    level=MUST,
    source=FUSED,
    needs=FSDP,
    each={
        "view": {"gradient_as_bucket_view": True},
        "find_unused": {"find_unused_parameters": True},
        "static_graph": {"static_graph": True},
    },
    catalogue=("O01",),
)
def test_a_fused_optimizer_steps_under_every_option(rank, options):
    """A fused optimizer steps by the mean where gradients are views, where unused parameters are looked for, and in a static graph, in each iteration."""
    model = Scalars("a", "b")
    ddp = rank.wrap(model, **options)
    ddp._register_fused_optim(torch.optim.SGD, lr=1 / 64)
    mean = rank.mean(lambda r: rank.batch(1, of=r)[0])
    for count in range(1, 5):
        ddp.zero_grad()
        ddp(rank.batch(1)).backward()
        stepped = 1 - count * mean / 64
        rank.law("both have stepped", [model.a, model.b], [stepped, stepped.clone()])


@case("optimizer_overlap.fused_in_a_group", level=HAZARD, source=FUSED, needs=FSDP, catalogue=("A04", "O01"))
def test_a_fused_optimizer_forgets_the_group(rank):
    """
    With a fused optimizer gradients are reduced over the default process group, whatever group DDP was given: two groups of one rank each train by the mean of both ranks.

    The hook that steps is registered without the group. Without it each rank trains alone.
    """
    groups = [dist.new_group([r]) for r in range(rank.world_size)]
    model = linear(1)
    ddp = rank.wrap(model, process_group=groups[rank.index])
    ddp(rank.batch(1)).sum().backward()
    rank.law("without it a rank has its own", model.weight.grad, rank.batch(1))
    ddp._register_fused_optim(torch.optim.SGD, lr=1 / 64)
    mean = rank.mean(lambda r: rank.batch(1, of=r))
    for count in range(1, 4):
        ddp.zero_grad()
        ddp(rank.batch(1)).sum().backward()
        rank.law("it steps by the mean of all ranks", model.weight, 1 - count * mean / 64)
