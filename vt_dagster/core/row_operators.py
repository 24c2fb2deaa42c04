"""Operators on one record at a time, see ``vt_dagster.topology.operators.row_operators``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, cast

import pyarrow  # pyright: ignore[reportMissingTypeStubs]
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import BooleanType, StructField, StructType

from vt_dagster.columns import IS_TOMBSTONE, OLD, ORDER, OUTCOME, PARTITION, TIMESTAMP, TURN, VALID_TO
from vt_dagster.core.arrival_order import Outcome, has_key, micros, repartitioned, with_columns
from vt_dagster.core.log_columns import value_columns
from vt_dagster.core.processor import (
    BEFORE_ANY_RUN,
    Counts,
    Input,
    Processor,
    RunContext,
    RunCounts,
    RunPlan,
    RunTimes,
)
from vt_dagster.core.source_records import partition_of_key
from vt_dagster.core.table_changes import over_old
from vt_dagster.errors import NullArrayError
from vt_dagster.topology.model import VersionedTable
from vt_dagster.topology.operators import (
    Filter,
    FlatMapValues,
    MapValues,
    Merge,
    SelectKey,
    ToStream,
    ToTable,
)

# filter


pa: Any = pyarrow

_NEWEST, _ALIVE, _TIME, _BEFORE, _RETENTION = "_newest", "_alive", "_time", "_before", "_retention"
_REPEATED = "_repeated"


class FilterProcessor(Processor[Filter]):
    """Turns rows that do not satisfy the condition into tombstones.

    For a versioned table every record is emitted (kip914-filter-versioned). For a plain table a record
    is omitted if neither its row nor the previous row satisfies it (kip914-filter-unversioned); if the
    result is versioned, a tombstone is omitted if no version of the key precedes it there. ``old`` is
    null if the previous row does not satisfy it.

    Source: KIP-914 "Filters", FORMAT 4.2.5, 4.2.6, section 7; kip914-probe-filter-tombstones-versioned.
    """

    def plan(self, times: RunTimes = BEFORE_ANY_RUN) -> RunPlan:
        return RunPlan(self.whole_inputs, keeps_order=True)

    def process(self, rows: list[DataFrame], inputs: Sequence[Input], context: RunContext) -> DataFrame:
        operator, node = self.operator, self.node
        source, values = operator.source, value_columns(operator.source)
        passes = f"coalesce(({operator.predicate}\n), false)"  # a comment may end the predicate
        condition = f"NOT {passes}" if operator.negate else passes
        changes = rows[0].withColumn(TURN, F.lit(0))
        seen = over_old(changes, source.key, values, {"_old_passes": condition})
        passes = F.expr(condition) & ~F.col(IS_TOMBSTONE)
        old = F.when(F.col("_old_passes"), F.col(OLD))
        every = F.lit(source.versioned or node.versioned)
        goes_out = every | F.col("_passes") | F.col(OLD).isNotNull()
        outcome = F.when(goes_out, Outcome.APPLIED).otherwise(Outcome.NO_RESULT)
        kept = {v: F.when(F.col("_passes"), F.col(f"`{v}`")) for v in values}
        results = (
            seen.withColumns({"_passes": passes, OLD: old})
            .withColumns({**kept, OUTCOME: outcome, IS_TOMBSTONE: ~F.col("_passes")})
            .drop("_passes", "_old_passes")
        )
        if isinstance(node, VersionedTable) and not source.versioned:
            return _without_repeated_tombstones(results, node, context)
        return results


def _without_repeated_tombstones(
    rows: DataFrame, node: VersionedTable, context: RunContext
) -> DataFrame:
    """Omits tombstones of keys without a row in the result, if a plain table is filtered into a
    versioned one.

    The previous row is the one in the result's own store. There an omitted tombstone is not the latest
    version and does not advance stream time. Each decision depends on all earlier ones, also of other
    keys, so a kernel loops over the rows of a partition and keeps one number per key.

    Plan: one shuffle and sort by partition; Arrow batches through Python. A run that looks up the rows
    of its keys does so twice: the store looks up those of the rows that remain.

    Args:
        rows: the filtered rows; all of them are emitted.

    Returns:
        the rows; omitted ones have the outcome ``no_result``.

    Source: FORMAT 4.2.3, 4.2.5.
    """
    key, versions = node.key, context.view
    if context.look_up is not None:
        rows, versions = context.look_up(rows)
    if versions is None:
        known = rows.withColumns(
            {_NEWEST: F.lit(None).cast("long"), _ALIVE: F.lit(None).cast("boolean")}
        )
    else:
        latest = versions.where(F.col(VALID_TO).isNull()).select(
            *[F.col(f"`{k}`") for k in key],
            F.unix_micros(TIMESTAMP).alias(_NEWEST),
            (~F.col(IS_TOMBSTONE)).alias(_ALIVE),
        )
        known = rows.join(latest, list(key), "left")
    marked = known.withColumns(
        {
            _TIME: F.unix_micros(TIMESTAMP),
            _BEFORE: F.unix_micros(context.stream_time),
            _RETENTION: micros(node.history_retention),
        }
    )
    ordered = repartitioned(marked, [PARTITION]).sortWithinPartitions(PARTITION, *ORDER)
    names = (*key, PARTITION, IS_TOMBSTONE, _NEWEST, _ALIVE, _TIME, _BEFORE, _RETENTION)

    plain = _plain()

    def run(batches: Iterator[Any]) -> Iterator[Any]:
        home: Any = None
        now: int | None = None
        latest: dict[str, tuple[int | None, bool]] = {}
        for batch in batches:
            repeated: list[bool] = []
            columns = [batch.column(n).to_pylist() for n in names]
            for *own, partition, deleted, newest, alive, time, before, retention in zip(
                *columns, strict=True
            ):
                if partition != home:
                    home, now, latest = partition, before, {}
                mine = repr(plain(own))
                newest, alive = latest.get(mine, (newest, bool(alive)))
                repeated.append(deleted and not alive)
                if repeated[-1] or (now is not None and time < now - retention):
                    continue
                now = time if now is None else max(now, time)
                if newest is None or time >= newest:
                    latest[mine] = (time, not deleted)
            yield batch.append_column("_repeated", pa.array(repeated, pa.bool_()))

    schema = StructType([*ordered.schema.fields, StructField(_REPEATED, BooleanType())])
    decided = cast(DataFrame, cast(Any, ordered).mapInArrow(run, schema))
    outcome = F.when(F.col(_REPEATED), Outcome.NO_RESULT).otherwise(F.col(OUTCOME))
    return decided.withColumn(OUTCOME, outcome).select(*[F.col(f"`{c}`") for c in rows.columns])


def _plain() -> Callable[[Any], Any]:
    """Returns a function that maps values equal in Spark to one value: 0.0 and -0.0.

    It is a closure because Spark's workers, which run it, need not have this package installed.
    """

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {n: plain(v) for n, v in cast(dict[str, Any], value).items()}
        if isinstance(value, list):
            return [plain(v) for v in cast(list[Any], value)]
        return value + 0.0 if isinstance(value, float) else value

    return plain


# map_values


class MapValuesProcessor(Processor[MapValues]):
    """Computes new values for the same keys; every record is emitted, also repeated tombstones
    (kip914-probe-map-values-tombstones).

    Source: FORMAT 4.2.2, 4.2.4; kip914-versioned-inherits-through-map-values.
    """

    def plan(self, times: RunTimes = BEFORE_ANY_RUN) -> RunPlan:
        return RunPlan(self.whole_inputs, keeps_order=True)

    def process(self, rows: list[DataFrame], inputs: Sequence[Input], context: RunContext) -> DataFrame:
        source, values = self.operator.source, value_columns(self.operator.source)
        columns = [c for c in self.operator.selection().columns if c[0] not in source.key]
        changes, names = rows[0].withColumn(TURN, F.lit(0)), [name for name, _ in columns]
        before = [f"_old_{i}" for i in range(len(columns))]
        of_old = {b: sql for b, (_, sql) in zip(before, columns, strict=True)}
        seen = over_old(changes, source.key, values, of_old)
        old = F.struct(
            *[F.col(b).alias(n) for b, n in zip(before, names, strict=True)], f"{OLD}.{TIMESTAMP}"
        )
        mapped = [F.when(~F.col(IS_TOMBSTONE), F.expr(sql)).alias(name) for name, sql in columns]
        others = [c for c in changes.columns if c not in {*values, *names, OLD}]
        return seen.select(
            *[F.col(f"`{c}`") for c in others],
            *mapped,
            F.when(F.col(OLD).isNotNull(), old).alias(OLD),
            F.lit(Outcome.APPLIED).alias(OUTCOME),
        )


# flat_map_values


_MISSING, _ELEMENT = "_missing", "_element"
_NULL_ARRAYS = "null_arrays"


@dataclass(frozen=True)
class FlatMapValuesCounts(RunCounts):
    """The counts of a run, which must have no record whose array is null.

    Args:
        name: of the result; ``expression``: SQL that gives the array.
    """

    name: str
    expression: str

    def tallies(self, columns: Sequence[str]) -> dict[str, Column]:
        return {_NULL_ARRAYS: F.count_if(F.col(_MISSING))}

    def check(self, found: Mapping[int, Counts]) -> None:
        wrong = {partition: some[_NULL_ARRAYS] for partition, some in found.items()}
        wrong = {partition: n for partition, n in wrong.items() if n}
        if wrong:
            raise NullArrayError(
                f"{self.name}: expected an array for each record, got null for "
                f"{sum(wrong.values())}: {self.expression}; nothing was committed. Wrap it in "
                "coalesce(..., array()) to emit nothing for these records, and run again",
                list(wrong),
            )


class FlatMapValuesProcessor(Processor[FlatMapValues]):
    """Emits one record per element of an array, in the array's order: ``_turn`` is the index.

    A null element is a tombstone. An empty or null array has no result; ``_missing``: whether the array
    is null.

    Plan: a generator over the records, no shuffle.

    Source: FORMAT 4.12.3; flat-map-values-order-and-timestamp,
    flat-map-values-empty-value-and-empty-pieces, flat-map-values-null-list-fails.
    """

    def plan(self, times: RunTimes = BEFORE_ANY_RUN) -> RunPlan:
        counts = FlatMapValuesCounts(self.node.name, self.operator.expression)
        return RunPlan(self.whole_inputs, counts=counts)

    def process(self, rows: list[DataFrame], inputs: Sequence[Input], context: RunContext) -> DataFrame:
        operator = self.operator
        # The value of a tombstone is null, whatever its value columns contain.
        values = value_columns(operator.source)
        nothing = {v: F.when(~F.col(IS_TOMBSTONE), F.col(f"`{v}`")) for v in values}
        elements = F.expr(operator.expression)
        kept = [F.col(f"`{c}`") for c in operator.kept()]
        spread = with_columns(rows[0], nothing).select(
            *kept,
            TIMESTAMP,
            PARTITION,
            *ORDER,
            elements.isNull().alias(_MISSING),
            F.posexplode_outer(elements).alias(TURN, _ELEMENT),
        )
        there = F.col(TURN).isNotNull()
        return spread.select(
            *kept,
            F.col(_ELEMENT).alias(operator.column),
            TIMESTAMP,
            PARTITION,
            F.col(_ELEMENT).isNull().alias(IS_TOMBSTONE),
            F.when(there, Outcome.APPLIED).otherwise(Outcome.NO_RESULT).alias(OUTCOME),
            *ORDER,
            TURN,
            _MISSING,
        )


# select_key


class SelectKeyProcessor(Processor[SelectKey]):
    """Emits every record under its new key, in that key's partition; also tombstones and null keys.

    Plan: projections; the numbering of the log moves records to their partitions.

    Source: FORMAT 4.12.2; select-key-null-passes, select-key-too-short-value.
    """

    def plan(self, times: RunTimes = BEFORE_ANY_RUN) -> RunPlan:
        return RunPlan(self.whole_inputs, merges=True)

    def process(self, rows: list[DataFrame], inputs: Sequence[Input], context: RunContext) -> DataFrame:
        columns, partition = self.operator.keys().columns, partition_of_key(self.node.key, self.node)
        chosen = with_columns(rows[0], {name: F.expr(sql) for name, sql in columns})
        return chosen.withColumns(
            {PARTITION: partition, OUTCOME: F.lit(Outcome.APPLIED), TURN: F.lit(0)}
        )


# merge


class MergeProcessor(Processor[Merge]):
    """Emits every record with its key, value, timestamp and partition; also null keys and tombstones.

    Omits columns that an operator added to one stream's log.

    Plan: a union, no shuffle.

    Source: FORMAT 4.12.1; merge-keeps-key-value-timestamp-and-arrival-order,
    merge-passes-null-keys-and-null-values.
    """

    def plan(self, times: RunTimes = BEFORE_ANY_RUN) -> RunPlan:
        return RunPlan(self.whole_inputs, merges=True)

    def process(self, rows: list[DataFrame], inputs: Sequence[Input], context: RunContext) -> DataFrame:
        columns = [*self.node.key, *value_columns(self.node)]
        names = [*[F.col(f"`{c}`") for c in columns], TIMESTAMP, PARTITION, IS_TOMBSTONE, *ORDER]
        merged = reduce(DataFrame.unionByName, [one.select(*names) for one in rows])
        return merged.withColumns({OUTCOME: F.lit(Outcome.APPLIED), TURN: F.lit(0)})


# to_table


class ToTableProcessor(Processor[ToTable]):
    """Emits a stream's records as changes; records without a key are dropped.

    Source: FORMAT 4.2.1, 4.3.1; kip914-versioned-kept-by-explicit-to-table.
    """

    def plan(self, times: RunTimes = BEFORE_ANY_RUN) -> RunPlan:
        return RunPlan(self.whole_inputs, keeps_order=self.operator.partitioning is not None)

    def process(self, rows: list[DataFrame], inputs: Sequence[Input], context: RunContext) -> DataFrame:
        lacks_key = ~has_key(self.operator.source.key)
        outcome = F.when(lacks_key, Outcome.DROPPED).otherwise(Outcome.APPLIED)
        made = rows[0].withColumns({TURN: F.lit(0), OUTCOME: outcome})
        if self.operator.partitioning is not None:
            return made
        return made.withColumn(PARTITION, partition_of_key(self.node.key, self.node))


# to_stream


class ToStreamProcessor(Processor[ToStream]):
    """Emits a table's changes as records, including tombstones.

    Source: FORMAT 4.2.2; kip914-versioned-lost-by-to-table.
    """

    def plan(self, times: RunTimes = BEFORE_ANY_RUN) -> RunPlan:
        return RunPlan(self.whole_inputs, keeps_order=True)

    def process(self, rows: list[DataFrame], inputs: Sequence[Input], context: RunContext) -> DataFrame:
        return rows[0].withColumns({TURN: F.lit(0), OUTCOME: F.lit(Outcome.APPLIED)})
