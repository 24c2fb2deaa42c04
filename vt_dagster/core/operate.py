"""One run of an operator that consumes logs: its results, what it keeps, and the log rows they become.

Every operator goes the same way: the order in which a task would take the records (``in_order``), the
operator's own file, then what all results have in common: timestamps that do not go back,
one update a run where only the last counts, and what the result's store makes of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pyspark.sql import Column, DataFrame
from pyspark.sql import Window as W
from pyspark.sql import functions as F

from vt_dagster.columns import (
    ARRIVAL,
    FATE,
    HOME,
    INPUT,
    IS_LATEST,
    OFFSET,
    OLD,
    ORDER,
    PARTITION,
    SEQUENCE,
    TIMESTAMP,
    TURN,
)
from vt_dagster.core import (
    aggregate,
    foreign_key_join,
    suppress,
    table_table_join,
    transform,
    versioned,
    windows,
)
from vt_dagster.core.arrival import (
    STREAM_TIME,
    Fate,
    arrival_chunk,
    number,
    union,
    with_stream_time,
)
from vt_dagster.core.changes import TableInput
from vt_dagster.core.records import home_of
from vt_dagster.core.step import log_columns, put, value_columns
from vt_dagster.topology.model import Stream, Table, VersionedTable
from vt_dagster.topology.operators import (
    Aggregator,
    Filter,
    ForeignKeyJoin,
    MapValues,
    Operator,
    Suppress,
    TableAggregate,
    TableTableJoin,
    ToStream,
    ToTable,
    UntilTimeLimit,
    WindowedAggregate,
    is_session,
    is_sliding,
)

_HOUR = 3_600_000_000


@dataclass(frozen=True)
class Taken:
    """What a run takes from one input.

    Args:
        rows: the log rows of the run.
        view: of a table, its view at the end of those rows; None = nothing was there before them.
    """

    rows: DataFrame
    view: DataFrame | None = None


@dataclass(frozen=True)
class Before:
    """What an operator knows from the runs before.

    Args:
        state: what it keeps; None = nothing yet.
        view: the view of its result; None = nothing yet.
        stream_time: of a row's partition, of the result.
        after: stream time at the end of this run, where the operator goes by it; see ``with_lateness``.
    """

    state: DataFrame | None
    view: DataFrame | None
    stream_time: Column
    after: Column


def reads_views(operator: Operator) -> bool:
    """Whether the operator looks into its inputs' tables, not only at their changes."""
    return isinstance(operator, TableTableJoin)


def goes_by_time(operator: Operator) -> bool:
    """Whether the operator has a stream time of its own, which decides what is closed or due."""
    return isinstance(operator, WindowedAggregate | Suppress)


def _merges(operator: Operator) -> bool:
    """Whether a result's partition has records of several logs or partitions."""
    if isinstance(operator, WindowedAggregate):
        return bool(operator.group_key)
    return isinstance(operator, TableTableJoin | TableAggregate)


def _chunk_in(operator: Operator) -> Column:
    """Ascends with the order of what an operator takes, so that a long partition is not one task's."""
    return F.floor(F.col(ARRIVAL) / F.lit(_HOUR)) if _merges(operator) else arrival_chunk()


def _chunk(operator: Operator) -> Column:
    """The same for its results."""
    by_place = isinstance(operator, Suppress)
    return F.floor(F.col(ARRIVAL) / F.lit(_HOUR)) if by_place else _chunk_in(operator)


def in_order(operator: Operator, taken: Sequence[Taken]) -> list[DataFrame]:
    """The inputs' rows in the order in which a Kafka Streams task takes them.

    A task takes the record with the smallest timestamp among the heads of its inputs (equal: the left
    one's). That is the order of each input's own stream time in this run. Rows of one partition of one
    log keep the order of their offsets.
    """
    nothing = F.lit(None).cast("timestamp")
    ordered: list[DataFrame] = []
    for i, one in enumerate(taken):
        rows = one.rows.withColumn(ARRIVAL, F.col(OFFSET))
        if _merges(operator):
            timed = with_stream_time(rows, nothing)
            rows = timed.withColumn(ARRIVAL, F.unix_micros(STREAM_TIME)).drop(STREAM_TIME)
        rows = rows.withColumns({INPUT: F.lit(i), HOME: F.col(PARTITION), SEQUENCE: F.col(OFFSET)})
        ordered.append(rows)
    return ordered


def with_lateness(node: Stream, taken: Sequence[Taken], before: Column) -> DataFrame:
    """How an operator's own stream time moves in a run, and how far its records lie behind it.

    Returns:
        ``partition`` (of the result), ``time`` (epoch microseconds), ``records``, ``lateness`` (the
        sum) and ``most``, microseconds.
    """
    operator = node.operator
    assert operator is not None
    rows = in_order(operator, taken)[0]
    if isinstance(operator, WindowedAggregate):
        regrouped = _regrouped(node, operator, rows)
        rows = regrouped.where(windows.moves_stream_time(_group_names(operator), operator.window))
    narrow = rows.select(PARTITION, TIMESTAMP, *ORDER)
    timed = with_stream_time(narrow, before, chunk=_chunk_in(operator))
    behind = F.unix_micros(STREAM_TIME) - F.unix_micros(TIMESTAMP)
    return timed.groupBy(PARTITION).agg(
        F.max(F.unix_micros(TIMESTAMP)).alias("time"),
        F.count(F.lit(1)).alias("records"),
        F.sum(behind).alias("lateness"),
        F.max(behind).alias("most"),
    )


def _group_names(operator: TableAggregate | WindowedAggregate) -> list[str]:
    return [name for name, _ in operator.keys().columns]


def _regrouped(node: Stream, operator: WindowedAggregate, rows: DataFrame) -> DataFrame:
    """A stream's records under their new key, in its partition."""
    if not operator.group_key:
        return rows
    chosen = {name: F.expr(sql) for name, sql in operator.keys().columns}
    names = list(chosen)
    return rows.withColumns(chosen).withColumn(PARTITION, home_of(names, node))


def operate(node: Stream, taken: Sequence[Taken], before: Before) -> DataFrame:
    """The results of a run with all that is counted, and what ``state_after`` needs.

    Returns:
        rows ``key columns, value columns, timestamp, partition, is_tombstone, _fate, ORDER, _turn``,
        of tables also ``is_latest, old``; then what had nothing to say is not among them.
    """
    operator = node.operator
    assert operator is not None
    rows = _results(node, operator, in_order(operator, taken), taken, before)
    if not isinstance(node, Table) or not operator.stored:
        return rows
    if isinstance(operator, TableTableJoin) and operator.monotone:
        rows = _monotone(rows, before.state, node.key)
    if isinstance(node, VersionedTable) and _begins_versions(operator):
        rows = transform.told_once(
            rows,
            before.view,
            key=node.key,
            stream_time=before.stream_time,
            history_retention=node.history_retention,
        )
    if operator.emit == "per_run":
        rows = _last_of_run(rows, node.key)
    spoken = rows.where(F.col(FATE) != Fate.NO_RESULT)
    pending = spoken.drop(IS_LATEST, OLD).withColumn(
        FATE, F.when(F.col(FATE) != Fate.APPLIED, F.col(FATE))
    )
    order = [*ORDER, TURN]
    return put(node, pending, before.view, before.stream_time, order, _chunk(operator))


def state_after(node: Stream, rows: DataFrame, before: Before) -> DataFrame | None:
    """What an operator keeps for its next run; None where it keeps nothing.

    Args:
        rows: of ``operate``. They are wanted again for the results: hold them.
    """
    operator = node.operator
    if isinstance(operator, TableAggregate):
        return aggregate.state_after(rows, before.state, key=node.key)
    if isinstance(operator, WindowedAggregate):
        return windows.state_after(
            rows,
            key=_group_names(operator),
            window=operator.window,
            aggregates=operator.parsed(),
            after=before.after,
        )
    if isinstance(operator, Suppress):
        source = operator.source
        return suppress.buffer_after(rows, key=list(source.key), values=value_columns(source))
    if isinstance(operator, TableTableJoin) and operator.monotone and operator.stored:
        return _last_times(rows, before.state, node.key)
    return None


def _begins_versions(operator: Operator) -> bool:
    """Whether it filters a plain table into a versioned one."""
    if not isinstance(operator, Filter) or operator.source.versioned:
        return False
    return operator.materialized is not None and operator.materialized.history_retention is not None


def _results(
    node: Stream,
    operator: Operator,
    inputs: Sequence[DataFrame],
    taken: Sequence[Taken],
    before: Before,
) -> DataFrame:
    changes = inputs[0]
    source = operator.inputs[0]
    about: dict[str, Any] = {"key": source.key, "values": value_columns(source)}
    turned = changes.withColumn(TURN, F.lit(0))
    if isinstance(operator, Filter):
        return transform.filter(
            turned,
            **about,
            predicate=operator.predicate,
            negate=operator.negate,
            versioned=source.versioned or _begins_versions(operator),
        )
    if isinstance(operator, MapValues):
        columns = [c for c in operator.selection().columns if c[0] not in source.key]
        return transform.map_values(turned, **about, columns=columns)
    if isinstance(operator, ToTable):
        return transform.to_table(turned, key=source.key)
    if isinstance(operator, ToStream):
        return transform.to_stream(turned)
    if isinstance(operator, TableTableJoin):
        return _join(operator, inputs, taken)
    if isinstance(operator, TableAggregate):
        return _aggregate(node, operator, changes, before)
    if isinstance(operator, WindowedAggregate):
        records = _regrouped(node, operator, changes)
        return windows.aggregate(
            records,
            before.state,
            key=_group_names(operator),
            window=operator.window,
            aggregates=operator.parsed(),
            before=before.stream_time,
            chunk=_chunk_in(operator),
        )
    assert isinstance(operator, Suppress)
    return _suppress(operator, turned, before)


def _join(operator: TableTableJoin, inputs: Sequence[DataFrame], taken: Sequence[Taken]) -> DataFrame:
    sides: list[TableInput] = []
    for node, rows, one in zip(operator.inputs, inputs, taken, strict=True):
        view = one.view
        if view is not None and isinstance(node, VersionedTable):
            view = versioned.get(view)
        sides.append(TableInput(rows, view, node.key, value_columns(node), node.versioned))
    left, right = sides
    columns = operator.projection().columns
    if isinstance(operator, ForeignKeyJoin):
        return foreign_key_join.join(
            left,
            right,
            kind="inner" if operator.kind == "inner" else "left",
            foreign_key=operator.foreign_key,
            columns=columns,
        )
    return table_table_join.join(left, right, kind=operator.kind, columns=columns)


def _aggregate(node: Stream, operator: TableAggregate, changes: DataFrame, before: Before) -> DataFrame:
    source, chosen = operator.source, operator.aggregates
    own = isinstance(chosen, Aggregator)
    inputs = (
        operator.selection().columns
        if own
        else [(a.name, a.expression) for a in operator.parsed().accumulators]
    )
    rows = aggregate.entries(
        changes,
        key=source.key,
        values=value_columns(source),
        group_key=operator.keys().columns,
        inputs=inputs,
        partition=home_of(node.key, node),
        versioned=source.versioned,
    )
    if isinstance(node, VersionedTable):
        rows = aggregate.refuse(
            rows,
            before.state,
            key=node.key,
            stream_time=before.stream_time,
            history_retention=node.history_retention,
            chunk=_chunk(operator),
        )
    else:
        rows = rows.withColumn(FATE, F.lit(Fate.APPLIED))
    if isinstance(chosen, Aggregator):
        return aggregate.aggregate_by(
            rows,
            before.state,
            key=node.key,
            names=value_columns(node),
            initializer=chosen.initializer,
            adder=chosen.adder,
            subtractor=chosen.subtractor,
            schema=chosen.schema,
        )
    return aggregate.aggregate(rows, before.state, key=node.key, aggregates=operator.parsed())


def _suppress(operator: Suppress, changes: DataFrame, before: Before) -> DataFrame:
    until = operator.until
    return suppress.suppress(
        changes,
        before.state,
        key=list(operator.source.key),
        values=value_columns(operator.source),
        until="time_limit" if isinstance(until, UntilTimeLimit) else "window_closes",
        duration=operator.period,
        before=before.stream_time,
        after=before.after,
        window_end_inclusive=is_session(operator.windowed),
        open_when_due=is_sliding(operator.windowed),
        max_records=until.max_records,
        max_bytes=until.max_bytes,
        when_full=until.when_full,
        chunk=_chunk_in(operator),
    )


def _monotone(rows: DataFrame, state: DataFrame | None, key: Sequence[str]) -> DataFrame:
    """Keeps results of a key from going back in time.

    Plan: one shuffle and sort by key, together with one row a key of ``state``.
    """
    applied = F.col(FATE) == Fate.APPLIED
    so_far = W.partitionBy(*key).orderBy(*ORDER, TURN).rowsBetween(W.unboundedPreceding, W.currentRow)
    last = "_last_time"
    if state is None:
        known = rows.withColumn(last, F.lit(None).cast("timestamp"))
    else:
        known = rows.join(state.withColumnRenamed(TIMESTAMP, last), list(key), "left")
    newest = F.greatest(F.max(F.when(applied, F.col(TIMESTAMP))).over(so_far), F.col(last))
    return known.withColumn(TIMESTAMP, F.when(applied, newest).otherwise(F.col(TIMESTAMP))).drop(last)


def _last_times(rows: DataFrame, state: DataFrame | None, key: Sequence[str]) -> DataFrame:
    """The last timestamp of each key's results, also of those that the result's store refused."""
    results = rows.where(F.col(FATE).isin(Fate.APPLIED, Fate.LATE)).select(*key, TIMESTAMP)
    return union(results, state).groupBy(*key).agg(F.max(TIMESTAMP).alias(TIMESTAMP))


def _last_of_run(rows: DataFrame, key: Sequence[str]) -> DataFrame:
    """Leaves the last update of each key a result, as Kafka Streams' cache does until it is flushed.

    Plan: one shuffle and sort by key, those that an aggregate has made already.
    """
    earlier = (F.col(FATE) == Fate.APPLIED) & ~aggregate.is_last(key)
    fate = F.when(earlier, Fate.NO_RESULT).otherwise(F.col(FATE))
    return rows.withColumn(FATE, fate)


def produce(node: Stream, rows: DataFrame, first: Column) -> DataFrame:
    """The log rows of an operator's run: results in order, numbered from ``first``."""
    assert node.operator is not None
    results = rows.where(F.col(FATE) == Fate.APPLIED)
    order = [F.col(c) for c in (*ORDER, TURN)]
    return number(results, first, order, _chunk(node.operator)).select(*log_columns(node))


__all__ = [
    "Before",
    "Taken",
    "goes_by_time",
    "in_order",
    "operate",
    "produce",
    "reads_views",
    "state_after",
    "with_lateness",
]
