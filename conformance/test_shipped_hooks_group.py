"""The process group that a shipped communication hook is given for its state."""

import torch.distributed as dist
from ddp_conformance import MUST, case
from ddp_conformance.models import linear
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks


@case(
    "shipped_hooks.in_a_group",
    level=MUST,
    source="torch.distributed.algorithms.ddp_comm_hooks.default_hooks.allreduce_hook",
    each={"allreduce": default_hooks.allreduce_hook, "fp16": default_hooks.fp16_compress_hook},
    world=3,
    catalogue=("J01", "J02"),
)
def test_a_shipped_hook_reduces_within_the_group_it_is_given(rank, hook):
    """A shipped hook that is given a process group for its state reduces within that group and divides by its size."""
    members = (1, 2)
    group = dist.new_group(list(members))
    if rank.index not in members:
        return
    model = linear(1)
    ddp = rank.wrap(model, process_group=group)
    ddp.register_comm_hook(group, hook)
    for _ in range(3):
        model.zero_grad()
        ddp(rank.batch(1) * 2).sum().backward()
        rank.law("the group's mean", model.weight.grad, rank.mean(lambda r: rank.batch(1, of=r) * 2, members))
