"""The grace period of a stream-table join: records wait until their time has passed (KIP-923).

A record waits until stream time >= its timestamp + grace period, so that table records which arrive
a little later still find it. Stream time here is the buffer's own: the largest timestamp of a record
with a key and a value. It is moved by the stream alone, never by the table.

Nothing is stored for the buffer. A run releases every record up to a time: ``stream time - grace
period`` at its end, and never less than before. What waits after any sequence of runs is exactly the
records of the stream's log with a larger timestamp, since those that were late on arrival or have been
released lie at or before it. So the buffer *is* a range of the log, read again (and pruned by time) by
the next run; and a grace period may be changed between runs: nothing is released twice or forgotten.
"""

from __future__ import annotations

from collections.abc import Sequence

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from vt_dagster.columns import IS_TOMBSTONE, OUTCOME, TIMESTAMP
from vt_dagster.core.arrival_order import Outcome, has_key, union
from vt_dagster.core.stream_time import PASSED, Bounds, late_from, passed
from vt_dagster.topology.durations import Duration
from vt_dagster.topology.operators import JoinKind


def moves_stream_time(key: Sequence[str]) -> Column:
    """Whether a stream record enters a join: it has a value and a key.

    Source: FORMAT 4.5.1; kip923-probe-dropped-does-not-move-time.
    """
    return ~F.col(IS_TOMBSTONE) & has_key(key)


def waiting(log: DataFrame, *, key: Sequence[str], emitted_up_to: Column) -> DataFrame:
    """The records that wait, out of those that a join has consumed.

    Args:
        log: the consumed part of the stream's log.
        emitted_up_to: the time up to which records had gone out after that part, of their partition.

    Source: FORMAT 4.5.1, 4.5.6; kip923-probe-left-in-buffer.
    """
    return log.where(moves_stream_time(key) & (F.col(TIMESTAMP) > emitted_up_to))


def hold_back(
    arrived: DataFrame,
    waiting: DataFrame | None,
    *,
    key: Sequence[str],
    kind: JoinKind,
    grace: Duration | None,
    before: Column,
    emitted_up_to: Column,
    chunk: Column | None = None,
    bounds: Bounds | None = None,
) -> DataFrame:
    """Decides for each record whether it is joined in this run.

    Plan: none without a grace period; else ``passed`` over what arrived, which tells late records from
    those that go out.

    Args:
        arrived: the stream's log rows of this run, with ``_arrival``.
        waiting: those that waited before it; None = none.
        grace: None = nothing waits any longer.
        before: the buffer's stream time before the run, per partition.
        emitted_up_to: the time up to which records go out at the end of the run, per partition.
        chunk, bounds: see ``passed``.

    Returns:
        all of them with ``_outcome``: ``applied`` (timestamp <= released), ``late`` (timestamp < stream
        time - grace on arrival: joined at once), ``waiting``, or ``dropped`` (no value; no key in an
        inner join). A left join emits a record without a key at once.

    Source: KIP-923; kip923-dequeue-boundary, kip923-late-is-immediate, kip923-probe-left-null-key.
    """
    keyless = Outcome.APPLIED if kind == "left" else Outcome.DROPPED
    outcome = F.when(F.col(IS_TOMBSTONE), Outcome.DROPPED).when(~has_key(key), keyless)
    seen = arrived
    if grace is None:
        outcome = outcome.otherwise(Outcome.APPLIED)
    else:
        counts, late = moves_stream_time(key), late_from(grace)
        seen = passed(arrived, late, before, counts, chunk=chunk, bounds=bounds)
        outcome = outcome.when(F.col(PASSED), Outcome.LATE).when(
            F.col(TIMESTAMP) <= emitted_up_to, Outcome.APPLIED
        )
        outcome = outcome.otherwise(Outcome.WAITING)
    return union(seen, waiting).withColumn(OUTCOME, outcome).drop(PASSED)
