"""Registers an asset's tables by name in Spark's catalog, as views over the paths of its Delta tables.

``lake.bronze.prices`` has the current rows (of a stream: its records), ``prices_versions`` the versions
of a versioned table, ``prices_log`` the log of a table: the rows and columns of ``vt_dagster.read``.

**Why views.** The folder ``view`` of a versioned table has the column ``history_segment``, tombstones,
expired versions and rows that repeat a version; any folder has a renamed column under each of its
names. A Delta table in a catalog takes its columns and their comments from its own log, and only runs
write to that. A view has columns and comments of its own. Its text depends on the declaration, not on a
run, so it is written only if that has changed.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import StructField, StructType

from vt_dagster.columns import (
    IS_TOMBSTONE,
    OLD,
    PARTITION,
    SEGMENT,
    TIMESTAMP,
    VALID_FROM,
    VALID_TO,
)
from vt_dagster.core.log_columns import log_schema
from vt_dagster.errors import StorageError, TopologyError
from vt_dagster.spark.jars import one_line
from vt_dagster.storage import parquet
from vt_dagster.storage.arrow_reader import asset_names
from vt_dagster.storage.delta import address, quoted
from vt_dagster.storage.schema_evolution import evolved, without_earlier_names
from vt_dagster.storage.spark_reader import AssetReader
from vt_dagster.storage.view import stored_as
from vt_dagster.topology.durations import in_micros
from vt_dagster.topology.model import Stream, Table, VersionedTable
from vt_dagster.topology.schema import earlier_names, same, was
from vt_dagster.topology.version_rules import new_version_on_of

_T = TypeVar("_T")
_ASSET, _DEFINITION = "vt_dagster.asset", "vt_dagster.definition"
"""Properties of a view: the asset's directory, and a digest of the view's definition."""
_COMMENT = 255
"""The maximal length of a column's comment in Hive's metastore and in Glue."""
_SUFFIXES = {"current": "", "versions": "_versions", "log": "_log"}
_TITLES = {"current": "The current rows", "versions": "The versions", "log": "The log"}


def require_catalog(catalog: str) -> None:
    """Requires the name of a schema, when definitions load.

    Raises:
        TopologyError: the text is no such name.
    """
    if not re.fullmatch(r"\w+(\.\w+)?", catalog):
        raise TopologyError(
            "WarehouseResource: expected catalog to be a schema such as 'bronze', or one of a catalog "
            f"such as 'lake.bronze', got {catalog!r}; correct it"
        )


def names_of(node: Stream) -> dict[str, str]:
    """Returns the name in the schema of each table that can be read: ``log``, ``current``,
    ``versions``."""
    name = "_".join(node.path)
    if not isinstance(node, Table):
        return {"log": name}
    some = _SUFFIXES if isinstance(node, VersionedTable) else ("current", "log")
    return {what: f"{name}{_SUFFIXES[what]}" for what in some}


def require_names(nodes: Iterable[Stream]) -> None:
    """Requires that no two assets have one name in a catalog, which ignores case.

    Raises:
        TopologyError: two assets have one name.
    """
    taken = dict[str, str]()
    for node in nodes:
        for name in names_of(node).values():
            mine, other = "/".join(node.path), taken.get(name.lower())
            if other is not None:
                raise TopologyError(
                    f"{mine}: expected names in the catalog that no other asset has, got {name!r}, "
                    f"which {other} has too; give one of the two another name or key prefix"
                )
            taken[name.lower()] = mine


def register(
    store: AssetReader, catalog: str, comments: Mapping[str, str] = {}, batch: int | None = None
) -> None:
    """Registers an asset's tables; writes nothing if they are registered as they are now.

    Drops a name of the asset that its kind does not have (after a swap with an asset of another kind).
    Makes the schema, if it does not exist.

    Args:
        catalog: ``schema`` or ``catalog.schema``. The catalog must support views, as the session's own
            (in memory, Hive, Glue) does.
        comments: of columns, by name; truncated to 255 characters.
        batch: the last commit, for messages.

    Raises:
        StorageError: another table has a name already, or the catalog refuses.
    """
    _Catalog(store, catalog, batch).register(comments)


def registered(spark: SparkSession, catalog: str, warehouse: str) -> dict[str, str]:
    """Returns the names in a schema that are registered for assets of a warehouse, each with the name
    of its asset; empty if there is no such schema.

    Raises:
        StorageError: the catalog refuses.
    """
    place, found = f"{address(warehouse).rstrip('/')}/", dict[str, str]()
    if not _call(catalog, "find the schema", lambda: spark.catalog.databaseExists(catalog)):
        return found
    views = _call(catalog, "list views", lambda: spark.sql(f"SHOW VIEWS IN {catalog}").collect())
    for name in sorted(row["viewName"] for row in views if not row["isTemporary"]):
        query = f"SHOW TBLPROPERTIES {_qualified(catalog, name)} ('{_ASSET}')"
        (row,) = _call(catalog, f"find {name}", lambda query=query: spark.sql(query).collect())
        if row["value"].startswith(place):
            found[name] = row["value"].removeprefix(place)
    return found


def drop(spark: SparkSession, catalog: str, names: Iterable[str]) -> None:
    """Drops names that ``registered`` returned; not the tables. A name that is gone is no error.

    Raises:
        StorageError: the catalog refuses.
    """
    for name in names:
        gone = f"DROP VIEW IF EXISTS {_qualified(catalog, name)}"
        _call(catalog, f"take {gone!r}", lambda gone=gone: spark.sql(gone))


def drop_without_tables(spark: SparkSession, catalog: str, warehouse: str) -> list[str]:
    """Drops the names of assets whose tables are no longer in the warehouse, and returns these names.

    Drops nothing if the warehouse has no asset at all: its storage may be unavailable.

    Raises:
        StorageError: the catalog refuses.
    """
    there = {*asset_names(warehouse)}
    if not there:
        return []
    gone = [n for n, asset in registered(spark, catalog, warehouse).items() if asset not in there]
    drop(spark, catalog, gone)
    return gone


def _qualified(catalog: str, name: str) -> str:
    return f"{catalog}.`{name}`"


def _call(catalog: str, what: str, done: Callable[[], _T], asset: str = "", standing: str = "") -> _T:
    """Makes a request to the catalog.

    Args:
        what: the request in words, for the message.
        done: makes the request.
        asset, standing: for the message: the asset, and what is already committed.

    Raises:
        StorageError: the catalog refuses the request.
    """
    try:
        return done()
    except PySparkException as error:
        raise StorageError(
            f"{asset or catalog}: expected the catalog of the Spark session to {what}, got: "
            f"{one_line(error)}. {standing}WarehouseResource(catalog={catalog!r}) "
            "needs a catalog with views, and the right to write to it; correct it and run again"
        ) from error


class _Catalog:
    def __init__(self, store: AssetReader, catalog: str, batch: int | None) -> None:
        self._store, self._catalog, self._batch = store, catalog, batch
        self._spark = store.spark
        self._root = address(store.root)

    def register(self, comments: Mapping[str, str]) -> None:
        wanted, name = names_of(self._store.node), "_".join(self._store.node.path)
        if not self._try("find the schema", lambda: self._spark.catalog.databaseExists(self._catalog)):
            self._sql(f"CREATE SCHEMA IF NOT EXISTS {self._catalog}")
        for what in wanted:
            self._put(wanted[what], what, comments)
        for other in {f"{name}{suffix}" for suffix in _SUFFIXES.values()} - {*wanted.values()}:
            there = self._properties(other)
            if there is not None and there.get(_ASSET) == self._root:
                self._sql(f"DROP VIEW IF EXISTS {_qualified(self._catalog, other)}")

    def _put(self, name: str, what: str, comments: Mapping[str, str]) -> None:
        columns, query = select(self._store, what)
        column_list = ", ".join(
            f"`{c}`" + (f" COMMENT {_literal(comments[c][:_COMMENT])}" if comments.get(c) else "")
            for c in columns
        )
        node = self._store.node
        about = f"{_TITLES[what]} of {'/'.join(node.path)}. {node.description or ''}".strip()
        made = f"({column_list}) COMMENT {_literal(about)}"
        digest = hashlib.sha256(f"{made} {query}".encode()).hexdigest()[:16]
        there = self._properties(name)
        full = _qualified(self._catalog, name)
        if there is not None and there.get(_ASSET) != self._root:
            whose = there.get(_ASSET)
            raise StorageError(
                f"{node.name}: expected {full} to be a new name in the catalog, or "
                f"one of the asset in {self._root}, got one of "
                f"{f'the asset in {whose}' if whose else 'another writer'}. {self._committed_so_far()}"
                "Give WarehouseResource(catalog=…) another schema, or drop that one, and run again"
            )
        if there is not None and there.get(_DEFINITION) == digest:
            return
        mine = f"'{_ASSET}' = {_literal(self._root)}, '{_DEFINITION}' = '{digest}'"
        self._sql(f"CREATE OR REPLACE VIEW {full} {made} TBLPROPERTIES ({mine}) AS {query}")
        self._store.progress.done(f"registered {self._catalog}.{name}")

    def _properties(self, name: str) -> dict[str, str] | None:
        """Returns the properties of a table or view; None = there is none of that name."""
        full = _qualified(self._catalog, name)
        if not self._try(f"find {full}", lambda: self._spark.catalog.tableExists(full)):
            return None
        return {row[0]: row[1] for row in self._sql(f"SHOW TBLPROPERTIES {full}").collect()}

    def _sql(self, statement: str) -> DataFrame:
        return self._try(f"take {statement[:300]!r}", lambda: self._spark.sql(statement))

    def _try(self, what: str, done: Callable[[], _T]) -> _T:
        return _call(self._catalog, what, done, self._store.node.name, self._committed_so_far())

    def _committed_so_far(self) -> str:
        return "" if self._batch is None else f"Batch {self._batch} is committed. "


# Queries


_WITH_TIME = (
    f"SELECT {{0}}.* FROM {{0}} LEFT JOIN newest ON {{0}}.`{PARTITION}` <=> newest.`{PARTITION}`"
)


def select(store: AssetReader, what: str) -> tuple[list[str], str]:
    """Returns the columns, and a query on the paths of Delta tables, for what
    ``AssetReader.read(what)`` returns, without the log rows that the stored view lacks, and without
    ``is_final``. Does not use Spark.

    Plan: a scan. For versions, and for current rows with ``valid_until``, joined with the stream time
    of each partition: the largest timestamp of its current rows. For versions with ``new_version_on``
    also a shuffle and sort by key.
    """
    node = store.node
    path, like = store.log_path, log_schema(node)
    if what != "log":
        path, like = store.view_path, stored_as(node, store.log_path)
    columns, stored = _stored(path, like)
    if what == "log" or not isinstance(node, VersionedTable):
        return columns.names, stored
    steps = {"stored": stored}
    steps["newest"] = (
        f"SELECT `{PARTITION}`, max(`{TIMESTAMP}`) AS stream_time FROM {quoted(address(path))} "
        f"WHERE `{SEGMENT}` IS NULL GROUP BY `{PARTITION}`"
    )
    if what == "current":
        steps["stored"] += f" WHERE `{SEGMENT}` IS NULL"
        steps["kept"] = f"SELECT * FROM stored WHERE NOT `{IS_TOMBSTONE}`"
    else:
        horizon = f"unix_micros(newest.stream_time) - {in_micros(node.history_retention)}"
        expired = (
            f"unix_micros(stored.`{VALID_TO}`) <= {horizon} OR "
            f"(stored.`{IS_TOMBSTONE}` AND unix_micros(stored.`{VALID_FROM}`) < {horizon})"
        )
        steps["kept"] = f"{_WITH_TIME.format('stored')} WHERE NOT coalesce({expired}, false)"
    on = new_version_on_of(node)
    if on is not None:
        steps |= _versions(columns, node.key, on, what == "versions")
    shown = [c for c in columns.names if on is None or c != OLD]
    if node.valid_until is not None:
        end = f"least(`{VALID_TO}`, `{node.valid_until}`)"
        steps["ended"] = f"SELECT {_list(shown, {VALID_TO: end})} FROM {[*steps][-1]}"
        if what == "current":
            ahead = f"ended.`{VALID_TO}` IS NULL OR ended.`{VALID_TO}` > newest.stream_time"
            steps["present"] = f"{_WITH_TIME.format('ended')} WHERE {ahead}"
    steps_sql = ", ".join(f"{name} AS ({step})" for name, step in steps.items())
    return shown, f"WITH {steps_sql} SELECT {_list(shown)} FROM {[*steps][-1]}"


def _versions(
    columns: StructType, key: Sequence[str], on: Sequence[str], every: bool
) -> dict[str, str]:
    """Returns the steps from the rows ``kept`` to versions: ``versioned_table.collapse_repeats`` in
    SQL, or ``with_version_start`` alone.

    Args:
        every: whether the rows are all versions, not only the current ones.
    """
    alike = " AND ".join(f"`{c}` <=> `{OLD}`.`{c}`" for c in on)
    repeats = f"coalesce(NOT `{IS_TOMBSTONE}` AND `{OLD}` IS NOT NULL AND {alike}, false)"
    kind = columns[OLD].dataType
    assert isinstance(kind, StructType)
    shown = [c for c in columns.names if c != OLD]
    expressions = {c: f"`{OLD}`.`{c}`" for c in kind.names if c in shown} | {
        VALID_FROM: f"`{OLD}`.`{TIMESTAMP}`"
    }
    expressions = {
        c: f"CASE WHEN {repeats} THEN {value} ELSE `{c}` END" for c, value in expressions.items()
    }
    if not every:
        return {"versions": f"SELECT {_list(shown, expressions)} FROM kept"}
    order = f"PARTITION BY {_list(key)} ORDER BY `{VALID_FROM}`"
    whole = f"{order} ROWS BETWEEN UNBOUNDED PRECEDING AND UNBOUNDED FOLLOWING"
    expressions[VALID_TO] = f"CASE WHEN _last THEN _last_end ELSE lead(_end) OVER ({order}) END"
    return {
        "marked": (
            f"SELECT *, {repeats} AS _repeats, lag(`{VALID_TO}`) OVER ({order}) AS _end, "
            f"last(`{VALID_TO}`) OVER ({whole}) AS _last_end, lag(1) OVER ({order}) IS NULL AS _first "
            "FROM kept"
        ),
        "chosen": (
            f"SELECT *, lead(1) OVER ({order}) IS NULL AS _last FROM marked "
            "WHERE NOT _repeats OR _first"
        ),
        "versions": f"SELECT {_list(shown, expressions)} FROM chosen",
    }


def _stored(path: str, like: StructType) -> tuple[StructType, str]:
    """Returns the columns of a Delta table under their newest names, and the query that reads them."""
    stored = parquet.stored_schema(path)
    columns = evolved(path, stored, like, declared=()).columns
    gone = earlier_names(columns)
    values = [f"{_value('', f, stored)} AS `{f.name}`" for f in columns.fields if f.name not in gone]
    return without_earlier_names(columns), f"SELECT {', '.join(values)} FROM {quoted(address(path))}"


def _value(of: str, field: StructField, stored: StructType) -> str:
    """Returns the value of a column, which a row has under one of the column's names; null if the table
    does not have it yet.

    Args:
        of: the struct that has the field, with a dot.
        stored: the fields that are there.
    """
    kind = field.dataType
    there = {f.name: f.dataType for f in stored.fields}
    found = [n for n in (field.name, *was(field)) if n in there]
    if field.name == OLD and OLD in there and isinstance(kind, StructType):
        inner, gone = there[OLD], earlier_names(kind)
        assert isinstance(inner, StructType)
        if gone or not same(inner, kind):
            kept = [f for f in kind.fields if f.name not in gone]
            parts = [f"'{f.name}', {_value(f'`{OLD}`.', f, inner)}" for f in kept]
            return f"CASE WHEN `{OLD}` IS NOT NULL THEN named_struct({', '.join(parts)}) END"
    values = [
        f"{of}`{n}`" if same(there[n], kind) else f"CAST({of}`{n}` AS {kind.simpleString()})"
        for n in found
    ]
    if not values:
        return f"CAST(NULL AS {kind.simpleString()})"
    return values[0] if len(values) == 1 else f"coalesce({', '.join(values)})"


def _list(columns: Sequence[str], values: Mapping[str, str] = {}) -> str:
    return ", ".join(f"{values[c]} AS `{c}`" if c in values else f"`{c}`" for c in columns)


def _literal(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"
