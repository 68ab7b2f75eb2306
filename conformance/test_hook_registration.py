"""Which communication hooks are taken, how many there may be, and when."""

import functools

import torch
import torch.distributed as dist
from ddp_conformance import HAZARD, MUST, OBSERVED, case
from ddp_conformance.models import linear
from ddp_conformance.rank import as_it_is

REGISTER = "DistributedDataParallel.register_comm_hook"


@case(
    "hook_registration.only_one",
    level=MUST,
    source=REGISTER,
    each={"python_python": "pp", "python_builtin": "pb", "builtin_python": "bp", "builtin_builtin": "bb"},
    catalogue=("I03",),
    torch_tests=("test_c10d_gloo.py::DistributedDataParallelTest::test_ddp_comm_hook_register_just_once",),
)
def test_a_second_hook_is_refused(rank, order):
    """
    A second hook is refused, whichever of the two is built in, and the first stays in force.
    """
    model = linear(2)
    ddp = rank.wrap(model)

    def register(kind):
        if kind == "p":
            ddp.register_comm_hook(None, as_it_is)
        else:
            ddp._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)

    register(order[0])
    with rank.raises("second", RuntimeError, match="can only be called once"):
        register(order[1])
    ddp(rank.batch(2)).sum().backward()
    mean = rank.mean(lambda r: rank.batch(2, of=r))
    rank.law("the first hook stays in force", model.weight.grad, rank.batch(2) if order[0] == "p" else mean)


@case(
    "hook_registration.late_registration_counts",
    level=HAZARD,
    source=REGISTER,
    each={"before_backward": 0, "after_training_began": 3},
    catalogue=("I04",),
)
def test_a_hook_registered_late_takes_effect_without_a_word(rank, steps):
    """
    A hook registered after the forward, or after training began, is neither refused nor ignored: it takes effect in the next backward.

    The documentation says that a hook should be registered before calling backward; nothing checks it.
    """
    model = linear(2)
    ddp = rank.wrap(model)
    for _ in range(steps):
        ddp(rank.batch(2)).sum().backward()
    ddp.zero_grad()
    loss = ddp(rank.batch(2)).sum()
    ddp.register_comm_hook(None, as_it_is)
    loss.backward()
    rank.law("the late hook is in force", model.weight.grad, rank.batch(2))


def wrong_bucket(state, bucket: int):
    return as_it_is(state, bucket)


def wrong_answer(state, bucket) -> int:
    return as_it_is(state, bucket)


def annotated(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    return as_it_is(state, bucket)


@case(
    "hook_registration.signature_checked",
    level=MUST,
    source="nn/parallel/distributed.py: def _check_comm_hook(self, hook)",
    catalogue=("I05",),
    torch_tests=(
        "test_c10d_gloo.py::DistributedDataParallelTest::test_ddp_invalid_comm_hook_init",
        "test_c10d_gloo.py::DistributedDataParallelTest::test_ddp_invalid_comm_hook_return_type",
    ),
)
def test_what_is_no_hook_by_its_signature_is_refused(rank):
    """
    What cannot be called is refused with TypeError, and a wrong annotation of the bucket or of the return value with ValueError; the right annotations are taken.
    """
    model = linear(2)
    ddp = rank.wrap(model)
    with rank.raises("not_callable", TypeError, match="hook must be callable"):
        ddp.register_comm_hook(None, 1)
    with rank.raises("wrong_bucket", ValueError, match="bucket annotation should be dist.GradBucket"):
        ddp.register_comm_hook(None, wrong_bucket)
    with rank.raises(
        "wrong_answer", ValueError, match=r"return annotation should be torch.futures.Future\[torch.Tensor\]"
    ):
        ddp.register_comm_hook(None, wrong_answer)
    ddp.register_comm_hook(None, annotated)
    ddp(rank.batch(2)).sum().backward()
    rank.law("the annotated hook is in force", model.weight.grad, rank.batch(2))


@case(
    "hook_registration.parameter_name",
    level=HAZARD,
    source='nn/parallel/distributed.py: sig.parameters["bucket"].annotation',
    catalogue=("I06",),
)
def test_the_second_parameter_must_be_called_bucket(rank):
    """
    A hook whose second parameter is not called `bucket` is refused with a bare KeyError.

    The documentation shows a signature and never says that its names bind.
    """
    ddp = rank.wrap(linear(2))
    with rank.raises("another_name", KeyError, match="bucket"):
        ddp.register_comm_hook(None, lambda state, gradients: as_it_is(state, gradients))


class Hook:
    def __call__(self, state, bucket):
        return as_it_is(state, bucket)


def bound(factor, state, bucket):
    return as_it_is(state, bucket)


@case(
    "hook_registration.needs_a_name",
    level=HAZARD,
    source=REGISTER,
    catalogue=("I05", "I11"),
)
def test_a_callable_without_a_name_is_refused(rank):
    """
    A partial function and an object with `__call__` are refused with AttributeError, for they have no `__name__`.

    The documentation asks for a callable. A partial that is given `__name__` and `__qualname__` by hand is taken, and a method is.
    """
    model = linear(2)
    ddp = rank.wrap(model)
    partial = functools.partial(bound, 1)
    with rank.raises("partial", AttributeError, match="has no attribute '__name__'"):
        ddp.register_comm_hook(None, partial)
    with rank.raises("object", AttributeError, match="has no attribute '__name__'"):
        ddp.register_comm_hook(None, Hook())
    partial.__name__ = partial.__qualname__ = "bound"
    ddp.register_comm_hook(None, partial)
    ddp(rank.batch(2)).sum().backward()
    rank.law("named by hand it is taken", model.weight.grad, rank.batch(2))


@case(
    "hook_registration.name_is_logged",
    level=OBSERVED,
    source="nn/parallel/distributed.py: self.logger._set_comm_hook_name(hook.__qualname__)",
    catalogue=("I11",),
    torch_tests=("distributed_test.py::_DistTestBase::test_ddp_comm_hook_logging",),
)
def test_the_hooks_name_is_in_the_logging_data(rank):
    """
    The logging data names the hook under `comm_hook`: a Python hook by its qualified name, a built-in one by its enum; without one there is no such key, or it is empty.
    """
    ddp = rank.wrap(linear(2))
    rank.show("without", rank.log(ddp, "comm_hook"))
    ddp.register_comm_hook(None, Named.hook)
    rank.law("a Python hook by its qualified name", rank.log(ddp, "comm_hook"), {"comm_hook": "Named.hook"})
    ddp = rank.wrap(linear(2))
    ddp._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)
    rank.show("built_in", rank.log(ddp, "comm_hook"))
    rank.differs("a built-in one by its enum", rank.log(ddp, "comm_hook"), {"comm_hook": ""})


class Named:
    @staticmethod
    def hook(state, bucket):
        return as_it_is(state, bucket)


@case(
    "hook_registration.errors_are_logged",
    level=OBSERVED,
    source="nn/parallel/distributed.py: def _log_and_throw(self, err_type, err_msg)",
    catalogue=("I12",),
    torch_tests=(
        "distributed_test.py::_DistTestBase::test_ddp_python_error_logged",
        "test_c10d_gloo.py::DistributedDataParallelTest::test_ddp_invalid_comm_hook_init",
    ),
)
def test_a_refused_registration_is_in_the_logging_data(rank):
    """
    When a hook is refused for its signature, the logging data says so: `has_error` becomes 1 and `error` is the message that was raised.
    """
    ddp = rank.wrap(linear(2))
    rank.show("before", rank.log(ddp, "has_error", "error"))
    raised = ""
    try:
        ddp.register_comm_hook(None, 1)
    except TypeError as error:
        raised = str(error)
    logged = rank.log(ddp, "has_error", "error")
    rank.show("logged", logged)
    rank.law("it says that there was an error", logged["has_error"], 1)
    rank.law("it repeats the message", raised != "" and raised in logged["error"], True)
