"""Activation checkpointing inside DDP: which of its two forms works with which options, all 16 combinations."""

import torch
from ddp_conformance import HAZARD, MUST, case
from ddp_conformance.models import linear
from torch import nn
from torch.utils.checkpoint import checkpoint

DOCUMENTED = "DistributedDataParallel"
RATE = 1 / 4
"""Dyadic, so that four steps stay exact in float64: 21 bits after three of them, and a gradient multiplies two weights."""
REPORTS = ("pytorch/pytorch#24005", "pytorch/pytorch#109191", "pytorch/pytorch#69060", "huggingface/accelerate#389")
TORCH = "test_c10d_common.py::CommonDistributedDataParallelTest::"
TWICE = "Expected to mark a variable ready only once"


class Checkpointed(nn.Module):
    """
    Two linear layers of one weight each, the second one checkpointed, once or twice in a row; float64.

    For an input x the output is `second**times * first * x`. `leads=True` swaps the two, so that the checkpointed
    layer's gradients are the last of backward.
    """

    def __init__(self, times, use_reentrant, leads=False):
        super().__init__()
        self.plain = linear(1, 1, dtype=torch.float64)
        self.again = linear(1, 1, dtype=torch.float64)
        self.times = times
        self.use_reentrant = use_reentrant
        self.leads = leads

    def forward(self, x):
        if not self.leads:
            x = self.plain(x)
        for _ in range(self.times):
            x = checkpoint(self.again, x, use_reentrant=self.use_reentrant)
        return self.plain(x) if self.leads else x


def own(rank, of=None):
    """A single number, (r+1)*W/2 on rank r of W; it requires a gradient, as a reentrant checkpoint's input must."""
    return (rank.batch(1, of=of, dtype=torch.float64) / 2).requires_grad_()


def train_one(rank, model, ddp):
    """A backward of the output and a step; states that both gradients are the means that one process works out."""
    plain, again, times = model.plain.weight.item(), model.again.weight.item(), model.times
    mean = sum(own(rank, of=r).item() for r in range(rank.world_size)) / rank.world_size
    means = [again**times * mean, times * plain * again ** (times - 1) * mean]
    ddp(own(rank)).sum().backward()
    expected = [torch.tensor([[mean]], dtype=torch.float64, device=rank.device) for mean in means]
    rank.law("both gradients are means", [model.plain.weight.grad, model.again.weight.grad], expected)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= RATE * parameter.grad
    model.zero_grad(set_to_none=True)


@case(
    "checkpointing.without_reentry",
    level=MUST,
    source=DOCUMENTED,
    catalogue=("Q",),
    each={
        f"{'static' if static else 'dynamic'}_{'find_unused' if find else 'plain'}_{'twice' if times == 2 else 'once'}": (
            static,
            find,
            times,
        )
        for static in (False, True)
        for find in (False, True)
        for times in (1, 2)
    },
    torch_tests=(
        TORCH + "test_ddp_checkpointing_once",
        TORCH + "test_ddp_checkpointing_twice",
        TORCH + "test_ddp_checkpointing_unused_params",
    ),
    reports=REPORTS,
)
def test_a_checkpoint_without_reentry_works_with_every_option(rank, setting):
    """A layer checkpointed with use_reentrant=False, once or twice, gets the mean, whether static_graph or find_unused_parameters are set or not."""
    static, find, times = setting
    model = Checkpointed(times, use_reentrant=False)
    ddp = rank.wrap(model, static_graph=static, find_unused_parameters=find)
    for _ in range(4):
        train_one(rank, model, ddp)
    rank.show("weights", [model.plain.weight, model.again.weight])


@case(
    "checkpointing.with_reentry",
    level=MUST,
    source=DOCUMENTED,
    catalogue=("Q",),
    torch_tests=(TORCH + "test_ddp_checkpointing_once",),
    reports=REPORTS,
)
def test_a_reentrant_checkpoint_works_once_and_without_find_unused(rank):
    """A layer checkpointed once with use_reentrant=True gets the mean, with neither static_graph nor find_unused_parameters."""
    model = Checkpointed(1, use_reentrant=True)
    ddp = rank.wrap(model)
    for _ in range(4):
        train_one(rank, model, ddp)
    rank.show("weights", [model.plain.weight, model.again.weight])


@case(
    "checkpointing.reentrant_limits",
    level=MUST,
    source=DOCUMENTED,
    catalogue=("Q",),
    each={
        "dynamic_plain_twice": (False, 2),
        "dynamic_find_unused_once": (True, 1),
        "dynamic_find_unused_twice": (True, 2),
    },
    torch_tests=(
        TORCH + "test_ddp_checkpointing_twice",
        TORCH + "test_ddp_checkpointing_unused_params",
    ),
    reports=REPORTS,
)
def test_a_reentrant_checkpoint_is_refused_twice_or_with_find_unused(rank, setting):
    """Without static_graph a layer checkpointed with use_reentrant=True makes backward raise when it is checkpointed twice and other gradients are still to come, and whenever find_unused_parameters=True."""
    find, times = setting
    ddp = rank.wrap(Checkpointed(times, use_reentrant=True), find_unused_parameters=find)
    loss = ddp(own(rank)).sum()
    with rank.raises("backward", RuntimeError, match=TWICE):
        loss.backward()


@case(
    "checkpointing.with_reentry_and_static_graph",
    level=MUST,
    source=DOCUMENTED,
    catalogue=("Q", "F06"),
    each={
        "static_plain_once": (False, 1),
        "static_plain_twice": (False, 2),
        "static_find_unused_once": (True, 1),
        "static_find_unused_twice": (True, 2),
    },
    torch_tests=(
        TORCH + "test_ddp_checkpointing_once",
        TORCH + "test_ddp_checkpointing_twice_static_graph",
        TORCH + "test_ddp_checkpointing_unused_params",
    ),
    reports=REPORTS,
)
def test_a_reentrant_checkpoint_works_with_static_graph(rank, setting):
    """With static_graph=True a layer checkpointed with use_reentrant=True, once or twice, gets the mean, whether find_unused_parameters is set or not."""
    find, times = setting
    model = Checkpointed(times, use_reentrant=True)
    ddp = rank.wrap(model, static_graph=True, find_unused_parameters=find)
    for _ in range(4):
        train_one(rank, model, ddp)
    rank.show("weights", [model.plain.weight, model.again.weight])


@case(
    "checkpointing.unused_with_static_graph",
    level=MUST,
    source=DOCUMENTED,
    catalogue=("Q", "F06", "F01"),
    each={"reentrant": True, "not_reentrant": False},
    torch_tests=(TORCH + "test_ddp_checkpointing_unused_params",),
)
def test_a_checkpointed_model_may_have_an_unused_parameter(rank, use_reentrant):
    """With static_graph=True a model with checkpointed layers may have a parameter that is never used, whose gradient stays None."""
    model = Checkpointed(2, use_reentrant)
    model.unused = nn.Parameter(torch.ones(1))
    ddp = rank.wrap(model, static_graph=True)
    for _ in range(4):
        model.zero_grad(set_to_none=True)
        ddp(own(rank)).sum().backward()
        mean = rank.mean(lambda r: own(rank, of=r).detach())  # weights are 1, so each use of a layer adds its input
        rank.law("means", [model.plain.weight.grad, model.again.weight.grad], [mean, 2 * mean])
        rank.law("the unused gradient is None", model.unused.grad, None)


@case(
    "checkpointing.reentrant_twice_in_front",
    level=HAZARD,
    source=DOCUMENTED,
    catalogue=("Q",),
    reports=REPORTS,
)
def test_a_reentrant_checkpoint_twice_in_front_is_half_reduced(rank):
    """Where the layer checkpointed twice with use_reentrant=True comes first in the model nothing is raised: the gradient of its second use is reduced and the one of its first use is added afterwards, local.

    By then every other gradient is in, and the reduction ends within the inner backward of the second use.
    """
    model = Checkpointed(2, use_reentrant=True, leads=True)
    ddp = rank.wrap(model)
    for _ in range(4):
        model.zero_grad(set_to_none=True)
        ddp(own(rank)).sum().backward()
        mean = rank.mean(lambda r: own(rank, of=r).detach())  # weights are 1, so each use of a layer adds its input
        rank.law("the other layer gets the mean", model.plain.weight.grad, mean.clone())
        rank.law("a mean and a local gradient", model.again.weight.grad, mean + own(rank).detach())
