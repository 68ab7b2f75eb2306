"""In a process group of its own DDP does all that it does in the default one: the group's ranks count, not the world's."""

import torch
import torch.distributed as dist
from ddp_conformance import MUST, OBSERVED, case
from ddp_conformance.models import Scalars, WithBuffers
from ddp_conformance.rank import as_it_is
from torch import nn

DDP = "DistributedDataParallel"
MEMBERS = [1, 2]
"""Of three ranks; rank 0 helps to make the group, as all ranks must, and then has no part in it."""


def mean(rank):
    """The mean of what the members are fed."""
    return rank.mean(lambda r: rank.batch(1, of=r)[0], MEMBERS)


@case("sub_groups.unused_parameters", level=MUST, source=DDP, world=3, catalogue=("A04", "E05"))
def test_unused_parameters_are_looked_for_among_the_members(rank):
    """In a sub-group a parameter that one member uses gets half of its gradient on both, and one that no member uses keeps none."""
    group = dist.new_group(MEMBERS)
    if rank.index == 0:
        return
    model = Scalars("a", "b", "c")
    ddp = rank.wrap(model, process_group=group, find_unused_parameters=True)
    for step in range(4):
        model.zero_grad(set_to_none=True)
        user = MEMBERS[step % 2]
        ddp(rank.batch(1), use=("a", "b") if rank.index == user else "a").backward()
        rank.law("both use a", model.a.grad, mean(rank))
        rank.law("one uses b", model.b.grad, rank.batch(1, of=user)[0] / 2)
        rank.law("none uses c", model.c.grad, None)


@case("sub_groups.no_sync", level=MUST, source=f"{DDP}.no_sync", world=3, needs=("no_sync",), catalogue=("A04", "C01"))
def test_gradients_stay_local_inside_no_sync(rank):
    """In a sub-group gradients stay local inside no_sync, and the next synced backward reduces what has accumulated over the group."""
    group = dist.new_group(MEMBERS)
    if rank.index == 0:
        return
    model = Scalars("a")
    ddp = rank.wrap(model, process_group=group)
    for _ in range(2):
        model.zero_grad(set_to_none=True)
        with ddp.no_sync():
            ddp(rank.batch(1)).backward()
        rank.law("inside no_sync a gradient is the rank's own", model.a.grad, rank.batch(1)[0])
        ddp(rank.batch(1)).backward()
        rank.law("the synced step reduces the sum", model.a.grad, 2 * mean(rank))


@case(
    "sub_groups.comm_hook",
    level=MUST,
    source=f"{DDP}.register_comm_hook",
    world=3,
    needs=("register_comm_hook",),
    catalogue=("A04", "I01"),
)
def test_a_hook_stands_in_the_place_of_the_groups_all_reduce(rank):
    """In a sub-group a communication hook stands in the place of the all-reduce: one that does nothing leaves gradients local."""
    group = dist.new_group(MEMBERS)
    if rank.index == 0:
        return
    model = Scalars("a")
    ddp = rank.wrap(model, process_group=group)
    ddp.register_comm_hook(None, as_it_is)
    for _ in range(3):
        model.zero_grad(set_to_none=True)
        ddp(rank.batch(1)).backward()
        rank.law("every member keeps its own gradient", model.a.grad, rank.batch(1)[0])


@case(
    "sub_groups.sparse",
    level=OBSERVED,
    source="include/torch/csrc/distributed/c10d/reducer.hpp: expect_sparse_gradient",
    world=3,
    lanes=("gloo:*",),
    catalogue=("A04", "B06"),
)
def test_a_sparse_gradient_is_divided_by_the_size_of_the_group(rank):
    """In a sub-group a sparse gradient is divided by the group's size."""
    group = dist.new_group(MEMBERS)
    if rank.index == 0:
        return
    model = nn.Embedding(3, 1, sparse=True)
    ddp = rank.wrap(model, process_group=group)
    for _ in range(2):
        model.weight.grad = None
        (ddp(torch.tensor([rank.index], device=rank.device)).sum() * 4 * rank.index).backward()
        rank.law("half of each", model.weight.grad.coalesce().to_dense().flatten(), rank.tensor(0, 2, 4))


@case(
    "sub_groups.join_divisor",
    level=MUST,
    source=f"{DDP}.join",
    world=3,
    needs=("join",),
    catalogue=("A04", "K02"),
)
def test_the_remaining_members_are_the_divisor(rank):
    """In a sub-group join(divide_by_initial_world_size=False) divides by the members that still have inputs."""
    group = dist.new_group(MEMBERS)
    if rank.index == 0:
        return
    model = Scalars("a")
    ddp = rank.wrap(model, process_group=group)
    gradients = []
    with ddp.join(divide_by_initial_world_size=False):
        for _ in range(rank.index):  # one on rank 1, two on rank 2
            model.zero_grad(set_to_none=True)
            ddp(rank.batch(1)).backward()
            gradients.append(model.a.grad.clone())
    expected = [mean(rank), rank.batch(1, of=2)[0]]
    rank.law("the mean, then the last one's own", gradients, expected[: rank.index])


@case(
    "sub_groups.buffers_after_a_change",
    level=MUST,
    source=f"{DDP}._update_process_group",
    world=3,
    needs=("_update_process_group",),
    catalogue=("D01", "O08"),
)
def test_buffers_come_from_the_new_groups_first_rank(rank):
    """After `_update_process_group` a forward begins with the buffers of the new group's first rank."""
    group = dist.new_group(MEMBERS)
    model = WithBuffers(b=rank.tensor(0))
    ddp = rank.wrap(model)
    ddp(rank.batch(1)).backward()
    ddp._update_process_group(group)
    if rank.index == 0:
        return
    for step in range(3):
        model.b.fill_(10 * step + rank.index)
        ddp(rank.batch(1)).backward()
        rank.law("rank 1's buffer", model.seen["b"], rank.tensor(10 * step + 1))


@case(
    "sub_groups.no_sync_after_a_change",
    level=MUST,
    source=f"{DDP}._update_process_group",
    world=3,
    needs=("_update_process_group", "no_sync"),
    catalogue=("C01", "O08"),
)
def test_no_sync_goes_on_in_the_new_group(rank):
    """After `_update_process_group` gradients stay local inside no_sync, and the next synced backward reduces what has accumulated over the new group."""
    group = dist.new_group(MEMBERS)
    model = Scalars("a")
    ddp = rank.wrap(model)
    ddp(rank.batch(1)).backward()
    ddp._update_process_group(group)
    if rank.index == 0:
        return
    for _ in range(2):
        model.zero_grad(set_to_none=True)
        with ddp.no_sync():
            ddp(rank.batch(1)).backward()
        rank.law("inside no_sync a gradient is the rank's own", model.a.grad, rank.batch(1)[0])
        ddp(rank.batch(1)).backward()
        rank.law("the synced step reduces the sum", model.a.grad, 2 * mean(rank))
