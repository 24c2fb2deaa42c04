"""to_stream: emits a table's changes as records of a stream."""

from __future__ import annotations

from collections.abc import Sequence

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from vt_dagster.columns import OUTCOME, TURN
from vt_dagster.core.arrival_order import Outcome
from vt_dagster.core.processor import Processor
from vt_dagster.core.run_context import Input, RunContext
from vt_dagster.topology.operators import ToStream


class ToStreamProcessor(Processor[ToStream]):
    """See :func:`to_stream`."""

    @property
    def keeps_order(self) -> bool:
        return True

    def process(self, rows: list[DataFrame], inputs: Sequence[Input], context: RunContext) -> DataFrame:
        return to_stream(rows[0].withColumn(TURN, F.lit(0)))


def to_stream(changes: DataFrame) -> DataFrame:
    """Emits a table's changes as records, including tombstones.

    Source: FORMAT 4.2.2; kip914-versioned-lost-by-to-table.
    """
    return changes.withColumn(OUTCOME, F.lit(Outcome.APPLIED))
