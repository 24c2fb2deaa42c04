"""The description of a node in its commits, and checks of existing tables against the declaration."""

from __future__ import annotations

import posixpath
from typing import Any

from pyspark.sql.types import StructType

from vt_dagster.core import table_store as of_table
from vt_dagster.core.source_order import follows_source
from vt_dagster.errors import StorageError
from vt_dagster.storage import delta, parquet
from vt_dagster.storage.commit_log import Shape
from vt_dagster.storage.log_snapshot import Head
from vt_dagster.storage.schema_evolution import Evolution, evolved, mentions, never_null, require_said
from vt_dagster.topology.durations import in_micros
from vt_dagster.topology.model import Stream, Table, VersionedTable


def shape_of(node: Stream) -> Shape:
    """Returns the description of a node for its commits."""
    meaning = {} if node.operator is None else node.operator.meaning
    about: dict[str, Any] = {"key": list(node.key), "columns": node.schema.names, "meaning": meaning}
    if not isinstance(node, VersionedTable):
        return Shape(kind="table" if isinstance(node, Table) else "stream", **about)
    about |= {"history_retention": in_micros(node.history_retention), "valid_until": node.valid_until}
    about["new_version_on"] = of_table.new_version_on_of(node)
    about["has_partial_updates"] = node.has_partial_updates
    about["ordered_by_source"] = follows_source(node)
    return Shape(kind="versioned", **about)


def require_shape(node: Stream, shape: Shape) -> None:
    """Checks that existing tables fit the declaration.

    Args:
        shape: shape in the log's last commit.

    Raises:
        StorageError: the kind, key or meaning differs.
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
            f"{shape.key}; restore the earlier declaration (with renamed= for a renamed column), or "
            "give the new asset another name"
        )
    changed = node.changed_meaning(shape.meaning)
    if changed:
        raise StorageError(
            f"{node.name}: the declaration differs from the one that wrote its log: "
            f"{'; '.join(changed)}. Its log would mix both results: restore the earlier declaration, "
            "give the new asset another name, or rebuild it beside the old one (vt-dagster replay) and "
            "swap"
        )


def columns_of(
    node: Stream, warehouse: str, log_path: str, now: StructType, head: Head | None
) -> Evolution:
    """Returns the evolution of the log's columns for new rows. Does not use Spark.

    Args:
        now: columns of the new rows.
        head: the log's last commit.

    Raises:
        StorageError: the log cannot take the new columns.
    """
    placed = [c for c in node.schema.names if mentions(node.partition_by or "", c)]
    found = evolved(
        node.name,
        parquet.stored_schema(log_path, None if head is None else head.version),
        now,
        fixed={*node.key, *placed},
        required=never_null(node),
        declared=None if head is None else head.commit.shape.columns,
        derived=node.operator is not None,
    )
    if found.added and found.dropped:
        logs = [posixpath.join(warehouse, *up.path, "log") for up in node.inputs]
        stored = [parquet.stored_schema(path) for path in logs if delta.exists(path)]
        require_said(node.name, found, stored)
    return found
