"""Sparse gradients near the end of their range."""

import torch
from ddp_conformance import OBSERVED, case
from torch import nn


@case(
    "reduction.sparse_divided_first",
    level=OBSERVED,
    source="include/torch/csrc/distributed/c10d/reducer.hpp: expect_sparse_gradient",
    catalogue=("B03", "B06"),
    reports=("pytorch/pytorch#61814",),
    lanes=("gloo:*",),
)
def test_sparse_gradients_are_divided_before_they_are_summed(rank):
    """Sparse gradients whose sum is past the largest number keep their mean, for each is divided first, as dense ones are."""
    model = nn.Embedding(2, 1, sparse=True)
    ddp = rank.wrap(model)
    for _ in range(3):
        model.weight.grad = None
        ddp(torch.tensor([1], device=rank.device)).backward(rank.tensor(2.0**127).reshape(1, 1))
        rank.law("the mean and not infinite", model.weight.grad.to_dense(), rank.tensor(0, 2.0**127).reshape(2, 1))
