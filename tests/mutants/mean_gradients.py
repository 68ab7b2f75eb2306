"""DDPs whose gradients are not the mean that they should be, each in one way."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def _scaled(ddp, factor):
    """Multiply every local gradient before it is reduced."""
    for parameter in ddp.module.parameters():
        if parameter.requires_grad:
            parameter.register_hook(lambda gradient: gradient * factor)


class SumsGradients(DistributedDataParallel):
    """Breaks the promise that gradients are averaged: they are summed over the ranks."""

    breaks = ("mean_gradients.mean", "mean_gradients.summed_loss", "trajectory.one_process")
    at_large = True  # most cases end in a mean

    def __init__(self, module, *args, **options):
        super().__init__(module, *args, **options)
        _scaled(self, dist.get_world_size(self.process_group))


class DividesByTheWorld(DistributedDataParallel):
    """Breaks the promise that the divisor is the group's size: it is the world's."""

    breaks = ("mean_gradients.divisor",)

    def __init__(self, module, *args, **options):
        super().__init__(module, *args, **options)
        _scaled(self, dist.get_world_size(self.process_group) / dist.get_world_size())


class ReducesNoBiases(DistributedDataParallel):
    """Breaks the promise that every parameter's gradient is reduced: biases stay local."""

    breaks = ("mean_gradients.every_parameter", "trajectory.one_process")

    def __init__(self, module, *args, **options):
        biases = [p for name, p in module.named_parameters() if name.endswith("bias")]
        for bias in biases:
            bias.requires_grad_(False)
        super().__init__(module, *args, **options)
        for bias in biases:
            bias.requires_grad_(True)


class ReducesThreeTimes(DistributedDataParallel):
    """Breaks the promise that every iteration is reduced: from the fourth forward on gradients stay local."""

    breaks = ("mean_gradients.every_parameter", "trajectory.one_process")
    forwards = 0

    def forward(self, *inputs, **keywords):
        self.forwards += 1
        return (self.module if self.forwards > 3 else super().forward)(*inputs, **keywords)


class WeighsByRows(DistributedDataParallel):
    """Breaks what is known of uneven batches: each rank's gradient is weighed by the number of rows it was fed."""

    breaks = ("mean_gradients.uneven_batches",)

    def forward(self, *inputs, **keywords):
        output = super().forward(*inputs, **keywords)
        if inputs and torch.is_tensor(inputs[0]) and torch.is_tensor(output) and output.requires_grad:
            rows = torch.tensor([float(len(inputs[0]))])
            total = rows.clone()
            dist.all_reduce(total, group=self.process_group)
            factor = (rows * dist.get_world_size(self.process_group) / total).item()
            output.register_hook(lambda gradient: gradient * factor)
        return output


class SumsInItsOwnOrder(DistributedDataParallel):
    """Breaks the promise of equal bits: every rank adds the gradients up in another order, and rounds otherwise."""

    breaks = ("mean_gradients.same_bits",)

    def __init__(self, module, *args, **options):
        super().__init__(module, *args, **options)

        def gather(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
            own = bucket.buffer()
            size, first = dist.get_world_size(self.process_group), dist.get_rank(self.process_group)
            everyone = [torch.empty_like(own) for _ in range(size)]
            dist.all_gather(everyone, own, group=self.process_group)
            done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
            done.set_result(sum(everyone[(first + offset) % size] / size for offset in range(size)))
            return done

        self.register_comm_hook(None, gather)


class StartsApart(DistributedDataParallel):
    """Breaks the promise that ranks begin with rank 0's parameters: each keeps its own."""

    breaks = ("trajectory.different_start",)

    def __init__(self, module, *args, **options):
        own = [parameter.detach().clone() for parameter in module.parameters()]
        super().__init__(module, *args, **options)
        with torch.no_grad():
            for parameter, kept in zip(module.parameters(), own, strict=True):
                parameter.copy_(kept)
