"""The history of a key: its records, their versions, the joins that looked it up, and a timeline.

A search of a log reads a bounded number of records, and counts those that are left out. A timeline has
lanes of bars and marks; positions are shares (0 to 1) of the drawn time.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import floor, isfinite, log10

import numpy as np
import pyarrow as pa

from vt_dagster.columns import IS_TOMBSTONE, RECORDED_AT, REVISION, TIMESTAMP, WINDOW_END, WINDOW_START
from vt_dagster.errors import counted
from vt_dagster.explore.warehouse_overview import Files
from vt_dagster.provenance.explain_aggregates import bounds_of
from vt_dagster.provenance.explain_request import (
    Candidate,
    Condition,
    Log,
    Record,
    Rejected,
    at_places,
    between,
    both,
    places,
    places_of,
)
from vt_dagster.provenance.explain_sources import horizons_of, rejected, validity
from vt_dagster.provenance.lateness import split_ranges
from vt_dagster.storage.arrow_reader import arrival_order, asset_names, fold, head_of, micros, of_key
from vt_dagster.storage.commit_log import Commit
from vt_dagster.topology.durations import epoch_micros, in_utc
from vt_dagster.topology.specification import CorrectedJoinSpec, LookupJoinSpec

# Record search


MOST = 200
"""Maximum number of records shown."""
LOOKED_AT = 20_000_000
"""Maximum number of records searched, the newest by arrival: takes seconds on two cores."""


@dataclass(frozen=True)
class RecordSearch:
    """The newest records that meet a condition, or those around a time.

    Args:
        records: oldest first.
        rows: key, time, place and tombstone flag of ``records``, as in the log.
        count: the number of searched records that meet the condition.
        earlier: how many of them are before the first shown record.
        later: how many of them are after the last shown record.
        looked_at: the number of searched records, the newest of the log.
        of: the number of all records of the log.
    """

    records: Sequence[Record]
    rows: pa.Table
    count: int
    earlier: int
    later: int
    looked_at: int
    of: int

    @property
    def shown(self) -> int:
        """The number of shown records."""
        return len(self.records)

    @property
    def whole(self) -> bool:
        """Whether the whole log was searched."""
        return self.looked_at >= self.of


def newest(
    log: Log,
    condition: Condition,
    *,
    around: int | None = None,
    by_arrival: bool = False,
    most: int = MOST,
    looked_at: int = LOOKED_AT,
) -> RecordSearch:
    """Returns the newest records that meet a condition, by timestamp or by arrival, and their number.

    Reads the narrow columns in batches and keeps the newest records; then reads only these with all
    columns.

    Args:
        around: epoch microseconds: half of the records are the newest up to that time (inclusive), the
            others the oldest after it.
        by_arrival: whether newest means last by arrival; not together with ``around``.
        most: maximum number of records returned.
        looked_at: maximum number of records searched.
    """
    ends, total = log.commit.next_offset, log.commit.total
    share = min(1.0, looked_at / total) if total else 1.0
    ranges = {p: (end - round(end * share), end) for p, end in ends.items()}
    names = [*log.key, TIMESTAMP, RECORDED_AT, IS_TOMBSTONE]
    kept = log.rows(condition, {}, {}, names)
    count = earlier = later = 0
    for start, end in split_ranges(ranges):
        rows = log.rows(condition, start, end, names)
        count += rows.num_rows
        rows = pa.concat_tables([kept, rows], promote_options="default")
        kept, before, after = _newest(rows, around, by_arrival, most)
        earlier, later = earlier + before, later + after
    by_place = {one.place: one for one in log.at(places_of(kept))}
    records = [by_place[place] for place in places_of(kept) if place in by_place]
    seen = sum(end - start for start, end in ranges.values())
    return RecordSearch(records, kept, count, earlier, later, seen, total)


def _newest(
    rows: pa.Table, around: int | None, by_arrival: bool, most: int
) -> tuple[pa.Table, int, int]:
    """Returns the rows to keep, oldest first, and how many are left out before and after them."""
    moment = micros(rows, TIMESTAMP)
    rank = np.lexsort((*arrival_order(rows), *([] if by_arrival else [moment])))
    first, last = len(rank) - most, len(rank)
    if around is not None:
        split = int(np.searchsorted(moment[rank], around, side="right"))
        first, last = split - most // 2, split + most // 2
    first, last = max(0, first), min(last, len(rank))
    return rows.take(pa.array(rank[first:last])), first, len(rank) - last


# Key history


LOOKUPS = 60
"""Maximum number of lookups drawn for each join."""
QUARANTINE = 1_000_000
"""A quarantine with more rows is not searched."""


@dataclass(frozen=True)
class Span:
    """A version, or the row of a plain table: from ``begin`` (inclusive) to ``end`` (exclusive; None =
    current), epoch microseconds."""

    record: Record
    begin: int
    end: int | None


@dataclass(frozen=True)
class Lookups:
    """Results of a join that looked up this key.

    Args:
        join: the asset's name.
        records: the newest results in the time that is shown.
        count: the number of all results in that time.
        revisions: how often each result was corrected; None = not a corrected join.
        note: the reason why there are no results; empty if there is none.
    """

    join: str
    records: Sequence[Record] = ()
    count: int = 0
    revisions: Sequence[int] | None = None
    note: str = ""


@dataclass(frozen=True)
class KeyHistory:
    """A key of an asset, by current knowledge and as known at a system time.

    Args:
        log: the asset's log.
        found: the key's records by current knowledge.
        around: the time around which ``found`` was selected; None = the newest records.
        revisions: corrected joins only: how often the row was corrected as of each record.
        known: the system time (inclusive), epoch microseconds; None = now.
        then: the table's commit as of ``known``.
        spans: the versions as known then.
        answer: the row that is valid at the requested time, as known then; None = none.
        horizon: versions that ended before it have expired, epoch microseconds; None = no expiry.
        lookups: the joins that looked up the key.
        rejected: rows in quarantine that mention the key.
        rejected_in_all: the number of all such rows.
    """

    log: Log
    found: RecordSearch
    around: int | None
    revisions: Sequence[int] | None
    known: int | None
    then: Commit
    spans: Sequence[Span]
    answer: Span | None
    horizon: int | None
    lookups: Sequence[Lookups]
    rejected: Sequence[Rejected]
    rejected_in_all: int

    @property
    def window(self) -> tuple[int, int] | None:
        """The bounds of the key's window, epoch microseconds; None = its rows have no windows."""
        log = self.log
        if not {WINDOW_START, WINDOW_END} <= {*log.key} or not self.found.records:
            return None
        kinds = (log.columns.field(one).type for one in (WINDOW_START, WINDOW_END))
        return (
            bounds_of(self.found.records[0].values) if all(map(pa.types.is_timestamp, kinds)) else None
        )

    def was_known(self, record: Record) -> bool:
        """Returns whether a record, or a result of a join, was in its log as of ``known``."""
        if record.asset == self.log.name:
            return record.offset < self.then.next_offset.get(record.partition, 0)
        recorded = record.recorded_at
        return self.known is None or recorded is None or epoch_micros(recorded) <= self.known


def key_history(
    warehouse: str,
    name: str,
    key: Sequence[str],
    as_of: int | None,
    known: int | None,
    around: int | None,
) -> KeyHistory:
    """Returns the history of a key.

    Args:
        as_of: event time, epoch microseconds, inclusive; None = the latest.
        known: system time, epoch microseconds, inclusive; None = now.
        around: selects the records around this time; None = the newest, or the records around ``as_of``
            if the newest do not reach it.
    """
    log = Log.open(warehouse, name)
    then = log if known is None else Log.open(warehouse, name, known)
    plain, condition = log.head.shape.kind == "table", log.of_key(key)
    as_of, around = (as_of, None if plain else around) if log.versioned else (None, around)
    found = newest(log, condition, around=around, by_arrival=plain)
    if as_of is not None and _outside(found, as_of):
        around, found = as_of, newest(log, condition, around=as_of)
    # Versions are made of the records known then. These are fewer, so the search reaches as far or
    # further back.
    mine = found if then is log else newest(then, condition, around=around, by_arrival=plain)
    spans = answering = _spans(then, mine, condition)
    if as_of is None and mine.later:  # the current version is not among the shown ones
        answering = _spans(then, newest(then, condition, most=1), condition)
    horizons = horizons_of(log, then.commit) if log.versioned else {}
    refused, count, operator = list[Rejected](), 0, log.specification
    if operator is None and Files.of(posixpath.join(log.root, "quarantine")).rows <= QUARANTINE:
        refused, count = rejected(log, key)
    corrects = isinstance(operator, CorrectedJoinSpec)
    return KeyHistory(
        log,
        found,
        around,
        _revisions(log, found.records) if corrects else None,
        known,
        then.commit,
        spans,
        _answer(answering, as_of, horizons),
        max(horizons.values(), default=None),
        _all_lookups(log, key, found, as_of),
        refused,
        count,
    )


def _outside(found: RecordSearch, moment: int) -> bool:
    """Returns whether a time lies outside of the shown records, on a side where records are left
    out."""
    if not found.records:
        return False
    first, last = found.records[0].micros, found.records[-1].micros
    return (moment < first and found.earlier > 0) or (moment >= last and found.later > 0)


def _spans(log: Log, found: RecordSearch, condition: Condition) -> list[Span]:
    """Returns the versions that records of a key make, by the rules of the versioned table."""
    rows = found.rows
    if log.head.shape.kind == "stream" or not rows.num_rows:
        return []
    limits = horizons_of(log, log.commit) if log.versioned else None
    on = log.head.shape.new_version_on
    if on is not None:
        # A version may have begun before the records that are shown.
        only = dict.fromkeys([*log.key, TIMESTAMP, RECORDED_AT, IS_TOMBSTONE, *on])
        rows = log.rows(condition, only=list(only))
    versions = validity(fold(None, rows, log.key, limits, on))
    by_place = {one.place: one for one in found.records}
    if on is not None:
        since = min(one.micros for one in found.records)
        missing = {p for p, _, end in versions if end is None or end > since} - by_place.keys()
        by_place |= {one.place: one for one in log.at(missing)}
    spans = [Span(by_place[p], begin, end) for p, begin, end in versions if p in by_place]
    if found.later and on is None:  # the record that ends the last version was left out
        spans = [one for one in spans if one.end is not None]
    return sorted(spans, key=lambda one: one.begin)


def _answer(spans: Sequence[Span], as_of: int | None, horizons: Mapping[int, int]) -> Span | None:
    """Returns the row as of a time; may be a tombstone. Before the horizon of its partition only a
    current version is returned."""
    for one in reversed(spans):
        if as_of is None:
            return one if one.end is None else None
        if one.begin <= as_of and (one.end is None or as_of < one.end):
            horizon = horizons.get(one.record.partition, as_of)
            return one if one.end is None or as_of >= horizon else None
    return None


# ------------------------------------------------------------------------------- lookups of the key


def _all_lookups(
    log: Log, key: Sequence[str], found: RecordSearch, around: int | None
) -> list[Lookups]:
    """Returns the lookups of a key by joins, in the time range of the shown records."""
    if log.head.shape.kind == "stream" or not found.records:
        return []
    base, lookups = posixpath.basename(log.name), list[Lookups]()
    times = [one.micros for one in found.records]
    low, last = min(times), max(times)
    newest_time = max(log.commit.stream_time.values(), default=low)
    high = last if found.later else max(newest_time, last)
    for name in asset_names(log.warehouse):
        _, head = head_of(log.warehouse, name)
        join = head.shape.specification
        if not isinstance(join, LookupJoinSpec) or join.right != base:
            continue
        if head.logs.get(base, log.head.log) == log.head.log:
            shown = between(low, high)
            lookups.append(_lookups(Log.open(log.warehouse, name), key, join, shown, around))
    return lookups


def _lookups(
    join: Log, key: Sequence[str], specification: LookupJoinSpec, shown: Condition, around: int | None
) -> Lookups:
    names: Sequence[str] = join.key
    corrects = isinstance(specification, CorrectedJoinSpec)
    if corrects:
        stream = join.input(specification.left)
        names = () if stream is None else stream.key
    if len(names) != len(key) or not {*names} <= {*join.columns.names}:
        return Lookups(join.name, note="its rows do not have the key of its stream")
    same: Condition = lambda columns: of_key(join.path, columns, names, key)  # noqa: E731
    some = newest(join, both(same, shown), around=around, most=LOOKUPS)
    revisions = _revisions(join, some.records) if corrects else None
    return Lookups(join.name, some.records, some.count, revisions)


def _revisions(join: Log, records: Sequence[Record]) -> list[int]:
    """Returns how often each row was corrected as of its record."""
    if not records:
        return []
    rows = join.rows(*at_places(places(records)), [REVISION])
    found = dict(zip(places_of(rows), rows.column(REVISION).to_pylist(), strict=True))
    return [found.get(one.place) or 0 for one in records]


# Timeline


_FRACTION = re.compile(r"[+-]?\d{4,6}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{1,6}")
"""A time with a fraction of a second, as records have it."""
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


def timeline_of_key(history: KeyHistory, as_of: int | None) -> Timeline | None:
    """Draws a key's records and versions, and below them its lookups; None = it has no records."""
    records = history.found.records
    if not records:
        return None
    times = [one.micros for one in records]
    times += [record.micros for one in history.lookups for record in one.records]
    window = history.window
    scale = _Scale([*times, *(window or ())])
    low, high = scale.low, scale.high
    seen = [one for one in history.spans if one.begin < high and (one.end is None or one.end > low)]
    what, bars = "true" if window is None else "window", list[Bar]()
    for turn, one in enumerate(seen):
        look = "deleted" if one.record.is_tombstone else "odd" if turn % 2 else "even"
        look = "answer" if one is history.answer else look
        bars.append(scale.bar(one.record, *(window or (one.begin, one.end)), look, what))
    found = history.found
    note = f"{found.shown:,} of {counted(found.count, 'record')}" if found.count > found.shown else ""
    lanes = [Lane(history.log.name, note, bars, _marks(scale, history, records, history.revisions))]
    lanes += [_lane_of(scale, history, one) for one in history.lookups]
    return Timeline(low, high, lanes, None if as_of is None else scale.at(as_of))


def of_candidates(record: Record, candidates: Sequence[Candidate]) -> Timeline | None:
    """Draws the versions around a record's time, one lane each; None = there are no versions."""
    drawn = [one for one in candidates if one.valid_from is not None]
    times = [epoch_micros(t) for one in drawn for t in (one.valid_from, one.valid_to) if t is not None]
    if not drawn:
        return None
    scale = _Scale([*times, record.micros])
    lanes = [_lane_of_candidate(scale, one) for one in drawn]
    return Timeline(scale.low, scale.high, lanes, scale.at(record.micros))


def _lane_of_candidate(scale: _Scale, one: Candidate) -> Lane:
    assert one.valid_from is not None
    end = one.valid_to if one.known else one.valid_to_now
    look = "answer" if one.chosen else "now" if one.chosen_now else "other"
    begin, until = epoch_micros(one.valid_from), None if end is None else epoch_micros(end)
    return Lane(str(one.record.place), one.rule, [scale.bar(one.record, begin, until, look)])


def _lane_of(scale: _Scale, history: KeyHistory, one: Lookups) -> Lane:
    note = one.note or f"{len(one.records):,} of {counted(one.count, 'lookup')}"
    if one.revisions is not None and not one.note:
        note += f", {counted(sum(r > 0 for r in one.revisions), 'correction')} among them"
    return Lane(one.join, note, (), _marks(scale, history, one.records, one.revisions))


def _marks(
    scale: _Scale, history: KeyHistory, records: Sequence[Record], revisions: Sequence[int] | None
) -> list[Mark]:
    names = {"late": "late: ", "tombstone": "deleted: ", "corrected": "corrected: "}
    marks: list[Mark] = []
    for record, revision in zip(records, revisions or [0] * len(records), strict=True):
        look = "late" if record.is_late or record.is_latest is False else "dot"
        look = "corrected" if revision else "tombstone" if record.is_tombstone else look
        recorded = record.recorded_at
        when = "" if recorded is None else f", recorded at {time_text(epoch_micros(recorded))}"
        title = f"{names.get(look, '')}{time_text(record.micros)}{when}: {row_text(record)}"
        known = history.was_known(record)
        marks.append(Mark(scale.at(record.micros), look, title, str(record.place), record.asset, known))
    return marks


def row_text(record: Record) -> str:
    """Returns up to 12 of a record's values in one line."""
    if record.is_tombstone:
        return "(deleted)"
    texts = [f"{name}={value_text(value)}" for name, value in list(record.values.items())[:12]]
    more = len(record.values) - len(texts)
    return "  ".join([*texts, *([f"and {more} more"] if more else [])])[:400]


def value_text(value: object) -> str:
    """Returns a value in short form: a number with a fraction has about 6 digits, a time whole
    seconds."""
    if isinstance(value, float) and isfinite(value) and value != int(value):
        digits = 5 - floor(log10(abs(value)))
        return f"{value:.6g}" if digits > 10 else f"{value:.{max(1, digits)}f}".rstrip("0")
    if isinstance(value, str) and _FRACTION.fullmatch(value):
        return value.partition(".")[0]
    return "null" if value is None else str(value)[:2000]


def exact_text(value: object) -> str:
    """Returns the exact text of a number or time that ``value_text`` shortens; empty if it does not."""
    shortened = isinstance(value, float | str) and len(str(value)) <= 2000
    return str(value) if shortened and str(value) != value_text(value) else ""


def exact_time(moment: int) -> str:
    """Returns a time in UTC with its fraction of a second; empty if it has none."""
    text = time_text(moment, exact=True)
    return text if text != time_text(moment) else ""


def time_text(moment: int, exact: bool = False) -> str:
    """Returns a time in UTC, as values show times.

    Args:
        moment: epoch microseconds.
        exact: with its fraction of a second, if it has one.
    """
    text = in_utc(moment).replace("T", " ").removesuffix("Z")
    return text if exact else text.split(".")[0]


class _Scale:
    """The drawn time: that of all given times, and a margin."""

    def __init__(self, times: Sequence[int]) -> None:
        margin = max((max(times) - min(times)) // 25, 1_000_000)
        self.low, self.high = min(times) - margin, max(times) + margin

    def at(self, moment: int) -> float:
        """Returns the position of a time, 0 to 1; times outside are at the edge."""
        return round(min(1.0, max(0.0, (moment - self.low) / (self.high - self.low))), 6)

    def bar(self, record: Record, begin: int, end: int | None, look: str, what: str = "true") -> Bar:
        """Returns the bar of a version; end None = current."""
        until = "now" if end is None else time_text(end)
        title = f"{what} from {time_text(begin)} to {until}: {row_text(record)}"
        last = 1.0 if end is None else self.at(end)
        return Bar(self.at(begin), last, look, title, str(record.place), record.asset)
