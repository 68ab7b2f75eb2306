"""DDPs with one defect that shows where two things meet: two options, two DDPs, an option and a hook."""

import torch
import torch.distributed as dist
from ddp_conformance.rank import completed
from torch.nn.parallel import DistributedDataParallel

from tests.reference_ddp import ReferenceDDP


def _divide_again(ddp):
    for parameter in ddp.module.parameters():
        if parameter.requires_grad:
            parameter.register_hook(lambda gradient: gradient / dist.get_world_size())


class StaticSearchFillsUnused(DistributedDataParallel):
    """Breaks the promise that with a static graph it does not matter whether DDP is to find unused parameters: they get zeros."""

    breaks = ("mean_gradients.options_together",)

    def forward(self, *inputs, **keywords):
        if self.static_graph and self.find_unused_parameters and torch.is_grad_enabled():
            for parameter in self.module.parameters():
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
        return super().forward(*inputs, **keywords)


class StaticViewsDivideTwice(DistributedDataParallel):
    """Breaks the promise that options change no value: views of a static graph's buckets are divided twice."""

    breaks = ("mean_gradients.options_together",)

    def __init__(self, module, *args, **options):
        super().__init__(module, *args, **options)
        if self.static_graph and self.gradient_as_bucket_view:
            _divide_again(self)


class BatchedSearchDividesTwice(DistributedDataParallel):
    """Breaks the promise that batched copies change no value: where unused parameters are looked for they are divided twice."""

    breaks = ("mean_gradients.options_together",)

    def __init__(self, module, *args, **options):
        super().__init__(module, *args, **options)
        if self.find_unused_parameters and options.get("batched_grad_copy"):
            _divide_again(self)


class OneAtATime(ReferenceDDP):
    """Breaks two DDPs in one graph: only the one whose forward was the last is reduced."""

    breaks = ("mean_gradients.two_in_one_graph",)
    last = None

    def expect_gradients(self, output):
        super().expect_gradients(output)
        OneAtATime.last = self

    def on_gradient(self, index):
        if OneAtATime.last is self:
            super().on_gradient(index)


class SparseIsLocalAfterNoSync(ReferenceDDP):
    """Breaks no_sync for sparse gradients: what has accumulated is not reduced by the next synced step."""

    breaks = ("mean_gradients.sparse_after_no_sync",)
    was_local = False

    def forward(self, *args, **kwargs):
        self.was_local = self.was_local or not self.require_backward_grad_sync
        return super().forward(*args, **kwargs)

    def mean(self, bucket):
        if bucket.flat.is_sparse and self.was_local:
            super().mean(bucket).wait()
            return completed(bucket.flat)
        return super().mean(bucket)

    def finish(self):
        super().finish()
        self.was_local = False


class HooksForgetFindUnused(DistributedDataParallel):
    """Breaks communication hooks where unused parameters are looked for: one is accepted, and the plain mean is taken."""

    breaks = ("comm_hooks.find_unused",)

    def register_comm_hook(self, state, hook):
        if not self.find_unused_parameters:
            super().register_comm_hook(state, hook)


class OneHookForAll(DistributedDataParallel):
    """Breaks the promise that a hook is registered on one DDP: it counts for every other one from then on."""

    breaks = ("comm_hooks.one_of_two",)
    theirs = ()
    armed = False

    def register_comm_hook(self, state, hook):
        super().register_comm_hook(state, hook)
        self.armed = True
        OneHookForAll.theirs = (state, hook)

    def forward(self, *inputs, **keywords):
        if not self.armed and OneHookForAll.theirs:
            self.armed = True
            super().register_comm_hook(*OneHookForAll.theirs)
        return super().forward(*inputs, **keywords)
