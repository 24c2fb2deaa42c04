"""Reads tables without Spark: ``deltalake`` lists the files, Arrow reads them.

The result equals that of ``AssetStore.read``: the view with the log's tail folded in, by the rules of
``core.versioned_table`` and ``core.plain_table``. A test compares both on random tables.
"""

from __future__ import annotations

import posixpath
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.fs as pafs

from vt_dagster.columns import FINAL, IS_TOMBSTONE, OFFSET, SEGMENT, VALID_FROM, VALID_TO
from vt_dagster.errors import StorageError
from vt_dagster.storage import delta
from vt_dagster.storage.arrow_fold import (
    clip_at_valid_until,
    fold,
    micros,
    values_by_partition,
    with_finality,
)
from vt_dagster.storage.arrow_renames import by_newest_names, names_of, seen_as
from vt_dagster.storage.commit_history import is_of_log, known_at
from vt_dagster.storage.commit_log import (
    Checkpoint,
    Commit,
    Shape,
    choose,
    horizons,
    require_remembered,
)
from vt_dagster.storage.file_integrity import require_files
from vt_dagster.storage.file_offsets import file_at_or_after, file_before
from vt_dagster.storage.log_truncation import base_of, base_path, misses_truncated, require_history
from vt_dagster.storage.value_texts import as_key, type_name
from vt_dagster.topology.durations import parse_time

_DEEPEST = 3
"""Maximum depth of folders in a warehouse that are searched for assets."""


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
        head: last commit from :func:`head_of`; None = it is looked up.

    Raises:
        StorageError: the asset does not exist or does not have ``what``, nothing was recorded by
            ``as_known_at``, or a value does not fit the key.
    """
    version, commit = head or head_of(warehouse, name)
    shape, root, last = commit.shape, posixpath.join(str(warehouse), name), commit.recorded_at
    what = choose(name, shape.kind, what, as_of)
    known = None if as_known_at is None else parse_time(as_known_at)
    if known is not None and known < last:
        commit = known_at(root, name, known, commit.truncation)
    asset = AssetRows(root, commit, version, shape, key, commit.recorded_at < last)
    moment = parse_time(as_of) if as_of is not None and what == "current" else None
    if what == "log":
        return asset.log(None)
    if moment is not None and not partial:
        require_remembered(name, shape.retention(), commit.stream_time, moment)
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
        raise StorageError(
            f"expected an asset {name!r} in the warehouse {warehouse}, found no log there; "
            f"materialize it first, or choose one of {asset_names(warehouse)}"
        )
    return found.version, Commit.model_validate(found.document)


def asset_names(warehouse: str) -> list[str]:
    """Returns the assets with a log in a warehouse, also those in folders (``shop/prices``). Does not
    use Spark."""
    delta.require_place(str(warehouse))
    fs, root = delta.filesystem(str(warehouse))

    def within(folder: str, deep: int = 0) -> Iterator[str]:
        try:
            found = fs.ls(posixpath.join(root, folder), detail=True)
        except (FileNotFoundError, NotADirectoryError):
            return
        folders = [f["name"] for f in found if f["type"] == "directory"]
        for name in (posixpath.basename(path.rstrip("/")) for path in folders):
            path = posixpath.join(folder, name)
            if fs.exists(posixpath.join(root, path, "log", "_delta_log")):
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
        ends, start = self.commit.next_offset, start or {}
        late, early = file_at_or_after(dict(start), ends), file_before(ends)
        rows = self._rows(self.log_path, self.version, lambda file: late(file) and early(file))
        offsets, first = rows.column(OFFSET).to_numpy(), {p: start.get(p, 0) for p in ends}
        since, until = values_by_partition(rows, first, 0), values_by_partition(rows, ends, 0)
        keep = (offsets >= since) & (offsets < until)
        return rows.filter(pa.array(keep))

    def table(self, what: str, moment: int | None) -> pa.Table:
        """Returns versions or current rows; as of ``moment`` (epoch microseconds) if given."""
        rows, limits = self._folded(what, moment), self._limits
        if limits is None or what == "versions":
            return clip_at_valid_until(rows, self.shape.valid_until)
        newest = rows.column(VALID_TO).is_null().to_numpy()
        rows = clip_at_valid_until(rows, self.shape.valid_until)
        start, end = micros(rows, VALID_FROM), micros(rows, VALID_TO)
        open_ = rows.column(VALID_TO).is_null().to_numpy()
        if moment is None:
            there = newest & (open_ | (values_by_partition(rows, self.commit.stream_time, 0) < end))
        else:
            limit = values_by_partition(rows, limits, moment)
            there = (start <= moment) & (open_ | ((moment < end) & (moment >= limit)))
        return rows.filter(pa.array(there & ~rows.column(IS_TOMBSTONE).to_numpy()))

    @property
    def _limits(self) -> dict[int, int] | None:
        return self._limits_at(self.commit.stream_time)

    def _limits_at(self, stream_time: Mapping[int, int]) -> dict[int, int] | None:
        """Returns the expiry horizons of a versioned table by partition; None for other kinds."""
        limits = zip(stream_time, horizons(self.shape.retention(), stream_time), strict=True)
        return dict(limits) if self.shape.kind == "versioned" else None

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
        if (
            then.batch > self.commit.batch
            or max(then.lengthened(self.shape.retention()), default=0) > 0
            or misses_truncated(then, self.commit)
            or not is_of_log(self.root, then, self.commit)
            or then.new_version_on != self.shape.new_version_on
        ):
            return self._at_truncation()
        wanted = delta.everything
        if then.segments is not None and what == "current":
            earliest = self.commit.earliest_since(then.batch)
            since = moment if earliest is None or moment is None else min(moment, earliest)
            wanted = delta.current if since is None else then.segments.ending_after(since)
        return self._rows(self.view_path, found.version, wanted, self._columns), then

    def _at_truncation(self) -> tuple[pa.Table | None, Checkpoint | None]:
        """Returns the rows as of the log's truncation, with their checkpoint; None if not truncated."""
        if self.commit.truncation is None:
            return None, None
        name, cut = posixpath.basename(self.root), self.commit.truncation
        found = base_of(name, self.root, cut)
        then = Checkpoint.model_validate(found.document)
        require_history(name, then, self.shape.retention(), self.commit, self.shape.new_version_on)
        path = base_path(self.root, cut.base)
        return self._rows(path, found.version, like=self._columns), then

    @property
    def _columns(self) -> pa.Schema:
        return columns_of(delta.require_table(self.log_path, self.version))

    def _rows(
        self,
        path: str,
        version: int,
        wanted: delta.Wanted = delta.everything,
        like: pa.Schema | None = None,
    ) -> pa.Table:
        return rows_of(path, version, self._condition, wanted, like)

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
    local = "file" in (fs.protocol if isinstance(fs.protocol, tuple) else (fs.protocol,))
    where = pafs.LocalFileSystem() if local else pafs.PyFileSystem(pafs.FSSpecHandler(fs))
    files = delta.files_of(table, wanted)
    require_files(path, files, version)
    places = [posixpath.join(root, file.place) for file in files]
    asked = columns.names if only is None else [c for c in only if c in columns.names]
    names = {n for c in asked for n in names_of(columns, c)}
    read = columns if only is None else pa.schema([f for f in columns if f.name in names])
    if not places:
        return by_newest_names(read.empty_table(), read)
    chosen = condition(columns)
    import pyarrow.dataset as ds  # imports pandas, which runs without new records do not need

    try:
        dataset = ds.dataset(places, columns, format="parquet", filesystem=where)
        return by_newest_names(dataset.to_table(columns=read.names, filter=chosen), read)
    except (OSError, pa.ArrowInvalid) as error:
        name = posixpath.basename(posixpath.dirname(path))
        raise StorageError(
            f"{name}: expected to read the files of {path}, got: {str(error)[:200]}. Rebuild a view "
            f"(vt-dagster rebuild {name}); restore files of a log from a backup"
        ) from error


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
    condition: Any = None
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
        one: Any = None
        for name in names_of(columns, column):
            same = pc.field(name).is_nan() if nan else pc.field(name) == scalar
            one = same if one is None else one | same
        condition = one if condition is None else condition & one
    return condition


def columns_of(table: Any) -> pa.Schema:
    """Returns the columns of a log or view, without the column that partitions its files."""
    told = pa.schema(table.schema().to_arrow())
    return pa.schema([f for f in told if f.name != SEGMENT])
