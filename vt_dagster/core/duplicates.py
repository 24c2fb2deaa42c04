"""Duplicates of a stream: the first record of each value of ``unique_by`` enters the log.

A record is a *duplicate* if an earlier record of its partition has the same value, and stream time as
of the record is at most ``within`` ahead of the latest such record. Duplicates count as well: a value
that is sent again and again stays remembered. A record that is further behind stream time is *late*,
unless its value is remembered: an earlier record with the value may no longer be remembered. So a value
whose records have one timestamp is never in the log twice.

All of it is per partition. Offsets of two partitions have no common order: which of their records is
the first would depend on how arrivals are split into runs.

The state is the remembered values: ``partition``, the columns of ``unique_by`` and of the key, and
``_latest``, the time of the latest record with them. It has the key so that an erase of the key removes
its values.
"""

from __future__ import annotations

from pyspark.sql import Column, DataFrame
from pyspark.sql import Window as W
from pyspark.sql import functions as F

from vt_dagster.columns import ARRIVAL, OUTCOME, PARTITION, TIMESTAMP
from vt_dagster.core.arrival_order import Outcome, has_key, micros, union
from vt_dagster.core.stream_time import STREAM_TIME, with_stream_time
from vt_dagster.topology.model import Stream

LATEST = "_latest"
"""The largest timestamp of the records with a value: BIGINT, epoch microseconds."""
_ALONE = "_alone"
"""A distinct number for each record that is compared with no other: with null, one task would get all
of them."""


def mark_duplicates(
    node: Stream,
    records: DataFrame,
    remembered: DataFrame | None,
    *,
    stream_time: Column,
    chunk: Column | None,
) -> DataFrame:
    """Gives each record without an outcome its own: ``applied``, ``duplicate`` or ``late``.

    A record exactly ``within`` behind is remembered, and not late. Records with an outcome
    (quarantined) have no effect. A record with a null in a column of ``unique_by`` advances stream
    time, and is applied.

    Plan: that of ``with_stream_time``; one shuffle and sort by partition and value, of the records and
    the remembered values.

    Args:
        node: a stream with ``unique_by``.
        records: ``partition, _arrival, timestamp, _outcome, …`` of one run.
        remembered: the state before the run; None = nothing yet.
        stream_time: stream time of the record's partition before the run.
        chunk: see ``with_stream_time``.
    """
    valid = F.col(OUTCOME).isNull()
    timed = with_stream_time(records, stream_time, valid, chunk=chunk)
    compared = valid & _has_value(node)
    every = union(
        timed.withColumns(
            {LATEST: F.unix_micros(TIMESTAMP), _ALONE: F.when(~compared, F.col(ARRIVAL))}
        ),
        remembered,
    )
    # Remembered values have no number of arrival: nulls come first.
    before = W.partitionBy(PARTITION, *_columns(node), _ALONE).orderBy(F.col(ARRIVAL).asc_nulls_first())
    latest = F.max(LATEST).over(before.rowsBetween(W.unboundedPreceding, -1))
    since = F.unix_micros(STREAM_TIME) - _within(node)
    outcome = (
        F.when(~valid, F.col(OUTCOME))
        .when(latest >= since, Outcome.DUPLICATE)
        .when(_has_value(node) & (F.unix_micros(TIMESTAMP) < since), Outcome.LATE)
        .otherwise(Outcome.APPLIED)
    )
    judged = every.withColumn(OUTCOME, outcome).where(F.col(ARRIVAL).isNotNull())
    return judged.drop(STREAM_TIME, LATEST, _ALONE)


def remembered_after(
    node: Stream, rows: DataFrame, remembered: DataFrame | None, stream_time: Column
) -> DataFrame:
    """Returns the state after a run.

    Plan: one aggregate by value, of the records and the remembered values.

    Args:
        rows: the records of the run with their outcome.
        remembered: the state before the run; None = nothing yet.
        stream_time: that of a row's partition after the run.
    """
    counted = rows.where(F.col(OUTCOME).isin(Outcome.APPLIED, Outcome.DUPLICATE))
    return _latest_of(node, union(_values(node, counted), remembered), stream_time)


def remembered_of_log(
    node: Stream, log: DataFrame, stored: DataFrame | None, stream_time: Column
) -> DataFrame:
    """Returns the state computed from the records of a log, for a new ``unique_by`` or a longer
    ``within``: no run has stored that state. Duplicates are not in the log, so they do not count.

    Args:
        stored: the state for a shorter ``within``, in which duplicates do count; None = there is none.
        stream_time: that of a row's partition at the end of the log.
    """
    return _latest_of(node, union(_values(node, log), stored), stream_time)


def _values(node: Stream, rows: DataFrame) -> DataFrame:
    latest = F.unix_micros(TIMESTAMP).alias(LATEST)
    return rows.where(_has_value(node)).select(PARTITION, *_kept(node), latest)


def _latest_of(node: Stream, values: DataFrame, stream_time: Column) -> DataFrame:
    latest = values.groupBy(PARTITION, *_kept(node)).agg(F.max(LATEST).alias(LATEST))
    since = F.unix_micros(stream_time) - _within(node)
    return latest.where(F.col(LATEST) >= since)


def _has_value(node: Stream) -> Column:
    return has_key([f"`{c}`" for c in node.unique_by or ()])


def _columns(node: Stream) -> list[Column]:
    return [F.col(f"`{c}`") for c in node.unique_by or ()]


def _kept(node: Stream) -> list[Column]:
    return [F.col(f"`{c}`") for c in dict.fromkeys((*(node.unique_by or ()), *node.key))]


def _within(node: Stream) -> Column:
    assert node.within is not None
    return micros(node.within)
