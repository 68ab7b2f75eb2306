"""DDPs with one defect in how buffers are synced or handed to a hook; for those of the broadcast itself see of_buffers."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


class TakesTheGroupsLast(DistributedDataParallel):
    """Breaks the source of the broadcast: in a process group of its own it is the last rank."""

    breaks = ("buffers.group_source",)

    def _default_broadcast_coalesced(self, bufs=None, bucket_size=None, authoritative_rank=0):
        if self.process_group is not dist.group.WORLD:
            authoritative_rank = self.process_group.size() - 1
        super()._default_broadcast_coalesced(bufs, bucket_size, authoritative_rank)


class SyncsThoughOff(DistributedDataParallel):
    """Breaks broadcast_buffers=False: buffers are broadcast all the same."""

    breaks = ("buffers.off",)

    def will_sync_module_buffers(self):
        return self.require_forward_param_sync and len(self.modules_buffers) > 0


class SkipsWhatIsNotPersistent(DistributedDataParallel):
    """Breaks the promise that all buffers are broadcast: those outside the state dictionary are not."""

    breaks = ("buffers.mixed_and_nested",)

    def _assign_modules_buffers(self):
        super()._assign_modules_buffers()
        kept = self.module.state_dict().keys()
        self.named_module_buffers = {name: each for name, each in self.named_module_buffers.items() if name in kept}
        self.modules_buffers = list(self.named_module_buffers.values())


class AveragesFloats(DistributedDataParallel):
    """Breaks the promise that buffers are rank 0's: floats become the mean over ranks."""

    breaks = ("buffers.rank_0_at_forward", "buffers.no_reduction_of_running_statistics")

    def _default_broadcast_coalesced(self, bufs=None, bucket_size=None, authoritative_rank=0):
        whole = [each for each in self.modules_buffers if not each.is_floating_point()]
        if whole:
            super()._default_broadcast_coalesced(whole, bucket_size, authoritative_rank)
        for each in self.modules_buffers:
            if each.is_floating_point():
                dist.all_reduce(each.div_(self.process_group.size()), group=self.process_group)


class KeepsImaginaryParts(DistributedDataParallel):
    """Breaks the broadcast of complex buffers: each rank keeps its imaginary part."""

    breaks = ("buffers.complex",)

    def _sync_buffers(self):
        own = [each.imag.clone() if each.is_complex() else None for each in self.modules_buffers]
        super()._sync_buffers()
        for each, imaginary in zip(self.modules_buffers, own, strict=True):
            if imaginary is not None:
                each.imag.copy_(imaginary)


class ClearsGradients(DistributedDataParallel):
    """Breaks the promise that a broadcast touches buffers only: it sets gradients to zero."""

    breaks = ("buffers.no_gradient_effect",)

    def _sync_buffers(self):
        super()._sync_buffers()
        for parameter in self.module.parameters():
            if parameter.grad is not None:
                parameter.grad.zero_()


class CountsAsAChange(DistributedDataParallel):
    """Breaks two forwards before one backward: a broadcast counts as a change of the buffers."""

    breaks = ("buffers.two_forwards_one_backward",)

    def _sync_buffers(self):
        super()._sync_buffers()
        with torch.no_grad():
            for each in self.modules_buffers:
                each.add_(0)


class BroadcastsBeforeTheHook(DistributedDataParallel):
    """Breaks the promise that a buffer hook runs instead of the broadcast: it runs after one."""

    breaks = ("buffers.hook_replaces", "buffers.hook_place")

    def _sync_module_buffers(self, authoritative_rank):
        if hasattr(self, "buffer_hook"):
            self._default_broadcast_coalesced(authoritative_rank=authoritative_rank)
        super()._sync_module_buffers(authoritative_rank)


class RenamesForTheHook(DistributedDataParallel):
    """Breaks the promise that a buffer hook is handed the buffers by their names: they are numbered."""

    breaks = ("buffers.hook_place",)

    def _register_buffer_comm_hook(self, state, hook, **options):
        def numbered(state, buffers):
            return hook(state, {str(number): each for number, each in enumerate(buffers.values())})

        super()._register_buffer_comm_hook(state, numbered, **options)


class HooksAfterForwardOnly(DistributedDataParallel):
    """Breaks the place of a buffer hook: it always runs after forward."""

    breaks = ("buffers.hook_place",)

    def _register_buffer_comm_hook(self, state, hook, comm_hook_location=None):
        super()._register_buffer_comm_hook(state, hook)


class ForgetsFutures(DistributedDataParallel):
    """Breaks the promise that a buffer hook's futures are awaited: they are dropped."""

    breaks = ("buffers.hook_futures",)

    def _sync_module_buffers(self, authoritative_rank):
        if hasattr(self, "buffer_hook"):
            self.buffer_hook.buffer_comm_hook(self.buffer_hook.buffer_comm_hook_state, self.named_module_buffers)
        else:
            super()._sync_module_buffers(authoritative_rank)
