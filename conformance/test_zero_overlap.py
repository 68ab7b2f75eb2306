"""Hooks that overlap a ZeroRedundancyOptimizer's step with DDP's backward."""

import torch
from ddp_conformance import MUST, case
from ddp_conformance.models import linear
from torch.nn.parallel import DistributedDataParallel

HOOKS = "torch.distributed.algorithms.ddp_comm_hooks"


@case(
    "zero_overlap.refused_on_gloo",
    level=MUST,
    source=f"{HOOKS}.ddp_zero_hook.hook_with_zero_step",
    world=1,
    of="torch",
    lanes=("gloo:*",),
    catalogue=("J12",),
)
def test_overlap_with_zero_is_refused_on_gloo(rank):
    """
    Both hooks that overlap a ZeroRedundancyOptimizer's step with backward are refused on gloo with RuntimeError, and for an optimizer that was not made for overlap with ValueError.
    """
    # Not at the top: these take two seconds, and every collection would pay them.
    from torch.distributed.algorithms.ddp_comm_hooks import ddp_zero_hook
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
    from torch.distributed.optim import ZeroRedundancyOptimizer

    ddp = DistributedDataParallel(linear(2).to(rank.device))
    plain = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, lr=0.5)
    overlapped = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, overlap_with_ddp=True, lr=0.5)
    for name, modify in (
        ("step", ddp_zero_hook.hook_with_zero_step),
        ("interleaved", ddp_zero_hook.hook_with_zero_step_interleaved),
    ):
        with rank.raises(f"{name}_on_gloo", RuntimeError, match="may meet hangs|requires NCCL"):
            modify(allreduce_hook, ddp, overlapped)
        with rank.raises(
            f"{name}_not_made_for_overlap", ValueError, match="must be constructed with `overlap_with_ddp=True`"
        ):
            modify(allreduce_hook, ddp, plain)
