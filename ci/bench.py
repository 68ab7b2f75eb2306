"""
What a case costs here, against PyTorch's own multi-process tests on the same body, in one run.

    python -m ci.bench

The body is one DDP backward over gloo on CPU. A case's cost is the median of whole tests, set-up and clean-up included;
what a run pays once (imports, the rank server, the processes that are kept) is the rest of its wall time.
"""

import argparse
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as xml
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

OURS = '''\
"""The same body, many times."""

from ddp_conformance import OBSERVED, case
from ddp_conformance.models import linear

CASES = {{f"n{{number}}": number for number in range({cases})}}


@case("bench.backward", level=OBSERVED, source="here", world={world}, each=CASES)
def test_backward(rank, number):
    """One backward."""
    ddp = rank.wrap(linear(2))
    ddp(rank.batch(2)).sum().backward()
'''

THEIRS = """\
import sys
import tempfile
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.common_distributed import {base}
from torch.testing._internal.common_utils import run_tests


def backward(rank, world):
    model = torch.nn.Linear(2, 1, bias=False)
    ddp = DistributedDataParallel(model)
    ddp(torch.full((1, 2), float(world * (rank + 1)))).sum().backward()


class Backward({base}):
    world_size = {world}

    def run(self, result=None):
        began = time.monotonic()
        super().run(result)
        print("seconds", time.monotonic() - began, flush=True)
{more}

for number in range({cases}):
    setattr(Backward, f"test_{{number}}", Backward.body)

if __name__ == "__main__":
    run_tests()
"""

MULTI_PROCESS = """
    def setUp(self):
        super().setUp()
        self._spawn_processes()

    def body(self):
        store = dist.FileStore(self.file_name, self.world_size)
        dist.init_process_group("gloo", store=store, rank=self.rank, world_size=self.world_size)
        backward(self.rank, self.world_size)
        dist.destroy_process_group()
"""

CONTINUOUS = """
    @classmethod
    def backend_str(cls):
        return "gloo"

    @classmethod
    def device_type(cls):
        return "cpu"

    def body(self):
        backward(self.rank, self.world_size)
"""


@dataclass(frozen=True)
class Cost:
    """Seconds of each test, and of the whole run."""

    tests: list[float]
    whole: float

    @property
    def median(self) -> float:
        return statistics.median(self.tests)

    @property
    def once(self) -> float:
        return self.whole - sum(self.tests)


def ours(cases: int, world: int) -> Cost:
    """One pytest run, judging included (as "changed": there is no golden file to agree with)."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "conftest.py").write_text('pytest_plugins = ["ddp_conformance.plugin"]\n')
        (folder / "pytest.ini").write_text("[pytest]\naddopts = --import-mode=importlib\n")
        (folder / "test_bench.py").write_text(OURS.format(cases=cases, world=world))
        options = ["-q", "--tb=no", "-p", "no:cacheprovider", "-o", "junit_duration_report=total"]
        whole, output = _time(["-m", "pytest", *options, "--record=run.jsonl", "--junitxml=junit.xml", "."], folder)
        if (folder / "run.jsonl").read_text().count('"verdict": "changed"') != cases:
            raise RuntimeError(f"not all of {cases} cases ran\n{output}")
        tests = [float(test.get("time", 0)) for test in xml.parse(folder / "junit.xml").iter("testcase")]
    return Cost(tests, whole)


def theirs(base: str, more: str, cases: int, world: int) -> Cost:
    """One unittest run of PyTorch's own test class."""
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "theirs.py"
        path.write_text(THEIRS.format(base=base, more=more, cases=cases, world=world))
        whole, output = _time([str(path)], Path(name))
    if not re.search(rf"Ran {cases} tests?.*\n\nOK\s*$", output):
        raise RuntimeError(f"{base} did not pass {cases} tests\n{output[-2000:]}")
    return Cost([float(seconds) for seconds in re.findall(r"^\.?seconds ([\d.]+)$", output, re.MULTILINE)], whole)


def _time(command: list[str], folder: Path) -> tuple[float, str]:
    paths = os.pathsep.join((str(ROOT / "fixtures"), str(folder)))
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    return time.monotonic() - began, done.stdout


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m ci.bench", description=__doc__.strip().splitlines()[0])
    parser.parse_args(arguments)
    rows = [
        ("this fixture, fresh processes", 2, ours(10, 2)),
        ("this fixture, fresh processes", 2, ours(40, 2)),
        ("this fixture, fresh processes", 4, ours(10, 4)),
        ("this fixture, fresh processes", 8, ours(10, 8)),
        ("MultiProcContinuousTest, the same processes", 2, theirs("MultiProcContinuousTest", CONTINUOUS, 40, 2)),
        ("MultiProcessTestCase, fresh processes", 2, theirs("MultiProcessTestCase", MULTI_PROCESS, 4, 2)),
    ]
    base = rows[1][2].median
    print(f"one DDP backward over gloo:cpu on {len(os.sched_getaffinity(0))} cores")
    print(f"{'':44} ranks  cases  s/case   ratio  s once")
    for name, world, cost in rows:
        ratio = cost.median / base
        print(f"{name:44} {world:5} {len(cost.tests):6} {cost.median:7.3f} {ratio:7.2f} {cost.once:7.1f}")
    print(f"MultiProcessTestCase costs {rows[-1][2].median / base:.0f} times as much a case as this fixture")
    return 0


if __name__ == "__main__":
    sys.exit(main())
