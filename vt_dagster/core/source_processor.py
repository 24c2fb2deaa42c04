"""The processor of a source: decides which of its records are applied, late or quarantined."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from vt_dagster.columns import ARRIVAL, OUTCOME, PARTITION, PROPAGATED_FROM
from vt_dagster.core import table_store
from vt_dagster.core.arrival_order import FINE, REFUSED, Outcome, with_columns
from vt_dagster.core.duplicates import mark_duplicates, remembered_after
from vt_dagster.core.log_columns import partial_columns
from vt_dagster.core.processor import (
    BEFORE_ANY_RUN,
    Counts,
    Input,
    Processor,
    ResultOrder,
    RunContext,
    RunCounts,
    RunPlan,
    RunTimes,
    TimePolicy,
)
from vt_dagster.core.source_order import follows_source, has_derived_rows, may_restate
from vt_dagster.core.source_records import RAW, RAW_KEY, START
from vt_dagster.core.stream_time import Timed, late_from
from vt_dagster.topology.model import Stream, Table, VersionedTable
from vt_dagster.topology.options import set_options

STARTED, START_IN, START_BAD = "_started", "_start_in", "_start_bad"
"""Counts of an initial snapshot's rows: applied, in total, and quarantined."""


_QUARANTINED = (*REFUSED, Outcome.QUARANTINED)


@dataclass(frozen=True)
class SourceTime(TimePolicy):
    """The stream time of a versioned table, as of each record of its source."""

    def rows(self, inputs: Sequence[Input]) -> Timed:
        node, (one,) = self.processor.node, inputs
        assert isinstance(node, VersionedTable)
        return Timed(one.rows, F.col(OUTCOME).isNull(), late_from(node.history_retention))


@dataclass(frozen=True)
class SourceCounts(RunCounts):
    """The counts of a source's records, by outcome."""

    node: Stream

    @property
    def shown(self) -> tuple[str, ...]:
        applied, *others = self.outcomes
        return ("in", applied, *self._carried, *others)

    @property
    def outcomes(self) -> tuple[str, ...]:
        of_options = [name for option in set_options(self.node) for name in option.outcomes]
        again = (Outcome.NOTHING_NEW,) if may_restate(self.node) else ()
        return (Outcome.APPLIED, Outcome.LATE, *of_options, *again, Outcome.QUARANTINED)

    @property
    def _carried(self) -> tuple[str, ...]:
        # A row of a version that a record changes is in the log, but is no record of the source.
        return (Outcome.CARRIED,) if has_derived_rows(self.node) else ()

    def tallies(self, columns: Sequence[str]) -> dict[str, Column]:
        carried = (
            {Outcome.CARRIED: F.count_if(F.col(PROPAGATED_FROM) > 0)}
            if PROPAGATED_FROM in columns
            else {}
        )
        if START not in columns:
            return carried
        outcomes = {STARTED: Outcome.APPLIED, START_BAD: Outcome.QUARANTINED}
        by_outcome = {
            name: F.count_if(F.col(START) & (F.col(OUTCOME) == outcome))
            for name, outcome in outcomes.items()
        }
        record = F.col(PROPAGATED_FROM) == 0 if carried else F.lit(True)
        return {**carried, **by_outcome, START_IN: F.count_if(F.col(START) & record)}

    def of_run(self, taken: int, found: Counts, judged: Counts) -> dict[str, int]:
        carried = sum(found[name] for name in self._carried)
        by_outcome = {name: found[name] for name in self.shown[1:]}
        applied = found[Outcome.APPLIED] - carried
        shown = {"in": found["in"] - carried, **by_outcome, Outcome.APPLIED: applied}
        if partial_columns(self.node):
            return shown
        # Rare for whole rows: show these counts only if they are not zero.
        return {n: c for n, c in shown.items() if c or n not in (Outcome.CARRIED, Outcome.NOTHING_NEW)}

    def accounts(self, totals: Counts, taken: int, rows: int) -> list[tuple[str, int, int]]:
        outcomes = (*_QUARANTINED, Outcome.APPLIED, Outcome.COVERED, Outcome.NOTHING_NEW)
        done = sum(totals.get(outcome, 0) for outcome in outcomes)
        return [(f"records in = {' + '.join(self.outcomes)}", totals.get("in", 0), done)]


class SourceProcessor(Processor[None]):
    """Puts a source's prepared records (``source_records.prepare``) into its stream or table.

    A stream and a plain table apply every record; a stream with ``unique_by`` refuses duplicates, see
    ``core.duplicates``. A versioned table refuses records older than its history retention, and those
    that lose a tie; if it follows its source's order, no record is late. Records with a reason for
    quarantine are passed through.
    """

    def plan(self, times: RunTimes = BEFORE_ANY_RUN) -> RunPlan:
        node = self.node
        # If records name their partitions, there may be as many chunks as records.
        own = PARTITION in node.schema.names
        late = isinstance(node, VersionedTable) and not follows_source(node)
        bounded = not self.single_task and late and not own
        # An event that deletes every key gives one record per key, all with the same position of
        # arrival.
        keys = node.key if may_restate(node) else ()
        carried = (PROPAGATED_FROM,) if has_derived_rows(node) else ()
        return RunPlan(
            inputs=(),
            table_time=SourceTime(self, bounded=True) if bounded else None,
            order=ResultOrder((ARRIVAL, *carried, *keys)),
            quarantined_outcomes=_QUARANTINED,
            counts=SourceCounts(node),
        )

    def in_order(self, inputs: Sequence[Input]) -> list[DataFrame]:
        return [one.rows for one in inputs]

    @property
    def fine_chunk(self) -> Column:
        # Files have one order for the records of all partitions.
        return F.floor(F.col(ARRIVAL) / F.lit(FINE * self.node.partitions))

    def process(self, rows: list[DataFrame], inputs: Sequence[Input], context: RunContext) -> DataFrame:
        node, (records,) = self.node, rows
        # The raw record is needed only in quarantine.
        raw = [c for c in (RAW, RAW_KEY) if c in records.columns]
        if not isinstance(node, Table):
            judged = records.withColumn(OUTCOME, F.coalesce(OUTCOME, F.lit(Outcome.APPLIED)))
            if node.unique_by is not None:
                now = context.stream_time
                judged = mark_duplicates(
                    node, records, context.state, stream_time=now, chunk=self.chunk
                )
            rejected = F.col(OUTCOME) != Outcome.APPLIED
            return with_columns(judged, {c: F.when(rejected, F.col(c)) for c in raw})
        return table_store.put(
            node,
            records,
            context.view,
            stream_time=context.stream_time,
            order=[PARTITION, ARRIVAL],
            chunk=self.chunk if context.bounds is None else self.fine_chunk,
            persist_rows=context.persist_rows,
            look_up=context.look_up,
            bounds=context.bounds,
            of_rejected=raw,
            colliding_versions=context.colliding_versions,
            first_changes=context.first_changes,
            last=context.last,
        )

    def state_after(self, rows: DataFrame, context: RunContext) -> DataFrame | None:
        if self.node.unique_by is None:
            return None
        return remembered_after(self.node, rows, context.state, context.stream_time_after)
