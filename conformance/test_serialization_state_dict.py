"""What is in a DDP's state dict beside parameters, what it is refused, and how it is loaded into a DDP that trains."""

import torch
from ddp_conformance import MUST, case
from ddp_conformance.models import WithBuffers, linear
from torch import nn
from torch.nn.modules.utils import consume_prefix_in_state_dict_if_present

DDP = "DistributedDataParallel"


@case("serialization.buffers", level=MUST, source=DDP, catalogue=("N01",))
def test_buffers_are_saved_and_loaded(rank):
    """The state dict of a DDP has the module's buffers, too: loading it brings them back, and without the prefix the bare module takes them."""
    model = WithBuffers(b=rank.tensor(2))
    ddp = rank.wrap(model)
    saved = {name: value.clone() for name, value in ddp.state_dict().items()}
    rank.law("both are in it", sorted(saved), ["module.b", "module.weight"])
    nn.init.constant_(model.weight, 9)
    model.b.fill_(9)
    ddp.load_state_dict(saved)
    rank.law("both are back", [model.weight.data, model.b], [rank.tensor(1), rank.tensor(2)])
    consume_prefix_in_state_dict_if_present(saved, "module.")
    bare = WithBuffers(b=torch.zeros(1)).to(rank.device)
    bare.load_state_dict(saved)
    rank.law("the bare module takes the buffer", bare.b, rank.tensor(2))


@case("serialization.prefix_needed", level=MUST, source=DDP, catalogue=("N01",))
def test_the_prefix_has_to_fit(rank):
    """The bare module refuses a DDP's state dict and a DDP the bare module's, with RuntimeError: the prefix has to be taken off or put on."""
    model = linear(2)
    ddp = rank.wrap(model)
    with rank.raises("by_the_module", RuntimeError, match="Missing key"):
        model.load_state_dict(ddp.state_dict())
    with rank.raises("by_ddp", RuntimeError, match="Missing key"):
        ddp.load_state_dict(model.state_dict())


@case("serialization.trains_on", level=MUST, source=DDP, catalogue=("N01",))
def test_training_goes_on_after_loading(rank):
    """Loading a state dict writes into the parameters that are there, so that gradients are reduced as before."""
    model = linear(2)
    ddp = rank.wrap(model)
    weight = model.weight
    for step in range(3):
        ddp.zero_grad(set_to_none=True)
        ddp(rank.batch(2)).sum().backward()
        rank.law("the mean", model.weight.grad, rank.mean(lambda r: rank.batch(2, of=r)))
        ddp.load_state_dict({"module.weight": torch.full((1, 2), float(step), device=rank.device)})
        rank.law("the same parameter", model.weight is weight, True)
        rank.law("with what was loaded", weight.data, torch.full((1, 2), float(step), device=rank.device))
