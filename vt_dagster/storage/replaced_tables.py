"""Tables that others of the same name have taken the place of: what they said is asked for by whoever
has read them. No Spark.

A restatement puts the old tables of a versioned table into ``prices.replaced/<log>/``, where they stay
until maintenance, or an erase, removes them. A swap leaves them under the other name.
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
"""A file among them, written as they came there."""


def _folder(warehouse: str, name: str) -> str:
    return posixpath.join(str(warehouse), f"{name.replace('/', '.')}.replaced")


def put_aside(warehouse: str, name: str, path: str) -> None:
    """Keeps the tables of an asset that others are in the place of.

    Args:
        name: its folder in the warehouse.
        path: where its old tables lie, on the warehouse's file system.
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
    """The tables of a log that is not the asset's any more: their directory, the version of the log and
    its last commit; None = they are gone.

    Args:
        log: see ``Commit.log``.
    """
    others = (posixpath.join(str(warehouse), other) for other in asset_names(warehouse))
    for path in (posixpath.join(_folder(warehouse, name), log), *others):
        found = delta.last_commit(posixpath.join(path, "log"))
        if found is not None and found.document.get("log") == log:
            return path, found.version, Commit.model_validate(found.document)
    return None


def forget_replaced(warehouse: str, name: str, keep: timedelta) -> int:
    """Removes what was put aside longer ago than that.

    Returns:
        how many logs, with their views.
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
