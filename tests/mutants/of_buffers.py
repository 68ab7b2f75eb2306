"""Reference DDPs with one defect in how buffers are kept equal."""

import torch
import torch.distributed as dist

from tests.reference_ddp import ReferenceDDP


class NeverSendsBuffers(ReferenceDDP):
    """Breaks broadcast_buffers: after construction every rank is on its own."""

    breaks = ("buffers.counted_in_forward", "sync_options.buffers_and_gradients")

    def sync_buffers(self):
        pass


class SendsTheLastRanksBuffers(ReferenceDDP):
    """Breaks broadcast_buffers: the forward takes the buffers of the last rank."""

    breaks = ("buffers.counted_in_forward", "sync_options.buffers_and_gradients")

    def sync_buffers(self):
        self.source = lambda: dist.get_process_group_ranks(self.process_group)[-1]
        super().sync_buffers()
        del self.source


class SendsBuffersAfterForward(ReferenceDDP):
    """Breaks broadcast_buffers: buffers are sent at the end of the forward, when it has computed with its own."""

    breaks = ("buffers.counted_in_forward",)

    def forward(self, *args, **kwargs):
        wanted, self.broadcast_buffers = self.broadcast_buffers, False
        output = super().forward(*args, **kwargs)
        self.broadcast_buffers = wanted
        if wanted and self.require_forward_param_sync:
            self.sync_buffers()
        return output


class RemembersOldBuffers(ReferenceDDP):
    """Breaks broadcast_buffers: a buffer that is assigned anew is not noticed, the old tensor is sent."""

    breaks = ("buffers.reassigned",)

    def make_equal(self):
        super().make_equal()
        self.first_seen = list(self.module.buffers())

    def sync_buffers(self):
        self.broadcast(self.first_seen)


class StopsInEvaluation(ReferenceDDP):
    """Breaks broadcast_buffers: in evaluation mode buffers are not sent."""

    breaks = ("buffers.eval_mode",)

    def sync_buffers(self):
        if self.module.training:
            super().sync_buffers()


class SendsFloatsOnly(ReferenceDDP):
    """Breaks broadcast_buffers: integer buffers drift apart."""

    breaks = ("buffers.every_kind",)

    def sync_buffers(self):
        self.broadcast([buffer for buffer in self.module.buffers() if buffer.is_floating_point()])


class SendsBuffersAnyway(ReferenceDDP):
    """Breaks broadcast_buffers=False: buffers are sent all the same."""

    breaks = ("sync_options.buffers_and_gradients",)

    def __init__(self, module, **options):
        super().__init__(module, **options)
        self.broadcast_buffers = True


class AveragesBuffers(ReferenceDDP):
    """Breaks broadcast_buffers: buffers become the mean over the ranks instead of rank 0's."""

    breaks = ("buffers.counted_in_forward",)

    def sync_buffers(self):
        for buffer in self.module.buffers():
            if buffer.is_floating_point():
                with torch.no_grad():
                    dist.all_reduce(buffer.div_(self.world_size), group=self.process_group)
            else:
                self.broadcast([buffer])


class SendsInEveryForward(ReferenceDDP):
    """Breaks what is known of no_grad and no_sync: the forward after one of them sends buffers as any other."""

    breaks = ("buffers.lag_one_forward",)

    def forward(self, *args, **kwargs):
        self.require_forward_param_sync = True
        return super().forward(*args, **kwargs)
