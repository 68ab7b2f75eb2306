"""
Write one issue's text for each version of torch on which DDP does not conform, from records.

    python -m ci.issues RECORD... -o issues/            from one run of many torches; files that end in .nodata are named
    python -m ci.issues RECORD... --builds nightlies/   with earlier nightly builds at hand; this run's are added to them

Writes issues/VERSION.md: the title on its first line, then what does not conform by claim, since which build, how to
reproduce it, and what changes from the release before. Nightly builds count as their release, so that the title is the same
every night and finds the issue again. Files nothing: `ci/file-issues issues/` does.
"""

import argparse
import re
import sys
import tomllib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddp_conformance import golden, record
from ddp_conformance.golden import SHARED_LANE
from ddp_conformance.record import Record, RecordError
from ddp_conformance.subject import DEFAULT
from packaging.version import Version

from ci import diff
from ci.cases import all_cases
from ci.matrix import VERSIONS, needed_beside, summary

BAD = ("violated", "changed")
GOOD = ("holds", "known", "not offered")
LIMIT = 60_000  # GitHub takes 65,536 characters
NIGHTS = 90


@dataclass(frozen=True)
class Finding:
    """A case that is not as expected, the first build of the unbroken row that is so, and the good one before it."""

    line: dict[str, Any]
    first: Record
    last_good: Record | None

    @property
    def claim(self) -> str:
        return str(self.line["id"]).partition("/")[0]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m ci.issues", description="Write the texts of issues from records.")
    parser.add_argument("records", nargs="+", type=Path, metavar="RECORD")
    parser.add_argument("-o", "--output", type=Path, default=Path("issues"), metavar="DIR")
    parser.add_argument("--builds", type=Path, metavar="DIR", help="records of earlier nightly builds")
    parser.add_argument("--run", default="", metavar="URL", help="where the run's records and page are")
    options = parser.parse_args(arguments)
    try:
        judged = [read(path) for path in options.records if path.suffix != ".nodata"]
        earlier = sorted(options.builds.glob("*.jsonl.gz")) if options.builds else []
        builds = at_hand([*sorted(diff.RECORDS.glob("*.jsonl.gz")), *earlier], judged)
        options.output.mkdir(parents=True, exist_ok=True)
        if any(options.output.iterdir()):
            raise RecordError(f"-o {options.output}: the folder is not empty: an old text would be filed again")
        if options.builds:
            keep(judged, options.builds)
        written = texts(judged, builds, options.run)
    except (RecordError, golden.GoldenError, OSError) as error:
        print(f"ci.issues: {error}", file=sys.stderr)
        return 2
    for path in options.records:
        if path.suffix == ".nodata":
            print(f"{path}: no data, so no issue")
    for version, text in written.items():
        path = options.output / f"{version}.md"
        path.write_text(text, encoding="utf-8")
        print(f"{path}: {title(version)}")
    print(f"{len(written)} versions of torch do not conform, of {len({release(found) for found in judged})}")
    return 0


def read(path: Path) -> Record:
    found = record.read(path)
    if found.run["subject"] != DEFAULT:
        raise RecordError(f"{path}: it is of {found.run['subject']}, and issues are about {DEFAULT}")
    return found


def at_hand(paths: Sequence[Path], judged: Sequence[Record]) -> list[Record]:
    """All builds from old to new, one record each: this run's where there are two."""
    builds = {age(build): build for build in [*map(read, paths), *judged]}
    return [builds[key] for key in sorted(builds)]


def keep(judged: Sequence[Record], folder: Path) -> None:
    """Add this run's nightly builds to those of the nights before, and let go of the oldest."""
    for build in judged:
        if Version(build.run["torch"]).is_devrelease:
            record.keep(build, folder)
    kept = sorted(folder.glob("*.jsonl.gz"), key=lambda path: Version(path.name.removesuffix(".jsonl.gz")))
    for path in kept[:-NIGHTS]:
        path.unlink()


def age(build: Record) -> tuple[Version, tuple[int, ...]]:
    """Where a build stands among all: by version, and by Python for the same version."""
    python = re.match(r"\d+\.\d+", str(build.run.get("python", "")))
    return Version(Version(build.run["torch"]).public), Version(python[0] if python else "0").release


def release(build: Record) -> str:
    return Version(build.run["torch"]).base_version


def title(version: str) -> str:
    return f"DDP does not conform on torch {version}"


def texts(judged: Sequence[Record], builds: Sequence[Record], run: str) -> dict[str, str]:
    """The text for each version of which a build does not conform."""
    by_version: dict[str, list[Record]] = defaultdict(list)
    for build in sorted(judged, key=age):
        by_version[release(build)].append(build)
    found = {version: [(build, findings(build, builds)) for build in own] for version, own in by_version.items()}
    return {
        version: text(version, results, builds, run)
        for version, results in found.items()
        if any(bad for _, bad in results)
    }


def findings(build: Record, builds: Sequence[Record]) -> list[Finding]:
    """What is not as expected in a build, in the order that matters to whoever looks into it."""
    before = [
        (other, {(line["id"], line["lane"]): line["verdict"] for line in other.cases})
        for other in reversed(builds)
        if age(other) < age(build)
    ]
    found = []
    for line in build.cases:
        if line["verdict"] not in BAD:
            continue
        first, last_good = build, None
        for other, verdicts in before:
            verdict = verdicts.get((line["id"], line["lane"]))
            if verdict in GOOD:
                last_good = other
                break
            if verdict in BAD:
                first = other
        found.append(Finding(line, first, last_good))
    found.sort(key=lambda bad: (BAD.index(bad.line["verdict"]), diff.ORDER.get(bad.line["level"], 3), bad.line["id"]))
    return found


def text(version: str, results: Sequence[tuple[Record, Sequence[Finding]]], builds: Sequence[Record], run: str) -> str:
    """The whole issue: title, results, and for each build that does not conform what, since when, and how to see it."""
    parts = [f"# {title(version)}", "\n".join(table(results))]
    if run:
        parts.append(f"Records and page: {run}")
    bad = [(build, found) for build, found in results if found]
    for build, found in bad:
        room = LIMIT // len(bad)
        own = [f"## {build.run['torch']} on Python {build.run.get('python')}", reproduce(build, found)]
        claims: dict[str, list[Finding]] = defaultdict(list)
        for finding in found:
            claims[finding.claim].append(finding)
        for number, (claim, cases) in enumerate(claims.items()):
            section = "\n\n".join(about(claim, cases))
            if sum(map(len, own)) + len(section) > room * 2 // 3:
                own.append(f"... and {len(claims) - number} more claims: see the record.")
                break
            own.append(section)
        own.append(upgrade(build, builds, room - sum(map(len, own))))
        parts += own
    return "\n\n".join(parts) + "\n"


def table(results: Sequence[tuple[Record, Sequence[Finding]]]) -> Iterator[str]:
    yield "| build | lanes | verdicts |"
    yield "|---|---|---|"
    for build, _ in results:
        yield f"| {name(build)} | {', '.join(build.run['lanes'])} | {summary(build)} |"


def name(build: Record) -> str:
    """A build, so that another can have the same."""
    git = f"git {build.run['torch_git'][:10]}, " if build.run.get("torch_git") else ""
    return f"{build.run['torch']} ({git}Python {build.run.get('python')})"


def reproduce(build: Record, found: Sequence[Finding]) -> str:
    """The commands that make the environment and show what was found."""
    version = Version(build.run["torch"])
    if version.is_devrelease:
        install = f'pip install --pre torch=={version.public} --index-url "$TORCH_INDEX"   # of torch\'s nightly builds'
    else:
        beside = needed_beside(version.public, tomllib.loads(VERSIONS.read_text(encoding="utf-8"))["releases"])
        install = " ".join([f"pip install torch=={version.public}", *(f"'{each}'" for each in beside)])
    lanes = [f"--lane {lane}" for lane in dict.fromkeys(bad.line["lane"] for bad in found)]
    claims = [f"--claim {claim}" for claim in dict.fromkeys(bad.claim for bad in found)][:20]
    return fenced("\n".join([install, "pip install -e .", " ".join(["pytest", *lanes, *claims])]))


def about(claim: str, cases: Sequence[Finding]) -> Iterator[str]:
    """What happened to one claim, and since when; cases to which the same happened are told together."""
    verdicts = " and ".join(dict.fromkeys(bad.line["verdict"] for bad in cases))
    yield f"### `{claim}` ({cases[0].line['level']}) {verdicts}"
    yield next((case.sentence for case in all_cases() if case.claim == claim), "(a claim that the suite no longer has)")
    alike: dict[tuple[Any, ...], list[Finding]] = defaultdict(list)
    for bad in cases:
        alike[bad.line["lane"], bad.line["why"], age(bad.first), bad.last_good and age(bad.last_good)].append(bad)
    for group in alike.values():
        bad = group[0]
        why = bad.line["why"].removeprefix("Mismatch between actual and expect strings:\n\n")
        lane = bad.line["lane"]
        yield f"{', '.join('`' + each.line['id'] + '`' for each in group)} on {lane}:"
        yield fenced(cut(why, 3_000, "..."))
        good = name(bad.last_good) if bad.last_good else "none on record"
        yield f"- first bad build on record: {name(bad.first)}\n- last good build: {good}"
        option = "" if lane == SHARED_LANE else f" --lane {lane}"
        yield fenced(f"python -m ci.reproduce {bad.line['id']}{option} > case.py && python case.py")


def upgrade(build: Record, builds: Sequence[Record], room: int) -> str:
    """The upgrade report from the newest release below, of the same Python where there is one."""
    below = [
        other
        for other in builds
        if not Version(other.run["torch"]).is_prerelease
        and golden.release(other.run["torch"]) < golden.release(build.run["torch"])
        and set(other.run["lanes"]) & set(build.run["lanes"])
    ]
    if not below:
        return "No release below this one is on record."
    old = max(below, key=lambda other: (age(other)[0], age(other)[1] == age(build)[1], age(other)[1]))
    told = "\n".join(diff.report(diff.compare(old, build)))
    told = cut(told, max(room, 0), "... and more: python -m ci.diff tells the rest from the two records.")
    return f"<details><summary>What changes from torch {old.run['torch']}</summary>\n\n{fenced(told)}\n\n</details>"


def fenced(text: str) -> str:
    """Text as code, in a fence that nothing in it can close."""
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
    return f"{fence}\n{text}\n{fence}"


def cut(text: str, room: int, rest: str) -> str:
    """As many whole lines as there is room for, and what to do about the rest."""
    if len(text) <= room:
        return text
    return "\n".join([*text[:room].splitlines()[:-1], rest])


if __name__ == "__main__":
    sys.exit(main())
