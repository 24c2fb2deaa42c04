"""Checks that the data files of a table match its transaction log. No Spark.

Spark reads an empty file as no rows, and reports other damage in a Java stack trace. Comparing file
sizes before a read needs no Spark job, and with the row counts in the log ensures that all rows are
read.
"""

from __future__ import annotations

import posixpath
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor

from deltalake.transaction import AddAction

from vt_dagster.errors import ConcurrentRunError, StorageError
from vt_dagster.storage.damage_errors import asset_of, damaged, gone_before_commit, way_out
from vt_dagster.storage.delta import File, files_of, filesystem, require_table

_AT_ONCE = 16
"""Number of parallel size requests on an object store."""


def require_files(path: str, files: Collection[File], version: int | None = None) -> None:
    """Checks that data files exist with the sizes in the table's log. Does not read their contents.

    Args:
        version: table version of the files, for the message.

    Raises:
        StorageError: a file is missing, or has another size.
        ConcurrentRunError: a file is missing, and the table's newest version no longer contains it.
    """
    for place, size in sizes(path, [file.place for file in files]).items():
        expected = next(file.size for file in files if file.place == place)
        if size == expected:
            continue
        if size is None and version is not None and place not in _newest(path):
            raise ConcurrentRunError(
                f"{asset_of(path)}: expected the file {place} of version {version} in {path}, but it "
                "was removed, and newer versions do not contain it: a key was erased during this run, "
                "or a clean-up kept too few files. Nothing was written: run again"
            )
        raise damaged(path, place, f"of {expected:,} bytes", size)


def _newest(path: str) -> set[str]:
    return {file.place for file in files_of(require_table(path))}


def require_rows(path: str, files: Collection[File], expected: int) -> None:
    """Checks that the files of a log have as many rows, by its statistics, as its last commit counts.

    Raises:
        StorageError: the number of rows differs.
    """
    found = sum(file.rows for file in files)
    if found == expected or any(file.rows == 0 for file in files):  # 0: a file without statistics
        return
    raise StorageError(
        f"{asset_of(path)}: expected {expected:,} rows in the files of {path}, as its last commit "
        f"counts, but they have {found:,}: its _delta_log is damaged or was edited; "
        f"nothing was read. {way_out(path)}"
    )


def require_written(path: str, adds: Sequence[AddAction]) -> None:
    """Checks that the files of a commit still exist: while a run was suspended, a clean-up may have
    removed them as files of a dead run.

    Raises:
        ConcurrentRunError: a file is missing.
    """
    there = sizes(path, [one.path for one in adds])
    gone = [one.path for one in adds if there[one.path] != one.size]
    if gone:
        raise gone_before_commit(asset_of(path), posixpath.join(path, gone[0]))


def sizes(path: str, places: Sequence[str]) -> dict[str, int | None]:
    """Returns the sizes of files below a directory, bytes; None = missing. Does not use Spark."""
    fs, root = filesystem(path)
    fs.invalidate_cache()

    def size(place: str) -> int | None:
        try:
            return int(fs.info(posixpath.join(root, place))["size"])
        except FileNotFoundError:
            return None

    if len(places) <= _AT_ONCE or "file" in (fs.protocol if isinstance(fs.protocol, tuple) else ()):
        return {place: size(place) for place in places}
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        return dict(zip(places, pool.map(size, places), strict=True))
