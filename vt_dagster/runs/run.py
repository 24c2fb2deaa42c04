"""One run of an asset: pin, read, operate, commit, follow. No Dagster.

All callers run assets this way: ops, replay, the test driver, conformance, benchmarks. The asset's
``Processor`` defines the operation; its ``Store`` holds the tables.

The order of writes is the protocol: first, under the attempt's name, rejected records, state and
consumed files; then the log (**the commit**); then view and quarantine, which are derived from it. So a
run can be killed at any point and started again.
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
from vt_dagster.core.processor import Input, Processor, RunContext
from vt_dagster.core.processor_registry import processor_of
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
from vt_dagster.spark.settings import is_small
from vt_dagster.storage.commit_log import Commit
from vt_dagster.storage.view import in_words
from vt_dagster.topology.model import Stream

_LAST = datetime.max.replace(tzinfo=timezone.utc)


@dataclass(frozen=True)
class Run:
    """One run of an asset. ``Run.pin(...)`` starts it; then ``read``, ``operate``, ``commit``.

    Args:
        arrival: the pinned records and tables.
        stores: returns the tables of the asset and of its inputs.
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
        """Completes what a killed run left, then pins the records and tables of this run.

        Args:
            source: source to read instead of the asset's own; None = the node's own.
            asked: arguments of the source's ``pin``, or of ``from_logs`` for an operator.

        Raises:
            SourceError: the source does not exist, or the asset has none.
            RefusedRecordsError: the history of a table that records have waited for no longer covers
                their times.
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
        """Returns the arrival with the operator's own stream time and the lateness of its records."""
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
        """Returns the run's input: a source's prepared records, or the log rows of each consumed input.

        Args:
            now: timestamps may exceed it by the source's ``max_clock_skew`` at most; None = this
                machine's clock.
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
        """Returns the operator's results with their counts.

        The results are lazy, with three exceptions. For a temporal lookup, one job finds which versions
        are needed. If few records meet a large table, or records are read several times, they are
        computed first. If a versioned table takes many records of a source, they are persisted, and one
        job computes the stream-time bounds.

        Args:
            read: the result of :meth:`read`, perhaps transformed by an op in between.
        """
        context, processor = self._context(with_tables=True), self.processor
        if self.arrival.empty:
            return Results(nothing_of(self.node, self.store.spark), context)
        require_deterministic_functions(self.arrival, self.store)
        if self.arrival.source is not None and (
            processor.bounded or reads_twice(read[0], self.arrival)
        ):
            # The records are used twice, and reading them from the source takes most of the time.
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
        """Returns the records that a join with a grace period emits or buffers: the first half of
        :meth:`operate`. They are computed, and persisted until the commit; lazy in an empty run.

        Returns:
            new and previously buffered records, with ``_outcome``.
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
        """Joins the records of :meth:`buffer` with the table as of their times: the second half.

        Raises:
            ContractError: the number of records of an outcome differs from that of :meth:`buffer`.
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
        """Persists rows and computes them at once: two lazy cache builds of Spark can deadlock."""
        self.arrival.persisted.append(self.store.persist(rows))
        self.arrival.persisted[-1].count()
        return self.arrival.persisted[-1]

    def _small(self, judged: Judged) -> bool:
        return self.arrival.small and is_small(self.arrival.records, judged.rows_read)

    # -- commit ----------------------------------------------------------------------------------

    def commit(
        self, results: Results, run_id: str | None = None, recorded_at: int | None = None
    ) -> Receipt:
        """Checks the results, stages state, and commits; then writes view and quarantine.

        Args:
            run_id: id of the run for the commit.
            recorded_at: system time of the commit, epoch microseconds; None = assign at commit, see
                ``next_system_time``.

        Raises:
            ContractError: results break the schema's checks, or too large a share of a source's
                records is bad; nothing was committed.
            RefusedRecordsError: an operator cannot take some records, for example because its buffer is
                full; nothing is lost, the next run takes the same records.
            ConcurrentRunError: another run committed first.
            SourceError: the source could not be read completely.
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
            # A projection of many persisted rows need not be read back from the log. Few rows are
            # persisted under other planner settings than the view uses, and such plans do not mix.
            again = in_place is not None and in_place.complete and not arrival.few_records
            at = store.catch_up(head, written=new if again else None)
        self._unpersist()
        store.forget(arrival.previous)
        outcomes = results.judged.by_partition or passed.by_partition
        return Receipt(head.commit, head.version, at.base and at.base.version, outcomes)

    @contextmanager
    def _explained(self) -> Generator[None]:
        """Replaces Spark errors that an input causes by clearer ones, and unpersists on failure."""
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
        """Checks the results, stages files beside the log, and returns the commit document."""
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
    """Runs an asset once: the steps of its ops, one after another.

    Args:
        source, asked: see :meth:`Run.pin`.
        run_id, recorded_at: see :meth:`Run.commit`.
    """
    run = Run.pin(node, stores, source, **asked)
    return run.commit(run.operate(run.read()), run_id, recorded_at)
