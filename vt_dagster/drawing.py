"""Small pictures as SVG, drawn from nothing but texts: what all of them have in common."""

from __future__ import annotations

import base64
from collections.abc import Iterable
from html import escape

WIDTH = 720
BLUE, RED, GREY = "#4f7cf0", "#e0483e", "#8a8f98"


def text(x: float, y: float, said: str, anchor: str = "start", colour: str = GREY) -> str:
    """A text at a place; ``anchor``: which of its ends is there (start, middle, end)."""
    return f'<text x="{x}" y="{y}" text-anchor="{anchor}" fill="{colour}">{escape(said)}</text>'


def svg(height: int, drawn: Iterable[str]) -> str:
    """A picture of elements."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" '
        f'font-family="sans-serif" font-size="11">{"".join(drawn)}</svg>'
    )


def image(name: str, drawn: str) -> str:
    """A picture as Markdown has it, in the text itself."""
    return f"![{name}](data:image/svg+xml;base64,{base64.b64encode(drawn.encode()).decode()})"
