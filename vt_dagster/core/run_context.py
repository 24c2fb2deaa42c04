"""What a processor is given in a run: its inputs, and what is known besides."""

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
    """What a run takes from one input.

    Args:
        rows: the log rows of the run; of a source, its prepared records.
        table: of a table that is looked into, what it has of each key at the end of ``rows`` (of a
            versioned one also tombstones); None = every row of it is among ``rows``, or it is not
            looked into.
        earlier: log rows of runs before, as far back as ``rescan_from`` or ``rescan_from_batch`` asked
            for;
            None = none.
        broadcastable: whether ``rows`` are so few that each task may have them all.
        times: stream time of ``table``, by partition.
    """

    rows: DataFrame
    table: DataFrame | None = None
    earlier: DataFrame | None = None
    broadcastable: bool = False
    times: Mapping[int, int] = field(default_factory=dict[int, int])


@dataclass(frozen=True)
class RunContext:
    """What is known besides the inputs: from the runs before, and of this run's end.

    Args:
        state: what the processor kept; None = nothing yet.
        view: the current rows of the result; None = nothing yet.
        stream_time: before the run, of a row's partition of the result.
        stream_time_after: at the end of the run, where the processor has a stream time of its own.
        emitted_up_to: of what is held back, the time up to which it had gone out before the run.
        emitted_up_to_after: at the end of the run.
        persist_rows: holds the run's records; None: the view has not many more keys than these.
        watermarks, watermarks_after: before and after the run, see ``Processor.watermarks``.
        bounds: of the processor's own stream time, where it was told by them.
        none_late: whether it was told that none of the run's records is late.
        refused: its quarantine, where the processor keeps one and reaches back; None = nothing.
        since: the records of the run reach back to what has a larger timestamp, epoch microseconds;
            None = to nothing of earlier runs.
        colliding_versions: of a table whose records meet its versions (``tie_break``,
            ``only_columns``), those that
            end after the oldest record of the run; None = none.
        first_changes: of a run that takes a snapshot to start with, by key the first time of a record
            in the
            log, ``core.versioned_table.FIRST``; None = there is no log yet, or no such snapshot.
        last: of a table that follows its source's order, of keys with a record older than the table
            remembers, the largest time in the log, ``core.source_order.LAST``; None = there is none.
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
        """What the first run knows, but for its end."""
        none = by_partition({})
        return cls(None, None, none, by_partition(stream_time_after), none, none)


@dataclass(frozen=True)
class Lookup:
    """A table that is looked into as of times.

    Args:
        rows: its versions, of a plain table its current rows.
        stream_time: of a row's partition.
        strategy: see ``as_of_join``.
        history: of what looks by what was known, see ``system_time_join``.
    """

    rows: DataFrame
    stream_time: Column
    strategy: JoinStrategy = "sorted"
    history: SystemTimeHistory | None = None
