"""Reference DDPs that some values, dtypes or shapes alone show to be wrong."""

import torch
import torch.distributed as dist

from tests.reference_ddp import ReferenceDDP


class _SendsRounded(ReferenceDDP):
    """What is broadcast was rounded by `rounded` before, on every rank."""

    def broadcast(self, tensors):
        tensors = list(tensors)
        for tensor in tensors:
            tensor.data.copy_(self.rounded(tensor.data))
        super().broadcast(tensors)

    def rounded(self, tensor):
        return tensor


class SendsIntegersAsFloats(_SendsRounded):
    """Breaks the promise that values are rank 0's: integers travel in single precision, which rounds large ones."""

    breaks = ("rank0_broadcast.every_bit",)

    def rounded(self, tensor):
        return tensor.float() if tensor.dtype in (torch.int64, torch.int32) else tensor


class SendsDoublesAsSingles(_SendsRounded):
    """Breaks the promise that values are rank 0's: those in double precision travel in single precision."""

    breaks = ("rank0_broadcast.every_bit",)

    def rounded(self, tensor):
        return tensor.float() if tensor.dtype is torch.float64 else tensor


class SendsBFloat16AsHalf(_SendsRounded):
    """Breaks the promise that values are rank 0's: bfloat16 travels as float16, in which large values are infinite."""

    breaks = ("rank0_broadcast.every_bit",)

    def rounded(self, tensor):
        return tensor.half() if tensor.dtype is torch.bfloat16 else tensor


class BroadcastsBySums(ReferenceDDP):
    """Breaks the broadcast where another rank holds infinity: it is a sum in which that rank's values count zero times."""

    breaks = ("rank0_broadcast.over_any_value",)

    def broadcast(self, tensors):
        exact = []
        for tensor in tensors:
            if tensor.dtype in (torch.float32, torch.float64) and tensor.numel():
                sent = tensor.data.contiguous() * float(dist.get_rank() == self.source())
                dist.all_reduce(sent, group=self.process_group)
                tensor.data.copy_(sent)
            else:
                exact.append(tensor)
        super().broadcast(exact)


class CopiesBuffersMemory(ReferenceDDP):
    """Breaks the promise that buffers are rank 0's: one that is not row by row in memory arrives in another order."""

    breaks = ("buffers.any_shape",)

    def broadcast(self, tensors):
        tensors = list(tensors)
        super().broadcast(tensors)
        for tensor in tensors:
            if not isinstance(tensor, torch.nn.Parameter) and not tensor.is_contiguous() and dist.get_rank():
                dense = tensor.data.clone(memory_format=torch.contiguous_format).view(-1)
                tensor.data.copy_(torch.as_strided(dense, tensor.shape, tensor.stride()))


class SwapsBuffersOfOneShape(ReferenceDDP):
    """Breaks the promise that a buffer is rank 0's of the same name: two of one shape are swapped in a forward."""

    breaks = ("buffers.any_shape",)

    def sync_buffers(self):
        super().sync_buffers()
        floats = [buffer.data for buffer in self.buffers_in_care() if buffer.is_floating_point()]
        alike = [(a, b) for i, a in enumerate(floats) for b in floats[i + 1 :] if a.shape == b.shape]
        for one, other in alike[:1] if dist.get_rank() else []:
            kept = one.clone()
            one.copy_(other)
            other.copy_(kept)


class TripsOverNoBuffer(ReferenceDDP):
    """Breaks the promise that a module is trained as it is: a buffer that is None has no values to send, and raises."""

    breaks = ("buffers.none",)

    def buffers_in_care(self):
        found = [
            (f"{prefix}.{name}" if prefix else name, buffer)
            for prefix, module in self.module.named_modules()
            for name, buffer in module._buffers.items()
        ]
        return [buffer for name, buffer in found if name not in self.ignored]


class SendsNoBuffersAfterEvaluation(ReferenceDDP):
    """Breaks broadcast_buffers: once the module was in eval mode, forwards in training mode send no buffers."""

    breaks = ("buffers.train_after_eval",)
    evaluated = False

    def train(self, mode=True):
        self.evaluated = self.evaluated or not mode
        return super().train(mode)

    def sync_buffers(self):
        if not (self.evaluated and self.module.training):
            super().sync_buffers()


class FillsUnusedOfOtherDtypes(ReferenceDDP):
    """Breaks find_unused_parameters in a model of several dtypes: unused parameters of all but the first get zeros."""

    breaks = ("unused_parameters.several_dtypes",)

    def start_used(self):
        work = super().start_used()
        work.wait()
        for index, parameter in enumerate(self.trainable):
            self.counts[index] += int(parameter.dtype != self.trainable[0].dtype)
        return work
