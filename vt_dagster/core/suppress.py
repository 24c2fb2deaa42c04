"""suppress: holds back updates of a table until a time limit or until a window closes (KIP-328).

Each key has one *place* in the buffer; an update replaces value and timestamp but keeps the place.
Stream time T is the largest timestamp of an update that has reached suppress, per partition. Updates
are emitted in the order of Kafka Streams' buffer: by place, then key. One that is due on arrival
follows those that are due at the same T. So the split of an arrival order into runs does not show.

With a limit and ``emit_early``, it emits after each update, as in Kafka Streams. A record may give
several updates (a merged session and its tombstone, sliding windows). Which of them leave a full
buffer, with which value and in which order, depends on each update and on all keys of a partition. A
Python kernel therefore processes the updates of one partition in order. It holds in memory the updates
that the limit allows to wait, and one batch.

The start of each period of a time limit depends on the end of the previous one; a Python kernel over
sorted Arrow batches therefore computes them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Any, cast

import pyarrow  # pyright: ignore[reportMissingTypeStubs]
from pyspark import cloudpickle
from pyspark.sql import Column, DataFrame
from pyspark.sql import Window as W
from pyspark.sql import functions as F
from pyspark.sql.types import BooleanType, LongType, StructType

from vt_dagster.columns import (
    ARRIVAL,
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
from vt_dagster.core.arrival_order import (
    Outcome,
    by_partition,
    hour_of_arrival,
    micros,
    repartitioned,
    union,
)
from vt_dagster.core.log_columns import value_columns
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
)
from vt_dagster.core.stream_time import STREAM_TIME, Timed, with_stream_time
from vt_dagster.errors import BufferFullError
from vt_dagster.topology.durations import longest
from vt_dagster.topology.operators import Limit, Suppress, UntilTimeLimit, UntilWindowCloses

# Full buffer: emit early


pa: Any = pyarrow

# Pickle by value: Spark's workers need not have this package installed.
cast(Any, cloudpickle).register_pickle_by_value(sys.modules[__name__])

FRESH, AT = "_fresh", "_at"
PLACE, RANK, RELEASED, NTH = "_place", "_rank", "_released", "_nth"
BYTES = "_bytes"
_KEY, _SIZE, _PERIOD, _RECORDS, _MOST_BYTES = "_key", "_size", "_period", "_records", "_most_bytes"
_FIRST, _LAST = "_first", "_last"
_TAKEN = (FRESH, _KEY, AT, _SIZE, STREAM_TIME, _PERIOD, _RECORDS, _MOST_BYTES, _FIRST, _LAST)


def emit_early(
    rows: DataFrame,
    *,
    kept: Sequence[str],
    turn: Sequence[str],
    period: Column,
    size: Column,
    max_records: Column,
    max_bytes: Column,
) -> DataFrame:
    """Emits, after each update, those that are due, and then those above the limit, oldest place first.

    Plan: one shuffle by partition and two sorts of its rows.

    Args:
        rows: updates and waiting rows, ``kept columns, partition, ORDER, _fresh, _at, _stream_time``;
            times are epoch microseconds. ``_fresh`` false: a waiting row, ``_at`` its place; true: an
            update, ``_at`` its timestamp, ``_stream_time`` T just before it.
        kept: the columns of a row to return.
        turn: the key columns, in the order in which keys of one place are emitted.
        period: the time limit, microseconds; ``size``: the size of an update, bytes.
        max_records, max_bytes: null = no limit.

    Returns:
        ``kept columns``, ``_released`` (true for an emitted update; false for one that still waits at
        the end), ``_place``, ``_rank`` (T when the update is emitted) and ``_nth`` (ascending within a
        partition). ``_rank, _nth`` is the order of the results.

    Source: FORMAT 4.11.1-4.11.3; kip328-keys-late, kip328-probe-keys-order-of-eviction.
    """
    in_order = W.partitionBy(PARTITION).orderBy(FRESH, *ORDER, AT, *turn)
    ordered = (
        repartitioned(rows, [PARTITION])
        .withColumn(_KEY, F.dense_rank().over(W.partitionBy(PARTITION).orderBy(*turn)).cast("long"))
        .withColumns({_SIZE: size.cast("long"), _PERIOD: period})
        .withColumns({_RECORDS: max_records.cast("long"), _MOST_BYTES: max_bytes.cast("long")})
        .withColumn(_FIRST, F.row_number().over(in_order) == 1)
        .withColumn(_LAST, F.lead(F.lit(1)).over(in_order).isNull())
        .sortWithinPartitions(PARTITION, FRESH, *ORDER, AT, *turn)
    )
    schema = StructType([ordered.schema[c] for c in kept]).add(RELEASED, BooleanType())
    schema = schema.add(PLACE, LongType()).add(RANK, LongType()).add(NTH, LongType())

    def kernel(batches: Iterator[Any]) -> Iterator[Any]:
        return _emit_batches(batches, kept)

    return cast(Any, ordered).mapInArrow(kernel, schema)


def most(limit: Limit) -> Column:
    """Returns the buffer's limit in a row's partition as a column; null = no limit."""
    if limit is None or isinstance(limit, int):
        return F.lit(limit).cast("long")
    return by_partition(limit, "long")


@dataclass
class _Held:
    """The waiting update of one key: its place, its row in the current batch, its size in bytes."""

    place: int
    row: int
    size: int


@dataclass
class _Buffer:
    """The buffer of one partition: keys by place, then in their own order."""

    held: dict[int, _Held] = field(default_factory=dict[int, _Held])
    order: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    size: int = 0
    left: int = 0

    def put(self, key: int, at: int, row: int, size: int) -> None:
        """Stores an update, at the place of the waiting one if there is one."""
        was = self.held.get(key)
        if was is None:
            heappush(self.order, (at, key))
            self.held[key] = _Held(at, row, size)
        else:
            # An update takes the place of the one that it replaces: the timer does not restart
            # (KIP-328).
            self.held[key] = _Held(was.place, row, size)
        self.size += size - (was.size if was else 0)

    def leave(self, rank: int, released: bool = True) -> tuple[Any, ...]:
        """Removes the first update: (row, released, place, rank, number)."""
        _, key = heappop(self.order)
        gone = self.held.pop(key)
        self.size -= gone.size
        self.left += 1
        return gone.row, released, gone.place, rank, self.left

    def full(self, records: int | None, size: int | None) -> bool:
        """Returns whether the buffer exceeds a limit."""
        return bool(self.held) and (
            (records is not None and len(self.held) > records)
            or (size is not None and self.size > size)
        )

    def carry(self) -> list[int]:
        """Returns the rows of waiting updates and renumbers them: they come first in the next batch."""
        rows = [one.row for one in self.held.values()]
        for place, one in enumerate(self.held.values()):
            one.row = place
        return rows


def _emit_batches(batches: Iterator[Any], kept: Sequence[str]) -> Iterator[Any]:
    buffer, carried = _Buffer(), None
    for batch in batches:
        rows, start = pa.Table.from_batches([batch]), 0
        if carried is not None:
            start = carried.num_rows
            rows = pa.concat_tables([carried, rows]).combine_chunks()
        out: list[tuple[Any, ...]] = []
        taken = zip(*[batch.column(c).to_pylist() for c in _TAKEN], strict=True)
        for row, one in enumerate(taken, start):
            fresh, key, at, size, seen, period, records, most, first, last = one
            if first:
                buffer = _Buffer()
            buffer.put(key, at, row, size)
            if fresh:
                now = at if seen is None else max(at, seen)
                while buffer.order and buffer.order[0][0] <= now - period:
                    out.append(buffer.leave(now))
                while buffer.full(records, most):
                    out.append(buffer.leave(now))
            # All others wait: they are the buffer of the next run.
            while last and buffer.order:
                out.append(buffer.leave(0, False))
        result = rows.select(list(kept)).take(pa.array([o[0] for o in out], pa.int64()))
        for i, name in enumerate((RELEASED, PLACE, RANK, NTH), 1):
            kind = pa.bool_() if i == 1 else pa.int64()
            result = result.append_column(name, pa.array([o[i] for o in out], kind))
        yield from result.to_batches()
        carried = rows.take(pa.array(buffer.carry(), pa.int64()))


# Time limit: periods of a key


LATE = "_late"
_AFTER = "_after"


def split_into_periods(
    rows: DataFrame, *, key: Sequence[str], kept: Sequence[str], period: Column, after: Column
) -> DataFrame:
    """Splits each key's updates into periods; returns the last update of each, emitted or waiting.

    Plan: one shuffle and sort by key; a Python kernel, with one row of one key in memory.

    Args:
        rows: updates and waiting rows: ``kept, ORDER, _fresh, _at``, and ``_stream_time`` before each
            update (epoch microseconds).
        period: the length of a period (microseconds); after: stream time at the end of the run (epoch
            microseconds).

    Returns:
        ``kept, ORDER, _released, _late, _place, _rank``: ``_late`` = due on arrival.

    Source: FORMAT 4.11.1, 4.11.2; kip328-timer-not-restarted.
    """
    group, order = [PARTITION, *key], [FRESH, *ORDER]
    in_order = W.partitionBy(*group).orderBy(*order)
    grouped = (
        repartitioned(rows, group)
        .withColumns({_PERIOD: period, _AFTER: after})
        .withColumn(_FIRST, F.row_number().over(in_order) == 1)
        .withColumn(_LAST, F.lead(F.lit(1)).over(in_order).isNull())
        .sortWithinPartitions(*group, *order)
    )
    passed = [*kept, *ORDER]
    schema = StructType([grouped.schema[c] for c in passed]).add(RELEASED, BooleanType())
    schema = schema.add(LATE, BooleanType()).add(PLACE, LongType()).add(RANK, LongType())

    def kernel(batches: Iterator[Any]) -> Iterator[Any]:
        return _periods(batches, passed)

    return cast(Any, grouped).mapInArrow(kernel, schema)


class _Key:
    """The place of one key in the buffer."""

    def __init__(self) -> None:
        self.row: int | None = None
        """The last update, as its row in the current batch; None = no update waits."""
        self.place = 0

    def put(self, row: int, at: int) -> bool:
        """Stores an update; returns whether it opens a period."""
        opens = self.row is None
        if opens:
            self.place = at
        self.row = row
        return opens

    def due(self, stream_time: int | None, period: int) -> bool:
        """Returns whether the waiting update is due at a stream time."""
        return self.row is not None and stream_time is not None and self.place + period <= stream_time

    def leave(self, released: bool, late: bool = False, rank: int = 0) -> tuple[Any, ...]:
        """Removes the waiting update and returns (row, released, late, place, rank)."""
        left = (self.row, released, late, self.place, rank if late else self.place)
        self.row = None
        return left


def _periods(batches: Iterator[Any], passed: Sequence[str]) -> Iterator[Any]:
    key, carried = _Key(), None
    wanted = [FRESH, _FIRST, _LAST, AT, STREAM_TIME, _PERIOD, _AFTER]
    for batch in batches:
        rows, start = pa.Table.from_batches([batch]), 0
        if carried is not None:
            # The update that waits at the end of a batch is the first row of the next batch.
            rows, start, key.row = pa.concat_tables([carried, rows]).combine_chunks(), 1, 0
        out: list[tuple[Any, ...]] = []
        taken = zip(*[batch.column(c).to_pylist() for c in wanted], strict=True)
        for row, (fresh, first, last, at, seen, period, after) in enumerate(taken, start):
            if first:
                key = _Key()
            if fresh and key.due(seen, period):
                out.append(key.leave(True))
            opens = key.put(row, at)
            now = at if seen is None else max(at, seen)
            if fresh and key.due(now, period):
                out.append(key.leave(True, opens, now - period))
            if last and key.row is not None:
                out.append(key.leave(key.due(after, period)))
        carried = None if key.row is None else rows.take(pa.array([key.row]))
        result = rows.select(list(passed)).take(pa.array([o[0] for o in out], pa.int64()))
        for i, name in enumerate((RELEASED, LATE, PLACE, RANK), 1):
            kind = pa.bool_() if i < 3 else pa.int64()
            result = result.append_column(name, pa.array([o[i] for o in out], kind))
        yield from result.to_batches()


# Processor


_NEXT = "_next"
_EARLIEST = -(2**62)


@dataclass(frozen=True)
class SuppressTime(TimePolicy):
    """The stream time of a table's updates."""

    def rows(self, inputs: Sequence[Input]) -> Timed:
        return Timed(self.processor.in_order(inputs)[0], F.lit(True))


@dataclass(frozen=True)
class SuppressCounts(RunCounts):
    """The counts of emitted updates, and the size of the buffer.

    Args:
        name: of the result.
    """

    name: str
    until: UntilTimeLimit | UntilWindowCloses

    def of_run(self, taken: int, found: Counts, judged: Counts) -> dict[str, int]:
        return super().of_run(taken, found, judged) | {"suppression_emit": found[Outcome.APPLIED]}

    def fullness(self, state: DataFrame | None) -> DataFrame | None:
        if state is None:
            return None
        return state.groupBy(PARTITION).agg(
            F.count(F.lit(1)).alias("records"), F.sum(BYTES).cast("long").alias("bytes")
        )

    def gauges(
        self, sizes: Mapping[int, tuple[int, int]], earlier: Mapping[str, float], runs: int
    ) -> dict[str, float]:
        self._check_limits(sizes)
        found: dict[str, float] = {}
        for place, name in enumerate(("count", "size")):
            now, key = sum(size[place] for size in sizes.values()), f"suppression_buffer_{name}"
            found |= {
                f"{key}_current": now,
                f"{key}_avg": (earlier.get(f"{key}_avg", 0.0) * runs + now) / (runs + 1),
                f"{key}_max": max(now, earlier.get(f"{key}_max", 0.0)),
            }
        return found

    def _check_limits(self, sizes: Mapping[int, tuple[int, int]]) -> None:
        """Raises if the buffer exceeds a limit that stops the run."""
        until = self.until
        if until.when_full != "shut_down":
            return
        limits = {"max_records": until.max_records, "max_bytes": until.max_bytes}
        over: dict[int, str] = {}
        for partition, size in sorted(sizes.items()):
            for (what, limit), number in zip(limits.items(), size, strict=True):
                most = limit.get(partition) if isinstance(limit, Mapping) else limit
                if most is not None and number > most:
                    over[partition] = (
                        f"expected at most {what}={most} in the suppression buffer of partition "
                        f"{partition}, got {number}"
                    )
        if over:
            raise BufferFullError(
                f"{self.name}: {next(iter(over.values()))}; when_full='shut_down' stops the run "
                "before its commit, so nothing is lost. Raise the limit or set another when_full, "
                "and run again: the run reads the same records",
                list(over),
            )


class SuppressProcessor(Processor[Suppress]):
    """Decides which updates of a table are emitted in this run, and which wait. T is stream time.

    Time limit: the first update of a key opens a period; when T >= its timestamp + duration, the last
    update of the key so far is emitted, and the next one opens a new period. Without limits on the
    buffer, a run emits the same updates, in the same order, as record-by-record processing.

    Until a window closes: the last update of a window is emitted once T has reached its end +
    ``closes_after``, for a session once T is later (FORMAT section 7). A tombstone keeps its place
    until then, as in Kafka Streams, but is not emitted. A sliding window is still open at that moment:
    each of its later updates is emitted too, as in Kafka Streams.

    With ``emit_early`` the limits are checked after each update (see ``emit_early``). Otherwise all
    waiting updates are kept; their ``fullness`` is checked at the end of the run.

    Plan, until a window closes: one shuffle and sort by key of updates and buffer; for sliding windows
    ``with_stream_time`` before it. Time limit: ``with_stream_time`` (one aggregate, one shuffle and
    sort by partition and chunk), then one shuffle and sort by key and a Python kernel, since the start
    of a period depends on the end of the previous one; the kernel holds one row of one key in memory.
    With a duration of 0: no shuffle. With ``emit_early``: one shuffle and two sorts by partition and a
    Python kernel, instead of the shuffle and sort by key.

    The results are the emitted updates (``_outcome`` is ``applied``), and those that wait after the run
    (``kept``).

    Emitted: in the order of record-by-record processing: by place and key, ``_arrival`` being the place
    in epoch microseconds. An update that is due on arrival, because T has passed its time already,
    follows those due at that T: its ``_arrival`` is T - duration. A duration of 0 keeps the order of
    arrival.

    Waiting: the last update, ``_place`` (TIMESTAMP) of the first one or the window's end, ``_bytes``
    the length of the row's JSON text. Kafka counts bytes differently.

    Source: FORMAT 4.11, section 7; kip328-timer-not-restarted, kip328-probe-ties,
    kip328-window-final-once, kip328-session-final, kip328-sliding-final-twice.
    """

    def plan(self, times: RunTimes = BEFORE_ANY_RUN) -> RunPlan:
        window, until = self.operator.window, self.operator.until
        again = window is not None and window.open_when_due
        return RunPlan(
            self.whole_inputs,
            stream_time=SuppressTime(self, bounded=not self.single_task, reports_lateness=True),
            # Results are ordered by their place in the buffer, which is a time.
            order=ResultOrder(chunk=hour_of_arrival),
            emits_once=isinstance(until, UntilWindowCloses) and not again,
            counts=SuppressCounts(self.node.name, until),
        )

    @property
    def kept(self) -> list[str]:
        """The columns of an update that the buffer keeps."""
        source = self.operator.source
        return [*source.key, *value_columns(source), TIMESTAMP, PARTITION, IS_TOMBSTONE]

    def process(self, rows: list[DataFrame], inputs: Sequence[Input], context: RunContext) -> DataFrame:
        operator, until, window = self.operator, self.operator.until, self.operator.window
        changes, buffer, kept = rows[0].withColumn(TURN, F.lit(0)), context.state, self.kept
        key, wait = list(operator.source.key), micros(operator.period)
        size = F.octet_length(F.to_json(F.struct(*key, *value_columns(operator.source), TIMESTAMP)))
        after = F.unix_micros(context.stream_time_after)
        end_inclusive = window is not None and window.end_inclusive
        turn = _turn(key, end_inclusive)
        if isinstance(until, UntilWindowCloses):
            if window is not None and window.open_when_due:
                judged = _each_final(self._timed(changes, context), buffer, key, kept, wait, after)
            else:
                # Of a session the end is inclusive (FORMAT section 7).
                end, passed = F.unix_micros(WINDOW_END), after - wait
                due = end < passed if end_inclusive else end <= passed
                judged = _final(changes, buffer, key, kept, due)
            silent = F.col(IS_TOMBSTONE)
        elif not longest(operator.period):
            return _pass_through(changes, buffer, key, kept)
        else:
            seen = self._timed(changes, context)
            fresh = _together(seen, buffer, kept, F.unix_micros(STREAM_TIME).alias(STREAM_TIME))
            unlimited = until.max_records is None and until.max_bytes is None
            if until.when_full == "emit_early" and not unlimited:
                left = emit_early(
                    fresh,
                    kept=kept,
                    turn=turn,
                    period=wait,
                    size=size,
                    max_records=most(until.max_records),
                    max_bytes=most(until.max_bytes),
                )
                return _result(left, kept, F.col(RELEASED), size, F.col(NTH))
            judged = split_into_periods(fresh, key=key, kept=kept, period=wait, after=after)
            silent = F.lit(False)
        judged = judged.withColumn(BYTES, F.when(~F.col(RELEASED), size))
        out: Column = F.col(RELEASED)
        late_order = F.struct(*[F.when(F.col(LATE), F.col(c)).alias(c) for c in ORDER]).alias("_order")
        last_turn = F.struct(LATE, late_order, *turn)
        return _result(judged.where(~(out & silent)), kept, out, F.col(BYTES), last_turn)

    def _timed(self, changes: DataFrame, context: RunContext) -> DataFrame:
        """Adds T as of just before each update."""
        return with_stream_time(changes, context.stream_time, chunk=self.chunk, included=False)

    def state_after(self, rows: DataFrame, context: RunContext) -> DataFrame:
        """Returns the buffer after a run: ``key columns, value columns, timestamp, partition,
        is_tombstone, _place, _bytes`` of each update that waits."""
        return rows.where(F.col(OUTCOME) == Outcome.KEPT).select(*self.kept, PLACE, BYTES)


def _result(rows: DataFrame, kept: Sequence[str], out: Column, size: Column, turn: Column) -> DataFrame:
    """Returns the emitted and the waiting updates with their order."""
    return rows.select(
        *_judged(kept, out, F.timestamp_micros(PLACE)),
        F.when(~F.col(RELEASED), size).alias(BYTES),
        F.col(RANK).alias(ARRIVAL),
        F.lit(0).alias(INPUT),
        F.lit(0).alias(INPUT_PARTITION),
        F.lit(0).cast("long").alias(INPUT_OFFSET),
        turn.alias(TURN),
    )


def _turn(key: Sequence[str], window_end_inclusive: bool) -> list[str]:
    """Returns the key in Kafka's order: a window's start last, a session's end before its start."""
    window = (WINDOW_END, WINDOW_START) if window_end_inclusive else (WINDOW_START, WINDOW_END)
    return [*(k for k in key if k not in window), *(w for w in window if w in key)]


def _judged(kept: Sequence[str], out: Column, place: Column) -> list[Column]:
    outcome = F.when(out, Outcome.APPLIED).otherwise(Outcome.KEPT)
    return [*[F.col(c) for c in kept], place.alias(PLACE), outcome.alias(OUTCOME)]


def _together(
    changes: DataFrame, buffer: DataFrame | None, kept: Sequence[str], *more: Column
) -> DataFrame:
    """Returns new updates (``_fresh``) and waiting ones together; ``_at`` is the place, epoch
    microseconds."""
    fresh = changes.select(
        *kept, *ORDER, F.unix_micros(TIMESTAMP).alias(AT), F.lit(True).alias(FRESH), *more
    )
    if buffer is None:
        return fresh
    there = [c for c in kept if c in buffer.columns]  # a column added since is not in the buffer
    waiting = buffer.select(*there, F.unix_micros(PLACE).alias(AT), F.lit(False).alias(FRESH))
    return union(fresh, waiting)


def _pass_through(
    changes: DataFrame, buffer: DataFrame | None, key: Sequence[str], kept: Sequence[str]
) -> DataFrame:
    """Emits all updates by arrival, after those that waited for an earlier, longer duration."""
    turn = F.col(TURN) if TURN in changes.columns else F.lit(0)
    rows = _together(changes, buffer, kept, turn.alias(TURN))
    return rows.select(
        *_judged(kept, F.lit(True), F.timestamp_micros(AT)),
        F.lit(None).cast("int").alias(BYTES),
        F.coalesce(F.col(ARRIVAL), F.col(AT) + F.lit(_EARLIEST)).alias(ARRIVAL),
        *[F.coalesce(c, F.lit(0)).alias(c) for c in ORDER[1:]],
        F.struct(TURN, *[F.col(k) for k in key]).alias(TURN),
    )


def _final(
    changes: DataFrame, buffer: DataFrame | None, key: Sequence[str], kept: Sequence[str], due: Column
) -> DataFrame:
    """Returns the last update of each window."""
    # By key alone, as the result's store needs them next: each partition has its own keys.
    rows = repartitioned(_together(changes, buffer, kept), key)
    in_order = W.partitionBy(*key, PARTITION).orderBy(FRESH, *ORDER)
    end = F.unix_micros(WINDOW_END)
    # lead, not row_number over a descending window: Spark would sort once more, before the shuffle.
    return (
        rows.withColumn(_LAST, F.lead(F.lit(1)).over(in_order).isNull())
        .where(_LAST)
        .withColumns(
            {
                PLACE: end,
                RANK: end,
                LATE: F.lit(False),
                RELEASED: F.coalesce(due, F.lit(False)),
            }
        )
    )


def _each_final(
    changes: DataFrame,
    buffer: DataFrame | None,
    key: Sequence[str],
    kept: Sequence[str],
    wait: Column,
    after: Column,
) -> DataFrame:
    """Returns the last update of each window before the window was due, and all later ones.

    An update is emitted iff the window is due when the next one arrives, or at the end of the run.
    """
    seen = F.unix_micros(STREAM_TIME).alias(STREAM_TIME)
    rows = repartitioned(_together(changes, buffer, kept, seen), key)
    in_order = W.partitionBy(*key, PARTITION).orderBy(FRESH, *ORDER)
    next_one = F.lead(F.struct(STREAM_TIME)).over(in_order)
    end = F.unix_micros(WINDOW_END)
    was_due = F.coalesce(end <= F.col(STREAM_TIME) - wait, F.lit(False))
    last = F.when(F.isnull(_NEXT), after).otherwise(F.col(_NEXT)[STREAM_TIME])
    return (
        rows.withColumn(_NEXT, next_one)
        .withColumns(
            {
                PLACE: end,
                LATE: was_due,
                RANK: F.when(was_due, F.col(STREAM_TIME) - wait).otherwise(end),
                RELEASED: F.coalesce(end <= last - wait, F.lit(False)),
            }
        )
        .where(F.col(RELEASED) | F.isnull(_NEXT))
    )
