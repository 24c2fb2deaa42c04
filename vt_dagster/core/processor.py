"""Processors, their arguments in a run, and results with ``emit="per_run"``.

A *processor* (Kafka Streams' word) implements one operator for a run. It makes the results and the
state for the next run, as lazy DataFrames. Everything else that a ``Run`` needs to know is in its
``RunPlan``: what to read, by which stream time, in which order results enter the log, and what is
counted. A ``Run`` carries the plan out. Each operator's module contains its processor;
``processor_registry.py`` lists them.

``emit="per_run"`` emits the last update of each key in a run, like Kafka Streams' record cache. No
scenario covers it: they are recorded without a cache. The result is, bit for bit, the last of all
updates. Where a sum does not depend on the order of its terms, the other updates are not computed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
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
    EMITTED_AT,
    INPUT,
    INPUT_OFFSET,
    INPUT_PARTITION,
    IS_LATEST,
    OFFSET,
    OLD,
    ORDER,
    OUTCOME,
    PARTITION,
    TIMESTAMP,
    TURN,
)
from vt_dagster.core import table_store
from vt_dagster.core.arrival_order import (
    FINE,
    LONGEST,
    Outcome,
    arrival_chunk,
    by_partition,
    hour_of_arrival,
    with_columns,
)
from vt_dagster.core.as_of_join import JoinStrategy, SystemTimeHistory
from vt_dagster.core.stream_time import (
    STREAM_TIME,
    Bounds,
    Timed,
    lateness,
    time_by_chunk,
    undecided_chunks,
    with_stream_time,
)
from vt_dagster.topology.durations import Duration, length_at
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
        earlier: log rows of earlier runs, as far back as ``InputPlan.rescan_from`` requires; None =
            none.
        broadcastable: whether ``rows`` is small enough to send to every task.
        few_keys: whether ``rows`` are many, of so few keys that these can be sent to every task.
        most_of_key: the most records of one key in ``rows``, if the plan asks for it and ``rows`` is
            broadcastable; None = not counted.
        times: stream time of ``table``, by partition.
    """

    rows: DataFrame
    table: DataFrame | None = None
    earlier: DataFrame | None = None
    broadcastable: bool = False
    times: Mapping[int, int] = field(default_factory=dict[int, int])
    few_keys: bool = False
    most_of_key: int | None = None


@dataclass(frozen=True)
class RunContext:
    """The context of a run besides its inputs: results of earlier runs, and the times at the run's end.

    Args:
        state: the state that the processor stored; None = nothing yet.
        view: the current rows of the result; None = nothing yet.
        stream_time: before the run, of a row's partition of the result.
        stream_time_after: at the end of the run; for ``state_after`` only, unless the processor has a
            stream time of its own.
        emitted_up_to: the time up to which held-back records were emitted before the run.
        emitted_up_to_after: the time up to which they are emitted at the end of the run.
        persist_rows: persists rows that are read several times; None if that takes longer than reading
            them again.
        look_up: see ``table_store.LookUp``; None: ``view`` has the rows. Not set together with it.
        rows_of_keys: takes few records and the names of their key columns; returns the records,
            persisted, and lazily the rows of the view with these keys. None = the view does not have
            many more keys than the records.
        watermarks, watermarks_after: before and after the run, see ``TimePolicy.watermarks``.
        bounds: of the processor's own stream time, if it is computed by bounds.
        none_late: whether it is known that none of the run's records is late.
        refused: the processor's quarantine, if it has one and reads earlier records; None = none.
        since: see ``RunPlan.corrects_after``.
        colliding_versions: for a table that compares records with versions (``tie_break``,
            ``only_columns``), those that end after the oldest record of the run; None = none.
        first_changes: for a run that reads an initial snapshot, the smallest timestamp of a record in
            the log by key, ``core.versioned_table.FIRST``; None = there is no log yet, or no such
            snapshot.
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
    look_up: table_store.LookUp | None = None
    rows_of_keys: Callable[[DataFrame, Sequence[str]], tuple[DataFrame, DataFrame]] | None = None
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
    def nothing(cls) -> RunContext:
        """Returns the context of a first run."""
        none = by_partition({})
        return cls(None, None, none, none, none, none)


@dataclass(frozen=True)
class Lookup:
    """A table that is looked up as of given times.

    Args:
        rows: its versions, see ``Processor.answering``; for a plain table its current rows.
        stream_time: of a row's partition.
        strategy: see ``as_of_join``.
        history: for a lookup by system time, see ``as_of_join``.
    """

    rows: DataFrame
    stream_time: Column
    strategy: JoinStrategy = "sorted"
    history: SystemTimeHistory | None = None


# Run plan


Counts = Mapping[str, int]
Times = Mapping[int, int]
"""By partition: epoch microseconds."""


@dataclass(frozen=True)
class RunTimes:
    """The times that a plan depends on; by partition, epoch microseconds.

    Args:
        stream_time, emitted_up_to, watermarks: before the run, see ``Commit``.
        advanced: the run's own watermarks; empty until they are computed.
    """

    stream_time: Times = field(default_factory=dict[int, int])
    emitted_up_to: Times = field(default_factory=dict[int, int])
    watermarks: Mapping[str, Times] = field(default_factory=dict[str, Times])
    advanced: Mapping[str, Times] = field(default_factory=dict[str, Times])


BEFORE_ANY_RUN = RunTimes()


@dataclass(frozen=True)
class InputPlan:
    """An input whose log a run reads.

    Args:
        rescan_from: the run reads the input's earlier rows with a larger timestamp than this again,
            epoch microseconds; None = no earlier row.
    """

    node: Stream
    rescan_from: int | None = None


@dataclass(frozen=True)
class ResultOrder:
    """The order in which results enter the log; total within a partition.

    Args:
        by: columns, ascending.
        first: a BOOLEAN column; rows where it is true come before all others. None = no such column.
        chunk: returns a column that ascends with the order; None = that of the time, if the order is by
            time, else that of the records' arrival.
    """

    by: Sequence[str] = (*ORDER, TURN)
    first: str | None = None
    chunk: Callable[[], Column] | None = None

    @property
    def by_time(self) -> bool:
        """Whether the order is by the time at which records are emitted: the timestamps of those that
        are not late never decrease in it."""
        return self.first is None and self.by[0] == EMITTED_AT

    def columns(self) -> list[Column]:
        """Returns the order as columns. Needs a Spark session."""
        first = [] if self.first is None else [(~F.col(self.first)).cast("int")]
        return [*first, *[F.col(f"`{c}`") for c in self.by]]


@dataclass(frozen=True)
class TimePolicy(ABC):
    """Computes a stream time of a run's records, in partitions of the result.

    Args:
        bounded: whether it is computed by bounds, see ``stream_time.Bounds``.
        reports_lateness: whether the lateness of the records against it is reported.
        emits_after: how long records are held back: they are emitted up to stream time less this. None
            = no record is held back.
    """

    processor: Processor[Any]
    bounded: bool = False
    reports_lateness: bool = False
    emits_after: Duration | None = None

    @abstractmethod
    def rows(self, inputs: Sequence[Input]) -> Timed:
        """Returns the records that define the stream time, in the result's partitions."""

    def advance(self, inputs: Sequence[Input], context: RunContext) -> DataFrame:
        """Returns the advance of stream time in a run, if it is not computed by bounds.

        Returns:
            ``partition`` (of the result), ``time`` (epoch microseconds); if lateness is reported,
            ``records, lateness`` (the sum) and ``most``, in microseconds; and the input of
            ``watermarks``.
        """
        timed = self.rows(inputs)
        rows = timed.rows.where(timed.moves)
        if self.reports_lateness:
            return lateness(rows, context.stream_time, self.processor.chunk)
        return rows.groupBy(PARTITION).agg(F.max(F.unix_micros(TIMESTAMP)).alias("time"))

    def lateness_bounds(self, inputs: Sequence[Input]) -> DataFrame | None:
        """Returns bounds that may prove, without ordering, that none of the run's records is late; None
        = none."""
        return None

    def advance_if_none_late(
        self, found: Sequence[Any], before: Times, watermarks: Mapping[str, Times]
    ) -> list[dict[str, Any]] | None:
        """Returns the rows of ``advance`` if no record is late; None if one may be.

        Args:
            found: the rows of ``lateness_bounds``.
            before: stream time before the run, by partition.
            watermarks: those before the run.
        """
        return None

    def watermarks(
        self, found: Sequence[Any], before: Mapping[str, Times]
    ) -> dict[str, dict[int, int]]:
        """Returns the operator's further times that a commit stores, by name and partition: epoch
        microseconds.

        Args:
            found: the rows of ``advance``.
            before: the watermarks before the run.
        """
        return {}

    def watermarks_of_time(
        self, stream_time: Times, before: Mapping[str, Times]
    ) -> dict[str, dict[int, int]]:
        """Returns watermarks that follow from stream time at the end of the run, see ``watermarks``."""
        return {}

    def time_by_chunk(self, inputs: Sequence[Input]) -> DataFrame:
        """Returns bounds of stream time for each chunk, see ``stream_time.time_by_chunk``. Used if
        ``bounded`` is true."""
        return time_by_chunk(self.rows(inputs), self.processor.fine_chunk)

    def undecided_chunks(self, inputs: Sequence[Input], bounds: Bounds) -> DataFrame:
        """Returns the chunks whose bounds do not decide: see ``stream_time.undecided_chunks``."""
        timed = self.rows(inputs)
        assert timed.deadline is not None
        return undecided_chunks(timed.rows, timed.deadline, self.processor.fine_chunk, bounds)

    def emitted_up_to(self, stream_time: Times, emitted_up_to: Times) -> dict[int, int]:
        """Returns the time up to which records are emitted after a run that ends at a stream time. It
        never decreases, even if records are held back longer than before."""
        if self.emits_after is None:
            return {}
        period, one = self.emits_after, timedelta(microseconds=1)
        passed = {p: moment - length_at(period, p) // one for p, moment in stream_time.items()}
        return {p: max(moment, emitted_up_to.get(p, moment)) for p, moment in passed.items()}


@dataclass(frozen=True)
class RunCounts:
    """The counts of a run, their invariants, and the size of its buffer."""

    @property
    def shown(self) -> tuple[str, ...]:
        """The counts that each run shows."""
        return ("in", "out", "late", "dropped")

    def tallies(self, columns: Sequence[str]) -> dict[str, Column]:
        """Returns further aggregates over the results, by name, besides the number of each outcome.
        They are computed per outcome and summed."""
        return {}

    @property
    def smallest(self) -> tuple[str, ...]:
        """The names of the ``tallies`` that are minima instead of sums; null = no value."""
        return ()

    def check(self, found: Mapping[int, Counts]) -> None:
        """Raises an error if a result must stop the run.

        Args:
            found: by partition, the number of results by outcome, and ``tallies``.

        Raises:
            RefusedRecordsError: a result must stop the run.
        """

    def of_run(self, taken: int, found: Counts, judged: Counts) -> dict[str, int]:
        """Returns the counts of a run.

        Args:
            taken: the number of log rows that it read.
            found: the number of its results by outcome, and ``tallies``; ``judged``: the number of
                judged records by outcome.
        """
        refused = {outcome: found[outcome] for outcome in (Outcome.LATE, Outcome.DROPPED)}
        return {"in": taken, "out": found[Outcome.APPLIED], **refused}

    @property
    def outcomes(self) -> tuple[str, ...]:
        """The outcomes of a record, if each record has exactly one. Empty: the operator counts results,
        not the outcome of each record."""
        return ()

    def parts(self, counts: Counts) -> dict[str, int]:
        """Returns the number of records by outcome.

        Their sum is the number of records in. With ``waiting`` among them, it includes the records that
        waited before the run.

        Args:
            counts: of a run.
        """
        return {outcome: counts.get(outcome, 0) for outcome in self.outcomes}

    def text(self, counts: Counts) -> str:
        """Returns the counts of a run as a sum that adds up, and the other counts after it: ``3 in + 1
        waiting before = 2 applied + 1 late + 1 waiting; 3 out``. Zeros are left out, except for the
        records in, applied and out."""
        parts = self.parts(counts)
        before = sum(parts.values()) - counts["in"] if Outcome.WAITING in parts else 0
        text = f"{counts['in']:,} in" + (f" + {before:,} waiting before" if before else "")
        shown = [_numbered(name, n) for name, n in parts.items() if n or name == Outcome.APPLIED]
        text += f" = {' + '.join(shown)}" if shown else ""
        others = {name: n for name, n in counts.items() if name not in ("in", *parts)}
        more = [_numbered(name, n) for name, n in others.items() if n or name == "out"]
        return f"{text}; {', '.join(more)}" if more else text

    def fullness(self, state: DataFrame | None) -> DataFrame | None:
        """Returns the size of the buffer: ``partition, records, bytes``; None = there is no buffer."""
        return None

    def gauges(
        self, sizes: Mapping[int, tuple[int, int]], earlier: Mapping[str, float], runs: int
    ) -> dict[str, float]:
        """Returns the gauges of the buffer, which cannot be summed over runs.

        Args:
            sizes: records and bytes by partition, of ``fullness``.
            earlier: the gauges of the last run; ``runs``: the number of earlier runs.

        Raises:
            BufferFullError: the buffer exceeds a limit that stops the run.
        """
        return {}

    def accounts(self, totals: Counts, taken: int, rows: int) -> list[tuple[str, int, int]]:
        """Returns the invariants of the counts: (name, expected, actual).

        Args:
            totals: counts over all runs; ``taken``: the number of log rows that they read.
            rows: the number of rows in the result's log.
        """
        return [
            ("records in = positions of the inputs", taken, totals.get("in", 0)),
            ("records out = rows in the log", totals.get("out", 0), rows),
        ]


def _numbered(name: str, number: int) -> str:
    words = name.replace("_", " ")
    return f"{number:,} {words.replace('records', 'record') if number == 1 else words}"


@dataclass(frozen=True)
class RunPlan:
    """What a run of an operator does, apart from its rows, which the ``Processor`` makes.

    A field has the value of most operators as its default. Making a plan needs no Spark session.

    Args:
        inputs: the inputs whose logs the run reads, by position; one input may appear twice.
        merges: whether a partition of the result combines records of several logs or partitions.
        reads_tables: whether the run reads its inputs' tables, not only their changes.
        reads_versions: whether it reads the versions of these tables that end at or after its oldest
            change; otherwise their current rows.
        reads_own_table: whether it reads the asset's own table, or as much of its inputs' logs.
        corrects_after: it may correct rows of the asset's own table with a larger timestamp than this,
            epoch microseconds; None = it corrects no row.
        looked_up: the table that it looks up as of its records' times; None = none.
        lookup_margin: how long before a record's time it looks up the table.
        lookup_reach: how long after a record's time the version that it matches may start; None =
            without limit.
        uses_system_time: whether the rows of its inputs have ``recorded_at``.
        persists_rows: whether it reads its input several times, so that the run persists the input.
        stream_time: the operator's own stream time, which decides what closes or is emitted; None = it
            has none.
        table_time: of a source's versioned table, the stream time of the records, if it is computed by
            bounds; None = it is not.
        has_grace_buffer: whether records that the operator judges may wait for a grace period.
        order: the order in which results enter the log.
        keeps_order: whether results keep the order of the only log.
        results_of_record: the most results of a record, if they keep the order; if more than one,
            ``_turn`` counts them from 0.
        monotonic: whether the timestamps of a key's results never decrease.
        risen: the column of :meth:`Processor.process` with the largest earlier timestamp of a key,
            which the store applies so that these timestamps never decrease; None = the store does not
            change them.
        emits_once: whether each key has at most one result.
        drops_late: whether late records are dropped; otherwise they are joined at once.
        quarantined_outcomes: the outcomes whose results go to the quarantine.
        counts: what is counted.
        counts_keys_of: the input of which a first run counts the most records of one key, if it has few
            records.
    """

    inputs: tuple[InputPlan, ...]
    merges: bool = False
    reads_tables: bool = False
    reads_versions: bool = False
    reads_own_table: bool = True
    corrects_after: int | None = None
    looked_up: Table | None = None
    lookup_margin: timedelta = timedelta(0)
    lookup_reach: timedelta | None = timedelta(0)
    uses_system_time: bool = False
    persists_rows: bool = False
    stream_time: TimePolicy | None = None
    table_time: TimePolicy | None = None
    has_grace_buffer: bool = False
    order: ResultOrder = ResultOrder()
    keeps_order: bool = False
    results_of_record: int = 1
    monotonic: bool = False
    risen: str | None = None
    emits_once: bool = False
    drops_late: bool = True
    quarantined_outcomes: tuple[str, ...] = ()
    counts: RunCounts = RunCounts()
    counts_keys_of: str | None = None

    @property
    def consumed(self) -> tuple[Stream, ...]:
        """The inputs whose logs the run reads, by position; one input may appear twice."""
        return tuple(one.node for one in self.inputs)

    def rescan_from(self, name: str) -> int | None:
        """Returns from where the run reads an input's log again, see ``InputPlan``; a log may be more
        than one of the inputs (a self-join)."""
        return earliest(*[one.rescan_from for one in self.inputs if one.node.name == name])

    def chunk_of_results(self, single_task: bool, level: int = LONGEST) -> Column | None:
        """Returns the number of a result's chunk, which ascends with ``order``; None for a single task.
        Needs a Spark session.

        Args:
            single_task: whether one task orders all results of a partition; they need no chunks then.
            level: of the chunks if the order is by time, see ``chunk_level``.
        """
        if single_task:
            return None
        if self.order.chunk is None and self.order.by_time:
            return F.shiftright(EMITTED_AT, level)
        by_arrival = hour_of_arrival if self.merges else arrival_chunk
        return (self.order.chunk or by_arrival)()


def earliest(*times: int | None) -> int | None:
    """Returns the smallest of the times that are not None; None = there is none."""
    return min((time for time in times if time is not None), default=None)


# emit="per_run"


_EXACT = (
    BinaryType,
    BooleanType,
    DateType,
    DecimalType,
    IntegralType,
    TimestampNTZType,
    TimestampType,
)
_ALONE = ("_alone_partition", "_alone_offset")
_PARTITIONS = 1 << 16


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


def is_order_independent(types: Sequence[DataType]) -> bool:
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
    places = zip((INPUT_PARTITION, INPUT_OFFSET), _ALONE, strict=True)
    alone = [F.when(~counts, F.col(c)).alias(a) for c, a in places]
    partition, offset = _ALONE
    turns = F.col(INPUT_OFFSET) * 2 + F.col(TURN)
    made = rows.groupBy(*by, *alone).agg(
        *[column.alias(name) for name, column in merged.items()],
        F.max(ARRIVAL).alias(ARRIVAL),
        # Of a group no offset, but a number in the order of offset, turn and partition.
        F.max(turns * _PARTITIONS + F.col(INPUT_PARTITION)).alias(INPUT_OFFSET),
    )
    place = {
        INPUT: F.lit(0),
        INPUT_PARTITION: F.coalesce(partition, F.lit(0)),
        INPUT_OFFSET: F.coalesce(offset, INPUT_OFFSET),
        TURN: F.lit(0),
    }
    return with_columns(made, place).drop(*_ALONE)


# Processor


O = TypeVar("O", covariant=True)  # noqa: E741


class Processor(ABC, Generic[O]):
    """Implements one operator for a run.

    Args:
        node: the result.
        single_task: whether one task can order the run's records of a partition; then nothing is split
            into chunks, and plans are shorter.
    """

    def __init__(self, node: Stream, single_task: bool = False) -> None:
        self.node = node
        self.single_task = single_task

    @property
    def operator(self) -> O:
        """The operator's declaration."""
        operator: Any = self.node.operator
        return operator

    def plan(self, times: RunTimes = BEFORE_ANY_RUN) -> RunPlan:
        """Returns what a run does apart from the rows that this processor makes.

        Args:
            times: they decide how far back inputs are read again; without them, only that part is
            missing.
        """
        return RunPlan(self.whole_inputs)

    @property
    def whole_inputs(self) -> tuple[InputPlan, ...]:
        """All inputs of the node; a run reads only the new rows of their logs."""
        return tuple(InputPlan(node) for node in self.node.inputs)

    # -- order of arrival ------------------------------------------------------------------------

    def in_order(self, inputs: Sequence[Input]) -> list[DataFrame]:
        """Returns the inputs' rows in the order in which a Kafka Streams task processes them.

        A task takes the record with the smallest timestamp among the heads of its inputs (if equal, the
        left one). This is the order of each input's own stream time in this run. Rows of one partition
        of one log keep the order of their offsets. If one log is several inputs, each of its records
        goes to all of them, from left to right.
        """
        nothing = F.lit(None).cast("timestamp")
        ordered: list[DataFrame] = []
        for one in inputs:
            rows = one.rows.withColumn(ARRIVAL, F.col(OFFSET))
            if self.plan().merges:
                timed = with_stream_time(
                    rows, nothing, chunk=None if self.single_task else arrival_chunk()
                )
                rows = timed.withColumn(ARRIVAL, F.unix_micros(STREAM_TIME)).drop(STREAM_TIME)
            ordered.append(rows)
        return self.with_order_columns(ordered)

    def with_order_columns(self, rows: Sequence[DataFrame]) -> list[DataFrame]:
        """Adds to the inputs' rows the columns of ``ORDER`` after ``_arrival``."""
        names = [node.name for node in self.plan().consumed]
        found: list[DataFrame] = []
        for i, one in enumerate(rows):
            alone = names.count(names[i]) == 1
            place = F.col(OFFSET) if alone else F.col(OFFSET) * len(names) + i
            first = F.lit(names.index(names[i]))
            found.append(
                one.withColumns({INPUT: first, INPUT_PARTITION: F.col(PARTITION), INPUT_OFFSET: place})
            )
        return found

    @property
    def chunk(self) -> Column | None:
        """Ascends with the order of the records; splits a long partition into several tasks."""
        place = hour_of_arrival() if self.plan().merges else arrival_chunk()
        return None if self.single_task else place

    @property
    def fine_chunk(self) -> Column:
        """Ascends with the order of the records: the chunks for which stream time has bounds."""
        merges = self.plan().merges
        return hour_of_arrival() if merges else F.floor(F.col(ARRIVAL) / F.lit(FINE))

    # -- rows ------------------------------------------------------------------------------------

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
        plan = self.plan()
        return table_store.put(
            node,
            pending,
            context.view,
            stream_time=context.stream_time,
            order=list(plan.order.by),
            chunk=plan.chunk_of_results(self.single_task),
            look_up=context.look_up,
            risen=plan.risen,
        )

    def judge(self, inputs: Sequence[Input], context: RunContext) -> DataFrame | None:
        """Returns records with their outcome, before the lookup; None = no lookup."""
        return None

    def answering(self, versions: DataFrame, stream_time: Column) -> DataFrame:
        """Returns the versions of the looked-up table with the interval of record times for which each
        is the match, see ``as_of_join.with_answers``; unchanged if that is their validity interval.

        Args:
            stream_time: of a row's partition.
        """
        return versions

    def look_up(self, judged: DataFrame, lookup: Lookup, context: RunContext) -> DataFrame:
        """Returns the results of judged records, joined with the table as of their times."""
        raise AssertionError("this processor looks up no table")

    # -- state -----------------------------------------------------------------------------------

    def state_after(self, rows: DataFrame, context: RunContext) -> DataFrame | None:
        """Returns the operator's state for the next run; None = no state.

        Args:
            rows: the results of the run. They are read again: persist them.
        """
        return None

    def state_after_erase(self, state: DataFrame, erased: DataFrame) -> DataFrame:
        """Returns the operator's state after rows of the result's log were erased.

        Args:
            state: the stored state.
            erased: the erased rows.
        """
        return state

    def waiting(
        self, logs: Sequence[DataFrame], emitted_up_to: Times, state: DataFrame | None
    ) -> DataFrame:
        """Returns the rows of the inputs' logs that the operator has consumed and still buffers.

        Args:
            logs: of each input that it consumes; ``state``: its stored state.
            emitted_up_to: the time up to which records have been emitted, by partition.
        """
        return logs[0].limit(0)
