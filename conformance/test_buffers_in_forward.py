"""What takes the broadcast's place or its time: buffer hooks, and what several forwards and batch norm see of buffers."""

import threading

import torch
import torch.distributed as dist
from ddp_conformance import MUST, OBSERVED, case
from ddp_conformance.models import WithBuffers
from torch import nn

TORCH = "distributed_test.py::DistributedTest._DistTestBase::"


@case(
    "buffers.hook_place",
    level=MUST,
    source="DistributedDataParallel._register_buffer_comm_hook",
    each={"before_forward": "PRE_FORWARD", "after_forward": "POST_FORWARD", "default": None},
    world=3,
    needs=("_register_buffer_comm_hook", "torch.nn.parallel.distributed._BufferCommHookLocation"),
    catalogue=("D04",),
    torch_tests=(TORCH + "test_ddp_buffer_hook_allreduce", TORCH + "test_ddp_broadcast_buffer_via_hook"),
    reports=("pytorch/pytorch#30718",),
)
def test_a_buffer_hook_runs_before_or_after_forward(rank, place):
    """A buffer hook runs instead of the broadcast, with the buffers by name: before forward or, by default, after it."""
    model = WithBuffers(b=rank.tensor(float(rank.index)))
    ddp = rank.wrap(model)
    names = []

    def total(state, buffers):
        names.extend(buffers)
        state.append(len(names))
        for buffer in buffers.values():
            dist.all_reduce(buffer)

    locations = nn.parallel.distributed._BufferCommHookLocation
    state = []
    ddp._register_buffer_comm_hook(state, total, **({"comm_hook_location": locations[place]} if place else {}))
    for step in range(2):
        model.b.fill_(step + rank.index)
        out = ddp(rank.batch(1))
        whole = rank.tensor(3.0 * step + 3)
        seen = whole if place == "PRE_FORWARD" else rank.tensor(float(step + rank.index))
        rank.law("forward sees the sum, or its own", model.seen["b"], seen.clone())
        rank.law("after forward the sum is there", model.b, whole)
        out.backward()
    rank.law("the hook is handed buffers by name, and its state", [names, state], [["b", "b"], [1, 2]])


@case(
    "buffers.hook_futures",
    level=MUST,
    source="DistributedDataParallel._register_buffer_comm_hook",
    needs=("_register_buffer_comm_hook",),
    catalogue=("D04",),
    torch_tests=(TORCH + "test_ddp_buffer_hook_allreduce_return_future",),
)
def test_backward_waits_for_the_futures_of_a_buffer_hook(rank):
    """Futures that a buffer hook returns are awaited before backward returns."""
    model = WithBuffers(b=rank.tensor(float(rank.index)))
    ddp = rank.wrap(model)
    done = []

    def late(state, buffers):
        future = torch.futures.Future()

        def finish():
            done.append(True)
            future.set_result(buffers["b"])

        threading.Timer(0.2, finish).start()
        return [future]

    ddp._register_buffer_comm_hook(None, late)
    for step in (1, 2):
        out = ddp(rank.batch(1))
        rank.law("forward does not wait for it", len(done), step - 1)
        out.backward()
        rank.law("backward does", len(done), step)


@case(
    "buffers.hook_replaces",
    level=MUST,
    source="DistributedDataParallel._register_buffer_comm_hook",
    needs=("_register_buffer_comm_hook",),
    catalogue=("D04",),
)
def test_a_buffer_hook_that_does_nothing_leaves_buffers_alone(rank):
    """With a buffer hook there is no broadcast: one that does nothing leaves every rank its own buffers."""
    model = WithBuffers(b=rank.tensor(0.0))
    ddp = rank.wrap(model)
    ddp._register_buffer_comm_hook(None, lambda state, buffers: None)
    for step in range(4):
        model.b.fill_(step + rank.index)
        ddp(rank.batch(1)).backward()
        rank.law("forward sees the rank's own", model.seen["b"], rank.tensor(float(step + rank.index)))
        rank.law("which stays after backward", model.b, rank.tensor(float(step + rank.index)))


@case(
    "buffers.will_sync",
    level=OBSERVED,
    source="DistributedDataParallel.will_sync_module_buffers",
    world=1,
    needs=("will_sync_module_buffers",),
    catalogue=("D05",),
)
def test_will_sync_module_buffers_foretells_the_next_forward(rank):
    """will_sync_module_buffers() is true when the next forward will broadcast: there are buffers, it is not switched off, and the forward before was synced."""
    ddp = rank.wrap(WithBuffers(b=rank.tensor(0.0)))

    def foretold():
        told = ddp.will_sync_module_buffers()
        before = rank.collectives()
        with torch.no_grad():
            ddp(rank.batch(1))
        return [told, rank.collectives() - before]

    rank.law("a module with buffers", foretold(), [True, 1])
    rank.law("after a forward under no_grad", foretold(), [False, 0])
    ddp(rank.batch(1)).backward()
    rank.law("after a synced one", ddp.will_sync_module_buffers(), True)
    rank.law("without buffers", rank.wrap(WithBuffers()).will_sync_module_buffers(), False)
    off = rank.wrap(WithBuffers(b=rank.tensor(0.0)), broadcast_buffers=False)
    rank.law("switched off", off.will_sync_module_buffers(), False)


@case(
    "buffers.two_forwards_one_backward",
    level=MUST,
    source="nn/parallel/distributed.py: with torch.autograd._unsafe_preserve_version_counter(",
    each={"buffer": False, "batch_norm": True},
    catalogue=("D06",),
    reports=(
        "pytorch/pytorch#22095",
        "pytorch/pytorch#65907",
        "pytorch/pytorch#66504",
        "pytorch/pytorch#110363",
        "pytorch/pytorch#175024",
        "NVlabs/FUNIT#53",
    ),
)
def test_two_forwards_and_one_backward_work_with_buffers(rank, batch_norm):
    """Two forwards before one backward work in a model whose forward uses its buffers, as they do without DDP.

    Where the broadcast counted as a change of the buffer, backward refused: a buffer it needed had been modified.
    """

    class Scaled(WithBuffers):
        def forward(self, x):
            return super().forward(x) * self.b

    model = nn.BatchNorm1d(1, affine=True) if batch_norm else Scaled(b=rank.tensor(2.0))
    ddp = rank.wrap(model)
    rows = torch.tensor([[-1.0], [1.0]], device=rank.device)
    loss = ddp(rows).sum() * (rank.index + 1) + ddp(rows + 4).sum() * (rank.index + 1)
    try:
        loss.backward()
    except RuntimeError as error:
        rank.law("backward is not refused", str(error), "")
        return
    if batch_norm:
        rank.law("the bias gets the mean of twice the batch", model.bias.grad, rank.tensor(6.0))
    else:
        rank.law("the weight gets the mean of both", model.weight.grad, rank.tensor(24.0))


@case(
    "buffers.no_reduction_of_running_statistics",
    level=MUST,
    source="DistributedDataParallel",
    catalogue=("D01",),
    reports=("pytorch/pytorch#54059",),
)
def test_batch_norm_statistics_are_rank_0s_and_no_mean(rank):
    """The running statistics of a BatchNorm layer follow rank 0's batches only; they are not averaged over ranks."""
    model = nn.BatchNorm1d(1, momentum=0.5)
    ddp = rank.wrap(model)
    mean = torch.zeros(1, device=rank.device)
    for _ in range(4):
        centre = 4.0 * (rank.index + 1)
        ddp(torch.tensor([[centre - 1], [centre + 1]], device=rank.device)).sum().backward()
        rank.law("rank 0's past and the rank's own last batch", model.running_mean, mean / 2 + centre / 2)
        mean = mean / 2 + 2.0  # rank 0's batches have mean 4
    rank.show("running_mean", model.running_mean)
    rank.show("batches", model.num_batches_tracked)
