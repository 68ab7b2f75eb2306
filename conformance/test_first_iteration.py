"""The first iteration reduces everything in one bucket, because only the order of registration is known by then."""

import torch
from ddp_conformance import OBSERVED, case
from ddp_conformance.models import Scalars, three_layers
from ddp_conformance.reference import FIRST_LIMIT, MIB, built, carried, every_bucket
from torch import nn

UNLIMITED = "nn/parallel/distributed.py: bucket_size_limits = [sys.maxsize]"


@case(
    "first_iteration.one_bucket",
    level=OBSERVED,
    source=UNLIMITED,
    each={
        "default": {},
        "static_graph": {"static_graph": True},
        "static_graph_find_unused": {"static_graph": True, "find_unused_parameters": True},
    },
    needs=("register_comm_hook",),
    catalogue=("U04", "U06"),
    reports=("pytorch/pytorch#72843",),
)
def test_the_first_backward_carries_all_parameters_in_one_bucket(rank, options):
    """
    The first backward reduces all parameters in one bucket, in the order of registration and whatever the cap, unless DDP
    looks for unused parameters in a graph that may change.

    Before the first backward only the order of registration is known. Buckets on that guess could be reduced early on one
    rank and late on another.
    """
    model = three_layers()
    ddp = rank.wrap(model, bucket_cap_mb=1, **options)
    buckets = rank.buckets(ddp)
    ddp(rank.batch(512)).sum().backward()
    rank.show("buckets", buckets)
    rank.law("one bucket, in the order of registration", buckets, ["0 1 2 3 4 5"])


@case(
    "first_iteration.several_buckets",
    level=OBSERVED,
    source="nn/parallel/distributed.py: static_graph or not find_unused_parameters",
    needs=("find_unused_parameters", "register_comm_hook"),
    catalogue=("U04",),
)
def test_with_find_unused_parameters_the_first_backward_uses_several_buckets(rank):
    """
    With `find_unused_parameters=True` and no static graph the cap holds from the first backward on, which reduces several
    buckets.
    """
    model = three_layers()
    ddp = rank.wrap(model, bucket_cap_mb=1, find_unused_parameters=True)
    buckets = rank.buckets(ddp)
    ddp(rank.batch(512)).sum().backward()
    rank.show("buckets", buckets)
    rank.law("as the cap has it", buckets, carried(built(model.parameters(), [FIRST_LIMIT, MIB])))


@case(
    "first_iteration.one_per_dtype",
    level=OBSERVED,
    source=UNLIMITED,
    needs=("register_comm_hook",),
    catalogue=("U04", "B04"),
)
def test_the_first_backward_carries_one_bucket_for_each_dtype(rank):
    """The first backward reduces one bucket for each dtype, the one with the first parameter last."""
    model = Scalars(*"abcd")
    model.b, model.d = (nn.Parameter(torch.ones(1, dtype=torch.float64)) for _ in "bd")
    ddp = rank.wrap(model, **every_bucket(4))
    buckets = rank.buckets(ddp)
    ddp(rank.batch(1)).sum().backward()
    rank.show("buckets", buckets)
    rank.law("floats and doubles, reversed", buckets, ["1 3", "0 2"])


@case(
    "first_iteration.cap_list",
    level=OBSERVED,
    source="nn/parallel/distributed.py: self.has_custom_per_bucket_caps",
    needs=("bucket_cap_mb_list", "register_comm_hook"),
    catalogue=("H03", "U04"),
    reports=("pytorch/pytorch#169026",),
)
def test_with_a_list_of_caps_the_first_backward_uses_several_buckets(rank):
    """With `bucket_cap_mb_list` the caps hold from the first backward on, which then reduces several buckets."""
    model = Scalars(*"abcdef")
    ddp = rank.wrap(model, bucket_cap_mb_list=[4 / MIB, 8 / MIB])
    buckets = rank.buckets(ddp)
    ddp(rank.batch(1)).sum().backward()
    rank.show("buckets", buckets)
    rank.law("4 bytes, then 8 each, reversed", buckets, carried(built(model.parameters(), [4, 8])))


@case(
    "first_iteration.registration_order",
    level=OBSERVED,
    source=UNLIMITED,
    world=(1, 2),
    needs=("register_comm_hook",),
    catalogue=("U06",),
)
def test_the_first_bucket_knows_nothing_of_the_order_of_use(rank):
    """
    In the first iteration parameters lie in the bucket in the order of registration, even where they are used in another
    order; from the second on in the order their gradients became ready in.
    """
    ddp = rank.wrap(Scalars(*"abcd"))
    buckets = rank.buckets(ddp)
    for _ in range(4):
        ddp(rank.batch(1), use=("c", "a", "d", "b")).sum().backward()
    rank.show("buckets", buckets)
    rank.law("the first: as registered", buckets[0], "0 1 2 3")
    rank.law("later ones: what was used last is ready first", buckets[1:], ["1 3 0 2"] * 3)


@case(
    "first_iteration.one_collective",
    level=OBSERVED,
    source=UNLIMITED,
    each={"default": {}, "static_graph": {"static_graph": True}, "find_unused": {"find_unused_parameters": True}},
    catalogue=("U04",),
    reports=("pytorch/pytorch#72843",),
)
def test_how_many_collectives_the_first_backward_starts(rank, options):
    """
    The first backward starts one collective for each bucket, and one more where DDP keeps track of which parameters are used.

    With `static_graph` the one more is started in the first backward only.
    """
    ddp = rank.wrap(three_layers(), bucket_cap_mb=1, **options)
    started = []
    for _ in range(4):
        loss = ddp(rank.batch(512)).sum()
        before = rank.collectives()
        loss.backward()
        started.append(rank.collectives() - before)
    rank.show("started", started)
    wanted = 5 if "find_unused_parameters" in options else 2 if options else 1
    rank.law("one a bucket, and one for what is used", started[0], wanted)
