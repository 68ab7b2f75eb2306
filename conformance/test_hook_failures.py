"""What a communication hook that does not keep its side of the contract brings about."""

import torch
import torch.distributed as dist
from ddp_conformance import HAZARD, MUST, OBSERVED, case
from ddp_conformance.models import linear
from ddp_conformance.rank import completed, mean_all_reduce

REGISTER = "DistributedDataParallel.register_comm_hook"


@case("hook_failures.never_completed", level=OBSERVED, source=REGISTER, world=1, may=("hang",), catalogue=("I02",))
def test_a_future_that_is_never_completed_is_waited_for_forever(rank):
    """
    Where the hook's future is never completed, backward does not return: there is no time-out.

    The documentation says that a hook without communication must return a completed future. The case takes the one second after which
    a rank counts as waiting.
    """
    ddp = rank.wrap(linear(2))
    ddp.register_comm_hook(None, lambda state, bucket: torch.futures.Future())
    loss = ddp(rank.batch(2)).sum()
    with rank.may_wait():
        loss.backward()


@case(
    "hook_failures.other_answers",
    level=MUST,
    source=REGISTER,
    each={"number": 1, "tensor": "tensor", "string": "string"},
    catalogue=("I07",),
    torch_tests=("test_c10d_gloo.py::DistributedDataParallelTest::test_ddp_invalid_comm_hook_return_type",),
)
def test_a_hook_that_returns_no_future_is_refused_in_backward(rank, answer):
    """
    A hook that returns something else than a future makes backward raise RuntimeError.
    """
    ddp = rank.wrap(linear(2))
    ddp.register_comm_hook(None, lambda state, bucket: bucket.buffer() if answer == "tensor" else answer)
    loss = ddp(rank.batch(2)).sum()
    with rank.raises("refused", RuntimeError, match="callback must return a torch.futures.Future object, but got"):
        loss.backward()


@case("hook_failures.none_kills", level=HAZARD, source=REGISTER, may=("die",), catalogue=("I07",))
def test_a_hook_that_returns_none_kills_the_process(rank):
    """
    A hook that forgets its return statement kills the process in backward by SIGSEGV, where any other wrong answer raises.
    """
    ddp = rank.wrap(linear(2))
    ddp.register_comm_hook(None, lambda state, bucket: None)
    loss = ddp(rank.batch(2)).sum()
    with rank.may_wait():
        loss.backward()


@case("hook_failures.not_one_tensor", level=MUST, source=REGISTER, catalogue=("I08",))
def test_a_future_that_holds_no_single_tensor_is_refused(rank):
    """
    A future that holds a list of tensors instead of a single one makes backward raise RuntimeError.

    That is what the future of an all-reduce holds, before `.then(lambda future: future.value()[0])`.
    """
    ddp = rank.wrap(linear(2))
    ddp.register_comm_hook(None, lambda state, bucket: completed([bucket.buffer()]))
    loss = ddp(rank.batch(2)).sum()
    with rank.raises("refused", RuntimeError, match="Unable to cast"):
        loss.backward()


@case(
    "hook_failures.too_small", level=HAZARD, source=REGISTER, each={"copies": False, "views": True}, catalogue=("I08",)
)
def test_an_answer_that_is_too_small_fails_by_its_storage(rank, views):
    """
    An answer with fewer elements than the bucket is refused with RuntimeError, and the message speaks of storage, not of hooks.
    """
    ddp = rank.wrap(linear(4), gradient_as_bucket_view=views)
    ddp.register_comm_hook(None, lambda state, bucket: completed(bucket.buffer()[:2].clone()))
    loss = ddp(rank.batch(4)).sum()
    with rank.raises("refused", RuntimeError, match="out of bounds"):
        loss.backward()


@case(
    "hook_failures.too_large", level=HAZARD, source=REGISTER, each={"copies": False, "views": True}, catalogue=("I08",)
)
def test_an_answer_that_is_too_large_is_taken(rank, views):
    """
    An answer with more elements than the bucket is taken without a word: its first elements become the gradients.

    The documentation asks for the bucket's shape; nothing checks it.
    """
    model = linear(2)
    ddp = rank.wrap(model, gradient_as_bucket_view=views)
    ddp.register_comm_hook(None, lambda state, bucket: completed(rank.tensor(1, 2, 3, 4) + rank.index))
    ddp(rank.batch(2)).sum().backward()
    rank.law("the first elements are the gradient", model.weight.grad, (rank.tensor(1, 2) + rank.index).reshape(1, 2))


@case(
    "hook_failures.other_dtype",
    level=HAZARD,
    source=REGISTER,
    each={"copies": False, "views": True},
    catalogue=("I08",),
)
def test_an_answer_of_another_dtype_is_cast(rank, views):
    """
    An answer of another dtype than the bucket is taken without a word and cast to the gradients' own.

    A float64 answer that float32 cannot hold is rounded.
    """
    model = linear(2)
    ddp = rank.wrap(model, gradient_as_bucket_view=views)
    answer = rank.tensor(1 + 2**-40, 3, dtype=torch.float64)
    ddp.register_comm_hook(None, lambda state, bucket: completed(answer))
    ddp(rank.batch(2)).sum().backward()
    rank.law("the gradient is the answer, cast", model.weight.grad, rank.tensor(1, 3).reshape(1, 2))


def broken(state, bucket):
    raise ValueError("the hook's own error")


@case(
    "hook_failures.raising_poisons",
    level=HAZARD,
    source=REGISTER,
    each={"copies": False, "views": True},
    catalogue=("U18",),
)
def test_a_hook_that_raises_leaves_ddp_unusable(rank, views):
    """
    A hook's own exception comes out of backward; from then on the DDP is unusable: its next forward fails on an internal assertion.
    """
    model = linear(2)
    ddp = rank.wrap(model, gradient_as_bucket_view=views)
    ddp.register_comm_hook(None, broken)
    loss = ddp(rank.batch(2)).sum()
    with rank.raises("backward", Exception, match="the hook's own error"):
        loss.backward()
    with rank.raises("next_forward", RuntimeError, match="unmarked_param_indices"):
        ddp(rank.batch(2))


@case("hook_failures.failed_future", level=OBSERVED, source=REGISTER, catalogue=("U18",))
def test_a_failed_future_fails_backward_and_no_more(rank):
    """
    A future that holds an exception makes backward raise; the DDP stays usable, and its next iteration is right.

    What is raised is a RuntimeError about a cast, and not the exception in the future.
    """
    model = linear(2)
    ddp = rank.wrap(model)
    iteration = 0

    def failing(state, bucket):
        if iteration:
            return mean_all_reduce(bucket)
        future = torch.futures.Future()
        future.set_exception(ValueError("the hook's own error"))
        return future

    ddp.register_comm_hook(None, failing)
    loss = ddp(rank.batch(2)).sum()
    with rank.raises("backward", Exception, match="Unable to cast|the hook's own error"):
        loss.backward()
    for iteration in range(1, 4):  # noqa: B007 (the hook reads it)
        ddp.zero_grad()
        ddp(rank.batch(2)).sum().backward()
        rank.law("later iterations are right", model.weight.grad, rank.mean(lambda r: rank.batch(2, of=r)))


@case("hook_failures.documented_example_fails", level=HAZARD, source=REGISTER)
def test_the_documented_example_of_an_all_reducing_hook_fails(rank):
    """
    The docstring's second example, `all_reduce(tensor).get_future()`, fails with AttributeError: without `async_op=True` an all-reduce returns None.

    With `async_op=True` the same hook works.
    """
    model = linear(2)
    ddp = rank.wrap(model)
    how = {}

    def encode_and_decode(state, bucket):
        future = dist.all_reduce(bucket.buffer() / rank.world_size, **how).get_future()
        return future.then(lambda done: done.value()[0])

    ddp.register_comm_hook(None, encode_and_decode)
    loss = ddp(rank.batch(2)).sum()
    with rank.raises("as_documented", Exception, match="'NoneType' object has no attribute 'get_future'"):
        loss.backward()
    how["async_op"] = True
    again = linear(2)
    ddp = rank.wrap(again)
    ddp.register_comm_hook(None, encode_and_decode)
    ddp(rank.batch(2)).sum().backward()
    rank.law("with async_op=True it works", again.weight.grad, rank.mean(lambda r: rank.batch(2, of=r)))
