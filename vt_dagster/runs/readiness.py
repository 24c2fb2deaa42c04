"""Decides whether tables are ready to be looked up, see ``VersionedTable.ready``.

The commits of a source table record its offsets when it became ready; a derived table is ready once it
has consumed its inputs up to these. Readiness depends on offsets only, not on how records are divided
into runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from datetime import datetime, timezone
from typing import Any, TypeAlias

from pyspark.sql import functions as F

from vt_dagster.columns import PARTITION, TIMESTAMP
from vt_dagster.core.processor_registry import processor_of
from vt_dagster.core.stream_table_join import moves_stream_time
from vt_dagster.core.table_store import start_of
from vt_dagster.errors import RefusedRecordsError
from vt_dagster.runs.arrival import Arrival
from vt_dagster.runs.store_protocol import Stores
from vt_dagster.sources.base import Pinned
from vt_dagster.storage.commit_log import Commit, Offsets, horizons
from vt_dagster.topology.durations import in_utc, spoken
from vt_dagster.topology.model import Stream, VersionedTable, topological

_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)
Heads: TypeAlias = Callable[[Stream], Commit | None]
"""The last commit of a log; None before the first."""


def waits(node: Stream) -> bool:
    """Returns whether the asset, or any of its inputs, declares ``ready``."""
    return any(isinstance(up, VersionedTable) and up.ready is not None for up in topological([node]))


def upstream(node: Stream, before: Commit, heads: Heads) -> dict[str, Offsets | None]:
    """Returns, per input of an operator, its log's offsets when it became ready; None = not ready.

    Args:
        before: the operator's last commit; if all inputs were ready by then, the result is empty.
    """
    if before.ready_at is not None or not waits(node):
        return {}
    return {up.name: _ready_at(up, heads(up), heads) for up in node.inputs}


def not_ready(nodes: Iterable[Stream], heads: Heads) -> list[str]:
    """Returns the names of the nodes that are not ready yet."""
    return [node.name for node in nodes if _ready_at(node, heads(node), heads) is None]


def _ready_at(node: Stream, commit: Commit | None, heads: Heads) -> Offsets | None:
    if not waits(node):
        return {}
    if commit is None or commit.ready_at is not None:
        return None if commit is None else commit.ready_at
    if node.operator is None:
        # A table with runs before ``ready`` was declared has no recorded end: it counts as loaded.
        ready = _begun(node, commit) or _timely(node, commit.stream_time)
        return commit.next_offset if ready else None
    ready = _taken(node, commit.inputs, upstream(node, commit, heads))
    return commit.next_offset if ready else None


def after_run(
    node: Stream,
    before: Commit,
    source: Pinned | None,
    inputs: Mapping[str, Offsets],
    ready: Mapping[str, Offsets | None],
    offsets: Offsets,
    times: Mapping[int, int],
    started: bool,
) -> dict[str, Any]:
    """Returns the fields ``initial_load`` and ``ready_at`` of a commit.

    Args:
        source: the pinned source of the run.
        inputs: next offsets of each input after the run.
        ready: see :func:`upstream`.
        offsets, times: the log's next offsets and stream time after the run.
        started: whether the table has read its initial snapshot.
    """
    starts = source is not None and start_of(node) is not None
    if before.ready_at is not None or not waits(node):
        end = source.source_end if source is not None and starts and not started else None
        return {"initial_load": before.initial_load or end, "ready_at": before.ready_at}
    if source is None:
        return {"ready_at": dict(offsets) if _taken(node, inputs, ready) else None}
    if _begun(node, before):
        return {"ready_at": before.next_offset}
    if isinstance(node, VersionedTable) and node.ready == "initial_load":
        end = source.source_end if before.initial_load is None else before.initial_load
        whole = source.reaches(end) and (started or not starts)
        return {"initial_load": end, "ready_at": dict(offsets) if whole else None}
    return {"ready_at": dict(offsets) if _timely(node, times) else None}


def _begun(node: Stream, commit: Commit) -> bool:
    """Returns whether the table had runs before ``ready="initial_load"`` was declared."""
    wanted = isinstance(node, VersionedTable) and node.ready == "initial_load"
    return wanted and commit.batch > 0 and commit.initial_load is None


def _timely(node: Stream, stream_time: Mapping[int, int]) -> bool:
    if not isinstance(node, VersionedTable) or not isinstance(node.ready, datetime):
        return False
    moment = (node.ready - _EPOCH).total_seconds() * 1_000_000
    return bool(stream_time) and min(stream_time.values()) >= moment


def _taken(node: Stream, inputs: Mapping[str, Offsets], ready: Mapping[str, Offsets | None]) -> bool:
    """Returns whether all inputs are ready, and consumed ones were read up to their ready offsets."""
    consumed = {up.name for up in processor_of(node).consumed}
    for name, ends in ready.items():
        if ends is None:
            return False
        taken = inputs.get(name, {})
        if name in consumed and any(taken.get(p, 0) < end for p, end in ends.items()):
            return False
    return True


def require_covered(arrival: Arrival, stores: Stores) -> None:
    """Refuses a join's first run with ready tables, if a table's history no longer covers the times of
    records that have waited for it.

    Raises:
        RefusedRecordsError: names the earliest record, and the start of the table's history.
    """
    node = arrival.node
    streams = [up for up in node.inputs if up.name in arrival.taken and not up.is_table]
    if node.operator is None or not arrival.ready or not streams:
        return
    stream, commit = streams[0], arrival.inputs[streams[0].name]
    start = arrival.before.inputs.get(stream.name, {})
    rows = stores(stream).log(start, commit).where(moves_stream_time(stream.key))
    earliest = rows.groupBy(PARTITION).agg(F.unix_micros(F.min(TIMESTAMP)).alias("first"))
    found: dict[int, int] | None = None
    for table in node.operator.waits_for:
        if waits(table) and table.retention is not None:
            if found is None:
                found = {r[PARTITION]: r["first"] for r in earliest.collect()}
            now = arrival.tables[table.name].stream_time
            alike = _partitioned_alike(stream, commit.commit.stream_time, table, now)
            _require_remembered(node, table, now, found, alike)


def _partitioned_alike(
    stream: Stream, own: Mapping[int, int], table: Stream, theirs: Mapping[int, int]
) -> bool:
    """Returns whether both put a key into the same partition, as far as that is known."""
    inside = all(partition < stream.partitions for partition in (*own, *theirs))
    return stream.partitioning == table.partitioning and (inside or own.keys() == theirs.keys())


def _require_remembered(
    node: Stream, table: Stream, now: Mapping[int, int], earliest: Mapping[int, int], alike: bool
) -> None:
    """Refuses a run with records from before the table's history.

    Args:
        now: the table's stream time; ``earliest``: the records' smallest timestamp; per partition.
        alike: see :func:`_partitioned_alike`; if false, any partition may have a record's key.
    """
    retention = table.retention
    assert retention is not None
    known = {p: horizons(retention, {p: moment})[0] for p, moment in now.items()}
    if known and not alike:
        known = dict.fromkeys(earliest, max(known.values()))
    forgotten = {p: first for p, first in earliest.items() if first < known.get(p, first)}
    if not forgotten:
        return
    partition, first = min(forgotten.items(), key=lambda one: one[1])
    raise RefusedRecordsError(
        f"{node.name}: expected the history of {table.name} to cover all records that have waited for "
        f"it to be ready, but the first of them is of {in_utc(first)} (partition {partition}), and the "
        f"history is {spoken(retention)}, from {in_utc(known[partition])} on; nothing was committed. "
        f"Set a longer history_retention of {table.name}, or run once with accept_not_ready: true to "
        "join them with the remaining versions",
        sorted(forgotten),
    )
