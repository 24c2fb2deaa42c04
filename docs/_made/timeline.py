"""A scenario as a picture: its records by arrival and timestamp, and what came of each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from html import escape
from typing import Any

from vt_dagster.drawing import BLUE, GREY, RED

GREEN, AMBER = "#2e9e6b", "#c77d0a"
COLOURS = {"stream": BLUE, "left": BLUE, "table": AMBER, "right": AMBER}
WIDTH, LEFT, RIGHT, ROW = 860, 210, 600, 19
REFUSED = -(2**63)

Entry = Mapping[str, Any]


def text(x: float, y: float, said: str, anchor: str = "start", colour: str = "currentColor") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}">{escape(said)}</text>'


def svg(width: int, height: int, about: str, drawn: Sequence[str]) -> str:
    """A picture in the page itself, so that its texts have the page's colour."""
    return (
        f'<svg class="drawn" viewBox="0 0 {width} {height}" role="img" aria-label="{escape(about)}" '
        f'xmlns="http://www.w3.org/2000/svg">{"".join(drawn)}</svg>'
    )


def moment(time: int, coarse: bool) -> str:
    """A time as people read it: milliseconds, or hours and minutes where all of them are large."""
    if not coarse:
        return str(time)
    return str(timedelta(milliseconds=time)).removesuffix(":00")


def shown(value: str | None) -> str:
    return "deleted" if value is None else value


class Axis:
    """From times to places."""

    def __init__(self, times: Sequence[int]) -> None:
        self.low, self.high = min(times), max(times)
        self.coarse = self.high >= 1_000_000
        self.scale = (RIGHT - LEFT - 70) / max(1, self.high - self.low)

    def x(self, time: int) -> float:
        return LEFT + 15 + (min(max(time, self.low), self.high) - self.low) * self.scale

    def drawn(self, bottom: float) -> Iterator[str]:
        distinct = 4 if self.high - self.low >= 4 else max(1, self.high - self.low)
        for step in range(distinct + 1):
            time = self.low + (self.high - self.low) * step // distinct
            yield f'<path d="M{self.x(time):.1f} 22V{bottom}" stroke="{GREY}" stroke-opacity="0.25"/>'
            yield text(self.x(time), bottom + 14, moment(time, self.coarse), "middle", GREY)


def picture(scenario: Mapping[str, Any]) -> str:
    """Rows are records in order of arrival; to the right, time as their timestamps have it."""
    records, expected = scenario["records"], scenario["expected"]
    store = scenario["operator"] == "versioned_store"
    times = [t for r in records for t in (r.get("timestamp"), r.get("as_of")) if t is not None]
    if not store:
        ends = ("timestamp", "window_start", "window_end")
        times += [e[k] for e in expected for k in ends if e.get(k) is not None]
    axis = Axis(times or [0])
    drawn: list[str] = []
    y, newest, path = 32.0, -1, ""
    for number, record in enumerate(records):
        if store:
            results = [expected[number]] if number < len(expected) else []
        else:
            results = [e for e in expected if e["trigger"] == number]
        time = record.get("timestamp", record.get("as_of"))
        asked = record.get("call") == "get"
        colour = GREY if asked else _colour(record)
        drawn.append(text(4, y + 4, f"{number + 1}", colour=GREY))
        drawn.append(text(24, y + 4, _told(record, axis.coarse)[:34], colour=colour))
        if time is not None and not asked:
            newest = max(newest, time)
            path += f"V{y}H{axis.x(newest):.1f}" if path else f"M{axis.x(newest):.1f} {y}"
        for turn, result in enumerate(results):
            drawn += _result(result, y + turn * ROW, axis, store)
        if time is not None:
            drawn.append(_dot(axis.x(time), y, colour, hollow=asked or _is_null(record)))
        y += ROW * max(1, len(results))
    drawn.insert(0, f'<path d="{path}" fill="none" stroke="{RED}" stroke-dasharray="2 4"/>')
    drawn[:0] = axis.drawn(y)
    bottom = y + 24
    drawn.append(text(4, 12, "records, in order of arrival", colour=GREY))
    unit = "hours:minutes" if axis.coarse else "ms"
    said = f"at their timestamps, {unit}; dotted: the largest so far"
    drawn.append(text(LEFT + 15, 12, said, colour=GREY))
    drawn.append(text(RIGHT + 8, 12, "answers" if store else "results", colour=GREY))
    for bar in _versions(scenario.get("final_store") or [], axis, bottom):
        drawn.append(bar)
    height = int(bottom + ROW * len({e["key"] for e in scenario.get("final_store") or []}) + 8)
    return svg(WIDTH, height, f"timeline of {scenario['name']}", drawn)


def _dot(x: float, y: float, colour: str, hollow: bool) -> str:
    fill = "var(--md-default-bg-color, #fff)" if hollow else colour
    style = f"fill:{fill};stroke-width:1.5"
    return f'<circle cx="{x:.1f}" cy="{y}" r="4" style="{style}" stroke="{colour}"/>'


def _colour(record: Entry) -> str:
    return COLOURS.get(record.get("input", "table"), BLUE)


def _is_null(record: Entry) -> bool:
    return record.get("call") != "get" and record.get("value") is None


def _told(record: Entry, coarse: bool) -> str:
    key = "no key" if record["key"] is None else record["key"]
    if "call" in record:
        at = "" if "as_of" not in record else f" as of {record['as_of']}"
        value = f" {shown(record['value'])}" if "value" in record else ""
        when = f" @ {record['timestamp']}" if "timestamp" in record else ""
        return f"{record['call']} {key}{value}{at}{when}"
    return f"{record['input']} {key}: {shown(record['value'])} @ {moment(record['timestamp'], coarse)}"


def _result(result: Entry, y: float, axis: Axis, store: bool) -> Iterator[str]:
    if store:
        yield text(RIGHT + 8, y + 4, _answer(result), colour=GREEN)
        return
    if result.get("window_start") is not None:
        left, right = axis.x(result["window_start"]), axis.x(result["window_end"])
        yield (
            f'<rect x="{left:.1f}" y="{y - 6}" width="{max(2.0, right - left):.1f}" height="12" '
            f'fill="{GREEN}" fill-opacity="0.18"/>'
        )
    at = axis.x(result["timestamp"])
    fill = "none" if result["value"] is None else GREEN
    yield (
        f'<path d="M{at:.1f} {y - 8}l8 8l-8 8l-8 -8z" fill="{fill}" fill-opacity="0.5" '
        f'stroke="{GREEN}"/>'
        f'<path d="M{at + 10:.1f} {y}H{RIGHT}" stroke="{GREEN}" stroke-opacity="0.3"/>'
    )
    key = "no key" if result["key"] is None else result["key"]
    window = ""
    if result.get("window_start") is not None:
        ends = (moment(result[k], axis.coarse) for k in ("window_start", "window_end"))
        window = f" in {' to '.join(ends)}"
    when = moment(result["timestamp"], axis.coarse)
    yield text(RIGHT + 8, y + 4, f"{key}: {shown(result['value'])}{window} @ {when}", colour=GREEN)


def _answer(result: Entry | None) -> str:
    if result is None:
        return "nothing"
    if "value" in result:
        return f"{result['value']}, valid from {result['timestamp']}"
    ends = result["valid_to"]
    return {-1: "put: now the latest", REFUSED: "refused: too old"}.get(ends, f"put: valid to {ends}")


def _versions(store: Sequence[Entry], axis: Axis, top: float) -> Iterator[str]:
    """What the store holds in the end: a lane for each key."""
    for lane, key in enumerate(sorted({str(e["key"]) for e in store})):
        y = top + lane * ROW
        yield text(24, y + 12, f"in the end, {key}:", colour=GREY)
        for version in (e for e in store if str(e["key"]) == key):
            left = axis.x(version["valid_from"])
            right = RIGHT - 4 if version["valid_to"] is None else axis.x(version["valid_to"])
            yield (
                f'<rect x="{left:.1f}" y="{y + 2}" width="{max(14.0, right - left - 1):.1f}" '
                f'height="14" fill="{AMBER}" fill-opacity="0.25" stroke="{AMBER}"/>'
            )
            yield text(left + 4, y + 13, str(version["value"]))
