"""Paths that mean the same to this process and to Spark, which may run elsewhere.

A Spark Connect server has a working directory of its own, and perhaps a file system of its own.
"""

from __future__ import annotations

import re
from pathlib import Path

from vt_dagster.errors import StorageError
from vt_dagster.storage.delta import filesystem

_MISSING = ("PATH_NOT_FOUND", "FileNotFoundException", "DELTA_PATH_DOES_NOT_EXIST", "FILE_NOT_EXIST")
"""How Spark says that there is no such file or directory."""
_LOCAL = re.compile(r"file:/*(/[^\s,;'\"\]]+)")
_ADVICE = (
    "Spark's server or its executors have another file system: use a directory that all of them share, "
    "or an object store"
)


def address(path: object) -> str:
    """A path as every process reads it: a URL stays, a relative path begins at this process's working
    directory."""
    text = str(path)
    return text if re.match(r"[a-zA-Z][\w+.-]+:", text) else str(Path.cwd() / text)


def require_seen(path: str, asset: str) -> None:
    """Checks that a directory which Spark has just written is there for this process too.

    Args:
        path: the directory.
        asset: its name, for the message.

    Raises:
        StorageError: it is not there.
    """
    fs, local = filesystem(path)
    if not fs.exists(local):
        raise StorageError(
            f"{asset}: expected the files that Spark has written to {path}, but this process finds no "
            f"such directory; nothing was committed. {_ADVICE}"
        )


def unseen(error: Exception) -> StorageError | None:
    """The error to raise where Spark does not find a file that this process finds; None = it was
    something else."""
    if not any(sign in str(error) for sign in _MISSING):
        return None
    named = [path.rstrip(".") for path in _LOCAL.findall(str(error))]
    there = next((path for path in named if filesystem(path)[0].exists(path)), None)
    if there is None:
        return None
    return StorageError(
        f"expected Spark to find {there}, as this process does, but Spark finds nothing there; nothing "
        f"was committed. {_ADVICE}"
    )
