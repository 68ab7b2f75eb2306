"""Reference DDPs with one defect in what an all-reduce makes of the gradients."""

import torch
import torch.distributed as dist

from tests.reference_ddp import ReferenceDDP


def _reduced(flat, group, op=dist.ReduceOp.SUM):
    return dist.all_reduce(flat, op=op, group=group, async_op=True).get_future().then(lambda done: done.value()[0])


class Sums(ReferenceDDP):
    """Breaks the promise that gradients are averaged: they are summed."""

    breaks = ("mean_gradients.mean", "mean_gradients.effective_batch")

    def mean(self, bucket):
        return _reduced(bucket.buffer(), self.process_group)


class Halves(ReferenceDDP):
    """Breaks the promise that the divisor is the world size: it is two."""

    breaks = ("mean_gradients.mean", "trajectory.three_ranks")

    def mean(self, bucket):
        return _reduced(bucket.buffer().div_(2), self.process_group)


class DividesByAllRanks(ReferenceDDP):
    """Breaks the promise that a sub-group divides by its own size: it divides by the number of all ranks."""

    breaks = ("mean_gradients.divisor",)

    def mean(self, bucket):
        return _reduced(bucket.buffer().div_(dist.get_world_size()), self.process_group)


class TakesTheLargest(ReferenceDDP):
    """Breaks the promise of a mean: it takes the largest of the ranks' gradients."""

    breaks = ("mean_gradients.mean",)

    def mean(self, bucket):
        return _reduced(bucket.buffer(), self.process_group, dist.ReduceOp.MAX)


class TakesRankZeros(ReferenceDDP):
    """Breaks the promise of a mean: everybody gets the gradients of the group's first rank."""

    breaks = ("mean_gradients.mean", "trajectory.one_process")

    def mean(self, bucket):
        work = dist.broadcast(bucket.buffer(), self.source(), group=self.process_group, async_op=True)
        return work.get_future().then(lambda done: done.value()[0])


class SkipsTheLastBucket(ReferenceDDP):
    """Breaks the promise that every parameter is averaged: with several buckets those of the last one stay local."""

    breaks = ("trajectory.options",)

    def mean(self, bucket):
        if bucket.is_last() and len(self.buckets) > 1:
            done = torch.futures.Future()
            done.set_result(bucket.buffer())
            return done
        return super().mean(bucket)


class ReducesTheFirstBucketOnly(ReferenceDDP):
    """Breaks the promise that every parameter is averaged: only the first bucket of several is."""

    breaks = ("trajectory.options",)

    def mean(self, bucket):
        if bucket.index() > 0:
            done = torch.futures.Future()
            done.set_result(bucket.buffer())
            return done
        return super().mean(bucket)


class ReducesTheGradientBefore(ReferenceDDP):
    """Breaks the promise that a step uses its own gradients: from the second one on it averages those of the step before."""

    breaks = ("trajectory.one_process",)
    before = None

    def fill(self, bucket):
        super().fill(bucket)
        if len(self.buckets) == 1 and not bucket.flat.is_sparse:
            own, bucket.flat = bucket.flat, self.before if self.before is not None else bucket.flat
            self.before = own.clone()


class ReducesOnce(ReferenceDDP):
    """Breaks the promise that every iteration is synchronized: only the first three are."""

    breaks = ("trajectory.one_process", "mean_gradients.every_parameter")
    iterations = 0

    def expect_gradients(self, output):
        self.iterations += 1
        if self.iterations <= 3:
            super().expect_gradients(output)


class RoundsToHalf(ReferenceDDP):
    """Breaks the promise that gradients keep their precision: what goes out is rounded to half precision."""

    breaks = ("mean_gradients.same_bits", "trajectory.one_process")

    def fill(self, bucket):
        super().fill(bucket)
        bucket.flat = bucket.flat.to(torch.bfloat16).to(bucket.flat.dtype)


class DividesTwice(ReferenceDDP):
    """Breaks the promise of a mean: it is divided before the sum and again after it."""

    breaks = ("mean_gradients.mean",)

    def write(self, parameter, mean):
        super().write(parameter, mean if self.hook else mean / self.world_size)


class AddsToTheGradient(ReferenceDDP):
    """Breaks the promise that the mean replaces the local gradient: it is added to it."""

    breaks = ("mean_gradients.mean",)

    def write(self, parameter, mean):
        if parameter.grad is None or mean.is_sparse:
            super().write(parameter, mean)
        else:
            parameter.grad.add_(mean)


class KeepsVectorsLocal(ReferenceDDP):
    """Breaks the promise that the mean reaches every parameter: those with one dimension keep their own gradient."""

    breaks = ("mean_gradients.every_parameter",)

    def write(self, parameter, mean):
        if parameter.dim() != 1 or self.hook or parameter.numel() == 1:
            super().write(parameter, mean)


class WeighsByTheSizeOfTheBatch(ReferenceDDP):
    """Breaks what is known of uneven batches: ranks count by the rows that they were fed."""

    breaks = ("mean_gradients.weighted_loss", "mean_gradients.uneven_batches")

    def forward(self, *args, **kwargs):
        self.rows = float(len(args[0])) if args and isinstance(args[0], torch.Tensor) and args[0].dim() else 1.0
        return super().forward(*args, **kwargs)

    def mean(self, bucket):
        rows = torch.tensor([self.rows])
        dist.all_reduce(rows, group=self.process_group)
        return _reduced(bucket.buffer() * self.rows / rows.item(), self.process_group)
