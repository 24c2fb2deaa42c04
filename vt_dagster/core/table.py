"""The plain table: the latest record per key, by arrival, whatever its timestamp."""

from __future__ import annotations

from collections.abc import Sequence

from pyspark.sql import DataFrame
from pyspark.sql import Window as W
from pyspark.sql import functions as F

from vt_dagster.columns import IS_LATEST, IS_TOMBSTONE, OFFSET, PARTITION

_LAST = "_last"


def fold(rows: DataFrame | None, log: DataFrame, *, key: Sequence[str]) -> DataFrame:
    """The current rows after more of the log: what the view of a plain table is.

    Plan: one shuffle and sort by key.

    Args:
        rows: the current rows before; None = none.
        log: log rows after those that made ``rows``; a tombstone removes its key.
    """
    fresh = log.drop(IS_LATEST)
    everything = fresh if rows is None else rows.unionByName(fresh)
    newest_first = W.partitionBy(*key).orderBy(F.col(OFFSET).desc(), F.col(PARTITION).desc())
    return (
        everything.withColumn(_LAST, F.row_number().over(newest_first))
        .where((F.col(_LAST) == 1) & ~F.col(IS_TOMBSTONE))
        .drop(_LAST)
    )
