"""DDPs with one defect that shows in a process group of their own only, or after a change of the group."""

from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from tests.reference_ddp import ReferenceDDP


class ForgetsTheMapInAGroup(ReferenceDDP):
    """Breaks the promise that a sub-group finds its unused parameters: what another member used does not count there."""

    breaks = ("sub_groups.unused_parameters",)

    def start_used(self):
        work = super().start_used()
        if self.process_group is not dist.group.WORLD:
            work.wait()
            self.counts = torch.tensor([int(i in self.used) for i in range(len(self.trainable))])
        return work


class UsesAllInAGroup(ReferenceDDP):
    """Breaks the promise that a parameter without a user keeps no gradient: in a sub-group it gets zeros."""

    breaks = ("sub_groups.unused_parameters",)

    def start_used(self):
        work = super().start_used()
        if self.process_group is not dist.group.WORLD:
            work.wait()
            self.counts = torch.ones_like(self.counts)
        return work


class SyncsInsideNoSyncInAGroup(ReferenceDDP):
    """Breaks the promise of no_sync in a sub-group: gradients are reduced inside as they are outside."""

    breaks = ("sub_groups.no_sync",)

    @contextmanager
    def no_sync(self):
        if self.process_group is not dist.group.WORLD:
            yield
        else:
            with super().no_sync():
                yield


class NoHookInAGroup(DistributedDataParallel):
    """Breaks the promise that a hook replaces the all-reduce in a sub-group: it is accepted, and the plain mean is taken."""

    breaks = ("sub_groups.comm_hook",)

    def register_comm_hook(self, state, hook):
        if self.process_group is dist.group.WORLD:
            super().register_comm_hook(state, hook)


class SparseDividesByTheWorld(ReferenceDDP):
    """Breaks the mean of sparse gradients in a sub-group: they are divided by the size of the world."""

    breaks = ("sub_groups.sparse",)

    def mean(self, bucket):
        if bucket.flat.is_sparse:
            bucket.flat = bucket.flat * (self.world_size / dist.get_world_size())
        return super().mean(bucket)


class DividesByRemainingInTheWorldOnly(DistributedDataParallel):
    """Breaks divide_by_initial_world_size=False in a sub-group: the initial size divides there."""

    breaks = ("sub_groups.join_divisor",)

    def join_hook(self, **options):
        if self.process_group is not dist.group.WORLD:
            options["divide_by_initial_world_size"] = True
        return super().join_hook(**options)


class BuffersStayBehind(DistributedDataParallel):
    """Breaks the promise that a change of the group takes buffers along: none is sent in the new one."""

    breaks = ("sub_groups.buffers_after_a_change",)
    moved = False

    def _update_process_group(self, new_process_group):
        super()._update_process_group(new_process_group)
        self.moved = True

    def _sync_buffers(self):
        if not self.moved:
            super()._sync_buffers()


class NoSyncStaysBehind(DistributedDataParallel):
    """Breaks the promise that a change of the group takes no_sync along: in the new one it does nothing."""

    breaks = ("sub_groups.no_sync_after_a_change",)
    moved = False

    def _update_process_group(self, new_process_group):
        super()._update_process_group(new_process_group)
        self.moved = True

    @contextmanager
    def no_sync(self):
        if self.moved:
            yield
        else:
            with super().no_sync():
                yield
