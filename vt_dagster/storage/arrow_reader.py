"""Reads tables without Spark: ``deltalake`` lists the files, Arrow reads them.

The result equals that of ``AssetStore.read``: the view with the log's tail folded in, by the rules of
``core.versioned_table`` and ``core.plain_table``. A test compares both on random tables.

Times are in UTC, for any year. A field's metadata lists the earlier names of its column; old files have
the column under those names.
"""

from __future__ import annotations

import json
import posixpath
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from operator import and_, or_
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.fs as pafs

from vt_dagster.columns import (
    FINAL,
    IS_FINAL,
    IS_LATEST,
    IS_TOMBSTONE,
    OFFSET,
    OLD,
    PARTITION,
    RECORDED_AT,
    SEGMENT,
    TIMESTAMP,
    VALID_FROM,
    VALID_TO,
    WAS,
)
from vt_dagster.errors import ConcurrentRunError, StorageError
from vt_dagster.storage import delta
from vt_dagster.storage.commit_log import (
    Checkpoint,
    Commit,
    Shape,
    base_of,
    base_path,
    choose,
    file_between,
    known_at,
    require_history,
    require_within_retention,
    usable,
)
from vt_dagster.storage.delta import require_files
from vt_dagster.storage.values import as_key, type_name
from vt_dagster.topology.durations import parse_time
from vt_dagster.topology.version_rules import EVER, VersionRules, expired

# Arrow fold


OPEN = np.iinfo(np.int64).max
"""The end of a current version, epoch microseconds."""


def fold(
    base: pa.Table | None,
    tail: pa.Table | None,
    key: Sequence[str],
    limits: Mapping[int, int] | None,
    new_version_on: Sequence[str] | None = None,
) -> pa.Table:
    """Returns a table's rows with the log's tail folded in, see ``core.table_store.fold``.

    Args:
        base: rows of the view; None = none.
        tail: log rows after the view; None = none.
        limits: expiry horizon by partition, epoch microseconds; None = a plain table.
        new_version_on: columns whose change starts a version; repeats are collapsed as for readers, see
            ``core.versioned_table.collapse_repeats``. None = every record starts a version.

    Source: FORMAT 4.1.3, 4.2.1, 4.2.3, section 7; kip889-validity-interval.
    """
    if tail is None:
        there: Any = base
        if limits is None:
            return there
        there = there if new_version_on is None else _collapsed(there, key, new_version_on)
        return there.filter(pa.array(~_expired(there, limits)))
    fresh = tail.drop_columns([c for c in (IS_LATEST, OLD) if c in tail.column_names])
    if limits is not None:
        moments = fresh.column(TIMESTAMP)
        fresh = fresh.append_column(VALID_FROM, moments)
        fresh = fresh.append_column(VALID_TO, pa.nulls(fresh.num_rows, moments.type))
    rows = fresh if base is None else pa.concat_tables([base, fresh], promote_options="default")
    codes = [codes_of(rows.column(k)) for k in key]
    order = arrival_order(rows)
    if limits is not None:
        order.append(micros(rows, VALID_FROM))
    rank = np.lexsort((*order, *reversed(codes)))
    rows, codes = rows.take(pa.array(rank)), [code[rank] for code in codes]
    follows = np.zeros(rows.num_rows, bool)
    if rows.num_rows:
        follows[:-1] = np.logical_and.reduce([code[:-1] == code[1:] for code in codes])
    if limits is None:
        deleted = rows.column(IS_TOMBSTONE).to_numpy()
        return rows.filter(pa.array(~follows & ~deleted))
    start = micros(rows, VALID_FROM)
    ends = np.zeros_like(start)
    ends[:-1] = start[1:]
    kind = rows.schema.field(VALID_TO).type
    times = pa.array(ends, mask=~follows).cast(pa.timestamp("us")).cast(kind)
    rows = _with_column(rows, VALID_TO, times)
    if OLD in rows.column_names:
        rows = _with_old_of_peers(rows, codes, start)
    replaced = follows & (ends <= start)
    if new_version_on is None:
        return rows.filter(pa.array(~replaced & ~_expired(rows, limits)))
    # Collapse before expiry: a live version may begin with a record that has expired.
    rows = _collapsed(rows.filter(pa.array(~replaced)), key, new_version_on)
    return rows.filter(pa.array(~_expired(rows, limits)))


def _collapsed(rows: pa.Table, key: Sequence[str], new_version_on: Sequence[str]) -> pa.Table:
    """Drops the rows that repeat their version, like ``core.versioned_table.collapse_repeats``.

    Args:
        rows: need no ``old`` column if they include every record of their keys.
    """
    codes = [codes_of(rows.column(k)) for k in key]
    rank = np.lexsort((micros(rows, VALID_FROM), *reversed(codes)))
    rows, codes = rows.take(pa.array(rank)), [code[rank] for code in codes]
    lives = ~rows.column(IS_TOMBSTONE).to_numpy()
    first = np.ones(rows.num_rows, bool)
    first[1:] = ~np.logical_and.reduce([code[1:] == code[:-1] for code in codes])
    same = np.zeros(rows.num_rows, bool)
    values = [null_codes(rows.column(c)) for c in new_version_on]
    same[1:] = lives[:-1] & np.logical_and.reduce([code[1:] == code[:-1] for code in values])
    old = rows.column(OLD).combine_chunks() if OLD in rows.column_names else None
    fields = {} if old is None else _fields(old)
    same = same & ~first if old is None else np.where(first, equals_old(rows, new_version_on), same)
    repeats = lives & same
    opens = np.flatnonzero(~repeats | first)
    last = np.append(opens[1:], rows.num_rows)[: len(opens)] - 1
    ends = rows.column(VALID_TO).take(pa.array(last))
    begun, repeated = rows.take(pa.array(opens)), pa.array(repeats[opens])
    begun = _with_column(begun, VALID_TO, ends)
    if old is None:
        return begun
    for name in begun.column_names:
        field = fields.get(TIMESTAMP if name == VALID_FROM else name)
        if field is not None:
            now = begun.column(name)
            then = field.take(pa.array(opens)).cast(now.type)
            begun = _with_column(begun, name, pc.call_function("if_else", [repeated, then, now]))
    return begun.drop_columns([OLD])


def equals_old(rows: pa.Table, columns: Sequence[str]) -> Any:
    """Returns whether each row equals its ``old`` in some columns, a BOOLEAN array; false if it has
    none. Null equals null, and NaN NaN."""
    old = rows.column(OLD).combine_chunks()
    fields, found = _fields(old), old.is_valid().to_numpy(zero_copy_only=False)
    for c in columns:
        both = pa.chunked_array([*rows.column(c).chunks, fields[c].cast(rows.column(c).type)])
        codes = null_codes(both)
        found = found & (codes[: len(rows)] == codes[len(rows) :])
    return found


def _fields(struct: pa.StructArray) -> dict[str, Any]:
    return dict(zip([f.name for f in struct.type], struct.flatten(), strict=True))


def _with_old_of_peers(rows: pa.Table, codes: Sequence[Any], start: Any) -> pa.Table:
    """Returns sorted rows; rows of one key and timestamp share the ``old`` of the row that has it."""
    index, there = np.arange(rows.num_rows), rows.column(OLD).is_valid().to_numpy()
    peers = np.logical_and.reduce([code[1:] == code[:-1] for code in (*codes, start)])
    for i in np.flatnonzero(peers & ~there[1:]) + 1:
        index[i] = index[i - 1]
    return _with_column(rows, OLD, rows.column(OLD).take(pa.array(index)))


def _with_column(rows: pa.Table, name: str, values: Any) -> pa.Table:
    return rows.set_column(rows.schema.get_field_index(name), name, values)


def clip_at_valid_until(rows: pa.Table, valid_until: str | None) -> pa.Table:
    """Ends each version at its ``valid_until`` (exclusive), if that is earlier. Like
    ``core.versioned_table.clip_at_valid_until``, on Arrow."""
    if valid_until is None:
        return rows
    ends = rows.column(VALID_TO)
    own = rows.column(valid_until).cast(ends.type)
    before = pc.call_function("less", [own, ends]).fill_null(False).to_numpy()
    earlier = pa.array(own.is_valid().to_numpy() & (ends.is_null().to_numpy() | before))
    return _with_column(rows, VALID_TO, pc.call_function("if_else", [earlier, own, ends]))


def _expired(rows: pa.Table, limits: Mapping[int, int]) -> Any:
    """Returns which rows are expired, by the rule of ``core.versioned_table.drop_expired``.

    Args:
        limits: the horizons by partition, epoch microseconds.
    """
    limit, deleted = values_by_partition(rows, limits, EVER), rows.column(IS_TOMBSTONE).to_numpy()
    return expired(micros(rows, VALID_FROM), ends_of(rows), deleted, limit)


def ends_of(rows: pa.Table) -> Any:
    """Returns the ends of versions as epoch microseconds; ``OPEN`` for current ones."""
    return np.where(rows.column(VALID_TO).is_null().to_numpy(), OPEN, micros(rows, VALID_TO))


def answered_times(rows: pa.Table, limits: Mapping[int, int]) -> tuple[Any, Any]:
    """Returns the as-of times that each version answers: from (inclusive), to (exclusive). A version
    that has ended does not answer for times before its partition's horizon, even if it is still stored;
    the current one does. A tombstone has such times too: an as-of read at them returns no row.

    Args:
        rows: clipped at ``valid_until``.
        limits: the horizons, epoch microseconds.

    Source: FORMAT 4.1.4, 4.1.5; kip889-expired-get, kip889-validity-interval.
    """
    begin, end = micros(rows, VALID_FROM), ends_of(rows)
    limit = values_by_partition(rows, limits, EVER)
    return np.where(end == OPEN, begin, np.maximum(begin, limit)), end


def with_finality(rows: pa.Table, ends: Mapping[int, int]) -> pa.Table:
    """Adds ``is_final``, like ``core.stream_table_join.with_finality``.

    Args:
        ends: by partition, epoch microseconds.
    """
    homes, moments = rows.column(PARTITION).to_pylist(), micros(rows, TIMESTAMP)
    final = [bool(t < ends.get(p, t)) for p, t in zip(homes, moments, strict=True)]
    return rows.append_column(IS_FINAL, pa.array(final, pa.bool_()))


def values_by_partition(rows: pa.Table, values: Mapping[int, int], otherwise: int) -> Any:
    partitions = rows.column(PARTITION).to_numpy()
    found = np.full(len(partitions), otherwise, np.int64)
    for partition, value in values.items():
        found[partitions == partition] = value
    return found


def rows_between(rows: pa.Table, start: Mapping[int, int], ends: Mapping[int, int]) -> pa.Table:
    """Returns the rows of a log from ``start`` (inclusive; 0 of other partitions) to ``ends``
    (exclusive; partitions without an entry have no rows)."""
    offsets = rows.column(OFFSET).to_numpy()
    since, until = values_by_partition(rows, start, 0), values_by_partition(rows, ends, 0)
    return rows.filter(pa.array((offsets >= since) & (offsets < until)))


def arrival_order(rows: pa.Table) -> list[Any]:
    """Returns sort keys for ``np.lexsort`` (the primary key last) that give the order of
    ``core.arrival_order``."""
    order = [rows.column(c).to_numpy() for c in (PARTITION, OFFSET)]
    return [*order, *([micros(rows, RECORDED_AT)] if RECORDED_AT in rows.column_names else [])]


def micros(rows: pa.Table, column: str) -> Any:
    """Returns times as epoch microseconds; null becomes 0."""
    times = rows.column(column)
    whole = times.cast(pa.timestamp("us", times.type.tz)).cast(pa.int64())
    return whole.fill_null(0).to_numpy()


def codes_of(column: pa.ChunkedArray) -> Any:
    """Returns one integer code per distinct value; all NaN are equal, and -0.0 equals 0.0."""
    kind = column.type
    if pa.types.is_floating(kind):
        return np.unique(column.to_numpy() + 0.0, return_inverse=True)[1]
    if pa.types.is_nested(kind):
        return np.unique([repr(value) for value in column.to_pylist()], return_inverse=True)[1]
    return column.combine_chunks().dictionary_encode().indices.to_numpy(zero_copy_only=False)


def null_codes(column: pa.ChunkedArray) -> Any:
    """Returns the codes of :func:`codes_of`, with -1 for null."""
    there = column.is_valid().to_numpy()
    found = np.full(len(column), -1, np.int64)
    if there.any():
        found[there] = codes_of(column.filter(pa.array(there)))
    return found


# Arrow renames


_WAS = WAS.encode()


def was(field: pa.Field) -> list[str]:
    """Returns the earlier names of a column, newest first."""
    earlier = (field.metadata or {}).get(_WAS)
    return [] if earlier is None else json.loads(earlier)


def names_of(columns: pa.Schema, column: str) -> list[str]:
    """Returns all file columns that may hold a column's value; each row uses one of them."""
    return [n for n in (column, *was(columns.field(column))) if n in columns.names]


def seen_as(columns: pa.Schema, like: pa.Schema) -> pa.Schema:
    """Returns the columns of a table's files with the types and names of another table.

    Args:
        like: columns of the log; some may have been renamed after a view was written.
    """
    there = [_seen_as(f, like.field(f.name)) if f.name in like.names else f for f in columns]
    named = [f for f in like if f.name not in columns.names and {*was(f)} & {*columns.names}]
    return pa.schema([*there, *named])


def _seen_as(field: pa.Field, like: pa.Field) -> pa.Field:
    if field.name != OLD or not pa.types.is_struct(field.type):
        return like
    # ``old`` of a view has more fields than that of the log, so the two are merged.
    return pa.field(
        OLD, pa.struct(list(seen_as(pa.schema(list(field.type)), pa.schema(list(like.type)))))
    )


def by_newest_names(rows: pa.Table, columns: pa.Schema) -> pa.Table:
    """Returns rows of files with each column under its newest name, also within ``old``.

    Args:
        columns: columns of the rows, with their earlier names.
    """
    inner = pa.schema([])
    if OLD in columns.names and pa.types.is_struct(columns.field(OLD).type):
        inner = pa.schema(list(columns.field(OLD).type))
    if not any(was(f) for f in (*columns, *inner)):
        return rows
    parts = {f.name: rows.column(f.name) for f in columns}
    found = dict(_newest(parts, columns))
    if any(was(f) for f in inner):
        found[OLD] = _within(found[OLD], inner)
    return pa.table(found)


def _within(column: pa.ChunkedArray, columns: pa.Schema) -> pa.ChunkedArray:
    whole: pa.StructArray = column.combine_chunks()
    parts = {f.name: whole.field(i) for i, f in enumerate(columns)}
    found = dict(_newest(parts, columns))
    return pa.chunked_array(
        [pa.StructArray.from_arrays(list(found.values()), list(found), mask=whole.is_null())]
    )


def _newest(parts: dict[str, pa.Array], columns: pa.Schema) -> Iterator[tuple[str, pa.Array]]:
    gone = {name for field in columns for name in was(field)}
    for field in columns:
        if field.name not in gone:
            values = [parts[n].cast(field.type) for n in names_of(columns, field.name)]
            alone = len(values) == 1
            yield field.name, values[0] if alone else pc.call_function("coalesce", values)


# Arrow reader


_DEEPEST = 3
"""Maximum depth of folders in a warehouse that are searched for assets."""


def name_of(table: Any) -> str:
    """Returns the name of an asset, given by its name or as the stream or table itself.

    Raises:
        StorageError: a value of another type.
    """
    path: Any = (table,) if isinstance(table, str) else getattr(table, "path", None)
    if not isinstance(path, tuple):
        raise StorageError(
            f"expected table to be the name of an asset, or the stream or table itself, got {table!r}"
        )
    return "/".join(path)  # pyright: ignore[reportUnknownArgumentType]


def look_up(
    warehouse: str,
    name: str,
    what: str | None = None,
    key: Sequence[Any] | None = None,
    as_of: str | None = None,
    partial: bool = False,
    as_known_at: str | None = None,
    head: tuple[int, Commit] | None = None,
) -> pa.Table:
    """Returns the rows of an asset as of its last or an earlier commit, as ``AssetStore.read`` does.

    Args:
        key: values of the key columns; texts are accepted. None = all keys.
        head: last commit from :func:`head_of`; None = it is looked up, again if the log was swapped
            or restated during the read.

    Raises:
        ConcurrentRunError: the log of ``head`` was swapped or restated during the read.
        StorageError: the asset does not exist or does not have ``what``, nothing was recorded by
            ``as_known_at``, or a value does not fit the key.
    """
    at = head or head_of(warehouse, name)
    try:
        rows = _look_up(warehouse, name, what, key, as_of, partial, as_known_at, at)
    except (ConcurrentRunError, StorageError):
        if head_of(warehouse, name)[1].log == at[1].log:
            raise
    else:
        if head_of(warehouse, name)[1].log == at[1].log:
            return rows
    # Versions of the new log mean other rows.
    if head is not None:
        raise exchanged(name, head[1])
    return look_up(warehouse, name, what, key, as_of, partial, as_known_at)


def exchanged(name: str, commit: Commit) -> ConcurrentRunError:
    """Returns the error for a log that is no longer the one of a commit that a reader knows."""
    return ConcurrentRunError(
        f"{name}: expected to read the log {commit.log}, but it was swapped or restated during the "
        "read; read again, or run again"
    )


def _look_up(
    warehouse: str,
    name: str,
    what: str | None,
    key: Sequence[Any] | None,
    as_of: str | None,
    partial: bool,
    as_known_at: str | None,
    head: tuple[int, Commit],
) -> pa.Table:
    version, commit = head
    shape, root, last = commit.shape, posixpath.join(str(warehouse), name), commit.recorded_at
    what = choose(name, shape.kind, what, as_of)
    known = None if as_known_at is None else parse_time(as_known_at)
    if known is not None and known < last:
        commit = known_at(root, name, known, commit.truncation)
    asset = AssetRows(root, commit, version, shape, key, commit.recorded_at < last)
    moment = None if as_of is None else parse_time(as_of)
    if what == "log":
        return asset.log(None)
    if moment is not None and not partial and shape.version_rules is not None:
        require_within_retention(name, shape.version_rules, commit.stream_time, moment)
    rows = asset.table(what, moment)
    return with_finality(rows, commit.watermarks[FINAL]) if FINAL in commit.watermarks else rows


def head_of(warehouse: str, name: str) -> tuple[int, Commit]:
    """Returns the Delta version and the document of an asset's last commit.

    Raises:
        StorageError: the warehouse has no such asset.
    """
    delta.require_place(str(warehouse))
    found = delta.last_commit(posixpath.join(str(warehouse), name, "log"))
    if found is None:
        require_in_place(warehouse, name)
        others = asset_names(warehouse)
        raise StorageError(
            f"expected an asset {name!r} in the warehouse {warehouse}, found no log there; materialize "
            f"it first, or choose {f'one of {others}' if others else 'a warehouse that has assets'}"
        )
    return found.version, Commit.model_validate(found.document)


_SWAP, _RESTATE = ".swap.", ".restate"
RESTATED = "old"
"""The folder in :func:`restate_folder` with the tables that a restatement has replaced."""


def swap_folder(live: str, other: str) -> str:
    """Returns the folder of a warehouse in which the tables of ``live`` are during a swap."""
    return f"_{live}{_SWAP}{other}".replace("/", ".")


def restate_folder(path: Sequence[str]) -> str:
    """Returns the folder of a warehouse in which an asset is restated."""
    return f"{'.'.join(path)}{_RESTATE}"


def require_in_place(warehouse: str, name: str) -> None:
    """Checks that no swap or restatement has moved the tables of an asset away before putting the new
    ones in place: the asset would look as if it had never run.

    Raises:
        StorageError: the tables were moved away.
    """
    fs, root = delta.filesystem(str(warehouse))
    for folder in delta.names_in(str(warehouse)):
        swapped, restated = folder.removeprefix("_").split(_SWAP), f"{folder}/{RESTATED}/{name}"
        if len(swapped) == 2 and name.replace("/", ".") in swapped:
            what, where = "swap", folder
        elif folder.endswith(_RESTATE) and fs.exists(posixpath.join(root, restated)):
            what, where = "restate", restated
        else:
            continue
        raise StorageError(
            f"{name}: expected its tables in {warehouse}, but a {what} that is under way or was "
            f"interrupted has moved them to {where}; wait for it, or complete it: run vt-dagster "
            f"{what} again with the same arguments"
        )


def asset_names(warehouse: str) -> list[str]:
    """Returns the assets with a log in a warehouse, also those in folders (``shop/prices``). Does not
    use Spark. Leaves out the empty log of a first run that died, which only a local directory has."""
    delta.require_place(str(warehouse))
    fs, root = delta.filesystem(str(warehouse))

    def has_log(path: str) -> bool:
        log = posixpath.join(path, "log")
        there = fs.exists(posixpath.join(root, log, "_delta_log"))
        local = there and delta.is_local(fs)
        return bool(delta.log_files(posixpath.join(str(warehouse), log))) if local else there

    def within(folder: str, deep: int = 0) -> Iterator[str]:
        try:
            with delta.listing(str(warehouse)):
                found = fs.ls(posixpath.join(root, folder), detail=True)
        except (FileNotFoundError, NotADirectoryError):
            return
        folders = [f["name"] for f in found if f["type"] == "directory"]
        for name in (posixpath.basename(path.rstrip("/")) for path in folders):
            path = posixpath.join(folder, name)
            if has_log(path):
                yield path
            elif name.isidentifier() and deep < _DEEPEST:
                yield from within(path, deep + 1)

    return sorted(within(""))


@dataclass(frozen=True)
class AssetRows:
    """The rows of an asset as of a commit.

    Args:
        version: Delta version of the log that contains the rows.
        wanted: values of one key; None = all keys.
    """

    root: str
    commit: Commit
    version: int
    shape: Shape
    wanted: Sequence[Any] | None
    later: bool
    """Whether that version also contains rows of later commits."""

    @property
    def key(self) -> tuple[str, ...]:
        return tuple(self.shape.key)

    @property
    def log_path(self) -> str:
        return posixpath.join(self.root, "log")

    @property
    def view_path(self) -> str:
        return posixpath.join(self.root, "view")

    def log(self, start: Mapping[int, int] | None) -> pa.Table:
        """Returns the log rows from ``start`` (inclusive); None = all."""
        if start is None and not self.later:
            return self._rows(self.log_path, self.version)
        ends, first = self.commit.next_offset, dict(start or {})
        rows = self._rows(self.log_path, self.version, file_between(first, ends))
        return rows_between(rows, first, ends)

    def table(self, what: str, moment: int | None) -> pa.Table:
        """Returns versions or current rows; as of ``moment`` (epoch microseconds) if given."""
        rows, limits = self._folded(what, moment), self._limits
        if limits is None or what == "versions":
            return clip_at_valid_until(rows, self.shape.valid_until)
        newest = rows.column(VALID_TO).is_null().to_numpy()
        rows = clip_at_valid_until(rows, self.shape.valid_until)
        start, end = answered_times(rows, limits)
        if moment is None:
            there = newest & (values_by_partition(rows, self.commit.stream_time, 0) < end)
        else:
            there = (start <= moment) & (moment < end)
        return rows.filter(pa.array(there & ~rows.column(IS_TOMBSTONE).to_numpy()))

    @property
    def _rules(self) -> VersionRules | None:
        """Returns the rules of the versions, with the earlier names of the columns that define them."""
        rules = self.shape.version_rules
        if rules is None or rules.new_version_on is None:
            return rules
        return replace(rules, earlier={f.name: was(f) for f in self._columns})

    @property
    def _limits(self) -> dict[int, int] | None:
        return self._limits_at(self.commit.stream_time)

    def _limits_at(self, stream_time: Mapping[int, int]) -> dict[int, int] | None:
        """Returns the expiry horizons of a versioned table by partition; None for other kinds."""
        rules = self.shape.version_rules
        return None if rules is None else rules.horizons(stream_time)

    def _folded(self, what: str, moment: int | None) -> pa.Table:
        base, then = self._base(what, moment)
        start = then.next_offset if then else {}
        tail = None if then and start == self.commit.next_offset else self.log(start)
        if base is not None and then is not None and self.shape.kind == "versioned":
            # An expired version may still be stored while its later tombstone is gone: folding it would
            # revive it.
            base = fold(base, None, self.key, self._limits_at(then.stream_time))
        return fold(base, tail, self.key, self._limits, self.shape.new_version_on)

    def _base(self, what: str, moment: int | None) -> tuple[pa.Table | None, Checkpoint | None]:
        """Returns the needed rows of the view, and its checkpoint."""
        found = delta.last_commit(self.view_path)
        if found is None:
            return self._at_truncation()
        then = Checkpoint.model_validate(found.document)
        rules = self._rules
        if then.batch > self.commit.batch or not usable(self.root, then, self.commit, rules):
            return self._at_truncation()
        wanted = delta.everything
        if then.segments is not None and what == "current":
            earliest = self.commit.earliest_since(then.batch)
            since = moment if earliest is None or moment is None else min(moment, earliest)
            wanted = delta.current if since is None else then.segments.ending_after(since)
        return self._rows(self.view_path, found.version, wanted), then

    def _at_truncation(self) -> tuple[pa.Table | None, Checkpoint | None]:
        """Returns the rows as of the log's truncation, with their checkpoint; None if not truncated."""
        if self.commit.truncation is None:
            return None, None
        name, truncation = posixpath.basename(self.root), self.commit.truncation
        found = base_of(name, self.root, truncation)
        then = Checkpoint.model_validate(found.document)
        require_history(name, then, self._rules, self.commit)
        path = base_path(self.root, truncation.base)
        return self._rows(path, found.version), then

    @property
    def _columns(self) -> pa.Schema:
        return columns_of(delta.require_table(self.log_path, self.version))

    def _rows(self, path: str, version: int, wanted: delta.Wanted = delta.everything) -> pa.Table:
        return rows_of(path, version, self._condition, wanted, self._like(path))

    def _like(self, path: str) -> pa.Schema | None:
        """Returns the columns that rows of the view, or of the base of a truncated log, get."""
        return None if path == self.log_path else self._columns

    def _condition(self, columns: pa.Schema) -> Any:
        path = self.log_path if self.shape.kind == "stream" else self.view_path
        return None if self.wanted is None else of_key(path, columns, self.key, self.wanted)


def rows_of(
    path: str,
    version: int,
    condition: Callable[[pa.Schema], Any],
    wanted: delta.Wanted = delta.everything,
    like: pa.Schema | None = None,
    only: Sequence[str] | None = None,
    opened: Any = None,
) -> pa.Table:
    """Returns the rows of an asset's log or view that satisfy a condition, pushed down to the files.

    Args:
        path: ``…/name/log`` or ``…/name/view``.
        version: Delta version.
        condition: makes an Arrow expression from the files' columns; an expression of None = all rows.
        wanted: filter for files that may have such rows.
        like: schema whose types and names the columns get.
        only: columns to read; missing ones are ignored. None = all.
        opened: the opened table at that version; None = it is opened.

    Raises:
        StorageError: a file is gone or damaged.
    """
    table = delta.require_table(path, version) if opened is None else opened
    columns = columns_of(table)
    if like is not None:
        columns = seen_as(columns, like)
    fs, root = delta.filesystem(path)
    files = delta.files_of(table, wanted)
    require_files(path, files, version)
    places = [posixpath.join(root, file.place) for file in files]
    selected = columns.names if only is None else [c for c in only if c in columns.names]
    names = {n for c in selected for n in names_of(columns, c)}
    read = columns if only is None else pa.schema([f for f in columns if f.name in names])
    if not places:
        return by_newest_names(read.empty_table(), read)
    chosen = condition(columns)
    import pyarrow.dataset as ds  # imports pandas, which runs without new records do not need

    def rows(where: pafs.FileSystem) -> pa.Table:
        dataset = ds.dataset(places, columns, format="parquet", filesystem=where)
        return dataset.to_table(columns=read.names, filter=chosen)

    try:
        found = rows(pafs.LocalFileSystem()) if delta.is_local(fs) else _by_python(fs, rows)
        return by_newest_names(found, read)
    except (OSError, pa.ArrowInvalid) as error:
        name = posixpath.basename(posixpath.dirname(path))
        raise StorageError(
            f"{name}: expected to read the files of {path}, got: {str(error)[:200]}. Rebuild a view "
            f"(vt-dagster rebuild {name}); restore files of a log from a backup"
        ) from error


_RELEASED = 5.0
"""Maximum number of seconds that a read waits for Arrow's threads."""


def _by_python(fs: Any, rows: Callable[[pafs.FileSystem], pa.Table]) -> pa.Table:
    """Reads through a file system in Python, and waits until Arrow's threads have released it. A thread
    that releases it while the process ends would abort the process, and so a step that has
    succeeded."""
    handler = pafs.FSSpecHandler(fs)
    held = weakref.ref(handler)
    found = rows(pafs.PyFileSystem(handler))
    del handler
    end = time.monotonic() + _RELEASED
    while held() is not None and time.monotonic() < end:
        time.sleep(0.001)
    return found


def of_key(path: str, columns: pa.Schema, key: Sequence[str], values: Sequence[Any]) -> Any:
    """Returns the condition that a row of a log or view has a key.

    Args:
        path: ``…/name/log`` or ``…/name/view``, for messages.
        values: values of the key columns; texts are accepted.

    Raises:
        StorageError: the values do not fit the key.
    """
    if len(values) != len(key):
        name = posixpath.basename(posixpath.dirname(path))
        raise StorageError(
            f"{name} has the key {list(key)}: expected --key once for each column, got {list(values)}"
        )
    conditions = list[Any]()
    for column, value in zip(key, values, strict=True):
        kind = columns.field(column).type
        if pa.types.is_nested(kind):
            raise StorageError(
                "expected a key that can be written as text, but the key column "
                f"{column} has type {type_name(kind)}; read the Delta table {path} with "
                "Spark, and filter its rows there"
            )
        scalar = as_key(column, value, kind)
        nan = pa.types.is_floating(kind) and scalar.as_py() != scalar.as_py()
        named = map(pc.field, names_of(columns, column))
        conditions.append(reduce(or_, [one.is_nan() if nan else one == scalar for one in named]))
    return reduce(and_, conditions)


def columns_of(table: Any) -> pa.Schema:
    """Returns the columns of a log or view, without the column that partitions its files."""
    schema = pa.schema(table.schema().to_arrow())
    return pa.schema([f for f in schema if f.name != SEGMENT])
