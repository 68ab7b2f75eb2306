"""Buckets and firing as pictures: coloured strips, parameter by parameter in bytes, in the order they are reduced."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ci.table import Column, Row, spans

LAYOUTS = ("buckets", "rebuilt_per_bucket_param_indices")
"""Facts that say what each all-reduce carries: parameters' indices, a comma between all-reduces."""
BUCKET = re.compile(r"\d+( \d+)*")
NESTED = re.compile(r"\[\[[\d, ]+\](, \[[\d, ]+\])*\]")
FIRING = re.compile(r"(g\d+|R\d+)( (g\d+|R\d+))+")
NUMBERS = re.compile(r"\d+(, \d+)+")
WIDTH, HEIGHT, GAP, MARGIN, RIGHT = 640, 26, 6, 36, 80
SMALLEST, LARGEST, UNSIZED = 16, 170, 44
"""Widths of a parameter: at least, or a bias beside a weight would not be seen; at most; and where bytes are not known."""
HUES = (210, 30, 120, 280, 0, 170, 60, 330)

Layout = list[list[int]]


@dataclass(frozen=True)
class Picture:
    """What one fact shows on a range of releases, a drawing for each iteration that differs."""

    caption: str
    drawings: list[tuple[str, str]]


def is_drawn(row: Row) -> bool:
    """Whether a fact of the row speaks of buckets, so that the sizes of its parameters matter."""
    return any(name in LAYOUTS for cell in row.cells for name in cell.facts)


def of_row(row: Row, columns: Sequence[Column], sizes: Sequence[int] = ()) -> Iterator[Picture]:
    """
    A picture for each value that a fact about buckets or order has had, named with the releases that show it.

    sizes   the bytes of each parameter, where they are known
    """
    for lane in dict.fromkeys(column.lane for column in columns):
        indices = [index for index, column in enumerate(columns) if column.lane == lane]
        cells = [row.cells[index] for index in indices]
        for fact in dict.fromkeys(name for cell in cells for name in cell.facts):
            for first, last, value in spans(cells, fact):
                if not cells[first].measured:
                    continue
                ends = list(dict.fromkeys(columns[indices[index]].torch for index in (first, last)))
                for ranks, text in _by_rank(value):
                    if drawings := _draw(fact, text, sizes):
                        yield Picture(f"{fact}, torch {' to '.join(ends)}, {lane}{ranks}", drawings)


def layout(text: str) -> Layout | None:
    """`[5 4, 3 2]` or `[[5, 4], [3, 2]]` as lists of indices; None for anything else."""
    if NESTED.fullmatch(text):
        return [[int(index) for index in bucket.split(",")] for bucket in re.findall(r"[\d, ]+\d|\d", text)]
    buckets = _bare(text).split(", ")
    return (
        [[int(index) for index in bucket.split()] for bucket in buckets]
        if all(map(BUCKET.fullmatch, buckets))
        else None
    )


def iterations(buckets: Layout) -> list[Layout]:
    """Buckets backward by backward: a parameter that is reduced again begins the next one."""
    found: list[Layout] = []
    seen: set[int] = set()
    for bucket in buckets:
        if not found or seen.intersection(bucket):
            found.append([])
            seen = set()
        found[-1].append(bucket)
        seen.update(bucket)
    return found


def strips(buckets: Layout, sizes: Sequence[int], most: int) -> str:
    """One strip a bucket, in the order they are reduced, with the bytes of each parameter where known; `most` in any."""
    room = WIDTH - MARGIN - RIGHT - SMALLEST * max(map(len, buckets))
    scale = max(0.0, min(room / (most or 1), (LARGEST - SMALLEST) / (max(sizes, default=0) or 1)))
    parts = []
    right = 0.0
    for number, bucket in enumerate(buckets):
        y = number * (HEIGHT + GAP)
        parts.append(_text(0, y, f"R{number}"))
        x = float(MARGIN)
        for index in bucket:
            width = SMALLEST + sizes[index] * scale if sizes else UNSIZED
            size = readable(sizes[index]) if sizes else ""
            parts.append(_box(x, y, width, index, f"parameter {index}" + (f", {sizes[index]} bytes" if sizes else "")))
            parts.append(_text(x + width / 2, y, f"{index} · {size}" if size and width > 90 else str(index), "#111"))
            x += width
        if sizes:
            parts.append(_text(x + 8, y, readable(sum(sizes[index] for index in bucket))))
        right = max(right, x + (RIGHT if sizes else 0))
    told = ", ".join(" ".join(map(str, bucket)) for bucket in buckets)
    return _svg(parts, right, len(buckets) * (HEIGHT + GAP), f"buckets in the order they are reduced: {told}")


def timeline(text: str) -> str:
    """Gradients become ready from left to right (`g5`), and the reduction of bucket k starts at `Rk`."""
    tokens = text.split()
    step = min(44.0, (WIDTH - 4) / len(tokens))
    parts = []
    for position, token in enumerate(tokens):
        x, number = position * step, int(token[1:])
        if token[0] == "R":
            parts.append(
                f'<rect x="{x + 1:.1f}" y="1" width="{step - 2:.1f}" height="{HEIGHT - 2}" rx="12" fill="#333" stroke="#999">'
                f"<title>the reduction of bucket {number} starts</title></rect>"
            )
            parts.append(_text(x + step / 2, 0, token, "#fff"))
        else:
            parts.append(_box(x + 1, 0, step - 2, number, f"the gradient of parameter {number} is ready"))
            parts.append(_text(x + step / 2, 0, token, "#111"))
    return _svg(parts, len(tokens) * step, HEIGHT, f"gradients ready and reductions started, in order: {text}")


def readable(count: int) -> str:
    for unit, size in (("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= size:
            return f"{count / size:.4g} {unit}"
    return f"{count} B"


def _draw(fact: str, text: str, sizes: Sequence[int]) -> list[tuple[str, str]]:
    """The drawings of one value, each with a label; none where it speaks of something else."""
    if fact in LAYOUTS and (buckets := layout(text)):
        known = sizes if {index for bucket in buckets for index in bucket} == set(range(len(sizes))) else ()
        most = max(sum(known[index] for index in bucket) if known else 1 for bucket in buckets)
        return [(label, strips(alike, known, most)) for label, alike in _numbered(iterations(buckets))]
    lines = _bare(text).split(", ")
    if all(map(FIRING.fullmatch, lines)):
        return [(label, timeline(line)) for label, line in _numbered(lines)]
    if "order" in fact and NUMBERS.fullmatch(_bare(text)):
        return [("gradients in the order they are ready", timeline(" ".join(f"g{index}" for index in lines)))]
    return []


def _numbered(backwards: Sequence[Any]) -> list[tuple[str, Any]]:
    """What differs from the backward before, labelled with the backwards that are alike; counted from the first shown."""
    if len(backwards) == 1:
        return [("", backwards[0])]
    starts = [at for at, each in enumerate(backwards) if at == 0 or each != backwards[at - 1]]
    ends = [*starts[1:], len(backwards)]
    return [
        (f"backward {first + 1}" if end == first + 1 else f"backwards {first + 1} to {end}", backwards[first])
        for first, end in zip(starts, ends, strict=True)
    ]


def _by_rank(value: Any) -> Iterator[tuple[str, str]]:
    """A value with its ranks: once where every rank says the same, else once for each thing that is said."""
    if isinstance(value, str):
        yield "", value
    elif isinstance(value, list):
        for text in dict.fromkeys(item for item in value if isinstance(item, str)):
            ranks = [str(rank) for rank, item in enumerate(value) if item == text]
            yield f", rank{'s' * (len(ranks) > 1)} {' and '.join(ranks)}", text


def _bare(text: str) -> str:
    return text.removeprefix("[").removesuffix("]")


def _svg(parts: Sequence[str], width: float, height: float, label: str) -> str:
    size = f'viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" height="{height:.0f}"'
    return f'<svg role="img" aria-label="{label}" {size}>{"".join(parts)}</svg>'


def _box(x: float, y: float, width: float, index: int, title: str) -> str:
    return (
        f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{HEIGHT}" fill="hsl({HUES[index % len(HUES)]} 60% 75%)" '
        f'stroke="#666"><title>{title}</title></rect>'
    )


def _text(x: float, y: float, text: str, inside: str = "") -> str:
    """Text on the page, or in the colour given and centred on a box."""
    place = f'text-anchor="middle" fill="{inside}"' if inside else 'fill="currentColor"'
    return f'<text x="{x:.1f}" y="{y + 18}" font-size="13" {place}>{text}</text>'
