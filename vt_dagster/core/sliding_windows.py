"""Sliding windows: computes the windows of a key that contain each record, in order of arrival.

A record creates a window when it enters or has just left it, from the adjacent windows, and only while
the window is open. The effect of a record depends on all records before it, and no window expression
can compute it. A Python kernel over sorted Arrow batches does. It holds in memory only the windows of
one key that a later record may read, however many records or batches a key has.

Kafka's times are whole milliseconds, and a window that a record has just left starts one millisecond
later. A record's time and stream time are therefore rounded down to milliseconds here.
"""

from __future__ import annotations

import sys
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import pyarrow  # pyright: ignore[reportMissingTypeStubs]
from pyspark import cloudpickle
from pyspark.sql import Column, DataFrame
from pyspark.sql import Window as W
from pyspark.sql import functions as F
from pyspark.sql.types import IntegerType, LongType, StructField, StructType

from vt_dagster.columns import ARRIVAL, ORDER, PARTITION, TIMESTAMP, TURN, WINDOW_END, WINDOW_START
from vt_dagster.core.arrival_order import gathered, micros, union
from vt_dagster.core.session_windows import CLOSED, FRESH, HORIZON, KEYED, KIND, MERGED, STATE, merger
from vt_dagster.core.stream_time import STREAM_TIME, with_stream_time
from vt_dagster.topology.accumulators import Accumulator
from vt_dagster.topology.windows import SlidingWindow

pa: Any = pyarrow

# Pickle by value: Spark's workers need not have this package installed.
cast(Any, cloudpickle).register_pickle_by_value(sys.modules[__name__])

YOUNG, LENGTH, HIDDEN = "_young", "_length", "_hidden"
LARGEST = "_largest"
TICK = 1000
"""The microseconds from a record to the start of the window that it has just left."""
_FIRST, _LAST = "_first", "_last"
_EARLIEST = -(2**62)
_TAKEN = (FRESH, KEYED, WINDOW_START, YOUNG, LENGTH, HORIZON, HIDDEN, _FIRST)

Values = list[Any]
Merger = Callable[[Any, Any], Any]


def merge(rows: DataFrame, *, key: Sequence[str], accumulators: Sequence[Accumulator]) -> DataFrame:
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
    passed = [*key, PARTITION, *ORDER]
    names = [a.name for a in accumulators]
    kinds = [a.merge for a in accumulators]
    fields = [StructField(c, grouped.schema[c].dataType) for c in passed]
    fields += [StructField(c, LongType()) for c in (WINDOW_START, WINDOW_END, TIMESTAMP)]
    fields += [StructField(c, grouped.schema[c].dataType) for c in names]
    schema = StructType(fields).add(KIND, IntegerType()).add(TURN, LongType())

    def kernel(batches: Iterator[Any]) -> Iterator[Any]:
        return _merge(batches, passed, names, kinds)

    return cast(Any, grouped).mapInArrow(kernel, schema)


def with_largest(rows: DataFrame, *, key: Sequence[str]) -> DataFrame:
    """Adds the largest start of the windows that a record updates or creates if no window is hidden.

    Which windows are hidden depends on all keys: on the largest start so far. Conversely, hiding
    neither creates nor omits a window with a later start. The exception is a grace period of at most 1
    ms and a key whose records arrive exactly when its windows close and are hidden: the start can then
        be one record
    too large. No random scenario has shown that.

    Plan: one shuffle and sort by key; the kernel reads the sorted rows.

    Args:
        rows: see ``merge``; the accumulators are not used.

    Returns:
        the rows with ``_largest`` (BIGINT, microseconds; null = none, or no record).
    """
    grouped = _by_key(rows, key)
    schema = StructType([*grouped.schema.fields, StructField(LARGEST, LongType())])
    return cast(Any, grouped).mapInArrow(_largest, schema).drop(_FIRST, _LAST)


def _by_key(rows: DataFrame, key: Sequence[str]) -> DataFrame:
    group, order = [PARTITION, *key], [FRESH, *ORDER, WINDOW_START]
    in_order = W.partitionBy(*group).orderBy(*order)
    return (
        gathered(rows, group)
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
    """A record and the bounds at its arrival: see ``merge``."""

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
                before, left = window.young, window
                break
            done.append(self._update(record, window.start, window))
            if end > at:
                right = right or window
            elif window.young == at:
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


def _merge(
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
                length = about[_TAKEN.index(LENGTH)]
                done += [
                    _Result(STATE, w.start, w.start + length, w.young, w.values) for w in windows.found
                ]
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
    """Adds the start up to which windows are hidden from a record: largest start so far - retention.

    That start is the partition's, over all keys and just before the record. The latest window before
    the run is still open, so the state contains it.
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
