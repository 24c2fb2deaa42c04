"""The grace period of a stream-table join: records wait until their time has passed (KIP-923).

A record waits until stream time >= its timestamp + grace period, so that table records which arrive
a little later still find it. Stream time here is the buffer's own: the largest timestamp of a record
with a key and a value. It is moved by the stream alone, never by the table.

Nothing is stored for the buffer. What waits after any sequence of runs is exactly the records of the
stream's log with ``timestamp > stream time - grace period``: those that were late on arrival or have
been released lie at or before that bound. So the buffer *is* a range of the log, read again (and
pruned by time) by the next run.
"""

from __future__ import annotations

from collections.abc import Sequence

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from vt_dagster.columns import FATE, IS_TOMBSTONE, TIMESTAMP
from vt_dagster.core.arrival import STREAM_TIME, Fate, duration, has_key, with_stream_time
from vt_dagster.model import Duration, JoinKind


def moves_stream_time(key: Sequence[str]) -> Column:
    """Whether a stream record enters a join: it has a value and a key."""
    return ~F.col(IS_TOMBSTONE) & has_key(key)


def waiting(log: DataFrame, *, key: Sequence[str], stream_time: Column, grace: Duration) -> DataFrame:
    """The records that wait, out of those that a join has consumed.

    Args:
        log: the consumed part of the stream's log.
        stream_time: the buffer's own, after that part.
    """
    due = stream_time - duration(grace)
    return log.where(moves_stream_time(key) & (F.col(TIMESTAMP) > due))


def hold(
    arrived: DataFrame,
    waiting: DataFrame | None,
    *,
    key: Sequence[str],
    kind: JoinKind,
    grace: Duration | None,
    before: Column,
    after: Column,
) -> DataFrame:
    """Decides for each record whether it is joined in this run.

    Plan: none without a grace period; else ``with_stream_time`` over what arrived, which tells late
    records from those that are due.

    Args:
        arrived: the stream's log rows of this run, with ``_arrival``.
        waiting: those that waited before it; None = none.
        before, after: the buffer's stream time before and after the run, per partition.

    Returns:
        all of them with ``_fate``: ``applied`` (timestamp <= stream time - grace at the end of the
        run), ``late`` (timestamp < stream time - grace on arrival: joined at once), ``waiting``,
        or ``dropped`` (no value; no key in an inner join). A left join emits a record without a key
        at once.

    Source: KIP-923; kip923-dequeue-boundary, kip923-late-is-immediate, kip923-probe-left-null-key.
    """
    keyless = Fate.APPLIED if kind == "left" else Fate.DROPPED
    fate = F.when(F.col(IS_TOMBSTONE), Fate.DROPPED).when(~has_key(key), keyless)
    if grace is None:
        return arrived.withColumn(FATE, fate.otherwise(Fate.APPLIED))
    seen = with_stream_time(arrived, before, moves_stream_time(key))
    late = F.col(TIMESTAMP) < F.col(STREAM_TIME) - duration(grace)
    due = F.col(TIMESTAMP) <= after - duration(grace)
    everything = seen if waiting is None else seen.unionByName(waiting, allowMissingColumns=True)
    return everything.withColumn(
        FATE, fate.when(late, Fate.LATE).when(due, Fate.APPLIED).otherwise(Fate.WAITING)
    ).drop(STREAM_TIME)
