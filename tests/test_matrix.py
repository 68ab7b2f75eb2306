"""What ci.matrix takes for conforming, for whole, and for what a release needs."""

import copy
import json
import tomllib
from dataclasses import replace

import pytest
from ddp_conformance import record

from ci import accept, diff, matrix

KEPT = diff.RECORDS / "2.13.0.jsonl.gz"


@pytest.fixture(scope="module")
def kept():
    return record.read(KEPT)


def edited(kept, lines=None, end=(), **values):
    """The record with this many of its first lines changed (all, by default), and its end."""
    cases = copy.deepcopy(kept.cases)
    for line in cases[:lines]:
        line.update(values)
    return replace(kept, cases=cases, end={**kept.end, **dict(end)})


def test_a_release_as_expected_conforms(kept):
    assert matrix.conforms(kept)


@pytest.mark.parametrize(
    ("lines", "values"),
    [
        (1, {"verdict": "violated"}),
        (1, {"verdict": "changed"}),
        (1, {"verdict": "no data", "why": "broke off: rank 0: no space left"}),
        (None, {"verdict": "no data", "why": "needs lane none:*"}),
    ],
    ids=["violated", "changed", "broke off", "nothing judged"],
)
def test_a_release_that_needs_a_person_does_not(kept, lines, values):
    assert not matrix.conforms(edited(kept, lines, **values))


def test_a_case_that_cannot_run_here_needs_no_person(kept):
    assert matrix.conforms(edited(kept, 1, verdict="no data", why="needs 4 cuda devices"))


def test_a_lane_that_went_dark_does_not_conform(kept):
    assert not matrix.conforms(replace(kept, run={**kept.run, "lanes": ["gloo:cpu", "nccl:cuda"]}))


def test_a_run_that_lost_a_case_does_not_conform_and_says_how_many(kept):
    lost = edited(kept, end={"collected": len(kept.cases) + 1})
    assert not matrix.conforms(lost)
    assert matrix.summary(lost).endswith(f", judged {len(kept.cases)} of {len(kept.cases) + 1} cases")


def test_a_release_whose_record_is_not_whole_is_run_again(kept, tmp_path, monkeypatch):
    asked = []

    def install(version, python, beside, home):
        asked.append(version)
        raise matrix.Broke("not here")

    monkeypatch.setattr(matrix, "install", install)
    lines = [{**kept.run}, *kept.cases, {**kept.end, "collected": kept.end["collected"] + 1}]
    (tmp_path / "2.13.0.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert matrix.main(["--versions", "2.13.0", "--records", str(tmp_path)]) == 1
    assert asked == ["2.13.0"]


@pytest.mark.parametrize(
    ("version", "needs"),
    [
        ("2.4.1", ["numpy<2"]),
        ("2.4.0", ["numpy<2"]),
        ("2.0.0", ["numpy<2", "setuptools<80"]),
        ("2.6.0", []),
        ("9.9", []),
        ("nightly", []),
    ],
)
def test_a_release_needs_what_its_neighbour_needs(version, needs):
    releases = tomllib.loads(matrix.VERSIONS.read_text(encoding="utf-8"))["releases"]
    assert matrix.needed_beside(version, releases) == needs


@pytest.mark.parametrize("option", ["--records", "--gather"])
def test_a_file_is_no_folder(tmp_path, capsys, option):
    (tmp_path / "file").write_text("")
    with pytest.raises(SystemExit, match="2"):
        matrix.main([option, str(tmp_path / "file")])
    assert f"{option} {tmp_path / 'file'}: " in capsys.readouterr().err


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Kept records that may be written over, and golden files that may not."""
    monkeypatch.delenv("CI", raising=False)
    monkeypatch.setattr(accept, "ROOT", tmp_path)
    monkeypatch.setattr(accept, "RECORDS", tmp_path / "kept")
    monkeypatch.setattr(accept, "accept", lambda records, folder: (tmp_path / "accepted").touch())
    record.keep(record.read(KEPT), tmp_path / "kept")
    return tmp_path / "kept"


def test_a_kept_record_may_be_kept_again(folder, kept):
    assert accept.main(["--keep", str(KEPT)]) == 0
    assert record.read(folder / KEPT.name).cases == kept.cases
    assert (folder / KEPT.name).read_bytes() == KEPT.read_bytes()


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda run, cases, end: run.update(lanes=["nccl:cuda"]), "2.13.0.jsonl.gz is of gloo:cpu, "),
        (lambda run, cases, end: (cases.pop(), end.update(dict.fromkeys(("selected", "collected", "judged"), len(cases)))), "it lacks 1 cases of the suite"),
        (lambda run, cases, end: (cases.clear(), end.update(dict.fromkeys(("selected", "collected", "judged"), 0))), "no case was run"),
    ],
    ids=["other lanes", "less than the suite", "nothing"],
)  # fmt: skip
def test_no_kept_record_is_lost_to_one_that_says_less(folder, kept, tmp_path, capsys, change, why):
    run, cases, end = {**kept.run}, list(kept.cases), {**kept.end}
    change(run, cases, end)
    path = tmp_path / "new.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in [run, *cases, end]))
    assert accept.main(["--keep", str(path)]) == 2
    error = capsys.readouterr().err
    assert why in error
    assert len(error.splitlines()) == 1
    assert not (tmp_path / "accepted").exists(), "golden files are written for no record that is refused"
    assert record.read(folder / KEPT.name).cases == kept.cases
