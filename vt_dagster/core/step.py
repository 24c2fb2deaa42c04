"""One run of a source or of a stream-table join, as DataFrames: consider what arrived, then produce
log rows. ``core/operate.py`` does the same for operators that consume the logs of tables.

The Dagster ops and the test driver both run assets through these functions; they differ only in where
the inputs come from and where the results go.
"""

from __future__ import annotations

from collections.abc import Sequence

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import (
    BooleanType,
    DataType,
    IntegerType,
    LongType,
    StructField,
    StructType,
    TimestampType,
)

from vt_dagster.columns import (
    ARRIVAL,
    FATE,
    IS_LATE,
    IS_LATEST,
    IS_TOMBSTONE,
    LOG_COLUMNS,
    OFFSET,
    OLD,
    PARTITION,
    TIMESTAMP,
    VALID_FROM,
    VALID_TO,
)
from vt_dagster.core import grace, stream_table_join, table, versioned
from vt_dagster.core.arrival import Fate, arrival_chunk, duration, number
from vt_dagster.core.as_of_join import Way
from vt_dagster.topology.model import Stream, Table, VersionedTable
from vt_dagster.topology.operators import StreamTableJoin


def value_columns(node: Stream) -> list[str]:
    """The value columns of a node's log: all but the key and ``timestamp``."""
    return [c for c in node.schema.names if c not in node.key and c.lower() != TIMESTAMP]


def consider_records(
    node: Stream, records: DataFrame, view: DataFrame | None, stream_time: Column
) -> DataFrame:
    """A source's prepared records with ``_fate``, for tables also ``is_latest`` and ``old``.

    Args:
        view: the table's view before the run; None where there is none yet.
        stream_time: of the record's partition before the run.
    """
    if isinstance(node, Table):
        return put(node, records, view, stream_time, [PARTITION, ARRIVAL])
    return records.withColumn(FATE, F.coalesce(FATE, F.lit(Fate.APPLIED)))


def put(
    node: Table,
    records: DataFrame,
    view: DataFrame | None,
    stream_time: Column,
    order: Sequence[str],
    chunk: Column | None = None,
) -> DataFrame:
    """What a table's store makes of records: see ``versioned.put`` and ``table.put``."""
    values = value_columns(node)
    if isinstance(node, VersionedTable):
        return versioned.put(
            records,
            view,
            key=node.key,
            values=values,
            order=order,
            stream_time=stream_time,
            history_retention=node.history_retention,
            chunk=chunk,
        )
    return table.put(records, view, key=node.key, values=values, order=order)


def produce_records(node: Stream, considered: DataFrame, first: Column) -> DataFrame:
    """The log rows of a source's run, numbered in order of arrival from ``first``."""
    rows = considered.where(F.col(FATE) == Fate.APPLIED)
    numbered = number(rows, first, [F.col(ARRIVAL)], arrival_chunk())
    return numbered.select(*log_columns(node))


def horizon_of(table: VersionedTable, stream_time: Column) -> Column:
    """The time from which on a table answers, of a row's partition: inclusive."""
    return stream_time - duration(table.history_retention)


def has_grace(join: StreamTableJoin) -> bool:
    """Whether anything can wait: a grace period of zero is none."""
    return join.grace_period is not None and join.grace_period != type(join.grace_period)()


def consider_join(
    join: StreamTableJoin,
    arrived: DataFrame,
    waiting: DataFrame | None,
    before: Column,
    due: Column,
) -> DataFrame:
    """The stream's records that a join run has to do with, with ``_fate``; see ``grace.hold``."""
    return grace.hold(
        arrived,
        waiting,
        key=join.left.key,
        kind=join.kind,
        grace=join.grace_period if has_grace(join) else None,
        before=before,
        due=due,
    )


def join_records(
    join: StreamTableJoin,
    considered: DataFrame,
    view: DataFrame,
    table_time: Column,
    way: Way = "sorted",
) -> DataFrame:
    """The results of a join run, in no order yet; ``way``: see ``as_of_join``."""
    right, projection = join.right, join.projection()
    horizon = None
    needed = {*right.key, *projection.right_columns(), IS_TOMBSTONE, PARTITION}
    if isinstance(right, VersionedTable):
        horizon = horizon_of(right, table_time)
        needed |= {VALID_FROM, VALID_TO}
    return stream_table_join.join(
        considered.where(F.col(FATE).isin(Fate.APPLIED, Fate.LATE)),
        view.select(*[c for c in view.columns if c in needed]),
        kind=join.kind,
        stream_key=join.left.key,
        table_key=right.key,
        columns=projection.columns,
        horizon=horizon,
        way=way,
    )


def produce_join(node: Stream, join: StreamTableJoin, results: DataFrame, first: Column) -> DataFrame:
    """The log rows of a join run: in order of arrival, or as they leave the grace buffer: by
    timestamp, key, arrival (kip923-probe-tie-order)."""
    if has_grace(join):
        order: Sequence[Column] = [F.col(c) for c in (TIMESTAMP, *node.key, ARRIVAL)]
        numbered = number(results, first, order, F.date_trunc("hour", TIMESTAMP))
    else:
        numbered = number(results, first, [F.col(ARRIVAL)], arrival_chunk())
    return numbered.select(*log_columns(node))


def log_columns(node: Stream) -> list[str]:
    """The columns of a node's log, in order."""
    own = [c for c in node.schema.names if c.lower() != TIMESTAMP]
    more = [IS_LATEST, OLD] if isinstance(node, Table) else []
    if isinstance(node.operator, StreamTableJoin) and has_grace(node.operator):
        more = [IS_LATE]
    return [*own, *LOG_COLUMNS, *more]


_TYPES: dict[str, DataType] = {
    TIMESTAMP: TimestampType(),
    PARTITION: IntegerType(),
    OFFSET: LongType(),
    IS_TOMBSTONE: BooleanType(),
    IS_LATEST: BooleanType(),
    IS_LATE: BooleanType(),
    VALID_FROM: TimestampType(),
    VALID_TO: TimestampType(),
}


def _schema(node: Stream, names: Sequence[str]) -> StructType:
    own: dict[str, DataType] = {f.name: f.dataType for f in node.schema.fields}
    old = [*value_columns(node), TIMESTAMP]
    own[OLD] = StructType([StructField(n, _TYPES.get(n) or own[n]) for n in old])
    return StructType([StructField(n, _TYPES.get(n) or own[n]) for n in names])


def log_schema(node: Stream) -> StructType:
    """The columns of a node's log with their types."""
    return _schema(node, log_columns(node))


def view_schema(node: Table) -> StructType:
    """The columns of a table's view with their types."""
    names = [n for n in log_columns(node) if n not in (IS_LATEST, OLD)]
    ends = [VALID_FROM, VALID_TO] if isinstance(node, VersionedTable) else []
    return _schema(node, [*names, *ends])


def fold(node: Table, view: DataFrame | None, log: DataFrame, stream_time: Column) -> DataFrame:
    """The view of a table after more of its log; ``stream_time`` is that after it."""
    if isinstance(node, VersionedTable):
        return versioned.fold(view, log, key=node.key, horizon=horizon_of(node, stream_time))
    return table.fold(view, log, key=node.key)
