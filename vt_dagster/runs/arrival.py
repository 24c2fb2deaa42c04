"""What one run takes, pinned when it starts."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field

from pyspark.sql import DataFrame

from vt_dagster.core.arrival_order import CHUNK, Outcome
from vt_dagster.core.stream_time import Bounds
from vt_dagster.errors import StorageError
from vt_dagster.sources.base import Pinned, Whole
from vt_dagster.spark.small_run_settings import is_small
from vt_dagster.storage.asset_store import shape_of
from vt_dagster.storage.commit_log import Commit, Offsets, Ranges
from vt_dagster.storage.log_snapshot import Head, Snapshot
from vt_dagster.topology.model import Stream

_FEW_BYTES, _SMALL_BYTES = 4_000_000, 2_000_000
"""Of files: so many bytes are some ten thousand lines."""


@dataclass(frozen=True)
class Arrival:
    """What one run takes, pinned when it starts.

    Args:
        node: the asset.
        previous: its last commit; None = there is none.
        attempt: the name of what this run prepares.
        source: what is taken from a source.
        start: the snapshot that it starts with, where the run takes that.
        inputs: of each log that is consumed, the commit up to which.
        tables: of each table that is looked into, what it is looked at as of.
        taken: offsets of logs and topics: ``{input: {partition: [start, end)}}``.
        stream_time: by partition, at the end of the run, where the operator has one of its own.
        emitted_up_to: what is held back goes out up to this time, likewise.
        watermarks: other times that an operator keeps, see ``Processor.watermarks``.
        bounds: how that moves, where it was told so; None = every record is looked at.
        none_late: whether it was told that no record is late.
        gauges: what pinning has told of the records.
        view_rows: how many current rows the asset's own table has.
        erased: how many of the records of logs that it takes have been erased, and are not there.
        rows_read: how many rows of tables the run reads, as far as one knows before it.
        state_bytes: of what an operator keeps from run to run.
        persisted: rows that are held until the commit.
        ready: of each input where its log stood when it became ready, see ``readiness.upstream``.
        not_ready: the tables that a join looks into and that are not ready; it then takes nothing,
            unless it was told to.
        waiting: how many records it does not take for that reason.
        buffered: where the grace period is an op of its own, how many records came out of it, by
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
                    f"{self.node.name}: the log of {name} is another one than in batch "
                    f"{self.before.batch}: its offsets mean other records. Replay {self.node.name} "
                    "into tables of another name, compare, and swap them too"
                )

    @property
    def empty(self) -> bool:
        """Whether there is nothing new: such a run commits nothing."""
        return not self.taken if self.source is None else self.source.empty and self.start is None

    @property
    def before(self) -> Commit:
        """The commit that the run starts from."""
        if self.previous is not None:
            return self.previous.commit
        return Commit(asset=self.node.name, batch=0, attempt="", shape=shape_of(self.node))

    @property
    def reads(self) -> dict[str, int]:
        """The Delta versions of all that is read."""
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
        """How many records of logs or topics the run takes."""
        return sum(end - start for ranges in self.taken.values() for start, end in ranges.values())

    @property
    def records(self) -> int:
        """The same, with those that waited."""
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
        """Whether one task can well put into order what the run takes of a partition."""
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
        """Whether there is so little, also in the tables that the run reads, that planning is most of
        the work."""
        size = self.state_bytes + (self._bytes or 0)
        return size <= _SMALL_BYTES and is_small(self.records, self.rows_read)
