"""Adapters of other DDPs: what each offers, what it lacks, and that a copy of its module is a module of its own."""

import contextlib
import copy
import pickle
from dataclasses import dataclass

import pytest
import torch
from ddp_conformance.subject import NotOffered, Subject
from torch import distributed as dist

from tests.reference_ddp import ReferenceDDP
from tests.runs import Little


class Adapter:
    """An object with all that an adapter may have; it reduces after backward."""

    def __init__(self):
        self.said = []

    def setup(self):
        self.said.append("setup")

    def wrap(self, module):
        assert self.said == ["setup"], self.said
        return Late(module)

    def after_backward(self, ddp):
        ddp.reduce()

    def no_sync(self, ddp):
        return ddp.quiet()

    def teardown(self):
        print("torn down")


class Late(torch.nn.Module):
    """Averages when it is told to and not in backward."""

    def __init__(self, module):
        super().__init__()
        self.module, self.on = module, True
        for tensor in [*module.parameters(), *module.buffers()]:
            dist.broadcast(tensor.detach(), 0)

    def forward(self, *args):
        return self.module(*args)

    def reduce(self):
        for parameter in self.module.parameters() if self.on else ():
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()

    @contextlib.contextmanager
    def quiet(self):
        self.on = False
        yield
        self.on = True


adapter = Adapter()


class Elsewhere:
    """An adapter of something whose gradients, parameters and forward are not where a module's are."""

    def wrap(self, module):
        return Engine(module)

    def forward(self, engine, *inputs):
        return engine.inner(*inputs)

    def after_backward(self, engine):
        engine.reduce()

    def gradients(self, engine):
        return zip(engine.inner.parameters(), engine.main_grads, strict=True)

    def parameters(self, engine, recurse=True):
        return engine.inner.parameters(recurse)

    def buffers(self, engine, recurse=True):
        return engine.inner.buffers(recurse)


class Engine(torch.nn.Module):
    """Trains a module that is none of its own, and leaves `.grad` to itself."""

    def __init__(self, module):
        super().__init__()
        self.all, self.main_grads = [module], []
        for tensor in [*module.parameters(), *module.buffers()]:
            dist.broadcast(tensor.detach(), 0)

    @property
    def inner(self):
        return self.all[0]

    def reduce(self):
        self.main_grads = [parameter.grad / dist.get_world_size() for parameter in self.inner.parameters()]
        for gradient in self.main_grads:
            dist.all_reduce(gradient)


elsewhere = Elsewhere()


def plain(module, find_unused_parameters=False):
    """A function, which says nothing of the methods of what it returns."""
    return ReferenceDDP(module, find_unused_parameters=find_unused_parameters)


def takes_all(module, **options):
    """A function that names none of the options that it takes."""
    return ReferenceDDP(module, **options)


def bare(module):
    """A function whose modules have no method of DDP's."""
    return module


class Watched:
    """An adapter that knows which modules' backwards ended."""

    ended: list[object] = []

    def wrap(self, module):
        return module

    def after_backward(self, module):
        self.ended.append(module)


watched = Watched()


def get_ddp(module):
    """CS336's name for wrap."""
    return Late(module)


def ddp_on_after_backward(ddp, optimizer):
    """CS336's name for after_backward."""
    ddp.reduce()


CASE = """
    import torch
    from ddp_conformance import MUST, case
    from ddp_conformance.models import linear

    @case("mean_gradients.mean", level=MUST, source="DistributedDataParallel")
    def test_mean(rank):
        "Every rank gets the mean."
        model = linear(2)
        ddp = rank.wrap(model, static_graph=False)
        own = rank.batch(2)
        ddp(own).sum().backward()
        rank.law("the mean", model.weight.grad, rank.mean(lambda r: rank.batch(2, of=r)))

    @case("construction.parameters", level=MUST, source="DistributedDataParallel")
    def test_parameters(rank):
        "The wrapped module has the module's parameters and buffers."
        model = torch.nn.BatchNorm1d(2)
        ddp = rank.wrap(model)
        rank.law("parameters", [id(each) for each in ddp.parameters()], [id(each) for each in model.parameters()])
        rank.law("buffers", [id(each) for each in ddp.buffers()], [id(each) for each in model.buffers()])

    @case("no_sync.accumulates", level=MUST, source="DistributedDataParallel")
    def test_local(rank):
        "Inside no_sync gradients are local."
        model = linear(2)
        ddp = rank.wrap(model)
        with ddp.no_sync():
            ddp(rank.batch(2)).sum().backward()
        rank.law("local", model.weight.grad, rank.batch(2))

    @case("logging.data", level=MUST, source="DistributedDataParallel")
    def test_logging(rank):
        "There is logging data."
        rank.law("three", len(rank.log(rank.wrap(linear(2)), "a", "b", "c")), 3)

    @case("static_graph.taken", level=MUST, source="DistributedDataParallel")
    def test_static(rank):
        "The option is taken."
        rank.wrap(linear(2), static_graph=True)
        rank.law("taken", 1, 1)
"""


@pytest.mark.parametrize(
    ("name", "offered", "lacking"),
    [
        ("plain", ["find_unused_parameters", "no_sync", "join"], ["static_graph"]),
        ("adapter", ["no_sync"], ["static_graph", "find_unused_parameters"]),
        ("ReferenceDDP", ["find_unused_parameters", "no_sync"], ["static_graph", "join"]),
        ("takes_all", ["static_graph", "join"], []),
    ],
)
def test_an_option_is_offered_that_wrap_names_and_a_method_unless_a_class_lacks_it(name, offered, lacking):
    subject = Subject(f"tests.test_adapters:{name}")
    assert [each for each in (*offered, *lacking) if subject.offers(each)] == offered


def test_a_method_that_a_function_was_supposed_to_give_is_not_offered_once_it_is_seen_to_lack_it():
    """Else a case that only sets such an attribute, or counts what follows from it, would find a law broken."""
    subject = Subject("tests.test_adapters:bare")
    subject.need("finalize_backward")
    with pytest.raises(NotOffered, match="has no finalize_backward"):
        subject.wrap(torch.nn.Linear(1, 1))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))])
def test_a_copy_of_an_adapters_module_has_a_backward_of_its_own(copied):
    module = Subject("tests.test_adapters:watched").wrap(torch.nn.Linear(1, 1))
    other = copied(module)
    Watched.ended.clear()
    for _ in range(2):
        other(torch.ones(1, 1)).sum().backward()
    module(torch.ones(1, 1)).sum().backward()
    assert list(map(id, Watched.ended)) == [id(other), id(other), id(module)]


def test_a_backward_that_raised_does_not_keep_the_next_from_its_end():
    module = Subject("tests.test_adapters:watched").wrap(torch.nn.Linear(1, 1))

    def fail(gradient):
        raise ArithmeticError

    Watched.ended.clear()
    raises = module.weight.register_hook(fail)
    with pytest.raises(ArithmeticError):
        module(torch.ones(1, 1)).sum().backward()
    raises.remove()
    module(torch.ones(1, 1)).sum().backward()
    assert list(map(id, Watched.ended)) == [id(module)]


@dataclass
class Output:
    """What some models return: a tensor deep inside, and themselves."""

    inside: dict[str, object]

    def __post_init__(self):
        self.inside["whole"] = self


def test_the_end_of_backward_is_seen_whatever_the_tensors_are_returned_in():
    class Returns(torch.nn.Linear):
        def forward(self, x):
            return Output({"sum": [super().forward(x).sum()], "by": self})

    module = Subject("tests.test_adapters:watched").wrap(Returns(1, 1))
    Watched.ended.clear()
    module(torch.ones(1, 1)).inside["sum"][0].backward()
    assert list(map(id, Watched.ended)) == [id(module)]
    assert not module.weight._backward_hooks, "a parameter is no output"


@pytest.mark.parametrize(
    "subject", ["tests.test_adapters:adapter", "tests.test_adapters:elsewhere", "tests.test_adapters"]
)
def test_adapters_are_judged_and_what_they_lack_is_not_offered(subject, tmp_path):
    suite = Little(tmp_path / "suite")
    suite.write("test_little.py", CASE)
    run = suite.run(f"--subject={subject}")
    assert run.exit == 0, run.output
    assert run.verdicts == {
        "mean_gradients.mean": "holds",
        "construction.parameters": "holds",
        "no_sync.accumulates": "holds" if subject.endswith("adapter") else "not offered",
        "logging.data": "not offered",
        "static_graph.taken": "not offered",
    }
    assert f"MUST cases that {subject} offers hold" in run.output
