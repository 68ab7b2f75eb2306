"""How `bucket_cap_mb_list` divides gradients into all-reduces, and what it does not change."""

from ddp_conformance import OBSERVED, case
from ddp_conformance.models import Scalars
from ddp_conformance.reference import MIB, built, carried, rebuilt

BACKWARD = [5, 4, 3, 2, 1, 0]
"""In which order the gradients of six parameters become ready, which are used in the order of registration."""
CAP_LIST = "distributed_test.py::DistributedTest._DistTestBase::test_ddp_bucket_cap_mb_list"


def reductions(rank, model, iterations=2, **options):
    """What each all-reduce of so many iterations carries."""
    ddp = rank.wrap(model, **options)
    buckets = rank.buckets(ddp)
    for _ in range(iterations):
        ddp(rank.batch(1)).backward()
    return buckets


@case(
    "bucket_cap_list.one_by_one",
    level=OBSERVED,
    source="nn/parallel/distributed.py: Per-bucket size limits in MiB. When provided, each",
    needs=("bucket_cap_mb_list", "register_comm_hook"),
    catalogue=("H03",),
    torch_tests=(CAP_LIST, "test_c10d_ddp.py::DistributedDataParallelTest::test_bucket_cap_mb_list"),
    reports=("pytorch/pytorch#169026",),
)
def test_a_list_of_caps_bounds_the_buckets_one_by_one(rank):
    """
    `bucket_cap_mb_list` bounds buckets one by one, the last cap repeating; the first cap is that of the parameters
    registered first at construction, and of the gradients ready first once buckets are rebuilt.

    So after the first iteration the list is applied from the other end of the model.
    """
    model = Scalars(*"abcdef")
    buckets = reductions(rank, model, 3, bucket_cap_mb_list=[4 / MIB, 12 / MIB, 8 / MIB])
    rank.show("buckets", buckets)
    limits = [4, 12, 8]
    first, later = carried(built(model.parameters(), limits)), carried(rebuilt(model.parameters(), BACKWARD, limits))
    rank.law("first in the order of registration, reversed", buckets[:3], first)
    rank.law("then in ready order", buckets[3:], later * 2)


@case(
    "bucket_cap_list.beats_cap",
    level=OBSERVED,
    source="nn/parallel/distributed.py: of 25 MiB. Ignored if bucket_cap_mb_list is provided.",
    needs=("bucket_cap_mb_list", "_get_ddp_logging_data", "register_comm_hook"),
    catalogue=("H03",),
    reports=("pytorch/pytorch#169026",),
)
def test_a_list_of_caps_beats_a_single_cap(rank):
    """Where both are given `bucket_cap_mb` is ignored, and the largest cap of the list is logged as the cap."""
    model = Scalars(*"abcdef")
    ddp = rank.wrap(model, bucket_cap_mb=100, bucket_cap_mb_list=[4 / MIB, 8 / MIB])
    buckets = rank.buckets(ddp)
    for _ in range(2):
        ddp(rank.batch(1)).backward()
    rank.show("buckets", buckets)
    limits = [4, 8]
    wanted = carried(built(model.parameters(), limits)) + carried(rebuilt(model.parameters(), BACKWARD, limits))
    rank.law("as the list has it", buckets, wanted)
    rank.law("the largest is logged", rank.log(ddp, "bucket_cap_bytes"), {"bucket_cap_bytes": 8})


@case(
    "bucket_cap_list.values",
    level=OBSERVED,
    source="DistributedDataParallel",
    each={"default": {}, "view": {"gradient_as_bucket_view": True}, "batched_copy": {"batched_grad_copy": True}},
    world=3,
    needs=("bucket_cap_mb_list",),
    catalogue=("H03",),
    reports=("pytorch/pytorch#169026", "pytorch/pytorch#176638"),
)
def test_a_list_of_caps_changes_no_value(rank, options):
    """
    With `bucket_cap_mb_list` gradients are the mean over ranks as ever, also where they add up over iterations, are views of
    their bucket, or are copied in batches.
    """
    model = Scalars(*"abcdef")
    ddp = rank.wrap(model, bucket_cap_mb_list=[4 / MIB, 8 / MIB], **options)
    for step in range(1, 5):
        ddp(rank.batch(1)).backward()
        wanted = step * rank.mean(lambda r: rank.batch(1, of=r)[0])
        for name in "af":
            rank.law(f"step {step}: {step} times the mean", getattr(model, name).grad, wanted)
    rank.show("gradient", model.f.grad)
