"""Sparse gradients beside other things: options, double precision, bags of embeddings."""

import torch
from ddp_conformance import OBSERVED, case
from torch import nn

SPARSE = "include/torch/csrc/distributed/c10d/reducer.hpp: expect_sparse_gradient"


def rows(rank, r):
    return torch.tensor([r, r + 1], device=rank.device)


def table_gradient(rank, r, dtype=torch.float32):
    dense = torch.zeros(5, 1, dtype=dtype, device=rank.device)
    dense[rows(rank, r)] = float(rank.batch(1, of=r))
    return dense


@case(
    "reduction.sparse_options",
    level=OBSERVED,
    source=SPARSE,
    each={
        "view": {"gradient_as_bucket_view": True},
        "find_unused": {"find_unused_parameters": True},
        "static_graph": {"static_graph": True},
    },
    world=(2, 3),
    catalogue=("B06",),
    torch_tests=(
        "test/distributed/test_c10d_gloo.py::DistributedDataParallelTest::test_sparse_gradients_grad_is_view",
    ),
    lanes=("gloo:*",),
)
def test_options_change_no_sparse_gradient(rank, options):
    """A sparse gradient, and the dense one beside it, is the mean under every option and in every iteration, whether gradients are cleared to None or accumulate."""
    model = nn.ModuleDict({"table": nn.Embedding(5, 1, sparse=True), "scale": nn.Linear(1, 1, bias=False)})
    model.forward = lambda looked_up, x: model["table"](looked_up).sum() * x.sum() + model["scale"](x).sum()
    ddp = rank.wrap(model, **options)
    table, scale = model["table"].weight, model["scale"].weight
    for times in (1, 1, 1, 2, 3):
        if times == 1:
            table.grad = scale.grad = None
        ddp(rows(rank, rank.index), rank.batch(1)).backward()
        mean = rank.mean(lambda r: table_gradient(rank, r))
        rank.law("it is sparse", str(table.grad.layout), "torch.sparse_coo")
        rank.law("the sparse mean", table.grad.coalesce().to_dense(), times * mean)
        rank.law("the dense mean", scale.grad, times * rank.mean(lambda r: rank.batch(1, of=r)))


@case("reduction.sparse_double", level=OBSERVED, source=SPARSE, catalogue=("B06",), lanes=("gloo:*",))
def test_sparse_gradients_in_double_precision_keep_all_bits(rank):
    """Sparse gradients in double precision are averaged in double precision: bits that single precision lacks are there."""
    model = nn.Embedding(2, 1, sparse=True, dtype=torch.float64)
    ddp = rank.wrap(model)
    numbers = [2.0 + 2.0**-40, 4.0 + 2.0**-38]
    for _ in range(3):
        model.weight.grad = None
        (ddp(torch.tensor([1], device=rank.device)) * numbers[rank.index]).sum().backward()
        expected = rank.tensor(0, sum(numbers) / 2, dtype=torch.float64).reshape(2, 1)
        rank.law("every bit of the mean", model.weight.grad.coalesce().to_dense(), expected)


@case("reduction.sparse_bag", level=OBSERVED, source=SPARSE, world=(2, 3), catalogue=("B06",), lanes=("gloo:*",))
def test_a_sparse_bag_of_embeddings_is_averaged(rank):
    """The sparse gradient of an EmbeddingBag is averaged as an Embedding's is, and stays sparse."""
    model = nn.EmbeddingBag(5, 1, sparse=True, mode="sum")
    ddp = rank.wrap(model)
    for _ in range(3):
        model.weight.grad = None
        (ddp(rows(rank, rank.index).reshape(1, 2)).sum() * float(rank.batch(1))).backward()
        rank.law("it is sparse", str(model.weight.grad.layout), "torch.sparse_coo")
        mean = rank.mean(lambda r: table_gradient(rank, r))
        rank.law("it is the mean", model.weight.grad.coalesce().to_dense(), mean)
