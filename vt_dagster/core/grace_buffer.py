"""The grace period of a stream-table join: records wait until stream time has passed them (KIP-923).

A record waits until stream time >= its timestamp + grace period, so that it still matches table records
that arrive slightly later. This stream time is the buffer's own: the largest timestamp of a record with
a key and a value. Only the stream advances it, never the table.

The buffer needs no storage of its own. A run emits all records up to a time: ``stream time - grace
period`` at its end, and never less than in earlier runs. The waiting records are exactly those of the
stream's log with a larger timestamp, because emitted records and those late on arrival lie at or before
that time. So the buffer is a range of the log, which the next run reads again (pruned by time), and
the grace period may change between runs: no record is emitted twice or lost.
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
    """Returns whether a stream record takes part in a join: it has a value and a key.

    Source: FORMAT 4.5.1; kip923-probe-dropped-does-not-move-time.
    """
    return ~F.col(IS_TOMBSTONE) & has_key(key)


def waiting(log: DataFrame, *, key: Sequence[str], emitted_up_to: Column) -> DataFrame:
    """Returns the waiting records among those that a join has consumed.

    Args:
        log: the consumed part of the stream's log.
        emitted_up_to: the time up to which records of their partition were emitted after that part.

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

    Plan: none without a grace period; otherwise ``passed`` over the records that arrived, which
    separates late records from those to emit.

    Args:
        arrived: the stream's log rows of this run, with ``_arrival``.
        waiting: the records that waited before the run; None = none.
        grace: None = no record waits.
        before: the buffer's stream time before the run, per partition.
        emitted_up_to: the time up to which records are emitted at the end of the run, per partition.
        chunk, bounds: see ``passed``.

    Returns:
        all records with ``_outcome``: ``applied`` (timestamp <= emitted_up_to), ``late`` (timestamp <
        stream time - grace on arrival: joined at once), ``waiting``, or ``dropped`` (no value; in an
        inner join also no key). A left join emits a record without a key at once.

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
