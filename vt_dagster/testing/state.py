"""What the test driver keeps of each stream and table between runs, as Arrow tables."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace

import pyarrow as pa

from vt_dagster.columns import FATE, OFFSET, PARTITION, TIMESTAMP
from vt_dagster.core import step, suppress
from vt_dagster.core.arrival import Fate
from vt_dagster.core.records import REASON
from vt_dagster.testing.versioned_store import to_micros
from vt_dagster.topology.model import Stream


@dataclass
class State:
    """What a node keeps between runs."""

    log: pa.Table | None = None
    considered: pa.Table | None = None
    next_offset: dict[int, int] = field(default_factory=dict[int, int])
    stream_time: dict[int, int] = field(default_factory=dict[int, int])
    kept: pa.Table | None = None
    consumed: dict[str, int] = field(default_factory=dict[str, int])
    read: int = 0
    waiting: Counter[int] = field(default_factory=Counter[int])
    counts: Counter[tuple[int, str]] = field(default_factory=Counter[tuple[int, str]])

    def copy(self) -> State:
        """A state that a later run of this one does not change; Arrow tables never change."""
        return replace(
            self,
            next_offset=dict(self.next_offset),
            stream_time=dict(self.stream_time),
            consumed=dict(self.consumed),
            waiting=Counter(self.waiting),
            counts=Counter(self.counts),
        )

    def append(self, node: Stream, rows: pa.Table) -> pa.Table:
        """Adds a run's results, in order, to the log, with their offsets, and returns them."""
        if FATE in rows.column_names:
            rows = rows.filter(
                pa.array([fate == Fate.APPLIED for fate in rows[FATE].to_pylist()], pa.bool_())
            )
            offsets: list[int] = []
            for partition in rows[PARTITION].to_pylist():
                offsets.append(self.next_offset.get(partition, 0))
                self.next_offset[partition] = offsets[-1] + 1
            if OFFSET in rows.column_names:
                rows = rows.drop_columns([OFFSET])
            rows = rows.append_column(OFFSET, pa.array(offsets, pa.int64()))
        else:
            rows = rows.sort_by([(PARTITION, "ascending"), (OFFSET, "ascending")])
            for partition, offset in zip(
                rows[PARTITION].to_pylist(), rows[OFFSET].to_pylist(), strict=True
            ):
                advance(self.next_offset, partition, offset + 1)
        new = rows.select(step.log_columns(node))
        if new.num_rows:
            log = [new] if self.log is None else [self.log, new]
            self.log = pa.concat_tables(log, promote_options="default")
        return new

    def count(self, considered: pa.Table) -> None:
        """Counts what became of a run's records."""
        why = considered[REASON].to_pylist() if REASON in considered.column_names else None
        fates = zip(considered[PARTITION].to_pylist(), considered[FATE].to_pylist(), strict=True)
        self.waiting.clear()
        for i, (partition, fate) in enumerate(fates):
            if fate == Fate.WAITING:
                self.waiting[partition] += 1
                continue
            self.counts[partition, fate] += 1
            if why and why[i] is not None:
                self.counts[partition, f"{fate}/{why[i]}"] += 1

    def sizes(self) -> dict[int, tuple[int, int]]:
        """Records and bytes of a suppression buffer by partition."""
        sizes: dict[int, tuple[int, int]] = {}
        if self.kept is not None:
            held = zip(
                self.kept[PARTITION].to_pylist(), self.kept[suppress.BYTES].to_pylist(), strict=True
            )
            for partition, size in held:
                records, total = sizes.get(partition, (0, 0))
                sizes[partition] = (records + 1, total + size)
        return sizes


def see(stream_time: dict[int, int], rows: pa.Table) -> None:
    """Moves stream time by the timestamps of rows."""
    moments = zip(rows[PARTITION].to_pylist(), rows[TIMESTAMP].to_pylist(), strict=True)
    for partition, moment in moments:
        advance(stream_time, partition, to_micros(moment))


def advance(positions: dict[int, int], partition: int, to: int) -> None:
    """Moves a position, never back."""
    positions[partition] = max(positions.get(partition, to), to)
