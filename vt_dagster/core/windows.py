"""Windowed aggregates: a stream's records by key and window, with grace for late ones (KIP-328).

A window is updated while it is open; a record that comes when its window has closed is dropped from
it and counted. Stream time T is the largest timestamp of a record with a key so far, the record
itself included, per partition. What a run keeps for the next one are the windows still open.
"""

from __future__ import annotations

from collections.abc import Sequence

from pyspark.sql import Column, DataFrame
from pyspark.sql import Window as W
from pyspark.sql import functions as F
from pyspark.sql.types import StructType

from vt_dagster.aggregation import Accumulator, Aggregates
from vt_dagster.columns import (
    FATE,
    IS_TOMBSTONE,
    ORDER,
    PARTITION,
    TIMESTAMP,
    TURN,
    WINDOW_END,
    WINDOW_START,
)
from vt_dagster.core import sessions
from vt_dagster.core.arrival import STREAM_TIME, Fate, has_key, micros, union, with_stream_time
from vt_dagster.core.sessions import FRESH, GAP, HORIZON, KEYED, KIND
from vt_dagster.windowing import HoppingWindow, SessionWindow, TumblingWindow, Window

_OPEN, _LAST, _MARK = "_open", "_last", "_mark"
_MERGES = {"sum": F.sum, "min": F.min, "max": F.max}


def aggregate(
    records: DataFrame,
    state: DataFrame | None,
    *,
    key: Sequence[str],
    window: Window,
    aggregates: Aggregates,
    before: Column,
    after: Column,
    chunk: Column | None = None,
) -> tuple[DataFrame, DataFrame]:
    """Aggregates the records of a run by key and window; every update is a result.

    Plan, tumbling and hopping: ``with_stream_time`` (one aggregate, one shuffle and sort by
    partition and chunk), then one shuffle and sort by key and window of the run's records and the
    open windows. Sessions: the same, but the last sort is by key alone, and a kernel in Python
    follows (see ``sessions.merge``). In all 2 shuffles and 2 sorts of rows, and of a row a chunk 2
    shuffles, a sort and a broadcast. Both frames come from the same rows: keep what lies below, or
    Spark computes it twice.

    Args:
        records: the stream's log rows, ``key columns, value columns, timestamp, partition, ORDER``;
            ``partition`` and key columns are already the result's; each partition has windows of its
            own. A null value counts like any
            other record (kip328-probe-null-values-tumbling); a record without a key is dropped.
        state: the open windows before the run; None = none.
        before: T of the row's partition before the run (TIMESTAMP; null = no record yet).
        after: T at its end.
        chunk: see ``with_stream_time``.

    Returns:
        results, and the windows open after the run.

        Results: ``key columns, window_start, window_end, aggregates, timestamp, partition,
        is_tombstone, _fate, ORDER, _turn``. ``window_start`` inclusive; ``window_end`` exclusive,
        of a session the timestamp of its last record. ``timestamp``: the largest in the window; of
        a session, also of the tombstone of one that has been merged, its end. ``dropped``: a record
        without a key, or one row for each window that had closed.

        State: ``key columns, window_start, window_end, partition, accumulators, timestamp``.

    Source: FORMAT 4.10.1-4.10.4, section 7; kip328-grace-boundary, kip328-hopping,
    kip328-session-merge.
    """
    seen = with_stream_time(records, before, has_key(key), chunk=chunk)
    kept = _accumulators_type(records, aggregates)
    accumulators = [F.expr(a.expression).cast(kept[a.name].dataType) for a in aggregates.accumulators]
    fresh = seen.select(
        *key,
        PARTITION,
        *ORDER,
        TIMESTAMP,
        STREAM_TIME,
        F.lit(True).alias(FRESH),
        *[c.alias(f.name) for c, f in zip(accumulators, kept.fields, strict=True)],
    )
    earlier = None
    if state is not None:
        earlier = state.select(
            *key,
            PARTITION,
            TIMESTAMP,
            F.unix_micros(WINDOW_START).alias(WINDOW_START),
            F.unix_micros(WINDOW_END).alias(WINDOW_END),
            F.lit(False).alias(FRESH),
            *[F.col(f.name).cast(f.dataType) for f in kept.fields],
        )
    if isinstance(window, SessionWindow):
        return _sessions(fresh, earlier, key, window, aggregates, after)
    return _fixed(fresh, earlier, key, window, aggregates, after)


def _accumulators_type(records: DataFrame, aggregates: Aggregates) -> StructType:
    """The accumulators' types, as Spark's own sum, min and max have them."""
    merged = [_MERGES[a.merge](F.expr(a.expression)).alias(a.name) for a in aggregates.accumulators]
    return records.agg(*merged).schema


def _fixed(
    fresh: DataFrame,
    earlier: DataFrame | None,
    key: Sequence[str],
    window: TumblingWindow | HoppingWindow,
    aggregates: Aggregates,
    after: Column,
) -> tuple[DataFrame, DataFrame]:
    """Tumbling and hopping windows: running aggregates, the state's row first."""
    grace = micros(window.grace)
    placed = _placed(fresh, key, window)
    is_open = has_key(key) & (F.col(WINDOW_END) > F.unix_micros(STREAM_TIME) - grace)
    judged = placed.withColumn(_OPEN, F.coalesce(is_open, F.lit(False)))
    # Closed windows stay among the rows, as they are to be counted, but add nothing.
    added = judged.withColumns(
        {a.name: F.when(F.col(_OPEN), F.col(a.name)) for a in aggregates.accumulators}
        | {_MARK: F.when(F.col(_OPEN), F.col(TIMESTAMP))}
    )
    if earlier is not None:
        earlier = earlier.withColumn(_MARK, F.col(TIMESTAMP))
    rows = union(added, earlier)
    group = W.partitionBy(PARTITION, *key, WINDOW_START, WINDOW_END).orderBy(FRESH, *ORDER)
    so_far = group.rowsBetween(W.unboundedPreceding, W.currentRow)
    # Sums are made in order of arrival: those of doubles do not depend on how runs are cut.
    running = {
        a.name: _MERGES[a.merge](a.name).over(so_far).cast(rows.schema[a.name].dataType)
        for a in aggregates.accumulators
    }
    rows = rows.withColumns(
        running | {_MARK: F.max(_MARK).over(so_far), _LAST: F.lead(F.lit(1)).over(group).isNull()}
    )
    results = rows.where(FRESH).select(
        *key,
        *_ends(has_key(key)),
        *[F.when(F.col(_OPEN), F.expr(e)).alias(c) for c, e in aggregates.columns],
        F.when(F.col(_OPEN), F.col(_MARK)).otherwise(F.col(TIMESTAMP)).alias(TIMESTAMP),
        PARTITION,
        F.lit(False).alias(IS_TOMBSTONE),
        F.when(F.col(_OPEN), Fate.APPLIED).otherwise(Fate.DROPPED).alias(FATE),
        *ORDER,
        F.col(WINDOW_START).alias(TURN),
    )
    closed = F.coalesce(F.col(WINDOW_END) <= F.unix_micros(after) - grace, F.lit(False))
    alive = rows.where(F.col(_LAST) & F.col(_MARK).isNotNull() & ~closed)
    return results, _state(alive, key, aggregates.accumulators, F.col(_MARK))


def _placed(fresh: DataFrame, key: Sequence[str], window: TumblingWindow | HoppingWindow) -> DataFrame:
    """Each record once for each window it belongs to, with the window's ends in microseconds.

    A record without a key, which is dropped, stays one row. Kafka has no windows that start before
    1970; here they take records from before 1970 only.
    """
    size, advance, at = micros(window.size), micros(window.advance), F.unix_micros(TIMESTAMP)
    if isinstance(window, TumblingWindow):
        placed = fresh.withColumn(WINDOW_START, at - F.pmod(at, advance))
    else:
        least = at - size + advance
        first, last = least - F.pmod(least, advance), at - F.pmod(at, advance)
        first = F.when(at >= 0, F.greatest(first, F.lit(0))).otherwise(first)
        first = F.when(has_key(key), first).otherwise(last)
        placed = fresh.withColumn(WINDOW_START, F.explode(F.sequence(first, last, advance)))
    return placed.withColumn(WINDOW_END, F.col(WINDOW_START) + size)


def _sessions(
    fresh: DataFrame,
    earlier: DataFrame | None,
    key: Sequence[str],
    window: SessionWindow,
    aggregates: Aggregates,
    after: Column,
) -> tuple[DataFrame, DataFrame]:
    at, wait = F.unix_micros(TIMESTAMP), micros(window.closes_after)
    records = fresh.select(
        *[c for c in fresh.columns if c not in (TIMESTAMP, STREAM_TIME)],
        at.alias(WINDOW_START),
        at.alias(WINDOW_END),
        has_key(key).alias(KEYED),
        micros(window.gap).alias(GAP),
        (F.unix_micros(STREAM_TIME) - wait).alias(HORIZON),
    )
    if earlier is not None:
        earlier = earlier.drop(TIMESTAMP)
    merged = sessions.merge(union(records, earlier), key=key, accumulators=aggregates.accumulators)
    updated = F.col(KIND) == sessions.MERGED
    closed = F.col(KIND) == sessions.CLOSED
    ended = F.timestamp_micros(WINDOW_END)
    results = merged.where(F.col(KIND) != sessions.STATE).select(
        *key,
        *_ends(has_key(key)),
        *[F.when(updated, F.expr(e)).alias(c) for c, e in aggregates.columns],
        ended.alias(TIMESTAMP),
        PARTITION,
        (F.col(KIND) == sessions.REPLACED).alias(IS_TOMBSTONE),
        F.when(closed, Fate.DROPPED).otherwise(Fate.APPLIED).alias(FATE),
        *ORDER,
        TURN,
    )
    over = F.coalesce(F.col(WINDOW_END) < F.unix_micros(after) - wait, F.lit(False))
    alive = merged.where((F.col(KIND) == sessions.STATE) & ~over)
    return results, _state(alive, key, aggregates.accumulators, ended)


def _ends(has_window: Column | None = None) -> list[Column]:
    """The ends of a row's window as timestamps."""
    ends = [(c, F.timestamp_micros(c)) for c in (WINDOW_START, WINDOW_END)]
    return [(e if has_window is None else F.when(has_window, e)).alias(c) for c, e in ends]


def _state(
    rows: DataFrame, key: Sequence[str], accumulators: Sequence[Accumulator], newest: Column
) -> DataFrame:
    names = [a.name for a in accumulators]
    return rows.select(*key, *_ends(), PARTITION, *names, newest.alias(TIMESTAMP))
