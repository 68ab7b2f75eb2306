"""What a static graph's first iteration does otherwise, and what a copy of the wrapper has of it."""

import copy
import inspect
import io

import torch
from ddp_conformance import OBSERVED, case
from ddp_conformance.models import Scalars
from torch import nn

SINK = "nn/parallel/distributed.py: # Enqueue delay allreduce for static graph training on the first"
WHOLE = {"weights_only": False} if "weights_only" in inspect.signature(torch.load).parameters else {}
COPIED = ("pytorch/pytorch#112277",)


class TwoTypes(nn.Module):
    """A float32 and a float64 scalar parameter, which no bucket holds together."""

    def __init__(self):
        super().__init__()
        self.narrow = nn.Parameter(torch.ones(1))
        self.wide = nn.Parameter(torch.ones(1, dtype=torch.float64))

    def forward(self, x):
        return (self.narrow * x).sum() + (self.wide * x).sum()


@case(
    "static_graph.rebuilds_with_find_unused",
    level=OBSERVED,
    source="include/torch/csrc/distributed/c10d/reducer.hpp: buckets once after the first iteration and never rebuild them if",
    catalogue=("F08",),
    each={"static_graph": True, "find_unused_alone": False},
    torch_tests=("distributed_test.py::DistributedTest._DistTestBase::test_different_graph_across_ranks",),
)
def test_buckets_are_rebuilt_even_with_find_unused_parameters(rank, static):
    """With static_graph=True buckets are rebuilt even if find_unused_parameters=True, which alone prevents it."""
    ddp = rank.wrap(Scalars("a", "b"), static_graph=static, find_unused_parameters=True)
    for _ in range(4):
        ddp(rank.batch(1), use="a").backward()
    rank.show("logged", rank.log(ddp, "has_rebuilt_buckets"))
    rank.law("rebuilt or not", bool(rank.log(ddp, "has_rebuilt_buckets")["has_rebuilt_buckets"] in (1, "1")), static)


@case(
    "static_graph.first_iteration_reduces_last",
    level=OBSERVED,
    source=SINK,
    world=(1, 2),
    catalogue=("U05",),
    each={"static_graph": True, "default": False},
)
def test_the_first_iteration_reduces_after_all_gradients(rank, static):
    """With static_graph=True the first iteration's all-reduces start after every gradient is computed; in the second, and without it also in the first, they start as buckets fill."""
    ddp = rank.wrap(TwoTypes(), static_graph=static)
    happened = rank.timeline(ddp)
    seen = []
    for _ in range(2):
        happened.clear()
        ddp(rank.batch(1)).backward()
        seen.append(" ".join(each[0] for each in happened))
    rank.law("gradients g and reductions R of the first iteration", seen[0], "g g R R" if static else "g R g R")
    if static:
        rank.law("and of the second, before buckets are rebuilt", seen[1], "g R g R")


@case("static_graph.hook_indices_in_first_iteration", level=OBSERVED, source=SINK, catalogue=("U05",))
def test_a_hook_cannot_tell_buckets_apart_in_the_first_iteration(rank):
    """With static_graph=True and several buckets a comm hook is told index 0 for every bucket of the first iteration, and of none that it is the last."""
    ddp = rank.wrap(TwoTypes(), static_graph=True)
    told = []

    def note(state, bucket):
        told.append((bucket.index(), bucket.is_last()))
        future = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    ddp.register_comm_hook(None, note)
    for iteration in range(4):
        told.clear()
        ddp(rank.batch(1)).backward()
        if iteration:
            rank.law("index and is_last are right from the second iteration on", told, [(0, False), (1, True)])
        else:
            rank.show("first_iteration", told)


def saved_and_loaded(ddp):
    """The DDP after a round trip through torch.save and torch.load."""
    file = io.BytesIO()
    torch.save(ddp, file)
    file.seek(0)
    return torch.load(file, **WHOLE)


@case(
    "static_graph.copy_made_later_is_reduced",
    level=OBSERVED,
    source="nn/parallel/distributed.py: def __setstate__(self, state):",
    catalogue=("U15",),
    each={"deepcopy": copy.deepcopy, "pickle": saved_and_loaded},
    reports=COPIED,
)
def test_a_copy_made_after_the_first_iteration_is_reduced(rank, copied):
    """A copy of a DDP with static_graph=True, made by deepcopy or pickle after the first iteration, reduces as the original does.

    Where it does not, nothing is raised: each rank trains alone from then on.
    """
    ddp = rank.wrap(Scalars("a"), static_graph=True)
    ddp(rank.batch(1)).backward()
    other = copied(ddp)
    for _ in range(4):
        other.zero_grad(set_to_none=True)
        other(rank.batch(1)).backward()
        rank.law("the copy's gradient is the mean", other.module.a.grad, rank.mean(lambda r: rank.batch(1, of=r)[0]))
    rank.show("gradient", other.module.a.grad)


@case(
    "static_graph.copy_before_training_is_reduced",
    level=OBSERVED,
    source="nn/parallel/distributed.py: def __setstate__(self, state):",
    catalogue=("U15",),
    reports=COPIED,
)
def test_a_copy_made_before_the_first_iteration_synchronizes(rank):
    """A copy of a DDP with static_graph=True, made before the first iteration, reduces as the original does."""
    other = copy.deepcopy(rank.wrap(Scalars("a"), static_graph=True))
    for _ in range(4):
        other.zero_grad(set_to_none=True)
        other(rank.batch(1)).backward()
        rank.law("the copy's gradient is the mean", other.module.a.grad, rank.mean(lambda r: rank.batch(1, of=r)[0]))
