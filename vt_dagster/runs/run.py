"""One run of an asset: pin, read, operate, commit, follow. No Dagster.

All callers run assets this way: ops, replay, the test driver, conformance, benchmarks. A run carries
out the plan of the asset's ``Processor``, which makes the rows; the ``Store`` holds the tables.

The order of writes is the protocol: first, under the attempt's name, rejected records, state and
consumed files; then the log (**the commit**); then view and quarantine, which are derived from it. So a
run can be killed at any point and started again.

**User-defined functions** must be deterministic: a first run checks it before it writes anything.
Spark's own nondeterministic functions are refused when definitions load, see
``vt_dagster.topology.expressions``. Only Spark knows how a registered function was declared.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta, timezone
from functools import partial, wraps
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

from py4j.protocol import Py4JJavaError
from pyspark.errors import AnalysisException, PySparkException
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import StructField, StructType, TimestampType

from vt_dagster.columns import (
    ARRIVAL,
    AT_ONCE,
    EMITTED_AT,
    INPUT,
    INPUT_OFFSET,
    INPUT_PARTITION,
    OUTCOME,
    PARTITION,
    RECORDED_AT,
    TIMESTAMP,
    TURN,
    VALID_FROM,
    VALID_TO,
)
from vt_dagster.core import table_store as of_table
from vt_dagster.core.arrival_order import (
    CHUNK,
    InPlace,
    Outcome,
    by_partition,
    by_reference,
    chunk_level,
    number,
    number_by_blocks,
    number_in_place,
)
from vt_dagster.core.as_of_join import JoinStrategy, Tiles, level_for, max_versions_per_tile
from vt_dagster.core.log_columns import log_columns, log_schema, view_schema
from vt_dagster.core.processor import Input, Lookup, Processor, RunContext, RunPlan, TimePolicy
from vt_dagster.core.processor_registry import processor_of
from vt_dagster.errors import ContractError, TopologyError, counted
from vt_dagster.runs.commit_document import (
    document,
    ends_of,
    of_source,
    places_of,
    stage_rejected,
    system_time_by_clock,
)
from vt_dagster.runs.gate import GateResult, gate, quarantine_broken
from vt_dagster.runs.pin import (
    Arrival,
    Store,
    Stores,
    clearer_error,
    from_logs,
    from_source,
    require_covered,
    require_inputs_unchanged,
)
from vt_dagster.runs.read_source import (
    first_changes_of,
    reads_twice,
    records_of,
    sentence_of,
    state_of,
    with_table_history,
    without_spark_logs,
)
from vt_dagster.runs.record_times import (
    TableSystemTimeHistory,
    advance_stream_time,
    assign_system_times,
    bounds_of,
    recorded_if,
    steps_of,
    watermark_columns,
)
from vt_dagster.sources.base import Comparing, Pinned, Source
from vt_dagster.spark.settings import is_small
from vt_dagster.storage.commit_log import Commit
from vt_dagster.storage.spark_reader import Head, at_or_after
from vt_dagster.storage.spark_reader import before as consumed_before
from vt_dagster.storage.view import are_few_keys, in_words
from vt_dagster.topology.expressions import Expression, expressions_of, unknown_functions
from vt_dagster.topology.model import Stream, Table, VersionedTable
from vt_dagster.topology.schema import refuse_types

# Results


@dataclass(frozen=True)
class Judged:
    """Counts of a run's records with their outcome, before the lookup in a table.

    Args:
        counts: number of records by outcome.
        by_partition: these counts per partition.
        span: smallest and largest timestamp of the records to look up; None = none, epoch microseconds.
        rows_read: approximate number of table rows that the run reads.
        strategy: the strategy of the lookup, with the reason.
    """

    counts: dict[str, int] = field(default_factory=dict[str, int])
    by_partition: dict[int, dict[str, int]] = field(default_factory=dict[int, dict[str, int]])
    span: tuple[int, int] | None = None
    rows_read: int = 0
    strategy: str = ""


@dataclass(frozen=True)
class Results:
    """The results of an operator before the commit: rows with their outcome, lazy."""

    rows: DataFrame
    context: RunContext
    judged: Judged = field(default_factory=Judged)


@dataclass(frozen=True)
class Receipt:
    """The outcome of a run: its commit, or None if there were no new records.

    Args:
        outcomes: number of records per outcome, by partition.
    """

    commit: Commit | None
    log_version: int | None
    view_version: int | None = None
    outcomes: Mapping[int, Mapping[str, int]] = field(default_factory=dict[int, dict[str, int]])


def count_outcomes(records: DataFrame) -> Judged:
    """Counts judged records by outcome and partition, and finds the time span of those to look up."""
    found = (
        records.groupBy(PARTITION, OUTCOME)
        .agg(
            F.count(F.lit(1)).alias("records"),
            F.min(F.unix_micros(TIMESTAMP)).alias("oldest"),
            F.max(F.unix_micros(TIMESTAMP)).alias("newest"),
        )
        .collect()
    )
    counts, homes = dict[str, int](), dict[int, dict[str, int]]()
    for row in found:
        counts[row[OUTCOME]] = counts.get(row[OUTCOME], 0) + row["records"]
        homes.setdefault(row[PARTITION], {})[row[OUTCOME]] = row["records"]
    sought = [row for row in found if row[OUTCOME] in (Outcome.APPLIED, Outcome.LATE)]
    span = None
    if sought:
        span = min(row["oldest"] for row in sought), max(row["newest"] for row in sought)
    return Judged(counts, homes, span)


def require_same(node: Stream, given: Mapping[str, int], got: Mapping[str, int]) -> None:
    """Refuses records of a grace buffer if an op in between added, dropped or changed any.

    Args:
        given, got: number of records by outcome, from the buffer and at the join.

    Raises:
        ContractError: the counts differ.
    """
    if given != got:
        raise ContractError(
            f"{node.name}: expected the records of its grace buffer ({in_words(given)}), got "
            f"({in_words(got)}); pass both outputs of the buffer to the join unchanged, and filter the "
            "stream before the buffer or the result after the join"
        )


# Join strategy


VERSIONS_OF_A_TASK = 200_000
"""Versions that a task of the tiled strategy holds in memory: more would not fit a CPU cache."""

_FEW_VERSIONS, _FEW_OF_A_KEY = 20_000, 100
_FEW_IN_A_TILE = 128


def join_strategy(
    table: Table, view: DataFrame, few_records: bool, versions: int, span: tuple[int, int]
) -> tuple[JoinStrategy, str]:
    """Returns the strategy for one run, and the reason as text.

    Args:
        few_records: whether the run has few records.
        versions: upper bound of the number of versions in the view.
        span: smallest and largest timestamp of the records to join, epoch microseconds.
    """
    if not isinstance(table, VersionedTable):
        return "sorted", ""
    if few_records:
        return "sorted", "sorted: the run has few records"
    if versions <= _FEW_VERSIONS:
        counts = view.groupBy(*table.key).count()
        most = counts.agg(F.max("count")).collect()[0][0] or 0
        if most <= _FEW_OF_A_KEY:
            many = counted(versions, "version")
            reason = f"broadcast: the table has at most {many}, and {most} per key"
            return "broadcast", reason
    tiles, most = tiles_of(view, key=table.key, first=span[0], last=span[1])
    if most > _FEW_IN_A_TILE:
        return "sorted", (
            f"sorted: {most:,} versions of a key may be in one tile of time, more than {_FEW_IN_A_TILE}"
        )
    return tiles, f"tiled: at most {counted(most, 'version')} of a key in a tile of time"


def tiles_of(
    versions: DataFrame, *, key: Sequence[str], first: int, last: int, crowd: int = _FEW_IN_A_TILE // 2
) -> tuple[Tiles, int]:
    """Returns tiles of time for rows from ``first`` to ``last``, and the maximum number of versions of
    a key in one tile.

    Plan: two jobs, an aggregate of the versions and one by key and tile. If a tile has more than
    ``crowd`` versions of a key, four jobs: each bucket of keys then gets a tile length by the average
    lifetime of its versions. After that, a tile is crowded only if a key changes much more often at
    some times than at others, or than the other keys of its bucket.
    """
    span = {"first": first, "last": last}
    level, count = level_for(versions, key=(), **span).collect()[0]
    spark = cast(Any, versions.sparkSession)
    tasks = int(spark.conf.get("spark.sql.shuffle.partitions"))
    tasks = max(tasks, math.ceil(1.5 * count / VERSIONS_OF_A_TASK))

    def tiles(level: int | DataFrame) -> tuple[Tiles, int]:
        places = max(1, count // 8)
        found = max_versions_per_tile(versions, key=key, level=level, **span, places=places).collect()
        return Tiles(level, first, last, tasks), 1 + (found[0]["most"] or 0)

    alike = tiles(level or 0)
    # Spark's hash ignores collation: keys that are equal under a collation may be in two buckets.
    collated = any("collate" in versions.schema[k].dataType.simpleString() for k in key)
    if alike[1] <= crowd or collated:
        return alike
    # At most one row per bucket, without user data: collected, so that Spark does not compute it twice.
    levels = level_for(versions, key=key, **span).drop("versions")
    return tiles(spark.createDataFrame(levels.toArrow()))


# Determinism of user-defined functions


_REFUSED = "AGGREGATE_FUNCTION_WITH_NONDETERMINISTIC_EXPRESSION"
_ALIAS = re.compile(r"\s+as\s+(?:\w+|`[^`]+`)\s*", re.IGNORECASE)
_CALL = re.compile(r"\s*(?:count|sum|min|max|avg|mean)\s*\((.*)\)\s*", re.IGNORECASE | re.DOTALL)


def require_deterministic_functions(arrival: Arrival, store: Store) -> None:
    """Refuses an asset's first run if an expression calls functions that Spark marks as
    nondeterministic. Analyses only expressions with functions that are not Spark's own; runs no job.

    Raises:
        TopologyError: names the expression and the functions.
    """
    node = arrival.node
    if arrival.previous is not None:
        return
    for one in expressions_of(node):
        called = unknown_functions(one.text)
        fault = _fault(_columns(node, store.spark, one), one) if called else None
        # Any other fault of the expression is left to the run that computes it.
        if fault is not None and fault.getCondition() == _REFUSED:
            raise TopologyError(
                f"{node.name}: expected {one.setting} to give the same value whenever a row is "
                f"computed, got {one.text!r}, where Spark marks {sorted(called)} as "
                "nondeterministic: a run that is repeated, a replay or a restatement would give other "
                "rows; nothing was written. Register the function without asNondeterministic() if it "
                "gives the same value for the same arguments"
            )


def _columns(node: Stream, spark: SparkSession, one: Expression) -> DataFrame:
    """Returns an empty DataFrame with the columns that an expression may name."""
    operator: Any = node.operator
    if one.setting == "dump_time":
        return spark.createDataFrame([], node.schema)
    if not one.of_inputs:
        return _empty(node, spark)
    if hasattr(operator, "left") and one.setting == "select":
        left, right = _empty(operator.left, spark), _empty(operator.right, spark)
        return left.alias("left").crossJoin(right.alias("right"))
    return _empty(node.inputs[0], spark)


def _empty(node: Stream, spark: SparkSession) -> DataFrame:
    there = {name.lower() for name in node.schema.names}
    times = [n for n in (TIMESTAMP, VALID_FROM, VALID_TO) if n not in there]
    fields = [*node.schema.fields, *(StructField(n, TimestampType()) for n in times)]
    return spark.createDataFrame([], StructType(fields))


def _fault(rows: DataFrame, one: Expression) -> AnalysisException | None:
    """Returns the error of Spark about an expression inside an aggregate, which must be deterministic;
    None = it accepts it."""
    text = one.text
    aggregate = _CALL.fullmatch(text) if one.setting == "aggregates" else None
    alias = next((m for m in _ALIAS.finditer(text) if m.end() == len(text)), None)
    expression = aggregate[1] if aggregate else text[: alias.start()] if alias else text
    if one.setting == "predicate":
        expression = f"not ({expression})"
    elif one.setting == "dump_time":
        expression = f"try_cast(({expression}) as timestamp)"
    try:
        with without_spark_logs():
            _ = rows.agg(F.count(F.expr(expression))).schema
    except AnalysisException as error:
        return error
    return None


def refused_expression(
    node: Stream, spark: SparkSession, error: AnalysisException
) -> TopologyError | None:
    """Returns an error that names the expression of a node that Spark refuses; None if no expression
    has the same fault as the given error."""
    about = _kind_of(error)
    for one in expressions_of(node):
        rows = _columns(node, spark, one)
        fault = _fault(rows, one)
        if fault is not None and _kind_of(fault) == about:
            return TopologyError(
                f"{node.name}: expected {one.setting} to be SQL over the columns {rows.columns}, got "
                f"{one.text!r}, which Spark refuses: {sentence_of(fault)}. Nothing was committed; "
                "correct it"
            )
    return None


def _kind_of(error: AnalysisException) -> tuple[str, str]:
    """Returns the kind of an error of Spark, and the unknown name in it, if that is the error."""
    kind = (error.getCondition() or "").partition(".")[0]
    return kind, (error.getMessageParameters() or {}).get("objectName", "")


# Run


_LAST = datetime.max.replace(tzinfo=timezone.utc)

P = ParamSpec("P")
R = TypeVar("R")


def _with_clear_errors(
    step: Callable[Concatenate[Run, P], R],
) -> Callable[Concatenate[Run, P], R]:
    """Makes a step of a run replace Spark's errors by clearer ones. These name the input that causes
    the error, or the expression that Spark refuses. If a step fails, persisted rows are released. Each
    step may compute rows."""

    @wraps(step)
    def named(self: Run, *args: P.args, **given: P.kwargs) -> R:
        try:
            return step(self, *args, **given)
        except BaseException as error:
            with suppress(Exception):  # the session may be gone
                self.unpersist()
            if isinstance(error, AnalysisException):
                refused = refused_expression(self.node, self.store.spark, error)
                if refused is not None:
                    raise refused from None
            if not isinstance(error, PySparkException | Py4JJavaError):
                raise
            clear = clearer_error(self.arrival, error)
            if clear is None:
                raise
            raise clear from error

    return named


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

    @property
    def plan(self) -> RunPlan:
        """The plan of this run. Before the run's watermarks are known, inputs may be read less far
        back."""
        return self.processor.plan(self.arrival.times)

    # -- pin -------------------------------------------------------------------------------------

    @classmethod
    def pin(
        cls,
        node: Stream,
        stores: Stores,
        source: Source | None = None,
        before_spark: Callable[[Arrival], None] | None = None,
        **pin_arguments: Any,
    ) -> Run:
        """Completes what a killed run left, then pins the records and tables of this run.

        Args:
            source: source to read instead of the asset's own; None = the node's own.
            before_spark: is called with the records, if there are any, before the pin starts Spark, as
                it does for operators with a stream time of their own.
            pin_arguments: arguments of the source's ``pin``, or of ``from_logs`` for an operator.

        Raises:
            SourceError: the source does not exist, or the asset has none.
            RefusedRecordsError: the history of a table that records have waited for no longer covers
                their times.
        """
        store = stores(node)
        at = store.catch_up()
        if node.operator is None:
            arrival = from_source(node, store, at, source, **pin_arguments)
        else:
            arrival = from_logs(node, store, at, stores, **pin_arguments)
        run = cls(arrival, stores)
        if arrival.empty:
            return run
        if before_spark is not None:
            before_spark(arrival)
        if node.operator is None:
            return run
        if not pin_arguments.get("accept_not_ready"):
            require_covered(arrival, stores)
        policy = run.plan.stream_time
        return run if policy is None else run._with_stream_time(policy)

    @_with_clear_errors
    def _with_stream_time(self, policy: TimePolicy) -> Run:
        with self._settings_for(0):
            inputs, context, spark = self._inputs(self.read()), self._context(), self.store.spark
            arrival = advance_stream_time(self.arrival, policy, inputs, context, spark)
        return replace(self, arrival=arrival)

    # -- read ------------------------------------------------------------------------------------

    @_with_clear_errors
    def read(self, now: datetime | None = None) -> list[DataFrame]:
        """Returns the run's input: a source's prepared records, or the log rows of each consumed input,
        from where the plan reads them again.

        Args:
            now: timestamps may exceed it by the source's ``max_clock_skew`` at most; None = this
                machine's clock.
        """
        arrival, plan, logs = self.arrival, self.plan, list[DataFrame]()
        if arrival.source is not None:
            return [self._records(arrival.source, now)]
        for node in plan.consumed:
            store, head = self.stores(node), arrival.inputs.get(node.name)
            if head is None:
                logs.append(store.spark.createDataFrame([], log_schema(node)))
                continue
            start, after = arrival.before.inputs.get(node.name, {}), plan.rescan_from(node.name)
            if node.name not in arrival.taken and (after is None or not start):
                log = store.log({}, head).limit(0)
            else:
                log = store.log(start, head, after, consumed=self._consumed(node))
            logs.append(recorded_if(plan.uses_system_time, log))
        arrival.logs.extend(logs)
        return logs

    def _consumed(self, node: Stream) -> int:
        """Returns the last batch of an input's log that earlier runs have consumed; 0 = none, or
        unknown."""
        then = self.arrival.before.consumed.get(node.name)
        return 0 if then is None else then.batch

    def _records(self, source: Pinned, now: datetime | None) -> DataFrame:
        latest, now = None, now or datetime.now(timezone.utc)
        if source.max_clock_skew is not None and source.max_clock_skew < _LAST - now:
            latest = int((now + source.max_clock_skew).timestamp())
        with self._settings_for(self.arrival.view_rows):
            return records_of(self.arrival, source, self.store, latest)

    def _inputs(self, logs: Sequence[DataFrame]) -> list[Input]:
        """Returns the rows that were read, with the tables that the plan reads."""
        arrival, plan = self.arrival, self.plan
        if arrival.source is not None:
            return [Input(rows) for rows in logs]
        since = self._oldest_change(logs)
        found: list[Input] = []
        for node, rows in zip(plan.consumed, logs, strict=True):
            start = arrival.before.inputs.get(node.name, {})
            table = earlier = None
            times = dict[int, int]()
            # In a first run, the changes contain every row of the table: no table is needed.
            if start and plan.reads_tables and node.name in arrival.tables:
                store, at = self.stores(node), arrival.tables[node.name]
                table = store.current_at(at) if since is None else store.view_at(at, since)
                if since is not None and self._is_small(at.reach(since)):
                    # Settings for few rows have one task read them anyway: now nothing is shuffled.
                    table = table.coalesce(1)
                table, times = table.drop(RECORDED_AT), at.stream_time
            head = arrival.inputs.get(node.name)
            if start and head is not None and plan.rescan_from(node.name) is not None:
                # Parquet files without new rows are not read again for these.
                new = at_or_after(start, head.commit.next_offset)
                earlier, rows = rows.where(consumed_before(start)), rows.where(new)
            count, read = arrival.records_of(node.name), arrival.tables.get(node.name)
            few, few_keys = count <= CHUNK, read is not None and are_few_keys(read.reach(), count)
            most = None
            if plan.counts_keys_of == node.name and few and not start and not arrival.single_task:
                of_key = rows.groupBy(*node.key).count()
                most = of_key.agg(F.coalesce(F.max("count"), F.lit(0))).collect()[0][0]
            found.append(Input(rows, table, earlier, few, times, few_keys, most))
        return found

    def _oldest_change(self, logs: Sequence[DataFrame]) -> int | None:
        """Returns the time after which the run needs the tables' versions, epoch microseconds: one
        microsecond before its oldest change, because that change may end a version that is valid until
        then.

        None = the run needs current rows only, or none: in a first run every row is new.
        """
        arrival, before, plan = self.arrival, self.arrival.before, self.plan
        if not plan.reads_versions or not before.inputs:
            return None
        found: list[int | None] = []
        for node, rows in zip(plan.consumed, logs, strict=True):
            if node.name not in arrival.taken:
                continue
            start, head = before.inputs.get(node.name, {}), arrival.inputs[node.name]
            moment = None
            if any(rows is read for read in arrival.logs):  # no op has changed their times
                moment = self.stores(node).oldest(start, head, self._consumed(node))
            if moment is None:
                moment = rows.agg(F.min(F.unix_micros(TIMESTAMP))).collect()[0][0]
            found.append(moment)
        known = [moment for moment in found if moment is not None]
        return min(known) - 1 if known else None

    def _context(self, with_tables: bool = False) -> RunContext:
        """Returns the context of the run.

        Args:
            with_tables: False = read no table, for calls before the operator.
        """
        arrival, plan, store, before = self.arrival, self.plan, self.store, self.arrival.before
        view = state = None
        if with_tables and arrival.previous is not None:
            state = state_of(arrival, store)
            own = isinstance(self.node, Table) and plan.reads_own_table
            view = store.current() if own and not arrival.looks_up_own_rows else None
            view = None if view is None else view.drop(RECORDED_AT)
        since = plan.corrects_after
        reads_quarantine = with_tables and since is not None and plan.quarantined_outcomes
        persists = arrival.few_records_many_rows or plan.persists_rows
        there = with_tables and arrival.previous is not None
        return RunContext(
            persist_rows=self._persist if with_tables and persists else None,
            look_up=self._look_up_own_rows if there and arrival.looks_up_own_rows else None,
            rows_of_keys=self._with_rows_of_keys if there and self._corrects_few else None,
            state=state,
            view=view,
            stream_time=by_partition(before.stream_time),
            stream_time_after=by_partition(arrival.stream_time),
            emitted_up_to=by_partition(before.emitted_up_to),
            emitted_up_to_after=by_partition(arrival.emitted_up_to),
            bounds=arrival.bounds,
            none_late=arrival.none_late,
            watermarks=watermark_columns(before.watermarks),
            watermarks_after=watermark_columns(arrival.watermarks),
            since=since,
            refused=store.quarantine() if reads_quarantine else None,
            first_changes=first_changes_of(arrival, store) if with_tables else None,
        )

    # -- operate ---------------------------------------------------------------------------------

    @_with_clear_errors
    def operate(self, read: Sequence[DataFrame]) -> Results:
        """Returns the operator's results with their counts.

        The results are lazy, with three exceptions. For a temporal lookup, one job finds which versions
        are needed. If few records meet a large table, or records are read several times, they are
        computed first. If a versioned table takes many records of a source, they are persisted, and one
        job computes the stream-time bounds.

        Args:
            read: the result of :meth:`read`, perhaps transformed by an op in between.
        """
        context = self._context(with_tables=True)
        if self.arrival.empty:
            return self._nothing(context)
        require_deterministic_functions(self.arrival, self.store)
        if self.arrival.source is not None:
            read, context = self._prepared(read, context)
        inputs = self._inputs(read)
        with self._settings_for(self._own_rows):
            with self._settings_to_judge():
                judged = self.processor.judge(inputs, context)
            if judged is None:
                return Results(self.processor.results(inputs, context), context)
        return self._joined(judged, context)

    def _nothing(self, context: RunContext) -> Results:
        """Returns the empty results of a run without records."""
        empty = self.store.spark.createDataFrame([], log_schema(self.node))
        places = {
            c: F.lit(0)
            for c in (ARRIVAL, INPUT, INPUT_PARTITION, INPUT_OFFSET, TURN, EMITTED_AT, AT_ONCE)
        }
        return Results(empty.withColumns({**places, OUTCOME: F.lit(Outcome.APPLIED)}), context)

    def _prepared(
        self, read: Sequence[DataFrame], context: RunContext
    ) -> tuple[Sequence[DataFrame], RunContext]:
        """Returns the records of a source as its processor takes them: with the values that the source
        omits, and with broken records marked. The context gets the bounds of their stream time."""
        table_time = self.plan.table_time
        if self.node.unique_by and not self.arrival.single_task:
            # Their stream time takes a pass over the records of its own.
            read = [self._persist(rows) for rows in read]
        if table_time is not None or reads_twice(read[0], self.arrival):
            # The records are used twice, and reading them from the source takes most of the time.
            with self._settings_for(self.arrival.view_rows):
                read = [self.store.persist(rows) for rows in read]
                self.arrival.persisted.extend(read)
                rows, context = with_table_history(read[0], self.arrival, self.store, context)
                # The other plans of a run that looks up its keys are for few rows.
                read = [self._persist(rows) if self.arrival.looks_up_own_rows else rows]
        # Of a full snapshot only the changed rows are read, so the share of broken ones is not known.
        if not isinstance(self.arrival.source, Comparing):
            # After the values that a source omits are filled, and before stream time is computed.
            read = [quarantine_broken(self.node, rows) for rows in read]
        if table_time is not None:
            with self._settings_for(self.arrival.view_rows):
                before, spark = self.arrival.before.stream_time, self.store.spark
                bounds = bounds_of(table_time, self._inputs(read), before, spark)
                context = replace(context, bounds=bounds)
        return read, context

    @_with_clear_errors
    def buffer(self, read: Sequence[DataFrame]) -> DataFrame:
        """Returns the records that a join with a grace period emits or buffers: the first half of
        :meth:`operate`. They are computed, and persisted until the commit; lazy in an empty run.

        Returns:
            new and previously buffered records, with ``_outcome``.
        """
        inputs, context = self._inputs(read), self._context(with_tables=True)
        with self._settings_to_judge():
            judged = self.processor.judge(inputs, context)
        assert judged is not None
        if self.arrival.empty:
            return judged
        with self._settings_for(0):
            buffered = self._persist(judged)
            self.arrival.buffered.update(count_outcomes(buffered).counts)
        return buffered

    @_with_clear_errors
    def join(self, buffered: DataFrame) -> Results:
        """Joins the records of :meth:`buffer` with the table as of their times: the second half.

        Raises:
            ContractError: the number of records of an outcome differs from that of :meth:`buffer`.
        """
        context = self._context(with_tables=True)
        if self.arrival.empty:
            return self._nothing(context)
        results = self._joined(buffered, context)
        require_same(self.node, self.arrival.buffered, results.judged.counts)
        return results

    @contextmanager
    def _settings_to_judge(self) -> Generator[None]:
        """Sets the planner settings of the plan that judges records."""
        if not self._corrects_few:
            with self._settings_for(self._own_rows):
                yield
            return
        with self._settings_for(0), self.store.look_up_settings():
            yield

    def _settings_for(self, rows_read: int) -> AbstractContextManager[None]:
        """Returns the planner settings of jobs that read the input and this number of table rows."""
        return self.store.planner_settings(self._is_small(rows_read), self.arrival.estimated_records)

    def _is_small(self, rows_read: int) -> bool:
        return self.arrival.small and is_small(self.arrival.records, rows_read)

    @property
    def _own_rows(self) -> int:
        """How many rows of the asset's own table the operator reads, besides those that it looks up."""
        reads = self.plan.reads_own_table and not self.arrival.looks_up_own_rows
        return self.arrival.view_rows if reads else 0

    def _joined(self, records: DataFrame, context: RunContext) -> Results:
        """Joins judged records with the table's versions that are valid at their times."""
        arrival, plan, look_up = self.arrival, self.plan, self.processor.look_up
        with self._settings_for(0):
            judged = count_outcomes(records)
        table = plan.looked_up
        assert table is not None
        store, at = self.stores(table), arrival.tables.get(table.name)
        with self._settings_for(judged.rows_read):
            if at is None or at.head is None or judged.span is None:
                none = store.spark.createDataFrame([], view_schema(table))
                empty = Lookup(recorded_if(plan.uses_system_time, none), by_partition({}))
                return Results(look_up(records, empty, context), context, judged)
            since = judged.span[0] - plan.lookup_margin // timedelta(microseconds=1)
            rows = of_table.as_read(table, recorded_if(plan.uses_system_time, store.view_at(at, since)))
            rows = self.processor.answering(rows, by_partition(at.stream_time))
            span = since, judged.span[1]
            way, strategy = join_strategy(table, rows, arrival.few_records, at.total, span)
            past = None
            if plan.uses_system_time and isinstance(table, VersionedTable):
                past = TableSystemTimeHistory(table, store, at.head, self._persist)
            found = look_up(records, Lookup(rows, by_partition(at.stream_time), way, past), context)
        description = strategy if past is None else f"{strategy}; {past.description}"
        return Results(found, context, replace(judged, rows_read=at.reach(since), strategy=description))

    def _look_up_own_rows(self, records: DataFrame) -> tuple[DataFrame, DataFrame]:
        """Returns the records and the current rows of their keys in the asset's own table, both
        persisted: only this query is planned for many rows."""
        records = self._persist(records, computed=False)
        # Around the analysis too, in which Spark reads the hint to broadcast.
        with self.store.look_up_settings():
            return records, self._persist(self._rows_of_keys(records, self.node.key))

    def _with_rows_of_keys(self, records: DataFrame, own: Sequence[str]) -> tuple[DataFrame, DataFrame]:
        """Returns the records, persisted, and lazily the current rows of their keys in the asset's own
        table.

        Args:
            own: the columns of the records with the key.
        """
        records = self._persist(records, computed=False)
        return records, self._rows_of_keys(records, own)

    def _rows_of_keys(self, records: DataFrame, own: Sequence[str]) -> DataFrame:
        named = zip(own, self.node.key, strict=True)
        rows = self.store.current(records.select(*[F.col(f"`{o}`").alias(k) for o, k in named]))
        assert rows is not None
        return rows.drop(RECORDED_AT)

    @property
    def _corrects_few(self) -> bool:
        """Whether the run corrects few of many rows of the asset's own table."""
        return self.arrival.few_records_many_rows and self.plan.corrects_after is not None

    def _persist(self, rows: DataFrame, computed: bool = True) -> DataFrame:
        """Persists rows and computes them at once: two lazy cache builds of Spark can deadlock.

        Args:
            computed: whether to compute the rows at once. If not, the caller must broadcast their keys,
                which computes them in a job before that of the next cache.
        """
        self.arrival.persisted.append(self.store.persist(rows))
        if computed:
            self.arrival.persisted[-1].count()
        return self.arrival.persisted[-1]

    # -- commit ----------------------------------------------------------------------------------

    @_with_clear_errors
    def commit(
        self, results: Results, run_id: str | None = None, recorded_at: int | None = None
    ) -> Receipt:
        """Checks the results, stages state, and commits; then writes view and quarantine.

        Args:
            run_id: id of the run for the commit.
            recorded_at: system time of the commit, epoch microseconds; None = assign at commit, see
                ``next_system_time``.

        Raises:
            TopologyError: a result has a type that Delta does not have.
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
        declared = {*self.node.schema.names}
        columns = [f for f in results.rows.schema.fields if f.name in declared]
        refuse_types(StructType(columns), self.node.name)
        with self._settings_for(results.judged.rows_read):
            rows, recorded_at = assign_system_times(results.rows, arrival, store, recorded_at)
            rows = store.persist(rows)
            arrival.persisted.append(rows)
            passed, commit = self._prepare(store, rows, results, run_id, recorded_at)
            in_place = places_of(arrival, self.plan, passed)
            now, span = commit.recorded_at, results.judged.span
            new = self._numbered(rows, passed, now, in_place, span)
            same_inputs = partial(require_inputs_unchanged, self.node.name, self._inputs_read())
            head = store.commit(new, commit, passed.counts[Outcome.APPLIED], same_inputs)
        # A projection of many persisted rows need not be read back from the log. Few rows are
        # persisted under other planner settings than the view uses, and such plans do not mix.
        again = in_place is not None and in_place.complete and not arrival.few_records
        # A key of the run is in the table before it, or has a row that replaces none.
        first_rows, known = passed.first_rows, arrival.view_rows
        most_keys = None if first_rows is None else first_rows + known
        at = store.catch_up(head, written=new if again else None, most_keys=most_keys)
        self.unpersist()
        store.remove_staged_before(arrival.previous)
        outcomes = results.judged.by_partition or passed.by_partition
        return Receipt(head.commit, head.version, at.base and at.base.version, outcomes)

    def _numbered(
        self,
        rows: DataFrame,
        passed: GateResult,
        recorded_at: int,
        in_place: InPlace | None,
        span: tuple[int, int] | None,
    ) -> DataFrame:
        """Returns the log rows of the run: its results, numbered from the log's end.

        Args:
            recorded_at: system time of rows for which no source provides one, epoch microseconds.
            in_place: how they keep the order of one input log; None = they do not.
            span: their smallest and largest timestamp, epoch microseconds; None = unknown.
        """
        node, plan = self.node, self.plan
        first = by_partition(self.arrival.before.next_offset, "long")
        results = rows.where(F.col(OUTCOME) == Outcome.APPLIED)
        partitions = [p for p, some in passed.by_partition.items() if some[Outcome.APPLIED]]
        if in_place is not None and (in_place.complete or not passed.single_task):
            placed = number_in_place(results, first, in_place)
        elif passed.in_blocks:
            placed = number_by_blocks(results, first, partitions)
        else:
            level = chunk_level(passed.counts[Outcome.APPLIED], span)
            chunk = plan.chunk_of_results(passed.single_task, level)
            placed = number(results, first, plan.order.columns(), chunk, partitions)
        columns: list[str | Column] = [*log_columns(node)]
        if node.operator is None and RECORDED_AT in rows.columns:
            columns.append(RECORDED_AT)
        elif RECORDED_AT not in log_columns(node):
            now = F.timestamp_micros(by_reference(recorded_at, PARTITION))
            columns.append(now.alias(RECORDED_AT))
        return placed.select(*columns)

    def _inputs_read(self) -> list[tuple[Store, Head]]:
        """Returns the inputs of the run, each with the commit that it read."""
        tables = {name: at.head for name, at in self.arrival.tables.items() if at.head is not None}
        nodes = {up.name: up for up in self.node.inputs}
        heads = {**tables, **self.arrival.inputs}
        return [(self.stores(nodes[name]), head) for name, head in heads.items()]

    def unpersist(self) -> None:
        while self.arrival.persisted:
            self.store.unpersist(self.arrival.persisted.pop())

    def _prepare(
        self, store: Store, rows: DataFrame, results: Results, run_id: str | None, at: int | None
    ) -> tuple[GateResult, Commit]:
        """Checks the results, stages files beside the log, and returns the commit document."""
        arrival, plan = self.arrival, self.plan
        before, judged, counting = arrival.before, results.judged, plan.counts
        so_far = by_partition(before.stream_time)
        passed = gate(self.node, plan, rows, so_far, few=arrival.few_records)
        counting.check(passed.by_partition)
        counts = counting.of_run(arrival.new_records - arrival.erased, passed.counts, judged.counts)
        counts |= {"erased": arrival.erased} if arrival.erased else {}
        times = passed.times if plan.stream_time is None else arrival.stream_time
        ends = {p: max(moment, before.stream_time.get(p, moment)) for p, moment in times.items()}
        after = by_partition({**before.stream_time, **ends})
        context = replace(results.context, stream_time_after=after)
        state = self.processor.state_after(rows, context)
        buffer = counting.fullness(state)
        gauges = dict(arrival.gauges)
        if buffer is not None:
            full = {r[PARTITION]: (r["records"], r["bytes"]) for r in buffer.collect()}
            gauges |= counting.gauges(full, before.gauges, before.batch)
        position: dict[str, Any] = {"taken": arrival.taken, "inputs": ends_of(arrival)}
        if arrival.source is not None:
            position = of_source(arrival, rows, passed, counts)
        store.progress.done(f"decided: {counting.text(counts)}")
        if state is not None:
            store.stage_state(arrival.attempt, state)
        refused = any(passed.counts[outcome] for outcome in plan.quarantined_outcomes)
        if refused:
            stage_rejected(store, arrival.attempt, rows, plan.quarantined_outcomes)
        consumed = None if arrival.source is None else arrival.source.consumed()
        if arrival.source is not None and consumed is None and before.files:
            # The list of another kind of source that the asset had: for its return.
            consumed = store.consumed_files(arrival.previous)
        if consumed is not None:
            store.stage_files(arrival.attempt, consumed)
            position["files"] = True
        has_system_time = arrival.source is not None and RECORDED_AT in rows.columns
        recorded_at, ahead = system_time_by_clock(before, at, store.progress)
        steps = steps_of(rows, before, recorded_at) if has_system_time else []
        return passed, document(
            arrival,
            passed,
            counts,
            judged.by_partition or passed.by_partition,
            stream_time=times,
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
    **pin_arguments: Any,
) -> Receipt:
    """Runs an asset once: the steps of its ops, one after another.

    Args:
        source, pin_arguments: see :meth:`Run.pin`.
        run_id, recorded_at: see :meth:`Run.commit`.
    """
    run = Run.pin(node, stores, source, **pin_arguments)
    return run.commit(run.operate(run.read()), run_id, recorded_at)
