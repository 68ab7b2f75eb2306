"""The same suite in surroundings that are hostile: it judges as elsewhere, or says in one line what is missing."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from ddp_conformance import record

from tests.runs import Little, processes

pytestmark = pytest.mark.timeout(600)  # the runs of a module start together, on a machine that may be busy

CASES = '''\
"""Cases that need what surroundings can lack: a rendezvous, a known environment, a place for output."""

import os

from ddp_conformance import MUST, case


@case("family.mean", level=MUST, source="here", world=(2, 3))
def test_mean(rank):
    """Gradients are averaged."""
    from ddp_conformance.models import linear  # here, so that pytest need not import torch

    model = linear(2)
    ddp = rank.wrap(model)
    ddp(rank.batch(2)).sum().backward()
    rank.law("the mean", model.weight.grad, rank.mean(lambda r: rank.batch(2, of=r)))


@case("family.writes", level=MUST, source="here", group=False)
def test_writes(rank):
    """No variable that changes what DDP does; two megabytes of output, and facts that fill a small disk."""
    rank.law("no variable", [name for name in os.environ if name.startswith(("MASTER_", "RANK", "WORLD_"))], [])
    rank.show("a", "a" * 2048)
    rank.show("b", "b" * 2048)
    print("ü" * 1_000_000)
'''
GOLDEN = '["mean/w2"]\nlaws = 1\n["mean/w3"]\nlaws = 1\n'
GOLDEN += f'[writes]\nlaws = 1\na = "{"a" * 2048}"\nb = "{"b" * 2048}"\n'
HOLD = {"family.mean/w2": "holds", "family.mean/w3": "holds", "family.writes": "holds"}
PYTEST = (sys.executable, "-m", "pytest")


def after(script, *namespaces):
    """The command that starts pytest after a shell script, in namespaces of its own where some are named."""
    return (*(("unshare", "-r", *namespaces) if namespaces else ()), "sh", "-ec", f'{script}\nexec "$@"', "sh", *PYTEST)


def needs(*namespaces):
    """Skip where this machine gives nobody namespaces of their own."""
    try:
        done = subprocess.run(["unshare", "-r", *namespaces, "true"], capture_output=True, text=True)
    except FileNotFoundError:
        pytest.skip("needs unshare")
    if done.returncode:
        pytest.skip(f"needs unshare {' '.join(namespaces)}: {done.stderr.strip()}")


NETWORK, MOUNTS = ("-n", "-u"), ("-m",)
SURROUNDINGS = {
    "64 descriptors": {"command": after("ulimit -n 64")},
    "locale C": {"environment": {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}},
    "a job launcher's variables": {
        "environment": {
            "MASTER_ADDR": "nowhere.invalid",
            "MASTER_PORT": "1",
            "RANK": "7",
            "WORLD_SIZE": "9",
            "LOCAL_RANK": "7",
            "GLOO_SOCKET_IFNAME": "none0",
        }
    },
    "no network, no host name": {
        "namespaces": NETWORK,
        "command": after("hostname no.such.host\nip link set lo up", *NETWORK),
    },
    "IPv6 only, no host name": {
        "namespaces": NETWORK,
        "command": after("hostname no.such.host\nip link set lo up\nip address del 127.0.0.1/8 dev lo", *NETWORK),
    },
    "a read-only checkout": {
        "namespaces": MOUNTS,
        "command": after('mount --bind "$PWD" "$PWD"\nmount -o remount,ro,bind "$PWD"\n! touch x 2>&-', *MOUNTS),
    },
    "spaces in TMPDIR": {},
}


@pytest.fixture(scope="module")
def little(tmp_path_factory):
    little = Little(tmp_path_factory.mktemp("surroundings") / "suite")
    little.write("test_family.py", CASES)
    little.write("golden/family.toml", GOLDEN)
    return little


@pytest.fixture(scope="module")
def runs(little, tmp_path_factory):
    """The runs by name, two at a time; without those that need namespaces where there are none."""
    spaces = tmp_path_factory.mktemp("it's a 'tmp' dir with $PWD and ü ")
    SURROUNDINGS["spaces in TMPDIR"]["environment"] = {"TMPDIR": str(spaces)}
    with ThreadPoolExecutor(2) as pool:
        started = {name: pool.submit(start, little, **how) for name, how in SURROUNDINGS.items()}
    assert not [path for path in spaces.iterdir() if path.name.startswith("ddp-")]
    return started


def start(little, namespaces=(), **how):
    if namespaces:
        needs(*namespaces)
    return little.run(**how)


@pytest.mark.parametrize("name", SURROUNDINGS)
def test_the_verdicts_are_the_same_in_hostile_surroundings(runs, name):
    run = runs[name].result()
    assert (run.exit, run.verdicts) == (0, HOLD), run.output
    assert record.read(run.record).whole_suite
    assert not processes(run.record.parent.name)


def test_too_few_descriptors_for_so_many_ranks_is_no_data(tmp_path):
    little = Little(tmp_path / "suite")
    little.write("test_family.py", CASES.replace("world=(2, 3)", "world=(60, 1)"))
    run = little.run("-k", "mean", command=after("ulimit -n 64"))
    assert run.verdicts == {"family.mean/w60": "no data", "family.mean/w1": "changed"}, run.output
    assert run.outcomes["family.mean/w60"] == "error"
    assert "the ranks could not be started: [Errno 24] Too many open files" in run.told["family.mean/w60"].message
    assert not processes(run.record.parent.name)


FULL = 'mount -t tmpfs -o size=1m tmpfs "$FULL"\n'


def test_a_full_disk_is_no_data_and_no_verdict_on_ddp(little, tmp_path):
    needs(*MOUNTS)
    run = little.run(command=after(FULL, *MOUNTS), environment={"TMPDIR": str(tmp_path), "FULL": str(tmp_path)})
    assert run.exit == 1
    assert run.verdicts == {**HOLD, "family.writes": "no data"}, run.output
    assert run.outcomes["family.writes"] == "error"
    assert "rank 0: broke off\n" in run.told["family.writes"].message
    assert "OSError: [Errno 28] No space left on device" in run.told["family.writes"].message


def test_a_disk_that_is_full_before_the_rendezvous_is_no_data_too(little, tmp_path):
    """Pytest has made its directories by then: the first case finds the disk full."""
    needs(*MOUNTS)
    little.write("fill.py", FILL)
    environment = {"TMPDIR": str(tmp_path), "FULL": str(tmp_path)}
    run = little.run("-pfill", "-k", "mean", command=after(FULL, *MOUNTS), environment=environment)
    assert run.exit == 1
    assert run.verdicts == {"family.mean/w2": "no data", "family.mean/w3": "no data"}, run.output
    assert set(run.outcomes.values()) == {"error"}
    assert "INTERNALERROR" not in run.output
    assert "before the program began" in run.output


FILL = """\
import os
import tempfile
from pathlib import Path


def pytest_collection_finish(session):
    tempfile.gettempdir()
    with suppress_full(), Path(os.environ["FULL"], "full").open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))


class suppress_full:
    def __enter__(self):
        pass

    def __exit__(self, kind, error, trace):
        return kind is OSError
"""


def test_a_record_on_a_full_disk_is_cut_short_and_the_run_red_in_one_line(little, tmp_path):
    needs(*MOUNTS)
    kept = tmp_path / "kept.jsonl"
    (tmp_path / "full").mkdir()
    full = tmp_path / "full" / "run.jsonl"
    # The shell stays, for what is on the disk is gone with its mount.
    script = (
        'mount -t tmpfs -o size=4k tmpfs "$FULL"\ncode=0\n"$@" || code=$?\ncp "$FULL/run.jsonl" "$KEPT"\nexit $code'
    )
    run = little.run(
        f"--record={full}",
        command=("unshare", "-r", *MOUNTS, "sh", "-ec", script, "sh", *PYTEST),
        environment={"FULL": str(full.parent), "KEPT": str(kept)},
    )
    assert run.exit == 1, run.output
    assert run.counts == {"passed": 3}
    assert f"ERROR: --record {full}: No space left on device: the record is cut short\n" in run.output
    assert "INTERNALERROR" not in run.output
    assert kept.stat().st_size
    with pytest.raises(record.RecordError):
        record.read(kept)


def test_a_record_that_cannot_even_begin_is_a_usage_error(little, tmp_path):
    needs(*MOUNTS)
    script = 'mount -t tmpfs -o size=4k tmpfs "$FULL"\nhead -c 4k /dev/zero > "$FULL/x"'
    full = tmp_path / "run.jsonl"
    run = little.run(f"--record={full}", command=after(script, *MOUNTS), environment={"FULL": str(tmp_path)})
    assert run.exit == 4
    assert f"ERROR: --record {full}: No space left on device\n" in run.output


def test_without_assertions_nothing_is_run(little):
    run = little.run(environment={"PYTHONOPTIMIZE": "1"})
    assert run.exit == 4, run.output
    assert "ERROR: Python runs without assertions: unset PYTHONOPTIMIZE, leave out -O\n" in run.output
    assert not run.record.exists()


def test_the_suite_itself_says_so_too_though_it_turns_warnings_into_errors():
    command = [*PYTEST, "--collect-only", "-q", "--claim=mean_gradients"]
    root = Path(__file__).resolve().parent.parent
    environment = {**os.environ, "PYTHONOPTIMIZE": "1"}
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True)
    assert done.returncode == 4
    assert "ERROR: Python runs without assertions" in done.stderr
    assert "Traceback" not in done.stderr + done.stdout
