"""Looking into tables without Spark: ``deltalake`` says which files, Arrow reads them.

What is given is what ``AssetStore.read`` gives: the view, with the log's tail folded in. The rules are
those of ``core.versioned_table`` and ``core.plain_table``; a test compares both on random tables.
"""

from __future__ import annotations

import posixpath
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from importlib import import_module
from typing import Any, Literal, get_args

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
"""How many folders of a warehouse an asset may be within."""
Into = Literal["arrow", "polars", "pandas", "duckdb", "spark"]


def read(
    table: Any,
    *,
    warehouse: str = "data/warehouse",
    key: Any = None,
    as_of: str | datetime | None = None,
    what: str | None = None,
    partial: bool = False,
    into: Into = "arrow",
    as_known_at: str | datetime | None = None,
) -> Any:
    """What an asset has, as of its last commit or an earlier one; without Spark, but where asked for.

    Args:
        table: an asset's name (with a key prefix: ``shop/prices``), or the stream or table itself.
        warehouse: the directory or URL of the tables.
        key: the value of the key, of a composite key a tuple or list, also as texts; None = all.
        as_of: an ISO 8601 time or a datetime (without an offset: UTC); the row of each key as of it
            (inclusive).
        what: ``current`` (default of tables: deleted keys are not there), ``versions`` (tombstones
            included) or ``log`` (default of streams).
        partial: whether a time from which on the history has been forgotten already gives the rows that
            are left.
        into: ``arrow``: a ``pyarrow.Table``; ``pandas``, ``polars``: a DataFrame; ``duckdb``: a
            relation; ``spark``: a lazy DataFrame of the active session. All but Spark's are in memory.
        as_known_at: a time likewise: by what was recorded up to it (inclusive), with the stream time of
            then, and the history retention that is declared now. One that is still to come is now.

    Raises:
        StorageError: there is no such asset, or it has no such thing, remembers it no more, or knew
            nothing by then.
    """
    name = table if isinstance(table, str) else "/".join(table.path)
    if into not in get_args(Into):
        raise StorageError(f"expected into to be one of {list(get_args(Into))}, got {into!r}")
    values = None if key is None else list(key) if isinstance(key, tuple | list) else [key]
    moment, known = (t.isoformat() if isinstance(t, datetime) else t for t in (as_of, as_known_at))
    if into == "spark":
        return _by_spark(warehouse, name, what, values, moment, partial, known)
    return as_frame(look_up(warehouse, name, what, values, moment, partial, known), into)


def as_frame(rows: pa.Table, into: Into) -> Any:
    """Rows as another library has them, none of Spark."""
    if into == "arrow":
        return rows
    return rows.to_pandas() if into == "pandas" else import_module(into).from_arrow(rows)


def _by_spark(
    warehouse: str,
    name: str,
    what: str | None,
    key: Sequence[Any] | None,
    as_of: str | None,
    partial: bool,
    as_known_at: str | None,
) -> Any:
    session = import_module("pyspark.sql").SparkSession.getActiveSession()
    if session is None:
        raise StorageError(
            f"{name}: expected an active Spark session to read into, found none; start one, or read "
            "into another library"
        )
    # Not with the others: it takes seconds to import, and nobody else needs it.
    store = import_module("vt_dagster.storage.asset_store").AssetStore.open(warehouse, name, session)
    rows = store.read(what, as_of, partial, as_known_at)
    if key is None:
        return rows
    among = import_module("vt_dagster.core.versioned_table").key_range
    return among(rows, key=store.node.key, lower=key, upper=key)


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
    """The rows of an asset as of its last commit, or an earlier one, as ``AssetStore.read`` gives them.

    Args:
        key: the values of the key columns, also as texts; None = all keys.
        head: its last commit, as :func:`head_of` has told; None = it is looked up.

    Raises:
        StorageError: there is no such asset, it has no such thing, knew nothing by then, or a value
            cannot be its key.
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
    """The version and the document of an asset's last commit.

    Raises:
        StorageError: there is no such asset in the warehouse.
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
    """The assets that have a log in a warehouse, in folders of it too (``shop/prices``). Does not use
    Spark."""
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
        version: of the Delta table of its log that has them.
        wanted: the values of one key, or of all: None.
    """

    root: str
    commit: Commit
    version: int
    shape: Shape
    wanted: Sequence[Any] | None
    later: bool
    """Whether the log has rows of later commits as well."""

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
        """The log from some offsets on (inclusive); None = all of it."""
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
        """Versions, or current rows; as of a time where given."""
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
        """Of a versioned table: its horizons by partition."""
        limits = zip(stream_time, horizons(self.shape.retention(), stream_time), strict=True)
        return dict(limits) if self.shape.kind == "versioned" else None

    def _folded(self, what: str, moment: int | None) -> pa.Table:
        base, then = self._base(what, moment)
        start = then.next_offset if then else {}
        tail = None if then and start == self.commit.next_offset else self.log(start)
        if base is not None and then is not None and self.shape.kind == "versioned":
            # What had expired may lie there yet, beside a tombstone that does not.
            base = fold(base, None, self.key, self._limits_at(then.stream_time))
        return fold(base, tail, self.key, self._limits, self.shape.new_version_on)

    def _base(self, what: str, moment: int | None) -> tuple[pa.Table | None, Checkpoint | None]:
        """What is needed of the view, and where it stands."""
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
        """The rows as of where the log was cut off, and where that is; none where it was not."""
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
    """The rows of an asset's log or view for which a condition holds, which the files are read by.

    Args:
        path: ``…/name/log`` or ``…/name/view``.
        version: of the Delta table.
        condition: makes an Arrow expression of the columns that files have; None = all rows.
        wanted: the files that may have some.
        like: the columns that are there have the types and names that they have there.
        only: the columns that are read, of those that there are; None = all.
        opened: the table as of that version, where somebody has opened it.

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
    import pyarrow.dataset as ds  # takes pandas with it, which runs without news need not

    try:
        dataset = ds.dataset(places, columns, format="parquet", filesystem=where)
        return by_newest_names(dataset.to_table(columns=read.names, filter=chosen), read)
    except (OSError, pa.ArrowInvalid) as error:
        name = posixpath.basename(posixpath.dirname(path))
        raise StorageError(
            f"{name}: expected to read the files of {path}, got: {str(error)[:200]}. Make the view "
            f"anew (vt-dagster rebuild {name}); files of a log must come from a backup"
        ) from error


def of_key(path: str, columns: pa.Schema, key: Sequence[str], values: Sequence[Any]) -> Any:
    """The condition that a row of a log or view is of a key.

    Args:
        path: ``…/name/log`` or ``…/name/view``, for messages.
        values: of the key's columns, also as texts.

    Raises:
        StorageError: they cannot be of that key.
    """
    if len(values) != len(key):
        name = posixpath.basename(posixpath.dirname(path))
        raise StorageError(
            f"{name} has the key {list(key)}: give --key once for each, got {list(values)}"
        )
    condition: Any = None
    for column, value in zip(key, values, strict=True):
        kind = columns.field(column).type
        if pa.types.is_nested(kind):
            raise StorageError(
                "expected a key that can be written as plain texts, but the key column "
                f"{column} is of type {type_name(kind)}; read the Delta table {path} with "
                "Spark, and select the row there"
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
    """The columns of a log or view, but for those that are the library's own."""
    told = pa.schema(table.schema().to_arrow())
    return pa.schema([f for f in told if f.name != SEGMENT])
