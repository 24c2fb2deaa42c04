"""What a run needs to know of an operator, in one object: its *processor*, in Kafka Streams' word.

A processor says what it takes from each input, in which order, what it makes of that, what it keeps
for the next run, and what is counted and promised. It makes lazy DataFrames of DataFrames; a ``Run``
reads, holds and writes them. Each operator's file has its own; ``processor_registry.py`` lists them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any, Generic, TypeVar

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

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
    hour_of_arrival,
    number,
    number_in_place,
)
from vt_dagster.core.emit_per_run import last_of_run
from vt_dagster.core.log_columns import log_columns
from vt_dagster.core.run_context import Input, Lookup, RunContext
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

Counts = Mapping[str, int]
Times = Mapping[int, int]
"""By partition: epoch microseconds."""
O = TypeVar("O", covariant=True)  # noqa: E741


class Processor(ABC, Generic[O]):
    """What a run needs to know of an operator.

    Args:
        node: the result.
        single_task: whether one task can well put in order what the run takes of a partition: then
            nothing is
            cut into chunks, and plans are shorter.
    """

    reads_tables = False
    """Whether it looks into its inputs' tables, not only at their changes."""
    quarantined_outcomes: tuple[str, ...] = ()
    """The outcomes of results that are kept in the quarantine."""
    merges = False
    """Whether a result's partition has records of several logs or partitions."""
    has_stream_time = False
    """Whether it has a stream time of its own, which decides what is closed or goes out."""
    reports_lateness = False
    """Whether it says how far its records lie behind that."""
    drops_late = True
    """Whether a late record is of no use; else it is joined at once."""
    monotonic = False
    """Whether results of a key never go back in time."""
    persists_rows = False
    """Whether it looks several times at what it takes, so that this is held."""
    has_grace_buffer = False
    """Whether records that it judges may wait for their grace period to pass."""
    emits_once = False
    """Whether each key has one result at most."""
    shown_counts: tuple[str, ...] = ("in", "out", "late", "dropped")
    """The counts that each run is to show."""

    def __init__(self, node: Stream, single_task: bool = False) -> None:
        self.node = node
        self.single_task = single_task

    @property
    def operator(self) -> O:
        """The declaration."""
        operator: Any = self.node.operator
        return operator

    # -- what it takes ---------------------------------------------------------------------------

    @property
    def consumed(self) -> tuple[Stream, ...]:
        """The inputs whose logs it takes, by position; one may be there twice."""
        return self.node.inputs

    @property
    def looked_up(self) -> Table | None:
        """The table that it looks into as of its records' times, if any."""
        return None

    @property
    def uses_system_time(self) -> bool:
        """Whether it goes by when its inputs' records were recorded, which their rows then say."""
        return False

    @property
    def lookup_margin(self) -> timedelta:
        """How long before its records' times it looks into the table."""
        return timedelta(0)

    def rescan_from(
        self, place: int, stream_time: Times, emitted_up_to: Times, watermarks: Mapping[str, Times]
    ) -> int | None:
        """How far back it needs the log of an input again: rows with a larger timestamp (epoch
        microseconds); None = not at all.

        Args:
            place: of the input.
            stream_time: by partition, before the run.
            emitted_up_to: the time up to which records had gone out, likewise.
            watermarks: likewise, see :meth:`watermarks`.
        """
        return None

    def rescan_from_batch(self, place: int, watermarks: Mapping[str, Times]) -> int | None:
        """The same by what the run brings: its :meth:`watermarks`, empty until they are told."""
        return None

    def reads_own_table(self, watermarks: Mapping[str, Times]) -> bool:
        """Whether a run looks into the asset's own table, or at as much of its inputs' logs; by what it
        brings, see :meth:`watermarks`."""
        return True

    def versions_since(self, logs: Sequence[DataFrame]) -> DataFrame | None:
        """What it looks into its tables' history for, by what the run takes: versions that ended after
        a time, one row with epoch microseconds; None = nothing."""
        return None

    def in_order(self, inputs: Sequence[Input]) -> list[DataFrame]:
        """The inputs' rows in the order in which a Kafka Streams task takes them.

        A task takes the record with the smallest timestamp among the heads of its inputs (equal: the
        left one's). That is the order of each input's own stream time in this run. Rows of one
        partition of one log keep the order of their offsets. A log that is several inputs at once
        gives each record to all of them, from left to right.
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
        """Ascends with the order of what it takes, so that a long partition is not one task's."""
        place = hour_of_arrival() if self.merges else arrival_chunk()
        return None if self.single_task else place

    # -- its own stream time ---------------------------------------------------------------------

    def stream_time_rows(self, inputs: Sequence[Input]) -> Timed:
        """What its own stream time goes by, in the result's partitions."""
        raise AssertionError("only what goes by time is asked")

    @property
    def fine_chunk(self) -> Column:
        """Ascends with the order of what it takes: chunks that stream time is told of by bounds."""
        return hour_of_arrival() if self.merges else F.floor(F.col(ARRIVAL) / F.lit(FINE))

    @property
    def bounded(self) -> bool:
        """Whether its stream time is told by bounds: see ``stream_time.Bounds``."""
        return not self.single_task

    def stream_time_advance(self, inputs: Sequence[Input], context: RunContext) -> DataFrame:
        """How its own stream time moves in a run, where it is not told by bounds.

        Returns:
            ``partition`` (of the result), ``time`` (epoch microseconds); where lateness is told,
            ``records, lateness`` (the sum) and ``most``, microseconds; and what ``watermarks`` are made
            of.
        """
        timed = self.stream_time_rows(inputs)
        rows = timed.rows.where(timed.moves)
        if self.reports_lateness:
            return lateness(rows, context.stream_time, self.chunk)
        return rows.groupBy(PARTITION).agg(F.max(F.unix_micros(TIMESTAMP)).alias("time"))

    def lateness_bounds(self, inputs: Sequence[Input]) -> DataFrame | None:
        """What may tell, without any order, that none of the run's records is late; None = nothing."""
        return None

    def advance_if_none_late(
        self, found: Sequence[Any], before: Times, watermarks: Mapping[str, Times]
    ) -> list[dict[str, Any]] | None:
        """The rows of ``stream_time_advance``, if by ``found``, those of ``lateness_bounds``, and
        stream time and ``watermarks`` before the run no record is late."""
        return None

    def watermarks(
        self, found: Sequence[Any], before: Mapping[str, Times]
    ) -> dict[str, dict[int, int]]:
        """Other times that it keeps from run to run, by name and partition: epoch microseconds; from
        the rows of ``stream_time_advance``, and what they were before."""
        return {}

    def time_by_chunk(self, inputs: Sequence[Input]) -> DataFrame:
        """The same where it is: see ``stream_time.time_by_chunk``."""
        return time_by_chunk(self.stream_time_rows(inputs), self.fine_chunk)

    def undecided_chunks(self, inputs: Sequence[Input], bounds: Bounds) -> DataFrame:
        """The chunks where bounds do not decide: see ``stream_time.undecided_chunks``."""
        timed = self.stream_time_rows(inputs)
        assert timed.deadline is not None
        return undecided_chunks(timed.rows, timed.deadline, self.fine_chunk, bounds)

    # -- what it makes of it ---------------------------------------------------------------------

    def emitted_up_to(self, stream_time: Times, emitted_up_to: Times) -> dict[int, int]:
        """The time up to which held records go out, after a run that ends at a stream time."""
        return {}

    def waiting(
        self, logs: Sequence[DataFrame], emitted_up_to: Times, state: DataFrame | None
    ) -> DataFrame:
        """Of the log rows that it has consumed, those that it holds back; of what holds back records.

        Args:
            logs: of each input that it consumes; ``state``: what it has kept.
            emitted_up_to: the time up to which records have gone out, by partition.
        """
        return logs[0].limit(0)

    @abstractmethod
    def process(self, rows: list[DataFrame], inputs: Sequence[Input], context: RunContext) -> DataFrame:
        """The operator itself.

        Args:
            rows: the inputs' rows ``in_order``.

        Returns:
            rows ``key columns, value columns, timestamp, partition, is_tombstone, _outcome, ORDER,
            _turn``, of what has no store of its own also ``is_latest, old``; and what ``state_after``
            needs.
        """

    def results(self, inputs: Sequence[Input], context: RunContext) -> DataFrame:
        """The results of a run with all that is counted, and what ``state_after`` needs.

        Returns:
            rows of ``process``, of tables with ``is_latest`` and ``old``: what the result's own store
            makes of them.
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
        """Of what looks into a table as of times: the records with their outcome, before it looks."""
        return None

    def look_up(self, judged: DataFrame, lookup: Lookup, context: RunContext) -> DataFrame:
        """The results of judged records, with the table as of their times."""
        raise AssertionError("only what judges records looks them up")

    def state_after(self, rows: DataFrame, context: RunContext) -> DataFrame | None:
        """What it keeps for its next run; None where it keeps nothing.

        Args:
            rows: its results. They are wanted again: hold them.
        """
        return None

    def state_after_erase(self, state: DataFrame, erased: DataFrame) -> DataFrame:
        """What it keeps where these rows of its log are erased."""
        return state

    # -- what becomes of it ----------------------------------------------------------------------

    @property
    def result_order(self) -> list[Column]:
        """The order in which results go to the log; total within a partition."""
        return [F.col(c) for c in (*ORDER, TURN)]

    def result_chunk(self, single_task: bool) -> Column | None:
        """Ascends with that order."""
        place = hour_of_arrival() if self.merges else arrival_chunk()
        return None if single_task else place

    @property
    def keeps_order(self) -> bool:
        """Whether its results lie as the records of its only log do, one of a record at most."""
        return False

    def produce(
        self, rows: DataFrame, first: Column, single_task: bool, in_place: InPlace | None = None
    ) -> DataFrame:
        """The log rows of a run: results numbered from ``first``.

        Args:
            single_task: whether one task can well number them; ``in_place``: where they keep their
                log's order.
        """
        results = rows.where(F.col(OUTCOME) == Outcome.APPLIED)
        if in_place is not None and (in_place.complete or not single_task):
            numbered = number_in_place(results, first, in_place)
        else:
            numbered = number(results, first, self.result_order, self.result_chunk(single_task))
        return numbered.select(*log_columns(self.node))

    # -- what is counted and promised ------------------------------------------------------------

    def tallies(self, columns: Sequence[str]) -> dict[str, Column]:
        """Aggregates over its results that are counted besides their outcomes, by name."""
        return {}

    def check(self, found: Mapping[int, Counts]) -> None:
        """Refuses results that are to stop the run.

        Args:
            found: by partition, results by outcome and ``tallies``.

        Raises:
            RefusedRecordsError: there are some.
        """

    def counts(self, taken: int, found: Counts, judged: Counts) -> dict[str, int]:
        """The counts of a run.

        Args:
            taken: number of log rows that it took.
            found: of its results, by outcome, and ``tallies``; ``judged``: of the records that
                it
                judged.
        """
        refused = {outcome: found[outcome] for outcome in (Outcome.LATE, Outcome.DROPPED)}
        return {"in": taken, "out": found[Outcome.APPLIED], **refused}

    def fullness(self, state: DataFrame | None) -> DataFrame | None:
        """How full its buffer is: ``partition, records, bytes``; None where it has none."""
        return None

    def gauges(
        self, sizes: Mapping[int, tuple[int, int]], earlier: Mapping[str, float], runs: int
    ) -> dict[str, float]:
        """What cannot be added up over runs, told of its buffer.

        Args:
            sizes: records and bytes by partition, of ``fullness``.
            earlier: the gauges of the last run; ``runs``: how many there were.

        Raises:
            BufferFullError: the buffer is over a limit that stops the run.
        """
        return {}

    def accounts(self, totals: Counts, taken: int, rows: int) -> list[tuple[str, int, int]]:
        """What must be equal: (what, expected, found).

        Args:
            totals: counts over all runs; ``taken``: number of log rows that they took.
            rows: in the result's log.
        """
        return [
            ("records in = positions of the inputs", taken, totals.get("in", 0)),
            ("records out = rows in the log", totals.get("out", 0), rows),
        ]
