"""
Write the matrix page: a static site of claims by torch releases and lanes, from records.

    python -m ci.report [RECORD...] -o site/      without records, from those kept with the suite

Needs no server and no outside assets. Truncated records are refused, lines of an older program are marked, and what was
never measured is shown as such; a VERSION.nodata among the records, as ci.matrix leaves it where it could measure
nothing, is a release without data. Where there is a kill matrix (`python -m ci.mutants --kills FILE`), it has a page too.
"""

import argparse
import ast
import gc
import inspect
import json
import shutil
import sys
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import jinja2
import torch
from ddp_conformance import golden, record
from ddp_conformance.case import Case
from ddp_conformance.record import Record, RecordError
from markupsafe import Markup, escape

from ci import coverage, history, kills, picture, sizes, table
from ci.cases import CONFORMANCE, families, introduction
from ci.diff import RECORDS
from ci.documentation import sentences

TEMPLATES = Path(__file__).with_name("templates")
KILLS = CONFORMANCE / "kills.json"
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
    parser.add_argument("records", nargs="*", type=Path, metavar="RECORD", help="a record, or a .nodata file")
    parser.add_argument("-o", "--output", type=Path, default=Path("site"), metavar="DIR")
    parser.add_argument("--kills", type=Path, metavar="FILE", help="the kill matrix; default conformance/kills.json")
    options = parser.parse_args(arguments)
    try:
        records, absent = read(options.records or [*sorted(RECORDS.glob("*.gz")), *sorted(RECORDS.glob("*.nodata"))])
        killed = options.kills or (KILLS if KILLS.exists() else None)
        check_replaceable(options.output)
        write(table.build(records, absent), options.output, kills.load(killed) if killed else None)
    except (RecordError, golden.GoldenError, ValueError) as error:
        print(f"ci.report: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"ci.report: {error.filename or options.output}: {error.strerror}", file=sys.stderr)
        return 2
    without = f", {len(absent)} without data" if absent else ""
    print(f"{options.output / 'index.html'}: {len(records)} records{without}")
    return 0


def read(paths: Sequence[Path]) -> tuple[list[Record], dict[str, str]]:
    """The records among the files, and why there is none of the releases that the .nodata files name."""
    for path in paths:
        if path.is_dir():
            raise RecordError(f"{path}: it is a folder, not a record; {instead_of(path)}")
    records = [record.read(path) for path in paths if path.suffix != ".nodata"]
    absent = {path.stem: reason(path) for path in paths if path.suffix == ".nodata"}
    if not records and absent:
        names = ", ".join(str(path) for path in paths[:3]) + (", ..." if len(paths) > 3 else "")
        raise RecordError(f"no record among {names}: a .nodata file only says why there is none; name a record, too")
    if not records:
        raise RecordError(f"no record given, and none in {RECORDS}: name one, as pytest --record writes it")
    return records, absent


def instead_of(folder: Path) -> str:
    """What to give in place of a folder: the files in it, or those beside an environment that ci.matrix --keep left."""
    for where in (folder, folder.parent):
        if found := [str(where / kind) for kind in ("*.jsonl", "*.jsonl.gz", "*.nodata") if any(where.glob(kind))]:
            return f"name only the files: {' '.join(found)}"
    return "leave it out"


def reason(path: Path) -> str:
    try:
        text = " ".join(path.read_text(encoding="utf-8").split())
    except UnicodeDecodeError as error:
        raise RecordError(f"{path}: not UTF-8 at byte {error.start}") from error
    if not text:
        raise RecordError(f"{path}: it gives no reason for having no data")
    return text


def check_replaceable(output: Path) -> None:
    """Raise ValueError where writing the pages would remove what is none of ours."""
    if output.name in ("", "..") or (output.exists() and not output.is_dir()):
        raise ValueError(f"-o {output}: name a folder for the pages, which are put in place of what is there")
    if output.is_dir() and any(output.iterdir()) and not (output / "matrix.json").is_file():
        raise ValueError(f"-o {output}: the folder holds something else than these pages; name another, or empty it")


def write(known: table.Table, output: Path, killed: kills.Kills | None = None) -> None:
    """Render every page into a fresh folder beside the old one, then put it in its place."""
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        scratch = tempfile.TemporaryDirectory(dir=output.parent, prefix=f".{output.name}-")
    except OSError as error:
        raise ValueError(f"-o {output}: {error.strerror}") from error
    with scratch:
        fresh = Path(scratch.name) / "fresh"
        (fresh / "claim").mkdir(parents=True)
        render(known, fresh, killed)
        if output.exists():
            output.rename(Path(scratch.name) / "old")
        fresh.rename(output)


def render(known: table.Table, folder: Path, killed: kills.Kills | None) -> None:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    environment.globals.update(
        table=known, kills=killed, marks=MARKS, changes=table.CHANGES, slug=slug, words=words, link=link, coded=coded
    )

    def page(template: str, path: str, **values: Any) -> None:
        text = environment.get_template(template).render(root="../" * path.count("/"), **values)
        (folder / path).write_text(text, encoding="utf-8")

    steps = history.steps(known)
    places = range(len(known.columns))
    by_family = families()
    page(
        "index.html",
        "index.html",
        families={family: list(dict.fromkeys(case.claim for case in cases)) for family, cases in by_family.items()},
        intros={family: introduction(cases[0]) for family, cases in by_family.items()},
        cells={claim: [shown(known, rows, at) for at in places] for claim, rows in known.claims.items()},
        releases=list(dict.fromkeys(column.torch for column in known.columns)),
        counts={step.column: len({claim for claims in step.changes.values() for claim in claims}) for step in steps},
    )
    page("changes.html", "changes.html", steps=steps)
    drawn = {row.id for rows in known.claims.values() for row in rows if picture.is_drawn(row)}
    known_sizes = sizes.by_case(drawn)
    for claim, rows in known.claims.items():
        page(
            "claim.html",
            f"claim/{slug(claim)}.html",
            claim=claim,
            rows=rows,
            first=rows[0].case,
            cells={row.id: [shown(known, [row], at) for at in places] for row in rows},
            values={row.id: history.values(row, known) for row in rows},
            notes={row.id: history.notes(row) for row in rows},
            pictures={row.id: list(picture.of_row(row, known.columns, known_sizes.get(row.id, ()))) for row in rows},
            sources=list(dict.fromkeys(source(row.case) for row in rows)),
            reasons=reasons(rows, known.columns),
            caught=kills.of_claim(killed, claim) if killed else [],
        )
    accounted = coverage.load(coverage.MAP)
    listed = [(sentence, accounted.get(sentence.fingerprint, {})) for sentence in sentences()]
    page("coverage.html", "coverage.html", sentences=listed, torch=torch.__version__)
    if killed:
        page("kills.html", "kills.html", survivors=kills.survivors(killed), caught=kills.by_family(killed))
    told = [{"fingerprint": each.fingerprint, "owner": each.owner, **entry} for each, entry in listed]
    plain = {**known.plain(), "coverage": {"torch": torch.__version__, "sentences": told}, "kills": killed}
    (folder / "matrix.json").write_text(json.dumps(plain, separators=(",", ":")), encoding="utf-8")
    shutil.copy(TEMPLATES / "style.css", folder / "style.css")


def shown(known: table.Table, rows: Sequence[table.Row], at: int) -> dict[str, str]:
    """What a matrix shows of these cases of a claim in one column."""
    cells, column = [row.cells[at] for row in rows], known.columns[at]
    verdict, change = table.verdict(cells), table.change(cells)
    older = any(cell.older for cell in cells)
    title = f"{column.name}: {MARKS[verdict][1]}"
    title += f"; {table.CHANGES[change]}, unlike the release before" if change else ""
    title += "; measured on an older version of the case" if older else ""
    title += f": {column.absent}" if column.absent else ""
    return {
        "verdict": verdict,
        "change": change,
        "older": "older" if older else "",
        "style": slug(verdict) + (" differs" if change else ""),
        "mark": MARKS[verdict][0] + ("≠" if change else "") + ("*" if older else ""),
        "title": title,
    }


def reasons(rows: Sequence[table.Row], columns: Sequence[table.Column]) -> dict[tuple[str, str], list[str]]:
    """Why cases of a claim do not simply hold: (verdict, why) -> where, with the facets that it is said of if not of all."""
    found: dict[tuple[str, str], dict[str, list[str]]] = {}
    for at, column in enumerate(columns):
        for row in rows:
            cell = row.cells[at]
            if cell.why and cell.verdict != "holds":
                where = found.setdefault((cell.verdict, cell.why), {})
                where.setdefault(column.name, []).append(row.id.partition("/")[2])
    return {
        why: [name if len(facets) == len(rows) else f"{name} ({', '.join(facets)})" for name, facets in where.items()]
        for why, where in found.items()
    }


def source(case: Case) -> str:
    """The case as it stands in its module, decorator and all."""
    found = _functions(case.path).get(case.program.__name__)
    return found or inspect.getsource(inspect.unwrap(case.program))


@cache
def _functions(path: Path) -> dict[str, str]:
    """The source of every function of a module, by name; inspect reads a module anew for each."""
    text = path.read_text(encoding="utf-8")
    lines = text.splitlines(keepends=True)
    return {
        node.name: "".join(
            lines[min([node.lineno, *(each.lineno for each in node.decorator_list)]) - 1 : node.end_lineno]
        )
        for node in ast.parse(text).body
        if isinstance(node, ast.FunctionDef)
    }


def slug(name: str) -> str:
    return "".join(letter if letter.isalnum() or letter in "_-" else "-" for letter in name)


def words(name: str) -> str:
    return name.replace("_", " ")


def coded(text: str) -> Markup:
    """Text with what stands in `backticks` as code."""
    parts = str(escape(text)).split("`")
    return Markup("".join(f"<code>{part}</code>" if at % 2 else part for at, part in enumerate(parts)))


def link(reference: str) -> str:
    """`owner/name#number`, as golden files write it, or an address."""
    return reference if "://" in reference else f"https://github.com/{reference.replace('#', '/issues/')}"


if __name__ == "__main__":
    gc.disable()  # nothing that is made here goes before the end, and the collector takes a fifth of the time
    sys.exit(main())
