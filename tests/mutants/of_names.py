"""Torch's own DDP with one defect in which names are ignored, or in what its wrapper is as a module."""

import torch
from torch.nn.parallel import DistributedDataParallel

TOLD = "_ddp_params_and_buffers_to_ignore"


def ignoring(module, chosen):
    """The module, in which the names that `chosen` accepts are ignored besides those that are."""
    told = getattr(module, TOLD, ())
    names = [name for name, _ in (*module.named_parameters(), *module.named_buffers())]
    setattr(module, TOLD, [*told, *(name for name in names if chosen(name, told))])
    return module


class IgnoresByTheBeginning(DistributedDataParallel):
    """Breaks the promise that a name is ignored: whatever begins with one is."""

    breaks = ("ignored.whole_names",)

    def __init__(self, module, **options):
        ignoring(module, lambda name, told: any(name.startswith(each) for each in told))
        super().__init__(module, **options)


class IgnoresInEveryModule(DistributedDataParallel):
    """Breaks the promise that a module says what is ignored in it: names count in all that are wrapped later."""

    breaks = ("ignored.module_by_module",)
    everything = set()

    def __init__(self, module, **options):
        self.everything.update(getattr(module, TOLD, ()))
        ignoring(module, lambda name, told: name in self.everything)
        super().__init__(module, **options)


class CopiesSendIgnoredBuffers(DistributedDataParallel):
    """Breaks the promise that a copy keeps what DDP is to ignore: it sends all buffers."""

    breaks = ("serialization.copy_ignores_buffers",)

    def __setstate__(self, state):
        super().__setstate__(state)
        self.parameters_to_ignore = set(self.parameters_to_ignore) - {name for name, _ in self.module.named_buffers()}


class AllowsFrozenLazyParameters(DistributedDataParallel):
    """Breaks the promise that uninitialized parameters are refused: frozen ones are left out."""

    breaks = ("construction.lazy_and_frozen",)

    def __init__(self, module, **options):
        lazy = torch.nn.parameter.UninitializedParameter
        named = dict(module.named_parameters())
        frozen = {name for name, each in named.items() if isinstance(each, lazy) and not each.requires_grad}
        super().__init__(ignoring(module, lambda name, told: name in frozen), **options)


class AllowsFrozenOnAnotherDevice(DistributedDataParallel):
    """Breaks the promise that all parameters lie on one type of device: frozen ones may lie elsewhere."""

    breaks = ("construction.one_device_type_frozen",)

    def __init__(self, module, **options):
        named = dict(module.named_parameters())
        frozen = {name for name, each in named.items() if each.is_meta and not each.requires_grad}
        super().__init__(ignoring(module, lambda name, told: name in frozen), **options)


class AllowsSyncBatchNormInside(DistributedDataParallel):
    """Breaks the promise that SyncBatchNorm on the CPU is refused: only the module's own layers are looked at."""

    breaks = ("construction.sync_batch_norm_inside",)

    def _passing_sync_batchnorm_handle(self, module):
        if any(isinstance(each, torch.nn.SyncBatchNorm) for each in module.children()):
            super()._passing_sync_batchnorm_handle(module)


class ForgetsTheOuterPrefix(DistributedDataParallel):
    """Breaks what is known of a wrapper inside a module: its entries in the state dict lack its name."""

    breaks = ("wrapper.inside_a_module",)

    def state_dict(self, *arguments, prefix="", **options):
        return super().state_dict(*arguments, prefix="", **options)


class TellsNoKeys(DistributedDataParallel):
    """Breaks what is known of loading: it does not tell which keys are missing."""

    breaks = ("wrapper.loading_tells_keys",)

    def load_state_dict(self, *arguments, **options):
        super().load_state_dict(*arguments, **options)


class FiresNoHooks(DistributedDataParallel):
    """Breaks the promise that a wrapper is a module: hooks on it do not fire."""

    breaks = ("wrapper.hooks",)

    def __call__(self, *arguments, **options):
        return self.forward(*arguments, **options)


class KeepsGradients(DistributedDataParallel):
    """Breaks what is known of the wrapper's zero_grad: with set_to_none=False it does nothing."""

    breaks = ("wrapper.zero_grad",)

    def zero_grad(self, set_to_none=True):
        if set_to_none:
            super().zero_grad(set_to_none=True)


class TellsTheWorld(DistributedDataParallel):
    """Breaks the logging data in a process group: rank and size are those in the world."""

    breaks = ("logging_data.group",)

    def _get_ddp_logging_data(self):
        world = {"rank": torch.distributed.get_rank(), "world_size": torch.distributed.get_world_size()}
        return {**super()._get_ddp_logging_data(), **world}


class DelaysByTheWorld(DistributedDataParallel):
    """Breaks the mean of delayed parameters in a process group: it divides by the size of the world."""

    breaks = ("delayed_all_reduce.several",)

    def _delayed_all_reduce_hook(self, grad):
        own, world = torch.distributed.get_world_size(self.process_group), torch.distributed.get_world_size()
        self._delay_grad_buffer.mul_(own / world)
        return super()._delayed_all_reduce_hook(grad)


class ReducesTheFirstDelayed(DistributedDataParallel):
    """Breaks the mean of delayed parameters: of several only the first one is reduced."""

    breaks = ("delayed_all_reduce.several",)

    def _delayed_all_reduce_hook(self, grad):
        whole = self._delay_grad_buffer
        self._delay_grad_buffer = whole[: self._delay_all_reduce_params[0].numel()]
        super()._delayed_all_reduce_hook(grad)
        self._delay_grad_buffer = whole
        return grad
