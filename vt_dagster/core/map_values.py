"""map_values: computes new values for the keys of a table (KIP-914)."""

from __future__ import annotations

from collections.abc import Sequence

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from vt_dagster.columns import IS_TOMBSTONE, OLD, OUTCOME, TIMESTAMP, TURN
from vt_dagster.core.arrival_order import Outcome
from vt_dagster.core.log_columns import value_columns
from vt_dagster.core.processor import Processor
from vt_dagster.core.run_context import Input, RunContext
from vt_dagster.core.table_changes import over_old
from vt_dagster.topology.operators import MapValues


class MapValuesProcessor(Processor[MapValues]):
    """See :func:`map_values`."""

    @property
    def keeps_order(self) -> bool:
        return True

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
