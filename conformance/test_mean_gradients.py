"""After backward every rank's gradient is the mean over ranks of the gradients that each would have alone."""

from ddp_conformance import MUST, case
from ddp_conformance.models import linear


@case("mean_gradients.mean", level=MUST, source="DistributedDataParallel", world=(1, 2, 3, 4), catalogue=("B01",))
def test_gradients_are_the_mean_over_ranks(rank):
    """Alone a rank gets its own gradient; inside DDP every rank gets the mean over the ranks."""
    alone = linear(3).to(rank.device)
    own = rank.batch(3)  # a row of W*(r+1) on rank r of W, and the gradient of a summed Linear is its input
    alone(own).sum().backward()
    rank.show("alone", alone.weight.grad)
    rank.law("alone a rank gets its own gradient", alone.weight.grad, own)

    model = linear(3)
    ddp = rank.wrap(model)
    ddp(own).sum().backward()
    rank.show("in_ddp", model.weight.grad)
    rank.law("inside DDP a rank gets the mean", model.weight.grad, rank.mean(lambda r: rank.batch(3, of=r)))
