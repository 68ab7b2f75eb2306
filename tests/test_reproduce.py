"""What `ci.reproduce` prints is a script that runs by itself, with torch and nothing else."""

import re
import subprocess
import sys

import pytest

from ci import reproduce

SAMPLE = (
    "mean_gradients.mean/w3",
    "bucket_assignment.greedy",
    "no_sync.forward_decides",
    "firing.as_buckets_fill/w2",
    "unused_parameters.none_stays_none",
)


def script(name, folder):
    case, facet = reproduce.find(name)
    path = folder / f"{name.replace('/', '-')}.py"
    path.write_text(reproduce.script(case, facet, "gloo:cpu", None))
    return path


@pytest.mark.parametrize("name", SAMPLE)
def test_a_case_runs_standalone(name, tmp_path):
    path = script(name, tmp_path)
    done = subprocess.run([sys.executable, "-P", str(path)], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    assert ": holds" in done.stdout and "BROKEN" not in done.stdout, done.stdout
    assert not re.search(r"^\s*(from|import) ddp_conformance", path.read_text(), re.MULTILINE)


@pytest.mark.parametrize("arguments", [["no.such"], ["mean_gradients.mean", "--torch", "0.1"]])
def test_what_is_unknown_is_one_clear_line(arguments, capsys):
    assert reproduce.main(arguments) == 2
    assert capsys.readouterr().err.startswith("ci.reproduce: ")
