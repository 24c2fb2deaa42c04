"""One run of an asset: pin, read, operate, commit, follow. No Dagster.

Whoever runs an asset goes this way: ops, replay, the test driver, conformance, benchmarks. What is
operated is said by the asset's ``Processor``; where tables are is said by its ``Store``.

The order of what is written is the protocol: first, under the attempt's name, what the run rejects,
what it keeps for the next one and the files it consumed; then the log (**the commit**); then view and
quarantine, which follow from it. So a run can be killed anywhere and started again.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from typing import Any

from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from vt_dagster.columns import (
    PARTITION,
    RECORDED_AT,
)
from vt_dagster.core.arrival_order import Outcome, by_partition
from vt_dagster.core.processor import Processor
from vt_dagster.core.processor_registry import processor_of
from vt_dagster.core.run_context import Input, RunContext
from vt_dagster.runs.advance_stream_time import advance_stream_time, bounds_of
from vt_dagster.runs.arrival import Arrival
from vt_dagster.runs.commit_document import (
    document,
    ends_of,
    of_source,
    places_of,
    stage_rejected,
    system_time_by_clock,
)
from vt_dagster.runs.gate import Passed, gate
from vt_dagster.runs.pin import explained, from_logs, from_source
from vt_dagster.runs.read_source import reads_twice, records_of, with_table_history
from vt_dagster.runs.readiness import require_covered
from vt_dagster.runs.record_times import assign_system_times, steps_of
from vt_dagster.runs.results import Judged, Receipt, Results, judge, nothing_of, require_same
from vt_dagster.runs.run_inputs import inputs_of, logs_of, run_context_of
from vt_dagster.runs.store_protocol import Store, Stores
from vt_dagster.runs.temporal_lookup import temporal_lookup
from vt_dagster.runs.udf_determinism import require_deterministic_functions
from vt_dagster.sources.base import Pinned, Source
from vt_dagster.spark.small_run_settings import is_small
from vt_dagster.storage.commit_log import Commit
from vt_dagster.storage.progress import in_words
from vt_dagster.topology.model import Stream

_LAST = datetime.max.replace(tzinfo=timezone.utc)


@dataclass(frozen=True)
class Run:
    """One run of an asset. ``Run.pin(...)`` starts it; then ``read``, ``operate``, ``commit``.

    Args:
        arrival: what it takes.
        stores: gives the tables of the asset and of its inputs.
    """

    arrival: Arrival
    stores: Stores

    @property
    def node(self) -> Stream:
        return self.arrival.node

    @property
    def store(self) -> Store:
        """The asset's own tables."""
        return self.stores(self.node)

    @property
    def processor(self) -> Processor[Any]:
        return processor_of(self.node, self.arrival.single_task)

    # -- pin -------------------------------------------------------------------------------------

    @classmethod
    def pin(cls, node: Stream, stores: Stores, source: Source | None = None, **asked: Any) -> Run:
        """Repairs what a dead run left, then pins all that this run takes and looks into.

        Args:
            source: of a source asset; None = the node's own.
            asked: what is asked of the source, see its ``pin``, or of an operator, see ``from_logs``.

        Raises:
            SourceError: the source is not there, or the asset has none.
            RefusedRecordsError: a table has forgotten the times of records that have waited for it.
        """
        store = stores(node)
        at = store.catch_up()
        if node.operator is None:
            return cls(from_source(node, store, at, source, asked), stores)
        run = cls(from_logs(node, store, at, stores, **asked), stores)
        if run.arrival.empty:
            return run
        if not asked.get("accept_not_ready"):
            require_covered(run.arrival, stores)
        return replace(run, arrival=run._with_stream_time())

    def _with_stream_time(self) -> Arrival:
        """With the operator's own stream time at the end of the run, and how late its records are."""
        if not self.processor.has_stream_time:
            return self.arrival
        with self.store.planner_settings(self.arrival.small):
            return advance_stream_time(
                self.arrival,
                self.processor,
                self._inputs(self.read()),
                self._context(),
                self.store.spark,
            )

    # -- read ------------------------------------------------------------------------------------

    def read(self, now: datetime | None = None) -> list[DataFrame]:
        """What the run takes: a source's prepared records, or the log rows of each consumed input.

        Args:
            now: what a timestamp may not lie far behind; None = this machine's clock.
        """
        if self.arrival.source is not None:
            return [self._records(self.arrival.source, now)]
        return logs_of(self.arrival, self.processor, self.stores)

    def _records(self, source: Pinned, now: datetime | None) -> DataFrame:
        latest, now = None, now or datetime.now(timezone.utc)
        if source.max_clock_skew is not None and source.max_clock_skew < _LAST - now:
            latest = int((now + source.max_clock_skew).timestamp())
        with self._explained():
            return records_of(self.arrival, source, self.store, latest)

    def _inputs(self, logs: Sequence[DataFrame]) -> list[Input]:
        return inputs_of(self.arrival, self.processor, self.stores, logs)

    # -- operate ---------------------------------------------------------------------------------

    def operate(self, read: Sequence[DataFrame]) -> Results:
        """The operator: its results with all that is counted. Lazy, but where a table is looked into
        as of times: then one job tells which of its versions are needed; where few records meet a
        large table, or are looked at several times: then they are computed first; and where a versioned
        table takes many of a source: then they are held, and one job tells how its stream time moves.

        Args:
            read: of :meth:`read`, or what an op in between made of it.
        """
        context, processor = self._context(with_tables=True), self.processor
        if self.arrival.empty:
            return Results(nothing_of(self.node, self.store.spark), context)
        require_deterministic_functions(self.arrival, self.store)
        if self.arrival.source is not None and (
            processor.bounded or reads_twice(read[0], self.arrival)
        ):
            # They are looked at twice, and reading them is the most of it.
            with self._explained():
                read = [self.store.persist(rows) for rows in read]
                self.arrival.persisted.extend(read)
                rows, context = with_table_history(read[0], self.arrival, self.store, context)
                read = [rows]
        if self.arrival.source is not None and processor.bounded:
            with self._explained():
                before, spark = self.arrival.before.stream_time, self.store.spark
                bounds = bounds_of(processor, self._inputs(read), before, spark)
                context = replace(context, bounds=bounds)
        inputs = self._inputs(read)
        judged = self._judged(inputs, context)
        if judged is None:
            return Results(processor.results(inputs, context), context)
        return self._joined(judged, context)

    def buffer(self, read: Sequence[DataFrame]) -> DataFrame:
        """The first half of :meth:`operate`, of a join with a grace period: which records go out, and
        which wait. They are computed, and held until the commit; of a run that takes nothing they are
        lazy.

        Returns:
            the records of the run and those that waited before it, with ``_outcome``.
        """
        judged = self._judged(self._inputs(read), self._context(with_tables=True))
        assert judged is not None
        if self.arrival.empty:
            return judged
        with self.store.planner_settings(self.arrival.small):
            buffered = self._persist(judged)
            self.arrival.buffered.update(judge(buffered).counts)
        return buffered

    def join(self, buffered: DataFrame) -> Results:
        """The second half: what :meth:`buffer` gave, with the table as of the records' times.

        Raises:
            ContractError: there are more or fewer records of an outcome than :meth:`buffer` gave.
        """
        context = self._context(with_tables=True)
        if self.arrival.empty:
            return Results(nothing_of(self.node, self.store.spark), context)
        results = self._joined(buffered, context)
        require_same(self.node, self.arrival.buffered, results.judged.counts)
        return results

    def _judged(self, inputs: Sequence[Input], context: RunContext) -> DataFrame | None:
        own = self.arrival.view_rows if self.processor.reads_own_table(self.arrival.watermarks) else 0
        with self.store.planner_settings(self._small(Judged(rows_read=own))):
            return self.processor.judge(inputs, context)

    def _joined(self, judged: DataFrame, context: RunContext) -> Results:
        processor = self.processor
        with self.store.planner_settings(self.arrival.small):
            told = judge(judged)
        with self.store.planner_settings(self._small(told)):
            rows, told = temporal_lookup(
                self.arrival, processor, self.stores, judged, told, self._persist, context
            )
        return Results(rows, context, told)

    def _context(self, with_tables: bool = False) -> RunContext:
        return run_context_of(
            self.arrival, self.processor, self.store, self._persist if with_tables else None
        )

    def _persist(self, rows: DataFrame) -> DataFrame:
        """Computes rows at once: two builders of Spark's cache can wait for each other for ever."""
        self.arrival.persisted.append(self.store.persist(rows))
        self.arrival.persisted[-1].count()
        return self.arrival.persisted[-1]

    def _small(self, judged: Judged) -> bool:
        return self.arrival.small and is_small(self.arrival.records, judged.rows_read)

    # -- commit ----------------------------------------------------------------------------------

    def commit(
        self, results: Results, run_id: str | None = None, recorded_at: int | None = None
    ) -> Receipt:
        """Gate, state, commit; then view and quarantine.

        Args:
            run_id: what the commit says of whose run it is; ``recorded_at`` likewise, see ``recorded``.

        Raises:
            ContractError: results break the schema's checks, or too large a share of a source's
                records is bad; nothing has been committed.
            RefusedRecordsError: an operator cannot take some records, for example since its buffer is
                full; nothing is lost, the next run takes the same records.
            ConcurrentRunError: another run won.
            SourceError: the source could not be read to its end.
        """
        arrival, store = self.arrival, self.store
        if arrival.empty:
            return Receipt(None, None)
        with self._explained():
            with store.planner_settings(self._small(results.judged)):
                rows, recorded_at = assign_system_times(results.rows, arrival, store, recorded_at)
                rows = store.persist(rows)
                arrival.persisted.append(rows)
                passed, commit = self._prepare(store, rows, results, run_id, recorded_at)
                first = by_partition(arrival.before.next_offset, "long")
                in_place = places_of(arrival, self.processor, passed)
                new = self.processor.produce(rows, first, passed.single_task, in_place)
                if RECORDED_AT not in new.columns:
                    new = new.withColumn(RECORDED_AT, F.timestamp_micros(F.lit(commit.recorded_at)))
                head = store.commit(new, commit, passed.counts[Outcome.APPLIED])
            # What a projection makes of many held rows need not be read again. Few are held by other
            # settings than the view is written by: a plan made by ones does not run by the others.
            again = in_place is not None and in_place.complete and not arrival.few_records
            at = store.catch_up(head, written=new if again else None)
        self._unpersist()
        store.forget(arrival.previous)
        outcomes = results.judged.by_partition or passed.by_partition
        return Receipt(head.commit, head.version, at.base and at.base.version, outcomes)

    @contextmanager
    def _explained(self) -> Generator[None]:
        """Within it what goes wrong is told as the source's where it is, and nothing stays held."""
        try:
            yield
        except BaseException as error:
            self._unpersist()
            if not isinstance(error, PySparkException | Py4JJavaError):
                raise
            gone = explained(self.arrival, error)
            if gone is None:
                raise
            raise gone from error

    def _unpersist(self) -> None:
        while self.arrival.persisted:
            self.store.unpersist(self.arrival.persisted.pop())

    def _prepare(
        self, store: Store, rows: DataFrame, results: Results, run_id: str | None, at: int | None
    ) -> tuple[Passed, Commit]:
        """Looks at what is to be committed, and writes what belongs to it beside the log."""
        arrival, processor = self.arrival, self.processor
        before, judged = arrival.before, results.judged
        passed = gate(processor, rows, by_partition(before.stream_time))
        processor.check(passed.by_partition)
        counts = processor.counts(arrival.new_records - arrival.erased, passed.counts, judged.counts)
        counts |= {"erased": arrival.erased} if arrival.erased else {}
        state = processor.state_after(rows, results.context)
        buffer = processor.fullness(state)
        gauges = dict(arrival.gauges)
        if buffer is not None:
            full = {r[PARTITION]: (r["records"], r["bytes"]) for r in buffer.collect()}
            gauges |= processor.gauges(full, before.gauges, before.batch)
        position: dict[str, Any] = {"taken": arrival.taken, "inputs": ends_of(arrival)}
        if arrival.source is not None:
            position = of_source(arrival, rows, passed, counts)
        store.progress.done(f"decided: {in_words(counts)}")
        if state is not None:
            store.stage_state(arrival.attempt, state)
        refused = any(passed.counts[outcome] for outcome in processor.quarantined_outcomes)
        if refused:
            stage_rejected(store, arrival.attempt, rows, processor.quarantined_outcomes)
        consumed = None if arrival.source is None else arrival.source.consumed()
        if consumed is not None:
            store.stage_files(arrival.attempt, consumed)
        told = arrival.source is not None and RECORDED_AT in rows.columns
        recorded_at, ahead = system_time_by_clock(before, at, store.progress)
        steps = steps_of(rows, before, recorded_at) if told else []
        return passed, document(
            arrival,
            passed,
            counts,
            judged.by_partition or passed.by_partition,
            stream_time=arrival.stream_time if processor.has_stream_time else passed.times,
            gauges=gauges,
            strategy=judged.strategy,
            state=state is not None,
            rejected=refused,
            run_id=run_id,
            recorded_at=recorded_at,
            ahead=ahead,
            steps=steps,
            stepped=before.stepped or bool(steps),
            **position,
        )


def run_once(
    node: Stream,
    stores: Stores,
    source: Source | None = None,
    run_id: str | None = None,
    recorded_at: int | None = None,
    **asked: Any,
) -> Receipt:
    """A whole run: what the ops of an asset do, one after another.

    Args:
        source, asked: see :meth:`Run.pin`.
        run_id, recorded_at: see :meth:`Run.commit`.
    """
    run = Run.pin(node, stores, source, **asked)
    return run.commit(run.operate(run.read()), run_id, recorded_at)
