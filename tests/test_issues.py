"""A run of many torches leaves one issue's text for each version that does not conform, and nothing is filed twice."""

import json
import os
import subprocess

import expecttest
import pytest
from ddp_conformance import record

from ci import diff, issues
from ci.cases import ROOT

MEAN = "mean_gradients.mean/w2"
HOLDS = {"verdict": "holds"}
VIOLATED = {"verdict": "violated", "why": "broken law: inside DDP a rank gets the mean"}
CHANGED = {
    "verdict": "changed",
    "facts": {"in_ddp": "`9.0`", "laws": 2},
    "why": "Mismatch between actual and expect strings:\n\n--- expect.txt\n+++ actual.txt\n@@ -1 +1 @@\n-3.0\n+```9.0```",
}


@pytest.fixture(autouse=True)
def nothing_kept(monkeypatch, tmp_path):
    """No record but a test's own is at hand."""
    monkeypatch.setattr(diff, "RECORDS", tmp_path / "none")
    monkeypatch.chdir(tmp_path)


def write(path, torch, cases, python="3.15.2", git="0123456789abcdef", **header):
    """A small record: what is given of each case, the rest as in one that holds."""
    path.parent.mkdir(parents=True, exist_ok=True)
    run = {
        "line": "run",
        "format": record.FORMAT,
        "subject": "torch.nn.parallel:DistributedDataParallel",
        "torch": torch,
    }
    run |= {"torch_git": git, "build": "cpu", "lanes": ["gloo:cpu"], "python": python, **header}
    lines = []
    for case_id, given in cases.items():
        line = {"line": "case", "id": case_id, "test": "", "level": "MUST", "lane": "gloo:cpu", "world": 2}
        line |= {"facts": {"in_ddp": "3.0", "laws": 2}, "laws": {}, "why": "", "seconds": 0.1, "program": "0" * 16}
        lines.append({**line, **given})
    end = {"line": "end", "selected": len(lines), "collected": len(lines), "judged": len(lines), "complete": True}
    path.write_text("".join(f"{json.dumps(line)}\n" for line in (run, *lines, end)))
    return path


def run(*arguments):
    """The exit code of ci.issues, and the texts that it wrote."""
    code = issues.main([*map(str, arguments)])
    return code, {path.name: path.read_text() for path in sorted(issues.Path("issues").glob("*"))}


def test_a_text_says_what_since_when_and_how_to_see_it(tmp_path):
    release = write(tmp_path / "2.15.0.jsonl", "2.15.0+cpu", {MEAN: HOLDS, "no_sync.accumulates": HOLDS}, git=None)
    bad = write(
        tmp_path / "nightly.jsonl",
        "2.16.0.dev20261203+cpu",
        {MEAN: VIOLATED, "mean_gradients.mean/w3": VIOLATED, "no_sync.accumulates": CHANGED},
    )
    code, texts = run(release, bad, "--run", "URL")
    assert (code, list(texts)) == (0, ["2.16.0.md"])
    upgrade = "\n".join(diff.report(diff.compare(record.read(release), record.read(bad))))
    expecttest.assert_expected_inline(
        texts["2.16.0.md"].replace(upgrade, "(the report of ci.diff)"),
        """\
# DDP does not conform on torch 2.16.0

| build | lanes | verdicts |
|---|---|---|
| 2.16.0.dev20261203+cpu (git 0123456789, Python 3.15.2) | gloo:cpu | 1 changed, 2 violated |

Records and page: URL

## 2.16.0.dev20261203+cpu on Python 3.15.2

```
pip install --pre torch==2.16.0.dev20261203 --index-url "$TORCH_INDEX"   # of torch's nightly builds
pip install -e .
pytest --lane gloo:cpu --claim mean_gradients.mean --claim no_sync.accumulates
```

### `mean_gradients.mean` (MUST) violated

Alone a rank gets its own gradient; inside DDP every rank gets the mean over the ranks.

`mean_gradients.mean/w2` on gloo:cpu:

```
broken law: inside DDP a rank gets the mean
```

- first bad build on record: 2.16.0.dev20261203+cpu (git 0123456789, Python 3.15.2)
- last good build: 2.15.0+cpu (Python 3.15.2)

```
python -m ci.reproduce mean_gradients.mean/w2 > case.py && python case.py
```

`mean_gradients.mean/w3` on gloo:cpu:

```
broken law: inside DDP a rank gets the mean
```

- first bad build on record: 2.16.0.dev20261203+cpu (git 0123456789, Python 3.15.2)
- last good build: none on record

```
python -m ci.reproduce mean_gradients.mean/w3 > case.py && python case.py
```

### `no_sync.accumulates` (MUST) changed

Inside no_sync gradients add up on their rank; the next synced backward reduces the accumulated sum.

`no_sync.accumulates` on gloo:cpu:

````
--- expect.txt
+++ actual.txt
@@ -1 +1 @@
-3.0
+```9.0```
````

- first bad build on record: 2.16.0.dev20261203+cpu (git 0123456789, Python 3.15.2)
- last good build: 2.15.0+cpu (Python 3.15.2)

```
python -m ci.reproduce no_sync.accumulates > case.py && python case.py
```

<details><summary>What changes from torch 2.15.0+cpu</summary>

```
(the report of ci.diff)
```

</details>
""",
    )


def test_first_bad_and_last_good_build_are_found_among_earlier_nights(tmp_path):
    nights = {1130: VIOLATED, 1201: HOLDS, 1202: HOLDS, 1203: VIOLATED, 1204: {"verdict": "no data"}, 1205: VIOLATED}
    for night, verdict in nights.items():
        torch = f"2.16.0.dev2026{night}+cpu"
        path = write(tmp_path / "run" / "nightly.jsonl", torch, {MEAN: verdict}, git=f"{night}" * 10)
        code, texts = run(path, "--builds", "nightlies")
        assert code == 0
        for text in issues.Path("issues").iterdir():
            text.unlink()
    assert "- first bad build on record: 2.16.0.dev20261203+cpu (git 1203120312, Python 3.15.2)" in texts["2.16.0.md"]
    assert "- last good build: 2.16.0.dev20261202+cpu (git 1202120212, Python 3.15.2)" in texts["2.16.0.md"]


def test_only_so_many_nights_are_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(issues, "NIGHTS", 2)
    for night in ("09", "10", "11"):
        path = write(tmp_path / "run" / "nightly.jsonl", f"2.16.0.dev202612{night}", {MEAN: HOLDS})
        assert run(path, "--builds", "nightlies") == (0, {})
    write(tmp_path / "release.jsonl", "2.17.0", {MEAN: HOLDS})
    assert run(tmp_path / "release.jsonl", "--builds", "nightlies") == (0, {})
    kept = sorted(path.name for path in (tmp_path / "nightlies").iterdir())
    assert kept == ["2.16.0.dev20261210.jsonl.gz", "2.16.0.dev20261211.jsonl.gz"]


def test_two_pythons_of_one_version_share_an_issue(tmp_path):
    old = write(tmp_path / "a" / "2.15.0.jsonl", "2.15.0+cpu", {MEAN: HOLDS}, python="3.11.7")
    new = write(tmp_path / "b" / "2.15.0.jsonl", "2.15.0+cpu", {MEAN: VIOLATED}, python="3.15.2")
    for order in ((old, new), (new, old)):
        _, texts = run(*order)
        assert list(texts) == ["2.15.0.md"]
        assert texts["2.15.0.md"].count("\n## ") == 1
        assert "- last good build: 2.15.0+cpu (git 0123456789, Python 3.11.7)" in texts["2.15.0.md"]
        (tmp_path / "issues" / "2.15.0.md").unlink()
    write(old, "2.15.0+cpu", {MEAN: VIOLATED}, python="3.11.7")
    write(new, "2.15.0+cpu", {MEAN: HOLDS}, python="3.15.2")
    _, texts = run(old, new)
    assert "- last good build: none on record" in texts["2.15.0.md"]


def test_a_text_is_short_enough_to_be_filed(tmp_path):
    cases = {f"mean_gradients.case{number}": {**VIOLATED, "why": "x\n" * 9_000} for number in range(1_000)}
    write(tmp_path / "2.14.0.jsonl", "2.14.0", dict.fromkeys(cases, HOLDS))
    new = write(tmp_path / "2.15.0.jsonl", "2.15.0", cases)
    _, texts = run(tmp_path / "2.14.0.jsonl", new)
    assert 30_000 < len(texts["2.15.0.md"]) < 65_536
    assert "### `mean_gradients.case0`" in texts["2.15.0.md"]
    assert "more claims: see the record" in texts["2.15.0.md"]
    assert "... and more: python -m ci.diff tells the rest" in texts["2.15.0.md"]


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["cut.jsonl"], "cut.jsonl: it has no end line, so the run was cut short"),
        (["mine.jsonl"], "mine.jsonl: it is of mine:ddp, and issues are about"),
        (["2.15.0.jsonl", "-o", "."], "-o .: the folder is not empty"),
        (["2.15.0.jsonl", "-o", "cut.jsonl"], "File exists: 'cut.jsonl'"),
    ],
)
def test_what_cannot_be_told_is_one_clear_line(tmp_path, capsys, arguments, why):
    write(tmp_path / "mine.jsonl", "2.15.0", {MEAN: HOLDS}, subject="mine:ddp")
    whole = write(tmp_path / "2.15.0.jsonl", "2.15.0", {MEAN: HOLDS})
    (tmp_path / "cut.jsonl").write_text(whole.read_text().rpartition('{"line": "end"')[0])
    assert issues.main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("ci.issues: ") and why in error
    assert len(error.splitlines()) == 1


def test_no_data_is_no_issue(tmp_path, capsys):
    (tmp_path / "nightly.nodata").write_text("TORCH_INDEX is not set\n")
    assert run("nightly.nodata") == (0, {})
    assert "nightly.nodata: no data, so no issue" in capsys.readouterr().out


GH = """#!/bin/sh
printf '%s\\n' "$*" >> calls
case "$2" in
  list) cat listed ;;
  *) cat > body ;;
esac
"""


@pytest.fixture
def file_issues(tmp_path):
    """ci/file-issues on one text, with a gh that answers from a file and writes down how it was called."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "gh").write_text(GH)
    (tmp_path / "bin" / "gh").chmod(0o755)
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "2.15.0.md").write_text("# DDP $(touch hurt) `x` on torch 2.15.0\n\nthe body\n")

    def start(listed, folder="texts"):
        (tmp_path / "listed").write_text(listed)
        path = f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}"
        command = ["bash", str(ROOT / "ci" / "file-issues"), folder]
        return subprocess.run(command, env={**os.environ, "PATH": path}, capture_output=True, text=True)

    return start


@pytest.mark.parametrize(
    ("listed", "call"),
    [
        ("", "issue create --title DDP $(touch hurt) `x` on torch 2.15.0 --body-file -"),
        (
            "9 DDP $(touch hurt) `x` on torch 2.15.01\n",
            "issue create --title DDP $(touch hurt) `x` on torch 2.15.0 --body-file -",
        ),
        ("9 other\n7 DDP $(touch hurt) `x` on torch 2.15.0\n", "issue edit 7 --body-file -"),
    ],
)
def test_the_same_title_is_updated_and_another_is_not(tmp_path, file_issues, listed, call):
    done = file_issues(listed)
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "calls").read_text().splitlines()[1:] == [call]
    assert (tmp_path / "body").read_text() == "the body\n"
    assert not (tmp_path / "hurt").exists()


def test_nothing_is_filed_where_the_search_fails(tmp_path, file_issues):
    (tmp_path / "bin" / "gh").write_text("#!/bin/sh\necho no token >&2\nexit 4\n")
    done = file_issues("")
    assert (done.returncode, done.stderr) == (4, "no token\n")
    assert not (tmp_path / "calls").exists()


def test_filing_no_folder_is_one_clear_line(file_issues):
    done = file_issues("", folder="none")
    assert done.returncode == 2
    assert done.stderr == "ci/file-issues: name the folder that ci.issues wrote; 'none' is none\n"
