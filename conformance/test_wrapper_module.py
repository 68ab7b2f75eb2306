"""The wrapper is a module like others: hooks on it, a place inside another module, what loading tells, and zero_grad."""

import torch
from ddp_conformance import OBSERVED, case
from ddp_conformance.models import Scalars, WithBuffers, linear
from torch import nn

DDP = "DistributedDataParallel"


@case("wrapper.inside_a_module", level=OBSERVED, source=DDP, catalogue=("N01",))
def test_the_wrapper_may_be_part_of_a_module(rank):
    """A wrapper may be a submodule: the state dict of the whole has its entries under its name and `module.`, and the whole loads it again."""
    inner = WithBuffers(b=torch.zeros(1))
    whole = nn.ModuleDict({"ddp": rank.wrap(inner), "head": linear(1)})
    saved = {name: torch.full_like(value, 5.0) for name, value in whole.state_dict().items()}
    rank.law("names", sorted(saved), ["ddp.module.b", "ddp.module.weight", "head.weight"])
    told = whole.load_state_dict(saved)
    rank.law("nothing is missing or too much", [told.missing_keys, told.unexpected_keys], [[], []])
    rank.law("all is loaded", [inner.weight.data, inner.b], [rank.tensor(5.0), rank.tensor(5.0)])


@case("wrapper.loading_tells_keys", level=OBSERVED, source=DDP, catalogue=("N01",))
def test_loading_tells_what_is_missing(rank):
    """`load_state_dict(strict=False)` of the wrapper loads what fits, and tells which keys are missing and which too many, with their prefix."""
    model = Scalars("a", "b")
    ddp = rank.wrap(model)
    told = ddp.load_state_dict({"module.a": rank.tensor(5.0), "module.c": rank.tensor(6.0)}, strict=False)
    rank.law("what fits is loaded", model.a.data, rank.tensor(5.0))
    rank.law(
        "the others are told",
        [getattr(told, "missing_keys", None), getattr(told, "unexpected_keys", None)],
        [["module.b"], ["module.c"]],
    )


@case("wrapper.hooks", level=OBSERVED, source=DDP, catalogue=("B16",))
def test_hooks_on_the_wrapper_fire(rank):
    """Forward hooks on the wrapper fire once a forward, before and after it, and may replace its input and its output."""
    model = linear(1)
    ddp = rank.wrap(model)
    fired = []

    def before(module, inputs):
        fired.append("before")
        return (2 * inputs[0],)

    def after(module, inputs, output):
        fired.append("after")
        return 3 * output

    ddp.register_forward_pre_hook(before)
    ddp.register_forward_hook(after)
    for _ in range(3):
        model.zero_grad(set_to_none=True)
        ddp(rank.batch(1)).sum().backward()
        rank.law("the mean of six times the input", model.weight.grad, 6 * rank.mean(lambda r: rank.batch(1, of=r)))
    rank.law("once a forward", fired, ["before", "after"] * 3)


@case("wrapper.zero_grad", level=OBSERVED, source=DDP, each={"view": True, "no_view": False}, catalogue=("B01",))
def test_zero_grad_of_the_wrapper_clears_gradients(rank, is_view):
    """`zero_grad` of the wrapper sets the gradients to zero, or to None, and the next backward begins from there."""
    model = linear(1)
    ddp = rank.wrap(model, gradient_as_bucket_view=is_view)
    mean = rank.mean(lambda r: rank.batch(1, of=r))
    for to_none in (False, True, False, True, False):
        ddp(rank.batch(1)).sum().backward()
        rank.law("the mean of one backward", model.weight.grad, mean)
        ddp.zero_grad(set_to_none=to_none)
        rank.law("None or zero", model.weight.grad, None if to_none else torch.zeros(1, 1, device=rank.device))
