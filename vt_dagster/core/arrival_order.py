"""Order of arrival: what every operator needs to know about a run's records.

To spare a long partition a single task, arrivals are cut into chunks: what each holds is counted
first, and a chunk then starts with the sum of those before it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta

from pyspark.sql import Column, DataFrame
from pyspark.sql import Window as W
from pyspark.sql import functions as F

from vt_dagster import rules
from vt_dagster.columns import ARRIVAL, OFFSET, PARTITION, RECORDED_AT
from vt_dagster.topology.durations import Duration

CHUNK = 100_000
"""Arrivals handled by one task at a time."""

FINE = 1_000
"""Arrivals of which something is told together, as long as that is enough."""

HOUR = 3_600_000_000
"""Microseconds of arrivals handled by one task at a time, where that goes by time."""

STRIDE = 1 << 30
"""More rows than a file has, or a bucket of :func:`in_order_of_keys`."""
MOST_BUCKETS = 64

_CHUNK = "_chunk"
_BEFORE = "_before"
_EXACT = "_exact"
_PLACE, _BUCKET = "_place", "_bucket"


class Outcome:
    """What became of a record in a run; every record has exactly one outcome, see ``rules``."""

    APPLIED = rules.APPLIED.name
    LATE = rules.LATE.name
    LOST_TIE = rules.LOST_TIE.name
    CARRIED = rules.CARRIED.name
    COVERED = rules.COVERED.name
    NOTHING_NEW = rules.NOTHING_NEW.name
    WAITING = rules.WAITING.name
    DROPPED = rules.DROPPED.name
    NO_RESULT = rules.NO_RESULT.name
    AGAIN = rules.AGAIN.name
    TOO_LATE = rules.TOO_LATE.name
    CHANGE = rules.CHANGE.name
    KEPT = rules.KEPT.name
    QUARANTINED = rules.QUARANTINED.name


def union(rows: DataFrame, more: DataFrame | None) -> DataFrame:
    """The rows of both, null in columns that one of them lacks."""
    if more is None:
        return rows
    return rows.unionByName(more, allowMissingColumns=True)


def with_columns(rows: DataFrame, told: Mapping[str, Column]) -> DataFrame:
    """Rows with more columns, or none: Spark Connect refuses ``withColumns`` of nothing."""
    return rows.withColumns({**told}) if told else rows


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


def hour_of_arrival() -> Column:
    """The chunk where ``_arrival`` is a time."""
    return F.floor(F.col(ARRIVAL) / F.lit(HOUR))


def over_all_partitions(rows: DataFrame) -> list[str]:
    """The order in which records of a log came, whatever their partitions: by when they were recorded,
    where rows tell it. Offsets of two partitions tell no order, and a key may be in another one than
    before, since the source has got more."""
    return [*([RECORDED_AT] if RECORDED_AT in rows.columns else []), OFFSET, PARTITION]


def has_key(key: Sequence[str]) -> Column:
    """Whether a record has a key: no column of it is null.

    Source: FORMAT 4.2.1, 4.9; kip889-probe-null-key.
    """
    present = F.lit(True)
    for k in key:
        present = present & F.col(k).isNotNull()
    return present


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


def in_order_of_keys(
    rows: DataFrame, *, key: Sequence[str], then: Sequence[Column], place: Column, buckets: Column
) -> DataFrame:
    """Gives rows that come without an order of their own one that depends on what is in them alone.

    Plan: one shuffle and sort by place and hash of the key.

    Args:
        rows: without ``_arrival``.
        then: the order among rows of one key and place.
        place: ascends with the order of arrival: BIGINT, from 0.
        buckets: into how many parts a place is cut, a task each.

    Returns:
        the rows with ``_arrival``, ascending and unique, with gaps.
    """
    bucket = F.pmod(F.xxhash64(*[F.col(f"`{k}`") for k in key]), buckets)
    placed = rows.withColumns({_PLACE: place, _BUCKET: bucket})
    order = W.partitionBy(_PLACE, _BUCKET).orderBy(*[F.col(f"`{k}`") for k in key], *then)
    first = (F.col(_PLACE) * MOST_BUCKETS + F.col(_BUCKET)) * STRIDE
    return placed.withColumn(ARRIVAL, first + F.row_number().over(order)).drop(_PLACE, _BUCKET)


@dataclass(frozen=True)
class InPlace:
    """Rows that lie as the records of one log do, one of a record at most.

    Args:
        taken: the offsets that the run takes of each partition: first (inclusive), end (exclusive).
        complete: whether each of these records has a row.
    """

    taken: Mapping[int, tuple[int, int]]
    complete: bool


def number_in_place(rows: DataFrame, first: Column, place: InPlace) -> DataFrame:
    """The same as :func:`number` of what leaves records in their place: an offset is the record's own,
    less what was left out before it.

    Plan: where rows are complete a projection. Else one aggregate (a row a chunk, broadcast), and a
    shuffle and sort of chunks that something was left out of.

    Args:
        rows: ``partition, _arrival, …``; ``_arrival`` is the record's offset.
    """
    free = F.coalesce(first, F.lit(0))
    start = by_partition({p: s for p, (s, _) in place.taken.items()}, "long")
    if place.complete:
        return rows.withColumn(OFFSET, (F.col(ARRIVAL) - start + free).cast("long"))
    end = by_partition({p: e for p, (_, e) in place.taken.items()}, "long")
    chunked = rows.withColumn(_CHUNK, F.floor(F.col(ARRIVAL) / F.lit(FINE)))
    begins = F.greatest(F.col(_CHUNK) * FINE, start)
    earlier = W.partitionBy(PARTITION).orderBy(_CHUNK).rowsBetween(W.unboundedPreceding, -1)
    heads = (
        chunked.groupBy(PARTITION, _CHUNK)
        .agg(F.count(F.lit(1)).alias("_rows"))
        .withColumn(_BEFORE, F.coalesce(F.sum("_rows").over(earlier), F.lit(0)) + free)
        .withColumn(_EXACT, F.col("_rows") < F.least((F.col(_CHUNK) + 1) * FINE, end) - begins)
        .drop("_rows")
    )
    told = chunked.join(F.broadcast(heads), [PARTITION, _CHUNK])
    within = W.partitionBy(PARTITION, _CHUNK).orderBy(ARRIVAL)
    whole = told.where(~F.col(_EXACT)).withColumn(OFFSET, F.col(ARRIVAL) - begins + F.col(_BEFORE))
    others = told.where(_EXACT).withColumn(OFFSET, F.row_number().over(within) - 1 + F.col(_BEFORE))
    both = whole.unionByName(others)
    return both.withColumn(OFFSET, F.col(OFFSET).cast("long")).drop(_CHUNK, _BEFORE, _EXACT)
