"""What Delta tables say of themselves: commits, documents, files. Nothing here uses Spark.

``deltalake`` reads the transaction log; ``parquet`` writes it, and has Spark read and write the rows. A
table is opened in a millisecond or two, so that a sensor can look at a position.
"""

from __future__ import annotations

import json
import posixpath
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import fsspec
import pyarrow as pa
from deltalake import DeltaTable
from deltalake.exceptions import DeltaError, TableNotFoundError

from vt_dagster.columns import OFFSET, PARTITION, SEGMENT, TIMESTAMP
from vt_dagster.errors import ConcurrentRunError, StorageError
from vt_dagster.spark.jars import one_line

MARK = "vt_dagster"
"""The key under which a commit's ``userMetadata`` carries our document."""
FILES = "files_added"
"""The key beside it: how many data files the commit adds. Of older commits it is not known."""

COMMIT_FILE = re.compile(r"(\d{20})\.json")
"""The name of a commit's file."""
_UPKEEP = {"OPTIMIZE", "VACUUM START", "VACUUM END", "ADD COLUMN"}
_CHANGES = {
    *("WRITE", "DELETE", "UPDATE", "MERGE", "TRUNCATE", "STREAMING UPDATE", "COPY INTO", "CLONE"),
    *("REPLACE TABLE", "CREATE OR REPLACE TABLE"),
    *("REPLACE TABLE AS SELECT", "CREATE OR REPLACE TABLE AS SELECT"),
}
_CONFLICT = re.compile(r"\bDELTA_(CONCURRENT_\w+|PROTOCOL_CHANGED|METADATA_CHANGED)\b")
_AT_ONCE = 16
"""So many files are looked at together on an object store."""
_FAILED_READ = re.compile(r"FAILED_READ_FILE.*?\bfile:?/*?(/\S*?)/(\d+-[0-9a-f]{32}/\S+?)\.? ")
"""How Spark names a file that it cannot read: the table's directory and the place in it."""
_UNDERSTOOD = {"timestampNtz", "vacuumProtocolCheck"}
"""What a table may ask of its readers; with others its files are not its rows."""


class Committed(NamedTuple):
    """A commit of ours.

    Args:
        version: the table's version at it.
        document: what it carries.
    """

    version: int
    document: dict[str, Any]


class File(NamedTuple):
    """A data file of a table, as its log describes it.

    Args:
        place: below the table's directory.
        size: bytes.
        rows: how many it has; of a file that somebody else wrote perhaps none are told: 0.
        segment: the part of a view that its rows belong to; None = current, or there are no parts.
        partitions: the smallest and the largest partition of its rows; None = not known.
        offsets: likewise.
        newest: no row's timestamp is later: epoch microseconds; None = not known.
    """

    place: str
    size: int
    rows: int
    segment: int | None
    partitions: tuple[int, int] | None
    offsets: tuple[int, int] | None
    newest: int | None = None


Wanted = Callable[[File], bool]


def everything(file: File) -> bool:
    """All files are wanted."""
    return True


def current(file: File) -> bool:
    """The files of a view with what is current: of a plain table all."""
    return file.segment is None


def filesystem(path: str) -> tuple[Any, str]:
    """The file system of a path and the path on it. Hadoop's ``s3a://`` is ``s3://`` here."""
    return fsspec.core.url_to_fs(re.sub(r"^s3[an]://", "s3://", str(path)))


def require_place(path: str) -> None:
    """A warehouse's path must mean the same to Spark and to ``deltalake``.

    Raises:
        StorageError: it has a backslash, or a per cent sign before two hexadecimal digits.
    """
    odd = re.search(r"\\|%[0-9a-fA-F]{2}", path)
    if odd is not None:
        raise StorageError(
            f"expected a warehouse whose path can be read as a URL as well, got {path!r}: {odd[0]!r} "
            "in it would be taken for another character; use another directory"
        )


# --------------------------------------------------------------------------------- the log of a table


def open_table(path: str, version: int | None = None) -> DeltaTable | None:
    """A table, as of one of its versions where given; None where there is none.

    Raises:
        StorageError: its log cannot be read.
    """
    if not exists(path):
        return None
    try:
        return DeltaTable(location(path), version=version)
    except TableNotFoundError:
        return None
    except (DeltaError, OSError, ValueError) as error:
        raise _unreadable(path, error) from error


def require_table(path: str, version: int | None = None) -> DeltaTable:
    """The same of a table that must be there."""
    found = open_table(path, version)
    if found is None:
        raise StorageError(f"expected a Delta table in {path}, found none; materialize the asset first")
    return found


def location(path: str) -> str:
    """A table's directory as ``deltalake`` wants it."""
    return re.sub(r"^s3[an]://", "s3://", str(path))


def _unreadable(path: str, error: Exception) -> StorageError:
    for _ in history(path):
        pass  # it says which commit is cut off
    return StorageError(
        f"expected a Delta table that can be read in {path}, got: {one_line(error)}. Restore its "
        "_delta_log from a backup, or make the asset anew beside it (vt-dagster replay)"
    )


def history(path: str) -> Iterator[dict[str, Any]]:
    """What each commit that is still there says of itself, with its ``version``, newest first.

    Not by ``DeltaTable.history``: it finds nothing where a path has ``#`` or ``?``, and counts versions
    wrongly where a commit says nothing.

    Raises:
        StorageError: a commit is cut off.
    """
    for version in reversed(versions(path)):
        yield _info(path, version)


def versions(path: str) -> list[int]:
    """The versions of a table whose commits are still there, ascending."""
    return sorted(int(name[:20]) for name in log_files(path) if COMMIT_FILE.fullmatch(name))


def _info(path: str, version: int) -> dict[str, Any]:
    fs, root = filesystem(path)
    name = f"{version:020d}.json"
    text = fs.cat_file(posixpath.join(root, "_delta_log", name)).decode("utf-8", "replace")
    try:
        if not text.rstrip().endswith("}"):
            raise ValueError(name)
        told = [json.loads(line) for line in text.splitlines() if '"commitInfo"' in line]
        info = next((one["commitInfo"] for one in told if "commitInfo" in one), {})
        _require_all_actions(info, text.splitlines())
    except ValueError:
        raise _cut_off(path, version) from None
    return {**info, "version": version}


def _require_all_actions(info: dict[str, Any], lines: Sequence[str]) -> None:
    """A file that is cut off after a whole line is valid JSON: what a commit of ours has must be there.

    Raises:
        ValueError: some of it is not.
    """
    metadata = _metadata(info)
    if not isinstance(metadata.get(MARK), dict):
        return
    added = sum(line.startswith('{"add"') for line in lines)
    document = metadata[MARK]
    least = min(1, (document.get("counts") or {}).get("out", 0))
    expected = metadata.get(FILES)
    # The transaction is the last line of each commit, see ``transaction`` and ``deltalake``.
    ended = any(line.startswith('{"txn"') for line in lines)
    if not ended or (added < least if expected is None else added != expected):
        raise ValueError(f"{added} files of {expected}")


def _cut_off(path: str, version: int) -> StorageError:
    """What to say of a commit's file that has not all its lines. A test does what it advises."""
    start, what = f"{version:020d}", posixpath.basename(path)
    checkpoints = sorted(n for n in log_files(path) if n.startswith(f"{start}.checkpoint."))
    also = [*checkpoints, *(["_last_checkpoint"] if checkpoints else [])]
    newest = f"move it away{f', and with it {also}' * bool(also)}, and run again: that run takes the "
    newest += "records of the lost commit again. What has consumed that commit says how it goes on"
    if what == "view":
        name = posixpath.basename(posixpath.dirname(path))
        newest = f"the view can be made anew from the log: vt-dagster rebuild {name}"
    return StorageError(
        f"{path}/_delta_log/{start}.json is cut off: its writer or the disk failed before the whole "
        f"file was stored. If it is the newest of its directory, {newest}. If it is not the newest, "
        "restore it from a backup"
    )


def our_commit(path: str, version: int) -> Committed | None:
    """The commit of a version; None where it is none of ours.

    Raises:
        FileNotFoundError: it is not there any more.
    """
    return _own(_info(path, version))


def _metadata(info: dict[str, Any]) -> dict[str, Any]:
    """What a commit says in ``userMetadata``, where that is a JSON object."""
    try:
        found = json.loads(info.get("userMetadata") or "{}")
    except (ValueError, TypeError):
        return {}
    return found if isinstance(found, dict) else {}


def _own(info: dict[str, Any]) -> Committed | None:
    document = _metadata(info).get(MARK)
    if not isinstance(document, dict):
        return None
    # Of commits from before it was noted, Delta's own time: milliseconds.
    return Committed(
        info["version"], {"recorded_at": int(info.get("timestamp") or 0) * 1000, **document}
    )


def commits(path: str) -> Iterator[Committed]:
    """Our commits that are still there, newest first. Does not use Spark."""
    found = (_own(info) for info in history(path))
    return (one for one in found if one is not None)


def last_commit(path: str) -> Committed | None:
    """The newest commit of ours.

    Returns:
        None where there is no table yet. Commits after ours that only compact or clean up change no
        rows: the version is then the newest one, whose files are sure to be there.

    Raises:
        StorageError: there is a table, but none of its commits that are still there is ours.
    """
    newer: list[dict[str, Any]] = []
    for info in history(path):
        found = _own(info)
        if found is not None:
            upkeep = newer and all(one.get("operation") in _UPKEEP for one in newer)
            return found._replace(version=newer[0]["version"]) if upkeep else found
        newer.append(info)
    if not newer:
        return None
    raise StorageError(
        f"{path} is a Delta table, but none of its {len(newer)} commits was written by "
        "vt_dagster: expected a table that only vt_dagster appends to; give the asset another "
        "warehouse directory or move that table away"
    )


def last_of_ours(path: str) -> Committed | None:
    """The newest commit of ours, whatever came after it; None where there is none."""
    return next(commits(path), None)


def foreign_write(path: str) -> str | None:
    """What somebody else has done to the rows of a table since our newest commit, for a message; None =
    nothing, or it was undone by a RESTORE to our commit. Does not use Spark."""
    newer: list[dict[str, Any]] = []
    found = None
    for info in history(path):
        found = _own(info)
        if found is not None:
            break
        newer.append(info)
    if found is None:
        return None
    for info in newer:
        operation = str(info.get("operation"))
        if operation == "RESTORE":
            version = (info.get("operationParameters") or {}).get("version")
            return None if str(version) == str(found.version) else f"RESTORE to version {version}"
        if operation in _CHANGES:
            return f"{operation} at version {info['version']}"
    return None


def batch_before(path: str, batch: int) -> Committed | None:
    """Our newest commit of an earlier batch; None where there is none, or where somebody else has
    written to the table since. Does not use Spark."""
    for info in history(path):
        found = _own(info)
        if found is None and info.get("operation") not in _UPKEEP:
            return None
        if found is not None and found.document["batch"] < batch:
            return found
    return None


def commit_of(path: str, batch: int, attempt: str) -> Committed | None:
    """The commit that this attempt made of a batch, later ones may stand above it by now; None = it
    was another attempt that wrote the batch."""
    for found in commits(path):
        if found.document["batch"] <= batch:
            return found if found.document["attempt"] == attempt else None
    return None


def exists(path: str) -> bool:
    """Whether there is a table. Does not use Spark."""
    return next(history(path), None) is not None


def is_conflict(error: Exception) -> bool:
    """Whether Spark's Delta refused a commit because of another one at the same time."""
    return _CONFLICT.search(str(error)) is not None


def log_files(path: str) -> list[str]:
    """The names of what lies in a table's ``_delta_log``."""
    fs, root = filesystem(path)
    try:
        found = fs.ls(posixpath.join(root, "_delta_log"), detail=False, refresh=True)
    except (FileNotFoundError, NotADirectoryError):
        return []
    return [posixpath.basename(f) for f in found]


# ------------------------------------------------------------------------------------------ reading


def literal(path: str) -> str:
    """A path in which Spark's readers of files see no pattern."""
    return re.sub(r"([\[\]{}*?\\])", r"\\\1", path)


def quoted(path: str) -> str:
    """A table in SQL."""
    return "delta.`" + path.replace("`", "``") + "`"


def files(path: str, version: int | None = None, wanted: Wanted = everything) -> list[File]:
    """The data files of a table, as of one of its versions where given, that are wanted. Does not use
    Spark."""
    return files_of(require_table(path, version), wanted)


def files_of(table: DeltaTable, wanted: Wanted = everything) -> list[File]:
    """The same of a table that is open.

    Raises:
        StorageError: somebody has switched on what these files alone do not say.
    """
    protocol = table.protocol()
    asked = set(protocol.reader_features or []) - _UNDERSTOOD
    if protocol.min_reader_version == 2:
        asked = {"columnMapping"}
    if asked:
        raise StorageError(
            f"expected a Delta table as vt_dagster writes it in {table.table_uri}, got one with "
            f"{', '.join(sorted(asked))}, whose files alone do not say what is in it: undo that (ALTER "
            "TABLE … DROP FEATURE), or make it anew (an asset: vt-dagster replay; an export: remove "
            "its directory)"
        )
    # pa.table() would do the same, and import pandas for half a second.
    told = pa.RecordBatchReader.from_stream(table.get_add_actions(flatten=True)).read_all()
    rows = told.num_rows

    def column(name: str) -> list[Any]:
        return told.column(name).to_pylist() if name in told.column_names else [None] * rows

    def span(name: str) -> list[tuple[int, int] | None]:
        both = zip(column(f"min.{name}"), column(f"max.{name}"), strict=True)
        return [None if low is None or high is None else (low, high) for low, high in both]

    counts = [count or 0 for count in column("num_records")]
    newest: list[int | None] = [None] * rows
    if f"max.{TIMESTAMP}" in told.column_names:
        times = told.column(f"max.{TIMESTAMP}")
        if pa.types.is_timestamp(times.type):
            micros = times.cast(pa.timestamp("us", times.type.tz)).cast(pa.int64()).to_pylist()
            # Delta's statistics leave out what is less than a millisecond.
            newest = [None if one is None else one + 999 for one in micros]
    found = zip(
        column("path"),
        column("size_bytes"),
        counts,
        column(f"partition.{SEGMENT}"),
        span(PARTITION),
        span(OFFSET),
        newest,
        strict=True,
    )
    return [file for file in (File(*one) for one in found) if wanted(file)]


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
        if size is None and version is not None and place not in {file.place for file in _newest(path)}:
            raise ConcurrentRunError(
                f"{asset_of(path)}: expected the file {place} in {path}, which version {version} of "
                "the table has, but it was removed since and a newer version does without it: a key "
                "was erased meanwhile, or a clean-up kept too little. Nothing was written: run again"
            )
        raise damaged(path, place, f"of {expected:,} bytes", size)


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
        f"it is damaged. {_way_out(path)}"
    )


def _newest(path: str) -> list[File]:
    return files_of(require_table(path))


def damaged(path: str, place: str, expected: str, size: int | None) -> StorageError:
    """What to say of a data file that is not what the table's log says.

    Args:
        expected: what it is to be, for example its size.
        size: that it has; None = it is missing.
    """
    got = "it is missing" if size is None else f"it has {size:,} bytes"
    return StorageError(
        f"{asset_of(path)}: expected the data file {place} {expected} in {path}, but {got}. "
        f"{_way_out(path)}"
    )


def asset_of(path: str) -> str:
    """The asset that a table is of, for messages: a log or view is below its folder; of others, such as
    an export, the folder itself."""
    folder, what = posixpath.split(path.rstrip("/"))
    if posixpath.basename(folder) == "bases":
        return posixpath.basename(posixpath.dirname(folder))
    return posixpath.basename(folder) if what in ("log", "view", "quarantine") else what


def _way_out(path: str) -> str:
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
        f"counts, but they have {found:,}: its _delta_log is damaged, or somebody has edited it. "
        f"{_way_out(path)}"
    )


def written_by(path: str, batch: int) -> list[File]:
    """The files that our newest commit of a batch wrote. Does not use Spark."""
    for one in commits(path):
        if one.document["batch"] == batch:
            return files(path, one.version, lambda file: file.place.startswith(f"{batch}-"))
    return []
