"""Timelines with lanes of bars and marks; positions are shares (0 to 1) of the drawn time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from vt_dagster.explore.key_history import KeyHistory, Lookups
from vt_dagster.provenance.explain_request import Candidate, Record, as_micros, as_time

_SHAPES = {
    "dot": "M-4 0A4 4 0 1 0 4 0A4 4 0 1 0 -4 0Z",
    "late": "M0 -6L6 0L0 6L-6 0Z",
    "tombstone": "M-5 -5L5 5M5 -5L-5 5",
    "corrected": "M-5 -5H5V5H-5Z",
}
"""Each kind of mark has its own shape, not only a colour, for colour-blind users."""


@dataclass(frozen=True)
class Bar:
    """A version with its validity.

    Args:
        begin, end: positions, 0 to 1.
        look: the CSS class.
        title: the tooltip.
        place: partition and offset of its record, ``0:17``.
        asset: the asset's name.
    """

    begin: float
    end: float
    look: str
    title: str
    place: str = ""
    asset: str = ""


@dataclass(frozen=True)
class Mark:
    """A record.

    Args:
        at: the position, 0 to 1.
        look: the kind of mark; title: the tooltip.
        place: partition and offset, ``0:17``.
        asset: the asset's name.
        known: whether it was known at the requested system time.
    """

    at: float
    look: str
    title: str
    place: str
    asset: str
    known: bool = True

    @property
    def shape(self) -> str:
        """The mark as an SVG path around the origin."""
        return _SHAPES[self.look]


@dataclass(frozen=True)
class Lane:
    """A row of the drawing."""

    label: str
    note: str = ""
    bars: Sequence[Bar] = ()
    marks: Sequence[Mark] = ()


@dataclass(frozen=True)
class Timeline:
    """A drawing from ``low`` to ``high``, epoch microseconds.

    Args:
        cursor: the position of the requested time, 0 to 1; None = no time requested.
    """

    low: int
    high: int
    lanes: Sequence[Lane] = field(default_factory=list[Lane])
    cursor: float | None = None


def of_key(history: KeyHistory, as_of: int | None) -> Timeline | None:
    """Draws a key's records and versions, and below them its lookups; None = it has no records."""
    records = history.found.records
    if not records:
        return None
    times = [as_micros(one.timestamp) for one in records]
    times += [as_micros(r.timestamp) for one in history.lookups for r in one.records]
    low, high = _with_margin(times)
    scale = _Scale(low, high)
    seen = [one for one in history.spans if one.begin < high and (one.end is None or one.end > low)]
    bars = [
        Bar(
            scale.at(one.begin),
            1.0 if one.end is None else scale.at(one.end),
            "answer"
            if history.answer is not None and one is history.answer
            else _band(turn, one.record),
            f"true from {_text(one.begin)} to {'now' if one.end is None else _text(one.end)}: "
            f"{said(one.record)}",
            _place(one.record),
            one.record.asset,
        )
        for turn, one in enumerate(seen)
    ]
    found = history.found
    note = f"{found.shown:,} of {found.count:,} records" if found.count > found.shown else ""
    revised = history.revisions or [0] * len(records)
    marks = [
        _mark(scale, one, history.was_known(one), "corrected" if revision else None)
        for one, revision in zip(records, revised, strict=True)
    ]
    lanes = [Lane(history.log.name, note, bars, marks)]
    lanes += [_lane_of(scale, history, one) for one in history.lookups]
    return Timeline(low, high, lanes, None if as_of is None else scale.at(as_of))


def of_candidates(record: Record, candidates: Sequence[Candidate]) -> Timeline | None:
    """Draws the versions around a record's time, one lane each; None = there are no versions."""
    drawn = [one for one in candidates if one.valid_from is not None]
    times = [as_micros(t) for one in drawn for t in (one.valid_from, one.valid_to) if t is not None]
    if not drawn:
        return None
    low, high = _with_margin([*times, as_micros(record.timestamp)])
    scale = _Scale(low, high)
    lanes = [_lane_of_candidate(scale, one) for one in drawn]
    return Timeline(low, high, lanes, scale.at(as_micros(record.timestamp)))


def _lane_of_candidate(scale: _Scale, one: Candidate) -> Lane:
    assert one.valid_from is not None
    end = one.valid_to if one.known else one.valid_to_now
    look = "answer" if one.chosen else "now" if one.chosen_now else "other"
    title = f"true from {one.valid_from:%Y-%m-%d %H:%M:%S} to {end or 'now'}: {said(one.record)}"
    last = 1.0 if end is None else scale.at(as_micros(end))
    bar = Bar(
        scale.at(as_micros(one.valid_from)), last, look, title, _place(one.record), one.record.asset
    )
    return Lane(_place(one.record), one.rule, [bar])


def _lane_of(scale: _Scale, history: KeyHistory, one: Lookups) -> Lane:
    note = one.note or f"{len(one.records):,} of {one.count:,} lookups"
    if one.revisions is not None and not one.note:
        note += f", {sum(r > 0 for r in one.revisions):,} of them corrections"
    revised = one.revisions or [0] * len(one.records)
    marks = [
        _mark(scale, record, history.was_known(record), "corrected" if revision else None)
        for record, revision in zip(one.records, revised, strict=True)
    ]
    return Lane(one.join, note, (), marks)


def _mark(scale: _Scale, record: Record, known: bool, look: str | None = None) -> Mark:
    if look is None:
        look = "late" if record.is_late or record.is_latest is False else "dot"
        look = "tombstone" if record.is_tombstone else look
    names = {"late": "late: ", "tombstone": "deleted: ", "corrected": "corrected: "}
    when = "" if record.recorded_at is None else f", recorded at {record.recorded_at:%Y-%m-%d %H:%M:%S}"
    title = f"{names.get(look, '')}{record.timestamp:%Y-%m-%d %H:%M:%S}{when}: {said(record)}"
    at = scale.at(as_micros(record.timestamp))
    return Mark(at, look, title, _place(record), record.asset, known)


def _band(turn: int, record: Record) -> str:
    return "deleted" if record.is_tombstone else "odd" if turn % 2 else "even"


def said(record: Record) -> str:
    """Returns up to 12 of a record's values in one line."""
    if record.is_tombstone:
        return "(deleted)"
    told = [f"{name}={value}" for name, value in list(record.values.items())[:12]]
    more = len(record.values) - len(told)
    return "  ".join([*told, *([f"and {more} more"] if more else [])])[:400]


def _place(record: Record) -> str:
    return f"{record.partition}:{record.offset}"


def _text(moment: int) -> str:
    return f"{as_time(moment):%Y-%m-%d %H:%M:%S}"


def _with_margin(times: Iterable[int]) -> tuple[int, int]:
    every = list(times)
    margin = max((max(every) - min(every)) // 25, 1_000_000)
    return min(every) - margin, max(every) + margin


class _Scale:
    def __init__(self, low: int, high: int) -> None:
        self._low, self._width = low, high - low

    def at(self, moment: int) -> float:
        """Returns the position of a time, 0 to 1; times outside are at the edge."""
        return round(min(1.0, max(0.0, (moment - self._low) / self._width)), 6)
