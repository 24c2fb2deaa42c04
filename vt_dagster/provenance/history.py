"""What the history of a key does with a record: its place among the others, and what became of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime

import pyarrow as pa

from vt_dagster import rules
from vt_dagster.columns import IS_TOMBSTONE, OFFSET, PARTITION, TIMESTAMP, VALID_TO
from vt_dagster.provenance.logs import Condition, Log, as_time, both
from vt_dagster.provenance.values import Record, Told
from vt_dagster.storage.folding import fold, micros
from vt_dagster.storage.positions import Commit, horizons


@dataclass(frozen=True)
class Version:
    """A row of a table with the time in which it is true.

    Args:
        begin: inclusive; end: exclusive, None = current.
    """

    partition: int
    offset: int
    begin: datetime
    end: datetime | None
    is_tombstone: bool

    @property
    def place(self) -> tuple[int, int]:
        """Its partition and offset: which record it is."""
        return self.partition, self.offset


class History:
    """All records of a key in a table's log, and what the table made of them.

    Args:
        log: the table's.
        key: the condition that a record is of the key; None = of no key, which has no records.
    """

    def __init__(self, log: Log, key: Condition | None) -> None:
        self.log = log
        self._rows = log.rows(key or both(), end=None if key else {})
        places = (self._rows.column(c).to_pylist() for c in (PARTITION, OFFSET))
        self._place = {place: i for i, place in enumerate(zip(*places, strict=True))}

    def versions(self, commit: Commit, forgotten: bool = True) -> list[Version]:
        """The versions as of a commit, oldest first; of a plain table the row.

        Args:
            forgotten: whether what has expired is left out.
        """
        ends = commit.next_offset
        rows = self._rows.filter(pa.array([o < ends.get(p, 0) for p, o in self._place], pa.bool_()))
        if not rows.num_rows:
            return []
        versioned = self.log.head.shape.kind == "versioned"
        limits = None
        if versioned:
            limits = horizons_of(self.log, commit) if forgotten else {}
        found = fold(None, rows, self.log.key, limits)
        begins, until = micros(found, TIMESTAMP).tolist(), [None] * found.num_rows
        if versioned:
            there = found.column(VALID_TO).is_null().to_pylist()
            until = [None if n else m for n, m in zip(there, micros(found, VALID_TO), strict=True)]
        columns = (found.column(c).to_pylist() for c in (PARTITION, OFFSET, IS_TOMBSTONE))
        told = [
            Version(p, o, as_time(begin), None if end is None else as_time(int(end)), deleted)
            for p, o, deleted, begin, end in zip(*columns, begins, until, strict=True)
        ]
        return sorted(told, key=lambda one: one.begin)

    def record(self, place: tuple[int, int]) -> Record:
        """The record at a partition and offset."""
        return self.log.as_records(self._rows.slice(self._place[place], 1))[0]


def horizons_of(log: Log, commit: Commit) -> Mapping[int, int]:
    """What ended by then has expired: of each partition, epoch microseconds."""
    ends = horizons(log.head.shape.retention(), commit.stream_time)
    return dict(zip(commit.stream_time, ends, strict=True))


def place_of(log: Log, record: Record, told: Told) -> None:
    """Tells where a record stands in the history of its key."""
    if log.head.shape.kind == "stream":
        told.decide(rules.APPLIED, "a stream takes every record, whatever its time")
        return
    others = History(log, log.same_key(record.values)).versions(log.commit, forgotten=False)
    here = next((v for v in others if v.place == (record.partition, record.offset)), None)
    if log.head.shape.kind == "table":
        if here is not None:
            told.decide(rules.LATEST, "it is the row of its key")
        elif others:
            told.decide(rules.REPLACED, f"offset {_at(others[-1])} came later")
        else:
            told.decide(rules.LATEST, "its key has no row any more: the last record is a tombstone")
        return
    if record.is_latest is False:
        told.decide(
            rules.OUT_OF_ORDER, "when it came, its key had a record of a later timestamp already"
        )
    else:
        told.decide(rules.APPLIED, "when it came, no record of its key had a later timestamp")
    if here is None:
        same = [v for v in others if v.begin == record.timestamp]
        told.decide(rules.REPLACED, f"offset {_at(same[-1])} has the same timestamp and came later")
        return
    horizon = horizons_of(log, log.commit).get(record.partition)
    if here.end is not None and horizon is not None and here.end <= as_time(horizon):
        told.decide(
            rules.EXPIRED, f"it ended at {here.end}, and the table remembers since {as_time(horizon)}"
        )
    until = "now" if here.end is None else str(here.end)
    told.notes.append(f"true from {record.timestamp} (inclusive) to {until} (exclusive)")


def _at(record: Version) -> str:
    return f"{record.partition}:{record.offset}"
