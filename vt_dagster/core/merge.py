"""merge: combines the records of several streams into one stream."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from vt_dagster.columns import IS_TOMBSTONE, ORDER, OUTCOME, PARTITION, TIMESTAMP, TURN
from vt_dagster.core.arrival_order import Outcome
from vt_dagster.core.log_columns import value_columns
from vt_dagster.core.processor import Processor
from vt_dagster.core.run_context import Input, RunContext
from vt_dagster.topology.operators import Merge


class MergeProcessor(Processor[Merge]):
    """See :func:`merge`."""

    merges = True

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
