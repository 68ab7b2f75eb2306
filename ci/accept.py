"""
Fold records into the golden files: the fewest entries that reproduce every observation, whatever the records' order.

    python -m ci.accept RECORD...            write
    python -m ci.accept --keep RECORD...     write, and keep the records themselves for pages and upgrade reports
    python -m ci.accept --check RECORD...    judge the records by the golden files, write nothing

Runs only observe; this is the one place that writes what is expected, and a person reads the diff. Violated cases are
left out, `broken` and `note` entries and comments are kept, and nothing is ever removed because a record lacks it.
"""

import argparse
import os
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import tomlkit
from ddp_conformance import golden, record
from ddp_conformance.golden import SHARED_LANE, Release
from ddp_conformance.subject import DEFAULT
from packaging.version import Version

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "conformance" / "golden"
RECORDS = ROOT / "conformance" / "records"
JUDGED = ("holds", "changed", "known")
LACKING = {"offered": "no"}
"""All the facts of a case that is not offered where golden said it was."""

Points = dict[Release, Any]
"""The value of one fact on one lane, at every release where it was measured; False where it was not produced."""


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m ci.accept", description=__doc__.strip().splitlines()[0])
    parser.add_argument("records", nargs="+", type=Path, metavar="RECORD")
    parser.add_argument("--check", action="store_true", help="judge the records by the golden files, write nothing")
    parser.add_argument("--keep", action="store_true", help=f"keep the records in {RECORDS.relative_to(ROOT)}, too")
    parser.add_argument("--golden", type=Path, default=FOLDER, metavar="DIR", help="the folder of golden files")
    options = parser.parse_args(arguments)
    try:
        if not options.check and os.environ.get("CI"):
            raise record.RecordError("CI is set: what is expected is accepted by a person, not by a workflow")
        records = [record.read(path) for path in options.records]
        if foreign := [str(each.path) for each in records if each.run["subject"] != DEFAULT]:
            raise record.RecordError(f"{', '.join(foreign)}: golden files are about {DEFAULT} only")
        if empty := [str(each.path) for each in records if not each.cases]:
            raise record.RecordError(f"{', '.join(empty)}: no case was run; run the suite again with --record")
        if options.check:
            return check(records, options.golden)
        if options.keep and (partial := [str(each.path) for each in records if not each.whole_suite]):
            raise record.RecordError(f"{', '.join(partial)}: only records of the whole suite are kept")
        for each in records if options.keep else []:
            record.place(each, RECORDS)
            if lacking := sorted(case_ids(options.golden) - {line["id"] for line in each.cases}):
                raise record.RecordError(
                    f"{each.path}: it lacks {len(lacking)} cases of the suite, such as {lacking[0]}"
                )
        accept(records, options.golden)
        for each in records if options.keep else []:
            print(f"kept: {record.keep(as_accepted(each, options.golden), RECORDS).relative_to(ROOT)}")
        return 0
    except (record.RecordError, golden.GoldenError) as error:
        print(f"ci.accept: {error}", file=sys.stderr)
        return 2


def case_ids(folder: Path) -> set[str]:
    """Every case that the golden files know."""
    return {
        f"{path.stem}.{name}"
        for path in folder.glob("*.toml")
        for name in golden.load(path)
        if path.name != "observed.toml"
    }


def accept(records: list[record.Record], folder: Path) -> None:
    """Write what the records add; says what it changed and what it left out."""
    families: dict[str, dict[str, list[tuple[record.Record, dict[str, Any]]]]] = defaultdict(lambda: defaultdict(list))
    for each in records:
        for line in each.cases:
            family, _, name = line["id"].partition(".")
            if line["verdict"] == "violated":
                print(f"left out: {line['id']} [{line['lane']}] on {each.run['torch']} is violated")
            elif line["verdict"] in (*JUDGED, "not offered"):
                families[family][name].append((each, line))
    measured = read_observed(folder)
    for family in families:
        golden.load(folder / f"{family}.toml")  # a broken file is refused before anything is written
    if folder.exists() and not folder.is_dir():
        raise golden.GoldenError(f"{folder}: not a folder")
    folder.mkdir(parents=True, exist_ok=True)
    for family, cases in sorted(families.items()):
        path = folder / f"{family}.toml"
        before = path.read_text(encoding="utf-8") if path.exists() else ""
        document = tomlkit.parse(before)
        for name in sorted(cases, key=lambda name: cases[name][0][1]["test"]):
            _fold(document, name, cases[name], measured)
        after = tomlkit.dumps(document)
        if after != before:
            _write(path, after)
            print(f"changed: {path.name}")
    _write_observed(folder, records)


def check(records: list[record.Record], folder: Path) -> int:
    """Print every case line that the golden files do not expect; 1 if there is one."""
    wrong = 0
    for each, line, known in _with_expected(records, folder):
        if why := unexpected(line, known):
            wrong += 1
            print(f"{line['id']} [{line['lane']}] on {each.run['torch']}: {why}")
    print(f"{sum(len(each.cases) for each in records)} case lines, {wrong} not as expected")
    return 1 if wrong else 0


def is_lacking(line: Mapping[str, Any]) -> bool:
    """Whether the case was not offered: the record says so, or "changed" with this one fact, where golden said it was."""
    return bool(line["verdict"] == "not offered" or line["facts"] == LACKING)


def unexpected(line: Mapping[str, Any], known: golden.Expected) -> str:
    """How a case line is not as the golden files say, or ""."""
    if line["verdict"] == "violated":
        return "violated"
    if line["verdict"] == "no data":
        return str(line["why"]).splitlines()[0] if record.needs_a_person(line) else ""
    if is_lacking(line):
        return "golden says it is offered" if known.offered else ""
    wanted = {key: value for key, (value, _) in known.facts.items() if (key, value) != ("outcome", "returned")}
    facts = line["facts"]
    if wrongs := sorted(key for key in wanted.keys() | facts.keys() if wanted.get(key) != facts.get(key)):
        family, _, name = line["id"].partition(".")
        return f'differs in {", ".join(wrongs)} from {family}.toml ["{name}"]'
    if not known.offered:
        return "golden says it is not offered"
    if line["verdict"] == "known" and not known.broken:
        return "known, and golden says nothing of what breaks"
    if new := record.broken_laws(line) - {broken.law for broken in known.broken}:
        return f"law {min(new)!r} is broken, of which golden says nothing"
    if known.broken and line["verdict"] != "known" and not record.broken_laws(line) and "outcome" not in facts:
        return f"holds, and golden says that {known.broken[0].what} breaks"
    return ""


def as_accepted(each: record.Record, folder: Path) -> record.Record:
    """The record with the verdicts that the golden files give it now: what was "changed" may be accepted since."""
    cases = []
    for _, line, known in _with_expected([each], folder):
        if line["verdict"] != "changed" or unexpected(line, known):
            cases.append(line)
        elif line["facts"] == LACKING:
            cases.append({**line, "verdict": "not offered", "facts": {}, "why": line["why"].partition("\n")[0]})
        else:
            why = "; ".join(f"{broken.what}: {broken.reference}" for broken in known.broken)
            cases.append({**line, "verdict": "known" if why else "holds", "why": why})
    return replace(each, cases=cases)


def _with_expected(
    records: list[record.Record], folder: Path
) -> Iterator[tuple[record.Record, dict[str, Any], golden.Expected]]:
    """Every case line with what the golden files expect of it."""
    load = cache(golden.load)
    for each in records:
        for line in each.cases:
            family, _, name = line["id"].partition(".")
            tables = load(folder / f"{family}.toml")
            yield each, line, golden.expected(tables, name, line["lane"], each.run["torch"])


def read_observed(folder: Path) -> dict[str, set[Release]]:
    """Lane -> the releases on which it was measured in full."""
    path = folder / "observed.toml"
    if not path.exists():
        return {}
    try:
        tables = tomlkit.parse(path.read_text(encoding="utf-8")).unwrap()
        if not all(isinstance(builds, list) for versions in tables.values() for builds in dict(versions).values()):
            raise ValueError("the builds of a release are a list")
        return {lane: {golden.release(version) for version in versions} for lane, versions in tables.items()}
    except (TypeError, ValueError, tomlkit.exceptions.TOMLKitError) as error:
        raise golden.GoldenError(f"{path}: no table of releases by lane: {error}") from error


def _fold(
    document: Any,
    name: str,
    observed: list[tuple[record.Record, dict[str, Any]]],
    measured: Mapping[str, set[Release]],
) -> None:
    """
    Let one case's table reproduce what was observed of it and, where nothing new was, what it said of releases measured.

    All lanes are looked at, whichever were observed: a shared entry that changes would change what it says of others.
    """
    old = document.unwrap().get(name, {})
    named = {key for table in (old, *old.get("lane", {}).values()) for key in table} - {"broken", "note", "lane"}
    states: dict[str, dict[Release, dict[str, Any]]] = defaultdict(dict)  # lane -> release -> facts
    for lane, releases in measured.items() if named else ():
        states[lane] = {now: {fact: _says(_entry(old, lane, fact), fact, now) for fact in named} for now in releases}
    for each, line in observed:
        state = LACKING if is_lacking(line) else line["facts"]
        states[line["lane"]][golden.release(each.run["torch"])] = state
    facts = named | {fact for lane in states.values() for state in lane.values() for fact in state}
    for lane in sorted(states, key=lambda lane: (lane != SHARED_LANE, lane)):
        for fact in sorted(facts, key=lambda fact: (fact == "offered", fact == "laws", fact == "outcome", fact)):
            points = {
                now: state.get(fact, DEFAULTS.get(fact, False))
                for now, state in states[lane].items()
                if fact == "offered" or state.get("offered") != "no"
            }
            before = measured.get(lane, set())
            renewed = {golden.release(each.run["torch"]) for each, line in observed if line["lane"] == lane}
            _merge(document, name, lane, fact, points, again=bool(before) and renewed >= before)


def _merge(document: Any, name: str, lane: str, fact: str, points: Points, *, again: bool) -> None:
    """Write one fact's entry where it does not reproduce the points. `again`: all that was measured is measured anew."""
    old = document.unwrap().get(name, {})
    entry = _entry(old, lane, fact)
    if all(_says(entry, fact, now) == value for now, value in points.items()):
        return
    own = old.get(fact) if lane == SHARED_LANE else old.get("lane", {}).get(lane, {}).get(fact)
    if isinstance(own, dict) and not again:  # what was found out in partial runs, of minor versions not seen now
        seen = {_minor(now) for now in points}
        kept = {golden.release(key): value for key, value in own.items()}
        points = {**{now: value for now, value in kept.items() if _minor(now) not in seen}, **points}
    table = document.setdefault(name, tomlkit.table()) if lane == SHARED_LANE else _lane_table(document, name, lane)
    table[fact] = _toml(compress(points, DEFAULTS.get(fact, False)))


DEFAULTS = {"offered": "yes", "outcome": "returned"}
"""What is so where nothing is written; any other fact is then not produced."""


def _entry(table: Mapping[str, Any], lane: str, fact: str) -> Any:
    """What is written of a fact for a lane, as golden.expected reads it."""
    return table.get("lane", {}).get(lane, {}).get(fact, table.get(fact))


def _says(entry: Any, fact: str, now: Release) -> Any:
    found = None if entry is None else golden.in_force(entry, now)
    return DEFAULTS.get(fact, False) if found is None else found[0]


def compress(points: Mapping[Release, Any], default: Any = False) -> Any:
    """
    The shortest entry that reproduces the points: one plain value, or the releases at which the value changes.

    Releases are written as minor versions unless two patch releases of one minor differ. A leading default is left
    out: before the first release named, that is what is expected anyhow.
    """
    minors: dict[Release, set[str]] = defaultdict(set)
    for now, value in points.items():
        minors[_minor(now)].add(repr(value))
    entry: dict[str, Any] = {}
    last = default
    for now in sorted(points):
        if points[now] != last:
            last = points[now]
            whole = len(minors[_minor(now)]) == 1
            entry[".".join(map(str, _minor(now) if whole or len(now) < 2 else now))] = last
    first = min(points)
    if not entry:  # a lane's own word against the shared one
        return default or {".".join(map(str, _minor(first))): default}
    if len(entry) == 1 and points[first] != default:
        return points[first]
    return entry


def _minor(now: Release) -> Release:
    """The minor version of a release, which golden.release writes without trailing zeros."""
    return (*now, 0)[:2]


def _toml(entry: Any) -> Any:
    if isinstance(entry, dict):
        inline = tomlkit.inline_table()
        inline.update(entry)
        return inline
    return entry


def _lane_table(document: Any, name: str, lane: str) -> Any:
    table = document.setdefault(name, tomlkit.table())
    lanes = table.setdefault("lane", tomlkit.table(is_super_table=True))
    return lanes.setdefault(lane, tomlkit.table())


def _write_observed(folder: Path, records: Iterable[record.Record]) -> None:
    """Note what was measured in full: lane, release and builds. A partial run confirms nothing about the suite."""
    path = folder / "observed.toml"
    text = (
        path.read_text(encoding="utf-8") if path.exists() else "# Which releases and builds were measured, by lane.\n"
    )
    document = tomlkit.parse(text)
    for each in sorted(records, key=lambda each: sorted(each.run["lanes"])):
        if not each.whole_suite:
            print(f"{each.path.name}: a partial run, not noted in observed.toml")
            continue
        for lane in each.run["lanes"]:
            table = document.setdefault(lane, tomlkit.table())
            release = str(Version(each.run["torch"]).base_version)
            builds = sorted({*table.get(release, []), each.run["build"]})
            table[release] = builds
    for lane in document:
        ordered = sorted(document[lane].unwrap().items(), key=lambda item: Version(item[0]))
        for release, _ in ordered:
            document[lane].remove(release)
        for release, builds in ordered:
            document[lane][release] = builds
    _write(path, tomlkit.dumps(document))


def _write(path: Path, text: str) -> None:
    """All or nothing: a reader never sees half a file."""
    temporary = path.with_suffix(".new")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)


if __name__ == "__main__":
    sys.exit(main())
