"""Reference DDPs with one defect in the constructor: what is made equal, from whom, and what is refused."""

import torch
import torch.distributed as dist

from tests.reference_ddp import ReferenceDDP


class CopiesNothing(ReferenceDDP):
    """Breaks the promise that ranks begin equal: every rank keeps its own parameters and buffers."""

    breaks = ("rank0_broadcast.parameters", "trajectory.different_start")

    def make_equal(self):
        pass


class CopiesFromTheLastRank(ReferenceDDP):
    """Breaks the promise that rank 0's values are taken: they come from the last rank."""

    breaks = ("rank0_broadcast.parameters", "rank0_broadcast.subgroup_source")

    def make_equal(self):
        self.source = lambda: dist.get_process_group_ranks(self.process_group)[-1]
        super().make_equal()
        del self.source


class CopiesFromTheSubgroupsLast(ReferenceDDP):
    """Breaks the promise that a sub-group's source is its first rank: there, and only there, it is the last."""

    breaks = ("rank0_broadcast.subgroup_source", "rank0_broadcast.two_groups")

    def make_equal(self):
        if self.process_group is not dist.group.WORLD:
            self.source = lambda: dist.get_process_group_ranks(self.process_group)[-1]
        super().make_equal()
        vars(self).pop("source", None)


class AveragesReplicas(ReferenceDDP):
    """Breaks the promise that the values are rank 0's: they are the mean over the ranks."""

    breaks = ("rank0_broadcast.parameters",)

    def make_equal(self):
        super().broadcast(list(self.module.buffers()))
        for parameter in self.module.parameters():
            if parameter.is_floating_point() and parameter.numel():
                total = parameter.detach().clone(memory_format=torch.contiguous_format)
                dist.all_reduce(total, group=self.process_group)
                parameter.detach().copy_(total / self.world_size)


class ForgetsFrozen(ReferenceDDP):
    """Breaks the promise that frozen parameters are made equal too."""

    breaks = ("rank0_broadcast.frozen_parameters",)

    def initial_state(self):
        return [*self.trainable, *self.module.buffers()]


class ForgetsBuffers(ReferenceDDP):
    """Breaks the promise that buffers leave the constructor with rank 0's values."""

    breaks = ("rank0_broadcast.buffers",)

    def initial_state(self):
        return list(self.module.parameters())


class ForgetsBuffersThatAreNotSaved(ReferenceDDP):
    """Breaks the promise that all buffers are made equal: those outside the state dict are left out."""

    breaks = ("rank0_broadcast.buffers",)

    def initial_state(self):
        return list(self.module.state_dict(keep_vars=True).values())


class ForgetsIntegers(ReferenceDDP):
    """Breaks the promise that buffers of any dtype are made equal: only floating-point state is."""

    breaks = ("rank0_broadcast.buffers", "rank0_broadcast.buffer_dtypes")

    def initial_state(self):
        return [tensor for tensor in super().initial_state() if tensor.is_floating_point()]


class CopiesMemory(ReferenceDDP):
    """Breaks the promise that values arrive element by element: strided tensors are copied as they lie in memory."""

    breaks = ("rank0_broadcast.strided",)

    def broadcast(self, tensors):
        for tensor in (tensor.detach() for tensor in tensors if tensor.numel()):
            sent = tensor.clone(memory_format=torch.contiguous_format)
            dist.broadcast(sent, self.source(), group=self.process_group)
            if tensor.is_contiguous():
                tensor.copy_(sent)
            else:
                torch.as_strided(tensor, (tensor.numel(),), (1,)).copy_(sent.view(-1))


class CopiesTheFirstDtypeOnly(ReferenceDDP):
    """Breaks the promise that parameters of several dtypes arrive: those of another dtype than the first are left out."""

    breaks = ("rank0_broadcast.mixed_dtypes",)

    def initial_state(self):
        first = self.trainable[0].dtype
        buffers = {id(buffer) for buffer in self.module.buffers()}
        return [tensor for tensor in super().initial_state() if id(tensor) in buffers or tensor.dtype == first]


class CopiesAtEveryForward(ReferenceDDP):
    """Breaks the promise that parameters are never broadcast again: every forward does."""

    breaks = ("rank0_broadcast.parameters_never_again",)

    def sync_buffers(self):
        self.broadcast(self.initial_state())


class RefusesNothing(ReferenceDDP):
    """Breaks the promise that what cannot work is refused: the constructor takes everything."""

    breaks = (
        "construction.needs_a_trainable_parameter",
        "construction.one_device_type",
        "construction.sync_batch_norm",
        "positional_matching.shape_differs",
        "positional_matching.strides_differ",
    )

    def refuse_what_cannot_work(self):
        pass

    def refuse_replicas_that_differ(self):
        pass

    def make_equal(self):
        if all(parameter.device.type != "meta" for parameter in self.module.parameters()):
            shapes = [None] * self.world_size
            own = [tuple(parameter.shape) for parameter in self.module.parameters()]
            dist.all_gather_object(shapes, own, group=self.process_group)
            if all(shape == own for shape in shapes):
                super().make_equal()

    def set_buckets(self, assignment):
        super().set_buckets(assignment or [[]])


class MakesContiguous(ReferenceDDP):
    """Breaks the promise that parameters keep their strides: all lie row by row afterwards."""

    breaks = ("rank0_broadcast.strided",)

    def make_equal(self):
        super().make_equal()
        for parameter in self.module.parameters():
            parameter.data = parameter.data.contiguous()


class MatchesByName(ReferenceDDP):
    """Breaks what is known of matching: parameters are paired by name and not by position."""

    breaks = ("positional_matching.weights_cross_wired", "positional_matching.gradients_cross_wired")

    def __init__(self, module, **options):
        super().__init__(ByName(module), **options)
        self.module = module

    def state_dict(self, *args, **options):
        return super().state_dict(*args, **options)


class ByName(torch.nn.Module):
    """The module, its parameters in the order of their names."""

    def __init__(self, module):
        super().__init__()
        self.inner = module

    def named_parameters(self, *args, **options):
        return sorted(self.inner.named_parameters(*args, **options), key=lambda pair: pair[0])

    def parameters(self, *args, **options):
        return iter([parameter for _, parameter in self.named_parameters(*args, **options)])
