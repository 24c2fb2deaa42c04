"""The stream-table join: each record joined with the table as of the record's own time (KIP-914).

A feature join joins one stream with many versioned tables in the same way.

**Grace period** (KIP-923). A record waits until stream time >= its timestamp + grace period, so that it
still matches table records that arrive slightly later. This stream time is the buffer's own: the
largest timestamp of a record with a key and a value. Only the stream advances it, never the table.

A late record is emitted when it arrives, after the records that are due by then. Results are therefore
in the order in which record-by-record processing emits them: by ``_emitted_at``, and at one such time
those that waited first.

The buffer needs no storage of its own. A run emits all records up to a time: ``stream time - grace
period`` at its end, and never less than in earlier runs. The waiting records are exactly those of the
stream's log with a larger timestamp, because emitted records and those late on arrival lie at or before
that time. So the buffer is a range of the log, which the next run reads again (pruned by time), and
the grace period may change between runs: no record is emitted twice or lost.

**Corrections.** A corrected join re-joins records when the table changes. A record of the table changes
its key's value from its timestamp to the next version of the key. The stream records of that key and
interval that an earlier run has joined are joined again. The run finds them by key and time in the
stream's log, in the range that its table records reach back to. The table's record itself, which the
run has read, is the new answer: no version is looked up. A run without table records reads no such
range and is a plain stream-table join.

If the join looks ahead, a record of the table also changes the match of records from before its time,
and a deletion reveals another version. So the records at most ``max_age`` away are looked up again, in
the part of the table's log that lies as close to them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import reduce
from typing import Any, ClassVar, cast

from pyspark.sql import Column, DataFrame
from pyspark.sql import Window as W
from pyspark.sql import functions as F
from pyspark.sql.types import DataType, StructField, StructType

from vt_dagster.columns import (
    ARRIVAL,
    AT_ONCE,
    CAUSE,
    EMITTED_AT,
    FINAL,
    IS_FINAL,
    IS_LATE,
    IS_LATEST,
    IS_TOMBSTONE,
    LEFT_OFFSET,
    OFFSET,
    OLD,
    OUTCOME,
    PARTITION,
    RECORDED_AT,
    REVISION,
    TIMESTAMP,
    VALID_FROM,
    VALID_TO,
)
from vt_dagster.core import table_store
from vt_dagster.core.arrival_order import (
    Outcome,
    arrival_chunk,
    by_partition,
    has_key,
    hour_of,
    micros,
    union,
    with_columns,
)
from vt_dagster.core.as_of_join import (
    ANSWERS_FROM,
    ANSWERS_TO,
    FOUND,
    INSTANT,
    KNOWN_AT,
    PLACES,
    JoinStrategy,
    SystemTimeHistory,
    answer_as,
    answers_from_log,
    as_of_join,
    at_place,
    still_answers,
    system_time_join,
    with_answers,
)
from vt_dagster.core.log_columns import POSITION_TYPE, comparable, value_columns
from vt_dagster.core.processor import (
    BEFORE_ANY_RUN,
    Counts,
    Input,
    InputPlan,
    Lookup,
    Processor,
    ResultOrder,
    RunContext,
    RunCounts,
    RunPlan,
    RunTimes,
    TimePolicy,
    Times,
    earliest,
)
from vt_dagster.core.source_records import POSITION, RAW, REASON, SOURCE
from vt_dagster.core.stream_time import (
    STREAM_TIME,
    Bounds,
    Timed,
    exact_chunks,
    with_stream_time,
    with_time_where_needed,
)
from vt_dagster.core.table_changes import LEFT, RIGHT, columns, match_columns, match_names
from vt_dagster.errors import RefusedRecordsError
from vt_dagster.topology.feature_views import FeatureView
from vt_dagster.topology.model import VersionedTable
from vt_dagster.topology.operators import CorrectedJoin, JoinKind, StreamTableJoin
from vt_dagster.topology.operators.stream_table_join import AsKnown

# Grace buffer


def moves_stream_time(key: Sequence[str]) -> Column:
    """Returns whether a stream record advances the join's stream time: it has a value and a key. Other
    records are dropped; a left join emits those with a value at once.

    Source: FORMAT 4.5.1; kip923-probe-dropped-does-not-move-time.
    """
    return ~F.col(IS_TOMBSTONE) & has_key(key)


def waiting(log: DataFrame, *, key: Sequence[str], emitted_up_to: Column) -> DataFrame:
    """Returns the waiting records among those that a join has consumed.

    Args:
        log: the consumed part of the stream's log.
        emitted_up_to: the time up to which records of their partition were emitted after that part.

    Source: FORMAT 4.5.1, 4.5.6; kip923-probe-left-in-buffer.
    """
    return log.where(moves_stream_time(key) & (F.col(TIMESTAMP) > emitted_up_to))


_FIRST = -(1 << 57)
"""A time before all timestamps: the place of records that arrive before any stream time."""
_WAITED = -1
_PLACE = (EMITTED_AT, AT_ONCE)


# Stream-table join


MATCHED = "_matched"
UNMATCHED, CORRECTED = "unmatched", "corrected"
_END = re.compile(rf"\bright\s*\.\s*`?{VALID_TO}\b", re.IGNORECASE)
_ROW = "_row"
"""The table's row next to the stream's columns, one of which may be named ``right``."""


@dataclass(frozen=True)
class GraceTime(TimePolicy):
    """The stream time of a grace buffer: of the stream's records that take part in the join."""

    processor: StreamTableJoinProcessor

    def rows(self, inputs: Sequence[Input]) -> Timed:
        operator, deadline = self.processor.operator, None
        moves = moves_stream_time(operator.left.key)
        if operator.waits and operator.grace_period is not None:
            # From this time on a record is emitted on arrival, and has a place by stream time.
            at_once = F.try_add(F.unix_micros(TIMESTAMP), micros(operator.grace_period))
            deadline = F.when(moves, at_once)
            if operator.kind == "left":
                deadline = deadline.when(~F.col(IS_TOMBSTONE), F.lit(_FIRST))
        return Timed(inputs[0].rows.withColumn(ARRIVAL, F.col(OFFSET)), moves, deadline)

    def undecided_chunks(self, inputs: Sequence[Input], bounds: Bounds) -> DataFrame:
        # The place of a record that is emitted on arrival needs its exact stream time.
        return exact_chunks(bounds)


@dataclass(frozen=True)
class StreamTableJoinCounts(RunCounts):
    """The counts of judged records, and of those without a match."""

    operator: StreamTableJoin
    balances: ClassVar = (
        "records in = joined + dropped + waiting",
        "records joined = records out",
    )

    @property
    def shown(self) -> tuple[str, ...]:
        return ("in", "out", "late", "dropped", UNMATCHED, Outcome.WAITING)

    def tallies(self, columns: Sequence[str]) -> dict[str, Column]:
        return {UNMATCHED: F.count_if(~F.col(MATCHED))}

    def of_run(self, taken: int, found: Counts, judged: Counts) -> dict[str, int]:
        outcomes = (Outcome.APPLIED, Outcome.LATE, Outcome.WAITING, Outcome.DROPPED)
        counts = {"in": taken, **{outcome: judged.get(outcome, 0) for outcome in outcomes}}
        out, joined = found[Outcome.APPLIED], counts[Outcome.APPLIED] + counts[Outcome.LATE]
        unmatched = found[UNMATCHED] if self.operator.kind == "left" else joined - out
        return {**counts, "out": out, UNMATCHED: unmatched}

    @property
    def outcomes(self) -> tuple[str, ...]:
        return (Outcome.APPLIED, Outcome.LATE, Outcome.DROPPED, Outcome.WAITING)

    def accounts(self, totals: Counts, taken: int, rows: int) -> list[tuple[str, int, int]]:
        out, inner = totals.get("out", 0), self.operator.kind == "inner"
        made = sum(totals.get(name, 0) for name in (Outcome.APPLIED, Outcome.LATE, CORRECTED))
        made -= totals.get(UNMATCHED, 0) if inner else 0
        records_in, records_out = self.balances
        return [
            (records_in, totals.get("in", 0), sum(self.parts(totals).values())),
            ("records out = rows in the log", out, rows),
            (records_out, made, out),
        ]


class StreamTableJoinProcessor(Processor[StreamTableJoin]):
    """Judges the stream's records, then joins them with the table (:func:`join`)."""

    def plan(self, times: RunTimes = BEFORE_ANY_RUN) -> RunPlan:
        operator = self.operator
        bounded = not self.single_task and operator.waits
        return RunPlan(
            inputs=(InputPlan(operator.left, _waiting_from(times)),),
            reads_own_table=False,
            looked_up=operator.right,
            lookup_margin=INSTANT if operator.at == "before" else timedelta(0),
            lookup_reach=_reach(operator),
            uses_system_time=operator.as_known != "now",
            stream_time=GraceTime(self, bounded, emits_after=operator.grace_period or timedelta(0)),
            has_grace_buffer=operator.waits,
            order=self._result_order(),
            keeps_order=not operator.waits,
            monotonic=operator.waits,
            drops_late=False,
            counts=StreamTableJoinCounts(operator),
        )

    def _result_order(self) -> ResultOrder:
        """Returns the order of arrival; with a grace buffer the order in which it emits: of the records
        that waited by timestamp, key, arrival (kip923-probe-tie-order)."""
        if not self.operator.waits:
            return ResultOrder((ARRIVAL,))
        return ResultOrder((EMITTED_AT, AT_ONCE, *self.node.key, ARRIVAL))

    def waiting(
        self, logs: Sequence[DataFrame], emitted_up_to: Times, state: DataFrame | None
    ) -> DataFrame:
        return waiting(logs[0], key=self.operator.left.key, emitted_up_to=by_partition(emitted_up_to))

    def judge(self, inputs: Sequence[Input], context: RunContext) -> DataFrame:
        """Decides for each record whether it is joined in this run, and its place among the results.

        Plan: none without a grace period, or if by the bounds no record is emitted on arrival;
        otherwise ``with_time_where_needed`` over the records that arrived.

        Returns:
            all records with ``_outcome``: ``applied`` (timestamp <= emitted_up_to), ``late`` (records
            with a larger timestamp have been emitted when it arrives, usually because timestamp <
            stream time - grace: joined at once), ``waiting``, or ``dropped`` (no value; in an inner
            join also no key). A left join emits a record without a key at once. With a grace period
            also ``_emitted_at, _at_once``.

        Source: KIP-923; kip923-dequeue-boundary, kip923-late-is-immediate, kip923-probe-left-null-key.
        """
        operator, (stream,) = self.operator, inputs
        key, grace, bounds = operator.left.key, operator.grace_period, context.bounds
        arrived, waited = stream.rows.withColumn(ARRIVAL, F.col(OFFSET)), stream.earlier
        if waited is not None:
            waited = waiting(waited, key=key, emitted_up_to=context.emitted_up_to)
            waited = waited.withColumn(ARRIVAL, F.col(OFFSET))
        keyless = Outcome.APPLIED if operator.kind == "left" else Outcome.DROPPED
        outcome = F.when(F.col(IS_TOMBSTONE), Outcome.DROPPED).when(~has_key(key), keyless)
        if grace is None or not operator.waits:
            return union(arrived, waited).withColumn(OUTCOME, outcome.otherwise(Outcome.APPLIED))
        if bounds is not None and bounds.none_passed:
            seen = arrived.withColumn(STREAM_TIME, F.lit(None).cast("timestamp"))
        else:
            moves, chunk = moves_stream_time(key), self.chunk if bounds is None else self.fine_chunk
            before = context.stream_time
            seen = with_time_where_needed(arrived, before, moves, chunk=chunk, bounds=bounds)
        now, at = F.unix_micros(STREAM_TIME), F.unix_micros(TIMESTAMP)
        # A longer grace period than before never reopens a time up to which records were emitted.
        emitted = F.greatest(F.try_subtract(now, micros(grace)), F.unix_micros(context.emitted_up_to))
        at_once = F.coalesce((at <= emitted) | ~has_key(key), F.lit(False))
        seen = seen.withColumns(
            {
                EMITTED_AT: F.when(at_once, F.greatest(emitted, F.lit(_FIRST))).otherwise(at),
                AT_ONCE: F.when(at_once, F.col(ARRIVAL)).otherwise(F.lit(_WAITED)),
            }
        )
        if waited is not None:
            seen = union(seen, waited.withColumns({EMITTED_AT: at, AT_ONCE: F.lit(_WAITED)}))
        outcome = (
            outcome.when(at < F.col(EMITTED_AT), Outcome.LATE)
            .when(F.col(TIMESTAMP) <= context.emitted_up_to_after, Outcome.APPLIED)
            .otherwise(Outcome.WAITING)
        )
        return seen.withColumn(OUTCOME, outcome).drop(STREAM_TIME)

    def answering(self, versions: DataFrame, stream_time: Column) -> DataFrame:
        operator, right = self.operator, self.operator.right
        first = operator.before_first is not None
        if not isinstance(right, VersionedTable) or not (first or operator.looks_ahead):
            return versions
        horizon = table_store.horizon_of(right, stream_time)
        return with_answers(versions, key=right.key, horizon=horizon, at=operator.at, first=first)

    @property
    def lookup_kind(self) -> JoinKind:
        """The kind of join of a lookup, which decides whether unmatched records have results."""
        return self.operator.kind

    def selected_columns(self, judged: DataFrame) -> Sequence[tuple[str, str]]:
        """Returns the columns of a lookup's result: (name, SQL expression over ``left.*`` and
        ``right.*``)."""
        return self.operator.projection().columns

    def look_up(self, judged: DataFrame, lookup: Lookup, context: RunContext) -> DataFrame:
        operator, right = self.operator, self.operator.right
        projection = operator.projection()
        horizon = None
        needed = {*right.key, *projection.columns_of("right"), IS_TOMBSTONE, PARTITION}
        if isinstance(right, VersionedTable):
            horizon = table_store.horizon_of(right, lookup.stream_time)
            if operator.before_first is not None:
                # The oldest version that the table has answers all times before, also expired ones.
                horizon = F.lit(None).cast("timestamp")
            needed |= {VALID_FROM, VALID_TO, ANSWERS_FROM, ANSWERS_TO}
        records = judged.where(F.col(OUTCOME).isin(Outcome.APPLIED, Outcome.LATE))
        if operator.as_known != "now":
            needed.add(RECORDED_AT)
            records = records.withColumn(KNOWN_AT, known_at_of(operator.as_known))
        return join(
            records,
            lookup.rows.select(*[c for c in lookup.rows.columns if c in needed]),
            kind=self.lookup_kind,
            stream_key=operator.left.key,
            table_key=right.key,
            columns=self.selected_columns(judged),
            horizon=horizon,
            strategy=lookup.strategy,
            history=lookup.history,
            max_age=operator.max_age,
            max_wait=operator.max_age if operator.looks_ahead else None,
            before=operator.at == "before",
        )

    def process(self, rows: list[DataFrame], inputs: Sequence[Input], context: RunContext) -> DataFrame:
        raise AssertionError("a stream-table join uses judge and look_up instead of process")


def _reach(operator: StreamTableJoin) -> timedelta | None:
    """Returns how long after its time a record's match may start; None = without limit."""
    if operator.before_first is not None:
        return None
    return operator.max_age if operator.looks_ahead else timedelta(0)


def _waiting_from(times: RunTimes) -> int | None:
    """Returns a time that is before all waiting records of the stream; None = no record waits."""
    held = any(times.stream_time[p] > moment for p, moment in times.emitted_up_to.items())
    return min(times.emitted_up_to.values()) if held else None


def known_at_of(as_known: AsKnown) -> Column:
    """Returns the cut of a record with ``timestamp`` and ``recorded_at``: later recorded versions do
    not count."""
    if isinstance(as_known, timedelta):
        return F.col(TIMESTAMP) + F.lit(as_known)
    return F.coalesce(RECORDED_AT, TIMESTAMP)


def join(
    stream: DataFrame,
    table: DataFrame,
    *,
    kind: JoinKind,
    stream_key: Sequence[str],
    table_key: Sequence[str],
    columns: Sequence[tuple[str, str]],
    horizon: Column | None,
    strategy: JoinStrategy = "sorted",
    history: SystemTimeHistory | None = None,
    max_age: timedelta | None = None,
    max_wait: timedelta | None = None,
    before: bool = False,
) -> DataFrame:
    """Joins stream records with the table.

    Plan: versioned, that of ``as_of_join``; unversioned, a plain equi-join, which Spark may broadcast.

    Args:
        stream: ``key columns, timestamp, partition, _arrival, _outcome, …``: the records to emit.
        table: a versioned table's versions, which may have :func:`with_answers`; or an unversioned
            table's current rows.
        columns: the result's (name, SQL expression over ``left.*`` and ``right.*``).
        horizon: ``stream time - history retention`` of the table's partition; None = the table is
            not versioned. An older record joins the current version if that is old enough, otherwise
            nothing (kip914-expired-lookup-left).
        strategy: for a versioned table, see ``as_of_join``.
        history: for a versioned table, restricts the lookup to versions recorded up to each record's
            ``_known_at``; see ``as_of_join``.
        max_age: for a versioned table, a version does not match if ``timestamp - valid_from`` is
            larger. A tombstone never matches.
        max_wait: the same for ``valid_from - timestamp``.
        before: for a versioned table, ``valid_from < timestamp`` instead of ``<=``.

    Returns:
        ``columns, timestamp, partition, is_tombstone (false), _arrival, is_late, _matched, _outcome``,
        and ``_emitted_at, _at_once`` if the records have them:
        one row per record, for an inner join one per record with a match. The result's timestamp is
        that of the stream record.

    Source: KIP-914 "Stream-Table Joins", FORMAT 4.4; kip914-expired-lookup-inner,
    kip914-probe-stream-join-nulls-left-versioned.
    """
    if horizon is None:
        found = _current(stream, table, stream_key, table_key)
    else:
        earlier = F.lit(INSTANT if before else timedelta(0))
        looking = stream.withColumn(TIMESTAMP, F.col(TIMESTAMP) - earlier) if before else stream
        about: dict[str, Any] = {"left_key": stream_key, "right_key": table_key, "horizon": horizon}
        about |= {"name": _ROW, "strategy": strategy}
        if history is None:
            found = as_of_join(looking, table, **about)
        else:
            ends = any(_END.search(expression) for _, expression in columns)
            found = system_time_join(looking, table, history, ends=ends, **about)
        if before:
            found = found.withColumn(TIMESTAMP, F.col(TIMESTAMP) + earlier)
        if max_age is not None:
            found = _near(found, F.col(TIMESTAMP) - F.lit(max_age) <= F.col(_ROW)[VALID_FROM])
        if max_wait is not None:
            found = _near(found, F.col(_ROW)[VALID_FROM] <= F.col(TIMESTAMP) + F.lit(max_wait))
    if kind == "inner":
        found = found.where(F.col(FOUND))
    return with_selected_columns(found, stream.columns, _ROW, columns)


def with_selected_columns(
    found: DataFrame, left: Sequence[str], row: str, columns: Sequence[tuple[str, str]]
) -> DataFrame:
    """Returns the results of looked-up records.

    Args:
        found: the records with the table's row, and ``_found``.
        left: the columns of the records; ``row``: the column of the table's row, a struct.
        columns, returns: see :func:`join`.
    """
    places = [c for c in _PLACE if c in left]
    rows = found.select(
        F.struct(*[F.col(f"`{c}`") for c in left]).alias(LEFT),
        F.col(row).alias(RIGHT),
        TIMESTAMP,
        PARTITION,
        ARRIVAL,
        (F.col(OUTCOME) == Outcome.LATE).alias(IS_LATE),
        FOUND,
        *places,
    )
    return rows.select(
        *[F.expr(expression).alias(name) for name, expression in columns],
        TIMESTAMP,
        PARTITION,
        F.lit(False).alias(IS_TOMBSTONE),
        ARRIVAL,
        IS_LATE,
        F.col(FOUND).alias(MATCHED),
        F.lit(Outcome.APPLIED).alias(OUTCOME),
        *places,
    )


def _near(found: DataFrame, near: Column) -> DataFrame:
    """Removes matches with versions that do not begin near enough to the record."""
    return found.withColumn(FOUND, F.coalesce(F.col(FOUND) & near, F.lit(False))).withColumn(
        _ROW, F.when(F.col(FOUND), F.col(_ROW))
    )


def _current(
    stream: DataFrame, table: DataFrame, stream_key: Sequence[str], table_key: Sequence[str]
) -> DataFrame:
    row = F.struct(*[F.col(f"`{c}`") for c in table.columns]).alias(_ROW)
    keys = [f"_key{i}" for i in range(len(table_key))]
    rows = table.select(*[F.col(k).alias(n) for k, n in zip(table_key, keys, strict=True)], row)
    matches = F.lit(True)
    for k, n in zip(stream_key, keys, strict=True):
        matches = matches & (F.col(k) == F.col(n))
    found = stream.join(rows, matches, "left").drop(*keys)
    return found.withColumn(FOUND, F.col(_ROW).isNotNull())


# Intervals that a table record corrects


FROM, TO, UNTIL, EDGE, BY, ANSWER = "_from", "_to", "_until", "_edge", "_by", "_answer"
_NEW, _SEEN = "_new", "_seen_from"


def affected_times(operator: CorrectedJoin, table: Input, context: RunContext) -> DataFrame:
    """Returns for each new record of a table the interval in which it corrects rows.

    A record corrects rows whose timestamp is at or after its *edge*: the stream time of its partition
    on its own arrival, less the promise. A row before the edge ignores the record and keeps the last
    record, by timestamp and offset, among those that arrived earlier. The result therefore depends on
    the order of arrival alone, never on how records are batched into runs.

    Plan: a semi-join of the earlier records, then one shuffle and sort by key of the remaining rows,
    and the plan of ``with_stream_time`` over the new records.

    Args:
        table: with the earlier log rows that are younger than the oldest change.

    Returns:
        ``match_names`` of the key, ``_from`` (inclusive), ``_to`` (exclusive; null = open),
        ``_edge`` (epoch microseconds), ``_by``: a struct of the record's partition and offset,
        ``_answer``: a struct, null for a tombstone; and ``_until`` (exclusive; null =
        open): the end of the record's interval for rows before any edge. For one key, the intervals
        from the edge on do not overlap, and neither do the intervals up to ``_until``.
    """
    key, earlier, at = operator.right.key, table.earlier, F.col(TIMESTAMP)
    on, place = match_names(key), [PARTITION, OFFSET]
    rows = _with_edge(operator, table, context).select(
        *match_columns(key),
        *(at.alias(FROM), F.greatest(at, F.timestamp_micros(EDGE)).alias(_SEEN)),
        *(F.lit(True).alias(_NEW), *place, EDGE, _answer_of(operator).alias(ANSWER)),
    )
    if earlier is not None:
        there = earlier.select(
            *match_columns(key), at.alias(FROM), at.alias(_SEEN), F.lit(False).alias(_NEW), *place
        )
        keys = rows.select(*on)
        keys = F.broadcast(keys) if table.broadcastable else keys
        rows = union(rows, there.join(keys, on, "left_semi"))
    # A descending window: Spark recomputes a frame that grows downwards for each row.
    later = W.partitionBy(*on).orderBy(*[F.col(c).desc() for c in (FROM, OFFSET, PARTITION)])
    until, seen_until = F.lag(FROM), F.min(_SEEN)
    timed = rows.withColumns(
        {
            UNTIL: until.over(later),
            TO: seen_until.over(later.rowsBetween(W.unboundedPreceding, -1)),
        }
    ).where(_NEW)
    alone = F.col(UNTIL).isNull() | (F.col(UNTIL) > F.col(FROM))
    seen = F.col(TO).isNull() | (F.col(TO) > F.col(_SEEN))
    first = F.when(alone, F.col(FROM)).otherwise(F.col(_SEEN)).alias(FROM)
    found = timed.where(alone | seen)
    return nullable(
        found.select(*on, first, TO, UNTIL, EDGE, F.struct(*place).alias(BY), ANSWER), ANSWER
    )


def _with_edge(operator: CorrectedJoin, table: Input, context: RunContext) -> DataFrame:
    """Adds the time (epoch microseconds, inclusive) from which on each new record of a table corrects
    rows, see :func:`affected_times`."""
    before = F.timestamp_micros(context.watermarks.get(_TABLE, no_time()))
    chunk = None if table.broadcastable else arrival_chunk()
    timed = with_stream_time(table.rows.withColumn(ARRIVAL, F.col(OFFSET)), before, chunk=chunk)
    return timed.withColumn(EDGE, F.unix_micros(STREAM_TIME) - micros(operator.corrected_for))


def _answer_of(operator: CorrectedJoin) -> Column:
    """Returns the columns of a table's log row that the join uses as a struct; null for a tombstone."""
    values = sorted({*operator.right.key, *operator.projection().columns_of("right")})
    replaced = {VALID_FROM: F.col(TIMESTAMP)}
    every = F.struct(*[replaced.get(v, F.col(f"`{v}`")).alias(v) for v in values])
    return F.when(~F.col(IS_TOMBSTONE), every)


# Matches that change in a join that looks ahead


_TILE, _AT_MICROS, _LIMIT, _WHOLE = "_tile", "_at", "_limit", "_whole"
_NEXT, _NEXT_EDGE, _HAS_VALUE = "_next", "_next_edge", "_has_value"
_BACK, _AHEAD, _WAS_BACK, _WAS_AHEAD = "_back", "_ahead", "_was_back", "_was_ahead"
_LATE_BACK, _LATE_VALUE, _LATE_AHEAD = "_late_back", "_late_value", "_late_ahead"
_MATCH, _WAS, _FOUND_OUT = "_match", "_was", "_found_out"
_ALWAYS = -(2**62)
"""The edge of records that a table had before the run: earlier than all times, because every row that
can be corrected knows these records."""


def affected_matches(
    operator: CorrectedJoin, records: DataFrame, table: Input, context: RunContext
) -> DataFrame:
    """Returns the joined records whose match new records of a table change, in a join that looks ahead.

    A joined record knows the table's records that have arrived up to a point: those with an edge at or
    before its time, see :func:`affected_times`. Edges never decrease. So what a record knows, and with
    it its match, does not depend on how the table's records are batched into runs. A record of the
    table comes too late for a joined record that does not know it, if it alone would change its match.

    Plan: a semi-join of the earlier log rows by key, a window by key and time over them, then a
    semi-join of the records with the changes by key and tile, an equi-join by key and tile, and an
    aggregate by record. A tile is one to two times as long as ``max_age``, so a record is compared only
    with log rows of its key that are at most twice that far away.

    Args:
        records: log rows of the stream that earlier runs have joined.
        table: with the earlier log rows from ``max_age`` before the first record on.

    Returns:
        the columns of ``records``, once or twice: with ``_too_old`` false if the match changes, with
        true if a record of the table comes too late; ``_by``: the table's record that is the cause, a
        struct of partition and offset; and ``_answer``: the match, a struct, null without a match.
    """
    assert operator.max_age is not None
    key, reach, nearest = operator.right.key, operator.max_age // INSTANT, operator.at == "nearest"
    on, earlier, broadcastable = match_names(key), table.earlier, table.broadcastable
    final = context.watermarks.get(FINAL, no_time())

    def with_bounds(rows: DataFrame, edge: Column) -> DataFrame:
        place = F.struct(PARTITION, OFFSET).alias(BY)
        since = F.unix_micros(TIMESTAMP).alias(FROM)
        answer = _answer_of(operator).alias(ANSWER)
        return rows.select(*match_columns(key), since, place, edge.alias(EDGE), answer)

    new = with_bounds(_with_edge(operator, table, context), F.col(EDGE))
    versions = new
    if earlier is not None:
        keys = new.select(*on)
        there = with_bounds(earlier, F.lit(_ALWAYS).cast("long"))
        there = there.join(F.broadcast(keys) if broadcastable else keys, on, "left_semi")
        versions = union(new, there)
    # Of one key and time the last record counts among those that a joined record knows. Records that
    # were replaced before the run count for none.
    same_time = W.partitionBy(*on, FROM).orderBy(F.col(BY)[OFFSET], F.col(BY)[PARTITION])
    versions = versions.withColumns(
        {_NEXT: F.lead(BY).over(same_time), _NEXT_EDGE: F.lead(EDGE).over(same_time)}
    )
    versions = versions.where(F.col(_NEXT_EDGE).isNull() | (F.col(_NEXT_EDGE) > F.lit(_ALWAYS)))

    level = reach.bit_length()
    until = F.col(FROM) + F.lit(reach if nearest else 0)
    tiles = F.sequence(F.shiftright(F.col(FROM) - F.lit(reach), level), F.shiftright(until, level))
    versions = versions.withColumn(_TILE, F.explode(tiles))
    touched = versions.where(F.col(EDGE) > F.lit(_ALWAYS)).select(*on, _TILE).distinct()
    moment = F.unix_micros(TIMESTAMP)
    # A final row knows only what the table had before the run: every new record is too late for it.
    is_final = F.coalesce(moment < final, F.lit(False))
    requests = records.select(
        *[F.col(f"`{k}`").alias(n) for k, n in zip(operator.left.key, on, strict=True)],
        F.struct(*columns(records.columns)).alias(_WHOLE),
        moment.alias(_AT_MICROS),
        F.when(is_final, F.lit(_ALWAYS)).otherwise(moment).alias(_LIMIT),
        F.shiftright(moment, level).alias(_TILE),
    )
    requests = requests.join(
        F.broadcast(touched) if broadcastable else touched, [*on, _TILE], "left_semi"
    )
    distance, limit = F.col(FROM) - F.col(_AT_MICROS), F.col(_LIMIT)
    from_here_on = distance >= 0 if operator.at == "at_or_after" else distance > 0
    near = (distance <= reach) & ((distance >= -reach) if nearest else from_here_on)
    pairs = requests.join(versions, [*on, _TILE]).where(near)

    # For each joined record the version behind it and the one ahead of it: among the table's records
    # that it knows now, among those before the run (_WAS) and among those too late for it (_LATE).
    behind = (distance <= 0) if nearest else F.lit(False)
    has = F.col(ANSWER).isNotNull()
    known = (F.col(EDGE) <= limit) & (F.col(_NEXT_EDGE).isNull() | (F.col(_NEXT_EDGE) > limit))
    before, late = F.col(EDGE) == F.lit(_ALWAYS), F.col(EDGE) > limit
    short = [FROM, BY, EDGE, _NEXT, has.alias(_HAS_VALUE)]
    version, brief = F.struct(*short, ANSWER), F.struct(*short)

    def last(which: Column, what: Column) -> Column:
        return F.max_by(F.when(which, what), F.when(which, F.col(FROM)))

    def first(which: Column, what: Column) -> Column:
        return F.min_by(F.when(which, what), F.when(which, F.col(FROM)))

    whole = F.col(_WHOLE)
    found = pairs.groupBy(whole[PARTITION], whole[OFFSET]).agg(
        F.first(_WHOLE).alias(_WHOLE),
        F.first(_AT_MICROS).alias(_AT_MICROS),
        last(behind & known, version).alias(_BACK),
        first(~behind & known & has, version).alias(_AHEAD),
        last(behind & before, brief).alias(_WAS_BACK),
        first(~behind & before & has, brief).alias(_WAS_AHEAD),
        last(behind & late, brief).alias(_LATE_BACK),
        last(behind & late & has, brief).alias(_LATE_VALUE),
        first(~behind & late & has, brief).alias(_LATE_AHEAD),
    )
    found = found.withColumns(
        {
            _MATCH: _nearer(F.col(_BACK), F.col(_AHEAD)),
            _WAS: _nearer(F.col(_WAS_BACK), F.col(_WAS_AHEAD)),
        }
    )
    match, was = F.col(_MATCH), F.col(_WAS)
    differs = ~match[BY].eqNullSafe(was[BY])
    # Without a new match the former one was deleted: at its time, or by a later tombstone before the
    # record.
    ended = F.lit(nearest) & (was[FROM] <= F.col(_AT_MICROS))
    deleted = F.when(ended, F.col(_BACK)[BY]).otherwise(was[_NEXT])
    by = F.when(match[EDGE] > F.lit(_ALWAYS), match[BY]).otherwise(deleted)
    late_by = _too_late_by(nearest)

    def outcome(which: Column, too_old: bool, cause: Column) -> Column:
        return F.when(which, F.struct(F.lit(too_old).alias(_TOO_OLD), cause.alias(BY)))

    outcomes = [outcome(differs, False, by), outcome(late_by.isNotNull(), True, late_by)]
    every = F.filter(F.array(*outcomes), lambda one: one.isNotNull())
    affected = found.withColumn(_FOUND_OUT, F.explode(every))
    return nullable(
        affected.select(f"{_WHOLE}.*", f"{_FOUND_OUT}.*", match[ANSWER].alias(ANSWER)), ANSWER
    )


def _nearer(back: Column, ahead: Column) -> Column:
    """Returns the nearer of the version that is valid at a record's time, if it has a value, and the
    first one that starts after it; of two equally near the earlier."""
    at = F.col(_AT_MICROS)
    near = ahead.isNull() | (at - back[FROM] <= ahead[FROM] - at)
    return F.when(back[_HAS_VALUE] & near, back).otherwise(ahead)


def _too_late_by(nearest: bool) -> Column:
    """Returns the partition and offset of the table's record that comes too late for a joined record,
    but would change its match; null = there is none."""
    at, match, back = F.col(_AT_MICROS), F.col(_MATCH), F.col(_BACK)
    late, value, ahead = F.col(_LATE_BACK), F.col(_LATE_VALUE), F.col(_LATE_AHEAD)
    of_back = F.lit(nearest) & (match[FROM] <= at)
    ends = of_back & (late[FROM] >= match[FROM])
    valid = back.isNull() | (value[FROM] >= back[FROM])
    nearer_back = match.isNull() | (~of_back & (at - value[FROM] <= match[FROM] - at))
    nearer_ahead = match.isNull() | (ahead[FROM] - at < F.abs(match[FROM] - at))
    return F.coalesce(
        # It replaces the match at the match's own time,
        match[_NEXT],
        # starts, also as a tombstone, between the match and the record,
        F.when(ends, late[BY]),
        # starts before the record and is nearer than a match after it,
        F.when(valid & nearer_back, value[BY]),
        # or starts after the record and is nearer than the match.
        F.when(nearer_ahead, ahead[BY]),
    )


# Helpers on result rows


def with_row_of_key(
    records: DataFrame, own: Sequence[str], rows: DataFrame, key: Sequence[str], what: Column, name: str
) -> DataFrame:
    """Joins records with a column of another table's row of their key; null where there is no row.

    Args:
        own: the columns of the records that hold the other table's key.
        rows, key: the other table, one row per key.
        what: an expression over the other table's columns; ``name``: the name of its result.
    """
    names = [f"_key{i}" for i in range(len(key))]
    theirs = [c.alias(n) for c, n in zip(columns(key), names, strict=True)]
    there = nullable(rows.select(*theirs, what.alias(name)), name)
    matches = F.lit(True)
    for mine, other in zip(own, names, strict=True):
        matches = matches & (F.col(f"`{mine}`") == F.col(other))
    return records.join(there, matches, "left").drop(*names)


def nullable(rows: DataFrame, name: str) -> DataFrame:
    """Makes a struct's fields nullable: Arrow cannot write a null struct of non-null fields."""
    kind = rows.schema[name].dataType
    if not isinstance(kind, StructType):
        return rows
    fields = [StructField(f.name, f.dataType) for f in kind.fields]
    return rows.withColumn(name, F.col(name).cast(StructType(fields)))


def same(name: str, kind: DataType, row: Column) -> Column:
    """Returns whether a column equals the field of that name in another row; two nulls are equal.

    Args:
        kind: the column's type.
        row: the other row, a struct.
    """
    one, other = comparable(F.col(f"`{name}`"), kind), comparable(row.getField(name), kind)
    return one.eqNullSafe(other)


def with_finality(rows: DataFrame, watermarks: Mapping[str, Times]) -> DataFrame:
    """Adds ``is_final`` to the rows of a corrected join's table: whether a row can no longer change.

    A row exactly as old as the promise is not final. In a partition without a final row it is false.

    Args:
        watermarks: those of the commit that the rows are read as of, see ``Commit``.
    """
    if FINAL not in watermarks:
        return rows
    final = F.unix_micros(TIMESTAMP) < by_partition(watermarks[FINAL], "long")
    return rows.withColumn(IS_FINAL, F.coalesce(final, F.lit(False)))


def too_late_columns(source: Column, position: str) -> list[Column]:
    """Returns the quarantine columns of a record that comes too late for a correction; the raw text is
    null.

    Args:
        source: the name of its log; ``position``: the column of its offset there.
    """
    added = {
        REASON: F.lit(Outcome.TOO_LATE),
        SOURCE: source,
        POSITION: F.col(position),
        RAW: F.lit(None).cast("string"),
    }
    return [column.alias(name) for name, column in added.items()]


# Corrected join


TOO_LATE, CHANGES = "corrections_too_late", "changes"
_TABLE, _CHANGED = "table", "changed"
_AGAIN_COUNT = "joined_again"
_AGAIN, _CORRECTED_ROW, _GONE, _TOO_OLD = "_again", "_row_before", "_revision_gone", "_too_old"
_RECORD, _TWICE, _TWICE_AT, _CORRECTED_SEEN, _PRODUCED = (
    "_record",
    "_twice",
    "_twice_at",
    "_seen",
    "_produced",
)
_REFUSED_AT, _REFUSED_OF = "_refused_at", "_refused_of"
_CARRIED = (_AGAIN, _CORRECTED_ROW, _GONE, _TOO_OLD, CAUSE)
_LATER = 1 << 40
"""A number that is larger than that of any chunk of corrections."""


@dataclass(frozen=True)
class CorrectedJoinTime(GraceTime):
    """The stream time of the stream, and watermarks of the table and of final rows."""

    processor: CorrectedJoinProcessor

    def advance(self, inputs: Sequence[Input], context: RunContext) -> DataFrame:
        stream, table = (one.rows for one in inputs)
        at, nothing = F.unix_micros(TIMESTAMP), F.lit(None).cast("long")
        moved = stream.where(moves_stream_time(self.processor.operator.left.key))
        rows = moved.select(PARTITION, at.alias("time"), nothing.alias(_TABLE)).unionByName(
            table.select(PARTITION, nothing.alias("time"), at.alias(_TABLE))
        )
        newest, oldest = F.max(_TABLE).alias(_TABLE), F.min(_TABLE).alias(_CHANGED)
        return rows.groupBy(PARTITION).agg(F.max("time").alias("time"), newest, oldest)

    def watermarks(
        self, found: Sequence[Any], before: Mapping[str, Times]
    ) -> dict[str, dict[int, int]]:
        """Returns three times by partition of the result, epoch microseconds: the stream time of the
        table, the oldest timestamp of the table's records in the run, and the time before which rows
        are final (exclusive).

        The last one never decreases, even if ``corrected_for`` becomes longer.
        """
        promised = self.processor.operator.corrected_for // timedelta(microseconds=1)
        times: dict[str, dict[int, int]] = {n: dict(before.get(n, {})) for n in (_TABLE, FINAL)}
        for row in found:
            reached = {_TABLE: row[_TABLE], FINAL: row["time"] and row["time"] - promised}
            for name, moment in reached.items():
                if moment is not None:
                    known = times[name].get(row[PARTITION], moment)
                    times[name][row[PARTITION]] = max(known, moment)
        changed = {row[PARTITION]: row[_CHANGED] for row in found if row[_CHANGED] is not None}
        return {**times, _CHANGED: changed}


@dataclass(frozen=True)
class CorrectedJoinCounts(StreamTableJoinCounts):
    """The counts of judged records and corrections; fails a run in which two records have one key.

    Args:
        name: of the result.
    """

    operator: CorrectedJoin
    name: str
    balances = (
        "records in = joined + dropped + waiting + table changes",
        "joined + corrected = records out",
    )

    @property
    def shown(self) -> tuple[str, ...]:
        return (*super().shown, CORRECTED, TOO_LATE)

    def tallies(self, columns: Sequence[str]) -> dict[str, Column]:
        counts = {
            UNMATCHED: F.count_if(~F.col(MATCHED) & ~F.col(_AGAIN)),
            CORRECTED: F.count_if(F.col(_AGAIN) & (F.col(OUTCOME) == Outcome.APPLIED)),
        }
        if _TWICE not in columns:
            return counts
        first = F.min(F.when(F.col(_TWICE), F.col(_RECORD)))
        return {**counts, _TWICE: F.count_if(F.col(_TWICE)), _TWICE_AT: first}

    @property
    def smallest(self) -> tuple[str, ...]:
        return (_TWICE_AT,)

    def check(self, found: Mapping[int, Counts]) -> None:
        wrong = {p: some for p, some in found.items() if some.get(_TWICE)}
        if not wrong:
            return
        operator, (partition, some) = self.operator, min(wrong.items())
        raise RefusedRecordsError(
            f"{self.name}: expected one record of {operator.left.name!r} for each key "
            f"{list(operator.key)}, got {sum(one[_TWICE] for one in wrong.values())} with the key of "
            f"another record, the first at partition {partition} offset {some[_TWICE_AT]}; nothing was "
            "committed. If a producer sent a record twice, set unique_by of the stream, and replay it; "
            "else add columns to key, or remove it: each record then has a row of its own, keyed by "
            "partition and offset",
            list(wrong),
        )

    def of_run(self, taken: int, found: Counts, judged: Counts) -> dict[str, int]:
        outcomes = (Outcome.APPLIED, Outcome.LATE, Outcome.WAITING, Outcome.DROPPED)
        counts = {"in": taken, **{outcome: judged.get(outcome, 0) for outcome in outcomes}}
        corrected = {name: found[name] for name in (UNMATCHED, CORRECTED)}
        corrected[TOO_LATE] = found[Outcome.TOO_LATE]
        counts |= {CHANGES: judged.get(Outcome.CHANGE, 0), _AGAIN_COUNT: judged.get(Outcome.AGAIN, 0)}
        return {**counts, "out": found[Outcome.APPLIED], **corrected}

    @property
    def outcomes(self) -> tuple[str, ...]:
        return (Outcome.APPLIED, Outcome.LATE, Outcome.DROPPED, CHANGES, Outcome.WAITING)


class CorrectedJoinProcessor(StreamTableJoinProcessor):
    """Judges records like a stream-table join, re-joins earlier ones, and emits the changes.

    Its stream time is that of the stream. Within a run the table's records come first: corrections
    apply the promise as of the stream time before the run, and precede new rows in the log.
    """

    @property
    def operator(self) -> CorrectedJoin:
        operator: Any = self.node.operator
        return operator

    def plan(self, times: RunTimes = BEFORE_ANY_RUN) -> RunPlan:
        operator = self.operator
        changed = times.advanced.get(_CHANGED)
        back = versions = min(changed.values()) - 1 if changed else None
        if back is not None and operator.looks_ahead and operator.max_age is not None:
            # A change affects records from before it, whose match may have begun before them.
            reach = operator.max_age // INSTANT
            back, versions = back - reach, back - 2 * reach
        return RunPlan(
            inputs=(
                InputPlan(operator.left, earliest(_waiting_from(times), back)),
                InputPlan(operator.right, versions),
            ),
            reads_own_table=bool(operator.key or changed),
            corrects_after=back,
            looked_up=operator.right,
            lookup_margin=INSTANT if operator.at == "before" else timedelta(0),
            uses_system_time=operator.as_known != "now",
            persists_rows=True,
            stream_time=CorrectedJoinTime(self, emits_after=operator.grace_period or timedelta(0)),
            has_grace_buffer=operator.waits,
            order=self._result_order(),
            drops_late=False,
            quarantined_outcomes=(Outcome.TOO_LATE,),
            counts=CorrectedJoinCounts(operator, self.node.name),
        )

    def _result_order(self) -> ResultOrder:
        """Returns the order: corrections, then new rows; each by arrival, with a grace period in the
        order in which the buffer emits, corrections by time."""
        waits = self.operator.waits

        def chunk() -> Column:
            place = hour_of(F.col(EMITTED_AT)) if waits else arrival_chunk()
            return place + F.when(F.col(_AGAIN), 0).otherwise(_LATER)

        by = (EMITTED_AT, AT_ONCE, ARRIVAL) if waits else (ARRIVAL,)
        return ResultOrder(by, first=_AGAIN, chunk=chunk)

    # -- lookup ----------------------------------------------------------------------------------

    def waiting(
        self, logs: Sequence[DataFrame], emitted_up_to: Times, state: DataFrame | None
    ) -> DataFrame:
        return super().waiting([logs[0].where(has_key(self.operator.key))], emitted_up_to, state)

    def judge(self, inputs: Sequence[Input], context: RunContext) -> DataFrame:
        (stream, table), named = inputs, has_key(self.operator.key)
        earlier = None if stream.earlier is None else stream.earlier.where(named)
        new = super().judge([replace(stream, earlier=earlier)], context)
        joined = F.col(OUTCOME).isin(Outcome.APPLIED, Outcome.LATE, Outcome.WAITING)
        dropped = F.when(joined & ~named, Outcome.DROPPED).otherwise(F.col(OUTCOME))
        # A constant in each part of the union, so that a query of one part does not read the other.
        new = new.withColumns({OUTCOME: dropped, _AGAIN: F.lit(False)})
        changes = table.rows.select(PARTITION, F.lit(Outcome.CHANGE).alias(OUTCOME))
        if earlier is None or context.since is None or context.view is None:
            return union(new, changes)
        again = self._affected(earlier, table, context)
        return union(
            union(new, again if context.persist_rows is None else context.persist_rows(again)), changes
        )

    def _affected(self, earlier: DataFrame, table: Input, context: RunContext) -> DataFrame:
        """Returns earlier joined records that new table records affect: those to re-join, with their
        rows, and those whose correction comes too late."""
        operator, right = self.operator, self.operator.right
        joined = earlier.where(
            moves_stream_time(operator.left.key) & (F.col(TIMESTAMP) <= context.emitted_up_to)
        )
        if operator.looks_ahead:
            met = affected_matches(operator, joined, table, context)
            late = F.col(_TOO_OLD)
        else:
            times = affected_times(operator, table, context)
            times = F.broadcast(times) if table.broadcastable else times
            at = F.col(TIMESTAMP)
            within = (at >= F.col(FROM)) & (F.col(TO).isNull() | (at < F.col(TO)))
            for k, n in zip(operator.left.key, match_names(right.key), strict=True):
                within = within & (F.col(f"`{k}`") == F.col(n))
            edge = F.greatest(context.watermarks.get(FINAL, no_time()), F.col(EDGE))
            late = F.coalesce(F.unix_micros(TIMESTAMP) < edge, F.lit(False))
            met = joined.join(times, within & (~late | F.col(UNTIL).isNull() | (at < F.col(UNTIL))))
        cause = F.struct(F.lit(right.name).alias("table"), F.col(f"{BY}.*"))
        met = met.select(
            *columns(earlier.columns),
            F.col(OFFSET).alias(ARRIVAL),
            F.when(late, Outcome.TOO_LATE).otherwise(Outcome.AGAIN).alias(OUTCOME),
            F.lit(True).alias(_AGAIN),
            late.alias(_TOO_OLD),
            cause.cast(POSITION_TYPE).alias(CAUSE),
            ANSWER,
        )
        if operator.waits:
            met = met.withColumns({EMITTED_AT: F.unix_micros(TIMESTAMP), AT_ONCE: F.lit(_WAITED)})
        return self._with_rows(self._without_quarantined(met, context), context)

    def _without_quarantined(self, met: DataFrame, context: RunContext) -> DataFrame:
        """Drops records already in quarantine for a late correction: each is quarantined once."""
        if context.refused is None:
            return met
        refused = context.refused.where(F.col("reason") == Outcome.TOO_LATE)
        refused = refused.select(
            F.col(PARTITION).alias(_REFUSED_OF), F.col("position").alias(_REFUSED_AT)
        )
        same_record = (F.col(PARTITION) == F.col(_REFUSED_OF)) & (F.col(OFFSET) == F.col(_REFUSED_AT))
        found = met.join(refused, F.col(_TOO_OLD) & same_record, "left").where(
            F.col(_REFUSED_AT).isNull()
        )
        return found.drop(_REFUSED_OF, _REFUSED_AT)

    def _with_rows(self, records: DataFrame, context: RunContext) -> DataFrame:
        """Adds to each record its current row, or the last revision if the row was deleted."""
        operator, node = self.operator, self.node
        own = operator.key or (PARTITION, OFFSET)
        rows = context.view
        if context.rows_of_keys is not None:
            records, rows = context.rows_of_keys(records, own)
        assert rows is not None
        rows = rows.where(F.col(TIMESTAMP) > F.timestamp_micros(F.lit(context.since)))
        position = F.col(LEFT_OFFSET).alias(_RECORD)
        kept = [*columns(value_columns(node)), TIMESTAMP, REVISION, PARTITION, position]
        records = with_row_of_key(records, own, rows, node.key, F.struct(*kept), _CORRECTED_ROW)
        if context.state is None:
            return records
        return with_row_of_key(records, own, context.state, node.key, F.col(REVISION), _GONE)

    # -- results ---------------------------------------------------------------------------------

    @property
    def lookup_kind(self) -> JoinKind:
        return "left"

    def selected_columns(self, judged: DataFrame) -> list[tuple[str, str]]:
        carried = [(c, f"left.`{c}`") for c in _CARRIED if c in judged.columns]
        return [*self.operator.columns, (_RECORD, f"left.`{OFFSET}`"), *carried]

    def look_up(self, judged: DataFrame, lookup: Lookup, context: RunContext) -> DataFrame:
        again = ANSWER in judged.columns
        found = super().look_up(judged.where(~F.col(_AGAIN)) if again else judged, lookup, context)
        if again:
            has = judged.where(_AGAIN).withColumn(FOUND, F.col(ANSWER).isNotNull())
            found = found.unionByName(
                with_selected_columns(has, judged.columns, ANSWER, self.selected_columns(judged))
            )
        found = self._decided(found)
        if not self.operator.key:
            return found
        looked_up = judged.where(F.col(OUTCOME).isin(Outcome.APPLIED, Outcome.LATE, Outcome.AGAIN))
        return self._with_repeated_keys(found, looked_up, context)

    def _decided(self, rows: DataFrame) -> DataFrame:
        """Decides the result of each lookup: a new row, an update, a tombstone or nothing."""
        node, values = self.node, value_columns(self.node)
        again = F.col(_AGAIN)
        has = F.col(MATCHED) | F.lit(self.operator.kind == "left")
        outcome = F.when(has, Outcome.APPLIED).otherwise(Outcome.NO_RESULT)
        old = F.when(F.lit(False), F.struct(*columns(values), TIMESTAMP))
        added = {REVISION: F.lit(0), CAUSE: F.lit(None).cast(POSITION_TYPE), _PRODUCED: has}
        if _CORRECTED_ROW in rows.columns:
            row, existed = F.col(_CORRECTED_ROW), _has_row()
            types = {f.name: f.dataType for f in rows.schema.fields}
            alike = reduce(lambda so_far, v: so_far & same(v, types[v], row), values, has & existed)
            corrected = F.when(F.col(_TOO_OLD), Outcome.TOO_LATE)
            corrected = corrected.when(alike | ~(has | existed), Outcome.NO_RESULT)
            outcome = F.when(again, corrected.otherwise(Outcome.APPLIED)).otherwise(outcome)
            before = [row.getField(c).alias(c) for c in (*values, TIMESTAMP)]
            old = F.when(existed, F.struct(*before))
            gone = F.col(_GONE) + 1 if _GONE in rows.columns else F.lit(0)
            revision = F.coalesce(F.when(existed, row.getField(REVISION) + 1), gone, F.lit(0))
            produced = (has | existed) & ~F.coalesce(F.col(_TOO_OLD), F.lit(False))
            added = {REVISION: revision, CAUSE: F.col(CAUSE), _PRODUCED: produced}
        there = {c: F.when(has, F.col(f"`{c}`")).alias(c) for c in values}
        too_late = too_late_columns(F.lit(self.operator.left.name), _RECORD)
        return rows.select(
            *[
                there.get(c, F.col(f"`{c}`"))
                for c in node.schema.names
                if c in rows.columns and c != TIMESTAMP
            ],
            TIMESTAMP,
            PARTITION,
            (~has).alias(IS_TOMBSTONE),
            F.lit(True).alias(IS_LATEST),
            old.alias(OLD),
            *[c.alias(name) for name, c in added.items()],
            ARRIVAL,
            MATCHED,
            again.alias(_AGAIN),
            outcome.alias(OUTCOME),
            F.col(_RECORD),
            *[c for c in _PLACE if c in rows.columns],
            *([_CORRECTED_ROW, *too_late] if _CORRECTED_ROW in rows.columns else []),
        )

    def _with_repeated_keys(self, rows: DataFrame, judged: DataFrame, context: RunContext) -> DataFrame:
        """Adds ``_TWICE``: whether another record has a row with the same key.

        Plan: one shuffle and sort by key, and a join with the existing rows by key.
        """
        key = list(self.node.key)
        of_key = F.sum(F.col(_PRODUCED).cast("int")).over(W.partitionBy(*columns(key)))
        twice = of_key > 1
        if context.view is not None:
            there = context.view.select(*columns(key))
            if self.single_task:
                keys = F.broadcast(judged.select(*columns(key)).distinct())
                there = there.join(keys, key, "left_semi")
            rows = rows.join(there.withColumn(_CORRECTED_SEEN, F.lit(True)), key, "left")
            # All rows of the table, not only those as young as the changes: the other record may be
            # older.
            own = _has_row() if _CORRECTED_ROW in rows.columns else F.lit(False)
            twice = twice | (F.col(_CORRECTED_SEEN) & ~own)
        repeated = F.coalesce(F.col(_PRODUCED) & twice, F.lit(False))
        return rows.withColumns({_TWICE: repeated, LEFT_OFFSET: F.col(_RECORD)}).drop(_CORRECTED_SEEN)

    def state_after(self, rows: DataFrame, context: RunContext) -> DataFrame | None:
        """Inner join only: returns deleted rows that may reappear, with their last revision."""
        if self.operator.kind != "inner":
            return None
        key = [f"{c}" for c in self.node.key]
        updated = rows.where((F.col(OUTCOME) == Outcome.APPLIED) & F.col(_AGAIN))
        kept = [*columns(key), F.col(REVISION), F.col(TIMESTAMP), F.col(PARTITION)]
        gone = updated.where(IS_TOMBSTONE).select(*kept)
        if context.state is None:
            return gone
        final = context.watermarks_after.get(FINAL, no_time())
        young = context.state.where(F.coalesce(F.unix_micros(TIMESTAMP) >= final, F.lit(True)))
        return union(young.join(updated.select(*columns(key)), key, "left_anti"), gone)


def _has_row() -> Column:
    """Returns whether the existing row of a key belongs to this record; never null."""
    place = [F.col(_CORRECTED_ROW).getField(c).eqNullSafe(F.col(c)) for c in (PARTITION, _RECORD)]
    return F.col(_CORRECTED_ROW).isNotNull() & place[0] & place[1]


def no_time() -> Column:
    """Returns a null time in microseconds: BIGINT."""
    return F.lit(None).cast("long")


# Join with many feature views


_AT, _SIDE, _HORIZON = "_at", "_side", "_horizon"


@dataclass(frozen=True)
class Feature:
    """A table to join, as the run reads it.

    Args:
        rows: its versions, with ``recorded_at``.
        stream_time: that of the row's partition.
        history: its history by system time.
    """

    view: FeatureView
    rows: DataFrame
    stream_time: Column
    history: SystemTimeHistory

    @property
    def strictly(self) -> Column:
        """The delay after ``valid_from`` at which a version matches: 1 µs for ``at="before"``."""
        return F.lit(INSTANT if self.view.at == "before" else timedelta(0))


def with_features(
    spine: DataFrame, features: Sequence[Feature], persist_rows: table_store.PersistRows
) -> DataFrame:
    """Joins the rows of a spine, once each, with the columns of each feature.

    The lookup takes the version valid at the row's time among those recorded up to the row's cut (a
    system time), see ``as_of_join``. A null key, a tombstone and a version older than ``max_age``
    give nulls.

    Plan: for all features of one key of the spine, one shuffle and sort of the spine and their
    versions. Rows whose version was recorded after their cut are answered from each table's log, by
    keys, times and positions, and are shuffled once more.

    Args:
        spine: log rows with ``partition``, ``_arrival`` and ``recorded_at``.
        persist_rows: persists the rows with their versions, which are read several times.

    Returns:
        the spine's columns, of each feature whether a version was found (``matched_by``), and the
        features' columns.
    """
    found = spine
    for key in dict.fromkeys(f.view.of_spine for f in features):
        places = [i for i, f in enumerate(features) if f.view.of_spine == key]
        found = _as_of_all(found, {i: features[i] for i in places}, key)
    found = persist_rows(found)
    own = [F.col(f"`{c}`") for c in spine.columns]
    answers = {i: best for i, f in enumerate(features) if (best := _by_log(found, i, f)) is not None}
    values = {_value(i): F.when(F.col(_sure(i)), F.col(_version(i))) for i in range(len(features))}
    all_sure = F.lit(True)
    for i in answers:
        all_sure = all_sure & F.col(_sure(i))
    matched_rows = with_columns(found.where(all_sure), values)
    if answers:
        late = found.where(~all_sure)
        for i, best in answers.items():
            late = late.join(best, at_place(), "left").drop(*PLACES)
            values[_value(i)] = F.coalesce(values[_value(i)], F.col(_answer(i)))
        wanted = [*own, *values]
        matched_rows = matched_rows.select(*wanted).unionByName(
            with_columns(late, values).select(*wanted)
        )
    rows = [_row(i, f) for i, f in enumerate(features)]
    matched = [row.isNotNull().alias(matched_by(i)) for i, row in enumerate(rows)]
    columns = [
        row[c].alias(name) for row, f in zip(rows, features, strict=True) for name, c in f.view.named
    ]
    return matched_rows.select(*own, *matched, *columns)


def matched_by(i: int) -> str:
    """Returns the column that says whether the feature at a position has a version for the row."""
    return f"_matched{i}"


def _as_of_all(rows: DataFrame, features: Mapping[int, Feature], key: Sequence[str]) -> DataFrame:
    """Adds the version of each feature (null = no value), and whether the versions alone decide it."""
    keys = [f"_key{i}" for i in range(len(key))]
    every = rows.withColumns(
        {
            **{n: F.col(f"`{k}`") for k, n in zip(key, keys, strict=True)},
            _AT: F.col(TIMESTAMP),
            _SIDE: F.lit(1),
        }
    )
    for i, f in features.items():
        kept = [VALID_FROM, VALID_TO, RECORDED_AT, IS_TOMBSTONE, *_values(f)]
        horizon = table_store.horizon_of(f.view.table, f.stream_time).alias(_HORIZON)
        versions = f.rows.select(
            *[F.col(f"`{k}`").alias(n) for k, n in zip(f.view.table.key, keys, strict=True)],
            (F.col(VALID_FROM) + f.strictly).alias(_AT),
            F.lit(0).alias(_SIDE),
            F.struct(*[F.col(f"`{c}`") for c in kept], horizon).alias(_version(i)),
        )
        every = union(every, versions)
    so_far = W.partitionBy(*keys).orderBy(_AT, _SIDE).rowsBetween(W.unboundedPreceding, W.currentRow)
    last = {_version(i): F.last(_version(i), ignorenulls=True).over(so_far) for i in features}
    found = with_columns(every, last).where(F.col(_SIDE) == 1).drop(*keys, _AT, _SIDE)
    judged = dict[str, Column]()
    for i, f in features.items():
        row, moment = F.col(_version(i)), F.col(TIMESTAMP) - f.strictly
        known = row.isNotNull() & still_answers(moment, row[VALID_TO], row[_HORIZON])
        keyed = has_key([f"`{k}`" for k in key])
        judged[_sure(i)] = F.lit(True)
        if f.view.as_known != "now":
            cut = known_at_of(f.view.as_known)
            by_then = row[RECORDED_AT].isNull() | (row[RECORDED_AT] <= cut)
            judged[_sure(i)] = F.coalesce(known & by_then, F.lit(False)) | ~keyed
        judged[_version(i)] = F.when(known & ~row[IS_TOMBSTONE] & keyed, row)
    return with_columns(found, judged)


def _by_log(found: DataFrame, i: int, feature: Feature) -> DataFrame | None:
    view = feature.view
    if view.as_known == "now":
        return None
    keys = [f"_key{n}" for n in range(len(view.of_spine))]
    doubtful = found.where(~F.col(_sure(i))).select(
        *[F.col(f"`{k}`").alias(n) for k, n in zip(view.of_spine, keys, strict=True)],
        (F.col(TIMESTAMP) - feature.strictly).alias(TIMESTAMP),
        known_at_of(view.as_known).alias(KNOWN_AT),
        PARTITION,
        ARRIVAL,
    )
    needed = [IS_TOMBSTONE, PARTITION, *_values(feature)]
    best = answers_from_log(
        doubtful,
        feature.history,
        needed=needed,
        left_key=keys,
        right_key=view.table.key,
        ends=False,
    )
    if best is None:
        return None
    answer = answer_as(cast(StructType, found.schema[_version(i)].dataType), needed)
    return best.select(*PLACES, answer.alias(_answer(i)))


def _row(i: int, feature: Feature) -> Column:
    row, age = F.col(_value(i)), feature.view.max_age
    return row if age is None else F.when(F.col(TIMESTAMP) - F.lit(age) <= row[VALID_FROM], row)


def _values(feature: Feature) -> list[str]:
    return [c for c in feature.view.chosen if c != VALID_FROM]


def _version(i: int) -> str:
    return f"_version{i}"


def _sure(i: int) -> str:
    return f"_sure{i}"


def _answer(i: int) -> str:
    return f"_answer{i}"


def _value(i: int) -> str:
    return f"_value{i}"
