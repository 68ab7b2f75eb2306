"""Whatever a rank does, its case ends with a verdict that names it, the next case is judged, and nothing is left."""

import re
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.runs import Little, processes, until

pytestmark = pytest.mark.timeout(600)  # the runs of a module start together, on a machine that may be busy

CASES = '''\
"""Ranks that misbehave, one after another, each with a peer that is well."""

import ctypes
import os
import signal
import time

import torch
import torch.distributed as dist

from ddp_conformance import MUST, case
from ddp_conformance.models import linear

HERE = os.path.dirname(os.path.abspath(__file__))


def well(rank):
    model = linear(2)
    ddp = rank.wrap(model)
    ddp(rank.batch(2)).sum().backward()
    rank.law("the mean", model.weight.grad, rank.mean(lambda r: rank.batch(2, of=r)))


@case("drill.well_before", level=MUST, source="here")
def test_well_before(rank):
    """Nothing is wrong."""
    well(rank)


@case("drill.raises", level=MUST, source="here")
def test_raises(rank):
    """One rank raises what cannot be pickled."""
    well(rank)
    if rank.index == 1:

        class Local(Exception):
            def __reduce__(self):
                raise TypeError("unpicklable")

        raise Local("of rank one")


@case("drill.exits", level=MUST, source="here")
def test_exits(rank):
    """One rank leaves with 3 without a word."""
    well(rank)
    if rank.index == 1:
        print("last words", end="")
        os._exit(3)


@case("drill.segfaults", level=MUST, source="here")
def test_segfaults(rank):
    """One rank dies by SIGSEGV in C, its peer waits for it in a collective."""
    well(rank)
    rank.show("before", rank.index)
    if rank.index == 1:
        ctypes.string_at(0)
    dist.barrier()


@case("drill.hangs_in_collective", level=MUST, source="here")
def test_hangs_in_collective(rank):
    """One rank waits in a collective that the other does not join."""
    well(rank)
    if rank.index == 0:
        dist.all_reduce(torch.ones(1))


@case("drill.hangs_in_python", level=MUST, source="here")
def test_hangs_in_python(rank):
    """One rank loops for ever."""
    well(rank)
    while rank.index == 1:
        pass


@case("drill.hangs_in_c", level=MUST, source="here")
def test_hangs_in_c(rank):
    """One rank sleeps in C and holds the GIL."""
    well(rank)
    while rank.index == 1:
        ctypes.PyDLL(None).sleep(1000)


@case("drill.forks", level=MUST, source="here")
def test_forks(rank):
    """Every rank leaves a child that ignores what can be ignored and holds the rank's pipes."""
    well(rank)
    if not os.fork():
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
        while True:
            time.sleep(1000)


@case("drill.forks_and_exits", level=MUST, source="here")
def test_forks_and_exits(rank):
    """A rank whose child lives on exits without a word."""
    well(rank)
    if rank.index == 1:
        if not os.fork():
            while True:
                time.sleep(1000)
        os._exit(4)


@case("drill.well_after", level=MUST, source="here", world=3)
def test_well_after(rank):
    """Nothing is wrong."""
    well(rank)
'''

GOLDEN = """
[well_before]
laws = 1
[forks]
laws = 1
[well_after]
laws = 1
"""

TOLD = {
    "drill.well_before": ("holds", ""),
    "drill.raises": ("violated", r"rank 1: raised Local\n.*of rank one"),
    "drill.exits": ("violated", r"rank 1: exit 3.*rank 1 output -----\nlast words"),
    "drill.segfaults": ("violated", r"rank 1: SIGSEGV\n.*rank 1 stack -----.*Segmentation fault.*string_at"),
    "drill.hangs_in_collective": ("violated", r"rank 0: waiting\n.*rank 0 stack -----.*all_reduce"),
    "drill.hangs_in_python": ("violated", r"rank 1: waiting\n.*rank 1 stack -----.*in test_hangs_in_python"),
    "drill.hangs_in_c": ("violated", r"rank 1: waiting\n.*rank 1 stack -----.*in test_hangs_in_c"),
    "drill.forks": ("holds", ""),
    "drill.forks_and_exits": ("violated", "rank 1: exit 4"),
    "drill.well_after": ("holds", ""),
}

HOW = {
    "alone, without xdist": {},
    "-n2": {},
    "from / by pytest PATH": {
        "command": (str(Path(sys.executable).with_name("pytest")),),
        "cwd": Path("/"),
        "environment": {
            "PYTHONUNBUFFERED": None,
            "TORCH_DISTRIBUTED_DEBUG": "DETAIL",
            "RANK": "7",
            "MASTER_ADDR": "nowhere",
        },
    },
}
ALONE = "alone, without xdist"
OPTIONS = {"-n2": ("-n2",), ALONE: ("-p", "no:xdist")}


def left(temporary):
    """What is left of a run, but for the base of tmp_path that pytest keeps and the cache that torch makes, empty."""
    kept = [path for path in temporary.iterdir() if not path.name.startswith("pytest-of-")]
    return [path for path in kept if not path.name.startswith("torchinductor_") or list(path.iterdir())]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The same suite, started in every way; all side by side in one directory."""
    little = Little(tmp_path_factory.mktemp("drills") / "suite")
    little.write("test_drill.py", CASES)
    little.write("golden/drill.toml", GOLDEN)
    long = tmp_path_factory.mktemp("tmp") / ("long" * 60)[: 200 - len(str(tmp_path_factory.getbasetemp())) - 6]
    long.mkdir()
    assert len(str(long)) >= 200
    HOW["-n2"]["environment"] = {"TMPDIR": str(long)}
    shared = set(Path("/dev/shm").iterdir())
    with ThreadPoolExecutor(2) as pool:

        def run(how):
            running = little.start("--case-deadline=3", *OPTIONS.get(how, ()), **HOW[how])
            finished = running.finish()
            return finished, until(lambda: not running.processes(), within=5, what="the end of all its processes")

        done = dict(zip(HOW, pool.map(run, HOW), strict=True))
    until(lambda: not set(Path("/dev/shm").iterdir()) - shared, what="the end of shared memory")
    assert not left(long)
    return {how: finished for how, (finished, _) in done.items()}


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("name", TOLD)
def test_a_rank_that_misbehaves_is_named_and_its_neighbours_are_judged(runs, name, how):
    run = runs[how]
    verdict, pattern = TOLD[name]
    assert run.verdicts.get(name) == verdict, run.output
    assert re.search(pattern, run.told[name].message, re.DOTALL), run.told[name].message


@pytest.mark.parametrize("how", HOW)
def test_a_run_leaves_no_process_and_no_temporary_file(runs, how):
    run = runs[how]
    assert run.exit == 1
    assert not left(run.record.parent / "tmp")


def test_a_death_keeps_the_facts_before_it(runs):
    assert runs[ALONE].cases["drill.segfaults"]["facts"]["before"] == ["0", "1"]
    assert runs[ALONE].cases["drill.segfaults"]["laws"] == {"the mean": {"held": 2, "broken": 0}}


@pytest.mark.parametrize("how", [how for how in HOW if how != ALONE])
def test_the_case_lines_are_the_same_however_a_run_is_started(runs, how):
    def lines(run):
        return {name: {**line, "seconds": 0, "why": line["why"][:12], "test": ""} for name, line in run.cases.items()}

    assert lines(runs[how]) == lines(runs[ALONE])


def test_variables_that_would_change_what_ddp_does_are_hidden_and_named(runs):
    output = runs["from / by pytest PATH"].output
    assert "variables hidden from ranks: MASTER_ADDR RANK TORCH_DISTRIBUTED_DEBUG\n" in output
    assert "variables hidden from ranks: none\n" in runs[ALONE].output


def test_no_process_of_any_run_is_left(runs):
    assert all(not processes(run.record.parent.name) for run in runs.values())
