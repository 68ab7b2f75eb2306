"""Reference DDPs with one defect in what a communication hook is handed, and what becomes of its answer."""

from tests.reference_ddp import Bucket, ReferenceDDP


class DividesBeforeTheHook(ReferenceDDP):
    """Breaks the promise that a hook sees the undivided bucket: it is divided by the world size before."""

    breaks = ("comm_hooks.undivided", "comm_hooks.sum")

    def start(self, bucket):
        if self.hook is not None:
            bucket.flat = bucket.flat / self.world_size
        return super().start(bucket)


class DividesTheAnswer(ReferenceDDP):
    """Breaks the promise that the hook's answer becomes the gradient: it is divided by the world size."""

    breaks = ("comm_hooks.answer_becomes_gradient", "comm_hooks.sum")

    def write(self, parameter, mean):
        super().write(parameter, mean / self.world_size if self.hook else mean)


class ReducesBesideTheHook(ReferenceDDP):
    """Breaks the promise that a hook runs instead of the all-reduce: it is called, and the mean is taken all the same."""

    breaks = ("comm_hooks.no_op_is_local",)

    def start(self, bucket):
        if self.hook is None:
            return super().start(bucket)
        own = bucket.flat.clone()
        super().start(bucket).wait()
        bucket.flat = own
        return self.mean(bucket)


class KeepsTheBucket(ReferenceDDP):
    """Breaks the promise that the answer becomes the gradient: what lies in the bucket does."""

    breaks = ("comm_hooks.answer_becomes_gradient",)

    def start(self, bucket):
        flat, work = bucket.flat, super().start(bucket)
        return work.then(lambda done: (done.value(), flat)[1]) if self.hook else work


class CallsTheHookTwice(ReferenceDDP):
    """Breaks the promise of one call for each bucket: the hook is called twice."""

    breaks = ("comm_hooks.once_for_each_bucket",)

    def start(self, bucket):
        if self.hook is not None:
            own = bucket.flat.clone()
            super().start(bucket).wait()
            bucket.flat = own
        return super().start(bucket)


class CallsTheHookOnceOnly(ReferenceDDP):
    """Breaks the promise that a hook stays in force: after the first iteration the mean is taken again."""

    breaks = ("comm_hooks.sum",)
    iterations = 0

    def finish(self):
        super().finish()
        self.iterations += 1
        if self.iterations == 2:
            self.hook = None


class AllAreLast(ReferenceDDP):
    """Breaks is_last: every bucket says that it is the last one."""

    breaks = ("grad_bucket.index",)

    def set_buckets(self, assignment):
        super().set_buckets(assignment)
        for bucket in self.buckets:
            bucket.last = True


class AllAreFirst(ReferenceDDP):
    """Breaks index: every bucket says that it is number 0."""

    breaks = ("grad_bucket.index",)

    def set_buckets(self, assignment):
        super().set_buckets(assignment)
        for bucket in self.buckets:
            bucket.index = lambda: 0


class TurnsTheParametersAround(ReferenceDDP):
    """Breaks the promise that parameters() and gradients() agree: the parameters come in reverse."""

    breaks = ("grad_bucket.gradients",)

    def start(self, bucket):
        if self.hook is not None:
            bucket.parameters = lambda: Bucket.parameters(bucket)[::-1]
        work = super().start(bucket)
        vars(bucket).pop("parameters", None)
        return work


class IgnoresSetBuffer(ReferenceDDP):
    """Breaks set_buffer: the bucket keeps its tensor."""

    breaks = ("grad_bucket.set_buffer",)

    def set_buckets(self, assignment):
        super().set_buckets(assignment)
        for bucket in self.buckets:
            bucket.set_buffer = lambda tensor: None


class CopiesTheState(ReferenceDDP):
    """Breaks the promise that a hook is handed the registered state itself: it is handed a copy."""

    breaks = ("comm_hooks.state",)

    def register_comm_hook(self, state, hook):
        import copy

        super().register_comm_hook(copy.copy(state), hook)


class TakesASecondHook(ReferenceDDP):
    """Breaks the promise that a second hook is refused: it replaces the first."""

    breaks = ("hook_registration.only_one",)

    def refuse_what_is_no_hook(self, hook):
        self.hook = None
        super().refuse_what_is_no_hook(hook)


class TakesAnyHook(ReferenceDDP):
    """Breaks the promise that a hook's signature is checked."""

    breaks = ("hook_registration.signature_checked",)

    def refuse_what_is_no_hook(self, hook):
        if self.hook is not None:
            raise RuntimeError("register_comm_hook can only be called once")


class DoesNotWait(ReferenceDDP):
    """Breaks the promise that backward waits for the hook: it takes what the bucket holds when backward ends."""

    breaks = ("comm_hooks.waited_for",)

    def finish(self):
        if self.hook is not None:
            self.work = [
                work if work.done() else _done(b.flat) for b, work in zip(self.buckets, self.work, strict=True)
            ]
        super().finish()


def _done(tensor):
    import torch

    future = torch.futures.Future()
    future.set_result(tensor)
    return future


class TakesAnyAnswer(ReferenceDDP):
    """Breaks the promise that a hook which returns no future is refused: its bucket is left as it is."""

    breaks = ("hook_failures.other_answers",)

    def start(self, bucket):
        own = bucket.flat
        try:
            return super().start(bucket)
        except RuntimeError:
            return _done(own)
