"""Rebuilt buckets are filled in the order in which rank 0's gradients became ready, under the limits of the caps."""

import torch
import torch.distributed as dist
from ddp_conformance import OBSERVED, case
from ddp_conformance.models import Scalars
from ddp_conformance.reference import (
    DEFAULT_LIMIT,
    FIRST_LIMIT,
    MIB,
    carried,
    every_bucket,
    rebuilt,
)
from torch import nn

RANK_0 = "include/torch/csrc/distributed/c10d/reducer.hpp: Broadcast rebuilt buckets from rank 0 to other ranks before initializing"
READY = (
    "include/torch/csrc/distributed/c10d/reducer.hpp: according to when tensors received grads in the backward pass."
)
BACKWARD = [5, 4, 3, 2, 1, 0]
"""In which order the gradients of six parameters become ready, which are used in the order of registration."""


def steps(rank, ddp, count, *use):
    """Forward and backward `count` times, parameters used in the order asked for."""
    for _ in range(count):
        ddp.module.zero_grad(set_to_none=True)
        ddp(rank.batch(1), *use).backward()


@case(
    "rebuilt_buckets.ready_order",
    level=OBSERVED,
    source=READY,
    world=(1, 2),
    needs=("register_comm_hook",),
    catalogue=("H05", "U06"),
)
def test_rebuilt_buckets_follow_the_order_in_which_gradients_became_ready(rank):
    """
    Rebuilt buckets hold parameters in the order in which their gradients became ready in the first backward, not in the
    order of registration or its reverse.
    """
    used = ("c", "a", "e", "b", "d")
    ready = ["abcde".index(name) for name in reversed(used)]
    model = Scalars(*"abcde")
    ddp = rank.wrap(model, **every_bucket(8))
    buckets = rank.buckets(ddp)
    steps(rank, ddp, 4, used)
    rank.show("buckets", buckets[1:4])
    rank.law("filled in ready order", buckets[1:], carried(rebuilt(model.parameters(), ready, [8])) * 3)


@case(
    "rebuilt_buckets.order_from_rank_0",
    level=OBSERVED,
    source=RANK_0,
    world=3,
    needs=("register_comm_hook",),
    catalogue=("H05",),
)
def test_all_ranks_take_the_order_of_rank_0(rank):
    """
    Where gradients become ready in another order on each rank, all ranks rebuild by that of rank 0, and means stay right.
    """
    orders = ["cabd", "abcd", "dbac"]
    model = Scalars(*"abcd")
    ddp = rank.wrap(model, **every_bucket(8))
    buckets = rank.buckets(ddp)
    steps(rank, ddp, 4, tuple(orders[rank.index]))
    rank.show("buckets", buckets[1:3])
    ready = ["abcd".index(name) for name in reversed(orders[0])]
    rank.law("rank 0's order", buckets[1:], carried(rebuilt(model.parameters(), ready, [8])) * 3)
    rank.law("the mean", model.c.grad, rank.mean(lambda r: rank.batch(1, of=r)[0]))


@case(
    "rebuilt_buckets.order_from_first_of_group",
    level=OBSERVED,
    source=RANK_0,
    world=3,
    needs=("process_group", "register_comm_hook"),
    catalogue=("H05", "A04"),
)
def test_in_a_sub_group_all_ranks_take_the_order_of_its_first_rank(rank):
    """In a sub-group all ranks rebuild by the order of the group's first rank, whatever its number is outside the group."""
    group = dist.new_group([1, 2])
    rank.show("member", rank.index in (1, 2))
    if rank.index not in (1, 2):
        return
    orders = {1: "cabd", 2: "dbac"}
    model = Scalars(*"abcd")
    ddp = rank.wrap(model, process_group=group, **every_bucket(8))
    buckets = rank.buckets(ddp, group)
    steps(rank, ddp, 4, tuple(orders[rank.index]))
    rank.show("buckets", buckets[1:3])
    ready = ["abcd".index(name) for name in reversed(orders[1])]
    rank.law("rank 1's order", buckets[1:], carried(rebuilt(model.parameters(), ready, [8])) * 3)
    rank.law("the mean of the two", model.c.grad, rank.mean(lambda r: rank.batch(1, of=r)[0], ranks=[1, 2]))


@case(
    "rebuilt_buckets.dtypes",
    level=OBSERVED,
    source=READY,
    needs=("register_comm_hook",),
    catalogue=("H05", "B04", "U01"),
)
def test_each_dtype_is_rebuilt_into_buckets_of_its_own_in_the_order_they_are_full(rank):
    """
    Each dtype is rebuilt into buckets of its own under the same limits, and all buckets stand in the order in which they
    were full.
    """
    model = Scalars(*"abcdef")
    for name in "bc":
        setattr(model, name, nn.Parameter(torch.ones(1, dtype=torch.float64)))
    ddp = rank.wrap(model, **every_bucket(8))
    buckets = rank.buckets(ddp)
    steps(rank, ddp, 4, tuple("abdcef"))
    rank.show("buckets", buckets)
    ready = ["abcdef".index(name) for name in reversed("abdcef")]
    rank.law("floats in pairs, doubles alone", buckets[2:], carried(rebuilt(model.parameters(), ready, [8])) * 3)


def blocks():
    """Six parameters of 512 KiB each."""
    model = Scalars(*"abcdef")
    for parameter in model.parameters():
        parameter.data = torch.ones(MIB // 8)
    return model


@case(
    "rebuilt_buckets.cap_and_first_limit",
    level=OBSERVED,
    source="nn/parallel/distributed.py: first_bucket_bytes_cap",
    each={"half_mib": 0.5, "two_mib": 2, "default_given": 25},
    needs=("register_comm_hook",),
    catalogue=("H04",),
    reports=("pytorch/pytorch#121640", "pytorch/pytorch#48880"),
)
def test_whether_the_users_cap_bounds_the_first_rebuilt_bucket_too(rank, cap):
    """
    Where the user gives a cap, either it bounds every rebuilt bucket, or the first is bounded by 1 MiB; which of them
    depends on the release.

    So an explicit cap of 25 MiB, the default's value, is not the same as none where the cap bounds them all. Six parameters
    of 512 KiB.
    """
    model = blocks()
    ddp = rank.wrap(model, bucket_cap_mb=cap)
    buckets = rank.buckets(ddp)
    steps(rank, ddp, 2)
    rank.show("buckets", buckets[1:])
    limits = ([int(cap * MIB)], [FIRST_LIMIT, int(cap * MIB)])
    readings = [carried(rebuilt(model.parameters(), BACKWARD, each)) for each in limits]
    rank.law("one of the two readings", buckets[1:] in readings, True)


@case(
    "rebuilt_buckets.small_bucket_first",
    level=OBSERVED,
    source="nn/parallel/distributed.py: first_bucket_bytes_cap",
    needs=("register_comm_hook",),
    catalogue=("H04", "H05"),
    reports=("pytorch/pytorch#62232",),
)
def test_without_a_cap_the_first_rebuilt_bucket_is_bounded_by_one_mebibyte(rank):
    """
    Without a cap 1 MiB bounds the first rebuilt bucket and 25 MiB the others, so the small bucket is now the one reduced
    first.

    That is the bucket of the parameters used last. Comments in torch still speak of those "defined first", which is true
    only of the buckets at construction.
    """
    model = blocks()
    ddp = rank.wrap(model)
    buckets = rank.buckets(ddp)
    steps(rank, ddp, 2)
    rank.show("buckets", buckets[1:])
    full = carried(rebuilt(model.parameters(), BACKWARD, [FIRST_LIMIT, DEFAULT_LIMIT]))
    rank.law("two of 512 KiB, then the rest", buckets[1:], full)


@case(
    "rebuilt_buckets.tuned_first_limit",
    level=OBSERVED,
    source="include/torch/csrc/distributed/c10d/reducer.hpp: Bytes capacity of first bucket, can be configured by user",
    needs=("register_comm_hook",),
    catalogue=("H04",),
    reports=("pytorch/pytorch#62748", "pytorch/pytorch#61353"),
)
def test_the_first_limit_is_read_from_a_module_variable(rank):
    """
    Without a cap `dist._DEFAULT_FIRST_BUCKET_BYTES`, as it is when DDP is constructed, bounds the first rebuilt bucket.
    """
    dist._DEFAULT_FIRST_BUCKET_BYTES = 1
    model = blocks()
    ddp = rank.wrap(model)
    dist._DEFAULT_FIRST_BUCKET_BYTES = 2 * MIB  # too late
    buckets = rank.buckets(ddp)
    steps(rank, ddp, 2)
    rank.show("buckets", buckets[1:])
    rank.law("one parameter, then the rest", buckets[1:], ["5", "4 3 2 1 0"])


@case(
    "rebuilt_buckets.static_graph_unused",
    level=OBSERVED,
    source=READY,
    needs=("static_graph", "register_comm_hook"),
    catalogue=("F01", "F08"),
)
def test_under_static_graph_unused_parameters_have_a_place_in_rebuilt_buckets(rank):
    """
    Under `static_graph` buckets are rebuilt also where a parameter is never used; it comes last.
    """
    model = Scalars(*"abcd")
    ddp = rank.wrap(model, static_graph=True, **every_bucket(4))
    buckets = rank.buckets(ddp)
    steps(rank, ddp, 4, tuple("acd"))
    rank.show("buckets", buckets[2:6])
    rank.law("the three used ones in ready order, then the unused one", buckets[2:6], ["3", "2", "0", "1"])
    rank.law("the mean of a used one", model.d.grad, rank.mean(lambda r: rank.batch(1, of=r)[0]))
