"""Order of arrival and stream time: what every operator needs to know about a run's records.

Stream time is the largest timestamp seen so far in a partition. A run takes its records in order of
arrival, so stream time *as of a record* is a running maximum. To spare a long partition a single
task, arrivals are cut into chunks: each chunk's own maximum is found first, a chunk then starts with
the maximum of those before it. Numbering rows works the same way with counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import Window as W
from pyspark.sql import functions as F

from vt_dagster.columns import ARRIVAL, OFFSET, ORDER, PARTITION, TIMESTAMP
from vt_dagster.topology.durations import Duration

CHUNK = 100_000
"""Arrivals handled by one task at a time."""

FINE = 1_000
"""Arrivals between which stream time is told by its bounds, as long as that decides."""

STREAM_TIME = "_stream_time"
PASSED = "_passed"
_CHUNK = "_chunk"
_BEFORE = "_before"
_LOW, _HIGH, _EXACT = "_low", "_high", "_exact"


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


def late_from(wait: Duration) -> Column:
    """The stream time, epoch microseconds, from which on a record is late that may lie ``wait`` behind
    it: inclusive."""
    return F.try_add(F.unix_micros(TIMESTAMP), micros(wait) + 1)


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


@dataclass(frozen=True)
class Timed:
    """The records that a stream time goes by.

    Args:
        rows: ``partition, timestamp, ORDER, …``.
        moves: whether a record moves stream time.
        deadline: the stream time, epoch microseconds, at or after which another thing becomes of the
            record; null = never, None = of no record.
    """

    rows: DataFrame
    moves: Column
    deadline: Column | None = None


@dataclass(frozen=True)
class Chunk:
    """Some arrivals of a partition, one after another; times in epoch microseconds, null = none yet.

    Args:
        low, high: stream time before and after them.
        records: how many of them move it; ``oldest``, ``mean``: of their timestamps.
        exact: whether one of their deadlines may lie between ``low`` and ``high``.
    """

    partition: int
    chunk: int
    low: int | None
    high: int | None
    records: int
    oldest: int | None
    mean: float | None
    exact: bool


@dataclass(frozen=True)
class Bounds:
    """Stream time as of a run's records, told by its bounds in each chunk of them.

    A record's stream time is not less than ``low`` and not more than ``high`` of its chunk. That
    decides on a deadline that is not between the two; only chunks with another one are put in order.
    """

    chunks: Sequence[Chunk]

    @classmethod
    def of(cls, found: Iterable[Any], before: Mapping[int, int]) -> Bounds:
        """The same from :func:`time_by_chunk`.

        Args:
            before: stream time before the run, by partition.
        """
        chunks: list[Chunk] = []
        now: dict[int, int | None] = {**before}
        for row in sorted(found, key=lambda row: (row[PARTITION], row[_CHUNK])):
            low = now.get(row[PARTITION])
            high = max((t for t in (low, row["time"]) if t is not None), default=None)
            near = row["soonest"] is not None and high is not None and row["soonest"] <= high
            told = (row["records"], row["oldest"], row["mean"])
            chunks.append(Chunk(row[PARTITION], row[_CHUNK], low, high, *told, near))
            now[row[PARTITION]] = high
        return cls(chunks)

    @property
    def near(self) -> bool:
        """Whether there is a chunk to look at more closely."""
        return any(chunk.exact for chunk in self.chunks)

    def only(self, found: Iterable[Any]) -> Bounds:
        """With those chunks alone to be put in order that :func:`in_doubt` has found."""
        doubted = {(row[PARTITION], row[_CHUNK]) for row in found}
        return Bounds([replace(c, exact=(c.partition, c.chunk) in doubted) for c in self.chunks])

    @property
    def stream_time(self) -> dict[int, int]:
        """At the end of the run, by partition."""
        return {c.partition: c.high for c in self.chunks if c.high is not None}

    @property
    def lateness(self) -> tuple[float, float] | None:
        """How far records lie behind stream time, on average and at most, in seconds: as if stream time
        moved evenly within a chunk. None = there are no records."""
        total, records, most = 0.0, 0, 0.0
        for c in self.chunks:
            if c.high is None or c.oldest is None or c.mean is None:
                continue
            middle = ((c.oldest if c.low is None else c.low) + c.high) / 2
            total += max(0.0, middle - c.mean) * c.records
            most = max(most, middle - c.oldest)
            records += c.records
        return (total / records / 1e6, most / 1e6) if records else None

    def frame(self, spark: SparkSession) -> DataFrame:
        """As rows ``partition, _chunk, _low, _high, _exact``."""
        rows = [(c.partition, c.chunk, c.low, c.high, c.exact) for c in self.chunks]
        types = f"{PARTITION} INT, {_CHUNK} BIGINT, {_LOW} BIGINT, {_HIGH} BIGINT, {_EXACT} BOOLEAN"
        return spark.createDataFrame(rows, types)  # pyright: ignore[reportUnknownMemberType]


def time_by_chunk(timed: Timed, chunk: Column) -> DataFrame:
    """What :class:`Bounds` are made of. Plan: one hash aggregate, whose shuffle has a row a chunk."""
    at = F.when(timed.moves, F.unix_micros(TIMESTAMP))
    return timed.rows.groupBy(PARTITION, chunk.cast("long").alias(_CHUNK)).agg(
        F.max(at).alias("time"),
        F.min(at).alias("oldest"),
        F.avg(at.cast("double")).alias("mean"),
        F.count(at).alias("records"),
        F.min(F.lit(None).cast("long") if timed.deadline is None else timed.deadline).alias("soonest"),
    )


def in_doubt(rows: DataFrame, deadline: Column, chunk: Column, bounds: Bounds) -> DataFrame:
    """The chunks with a deadline between their bounds: ``partition, _chunk``. Plan: as before, and a
    broadcast.

    Args:
        rows: ``partition, _arrival, …``.
        chunk: as of ``bounds``.
    """
    chunked = rows.withColumn(_CHUNK, chunk.cast("long"))
    near = bounds.frame(rows.sparkSession).where(_EXACT)
    met = chunked.join(F.broadcast(near), [PARTITION, _CHUNK])
    early = F.coalesce(deadline <= F.col(_LOW), F.lit(False))
    return met.where(~early & (deadline <= F.col(_HIGH))).select(PARTITION, _CHUNK).distinct()


def passed(
    records: DataFrame,
    deadline: Column,
    before: Column,
    moves: Column,
    *,
    chunk: Column | None,
    bounds: Bounds | None,
) -> DataFrame:
    """Adds whether stream time as of each record, the record itself included, has come to its deadline.

    Plan: with bounds a broadcast; of chunks where they do not decide a shuffle and sort. Without, that
    of ``with_stream_time``.

    Args:
        records, before, moves: see ``with_stream_time``.
        deadline: epoch microseconds; null = never.
        chunk: of ``bounds``; without bounds see ``with_stream_time``.
        bounds: None = look at every record.

    Returns:
        the records with ``_passed`` (BOOLEAN).
    """
    if bounds is None:
        seen = with_stream_time(records, before, moves, chunk=chunk)
        now = F.unix_micros(STREAM_TIME)
        return seen.withColumn(PASSED, F.coalesce(deadline <= now, F.lit(False))).drop(STREAM_TIME)
    assert chunk is not None
    each = F.broadcast(bounds.frame(records.sparkSession))
    told = records.withColumn(_CHUNK, chunk.cast("long")).join(each, [PARTITION, _CHUNK])
    sure = told.withColumn(PASSED, F.coalesce(deadline <= F.col(_LOW), F.lit(False)))
    if not bounds.near:
        return sure.drop(_CHUNK, _LOW, _HIGH, _EXACT)
    in_order = [c for c in ORDER if c in records.columns]
    so_far = W.partitionBy(PARTITION, _CHUNK).orderBy(*in_order)
    so_far = so_far.rowsBetween(W.unboundedPreceding, W.currentRow)
    own = F.max(F.when(moves, F.unix_micros(TIMESTAMP))).over(so_far)
    exact = told.where(_EXACT).withColumn(STREAM_TIME, F.greatest(own, F.col(_LOW)))
    exact = exact.withColumn(PASSED, F.coalesce(deadline <= F.col(STREAM_TIME), F.lit(False)))
    both = sure.where(~F.col(_EXACT)).unionByName(exact.drop(STREAM_TIME))
    return both.drop(_CHUNK, _LOW, _HIGH, _EXACT)


def lateness(rows: DataFrame, stream_time: Column, chunk: Column | None) -> DataFrame:
    """How a stream time moves with rows, and how far they lie behind it: see ``Processor.own_time``.

    Plan: ``with_stream_time`` over few columns, then one aggregate by partition.

    Source: KIP-328, its metrics ``record-lateness-avg`` and ``record-lateness-max``.
    """
    narrow = rows.select(PARTITION, TIMESTAMP, *ORDER)
    timed = with_stream_time(narrow, stream_time, chunk=chunk)
    behind = F.unix_micros(STREAM_TIME) - F.unix_micros(TIMESTAMP)
    return timed.groupBy(PARTITION).agg(
        F.max(F.unix_micros(TIMESTAMP)).alias("time"),
        F.count(F.lit(1)).alias("records"),
        F.sum(behind).alias("lateness"),
        F.max(behind).alias("most"),
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
