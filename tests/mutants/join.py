"""DDPs with one defect in how ranks that ran out of inputs follow the others."""

from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


class DividesByTheRemaining(DistributedDataParallel):
    """Breaks the default divisor of join(): gradients are divided by the ranks that remain, whatever was asked for."""

    breaks = ("join.divisor", "join.divides_by_initial_by_default", "join.trains_exactly")

    def join_hook(self, **options):
        return super().join_hook(divide_by_initial_world_size=False)


class DividesByTheInitial(DistributedDataParallel):
    """Breaks divide_by_initial_world_size=False: it is ignored."""

    breaks = ("join.divisor",)

    def join_hook(self, **options):
        return super().join_hook(divide_by_initial_world_size=True)


class ContributesOnes(DistributedDataParallel):
    """Breaks the shadowing: ranks that ran out contribute ones instead of zeros."""

    breaks = ("join.shadows", "join.trains_exactly", "join.two_modules")

    def _match_all_reduce_for_bwd_pass(self):
        for bucket in self.reducer._get_zeros_like_grad_buckets():
            bucket.buffer().fill_(1.0)
            self.reducer._run_comm_hook(bucket).wait()


class EndsWithRank0sModel(DistributedDataParallel):
    """Breaks the end of join(): the model is rank 0's instead of the last joiner's."""

    breaks = ("join.last_joiner",)

    def _sync_final_model(self, is_last_joiner):
        super()._sync_final_model(self._distributed_rank == 0)


class EndsWithoutASync(DistributedDataParallel):
    """Breaks the end of join(): each rank keeps the model that it had when it ran out."""

    breaks = ("join.last_joiner", "join.trains_exactly", "join.sub_group")

    def _sync_final_model(self, is_last_joiner):
        pass


class BringsBuffersAnyway(DistributedDataParallel):
    """Breaks the end of join(): buffers are brought even where they are not to be synced."""

    breaks = ("join.respects_buffers_off",)

    def _sync_final_model(self, is_last_joiner):
        wanted, self.forward_sync_buffers = self.forward_sync_buffers, True
        super()._sync_final_model(is_last_joiner)
        self.forward_sync_buffers = wanted


class NeverThrows(DistributedDataParallel):
    """Breaks throw_on_early_termination=True: it is ignored."""

    breaks = ("join.throws_everywhere",)

    def join(self, divide_by_initial_world_size=True, enable=True, throw_on_early_termination=False):
        return super().join(divide_by_initial_world_size, enable, False)


class ThrowsOnEvenInputs(DistributedDataParallel):
    """Breaks throw_on_early_termination=True: it raises although no rank ran out before another."""

    breaks = ("join.even_inputs_do_not_throw",)

    @contextmanager
    def join(self, divide_by_initial_world_size=True, enable=True, throw_on_early_termination=False):
        with super().join(divide_by_initial_world_size, enable, throw_on_early_termination):
            yield
        if throw_on_early_termination:
            raise RuntimeError(f"Rank {self._distributed_rank} exhausted all inputs.")


class CannotBeDisabled(DistributedDataParallel):
    """Breaks enable=False: it is ignored."""

    breaks = ("join.disabled",)

    def join(self, divide_by_initial_world_size=True, enable=True, throw_on_early_termination=False):
        return super().join(divide_by_initial_world_size, True, throw_on_early_termination)


class SwallowsExceptions(DistributedDataParallel):
    """Breaks the promise that an exception passes through join(): it ends there."""

    breaks = ("join.exceptions",)

    @contextmanager
    def join(self, *arguments, **options):
        with super().join(*arguments, **options):
            try:
                yield
            except KeyError:
                pass


class ReducesInsideNoSync(DistributedDataParallel):
    """Breaks no_sync under join(): gradients are reduced all the same."""

    breaks = ("join.no_sync",)

    @contextmanager
    def no_sync(self):
        if self._join_config.enable:
            yield
        else:
            with super().no_sync():
                yield


class FillsUnusedWithZeros(DistributedDataParallel):
    """Breaks what is known of unused parameters under join(): they get a gradient of zeros."""

    breaks = ("join.unused_parameters",)

    def forward(self, *arguments, **options):
        if self._join_config.enable:
            for parameter in self.module.parameters():
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
        return super().forward(*arguments, **options)


class HidesItsGroup(DistributedDataParallel):
    """Breaks the refusal of two process groups: every module says that it is in the default one."""

    breaks = ("join.refusals",)

    @property
    def join_process_group(self):
        return dist.group.WORLD
