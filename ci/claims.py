"""
Write CLAIMS.md, the contract as one page, from the cases.

    python -m ci.claims            write it
    python -m ci.claims --check    exit 1 when it is not what the cases say
"""

import argparse
import sys
from collections.abc import Iterator

from ddp_conformance import golden
from ddp_conformance.case import HAZARD, MUST, OBSERVED, Case
from ddp_conformance.suite import golden_path
from packaging.version import Version

from ci.cases import ROOT, families, introduction

PAGE = ROOT / "CLAIMS.md"
LEVELS = {
    MUST: "documented",
    OBSERVED: "what the source does and nobody promised",
    HAZARD: "a documented warning, or a promise that is false on every release: pins what really happens",
}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m ci.claims", description="Write CLAIMS.md from the cases.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 when the page is stale")
    options = parser.parse_args(arguments)
    try:
        text = "\n".join(page()) + "\n"
    except golden.GoldenError as error:
        print(f"ci.claims: {error}", file=sys.stderr)
        return 2  # 1 says that the page is stale, which nobody knows here
    if options.check:
        fresh = PAGE.exists() and PAGE.read_text(encoding="utf-8") == text
        print("CLAIMS.md is fresh" if fresh else "CLAIMS.md is stale: run python -m ci.claims")
        return 0 if fresh else 1
    PAGE.write_text(text, encoding="utf-8")
    return 0


def page() -> Iterator[str]:
    """The lines of the page: by family, each claim in one sentence with what it rests on and who tests it in torch."""
    known = families()
    claims = {case.claim: case for cases in known.values() for case in cases}
    yield "# What DistributedDataParallel promises, and what it does"
    yield ""
    yield (
        f"{len(claims)} claims in {len(known)} families, each a short program that shows it. "
        "Generated from the cases by `python -m ci.claims`; do not edit."
    )
    yield ""
    for level, meaning in LEVELS.items():
        count = sum(case.level == level for case in claims.values())
        yield f"- **{level}** ({count}): {meaning}."
    yield ""
    yield " · ".join(f"[{family.replace('_', ' ')}](#{anchor(family)})" for family in known)
    for family, cases in known.items():
        yield ""
        yield f"## {family.replace('_', ' ')}"
        yield ""
        yield introduction(cases[0])
        yield ""
        grouped: dict[str, list[Case]] = {}
        for case in cases:
            grouped.setdefault(case.claim, []).append(case)
        for claim, shown_by in grouped.items():
            yield from entry(claim, shown_by)


def entry(claim: str, cases: list[Case]) -> Iterator[str]:
    """One claim: its sentence, and below it what a reader may want to follow."""
    first = cases[0]
    line = first.program.__code__.co_firstlineno
    link = f"{first.path.relative_to(ROOT)}#L{line}"
    yield f"- {first.sentence} <br> [`{claim}`]({link}) · {first.level} · source `{first.source}`{offered(first)}"
    for other in cases[1:]:
        yield f"  <br> also: {other.sentence}"
    tests = sorted({test for case in cases for test in case.torch_tests})
    reports = sorted({report for case in cases for report in case.reports})
    yield f"  <br> PyTorch's own tests: {', '.join(f'`{test}`' for test in tests) or 'none'}" + (
        f" · reports: {', '.join(map(reference, reports))}" if reports else ""
    )


def offered(case: Case) -> str:
    """Since which torch the claim can be shown, where the golden file knows a release without it."""
    tables = golden.load(golden_path(case))
    names = [case.id(facet).partition(".")[2] for facet in case.facets()]
    entries = [tables.get(name, {}).get("offered") for name in names]
    since = {
        min((release for release, said in entry.items() if said == "yes"), key=Version, default="no release yet")
        for entry in entries
        if isinstance(entry, dict)
    }
    return f" · since torch {', '.join(sorted(since))}" if since else ""


def reference(report: str) -> str:
    repository, _, number = report.partition("#")
    return f"[{report}](https://github.com/{repository}/issues/{number})" if number.isdigit() else report


def anchor(family: str) -> str:
    return family.replace("_", "-")


if __name__ == "__main__":
    sys.exit(main())
