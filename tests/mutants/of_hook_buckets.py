"""torch's DDP with one defect in the bucket that it hands to a communication hook, or in what it takes for an answer."""

import torch
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel


class Handed:
    """A bucket that answers like the one it was made from, except for what is given."""

    def __init__(self, bucket, **instead):
        self.__dict__.update(instead)
        self.bucket = bucket

    def __getattr__(self, name):
        return getattr(self.bucket, name)


class BufferInReverse(DistributedDataParallel):
    """Breaks the order of the buffer: a hook is handed it back to front."""

    breaks = ("grad_bucket.buffer",)

    def register_comm_hook(self, state, hook):
        def reversing(state, bucket):
            turned = bucket.buffer().flip(0)
            return hook(state, Handed(bucket, buffer=lambda: turned)).then(lambda future: future.value().flip(0))

        super().register_comm_hook(state, reversing)


class ForgetsWhatAccumulated(DistributedDataParallel):
    """Breaks accumulation: a forward that will be synchronized clears what accumulated without synchronization."""

    breaks = ("grad_bucket.accumulated",)
    local = False

    def forward(self, *inputs, **options):
        if self.require_backward_grad_sync and self.local:
            self.module.zero_grad()
        self.local = not self.require_backward_grad_sync
        return super().forward(*inputs, **options)


class TakesAListOfTensors(DistributedDataParallel):
    """Breaks the refusal of a future that holds a list: its first tensor is taken."""

    breaks = ("hook_failures.not_one_tensor",)

    def register_comm_hook(self, state, hook):
        def first(future):
            answer = future.value()
            return answer[0] if isinstance(answer, list) else answer

        def taking(state, bucket):
            answer = hook(state, bucket)
            return answer.then(first) if isinstance(answer, torch.futures.Future) else answer

        super().register_comm_hook(state, taking)


class StaticGraphPassesTheHookOver(DistributedDataParallel):
    """Breaks hooks under static_graph: in the first iteration the mean is taken."""

    breaks = ("comm_hooks.static_graph",)
    forwards = 0

    def forward(self, *inputs, **options):
        self.forwards += 1
        return super().forward(*inputs, **options)

    def register_comm_hook(self, state, hook):
        def passed_over(state, bucket):
            first = self.static_graph and self.forwards == 1
            return allreduce_hook(None, bucket) if first else hook(state, bucket)

        super().register_comm_hook(state, passed_over)
