"""A gradient that is missing for the first time after many complete iterations is noticed as one in the first."""

from ddp_conformance import MUST, case
from ddp_conformance.models import Scalars


@case(
    "missing_gradient.in_any_iteration",
    level=MUST,
    source="include/torch/csrc/distributed/c10d/reducer.hpp: Asserts that the reduction for the previous iteration",
    each={"third": 2, "twelfth": 11},
    catalogue=("E01",),
    reports=("pytorch/pytorch#22049",),
)
def test_a_gradient_missing_late_is_noticed(rank, complete):
    """After any number of complete iterations a missing gradient makes the next forward raise on every rank."""
    model = Scalars("a", "b")
    ddp = rank.wrap(model)
    for _ in range(complete):
        model.zero_grad(set_to_none=True)
        ddp(rank.batch(1)).backward()
        rank.law("a complete iteration", model.b.grad, rank.mean(lambda r: rank.batch(1, of=r))[0])
    ddp(rank.batch(1), use="a").backward()
    with rank.raises(
        "the_next_forward", RuntimeError, match="Expected to have finished reduction in the prior iteration"
    ):
        ddp(rank.batch(1), use="a")
