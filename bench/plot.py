"""The ratios of a run as a picture: a bar for each ratio, and a line at its target."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path

from measure import Result

ROW, LEFT, WIDTH = 22, 640, 360
MET, MISSED, NONE = "#2e8b57", "#c0504d", "#8899aa"


def draw(results: Sequence[Result], path: Path) -> None:
    """Writes an SVG. A bar ends at three times its target, or without one at a ratio of six."""
    lines: list[str] = []
    for i, one in enumerate(results):
        y = 30 + i * ROW
        target = one.target
        color = NONE if target is None else MET if one.ratio <= target else MISSED
        limit = 6.0 if target is None else 3 * target
        length = WIDTH * min(one.ratio / limit, 1)
        label = escape(f"{one.name} ÷ {one.peer}")
        lines += [
            f'<text x="{LEFT - 8}" y="{y + 14}" text-anchor="end">{label}</text>',
            f'<rect x="{LEFT}" y="{y + 3}" width="{length:.0f}" height="14" fill="{color}"/>',
            f'<text x="{LEFT + length + 6:.0f}" y="{y + 14}">{one.ratio:g}</text>',
        ]
        if target is not None:
            x = LEFT + WIDTH * target / limit
            lines.append(
                f'<line x1="{x:.0f}" x2="{x:.0f}" y1="{y}" y2="{y + 20}" stroke="#222"/>'
                f'<text x="{LEFT + WIDTH + 60}" y="{y + 14}" fill="#666">target {target:g}</text>'
            )
    height = 40 + len(results) * ROW
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{LEFT + WIDTH + 150}" height="{height}" '
        'font-family="sans-serif" font-size="11">'
        f'<rect width="100%" height="{height}" fill="white"/>'
        f'<text x="{LEFT}" y="18" font-weight="bold">ours ÷ peer, shorter is faster</text>'
    )
    path.write_text("\n".join([head, *lines, "</svg>"]) + "\n", encoding="utf-8")
