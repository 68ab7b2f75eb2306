"""However a rank ends, or fails to, and whatever it says, its verdict names it in bounded time and memory."""

import json
import re

import pytest

from tests.runs import Little

pytestmark = pytest.mark.timeout(600)  # on a machine that may be busy

CASES = '''\
"""Ranks that end in every way, each with a peer that is well."""

import atexit
import os
import signal
import sys
import threading
import time

from ddp_conformance import MUST, case

SIGNALS = {"term": signal.SIGTERM, "abrt": signal.SIGABRT, "kill": signal.SIGKILL, "without_a_name": 40}


def linear(size):
    from ddp_conformance.models import linear  # here, so that pytest need not import torch

    return linear(size)


def well(rank):
    model = linear(2)
    ddp = rank.wrap(model)
    ddp(rank.batch(2)).sum().backward()
    rank.law("the mean", model.weight.grad, rank.mean(lambda r: rank.batch(2, of=r)))


@case("ends.signal", level=MUST, source="here", each=SIGNALS)
def test_signal(rank, number):
    """One rank is killed while its peer waits for it."""
    well(rank)
    if rank.index == 1:
        os.kill(os.getpid(), number)
        signal.pause()
    well(rank)


@case("ends.exit", level=MUST, source="here", each={"zero": 0, "high": 255})
def test_exit(rank, code):
    """One rank leaves before it has reported."""
    well(rank)
    if rank.index == 1:
        os._exit(code)


@case("ends.sys_exit", level=MUST, source="here")
def test_sys_exit(rank):
    """One rank calls sys.exit(0), which is not how a program returns."""
    well(rank)
    if rank.index == 1:
        sys.exit(0)


@case("ends.says_nothing", level=MUST, source="here")
def test_says_nothing(rank):
    """One rank raises what cannot say what it is."""
    well(rank)

    class Mute(Exception):
        def __str__(self):
            raise ValueError("no text")

    if rank.index == 1:
        raise Mute("of rank one")


@case("ends.surrogate", level=MUST, source="here")
def test_surrogate(rank):
    """One rank raises what no encoding can write."""
    well(rank)
    if rank.index == 1:
        raise ValueError("lone \\udc80 surrogate, \\x00, \\x1b[31m and \\u2028")


@case("ends.long_message", level=MUST, source="here")
def test_long_message(rank):
    """One rank raises with 50 MB of text."""
    well(rank)
    if rank.index == 1:
        raise ValueError("first" + "x" * 50_000_000 + "last")


@case("ends.long_fact", level=MUST, source="here")
def test_long_fact(rank):
    """Every rank shows 20 MB, where a fact is at most 2 kB."""
    well(rank)
    rank.show("long", "x" * 20_000_000)


@case("ends.long_law", level=MUST, source="here")
def test_long_law(rank):
    """One law holds and has a text of 40 MB."""
    rank.law("long" * (1 if rank.index else 10_000_000), 1, 1)


@case("ends.many_laws", level=MUST, source="here")
def test_many_laws(rank):
    """Ten thousand laws hold."""
    for _ in range(10_000):
        rank.law("one is one", 1, 1)


@case("ends.output", level=MUST, source="here")
def test_output(rank):
    """One rank writes 100 MB on fd 1, and does not wait for a reader."""
    well(rank)
    if rank.index == 1:
        os.write(1, b"first ")
        for _ in range(100):
            os.write(1, b"x" * 1_000_000)
        raise ValueError("after its output")


@case("ends.talks_garbage", level=MUST, source="here")
def test_talks_garbage(rank):
    """One rank writes on every descriptor it has."""
    well(rank)
    for fd in range(3, 64) if rank.index == 1 else ():
        try:
            os.write(fd, b"{garbage\\n")
        except OSError:
            pass


@case("ends.closes_everything", level=MUST, source="here", group=False)
def test_closes_everything(rank):
    """A rank closes every descriptor it has; without a group, for a thread of gloo's may abort first."""
    rank.law("one is one", 1, 1)
    os.closerange(0, 64)


@case("ends.stopped", level=MUST, source="here")
def test_stopped(rank):
    """One rank is stopped."""
    well(rank)
    if rank.index == 1:
        os.kill(os.getpid(), signal.SIGSTOP)


@case("ends.waits_in_the_constructor", level=MUST, source="here")
def test_waits_in_the_constructor(rank):
    """One rank constructs a DDP more than its peer."""
    well(rank)
    if rank.index == 0:
        rank.wrap(linear(2))


@case("ends.waits_in_backward", level=MUST, source="here")
def test_waits_in_backward(rank):
    """One rank runs a backward that its peer leaves out."""
    rank.law("one is one", 1, 1)
    ddp = rank.wrap(linear(2))
    loss = ddp(rank.batch(2)).sum()
    if rank.index == 0:
        loss.backward()


@case("ends.waits_at_exit", level=MUST, source="here")
def test_waits_at_exit(rank):
    """Every rank has an exit handler and a thread that would keep an interpreter from its end."""
    well(rank)
    atexit.register(time.sleep, 1000)
    threading.Thread(target=time.sleep, args=(1000,)).start()


@case("ends.flush_waits", level=MUST, source="here")
def test_flush_waits(rank):
    """Every rank has a stdout that cannot be flushed."""
    well(rank)

    class Stuck:
        def write(self, text):
            pass

        def flush(self):
            time.sleep(1000)

    if rank.index == 1:
        sys.stdout = Stuck()


@case("ends.thirty_two_ranks", level=MUST, source="here", world=32)
def test_thirty_two_ranks(rank):
    """Nothing is wrong on 32 ranks, more than there are cores."""
    well(rank)


@case("ends.well_after", level=MUST, source="here")
def test_well_after(rank):
    """Nothing is wrong."""
    well(rank)
'''

BEFORE = '''\
"""A module that ends its rank while it is imported there, and not in pytest."""

import os
import sys

from ddp_conformance import MUST, case

if "pytest" not in sys.modules:
    os._exit(0)


@case("before.exits", level=MUST, source="here")
def test_exits(rank):
    """The program never begins."""
'''

HOLD = {
    "long_law": 1,
    "many_laws": 10000,
    "waits_at_exit": 1,
    "flush_waits": 1,
    "thirty_two_ranks": 1,
    "well_after": 1,
}

TOLD = {
    "ends.signal/term": r"rank 1: SIGTERM\b",
    "ends.signal/abrt": "rank 1: SIGABRT\n.*rank 1 stack -----.*Aborted.*in test_signal",
    "ends.signal/kill": r"rank 1: SIGKILL\b",
    "ends.signal/without_a_name": r"rank 1: SIGRTMIN\+6\b",
    "ends.exit/zero": r"rank 1: exit 0\b",
    "ends.exit/high": r"rank 1: exit 255\b",
    "ends.sys_exit": r"rank 1: raised SystemExit\b",
    "ends.says_nothing": r"rank 1: raised Mute\n.*Mute: <exception str\(\) failed>",
    "ends.surrogate": r"rank 1: raised ValueError\n.*lone \? surrogate",
    "ends.long_message": "rank 1: raised ValueError\n.*firstxxx.* characters left out .*xxxlast",
    "ends.long_fact": "rank 0: raised ValueError\n.*a fact is at most 2048 characters, this one has 20000000",
    "ends.output": r"rank 1 output -----\nfirst xxx.*\n\.\.\. \d+ bytes left out \.\.\.\n",
    "ends.talks_garbage": r"rank 1: garbled\nit said b'\{garbage' where its reports go",
    "ends.closes_everything": r"rank 0: exit 70\b",
    "ends.stopped": "rank 1: waiting\n.*rank 1 stack -----\nno stack: the process does not answer",
    "ends.waits_in_the_constructor": "rank 0: waiting\n.*rank 0 stack -----.*in test_waits_in_the_constructor",
    "ends.waits_in_backward": "rank 0: waiting\n.*rank 0 stack -----.*in test_waits_in_backward",
}

PEAK = """\
import json
from pathlib import Path

pytest_plugins = ["ddp_conformance.plugin"]


def memory(kind):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(kind))


def pytest_runtest_setup(item):
    Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here
    item.before = memory("VmRSS")


def pytest_runtest_teardown(item):
    with Path(__file__).with_name(item.function.__name__).open("w") as file:
        json.dump(memory("VmHWM") - item.before, file)
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    little = Little(tmp_path_factory.mktemp("ends") / "suite")
    little.write("test_ends.py", CASES)
    little.write("test_before.py", BEFORE)
    little.write("conftest.py", PEAK)
    little.write("golden/ends.toml", "".join(f"[{name}]\nlaws = {laws}\n" for name, laws in HOLD.items()))
    return little.run("-n2", "--case-deadline=4")


@pytest.mark.parametrize("name", TOLD)
def test_a_rank_that_ends_otherwise_is_violated_and_named(run, name):
    assert run.verdicts.get(name) == "violated", run.output[-5000:]
    assert re.search(TOLD[name], run.told[name].message, re.DOTALL), run.told[name].message[:5000]


@pytest.mark.parametrize("name", HOLD)
def test_what_a_rank_may_do_is_no_end_of_its_own(run, name):
    assert run.verdicts.get(f"ends.{name}") == "holds", run.output[-5000:]


def test_a_rank_that_ends_before_its_program_began_is_no_data_and_an_error(run):
    assert run.outcomes["before.exits"] == "error"
    assert run.verdicts["before.exits"] == "no data"
    assert re.search("rank 0: exit 0 before the program began", run.told["before.exits"].message)


def test_no_report_is_longer_than_a_person_reads(run):
    assert max(len(told.message) for told in run.told.values()) < 50_000


def test_output_of_any_length_takes_no_memory_of_pytest(run):
    assert json.loads((run.folder / "test_output").read_text()) < 20e6
    assert json.loads((run.folder / "test_long_law").read_text()) > 40e6, "what does take memory is seen"


SLOW = """\
import time
from pathlib import Path

import torch.distributed as dist


def register():
    dist.Backend.register_backend("slow", create, devices=["cpu"])


def create(store, rank, size, timeout):
    group = dist.ProcessGroupGloo(store, rank, size, timeout=timeout)
    if rank == 1:  # as one that still connects to a third, when rank 0 has connected to both
        time.sleep(1)
        Path("set_up").touch()
    return group
"""

BEGINS = """\
import os

from ddp_conformance import MUST, case


@case("ends.at_once", level=MUST, source="here")
def test_at_once(rank):
    \"\"\"A rank dies as soon as it begins, and its peer has been set up.\"\"\"
    rank.show("set_up", os.path.exists("set_up"))
    if rank.index == 0:
        os._exit(3)
"""


def test_no_rank_begins_before_all_are_set_up(tmp_path):
    """A peer that was still being set up would lose the one that died there, and say that the environment is broken."""
    suite = Little(tmp_path / "suite")
    suite.write("slow.py", SLOW)
    suite.write("test_begins.py", BEGINS)
    run = suite.run("--lane=slow:cpu", "--lane-import=slow:register")
    case = run.cases["ends.at_once"]
    assert (case["verdict"], case["facts"]["set_up"]) == ("violated", "True"), run.output
