"""suppress: holds back updates of a table until a time limit or until a window closes (KIP-328).

Each key has one *place* in the buffer; an update replaces value and timestamp but keeps the place.
Stream time T is the largest timestamp of an update that has reached suppress, per partition. A run
is one arrival: due updates are emitted at its end, ordered as in Kafka Streams' buffer: by place, then
key.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Literal

from pyspark.sql import Column, DataFrame
from pyspark.sql import Window as W
from pyspark.sql import functions as F

from vt_dagster.columns import (
    ARRIVAL,
    HOME,
    INPUT,
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
from vt_dagster.core.arrival_order import Outcome, gathered, hour_of_arrival, micros, union
from vt_dagster.core.log_columns import value_columns
from vt_dagster.core.processor import Counts, Processor
from vt_dagster.core.run_context import Input, RunContext
from vt_dagster.core.stream_time import STREAM_TIME, Timed, with_stream_time
from vt_dagster.core.suppress_emit_early import AT as _AT
from vt_dagster.core.suppress_emit_early import BYTES, NTH, PLACE, emit_early, most
from vt_dagster.core.suppress_emit_early import FRESH as _FRESH
from vt_dagster.core.suppress_emit_early import RANK as _RANK
from vt_dagster.core.suppress_emit_early import RELEASED as _RELEASED
from vt_dagster.core.suppress_periods import LATE as _LATE
from vt_dagster.core.suppress_periods import split_into_periods
from vt_dagster.errors import BufferFullError
from vt_dagster.topology.durations import Duration
from vt_dagster.topology.operators import (
    Limit,
    Suppress,
    UntilTimeLimit,
    UntilWindowCloses,
    WhenFull,
)

_LAST = "_last"
_NEXT = "_next"
_EARLIEST = -(2**62)


class SuppressProcessor(Processor[Suppress]):
    """See :func:`suppress` and :func:`buffer_after`."""

    has_stream_time = True
    reports_lateness = True

    @property
    def emits_once(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        window = self.operator.window
        again = window is not None and window.open_when_due
        return isinstance(self.operator.until, UntilWindowCloses) and not again

    def result_chunk(self, single_task: bool) -> Column | None:
        # Results are ordered by their place in the buffer, which is a time.
        return None if single_task else hour_of_arrival()

    def stream_time_rows(self, inputs: Sequence[Input]) -> Timed:
        return Timed(self.in_order(inputs)[0], F.lit(True))

    def process(self, rows: list[DataFrame], inputs: Sequence[Input], context: RunContext) -> DataFrame:
        operator, until = self.operator, self.operator.until
        window = operator.window
        return suppress(
            rows[0].withColumn(TURN, F.lit(0)),
            context.state,
            key=list(operator.source.key),
            values=value_columns(operator.source),
            until="time_limit" if isinstance(until, UntilTimeLimit) else "window_closes",
            duration=operator.period,
            before=context.stream_time,
            after=context.stream_time_after,
            window_end_inclusive=window is not None and window.end_inclusive,
            open_when_due=window is not None and window.open_when_due,
            max_records=until.max_records,
            max_bytes=until.max_bytes,
            when_full=until.when_full,
            chunk=self.chunk,
        )

    def state_after(self, rows: DataFrame, context: RunContext) -> DataFrame:
        source = self.operator.source
        return buffer_after(rows, key=list(source.key), values=value_columns(source))

    def counts(self, taken: int, found: Counts, judged: Counts) -> dict[str, int]:
        return super().counts(taken, found, judged) | {"suppression_emit": found[Outcome.APPLIED]}

    def fullness(self, state: DataFrame | None) -> DataFrame | None:
        return None if state is None else fullness(state)

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
        until = self.operator.until
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
                f"{self.node.name}: {next(iter(over.values()))}; when_full='shut_down' stops the run "
                "before its commit, so nothing is lost. Raise the limit or set another when_full, "
                "and run again: the run reads the same records",
                list(over),
            )


def suppress(
    changes: DataFrame,
    buffer: DataFrame | None,
    *,
    key: Sequence[str],
    values: Sequence[str],
    until: Literal["time_limit", "window_closes"],
    duration: Duration,
    before: Column,
    after: Column,
    window_end_inclusive: bool = False,
    open_when_due: bool = False,
    max_records: Limit = None,
    max_bytes: Limit = None,
    when_full: WhenFull = "unbounded",
    chunk: Column | None = None,
) -> DataFrame:
    """Decides which updates of a table are emitted in this run, and which wait.

    ``time_limit``: the first update of a key opens a period; when T >= its timestamp + duration, the
    last update of the key so far is emitted, and the next one opens a new period. Without limits on the
    buffer, a run emits the same updates, in the same order, as record-by-record processing.

    ``window_closes``: the last update of a window is emitted once T has passed its end + duration. A
    tombstone keeps its place until then, as in Kafka Streams, but is not emitted. Sliding windows are
    still open at that very moment: each later update of theirs is emitted too, as in Kafka Streams.

    With ``emit_early`` the limits are checked after each update (see ``emit_early``). Otherwise all
    waiting updates are kept; the caller checks their :func:`fullness` at the end of the run.

    Plan, ``window_closes``: one shuffle and sort by key of updates and buffer; for sliding windows
    ``with_stream_time`` before it. ``time_limit``: ``with_stream_time`` (one aggregate, one shuffle and
    sort by partition and chunk), then one shuffle and sort by key and a Python kernel, since the start
    of a period depends on the end of the previous one; the kernel holds one row of one key in memory. A
    duration of 0: none. Emitting early: one shuffle and two sorts by partition, and a kernel, instead
        of those by
    key.

    Args:
        changes: a table's change rows, ``key columns, value columns, timestamp, partition,
            is_tombstone, ORDER, …``, all of them latest. They may have other columns.
        buffer: the updates that waited before the run; None = none.
        key: the key columns, for a windowed table including ``window_start`` and ``window_end``.
        duration: for ``window_closes``: the windows' ``closes_after``.
        before: T of the row's partition before the run (TIMESTAMP; null = no update yet); for
            ``window_closes`` used for sliding windows only.
        after: T at the end of the run.
        window_end_inclusive: the windows are sessions. A window is emitted iff ``window_end <= T -
            duration``, a session iff ``window_end < T - duration`` (FORMAT section 7).
        open_when_due: the windows are sliding ones; used for ``window_closes`` only.
        max_records, max_bytes: limits of each partition's buffer; bytes as in ``_bytes``.
        chunk: see ``with_stream_time``.

    Returns:
        the emitted updates (``_outcome`` is ``applied``), and those that wait after the run (``kept``).

        Emitted: ``key columns, value columns, timestamp, partition, is_tombstone, ORDER, _turn``, in
        the order of record-by-record processing: by place and key, ``_arrival`` being the place in
        epoch microseconds. An update that is due on arrival, because T has passed its time already,
        follows those due at that T: its ``_arrival`` is T - duration. A duration of 0 keeps the order
            of arrival.

        Waiting: ``key columns, value columns, timestamp, partition, is_tombstone, _place, _bytes``:
        the last update, ``_place`` (TIMESTAMP) of the first one or the window's end, ``_bytes``
        the length of the row's JSON text. Kafka counts bytes differently.

    Source: FORMAT 4.11, section 7; kip328-timer-not-restarted, kip328-probe-ties,
    kip328-window-final-once, kip328-session-final, kip328-sliding-final-twice.
    """
    kept = [*key, *values, TIMESTAMP, PARTITION, IS_TOMBSTONE]
    size = F.octet_length(F.to_json(F.struct(*key, *values, TIMESTAMP)))
    turn = _turn(key, window_end_inclusive)
    limited = when_full == "emit_early" and not (max_records is None and max_bytes is None)
    if until == "window_closes" and open_when_due:
        seen = with_stream_time(changes, before, chunk=chunk, included=False)
        judged = _each_final(seen, buffer, key, kept, micros(duration), F.unix_micros(after))
    elif until == "window_closes":
        wait = F.unix_micros(after) - micros(duration)
        end = F.unix_micros(WINDOW_END)
        judged = _final(changes, buffer, key, kept, end < wait if window_end_inclusive else end <= wait)
    elif _is_zero(duration):
        return _pass_through(changes, buffer, key, kept)
    else:
        seen = with_stream_time(changes, before, chunk=chunk, included=False)
        rows = _together(seen, buffer, kept, F.unix_micros(STREAM_TIME).alias(STREAM_TIME))
        if limited:
            left = emit_early(
                rows,
                kept=kept,
                turn=turn,
                period=micros(duration),
                size=size,
                max_records=most(max_records),
                max_bytes=most(max_bytes),
            )
            return _result(left, kept, F.col(_RELEASED), size, F.col(NTH))
        judged = split_into_periods(
            rows, key=key, kept=kept, period=micros(duration), after=F.unix_micros(after)
        )
    judged = judged.withColumn(BYTES, F.when(~F.col(_RELEASED), size))
    out: Column = F.col(_RELEASED)
    silent = F.col(IS_TOMBSTONE) if until == "window_closes" else F.lit(False)
    late_order = F.struct(*[F.when(F.col(_LATE), F.col(c)).alias(c) for c in ORDER]).alias("_order")
    last_turn = F.struct(_LATE, late_order, *turn)
    return _result(judged.where(~(out & silent)), kept, out, F.col(BYTES), last_turn)


def _result(rows: DataFrame, kept: Sequence[str], out: Column, size: Column, turn: Column) -> DataFrame:
    """Returns the rows of ``suppress``: emitted and waiting updates with their order."""
    return rows.select(
        *_judged(kept, out, F.timestamp_micros(PLACE)),
        F.when(~F.col(_RELEASED), size).alias(BYTES),
        F.col(_RANK).alias(ARRIVAL),
        F.lit(0).alias(INPUT),
        F.lit(0).alias(HOME),
        F.lit(0).cast("long").alias(SEQUENCE),
        turn.alias(TURN),
    )


def buffer_after(rows: DataFrame, *, key: Sequence[str], values: Sequence[str]) -> DataFrame:
    """Returns the buffer after a run: see ``suppress``."""
    waiting = rows.where(F.col(OUTCOME) == Outcome.KEPT)
    return waiting.select(*key, *values, TIMESTAMP, PARTITION, IS_TOMBSTONE, PLACE, BYTES)


def fullness(buffer: DataFrame) -> DataFrame:
    """Returns each partition's buffer size: ``partition, records, bytes``. Plan: one aggregate."""
    return buffer.groupBy(PARTITION).agg(
        F.count(F.lit(1)).alias("records"), F.sum(BYTES).cast("long").alias("bytes")
    )


def _turn(key: Sequence[str], window_end_inclusive: bool) -> list[str]:
    """Returns the key in Kafka's order: a window's start last, a session's end before its start."""
    window = (WINDOW_END, WINDOW_START) if window_end_inclusive else (WINDOW_START, WINDOW_END)
    return [*(k for k in key if k not in window), *(w for w in window if w in key)]


def _is_zero(duration: Duration) -> bool:
    lengths = [duration] if isinstance(duration, timedelta) else duration.values()
    return all(length == timedelta(0) for length in lengths)


def _judged(kept: Sequence[str], out: Column, place: Column) -> list[Column]:
    outcome = F.when(out, Outcome.APPLIED).otherwise(Outcome.KEPT)
    return [*[F.col(c) for c in kept], place.alias(PLACE), outcome.alias(OUTCOME)]


def _together(
    changes: DataFrame, buffer: DataFrame | None, kept: Sequence[str], *more: Column
) -> DataFrame:
    """Unites updates (``_fresh``) and waiting ones; ``_at`` is the place in epoch microseconds."""
    fresh = changes.select(
        *kept, *ORDER, F.unix_micros(TIMESTAMP).alias(_AT), F.lit(True).alias(_FRESH), *more
    )
    if buffer is None:
        return fresh
    there = [c for c in kept if c in buffer.columns]  # a column added since is not in the buffer
    waiting = buffer.select(*there, F.unix_micros(PLACE).alias(_AT), F.lit(False).alias(_FRESH))
    return union(fresh, waiting)


def _pass_through(
    changes: DataFrame, buffer: DataFrame | None, key: Sequence[str], kept: Sequence[str]
) -> DataFrame:
    """Emits all updates by arrival, after those that waited for an earlier, longer duration."""
    turn = F.col(TURN) if TURN in changes.columns else F.lit(0)
    rows = _together(changes, buffer, kept, turn.alias(TURN))
    return rows.select(
        *_judged(kept, F.lit(True), F.timestamp_micros(_AT)),
        F.lit(None).cast("int").alias(BYTES),
        F.coalesce(F.col(ARRIVAL), F.col(_AT) + F.lit(_EARLIEST)).alias(ARRIVAL),
        *[F.coalesce(c, F.lit(0)).alias(c) for c in ORDER[1:]],
        F.struct(TURN, *[F.col(k) for k in key]).alias(TURN),
    )


def _final(
    changes: DataFrame, buffer: DataFrame | None, key: Sequence[str], kept: Sequence[str], due: Column
) -> DataFrame:
    """Returns the last update of each window."""
    # By key alone, as the result's store needs them next: each partition has its own keys.
    rows = gathered(_together(changes, buffer, kept), key)
    in_order = W.partitionBy(*key, PARTITION).orderBy(_FRESH, *ORDER)
    end = F.unix_micros(WINDOW_END)
    # lead, not row_number over a descending window: Spark would sort once more, before the shuffle.
    return (
        rows.withColumn(_LAST, F.lead(F.lit(1)).over(in_order).isNull())
        .where(_LAST)
        .withColumns(
            {
                PLACE: end,
                _RANK: end,
                _LATE: F.lit(False),
                _RELEASED: F.coalesce(due, F.lit(False)),
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
    rows = gathered(_together(changes, buffer, kept, seen), key)
    in_order = W.partitionBy(*key, PARTITION).orderBy(_FRESH, *ORDER)
    next_one = F.lead(F.struct(STREAM_TIME)).over(in_order)
    end = F.unix_micros(WINDOW_END)
    was_due = F.coalesce(end <= F.col(STREAM_TIME) - wait, F.lit(False))
    last = F.when(F.isnull(_NEXT), after).otherwise(F.col(_NEXT)[STREAM_TIME])
    return (
        rows.withColumn(_NEXT, next_one)
        .withColumns(
            {
                PLACE: end,
                _LATE: was_due,
                _RANK: F.when(was_due, F.col(STREAM_TIME) - wait).otherwise(end),
                _RELEASED: F.coalesce(end <= last - wait, F.lit(False)),
            }
        )
        .where(F.col(_RELEASED) | F.isnull(_NEXT))
    )
