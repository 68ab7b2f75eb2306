"""A record that is cut, garbled or of another shape is one clear line, and is never taken for whole."""

import gzip

import pytest
from ddp_conformance import record
from ddp_conformance.record import RecordError
from hypothesis import given
from hypothesis import strategies as st

from tests.garbled import CASE, LINES, MANY, RECORD, RUN, garbled, often, one_line_about, spots, written


@pytest.fixture(scope="module")
def here(tmp_path_factory):
    """One folder for the module: hypothesis would not have a fixture made anew for each example."""
    return tmp_path_factory.mktemp("files")


def read(here, content, name="run.jsonl"):
    """The record with this content, or its refusal, which is one line that names the file and says what to do."""
    path = here / name
    path.write_bytes(content)
    try:
        return record.read(path)
    except RecordError as error:
        one_line_about(path, error)
        assert "run the suite again with --record" in str(error)
        return None


@given(places=spots)
@often
def test_a_garbled_record_is_refused_or_as_long_as_its_end_says(here, places):
    found = read(here, garbled(RECORD, places))
    if found is not None:
        assert len(found.cases) == found.end["judged"]
        assert not found.whole_suite or len({line["id"] for line in found.cases}) == 2


@given(data=st.data())
@often
def test_a_record_with_lines_lost_doubled_or_in_another_order_is_never_taken_for_whole(here, data):
    first, last = (data.draw(st.sampled_from([[], [line]])) for line in (LINES[0], LINES[-1]))
    lines = [*first, *data.draw(st.lists(st.sampled_from(LINES), max_size=3)), *last]
    found = read(here, written(lines))
    if found is not None and found.whole_suite:
        assert sorted(map(repr, lines)) == sorted(map(repr, LINES))


def test_a_compressed_record_cut_at_any_byte_is_refused(here):
    whole = gzip.compress(RECORD, mtime=0)
    assert read(here, whole, "run.jsonl.gz") is not None
    for end in range(len(whole)):
        assert read(here, whole[:end], "run.jsonl.gz") is None


@given(places=spots)
@often
def test_a_garbled_compressed_record_is_refused_or_the_same(here, places):
    found = read(here, garbled(gzip.compress(RECORD, mtime=0), places), "run.jsonl.gz")
    assert found is None or found.cases == LINES[1:-1]


WRONG_RECORDS = {
    "deep JSON": (b'{"line": ' + b"[" * 100_000 + b"\n", "line 1 is no JSON"),
    "thousands of digits": (b'{"line": ' + b"1" * 5000 + b"}\n", "line 1 is no JSON"),
    "a release of thousands of digits": (written([{**RUN, "torch": "1" * 5000}, *LINES[1:]]), "is no release of torch"),
    "a release of 10 MB": (written([{**RUN, "torch": "x" * MANY}, *LINES[1:]]), "xxx' is no release of torch"),
    "a key of 10 MB": (written([RUN, {**CASE, "x" * MANY: 1}, *LINES[2:]]), "line 2: wrong keys ['xxx"),
    "a format of 10 MB": (written([{**RUN, "format": "1" * MANY}, *LINES[1:]]), "format '111"),
    "a subject of 10 MB": (written([{**RUN, "subject": "x" * MANY}, *LINES[1:]]), "a subject of another form"),
    "a lane of 10 MB": (written([RUN, {**CASE, "lane": "x" * MANY}, *LINES[2:]]), "line 2: a lane of another form"),
    "UTF-16": (RECORD.decode().encode("utf-16"), "not UTF-8 at byte 0"),
    "a line separator": (RECORD.replace("é".encode(), "\u2028".encode()), "line 2 is no JSON"),
    "a surrogate": (RECORD.replace(b'"d"', b'"\\udc80"'), "line 3: an id or a fact of another form"),
    "a word golden files keep": (RECORD.replace(b'"fact": "d"', b'"broken": "d"'), "line 3: an id or a fact"),
    "an unknown verdict": (RECORD.replace(b'"changed"', b'"passed"'), "line 2: a verdict or a law of another form"),
    "a law uncounted": (RECORD.replace(b'"held": 2, ', b""), "line 2: a verdict or a law of another form"),
}


@pytest.mark.parametrize("what", WRONG_RECORDS)
def test_what_is_wrong_in_a_record_is_named_in_one_line(here, what):
    content, why = WRONG_RECORDS[what]
    assert content != RECORD
    path = here / "run.jsonl"
    path.write_bytes(content)
    with pytest.raises(RecordError) as refusal:
        record.read(path)
    one_line_about(path, refusal.value)
    assert why in str(refusal.value)
