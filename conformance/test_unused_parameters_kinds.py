"""Unused parameters of two dtypes: with views, with a communication hook, in buckets of their own."""

import torch
from ddp_conformance import MUST, case
from ddp_conformance.models import Scalars
from ddp_conformance.rank import mean_all_reduce
from torch import nn

USERS = {"both": (0, 1), "second": (1,), "first": (0,), "none": ()}


def averaging(state, bucket):
    return mean_all_reduce(bucket)


@case(
    "unused_parameters.kinds",
    level=MUST,
    source="nn/parallel/distributed.py: param.grad field is not touched",
    each={
        "default": ({}, False),
        "view": ({"gradient_as_bucket_view": True}, False),
        "small_buckets": ({"bucket_cap_mb": 2.0**-20}, False),
        "hook": ({}, True),
    },
    catalogue=("E04", "E05", "B04"),
)
def test_who_used_what_is_told_apart_in_every_dtype(rank, setting):
    """In single and in double precision, in one bucket or in several, with a communication hook or without, a parameter that some rank used gets its mean on all of them, and one that none used keeps None."""
    options, hook = setting
    model = Scalars(*(f"{users}_{dtype}" for dtype in ("single", "double") for users in USERS))
    for users in USERS:
        setattr(model, f"{users}_double", nn.Parameter(torch.ones(1, dtype=torch.float64)))
    ddp = rank.wrap(model, find_unused_parameters=True, **options)
    if hook:
        ddp.register_comm_hook(None, averaging)
    own = tuple(name for name in model.names if rank.index in USERS[name.split("_")[0]])
    for _ in range(3):
        model.zero_grad(set_to_none=True)
        ddp(rank.batch(1), use=own).backward()
        expected = {}
        for name in model.names:
            ranks = USERS[name.split("_")[0]]
            mean = sum(rank.batch(1, of=r)[0] for r in ranks) / rank.world_size if ranks else None
            expected[name] = mean.double() if ranks and name.endswith("double") else mean
        rank.law("a mean or None", {name: getattr(model, name).grad for name in model.names}, expected)
