"""A join of two streams, record by record: by Kafka Streams' rules (FORMAT.md 4.13), and by ours.

The rules differ in four points, each a keyword of :class:`StreamJoin`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf
from typing import Any, NamedTuple

from tests.core.reference.run import joined

Entry = dict[str, Any]
OTHER = {"left": "right", "right": "left"}


class Row(NamedTuple):
    time: int
    side: str
    key: str | None
    value: str
    arrival: int

    @property
    def place(self) -> tuple[int, bool, bytes, int]:
        """The sort order of rows: time, then right before left, then key, then arrival."""
        return self.time, self.side == "left", (self.key or "").encode(), self.arrival


@dataclass
class StreamJoin:
    """Processes a scenario's records, and keeps the emitted records and the number of dropped ones.

    Args:
        config: the scenario's config.
        loses_boundary: a record within the grace period does not find records at or before the other
            side's time - retention.
        cuts_at_zero: the bounds of windows are at least time 0.
        alone_at_once: a record without a match that arrives after its window's end is emitted at once,
            though the grace period is not over.
        delays: the unmatched records are checked only when the watermark is due.
    """

    config: Entry
    loses_boundary: bool = False
    cuts_at_zero: bool = False
    alone_at_once: bool = False
    delays: bool = False
    emitted: list[Entry] = field(default_factory=list[Entry])
    dropped: int = 0
    now: int = -1
    looked: int = -1
    watermark: float = inf
    newest: dict[str, int] = field(default_factory=lambda: {"left": -1, "right": -1})
    stored: dict[str, list[Row]] = field(default_factory=lambda: {"left": [], "right": []})
    unmatched: list[Row] = field(default_factory=list[Row])
    fed: list[Entry] = field(default_factory=list[Entry])

    def __post_init__(self) -> None:
        before, after, grace = (self.config[c] for c in ("before", "after", "grace"))
        self.fore, self.back = {"left": after, "right": before}, {"left": before, "right": after}
        self.waits(grace)
        self.kept = {"inner": (), "left": ("left",), "outer": ("left", "right")}[self.config["kind"]]

    def waits(self, grace: int) -> None:
        """Sets the grace period from now on."""
        self.grace, self.retention = grace, self.config["before"] + self.config["after"] + grace

    def changed(self, i: int, grace: int) -> None:
        """Changes the grace period between two records. Unmatched records that are due by a shorter one
        are emitted, with the next record as their trigger."""
        self.waits(grace)
        self.let_go(i, "left")

    def feed(self, records: list[Entry]) -> StreamJoin:
        for i, r in enumerate(records, len(self.fed)):
            self.fed.append(r)
            self.now = max(self.now, r["timestamp"])
            self.take(i, r["input"], r["key"], r["value"], r["timestamp"])
        return self

    def take(self, i: int, side: str, key: str | None, value: str | None, time: int) -> None:
        if value is None or (key is None and side not in self.kept):
            self.dropped += 1
            return
        row = Row(time, side, key, value, i)
        if key is None:
            self.emit(i, row, None)
            return
        if time == self.now and self.kept:
            self.looked = self.now
            self.let_go(i, side)
        found = self.found(row)
        for other in found:
            self.emit(i, row, other)
            self.unmatched = [u for u in self.unmatched if u[:3] != other[:3]]
        if not found and side in self.kept:
            end = max(0, time + self.fore[side]) if self.cuts_at_zero else time + self.fore[side]
            if end < self.now - (0 if self.alone_at_once else self.grace):
                self.emit(i, row, None)
            else:
                self.unmatched.append(row)
                self.watermark = min(self.watermark, time)
        self.newest[side] = max(self.newest[side], time)
        self.dropped += self.is_expired(side, time)
        self.stored[side].append(row)

    def found(self, row: Row) -> list[Row]:
        low, high = row.time - self.back[row.side], row.time + self.fore[row.side]
        if self.cuts_at_zero:
            low, high = max(0, low), max(0, high)
        other = OTHER[row.side]
        in_time = row.time >= self.now - self.grace and not self.loses_boundary
        horizon = -inf if in_time else self.newest[other] - self.retention
        there = [r for r in self.stored[other] if r.key == row.key and low <= r.time <= high]
        return sorted((r for r in there if r.time > horizon), key=lambda r: (r.time, r.arrival))

    def is_due(self, row: Row) -> bool:
        return row.time + self.fore[row.side] < self.looked - self.grace

    def let_go(self, i: int, side: str) -> None:
        if self.delays and not self.watermark + self.fore[side] < self.now - self.grace:
            return
        left: list[Row] = []
        met: set[str] = set()
        self.watermark, ended = inf, False
        for row in sorted(self.unmatched, key=lambda r: r.place):
            if not ended:
                self.watermark = row.time
                ended = self.delays and len(met) == 2
            if ended or not self.is_due(row):
                met.add(row.side)
                left.append(row)
            else:
                self.emit(i, row, None)
        self.unmatched = left

    def is_expired(self, side: str, time: int) -> bool:
        segment = max(60_000, self.retention // 2)
        return time // segment < max(0, self.newest[side] - self.retention) // segment

    def emit(self, i: int, row: Row, other: Row | None) -> None:
        left, right = (row, other) if row.side == "left" else (other, row)
        value = joined(left and left.value, right and right.value)
        time = max(r.time for r in (row, other) if r is not None)
        self.emitted.append({"trigger": i, "key": row.key, "value": value, "timestamp": time})


def as_kafka(scenario: Entry) -> StreamJoin:
    """Runs the scenario by Kafka Streams' rules."""
    every = {"loses_boundary": True, "cuts_at_zero": True, "alone_at_once": True, "delays": True}
    return StreamJoin(scenario["config"], **every).feed(scenario["records"])


def as_here(scenario: Entry, **kafkas: bool) -> StreamJoin:
    """Runs the scenario by our rules, except for the given points, which follow Kafka Streams."""
    return StreamJoin(scenario["config"], **kafkas).feed(scenario["records"])
