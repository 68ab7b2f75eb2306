"""A parameter that the forward returns as it is: reduced by default, and taken for unused where unused ones are looked for."""

import torch
from ddp_conformance import HAZARD, MUST, case
from torch import nn

DDP = "DistributedDataParallel"
OUTPUT = "nn/parallel/distributed.py: differentiation of the output (or a function of the output of this module)"
TWICE = "Expected to mark a variable ready only once"


class Returning(nn.Module):
    """Returns a parameter as it is, beside what another gives."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x):
        return self.scale, self.weight * x


@case(
    "autograd.returned_parameter",
    level=MUST,
    source=OUTPUT,
    each={"default": {}, "static_graph": {"static_graph": True}},
    catalogue=("E07",),
)
def test_a_parameter_that_is_returned_is_reduced(rank, options):
    """By default and with static_graph=True a parameter that the forward returns as it is, as a learned temperature for the loss, is reduced like the others."""
    model = Returning()
    ddp = rank.wrap(model, **options)
    own = rank.batch(1)[0]
    mean = rank.mean(lambda r: rank.batch(1, of=r)[0])
    for _ in range(3):
        model.zero_grad(set_to_none=True)
        scale, output = ddp(own)
        (scale * own * 2 + output).sum().backward()
        rank.law("means", [model.scale.grad, model.weight.grad], [2 * mean, mean.clone()])


@case("unused_search.returned_is_unused", level=HAZARD, source=DDP, catalogue=("E03", "E08"))
def test_a_parameter_that_is_returned_is_taken_for_unused(rank):
    """
    With find_unused_parameters=True a parameter that the forward returns as it is counts as unused, and backward raises when it gets its gradient.

    The documentation has the graph searched from all tensors that are returned. The search begins at the node that made an
    output, and a parameter was made by none; a view of it is seen.
    """
    model = Returning()
    ddp = rank.wrap(model, find_unused_parameters=True)
    scale, output = ddp(rank.batch(1)[0])
    with rank.raises("backward", RuntimeError, match=TWICE):
        (scale + output).sum().backward()
