"""Times of record that a source tells: of what is read its own, not that of the run's commit.

A log never unsays what it said, so a time of record never goes back in it. What was recorded before
something that is in the log already, or comes after it in order of arrival, counts as recorded just
after that: later than it was, never earlier, so that nobody is told to have known what he did not. Nor
is a time in the future of its run.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from vt_dagster.columns import FATE, PARTITION, RECORDED_AT, TIMESTAMP
from vt_dagster.core.arrival import Fate
from vt_dagster.core.records import SOURCE
from vt_dagster.sources.base import Pinned, Recorded
from vt_dagster.storage.positions import Commit, Step

_MOST = 1_000
"""So many times at most are told apart in a run: its commit lists them."""


def told_times(source: Pinned | None, before: Commit, latest: int | None) -> dict[str, int] | None:
    """When what a run reads was recorded, epoch microseconds; None = when it commits.

    Args:
        latest: no time is after it; None = now.
    """
    told = source.recorded() if isinstance(source, Recorded) else None
    if told is None:
        return None
    latest = time.time_ns() // 1000 if latest is None else latest
    now, found = before.recorded_at + 1, dict[str, int]()
    names, length = list(told), -(-len(told) // _MOST)
    for first in range(0, len(names), length):
        together = names[first : first + length]
        now = max(now, min(max(told[name] for name in together), latest))
        found.update(dict.fromkeys(together, now))
    return found


def with_times(rows: DataFrame, times: Mapping[str, int], spark: SparkSession) -> DataFrame:
    """Results of a source with ``recorded_at``. Plan: a broadcast join."""
    told = spark.createDataFrame([*times.items()], f"{SOURCE} STRING, {RECORDED_AT} BIGINT")
    told = told.withColumn(RECORDED_AT, F.timestamp_micros(RECORDED_AT))
    return rows.join(F.broadcast(told), SOURCE, "left")


def steps_of(rows: DataFrame, before: Commit, end: int) -> list[Step]:
    """How far a run's log comes by each of its times, but for that of its commit.

    Plan: one aggregate of held rows.

    Args:
        rows: results with ``recorded_at``.
        end: when the commit is recorded.
    """
    applied = rows.where(F.col(FATE) == Fate.APPLIED)
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
