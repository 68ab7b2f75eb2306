"""The same suite in surroundings that are hostile: it judges as elsewhere, or says in one line what is missing."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from ddp_conformance import record

from tests.runs import Little, processes

pytestmark = pytest.mark.timeout(600)  # on a machine that may be busy

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
    rank.show("long", "a" * 2048)


@case("family.writes", level=MUST, source="here", group=False)
def test_writes(rank):
    """No variable that changes what DDP does; two megabytes of output."""
    rank.law("no variable", [name for name in os.environ if name.startswith(("MASTER_", "RANK", "WORLD_"))], [])
    print("ü" * 1_000_000)
'''
MEAN = f'laws = 1\nlong = "{"a" * 2048}"\n'  # two of these fill a small disk
GOLDEN = f'["mean/w2"]\n{MEAN}["mean/w3"]\n{MEAN}[writes]\nlaws = 1\n'
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
LAUNCHER = {"MASTER_ADDR": "nowhere.invalid", "MASTER_PORT": "1", "RANK": "7", "WORLD_SIZE": "9", "LOCAL_RANK": "7"}
LONELY = "hostname no.such.host\nip link set lo up\n"
READ_ONLY = (
    'mount --bind "$PWD" "$PWD"\nmount -o remount,ro,bind "$PWD"\ncd "$PWD"\nif touch x 2>/dev/null; then exit 9; fi\n'
)
SURROUNDINGS = {  # the namespaces, what the shell does, and the environment
    "64 descriptors": ((), "ulimit -n 64\n", {}),
    "locale C": ((), "", {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}),
    "a job launcher's variables": ((), "", {**LAUNCHER, "GLOO_SOCKET_IFNAME": "none0"}),
    "spaces in TMPDIR": ((), 'mkdir -p "$TMPDIR"\n', {"TMPDIR": "it's a 'dir' with $PWD and ü"}),
    "no network, no host name": (NETWORK, LONELY, {}),
    "IPv6 only, no host name": (NETWORK, f"{LONELY}ip address del 127.0.0.1/8 dev lo\n", {}),
    "a read-only checkout": (MOUNTS, READ_ONLY, {}),
}
TOGETHER = {
    "of the process": ("64 descriptors", "locale C", "a job launcher's variables", "spaces in TMPDIR"),
    "of the machine": ("IPv6 only, no host name", "a read-only checkout"),
}
"""By default those of a kind are tried all at once, for a run takes its time; `-m long` tries each by itself."""


@pytest.fixture(scope="module")
def little(tmp_path_factory):
    little = Little(tmp_path_factory.mktemp("surroundings") / "suite")
    little.write("test_family.py", CASES)
    little.write("golden/family.toml", GOLDEN)
    return little


@pytest.mark.parametrize("name", [*TOGETHER, *(pytest.param(name, marks=pytest.mark.long) for name in SURROUNDINGS)])
def test_the_verdicts_are_the_same_in_hostile_surroundings(little, tmp_path, name):
    parts = [SURROUNDINGS[each] for each in TOGETHER.get(name, (name,))]
    namespaces = tuple(option for own, _, _ in parts for option in own)
    environment = {key: value for _, _, own in parts for key, value in own.items()}
    if "TMPDIR" in environment:
        environment["TMPDIR"] = str(tmp_path / environment["TMPDIR"])
    if namespaces:
        needs(*namespaces)
    command = after("".join(script for _, script, _ in parts), *namespaces)
    run = little.run(command=command, environment=environment)
    assert run.exit == 0, run.output  # first, for a run whose surroundings could not be made has no record
    assert run.verdicts == HOLD, run.output
    assert record.read(run.record).whole_suite
    assert not processes(run.record.parent.name)
    temporary = Path(environment.get("TMPDIR", run.record.parent / "tmp"))
    assert temporary.is_dir()
    assert not list(temporary.rglob("ddp-*"))


@pytest.mark.long
def test_too_few_descriptors_for_so_many_ranks_is_no_data(tmp_path):
    little = Little(tmp_path / "suite")
    little.write("test_family.py", CASES.replace("world=(2, 3)", "world=(60, 1)"))
    run = little.run("-k", "mean", command=after("ulimit -n 64"))
    assert run.verdicts == {"family.mean/w60": "no data", "family.mean/w1": "changed"}, run.output
    assert run.outcomes["family.mean/w60"] == "error"
    assert "the ranks could not be started: [Errno 24] Too many open files" in run.told["family.mean/w60"].message
    assert not processes(run.record.parent.name)


FULL = """\
mount -t tmpfs -o size=1m tmpfs "$TMPDIR"
mount -t tmpfs -o size=4k tmpfs "$RECORDS"
code=0
"$@" || code=$?
cp "$RECORDS/run.jsonl" "$KEPT"
exit $code
"""
"""The shell outlives pytest, for what is on the disk is gone with its mount."""


def test_a_full_disk_is_no_data_and_a_record_cut_short(little, tmp_path):
    """It is no verdict on DDP, the run goes on, and is red."""
    needs(*MOUNTS)
    places = {"TMPDIR": tmp_path / "tmp", "RECORDS": tmp_path / "records", "KEPT": tmp_path / "kept.jsonl"}
    places["TMPDIR"].mkdir()
    places["RECORDS"].mkdir()
    full = places["RECORDS"] / "run.jsonl"
    command = ("unshare", "-r", *MOUNTS, "sh", "-ec", FULL, "sh", *PYTEST)
    run = little.run(f"--record={full}", command=command, environment={name: str(at) for name, at in places.items()})
    assert run.exit == 1
    assert run.counts == {"passed": 2, "error": 1}, run.output
    assert "family.writes (MUST) no data\n" in run.output
    assert "rank 0: broke off\n" in run.output
    assert "OSError: [Errno 28] No space left on device" in run.output
    assert f"ERROR: --record {full}: No space left on device: the record is cut short\n" in run.output
    assert "INTERNALERROR" not in run.output
    assert places["KEPT"].stat().st_size
    with pytest.raises(record.RecordError):
        record.read(places["KEPT"])


@pytest.mark.long
def test_a_disk_that_is_full_before_the_rendezvous_is_no_data_too(little, tmp_path):
    """Pytest has made its directories by then: the first case finds the disk full."""
    needs(*MOUNTS)
    little.write("fill.py", FILL)
    mounted = after('mount -t tmpfs -o size=1m tmpfs "$TMPDIR"', *MOUNTS)
    run = little.run("-pfill", "-k", "mean", command=mounted, environment={"TMPDIR": str(tmp_path)})
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
    with suppress_full(), Path(os.environ["TMPDIR"], "full").open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))


class suppress_full:
    def __enter__(self):
        pass

    def __exit__(self, kind, error, trace):
        return kind is OSError
"""


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
