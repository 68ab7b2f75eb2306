"""Reference DDPs with one defect in no_sync."""

from contextlib import contextmanager

from tests.reference_ddp import ReferenceDDP


class IgnoresNoSync(ReferenceDDP):
    """Breaks no_sync: gradients are reduced inside as they are outside."""

    breaks = ("no_sync.accumulates", "no_sync.starts_no_collective", "collectives.no_sync")

    @contextmanager
    def no_sync(self):
        yield


class NeverSyncsAgain(ReferenceDDP):
    """Breaks the end of no_sync: synchronization stays off."""

    breaks = ("no_sync.accumulates",)

    @contextmanager
    def no_sync(self):
        self.require_backward_grad_sync = False
        yield


class StaysOffAfterAnException(ReferenceDDP):
    """Breaks the end of no_sync by an exception: synchronization stays off."""

    breaks = ("no_sync.survives_exceptions",)

    @contextmanager
    def no_sync(self):
        before, self.require_backward_grad_sync = self.require_backward_grad_sync, False
        yield
        self.require_backward_grad_sync = before


class SwallowsExceptions(ReferenceDDP):
    """Breaks the promise that an exception passes through no_sync: it ends there."""

    breaks = ("no_sync.survives_exceptions",)

    @contextmanager
    def no_sync(self):
        with super().no_sync():
            try:
                yield
            except Exception:
                pass


class InnerEndSwitchesOn(ReferenceDDP):
    """Breaks nesting: leaving the inner no_sync switches synchronization on."""

    breaks = ("no_sync.survives_nesting",)

    @contextmanager
    def no_sync(self):
        self.require_backward_grad_sync = False
        try:
            yield
        finally:
            self.require_backward_grad_sync = True


class DropsWhatAccumulated(ReferenceDDP):
    """Breaks accumulation: what gathered inside no_sync is thrown away when it ends."""

    breaks = ("no_sync.accumulates", "no_sync.equals_one_large_batch")

    @contextmanager
    def no_sync(self):
        with super().no_sync():
            yield
        for parameter in self.trainable:
            parameter.grad = None


class BackwardDecides(ReferenceDDP):
    """Breaks the promise that the forward decides: what counts is whether backward runs inside no_sync."""

    breaks = ("no_sync.forward_decides",)

    def forward(self, *args, **kwargs):
        inside, self.require_backward_grad_sync = self.require_backward_grad_sync, True
        try:
            return super().forward(*args, **kwargs)
        finally:
            self.require_backward_grad_sync = inside

    def on_gradient(self, index):
        if self.require_backward_grad_sync:
            super().on_gradient(index)
        else:
            self.started = False


class ReducesTheNewPartOnly(ReferenceDDP):
    """Breaks accumulation: the synced step averages its own gradients and leaves what accumulated before local."""

    breaks = ("no_sync.accumulates",)

    def expect_gradients(self, output):
        super().expect_gradients(output)
        self.before = {id(p): p.grad.clone() for p in self.trainable if p.grad is not None and not p.grad.is_sparse}

    def fill(self, bucket):
        super().fill(bucket)
        for parameter, part in zip(bucket.parameters(), bucket.gradients(), strict=False):
            if id(parameter) in self.before:
                part.sub_(self.before[id(parameter)])

    def write(self, parameter, mean):
        super().write(parameter, mean + self.before[id(parameter)] if id(parameter) in self.before else mean)


class DividesByTheMicroBatches(ReferenceDDP):
    """Breaks accumulation: the accumulated sum is divided by the number of backwards that it took."""

    breaks = ("no_sync.accumulates", "no_sync.equals_one_large_batch")
    local = 0

    def forward(self, *args, **kwargs):
        self.local += not self.require_backward_grad_sync
        return super().forward(*args, **kwargs)

    def finish(self):
        super().finish()
        self.local = 0

    def write(self, parameter, mean):
        super().write(parameter, mean / (self.local + 1))


class CallsTheHookInside(ReferenceDDP):
    """Breaks the silence inside no_sync: a communication hook is called for what accumulates there."""

    breaks = ("no_sync.hook_is_not_called",)

    def on_gradient(self, index):
        super().on_gradient(index)
        if not self.expecting and self.hook and not self.require_backward_grad_sync:
            bucket = self.bucket_of[index]
            self.fill(bucket)
            self.hook(bucket)


class ForgetsWhatNoSyncUsed(ReferenceDDP):
    """Breaks find_unused_parameters with no_sync: a parameter used in an earlier micro-batch only counts as unused."""

    breaks = ("no_sync.used_in_any_micro_batch",)

    def expect_gradients(self, output):
        super().expect_gradients(output)
        self.used.clear()
