"""What is generated is fresh, and what a case rests on is there."""

import json
import os
import re
import signal
import subprocess
import sys

import pytest

from ci import claims, coverage, diff, matrix, report, reproduce, sources
from ci.cases import ROOT, all_cases
from ci.documentation import Sentence, split

CASES = all_cases()


def test_the_page_of_claims_is_what_the_cases_say():
    assert claims.main(["--check"]) == 0


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"[a", "not a TOML file"),
        (b"\xff", "not a TOML file"),
        (b"mean = 1", "[mean] : a golden file holds one table per case"),
        (b"[mean]\noffered = { new = 'yes' }", "[mean] offered: "),
    ],
)
def test_a_broken_golden_file_makes_no_page_of_claims(tmp_path, monkeypatch, capsys, content, why):
    (tmp_path / "golden.toml").write_bytes(content)
    monkeypatch.setattr(claims, "golden_path", lambda case: tmp_path / "golden.toml")
    monkeypatch.setattr(claims, "PAGE", tmp_path / "CLAIMS.md")
    for arguments in (["--check"], []):
        assert claims.main(arguments) == 2
        said = capsys.readouterr()
        assert said.err.startswith(f"ci.claims: {tmp_path / 'golden.toml'}: {why}")
        assert len(said.err.splitlines()) == 1
        assert not said.out
    assert not (tmp_path / "CLAIMS.md").exists()


@pytest.mark.parametrize("source", sorted({case.source for case in CASES}))
def test_a_source_resolves_in_this_torch(source):
    sources.resolve(source)


@pytest.mark.parametrize(
    "source", ["DistributedDataParallel.no_such_method", "nn/parallel/distributed.py: no such line"]
)
def test_a_source_that_is_gone_is_one_clear_line(source):
    with pytest.raises(LookupError, match=r"^source '.*$"):
        sources.resolve(source)


def test_sentences_survive_reflowing_and_markup():
    docstring = """Gradients are *averaged* over ranks. See :meth:`~torch.nn.Module.forward`, e.g. here.

    Args:
        cap (int): at most this many bytes
            go in a bucket. (default: ``None``)

    Example::

        >>> this is no sentence at all

    - A list item stands alone.
    """
    assert split(docstring) == [
        "Gradients are averaged over ranks.",
        "See torch.nn.Module.forward, e.g. here.",
        "at most this many bytes go in a bucket.",
        "(default: None)",
        "A list item stands alone.",
    ]
    assert (
        Sentence("", "Gradients are  averaged.").fingerprint == Sentence("", "gradients are ``averaged``").fingerprint
    )


def test_a_promise_is_not_advice_and_a_claim_must_exist():
    promise = Sentence("DDP", "Parameters are never broadcast.")
    accounted = {promise.fingerprint: {"reason": "advice"}, "0": {"claims": ["no.such"]}}
    wrong = list(coverage.errors(accounted, [promise], []))
    assert wrong == [
        "0 maps to no.such, which is no claim",
        f"{promise.fingerprint} is called advice and says broadcast, never",
    ]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("[a]\nreason = 'too hard'", "a: reason 'too hard' is none of"),
        ("[a]\nclaims = []", "a: claims is a list with at least one"),
        ("[a]\nclaims = [7]", "a: claims is a list with at least one claim id, each a string"),
        ("[a]\nclaims = ['no_sync.accumulates', ['x']]", "a: claims is a list"),
        ("[a]\nclaims = 'x'", "a: claims is a list"),
        ('["a\\nb"]\nclaim = 1', "a b: write claims"),
        ("[a]\nclaim = 'x'", r"a: write claims = \[...\] or reason"),
        ("[a", "not a TOML file"),
        (f"a = {'1' * 5000}", "not a TOML file"),
    ],
)
def test_a_broken_map_is_one_clear_line(tmp_path, monkeypatch, capsys, text, why):
    (tmp_path / "documented.toml").write_text(text)
    monkeypatch.setattr(coverage, "MAP", tmp_path / "documented.toml")
    assert coverage.main([]) == 2
    said = capsys.readouterr()
    assert re.match(f"ci.coverage: documented.toml: {why}", said.err), said.err
    assert len(said.err.splitlines()) == 1
    assert not said.out


def test_pages_replace_nothing_but_pages(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "work").write_text("dear")
    (tmp_path / "file").write_text("dear")
    for output in (".", "..", "mine", "mine/..", "file"):
        assert report.main(["-o", output]) == 2
        error = capsys.readouterr().err
        assert error.startswith(f"ci.report: -o {output}: ")
        assert len(error.splitlines()) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "mine"]
    assert (tmp_path / "mine" / "work").read_text() == "dear"
    monkeypatch.setattr(report, "RECORDS", tmp_path)
    assert report.main(["-o", "site"]) == 2
    assert "no record given" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "arguments", "why"),
    [
        (diff, ["9.9.9", "9.9.9"], "9.9.9: neither a record nor a release on file"),
        (report, ["none.jsonl", "-o", "/proc/none"], "none.jsonl: No such file"),
        (report, ["-o", "/proc/none"], "-o /proc/none: No such file or directory"),
        (reproduce, ["no.such"], "no case 'no.such': see pytest --list"),
        (reproduce, ["no_sync.accumulates", "--torch", "new"], "Invalid version: 'new'"),
        (reproduce, ["no_sync.accumulates", "--lane", "gloo"], "--lane gloo: write backend:device"),
    ],
)
def test_a_command_that_cannot_answer_says_so_in_one_line(capsys, command, arguments, why):
    assert command.main(arguments) == 2
    said = capsys.readouterr()
    assert why in said.err
    assert len(said.err.splitlines()) == 1
    assert not said.out


@pytest.mark.parametrize(
    "command", [["ci.reproduce", "no_sync.accumulates"], ["ci.coverage"], ["ci.diff", "2.2.2", "2.15.0"]]
)
def test_a_reader_that_has_enough_ends_a_command_quietly(command):
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run([sys.executable, "-m", *command], cwd=ROOT, stdout=writing, stderr=subprocess.PIPE, text=True)
    os.close(writing)
    assert (done.returncode, done.stderr) == (-signal.SIGPIPE, "")


def test_the_matrix_measures_releases_and_mixes_no_subjects(tmp_path, capsys):
    run = {"line": "run", "format": 1, "subject": "mine:ddp", "torch": "2.4.1", "lanes": ["gloo:cpu"], "build": "cpu"}
    end = {"line": "end", "selected": 0, "collected": 0, "judged": 0, "complete": True}
    (tmp_path / "2.4.1.jsonl").write_text(f"{json.dumps(run)}\n{json.dumps(end)}\n")
    for versions, why in (
        ("", "'' is no release"),
        ("2.4.1,new", "2.4.1.jsonl is of mine:ddp"),
        ("new", "'new' is no"),
    ):
        with pytest.raises(SystemExit, match="2"):
            matrix.main(["--versions", versions, "--records", str(tmp_path)])
        assert why in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["2.4.1.jsonl"]
