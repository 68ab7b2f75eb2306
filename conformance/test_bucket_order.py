"""At construction parameters fill buckets in the order of registration, and the list of buckets is reversed."""

import torch
from ddp_conformance import OBSERVED, case
from ddp_conformance.models import Scalars, three_layers
from ddp_conformance.reference import DEFAULT_LIMIT, FIRST_LIMIT, MIB, built, carried, every_bucket
from torch import nn

REVERSED = "nn/parallel/distributed.py: Note: reverse list of buckets because we want to approximate the"


def first_backward(rank, model, own, **options):
    """
    What each all-reduce of the first backward carries, under `find_unused_parameters`.

    It is the only setting that shows the buckets of the constructor; others begin with one bucket.
    """
    ddp = rank.wrap(model, find_unused_parameters=True, **options)
    buckets = rank.buckets(ddp)
    ddp(own).sum().backward()
    return buckets


@case(
    "bucket_order.reversed",
    level=OBSERVED,
    source=REVERSED,
    needs=("find_unused_parameters", "register_comm_hook"),
    catalogue=("H02", "U01"),
    torch_tests=("distributed_test.py::DistributedTest._DistTestBase::test_ddp_logging_data_cpu",),
)
def test_the_bucket_of_the_parameters_registered_last_is_reduced_first(rank):
    """
    The buckets of the constructor are reduced in reverse: those of the parameters registered last come first.

    Inside a bucket parameters stay in the order of registration. With three layers and a 1 MiB cap the assignment
    [0], [1, 2], [3, 4], [5] is reduced as 5, 3 4, 1 2, 0.
    """
    model = three_layers()
    buckets = first_backward(rank, model, rank.batch(512), bucket_cap_mb=1)
    rank.show("buckets", buckets)
    rank.law("filled in order, then reversed", buckets, carried(built(model.parameters(), [FIRST_LIMIT, MIB])))


@case(
    "bucket_order.small_bucket_last",
    level=OBSERVED,
    source=REVERSED,
    needs=("find_unused_parameters", "register_comm_hook"),
    catalogue=("H02", "H04", "U04"),
    reports=("pytorch/pytorch#48880", "pytorch/pytorch#61353"),
)
def test_without_a_cap_the_small_first_limit_ends_up_on_the_last_bucket(rank):
    """
    Without a cap the small first limit of 1 MiB bounds the bucket that is reduced last, which holds the parameters
    registered first.

    Their gradients arrive last, so the reduction that nothing is left to hide is a small one. This is so only before the
    rebuild, and `find_unused_parameters=True` never rebuilds.
    """
    model = three_layers()
    buckets = first_backward(rank, model, rank.batch(512))
    rank.show("buckets", buckets)
    wanted = carried(built(model.parameters(), [FIRST_LIMIT, DEFAULT_LIMIT]))
    rank.law("1 MiB for the first parameters, 25 MiB for the others", buckets, wanted)


@case(
    "bucket_order.cap_and_first_limit",
    level=OBSERVED,
    source="nn/parallel/distributed.py: first_bucket_bytes_cap",
    needs=("find_unused_parameters", "register_comm_hook"),
    catalogue=("H04", "U04"),
    reports=("pytorch/pytorch#121640",),
)
def test_whether_the_users_cap_bounds_the_first_filled_bucket_too(rank):
    """
    Where the user gives a cap, either it bounds every bucket of the constructor, or the one filled first is bounded by 1 MiB;
    which of them depends on the release.

    Four parameters of 512 KiB under a cap of 512 KiB: alone in four buckets, or the first two together.
    """
    model = Scalars(*"abcd")
    for parameter in model.parameters():
        parameter.data = torch.ones(1 << 17)
    buckets = first_backward(rank, model, rank.batch(1), bucket_cap_mb=0.5)
    rank.show("buckets", buckets)
    readings = [carried(built(model.parameters(), limits)) for limits in ([MIB // 2], [FIRST_LIMIT, MIB // 2])]
    rank.law("one of the two readings", buckets in readings, True)


@case(
    "bucket_order.dtypes",
    level=OBSERVED,
    source=REVERSED,
    needs=("find_unused_parameters", "register_comm_hook"),
    catalogue=("H02", "U01"),
)
def test_buckets_of_several_dtypes_are_interleaved_by_their_first_parameter(rank):
    """
    With several dtypes each has its own buckets, and all of them are reduced in reverse order of the first parameter in each.
    """
    model = Scalars(*"abcdef")
    for name in "bde":
        setattr(model, name, nn.Parameter(torch.ones(1, dtype=torch.float64)))
    buckets = first_backward(rank, model, rank.batch(1), **every_bucket(8))
    rank.show("buckets", buckets)
    rank.law("filled by dtype, then reversed", buckets, carried(built(model.parameters(), [8])))


@case(
    "bucket_order.sparse_alone",
    level=OBSERVED,
    source="include/torch/csrc/distributed/c10d/reducer.hpp: If this bucket should expect a single sparse gradient",
    needs=("find_unused_parameters", "register_comm_hook"),
    lanes=("gloo:*",),
    catalogue=("B06", "U01"),
)
def test_a_parameter_with_a_sparse_gradient_has_a_bucket_to_itself(rank):
    """
    The weight of an `Embedding(sparse=True)` has a bucket to itself, and the parameters around it share theirs.
    """
    model = nn.Sequential(nn.Embedding(4, 2, sparse=True), nn.Linear(2, 2), nn.Linear(2, 2))
    ddp = rank.wrap(model, find_unused_parameters=True)
    carried_now, dense = [], []

    def gather(state, bucket):
        carried_now.append(len(bucket.parameters()))
        dense.append(not bucket.buffer().is_sparse)
        future = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    ddp.register_comm_hook(None, gather)
    ddp(torch.tensor([rank.index], device=rank.device)).sum().backward()
    rank.show("parameters_in_each", carried_now)
    rank.law("four dense ones together, the sparse one alone", carried_now, [4, 1])
    rank.law("the bucket of the sparse one is sparse", dense, [True, False])


@case(
    "bucket_order.frozen_take_no_room",
    level=OBSERVED,
    source="DistributedDataParallel",
    needs=("register_comm_hook",),
    catalogue=("A03",),
    reports=("pytorch/pytorch#14675",),
)
def test_frozen_parameters_enter_no_bucket(rank):
    """
    Parameters that require no gradient enter no bucket, whatever their dtype, and hold none back.

    In 2018 a frozen parameter of a dtype of its own kept every bucket waiting.
    """
    model = Scalars("a", "b", "c")
    model.b = nn.Parameter(torch.ones(1, dtype=torch.int32), requires_grad=False)
    buckets = first_backward(rank, model, rank.batch(1))
    rank.show("buckets", buckets)
    rank.law("the two that are trained", buckets, ["0 1"])
    rank.law("and their mean arrives", model.a.grad, rank.mean(lambda r: rank.batch(1, of=r)[0]))
