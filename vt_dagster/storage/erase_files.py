"""Erases a key from the files of one table, so that no byte of the key is left. See ``runs.erase``.

Only files with the key are rewritten, in one commit that repeats the last document as a batch of its
own: a run that started earlier then fails with a conflict, as with any concurrent run. After it, files
outside the current version are removed at once, and so are the earlier commits, because their
statistics may contain the key.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import reduce
from typing import Any, Literal
from urllib.parse import unquote

from deltalake import DeltaTable
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import DataType, StructType

from vt_dagster.columns import IS_TOMBSTONE, OFFSET, OLD, PARTITION, TIMESTAMP
from vt_dagster.storage import delta, parquet
from vt_dagster.storage.maintenance import forget_commits

Way = Literal["remove", "empty"]
"""Rows with the key are removed, or emptied: they become tombstones without values."""
_HIT, _OLD_HIT, _FILE, _ROW = "_hit", "_old_hit", "_file", "_row"
_FOLDER = re.compile(r"(\d+)-[0-9a-f]{32}/")
"""The folder of the files of one commit, with its batch."""


@dataclass(frozen=True)
class Key:
    """The key or keys to erase.

    Args:
        types: key columns with their types.
        values: one for each column; None = ``where`` alone selects the keys.
        where: SQL condition over the key columns.
    """

    types: Mapping[str, DataType]
    values: tuple[Any, ...] | None = None
    where: str | None = None

    def condition(self) -> Column:
        """Returns the condition on rows that have the key columns."""
        given = zip(self.types.items(), self.values or (), strict=False)
        found = [F.col(f"`{c}`").eqNullSafe(F.lit(v).cast(kind)) for (c, kind), v in given]
        if self.where is not None:
            found.append(F.expr(f"({self.where})"))
        return F.coalesce(reduce(lambda a, b: a & b, found), F.lit(False))

    def within(self, rows: DataFrame, places: Mapping[str, str]) -> DataFrame:
        """Returns rows with ``_hit`` (the row has the key) and ``_old_hit`` (its old row has the key).

        Args:
            places: by key column, the column of ``rows`` that holds it.
        """
        found = self._flagged(rows, _HIT, {k: f"`{c}`" for k, c in places.items()})
        old = rows.schema[OLD].dataType if OLD in rows.columns else None
        if not {*places.values()} <= {*getattr(old, "names", ())}:
            return found.withColumn(_OLD_HIT, F.lit(False))
        return self._flagged(found, _OLD_HIT, {k: f"{OLD}.`{c}`" for k, c in places.items()})

    def in_text(self, rows: DataFrame) -> DataFrame:
        """Returns quarantined records with the flags of :meth:`within`: a record matches if its text
        contains each value of the key as a word."""
        assert self.values is not None
        texts = [F.col(c).cast("string") for c in ("raw", "raw_key") if c in rows.columns]
        return rows.withColumns({_HIT: self.among_words(texts), _OLD_HIT: F.lit(False)})

    def among_words(self, texts: Sequence[Column]) -> Column:
        """Returns the condition that texts contain each value of the key as a word; false without
        ``values``."""
        whole = F.concat_ws("\n", *texts)
        words = [rf"(?<!\w){_quoted(str(value))}(?!\w)" for value in self.values or ()]
        return reduce(lambda a, b: a & b, [whole.rlike(word) for word in words] or [F.lit(False)])

    def _flagged(self, rows: DataFrame, name: str, places: Mapping[str, str]) -> DataFrame:
        # The row is packed into a struct: one of its columns may have the name of a key column.
        row = F.struct(*[F.col(f"`{c}`") for c in rows.columns]).alias(_ROW)
        keys = [F.col(place).alias(k) for k, place in places.items()]
        return rows.select(row, *keys).withColumn(name, self.condition()).select(f"{_ROW}.*", name)


def _quoted(text: str) -> str:
    return re.sub(r"([^\w\s])", r"\\\1", text)


@dataclass
class Found:
    """The rows of one table that an erase finds.

    Args:
        searched: number of scanned rows.
        rows: number of rows to remove or empty.
        old: number of rows whose old row is emptied.
        by_partition: ``rows`` by partition.
        first: of a log, smallest timestamp of ``rows`` that are not tombstones, epoch microseconds;
            None = no such row.
        last: of a log, largest offset of ``rows`` by partition.
        places: files with such rows.
        version: table version after the erase.
        like: the declared columns.
    """

    searched: int = 0
    rows: int = 0
    old: int = 0
    by_partition: dict[int, int] = field(default_factory=dict[int, int])
    first: int | None = None
    last: dict[int, int] = field(default_factory=dict[int, int])
    places: set[str] = field(default_factory=set[str])
    version: int | None = None
    like: StructType | None = None

    def wanted(self, file: delta.File) -> bool:
        """Returns whether a file has such rows."""
        return file.place in self.places


Marked = Callable[[DataFrame], DataFrame]


def find(
    spark: SparkSession, path: str, version: int, marked: Marked, like: StructType | None = None
) -> Found:
    """Finds the files of a table with rows of the key, and counts these rows.

    Args:
        marked: adds ``_hit`` and ``_old_hit`` to rows.
        like: the declared columns.
    """
    files = delta.files(path, version)
    found = Found(sum(file.rows for file in files), like=like)
    if not files:
        return found
    rows = parquet.read(spark, path, version, like=like).withColumn(_FILE, F.col("_metadata.file_path"))
    partition = F.col(PARTITION) if PARTITION in rows.columns else F.lit(0)
    offset, first = F.lit(None).cast("long"), F.lit(None).cast("long")
    if {OFFSET, TIMESTAMP, IS_TOMBSTONE} <= {*rows.columns}:
        offset = F.max(F.when(F.col(_HIT), F.col(OFFSET)))
        first = F.min(F.when(F.col(_HIT) & ~F.col(IS_TOMBSTONE), F.unix_micros(TIMESTAMP)))
    matching = (
        marked(rows)
        .where(F.col(_HIT) | F.col(_OLD_HIT))
        .groupBy(_FILE, partition.alias(PARTITION))
        .agg(
            F.count_if(_HIT).alias("rows"),
            F.count_if(_OLD_HIT).alias("old"),
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
    spark: SparkSession,
    path: str,
    version: int,
    found: Found,
    marked: Marked,
    strategy: Way,
    values: Sequence[str],
    *,
    document: dict[str, Any],
    asset: str,
    parted: bool = False,
    after: str | None = None,
) -> None:
    """Rewrites the files with the key in one commit.

    Args:
        version: table version of ``found``.
        values: columns that are null in an emptied row.
        document: document of the commit, with its ``batch``.
        after: see ``parquet.write``.

    Raises:
        ConcurrentRunError: another writer has committed since ``version``.
    """
    rows = parquet.read(spark, path, version, found.wanted, parted=parted, like=found.like)
    if found.places:
        rows = without(rows, marked, strategy, values)
    done = parquet.write(
        rows,
        path,
        document=document,
        batch=document["batch"],
        asset=asset,
        mode="overwrite",
        parted=parted,
        over=version,
        replaced=found.wanted,
        pinned=True,
        like=found.like,
        after=after,
    )
    found.version = done.version


def without(
    rows: DataFrame, marked: Marked, strategy: Way = "remove", values: Sequence[str] = ()
) -> DataFrame:
    """Returns rows without the key.

    Args:
        values: columns that are null in an emptied row.
    """
    rows, hit = marked(rows), F.col(_HIT)
    if strategy == "remove":
        rows = rows.where(~hit)
    else:
        empty = {c: F.when(~hit, F.col(f"`{c}`")) for c in values if c in rows.columns}
        rows = rows.withColumns({**empty, IS_TOMBSTONE: F.col(IS_TOMBSTONE) | hit})
    if OLD in rows.columns:
        rows = rows.withColumn(OLD, F.when(~(F.col(_OLD_HIT) | hit), F.col(OLD)))
    return rows.drop(_HIT, _OLD_HIT)


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
        own = _FOLDER.match(place)
        is_data = data.endswith(".parquet") and data not in live
        if is_data and (own is None or int(own[1]) <= batch):
            fs.rm_file(name)
            removed += base.endswith(".parquet")
    ours = delta.last_of_ours(path)
    assert ours is not None
    DeltaTable(delta.location(path), version=ours.version).create_checkpoint()
    forget_commits(path, timedelta(0))
    return removed
