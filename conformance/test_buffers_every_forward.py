"""Every forward of every wrapper sends its buffers: many and large ones, after an exception, in each wrapper by itself."""

import threading

import torch
import torch.distributed as dist
from ddp_conformance import MUST, OBSERVED, case
from ddp_conformance.models import WithBuffers
from torch import nn

DDP = "DistributedDataParallel"
ASSIGNED = "nn/parallel/distributed.py: Update self.modules_buffers in case any buffers were"
HOOK = f"{DDP}._register_buffer_comm_hook"


@case("rank0_broadcast.any_number_and_size", level=MUST, source=DDP, world=3, catalogue=("A02", "A05", "D01"))
def test_many_and_large_tensors_all_arrive(rank):
    """However many and however large they are, parameters and buffers are rank 0's on every rank at construction, and so are buffers in a forward."""
    sizes = [*range(1, 101), 2**20 + 1]  # the last one has more than 4 MiB

    def hold(of, step):
        return [torch.full((size,), float(1000 * step + 10 * size + of), device=rank.device) for size in sizes]

    model = WithBuffers(**{f"b{size}": value for size, value in zip(sizes, hold(rank.index, 1), strict=True)})
    for size, value in zip(sizes, hold(rank.index, 0), strict=True):
        model.register_parameter(f"p{size}", nn.Parameter(value))
    ddp = rank.wrap(model, find_unused_parameters=True)
    rank.law("parameters", [model.get_parameter(f"p{size}").data for size in sizes], hold(0, 0))
    rank.law("buffers at construction", [model.get_buffer(f"b{size}") for size in sizes], hold(0, 1))
    for size, value in zip(sizes, hold(rank.index, 2), strict=True):
        model.get_buffer(f"b{size}").copy_(value)
    ddp(rank.batch(1))
    rank.law("buffers in a forward", [model.seen[f"b{size}"] for size in sizes], hold(0, 2))


@case("buffers.every_forward", level=MUST, source=DDP, catalogue=("D01",))
def test_each_of_several_forwards_sends_buffers(rank):
    """Of several forwards before one backward each begins with rank 0's buffers."""
    model = WithBuffers(b=rank.tensor(0.0))
    ddp = rank.wrap(model)
    for step in range(2):
        losses = []
        for forward in range(3):
            model.b.fill_(100 * step + 10 * forward + rank.index)
            losses.append(ddp(rank.batch(1)))
            rank.law("rank 0's buffer", model.seen["b"], rank.tensor(100 * step + 10 * forward))
        sum(losses).backward()


class Fails(WithBuffers):
    def forward(self, x):
        if x is None:
            raise ValueError("a bad batch")
        return super().forward(x)


@case("buffers.after_an_exception", level=MUST, source=DDP, catalogue=("D01",))
def test_after_a_forward_that_raised_buffers_are_sent(rank):
    """After a forward that raised on every rank, synchronized forwards begin with rank 0's buffers as before."""
    model = Fails(b=rank.tensor(0.0))
    ddp = rank.wrap(model)
    for step in range(3):
        with rank.raises(f"bad_batch_{step}", ValueError, match="a bad batch"):
            ddp(None)
        model.b.fill_(10 * step + rank.index)
        ddp(rank.batch(1)).backward()
        rank.law("rank 0's buffer", model.seen["b"], rank.tensor(10 * step))


@case("buffers.each_wrapper_by_itself", level=MUST, source=DDP, needs=("no_sync",), catalogue=("D01",))
def test_what_one_wrapper_does_holds_back_no_other(rank):
    """With two wrappers in a process, forwards of one under no_grad or inside no_sync hold no buffers of the other back."""
    model, other = WithBuffers(b=rank.tensor(0.0)), WithBuffers(b=rank.tensor(0.0))
    ddp, aside = rank.wrap(model), rank.wrap(other)
    for step in range(4):
        with torch.no_grad() if step % 2 else aside.no_sync():
            aside(rank.batch(1))
        model.b.fill_(10 * step + rank.index)
        ddp(rank.batch(1)).backward()
        rank.law("rank 0's buffer", model.seen["b"], rank.tensor(10 * step))


@case("sub_groups.two_in_one_process", level=MUST, source=DDP, world=3, catalogue=("A04", "B01", "D01"))
def test_wrappers_of_two_groups_in_one_process_keep_to_their_own(rank):
    """Two wrappers of different groups in one process each have weights and buffers of their own group's first rank, and means over it."""
    first, others = dist.new_group([0]), dist.new_group([1, 2])
    group, part = (others, [1, 2]) if rank.index else (first, [0])
    everybody, model = WithBuffers(b=rank.tensor(rank.index)), WithBuffers(b=rank.tensor(rank.index))
    for each in (everybody, model):
        nn.init.constant_(each.weight, rank.index + 5)
    wrapped = [(rank.wrap(everybody), [0, 1, 2]), (rank.wrap(model, process_group=group), part)]
    for step in range(3):
        for ddp, members in wrapped:
            rank.law("the first rank's weight", ddp.module.weight.data, rank.tensor(members[0] + 5))
            ddp.module.b.fill_(10 * step + rank.index)
            ddp.module.zero_grad(set_to_none=True)
            ddp(2 * rank.batch(1)).backward()
            mean = 2 * rank.mean(lambda r: rank.batch(1, of=r), members)[0]
            rank.law("the first rank's buffer", ddp.module.seen["b"], rank.tensor(10 * step + members[0]))
            rank.law("the group's mean", ddp.module.weight.grad, mean)


@case("buffers.in_inference_mode", level=OBSERVED, source=DDP, catalogue=("D01",))
def test_a_forward_in_inference_mode_sends_buffers(rank):
    """A forward in inference mode begins with rank 0's buffers like one in training."""
    model = WithBuffers(b=rank.tensor(0.0))
    ddp = rank.wrap(model)
    model.b.fill_(rank.index + 1)
    with torch.inference_mode():
        ddp(rank.batch(1))
    rank.law("rank 0's buffer", model.seen["b"], rank.tensor(1.0))


@case(
    "buffers.reassigned_otherwise",
    level=OBSERVED,
    source=ASSIGNED,
    catalogue=("D02",),
    reports=("pytorch/pytorch#63916",),
)
def test_a_buffer_assigned_anew_may_be_of_another_shape_and_dtype(rank):
    """A buffer that was assigned anew with another shape or dtype is rank 0's in the next synchronized forward."""
    model = WithBuffers(b=rank.tensor(0.0))
    ddp = rank.wrap(model)
    for shape, dtype in (((3,), torch.float32), ((2, 2), torch.float64), ((), torch.int64)):
        model.b = torch.full(shape, rank.index + 7, dtype=dtype, device=rank.device)
        ddp(rank.batch(1)).backward()
        rank.law("rank 0's buffer", model.seen["b"], torch.full(shape, 7, dtype=dtype, device=rank.device))


@case("buffers.hook_futures_all", level=MUST, source=HOOK, needs=("_register_buffer_comm_hook",), catalogue=("D04",))
def test_backward_waits_for_all_futures_of_a_buffer_hook(rank):
    """All of the futures that a buffer hook returns are awaited before backward returns."""
    model = WithBuffers(b=rank.tensor(0.0))
    ddp = rank.wrap(model)
    done = []

    def finish(future, place, buffer):
        done.append(place)
        future.set_result(buffer)

    def late(state, buffers):
        futures = [torch.futures.Future() for _ in range(3)]
        for place, future in enumerate(futures):
            threading.Timer(0.1 * (1 + place), finish, (future, place, buffers["b"])).start()
        return futures

    ddp._register_buffer_comm_hook(None, late)
    ddp(rank.batch(1)).backward()
    rank.law("all three are done", sorted(done), [0, 1, 2])


@case("sync_options.init_sync_off_forwards", level=MUST, source=DDP, needs=("init_sync",), catalogue=("A06", "D01"))
def test_without_init_sync_forwards_send_buffers_all_the_same(rank):
    """With init_sync=False a synchronized forward begins with rank 0's buffers as with it."""
    model = WithBuffers(b=rank.tensor(rank.index + 5))
    ddp = rank.wrap(model, init_sync=False)
    rank.law("the rank's own at construction", model.b, rank.tensor(rank.index + 5))
    for step in range(3):
        model.b.fill_(10 * step + rank.index)
        ddp(rank.batch(1)).backward()
        rank.law("rank 0's buffer", model.seen["b"], rank.tensor(10 * step))
