"""Gradients that arrive in one bucket in another order on each rank."""

from ddp_conformance import OBSERVED, case
from ddp_conformance.models import Scalars


@case(
    "firing.arrival_in_one_bucket",
    level=OBSERVED,
    source="include/torch/csrc/distributed/c10d/reducer.hpp: struct VariableLocator",
    each={
        "default": {},
        "view": {"gradient_as_bucket_view": True},
        "find_unused": {"find_unused_parameters": True},
        "static_graph": {"static_graph": True},
    },
    world=3,
    catalogue=("B09", "B01"),
    reports=("deepspeedai/DeepSpeed#2343",),
)
def test_gradients_in_a_bucket_meet_by_parameter(rank, options):
    """Gradients that share a bucket meet by parameter, whatever the order in which they become ready on each rank and in each step."""
    model = Scalars(*"abcd")
    numbers = dict(zip("abcd", (1, 4, 9, 16), strict=True))
    model.forward = lambda x, order: sum((getattr(model, name) * x * numbers[name]).sum() for name in order)
    ddp = rank.wrap(model, **options)
    mean = rank.mean(lambda r: rank.batch(1, of=r)[0])
    for step in range(6):
        model.zero_grad(set_to_none=True)
        at = step * (rank.index + 1) % 4
        ddp(rank.batch(1), "abcd"[at:] + "abcd"[:at]).backward()
        for name, number in numbers.items():
            rank.law("each parameter's mean", getattr(model, name).grad, number * mean)
