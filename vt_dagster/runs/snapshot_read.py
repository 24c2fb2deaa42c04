"""Reads a source of full snapshots as changes against the table's current rows."""

from __future__ import annotations

from pyspark.sql import DataFrame

from vt_dagster.core import table_store as of_table
from vt_dagster.core.log_columns import view_schema
from vt_dagster.runs.store_protocol import Store
from vt_dagster.sources.base import Comparing
from vt_dagster.topology.model import Stream, Table


def difference(
    source: Comparing, node: Stream, store: Store, held: list[DataFrame], of_nothing: bool = False
) -> DataFrame:
    """Returns the records of a run: the differences between a snapshot and the table's current rows.

    Args:
        held: collects the persisted rows, which the run unpersists at its end.
        of_nothing: compare with an empty table, so that all rows of the source are changes.
    """
    assert isinstance(node, Table)
    current = None if of_nothing else store.current()
    if current is None:
        current = store.spark.createDataFrame([], view_schema(node))

    def hold(rows: DataFrame) -> DataFrame:
        held.append(store.persist(rows))
        return held[-1]

    return source.difference(store.spark, node, of_table.rows_of(node, current), hold)
