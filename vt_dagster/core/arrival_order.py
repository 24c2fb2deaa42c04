"""The order in which records arrive, and how rows are numbered in that order.

The order of the records of several inputs is ``Processor.in_order``.

A long partition is split into chunks of arrivals, so that one task need not process all of it: each
chunk is aggregated first, and a chunk then starts with the aggregate of all chunks before it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta

from pyspark.sql import Column, DataFrame
from pyspark.sql import Window as W
from pyspark.sql import functions as F

from vt_dagster import rules
from vt_dagster.columns import ARRIVAL, OFFSET, PARTITION, RECORDED_AT, TURN
from vt_dagster.topology.durations import Duration

CHUNK = 100_000
"""Number of arrivals that one task processes."""

FINE = 1_000
"""Number of arrivals in a small chunk: the chunk has bounds before any exact value is computed."""

BLOCK = 64
"""Number of arrivals in a block: one for each bit of a BIGINT."""
MOST_BLOCKS, LAST_BLOCK = 250_000, 1 << 42
"""Limits: how many blocks are sent to every task (about 10 MB); and the number of a block, which with
its partition must fit one BIGINT."""

HOUR = 3_600_000_000
"""The time span of a chunk in microseconds, if ``_arrival`` is a time: one task processes a chunk."""

SHORTEST, LONGEST = 15, 32
"""The smallest and the largest level of a chunk of results that are ordered by time: a chunk covers
2**level microseconds, from 33 ms to 72 minutes."""

_ROWS_OF_A_CHUNK = 256
"""Intended number of results in such a chunk, over all partitions. Smaller chunks compare fewer rows in
full during a sort, but there are more chunks to count."""

STRIDE = 1 << 30
"""Upper bound of the rows in a file, or in a bucket of :func:`in_order_of_keys`."""
MOST_BUCKETS = 64

_PARTITIONS = 1 << 20
"""Upper bound of the partitions in a run. Their numbers may be larger (``partition_by``)."""
_CHUNK = "_chunk"
_BEFORE = "_before"
_EXACT = "_exact"
_BITS = "_bits"
_PLACE, _BUCKET = "_place", "_bucket"


class Outcome:
    """The outcome of a record in a run. Every record has exactly one, see ``rules``."""

    APPLIED = rules.APPLIED.name
    LATE = rules.LATE.name
    LOST_TIE = rules.LOST_TIE.name
    DUPLICATE = rules.DUPLICATE.name
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


REFUSED = (Outcome.LATE, Outcome.LOST_TIE, Outcome.DUPLICATE)
"""Outcomes of valid records that a table, or a stream with ``unique_by``, refuses. They are in its
quarantine, with the outcome as the reason."""


def union(rows: DataFrame, more: DataFrame | None) -> DataFrame:
    """Returns the rows of both; a column that one of them lacks is null there."""
    if more is None:
        return rows
    return rows.unionByName(more, allowMissingColumns=True)


def with_columns(rows: DataFrame, columns: Mapping[str, Column]) -> DataFrame:
    """Adds columns, possibly none: Spark Connect refuses ``withColumns`` with an empty mapping."""
    return rows.withColumns({**columns}) if columns else rows


def repartitioned(rows: DataFrame, by: Sequence[str]) -> DataFrame:
    """Repartitions rows so that rows with equal values in these columns share a task: one shuffle."""
    return rows.repartition(*[F.col(c) for c in by])


def by_partition(values: Mapping[int, int | None], kind: str = "timestamp") -> Column:
    """Looks up the row's partition in a small mapping ``partition -> number``."""
    number = F.lit(None).cast("long")
    known = {str(p): str(v) for p, v in sorted(values.items()) if v is not None}
    if known:
        # Two string literals: many literals or Column calls in a plan take longer than the query. Not
        # str_to_map: its first use in a JVM takes seconds, to initialize a table of Unicode letters.
        names, numbers = (f"split('{','.join(some)}', ',')" for some in (known, known.values()))
        by_name = f"map_from_arrays({names}, {numbers})"
        number = F.expr(f"CAST(try_element_at({by_name}, CAST(`{PARTITION}` AS STRING)) AS BIGINT)")
    return F.timestamp_micros(number) if kind == "timestamp" else number


def by_reference(value: int, of: str) -> Column:
    """Returns a number as a BIGINT column that is not a literal. For numbers that differ between runs.

    Spark writes a literal into the code that it generates. With another literal in each run, it would
    compile the code of the whole expression again, and the JVM would interpret that code at first.

    Args:
        of: any column of the row: without one, Spark folds the expression into a literal.
    """
    return F.expr(f"get(array({value}L, {value}L), CAST(`{of}` IS NULL AS INT))")


def micros(value: Duration) -> Column:
    """Returns a duration, or the one of the row's partition, in microseconds (BIGINT)."""
    one = timedelta(microseconds=1)
    if isinstance(value, timedelta):
        return F.lit(value // one).cast("long")
    return by_partition({p: v // one for p, v in value.items()}, "long")


def duration(value: Duration) -> Column:
    """Returns a duration as an interval column: the common one, or that of the row's partition."""
    if isinstance(value, timedelta):
        return F.lit(value)
    return micros(value) * F.expr("INTERVAL '0.000001' SECOND")


def arrival_chunk() -> Column:
    """Returns the chunk of a record whose ``_arrival`` is a position."""
    return F.floor(F.col(ARRIVAL) / F.lit(CHUNK))


def arrival_block() -> Column:
    """Returns the number of a row's block, see :func:`number_by_blocks`."""
    return F.floor(F.col(ARRIVAL) / F.lit(BLOCK))


def chunk_level(rows: int, span: tuple[int, int] | None) -> int:
    """Returns the level of the chunks of results that are ordered by time.

    Args:
        rows: the number of results.
        span: their smallest and largest time, epoch microseconds; None = unknown.
    """
    if span is None or not rows:
        return LONGEST
    length = (span[1] - span[0]) * _ROWS_OF_A_CHUNK // rows
    return min(LONGEST, max(SHORTEST, length.bit_length()))


def hour_of_arrival() -> Column:
    """Returns the chunk of a record whose ``_arrival`` is a time in microseconds."""
    return hour_of(F.col(ARRIVAL))


def hour_of(time: Column) -> Column:
    """Returns the hour of a time in microseconds: BIGINT."""
    return F.floor(time / F.lit(HOUR))


def over_all_partitions(rows: DataFrame) -> list[str]:
    """Returns the order of a log across partitions: ``recorded_at`` if present, offset, partition.

    Offsets of two partitions have no common order, and a key may have moved to another partition
    because the source has added partitions.
    """
    return [*([RECORDED_AT] if RECORDED_AT in rows.columns else []), OFFSET, PARTITION]


def has_key(key: Sequence[str]) -> Column:
    """Returns whether a record has a key: none of its columns is null.

    Source: FORMAT 4.2.1, 4.9; kip889-probe-null-key.
    """
    present = F.lit(True)
    for k in key:
        present = present & F.col(k).isNotNull()
    return present


def number(
    rows: DataFrame,
    first: Column,
    order: Sequence[Column],
    chunk: Column | None = None,
    partitions: Collection[int] = (),
) -> DataFrame:
    """Assigns gap-free offsets within each partition, in the given order.

    Plan: one shuffle and sort by partition. With a chunk: one aggregate over the rows before it (one
    row per chunk, broadcast), and a shuffle by partition and chunk.

    Args:
        rows: ``partition, …``.
        first: the first free offset of the row's partition; null = 0.
        order: the order of the rows within a partition; must be total.
        chunk: BIGINT, must ascend with the order; one task numbers the rows of a chunk. None = one task
            numbers the whole partition.
        partitions: with a chunk, all partitions of the rows.
    """
    if chunk is None:
        place = F.row_number().over(W.partitionBy(PARTITION).orderBy(*order))
        return rows.withColumn(OFFSET, (place - 1 + F.coalesce(first, F.lit(0))).cast("long"))
    # With the number of rows before each chunk, which is one row per chunk, chunks are numbered in
    # parallel.
    chunked = _chunked(rows, chunk, partitions)
    counts = chunked.groupBy(_CHUNK).agg(F.count(F.lit(1)).alias(_BEFORE))
    heads = counts.withColumn(_BEFORE, _sum_before(F.col(_BEFORE)))
    within = W.partitionBy(_CHUNK).orderBy(*order)
    position = F.row_number().over(within) - 1 + F.col(_BEFORE) + F.coalesce(first, F.lit(0))
    return (
        chunked.join(F.broadcast(heads), [_CHUNK])
        .withColumn(OFFSET, position.cast("long"))
        .drop(_CHUNK, _BEFORE)
    )


def number_by_blocks(rows: DataFrame, first: Column, partitions: Collection[int]) -> DataFrame:
    """Assigns the offsets of :func:`number` to rows in order of ``_arrival``, without sorting them.

    A block is ``BLOCK`` consecutive arrivals of a partition, with a bit for each that has a row. An
    offset is the number of rows in earlier blocks, plus the number of rows in its own block that have a
    lower bit.

    Plan: one aggregate (one row per block, broadcast).

    Args:
        rows: ``partition, _arrival, …``; all rows of a partition have different arrivals.
        partitions: all partitions of the rows.
    """
    blocks = _chunked(rows, arrival_block(), partitions)
    bit = f"CAST(pmod({ARRIVAL}, {BLOCK}) AS INT)"
    found = blocks.groupBy(_CHUNK).agg(F.expr(f"bit_or(shiftleft(1L, {bit}))").alias(_BITS))
    heads = found.withColumn(_BEFORE, _sum_before(F.bit_count(_BITS)))
    lower = F.expr(f"bit_count({_BITS} & ~shiftleft(-1L, {bit}))")
    offset = lower + F.col(_BEFORE) + F.coalesce(first, F.lit(0))
    placed = blocks.join(F.broadcast(heads), [_CHUNK]).withColumn(OFFSET, offset.cast("long"))
    return placed.drop(_CHUNK, _BITS, _BEFORE)


def _chunked(rows: DataFrame, chunk: Column, partitions: Collection[int]) -> DataFrame:
    """Adds chunk and partition as one number, which is faster to group, look up and compare. A sort
    compares only its first column in place, unless two rows are equal in that column."""
    partition = F.col(PARTITION)
    if not all(0 <= one < _PARTITIONS for one in partitions):
        partition = by_partition({one: i for i, one in enumerate(sorted(partitions))}, "long")
    return rows.withColumn(_CHUNK, chunk * _PARTITIONS + partition)


def _sum_before(count: Column) -> Column:
    """Returns the sum over the chunks of a partition before a chunk, see :func:`_chunked`."""
    of_partition = F.pmod(F.col(_CHUNK), F.lit(_PARTITIONS))
    earlier = W.partitionBy(of_partition).orderBy(_CHUNK).rowsBetween(W.unboundedPreceding, -1)
    return F.coalesce(F.sum(count).over(earlier), F.lit(0))


def in_order_of_keys(
    rows: DataFrame, *, key: Sequence[str], then: Sequence[Column], place: Column, buckets: Column
) -> DataFrame:
    """Assigns rows without an order of arrival a deterministic one, derived from their content alone.

    Plan: one shuffle and sort by place and hash of the key.

    Args:
        rows: without ``_arrival``.
        then: the order among rows of one key and place.
        place: ascends with the order of arrival: BIGINT, from 0.
        buckets: the number of parts that a place is split into, one task each.

    Returns:
        the rows with ``_arrival``, ascending and unique, with gaps.
    """
    bucket = F.pmod(F.xxhash64(*[F.col(f"`{k}`") for k in key]), buckets)
    placed = rows.withColumns({_PLACE: place, _BUCKET: bucket})
    order = W.partitionBy(_PLACE, _BUCKET).orderBy(*[F.col(f"`{k}`") for k in key], *then)
    # With gaps, because no task knows how many rows other buckets have.
    first = (F.col(_PLACE) * MOST_BUCKETS + F.col(_BUCKET)) * STRIDE
    return placed.withColumn(ARRIVAL, first + F.row_number().over(order)).drop(_PLACE, _BUCKET)


@dataclass(frozen=True)
class InPlace:
    """Describes results that keep the positions of one log's records.

    Args:
        taken: the offset range that the run reads of each partition: first (inclusive), end
            (exclusive).
        complete: whether every record in the range has all its results.
        of_record: maximum number of results of a record; if more than one, ``_turn`` counts them from
            0.
    """

    taken: Mapping[int, tuple[int, int]]
    complete: bool
    of_record: int = 1


def number_in_place(rows: DataFrame, first: Column, place: InPlace) -> DataFrame:
    """Assigns the offsets of :func:`number` to rows that keep the order of one log.

    An offset is the number of possible results before this one (the record's offset multiplied by the
    results of a record, plus the result's turn), minus the omitted ones.

    Plan: a projection if rows are complete. Otherwise one aggregate (one row per chunk, broadcast), and
    a shuffle and sort of the chunks with omitted results.

    Args:
        rows: ``partition, _arrival, …``; ``_arrival`` is the record's offset.
    """
    many = place.of_record
    position, order = F.col(ARRIVAL), [ARRIVAL]
    if many > 1:
        position, order = position * many + F.col(TURN), [ARRIVAL, TURN]
    free = F.coalesce(first, F.lit(0))
    start = by_partition({p: s for p, (s, _) in place.taken.items()}, "long")
    if place.complete:
        return rows.withColumn(OFFSET, (position - start * many + free).cast("long"))
    end = by_partition({p: e for p, (_, e) in place.taken.items()}, "long")
    chunked = rows.withColumn(_CHUNK, F.floor(F.col(ARRIVAL) / F.lit(FINE)))
    begins = F.greatest(F.col(_CHUNK) * FINE, start)
    earlier = W.partitionBy(PARTITION).orderBy(_CHUNK).rowsBetween(W.unboundedPreceding, -1)
    heads = (
        chunked.groupBy(PARTITION, _CHUNK)
        .agg(F.count(F.lit(1)).alias("_rows"))
        .withColumn(_BEFORE, F.coalesce(F.sum("_rows").over(earlier), F.lit(0)) + free)
        .withColumn(_EXACT, F.col("_rows") < (F.least((F.col(_CHUNK) + 1) * FINE, end) - begins) * many)
        .drop("_rows")
    )
    bounded = chunked.join(F.broadcast(heads), [PARTITION, _CHUNK])
    within = W.partitionBy(PARTITION, _CHUNK).orderBy(*order)
    # A chunk without omitted results keeps the distances between its offsets, so it needs no sort.
    whole = bounded.where(~F.col(_EXACT)).withColumn(OFFSET, position - begins * many + F.col(_BEFORE))
    others = bounded.where(_EXACT).withColumn(OFFSET, F.row_number().over(within) - 1 + F.col(_BEFORE))
    both = whole.unionByName(others)
    return both.withColumn(OFFSET, F.col(OFFSET).cast("long")).drop(_CHUNK, _BEFORE, _EXACT)
