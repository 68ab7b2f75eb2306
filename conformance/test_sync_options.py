"""What is synchronized at construction and at a forward, by option: init_sync, forward_sync_buffers, broadcast_buffers."""

import warnings

import torch
from ddp_conformance import MUST, OBSERVED, case
from ddp_conformance.models import Buffered

DOCUMENTED = "DistributedDataParallel"
INIT_TESTS = (
    "distributed_test.py::DistributedTest._DistTestBase::test_ddp_init_sync_buffers_with_forward_sync_buffers_false",
)
DEPRECATION_TESTS = (
    "distributed_test.py::DistributedTest._DistTestBase::test_ddp_broadcast_buffers_deprecation_warning",
)


def apart(rank) -> Buffered:
    """A model whose weight and buffer are both 1 on rank 0, 2 on rank 1, and so on."""
    model = Buffered(count=1.0 + rank.index)
    torch.nn.init.constant_(model.weight, 1.0 + rank.index)
    return model


def wrapped_with_warnings(rank, model, **options):
    """Wrap the model; return the wrapper and the Python warnings that mention an option of DDP."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ddp = rank.wrap(model, **options)
    return ddp, [warning for warning in caught if "broadcast_buffers" in str(warning.message)]


@case(
    "sync_options.init_sync_off",
    level=MUST,
    source=DOCUMENTED,
    needs=("init_sync",),
    catalogue=("A06",),
    torch_tests=("test_c10d_pypg.py::AbstractDDPSingleRank::test_ddp_no_init_sync",),
    reports=("pytorch/pytorch#142824",),
)
def test_without_init_sync_every_rank_keeps_what_it_holds(rank):
    """With init_sync=False the constructor communicates nothing: every rank keeps its own parameters and buffers.

    Gradients are averaged all the same, so replicas that differ stay different.
    """
    model = apart(rank)
    ddp = rank.wrap(model, init_sync=False)
    own = rank.tensor(1.0 + rank.index)
    rank.law("the constructor starts no collective", rank.collectives(), 0)
    rank.law("the weight is the rank's own", model.weight, own)
    rank.law("the buffer is the rank's own", model.count, own)
    ddp(rank.batch(1)).backward()
    rank.law("gradients are averaged", model.weight.grad, rank.mean(lambda r: rank.batch(1, of=r))[0])
    rank.law("the weight is still the rank's own", model.weight, own)
    rank.show("weight", model.weight)


@case("sync_options.init_sync_off_shapes", level=MUST, source=DOCUMENTED, needs=("init_sync",), catalogue=("A06",))
def test_without_init_sync_shapes_are_not_compared(rank):
    """With init_sync=False shapes are not compared: ranks whose models differ construct without an error."""
    model = torch.nn.Linear(1, rank.index + 1, bias=rank.index == 1)
    refusal = None
    try:
        rank.wrap(model, init_sync=False)
    except RuntimeError as error:
        refusal = str(error)
    rank.law("the constructor accepts it", refusal, None)
    rank.law("the model is the rank's own", tuple(model.weight.shape), (rank.index + 1, 1))
    rank.law("no rank has heard of another", rank.collectives(), 0)


@case(
    "sync_options.forward_sync_buffers_off",
    level=MUST,
    source=DOCUMENTED,
    needs=("forward_sync_buffers",),
    catalogue=("A07",),
    torch_tests=INIT_TESTS,
    reports=("pytorch/pytorch#111138", "pytorch/pytorch#178054"),
)
def test_forward_sync_buffers_off_still_synchronizes_at_construction(rank):
    """With forward_sync_buffers=False buffers are broadcast once, by the constructor, and never again by a forward."""
    model = apart(rank)
    ddp = rank.wrap(model, forward_sync_buffers=False)
    rank.law("the constructor broadcasts the buffer", model.count, rank.tensor(1.0))
    model.count.fill_(10.0 + rank.index)
    for step in range(4):
        ddp(rank.batch(1)).backward()
        rank.law(f"forward {step + 1} sees the rank's own buffer", model.seen, rank.tensor(10.0 + rank.index + step))
    rank.show("buffer", model.count)


@case(
    "sync_options.broadcast_buffers_off",
    level=MUST,
    source=DOCUMENTED,
    needs=("init_sync",),
    catalogue=("A08",),
    reports=("pytorch/pytorch#111138", "pytorch/pytorch#100729"),
)
def test_broadcast_buffers_off_leaves_buffers_alone_at_construction_too(rank):
    """broadcast_buffers=False keeps buffers out of the constructor's broadcast as well: they are the rank's own from the start."""
    model = apart(rank)
    ddp = rank.wrap(model, broadcast_buffers=False)
    rank.law("the constructor leaves the buffer alone", model.count, rank.tensor(1.0 + rank.index))
    rank.law("it broadcasts the parameter", model.weight, rank.tensor(1.0))
    for step in range(4):
        ddp(rank.batch(1)).backward()
        rank.law(f"forward {step + 1} sees the rank's own buffer", model.seen, rank.tensor(1.0 + rank.index + step))


@case(
    "sync_options.broadcast_buffers_off_by_release",
    level=OBSERVED,
    source="nn/parallel/distributed.py: _sync_module_states(",
    catalogue=("A08",),
    reports=("pytorch/pytorch#100729", "pytorch/pytorch#111138"),
)
def test_whether_broadcast_buffers_off_reaches_the_constructor_depends_on_the_release(rank):
    """Until torch 2.1 broadcast_buffers=False left the constructor's broadcast of buffers in place; since then it removes it, without a word in the documentation of the time."""
    model = apart(rank)
    rank.wrap(model, broadcast_buffers=False)
    rank.law("parameters are broadcast in any case", model.weight, rank.tensor(1.0))
    rank.show("buffer", model.count)


@case(
    "sync_options.broadcast_buffers_deprecated",
    level=MUST,
    source=DOCUMENTED,
    each={"off": False, "on": True},
    needs=("forward_sync_buffers",),
    catalogue=("A08",),
    torch_tests=DEPRECATION_TESTS,
)
def test_broadcast_buffers_is_deprecated(rank, value):
    """Passing broadcast_buffers, on or off, warns that it is deprecated in favour of forward_sync_buffers; leaving it out does not."""
    _, silent = wrapped_with_warnings(rank, apart(rank))
    rank.law("without it there is no warning", len(silent), 0)
    _, told = wrapped_with_warnings(rank, apart(rank), broadcast_buffers=value)
    rank.law("with it there is one FutureWarning", [warning.category for warning in told], [FutureWarning])
    rank.show("warning", str(told[0].message).split(". ")[0])


@case(
    "sync_options.forward_flag_wins",
    level=MUST,
    source="nn/parallel/distributed.py: is ignored when `forward_sync_buffers` is provided",
    each={"off": False, "on": True},
    needs=("forward_sync_buffers",),
    catalogue=("A09",),
    torch_tests=DEPRECATION_TESTS,
)
def test_where_both_flags_are_given_forward_sync_buffers_decides(rank, value):
    """Where both are given, forward_sync_buffers decides and broadcast_buffers is ignored, with a warning that says so."""
    model = apart(rank)
    ddp, told = wrapped_with_warnings(rank, model, broadcast_buffers=not value, forward_sync_buffers=value)
    rank.law("there is one FutureWarning", [warning.category for warning in told], [FutureWarning])
    rank.law("the constructor broadcasts the buffer", model.count, rank.tensor(1.0))
    model.count.fill_(10.0 + rank.index)
    ddp(rank.batch(1))
    rank.law("the forward obeys forward_sync_buffers", model.seen, rank.tensor(10.0 + (0 if value else rank.index)))
    rank.law("the attribute too", ddp.forward_sync_buffers, value)


@case(
    "sync_options.buffers_and_gradients",
    level=MUST,
    source=DOCUMENTED,
    each={"off": False, "on": True},
    world=(2, 3),
    reports=(
        "facebookresearch/detectron2#1297",
        "facebookresearch/maskrcnn-benchmark#692",
        "bl0/moco#12",
        "LiheYoung/UniMatch#74",
    ),
)
def test_broadcasting_buffers_reaches_gradients_only_through_the_forward(rank, value):
    """broadcast_buffers decides with which buffers each rank computes, rank 0's or its own; the gradients are averaged either way."""
    model = Scaled()
    ddp = rank.wrap(model, broadcast_buffers=value)
    model.scale.fill_(1.0 + rank.index)
    ddp(rank.batch(1)).backward()
    scale = (lambda r: 1.0) if value else (lambda r: 1.0 + r)
    expected = rank.mean(lambda r: scale(r) * rank.batch(1, of=r)[0])
    rank.law("the gradient is the mean of gradients under the buffers used", model.weight.grad, expected)
    rank.show("gradient", model.weight.grad)


class Scaled(torch.nn.Module):
    """weight times input times the buffer `scale`."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1))
        self.register_buffer("scale", torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.weight * self.scale * x).sum()
