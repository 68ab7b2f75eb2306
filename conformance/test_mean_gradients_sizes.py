"""The mean where gradients are many numbers, or were cleared at another moment than usual."""

import torch
from ddp_conformance import MUST, case
from ddp_conformance.models import linear
from torch import nn

AVERAGED = "nn/parallel/distributed.py: between different nodes are averaged"


class Table(nn.Module):
    """A single long parameter; its gradient is k + 1 times x in element k."""

    def __init__(self, size):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size))

    def forward(self, x):
        return (self.weight * torch.arange(1.0, len(self.weight) + 1, device=x.device)).sum() * x.sum()


@case("mean_gradients.long_parameter", level=MUST, source=AVERAGED, catalogue=("B01",))
def test_every_element_of_a_long_parameter_gets_its_mean(rank):
    """In a parameter of three million elements every one gets its mean."""
    model = Table(3 * 2**20)
    ddp = rank.wrap(model)
    expected = (
        torch.arange(1.0, len(model.weight) + 1, device=rank.device) * rank.mean(lambda r: rank.batch(1, of=r))[0]
    )
    for _ in range(2):
        model.zero_grad()
        ddp(rank.batch(1)).backward()
        rank.law("how many elements differ", int((model.weight.grad != expected).sum()), 0)


@case(
    "mean_gradients.cleared_between",
    level=MUST,
    source=AVERAGED,
    each={
        f"{name}_to_{'none' if none else 'zero'}": (options, none)
        for name, options in (
            ("default", {}),
            ("find_unused", {"find_unused_parameters": True}),
            ("static_graph", {"static_graph": True}),
            ("view", {"gradient_as_bucket_view": True}),
        )
        for none in (True, False)
    },
    catalogue=("B01",),
)
def test_gradients_may_be_cleared_between_forward_and_backward(rank, setting):
    """Gradients may be cleared between forward and backward, as many training loops do, to None or to zero: the step gives the mean."""
    options, none = setting
    model = nn.Sequential(linear(2, 2), linear(2, 1))
    ddp = rank.wrap(model, **options)
    for _ in range(4):
        loss = ddp(rank.batch(2)).sum()
        model.zero_grad(set_to_none=none)
        loss.backward()
        mean = rank.mean(lambda r: rank.batch(2, of=r))
        rank.law("the means", [model[0].weight.grad, model[1].weight.grad], [mean.expand(2, 2), 2 * mean])
