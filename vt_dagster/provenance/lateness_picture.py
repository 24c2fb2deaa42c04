"""Draws a ``Lateness``: wrong results and waiting records for each length."""

from __future__ import annotations

from vt_dagster.drawing import BLUE, GREY, RED, WIDTH, svg, text
from vt_dagster.provenance.lateness_results import Choice, Lateness
from vt_dagster.topology.durations import spoken

_ROW, _TOP, _LEFT, _BAR = 26, 34, 130, 330


def picture(found: Lateness) -> str:
    """Returns an SVG with a row for each length: a red bar for the share of wrong results, a blue bar
    for the maximum number of waiting records. A dotted line marks the requested share."""
    most = max([one.share for one in found.choices] + [found.at_most or 0.0, 1e-9])
    held = max([one.waiting_most or 0 for one in found.choices] + [1])
    what = found.what.replace("_", " ")
    drawn = [
        text(4, 14, f"{found.asset}: results that are wrong, by {what}", colour=RED),
        text(WIDTH - 4, 14, "records that waited at most", "end", BLUE),
    ]
    for number, one in enumerate(found.choices):
        y = _TOP + number * _ROW
        drawn.append(text(4, y + 11, f"{_mark(found, one)}{spoken(one.length)}"))
        size = round(_BAR * one.share / most, 1)
        drawn.append(f'<rect x="{_LEFT}" y="{y}" width="{size}" height="12" fill="{RED}"/>')
        drawn.append(text(_LEFT + size + 6, y + 10, f"{share(one.share)} ({one.wrong:,})"))
        if one.waiting_most is not None:
            size = round(_BAR * one.waiting_most / held, 1)
            drawn.append(
                f'<rect x="{_LEFT}" y="{y + 14}" width="{size}" height="4" fill="{BLUE}"/>'
                + text(WIDTH - 4, y + 16, f"{one.waiting_most:,}", "end", BLUE)
            )
    bottom = _TOP + len(found.choices) * _ROW
    if found.at_most is not None:
        x = round(_LEFT + _BAR * found.at_most / most, 1)
        drawn.append(
            f'<path d="M{x} {_TOP - 8}V{bottom}" stroke="{GREY}" stroke-dasharray="2 3"/>'
            + text(x, _TOP - 10, f"at most {share(found.at_most)}", "middle")
        )
    drawn.append(text(4, bottom + 12, "* declared; > suggested"))
    return svg(bottom + 22, drawn)


def share(value: float) -> str:
    """Returns a share (0 to 1) as a percentage."""
    return f"{value * 100:.3g} %"


def _mark(found: Lateness, one: Choice) -> str:
    marks = ("*" if one.declared else "") + (">" if one.length == found.suggested else "")
    return f"{marks} " if marks else ""
