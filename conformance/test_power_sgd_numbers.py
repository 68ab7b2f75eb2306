"""What PowerSGD makes of gradients that are zero, and of gradients in double precision."""

import torch
import torch.distributed as dist
from ddp_conformance import HAZARD, MUST, OBSERVED, case
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

FILE = "distributed/algorithms/ddp_comm_hooks/powerSGD_hook.py"
EPSILON = f"{FILE}: ``orthogonalization_epsilon`` can be a very small value"
SIZE = 16


class Two(nn.Module):
    """Two square parameters of ones: the gradient of `idle` is zero, that of `used` what the forward is handed."""

    def __init__(self):
        super().__init__()
        self.idle = nn.Parameter(torch.ones(SIZE, SIZE))
        self.used = nn.Parameter(torch.ones(SIZE, SIZE))

    def forward(self, gradient):
        return (self.idle * 0).sum() + (self.used * gradient).sum()


def trained(rank, **options):
    """The model after four iterations, of which the last two are compressed; every gradient of `used` is one number throughout."""
    ddp = rank.wrap(Two())
    ddp.register_comm_hook(PowerSGDState(None, start_powerSGD_iter=2, **options), powerSGD_hook)
    for _ in range(4):
        ddp.zero_grad()
        ddp(torch.full((SIZE, SIZE), float(rank.batch(1)), device=rank.device)).backward()
    return ddp.module


@case(
    "power_sgd.zero_gradient",
    level=MUST,
    source=EPSILON,
    catalogue=("J05",),
    reports=("pytorch/pytorch#55738",),
)
def test_with_an_epsilon_a_gradient_of_zeros_is_zeros(rank):
    """
    With an `orthogonalization_epsilon` a weight whose gradient is zero on every rank, as that of a layer without signal, gets zeros after the start of compression, and its neighbour the mean.
    """
    model = trained(rank, orthogonalization_epsilon=1e-8)
    rank.law("zeros", model.idle.grad, torch.zeros_like(model.idle.grad))
    mean = rank.mean(lambda r: rank.batch(1, of=r)[0])
    rank.law("the neighbour's mean", bool(((model.used.grad - mean).abs() <= 1e-4 * mean).all()), True)


@case(
    "power_sgd.zero_gradient_by_default",
    level=HAZARD,
    source=EPSILON,
    catalogue=("J05",),
    reports=("pytorch/pytorch#55738",),
)
def test_by_default_a_gradient_of_zeros_is_not_a_number(rank):
    """
    By default the epsilon is 0, and compression to rank 1 or 2 makes a weight's gradient NaN where it is zero on every rank: zeros are divided by their norm.
    """
    rank.law("not a number", bool(trained(rank).idle.grad.isnan().all()), True)


@case(
    "power_sgd.double_precision",
    level=OBSERVED,
    source=f"{FILE}: dtype = input_tensor.dtype",
    catalogue=("J05",),
    reports=("pytorch/pytorch#50985", "pytorch/pytorch#48902"),
)
def test_double_precision_is_compressed_and_remembered_in_double_precision(rank):
    """
    Gradients in double precision are compressed in double precision, and what is left out is remembered in it: all answers so far and the mean of the memory add up to all gradients so far, to twelve digits.
    """
    model = nn.Linear(SIZE, SIZE, bias=False, dtype=torch.float64)
    ddp = rank.wrap(model)
    state = PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)
    ddp.register_comm_hook(state, powerSGD_hook)
    diagonal = torch.diag(torch.arange(1.0, SIZE + 1, dtype=torch.float64, device=rank.device))
    total = torch.zeros_like(diagonal)
    for iteration in range(8):
        ddp.zero_grad()
        ddp(diagonal * (rank.index + 1)).backward(torch.eye(SIZE, dtype=torch.float64, device=rank.device))
        total += model.weight.grad if iteration > 1 else 0
    memory = state.error_dict[0].reshape(SIZE, SIZE).clone()
    dist.all_reduce(memory)
    missing = total + memory / rank.world_size - 6 * rank.mean(lambda r: diagonal * (r + 1))
    rank.law("twelve digits", bool((missing.abs() < 1e-10).all()), True)
    rank.differs("something is remembered", memory, torch.zeros_like(memory))
