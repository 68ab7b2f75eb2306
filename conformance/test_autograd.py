"""DDP and the rest of autograd: hooks, layouts, higher-order gradients, and gradients that are not accumulated."""

import torch
from ddp_conformance import HAZARD, MUST, OBSERVED, case
from ddp_conformance.models import Scalars, linear
from torch import nn


def mean(rank, value=lambda x: x):
    return rank.mean(lambda r: value(rank.batch(1, of=r)))


@case(
    "autograd.grad_is_local",
    level=HAZARD,
    source="DistributedDataParallel",
    world=(2, 3),
    catalogue=("B07",),
    reports=("pytorch/pytorch#47562", "pytorch/pytorch#63812"),
)
def test_autograd_grad_reduces_nothing(rank):
    """`torch.autograd.grad` returns the rank's own gradient, without an error, and the next backward is reduced as ever."""
    model = linear(1)
    ddp = rank.wrap(model)
    for _ in range(4):
        model.weight.grad = None
        (got,) = torch.autograd.grad(ddp(rank.batch(1)).sum(), [model.weight])
        rank.law("the gradient returned is the rank's own", got, rank.batch(1))
        rank.law("none is accumulated", model.weight.grad, None)
        ddp(rank.batch(1)).sum().backward()
        rank.law("the next backward is reduced", model.weight.grad, mean(rank))
    rank.show("returned", got)


@case(
    "autograd.create_graph",
    level=OBSERVED,
    source="DistributedDataParallel",
    world=(2, 3),
    catalogue=("B11",),
    torch_tests=(
        "torch/testing/_internal/distributed/distributed_test.py::DistributedTest._DistTestBase::test_ddp_create_graph",
    ),
    reports=("pytorch/pytorch#63831", "pytorch/pytorch#63812"),
)
def test_create_graph_gives_the_mean_and_a_graph_of_the_ranks_own(rank):
    """With create_graph the gradient is the mean and can be derived again, but that second derivative is not reduced: each rank gets its own, divided by the world size."""
    model = linear(1)
    ddp = rank.wrap(model)
    ddp(rank.batch(1)).pow(2).sum().backward(create_graph=True)
    rank.law("the gradient is the mean", model.weight.grad, 2 * mean(rank, torch.square))
    rank.law("it can be derived again", model.weight.grad.requires_grad, True)
    (second,) = torch.autograd.grad(model.weight.grad.sum(), [model.weight])
    rank.show("second", second)
    own = 2 * rank.batch(1).square()
    rank.law("the second derivative is the rank's own over the world size", second, own / rank.world_size)


@case(
    "autograd.gradient_penalty",
    level=OBSERVED,
    source="DistributedDataParallel",
    world=(2, 3),
    catalogue=("B11",),
    reports=("pytorch/pytorch#47562", "pytorch/pytorch#63831"),
)
def test_a_penalty_on_the_gradient_of_inputs_is_reduced(rank):
    """A penalty made of gradients with respect to inputs, taken with `torch.autograd.grad`, is reduced by the backward that follows."""
    model = linear(1)
    ddp = rank.wrap(model)
    for _ in range(4):
        model.weight.grad = None
        inputs = rank.batch(1).requires_grad_()
        output = ddp(inputs).pow(2).sum()  # (w x)**2, so the input's gradient is 2 w**2 x and the penalty 4 w**4 x**2
        (of_inputs,) = torch.autograd.grad(output, [inputs], create_graph=True)
        of_inputs.pow(2).sum().backward()
        rank.law("the penalty's gradient is the mean", model.weight.grad, 16 * mean(rank, torch.square))
    rank.show("gradient", model.weight.grad)


class Strided(nn.Module):
    """A parameter (2, 3) that lies in memory column by column, and a convolution whose weight is channels last."""

    def __init__(self):
        super().__init__()
        self.columns = nn.Parameter(torch.ones(3, 2).t())
        self.conv = nn.Conv2d(2, 3, 2, bias=False).to(memory_format=torch.channels_last)
        nn.init.constant_(self.conv.weight, 1.0)

    def forward(self, x):
        return (self.columns * x).sum() + self.conv(torch.ones(1, 2, 2, 2, device=x.device) * x).sum()


@case(
    "autograd.layout",
    level=OBSERVED,
    source='include/torch/csrc/distributed/c10d/reducer.hpp: (see the "Gradient Layout Contract" in',
    each={"own": {}, "view": {"gradient_as_bucket_view": True}},
    catalogue=("B12",),
    torch_tests=(
        "test/distributed/test_c10d_nccl.py::DistributedDataParallelTest::test_grad_layout_1devicemodule_1replicaperprocess",
    ),
)
def test_a_gradient_is_laid_out_as_its_parameter(rank, options):
    """The gradient of a parameter that is not row by row in memory has the parameter's strides, in every iteration."""
    model = Strided()
    ddp = rank.wrap(model, **options)
    for _ in range(4):
        model.zero_grad(set_to_none=True)
        ddp(rank.batch(1)[0]).backward()
        for parameter in (model.columns, model.conv.weight):
            rank.law("strides are the parameter's", parameter.grad.stride(), parameter.stride())
            rank.law("the value is the mean", parameter.grad, torch.ones_like(parameter) * mean(rank).item())
    rank.show("strides", [model.columns.grad.stride(), model.conv.weight.grad.stride()])


@case(
    "autograd.module_hooks",
    level=OBSERVED,
    source="DistributedDataParallel",
    world=(1, 2),
    catalogue=("B16",),
    torch_tests=(
        "torch/testing/_internal/distributed/distributed_test.py::DistributedTest._DistTestBase::test_ddp_forward_backward_hook",
    ),
)
def test_module_hooks_fire_as_they_do_alone(rank):
    """Forward and backward hooks of the wrapped module fire once an iteration, as they do alone, and see the rank's own values."""
    ddp_model, alone = linear(1), linear(1).to(rank.device)
    ddp = rank.wrap(ddp_model)
    calls = {ddp_model: [], alone: []}
    for model, seen in calls.items():
        model.register_forward_pre_hook(lambda _, inputs, seen=seen: seen.append(("pre", inputs[0].item())))
        model.register_forward_hook(lambda _, inputs, output, seen=seen: seen.append(("post", output.item())))
        model.register_full_backward_hook(lambda _, i, output, seen=seen: seen.append(("backward", output[0].item())))
    for _ in range(4):
        for wrapped in (ddp, alone):
            wrapped(rank.batch(1)).pow(2).sum().backward()
    rank.show("calls", [list(call) for call in calls[ddp_model][:3]])
    rank.law("the same calls with the same values", calls[ddp_model], calls[alone])
    rank.law("three calls an iteration", len(calls[ddp_model]), 12)


@case("autograd.tensor_hooks", level=OBSERVED, source="DistributedDataParallel", world=(2, 3), catalogue=("B16",))
def test_tensor_hooks_see_the_local_gradient(rank):
    """A hook on a parameter, set before or after wrapping, sees the rank's own gradient, and what it makes of it is averaged."""
    model = Scalars("before", "after")
    seen = []
    model.before.register_hook(lambda gradient: seen.append(gradient.clone()) or 10 * gradient)
    ddp = rank.wrap(model)
    model.after.register_hook(lambda gradient: seen.append(gradient.clone()) or 10 * gradient)
    for _ in range(4):
        model.zero_grad(set_to_none=True)
        seen.clear()
        ddp(rank.batch(1)).backward()
        rank.law("hooks see the rank's own gradient", seen, [rank.batch(1).flatten()] * 2)
        expected = 10 * mean(rank).flatten()
        rank.law("ten times is averaged", [model.before.grad, model.after.grad], [expected] * 2)
    rank.show("gradients", [model.before.grad, model.after.grad])


@case(
    "autograd.accumulate_hooks",
    level=OBSERVED,
    source="DistributedDataParallel",
    world=(2, 3),
    needs=("torch.Tensor.register_post_accumulate_grad_hook",),
    catalogue=("B16",),
)
def test_post_accumulate_hooks_see_the_local_gradient(rank):
    """A hook that runs after a gradient was accumulated, set before or after wrapping, sees the rank's own, for buckets are copied back later."""
    model = Scalars("before", "after")
    seen = []
    model.before.register_post_accumulate_grad_hook(lambda parameter: seen.append(parameter.grad.clone()))
    ddp = rank.wrap(model)
    model.after.register_post_accumulate_grad_hook(lambda parameter: seen.append(parameter.grad.clone()))
    for _ in range(4):
        model.zero_grad(set_to_none=True)
        seen.clear()
        ddp(rank.batch(1)).backward()
        rank.law("hooks see the rank's own gradient", seen, [rank.batch(1).flatten()] * 2)
        rank.law("backward ends with the mean", model.before.grad, mean(rank).flatten())


@case(
    "autograd.functional_call",
    level=OBSERVED,
    source="torch.func.functional_call",
    needs=("torch.func.functional_call",),
    catalogue=("B17",),
    torch_tests=(
        "torch/testing/_internal/distributed/distributed_test.py::DistributedTest._DistTestBase::test_stateless_api_with_ddp",
    ),
)
def test_functional_call_leaves_the_module_as_it_is(rank):
    """`torch.func.functional_call` on a DDP computes with the tensors it is given: the module keeps its weights and gets no gradient, and the tensors' own gradients stay local."""
    model = linear(1)
    ddp = rank.wrap(model)
    given = torch.full((1, 1), 5.0, device=rank.device, requires_grad=True)
    output = torch.func.functional_call(ddp, {"module.weight": given}, (rank.batch(1),))
    rank.law("it computes with what it is given", output, 5 * rank.batch(1))
    output.sum().backward()
    rank.law("the module's weight is as it was", model.weight, torch.ones_like(model.weight))
    rank.law("the module's weight has no gradient", model.weight.grad, None)
    rank.law("the given tensor's gradient is local", given.grad, rank.batch(1))
    ddp(rank.batch(1)).sum().backward()
    rank.law("the next step is reduced", model.weight.grad, mean(rank))


@case(
    "autograd.used_outside_forward",
    level=MUST,
    source="DistributedDataParallel",
    world=(2, 3),
    each={"default": {}, "static_graph": {"static_graph": True}},
)
def test_a_parameter_may_be_used_outside_forward(rank, options):
    """A parameter that the loss uses outside the module's forward is reduced along with the others, with static_graph and by default."""
    model = Scalars("inside", "outside")
    ddp = rank.wrap(model, **options)
    for _ in range(4):
        model.zero_grad(set_to_none=True)
        (ddp(rank.batch(1), use="inside") + (model.outside * rank.batch(1)).sum()).backward()
        rank.law("both are the mean", [model.inside.grad, model.outside.grad], [mean(rank).flatten()] * 2)


@case("autograd.outside_with_find_unused", level=HAZARD, source="DistributedDataParallel")
def test_find_unused_parameters_refuses_a_parameter_used_outside_forward(rank):
    """With find_unused_parameters a parameter that the loss uses outside the module's forward is taken for unused, and backward raises."""
    model = Scalars("inside", "outside")
    ddp = rank.wrap(model, find_unused_parameters=True)
    loss = ddp(rank.batch(1), use="inside") + (model.outside * rank.batch(1)).sum()
    with rank.raises("backward", RuntimeError, match="Expected to mark a variable ready only once"):
        loss.backward()
