"""Torch's own DDP with one defect, where a mutant of the reference cannot go: join, copies, logging, waiting."""

import copy

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


class JoinIgnoresTheDivisor(DistributedDataParallel):
    """Breaks divide_by_initial_world_size=False: join() always divides by the initial world size."""

    breaks = ("join.divisor",)

    def join(self, divide_by_initial_world_size=True, **options):
        return super().join(divide_by_initial_world_size=True, **options)


class JoinDividesByThoseThatRemain(DistributedDataParallel):
    """Breaks the default divisor of join(): it divides by the ranks that remain."""

    breaks = ("join.divides_by_initial_by_default", "join.shadows")

    def join(self, divide_by_initial_world_size=False, **options):
        return super().join(divide_by_initial_world_size=divide_by_initial_world_size, **options)

    def join_hook(self, **options):
        return super().join_hook(**{"divide_by_initial_world_size": False, **options})


class JoinNeverThrows(DistributedDataParallel):
    """Breaks throw_on_early_termination: the loop goes on when a rank runs out of inputs."""

    breaks = ("join.throws_everywhere",)

    def join(self, *arguments, throw_on_early_termination=False, **options):
        return super().join(*arguments, **options)


class JoinIsAlwaysOn(DistributedDataParallel):
    """Breaks enable=False: join() communicates all the same."""

    breaks = ("join.disabled",)

    def join(self, divide_by_initial_world_size=True, enable=True, throw_on_early_termination=False):
        return super().join(divide_by_initial_world_size, True, throw_on_early_termination)


class JoinSyncsNoModel(DistributedDataParallel):
    """Breaks the end of join(): ranks that ran out early keep the parameters they had."""

    breaks = ("join.last_joiner", "join.trains_exactly")

    def _sync_final_model(self, is_last_joiner):
        self._find_common_rank(self._distributed_rank, is_last_joiner)


class JoinSyncsBuffersAnyway(DistributedDataParallel):
    """Breaks broadcast_buffers=False under join(): the final sync brings buffers too."""

    breaks = ("join.respects_buffers_off",)

    def _sync_final_model(self, is_last_joiner):
        super()._sync_final_model(is_last_joiner)
        rank = self._find_common_rank(self._distributed_rank, is_last_joiner)
        source = dist.get_global_rank(self.process_group, rank) if self.process_group is not dist.group.WORLD else rank
        for buffer in self.module.buffers():
            dist.broadcast(buffer.detach(), source, group=self.process_group)


class StateDictWithoutPrefix(DistributedDataParallel):
    """Breaks the names of the state dict: those of the module stand in it, without the prefix."""

    breaks = ("serialization.state_dict",)

    def state_dict(self, *arguments, **options):
        return self.module.state_dict(*arguments, **options)


class CopiesForgetOptions(DistributedDataParallel):
    """Breaks the promise that a copy keeps its options: cap and search for unused parameters are those of torch."""

    breaks = ("serialization.options_kept",)

    def __deepcopy__(self, memo):
        return DistributedDataParallel(copy.deepcopy(self.module, memo))

    def __reduce__(self):
        return DistributedDataParallel, (self.module,)


class CopiesStayLocal(DistributedDataParallel):
    """Breaks the promise that a copy reduces: its gradients stay on their rank."""

    breaks = ("serialization.copy_reduces",)

    def __setstate__(self, state):
        super().__setstate__(state)
        self.require_backward_grad_sync = False


class CopiesAnyGroup(DistributedDataParallel):
    """Breaks the refusal to copy a DDP of another group: the copy has the default group."""

    breaks = ("serialization.default_group_only",)

    def _check_default_group(self):
        pass


class LogsNothingAtConstruction(DistributedDataParallel):
    """Breaks the logging data of the constructor: what the options were is told as zeros."""

    breaks = ("logging_data.construction",)

    def _get_ddp_logging_data(self):
        return {key: 0 if isinstance(value, int) else value for key, value in super()._get_ddp_logging_data().items()}


class SamplesNothing(DistributedDataParallel):
    """Breaks the sample rate: whatever is asked for, every iteration after the tenth waits for the hundredth."""

    breaks = ("logging_data.sampled",)

    def _set_ddp_runtime_logging_sample_rate(self, sample_rate):
        if sample_rate < 1:
            super()._set_ddp_runtime_logging_sample_rate(sample_rate)


class TakesAnyRate(DistributedDataParallel):
    """Breaks the refusal of sample rates below 1."""

    breaks = ("logging_data.rate_at_least_one",)

    def _set_ddp_runtime_logging_sample_rate(self, sample_rate):
        super()._set_ddp_runtime_logging_sample_rate(max(1, sample_rate))


class ConstructsAlone(DistributedDataParallel):
    """Breaks the promise that the constructor waits for all ranks: nothing is compared and nothing sent."""

    breaks = ("collectives.constructor_waits", "rank0_broadcast.parameters")

    def __init__(self, module, **options):
        from unittest import mock

        place = "torch.nn.parallel.distributed."
        with (
            mock.patch(place + "_sync_module_states"),
            mock.patch(place + "_verify_param_shape_across_processes", return_value=True),
        ):
            super().__init__(module, **options)


class NeverWaits(DistributedDataParallel):
    """Breaks the promise that backward waits for all ranks: every rank goes on with its own gradients."""

    breaks = ("collectives.backward_waits", "mean_gradients.mean")

    def __init__(self, module, **options):
        super().__init__(module, **options)

        def own(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
            done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
            done.set_result(bucket.buffer())
            return done

        super().register_comm_hook(None, own)


class TrainsACopy(DistributedDataParallel):
    """Breaks the promise that the module handed over is the one that is trained: it is a copy."""

    breaks = ("after_wrapping.own_copy", "construction.attributes")

    def __init__(self, module, **options):
        super().__init__(copy.deepcopy(module), **options)


class SumsOtherDtypes(DistributedDataParallel):
    """Breaks the promise that a model may mix dtypes: only the first parameter's dtype is averaged, others are summed."""

    breaks = ("reduction.mixed_dtypes",)

    def __init__(self, module, **options):
        super().__init__(module, **options)
        size = dist.get_world_size(self.process_group)
        trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        for parameter in trained:
            if parameter.dtype is not trained[0].dtype:
                parameter.register_hook(lambda gradient: gradient * size)


class IgnoresTheHook(DistributedDataParallel):
    """Breaks communication hooks: one is accepted, and the plain mean is taken."""

    breaks = ("shipped_hooks.no_op", "shipped_hooks.fp16", "power_sgd.rank", "post_local_sgd.sub_group")

    def register_comm_hook(self, state, hook):
        self._check_comm_hook(hook)
