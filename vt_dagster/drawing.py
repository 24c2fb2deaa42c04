"""Small SVG pictures, built from strings: the parts that all pictures share."""

from __future__ import annotations

import base64
from collections.abc import Iterable
from html import escape

WIDTH = 720
BLUE, RED, GREY = "#4f7cf0", "#e0483e", "#8a8f98"


def text(x: float, y: float, words: str, anchor: str = "start", colour: str = GREY) -> str:
    """Returns a text element; ``anchor``: the end of the text at ``x`` (start, middle, end)."""
    return f'<text x="{x}" y="{y}" text-anchor="{anchor}" fill="{colour}">{escape(words)}</text>'


def svg(height: int, drawn: Iterable[str]) -> str:
    """Returns a picture of elements."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" '
        f'font-family="sans-serif" font-size="11">{"".join(drawn)}</svg>'
    )


def image(name: str, drawn: str) -> str:
    """Returns a picture inline in Markdown, as a data URL."""
    return f"![{name}](data:image/svg+xml;base64,{base64.b64encode(drawn.encode()).decode()})"
