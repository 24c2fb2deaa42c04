"""Plans an erase: resolves the key, and finds its columns in derived assets and exports."""

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
from vt_dagster.storage.arrow_reader import as_key, asset_names, head_of
from vt_dagster.storage.asset_store import AssetStore
from vt_dagster.storage.commit_log import Commit
from vt_dagster.storage.erase_files import Key, Marked, Way
from vt_dagster.topology.model import Stream, Table, VersionedTable, topological

KEPT = (
    "derived without the key's columns: its counts, and groups named after a value of the key, remain "
    "until it is made anew (vt-dagster replay and swap, or restate)"
)
KEPT_EXPORT = "it does not have the key's columns: remove it, and its next run writes it anew"


@dataclass(frozen=True)
class Places:
    """The columns of one asset that hold the key.

    Args:
        columns: by key column of the erased asset, the column that has its value; empty = none.
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
        """A table's row under another key becomes a tombstone: that key's versions must not change."""
        return "empty" if isinstance(self.node, Table) and not self._under_it else "remove"

    @property
    def way_of_view(self) -> Way:
        """Like :attr:`way_of_log`, but only the view of a versioned table keeps tombstones."""
        return self.way_of_log if isinstance(self.node, VersionedTable) else "remove"

    @property
    def values(self) -> list[str]:
        """The value columns, which are null in a tombstone."""
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
    """Returns the given key, with values in the types of the asset's key columns.

    Raises:
        StorageError: the values do not fit the asset's key, or ``where`` is no condition over its
            key columns.
    """
    node, name = store.node, posixpath.join(*store.node.path)
    types = dict(zip(node.key, node.key_types, strict=True))
    if values is None and where is None:
        raise StorageError(f"{name}: expected a key or a condition to erase by, got none; give --key")
    if values is not None and len(values) != len(types):
        raise StorageError(
            f"{name}: expected one --key for each of the key columns {list(types)}, got {len(values)} "
            "value(s); give one for each column"
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
    """Returns an asset and all assets derived from it, inputs first.

    Raises:
        StorageError: a derived asset is not among the definitions.
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
            continue  # a publication has no rows of its own
        reads = {posixpath.dirname(read).rpartition("/")[2] for read in commit.reads}
        used = sorted((names & ({*commit.inputs} | reads)) - {commit.asset})
        if used and name not in {one.name for one in found}:
            raise StorageError(
                f"{node.name}: expected the definitions of all its consumers, got none of {name}, "
                f"which is derived from {used[0]}; add its definition (--module)"
            )
    return [one for one in found if delta.exists(posixpath.join(warehouse, one.name, "log"))]


def published(commit: Commit) -> list[str]:
    """Returns the topics of a publication's commit; empty for any other asset."""
    return [up.removeprefix("topic ") for up in commit.inputs if up.startswith("topic ")]


def _columns(node: Stream, known: dict[str, dict[str, str]]) -> dict[str, str]:
    """Returns an asset's columns that hold the key, derived from those of its inputs."""
    operator: Any = node.operator
    lineage = operator.lineage()
    for up in node.inputs:
        theirs = known.get(up.name)
        if not theirs:
            continue
        found: dict[str, str] = {}
        for key, column in theirs.items():
            # Prefer the column of the same name; if the result has the key twice, either will do.
            made = [c for c in node.schema.names if (up.name, column) in lineage.get(c, [])]
            made.sort(key=lambda c: (len(lineage[c]), c not in node.key, c != column))
            other = _joined(node, up, column)
            if made or other:
                found[key] = other or made[0]
        if len(found) == len(theirs):
            return found
    return {}


def _joined(node: Stream, up: Any, column: str) -> str | None:
    """Returns the column of a join's result that equals a key column of the right side."""
    operator: Any = node.operator
    if getattr(operator, "right", None) is not up or column not in up.key:
        return None
    place = up.key.index(column)
    foreign: tuple[str, ...] = getattr(operator, "foreign_key", ())
    if not foreign and node.key == operator.left.key:
        return str(node.key[place])
    # Rows of a corrected join have another key than their records: use the lineage.
    left = (operator.left.name, (foreign or operator.left.key)[place].strip("`"))
    return next((c for c, of in operator.lineage().items() if of == [left]), None)


def exported(plan: Sequence[Places], path: str) -> Places:
    """Returns the asset that an export is made from.

    Raises:
        StorageError: none of the erased assets is exported there.
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
    """Refuses an erase while an interrupted restatement has new tables of the asset.

    Raises:
        StorageError: a restatement was interrupted.
    """
    place = posixpath.join(warehouse, f"{'.'.join(node.path)}.restate")
    fs, local = delta.filesystem(place)
    if fs.exists(local):
        raise StorageError(
            f"{node.name}: expected no restatement in progress, got {place}; complete it first: run "
            "vt-dagster restate again with the same arguments"
        )
