"""Rows of a source become records: timestamp, partition, tombstone, or a reason why not."""

from __future__ import annotations

from collections.abc import Sequence

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from vt_dagster.columns import FATE, IS_TOMBSTONE, PARTITION, TIMESTAMP
from vt_dagster.core.arrival import Fate, has_key
from vt_dagster.model import Stream, Table

REASON = "_reason"
"""Why a row was quarantined, one of the ``Reason`` codes; null for a record."""


class Reason:
    """Why a row is no record, or a record is not in the log."""

    UNREADABLE = "unreadable"
    NULL_KEY = "null_key"
    NULL_TIMESTAMP = "null_timestamp"
    FUTURE_TIMESTAMP = "future_timestamp"
    LATE = "late"


def prepare(rows: DataFrame, node: Stream, latest: Column | None = None) -> DataFrame:
    """Adds to a source's rows what makes them records.

    Args:
        rows: the columns of ``node.schema``, ``_arrival``, and where the source can tell a broken
            row, ``_reason`` = ``unreadable`` (null else). ``partition`` is kept where the input has
            one, else it is the key's hash modulo ``node.partitions``.
        latest: the largest timestamp that is believed (inclusive); None = any. A far-future
            timestamp would make everything after it late.

    Returns:
        the rows with ``timestamp, partition, is_tombstone, _fate, _reason``; ``_fate`` is
        ``quarantined`` where there is a reason, else null.
    """
    when = F.expr(node.timestamp)
    broken = F.col(REASON) if REASON in rows.columns else F.lit(None).cast("string")
    reason = F.when(broken.isNotNull(), broken)
    if isinstance(node, Table) or node.null_key == "quarantine":
        reason = reason.when(~has_key(node.key), Reason.NULL_KEY)
    reason = reason.when(F.col(TIMESTAMP).isNull(), Reason.NULL_TIMESTAMP)
    if latest is not None:
        reason = reason.when(F.col(TIMESTAMP) > latest, Reason.FUTURE_TIMESTAMP)
    tombstone = F.lit(False) if node.tombstone is None else F.expr(node.tombstone)
    timed = rows.withColumn(TIMESTAMP, when.cast("timestamp")).withColumn(
        IS_TOMBSTONE, F.coalesce(tombstone, F.lit(False))
    )
    if PARTITION not in rows.columns:
        timed = timed.withColumn(PARTITION, home_of(node.key, node))
    return timed.withColumn(REASON, reason).withColumn(
        FATE, F.when(F.col(REASON).isNotNull(), Fate.QUARANTINED)
    )


def home_of(key: Sequence[str], node: Stream) -> Column:
    """The partition that a record of a key goes to in a log that chooses it."""
    if node.partition_by is not None:
        return F.expr(node.partition_by).cast("int")
    return F.pmod(F.xxhash64(*[F.col(f"`{k}`") for k in key]), F.lit(node.partitions)).cast("int")
