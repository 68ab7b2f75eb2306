"""Rebuilt buckets where part of the model is frozen."""

from ddp_conformance import OBSERVED, case
from ddp_conformance.models import Scalars


@case(
    "rebuilt_buckets.frozen",
    level=OBSERVED,
    source="include/torch/csrc/distributed/c10d/reducer.hpp: rebuild_buckets",
    catalogue=("H05", "A03"),
)
def test_a_frozen_parameter_does_not_stop_the_rebuild(rank):
    """
    Where some parameters are frozen buckets are rebuilt all the same, in the order in which the gradients of the others became ready.

    Registered as a, b, c, d with b frozen; the forward uses them so that the gradients of the trained ones, 0, 1 and 2, are ready in another order than in reverse.
    """
    model = Scalars("a", "b", "c", "d")
    model.b.requires_grad = False
    ddp = rank.wrap(model, bucket_cap_mb=2.0**-20)
    carried = rank.buckets(ddp)
    ready = []
    trained = [model.a, model.c, model.d]
    for index, parameter in enumerate(trained):
        parameter.register_hook(lambda gradient, index=index: ready.append(str(index)))
    for _ in range(2):
        carried.clear()
        ready.clear()
        ddp(rank.batch(1), use=("d", "a", "b", "c")).backward()
    rank.differs("the order is not the reverse of registration", ready, ["2", "1", "0"])
    rank.law("buckets are in the order of readiness", " ".join(carried), " ".join(ready))
