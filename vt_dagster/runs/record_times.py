"""Times of record that a source tells: of what is read its own, not that of the run's commit.

A log never unsays what it said, so a time of record never goes back in it. What was recorded before
something that is in the log already, or comes after it in order of arrival, counts as recorded just
after that: later than it was, never earlier, so that nobody is told to have known what he did not. Nor
is a time in the future of its run. Where rows tell it one by one, that is so of each partition.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import Window as W
from pyspark.sql import functions as F

from vt_dagster.columns import OUTCOME, PARTITION, RECORDED_AT, TIMESTAMP
from vt_dagster.core.arrival_order import Outcome, arrival_chunk
from vt_dagster.core.source_records import SOURCE, SOURCE_RECORDED_AT
from vt_dagster.core.stream_time import running_max
from vt_dagster.runs.arrival import Arrival
from vt_dagster.runs.store_protocol import Store
from vt_dagster.sources.base import Recorded
from vt_dagster.storage.commit_log import Commit, Step

_MOST = 1_000
"""So many times at most are told apart in a run: its commit lists them."""


def assign_system_times(
    rows: DataFrame, arrival: Arrival, store: Store, latest: int | None
) -> tuple[DataFrame, int | None]:
    """Results, with ``recorded_at`` where their source tells it; and when their commit is recorded,
    epoch microseconds, None = as it is made.

    Args:
        latest: no time is after it; None = now.
    """
    source, first = arrival.source, arrival.before.recorded_at + 1
    last = time.time_ns() // 1000 if latest is None else latest
    told = source.recorded() if isinstance(source, Recorded) else None
    if told:
        times = _of_origins(told, first, last)
        # A snapshot to start with comes last, and is known since the run.
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
    """The times that count, of what is read in this order."""
    found = dict[str, int]()
    names, length = list(told), -(-len(told) // _MOST)
    for first in range(0, len(names), length):
        together = names[first : first + length]
        now = max(now, min(max(told[name] for name in together), last))
        found.update(dict.fromkeys(together, now))
    return found


def _by_origin(rows: DataFrame, times: Mapping[str, int], end: int, spark: SparkSession) -> DataFrame:
    """Plan: a broadcast join.

    Args:
        end: of what none is told of.
    """
    told = spark.createDataFrame([*times.items()], f"{SOURCE} STRING, {RECORDED_AT} BIGINT")
    told = told.withColumn(RECORDED_AT, F.timestamp_micros(RECORDED_AT))
    timed = rows.join(F.broadcast(told), SOURCE, "left")
    return timed.withColumn(RECORDED_AT, F.coalesce(RECORDED_AT, F.timestamp_micros(F.lit(end))))


def _by_row(rows: DataFrame) -> DataFrame:
    """Plan: the distinct times are sorted by one task and joined with held rows, which are then
    shuffled and sorted as ``running_max`` does."""
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
    """How far a run's log comes by each of its times, but for that of its commit.

    Plan: one aggregate of held rows.

    Args:
        rows: results with ``recorded_at``.
        end: when the commit is recorded.
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
