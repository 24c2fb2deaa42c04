"""Processors, their arguments in a run, and results with ``emit="per_run"``.

A *processor* (Kafka Streams' word) implements one operator for a run. It defines what the operator
reads from each input and in which order, the results, the state for the next run, the counts and the
invariants. It builds lazy DataFrames; a ``Run`` reads, persists and writes them. Each operator's module
contains its processor; ``processor_registry.py`` lists them.

``emit="per_run"`` emits the last update of each key in a run, like Kafka Streams' record cache. No
scenario covers it: they are recorded without a cache. The result is, bit for bit, the last of all
updates. Where a sum does not depend on the order of its terms, the other updates are not computed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Generic, TypeVar

from pyspark.sql import Column, DataFrame
from pyspark.sql import Window as W
from pyspark.sql import functions as F
from pyspark.sql.types import (
    BinaryType,
    BooleanType,
    DataType,
    DateType,
    DecimalType,
    IntegralType,
    StringType,
    TimestampNTZType,
    TimestampType,
)

from vt_dagster.columns import (
    ARRIVAL,
    HOME,
    INPUT,
    IS_LATEST,
    OFFSET,
    OLD,
    ORDER,
    OUTCOME,
    PARTITION,
    SEQUENCE,
    TIMESTAMP,
    TURN,
)
from vt_dagster.core import table_store
from vt_dagster.core.arrival_order import (
    FINE,
    InPlace,
    Outcome,
    arrival_chunk,
    by_partition,
    hour_of_arrival,
    number,
    number_in_place,
    with_columns,
)
from vt_dagster.core.as_of_join import JoinStrategy, SystemTimeHistory
from vt_dagster.core.log_columns import log_columns
from vt_dagster.core.stream_time import (
    STREAM_TIME,
    Bounds,
    Timed,
    lateness,
    time_by_chunk,
    undecided_chunks,
    with_stream_time,
)
from vt_dagster.topology.model import Stream, Table

# Run context


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
        history: for a lookup by system time, see ``as_of_join``.
    """

    rows: DataFrame
    stream_time: Column
    strategy: JoinStrategy = "sorted"
    history: SystemTimeHistory | None = None


# Emit per run


_EXACT = (
    BinaryType,
    BooleanType,
    DateType,
    DecimalType,
    IntegralType,
    TimestampNTZType,
    TimestampType,
)
_ALONE = ("_alone_home", "_alone_sequence")
_HOMES = 1 << 16


def last_of_run(rows: DataFrame, key: Sequence[str]) -> DataFrame:
    """Suppresses all but the last update of each key.

    Plan: one shuffle and sort by key, which an aggregate has made already.
    """
    earlier = (F.col(OUTCOME) == Outcome.APPLIED) & ~is_last(key)
    outcome = F.when(earlier, Outcome.NO_RESULT).otherwise(F.col(OUTCOME))
    return rows.withColumn(OUTCOME, outcome)


def is_last(key: Sequence[str]) -> Column:
    """Returns whether a row is the last applied update of its group or key in this run."""
    in_order = W.partitionBy(*key).orderBy(*ORDER, TURN)
    so_far = in_order.rowsBetween(W.unboundedPreceding, W.currentRow)
    whole = in_order.rowsBetween(W.unboundedPreceding, W.unboundedFollowing)
    applied = F.col(OUTCOME) == Outcome.APPLIED
    updates = F.count(F.when(applied, 1))
    return applied & (updates.over(so_far) == updates.over(whole))


def is_exact(types: Sequence[DataType]) -> bool:
    """Returns whether sums, minima and maxima of these types are independent of the order of rows.

    Floating-point sums depend on it: they are made in order of the records, and the minimum of 0.0 and
    -0.0 is the one that comes first. Strings with a collation depend on it too.
    """
    return all(isinstance(t, _EXACT) or t == StringType() for t in types)


def folded(
    rows: DataFrame, by: Sequence[str], counts: Column, merged: Mapping[str, Column]
) -> DataFrame:
    """Aggregates the rows that count to one row per group; returns other rows unchanged.

    A group takes the position of its last update. If several inputs are merged, stream time and then
    the offset decide which update is last.

    Plan: one hash aggregate, before and after one shuffle by group.

    Args:
        rows: ``by, ORDER, _turn`` (0 or 1)``, …``, of a single input.
        counts: whether a row counts.
        merged: the aggregates of a group, by name.

    Returns:
        ``by, merged, ORDER, _turn``.
    """
    alone = [F.when(~counts, F.col(c)).alias(a) for c, a in zip((HOME, SEQUENCE), _ALONE, strict=True)]
    home, sequence = _ALONE
    made = rows.groupBy(*by, *alone).agg(
        *[column.alias(name) for name, column in merged.items()],
        F.max(ARRIVAL).alias(ARRIVAL),
        F.max((F.col(SEQUENCE) * 2 + F.col(TURN)) * _HOMES + F.col(HOME)).alias(SEQUENCE),
    )
    place = {
        INPUT: F.lit(0),
        HOME: F.coalesce(home, F.lit(0)),
        SEQUENCE: F.coalesce(sequence, SEQUENCE),
        TURN: F.lit(0),
    }
    return with_columns(made, place).drop(*_ALONE)


# Processor


Counts = Mapping[str, int]
Times = Mapping[int, int]
"""By partition: epoch microseconds."""
O = TypeVar("O", covariant=True)  # noqa: E741


class Processor(ABC, Generic[O]):
    """Implements one operator for a run.

    Args:
        node: the result.
        single_task: whether one task can order the run's records of a partition; then nothing is split
            into chunks, and plans are shorter.
    """

    reads_tables = False
    """Whether it reads its inputs' tables, not only their changes."""
    quarantined_outcomes: tuple[str, ...] = ()
    """The outcomes whose results go to the quarantine."""
    merges = False
    """Whether a partition of the result combines records of several logs or partitions."""
    has_stream_time = False
    """Whether it has a stream time of its own, which decides what closes or is emitted."""
    reports_lateness = False
    """Whether it reports the lateness of its records against that stream time."""
    drops_late = True
    """Whether late records are dropped; otherwise they are joined at once."""
    monotonic = False
    """Whether the timestamps of a key's results never decrease."""
    persists_rows = False
    """Whether it reads its input several times, so that the run persists the input."""
    has_grace_buffer = False
    """Whether records that it judges may wait for a grace period."""
    emits_once = False
    """Whether each key has at most one result."""
    shown_counts: tuple[str, ...] = ("in", "out", "late", "dropped")
    """The counts that each run shows."""

    def __init__(self, node: Stream, single_task: bool = False) -> None:
        self.node = node
        self.single_task = single_task

    @property
    def operator(self) -> O:
        """The operator's declaration."""
        operator: Any = self.node.operator
        return operator

    # -- input -----------------------------------------------------------------------------------

    @property
    def consumed(self) -> tuple[Stream, ...]:
        """The inputs whose logs it reads, by position; one input may appear twice."""
        return self.node.inputs

    @property
    def looked_up(self) -> Table | None:
        """The table that it looks up as of its records' times; None = none."""
        return None

    @property
    def uses_system_time(self) -> bool:
        """Whether it uses system time: its inputs' rows then have ``recorded_at``."""
        return False

    @property
    def lookup_margin(self) -> timedelta:
        """How long before a record's time it looks up the table."""
        return timedelta(0)

    def rescan_from(
        self, place: int, stream_time: Times, emitted_up_to: Times, watermarks: Mapping[str, Times]
    ) -> int | None:
        """Returns from where it reads an input's log again: rows with a larger timestamp than this
        (epoch microseconds); None = not at all.

        Args:
            place: the position of the input.
            stream_time: by partition, before the run.
            emitted_up_to: by partition, the time up to which records were emitted before the run.
            watermarks: by name and partition, before the run, see :meth:`watermarks`.
        """
        return None

    def rescan_from_batch(self, place: int, watermarks: Mapping[str, Times]) -> int | None:
        """Returns from where it reads an input's log again, given the run's :meth:`watermarks`.

        The mapping is empty until these are computed.
        """
        return None

    def reads_own_table(self, watermarks: Mapping[str, Times]) -> bool:
        """Returns whether a run reads the asset's own table, or as much of its inputs' logs, given the
        run's :meth:`watermarks`."""
        return True

    def versions_since(self, logs: Sequence[DataFrame]) -> DataFrame | None:
        """Returns the time from which on a run needs its tables' history, given the run's log rows: it
        reads versions that end after that time. One row with epoch microseconds; None = no history."""
        return None

    def in_order(self, inputs: Sequence[Input]) -> list[DataFrame]:
        """Returns the inputs' rows in the order in which a Kafka Streams task processes them.

        A task takes the record with the smallest timestamp among the heads of its inputs (if equal, the
        left one). This is the order of each input's own stream time in this run. Rows of one partition
        of one log keep the order of their offsets. If one log is several inputs, each of its records
        goes to all of them, from left to right.
        """
        nothing = F.lit(None).cast("timestamp")
        names = [node.name for node in self.consumed]
        ordered: list[DataFrame] = []
        for i, one in enumerate(inputs):
            rows = one.rows.withColumn(ARRIVAL, F.col(OFFSET))
            if self.merges:
                timed = with_stream_time(
                    rows, nothing, chunk=None if self.single_task else arrival_chunk()
                )
                rows = timed.withColumn(ARRIVAL, F.unix_micros(STREAM_TIME)).drop(STREAM_TIME)
            alone = names.count(names[i]) == 1
            place = F.col(OFFSET) if alone else F.col(OFFSET) * len(names) + i
            first = F.lit(names.index(names[i]))
            ordered.append(rows.withColumns({INPUT: first, HOME: F.col(PARTITION), SEQUENCE: place}))
        return ordered

    @property
    def chunk(self) -> Column | None:
        """Ascends with the order of the records; splits a long partition into several tasks."""
        place = hour_of_arrival() if self.merges else arrival_chunk()
        return None if self.single_task else place

    # -- its own stream time ---------------------------------------------------------------------

    def stream_time_rows(self, inputs: Sequence[Input]) -> Timed:
        """Returns the records that define its own stream time, in the result's partitions."""
        raise AssertionError("this processor has no stream time")

    @property
    def fine_chunk(self) -> Column:
        """Ascends with the order of the records: the chunks for which stream time has bounds."""
        return hour_of_arrival() if self.merges else F.floor(F.col(ARRIVAL) / F.lit(FINE))

    @property
    def bounded(self) -> bool:
        """Whether its stream time is computed by bounds: see ``stream_time.Bounds``."""
        return not self.single_task

    def stream_time_advance(self, inputs: Sequence[Input], context: RunContext) -> DataFrame:
        """Returns the advance of its own stream time in a run, if it is not computed by bounds.

        Returns:
            ``partition`` (of the result), ``time`` (epoch microseconds); if lateness is reported,
            ``records, lateness`` (the sum) and ``most``, in microseconds; and the input of
            ``watermarks``.
        """
        timed = self.stream_time_rows(inputs)
        rows = timed.rows.where(timed.moves)
        if self.reports_lateness:
            return lateness(rows, context.stream_time, self.chunk)
        return rows.groupBy(PARTITION).agg(F.max(F.unix_micros(TIMESTAMP)).alias("time"))

    def lateness_bounds(self, inputs: Sequence[Input]) -> DataFrame | None:
        """Returns bounds that may prove, without ordering, that none of the run's records is late; None
        = none."""
        return None

    def advance_if_none_late(
        self, found: Sequence[Any], before: Times, watermarks: Mapping[str, Times]
    ) -> list[dict[str, Any]] | None:
        """Returns the rows of ``stream_time_advance`` if no record is late; None if one may be.

        Args:
            found: the rows of ``lateness_bounds``.
            before: stream time before the run, by partition.
            watermarks: those before the run.
        """
        return None

    def watermarks(
        self, found: Sequence[Any], before: Mapping[str, Times]
    ) -> dict[str, dict[int, int]]:
        """Returns other times that it keeps from run to run, by name and partition: epoch microseconds.

        Args:
            found: the rows of ``stream_time_advance``.
            before: the watermarks before the run.
        """
        return {}

    def time_by_chunk(self, inputs: Sequence[Input]) -> DataFrame:
        """Stream-time bounds per chunk; used when ``bounded`` is true. See
        ``stream_time.time_by_chunk``."""
        return time_by_chunk(self.stream_time_rows(inputs), self.fine_chunk)

    def undecided_chunks(self, inputs: Sequence[Input], bounds: Bounds) -> DataFrame:
        """Returns the chunks whose bounds do not decide: see ``stream_time.undecided_chunks``."""
        timed = self.stream_time_rows(inputs)
        assert timed.deadline is not None
        return undecided_chunks(timed.rows, timed.deadline, self.fine_chunk, bounds)

    # -- processing ------------------------------------------------------------------------------

    def emitted_up_to(self, stream_time: Times, emitted_up_to: Times) -> dict[int, int]:
        """Returns the time up to which records are emitted after a run that ends at a stream time."""
        return {}

    def waiting(
        self, logs: Sequence[DataFrame], emitted_up_to: Times, state: DataFrame | None
    ) -> DataFrame:
        """Returns the log rows that it has consumed and holds back.

        Args:
            logs: of each input that it consumes; ``state``: its stored state.
            emitted_up_to: the time up to which records have been emitted, by partition.
        """
        return logs[0].limit(0)

    @abstractmethod
    def process(self, rows: list[DataFrame], inputs: Sequence[Input], context: RunContext) -> DataFrame:
        """Applies the operator.

        Args:
            rows: the inputs' rows ``in_order``.

        Returns:
            rows ``key columns, value columns, timestamp, partition, is_tombstone, _outcome, ORDER,
            _turn``; for a result without a store of its own also ``is_latest, old``; and the columns
            that ``state_after`` needs.
        """

    def results(self, inputs: Sequence[Input], context: RunContext) -> DataFrame:
        """Returns the results of a run with all columns that are counted, and those that
        ``state_after`` needs.

        Returns:
            the rows of ``process``; a table's rows have passed its own store, which adds ``is_latest``
            and ``old``.
        """
        rows = self.process(self.in_order(inputs), inputs, context)
        node, operator = self.node, self.node.operator
        if not isinstance(node, Table) or operator is None or not operator.stored:
            return rows
        if operator.emit == "per_run":
            rows = last_of_run(rows, node.key)
        with_result = rows.where(F.col(OUTCOME) != Outcome.NO_RESULT)
        pending = with_result.drop(IS_LATEST, OLD).withColumn(
            OUTCOME, F.when(F.col(OUTCOME) != Outcome.APPLIED, F.col(OUTCOME))
        )
        return table_store.put(
            node,
            pending,
            context.view,
            stream_time=context.stream_time,
            order=[*ORDER, TURN],
            chunk=self.result_chunk(self.single_task),
            persist_rows=context.persist_rows,
        )

    def judge(self, inputs: Sequence[Input], context: RunContext) -> DataFrame | None:
        """Returns records with their outcome, before the lookup; None = no lookup."""
        return None

    def look_up(self, judged: DataFrame, lookup: Lookup, context: RunContext) -> DataFrame:
        """Returns the results of judged records, joined with the table as of their times."""
        raise AssertionError("this processor looks up no table")

    def state_after(self, rows: DataFrame, context: RunContext) -> DataFrame | None:
        """Returns the state for its next run; None = no state.

        Args:
            rows: its results. They are read again: persist them.
        """
        return None

    def state_after_erase(self, state: DataFrame, erased: DataFrame) -> DataFrame:
        """Returns its state after these rows of its log are erased."""
        return state

    # -- output ----------------------------------------------------------------------------------

    @property
    def result_order(self) -> list[Column]:
        """The order in which results enter the log; total within a partition."""
        return [F.col(c) for c in (*ORDER, TURN)]

    def result_chunk(self, single_task: bool) -> Column | None:
        """Returns a column that ascends with ``result_order``."""
        place = hour_of_arrival() if self.merges else arrival_chunk()
        return None if single_task else place

    @property
    def keeps_order(self) -> bool:
        """Whether its results keep the order of its only log, at most one result per record."""
        return False

    def produce(
        self, rows: DataFrame, first: Column, single_task: bool, in_place: InPlace | None = None
    ) -> DataFrame:
        """Returns the log rows of a run: the results, numbered from ``first``.

        Args:
            single_task: whether one task can number them; ``in_place``: set if they keep their log's
                order.
        """
        results = rows.where(F.col(OUTCOME) == Outcome.APPLIED)
        if in_place is not None and (in_place.complete or not single_task):
            numbered = number_in_place(results, first, in_place)
        else:
            numbered = number(results, first, self.result_order, self.result_chunk(single_task))
        return numbered.select(*log_columns(self.node))

    # -- counts and invariants -------------------------------------------------------------------

    def tallies(self, columns: Sequence[str]) -> dict[str, Column]:
        """Returns aggregates over its results that are counted besides their outcomes, by name."""
        return {}

    def check(self, found: Mapping[int, Counts]) -> None:
        """Refuses results that must stop the run.

        Args:
            found: by partition, the number of results by outcome, and ``tallies``.

        Raises:
            RefusedRecordsError: there are such results.
        """

    def counts(self, taken: int, found: Counts, judged: Counts) -> dict[str, int]:
        """Returns the counts of a run.

        Args:
            taken: the number of log rows that it read.
            found: the number of its results by outcome, and ``tallies``; ``judged``: the number of
                judged records by outcome.
        """
        refused = {outcome: found[outcome] for outcome in (Outcome.LATE, Outcome.DROPPED)}
        return {"in": taken, "out": found[Outcome.APPLIED], **refused}

    def fullness(self, state: DataFrame | None) -> DataFrame | None:
        """Returns the size of its buffer: ``partition, records, bytes``; None = it has no buffer."""
        return None

    def gauges(
        self, sizes: Mapping[int, tuple[int, int]], earlier: Mapping[str, float], runs: int
    ) -> dict[str, float]:
        """Returns the gauges of its buffer, which cannot be summed over runs.

        Args:
            sizes: records and bytes by partition, of ``fullness``.
            earlier: the gauges of the last run; ``runs``: the number of earlier runs.

        Raises:
            BufferFullError: the buffer exceeds a limit that stops the run.
        """
        return {}

    def accounts(self, totals: Counts, taken: int, rows: int) -> list[tuple[str, int, int]]:
        """Returns the invariants of its counts: (name, expected, actual).

        Args:
            totals: counts over all runs; ``taken``: the number of log rows that they read.
            rows: the number of rows in the result's log.
        """
        return [
            ("records in = positions of the inputs", taken, totals.get("in", 0)),
            ("records out = rows in the log", totals.get("out", 0), rows),
        ]
