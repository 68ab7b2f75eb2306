"""Wrapping a module broadcasts the first rank's parameters and buffers, and nothing ever broadcasts parameters again."""

import torch
import torch.distributed as dist
from ddp_conformance import HAZARD, MUST, OBSERVED, case
from ddp_conformance.models import linear, numbered
from torch import nn

DOCUMENTED = "DistributedDataParallel"
LOADED = "pytorch/pytorch#34076", "pytorch/pytorch#36613"
HELPER = "distributed/utils.py: def _sync_module_states("


class Stateful(nn.Module):
    """One float parameter and buffers: float, integer, of a submodule, and one that is not saved in the state dict."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2))
        self.inner = nn.BatchNorm1d(1)
        self.register_buffer("running", torch.zeros(2))
        self.register_buffer("steps", torch.zeros(2, dtype=torch.int64))
        self.register_buffer("scratch", torch.zeros(2, dtype=torch.float64), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.weight * x).sum() + self.inner(x.reshape(-1, 1)).sum()


def walked_in(rank, make, of=0):
    """What rank `of` holds before wrapping: a module of its own, on this rank's device."""
    return numbered(make(), of).to(rank.device)


def two_layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))


@case(
    "rank0_broadcast.parameters",
    level=MUST,
    source=DOCUMENTED,
    world=(1, 2, 3),
    catalogue=("A02",),
    torch_tests=("distributed_test.py::DistributedTest._DistTestBase::test_ddp_sync_module_states",),
)
def test_every_rank_leaves_the_constructor_with_the_parameters_of_rank_0(rank):
    """Ranks that walk into the constructor with different parameters all walk out with rank 0's."""
    model = numbered(two_layers(), rank.index)
    rank.show("walked_in", model[0].bias)
    rank.wrap(model)
    rank.show("walked_out", model[0].bias)
    for (name, got), expected in zip(model.named_parameters(), walked_in(rank, two_layers).parameters(), strict=True):
        rank.law(f"{name} is what rank 0 walked in with", got, expected)


@case("rank0_broadcast.in_place", level=OBSERVED, source=HELPER)
def test_parameters_are_overwritten_in_place(rank):
    """Rank 0's values are written into the parameters that are there: the objects and their storage stay the same.

    So an optimizer that was built before wrapping holds the parameters that are trained.
    """
    model = numbered(two_layers(), rank.index)
    model.to(rank.device)
    before = [(id(parameter), parameter.data_ptr()) for parameter in model.parameters()]
    ddp = rank.wrap(model)
    after = [(id(parameter), parameter.data_ptr()) for parameter in model.parameters()]
    rank.law("every parameter is the same object at the same address", after, before)
    rank.law("the wrapper yields these parameters", [id(p) for p in ddp.parameters()], [i for i, _ in before])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    held = [parameter.detach() for parameter in optimizer.param_groups[0]["params"]]
    rank.law("an optimizer holds rank 0's values", held, list(walked_in(rank, two_layers).parameters()))


@case("rank0_broadcast.frozen_parameters", level=MUST, source=DOCUMENTED, catalogue=("A03",))
def test_frozen_parameters_are_broadcast_too(rank):
    """A frozen parameter (requires_grad=False) leaves the constructor with rank 0's values, like any other."""

    def half_frozen() -> nn.Sequential:
        model = two_layers()
        model[0].requires_grad_(False)
        return model

    model = numbered(half_frozen(), rank.index)
    rank.wrap(model)
    rank.show("frozen", model[0].bias)
    rank.law("a frozen weight is rank 0's", model[0].weight, walked_in(rank, half_frozen)[0].weight)
    rank.law("a frozen bias is rank 0's", model[0].bias, walked_in(rank, half_frozen)[0].bias)
    rank.law("it is still frozen", model[0].weight.requires_grad, False)


@case(
    "rank0_broadcast.buffers",
    level=MUST,
    source=DOCUMENTED,
    world=(2, 3),
    catalogue=("A05",),
    torch_tests=(
        "distributed_test.py::DistributedTest._DistTestBase::test_ddp_init_sync_buffers_with_forward_sync_buffers_false",
    ),
)
def test_buffers_of_every_kind_are_broadcast(rank):
    """Buffers leave the constructor with rank 0's values too: float and integer, nested, saved in the state dict or not."""
    model = numbered(Stateful(), rank.index)
    rank.wrap(model)
    expected = walked_in(rank, Stateful)
    for name, buffer in model.named_buffers():
        rank.law(f"buffer {name} is rank 0's", buffer, expected.get_buffer(name))
    rank.show("steps", model.steps)
    rank.show("scratch", model.scratch)


@case("rank0_broadcast.mixed_dtypes", level=MUST, source=DOCUMENTED, catalogue=("A02", "B04"))
def test_several_dtypes_in_one_module_arrive_bit_for_bit(rank):
    """Parameters of several dtypes in one module all arrive as rank 0 holds them, without a cast and in their own places."""
    dtypes = (torch.float32, torch.float16, torch.int64, torch.float64, torch.float32, torch.uint8, torch.int32)

    def mixed() -> nn.ParameterList:
        return nn.ParameterList(
            nn.Parameter(torch.zeros(2, dtype=dtype), requires_grad=dtype.is_floating_point) for dtype in dtypes
        )

    model = numbered(mixed(), rank.index)
    rank.wrap(model)
    for place, (got, expected) in enumerate(zip(model, walked_in(rank, mixed), strict=True)):
        rank.law(f"parameter {place} ({got.dtype}) is rank 0's", got, expected)
    rank.show("walked_out", list(model))


DTYPES = {
    "f64": torch.float64,
    "f16": torch.float16,
    "bf16": torch.bfloat16,
    "c64": torch.complex64,
    "i64": torch.int64,
    "i32": torch.int32,
    "i8": torch.int8,
    "u8": torch.uint8,
    "bool": torch.bool,
}


@case(
    "rank0_broadcast.buffer_dtypes",
    level=MUST,
    source=DOCUMENTED,
    each=DTYPES,
    catalogue=("A05",),
    reports=("pytorch/pytorch#158753",),
)
def test_a_buffer_of_any_dtype_is_broadcast(rank, dtype):
    """A buffer of any dtype, bool and complex among them, leaves the constructor with rank 0's values.

    On older releases the gloo backend refuses some dtypes, and with them the whole model.
    """
    values = torch.tensor([1, 0, 1] if rank.index == 0 else [0, 1, 1]).to(dtype)
    model = linear(1)
    model.register_buffer("values", values)
    rank.wrap(model)
    rank.law("the buffer is rank 0's", model.values, torch.tensor([1, 0, 1]).to(rank.device, dtype))


@case(
    "rank0_broadcast.int16_on_gloo",
    level=HAZARD,
    source=DOCUMENTED,
    lanes=("gloo:*",),
    catalogue=("A05",),
    reports=("pytorch/pytorch#2699",),
)
def test_an_int16_buffer_cannot_be_broadcast_by_gloo(rank):
    """On the gloo backend a module with an int16 buffer cannot be wrapped at all: gloo does not know the dtype.

    The false sentence is that buffers are broadcast: this one makes the constructor fail, on every rank.
    """
    model = linear(1)
    model.register_buffer("values", torch.full((2,), 1 + rank.index, dtype=torch.int16))
    try:
        rank.wrap(model)
    except RuntimeError as error:
        rank.show("int16", str(error)[:19])
    else:
        rank.law("where it is broadcast it is rank 0's", model.values, torch.ones_like(model.values))


@case("rank0_broadcast.strided", level=MUST, source=DOCUMENTED, reports=("pytorch/pytorch#79043",))
def test_parameters_with_other_strides_arrive_in_their_places(rank):
    """A parameter in channels_last arrives element by element where rank 0 has it, and keeps its strides."""

    def channels_last() -> nn.Module:
        return nn.Conv2d(2, 2, (1, 3), bias=False).to(memory_format=torch.channels_last)

    model = numbered(channels_last(), rank.index)
    strides = model.weight.stride()
    rank.wrap(model)
    rank.law("every element is rank 0's", model.weight, walked_in(rank, channels_last).weight)
    rank.law("the strides stay", model.weight.stride(), strides)
    rank.show("strides", list(strides))


@case(
    "rank0_broadcast.zero_size",
    level=OBSERVED,
    source=DOCUMENTED,
    catalogue=("A24",),
    torch_tests=("distributed_test.py::DistributedTest._DistTestBase::test_ddp_zero_output_features",),
    reports=("pytorch/pytorch#87280", "pytorch/pytorch#87793"),
)
def test_a_parameter_without_elements_disturbs_nothing(rank):
    """A parameter without elements is accepted, and its neighbours arrive and train as if it were not there."""

    def with_empty() -> nn.ParameterList:
        return nn.ParameterList(nn.Parameter(torch.zeros(size)) for size in (2, 0, 3))

    model = numbered(with_empty(), rank.index)
    ddp = rank.wrap(nn.Sequential(Sums(model)))
    for got, expected in zip(model, walked_in(rank, with_empty), strict=True):
        rank.law(f"the parameter with {got.numel()} elements is rank 0's", got, expected)
    for step in range(4):
        ddp.zero_grad(set_to_none=True)
        ddp(rank.batch(1)).backward()
        mean = rank.mean(lambda r: rank.batch(1, of=r))[0]
        rank.law(f"gradients are means in iteration {step}", model[2].grad, mean.expand(3).clone())
        rank.law(f"the empty gradient is empty in iteration {step}", model[1].grad, model[1].detach().clone())


class Sums(nn.Module):
    """x times the sum of all elements of all parameters."""

    def __init__(self, parameters: nn.ParameterList) -> None:
        super().__init__()
        self.all = parameters

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return sum((parameter.sum() * x).sum() for parameter in self.all)


@case("rank0_broadcast.shared_parameter", level=OBSERVED, source=DOCUMENTED, catalogue=("A22",))
def test_a_shared_parameter_stays_shared(rank):
    """A parameter that two submodules share is still shared after wrapping, and holds rank 0's values."""

    def tied() -> nn.Sequential:
        model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
        model[1].weight = model[0].weight
        return model

    model = numbered(tied(), rank.index)
    rank.wrap(model)
    rank.law("both names are one parameter", model[0].weight is model[1].weight, True)
    rank.law("it is rank 0's", model[0].weight, walked_in(rank, tied)[0].weight)


@case("rank0_broadcast.subgroup_source", level=MUST, source=DOCUMENTED, world=3, catalogue=("A04",))
def test_in_a_subgroup_the_source_is_its_first_rank(rank):
    """In a sub-group the parameters and buffers come from the group's first rank, whatever global rank 0 holds.

    The logging data speak of the group as well: its rank and its world size, not the global ones.
    """
    group = dist.new_group([1, 2])
    model = numbered(Stateful(), rank.index)
    if rank.index in (1, 2):
        ddp = rank.wrap(model, process_group=group)
        rank.show("logged", rank.log(ddp, "rank", "world_size"))
    rank.show("weight", model.weight)
    source = walked_in(rank, Stateful, of=min(rank.index, 1))
    rank.law("the group's members hold its first rank's weight", model.weight, source.weight)
    rank.law("the group's members hold its first rank's buffer", model.running, source.running)


@case("rank0_broadcast.two_groups", level=MUST, source=DOCUMENTED, world=4, catalogue=("A04",))
def test_two_groups_keep_two_models(rank):
    """Two groups that wrap side by side keep two models: each has the weights of its own first rank, and they never mix."""
    groups = [dist.new_group(members) for members in ([0, 2], [3, 1])]
    mine = rank.index % 2
    model = numbered(linear(2, dtype=torch.float64), rank.index)
    ddp = rank.wrap(model, process_group=groups[mine])
    rank.show("weight", model.weight)
    rank.law(
        "the weights are those of the group's lowest rank",
        model.weight,
        numbered(linear(2, dtype=torch.float64), mine).to(rank.device).weight,
    )
    ddp(rank.batch(2, dtype=torch.float64)).sum().backward()
    members = (mine, mine + 2)
    expected = rank.mean(lambda r: rank.batch(2, of=r, dtype=torch.float64), members)
    rank.law("the gradient is the mean over the group", model.weight.grad, expected)


@case("rank0_broadcast.parameters_never_again", level=MUST, source=DOCUMENTED, reports=LOADED)
def test_no_forward_broadcasts_parameters(rank):
    """After construction parameters are never broadcast: not by a training, evaluation, no_grad or no_sync forward, though buffers are."""
    model = numbered(Stateful(), rank.index)
    ddp = rank.wrap(model)
    own = rank.tensor(rank.index + 1, rank.index + 2)
    with torch.no_grad():
        model.weight.copy_(own)
    for mode in ("train", "eval"):
        getattr(ddp, mode)()
        ddp(rank.batch(2)).backward()
        rank.law(f"a forward in {mode} mode leaves a rank its weight", model.weight, own)
    with torch.no_grad():
        ddp(rank.batch(2))
    rank.law("a no_grad forward leaves a rank its weight", model.weight, own)
    with ddp.no_sync():
        ddp(rank.batch(2)).backward()
    rank.law("a no_sync forward leaves a rank its weight", model.weight, own)


@case("rank0_broadcast.never_is_false", level=HAZARD, source=DOCUMENTED, catalogue=("A02",), reports=LOADED)
def test_the_sentence_that_parameters_are_never_broadcast_is_false_of_the_constructor(rank):
    """The documentation says that parameters are never broadcast between processes; the constructor does just that.

    The false sentence is the note "Parameters are never broadcast between processes" in the class's docstring: it is
    true of every later step. Shown here is also how many collectives the constructor issues for a model of one
    dtype: those that compare the models, then the broadcast.
    """
    model = linear(2, start=1.0 + rank.index)
    before = model.weight.detach().clone()
    rank.wrap(model)
    rank.show("collectives", rank.collectives())
    if rank.index:
        rank.differs("the constructor has changed a rank's weight", model.weight, before.to(rank.device))
    rank.law("what it holds now is rank 0's weight", model.weight, linear(2, start=1.0).weight.to(rank.device))
