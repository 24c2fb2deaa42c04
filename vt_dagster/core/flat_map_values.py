"""flat_map_values: turns each record of a stream into several records, or none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from vt_dagster.columns import IS_TOMBSTONE, ORDER, OUTCOME, PARTITION, TIMESTAMP, TURN
from vt_dagster.core.arrival_order import Outcome, with_columns
from vt_dagster.core.log_columns import value_columns
from vt_dagster.core.processor import Counts, Processor
from vt_dagster.core.run_context import Input, RunContext
from vt_dagster.errors import NullArrayError
from vt_dagster.topology.operators import FlatMapValues

_MISSING, _ELEMENT = "_missing", "_element"
_NULL_ARRAYS = "null_arrays"


class FlatMapValuesProcessor(Processor[FlatMapValues]):
    """See :func:`flat_map_values`."""

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

    def tallies(self, columns: Sequence[str]) -> dict[str, Column]:
        return {_NULL_ARRAYS: F.count_if(F.col(_MISSING))}

    def check(self, found: Mapping[int, Counts]) -> None:
        wrong = {partition: some[_NULL_ARRAYS] for partition, some in found.items()}
        wrong = {partition: n for partition, n in wrong.items() if n}
        if wrong:
            raise NullArrayError(
                f"{self.node.name}: expected an array for each record, got null for "
                f"{sum(wrong.values())}: {self.operator.expression}; nothing was committed. Wrap it in "
                "coalesce(..., array()) to emit nothing for these records, and run again",
                list(wrong),
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
