"""Advances stream time and watermarks of operators that keep their own stream time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from pyspark.sql import Column, DataFrame, SparkSession

from vt_dagster.columns import PARTITION
from vt_dagster.core.arrival_order import by_partition
from vt_dagster.core.processor import Input, Processor, RunContext
from vt_dagster.core.stream_time import Bounds, mean_and_most
from vt_dagster.runs.arrival import Arrival
from vt_dagster.storage.commit_log import Commit


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
    if not bounds.near:
        return bounds
    return framed(bounds.only(processor.undecided_chunks(inputs, bounds).collect()))


def oldest(processor: Processor[Any], logs: Sequence[DataFrame], before: Commit) -> int | None:
    """Returns the time after which the run needs the tables' versions, epoch microseconds.

    None = the run needs current rows only, or none: in a first run every row is new.
    """
    since = processor.versions_since(logs) if before.inputs else None
    return None if since is None else since.collect()[0][0]
