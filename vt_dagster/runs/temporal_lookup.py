"""Looks up the records of a run in a table as of their timestamps."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

from pyspark.sql import DataFrame

from vt_dagster.core import table_store as of_table
from vt_dagster.core.arrival_order import by_partition
from vt_dagster.core.log_columns import view_schema
from vt_dagster.core.processor import Lookup, Processor, RunContext
from vt_dagster.core.table_store import PersistRows
from vt_dagster.runs.arrival import Arrival
from vt_dagster.runs.join_strategy import join_strategy
from vt_dagster.runs.results import Judged
from vt_dagster.runs.store_protocol import Stores
from vt_dagster.runs.system_time_history import TableSystemTimeHistory, recorded_if
from vt_dagster.topology.model import VersionedTable


def temporal_lookup(
    arrival: Arrival,
    processor: Processor[Any],
    stores: Stores,
    records: DataFrame,
    judged: Judged,
    persist_rows: PersistRows,
    context: RunContext,
) -> tuple[DataFrame, Judged]:
    """Joins judged records with the table's versions that are valid at their times.

    Args:
        persist_rows: computes rows at once and persists them until the commit.

    Returns:
        the results, and the judged records with rows read and strategy.
    """
    table = processor.looked_up
    assert table is not None
    store, at = stores(table), arrival.tables.get(table.name)
    if at is None or at.head is None or judged.span is None:
        empty = recorded_if(
            processor.uses_system_time, store.spark.createDataFrame([], view_schema(table))
        )
        return processor.look_up(records, Lookup(empty, by_partition({})), context), judged
    since = judged.span[0] - processor.lookup_margin // timedelta(microseconds=1)
    rows = of_table.as_read(table, recorded_if(processor.uses_system_time, store.view_at(at, since)))
    way, strategy = join_strategy(table, rows, arrival.few_records, at.total, (since, judged.span[1]))
    past = None
    if processor.uses_system_time and isinstance(table, VersionedTable):
        past = TableSystemTimeHistory(table, store, at.head, persist_rows)
    found = processor.look_up(records, Lookup(rows, by_partition(at.stream_time), way, past), context)
    told = strategy if past is None else f"{strategy}; {past.description}"
    return found, replace(judged, rows_read=at.reach(since), strategy=told)
