"""Pins the records, logs and tables of a run when it starts.

``Store`` is the interface of a run to an asset's tables: on Delta (``storage.asset_store``) or in
memory (``testing``).

**Readiness.** Pinning decides whether tables are ready to be looked up, see ``VersionedTable.ready``.
The commits of a source table record its offsets when it became ready; a derived table is ready once it
has consumed its inputs up to these. Readiness depends on offsets only, not on how records are divided
into runs.
"""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, Protocol, TypeAlias

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import DataType, DoubleType, NullType

from vt_dagster.columns import FINAL, PARTITION, TIMESTAMP
from vt_dagster.core.aggregates import FAILED
from vt_dagster.core.arrival_order import CHUNK, Outcome
from vt_dagster.core.processor import RunPlan, RunTimes, earliest
from vt_dagster.core.processor_registry import processor_of
from vt_dagster.core.source_order import follows_source
from vt_dagster.core.stream_table_join import moves_stream_time
from vt_dagster.core.stream_time import Bounds
from vt_dagster.core.table_store import needs_colliding_versions, start_of
from vt_dagster.errors import (
    ConcurrentRunError,
    ContractError,
    NeedsReplayError,
    RefusedRecordsError,
    SourceError,
    SparkUnavailableError,
    StorageError,
)
from vt_dagster.sources.base import Comparing, End, Pinned, Source, Whole
from vt_dagster.sources.delta_source import pin_start
from vt_dagster.spark.settings import is_small
from vt_dagster.storage.commit_log import (
    Commit,
    Offsets,
    Ranges,
    require_not_truncated,
    require_same_log,
)
from vt_dagster.storage.delta import unreadable, unseen
from vt_dagster.storage.schema_evolution import shape_of
from vt_dagster.storage.spark_reader import Head, Snapshot
from vt_dagster.storage.view import MANY_ROWS, Progress
from vt_dagster.topology.durations import epoch_micros, in_utc, spoken
from vt_dagster.topology.model import Stream, Table, VersionedTable, topological

# Store protocol


class Store(Protocol):
    """The tables of one stream or table. Each method is described in ``AssetStore``."""

    node: Stream
    progress: Progress

    @property
    def spark(self) -> SparkSession: ...

    def catch_up(
        self,
        head: Head | None = None,
        now: bool = False,
        written: DataFrame | None = None,
        most_keys: int | None = None,
    ) -> Snapshot: ...
    def snapshot(self) -> Snapshot: ...
    def head(self) -> Head | None: ...
    def commits(self) -> Iterable[Commit]: ...
    def attempt_of(self, batch: int) -> str | None: ...

    def log(
        self, start: Offsets, head: Head, after: int | None = None, *, consumed: int = 0
    ) -> DataFrame: ...
    def oldest(self, start: Offsets, head: Head, consumed: int = 0) -> int | None: ...
    def view_at(self, at: Snapshot, since: int | None = None) -> DataFrame: ...
    def current_at(self, at: Snapshot, keys: DataFrame | None = None) -> DataFrame: ...
    def current(self, keys: DataFrame | None = None) -> DataFrame | None: ...
    def quarantine(self) -> DataFrame | None: ...
    def state(self, head: Head | None) -> DataFrame | None: ...
    def state_bytes(self, head: Head | None) -> int: ...
    def consumed_files(self, head: Head | None) -> dict[str, Any]: ...

    def planner_settings(self, small: bool, records: int = 0) -> AbstractContextManager[None]: ...
    def look_up_settings(self) -> AbstractContextManager[None]: ...
    def persist(self, rows: DataFrame) -> DataFrame: ...
    def unpersist(self, rows: DataFrame) -> None: ...

    def new_attempt(self) -> str: ...
    def stage_rejected(self, attempt: str, rows: DataFrame) -> None: ...
    def stage_state(self, attempt: str, rows: DataFrame) -> None: ...
    def stage_files(self, attempt: str, files: dict[str, Any]) -> None: ...
    def commit(
        self, rows: DataFrame, commit: Commit, count: int, before: Callable[[], None] | None = None
    ) -> Head: ...
    def remove_staged_before(self, previous: Head | None) -> None: ...


Stores = Callable[[Stream], Store]
"""Returns the store of a stream or table."""


# Arrival


_BYTES_OF_A_RECORD = 100
_FEW_BYTES, _SMALL_BYTES = 4_000_000, 2_000_000
"""Limits on the size of files, in bytes: about ten thousand lines."""


@dataclass(frozen=True)
class Arrival:
    """The records, tables and positions of one run, pinned when the run starts.

    Args:
        node: the asset.
        previous: the asset's last commit; None = there is none.
        attempt: the name under which this run stages files.
        source: the records pinned at a source.
        start: the initial snapshot of the source, if this run reads it.
        initial_load: see :func:`from_source`.
        inputs: per consumed log, the commit up to which the run reads.
        tables: per looked-up table, the snapshot that the run reads.
        taken: offsets of logs and topics: ``{input: {partition: [start, end)}}``.
        stream_time: per partition, at the end of the run, if the operator keeps its own stream time.
        emitted_up_to: per partition, the time up to which buffered records are emitted.
        watermarks: other times that an operator keeps, see ``TimePolicy.watermarks``.
        bounds: stream-time bounds per chunk; None = stream time is computed per record.
        none_late: whether pinning has shown that no record is late.
        gauges: metrics of the records, computed while pinning.
        view_rows: how many current rows the asset's own table has.
        erased: how many of the consumed log records have been erased, so that their rows are missing.
        rows_read: how many rows of tables the run reads, as estimated before the run.
        state_bytes: size of the state of the operator, or of a stream with ``unique_by``.
        logs: the log rows of the run as it has read them; an op in between may pass on others.
        persisted: DataFrames that stay persisted until the commit.
        ready: per input, the offsets of its log when it became ready, see ``ready_offsets``.
        not_ready: the tables that a join looks up and that are not ready; the run then takes nothing,
            unless ``accept_not_ready`` is set.
        waiting: how many records the run does not take because a table is not ready.
        buffered: if the grace period is an op of its own, how many records the buffer emitted, by
            outcome.
    """

    node: Stream
    previous: Head | None
    attempt: str
    source: Pinned | None = None
    start: Whole | None = None
    initial_load: End | None = None
    inputs: dict[str, Head] = field(default_factory=dict[str, Head])
    tables: dict[str, Snapshot] = field(default_factory=dict[str, Snapshot])
    taken: Ranges = field(default_factory=Ranges)
    stream_time: dict[int, int] = field(default_factory=dict[int, int])
    emitted_up_to: dict[int, int] = field(default_factory=dict[int, int])
    watermarks: dict[str, dict[int, int]] = field(default_factory=dict[str, dict[int, int]])
    bounds: Bounds | None = None
    none_late: bool = False
    gauges: dict[str, float] = field(default_factory=dict[str, float])
    view_rows: int = 0
    erased: int = 0
    rows_read: int = 0
    state_bytes: int = 0
    logs: list[DataFrame] = field(default_factory=list[DataFrame])
    persisted: list[DataFrame] = field(default_factory=list[DataFrame])
    ready: dict[str, Offsets | None] = field(default_factory=dict[str, "Offsets | None"])
    not_ready: list[str] = field(default_factory=list[str])
    waiting: int = 0
    buffered: dict[str, int] = field(default_factory=dict[str, int])
    started: float = field(default_factory=time.monotonic)

    @property
    def empty(self) -> bool:
        """Whether there are no new records: such a run commits nothing."""
        return not self.taken if self.source is None else self.source.empty and self.start is None

    @property
    def before(self) -> Commit:
        """The commit that the run starts from."""
        return before_of(self.node, self.previous)

    @property
    def times(self) -> RunTimes:
        """The times that the operator's plan of this run depends on."""
        return replace(times_of(self.before), advanced=self.watermarks)

    @property
    def reads(self) -> dict[str, int]:
        """The Delta versions of all logs and views that the run reads."""
        logs = {f"{name}/log": head.version for name, head in self.inputs.items()}
        for name, at in self.tables.items():
            whole = at.base is not None and not at.base.is_view
            if at.base is not None and at.base.is_view:
                logs[f"{name}/view"] = at.base.version
            if (at.tail or whole) and at.head is not None:
                logs[f"{name}/log"] = at.head.version
        return logs

    @property
    def read_logs(self) -> dict[str, str]:
        """The id of each log that the run reads, or whose view it reads."""
        tables = {name: at.head for name, at in self.tables.items() if at.head is not None}
        return {name: head.commit.log for name, head in {**tables, **self.inputs}.items()}

    @property
    def new_records(self) -> int:
        """How many new records of logs or topics the run takes."""
        return sum(end - start for ranges in self.taken.values() for start, end in ranges.values())

    @property
    def records(self) -> int:
        """How many records the run processes: new records and buffered ones."""
        return self.new_records + self.before.counts.get(Outcome.WAITING, 0)

    @property
    def _bytes(self) -> int | None:
        size = None if self.source is None else self.source.bytes
        return size if self.start is None else (size or 0) + self.start.bytes

    @property
    def estimated_records(self) -> int:
        """About how many records the run processes; of files, by their size."""
        return max(self.records, (self._bytes or 0) // _BYTES_OF_A_RECORD)

    @property
    def few_records(self) -> bool:
        """Whether the run takes few records."""
        return self.records <= CHUNK and (self._bytes or 0) <= _FEW_BYTES

    @property
    def single_task(self) -> bool:
        """Whether a partition has so few records in this run that one task can sort them."""
        if self._bytes is not None:
            return self.few_records
        of_each = Counter[int]()
        for ranges in self.taken.values():
            of_each.update({partition: end - start for partition, (start, end) in ranges.items()})
        # Buffered records are counted over all partitions, and all of them may be in one.
        waiting = self.before.counts.get(Outcome.WAITING, 0)
        return max(of_each.values(), default=0) + waiting <= CHUNK

    def records_of(self, name: str) -> int:
        """How many new records of an input the run takes."""
        return sum(end - start for start, end in self.taken.get(name, {}).values())

    @property
    def few_records_many_rows(self) -> bool:
        """Whether few records meet many rows of the asset's own table."""
        return self.few_records and self.view_rows > MANY_ROWS

    @property
    def looks_up_own_rows(self) -> bool:
        """Whether the run reads the many rows of its own table only in one lookup, by the keys of its
        few records. Then it reads few rows in all."""
        node = self.node
        if not self.few_records_many_rows or not isinstance(node, Table):
            return False
        if node.operator is not None:
            plan = processor_of(node).plan(self.times)
            again = any(one.rescan_from is not None for one in plan.inputs)
            return node.operator.stored and plan.looked_up is None and not again
        compares = (
            isinstance(self.source, Comparing) or needs_colliding_versions(node) or follows_source(node)
        )
        return self.start is None and not compares

    @property
    def small(self) -> bool:
        """Whether records and tables are so small that planning takes most of the run's time."""
        size = self.state_bytes + (self._bytes or 0)
        rows_read = self.rows_read - (self.view_rows if self.looks_up_own_rows else 0)
        return size <= _SMALL_BYTES and is_small(self.records, rows_read)


def before_of(node: Stream, head: Head | None) -> Commit:
    """Returns the commit that a run starts from: the last one, or one of batch 0."""
    if head is not None:
        return head.commit
    return Commit(asset=node.name, batch=0, attempt="", shape=shape_of(node))


def times_of(commit: Commit) -> RunTimes:
    """Returns the times of a run that starts from a commit."""
    return RunTimes(commit.stream_time, commit.emitted_up_to, commit.watermarks)


# Readiness


Heads: TypeAlias = Callable[[Stream], Commit | None]
"""The last commit of a log; None before the first."""


def declares_ready(node: Stream) -> bool:
    """Returns whether the asset, or any of its inputs, declares ``ready``."""
    return any(isinstance(up, VersionedTable) and up.ready is not None for up in topological([node]))


def ready_offsets(node: Stream, before: Commit, heads: Heads) -> dict[str, Offsets | None]:
    """Returns, per input of an operator, its log's offsets when it became ready; None = not ready.

    Args:
        before: the operator's last commit; if all inputs were ready by then, the result is empty.
    """
    if before.ready_at is not None or not declares_ready(node):
        return {}
    return {up.name: _ready_at(up, heads(up), heads) for up in node.inputs}


def not_ready(nodes: Iterable[Stream], heads: Heads) -> list[str]:
    """Returns the names of the nodes that are not ready yet."""
    return [node.name for node in nodes if _ready_at(node, heads(node), heads) is None]


def _ready_at(node: Stream, commit: Commit | None, heads: Heads) -> Offsets | None:
    if not declares_ready(node):
        return {}
    if commit is None or commit.ready_at is not None:
        return None if commit is None else commit.ready_at
    if node.operator is None:
        # A table with runs before ``ready`` was declared has no recorded end: it counts as loaded.
        ready = _ran_before_ready(node, commit) or _has_reached_ready_time(node, commit.stream_time)
        return commit.next_offset if ready else None
    ready = _has_consumed_ready_inputs(node, commit.inputs, ready_offsets(node, commit, heads))
    return commit.next_offset if ready else None


def after_run(
    arrival: Arrival,
    inputs: Mapping[str, Offsets],
    offsets: Offsets,
    times: Mapping[int, int],
    started: bool,
) -> dict[str, Any]:
    """Returns the fields ``initial_load`` and ``ready_at`` of a run's commit.

    Args:
        inputs: next offsets of each input after the run.
        offsets, times: the log's next offsets and stream time after the run.
        started: whether the table has read its initial snapshot.
    """
    node, before, source = arrival.node, arrival.before, arrival.source
    loaded = before.initial_load or arrival.initial_load
    starts = source is not None and start_of(node) is not None
    if before.ready_at is not None or not declares_ready(node):
        end = before.initial_load
        if source is not None and starts and not started:
            end = _end_of(source, loaded or None)
        return {"initial_load": end, "ready_at": before.ready_at}
    if source is None:
        ready = _has_consumed_ready_inputs(node, inputs, arrival.ready)
        return {"ready_at": dict(offsets) if ready else None}
    if _ran_before_ready(node, before):
        return {"ready_at": before.next_offset}
    if isinstance(node, VersionedTable) and node.ready == "initial_load":
        end = _end_of(source, loaded)
        whole = source.reaches(end) and (started or not starts)
        return {"initial_load": end, "ready_at": dict(offsets) if whole else None}
    return {"ready_at": dict(offsets) if _has_reached_ready_time(node, times) else None}


def _end_of(source: Pinned, first: End | None) -> End:
    """Returns the end up to which a table is loaded: that of its first run, or, if the table has got
    another kind of source or other topics since, that of its source now.

    Args:
        first: ``Commit.initial_load``; None = no run has recorded it.
    """
    now = source.source_end
    if first is None or isinstance(now, str) != isinstance(first, str):
        return now
    return first if isinstance(now, str) or {*now} & {*first} else now


def _ran_before_ready(node: Stream, commit: Commit) -> bool:
    """Returns whether the table had runs before ``ready="initial_load"`` was declared."""
    wanted = isinstance(node, VersionedTable) and node.ready == "initial_load"
    return wanted and commit.batch > 0 and commit.initial_load is None


def _has_reached_ready_time(node: Stream, stream_time: Mapping[int, int]) -> bool:
    if not isinstance(node, VersionedTable) or not isinstance(node.ready, datetime):
        return False
    moment = epoch_micros(node.ready)
    return bool(stream_time) and min(stream_time.values()) >= moment


def _has_consumed_ready_inputs(
    node: Stream, inputs: Mapping[str, Offsets], ready: Mapping[str, Offsets | None]
) -> bool:
    """Returns whether all inputs are ready, and consumed ones were read up to their ready offsets."""
    consumed = {up.name for up in processor_of(node).plan().consumed}
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
    waited_for = () if node.operator is None else node.operator.waits_for
    tables = [up for up in waited_for if declares_ready(up) and up.retention is not None]
    streams = [up for up in node.inputs if up.name in arrival.taken and not up.is_table]
    if not arrival.ready or not streams or not tables:
        return
    stream, commit = streams[0], arrival.inputs[streams[0].name]
    start = arrival.before.inputs.get(stream.name, {})
    rows = stores(stream).log(start, commit).where(moves_stream_time(stream.key))
    earliest = rows.groupBy(PARTITION).agg(F.unix_micros(F.min(TIMESTAMP)).alias("first"))
    found = {r[PARTITION]: r["first"] for r in earliest.collect()}
    for table in tables:
        now = arrival.tables[table.name].stream_time
        alike = _partitioned_alike(stream, commit.commit.stream_time, table, now)
        _require_history(node, table, now, found, alike)


def _partitioned_alike(
    stream: Stream, own: Mapping[int, int], table: Stream, theirs: Mapping[int, int]
) -> bool:
    """Returns whether stream and table put a key into the same partition, as far as that is known."""
    inside = all(partition < stream.partitions for partition in (*own, *theirs))
    return stream.partitioning == table.partitioning and (inside or own.keys() == theirs.keys())


def _require_history(
    node: Stream, table: Stream, now: Mapping[int, int], earliest: Mapping[int, int], alike: bool
) -> None:
    """Refuses a run with records from before the table's history.

    Args:
        now: the table's stream time by partition.
        earliest: the smallest timestamp of the records by partition.
        alike: see :func:`_partitioned_alike`; if false, any partition may have a record's key.
    """
    rules = table.version_rules
    assert rules is not None
    known = rules.horizons(now)
    if known and not alike:
        # The key may be in any partition of the table, so the shortest history must cover the record.
        known = dict.fromkeys(earliest, max(known.values()))
    forgotten = {p: first for p, first in earliest.items() if first < known.get(p, first)}
    if not forgotten:
        return
    partition, first = min(forgotten.items(), key=lambda one: one[1])
    kept = spoken(rules.history_retention)
    raise RefusedRecordsError(
        f"{node.name}: expected the history of {table.name} to cover all records that have waited for "
        f"it to be ready, but the first of them is of {in_utc(first)} (partition {partition}), and the "
        f"history is {kept}, from {in_utc(known[partition])} on; nothing was committed. "
        f"Set a longer history_retention of {table.name}, or run once with accept_not_ready: true to "
        "join them with the remaining versions",
        sorted(forgotten),
    )


# Pin


def source_of(node: Stream) -> Source:
    """Returns the source of a node's records.

    Raises:
        SourceError: the node has no source.
    """
    source: Any = node.source
    if node.operator is not None:
        raise SourceError(
            f"{node.name}: expected a stream or table with a source, got the result of an operator; "
            "take one of its inputs"
        )
    if not hasattr(source, "pin"):
        raise SourceError(
            f"{node.name}: expected a source to read from, got {source!r}; give it one, for "
            "example source=FilesSource('data/landing/weather', format='csv')"
        )
    return source


def from_source(
    node: Stream,
    store: Store,
    at: Snapshot,
    source: Source | None,
    initial_load: End | None = None,
    **pin_arguments: Any,
) -> Arrival:
    """Pins the records of a source asset's run.

    Args:
        at: snapshot of the asset's tables when the run starts.
        source: None = the node's own; with another one, no initial snapshot is read.
        initial_load: the end of the source up to which a new table is loaded, as of the run that this
            one repeats; None = its end now.
        pin_arguments: arguments of the source's ``pin``.
    """
    commit = None if at.head is None else at.head.commit
    alone = source is not None
    consumed = store.consumed_files(at.head)
    pinned = (source or source_of(node)).pin(commit, consumed=consumed, **pin_arguments)
    return Arrival(
        node,
        at.head,
        store.new_attempt(),
        source=pinned,
        start=None if alone else snapshot_to_load(node, commit, pinned, initial_load),
        initial_load=initial_load,
        taken=pinned.taken,
        view_rows=at.reach(),
        rows_read=at.reach(),
        state_bytes=store.state_bytes(at.head),
    )


def snapshot_to_load(
    node: Stream, commit: Commit | None, pinned: Pinned, initial_load: End | None
) -> Whole | None:
    """Returns the initial snapshot of a table, if this run has to read it; else None.

    The run that reaches the end of the changes that existed at the first run reads it. None = an
    earlier or a later run reads it, or it does not exist.

    Args:
        commit: the table's last commit.
        initial_load: see :func:`from_source`.
    """
    source = start_of(node)
    if source is None or (commit is not None and commit.start is not None):
        return None
    first = initial_load if commit is None else commit.initial_load or initial_load
    return pin_start(source) if pinned.reaches(_end_of(pinned, first or None)) else None


def snapshot_is_pending(node: Stream, commit: Commit | None) -> bool:
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
    started, plan = time.monotonic(), processor_of(node).plan()
    before = before_of(node, at.head)
    inputs, tables, taken = dict[str, Head](), dict[str, Snapshot](), Ranges()
    rows_read = at.reach() if plan.reads_own_table else 0
    erased, names = 0, {up.name for up in plan.consumed}
    heads: dict[str, Commit] = {}
    for up in {up.name: up for up in node.inputs}.values():
        # One snapshot per input, even if it is both consumed and looked up: its log and its view must
        # be as of the same commit.
        found = stores(up).snapshot()
        if found.head is None:
            continue
        heads[up.name] = found.head.commit
        if isinstance(up, Table) and _reads_rows_of(plan, up, names):
            tables[up.name] = found
            rows_read += found.reach() if up.name in names and plan.reads_tables else 0
        if up.name not in names:
            continue
        inputs[up.name] = found.head
        require_consumable(node, up, at.head, found.head.commit, stores)
        ends, first = found.head.commit.next_offset, before.inputs.get(up.name, {})
        ranges = {p: (first.get(p, 0), end) for p, end in ends.items() if end > first.get(p, 0)}
        if ranges:
            taken[up.name] = ranges
            erased += _erased(stores(up), found.head, ranges)

    def last(up: Stream) -> Commit | None:
        head = None if up.name in heads else stores(up).snapshot().head
        return heads.get(up.name) if head is None else head.commit

    ready = ready_offsets(node, before, last)
    assert node.operator is not None
    not_ready = [up.name for up in node.operator.waits_for if ready.get(up.name, {}) is None]
    waiting = sum(e - s for ranges in taken.values() for s, e in ranges.values())
    if not_ready and not accept_not_ready:
        # Without records the run commits nothing: a later run, with ready tables, consumes them all.
        taken = {}
    return Arrival(
        node,
        at.head,
        store.new_attempt(),
        inputs=inputs,
        tables=tables,
        taken=taken,
        stream_time=dict(before.stream_time),
        view_rows=at.reach(),
        erased=erased,
        rows_read=rows_read,
        state_bytes=store.state_bytes(at.head),
        ready=ready,
        not_ready=not_ready,
        waiting=0 if taken else waiting,
        started=started,
    )


def _reads_rows_of(plan: RunPlan, table: Table, consumed: Collection[str]) -> bool:
    of_times = plan.looked_up is not None and plan.looked_up.name == table.name
    return plan.reads_tables or of_times or table.name not in consumed


def require_consumable(
    node: Stream, up: Stream, head: Head | None, commit: Commit, stores: Stores
) -> None:
    """Checks that an operator can go on with the log of an input. Does not use Spark.

    Args:
        node: the operator's result.
        up: an input that it consumes; ``commit``: its last commit.
        head: the operator's last commit; None = nothing consumed.

    Raises:
        NeedsReplayError: another log has replaced the consumed one under its name.
        StorageError: the log was restored from a backup, or has been truncated too far.
    """
    before = before_of(node, head)
    consumed = None if head is None else head.commit
    require_same_log(node.name, up.name, consumed, commit, stores(up).attempt_of)
    require_not_truncated(node.name, up.name, before.inputs.get(up.name, {}), commit)
    require_reach(node, up, before, commit)
    if before.logs.get(up.name, commit.log) != commit.log:
        raise NeedsReplayError(
            f"{node.name}: expected the log of {up.name} that batch {before.batch} consumed, got "
            f"another log: its offsets mean other records. Replay {node.name} under another name, "
            "compare the two, and swap them"
        )


def require_reach(node: Stream, up: Stream, before: Commit, commit: Commit) -> None:
    """Refuses a run that would re-read truncated records of an input. Maintenance keeps what
    the operator needs as it is declared, up to the log retention.

    Args:
        node: the operator's result.
        up: the input; ``commit``: its last commit.
        before: the operator's last commit.

    Raises:
        StorageError: since the truncation, the operator was declared to read further back.
    """
    truncation = commit.truncation
    back = retained_from(node, up, before, commit)
    if truncation is None or back is None or node.operator is None:
        return
    reach = node.operator.rescan_span.get(up.name, timedelta(0))
    micros = reach // timedelta(microseconds=1)
    for partition, newest in truncation.stream_time.items():
        now = before.stream_time.get(partition, newest + micros)
        if micros > truncation.log_retention and max(back, now - micros) < newest:
            raise StorageError(
                f"{node.name}: expected to read only records of {up.name} after {in_utc(newest)}, but "
                f"as declared now it reads {spoken(reach)} back from {in_utc(now)}, and "
                f"{truncation.description()}; shorten its window or grace period, or rebuild it "
                "(vt-dagster replay)"
            )


def retained_from(node: Stream, up: Stream, before: Commit, last: Commit) -> int | None:
    """Returns from when on an operator may re-read an input's log after its last commit: records with a
    larger timestamp, epoch microseconds; None = none.

    Args:
        last: the input's last commit.
    """
    rescan = processor_of(node).plan(times_of(before)).rescan_from(up.name)
    operator, final, corrected = node.operator, before.watermarks.get(FINAL), None
    reach = None if operator is None else operator.rescan_span.get(up.name)
    if final and reach is not None and up.is_table:
        corrected = min(last.stream_time.values()) - reach // timedelta(microseconds=1) - 1
    elif final and reach is not None:
        corrected = min(final.values()) - 1
    return earliest(rescan, corrected)


def _erased(store: Store, head: Head, ranges: Mapping[int, tuple[int, int]]) -> int:
    """Returns how many rows of the ranges, which extend to the log's end, have been erased. Uses Spark
    only if rows were erased after the start of a range."""
    before = head.commit.erased_before
    if all(start >= before.get(p, 0) for p, (start, _) in ranges.items()):
        return 0
    start = dict(head.commit.next_offset) | {p: first for p, (first, _) in ranges.items()}
    there = store.log(start, head).count()
    return sum(end - first for first, end in ranges.values()) - there


def require_inputs_unchanged(name: str, pinned: Iterable[tuple[Store, Head]]) -> None:
    """Refuses a commit of rows that may not be those of the pinned inputs, or have a key that was
    erased since: an erase does not search a consumer that has no log yet.

    Args:
        name: the consumer.
        pinned: the store of each input, and the commit that the run reads.

    Raises:
        ConcurrentRunError: names the input.
    """
    for store, head in pinned:
        now, batch = store.head(), head.commit.batch
        got = ""
        if now is None or now.commit.log != head.commit.log:
            got = "another log: it was swapped or restated"
        elif now.commit.batch > batch and any(c.erases and c.batch > batch for c in store.commits()):
            got = "an erase of a key since, which rows of this run may have"
        if got:
            raise ConcurrentRunError(
                f"{name}: expected the log of {store.node.name} as of batch {batch}, which this run "
                f"reads, got {got}; nothing was committed. Run again when that change is finished"
            )


def clearer_error(arrival: Arrival, error: Exception) -> Exception | None:
    """Returns a clearer error if an input, its files or its values caused the given one; else None."""
    node, inputs = arrival.node, (arrival.source, arrival.start)
    of_inputs = (one.explain(error) for one in inputs if one is not None)
    return (
        unseen(error)
        or next(filter(None, of_inputs), None)
        or pinned_file_removed(node, error)
        or unreadable(node.name, error)
        or zone_unknown(node, error)
        or sum_too_large(node, error)
        or value_refused(node, error)
        or function_failed(node, error)
    )


def pinned_file_removed(node: Stream, error: Exception) -> ConcurrentRunError | None:
    """Returns an error, if a file of a pinned log or view has been removed; else None."""
    if "FAILED_READ_FILE.FILE_NOT_EXIST" not in str(error):
        return None
    return ConcurrentRunError(
        f"{node.name}: expected the table files that the run pinned at its start, but some are gone: a "
        "key was erased during this run, or a clean-up removed too much. Nothing was committed: run "
        "again"
    )


def zone_unknown(node: Stream, error: Exception) -> SparkUnavailableError | None:
    """Returns an error, if Spark does not know the time zone of an aggregate's windows; else None."""
    zone = getattr(getattr(node.operator, "window", None), "zone", None)
    if zone is None or not re.search(rf"\[INVALID_TIMEZONE\].* {re.escape(zone)} ", str(error)):
        return None
    return SparkUnavailableError(
        f"{node.name}: expected Spark to know the time zone {zone!r} of its windows, got a Java whose "
        "time zones are older than those of Python; nothing was committed. Use a newer Java for Spark "
        "and its executors, or declare another zone that has the same clock"
    )


_OVERFLOW = re.compile(
    r"ARITHMETIC_OVERFLOW|NUMERIC_VALUE_OUT_OF_RANGE"
    r"|\bOverflowError: Python int|\bArrowInvalid: Decimal type with precision"
)
"""Errors of Spark, and of Arrow for the sums of sessions and sliding windows."""
_IN_AN_EXPRESSION = "\n== SQL ("
"""Precedes the user's SQL in an error of Spark; a sum is not part of it."""


def sum_too_large(node: Stream, error: Exception) -> ContractError | None:
    """Returns an error, if a sum of an aggregate does not fit its type; else None."""
    sums = {} if node.operator is None else node.operator.sums
    types = {c: node.schema[c].dataType for c in sums}
    # A sum of floating-point numbers becomes infinite. Of an expression only Spark knows the type.
    exact = {c: kind for c, kind in types.items() if not isinstance(kind, DoubleType)}
    if not exact or not _OVERFLOW.search(str(error)) or _IN_AN_EXPRESSION in str(error):
        return None
    shown = [f"{c} = sum({sums[c]}) {_type_name(kind)}".rstrip() for c, kind in exact.items()]
    return ContractError(
        f"{node.name}: expected sums that their types can hold, got a larger number in "
        f"{' or '.join(shown)}; nothing was committed. Sum in a wider type, which needs a replay: "
        "sum(CAST(x AS DECIMAL(38, 0))), or sum(CAST(x AS DOUBLE)), which rounds; or correct the values"
    )


_REFUSED_VALUE = re.compile(r"\[[A-Z_.]+\] ([^\n]*?) (?:If necessary set [^\n]*? )?SQLSTATE: 22\w{3}")
"""Errors of Spark about a value (class 22 of SQL's states), without its advice to set the session."""


def value_refused(node: Stream, error: Exception) -> ContractError | None:
    """Returns an error, if an expression of the operator cannot be computed of a value; else None."""
    found = None if node.operator is None else _REFUSED_VALUE.search(str(error))
    if found is None:
        return None
    return ContractError(
        f"{node.name}: expected values for which its expressions can be computed, got: {found[1]} "
        "Nothing was committed. Compute in a wider type, or with try_add, try_multiply, try_divide or "
        "try_cast, which return null; or correct the values"
    )


_AGGREGATOR_FAILED = re.compile(
    re.escape(FAILED.format("@")).replace("@", "(.*?)") + r"$", re.DOTALL | re.MULTILINE
)
_FUNCTION_FAILED = re.compile(
    r"from the Python worker.*?Traceback [^\n]*\n(?:[ \t][^\n]*\n)*(\w[^\n]*)", re.DOTALL
)
"""The error at the end of a traceback, whose other lines are indented; a JVM's stack may follow."""


def function_failed(node: Stream, error: Exception) -> ContractError | None:
    """Returns an error, if an ``Aggregator`` raised or returned no aggregate, or a Python function that
    is registered in the session raised; else None."""
    if (found := _AGGREGATOR_FAILED.search(str(error))) is not None:
        columns = [f for f in node.schema.fields if f.name not in node.key]
        shown = ", ".join(f"{f.name} {f.dataType.simpleString()}" for f in columns)
        wanted = f"its Aggregator to return dicts of {shown}"
    elif not _in_library(str(error)):
        found, wanted = _FUNCTION_FAILED.search(str(error)), "its Python functions to return values"
    if found is None:
        return None
    return ContractError(
        f"{node.name}: expected {wanted}, got: {found[1]}; nothing was committed. Correct the "
        "functions, then run again"
    )


def _in_library(text: str) -> bool:
    """Returns whether a traceback has a file of this library, wherever the library is on the workers; a
    project's directory may have its name too."""
    own = Path(__file__).parents[1]
    paths = re.findall(r'File "[^"]*?vt_dagster[/\\]([^"]*\.py)"', text)
    inner = [p.replace("\\", "/").rpartition("vt_dagster/")[2] for p in paths]
    return any((own / path).is_file() for path in inner)


def _type_name(kind: DataType) -> str:
    return "" if isinstance(kind, NullType) else f"({kind.simpleString()})"
