"""The post-localSGD hook where a backward has several buckets."""

import torch
import torch.distributed as dist
from ddp_conformance import MUST, case
from ddp_conformance.models import Scalars
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook


@case(
    "post_local_sgd.several_buckets",
    level=MUST,
    source="distributed/algorithms/ddp_comm_hooks/post_localSGD_hook.py: all-reducing gradients globally using ``process_group`` until step",
    catalogue=("J09",),
)
def test_iterations_are_counted_and_not_buckets(rank):
    """
    However many buckets a backward has, gradients are the mean over all ranks for the first `start_localSGD_iter` iterations, and the sub-group's from then on.

    Two dtypes make two buckets; the start is iteration 4, and each rank is a sub-group.
    """
    groups = [dist.new_group([r]) for r in range(rank.world_size)]
    model = Scalars("a", "b")
    model.b = nn.Parameter(torch.ones(1, dtype=torch.float64))
    ddp = rank.wrap(model)
    ddp.register_comm_hook(PostLocalSGDState(None, groups[rank.index], start_localSGD_iter=4), post_localSGD_hook)
    for iteration in range(6):
        model.zero_grad()
        ddp(rank.batch(1)).backward()
        expected = rank.mean(lambda r: rank.batch(1, of=r)[0]) if iteration < 4 else rank.batch(1)[0]
        rank.law(
            "all ranks' mean at first, then the sub-group's",
            [model.a.grad, model.b.grad],
            [expected, expected.double()],
        )
