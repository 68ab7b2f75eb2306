"""The wrapper stands for its module: inputs reach it as they are, its outputs keep their containers, modes reach it."""

from collections import OrderedDict, namedtuple

import torch
from ddp_conformance import MUST, OBSERVED, case
from ddp_conformance.models import Scalars, linear
from torch import nn

Pair = namedtuple("Pair", ("one", "two"))


class Keeps(Scalars):
    """Keeps what its forward was handed, and makes nothing of it."""

    def forward(self, *inputs, **keywords):
        self.handed = inputs, keywords
        return super().forward(torch.ones(1, device=self.a.device))


@case(
    "wrapper.inputs",
    level=MUST,
    source="DistributedDataParallel",
    each={
        "none": lambda x: ((), {}),
        "positional": lambda x: ((x(), [x(), 1], (x(),), {"k": x()}, Pair(x(), "s"), None), {}),
        "keywords": lambda x: ((), {"x": x(), "flag": True, "many": [x(), (x(), None)]}),
    },
)
def test_inputs_reach_the_module_as_they_are(rank, make):
    """Arbitrary positional and keyword inputs reach the module as they are, in the containers they are in, or none at all."""

    def given():
        return make(lambda: rank.batch(1))

    model = Keeps("a")
    ddp = rank.wrap(model)
    for _ in range(3):
        inputs, keywords = given()
        ddp(*inputs, **keywords).backward()
        rank.law("what was given", model.handed, given())


class Returns(Scalars):
    """Returns a * x twice, packed."""

    def __init__(self, pack):
        super().__init__("a")
        self.pack = pack

    def forward(self, x):
        return self.pack(super().forward(x))


def tensors(output):
    return list(output.values() if isinstance(output, dict) else output)


@case(
    "wrapper.containers",
    level=MUST,
    source="DistributedDataParallel",
    each={
        "tuple": lambda x: (x, x),
        "list": lambda x: [x, x],
        "namedtuple": lambda x: Pair(x, x),
        "dict": lambda x: {"b": x, "a": x},
        "ordered_dict": lambda x: OrderedDict(b=x, a=x),
    },
    catalogue=("E07", "U24"),
)
def test_find_unused_parameters_keeps_the_container(rank, pack):
    """With find_unused_parameters an output keeps its type, and a dictionary its keys in their order, in training and under no_grad."""
    ddp = rank.wrap(Returns(pack), find_unused_parameters=True)
    packed = pack(0)
    for _ in range(3):
        output = ddp(rank.batch(1))
        sum(tensors(output)).backward()
        with torch.no_grad():
            evaluated = ddp(rank.batch(1))
        rank.law("types", [type(output).__name__, type(evaluated).__name__], [type(packed).__name__] * 2)
        if isinstance(packed, dict):
            rank.law("keys", [list(output), list(evaluated)], [["b", "a"]] * 2)


@case("wrapper.modes", level=OBSERVED, source="nn/parallel/distributed.py: def train(self, mode=True)")
def test_modes_reach_the_module(rank):
    """eval() and train() of the wrapper reach the module and all that is in it, and return the wrapper."""
    model = nn.Sequential(linear(2), nn.Dropout(0.5))
    ddp = rank.wrap(model)
    for mode in (False, True):
        rank.law("the wrapper comes back", (ddp.train() if mode else ddp.eval()) is ddp, True)
        rank.law("the mode", [ddp.training, model.training, model[1].training], [mode] * 3)
