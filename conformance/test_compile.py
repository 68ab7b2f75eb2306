"""DDP and torch.compile: whichever wraps the other, gradients are the same means."""

import torch
from ddp_conformance import OBSERVED, case
from ddp_conformance.models import linear


@case(
    "compile.either_order",
    level=OBSERVED,
    source="nn/parallel/distributed.py: used to track whether the given thread is inside ddp forward for torchdynamo purposes",
    each={"compiled_ddp": "outside", "ddp_of_compiled": "inside"},
    needs=("torch.compile", "build:compile"),
    reports=("pytorch/pytorch#109261", "pytorch/pytorch#104674", "pytorch/pytorch#108269", "pytorch/pytorch#118984"),
)
def test_compiled_before_or_after_wrapping_gradients_are_the_mean(rank, place):
    """
    A model compiled before or after it is wrapped gets the mean over ranks in every iteration, as it does uncompiled.

    The backend is `eager`, which compiles nothing and shows what DDP and dynamo make of each other. Takes seconds, for
    every rank imports the rest of dynamo.
    """
    model = linear(2).to(rank.device)
    if place == "inside":
        ddp = rank.wrap(torch.compile(model, backend="eager"))
    else:
        ddp = torch.compile(rank.wrap(model), backend="eager")
    for step in range(4):
        model.zero_grad()
        ddp(rank.batch(2) + rank.world_size * step).sum().backward()
        expected = rank.mean(lambda r, step=step: rank.batch(2, of=r) + rank.world_size * step)
        rank.law(f"step {step}: the mean", model.weight.grad, expected)
    rank.show("last", model.weight.grad)
