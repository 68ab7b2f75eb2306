"""DDPs that some values, dtypes or shapes alone show to be wrong."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


class _Changes(DistributedDataParallel):
    """Every local gradient is changed by `change` before it is reduced."""

    def __init__(self, module, *args, **options):
        super().__init__(module, *args, **options)
        for parameter in self.module.parameters():
            if parameter.requires_grad:
                parameter.register_hook(self.change)

    def change(self, gradient):
        return gradient


class RoundsDoublesToSingle(_Changes):
    """Breaks the promise that double precision gradients are averaged as such: they are rounded to single precision."""

    breaks = ("mean_gradients.double_precision",)

    def change(self, gradient):
        return gradient.float().double() if gradient.dtype is torch.float64 else gradient


class ClearsInfinities(_Changes):
    """Breaks the promise that an overflow on one rank is one on all: what is infinite or no number counts as zero."""

    breaks = ("mean_gradients.overflow",)

    def change(self, gradient):
        return gradient if gradient.is_sparse else gradient.nan_to_num(0.0, 0.0, 0.0)


class DropsTheSign(_Changes):
    """Breaks the promise that negative gradients are averaged as they are: their sign is lost."""

    breaks = ("mean_gradients.any_magnitude",)

    def change(self, gradient):
        return gradient.abs()


class ReducesBFloat16AsHalf(_Changes):
    """Breaks what is known of bfloat16: gradients are taken for float16, in which large ones are infinite."""

    breaks = ("mean_gradients.bfloat16_range",)

    def change(self, gradient):
        return gradient.half().bfloat16() if gradient.dtype is torch.bfloat16 else gradient


class LeavesNumbersOut(DistributedDataParallel):
    """Breaks the promise that every parameter is averaged: those without dimensions, as CLIP's scale, stay local."""

    breaks = ("mean_gradients.without_dimensions",)

    def __init__(self, module, *args, **options):
        numbers = [p for p in module.parameters() if p.dim() == 0 and p.requires_grad]
        for parameter in numbers:
            parameter.requires_grad_(False)
        super().__init__(module, *args, **options)
        for parameter in numbers:
            parameter.requires_grad_(True)


class _Divides(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, size):
        ctx.size = size
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return gradient / ctx.size, None


class DividesInputsGradients(DistributedDataParallel):
    """Breaks the promise that gradients of parameters alone are averaged: an input's is divided by the world size too."""

    breaks = ("mean_gradients.not_of_inputs",)

    def forward(self, *inputs, **keywords):
        size = dist.get_world_size(self.process_group)
        inputs = [_Divides.apply(x, size) if isinstance(x, torch.Tensor) and x.requires_grad else x for x in inputs]
        return super().forward(*inputs, **keywords)


class EndsAutocast(DistributedDataParallel):
    """Breaks the promise that a wrapped module is trained as any other: under autocast it computes in full precision."""

    breaks = ("mean_gradients.autocast",)

    def forward(self, *inputs, **keywords):
        with torch.autocast("cpu", enabled=False):
            return super().forward(*inputs, **keywords)


class FrozenLayersKeepTheirs(DistributedDataParallel):
    """Breaks the promise that frozen parameters are broadcast: in a module that also has buffers they are not."""

    breaks = ("rank0_broadcast.frozen_layer",)

    def __init__(self, module, *args, **options):
        kept = [(p, p.data.clone()) for p in module.parameters() if not p.requires_grad]
        super().__init__(module, *args, **options)
        if any(True for _ in module.buffers()):
            for parameter, value in kept:
                parameter.data.copy_(value)


class ForwardSkipsNumbers(DistributedDataParallel):
    """Breaks the promise that all buffers are sent in a forward: those without dimensions are not."""

    breaks = ("buffers.any_shape",)

    def _sync_buffers(self):
        kept = [(buffer, buffer.clone()) for buffer in self.module.buffers() if buffer.dim() == 0]
        super()._sync_buffers()
        for buffer, value in kept:
            buffer.data.copy_(value)
