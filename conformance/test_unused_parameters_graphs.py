"""Graphs and models that try the search for unused parameters: very deep, full of forks, and hundreds of parameters."""

import torch
from ddp_conformance import MUST, case
from ddp_conformance.models import Scalars
from torch import nn

UNTOUCHED = "nn/parallel/distributed.py: param.grad field is not touched"


class Shaped(nn.Module):
    """Two scalar parameters, 1.0 each, of which `b` is never used; `shape` makes a graph of what `a` gives."""

    def __init__(self, shape):
        super().__init__()
        self.a = nn.Parameter(torch.ones(1))
        self.b = nn.Parameter(torch.ones(1))
        self.shape = shape

    def forward(self, x):
        return self.shape(self.a * x)


def deep(x):
    """Five thousand operations in a row, the result being x."""
    for _ in range(2500):
        x = x + 1.0
        x = x - 1.0
    return x


def forked(x):
    """A hundred times x/2 + x/2, as residual connections do: 2**100 ways lead through the graph, the result being x."""
    for _ in range(100):
        x = x / 2 + x / 2
    return x


@case(
    "unused_parameters.any_graph",
    level=MUST,
    source="nn/parallel/distributed.py: Traverse the autograd graph from all tensors contained in the return value of the",
    each={"deep": deep, "forked": forked},
    catalogue=("E03",),
)
def test_a_graph_of_any_shape_is_searched(rank, shape):
    """With find_unused_parameters=True the graph may be thousands of operations deep, and fork and join as often as it likes: what it uses gets the mean, what it does not keeps None."""
    model = Shaped(shape)
    ddp = rank.wrap(model, find_unused_parameters=True)
    for _ in range(2):
        model.zero_grad(set_to_none=True)
        ddp(rank.batch(1)[0]).sum().backward()
        rank.law("a mean, and None", [model.a.grad, model.b.grad], [rank.mean(lambda r: rank.batch(1, of=r)[0]), None])


@case(
    "unused_parameters.hundreds",
    level=MUST,
    source=UNTOUCHED,
    each={"one_bucket": {}, "a_bucket_each": {"bucket_cap_mb": 2.0**-20}},
    catalogue=("E04", "E05"),
)
def test_hundreds_of_parameters_are_told_apart(rank, options):
    """
    Of three hundred parameters, in one bucket or in one each, every one that some rank uses gets its mean, and every one that none uses keeps None.

    A parameter is used by both ranks, by rank 1 alone, by rank 0 alone or by none, in turns.
    """
    names = [f"p{number}" for number in range(300)]
    users = {name: ((0, 1), (1,), (0,), ())[number % 4] for number, name in enumerate(names)}
    model = Scalars(*names)
    ddp = rank.wrap(model, find_unused_parameters=True, **options)
    expected = {
        name: sum(rank.batch(1, of=r)[0] for r in ranks) / rank.world_size if ranks else None
        for name, ranks in users.items()
    }
    for _ in range(2):
        model.zero_grad(set_to_none=True)
        ddp(rank.batch(1), use=tuple(name for name in names if rank.index in users[name])).backward()
        got = {name: getattr(model, name).grad for name in names}
        rank.law("each its mean or None", got, expected)
