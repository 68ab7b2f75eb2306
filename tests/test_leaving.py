"""Nothing outlives its parent, however that dies, and a long run leaves nothing behind and holds on to nothing."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.runs import SETTINGS, Little, parent, processes, until

pytestmark = pytest.mark.timeout(600)

WAITS = '''\
"""A case whose ranks have children, and wait until they are killed."""

import os
import time
from pathlib import Path

import torch.distributed as dist

from ddp_conformance import MUST, case

HERE = Path(__file__).parent


@case("leaving.waits", level=MUST, source="here")
def test_waits(rank):
    """Each rank forks a child, says whose it is, and waits with it, once."""
    if not os.fork():
        while True:
            time.sleep(1000)
    (HERE / f"server_of_{rank.index}").symlink_to(str(os.getppid()))
    time.sleep(1000)


@case("leaving.well_after", level=MUST, source="here")
def test_well_after(rank):
    """The next case is judged, whatever became of the server."""
    dist.barrier()
    rank.law("one is one", 1, 1)
'''


def waiting(tmp_path, *arguments):
    """A run whose first case waits, each of its ranks with a child, and the server that those ranks name."""
    little = Little(tmp_path / "suite")
    little.write("test_leaving.py", WAITS)
    little.write("golden/leaving.toml", "[well_after]\nlaws = 1\n")
    running = little.start("--case-deadline=90", *arguments)
    told = [little.folder / f"server_of_{index}" for index in (0, 1)]
    until(lambda: all(link.is_symlink() for link in told), within=200, what="the ranks' forks")
    assert len(running.processes()) >= 6  # pytest, its server, two ranks, two children
    [server] = {int(link.readlink().name) for link in told}
    return running, server


@pytest.mark.parametrize("workers", [(), ("-n2",)], ids=["alone", "xdist"])
def test_pytest_killed_leaves_no_process(tmp_path, workers):
    running, _ = waiting(tmp_path, *workers)
    os.kill(running.process.pid, signal.SIGKILL)
    until(lambda: not running.processes(), within=10, what="the end of every process")
    assert running.process.wait(10) == -signal.SIGKILL
    assert not json.loads(running.record.read_text().splitlines()[-1])["line"] == "end"


def test_a_worker_killed_leaves_no_process(tmp_path):
    running, server = waiting(tmp_path, "-n2")
    os.kill(parent(server), signal.SIGKILL)
    run = running.finish()
    assert run.exit == 1
    assert "crashed while running" in run.output
    assert run.verdicts == {"leaving.well_after": "holds"}
    until(lambda: not running.processes(), what="the end of every process")


@pytest.mark.parametrize("workers", [(), ("-n2",)], ids=["alone", "xdist"])
def test_the_server_killed_is_no_data_and_the_next_case_has_another(tmp_path, workers):
    running, server = waiting(tmp_path, *workers)
    tree = [pid for pid in running.processes() if server in (parent(pid), parent(parent(pid)))]
    assert len(tree) == 4
    os.kill(server, signal.SIGKILL)
    until(lambda: not {*tree, server} & set(running.processes()), what="the end of the ranks and their children")
    run = running.finish()
    assert run.exit == 1
    assert run.verdicts == {"leaving.waits": "no data", "leaving.well_after": "holds"}
    assert run.outcomes == {"leaving.waits": "error", "leaving.well_after": "passed"}
    assert "the rank server ended with status -9" in run.told["leaving.waits"].message
    assert not running.processes()


def test_interrupted_leaves_no_process_and_an_incomplete_record(tmp_path):
    running, _ = waiting(tmp_path)
    os.kill(running.process.pid, signal.SIGINT)
    run = running.finish()
    assert run.exit == 2, run.output
    until(lambda: not running.processes(), within=2, what="the end of the ranks' children, for which nobody can wait")
    last = json.loads(run.record.read_text().splitlines()[-1])
    assert last["line"] != "end" or not last["complete"]


def test_what_a_killed_run_left_is_removed_by_the_next(tmp_path):
    """A killed pytest cannot remove its case's directory; the next run in the same place does."""
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    left = temporary / f"ddp-conformance-{free_pid()}-x"
    left.mkdir()
    mine = temporary / f"ddp-conformance-{os.getpid()}-x"
    mine.mkdir()
    little = Little(tmp_path / "suite")
    little.write("test_well.py", 'def test_program(ranks):\n    assert ranks(program, world=1).outcomes() == ["returned"]\n\n\ndef program(rank):\n    pass\n')  # fmt: skip
    run = little.run(environment={"TMPDIR": str(temporary)})
    assert run.exit == 0, run.output
    assert not left.exists()
    assert mine.exists()


def free_pid() -> int:
    return next(pid for pid in range(2**22 - 1, 0, -1) if not Path(f"/proc/{pid}").exists())


MANY = '''\
"""Many cases of the ordinary kind, in one run."""

from ddp_conformance import MUST, case
from ddp_conformance.models import linear


@case("many.backward", level=MUST, source="here", each={{f"n{{i}}": i for i in range({cases})}})
def test_backward(rank, number):
    """One backward."""
    model = linear(2)
    ddp = rank.wrap(model)
    ddp(rank.batch(2)).sum().backward()
    rank.law("the mean", model.weight.grad, rank.mean(lambda r: rank.batch(2, of=r)))
'''

COUNTS = '''\
import json
import os
import resource
from pathlib import Path

pytest_plugins = ["ddp_conformance.plugin"]
SEEN = Path(__file__).with_name("seen.jsonl")


def ours():
    """This process and its descendants."""
    found = {os.getpid()}
    for entry in sorted(Path("/proc").glob("[0-9]*"), key=lambda entry: int(entry.name)):
        try:
            state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
        except OSError:
            continue
        if int(parent) in found:
            found.add(int(entry.name))
    return sorted(found)


def pytest_runtest_teardown(item):
    here = ours()
    seen = {
        "processes": len(here),
        "fds": [len(os.listdir(f"/proc/{pid}/fd")) for pid in here],
        "temporary": [name for name in os.listdir(os.environ["TMPDIR"]) if name.startswith("ddp-")],
        "memory": [int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096 for pid in here],
    }
    with SEEN.open("a") as file:
        file.write(json.dumps(seen) + "\\n")
'''


EMPTY = """\
import pytest


@pytest.mark.parametrize("number", range({cases}), ids="n{{}}".format)
def test_nothing(number):
    pass
"""


def seen(folder):
    """What COUNTS wrote down after each test, and by how many bytes each process has grown since the twentieth."""
    lines = [json.loads(line) for line in (folder / "seen.jsonl").read_text().splitlines()]
    return lines, [late - early for late, early in zip(lines[-1]["memory"], lines[20]["memory"], strict=True)]


@pytest.mark.parametrize(
    "cases", [200, pytest.param(5000, marks=[pytest.mark.long, pytest.mark.timeout(7200)])], ids="{} cases".format
)
def test_many_cases_in_a_row_leave_nothing(tmp_path, cases):
    """
    Processes, descriptors and files are the same after each case, and memory is flat but for what pytest itself keeps.

    Pytest keeps the reports of each test until the end of the run: 4 KB of an empty one, and more for JUnit, so that this
    run is one without. By how much it grows over so many empty tests, settings the same, is measured, too, and is not ours.
    """
    empty = tmp_path / "empty"
    empty.mkdir()
    (empty / "conftest.py").write_text(COUNTS.replace('pytest_plugins = ["ddp_conformance.plugin"]', ""))
    (empty / "pytest.ini").write_text(SETTINGS)
    (empty / "test_empty.py").write_text(EMPTY.format(cases=cases))
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", "."],
        cwd=empty,
        env={**os.environ, "TMPDIR": str(empty)},
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stdout
    _, [of_pytest] = seen(empty)

    little = Little(tmp_path / "suite")
    little.write("conftest.py", COUNTS)
    little.write("test_many.py", MANY.format(cases=cases))
    little.write("golden/many.toml", "".join(f'["backward/n{i}"]\nlaws = 1\n' for i in range(cases)))
    shared = set(Path("/dev/shm").iterdir())
    running = little.start("--junitxml=")
    run = running.finish(500 if cases == 200 else 7000)
    assert run.counts == {"passed": cases}, run.output
    lines, [grown, of_server] = seen(little.folder)
    assert {each["processes"] for each in lines} == {2}, "pytest and its server, and no zombie"
    assert len({tuple(each["fds"]) for each in lines[1:]}) == 1
    assert all(each["temporary"] == [] for each in lines)
    assert of_server < 1e6, f"the server has {of_server} bytes more than after 20 cases"
    assert grown - of_pytest < 1e6 + 1000 * cases, f"{grown} bytes more than after 20 cases, empty ones {of_pytest}"
    assert not running.processes()
    until(lambda: not set(Path("/dev/shm").iterdir()) - shared, what="the end of shared memory")
    seconds = sorted(line["seconds"] for line in run.cases.values())
    told = f"pytest {grown} bytes (empty tests: {of_pytest}), the server {of_server}"
    print(f"median of {cases} cases: {seconds[cases // 2]} s; grown since case 20: {told}")


TEN = '''\
"""Ten cases for fresh interpreters, as different as they come."""

import os
import signal
import sys

import torch.distributed as dist

from ddp_conformance import HAZARD, MUST, OBSERVED, case
from ddp_conformance.models import linear


@case("ten.backward", level=MUST, source="here", world=(1, 2))
def test_backward(rank):
    """One backward."""
    model = linear(2)
    ddp = rank.wrap(model)
    ddp(rank.batch(2)).sum().backward()
    rank.law("the mean", model.weight.grad, rank.mean(lambda r: rank.batch(2, of=r)))


@case("ten.alone", level=MUST, source="here", group=False, each={"a": 1, "b": 2, "c": 3})
def test_alone(rank, value):
    """No group."""
    rank.show("value", value)
    rank.law("one is one", 1, 1)


@case("ten.raises", level=MUST, source="here", group=False)
def test_raises(rank):
    """An exception."""
    raise KeyError("x")


@case("ten.dies", level=HAZARD, source="here", group=False, may=("die",))
def test_dies(rank):
    """A permitted death."""
    os.kill(os.getpid(), signal.SIGSEGV)
    signal.pause()


@case("ten.waits", level=HAZARD, source="here", group=False, may=("hang",))
def test_waits(rank):
    """A permitted hang."""
    with rank.may_wait():
        signal.pause()


@case("ten.broken", level=MUST, source="here", group=False)
def test_broken(rank):
    """A broken law."""
    rank.law("one is two", 1, 2)


@case("ten.environment", level=OBSERVED, source="here", group=False, env={"TEN": "10"})
def test_environment(rank):
    """Variables for fresh interpreters only."""
    rank.show("ten", os.environ.get("TEN"))
    rank.show("hash", sys.flags.hash_randomization)
'''


def test_spawned_ranks_say_what_forked_ones_say(tmp_path):
    little = Little(tmp_path / "suite")
    little.write("test_ten.py", TEN)
    forked, spawned = (little.run("-n2", "--ranks", ranks) for ranks in ("forked", "spawned"))
    assert len(spawned.cases) == 10

    def told(run):
        keys = ("verdict", "facts", "laws", "level", "program", "world", "lane")
        return {name: {key: line[key] for key in keys} for name, line in run.cases.items()}

    assert told(spawned) == told(forked)
    assert spawned.cases["ten.environment"]["facts"] == {"ten": "10", "hash": "0"}
    assert spawned.cases["ten.dies"]["facts"]["outcome"] == "SIGSEGV"
    assert spawned.cases["ten.waits"]["facts"]["outcome"] == "waiting"


def test_two_runs_side_by_side_do_not_disturb_each_other(tmp_path):
    little = Little(tmp_path / "suite")
    little.write("test_many.py", MANY.format(cases=10))
    little.write("golden/many.toml", "".join(f'["backward/n{i}"]\nlaws = 1\n' for i in range(10)))
    running = [little.start(), little.start("-n2")]
    runs = [each.finish() for each in running]
    assert [run.exit for run in runs] == [0, 0], runs[0].output + runs[1].output
    assert all(not each.processes() for each in running)


def test_the_marker_finds_this_runs_processes_and_no_zombie(tmp_path):
    """The drills above rest on it: a child that has ended and was not waited for is not counted."""
    little = Little(tmp_path / "suite")
    running = little.start("--version")
    assert running.process.pid in processes(running.marker) or running.process.poll() is not None
    until(lambda: not processes(running.marker), what="the end of pytest --version")
    assert Path(f"/proc/{running.process.pid}").exists(), "a zombie, for nobody has waited for it"
    assert running.process.wait() == 0
