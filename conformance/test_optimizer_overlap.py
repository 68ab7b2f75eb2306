"""Optimizers that step inside backward, each parameter as soon as its gradient is reduced (a module of its own: their import takes a second)."""

import torch
from ddp_conformance import HAZARD, MUST, OBSERVED, case
from ddp_conformance.models import Quadratic, linear
from ddp_conformance.rank import as_it_is

FUSED = "DistributedDataParallel._register_fused_optim"
FSDP = ("build:fsdp",)
"""Torch imports it to look up an optimizer's functional form."""
IN_BACKWARD = "nn/parallel/distributed.py: def _setup_in_backward_optimizers(self)"
TESTS = "distributed_test.py::_DistTestBase::"


def factor(rank, micro_batches=1):
    """What a step at the rate 1/2048 leaves of a parameter of Quadratic: the gradient is the parameter times x^2."""
    return 1 - micro_batches * rank.mean(lambda r: rank.batch(1, of=r, dtype=torch.float64)[0] ** 2) / 2048


@case(
    "optimizer_overlap.fused_steps",
    level=MUST,
    source=FUSED,
    needs=FSDP,
    world=(2, 3),
    catalogue=("O01",),
    torch_tests=(f"{TESTS}test_ddp_hook_with_optimizer_parity_sgd",),
)
def test_a_fused_optimizer_steps_in_backward(rank):
    """
    With a fused optimizer registered, parameters have stepped by the mean of the ranks' gradients when backward returns, without any call to an optimizer.

    SGD over four iterations, from the first on.
    """
    model = Quadratic()
    ddp = rank.wrap(model)
    ddp._register_fused_optim(torch.optim.SGD, lr=1 / 2048)
    for count in range(1, 5):
        ddp.zero_grad()
        ddp(rank.batch(1, dtype=torch.float64)).backward()
        for name, parameter in model.named_parameters():
            rank.law(f"{name} has stepped", parameter, factor(rank) ** count)


@case(
    "optimizer_overlap.fused_subset",
    level=MUST,
    source=FUSED,
    needs=FSDP,
    catalogue=("O01",),
    torch_tests=(f"{TESTS}test_ddp_hook_with_optimizer_parity_adam_optimize_subset",),
)
def test_a_fused_optimizer_may_have_some_of_the_parameters(rank):
    """
    With `optim_params` the fused optimizer steps those parameters alone; the others get the mean in their gradients and stay.
    """
    model = Quadratic()
    ddp = rank.wrap(model)
    ddp._register_fused_optim(torch.optim.SGD, lr=1 / 2048, optim_params=[model.w])
    x = rank.batch(1, dtype=torch.float64)
    for count in range(1, 4):
        ddp.zero_grad()
        ddp(x).backward()
        rank.law("w has stepped", model.w, factor(rank) ** count)
        rank.law("v has not", model.v, torch.ones_like(model.v))
        square = rank.mean(lambda r: rank.batch(1, of=r, dtype=torch.float64)[0] ** 2)
        rank.law("v has its gradient", model.v.grad, square)


@case("optimizer_overlap.fused_only_one", level=MUST, source=FUSED, needs=FSDP, world=1, catalogue=("O01",))
def test_a_fused_optimizer_is_the_only_hook(rank):
    """
    A second fused optimizer is refused with RuntimeError, and so are a communication hook after a fused optimizer and the reverse.
    """
    ddp = rank.wrap(linear(2))
    ddp._register_fused_optim(torch.optim.SGD, lr=0.5)
    with rank.raises("second", RuntimeError, match="can only be called once"):
        ddp._register_fused_optim(torch.optim.SGD, lr=0.5)
    with rank.raises("hook_after", RuntimeError, match="can only be called once"):
        ddp.register_comm_hook(None, as_it_is)
    ddp = rank.wrap(linear(2))
    ddp.register_comm_hook(None, as_it_is)
    with rank.raises("hook_before", RuntimeError, match="can only be called once"):
        ddp._register_fused_optim(torch.optim.SGD, lr=0.5)


@case("optimizer_overlap.fused_no_sync", level=OBSERVED, source=FUSED, needs=FSDP, catalogue=("C06",))
def test_a_fused_optimizer_does_not_step_in_no_sync(rank):
    """
    Inside `no_sync` a fused optimizer does not step; the next synchronized backward steps by what has accumulated.

    The documentation calls this combination not supported.
    """
    model = Quadratic()
    ddp = rank.wrap(model)
    ddp._register_fused_optim(torch.optim.SGD, lr=1 / 2048)
    x = rank.batch(1, dtype=torch.float64)
    for count in range(1, 4):
        ddp.zero_grad()
        with ddp.no_sync():
            ddp(x).backward()
        rank.law("no step inside", model.w, factor(rank, 2) ** (count - 1))
        ddp(x).backward()
        rank.law("one step for both", model.w, factor(rank, 2) ** count)


@case("optimizer_overlap.fused_unknown", level=MUST, source=FUSED, needs=FSDP, world=1, catalogue=("O01",))
def test_an_optimizer_without_a_functional_form_is_refused(rank):
    """
    An optimizer that has no functional form is refused with ValueError.
    """
    ddp = rank.wrap(linear(2))
    with rank.raises("lbfgs", ValueError, match="does not have a functional"):
        ddp._register_fused_optim(torch.optim.LBFGS)


def in_backward(module, **options):
    from torch.distributed.optim import _apply_optimizer_in_backward

    _apply_optimizer_in_backward(torch.optim.SGD, module.parameters(), options)


NEEDS = ("torch.distributed.optim._apply_optimizer_in_backward",)


@case(
    "optimizer_overlap.in_backward",
    level=MUST,
    source=IN_BACKWARD,
    needs=(*NEEDS, "device:cuda"),
    lanes=("*:cuda",),
    each={"copies": False, "views": True},
    catalogue=("O02",),
    torch_tests=(f"{TESTS}test_ddp_apply_optim_in_backward",),
)
def test_an_optimizer_applied_in_backward_steps_and_drops_gradients(rank, views):
    """
    Where an optimizer was applied in backward before wrapping, parameters have stepped by the mean when backward returns, and their gradients are None.
    """
    model = Quadratic().to(rank.device)
    in_backward(model, lr=1 / 2048)
    ddp = rank.wrap(model, gradient_as_bucket_view=views)
    for count in range(1, 5):
        ddp(rank.batch(1, dtype=torch.float64)).backward()
        rank.law("w has stepped", model.w, factor(rank) ** count)
        rank.law("its gradient is None", model.w.grad, None)


@case(
    "optimizer_overlap.in_backward_divides_late",
    level=OBSERVED,
    source="distributed/algorithms/ddp_comm_hooks/optimizer_overlap_hooks.py: bucket.buffer().div_(process_group.size())",
    needs=(*NEEDS, "device:cuda"),
    lanes=("*:cuda",),
    catalogue=("U03",),
)
def test_an_optimizer_applied_in_backward_divides_after_the_sum(rank):
    """
    Where an optimizer was applied in backward, gradients are summed first and divided afterwards, so that float16 overflows where DDP alone would not.

    Gradients of 40000 on either of two ranks: the sum is infinite, the mean would be 40000.
    """
    model = linear(1, dtype=torch.float16).to(rank.device)
    in_backward(model, lr=1.0)
    ddp = rank.wrap(model)
    ddp(torch.full((1, 1), 40000.0, dtype=torch.float16, device=rank.device)).sum().backward()
    rank.law("the step is infinite", bool(torch.isinf(model.weight).all()), True)


@case(
    "optimizer_overlap.in_backward_needs_accelerator",
    level=HAZARD,
    source=IN_BACKWARD,
    needs=NEEDS,
    lanes=("gloo:cpu",),
    catalogue=("O02",),
)
def test_an_optimizer_applied_in_backward_needs_an_accelerator(rank):
    """
    On a machine without an accelerator, a model to which an optimizer was applied in backward fails in DDP, in its first iteration at the latest, although all of it is on the CPU.

    Before it was wrapped the same model trains.
    """
    model = linear(2)
    in_backward(model, lr=0.5)
    model(rank.batch(2)).sum().backward()
    rank.law("alone it trains", model.weight, 1 - rank.batch(2) / 2)
    failed = False
    try:
        ddp = rank.wrap(model)
        ddp(rank.batch(2)).sum().backward()
    except (RuntimeError, AssertionError):
        failed = True
    rank.law("in DDP it fails where there is no accelerator", failed, not torch.cuda.is_available())
