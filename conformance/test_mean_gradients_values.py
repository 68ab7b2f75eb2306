"""Gradients whose values or shapes are easily lost on the way: fine, large, negative, infinite ones, and those of numbers."""

import torch
from ddp_conformance import MUST, OBSERVED, case
from ddp_conformance.models import Scalars, linear
from torch import nn

DIVIDES = "distributed/algorithms/ddp_comm_hooks/default_hooks.py: to avoid overflow"


@case(
    "mean_gradients.double_precision",
    level=MUST,
    source="DistributedDataParallel",
    each={"default": {}, "view": {"gradient_as_bucket_view": True}},
    catalogue=("B01", "B04"),
)
def test_a_double_gradient_keeps_its_last_bits(rank, options):
    """Gradients in double precision are averaged in double precision: bits that single precision lacks are there."""
    model = linear(2, dtype=torch.float64)
    ddp = rank.wrap(model, **options)

    def fed(r):
        return rank.batch(2, of=r, dtype=torch.float64) * (1 + 2.0**-40)

    for _ in range(3):
        model.zero_grad()
        ddp(fed(rank.index)).sum().backward()
        rank.law("the mean, to the last bit", model.weight.grad, rank.mean(fed))


@case("mean_gradients.any_magnitude", level=MUST, source="DistributedDataParallel", catalogue=("B01",), world=(2, 3))
def test_a_gradient_of_any_size_and_sign_is_averaged(rank):
    """Large gradients, as a scaled loss makes them, small ones and negative ones are averaged as they are."""
    model = linear(3)
    ddp = rank.wrap(model)
    factors = rank.tensor(2.0**40, 2.0**-40, -1.0)
    ddp(rank.batch(3) * factors).sum().backward()
    rank.law("the mean", model.weight.grad, rank.mean(lambda r: rank.batch(3, of=r)) * factors)
    rank.show("gradient", model.weight.grad)


@case(
    "mean_gradients.overflow",
    level=MUST,
    source="DistributedDataParallel",
    each={"inf": float("inf"), "minus_inf": float("-inf"), "nan": float("nan")},
    world=(2, 3),
    catalogue=("B01",),
)
def test_what_overflows_on_one_rank_overflows_on_all(rank, value):
    """Where one rank's gradient is infinite or not a number, so is every rank's, and its neighbours are means as ever.

    So a gradient scaler that looks for such gradients skips the step on all ranks or on none.
    """
    model = linear(2)
    ddp = rank.wrap(model)
    fed = rank.batch(2)
    if rank.index == rank.world_size - 1:
        fed[0, 0] = value
    ddp(fed).sum().backward()
    overflown, neighbour = model.weight.grad[0]
    rank.law("the overflow arrives", str(overflown.item()), str(value))
    rank.law("its neighbour is the mean", neighbour, rank.mean(lambda r: rank.batch(2, of=r))[0, 1])


@case(
    "mean_gradients.bfloat16_range",
    level=OBSERVED,
    source=DIVIDES,
    world=(2, 3),
    catalogue=("B03", "B04"),
    reports=("pytorch/pytorch#113557",),
)
def test_a_bfloat16_gradient_may_be_larger_than_half_precision_goes(rank):
    """Gradients in bfloat16 that are past the largest number of float16 keep their mean."""
    model = Scalars("a", dtype=torch.bfloat16)
    ddp = rank.wrap(model)

    def fed(r):
        return rank.batch(1, of=r, dtype=torch.bfloat16)[0] * 2.0**20

    for _ in range(3):
        model.zero_grad()
        ddp(fed(rank.index)).backward()
        rank.law("the mean", model.a.grad, rank.mean(fed))


class Scaled(nn.Module):
    """A linear layer whose output is scaled by a learned number, as CLIP's is: a parameter without dimensions."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.inner = linear(1)

    def forward(self, x):
        return self.scale * self.inner(x).sum()


@case(
    "mean_gradients.without_dimensions",
    level=MUST,
    source="DistributedDataParallel",
    each={"default": {}, "view": {"gradient_as_bucket_view": True}, "find_unused": {"find_unused_parameters": True}},
    world=(2, 3),
    catalogue=("B01",),
)
def test_a_parameter_without_dimensions_gets_its_mean(rank, options):
    """A parameter without dimensions, a learned number, gets the mean as others do, and its gradient has none either."""
    model = Scaled()
    ddp = rank.wrap(model, **options)
    mean = rank.mean(lambda r: rank.batch(1, of=r))
    for _ in range(3):
        model.zero_grad()
        ddp(rank.batch(1)).backward()
        rank.law("the number's mean", model.scale.grad, mean.reshape(()))
        rank.law("the layer's mean", model.inner.weight.grad, 2 * mean)


@case(
    "mean_gradients.not_of_inputs",
    level=MUST,
    source="DistributedDataParallel",
    each={"default": {}, "find_unused": {"find_unused_parameters": True}, "static_graph": {"static_graph": True}},
    world=(2, 3),
    catalogue=("B01",),
)
def test_an_inputs_gradient_is_the_ranks_own(rank, options):
    """Gradients of parameters are averaged, an input's is not: it is what the module alone gives on that rank."""
    model = linear(2)
    ddp = rank.wrap(model, **options)
    for _ in range(3):
        fed = rank.batch(2).requires_grad_()
        (ddp(fed).sum() * (rank.index + 1)).backward()
        rank.law("the input's own", fed.grad, torch.full_like(fed, rank.index + 1))


@case("mean_gradients.autocast", level=MUST, source="DistributedDataParallel", world=(2, 3), catalogue=("B04",))
def test_autocast_reaches_the_module(rank):
    """Under autocast the wrapped module computes in the narrow dtype, and gradients are means in the parameters' own."""
    model = linear(2)
    ddp = rank.wrap(model)
    for _ in range(3):
        model.zero_grad()
        with torch.autocast(rank.device.type, dtype=torch.bfloat16):
            output = ddp(rank.batch(2))
        rank.law("the output is narrow", output.dtype, torch.bfloat16)
        output.sum().backward()
        rank.law("the mean", model.weight.grad, rank.mean(lambda r: rank.batch(2, of=r)))
