"""
What a case costs here, against PyTorch's own multi-process tests on the same body, in one run.

    python -m ci.bench

The body is one DDP backward over gloo on CPU. Each figure is the wall time of a whole pytest or unittest process with
many cases, less that with few, over the difference: so that starting up, which all have in common, is not counted.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
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


def ours(folder: Path, cases: int, world: int) -> float:
    """Seconds of one pytest run, judging included (as "changed": there is no golden file to agree with)."""
    (folder / "conftest.py").write_text('pytest_plugins = ["ddp_conformance.plugin"]\n')
    (folder / "pytest.ini").write_text("[pytest]\naddopts = --import-mode=importlib\n")
    (folder / "test_bench.py").write_text(OURS.format(cases=cases, world=world))
    record = folder / "record.jsonl"
    record.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", "-q", "--tb=no", "-p", "no:cacheprovider", "--record", str(record), "."]
    seconds, output = _time(command, folder)
    told = record.read_text().count('"verdict": "changed"') if record.exists() else 0
    if told != cases:
        raise RuntimeError(f"{told} of {cases} cases ran\n{output}")
    return seconds


def theirs(base: str, more: str) -> Callable[[Path, int, int], float]:
    """Seconds of one unittest run of PyTorch's own test class."""

    def measure(folder: Path, cases: int, world: int) -> float:
        path = folder / f"{base.lower()}.py"
        path.write_text(THEIRS.format(base=base, more=more, cases=cases, world=world))
        seconds, output = _time([sys.executable, str(path)], folder)
        if not re.search(rf"Ran {cases} tests?.*\n\nOK\s*$", output):
            raise RuntimeError(f"{base} did not pass {cases} tests\n{output[-2000:]}")
        return seconds

    return measure


def _time(command: list[str], folder: Path) -> tuple[float, str]:
    paths = os.pathsep.join((str(ROOT / "fixtures"), str(folder)))
    began = time.monotonic()
    done = subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    return time.monotonic() - began, done.stdout


def per_case(measure: Callable[[Path, int, int], float], few: int, many: int, world: int) -> tuple[float, float]:
    """Seconds a further case costs, and seconds of what is paid once."""
    with tempfile.TemporaryDirectory() as name:
        short, long = (measure(Path(name), cases, world) for cases in (few, many))
    each = (long - short) / (many - few)
    return each, short - few * each


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m ci.bench", description=__doc__.strip().splitlines()[0])
    parser.parse_args(arguments)
    multi = theirs("MultiProcessTestCase", MULTI_PROCESS)
    continuous = theirs("MultiProcContinuousTest", CONTINUOUS)
    rows = [
        ("this fixture, fresh processes", 2, *per_case(ours, 10, 40, 2)),
        ("MultiProcessTestCase, fresh processes", 2, *per_case(multi, 1, 4, 2)),
        ("MultiProcContinuousTest, the same processes", 2, *per_case(continuous, 10, 40, 2)),
        *((f"this fixture, {world} ranks", world, *per_case(ours, 4, 12, world)) for world in (4, 8)),
    ]
    base = rows[0][2]
    print(f"one DDP backward over gloo:cpu, {len(os.sched_getaffinity(0))} cores, a further case and what is paid once")
    print(f"{'':44} ranks   s/case   ratio  s once")
    for name, world, each, once in rows:
        print(f"{name:44} {world:5} {each:8.3f} {each / base:7.2f} {once:7.1f}")
    print("growth with the number of cases, 2 ranks")
    with tempfile.TemporaryDirectory() as folder:
        for cases in (10, 40):
            seconds = ours(Path(folder), cases, 2)
            print(f"{cases:4} cases {seconds:7.2f} s in all, {seconds / cases:.3f} s a case")
    print(f"MultiProcessTestCase costs {rows[1][2] / base:.0f} times as much a case as this fixture")
    return 0


if __name__ == "__main__":
    sys.exit(main())
