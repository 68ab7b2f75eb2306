"""What a communication hook is handed: the bucket's place in the order, its gradients, its parameters, its buffer."""

import torch
import torch.distributed as dist
from ddp_conformance import MUST, OBSERVED, case
from ddp_conformance.models import Scalars
from ddp_conformance.rank import completed, mean_all_reduce
from torch import nn

BUCKET = "torch.distributed.GradBucket"


def three_buckets(rank):
    """Three parameters of 1 MiB, each a bucket of its own by a cap of 1 MiB from the second iteration on."""
    model = Scalars("a", "b", "c")
    for name in model.names:
        setattr(model, name, nn.Parameter(torch.ones(2**18)))
    return model, rank.wrap(model, bucket_cap_mb=1)


@case(
    "grad_bucket.index",
    level=MUST,
    source=f"{BUCKET}.index",
    catalogue=("I09",),
    torch_tests=("test_ddp_hooks.py::DistributedDataParallelCommHookTest::test_is_last_hook",),
)
def test_buckets_are_numbered_in_the_order_of_their_reduction(rank):
    """
    `index()` counts the buckets of an iteration from 0, in the order in which the hook is called, and `is_last()` is true for the last of them alone.

    PyTorch's own test of `is_last` looks at one backward, in which there is one bucket only. Here there are three from the
    second iteration on.
    """
    _, ddp = three_buckets(rank)
    seen = []

    def watching(state, bucket):
        seen.append((bucket.index(), bucket.is_last()))
        return mean_all_reduce(bucket)

    ddp.register_comm_hook(None, watching)
    for iteration in range(4):
        seen.clear()
        ddp(rank.batch(1)).backward()
        expected = [(0, False), (1, False), (2, True)] if iteration else [(0, True)]
        rank.law("indices count up, and the last is the last", seen, expected)


@case("grad_bucket.gradients", level=MUST, source=f"{BUCKET}.gradients", catalogue=("I09",))
def test_gradients_are_the_buffer_cut_up(rank):
    """
    `gradients()` and `parameters()` speak of the same parameters in the same order, and the gradients, of the parameters' shapes, are pieces of `buffer()`: what a hook writes into one it writes into the other.

    The hook adds 1 to every gradient, and answers with the buffer.
    """
    model = nn.Linear(2, 3)
    ddp = rank.wrap(model)

    def adding(state, bucket):
        for gradient, parameter in zip(bucket.gradients(), bucket.parameters(), strict=True):
            own = rank.batch(2).expand(3, 2) if parameter is model.weight else torch.ones(3, device=rank.device)
            rank.law("each gradient is its parameter's", gradient, own)
            gradient += 1
        return completed(bucket.buffer())

    ddp.register_comm_hook(None, adding)
    for _ in range(3):
        ddp.zero_grad()
        ddp(rank.batch(2)).sum().backward()
        rank.law("the weight has what was written", model.weight.grad, rank.batch(2).expand(3, 2) + 1)
        rank.law("the bias has what was written", model.bias.grad, torch.full((3,), 2.0, device=rank.device))


@case("grad_bucket.buffer", level=MUST, source=f"{BUCKET}.buffer", catalogue=("I09",))
def test_the_buffer_is_flat_and_of_one_dtype(rank):
    """
    `buffer()` is one flat tensor that holds all gradients of the bucket one after the other; parameters of another dtype are in another bucket.
    """
    model = nn.ModuleDict(
        {"two_bytes": nn.Linear(2, 3).half(), "four_bytes": nn.Linear(2, 2), "eight_bytes": nn.Linear(1, 2).double()}
    )
    model.forward = lambda x: sum(
        (layer.weight.float() * (x[0, 0])).sum() + layer.bias.float().sum() for layer in model.values()
    )
    ddp = rank.wrap(model)
    seen = []

    def watching(state, bucket):
        flat = torch.cat([gradient.reshape(-1) for gradient in bucket.gradients()])
        rank.law("the buffer is the gradients one after the other", bucket.buffer().clone(), flat)
        seen.append(f"{bucket.buffer().dtype} {bucket.buffer().numel()}")
        return mean_all_reduce(bucket)

    ddp.register_comm_hook(None, watching)
    ddp(rank.batch(2)).backward()
    rank.law("one bucket for each dtype", sorted(seen), ["torch.float16 9", "torch.float32 6", "torch.float64 4"])
    rank.show("order", ", ".join(seen))


@case("grad_bucket.set_buffer", level=MUST, source=f"{BUCKET}.set_buffer", catalogue=("I09",))
def test_set_buffer_replaces_the_buffer(rank):
    """
    After `set_buffer(tensor)` the bucket's `buffer()` is that tensor, of whatever dtype; what the hook answers is still what counts.
    """
    model = Scalars("a")
    ddp = rank.wrap(model)

    def replacing(state, bucket):
        bucket.set_buffer(bucket.buffer().to(torch.float16) + 1)
        rank.law("the buffer is the new tensor", bucket.buffer().clone(), rank.batch(1, dtype=torch.float16)[0] + 1)
        return completed(bucket.buffer().float() * 2)

    ddp.register_comm_hook(None, replacing)
    for _ in range(3):
        ddp.zero_grad()
        ddp(rank.batch(1)).backward()
        rank.law("the gradient is the hook's answer", model.a.grad, (rank.batch(1)[0] + 1) * 2)


@case("grad_bucket.sparse", level=OBSERVED, source=f"{BUCKET}.gradients", catalogue=("I09", "I13"))
def test_a_sparse_bucket_has_a_sparse_buffer_and_no_gradients(rank):
    """
    A parameter with sparse gradients is alone in its bucket; there `buffer()` is the sparse gradient itself and `gradients()` is empty.
    """
    model = nn.Embedding(4, 2, sparse=True)
    ddp = rank.wrap(model)
    own = torch.sparse_coo_tensor([[rank.index + 1]], [[1.0, 1.0]], (4, 2), device=rank.device)

    def watching(state, bucket):
        rank.law("the buffer is the sparse gradient", bucket.buffer().clone(), own)
        rank.law("there are no pieces", len(bucket.gradients()), 0)
        rank.law("the parameter is the embedding's", [p is model.weight for p in bucket.parameters()], [True])
        work = dist.all_reduce(bucket.buffer(), async_op=True)
        return work.get_future().then(lambda future: future.value()[0])

    ddp.register_comm_hook(None, watching)
    ddp(torch.tensor([rank.index + 1], device=rank.device)).sum().backward()


@case(
    "grad_bucket.accumulated",
    level=MUST,
    source="DistributedDataParallel.no_sync",
    world=(2, 3),
    catalogue=("C04", "I09"),
)
def test_the_bucket_holds_what_has_accumulated(rank):
    """
    What a hook is handed is the gradient as it has accumulated in `.grad` since it was last cleared, not that of the last backward alone.

    Two micro-batches without synchronization, then one with; nothing is cleared between.
    """
    model = Scalars("a")
    ddp = rank.wrap(model)
    seen = []

    def watching(state, bucket):
        seen.append(bucket.buffer().clone())
        return mean_all_reduce(bucket)

    ddp.register_comm_hook(None, watching)
    with ddp.no_sync():
        for _ in range(2):
            ddp(rank.batch(1)).backward()
    ddp(rank.batch(1)).backward()
    rank.law("one call, with three micro-batches in it", seen, [3 * rank.batch(1)[0]])
    rank.law("the gradient is their mean", model.a.grad, 3 * rank.mean(lambda r: rank.batch(1, of=r))[0])
