"""no_sync where a backward has several buckets: what accumulated is reduced in each of them."""

import torch
from ddp_conformance import MUST, case
from ddp_conformance.models import Scalars
from torch import nn


@case(
    "no_sync.several_buckets",
    level=MUST,
    source="nn/parallel/distributed.py: gradients will be accumulated on module variables",
    needs=("no_sync",),
    world=(2, 3),
    each={
        "default": {},
        "view": {"gradient_as_bucket_view": True},
        "find_unused": {"find_unused_parameters": True},
    },
    catalogue=("C01",),
)
def test_the_accumulated_sum_is_reduced_in_every_bucket(rank, options):
    """Where there are several buckets the synced backward reduces the accumulated sum in each of them, round after round."""
    model = Scalars("a", "b", "c", "d")
    model.b = nn.Parameter(torch.ones(1, dtype=torch.float64))  # a dtype has buckets of its own from the start
    ddp = rank.wrap(model, bucket_cap_mb=2.0**-20, **options)
    for _ in range(3):
        model.zero_grad(set_to_none=True)
        with ddp.no_sync():
            ddp(rank.batch(1)).backward()
        ddp(rank.batch(1)).backward()
        mean = 2 * rank.mean(lambda r: rank.batch(1, of=r)[0])
        for name in "abcd":
            parameter = getattr(model, name)
            rank.law("the mean of the accumulated sums", parameter.grad, mean.to(parameter.dtype))
