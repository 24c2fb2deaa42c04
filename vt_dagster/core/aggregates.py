"""Aggregates without windows: of tables and of streams.

A table's aggregate regroups rows: it subtracts the old row and adds the new one (KIP-914). A stream's
aggregate adds each record to its group.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar, cast

import pyarrow  # pyright: ignore[reportMissingTypeStubs]
from pyspark.sql import Column, DataFrame
from pyspark.sql import Window as W
from pyspark.sql import functions as F
from pyspark.sql.types import ArrayType, DataType, DecimalType, StructField, StructType

from vt_dagster.columns import IS_LATEST, IS_TOMBSTONE, OLD, ORDER, OUTCOME, PARTITION, TIMESTAMP, TURN
from vt_dagster.core.arrival_order import Outcome, has_key, repartitioned, union, with_columns
from vt_dagster.core.log_columns import arrow_schema, value_columns
from vt_dagster.core.processor import (
    BEFORE_ANY_RUN,
    Input,
    Processor,
    RunContext,
    RunPlan,
    RunTimes,
    folded,
    is_last,
    is_order_independent,
)
from vt_dagster.core.source_records import partition_of_key
from vt_dagster.core.stream_time import STREAM_TIME, with_stream_time
from vt_dagster.core.table_changes import over_old
from vt_dagster.core.versioned_table import is_refused, repeats_version
from vt_dagster.topology.expressions import Accumulator
from vt_dagster.topology.model import VersionedTable
from vt_dagster.topology.operators import Aggregator, StreamAggregate, TableAggregate
from vt_dagster.topology.operators.aggregates import name_of
from vt_dagster.topology.schema import as_struct
from vt_dagster.topology.version_rules import new_version_on_of

# Aggregate


pa: Any = pyarrow  # has no types

Aggregate = dict[str, Any]
_BASE, _BASE_TIME = "_base", "_base_time"
TAKE, ADD, _CHANGE = "_take", "_add", "_change"
_FIRST, _LAST, _STEP, ABSENT = "_first", "_last", "_step", "_absent"
FAILED = "AGGREGATOR_FAILED({})"
"""The text by which a run finds what an ``Aggregator`` did wrong in an error of Spark."""


def _plus(x: Column, y: Column, kind: DataType) -> Column:
    """Returns the sum of two values of a type; null counts as 0. Spark's own sum of two decimals of 38
    digits has fewer digits after the point: it is used only if the result needs all 38."""
    x, y = (F.coalesce(one.cast(kind), F.lit(0).cast(kind)) for one in (x, y))
    if not isinstance(kind, DecimalType) or kind.precision < 38 or kind.scale == 38:
        return (x + y).cast(kind)
    narrow = DecimalType(37, kind.scale)
    return F.coalesce(x.try_cast(narrow) + y.try_cast(narrow), (x + y).cast(kind))


def _least(x: Column, y: Column, kind: DataType) -> Column:
    return F.least(x, y)


def _greatest(x: Column, y: Column, kind: DataType) -> Column:
    return F.greatest(x, y)


_MERGED = {"sum": (F.sum, _plus), "min": (F.min, _least), "max": (F.max, _greatest)}


A = TypeVar("A", bound=StreamAggregate | TableAggregate, covariant=True)


class AggregateProcessor(Processor[A]):
    """What the aggregates of tables and of streams have in common.

    *Entries* are the effects of records on groups: ``group key columns, _take, _add`` (structs of an
    aggregate's inputs, null if there is no row to subtract or to add), ``timestamp, partition, ORDER,
    _turn``; those of a stream subtract nothing, and have ``_outcome`` and ``_absent`` from the start.

    The state is ``group key columns, accumulators, timestamp``: the groups after a run. An
    ``Aggregator`` has one accumulator, ``_acc``.
    """

    def aggregated(self, rows: DataFrame, context: RunContext) -> DataFrame:
        """Returns the updates of every group by count, sum and avg; without subtraction also min and
        max.

        Floating-point sums are those of one record at a time, however records are split into runs: the
        old value is subtracted before the new one is added, and the first row continues the state.

        Plan: one shuffle and sort by group, together with one row per group of the state; with
        ``per_run``, if the order of rows does not change the numbers, a hash aggregate, whose groups
        are joined with the state.

        Args:
            rows: entries whose inputs are the accumulators, with ``_outcome``; only ``applied`` ones
                change a group. ``_absent``: the group does not exist after the update, so the update
                is a tombstone.

        Returns:
            the results, with the accumulators after each, which ``state_after`` needs; with ``per_run``
            perhaps only the last update of each group.

        Source: FORMAT 4.8.3-4.8.5; kip914-aggregate-count-versioned, kip914-aggregate-sum-unversioned.
        """
        aggregates, key, once = self.operator.parsed(), self.node.key, self.operator.emit == "per_run"
        kept = aggregates.accumulators
        names = [a.name for a in kept]
        applied = F.col(OUTCOME) == Outcome.APPLIED

        def change(one: Accumulator) -> Column:
            added, taken = F.col(ADD)[one.name], F.col(TAKE)[one.name]
            if one.merge != "sum":
                return added
            return _plus(added, -taken, types[one.name].dataType)

        # Spark's types for a sum over all rows: otherwise each run would widen a decimal by a digit.
        types = rows.agg(*[_MERGED[a.merge][0](F.col(ADD)[a.name]).alias(a.name) for a in kept]).schema
        exact = is_order_independent([f.dataType for f in types])
        rows = rows if exact else _in_two_steps(rows)
        others = [F.col(f"`{c}`") for c in rows.columns if c not in (TAKE, ADD)]
        changes = rows.select(*others, *[change(a).alias(_CHANGE + a.name) for a in kept])
        merged = {_CHANGE + a.name: _MERGED[a.merge][0](_CHANGE + a.name) for a in kept}
        continued = {} if exact else {_CHANGE + a.name: a.name for a in kept if a.merge == "sum"}
        if once and exact:
            home = {TIMESTAMP: F.max(TIMESTAMP), PARTITION: F.max(PARTITION)}
            changes = folded(changes, [*key, OUTCOME], applied, merged | home)
            changes = changes.withColumn(ABSENT, F.lit(False))  # a versioned result has every update
            merged, newest, last = {c: F.col(c) for c in merged}, F.col(TIMESTAMP), applied
        else:
            in_order = W.partitionBy(*key).orderBy(*ORDER, TURN, *([] if exact else [_STEP]))
            so_far = in_order.rowsBetween(W.unboundedPreceding, W.currentRow)
            changes = with_columns(changes, {c: F.when(applied, F.col(c)) for c in merged})
            newest = F.max(F.when(applied, F.col(TIMESTAMP))).over(so_far)
            merged = {c: column.over(so_far) for c, column in merged.items()}
            last = is_last(key)
            if continued:
                changes = _with_base(changes, context.state, key, names)
                # A column, because each mention of a window function is another one in the plan.
                changes = changes.withColumn(_FIRST, F.row_number().over(in_order) == 1)
                starts = dict[str, Column]()
                for c, n in continued.items():
                    start = _plus(F.col(_BASE)[n], F.col(c), types[n].dataType)
                    starts[c] = F.when(F.col(_FIRST), start).otherwise(F.col(c))
                changes = with_columns(with_columns(changes, starts), {**merged, TIMESTAMP: newest})
                changes = changes.where(F.col(_STEP) == 1)
                merged, newest = {c: F.col(c) for c in merged}, F.col(TIMESTAMP)

        def total(one: Accumulator) -> Column:
            both = merged[_CHANGE + one.name]
            if _CHANGE + one.name not in continued:
                both = _MERGED[one.merge][1](F.col(_BASE)[one.name], both, types[one.name].dataType)
            return F.when(~F.col(ABSENT), both.cast(types[one.name].dataType)).alias(one.name)

        if not continued:
            changes = _with_base(changes, context.state, key, names)
        summed = changes.select(
            *key,
            *[total(a) for a in kept],
            F.greatest(newest, F.col(_BASE_TIME)).alias(TIMESTAMP),
            PARTITION,
            OUTCOME,
            *ORDER,
            TURN,
            ABSENT,
            last.alias(_LAST),
        )
        there = applied & ~F.col(ABSENT)
        finished = {name: F.when(there, F.expr(sql)) for name, sql in aggregates.columns}
        return summed.withColumns({**finished, IS_TOMBSTONE: F.col(ABSENT)}).drop(ABSENT)

    def accepted(self, rows: DataFrame, context: RunContext) -> DataFrame:
        """Marks the updates that a versioned result refuses: they do not change the group.

        The time of an update is the larger of its own and its group's. It is refused if that is older
        than the result's history retention. Refused updates are older than all accepted ones, so they
        are known before anything is aggregated. A group exists from its first accepted row on; before
        that, nothing is subtracted from it.

        Plan: ``with_stream_time``, then one shuffle and sort by group; none for a plain table.

        Returns:
            the rows with ``_outcome`` and ``_absent``: whether the group does not exist after the
            update; ``_take`` is null if the group does not exist before the update.

        Source: FORMAT 4.1.1, 4.2.3, 4.8.4, 4.8.6; kip889-grace-rejects-old-writes,
        kip914-aggregate-group-not-there.
        """
        node = self.node
        if not isinstance(node, VersionedTable):
            return rows.withColumns({OUTCOME: F.lit(Outcome.APPLIED), ABSENT: F.lit(False)})
        rules, state = node.version_rules, context.state
        in_order = W.partitionBy(*rules.key).orderBy(*ORDER, TURN)
        so_far = in_order.rowsBetween(W.unboundedPreceding, W.currentRow)
        timed = with_stream_time(rows, context.stream_time, chunk=self.chunk)
        held = [] if state is None else [c for c in state.columns if c.startswith("_acc")][:1]
        known = _with_base(timed, state, rules.key, held)
        # Results of a group never go back in time (kip914-aggregate-sum-unversioned).
        time = F.greatest(F.max(TIMESTAMP).over(so_far), F.col(_BASE_TIME))
        late = is_refused(time, rules, F.col(STREAM_TIME))
        known = known.withColumn(OUTCOME, F.when(late, Outcome.LATE).otherwise(Outcome.APPLIED))
        counts = F.col(ADD).isNotNull() & (F.col(OUTCOME) == Outcome.APPLIED)
        # The accumulators of a group that does not exist are null.
        kept = F.col(_BASE)[held[0]].isNotNull() if held else F.col(_BASE_TIME).isNotNull()
        before = F.max(counts).over(in_order.rowsBetween(W.unboundedPreceding, -1))
        there = kept | F.coalesce(before, F.lit(False))
        found = {TAKE: F.when(there, F.col(TAKE)), ABSENT: ~(there | counts)}
        return with_columns(known, found).select(*rows.columns, OUTCOME, ABSENT)

    def state_after(self, rows: DataFrame, context: RunContext) -> DataFrame:
        """Returns the groups after a run: the last update of each, and the groups without an update.

        Source: FORMAT 4.8.3: an empty group remains; kip914-aggregate-count-versioned.
        """
        state, key = context.state, self.node.key
        kept = [c for c in rows.columns if c in (*key, TIMESTAMP) or c.startswith("_acc")]
        last = rows.where(_LAST).select(*kept)
        if state is None:
            return last
        return union(last, state.join(last.select(*key), list(key), "left_anti"))


def _in_two_steps(rows: DataFrame) -> DataFrame:
    """Splits each update of a group that subtracts and adds into two rows, with ``_step`` 0 and 1, as
    Kafka Streams calls a subtractor before an adder; other rows have the step 1."""
    both = F.col(TAKE).isNotNull() & F.col(ADD).isNotNull()
    steps = F.explode(F.when(both, F.array(F.lit(0), F.lit(1))).otherwise(F.array(F.lit(1))))
    takes, adds = ~both | (F.col(_STEP) == 0), F.col(_STEP) == 1
    return rows.withColumn(_STEP, steps).withColumns(
        {TAKE: F.when(takes, F.col(TAKE)), ADD: F.when(adds, F.col(ADD))}
    )


def _with_base(
    rows: DataFrame, state: DataFrame | None, key: Sequence[str], names: Sequence[str]
) -> DataFrame:
    if state is None:
        base = F.struct(*[F.lit(None).alias(n) for n in names]) if names else F.lit(None)
        return rows.withColumns({_BASE: base, _BASE_TIME: F.lit(None).cast("timestamp")})
    held = F.struct(*[F.col(n) for n in names]) if names else F.lit(None)
    groups = state.select(*key, held.alias(_BASE), F.col(TIMESTAMP).alias(_BASE_TIME))
    return rows.join(groups, list(key), "left")


# Table aggregate


class TableAggregateProcessor(AggregateProcessor[TableAggregate]):
    """Aggregates a table: its entries, by SQL or by an ``Aggregator``; a versioned result may refuse
    updates."""

    def plan(self, times: RunTimes = BEFORE_ANY_RUN) -> RunPlan:
        return RunPlan(self.whole_inputs, merges=True, monotonic=True)

    def process(self, rows: list[DataFrame], inputs: Sequence[Input], context: RunContext) -> DataFrame:
        operator, chosen = self.operator, self.operator.aggregates
        if isinstance(chosen, Aggregator):
            entries = self._entries(rows[0], operator.selection().columns)
            return self._by(chosen, self.accepted(entries, context), context)
        wanted = [(a.name, a.expression) for a in operator.parsed().accumulators]
        return self.aggregated(self.accepted(self._entries(rows[0], wanted), context), context)

    def _entries(self, changes: DataFrame, inputs: Sequence[tuple[str, str]]) -> DataFrame:
        """Returns the effect of each change on groups: one row, or two if the row moves to another
        group.

        Within a group the old row is subtracted before the new one is added, as one update; of two
        groups the old one comes first (kip914-probe-aggregate-order-of-calls-versioned). An
        out-of-order change of a versioned table has no effect, nor has one that repeats its version
        (``new_version_on``). A row with a null in its group key is in no group.

        Plan: projections only.

        Args:
            inputs: (name, SQL expression) of an aggregate's inputs.

        Source: KIP-914 "Aggregations", FORMAT 4.8.1, 4.8.2, 4.8.5; kip914-aggregate-versioned.
        """
        source, group_key = self.operator.source, self.operator.keys().columns
        new_version_on = new_version_on_of(source)
        taken = changes.where(IS_LATEST) if source.versioned else changes
        taken = taken if new_version_on is None else taken.where(~repeats_version(new_version_on))
        sql = {f"_old_{n}": e for n, e in [*group_key, *inputs]}
        seen = with_columns(
            over_old(taken, source.key, value_columns(source), sql),
            {f"_new_{n}": F.expr(e) for n, e in [*group_key, *inputs]},
        )

        def struct_of(side: str, columns: Sequence[tuple[str, str]]) -> Column:
            return F.struct(*[F.col(f"{side}{n}").alias(n) for n, _ in columns])

        def grouped(side: str, there: Column) -> Column:
            for n, _ in group_key:
                there = there & F.col(f"{side}{n}").isNotNull()
            return there

        old_group, new_group = struct_of("_old_", group_key), struct_of("_new_", group_key)
        old_row, new_row = struct_of("_old_", inputs), struct_of("_new_", inputs)
        has_old = grouped("_old_", F.col(OLD).isNotNull())
        has_new = grouped("_new_", ~F.col(IS_TOMBSTONE))
        same = has_old & has_new & (old_group == new_group)

        def entry(turn: int, group: Column, take: Column, add: Column) -> Column:
            return F.struct(
                F.lit(turn).alias(TURN), group.alias("group"), take.alias(TAKE), add.alias(ADD)
            )

        nothing = F.when(F.lit(False), new_row)
        both = F.array(
            F.when(has_old & ~same, entry(0, old_group, old_row, nothing)),
            F.when(has_new, entry(1, new_group, F.when(same, old_row), new_row)),
        )
        rows = seen.select(TIMESTAMP, PARTITION, *ORDER, F.explode(both).alias("_entry"))
        flat = rows.where(F.col("_entry").isNotNull()).select(
            *[F.col("_entry.group")[n].alias(n) for n, _ in group_key],
            *[F.col("_entry")[c].alias(c) for c in (TAKE, ADD, TURN)],
            TIMESTAMP,
            PARTITION,
            *ORDER,
        )
        return flat.withColumn(PARTITION, partition_of_key(self.node.key, self.node))

    def _by(self, chosen: Aggregator, rows: DataFrame, context: RunContext) -> DataFrame:
        """Returns every update of every group, computed by user functions.

        Python functions are called row by row, in a kernel over sorted batches that holds the aggregate
        of one group at a time. Each gets a copy of the aggregate, which it may change in place. Without
        an initializer, the first row added to an empty group is its aggregate (Kafka's reduce).

        Where a function raises, or does not return a dict of the aggregate's columns or None, the query
        fails with a text of ``FAILED``.

        Plan: one shuffle and sort by group, together with one row per group of the state; Arrow batches
        through Python.

        Args:
            rows: entries, after :meth:`accepted`.

        Source: FORMAT 4.8.2-4.8.5; kip914-aggregate-reduce-sum-versioned,
        kip914-probe-aggregate-order-of-calls-unversioned.
        """
        # Plain values only: the kernel runs on Spark's workers, which need not have this package.
        initializer, adder, subtractor = chosen.initializer, chosen.adder, chosen.subtractor
        schema = None if chosen.schema is None else as_struct(chosen.schema, self.node.name)
        key = self.node.key
        known = repartitioned(_with_base(rows, context.state, key, ("_acc",)), key)
        # Python cannot detect where a group begins, because NaN != NaN there.
        first = F.row_number().over(W.partitionBy(*key).orderBy(*ORDER, TURN)) == 1
        marked = known.withColumns({_FIRST: first, _LAST: is_last(key)})
        ordered = marked.sortWithinPartitions(*key, *ORDER, TURN)
        row_type = cast(StructType, rows.schema[ADD].dataType)
        result = schema or StructType([row_type[n] for n in value_columns(self.node)])
        others = (TAKE, ADD, ABSENT, _BASE, _BASE_TIME, _FIRST)
        kept = [StructField(f.name, f.dataType) for f in ordered.schema.fields if f.name not in others]
        passed = [f.name for f in kept]

        arrow: Any = arrow_schema(StructType([StructField("_acc", result)]))
        applied_fate, failed, fields = Outcome.APPLIED, FAILED, _fields_in(result)
        starts, adds, takes = (
            name_of(one).rpartition("<locals>.")[2] for one in (initializer, adder, subtractor)
        )

        def called(name: str, function: Callable[..., Any], *given: Any) -> Aggregate | None:
            try:
                made: Any = function(*given)
            except Exception as error:
                raise ValueError(
                    failed.format(f"{name} raised {type(error).__name__}: {error}")
                ) from error
            if not isinstance(made, dict | None):
                raise TypeError(failed.format(f"{name} returned a {type(made).__name__}"))
            if more := unknown(made, fields):
                raise ValueError(
                    failed.format(f"{name} returned a dict with {', '.join(sorted(more))}")
                )
            return cast(Aggregate | None, made)

        def unknown(value: Any, known: Any, path: str = "") -> set[str]:
            """Arrow would leave out the fields that a struct lacks."""
            if isinstance(known, list) and isinstance(value, list | tuple):
                return {one for part in cast(Any, value) for one in unknown(part, known[0], path)}
            if not isinstance(known, dict) or not isinstance(value, dict):
                return set()
            of, names = cast("dict[Any, Any]", value), cast("dict[str, Any]", known)
            found = {f"{path}{field}" for field in of if field not in names}
            for field, inside in names.items():
                if inside is not None and field in of:
                    found |= unknown(of[field], inside, f"{path}{field}.")
            return found

        def typed(results: list[Aggregate | None]) -> Any:
            try:
                return pa.array(results, type=arrow.field("_acc").type)
            except (pa.ArrowException, OverflowError) as error:
                raise TypeError(failed.format(f"aggregates of another type: {error}")) from error

        def run(batches: Iterator[Any]) -> Iterator[Any]:
            acc: Aggregate | None = None
            newest: Any = None
            for batch in batches:
                results: list[Aggregate | None] = []
                times: list[Any] = []
                for row in batch.to_pylist():
                    if row[_FIRST]:
                        base, newest = row[_BASE], row[_BASE_TIME]
                        acc = None if base is None else base["_acc"]
                    if row[OUTCOME] == applied_fate:
                        # Copies, because results are written after later calls, which may change them.
                        if row[TAKE] is not None and acc is not None:
                            acc = called(takes, subtractor, row[TAKE], copy.deepcopy(acc))
                        if row[ADD] is not None:
                            if acc is None and initializer is not None:
                                acc = called(starts, initializer)
                            own = copy.deepcopy(acc)
                            acc = row[ADD] if own is None else called(adds, adder, row[ADD], own)
                        newest = row[TIMESTAMP] if newest is None else max(newest, row[TIMESTAMP])
                    results.append(acc)
                    times.append(newest)
                out = pa.RecordBatch.from_pydict({n: batch.column(n) for n in passed})
                stamp = pa.array(times, type=batch.schema.field(TIMESTAMP).type)
                at = out.schema.get_field_index(TIMESTAMP)
                out = out.set_column(at, TIMESTAMP, stamp)
                yield out.append_column("_acc", typed(results))

        made = cast(Any, ordered).mapInArrow(run, StructType([*kept, StructField("_acc", result)]))
        applied = F.col(OUTCOME) == Outcome.APPLIED
        columns = {f.name: F.when(applied, F.col("_acc")[f.name]) for f in result.fields}
        return made.withColumns({**columns, IS_TOMBSTONE: F.col("_acc").isNull()})


def _fields_in(kind: DataType) -> Any:
    """Returns the names of a struct's fields, each with those inside of its type, also in arrays; None
    for another type."""
    if isinstance(kind, ArrayType):
        inside = _fields_in(kind.elementType)
        return None if inside is None else [inside]
    if not isinstance(kind, StructType):
        return None
    return {f.name: _fields_in(f.dataType) for f in kind.fields}


# Stream aggregate


class StreamAggregateProcessor(AggregateProcessor[StreamAggregate]):
    """Aggregates a stream without windows: each record's contribution to its group.

    A record without a value or a key is dropped; one without a key after a change of key has no result.

    Source: FORMAT 4.12.4-4.12.6; merge-then-count-counts-both-and-drops-nulls,
    select-key-then-count-null-keys-vanish.
    """

    def plan(self, times: RunTimes = BEFORE_ANY_RUN) -> RunPlan:
        return RunPlan(self.whole_inputs, merges=bool(self.operator.group_key), monotonic=True)

    def process(self, rows: list[DataFrame], inputs: Sequence[Input], context: RunContext) -> DataFrame:
        operator, node = self.operator, self.node
        key = operator.keys().columns
        # A key column does not hide a record's column of the same name.
        contributions = [(a.name, a.expression) for a in operator.parsed().accumulators]
        row = F.struct(*[F.expr(sql).alias(name) for name, sql in contributions])
        nothing = Outcome.NO_RESULT if operator.rekeyed else Outcome.DROPPED
        outcome = F.when(~has_key([name for name, _ in key]), nothing)
        outcome = outcome.when(F.col(IS_TOMBSTONE), Outcome.DROPPED).otherwise(Outcome.APPLIED)
        entries = rows[0].select(
            *[F.expr(sql).alias(name) for name, sql in key],
            F.when(F.lit(False), row).alias(TAKE),
            row.alias(ADD),
            TIMESTAMP,
            PARTITION,
            IS_TOMBSTONE,
            *ORDER,
            F.lit(0).alias(TURN),
            F.lit(False).alias(ABSENT),
        )
        home = partition_of_key(node.key, node) if operator.group_key else F.col(PARTITION)
        added = entries.withColumns({OUTCOME: outcome, PARTITION: home}).drop(IS_TOMBSTONE)
        if isinstance(node, VersionedTable):
            taken = F.col(OUTCOME) == Outcome.APPLIED
            decided = self.accepted(added.where(taken).drop(OUTCOME, ABSENT), context)
            added = union(decided, added.where(~taken))
        return self.aggregated(added, context)
