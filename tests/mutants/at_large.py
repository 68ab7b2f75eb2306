"""
DDPs that are wrong wherever they are used, each in one way; they are tried on every case.

Too broad to say anything of a single case, they show which laws can be false at all: in a case about no_sync or hooks or
join the law that a gradient is the mean is as good as any other, and no mutant of that family need break it.
"""

import torch
from torch.nn.parallel import DistributedDataParallel


def changed(tensor: torch.Tensor) -> torch.Tensor:
    """Other values of the same dtype."""
    return ~tensor if tensor.dtype is torch.bool else tensor + 3


class LearnsNothing(DistributedDataParallel):
    """Breaks the promise that training moves the weights: every gradient is zero."""

    breaks = ("mean_gradients.mean", "trajectory.one_process", "trajectory.options")
    at_large = True

    def __init__(self, module, *arguments, **options):
        super().__init__(module, *arguments, **options)
        self._forget()

    def __setstate__(self, state):
        super().__setstate__(state)
        self._forget()

    def _forget(self):
        for parameter in self.module.parameters():
            if parameter.requires_grad:
                parameter.register_hook(torch.zeros_like)


class BeginsAnew(DistributedDataParallel):
    """Breaks the promise that ranks begin with rank 0's parameters and buffers: they begin with other values."""

    breaks = ("rank0_broadcast.parameters", "rank0_broadcast.buffers", "trajectory.different_start")
    at_large = True

    def __init__(self, module, *arguments, **options):
        super().__init__(module, *arguments, **options)
        with torch.no_grad():
            for tensor in (*module.parameters(), *module.buffers()):
                if tensor.device.type != "meta":
                    tensor.copy_(changed(tensor))


class ShiftsBuffers(DistributedDataParallel):
    """Breaks the promise about buffers in a forward: it computes neither with rank 0's nor with the rank's own."""

    breaks = ("buffers.rank_0_at_forward", "buffers.off")
    at_large = True

    def __init__(self, module, *arguments, **options):
        super().__init__(module, *arguments, **options)

        def shift(*_):
            with torch.no_grad():
                for buffer in module.buffers():
                    buffer.data.copy_(changed(buffer))

        module.register_forward_pre_hook(shift)


class LogsRubbish(DistributedDataParallel):
    """Breaks the logging data: every number is one more than it is, and every text is turned around."""

    breaks = ("logging_data.construction",)
    at_large = True

    def _get_ddp_logging_data(self):
        data = super()._get_ddp_logging_data()
        return {key: value[::-1] if isinstance(value, str) else value + 1 for key, value in data.items()}
