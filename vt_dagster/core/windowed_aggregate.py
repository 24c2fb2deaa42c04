"""Windowed aggregates: a stream's records by key and window, with a grace period (KIP-328).

An open window is updated; a record whose window has closed is dropped from it and counted. Stream
time T is the largest timestamp so far of a record that counts (``moves_stream_time``), including the
record itself, per partition. The state for the next run contains the open windows, and those that a
later record reads.

**Session windows.** A session grows and merges as records arrive, and closes as stream time advances.
The effect of a record depends on all records before it: merging is sequential, and no window expression
can compute it. A Python kernel over sorted Arrow batches does. It holds only the open sessions of one
key in memory, however many records or batches a key has.

**Sliding windows.** A record creates a window when it enters or has just left it, from the adjacent
windows, and only while the window is open. The effect of a record depends on all records before it, and
no window expression can compute it. A Python kernel over sorted Arrow batches does. It holds in memory
only the windows of one key that a later record may read, however many records or batches a key has.

Kafka's times are whole milliseconds, and a window that a record has just left starts one millisecond
later. A record's time and stream time are therefore rounded down to milliseconds here.
"""

from __future__ import annotations

import operator
import sys
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from decimal import Context
from functools import partial
from itertools import repeat
from typing import Any, NamedTuple, cast

import pyarrow  # pyright: ignore[reportMissingTypeStubs]
from pyspark import cloudpickle
from pyspark.sql import Column, DataFrame
from pyspark.sql import Window as W
from pyspark.sql import functions as F
from pyspark.sql.types import IntegerType, LongType, StructField, StructType

from vt_dagster.columns import (
    ARRIVAL,
    CLOSED_UP_TO,
    INPUT,
    INPUT_OFFSET,
    INPUT_PARTITION,
    IS_TOMBSTONE,
    ORDER,
    OUTCOME,
    PARTITION,
    TIMESTAMP,
    TURN,
    WINDOW_END,
    WINDOW_START,
)
from vt_dagster.core.arrival_order import Outcome, has_key, micros, repartitioned, union, with_columns
from vt_dagster.core.processor import (
    BEFORE_ANY_RUN,
    Counts,
    Input,
    Processor,
    ResultOrder,
    RunContext,
    RunCounts,
    RunPlan,
    RunTimes,
    TimePolicy,
    Times,
    folded,
    is_order_independent,
)
from vt_dagster.core.source_records import partition_of_key
from vt_dagster.core.stream_time import (
    PASSED,
    STREAM_TIME,
    Bounds,
    Timed,
    exact_chunks,
    passed,
    undecided_chunks,
    with_stream_time,
    with_time_where_needed,
)
from vt_dagster.topology.durations import DAY, FIRST_TIME, LAST_TIME, Calendar, length_at
from vt_dagster.topology.expressions import Accumulator, Aggregates
from vt_dagster.topology.operators import WindowedAggregate
from vt_dagster.topology.windows import (
    HoppingWindow,
    SessionWindow,
    SlidingWindow,
    TumblingWindow,
    Window,
)

# Tumbling and hopping windows


def assign_windows(
    fresh: DataFrame, key: Sequence[str], window: TumblingWindow | HoppingWindow
) -> DataFrame:
    """Returns each record once per window that contains it, with the window's start and end.

    A record without a key, which is dropped, gives one row without a window. Kafka has no windows that
    start before 1970; here such windows contain records from before 1970 only. A window begins in the
    year 1 at the earliest, and ends in the year 9999 at the latest.
    """
    if isinstance(window, TumblingWindow):
        start, end = bounds_of(window)
        rows = fresh
    else:
        first, last = starts(window)
        first = F.when(has_key(key), first).otherwise(last)
        every = F.sequence(first, last, micros(window.advance))
        rows = fresh.withColumn(WINDOW_START, F.explode(every))
        start = F.col(WINDOW_START)
        end = start + micros(window.size)
    within = F.greatest(start, F.lit(FIRST_TIME)), F.least(end, F.lit(LAST_TIME))
    rows = with_columns(rows, dict(zip((WINDOW_START, WINDOW_END), within, strict=True)))
    return with_columns(rows, dict(zip((WINDOW_START, WINDOW_END), ends(key), strict=True)))


def bounds_of(window: TumblingWindow) -> tuple[Column, Column]:
    """Returns start and end of a record's window, in epoch microseconds."""
    if isinstance(window.bounded_by, Calendar):
        return calendar_bounds(window.bounded_by)
    size, at = micros(window.bounded_by), F.unix_micros(TIMESTAMP)
    start = at - F.pmod(at, size)
    return start, start + size


def starts(window: HoppingWindow) -> tuple[Column, Column]:
    """Returns the starts of a record's first and last window, in epoch microseconds."""
    size, advance, at = micros(window.size), micros(window.advance), F.unix_micros(TIMESTAMP)
    last = at - F.pmod(at, advance)
    least = at - size + advance
    first = least - F.pmod(least, advance)
    return F.when(at >= 0, F.greatest(first, F.lit(0))).otherwise(first), last


def windows_of_record(window: HoppingWindow) -> int | None:
    """Returns the number of windows that contain a record; None = it depends on the record."""
    size, advance = window.size, window.advance
    if not isinstance(size, timedelta) or not isinstance(advance, timedelta) or size % advance:
        return None
    return size // advance


def calendar_bounds(calendar: Calendar) -> tuple[Column, Column]:
    """Returns start and end of the local day, week or month of a record, in epoch microseconds.

    Local times are represented as UTC timestamps with the same digits, and their days as dates. Only
    functions of dates are used, because functions of timestamps would read the session's time zone.
    """
    size, zone = calendar
    at, local = F.unix_micros(TIMESTAMP), F.unix_micros(F.from_utc_timestamp(TIMESTAMP, zone))
    days = F.call_function("div", local - F.pmod(local, F.lit(DAY)), F.lit(DAY))
    today = F.date_from_unix_date(days.cast("int"))
    if size == "1 month":
        first = F.trunc(today, "month")
        near = [F.add_months(first, n) for n in range(-1, 3)]
    else:
        first, step = (F.trunc(today, "week"), 7) if size == "1 week" else (today, 1)
        near = [F.date_add(first, n * step) for n in range(-1, 3)]
    midnights = [F.timestamp_micros(F.unix_date(one).cast("long") * DAY) for one in near]
    # Of a midnight that occurs twice Spark returns the first instant; a midnight that the clock skips
    # it moves forward by the length of the gap.
    found = [F.unix_micros(F.to_utc_timestamp(one, zone)) for one in midnights]
    # By instants, not by local dates: a clock that is put back over midnight repeats the day before.
    start = F.greatest(*[F.when(one <= at, one) for one in found])
    return start, F.least(*[F.when(one > at, one) for one in found])


def closes_at(window: TumblingWindow | HoppingWindow, end: Column) -> Column:
    """Returns the stream time (epoch microseconds, inclusive) from which on a window is closed."""
    return F.try_add(first_time_after(end), micros(window.grace))


def first_time_after(end: Column) -> Column:
    """Returns the first time (epoch microseconds) after a window."""
    # The last window contains its end, since no time follows it.
    return F.when(end >= LAST_TIME, F.lit(LAST_TIME + 1)).otherwise(end)


def ends(key: Sequence[str]) -> list[Column]:
    """Returns the start and end of a row's window as timestamps; null without a key."""
    ends = (WINDOW_START, WINDOW_END)
    return [F.when(has_key(key), F.timestamp_micros(c)).alias(c) for c in ends]


# Session windows


pa: Any = pyarrow

# Pickle by value: Spark's workers need not have this package installed.
cast(Any, cloudpickle).register_pickle_by_value(sys.modules[__name__])

FRESH, KEYED, GAP, HORIZON = "_fresh", "_keyed", "_gap", "_horizon"
KIND = "_kind"
STATE, MERGED, REPLACED, CLOSED = 0, 1, 2, 3
_FIRST, _LAST = "_first", "_last"
_DECIMALS = Context(prec=80)

Values = Sequence[Any]


def place_in(rows: DataFrame) -> list[str]:
    """Returns the columns of ``ORDER`` that rows have: only the arrival, if each partition of the
    result has the records of one partition."""
    return [c for c in ORDER if c in rows.columns]


def in_order_of(rows: DataFrame) -> list[str]:
    """Returns the order of the records of the only input; rows of the state, with nulls, are first.

    Leaves out ``INPUT``, which is a constant: Spark removes constants from a sort, and then does not
    recognize that a window with the constant needs the same sort.
    """
    return [c for c in place_in(rows) if c != INPUT]


def merge_sessions(
    rows: DataFrame, *, key: Sequence[str], accumulators: Sequence[Accumulator]
) -> DataFrame:
    """Merges records into the open sessions of their key, in order.

    A session [start, end] is open for a record iff ``end >= horizon``; only open sessions merge. A
    record that matches no session and is itself older than the horizon is dropped.

    Plan: one shuffle and sort by key; the kernel reads the sorted rows.

    Args:
        rows: ``key columns, partition, ORDER, window_start, window_end, accumulators, _fresh,
            _keyed, _gap, _horizon``; times are epoch microseconds. ``_fresh`` false: an open
            session from before the run. True: a record, both ends its timestamp, ``_gap``, and
            ``_horizon`` = stream time - grace - gap as of the record; ``_keyed`` = it has a key.

    Returns:
        ``key columns, partition, ORDER, window_start, window_end, accumulators, _kind, _turn``:
        for each record the sessions that it replaces (by end), then the merged one; ``CLOSED`` for a
        dropped record; and the open sessions of each key at the end as ``STATE``.

    Source: FORMAT section 7, 4.10.4; kip328-session-merge, kip328-session-close-boundary.
    """
    grouped = _by_key(rows, key)
    passed = [*key, PARTITION, *place_in(grouped)]
    names = [a.name for a in accumulators]
    kinds = [a.merge for a in accumulators]
    taken = [grouped.schema[c] for c in [*passed, WINDOW_START, WINDOW_END, *names]]
    schema = StructType([StructField(f.name, f.dataType) for f in taken])
    schema = schema.add(KIND, IntegerType()).add(TURN, LongType())

    def kernel(batches: Iterator[Any]) -> Iterator[Any]:
        return _merge(batches, passed, names, kinds)

    return cast(Any, grouped).mapInArrow(kernel, schema)


_Effect = tuple[int, int, int, int, int, Values]
"""An effect of a record on a session: its row in the batch, the effect's turn and kind, and start, end
and values. A plain tuple: a run with sessions spends much of its time in making them."""


class _Open:
    """The open sessions of one key. They do not overlap, so both their starts and their ends ascend."""

    def __init__(self) -> None:
        self.starts: list[int] = []
        self.ends: list[int] = []
        self.values: list[Values] = []

    def add(self, start: int, end: int, values: Values) -> None:
        """Adds a session that starts after all others."""
        self.starts.append(start)
        self.ends.append(end)
        self.values.append(values)

    def take(
        self,
        row: int,
        at: int,
        gap: int,
        horizon: int,
        values: Values,
        mergers: Sequence[Callable[[Any, Any], Any]],
        out: list[_Effect],
    ) -> None:
        """Applies one record, and appends its effects."""
        starts, ends, held = self.starts, self.ends, self.values
        if ends and ends[0] < horizon:
            closed = bisect_left(ends, horizon)
            del starts[:closed], ends[:closed], held[:closed]
        low, high = bisect_left(ends, at - gap), bisect_right(starts, at + gap)
        if low == high:
            if at < horizon:
                out.append((row, 0, CLOSED, at, at, (None,) * len(values)))
                return
            starts.insert(low, at)
            ends.insert(low, at)
            held.insert(low, values)
            out.append((row, 0, MERGED, at, at, values))
            return
        start, end = min(at, starts[low]), max(at, ends[high - 1])
        total, turn = held[low], 0
        for one in held[low + 1 : high]:
            total = [m(a, b) for m, a, b in zip(mergers, total, one)]  # noqa: B905
        total = [m(a, b) for m, a, b in zip(mergers, total, values)]  # noqa: B905
        if start != at or end != at:
            nothing = (None,) * len(values)
            for place in range(low, high):
                out.append((row, turn, REPLACED, starts[place], ends[place], nothing))
                turn += 1
        if high - low == 1:
            starts[low], ends[low], held[low] = start, end, total
        else:
            starts[low:high], ends[low:high], held[low:high] = [start], [end], [total]
        out.append((row, turn, MERGED, start, end, total))


def _merge(
    batches: Iterator[Any], passed: Sequence[str], names: Sequence[str], kinds: Sequence[str]
) -> Iterator[Any]:
    sessions, nothing = _Open(), (None,) * len(names)
    wanted = [FRESH, KEYED, _FIRST, _LAST, WINDOW_START, WINDOW_END, GAP, HORIZON]
    for batch in batches:
        types = [batch.schema.field(n).type for n in names]
        mergers = [merger(k, t) for k, t in zip(kinds, types, strict=True)]
        kept = [batch.column(n).to_pylist() for n in names]
        values = zip(*kept, strict=True) if kept else repeat(nothing, batch.num_rows)
        taken = zip(*[batch.column(c).to_pylist() for c in wanted], values, strict=True)
        out: list[_Effect] = []
        for row, (fresh, keyed, first, last, start, end, gap, horizon, own) in enumerate(taken):
            if first:
                sessions = _Open()
            if not fresh:
                sessions.add(start, end, own)
            elif keyed:
                sessions.take(row, start, gap, horizon, own, mergers, out)
            else:
                out.append((row, 0, CLOSED, start, end, nothing))
            if last:
                turn = out[-1][1] + 1 if out and out[-1][0] == row else 0
                found = zip(sessions.starts, sessions.ends, sessions.values, strict=True)
                out += [(row, turn + n, STATE, *one) for n, one in enumerate(found)]
        index = pa.array([r[0] for r in out], pa.int64())
        columns = [batch.column(c).take(index) for c in passed]
        columns += [pa.array([r[k] for r in out], pa.int64()) for k in (3, 4)]
        columns += [pa.array([r[5][k] for r in out], t) for k, t in enumerate(types)]
        columns += [
            pa.array([r[2] for r in out], pa.int32()),
            pa.array([r[1] for r in out], pa.int64()),
        ]
        every = [*passed, WINDOW_START, WINDOW_END, *names, KIND, TURN]
        yield pa.RecordBatch.from_arrays(columns, names=every)


def merger(kind: str, of: Any) -> Callable[[Any, Any], Any]:
    """Returns a function that merges two values like Spark's aggregate; nulls are ignored."""
    choose: Any
    if kind == "sum":
        choose = _DECIMALS.add if pa.types.is_decimal(of) else operator.add
    else:
        choose = min if kind == "min" else max
        if pa.types.is_floating(of) or pa.types.is_nested(of):
            choose = partial(choose, key=_rank)

    def merged(a: Any, b: Any) -> Any:
        return b if a is None else a if b is None else choose(a, b)

    return merged


def _rank(value: Any) -> Any:
    """Returns a sort key in Spark's order: null first, NaN last, structs and arrays field by field."""
    if isinstance(value, dict | list):
        parts: Any = cast(Any, value)
        parts = parts.values() if isinstance(value, dict) else parts
        return (1, [_rank(v) for v in parts])
    if value is None:
        return (0,)
    return (2,) if value != value else (1, value)


# Sliding windows


YOUNG, LENGTH, HIDDEN = "_young", "_length", "_hidden"
LARGEST = "_largest"
TICK = 1000
"""The microseconds from a record to the start of the window that it has just left."""
_EARLIEST = -(2**62)
_TAKEN = (FRESH, KEYED, WINDOW_START, YOUNG, LENGTH, HORIZON, HIDDEN, _FIRST)

Merger = Callable[[Any, Any], Any]


def merge_sliding_windows(
    rows: DataFrame, *, key: Sequence[str], accumulators: Sequence[Accumulator]
) -> DataFrame:
    """Updates and creates the windows of each record of a key, in order.

    A window [start, start + length] is open for a record iff ``end >= horizon``. A record with
    ``at + length < horizon`` is dropped once; otherwise each closed window that it would have updated
    or created is dropped.

    Plan: one shuffle and sort by key; the kernel reads the sorted rows.

    Args:
        rows: ``key columns, partition, ORDER, window_start, accumulators, _fresh, _keyed, _young,
            _length, _horizon, _hidden``; times are epoch microseconds. ``_fresh`` false: a window
            from before the run, ``_young`` its largest timestamp. True: a record, ``window_start``
            and ``_young`` its timestamp, ``_length`` the time difference, ``_horizon`` = stream time
            - grace as of the record, and ``_hidden``: windows that start at or before it are hidden
            from the record (null = none are). ``_keyed`` false = no key or no value: it is dropped.

    Returns:
        ``key columns, partition, ORDER, window_start, window_end, timestamp (microseconds),
        accumulators, _kind, _turn``: for each record the windows that it updated or created, in Kafka's
        order (one can appear twice); ``CLOSED`` for a drop, without a window if the record is not late;
        and each key's windows at the end as ``STATE``.

    Source: FORMAT 4.10.6; kip328-sliding, kip328-sliding-early.
    """
    grouped = _by_key(rows, key)
    passed = [*key, PARTITION, *place_in(grouped)]
    names = [a.name for a in accumulators]
    kinds = [a.merge for a in accumulators]
    fields = [StructField(c, grouped.schema[c].dataType) for c in passed]
    fields += [StructField(c, LongType()) for c in (WINDOW_START, WINDOW_END, TIMESTAMP)]
    fields += [StructField(c, grouped.schema[c].dataType) for c in names]
    schema = StructType(fields).add(KIND, IntegerType()).add(TURN, LongType())

    def kernel(batches: Iterator[Any]) -> Iterator[Any]:
        return _sliding_merge(batches, passed, names, kinds)

    return cast(Any, grouped).mapInArrow(kernel, schema)


def with_largest(rows: DataFrame, *, key: Sequence[str]) -> DataFrame:
    """Adds the largest start of the windows that a record updates or creates if no window is hidden.

    Which windows are hidden depends on the largest start so far, over all keys. Hiding a window neither
    creates nor omits a window with a later start, so the largest start can be computed first. There is
    one exception: with a grace period of at most 1 ms, if the records of a key arrive exactly when its
    windows close and are hidden, the start can be that of one record too many. No random scenario has
    shown that.

    Plan: one shuffle and sort by key; the kernel reads the sorted rows.

    Args:
        rows: see ``merge_sliding_windows``; the accumulators are not used.

    Returns:
        the rows with ``_largest`` (BIGINT, microseconds; null = none, or no record).
    """
    grouped = _by_key(rows, key)
    schema = StructType([*grouped.schema.fields, StructField(LARGEST, LongType())])
    return cast(Any, grouped).mapInArrow(_largest, schema).drop(_FIRST, _LAST)


def _by_key(rows: DataFrame, key: Sequence[str]) -> DataFrame:
    group, order = [PARTITION, *key], [*in_order_of(rows), WINDOW_START]
    in_order = W.partitionBy(*group).orderBy(*order)
    return (
        repartitioned(rows, group)
        # The kernel gets Arrow batches that may split a key: flags mark where a key begins and ends.
        .withColumn(_FIRST, F.row_number().over(in_order) == 1)
        .withColumn(_LAST, F.lead(F.lit(1)).over(in_order).isNull())
        .sortWithinPartitions(*group, *order)
    )


class _Window(NamedTuple):
    """A window at one moment; ``young`` is its largest timestamp."""

    start: int
    young: int
    values: Values


class _Result(NamedTuple):
    """The effect of a record on a window, or a window of the state."""

    kind: int
    start: int | None
    end: int | None
    young: int | None
    values: Values


@dataclass(frozen=True)
class _Record:
    """A record and the bounds at its arrival: see ``merge_sliding_windows``."""

    at: int
    length: int
    horizon: int
    hidden: int | None
    values: Values

    @property
    def after(self) -> int:
        """The start of the window that the record has just left."""
        return self.at + TICK


class _Windows:
    """The windows of one key that a later record may read, by start."""

    def __init__(self, mergers: Sequence[Merger]) -> None:
        self.mergers = mergers
        self.starts: list[int] = []
        self.found: list[_Window] = []

    def put(self, window: _Window) -> None:
        """Stores a window; replaces one with the same start."""
        at = bisect_left(self.starts, window.start)
        same = at < len(self.starts) and self.starts[at] == window.start
        self.starts[at : at + same] = [window.start]
        self.found[at : at + same] = [window]

    def take(self, record: _Record) -> list[_Result]:
        """Applies one record; returns its effects in order."""
        if record.at + record.length < record.horizon:
            return [self._closed(record, record.at - record.length)]
        # Later records are at or after horizon - length, and look back twice the length.
        old = bisect_left(self.starts, record.horizon - 3 * record.length)
        del self.starts[:old], self.found[:old]
        # Kafka has no windows that start before 1970; here such windows contain only records from
        # before it.
        return self._early(record) if 0 <= record.at < record.length else self._later(record)

    def kept(self, length: int) -> list[_Result]:
        """Returns the current windows."""
        return [_Result(STATE, w.start, w.start + length, w.young, w.values) for w in self.found]

    def _near(self, record: _Record, first: int) -> list[_Window]:
        """Returns the visible windows from a start to that of the window just left."""
        low, high = bisect_left(self.starts, first), bisect_right(self.starts, record.after)
        if record.hidden is not None:
            low = max(low, bisect_right(self.starts, record.hidden))
        return self.found[low:high]

    def _later(self, record: _Record) -> list[_Result]:
        """Applies a record whose windows all start at 0 or later: from the latest window down."""
        at, length = record.at, record.length
        done: list[_Result] = []
        met: set[int] = set()
        right: _Window | None = None
        left: _Window | None = None
        before: int | None = None
        first = at - 2 * length
        for window in reversed(self._near(record, max(0, first) if at >= 0 else first)):
            met.add(window.start)
            end = window.start + length
            if window.start > at:
                continue
            if end < at:
                # The latest window without the record: those to the left ended even earlier.
                before, left = window.young, window
                break
            done.append(self._update(record, window.start, window))
            if end > at:
                right = right or window
            elif window.young == at:
                # An earlier record of the same time has created all windows of this time.
                return done
            else:
                before = window.young
        done += self._after_previous(record, before, met)
        if at - length not in met:
            base = left if before is not None and before >= at - length else None
            done.append(self._update(record, at - length, base))
        return done + self._just_left(record, right, met)

    def _early(self, record: _Record) -> list[_Result]:
        """Applies a record at less than the length: the window from 0 replaces those to the left."""
        at = record.at
        done: list[_Result] = []
        met: set[int] = set()
        right: _Window | None = None
        zero: _Window | None = None
        for window in self._near(record, 0):
            met.add(window.start)
            if window.start == 0:
                zero = window
            elif window.start <= at:
                right = window
                done.append(self._update(record, window.start, window))
        before = zero.young if zero is not None and zero.young < at else None
        done += self._just_left(record, right or zero, met)
        done += self._after_previous(record, before, met)
        done.append(self._update(record, 0, zero))
        return done

    def _after_previous(self, record: _Record, before: int | None, met: set[int]) -> list[_Result]:
        """Creates the window that the previous record has just left; it contains only this record."""
        start = None if before is None else before + TICK
        if start is None or start in met or start + record.length < record.at:
            return []
        return [self._update(record, start, None)]

    def _just_left(self, record: _Record, base: _Window | None, met: set[int]) -> list[_Result]:
        """Creates the window that this record has just left, from the younger records around it."""
        if record.after in met or base is None or base.young <= record.at:
            return []
        return [self._keep(record, _Window(record.after, base.young, base.values))]

    def _update(self, record: _Record, start: int, was: _Window | None) -> _Result:
        """Adds the record to a window; a closed window does not change."""
        if start + record.length < record.horizon:
            return self._closed(record, start)
        if was is None:
            return self._keep(record, _Window(start, record.at, record.values))
        added = zip(self.mergers, was.values, record.values, strict=True)
        values = [m(a, b) for m, a, b in added]
        return self._keep(record, _Window(start, max(was.young, record.at), values))

    def _keep(self, record: _Record, window: _Window) -> _Result:
        self.put(window)
        return _Result(MERGED, window.start, window.start + record.length, window.young, window.values)

    def _closed(self, record: _Record, start: int) -> _Result:
        nothing = [None] * len(record.values)
        return _Result(CLOSED, start, start + record.length, record.at, nothing)


def _sliding_merge(
    batches: Iterator[Any], passed: Sequence[str], names: Sequence[str], kinds: Sequence[str]
) -> Iterator[Any]:
    windows = _Windows(())
    for batch in batches:
        types = [batch.schema.field(n).type for n in names]
        mergers = [merger(k, t) for k, t in zip(kinds, types, strict=True)]
        kept = [batch.column(n).to_pylist() for n in names]
        taken = zip(*[batch.column(c).to_pylist() for c in (*_TAKEN, _LAST)], strict=True)
        index: list[int] = []
        turns: list[int] = []
        out: list[_Result] = []
        for i, (*about, last) in enumerate(taken):
            windows, done = _taken(windows, mergers, about, [column[i] for column in kept])
            if last:
                done += windows.kept(about[_TAKEN.index(LENGTH)])
            index += [i] * len(done)
            turns += range(len(done))
            out += done
        columns = [batch.column(c).take(pa.array(index, pa.int64())) for c in passed]
        columns += [pa.array([r[k] for r in out], pa.int64()) for k in (1, 2, 3)]
        columns += [pa.array([r.values[k] for r in out], t) for k, t in enumerate(types)]
        columns += [pa.array([r.kind for r in out], pa.int32()), pa.array(turns, pa.int64())]
        every = [*passed, WINDOW_START, WINDOW_END, TIMESTAMP, *names, KIND, TURN]
        yield pa.RecordBatch.from_arrays(columns, names=every)


def _largest(batches: Iterator[Any]) -> Iterator[Any]:
    windows = _Windows(())
    for batch in batches:
        largest: list[int | None] = []
        for about in zip(*[batch.column(c).to_pylist() for c in _TAKEN], strict=True):
            windows, done = _taken(windows, (), about, [])
            stored = [r.start for r in done if r.kind == MERGED and r.start is not None]
            largest.append(max(stored, default=None))
        columns = [*batch.columns, pa.array(largest, pa.int64())]
        yield pa.RecordBatch.from_arrays(columns, names=[*batch.schema.names, LARGEST])


def _taken(
    windows: _Windows, mergers: Sequence[Merger], about: Sequence[Any], values: Values
) -> tuple[_Windows, list[_Result]]:
    """Applies one row; returns the windows of its key and the effects."""
    fresh, keyed, at, young, length, horizon, hidden, first = about
    if first:
        windows = _Windows(mergers)
    if not fresh:
        windows.put(_Window(at, young, values))
        return windows, []
    if not keyed:
        return windows, [_Result(CLOSED, None, None, at, [None] * len(values))]
    return windows, windows.take(_Record(at, length, horizon, hidden, values))


def with_hidden(
    records: DataFrame,
    earlier: DataFrame | None,
    key: Sequence[str],
    window: SlidingWindow,
    chunk: Column | None,
) -> DataFrame:
    """Adds the start up to which windows are hidden from a record: the largest start of a window so
    far, minus the retention.

    The largest start is that of the partition, over all keys, just before the record. The latest window
    before the run is still open, so the state contains it.
    """
    found = with_largest(union(records, earlier), key=key).where(FRESH)
    if earlier is not None:
        # One row per partition, before the first record.
        newest = earlier.groupBy(PARTITION).agg(F.max(WINDOW_START).alias(LARGEST))
        found = union(found, newest.withColumns({ARRIVAL: F.lit(_EARLIEST), FRESH: F.lit(False)}))
    started = found.withColumn(TIMESTAMP, F.timestamp_micros(LARGEST))
    nothing = F.lit(None).cast("timestamp")
    timed = with_stream_time(started, nothing, chunk=chunk, included=False).where(FRESH)
    hidden = F.unix_micros(STREAM_TIME) - micros(window.remembers)
    return timed.withColumn(HIDDEN, hidden).select(*records.columns)


def in_ticks(time: Column) -> Column:
    """Rounds microseconds down to whole milliseconds, the unit of sliding windows."""
    return time - F.pmod(time, F.lit(TICK))


# Processor


_OPEN, _MARK = "_open", "_mark"
_MERGES = {"sum": F.sum, "min": F.min, "max": F.max}

_LATE, _EXPIRED = "late_records_dropped", "expired_window_records_dropped"


@dataclass(frozen=True)
class WindowedAggregateTime(TimePolicy):
    """The stream time T of the records that count."""

    processor: WindowedAggregateProcessor

    def rows(self, inputs: Sequence[Input]) -> Timed:
        key, window = self.processor.grouping, self.processor.operator.window
        rows = self.processor.regrouped(self.processor.in_order(inputs)[0])
        moves = moves_stream_time(key, window)
        if isinstance(window, (SessionWindow, SlidingWindow)):
            # Until stream time reaches this time, all windows that the record may change are open.
            unsure = F.try_add(in_ticks(F.unix_micros(TIMESTAMP)), micros(window.grace))
            return Timed(rows, moves, F.when(moves, unsure))
        if isinstance(window, TumblingWindow):
            first = bounds_of(window)[1]
        else:
            first = starts(window)[0] + micros(window.size)
        return Timed(rows, moves, F.when(moves, closes_at(window, first)))

    def undecided_chunks(self, inputs: Sequence[Input], bounds: Bounds) -> DataFrame:
        window, timed = self.processor.operator.window, self.rows(inputs)
        if isinstance(window, (SessionWindow, SlidingWindow)):
            # Which of these windows exist, and thus close, depends on the exact order of all records:
            # bounds decide no chunk.
            return exact_chunks(bounds)
        rows = assign_windows(timed.rows, self.processor.grouping, window)
        deadline = closes_at(window, F.unix_micros(WINDOW_END))
        return undecided_chunks(rows, deadline, self.processor.fine_chunk, bounds)

    def watermarks_of_time(
        self, stream_time: Times, before: Mapping[str, Times]
    ) -> dict[str, dict[int, int]]:
        """Returns the time up to which windows have closed. It never decreases, even if the grace
        period becomes longer: the state no longer has these windows."""
        window, one = self.processor.operator.window, timedelta(microseconds=1)
        closed = dict(before.get(CLOSED_UP_TO, {}))
        for p, now in stream_time.items():
            now -= now % TICK if isinstance(window, SlidingWindow) else 0
            up_to = now - length_at(window.closes_after, p) // one
            closed[p] = max(up_to, closed.get(p, up_to))
        return {CLOSED_UP_TO: closed}


@dataclass(frozen=True)
class WindowedAggregateCounts(RunCounts):
    """The counts of results and of late records.

    Args:
        key: of the result.
        record: the columns that name a record.
    """

    key: tuple[str, ...]
    record: tuple[str, ...]

    def tallies(self, columns: Sequence[str]) -> dict[str, Column]:
        # A record dropped for a null key or value has no window and is not late.
        late = (F.col(OUTCOME) == Outcome.DROPPED) & has_key(self.key)
        return {
            _EXPIRED: F.count_if(late),
            _LATE: F.count_distinct(F.when(late, F.struct(*self.record))),
        }

    def of_run(self, taken: int, found: Counts, judged: Counts) -> dict[str, int]:
        return super().of_run(taken, found, judged) | {n: found[n] for n in (_LATE, _EXPIRED)}


class WindowedAggregateProcessor(Processor[WindowedAggregate]):
    """Aggregates the records of a run by key and window; every update is a result.

    Plan, tumbling and hopping: ``passed`` (with bounds a broadcast, and a shuffle and sort of undecided
    chunks), then one shuffle and sort by key and window of the run's records and the open windows; with
    ``per_run``, if the order of rows does not change the numbers, a shuffle and a hash aggregate.
    Sessions: ``with_time_where_needed``, then a shuffle and sort by key alone, and a Python kernel (see
    ``merge_sessions``). Sliding windows: the plan of sessions with ``merge_sliding_windows``; if their
    retention hides windows, the plan runs once more before, to compute the hidden ones.

    Each partition has windows of its own. A null value counts like any other record
    (kip328-probe-null-values-tumbling), except for sliding windows, which drop it
    (kip328-probe-null-values-sliding); a record without a key is dropped.

    ``window_start`` is inclusive; ``window_end`` is exclusive; for a session it is the timestamp of its
    last record, for a sliding window its start + time difference, both inclusive. ``timestamp``: the
    largest in the window; for a session, and for the tombstone of a merged one, its end. ``dropped``: a
    record without a key (or value, if one is needed), without a window; or one row per closed window.
    ``kept``: a window not last changed by a record, or a session or sliding window at the end of the
    run.

    Source: FORMAT 4.10.1-4.10.6, section 7; kip328-grace-boundary, kip328-hopping,
    kip328-session-merge, kip328-sliding.
    """

    def plan(self, times: RunTimes = BEFORE_ANY_RUN) -> RunPlan:
        merges = self.merges
        return RunPlan(
            self.whole_inputs,
            merges=merges,
            stream_time=WindowedAggregateTime(
                self, bounded=not self.single_task, reports_lateness=True
            ),
            keeps_order=not merges and self.windows_of_record is not None,
            results_of_record=self.windows_of_record or 1,
            order=ResultOrder((ARRIVAL, PARTITION, TURN)) if self.is_in_place else ResultOrder(),
            counts=WindowedAggregateCounts(
                tuple(self.node.key),
                (PARTITION, ARRIVAL) if self.is_in_place else (INPUT_PARTITION, INPUT_OFFSET),
            ),
        )

    @property
    def merges(self) -> bool:
        """Whether records leave their partition."""
        return bool(self.operator.group_key)

    @property
    def is_in_place(self) -> bool:
        """Whether partition and offset give a record's place in the run; otherwise ``ORDER`` is
        needed."""
        return not self.merges and self.operator.emit != "per_run"

    @property
    def windows_of_record(self) -> int | None:
        """The number of windows that each record belongs to; None = it varies, or some of the windows
        may have no result."""
        window = self.operator.window
        if isinstance(window, HoppingWindow) and self.operator.emit != "per_run":
            return windows_of_record(window)
        return 1 if isinstance(window, TumblingWindow) else None

    @property
    def grouping(self) -> list[str]:
        """The key without the window."""
        return [name for name, _ in self.operator.keys().columns]

    def regrouped(self, rows: DataFrame) -> DataFrame:
        """Returns the records with their new key, and the partition of that key."""
        if not self.operator.group_key:
            return rows
        chosen = {name: F.expr(sql) for name, sql in self.operator.keys().columns}
        return with_columns(rows, chosen).withColumn(
            PARTITION, partition_of_key(list(chosen), self.node)
        )

    def process(self, rows: list[DataFrame], inputs: Sequence[Input], context: RunContext) -> DataFrame:
        operator, window, key = self.operator, self.operator.window, self.grouping
        aggregates = operator.parsed()
        # Before the records get their new key: a key column must not hide a column of the same name.
        contributions = {a.name: F.expr(a.expression) for a in aggregates.accumulators}
        given = with_columns(rows[0], contributions)
        if self.is_in_place:
            # Copies of offset and partition: every shuffle and sort of the results would carry them.
            given = given.drop(INPUT, INPUT_PARTITION, INPUT_OFFSET)
        records = self.regrouped(given)
        counts = moves_stream_time(key, window)
        # The types that Spark's sum, min and max give.
        merged = [_MERGES[a.merge](a.name).alias(a.name) for a in aggregates.accumulators]
        own = [F.col(f.name).cast(f.dataType) for f in records.agg(*merged).schema.fields]
        earlier = None
        if context.state is not None:
            kept = [*key, PARTITION, TIMESTAMP, WINDOW_START, WINDOW_END]
            earlier = context.state.select(*kept, F.lit(False).alias(FRESH), *own)
        about = (F.lit(True).alias(FRESH), counts.alias(KEYED))
        fresh = [*key, PARTITION, *place_in(records), TIMESTAMP, *about, *own]
        before, bounds = context.stream_time, context.bounds
        chunk = self.chunk if bounds is None else self.fine_chunk
        # Windows that closed under an earlier, shorter grace period remain closed.
        closed = context.watermarks.get(CLOSED_UP_TO)
        if isinstance(window, (TumblingWindow, HoppingWindow)):
            rows_of_windows = assign_windows(records.select(*fresh), key, window)
            deadline = closes_at(window, F.unix_micros(WINDOW_END))
            moves = F.col(KEYED)
            judged = passed(rows_of_windows, deadline, before, moves, chunk=chunk, bounds=bounds)
            once = operator.emit == "per_run"
            return _tumbling_or_hopping(judged, earlier, key, window, aggregates, closed, once)
        seen = with_time_where_needed(records, before, counts, chunk=chunk, bounds=bounds)
        seen = seen.select(*fresh, STREAM_TIME)
        if isinstance(window, SessionWindow):
            return _sessions(seen, earlier, key, window, aggregates, closed)
        return _sliding(seen, earlier, key, window, aggregates, closed, self.chunk)

    def state_after(self, rows: DataFrame, context: RunContext) -> DataFrame:
        """Returns the windows after a run that a later record can change or, for sliding windows, read:
        ``key columns, window_start, window_end, partition, accumulators, timestamp``."""
        window, after = self.operator.window, context.stream_time_after
        end, now = F.unix_micros(WINDOW_END), F.unix_micros(after)
        if isinstance(window, SessionWindow):
            closed = end < now - micros(window.closes_after)
        elif isinstance(window, SlidingWindow):
            # An accepted record lies at or after T - grace - difference, and looks back twice the
            # difference.
            least = in_ticks(now) - micros(window.grace) - 3 * micros(window.time_difference)
            closed = F.unix_micros(WINDOW_START) < least
        else:
            closed = closes_at(window, end) <= now
        counts = (F.col(OUTCOME) == Outcome.KEPT) | (F.col(OUTCOME) == Outcome.APPLIED)
        alive = rows.where(F.col(_LAST) & counts & ~F.coalesce(closed, F.lit(False)))
        names = [a.name for a in self.operator.parsed().accumulators]
        return alive.select(*self.grouping, WINDOW_START, WINDOW_END, PARTITION, *names, TIMESTAMP)


def moves_stream_time(key: Sequence[str], window: Window) -> Column:
    """Returns whether a record counts for windows: it has a key, and for sliding windows a value.

    Other records are dropped and do not advance T, as in Kafka Streams.

    Source: FORMAT 4.10, 4.10.3; kip328-probe-null-values-tumbling, -session, -sliding.
    """
    sliding = isinstance(window, SlidingWindow)
    return has_key(key) & ~F.col(IS_TOMBSTONE) if sliding else has_key(key)


def _tumbling_or_hopping(
    judged: DataFrame,
    earlier: DataFrame | None,
    key: Sequence[str],
    window: TumblingWindow | HoppingWindow,
    aggregates: Aggregates,
    closed: Column | None,
    once: bool,
) -> DataFrame:
    """Computes tumbling and hopping windows: running aggregates, starting from the state's row."""
    is_open = ~F.col(PASSED) & F.col(WINDOW_END).isNotNull()
    if closed is not None:
        is_open &= F.coalesce(first_time_after(F.unix_micros(WINDOW_END)) > closed, F.lit(True))
    judged = judged.withColumn(_OPEN, is_open).drop(PASSED)
    names = [a.name for a in aggregates.accumulators]
    place = place_in(judged)
    rows = union(judged, earlier)
    group = [*key, WINDOW_START, WINDOW_END, PARTITION]
    types = {a: rows.schema[a].dataType for a in names}
    alone = once and is_order_independent(list(types.values()))
    if not alone:
        # By key and window alone, as the result's store needs them next: each partition has its own
        # keys.
        rows = repartitioned(rows, [*key, WINDOW_START, WINDOW_END])
    # Rows of closed windows are kept because they are counted, but add nothing. The state's are open.
    counts = F.coalesce(F.col(_OPEN), F.lit(True))
    added = {c: F.when(counts, F.col(c)) for c in names} | {_MARK: F.when(counts, F.col(TIMESTAMP))}
    rows = with_columns(rows, added)
    merged = {a.name: _MERGES[a.merge](a.name) for a in aggregates.accumulators}
    merged[_MARK] = F.max(_MARK)
    if alone:
        seen = {FRESH: F.max(FRESH), _OPEN: F.max(_OPEN), TIMESTAMP: F.max(TIMESTAMP)}
        rows = folded(rows.withColumn(TURN, F.lit(0)), group, counts, merged | seen)
        merged, last = {c: F.col(c) for c in merged}, F.lit(True)
    else:
        in_order = W.partitionBy(*group).orderBy(*in_order_of(rows))
        so_far = in_order.rowsBetween(W.unboundedPreceding, W.currentRow)
        # Sums in order of arrival: so sums of doubles do not depend on the split into runs.
        merged = {c: column.over(so_far) for c, column in merged.items()}
        last = F.lead(F.lit(1)).over(in_order).isNull()
    rows = with_columns(
        rows,
        {c: column.cast(rows.schema[c].dataType) for c, column in merged.items()} | {_LAST: last},
    )
    outcome = (
        F.when(~F.col(FRESH), Outcome.KEPT)
        .when(F.col(_OPEN), Outcome.APPLIED)
        .otherwise(Outcome.DROPPED)
    )
    # In hopping windows the turn is the window's number among those of its record, from which
    # ``number_in_place`` computes the offset. A window with one result per run (``per_run``) has no
    # single record, so its turn is its start.
    turn = F.unix_micros(WINDOW_START)
    many = windows_of_record(window) if isinstance(window, HoppingWindow) and not once else None
    if many is not None and isinstance(window, HoppingWindow):
        after = F.unix_micros(TIMESTAMP) - turn
        turn = F.lit(many - 1) - F.call_function("div", after, micros(window.advance))
    return rows.where(F.col(FRESH) | F.col(_LAST)).select(
        *key,
        WINDOW_START,
        WINDOW_END,
        *[F.when(F.col(_OPEN), F.expr(e)).alias(c) for c, e in aggregates.columns],
        F.when(F.col(_OPEN), F.col(_MARK)).otherwise(F.col(TIMESTAMP)).alias(TIMESTAMP),
        PARTITION,
        F.lit(False).alias(IS_TOMBSTONE),
        outcome.alias(OUTCOME),
        *place,
        turn.alias(TURN),
        _LAST,
        *names,
    )


def _sessions(
    fresh: DataFrame,
    earlier: DataFrame | None,
    key: Sequence[str],
    window: SessionWindow,
    aggregates: Aggregates,
    closed: Column | None,
) -> DataFrame:
    at, wait = F.unix_micros(TIMESTAMP), micros(window.closes_after)
    records = fresh.select(
        *[c for c in fresh.columns if c not in (TIMESTAMP, STREAM_TIME)],
        at.alias(WINDOW_START),
        at.alias(WINDOW_END),
        micros(window.gap).alias(GAP),
        _horizon(F.unix_micros(STREAM_TIME) - wait, closed).alias(HORIZON),
    )
    if earlier is not None:
        ends = {end: F.unix_micros(end) for end in (WINDOW_START, WINDOW_END)}
        earlier = with_columns(earlier.drop(TIMESTAMP), ends)
    merged = merge_sessions(union(records, earlier), key=key, accumulators=aggregates.accumulators)
    return _by_kernel(merged.withColumn(TIMESTAMP, F.col(WINDOW_END)), key, aggregates)


def _sliding(
    fresh: DataFrame,
    earlier: DataFrame | None,
    key: Sequence[str],
    window: SlidingWindow,
    aggregates: Aggregates,
    closed: Column | None,
    chunk: Column | None,
) -> DataFrame:
    """Computes sliding windows; first, if retention hides windows, which ones each record cannot
    see."""
    at, now = (
        in_ticks(F.unix_micros(TIMESTAMP)),
        in_ticks(F.unix_micros(STREAM_TIME)),
    )
    length = micros(window.time_difference).alias(LENGTH)
    records = fresh.select(
        *[c for c in fresh.columns if c not in (TIMESTAMP, STREAM_TIME)],
        at.alias(WINDOW_START),
        at.alias(YOUNG),
        length,
        _horizon(now - micros(window.grace), closed).alias(HORIZON),
        F.lit(None).cast("long").alias(HIDDEN),
    )
    if earlier is not None:
        earlier = earlier.select(
            *[c for c in earlier.columns if c not in (TIMESTAMP, WINDOW_START, WINDOW_END)],
            F.unix_micros(WINDOW_START).alias(WINDOW_START),
            F.unix_micros(TIMESTAMP).alias(YOUNG),
            length,
        )
    if window.hides:
        records = with_hidden(records, earlier, key, window, chunk)
    merged = merge_sliding_windows(
        union(records, earlier), key=key, accumulators=aggregates.accumulators
    )
    # Not the state's: the next run computes with a window's true start.
    is_result = F.col(KIND) != STATE
    early = is_result & (F.col(WINDOW_START) < FIRST_TIME)
    late = is_result & (F.col(WINDOW_END) > LAST_TIME)
    within = {
        WINDOW_START: F.when(early, F.lit(FIRST_TIME)).otherwise(F.col(WINDOW_START)),
        WINDOW_END: F.when(late, F.lit(LAST_TIME)).otherwise(F.col(WINDOW_END)),
    }
    return _by_kernel(with_columns(merged, within), key, aggregates)


def _horizon(least: Column, closed: Column | None) -> Column:
    """Returns the least end of an open window."""
    return least if closed is None else F.greatest(least, closed)


def _by_kernel(merged: DataFrame, key: Sequence[str], aggregates: Aggregates) -> DataFrame:
    """Returns the results of a kernel; ``timestamp`` is in microseconds."""
    updated = F.col(KIND) == MERGED
    kept = F.col(KIND) == STATE
    outcome = F.when(kept, Outcome.KEPT).when(F.col(KIND) == CLOSED, Outcome.DROPPED)
    return merged.select(
        *key,
        *ends(key),
        *[F.when(updated, F.expr(e)).alias(c) for c, e in aggregates.columns],
        F.timestamp_micros(TIMESTAMP).alias(TIMESTAMP),
        PARTITION,
        (F.col(KIND) == REPLACED).alias(IS_TOMBSTONE),
        outcome.otherwise(Outcome.APPLIED).alias(OUTCOME),
        *place_in(merged),
        TURN,
        kept.alias(_LAST),
        *[a.name for a in aggregates.accumulators],
    )
