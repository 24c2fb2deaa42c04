"""Session windows: merges the records of a key into sessions, in order of arrival.

A session grows and merges as records arrive, and closes as stream time advances. The effect of a record
depends on all records before it: merging is sequential, and no window expression can compute it. A
Python kernel over sorted Arrow batches does. It holds only the open sessions of one key in memory,
however many records or batches a key has.
"""

from __future__ import annotations

import operator
import sys
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from decimal import Context
from functools import partial
from typing import Any, cast

import pyarrow  # pyright: ignore[reportMissingTypeStubs]
from pyspark import cloudpickle
from pyspark.sql import DataFrame
from pyspark.sql import Window as W
from pyspark.sql import functions as F
from pyspark.sql.types import IntegerType, LongType, StructField, StructType

from vt_dagster.columns import ORDER, PARTITION, TURN, WINDOW_END, WINDOW_START
from vt_dagster.core.arrival_order import gathered
from vt_dagster.topology.accumulators import Accumulator

pa: Any = pyarrow

# Pickle by value: Spark's workers need not have this package installed.
cast(Any, cloudpickle).register_pickle_by_value(sys.modules[__name__])

FRESH, KEYED, GAP, HORIZON = "_fresh", "_keyed", "_gap", "_horizon"
KIND = "_kind"
STATE, MERGED, REPLACED, CLOSED = 0, 1, 2, 3
_FIRST, _LAST = "_first", "_last"
_DECIMALS = Context(prec=80)

Values = list[Any]


def merge(rows: DataFrame, *, key: Sequence[str], accumulators: Sequence[Accumulator]) -> DataFrame:
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
    group = [PARTITION, *key]
    order = [FRESH, *ORDER, WINDOW_START]
    in_order = W.partitionBy(*group).orderBy(*order)
    grouped = (
        gathered(rows, group)
        .withColumn(_FIRST, F.row_number().over(in_order) == 1)
        .withColumn(_LAST, F.lead(F.lit(1)).over(in_order).isNull())
        .sortWithinPartitions(*group, *order)
    )
    passed = [*key, PARTITION, *ORDER]
    names = [a.name for a in accumulators]
    kinds = [a.merge for a in accumulators]
    taken = [grouped.schema[c] for c in [*passed, WINDOW_START, WINDOW_END, *names]]
    schema = StructType([StructField(f.name, f.dataType) for f in taken])
    schema = schema.add(KIND, IntegerType()).add(TURN, LongType())

    def kernel(batches: Iterator[Any]) -> Iterator[Any]:
        return _merge(batches, passed, names, kinds)

    return cast(Any, grouped).mapInArrow(kernel, schema)


class _Open:
    """The open sessions of one key. They do not overlap, so both their starts and their ends ascend."""

    def __init__(self) -> None:
        self.starts: list[int] = []
        self.ends: list[int] = []
        self.values: list[Values] = []

    def replace(self, low: int, high: int, new: Sequence[tuple[int, int, Values]]) -> None:
        """Replaces the sessions from ``low`` (inclusive) to ``high`` (exclusive)."""
        self.starts[low:high] = [start for start, _, _ in new]
        self.ends[low:high] = [end for _, end, _ in new]
        self.values[low:high] = [values for _, _, values in new]

    def slice(self, low: int, high: int) -> list[tuple[int, int, Values]]:
        """Returns the sessions from ``low`` (inclusive) to ``high`` (exclusive)."""
        ends = zip(self.starts[low:high], self.ends[low:high], self.values[low:high], strict=True)
        return list(ends)

    def take(
        self,
        at: int,
        gap: int,
        horizon: int,
        values: Values,
        mergers: Sequence[Callable[[Any, Any], Any]],
    ) -> Iterator[tuple[int, int, int, Values]]:
        """Adds one record and yields its effects as (kind, start, end, values)."""
        self.replace(0, bisect_left(self.ends, horizon), [])
        low, high = bisect_left(self.ends, at - gap), bisect_right(self.starts, at + gap)
        found = self.slice(low, high)
        if not found and at < horizon:
            yield CLOSED, at, at, [None] * len(values)
            return
        start, end = at, at
        total: Values = [None] * len(values)
        for one_start, one_end, one in found:
            start, end = min(start, one_start), max(end, one_end)
            total = [m(a, b) for m, a, b in zip(mergers, total, one, strict=True)]
        total = [m(a, b) for m, a, b in zip(mergers, total, values, strict=True)]
        self.replace(low, high, [(start, end, total)])
        if (start, end) != (at, at):
            for one_start, one_end, one in found:
                yield REPLACED, one_start, one_end, [None] * len(one)
        yield MERGED, start, end, total


def _merge(
    batches: Iterator[Any], passed: Sequence[str], names: Sequence[str], kinds: Sequence[str]
) -> Iterator[Any]:
    sessions = _Open()
    wanted = [FRESH, KEYED, _FIRST, _LAST, WINDOW_START, WINDOW_END, GAP, HORIZON]
    for batch in batches:
        types = [batch.schema.field(n).type for n in names]
        mergers = [merger(k, t) for k, t in zip(kinds, types, strict=True)]
        taken = zip(*[batch.column(c).to_pylist() for c in wanted], strict=True)
        kept = [batch.column(n).to_pylist() for n in names]
        at: list[int] = []
        out: list[tuple[int, int, int, Values]] = []
        turns: list[int] = []
        for i, (fresh, keyed, first, last, start, end, gap, horizon) in enumerate(taken):
            values = [column[i] for column in kept]
            if first:
                sessions = _Open()
            results: list[tuple[int, int, int, Values]] = []
            if not fresh:
                n = len(sessions.ends)
                sessions.replace(n, n, [(start, end, values)])
            elif keyed:
                results = list(sessions.take(start, gap, horizon, values, mergers))
            else:
                results = [(CLOSED, start, end, [None] * len(names))]
            if last:
                results += [(STATE, *s) for s in sessions.slice(0, len(sessions.ends))]
            at += [i] * len(results)
            turns += range(len(results))
            out += results
        index = pa.array(at, pa.int64())
        columns = [batch.column(c).take(index) for c in passed]
        columns += [pa.array([r[k] for r in out], pa.int64()) for k in (1, 2)]
        columns += [pa.array([r[3][k] for r in out], t) for k, t in enumerate(types)]
        columns += [pa.array([r[0] for r in out], pa.int32()), pa.array(turns, pa.int64())]
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
