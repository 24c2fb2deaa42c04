"""Looks up many records at once in a versioned table, as of any of its commits. No Spark.

The rules are those of ``core.versioned_table`` and ``core.as_of_join``; a test compares both. All
records of the table's log are in memory, sorted by key and time: about 60 bytes each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import pyarrow as pa

from vt_dagster.columns import IS_TOMBSTONE, OFFSET, PARTITION, RECORDED_AT, TIMESTAMP, VALID_FROM
from vt_dagster.provenance.key_codes import NONE, KeyCodes, plain
from vt_dagster.provenance.log_reader import Log, both
from vt_dagster.storage.arrow_reader import arrival_order, micros
from vt_dagster.storage.commit_log import EVER, Commit, horizons

NOTHING = -1
"""Stands for no version."""
_NEVER = np.iinfo(np.int64).max
"""End of a version without a ``valid_until``."""


@dataclass(frozen=True)
class Match:
    """How a join matches records with versions, see ``StreamTableJoin``.

    Args:
        columns: the table's columns in a result; may contain ``valid_from``.
        max_age: the maximum age of a version; None = unlimited.
        before: whether the match needs ``valid_from < timestamp``; else ``<=``.
        valid_until: the column with the end of a version; None = the table has no such column.
    """

    columns: Sequence[str]
    max_age: timedelta | None = None
    before: bool = False
    valid_until: str | None = None


class Versions:
    """The records of a table's log, each with the first state that contains it.

    Args:
        log: the table's log.
        states: the table's commits that runs read, ascending; None = the table did not exist yet. The
            index after the last one stands for the current state.
        match: how the join matches.
    """

    def __init__(self, log: Log, states: Sequence[Commit | None], match: Match) -> None:
        names = [PARTITION, OFFSET, TIMESTAMP, RECORDED_AT, IS_TOMBSTONE]
        wanted = [c for c in match.columns if c != VALID_FROM]
        names += [match.valid_until] if match.valid_until else []
        rows = log.rows(both(), only=list(dict.fromkeys([*names, *log.key, *wanted])))
        self.keys, self._match, self.now = KeyCodes(len(log.key)), match, len(states)
        codes = self.keys.of([rows.column(k) for k in log.key])
        begin, offset = micros(rows, TIMESTAMP), rows.column(OFFSET).to_numpy()
        partition = rows.column(PARTITION).to_numpy()
        rank = np.lexsort((*arrival_order(rows), begin, codes))
        columns: list[Any] = [plain(rows.column(c)) for c in wanted]
        if VALID_FROM in match.columns:
            columns.append(pa.array(begin))
        self._alike = _alike(columns, len(rank))[rank]
        self._code, self._begin = codes[rank], begin[rank]
        self._deleted = rows.column(IS_TOMBSTONE).to_numpy()[rank]
        self._until = _until(rows, match.valid_until)[rank]
        homes, self._home = np.unique(partition, return_inverse=True)
        self._home = self._home[rank]
        self._since = _since(states, homes, partition, offset)[rank]
        self._horizon = _horizons(log, states, homes)
        self._times = np.unique(begin)
        self._order = self._code * (len(self._times) + 1) + self._rank(self._begin)
        self._least, self._first = _pyramid(self._since)

    def _rank(self, moments: Any) -> Any:
        return np.searchsorted(self._times, moments, side="right")

    def place(self, codes: Any, moments: Any) -> Any:
        """Returns the place of each record's last version by current knowledge: the last that begins at
        or before the record's time (strictly before with ``Match.before``). Includes replaced versions.

        Args:
            codes: key codes from ``keys``.
            moments: the records' times, epoch microseconds.
        """
        looked = moments - 1 if self._match.before else moments
        order = codes * (len(self._times) + 1) + self._rank(looked)
        found = np.searchsorted(self._order, order, side="right") - 1
        return self._of_key(np.where(codes == NONE, NOTHING, found), codes)

    def answers(self, place: Any, codes: Any, moments: Any, states: Any) -> tuple[Any, Any]:
        """Returns the place of the version that each record matches in a state, and whether the version
        was missing because the retention had expired it.

        Args:
            place: see :meth:`place`.
            states: the state of each record's lookup; ``now`` = the current state, without expiry.
        """
        looked = moments - 1 if self._match.before else moments
        found = self._of_key(self._last_known(place, states), codes)
        there = np.flatnonzero(found != NOTHING)
        limit = self._horizon[states[there], self._home[found[there]]]
        old = there[looked[there] < limit]
        last = np.searchsorted(self._code, codes[old], side="right") - 1
        own_end = self._until[found[old]] < _NEVER
        ended = old[own_end | (self._last_known(last, states[old]) != found[old])]
        forgotten = np.zeros(len(found), bool)
        forgotten[ended] = True
        found[ended] = NOTHING
        found[self._empty(found, looked)] = NOTHING
        return found, forgotten

    def _empty(self, found: Any, looked: Any) -> Any:
        """Returns where a lookup has no match: no version, a tombstone, an ended or too old version."""
        if not len(self._begin):
            return found == NOTHING
        empty = (found == NOTHING) | self._deleted[found] | (looked >= self._until[found])
        if self._match.max_age is not None:
            longest = self._match.max_age // timedelta(microseconds=1)
            moments = looked + 1 if self._match.before else looked
            empty |= moments - longest > self._begin[found]
        return empty

    def known_since(self, place: Any) -> Any:
        """Returns the first state that contains each version's record; 0 for no version."""
        if not len(self._since):
            return np.zeros(len(place), np.int64)
        return np.where(place == NOTHING, 0, self._since[place])

    def same(self, one: Any, other: Any) -> Any:
        """Returns whether two matches give the same result."""
        if not len(self._alike):
            return np.ones(len(one), bool)
        alike = self._alike[one] == self._alike[other]
        return ((one == NOTHING) == (other == NOTHING)) & ((one == NOTHING) | alike)

    def _of_key(self, place: Any, codes: Any) -> Any:
        if not len(self._code):
            return np.full(len(place), NOTHING, np.int64)
        mine = (place != NOTHING) & (self._code[place] == codes)
        return np.where(mine, place, NOTHING)

    def _last_known(self, place: Any, states: Any) -> Any:
        """Returns, for each place, the last place at or before it that its state contains; ``NOTHING``
        = none.

        Searches the pyramid of minima: up until a block contains such a place, then down to it.
        """
        found = place.copy()
        if not len(self._since):
            return found
        rest = np.flatnonzero((place != NOTHING) & (self._since[place] > states))
        node, level, state = place[rest] - 1, np.zeros(len(rest), np.int64), states[rest]
        found[rest] = NOTHING
        top = len(self._first) - 1
        while True:
            node, level, rest, state = (a[node >= 0] for a in (node, level, rest, state))
            up = (node & 1 == 1) & (level < top) & (self._at(level, node) > state)
            # A parent and its right child end at the same place, so the parent may replace the child.
            off = self._at(level, node) > state
            node, level = np.where(up, node >> 1, node), np.where(up, level + 1, level)
            node = np.where(off & ~up, node - 1, node)
            if not off.any():
                break
        while (level > 0).any():
            down = level > 0
            level = np.where(down, level - 1, level)
            right = np.minimum(2 * node + 1, self._width(level) - 1)
            right = np.where(self._at(level, right) <= state, right, 2 * node)
            node = np.where(down, right, node)
        found[rest] = node
        return found

    def _at(self, level: Any, node: Any) -> Any:
        return self._least[self._first[level] + node]

    def _width(self, level: Any) -> Any:
        ends = np.append(self._first[1:], len(self._least))
        return ends[level] - self._first[level]


def _pyramid(least: Any) -> tuple[Any, Any]:
    """Returns the minima of blocks of 1, 2, 4, … values, level by level, and each level's start."""
    levels, first = [least], [0]
    while len(levels[-1]) > 1:
        first.append(first[-1] + len(levels[-1]))
        below = levels[-1]
        if len(below) % 2:
            below = np.append(below, np.iinfo(np.int64).max)
        levels.append(np.minimum(below[::2], below[1::2]))
    return np.concatenate(levels), np.array(first, np.int64)


def _until(rows: pa.Table, column: str | None) -> Any:
    """Returns the end of each version by its ``valid_until`` column, epoch microseconds."""
    if column is None:
        return np.full(rows.num_rows, _NEVER)
    return np.where(rows.column(column).is_valid().to_numpy(), micros(rows, column), _NEVER)


def _since(states: Sequence[Commit | None], homes: Any, partition: Any, offset: Any) -> Any:
    found = np.zeros(len(offset), np.int64)
    for home in homes.tolist():
        ends = np.array([0 if s is None else s.next_offset.get(home, 0) for s in states], np.int64)
        mine = partition == home
        found[mine] = np.searchsorted(ends, offset[mine], side="right")
    return found


def _horizons(log: Log, states: Sequence[Commit | None], homes: Any) -> Any:
    """Returns the horizon by state and partition, epoch microseconds; the current state has none."""
    found = np.full((len(states) + 1, max(len(homes), 1)), EVER, np.int64)
    place = {home: i for i, home in enumerate(homes.tolist())}
    for i, state in enumerate(states):
        times = {} if state is None else state.stream_time
        ends = horizons(log.head.shape.retention(), times)
        for home, end in zip(times, ends, strict=True):
            if home in place:
                found[i, place[home]] = end
    return found


def _alike(columns: Sequence[Any], rows: int) -> Any:
    """Returns a number for each row; rows with equal values get equal numbers."""
    found = np.zeros(rows, np.int64)
    for values in columns:
        encoded = values.dictionary_encode(null_encoding="encode")
        codes = encoded.indices.to_numpy(zero_copy_only=False).astype(np.int64)
        found = np.unique(found * (codes.max(initial=0) + 1) + codes, return_inverse=True)[1]
    return found
