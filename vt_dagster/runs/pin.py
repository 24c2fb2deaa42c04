"""Pins the records, logs and tables of a run when it starts."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from datetime import timedelta
from typing import Any

from vt_dagster.columns import FINAL
from vt_dagster.core.processor import Processor
from vt_dagster.core.processor_registry import processor_of
from vt_dagster.core.table_store import start_of
from vt_dagster.errors import ConcurrentRunError, SourceError, StorageError
from vt_dagster.runs.arrival import Arrival
from vt_dagster.runs.readiness import upstream
from vt_dagster.runs.store_protocol import Store, Stores
from vt_dagster.sources.base import Pinned, Source, Whole
from vt_dagster.sources.delta_source import pin_start
from vt_dagster.storage.commit_log import Commit
from vt_dagster.storage.delta import unreadable, unseen
from vt_dagster.storage.log_truncation import require_not_truncated, require_same_log
from vt_dagster.storage.spark_reader import Head, Snapshot
from vt_dagster.topology.durations import in_utc, spoken
from vt_dagster.topology.model import Stream, Table


def source_of(node: Stream) -> Source:
    """Returns the source of a node's records.

    Raises:
        SourceError: the node has no source.
    """
    source: Any = node.source
    if not hasattr(source, "pin"):
        raise SourceError(
            f"{node.name}: expected a source to read from, got {source!r}; give it one, for "
            "example source=FilesSource('data/landing/weather', format='csv')"
        )
    return source


def from_source(
    node: Stream, store: Store, at: Snapshot, source: Source | None, asked: Mapping[str, Any]
) -> Arrival:
    """Pins the records of a source asset's run.

    Args:
        at: snapshot of the asset's tables when the run starts.
        source: None = the node's own; with another one, no initial snapshot is read.
        asked: arguments of the source's ``pin``.
    """
    commit = None if at.head is None else at.head.commit
    alone = source is not None
    consumed = store.consumed_files(at.head)
    pinned = (source or source_of(node)).pin(commit, consumed=consumed, **asked)
    return Arrival(
        node,
        at.head,
        store.new_attempt(),
        source=pinned,
        start=None if alone else start_to_take(node, commit, pinned),
        taken=pinned.taken,
        view_rows=at.reach(),
        rows_read=at.reach(),
    )


def start_to_take(node: Stream, commit: Commit | None, pinned: Pinned) -> Whole | None:
    """Returns the initial snapshot of a table, if this run has to read it: the run that reaches the end
    of the changes that existed at the first run. None = another run reads it, or it does not exist.

    Args:
        commit: the table's last commit.
    """
    source = start_of(node)
    if source is None or (commit is not None and commit.start is not None):
        return None
    first = None if commit is None else commit.initial_load
    return pin_start(source) if pinned.reaches(first or pinned.source_end) else None


def start_waits(node: Stream, commit: Commit | None) -> bool:
    """Returns whether an initial snapshot exists that no run has read."""
    source = start_of(node)
    return source is not None and (commit is None or commit.start is None) and bool(pin_start(source))


def from_logs(
    node: Stream, store: Store, at: Snapshot, stores: Stores, accept_not_ready: bool = False
) -> Arrival:
    """Pins the new rows of an operator's input logs, and the views that it looks up.

    Args:
        accept_not_ready: take the rows even if a table is not ready, or its history is too short.
    """
    processor = processor_of(node)
    pinned = Arrival(node, at.head, store.new_attempt(), state_bytes=store.state_bytes(at.head))
    start = pinned.before.inputs
    inputs, tables, taken = dict(pinned.inputs), dict(pinned.tables), pinned.taken
    rows_read = at.reach() if processor.reads_own_table({}) else 0
    erased, names = 0, {up.name for up in processor.consumed}
    heads: dict[str, Commit] = {}
    for up in {up.name: up for up in node.inputs}.values():
        found = stores(up).snapshot()
        if found.head is None:
            continue
        heads[up.name] = found.head.commit
        if isinstance(up, Table) and _looks_into(processor, up, names):
            tables[up.name] = found
            rows_read += found.reach() if up.name in names and processor.reads_tables else 0
        if up.name not in names:
            continue
        inputs[up.name] = found.head
        before = None if at.head is None else at.head.commit
        require_same_log(node.name, up.name, before, found.head.commit, stores(up).attempt_of)
        require_not_truncated(node.name, up.name, start.get(up.name, {}), found.head.commit)
        require_reach(processor, up, pinned.before, found.head.commit)
        ends, first = found.head.commit.next_offset, start.get(up.name, {})
        ranges = {p: (first.get(p, 0), end) for p, end in ends.items() if end > first.get(p, 0)}
        if ranges:
            taken[up.name] = ranges
            erased += _erased(stores(up), found.head, ranges)
    ready = upstream(node, pinned.before, lambda up: _last(up, heads, stores))
    assert node.operator is not None
    not_ready = [up.name for up in node.operator.waits_for if ready.get(up.name, {}) is None]
    waiting = sum(e - s for ranges in taken.values() for s, e in ranges.values())
    if not_ready and not accept_not_ready:
        taken = {}
    return replace(
        pinned,
        ready=ready,
        not_ready=not_ready,
        waiting=0 if taken else waiting,
        erased=erased,
        inputs=inputs,
        tables=tables,
        taken=taken,
        view_rows=at.reach(),
        rows_read=rows_read,
        stream_time=dict(pinned.before.stream_time),
    )


def _last(node: Stream, pinned: Mapping[str, Commit], stores: Stores) -> Commit | None:
    if node.name in pinned:
        return pinned[node.name]
    head = stores(node).snapshot().head
    return None if head is None else head.commit


def _looks_into(processor: Processor[Any], table: Table, consumed: Collection[str]) -> bool:
    looked_up = processor.looked_up
    of_times = looked_up is not None and looked_up.name == table.name
    return processor.reads_tables or of_times or table.name not in consumed


def require_reach(processor: Processor[Any], up: Stream, before: Commit, commit: Commit) -> None:
    """Refuses a run that would re-read truncated records of an input. Maintenance keeps what
    the operator needs as it is declared, up to the log retention.

    Args:
        up: the input; ``commit``: its last commit.
        before: the operator's last commit.

    Raises:
        StorageError: since the truncation, the operator was declared to read further back.
    """
    node, cut = processor.node, commit.truncation
    back = retained_from(processor, up, before, commit)
    if cut is None or back is None or node.operator is None:
        return
    reach = node.operator.rescan_span.get(up.name, timedelta(0))
    micros = reach // timedelta(microseconds=1)
    for partition, newest in cut.stream_time.items():
        now = before.stream_time.get(partition, newest + micros)
        if micros > cut.log_retention and max(back, now - micros) < newest:
            raise StorageError(
                f"{node.name}: expected to read only records of {up.name} after {in_utc(newest)}, but "
                f"as declared now it reads {spoken(reach)} back from {in_utc(now)}, and "
                f"{cut.description()}; shorten its window or grace period, or make it anew "
                "(vt-dagster replay)"
            )


def retained_from(processor: Processor[Any], up: Stream, before: Commit, last: Commit) -> int | None:
    """Returns from when on an operator may re-read an input's log after its last commit: records with a
    larger timestamp, epoch microseconds; None = none.

    Args:
        last: the input's last commit.
    """
    state = before.stream_time, before.emitted_up_to, before.watermarks
    places = [i for i, one in enumerate(processor.consumed) if one.name == up.name]
    found = [processor.rescan_from(i, *state) for i in places]
    operator, final = processor.node.operator, before.watermarks.get(FINAL)
    reach = None if operator is None else operator.rescan_span.get(up.name)
    if final and reach is not None and up.is_table:
        found.append(min(last.stream_time.values()) - reach // timedelta(microseconds=1) - 1)
    elif final and reach is not None:
        found.append(min(final.values()) - 1)
    return min((after for after in found if after is not None), default=None)


def _erased(store: Store, head: Head, ranges: Mapping[int, tuple[int, int]]) -> int:
    """Returns how many rows of the ranges, which extend to the log's end, have been erased. Uses Spark
    only if rows were erased after the start of a range."""
    before = head.commit.erased_before
    if all(start >= before.get(p, 0) for p, (start, _) in ranges.items()):
        return 0
    start = dict(head.commit.next_offset) | {p: first for p, (first, _) in ranges.items()}
    there = store.log(start, head).count()
    return sum(end - first for first, end in ranges.values()) - there


def explained(arrival: Arrival, error: Exception) -> Exception | None:
    """Returns a clearer error, if an input or its files caused this one; else None."""
    if (elsewhere := unseen(error)) is not None:
        return elsewhere
    told = None
    if arrival.source is not None:
        told = arrival.source.explain(error)
    if told is None and arrival.start is not None:
        told = arrival.start.explain(error)
    return told or gone_meanwhile(arrival.node, error) or unreadable(arrival.node.name, error)


def gone_meanwhile(node: Stream, error: Exception) -> ConcurrentRunError | None:
    """Returns an error, if a file of a pinned log or view has been removed; else None."""
    if "FAILED_READ_FILE.FILE_NOT_EXIST" not in str(error):
        return None
    return ConcurrentRunError(
        f"{node.name}: expected the table files that the run pinned at its start, but some are gone: a "
        "key was erased during this run, or a clean-up removed too much. Nothing was committed: run "
        "again"
    )
