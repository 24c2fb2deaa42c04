"""Rows of Delta tables: Parquet that Spark reads and writes, and the commits that put it into a table.

What a commit writes lies in a folder of its own, ``<batch>-<random>/``, and is in the table once the
transaction log says so; that log is written by ``deltalake``.
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
from vt_dagster.errors import ConcurrentRunError, StorageError
from vt_dagster.spark.jars import one_line
from vt_dagster.storage.delta import (
    FILES,
    MARK,
    Committed,
    Wanted,
    commit_of,
    everything,
    files_of,
    filesystem,
    last_of_ours,
    literal,
    location,
    open_table,
    require_table,
)
from vt_dagster.storage.file_integrity import require_files, require_rows, require_written
from vt_dagster.storage.schema_evolution import by_newest_names, evolved, without_earlier_names
from vt_dagster.storage.schema_transaction import commit_with_columns
from vt_dagster.storage.shared_paths import address, require_seen
from vt_dagster.topology.column_renames import noted
from vt_dagster.topology.schema import nullable

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
"""How file systems say that they take nothing, inside of other errors."""
ROWS_OF_A_FILE, ROWS_FOR_OTHERS = 250_000, 1_000_000
"""Of a log or view, whose files are looked for by key and time; and of what is read as a whole."""
_TRIES = 20
"""How often a commit is tried where others commit at the same time."""
_PROPERTIES: dict[str, str | None] = {
    "delta.checkpointInterval": "20",
    # Else it forgets our last commit 30 days after it, if others only clean the table: see
    # ``maintenance.forget_commits``, which maintenance calls.
    "delta.enableExpiredLogCleanup": "false",
}
_COUNTED = (PARTITION, OFFSET, TIMESTAMP)
"""The columns of a log whose smallest and largest values are kept of each file."""
_SEGMENT_OF_FILE = (
    f"CAST(NULLIF(regexp_extract(_metadata.file_path, '{SEGMENT}=([0-9]+)/', 1), '') AS INT)"
)


# ------------------------------------------------------------------------------------------ reading


def schema(path: str, version: int | None = None) -> StructType:
    """The columns of a table as its readers see them, without the one that parts its files. Does not
    use Spark."""
    return without_earlier_names(stored_schema(path, version))


def stored_schema(path: str, version: int | None = None) -> StructType:
    """The same as its files have them: of a renamed column those of all its names, and the newest says
    which these are. Does not use Spark."""
    return _schema_of(require_table(path, version))


def _schema_of(table: DeltaTable) -> StructType:
    told = StructType.fromJson(json.loads(table.schema().to_json()))
    return StructType([f for f in told.fields if f.name != SEGMENT])


def read(
    spark: SparkSession,
    path: str,
    version: int | None = None,
    wanted: Wanted = everything,
    parted: bool = False,
    like: StructType | None = None,
    count: int | None = None,
) -> DataFrame:
    """A table, as of one of its versions where given, as far as its files are wanted, with each column
    under its newest name.

    Args:
        count: how many rows the whole table has, as its commit says; None = it does not.
        parted: whether ``history_segment``, which parts the files of a view, is among the columns.
        like: columns as they are declared now: those that the table has not got yet are null, and
            others are of the type and name that they will have; see ``evolution``.

    Raises:
        StorageError: what is stored cannot be read by those; or a file is missing, or has not the size
            that the table's log says.
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
    return rows.withColumn(SEGMENT, F.expr(_SEGMENT_OF_FILE)) if parted else rows


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
    before: Callable[[], None] | None = None,
) -> Committed:
    """One commit with a document. A batch is written once: another run's is a conflict.

    Args:
        document: goes into the commit's ``userMetadata``; must hold ``batch`` and ``attempt``.
        batch: is refused where the table has it, or a later one, already.
        parted: whether files are kept apart by ``history_segment``.
        over: of an overwrite the version that the rows were made from; None = there was no table.
        replaced: an overwrite takes the place of these files alone.
        pinned: whether a compaction since ``over`` is a conflict too.
        like: says by which names rows of before know columns of these.
        before: is called right before the commit; refuses it by an error, where what the document names
            is not there any more.

    Returns:
        the commit.

    Raises:
        ConcurrentRunError: another run committed this batch, or wrote at the same time; or the files
            that were written are gone by the time of the commit.
        StorageError: the table's columns cannot follow those of the rows, see ``evolution``.
    """
    app, path = f"{MARK}:{asset}", address(path)
    if _version_of(open_table(path), app) >= batch:
        raise _conflict(asset, batch)
    folder = f"{batch}-{uuid4().hex}"
    try:
        with writing(path):
            _write_files(rows, posixpath.join(path, folder), parted)
            require_seen(posixpath.join(path, folder), asset)
            adds = _adds(path, folder)
            about = CommitProperties(
                custom_metadata={"userMetadata": json.dumps({MARK: document, FILES: len(adds)})},
                app_transactions=[Transaction(app, batch)],
                max_commit_retries=0,
            )
            columns = StructType.fromJson(nullable(rows.schema.jsonValue()))
            columns = columns if like is None else noted(columns, like)
            for _ in range(_TRIES):
                table = open_table(path)
                if _version_of(table, app) >= batch:
                    break
                last = last_of_ours(path)
                if mode == "overwrite" and last is not None and (over is None or last.version > over):
                    break
                if pinned and _of(table) != over:
                    break
                try:
                    _commit(path, table, adds, columns, mode, parted, replaced, about, before)
                except (DeltaError, OSError):
                    # Somebody else came first; or it is in, and what comes after a commit went wrong.
                    if _version(path) == _of(table):
                        raise
                done = commit_of(path, batch, document["attempt"])
                if done is not None:
                    return done
        raise _conflict(asset, batch)
    except BaseException:
        if commit_of(path, batch, document["attempt"]) is None:
            _remove(posixpath.join(path, folder))
        raise


def packed(rows: DataFrame, count: int, for_others: bool = False) -> DataFrame:
    """Rows for a commit: few in few files, and many not by one task.

    Args:
        count: how many they are.
        for_others: whether they are a table that other engines read as a whole.
    """
    of_a_file = ROWS_FOR_OTHERS if for_others else ROWS_OF_A_FILE
    return rows.coalesce(max(1, math.ceil(count / of_a_file)))


def last_batch(path: str, asset: str) -> int:
    """The last batch that was written to a table for an asset; 0 = none. Does not use Spark."""
    return _version_of(open_table(path), f"{MARK}:{asset}")


def _version_of(table: DeltaTable | None, app: str) -> int:
    """The last batch that an application has written; 0 = none."""
    return 0 if table is None else table.transaction_version(app) or 0


def _of(table: DeltaTable | None) -> int | None:
    return None if table is None else table.version()


def _version(path: str) -> int | None:
    return _of(open_table(path))


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
        # Of wide tables Spark's compaction would count the first columns only.
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
    if found.told:
        commit_with_columns(path, table, found.columns, adds, removes, about)
        return
    table.create_write_transaction(
        [*adds, *removes], "append", table.schema(), parts, commit_properties=about
    )


def _write_files(rows: DataFrame, folder: str, parted: bool) -> None:
    writer = rows.write.option("mapreduce.fileoutputcommitter.marksuccessfuljobs", "false")
    (writer.partitionBy(SEGMENT) if parted else writer).parquet(folder)


def _adds(path: str, folder: str) -> list[AddAction]:
    """The files of a folder below a table, for its log; those without a row are removed."""
    fs, root = filesystem(path)
    now = int(time.time() * 1000)
    found: list[AddAction] = []
    for name in sorted(fs.find(posixpath.join(root, folder))):
        if not name.endswith(".parquet"):
            continue
        with fs.open(name, "rb") as opened:
            told = pq.read_metadata(opened)
        if told.num_rows == 0:
            fs.rm_file(name)
            continue
        place = name[name.rindex(f"/{folder}/") + 1 :]
        size, stats = fs.size(name), json.dumps(_statistics(told))
        found.append(AddAction(place, size, _parts(place), now, True, stats))
    return found


def _parts(place: str) -> dict[str, str | None]:
    """The value of the column that parts a table's files, by the place of one of them."""
    found = re.search(rf"(?:^|/){SEGMENT}=([^/]+)/", place)
    if found is None:
        return {}
    return {SEGMENT: None if found[1].startswith("__") else found[1]}


def _statistics(told: pq.FileMetaData) -> dict[str, Any]:
    """What Delta keeps of a file, from its footer: of the columns that a log is pruned by."""
    lowest, highest = dict[str, Any](), dict[str, Any]()
    names = [told.schema.column(i).path for i in range(told.num_columns)]
    for name in _COUNTED:
        if name not in names:
            continue
        place = names.index(name)
        groups = [told.row_group(g).column(place).statistics for g in range(told.num_row_groups)]
        if any(one is None or not one.has_min_max for one in groups):
            continue
        low, high = min(one.min_raw for one in groups), max(one.max_raw for one in groups)
        if name == TIMESTAMP:
            # Delta's statistics have milliseconds: down and up.
            low, high = _milliseconds(low // 1000), _milliseconds(-(-high // 1000))
        if low is not None and high is not None:
            lowest[name], highest[name] = low, high
    return {"numRecords": told.num_rows, "minValues": lowest, "maxValues": highest}


def _milliseconds(since_epoch: int) -> str | None:
    """A time in a statistic; None for years that it cannot say."""
    try:
        moment = datetime(1970, 1, 1, tzinfo=timezone.utc) + timedelta(milliseconds=since_epoch)
    except OverflowError:
        return None
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _remove(folder: str) -> None:
    fs, local = filesystem(folder)
    with contextlib.suppress(OSError):
        fs.rm(local, recursive=True)


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
