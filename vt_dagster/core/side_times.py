"""Largest times so far, of several kinds at once, as of each record."""

from __future__ import annotations

from collections.abc import Mapping

from pyspark.sql import Column, DataFrame
from pyspark.sql import Window as W
from pyspark.sql import functions as F

from vt_dagster.columns import ORDER, PARTITION

_CHUNK = "_chunk"


def with_largest(
    rows: DataFrame,
    moves: Mapping[str, Column],
    before: Mapping[str, Column],
    chunk: Column | None,
) -> DataFrame:
    """Adds of each kind the largest time so far, the record itself included.

    Plan: as of ``stream_time.with_stream_time``.

    Args:
        rows: ``partition, ORDER, …``.
        moves: by name, the time (epoch microseconds) that a record brings; null = none.
        before: by the same names, that of the record's partition before these rows; null = none yet.
        chunk: ascends with the order; None = one task takes all that a partition has.
    """
    if chunk is None:
        so_far = W.partitionBy(PARTITION).orderBy(*ORDER)
        so_far = so_far.rowsBetween(W.unboundedPreceding, W.currentRow)
        return rows.withColumns(
            {name: F.greatest(F.max(c).over(so_far), before[name]) for name, c in moves.items()}
        )
    chunked = rows.withColumn(_CHUNK, chunk)
    earlier = W.partitionBy(PARTITION).orderBy(_CHUNK).rowsBetween(W.unboundedPreceding, -1)
    heads = (
        chunked.groupBy(PARTITION, _CHUNK)
        .agg(*[F.max(c).alias(_head(name)) for name, c in moves.items()])
        .withColumns({_head(name): F.max(_head(name)).over(earlier) for name in moves})
    )
    so_far = W.partitionBy(PARTITION, _CHUNK).orderBy(*ORDER)
    so_far = so_far.rowsBetween(W.unboundedPreceding, W.currentRow)
    found = {
        name: F.greatest(F.max(c).over(so_far), F.col(_head(name)), before[name])
        for name, c in moves.items()
    }
    told = chunked.join(F.broadcast(heads), [PARTITION, _CHUNK]).withColumns(found)
    return told.drop(_CHUNK, *map(_head, moves))


def _head(name: str) -> str:
    return f"_head{name}"
