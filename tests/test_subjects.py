"""A subject that cannot be used is told so in one line before the first case, and one that misbehaves harms only itself."""

import contextlib
import copy
import os
import pickle
import signal
import time
from dataclasses import replace
from textwrap import dedent

import pytest
import torch
from ddp_conformance import record, smoke
from ddp_conformance.lanes import Lane
from ddp_conformance.subject import NotOffered, Subject, SubjectError
from ddp_conformance.subject import check as check_import
from ddp_conformance.suite import Settings, Suite
from torch import distributed as dist

from tests.reference_ddp import ReferenceDDP
from tests.runs import ROOT, Little

LANE = Lane("gloo", "cpu")


def returns_nothing(module, **options):
    ReferenceDDP(module, **options)


def raises(module, **options):
    raise LookupError("no such luck")


def hangs(module, **options):
    while True:
        time.sleep(1)


def kills_its_rank(module, **options):
    os.kill(os.getpid(), signal.SIGKILL)


def leaves(module, **options):
    os._exit(3)


def takes_nothing():
    """A callable that no module can be handed to."""


class AnotherOutput(ReferenceDDP):
    """Returns something else than the module."""

    def forward(self, *args, **kwargs):
        return {"output": super().forward(*args, **kwargs)}


def prints_garbage(module, **options):
    os.write(1, b"\xff\x00{]\n" * 1000)
    os.write(2, b'{"done": "returned"}\n' * 1000)
    return ReferenceDDP(module, **options)


def changes_everything(module, **options):
    ddp = ReferenceDDP(module, **options)
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(7)
    os.environ["MASTER_ADDR"] = "elsewhere"
    return ddp


def ends_the_group(module, **options):
    ddp = ReferenceDDP(module, **options)
    dist.destroy_process_group()
    return ddp


def ends_the_group_it_needs(module, **options):
    dist.destroy_process_group()
    return ReferenceDDP(module, **options)


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


@pytest.fixture(scope="module")
def suite():
    settings = Settings(lanes=(LANE,), torch=record.torch_build()["torch"], path=(str(ROOT),))
    suite = Suite(settings)
    yield suite
    suite.close()


def check(suite, name):
    suite.settings = replace(suite.settings, subject=f"tests.test_subjects:{name}")
    return smoke.check(suite, LANE)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("returns_nothing", "it returns no module, but NoneType, which cannot be called, on rank 0"),
        ("raises", "the constructor does not work on rank 0: raised LookupError: no such luck"),
        ("kills_its_rank", "the constructor does not work on rank 0: SIGKILL"),
        ("leaves", "the constructor does not work on rank 0: exit 3"),
        ("takes_nothing", "the constructor does not work on rank 0: raised TypeError: "),
        ("AnotherOutput", "the forward of a wrapped Linear returns dict, and not the module's output"),
        ("hangs", "the constructor does not end: after 1 s still in it, or waiting for a peer, was rank 0 and 1"),
        ("LANE", "neither callable nor an object with a method wrap"),
        ("nothing_of_that_name", "tests.test_subjects has no nothing_of_that_name"),
    ],
)
def test_a_broken_adapter_is_named_in_one_line(suite, monkeypatch, name, why):
    if name == "hangs":
        monkeypatch.setattr(smoke, "DEADLINE", 1.0)
    broken, _ = check(suite, name)
    assert broken is not None
    assert broken.startswith(f"--subject tests.test_subjects:{name}: {why}")
    assert "\n" not in broken


@pytest.mark.parametrize("name", ["ReferenceDDP", "prints_garbage", "adapter", "elsewhere"])
def test_an_adapter_that_works_passes(suite, name):
    assert check(suite, name) == (None, [])


def test_what_a_subject_changes_for_everybody_is_remarked(suite):
    assert check(suite, "changes_everything") == (
        None,
        [
            "--subject tests.test_subjects:changes_everything changes the default dtype, the random state, "
            "the environment, which is not its own"
        ],
    )
    _, remarks = check(suite, "ends_the_group")
    assert remarks == [
        "--subject tests.test_subjects:ends_the_group destroys the default process group, which is not its own"
    ]


def test_what_its_import_changed_is_remarked_too(suite, tmp_path):
    """Else the author would be told that DDP does so, by every case."""
    text = """
        import os
        import torch
        from tests.reference_ddp import ReferenceDDP

        torch.set_default_dtype(torch.float64)
        torch.rand(1)
        os.environ["MASTER_ADDR"] = "elsewhere"
    """
    (tmp_path / "restless.py").write_text(dedent(text))
    suite.settings = replace(suite.settings, subject="restless:ReferenceDDP", path=(str(ROOT), str(tmp_path)))
    assert smoke.check(suite, LANE) == (
        None,
        [
            "--subject restless:ReferenceDDP on import changes the default dtype, the random state, "
            "the environment, which is not its own"
        ],
    )


def test_an_import_that_starts_a_process_group_is_named_in_one_line(suite, tmp_path):
    text = """
        from torch import distributed
        from tests.reference_ddp import ReferenceDDP

        distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    """
    (tmp_path / "early.py").write_text(dedent(text))
    suite.settings = replace(suite.settings, subject="early:ReferenceDDP", path=(str(ROOT), str(tmp_path)))
    broken, _ = smoke.check(suite, LANE)
    assert broken == (
        "--subject early:ReferenceDDP: its import starts the default process group, which is the suite's to start"
    )


def test_a_step_that_fails_for_what_the_subject_changed_is_told_with_it(suite):
    broken, _ = check(suite, "ends_the_group_it_needs")
    assert broken is not None
    assert broken.startswith("--subject tests.test_subjects:ends_the_group_it_needs: the constructor does not work")
    assert broken.endswith("; it destroys the default process group")
    assert "\n" not in broken


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("raise ImportError('no such part\\n  in this build')", "ImportError: no such part   in this build"),
        ("import atexit\natexit.register(print, 'bye', file=sys.stderr)\nimport no_such_part", "No module named"),
        ("sys.stderr.write('loading ...')\nimport no_such_part", "No module named 'no_such_part'"),
    ],
    ids=["two lines", "a handler at exit", "an unfinished line"],
)
def test_why_a_subject_does_not_import_is_not_lost(tmp_path, text, why):
    (tmp_path / "broken.py").write_text(f"import sys\n{text}\n")
    with pytest.raises(SubjectError) as caught:
        check_import("broken:ddp", [str(tmp_path)])
    assert str(caught.value).startswith("--subject broken:ddp: broken does not import: ")
    assert why in str(caught.value)
    assert "\n" not in str(caught.value)


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
        ("prints_garbage", ["static_graph", "join"], []),
    ],
)
def test_an_option_is_offered_that_wrap_names_and_a_method_unless_a_class_lacks_it(name, offered, lacking):
    subject = Subject(f"tests.test_subjects:{name}")
    assert [each for each in (*offered, *lacking) if subject.offers(each)] == offered


def test_a_method_that_a_function_was_supposed_to_give_is_not_offered_once_it_is_seen_to_lack_it():
    """Else a case that only sets such an attribute, or counts what follows from it, would find a law broken."""
    subject = Subject("tests.test_subjects:bare")
    subject.need("finalize_backward")
    with pytest.raises(NotOffered, match="has no finalize_backward"):
        subject.wrap(torch.nn.Linear(1, 1))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))])
def test_a_copy_of_an_adapters_module_has_a_backward_of_its_own(copied):
    module = Subject("tests.test_subjects:watched").wrap(torch.nn.Linear(1, 1))
    other = copied(module)
    Watched.ended.clear()
    for _ in range(2):
        other(torch.ones(1, 1)).sum().backward()
    module(torch.ones(1, 1)).sum().backward()
    assert list(map(id, Watched.ended)) == [id(other), id(other), id(module)]


@pytest.mark.parametrize(
    "subject", ["tests.test_subjects:adapter", "tests.test_subjects:elsewhere", "tests.test_subjects"]
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


def test_a_broken_adapter_ends_the_run_before_the_first_case(tmp_path):
    suite = Little(tmp_path / "suite")
    suite.write("test_little.py", CASE)
    for workers in ("-n0", "-n2"):
        run = suite.run("--subject=tests.test_subjects:returns_nothing", workers)
        assert run.exit == 4, run.output
        assert "ERROR: --subject tests.test_subjects:returns_nothing: it returns no module" in run.output
        assert "Traceback" not in run.output
