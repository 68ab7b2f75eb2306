"""What is registered along with a fused optimizer reaches it."""

import torch
from ddp_conformance import MUST, case
from ddp_conformance.models import Quadratic


@case(
    "optimizer_overlap.fused_arguments",
    level=MUST,
    source="DistributedDataParallel._register_fused_optim",
    needs=("build:fsdp",),
    world=1,
    each={
        "by_name": ((), {"lr": 1 / 8, "momentum": 0.5, "weight_decay": 0.25}),
        "by_position": ((1 / 8, 0.5, 0.0, 0.25), {}),  # the third is dampening
    },
    catalogue=("O01",),
)
def test_a_fused_optimizer_is_handed_its_arguments(rank, arguments):
    """Arguments registered along with a fused optimizer reach it: with momentum and weight decay, parameters go where the optimizer alone takes them."""
    model, alone = Quadratic(), Quadratic().to(rank.device)
    ddp = rank.wrap(model)
    positional, named = arguments
    ddp._register_fused_optim(torch.optim.SGD, *positional, **named)
    optimizer = torch.optim.SGD(alone.parameters(), *positional, **named)
    x = rank.batch(1, dtype=torch.float64)
    for _ in range(3):
        ddp.zero_grad()
        ddp(x).backward()
        optimizer.zero_grad()
        alone(x).backward()
        optimizer.step()
        rank.law("as the optimizer alone", [model.v, model.w], [alone.v, alone.w])
