"""Paths that this process and Spark resolve to the same file.

A Spark Connect server has its own working directory, and may have its own file system.
"""

from __future__ import annotations

import re
from pathlib import Path

from vt_dagster.errors import StorageError
from vt_dagster.storage.delta import filesystem

_MISSING = ("PATH_NOT_FOUND", "FileNotFoundException", "DELTA_PATH_DOES_NOT_EXIST", "FILE_NOT_EXIST")
"""Signs of a missing file or directory in Spark's errors."""
_LOCAL = re.compile(r"file:/*(/[^\s,;'\"\]]+)")
_ADVICE = (
    "Spark's server or its executors have another file system: use a directory that all of them share, "
    "or an object store"
)


def address(path: object) -> str:
    """Returns a path that is valid in every process: URLs are unchanged, relative paths are resolved
    against this process's working directory."""
    text = str(path)
    return text if re.match(r"[a-zA-Z][\w+.-]+:", text) else str(Path.cwd() / text)


def require_seen(path: str, asset: str) -> None:
    """Checks that this process sees a directory which Spark has just written.

    Args:
        path: the directory.
        asset: name for the message.

    Raises:
        StorageError: this process does not see the directory.
    """
    fs, local = filesystem(path)
    if not fs.exists(local):
        raise StorageError(
            f"{asset}: expected the files that Spark has written to {path}, but this process sees no "
            f"such directory; nothing was committed. {_ADVICE}"
        )


def unseen(error: Exception) -> StorageError | None:
    """Returns the error for a file that this process sees and Spark does not; None = another cause."""
    if not any(sign in str(error) for sign in _MISSING):
        return None
    named = [path.rstrip(".") for path in _LOCAL.findall(str(error))]
    there = next((path for path in named if filesystem(path)[0].exists(path)), None)
    if there is None:
        return None
    return StorageError(
        f"expected Spark to see {there}, which exists for this process, but Spark sees no such file; "
        f"nothing was committed. {_ADVICE}"
    )
