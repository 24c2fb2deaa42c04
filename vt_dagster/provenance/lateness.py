"""``lateness``: the cost of other grace periods and history retentions, with a picture. No Spark.

Reads the logs in order of arrival, and the commits: each commit records the offsets that its run
consumed and the versions of tables that it read. So no definitions are needed. A test compares the
rules with those of ``core``.

**Joins.** A run consumes a range of the stream's log and reads the table as of one commit. So for any
grace period, the run that would have emitted a record and the version that the table would have
returned then are known. All records of the table's log are in memory, sorted by key and time: about
60 bytes each.

**Windows.** Which records a window accepts depends only on the order of arrival.

**Tables.** A versioned table refuses a record whose timestamp is before stream time - retention. Such a
record does not advance stream time: so stream time is equal for every retention (KIP-889,
``core.versioned_table.put``).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute

from vt_dagster import rules
from vt_dagster.columns import (
    IS_TOMBSTONE,
    OFFSET,
    PARTITION,
    PROPAGATED_FROM,
    RECORDED_AT,
    TIMESTAMP,
    VALID_FROM,
)
from vt_dagster.drawing import BLUE, GREY, RED, WIDTH, svg, text
from vt_dagster.errors import StorageError
from vt_dagster.provenance.explain_request import Log, both
from vt_dagster.provenance.explain_sources import horizons_of, quarantine
from vt_dagster.provenance.expressions import plain as plain_column
from vt_dagster.storage.arrow_reader import arrival_order, micros, name_of
from vt_dagster.storage.commit_log import Commit, Offsets, Shape, Truncation, commits, commits_read
from vt_dagster.topology import specification as spec
from vt_dagster.topology.durations import (
    DAY,
    Calendar,
    check_duration,
    parse_length,
    spoken,
    starts_near,
)
from vt_dagster.topology.options import Consumer, check_arguments, refused_option
from vt_dagster.topology.version_rules import EVER

pc: Any = pyarrow.compute

# Key codes


NONE = -1
"""Code of a key that contains a null, or that has no code."""
_WIDE = 1 << 31


class KeyCodes:
    """Assigns each key a number that is equal across batches. 0.0 equals -0.0, and NaN equals NaN.

    Args:
        columns: the number of columns of a key.
    """

    def __init__(self, columns: int) -> None:
        self._values: list[pa.Array | None] = [None] * columns
        self._pairs: list[dict[int, int]] = [{} for _ in range(columns)]

    def of(self, columns: Sequence[pa.ChunkedArray], new: bool = True) -> Any:
        """Returns the number of each row's key; ``NONE`` for a key that contains a null.

        Args:
            columns: the key's columns, in order.
            new: whether a key without a number gets one; else it is ``NONE``.
        """
        found: Any = None
        for place, column in enumerate(columns):
            codes = self._of_column(place, plain(column), new)
            found = codes if found is None else self._of_pairs(place, found, codes, new)
        return found

    def _of_column(self, place: int, values: Any, new: bool) -> Any:
        known = self._values[place]
        if new:
            fresh = pc.unique(values.drop_null())
            if known is not None:
                fresh = fresh.cast(known.type)
                fresh = fresh.filter(pc.is_null(pc.index_in(fresh, value_set=known)))
                fresh = pa.concat_arrays([known, fresh])
            self._values[place] = known = fresh
        if known is None:
            return np.full(len(values), NONE, np.int64)
        codes = pc.index_in(values.cast(known.type), value_set=known)
        return codes.cast(pa.int64()).fill_null(NONE).to_numpy(zero_copy_only=False)

    def _of_pairs(self, place: int, first: Any, second: Any, new: bool) -> Any:
        known, there = self._pairs[place], (first != NONE) & (second != NONE)
        both, where = np.unique(first[there] * _WIDE + second[there], return_inverse=True)
        if new:
            numbers = [known.setdefault(one, len(known)) for one in both.tolist()]
        else:
            numbers = [known.get(one, NONE) for one in both.tolist()]
        codes = np.full(len(first), NONE, np.int64)
        codes[there] = np.array(numbers, np.int64)[where]
        return codes


def plain(column: pa.ChunkedArray) -> Any:
    """Returns a column as one array that Arrow can compare: nested values as text, -0.0 as 0.0."""
    kind = column.type
    if pa.types.is_nested(kind):
        return pa.array([None if v is None else repr(v) for v in column.to_pylist()], pa.string())
    values = column.combine_chunks()
    values = values.chunk(0) if isinstance(values, pa.ChunkedArray) else values
    return pc.add(values, pa.scalar(0.0, kind)) if pa.types.is_floating(kind) else values


# Bulk lookup


NOTHING = -1
"""Stands for no version."""
_NEVER = np.iinfo(np.int64).max
"""The end of a version without a ``valid_until``; the lateness of a record whose lateness is
unknown."""


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
        self._value_numbers = _numbered_by_value(columns, len(rank))[rank]
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
        expired = np.zeros(len(found), bool)
        expired[ended] = True
        found[ended] = NOTHING
        found[self._empty(found, looked)] = NOTHING
        return found, expired

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
        """Returns, for each version, the index of the table's first state that contains its record; 0
        for ``NOTHING``."""
        if not len(self._since):
            return np.zeros(len(place), np.int64)
        return np.where(place == NOTHING, 0, self._since[place])

    def same(self, one: Any, other: Any) -> Any:
        """Returns, for each pair of matches, whether both give the same result."""
        if not len(self._value_numbers):
            return np.ones(len(one), bool)
        alike = self._value_numbers[one] == self._value_numbers[other]
        return ((one == NOTHING) == (other == NOTHING)) & ((one == NOTHING) | alike)

    def _of_key(self, place: Any, codes: Any) -> Any:
        if not len(self._code):
            return np.full(len(place), NOTHING, np.int64)
        mine = (place != NOTHING) & (self._code[place] == codes)
        return np.where(mine, place, NOTHING)

    def _last_known(self, place: Any, states: Any) -> Any:
        """Returns, for each place, the last place at or before it that its state contains; ``NOTHING``
        = none.

        Searches the levels of minima, see :func:`_pyramid`: upwards to a block that contains such a
        place, then down to the place.
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
            width = np.append(self._first[1:], len(self._least))[level] - self._first[level]
            right = np.minimum(2 * node + 1, width - 1)
            right = np.where(self._at(level, right) <= state, right, 2 * node)
            node = np.where(down, right, node)
        found[rest] = node
        return found

    def _at(self, level: Any, node: Any) -> Any:
        return self._least[self._first[level] + node]


def _pyramid(least: Any) -> tuple[Any, Any]:
    """Returns the minima of blocks of 1, 2, 4, … values, one level after the other, and the start of
    each level."""
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
        for home, end in ({} if state is None else horizons_of(log, state)).items():
            if home in place:
                found[i, place[home]] = end
    return found


def _numbered_by_value(columns: Sequence[Any], rows: int) -> Any:
    """Returns a number for each row; rows with equal values get equal numbers."""
    found = np.zeros(rows, np.int64)
    for values in columns:
        encoded = values.dictionary_encode(null_encoding="encode")
        codes = encoded.indices.to_numpy(zero_copy_only=False).astype(np.int64)
        found = np.unique(found * (codes.max(initial=0) + 1) + codes, return_inverse=True)[1]
    return found


# Lateness results


_ONE = timedelta(microseconds=1)


@dataclass(frozen=True)
class Delay:
    """The delay of results by the grace period.

    Args:
        p50, p99: percentiles of the delay.
    """

    p50: timedelta
    p99: timedelta

    @classmethod
    def of(cls, found: Counter[int]) -> Delay | None:
        """Returns the percentiles of a histogram of delays in microseconds; None = no results."""
        total, seen = found.total(), 0
        delays: list[timedelta] = []
        for delay, times in sorted(found.items()):
            seen += times
            for share in (50, 99)[len(delays) :]:
                if seen * 100 >= total * share:
                    delays.append(delay * _ONE)
        return cls(*delays) if delays else None


@dataclass(frozen=True)
class Choice:
    """The cost of one length.

    Args:
        length: the grace period or history retention.
        of: the total that ``wrong`` refers to. Join: records with a value (inner join: and a key).
            Windows: windows. Table: accepted and refused records. Accepted records that were erased
            are not counted.
        wrong: Join: results that differ from the join by current knowledge. Windows: windows that
            lack a record. Table: refused records.
        late: late records. Join: joined at once. Windows: dropped from at least one window. Table:
            refused.
        dropped: windows only: dropped updates, one for each record and closed window.
        expired: joins only: the part of ``wrong`` whose version had expired in the table.
        waiting: joins only: records in the buffer after the last run.
        waiting_average: their average over the runs.
        waiting_most: their maximum over the runs.
        later: joins only: the delay of results in system time.
        later_in_stream_time: the delay of results in stream time.
        declared: whether this is the declared length, or the length of the last run.
    """

    length: timedelta
    of: int
    wrong: int
    late: int
    dropped: int | None = None
    expired: int | None = None
    waiting: int | None = None
    waiting_average: float | None = None
    waiting_most: int | None = None
    later: Delay | None = None
    later_in_stream_time: Delay | None = None
    declared: bool = False

    @property
    def share(self) -> float:
        """The share of wrong results, 0 to 1."""
        return self.wrong / self.of if self.of else 0.0


@dataclass(frozen=True)
class Lateness:
    """The cost of several lengths for one asset.

    Args:
        asset: the asset's name.
        operator: the operator that makes the asset, or ``source``.
        what: the option: ``grace_period``, ``grace`` (of windows) or ``history_retention``.
        choices: one for each length, shortest first.
        at_most: the requested maximum share of wrong results, 0 to 1.
        suggested: the shortest length that meets ``at_most``; None = no share was requested, or no
            length meets it.
        notes: limits of these numbers.
    """

    asset: str
    operator: str
    what: str
    choices: tuple[Choice, ...]
    at_most: float | None = None
    suggested: timedelta | None = None
    notes: tuple[str, ...] = ()

    @property
    def declared(self) -> Choice | None:
        """The choice of the declared length; None = that length is not known."""
        return next((one for one in self.choices if one.declared), None)

    @property
    def passed(self) -> bool:
        """Whether the share of wrong results is at most ``at_most``: with the declared length if it is
        known, else with any length."""
        if self.at_most is None:
            return True
        if self.declared is None:
            return self.suggested is not None
        return self.declared.share <= self.at_most

    @property
    def suggestion(self) -> str:
        """``suggested`` in words. A grace period must exceed a lateness, in microseconds; a retention
        includes it."""
        length = self.suggested or timedelta(0)
        if not length or self.what == "history_retention":
            return spoken(length)
        return f"just over {spoken(length - timedelta(microseconds=1))}"

    def of(self, length: timedelta) -> Choice:
        """Returns the one of ``choices`` with this length."""
        return next(one for one in self.choices if one.length == length)

    def as_json(self) -> dict[str, Any]:
        """Returns all fields as plain values; lengths in seconds."""
        document = asdict(self, dict_factory=_in_seconds)
        costs = zip(document["choices"], self.choices, strict=True)
        document["choices"] = [{**one, "share": choice.share} for one, choice in costs]
        return {**document, "notes": [*self.notes]}


def _in_seconds(values: list[tuple[str, Any]]) -> dict[str, Any]:
    return {n: v.total_seconds() if isinstance(v, timedelta) else v for n, v in values}


# Arrival batches


CHUNK = 2_000_000
"""Maximum number of records in memory at once."""


def running_time(home: Any, moment: Any, latest: dict[int, int]) -> Any:
    """Returns the running maximum of the time of each record, per partition.

    Args:
        home, moment: partitions and times, sorted by partition, then by order of arrival.
        latest: the maximum of earlier records by partition; updated in place.
    """
    found = np.empty(len(moment), np.int64)
    if not len(home):  # for example, all rows of the range have been erased
        return found
    starts = np.flatnonzero(np.diff(home, prepend=home[:1] - 1))
    for start, end in zip(starts, [*starts[1:], len(home)], strict=True):
        part = int(home[start])
        so_far = np.maximum.accumulate(moment[start:end])
        found[start:end] = np.maximum(so_far, latest.get(part, EVER))
        latest[part] = int(found[end - 1])
    return found


def with_removed(
    stream: Log,
    ranges: Mapping[int, tuple[int, int]],
    before: Offsets,
    after: Offsets,
    home: int | None,
) -> dict[int, int]:
    """Returns stream time before the records of a run that its input still has, by partition.

    Removed records that the run consumed itself count too. Which of them have no key, and so do not
    advance stream time, is no longer known: the result is an upper bound.

    Args:
        ranges: the offsets that the run consumed, by partition: [start, end).
        before, after: stream time before and after the run, by partition.
        home: the partition into which the run merges all of them; None = it merges none.
    """
    found, cut = dict(before), stream.head.truncation
    for partition in stream.truncated(ranges):
        place = partition if home is None else home
        if cut is not None and place in after:
            bound = min(cut.stream_time.get(partition, EVER), after[place])
            found[place] = max(bound, found.get(place, bound))
    return found


def split_ranges(
    ranges: Mapping[int, tuple[int, int]], most: int | None = None
) -> Iterator[tuple[Offsets, Offsets]]:
    """Yields parts of offset ranges: first (inclusive) and end (exclusive) offset by partition.

    Args:
        most: maximum number of records in a part; None = ``CHUNK``.
    """
    most = CHUNK if most is None else most
    ranges = {p: (start, end) for p, (start, end) in ranges.items() if start < end}
    if sum(end - start for start, end in ranges.values()) <= most:
        if ranges:
            yield {p: s for p, (s, _) in ranges.items()}, {p: e for p, (_, e) in ranges.items()}
        return
    for partition, (start, end) in ranges.items():
        for first in range(start, end, most):
            yield {partition: first}, {partition: min(first + most, end)}


# Join lateness


_RIGHT = re.compile(r"\bright\b(?:\s*\.\s*(?:`([^`]+)`|(\w+)|(\*)))?", re.IGNORECASE)


@dataclass
class Records:
    """Stream records that one run of the join consumed, in order of arrival within a partition.

    Args:
        run: the run's index among the join's runs.
        home: the index of each record's partition.
        moment: each record's time, epoch microseconds.
        now: the buffer's stream time as of each record, epoch microseconds.
        keyed: whether each record has a key; a record without a key is joined at once, without a match.
        codes, place: see ``Versions``.
        truth: the place of the version that matches by current knowledge.
    """

    run: int
    home: Any
    moment: Any
    now: Any
    keyed: Any
    codes: Any
    place: Any
    truth: Any


@dataclass
class JoinCost:
    """Counts for one grace period."""

    of: int = 0
    wrong: int = 0
    late: int = 0
    expired: int = 0
    later: Counter[int] = field(default_factory=Counter[int])
    behind: Counter[int] = field(default_factory=Counter[int])


def require_computable(name: str, table: str, shape: Shape) -> None:
    """Raises StorageError if ``lateness`` refuses an option of the table of a join."""
    found = refused_option(Consumer.LATENESS, shape)
    if found is not None:
        raise StorageError(
            f"{name}: expected a join with a table without {found.option}, got {table} with "
            f"{found.option}={found.value!r}: {found.refusal.why}; {found.refusal.instead}"
        )


class LateJoin:
    """A stream-table join with its runs.

    Args:
        log: the join's log.
        join: what it computes.
        stream, table: the logs of its inputs.

    Raises:
        StorageError: the join has ``as_known``, ``before_first`` or an ``at`` that looks ahead, or its
            table is not versioned or has ``new_version_on``.
    """

    def __init__(self, log: Log, join: spec.StreamTableJoinSpec, stream: Log, table: Log) -> None:
        if join.as_known != "now":
            known = spoken(join.as_known) if isinstance(join.as_known, timedelta) else join.as_known
            raise StorageError(
                f"{log.name}: expected a join without as_known, got as_known={known}: the cost of "
                "another grace period cannot be computed; try another as_known with vt-dagster what-if"
            )
        ahead = {"before_first": join.before_first, "at": join.at if join.looks_ahead else None}
        setting = next((f"{option}={value}" for option, value in ahead.items() if value), None)
        if setting is not None:
            raise StorageError(
                f"{log.name}: expected a join that looks back from each record, got {setting}: a "
                "version then also matches earlier records, and the cost of another grace period "
                "cannot be computed from late table records alone; try one with vt-dagster what-if"
            )
        if table.head.shape.kind != "versioned":
            raise StorageError(
                f"{log.name}: expected a join with a versioned table, got one with the plain table "
                f"{table.name}: such a join has no grace period; declare it as a VersionedTable"
            )
        require_computable(log.name, table.name, table.head.shape)
        self.log, self.stream, self.table, self.name = log, stream, table, join.left
        self.left = join.kind == "left"
        self.runs = [c for c in commits(log.root) if c.batch <= log.commit.batch]
        read = commits_read(table.root, join.right, table.head.log, self.runs)
        seen = [one for one, _ in read]
        numbers = [0 if one is None else one.batch for one in seen]
        batches = sorted(set(numbers))
        by_batch = dict(zip(numbers, seen, strict=True))
        self.state = np.array([batches.index(n) for n in numbers], np.int64)
        columns, until = _columns(join, table), table.head.shape.valid_until
        match = Match(columns, join.max_age, join.at == "before", until)
        self.versions = Versions(table, [by_batch[n] for n in batches], match)
        homes = sorted({p for run in self.runs for p in run.stream_time})
        self._homes = np.array(homes, np.int64)
        self._time = np.array(
            [[run.stream_time.get(p, EVER // 2) for run in self.runs] for p in homes], np.int64
        )
        self._recorded = np.array([run.recorded_at for run in self.runs], np.int64)

    # -- the records -------------------------------------------------------------------------------

    def records(self) -> Iterator[Records]:
        """Yields all records that runs have consumed, in order of arrival, in batches."""
        for number, run in enumerate(self.runs):
            ends = run.inputs.get(self.name, {})
            before = self.runs[number - 1] if number else None
            first = {} if before is None else before.inputs.get(self.name, {})
            ranges = {p: (first.get(p, 0), e) for p, e in ends.items()}
            latest = {} if before is None else before.stream_time
            latest = with_removed(self.stream, ranges, latest, run.stream_time, None)
            for start, end in split_ranges(ranges):
                yield self._taken(number, start, end, latest)

    def _taken(
        self, number: int, start: dict[int, int], end: dict[int, int], latest: dict[int, int]
    ) -> Records:
        """Returns the records of a run between two offsets.

        Args:
            latest: the buffer's stream time by partition; updated in place.
        """
        only = [PARTITION, OFFSET, TIMESTAMP, IS_TOMBSTONE, *self.stream.key]
        rows = self.stream.rows(both(), start, end, list(dict.fromkeys(only)))
        columns = [rows.column(k) for k in self.stream.key]
        empty = np.logical_or.reduce([c.is_null().to_numpy() for c in columns])
        deleted = rows.column(IS_TOMBSTONE).to_numpy()
        taken = np.flatnonzero(~deleted & (self.left | ~empty))
        home = rows.column(PARTITION).to_numpy()
        moment = micros(rows, TIMESTAMP)
        now = running_time(home, np.where(~deleted & ~empty, moment, EVER), latest)
        codes = self.versions.keys.of(columns, new=False)[taken]
        # A partition without keyed records has no stream time and no index here. Its index is not used:
        # records without a key are joined at once. The modulo only keeps it in range.
        places = np.searchsorted(self._homes, home[taken]) % max(len(self._homes), 1)
        moment = moment[taken]
        place = self.versions.place(codes, moment)
        now_state = np.full(len(place), self.versions.now)
        truth, _ = self.versions.answers(place, codes, moment, now_state)
        return Records(number, places, moment, now[taken], ~empty[taken], codes, place, truth)

    # -- a grace period ----------------------------------------------------------------------------

    def goes_out(self, records: Records, grace: int) -> tuple[Any, Any]:
        """Returns the run that emits each record (the number of runs = the record waits after the last
        one), and whether each record is late.

        Args:
            grace: the grace period, microseconds.

        Source: KIP-923, FORMAT 4.5.1; kip923-dequeue-boundary, kip923-late-is-immediate.
        """
        out = np.full(len(records.moment), records.run, np.int64)
        if not grace:
            return out, np.zeros(len(out), bool)
        late = records.keyed & (records.moment + grace < records.now)
        for home in range(len(self._time)):
            mine = (records.home == home) & records.keyed & ~late
            due = np.searchsorted(self._time[home], records.moment[mine] + grace, side="left")
            out[mine] = np.maximum(due, records.run)
        return out, late

    def cost(self, lengths: Sequence[timedelta]) -> list[Choice]:
        """Returns the cost of each grace period."""
        every = [length // _ONE for length in lengths]
        costs = [JoinCost() for _ in every]
        held = np.zeros((len(every), len(self.runs) + 1), np.int64)
        for records in self.records():
            for number, grace in enumerate(every):
                self._count(records, grace, costs[number], held[number])
        return [self._choice(*one) for one in zip(lengths, costs, np.cumsum(held, axis=1), strict=True)]

    def _count(self, records: Records, grace: int, cost: JoinCost, held: Any) -> None:
        """Adds records to the counts of a grace period.

        Args:
            held: the change in the number of waiting records at each run; updated in place.
        """
        out, late = self.goes_out(records, grace)
        cost.of += len(out)
        cost.late += int(late.sum())
        held[records.run] += len(out)
        np.subtract.at(held, out, 1)
        gone = np.flatnonzero(out < len(self.runs))
        wrong, expired = self._wrong(records, gone, out[gone])
        cost.wrong += int(wrong.sum())
        cost.expired += int((wrong & expired).sum())
        _add(cost.later, self._recorded[out[gone]] - self._recorded[records.run])
        time = self._time[records.home[gone]]
        if len(time):
            each = np.arange(len(gone))
            _add(cost.behind, time[each, out[gone]] - time[each, records.run])

    def _wrong(self, records: Records, some: Any, runs: Any) -> tuple[Any, Any]:
        """Returns which records would match another version in the given runs than by current
        knowledge, and where the reason is that the version had expired."""
        about = (records.place[some], records.codes[some], records.moment[some])
        found, expired = self.versions.answers(*about, self.state[runs])
        return ~self.versions.same(found, records.truth[some]), expired

    def _choice(self, length: timedelta, cost: JoinCost, waiting: Any) -> Choice:
        after = waiting[:-1]
        return Choice(
            length,
            of=cost.of,
            wrong=cost.wrong,
            late=cost.late,
            expired=cost.expired,
            waiting=int(after[-1]) if len(after) else 0,
            waiting_average=float(after.mean()) if len(after) else 0.0,
            waiting_most=int(after.max(initial=0)),
            later=Delay.of(cost.later),
            later_in_stream_time=Delay.of(cost.behind),
        )

    # -- the shortest grace period for a share of wrong results ------------------------------------

    def needed(self) -> tuple[Any, int]:
        """Returns the grace periods (microseconds, ascending) from which on a record that its own run
        joins wrongly is joined correctly, and the number of records.

        A record has one entry for each change of its match to the correct one, including changes by
        chance before the version is in the log.
        """
        found: list[Any] = []
        total = 0
        for records in self.records():
            total += len(records.moment)
            rest = np.flatnonzero(records.keyed)
            known = self.versions.known_since(records.place[rest])
            # From the first run that reads the version on, the match is correct; before, by chance.
            right = np.searchsorted(self.state, known, side="left")
            last, turns = np.maximum(right, records.run) - 1, np.ones(len(rest), bool)
            while True:
                rest, last, turns = (a[last >= records.run] for a in (rest, last, turns))
                if not len(rest):
                    break
                wrong, _ = self._wrong(records, rest, last)
                some = wrong & turns
                time = self._time[records.home[rest[some]], last[some]]
                found.append(time - records.moment[rest[some]] + 1)
                # Runs that read the same commit of the table give the same match: skip to the commit
                # before.
                last, turns = np.searchsorted(self.state, self.state[last], side="left") - 1, ~wrong
        return np.sort(np.concatenate(found) if found else np.zeros(0, np.int64)), total

    def smallest(self, at_most: float) -> Choice | None:
        """Returns the shortest grace period with at most a given share of wrong results; None = no
        grace period is enough, because the table has expired too many versions.

        Args:
            at_most: the share, 0 to 1, inclusive.
        """
        needed, total = self.needed()
        allowed, length = int(at_most * total + 1e-9), 0
        while True:
            (found,) = self.cost([length * _ONE])
            if found.wrong <= allowed:
                return found
            # A longer grace period never has fewer expired versions: at least this many more records
            # need their own grace period.
            place = int(np.searchsorted(needed, length, side="right")) + found.wrong - allowed - 1
            if place >= len(needed):
                return None
            length = int(needed[place])


def _add(counts: Counter[int], values: Any) -> None:
    there, times = np.unique(values, return_counts=True)
    counts.update(dict(zip(there.tolist(), times.tolist(), strict=True)))


def _columns(join: spec.StreamTableJoinSpec, table: Log) -> list[str]:
    """Returns the table's columns that a join selects, without the end of the version, which is never
    known when the version starts."""
    declared = table.head.shape.columns or []
    values = [c for c in declared if c.lower() != TIMESTAMP]
    lowered = {c.lower(): c for c in [*values, VALID_FROM]}
    lowered[TIMESTAMP] = VALID_FROM
    found: list[str] = []
    for quoted, name, star in (one for c in join.select for one in _RIGHT.findall(c.sql)):
        if star:
            found += values
        elif not (quoted or name):
            found += [*values, VALID_FROM]
        elif (quoted or name).lower() in lowered:
            found.append(lowered[(quoted or name).lower()])
    return list(dict.fromkeys(found))


# Window lateness


_HOMES = 1 << 20
"""Upper bound for the number of partitions, so that a key code and a partition fit into one number."""


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


class _Bounds(NamedTuple):
    """One window of each record: start and end (exclusive) in epoch microseconds, and whether the
    record is in it."""

    start: Any
    end: Any
    there: Any


@dataclass
class WindowCost:
    """Counts for one grace; ``lacking``: whether each window lacks a record."""

    late: int = 0
    dropped: int = 0
    lacking: Any = field(default_factory=lambda: np.zeros(0, bool))


class LateWindows:
    """An aggregate by tumbling or hopping windows.

    Args:
        log: the aggregate's log.
        operator: what it computes.
        stream: the log of its input.

    Raises:
        StorageError: the windows are of another kind, or computing the key or partition needs Spark.
    """

    def __init__(self, log: Log, operator: spec.WindowedAggregateSpec, stream: Log) -> None:
        self.log, self.stream, self.name = log, stream, operator.source
        window = operator.window
        self.bounds: Calendar | tuple[int, int]
        """The calendar, or the size and advance of all windows in microseconds."""
        if isinstance(window, spec.CalendarWindowSpec):
            self.bounds = window.calendar
        elif (
            isinstance(window, spec.TumblingWindowSpec | spec.HoppingWindowSpec)
            and isinstance(window.size, timedelta)
            and isinstance(window.advance, timedelta)
        ):
            self.bounds = window.size // _ONE, window.advance // _ONE
        else:
            raise StorageError(
                f"{log.name}: expected tumbling or hopping windows of one size, got {window}: the cost "
                "of another grace period cannot be computed from the logs; try one with vt-dagster "
                "what-if"
            )
        self.key = _key(log, operator, stream)
        self.merges = bool(operator.group_key)
        if self.merges and len(log.commit.next_offset) > 1:
            raise StorageError(
                f"{log.name}: expected windows by the stream's own key, or in one partition, got a new "
                f"key in {len(log.commit.next_offset)} partitions: the partition of a record, and so "
                "its stream time, needs Spark; try another grace period with vt-dagster what-if"
            )
        self._keys, self._windows = KeyCodes(len(self.key)), KeyCodes(2)
        self._many = 0

    def updates(self) -> Iterator[Updates]:
        """Yields all records that runs have consumed, in order of arrival."""
        before: dict[int, int] = {}
        latest: dict[int, int] = {}
        for run in commits(self.log.root):
            ends = run.inputs.get(self.name, {})
            ranges = {p: (before.get(p, 0), e) for p, e in ends.items()}
            after, home, whole = run.stream_time, None, None
            if self.merges:
                home, whole = 0, sum(ends.values())
                after = {home: max(after.values())} if after else {}
            latest = with_removed(self.stream, ranges, latest, after, home)
            for start, end in split_ranges(ranges, whole):
                yield self._taken(start, end, latest)
            # Not from the records: some of them may be gone.
            before, latest = {**before, **ends}, {**latest, **after}

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
        return Updates(now, [(self._numbers(group, one), one.end) for one in self._windows_of(moment)])

    def _windows_of(self, moment: Any) -> Iterator[_Bounds]:
        """Yields the bounds of one window of each record, then of one before it, and so on."""
        if isinstance(self.bounds, Calendar):
            starts = np.array(starts_near(np.unique(moment // DAY).tolist(), self.bounds), np.int64)
            place = np.searchsorted(starts, moment, "right")
            yield _Bounds(starts[place - 1], starts[place], np.ones(len(moment), bool))
            return
        size, advance = self.bounds
        for back in range(-(-size // advance)):
            start = moment - moment % advance - back * advance
            there = (start + size > moment) & ((start >= 0) | (moment < 0))
            yield _Bounds(start, start + size, there)

    def _numbers(self, group: Any, bounds: _Bounds) -> Any:
        """Returns the number of each record's window; ``NONE`` = it is not in that window."""
        there = bounds.there
        found = np.full(len(there), NONE, np.int64)
        places = [pa.chunked_array([pa.array(one[there])]) for one in (group, bounds.start)]
        found[there] = self._windows.of(places)
        self._many = max(self._many, int(found.max(initial=NONE)) + 1)
        return found

    # -- a grace -------------------------------------------------------------------------------------

    def cost(self, lengths: Sequence[timedelta]) -> list[Choice]:
        """Returns the cost of each grace."""
        costs = [WindowCost() for _ in lengths]
        for updates in self.updates():
            for length, cost in zip(lengths, costs, strict=True):
                self._count(updates, length // _ONE, cost)
        return [
            Choice(n, of=self._many, wrong=int(c.lacking.sum()), late=c.late, dropped=c.dropped)
            for n, c in zip(lengths, costs, strict=True)
        ]

    def _count(self, updates: Updates, grace: int, cost: WindowCost) -> None:
        cost.lacking = np.append(cost.lacking, np.zeros(self._many - len(cost.lacking), bool))
        late = np.zeros(len(updates.now), bool)
        for window, end in updates.windows:
            closed = (window != NONE) & (end + grace <= updates.now)
            late |= closed
            cost.dropped += int(closed.sum())
            cost.lacking[window[closed]] = True
        cost.late += int(late.sum())

    def smallest(self, at_most: float) -> Choice:
        """Returns the shortest grace period with which at most a given share of windows (0 to 1,
        inclusive) lacks a record."""
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


def _key(log: Log, operator: spec.WindowedAggregateSpec, stream: Log) -> tuple[str, ...]:
    """Returns the grouping columns."""
    if not operator.group_key:
        return stream.key
    columns = stream.head.shape.columns or []
    chosen = [plain_column(column.sql, columns) for column in operator.group_key]
    found = tuple(column for column in chosen if column is not None)
    if len(found) < len(chosen):
        raise StorageError(
            f"{log.name}: expected windows by columns of {stream.name}, {columns}, got "
            f"{', '.join(map(str, operator.group_key))}, which needs Spark; try a grace period with "
            "vt-dagster what-if"
        )
    return found


# Retention lateness


class LateRecords:
    """The accepted and refused records of a versioned table, since its log was truncated.

    The lateness of a refused record is only known as a range: stream time at its arrival was between
    the stream times before and after its run.

    Args:
        log: the table's log.
    """

    def __init__(self, log: Log) -> None:
        self.log, self.truncation = log, log.head.truncation or Truncation(batch=0, recorded_at=0)
        self.refused_least, self.refused_most = self._refused()

    def _refused(self) -> tuple[Any, Any]:
        """Returns lower and upper bounds of the refused records' lateness: how far each was behind
        stream time, microseconds."""
        late = rules.LATE.name
        count, last = self.log.commit.totals.get(late, 0), self.log.commit.batch
        first = self.truncation.batch
        if first:
            runs = (run for run in commits(self.log.root) if first < run.batch <= last)
            count = sum(run.counts.get(late, 0) for run in runs)
        of_batch = (pc.field("reason") == late) & (pc.field("batch") > first)
        rows = None if self.log.specification else quarantine(self.log, of_batch)
        if rows is None or rows.num_rows > count:
            return np.zeros(count, np.int64), np.full(count, _NEVER)
        known = rows.num_rows
        moment, batch = micros(rows, TIMESTAMP), rows.column("batch").to_numpy()
        home = rows.column(PARTITION).to_numpy()
        before: dict[int, int] = {}
        # Of those whose rows were erased, nothing is known.
        least, most = np.zeros(count, np.int64), np.full(count, _NEVER)
        most[:known] = 0
        for run in commits(self.log.root):
            for i in np.flatnonzero(batch == run.batch).tolist():
                time = run.stream_time[int(home[i])]
                least[i] = before.get(int(home[i]), moment[i]) - moment[i]
                most[i] = time - moment[i]
            before = run.stream_time
        return least, most

    def behind(self) -> Iterator[Any]:
        """Yields how far the records were behind stream time, microseconds: upper bounds for the
        refused records, then exact values for the accepted ones."""
        yield self.refused_most
        latest, first = dict(self.truncation.stream_time), self.truncation.next_offset
        # Not from the source: versions that a late partial update changed and that were written again.
        parts = self.log.head.shape.has_partial_updates
        rewritten = parts and self.log.commit.totals.get(rules.CARRIED.name, 0)
        carried = [PROPAGATED_FROM] if rewritten else []
        ends = self.log.commit.next_offset.items()
        for start, end in split_ranges({p: (first.get(p, 0), e) for p, e in ends}):
            rows = self.log.rows(both(), start, end, [PARTITION, OFFSET, TIMESTAMP, *carried])
            for column in map(pc.field, carried):
                rows = rows.filter(column.is_null() | (column == 0))
            moment = micros(rows, TIMESTAMP)
            home, place = (rows.column(c).to_numpy() for c in (PARTITION, OFFSET))
            behind = running_time(home, moment, latest) - moment
            yield np.where(self._of_start(home, place), 0, behind)

    def _of_start(self, partitions: Any, offsets: Any) -> Any:
        """Returns which records are from the initial snapshot; these are never late."""
        start, found = self.log.commit.start, np.zeros(len(offsets), bool)
        for partition, (first, end) in ({} if start is None else start.offsets).items():
            found |= (partitions == partition) & (offsets >= first) & (offsets < end)
        return found

    def cost(self, lengths: Sequence[timedelta]) -> list[Choice]:
        """Returns how many records each retention would have refused; an upper bound where the lateness
        of refused records is only known as a range."""
        every = [length // _ONE for length in lengths]
        of, counts = 0, [0] * len(every)
        for behind in self.behind():
            of += len(behind)
            counts = [n + int((behind > one).sum()) for n, one in zip(counts, every, strict=True)]
        return [
            Choice(length, of=of, wrong=n, late=n) for length, n in zip(lengths, counts, strict=True)
        ]

    def doubtful(self, lengths: Sequence[timedelta]) -> list[timedelta]:
        """Returns the lengths for which the count of :meth:`cost` is only an upper bound."""
        every = [(one, one // _ONE) for one in lengths]
        least, most = self.refused_least, self.refused_most
        return [one for one, n in every if (least > n).sum() != (most > n).sum()]

    def smallest(self, at_most: float) -> Choice | None:
        """Returns the shortest retention that would have refused at most a given share; None = not
        known, because a larger share was refused and the lateness of those records is not known."""
        of, found = 0, list[Any]()
        for behind in self.behind():
            of += len(behind)
            found.append(behind[behind > 0])
        needed = np.sort(np.concatenate(found))
        place = len(needed) - int(at_most * of + 1e-9) - 1
        length = int(needed[place]) if place >= 0 else 0
        return None if length == _NEVER else self.cost([length * _ONE])[0]


# Lateness


GRACES = ("0s", "1m", "10m", "1h", "6h", "1d")
RETENTIONS = ("0s", "1h", "6h", "1d", "7d", "30d")


@check_arguments(error=StorageError)
def lateness(
    table: Any,
    *,
    grace: Sequence[str | timedelta] = (),
    at_most: str | float | None = None,
    warehouse: str = "data/warehouse",
) -> Lateness:
    """Computes how many results of an asset would be wrong or late with other lengths. No Spark.

    The length is the grace period of a join of a stream with a versioned table, the grace of tumbling
    or hopping windows, or the history retention of a versioned table. The numbers are those of the
    asset's runs with that length: each run consumes the same records and reads the same tables.

    Args:
        table: an asset's name (with a key prefix: ``shop/prices``), or the stream or table itself.
        grace: the lengths, as timedeltas or texts like ``10m``; empty = a default list and the declared
            length. If ``table`` is a name, the length of the last run is used as the declared one,
            where it is known.
        at_most: the maximum share of wrong results, like ``"0.1%"`` or 0.001: the result then suggests
            the shortest length that meets it.
        warehouse: the directory or URL of the tables.

    Raises:
        StorageError: there is no such asset, its inputs are missing, or it has no such length.
        ContractError: a text in ``grace`` is not a length.
        TopologyError: a length is negative or too long.
    """
    name = name_of(table)
    log, share = Log.open(str(warehouse), name), parse_share(at_most)
    requested = parse_lengths(name, grace)
    operator, notes = log.specification, list[str]()
    found: LateJoin | LateWindows | LateRecords
    if isinstance(operator, spec.StreamTableJoinSpec):
        found = LateJoin(log, operator, *_inputs(log, operator))
        what, declared = _declared(table, operator.lateness_option)
    elif isinstance(operator, spec.WindowedAggregateSpec):
        found = LateWindows(log, operator, *_inputs(log, operator))
        what, declared = _declared(table, operator.lateness_option)
    elif log.head.shape.ordered_by_source:
        raise StorageError(
            f"{name} follows the order of its source and accepts each record, however old: no record "
            "is late for any history_retention; use lateness for the joins and windows that read it"
        )
    elif log.head.shape.kind == "versioned":
        found, what, declared = LateRecords(log), "history_retention", log.head.shape.retention()
    else:
        raise StorageError(
            f"{name} is made by {log.operator}: expected a join of a stream with a versioned table "
            "whose results are not corrected, an aggregate by tumbling or hopping windows, or a "
            "versioned table"
        )
    declared = declared if isinstance(declared, timedelta) else None
    usual = RETENTIONS if what == "history_retention" else GRACES
    lengths = {*requested} or {*map(parse_length, usual)}
    if declared is not None and (share is not None or not requested):
        lengths.add(declared)
    choices = found.cost(sorted(lengths))
    suggested = None
    if share is not None:
        best = found.smallest(share)
        if best is not None:
            suggested, choices = best.length, [*choices, best]
        elif isinstance(found, LateRecords):
            notes.append("no retention is suggested: how late the refused records were is not known")
        else:
            notes.append(
                "no grace period is suggested: too many versions of the table had expired; a longer "
                "history retention would have kept them"
            )
    notes += _notes(found, choices)
    by_length = {one.length: replace(one, declared=one.length == declared) for one in choices}
    ordered = tuple(by_length[one] for one in sorted(by_length))
    return Lateness(name, log.operator, what, ordered, share, suggested, tuple(notes))


def parse_lengths(name: str, grace: Sequence[str | timedelta]) -> list[timedelta]:
    """Returns lengths that are timedeltas or texts.

    Args:
        name: of the asset, for messages.

    Raises:
        ContractError: a text is not a length.
        TopologyError: a length is negative or too long.
    """
    found = [one if isinstance(one, timedelta) else parse_length(one) for one in grace]
    for one in found:
        check_duration(name, "grace", one)
    return found


def parse_share(at_most: str | float | None) -> float | None:
    """Returns a share of results, 0 to 1; None for None.

    Raises:
        StorageError: ``at_most`` is not a share.
    """
    if at_most is None:
        return None
    text = str(at_most).strip()
    try:
        found = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        found = -1.0
    if not 0 <= found <= 1 or (isinstance(at_most, str) and not text.endswith("%")):
        raise StorageError(
            f"expected a share of the results like '0.1%', or a number from 0 to 1, got {at_most!r}"
        )
    return found


def _inputs(log: Log, operator: spec.StreamTableJoinSpec | spec.WindowedAggregateSpec) -> list[Log]:
    found: list[Log] = []
    for name in operator.inputs:
        one = log.input(name)
        if one is None:
            raise StorageError(
                f"{log.name}: expected the log of its input {name} in {log.warehouse}, as its runs "
                "consumed it, found none or another log; restore the log, or replay the asset"
            )
        found.append(one)
    return found


def _declared(table: Any, of_last_run: spec.LatenessOption) -> spec.LatenessOption:
    """Returns the option as declared: that of a stream or table, else that of the last run."""
    declared = getattr(table, "operator", None)
    return of_last_run if declared is None else declared.specification.lateness_option or of_last_run


def _notes(found: LateJoin | LateWindows | LateRecords, choices: Sequence[Choice]) -> list[str]:
    counted = found.log if isinstance(found, LateRecords) else found.stream
    erased = sum(counted.commit.erased.values())
    notes = [
        f"records of {counted.name} that were erased ({erased:,}) are not counted, and records that "
        "came after one of them may seem less late than they were"
    ] * bool(erased)
    logs = (found.stream, found.table) if isinstance(found, LateJoin) else (counted,)
    notes += [
        f"records of {one.name} that were removed do not count: {truncation.description()}"
        for one in logs
        if (truncation := one.head.truncation) is not None
    ]
    if isinstance(found, LateRecords):
        doubtful = found.doubtful([one.length for one in choices])
        return notes + [
            f"the number refused with {spoken(one)} is an upper bound: how late each refused record "
            "was is known only to the precision of its run, and not at all if its row was erased"
            for one in sorted(doubtful)
        ]
    if isinstance(found, LateWindows):
        return notes
    retention, first = found.table.head.shape.retention(), found.runs[0].batch
    notes += [
        f"{spoken(one.length)} is longer than the history retention {spoken(retention)} of "
        f"{found.table.name}: lengthen that with it"
        for one in choices
        if isinstance(retention, timedelta) and one.length > retention
    ]
    if first > 1:
        notes.append(
            f"the commits of the runs before run {first} are gone: they are counted as a part of it"
        )
    return notes


# Lateness picture


_ROW, _TOP, _LEFT, _BAR = 26, 34, 130, 330


def picture(found: Lateness) -> str:
    """Returns an SVG with a row for each length: a red bar for the share of wrong results, a blue bar
    for the maximum number of waiting records. A dotted line marks the requested share."""
    most = max([one.share for one in found.choices] + [found.at_most or 0.0, 1e-9])
    held = max([one.waiting_most or 0 for one in found.choices] + [1])
    what = found.what.replace("_", " ")
    drawn = [
        text(4, 14, f"{found.asset}: share (and number) of wrong results, by {what}", colour=RED),
        text(WIDTH - 4, 14, "records that waited at most", "end", BLUE),
    ]
    for number, one in enumerate(found.choices):
        y = _TOP + number * _ROW
        marks = "*" * one.declared + ">" * (one.length == found.suggested)
        drawn.append(text(4, y + 11, f"{marks} {spoken(one.length)}".lstrip()))
        size = round(_BAR * one.share / most, 1)
        drawn.append(f'<rect x="{_LEFT}" y="{y}" width="{size}" height="12" fill="{RED}"/>')
        drawn.append(text(_LEFT + size + 6, y + 10, f"{share(one.share)} ({one.wrong:,})"))
        if one.waiting_most is not None:
            size = round(_BAR * one.waiting_most / held, 1)
            drawn.append(
                f'<rect x="{_LEFT}" y="{y + 14}" width="{size}" height="4" fill="{BLUE}"/>'
                + text(WIDTH - 4, y + 16, f"{one.waiting_most:,}", "end", BLUE)
            )
    bottom = _TOP + len(found.choices) * _ROW
    if found.at_most is not None:
        x = round(_LEFT + _BAR * found.at_most / most, 1)
        drawn.append(
            f'<path d="M{x} {_TOP - 8}V{bottom}" stroke="{GREY}" stroke-dasharray="2 3"/>'
            + text(x, _TOP - 10, f"at most {share(found.at_most)}", "middle")
        )
    drawn.append(text(4, bottom + 12, "* declared; > suggested"))
    return svg(bottom + 22, drawn)


def share(value: float) -> str:
    """Returns a share (0 to 1) as a percentage."""
    return f"{value * 100:.3g} %"
