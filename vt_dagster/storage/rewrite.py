"""Rewrites committed history: the steps that an erase, a truncation, a restatement and a swap share.

**One commit.** A table is rewritten in one commit that is a batch of its own. It is refused if another
run has committed since the rewrite was planned, and after it a run that started earlier is refused. A
process killed before the commit has changed nothing. Maintenance removes its leftovers (staged data,
files without a commit). If a committed rewrite is planned again, it finds nothing left to do.

**Several steps.** A rewrite of several tables first writes its :class:`Intent`. The next call with the
same arguments finds it and repeats all steps: each is one such commit, or one :func:`exchange`, and
does nothing if it is done. The last step finishes the intent. Until then, an erase or truncation of
an asset in a restatement is refused (``runs.restate.require_free``), and so are readers and runs
that find the tables of an asset moved away (``arrow_reader.require_in_place``).

**Rows of an erase.** Only files with such rows are rewritten, so that no byte of the key is left. After
it, files outside the current version are removed at once, and so are the earlier commits, because their
statistics may contain the key.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Literal
from urllib.parse import unquote

from deltalake import DeltaTable
from pydantic import BaseModel, PrivateAttr
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import StructType
from typing_extensions import Self

from vt_dagster.columns import IS_TOMBSTONE, OFFSET, OLD, PARTITION, TIMESTAMP
from vt_dagster.errors import StorageError
from vt_dagster.storage import delta, parquet
from vt_dagster.storage.maintenance import remove_commits

EraseMode = Literal["remove", "empty"]
"""What an erase does with rows that have the key: ``remove``, or ``empty``: make them tombstones."""
HIT, OLD_HIT, _FILE = "_hit", "_old_hit", "_file"

# Rewrites in several steps


class Intent(BaseModel):
    """The plan and the progress of a rewrite of several steps, in a file from the first step on."""

    _path: str = PrivateAttr("")

    @property
    def path(self) -> str:
        """The path of the file; empty if there is no file, as for a dry run."""
        return self._path

    @classmethod
    def read(cls, path: str) -> Self | None:
        """Returns the intent of an interrupted or finished rewrite; None = there is no such file."""
        fs, local = delta.filesystem(path)
        if not fs.exists(local):
            return None
        found = cls.model_validate_json(fs.cat_file(local))
        found._path = path
        return found

    def save(self, path: str = "") -> None:
        """Writes the file atomically; does nothing without a path.

        Args:
            path: of a new intent.
        """
        self._path = path or self._path
        if not self._path:
            return
        fs, local = delta.filesystem(self._path)
        with parquet.writing(self._path):
            fs.makedirs(posixpath.dirname(local), exist_ok=True)
            fs.pipe_file(f"{local}.part", self.model_dump_json(indent=2).encode())
            fs.mv(f"{local}.part", local)


def exchange(fs: Any, live: str, new: str, old: str) -> None:
    """Puts new tables in the place of the live ones, which are moved to ``old``, unless that is done.

    Raises:
        StorageError: something was written in the place of the live tables between the two moves.
    """
    if not fs.exists(new):
        return
    if not fs.exists(old):
        fs.makedirs(posixpath.dirname(old), exist_ok=True)
        # After a kill between the two moves `old` exists and `live` does not: the next call makes the
        # second move.
        fs.mv(live, old, recursive=True)
    if fs.exists(live):  # moved there, the tables would lie within those that exist
        raise StorageError(
            f"expected that nothing runs while tables are exchanged, but {live} and {new} both exist "
            f"beside {old}, which has the earlier tables; move the one away that was written since, "
            "and run it again"
        )
    fs.mv(new, live, recursive=True)


# Rewrites in one commit


def replace(
    rows: DataFrame,
    path: str,
    version: int,
    replaced: delta.Wanted,
    document: dict[str, Any],
    **more: Any,
) -> int:
    """Replaces files of a table in one commit, and returns the table's new version.

    Args:
        version: the table version that the rows were computed from.
        document: document of the commit, with its ``batch``.
        more: see ``parquet.write``.

    Raises:
        ConcurrentRunError: another writer has committed since ``version``.
    """
    about: dict[str, Any] = {"document": document, "batch": document["batch"], "mode": "overwrite"}
    # Pinned: a compaction since then would have put kept rows into files that are not replaced.
    about |= {"over": version, "replaced": replaced, "pinned": True}
    return parquet.write(rows, path, **about, **more).version


@dataclass(frozen=True)
class Target:
    """A table to erase rows from.

    Args:
        name: its name in reports.
        path: its directory.
        asset: the name that its batches are counted under.
        marked: adds to rows ``_hit`` (whether the row is erased) and ``_old_hit`` (whether its ``old``
            is).
        like: the declared columns.
        mode: what happens to an erased row, see ``EraseMode``.
        values: the columns that become null in an emptied row.
        parted: whether files are partitioned by segment.
    """

    name: str
    path: str
    asset: str
    marked: Callable[[DataFrame], DataFrame]
    like: StructType | None = None
    mode: EraseMode = "remove"
    values: Sequence[str] = ()
    parted: bool = False


@dataclass
class Found:
    """The rows of one table that an erase finds.

    Args:
        of: the Delta version that was searched.
        searched: number of scanned rows.
        rows: number of rows to remove or empty.
        old: number of rows whose ``old`` is erased.
        by_partition: ``rows`` by partition.
        first: of a log, smallest timestamp of ``rows`` that are not tombstones, epoch microseconds;
            None = no such row.
        last: of a log, largest offset of ``rows`` by partition.
        places: files with such rows.
        version: table version after the erase.
    """

    of: int
    searched: int = 0
    rows: int = 0
    old: int = 0
    by_partition: dict[int, int] = field(default_factory=dict[int, int])
    first: int | None = None
    last: dict[int, int] = field(default_factory=dict[int, int])
    places: set[str] = field(default_factory=set[str])
    version: int | None = None

    def wanted(self, file: delta.File) -> bool:
        """Returns whether a file has such rows."""
        return file.place in self.places


def find(spark: SparkSession, target: Target, version: int) -> Found:
    """Finds the files of a table with rows to erase, and counts these rows."""
    files = delta.files(target.path, version)
    found = Found(version, sum(file.rows for file in files))
    if not files:
        return found
    rows = parquet.read(spark, target.path, version, like=target.like)
    rows = rows.withColumn(_FILE, F.col("_metadata.file_path"))
    partition = F.col(PARTITION) if PARTITION in rows.columns else F.lit(0)
    offset, first = F.lit(None).cast("long"), F.lit(None).cast("long")
    if {OFFSET, TIMESTAMP, IS_TOMBSTONE} <= {*rows.columns}:
        offset = F.max(F.when(F.col(HIT), F.col(OFFSET)))
        first = F.min(F.when(F.col(HIT) & ~F.col(IS_TOMBSTONE), F.unix_micros(TIMESTAMP)))
    matching = (
        target.marked(rows)
        .where(F.col(HIT) | F.col(OLD_HIT))
        .groupBy(_FILE, partition.alias(PARTITION))
        .agg(
            F.count_if(HIT).alias("rows"),
            F.count_if(OLD_HIT).alias("old"),
            offset.alias("offset"),
            first.alias("first"),
        )
        .collect()
    )
    known = {file.place for file in files}
    for one in matching:
        # Spark's path and ours may differ in scheme and escaping, so a file is recognized by the end of
        # its path.
        parts = unquote(one[_FILE]).split("/")
        found.places |= {p for k in range(1, len(parts)) if (p := "/".join(parts[-k:])) in known}
        found.rows += one["rows"]
        found.old += one["old"]
        if one["rows"]:
            partition_of = one[PARTITION] or 0
            found.by_partition[partition_of] = found.by_partition.get(partition_of, 0) + one["rows"]
            if one["offset"] is not None:
                found.last[partition_of] = max(found.last.get(partition_of, 0), one["offset"])
            if one["first"] is not None:
                found.first = min(t for t in (found.first, one["first"]) if t is not None)
    return found


def rewrite(
    spark: SparkSession, target: Target, found: Found, document: dict[str, Any], **more: Any
) -> None:
    """Rewrites the files with rows to erase in one commit; see :func:`replace`."""
    about = {"parted": target.parted, "like": target.like}
    rows = parquet.read(spark, target.path, found.of, found.wanted, **about)
    if found.places:
        rows = without(rows, target)
    about |= {"asset": target.asset, **more}
    found.version = replace(rows, target.path, found.of, found.wanted, document, **about)


def without(rows: DataFrame, target: Target) -> DataFrame:
    """Returns rows without those to erase."""
    rows, hit = target.marked(rows), F.col(HIT)
    if target.mode == "remove":
        rows = rows.where(~hit)
    else:
        empty = {c: F.when(~hit, F.col(f"`{c}`")) for c in target.values if c in rows.columns}
        rows = rows.withColumns({**empty, IS_TOMBSTONE: F.col(IS_TOMBSTONE) | hit})
    if OLD in rows.columns:
        rows = rows.withColumn(OLD, F.when(~(F.col(OLD_HIT) | hit), F.col(OLD)))
    return rows.drop(HIT, OLD_HIT)


def purge(path: str, batch: int) -> int:
    """Removes files outside the current table version, and the commits before it.

    Args:
        batch: files of later batches are kept: a running write may be about to commit them.

    Returns:
        the number of removed data files.
    """
    fs, root = delta.filesystem(path)
    live = {file.place for file in delta.files(path)}
    removed = 0
    for name in fs.find(root):
        place = name[len(root.rstrip("/")) + 1 :]
        if place.startswith("_delta_log/"):
            continue
        folder, base = posixpath.split(place)
        data = posixpath.join(folder, re.sub(r"^\.(.+)\.crc$", r"\1", base))
        own = delta.FOLDER.match(place)
        is_data = data.endswith(".parquet") and data not in live
        if is_data and (own is None or int(own[1]) <= batch):
            fs.rm_file(name)
            removed += base.endswith(".parquet")
    ours = delta.last_of_ours(path)
    assert ours is not None
    DeltaTable(delta.location(path), version=ours.version).create_checkpoint()
    remove_commits(path, timedelta(0))
    return removed
