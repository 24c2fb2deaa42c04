"""What may change in a live asset: which changes of columns and of the definition are applied in place,
and which are refused. No Spark jobs.

A plain Delta table has one schema, and data files keep the columns that they were written with. So only
changes that every reader handles alike are applied: a missing column reads as null, and a narrower
number reads as the wider type. Tested with Spark, Arrow, ``deltalake``, Polars and DuckDB:

- Wider integers, float to double, and decimals with more digits before the point work everywhere. More
  digits *after* the point are refused, because Polars cannot read such files.
- Files identify columns by name, and few engines read column mapping. So a renamed column is a new
  column of the table, and its field lists the earlier names. A row has its value under one of these
  names; this library's readers return it under the new name. A name is never used for another column:
  old rows would then have two columns of one name.
- A column that is no longer declared remains in the table, null in new rows. If it were removed, a
  later column of that name would bring its old values back.
- Types within a struct, an array or a map cannot change, except in ``old``, which holds the columns.

**Commit.** ``deltalake`` changes columns in a separate commit, and cannot widen a type. A run that died
between the two commits would leave columns without any row. So this module writes the commit file
itself: the file of the next version, which must not exist yet.
"""

from __future__ import annotations

import json
import os
import posixpath
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote
from uuid import uuid4

from deltalake import CommitProperties, DeltaTable
from deltalake.transaction import AddAction, RemoveAction
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import (
    ByteType,
    DataType,
    DecimalType,
    DoubleType,
    FloatType,
    IntegerType,
    LongType,
    NullType,
    ShortType,
    StructField,
    StructType,
)

from vt_dagster.columns import OLD
from vt_dagster.core.source_order import follows_source
from vt_dagster.errors import NeedsReplayError, StorageError
from vt_dagster.storage.commit_log import Shape
from vt_dagster.storage.delta import filesystem, is_local
from vt_dagster.topology.durations import in_micros
from vt_dagster.topology.model import Stream, Table, VersionedTable
from vt_dagster.topology.options import options_in_commit, pandera_schema
from vt_dagster.topology.schema import earlier_names, named, same, was
from vt_dagster.topology.specification import Names

# Schema evolution


_WHOLE: tuple[type[DataType], ...] = (ByteType, ShortType, IntegerType, LongType)
_FOLLOWED = (
    "Allowed changes: a new nullable column, a wider integer, float to double, "
    "a decimal with more digits before the point, another order, a column that is left out, a column "
    "declared as renamed={'before': 'now'}"
)


@dataclass(frozen=True)
class Evolution:
    """The change of a table's columns by rows with other columns.

    Args:
        columns: columns of the table after the change: existing ones in their order, then new ones.
        added: new columns.
        widened: columns with a wider type, ``price: int -> bigint``.
        dropped: columns that were declared before and are not now.
        renamed: columns with a new name, ``price -> cost``.
        refused: reasons why the change is impossible; empty = possible.
    """

    columns: StructType
    added: tuple[str, ...] = ()
    widened: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()
    renamed: tuple[str, ...] = ()
    refused: tuple[str, ...] = ()

    @property
    def summary(self) -> str:
        """The changes as a sentence; empty if nothing changes."""
        parts = [f"new, null in old rows: {', '.join(self.added)}"] if self.added else []
        parts += [f"wider type: {', '.join(self.widened)}"] if self.widened else []
        parts += [f"renamed: {', '.join(self.renamed)}"] if self.renamed else []
        parts += [f"null from now on: {', '.join(self.dropped)}"] if self.dropped else []
        return f"columns change: {'; '.join(parts)}" if parts else ""


def evolve(
    then: StructType,
    now: StructType,
    *,
    fixed: Collection[str] = (),
    required: Collection[str] = (),
    declared: Sequence[str] | None = None,
    derived: bool = False,
) -> Evolution:
    """Returns the evolution of a table's columns.

    Args:
        then: columns of the table, with their earlier names.
        now: columns of the new rows, with their earlier names; NullType (unresolved) fits any type.
        fixed: columns that must keep their type: those of the key and of the partitioning.
        required: columns that must not be null, so they cannot be added to existing rows.
        declared: the user's columns as declared before; None = unknown: all of ``then``.
        derived: whether the columns follow from inputs; possible renames were then already checked in
            the inputs.
    """
    table, names = _Columns(then), {f.name.lower() for f in now.fields}
    before = {f.name for f in then.fields} if declared is None else set(declared)
    added: list[StructField] = []
    changes: dict[str, list[str]] = {"widened": [], "renamed": [], "refused": []}
    for field in now.fields:
        home, wrong = table.home(field, names)
        if wrong:
            changes["refused"].append(wrong)
        elif home is None:
            if not isinstance(field.dataType, NullType):
                added.append(StructField(field.name, field.dataType))
                if field.name in required:
                    changes["refused"].append(
                        f"{field.name} is new and must not be null, but old rows do not have it"
                    )
        elif home.name == OLD:
            inner = evolve(_struct(home), _struct(field), declared=())
            table.kept[OLD] = StructField(OLD, inner.columns)
            changes["refused"] += [one for one in inner.refused if one not in changes["refused"]]
        else:
            kind = field.dataType
            if isinstance(kind, NullType) or same(home.dataType, kind):
                kind = home.dataType
            else:
                change = f"{field.name}: {home.dataType.simpleString()} -> {kind.simpleString()}"
                if not widens(home.dataType, kind):
                    changes["refused"].append(change)
                elif field.name in fixed:
                    changes["refused"].append(f"{change}, which is part of the key or the partitioning")
                else:
                    changes["widened"].append(change)
            if home.name != field.name:
                changes["renamed"].append(f"{home.name} -> {field.name}")
            table.put(home, field.name, kind)
    gone = [f for f in then.fields if f.name in before and not table.known(f.name, names)]
    changes["refused"] += [] if derived else _renamed(gone, added)
    return Evolution(
        StructType([*table.kept.values(), *added]),
        tuple(f.name for f in added),
        dropped=tuple(f.name for f in gone),
        **{what: tuple(dict.fromkeys(changed)) for what, changed in changes.items()},
    )


class _Columns:
    """The columns of a table, each with the names that it has in old rows."""

    def __init__(self, then: StructType) -> None:
        self.kept = {f.name: f for f in then.fields}
        self._names = {f.name.lower(): f.name for f in then.fields}
        self._homes = {name.lower(): f.name for f in then.fields for name in was(f)}

    def home(self, field: StructField, now: Collection[str]) -> tuple[StructField | None, str]:
        """Returns the table's column for a declared one, by its name or an earlier one; and the reason
        if there cannot be one."""
        name, before = field.name, {n.lower() for n in was(field)}
        there = self._names.get(name.lower())
        if there is not None and there != name:
            return None, f"{there} is now declared as {name}, which is another column for most engines"
        candidates = [name.lower(), *before]
        homes = {self._homes.get(n, self._names.get(n)) for n in candidates}
        found = [field for home, field in self.kept.items() if home in homes]
        if len(found) > 1:
            return None, (
                f"{' and '.join(f.name for f in found)} are declared as one column, {name}, but are "
                "two columns with values of their own"
            )
        if not found:
            return None, ""
        (home,) = found
        if home.name != name and home.name.lower() in now:
            return None, (
                f"{name} is the name of {home.name} in old rows, and no other column can have it"
            )
        known = {n.lower() for n in (home.name, *was(home))}
        if home.name != name and not before & known:
            return None, (
                f"{home.name} is missing and its earlier name {name} is declared again: to rename it "
                f"back, declare renamed={{{home.name!r}: {name!r}}}"
            )
        return home, ""

    def put(self, home: StructField, name: str, kind: DataType) -> None:
        """Sets the new name and type of a column."""
        if home.name == name:
            self.kept[name] = named(name, kind, was(home))
            return
        self.kept[home.name] = StructField(home.name, home.dataType)
        others = [n for n in (home.name, *was(home)) if n != name]
        self.kept[name] = named(name, kind, others)
        self._homes |= {n.lower(): name for n in others}
        self._homes.pop(name.lower(), None)

    def known(self, name: str, now: Collection[str]) -> bool:
        """Returns whether a column is still declared, under its newest name."""
        return self._homes.get(name.lower(), name).lower() in now


def evolved(name: str, then: StructType, now: StructType, **about: Any) -> Evolution:
    """Returns the evolution of a table of this name, see :func:`evolve`.

    Raises:
        NeedsReplayError: the change is refused; names the columns, both types, and what to do.
    """
    found = evolve(then, now, **about)
    if found.refused:
        raise NeedsReplayError(
            f"{name}: expected columns that the stored rows can be read with, got incompatible ones: "
            f"{'; '.join(found.refused)}. {_FOLLOWED}. Restore the earlier declaration, give the new "
            "column another name, or rebuild the asset beside the old one (vt-dagster replay) and swap"
        )
    return found


def widens(then: DataType, now: DataType) -> bool:
    """Returns whether every engine can read values of one type as the other type without loss."""
    if isinstance(then, _WHOLE) and isinstance(now, _WHOLE):
        return _WHOLE.index(type(then)) < _WHOLE.index(type(now))
    if isinstance(then, DecimalType) and isinstance(now, DecimalType):
        return then.scale == now.scale and then.precision < now.precision
    return isinstance(then, FloatType) and isinstance(now, DoubleType)


def never_null(node: Stream) -> set[str]:
    """Returns the columns declared not null; in a pandera model, those not declared nullable."""
    if (contract := pandera_schema(node.contract)) is not None:
        return {name for name, column in contract.columns.items() if not column.nullable}
    return {f.name for f in node.schema.fields if not f.nullable}


def without_earlier_names(columns: StructType) -> StructType:
    """Returns a table's columns for its readers, each under its newest name."""
    gone = earlier_names(columns)
    kept = [f for f in columns.fields if f.name not in gone]
    return StructType(
        [
            StructField(OLD, without_earlier_names(_struct(f)))
            if f.name == OLD and isinstance(f.dataType, StructType)
            else StructField(f.name, f.dataType)
            for f in kept
        ]
    )


def by_newest_names(rows: DataFrame, columns: StructType) -> DataFrame:
    """Returns rows of files with each column under its newest name.

    Plan: a projection, only if a column was renamed; a row has a value under one of its names.

    Args:
        columns: columns of the rows, with their earlier names.
    """
    renamed: dict[str, Column] = {}
    for field in columns.fields:
        if was(field):
            renamed[field.name] = _newest(F.col, field, columns)
        elif field.name == OLD and isinstance(field.dataType, StructType):
            inner, old = field.dataType, F.col(OLD)
            gone = earlier_names(inner)
            if gone:
                parts = [f for f in inner.fields if f.name not in gone]
                whole = F.struct(*[_newest(old.getField, f, inner).alias(f.name) for f in parts])
                renamed[OLD] = F.when(old.isNotNull(), whole)
    return rows.withColumns(renamed).drop(*earlier_names(columns)) if renamed else rows


def _newest(value: Callable[[str], Column], field: StructField, among: StructType) -> Column:
    names = [n for n in (field.name, *was(field)) if n in among.names]
    return F.coalesce(*[value(n).cast(field.dataType) for n in names])


def kept_by_newest_names(state: DataFrame, names: Names) -> DataFrame:
    """Returns an operator's state with columns under their newest names, also within aggregated rows.

    Args:
        names: earlier names by column.
    """
    now = {old: new for new, before in names.items() for old in before}
    if not now:
        return state

    def one(field: StructField) -> Column:
        column = F.col(f"`{field.name}`")
        if isinstance(field.dataType, StructType):
            inner = [StructField(now.get(f.name, f.name), f.dataType) for f in field.dataType.fields]
            column = column.cast(StructType(inner))
        return column.alias(now.get(field.name, field.name))

    return state.select(*[one(f) for f in state.schema.fields])


def require_declared_renames(name: str, found: Evolution, inputs: Sequence[StructType]) -> None:
    """Checks that inputs still declare ``renamed`` when a result takes over their renamed columns.

    Args:
        found: evolution of the result's columns.
        inputs: columns of the inputs' logs.

    Raises:
        StorageError: an input no longer declares it; old rows of the result would get null.
    """
    renamed = {
        old: f.name
        for columns in inputs
        for f in columns.fields
        for old in was(f)
        if f.name in found.added and old in found.dropped
    }
    if renamed:
        raise StorageError(
            f"{name}: expected its input to declare its renamed columns, got no renamed={renamed}, but "
            f"rows of {name} have the old names: declare renamed={renamed} there again until it has run"
        )


def _renamed(dropped: Sequence[StructField], added: Sequence[StructField]) -> list[str]:
    """Returns a reason for refusal for each pair of a dropped and an added column of one type: the pair
    may be an undeclared rename, after which old rows would have null."""
    found: list[str] = []
    for old in dropped:
        for new in added:
            if same(old.dataType, new.dataType) or widens(old.dataType, new.dataType):
                found.append(
                    f"{old.name} is missing and {new.name} is new: if it is one column, declare "
                    f"renamed={{{old.name!r}: {new.name!r}}}, else old rows would have null for "
                    f"{new.name}; if they are two columns, drop the old one in one run and add the new "
                    "one in a later run"
                )
    return found


def _struct(field: StructField) -> StructType:
    assert isinstance(field.dataType, StructType)
    return field.dataType


# Definition


def shape_of(node: Stream) -> Shape:
    """Returns the description of a node for its commits."""
    about: dict[str, Any] = {"key": list(node.key), "columns": node.schema.names}
    about["specification"] = None if node.operator is None else node.operator.specification
    about |= options_in_commit(node)
    if not isinstance(node, VersionedTable):
        return Shape(kind="table" if isinstance(node, Table) else "stream", **about)
    about["history_retention"] = in_micros(node.history_retention)
    about["has_partial_updates"] = node.has_partial_updates
    about["ordered_by_source"] = follows_source(node)
    return Shape(kind="versioned", **about)


def require_shape(node: Stream, shape: Shape) -> None:
    """Checks that existing tables fit the declaration.

    Args:
        shape: shape in the log's last commit.

    Raises:
        NeedsReplayError: the operator's definition differs.
        StorageError: the kind or the key differs.
    """
    declared = shape_of(node)
    earlier = node.earlier
    keys = zip(shape.key, declared.key, strict=False)
    same_key = len(shape.key) == len(declared.key) and all(
        then in (now, *earlier.get(now, ())) for then, now in keys
    )
    if shape.kind != declared.kind or not same_key:
        raise StorageError(
            f"{node.name}: declared as {declared.kind} keyed by "
            f"{declared.key}, but its tables were written as {shape.kind} keyed by "
            f"{shape.key}; restore the earlier declaration (with renamed= for a renamed column), give "
            "the new asset another name, or rebuild it beside the old one (vt-dagster replay) and swap"
        )
    changed = node.changed_definition(shape.specification)
    if changed:
        raise NeedsReplayError(
            f"{node.name}: the declaration differs from the one that wrote its log: "
            f"{'; '.join(changed)}. Its log would mix both results: restore the earlier declaration, "
            "give the new asset another name, or rebuild it beside the old one (vt-dagster replay) and "
            "swap"
        )


# Schema transaction


_SAFE = "/=-_.~"


def commit_with_columns(
    path: str,
    table: DeltaTable,
    columns: StructType,
    adds: Sequence[AddAction],
    removes: Sequence[RemoveAction],
    about: CommitProperties,
) -> None:
    """Commits files and columns as the next version of ``table``.

    Args:
        columns: all columns of the table after the commit.
        about: metadata and transaction of the commit, as in every vt_dagster commit.

    Raises:
        FileExistsError: another writer has committed that version.
    """
    now = int(time.time() * 1000)
    its = table.metadata()
    (transaction,) = about.app_transactions or []
    mode = "Overwrite" if removes else "Append"
    actions: list[dict[str, Any]] = [
        {
            "commitInfo": {
                "timestamp": now,
                "operation": "WRITE",
                "operationParameters": {"mode": mode, "partitionBy": json.dumps(its.partition_columns)},
                "engineInfo": "vt_dagster",
                **(about.custom_metadata or {}),
            }
        },
        {
            "metaData": {
                "id": str(its.id),
                "name": its.name,
                "description": its.description,
                "format": {"provider": "parquet", "options": {}},
                "schemaString": json.dumps(columns.jsonValue()),
                "partitionColumns": its.partition_columns,
                "configuration": its.configuration,
                "createdTime": its.created_time,
            }
        },
    ]
    actions += [{"remove": _removed(one)} for one in removes]
    actions += [{"add": _added(one)} for one in adds]
    # The transaction is last, as ``deltalake`` writes it: a file without it counts as truncated.
    app = {"appId": transaction.app_id, "version": transaction.version, "lastUpdated": now}
    actions.append({"txn": app})
    _put(path, table.version() + 1, "\n".join(map(json.dumps, actions)) + "\n")


def _removed(one: RemoveAction) -> dict[str, Any]:
    return {
        "path": quote(one.path, safe=_SAFE),
        "deletionTimestamp": one.deletion_timestamp,
        "dataChange": True,
        "extendedFileMetadata": True,
        "partitionValues": one.partition_values,
        "size": one.size,
    }


def _added(one: AddAction) -> dict[str, Any]:
    return {
        "path": quote(one.path, safe=_SAFE),
        "partitionValues": one.partition_values,
        "size": one.size,
        "modificationTime": one.modification_time,
        "dataChange": True,
        "stats": one.stats,
    }


def _put(path: str, version: int, text: str) -> None:
    """Creates the file of a version atomically; fails if the file exists."""
    fs, root = filesystem(path)
    file = posixpath.join(root, "_delta_log", f"{version:020}.json")
    if not is_local(fs):
        fs.pipe_file(file, text.encode(), mode="create")
        return
    prepared = Path(root, "_delta_log", f".{uuid4().hex}.tmp")
    prepared.write_text(text, encoding="utf-8")
    try:
        # A hard link is atomic and fails if the file exists; ``deltalake`` does the same.
        os.link(prepared, file)
    finally:
        prepared.unlink(missing_ok=True)
