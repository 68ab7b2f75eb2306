"""
What changes in DDP between two releases of torch, claim by claim.

    python -m ci.diff 2.2.2 2.15.0               from the records kept with the suite
    python -m ci.diff A.jsonl B.jsonl            from two records, for builds that are no release
    python -m ci.diff 2.2.2 2.15.0 --json        for a program

A fact that changed, a law that broke or was mended, what is newly offered and what is no longer. What was not measured
on both sides is named as such, and is not called unchanged.
"""

import argparse
import json
import re
import signal
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ddp_conformance import golden, record
from ddp_conformance.case import HAZARD, MUST, OBSERVED, Case, program_hash
from ddp_conformance.record import Record, RecordError
from ddp_conformance.suite import golden_path

from ci.cases import ROOT, all_cases

RECORDS = ROOT / "conformance" / "records"
KINDS = {
    "breaks": "no longer conform",
    "mended": "conform again",
    "changed": "behave differently",
    "offered": "are newly offered",
    "gone": "are no longer offered",
}
ORDER = {MUST: 0, HAZARD: 1, OBSERVED: 2}


@dataclass
class Change:
    """One case that is not the same on both sides."""

    kind: str
    id: str
    claim: str
    level: str
    sentence: str
    lane: str
    facts: dict[str, dict[str, Any]] = field(default_factory=dict)
    why: dict[str, str] = field(default_factory=dict)
    since: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    older: bool = False


@dataclass
class Difference:
    """All changes between two records, and how much stayed the same or was measured on one side only."""

    old: str
    new: str
    changes: list[Change]
    same: int
    one_sided: list[str]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m ci.diff", description="What changes in DDP between two releases.")
    parser.add_argument("old", help="a release whose record is kept with the suite, or a record's path")
    parser.add_argument("new", help="the same for the other side")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args(arguments)
    try:
        old, new = find(options.old), find(options.new)
        if old.run["subject"] != new.run["subject"]:
            raise RecordError(f"{old.path} is of {old.run['subject']}, {new.path} of {new.run['subject']}")
        difference = compare(old, new)
    except (RecordError, golden.GoldenError) as error:
        print(f"ci.diff: {error}", file=sys.stderr)
        return 2
    if options.json:
        print(json.dumps(asdict(difference), indent=2))
    else:
        print("\n".join(report(difference)))
    return 0


def find(name: str) -> Record:
    """The record of a release, or the one in a file."""
    for path in (Path(name), RECORDS / f"{name}.jsonl.gz"):
        with suppress(OSError):  # a name too long to be one
            if path.exists():
                return record.read(path)
    have = " ".join(sorted((path.name.removesuffix(".jsonl.gz") for path in RECORDS.glob("*.gz")), key=golden.release))
    raise RecordError(f"{name}: neither a record nor a release on file; on file are {have or 'none'}")


def compare(old: Record, new: Record) -> Difference:
    """Case by case and lane by lane, in the order that matters to whoever must upgrade."""
    cases = {case.id(facet): (case, facet) for case in all_cases() for facet in case.facets()}
    before = {(line["id"], line["lane"]): line for line in old.cases}
    after = {(line["id"], line["lane"]): line for line in new.cases}
    changes, same = [], 0
    one_sided = [f"{case_id} [{lane}]" for case_id, lane in sorted(before.keys() ^ after.keys())]
    for key in sorted(before.keys() & after.keys()):
        if "no data" in (before[key]["verdict"], after[key]["verdict"]):
            if before[key]["verdict"] != after[key]["verdict"]:
                one_sided.append(f"{key[0]} [{key[1]}]")
            continue
        kind = _kind(before[key], after[key])
        if kind is None:
            same += 1
            continue
        case_id, lane = key
        case, facet = cases.get(case_id, (None, None))
        change = Change(
            kind,
            case_id,
            case.claim if case else case_id.partition("/")[0],
            after[key]["level"],
            case.sentence if case else "(a case that the suite no longer has)",
            lane,
        )
        for name in _differing(before[key], after[key]):
            sides = before[key]["facts"].get(name), after[key]["facts"].get(name)
            change.facts[name] = {"old": sides[0], "new": sides[1]}
        sides_told = (("old", before[key]), ("new", after[key]))
        change.why = {side: line["why"] for side, line in sides_told if line["why"] and line["verdict"] != "changed"}
        if case and facet:
            _explain(change, case, case_id, lane, str(old.run["torch"]), str(new.run["torch"]))
            change.older = {before[key]["program"], after[key]["program"]} != {program_hash(case, facet)}
        changes.append(change)
    changes.sort(key=lambda change: (list(KINDS).index(change.kind), ORDER.get(change.level, 3), change.id))
    return Difference(str(old.run["torch"]), str(new.run["torch"]), changes, same, one_sided)


def report(difference: Difference) -> Iterator[str]:
    """The upgrade report, for a person."""
    by_kind: dict[str, list[Change]] = defaultdict(list)
    for change in difference.changes:
        by_kind[change.kind].append(change)
    yield f"DistributedDataParallel from torch {difference.old} to {difference.new}"
    yield ""
    for kind, meaning in KINDS.items():
        yield f"  {len({change.claim for change in by_kind[kind]}):4} claims {meaning}"
    yield f"  {difference.same:4} cases the same"
    if difference.one_sided:
        yield (
            f"  {len(difference.one_sided):4} cases measured on one side only: {', '.join(difference.one_sided[:5])}"
            + (" ..." if len(difference.one_sided) > 5 else "")
        )
    for kind, meaning in KINDS.items():
        if not by_kind[kind]:
            continue
        yield f"\nClaims that {meaning}\n{'-' * (len(meaning) + 12)}"
        claims_seen: dict[str, list[Change]] = {}
        for change in by_kind[kind]:
            claims_seen.setdefault(change.claim, []).append(change)
        for claim, changes in claims_seen.items():
            yield f"\n{claim}  ({changes[0].level})"
            yield f"  {changes[0].sentence}"
            told: dict[tuple[str, ...], list[Change]] = {}
            for change in changes:
                told.setdefault(tuple(_lines(change, difference)), []).append(change)
            for lines, alike in told.items():
                if where := ", ".join(filter(None, map(_where, alike))):
                    yield f"  {where}"
                yield from lines


def _where(change: Change) -> str:
    """Facet and lane, where they are not the only or the ordinary one."""
    facet = change.id.partition("/")[2]
    return " ".join(filter(None, (f"/{facet}" if facet else "", f"[{change.lane}]" * (change.lane != "gloo:cpu"))))


def _lines(change: Change, difference: Difference) -> Iterator[str]:
    width = max(len(difference.old), len(difference.new))
    mended = change.kind in ("breaks", "mended")
    if change.kind in ("offered", "gone"):
        lacking = "old" if change.kind == "offered" else "new"
        yield f"    {getattr(difference, lacking)}: {change.why.get(lacking)}"
    for name, sides in change.facts.items():
        if change.kind in ("offered", "gone") or (mended and (name in ("laws", "outcome") or None in sides.values())):
            continue
        yield f"    {name}" + (f" (since {change.since[name]})" if name in change.since else "")
        for side, other in (("old", "new"), ("new", "old")):
            label = getattr(difference, side)
            for line in _value(_without_common(sides[side], sides[other])):
                yield f"      {label:{width}}  {line}"
    for side, label in (("old", difference.old), ("new", difference.new)):
        if (mended or not change.facts) and change.kind not in ("offered", "gone") and change.why.get(side):
            yield f"    {label}: {change.why[side].splitlines()[0]}"
    for note in change.notes:
        yield f"    note: {note}"
    if change.older:
        yield "    (measured on an older version of this case)"


def _without_common(value: Any, other: Any) -> Any:
    """A long list without what the other has in the same order, too."""
    items, others = _items(value), _items(other)
    common = [item for item in items if item in others]
    if not common or len(value) < 120 or common != [item for item in others if item in items]:
        return value
    return f"[{', '.join(['...', *(item for item in items if item not in others)])}]"


def _items(value: Any) -> list[str]:
    """The items of a fact that is one flat list, which facts write as `[a, b]`."""
    flat = isinstance(value, str) and re.fullmatch(r"\[[^][{}()]*\]", value)
    return value[1:-1].split(", ") if flat else []


def _value(value: Any) -> list[str]:
    if value is None:
        return ["(not produced)"]
    if isinstance(value, list):
        return [f"rank {rank}: {item}" for rank, item in enumerate(value)]
    return [str(value)]


def _kind(old: Mapping[str, Any], new: Mapping[str, Any]) -> str | None:
    if old["verdict"] == "not offered" or new["verdict"] == "not offered":
        if old["verdict"] == new["verdict"]:
            return None
        return "offered" if old["verdict"] == "not offered" else "gone"
    before, after = badness(old["verdict"]), badness(new["verdict"])
    if before != after:
        return "breaks" if before < after else "mended"
    return "changed" if _differing(old, new) or record.broken_laws(old) != record.broken_laws(new) else None


def badness(verdict: str) -> int:
    """How far a verdict is from conforming: what goes from known to violated breaks, too."""
    return {"known": 1, "violated": 2}.get(verdict, 0)


def _differing(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    return [name for name in {**old["facts"], **new["facts"]} if old["facts"].get(name) != new["facts"].get(name)]


def _explain(change: Change, case: Case, case_id: str, lane: str, old: str, new: str) -> None:
    """Since when, and the notes that a person wrote for releases between the two."""
    tables = golden.load(golden_path(case))
    name = case_id.partition(".")[2]
    expected = golden.expected(tables, name, lane, new)
    change.since = {fact: expected.facts[fact][1] for fact in change.facts if expected.facts.get(fact, ("", ""))[1]}
    low, high = sorted((golden.release(old), golden.release(new)))
    for note in tables.get(name, {}).get("note", []):
        if low < golden.release(note["since"]) <= high:
            change.notes.append(" ".join(filter(None, (f"since {note['since']}: {note['text']}", note.get("link")))))


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # a reader that has enough, such as head, ends this quietly
    sys.exit(main())
