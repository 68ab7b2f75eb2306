"""Torch's own DDP with one defect in copies that a rank makes, in gradients from before, or in what is noticed late."""

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


class CopiesTogether(DistributedDataParallel):
    """Breaks what is known of copies: they begin with rank 0's weights, and wait for all ranks."""

    breaks = ("serialization.copy_of_one_rank",)

    def __setstate__(self, state):
        super().__setstate__(state)
        for parameter in self.module.parameters():
            dist.broadcast(parameter.data, 0)


class CopiesForTraining(DistributedDataParallel):
    """Breaks what is known of copies: they are in training mode."""

    breaks = ("serialization.copy_keeps_mode",)

    def __setstate__(self, state):
        super().__setstate__(state)
        self.train()


class BeginsWithoutGradients(DistributedDataParallel):
    """Breaks what is known of gradients from before wrapping: they are set to None."""

    breaks = ("construction.gradients_stay",)

    def __init__(self, module, **options):
        super().__init__(module, **options)
        for parameter in module.parameters():
            parameter.grad = None


class ForgivesLateMisses(DistributedDataParallel):
    """Breaks the promise that a missing gradient makes the next forward raise: after six iterations it does not."""

    breaks = ("missing_gradient.in_any_iteration",)
    iterations = 0

    def forward(self, *arguments, **options):
        self.iterations += 1
        try:
            return super().forward(*arguments, **options)
        except RuntimeError:
            if self.iterations > 6:
                return self.module(*arguments, **options)
            raise
