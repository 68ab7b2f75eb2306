"""torch's DDP with one defect in its copies, in what it tells of itself, or in one of its newer options."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


class NoPrefix(DistributedDataParallel):
    """Breaks the state dict's prefix: the names are the bare module's."""

    breaks = ("serialization.state_dict",)

    def state_dict(self, *args, **kwargs):
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict, *args, **kwargs):
        return self.module.load_state_dict(state_dict, *args, **kwargs)


class LoadsNegative(DistributedDataParallel):
    """Breaks loading: what is loaded is the negative of what was saved."""

    breaks = ("serialization.saved_on_rank_0",)

    def load_state_dict(self, state_dict, *args, **kwargs):
        return super().load_state_dict({name: -value for name, value in state_dict.items()}, *args, **kwargs)


class CopiesAnyGroup(DistributedDataParallel):
    """Breaks the refusal of copies with another group: they are made, with the default group."""

    breaks = ("serialization.default_group_only",)

    def _check_default_group(self):
        pass


class CopiesIntoAnotherGroup(DistributedDataParallel):
    """Breaks the promise that a copy is in the default group: it makes a group of its own."""

    breaks = ("serialization.default_group_only",)

    def __setstate__(self, state):
        super().__setstate__(state)
        self.process_group = dist.new_group()


class CopiesDouble(DistributedDataParallel):
    """Breaks the promise that a copy takes the mean, with a static graph or without: its gradients are twice as large."""

    breaks = ("serialization.copy_reduces", "serialization.static_copy_reduces")

    def __setstate__(self, state):
        super().__setstate__(state)
        for parameter in self.module.parameters():
            parameter.register_hook(lambda gradient: 2 * gradient)


class CopyIsTheSame(DistributedDataParallel):
    """Breaks the independence of a copy: a deepcopy is the original itself."""

    breaks = ("serialization.copy_reduces",)

    def __deepcopy__(self, memo):
        return self


class CopyForgetsViews(DistributedDataParallel):
    """Breaks the options of a copy: its gradients are no views."""

    breaks = ("serialization.options_kept",)

    def __setstate__(self, state):
        super().__setstate__({**state, "gradient_as_bucket_view": False})


class CountsBytesInBits(DistributedDataParallel):
    """Breaks the logging data: the size of the parameters is told in bits."""

    breaks = ("logging_data.construction",)

    def _get_ddp_logging_data(self):
        data = super()._get_ddp_logging_data()
        data["total_parameter_size_bytes"] *= 8
        return data


class KeepsTheDefaultRate(DistributedDataParallel):
    """Breaks the sample rate of runtime data: every rate is taken for the default one."""

    breaks = ("logging_data.sampled", "logging_data.rate_at_least_one")

    def _set_ddp_runtime_logging_sample_rate(self, sample_rate):
        super()._set_ddp_runtime_logging_sample_rate(100)


class DividesByTheOldGroup(DistributedDataParallel):
    """Breaks a change of group: gradients are still divided by the size of the old one."""

    breaks = ("switches.process_group",)

    def _update_process_group(self, new_process_group):
        old = self.process_group.size()
        super()._update_process_group(new_process_group)
        for parameter in self.module.parameters():
            parameter.register_hook(lambda gradient: gradient * self.process_group.size() / old)


class AlwaysClones(DistributedDataParallel):
    """Breaks the switch that ends the clone of outputs."""

    breaks = ("switches.output_clone",)

    def _set_ddp_sink_clone(self, val):
        pass


class FusedStepsTwiceAsFar(DistributedDataParallel):
    """Breaks the fused optimizer's options: it steps at twice the rate."""

    breaks = ("optimizer_overlap.fused_steps",)

    def _register_fused_optim(self, optim, *args, **kwargs):
        if "lr" in kwargs:
            kwargs["lr"] *= 2
        super()._register_fused_optim(optim, *args, **kwargs)


class FusedTakesAll(DistributedDataParallel):
    """Breaks the fused optimizer's choice of parameters: it takes all of them."""

    breaks = ("optimizer_overlap.fused_subset",)

    def _register_fused_optim(self, optim, *args, optim_params=None, **kwargs):
        super()._register_fused_optim(optim, *args, **kwargs)


class FusedTakesAnything(DistributedDataParallel):
    """Breaks the refusals of a fused optimizer: what cannot be registered is passed over in silence."""

    breaks = ("optimizer_overlap.fused_only_one", "optimizer_overlap.fused_unknown")

    def register_comm_hook(self, state, hook):
        try:
            super().register_comm_hook(state, hook)
        except RuntimeError:
            pass

    def _register_fused_optim(self, optim, *args, **kwargs):
        try:
            super()._register_fused_optim(optim, *args, **kwargs)
        except (RuntimeError, ValueError):
            pass


class DelayedAreSummed(DistributedDataParallel):
    """Breaks the mean of delayed parameters: they are summed."""

    breaks = ("delayed_all_reduce.reduced",)

    def _delayed_all_reduce_hook(self, grad):
        self._delay_grad_buffer.mul_(self.process_group.size())
        return super()._delayed_all_reduce_hook(grad)


class DelayedCostMore(DistributedDataParallel):
    """Breaks the economy of a delay: with the delayed parameters another all-reduce goes out."""

    breaks = ("delayed_all_reduce.reduced",)

    def _delayed_all_reduce_hook(self, grad):
        dist.all_reduce(torch.zeros_like(grad), group=self.process_group)
        return super()._delayed_all_reduce_hook(grad)


class DelaysHalfHeartedly(DistributedDataParallel):
    """Breaks the refusal of one of the two arguments of a delay: it is passed over in silence."""

    breaks = ("delayed_all_reduce.both_arguments",)

    def __init__(self, module, delay_all_reduce_named_params=None, param_to_hook_all_reduce=None, **options):
        if delay_all_reduce_named_params is not None and param_to_hook_all_reduce is not None:
            options["delay_all_reduce_named_params"] = delay_all_reduce_named_params
            options["param_to_hook_all_reduce"] = param_to_hook_all_reduce
        super().__init__(module, **options)


class DelayedAreReducedTwice(DistributedDataParallel):
    """Breaks the separation of delayed parameters: the reducer has them, too."""

    breaks = ("delayed_all_reduce.not_in_a_bucket",)

    def _build_params_for_reducer(self):
        self.parameters_to_ignore = set()
        return super()._build_params_for_reducer()


class DelayedKeepTheirValues(DistributedDataParallel):
    """Breaks the broadcast of delayed parameters: every rank keeps its own."""

    breaks = ("delayed_all_reduce.broadcast",)

    def _register_delay_all_reduce_hook(self, **options):
        own = [parameter.detach().clone() for parameter in self._delay_all_reduce_params]
        super()._register_delay_all_reduce_hook(**options)
        with torch.no_grad():
            for parameter, value in zip(self._delay_all_reduce_params, own, strict=True):
                parameter.copy_(value)


class NeverBatches(DistributedDataParallel):
    """Breaks batched_grad_copy: gradients are copied one by one."""

    breaks = ("batched_copy.one_copy", "batched_copy.divides")

    def __init__(self, module, batched_grad_copy=False, **options):
        super().__init__(module, **options)


class BatchedAreSummed(DistributedDataParallel):
    """Breaks batched_grad_copy: with it gradients are summed."""

    breaks = ("batched_copy.same_training",)

    def __init__(self, module, batched_grad_copy=False, **options):
        super().__init__(module, batched_grad_copy=batched_grad_copy, **options)
        if batched_grad_copy:
            for parameter in module.parameters():
                parameter.register_hook(lambda gradient: gradient * self.process_group.size())


class BatchedAreDividedForHooks(DistributedDataParallel):
    """Breaks batched_grad_copy beside a hook: the hook sees divided gradients."""

    breaks = ("batched_copy.hook",)

    def register_comm_hook(self, state, hook):
        def dividing(state, bucket):
            bucket.buffer().div_(self.process_group.size())
            return hook(state, bucket)

        super().register_comm_hook(state, dividing if self.batched_grad_copy else hook)
