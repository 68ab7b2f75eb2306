"""What cases did through the releases: each fact's values, what people wrote beside them, and what every release changed."""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from ddp_conformance import golden
from ddp_conformance.case import HAZARD, MUST, OBSERVED
from ddp_conformance.suite import golden_path

from ci.table import BROKEN, CHANGES, Cell, Column, Row, Table, golden_tables, spans

LEVELS = (MUST, HAZARD, OBSERVED)


@dataclass(frozen=True)
class Span:
    """A fact with one value on consecutive releases of a lane: as measured, or as golden expects."""

    fact: str
    lane: str
    releases: str
    values: list[Any]
    by_rank: bool
    measured: bool


@dataclass(frozen=True)
class Note:
    """What a person wrote beside a case's golden facts: a note or a `broken` entry."""

    kind: str
    since: str
    text: str
    link: str
    until: str = ""


@dataclass(frozen=True)
class Change:
    """Cases of one claim that differ in the same way from the release before."""

    kind: str
    claim: str
    cases: list[str]
    since: str
    facts: list[tuple[str, list[str], list[str]]]
    why: str
    notes: list[Note]
    older: bool


@dataclass(frozen=True)
class Step:
    """What one column changes against the one before it on its lane, by kind of change and then by claim."""

    column: Column
    before: str
    changes: dict[str, dict[str, list[Change]]] = field(default_factory=dict)


def values(row: Row, known: Table) -> list[Span]:
    """Each fact's values through the releases, lane by lane."""
    told = []
    for lane in dict.fromkeys(column.lane for column in known.columns):
        indices = [index for index, column in enumerate(known.columns) if column.lane == lane]
        cells = [row.cells[index] for index in indices]
        for fact in dict.fromkeys(name for cell in cells for name in cell.facts):
            for first, last, value in spans(cells, fact):
                ends = list(dict.fromkeys(known.columns[indices[index]].torch for index in (first, last)))
                by_rank = isinstance(value, list)
                shown = value if by_rank else [value]
                told.append(Span(fact, lane, " to ".join(ends), shown, by_rank, cells[first].measured))
    return told


def notes(row: Row) -> list[Note]:
    entry = golden_tables(golden_path(row.case)).get(row.id.partition(".")[2], {})
    told = [Note("note", note["since"], note["text"], note.get("link", "")) for note in entry.get("note", [])]
    for broken in entry.get("broken", []):
        what = f"law “{broken['law']}” is broken" if "law" in broken else f"ends by {broken['outcome']}"
        until = broken.get("until", "")
        text = f"{what}{f' until {until}' if until else ''}. {broken.get('note', '')}".strip()
        told.append(Note("broken", broken["since"], text, broken.get("link", ""), until))
    return told


def steps(known: Table) -> list[Step]:
    """What each column changes, the newest first; the first of each lane, and those without data, change nothing."""
    found = []
    for index, column in enumerate(known.columns):
        before = [other.torch for other in known.columns[:index] if other.lane == column.lane]
        if before and not column.absent:
            found.append(Step(column, before[-1], _changes(known, index)))
    return found[::-1]


def _changes(known: Table, index: int) -> dict[str, dict[str, list[Change]]]:
    by_kind: dict[str, dict[str, list[Change]]] = {kind: {} for kind in CHANGES}
    for claim, rows in sorted(known.claims.items(), key=lambda item: LEVELS.index(item[1][0].case.level)):
        alike: dict[str, list[Change]] = defaultdict(list)
        for row in rows:
            cell = row.cells[index]
            if not cell.change:
                continue
            change = _told(row, known, index)
            same = next((other for other in alike[cell.change] if _like(other) == _like(change)), None)
            if same:
                same.cases.append(row.id)
            else:
                alike[cell.change].append(change)
        for kind, changes in alike.items():
            by_kind[kind][claim] = changes
    return {kind: claims for kind, claims in by_kind.items() if claims}


def _told(row: Row, known: Table, index: int) -> Change:
    new = row.cells[index]
    old = _before(row, known, index)
    lacking, breaking = new.change in ("offered", "gone"), new.change in ("breaks", "mended")
    facts = [
        (name, _lines(old.facts.get(name)), _lines(new.facts.get(name)))
        for name in {**old.facts, **new.facts}
        if not lacking
        and old.facts.get(name) != new.facts.get(name)
        and not (breaking and (name in ("laws", "outcome") or name not in old.facts or name not in new.facts))
    ]
    side = old if new.change == "offered" or (breaking and old.verdict in BROKEN) else new
    low, high = golden.release(new.since), golden.release(known.columns[index].torch)
    between = [note for note in notes(row) if any(low < golden.release(end) <= high for end in _ends(note))]
    told = any(note.kind == "broken" for note in between)
    why = side.why.splitlines()[0] if (lacking or (breaking and not told)) and side.why else ""
    return Change(new.change, row.case.claim, [row.id], new.since, facts, why, between, old.older or new.older)


def _before(row: Row, known: Table, index: int) -> Cell:
    """The cell that this one was compared with."""
    column = known.columns[index]
    return next(
        row.cells[at]
        for at in range(index - 1, -1, -1)
        if known.columns[at].lane == column.lane and known.columns[at].torch == row.cells[index].since
    )


def _like(change: Change) -> tuple[Any, ...]:
    return change.since, change.facts, change.why, change.notes, change.older


def _ends(note: Note) -> Iterator[str]:
    yield note.since
    if note.until:
        yield note.until


def _lines(value: Any) -> list[str]:
    if value is None:
        return ["(not produced)"]
    return [f"rank {rank}: {item}" for rank, item in enumerate(value)] if isinstance(value, list) else [str(value)]
