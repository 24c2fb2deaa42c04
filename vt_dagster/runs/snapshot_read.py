"""A source that says what is true is read beside what the table holds."""

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
    """The records of a run: what such a source changes of the rows of its table.

    Args:
        held: takes the rows that the run releases at its end.
        of_nothing: as of a table without rows: all that the source has.
    """
    assert isinstance(node, Table)
    current = None if of_nothing else store.current()
    if current is None:
        current = store.spark.createDataFrame([], view_schema(node))

    def hold(rows: DataFrame) -> DataFrame:
        held.append(store.persist(rows))
        return held[-1]

    return source.difference(store.spark, node, of_table.rows_of(node, current), hold)
