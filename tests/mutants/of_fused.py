"""torch's DDP with one defect in a fused optimizer that takes more than one bucket of SGD to see."""

import torch
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel


class FusedAdamDecays(DistributedDataParallel):
    """Breaks the choice of a fused optimizer: where Adam was registered AdamW steps, whose weight decay is another."""

    breaks = ("optimizer_overlap.fused_kinds",)

    def _register_fused_optim(self, optim, *args, optim_params=None, **kwargs):
        optim = torch.optim.AdamW if optim is torch.optim.Adam else optim
        super()._register_fused_optim(optim, *args, optim_params=optim_params, **kwargs)


class FusedStepsTheFirstBucket(DistributedDataParallel):
    """Breaks a fused optimizer where there are several buckets: the parameters of the first one alone step."""

    breaks = ("optimizer_overlap.fused_buckets",)

    def register_comm_hook(self, state, hook):
        def stepping_first(state, bucket):
            return allreduce_hook(self.process_group, bucket) if bucket.index() else hook(state, bucket)

        fused = "hook_then_optimizer" in hook.__name__
        super().register_comm_hook(state, stepping_first if fused else hook)
