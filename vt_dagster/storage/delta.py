"""Reads transaction logs, files and paths of Delta tables, and checks that files are whole. No Spark.

``deltalake`` reads the transaction log; ``parquet`` writes it, and has Spark read and write the rows. A
table opens in one or two milliseconds, fast enough for a sensor that polls positions.

**Damaged tables.** Messages name the asset and how to recover; ``tests/storage/test_damaged_tables.py``
follows each recovery as the message words it.

**Paths.** This process and Spark must resolve a path to the same file: a Spark Connect server has its
own working directory, and may have its own file system.

**Data files** must match the transaction log. Spark reads an empty file as no rows, and reports other
damage in a Java stack trace. Comparing file sizes before a read needs no Spark job, and with the row
counts in the log ensures that all rows are read.
"""

from __future__ import annotations

import contextlib
import json
import os
import posixpath
import re
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, lru_cache
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as version_of
from pathlib import Path
from typing import Any, NamedTuple

import fsspec
import pyarrow as pa
from deltalake import DeltaTable
from deltalake.exceptions import DeltaError, TableNotFoundError
from deltalake.transaction import AddAction
from fsspec.registry import available_protocols

from vt_dagster.columns import OFFSET, PARTITION, SEGMENT, TIMESTAMP
from vt_dagster.errors import (
    ConcurrentRunError,
    SourceError,
    StorageError,
    StoreUnavailableError,
    VtDagsterError,
    counted,
)
from vt_dagster.spark.jars import one_line

# Damage errors


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


def cut_off(path: str, version: int) -> StorageError:
    """Returns the error for a truncated commit file."""
    start = f"{version:020d}"
    also = sorted(name for name in log_files(path) if name.startswith(f"{start}.checkpoint."))
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


# Tables and commits


MARK = "vt_dagster"
"""Key of our document in a commit's ``userMetadata``."""
FILES = "files_added"
"""Key of the number of data files that the commit adds; missing in older commits."""

FORMAT = 1
"""Format version of our documents. Raise it when an earlier release could not read a commit or would
misread it: an operator that it does not know, a field that is gone or has another meaning."""

FOLDER = re.compile(r"(\d+)-[0-9a-f]{32}/")
"""The folder of the files of one commit, with its batch."""
COMMIT_FILE = re.compile(r"(\d{20})\.json")
"""The name of a commit's file."""
_UPKEEP = {"OPTIMIZE", "VACUUM START", "VACUUM END", "ADD COLUMN"}
_CHANGES = {
    *("WRITE", "DELETE", "UPDATE", "MERGE", "TRUNCATE", "STREAMING UPDATE", "COPY INTO", "CLONE"),
    *("REPLACE TABLE", "CREATE OR REPLACE TABLE"),
    *("REPLACE TABLE AS SELECT", "CREATE OR REPLACE TABLE AS SELECT"),
}
_CONFLICT = re.compile(r"\bDELTA_(CONCURRENT_\w+|PROTOCOL_CHANGED|METADATA_CHANGED)\b")
_UNDERSTOOD = {"timestampNtz", "vacuumProtocolCheck"}
"""Supported reader features; with others the files alone do not give the rows."""


class Committed(NamedTuple):
    """A commit that vt_dagster made.

    Args:
        version: Delta version of the commit.
        document: our document in the commit.
    """

    version: int
    document: dict[str, Any]


class File(NamedTuple):
    """A data file of a table, as its log describes it.

    Args:
        place: path below the table's directory.
        size: bytes.
        rows: number of rows; 0 if unknown (files of other writers may lack statistics).
        segment: segment of a view; None = current rows, or a table without segments.
        partitions: smallest and largest partition of its rows; None = unknown.
        offsets: smallest and largest offset of its rows; None = unknown.
        newest, oldest: upper and lower bound of its timestamps, epoch microseconds; None = unknown.
    """

    place: str
    size: int
    rows: int
    segment: int | None
    partitions: tuple[int, int] | None
    offsets: tuple[int, int] | None
    newest: int | None = None
    oldest: int | None = None

    @property
    def batch(self) -> int | None:
        """The batch of the commit that wrote it; None = a compaction or another writer did."""
        found = FOLDER.match(self.place)
        return None if found is None else int(found[1])


Wanted = Callable[[File], bool]


def everything(file: File) -> bool:
    """Accepts all files."""
    return True


def current(file: File) -> bool:
    """Accepts files of a view with current rows; all files of a plain table."""
    return file.segment is None


def filesystem(path: str) -> tuple[Any, str]:
    """Returns the file system of a path, and the path on it. Hadoop's ``s3a://`` becomes ``s3://``.

    Raises:
        StorageError: there is no file system for the protocol of a URL, or it cannot be used here.
    """
    try:
        return fsspec.core.url_to_fs(location(path))
    except (ImportError, ValueError) as error:
        raise StorageError(
            f"expected a package with the file system of {path}, got none: {str(error).rstrip('.')}; "
            "install it, for example s3fs, gcsfs or adlfs"
        ) from error
    except OSError as error:  # of pyarrow, which needs the libraries of Java and Hadoop for hdfs
        raise StorageError(
            f"expected the file system of {path}, got: {one_line(error)}; install what it needs, or "
            "correct the path"
        ) from error


@contextlib.contextmanager
def listing(path: str) -> Generator[None]:
    """Turns the errors of a store that does not answer into one sentence.

    Raises:
        StoreUnavailableError: the store cannot be reached, or refuses the credentials.
    """
    try:
        yield
    except (FileNotFoundError, NotADirectoryError, VtDagsterError):
        raise
    except Exception as error:  # each package has classes of its own: botocore, aiohttp, google.auth
        raise StoreUnavailableError(
            f"expected to list {path}, got: {one_line(error).rstrip('.')}; correct the address, the "
            "credentials or the rights of the process, or wait until the store answers"
        ) from error


@contextlib.contextmanager
def listing_source(path: str) -> Generator[None]:
    """Like :func:`listing`, for the files of a source.

    Raises:
        SourceError: there is no file system for the path; or the store cannot be reached, or refuses
            the credentials.
    """
    try:
        with listing(path):
            yield
    except (StorageError, StoreUnavailableError) as error:
        raise SourceError(str(error)) from error


_PROTOCOL = re.compile(r"([a-zA-Z][\w+.-]*):(//)?")
_OF_HADOOP = ("abfss", "s3n")
"""Protocols of which fsspec knows nothing, without a package or at all."""


def require_address(path: str) -> None:
    """Checks that a path means one file or directory to Spark and to ``fsspec``.

    Raises:
        StorageError: the path is empty, has white space at an end, or begins with a tilde; or it is a
            URL with an unknown protocol, or with another form than ``protocol://…`` or ``file:/…``.
    """
    if not path.strip():
        raise StorageError(
            f"expected a directory or a URL, got {path!r}; name one: an empty path would be the "
            "working directory of each process"
        )
    if path != path.strip():
        raise StorageError(
            f"expected a directory or a URL, got {path!r}; remove the white space at its beginning or "
            "end"
        )
    if path.startswith("~"):
        raise StorageError(
            f"expected a directory or a URL, got {path!r}; write the whole path, as "
            "Path(…).expanduser() gives it: only a shell resolves a tilde"
        )
    found = _PROTOCOL.match(path)
    if found is None or re.match("file:/(//)?[^/]", path):
        return
    if not found[2] or found[1] == "file" or not path[found.end() :].strip("/"):
        raise StorageError(
            "expected a directory or a URL such as s3a://bucket/folder or file:///folder, got "
            f"{path!r}; correct it: the text before the first colon is read as a protocol"
        )
    if found[1] not in (*_OF_HADOOP, *available_protocols()):
        raise StorageError(
            "expected a directory, or a URL that begins with s3a://, gs://, abfss://, hdfs:// or "
            f"file:/, got {path!r}; use one of these, or install the package that makes {found[1]!r} "
            "known to fsspec"
        )


def require_place(path: str) -> None:
    """Checks that Spark and ``deltalake`` resolve a warehouse's path to the same directory.

    Raises:
        StorageError: the path has a backslash, a percent sign before two hexadecimal digits, or a
            control character; or see :func:`require_address`.
    """
    require_address(path)
    odd = re.search(r"\\|%[0-9a-fA-F]{2}|[\x00-\x1f\x7f]", path)
    if odd is not None:
        raise StorageError(
            f"expected a warehouse path that is also valid as a URL, got {path!r}: {odd[0]!r} "
            "would not stay the same there; use another directory"
        )


def require_directory(place: Path) -> None:
    """Creates a local directory if it is missing, for files that a command is to write.

    Raises:
        StorageError: the directory cannot be created, or must not be written to.
    """
    try:
        place.mkdir(parents=True, exist_ok=True)
        refused = None if os.access(place, os.W_OK | os.X_OK) else "it must not be written to"
    except OSError as error:
        refused = error.strerror or str(error)
    if refused is not None:
        raise StorageError(
            f"expected a directory to write to, got {str(place)!r}: {refused}; name another one"
        )


def require_writable(file: Path) -> None:
    """Checks before a command computes that it can write its result; creates the directory.

    Raises:
        StorageError: the file is a directory, must not be written to, or cannot be created.
    """
    require_directory(file.parent)
    if file.is_dir() or (file.exists() and not os.access(file, os.W_OK)):
        found = "a directory" if file.is_dir() else "which must not be written to"
        raise StorageError(f"expected a file to write, got {str(file)!r}, {found}; name another file")


# --------------------------------------------------------------------------------- the log of a table


_OPEN = 16
"""Number of open tables that a process shares among its readers."""


def open_table(path: str, version: int | None = None, *, to_read: bool = False) -> DeltaTable | None:
    """Opens a table, at a version if given; returns None if there is no table.

    Args:
        to_read: whether readers of this process share the open table. A writer needs one of its own,
            because its commit changes the object.

    Raises:
        StorageError: the transaction log is unreadable.
        ConcurrentRunError: the version is no longer there.
    """
    newest = next(history(path), None)
    if newest is None:
        return None
    # Opening a table costs 5 ms of CPU, and a run reads the same version up to ten times. A commit
    # without a time does not identify the table: another one may have been moved to its place.
    state = (*sorted(log_files(path)), str(newest)) if to_read and "timestamp" in newest else None
    try:
        if state is not None:
            return _shared(path, newest["version"] if version is None else version, state)
        return DeltaTable(location(path), version=version)
    except TableNotFoundError:
        if version is None:
            return None
        raise _version_gone(path, version) from None
    except (DeltaError, OSError, ValueError) as error:
        if version is not None and version > max(versions(path), default=version):
            raise _version_gone(path, version) from None
        raise _unreadable(path, error) from error


@lru_cache(_OPEN)
def _shared(path: str, version: int, state: tuple[str, ...]) -> DeltaTable:
    """Opens a version of a table once per ``state``: the file names in the table's log and its newest
    commit, which names its run."""
    return DeltaTable(location(path), version=version)


def _version_gone(path: str, version: int) -> ConcurrentRunError:
    return ConcurrentRunError(
        f"{asset_of(path)}: expected version {version} of {path}, but the commits that it needs "
        "were removed: a key was erased during this run, the table was exchanged, or a clean-up "
        "kept too little. Nothing was written: run again"
    )


def require_table(path: str, version: int | None = None) -> DeltaTable:
    """Opens a table to read it, like :func:`open_table`.

    Raises:
        StorageError: there is no table.
    """
    found = open_table(path, version, to_read=True)
    if found is None:
        raise StorageError(
            f"expected a Delta table in {path}, found none; materialize the asset first, or rebuild a "
            "view that was lost (vt-dagster rebuild)"
        )
    return found


def location(path: str) -> str:
    """Returns a table's directory in the form that ``deltalake`` needs."""
    return re.sub(r"^s3[an]://", "s3://", str(path))


def _unreadable(path: str, error: Exception) -> StorageError:
    for _ in history(path):
        pass  # raises for a truncated commit file, and names it
    way = "Restore its _delta_log from a backup, or rebuild the asset beside it (vt-dagster replay)"
    names, there = log_files(path), versions(path)
    checkpoints = sorted(name for name in names if ".checkpoint." in name or name == "_last_checkpoint")
    if checkpoints and there == list(range(len(there))):
        way = (
            f"All its commits exist, so its checkpoints are not needed: move {checkpoints} "
            f"out of {path}/_delta_log, and run again"
        )
    got = one_line(error)
    return StorageError(f"expected a readable Delta table in {path}, got: {got}. {way}")


def history(path: str) -> Iterator[dict[str, Any]]:
    """Yields the ``commitInfo`` of each existing commit with its ``version``, newest first.

    ``DeltaTable.history`` is not usable: it returns nothing if the path has ``#`` or ``?``, and counts
    versions wrongly if a commit has no ``commitInfo``.

    Raises:
        StorageError: a commit file is truncated.
    """
    for version in reversed(versions(path)):
        yield _info(path, version)


def versions(path: str) -> list[int]:
    """Returns the versions of a table whose commit files exist, ascending."""
    return sorted(int(name[:20]) for name in log_files(path) if COMMIT_FILE.fullmatch(name))


def _info(path: str, version: int) -> dict[str, Any]:
    fs, root = filesystem(path)
    name = f"{version:020d}.json"
    text = fs.cat_file(posixpath.join(root, "_delta_log", name)).decode("utf-8", "replace")
    try:
        if not text.rstrip().endswith("}"):
            raise ValueError(name)
        lines = text.split("\n")  # splitlines also splits within texts with a Unicode line separator
        infos = [json.loads(line) for line in lines if '"commitInfo"' in line]
        info = next((one["commitInfo"] for one in infos if "commitInfo" in one), {})
        if _is_cut_off(_metadata(info), lines):
            raise ValueError(name)
    except ValueError:
        raise cut_off(path, version) from None
    return {**info, "version": version}


def _is_cut_off(metadata: dict[str, Any], lines: Sequence[str]) -> bool:
    """Returns whether a commit of ours lacks actions: a file truncated after a whole line is valid
    JSON."""
    document = metadata.get(MARK)
    if not isinstance(document, dict):
        return False
    added = sum(line.startswith('{"add"') for line in lines)
    expected = metadata.get(FILES)
    if expected is None:  # an older commit: only a run with results must add files
        return added == 0 and bool((document.get("counts") or {}).get("out"))
    # The transaction is the last action of each commit, see ``schema_evolution`` and ``deltalake``.
    return added != expected or not any(line.startswith('{"txn"') for line in lines)


@cache
def release() -> str:
    """Returns the version of this package; ``unknown`` if it runs from a directory without metadata."""
    try:
        return version_of("vt-dagster")
    except PackageNotFoundError:
        return "unknown"


def with_format(document: dict[str, Any]) -> dict[str, Any]:
    """Returns a document with its format version and the release that writes it."""
    return {**document, "format": FORMAT, "release": release()}


def require_format(path: str, document: dict[str, Any], place: str) -> None:
    """Checks that this release can read a document.

    Args:
        path: the table.
        place: where the document is, for the message.

    Raises:
        StorageError: the document has another format version.
    """
    found = document.get("format")
    if found == FORMAT:
        return
    folder, what = posixpath.split(path.rstrip("/"))
    root = folder if what in ("log", "view", "quarantine") else path
    author = f"vt_dagster {document['release']}" if "release" in document else "an unreleased version"
    raise StorageError(
        f"{asset_of(path)}: expected commits in format {FORMAT}, which vt_dagster {release()} reads, "
        f"got format {found} in {place} of {path}, written by {author}; nothing was read. Use that "
        f"release, or move {root} away and materialize the asset again"
    )


def our_commit(path: str, version: int) -> Committed | None:
    """Returns the commit of a version; None if vt_dagster did not write it.

    Raises:
        FileNotFoundError: the commit file was removed.
        StorageError: the commit has another format version.
    """
    return _our_commit(path, _info(path, version))


def _metadata(info: dict[str, Any]) -> dict[str, Any]:
    """Returns a commit's ``userMetadata``; empty unless it is a JSON object."""
    try:
        found = json.loads(info.get("userMetadata") or "{}")
    except (ValueError, TypeError):
        return {}
    return found if isinstance(found, dict) else {}


def _our_commit(path: str, info: dict[str, Any]) -> Committed | None:
    document = _metadata(info).get(MARK)
    if not isinstance(document, dict):
        return None
    require_format(path, document, f"version {info['version']}")
    # Older documents lack ``recorded_at``: Delta's timestamp (milliseconds) replaces it.
    return Committed(
        info["version"], {"recorded_at": int(info.get("timestamp") or 0) * 1000, **document}
    )


def commits(path: str) -> Iterator[Committed]:
    """Yields our existing commits, newest first."""
    found = (_our_commit(path, info) for info in history(path))
    return (one for one in found if one is not None)


def last_commit(path: str) -> Committed | None:
    """Returns our newest commit.

    Returns:
        None if there is no table. If all later commits only compact or clean up, the version is the
        newest one: the rows are equal, and its files certainly exist.

    Raises:
        StorageError: the table exists, but none of its existing commits is ours.
    """
    newer: list[dict[str, Any]] = []
    for info in history(path):
        found = _our_commit(path, info)
        if found is not None:
            upkeep = newer and all(one.get("operation") in _UPKEEP for one in newer)
            return found._replace(version=newer[0]["version"]) if upkeep else found
        newer.append(info)
    if not newer:
        checkpoints = sorted(name for name in log_files(path) if ".checkpoint." in name)
        if checkpoints:
            raise StorageError(
                f"{asset_of(path)}: expected the commits of the table in {path}, got only checkpoints, "
                f"{checkpoints}: its commits were removed, and the next run would start from the "
                f"beginning. {way_out(path)}"
            )
        return None
    raise StorageError(
        f"{path} is a Delta table, but none of its commits was written by "
        "vt_dagster: expected a table that only vt_dagster appends to; give the asset another "
        "warehouse directory or move that table away"
    )


def last_of_ours(path: str) -> Committed | None:
    """Returns our newest commit with its own version, whatever came after it; None = none."""
    return next(commits(path), None)


def foreign_write(path: str) -> str | None:
    """Returns how another program has changed the rows of a table since our newest commit, for a
    message; None = no change, or a RESTORE to our commit has undone it."""
    newer: list[dict[str, Any]] = []
    found = None
    for info in history(path):
        found = _our_commit(path, info)
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
    """Returns our newest commit of an earlier batch; None if there is none, or if another program has
    written to the table since."""
    for info in history(path):
        found = _our_commit(path, info)
        if found is None and info.get("operation") not in _UPKEEP:
            return None
        if found is not None and found.document["batch"] < batch:
            return found
    return None


def commit_of(path: str, batch: int, attempt: str) -> Committed | None:
    """Returns the commit of a batch by this attempt, even if later commits exist; None = another
    attempt wrote the batch, or there is no such batch."""
    for found in commits(path):
        if found.document["batch"] <= batch:
            return found if found.document["attempt"] == attempt else None
    return None


def exists(path: str) -> bool:
    """Returns whether there is a table."""
    return next(history(path), None) is not None


def is_conflict(error: Exception) -> bool:
    """Returns whether Delta in Spark refused a commit because of a concurrent one."""
    return _CONFLICT.search(str(error)) is not None


def log_files(path: str) -> list[str]:
    """Returns the file names in a table's ``_delta_log``."""
    return names_in(posixpath.join(path, "_delta_log"))


def names_in(directory: str) -> list[str]:
    """Returns the names in a directory as of now; none if there is no such directory."""
    fs, root = filesystem(directory)
    try:
        with listing(directory):
            found = fs.ls(root, detail=False, refresh=True)
    except (FileNotFoundError, NotADirectoryError):
        return []
    return [posixpath.basename(one.rstrip("/")) for one in found]


def is_local(fs: Any) -> bool:
    """Returns whether a file system is that of this machine."""
    return "file" in (fs.protocol if isinstance(fs.protocol, tuple) else (fs.protocol,))


# ------------------------------------------------------------------------------------------ reading


def literal(path: str) -> str:
    """Returns a path with glob characters escaped for Spark's file readers."""
    return re.sub(r"([\[\]{}*?\\])", r"\\\1", path)


def quoted(path: str) -> str:
    """Returns a table's name in SQL."""
    return "delta.`" + path.replace("`", "``") + "`"


def files(path: str, version: int | None = None, wanted: Wanted = everything) -> list[File]:
    """Returns the wanted data files of a table, at a version if given."""
    return files_of(require_table(path, version), wanted)


def files_of(table: DeltaTable, wanted: Wanted = everything) -> list[File]:
    """Returns the wanted data files of an open table.

    Raises:
        StorageError: the table has reader features with which the files alone do not give the rows.
    """
    protocol = table.protocol()
    features = set(protocol.reader_features or []) - _UNDERSTOOD
    if protocol.min_reader_version == 2:
        features = {"columnMapping"}
    if features:
        raise StorageError(
            f"expected a Delta table as vt_dagster writes it in {table.table_uri}, got one with "
            f"{', '.join(sorted(features))}, whose files alone do not give its rows: remove the "
            "feature (ALTER TABLE … DROP FEATURE), or rebuild the table (an asset: vt-dagster replay; "
            "an export: remove its directory)"
        )
    # pa.table() gives the same, but imports pandas, which takes half a second.
    actions = pa.RecordBatchReader.from_stream(table.get_add_actions(flatten=True)).read_all()
    rows = actions.num_rows

    def column(name: str) -> list[Any]:
        return actions.column(name).to_pylist() if name in actions.column_names else [None] * rows

    def span(name: str) -> list[tuple[int, int] | None]:
        both = zip(column(f"min.{name}"), column(f"max.{name}"), strict=True)
        return [None if low is None or high is None else (low, high) for low, high in both]

    def micros(name: str) -> list[int | None]:
        times = actions.column(name) if name in actions.column_names else None
        if times is None or not pa.types.is_timestamp(times.type):
            return [None] * rows
        return times.cast(pa.timestamp("us", times.type.tz)).cast(pa.int64()).to_pylist()

    counts = [count or 0 for count in column("num_records")]
    # Delta's statistics are truncated to milliseconds.
    newest = [None if one is None else one + 999 for one in micros(f"max.{TIMESTAMP}")]
    found = zip(
        column("path"),
        column("size_bytes"),
        counts,
        column(f"partition.{SEGMENT}"),
        span(PARTITION),
        span(OFFSET),
        newest,
        micros(f"min.{TIMESTAMP}"),
        strict=True,
    )
    return [file for file in (File(*one) for one in found) if wanted(file)]


def written_by(path: str, batch: int) -> list[File]:
    """Returns the files that our newest commit of a batch wrote."""
    for one in commits(path):
        if one.document["batch"] == batch:
            return files(path, one.version, lambda file: file.place.startswith(f"{batch}-"))
    return []


# Shared paths


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


def place_of(path: object) -> str:
    """Returns the address of a warehouse, or of another directory to write to.

    Raises:
        StorageError: see :func:`require_place`.
    """
    require_place(str(path))
    return address(path)


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


# File integrity


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
        got = "it is missing" if size is None else f"it has {size:,} bytes"
        raise StorageError(
            f"{asset_of(path)}: expected the data file {place} of {expected:,} bytes in {path}, but "
            f"{got}; nothing was read. {way_out(path)}"
        )


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
        f"{asset_of(path)}: expected {counted(expected, 'row')} in the files of {path}, as its last "
        f"commit counts, but they have {found:,}: its _delta_log is damaged or was edited; "
        f"nothing was read. {way_out(path)}"
    )


def is_hidden(place: str) -> bool:
    """Returns whether Spark's readers ignore a file below a directory that Spark has written: a marker,
    a checksum, or a file of a task's attempt that was not committed (``_temporary``), which a
    speculative attempt may still write when the job is done."""
    return any(part.startswith(("_", ".")) for part in place.split("/"))


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

    if len(places) <= _AT_ONCE or is_local(fs):
        return {place: size(place) for place in places}
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        return dict(zip(places, pool.map(size, places), strict=True))
