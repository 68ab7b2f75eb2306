"""A run that is interrupted or killed, at any moment, leaves no process, no file, and nothing that looks whole."""

import json
import os
import random
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from ddp_conformance import record

from tests.runs import Little, parent, servers, until

pytestmark = pytest.mark.timeout(600)  # the runs of a module start together, on a machine that may be busy

GONE = 2
"""Seconds after the end of pytest in which every process of its run must be gone."""
CASES = '''\
"""Cases in which an end may come, each rank with a child."""

import os
import time
from pathlib import Path

from ddp_conformance import MUST, case


@case("family.mean", level=MUST, source="here", each={f"n{i}": i for i in range(8)})
def test_mean(rank, number):
    """Gradients are averaged, while a child of the rank waits, and the last time the rank too where it is told to."""
    from ddp_conformance.models import linear  # here, so that pytest need not import torch

    if not os.fork():
        time.sleep(1000)
    if number == 7 and "WAIT" in os.environ:
        Path(os.environ["WAIT"]).touch()
        time.sleep(1000)
    model = linear(2)
    ddp = rank.wrap(model)
    ddp(rank.batch(2)).sum().backward()
    rank.law("the mean", model.weight.grad, rank.mean(lambda r: rank.batch(2, of=r)))
'''
ALL = 8
GOLDEN = "".join(f'["mean/n{i}"]\nlaws = 1\n' for i in range(ALL))

PYTEST, WORKER = "pytest", "a worker"
ENDS = [
    (signal.SIGTERM, PYTEST, ("-n2",)),
    (signal.SIGINT, PYTEST, ("-n2",)),
]
"""What test_leaving.py leaves out: there SIGKILL ends pytest, a worker and a server, and SIGINT a run without workers."""


@pytest.fixture(scope="module")
def little(tmp_path_factory):
    """One suite, whose runs all have their case directories in one place."""
    folder = tmp_path_factory.mktemp("interruptions")
    (folder / "tmp").mkdir()
    little = Little(folder / "suite", {"TMPDIR": str(folder / "tmp")})
    little.write("test_family.py", CASES)
    little.write("golden/family.toml", GOLDEN)
    return little


def directories(little):
    """The case directories that are left, by the pid of the pytest that made them."""
    names = [path.name for path in (little.folder.parent / "tmp").iterdir() if path.name.startswith("ddp-")]
    return {int(name.split("-")[2]) for name in names}


def judged(running):
    return running.record.read_bytes().count(b'"line": "case"')


def workers_of(running):
    return [pid for pid in running.processes() if parent(pid) == running.process.pid]


def check(running, little):
    """What must hold after the end of any run; the seconds after which its last process was gone."""
    ended = time.monotonic()
    while (left := running.processes()) and time.monotonic() < ended + GONE:
        time.sleep(0.02)
    assert not left
    gone = time.monotonic() - ended
    assert (little.folder / "golden" / "family.toml").read_text() == GOLDEN
    try:
        found = record.read(running.record)
    except record.RecordError:
        return gone
    if found.whole_suite:
        assert [line["verdict"] for line in found.cases] == ["holds"] * ALL
    return gone


def end(little, number, victim, workers):
    """End a run amid its cases; what is left of it."""
    waiting = little.folder / f"{number.name} {victim} {workers}"
    running = little.start(*workers, environment={"WAIT": str(waiting)})
    until(lambda: waiting.exists() and judged(running) == ALL - 1, within=200, what="all cases but the last")
    pids = {running.process.pid, *workers_of(running)}
    at_work = next(parent(pid) for pid in servers(running.marker) if pid in map(parent, running.processes()))
    os.kill(running.process.pid if victim == PYTEST else at_work, number)
    run = running.finish()
    check(running, little)
    return run, pids & directories(little)


@pytest.fixture(scope="module")
def ended(little):
    with ThreadPoolExecutor(2) as pool:
        return dict(zip(ENDS, pool.map(lambda how: end(little, *how), ENDS), strict=True))


@pytest.mark.parametrize("how", ENDS, ids=lambda how: " ".join([how[0].name, "of", how[1], *how[2]]))
def test_a_run_ended_amid_its_cases_is_red_and_never_whole(ended, how):
    number, _, _ = how
    run, left = ended[how]
    last = json.loads(run.record.read_text().splitlines()[-1])
    if number == signal.SIGTERM:
        assert run.exit == -number, run.output
        assert last["line"] == "case"
    else:
        assert run.exit == 2, run.output
        assert not left
        assert (last["line"], last["collected"], last["complete"]) == ("end", ALL, False)
        assert not record.read(run.record).whole_suite


def test_the_next_run_removes_what_killed_runs_left_and_is_whole(ended, little):
    run = little.run()
    assert run.exit == 0, run.output
    assert record.read(run.record).whole_suite
    assert not directories(little)


def test_a_server_that_still_imports_torch_does_not_outlive_pytest(little):
    running = little.start()
    until(lambda: servers(running.marker), within=100, what="the start of the server")
    os.kill(running.process.pid, signal.SIGKILL)
    running.process.wait()
    until(lambda: not running.processes(), within=GONE, what="the end of the server, before it has torch")


AMID = '''\
"""What comes amid the start of a rank: pytest-timeout's failure the first time, and Ctrl-C the second."""

import pytest
from ddp_conformance.transport import RankServer

pytest_plugins = ["ddp_conformance.plugin"]
begin, receive, starts = RankServer.start, RankServer._receive, []
coming = {2: pytest.fail.Exception("Timeout"), 6: KeyboardInterrupt()}


def start(self, *arguments, **more):
    starts.append(arguments)
    return begin(self, *arguments, **more)


def receive_or_not(self):
    if len(starts) in coming:
        raise coming.pop(len(starts))
    return receive(self)


RankServer.start, RankServer._receive = start, receive_or_not
'''


def test_what_comes_amid_the_start_of_a_rank_is_not_lost_nor_is_the_rank(tmp_path):
    little = Little(tmp_path / "suite")
    little.write("conftest.py", AMID)
    little.write("test_family.py", CASES)
    little.write("golden/family.toml", GOLDEN)
    running = little.start()
    run = running.finish()
    assert run.exit == 2, run.output
    assert run.counts == {"failed": 1, "passed": 1}
    assert run.verdicts == {"family.mean/n1": "holds"}
    check(running, little)


KILLS = 50


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_fifty_runs_ended_at_random_moments_leave_nothing(little):
    """Pytest or one of its workers, by any signal, at any moment from its start to its end; the seed says which."""
    began = time.monotonic()
    assert little.run("-n2").exit == 0
    whole = time.monotonic() - began
    seed = int(os.environ.get("SEED", random.randrange(10**6)))
    print(f"\nseed {seed} (SEED={seed} repeats it); a run takes {whole:.1f} s")
    chance = random.Random(seed)
    slowest, exits = 0.0, []
    for number in range(KILLS):
        with_signal = chance.choice([signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
        victim, workers = chance.choice([(PYTEST, ()), (PYTEST, ("-n2",)), (WORKER, ("-n2",))])
        moment = chance.uniform(0, whole)
        running = little.start(*workers)
        time.sleep(moment)  # the moment is the drill, and no event of the run
        victims = [running.process.pid] if victim == PYTEST else workers_of(running)
        for pid in chance.sample(victims, min(1, len(victims))):
            os.kill(pid, with_signal)
        run = running.finish()
        gone = check(running, little)
        told = f"{number}: {with_signal.name} of {victim} {' '.join(workers)} after {moment:.1f} s: exit {run.exit}, gone in {gone:.2f} s"
        print(told, flush=True)
        assert run.exit in (0, 1, 2, -with_signal), told + run.output
        assert "INTERNALERROR" not in run.output, told + run.output
        slowest, exits = max(slowest, gone), [*exits, run.exit]
    assert little.run("-n2").exit == 0
    assert not directories(little)
    print(f"{KILLS} runs, exits {sorted(set(exits))}; the last process was gone {slowest:.2f} s after pytest at most")
