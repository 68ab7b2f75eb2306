"""How find_unused_parameters=True finds what is unused: it walks the graph from the outputs, in every forward, and may be deceived."""

import os
import tempfile
from contextlib import contextmanager

import torch
import torch.distributed as dist
from ddp_conformance import HAZARD, MUST, OBSERVED, case
from ddp_conformance.models import Opaque, Scalars, TwoHeads
from ddp_conformance.subject import NotOffered
from torch import nn

WALK = "torch.distributed.ddp.reducer::search_unused_parameters"
"""The profiler range around the walk of the autograd graph."""
FORWARD = "DistributedDataParallel.forward"
TWICE = "Expected to mark a variable ready only once"
ERROR = "include/torch/csrc/distributed/c10d/reducer.hpp: Raises appropriate error if mark_variable_ready is called on the same"
SEARCH = "include/torch/csrc/distributed/c10d/reducer.hpp: search unused parameters before backward starts"
SKIP = ("skip_all_reduce_unused_params",)


class Hiding(nn.Module):
    """Two scalar parameters; the forward returns `a*x` in a `Opaque`."""

    def __init__(self):
        super().__init__()
        self.a = nn.Parameter(torch.ones(1))
        self.b = nn.Parameter(torch.ones(1))

    def forward(self, x):
        return Opaque(self.a * x)


@contextmanager
def warnings_on_stderr():
    """How often C++ writes the warning about a needless flag to file descriptor 2 inside; Python's `warnings` do not see it."""
    found = []
    with tempfile.TemporaryFile() as file:
        before = os.dup(2)
        os.dup2(file.fileno(), 2)
        try:
            yield found
        finally:
            os.dup2(before, 2)
            os.close(before)
            file.seek(0)
            found.append(file.read().count(b"did not find any unused parameters"))


@case(
    "unused_search.walks_every_iteration",
    level=MUST,
    source="DistributedDataParallel",
    world=1,
    catalogue=("E03", "U26"),
    each={
        "default": ({}, 0),
        "find_unused": ({"find_unused_parameters": True}, 1),
        "static_graph": ({"static_graph": True}, 0),
        "both": ({"static_graph": True, "find_unused_parameters": True}, 0),
    },
)
def test_the_graph_is_walked_in_every_forward_with_the_flag_alone(rank, setting):
    """The autograd graph is walked in every iteration with find_unused_parameters=True, and never without it or with static_graph=True.

    Counted by the profiler's range around the walk, over four iterations. A DDP whose forward has no range of torch's
    name is not torch's, and has no range around its walk either.
    """
    options, walks = setting
    ddp = rank.wrap(Scalars("a", "b"), **options)
    with torch.autograd.profiler.profile() as profile:
        for _ in range(4):
            ddp(rank.batch(1)).backward()
    counts = [sum(event.name == name for event in profile.function_events) for name in (FORWARD, WALK)]
    if counts == [0, 0]:
        raise NotOffered(f"no {FORWARD} in the profiler's ranges")
    rank.law("forwards and walks", counts, [4, 4 * walks])


@case(
    "unused_search.parameter_outside_forward",
    level=MUST,
    source=ERROR,
    world=(1, 2),
    catalogue=("E08",),
    torch_tests=(
        "test_c10d_nccl.py::DistributedDataParallelTest::test_find_unused_parameters_kwarg_debug_detail",
        "test_c10d_nccl.py::DistributedDataParallelTest::test_find_unused_parameters_kwarg_debug_info",
        "test_c10d_nccl.py::DistributedDataParallelTest::test_find_unused_parameters_kwarg_debug_off",
    ),
)
def test_a_parameter_found_unused_must_not_get_a_gradient(rank):
    """With find_unused_parameters=True a parameter that is not found in the outputs' graph and gets a gradient all the same makes backward raise.

    Here the loss uses the parameter directly, beside the module's output.
    """
    model = Scalars("a", "b")
    ddp = rank.wrap(model, find_unused_parameters=True)
    loss = ddp(rank.batch(1), use="a") + model.b.sum()
    with rank.raises("backward", RuntimeError, match=TWICE):
        loss.backward()


@case(
    "unused_search.error_names_parameter",
    level=OBSERVED,
    source=ERROR,
    needs=("torch.distributed.set_debug_level",),
    world=1,
    catalogue=("E08",),
    each={"off": "OFF", "info": "INFO", "detail": "DETAIL"},
)
def test_the_error_names_the_parameter_marked_twice(rank, level):
    """The error about a parameter marked ready twice gives its index and, when the debug level is INFO or DETAIL, its name."""
    dist.set_debug_level(getattr(dist.DebugLevel, level))
    model = Scalars("a", "spare")
    ddp = rank.wrap(model, find_unused_parameters=True)
    loss = ddp(rank.batch(1), use="a") + model.spare.sum()
    message = ""
    try:
        loss.backward()
    except RuntimeError as error:
        message = str(error)
    rank.law("the index is given", "Parameter at index 1 " in message, True)
    if level == "OFF":
        rank.show("name_given_at_off", ".spare" in message)
    else:
        rank.law("the name is given", ".spare" in message, True)


@case(
    "unused_search.output_of_another_type",
    level=HAZARD,
    source="DistributedDataParallel",
    world=(1, 2),
    catalogue=("E07",),
)
def test_tensors_in_a_plain_object_are_not_found(rank):
    """With find_unused_parameters=True a forward that returns its tensors in a plain object makes backward raise, for every parameter counts as unused.

    The documentation's "from all tensors contained in the return value" is true of tensors in lists, tuples, dicts and
    dataclasses only. Without the flag the same module is reduced.
    """
    ddp = rank.wrap(Hiding(), find_unused_parameters=True)
    output = ddp(rank.batch(1))
    with rank.raises("backward", RuntimeError, match=TWICE):
        output.tensor.sum().backward()


@case(
    "unused_search.last_forward_counts",
    level=HAZARD,
    source=SEARCH,
    catalogue=("E08",),
    reports=("pytorch/pytorch#60844", "pytorch/pytorch#105723"),
)
def test_only_the_last_of_several_forwards_is_searched(rank):
    """With find_unused_parameters=True two forwards that use different parameters, followed by one backward, raise: only the last forward is searched."""
    ddp = rank.wrap(Scalars("a", "b"), find_unused_parameters=True)
    loss = ddp(rank.batch(1), use="a") + ddp(rank.batch(1), use="b")
    with rank.raises("backward", RuntimeError, match=TWICE):
        loss.backward()


@case(
    "unused_search.several_forwards",
    level=OBSERVED,
    source="include/torch/csrc/distributed/c10d/reducer.hpp: num_iterations_, for example in the case of multiple forward before",
    catalogue=("E03",),
    each={
        "default": ({}, ("a", "b")),
        "static_graph": ({"static_graph": True}, ("a", "b")),
        "find_unused_same_graph": ({"find_unused_parameters": True}, (("a", "b"), ("a", "b"))),
    },
    reports=("pytorch/pytorch#60844", "pytorch/pytorch#58111"),
)
def test_several_forwards_may_precede_one_backward(rank, setting):
    """Two forwards before one backward are reduced once and right: by default and with static_graph=True even if they use different parameters, with find_unused_parameters=True if both use the same."""
    options, uses = setting
    model = Scalars("a", "b")
    ddp = rank.wrap(model, **options)
    times = sum("a" in use for use in uses)
    for _ in range(4):
        model.zero_grad(set_to_none=True)
        sum(ddp(rank.batch(1), use=use) for use in uses).backward()
        mean = times * rank.mean(lambda r: rank.batch(1, of=r)[0])
        rank.law("each gradient is the mean of its sum", [model.a.grad, model.b.grad], [mean, mean.clone()])
    rank.show("gradients", [model.a.grad, model.b.grad])


@case(
    "unused_search.warns_once_when_needless",
    level=OBSERVED,
    source=SEARCH,
    catalogue=("E09",),
    each={
        "found_in_none": (("a", "b"),) * 3,
        "found_in_the_first": ("a", ("a", "b"), ("a", "b")),
        "found_in_all": ("a",) * 3,
    },
    reports=("Lightning-AI/pytorch-lightning#11003", "Lightning-AI/pytorch-lightning#19238"),
)
def test_a_forward_that_uses_everything_is_warned_about_once(rank, uses):
    """With find_unused_parameters=True the first forward in which nothing is found unused writes a warning to file descriptor 2, once in a process."""
    ddp = rank.wrap(Scalars("a", "b"), find_unused_parameters=True)
    seen = []
    for use in uses:
        with warnings_on_stderr() as found:
            ddp(rank.batch(1), use=use).backward()
        seen += found
    rank.show("warnings_by_iteration", seen)
    first = next((place for place, use in enumerate(uses) if len(use) == 2), None)
    rank.law("only the first forward that uses all", seen, [int(place == first) for place in range(3)])


@case(
    "unused_search.warning_is_premature",
    level=HAZARD,
    source=SEARCH,
    catalogue=("E09", "E06"),
    reports=("Lightning-AI/pytorch-lightning#11003", "speechbrain/speechbrain#713"),
)
def test_the_warning_does_not_know_the_loss(rank):
    """The warning that find_unused_parameters=True is needless comes though an output is left out of the loss and training would fail without the flag."""
    model = TwoHeads()
    ddp = rank.wrap(model, find_unused_parameters=True)
    with warnings_on_stderr() as found:
        ddp(rank.batch(1))[0].sum().backward()
    rank.law("the warning comes", found, [1])
    rank.law("and the flag was needed", model.b.grad, None)


@case(
    "unused_search.skipped_buckets",
    level=MUST,
    source="DistributedDataParallel",
    needs=SKIP,
    catalogue=("E10",),
    each={"without": False, "skip": True},
    torch_tests=("distributed_test.py::DistributedTest._DistTestBase::test_skip_all_reduce_unused_parameters",),
    reports=("pytorch/pytorch#42183",),
)
def test_a_bucket_of_unused_parameters_is_not_reduced(rank, skip):
    """With skip_all_reduce_unused_params=True a bucket of which no parameter is used is not reduced; without, it is. The values are the same."""
    model = Scalars("a", "b")
    ddp = rank.wrap(model, find_unused_parameters=True, bucket_cap_mb=1e-6, skip_all_reduce_unused_params=skip)
    carried = rank.buckets(ddp)
    for _ in range(4):
        carried.clear()
        model.zero_grad(set_to_none=True)
        ddp(rank.batch(1), use="a").backward()
        rank.law("buckets reduced", carried, ["0"] if skip else ["1", "0"])
        rank.law("the used gradient is the mean", model.a.grad, rank.mean(lambda r: rank.batch(1, of=r)[0]))
        rank.law("the unused gradient is None", model.b.grad, None)
    rank.show("num_buckets_reduced", rank.log(ddp, "num_buckets_reduced"))


@case(
    "unused_search.skipping_needs_equal_sets",
    level=HAZARD,
    source="DistributedDataParallel",
    needs=SKIP,
    catalogue=("E10",),
    reports=("pytorch/pytorch#42183",),
)
def test_ranks_that_skip_different_buckets_mix_them_up(rank):
    """With skip_all_reduce_unused_params=True, where rank 0 uses one parameter and rank 1 another, each in its own bucket, the two buckets are reduced with one another and no error is raised."""
    model = Scalars("a", "b")
    ddp = rank.wrap(model, find_unused_parameters=True, bucket_cap_mb=1e-6, skip_all_reduce_unused_params=True)
    mine = "b" if rank.index else "a"
    ddp(rank.batch(1), use=mine).backward()
    mean = rank.mean(lambda r: rank.batch(1, of=r)[0])
    rank.show("gradients", [model.a.grad, model.b.grad])
    rank.law("a mean of two different parameters", getattr(model, mine).grad, mean)
