"""A Delta commit that changes columns and adds files atomically.

``deltalake`` changes columns in a separate commit, and cannot widen a type. A run that died between the
two commits would leave columns without any row. So this module writes the commit file itself: the file
of the next version, which must not exist yet.
"""

from __future__ import annotations

import json
import os
import posixpath
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote
from uuid import uuid4

from deltalake import CommitProperties, DeltaTable
from deltalake.transaction import AddAction, RemoveAction
from pyspark.sql.types import StructType

from vt_dagster.storage.delta import filesystem

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
    protocols = (fs.protocol,) if isinstance(fs.protocol, str) else fs.protocol
    if "file" not in protocols:
        fs.pipe_file(file, text.encode(), mode="create")
        return
    prepared = Path(root, "_delta_log", f".{uuid4().hex}.tmp")
    prepared.write_text(text, encoding="utf-8")
    try:
        # A hard link is atomic and fails if the file exists; ``deltalake`` does the same.
        os.link(prepared, file)
    finally:
        prepared.unlink(missing_ok=True)
