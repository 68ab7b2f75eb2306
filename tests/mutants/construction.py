"""DDPs with one defect in what the constructor refuses, and in what it leaves behind."""

import warnings
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class HidesThePrefix(DistributedDataParallel):
    """Breaks what is known of names: parameters of the wrapper carry no prefix."""

    breaks = ("construction.attributes",)

    def named_parameters(self, *arguments, **options):
        return ((name.removeprefix("module."), each) for name, each in super().named_parameters(*arguments, **options))


class AddsToOutputs(DistributedDataParallel):
    """Breaks the promise that the wrapper's forward is the module's: one is added to what it returns."""

    breaks = ("construction.attributes",)

    def forward(self, *inputs, **keywords):
        output = super().forward(*inputs, **keywords)
        return output + 1 if torch.is_tensor(output) else output


class MakesAGroup(DistributedDataParallel):
    """Breaks the promise that a process group is needed: it makes one, of one rank."""

    breaks = ("construction.needs_a_group",)

    def __init__(self, module, **options):
        if not dist.is_initialized():
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        super().__init__(module, **options)


class TrainsNothing(DistributedDataParallel):
    """Breaks the promise that a module without a trainable parameter is refused: it is given one."""

    breaks = ("construction.needs_a_trainable_parameter",)

    def __init__(self, module, **options):
        if not any(parameter.requires_grad for parameter in module.parameters()):
            module.register_parameter("extra", nn.Parameter(torch.zeros(1)))
        super().__init__(module, **options)


class MaterializesLazy(DistributedDataParallel):
    """Breaks the promise that uninitialized parameters are refused: they are made up, with two inputs."""

    breaks = ("construction.lazy_parameters",)

    def __init__(self, module, **options):
        for parameter in module.parameters():
            if isinstance(parameter, nn.UninitializedParameter):
                parameter.materialize((1, 2))
        super().__init__(module, **options)


class TakesAnyDevice(DistributedDataParallel):
    """Breaks the promise that devices which make no sense are refused: on the CPU they are ignored."""

    breaks = ("construction.one_device_id", "construction.cpu_takes_no_device")

    def __init__(self, module, *, device_ids=None, output_device=None, **options):
        super().__init__(module, **options)


class TakesMeta(DistributedDataParallel):
    """Breaks the promise that all parameters lie on one type of device: those on meta are ignored."""

    breaks = ("construction.one_device_type",)

    def __init__(self, module, **options):
        on_meta = [name for name, parameter in module.named_parameters() if parameter.device.type == "meta"]
        if on_meta:
            self._set_params_and_buffers_to_ignore_for_model(module, on_meta)
        super().__init__(module, **options)


class TakesSyncBatchNorm(DistributedDataParallel):
    """Breaks the promise that SyncBatchNorm on the CPU is refused."""

    breaks = ("construction.sync_batch_norm",)

    def _passing_sync_batchnorm_handle(self, module):
        pass


class ForgetsTheMesh(DistributedDataParallel):
    """Breaks the promise that a mesh stands for its group: it trains over all ranks, whatever the mesh."""

    breaks = ("construction.device_mesh_part", "construction.mesh_of_two_dimensions", "construction.group_or_mesh")

    def __init__(self, module, *, device_mesh=None, **options):
        super().__init__(module, **options)


class MeshSums(DistributedDataParallel):
    """Breaks the promise that gradients are means over a mesh of one dimension: they are sums."""

    breaks = ("construction.device_mesh",)

    def __init__(self, module, *, device_mesh=None, **options):
        super().__init__(module, device_mesh=device_mesh, **options)
        if device_mesh is not None:
            for parameter in module.parameters():
                parameter.register_hook(lambda gradient: gradient * device_mesh.size())


class BeginsWithTheGroupsLast(DistributedDataParallel):
    """Breaks the promise that the members of a sub-group begin with what its first rank has: it is its last rank."""

    breaks = ("rank0_broadcast.subgroup_source",)

    def __init__(self, module, *, process_group=None, **options):
        place = "torch.nn.parallel.distributed._sync_module_states"
        synchronize = nn.parallel.distributed._sync_module_states
        last = {"src": process_group.size() - 1} if process_group else {}
        with mock.patch(place, lambda **named: synchronize(**named | last)):
            super().__init__(module, process_group=process_group, **options)


class CheckReductionInSilence(DistributedDataParallel):
    """Breaks the promise that check_reduction warns."""

    breaks = ("construction.check_reduction",)

    def __init__(self, module, *, check_reduction=False, **options):
        super().__init__(module, **options)


class CountsSharedTwice(DistributedDataParallel):
    """Breaks what is known of shared parameters: one with two names is reduced twice as large."""

    breaks = ("construction.shared_parameters_count_once",)

    def __init__(self, module, **options):
        super().__init__(module, **options)
        names = [id(parameter) for _, parameter in module.named_parameters(remove_duplicate=False)]
        for parameter in module.parameters():
            if parameter.requires_grad and names.count(id(parameter)) > 1:
                parameter.register_hook(lambda gradient: gradient * 2)


class CarriesFrozen(DistributedDataParallel):
    """Breaks what is known of frozen parameters: floating-point ones are thawed on the way in and reduced."""

    breaks = ("construction.frozen_parameters_stay_out", "rank0_broadcast.frozen_parameters")

    def __init__(self, module, **options):
        for parameter in module.parameters():
            parameter.requires_grad_(parameter.is_floating_point())
        super().__init__(module, **options)


class KeepsItsHooks(DistributedDataParallel):
    """Breaks the promise that a deleted wrapper leaves no hook behind: its reducer lives on."""

    breaks = ("construction.rewrapped",)

    kept = []

    def __init__(self, module, **options):
        super().__init__(module, **options)
        self.kept.append(self.reducer)


class ComparesAsFarAsItGoes(DistributedDataParallel):
    """Breaks the promise that another number of parameters is refused: as many as every rank has are compared."""

    breaks = ("positional_matching.count_differs", "positional_matching.trainable_count_differs")

    def __init__(self, module, **options):
        def compare(group, parameters, logger=None):
            counts = [None] * dist.get_world_size(group)
            dist.all_gather_object(counts, len(parameters), group=group)
            if len(set(counts)) == 1:
                dist._verify_params_across_processes(group, parameters, logger)

        def broadcast(module, process_group, *arguments, **named):
            counts = [None] * dist.get_world_size(process_group)
            dist.all_gather_object(counts, len(list(module.parameters())), group=process_group)
            if len(set(counts)) == 1:
                real(module, process_group, *arguments, **named)

        real = torch.nn.parallel.distributed._sync_module_states
        with (
            mock.patch.object(torch.nn.parallel.distributed, "_verify_param_shape_across_processes", compare),
            mock.patch.object(torch.nn.parallel.distributed, "_sync_module_states", broadcast),
        ):
            super().__init__(module, **options)


class ComparesCountsOnly(DistributedDataParallel):
    """Breaks the promise that shapes and strides are compared: only the number of parameters is."""

    breaks = ("positional_matching.shape_differs", "positional_matching.strides_differ")

    def __init__(self, module, **options):
        def compare(group, parameters, logger=None):
            counts = [None] * dist.get_world_size(group)
            dist.all_gather_object(counts, len(parameters), group=group)
            if len(set(counts)) > 1:
                dist._verify_params_across_processes(group, parameters, logger)

        def broadcast(module, process_group, *arguments, **named):
            own = [(parameter.shape, parameter.stride()) for parameter in module.parameters()]
            layouts = [None] * dist.get_world_size(process_group)
            dist.all_gather_object(layouts, own, group=process_group)
            if all(layout == own for layout in layouts):
                real(module, process_group, *arguments, **named)

        real = torch.nn.parallel.distributed._sync_module_states
        with (
            mock.patch.object(torch.nn.parallel.distributed, "_verify_param_shape_across_processes", compare),
            mock.patch.object(torch.nn.parallel.distributed, "_sync_module_states", broadcast),
        ):
            super().__init__(module, **options)


class EmptyListKeepsLocal(DistributedDataParallel):
    """Breaks the promise that an empty list of device_ids is None: such a wrapper keeps gradients local."""

    breaks = ("construction.no_device_ids",)

    def __init__(self, module, *, device_ids=None, **options):
        super().__init__(module, device_ids=device_ids, **options)
        if device_ids == []:
            self.require_backward_grad_sync = False


class SkipsEmpty(DistributedDataParallel):
    """Breaks what is known of parameters without elements: they get no gradient."""

    breaks = ("construction.zero_size", "rank0_broadcast.zero_size")

    def __init__(self, module, **options):
        for parameter in module.parameters():
            parameter.requires_grad_(parameter.requires_grad and parameter.numel() > 0)
        super().__init__(module, **options)


class CopiesMemoryOfStrided(DistributedDataParallel):
    """Breaks the promise that gradients of strided parameters arrive element by element: they arrive as they lie in memory."""

    breaks = ("strides.allowed",)

    def __init__(self, module, **options):
        super().__init__(module, **options)
        for parameter in module.parameters():
            if not parameter.is_contiguous():
                parameter.register_hook(lambda gradient: gradient.contiguous().flip(0))


class ObjectsToStrides(DistributedDataParallel):
    """Breaks what is known of the stride warning: gradients that lie otherwise are lost."""

    breaks = ("strides.warning",)

    def forward(self, *inputs, **named):
        for parameter in self.module.parameters():
            if parameter.grad is not None and parameter.grad.stride() != parameter.stride():
                warnings.warn("strides differ", stacklevel=2)
                self.require_backward_grad_sync = False
        return super().forward(*inputs, **named)
