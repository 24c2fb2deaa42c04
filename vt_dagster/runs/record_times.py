"""The times of records in a run: system times from their source, stream time, a table's past states.

A source may provide system times, instead of the time of the run's commit. A log is append-only, so
system time never decreases in it. A record whose time is earlier than that of a row already in the log,
or of a record that arrived before it, gets the time of that row. The stored time is never earlier than
the source's, so no read returns a row before it was known. A system time is never in the future of its
run either. If rows provide their own times, these rules hold per partition.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import Window as W
from pyspark.sql import functions as F
from pyspark.sql.types import IntegerType, LongType, StructField, StructType

from vt_dagster.columns import OUTCOME, PARTITION, RECORDED_AT, TIMESTAMP
from vt_dagster.core import table_store as of_table
from vt_dagster.core.arrival_order import Outcome, arrival_chunk, by_partition, with_columns
from vt_dagster.core.as_of_join import HORIZON, KNOWN_AT, SINCE, UNTIL
from vt_dagster.core.processor import Input, RunContext, TimePolicy
from vt_dagster.core.source_records import SOURCE, SOURCE_RECORDED_AT
from vt_dagster.core.stream_time import Bounds, mean_and_most, running_max
from vt_dagster.errors import counted
from vt_dagster.runs.pin import Arrival, Store
from vt_dagster.storage.commit_log import Commit, Step
from vt_dagster.storage.spark_reader import Head
from vt_dagster.topology.model import VersionedTable

# System times of records


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
    by_origin = None if source is None else source.recorded()
    if by_origin:
        times = _of_origins(by_origin, first, last)
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


def _of_origins(by_origin: Mapping[str, int], now: int, last: int) -> dict[str, int]:
    """Returns the system time per origin, non-decreasing in read order, at most ``_MOST`` distinct."""
    found = dict[str, int]()
    names, length = list(by_origin), -(-len(by_origin) // _MOST)
    for first in range(0, len(names), length):
        together = names[first : first + length]
        now = max(now, min(max(by_origin[name] for name in together), last))
        found.update(dict.fromkeys(together, now))
    return found


def _by_origin(rows: DataFrame, times: Mapping[str, int], end: int, spark: SparkSession) -> DataFrame:
    """Adds the system time of each row's origin. Plan: a broadcast join.

    Args:
        end: system time of rows whose origin has none.
    """
    recorded = spark.createDataFrame([*times.items()], f"{SOURCE} STRING, {RECORDED_AT} BIGINT")
    recorded = recorded.withColumn(RECORDED_AT, F.timestamp_micros(RECORDED_AT))
    timed = rows.join(F.broadcast(recorded), SOURCE, "left")
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
    last, before = F.timestamp_micros("_last"), F.lit(None).cast("timestamp")
    return running_max(timed, {RECORDED_AT: last}, {RECORDED_AT: before}, chunk=arrival_chunk()).drop(
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


# Stream time


def advance_stream_time(
    arrival: Arrival,
    policy: TimePolicy,
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
    if not policy.bounded:
        # First by bounds per chunk: if they show that no record is late, no log has to be sorted.
        chunks = policy.lateness_bounds(inputs)
        found = None
        if chunks is not None:
            found = policy.advance_if_none_late(chunks.collect(), before.stream_time, before.watermarks)
        in_time = found is not None
        if found is None:
            found = policy.advance(inputs, context).collect()
        moved = {r[PARTITION]: r["time"] for r in found if r["time"] is not None}
        times |= {p: max(times.get(p, moment), moment) for p, moment in moved.items()}
        late = mean_and_most(found) if policy.reports_lateness else None
        watermarks = policy.watermarks(found, before.watermarks)
    else:
        bounds = bounds_of(policy, inputs, before.stream_time, spark)
        times |= bounds.stream_time
        late = bounds.lateness if policy.reports_lateness else None
    gauges = {} if late is None else {"lateness_avg": late[0], "lateness_max": late[1]}
    watermarks |= policy.watermarks_of_time(times, before.watermarks)
    emitted_up_to = policy.emitted_up_to(times, before.emitted_up_to)
    more: dict[str, Any] = {
        "bounds": bounds,
        "gauges": gauges,
        "emitted_up_to": emitted_up_to,
        "watermarks": watermarks,
    }
    return replace(arrival, stream_time=times, none_late=in_time, **more)


def watermark_columns(watermarks: Mapping[str, Mapping[int, int]]) -> dict[str, Column]:
    """Returns the operator's watermarks as columns, each by the row's partition."""
    return {name: by_partition(values, "long") for name, values in watermarks.items()}


def bounds_of(
    policy: TimePolicy, inputs: Sequence[Input], before: Mapping[int, int], spark: SparkSession
) -> Bounds:
    """Returns the bounds of stream time per chunk of arrival order."""

    def framed(bounds: Bounds) -> Bounds:
        return replace(bounds, frame=spark.createDataFrame(*bounds.rows))

    bounds = framed(Bounds.of(policy.time_by_chunk(inputs).collect(), before))
    # A second job for the chunks with a deadline between their bounds; only those that it returns are
    # sorted.
    if not bounds.near:
        return bounds
    return framed(bounds.only(policy.undecided_chunks(inputs, bounds).collect()))


# History of a table by system time


@dataclass
class TableSystemTimeHistory:
    """A table's log and its stream time at each commit, up to the one that a run has pinned.

    Args:
        persist_rows: computes rows at once and persists them.
    """

    table: VersionedTable
    store: Store
    head: Head
    persist_rows: Callable[[DataFrame], DataFrame]
    doubtful: int = field(default=0, init=False)
    """How many rows were looked up in the log, not in the view."""
    _since: int = field(default=0, init=False)
    """Smallest timestamp of these rows, epoch microseconds."""

    @property
    def description(self) -> str:
        """The number of rows looked up in the log, in words."""
        return f"{counted(self.doubtful, 'record')} by the log, as to what was known"

    def log(self, doubtful: DataFrame, ends: bool) -> DataFrame | None:
        found = doubtful.agg(
            F.count(F.lit(1)).alias("rows"),
            F.min(F.unix_micros(TIMESTAMP)).alias("first"),
            F.max(F.unix_micros(TIMESTAMP)).alias("last"),
            F.max(F.unix_micros(KNOWN_AT)).alias("known_at"),
        ).collect()[0]
        self.doubtful, self._since = found["rows"], found["first"]
        if not self.doubtful:
            return None
        rows = recorded_if(True, self.store.log({}, self.head))
        known = F.col(RECORDED_AT).isNull() | (F.col(RECORDED_AT) <= _at(found["known_at"]))
        rows = rows.where(known)
        # Later rows are needed too: a version expires only once its key has a later one.
        if ends or self._may_read_before_retention:
            return rows
        return rows.where(F.col(TIMESTAMP) <= _at(found["last"]))

    @property
    def _may_read_before_retention(self) -> bool:
        """Whether a row may be from before the table's history retention."""
        return self._since < self.table.version_rules.horizon(self.head.commit.stream_time)

    def horizons(self) -> DataFrame | None:
        if not self._may_read_before_retention:
            return None
        rows = list[tuple[int, int, int | None, int]]()
        for partition, steps in self._steps().items():
            ends = [since for since, _ in steps[1:]]
            for (since, moment), until in zip(steps, [*ends, None], strict=True):
                rows.append((partition, since, until, moment))
        names = [PARTITION, SINCE, UNTIL, HORIZON]
        kinds = [IntegerType(), LongType(), LongType(), LongType()]
        schema = StructType([StructField(n, k) for n, k in zip(names, kinds, strict=True)])
        of_partitions = self.store.spark.createDataFrame(rows, schema)
        of_partitions = with_columns(of_partitions, {n: F.timestamp_micros(n) for n in names[1:]})
        return of_partitions.withColumn(HORIZON, of_table.horizon_of(self.table, F.col(HORIZON)))

    def _steps(self) -> Mapping[int, list[tuple[int, int]]]:
        """Per partition: (system time, new stream time) of each advance; epoch microseconds."""
        found = dict[int, list[tuple[int, int]]]()
        for commit in self.store.commits():
            if commit.batch > self.head.commit.batch:
                break
            for step in (*commit.steps, commit):
                for partition, moment in step.stream_time.items():
                    steps = found.setdefault(partition, [])
                    if not steps or steps[-1][1] != moment:
                        steps.append((step.recorded_at, moment))
        return found


def recorded_if(wanted: bool, rows: DataFrame) -> DataFrame:
    """Returns rows of a log or view with their system time (null for rows written before it was
    stored), or without it if not wanted."""
    if not wanted:
        return rows.drop(RECORDED_AT)
    if RECORDED_AT in rows.columns:
        return rows
    return rows.withColumn(RECORDED_AT, F.lit(None).cast("timestamp"))


def _at(micros: int) -> Column:
    return F.timestamp_micros(F.lit(micros))
