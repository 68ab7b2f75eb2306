"""torch's DDP with one defect in its state dict, or in what a copy does beside taking the mean."""

from contextlib import contextmanager

from torch.nn.parallel import DistributedDataParallel


class SavesParametersOnly(DistributedDataParallel):
    """Breaks the promise that a state dict is the module's: buffers are not in it."""

    breaks = ("serialization.buffers",)

    def state_dict(self, *args, **kwargs):
        state = super().state_dict(*args, **kwargs)
        for name, _ in self.module.named_buffers():
            state.pop(f"module.{name}", None)
        return state


class LoadsParametersOnly(DistributedDataParallel):
    """Breaks the promise that a state dict can be loaded: buffers keep the values they have."""

    breaks = ("serialization.buffers",)

    def load_state_dict(self, state_dict, *args, **kwargs):
        kept = [(buffer, buffer.clone()) for buffer in self.module.buffers()]
        answer = super().load_state_dict(state_dict, *args, **kwargs)
        for buffer, value in kept:
            buffer.data.copy_(value)
        return answer


class LoadsWithoutThePrefix(DistributedDataParallel):
    """Breaks the promise that the prefix has to fit: a state dict without it is passed over in silence."""

    breaks = ("serialization.prefix_needed",)

    def load_state_dict(self, state_dict, strict=True, **options):
        return super().load_state_dict(state_dict, strict=False, **options)


class LoadsNewParameters(DistributedDataParallel):
    """Breaks training after loading: new parameters take the place of those that are there, and nothing is reduced any more."""

    breaks = ("serialization.trains_on",)

    def load_state_dict(self, state_dict, strict=True, assign=False):
        copies = {name: value.clone() for name, value in state_dict.items()}
        return super().load_state_dict(copies, strict=strict, assign=True)


class CopiesSyncBuffers(DistributedDataParallel):
    """Breaks the promise that a copy keeps its options: it syncs buffers though that was switched off."""

    breaks = ("serialization.copy_syncs_buffers",)

    def __setstate__(self, state):
        super().__setstate__(state)
        self.forward_sync_buffers = True


class CopiesSyncNoBuffers(DistributedDataParallel):
    """Breaks the promise that a copy trains like its original: it never sends buffers."""

    breaks = ("serialization.copy_syncs_buffers",)

    def __setstate__(self, state):
        super().__setstate__(state)
        self.modules_buffers = []
        self._assign_modules_buffers = lambda: None


class CopiesReduceIgnored(DistributedDataParallel):
    """Breaks the promise that a copy keeps what DDP is to ignore: it reduces all parameters."""

    breaks = ("serialization.copy_ignores",)

    def __setstate__(self, state):
        super().__setstate__({**state, "parameters_to_ignore": set()})


class CopiesForgetNoSync(DistributedDataParallel):
    """Breaks the promise of no_sync in a copy: there it does nothing."""

    breaks = ("serialization.copy_has_no_sync",)
    copied = False

    def __setstate__(self, state):
        super().__setstate__(state)
        self.copied = True

    @contextmanager
    def no_sync(self):
        if self.copied:
            yield
        else:
            with super().no_sync():
                yield
