"""What an erase looks into: the key, and where it is in what is derived from an asset."""

from __future__ import annotations

import posixpath
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame
from pyspark.sql.types import StructField, StructType

from vt_dagster.columns import LOG_COLUMNS
from vt_dagster.errors import StorageError
from vt_dagster.spark.jars import one_line
from vt_dagster.storage import delta
from vt_dagster.storage.arrow_reader import asset_names, head_of
from vt_dagster.storage.asset_store import AssetStore
from vt_dagster.storage.commit_log import Commit
from vt_dagster.storage.erase_files import Key, Marked, Way
from vt_dagster.storage.value_texts import as_key
from vt_dagster.topology.model import Stream, Table, VersionedTable, topological

KEPT = (
    "derived without the key's columns: what it counted stays, and so do groups that a value of the "
    "key names, until it is made anew (vt-dagster replay and swap, or restate)"
)
KEPT_EXPORT = "it has not got the key's columns: remove it, its next run makes it anew"


@dataclass(frozen=True)
class Places:
    """Where the key is in one asset.

    Args:
        columns: by key column of the erased asset, the column that has its value; empty = nowhere.
    """

    node: Stream
    columns: dict[str, str]

    @property
    def name(self) -> str:
        """The asset's folder in the warehouse."""
        return posixpath.join(*self.node.path)

    @property
    def _under_it(self) -> bool:
        return {*self.columns.values()} <= {*self.node.key}

    @property
    def way_of_log(self) -> Way:
        """A table's row under another key stays as a tombstone: its versions must not move."""
        return "empty" if isinstance(self.node, Table) and not self._under_it else "remove"

    @property
    def way_of_view(self) -> Way:
        """The same of a view, which has tombstones where it has versions."""
        return self.way_of_log if isinstance(self.node, VersionedTable) else "remove"

    @property
    def values(self) -> list[str]:
        """The columns that a tombstone has not got."""
        return [c for c in self.node.schema.names if c not in (*self.node.key, *LOG_COLUMNS)]

    def marked(self, key: Key) -> Marked:
        """See ``erase_files.find``."""

        def marked(rows: DataFrame) -> DataFrame:
            return key.within(rows, self.columns)

        return marked

    def in_export(self, path: str) -> bool:
        """Whether an export has the key's columns."""
        names = {*delta.require_table(path).schema().to_arrow().names}
        return bool(self.columns) and {*self.columns.values()} <= names


def key_of(store: AssetStore, values: Sequence[object] | None, where: str | None) -> Key:
    """The key that is asked for, as the asset's columns have it.

    Raises:
        StorageError: it has no such key, or the condition is none over its key columns.
    """
    node, name = store.node, posixpath.join(*store.node.path)
    types = dict(zip(node.key, node.key_types, strict=True))
    if values is None and where is None:
        raise StorageError(f"{name}: expected a key or a condition to erase by, got none; give --key")
    if values is not None and len(values) != len(types):
        raise StorageError(
            f"{name} has the key {list(types)}: give --key once for each, got {len(values)} value(s)"
        )
    if where is not None:
        columns = StructType([StructField(k, kind) for k, kind in types.items()])
        empty = store.spark.createDataFrame([], columns)
        try:
            _ = empty.where(f"({where})").schema
        except PySparkException as error:
            raise StorageError(
                f"{name}: expected --where to be a condition over the key columns {list(types)}, got "
                f"{one_line(error)}; correct it"
            ) from error
    if values is None:
        return Key(types, None, where)
    stored = pa.schema(delta.require_table(store.log_path).schema().to_arrow())
    given = zip(types, values, strict=True)
    names = {k: {k, *node.earlier.get(k, ())} for k in types}
    kinds = {k: next(f.type for f in stored if f.name in known) for k, known in names.items()}
    typed = tuple(as_key(k, v, kinds[k]).as_py() for k, v in given)
    return Key(types, typed, where)


def derived(warehouse: str, node: Stream, nodes: Sequence[Stream]) -> list[Places]:
    """An asset and all that has been made of it, inputs first.

    Raises:
        StorageError: something that was made of it is not among the definitions.
    """
    found = [Places(node, {k: k for k in node.key})]
    known = {node.name: found[0].columns}
    for one in topological(nodes):
        if one.name in known or not any(up.name in known for up in one.inputs):
            continue
        columns = _columns(one, known)
        known[one.name] = columns
        found.append(Places(one, columns))
    names = {one.name for one in found}
    for name in asset_names(warehouse):
        commit = head_of(warehouse, name)[1]
        if published(commit):
            continue  # has no rows of its own
        reads = {posixpath.dirname(read).rpartition("/")[2] for read in commit.reads}
        used = sorted((names & ({*commit.inputs} | reads)) - {commit.asset})
        if used and name not in {one.name for one in found}:
            raise StorageError(
                f"{node.name}: expected the definitions of all that consumes it, got none of {name}, "
                f"which is made of {used[0]}; give it too (--module)"
            )
    return [one for one in found if delta.exists(posixpath.join(warehouse, one.name, "log"))]


def published(commit: Commit) -> list[str]:
    """The topics that a publication sends a log to; of anything else none."""
    return [up.removeprefix("topic ") for up in commit.inputs if up.startswith("topic ")]


def _columns(node: Stream, known: dict[str, dict[str, str]]) -> dict[str, str]:
    """Where an asset has the columns of the key, as its inputs have them in these."""
    operator: Any = node.operator
    lineage = operator.lineage()
    for up in node.inputs:
        theirs = known.get(up.name)
        if not theirs:
            continue
        found: dict[str, str] = {}
        for key, column in theirs.items():
            # The column of the same name first: of a key that is there twice either will do.
            made = [c for c in node.schema.names if (up.name, column) in lineage.get(c, [])]
            made.sort(key=lambda c: (len(lineage[c]), c not in node.key, c != column))
            other = _joined(node, up, column)
            if made or other:
                found[key] = other or made[0]
        if len(found) == len(theirs):
            return found
    return {}


def _joined(node: Stream, up: Any, column: str) -> str | None:
    """Of a join, the result's column that the other side's equals it by."""
    operator: Any = node.operator
    if getattr(operator, "right", None) is not up or column not in up.key:
        return None
    place = up.key.index(column)
    foreign: tuple[str, ...] = getattr(operator, "foreign_key", ())
    if not foreign and node.key == operator.left.key:
        return str(node.key[place])
    # A corrected join's rows have another key than the records that they are of.
    left = (operator.left.name, (foreign or operator.left.key)[place].strip("`"))
    return next((c for c, of in operator.lineage().items() if of == [left]), None)


def exported(plan: Sequence[Places], path: str) -> Places:
    """What an export is of.

    Raises:
        StorageError: of nothing that is erased.
    """
    found = delta.last_commit(path)
    whose = [] if found is None else [*Commit.model_validate(found.document).logs]
    for one in plan:
        if one.node.name in whose:
            return one
    raise StorageError(
        f"expected an export of one of {[one.name for one in plan]} in {path}, got "
        f"{'one of ' + ', '.join(whose) if whose else 'none'}; leave it out, or erase there too"
    )


def require_free(warehouse: str, node: Stream) -> None:
    """Refuses where other tables of an asset lie beside it that are about to take its place.

    Raises:
        StorageError: a restatement was interrupted.
    """
    place = posixpath.join(warehouse, f"{'.'.join(node.path)}.restate")
    fs, local = delta.filesystem(place)
    if fs.exists(local):
        raise StorageError(
            f"{node.name}: expected no restatement under way, got {place}; bring it to its end first: "
            "run vt-dagster restate again as before"
        )
