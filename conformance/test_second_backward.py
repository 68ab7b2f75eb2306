"""One forward arms one reduction: a second backward before the next forward stays on its rank, without an error."""

import torch
from ddp_conformance import HAZARD, OBSERVED, case
from ddp_conformance.models import Scalars, linear

FLAGS = {
    "default": {},
    "find_unused": {"find_unused_parameters": True},
    "static_graph": {"static_graph": True},
    "both": {"find_unused_parameters": True, "static_graph": True},
}
SOURCE = "include/torch/csrc/distributed/c10d/reducer.hpp: expect_autograd_hooks_"


def steps(rank, model):
    """Four steps with the gradient cleared before each; yields the rank's own gradient and the mean."""
    for _ in range(4):
        model.zero_grad(set_to_none=True)
        yield rank.batch(1), rank.mean(lambda r: rank.batch(1, of=r))


@case(
    "second_backward.retained_graph",
    level=HAZARD,
    source=SOURCE,
    world=3,
    each=FLAGS,
    catalogue=("U10",),
    reports=("pytorch/pytorch#47260",),
)
def test_the_second_backward_of_one_forward_stays_local(rank, options):
    """Of two backwards through one forward only the first is reduced: the gradient is the mean plus the rank's own, without an error.

    The right answer is twice the mean. Replicas drift apart from here on.
    """
    model = linear(1)
    ddp = rank.wrap(model, **options)
    for own, mean in steps(rank, model):
        loss = ddp(own).sum()
        loss.backward(retain_graph=True)
        rank.law("the first backward is reduced", model.weight.grad, mean)
        loss.backward()
        rank.law("the second adds the rank's own gradient", model.weight.grad, mean + own)
    rank.show("gradient", model.weight.grad)


@case(
    "second_backward.two_forwards",
    level=HAZARD,
    source=SOURCE,
    world=3,
    each={name: FLAGS[name] for name in ("default", "find_unused", "static_graph")},
    catalogue=("U10",),
    reports=("pytorch/pytorch#47260",),
)
def test_two_forwards_and_then_two_backwards_reduce_once(rank, options):
    """After two forwards the first backward is reduced and the second stays local, without an error."""
    model = linear(1)
    ddp = rank.wrap(model, **options)
    for own, mean in steps(rank, model):
        first, second = ddp(own).sum(), ddp(3 * own).sum()
        first.backward()
        rank.law("the first backward is reduced", model.weight.grad, mean)
        second.backward()
        rank.law("the second adds the rank's own gradient", model.weight.grad, mean + 3 * own)
    rank.show("gradient", model.weight.grad)


@case("second_backward.next_forward_arms", level=OBSERVED, source=SOURCE, world=(2, 3), catalogue=("U10",))
def test_the_next_forward_arms_the_reduction_again(rank):
    """What a second backward left local is reduced in with the next step, for gradients are averaged as accumulated."""
    model = linear(1)
    ddp = rank.wrap(model)
    for own, mean in steps(rank, model):
        loss = ddp(own).sum()
        loss.backward(retain_graph=True)
        loss.backward()
        ddp(own).sum().backward()
        rank.law("the accumulated gradient is reduced", model.weight.grad, 3 * mean)
    rank.show("gradient", model.weight.grad)


class Heads(Scalars):
    """Two outputs: the sum of a * x, and that of b * x."""

    def forward(self, x):
        return super().forward(x, use="a"), super().forward(x, use="b")


@case("second_backward.two_outputs", level=OBSERVED, source=SOURCE, world=(2, 3), catalogue=("U11",))
def test_the_backward_of_the_last_output_reduces_both(rank):
    """With two outputs and a backward for each, the first leaves its gradient local and the second reduces both."""
    model = Heads("a", "b")
    ddp = rank.wrap(model)
    for own, mean in steps(rank, model):
        one, two = ddp(own)
        one.backward()
        rank.law("after the first backward its gradient is local", model.a.grad, own.flatten())
        rank.law("and the other has none", model.b.grad, None)
        two.backward()
        rank.law("after the second both are the mean", [model.a.grad, model.b.grad], [mean.flatten()] * 2)
    rank.show("gradients", [model.a.grad, model.b.grad])


@case(
    "second_backward.two_outputs_joined",
    level=OBSERVED,
    source="nn/parallel/distributed.py: class _DDPSink(Function):",
    each={name: FLAGS[name] for name in ("find_unused", "static_graph")},
    catalogue=("U11",),
)
def test_two_outputs_are_joined_where_ddp_looks_at_the_graph(rank, options):
    """With find_unused_parameters or static_graph all outputs share one node of the graph: a backward for each is refused."""
    model = Heads("a", "b")
    ddp = rank.wrap(model, **options)
    one, two = ddp(rank.batch(1))
    one.backward()
    with rank.raises("second_backward", RuntimeError, match="Trying to backward through the graph a second time"):
        two.backward()


@case(
    "second_backward.summed_outputs",
    level=OBSERVED,
    source="DistributedDataParallel",
    world=3,
    each={name: FLAGS[name] for name in ("default", "find_unused", "static_graph")},
    catalogue=("B14",),
    torch_tests=(
        "torch/testing/_internal/distributed/distributed_test.py::DistributedTest._DistTestBase::test_static_graph_multi_forward",
    ),
    reports=("pytorch/pytorch#60844", "pytorch/pytorch#105723", "pytorch/pytorch#58111"),
)
def test_several_forwards_may_feed_one_backward(rank, options):
    """Several forwards whose losses are added up before one backward are reduced as one, under every flag.

    Each uses all parameters. It is the remedy for two backwards that the others of this family show.
    """
    model = linear(1)
    ddp = rank.wrap(model, **options)
    for own, mean in steps(rank, model):
        (ddp(own).sum() + ddp(3 * own).sum() + ddp(own).sum()).backward()
        rank.law("the gradient is the mean of the sum", model.weight.grad, 5 * mean)
    rank.show("gradient", model.weight.grad)


@case(
    "second_backward.disjoint_forwards",
    level=OBSERVED,
    source="DistributedDataParallel",
    each={name: FLAGS[name] for name in ("default", "static_graph")},
    reports=("pytorch/pytorch#60844", "pytorch/pytorch#105723", "lucidrains/linformer-pytorch#23"),
)
def test_forwards_of_disjoint_parts_may_feed_one_backward(rank, options):
    """Two forwards that use different parameters and feed one backward are reduced, by default and with static_graph."""
    model = Scalars("a", "b")
    ddp = rank.wrap(model, **options)
    for own, mean in steps(rank, model):
        (ddp(own, use="a") + ddp(own, use="b")).backward()
        rank.law("both are the mean", [model.a.grad, model.b.grad], [mean.flatten()] * 2)
    rank.show("gradients", [model.a.grad, model.b.grad])


@case(
    "second_backward.disjoint_with_find_unused",
    level=HAZARD,
    source="DistributedDataParallel",
    reports=("pytorch/pytorch#60844", "pytorch/pytorch#105723", "lucidrains/linformer-pytorch#23"),
)
def test_find_unused_parameters_looks_at_the_last_forward_only(rank):
    """With find_unused_parameters the parameters of all but the last forward are taken for unused, and backward raises."""
    model = Scalars("a", "b")
    ddp = rank.wrap(model, find_unused_parameters=True)
    loss = ddp(rank.batch(1), use="a") + ddp(rank.batch(1), use="b")
    with rank.raises("backward", RuntimeError, match="Expected to mark a variable ready only once"):
        loss.backward()


@case(
    "second_backward.forward_ignored",
    level=OBSERVED,
    source="include/torch/csrc/distributed/c10d/reducer.hpp: a call to this function can simply be omitted.",
    each={name: FLAGS[name] for name in ("default", "find_unused")},
    catalogue=("B10",),
    torch_tests=(
        "test/distributed/test_c10d_gloo.py::DistributedDataParallelTest::test_ignored_output",
        "test/distributed/test_c10d_gloo.py::DistributedDataParallelTest::test_ignored_output_with_unused_parameters",
    ),
)
def test_outputs_may_be_ignored(rank, options):
    """Forwards without a backward leave nothing behind: the next forward and backward are reduced as ever."""
    model = Scalars("a", "b")
    ddp = rank.wrap(model, **options)
    for own, mean in steps(rank, model):
        for _ in range(3):
            ddp(5 * own)
        ddp(own).backward()
        rank.law("the gradient is the mean", [model.a.grad, model.b.grad], [mean.flatten()] * 2)
    rank.show("gradients", [model.a.grad, model.b.grad])


@case("second_backward.no_collective", level=OBSERVED, source=SOURCE, catalogue=("U10",))
def test_the_second_backward_starts_no_collective(rank):
    """The second backward of a forward starts no collective at all, so no other rank has to take part."""
    model = linear(1)
    ddp = rank.wrap(model)
    loss = ddp(rank.batch(1)).sum()
    before = rank.collectives()
    loss.backward(retain_graph=True)
    first = rank.collectives()
    if rank.index == 0:
        loss.backward()  # rank 1 does not
    rank.law("the first starts one, the second none", [first - before, rank.collectives() - first], [1, 0])
    mean = rank.mean(lambda r: rank.batch(1, of=r))
    expected = mean + rank.batch(1) if rank.index == 0 else mean
    rank.law("only the rank that went back twice has more", model.weight.grad, torch.clone(expected))
