"""DDPs with one defect that long parameters, several buckets or an unusual moment show."""

import torch
import torch.distributed as dist

from tests.reference_ddp import ReferenceDDP


class ReducesAMillion(ReferenceDDP):
    """Breaks the mean of long buckets: it is taken in a buffer of 2**20 elements, and what lies behind stays local."""

    breaks = ("mean_gradients.long_parameter",)

    def mean(self, bucket):
        flat = bucket.buffer()
        if flat.is_sparse or len(flat) <= 2**20:
            return super().mean(bucket)
        head = flat[: 2**20].div_(self.world_size)
        return dist.all_reduce(head, group=self.process_group, async_op=True).get_future().then(lambda done: flat)


class RemembersWhatWasThere(ReferenceDDP):
    """Breaks the write-back where gradients are cleared after the forward: one that is another tensor than it was then stays local."""

    breaks = ("mean_gradients.cleared_between",)

    def forward(self, *args, **kwargs):
        self.there = {id(parameter): parameter.grad for parameter in self.trainable}
        return super().forward(*args, **kwargs)

    def write(self, parameter, mean):
        if mean.is_sparse or self.there[id(parameter)] is None or self.there[id(parameter)] is parameter.grad:
            super().write(parameter, mean)


class AccumulatesInTheFirstBucket(ReferenceDDP):
    """Breaks no_sync where there are several buckets: all but the first reduce the gradients of the last backward only."""

    breaks = ("no_sync.several_buckets",)
    was_local = False

    def forward(self, *args, **kwargs):
        self.was_local = self.was_local or not self.require_backward_grad_sync
        self.before = {
            index: parameter.grad.clone()
            for index, parameter in enumerate(self.trainable)
            if self.was_local and parameter.grad is not None and not parameter.grad.is_sparse
        }
        return super().forward(*args, **kwargs)

    def fill(self, bucket):
        super().fill(bucket)
        if bucket.number and not bucket.flat.is_sparse:
            nothing = [torch.zeros_like(each) for each in bucket.parameters()]
            before = [self.before.get(i, zero) for i, zero in zip(bucket.indices, nothing, strict=True)]
            bucket.flat -= torch.cat([each.reshape(-1) for each in before])

    def finish(self):
        super().finish()
        self.was_local = False
