"""Exports a stream or table as a Delta or Iceberg table for other engines, and keeps it up to date.

The exported table stores the position in its own commits: each names the log and the offsets up to
which it was exported. So rows and position are written atomically, and a run without new log rows
writes nothing.

**As of now.** A table may have future-dated versions. An export with ``as_of="now"`` has the rows
that are valid at the clock's time when its run starts. Its commit names this instant, and the time at
which the next version begins or ends. So a run without new log rows knows, without Spark, whether the
rows have changed since.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from vt_dagster.columns import IS_LATEST, IS_TOMBSTONE, OLD, VALID_FROM, VALID_TO
from vt_dagster.core.log_columns import log_columns
from vt_dagster.core.table_store import as_read, rows_now
from vt_dagster.errors import StorageError, TopologyError
from vt_dagster.runs.pin import require_inputs_unchanged
from vt_dagster.spark.jars import one_line
from vt_dagster.spark.settings import is_small
from vt_dagster.storage import delta, iceberg, parquet
from vt_dagster.storage.asset_store import AssetStore, Snapshot
from vt_dagster.storage.commit_log import (
    Commit,
    Exported,
    choose,
    consumed_commits,
    require_not_truncated,
    require_same_log,
)
from vt_dagster.storage.delta import address
from vt_dagster.storage.schema_evolution import shape_of
from vt_dagster.topology.durations import NOW, clock, in_utc
from vt_dagster.topology.model import Stream, Table
from vt_dagster.topology.node import listed
from vt_dagster.topology.options import check_types

_OWN_FOLDER = re.compile(r"_delta_log|\d+-[0-9a-f]{32}")
"""The names of folders that a killed first run leaves behind."""
AsOf = Literal["now"] | None
"""As of when an export has the rows of a versioned table, see :class:`Export`."""


@dataclass(frozen=True)
class Export:
    """Declares an export: rows, columns and target. Checked at construction, when definitions load.

    Args:
        name: name of the export's asset.
        to: the directory or URL of the table.
        what: ``current``, ``versions`` or ``log``; empty = ``current`` for a table, ``log`` for a
            stream.
        columns: columns of the exported table, in order; empty = those of the schema, and with
            ``versions`` also ``valid_from`` and ``valid_to``.
        with_columns: additional columns.
        catalog_table: name to register in the session's catalog; None = do not register. Of an Iceberg
            table its name in ``iceberg_catalog``.
        format: ``delta`` or ``iceberg``.
        iceberg_catalog: of an Iceberg table: the catalog's name in PyIceberg's configuration.
        as_of: of the current rows of a versioned table. None: the latest version of each key, also one
            that begins in the future. ``now``: the version that is valid at the clock's time when a run
            starts.

    Raises:
        TopologyError: the node does not have ``what``, ``as_of`` or the columns, ``to`` is no valid
            place, or the format lacks a name, a package or a type.
    """

    node: Stream
    name: str
    to: str
    what: str = ""
    columns: tuple[str, ...] = ()
    with_columns: tuple[str, ...] = ()
    catalog_table: str | None = None
    format: str = "delta"
    iceberg_catalog: str | None = None
    as_of: AsOf = None

    def __post_init__(self) -> None:
        check_types(self, f"{self.name}", skip={"to"})  # a path will do
        try:
            what = choose(self.node.name, shape_of(self.node).kind, self.what or None, self.as_of)
            delta.require_place(str(self.to))
        except StorageError as error:
            raise TopologyError(str(error)) from None
        if self.as_of not in (None, NOW):
            raise TopologyError(
                f"{self.name}: expected as_of to be {NOW!r} or None, got {self.as_of!r}; an export "
                "follows its table: for the rows as of a fixed time use vt_dagster.read"
            )
        object.__setattr__(self, "what", what)
        object.__setattr__(self, "to", address(self.to))
        object.__setattr__(self, "columns", self._chosen(what))
        if self.catalog_table is not None and not re.fullmatch(r"\w+(\.\w+){0,2}", self.catalog_table):
            raise TopologyError(
                f"{self.name}: expected catalog_table to be a name such as 'db.prices', got "
                f"{self.catalog_table!r}; correct it"
            )
        if self.format not in ("delta", "iceberg"):
            raise TopologyError(
                f"{self.name}: expected format to be 'delta' or 'iceberg', got {self.format!r}; "
                "correct it"
            )
        if self.format == "iceberg":
            self._require_iceberg()
        elif self.iceberg_catalog is not None:
            raise TopologyError(
                f"{self.name}: expected iceberg_catalog with format='iceberg' only, got "
                f"{self.iceberg_catalog!r} with format='delta'; leave it out, or set the format"
            )

    def _require_iceberg(self) -> None:
        """Refuses an Iceberg table without a name in a catalog, without PyIceberg, and with types that
        Iceberg does not have."""
        if not iceberg.CATALOG.fullmatch(self.iceberg_catalog or ""):
            raise TopologyError(
                f"{self.name}: expected iceberg_catalog to name a catalog of PyIceberg's "
                f"configuration, such as 'lake', got {self.iceberg_catalog!r}; set it"
            )
        if not iceberg.NAME.fullmatch(self.catalog_table or ""):
            raise TopologyError(
                f"{self.name}: expected catalog_table to be the name of the Iceberg table, such as "
                f"'bi.prices', got {self.catalog_table!r}; set it"
            )
        if not iceberg.is_installed():
            raise TopologyError(
                f"{self.name}: expected the package pyiceberg for format='iceberg', got none; install "
                '"vt-dagster[iceberg]"'
            )

    @property
    def iceberg_table(self) -> iceberg.IcebergTable | None:
        """The Iceberg table; None = a Delta table."""
        if self.iceberg_catalog is None or self.catalog_table is None:
            return None
        return iceberg.IcebergTable(self.name, self.iceberg_catalog, self.catalog_table, self.to)

    def _chosen(self, what: str) -> tuple[str, ...]:
        versions = (VALID_FROM, VALID_TO) if what == "versions" else ()
        own = [c for c in log_columns(self.node) if c in self.node.schema.names]
        there = list(dict.fromkeys([*log_columns(self.node), *versions]))
        if what != "log" and isinstance(self.node, Table):
            there = [c for c in there if c not in (IS_LATEST, OLD)]
        chosen = tuple(dict.fromkeys([*(self.columns or (*own, *versions)), *self.with_columns]))
        unknown = [c for c in chosen if c not in there]
        if unknown:
            raise TopologyError(
                f"{self.name}: expected columns of {self.node.name}, some of {there}, got {unknown}; "
                "correct columns or with_columns"
            )
        return chosen

    def require_outside(self, warehouse: str) -> None:
        """Refuses an export inside a warehouse, or around it.

        Raises:
            TopologyError: one directory contains the other.
        """
        require_outside(self.name, self.to, warehouse)


def require_outside(name: str, to: str, warehouse: str) -> None:
    """Refuses a target inside a warehouse, or around it.

    Raises:
        TopologyError: one directory contains the other.
    """
    mine, theirs = _place(to), _place(warehouse)
    if f"{mine}/".startswith(f"{theirs}/") or f"{theirs}/".startswith(f"{mine}/"):
        raise TopologyError(
            f"{name}: expected a place outside of the warehouse {warehouse}, whose folders "
            f"are those of its assets, got to={to!r}; choose another directory"
        )


def _place(path: str) -> str:
    if "://" in path and not path.startswith("file://"):
        return delta.location(path).rstrip("/")
    return str(Path(path.removeprefix("file://")).resolve())


class ExportRun:
    """Updates the table of an export with the new records of an asset's log.

    Args:
        spark: a session, or a function that returns one, called when it is first needed.
        tell: is called with one line per write.
    """

    def __init__(
        self,
        export: Export,
        warehouse: str,
        spark: SparkSession | Callable[[], SparkSession],
        tell: Callable[[str], None] | None = None,
    ) -> None:
        export.require_outside(warehouse)
        self.export = export
        self._store = AssetStore(warehouse, export.node, spark, tell)
        self._iceberg = export.iceberg_table

    def head(self) -> Commit | None:
        """Returns the last commit of the export; None before the first. Does not use Spark.

        Raises:
            StorageError: the place has other files, or another writer has written to the table.
        """
        if self._iceberg is None:
            return head_in(self.export.to, self.export.name, "export")
        last = self._iceberg.last()
        return None if last is None else Commit.model_validate(last)

    def run(self, run_id: str | None = None) -> Commit | None:
        """Writes the new rows of a log, or the whole of a table, in one commit.

        If the log was replaced (swapped, restated) or the columns changed, writes the whole table. An
        export as of now also writes the whole table once a version of it has begun or ended.

        Returns:
            the commit; None = no new rows, decided without Spark.

        Raises:
            StorageError: another writer owns the place; or the log is not the exported one, because it
                was restored from a backup; or now is before the table's history.
            ConcurrentRunError: another run of the export committed at the same time.
        """
        export, before, at = self.export, self.head(), self._store.snapshot()
        head = at.head
        if head is None:
            return None
        require_same_log(export.name, export.node.name, before, head.commit, self._store.attempt_of)
        now = None if export.as_of is None else clock()
        commit = self._document(at, before, run_id, now)
        same = before is not None and _content(before) == _content(commit)
        if before is not None and same and before.next_offset == commit.next_offset:
            until = None if before.export is None else before.export.valid_until
            if now is None or until is None or now < until:
                return None
        self._require_name()
        appends = before is not None and same and export.what == "log"
        start = before.next_offset if before is not None and appends else {}
        # A first export has what the log has. So has one after an erase, or it would keep the key.
        if export.what == "log" and before is not None and before.export is not None:
            require_not_truncated(export.name, export.node.name, start, head.commit)
        rows, number = self._rows(at, start, now)
        rows = parquet.packed(rows, number, for_others=True)
        if now is not None:
            commit = self._until(commit, at, now)

        def check() -> None:
            require_inputs_unchanged(export.name, [(self._store, head)])

        with self._store.planner_settings(is_small(number, 0)):
            if self._iceberg is None:
                version = f"version {write_in(export.to, rows, commit, check, appends)}"
            else:
                after = None if before is None else before.attempt
                about = {"document": commit.model_dump(), "after": after, "append": appends}
                version = f"snapshot {self._iceberg.write(rows, **about, before=check)}"
        self._store.progress.done(f"exported to {export.to}, batch {commit.batch} ({version})")
        self.register()
        return commit

    def _until(self, commit: Commit, at: Snapshot, now: int) -> Commit:
        """Adds the time at which the rows as of now change: the first time after now at which a version
        begins or ends.

        Plan: one aggregate over the versions that end after now."""
        versions = as_read(self.export.node, self._store.view_at(at, since=now))
        later = [F.min(F.when(m > now, m)) for m in map(F.unix_micros, (VALID_FROM, VALID_TO))]
        until = versions.agg(F.least(*later)).collect()[0][0]
        assert commit.export is not None
        export = commit.export.model_copy(update={"valid_until": until})
        return commit.model_copy(update={"export": export})

    def _document(
        self, at: Snapshot, before: Commit | None, run_id: str | None, now: int | None
    ) -> Commit:
        """Returns the commit: the log, its offsets, and what is exported.

        Args:
            now: the clock's time, epoch microseconds, for an export as of now.
        """
        assert at.head is not None
        export, head = self.export, at.head.commit
        shape = shape_of(export.node)
        types = {f.name: f.dataType.simpleString() for f in export.node.schema.fields}
        exported = Exported(
            what=export.what, columns=[(name, types.get(name)) for name in export.columns], as_of=now
        )
        done = {} if before is None or before.log != head.log else before.next_offset
        ranges = {p: (done.get(p, 0), e) for p, e in head.next_offset.items() if e > done.get(p, 0)}
        return Commit(
            asset=export.name,
            batch=1 if before is None else before.batch + 1,
            attempt=self._store.new_attempt(),
            shape=shape.model_copy(update={"specification": None}),
            export=exported,
            log=head.log,
            logs={export.node.name: head.log},
            consumed=consumed_commits({export.node.name: head}),
            run_id=run_id,
            taken={export.node.name: ranges},
            inputs={export.node.name: head.next_offset},
            next_offset=head.next_offset,
            stream_time=head.stream_time,
            counts={"in": sum(end - start for start, end in ranges.values())},
            reads={f"{export.node.name}/log": at.head.version},
        )

    def _rows(self, at: Snapshot, start: dict[int, int], now: int | None) -> tuple[DataFrame, int]:
        """Returns the rows to write, and their approximate number."""
        assert at.head is not None
        export, store = self.export, self._store
        number = at.total - sum(start.values())
        if export.what == "log":
            rows = store.log(start, at.head)
        elif export.what == "versions":
            rows = as_read(export.node, store.view_at(at))
        elif now is not None:
            rows, number = store.read(export.what, in_utc(now), at=at), at.reach()
        else:
            assert isinstance(export.node, Table)
            rows = store.current_at(at)
            rows, number = rows_now(export.node, rows, at.stream_time), at.reach()
        if IS_TOMBSTONE not in export.columns and IS_TOMBSTONE in rows.columns:
            rows = rows.where(f"NOT {IS_TOMBSTONE}")
        return rows.select(*[f"`{c}`" for c in export.columns]), number

    def register(self) -> None:
        """Registers a Delta table in the session's catalog, if ``catalog_table`` is set."""
        if self._iceberg is None and self.export.catalog_table is not None:
            where = self._location().replace("\\", "\\\\").replace("'", "\\'")
            self._sql(
                f"CREATE TABLE IF NOT EXISTS {self.export.catalog_table} USING DELTA LOCATION '{where}'"
            )

    def _require_name(self) -> None:
        """Refuses a catalog name that another table has, before anything is written."""
        if self._iceberg is not None:
            self._iceberg.require_schema()
            return
        name = self.export.catalog_table
        if name is None or not self._store.spark.catalog.tableExists(name):
            return
        found = self._sql(f"DESCRIBE DETAIL {name}").select("location").collect()[0][0]
        there = _place(re.sub(r"^file:/+", "/", found))
        if there != _place(self._location()):
            raise StorageError(
                f"{self.export.name}: expected {name} to be a new name in the catalog, or the table in "
                f"{self.export.to}, got one in {found}; give another catalog_table, or drop that one"
            )

    def _location(self) -> str:
        to = self.export.to
        return to if "://" in to else _place(to)

    def _sql(self, statement: str) -> DataFrame:
        try:
            return self._store.spark.sql(statement)
        except PySparkException as error:
            raise StorageError(
                f"{self.export.name}: expected the session's catalog to take {statement!r}, got: "
                f"{one_line(error)}. Create its schema, or give another catalog_table"
            ) from error


def _content(commit: Commit) -> tuple[object, ...]:
    """Returns the settings that decide an export's rows, besides the records and the clock."""
    export = commit.export
    exported = None if export is None else (export.what, export.columns, export.as_of is None)
    return commit.log, commit.shape, exported


def head_in(to: str, name: str, kind: str) -> Commit | None:
    """Returns the last commit of an exported table or training set; None before the first. Does not use
    Spark.

    Args:
        kind: the field that only the commits of such a table have.

    Raises:
        StorageError: the place has other files, or another writer has written to the table.
    """
    found = delta.last_of_ours(to)
    if found is None:
        _require_empty(to, name)
        return None
    whose = found.document.get("asset")
    if found.document.get(kind) is None or whose != name:
        raise StorageError(
            f"{name}: expected an empty place or its own table in {to}, got one that {whose!r} "
            "writes; give the export another directory"
        )
    changed = delta.foreign_write(to)
    if changed is not None:
        raise StorageError(
            f"{name}: expected that only this export writes to {to}, but another writer has changed "
            f"it: {changed}. RESTORE it to version {found.version}, or remove the directory: the next "
            "run creates the table again"
        )
    delta.files(to, wanted=lambda _: False)  # refuses Delta features that simpler readers lack
    return Commit.model_validate(found.document)


def write_in(
    to: str, rows: DataFrame, commit: Commit, before: Callable[[], None], append: bool = False
) -> int:
    """Writes an exported table or training set in one commit, and returns its Delta version.

    Args:
        before: checks, directly before the commit.
        append: whether to keep the rows that are there.
    """
    last = delta.last_of_ours(to)
    written = parquet.write(
        rows,
        to,
        document=commit.model_dump(),
        batch=commit.batch,
        asset=commit.asset,
        mode="append" if append or last is None else "overwrite",
        over=None if last is None else last.version,
        before=before,
    )
    return written.version


def _require_empty(to: str, name: str) -> None:
    others = [name for name in delta.names_in(to) if not _OWN_FOLDER.fullmatch(name)]
    if others or delta.exists(to):
        raise StorageError(
            f"{name}: expected an empty place or its own table in {to}, got "
            f"{'a Delta table of another writer' if delta.exists(to) else sorted(others)[:3]}; give "
            "the export another directory, or move that away"
        )


def exported_rows(export: Export) -> int:
    """Returns the number of rows of an exported table. Does not use Spark."""
    if (table := export.iceberg_table) is not None:
        return table.rows()
    return sum(file.rows for file in delta.files(export.to))


def exported_types(export: Export) -> dict[str, str]:
    """Returns the columns of an exported table with their types in its format. Does not use Spark."""
    if (table := export.iceberg_table) is not None:
        return table.types()
    return {f.name: f.dataType.simpleString() for f in parquet.schema(export.to).fields}


def last_export(place: str) -> Commit | None:
    """Returns the last commit of an export; None = no table. Does not use Spark.

    Args:
        place: its directory or URL; of an Iceberg table ``catalog:schema.table``.

    Raises:
        StorageError: the catalog does not answer, or the directory has an Iceberg table.
    """
    if iceberg.is_reference(place):
        document = iceberg.last_document(place)
    else:
        found = delta.last_commit(place)
        document = None if found is None else found.document
        if found is None and iceberg.is_table(place):
            raise StorageError(
                f"expected the directory of a Delta table, got that of an Iceberg table, {place}; name "
                "it as catalog:schema.table"
            )
    return None if document is None else Commit.model_validate(document)


def export_of(
    node: Stream,
    what: str | None,
    to: str,
    *,
    name: str | None = None,
    columns: Sequence[str] = (),
    with_columns: Sequence[str] = (),
    catalog_table: str | None = None,
    format: str = "delta",
    iceberg_catalog: str | None = None,
    as_of: AsOf = None,
) -> Export:
    """Returns an export; its default name is ``<node>_export``. See :class:`Export`."""
    return Export(
        node,
        name or f"{node.name}_export",
        str(to),
        what or "",
        listed(columns),
        listed(with_columns),
        catalog_table,
        format,
        iceberg_catalog,
        as_of,
    )
