"""Reference DDPs with one defect in which gradients travel together, and when."""

import torch

from tests.reference_ddp import MIB, UNLIMITED, ReferenceDDP


class ClosesBeforeTheLimit(ReferenceDDP):
    """Breaks the greedy fill: a bucket closes before the parameter that would take it over its limit."""

    breaks = ("rebuild.second_forward",)

    def assign(self, order, limits):
        closed, filling, size = [], [], 0
        for index in order:
            parameter = self.trainable[index]
            more = parameter.numel() * parameter.element_size()
            if filling and size + more > limits[min(len(closed), len(limits) - 1)]:
                closed.append(filling)
                filling, size = [], 0
            filling.append(index)
            size += more
        return [*closed, filling]


class FillsForward(ReferenceDDP):
    """Breaks the order of construction: the buckets are not reversed."""

    breaks = ("bucket_order.reversed",)

    def first_buckets(self):
        return super().first_buckets()[::-1]


class NeverRebuilds(ReferenceDDP):
    """Breaks the rebuild: the buckets of construction are kept for ever."""

    breaks = ("rebuild.once",)

    def rebuild(self):
        pass


class RebuildsBackwards(ReferenceDDP):
    """Breaks the order of the rebuild: it is the reverse of that in which gradients became ready."""

    breaks = ("rebuilt_buckets.ready_order",)

    def assign(self, order, limits):
        return super().assign(order if len(limits) == 1 or self.find_unused_parameters else list(order)[::-1], limits)


class RebuildsByRegistration(ReferenceDDP):
    """Breaks the order of the rebuild: it is the reverse of registration, whatever order gradients became ready in."""

    breaks = ("rebuilt_buckets.ready_order",)

    def rebuild(self):
        self.ready_order = sorted(self.ready_order, reverse=True)
        super().rebuild()


class IgnoresTheCap(ReferenceDDP):
    """Breaks bucket_cap_mb: everything always goes in one bucket."""

    breaks = ("rebuild.second_forward",)

    def assign(self, order, limits):
        return super().assign(order, [UNLIMITED])


class KeepsTheSmallFirstLimit(ReferenceDDP):
    """Breaks bucket_cap_mb: the first bucket is bounded by 1 MiB whatever the user's cap."""

    breaks = ("rebuild.once", "rebuilt_buckets.ready_order")

    def assign(self, order, limits):
        return super().assign(order, limits if limits == [UNLIMITED] else [MIB, self.cap])


class IgnoresTheFirstLimit(ReferenceDDP):
    """Breaks the small first bucket: without a cap of the user's all limits are 25 MiB."""

    breaks = ("bucket_order.small_bucket_last",)

    def assign(self, order, limits):
        return super().assign(order, limits[-1:])


class ReducesAtTheEnd(ReferenceDDP):
    """Breaks the overlap: every all-reduce waits for the last gradient of backward."""

    breaks = ("firing.as_buckets_fill",)

    def mark_ready(self, index):
        if len(self.ready) + 1 < len(self.trainable):
            self.ready.add(index)
            self.bucket_of[index].waiting_for -= 1
        else:
            super().mark_ready(index)


class SendsEveryGradientAlone(ReferenceDDP):
    """Breaks the bucketing: every parameter has a bucket to itself."""

    breaks = ("first_iteration.one_bucket",)

    def assign(self, order, limits):
        return [[index] for index in order]


class StartsInSmallBuckets(ReferenceDDP):
    """Breaks the first iteration: the cap holds at once, before the order of gradients is known."""

    breaks = ("first_iteration.one_bucket",)

    def first_buckets(self):
        return sorted(self.assign(range(len(self.trainable)), [self.first_limit, self.cap]), key=min)[::-1]


class MixesDevicesAndDtypes(ReferenceDDP):
    """Breaks the grouping by dtype: a bucket takes all, and what it holds is cast to the first one's dtype."""

    breaks = ("first_iteration.one_per_dtype", "bucket_order.dtypes", "grad_bucket.buffer")

    def assign(self, order, limits):
        order = list(order)
        return [order] if len({self.trainable[index].dtype for index in order}) > 1 else super().assign(order, limits)


class SortsTheBucket(ReferenceDDP):
    """Breaks the order inside the first bucket: it is the reverse of registration."""

    breaks = ("first_iteration.registration_order",)

    def first_buckets(self):
        buckets = super().first_buckets()
        return buckets if self.find_unused_parameters else [bucket[::-1] for bucket in buckets]


class CountsOnceMore(ReferenceDDP):
    """Breaks the economy of an iteration: an all-reduce too many goes out with the first bucket."""

    breaks = ("first_iteration.one_collective",)

    def mean(self, bucket):
        if bucket.index() == 0:
            torch.distributed.all_reduce(torch.zeros(1, device=bucket.buffer().device), group=self.process_group)
        return super().mean(bucket)
