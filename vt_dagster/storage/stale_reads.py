"""Finds as-of reads of a versioned table that would return something else now. No Spark.

A record at ``t`` changes its key from ``t`` until the key's next version. So an as-of read is stale
only if a record that arrived after the read has changed an interval that contains the read's time.

**Replaced tables** of an asset are kept, so that earlier reads can be compared with the new ones: at
which valid times do two logs give different rows? A restatement moves the old tables of a versioned
table to ``prices.replaced/<log>/``, until maintenance or an erase removes them. A swap leaves them
under the other asset's name.
"""

from __future__ import annotations

import json
import posixpath
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import reduce
from operator import and_, or_
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pydantic import BaseModel

from vt_dagster.columns import (
    IS_LATE,
    IS_LATEST,
    IS_TOMBSTONE,
    OFFSET,
    PARTITION,
    RECORDED_AT,
    TIMESTAMP,
    VALID_FROM,
    VALID_TO,
)
from vt_dagster.storage import delta
from vt_dagster.storage.arrow_reader import (
    OPEN,
    AssetRows,
    answered_times,
    asset_names,
    clip_at_valid_until,
    codes_of,
    columns_of,
    ends_of,
    fold,
    micros,
    names_of,
    null_codes,
    rows_of,
)
from vt_dagster.storage.commit_log import Commit, Offsets, choose, file_between
from vt_dagster.topology.durations import in_utc, parse_time
from vt_dagster.topology.version_rules import EVER

# Log diff


MOST = 5_000_000
"""Maximum rows of both logs together: the comparison is in memory."""
_OF_THE_LOG = (PARTITION, OFFSET, RECORDED_AT, IS_LATEST, IS_LATE, TIMESTAMP, VALID_TO, IS_TOMBSTONE)
"""Columns that are ignored: they may differ between equal versions."""


def changed_answers(
    old: tuple[str, int, Commit], new: tuple[str, int, Commit], times: Any
) -> np.ndarray | None:
    """Returns for each time whether an as-of read differs between two logs in keys, values or
    ``valid_from``. Offsets and system times are ignored.

    Args:
        old, new: a table's directory, the version of its log and its last commit.
        times: ascending, epoch microseconds.

    Returns:
        booleans by time; None if the logs have more than ``MOST`` rows, or columns that cannot be
        compared.
    """
    like = columns_of(delta.require_table(f"{new[0]}/log", new[1]))
    sides = [
        _Side(root, commit, version, commit.shape, None, False, like)
        for root, version, commit in (old, new)
    ]
    if sum(side.size for side in sides) > MOST:
        return None
    first = int(times[0])
    (ours, *span), (theirs, *their_span) = (side.valid(first) for side in sides)
    count = ours.num_rows
    try:
        both = pa.concat_tables([ours, theirs], promote_options="permissive")
    except pa.ArrowTypeError:
        return None
    codes = _codes(both)
    most = int(codes.max(initial=-1)) + 1
    start, end = (_by_code(codes[:count], one, most) for one in span)
    their_start, their_end = (_by_code(codes[count:], one, most) for one in their_span)
    here, there = start < end, their_start < their_end
    found = np.zeros(len(times) + 1, np.int64)
    for low, high in (
        (
            np.where(here, start, their_start)[here ^ there],
            np.where(here, end, their_end)[here ^ there],
        ),
        *_edges(start, their_start, here & there),
        *_edges(end, their_end, here & there),
    ):
        np.add.at(found, np.searchsorted(times, low), 1)
        np.add.at(found, np.searchsorted(times, high), -1)
    return np.cumsum(found)[:-1] > 0


def _edges(one: Any, other: Any, where: Any) -> Iterator[tuple[Any, Any]]:
    """Yields the intervals between differing bounds of equal rows."""
    some = where & (one != other)
    yield np.minimum(one, other)[some], np.maximum(one, other)[some]


def _by_code(codes: Any, times: Any, most: int) -> Any:
    """Returns the time of each row by its code; codes without a row get the largest time."""
    found = np.full(most, OPEN)
    found[codes] = times
    return found


def _codes(rows: pa.Table) -> Any:
    """Returns one integer code per distinct row."""
    codes = np.zeros(rows.num_rows, np.int64)
    for name in rows.column_names:
        own = null_codes(rows.column(name)) + 1
        pairs = pa.chunked_array([pa.array(codes * (own.max(initial=0) + 1) + own)])
        codes = codes_of(pairs).astype(np.int64)
    return codes


@dataclass(frozen=True)
class _Side(AssetRows):
    """The rows of one log.

    Args:
        like: columns of the new log.
    """

    like: pa.Schema

    @property
    def size(self) -> int:
        """Approximate number of rows to read."""
        there = delta.exists(self.view_path)
        return sum(f.rows for f in delta.files(self.view_path)) if there else self.commit.total

    def valid(self, since: int) -> tuple[pa.Table, Any, Any]:
        """Returns the versions that are valid after a time, and the as-of times that return each:
        from (inclusive), to (exclusive)."""
        rows = clip_at_valid_until(self._folded("current", since), self.shape.valid_until)
        start, end = answered_times(rows, self._limits or {})
        there = ~rows.column(IS_TOMBSTONE).to_numpy() & (start < end) & (end > since)
        names = [name for name in rows.column_names if name not in _OF_THE_LOG]
        return rows.select(names).filter(pa.array(there)), start[there], end[there]

    def _like(self, path: str) -> pa.Schema:
        return self.like


# Replaced tables


_SINCE = "replaced"
"""Marker file; its modification time is the time of the replacement."""


def _folder(warehouse: str, name: str) -> str:
    return posixpath.join(str(warehouse), f"{name.replace('/', '.')}.replaced")


def put_aside(warehouse: str, name: str, path: str) -> None:
    """Moves the replaced tables of an asset aside.

    Args:
        name: the asset's folder in the warehouse.
        path: directory of the old tables, on the warehouse's file system.
    """
    found = delta.last_commit(posixpath.join(path, "log"))
    if found is None:
        return
    fs, folder = delta.filesystem(_folder(warehouse, name))
    to = posixpath.join(folder, str(found.document["log"]))
    fs.touch(posixpath.join(path, _SINCE))
    fs.makedirs(folder, exist_ok=True)
    fs.mv(path, to, recursive=True)


def find_replaced(warehouse: str, name: str, log: str) -> tuple[str, int, Commit] | None:
    """Returns the tables of a replaced log: their directory, the log's Delta version and its last
    commit; None = they were removed.

    Args:
        log: id of the log, see ``Commit.log``.
    """
    others = (posixpath.join(str(warehouse), other) for other in asset_names(warehouse))
    for path in (posixpath.join(_folder(warehouse, name), log), *others):
        found = delta.last_commit(posixpath.join(path, "log"))
        if found is not None and found.document.get("log") == log:
            return path, found.version, Commit.model_validate(found.document)
    return None


def remove_replaced(warehouse: str, name: str, keep: timedelta) -> int:
    """Removes tables that were replaced longer than ``keep`` ago.

    Returns:
        the number of removed logs (each with its view).
    """
    place = _folder(warehouse, name)
    fs, folder = delta.filesystem(place)
    there, removed = delta.names_in(place), 0
    for log in there:
        with delta.listing(place):
            age = time.time() - fs.modified(posixpath.join(folder, log, _SINCE)).timestamp()
        if age >= keep.total_seconds():
            fs.rm(posixpath.join(folder, log), recursive=True)
            removed += 1
    if there and removed == len(there):
        fs.rm(folder, recursive=True)
    return removed


# Stale reads


_ROWS = 2_000_000
"""Maximum rows of a log in memory at once, unless one file has more."""
_WAS_LATEST = "_was_latest"
_OURS = (PARTITION, OFFSET, TIMESTAMP, RECORDED_AT, IS_LATEST, IS_TOMBSTONE, VALID_FROM, VALID_TO)


class Position(BaseModel):
    """A position in a log."""

    log: str
    """Id of the log, see ``Commit.log``."""
    batch: int
    next_offset: Offsets
    erased: int = 0
    """Number of rows erased from the log so far."""

    @classmethod
    def after(cls, commit: Commit) -> Position:
        """Returns the position after a commit."""
        erased = sum(commit.erased.values())
        return cls(log=commit.log, batch=commit.batch, next_offset=commit.next_offset, erased=erased)


class Read(Position):
    """A read of a table: the position of its log, and the arguments of the read."""

    asset: str
    """With its key prefix: ``shop/prices``."""
    what: str
    as_of: str | None = None
    as_known_at: str | None = None

    @classmethod
    def of(
        cls, asset: str, commit: Commit, what: str | None, as_of: str | None, known: str | None
    ) -> Read:
        """Returns a read as of the given commit.

        Args:
            what, as_of, known: arguments of ``read``.
        """
        chosen, moment = choose(asset, commit.shape.kind, what, as_of), as_of
        return cls(
            asset=asset,
            what=chosen,
            as_of=None if moment is None else in_utc(parse_time(moment)),
            as_known_at=known,
            **vars(Position.after(commit)),
        )

    @property
    def moment(self) -> int:
        """As-of time of the read, epoch microseconds."""
        return parse_time(self.as_of or "")

    def looked_at(self, upto: Position) -> Read:
        """Returns the read with a later position: up to there, the read is known to be right, or was
        requested again."""
        return self.model_copy(update=vars(upto))

    @property
    def as_json(self) -> dict[str, Any]:
        """The read as JSON for Dagster's metadata."""
        return json.loads(self.model_dump_json(exclude_none=True))


class StaleRead(NamedTuple):
    """Why a read is stale.

    Args:
        why: ``changed``: a record has changed an interval that contains the time of the read, or the
            log was replaced by one with other rows at that time; ``erased``: the read may have seen
            rows that were erased since. Other values: it is undecidable, see ``UNDECIDABLE``.
        by: id of the change; constant between checks until another change happens.
        forgotten: whether the time of the read is now before the history horizon, so that the read
            cannot be repeated.
    """

    why: str
    by: str
    forgotten: bool


UNDECIDABLE = {
    "another_log": "the log that they have read was replaced (replay and swap, or restate), and was "
    "removed or is too large to compare",
    "erased_before": "rows were erased, and the times of these rows are not recorded",
    "truncated": "the log was truncated after the position that they have read",
}
"""Reasons why a read counts as stale although its result is unknown."""


def stale_reads(
    warehouse: str, head: tuple[int, Commit], reads: Sequence[Read]
) -> list[StaleRead | None]:
    """Returns for each as-of read of a versioned table why it is stale; None = it is not.

    A repeated record with equal values makes a read stale, because the row has a new offset. A version
    that ended after the time of the read does not. The check reads keys and times of the log from the
    smallest unseen offset on, keeps records that may affect a read, and reads the versions of their
    keys. If the log was replaced, the check covers later changes in the old log, and the differences of
    the two logs.

    Args:
        head: last commit of the table, see ``head_of``.
        reads: as-of reads of ``current``, all of one table.
    """
    found: list[StaleRead | None] = [None] * len(reads)
    horizon = _horizon(head[1])
    for log in dict.fromkeys(read.log for read in reads):
        places = [place for place, read in enumerate(reads) if read.log == log]
        some, name = [reads[place] for place in places], reads[places[0]].asset
        if log == head[1].log:
            reasons = _in_log(posixpath.join(str(warehouse), name), head, some)
        else:
            reasons = _in_another(str(warehouse), name, head, some)
        for place, read, why in zip(places, some, reasons, strict=True):
            found[place] = None if why is None else StaleRead(*why, forgotten=read.moment < horizon)
    return found


def _horizon(commit: Commit) -> int:
    rules = commit.shape.version_rules
    return EVER if rules is None else rules.horizon(commit.stream_time)


_Why = tuple[str, str] | None


def _in_log(root: str, head: tuple[int, Commit], reads: Sequence[Read]) -> list[_Why]:
    """Returns for each read the change in its own log that makes it stale."""
    version, commit = head
    found = [_stale_by_removal(read, commit) for read in reads]
    open_ = [place for place, why in enumerate(found) if why is None]
    if not open_:
        return found
    rows = _Changes(root, commit, version, commit.shape, None, False)
    some = [reads[place] for place in open_]
    moments = _Reads.of([read.moment for read in some], [read.next_offset for read in some], commit)
    for place, by in zip(open_, rows.last(moments, _horizon(commit)), strict=True):
        found[place] = None if by is None else ("changed", by)
    return found


def _stale_by_removal(read: Read, commit: Commit) -> _Why:
    """Returns why a read is or may be stale because of rows that are no longer in the log."""
    later = [one for one in commit.erasures if one.batch > read.batch]
    touched = [one.batch for one in later if one.touched(read.moment, read.next_offset)]
    if touched:
        return "erased", str(max(touched))
    erased = sum(commit.erased.values())
    if read.erased < erased and not later:
        return "erased_before", str(erased)
    if any(read.next_offset.get(p, 0) < commit.kept_from(p) for p in commit.next_offset):
        return "truncated", str(read.batch)
    return None


def _in_another(
    warehouse: str, name: str, head: tuple[int, Commit], reads: Sequence[Read]
) -> list[_Why]:
    """Returns for each read of a replaced log why it is stale."""
    then, by = find_replaced(warehouse, name, reads[0].log), head[1].log[:8]
    if then is None:
        return [("another_log", by)] * len(reads)
    reasons = _in_log(then[0], then[1:], reads)
    times = np.unique(np.array([read.moment for read in reads], np.int64))
    differs = changed_answers(then, (posixpath.join(warehouse, name), *head), times)
    for one, read in enumerate(reads):
        if reasons[one] is not None:
            continue
        if differs is None:
            reasons[one] = "another_log", by
        elif differs[np.searchsorted(times, read.moment)]:
            reasons[one] = "changed", by
    return reasons


@dataclass(frozen=True)
class _Reads:
    """Reads ordered by time.

    Args:
        rank: indexes of the reads, in order of time.
        times: as-of times, ascending, epoch microseconds.
        starts: first unseen offset of each read by partition, in the same order.
    """

    rank: Any
    times: Any
    starts: Mapping[int, Any]

    @classmethod
    def of(cls, times: Sequence[int], after: Sequence[Offsets], commit: Commit) -> _Reads:
        moments = np.array(times, np.int64)
        rank = np.argsort(moments, kind="stable")
        starts = {p: np.array([after[i].get(p, 0) for i in rank], np.int64) for p in commit.next_offset}
        return cls(rank, moments[rank], starts)

    @property
    def first(self) -> Offsets:
        return {p: int(offsets.min()) for p, offsets in self.starts.items()}

    def may_matter(self, partition: int, offsets: Any, times: Any) -> Any:
        """Returns whether each record is unseen by some read whose time is at or after the record's."""
        by_start = np.argsort(self.starts[partition], kind="stable")
        starts = self.starts[partition][by_start]
        latest = np.maximum.accumulate(self.times[by_start])
        unseen = np.searchsorted(starts, offsets, "right") - 1
        return (unseen >= 0) & (times <= latest[np.maximum(unseen, 0)])


@dataclass(frozen=True)
class _Changes(AssetRows):
    """Changes in a table's log after some offsets, and the versions of the changed keys.

    Args:
        keys: keys to read; None = all.
    """

    keys: pa.Table | None = None

    def last(self, reads: _Reads, horizon: int) -> list[str | None]:
        """Returns for each read, in the given order, the last record that changed it."""
        last = np.full(len(reads.times), -1)
        rows = self._relevant_records(reads)
        if not rows.num_rows:
            return [None] * len(last)
        of_keys = replace(self, keys=rows.select(self.key))
        since = int(micros(rows, TIMESTAMP).min())
        versions, end = of_keys._versions(reads.first, since)
        doubtful = ~versions.column(_WAS_LATEST).fill_null(True).to_numpy() & (end > horizon)
        if (doubtful & (micros(versions, VALID_FROM) < horizon)).any():
            versions, end = of_keys._versions(reads.first, since, horizon)
        low = np.searchsorted(reads.times, micros(versions, VALID_FROM))
        high = np.searchsorted(reads.times, end)
        homes, offsets = versions.column(PARTITION).to_numpy(), versions.column(OFFSET).to_numpy()
        recorded = micros(versions, RECORDED_AT)
        held = np.flatnonzero(low < high)
        # In the order of system time, so that later records overwrite earlier ones.
        for row in held[np.lexsort((offsets[held], homes[held], recorded[held]))]:
            unseen = reads.starts[int(homes[row])][low[row] : high[row]] <= offsets[row]
            last[reads.rank[low[row] : high[row]][unseen]] = row
        return [
            None if row < 0 else f"{recorded[row]}:{homes[row]}:{offsets[row]}" for row in last.tolist()
        ]

    def _relevant_records(self, reads: _Reads) -> pa.Table:
        opened = delta.require_table(self.log_path, self.version)
        ends, only = self.commit.next_offset, [*self.key, PARTITION, OFFSET, TIMESTAMP]
        files = delta.files_of(opened, file_between(reads.first, ends))
        newest = _time(int(reads.times[-1]))

        def in_time(columns: pa.Schema) -> Any:
            return pc.field(TIMESTAMP) <= newest.cast(columns.field(TIMESTAMP).type)

        found = list[pa.Table]()
        for some in _in_parts(files):
            rows = rows_of(self.log_path, self.version, in_time, some.__contains__, None, only, opened)
            homes, offsets = rows.column(PARTITION).to_numpy(), rows.column(OFFSET).to_numpy()
            times, keep = micros(rows, TIMESTAMP), np.zeros(rows.num_rows, bool)
            for partition, end in ends.items():
                own = (homes == partition) & (offsets < end)
                keep[own] = reads.may_matter(partition, offsets[own], times[own])
            found.append(rows.filter(pa.array(keep)))
        return pa.concat_tables(found) if found else pa.table({})

    def _versions(
        self, first: Offsets, since: int, forgotten: int | None = None
    ) -> tuple[pa.Table, Any]:
        """Returns versions of the keys that are valid after ``since``, and their ends (epoch
        microseconds). Records from the offsets ``first`` on are included even if expired.

        Args:
            forgotten: also include all records from ``since`` to this time. An expired tombstone may
                have ended the version of a late record, and only the log shows that.
        """
        base, then = self._base("current", since)
        start = {} if then is None else then.next_offset
        tail = self.log({p: min(start.get(p, 0), first.get(p, 0)) for p in self.commit.next_offset})
        if forgotten is not None:
            low, high = _time(since), _time(forgotten)

            def between(columns: pa.Schema) -> Any:
                kind, keys = columns.field(TIMESTAMP).type, self._condition(columns)
                times = (pc.field(TIMESTAMP) > low.cast(kind)) & (pc.field(TIMESTAMP) < high.cast(kind))
                return times if keys is None else keys & times

            only = [*self.key, *_OURS]
            more = rows_of(self.log_path, self.version, between, only=only)
            tail = pa.concat_tables([more, tail], promote_options="default")
        names = [_WAS_LATEST if name == IS_LATEST else name for name in tail.column_names]
        rows = fold(base, tail.rename_columns(names), self.key, {})
        return rows, ends_of(rows)

    def _rows(self, path: str, version: int, wanted: delta.Wanted = delta.everything) -> pa.Table:
        only = [*self.key, *_OURS]
        return rows_of(path, version, self._condition, wanted, self._like(path), only)

    def _condition(self, columns: pa.Schema) -> Any:
        conditions = list[Any]()
        for column in self.key if self.keys is not None else ():
            kind = columns.field(column).type
            if pa.types.is_nested(kind) or pa.types.is_floating(kind):
                continue  # reading more keys than needed does not change the result
            values = self.keys.column(column).unique().cast(kind)  # pyright: ignore[reportOptionalMemberAccess]
            named = map(pc.field, names_of(columns, column))
            conditions.append(reduce(or_, [one.isin(values) for one in named]))
        return reduce(and_, conditions) if conditions else None


def _time(micros: int) -> Any:
    return pa.scalar(micros, pa.int64()).cast(pa.timestamp("us", "UTC"))


def _in_parts(files: Sequence[delta.File]) -> Iterator[set[delta.File]]:
    """Yields groups of files with at most ``_ROWS`` rows (or one larger file)."""
    some, rows = set[delta.File](), 0
    for file in files:
        if some and rows + file.rows > _ROWS:
            yield some
            some, rows = set[delta.File](), 0
        some.add(file)
        rows += file.rows
    if some:
        yield some
