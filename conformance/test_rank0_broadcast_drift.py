"""Replicas that start equal stay equal, and nothing repairs those that do not."""

import torch
from ddp_conformance import HAZARD, MUST, case
from ddp_conformance.models import linear

DOCUMENTED = "DistributedDataParallel"
LOADED = "pytorch/pytorch#34076", "pytorch/pytorch#36613"


@case("rank0_broadcast.replicas_stay_equal", level=MUST, source=DOCUMENTED, world=(1, 2, 3), catalogue=("A02", "B01"))
def test_replicas_that_start_equal_stay_equal_over_optimizer_steps(rank):
    """Ranks that walked in with different weights follow, bit for bit, one process that starts at rank 0's and sees all data.

    The loss is half the square of weight times input, the optimizer SGD with momentum 1/2 and learning rate 1/64.
    """
    model = linear(1, dtype=torch.float64, start=1.0 + rank.index)
    ddp = rank.wrap(model)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=1 / 64, momentum=0.5)
    weight, velocity = 1.0, 0.0  # the single process
    for step in range(4):
        optimizer.zero_grad(set_to_none=True)
        (ddp(rank.batch(1, dtype=torch.float64)).square().sum() / 2).backward()
        optimizer.step()
        inputs = [rank.world_size * (r + 1) for r in range(rank.world_size)]
        velocity = velocity / 2 + sum(x * x * weight for x in inputs) / rank.world_size
        weight -= velocity / 64
        expected = rank.tensor(weight, dtype=torch.float64).reshape(1, 1)
        rank.law(f"the weight after step {step + 1} is the single process's", model.weight, expected)
    rank.show("weight", model.weight)


def follow_drift(rank, ddp, model, starts):
    """Four SGD steps of replicas that start at `starts`: one mean gradient for all, so that their distance never changes."""
    optimizer = torch.optim.SGD(ddp.parameters(), lr=1 / 64)
    weights = list(starts)
    for step in range(4):
        optimizer.zero_grad(set_to_none=True)
        (ddp(rank.batch(1, dtype=torch.float64)).square().sum() / 2).backward()
        mean = sum((rank.world_size * (r + 1)) ** 2 * weight for r, weight in enumerate(weights)) / rank.world_size
        weights = [weight - mean / 64 for weight in weights]
        optimizer.step()
        expected = rank.tensor(mean, dtype=torch.float64).reshape(1, 1)
        rank.law(
            f"the gradient of step {step + 1} is the mean of gradients at different weights",
            model.weight.grad,
            expected,
        )
        expected = rank.tensor(weights[rank.index], dtype=torch.float64).reshape(1, 1)
        rank.law(f"after step {step + 1} the replica is still as far off as it began", model.weight, expected)
    rank.show("weight", model.weight)


@case(
    "rank0_broadcast.drift_without_init_sync",
    level=HAZARD,
    source=DOCUMENTED,
    world=(2, 3),
    needs=("init_sync",),
    catalogue=("A06",),
    reports=("pytorch/pytorch#142824",),
)
def test_replicas_that_start_apart_never_meet(rank):
    """Averaged gradients keep replicas together only if they started together: with init_sync=False and different weights they stay apart for ever.

    Every rank gets the same gradient, the mean of gradients taken at different weights, so each keeps its distance
    to the others and none follows the training of any single model.
    """
    model = linear(1, dtype=torch.float64, start=1.0 + rank.index)
    ddp = rank.wrap(model, init_sync=False)
    follow_drift(rank, ddp, model, [1.0 + r for r in range(rank.world_size)])


@case("rank0_broadcast.drift_after_change", level=HAZARD, source=DOCUMENTED, world=(2, 3), reports=LOADED)
def test_a_replica_changed_after_wrapping_is_never_repaired(rank):
    """A checkpoint loaded on rank 0 alone after wrapping is never sent to the others: the replicas train apart without an error.

    Load it before wrapping, or on every rank.
    """
    model = linear(1, dtype=torch.float64)
    ddp = rank.wrap(model)
    if rank.index == 0:
        model.load_state_dict({"weight": torch.full((1, 1), 9.0, dtype=torch.float64)})
    follow_drift(rank, ddp, model, [9.0] + [1.0] * (rank.world_size - 1))
