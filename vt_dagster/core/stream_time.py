"""Stream time (the largest timestamp so far, per partition), and running maxima of other times.

Stream time as of a record is a running maximum in order of arrival. A long partition is split into
chunks of arrivals, so that one task need not process all of it: each chunk's maximum is computed first,
and a chunk starts with the maximum of those before it. To decide only whether stream time has reached a
record's deadline, the bounds of a small chunk are enough for most records, without any ordering.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pyspark.sql import Column, DataFrame, WindowSpec
from pyspark.sql import Window as W
from pyspark.sql import functions as F

from vt_dagster.columns import OFFSET, ORDER, PARTITION, TIMESTAMP
from vt_dagster.core.arrival_order import FINE, micros, with_columns
from vt_dagster.topology.durations import Duration

# Stream time


STREAM_TIME = "_stream_time"
PASSED = "_passed"
_CHUNK = "_chunk"
_LOW, _HIGH, _EXACT = "_low", "_high", "_exact"


def late_from(wait: Duration) -> Column:
    """Returns the stream time (epoch microseconds, inclusive) from which on a record is late.

    A record may lie up to ``wait`` behind stream time.
    """
    # + 1: late is timestamp < stream time - wait (KIP-889, KIP-923); a record exactly at the bound is
    # not. try_add: a timestamp close to the largest BIGINT gives null, which is never late.
    return F.try_add(F.unix_micros(TIMESTAMP), micros(wait) + 1)


def with_stream_time(
    records: DataFrame,
    before: Column,
    counts: Column | None = None,
    *,
    chunk: Column | None = None,
    included: bool = True,
) -> DataFrame:
    """Adds stream time as of each record, including the record itself.

    Plan: one shuffle and sort by partition. With a chunk: one aggregate over the records before it
    (one row per chunk, broadcast), and a shuffle by partition and chunk.

    Args:
        records: ``partition, _arrival, timestamp, …``; if ``_arrival`` alone is not a total order,
            the other columns of ``ORDER`` too.
        before: stream time of the record's partition before the run; null = no record yet.
        counts: whether a record advances stream time; None = every one does.
        chunk: must ascend with the order; None = one task processes the whole partition.
        included: False = as of just before the record.

    Returns:
        the records with ``_stream_time`` (TIMESTAMP; null until a record counts).

    Source: FORMAT 4.1.2, 4.5, 4.10; kip914-store-grace-across-keys, kip328-grace-boundary.
    """
    moves = F.col(TIMESTAMP) if counts is None else F.when(counts, F.col(TIMESTAMP))
    values, earlier = {STREAM_TIME: moves}, {STREAM_TIME: before}
    return running_max(records, values, earlier, chunk=chunk, included=included)


def running_max(
    records: DataFrame,
    values: Mapping[str, Column],
    before: Mapping[str, Column],
    *,
    chunk: Column | None,
    included: bool = True,
    bounded_by: DataFrame | None = None,
) -> DataFrame:
    """Adds by name the largest value so far in a record's partition; null if there is none.

    Other arguments and plan: see ``with_stream_time``.

    Args:
        values: the value that a record contributes; null = none.
        before: the largest value of the partition before these records; null = none yet.
        bounded_by: rows with the same chunks and values that take less to compute; None = the records.
    """
    if chunk is None:
        so_far = _so_far(records, included=included)
        found = {name: F.greatest(F.max(v).over(so_far), before[name]) for name, v in values.items()}
        return with_columns(records, found)
    # A window over the whole partition is one task. With the maximum before each chunk, which is one
    # row per chunk, chunks are processed in parallel.
    chunked = records.withColumn(_CHUNK, chunk)
    bounded = chunked if bounded_by is None else bounded_by.withColumn(_CHUNK, chunk)
    earlier = W.partitionBy(PARTITION).orderBy(_CHUNK).rowsBetween(W.unboundedPreceding, -1)
    head = {name: f"_head{name}" for name in values}
    heads = with_columns(
        bounded.groupBy(PARTITION, _CHUNK).agg(*[F.max(v).alias(head[n]) for n, v in values.items()]),
        {name: F.max(name).over(earlier) for name in head.values()},
    )
    so_far = _so_far(records, _CHUNK, included=included)
    found = {
        name: F.greatest(F.max(value).over(so_far), F.col(head[name]), before[name])
        for name, value in values.items()
    }
    bounds = F.broadcast(heads)
    known = with_columns(chunked.join(bounds, [PARTITION, _CHUNK]), found)
    return known.drop(_CHUNK, *head.values())


def _so_far(records: DataFrame, *by: str, included: bool = True) -> WindowSpec:
    """Returns the records of a partition up to a record, in order."""
    in_order = W.partitionBy(PARTITION, *by).orderBy(*[c for c in ORDER if c in records.columns])
    return in_order.rowsBetween(W.unboundedPreceding, W.currentRow if included else -1)


@dataclass(frozen=True)
class Timed:
    """The records that define a stream time.

    Args:
        rows: ``partition, timestamp, ORDER, …``.
        moves: whether a record advances stream time.
        deadline: the stream time (epoch microseconds, inclusive) from which on a record's outcome
            changes; null = never, None = for no record.
    """

    rows: DataFrame
    moves: Column
    deadline: Column | None = None


@dataclass(frozen=True)
class Chunk:
    """A chunk of consecutive arrivals of a partition; times in epoch microseconds, null = none yet.

    Args:
        low, high: stream time before and after the chunk.
        records: the number of records that advance it; ``oldest``, ``mean``: of their timestamps.
        exact: whether one of the deadlines may lie between ``low`` and ``high``.
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
    """Bounds of stream time for each chunk of a run's records.

    Stream time as of a record is at least ``low`` and at most ``high`` of its chunk. This decides every
    deadline that is not between the two; only chunks with such a deadline are ordered.

    Args:
        frame: ``rows`` as a DataFrame, if Spark needs it.
        none_passed: whether stream time reaches no deadline of any record.
    """

    chunks: Sequence[Chunk]
    frame: DataFrame | None = None
    none_passed: bool = False

    @classmethod
    def of(cls, found: Iterable[Any], before: Mapping[int, int]) -> Bounds:
        """Builds the bounds from the rows of :func:`time_by_chunk`.

        Args:
            before: stream time before the run, by partition.
        """
        chunks: list[Chunk] = []
        now: dict[int, int | None] = {**before}
        for row in sorted(found, key=lambda row: (row[PARTITION], row[_CHUNK])):
            low = now.get(row[PARTITION])
            high = max((t for t in (low, row["time"]) if t is not None), default=None)
            near = row["soonest"] is not None and high is not None and row["soonest"] <= high
            about = (row["records"], row["oldest"], row["mean"])
            chunks.append(Chunk(row[PARTITION], row[_CHUNK], low, high, *about, near))
            now[row[PARTITION]] = high
        return cls(chunks, none_passed=not any(chunk.exact for chunk in chunks))

    @property
    def near(self) -> bool:
        """Whether a chunk needs an exact computation."""
        return any(chunk.exact for chunk in self.chunks)

    def only(self, found: Iterable[Any]) -> Bounds:
        """Restricts the exact computation to the chunks that :func:`undecided_chunks` returns."""
        doubted = {(row[PARTITION], row[_CHUNK]) for row in found}
        return Bounds([replace(c, exact=(c.partition, c.chunk) in doubted) for c in self.chunks])

    @property
    def stream_time(self) -> dict[int, int]:
        """Stream time at the end of the run, by partition."""
        return {c.partition: c.high for c in self.chunks if c.high is not None}

    @property
    def lateness(self) -> tuple[float, float] | None:
        """Mean and maximum lateness of records behind stream time, in seconds, estimated as if stream
        time advanced evenly within a chunk. None = no records."""
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
        """The bounds as rows ``partition, _chunk, _low, _high, _exact``, with their types."""
        rows = [(c.partition, c.chunk, c.low, c.high, c.exact) for c in self.chunks]
        types = f"{PARTITION} INT, {_CHUNK} BIGINT, {_LOW} BIGINT, {_HIGH} BIGINT, {_EXACT} BOOLEAN"
        return rows, types


def time_by_chunk(timed: Timed, chunk: Column) -> DataFrame:
    """Aggregates the input of :class:`Bounds`. Plan: one hash aggregate, shuffled by chunk."""
    at = F.when(timed.moves, F.unix_micros(TIMESTAMP))
    return timed.rows.groupBy(PARTITION, chunk.cast("long").alias(_CHUNK)).agg(
        F.max(at).alias("time"),
        F.min(at).alias("oldest"),
        F.avg(at.cast("double")).alias("mean"),
        F.count(at).alias("records"),
        F.min(F.lit(None).cast("long") if timed.deadline is None else timed.deadline).alias("soonest"),
    )


def undecided_chunks(rows: DataFrame, deadline: Column, chunk: Column, bounds: Bounds) -> DataFrame:
    """Returns the chunks with a deadline between their bounds: ``partition, _chunk``.

    Plan: as for :func:`time_by_chunk`, and a broadcast.

    Args:
        rows: ``partition, _arrival, …``.
        chunk: that of ``bounds``.
    """
    chunked = rows.withColumn(_CHUNK, chunk.cast("long"))
    assert bounds.frame is not None
    met = chunked.join(F.broadcast(bounds.frame.where(_EXACT)), [PARTITION, _CHUNK])
    early = F.coalesce(deadline <= F.col(_LOW), F.lit(False))
    return met.where(~early & (deadline <= F.col(_HIGH))).select(PARTITION, _CHUNK).distinct()


def exact_chunks(bounds: Bounds) -> DataFrame:
    """Returns the chunks that need an exact computation: ``partition, _chunk``."""
    assert bounds.frame is not None
    return bounds.frame.where(_EXACT).select(PARTITION, _CHUNK)


def passed(
    records: DataFrame,
    deadline: Column,
    before: Column,
    moves: Column,
    *,
    chunk: Column | None,
    bounds: Bounds | None,
) -> DataFrame:
    """Adds whether stream time as of each record, including the record itself, has reached its
    deadline.

    Plan: with bounds a broadcast, and a shuffle and sort of the undecided chunks, or nothing if no
    deadline is reached; without bounds that of ``with_stream_time``.

    Args:
        records, before, moves: see ``with_stream_time``.
        deadline: epoch microseconds; null = never.
        chunk: that of ``bounds``; without bounds see ``with_stream_time``.
        bounds: None = compute stream time for every record.

    Returns:
        the records with ``_passed`` (BOOLEAN).
    """
    if bounds is None and chunk is None:
        return records.withColumn(PASSED, passed_in_one_task(records, deadline, before, moves))
    if bounds is not None and bounds.none_passed:
        return records.withColumn(PASSED, F.lit(False))
    seen = with_time_where_needed(records, before, moves, chunk=chunk, bounds=bounds)
    now = F.unix_micros(STREAM_TIME)
    return seen.withColumn(PASSED, F.coalesce(deadline <= now, F.lit(False))).drop(STREAM_TIME)


def with_time_where_needed(
    records: DataFrame,
    before: Column,
    moves: Column,
    *,
    chunk: Column | None,
    bounds: Bounds | None,
) -> DataFrame:
    """Adds stream time as of each record, including the record itself, in chunks whose bounds do not
    decide about all records. In other chunks, adds a lower bound, which leads to the same decisions.

    Plan: with bounds a broadcast, and a shuffle and sort of the undecided chunks; without bounds that
    of ``with_stream_time``.

    Args:
        records, before, moves: see ``with_stream_time``.
        chunk: that of ``bounds``; without bounds see ``with_stream_time``.
        bounds: None = compute stream time for every record.

    Returns:
        the records with ``_stream_time`` (TIMESTAMP; null until a record counts).
    """
    if bounds is None:
        return with_stream_time(records, before, moves, chunk=chunk)
    assert bounds.frame is not None
    assert chunk is not None
    each = F.broadcast(bounds.frame)
    bounded = records.withColumn(_CHUNK, chunk.cast("long")).join(each, [PARTITION, _CHUNK])
    own = F.when(moves, F.unix_micros(TIMESTAMP))
    timed = bounded.withColumn(STREAM_TIME, F.greatest(own, F.col(_LOW)))
    if bounds.near:
        so_far = F.max(own).over(_so_far(records, _CHUNK))
        exact = bounded.where(_EXACT).withColumn(STREAM_TIME, F.greatest(so_far, F.col(_LOW)))
        timed = timed.where(~F.col(_EXACT)).unionByName(exact)
    timed = timed.withColumn(STREAM_TIME, F.timestamp_micros(STREAM_TIME))
    return timed.drop(_CHUNK, _LOW, _HIGH, _EXACT)


def passed_in_one_task(records: DataFrame, deadline: Column, before: Column, moves: Column) -> Column:
    """Returns the column of :func:`passed` for records that one task can sort, as one window
    expression. A plan with fewer steps is analysed faster, which matters most in a run with few
    records.

    Arguments: see :func:`passed`.
    """
    seen = F.max(F.when(moves, F.col(TIMESTAMP))).over(_so_far(records))
    return F.coalesce(deadline <= F.unix_micros(F.greatest(seen, before)), F.lit(False))


def lateness(rows: DataFrame, stream_time: Column, chunk: Column | None) -> DataFrame:
    """Aggregates the advance of stream time and the lateness of rows, see
    ``TimePolicy.advance``.

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
    """Returns mean and maximum lateness over all partitions, in seconds; None = no records."""
    records = sum(row["records"] for row in found)
    if not records:
        return None
    total, most = sum(row["lateness"] for row in found), max(row["most"] for row in found)
    return total / records / 1e6, most / 1e6


# Largest times


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
