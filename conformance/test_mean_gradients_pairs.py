"""Two at a time: two options, two DDPs in one graph, sparse gradients and no_sync. The mean is the mean all the same."""

import torch
from ddp_conformance import MUST, OBSERVED, case
from ddp_conformance.models import Scalars, linear
from torch import nn

DDP = "DistributedDataParallel"


@case(
    "mean_gradients.options_together",
    level=MUST,
    source=DDP,
    each={
        "static_find_unused": {"static_graph": True, "find_unused_parameters": True},
        "static_view": {"static_graph": True, "gradient_as_bucket_view": True},
        "find_unused_view": {"find_unused_parameters": True, "gradient_as_bucket_view": True},
        "batched_find_unused": {"batched_grad_copy": True, "find_unused_parameters": True},
        "three": {"static_graph": True, "find_unused_parameters": True, "gradient_as_bucket_view": True},
    },
    catalogue=("B01", "E03", "F01", "G01"),
)
def test_options_together_change_no_value(rank, options):
    """Options together change no value: in every iteration a gradient is the mean, and that of a parameter that is never used stays None."""
    model = Scalars("a", "b")
    ddp = rank.wrap(model, **options)
    for _ in range(4):
        model.zero_grad(set_to_none=True)
        ddp(rank.batch(1), use="a").backward()
        rank.law("the mean", model.a.grad, rank.mean(lambda r: rank.batch(1, of=r)[0]))
        rank.law("the unused gradient is None", model.b.grad, None)


@case(
    "mean_gradients.two_in_one_graph",
    level=MUST,
    source=DDP,
    each={"default": {}, "find_unused": {"find_unused_parameters": True}, "static_graph": {"static_graph": True}},
    catalogue=("B01",),
)
def test_one_backward_reduces_two_ddps(rank, options):
    """Where the output of one DDP is fed to another, as an encoder's to a decoder, one backward reduces both."""
    first, second = linear(1), linear(1)
    encoder, decoder = rank.wrap(first, **options), rank.wrap(second, **options)
    for _ in range(4):
        first.zero_grad(set_to_none=True)
        second.zero_grad(set_to_none=True)
        decoder(encoder(rank.batch(1))).sum().backward()
        mean = rank.mean(lambda r: rank.batch(1, of=r))
        rank.law("the encoder's is the mean", first.weight.grad, mean)
        rank.law("the decoder's is the mean", second.weight.grad, mean)


@case(
    "mean_gradients.sparse_after_no_sync",
    level=OBSERVED,
    source="include/torch/csrc/distributed/c10d/reducer.hpp: expect_sparse_gradient",
    needs=("no_sync",),
    lanes=("gloo:*",),
    catalogue=("B06", "C01"),
)
def test_sparse_gradients_accumulate_inside_no_sync(rank):
    """A sparse gradient accumulates inside no_sync, and the next synced backward reduces the sum."""
    model = nn.Embedding(2, 1, sparse=True)
    ddp = rank.wrap(model)
    row, own = torch.tensor([rank.index], device=rank.device), float(rank.batch(1))
    for _ in range(2):
        model.weight.grad = None
        with ddp.no_sync():
            (ddp(row).sum() * own).backward()
        inside = model.weight.grad.coalesce()
        rank.law("inside no_sync it is the rank's own", inside.indices().tolist(), [[rank.index]])
        (ddp(row).sum() * own).backward()
        reduced = model.weight.grad.coalesce().to_dense().flatten()
        rank.law("half of twice each rank's", reduced, torch.cat([rank.batch(1, of=r)[0] for r in range(2)]))
