"""The upgrade report and the matrix page say what two records say, and nothing that was not measured."""

import copy
import json
from dataclasses import replace

import pytest
from ddp_conformance import record

from ci import diff, report, table

KEPT = diff.RECORDS / "2.13.0.jsonl.gz"


@pytest.fixture(scope="module")
def old():
    return record.read(KEPT)


def changed(old, case_id, **values):
    """The record with one case line changed."""
    cases = copy.deepcopy(old.cases)
    for line in cases:
        if line["id"] == case_id:
            line.update(values)
    return replace(old, cases=cases)


def only_change(old, new):
    (change,) = diff.compare(old, new).changes
    return change


def test_a_record_differs_from_itself_in_nothing(old):
    difference = diff.compare(old, old)
    assert difference.changes == []
    assert difference.same > 800


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        ({"facts": {"alone": "x", "in_ddp": "y", "laws": 2}}, "changed"),
        ({"verdict": "violated", "why": "broken law: the mean"}, "breaks"),
        ({"verdict": "not offered", "why": "no such option"}, "gone"),
    ],
)
def test_what_changed_is_named_by_kind(old, values, kind):
    new = changed(old, "mean_gradients.mean/w2", **values)
    change = only_change(old, new)
    assert (change.kind, change.claim, change.level) == (kind, "mean_gradients.mean", "MUST")
    assert only_change(new, old).kind == {"changed": "changed", "breaks": "mended", "gone": "offered"}[kind]


@pytest.mark.parametrize(
    ("releases", "case_id", "kind", "fact", "sides"),
    [
        # broadcast_buffers=False no longer has buffers synced at construction
        (
            ("2.0.1", "2.1.2"),
            "buffers.off/broadcast_buffers",
            "changed",
            "after_construction",
            {"old": "[0.0]", "new": ["[0.0]", "[1.0]", "[2.0]"]},
        ),
        # complex parameters are reduced on gloo
        (
            ("2.8.0", "2.9.1"),
            "reduction.complex/w2",
            "mended",
            "gradient",
            {"old": None, "new": "c64[1, 1] (3-15j)"},
        ),
    ],
    ids=["2.1", "2.9"],
)
def test_what_a_release_is_known_to_have_changed_is_in_the_kept_records(releases, case_id, kind, fact, sides):
    (change,) = [each for each in diff.compare(*map(diff.find, releases)).changes if each.id == case_id]
    assert (change.kind, change.facts[fact]) == (kind, sides)
    assert change.since[fact] == releases[1].rpartition(".")[0]


def test_what_was_measured_on_one_side_only_is_not_called_the_same(old):
    new = replace(old, cases=[line for line in old.cases if line["id"] != "mean_gradients.mean/w2"])
    difference = diff.compare(old, new)
    assert difference.changes == []
    assert "mean_gradients.mean/w2 [gloo:cpu]" in difference.one_sided


def test_the_report_reads_as_text(old):
    new = changed(old, "mean_gradients.mean/w2", facts={"alone": "x", "in_ddp": "y", "laws": 2})
    text = "\n".join(diff.report(diff.compare(old, new)))
    assert "1 claims behave differently" in text
    assert "mean_gradients.mean  (MUST)" in text
    assert "in_ddp" in text and "[[3.0, 3.0, 3.0]]" in text


def test_of_two_long_lists_only_what_differs_is_told(old):
    shared = [f"key_{i:03}" for i in range(20)]
    case_id, others = "mean_gradients.mean/w2", {"alone": "x", "laws": 2}
    one, two, shuffled = (f"[{', '.join(items)}]" for items in (shared, [*shared, "new_key"], shared[::-1]))
    before = changed(old, case_id, facts={**others, "keys": one})
    added = "\n".join(diff.report(diff.compare(before, changed(old, case_id, facts={**others, "keys": two}))))
    assert "[...]" in added
    assert "[..., new_key]" in added
    moved = "\n".join(diff.report(diff.compare(before, changed(old, case_id, facts={**others, "keys": shuffled}))))
    assert one in moved
    assert shuffled in moved


def test_an_unknown_release_is_one_clear_line(capsys):
    assert diff.main(["0.1", "2.13.0"]) == 2
    assert capsys.readouterr().err.startswith("ci.diff: 0.1: neither a record nor a release on file")


def test_the_page_tells_measured_from_never_measured(old, tmp_path):
    partial = replace(old, cases=[line for line in old.cases if not line["id"].startswith("mean_gradients.")])
    known = table.build([partial])
    assert table.verdict(row.cells[0] for row in known.claims["mean_gradients.mean"]) == "unmeasured"
    assert table.verdict(row.cells[0] for row in known.claims["trajectory.one_process"]) == "holds"
    report.write(known, tmp_path / "site")
    page = (tmp_path / "site" / "claim" / "mean_gradients-mean.html").read_text()
    assert "expected, never measured" in page
    plain = json.loads((tmp_path / "site" / "matrix.json").read_text())
    assert {column["torch"] for column in plain["columns"]} == {"2.13.0"}
    assert len(plain["claims"]) == len(known.claims)


def test_a_truncated_record_makes_no_page(tmp_path, capsys):
    cut = tmp_path / "cut.jsonl"
    cut.write_bytes(b'{"line": "run", "format": 1}\n')
    assert report.main([str(cut), "-o", str(tmp_path / "site")]) == 2
    assert "cut.jsonl" in capsys.readouterr().err
    assert not (tmp_path / "site").exists()
