"""A subject that cannot be used is told so in one line before the first case, and one that misbehaves harms only itself."""

import os
import signal
import time
from dataclasses import replace
from textwrap import dedent

import pytest
import torch
from ddp_conformance import record, smoke
from ddp_conformance.lanes import Lane
from ddp_conformance.subject import SubjectError
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


@pytest.fixture(scope="module")
def suite():
    settings = Settings(lanes=(LANE,), torch=record.torch_build()["torch"], path=(str(ROOT),))
    suite = Suite(settings)
    yield suite
    suite.close()


def check(suite, name):
    suite.settings = replace(suite.settings, subject=f"tests.test_smoke:{name}")
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
        ("nothing_of_that_name", "tests.test_smoke has no nothing_of_that_name"),
    ],
)
def test_a_broken_adapter_is_named_in_one_line(suite, monkeypatch, name, why):
    if name == "hangs":
        monkeypatch.setattr(smoke, "DEADLINE", 1.0)
    broken, _ = check(suite, name)
    assert broken is not None
    assert broken.startswith(f"--subject tests.test_smoke:{name}: {why}")
    assert "\n" not in broken


@pytest.mark.parametrize(
    "subject",
    [
        "tests.reference_ddp:ReferenceDDP",
        "tests.test_smoke:prints_garbage",
        "tests.test_adapters:adapter",
        "tests.test_adapters:elsewhere",
    ],
)
def test_an_adapter_that_works_passes(suite, subject):
    suite.settings = replace(suite.settings, subject=subject)
    assert smoke.check(suite, LANE) == (None, [])


def test_what_a_subject_changes_for_everybody_is_remarked(suite):
    assert check(suite, "changes_everything") == (
        None,
        [
            "--subject tests.test_smoke:changes_everything changes the default dtype, the random state, "
            "the environment, which is not its own"
        ],
    )
    _, remarks = check(suite, "ends_the_group")
    assert remarks == [
        "--subject tests.test_smoke:ends_the_group destroys the default process group, which is not its own"
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
    assert broken.startswith("--subject tests.test_smoke:ends_the_group_it_needs: the constructor does not work")
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
    from ddp_conformance import MUST, case
    from ddp_conformance.models import linear

    @case("little.taken", level=MUST, source="DistributedDataParallel")
    def test_taken(rank):
        "A module is taken."
        rank.law("taken", rank.wrap(linear(2)) is None, False)
"""


def test_a_broken_adapter_ends_the_run_before_the_first_case(tmp_path):
    suite = Little(tmp_path / "suite")
    suite.write("test_little.py", CASE)
    for workers in ("-n0", "-n2"):
        run = suite.run("--subject=tests.test_smoke:returns_nothing", workers)
        assert run.exit == 4, run.output
        assert "ERROR: --subject tests.test_smoke:returns_nothing: it returns no module" in run.output
        assert "Traceback" not in run.output
