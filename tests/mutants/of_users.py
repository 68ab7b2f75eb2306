"""DDPs with one defect in who used which parameter, that a second dtype, a hook or a bucket without a user shows."""

import torch
from torch.nn.parallel import DistributedDataParallel

from tests.reference_ddp import ReferenceDDP


class SkippersOfOtherDtypesKeepTheirs(ReferenceDDP):
    """Breaks the mean of what another rank used in a model of several dtypes: of all but the first dtype it is not written."""

    breaks = ("unused_parameters.kinds",)

    def write(self, parameter, mean):
        first = self.trainable[0].dtype
        used = any(self.trainable[index] is parameter for index in self.used)
        if used or not self.find_unused_parameters or parameter.dtype is first:
            super().write(parameter, mean)


class HooksFillUnused(DistributedDataParallel):
    """Breaks the promise that what no rank used keeps None: with a communication hook it gets zeros."""

    breaks = ("unused_parameters.kinds",)
    hooked = False

    def register_comm_hook(self, state, hook):
        super().register_comm_hook(state, hook)
        self.hooked = True

    def forward(self, *inputs, **keywords):
        if self.hooked and self.find_unused_parameters and torch.is_grad_enabled():
            for parameter in self.module.parameters():
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
        return super().forward(*inputs, **keywords)


class SkipsBucketsNobodyHereUsed(ReferenceDDP):
    """Breaks the mean of what another rank used: a bucket of which this rank used nothing is not written back, where there are several."""

    breaks = ("unused_parameters.kinds",)

    def write(self, parameter, mean):
        index = next(index for index, each in enumerate(self.trainable) if each is parameter)
        used_here = self.used.intersection(self.bucket_of[index].indices)
        if used_here or not self.find_unused_parameters or len(self.buckets) < 2:
            super().write(parameter, mean)
