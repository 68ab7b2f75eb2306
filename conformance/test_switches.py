"""What may be changed on a DDP after it was made: its process group, and the clone of its outputs."""

import torch
import torch.distributed as dist
from ddp_conformance import MUST, OBSERVED, case
from ddp_conformance.models import Scalars, three_layers

DDP = "DistributedDataParallel"
TESTS = "distributed_test.py::_DistTestBase::"


@case(
    "switches.process_group",
    level=MUST,
    source=f"{DDP}._update_process_group",
    world=3,
    needs=("_update_process_group",),
    catalogue=("O08",),
    torch_tests=(f"{TESTS}test_ddp_update_process_group_new_group",),
)
def test_a_smaller_group_takes_over(rank):
    """
    After `_update_process_group` gradients are the mean over the new group, divided by its size; ranks outside it are not part of the reduction.

    Three ranks train together, then ranks 1 and 2 alone, then all three again; every step of those that take part is quadratic, with the rate 1/2048.
    """
    part = dist.new_group([1, 2])
    model = Scalars("w", dtype=torch.float64)
    ddp = rank.wrap(model)
    x = rank.batch(1, dtype=torch.float64)
    expected = torch.ones(1, dtype=torch.float64, device=rank.device)
    for group, members in ((None, (0, 1, 2)), (part, (1, 2))):
        if group is not None:
            ddp._update_process_group(group)
        if rank.index not in members:
            continue
        for _ in range(3):
            ddp.zero_grad()
            (ddp(x) ** 2 / 2).backward()
            with torch.no_grad():
                model.w -= model.w.grad / 2048
            square = rank.mean(lambda r: rank.batch(1, of=r, dtype=torch.float64)[0] ** 2, members)
            expected = expected - expected * square / 2048
            rank.law(f"the mean over {len(members)}", model.w, expected)


@case(
    "switches.group_change_rebuilds",
    level=OBSERVED,
    source=f"{DDP}._update_process_group",
    needs=("_update_process_group",),
    catalogue=("O08",),
    torch_tests=(f"{TESTS}test_ddp_update_process_group_no_find_unused",),
)
def test_a_new_group_rebuilds_the_buckets(rank):
    """
    After `_update_process_group` buckets are built anew from the order of the next iteration, and `_has_rebuilt_buckets` is false until then.

    Three Linear(512, 512) with a cap of 1 MiB.
    """
    ddp = rank.wrap(three_layers(), bucket_cap_mb=1)
    carried = rank.buckets(ddp)

    def step():
        carried.clear()
        ddp(torch.ones(1, 512, device=rank.device)).sum().backward()
        return ddp._has_rebuilt_buckets, ", ".join(carried)

    layers = "5 4, 3 2, 1 0"
    rank.law("rebuilt at the second iteration", [step(), step(), step()][1:], [(True, layers)] * 2)
    ddp._update_process_group(dist.new_group([0, 1]))
    rank.law("not rebuilt after the change", ddp._has_rebuilt_buckets, False)
    steps = [step() for _ in range(3)]
    rank.show("rebuilt", [rebuilt for rebuilt, _ in steps])
    rank.law("the buckets of the last step", steps[-1], (True, layers))


@case(
    "switches.output_clone",
    level=MUST,
    source=f"{DDP}._set_ddp_sink_clone",
    needs=("_set_ddp_sink_clone",),
    each={"find_unused": "find_unused_parameters", "static": "static_graph"},
    catalogue=("O09",),
    torch_tests=(f"{TESTS}test_ddp_sink_noclone",),
)
def test_outputs_are_cloned_unless_switched_off(rank, option):
    """
    Where DDP watches its outputs they are clones, so that a loss may be changed in place; after `_set_ddp_sink_clone(False)` that fails with RuntimeError, and otherwise gradients are the same.
    """
    ddp = rank.wrap(Scalars("w"), **{option: True})
    output = ddp(rank.batch(1))
    output += 1
    output.backward()
    mean = rank.mean(lambda r: rank.batch(1, of=r)[0])
    rank.law("changed in place, and right", ddp.module.w.grad, mean)
    ddp = rank.wrap(Scalars("w"), **{option: True})
    ddp._set_ddp_sink_clone(False)
    output = ddp(rank.batch(1))
    with rank.raises("in_place", RuntimeError, match="is a view and is being modified inplace"):
        output += 1
    ddp = rank.wrap(Scalars("w"), **{option: True})
    ddp._set_ddp_sink_clone(False)
    for _ in range(3):
        ddp.zero_grad()
        ddp(rank.batch(1)).backward()
        rank.law("without a clone, and right", ddp.module.w.grad, mean)
