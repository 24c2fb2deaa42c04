"""to_table: reads a stream's records as changes of a table."""

from __future__ import annotations

from collections.abc import Sequence

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from vt_dagster.columns import OUTCOME, PARTITION, TURN
from vt_dagster.core.arrival_order import Outcome, has_key
from vt_dagster.core.processor import Processor
from vt_dagster.core.run_context import Input, RunContext
from vt_dagster.core.source_records import home_of
from vt_dagster.topology.operators import ToTable


class ToTableProcessor(Processor[ToTable]):
    """See :func:`to_table`."""

    @property
    def keeps_order(self) -> bool:
        return self.operator.partitioning is not None

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
