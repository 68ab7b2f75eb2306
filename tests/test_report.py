"""The pages say what the records say: measured, extrapolated, of an older case or no data; and matrix.json is as its schema."""

import copy
import gzip
import json
import re
from dataclasses import replace

import jsonschema
import pytest
from ddp_conformance import record

from ci import diff, kills, report, table
from tests import pages
from tests.runs import ROOT

pytestmark = pytest.mark.timeout(600)  # the site is built by whichever test asks first

SCHEMA = json.loads((ROOT / "ci" / "matrix.schema.json").read_text())
KEPT = diff.RECORDS / "2.13.0.jsonl.gz"
MEAN = "mean_gradients.mean"


@pytest.fixture(scope="module")
def site():
    return pages.site()


@pytest.fixture(scope="module")
def document(site):
    return json.loads((site / "matrix.json").read_text())


@pytest.fixture(scope="module")
def small(document):
    """The document with one claim and one sentence, for a test that falsifies it."""
    claims = [claim for claim in document["claims"] if claim["claim"] == "bucket_cap.tiny"]
    coverage = {**document["coverage"], "sentences": document["coverage"]["sentences"][:1]}
    return {**document, "claims": claims, "coverage": coverage}


@pytest.fixture(scope="module")
def kept():
    return record.read(KEPT)


def edited(kept, case_id=f"{MEAN}/w2", run=None, **values):
    """The record with one case line changed, and its header."""
    cases = [{**line, **values} if line["id"] == case_id else line for line in kept.cases]
    return replace(kept, cases=cases, run={**kept.run, **(run or {})})


def cells(known, case_id=f"{MEAN}/w2"):
    (row,) = (row for row in known.claims[case_id.partition("/")[0]] if row.id == case_id)
    return row.cells


def current(kept):
    """The record as if every line were of the cases as they are."""
    from ddp_conformance.case import program_hash

    from ci.cases import all_cases

    programs = {case.id(facet): program_hash(case, facet) for case in all_cases() for facet in case.facets()}
    return replace(
        kept, cases=[{**line, "program": programs[line["id"]]} for line in kept.cases if line["id"] in programs]
    )


def refused(arguments, capsys):
    assert report.main([str(argument) for argument in arguments]) == 2
    said = capsys.readouterr()
    assert not said.out
    assert len(said.err.splitlines()) == 1
    return said.err


# matrix.json


def test_the_schema_is_a_schema_and_the_page_of_all_records_is_as_it_says(document):
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    jsonschema.validate(document, SCHEMA)
    releases = [path.name.removesuffix(".jsonl.gz") for path in diff.RECORDS.glob("*.jsonl.gz")]
    assert sorted(column["torch"] for column in document["columns"]) == sorted([*releases, "9.9.9"])
    for claim in document["claims"]:
        for case in claim["cases"]:
            assert len(case["cells"]) == len(document["columns"]), case["id"]


def set_in(path, value):
    """A lie: the value at a path is another one; None takes the key away."""

    def lie(document):
        *steps, last = path
        for step in steps:
            document = document[step]
        if value is None:
            del document[last]
        else:
            document[last] = value

    return lie


CELL = ("claims", 0, "cases", 0, "cells", 0)


@pytest.mark.parametrize(
    "lie",
    [
        set_in(("format",), 2),
        set_in(("kills",), None),
        set_in(("columns",), []),
        set_in(("claims",), []),
        set_in(("more",), 1),
        set_in(("columns", 0, "lane"), "gloo"),
        set_in(("columns", 0, "absent"), None),
        set_in(("claims", 0, "claim"), "bucket_cap"),
        set_in(("claims", 0, "level"), "must"),
        set_in(("claims", 0, "sentence"), ""),
        set_in(("claims", 0, "cases"), []),
        set_in(("claims", 0, "cases", 0, "world"), 0),
        set_in((*CELL, "verdict"), "passed"),
        set_in((*CELL, "verdict"), "unmeasured"),
        set_in((*CELL, "verdict"), "no data"),
        set_in((*CELL, "measured"), False),
        set_in((*CELL, "measured"), None),
        set_in((*CELL, "older"), "yes"),
        set_in((*CELL, "facts", "Fact"), "1"),
        set_in((*CELL, "facts", "fact"), 1.5),
        set_in((*CELL, "change"), "changed"),
        set_in((*CELL, "since"), "1.12"),
        set_in(("coverage", "sentences", 0, "claims"), []),
        set_in(
            ("coverage", "sentences", 0), {"fingerprint": "0", "owner": "DDP", "claims": ["a.b"], "reason": "advice"}
        ),
        set_in(("kills", "mutants", 0, "breaks"), []),
        set_in(("kills", "mutants", 0, "caught_by", 0), "mean"),
        set_in(("kills", "mutants", 0, "broad"), 1),
        set_in(("kills", "unbroken_laws", 0, "law"), None),
    ],
)
def test_a_lie_is_refused_by_the_schema(small, lie):
    jsonschema.validate(small, SCHEMA)
    liar = copy.deepcopy(small)
    lie(liar)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(liar, SCHEMA)


# What was measured, and what was not


def test_a_record_cut_anywhere_makes_no_page(tmp_path, capsys):
    whole = gzip.decompress(KEPT.read_bytes())
    lines = whole.splitlines(keepends=True)
    files = {
        "no_end.jsonl": b"".join(lines[:-1]),
        "no_middle.jsonl": b"".join([*lines[:100], *lines[101:]]),
        "half_a_line.jsonl": whole[:-10],
        "half.jsonl.gz": KEPT.read_bytes()[:20000],
    }
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
        assert name in refused([KEPT, tmp_path / name, "-o", tmp_path / "site"], capsys)
    assert {path.name for path in tmp_path.iterdir()} == files.keys()


def test_a_line_of_an_older_program_is_marked_and_a_current_one_beats_it(kept):
    now = current(kept)
    old = edited(now, verdict="violated", program="0" * 16)
    assert not cells(table.build([now]))[0].older
    assert [cell.older for cell in cells(table.build([old]))] == [True]
    for both in ([old, now], [now, old]):
        (cell,) = cells(table.build(both))
        assert (cell.verdict, cell.older) == ("holds", False)
    known = table.build([old])
    assert report.shown(known, known.claims[MEAN], 0)["mark"] == "✗*"
    assert "older version" in report.shown(known, known.claims[MEAN], 0)["title"]


def test_of_two_lines_of_the_current_program_the_more_serious_one_stands(kept):
    now = current(kept)
    for verdict, stands in (("violated", "violated"), ("no data", "holds"), ("known", "known")):
        other = edited(now, verdict=verdict)
        for both in ([other, now], [now, other]):
            assert cells(table.build(both))[0].verdict == stands


def test_what_was_not_measured_shows_what_golden_expects_and_says_so(kept):
    partial = replace(kept, cases=[line for line in kept.cases if not line["id"].startswith(f"{MEAN}/")])
    (measured,), (expected,) = cells(table.build([kept])), cells(table.build([partial]))
    assert (measured.verdict, measured.measured) == ("holds", True)
    assert (expected.verdict, expected.measured) == ("unmeasured", False)
    assert expected.facts["in_ddp"] == measured.facts["in_ddp"]
    known = table.build([partial])
    assert report.shown(known, known.claims[MEAN], 0)["mark"] == "?"


def test_no_data_is_shown_as_such_with_its_reason(kept):
    broke = edited(kept, verdict="no data", why="broke off: no port", facts={})
    (cell,) = cells(table.build([broke]))
    assert (cell.verdict, cell.why, cell.measured) == ("no data", "broke off: no port", False)
    known = table.build([broke])
    why = ("no data", "broke off: no port")
    assert report.reasons(known.claims[MEAN], known.columns) == {why: ["2.13.0 gloo:cpu (w2)"]}
    assert report.reasons(known.claims[MEAN][1:2], known.columns) == {why: ["2.13.0 gloo:cpu"]}


def test_a_case_that_admits_no_lane_of_the_run_is_no_data_on_all_of_them(kept):
    needs = edited(
        kept, verdict="no data", lane="nccl:cuda", why="needs lane nccl:cuda", run={"lanes": ["gloo:cpu", "a:b"]}
    )
    assert [cell.why for cell in cells(table.build([needs]))] == ["needs lane nccl:cuda"] * 2


def test_a_release_that_could_not_be_measured_is_a_column_without_data(site, document):
    assert document["columns"][-1] == {"torch": "9.9.9", "lane": "", "build": "", "absent": pages.ABSENT}
    last = [case["cells"][-1] for claim in document["claims"] for case in claim["cases"]]
    assert {(cell["verdict"], cell["why"], str(cell["facts"])) for cell in last} == {("no data", pages.ABSENT, "{}")}
    assert f"<strong>No data for 9.9.9</strong>: {pages.ABSENT}" in (site / "index.html").read_text()
    assert f"no data on 9.9.9: {pages.ABSENT}" in (site / "claim" / "mean_gradients-mean.html").read_text()


def test_a_build_without_a_number_stands_last(kept):
    known = table.build([kept], {"nightly": "TORCH_INDEX is not set", "2.6.0": "no wheel"})
    assert [column.name for column in known.columns] == ["2.6.0", "2.13.0 gloo:cpu", "nightly"]


@pytest.mark.parametrize(
    ("content", "why"), [(b"\n", "it gives no reason for having no data"), (b"\xff", "not UTF-8 at byte 0")]
)
def test_a_nodata_file_without_a_reason_is_refused(tmp_path, capsys, content, why):
    (tmp_path / "2.6.0.nodata").write_bytes(content)
    assert why in refused([KEPT, tmp_path / "2.6.0.nodata", "-o", tmp_path / "site"], capsys)


def test_reasons_for_having_no_data_alone_are_no_records(tmp_path, capsys):
    files = [tmp_path / f"2.{minor}.0.nodata" for minor in range(6, 10)]
    for path in files:
        path.write_text("no wheel\n")
    for given, named in ((files[:1], str(files[0])), (files, f"{', '.join(map(str, files[:3]))}, ...")):
        error = refused([*given, "-o", tmp_path / "site"], capsys)
        assert error.startswith(f"ci.report: no record among {named}: a .nodata file only says why")


@pytest.mark.parametrize("where", ["records/torch-2.4.1-x", "records", "site", "records/2.4.1.nodata"])
def test_a_folder_among_the_records_is_named_and_what_to_give_instead(tmp_path, monkeypatch, capsys, where):
    monkeypatch.chdir(tmp_path)
    for folder in ("records/torch-2.4.1-x", "site"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / where).mkdir(exist_ok=True)
    (tmp_path / "records" / "2.13.0.jsonl.gz").write_bytes(KEPT.read_bytes())
    (tmp_path / "records" / "2.6.0.nodata").write_text("no wheel\n")
    advice = "leave it out" if where == "site" else "name only the files: records/*.jsonl.gz records/*.nodata"
    error = refused(["records/2.13.0.jsonl.gz", where, "-o", "pages"], capsys)
    assert error == f"ci.report: {where}: it is a folder, not a record; {advice}\n"


def test_a_record_of_another_subject_is_refused(kept):
    with pytest.raises(record.RecordError, match=r"2\.13\.0\.jsonl\.gz: it is of mine:ddp"):
        table.build([edited(kept, run={"subject": "mine:ddp"})])


def test_a_span_of_releases_reaches_over_nothing_that_was_not_seen():
    def told(*cells):
        return [(first, last, value) for first, last, value in table.spans(cells, "fact")]

    a, b, none = (table.Cell("holds", facts) for facts in ({"fact": "a"}, {"fact": "b"}, {}))
    expected = table.Cell("unmeasured", {"fact": "a"})
    assert told(a, a, b) == [(0, 1, "a"), (2, 2, "b")]
    assert told(a, none, none) == [(0, 0, "a"), (1, 2, None)]
    for gap in (table.Cell("no data", {}), table.Cell("not offered", {}), table.Cell("unmeasured", {})):
        assert told(a, gap, a) == [(0, 0, "a"), (2, 2, "a")]
    assert told(a, expected, expected, a) == [(0, 0, "a"), (1, 2, "a"), (3, 3, "a")]


def test_every_link_between_the_pages_leads_somewhere(site):
    found = 0
    for page in site.rglob("*.html"):
        text = page.read_text()
        for href, anchor in re.findall(r'href="(?!https?:|data:)([^"#]*)#?([^"]*)"', text):
            target = page.parent / href if href else page
            assert target.is_file(), f"{page.name}: {href}"
            assert not anchor or f'id="{anchor}"' in target.read_text(), f"{page.name}: {href}#{anchor}"
            found += 1
    assert found > 2000


# What changes


def test_changes_between_neighbours_are_those_of_the_upgrade_report():
    releases = ["2.3.1", "2.4.1", "2.11.0", "2.12.1"]
    records = [record.read(diff.RECORDS / f"{release}.jsonl.gz") for release in releases]
    known = table.build(records)
    seen = set()
    for index in range(1, len(records)):
        told = {change.id: change.kind for change in diff.compare(records[index - 1], records[index]).changes}
        rows = [row for rows in known.claims.values() for row in rows]
        assert {row.id: row.cells[index].change for row in rows if row.cells[index].change} == {
            case_id: kind for case_id, kind in told.items() if case_id in {row.id for row in rows}
        }
        seen.update(told.values())
    assert {"changed", "offered", "mended"} <= seen


def test_a_release_without_data_is_passed_over(kept):
    later = edited(kept, run={"torch": "2.15.0"}, facts={"alone": "x", "in_ddp": "y", "laws": 2})
    silent = edited(kept, run={"torch": "2.14.0"}, verdict="no data", facts={})
    first, between, last = cells(table.build([kept, silent, later]))
    assert [(cell.change, cell.since) for cell in (first, between, last)] == [("", ""), ("", ""), ("changed", "2.13.0")]


def test_the_page_of_changes_names_old_and_new_and_the_note(site):
    page = (site / "changes.html").read_text()
    section = page.partition('<section id="2-4-1-gloo-cpu">')[2].partition("</section>")[0]
    told = section.partition("rebuilt_buckets.cap_and_first_limit · ")[2].partition("</article>")[0]
    assert "[5 4, 3, 2, 1, 0]" in told and "[5, 4, 3, 2, 1, 0]" in told
    assert 'href="https://github.com/pytorch/pytorch/issues/121640"' in told


# The kill matrix


def test_broken_ddps_have_a_page_survivors_first_and_claims_name_those_they_catch(site, document):
    assert document["kills"] == pages.KILLS
    assert 'href="kills.html"' in (site / "index.html").read_text()
    page = (site / "kills.html").read_text()
    where = [page.index(text) for text in ("Survivors: 1", "of_torch:IsNotSeen", "mean gradients: 1", "SumsGradients")]
    assert where == sorted(where)
    assert "retired.claim" in page and "claim/retired-claim.html" not in page
    assert "arithmetic of the case&#39;s own" in page
    claim = (site / "claim" / "mean_gradients-mean.html").read_text()
    where = [
        claim.index(text) for text in ("SumsGradients", "mean_gradients.mean/w3</span>", "RaisesAlways", "(broad: ")
    ]
    assert where == sorted(where)
    assert "None of the 3 on file." in (site / "claim" / "bucket_cap-tiny.html").read_text()


def test_without_a_kill_matrix_no_page_speaks_of_one(kept, tmp_path):
    report.write(table.build([kept]), tmp_path / "site")
    assert not (tmp_path / "site" / "kills.html").exists()
    assert 'href="kills.html"' not in (tmp_path / "site" / "index.html").read_text()
    assert json.loads((tmp_path / "site" / "matrix.json").read_text())["kills"] is None


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{", "it is no JSON"),
        ("[]", "$: [] is not of type 'object'"),
        (json.dumps({**pages.KILLS, "mutants": [{}]}), "$.mutants[0]: 'name' is a required property"),
    ],
)
def test_a_broken_kill_matrix_is_one_clear_line(tmp_path, capsys, text, why):
    (tmp_path / "kills.json").write_text(text)
    error = refused([KEPT, "--kills", tmp_path / "kills.json", "-o", tmp_path / "site"], capsys)
    assert (
        error == f"ci.report: {tmp_path / 'kills.json'}: {why}; write it again by python -m ci.mutants --kills FILE\n"
    )
    assert kills.of_claim(pages.KILLS, "mean_gradients.divisor") == []


# Where the pages are put


def test_what_stands_beside_the_output_stays(kept, tmp_path):
    (tmp_path / "site.new").mkdir()
    (tmp_path / "site.new" / "work").write_text("dear")
    for _ in range(2):  # into nothing, and over pages
        report.write(table.build([kept]), tmp_path / "site")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["site", "site.new"]
    assert (tmp_path / "site.new" / "work").read_text() == "dear"


def test_pages_that_fail_leave_the_old_ones_and_nothing_else(kept, tmp_path, monkeypatch):
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "matrix.json").write_text("old")

    def fail(known):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(report.history, "steps", fail)
    with pytest.raises(OSError, match="No space left"):
        report.write(table.build([kept]), tmp_path / "site")
    assert [path.name for path in tmp_path.iterdir()] == ["site"]
    assert (tmp_path / "site" / "matrix.json").read_text() == "old"
