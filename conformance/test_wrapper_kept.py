"""What the wrapper leaves as it is: gradients of frozen parameters, and in the state dict what is ignored."""

import torch
from ddp_conformance import OBSERVED, case
from ddp_conformance.models import Scalars
from torch import nn
from torch.nn.parallel import DistributedDataParallel

DDP = "DistributedDataParallel"


@case(
    "wrapper.frozen_gradients",
    level=OBSERVED,
    source=DDP,
    each={"before_wrapping": False, "after_wrapping": True},
    catalogue=("P04",),
    reports=("deepspeedai/DeepSpeed#3777",),
)
def test_the_gradient_of_a_frozen_parameter_is_left_alone(rank, later):
    """A gradient that a frozen parameter still has stays the rank's own in every iteration, be it frozen before wrapping or, with find_unused_parameters, after."""
    model = Scalars("a", "b")
    model.b.grad = rank.tensor(rank.index + 5)
    if not later:
        model.b.requires_grad_(False)
    ddp = rank.wrap(model, find_unused_parameters=later)
    model.b.requires_grad_(False)
    for _ in range(3):
        model.a.grad = None
        ddp(rank.batch(1)).backward()
        rank.law("the other gradient is the mean", model.a.grad, rank.mean(lambda r: rank.batch(1, of=r))[0])
        rank.law("the frozen one's is its own", model.b.grad, rank.tensor(rank.index + 5))


@case(
    "wrapper.state_dict_of_ignored",
    level=OBSERVED,
    source="DistributedDataParallel._set_params_and_buffers_to_ignore_for_model",
    needs=("_set_params_and_buffers_to_ignore_for_model",),
    catalogue=("L01", "N01"),
    reports=("hpcaitech/ColossalAI#2443",),
)
def test_the_state_dict_has_what_is_ignored(rank):
    """The state dict of a wrapper has ignored parameters and buffers like others, with the rank's own values, and loading it brings them back."""
    inner = Scalars("a", "b")
    inner.register_buffer("count", torch.zeros(1))
    model = nn.ModuleDict({"inner": inner})
    model.forward = lambda x: model["inner"](x)
    with torch.no_grad():
        inner.b.fill_(rank.index + 5)
        inner.count.fill_(rank.index + 7)
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["inner.b", "inner.count"])
    ddp = rank.wrap(model)
    saved = {name: value.clone() for name, value in ddp.state_dict().items()}
    expected = {
        "module.inner.a": rank.tensor(1.0),
        "module.inner.b": rank.tensor(rank.index + 5),
        "module.inner.count": rank.tensor(rank.index + 7),
    }
    rank.law("all entries, each with its value", saved, expected)
    with torch.no_grad():
        for tensor in (inner.a, inner.b, inner.count):
            tensor.zero_()
    ddp.load_state_dict(saved)
    rank.law("loading brings them back", [inner.a.data, inner.b.data, inner.count], list(expected.values()))
