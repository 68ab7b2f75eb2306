"""DDPs that forget which ranks they were told to work with."""

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


class MeshForgetsBuffers(DistributedDataParallel):
    """Breaks the promise that a mesh stands for its group: over one no forward sends buffers."""

    breaks = ("buffers.over_a_mesh",)

    def __init__(self, module, *args, device_mesh=None, **options):
        super().__init__(module, *args, device_mesh=device_mesh, **options)
        self.over_a_mesh = device_mesh is not None

    def will_sync_module_buffers(self):
        return super().will_sync_module_buffers() and not self.over_a_mesh


class ShippedHooksTakeTheWorld(DistributedDataParallel):
    """Breaks the promise that a shipped hook divides by its group's size: it divides by the world's."""

    breaks = ("shipped_hooks.in_a_group",)

    def register_comm_hook(self, state, hook):
        size = dist.get_world_size() / dist.get_world_size(self.process_group)

        def scaled(group, bucket):
            return hook(group, bucket).then(lambda done: done.value() / size)

        scaled.__name__, scaled.__qualname__ = hook.__name__, hook.__qualname__
        shipped = isinstance(state, dist.ProcessGroup) and "ddp_comm_hooks" in hook.__module__
        super().register_comm_hook(state, scaled if shipped else hook)
