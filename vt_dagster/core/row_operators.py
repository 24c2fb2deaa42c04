"""Operators on one record at a time, like filter, map_values, select_key, merge and to_table.

- filter, filter_not: keeps the rows of a table that satisfy a condition (KIP-914).
- map_values: computes new values for the keys of a table (KIP-914).
- flat_map_values: turns each record of a stream into several records, or none.
- select_key: gives the records of a stream a new key.
- merge: combines the records of several streams into one stream.
- to_table: reads a stream's records as changes of a table.
- to_stream: emits a table's changes as records of a stream.
"""

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
from vt_dagster.core.arrival_order import Outcome, gathered, has_key, micros, with_columns
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
from vt_dagster.core.source_records import home_of
from vt_dagster.core.table_changes import over_old
from vt_dagster.errors import NullArrayError
from vt_dagster.topology.durations import Duration
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

# Filter


pa: Any = pyarrow

_NEWEST, _ALIVE, _TIME, _BEFORE, _RETENTION = "_newest", "_alive", "_time", "_before", "_retention"
_REPEATED = "_repeated"


class FilterProcessor(Processor[Filter]):
    """Runs :func:`filter` on the input of a run; for a versioned result of a plain table also
    :func:`without_repeated_tombstones`."""

    def plan(self, times: RunTimes = BEFORE_ANY_RUN) -> RunPlan:
        return RunPlan(self.whole_inputs, keeps_order=True)

    def process(self, rows: list[DataFrame], inputs: Sequence[Input], context: RunContext) -> DataFrame:
        operator, node = self.operator, self.node
        source = operator.source
        begins = isinstance(node, VersionedTable) and not source.versioned
        results = filter(
            rows[0].withColumn(TURN, F.lit(0)),
            key=source.key,
            values=value_columns(source),
            predicate=operator.predicate,
            negate=operator.negate,
            versioned=source.versioned or begins,
        )
        if not isinstance(node, VersionedTable) or not begins:
            return results
        return without_repeated_tombstones(
            results,
            context.view,
            key=node.key,
            stream_time=context.stream_time,
            history_retention=node.history_retention,
        )


def filter(
    changes: DataFrame,
    *,
    key: Sequence[str],
    values: Sequence[str],
    predicate: str,
    negate: bool,
    versioned: bool,
) -> DataFrame:
    """Turns rows that do not satisfy the condition into tombstones.

    For a versioned table every record is emitted (kip914-filter-versioned). For a plain table a record
    is omitted if neither its row nor the previous row satisfies it (kip914-filter-unversioned).

    Args:
        predicate: a SQL condition over the columns; null = false.
        versioned: whether the table is versioned.

    Returns:
        the change rows with ``_outcome``; ``old`` is null if the previous row does not satisfy it.

    Source: KIP-914 "Filters", FORMAT 4.2.5, 4.2.6, section 7; kip914-probe-filter-tombstones-versioned.
    """
    passes = f"coalesce(({predicate}\n), false)"  # a comment may end the predicate
    condition = f"NOT {passes}" if negate else passes
    seen = over_old(changes, key, values, {"_old_passes": condition})
    passes = F.expr(condition) & ~F.col(IS_TOMBSTONE)
    old = F.when(F.col("_old_passes"), F.col(OLD))
    goes_out = F.lit(True) if versioned else F.col("_passes") | F.col(OLD).isNotNull()
    outcome = F.when(goes_out, Outcome.APPLIED).otherwise(Outcome.NO_RESULT)
    kept = {v: F.when(F.col("_passes"), F.col(f"`{v}`")) for v in values}
    return (
        seen.withColumns({"_passes": passes, OLD: old})
        .withColumns({**kept, OUTCOME: outcome, IS_TOMBSTONE: ~F.col("_passes")})
        .drop("_passes", "_old_passes")
    )


def without_repeated_tombstones(
    rows: DataFrame,
    versions: DataFrame | None,
    *,
    key: Sequence[str],
    stream_time: Column,
    history_retention: Duration,
) -> DataFrame:
    """Omits tombstones of keys without a row in the result, if a plain table is filtered into a
    versioned one.

    The previous row is the one in the result's own store. There an omitted tombstone is not the latest
    version and does not advance stream time. Each decision depends on all earlier ones, also of other
    keys, so a kernel loops over the rows of a partition and keeps one number per key.

    Plan: one shuffle and sort by partition; Arrow batches through Python.

    Args:
        rows: the result of ``filter``; all of them are emitted.
        versions: those of the result before the run; None = none.
        stream_time: that of the result before the run.

    Returns:
        the rows; omitted ones have the outcome ``no_result``.

    Source: FORMAT 4.2.3, 4.2.5.
    """
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
            _BEFORE: F.unix_micros(stream_time),
            _RETENTION: micros(history_retention),
        }
    )
    ordered = gathered(marked, [PARTITION]).sortWithinPartitions(PARTITION, *ORDER)
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


# Map values


class MapValuesProcessor(Processor[MapValues]):
    """Runs :func:`map_values` on the input of a run."""

    def plan(self, times: RunTimes = BEFORE_ANY_RUN) -> RunPlan:
        return RunPlan(self.whole_inputs, keeps_order=True)

    def process(self, rows: list[DataFrame], inputs: Sequence[Input], context: RunContext) -> DataFrame:
        source = self.operator.source
        columns = self.operator.selection().columns
        return map_values(
            rows[0].withColumn(TURN, F.lit(0)),
            key=source.key,
            values=value_columns(source),
            columns=[c for c in columns if c[0] not in source.key],
        )


def map_values(
    changes: DataFrame,
    *,
    key: Sequence[str],
    values: Sequence[str],
    columns: Sequence[tuple[str, str]],
) -> DataFrame:
    """Computes new values for the same keys; every record is emitted, also repeated tombstones
    (kip914-probe-map-values-tombstones).

    Args:
        columns: the result's value columns, (name, SQL expression over the table's columns).

    Source: FORMAT 4.2.2, 4.2.4; kip914-versioned-inherits-through-map-values.
    """
    names = [name for name, _ in columns]
    before = [f"_old_{i}" for i in range(len(columns))]
    seen = over_old(changes, key, values, {b: sql for b, (_, sql) in zip(before, columns, strict=True)})
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


# Flat map values


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
    """Runs :func:`flat_map_values` on the input of a run."""

    def plan(self, times: RunTimes = BEFORE_ANY_RUN) -> RunPlan:
        counts = FlatMapValuesCounts(self.node.name, self.operator.expression)
        return RunPlan(self.whole_inputs, counts=counts)

    def process(self, rows: list[DataFrame], inputs: Sequence[Input], context: RunContext) -> DataFrame:
        operator = self.operator
        # The value of a tombstone is null, whatever its value columns contain.
        values = value_columns(operator.source)
        nothing = {v: F.when(~F.col(IS_TOMBSTONE), F.col(f"`{v}`")) for v in values}
        return flat_map_values(
            with_columns(rows[0], nothing),
            expression=operator.expression,
            column=operator.column,
            keep=operator.kept(),
        )


def flat_map_values(
    records: DataFrame, *, expression: str, column: str, keep: Sequence[str]
) -> DataFrame:
    """Returns one record per element of an array, in the array's order.

    Plan: a generator over the records, no shuffle.

    Args:
        expression: SQL over the record's columns, which gives the array.
        column: the result's column for the element.
        keep: columns that each result keeps.

    Returns:
        ``keep, column, timestamp, partition, is_tombstone`` (the element is null), ``_outcome``
        (``no_result`` for an empty or null array)``, ORDER, _turn`` (the index in the array), and
        ``_missing``: whether the array is null.

    Source: FORMAT 4.12.3; flat-map-values-order-and-timestamp,
    flat-map-values-empty-value-and-empty-pieces, flat-map-values-null-list-fails.
    """
    elements = F.expr(expression)
    kept = [F.col(f"`{c}`") for c in keep]
    spread = records.select(
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
        F.col(_ELEMENT).alias(column),
        TIMESTAMP,
        PARTITION,
        F.col(_ELEMENT).isNull().alias(IS_TOMBSTONE),
        F.when(there, Outcome.APPLIED).otherwise(Outcome.NO_RESULT).alias(OUTCOME),
        *ORDER,
        TURN,
        _MISSING,
    )


# Select key


class SelectKeyProcessor(Processor[SelectKey]):
    """Runs :func:`select_key` on the input of a run."""

    def plan(self, times: RunTimes = BEFORE_ANY_RUN) -> RunPlan:
        return RunPlan(self.whole_inputs, merges=True)

    def process(self, rows: list[DataFrame], inputs: Sequence[Input], context: RunContext) -> DataFrame:
        columns = self.operator.keys().columns
        return select_key(rows[0], columns=columns, partition=home_of(self.node.key, self.node))


def select_key(
    records: DataFrame, *, columns: Sequence[tuple[str, str]], partition: Column
) -> DataFrame:
    """Emits every record under its new key, in that key's partition; also tombstones and null keys.

    Plan: projections; the numbering of the log moves records to their partitions.

    Args:
        columns: the new key's (name, SQL expression over the record's columns).
        partition: an expression over the new key's columns.

    Source: FORMAT 4.12.2; select-key-null-passes, select-key-too-short-value.
    """
    chosen = with_columns(records, {name: F.expr(sql) for name, sql in columns})
    return chosen.withColumns({PARTITION: partition, OUTCOME: F.lit(Outcome.APPLIED), TURN: F.lit(0)})


# Merge


class MergeProcessor(Processor[Merge]):
    """Runs :func:`merge` on the inputs of a run."""

    def plan(self, times: RunTimes = BEFORE_ANY_RUN) -> RunPlan:
        return RunPlan(self.whole_inputs, merges=True)

    def process(self, rows: list[DataFrame], inputs: Sequence[Input], context: RunContext) -> DataFrame:
        return merge(rows, columns=[*self.node.key, *value_columns(self.node)])


def merge(streams: Sequence[DataFrame], *, columns: Sequence[str]) -> DataFrame:
    """Emits every record with its key, value, timestamp and partition; also null keys and tombstones.

    Plan: a union, no shuffle.

    Args:
        streams: log rows with ``ORDER``, which defines their common order.
        columns: the key and value columns; columns that an operator added to one stream's log are
            omitted.

    Source: FORMAT 4.12.1; merge-keeps-key-value-timestamp-and-arrival-order,
    merge-passes-null-keys-and-null-values.
    """
    names = [*[F.col(f"`{c}`") for c in columns], TIMESTAMP, PARTITION, IS_TOMBSTONE, *ORDER]
    rows = reduce(DataFrame.unionByName, [one.select(*names) for one in streams])
    return rows.withColumns({OUTCOME: F.lit(Outcome.APPLIED), TURN: F.lit(0)})


# To table


class ToTableProcessor(Processor[ToTable]):
    """Runs :func:`to_table` on the input of a run."""

    def plan(self, times: RunTimes = BEFORE_ANY_RUN) -> RunPlan:
        return RunPlan(self.whole_inputs, keeps_order=self.operator.partitioning is not None)

    def process(self, rows: list[DataFrame], inputs: Sequence[Input], context: RunContext) -> DataFrame:
        made = to_table(rows[0].withColumn(TURN, F.lit(0)), key=self.operator.source.key)
        if self.operator.partitioning is not None:
            return made
        return made.withColumn(PARTITION, home_of(self.node.key, self.node))


def to_table(records: DataFrame, *, key: Sequence[str]) -> DataFrame:
    """Returns a stream's records as changes; records without a key are dropped.

    Source: FORMAT 4.2.1, 4.3.1; kip914-versioned-kept-by-explicit-to-table.
    """
    return records.withColumn(
        OUTCOME, F.when(~has_key(key), Outcome.DROPPED).otherwise(Outcome.APPLIED)
    )


# To stream


class ToStreamProcessor(Processor[ToStream]):
    """Runs :func:`to_stream` on the input of a run."""

    def plan(self, times: RunTimes = BEFORE_ANY_RUN) -> RunPlan:
        return RunPlan(self.whole_inputs, keeps_order=True)

    def process(self, rows: list[DataFrame], inputs: Sequence[Input], context: RunContext) -> DataFrame:
        return to_stream(rows[0].withColumn(TURN, F.lit(0)))


def to_stream(changes: DataFrame) -> DataFrame:
    """Emits a table's changes as records, including tombstones.

    Source: FORMAT 4.2.2; kip914-versioned-lost-by-to-table.
    """
    return changes.withColumn(OUTCOME, F.lit(Outcome.APPLIED))
