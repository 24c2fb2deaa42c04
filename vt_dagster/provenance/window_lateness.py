"""Estimates the cost of other graces of tumbling and hopping windows. No Spark.

Which records a window accepts depends only on the order of arrival. The rules are those of
``core.windowed_aggregate``; a test compares both.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import numpy as np
import pyarrow as pa

from vt_dagster.columns import OFFSET, PARTITION, TIMESTAMP
from vt_dagster.errors import StorageError
from vt_dagster.provenance.arrival_batches import running_time, split_ranges
from vt_dagster.provenance.key_codes import NONE, KeyCodes
from vt_dagster.provenance.lateness_results import Choice
from vt_dagster.provenance.log_reader import Log, both
from vt_dagster.storage.arrow_reader import micros
from vt_dagster.storage.commit_log import EVER, commits
from vt_dagster.topology.durations import printed

_ONE = timedelta(microseconds=1)
_FIELD = re.compile(r"(\w+)=((?:-?\d+ days?, )?\d+:\d\d:\d\d(?:\.\d+)?)")
_HOMES = 1 << 20
"""Upper bound for the number of partitions: combines a key code and a partition in one number."""
_FIXED = ("TumblingWindow", "HoppingWindow")


@dataclass
class Updates:
    """Stream records with their windows, in order of arrival.

    Args:
        now: stream time as of each record, epoch microseconds.
        windows: one pair of arrays for each window that a record may be in: the window's number
            (``NONE`` = not in that window) and its end (exclusive, epoch microseconds).
    """

    now: Any
    windows: list[tuple[Any, Any]]


@dataclass
class Cost:
    """Counts for one grace; ``lacking``: whether each window lacks a record."""

    late: int = 0
    dropped: int = 0
    lacking: Any = field(default_factory=lambda: np.zeros(0, bool))


class LateWindows:
    """An aggregate by tumbling or hopping windows.

    Args:
        log: the aggregate's log.
        stream: the log of its input.

    Raises:
        StorageError: the windows are of another kind, or computing the key or partition needs Spark.
    """

    def __init__(self, log: Log, stream: Log) -> None:
        self.log, self.stream, self.name = log, stream, log.meaning["source"]
        told = log.meaning["window"]
        kind, lengths = told.partition("(")[0], dict(_FIELD.findall(told))
        if kind not in _FIXED or "size" not in lengths:
            raise StorageError(
                f"{log.name}: expected {' or '.join(_FIXED)} of one size, got {told}: the cost of "
                "another grace cannot be computed from the logs; try one with vt-dagster what-if"
            )
        self.size = printed(lengths["size"]) // _ONE
        self.advance = printed(lengths.get("advance", lengths["size"])) // _ONE
        self.key = _key(log, stream)
        self.merges = log.meaning.get("group_key", "()") != "()"
        if self.merges and len(log.commit.next_offset) > 1:
            raise StorageError(
                f"{log.name}: expected windows by the stream's own key, or in one partition, got a new "
                f"key in {len(log.commit.next_offset)} partitions: the partition of a record, and so "
                "its stream time, needs Spark; try a grace with vt-dagster what-if"
            )
        self._keys, self._windows = KeyCodes(len(self.key)), KeyCodes(2)
        self._many = 0

    def updates(self) -> Iterator[Updates]:
        """Yields all records that runs have consumed, in order of arrival."""
        before: dict[int, int] = {}
        latest: dict[int, int] = {}
        for run in commits(self.log.root):
            ends = run.inputs.get(self.name, {})
            whole = None if not self.merges else sum(ends.values())
            for start, end in split_ranges({p: (before.get(p, 0), e) for p, e in ends.items()}, whole):
                yield self._taken(start, end, latest)
            before = {**before, **ends}

    def _taken(self, start: dict[int, int], end: dict[int, int], latest: dict[int, int]) -> Updates:
        only = list(dict.fromkeys([PARTITION, OFFSET, TIMESTAMP, *self.key]))
        rows = self.stream.rows(both(), start, end, only)
        codes = self._keys.of([rows.column(k) for k in self.key])
        home, moment = rows.column(PARTITION).to_numpy(), micros(rows, TIMESTAMP)
        if self.merges:
            # A Kafka Streams task merges its partitions by time in this order, see Processor.in_order.
            order = np.lexsort((rows.column(OFFSET).to_numpy(), home, running_time(home, moment, {})))
            codes, moment, home = codes[order], moment[order], np.zeros(len(order), home.dtype)
        now = running_time(home, np.where(codes == NONE, EVER, moment), latest)
        there = codes != NONE
        codes, home, moment, now = codes[there], home[there], moment[there], now[there]
        group = codes * _HOMES + home
        return Updates(now, [self._window(group, moment, back) for back in self._backs()])

    def _backs(self) -> range:
        return range(-(-self.size // self.advance))

    def _window(self, group: Any, moment: Any, back: int) -> tuple[Any, Any]:
        """Returns the window that starts ``back`` advances before the last window of each record."""
        start = moment - moment % self.advance - back * self.advance
        there = (start + self.size > moment) & ((start >= 0) | (moment < 0))
        found = np.full(len(moment), NONE, np.int64)
        places = [pa.chunked_array([pa.array(one[there])]) for one in (group, start)]
        found[there] = self._windows.of(places)
        self._many = max(self._many, int(found.max(initial=NONE)) + 1)
        return found, start + self.size

    # -- a grace -------------------------------------------------------------------------------------

    def cost(self, lengths: Sequence[timedelta]) -> list[Choice]:
        """Returns the cost of each grace."""
        costs = [Cost() for _ in lengths]
        for updates in self.updates():
            for length, cost in zip(lengths, costs, strict=True):
                self._count(updates, length // _ONE, cost)
        return [
            Choice(n, of=self._many, wrong=int(c.lacking.sum()), late=c.late, dropped=c.dropped)
            for n, c in zip(lengths, costs, strict=True)
        ]

    def _count(self, updates: Updates, grace: int, cost: Cost) -> None:
        cost.lacking = np.append(cost.lacking, np.zeros(self._many - len(cost.lacking), bool))
        late = np.zeros(len(updates.now), bool)
        for window, end in updates.windows:
            closed = (window != NONE) & (end + grace <= updates.now)
            late |= closed
            cost.dropped += int(closed.sum())
            cost.lacking[window[closed]] = True
        cost.late += int(late.sum())

    def smallest(self, at_most: float) -> Choice:
        """Returns the shortest grace with which at most a given share of windows lacks a record."""
        needed = np.zeros(0, np.int64)
        for updates in self.updates():
            needed = np.append(needed, np.zeros(self._many - len(needed), np.int64))
            for window, end in updates.windows:
                there = window != NONE
                np.maximum.at(needed, window[there], (updates.now - end + 1)[there])
        needed.sort()
        place = len(needed) - int(at_most * len(needed) + 1e-9) - 1
        length = max(int(needed[place]), 0) if place >= 0 else 0
        return self.cost([length * _ONE])[0]


def _key(log: Log, stream: Log) -> tuple[str, ...]:
    """Returns the grouping columns."""
    told = [one.strip(" `") for one in log.meaning.get("group_key", "()").strip("()").split(",")]
    chosen = tuple(one for one in told if one)
    if not chosen:
        return stream.key
    columns = stream.head.shape.columns or []
    if any(one not in columns for one in chosen):
        raise StorageError(
            f"{log.name}: expected windows by columns of {stream.name}, {columns}, got "
            f"{log.meaning['group_key']}, which needs Spark; try a grace with vt-dagster what-if"
        )
    return chosen
