"""Parameters whose reduction is put off until another parameter's gradient is ready."""

import time

import torch
import torch.distributed as dist
from ddp_conformance import HAZARD, MUST, OBSERVED, case
from ddp_conformance.models import linear
from torch import nn

DDP = "DistributedDataParallel"
NEEDS = ("delay_all_reduce_named_params",)


class Two(nn.Module):
    """Two Linear(2, 1) whose outputs are added; `hooked` is used first, so its gradient comes last."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        self.hooked = linear(2, dtype=dtype)
        self.delayed = linear(2, dtype=dtype)

    def forward(self, x):
        return self.hooked(x).sum() + self.delayed(x).sum()


def wrap(rank, model, *delayed):
    names = [(name, model.get_parameter(name)) for name in delayed or ("delayed.weight",)]
    return rank.wrap(model, delay_all_reduce_named_params=names, param_to_hook_all_reduce=model.hooked.weight)


def in_time(tensor, expected):
    """Whether the tensor gets the expected value within a second: nobody waits for the delayed reduction."""
    until = time.monotonic() + 1
    while not torch.equal(tensor, expected) and time.monotonic() < until:
        time.sleep(0.001)
    return torch.equal(tensor, expected)


@case("delayed_all_reduce.both_arguments", level=MUST, source=f"{DDP}.__init__", needs=NEEDS, catalogue=("O04",))
def test_both_arguments_are_needed(rank):
    """
    `delay_all_reduce_named_params` and `param_to_hook_all_reduce` are refused one without the other, with ValueError.
    """
    model = Two()
    with rank.raises("names_only", ValueError, match="need to be set at the same time"):
        rank.wrap(model, delay_all_reduce_named_params=[("delayed.weight", model.delayed.weight)])
    with rank.raises("hook_only", ValueError, match="need to be set at the same time"):
        rank.wrap(model, param_to_hook_all_reduce=model.hooked.weight)


@case("delayed_all_reduce.reduced", level=MUST, source=DDP, world=(2, 3), needs=NEEDS, catalogue=("O05",))
def test_delayed_parameters_get_the_mean(rank):
    """
    A delayed parameter gets the mean of its gradients like any other, by one all-reduce of its own that starts when the hooked parameter's gradient is ready.

    Shown over four iterations. Each ends with a wait of at most a second and a barrier, for DDP itself never waits: without the barrier a
    rank that went on to clear its gradients was seen to send zeros to a slower one.
    """
    model = Two()
    ddp = wrap(rank, model)
    mean = rank.mean(lambda r: rank.batch(2, of=r))
    for _ in range(4):
        ddp.zero_grad()
        loss = ddp(rank.batch(2))
        before = rank.collectives()
        loss.backward()
        rank.law("one all-reduce for the delayed and one for the others", rank.collectives() - before, 2)
        rank.law("the delayed parameter gets the mean", in_time(model.delayed.weight.grad, mean), True)
        dist.barrier()  # before another rank has it, too, this one must not clear what may still be on its way
        rank.law("so does the hooked one", model.hooked.weight.grad, mean)


@case("delayed_all_reduce.not_in_a_bucket", level=MUST, source=DDP, needs=NEEDS, catalogue=("O05",))
def test_delayed_parameters_are_not_the_reducers(rank):
    """
    Delayed parameters are left out of DDP's reducer: no bucket holds them, and the logging data does not count them.
    """
    model = Two()
    ddp = wrap(rank, model)
    rank.law("one parameter is counted", rank.log(ddp, "num_parameter_tensors"), {"num_parameter_tensors": 1})
    seen = []
    ddp.register_comm_hook(None, lambda state, bucket: rank_mean(seen, bucket))
    for _ in range(3):
        ddp.zero_grad()
        ddp(rank.batch(2)).backward()
    rank.law("the hook sees the hooked parameter alone", seen, [2] * 3)


def rank_mean(seen, bucket):
    seen.append(bucket.buffer().numel())
    work = dist.all_reduce(bucket.buffer() / dist.get_world_size(), async_op=True)
    return work.get_future().then(lambda future: future.value()[0])


@case(
    "delayed_all_reduce.not_waited_for",
    level=HAZARD,
    source="nn/parallel/distributed.py: def _delayed_all_reduce_hook(self, grad)",
    needs=NEEDS,
    catalogue=("O05", "U27"),
)
def test_backward_does_not_wait_for_the_delayed_reduction(rank):
    """
    Backward returns before a delayed parameter's reduction is complete, nothing in DDP waits for it, and `no_sync` does not hold it back.

    Rank 1 begins its backward, in `no_sync`, only after that of rank 0 has returned; so rank 0 cannot have the mean yet. An optimizer that
    steps now steps by whatever is in the gradient.
    """
    aside = dist.new_group([0, 1])  # collectives of one group must come in the same order on all ranks
    model = Two()
    ddp = wrap(rank, model)
    mean = rank.mean(lambda r: rank.batch(2, of=r))
    with ddp.no_sync():
        loss = ddp(rank.batch(2))
        if rank.index == 0:
            loss.backward()
            rank.differs("rank 0 returns without the mean", model.delayed.weight.grad.clone(), mean)
        dist.barrier(aside)
        if rank.index == 1:
            loss.backward()
    rank.law("the mean comes later", in_time(model.delayed.weight.grad, mean), True)
    rank.law("the hooked parameter is not reduced", model.hooked.weight.grad, rank.batch(2))
    dist.barrier()


@case(
    "delayed_all_reduce.broadcast",
    level=OBSERVED,
    source="nn/parallel/distributed.py: # 2. Broadcast the parameters",
    world=3,
    needs=NEEDS,
    catalogue=("O05",),
)
def test_delayed_parameters_are_broadcast_too(rank):
    """
    Delayed parameters get rank 0's values when the module is wrapped, as others do.
    """
    model = Two()
    with torch.no_grad():
        model.delayed.weight += 10 * (rank.index + 1)
        model.hooked.weight += 10 * (rank.index + 1)
    wrap(rank, model)
    expected = torch.full((1, 2), 11.0, device=rank.device)
    rank.law("the delayed parameter is rank 0's", model.delayed.weight, expected)
    rank.law("the other one too", model.hooked.weight, expected)


@case(
    "delayed_all_reduce.all_parameters",
    level=HAZARD,
    source="nn/parallel/distributed.py: Delay the AllReduce of all parameters.",
    needs=NEEDS,
    catalogue=("O06",),
)
def test_delaying_every_parameter_is_not_possible(rank):
    """
    A model all of whose parameters are delayed cannot be wrapped: the constructor raises ValueError about devices, although its code speaks of this case and means to support it.
    """
    model = Two()
    with rank.raises("all_delayed", ValueError, match="on the same type of devices"):
        wrap(rank, model, "delayed.weight", "hooked.weight")


@case(
    "delayed_all_reduce.float32_only",
    level=HAZARD,
    source="nn/parallel/distributed.py: # 1. Create gradient buffer",
    needs=NEEDS,
    catalogue=("O05",),
)
def test_delayed_parameters_must_be_float32(rank):
    """
    A delayed parameter of another dtype than float32 wraps, and fails with RuntimeError at the first forward: the buffer for its gradient is float32.
    """
    model = Two(dtype=torch.float64)
    ddp = wrap(rank, model)
    with rank.raises("first_forward", RuntimeError, match="attempting to assign a gradient"):
        ddp(rank.batch(2, dtype=torch.float64))
