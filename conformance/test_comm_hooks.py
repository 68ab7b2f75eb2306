"""A communication hook runs instead of the plain all-reduce: what it is given, and what becomes of its answer."""

import threading

import torch
import torch.distributed as dist
from ddp_conformance import MUST, case
from ddp_conformance.models import Scalars, linear
from ddp_conformance.rank import as_it_is, completed, mean_all_reduce
from torch import nn

REGISTER = "DistributedDataParallel.register_comm_hook"


class TwoDtypes(nn.Module):
    """Two scalar parameters, 1.0 each, of float32 and float64; the output is (narrow^2 + wide^2) * x^2 / 2."""

    def __init__(self):
        super().__init__()
        self.narrow = nn.Parameter(torch.ones(1))
        self.wide = nn.Parameter(torch.ones(1, dtype=torch.float64))

    def forward(self, x):
        return ((self.narrow * x) ** 2 / 2 + (self.wide * x.double()) ** 2 / 2).sum()


def summed(state, bucket):
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    return work.get_future().then(lambda future: future.value()[0])


@case(
    "comm_hooks.undivided",
    level=MUST,
    source=REGISTER,
    world=(1, 2, 3),
    catalogue=("I01",),
    torch_tests=("test_ddp_hooks.py::DistributedDataParallelCommHookTest::test_ddp_comm_hook_noop_hook",),
    reports=("pytorch/pytorch#42399", "pytorch/pytorch#42400"),
)
def test_a_hook_sees_the_gradients_undivided(rank):
    """
    A hook is handed the rank's own gradients, flattened and not yet divided by the world size.

    Whoever writes a hook that all-reduces has to divide by itself.
    """
    seen = []

    def watching(state, bucket):
        seen.append(bucket.buffer().clone())
        return mean_all_reduce(bucket)

    ddp = rank.wrap(linear(2))
    ddp.register_comm_hook(None, watching)
    ddp(rank.batch(2)).sum().backward()
    rank.show("seen", seen)
    rank.law("the hook sees the rank's own gradient, undivided", seen, [rank.batch(2).reshape(-1)])


@case(
    "comm_hooks.no_op_is_local",
    level=MUST,
    source=REGISTER,
    world=(1, 2, 3),
    catalogue=("I01",),
    torch_tests=("test_ddp_hooks.py::DistributedDataParallelCommHookTest::test_ddp_comm_hook_noop_hook",),
)
def test_a_hook_that_does_nothing_leaves_gradients_local(rank):
    """
    A hook that returns the bucket as it is leaves every rank with its own gradients, and no collective is started.

    The hook stands in the place of the all-reduce, not beside it.
    """
    model = linear(2)
    ddp = rank.wrap(model)
    ddp.register_comm_hook(None, as_it_is)
    output = ddp(rank.batch(2)).sum()
    before = rank.collectives()
    output.backward()
    rank.law("backward starts no collective of its own", rank.collectives() - before, 0)
    rank.show("gradient", model.weight.grad)
    rank.law("every rank keeps its own gradient", model.weight.grad, rank.batch(2))


@case(
    "comm_hooks.sum",
    level=MUST,
    source=REGISTER,
    world=(2, 3),
    catalogue=("I01",),
    reports=("pytorch/pytorch#37359", "pytorch/pytorch#37002", "pytorch/torchtitan#2323", "pytorch/pytorch#43307"),
)
def test_a_hook_that_does_not_divide_trains_on_the_sum(rank):
    """
    With a hook that all-reduces and does not divide, training follows the sum of the ranks' gradients instead of their mean.

    The loss is (w*x)^2/2 with x = r+1 on rank r, so the summed gradient is w * (1 + 4 + 9 ...); the rate is 1/64. Shown
    over five steps: the buckets are rebuilt in the second, and what a hook returns passes through other code from then on.
    """
    model = Scalars("w", dtype=torch.float64)
    ddp = rank.wrap(model)
    ddp.register_comm_hook(None, summed)
    x = rank.tensor(rank.index + 1, dtype=torch.float64)
    expected = rank.tensor(1, dtype=torch.float64)
    for _ in range(5):
        ddp.zero_grad()
        (ddp(x) ** 2 / 2).backward()
        with torch.no_grad():
            model.w -= model.w.grad / 64
        expected = expected - expected * sum((r + 1) ** 2 for r in range(rank.world_size)) / 64
        rank.law("each step follows the sum", model.w, expected)
    rank.show("weight", model.w)


@case(
    "comm_hooks.answer_becomes_gradient",
    level=MUST,
    source=REGISTER,
    each={"copies": False, "views": True},
    catalogue=("I02",),
    torch_tests=("test_c10d_gloo.py::DistributedDataParallelTest::test_ddp_comm_hook_future_passing_cpu",),
)
def test_the_tensor_in_the_future_becomes_the_gradients(rank, views):
    """
    The tensor in the hook's future becomes the gradients, also when it is a new tensor and not the bucket.

    Shown with gradients as copies and as views of the bucket, over four iterations; the values are counted from the rank
    and the iteration and have nothing to do with the gradients.
    """
    model = linear(2, 2)
    ddp = rank.wrap(model, gradient_as_bucket_view=views)
    iteration = 0

    def answer(of):
        return torch.arange(4, dtype=torch.float32, device=rank.device) + 100 * of + 10 * rank.index

    ddp.register_comm_hook(None, lambda state, bucket: completed(answer(iteration)))
    for iteration in range(4):
        ddp.zero_grad()
        ddp(rank.batch(2)).sum().backward()
        rank.law("the gradients are the hook's answer", model.weight.grad.clone(), answer(iteration).reshape(2, 2))


@case("comm_hooks.waited_for", level=MUST, source=REGISTER, world=1, catalogue=("I02",))
def test_backward_waits_for_the_future(rank):
    """
    Backward does not return before the hook's future is completed, and what the future holds then is the gradient.

    The future is completed by a thread of its own, a twentieth of a second later.
    """
    model = linear(2)
    ddp = rank.wrap(model)

    def later(state, bucket):
        future = torch.futures.Future()
        answer = torch.full_like(bucket.buffer(), 7)
        threading.Timer(0.05, future.set_result, (answer,)).start()
        return future

    ddp.register_comm_hook(None, later)
    ddp(rank.batch(2)).sum().backward()
    rank.law("the gradient is what the future held in the end", model.weight.grad, rank.tensor(7, 7).reshape(1, 2))


@case(
    "comm_hooks.once_for_each_bucket",
    level=MUST,
    source=REGISTER,
    catalogue=("I09", "I10"),
)
def test_a_hook_is_called_once_for_each_bucket_as_it_gets_ready(rank):
    """
    In each synchronized backward a hook is called once for every bucket, after the bucket's last gradient and before the next bucket's.

    Three parameters of 1 MiB, each a bucket of its own by a cap of 1 MiB; they get ready in the reverse of their use. In
    the first iteration all are in one bucket.
    """
    model = Scalars("a", "b", "c")
    for name in model.names:
        setattr(model, name, nn.Parameter(torch.ones(2**18)))
    ddp = rank.wrap(model, bucket_cap_mb=1)
    events = []
    for name, parameter in model.named_parameters():
        parameter.register_hook(lambda gradient, name=name: events.append(name))
    names = {id(parameter): name for name, parameter in model.named_parameters()}

    def watching(state, bucket):
        events.append("+".join(sorted(names[id(p)] for p in bucket.parameters())).upper())
        return mean_all_reduce(bucket)

    ddp.register_comm_hook(None, watching)
    for iteration in range(5):
        events.clear()
        ddp(rank.batch(1)).backward()
        if iteration == 0:
            rank.law("first, one call after all gradients", " ".join(events), "c b a A+B+C")
        else:
            rank.law("then one call for each bucket as it gets ready", " ".join(events), "c C b B a A")


@case("comm_hooks.state", level=MUST, source=REGISTER, catalogue=("I10",))
def test_the_state_is_the_callers_own_object(rank):
    """
    Every call of the hook is handed the very object that was registered as its state; all buckets of a rank share it, and ranks do not.

    Two dtypes make two buckets; over four iterations the state counts eight calls, in steps of its rank's own.
    """

    class Counter:
        calls = 0

    state = Counter()

    def counting(state, bucket):
        state.calls += rank.index + 1
        return mean_all_reduce(bucket)

    ddp = rank.wrap(TwoDtypes())
    ddp.register_comm_hook(state, counting)
    for _ in range(4):
        ddp(rank.batch(1)).backward()
    rank.law("the caller's object has counted every bucket of its own rank", state.calls, 8 * (rank.index + 1))


@case(
    "comm_hooks.sparse",
    level=MUST,
    source=REGISTER,
    world=(2, 3),
    catalogue=("I13",),
    torch_tests=("test_c10d_gloo.py::DistributedDataParallelTest::test_ddp_comm_hook_sparse_gradients",),
)
def test_a_hook_may_reduce_sparse_gradients(rank):
    """
    A hook reduces a sparse gradient like a dense one: what its future holds becomes the gradient, rows that only one rank touched included.

    Rank r looks up row 0 and row r+1 of an embedding of 5 rows; the hook sums.
    """
    model = nn.Embedding(5, 2, sparse=True)
    ddp = rank.wrap(model)
    ddp.register_comm_hook(None, summed)
    for _ in range(3):
        ddp.zero_grad()
        ddp(torch.tensor([0, rank.index + 1], device=rank.device)).sum().backward()
    rank.show("gradient", model.weight.grad)
    rows = [rank.world_size] + [1 if row <= rank.world_size else 0 for row in range(1, 5)]
    expected = torch.tensor([[row, row] for row in rows], dtype=torch.float32, device=rank.device)
    rank.law("the gradient is the sum over ranks, row by row", model.weight.grad.to_dense(), expected)


@case(
    "comm_hooks.static_graph",
    level=MUST,
    source=REGISTER,
    catalogue=("I14",),
    torch_tests=(
        "test_c10d_nccl.py::DistributedDataParallelTest::test_ddp_comm_hook_allreduce_hook_nccl_static_graph",
    ),
)
def test_a_hook_works_under_static_graph(rank):
    """
    Under `static_graph` a hook stands in the place of the all-reduce from the first iteration on.

    PyTorch's own test of this passes `static_graph=True` as the hook's state, and never turns it on. Two dtypes make two
    buckets; the loss is w^2*x^2/2 for either, the hook sums, the rate is 1/8.
    """
    model = TwoDtypes()
    ddp = rank.wrap(model, static_graph=True)
    ddp.register_comm_hook(None, summed)
    x = rank.tensor(rank.index + 1)
    expected = 1.0
    for _ in range(5):
        ddp.zero_grad()
        ddp(x).backward()
        expected -= expected * 5 / 8
        for parameter in model.parameters():
            with torch.no_grad():
                parameter -= parameter.grad / 8
            rank.law("each step follows the sum", parameter, rank.tensor(expected, dtype=parameter.dtype))


@case("comm_hooks.get_future", level=MUST, source=REGISTER, world=(2, 3))
def test_other_collectives_give_hooks_their_futures(rank):
    """
    A hook may wait for other collectives through `get_future`: an all-gather or a broadcast, also one after the other.

    The hook gathers all ranks' buckets, keeps their sum on the last rank, and broadcasts that.
    """
    model = linear(2)
    ddp = rank.wrap(model)
    last = rank.world_size - 1

    def gather_and_broadcast(state, bucket):
        parts = [torch.zeros_like(bucket.buffer()) for _ in range(rank.world_size)]

        def send_sum(gathered):
            total = sum(parts) if rank.index == last else torch.zeros_like(bucket.buffer())
            work = dist.broadcast(total, last, async_op=True)
            work.get_future().wait()
            return total

        return dist.all_gather(parts, bucket.buffer(), async_op=True).get_future().then(send_sum)

    ddp.register_comm_hook(None, gather_and_broadcast)
    for _ in range(3):
        ddp.zero_grad()
        ddp(rank.batch(2)).sum().backward()
        total = rank.world_size * rank.mean(lambda r: rank.batch(2, of=r))
        rank.law("every rank has the sum that the last rank made", model.weight.grad, total)
