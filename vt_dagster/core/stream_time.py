"""Stream time: the largest timestamp so far, of each partition.

As of a record it is a running maximum in order of arrival. To spare a long partition a single task,
arrivals are cut into chunks: each chunk's own maximum is found first, a chunk then starts with the
maximum of those before it. And where it is only asked whether stream time has come to a record's
deadline, the bounds of a small chunk decide on most of them without any order.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pyspark.sql import Column, DataFrame
from pyspark.sql import Window as W
from pyspark.sql import functions as F

from vt_dagster.columns import ORDER, PARTITION, TIMESTAMP
from vt_dagster.core.arrival_order import micros
from vt_dagster.topology.durations import Duration

STREAM_TIME = "_stream_time"
PASSED = "_passed"
_CHUNK = "_chunk"
_BEFORE = "_before"
_LOW, _HIGH, _EXACT = "_low", "_high", "_exact"


def late_from(wait: Duration) -> Column:
    """The stream time, epoch microseconds, from which on a record is late that may lie ``wait`` behind
    it: inclusive."""
    return F.try_add(F.unix_micros(TIMESTAMP), micros(wait) + 1)


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
    timed = running_max(records, moves, STREAM_TIME, chunk=chunk, included=included)
    return timed.withColumn(STREAM_TIME, F.greatest(STREAM_TIME, before))


def running_max(
    records: DataFrame,
    value: Column,
    name: str,
    *,
    chunk: Column | None = None,
    included: bool = True,
) -> DataFrame:
    """Adds the largest value so far of a record's partition; null while there is none. Arguments and
    plan: see ``with_stream_time``."""
    in_order = [c for c in ORDER if c in records.columns]
    last = W.currentRow if included else -1
    if chunk is None:
        every = W.partitionBy(PARTITION).orderBy(*in_order).rowsBetween(W.unboundedPreceding, last)
        return records.withColumn(name, F.max(value).over(every))
    chunked = records.withColumn(_CHUNK, chunk)
    earlier = W.partitionBy(PARTITION).orderBy(_CHUNK).rowsBetween(W.unboundedPreceding, -1)
    heads = (
        chunked.groupBy(PARTITION, _CHUNK)
        .agg(F.max(value).alias(_BEFORE))
        .withColumn(_BEFORE, F.max(_BEFORE).over(earlier))
    )
    so_far = W.partitionBy(PARTITION, _CHUNK).orderBy(*in_order).rowsBetween(W.unboundedPreceding, last)
    return (
        chunked.join(F.broadcast(heads), [PARTITION, _CHUNK])
        .withColumn(name, F.greatest(F.max(value).over(so_far), F.col(_BEFORE)))
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

    Args:
        frame: the same as rows, see ``rows``, where Spark is to know them.
    """

    chunks: Sequence[Chunk]
    frame: DataFrame | None = None

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
        """With those chunks alone to be put in order that :func:`undecided_chunks` has found."""
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

    @property
    def rows(self) -> tuple[list[tuple[int, int, int | None, int | None, bool]], str]:
        """As rows ``partition, _chunk, _low, _high, _exact``, with their types."""
        rows = [(c.partition, c.chunk, c.low, c.high, c.exact) for c in self.chunks]
        types = f"{PARTITION} INT, {_CHUNK} BIGINT, {_LOW} BIGINT, {_HIGH} BIGINT, {_EXACT} BOOLEAN"
        return rows, types


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


def undecided_chunks(rows: DataFrame, deadline: Column, chunk: Column, bounds: Bounds) -> DataFrame:
    """The chunks with a deadline between their bounds: ``partition, _chunk``. Plan: as before, and a
    broadcast.

    Args:
        rows: ``partition, _arrival, …``.
        chunk: as of ``bounds``.
    """
    chunked = rows.withColumn(_CHUNK, chunk.cast("long"))
    assert bounds.frame is not None
    met = chunked.join(F.broadcast(bounds.frame.where(_EXACT)), [PARTITION, _CHUNK])
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
    assert bounds.frame is not None
    each = F.broadcast(bounds.frame)
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
    """How a stream time moves with rows, and how far they lie behind it: see
    ``Processor.stream_time_advance``.

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


def mean_and_most(found: Sequence[Any]) -> tuple[float, float] | None:
    """On average and at most, in seconds, of all partitions of :func:`lateness`; None = no records."""
    records = sum(row["records"] for row in found)
    if not records:
        return None
    total, most = sum(row["lateness"] for row in found), max(row["most"] for row in found)
    return total / records / 1e6, most / 1e6
