"""DDP looks at the model once, when it wraps it: what changes about parameters afterwards it does not see."""

import copy

import torch
from ddp_conformance import HAZARD, MUST, OBSERVED, case
from ddp_conformance.models import Scalars, linear

FLAGS = {"default": {}, "find_unused": {"find_unused_parameters": True}, "static_graph": {"static_graph": True}}


def train(rank, ddp, *, steps=4, **use):
    """Backward over the rank's own x, W*(r+1), with gradients cleared before each step; yields after every backward."""
    for step in range(steps):
        for parameter in ddp.module.parameters():
            parameter.grad = None
        x = rank.batch(1, dtype=next(ddp.module.parameters()).dtype)
        ddp(x, **use).sum().backward()
        yield step


def own(rank, dtype=torch.float32):
    return rank.batch(1, dtype=dtype).flatten()


def mean(rank, dtype=torch.float32):
    return rank.mean(lambda r: rank.batch(1, of=r, dtype=dtype)).flatten()


class Grows(Scalars):
    """Scalars that learn of more names later."""

    def add(self, name, value):
        self.names = (*self.names, name)
        self.register_parameter(name, torch.nn.Parameter(torch.full_like(self.a, value)))


@case(
    "after_wrapping.added_parameter",
    level=HAZARD,
    source="DistributedDataParallel",
    each=FLAGS,
    catalogue=("P01",),
)
def test_an_added_parameter_is_neither_broadcast_nor_reduced(rank, options):
    """A parameter added after wrapping keeps its rank's own value and gradient in every iteration, without an error."""
    model = Grows("a")
    ddp = rank.wrap(model, **options)
    model.add("late", float(rank.index))
    rank.law("it keeps its rank's own value", model.late, rank.tensor(rank.index))
    for step in train(rank, ddp):
        rank.law(f"in iteration {step} it keeps its rank's own gradient", model.late.grad, own(rank))
        rank.law(f"in iteration {step} the other gradient is the mean", model.a.grad, mean(rank))
    rank.show("gradients", [model.a.grad, model.late.grad])


@case(
    "after_wrapping.replaced_parameter",
    level=HAZARD,
    source="DistributedDataParallel",
    each={"find_unused": FLAGS["find_unused"], "static_graph": FLAGS["static_graph"]},
    catalogue=("P02",),
    reports=("pytorch/pytorch#12603",),
)
def test_a_replaced_parameter_stays_local_for_ever(rank, options):
    """Where unused parameters are allowed, one that was replaced after wrapping stays local in every iteration, without an error."""
    model = Scalars("a", "b")
    ddp = rank.wrap(model, **options)
    model.b = torch.nn.Parameter(torch.ones_like(model.b))
    for step in train(rank, ddp):
        rank.law(f"in iteration {step} the new parameter's gradient is local", model.b.grad, own(rank))
    rank.show("gradients", [model.a.grad, model.b.grad])


@case(
    "after_wrapping.replaced_is_missed",
    level=HAZARD,
    source="DistributedDataParallel",
    catalogue=("P02",),
    reports=("pytorch/pytorch#12603",),
)
def test_a_replaced_parameter_is_missed_one_iteration_later(rank):
    """By default nothing is reduced in the iteration after a parameter was replaced, and only the next forward says so.

    DDP waits for the gradient of the parameter that it knew: what it hears of is an unused parameter.
    """
    model = Scalars("a", "b")
    ddp = rank.wrap(model)
    model.b = torch.nn.Parameter(torch.ones_like(model.b))
    for _ in train(rank, ddp, steps=1):
        rank.law("the new parameter's gradient is local", model.b.grad, own(rank))
        rank.law("so is that of the parameter in the same bucket", model.a.grad, own(rank))
    with rank.raises("next_forward", RuntimeError, match="Expected to have finished reduction in the prior iteration"):
        ddp(rank.batch(1))


@case(
    "after_wrapping.changed_dtype",
    level=HAZARD,
    source="DistributedDataParallel",
    each={"double": ("double",), "bfloat16": ("bfloat16",), "double_and_back": ("double", "float")},
    catalogue=("P03",),
    reports=("pytorch/pytorch#104336", "Lightning-AI/pytorch-lightning#17937"),
)
def test_a_module_that_changed_dtype_is_no_longer_reduced(rank, changes):
    """After `ddp.double()` gradients stay local in every iteration, even when the module was changed back, without an error.

    The parameters are the same objects, but autograd accumulates their gradients elsewhere from then on. Moving the module to
    another device does the same.
    """
    model = Scalars("a", "b")
    ddp = rank.wrap(model)
    for change in changes:
        getattr(ddp, change)()
    for step in train(rank, ddp):
        rank.law(f"in iteration {step} the gradient is local", model.a.grad, own(rank, model.a.dtype))
    rank.show("gradients", [model.a.grad, model.b.grad])


@case(
    "after_wrapping.data_swap",
    level=OBSERVED,
    source="DistributedDataParallel",
    world=(1, 2),
    catalogue=("P06",),
)
def test_new_data_of_the_same_kind_is_harmless(rank):
    """A parameter whose `.data` was swapped for a tensor of the same kind is reduced as before."""
    model = Scalars("a", "b")
    ddp = rank.wrap(model)
    for step in train(rank, ddp):
        rank.law(f"in iteration {step} the gradient is the mean", model.a.grad, mean(rank))
        model.a.data = torch.full_like(model.a.data, float(step + 2))
    rank.show("gradients", [model.a.grad, model.b.grad])


@case(
    "after_wrapping.frozen_later",
    level=HAZARD,
    source="DistributedDataParallel",
    catalogue=("P04",),
    reports=("JDAI-CV/fast-reid#178",),
)
def test_a_parameter_frozen_later_is_missed_one_iteration_later(rank):
    """By default nothing is reduced in the iteration after a parameter was frozen, and only the next forward says so."""
    model = Scalars("a", "b")
    ddp = rank.wrap(model)
    for _ in train(rank, ddp, steps=2):
        rank.law("before, the gradient is the mean", model.a.grad, mean(rank))
    model.b.requires_grad_(False)
    for _ in train(rank, ddp, steps=1):
        rank.law("afterwards the other parameter's gradient is local", model.a.grad, own(rank))
        rank.law("the frozen one has none", model.b.grad, None)
    with rank.raises("next_forward", RuntimeError, match="Expected to have finished reduction in the prior iteration"):
        ddp(rank.batch(1))


@case(
    "after_wrapping.frozen_with_find_unused",
    level=OBSERVED,
    source="DistributedDataParallel",
    catalogue=("P04",),
    reports=("JDAI-CV/fast-reid#178",),
)
def test_find_unused_parameters_bears_a_parameter_frozen_later(rank):
    """With find_unused_parameters a parameter may be frozen after wrapping: the others are reduced as before."""
    model = Scalars("a", "b")
    ddp = rank.wrap(model, find_unused_parameters=True)
    model.b.requires_grad_(False)
    for step in train(rank, ddp):
        rank.law(f"in iteration {step} the other gradient is the mean", model.a.grad, mean(rank))
        rank.law(f"in iteration {step} the frozen one has none", model.b.grad, None)
    rank.show("gradients", [model.a.grad, model.b.grad])


@case(
    "after_wrapping.unfrozen_later",
    level=HAZARD,
    source="DistributedDataParallel",
    each=FLAGS,
    catalogue=("P05",),
    reports=("JDAI-CV/fast-reid#178",),
)
def test_a_parameter_unfrozen_later_stays_local_for_ever(rank, options):
    """A parameter that was frozen when DDP wrapped it and is trained later stays local in every iteration, without an error."""
    model = Scalars("a", "b")
    model.b.requires_grad_(False)
    ddp = rank.wrap(model, **options)
    model.b.requires_grad_(True)
    for step in train(rank, ddp):
        rank.law(f"in iteration {step} its gradient is local", model.b.grad, own(rank))
        rank.law(f"in iteration {step} the other gradient is the mean", model.a.grad, mean(rank))
    rank.show("gradients", [model.a.grad, model.b.grad])


@case(
    "after_wrapping.wrapper_dropped",
    level=HAZARD,
    source="include/torch/csrc/distributed/c10d/reducer.hpp: remove_autograd_hooks",
    catalogue=("B18",),
)
def test_a_wrapper_dropped_before_backward_reduces_nothing(rank):
    """When the DDP object is gone before backward, as in `DDP(model)(x).backward()`, gradients stay local, without an error."""
    model = linear(1)
    loss = rank.wrap(model)(rank.batch(1)).sum()
    loss.backward()
    rank.show("gradient", model.weight.grad)
    rank.law("the gradient is local", model.weight.grad, rank.batch(1))


@case(
    "after_wrapping.wrapper_dropped_is_missed",
    level=OBSERVED,
    source="nn/parallel/distributed.py: class _DDPSink(Function):",
    each={name: options for name, options in FLAGS.items() if options},
    catalogue=("B18",),
)
def test_a_wrapper_dropped_before_backward_is_missed_where_outputs_lead_through_it(rank, options):
    """With find_unused_parameters or static_graph outputs lead back to the DDP object: a backward after it is gone fails since torch 2.1, and was reduced before, but is never silently local."""
    model = linear(1)
    loss = rank.wrap(model, **options)(rank.batch(1)).sum()
    try:
        loss.backward()
        rank.show("backward", "returns")
    except AttributeError as error:
        rank.show("backward", type(error))
    rank.show("gradient", model.weight.grad)
    rank.differs("the gradient is not the rank's own", model.weight.grad, rank.batch(1))


@case(
    "after_wrapping.wrapped_again",
    level=OBSERVED,
    source="include/torch/csrc/distributed/c10d/reducer.hpp: remove_autograd_hooks",
    world=(1, 2),
    catalogue=("B18",),
)
def test_a_module_can_be_wrapped_again(rank):
    """A module whose DDP failed and was deleted can be wrapped again, and is reduced once."""
    model = Scalars("a", "b")
    ddp = rank.wrap(model)
    ddp(rank.batch(1), use="a").backward()  # b gets no gradient, so this DDP is left in the middle of an iteration
    with rank.raises("first_wrapper", RuntimeError, match="Expected to have finished reduction in the prior iteration"):
        ddp(rank.batch(1))
    del ddp
    for step in train(rank, rank.wrap(model)):
        rank.law(f"in iteration {step} the gradient is the mean", model.a.grad, mean(rank))


@case(
    "after_wrapping.wrapped_twice",
    level=OBSERVED,
    source="DistributedDataParallel",
    world=(2, 3),
    reports=("pytorch/pytorch#170678", "huggingface/transformers#10583"),
)
def test_wrapping_twice_reduces_twice_and_changes_no_value(rank):
    """A DDP inside a DDP gives the same means at twice the number of all-reduces."""
    once, twice = linear(1), linear(1)
    ddp = rank.wrap(once)
    nested = rank.wrap(rank.wrap(twice))
    ran = []
    for step in range(4):
        for model, wrapped in ((once, ddp), (twice, nested)):
            wrapped.zero_grad()
            loss = wrapped(rank.batch(1)).sum()
            before = rank.collectives()
            loss.backward()
            ran.append(rank.collectives() - before)
            expected = rank.mean(lambda r: rank.batch(1, of=r))
            rank.law(f"in iteration {step} the gradient is the mean", model.weight.grad, expected)
    rank.law("two all-reduces take the place of one", ran, [1, 2] * 4)


@case(
    "after_wrapping.own_copy",
    level=MUST,
    source="DistributedDataParallel",
)
def test_ddp_trains_the_module_it_was_given(rank):
    """DDP makes no copy: the module it was given is the one it trains, and parameters keep their identity."""
    model = linear(1)
    parameter = model.weight
    ddp = rank.wrap(model)
    rank.law("the module is the one given", ddp.module is model, True)
    rank.law("the parameter is the same object", next(ddp.parameters()) is parameter, True)
    untouched = copy.deepcopy(model)
    ddp(rank.batch(1)).sum().backward()
    rank.law("a copy of the module gets no gradient", untouched.weight.grad, None)
    rank.law("the module itself gets the mean", model.weight.grad, rank.mean(lambda r: rank.batch(1, of=r)))
