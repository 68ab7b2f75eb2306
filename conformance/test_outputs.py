"""What the wrapped module returns: handed on as it is, or as clones where DDP must see which outputs reach the loss."""

from collections import OrderedDict, namedtuple
from dataclasses import dataclass

import torch
from ddp_conformance import HAZARD, MUST, OBSERVED, case
from ddp_conformance.models import Scalars, linear


@dataclass
class Record:
    one: torch.Tensor
    two: torch.Tensor


class Plain:
    def __init__(self, one, two):
        self.one, self.two = one, two


class ModelOutput(OrderedDict):
    """A dictionary with attributes, as model libraries return it."""


Pair = namedtuple("Pair", ("one", "two"))

PACK = {
    "tuple": lambda one, two: (one, two),
    "list": lambda one, two: [one, two],
    "dict": lambda one, two: {"one": one, "two": two},
    "namedtuple": Pair,
    "ordered_dict": lambda one, two: OrderedDict(one=one, two=two),
    "nested": lambda one, two: {"deep": [(one,), {"two": two}], "number": 1},
    "dataclass": Record,
    "dict_subclass": lambda one, two: ModelOutput(one=one, two=two),
    "object": Plain,
}


class Returns(Scalars):
    """Returns the sums of a * x and of b * x, packed."""

    def __init__(self, pack):
        super().__init__("a", "b")
        self.pack = pack

    def forward(self, x):
        return self.pack(super().forward(x, use="a"), super().forward(x, use="b"))


def tensors(output):
    """All tensors of an output, in order, whatever holds them."""
    if torch.is_tensor(output):
        return [output]
    if isinstance(output, dict):
        output = list(output.values())
    elif isinstance(output, (Record, Plain)):
        output = [output.one, output.two]
    return [tensor for item in output for tensor in tensors(item)] if isinstance(output, (list, tuple)) else []


def train(rank, pack, *, use=2, steps=4, **options):
    """Steps whose loss adds up the first `use` outputs; yields step, module, output, the rank's own gradient, the mean."""
    model = Returns(pack)
    ddp = rank.wrap(model, **options)
    for step in range(steps):
        model.zero_grad(set_to_none=True)
        output = ddp(rank.batch(1))
        sum(tensors(output)[:use]).backward()
        yield step, model, output, rank.batch(1).flatten(), rank.mean(lambda r: rank.batch(1, of=r)).flatten()


KNOWN = {name: pack for name, pack in PACK.items() if name not in ("object", "dict_subclass")}
STATIC = {name: pack for name, pack in KNOWN.items() if name != "dataclass"}


@case(
    "outputs.stay_local",
    level=OBSERVED,
    source="DistributedDataParallel",
    world=(1, 2, 3),
    reports=(
        "ultralytics/ultralytics#18616",
        "ultralytics/yolov5#8892",
        "Lightning-AI/pytorch-lightning#12407",
        "NVIDIA/apex#696",
    ),
)
def test_outputs_and_losses_stay_local(rank):
    """Outputs and losses are the rank's own, before and after backward: only gradients are averaged."""
    ddp = rank.wrap(linear(1))
    output = ddp(rank.batch(1))
    loss = output.sum()
    rank.law("the output is what the module alone gives", output, rank.batch(1))
    loss.backward()
    rank.show("loss", loss)
    rank.law("after backward the loss is the rank's own", loss, rank.batch(1).sum())


@case(
    "outputs.same_object",
    level=OBSERVED,
    source="nn/parallel/distributed.py: We'll return the output object verbatim since it is a freeform",
    each={name: PACK[name] for name in ("tuple", "dict", "dataclass", "object")},
    catalogue=("U24",),
)
def test_the_very_same_object_is_returned(rank, pack):
    """By default the very object that the module returned comes out, whatever its type, and all its tensors are reduced."""
    made = []

    def keep(*outputs):
        made.append(pack(*outputs))
        return made[-1]

    for step, model, output, _, mean in train(rank, keep):
        rank.law(f"in iteration {step} the output is the module's own object", output is made[-1], True)
        rank.law(f"in iteration {step} both gradients are the mean", [model.a.grad, model.b.grad], [mean] * 2)


@case(
    "outputs.find_unused_containers",
    level=MUST,
    source="DistributedDataParallel",
    each=KNOWN,
    catalogue=("E07",),
    torch_tests=(
        "test/distributed/test_c10d_nccl.py::DistributedDataParallelTest::test_arbitrary_forward_return_value",
        "test/distributed/test_c10d_common.py::CommonDistributedDataParallelTest::test_dataclass_output",
    ),
    reports=("pytorch/pytorch#124666",),
)
def test_find_unused_parameters_sees_tensors_in_containers(rank, pack):
    """With find_unused_parameters all tensors in tuples, lists, dicts and dataclasses, nested or not, are seen and reduced."""
    for step, model, _, _, mean in train(rank, pack, find_unused_parameters=True):
        rank.law(f"in iteration {step} both gradients are the mean", [model.a.grad, model.b.grad], [mean] * 2)
    rank.show("gradients", [model.a.grad, model.b.grad])


@case(
    "outputs.find_unused_part",
    level=MUST,
    source="DistributedDataParallel",
    each={name: KNOWN[name] for name in ("tuple", "dict", "nested")},
    catalogue=("E06",),
    torch_tests=(
        "torch/testing/_internal/distributed/distributed_test.py::DistributedTest._DistTestBase::test_output_unused_in_loss_tuple_module",
        "torch/testing/_internal/distributed/distributed_test.py::DistributedTest._DistTestBase::test_output_unused_in_loss_dict_module",
    ),
    reports=("pytorch/pytorch#22436", "pytorch/pytorch#57081"),
)
def test_find_unused_parameters_bears_an_output_that_is_not_in_the_loss(rank, pack):
    """With find_unused_parameters an output may stay out of the loss: its parameters get no gradient, the others the mean."""
    for step, model, _, _, mean in train(rank, pack, use=1, find_unused_parameters=True):
        rank.law(f"in iteration {step} the output in the loss is reduced", model.a.grad, mean)
        rank.law(f"in iteration {step} the other has no gradient", model.b.grad, None)


@case(
    "outputs.find_unused_dataclass_part",
    level=HAZARD,
    source="DistributedDataParallel",
    catalogue=("E07",),
    reports=("pytorch/pytorch#124666",),
)
def test_an_output_of_a_dataclass_may_not_stay_out_of_the_loss(rank):
    """With find_unused_parameters and a dataclass, an output left out of the loss leaves all gradients local, and the next forward raises.

    DDP finds the tensors of a dataclass but cannot put its own in their place; the documentation excepts no container.
    """
    model = Returns(PACK["dataclass"])
    ddp = rank.wrap(model, find_unused_parameters=True)
    ddp(rank.batch(1)).one.backward()
    rank.show("gradients", [model.a.grad, model.b.grad])
    rank.law("the gradient stays local", model.a.grad, rank.batch(1).flatten())
    with rank.raises("next_forward", RuntimeError, match="Expected to have finished reduction in the prior iteration"):
        ddp(rank.batch(1))


@case(
    "outputs.default_part",
    level=HAZARD,
    source="DistributedDataParallel",
    each={name: PACK[name] for name in ("tuple", "dict", "dataclass", "object")},
    reports=("pytorch/pytorch#22436",),
)
def test_an_output_left_out_of_the_loss_stops_the_reduction(rank, pack):
    """By default an output left out of the loss leaves all gradients local, and only the next forward raises."""
    model = Returns(pack)
    ddp = rank.wrap(model)
    tensors(ddp(rank.batch(1)))[0].backward()
    rank.show("gradients", [model.a.grad, model.b.grad])
    rank.law("the gradient stays local", model.a.grad, rank.batch(1).flatten())
    with rank.raises("next_forward", RuntimeError, match="Expected to have finished reduction in the prior iteration"):
        ddp(rank.batch(1))


@case(
    "outputs.find_unused_object",
    level=HAZARD,
    source="DistributedDataParallel",
    catalogue=("E07",),
)
def test_find_unused_parameters_sees_nothing_in_an_object(rank):
    """With find_unused_parameters the tensors of an object of any other class are not seen: all parameters are taken for unused, and backward raises.

    The documentation speaks of all tensors contained in the return value.
    """
    model = Returns(PACK["object"])
    ddp = rank.wrap(model, find_unused_parameters=True)
    output = ddp(rank.batch(1))
    with rank.raises("backward", RuntimeError, match="Expected to mark a variable ready only once"):
        (output.one + output.two).backward()


@case(
    "outputs.static_containers",
    level=MUST,
    source="DistributedDataParallel",
    each=STATIC,
    catalogue=("F09",),
    torch_tests=(
        "torch/testing/_internal/distributed/distributed_test.py::DistributedTest._DistTestBase::test_ddp_static_graph_nested_types",
    ),
)
def test_static_graph_keeps_the_container_and_reduces_what_is_in_it(rank, pack):
    """With static_graph outputs keep their type in every iteration, tuples, lists and dicts nested or not, and are reduced."""
    for step, model, output, _, mean in train(rank, pack, static_graph=True):
        rank.law(f"in iteration {step} both gradients are the mean", [model.a.grad, model.b.grad], [mean] * 2)
        rank.law(f"in iteration {step} the type is the module's", type(output) is type(pack(0, 0)), True)


@case(
    "outputs.static_unknown",
    level=HAZARD,
    source="DistributedDataParallel",
    each={name: PACK[name] for name in ("dataclass", "dict_subclass", "object")},
    catalogue=("U14",),
    reports=(
        "pytorch/pytorch#124666",
        "pytorch/pytorch#106690",
        "huggingface/transformers#25357",
        "huggingface/transformers#45519",
        "Lightning-AI/pytorch-lightning#18086",
        "Lightning-AI/pytorch-lightning#20704",
    ),
)
def test_static_graph_does_not_reduce_what_an_unknown_container_holds(rank, pack):
    """With static_graph and a dataclass, a dict's subclass or an object as output, gradients stay local, without an error: in the first iteration, and since torch 2.1 in all others too.

    DDP puts off the first reduction until a node of its own, which it adds to the outputs that it finds, says that backward
    ends. In such an output it finds none.
    """
    seen = []
    for step, model, _, own, _ in train(rank, pack, static_graph=True):
        seen.append(model.a.grad.item())
        if step == 0:
            rank.law("in the first iteration both gradients are local", [model.a.grad, model.b.grad], [own] * 2)
    rank.show("gradients", seen)


@case(
    "outputs.static_part",
    level=HAZARD,
    source="DistributedDataParallel",
    catalogue=("U17",),
    reports=("pytorch/pytorch#97030",),
)
def test_static_graph_does_not_bear_an_output_that_is_not_in_the_loss(rank):
    """With static_graph an output left out of the loss is borne in the first iteration, leaves all gradients local in the second, and raises in the third forward.

    The documentation says that static_graph supports unused parameters; it does where they are unused in the forward.
    """
    seen = []
    with rank.raises("forward", RuntimeError, match="Expected to have finished reduction in the prior iteration"):
        for _, model, _, _, _ in train(rank, PACK["tuple"], use=1, static_graph=True):
            seen.append(model.a.grad.clone())
    mean = rank.mean(lambda r: rank.batch(1, of=r)).flatten()
    rank.show("gradients", seen)
    rank.law("the mean first, then the rank's own", seen, [mean, rank.batch(1).flatten()])


@case(
    "outputs.pass_through_the_sink",
    level=OBSERVED,
    source="nn/parallel/distributed.py: class _DDPSink(Function):",
    each={"find_unused": {"find_unused_parameters": True}, "static_graph": {"static_graph": True}},
    catalogue=("U24",),
)
def test_outputs_pass_through_a_node_of_ddps_own(rank, options):
    """With find_unused_parameters outputs are clones that lead through a node of DDP's own, with static_graph in the first iteration only."""
    nodes, same = [], []
    inner = []

    def keep(one, two):
        inner[:] = [one, two]
        return one, two

    for _, _, output, _, _ in train(rank, keep, **options):
        nodes.append(output[0].grad_fn.name().removesuffix("Backward"))
        same.append(output[0] is inner[0])
    rank.show("nodes", nodes)
    rank.show("same_tensor", same)


@case(
    "outputs.without_gradient",
    level=OBSERVED,
    source="nn/parallel/distributed.py: Do not touch tensors that have no grad_fn",
    each={"default": {}, "find_unused": {"find_unused_parameters": True}, "static_graph": {"static_graph": True}},
    catalogue=("F09", "U24"),
    torch_tests=(
        "torch/testing/_internal/distributed/distributed_test.py::DistributedTest._DistTestBase::test_ddp_returns_tensor_with_no_grad",
    ),
)
def test_an_output_without_a_gradient_is_handed_on(rank, options):
    """A tensor that carries no gradient comes out as the same object, and numbers and None beside it come out as they are."""
    constant = torch.ones(2, device=rank.device)
    for step, model, output, _, mean in train(rank, lambda one, two: (one + two, constant, 7, None), use=1, **options):
        rank.law(f"in iteration {step} the constant is the same object", output[1] is constant, True)
        rank.law(f"in iteration {step} number and None are as they were", output[2:], (7, None))
        rank.law(f"in iteration {step} the gradient is the mean", model.a.grad, mean)
