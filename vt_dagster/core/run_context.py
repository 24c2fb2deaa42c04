"""The arguments of a processor in a run: its inputs, and the context from earlier runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from pyspark.sql import Column, DataFrame

from vt_dagster.core import table_store
from vt_dagster.core.arrival_order import by_partition
from vt_dagster.core.as_of_join import JoinStrategy
from vt_dagster.core.stream_time import Bounds
from vt_dagster.core.system_time_join import SystemTimeHistory


@dataclass(frozen=True)
class Input:
    """The part of one input that a run reads.

    Args:
        rows: the log rows of the run; for a source, its prepared records.
        table: for a table that is looked up, its row of each key at the end of ``rows`` (for a
            versioned table also tombstones); None = ``rows`` contains all of them, or the table is not
            looked up.
        earlier: log rows of earlier runs, as far back as ``rescan_from`` or ``rescan_from_batch``
            requires; None = none.
        broadcastable: whether ``rows`` is small enough to send to every task.
        times: stream time of ``table``, by partition.
    """

    rows: DataFrame
    table: DataFrame | None = None
    earlier: DataFrame | None = None
    broadcastable: bool = False
    times: Mapping[int, int] = field(default_factory=dict[int, int])


@dataclass(frozen=True)
class RunContext:
    """The context of a run besides its inputs: results of earlier runs, and the times at the run's end.

    Args:
        state: the state that the processor stored; None = nothing yet.
        view: the current rows of the result; None = nothing yet.
        stream_time: before the run, of a row's partition of the result.
        stream_time_after: at the end of the run, if the processor has a stream time of its own.
        emitted_up_to: the time up to which held-back records were emitted before the run.
        emitted_up_to_after: the time up to which they are emitted at the end of the run.
        persist_rows: persists the run's records; None if the view has not many more keys than they
            have.
        watermarks, watermarks_after: before and after the run, see ``Processor.watermarks``.
        bounds: of the processor's own stream time, if it is computed by bounds.
        none_late: whether it is known that none of the run's records is late.
        refused: the processor's quarantine, if it has one and reads earlier records; None = none.
        since: the run reads earlier records with a larger timestamp than this, epoch microseconds;
            None = it reads none.
        colliding_versions: for a table that compares records with versions (``tie_break``,
            ``only_columns``), those that end after the oldest record of the run; None = none.
        first_changes: for a run that reads an initial snapshot, the first time of a record in the log
            by key, ``core.versioned_table.FIRST``; None = there is no log yet, or no such snapshot.
        last: for a table that follows its source's order, the largest time in the log of keys with a
            record older than the history retention, ``core.source_order.LAST``; None = there is none.
    """

    state: DataFrame | None
    view: DataFrame | None
    stream_time: Column
    stream_time_after: Column
    emitted_up_to: Column
    emitted_up_to_after: Column
    persist_rows: table_store.PersistRows | None = None
    bounds: Bounds | None = None
    none_late: bool = False
    watermarks: Mapping[str, Column] = field(default_factory=dict[str, Column])
    watermarks_after: Mapping[str, Column] = field(default_factory=dict[str, Column])
    since: int | None = None
    refused: DataFrame | None = None
    colliding_versions: DataFrame | None = None
    first_changes: DataFrame | None = None
    last: DataFrame | None = None

    @classmethod
    def nothing(cls, stream_time_after: Mapping[int, int] = {}) -> RunContext:
        """Returns the context of a first run."""
        none = by_partition({})
        return cls(None, None, none, by_partition(stream_time_after), none, none)


@dataclass(frozen=True)
class Lookup:
    """A table that is looked up as of given times.

    Args:
        rows: its versions; for a plain table its current rows.
        stream_time: of a row's partition.
        strategy: see ``as_of_join``.
        history: for a lookup by system time, see ``system_time_join``.
    """

    rows: DataFrame
    stream_time: Column
    strategy: JoinStrategy = "sorted"
    history: SystemTimeHistory | None = None
