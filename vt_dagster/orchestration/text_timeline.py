"""The summary of a run as text, which Dagster shows without a click; a picture needs one.

Text is shown on every page. Markdown of fewer than 1,000 characters is shown on an asset's pages, and
as a link in the log of a run; so a drawing must be small.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone

from vt_dagster.topology.durations import spoken

SHOWN_AT_ONCE = 999
"""The maximal length (UTF-16 characters) of Markdown that Dagster shows without a click."""
EDGES = [0, 60, 600, 3_600, 21_600, 86_400, 604_800, 2_592_000]
"""Edges of the lateness buckets, in seconds; the first bucket holds records that are not late."""
LABELS = ["0", "< 1m", "< 10m", "< 1h", "< 6h", "< 1d", "< 7d", "< 30d", "more"]
_CELLS, _LABEL = 50, 8


@dataclass
class Lane:
    """One key: its versions (from, to, deleted), and its records (timestamp, out of order)."""

    key: str
    bars: list[tuple[int, int | None, bool]] = field(default_factory=list[tuple[int, int | None, bool]])
    marks: list[tuple[int, bool]] = field(default_factory=list[tuple[int, bool]])
    of: int = 0
    """How many records it has in the shown time range, if not all are drawn."""


def counts_text(counts: Mapping[str, int], rows: int | None, stream_time: int | None) -> str:
    """Returns the counts of a run in one line.

    Args:
        counts: records by outcome, ``in`` first; in the order shown.
        rows: of the table after the run.
        stream_time: after the run, epoch µs.
    """
    parts = [f"{number:,} {name.replace('_', ' ')}" for name, number in counts.items()]
    said = f"records: {', '.join(parts)}"
    if rows is not None:
        said += f"; rows now: {rows:,}"
    return said if stream_time is None else f"{said}; stream time: {moment_of(stream_time)} UTC"


def lateness_text(lateness: Sequence[float], limits: Mapping[str, timedelta], of: int) -> str:
    """Returns how far behind stream time records arrived, in one line.

    Args:
        lateness: of a sample, in seconds.
        limits: the accepted lateness, by name.
        of: how many records the sample was drawn from.
    """
    counts = in_buckets(lateness)
    many = ", ".join(f"{LABELS[n]}: {count:,}" for n, count in enumerate(counts) if count)
    some = f"{len(lateness):,} of {of:,}" if of > len(lateness) else f"{of:,}"
    allowed = "".join(f"; {name} {spoken(limit)}" for name, limit in limits.items())
    return f"lateness of {some} records behind stream time: {many}{allowed}"


def sketch(lanes: Sequence[Lane], odd: str, of: int) -> str:
    """Returns the timeline as Markdown text: for each key a line of records and a line of versions.

    Drops keys from the end until the text is short enough to be shown without a click.

    Args:
        odd: what a cross stands for.
        of: how many records the run has; the legend shows how many are drawn.
    """
    made = ""
    for kept in range(len(lanes), 0, -1):
        made = _sketch(lanes[:kept], odd, of)
        if len(made.encode("utf-16-le")) // 2 <= SHOWN_AT_ONCE:
            break
    return made


def drawn_of(lanes: Sequence[Lane], of: int) -> str:
    """Returns how many records of a run are drawn: ``60 of 243 records of this run``."""
    return f"{sum(len(lane.marks) for lane in lanes):,} of {of:,} records of this run"


def _sketch(lanes: Sequence[Lane], odd: str, of: int) -> str:
    times = [moment for lane in lanes for moment, _ in lane.marks]
    low, high = min(times), max(times)

    def cell(moment: int) -> int:
        return min(max(0, (moment - low) * (_CELLS - 1) // max(1, high - low)), _CELLS - 1)

    start, end = moment_of(low), moment_of(high)
    lines = [" " * (_LABEL + 1) + f"{start}{end:>{_CELLS - len(start)}}"]
    for lane in lanes:
        name = "".join(c if c.isprintable() and c != "`" else "?" for c in lane.key[:_LABEL])
        lines += [
            f"{name:<{_LABEL}} {_records(lane, cell)}",
            f"{'':<{_LABEL}} {_versions(lane, cell, low, high)}",
        ]
    legend = (
        f"{drawn_of(lanes, of)}. o: a record at its timestamp (UTC), X: {odd}. "
        "|: a version begins, -: it is valid, .: deleted."
    )
    return "\n".join(["```text", *(line.rstrip() for line in lines), "```", "", legend])


def _records(lane: Lane, cell: Callable[[int], int]) -> str:
    row = [" "] * _CELLS
    for moment, is_odd in sorted(lane.marks, key=lambda mark: mark[1]):
        row[cell(moment)] = "X" if is_odd else "o"
    return "".join(row)


def _versions(lane: Lane, cell: Callable[[int], int], low: int, high: int) -> str:
    row = [" "] * _CELLS
    for start, end, deleted in sorted(lane.bars, key=lambda bar: bar[0]):
        if start > high or (end is not None and end <= low):
            continue
        last = _CELLS - 1 if end is None or end > high else cell(end)
        for place in range(cell(start), last + 1):
            row[place] = "." if deleted else "-"
        if start >= low:
            row[cell(start)] = "." if deleted else "|"
    return "".join(row)


def in_buckets(lateness: Sequence[float]) -> list[int]:
    """Returns how many records are in each bucket of ``LABELS``."""
    counts = [0] * len(LABELS)
    for seconds in lateness:
        counts[bucket_of(seconds)] += 1
    return counts


def bucket_of(seconds: float) -> int:
    """Returns the bucket of a lateness in seconds."""
    return 0 if seconds <= 0 else sum(seconds >= edge for edge in EDGES)


def moment_of(micros: int) -> str:
    """Returns a time to the minute, or a text for times outside of Python's range."""
    try:
        return f"{_EPOCH + timedelta(microseconds=micros):%Y-%m-%d %H:%M}"
    except OverflowError:
        return "before the year 1" if micros < 0 else "after the year 9999"


_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)
