"""select_key: gives the records of a stream a new key."""

from __future__ import annotations

from collections.abc import Sequence

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from vt_dagster.columns import OUTCOME, PARTITION, TURN
from vt_dagster.core.arrival_order import Outcome, with_columns
from vt_dagster.core.processor import Processor
from vt_dagster.core.run_context import Input, RunContext
from vt_dagster.core.source_records import home_of
from vt_dagster.topology.operators import SelectKey


class SelectKeyProcessor(Processor[SelectKey]):
    """See :func:`select_key`."""

    merges = True

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
