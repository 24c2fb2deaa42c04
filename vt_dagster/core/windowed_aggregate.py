"""Windowed aggregates: a stream's records by key and window, with a grace period for late ones
(KIP-328).

An open window is updated; a record whose window has closed is dropped from it and counted. Stream
time T is the largest timestamp so far of a record that counts (``moves_stream_time``), including the
record itself, per partition. The state for the next run contains the open windows, and those that a
later record reads.
"""

from __future__ import annotations

from collections.abc import Sequence

from pyspark.sql import Column, DataFrame
from pyspark.sql import Window as W
from pyspark.sql import functions as F
from pyspark.sql.types import StructType

from vt_dagster.columns import (
    HOME,
    IS_TOMBSTONE,
    ORDER,
    OUTCOME,
    PARTITION,
    SEQUENCE,
    TIMESTAMP,
    TURN,
    WINDOW_END,
    WINDOW_START,
)
from vt_dagster.core import session_windows, sliding_windows
from vt_dagster.core.arrival_order import Outcome, gathered, has_key, micros, union, with_columns
from vt_dagster.core.emit_per_run import folded, is_exact
from vt_dagster.core.fixed_windows import closes_at, ends, placed, starts
from vt_dagster.core.processor import Counts, Processor
from vt_dagster.core.run_context import Input, RunContext
from vt_dagster.core.session_windows import FRESH, GAP, HORIZON, KEYED, KIND
from vt_dagster.core.sliding_windows import HIDDEN, LENGTH, YOUNG
from vt_dagster.core.source_records import home_of
from vt_dagster.core.stream_time import (
    PASSED,
    STREAM_TIME,
    Bounds,
    Timed,
    passed,
    undecided_chunks,
    with_stream_time,
)
from vt_dagster.topology.accumulators import Aggregates
from vt_dagster.topology.operators import WindowedAggregate
from vt_dagster.topology.windows import (
    HoppingWindow,
    SessionWindow,
    SlidingWindow,
    TumblingWindow,
    Window,
)

_OPEN, _LAST, _MARK = "_open", "_last", "_mark"
_EARLIEST = -(2**62)
_MERGES = {"sum": F.sum, "min": F.min, "max": F.max}

_LATE, _EXPIRED = "late_records_dropped", "expired_window_records_dropped"


class WindowedAggregateProcessor(Processor[WindowedAggregate]):
    """See :func:`aggregate` and :func:`state_after`."""

    has_stream_time = True
    reports_lateness = True

    @property
    def merges(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return bool(self.operator.group_key)

    @property
    def _key(self) -> list[str]:
        """The key without the window."""
        return [name for name, _ in self.operator.keys().columns]

    def _regrouped(self, rows: DataFrame) -> DataFrame:
        """Gives records their new key, and moves them to its partition."""
        if not self.operator.group_key:
            return rows
        chosen = {name: F.expr(sql) for name, sql in self.operator.keys().columns}
        return with_columns(rows, chosen).withColumn(PARTITION, home_of(list(chosen), self.node))

    def stream_time_rows(self, inputs: Sequence[Input]) -> Timed:
        window, rows = self.operator.window, self._regrouped(self.in_order(inputs)[0])
        moves = moves_stream_time(self._key, window)
        if isinstance(window, (SessionWindow, SlidingWindow)):
            return Timed(rows, moves)
        return Timed(rows, moves, F.when(moves, closes_at(window, starts(window)[0])))

    def undecided_chunks(self, inputs: Sequence[Input], bounds: Bounds) -> DataFrame:
        window, timed = self.operator.window, self.stream_time_rows(inputs)
        assert isinstance(window, (TumblingWindow, HoppingWindow))
        rows = placed(timed.rows, self._key, window)
        deadline = closes_at(window, F.unix_micros(WINDOW_START))
        return undecided_chunks(rows, deadline, self.fine_chunk, bounds)

    @property
    def keeps_order(self) -> bool:
        return not self.merges and isinstance(self.operator.window, TumblingWindow)

    def process(self, rows: list[DataFrame], inputs: Sequence[Input], context: RunContext) -> DataFrame:
        accumulators = self.operator.parsed().accumulators
        # Before the records get their new key: a key column must not hide a column of the same name.
        given = with_columns(rows[0], {a.name: F.expr(a.expression) for a in accumulators})
        return aggregate(
            self._regrouped(given),
            context.state,
            key=self._key,
            window=self.operator.window,
            aggregates=self.operator.parsed(),
            before=context.stream_time,
            chunk=self.chunk,
            fine_chunk=self.fine_chunk,
            bounds=context.bounds,
            once=self.operator.emit == "per_run",
        )

    def state_after(self, rows: DataFrame, context: RunContext) -> DataFrame:
        return state_after(
            rows,
            key=self._key,
            window=self.operator.window,
            aggregates=self.operator.parsed(),
            after=context.stream_time_after,
        )

    def tallies(self, columns: Sequence[str]) -> dict[str, Column]:
        # A record dropped for a null key or value has no window and is not late.
        late = (F.col(OUTCOME) == Outcome.DROPPED) & has_key(self.node.key)
        return {
            _EXPIRED: F.count_if(late),
            _LATE: F.count_distinct(F.when(late, F.struct(HOME, SEQUENCE))),
        }

    def counts(self, taken: int, found: Counts, judged: Counts) -> dict[str, int]:
        return super().counts(taken, found, judged) | {n: found[n] for n in (_LATE, _EXPIRED)}


def needs_value(window: Window) -> bool:
    """Returns whether records without a value are dropped: by sliding windows, as in Kafka Streams."""
    return isinstance(window, SlidingWindow)


def moves_stream_time(key: Sequence[str], window: Window) -> Column:
    """Returns whether a record counts for windows: it has a key, and a value if one is needed.

    Other records are dropped and do not advance T.

    Source: FORMAT 4.10, 4.10.3; kip328-probe-null-values-tumbling, -session, -sliding.
    """
    return has_key(key) & ~F.col(IS_TOMBSTONE) if needs_value(window) else has_key(key)


def aggregate(
    records: DataFrame,
    state: DataFrame | None,
    *,
    key: Sequence[str],
    window: Window,
    aggregates: Aggregates,
    before: Column,
    chunk: Column | None = None,
    fine_chunk: Column | None = None,
    bounds: Bounds | None = None,
    once: bool = False,
) -> DataFrame:
    """Aggregates the records of a run by key and window; every update is a result.

    Plan, tumbling and hopping: ``passed`` (with bounds a broadcast, and a shuffle and sort of undecided
    chunks), then one shuffle and sort by key and window of the run's records and the open windows; with
    ``once``, if the order of rows does not change the numbers, a shuffle and a hash aggregate.
    Sessions: ``with_stream_time`` (one aggregate, one shuffle and sort by partition and chunk), then a
    shuffle and sort by key alone, and a Python kernel (see ``session_windows.merge``): in total 2
    shuffles and 2 sorts of rows, and for one row per chunk 2 shuffles, a sort and a broadcast. Sliding
    windows: the plan of sessions with ``sliding_windows.merge``; if their retention hides windows, the
        plan runs once more before, to
    compute the hidden ones.

    Args:
        records: the stream's log rows, ``key columns, accumulators, timestamp, partition, ORDER``; an
            accumulator is the record's contribution. ``partition`` and key columns are already the
            result's; each partition has windows of its own. A null value counts like any other record
            (kip328-probe-null-values-tumbling), except for sliding windows, which drop it
            (kip328-probe-null-values-sliding); a record without a key is dropped.
        state: the windows kept before the run; None = none.
        before: T of the row's partition before the run (TIMESTAMP; null = no record yet).
        chunk: see ``with_stream_time``; ``fine_chunk`` is that of ``bounds``, see ``passed``.
        once: whether only the last update of each window is needed; others may be returned.

    Returns:
        ``key columns, window_start, window_end, aggregates, timestamp, partition, is_tombstone,
        _outcome, ORDER, _turn``, and the columns that ``state_after`` needs. ``window_start`` is
        inclusive; ``window_end`` is exclusive; for a session it is the timestamp of its last record,
        for a sliding window its start + time difference, both inclusive. ``timestamp``: the largest in
        the window; for a session, and for the tombstone of a merged one, its end. ``dropped``: a record
        without a key (or value, if one is needed), without a window; or one row per closed window.
        ``kept``: a window not last changed by a record, or a session or sliding window at the end of
        the run.

    Source: FORMAT 4.10.1-4.10.6, section 7; kip328-grace-boundary, kip328-hopping,
    kip328-session-merge, kip328-sliding.
    """
    counts = moves_stream_time(key, window)
    kept = _accumulators_type(records, aggregates)
    own = [F.col(f.name).cast(f.dataType) for f in kept.fields]
    earlier = None
    if state is not None:
        ends = (WINDOW_START, WINDOW_END)
        earlier = state.select(*key, PARTITION, TIMESTAMP, *ends, F.lit(False).alias(FRESH), *own)
    fresh = [*key, PARTITION, *ORDER, TIMESTAMP, F.lit(True).alias(FRESH), counts.alias(KEYED), *own]
    if isinstance(window, (TumblingWindow, HoppingWindow)):
        rows = placed(records.select(*fresh), key, window)
        deadline = closes_at(window, F.unix_micros(WINDOW_START))
        chunk = chunk if bounds is None else fine_chunk
        judged = passed(rows, deadline, before, F.col(KEYED), chunk=chunk, bounds=bounds)
        return _fixed(judged, earlier, key, aggregates, once)
    seen = with_stream_time(records, before, counts, chunk=chunk).select(*fresh, STREAM_TIME)
    if isinstance(window, SessionWindow):
        return _sessions(seen, earlier, key, window, aggregates)
    return _sliding(seen, earlier, key, window, aggregates, chunk)


def state_after(
    rows: DataFrame, *, key: Sequence[str], window: Window, aggregates: Aggregates, after: Column
) -> DataFrame:
    """Returns the windows after a run that a later record can change or, for sliding windows, read.

    Args:
        rows: of ``aggregate``.
        after: T of the row's partition at the end of the run.

    Returns:
        ``key columns, window_start, window_end, partition, accumulators, timestamp``.
    """
    end, now = F.unix_micros(WINDOW_END), F.unix_micros(after)
    if isinstance(window, SessionWindow):
        closed = end < now - micros(window.closes_after)
    elif isinstance(window, SlidingWindow):
        # An accepted record lies at or after T - grace - difference, and looks back twice the
        # difference.
        least = (
            sliding_windows.in_ticks(now) - micros(window.grace) - 3 * micros(window.time_difference)
        )
        closed = F.unix_micros(WINDOW_START) < least
    else:
        closed = end <= now - micros(window.grace)
    counts = (F.col(OUTCOME) == Outcome.KEPT) | (F.col(OUTCOME) == Outcome.APPLIED)
    alive = rows.where(F.col(_LAST) & counts & ~F.coalesce(closed, F.lit(False)))
    names = [a.name for a in aggregates.accumulators]
    return alive.select(*key, WINDOW_START, WINDOW_END, PARTITION, *names, TIMESTAMP)


def _accumulators_type(records: DataFrame, aggregates: Aggregates) -> StructType:
    """Returns the accumulators' types, as Spark's sum, min and max give them."""
    merged = [_MERGES[a.merge](a.name).alias(a.name) for a in aggregates.accumulators]
    return records.agg(*merged).schema


def _fixed(
    judged: DataFrame,
    earlier: DataFrame | None,
    key: Sequence[str],
    aggregates: Aggregates,
    once: bool,
) -> DataFrame:
    """Computes tumbling and hopping windows: running aggregates, starting from the state's row."""
    judged = judged.withColumn(_OPEN, ~F.col(PASSED) & F.col(WINDOW_END).isNotNull()).drop(PASSED)
    names = [a.name for a in aggregates.accumulators]
    # Rows of closed windows are kept because they are counted, but add nothing.
    added = with_columns(
        judged,
        {a: F.when(F.col(_OPEN), F.col(a)) for a in names}
        | {_MARK: F.when(F.col(_OPEN), F.col(TIMESTAMP))},
    )
    if earlier is not None:
        earlier = earlier.withColumn(_MARK, F.col(TIMESTAMP))
    rows = union(added, earlier)
    group = [*key, WINDOW_START, WINDOW_END, PARTITION]
    types = {a: rows.schema[a].dataType for a in names}
    merged = {a.name: _MERGES[a.merge](a.name) for a in aggregates.accumulators}
    merged[_MARK] = F.max(_MARK)
    if once and is_exact(list(types.values())):
        seen = {FRESH: F.max(FRESH), _OPEN: F.max(_OPEN), TIMESTAMP: F.max(TIMESTAMP)}
        counts = F.coalesce(F.col(_OPEN), F.lit(True))
        rows = folded(rows.withColumn(TURN, F.lit(0)), group, counts, merged | seen)
        merged, last = {c: F.col(c) for c in merged}, F.lit(True)
    else:
        # By key and window alone, as the result's store needs them next: each partition has its own
        # keys.
        rows = gathered(rows, [*key, WINDOW_START, WINDOW_END])
        in_order = W.partitionBy(*group).orderBy(FRESH, *ORDER)
        so_far = in_order.rowsBetween(W.unboundedPreceding, W.currentRow)
        # Sums in order of arrival: so sums of doubles do not depend on how runs are cut.
        merged = {c: column.over(so_far) for c, column in merged.items()}
        last = F.lead(F.lit(1)).over(in_order).isNull()
    rows = with_columns(
        rows, {c: column.cast(rows.schema[c].dataType) for c, column in merged.items()} | {_LAST: last}
    )
    outcome = (
        F.when(~F.col(FRESH), Outcome.KEPT)
        .when(F.col(_OPEN), Outcome.APPLIED)
        .otherwise(Outcome.DROPPED)
    )
    return rows.where(F.col(FRESH) | F.col(_LAST)).select(
        *key,
        WINDOW_START,
        WINDOW_END,
        *[F.when(F.col(_OPEN), F.expr(e)).alias(c) for c, e in aggregates.columns],
        F.when(F.col(_OPEN), F.col(_MARK)).otherwise(F.col(TIMESTAMP)).alias(TIMESTAMP),
        PARTITION,
        F.lit(False).alias(IS_TOMBSTONE),
        outcome.alias(OUTCOME),
        *ORDER,
        F.unix_micros(WINDOW_START).alias(TURN),
        _LAST,
        *names,
    )


def _sessions(
    fresh: DataFrame,
    earlier: DataFrame | None,
    key: Sequence[str],
    window: SessionWindow,
    aggregates: Aggregates,
) -> DataFrame:
    at, wait = F.unix_micros(TIMESTAMP), micros(window.closes_after)
    records = fresh.select(
        *[c for c in fresh.columns if c not in (TIMESTAMP, STREAM_TIME)],
        at.alias(WINDOW_START),
        at.alias(WINDOW_END),
        micros(window.gap).alias(GAP),
        (F.unix_micros(STREAM_TIME) - wait).alias(HORIZON),
    )
    if earlier is not None:
        ends = {end: F.unix_micros(end) for end in (WINDOW_START, WINDOW_END)}
        earlier = with_columns(earlier.drop(TIMESTAMP), ends)
    merged = session_windows.merge(
        union(records, earlier), key=key, accumulators=aggregates.accumulators
    )
    return _by_kernel(merged.withColumn(TIMESTAMP, F.col(WINDOW_END)), key, aggregates)


def _sliding(
    fresh: DataFrame,
    earlier: DataFrame | None,
    key: Sequence[str],
    window: SlidingWindow,
    aggregates: Aggregates,
    chunk: Column | None,
) -> DataFrame:
    """Computes sliding windows; first, if retention hides windows, which ones each record cannot
    see."""
    at, now = (
        sliding_windows.in_ticks(F.unix_micros(TIMESTAMP)),
        sliding_windows.in_ticks(F.unix_micros(STREAM_TIME)),
    )
    length = micros(window.time_difference).alias(LENGTH)
    records = fresh.select(
        *[c for c in fresh.columns if c not in (TIMESTAMP, STREAM_TIME)],
        at.alias(WINDOW_START),
        at.alias(YOUNG),
        length,
        (now - micros(window.grace)).alias(HORIZON),
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
        records = sliding_windows.with_hidden(records, earlier, key, window, chunk)
    merged = sliding_windows.merge(
        union(records, earlier), key=key, accumulators=aggregates.accumulators
    )
    return _by_kernel(merged, key, aggregates)


def _by_kernel(merged: DataFrame, key: Sequence[str], aggregates: Aggregates) -> DataFrame:
    """Returns the results of a kernel; ``timestamp`` is in microseconds."""
    updated = F.col(KIND) == session_windows.MERGED
    kept = F.col(KIND) == session_windows.STATE
    outcome = F.when(kept, Outcome.KEPT).when(F.col(KIND) == session_windows.CLOSED, Outcome.DROPPED)
    return merged.select(
        *key,
        *ends(key),
        *[F.when(updated, F.expr(e)).alias(c) for c, e in aggregates.columns],
        F.timestamp_micros(TIMESTAMP).alias(TIMESTAMP),
        PARTITION,
        (F.col(KIND) == session_windows.REPLACED).alias(IS_TOMBSTONE),
        outcome.otherwise(Outcome.APPLIED).alias(OUTCOME),
        *ORDER,
        TURN,
        kept.alias(_LAST),
        *[a.name for a in aggregates.accumulators],
    )
