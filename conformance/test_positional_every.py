"""Every parameter is compared, on every rank and in every group: which one differs, how, and where does not matter."""

from datetime import timedelta

import torch
import torch.distributed as dist
from ddp_conformance import MUST, case
from torch import nn

VERIFIED = "include/torch/csrc/distributed/c10d/reducer.hpp: respect to no. of params and matching dtype/size/layout"
SIZES = "appears not to match sizes of the same param in process 0"


def refusal(wrap):
    """The message of the RuntimeError that wrapping ends with, or "": a rank that is as rank 0 may wait in vain for the other."""
    try:
        wrap()
    except RuntimeError as error:
        return str(error)
    return ""


@case(
    "positional_matching.any_parameter",
    level=MUST,
    source=VERIFIED,
    each={"first": 0, "middle": 1, "last": 2},
    world=3,
    group_timeout=1,
    lanes=("gloo:*",),
    catalogue=("A17",),
    reports=("pytorch/pytorch#73547",),
)
def test_any_parameter_of_another_shape_is_refused(rank, place):
    """Whichever of several parameters has another shape, be it that rows and columns are exchanged, the rank that differs is refused, though only the last one does."""
    shapes = [(2, 3)] * 3
    if rank.index == 2:
        shapes[place] = (3, 2)
    model = nn.ParameterList(nn.Parameter(torch.ones(shape)) for shape in shapes)
    told = refusal(lambda: rank.wrap(model))
    if rank.index == 2:
        rank.law("it is refused", told != "", True)
        rank.show("message", SIZES if SIZES in told else "other message")


@case(
    "positional_matching.in_a_group",
    level=MUST,
    source=VERIFIED,
    each={"shape": (3,), "count": (2, 2)},
    world=3,
    lanes=("gloo:*",),
    catalogue=("A16", "A17", "A04"),
)
def test_members_of_a_group_are_compared(rank, sizes):
    """In a process group of its own a member that differs from its first one, in a shape or in the number of parameters, is refused."""
    group = dist.new_group([1, 2], timeout=timedelta(seconds=1))
    if rank.index == 0:
        return
    model = nn.ParameterList(nn.Parameter(torch.ones(size)) for size in (sizes if rank.index == 2 else (2,)))
    told = refusal(lambda: rank.wrap(model, process_group=group))
    if rank.index == 2:
        rank.law("it is refused", told != "", True)
        rank.show("message", next((each for each in (SIZES, "expects same model") if each in told), "other message"))
