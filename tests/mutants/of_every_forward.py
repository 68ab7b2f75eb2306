"""Torch's own DDP with one defect in the buffers that a forward sends, or in what is sent at construction."""

import torch
from torch.nn.parallel import DistributedDataParallel


class SendsSmallBuffers(DistributedDataParallel):
    """Breaks the promise that all buffers are sent in a forward: those of more than 1 MiB are not."""

    breaks = ("rank0_broadcast.any_number_and_size",)

    def _default_broadcast_coalesced(self, bufs=None, bucket_size=None, authoritative_rank=0):
        small = [buffer for buffer in self.modules_buffers if buffer.numel() * buffer.element_size() <= 2**20]
        super()._default_broadcast_coalesced(small, bucket_size, authoritative_rank)


class SendsSixteenBuffers(DistributedDataParallel):
    """Breaks the promise that all buffers are sent in a forward: the first sixteen are."""

    breaks = ("rank0_broadcast.any_number_and_size",)

    def _default_broadcast_coalesced(self, bufs=None, bucket_size=None, authoritative_rank=0):
        super()._default_broadcast_coalesced(self.modules_buffers[:16], bucket_size, authoritative_rank)


class BeginsWithSmallParameters(DistributedDataParallel):
    """Breaks the promise that parameters are rank 0's at construction: those of more than 1 MiB are the rank's own."""

    breaks = ("rank0_broadcast.any_number_and_size",)

    def __init__(self, module, **options):
        sizes = {parameter: parameter.numel() * parameter.element_size() for parameter in module.parameters()}
        own = [(parameter, parameter.detach().clone()) for parameter, size in sizes.items() if size > 2**20]
        super().__init__(module, **options)
        for parameter, value in own:
            parameter.data.copy_(value)


class SendsBuffersOnceAStep(DistributedDataParallel):
    """Breaks the promise that every forward sends buffers: between two backwards only the first one does."""

    breaks = ("buffers.every_forward",)
    sent = False

    def forward(self, *arguments, **options):
        if self.sent and any(parameter.grad is None for parameter in self.module.parameters()):
            self.require_forward_param_sync = False
        self.sent = True
        return super().forward(*arguments, **options)


class SendsNoBuffersAfterAnException(DistributedDataParallel):
    """Breaks the promise that every forward sends buffers: none does once the module has raised."""

    breaks = ("buffers.after_an_exception",)
    has_raised = False

    def forward(self, *arguments, **options):
        if self.has_raised:
            self.require_forward_param_sync = False
        try:
            return super().forward(*arguments, **options)
        except Exception:
            self.has_raised = True
            raise


class SharesTheSwitchOfBuffers(DistributedDataParallel):
    """Breaks the promise that a wrapper's forwards send buffers: one under no_grad holds those of every wrapper back."""

    breaks = ("buffers.each_wrapper_by_itself",)
    shared = [True]

    @property
    def require_forward_param_sync(self):
        return self.shared[0]

    @require_forward_param_sync.setter
    def require_forward_param_sync(self, value):
        self.shared[0] = value


class KeepsTheFirstGroup(DistributedDataParallel):
    """Breaks the promise of the process group: every wrapper in a process has that of the first one."""

    breaks = ("sub_groups.two_in_one_process",)
    first = []

    def __init__(self, module, process_group=None, **options):
        if "device_mesh" not in options:
            self.first.append(process_group or torch.distributed.group.WORLD)
            process_group = self.first[0]
        super().__init__(module, process_group=process_group, **options)


class SendsNoBuffersInInference(DistributedDataParallel):
    """Breaks what is known of inference mode: no buffers are sent there."""

    breaks = ("buffers.in_inference_mode",)

    def will_sync_module_buffers(self):
        return not torch.is_inference_mode_enabled() and super().will_sync_module_buffers()


class ExpectsTheFirstShapes(DistributedDataParallel):
    """Breaks what is known of buffers that were assigned anew: those of another size than at construction are not sent."""

    breaks = ("buffers.reassigned_otherwise",)

    def __init__(self, module, **options):
        super().__init__(module, **options)
        self.sizes = {name: buffer.numel() for name, buffer in module.named_buffers()}

    def _default_broadcast_coalesced(self, bufs=None, bucket_size=None, authoritative_rank=0):
        named = self.named_module_buffers.items()
        known = [buffer for name, buffer in named if buffer.numel() == self.sizes.get(name)]
        if known:
            super()._default_broadcast_coalesced(known, bucket_size, authoritative_rank)


class AwaitsTheFirstFuture(DistributedDataParallel):
    """Breaks the promise that a buffer hook's futures are awaited: the first one is."""

    breaks = ("buffers.hook_futures_all",)

    def _register_buffer_comm_hook(self, state, hook, *place, **named):
        def first(state, buffers):
            futures = hook(state, buffers)
            return futures and futures[:1]

        super()._register_buffer_comm_hook(state, first, *place, **named)


class SendsNoBuffersWithoutInitSync(DistributedDataParallel):
    """Breaks the promise that init_sync=False is about construction alone: forwards send no buffers either."""

    breaks = ("sync_options.init_sync_off_forwards",)

    def __init__(self, module, init_sync=True, **options):
        super().__init__(module, init_sync=init_sync, **options)
        if not init_sync:
            self.broadcast_buffers = False
