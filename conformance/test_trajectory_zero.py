"""DDP in conjunction with a ZeroRedundancyOptimizer, whose ranks step a share of the parameters each."""

import copy

import torch
from ddp_conformance import MUST, case
from ddp_conformance.models import linear
from torch import nn

RATE = 2.0**-6
"""With this rate three steps of three layers need 42 bits after the point, so that all that follows is exact."""


@case("trajectory.zero_redundancy", level=MUST, source="DistributedDataParallel", world=(2, 3))
def test_a_zero_redundancy_optimizer_trains_like_a_whole_one(rank):
    """With a ZeroRedundancyOptimizer, of which each rank steps a share of the parameters, all ranks follow one process that is fed the mean."""
    from torch.distributed.optim import ZeroRedundancyOptimizer  # two seconds, which every collection would pay

    model = nn.Sequential(linear(2, 2), linear(2, 2), linear(2, 1)).double()
    one = copy.deepcopy(model).to(rank.device)
    ddp = rank.wrap(model)
    optimizer = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, lr=RATE)

    def fed(r):
        return rank.batch(2, of=r, dtype=torch.float64)

    for _ in range(3):
        optimizer.zero_grad()
        ddp(fed(rank.index)).sum().backward()
        optimizer.step()
        alone(one, torch.cat([fed(r) for r in range(rank.world_size)]), rank.world_size)
        rank.law("every parameter is the one process's", *(list(each.parameters()) for each in (model, one)))


def alone(model, rows, ranks):
    """One step of gradient descent on all ranks' rows, whose mean over the ranks is the loss."""
    gradients = torch.autograd.grad(model(rows).sum() / ranks, list(model.parameters()))
    with torch.no_grad():
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            parameter -= RATE * gradient
