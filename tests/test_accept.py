"""Whatever was observed, ci.accept writes golden files that expect exactly that, and refuses what it must."""

import json
import random
import shutil
import tempfile
from pathlib import Path

import pytest
from ddp_conformance import golden, record
from ddp_conformance.subject import DEFAULT
from hypothesis import given, settings
from hypothesis import strategies as st

from ci import accept

LANES = ("gloo:cpu", "nccl:cuda", "twin:cpu")
RELEASES = ("1.13.1", "2.0.0", "2.0.1", "2.2.2", "2.4.0", "2.4.1", "2.9.1", "2.13.0+cpu", "2.15.0.dev20261101")
NOT_OFFERED = {"offered": "no"}


def line(name, lane, facts, **more):
    verdict = "not offered" if facts == NOT_OFFERED else "changed"
    return {
        "line": "case",
        "id": f"family.{name}",
        "test": f"test_family.py::test_{name}[{lane}]",
        "level": "MUST",
        "lane": lane,
        "world": 2,
        "verdict": verdict,
        "facts": {} if verdict == "not offered" else facts,
        "laws": {},
        "why": "",
        "seconds": 0.1,
        "program": "0" * 16,
        **more,
    }


def whole(torch, lane, lines, *, complete=True, subject=DEFAULT):
    run = {"line": "run", "format": 1, "subject": subject, "torch": torch, "lanes": [lane], "build": "cpu"}
    lines = list(lines)
    end = {"selected": len(lines), "collected": len(lines), "judged": len(lines), "complete": complete}
    return record.Record(Path("memory.jsonl"), run, lines, end)


def save(folder, *records):
    paths = []
    for number, each in enumerate(records):
        path = folder / f"record{number}.jsonl"
        path.write_text("".join(json.dumps(one) + "\n" for one in (each.run, *each.cases, {"line": "end", **each.end})))
        paths.append(str(path))
    return paths


def wanted(folder, name, lane, torch):
    """What the golden files expect, in the form of an observation."""
    known = golden.expected(golden.load(folder / "family.toml"), name, lane, torch)
    facts = {fact: value for fact, (value, _) in known.facts.items() if (fact, value) != ("outcome", "returned")}
    return facts if known.offered else NOT_OFFERED


TEXT = st.sampled_from(["a", "b", "c d", '"quoted"'])
VALUE = st.one_of(TEXT, st.lists(TEXT, min_size=2, max_size=2))
FACTS = st.fixed_dictionaries(
    {"laws": st.integers(1, 3)},  # a case that shows nothing at all is no case
    optional={"one": VALUE, "two": VALUE, "outcome": st.sampled_from(["SIGSEGV", ["returned", "SIGABRT"]])},
)
OBSERVED = st.one_of(FACTS, st.just(NOT_OFFERED))
SUITE = st.dictionaries(
    st.tuples(st.sampled_from(LANES), st.sampled_from(RELEASES)),
    st.fixed_dictionaries({"plain": OBSERVED, "faceted/w2": OBSERVED}),
    min_size=1,
    max_size=8,
)


@given(suite=SUITE, order=st.randoms(use_true_random=False), parts=st.integers(1, 4))
@settings(derandomize=True, max_examples=150, deadline=None)
def test_golden_reproduces_every_observation_whatever_the_order_and_split(suite, order, parts):
    records = [
        whole(torch, lane, [line(name, lane, facts) for name, facts in cases.items()])
        for (lane, torch), cases in suite.items()
    ]
    order.shuffle(records)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for part in range(parts):
            accept.accept(records[part::parts], folder)
        for (lane, torch), cases in suite.items():
            for name, facts in cases.items():
                assert wanted(folder, name, lane, torch) == facts, (folder / "family.toml").read_text()
        before = (folder / "family.toml").read_text() if (folder / "family.toml").exists() else ""
        accept.accept(records, folder)
        after = (folder / "family.toml").read_text() if (folder / "family.toml").exists() else ""
        assert after == before, "what reproduces everything is left as it stands"


@given(suite=SUITE, seed=st.integers(0, 99))
@settings(derandomize=True, max_examples=50, deadline=None)
def test_one_call_writes_the_same_whatever_the_order(suite, seed):
    records = [
        whole(torch, lane, [line(name, lane, facts) for name, facts in cases.items()])
        for (lane, torch), cases in suite.items()
    ]
    written = []
    for _ in range(2):
        with tempfile.TemporaryDirectory() as folder:
            accept.accept(records, Path(folder))
            written.append({path.name: path.read_text() for path in sorted(Path(folder).iterdir())})
        random.Random(seed).shuffle(records)
    assert written[0] == written[1]


def test_an_entry_names_the_releases_at_which_it_changes(tmp_path):
    values = {"1.13.1": "a", "2.2.2": "a", "2.4.1": "b", "2.9.1": "b"}
    accept.accept([whole(t, "gloo:cpu", [line("x", "gloo:cpu", {"one": v})]) for t, v in values.items()], tmp_path)
    assert (tmp_path / "family.toml").read_text() == '[x]\none = {"1.13" = "a", "2.4" = "b"}\n'
    accept.accept([whole("2.4.0", "gloo:cpu", [line("x", "gloo:cpu", {"one": "a"})])], tmp_path)
    assert (tmp_path / "family.toml").read_text() == '[x]\none = {"1.13" = "a", "2.4.1" = "b"}\n'


@pytest.mark.parametrize(
    ("points", "entry"),
    [
        ({(2, 2, 2): "a", (2, 9, 1): "a"}, "a"),
        ({(2, 2, 2): False, (2, 9, 1): "a"}, {"2.9": "a"}),
        ({(2, 2, 2): "a", (2, 9, 1): False}, {"2.2": "a", "2.9": False}),
        ({(2, 2, 2): False}, {"2.2": False}),
        ({(2,): "a", (2, 0, 1): "b"}, {"2.0": "a", "2.0.1": "b"}),
        ({(2,): "a", (2, 1): "b"}, {"2.0": "a", "2.1": "b"}),
        ({(2, 4): "a", (2, 4, 1): "b", (2, 4, 2): "a"}, {"2.4": "a", "2.4.1": "b", "2.4.2": "a"}),
    ],
)
def test_the_shortest_entry(points, entry):
    assert accept.compress(points) == entry


def test_offered_is_written_only_where_some_release_lacks_it(tmp_path):
    seen = {"1.13.1": NOT_OFFERED, "2.9.1": {"one": "a"}}
    records = [
        whole(t, "gloo:cpu", [line("x", "gloo:cpu", facts), line("y", "gloo:cpu", {"one": "a"})])
        for t, facts in seen.items()
    ]
    accept.accept(records, tmp_path)
    text = '[x]\none = "a"\noffered = {"1.13" = "no", "2.9" = "yes"}\n\n[y]\none = "a"\n'
    assert (tmp_path / "family.toml").read_text() == text


def test_a_lane_states_only_what_differs_there(tmp_path):
    lines = {"gloo:cpu": {"one": "a", "two": "x"}, "nccl:cuda": {"one": "b", "two": "x"}}
    accept.accept([whole("2.9.1", lane, [line("x", lane, facts)]) for lane, facts in lines.items()], tmp_path)
    assert (tmp_path / "family.toml").read_text() == '[x]\none = "a"\ntwo = "x"\n\n[x.lane."nccl:cuda"]\none = "b"\n'


HAND_WRITTEN = """\
# Why this family.
[x]  # the first
one = "a"   # what it is
two = {"2.2" = "x", "2.9" = "y"}

[[x.note]]
since = "2.2"
text = "a person wrote this"

[[x.broken]]
since = "2.4"
law = "one is two"
note = "so did they this"

[untouched]
one = "a"
"""


def test_comments_notes_broken_and_what_a_record_lacks_are_kept(tmp_path):
    (tmp_path / "family.toml").write_text(HAND_WRITTEN)
    accept.accept(
        [whole("2.13.0", "gloo:cpu", [line("x", "gloo:cpu", {"one": "a", "two": "z"})], complete=False)], tmp_path
    )
    text = HAND_WRITTEN.replace('{"2.2" = "x", "2.9" = "y"}', '{"2.2" = "x", "2.9" = "y", "2.13" = "z"}')
    assert (tmp_path / "family.toml").read_text() == text
    assert "2.13" not in (tmp_path / "observed.toml").read_text()


def test_violated_is_left_out_and_said(tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("CI", raising=False)
    lines = [line("x", "gloo:cpu", {"one": "a"}, verdict="violated"), line("y", "gloo:cpu", {"one": "a"})]
    assert accept.main([*save(tmp_path, whole("2.9.1", "gloo:cpu", lines)), "--golden", str(tmp_path / "golden")]) == 0
    assert "left out: family.x [gloo:cpu] on 2.9.1 is violated\n" in capsys.readouterr().out
    assert list(golden.load(tmp_path / "golden" / "family.toml")) == ["y"]


def test_no_data_says_nothing(tmp_path):
    accept.accept([whole("2.9.1", "gloo:cpu", [line("x", "none:*", {}, verdict="no data")])], tmp_path)
    assert not (tmp_path / "family.toml").exists()


def test_observed_notes_lanes_releases_and_builds(tmp_path):
    for torch in ("2.13.0+cpu", "1.13.1", "2.2.2"):
        accept.accept([whole(torch, "gloo:cpu", [line("x", "gloo:cpu", {"one": "a"})])], tmp_path)
    text = (tmp_path / "observed.toml").read_text()
    assert text.split("\n", 1)[1].strip() == ('["gloo:cpu"]\n"1.13.1" = ["cpu"]\n"2.2.2" = ["cpu"]\n"2.13.0" = ["cpu"]')


def cut(folder):
    path = Path(save(folder, whole("2.9.1", "gloo:cpu", [line("x", "gloo:cpu", {"one": "a"})]))[0])
    path.write_text("\n".join(path.read_text().splitlines()[:-1]) + "\n")
    return [str(path)]


@pytest.mark.parametrize(
    ("records", "why"),
    [
        (cut, "it has no end line, so the run was cut short"),
        (
            lambda folder: save(folder, whole("2.9.1", "gloo:cpu", [], subject="mine:ddp")),
            f"golden files are about {DEFAULT} only",
        ),
        (lambda folder: [str(folder / "none.jsonl")], "No such file"),
    ],
)
def test_a_record_that_cannot_be_trusted_is_refused_in_one_line(tmp_path, monkeypatch, capsys, records, why):
    monkeypatch.delenv("CI", raising=False)
    folder = tmp_path / "golden"
    assert accept.main([*records(tmp_path), "--golden", str(folder)]) == 2
    error = capsys.readouterr().err
    assert why in error
    assert len(error.splitlines()) == 1
    assert not folder.exists()


def test_a_golden_file_that_cannot_be_read_is_left_as_it_is(tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("CI", raising=False)
    (tmp_path / "family.toml").write_text("[x\n")
    records = save(tmp_path, whole("2.9.1", "gloo:cpu", [line("x", "gloo:cpu", {"one": "a"})]))
    assert accept.main([*records, "--golden", str(tmp_path)]) == 2
    assert "family.toml: not a TOML file" in capsys.readouterr().err
    assert (tmp_path / "family.toml").read_text() == "[x\n"


def test_nothing_is_written_when_one_of_the_files_cannot_be_read(tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("CI", raising=False)
    lines = [line("x", "gloo:cpu", {"one": "a"}), {**line("x", "gloo:cpu", {"one": "a"}), "id": "zebra.x"}]
    records = save(tmp_path, whole("2.9.1", "gloo:cpu", lines))
    for broken in ("zebra.toml", "observed.toml"):
        folder = tmp_path / broken.partition(".")[0]
        folder.mkdir()
        (folder / broken).write_text("[x\n")
        assert accept.main([*records, "--golden", str(folder)]) == 2
        assert len(capsys.readouterr().err.splitlines()) == 1
        assert [path.name for path in folder.iterdir()] == [broken]
    (tmp_path / "file").write_text("")
    assert accept.main([*records, "--golden", str(tmp_path / "file")]) == 2
    assert "file: not a folder" in capsys.readouterr().err


def test_a_workflow_accepts_nothing_and_may_check(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("CI", "true")
    records = save(tmp_path, whole("2.9.1", "gloo:cpu", [line("x", "gloo:cpu", {"one": "a"})]))
    assert accept.main([*records, "--golden", str(tmp_path / "golden")]) == 2
    assert "CI is set" in capsys.readouterr().err
    assert not (tmp_path / "golden").exists()
    assert accept.main(["--check", *records, "--golden", str(tmp_path / "golden")]) == 1


def test_records_of_the_whole_suite_are_kept_when_asked_for(tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("CI", raising=False)
    monkeypatch.setattr(accept, "ROOT", tmp_path)
    monkeypatch.setattr(accept, "RECORDS", tmp_path / "kept")
    lines = [line("x", "gloo:cpu", {"one": "a"})]
    part = save(tmp_path, whole("2.9.1", "gloo:cpu", lines, complete=False))
    assert accept.main(["--keep", *part, "--golden", str(tmp_path / "golden")]) == 2
    assert "only records of the whole suite are kept" in capsys.readouterr().err
    assert not (tmp_path / "golden").exists()
    assert (
        accept.main(["--keep", *save(tmp_path, whole("2.9.1+cpu", "gloo:cpu", lines)), f"--golden={tmp_path}/g"]) == 0
    )
    assert record.read(tmp_path / "kept" / "2.9.1.jsonl.gz").cases == [{**lines[0], "verdict": "holds"}]
    assert (tmp_path / "g" / "family.toml").exists()


def test_what_is_kept_has_the_verdicts_of_the_golden_files_that_it_is_accepted_into(tmp_path):
    """A page made of it would call it "changed, not accepted" for ever, and ci.diff would not see what is newly offered."""
    folder, broken = tmp_path / "golden", {"the law": {"held": 1, "broken": 1}}
    why = "no such option\nbut golden says it is offered"
    lacking = {**line("lacks", "gloo:cpu", {}, why=why), "facts": NOT_OFFERED}
    died = line("died", "gloo:cpu", {"outcome": "SIGSEGV"})
    false = line("false", "gloo:cpu", {"laws": 2}, laws=broken)
    accept.accept([whole("2.9.1", "gloo:cpu", [lacking, died, false, line("x", "gloo:cpu", {"one": "a"})])], folder)
    for name, what in (("died", 'outcome = "SIGSEGV"'), ("false", 'law = "the law"')):
        entry = f'\n[[{name}.broken]]\nsince = "2.9"\n{what}\nnote = "why"\n'
        (folder / "family.toml").write_text((folder / "family.toml").read_text() + entry)
    new = line("x", "gloo:cpu", {"one": "b"}, why="one differs")
    given = whole("2.9.1", "gloo:cpu", [lacking, died, false, line("x", "gloo:cpu", {"one": "a"}), new])
    kept = accept.as_accepted(given, folder).cases
    assert [each["verdict"] for each in kept] == ["not offered", "known", "known", "holds", "changed"]
    assert [each["why"] for each in kept] == [
        "no such option",
        "outcome SIGSEGV: why",
        "law 'the law': why",
        "",
        "one differs",
    ]
    assert [each["facts"] for each in kept] == [{}, *(each["facts"] for each in given.cases[1:])]
    assert accept.check([given], folder) == 1  # the last one alone
    other = {**false, "laws": {"another law": {"held": 1, "broken": 1}}}
    assert accept.as_accepted(whole("2.9.1", "gloo:cpu", [other]), folder).cases == [other]


def test_check_judges_and_writes_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("CI", raising=False)
    good = [line("x", "gloo:cpu", {"one": "a"}), line("z", "gloo:cpu", NOT_OFFERED)]
    folder = tmp_path / "golden"
    accept.accept([whole("2.9.1", "gloo:cpu", good)], folder)
    before = {path: path.read_bytes() for path in folder.iterdir()}
    bad = [
        line("x", "gloo:cpu", {"one": "b"}),
        line("y", "gloo:cpu", {"one": "a"}, verdict="violated"),
        line("z", "gloo:cpu", {"one": "a"}),
        line("new", "gloo:cpu", {"one": "a"}),
        line("none", "none:*", {}, verdict="no data"),
        line("absent", "gloo:cpu", NOT_OFFERED),
    ]
    records = save(tmp_path, whole("2.9.1", "gloo:cpu", good), whole("2.9.1", "gloo:cpu", bad))
    capsys.readouterr()
    assert accept.main(["--check", records[0], "--golden", str(folder)]) == 0
    assert capsys.readouterr().out == "2 case lines, 0 not as expected\n"
    assert accept.main(["--check", records[1], "--golden", str(folder)]) == 1
    told = capsys.readouterr().out.splitlines()
    assert told[0] == 'family.x [gloo:cpu] on 2.9.1: differs in one from family.toml ["x"]'
    assert told[1] == "family.y [gloo:cpu] on 2.9.1: violated"
    assert "family.absent [gloo:cpu] on 2.9.1: golden says it is offered" in told
    assert told[-1] == "6 case lines, 5 not as expected"
    assert {path: path.read_bytes() for path in folder.iterdir()} == before


def test_check_names_just_the_kept_releases_of_which_a_golden_is_false(tmp_path, capsys):
    folder = tmp_path / "golden"
    shutil.copytree(accept.FOLDER, folder)
    true = (folder / "bucket_cap.toml").read_text()
    false = true.replace('"2.4" = "[5 4 3 2 1 0]"', '"2.4" = "[0 1 2 3 4 5]"', 1)
    assert false != true
    (folder / "bucket_cap.toml").write_text(false)
    paths = sorted(accept.RECORDS.glob("*.jsonl.gz"), key=lambda path: golden.release(path.name.split(".jsonl")[0]))
    kept = [record.read(path).run["torch"] for path in paths]
    assert accept.main(["--check", *map(str, paths), "--golden", str(folder)]) == 1
    *told, total = capsys.readouterr().out.splitlines()
    newer = [torch for torch in kept if golden.release(torch) >= (2, 4)]
    assert newer[0].startswith("2.4.1")
    assert [line.partition(" from ")[0] for line in told] == [
        f"bucket_cap.negative [gloo:cpu] on {torch}: differs in buckets" for torch in newer
    ]
    assert total.endswith(f" case lines, {len(newer)} not as expected")
