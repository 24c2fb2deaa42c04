"""Delta Lake tables: one writer of our own kind, and commits that carry a JSON document.

Commit metadata is read from the transaction log's own files, without Spark, so that a sensor can look
at a position in milliseconds.
"""

from __future__ import annotations

import contextlib
import functools
import json
import posixpath
import re
import time
from collections.abc import Iterable, Iterator
from datetime import timedelta
from typing import Any, Literal, NamedTuple

import fsspec
from pyspark.sql import DataFrame, SparkSession

from vt_dagster.errors import ConcurrentRunError, StorageError
from vt_dagster.spark.jars import one_line
from vt_dagster.spark.settings import settings

MARK = "vt_dagster"
"""The key under which a commit's ``userMetadata`` carries our document."""

_COMMIT_FILE = re.compile(r"(\d{20})\.json")
_UPKEEP = {"OPTIMIZE", "VACUUM START", "VACUUM END"}
_CHANGES = {"WRITE", "DELETE", "UPDATE", "MERGE", "TRUNCATE", "STREAMING UPDATE", "COPY INTO"}
_LOG_FILE = re.compile(r"\.?(\d{20})\.(json|crc|checkpoint(\.\d{10}\.\d{10})?\.parquet)(\.crc)?")
_ROWS_BESIDE = {"spark.databricks.delta.replaceWhere.constraintCheck.enabled": "false"}
"""Lets an overwrite of some partitions add rows to others in the same commit."""
_REFUSALS = (
    "Permission denied",
    "Read-only file system",
    "No space left on device",
    "Disk quota exceeded",
    "Mkdirs failed",
    "Not a directory",
    "ParentNotDirectoryException",
    "FileAlreadyExistsException",
    "AccessDenied",
)
"""How file systems say that they take nothing, inside of Spark's errors."""
_CONFLICT = re.compile(r"\bDELTA_(CONCURRENT_\w+|PROTOCOL_CHANGED|METADATA_CHANGED)\b")


class Committed(NamedTuple):
    """A commit of ours.

    Args:
        version: the table's version at it.
        document: what it carries.
        rows: how many rows it wrote, as Delta counted them; None where it did not.
    """

    version: int
    document: dict[str, Any]
    rows: int | None


def filesystem(path: str) -> tuple[Any, str]:
    """The file system of a path and the path on it. Hadoop's ``s3a://`` is ``s3://`` here."""
    return fsspec.core.url_to_fs(re.sub(r"^s3[an]://", "s3://", str(path)))


def last_commit(path: str) -> Committed | None:
    """The newest commit of ours.

    Returns:
        None where there is no table yet. Commits after ours that only compact or clean up change no
        rows: the version is then the newest one, whose files are sure to be there.

    Raises:
        StorageError: there is a table, but none of its commits that are still there is ours.
    """
    names = _commit_files(path)
    found = next(_ours(path, names), None)
    if found is not None:
        newer = names[: names.index(f"{found.version:020d}.json")]
        if newer and all(_info(path, name).get("operation") in _UPKEEP for name in newer):
            return found._replace(version=int(newer[0][:20]))
    if found is None and names:
        raise StorageError(
            f"{path} is a Delta table, but none of its {len(names)} commits was written by "
            "vt_dagster: expected a table that only vt_dagster appends to; give the asset another "
            "warehouse directory or move that table away"
        )
    return found


def foreign_write(path: str) -> str | None:
    """What somebody else has done to the rows of a table since our newest commit, for a message; None =
    nothing, or it was undone by a RESTORE to our commit. Does not use Spark."""
    names = _commit_files(path)
    found = next(_ours(path, names), None)
    if found is None:
        return None
    for name in names[: names.index(f"{found.version:020d}.json")]:
        info = _info(path, name)
        operation = str(info.get("operation"))
        if operation == "RESTORE":
            version = (info.get("operationParameters") or {}).get("version")
            return None if str(version) == str(found.version) else f"RESTORE to version {version}"
        if operation in _CHANGES:
            return f"{operation} at version {int(name[:20])}"
    return None


def _commit_files(path: str) -> list[str]:
    """The names of a table's commit files, newest first; none where there is no table."""
    return _newest_first(_log_files(path))


def _newest_first(names: Iterable[str]) -> list[str]:
    return sorted((n for n in names if _COMMIT_FILE.fullmatch(n)), reverse=True)


def _log_files(path: str) -> list[str]:
    fs, root = filesystem(path)
    try:
        found = fs.ls(posixpath.join(root, "_delta_log"), detail=False, refresh=True)
    except (FileNotFoundError, NotADirectoryError):
        return []
    return [posixpath.basename(f) for f in found]


def is_older(path: str, age: timedelta) -> bool:
    """Whether a file, or each file of a directory, was written longer ago than that."""
    fs, local = filesystem(path)
    written = [fs.modified(name) for name in fs.find(local) or [local]]  # object stores: files alone
    return all(time.time() - moment.timestamp() > age.total_seconds() for moment in written)


def forget_commits(path: str, keep: timedelta) -> int:
    """Removes the commits that led to the newest checkpoint which is older than ``keep``.

    All versions younger than that can still be read; and our newest commit, whose document is where
    the next run goes on from, stays however old it is. Does not use Spark.

    Returns:
        how many commits.
    """
    fs, root = filesystem(path)
    folder = posixpath.join(root, "_delta_log")
    names = _log_files(path)
    ours = next(_ours(path, _newest_first(names)), None)
    if ours is None:
        return 0
    files = [(found[1], name) for name in names if (found := _LOG_FILE.fullmatch(name))]
    old = [
        version
        for version, name in files
        if name == f"{version}.checkpoint.parquet"
        and int(version) <= ours.version
        and is_older(posixpath.join(path, "_delta_log", name), keep)
    ]
    # The oldest first: whoever is killed here leaves commits without a gap.
    gone = sorted((version, name) for version, name in files if old and version < max(old))
    for _, name in gone:
        with contextlib.suppress(FileNotFoundError):  # by another maintenance
            fs.rm_file(posixpath.join(folder, name))
    return sum(_COMMIT_FILE.fullmatch(name) is not None for _, name in gone)


def _ours(path: str, names: Iterable[str]) -> Iterator[Committed]:
    found = (_own(name, _info(path, name)) for name in names)
    return (one for one in found if one is not None)


def _own(name: str, info: dict[str, Any]) -> Committed | None:
    try:
        document = json.loads(info.get("userMetadata") or "{}").get(MARK)
    except (ValueError, AttributeError):
        return None
    if not isinstance(document, dict):
        return None
    written = (info.get("operationMetrics") or {}).get("numOutputRows")
    return Committed(int(name[:20]), document, None if written is None else int(written))


def batch_before(path: str, batch: int) -> Committed | None:
    """Our newest commit of an earlier batch; None where there is none, or where somebody else has
    written to the table since. Does not use Spark."""
    for name in _commit_files(path):
        info = _info(path, name)
        found = _own(name, info)
        if found is None and info.get("operation") not in _UPKEEP:
            return None
        if found is not None and found.document["batch"] < batch:
            return found
    return None


def partitions_written(path: str, batch: int, column: str) -> set[str | None]:
    """The values of a partition column in whose partitions our newest commit of a batch put files.
    Does not use Spark."""
    found = next(one for one in _ours(path, _commit_files(path)) if one.document["batch"] == batch)
    fs, root = filesystem(path)
    with fs.open(
        posixpath.join(root, "_delta_log", f"{found.version:020d}.json"), "rt", encoding="utf-8"
    ) as lines:
        actions = [json.loads(line) for line in lines if line.startswith('{"add"')]
    return {action["add"]["partitionValues"].get(column) for action in actions}


def _info(path: str, name: str) -> dict[str, Any]:
    """What a commit file says of the commit as a whole.

    Raises:
        StorageError: the file is cut off.
    """
    fs, root = filesystem(path)
    text = fs.cat_file(posixpath.join(root, "_delta_log", name)).decode("utf-8")
    try:
        if not text.rstrip().endswith("}"):
            raise ValueError(text)
        lines = (json.loads(line) for line in text.splitlines() if '"commitInfo"' in line)
        return next((line["commitInfo"] for line in lines if "commitInfo" in line), {})
    except ValueError:
        raise StorageError(
            f"{path}/_delta_log/{name} is cut off: whoever wrote it did not come to its end, or the "
            "disk was full. If it is the newest of its directory, that commit never was: move the file "
            "away and run again; if it is not, restore it from a backup"
        ) from None


def exists(path: str) -> bool:
    """Whether there is a table. Does not use Spark."""
    return bool(_commit_files(path))


def is_conflict(error: Exception) -> bool:
    """Whether Delta refused a commit because of another one at the same time."""
    return _CONFLICT.search(str(error)) is not None


def _commit_of(path: str, batch: int, attempt: str) -> Committed | None:
    """The commit that this attempt made of a batch, later ones may stand above it by now; None = it
    was another attempt that wrote the batch."""
    for found in _ours(path, _commit_files(path)):
        if found.document["batch"] <= batch:
            return found if found.document["attempt"] == attempt else None
    return None


def literal(path: str) -> str:
    """A path in which Spark's readers of files see no pattern."""
    return re.sub(r"([\[\]{}*?\\])", r"\\\1", path)


def quoted(path: str) -> str:
    """A table in SQL."""
    return "delta.`" + path.replace("`", "``") + "`"


def read(spark: SparkSession, path: str, version: int | None = None) -> DataFrame:
    """A table, as of one of its versions where given.

    A run asks for the same version more than once, and Delta lists all commits twice to find it. So the
    last ones are remembered, by what their commit says: a table that was made anew is another.
    """
    if version is None:
        return spark.read.format("delta").load(path)
    info: dict[str, Any] = {}
    with contextlib.suppress(FileNotFoundError):  # Delta says it better
        info = _info(path, f"{version:020d}.json")
    return _as_of(spark, path, version, json.dumps(info))


@functools.lru_cache(maxsize=8)
def _as_of(spark: SparkSession, path: str, version: int, _commit: str) -> DataFrame:
    return spark.read.format("delta").option("versionAsOf", version).load(path)


def write(
    rows: DataFrame,
    path: str,
    *,
    mode: Literal["append", "overwrite"],
    document: dict[str, Any],
    batch: int,
    asset: str,
    stats: tuple[str, ...] = (),
    partitioned_by: str | None = None,
    replaced: str | None = None,
) -> Committed:
    """One commit with a document. A batch is written once: another run's is a conflict.

    Args:
        document: goes into the commit's ``userMetadata``; must hold ``batch`` and ``attempt``.
        batch: Delta refuses (append) a batch number that the table has already.
        stats: the columns that files are pruned by; Delta's default where empty.
        partitioned_by: a column by whose values files are kept apart.
        replaced: an overwrite takes the place of these rows alone, a condition on ``partitioned_by``;
            None = of all.

    Returns:
        the commit.

    Raises:
        ConcurrentRunError: another run committed this batch, or wrote at the same time.
    """
    writer = (
        rows.write.format("delta")
        .mode(mode)
        .option("userMetadata", json.dumps({MARK: document}))
        .option("txnAppId", f"{MARK}:{asset}")
        .option("txnVersion", batch)
        .option("delta.checkpointInterval", "20")
        # Else it forgets our last commit 30 days after it, if others only clean the table: see
        # ``forget_commits``, which maintenance calls.
        .option("delta.enableExpiredLogCleanup", "false")
    )
    if stats:
        writer = writer.option("delta.dataSkippingStatsColumns", ",".join(stats))
    if partitioned_by:
        writer = writer.partitionBy(partitioned_by)
    if replaced:
        writer = writer.option("replaceWhere", replaced)
    schema = "mergeSchema" if mode == "append" or replaced else "overwriteSchema"
    try:
        with settings(rows.sparkSession, _ROWS_BESIDE if replaced else {}), writing(path):
            writer.option(schema, "true").save(path)
    except Exception as error:
        if is_conflict(error):
            raise _conflict(asset, batch) from None
        raise
    commit = _commit_of(path, batch, document["attempt"])
    if commit is None:
        raise _conflict(asset, batch)
    return commit


@contextlib.contextmanager
def writing(path: str) -> Iterator[None]:
    """Says in a sentence that nothing can be written to a place.

    Raises:
        StorageError: its file system refuses, or is full.
    """
    try:
        yield
    except Exception as error:
        said = str(error)
        sign = next((sign for sign in _REFUSALS if sign in said), None)
        if sign is not None or isinstance(error, OSError):
            raise StorageError(
                f"expected to write to {path}, got: {sign or one_line(error)}. What was committed "
                "before stays as it is. Give the process the right to write there, or make room, and "
                "run again"
            ) from error
        raise


def _conflict(asset: str, batch: int) -> ConcurrentRunError:
    return ConcurrentRunError(
        f"{asset}: expected to be the only run that writes batch {batch}, but another run committed "
        "at the same time and won; nothing of this run was written. Run again to take what is new "
        "since then; to keep runs from overlapping, limit the concurrency of this asset's job to 1"
    )
