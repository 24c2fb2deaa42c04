"""The times of records in a run: system times from their source, and stream time.

A source may provide system times, instead of the time of the run's commit. A log is append-only, so
system time never decreases in it. A record with an earlier time than a row already in the log, or than
one before it in arrival order, gets the time of that row: later than the source's time, never earlier,
so that no read returns a row before it was known. A system time is never in the future of its run
either. If rows provide their own times, these rules hold per partition.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import Window as W
from pyspark.sql import functions as F

from vt_dagster.columns import OUTCOME, PARTITION, RECORDED_AT, TIMESTAMP
from vt_dagster.core.arrival_order import Outcome, arrival_chunk, by_partition
from vt_dagster.core.processor import Input, Processor, RunContext
from vt_dagster.core.source_records import SOURCE, SOURCE_RECORDED_AT
from vt_dagster.core.stream_time import Bounds, mean_and_most, running_max
from vt_dagster.runs.pin import Arrival, Store
from vt_dagster.sources.base import Recorded
from vt_dagster.storage.commit_log import Commit, Step

# Record times


_MOST = 1_000
"""Maximum number of distinct system times per run: its commit lists all of them."""


def assign_system_times(
    rows: DataFrame, arrival: Arrival, store: Store, latest: int | None
) -> tuple[DataFrame, int | None]:
    """Returns the rows with per-row system time if the source provides it, and the commit's system time
    (epoch microseconds; None = assign at commit).

    Args:
        latest: upper bound of all system times, epoch microseconds; None = now.
    """
    source, first = arrival.source, arrival.before.recorded_at + 1
    last = time.time_ns() // 1000 if latest is None else latest
    told = source.recorded() if isinstance(source, Recorded) else None
    if told:
        times = _of_origins(told, first, last)
        # An initial snapshot comes last, and its system time is that of the run.
        end = max(first, last) if arrival.start is not None else max(times.values())
        return _by_origin(rows, times, end, store.spark), end
    if source is None or SOURCE_RECORDED_AT not in rows.columns:
        return rows, latest
    rows = store.persist(rows)
    arrival.persisted.append(rows)
    at = F.greatest(F.least(F.unix_micros(SOURCE_RECORDED_AT), F.lit(last)), F.lit(first))
    rows = rows.withColumn(SOURCE_RECORDED_AT, F.when(F.col(OUTCOME) != Outcome.QUARANTINED, at))
    (end,) = rows.agg(F.max(SOURCE_RECORDED_AT)).collect()[0]
    return _by_row(rows), latest if end is None else end


def _of_origins(told: Mapping[str, int], now: int, last: int) -> dict[str, int]:
    """Returns the system time per origin, non-decreasing in read order, at most ``_MOST`` distinct."""
    found = dict[str, int]()
    names, length = list(told), -(-len(told) // _MOST)
    for first in range(0, len(names), length):
        together = names[first : first + length]
        now = max(now, min(max(told[name] for name in together), last))
        found.update(dict.fromkeys(together, now))
    return found


def _by_origin(rows: DataFrame, times: Mapping[str, int], end: int, spark: SparkSession) -> DataFrame:
    """Adds the system time of each row's origin. Plan: a broadcast join.

    Args:
        end: system time of rows whose origin has none.
    """
    told = spark.createDataFrame([*times.items()], f"{SOURCE} STRING, {RECORDED_AT} BIGINT")
    told = told.withColumn(RECORDED_AT, F.timestamp_micros(RECORDED_AT))
    timed = rows.join(F.broadcast(told), SOURCE, "left")
    return timed.withColumn(RECORDED_AT, F.coalesce(RECORDED_AT, F.timestamp_micros(F.lit(end))))


def _by_row(rows: DataFrame) -> DataFrame:
    """Adds each row's own system time. Plan: one task sorts the distinct times; they are joined with
    the persisted rows, which ``running_max`` shuffles and sorts."""
    tile, together = F.ntile(_MOST).over(W.orderBy(SOURCE_RECORDED_AT)), W.partitionBy("_tile")
    times = (
        rows.select(SOURCE_RECORDED_AT)
        .where(F.col(SOURCE_RECORDED_AT).isNotNull())
        .distinct()
        .withColumn("_tile", tile)
    )
    times = times.select(SOURCE_RECORDED_AT, F.max(SOURCE_RECORDED_AT).over(together).alias("_last"))
    timed = rows.join(times, SOURCE_RECORDED_AT, "left")
    last = F.timestamp_micros("_last")
    return running_max(timed, last, RECORDED_AT, chunk=arrival_chunk()).drop(
        SOURCE_RECORDED_AT, "_last"
    )


def steps_of(rows: DataFrame, before: Commit, end: int) -> list[Step]:
    """Returns the log's offsets and stream time at each system time of a run before the commit's.

    Plan: one aggregate of persisted rows.

    Args:
        rows: results with ``recorded_at``.
        end: system time of the commit, epoch microseconds, exclusive.
    """
    applied = rows.where(F.col(OUTCOME) == Outcome.APPLIED)
    of_each = applied.groupBy(F.unix_micros(RECORDED_AT).alias(RECORDED_AT), PARTITION)
    found = of_each.agg(
        F.count(F.lit(1)).alias("rows"), F.max(F.unix_micros(TIMESTAMP)).alias("time")
    ).collect()
    offsets, times, steps = dict(before.next_offset), dict(before.stream_time), dict[int, Step]()
    for row in sorted(found, key=lambda row: row[RECORDED_AT]):
        partition = row[PARTITION]
        offsets[partition] = offsets.get(partition, 0) + row["rows"]
        times[partition] = max(times.get(partition, row["time"]), row["time"])
        at = row[RECORDED_AT]
        steps[at] = Step(recorded_at=at, next_offset={**offsets}, stream_time={**times})
    return [step for at, step in steps.items() if at < end]


# Advance stream time


def advance_stream_time(
    arrival: Arrival,
    processor: Processor[Any],
    inputs: Sequence[Input],
    context: RunContext,
    spark: SparkSession,
) -> Arrival:
    """Returns the arrival with the operator's stream time and watermarks at the end of the run, the
    time up to which buffered records are emitted, and the lateness of the run's records.

    Args:
        inputs: the rows that the run has read.
        context: the operator's state before the run.
    """
    before = arrival.before
    times, bounds = dict(before.stream_time), None
    watermarks: dict[str, dict[int, int]] = {}
    in_time = False
    if not processor.bounded:
        # First by bounds per chunk: if they show that no record is late, no log has to be sorted.
        chunks = processor.lateness_bounds(inputs)
        found = None
        if chunks is not None:
            found = processor.advance_if_none_late(
                chunks.collect(), before.stream_time, before.watermarks
            )
        in_time = found is not None
        if found is None:
            found = processor.stream_time_advance(inputs, context).collect()
        moved = {r[PARTITION]: r["time"] for r in found if r["time"] is not None}
        times |= {p: max(times.get(p, moment), moment) for p, moment in moved.items()}
        late = mean_and_most(found) if processor.reports_lateness else None
        watermarks = processor.watermarks(found, before.watermarks)
    else:
        bounds = bounds_of(processor, inputs, before.stream_time, spark)
        times |= bounds.stream_time
        late = bounds.lateness if processor.reports_lateness else None
    gauges = {} if late is None else {"lateness_avg": late[0], "lateness_max": late[1]}
    emitted_up_to = processor.emitted_up_to(times, before.emitted_up_to)
    told: dict[str, Any] = {
        "bounds": bounds,
        "gauges": gauges,
        "emitted_up_to": emitted_up_to,
        "watermarks": watermarks,
    }
    return replace(arrival, stream_time=times, none_late=in_time, **told)


def watermark_columns(watermarks: Mapping[str, Mapping[int, int]]) -> dict[str, Column]:
    """Returns the operator's watermarks as columns, each by the row's partition."""
    return {name: by_partition(values, "long") for name, values in watermarks.items()}


def bounds_of(
    processor: Processor[Any], inputs: Sequence[Input], before: Mapping[int, int], spark: SparkSession
) -> Bounds:
    """Returns the bounds of the operator's stream time per chunk of arrival order."""

    def framed(bounds: Bounds) -> Bounds:
        return replace(bounds, frame=spark.createDataFrame(*bounds.rows))

    bounds = framed(Bounds.of(processor.time_by_chunk(inputs).collect(), before))
    # A second job for the chunks with a deadline between their bounds; only those that it returns are
    # sorted.
    if not bounds.near:
        return bounds
    return framed(bounds.only(processor.undecided_chunks(inputs, bounds).collect()))


def oldest(processor: Processor[Any], logs: Sequence[DataFrame], before: Commit) -> int | None:
    """Returns the time after which the run needs the tables' versions, epoch microseconds.

    None = the run needs current rows only, or none: in a first run every row is new.
    """
    since = processor.versions_since(logs) if before.inputs else None
    return None if since is None else since.collect()[0][0]
