"""Draws an explanation: a box for each record, and lines to its inputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from vt_dagster.provenance.explain_request import Explanation

DEEP, WIDE = 3, 6
"""Maximum number of upstream steps, and of inputs for each record."""
BOX, ROW, GAP = 232, 84, 56
_TITLE = 28


@dataclass
class Box:
    """A record with its position in the drawing.

    Args:
        asset: the asset's name.
        place: partition and offset, ``0:17``; empty = there is no such row.
        title: the asset's name, shortened.
        lines: the text in the box.
        more: the number of its inputs that are not drawn.
    """

    asset: str
    place: str
    title: str
    lines: Sequence[str]
    x: int
    y: float = 0.0
    more: int = 0


@dataclass
class Drawing:
    """Boxes, and the lines between them as SVG paths.

    ``left_out`` is the number of inputs that are not drawn.
    """

    boxes: list[Box] = field(default_factory=list[Box])
    lines: list[str] = field(default_factory=list[str])
    height: int = 0

    @property
    def width(self) -> int:
        return max((box.x for box in self.boxes), default=0) + BOX + 2

    @property
    def left_out(self) -> int:
        return sum(box.more for box in self.boxes)


def drawing(found: Explanation) -> Drawing:
    """Draws a row's explanation, with the inputs of each record to its right."""
    drawn, known = Drawing(), dict[tuple[str, str], Box]()
    _draw(found, 0, drawn, known)
    return drawn


def _draw(one: Explanation, depth: int, drawn: Drawing, known: dict[tuple[str, str], Box]) -> Box:
    place = "" if one.record is None else f"{one.record.partition}:{one.record.offset}"
    if place and (one.asset, place) in known:
        return known[one.asset, place]
    box = Box(one.asset, place, _short(one.asset), _lines(one, place), depth * (BOX + GAP) + 1)
    drawn.boxes.append(box)
    if place:
        known[one.asset, place] = box
    shown = one.made_of[:WIDE] if depth < DEEP else ()
    box.more = one.made_of_in_all - len(shown) if one.made_of_in_all else len(one.made_of) - len(shown)
    below: list[Box] = []
    first = drawn.height
    for part in shown:
        below.append(_draw(part, depth + 1, drawn, known))
    if drawn.height == first:
        drawn.height += ROW
    box.y = (first + drawn.height - ROW) / 2 + 1
    for other in below:
        drawn.lines.append(_line(box, other))
    return box


def _line(box: Box, other: Box) -> str:
    middle = (ROW - 16) / 2
    x, y, end, down = box.x + BOX, box.y + middle, other.x, other.y + middle
    bend = (x + end) / 2
    return f"M{x} {y}C{bend} {y} {bend} {down} {end} {down}"


def _lines(one: Explanation, place: str) -> list[str]:
    if one.record is None:
        return ["there is no such row", one.operator]
    deleted = "deleted, " if one.record.is_tombstone else ""
    return [
        f"{deleted}{one.record.timestamp:%Y-%m-%d %H:%M:%S}",
        _short(f"{place} · {', '.join(one.rules) or one.operator}"),
    ]


def _short(text: str) -> str:
    return text if len(text) <= _TITLE else f"{text[: _TITLE - 1]}…"
