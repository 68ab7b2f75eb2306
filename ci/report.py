"""
Write the matrix page: a static site of claims by torch releases and lanes, from records.

    python -m ci.report [RECORD...] -o site/      without records, from those kept with the suite

Needs no server and no outside assets. Truncated records are refused, lines of an older program are marked, and what was
never measured is shown as such.
"""

import argparse
import ast
import inspect
import json
import shutil
import sys
import textwrap
from pathlib import Path
from typing import Any

import jinja2
from ddp_conformance import golden, record
from ddp_conformance.case import Case
from ddp_conformance.suite import golden_path

from ci import coverage, picture, table
from ci.cases import families, introduction
from ci.diff import RECORDS
from ci.documentation import sentences

TEMPLATES = Path(__file__).with_name("templates")
MARKS = {
    "holds": ("✓", "holds"),
    "known": ("K", "known deviation"),
    "changed": ("Δ", "changed, not accepted"),
    "violated": ("✗", "violated"),
    "not offered": ("-", "not offered"),
    "no data": ("·", "no data"),
    "unmeasured": ("?", "never measured here"),
}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m ci.report", description="Write the matrix page from records.")
    parser.add_argument("records", nargs="*", type=Path, metavar="RECORD")
    parser.add_argument("-o", "--output", type=Path, default=Path("site"), metavar="DIR")
    options = parser.parse_args(arguments)
    try:
        records = [record.read(path) for path in options.records or sorted(RECORDS.glob("*.jsonl.gz"))]
        if not records:
            raise record.RecordError(f"no record given, and none in {RECORDS}")
        check_replaceable(options.output)
        write(table.build(records), options.output)
    except (record.RecordError, golden.GoldenError, ValueError, OSError) as error:
        print(f"ci.report: {error}", file=sys.stderr)
        return 2
    print(f"{options.output / 'index.html'}: {len(records)} records")
    return 0


def check_replaceable(output: Path) -> None:
    """Raise ValueError where writing the pages would remove what is none of ours."""
    if output.name in ("", "..") or (output.exists() and not output.is_dir()):
        raise ValueError(f"-o {output}: name a folder for the pages, which are put in place of what is there")
    if output.is_dir() and any(output.iterdir()) and not (output / "matrix.json").is_file():
        raise ValueError(f"-o {output}: the folder holds something else than these pages; name another, or empty it")


def write(known: table.Table, output: Path) -> None:
    """Render every page into a fresh folder, then put it in place of the old one."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    environment.globals.update(marks=MARKS, slug=slug, words=lambda name: name.replace("_", " "))
    fresh = output.with_name(output.name + ".new")
    shutil.rmtree(fresh, ignore_errors=True)
    (fresh / "claim").mkdir(parents=True)

    def render(template: str, path: str, **values: Any) -> None:
        root = "../" * path.count("/")
        text = environment.get_template(template).render(root=root, table=known, **values)
        (fresh / path).write_text(text, encoding="utf-8")

    grouped = {family: list(dict.fromkeys(case.claim for case in cases)) for family, cases in families().items()}
    intros = {family: introduction(cases[0]) for family, cases in families().items()}
    verdicts = {claim: [known.verdict(claim, index) for index in range(len(known.columns))] for claim in known.claims}
    changes = {claim: [known.changes(claim, index) for index in range(len(known.columns))] for claim in known.claims}
    render("index.html", "index.html", families=grouped, intros=intros, verdicts=verdicts, changes=changes)
    for claim, rows in known.claims.items():
        render(
            "claim.html",
            f"claim/{slug(claim)}.html",
            claim=claim,
            rows=rows,
            first=rows[0].case,
            verdicts=verdicts[claim],
            histories={row.id: history(row, known) for row in rows},
            pictures={row.id: picture.of_row(row, known.columns) for row in rows},
            sources=list(dict.fromkeys(source(row.case) for row in rows)),
            notes={row.id: notes(row) for row in rows},
        )
    accounted = coverage.load(coverage.MAP)
    listed = [(sentence, accounted.get(sentence.fingerprint, {})) for sentence in sentences()]
    render("coverage.html", "coverage.html", sentences=listed)
    plain = known.plain()
    plain["coverage"] = [
        {"fingerprint": sentence.fingerprint, "owner": sentence.owner, **entry} for sentence, entry in listed
    ]
    (fresh / "matrix.json").write_text(json.dumps(plain, indent=1), encoding="utf-8")
    shutil.copy(TEMPLATES / "style.css", fresh / "style.css")
    shutil.rmtree(output, ignore_errors=True)
    fresh.rename(output)


def history(row: table.Row, known: table.Table) -> list[dict[str, Any]]:
    """Each fact's values through the releases, lane by lane: where each stands, and whether it was measured there."""
    told = []
    for lane in dict.fromkeys(column.lane for column in known.columns):
        indices = [index for index, column in enumerate(known.columns) if column.lane == lane]
        cells = [row.cells[index] for index in indices]
        for fact in dict.fromkeys(name for cell in cells for name in cell.facts):
            for first, last, value in table.spans(cells, fact):
                releases = [known.columns[indices[index]].torch for index in (first, last)]
                told.append(
                    {
                        "fact": fact,
                        "lane": lane,
                        "releases": releases[0] if first == last else f"{releases[0]} to {releases[1]}",
                        "value": value if isinstance(value, list) else [value],
                        "measured": cells[first].measured,
                        "by_rank": isinstance(value, list),
                    }
                )
    return told


def notes(row: table.Row) -> list[dict[str, str]]:
    """What people wrote beside the case's golden facts: notes and broken entries."""
    entry = golden.load(golden_path(row.case)).get(row.id.partition(".")[2], {})
    told = [{"kind": "note", **note} for note in entry.get("note", [])]
    for broken in entry.get("broken", []):
        what = f"law “{broken['law']}” is broken" if "law" in broken else f"ends by {broken['outcome']}"
        until = f" until {broken['until']}" if "until" in broken else ""
        text = f"{what}{until}. {broken.get('note', '')}"
        told.append({"kind": "broken", "since": broken["since"], "text": text, "link": broken.get("link", "")})
    return told


def source(case: Case) -> str:
    """The case as it stands in its module, decorator and all."""
    lines = inspect.getsource(inspect.unwrap(case.program))
    ast.parse(textwrap.dedent(lines))
    return lines


def slug(claim: str) -> str:
    return claim.replace(".", "-")


if __name__ == "__main__":
    sys.exit(main())
