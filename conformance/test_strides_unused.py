"""Parameters that do not lie row by row in memory, and that not every rank uses."""

import torch
from ddp_conformance import OBSERVED, case
from torch import nn


class Transposed(nn.Module):
    """A number, and a parameter of shape (3, 2) that lies column by column, which the forward uses if it is told to."""

    def __init__(self):
        super().__init__()
        self.used = nn.Parameter(torch.ones(1))
        self.columns = nn.Parameter(torch.ones(2, 3).t())

    def forward(self, gradient, use_all):
        return (self.used * gradient).sum() + ((self.columns * gradient).sum() if use_all else 0)


@case(
    "strides.made_by_ddp",
    level=OBSERVED,
    source='include/torch/csrc/distributed/c10d/reducer.hpp: (see the "Gradient Layout Contract" in',
    each={"own": {}, "view": {"gradient_as_bucket_view": True}},
    world=(2, 3),
    needs=("find_unused_parameters",),
    catalogue=("B12", "E06"),
    reports=("pytorch/pytorch#34904",),
)
def test_a_gradient_that_ddp_makes_is_laid_out_as_its_parameter(rank, options):
    """
    With find_unused_parameters a rank that does not use a parameter gets a gradient from DDP: the mean, element by element, in the parameter's strides.

    Rank 0 alone uses the parameter, and its six numbers all differ.
    """
    model = Transposed()
    ddp = rank.wrap(model, find_unused_parameters=True, **options)
    numbers = torch.arange(6.0, device=rank.device).reshape(3, 2) * rank.world_size
    for _ in range(3):
        model.zero_grad(set_to_none=True)
        ddp(numbers, use_all=rank.index == 0).backward()
        rank.law("the mean, element by element", model.columns.grad, numbers / rank.world_size)
        rank.law("the parameter's strides", model.columns.grad.stride(), (1, 3))
