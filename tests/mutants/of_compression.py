"""torch's DDP with one defect that a shipped hook shows only beside something else: a wrapper, a dtype, a group, two buckets."""

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook, fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from tests.mutants.of_hook_buckets import Handed


class WrapperForgetsItsHook(DistributedDataParallel):
    """Breaks the promise that a compression wrapper runs the hook it was given: it always all-reduces."""

    breaks = ("shipped_hooks.wrapped_hook_runs",)

    def register_comm_hook(self, state, hook):
        if hook.__name__ == "fp16_compress_wrapper_hook":
            state, hook = None, fp16_compress_hook
        super().register_comm_hook(state, hook)


class NeverHalvesDoubles(DistributedDataParallel):
    """Breaks compression to 16 bits for double precision: such gradients are reduced as they are."""

    breaks = ("shipped_hooks.fp16_of_doubles",)

    def register_comm_hook(self, state, hook):
        def halving_singles(state, bucket):
            whole = bucket.buffer().dtype is torch.float64
            return allreduce_hook(self.process_group, bucket) if whole else hook(state, bucket)

        super().register_comm_hook(state, halving_singles if "fp16" in hook.__name__ else hook)


class BuiltInTakesTheWorld(DistributedDataParallel):
    """Breaks the mean of a built-in hook in a sub-group: it is divided by the size of the world."""

    breaks = ("shipped_hooks.built_in_in_a_group",)

    def _register_builtin_comm_hook(self, comm_hook_type):
        super()._register_builtin_comm_hook(comm_hook_type)
        share = dist.get_world_size(self.process_group) / dist.get_world_size()
        for parameter in self.module.parameters():
            if share != 1 and parameter.requires_grad:
                parameter.register_hook(lambda gradient: None if gradient is None else gradient * share)


class LocalSGDCountsBuckets(DistributedDataParallel):
    """Breaks post-localSGD's count of iterations: every bucket counts."""

    breaks = ("post_local_sgd.several_buckets",)

    def register_comm_hook(self, state, hook):
        def counting(state, bucket):
            return hook(state, Handed(bucket, is_last=lambda: True))

        super().register_comm_hook(state, counting if hasattr(state, "start_localSGD_iter") else hook)


class ViewsStayWhole(DistributedDataParallel):
    """Breaks compression to 16 bits where gradients are views: they are reduced as they are."""

    breaks = ("shipped_hooks.fp16_options",)

    def register_comm_hook(self, state, hook):
        whole = self.gradient_as_bucket_view and "fp16" in hook.__name__
        super().register_comm_hook(state, allreduce_hook if whole else hook)


class StaticGraphsStayWhole(DistributedDataParallel):
    """Breaks the built-in compression to 16 bits in a static graph: gradients are reduced as they are."""

    breaks = ("shipped_hooks.fp16_options",)

    def _register_builtin_comm_hook(self, comm_hook_type):
        super()._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE if self.static_graph else comm_hook_type)
