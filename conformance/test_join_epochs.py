"""join() epoch after epoch, inside no_sync, and what its end does about parameters that are frozen or none of DDP's business."""

from ddp_conformance import MUST, case
from ddp_conformance.models import Scalars, linear
from torch import nn
from torch.nn.parallel import DistributedDataParallel

JOIN = "DistributedDataParallel.join"


@case("join.every_epoch", level=MUST, source=JOIN, needs=("join",), catalogue=("K01", "K02", "K04"))
def test_every_epoch_joins_by_itself(rank):
    """join() may be entered in every epoch: each time the divisor is the one it was given, ranks that ran out contribute zero, and all end with the last joiner's model."""
    model = linear(1)
    ddp = rank.wrap(model)
    for epoch, initial in enumerate((False, True, True)):
        with ddp.join(divide_by_initial_world_size=initial):
            for _ in range(rank.index + 1):
                model.zero_grad(set_to_none=True)
                ddp(rank.batch(1)).sum().backward()
            nn.init.constant_(model.weight, 10 * epoch + rank.index)
        if rank.index == 1:
            rank.law("its own, divided", model.weight.grad, rank.batch(1) / (2 if initial else 1))
        rank.law("the last joiner's model", model.weight.data[0], rank.tensor(10 * epoch + 1))


@case(
    "join.throws_inside_no_sync",
    level=MUST,
    source=JOIN,
    needs=("join", "no_sync"),
    catalogue=("K03", "K07"),
)
def test_early_termination_throws_inside_no_sync_too(rank):
    """With throw_on_early_termination=True every rank raises when the first one runs out of inputs, inside no_sync as well."""
    model = linear(1)
    ddp = rank.wrap(model)
    steps = 0
    with (
        rank.raises("refusal", RuntimeError, match=r"Rank \d exhausted all inputs|Throwing across all ranks"),
        ddp.join(throw_on_early_termination=True),
        ddp.no_sync(),
    ):
        for _ in range(2 if rank.index == 1 else 4):
            ddp(rank.batch(1)).sum().backward()
            steps += 1
    rank.law("each did what the shortest could", steps, 2)
    rank.law("its gradients are its own", model.weight.grad, 2 * rank.batch(1))


@case("join.ends_with_frozen_parameters", level=MUST, source=JOIN, needs=("join",), catalogue=("K04",))
def test_the_end_brings_frozen_parameters(rank):
    """When all ranks have joined, frozen parameters are the last joiner's as well."""
    model = Scalars("trained", "frozen")
    model.frozen.requires_grad_(False)
    ddp = rank.wrap(model)
    with ddp.join():
        for _ in range(rank.index + 1):
            ddp(rank.batch(1)).backward()
        nn.init.constant_(model.trained, 5 + rank.index)
        nn.init.constant_(model.frozen, 7 + rank.index)
    rank.law("the trained one is the last joiner's", model.trained.data, rank.tensor(6))
    rank.law("the frozen one is the last joiner's", model.frozen.data, rank.tensor(8))


@case(
    "join.ends_without_ignored_parameters",
    level=MUST,
    source="DistributedDataParallel._set_params_and_buffers_to_ignore_for_model",
    needs=("join", "_set_params_and_buffers_to_ignore_for_model"),
    catalogue=("K04", "L01"),
)
def test_the_end_leaves_ignored_parameters_alone(rank):
    """When all ranks have joined, ignored parameters stay the rank's own."""
    model = nn.Sequential(linear(1), linear(1))
    trained, ignored = model.parameters()
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["1.weight"])
    ddp = rank.wrap(model)
    with ddp.join():
        for _ in range(rank.index + 1):
            ddp(rank.batch(1)).sum().backward()
        nn.init.constant_(trained, 5 + rank.index)
        nn.init.constant_(ignored, 7 + rank.index)
    rank.law("the trained one is the last joiner's", trained.data[0], rank.tensor(6))
    rank.law("the ignored one is the rank's own", ignored.data[0], rank.tensor(7 + rank.index))
