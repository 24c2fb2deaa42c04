"""Inputs and context of a processor in a run: log rows, tables, and the state of earlier runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from vt_dagster.columns import OFFSET, RECORDED_AT
from vt_dagster.core.arrival_order import by_partition
from vt_dagster.core.log_columns import log_schema
from vt_dagster.core.processor import Input, Processor, RunContext
from vt_dagster.core.table_store import PersistRows
from vt_dagster.runs.advance_stream_time import oldest, watermark_columns
from vt_dagster.runs.arrival import Arrival
from vt_dagster.runs.read_source import first_changes_of
from vt_dagster.runs.store_protocol import Store, Stores
from vt_dagster.runs.system_time_history import recorded_if
from vt_dagster.storage.view import MANY_ROWS
from vt_dagster.topology.model import Stream, Table


def logs_of(arrival: Arrival, processor: Processor[Any], stores: Stores) -> list[DataFrame]:
    """Returns the log rows of each consumed input, from where the processor re-reads them."""
    return [_log_of(node, arrival, processor, stores(node)) for node in processor.consumed]


def _log_of(node: Stream, arrival: Arrival, processor: Processor[Any], store: Store) -> DataFrame:
    head = arrival.inputs.get(node.name)
    if head is None:
        return store.spark.createDataFrame([], log_schema(node))
    start, after = arrival.before.inputs.get(node.name, {}), _rescan_from(node, arrival, processor)
    if node.name not in arrival.taken and (after is None or not start):
        return recorded_if(processor.uses_system_time, store.log({}, head).limit(0))
    return recorded_if(processor.uses_system_time, store.log(start, head, after))


def _rescan_from(node: Stream, arrival: Arrival, processor: Processor[Any]) -> int | None:
    """Returns the earliest time needed; a log may be more than one of the inputs (a self-join)."""
    before = arrival.before
    places = [i for i, up in enumerate(processor.consumed) if up.name == node.name]
    state = before.stream_time, before.emitted_up_to, before.watermarks
    found = [processor.rescan_from(i, *state) for i in places]
    found += [processor.rescan_from_batch(i, arrival.watermarks) for i in places]
    return min((after for after in found if after is not None), default=None)


def inputs_of(
    arrival: Arrival, processor: Processor[Any], stores: Stores, logs: Sequence[DataFrame]
) -> list[Input]:
    """Returns the rows that were read, with the tables that the processor looks up."""
    if arrival.source is not None:
        return [Input(rows) for rows in logs]
    before, since = arrival.before, oldest(processor, logs, arrival.before)
    found: list[Input] = []
    for node, rows in zip(processor.consumed, logs, strict=True):
        start = before.inputs.get(node.name, {})
        table = earlier = None
        times = dict[int, int]()
        # In a first run, the changes contain every row of the table: no table is needed.
        if start and processor.reads_tables and node.name in arrival.tables:
            store, at = stores(node), arrival.tables[node.name]
            table = store.current_at(at) if since is None else store.view_at(at, since)
            table, times = table.drop(RECORDED_AT), at.stream_time
        if start and _rescan_from(node, arrival, processor) is not None:
            consumed = F.col(OFFSET) < F.coalesce(by_partition(start, "long"), F.lit(0))
            earlier, rows = rows.where(consumed), rows.where(~consumed)
        found.append(Input(rows, table, earlier, arrival.few_records_of(node.name), times))
    return found


def run_context_of(
    arrival: Arrival, processor: Processor[Any], store: Store, persist_rows: PersistRows | None = None
) -> RunContext:
    """Returns the context of a run.

    Args:
        store: the asset's own tables.
        persist_rows: computes rows at once and persists them until the commit; None = read no table,
            for calls before the operator.
    """
    before, with_tables = arrival.before, persist_rows is not None
    view = state = None
    if with_tables and arrival.previous is not None:
        state = store.state(arrival.previous)
        own = isinstance(arrival.node, Table) and processor.reads_own_table(arrival.watermarks)
        view = store.current() if own else None
        view = None if view is None else view.drop(RECORDED_AT)
    since = processor.rescan_from_batch(0, arrival.watermarks)
    asked = with_tables and since is not None and processor.quarantined_outcomes
    many = arrival.few_records and arrival.view_rows > MANY_ROWS
    return RunContext(
        persist_rows=persist_rows if many or processor.persists_rows else None,
        state=state,
        view=view,
        stream_time=by_partition(before.stream_time),
        stream_time_after=by_partition(arrival.stream_time),
        emitted_up_to=by_partition(before.emitted_up_to),
        emitted_up_to_after=by_partition(arrival.emitted_up_to),
        bounds=arrival.bounds,
        none_late=arrival.none_late,
        watermarks=watermark_columns(before.watermarks),
        watermarks_after=watermark_columns(arrival.watermarks),
        since=since,
        refused=store.quarantine() if asked else None,
        first_changes=first_changes_of(arrival, store) if with_tables else None,
    )
