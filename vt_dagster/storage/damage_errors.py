"""What to say of tables that are damaged: whose they are, and the way out. No Spark.

The ways out are tried as they are written, in ``tests/storage/test_damage.py``.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Collection, Sequence

from vt_dagster.errors import ConcurrentRunError, StorageError

_FAILED_READ = re.compile(r"FAILED_READ_FILE.*?\bfile:?/*?(/\S*?)/(\d+-[0-9a-f]{32}/\S+?)\.? ")
"""How Spark names a file that it cannot read: the table's directory and the place in it."""


def asset_of(path: str) -> str:
    """The asset that a table is of, for messages: a log or view is below its folder; of others, such as
    an export, the folder itself."""
    folder, what = posixpath.split(path.rstrip("/"))
    if posixpath.basename(folder) == "bases":
        return posixpath.basename(posixpath.dirname(folder))
    return posixpath.basename(folder) if what in ("log", "view", "quarantine") else what


def way_out(path: str) -> str:
    folder, what = posixpath.split(path.rstrip("/"))
    name = asset_of(path)
    anew = f"make {name} anew from what it is made of (vt-dagster replay {name} --into …, swap)"
    if what == "view":
        return f"Nothing is lost: rebuild the view from the log (vt-dagster rebuild {name})"
    if what == "log" or posixpath.basename(folder) == "bases":
        return f"Restore the file from a backup, or {anew}"
    if what == "quarantine":
        return (
            f"Restore the file from a backup, or move {path} away: what it holds of rejected records "
            "is lost then, and the next run that rejects some begins a new one"
        )
    return f"Restore the file from a backup, or remove {path}: the next run writes it anew"


def cut_off(path: str, version: int, names: Collection[str]) -> StorageError:
    """What to say of a commit's file that has not all its lines. A test does what it advises.

    Args:
        names: of all files in the table's ``_delta_log``.
    """
    start = f"{version:020d}"
    also = sorted(name for name in names if name.startswith(f"{start}.checkpoint."))
    also += ["_last_checkpoint"] if also else []
    newest = f"move it away{f', and with it {also}' * bool(also)}, and run again: that run takes the "
    newest += "records of the lost commit again. What has consumed that commit says how it goes on"
    if posixpath.basename(path) == "view":
        newest = f"make the view anew from the log (vt-dagster rebuild {asset_of(path)})"
    return StorageError(
        f"{path}/_delta_log/{start}.json is cut off: its writer or the disk failed before the whole "
        f"file was stored. If it is the newest of its directory, {newest}. If it is not the newest, "
        "take it from a backup"
    )


def unreadable_log(
    path: str, got: str, versions: Sequence[int], names: Collection[str]
) -> StorageError:
    """What to say of a ``_delta_log`` that cannot be read, though none of its commits is cut off.

    Args:
        got: what its reader says.
        versions: whose commits are there, ascending; ``names``: of all its files.
    """
    way = "Restore its _delta_log from a backup, or make the asset anew beside it (vt-dagster replay)"
    checkpoints = sorted(name for name in names if ".checkpoint." in name or name == "_last_checkpoint")
    if checkpoints and list(versions) == list(range(len(versions))):
        way = (
            f"All its commits are there, and give the same without its checkpoints: move {checkpoints} "
            f"out of {path}/_delta_log, and run again"
        )
    return StorageError(f"expected a Delta table that can be read in {path}, got: {got}. {way}")


def damaged(path: str, place: str, expected: str, size: int | None) -> StorageError:
    """What to say of a data file that is not what the table's log says.

    Args:
        expected: what it is to be, for example its size.
        size: that it has; None = it is missing.
    """
    got = "it is missing" if size is None else f"it has {size:,} bytes"
    return StorageError(
        f"{asset_of(path)}: expected the data file {place} {expected} in {path}, but {got}: nothing "
        f"was read. {way_out(path)}"
    )


def unreadable(name: str, error: Exception) -> StorageError | None:
    """What to say where Spark failed to read a file of a log or view, for its message names the file
    after a Java stack; None = the error is none of that kind.

    Args:
        name: of the asset that runs.
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
    """What to say where a run finds something gone that it has just written."""
    return ConcurrentRunError(
        f"{name}: expected {path}, which this run has written, at its commit, but it is not there any "
        "more: the run stood still for longer than maintenance keeps what is not committed (keep), or "
        "a clock jumped. Nothing was committed: run again, and give maintenance a keep that is longer "
        "than any run takes"
    )
