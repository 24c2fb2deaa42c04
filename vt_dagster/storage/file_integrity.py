"""Whether the data files of a table are what its transaction log says. No Spark.

Spark reads an empty file as no rows, and tells of others in a Java stack. A look at each file's size
before it is read costs no job, and with the rows that the log counts it says that all rows are read.
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
"""So many files are looked at together on an object store."""


def require_files(path: str, files: Collection[File], version: int | None = None) -> None:
    """Data files must have the size that the table's log says: Spark reads an empty one as no rows, and
    tells of others in words of its own. One look at each file, no reading.

    Args:
        version: of the table that the files are of, for the message.

    Raises:
        StorageError: a file is missing, or of another size.
        ConcurrentRunError: it is gone, and the table's newest version does not have it any more.
    """
    for place, size in sizes(path, [file.place for file in files]).items():
        expected = next(file.size for file in files if file.place == place)
        if size == expected:
            continue
        if size is None and version is not None and place not in _newest(path):
            raise ConcurrentRunError(
                f"{asset_of(path)}: expected the file {place} in {path}, which version {version} of "
                "the table has, but it was removed since and a newer version does without it: a key "
                "was erased meanwhile, or a clean-up kept too little. Nothing was written: run again"
            )
        raise damaged(path, place, f"of {expected:,} bytes", size)


def _newest(path: str) -> set[str]:
    return {file.place for file in files_of(require_table(path))}


def require_rows(path: str, files: Collection[File], expected: int) -> None:
    """All files of a log must have as many rows, by its statistics, as its last commit counts.

    Raises:
        StorageError: they have more or fewer.
    """
    found = sum(file.rows for file in files)
    if found == expected or any(file.rows == 0 for file in files):  # of one they are not known
        return
    raise StorageError(
        f"{asset_of(path)}: expected {expected:,} rows in the files of {path}, as its last commit "
        f"counts, but they have {found:,}: its _delta_log is damaged, or somebody has edited it; "
        f"nothing was read. {way_out(path)}"
    )


def require_written(path: str, adds: Sequence[AddAction]) -> None:
    """A run that slept may find that a clean-up took its files for those of a dead one.

    Raises:
        ConcurrentRunError: some are gone.
    """
    there = sizes(path, [one.path for one in adds])
    gone = [one.path for one in adds if there[one.path] != one.size]
    if gone:
        raise gone_before_commit(asset_of(path), posixpath.join(path, gone[0]))


def sizes(path: str, places: Sequence[str]) -> dict[str, int | None]:
    """The sizes of files below a directory, bytes; None = it is not there. Does not use Spark."""
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
