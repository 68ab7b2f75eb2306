"""DDP's own mixed precision: computation and reduction in a narrow dtype, parameters and gradients in full precision outside."""

import torch
from ddp_conformance import HAZARD, MUST, OBSERVED, case
from ddp_conformance.models import linear
from torch import nn
from torch.nn.parallel import distributed

MIXED = "distributed._MixedPrecision"
NEEDS = ("mixed_precision", "torch.nn.parallel.distributed._MixedPrecision")
ON_CUDA = {"needs": (*NEEDS, "device:cuda"), "lanes": ("*:cuda",)}
TESTS = "distributed_test.py::_DistTestBase::test_ddp_native_mixed_precision_"


def mixed(**dtypes):
    return distributed._MixedPrecision(**dtypes)


class Seen(nn.Module):
    """A Linear(2, 1) with a buffer of 1.0; notes the dtypes that its forward meets."""

    def __init__(self):
        super().__init__()
        self.inner = linear(2)
        self.register_buffer("scale", torch.ones(1))
        self.register_buffer("count", torch.ones(1, dtype=torch.int64))
        self.met = ()

    def forward(self, x):
        self.met = (self.inner.weight.dtype, x.dtype, self.scale.dtype)
        return self.inner(x).sum()


@case(
    "precision.forward_in_narrow",
    level=MUST,
    source=MIXED,
    catalogue=("O03",),
    torch_tests=(f"{TESTS}no_grad_as_bucket_view_no_set_grad_none",),
    **ON_CUDA,
)
def test_forward_runs_in_the_narrow_dtype(rank):
    """
    With mixed precision the forward meets parameters and inputs in `param_dtype`; outside forward and backward parameters and their gradients are float32, and so is the state dict.
    """
    model = Seen()
    ddp = rank.wrap(model, mixed_precision=mixed(param_dtype=torch.float16, reduce_dtype=torch.float16))
    for _ in range(4):
        ddp.zero_grad()
        ddp(rank.batch(2)).backward()
        rank.law("the forward meets float16", model.met[:2], (torch.float16, torch.float16))
        rank.law("parameters are float32 outside", model.inner.weight.dtype, torch.float32)
        rank.law("the gradient is the mean, float32", model.inner.weight.grad, rank.mean(lambda r: rank.batch(2, of=r)))
    rank.law("so is the state dict", ddp.state_dict()["module.inner.weight"].dtype, torch.float32)


@case(
    "precision.buffers",
    level=MUST,
    source=MIXED,
    catalogue=("O03",),
    torch_tests=(f"{TESTS}grad_as_bucket_view_no_set_grad_none",),
    **ON_CUDA,
)
def test_buffers_are_cast_once(rank):
    """
    Buffers are cast to `buffer_dtype` when the module is wrapped, and stay so.
    """
    model = Seen()
    ddp = rank.wrap(model, mixed_precision=mixed(param_dtype=torch.float16, buffer_dtype=torch.bfloat16))
    rank.law("cast at construction", model.scale.dtype, torch.bfloat16)
    ddp(rank.batch(2)).backward()
    rank.law("still so after a step", model.scale.dtype, torch.bfloat16)
    rank.show("integer_buffer", model.count.dtype)


@case(
    "precision.divides_late",
    level=OBSERVED,
    source="distributed/algorithms/ddp_comm_hooks/mixed_precision_hooks.py: bucket.buffer().div_(process_group.size())",
    catalogue=("O03", "U03"),
    **ON_CUDA,
)
def test_mixed_precision_divides_after_the_sum(rank):
    """
    With mixed precision gradients are summed in `reduce_dtype` first and divided afterwards, so that float16 overflows where DDP alone would not.

    Gradients of 40000 on either of two ranks: the sum is infinite, the mean would be 40000.
    """
    model = linear(1)
    ddp = rank.wrap(model, mixed_precision=mixed(param_dtype=torch.float16, reduce_dtype=torch.float16))
    ddp(torch.full((1, 1), 40000.0, device=rank.device)).sum().backward()
    rank.law("the gradient is infinite", bool(torch.isinf(model.weight.grad).all()), True)


@case("precision.needs_accelerator", level=HAZARD, source=MIXED, needs=NEEDS, lanes=("gloo:cpu",), catalogue=("O03",))
def test_mixed_precision_needs_an_accelerator(rank):
    """
    Mixed precision does not work on a CPU: by release the constructor or the first forward fails.

    The documentation says nothing of devices.
    """
    failed = False
    try:
        rank.wrap(linear(2), mixed_precision=mixed(param_dtype=torch.float16))(rank.batch(2))
    except (RuntimeError, AssertionError, AttributeError):
        failed = True
    rank.law("constructor or forward fails where there is no accelerator", failed, not torch.cuda.is_available())
