"""A record is whole and well-formed, or it is refused in one line by everyone who reads it."""

import copy
import json
import tempfile
from pathlib import Path

import jsonschema
import pytest
from ddp_conformance import golden, record
from hypothesis import given, settings
from hypothesis import strategies as st

from ci import accept
from tests.runs import ROOT, Little

pytestmark = pytest.mark.timeout(600)

SCHEMA = json.loads((ROOT / "ci" / "record.schema.json").read_text())

CASES = '''\
"""Cases for a record."""

from ddp_conformance import MUST, OBSERVED, case


@case("family.held", level=MUST, source="here", each={"a": 1, "b": 2}, group=False)
def test_held(rank, value):
    """One law holds."""
    rank.show("value", value)
    rank.law("one is one", 1, 1)


@case("family.each_rank", level=OBSERVED, source="here", world=2)
def test_each_rank(rank):
    """One fact for each rank."""
    rank.show("index", rank.index)


@case("family.broken", level=MUST, source="here", group=False)
def test_broken(rank):
    """One law is broken."""
    rank.law("one is two", 1, 2)


@case("family.lane", level=MUST, source="here", lanes=("none:*",))
def test_lane(rank):
    """Needs a lane that is not there."""
'''


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    suite = Little(tmp_path_factory.mktemp("record") / "suite")
    suite.write("test_family.py", CASES)
    return suite.run()


@pytest.fixture(scope="module")
def lines(run):
    return [json.loads(line) for line in run.record.read_text().splitlines()]


def write(path: Path, lines) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_a_real_record_is_read_and_is_as_the_schema_says(run, lines):
    read = record.read(run.record)
    assert [line["id"] for line in read.cases] == [
        "family.held/a",
        "family.held/b",
        "family.each_rank",
        "family.broken",
        "family.lane",
    ]
    assert read.whole_suite
    assert read.end == {"line": "end", "selected": 5, "collected": 5, "judged": 5, "complete": True}
    for line in lines:
        jsonschema.validate(line, SCHEMA)


def test_the_schema_is_a_schema_and_names_every_key_the_reader_wants():
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    assert set(SCHEMA["$defs"]["case"]["required"]) == record.KINDS.keys()


def test_a_record_cut_short_at_any_line_is_refused(lines, tmp_path):
    for end in range(len(lines)):
        with pytest.raises(record.RecordError, match="run the suite again with --record"):
            record.read(write(tmp_path / "cut.jsonl", lines[:end]))


def test_a_record_cut_short_at_any_byte_is_refused_or_the_same(run, tmp_path):
    whole, path = run.record.read_bytes(), tmp_path / "cut.jsonl"
    for end in range(len(whole) - 1):  # without its last line break it is still whole
        path.write_bytes(whole[:end])
        with pytest.raises(record.RecordError) as refusal:
            record.read(path)
        assert len(str(refusal.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("mutate", "why"),
    [
        (lambda lines: lines.insert(1, lines[0]), "a run or end line stands in its middle"),
        (lambda lines: lines.insert(1, lines[-1]), "a run or end line stands in its middle"),
        (lambda lines: lines.pop(1), "its end counts 5 cases and it has 4"),
        (lambda lines: lines.append(lines[1]), "it has no end line"),
        (lambda lines: lines.insert(1, lines[1]), "its end counts 5 cases and it has 6"),
        (lambda lines: lines.pop(0), "it does not begin with a run line"),
        (lambda lines: lines[0].update(format=99), "format 99 is not"),
        (lambda lines: lines[0].pop("subject"), "its run line has no subject"),
        (lambda lines: lines[1].update(more=1), "line 2: wrong keys ['more']"),
        (lambda lines: lines[1].pop("laws"), "line 2: wrong keys ['laws']"),
        (lambda lines: lines[1].update(facts=[]), "line 2: wrong values of ['facts']"),
        (lambda lines: lines[1].update(facts={"laws": 1.5}), "line 2: an id or a fact of another form"),
        (lambda lines: lines[1].update(id="family"), "line 2: an id or a fact of another form"),
        (lambda lines: lines[0].update(torch="new"), "'new' is no release of torch"),
        (lambda lines: lines[0].update(lanes=[1]), "its run line has no lanes"),
        (lambda lines: lines[1].update(line="note"), "line 2 is neither run, case nor end"),
        (lambda lines: lines[-1].pop("complete"), "its end line lacks counts"),
        (lambda lines: lines.insert(1, [1]), "line 2 is neither run, case nor end"),
    ],
)
def test_a_record_of_another_shape_is_refused_by_the_reader(lines, tmp_path, mutate, why):
    changed = copy.deepcopy(lines)
    mutate(changed)
    with pytest.raises(record.RecordError) as refusal:
        record.read(write(tmp_path / "changed.jsonl", changed))
    assert why in str(refusal.value)


@pytest.mark.parametrize(
    ("where", "change"),
    [
        (0, {"format": "1"}),
        (0, {"torch": None}),
        (0, {"lanes": []}),
        (0, {"ranks": "threads"}),
        (0, {"removed": "RANK"}),
        (1, {"id": "family"}),
        (1, {"id": "family.held/A"}),
        (1, {"level": "must"}),
        (1, {"verdict": "passed"}),
        (1, {"lane": 1}),
        (1, {"world": 0}),
        (1, {"facts": {"Fact": "1"}}),
        (1, {"facts": {"fact": 1.5}}),
        (1, {"facts": {"fact": ["1", ["2"]]}}),
        (1, {"facts": {"laws": "1"}}),
        (1, {"laws": {"law": {"held": -1, "broken": 0}}}),
        (1, {"laws": {"law": {"held": 1}}}),
        (1, {"seconds": -1}),
        (1, {"program": "0"}),
        (-1, {"judged": -1}),
        (-1, {"complete": 1}),
    ],
)
def test_a_value_of_another_kind_is_refused_by_the_schema(lines, where, change):
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**lines[where], **change}, SCHEMA)


def test_two_runs_of_the_same_differ_in_seconds_only(run, lines, tmp_path):
    later = [{**line, "seconds": 9.9} if line["line"] == "case" else line for line in lines]
    shuffled = [later[0], *reversed(later[1:-1]), later[-1]]
    other = record.read(write(tmp_path / "later.jsonl", shuffled))
    assert record.canonical(other) == record.canonical(record.read(run.record))


def test_a_file_that_is_no_text_is_refused(tmp_path):
    path = tmp_path / "latin.jsonl"
    path.write_bytes(b'{"line": "\xff"}\n')
    with pytest.raises(record.RecordError, match="not UTF-8 at byte 10"):
        record.read(path)
    with pytest.raises(record.RecordError, match="No such file"):
        record.read(tmp_path / "none.jsonl")


JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-1, 9), st.just(1.5), st.text(max_size=4)),
    lambda inner: st.one_of(st.lists(inner, max_size=2), st.dictionaries(st.sampled_from("abl"), inner, max_size=2)),
    max_leaves=4,
)


@given(data=st.data())
@settings(derandomize=True, max_examples=200, deadline=None)
def test_any_value_in_any_place_is_refused_or_folded_into_a_golden_file_that_can_be_read(lines, data):
    where = data.draw(st.integers(0, len(lines) - 1))
    key = data.draw(st.sampled_from(sorted(lines[where])))
    changed = [{**line, key: data.draw(JSON)} if number == where else line for number, line in enumerate(lines)]
    with tempfile.TemporaryDirectory() as name:
        path = write(Path(name) / "changed.jsonl", changed)
        try:
            read = record.read(path)
        except record.RecordError as refusal:
            assert len(str(refusal).splitlines()) == 1
            return
        accept.accept([read], Path(name) / "golden")
        accept.check([read], Path(name) / "golden")
        for golden_file in (Path(name) / "golden").glob("*.toml"):
            if golden_file.name != "observed.toml":
                golden.load(golden_file)
