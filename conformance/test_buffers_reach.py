"""How far the broadcast of buffers reaches: buffers of any shape, none at all, after an evaluation, and over a mesh."""

import torch
import torch.distributed as dist
from ddp_conformance import MUST, case
from ddp_conformance.models import WithBuffers, linear
from torch import nn


@case("buffers.any_shape", level=MUST, source="DistributedDataParallel", catalogue=("D01",))
def test_buffers_of_any_shape_are_sent_each_to_its_own(rank):
    """A buffer without dimensions, one that lies column by column in memory, and two of one shape are each rank 0's in every synchronized forward."""
    model = WithBuffers(number=torch.tensor(0), columns=torch.zeros(3, 2).t(), one=torch.zeros(2), other=torch.zeros(2))
    ddp = rank.wrap(model)

    def hold(of, step):
        first = 100.0 * step + 10 * of
        return {
            "number": torch.tensor(int(first)),
            "columns": torch.arange(6.0).reshape(2, 3) + first,
            "one": torch.full((2,), first + 2),
            "other": torch.full((2,), first + 3),
        }

    for step in range(3):
        for name, value in hold(rank.index, step).items():
            model.get_buffer(name).copy_(value)
        ddp(rank.batch(1)).backward()
        for name, value in hold(0, step).items():
            rank.law(f"{name} is rank 0's", model.seen[name], value.to(rank.device))


@case("buffers.none", level=MUST, source="DistributedDataParallel", catalogue=("A05", "D01"))
def test_a_buffer_that_is_none_is_no_buffer(rank):
    """A module with a buffer that is None, as a BatchNorm's without running statistics, is wrapped and trained like others."""
    model = nn.Sequential(linear(1), nn.BatchNorm1d(1, track_running_stats=False))
    error = ""
    try:
        ddp = rank.wrap(model)
        (ddp(torch.cat([rank.batch(1), -rank.batch(1)])).sum() * (rank.index + 1)).backward()
    except (AttributeError, TypeError) as raised:
        error = str(raised)
    rank.law("it is no error", error, "")
    rank.law("the bias gets the mean over two rows", model[1].bias.grad, rank.tensor(3.0))


@case("buffers.train_after_eval", level=MUST, source="DistributedDataParallel", catalogue=("D03",))
def test_back_in_training_mode_buffers_are_sent(rank):
    """After eval() and train() a synchronized forward begins with rank 0's buffers as before."""
    model = WithBuffers(b=rank.tensor(0.0))
    ddp = rank.wrap(model)
    for step, mode in enumerate(("train", "eval", "train")):
        getattr(ddp, mode)()
        model.b.fill_(10 * step + rank.index)
        ddp(rank.batch(1)).backward()
        rank.law("rank 0's buffer", model.seen["b"], rank.tensor(10.0 * step))


@case(
    "buffers.over_a_mesh",
    level=MUST,
    source="DistributedDataParallel",
    world=4,
    needs=("device_mesh", "torch.distributed.device_mesh.init_device_mesh"),
    catalogue=("A15", "D01"),
)
def test_over_a_mesh_buffers_are_those_of_its_first_rank(rank):
    """Over one dimension of a device mesh a synchronized forward begins with the buffers of its first rank."""
    mesh = dist.device_mesh.init_device_mesh(rank.device.type, (2, 2), mesh_dim_names=("replica", "other"))
    first = rank.index % 2  # ranks 0, 2 and 1, 3 are replicas of each other
    model = WithBuffers(b=rank.tensor(0.0))
    ddp = rank.wrap(model, device_mesh=mesh["replica"])
    for step in range(2):
        model.b.fill_(10 * step + rank.index)
        ddp(rank.batch(1)).backward()
        rank.law("the first rank's buffer", model.seen["b"], rank.tensor(10.0 * step + first))
