"""DDPs with one defect in what their options synchronize at construction and at a forward."""

import warnings

from torch.nn.parallel import DistributedDataParallel


class SynchronizesAnyway(DistributedDataParallel):
    """Breaks the promise that init_sync=False communicates nothing: the constructor synchronizes all the same."""

    breaks = ("sync_options.init_sync_off", "sync_options.init_sync_off_shapes")

    def __init__(self, module, *, init_sync=True, **options):
        super().__init__(module, **options)


class ForwardFlagReachesConstruction(DistributedDataParallel):
    """Breaks the promise that forward_sync_buffers=False leaves the constructor's broadcast alone: buffers are left out there too."""

    breaks = ("sync_options.forward_sync_buffers_off", "sync_options.forward_flag_wins")

    def __init__(self, module, *, forward_sync_buffers=None, **options):
        if forward_sync_buffers is False:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                super().__init__(module, **{**options, "broadcast_buffers": False})
        else:
            super().__init__(module, forward_sync_buffers=forward_sync_buffers, **options)


class OldFlagStopsAtConstruction(DistributedDataParallel):
    """Breaks the promise that broadcast_buffers=False keeps buffers out of the constructor's broadcast: only forwards obey it."""

    breaks = ("sync_options.broadcast_buffers_off",)

    def __init__(self, module, *, broadcast_buffers=None, **options):
        super().__init__(module, broadcast_buffers=None if broadcast_buffers is False else broadcast_buffers, **options)
        self.forward_sync_buffers = self.forward_sync_buffers and broadcast_buffers is not False


class DeprecatesInSilence(DistributedDataParallel):
    """Breaks the promise that the old flag warns: it says nothing."""

    breaks = ("sync_options.broadcast_buffers_deprecated", "sync_options.forward_flag_wins")

    def __init__(self, module, **options):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            super().__init__(module, **options)


class DeprecatesAlways(DistributedDataParallel):
    """Breaks the promise that only the old flag warns: the constructor does so in any case."""

    breaks = ("sync_options.broadcast_buffers_deprecated",)

    def __init__(self, module, **options):
        warnings.warn("broadcast_buffers is deprecated", FutureWarning, stacklevel=2)
        super().__init__(module, **options)


class OldFlagWins(DistributedDataParallel):
    """Breaks the promise that forward_sync_buffers decides: where both flags are given broadcast_buffers does."""

    breaks = ("sync_options.forward_flag_wins",)

    def __init__(self, module, *, broadcast_buffers=None, **options):
        super().__init__(module, broadcast_buffers=broadcast_buffers, **options)
        if broadcast_buffers is not None:
            self.forward_sync_buffers = broadcast_buffers


class ForwardNeverSynchronizes(DistributedDataParallel):
    """Breaks the promise that a forward computes with rank 0's buffers: it uses the rank's own."""

    breaks = ("sync_options.buffers_and_gradients",)

    def _sync_buffers(self):
        pass
