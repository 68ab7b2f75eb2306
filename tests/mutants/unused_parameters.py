"""DDPs that treat parameters without a gradient as they should not, each in one way."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


class ForgetsToSearch(DistributedDataParallel):
    """Breaks the promise that find_unused_parameters=True lets training proceed: it takes the option and ignores it."""

    breaks = (
        "unused_parameters.training_proceeds",
        "unused_parameters.any_set_on_any_rank",
        "unused_parameters.alternating_networks",
        "unused_search.walks_every_iteration",
        "unused_search.parameter_outside_forward",
    )

    def __init__(self, module, *args, find_unused_parameters=False, **options):
        super().__init__(module, *args, **options)


class AlwaysSearches(DistributedDataParallel):
    """Breaks the promise that unused parameters are searched for on request only."""

    breaks = (
        "missing_gradient.next_forward_raises",
        "missing_gradient.output_left_out_of_loss",
        "unused_search.walks_every_iteration",
        "checkpointing.with_reentry",
    )

    def __init__(self, module, *args, find_unused_parameters=True, **options):
        super().__init__(module, *args, find_unused_parameters=True, **options)


class GivesZeros(DistributedDataParallel):
    """Breaks the promise that the gradient of a parameter that no rank uses stays None: it becomes zeros."""

    breaks = (
        "unused_parameters.none_stays_none",
        "unused_parameters.output_left_out_of_loss",
        "unused_search.skipped_buckets",
        "lazy_buckets.unused",
        "static_graph.unused_allowed",
        "checkpointing.unused_with_static_graph",
    )

    def forward(self, *inputs, **keywords):
        for parameter in self.module.parameters():
            if parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        return super().forward(*inputs, **keywords)


class DividesByUsers(DistributedDataParallel):
    """Breaks the promise that the divisor is the world size: a gradient is divided by the number of ranks that have one."""

    breaks = ("unused_parameters.locally_unused_gets_mean",)

    def __init__(self, module, *args, **options):
        super().__init__(module, *args, **options)
        super().register_comm_hook(None, self.mean_over_users)

    @staticmethod
    def mean_over_users(state, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        users = [(gradient != 0).float().max().reshape(1) for gradient in bucket.gradients()]
        counts = torch.cat(users)
        dist.all_reduce(counts)
        dist.all_reduce(bucket.buffer())
        for gradient, count in zip(bucket.gradients(), counts, strict=True):
            gradient /= count.clamp(min=1)
        future = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future


class HalvesWhenSearching(DistributedDataParallel):
    """Breaks the promise that the search changes no value: with find_unused_parameters=True every gradient is half."""

    breaks = (
        "unused_parameters.harmless_when_all_are_used",
        "unused_parameters.locally_unused_gets_mean",
        "bucket_views.locally_unused_gets_mean",
    )

    def __init__(self, module, *args, find_unused_parameters=False, **options):
        super().__init__(module, *args, find_unused_parameters=find_unused_parameters, **options)
        if find_unused_parameters:
            for parameter in module.parameters():
                parameter.register_hook(lambda gradient: gradient / 2)


class ForgetsOldGradients(DistributedDataParallel):
    """Breaks the promise that an unused parameter's gradient is not touched: every forward drops all gradients."""

    breaks = ("unused_parameters.old_gradient_stays",)

    def forward(self, *inputs, **keywords):
        self.module.zero_grad(set_to_none=True)
        return super().forward(*inputs, **keywords)


class NamesNothing(DistributedDataParallel):
    """Breaks the promise that the error says which parameters got no gradient."""

    breaks = ("missing_gradient.message_lists_indices", "missing_gradient.message_names_parameters")

    def forward(self, *inputs, **keywords):
        try:
            return super().forward(*inputs, **keywords)
        except RuntimeError as error:
            raise RuntimeError(str(error).split(".")[0]) from error


class CallsItFinalized(DistributedDataParallel):
    """Breaks the promise that _check_reducer_finalized raises after an incomplete backward."""

    breaks = ("missing_gradient.found_at_once",)

    def _check_reducer_finalized(self):
        return None


class SkipsNothing(DistributedDataParallel):
    """Breaks the promise that skip_all_reduce_unused_params=True skips: it takes the option and ignores it."""

    breaks = ("unused_search.skipped_buckets",)

    def __init__(self, module, *args, skip_all_reduce_unused_params=False, **options):
        super().__init__(module, *args, **options)
