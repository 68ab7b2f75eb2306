"""`lazy_bucket_allocation`: a bucket's memory lives from its gradients to the end of backward."""

import time

import torch
from ddp_conformance import MUST, case
from ddp_conformance.models import Scalars
from ddp_conformance.rank import mean_all_reduce
from torch.multiprocessing.reductions import StorageWeakRef

DDP = "DistributedDataParallel"
NEEDS = ("lazy_bucket_allocation",)


def watched(rank, ddp):
    """Weak references to the storage of every bucket that is reduced from now on."""
    seen = []

    def watching(state, bucket):
        seen.append(StorageWeakRef(bucket.buffer().untyped_storage()))
        return mean_all_reduce(bucket)

    ddp.register_comm_hook(None, watching)
    return seen


def gone(storage, wait):
    """Whether the storage is no more, after up to a second where that is waited for."""
    until = time.monotonic() + wait
    while not storage.expired() and time.monotonic() < until:
        time.sleep(0.001)
    return storage.expired()


@case(
    "lazy_buckets.released", level=MUST, source=DDP, needs=NEEDS, each={"lazy": True, "kept": False}, catalogue=("O10",)
)
def test_a_lazy_bucket_is_released_after_backward(rank, lazy):
    """
    With `lazy_bucket_allocation` the storage of a bucket is gone when backward has returned; without it the same storage serves every iteration.

    Seen by weak references to the storage; gradients are copies and so hold nothing of a bucket. A thread of the backend may hold a
    bucket for some milliseconds more, so up to a second is waited.
    """
    ddp = rank.wrap(Scalars("a", "b"), lazy_bucket_allocation=lazy)
    seen = watched(rank, ddp)
    for _ in range(5):
        ddp.zero_grad()
        ddp(rank.batch(1)).backward()
        rank.law("the storage is gone" if lazy else "the storage is still there", gone(seen[-1], lazy), lazy)


@case(
    "lazy_buckets.same_training",
    level=MUST,
    source=DDP,
    world=(2, 3),
    needs=NEEDS,
    each={"copies": {}, "views": {"gradient_as_bucket_view": True}, "batched": {"batched_grad_copy": True}},
    catalogue=("O10",),
)
def test_training_is_the_same_with_lazy_buckets(rank, options):
    """
    With `lazy_bucket_allocation` training follows the mean of the ranks' gradients, as copies or as views, and where they accumulate in `no_sync` first.

    Each step is one micro-batch in `no_sync` and one synchronized; the loss is (w*x)^2/2 with x = W*(r+1), the rate 1/2048.
    """
    model = Scalars("w", dtype=torch.float64)
    ddp = rank.wrap(model, lazy_bucket_allocation=True, **options)
    x = rank.batch(1, dtype=torch.float64)
    factor = 1 - 2 * rank.mean(lambda r: rank.batch(1, of=r, dtype=torch.float64)[0] ** 2) / 2048
    for count in range(1, 5):
        ddp.zero_grad()
        with ddp.no_sync():
            (ddp(x) ** 2 / 2).backward()
        (ddp(x) ** 2 / 2).backward()
        with torch.no_grad():
            model.w -= model.w.grad / 2048
        rank.law("each step follows the mean", model.w, factor**count)


@case("lazy_buckets.unused", level=MUST, source=DDP, world=(2, 3), needs=NEEDS, catalogue=("O10",))
def test_lazy_buckets_find_unused_parameters(rank):
    """
    With `lazy_bucket_allocation` and `find_unused_parameters` a parameter that only rank 0 uses gets its share of the mean, and one that nobody uses keeps None.
    """
    model = Scalars("all", "first", "none")
    ddp = rank.wrap(model, lazy_bucket_allocation=True, find_unused_parameters=True)
    for _ in range(4):
        ddp.zero_grad()
        ddp(rank.batch(1), use=("all", "first") if rank.index == 0 else "all").backward()
        rank.law("used by all", model.all.grad, rank.mean(lambda r: rank.batch(1, of=r)[0]))
        rank.law("used by rank 0", model.first.grad, rank.batch(1, of=0)[0] / rank.world_size)
        rank.law("used by nobody", model.none.grad, None)
