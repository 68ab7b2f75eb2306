"""Parameters and buffers that a module declares as none of DDP's business: not broadcast, not compared, not reduced."""

import torch
from ddp_conformance import HAZARD, MUST, OBSERVED, case
from ddp_conformance.models import linear
from torch import nn
from torch.nn.parallel import DistributedDataParallel

DOCUMENTED = "DistributedDataParallel._set_params_and_buffers_to_ignore_for_model"
IGNORES = ("_set_params_and_buffers_to_ignore_for_model",)
IGNORE_TESTS = (
    "distributed_test.py::DistributedTest._DistTestBase::test_ddp_ignore_params_arg",
    "distributed_test.py::DistributedTest._DistTestBase::test_ddp_model_diff_shape_across_ranks_ignore_params",
)
SHARDED_TESTS = ("test_c10d_gloo.py::DistributedDataParallelTest::test_ignored_sharded_tensor",)


class Layer(nn.Module):
    """A scalar weight and a scalar buffer of equal value; the forward adds them, each times the input, and counts the buffer up."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((1,), value))
        self.register_buffer("offset", torch.full((1,), value))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = self.offset.clone()
        return ((self.weight + self.offset) * x).sum()


class Pair(nn.Module):
    """A layer that DDP keeps and one that it leaves alone, both with the rank's own values."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.kept = Layer(value)
        self.left = Layer(value)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.kept(x) + self.left(x)


def ignore(model: nn.Module, *names: str) -> nn.Module:
    """The model, with these names declared as none of DDP's business."""
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, list(names))
    return model


def half_ignored(rank) -> Pair:
    return ignore(Pair(1.0 + rank.index), "left.weight", "left.offset")


@case(
    "ignored.not_broadcast",
    level=MUST,
    source=DOCUMENTED,
    needs=IGNORES,
    world=(2, 3),
    catalogue=("L01",),
    torch_tests=IGNORE_TESTS,
)
def test_an_ignored_parameter_is_not_broadcast(rank):
    """An ignored parameter keeps the rank's own values through construction, while its neighbours take rank 0's."""
    model = half_ignored(rank)
    rank.wrap(model)
    rank.law("the ignored parameter is the rank's own", model.left.weight, rank.tensor(1.0 + rank.index))
    rank.law("the other is rank 0's", model.kept.weight, rank.tensor(1.0))
    rank.show("ignored", model.left.weight)


@case(
    "ignored.not_reduced",
    level=MUST,
    source=DOCUMENTED,
    needs=IGNORES,
    world=(2, 3),
    catalogue=("L01",),
    torch_tests=IGNORE_TESTS,
)
def test_an_ignored_parameter_is_not_reduced(rank):
    """An ignored parameter keeps the rank's own gradient in every iteration, while its neighbours get the mean."""
    model = half_ignored(rank)
    ddp = rank.wrap(model)
    for step in range(4):
        ddp.zero_grad(set_to_none=True)
        ddp(rank.batch(1)).backward()
        rank.law(
            f"the ignored gradient of iteration {step} is the rank's own", model.left.weight.grad, rank.batch(1)[0]
        )
        mean = rank.mean(lambda r: rank.batch(1, of=r))[0]
        rank.law(f"the other of iteration {step} is the mean", model.kept.weight.grad, mean)


@case(
    "ignored.not_compared",
    level=MUST,
    source=DOCUMENTED,
    needs=IGNORES,
    group_timeout=1,
    catalogue=("L01",),
    torch_tests=IGNORE_TESTS,
)
def test_an_ignored_parameter_may_differ_in_shape_or_be_missing(rank):
    """Ignored parameters are not compared: their shapes may differ between ranks, and a rank may have more of them than others."""
    model = Pair(1.0 + rank.index)
    model.left = nn.Linear(1, 2 + rank.index, bias=rank.index == 1)
    ignore(model, "left.weight", "left.bias")
    refusal = None
    try:
        rank.wrap(model)
    except RuntimeError as error:
        refusal = str(error)
    rank.law("the constructor accepts it", refusal, None)
    rank.law("the ignored shape is the rank's own", tuple(model.left.weight.shape), (2 + rank.index, 1))
    rank.law("what is not ignored is rank 0's", model.kept.weight, rank.tensor(1.0))


@case("ignored.buffers", level=MUST, source=DOCUMENTED, needs=IGNORES, catalogue=("L01",))
def test_an_ignored_buffer_is_never_broadcast(rank):
    """An ignored buffer keeps the rank's own values at construction and at every forward, while its neighbour takes rank 0's each time."""
    model = half_ignored(rank)
    ddp = rank.wrap(model)
    rank.law("construction leaves it alone", model.left.offset, rank.tensor(1.0 + rank.index))
    rank.law("construction broadcasts the other", model.kept.offset, rank.tensor(1.0))
    for step in range(4):
        own = 10.0 * (step + 1) + rank.index
        model.kept.offset.fill_(own)
        model.left.offset.fill_(own)
        ddp(rank.batch(1)).backward()
        rank.law(f"forward {step + 1} sees the rank's own", model.left.seen, rank.tensor(own))
        rank.law(f"forward {step + 1} sees rank 0's of the other", model.kept.seen, rank.tensor(10.0 * (step + 1)))


@case(
    "ignored.other_device",
    level=OBSERVED,
    source=DOCUMENTED,
    needs=IGNORES,
    catalogue=("A14", "L01"),
    torch_tests=SHARDED_TESTS,
)
def test_an_ignored_parameter_may_lie_anywhere(rank):
    """An ignored parameter may lie on another type of device, here meta, where any other would make the module refused."""
    model = Pair(1.0 + rank.index).to(rank.device)
    model.left = linear(1).to("meta")
    ignore(model, "left.weight")
    rank.wrap(model, stay=True)
    rank.law("it stays where it is", model.left.weight.device.type, "meta")
    rank.law("what is not ignored is rank 0's", model.kept.weight, rank.tensor(1.0))


@case("ignored.nothing_left", level=OBSERVED, source=DOCUMENTED, needs=IGNORES, catalogue=("A10", "L01"))
def test_a_module_whose_parameters_are_all_ignored_is_refused(rank):
    """A module whose trainable parameters are all ignored is refused, as one that has none."""
    model = ignore(Pair(1.0), "kept.weight", "left.weight")
    with rank.raises("nothing_to_train", RuntimeError, match="doesn't have any parameter that requires a gradient"):
        rank.wrap(model)


class Root(nn.Module):
    """A parameter of the module itself, which has no module name before it, and one of a submodule."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.top = nn.Parameter(torch.full((1,), value))
        self.inner = Layer(value)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.top * x).sum() + self.inner(x)


def behaviour(rank, *names: str) -> tuple[bool, bool]:
    """Whether `top` of a model that ignores these names is broadcast at construction, and whether its gradient is reduced."""
    model = ignore(Root(1.0 + rank.index), *names)
    ddp = rank.wrap(model)
    broadcast = model.top.detach().clone()
    ddp(rank.batch(1)).backward()
    own, mean = rank.batch(1)[0], rank.mean(lambda r: rank.batch(1, of=r))[0]
    if rank.index:
        rank.law("it holds rank 0's value or its own", broadcast.item() in (1.0, 1.0 + rank.index), True)
    rank.law("its gradient is the mean or its own", model.top.grad.item() in (own.item(), mean.item()), True)
    return bool(broadcast == 1.0), bool(model.top.grad == mean)


@case("ignored.root_parameter_by_name", level=HAZARD, source=DOCUMENTED, needs=IGNORES, catalogue=("L02",))
def test_a_parameter_of_the_module_itself_ignored_by_its_name_is_still_reduced(rank):
    """A parameter of the wrapped module itself, ignored by its name, "top", is left out of the broadcast but reduced all the same.

    The false sentence is that what is named is ignored: the reducer looks for ".top", an empty module name and a dot.
    """
    broadcast, reduced = behaviour(rank, "top")
    if rank.index:
        rank.law("it is not broadcast", broadcast, False)
    rank.law("it is reduced", reduced, True)


@case("ignored.root_parameter_by_formula", level=HAZARD, source=DOCUMENTED, needs=IGNORES, catalogue=("L02",))
def test_a_parameter_of_the_module_itself_ignored_by_the_documented_formula_is_still_broadcast(rank):
    """A parameter of the wrapped module itself, ignored as the documented formula has it, ".top", is not reduced but broadcast all the same.

    The formula "{module_name}.{param_name}" with the module name of the root, which is empty. The broadcast goes by
    `named_parameters()`, where there is no leading dot.
    """
    broadcast, reduced = behaviour(rank, ".top")
    rank.law("it is broadcast", broadcast, True)
    rank.law("it is not reduced", reduced, False)


@case("ignored.root_parameter_by_both", level=OBSERVED, source=DOCUMENTED, needs=IGNORES, catalogue=("L02",))
def test_both_spellings_together_ignore_a_parameter_of_the_module_itself(rank):
    """Both spellings together, "top" and ".top", ignore a parameter of the wrapped module itself for good."""
    broadcast, reduced = behaviour(rank, "top", ".top")
    if rank.index:
        rank.law("it is not broadcast", broadcast, False)
    rank.law("it is not reduced", reduced, False)


@case("ignored.unknown_name", level=HAZARD, source=DOCUMENTED, needs=IGNORES, catalogue=("L02",))
def test_a_name_that_matches_nothing_is_accepted(rank):
    """A name that matches nothing, a misspelt one, is accepted in silence, and the parameter that was meant is broadcast and reduced."""
    model = ignore(Pair(1.0 + rank.index), "left.wieght")
    ddp = rank.wrap(model)
    rank.law("it is broadcast", model.left.weight, rank.tensor(1.0))
    ddp(rank.batch(1)).backward()
    rank.law("it is reduced", model.left.weight.grad, rank.mean(lambda r: rank.batch(1, of=r))[0])


@case("ignored.too_late", level=OBSERVED, source=DOCUMENTED, needs=IGNORES, catalogue=("L01",))
def test_names_declared_after_wrapping_come_too_late(rank):
    """Names are read by the constructor: a parameter that is declared ignored after wrapping is reduced as before."""
    model = Pair(1.0 + rank.index)
    ddp = rank.wrap(model)
    ignore(model, "left.weight")
    for step in range(4):
        ddp.zero_grad(set_to_none=True)
        ddp(rank.batch(1)).backward()
        mean = rank.mean(lambda r: rank.batch(1, of=r))[0]
        rank.law(f"it is reduced in iteration {step}", model.left.weight.grad, mean)


@case(
    "ignored.data_parallel_params",
    level=MUST,
    source="DistributedDataParallel._get_data_parallel_params",
    needs=(*IGNORES, "_get_data_parallel_params"),
    catalogue=("L03",),
    torch_tests=("distributed_test.py::DistributedTest._DistTestBase::test_get_data_parallel_params",),
)
def test_the_parameters_that_ddp_manages_are_those_not_ignored(rank):
    """The parameters that DDP says it manages are those that are not ignored."""
    model = half_ignored(rank)
    ddp = rank.wrap(model)
    managed = [id(parameter) for parameter in ddp._get_data_parallel_params(model)]
    rank.law("they are those not ignored", managed, [id(model.kept.weight)])


@case(
    "ignored.named_params",
    level=HAZARD,
    source="DistributedDataParallel._get_data_parallel_params",
    needs=(*IGNORES, "_get_data_parallel_params"),
    catalogue=("L03",),
    torch_tests=("distributed_test.py::DistributedTest._DistTestBase::test_get_data_parallel_params",),
)
def test_asked_for_with_their_names_all_parameters_count_as_managed(rank):
    """Asked for with their names, the parameters that DDP says it manages include the ignored ones.

    The false sentence is that the generator yields the parameters that DDP manages: with named_params=True it looks
    for the mark of an ignored parameter on a pair of name and parameter, where it never is.
    """
    model = half_ignored(rank)
    ddp = rank.wrap(model)
    named = ddp._get_data_parallel_params(model, named_params=True)
    rank.law("ignored ones are among them", [name for name, _ in named], ["kept.weight", "left.weight"])


@case(
    "ignored.not_cast",
    level=MUST,
    source=DOCUMENTED,
    needs=(*IGNORES, "device:cuda", "mixed_precision"),
    lanes=("*:cuda",),
    catalogue=("L01", "O03"),
)
def test_an_ignored_parameter_is_not_cast(rank):
    """Under mixed precision an ignored parameter keeps its dtype in the forward, while its neighbours are cast."""
    from torch.nn.parallel.distributed import _MixedPrecision

    model = half_ignored(rank)
    ddp = rank.wrap(model, mixed_precision=_MixedPrecision(param_dtype=torch.float16))
    dtypes = {}
    for name in ("kept", "left"):
        layer = getattr(model, name)
        layer.register_forward_hook(lambda layer, *_, name=name: dtypes.__setitem__(name, layer.weight.dtype))
    ddp(rank.batch(1))
    rank.law("the ignored one is as it was", dtypes["left"], torch.float32)
    rank.law("the other is cast", dtypes["kept"], torch.float16)
