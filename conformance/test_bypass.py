"""Calling the module inside DDP, or one of its methods, trains each rank alone, without an error."""

from ddp_conformance import HAZARD, OBSERVED, case
from ddp_conformance.models import Scalars, linear

SOURCE = "include/torch/csrc/distributed/c10d/reducer.hpp: a call to this function can simply be omitted."


def expected(rank):
    """The rank's own gradient and the mean."""
    return rank.batch(1), rank.mean(lambda r: rank.batch(1, of=r))


@case(
    "bypass.inner_module",
    level=HAZARD,
    source=SOURCE,
    world=(2, 3),
    catalogue=("B13",),
    torch_tests=(
        "test/distributed/test_c10d_nccl.py::DistributedDataParallelTest::test_accumulate_gradients_module",
        "test/distributed/test_c10d_nccl.py::DistributedDataParallelTest::test_accumulate_gradients_module_with_grad_is_view",
    ),
    reports=(
        "pytorch/pytorch#21736",
        "kohya-ss/sd-scripts#924",
        "kohya-ss/sd-scripts#989",
        "Lightning-AI/pytorch-lightning#16856",
        "k2-fsa/icefall#226",
        "bytetriper/RAE#40",
    ),
)
def test_a_forward_of_the_inner_module_is_never_reduced(rank):
    """A forward that calls `ddp.module` and not `ddp` is not reduced, and the next one through `ddp` reduces what has accumulated."""
    model = linear(1)
    ddp = rank.wrap(model)
    own, mean = expected(rank)
    for _ in range(4):
        model.zero_grad(set_to_none=True)
        ddp.module(own).sum().backward()
        rank.law("through the inner module the gradient is local", model.weight.grad, own)
        ddp(own).sum().backward()
        rank.law("through DDP the accumulated gradient is reduced", model.weight.grad, 2 * mean)
    rank.show("gradient", model.weight.grad)


class TwoWays(Scalars):
    def loss(self, x):
        return self(x)


@case(
    "bypass.other_method",
    level=HAZARD,
    source=SOURCE,
    catalogue=("B13",),
    reports=("bytetriper/RAE#40", "taesungp/swapping-autoencoder-pytorch#22", "Lightning-AI/pytorch-lightning#17424"),
)
def test_other_methods_of_the_module_bypass_ddp(rank):
    """Only calling the DDP object arms a reduction: a loss that another method of the module computes trains each rank alone."""
    model = TwoWays("a")
    ddp = rank.wrap(model)
    own, _ = expected(rank)
    for _ in range(4):
        model.zero_grad(set_to_none=True)
        ddp.module.loss(own).backward()
        rank.law("the gradient is local", model.a.grad, own.flatten())
    rank.law("DDP hands on no method of the module", hasattr(ddp, "loss"), False)
    rank.show("gradient", model.a.grad)


@case(
    "bypass.after_an_ignored_forward",
    level=HAZARD,
    source=SOURCE,
    world=(2, 3),
    catalogue=("B13",),
    reports=("k2-fsa/icefall#226",),
)
def test_an_ignored_forward_arms_the_reduction_of_a_bypass(rank):
    """A bypass is reduced after all when an output of `ddp` was ignored before it: whether it is depends on earlier calls."""
    model = linear(1)
    ddp = rank.wrap(model)
    own, mean = expected(rank)
    ddp(own)
    ddp.module(own).sum().backward()
    rank.law("the first bypass is reduced", model.weight.grad, mean)
    ddp.module(own).sum().backward()
    rank.law("the second is not", model.weight.grad, mean + own)
    rank.show("gradient", model.weight.grad)


@case("bypass.no_collective", level=OBSERVED, source=SOURCE, catalogue=("B13",))
def test_a_bypass_starts_no_collective(rank):
    """Forward and backward of the inner module start no collective, so one rank may evaluate or train alone."""
    model = linear(1)
    ddp = rank.wrap(model)
    own, mean = expected(rank)
    ddp(own).sum().backward()
    before = rank.collectives()
    if rank.index == 1:
        ddp.module(own).sum().backward()
    rank.law("no collective was started", rank.collectives() - before, 0)
    rank.law("only the rank that did has more", model.weight.grad, mean + own if rank.index == 1 else mean)
