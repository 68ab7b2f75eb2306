"""Training in DDP goes where one process would go on the concatenated batch: a learning rate survives the move."""

import torch
from ddp_conformance import MUST, case

STEPS, ROWS, RATE = 4, 2, 1 / 32
"""SGD steps, rows that each rank is fed in each, and a learning rate that is a power of two."""

START = ((1.0, -1.0), 2.0)
"""Weights and bias that a rank begins with; tests/test_trajectory_exactness.py shows that all that follows is exact."""


def batch(step, rank):
    """Rows (x, x, y) that a rank is fed in a step: small integers, different for every step, rank and row."""
    return [
        ((step + rank + row) % 3 - 1, (step + 2 * rank + row) % 4 - 1, (3 * step + 5 * rank + row) % 7 - 3)
        for row in range(ROWS)
    ]


def tensors(rank, step, ranks):
    """The batches of these ranks, concatenated: inputs (rows, 2) and targets (rows, 1)."""
    rows = torch.tensor([row for r in ranks for row in batch(step, r)], dtype=torch.float64, device=rank.device)
    return rows[:, :2], rows[:, 2:]


def regression(scale=1.0):
    """A Linear(2, 1) with bias in float64 that begins at START, or a multiple of it."""
    model = torch.nn.Linear(2, 1, dtype=torch.float64)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([START[0]]) * scale)
        model.bias.fill_(START[1] * scale)
    return model


def squares(model, inputs, targets):
    """The mean of the squared errors: its gradient depends on the weights, so stale weights show."""
    return torch.nn.functional.mse_loss(model(inputs), targets)


def summed_squares(model, inputs, targets):
    return torch.nn.functional.mse_loss(model(inputs), targets, reduction="sum")


def weights(model):
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def follow(rank, ddp, model, one, momentum=0.0, loss=squares, whole_loss=squares):
    """Train both, `one` on the batches of all ranks, and state after every step that they hold the same bits."""
    one.to(rank.device)
    optimizers = [torch.optim.SGD(m.parameters(), lr=RATE, momentum=momentum) for m in (ddp, one)]
    start = weights(one)
    for step in range(STEPS):
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss(ddp, *tensors(rank, step, [rank.index])).backward()
        whole_loss(one, *tensors(rank, step, range(rank.world_size))).backward()
        for optimizer in optimizers:
            optimizer.step()
        rank.law(f"after step {step} the weights are those of one process", weights(model), weights(one))
    rank.show("weights", weights(model))
    rank.differs("the weights have moved", weights(model), start)


@case(
    "trajectory.one_process",
    level=MUST,
    source="DistributedDataParallel",
    world=(1, 2, 4),
    each={"plain": 0.0, "momentum": 0.5},
    catalogue=("B01", "B02"),
    reports=("pytorch/pytorch#60118",),
)
def test_four_steps_equal_one_process_on_the_concatenated_batch(rank, momentum):
    """Four SGD steps with a mean loss equal, bit for bit, four steps of one process on the concatenated batch."""
    model = regression()
    follow(rank, rank.wrap(model), model, regression(), momentum)


@case("trajectory.three_ranks", level=MUST, source="DistributedDataParallel", world=3, catalogue=("B01", "B02"))
def test_three_ranks_equal_one_process_too(rank):
    """Three ranks go where one process goes on the concatenated batch, bit for bit where a third of each gradient is exact.

    One third is no binary fraction, so each loss is three times a mean: on three ranks of two rows three times the mean of
    two, in one process three times the mean of six, which is half the sum.
    """

    def thrice(model, inputs, targets):
        return squares(model, inputs, targets) * rank.world_size

    def thrice_the_whole(model, inputs, targets):
        return summed_squares(model, inputs, targets) / ROWS

    model = regression()
    follow(rank, rank.wrap(model), model, regression(), loss=thrice, whole_loss=thrice_the_whole)


@case(
    "trajectory.different_start", level=MUST, source="DistributedDataParallel", world=(2, 4), catalogue=("A02", "B01")
)
def test_ranks_that_begin_apart_follow_rank_0(rank):
    """Ranks that build different weights follow the one process that begins with rank 0's."""
    model = regression(scale=1.0 + rank.index)
    follow(rank, rank.wrap(model), model, regression())


@case(
    "trajectory.options",
    level=MUST,
    source="DistributedDataParallel",
    each={
        "find_unused": {"find_unused_parameters": True},
        "static_graph": {"static_graph": True},
        "view": {"gradient_as_bucket_view": True},
        "small_buckets": {"bucket_cap_mb": 1e-6},
        "no_buffers": {"broadcast_buffers": False},
    },
    catalogue=("B01",),
)
def test_options_change_how_and_not_where(rank, options):
    """Options about buckets, views, buffers and the graph change how gradients are reduced, never where training goes."""
    model = regression()
    follow(rank, rank.wrap(model, **options), model, regression())


@case("trajectory.summed_loss", level=MUST, source="DistributedDataParallel", world=(2, 4), catalogue=("B02",))
def test_a_summed_loss_needs_the_learning_rate_times_world_size(rank):
    """With a summed loss the trajectory is that of one process whose summed loss is divided by the world size.

    So a learning rate tuned on one process with a summed loss does not survive the move, and one with a mean loss does.
    """

    def divided(model, inputs, targets):
        return summed_squares(model, inputs, targets) / rank.world_size

    model = regression()
    follow(rank, rank.wrap(model), model, regression(), loss=summed_squares, whole_loss=divided)
