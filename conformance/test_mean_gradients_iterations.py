"""Every iteration that is synchronized gives the mean: in any mode, after whatever happened between, however long it goes on."""

import torch
from ddp_conformance import MUST, OBSERVED, case
from ddp_conformance.models import linear


def mean(rank):
    return rank.mean(lambda r: rank.batch(2, of=r))


@case(
    "mean_gradients.eval_mode",
    level=MUST,
    source="DistributedDataParallel",
    each={"wrapper": False, "module": True},
    catalogue=("B01",),
)
def test_backward_is_reduced_in_eval_mode(rank, of_module):
    """In eval mode, as where a BatchNorm is frozen, backward is reduced as in training mode, be the mode set on the wrapper or on the module."""
    model = linear(2)
    ddp = rank.wrap(model)
    (model if of_module else ddp).eval()
    for _ in range(3):
        model.zero_grad()
        ddp(rank.batch(2)).sum().backward()
        rank.law("the mean", model.weight.grad, mean(rank))


@case(
    "mean_gradients.after_evaluation",
    level=MUST,
    source="DistributedDataParallel",
    each={"default": {}, "static_graph": {"static_graph": True}, "find_unused": {"find_unused_parameters": True}},
    catalogue=("B01",),
)
def test_an_evaluation_between_steps_changes_nothing(rank, options):
    """After a forward under no_grad, before the first step or between steps, the next step is reduced as ever."""
    model = linear(2)
    ddp = rank.wrap(model, **options)
    for _ in range(4):
        with torch.no_grad():
            ddp(rank.batch(2))
        model.zero_grad()
        ddp(rank.batch(2)).sum().backward()
        rank.law("the mean", model.weight.grad, mean(rank))


@case(
    "mean_gradients.after_an_error",
    level=OBSERVED,
    source="nn/parallel/distributed.py: self.reducer.prepare_for_forward()",
    catalogue=("B01",),
)
def test_a_forward_that_raised_changes_nothing(rank):
    """After a forward that raised on every rank, as for a bad batch, the next step is reduced as ever."""
    model = linear(2)
    ddp = rank.wrap(model)
    for batch in ("first_batch", "second_batch"):
        with rank.raises(batch, RuntimeError, match="shapes cannot be multiplied"):
            ddp(rank.batch(3))
        model.zero_grad()
        ddp(rank.batch(2)).sum().backward()
        rank.law("the mean", model.weight.grad, mean(rank))


@case("mean_gradients.every_iteration", level=MUST, source="DistributedDataParallel", catalogue=("B01",))
def test_every_iteration_is_reduced(rank):
    """Every iteration is reduced, each of the first 102.

    DDP notes runtime data in each of the first ten and in every hundredth.
    """
    model = linear(2)
    ddp = rank.wrap(model)
    wrong = []
    for iteration in range(102):
        model.zero_grad()
        ddp(rank.batch(2)).sum().backward()
        if not torch.equal(model.weight.grad, mean(rank)):
            wrong.append(iteration)
    rank.law("iterations whose gradient is not the mean", wrong, [])
