"""DDPs that are right in a first iteration and not in every one."""

import contextlib

import torch
from torch.nn.parallel import DistributedDataParallel


class ReducesInTrainingOnly(DistributedDataParallel):
    """Breaks the promise that every synchronized backward is reduced: in eval mode it is not. Buffers are sent as ever."""

    breaks = ("mean_gradients.eval_mode",)

    def forward(self, *inputs, **keywords):
        if self.training and self.module.training:
            return super().forward(*inputs, **keywords)
        with self.no_sync():
            output = super().forward(*inputs, **keywords)
        self.require_forward_param_sync = True
        return output


class MissesTheStepAfterEvaluation(DistributedDataParallel):
    """Breaks the promise that every iteration is reduced: the first one after a forward under no_grad is not."""

    breaks = ("mean_gradients.after_evaluation",)
    evaluated = False

    def forward(self, *inputs, **keywords):
        missed, self.evaluated = self.evaluated, not torch.is_grad_enabled()
        with self.no_sync() if missed else contextlib.nullcontext():
            return super().forward(*inputs, **keywords)


class StopsAfterAnError(DistributedDataParallel):
    """Breaks what is known of a forward that raised: after one, as for a bad batch, no iteration is reduced."""

    breaks = ("mean_gradients.after_an_error",)

    def forward(self, *inputs, **keywords):
        try:
            return super().forward(*inputs, **keywords)
        except Exception:
            self.require_backward_grad_sync = False
            raise


class StopsAfterTenIterations(DistributedDataParallel):
    """Breaks the promise that every iteration is reduced: from the eleventh on, where runtime data is sampled, none is."""

    breaks = ("mean_gradients.every_iteration",)
    forwards = 0

    def forward(self, *inputs, **keywords):
        self.forwards += torch.is_grad_enabled()
        with self.no_sync() if self.forwards > 10 else contextlib.nullcontext():
            return super().forward(*inputs, **keywords)


class StaticCountsEvaluations(DistributedDataParallel):
    """Breaks the promise that every iteration is reduced: with static_graph=True a forward under no_grad counts as the first."""

    breaks = ("mean_gradients.after_evaluation",)

    def forward(self, *inputs, **keywords):
        if self.static_graph and not torch.is_grad_enabled():
            self._static_graph_delay_allreduce_enqueued = True
        return super().forward(*inputs, **keywords)
