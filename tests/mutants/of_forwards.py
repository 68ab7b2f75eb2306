"""Torch's own DDP with one defect in a forward: where the module raises, or in a copy."""

from torch.nn.parallel import DistributedDataParallel


class SwallowsExceptions(DistributedDataParallel):
    """Breaks the promise that the module's own exception comes through: there is no output, and nobody is told why."""

    breaks = ("buffers.after_an_exception",)

    def forward(self, *arguments, **options):
        try:
            return super().forward(*arguments, **options)
        except Exception:
            return None


class CopiesSendNoBuffers(DistributedDataParallel):
    """Breaks the promise that every forward sends buffers: a copy's sends none."""

    breaks = ("serialization.copy_ignores_buffers",)

    def __setstate__(self, state):
        super().__setstate__(state)
        self.broadcast_buffers = False
