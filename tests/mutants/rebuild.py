"""DDPs with one defect in when buckets are rebuilt, by whose order, when they are reduced, or what the cap means."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from tests.reference_ddp import MIB, ReferenceDDP


class TakesTheLastRanksOrder(ReferenceDDP):
    """Breaks the rebuild: the order comes from the group's last rank instead of its first."""

    breaks = ("rebuilt_buckets.order_from_rank_0", "rebuilt_buckets.order_from_first_of_group")

    def rebuild(self):
        if self.rebuilt or self.find_unused_parameters or len(self.ready_order) < len(self.trainable):
            return
        order = torch.tensor(self.ready_order)
        last = dist.get_world_size(self.process_group) - 1
        whole = self.process_group is dist.group.WORLD
        dist.broadcast(order, last if whole else dist.get_global_rank(self.process_group, last), self.process_group)
        self.set_buckets(self.assign(order.tolist(), [self.first_limit, self.cap]))
        self.rebuilt = True


class RebuildsEveryTime(ReferenceDDP):
    """Breaks "once": every forward rebuilds by the backward before it."""

    breaks = ("rebuild.once",)

    def rebuild(self):
        self.rebuilt = False
        super().rebuild()


class RebuildsWithFindUnused(ReferenceDDP):
    """Breaks "never with find_unused_parameters": buckets are rebuilt there too."""

    breaks = ("rebuild.never_with_find_unused",)

    def rebuild(self):
        looking, self.find_unused_parameters = self.find_unused_parameters, False
        super().rebuild()
        self.find_unused_parameters = looking


class RebuildsWhileEvaluating(ReferenceDDP):
    """Breaks the rebuild: a forward without gradients rebuilds, which hangs a rank that evaluates alone."""

    breaks = ("rebuild.not_without_grad",)

    def forward(self, *args, **kwargs):
        if not torch.is_grad_enabled():
            self.rebuild()
        return super().forward(*args, **kwargs)


class RebuildsALittleLater(ReferenceDDP):
    """Breaks the moment of the rebuild: it is put off by one forward."""

    breaks = ("rebuild.second_forward", "firing.as_buckets_fill")

    def rebuild(self):
        if self.ready_order and not getattr(self, "put_off", False):
            self.put_off = True
            return
        super().rebuild()


class ForgetsTheLastBucket(ReferenceDDP):
    """Breaks the values after the rebuild: the last of several buckets keeps what this rank has."""

    breaks = ("rebuild.values_unchanged",)

    def mean(self, bucket):
        reduced = super().mean(bucket)
        if bucket.index() == 0 or not bucket.is_last():
            return reduced
        own = bucket.buffer().clone() * self.world_size
        return reduced.then(lambda _: own)


class ReducesFromTheBack(ReferenceDDP):
    """Breaks the order of reductions: once all gradients are there, the buckets go out last first."""

    breaks = ("firing.in_bucket_order",)

    def mark_ready(self, index):
        self.ready.add(index)
        self.bucket_of[index].waiting_for -= 1
        if any(bucket.waiting_for for bucket in self.buckets):
            return
        self.work = [None] * len(self.buckets)
        for bucket in reversed(self.buckets):
            self.fill(bucket)
            self.work[bucket.index()] = self.start(bucket)
        self.work_on_used = self.start_used() if self.find_unused_parameters else None
        torch.autograd.Variable._execution_engine.queue_callback(self.finish)


class CapInMegabytes(DistributedDataParallel):
    """Breaks the unit of bucket_cap_mb: it is a million bytes instead of a MiB."""

    breaks = ("bucket_cap.mebibytes",)

    def __init__(self, module, *, bucket_cap_mb=None, **options):
        if bucket_cap_mb is not None:
            options["bucket_cap_mb"] = bucket_cap_mb * 1e6 / MIB
        super().__init__(module, **options)


class WholeMebibytesOnly(DistributedDataParallel):
    """Breaks fractions of a MiB: the cap is rounded up."""

    breaks = ("bucket_cap.mebibytes",)

    def __init__(self, module, *, bucket_cap_mb=None, **options):
        if bucket_cap_mb is not None:
            options["bucket_cap_mb"] = int(-(-bucket_cap_mb // 1))
        super().__init__(module, **options)


class LargerDefault(DistributedDataParallel):
    """Breaks the default of bucket_cap_mb: it is 100 MiB."""

    breaks = ("bucket_cap.default",)

    def __init__(self, module, *, bucket_cap_mb=100, **options):
        super().__init__(module, bucket_cap_mb=bucket_cap_mb, **options)


class TheListsLargestForAll(DistributedDataParallel):
    """Breaks bucket_cap_mb_list: its largest cap bounds every bucket."""

    breaks = ("bucket_cap_list.one_by_one",)

    def __init__(self, module, *, bucket_cap_mb=None, bucket_cap_mb_list=None, **options):
        cap = max(bucket_cap_mb_list) if bucket_cap_mb_list else bucket_cap_mb
        super().__init__(module, bucket_cap_mb=cap, **options)


class TheListReversed(DistributedDataParallel):
    """Breaks bucket_cap_mb_list: the caps are applied last first."""

    breaks = ("bucket_cap_list.one_by_one", "first_iteration.cap_list")

    def __init__(self, module, *, bucket_cap_mb_list=None, **options):
        caps = bucket_cap_mb_list[::-1] if bucket_cap_mb_list else None
        super().__init__(module, bucket_cap_mb_list=caps, **options)
