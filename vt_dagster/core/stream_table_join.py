"""Stream-table join: joins each record with the table as of the record's own time (KIP-914)."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from vt_dagster.columns import (
    ARRIVAL,
    IS_LATE,
    IS_TOMBSTONE,
    OFFSET,
    OUTCOME,
    PARTITION,
    RECORDED_AT,
    TIMESTAMP,
    VALID_FROM,
    VALID_TO,
)
from vt_dagster.core import grace_buffer, table_store
from vt_dagster.core.arrival_order import Outcome, arrival_chunk, by_partition
from vt_dagster.core.as_of_join import FOUND, JoinStrategy, as_of_join
from vt_dagster.core.processor import Counts, Processor
from vt_dagster.core.run_context import Input, Lookup, RunContext
from vt_dagster.core.stream_time import Timed, late_from
from vt_dagster.core.system_time_join import KNOWN_AT, SystemTimeHistory, system_time_join
from vt_dagster.topology.durations import length_at
from vt_dagster.topology.model import Stream, Table, VersionedTable
from vt_dagster.topology.operators import JoinKind, StreamTableJoin
from vt_dagster.topology.operators.stream_table_join import AsKnown

LEFT, RIGHT = "left", "right"
MATCHED = "_matched"
_UNMATCHED = "unmatched"
INSTANT = timedelta(microseconds=1)
"""The smallest difference between two times."""
_END = re.compile(rf"\bright\s*\.\s*`?{VALID_TO}\b", re.IGNORECASE)
_ROW = "_row"
"""The table's row next to the stream's columns, one of which may be named ``right``."""


class StreamTableJoinProcessor(Processor[StreamTableJoin]):
    """Judges the stream's records (``grace_buffer.hold_back``), then joins them with the table
    (:func:`join`)."""

    has_stream_time = True
    drops_late = False
    shown_counts = ("in", "out", "late", "dropped", _UNMATCHED, Outcome.WAITING)

    @property
    def monotonic(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.operator.waits

    @property
    def consumed(self) -> tuple[Stream, ...]:
        return (self.operator.left,)

    @property
    def looked_up(self) -> Table:
        return self.operator.right

    @property
    def has_grace_buffer(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.operator.waits

    @property
    def uses_system_time(self) -> bool:
        return self.operator.as_known != "now"

    @property
    def lookup_margin(self) -> timedelta:
        return INSTANT if self.operator.at == "before" else timedelta(0)

    def rescan_from(
        self,
        place: int,
        stream_time: Mapping[int, int],
        emitted_up_to: Mapping[int, int],
        watermarks: Mapping[str, Mapping[int, int]],
    ) -> int | None:
        held = any(stream_time[partition] > moment for partition, moment in emitted_up_to.items())
        return min(emitted_up_to.values()) if held else None

    def reads_own_table(self, watermarks: Mapping[str, Mapping[int, int]]) -> bool:
        return False

    def stream_time_rows(self, inputs: Sequence[Input]) -> Timed:
        operator, deadline = self.operator, None
        if operator.waits and operator.grace_period is not None:
            deadline = late_from(operator.grace_period)
        rows = inputs[0].rows.withColumn(ARRIVAL, F.col(OFFSET))
        return Timed(rows, grace_buffer.moves_stream_time(operator.left.key), deadline)

    @property
    def bounded(self) -> bool:
        return not self.single_task and self.operator.waits

    def emitted_up_to(
        self, stream_time: Mapping[int, int], emitted_up_to: Mapping[int, int]
    ) -> dict[int, int]:
        period = self.operator.grace_period or timedelta(0)
        one = timedelta(microseconds=1)
        passed = {p: moment - length_at(period, p) // one for p, moment in stream_time.items()}
        # It never decreases, even if the grace period becomes longer.
        return {p: max(moment, emitted_up_to.get(p, moment)) for p, moment in passed.items()}

    def waiting(
        self, logs: Sequence[DataFrame], emitted_up_to: Mapping[int, int], state: DataFrame | None
    ) -> DataFrame:
        return grace_buffer.waiting(
            logs[0], key=self.operator.left.key, emitted_up_to=by_partition(emitted_up_to)
        )

    def judge(self, inputs: Sequence[Input], context: RunContext) -> DataFrame:
        operator, (stream,) = self.operator, inputs
        earlier = stream.earlier
        if earlier is not None:
            earlier = grace_buffer.waiting(
                earlier, key=operator.left.key, emitted_up_to=context.emitted_up_to
            )
            earlier = earlier.withColumn(ARRIVAL, F.col(OFFSET))
        return grace_buffer.hold_back(
            stream.rows.withColumn(ARRIVAL, F.col(OFFSET)),
            earlier,
            key=operator.left.key,
            kind=operator.kind,
            grace=operator.grace_period if operator.waits else None,
            before=context.stream_time,
            emitted_up_to=context.emitted_up_to_after,
            chunk=self.chunk if context.bounds is None else self.fine_chunk,
            bounds=context.bounds,
        )

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
        needed = {*right.key, *projection.right_columns(), IS_TOMBSTONE, PARTITION}
        if isinstance(right, VersionedTable):
            horizon = table_store.horizon_of(right, lookup.stream_time)
            needed |= {VALID_FROM, VALID_TO}
        records = judged.where(F.col(OUTCOME).isin(Outcome.APPLIED, Outcome.LATE))
        if self.uses_system_time:
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
            before=operator.at == "before",
        )

    @property
    def keeps_order(self) -> bool:
        return not self.operator.waits

    def process(self, rows: list[DataFrame], inputs: Sequence[Input], context: RunContext) -> DataFrame:
        raise AssertionError("a stream-table join uses judge and look_up instead of process")

    @property
    def result_order(self) -> list[Column]:
        """Order of arrival; with a grace buffer the order in which it emits: by timestamp, key, arrival
        (kip923-probe-tie-order)."""
        waits = self.operator.waits
        order = (TIMESTAMP, *self.node.key, ARRIVAL) if waits else (ARRIVAL,)
        return [F.col(c) for c in order]

    def result_chunk(self, single_task: bool) -> Column | None:
        if single_task:
            return None
        return F.date_trunc("hour", TIMESTAMP) if self.operator.waits else arrival_chunk()

    def tallies(self, columns: Sequence[str]) -> dict[str, Column]:
        return {_UNMATCHED: F.count_if(~F.col(MATCHED))}

    def counts(self, taken: int, found: Counts, judged: Counts) -> dict[str, int]:
        outcomes = (Outcome.APPLIED, Outcome.LATE, Outcome.WAITING, Outcome.DROPPED)
        counts = {"in": taken, **{outcome: judged.get(outcome, 0) for outcome in outcomes}}
        out, joined = found[Outcome.APPLIED], counts[Outcome.APPLIED] + counts[Outcome.LATE]
        unmatched = found[_UNMATCHED] if self.operator.kind == "left" else joined - out
        return {**counts, "out": out, _UNMATCHED: unmatched}

    def accounts(self, totals: Counts, taken: int, rows: int) -> list[tuple[str, int, int]]:
        outcomes = (Outcome.APPLIED, Outcome.LATE, Outcome.DROPPED, Outcome.WAITING)
        done = sum(totals.get(outcome, 0) for outcome in outcomes)
        inner = totals.get(_UNMATCHED, 0) if self.operator.kind == "inner" else 0
        joined = totals.get(Outcome.APPLIED, 0) + totals.get(Outcome.LATE, 0) - inner
        return [
            ("records in = joined + dropped + waiting", totals.get("in", 0), done),
            ("records out = rows in the log", totals.get("out", 0), rows),
            ("records joined = records out", joined, totals.get("out", 0)),
        ]


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
    before: bool = False,
) -> DataFrame:
    """Joins stream records with the table.

    Plan: versioned, that of ``as_of_join``; unversioned, a plain equi-join, which Spark may broadcast.

    Args:
        stream: ``key columns, timestamp, partition, _arrival, _outcome, …``: the records to emit.
        table: a versioned table's versions, or an unversioned table's current rows.
        columns: the result's (name, SQL expression over ``left.*`` and ``right.*``).
        horizon: ``stream time - history retention`` of the table's partition; None = the table is
            not versioned. An older record joins the current version if that is old enough, otherwise
            nothing (kip914-expired-lookup-left).
        strategy: for a versioned table, see ``as_of_join``.
        history: for a versioned table, restricts the lookup to versions recorded up to each record's
            ``_known_at``; see ``system_time_join``.
        max_age: for a versioned table, a version does not match if ``timestamp - valid_from`` is
            larger. A tombstone never matches.
        before: for a versioned table, ``valid_from < timestamp`` instead of ``<=``.

    Returns:
        ``columns, timestamp, partition, is_tombstone (false), _arrival, is_late, _matched, _outcome``:
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
            found = _young(found, max_age)
    if kind == "inner":
        found = found.where(F.col(FOUND))
    return answered(found, stream.columns, _ROW, columns)


def answered(
    found: DataFrame, left: Sequence[str], row: str, columns: Sequence[tuple[str, str]]
) -> DataFrame:
    """Returns the results of looked-up records.

    Args:
        found: the records with the table's row, and ``_found``.
        left: the columns of the records; ``row``: the column of the table's row, a struct.
        columns, returns: see :func:`join`.
    """
    rows = found.select(
        F.struct(*[F.col(f"`{c}`") for c in left]).alias(LEFT),
        F.col(row).alias(RIGHT),
        TIMESTAMP,
        PARTITION,
        ARRIVAL,
        (F.col(OUTCOME) == Outcome.LATE).alias(IS_LATE),
        FOUND,
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
    )


def _young(found: DataFrame, max_age: timedelta) -> DataFrame:
    """Removes matches with versions that begin more than ``max_age`` before the record."""
    young = F.col(FOUND) & (F.col(TIMESTAMP) - F.lit(max_age) <= F.col(_ROW)[VALID_FROM])
    return found.withColumn(FOUND, F.coalesce(young, F.lit(False))).withColumn(
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
