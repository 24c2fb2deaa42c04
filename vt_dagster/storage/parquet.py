"""Reads and writes rows of Delta tables: Spark handles the Parquet files, ``deltalake`` the commits.

Each commit writes its files to a folder of its own, ``<batch>-<random>/``; the files belong to the
table once the transaction log names them.
"""

from __future__ import annotations

import contextlib
import json
import math
import posixpath
import re
import time
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta, timezone
from typing import Any, Literal
from uuid import uuid4

import pyarrow.parquet as pq
from deltalake import CommitProperties, DeltaTable, Schema, Transaction
from deltalake.exceptions import DeltaError
from deltalake.transaction import AddAction, RemoveAction, create_table_with_add_actions
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import StructType

from vt_dagster.columns import OFFSET, PARTITION, SEGMENT, TIMESTAMP
from vt_dagster.errors import ConcurrentRunError, StorageError, StoreUnavailableError, counted
from vt_dagster.spark.jars import one_line
from vt_dagster.spark.settings import in_one_task
from vt_dagster.storage.delta import (
    FILES,
    MARK,
    Committed,
    Wanted,
    address,
    commit_of,
    everything,
    files_of,
    filesystem,
    is_hidden,
    last_of_ours,
    literal,
    location,
    open_table,
    require_files,
    require_rows,
    require_seen,
    require_table,
    require_written,
    with_format,
)
from vt_dagster.storage.schema_evolution import (
    by_newest_names,
    commit_with_columns,
    evolved,
    without_earlier_names,
)
from vt_dagster.topology.schema import noted, nullable

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
"""Signs in error messages that a file system refuses writes."""
ROWS_OF_A_FILE, ROWS_FOR_OTHERS = 250_000, 1_000_000
"""Rows per file: in logs and views, which are pruned by key and time; and in tables that are read as a
whole."""
_ROWS_OF_A_TASK, _FEW_TASKS = 100_000, 4
"""Logs and views get more files, up to this many, if each task then still writes this many rows."""
TRIES = 20
"""Number of attempts to commit beside concurrent commits."""
_PROPERTIES: dict[str, str | None] = {
    "delta.checkpointInterval": "20",
    # Else Delta removes commits after 30 days, our last one included; maintenance removes them instead
    # (``maintenance.remove_commits``).
    "delta.enableExpiredLogCleanup": "false",
}
_COUNTED = (PARTITION, OFFSET, TIMESTAMP)
"""Columns of a log with minimum and maximum statistics per file."""
_SEGMENT_OF_FILE = (
    f"CAST(NULLIF(regexp_extract(_metadata.file_path, '{SEGMENT}=([0-9]+)/', 1), '') AS INT)"
)


# ------------------------------------------------------------------------------------------ reading


def schema(path: str, version: int | None = None) -> StructType:
    """Returns the columns of a table for its readers, without ``history_segment``. Does not use
    Spark."""
    return without_earlier_names(stored_schema(path, version))


def stored_schema(path: str, version: int | None = None) -> StructType:
    """Returns the columns of a table as stored: a renamed column has one column per name, and the
    newest lists the earlier names. Does not use Spark."""
    return _schema_of(require_table(path, version))


def _schema_of(table: DeltaTable) -> StructType:
    stored = StructType.fromJson(json.loads(table.schema().to_json()))
    return StructType([f for f in stored.fields if f.name != SEGMENT])


def read(
    spark: SparkSession,
    path: str,
    version: int | None = None,
    wanted: Wanted = everything,
    parted: bool = False,
    like: StructType | None = None,
    count: int | None = None,
) -> DataFrame:
    """Reads the wanted files of a table, at a version if given, with each column under its newest name.

    Args:
        count: expected number of rows of the whole table by its commit; None = not checked.
        parted: whether to include ``history_segment``, the partition column of a view.
        like: declared columns: missing ones are null, others get the declared type and name, see
            ``schema_evolution``.

    Raises:
        StorageError: the stored columns cannot be read as declared, the row count differs, or a file is
            missing or has another size than in the table's log.
    """
    table = require_table(path, version)
    columns = _schema_of(table)
    if like is not None:
        columns = evolved(path, columns, like, declared=()).columns
    there = files_of(table)
    if count is not None:
        require_rows(path, there, count)
    there = [file for file in there if wanted(file)]
    require_files(path, there, version)
    places = [literal(posixpath.join(address(path), file.place)) for file in there]
    if not places:
        none = spark.createDataFrame([], without_earlier_names(columns))
        return none.withColumn(SEGMENT, F.lit(None).cast("int")) if parted else none
    rows = by_newest_names(spark.read.schema(columns).parquet(*places), columns)
    rows = rows.withColumn(SEGMENT, F.expr(_SEGMENT_OF_FILE)) if parted else rows
    return in_one_task(rows, [file.size for file in there])


# ------------------------------------------------------------------------------------------ writing


def write(
    rows: DataFrame,
    path: str,
    *,
    document: dict[str, Any],
    batch: int,
    asset: str,
    mode: Literal["append", "overwrite"] = "append",
    parted: bool = False,
    over: int | None = None,
    replaced: Wanted = everything,
    pinned: bool = False,
    like: StructType | None = None,
    count: int | None = None,
    after: str | None = None,
    before: Callable[[], None] | None = None,
) -> Committed:
    """Writes rows in one commit with a document. A batch is written once: a second write is a conflict.

    Args:
        document: goes into the commit's ``userMetadata``; must have ``batch`` and ``attempt``.
        batch: a conflict if the table already has this batch or a later one.
        parted: whether files are partitioned by ``history_segment``.
        over: for an overwrite, the version that the rows were computed from; None = no table.
        replaced: files that an overwrite replaces.
        pinned: whether a compaction since ``over`` is a conflict too.
        like: schema that lists the earlier names of the columns.
        count: expected number of rows; None = not checked.
        after: attempt of the commit of ours that this one must follow; empty = none may exist, None =
            not checked.
        before: called right before the commit; raises to prevent it, if staged data that the document
            names is gone.

    Returns:
        the commit.

    Raises:
        ConcurrentRunError: another run committed this batch, or wrote at the same time; the table was
            replaced; or the written files are gone before the commit.
        StorageError: the table's columns cannot evolve to those of the rows, see ``schema_evolution``;
            or the written files have another number of rows than expected.
    """
    app, path = f"{MARK}:{asset}", address(path)
    if _version_of(open_table(path, to_read=True), app) >= batch:
        raise conflict(asset, batch)
    if after is not None:  # asked again before the commit: here, before anything is written
        _require_last(path, asset, last_of_ours(path), after)
    folder = f"{batch}-{uuid4().hex}"
    try:
        with writing(path):
            adds = stage(rows, path, folder, asset, parted)
            if count is not None:
                _require_count(asset, adds, count)
            about = CommitProperties(
                custom_metadata={
                    "userMetadata": json.dumps({MARK: with_format(document), FILES: len(adds)})
                },
                app_transactions=[Transaction(app, batch)],
                # A retry inside deltalake would skip the checks that the loop below makes before each
                # attempt.
                max_commit_retries=0,
            )
            columns = StructType.fromJson(nullable(rows.schema.jsonValue()))
            columns = columns if like is None else noted(columns, like)
            for _ in range(TRIES):
                table = open_table(path)
                if _version_of(table, app) >= batch:
                    break
                last = last_of_ours(path)
                # The rows were computed from version `over`, so they lack the rows of a later commit of
                # ours. A compaction is not one of ours, and changes no rows.
                if mode == "overwrite" and last is not None and (over is None or last.version > over):
                    break
                if pinned and _of(table) != over:
                    break
                if after is not None:
                    _require_last(path, asset, last, after)
                try:
                    _commit(path, table, adds, columns, mode, parted, replaced, about, before)
                except (DeltaError, OSError):
                    # With a new table version, either another writer has won, or this commit succeeded
                    # and a later step (a checkpoint) failed: the loop finds out which.
                    if _of(open_table(path)) == _of(table):
                        raise
                done = commit_of(path, batch, document["attempt"])
                if done is not None:
                    return done
        raise conflict(asset, batch)
    except BaseException:
        # If the commit exists, a later step failed (a checkpoint), and the table has these files.
        if commit_of(path, batch, document["attempt"]) is None:
            remove(posixpath.join(path, folder))
        raise


def stage(rows: DataFrame, path: str, folder: str, asset: str, parted: bool = False) -> list[AddAction]:
    """Writes rows as files that no commit names yet, and returns the actions that add them.

    Args:
        folder: below the table's directory.

    Raises:
        StorageError: Spark has written the folder to a file system that this process does not see.
    """
    _write_files(rows, posixpath.join(path, folder), parted)
    require_seen(posixpath.join(path, folder), asset)
    return _adds(path, folder)


def packed(rows: DataFrame, count: int, for_others: bool = False) -> DataFrame:
    """Returns rows coalesced to a suitable number of files.

    Args:
        count: number of rows.
        for_others: whether other engines read the table as a whole (larger files).
    """
    files = math.ceil(count / (ROWS_FOR_OTHERS if for_others else ROWS_OF_A_FILE))
    tasks = 1 if for_others else min(_FEW_TASKS, count // _ROWS_OF_A_TASK)
    return rows.coalesce(max(1, tasks, files))


def last_batch(path: str, asset: str) -> int:
    """Returns the last batch that was written to a table for an asset; 0 = none. Does not use Spark."""
    return _version_of(open_table(path, to_read=True), f"{MARK}:{asset}")


def _version_of(table: DeltaTable | None, app: str) -> int:
    """Returns the last batch of an application id; 0 = none."""
    return 0 if table is None else table.transaction_version(app) or 0


def _of(table: DeltaTable | None) -> int | None:
    return None if table is None else table.version()


def _commit(
    path: str,
    table: DeltaTable | None,
    adds: list[AddAction],
    columns: StructType,
    mode: Literal["append", "overwrite"],
    parted: bool,
    replaced: Wanted,
    about: CommitProperties,
    before: Callable[[], None] | None,
) -> None:
    require_written(path, adds)
    if before is not None:
        before()
    parts = [SEGMENT] if parted else None
    schema = Schema.from_json(json.dumps(nullable(columns.jsonValue())))
    if table is None:
        # By default Delta keeps statistics for the first columns only, and compaction of a wide table
        # would lose those of the log's columns.
        counted = ",".join(_COUNTED) if {*_COUNTED} <= {*columns.names} else None
        more = {"delta.dataSkippingStatsColumns": counted} if counted else {}
        create_table_with_add_actions(
            location(path),
            schema,
            adds,
            partition_by=parts,
            configuration={**_PROPERTIES, **more},
            commit_properties=about,
        )
        return
    if mode == "overwrite" and replaced is everything:
        table.create_write_transaction([*adds], mode, schema, parts, commit_properties=about)
        return
    removes: list[RemoveAction] = []
    if mode == "overwrite":
        now = int(time.time() * 1000)
        removes = [
            RemoveAction(file.place, True, now, file.size, _parts(file.place))
            for file in files_of(table, replaced)
        ]
    then = StructType.fromJson(json.loads(table.schema().to_json()))
    found = evolved(path, then, columns, declared=())
    if found.summary:
        commit_with_columns(path, table, found.columns, adds, removes, about)
        return
    table.create_write_transaction(
        [*adds, *removes], "append", table.schema(), parts, commit_properties=about
    )


def _write_files(rows: DataFrame, folder: str, parted: bool) -> None:
    # Without the marker file _SUCCESS: only files that the transaction log names belong to a table.
    writer = rows.write.option("mapreduce.fileoutputcommitter.marksuccessfuljobs", "false")
    (writer.partitionBy(SEGMENT) if parted else writer).parquet(folder)


def _adds(path: str, folder: str) -> list[AddAction]:
    """Returns the add actions for the files of a folder below a table; files without rows are
    removed."""
    fs, root = filesystem(path)
    now = int(time.time() * 1000)
    found: list[AddAction] = []
    for name in sorted(fs.find(posixpath.join(root, folder))):
        place = name[name.rindex(f"/{folder}/") + 1 :]
        if not place.endswith(".parquet") or is_hidden(place):
            continue
        with fs.open(name, "rb") as opened:
            footer = pq.read_metadata(opened)
        # Spark writes a file even if there are no rows; each read would open it.
        if footer.num_rows == 0:
            fs.rm_file(name)
            continue
        size, stats = fs.size(name), json.dumps(_statistics(footer))
        found.append(AddAction(place, size, _parts(place), now, True, stats))
    return found


def _require_count(asset: str, adds: list[AddAction], expected: int) -> None:
    """Checks that the files have as many rows as were counted, because Spark computes rows again after
    it has lost an executor."""
    found = sum(json.loads(one.stats)["numRecords"] for one in adds)
    if found != expected:
        raise StorageError(
            f"{asset}: expected {counted(expected, 'row')} in the files that Spark has written, as the "
            f"run has counted, got {found:,}: Spark has computed them again with another result, or a "
            "file system has lost or added files; nothing was committed. Run again"
        )


def _parts(place: str) -> dict[str, str | None]:
    """Returns the partition value of a file by its path."""
    found = re.search(rf"(?:^|/){SEGMENT}=([^/]+)/", place)
    if found is None:
        return {}
    return {SEGMENT: None if found[1].startswith("__") else found[1]}


def _statistics(footer: pq.FileMetaData) -> dict[str, Any]:
    """Returns Delta's statistics of a file from its footer, for the columns that a log is pruned by."""
    lowest, highest = dict[str, Any](), dict[str, Any]()
    names = [footer.schema.column(i).path for i in range(footer.num_columns)]
    for name in _COUNTED:
        if name not in names:
            continue
        place = names.index(name)
        groups = [footer.row_group(g).column(place).statistics for g in range(footer.num_row_groups)]
        if any(one is None or not one.has_min_max for one in groups):
            continue
        low, high = min(one.min_raw for one in groups), max(one.max_raw for one in groups)
        if name == TIMESTAMP:
            # Delta's statistics have milliseconds: round the minimum down and the maximum up.
            low, high = _milliseconds(low // 1000), _milliseconds(-(-high // 1000))
        if low is not None and high is not None:
            lowest[name], highest[name] = low, high
    return {"numRecords": footer.num_rows, "minValues": lowest, "maxValues": highest}


def _milliseconds(since_epoch: int) -> str | None:
    """Returns a time for a statistic; None for years outside Python's range."""
    try:
        moment = datetime(1970, 1, 1, tzinfo=timezone.utc) + timedelta(milliseconds=since_epoch)
    except OverflowError:
        return None
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def remove(folder: str) -> None:
    """Removes a folder that no commit needs, such as that of a run that did not commit."""
    fs, local = filesystem(folder)
    with contextlib.suppress(OSError):
        fs.rm(local, recursive=True)


@contextlib.contextmanager
def writing(path: str) -> Iterator[None]:
    """Turns errors of a file system into one readable sentence.

    Raises:
        StorageError: the file system refuses writes, or is full.
    """
    try:
        yield
    except StoreUnavailableError:  # of a listing, which says nothing about the right to write
        raise
    except Exception as error:
        text = str(error)
        sign = next((sign for sign in _REFUSALS if sign in text), None)
        if sign is not None or isinstance(error, OSError):
            raise StorageError(
                f"expected to write to {path}, got: {sign or one_line(error)}. Earlier commits are "
                "unchanged. Give the process write permission there, or free disk space, and run again"
            ) from error
        raise


def _require_last(path: str, asset: str, last: Committed | None, attempt: str) -> None:
    """Checks that the newest commit of a table is the one that a run continues. If the table was
    exchanged or restored during the run, it is another one, and the offsets mean other records."""
    found = "" if last is None else last.document["attempt"]
    if found == attempt:
        return
    got = "no table" if last is None else f"batch {last.document['batch']} of run {found}"
    raise ConcurrentRunError(
        f"{asset}: expected run {attempt or 'none'} to be the last one in {path}, because this run "
        f"continues it, got {got}: the log was swapped, restated or restored from a backup during the "
        "run; nothing was committed. Run again when that change is finished"
    )


def conflict(asset: str, batch: int) -> ConcurrentRunError:
    """Returns the error of a run, if another run has committed the same batch first."""
    return ConcurrentRunError(
        f"{asset}: expected to be the only run that writes batch {batch}, but another run committed "
        "at the same time and won; nothing of this run was written. Run again to process the remaining "
        "records; to keep runs from overlapping, limit the concurrency of this asset's job to 1"
    )
