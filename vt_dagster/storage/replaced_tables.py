"""Replaced tables of an asset, kept so that earlier reads can be compared with the new ones. No Spark.

A restatement moves the old tables of a versioned table to ``prices.replaced/<log>/``, until maintenance
or an erase removes them. A swap leaves them under the other asset's name.
"""

from __future__ import annotations

import posixpath
import time
from datetime import timedelta
from typing import Any

from vt_dagster.storage import delta
from vt_dagster.storage.arrow_reader import asset_names
from vt_dagster.storage.commit_log import Commit

_SINCE = "replaced"
"""Marker file; its modification time is the time of the replacement."""


def _folder(warehouse: str, name: str) -> str:
    return posixpath.join(str(warehouse), f"{name.replace('/', '.')}.replaced")


def put_aside(warehouse: str, name: str, path: str) -> None:
    """Moves the replaced tables of an asset aside.

    Args:
        name: the asset's folder in the warehouse.
        path: directory of the old tables, on the warehouse's file system.
    """
    found = delta.last_commit(posixpath.join(path, "log"))
    if found is None:
        return
    fs, folder = delta.filesystem(_folder(warehouse, name))
    to = posixpath.join(folder, str(found.document["log"]))
    fs.touch(posixpath.join(path, _SINCE))
    fs.makedirs(folder, exist_ok=True)
    fs.mv(path, to, recursive=True)


def find_replaced(warehouse: str, name: str, log: str) -> tuple[str, int, Commit] | None:
    """Returns the tables of a replaced log: their directory, the log's Delta version and its last
    commit; None = they were removed.

    Args:
        log: id of the log, see ``Commit.log``.
    """
    others = (posixpath.join(str(warehouse), other) for other in asset_names(warehouse))
    for path in (posixpath.join(_folder(warehouse, name), log), *others):
        found = delta.last_commit(posixpath.join(path, "log"))
        if found is not None and found.document.get("log") == log:
            return path, found.version, Commit.model_validate(found.document)
    return None


def forget_replaced(warehouse: str, name: str, keep: timedelta) -> int:
    """Removes tables that were replaced longer than ``keep`` ago.

    Returns:
        the number of removed logs (each with its view).
    """
    fs, folder = delta.filesystem(_folder(warehouse, name))
    there: list[Any] = fs.ls(folder, detail=False, refresh=True) if fs.exists(folder) else []
    removed = 0
    for path in there:
        age = time.time() - fs.modified(posixpath.join(path, _SINCE)).timestamp()
        if age >= keep.total_seconds():
            fs.rm(path, recursive=True)
            removed += 1
    if there and removed == len(there):
        fs.rm(folder, recursive=True)
    return removed
