"""What a forward before no_sync leaves behind."""

from ddp_conformance import HAZARD, case
from ddp_conformance.models import linear


@case(
    "no_sync_limits.after_a_forward_alone",
    level=HAZARD,
    source="DistributedDataParallel.no_sync",
    needs=("no_sync",),
    each={"default": {}, "find_unused": {"find_unused_parameters": True}},
    catalogue=("C01", "B10"),
)
def test_a_forward_that_no_backward_followed_is_made_up_for_inside_no_sync(rank, options):
    """
    After a synced forward that no backward followed, as where a batch was skipped, the next backward inside no_sync is reduced: the gradient is the mean, and local only from the one after it on.

    The forward has told the reducer to expect gradients, and one inside no_sync does not tell it otherwise.
    """
    model = linear(2)
    ddp = rank.wrap(model, **options)
    mean = rank.mean(lambda r: rank.batch(2, of=r))
    for _ in range(2):
        ddp(rank.batch(2)).sum().backward()
    for _ in range(2):
        model.zero_grad(set_to_none=True)
        ddp(rank.batch(2))
        with ddp.no_sync():
            ddp(rank.batch(2)).sum().backward()
            rank.law("inside no_sync it is the mean", model.weight.grad, mean)
            ddp(rank.batch(2)).sum().backward()
        rank.law("and then the rank's own is added", model.weight.grad, mean + rank.batch(2))
