"""Order of arrival and stream time: what every operator needs to know about a run's records.

Stream time is the largest timestamp seen so far in a partition. A run takes its records in order of
arrival, so stream time *as of a record* is a running maximum. To spare a long partition a single
task, arrivals are cut into chunks: each chunk's own maximum is found first, a chunk then starts with
the maximum of those before it. Numbering rows works the same way with counts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta

from pyspark.sql import Column, DataFrame
from pyspark.sql import Window as W
from pyspark.sql import functions as F

from vt_dagster.columns import ARRIVAL, OFFSET, ORDER, PARTITION, TIMESTAMP
from vt_dagster.topology.durations import Duration

CHUNK = 100_000
"""Arrivals handled by one task at a time."""

STREAM_TIME = "_stream_time"
_CHUNK = "_chunk"
_BEFORE = "_before"


class Fate:
    """What became of a record in a run; every record has exactly one fate."""

    APPLIED = "applied"  # in the log; for a join: joined on arrival or out of the buffer
    LATE = "late"  # a table refused it; a join with grace joined it at once
    WAITING = "waiting"  # in the grace buffer
    DROPPED = "dropped"  # of no use: no value or key where one is needed, out of order, window closed
    NO_RESULT = "no_result"  # an operator took it and had nothing to say
    KEPT = "kept"  # no record: what an operator knows from before, and keeps for the next run
    QUARANTINED = "quarantined"  # not a record: unreadable, no key, no timestamp, far future


def union(rows: DataFrame, more: DataFrame | None) -> DataFrame:
    """The rows of both, null in columns that one of them lacks."""
    if more is None:
        return rows
    return rows.unionByName(more, allowMissingColumns=True)


def gathered(rows: DataFrame, by: Sequence[str]) -> DataFrame:
    """The rows, all those that are equal in some columns in one task: one shuffle."""
    return rows.repartition(*[F.col(c) for c in by])


def by_partition(values: Mapping[int, int | None], kind: str = "timestamp") -> Column:
    """A small mapping ``partition -> number`` as a column of the row's own partition.

    Args:
        values: for ``kind='timestamp'`` epoch microseconds, for ``kind='long'`` plain numbers.
            A partition without an entry gives null.
    """
    number = F.lit(None).cast("long")
    known = [f"{p}:{v}" for p, v in sorted(values.items()) if v is not None]
    if known:
        # As one text: many literals in a plan, or many calls of Column functions, would take longer
        # than the query.
        by_name = f"str_to_map('{','.join(known)}', ',', ':')"
        number = F.expr(f"CAST(try_element_at({by_name}, CAST(`{PARTITION}` AS STRING)) AS BIGINT)")
    return F.timestamp_micros(number) if kind == "timestamp" else number


def micros(value: Duration) -> Column:
    """A duration in microseconds, BIGINT, also where each partition has its own."""
    one = timedelta(microseconds=1)
    if isinstance(value, timedelta):
        return F.lit(value // one).cast("long")
    return by_partition({p: v // one for p, v in value.items()}, "long")


def duration(value: Duration) -> Column:
    """The same as an interval column."""
    if isinstance(value, timedelta):
        return F.lit(value)
    return micros(value) * F.expr("INTERVAL '0.000001' SECOND")


def arrival_chunk() -> Column:
    """The chunk of a record by its order of arrival."""
    return F.floor(F.col(ARRIVAL) / F.lit(CHUNK))


def has_key(key: Sequence[str]) -> Column:
    """Whether a record has a key: no column of it is null.

    Source: FORMAT 4.2.1, 4.9; kip889-probe-null-key.
    """
    present = F.lit(True)
    for k in key:
        present = present & F.col(k).isNotNull()
    return present


def stream_time_of(records: DataFrame, counts: Column) -> DataFrame:
    """The largest timestamp of each partition's records: ``partition, stream_time`` (TIMESTAMP).

    Args:
        counts: whether a record moves stream time.

    Source: FORMAT 4.5; kip923-probe-dropped-does-not-move-time.
    """
    return records.where(counts).groupBy(PARTITION).agg(F.max(TIMESTAMP).alias("stream_time"))


def with_stream_time(
    records: DataFrame,
    before: Column,
    counts: Column | None = None,
    *,
    chunk: Column | None = None,
    included: bool = True,
) -> DataFrame:
    """Adds stream time as of each record, the record itself included.

    Plan: one shuffle and sort by partition; with a chunk one aggregate over the records before it
    (a row a chunk, broadcast), and the shuffle is by partition and chunk.

    Args:
        records: ``partition, _arrival, timestamp, …``; where ``_arrival`` alone is not a total order,
            the other columns of ``ORDER`` too.
        before: stream time of the record's partition before the run; null = no record yet.
        counts: whether a record moves stream time; None = every one does.
        chunk: ascends with the order; None = one task takes all that a partition has.
        included: False = as of just before the record.

    Returns:
        the records with ``_stream_time`` (TIMESTAMP; null while no record has counted).

    Source: FORMAT 4.1.2, 4.5, 4.10; kip914-store-grace-across-keys, kip328-grace-boundary.
    """
    moves = F.col(TIMESTAMP) if counts is None else F.when(counts, F.col(TIMESTAMP))
    in_order = [c for c in ORDER if c in records.columns]
    last = W.currentRow if included else -1
    if chunk is None:
        every = W.partitionBy(PARTITION).orderBy(*in_order).rowsBetween(W.unboundedPreceding, last)
        return records.withColumn(STREAM_TIME, F.greatest(F.max(moves).over(every), before))
    chunked = records.withColumn(_CHUNK, chunk)
    earlier = W.partitionBy(PARTITION).orderBy(_CHUNK).rowsBetween(W.unboundedPreceding, -1)
    heads = (
        chunked.groupBy(PARTITION, _CHUNK)
        .agg(F.max(moves).alias(_BEFORE))
        .withColumn(_BEFORE, F.max(_BEFORE).over(earlier))
    )
    so_far = W.partitionBy(PARTITION, _CHUNK).orderBy(*in_order).rowsBetween(W.unboundedPreceding, last)
    return (
        chunked.join(F.broadcast(heads), [PARTITION, _CHUNK])
        .withColumn(STREAM_TIME, F.greatest(F.max(moves).over(so_far), F.col(_BEFORE), before))
        .drop(_CHUNK, _BEFORE)
    )


def number(
    rows: DataFrame, first: Column, order: Sequence[Column], chunk: Column | None = None
) -> DataFrame:
    """Gives rows the gap-free offsets of their partition, in the given order.

    Plan: one shuffle and sort by partition; with a chunk one aggregate over the rows before it (a row
    a chunk, broadcast), and the shuffle is by partition and chunk.

    Args:
        rows: ``partition, …``.
        first: the first free offset of the row's partition; null counts as 0.
        order: the order of the rows within a partition; must be total.
        chunk: ascends with the order; rows of one chunk are numbered by one task. None = one task
            numbers all that a partition has.
    """
    if chunk is None:
        place = F.row_number().over(W.partitionBy(PARTITION).orderBy(*order))
        return rows.withColumn(OFFSET, (place - 1 + F.coalesce(first, F.lit(0))).cast("long"))
    chunked = rows.withColumn(_CHUNK, chunk)
    earlier = W.partitionBy(PARTITION).orderBy(_CHUNK).rowsBetween(W.unboundedPreceding, -1)
    heads = (
        chunked.groupBy(PARTITION, _CHUNK)
        .agg(F.count(F.lit(1)).alias(_BEFORE))
        .withColumn(_BEFORE, F.coalesce(F.sum(_BEFORE).over(earlier), F.lit(0)))
    )
    within = W.partitionBy(PARTITION, _CHUNK).orderBy(*order)
    position = F.row_number().over(within) - 1 + F.col(_BEFORE) + F.coalesce(first, F.lit(0))
    return (
        chunked.join(F.broadcast(heads), [PARTITION, _CHUNK])
        .withColumn(OFFSET, position.cast("long"))
        .drop(_CHUNK, _BEFORE)
    )
