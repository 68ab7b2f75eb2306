"""Buckets and firing as pictures: coloured strips, parameter by parameter in bytes, in the order they are reduced."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ci.table import Column, Row, spans

LAYOUT = re.compile(r"\d+( \d+)*(, \d+( \d+)*)*")
FIRING = re.compile(r"(g\d+|R\d+)( (g\d+|R\d+))+")
WIDTH, HEIGHT, GAP = 640, 26, 6
SMALLEST = 14
"""A parameter is at least so wide, or a bias beside a weight would not be seen; its bytes are in its title."""
HUES = (210, 30, 120, 280, 0, 170, 60, 330)


@dataclass(frozen=True)
class Picture:
    svg: str
    caption: str


def of_row(row: Row, columns: Sequence[Column]) -> list[Picture]:
    """A picture for each value that a bucket fact has had, named with the releases that show it."""
    drawn = []
    for lane in dict.fromkeys(column.lane for column in columns):
        indices = [index for index, column in enumerate(columns) if column.lane == lane]
        cells = [row.cells[index] for index in indices]
        for fact in dict.fromkeys(name for cell in cells for name in cell.facts):
            for first, last, value in spans(cells, fact):
                if not (isinstance(value, str) and cells[first].measured):
                    continue
                ends = list(dict.fromkeys(columns[indices[index]].torch for index in (first, last)))
                caption = f"{fact}, torch {' to '.join(ends)}, {lane}"
                listed = value.removeprefix("[").removesuffix("]")
                if LAYOUT.fullmatch(listed) and "bucket" in fact:
                    drawn.append(Picture(buckets(listed, _bytes(cells[first].facts)), caption))
                elif all(FIRING.fullmatch(line) for line in listed.split(", ")):
                    drawn += [
                        Picture(firing(line), f"{caption}, line {number}" if ", " in listed else caption)
                        for number, line in enumerate(listed.split(", "), 1)
                    ]
    return drawn


def buckets(layout: str, sizes: Mapping[int, int]) -> str:
    """One strip a bucket, in the order they are reduced: `5 4, 3 2` with the bytes of each parameter where known."""
    strips = [[int(index) for index in bucket.split()] for bucket in layout.split(", ")]
    most = max(sum(sizes.get(index, 1) for index in strip) for strip in strips)
    longest = max(map(len, strips))
    scale = (WIDTH - 60 - SMALLEST * longest) / most
    parts = []
    for number, strip in enumerate(strips):
        y = number * (HEIGHT + GAP)
        parts.append(_text(0, y, f"R{number}", "start"))
        x = 40.0
        for index in strip:
            width = SMALLEST + sizes.get(index, 1) * scale
            title = f"parameter {index}" + (f", {sizes[index]} bytes" if index in sizes else "")
            parts.append(_box(x, y, width, HUES[index % len(HUES)], title))
            parts.append(_text(x + width / 2, y, str(index), "middle"))
            x += width
    return _svg(parts, len(strips) * (HEIGHT + GAP), f"buckets in the order they are reduced: {layout}")


def firing(text: str) -> str:
    """When each all-reduce starts: gradients become ready from left to right, and bucket k is reduced at R k."""
    tokens = text.split()
    step = min(48.0, (WIDTH - 10) / len(tokens))
    parts = []
    for position, token in enumerate(tokens):
        x = position * step
        hue = HUES[int(token[1:]) % len(HUES)]
        if token[0] == "R":
            parts.append(f'<rect x="{x + 1:.1f}" y="0" width="{step - 2:.1f}" height="{HEIGHT}" rx="12" fill="#444"/>')
            parts.append(_text(x + step / 2, 0, token, "middle", "#fff"))
        else:
            parts.append(_box(x + 1, 0, step - 2, hue, f"the gradient of parameter {token[1:]} is ready"))
            parts.append(_text(x + step / 2, 0, token, "middle"))
    return _svg(parts, HEIGHT, f"gradients ready and reductions started, in order: {text}")


def _bytes(facts: Mapping[str, Any]) -> dict[int, int]:
    """Bytes by parameter index, where the case shows them as `parameter_bytes`."""
    shown = facts.get("parameter_bytes")
    return dict(enumerate(map(int, re.findall(r"\d+", shown)))) if isinstance(shown, str) else {}


def _svg(parts: Sequence[str], height: float, label: str) -> str:
    return "".join(_lines(parts, height, label))


def _lines(parts: Sequence[str], height: float, label: str) -> Iterator[str]:
    yield f'<svg role="img" aria-label="{label}" viewBox="0 0 {WIDTH} {height:.0f}" width="{WIDTH}" height="{height:.0f}">'
    yield from parts
    yield "</svg>"


def _box(x: float, y: float, width: float, hue: int, title: str) -> str:
    return (
        f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{HEIGHT}" fill="hsl({hue} 60% 75%)" stroke="#666">'
        f"<title>{title}</title></rect>"
    )


def _text(x: float, y: float, text: str, place: str, colour: str | None = None) -> str:
    fill = colour or ("#111" if place == "middle" else "currentColor")
    return f'<text x="{x:.1f}" y="{y + 18}" font-size="13" text-anchor="{place}" fill="{fill}">{text}</text>'
