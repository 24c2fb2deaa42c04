"""Stream-table join: each record with the table as of the record's own time (KIP-914)."""

from __future__ import annotations

from collections.abc import Sequence

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from vt_dagster.columns import ARRIVAL, FATE, IS_LATE, IS_TOMBSTONE, PARTITION, TIMESTAMP
from vt_dagster.core.arrival import Fate
from vt_dagster.core.as_of_join import FOUND, Way, as_of_join
from vt_dagster.topology.operators import JoinKind

LEFT, RIGHT = "left", "right"
MATCHED = "_matched"
_ROW = "_row"
"""The table's row, as long as it stands beside the stream's columns, one of which may be ``right``."""


def join(
    stream: DataFrame,
    table: DataFrame,
    *,
    kind: JoinKind,
    stream_key: Sequence[str],
    table_key: Sequence[str],
    columns: Sequence[tuple[str, str]],
    horizon: Column | None,
    way: Way = "sorted",
) -> DataFrame:
    """Joins stream records with the table.

    Plan: versioned, that of ``as_of_join``; unversioned, a plain equi-join, which Spark may broadcast.

    Args:
        stream: ``key columns, timestamp, partition, _arrival, _fate, …``: records that are due.
        table: a versioned table's versions, or an unversioned table's current rows.
        columns: the result's (name, SQL expression over ``left.*`` and ``right.*``).
        horizon: ``stream time - history retention`` of the table's partition; None = the table is
            not versioned. A record older than that joins the current version if that is old enough,
            else nothing (kip914-expired-lookup-left).
        way: of a versioned table, see ``as_of_join``.

    Returns:
        ``columns, timestamp, partition, is_tombstone (false), _arrival, is_late, _matched``:
        one row a record, or for an inner join one for each that found something. The result's
        timestamp is the stream record's.
    """
    if horizon is None:
        found = _current(stream, table, stream_key, table_key)
    else:
        found = as_of_join(
            stream,
            table,
            left_key=stream_key,
            right_key=table_key,
            horizon=horizon,
            name=_ROW,
            way=way,
        )
    if kind == "inner":
        found = found.where(F.col(FOUND))
    rows = found.select(
        F.struct(*[F.col(f"`{c}`") for c in stream.columns]).alias(LEFT),
        F.col(_ROW).alias(RIGHT),
        TIMESTAMP,
        PARTITION,
        ARRIVAL,
        (F.col(FATE) == Fate.LATE).alias(IS_LATE),
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
