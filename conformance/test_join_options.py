"""join() beside other options of DDP, its arguments in their order, and its end: several modules, ignored buffers, after a throw."""

import torch
import torch.distributed as dist
from ddp_conformance import MUST, case
from ddp_conformance.models import Scalars, WithBuffers, linear
from torch import nn
from torch.nn.parallel import DistributedDataParallel

JOIN = "DistributedDataParallel.join"
OPTIONS = {
    "view": {"gradient_as_bucket_view": True},
    "find_unused": {"find_unused_parameters": True},
    "static_graph": {"static_graph": True},
    "tiny_buckets": {"bucket_cap_mb": 1e-6},
}


@case("join.divisor_with_options", level=MUST, source=JOIN, world=3, each=OPTIONS, needs=("join",), catalogue=("K02",))
def test_the_remaining_world_divides_whatever_the_options(rank, options):
    """With divide_by_initial_world_size=False the divisor is the number of ranks that still have inputs, whatever the other options of DDP."""
    model = Scalars("a", "b")
    ddp = rank.wrap(model, **options)
    with ddp.join(divide_by_initial_world_size=False):
        for step in range(rank.index + 2):  # two, three and four inputs
            model.zero_grad(set_to_none=True)
            ddp(rank.batch(1)).backward()
            expected = rank.active_sum(step, lambda r: r + 2) / (3, 3, 2, 1)[step]
            rank.law("the sum over active ranks, divided", [model.a.grad, model.b.grad], [expected, expected.clone()])


@case("join.positional_arguments", level=MUST, source=JOIN, needs=("join",), catalogue=("K02", "K03", "K05"))
def test_arguments_come_in_the_documented_order(rank):
    """The arguments of join() are, in this order, divide_by_initial_world_size, enable and throw_on_early_termination."""
    model = linear(1)
    ddp = rank.wrap(model)
    with ddp.join(True, False):
        nn.init.constant_(model.weight, rank.index + 5)
    rank.law("switched off, each keeps its model", model.weight.data[0], rank.tensor(rank.index + 5))
    with ddp.join(False):
        for _ in range(rank.index + 1):
            model.zero_grad(set_to_none=True)
            ddp(rank.batch(1)).sum().backward()
    if rank.index == 1:
        rank.law("undivided, for it is alone", model.weight.grad, rank.batch(1))
    steps = 0
    with (
        rank.raises("refusal", RuntimeError, match=r"Rank \d exhausted all inputs|Throwing across all ranks"),
        ddp.join(True, True, True),
    ):
        for _ in range(rank.index + 1):
            ddp(rank.batch(1)).sum().backward()
            steps += 1
    rank.law("thrown when the first one runs out", steps, 1)


@case(
    "join.ends_with_every_module",
    level=MUST,
    source="distributed.algorithms.join.Join",
    world=3,
    needs=("join", "torch.distributed.algorithms.join.Join"),
    catalogue=("K04",),
)
def test_the_end_brings_the_last_joiners_model_of_every_module(rank):
    """When all ranks have joined a context of several modules, all of these are the last joiner's."""
    models = [linear(1), linear(1), linear(1)]
    wrapped = [rank.wrap(model) for model in models]
    with dist.algorithms.join.Join(wrapped):
        for _ in range(3 if rank.index == 1 else 1):
            for ddp in wrapped:
                ddp(rank.batch(1)).sum().backward()
        for number, model in enumerate(models):
            nn.init.constant_(model.weight, 10 * number + rank.index)
    for number, model in enumerate(models):
        rank.law(f"module {number} is the last joiner's", model.weight.data[0], rank.tensor(10 * number + 1))


@case(
    "join.ends_without_ignored_buffers",
    level=MUST,
    source="DistributedDataParallel._set_params_and_buffers_to_ignore_for_model",
    needs=("join", "_set_params_and_buffers_to_ignore_for_model"),
    catalogue=("K04", "L01"),
)
def test_the_end_leaves_ignored_buffers_alone(rank):
    """When all ranks have joined, ignored buffers stay the rank's own, and others are the last joiner's."""
    model = nn.Sequential(WithBuffers(kept=torch.zeros(1), left=torch.zeros(1)))
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["0.left"])
    ddp = rank.wrap(model)
    with ddp.join():
        for _ in range(rank.index + 1):
            ddp(rank.batch(1)).backward()
        model[0].kept.fill_(5 + rank.index)
        model[0].left.fill_(7 + rank.index)
    rank.law("the buffer is the last joiner's", model[0].kept, rank.tensor(6))
    rank.law("the ignored one is the rank's own", model[0].left, rank.tensor(7 + rank.index))


@case(
    "join.goes_on_after_a_throw",
    level=MUST,
    source=JOIN,
    needs=("join",),
    catalogue=("K03", "K09"),
)
def test_training_goes_on_after_a_throw(rank):
    """After join() has thrown and the exception was caught, gradients are means as before: in a plain loop, and in the next join(), which throws again."""
    model = linear(1)
    ddp = rank.wrap(model)
    mean = rank.mean(lambda r: rank.batch(1, of=r))
    for epoch in range(2):
        steps = 0
        with (
            rank.raises(
                f"epoch_{epoch}", RuntimeError, match=r"Rank \d exhausted all inputs|Throwing across all ranks"
            ),
            ddp.join(throw_on_early_termination=True),
        ):
            for _ in range(rank.index + 2):
                loss = ddp(rank.batch(1)).sum()
                model.zero_grad(set_to_none=True)
                loss.backward()
                steps += 1
        rank.law("each did what the shortest could", steps, 2)
        rank.law("the mean in join()", model.weight.grad, mean)
        for _ in range(2):
            model.zero_grad(set_to_none=True)
            ddp(rank.batch(1)).sum().backward()
            rank.law("the mean in a plain loop", model.weight.grad, mean)
