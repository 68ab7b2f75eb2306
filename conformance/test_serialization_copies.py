"""A copy of a DDP does what its original does beside taking the mean: with buffers, ignored parameters, and no_sync."""

import copy
import pickle

from ddp_conformance import MUST, case
from ddp_conformance.models import Scalars, WithBuffers, linear
from torch import nn
from torch.nn.parallel import DistributedDataParallel

DDP = "DistributedDataParallel"


def unpickled(ddp):
    return pickle.loads(pickle.dumps(ddp))


@case(
    "serialization.copy_syncs_buffers",
    level=MUST,
    source=DDP,
    each={
        "deepcopy": (copy.deepcopy, True),
        "deepcopy_off": (copy.deepcopy, False),
        "pickle": (unpickled, True),
        "pickle_off": (unpickled, False),
    },
    catalogue=("D01", "N03"),
)
def test_a_copy_syncs_buffers_as_its_original_does(rank, chosen):
    """A forward of a copy begins with rank 0's buffers, and with the rank's own where the original was made with broadcast_buffers=False."""
    make_copy, broadcast = chosen
    again = make_copy(rank.wrap(WithBuffers(b=rank.tensor(0)), broadcast_buffers=broadcast))
    model = again.module
    for step in range(3):
        model.b.fill_(10 * step + rank.index)
        again(rank.batch(1)).backward()
        source = 0 if broadcast else rank.index
        rank.law("rank 0's buffer, or the rank's own", model.seen["b"], rank.tensor(10 * step + source))


@case(
    "serialization.copy_ignores",
    level=MUST,
    source=f"{DDP}._set_params_and_buffers_to_ignore_for_model",
    needs=("_set_params_and_buffers_to_ignore_for_model",),
    each={"deepcopy": copy.deepcopy, "pickle": unpickled},
    catalogue=("L01", "N03"),
)
def test_a_copy_leaves_ignored_parameters_local(rank, make_copy):
    """In a copy the gradient of an ignored parameter stays the rank's own, and the others are reduced."""
    model = nn.Sequential(linear(1), linear(1))
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["1.weight"])
    again = make_copy(rank.wrap(model))
    for _ in range(3):
        again.zero_grad(set_to_none=True)
        again(rank.batch(1)).sum().backward()
        kept, left = again.parameters()
        rank.law("the mean", kept.grad, rank.mean(lambda r: rank.batch(1, of=r)))
        rank.law("the ignored one's own", left.grad, rank.batch(1))


@case(
    "serialization.copy_has_no_sync",
    level=MUST,
    source=DDP,
    each={"deepcopy": copy.deepcopy, "pickle": unpickled},
    needs=("no_sync",),
    catalogue=("C01", "N03"),
)
def test_a_copy_accumulates_inside_its_no_sync(rank, make_copy):
    """Inside a copy's no_sync gradients stay local, and its next synced backward reduces what has accumulated."""
    again = make_copy(rank.wrap(Scalars("a")))
    for _ in range(2):
        again.zero_grad(set_to_none=True)
        with again.no_sync():
            again(rank.batch(1)).backward()
        rank.law("inside no_sync a gradient is the rank's own", again.module.a.grad, rank.batch(1)[0])
        again(rank.batch(1)).backward()
        mean = rank.mean(lambda r: rank.batch(1, of=r)[0])
        rank.law("the synced step reduces the sum", again.module.a.grad, 2 * mean)
