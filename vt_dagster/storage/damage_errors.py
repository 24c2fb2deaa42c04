"""Error messages for damaged tables: the asset, and how to recover. No Spark.

``tests/storage/test_damage.py`` follows each recovery as the message words it.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Collection, Sequence

from vt_dagster.errors import ConcurrentRunError, StorageError

_FAILED_READ = re.compile(r"FAILED_READ_FILE.*?\bfile:?/*?(/\S*?)/(\d+-[0-9a-f]{32}/\S+?)\.? ")
"""Spark's message for an unreadable file: the table's directory, and the file's path below it."""


def asset_of(path: str) -> str:
    """Returns the asset of a table for messages: the parent folder of a log, view or quarantine; for
    others, such as an export, the folder itself."""
    folder, what = posixpath.split(path.rstrip("/"))
    if posixpath.basename(folder) == "bases":
        return posixpath.basename(posixpath.dirname(folder))
    return posixpath.basename(folder) if what in ("log", "view", "quarantine") else what


def way_out(path: str) -> str:
    folder, what = posixpath.split(path.rstrip("/"))
    name = asset_of(path)
    anew = f"rebuild {name} from its inputs (vt-dagster replay {name} --into …, swap)"
    if what == "view":
        return f"Nothing is lost: rebuild the view from the log (vt-dagster rebuild {name})"
    if what == "log" or posixpath.basename(folder) == "bases":
        return f"Restore the file from a backup, or {anew}"
    if what == "quarantine":
        return (
            f"Restore the file from a backup, or move {path} away: its rejected records are then lost, "
            "and the next run that rejects records creates a new table"
        )
    return f"Restore the file from a backup, or remove {path}: the next run writes it again"


def cut_off(path: str, version: int, names: Collection[str]) -> StorageError:
    """Returns the error for a truncated commit file.

    Args:
        names: all file names in the table's ``_delta_log``.
    """
    start = f"{version:020d}"
    also = sorted(name for name in names if name.startswith(f"{start}.checkpoint."))
    also += ["_last_checkpoint"] if also else []
    newest = f"move it away{f', together with {also}' * bool(also)}, and run again: the run reads the "
    newest += "records of the lost commit again. Consumers of that commit report how to continue"
    if posixpath.basename(path) == "view":
        newest = f"rebuild the view from the log (vt-dagster rebuild {asset_of(path)})"
    return StorageError(
        f"{path}/_delta_log/{start}.json is truncated: its writer or the disk failed before the whole "
        f"file was stored. If it is the newest commit file of its directory, {newest}. If not, "
        "take it from a backup"
    )


def unreadable_log(
    path: str, got: str, versions: Sequence[int], names: Collection[str]
) -> StorageError:
    """Returns the error for an unreadable ``_delta_log`` in which no commit file is truncated.

    Args:
        got: the reader's message.
        versions: versions whose commit files exist, ascending.
        names: all file names in the directory.
    """
    way = "Restore its _delta_log from a backup, or rebuild the asset beside it (vt-dagster replay)"
    checkpoints = sorted(name for name in names if ".checkpoint." in name or name == "_last_checkpoint")
    if checkpoints and list(versions) == list(range(len(versions))):
        way = (
            f"All its commits exist, so its checkpoints are not needed: move {checkpoints} "
            f"out of {path}/_delta_log, and run again"
        )
    return StorageError(f"expected a readable Delta table in {path}, got: {got}. {way}")


def damaged(path: str, place: str, expected: str, size: int | None) -> StorageError:
    """Returns the error for a data file that does not match the table's log.

    Args:
        expected: what the log says of the file, for example its size.
        size: actual size in bytes; None = the file is missing.
    """
    got = "it is missing" if size is None else f"it has {size:,} bytes"
    return StorageError(
        f"{asset_of(path)}: expected the data file {place} {expected} in {path}, but {got}; nothing "
        f"was read. {way_out(path)}"
    )


def unreadable(name: str, error: Exception) -> StorageError | None:
    """Returns a short error for a file of a log or view that Spark failed to read (Spark names the file
    after a Java stack trace); None = another kind of error.

    Args:
        name: the asset that runs.
    """
    found = _FAILED_READ.search(str(error))
    if found is None:
        return None
    path, place = found[1], found[2]
    what = posixpath.basename(path)
    if (
        what not in ("log", "view", "quarantine")
        and posixpath.basename(posixpath.dirname(path)) != "bases"
    ):
        return None
    return StorageError(
        f"{name}: expected to read the data file {place} in {path}, a table of {asset_of(path)}, but "
        f"it is damaged. {way_out(path)}"
    )


def gone_before_commit(name: str, path: str) -> ConcurrentRunError:
    """Returns the error for a file that a run has written and that is gone before its commit."""
    return ConcurrentRunError(
        f"{name}: expected {path}, which this run has written, to exist at the commit, but it was "
        "removed: the run was suspended for longer than maintenance keeps uncommitted files (keep), or "
        "a clock jumped. Nothing was committed: run again, and set maintenance's keep longer than any "
        "run takes"
    )
