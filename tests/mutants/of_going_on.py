"""DDPs with one defect that shows in what comes after: after a failed backward, a forward alone, or the first iteration."""

from tests.reference_ddp import ReferenceDDP, tensors_in


class StopsAfterAFailedBackward(ReferenceDDP):
    """Breaks what is known of a backward that raised: after one that began and did not end no iteration is reduced."""

    breaks = ("mean_gradients.after_a_failed_backward",)
    begun = False

    def begin(self, gradient):
        self.begun = True

    def expect_gradients(self, output):
        if self.begun:
            self.expecting = False
            return
        super().expect_gradients(output)
        for tensor in tensors_in(output):
            if tensor.requires_grad and not tensor.is_leaf:
                tensor.register_hook(self.begin)

    def finish(self):
        super().finish()
        self.begun = False


class ForgetsTheForwardBefore(ReferenceDDP):
    """Breaks what is known of no_sync after a forward alone: a forward inside takes back what the one before expected."""

    breaks = ("no_sync_limits.after_a_forward_alone",)

    def forward(self, *args, **kwargs):
        if not self.require_backward_grad_sync:
            self.expecting = False
        return super().forward(*args, **kwargs)


class FrozenStopTheRebuild(ReferenceDDP):
    """Breaks the rebuild where parameters are frozen: their gradients are waited for, and the buckets of construction stay."""

    breaks = ("rebuilt_buckets.frozen",)

    def rebuild(self):
        if len(self.ready_order) >= len(list(self.module.parameters())):
            super().rebuild()
