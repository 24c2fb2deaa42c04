"""Running maxima of several kinds of times, as of each record."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pyspark.sql import Column, DataFrame
from pyspark.sql import Window as W
from pyspark.sql import functions as F

from vt_dagster.columns import OFFSET, ORDER, PARTITION
from vt_dagster.core.arrival_order import FINE, with_columns

_CHUNK = "_chunk"


def with_largest(
    rows: DataFrame,
    moves: Mapping[str, Column],
    before: Mapping[str, Column],
    chunk: Column | None,
) -> DataFrame:
    """Adds for each kind the largest time so far, including the record itself.

    Plan: as for ``stream_time.with_stream_time``.

    Args:
        rows: ``partition, ORDER, …``.
        moves: by name, the time (epoch microseconds) that a record contributes; null = none.
        before: by the same names, the largest time of the partition before these rows; null = none yet.
        chunk: must ascend with the order; None = one task processes the whole partition.
    """
    if chunk is None:
        so_far = W.partitionBy(PARTITION).orderBy(*ORDER)
        so_far = so_far.rowsBetween(W.unboundedPreceding, W.currentRow)
        return with_columns(
            rows, {name: F.greatest(F.max(c).over(so_far), before[name]) for name, c in moves.items()}
        )
    chunked = rows.withColumn(_CHUNK, chunk)
    earlier = W.partitionBy(PARTITION).orderBy(_CHUNK).rowsBetween(W.unboundedPreceding, -1)
    heads = with_columns(
        chunked.groupBy(PARTITION, _CHUNK).agg(
            *[F.max(c).alias(_head(name)) for name, c in moves.items()]
        ),
        {_head(name): F.max(_head(name)).over(earlier) for name in moves},
    )
    so_far = W.partitionBy(PARTITION, _CHUNK).orderBy(*ORDER)
    so_far = so_far.rowsBetween(W.unboundedPreceding, W.currentRow)
    found = {
        name: F.greatest(F.max(c).over(so_far), F.col(_head(name)), before[name])
        for name, c in moves.items()
    }
    told = with_columns(chunked.join(F.broadcast(heads), [PARTITION, _CHUNK]), found)
    return told.drop(_CHUNK, *map(_head, moves))


def largest_by_chunk(rows: DataFrame, side: str, at: str, counts: Column) -> DataFrame:
    """Aggregates the times of small chunks of two sides' logs.

    Plan: one hash aggregate, whose shuffle has one row per chunk.

    Returns:
        ``partition, side, _chunk`` (ascending with offsets), ``time, oldest`` (the largest and the
        smallest of ``at``), ``valid`` (the largest among the records that count; null = none).
    """
    chunk = F.floor(F.col(OFFSET) / F.lit(FINE)).alias(_CHUNK)
    return rows.groupBy(PARTITION, side, chunk).agg(
        F.max(at).alias("time"),
        F.min(at).alias("oldest"),
        F.max(F.when(counts, F.col(at))).alias("valid"),
    )


def largest_if_none_late(
    found: Sequence[Any], side: str, before: Mapping[int, int], grace: Callable[[int], int]
) -> dict[int, tuple[int, dict[int, int]]] | None:
    """Returns by partition the final stream time and the largest valid time by side, if none is late.

    Records of two logs are merged by the largest time so far of their own log. Stream time as of a
    record is therefore at most that of the end of its chunk, or that before the run.

    Args:
        found: the rows of :func:`largest_by_chunk`.
        before: stream time before the run, by partition, epoch microseconds.
        grace: gives the grace period of a partition in microseconds.

    Returns:
        None if by these bounds a record may be late.
    """
    now: dict[tuple[int, int], int] = {}
    ends: dict[int, tuple[int, dict[int, int]]] = {}
    for row in sorted(found, key=lambda row: (row[PARTITION], row[side], row[_CHUNK])):
        p, place = row[PARTITION], row[side]
        time: int = row["time"]
        high = max(now.get((p, place), time), before.get(p, time), time)
        if row["oldest"] < high - grace(p):
            return None
        now[p, place] = high
        end, valid = ends.get(p, (high, {}))
        if row["valid"] is not None:
            valid[place] = max(valid.get(place, row["valid"]), row["valid"])
        ends[p] = max(end, high), valid
    return ends


def _head(name: str) -> str:
    return f"_head{name}"
