"""torch's DDP with one defect in how it runs the communication hooks that ship with torch."""

import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel


def summing(state, bucket):
    return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(lambda future: future.value()[0])


class BuiltInSums(DistributedDataParallel):
    """Breaks the built-in all-reduce: it does not divide."""

    breaks = ("shipped_hooks.allreduce",)

    def _register_builtin_comm_hook(self, comm_hook_type):
        if comm_hook_type == dist.BuiltinCommHookType.ALLREDUCE:
            dist._register_comm_hook(self.reducer, None, summing)
        else:
            super()._register_builtin_comm_hook(comm_hook_type)


class AllReduceHookSums(DistributedDataParallel):
    """Breaks the shipped all-reduce hook: it does not divide."""

    breaks = ("shipped_hooks.allreduce",)

    def register_comm_hook(self, state, hook):
        super().register_comm_hook(state, summing if hook is allreduce_hook else hook)


class NeverHalf(DistributedDataParallel):
    """Breaks compression to 16 bits: the gradients are reduced as they are."""

    breaks = ("shipped_hooks.fp16",)

    def register_comm_hook(self, state, hook):
        super().register_comm_hook(state, allreduce_hook if "fp16" in hook.__name__ else hook)

    def _register_builtin_comm_hook(self, comm_hook_type):
        super()._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)


class NoOpReduces(DistributedDataParallel):
    """Breaks the shipped hook that does nothing: it all-reduces."""

    breaks = ("shipped_hooks.no_op",)

    def register_comm_hook(self, state, hook):
        super().register_comm_hook(state, allreduce_hook if hook.__name__ == "noop_hook" else hook)


class LocalSGDStartsLate(DistributedDataParallel):
    """Breaks post-localSGD: all ranks reduce together for one iteration too many."""

    breaks = ("post_local_sgd.sub_group", "post_local_sgd.no_reduction")

    def register_comm_hook(self, state, hook):
        if hook.__name__ == "post_localSGD_hook":
            state.start_localSGD_iter += 1
        super().register_comm_hook(state, hook)


class OneRankMore(DistributedDataParallel):
    """Breaks PowerSGD: the gradients' matrix rank is one more than was asked for."""

    breaks = ("power_sgd.rank",)

    def register_comm_hook(self, state, hook):
        if hasattr(state, "matrix_approximation_rank"):
            state.matrix_approximation_rank += 1
        super().register_comm_hook(state, hook)


class AnswersApart(DistributedDataParallel):
    """Breaks PowerSGD: what it gives is not the same on all ranks."""

    breaks = ("power_sgd.rank",)

    def register_comm_hook(self, state, hook):
        def apart(state, bucket):
            return hook(state, bucket).then(lambda future: future.value() + dist.get_rank(self.process_group))

        super().register_comm_hook(state, apart if hasattr(state, "matrix_approximation_rank") else hook)


class CompressesAll(DistributedDataParallel):
    """Breaks PowerSGD's minimum compression rate: every matrix is compressed."""

    breaks = ("power_sgd.vectors",)

    def register_comm_hook(self, state, hook):
        if hasattr(state, "min_compression_rate"):
            state.min_compression_rate = 0
        super().register_comm_hook(state, hook)


class ForgetsErrors(DistributedDataParallel):
    """Breaks PowerSGD's error feedback: what was left out is not remembered."""

    breaks = ("power_sgd.error_feedback",)

    def register_comm_hook(self, state, hook):
        def forget(future):
            for error in state.error_dict.values():
                error.zero_()
            return future.value()

        def forgetting(state, bucket):
            return hook(state, bucket).then(forget)

        super().register_comm_hook(state, forgetting if getattr(state, "use_error_feedback", False) else hook)


class CountsUncompressed(DistributedDataParallel):
    """Breaks PowerSGD's statistics: the iterations before compression count, too."""

    breaks = ("power_sgd.statistics",)

    def register_comm_hook(self, state, hook):
        if hasattr(state, "total_numel_before_compression"):
            state.total_numel_before_compression += 2 * sum(p.numel() for p in self.module.parameters())
        super().register_comm_hook(state, hook)
