"""Sparse gradients: averaged as they are, each in a bucket of its own, and refused where no embedding announces them."""

import torch
from ddp_conformance import HAZARD, OBSERVED, case
from torch import nn

SPARSE = "include/torch/csrc/distributed/c10d/reducer.hpp: expect_sparse_gradient"


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
