"""Buckets are filled greedily: in order, each closed by the tensor that reaches its limit, the last limit repeating."""

import itertools
import sys

import torch
import torch.distributed as dist
from ddp_conformance import HAZARD, OBSERVED, case
from ddp_conformance.models import three_layers
from ddp_conformance.reference import greedy_fill, sizes

SOURCE = "torch.distributed._compute_bucket_assignment_by_size"
ALL_KINDS = "test_c10d_common.py::ComputeBucketAssignmentTest::test_multi_limit_multi_dtype"
ONE_KIND = "test_c10d_common.py::ComputeBucketAssignmentTest::test_multi_limit_single_dtype"
ONE_LIMIT = "test_c10d_common.py::ComputeBucketAssignmentTest::test_single_limit_single_dtype"


def assign(tensors, limits, *more):
    """The buckets, and the limit that each was filled under. A float has 4 bytes, a double 8."""
    buckets, under = dist._compute_bucket_assignment_by_size(tensors, limits, *more)
    return buckets, under


def floats(*counts):
    return [torch.empty(count) for count in counts]


@case(
    "bucket_assignment.greedy",
    level=OBSERVED,
    source=SOURCE,
    group=False,
    of="torch",
    catalogue=("U01",),
    torch_tests=(ONE_LIMIT,),
    reports=("pytorch/pytorch#48880",),
)
def test_tensors_fill_a_bucket_in_list_order_until_one_reaches_the_limit(rank):
    """
    Tensors go into a bucket in list order, and the tensor that reaches the limit closes it.

    A small tensor further down the list is never used to fill a gap.
    """
    buckets, _ = assign(floats(1, 1, 1, 3, 1), [8])
    rank.show("buckets", buckets)
    rank.law("in list order, closed at 8 bytes", buckets, [[0, 1], [2, 3], [4]])


@case("bucket_assignment.exact_fill", level=OBSERVED, source=SOURCE, group=False, of="torch", catalogue=("U01",))
def test_an_exact_fill_closes_the_bucket(rank):
    """A tensor that fills a bucket to exactly its limit closes it; one byte less does not."""
    exact, _ = assign(floats(2, 1), [8])
    rank.show("exact", exact)
    rank.law("8 of 8 bytes close the bucket", exact, [[0], [1]])
    short, _ = assign(floats(2, 1), [9])
    rank.show("a_byte_short", short)
    rank.law("8 of 9 bytes do not", short, [[0, 1]])


@case(
    "bucket_assignment.overshoot",
    level=OBSERVED,
    source=SOURCE,
    group=False,
    of="torch",
    catalogue=("U01",),
    reports=("pytorch/pytorch#48880",),
)
def test_a_tensor_that_overshoots_the_limit_still_goes_in(rank):
    """
    A tensor that pushes a bucket past its limit still goes into it, so a bucket may be larger than the limit.

    A tensor is never split. So a bucket can hold up to the limit less a byte, and one more tensor of any size.
    """
    buckets, limits = assign(floats(1, 100, 1), [8])
    rank.show("buckets", buckets)
    rank.law("404 bytes under a limit of 8", buckets, [[0, 1], [2]])
    rank.law("the limit is told, not the size", limits, [8, 8])


@case(
    "bucket_assignment.limits_in_turn",
    level=OBSERVED,
    source=SOURCE,
    group=False,
    of="torch",
    catalogue=("U01",),
    torch_tests=(ONE_KIND,),
)
def test_each_bucket_uses_up_one_limit_and_the_last_one_repeats(rank):
    """The first bucket is filled under the first limit, the next under the next, and the last limit repeats."""
    buckets, limits = assign(floats(*[1] * 12), [4, 8, 12])
    rank.show("buckets", buckets)
    rank.law("1, 2, 3, 3 tensors and the rest", buckets, [[0], [1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11]])
    rank.law("the limits in turn", limits, [4, 8, 12, 12, 12])


@case("bucket_assignment.unlimited", level=OBSERVED, source=SOURCE, group=False, of="torch", catalogue=("U01", "U04"))
def test_one_unlimited_limit_gives_one_bucket(rank):
    """A single limit of `sys.maxsize` puts all tensors of one dtype and device into one bucket."""
    buckets, limits = assign(floats(1, 1000, 1, 1000), [sys.maxsize])
    rank.show("buckets", buckets)
    rank.law("one bucket", buckets, [[0, 1, 2, 3]])
    rank.law("under the one limit", limits, [sys.maxsize])


@case(
    "bucket_assignment.per_dtype",
    level=OBSERVED,
    source=SOURCE,
    group=False,
    of="torch",
    catalogue=("U01",),
    torch_tests=(ALL_KINDS, "test_c10d_common.py::ComputeBucketAssignmentTest::test_single_limit_multi_dtype"),
)
def test_every_dtype_fills_its_own_buckets_and_walks_the_limits_from_the_first(rank):
    """Every dtype fills buckets of its own and walks the list of limits for itself, from the first one on."""
    kinds = [torch.float32, torch.float64, torch.float32, torch.float64, torch.float32, torch.float64]
    buckets, limits = assign([torch.empty(1, dtype=kind) for kind in kinds], [4, 16])
    rank.show("buckets", buckets)
    rank.show("limits", limits)
    rank.law("dtypes do not mix", buckets, [[0], [1], [2, 4], [3, 5]])
    rank.law("each dtype begins at the first limit", limits, [4, 4, 16, 16])


@case("bucket_assignment.per_device", level=OBSERVED, source=SOURCE, group=False, of="torch", catalogue=("U01",))
def test_every_device_fills_its_own_buckets_and_walks_the_limits_from_the_first(rank):
    """Every device fills buckets of its own and walks the list of limits for itself, from the first one on."""
    devices = ["cpu", "meta", "cpu", "meta", "cpu", "meta"]
    buckets, limits = assign([torch.empty(1, device=device) for device in devices], [4, 8])
    rank.show("buckets", buckets)
    rank.law("devices do not mix", buckets, [[0], [1], [2, 4], [3, 5]])
    rank.law("each device begins at the first limit", limits, [4, 4, 8, 8])


@case("bucket_assignment.sparse_alone", level=OBSERVED, source=SOURCE, group=False, of="torch", catalogue=("U01",))
def test_a_tensor_with_a_sparse_gradient_stands_alone(rank):
    """
    A tensor that expects a sparse gradient has a bucket to itself, under limit 0, and the open bucket fills on around it.

    It uses up no limit.
    """
    buckets, limits = assign(floats(1, 1, 1, 1), [8, 100], [False, True, False, False])
    rank.show("buckets", buckets)
    rank.show("limits", limits)
    rank.law("the sparse one alone", buckets, [[0, 2], [1], [3]])
    rank.law("under no limit of the list", limits, [8, 0, 100])


@case("bucket_assignment.smallest_index", level=OBSERVED, source=SOURCE, group=False, of="torch", catalogue=("U01",))
def test_buckets_are_ordered_by_the_smallest_index_in_them(rank):
    """
    Buckets are returned in the order of the smallest index in each, not in the order in which they closed.

    The float bucket closes last here, and stands first.
    """
    tensors = [torch.empty(1), torch.empty(1, dtype=torch.float64), torch.empty(1, dtype=torch.float64), torch.empty(1)]
    buckets, _ = assign(tensors, [8])
    rank.show("buckets", buckets)
    rank.law("0 is in the first bucket, 1 in the second", buckets, [[0, 3], [1], [2]])


@case("bucket_assignment.given_order", level=OBSERVED, source=SOURCE, group=False, of="torch", catalogue=("U01",))
def test_with_indices_buckets_stay_in_the_order_they_were_filled(rank):
    """
    With a list of tensor indices, buckets hold those indices and stay in the order in which they closed.

    This is how buckets are rebuilt: tensors in the order their gradients arrived. Flags for sparse gradients are looked
    up by index, not by place.
    """
    buckets, _ = assign(floats(1, 1, 1), [4], [], [2, 0, 1])
    rank.show("buckets", buckets)
    rank.law("not sorted", buckets, [[2], [0], [1]])
    buckets, _ = assign(floats(1, 1, 1), [8], [True, False, False], [2, 1, 0])
    rank.show("with_a_sparse_one", buckets)
    rank.law("the flag of index 0 is about the last tensor", buckets, [[2, 1], [0]])


@case("bucket_assignment.limits_returned", level=OBSERVED, source=SOURCE, group=False, of="torch", catalogue=("U01",))
def test_the_limit_of_each_bucket_is_returned_with_it(rank):
    """
    One limit a bucket is returned, in the same order: the one it was filled under, also where it never reached it.

    Added so that DDP can log them (pytorch/pytorch#62231); limits follow their buckets through the sorting.
    """
    tensors = [torch.empty(1), torch.empty(2, dtype=torch.float64), torch.empty(1), torch.empty(1)]
    buckets, limits = assign(tensors, [8, 100])
    rank.show("buckets", buckets)
    rank.show("limits", limits)
    rank.law("full, full, left over", buckets, [[0, 2], [1], [3]])
    rank.law("the limit each was filled under", limits, [8, 8, 100])


@case("bucket_assignment.empty_tensors", level=OBSERVED, source=SOURCE, group=False, of="torch", catalogue=("U01",))
def test_tensors_without_elements_take_no_room(rank):
    """A tensor without elements goes into the open bucket and takes no room; under limit 0 it has one to itself."""
    buckets, _ = assign(floats(0, 1, 0, 1), [4])
    rank.show("limit_4", buckets)
    rank.law("none of them closes a bucket", buckets, [[0, 1], [2, 3]])
    buckets, _ = assign(floats(0, 0, 1), [0])
    rank.show("limit_0", buckets)
    rank.law("0 of 0 bytes is full", buckets, [[0], [1], [2]])


@case("bucket_assignment.every_combination", level=OBSERVED, source=SOURCE, group=False, of="torch", catalogue=("U01",))
def test_every_combination_of_a_small_domain_is_as_the_reference_has_it(rank):
    """
    Every combination of up to three tensors of three sizes, two dtypes, sparse or not, under one or two limits, is filled as
    a reference says.

    The reference (`ddp_conformance.reference.greedy_fill`) cuts each dtype's tensors into buckets one after the other.
    """
    pool = {(n, kind): torch.empty(n, dtype=kind) for n in (1, 2, 3) for kind in (torch.float32, torch.float64)}
    limits = [[a] for a in (0, 4, 8, 16)] + [[a, b] for a in (4, 8) for b in (4, 12, 24)]
    tried, wrong = 0, []
    for count in (1, 2, 3):
        for chosen in itertools.product(pool, repeat=count):
            tensors = [pool[key] for key in chosen]
            for alone, limit in itertools.product(itertools.product((False, True), repeat=count), limits):
                wanted = greedy_fill(sizes(tensors), limit, kinds=[kind for _, kind in chosen], alone=alone)
                if assign(tensors, limit, list(alone)) != wanted:
                    wrong.append(f"{chosen} {alone} {limit}")
                tried += 1
    rank.show("combinations", tried)
    rank.law("all are as the reference has them", wrong[:3], [])


@case("bucket_assignment.three_layers", level=OBSERVED, source=SOURCE, group=False, of="torch", catalogue=("U01",))
def test_three_layers_under_a_first_limit_of_a_mebibyte_and_a_cap_of_one(rank):
    """
    Three Linear(512, 512) with a 1 MiB cap make the buckets [0], [1, 2], [3, 4] and [5].

    A weight has exactly 1048576 bytes and fills the first bucket alone; a bias of 2048 bytes and the next layer's weight
    make 1050624, a little over the cap. One unlimited limit makes one bucket.
    """
    parameters = list(three_layers().parameters())
    bytes_of = sizes(parameters)
    rank.show("bytes", bytes_of)
    rank.show("first_limit", dist._DEFAULT_FIRST_BUCKET_BYTES)
    sparse = [False] * len(parameters)
    buckets, _ = assign(parameters, [dist._DEFAULT_FIRST_BUCKET_BYTES, 1024 * 1024], sparse)
    rank.show("two_limits", buckets)
    rank.law("a weight alone, then bias and next weight", buckets, [[0], [1, 2], [3, 4], [5]])
    filled = [sum(bytes_of[at] for at in bucket) for bucket in buckets]
    rank.law("bytes in each", filled, [1048576, 1050624, 1050624, 2048])
    unlimited, _ = assign(parameters, [sys.maxsize], sparse)
    rank.show("one_limit", unlimited)
    rank.law("all in one", unlimited, [[0, 1, 2, 3, 4, 5]])


@case("bucket_assignment.no_tensors", level=OBSERVED, source=SOURCE, group=False, of="torch", catalogue=("U01",))
def test_an_empty_list_of_tensors_is_refused(rank):
    """An empty list of tensors is refused, by an internal assertion."""
    with rank.raises("no_tensors", RuntimeError, match="INTERNAL ASSERT FAILED"):
        assign([], [4])


@case(
    "bucket_assignment.no_limits",
    level=HAZARD,
    source=SOURCE,
    group=False,
    of="torch",
    may=("die",),
    catalogue=("U01",),
)
def test_an_empty_list_of_limits_kills_the_process(rank):
    """
    An empty list of limits kills the process by SIGSEGV: it is dereferenced unchecked.

    DDP itself never passes one; whoever calls this function to plan buckets can.
    """
    buckets, _ = assign(floats(1), [4])
    rank.law("with a limit it works", buckets, [[0]])
    assign(floats(1), [])


@case(
    "bucket_assignment.sparse_tensors",
    level=OBSERVED,
    source=SOURCE,
    group=False,
    of="torch",
    catalogue=("U01",),
    torch_tests=(
        "distributed_test.py::DistributedTest._DistTestBase::"
        "test_compute_bucket_assignment_by_size_sparse_error_without_logger",
    ),
)
def test_sparse_tensors_and_flags_of_another_length_are_refused(rank):
    """A tensor that is itself sparse is refused, and so is a list of flags with another length than the tensors'."""
    with rank.raises("sparse_tensor", RuntimeError, match="No support for sparse tensors"):
        assign([torch.eye(2).to_sparse()], [4])
    with rank.raises("flags_of_another_length", RuntimeError, match="INTERNAL ASSERT FAILED"):
        assign(floats(1, 1), [4], [True])
