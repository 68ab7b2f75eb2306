"""What the reduction does to numbers, and to which: dtypes, divisor, accumulated gradients, sparse gradients."""

import torch
import torch.distributed as dist
from ddp_conformance import MUST, OBSERVED, case
from ddp_conformance.models import Scalars, linear
from torch import nn

DIVIDES = "distributed/algorithms/ddp_comm_hooks/default_hooks.py: to avoid overflow"


@case(
    "reduction.divided_first",
    level=OBSERVED,
    source=DIVIDES,
    world=(2, 4),
    catalogue=("B03",),
    torch_tests=(
        "test/distributed/test_c10d_nccl.py::DistributedDataParallelTest::test_fp16",
        "test/distributed/test_c10d_nccl.py::DistributedDataParallelTest::test_fp16_grad_is_view",
    ),
    reports=("pytorch/pytorch#57410", "pytorch/pytorch#63375"),
)
def test_gradients_are_divided_before_they_are_summed(rank):
    """Half precision gradients whose sum is past the largest number keep their mean, for each is divided first."""
    model = Scalars("a", dtype=torch.float16)
    ddp = rank.wrap(model)
    ddp(rank.tensor(32000 + 8000 * (rank.index % 2), dtype=torch.float16)).backward()
    rank.show("gradient", model.a.grad)
    rank.law("the gradient is the mean and not infinite", model.a.grad, rank.tensor(36000, dtype=torch.float16))


@case(
    "reduction.smallest_vanish",
    level=OBSERVED,
    source=DIVIDES,
    catalogue=("B03",),
    reports=("pytorch/pytorch#57410", "pytorch/pytorch#63375"),
)
def test_the_smallest_gradients_vanish(rank):
    """The price of dividing first: where all ranks hold half precision's smallest number the mean is zero."""
    model = Scalars("a", dtype=torch.float16)
    ddp = rank.wrap(model)
    smallest = rank.tensor(2.0**-24, dtype=torch.float16)
    ddp(smallest).backward()
    rank.law("the mean of the smallest numbers is zero", model.a.grad, rank.tensor(0, dtype=torch.float16))
    rank.differs("alone it is not zero", smallest, rank.tensor(0, dtype=torch.float16))


class Mixed(nn.Module):
    """One parameter of each dtype; the gradient of each is x, in its dtype."""

    def __init__(self, *dtypes):
        super().__init__()
        self.each = nn.ParameterList([nn.Parameter(torch.ones(2, dtype=dtype)) for dtype in dtypes])

    def forward(self, x):
        return sum((parameter * x.to(parameter.dtype)).sum().to(torch.float64) for parameter in self.each)


@case(
    "reduction.mixed_dtypes",
    level=MUST,
    source="DistributedDataParallel",
    world=(2, 3),
    catalogue=("B04",),
)
def test_parameters_of_several_dtypes_mix(rank):
    """Parameters of double, single and half precision mix in one model, and each gets its mean in its own dtype."""
    dtypes = (torch.float16, torch.float64, torch.float32, torch.float16)
    model = Mixed(*dtypes)
    ddp = rank.wrap(model)
    for _ in range(4):
        ddp.zero_grad()
        ddp(rank.batch(2)).backward()
        for dtype, parameter in zip(dtypes, model.each, strict=True):
            expected = rank.mean(lambda r: rank.batch(2, of=r).flatten()).to(dtype)
            rank.law("a gradient is the mean in its own dtype", parameter.grad, expected)
    rank.show("gradients", [parameter.grad for parameter in model.each])


@case("reduction.bfloat16", level=OBSERVED, source="DistributedDataParallel", world=(2, 3), catalogue=("B04",))
def test_bfloat16_is_averaged(rank):
    """Parameters in bfloat16 get their mean in bfloat16."""
    model = Mixed(torch.bfloat16, torch.float32)
    ddp = rank.wrap(model)
    for _ in range(4):
        ddp.zero_grad()
        ddp(rank.batch(2)).backward()
        expected = rank.mean(lambda r: rank.batch(2, of=r).flatten()).to(torch.bfloat16)
        rank.law("the gradient is the mean", model.each[0].grad, expected)


@case(
    "reduction.complex",
    level=OBSERVED,
    source="DistributedDataParallel",
    world=(2, 3),
    catalogue=("B05",),
    torch_tests=(
        "test/distributed/test_c10d_nccl.py::DistributedDataParallelTest::test_ddp_complex_params",
        "test/distributed/test_c10d_nccl.py::DistributedDataParallelTest::test_ddp_complex_params_and_grads",
    ),
    reports=(
        "pytorch/pytorch#158753",
        "pytorch/pytorch#156632",
        "pytorch/pytorch#71613",
        "Lightning-AI/pytorch-lightning#20480",
    ),
)
def test_complex_parameters_are_averaged_in_both_parts(rank):
    """A complex parameter is broadcast and its gradient averaged in real and imaginary part."""
    model = nn.Linear(1, 1, bias=False, dtype=torch.complex64)
    nn.init.constant_(model.weight, 1 + rank.index)
    ddp = rank.wrap(model)

    def fed(r):
        return torch.complex(rank.batch(1, of=r), 5 * rank.batch(1, of=r))

    for _ in range(4):
        ddp.zero_grad()
        ddp(fed(rank.index)).real.sum().backward()
        rank.law("the gradient is the mean, of both parts", model.weight.grad, rank.mean(fed).conj().resolve_conj())
    rank.law("the weight is rank 0's", model.weight, torch.ones_like(model.weight))
    rank.show("gradient", model.weight.grad)


@case("reduction.accumulated", level=OBSERVED, source="DistributedDataParallel", world=(2, 3), catalogue=("B13",))
def test_what_is_averaged_is_the_accumulated_gradient(rank):
    """A gradient that was not cleared is averaged along with the new one: what is reduced is `.grad` and not this backward's share."""
    model = linear(1)
    ddp = rank.wrap(model)

    def stale(r):
        return rank.batch(1, of=r) * 7

    model.weight.grad = stale(rank.index)
    ddp(rank.batch(1)).sum().backward()
    expected = rank.mean(lambda r: stale(r) + rank.batch(1, of=r))
    rank.show("gradient", model.weight.grad)
    rank.law("old and new are averaged together", model.weight.grad, expected)
    for step in range(3):
        ddp(rank.batch(1)).sum().backward()
        expected = expected + rank.mean(lambda r: rank.batch(1, of=r))
        rank.law(f"never cleared, the gradient grows by the mean, step {step}", model.weight.grad, expected)


@case(
    "reduction.averaged_again",
    level=OBSERVED,
    source="DistributedDataParallel",
    world=(2, 3),
    catalogue=("B01",),
    reports=("kubeflow/pytorch-operator#122",),
)
def test_averaging_by_hand_changes_nothing(rank):
    """After backward all ranks hold the mean, so a script that averages by hand once more changes nothing."""
    model = linear(2)
    ddp = rank.wrap(model)
    ddp(rank.batch(2)).sum().backward()
    rank.law("backward leaves the mean", model.weight.grad, rank.mean(lambda r: rank.batch(2, of=r)))
    by_hand = model.weight.grad.clone()
    dist.all_reduce(by_hand)
    rank.law("the mean of means is the mean", by_hand / rank.world_size, model.weight.grad)


THIRDS = torch.arange(1.0, 17.0)
"""Most of these numbers times a third, in single precision, are not the numbers over three."""


@case("reduction.reciprocal", level=OBSERVED, source="DistributedDataParallel", world=3, catalogue=("U02",))
def test_gradients_are_multiplied_by_the_reciprocal(rank):
    """By default gradients are multiplied by one over the world size, which on three ranks rounds otherwise than a division.

    One rank alone has a gradient other than zero, so no order of summation plays a part.
    """
    own = THIRDS.to(rank.device) * (rank.index == 1)
    model = linear(16)
    ddp = rank.wrap(model)
    for _ in range(4):
        model.weight.grad = None
        ddp(own.reshape(1, 16)).sum().backward()
        third = THIRDS.to(rank.device) * (1 / torch.tensor(3.0, device=rank.device))
        rank.law("every element is a product with the rounded third", model.weight.grad[0], third)
        rank.differs("not every element is the quotient", model.weight.grad[0], THIRDS.to(rank.device) / 3)


@case("reduction.view_divides", level=OBSERVED, source="DistributedDataParallel", world=3, catalogue=("U02", "G06"))
def test_gradients_that_stay_in_the_bucket_are_divided(rank):
    """With gradient_as_bucket_view a gradient that stays in its bucket is divided by the world size, with one rounding less.

    So on three ranks the two ways differ in last bits, and gradients that are cleared to None take the other way.
    """
    own = THIRDS.to(rank.device) * (rank.index == 1)
    model = linear(16)
    ddp = rank.wrap(model, gradient_as_bucket_view=True)
    for step in range(4):
        ddp(own.reshape(1, 16)).sum().backward()
        if step > 1:  # in the first two iterations the bucket is new, and the gradient copied into it
            rank.law("every element is the quotient", model.weight.grad[0], THIRDS.to(rank.device) / 3)
        model.zero_grad(set_to_none=False)


@case(
    "reduction.two_ranks_any_cap",
    level=OBSERVED,
    source="DistributedDataParallel",
    each={"default": {}, "half_mib": {"bucket_cap_mb": 0.5}, "one_each": {"bucket_cap_mb": 1e-6}},
    catalogue=("B01",),
    reports=("pytorch/pytorch#30509",),
)
def test_two_ranks_add_up_alike_whatever_the_buckets(rank, options):
    """On two ranks the gradient is the half of one plus the half of the other, to the last bit, however buckets are cut.

    With more ranks the order of summation, and with it the last bit, depends on where in its bucket a gradient lies.
    """

    def fed(r):
        return torch.arange(1.0, 33.0, device=rank.device).reshape(1, 32) / (3 + 4 * r)

    model = nn.ModuleList([linear(32) for _ in range(4)])
    model.forward = lambda x: sum(layer(x).sum() for layer in model)
    ddp = rank.wrap(model, **options)
    for _ in range(4):
        model.zero_grad(set_to_none=True)
        ddp(fed(rank.index)).backward()
        for layer in model:
            rank.law("half of one and half of the other", layer.weight.grad, fed(0) / 2 + fed(1) / 2)


@case(
    "reduction.frozen_stays_out",
    level=OBSERVED,
    source="DistributedDataParallel",
    catalogue=("A03",),
    reports=("pytorch/pytorch#14675",),
)
def test_a_frozen_parameter_blocks_no_bucket(rank):
    """A frozen parameter, even one of a dtype that no other has, is in no bucket and holds up none."""
    model = Scalars("a", "b")
    model.register_parameter("steps", nn.Parameter(torch.ones(1, dtype=torch.int32), requires_grad=False))
    ddp = rank.wrap(model)
    carried = rank.buckets(ddp)
    for _ in range(4):
        model.zero_grad(set_to_none=True)
        ddp(rank.batch(1)).backward()
        expected = rank.mean(lambda r: rank.batch(1, of=r)).flatten()
        rank.law("the others get their mean", [model.a.grad, model.b.grad], [expected] * 2)
    rank.law("buckets carry the two others only", [sorted(each.split()) for each in carried], [["0", "1"]] * 4)
