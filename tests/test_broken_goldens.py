"""A golden file that is cut, garbled or of another shape is one clear line, and ci.accept loses nothing of it."""

from contextlib import redirect_stderr, redirect_stdout
from io import StringIO

import pytest
import tomlkit
from ddp_conformance import golden
from ddp_conformance.golden import GoldenError
from hypothesis import given, settings
from hypothesis import strategies as st

from ci import accept
from tests.garbled import GOLDEN, MANY, RECORD, garbled, often, one_line_about, spots


@pytest.fixture(scope="module")
def here(tmp_path_factory):
    """One folder for the module: hypothesis would not have a fixture made anew for each example."""
    return tmp_path_factory.mktemp("files")


def loaded(here, content):
    """The tables of a golden file with this content, or its refusal, which is one line that names the file."""
    path = here / "family.toml"
    path.write_bytes(content)
    try:
        return golden.load(path)
    except GoldenError as error:
        one_line_about(path, error)
        return None


def part_of(less, more):
    """Whether `less` says nothing that `more` does not say, but for texts and numbers that were cut in their middle."""
    if isinstance(less, dict) and isinstance(more, dict):
        return less.keys() <= more.keys() and all(part_of(less[key], more[key]) for key in less)
    if isinstance(less, list) and isinstance(more, list):
        return len(less) <= len(more) and all(map(part_of, less, more))
    return str(more).startswith(str(less))


def test_a_golden_file_cut_at_any_byte_is_refused_or_says_less(here):
    whole = loaded(here, GOLDEN.encode())
    assert whole is not None
    refused = 0
    for end in range(len(GOLDEN)):
        less = loaded(here, GOLDEN.encode()[:end])
        refused += less is None
        assert less is None or part_of(less, whole), GOLDEN[:end]
    assert refused > len(GOLDEN) // 2


WRONG = {
    "a table twice": ("[a]\n[a]\n", "not a TOML file: "),
    "a key twice": ("[a]\nx = '1'\nx = '2'\n", "not a TOML file: "),
    "a lane twice": ('[a.lane."x:y"]\n[a.lane."x:y"]\n', "not a TOML file: "),
    "not UTF-8": (b"[a]\nx = '\xff'\n", "not a TOML file: "),
    "UTF-16": ("[a]\n".encode("utf-16"), "not a TOML file: "),
    "a NUL": ("[a]\nx = '\0'\n", "not a TOML file: "),
    "a date": ("[a]\nx = 2020-01-01\n", "[a] x: a fact is a string, or one string per rank, not datetime.date"),
    "not a number": ("[a]\nx = nan\n", "[a] x: a fact is a string, or one string per rank, not nan"),
    "lists of lists": ("[a]\nx = [['1']]\n", "[a] x: a fact is a string, or one string per rank"),
    "a list of tables": ("[[a]]\nx = '1'\n", "[a] : a golden file holds one table per case"),
    "deep lists": ("[a]\nx = " + "[" * 100_000, "not a TOML file: "),
    "deep tables": ("[a]\nx = " + "{x=" * 100_000, "not a TOML file: "),
    "thousands of digits": ("[a]\nx = " + "1" * 5000, "not a TOML file: "),
    "a release of thousands of digits": ("[a]\nx = { '" + "1" * 5000 + "' = '1' }\n", "111' is no release of torch"),
    "a name in two lines": ('["a\\nb"]\nx = 1.5\n', "[a b] x: a fact is a string"),
    "a name of 10 MB": (f"['{'a' * MANY}']\nx = 1.5\n", f"[{'a' * 100}] x: a fact is a string"),
    "a key of 10 MB": (f"[a]\n{'x' * MANY} = 1.5\n", f"[a] {'x' * 100}: a fact is a string"),
    "a release of 10 MB": (f"[a]\nx = {{ '{'x' * MANY}' = '1' }}\n", "xxx' is no release of torch"),
    "neither yes nor no": ("[a]\noffered = 'No'\n", '[a] offered: it is "yes" or "no"'),
    "neither, in a lane": ("[a.lane.'x:y']\noffered = { '2.0' = 'No' }\n", '[a] lane.x:y.offered: it is "yes" or "no"'),
    "broken in a lane": ("[[a.lane.'x:y'.broken]]\nsince = '2.0'\n", "[a] lane.x:y: broken entries stand beside"),
    "a law without text": ("[[a.broken]]\nsince = '2.0'\nlaw = ''\nnote = 'n'\n", "has either a law or an outcome"),
    "until before since": (
        "[[a.broken]]\nsince = '2.4'\nuntil = '2.4.0'\nlaw = 'x'\nnote = 'n'\n",
        "[a] broken: until is not later than since",
    ),
    "broken as a table": ("[a.broken]\nsince = '2.0'\n", "[a] broken: write it as [[case.broken]] or [[case.note]]"),
    "broken with a number": ("[[a.broken]]\nsince = 2.0\nlaw = 'x'\nnote = 'n'\n", "[a] broken: since is not a string"),
    "a note without text": ("[[a.note]]\nsince = '2.0'\n", "[a] note: missing ['text']"),
    "a note too many": ("[[a.note]]\nsince = '2.0'\ntext = 'x'\nuntil = '3.0'\n", "[a] note: unknown keys ['until']"),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_is_wrong_in_a_golden_file_is_named_in_one_line(here, what):
    content, why = WRONG[what]
    path = here / "family.toml"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(GoldenError) as refusal:
        golden.load(path)
    one_line_about(path, refusal.value)
    assert why in str(refusal.value)


def test_a_value_of_10_mb_is_a_value(here):
    tables = loaded(here, f'[a]\nx = "{"x" * MANY}"\n'.encode())
    assert len(golden.expected(tables, "a", "gloo:cpu", "2.13.0").facts["x"][0]) == MANY


texts = st.text(st.characters(codec="utf-8"), max_size=6)
facts = st.one_of(texts, st.integers(-(2**63), 2**63 - 1), st.lists(texts, max_size=3))
releases = st.sampled_from(["1.13", "2.0", "2.4", "2.4.1", "2.15", "99.0"])
entries = st.one_of(facts, st.dictionaries(releases, st.one_of(facts, st.just(False)), min_size=1))
fact_tables = st.dictionaries(
    st.one_of(st.from_regex(r"[a-z0-9_]{1,3}", fullmatch=True), texts).filter(
        lambda name: name not in ("broken", "note", "lane", "offered")
    ),
    entries,
    max_size=3,
)
broken = st.fixed_dictionaries(
    {"since": st.just("2.0"), "note": st.text("ab", min_size=1)},
    optional={"until": st.just("2.9"), "lane": st.sampled_from(["gloo:cpu", "nccl:cuda"])},
).flatmap(lambda entry: st.sampled_from([{**entry, "law": "x"}, {**entry, "outcome": "SIGSEGV"}]))
golden_tables = st.dictionaries(
    texts,
    st.tuples(fact_tables, st.dictionaries(texts, fact_tables, max_size=2), st.lists(broken, max_size=2)).map(
        lambda parts: {
            **parts[0],
            **({"lane": parts[1]} if parts[1] else {}),
            **({"broken": parts[2]} if parts[2] else {}),
        }
    ),
    max_size=3,
)


@given(tables=golden_tables, torch=releases, lane=st.sampled_from(["gloo:cpu", "nccl:cuda"]))
@settings(derandomize=True, max_examples=60, deadline=None)  # tomlkit takes its time
def test_what_a_golden_file_may_hold_is_read_as_it_was_written(here, tables, torch, lane):
    assert loaded(here, tomlkit.dumps(tables).encode()) == tables
    for name, table in tables.items():
        expected = golden.expected(tables, name, lane, torch)
        plain = {key for key, entry in table.items() if key not in ("broken", "lane") and not isinstance(entry, dict)}
        assert plain <= expected.facts.keys()
        assert all(value is not False for value, _ in expected.facts.values())


@given(places=spots)
@often
def test_a_garbled_golden_file_is_refused_or_can_be_used(here, places):
    tables = loaded(here, garbled(GOLDEN.encode(), places))
    for name in tables or ():
        golden.expected(tables, name, "gloo:cpu", "2.13.0")


@pytest.fixture(scope="module")
def folder(here):
    (here / "golden").mkdir()
    return here / "golden"


def accepted(here, folder, monkeypatch, *, goldens, observed=b"", lines=RECORD):
    """The exit code of ci.accept over these files, what it wrote to stderr, and whether the folder is as it was."""
    (folder / "family.toml").write_bytes(goldens)
    (folder / "observed.toml").write_bytes(observed)
    (here / "run.jsonl").write_bytes(lines)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    monkeypatch.delenv("CI", raising=False)
    with redirect_stderr(StringIO()) as said, redirect_stdout(StringIO()):
        code = accept.main([f"--golden={folder}", str(here / "run.jsonl")])
    after = {path.name: path.read_bytes() for path in folder.iterdir()}
    return code, said.getvalue(), before == after


BROKEN = {
    "a record cut short": {"lines": RECORD[:-20]},
    "a golden file cut short": {"goldens": GOLDEN.encode()[:-3]},
    "golden tables twice": {"goldens": GOLDEN.encode() * 2},
    "observed cut short": {"observed": b'["gloo:cpu"]\n"2.12.1" = ["cp'},
    "observed without lanes": {"observed": b'"2.12.1" = ["cpu"]\n'},
    "observed as text": {"observed": b'"gloo:cpu" = "2"\n'},
    "observed with builds as text": {"observed": b'["gloo:cpu"]\n"2.13.0" = "cpu"\n'},
    "observed twice": {"observed": b'["gloo:cpu"]\n["gloo:cpu"]\n'},
    "observed, no UTF-8": {"observed": b"\xff"},
}


@pytest.mark.parametrize("what", BROKEN)
def test_nothing_is_accepted_where_one_file_is_broken(here, folder, monkeypatch, what):
    code, said, same = accepted(here, folder, monkeypatch, **{"goldens": GOLDEN.encode(), **BROKEN[what]})
    assert (code, len(said.splitlines()), same) == (2, 1, True), said


@given(places=spots)
@often
def test_accepting_over_a_garbled_golden_file_changes_nothing_or_loses_nothing(here, folder, places):
    content = garbled(GOLDEN.encode(), places)
    with pytest.MonkeyPatch.context() as monkeypatch:
        code, said, same = accepted(here, folder, monkeypatch, goldens=content)
    if code:
        assert (code, len(said.splitlines()), same) == (2, 1, True), said
        return
    before, after = loaded(here, content), golden.load(folder / "family.toml")
    assert after.keys() == {*before, "plain", "by/release"}
    for name, table in before.items():
        if name not in ("plain", "by/release"):
            assert after[name] == table
        for kept in ("broken", "note"):
            assert after[name].get(kept) == table.get(kept)
