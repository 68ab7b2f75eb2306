"""What the reduction does to numbers, and to which: dtypes, divisor, accumulated gradients, sparse gradients."""

import torch
import torch.distributed as dist
from ddp_conformance import HAZARD, MUST, OBSERVED, case
from ddp_conformance.models import Scalars, linear
from torch import nn

DIVIDES = "distributed/algorithms/ddp_comm_hooks/default_hooks.py: to avoid overflow"
SPARSE = "include/torch/csrc/distributed/c10d/reducer.hpp: expect_sparse_gradient"


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


def looked_up(rank, r):
    """The rows of a table of five that rank r looks up: its own and the next."""
    return torch.tensor([r, r + 1], device=rank.device)


def table_gradient(rank, r):
    dense = torch.zeros(5, 2, device=rank.device)
    dense[looked_up(rank, r)] = float(rank.batch(1, of=r))
    return dense


@case(
    "reduction.sparse",
    level=OBSERVED,
    source=SPARSE,
    world=(2, 3),
    catalogue=("B06",),
    torch_tests=(
        "test/distributed/test_c10d_gloo.py::DistributedDataParallelTest::test_sparse_gradients",
        "test/distributed/test_c10d_gloo.py::DistributedDataParallelTest::test_sparse_gradients_grad_is_view",
    ),
    reports=("pytorch/pytorch#22037", "pytorch/pytorch#111422", "pytorch/pytorch#17356"),
    lanes=("gloo:*",),
)
def test_sparse_gradients_are_averaged_and_stay_sparse(rank):
    """The gradient of a sparse embedding stays sparse, holds the rows that any rank looked up, and their mean over all ranks."""
    model = nn.Embedding(5, 2, sparse=True)
    ddp = rank.wrap(model)
    for _ in range(4):
        model.weight.grad = None
        (ddp(looked_up(rank, rank.index)).sum() * float(rank.batch(1))).backward()
        got = model.weight.grad.coalesce()
        rank.law("the gradient is sparse", str(model.weight.grad.layout), "torch.sparse_coo")
        rank.law("it is the mean", got.to_dense(), rank.mean(lambda r: table_gradient(rank, r)))
        rank.law("it holds every row that a rank looked up", got.indices().tolist(), [[*range(rank.world_size + 1)]])
    rank.show("gradient", got)


@case(
    "reduction.sparse_padding",
    level=OBSERVED,
    source=SPARSE,
    catalogue=("B06",),
    reports=("pytorch/pytorch#87497", "Lightning-AI/pytorch-lightning#5355"),
    lanes=("gloo:*",),
)
def test_a_rank_may_look_up_nothing_but_padding(rank):
    """A rank whose batch is padding alone has no row to add: the other's rows are divided by the world size all the same."""
    model = nn.Embedding(5, 2, sparse=True, padding_idx=0)
    ddp = rank.wrap(model)
    for _ in range(4):
        model.weight.grad = None
        rows = torch.tensor([0, 0] if rank.index == 0 else [0, 3], device=rank.device)
        (ddp(rows).sum() * 4).backward()
        got = model.weight.grad.coalesce()
        rank.law("the only row is halved", got.to_dense()[3], rank.tensor(2, 2))
        rank.law("no other row is there", got.indices().tolist(), [[3]])


@case(
    "reduction.sparse_alone",
    level=OBSERVED,
    source=SPARSE,
    catalogue=("B06", "U01"),
    lanes=("gloo:*",),
)
def test_a_sparse_gradient_has_a_bucket_to_itself(rank):
    """A sparse gradient is reduced in a bucket of its own, between dense ones that would share a bucket without it."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(2, 2, bias=False)
            self.table = nn.Embedding(5, 2, sparse=True)
            self.last = nn.Linear(2, 1, bias=False)

        def forward(self, rows):
            return self.last(self.table(rows) + self.first(torch.ones(2, 2, device=rows.device)))

    model = Model()
    ddp = rank.wrap(model)
    carried = rank.buckets(ddp)
    for _ in range(3):
        model.zero_grad(set_to_none=True)
        ddp(looked_up(rank, rank.index)).sum().backward()
    rank.show("buckets", carried)
    rank.law("the embedding, parameter 1, is alone in every iteration", carried.count("1"), 3)


@case(
    "reduction.sparse_unused",
    level=HAZARD,
    source=SPARSE,
    catalogue=("U20",),
    lanes=("gloo:*",),
    group_timeout=1,
)
def test_a_sparse_parameter_may_not_be_unused_on_one_rank(rank):
    """With find_unused_parameters a sparse parameter that one rank did not use makes that rank raise, and the others wait for it.

    For a dense parameter the rank would add zeros. Takes the group's time-out of 1 s.
    """

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(5, 2, sparse=True)
            self.dense = nn.Linear(2, 1, bias=False)

        def forward(self, rows):
            inputs = torch.ones(2, 2, device=rows.device)
            return self.dense(inputs if rank.index == 0 else self.table(rows))

    ddp = rank.wrap(Model(), find_unused_parameters=True)
    with rank.raises("backward", RuntimeError, match="Expected sparse gradient to be defined"):
        ddp(looked_up(rank, rank.index)).sum().backward()


@case(
    "reduction.sparse_unannounced",
    level=HAZARD,
    source=SPARSE,
    catalogue=("B06",),
    reports=("pytorch/pytorch#22037",),
    lanes=("gloo:*",),
)
def test_a_sparse_gradient_that_no_embedding_announces_is_refused(rank):
    """DDP expects sparse gradients of sparse embedding modules only: one of a bare parameter, looked up by function, is refused in backward."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Parameter(torch.ones(5, 2))

        def forward(self, rows):
            return nn.functional.embedding(rows, self.table, sparse=True)

    ddp = rank.wrap(Model())
    with rank.raises("backward", NotImplementedError, RuntimeError, match="Cannot access storage|[Ss]parse"):
        ddp(looked_up(rank, rank.index)).sum().backward()


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
