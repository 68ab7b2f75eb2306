"""Buffers are rank 0's at the start of a synchronized forward, are never averaged, and drift apart when that is switched off."""

import torch
import torch.distributed as dist
from ddp_conformance import HAZARD, MUST, OBSERVED, case
from ddp_conformance.models import WithBuffers
from torch import nn

TORCH = "distributed_test.py::DistributedTest._DistTestBase::"


def filled(rank, value, dtype=torch.float32, size=1):
    """A 1-D tensor of equal elements of any dtype."""
    return torch.full((size,), value, device=rank.device).to(dtype)


@case(
    "buffers.rank_0_at_forward",
    level=MUST,
    source="DistributedDataParallel",
    world=3,
    each={
        "default": {},
        "view": {"gradient_as_bucket_view": True},
        "find_unused": {"find_unused_parameters": True},
        "static_graph": {"static_graph": True},
    },
    catalogue=("D01",),
    torch_tests=(TORCH + "test_ddp_broadcast_buffer",),
    reports=("pytorch/pytorch#63917", "pytorch/pytorch#30718"),
)
def test_every_synced_forward_begins_with_rank_0s_buffers(rank, options):
    """A synchronized forward begins with rank 0's buffers on every rank, whatever each rank made of its own before."""
    model = WithBuffers(b=rank.tensor(float(rank.index)))
    ddp = rank.wrap(model, **options)
    for step in range(4):
        model.b.fill_(10 * step + rank.index + 1)
        ddp(rank.batch(1)).backward()
        rank.law("forward sees rank 0's buffer", model.seen["b"], rank.tensor(10.0 * step + 1))
        rank.law("and it stays after backward", model.b, rank.tensor(10.0 * step + 1))


@case(
    "buffers.counted_in_forward",
    level=MUST,
    source="DistributedDataParallel",
    world=(1, 2, 3),
    catalogue=("D01",),
    torch_tests=(TORCH + "test_ddp_broadcast_buffer",),
    reports=("pytorch/pytorch#63917",),
)
def test_rank_0s_updates_win_over_those_of_other_ranks(rank):
    """What ranks write into a buffer during forward is replaced by what rank 0 wrote, at the next synchronized forward."""
    model = WithBuffers(total=rank.tensor(0.0))
    ddp = rank.wrap(model)
    own = rank.batch(1)
    for step in range(4):
        ddp(own).backward()
        rank.law("rank 0's running total", model.seen["total"], step * rank.batch(1, of=0)[0])
        model.total += own[0]
    rank.show("total", model.total)


@case(
    "buffers.every_kind",
    level=MUST,
    source="DistributedDataParallel",
    each={
        "float64": torch.float64,
        "float16": torch.float16,
        "int64": torch.int64,
        "uint8": torch.uint8,
        "bool": torch.bool,
    },
    catalogue=("A05", "D01"),
)
def test_float_integer_and_bool_buffers_are_broadcast(rank, dtype):
    """Float, integer and bool buffers are rank 0's at construction and at a synchronized forward.

    What the backend cannot send is refused: gloo knows no int16, for one.
    """
    model = WithBuffers(b=filled(rank, rank.index, dtype, size=3))
    ddp = rank.wrap(model)
    rank.law("at construction", model.b, filled(rank, 0, dtype, size=3))
    for step in (1, 0):
        model.b.fill_(abs(step - rank.index))
        ddp(rank.batch(1)).backward()
        rank.law("at forward", model.seen["b"], filled(rank, step, dtype, size=3))


@case(
    "buffers.complex",
    level=MUST,
    source="DistributedDataParallel",
    each={"complex64": torch.complex64, "complex128": torch.complex128},
    catalogue=("A05", "D01", "B05"),
    reports=("pytorch/pytorch#156632",),
)
def test_complex_buffers_are_broadcast(rank, dtype):
    """Complex buffers are rank 0's at construction and at a synchronized forward, in both parts."""
    model = WithBuffers(b=filled(rank, complex(rank.index, 2), dtype))
    ddp = rank.wrap(model)
    rank.law("at construction", model.b, filled(rank, complex(0, 2), dtype))
    model.b.fill_(complex(3, 4 + rank.index))
    ddp(rank.batch(1)).backward()
    rank.law("at forward", model.seen["b"], filled(rank, complex(3, 4), dtype))


@case(
    "buffers.mixed_and_nested",
    level=MUST,
    source="DistributedDataParallel",
    catalogue=("A05", "D01"),
)
def test_all_buffers_of_all_submodules_are_broadcast(rank):
    """All buffers of all submodules are broadcast, non-persistent ones and several types side by side."""
    own = rank.index + 1
    inner = WithBuffers(whole=filled(rank, own, torch.int64), part=filled(rank, float(own), size=2))
    model = nn.Sequential(nn.Identity(), inner)
    model[0].register_buffer("passing", rank.tensor(float(own)), persistent=False)
    model[0].register_buffer("short", filled(rank, own, torch.int32))
    ddp = rank.wrap(model)
    for buffer in model.buffers():
        buffer.fill_(own + 4)
    before = rank.collectives()
    ddp(rank.batch(1))
    rank.show("collectives_in_forward", rank.collectives() - before)
    rank.law(
        "an integer and two floats",
        inner.seen,
        {"whole": filled(rank, 5, torch.int64), "part": filled(rank, 5.0, size=2)},
    )
    rank.law("a non-persistent one", model[0].passing, rank.tensor(5.0))
    rank.law("a short integer", model[0].short, filled(rank, 5, torch.int32))


@case(
    "buffers.group_source",
    level=MUST,
    source="DistributedDataParallel",
    world=3,
    catalogue=("D01", "A04"),
)
def test_in_a_sub_group_the_source_is_its_first_rank(rank):
    """In a process group without rank 0 the buffers are those of the group's first rank, at construction and at every synchronized forward."""
    group = dist.new_group([1, 2])
    if rank.index == 0:
        return
    model = WithBuffers(b=rank.tensor(float(rank.index)))
    ddp = rank.wrap(model, process_group=group)
    rank.law("at construction", model.b, rank.tensor(1.0))
    for step in range(2):
        model.b.fill_(10 * step + rank.index)
        ddp(rank.batch(1)).backward()
        rank.law("at forward", model.seen["b"], rank.tensor(10.0 * step + 1))


@case(
    "buffers.off",
    level=MUST,
    source="DistributedDataParallel",
    world=3,
    each={"broadcast_buffers": "broadcast_buffers", "forward_sync_buffers": "forward_sync_buffers"},
    catalogue=("D01", "A07", "A08"),
    torch_tests=(TORCH + "test_ddp_init_sync_buffers_with_forward_sync_buffers_false",),
    reports=("pytorch/pytorch#111138", "pytorch/pytorch#178054"),
)
def test_switched_off_buffers_drift_apart(rank, option):
    """With broadcast_buffers=False, or forward_sync_buffers=False, no forward touches a buffer: each rank goes on with its own, and buffers drift apart.

    The two differ at construction only: forward_sync_buffers=False still begins with rank 0's buffers.
    """
    model = WithBuffers(total=rank.tensor(float(rank.index)))
    ddp = rank.wrap(model, **{option: False})
    rank.show("after_construction", model.total)
    start = model.total.clone()
    before = rank.collectives()
    with torch.no_grad():
        ddp(rank.batch(1))
    rank.law("such a forward communicates nothing", rank.collectives() - before, 0)
    for step in range(4):
        ddp(rank.batch(1)).backward()
        rank.law("the rank's own running total", model.seen["total"], start + step * (rank.index + 1))
        model.total += rank.index + 1
    rank.show("total", model.total)


@case(
    "buffers.no_gradient_effect",
    level=MUST,
    source="DistributedDataParallel",
    each={"on": True, "off": False},
    catalogue=("D01", "B01"),
    reports=(
        "facebookresearch/detectron2#1297",
        "facebookresearch/maskrcnn-benchmark#692",
        "bl0/moco#12",
        "LiheYoung/UniMatch#74",
    ),
)
def test_broadcasting_buffers_does_not_touch_gradients(rank, broadcast):
    """Broadcasting buffers or not, gradients are the mean over ranks: it changes buffer values and nothing else."""
    model = WithBuffers(b=rank.tensor(float(rank.index)))
    ddp = rank.wrap(model, broadcast_buffers=broadcast)
    for step in range(4):
        model.b += rank.index
        ddp(rank.batch(1)).backward()
        mean = rank.mean(lambda r: rank.batch(1, of=r)[0])
        rank.law("the mean, step after step", model.weight.grad, (step + 1) * mean)


@case(
    "buffers.lag_one_forward",
    level=HAZARD,
    source="nn/parallel/distributed.py: self.require_forward_param_sync = False",
    each={"no_grad": False, "no_sync": True},
    needs=("no_sync",),
    catalogue=("U12", "D01"),
    reports=("pytorch/pytorch#63917", "Lightning-AI/pytorch-lightning#4092", "pytorch/pytorch#43201"),
)
def test_the_forward_after_an_unsynced_one_does_not_broadcast(rank, no_sync):
    """The forward that follows one under no_grad or no_sync does not broadcast buffers, though it trains: the documented "every iteration" is false.

    The decision is taken by the forward before: the first forward under no_grad or no_sync still broadcasts, a second
    does not, and the first training forward after a validation pass runs on each rank's own buffers.
    """
    model = WithBuffers(b=rank.tensor(0.0))
    ddp = rank.wrap(model)

    def forward(name, of):
        model.b.fill_(rank.index + 5)
        out = ddp(rank.batch(1))
        rank.show(name, model.seen["b"])
        rank.law(f"{name} sees {'rank 0' if of == 0 else 'its own'}", model.seen["b"], rank.tensor(of + 5.0))
        return out

    forward("training", of=0).backward()
    with ddp.no_sync() if no_sync else torch.no_grad():
        forward("first_unsynced", of=0)
        forward("second_unsynced", of=rank.index)
    forward("first_training_after", of=rank.index).backward()
    forward("second_training_after", of=0).backward()


@case(
    "buffers.reassigned",
    level=MUST,
    source="nn/parallel/distributed.py: see https://github.com/pytorch/pytorch/issues/63916",
    catalogue=("D02",),
    torch_tests=(TORCH + "test_ddp_broadcast_buffer",),
    reports=("pytorch/pytorch#63916",),
)
def test_reassigned_buffers_are_broadcast(rank):
    """A buffer that was assigned anew after wrapping is the one broadcast."""
    model = WithBuffers(b=rank.tensor(0.0))
    ddp = rank.wrap(model)
    for step in range(4):
        model.b = rank.tensor(10.0 * step + rank.index)
        ddp(rank.batch(1)).backward()
        rank.law("rank 0's new tensor", model.seen["b"], rank.tensor(10.0 * step))


@case(
    "buffers.late",
    level=OBSERVED,
    source="nn/parallel/distributed.py: self._assign_modules_buffers()",
    catalogue=("D02",),
)
def test_buffers_registered_after_wrapping_are_broadcast_with_the_others(rank):
    """A buffer registered after wrapping is broadcast with the others, by a module that had a buffer when it was wrapped."""
    model = WithBuffers(b=rank.tensor(0.0))
    ddp = rank.wrap(model)
    model.register_buffer("late", rank.tensor(float(rank.index + 3)))
    ddp(rank.batch(1)).backward()
    rank.law("forward sees rank 0's", model.seen["late"], rank.tensor(3.0))


@case(
    "buffers.late_and_alone",
    level=HAZARD,
    source="nn/parallel/distributed.py: and len(self.modules_buffers) > 0",
    catalogue=("D02", "D05"),
)
def test_the_first_buffer_of_a_module_wrapped_without_any_is_never_broadcast(rank):
    """A module that was wrapped without a buffer never broadcasts one registered later: each rank keeps its own, without an error."""
    model = WithBuffers()
    ddp = rank.wrap(model)
    model.register_buffer("late", rank.tensor(float(rank.index + 3)))
    for _ in range(4):
        ddp(rank.batch(1)).backward()
        rank.law("each rank sees its own", model.seen["late"], rank.tensor(rank.index + 3.0))


@case(
    "buffers.eval_mode",
    level=MUST,
    source="DistributedDataParallel",
    catalogue=("D03",),
)
def test_eval_mode_does_not_stop_the_broadcast(rank):
    """Switching the module to eval() does not stop the broadcast."""
    model = WithBuffers(b=rank.tensor(0.0))
    ddp = rank.wrap(model)
    ddp.eval()
    for step in range(2):
        model.b.fill_(10 * step + rank.index)
        ddp(rank.batch(1)).backward()
        rank.law("forward sees rank 0's", model.seen["b"], rank.tensor(10.0 * step))
