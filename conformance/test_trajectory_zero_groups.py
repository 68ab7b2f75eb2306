"""DDP in conjunction with a ZeroRedundancyOptimizer that has several groups of parameters and a memory of its own."""

import copy

import torch
from ddp_conformance import MUST, case
from torch import nn


class Weighted(nn.Module):
    """Four numbers, each 1.0, whose gradients are 1, 2, 3 and 4 times the input."""

    def __init__(self):
        super().__init__()
        self.all = nn.ParameterList(nn.Parameter(torch.ones(1, dtype=torch.float64)) for _ in range(4))

    def forward(self, x):
        return sum((parameter * x).sum() * times for times, parameter in enumerate(self.all, 1))


def groups(model):
    """Two groups that alternate in the order of registration, with a rate each."""
    first, second, third, fourth = model.all
    return [{"params": [first, third], "lr": 0.25}, {"params": [second, fourth], "lr": 0.125}]


@case(
    "trajectory.zero_redundancy_groups",
    level=MUST,
    source="distributed/optim/zero_redundancy_optimizer.py: (one per rank) on the target rank.",
    world=(2, 3),
    reports=("pytorch/pytorch#54736", "pytorch/pytorch#59973"),
)
def test_groups_rates_and_state_are_those_of_a_whole_optimizer(rank):
    """
    With a ZeroRedundancyOptimizer of several groups each parameter steps at its group's rate, also after that has changed, and the consolidated state is that of the whole optimizer of one process.

    SGD with momentum; each rank in turn is the one that the state is consolidated on.
    """
    from torch.distributed.optim import ZeroRedundancyOptimizer  # two seconds, which every collection would pay

    model = Weighted()
    one = copy.deepcopy(model).to(rank.device)
    ddp = rank.wrap(model)
    sharded = ZeroRedundancyOptimizer(groups(model), torch.optim.SGD, lr=0.5, momentum=0.5)
    whole = torch.optim.SGD(groups(one), lr=0.5, momentum=0.5)
    for iteration in range(4):
        if iteration == 2:
            sharded.param_groups[0]["lr"] = whole.param_groups[0]["lr"] = 0.0625
        sharded.zero_grad()
        ddp(rank.batch(1, dtype=torch.float64)).backward()
        sharded.step()
        whole.zero_grad()
        one(rank.mean(lambda r: rank.batch(1, of=r, dtype=torch.float64))).backward()
        whole.step()
        rank.law("every parameter is the one process's", list(model.all), list(one.all))
    for recipient in range(rank.world_size):
        sharded.consolidate_state_dict(to=recipient)
        if rank.index == recipient:
            saved = sharded.state_dict()
    both = [[each["state"][index]["momentum_buffer"] for index in range(4)] for each in (saved, whole.state_dict())]
    rank.law("every momentum is the one process's", *both)
