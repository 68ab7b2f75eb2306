"""A nightly run loses no torch in silence: every job leaves a record or a reason, and what left neither is named."""

import json
import re
import subprocess
import sys
import tomllib

import pytest

from ci import diff, matrix

KNOWN = tomllib.loads(matrix.VERSIONS.read_text())


def whole(torch, python="3.11.7"):
    """The text of a whole record of one case."""
    run = {"line": "run", "format": 1, "subject": matrix.DEFAULT, "torch": torch, "lanes": ["gloo:cpu"]}
    case = {"line": "case", "id": "family.one", "test": "t", "level": "MUST", "lane": "gloo:cpu", "world": 1}
    case |= {"verdict": "holds", "facts": {}, "laws": {}, "why": "", "seconds": 0.1, "program": "0"}
    end = {"line": "end", "selected": 1, "collected": 1, "judged": 1, "complete": True}
    return "".join(f"{json.dumps(line)}\n" for line in ({**run, "build": "cpu", "python": python}, case, end))


def test_every_release_is_a_job_and_the_newest_torch_once_more_on_the_newest_python(capsys):
    assert matrix.main(["--list-json"]) == 0
    jobs = json.loads(capsys.readouterr().out)["include"]
    releases = {job["torch"] for job in jobs if job["python"] == KNOWN["python"]}
    assert releases == {path.name.removesuffix(".jsonl.gz") for path in diff.RECORDS.glob("*.gz")}
    newest = {job["torch"] for job in jobs if job["python"] == KNOWN["newest"]["python"] != KNOWN["python"]}
    assert newest == {max(releases, key=matrix.Version), "nightly"}
    assert len({job["name"] for job in jobs}) == len(jobs) == len(releases) + 2


def test_a_job_needs_no_torch_to_begin_with():
    """The jobs install these few packages beside the suite; everything else is in the environments that ci.matrix makes."""
    script = (
        "import sys\n"
        "class Absent:\n"
        "    def find_spec(self, name, *more):\n"
        "        if name.partition('.')[0] not in {*sys.stdlib_module_names, 'ci', 'ddp_conformance', *sys.argv[1:]}:\n"
        "            raise ImportError(f'a job has no {name}')\n"
        "sys.meta_path.insert(0, Absent())\n"
        "from ci import matrix\n"
    )
    workflows = [path.read_text() for path in (matrix.ROOT / ".github" / "workflows").glob("*.yml")]
    lines = {
        line for text in workflows for line in re.findall(r"pip install (.*?) uv && \S*pip install --no-deps -e", text)
    }
    (installed,) = lines
    command = [sys.executable, "-c", script, *installed.split()]
    done = subprocess.run(command, cwd=matrix.ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_job_without_a_whole_record_is_named_with_its_reason(tmp_path, capsys):
    jobs = [{"name": f"{torch}-python3", "torch": torch} for torch in ("2.4.1", "2.5.1", "2.6.0", "2.7.1")]
    for torch, name, text in (
        ("2.4.1", "2.4.1.jsonl", whole("2.4.1")),
        ("2.5.1", "2.5.1.jsonl", whole("2.5.1").splitlines()[0]),
        ("2.6.0", "2.6.0.nodata", "uv ended with 1\n"),
    ):
        (tmp_path / f"{torch}-python3").mkdir()
        (tmp_path / f"{torch}-python3" / name).write_text(text)
    assert list(matrix.gather(jobs, tmp_path)) == [
        "2.5.1-python3: no data: it has no end line, so the run was cut short; run the suite again with --record",
        "2.6.0-python3: no data: uv ended with 1",
        "2.7.1-python3: no data: its job left no record and no reason",
    ]
    left = {path.name for path in tmp_path.glob("*/*")}
    assert left == {"2.4.1.jsonl", "2.5.1.nodata", "2.6.0.nodata", "2.7.1.nodata"}
    assert matrix.main(["--gather", str(tmp_path / "nothing was left at all")]) == 0
    assert "1.13.1-python3.11: no data: its job left no record" in capsys.readouterr().out


@pytest.mark.parametrize("index", [None, ""])
def test_a_nightly_without_an_index_is_no_data(tmp_path, monkeypatch, capsys, index):
    monkeypatch.setenv("TORCH_INDEX", index) if index is not None else monkeypatch.delenv("TORCH_INDEX", False)
    (tmp_path / "nightly.jsonl").write_text(whole("2.16.0.dev20261202"))  # of last night
    assert matrix.main(["--versions", "nightly", "--records", str(tmp_path)]) == 1
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {
        "nightly.nodata": "TORCH_INDEX is not set to the index of torch's nightly builds\n"
    }
    assert "no data: TORCH_INDEX is not set" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("says", "why"),
    [
        ("echo a warning; echo 2", None),
        ("echo 1", "at least 2 GPUs are needed, and this torch finds 1"),
        ("echo no torch >&2; exit 1", "the GPUs cannot be counted: no torch"),
    ],
)
def test_fewer_gpus_than_asked_for_are_no_data(tmp_path, says, why):
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\n{says}\n")
    python.chmod(0o755)
    if why is None:
        matrix.require_gpus(2, python)
        return
    with pytest.raises(matrix.Broke, match=f"^{why}$"):
        matrix.require_gpus(2, python)


def test_a_record_of_another_python_is_not_taken_for_this_ones(tmp_path, capsys):
    (tmp_path / "2.4.1.jsonl").write_text(whole("2.4.1", "3.11.7"))
    arguments = ["--versions", "2.4.1", "--records", str(tmp_path)]
    for python in ("3.15", "3.1"):
        with pytest.raises(SystemExit, match="2"):
            matrix.main([*arguments, "--python", python])
        assert "Python 3.11.7: name another folder by --records" in capsys.readouterr().err
    assert matrix.main([*arguments, "--python", "3.11"]) == 0


def test_what_a_broken_run_leaves_is_not_taken_for_its_record(tmp_path, monkeypatch):
    def breaks_off(version, *given, **more):
        (tmp_path / f"{version}.jsonl").write_text(whole("2.5.1"))
        raise matrix.Broke(f"asked for torch {version}, and 2.5.1 ran")

    monkeypatch.setattr(matrix, "measure", breaks_off)
    assert matrix.main(["--versions", "2.4.1", "--records", str(tmp_path)]) == 1
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {
        "2.4.1.nodata": "asked for torch 2.4.1, and 2.5.1 ran\n"
    }
