"""DDPs with a defect that torch once had, in the wrapper, a hook, or an optimizer that goes with it: each names the report or the change."""

import collections
import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from tests.mutants.of_power_sgd import _PowerSGD
from tests.reference_ddp import ReferenceDDP


class SumsSparseBeforeItDivides(ReferenceDDP):
    """Breaks what is known of sparse gradients: they are summed first, so that large ones overflow (pytorch/pytorch#61814)."""

    breaks = ("reduction.sparse_divided_first",)

    def mean(self, bucket):
        if not bucket.flat.is_sparse:
            return super().mean(bucket)
        work = dist.all_reduce(bucket.flat, group=self.process_group, async_op=True)
        return work.get_future().then(lambda done: done.value()[0] / self.world_size)


class LaysNewGradientsAsInMemory(ReferenceDDP):
    """Breaks the mean on a rank that does not use a strided parameter: it is copied as it lies in memory (pytorch/pytorch#34904)."""

    breaks = ("strides.made_by_ddp",)

    def write(self, parameter, mean):
        if parameter.grad is None and not parameter.is_contiguous():
            mean = mean.flatten().as_strided(parameter.shape, parameter.stride())
        super().write(parameter, mean)


class ReducesUnusedInForward(ReferenceDDP):
    """Breaks what is known of dropped outputs: a forward reduces the buckets of unused parameters (pytorch/pytorch#22219)."""

    breaks = ("unused_search.forward_starts_nothing",)

    def expect_gradients(self, output):
        super().expect_gradients(output)
        if self.unused and len(self.unused) < len(self.trainable):
            self.started = True
            for index in self.unused:
                self.mark_ready(index)

    def refuse_unfinished_reduction(self):
        """What was begun in forward is not missed."""


class RemembersAFailure(DistributedDataParallel):
    """Breaks a change of the group after a failed backward: what that one used counts in the next, too (pytorch/pytorch#128092)."""

    breaks = ("switches.group_after_a_failed_backward",)
    kept = ()

    def __init__(self, module, *arguments, **options):
        super().__init__(module, *arguments, **options)
        self.touched = []
        for parameter in module.parameters():
            if parameter.requires_grad:
                parameter.register_hook(lambda _, parameter=parameter: self.touched.append(parameter))

    def _update_process_group(self, new_process_group):
        super()._update_process_group(new_process_group)
        self.kept = tuple(self.touched)

    def forward(self, *inputs, **keywords):
        if torch.is_grad_enabled():
            for parameter in self.kept if self.find_unused_parameters else ():
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
            self.kept = ()
            self.touched.clear()
        return super().forward(*inputs, **keywords)


class LosesVersions(DistributedDataParallel):
    """Breaks the promise that a state dict is the module's: the versions of modules are not in it (pytorch/pytorch#74162)."""

    breaks = ("serialization.versions",)

    def state_dict(self, *arguments, **options):
        return collections.OrderedDict(super().state_dict(*arguments, **options))


class IgnoresTheEpsilon(_PowerSGD):
    """Breaks PowerSGD's orthogonalization_epsilon: it is ignored, and zeros become NaN (pytorch/pytorch#55738)."""

    breaks = ("power_sgd.zero_gradient",)

    def change(self, state, hook):
        state.orthogonalization_epsilon = 0


class AlwaysAddsAnEpsilon(_PowerSGD):
    """Breaks what is known of PowerSGD's default: an epsilon is added all the same (pytorch/pytorch#55738)."""

    breaks = ("power_sgd.zero_gradient_by_default",)

    def change(self, state, hook):
        state.orthogonalization_epsilon = state.orthogonalization_epsilon or 1e-8


class RemembersInSingle(_PowerSGD):
    """Breaks PowerSGD in double precision: what is left out is remembered in single precision (pytorch/pytorch#50985)."""

    breaks = ("power_sgd.double_precision",)

    def change(self, state, hook):
        def rounded(future):
            for error in state.error_dict.values():
                error.copy_(error.float())
            return future.value()

        return lambda state, bucket: hook(state, bucket).then(rounded)


class CompressesInSingle(_PowerSGD):
    """Breaks PowerSGD in double precision: it is compressed in single precision (pytorch/pytorch#48902)."""

    breaks = ("power_sgd.double_precision",)

    def change(self, state, hook):
        def rounded(future):
            answer = future.value()
            return answer.float().to(answer.dtype)

        return lambda state, bucket: hook(state, bucket).then(rounded)


class _PostLocalSGD(DistributedDataParallel):
    """The optimizer that goes with the post-localSGD hook is changed by `change`."""

    def register_comm_hook(self, state, hook):
        super().register_comm_hook(state, hook)
        if hook.__name__ == "post_localSGD_hook":
            from torch.distributed.optim import PostLocalSGDOptimizer

            self.change(PostLocalSGDOptimizer)

    def change(self, optimizer):
        raise NotImplementedError


class CountsParameters(_PostLocalSGD):
    """Breaks the period of averaging: every parameter counts as a step (pytorch/pytorch#74737)."""

    breaks = ("post_local_sgd.optimizer",)

    def change(self, optimizer):
        def step(self):
            self.optim.step()
            for group in self.param_groups:
                for parameter in group["params"]:
                    self.averager.average_parameters([parameter])

        optimizer.step = step


class AveragesRows(_PostLocalSGD):
    """Breaks the averaging of parameters: it is made of their rows, and these are thrown away (pytorch/pytorch#74894)."""

    breaks = ("post_local_sgd.optimizer", "post_local_sgd.optimizer_resumed")

    def change(self, optimizer):
        def step(self):
            self.optim.step()
            parameters = [parameter for group in self.param_groups for parameter in group["params"]]
            rows = [torch.nn.Parameter(row.detach().clone()) for parameter in parameters for row in parameter]
            for row in rows:
                row.grad = torch.zeros_like(row)
            self.averager.average_parameters(rows)

        optimizer.step = step


class WarmsUpAgain(_PostLocalSGD):
    """Breaks the loading of the optimizer's state: the averager begins anew (pytorch/pytorch#74556)."""

    breaks = ("post_local_sgd.optimizer_resumed",)

    def change(self, optimizer):
        optimizer.load_state_dict = lambda self, state: self.optim.load_state_dict(state)


class _ZeroRedundancy(DistributedDataParallel):
    """The ZeroRedundancyOptimizer is changed by `change`, where there is one by the first forward."""

    changed = False

    def forward(self, *inputs, **keywords):
        module = sys.modules.get("torch.distributed.optim.zero_redundancy_optimizer")
        if module is not None and not self.changed:
            self.changed = True
            self.change(module.ZeroRedundancyOptimizer)
        return super().forward(*inputs, **keywords)

    def change(self, optimizer):
        raise NotImplementedError


class MixesUpZerosGroups(_ZeroRedundancy):
    """Breaks the consolidated state where groups alternate: it stands in the order of registration (pytorch/pytorch#54736)."""

    breaks = ("trajectory.zero_redundancy_groups",)

    def change(self, optimizer):
        plain = optimizer.state_dict

        def state_dict(self):
            saved = plain(self)
            places = {id(p): index for index, p in enumerate(p for group in self.param_groups for p in group["params"])}
            registered = sorted(places, key=lambda each: self.order[each])
            saved["state"] = {index: saved["state"][places[each]] for index, each in enumerate(registered)}
            return saved

        optimizer.order = {id(parameter): index for index, parameter in enumerate(self.module.parameters())}
        optimizer.state_dict = state_dict


class KeepsZerosRates(_ZeroRedundancy):
    """Breaks the rates of a ZeroRedundancyOptimizer: one that changes does not reach the optimizer that steps."""

    breaks = ("trajectory.zero_redundancy_groups",)

    def change(self, optimizer):
        optimizer._sync_param_groups = staticmethod(lambda source, destination: None)


class HooksSharedViewsTwice(DistributedDataParallel):
    """Breaks the mean of a shared parameter where gradients are views: each of its names counts (pytorch/pytorch#51929)."""

    breaks = ("construction.shared_parameter_options",)

    def __init__(self, module, *arguments, **options):
        super().__init__(module, *arguments, **options)
        if not self.gradient_as_bucket_view:
            return
        named = [parameter for each in module.modules() for parameter in each.parameters(recurse=False)]
        for parameter in module.parameters():
            names = sum(each is parameter for each in named)
            if names > 1 and parameter.requires_grad:
                parameter.register_hook(lambda gradient, names=names: gradient * names)


class JoinBringsTheFirstBuffers(DistributedDataParallel):
    """Breaks the end of join() for buffers that were assigned anew: those of construction are brought (pytorch/pytorch#63916)."""

    breaks = ("join.ends_with_reassigned_buffers",)

    def __init__(self, module, *arguments, **options):
        super().__init__(module, *arguments, **options)
        self.first = dict(module.named_buffers())

    def _sync_final_model(self, is_last_joiner):
        anew = [buffer for name, buffer in self.module.named_buffers() if buffer is not self.first.get(name)]
        kept = [buffer.clone() for buffer in anew]
        super()._sync_final_model(is_last_joiner)
        for buffer, own in zip(anew, kept, strict=True):
            buffer.copy_(own)
