"""What a PowerSGD state may be told: no memory of errors, no warm start, equal shapes in one batch, a group; and convolutions."""

import torch
import torch.distributed as dist
from ddp_conformance import MUST, case
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

FILE = "distributed/algorithms/ddp_comm_hooks/powerSGD_hook.py"
SIZE = 16


class Tables(nn.Module):
    """Parameters of ones, whose gradients are the tensors that the forward is handed."""

    def __init__(self, *shapes):
        super().__init__()
        self.all = nn.ParameterList(nn.Parameter(torch.ones(shape)) for shape in shapes)

    def forward(self, gradients):
        return sum((parameter * each).sum() for parameter, each in zip(self.all, gradients, strict=True))


def diagonal(rank, of=None, halving=False):
    """A matrix of full rank; with `halving` each number is half of the one before, and the first stands out."""
    numbers = 2.0 ** -torch.arange(SIZE) if halving else torch.arange(1.0, SIZE + 1)
    return torch.diag(rank.batch(SIZE, of=of)[0] * numbers.to(rank.device))


def answers(rank, ddp, state, gradients, iterations):
    """The gradients after each of so many iterations, all with the same gradients of their own."""
    ddp.register_comm_hook(state, powerSGD_hook)
    seen = []
    for _ in range(iterations):
        ddp.zero_grad()
        ddp(gradients).backward()
        seen.append([parameter.grad.clone() for parameter in ddp.module.all])
    return seen


def matrix_rank(gradient):
    singular = torch.linalg.svdvals(gradient.reshape(gradient.shape[0], -1))
    return int((singular > 1e-4 * singular[0]).sum())


def near(got, expected):
    return torch.allclose(got, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))


@case(
    "power_sgd.convolution",
    level=MUST,
    source=f"{FILE}: For each tensor M, creates two low-rank tensors P and Q for decomposing M,",
    catalogue=("J05",),
)
def test_a_convolution_is_compressed_as_a_matrix(rank):
    """The weight of a convolution is compressed, too: seen as a matrix with a row for each output channel its gradient has the chosen matrix rank after the start, and the plain mean before."""
    shape = (SIZE, 4, 2, 2)
    ddp = rank.wrap(Tables(shape))
    state = PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)
    seen = answers(rank, ddp, state, [diagonal(rank).reshape(shape)], 4)
    mean = rank.mean(lambda r: diagonal(rank, of=r)).reshape(shape)
    rank.law("the plain mean before the start", seen[1][0], mean)
    rank.law("full rank before, the chosen one after", [matrix_rank(each[0]) for each in seen], [SIZE, SIZE, 1, 1])


@case(
    "power_sgd.no_error_feedback",
    level=MUST,
    source=f"{FILE}: Error feedback is usually crucial for both for convergence and generalization,",
    each={"with": True, "without": False},
    catalogue=("J05",),
)
def test_without_error_feedback_nothing_is_remembered(rank, feedback):
    """Only with error feedback does the state remember what compression left out; without it nothing is remembered."""
    ddp = rank.wrap(Tables((SIZE, SIZE)))
    state = PowerSGDState(None, start_powerSGD_iter=2, use_error_feedback=feedback)
    answers(rank, ddp, state, [diagonal(rank)], 4)
    rank.law("something is remembered", any(bool(error.any()) for error in state.error_dict.values()), feedback)


@case(
    "power_sgd.warm_start",
    level=MUST,
    source=f"{FILE}: Warm-start reuses P(s) and Q(s) from the previous iteration.",
    each={"warm": True, "cold": False},
    catalogue=("J05",),
)
def test_a_warm_start_goes_on_from_the_iteration_before(rank, warm):
    """
    With warm start each iteration goes on with the matrices of the one before, so that for gradients that stay the same the answer becomes the best of its rank; without it each begins anew and does not.

    Each singular value is half of the one before, so 24 iterations bring the largest to six digits. Error feedback is off.
    """
    ddp = rank.wrap(Tables((SIZE, SIZE)))
    state = PowerSGDState(None, start_powerSGD_iter=2, use_error_feedback=False, warm_start=warm)
    last = answers(rank, ddp, state, [diagonal(rank, halving=True)], 26)[-1][0]
    best = torch.zeros_like(last)
    best[0, 0] = rank.mean(lambda r: diagonal(rank, of=r, halving=True))[0, 0]
    rank.law("the answer is the best of rank 1", near(last, best), warm)


@case(
    "power_sgd.same_shapes",
    level=MUST,
    source=f"{FILE}: controls whether to compress and decompress tensors with same shape in a batched operation",
    each={"one_by_one": False, "batched": True},
    catalogue=("J05",),
)
def test_tensors_of_the_same_shape_are_compressed_each_for_itself(rank, batched):
    """
    Tensors of the same shape are compressed each for itself, in one batch or one by one: where gradients are of rank 1 the answers are their means.

    Three weights, two of one shape; to one part in ten thousand, for the compression itself rounds.
    """
    shapes = ((SIZE, SIZE), (2 * SIZE, SIZE), (SIZE, SIZE))

    def own(r):
        ones = [torch.ones(shape, device=rank.device) * float(rank.batch(1, of=r)) for shape in shapes]
        return [(number + 1) * each for number, each in enumerate(ones)]

    ddp = rank.wrap(Tables(*shapes))
    state = PowerSGDState(None, start_powerSGD_iter=2, batch_tensors_with_same_shape=batched)
    seen = answers(rank, ddp, state, own(rank.index), 5)
    for number in range(3):
        mean = rank.mean(lambda r, number=number: own(r)[number])
        rank.law("each is its own mean", [near(each[number], mean) for each in seen], [True] * 5)


@case(
    "power_sgd.in_a_group",
    level=MUST,
    source=f"{FILE}: group_to_use",
    world=3,
    catalogue=("A04", "J05"),
)
def test_a_state_with_a_group_reduces_within_it(rank):
    """A PowerSGD state that is given a process group reduces within it and divides by its size, before the start and after."""
    members = (1, 2)
    group = dist.new_group(list(members))
    if rank.index not in members:
        return
    ddp = rank.wrap(Tables((SIZE, SIZE)), process_group=group)
    own = torch.ones(SIZE, SIZE, device=rank.device) * rank.batch(1)
    seen = answers(rank, ddp, PowerSGDState(group, start_powerSGD_iter=2), [own], 4)
    mean = rank.mean(lambda r: rank.batch(1, of=r), members).expand(SIZE, SIZE)
    rank.law("the group's mean", [near(each[0], mean) for each in seen], [True] * 4)
