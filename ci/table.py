"""Records side by side: every case on every release and lane, measured, extrapolated or never seen."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from ddp_conformance import golden
from ddp_conformance.case import Case, Facet, program_hash
from ddp_conformance.record import Record
from ddp_conformance.subject import DEFAULT
from ddp_conformance.suite import golden_path

from ci.cases import all_cases

SEVERITY = ("holds", "not offered", "no data", "unmeasured", "known", "changed", "violated")
"""What a claim shows when its cases differ: the verdict that stands last here."""


@dataclass(frozen=True, order=True)
class Column:
    """One release of torch on one lane."""

    release: golden.Release
    lane: str
    torch: str = field(compare=False)
    build: str = field(compare=False, default="")


@dataclass
class Cell:
    """
    One case in one column.

    verdict    as measured, or "unmeasured"
    facts      as measured; for an unmeasured cell what golden expects there, which is extrapolation
    older      measured on an older version of the case
    """

    verdict: str
    facts: dict[str, Any]
    why: str = ""
    older: bool = False

    @property
    def measured(self) -> bool:
        return self.verdict != "unmeasured"


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

    def verdict(self, claim: str, column: int) -> str:
        """The claim's verdict in a column: the most serious one of its cases."""
        verdicts = {row.cells[column].verdict for row in self.claims[claim]}
        if "holds" in verdicts:  # some facets may need more devices, or an option that this release lacks
            verdicts -= {"no data", "not offered", "unmeasured"}
        return max(verdicts, key=SEVERITY.index)

    def changes(self, claim: str, column: int) -> bool:
        """Whether the claim's facts differ from those in the measured column of the same lane before it."""
        lane = self.columns[column].lane
        for row in self.claims[claim]:
            now = row.cells[column]
            earlier = [
                row.cells[index]
                for index in range(column)
                if self.columns[index].lane == lane and row.cells[index].verdict in ("holds", "known", "changed")
            ]
            if (
                earlier
                and now.measured
                and now.verdict in ("holds", "known", "changed")
                and earlier[-1].facts != now.facts
            ):
                return True
        return False

    def plain(self) -> dict[str, Any]:
        """Everything, for `matrix.json`."""
        return {
            "format": 1,
            "columns": [{"torch": column.torch, "lane": column.lane, "build": column.build} for column in self.columns],
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
                        {"id": row.id, "world": row.facet.world, "cells": [asdict(cell) for cell in row.cells]}
                        for row in rows
                    ],
                }
                for claim, rows in self.claims.items()
            ],
        }


def build(records: Iterable[Record]) -> Table:
    """Merge records of the default subject; where a case was measured twice in a column, the current program wins."""
    lines: dict[tuple[Column, str], dict[str, Any]] = {}
    programs = {case.id(facet): program_hash(case, facet) for case in all_cases() for facet in case.facets()}
    columns: set[Column] = set()
    for record in records:
        if record.run["subject"] != DEFAULT:
            continue
        torch = str(record.run["torch"]).partition("+")[0]
        for lane in record.run["lanes"]:
            columns.add(Column(golden.release(torch), lane, torch, str(record.run.get("build", ""))))
        for line in record.cases:
            column = Column(golden.release(torch), line["lane"], torch)
            known = lines.get((column, line["id"]))
            if known is None or line["program"] == programs.get(line["id"]):
                lines[column, line["id"]] = line
    ordered = sorted(columns)
    claims: dict[str, list[Row]] = {}
    for case in all_cases():
        for facet in case.facets():
            case_id = case.id(facet)
            cells = [_cell(case, facet, column, lines.get((column, case_id)), programs[case_id]) for column in ordered]
            claims.setdefault(case.claim, []).append(Row(case, facet, case_id, cells))
    return Table(ordered, claims)


def spans(cells: Sequence[Cell], fact: str) -> list[tuple[int, int, Any]]:
    """Consecutive columns in which a fact has one value: first, last, value. Columns without data break nothing."""
    found: list[tuple[int, int, Any]] = []
    for index, cell in enumerate(cells):
        if cell.verdict in ("no data", "not offered"):
            continue
        value = cell.facts.get(fact)
        if found and found[-1][2] == value and cells[found[-1][1]].measured == cell.measured:
            found[-1] = (found[-1][0], index, value)
        else:
            found.append((index, index, value))
    return found


def _cell(case: Case, facet: Facet, column: Column, line: dict[str, Any] | None, program: str) -> Cell:
    if line is not None:
        return Cell(line["verdict"], line["facts"], line["why"], line["program"] != program)
    name = case.id(facet).partition(".")[2]
    expected = golden.expected(golden.load(golden_path(case)), name, column.lane, column.torch)
    return Cell("unmeasured", {fact: value for fact, (value, _) in expected.facts.items()})
