"""The records, tables and positions of one run, pinned when the run starts."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field

from pyspark.sql import DataFrame

from vt_dagster.core.arrival_order import CHUNK, Outcome
from vt_dagster.core.stream_time import Bounds
from vt_dagster.errors import StorageError
from vt_dagster.sources.base import Pinned, Whole
from vt_dagster.spark.settings import is_small
from vt_dagster.storage.asset_store import shape_of
from vt_dagster.storage.commit_log import Commit, Offsets, Ranges
from vt_dagster.storage.spark_reader import Head, Snapshot
from vt_dagster.topology.model import Stream

_FEW_BYTES, _SMALL_BYTES = 4_000_000, 2_000_000
"""Limits on the size of files: these are about ten thousand lines."""


@dataclass(frozen=True)
class Arrival:
    """The records, tables and positions of one run, pinned when the run starts.

    Args:
        node: the asset.
        previous: the asset's last commit; None = there is none.
        attempt: the name under which this run stages files.
        source: the records pinned at a source.
        start: the initial snapshot of the source, if this run reads it.
        inputs: per consumed log, the commit up to which the run reads.
        tables: per looked-up table, the snapshot that the run reads.
        taken: offsets of logs and topics: ``{input: {partition: [start, end)}}``.
        stream_time: per partition, at the end of the run, if the operator keeps its own stream time.
        emitted_up_to: per partition, the time up to which buffered records are emitted.
        watermarks: other times that an operator keeps, see ``Processor.watermarks``.
        bounds: stream-time bounds per chunk; None = stream time is computed per record.
        none_late: whether pinning has shown that no record is late.
        gauges: metrics of the records, computed while pinning.
        view_rows: how many current rows the asset's own table has.
        erased: how many of the consumed log records have been erased, so that their rows are missing.
        rows_read: how many rows of tables the run reads, as estimated before the run.
        state_bytes: size of the operator's state.
        persisted: DataFrames that stay persisted until the commit.
        ready: per input, the offsets of its log when it became ready, see ``readiness.upstream``.
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
    persisted: list[DataFrame] = field(default_factory=list[DataFrame])
    ready: dict[str, Offsets | None] = field(default_factory=dict[str, "Offsets | None"])
    not_ready: list[str] = field(default_factory=list[str])
    waiting: int = 0
    buffered: dict[str, int] = field(default_factory=dict[str, int])
    started: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        for name, head in self.inputs.items():
            known = self.before.logs.get(name, head.commit.log)
            if known != head.commit.log:
                raise StorageError(
                    f"{self.node.name}: expected the log of {name} that batch {self.before.batch} "
                    "consumed, got another log: its offsets mean other records. Replay "
                    f"{self.node.name} under another name, compare the two, and swap them"
                )

    @property
    def empty(self) -> bool:
        """Whether there are no new records: such a run commits nothing."""
        return not self.taken if self.source is None else self.source.empty and self.start is None

    @property
    def before(self) -> Commit:
        """The commit that the run starts from."""
        if self.previous is not None:
            return self.previous.commit
        return Commit(asset=self.node.name, batch=0, attempt="", shape=shape_of(self.node))

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
        waiting = self.before.counts.get(Outcome.WAITING, 0)
        return max(of_each.values(), default=0) + waiting <= CHUNK

    def few_records_of(self, name: str) -> bool:
        """Whether the run takes few records of an input."""
        return sum(end - start for start, end in self.taken.get(name, {}).values()) <= CHUNK

    @property
    def small(self) -> bool:
        """Whether records and tables are so small that planning takes most of the run's time."""
        size = self.state_bytes + (self._bytes or 0)
        return size <= _SMALL_BYTES and is_small(self.records, self.rows_read)
