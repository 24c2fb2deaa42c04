"""What Delta tables say of themselves: commits, documents, files. Nothing here uses Spark.

``deltalake`` reads the transaction log; ``parquet`` writes it, and has Spark read and write the rows. A
table is opened in a millisecond or two, so that a sensor can look at a position.
"""

from __future__ import annotations

import json
import posixpath
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import fsspec
import pyarrow as pa
from deltalake import DeltaTable
from deltalake.exceptions import DeltaError, TableNotFoundError

from vt_dagster.columns import OFFSET, PARTITION, SEGMENT, TIMESTAMP
from vt_dagster.errors import StorageError
from vt_dagster.spark.jars import one_line
from vt_dagster.storage.damage_errors import cut_off, unreadable_log

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
    return unreadable_log(path, one_line(error), versions(path), log_files(path))


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
        if _is_cut_off(_metadata(info), text.splitlines()):
            raise ValueError(name)
    except ValueError:
        raise cut_off(path, version, log_files(path)) from None
    return {**info, "version": version}


def _is_cut_off(metadata: dict[str, Any], lines: Sequence[str]) -> bool:
    """Whether a commit of ours lacks some of its actions: a file that is cut off after a whole line is
    valid JSON."""
    document = metadata.get(MARK)
    if not isinstance(document, dict):
        return False
    added = sum(line.startswith('{"add"') for line in lines)
    expected = metadata.get(FILES)
    if expected is None:  # an older one: of a run that has results
        return added == 0 and bool((document.get("counts") or {}).get("out"))
    # The transaction is the last action of each commit, see ``transaction`` and ``deltalake``.
    return added != expected or not any(line.startswith('{"txn"') for line in lines)


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


def written_by(path: str, batch: int) -> list[File]:
    """The files that our newest commit of a batch wrote. Does not use Spark."""
    for one in commits(path):
        if one.document["batch"] == batch:
            return files(path, one.version, lambda file: file.place.startswith(f"{batch}-"))
    return []
