"""Several delayed parameters at once, and in a process group of DDP's own."""

import time

import torch
import torch.distributed as dist
from ddp_conformance import MUST, case
from ddp_conformance.models import linear
from torch import nn

NEEDS = ("delay_all_reduce_named_params",)


class Three(nn.Module):
    """Three Linear(2, 1), the last ones with a weight of their input, whose outputs are added; `hooked` is used first, so its gradient comes last."""

    def __init__(self, start=1.0):
        super().__init__()
        self.hooked, self.one, self.other = (linear(2, start=start) for _ in range(3))

    def forward(self, x):
        return self.hooked(x).sum() + 2 * self.one(x).sum() + 3 * self.other(x).sum()


def in_time(tensors, expected):
    """Whether the tensors get the expected values within a second: nobody waits for the delayed reduction."""
    until = time.monotonic() + 1
    while not all(map(torch.equal, tensors, expected)) and time.monotonic() < until:
        time.sleep(0.001)
    return all(map(torch.equal, tensors, expected))


@case(
    "delayed_all_reduce.several",
    level=MUST,
    source="DistributedDataParallel",
    world=3,
    each={"world": (0, 1, 2), "group": (1, 2)},
    needs=NEEDS,
    catalogue=("O05", "A04"),
)
def test_several_delayed_parameters_get_the_mean_over_the_group(rank, members):
    """Of several delayed parameters each begins with the value that the group's first rank has, and gets the mean over the group in every iteration."""
    group = dist.new_group(list(members))
    if rank.index not in members:
        return
    model = Three(1.0 + rank.index)
    ddp = rank.wrap(
        model,
        process_group=group,
        delay_all_reduce_named_params=[("one.weight", model.one.weight), ("other.weight", model.other.weight)],
        param_to_hook_all_reduce=model.hooked.weight,
    )
    delayed = [model.one.weight, model.other.weight]
    first = torch.full((1, 2), 1.0 + members[0], device=rank.device)
    rank.law("the first rank's values", [each.data for each in delayed], [first, first.clone()])
    mean = rank.mean(lambda r: 2 * rank.batch(2, of=r), members)
    for _ in range(3):
        ddp.zero_grad()
        ddp(2 * rank.batch(2)).backward()
        rank.law("both get the mean", in_time([each.grad for each in delayed], [2 * mean, 3 * mean]), True)
        dist.barrier(group)  # before another rank has it, too, this one must not clear what may still be on its way
