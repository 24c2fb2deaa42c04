"""filter, filter_not: keeps the rows of a table that satisfy a condition (KIP-914)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import pyarrow  # pyright: ignore[reportMissingTypeStubs]
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import BooleanType, StructField, StructType

from vt_dagster.columns import IS_TOMBSTONE, OLD, ORDER, OUTCOME, PARTITION, TIMESTAMP, TURN, VALID_TO
from vt_dagster.core.arrival_order import Outcome, gathered, micros
from vt_dagster.core.log_columns import value_columns
from vt_dagster.core.processor import Processor
from vt_dagster.core.run_context import Input, RunContext
from vt_dagster.core.table_changes import over_old
from vt_dagster.topology.durations import Duration
from vt_dagster.topology.model import VersionedTable
from vt_dagster.topology.operators import Filter

pa: Any = pyarrow

_NEWEST, _ALIVE, _TIME, _BEFORE, _RETENTION = "_newest", "_alive", "_time", "_before", "_retention"
_REPEATED = "_repeated"


class FilterProcessor(Processor[Filter]):
    """See :func:`filter`; for a versioned result of a plain table also
    :func:`without_repeated_tombstones`."""

    @property
    def keeps_order(self) -> bool:
        return True

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
    condition = f"NOT coalesce(({predicate}), false)" if negate else f"coalesce(({predicate}), false)"
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
    asked = known.withColumns(
        {
            _TIME: F.unix_micros(TIMESTAMP),
            _BEFORE: F.unix_micros(stream_time),
            _RETENTION: micros(history_retention),
        }
    )
    ordered = gathered(asked, [PARTITION]).sortWithinPartitions(PARTITION, *ORDER)
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
