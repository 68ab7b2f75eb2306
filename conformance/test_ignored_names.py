"""Which names are ignored: those given, in full, in the module that they were given for, and in a copy of its wrapper."""

import copy

import torch
from ddp_conformance import MUST, case
from ddp_conformance.models import WithBuffers
from torch import nn
from torch.nn.parallel import DistributedDataParallel

DOCUMENTED = "DistributedDataParallel._set_params_and_buffers_to_ignore_for_model"
IGNORES = ("_set_params_and_buffers_to_ignore_for_model",)


class Layer(nn.Module):
    """Scalar weights and buffers whose names begin or end alike, all of one value; the forward adds all of them, times the input."""

    def __init__(self, value: float) -> None:
        super().__init__()
        for name in ("weight", "weight_more", "more_weight"):
            self.register_parameter(name, nn.Parameter(torch.full((1,), value)))
        for name in ("offset", "offset_more", "more_offset"):
            self.register_buffer(name, torch.full((1,), value))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = {name: buffer.clone() for name, buffer in self.named_buffers()}
        return (sum((*self.parameters(), *self.buffers())) * x).sum()


class Layers(nn.Module):
    """Layers `left`, `left_more`, `right` and, in a module of its own, `outer.left`; the forward adds them."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.left, self.left_more, self.right = (Layer(value) for _ in range(3))
        self.outer = nn.ModuleDict({"left": Layer(value)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.left(x) + self.left_more(x) + self.right(x) + self.outer["left"](x)


def ignore(model: nn.Module, *names: str) -> None:
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, list(names))


@case("ignored.whole_names", level=MUST, source=DOCUMENTED, needs=IGNORES, catalogue=("L01",))
def test_only_the_very_names_are_ignored(rank):
    """Ignored is what has the very name that was given: others whose names begin or end with it, or equal it in another module, are broadcast and reduced."""
    model = Layers(1.0 + rank.index)
    names = ("left.weight", "left.offset")
    ignore(model, *names)
    ddp = rank.wrap(model)
    own, first = rank.tensor(1.0 + rank.index), rank.tensor(1.0)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        rank.law(f"{name} at construction", tensor.data, (own if name in names else first).clone())
    for _, buffer in model.named_buffers():
        buffer.fill_(10 + rank.index)
    ddp(rank.batch(1)).backward()
    mean = rank.mean(lambda r: rank.batch(1, of=r))[0]
    for name, parameter in model.named_parameters():
        rank.law(f"the gradient of {name}", parameter.grad, rank.batch(1)[0] if name in names else mean.clone())
    for prefix, layer in model.named_modules():
        for name, seen in layer.seen.items() if isinstance(layer, Layer) else ():
            is_own = f"{prefix}.{name}" in names
            rank.law(f"{prefix}.{name} in the forward", seen, rank.tensor(10 + (rank.index if is_own else 0)))


@case("ignored.module_by_module", level=MUST, source=DOCUMENTED, needs=IGNORES, catalogue=("L01",))
def test_names_are_ignored_in_the_module_that_they_were_given_for(rank):
    """What is to be ignored in one module is broadcast and reduced in another that has the same names and is wrapped later."""
    first, second = Layers(1.0 + rank.index), Layers(1.0 + rank.index)
    ignore(first, "left.weight", "left.offset")
    rank.wrap(first)
    ddp = rank.wrap(second)
    for name, tensor in (*second.named_parameters(), *second.named_buffers()):
        rank.law(f"{name} is rank 0's", tensor.data, rank.tensor(1.0))
    ddp(rank.batch(1)).backward()
    rank.law("the gradient is the mean", second.left.weight.grad, rank.mean(lambda r: rank.batch(1, of=r))[0])


@case("serialization.copy_ignores_buffers", level=MUST, source=DOCUMENTED, needs=IGNORES, catalogue=("L01", "N03"))
def test_a_copy_leaves_ignored_buffers_alone(rank):
    """A forward of a copy leaves ignored buffers alone, and begins with rank 0's others."""
    model = nn.Sequential(WithBuffers(kept=torch.zeros(1), left=torch.zeros(1)))
    ignore(model, "0.left")
    again = copy.deepcopy(rank.wrap(model))
    inner = again.module[0]
    for step in range(3):
        inner.kept.fill_(10 * step + rank.index)
        inner.left.fill_(10 * step + rank.index)
        again(rank.batch(1)).backward()
        rank.law("rank 0's buffer", inner.seen["kept"], rank.tensor(10 * step))
        rank.law("the rank's own", inner.seen["left"], rank.tensor(10 * step + rank.index))
