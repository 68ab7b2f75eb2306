"""With find_unused_parameters=True unused parameters may be of other dtypes than the used ones."""

import torch
from ddp_conformance import MUST, case
from torch import nn


class Mixed(nn.Module):
    """Four parameters of 1.0 in three dtypes: x is multiplied by the two that are used."""

    def __init__(self):
        super().__init__()
        self.used = nn.Parameter(torch.ones(1))
        self.used_double = nn.Parameter(torch.ones(1, dtype=torch.float64))
        self.unused_double = nn.Parameter(torch.ones(1, dtype=torch.float64))
        self.unused_half = nn.Parameter(torch.ones(1, dtype=torch.float16))

    def forward(self, x):
        return (self.used * x).sum() + (self.used_double * x).sum()


@case(
    "unused_parameters.several_dtypes",
    level=MUST,
    source="nn/parallel/distributed.py: param.grad field is not touched",
    each={"default": {}, "one_each": {"bucket_cap_mb": 1e-6}},
    catalogue=("E04", "B04"),
)
def test_unused_parameters_of_another_dtype_keep_no_gradient(rank, options):
    """Of parameters of several dtypes those that no rank uses keep None for their gradient, and the used ones get their mean, each in its own dtype."""
    model = Mixed()
    ddp = rank.wrap(model, find_unused_parameters=True, **options)
    mean = rank.mean(lambda r: rank.batch(1, of=r)[0])
    for _ in range(3):
        model.zero_grad(set_to_none=True)
        ddp(rank.batch(1)).backward()
        rank.law("used ones get the mean", [model.used.grad, model.used_double.grad], [mean, mean.double()])
        rank.law("unused ones keep None", [model.unused_double.grad, model.unused_half.grad], [None, None])
