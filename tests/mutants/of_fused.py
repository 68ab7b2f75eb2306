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


def is_fused(hook):
    return hook.__name__ == "hook_then_optimizer_wrapper"


class FusedStepsTheFirstBucket(DistributedDataParallel):
    """Breaks a fused optimizer where there are several buckets: the parameters of the first one alone step."""

    breaks = ("optimizer_overlap.fused_buckets",)

    def register_comm_hook(self, state, hook):
        def stepping_first(state, bucket):
            return allreduce_hook(self.process_group, bucket) if bucket.index() else hook(state, bucket)

        super().register_comm_hook(state, stepping_first if is_fused(hook) else hook)


class FusedNeverStepsInViews(DistributedDataParallel):
    """Breaks a fused optimizer where gradients are views: they are reduced, and nothing steps."""

    breaks = ("optimizer_overlap.fused_options",)

    def register_comm_hook(self, state, hook):
        idle = self.gradient_as_bucket_view and is_fused(hook)
        super().register_comm_hook(state, allreduce_hook if idle else hook)


class FusedKeepsTheGroup(DistributedDataParallel):
    """Breaks what is known of a fused optimizer in a sub-group: gradients are reduced in it."""

    breaks = ("optimizer_overlap.fused_in_a_group",)

    def register_comm_hook(self, state, hook):
        super().register_comm_hook(self.process_group if is_fused(hook) else state, hook)
