"""The processor of a source: decides which of its records are applied, late or quarantined."""

from __future__ import annotations

from collections.abc import Sequence

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from vt_dagster.columns import ARRIVAL, OUTCOME, PARTITION, PROPAGATED_FROM, RECORDED_AT
from vt_dagster.core import table_store
from vt_dagster.core.arrival_order import FINE, REFUSED, InPlace, Outcome, number, with_columns
from vt_dagster.core.log_columns import log_columns, partial_columns
from vt_dagster.core.processor import Counts, Input, Processor, RunContext
from vt_dagster.core.source_order import carries, follows_source, restates
from vt_dagster.core.source_records import RAW, RAW_KEY, START
from vt_dagster.core.stream_time import Timed, late_from
from vt_dagster.topology.model import Stream, Table, VersionedTable
from vt_dagster.topology.options import set_options

STARTED, START_IN, START_BAD = "_started", "_start_in", "_start_bad"
"""Counts of an initial snapshot's rows: applied, in total, and quarantined."""


class SourceProcessor(Processor[None]):
    """Puts a source's prepared records (``source_records.prepare``) into its stream or table.

    A stream and a plain table apply every record. A versioned table refuses records older than its
    history retention, and those that lose a tie; if it follows its source's order, no record is late.
    Records with a reason for quarantine are passed through.
    """

    quarantined_outcomes = (*REFUSED, Outcome.QUARANTINED)

    @property
    def shown_counts(self) -> tuple[str, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return ("in", *self._outcomes)

    @property
    def _outcomes(self) -> tuple[str, ...]:
        of_options = [name for option in set_options(self.node) for name in option.outcomes]
        again = (Outcome.NOTHING_NEW,) if restates(self.node) else ()
        return (
            Outcome.APPLIED,
            *self._carried,
            Outcome.LATE,
            *of_options,
            *again,
            Outcome.QUARANTINED,
        )

    @property
    def _carried(self) -> tuple[str, ...]:
        return (Outcome.CARRIED,) if carries(self.node) else ()

    @property
    def consumed(self) -> tuple[Stream, ...]:
        return ()

    def in_order(self, inputs: Sequence[Input]) -> list[DataFrame]:
        return [one.rows for one in inputs]

    def process(self, rows: list[DataFrame], inputs: Sequence[Input], context: RunContext) -> DataFrame:
        node, (records,) = self.node, rows
        # The raw record is needed only in quarantine.
        raw = [c for c in (RAW, RAW_KEY) if c in records.columns]
        if not isinstance(node, Table):
            rejected = F.col(OUTCOME).isNotNull()
            kept = with_columns(records, {c: F.when(rejected, F.col(c)) for c in raw})
            return kept.withColumn(OUTCOME, F.coalesce(OUTCOME, F.lit(Outcome.APPLIED)))
        return table_store.put(
            node,
            records,
            context.view,
            stream_time=context.stream_time,
            order=[PARTITION, ARRIVAL],
            chunk=self.chunk if context.bounds is None else self.fine_chunk,
            persist_rows=context.persist_rows,
            bounds=context.bounds,
            of_rejected=raw,
            colliding_versions=context.colliding_versions,
            first_changes=context.first_changes,
            last=context.last,
        )

    @property
    def bounded(self) -> bool:
        # If records name their partitions, there may be as many chunks as records.
        own = PARTITION in self.node.schema.names
        late = isinstance(self.node, VersionedTable) and not follows_source(self.node)
        return not self.single_task and late and not own

    @property
    def fine_chunk(self) -> Column:
        # Files have one order for the records of all partitions.
        return F.floor(F.col(ARRIVAL) / F.lit(FINE * self.node.partitions))

    def stream_time_rows(self, inputs: Sequence[Input]) -> Timed:
        node, (one,) = self.node, inputs
        assert isinstance(node, VersionedTable)
        return Timed(one.rows, F.col(OUTCOME).isNull(), late_from(node.history_retention))

    @property
    def result_order(self) -> list[Column]:
        # An event that deletes every key gives one record per key, all with the same position of
        # arrival.
        keys = [F.col(f"`{k}`") for k in self.node.key] if restates(self.node) else []
        return [F.col(ARRIVAL), *([F.col(PROPAGATED_FROM)] if self._carried else []), *keys]

    def produce(
        self, rows: DataFrame, first: Column, single_task: bool, in_place: InPlace | None = None
    ) -> DataFrame:
        """Returns the log rows of a run, with ``recorded_at`` if the source provides it."""
        if RECORDED_AT not in rows.columns:
            return super().produce(rows, first, single_task, in_place)
        results = rows.where(F.col(OUTCOME) == Outcome.APPLIED)
        numbered = number(results, first, self.result_order, self.result_chunk(single_task))
        return numbered.select(*log_columns(self.node), RECORDED_AT)

    def tallies(self, columns: Sequence[str]) -> dict[str, Column]:
        carried = (
            {Outcome.CARRIED: F.count_if(F.col(PROPAGATED_FROM) > 0)}
            if PROPAGATED_FROM in columns
            else {}
        )
        if START not in columns:
            return carried
        outcomes = {STARTED: Outcome.APPLIED, START_BAD: Outcome.QUARANTINED}
        told = {
            name: F.count_if(F.col(START) & (F.col(OUTCOME) == outcome))
            for name, outcome in outcomes.items()
        }
        record = F.col(PROPAGATED_FROM) == 0 if carried else F.lit(True)
        return {**carried, **told, START_IN: F.count_if(F.col(START) & record)}

    def counts(self, taken: int, found: Counts, judged: Counts) -> dict[str, int]:
        carried = sum(found[name] for name in self._carried)
        told = {outcome: found[outcome] for outcome in self._outcomes}
        applied = found[Outcome.APPLIED] - carried
        shown = {"in": found["in"] - carried, **told, Outcome.APPLIED: applied}
        if partial_columns(self.node):
            return shown
        # Rare for whole rows: show these counts only if they are not zero.
        return {n: c for n, c in shown.items() if c or n not in (Outcome.CARRIED, Outcome.NOTHING_NEW)}

    def accounts(self, totals: Counts, taken: int, rows: int) -> list[tuple[str, int, int]]:
        outcomes = (*self.quarantined_outcomes, Outcome.APPLIED, Outcome.COVERED, Outcome.NOTHING_NEW)
        done = sum(totals.get(outcome, 0) for outcome in outcomes)
        what = f"records in = {' + '.join(f for f in self._outcomes if f != Outcome.CARRIED)}"
        return [(what, totals.get("in", 0), done)]
