"""Records side by side: every case on every release and lane, measured, extrapolated or never seen."""

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from ddp_conformance import golden
from ddp_conformance.case import Case, Facet, program_hash
from ddp_conformance.record import Record, RecordError
from ddp_conformance.subject import DEFAULT
from ddp_conformance.suite import golden_path
from packaging.version import InvalidVersion

from ci import diff
from ci.cases import all_cases

SEVERITY = ("holds", "not offered", "no data", "unmeasured", "known", "changed", "violated")
"""What a claim shows when its cases differ: the verdict that stands last here."""
CHANGES = {
    "breaks": "no longer conforms",
    "mended": "conforms again",
    "changed": "behaves differently",
    "gone": "is no longer offered",
    "offered": "is newly offered",
}
"""How a case can differ from the release before; a claim shows what stands first here."""
BROKEN = ("known", "violated")
SILENT = ("no data", "unmeasured")


@dataclass(frozen=True, order=True)
class Column:
    """One release of torch on one lane; `absent` says why nothing was measured, on a lane that is then not known ("")."""

    release: golden.Release
    lane: str
    torch: str = field(compare=False)
    build: str = field(compare=False, default="")
    absent: str = field(compare=False, default="")

    @property
    def name(self) -> str:
        return f"{self.torch} {self.lane}".strip()


@dataclass
class Cell:
    """
    One case in one column.

    verdict    as measured, or "unmeasured"
    facts      as measured; for an unmeasured cell what golden expects there, which is extrapolation
    older      measured on an older version of the case
    change     how it differs from the column before that says something of the case on the same lane, "" if it does not
    since      that column's release
    """

    verdict: str
    facts: dict[str, Any]
    why: str = ""
    older: bool = False
    change: str = ""
    since: str = ""

    @property
    def measured(self) -> bool:
        return self.verdict not in SILENT


@dataclass
class Row:
    """One case through all columns."""

    case: Case
    facet: Facet
    id: str
    cells: list[Cell]


@dataclass
class Table:
    """All rows by claim, in the order of the suite."""

    columns: list[Column]
    claims: dict[str, list[Row]]

    def plain(self) -> dict[str, Any]:
        """Everything, for `matrix.json`."""
        return {
            "format": 1,
            "columns": [
                {"torch": column.torch, "lane": column.lane, "build": column.build, "absent": column.absent}
                for column in self.columns
            ],
            "claims": [
                {
                    "claim": claim,
                    "family": rows[0].case.family,
                    "level": rows[0].case.level,
                    "sentence": rows[0].case.sentence,
                    "source": rows[0].case.source,
                    "reports": sorted({report for row in rows for report in row.case.reports}),
                    "torch_tests": sorted({test for row in rows for test in row.case.torch_tests}),
                    "cases": [
                        {
                            "id": row.id,
                            "world": row.facet.world,
                            "cells": [{**vars(cell), "measured": cell.measured} for cell in row.cells],
                        }
                        for row in rows
                    ],
                }
                for claim, rows in self.claims.items()
            ],
        }


def verdict(cells: Iterable[Cell]) -> str:
    """The verdict of a claim, or of some of its cases, in one column: the most serious one."""
    verdicts = {cell.verdict for cell in cells}
    if "holds" in verdicts:  # some facets may need more devices, or an option that this release lacks
        verdicts -= {"no data", "not offered", "unmeasured"}
    return max(verdicts, key=SEVERITY.index)


def change(cells: Iterable[Cell]) -> str:
    """How a claim differs from the column before: the most serious change of its cases, "" for none."""
    found = {cell.change for cell in cells}
    return next((kind for kind in CHANGES if kind in found), "")


def build(records: Iterable[Record], absent: Mapping[str, str] | None = None) -> Table:
    """
    Merge records of the default subject; where a case was measured twice in a column, the line that tells more stands:
    one of the current program, then one that judges, then the more serious one.

    absent   release, or another name of a build -> why there is no record of it: a column that shows no data
    """
    lines: dict[tuple[Column, str], dict[str, Any]] = {}
    programs = {case.id(facet): program_hash(case, facet) for case in all_cases() for facet in case.facets()}
    columns = {Column(_place(name), "", name, absent=why) for name, why in (absent or {}).items()}

    def tells(line: Mapping[str, Any]) -> tuple[bool, bool, int]:
        verdict = line["verdict"]
        return line["program"] == programs.get(line["id"]), verdict not in SILENT, SEVERITY.index(verdict)

    for record in records:
        if record.run["subject"] != DEFAULT:
            raise RecordError(f"{record.path}: it is of {record.run['subject']}, and the page shows {DEFAULT}")
        torch = str(record.run["torch"]).partition("+")[0]
        own = [
            Column(golden.release(torch), lane, torch, str(record.run.get("build", ""))) for lane in record.run["lanes"]
        ]
        columns.update(own)
        for line in record.cases:
            # A case that admits no lane of the run has one line for all of them.
            for column in [column for column in own if column.lane == line["lane"]] or own:
                known = lines.get((column, line["id"]))
                if known is None or tells(line) > tells(known):
                    lines[column, line["id"]] = line
    ordered = sorted(columns)
    claims: dict[str, list[Row]] = {}
    for case in all_cases():
        for facet in case.facets():
            case_id = case.id(facet)
            cells = [_cell(case, facet, column, lines.get((column, case_id)), programs[case_id]) for column in ordered]
            _compare(ordered, cells)
            claims.setdefault(case.claim, []).append(Row(case, facet, case_id, cells))
    return Table(ordered, claims)


@cache
def golden_tables(path: Path) -> dict[str, Any]:
    """A golden file, read once: it is asked for every case and release."""
    return golden.load(path)


def spans(cells: Sequence[Cell], fact: str) -> list[tuple[int, int, Any]]:
    """
    Neighbouring columns in which a fact has one value, all measured or all expected: first, last, value.

    None is a fact that a case did not produce. A column that has no data, or does not offer the case, ends a span: what
    lies behind it was not seen to be the same all the way.
    """
    found: list[tuple[int, int, Any]] = []
    for index, cell in enumerate(cells):
        if cell.verdict in ("no data", "not offered") or not (cell.measured or fact in cell.facts):
            continue
        value = cell.facts.get(fact)
        first, last, before = found[-1] if found else (0, -2, None)
        if last == index - 1 and before == value and cells[last].measured == cell.measured:
            found[-1] = (first, index, value)
        else:
            found.append((index, index, value))
    return found


def _place(name: str) -> golden.Release:
    """Where a column stands: what is no release, as a nightly build that could not be had, is newer than all."""
    try:
        return golden.release(name)
    except InvalidVersion:
        return (sys.maxsize,)


def _cell(case: Case, facet: Facet, column: Column, line: dict[str, Any] | None, program: str) -> Cell:
    if column.absent:
        return Cell("no data", {}, column.absent)
    if line is not None:
        return Cell(line["verdict"], line["facts"], line["why"], line["program"] != program)
    name = case.id(facet).partition(".")[2]
    expected = golden.expected(golden_tables(golden_path(case)), name, column.lane, column.torch)
    return Cell("unmeasured", {fact: value for fact, (value, _) in expected.facts.items()})


def _compare(columns: Sequence[Column], cells: Sequence[Cell]) -> None:
    """Note in each cell how it differs from the one before it on its lane; what was not measured is passed over."""
    before: dict[str, tuple[Column, Cell]] = {}
    for column, cell in zip(columns, cells, strict=True):
        if cell.verdict in SILENT:
            continue
        if column.lane in before:
            earlier, old = before[column.lane]
            cell.change = _change(old, cell)
            cell.since = earlier.torch if cell.change else ""
        before[column.lane] = column, cell


def _change(old: Cell, new: Cell) -> str:
    lacking = [cell.verdict == "not offered" for cell in (old, new)]
    if any(lacking):
        return "" if all(lacking) else "offered" if lacking[0] else "gone"
    before, after = (diff.badness(cell.verdict) for cell in (old, new))
    if before != after:
        return "breaks" if before < after else "mended"
    return "changed" if old.facts != new.facts else ""
