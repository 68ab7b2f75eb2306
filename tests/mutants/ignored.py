"""DDPs with one defect in what they do with ignored parameters and buffers."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


class BroadcastsIgnored(DistributedDataParallel):
    """Breaks the promise that an ignored parameter keeps the rank's own values: the constructor broadcasts it."""

    breaks = ("ignored.not_broadcast",)

    def __init__(self, module, **options):
        super().__init__(module, **options)
        for name, parameter in module.named_parameters():
            if name in self.parameters_to_ignore and parameter.device.type != "meta":
                dist.broadcast(
                    parameter.detach(), dist.get_global_rank(self.process_group, 0), group=self.process_group
                )


class ReducesIgnored(DistributedDataParallel):
    """Breaks the promise that an ignored parameter keeps its own gradient: it is reduced."""

    breaks = ("ignored.not_reduced",)

    def _build_params_for_reducer(self):
        ignored, self.parameters_to_ignore = self.parameters_to_ignore, set()
        built = super()._build_params_for_reducer()
        self.parameters_to_ignore = ignored
        return built

    def _build_debug_param_to_name_mapping(self, parameters):
        return {index: str(index) for index in range(len(parameters))}


class SynchronizesIgnoredBuffers(DistributedDataParallel):
    """Breaks the promise that an ignored buffer is never broadcast: every forward does."""

    breaks = ("ignored.buffers",)

    def _assign_modules_buffers(self):
        ignored, self.parameters_to_ignore = self.parameters_to_ignore, set()
        super()._assign_modules_buffers()
        self.parameters_to_ignore = ignored


class ComparesIgnored(DistributedDataParallel):
    """Breaks the promise that ignored parameters are not compared: their shapes must agree."""

    breaks = ("ignored.not_compared",)

    def __init__(self, module, **options):
        super().__init__(module, **options)
        shapes = [None] * dist.get_world_size(self.process_group)
        own = [tuple(p.shape) for name, p in module.named_parameters() if name in self.parameters_to_ignore]
        dist.all_gather_object(shapes, own, group=self.process_group)
        if any(shape != own for shape in shapes):
            raise RuntimeError(f"ignored parameters have shapes {shapes}")


class ManagesAll(DistributedDataParallel):
    """Breaks the promise that the parameters it says it manages are those not ignored: it names them all."""

    breaks = ("ignored.data_parallel_params",)

    @staticmethod
    def _get_data_parallel_params(module, named_params=False):
        yield from module.named_parameters() if named_params else module.parameters()


class ZeroesIgnored(DistributedDataParallel):
    """Breaks the promise that an ignored parameter is left alone: its values are lost at construction."""

    breaks = ("ignored.not_broadcast",)

    def __init__(self, module, **options):
        super().__init__(module, **options)
        with torch.no_grad():
            for name, parameter in module.named_parameters():
                if name in self.parameters_to_ignore and parameter.device.type != "meta":
                    parameter.zero_()
