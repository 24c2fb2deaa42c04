"""Takes a key out of the files of one table, so that no byte of it is left. See ``runs.erase``.

Only files that have it are written anew, each time in one commit that says what the last one said and
is a batch of its own: a run that started before is refused, as beside any other run. After it, what is
in no current version is removed at once, and so are the commits that led there: their statistics may
name the key.
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
"""What becomes of a row that has the key: it goes, or it stays as a tombstone without values."""
_HIT, _OLD_HIT, _FILE, _ROW = "_hit", "_old_hit", "_file", "_row"
_FOLDER = re.compile(r"(\d+)-[0-9a-f]{32}/")
"""Of what a commit of ours writes, with its batch."""


@dataclass(frozen=True)
class Key:
    """The key that is erased, or the keys.

    Args:
        types: its columns with their types.
        values: one for each column; None = ``where`` alone says which.
        where: a SQL condition over the key's columns.
    """

    types: Mapping[str, DataType]
    values: tuple[Any, ...] | None = None
    where: str | None = None

    def condition(self) -> Column:
        """Over rows with columns of these names."""
        given = zip(self.types.items(), self.values or (), strict=False)
        found = [F.col(f"`{c}`").eqNullSafe(F.lit(v).cast(kind)) for (c, kind), v in given]
        if self.where is not None:
            found.append(F.expr(f"({self.where})"))
        return F.coalesce(reduce(lambda a, b: a & b, found), F.lit(False))

    def within(self, rows: DataFrame, places: Mapping[str, str]) -> DataFrame:
        """Rows with ``_hit``: whether they have the key; and ``_old_hit``, their old row.

        Args:
            places: in which column they have each column of the key.
        """
        found = self._flagged(rows, _HIT, {k: f"`{c}`" for k, c in places.items()})
        old = rows.schema[OLD].dataType if OLD in rows.columns else None
        if not {*places.values()} <= {*getattr(old, "names", ())}:
            return found.withColumn(_OLD_HIT, F.lit(False))
        return self._flagged(found, _OLD_HIT, {k: f"{OLD}.`{c}`" for k, c in places.items()})

    def in_text(self, rows: DataFrame) -> DataFrame:
        """The same of quarantined records: those whose text has each value of the key as a word."""
        assert self.values is not None
        texts = [F.col(c).cast("string") for c in ("raw", "raw_key") if c in rows.columns]
        return rows.withColumns({_HIT: self.among_words(texts), _OLD_HIT: F.lit(False)})

    def among_words(self, texts: Sequence[Column]) -> Column:
        """Whether texts have each value of the key as a word; false where a condition alone says it."""
        whole = F.concat_ws("\n", *texts)
        words = [rf"(?<!\w){_quoted(str(value))}(?!\w)" for value in self.values or ()]
        return reduce(lambda a, b: a & b, [whole.rlike(word) for word in words] or [F.lit(False)])

    def _flagged(self, rows: DataFrame, name: str, places: Mapping[str, str]) -> DataFrame:
        # Aside, for a column of the row may have the name of a key's column.
        row = F.struct(*[F.col(f"`{c}`") for c in rows.columns]).alias(_ROW)
        keys = [F.col(place).alias(k) for k, place in places.items()]
        return rows.select(row, *keys).withColumn(name, self.condition()).select(f"{_ROW}.*", name)


def _quoted(text: str) -> str:
    return re.sub(r"([^\w\s])", r"\\\1", text)


@dataclass
class Found:
    """What was erased from one table.

    Args:
        searched: rows that were looked at.
        rows: that were removed or emptied; ``old``: whose old row was.
        by_partition: the same of ``rows``.
        first: of a log, the smallest timestamp of ``rows`` that are no tombstones; None = of none.
        last: of a log, their largest offset in each partition.
        places: the files that had them.
        version: of the table after it.
        like: the columns as they are declared now.
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
        """Whether a file had some."""
        return file.place in self.places


Marked = Callable[[DataFrame], DataFrame]


def find(
    spark: SparkSession, path: str, version: int, marked: Marked, like: StructType | None = None
) -> Found:
    """Which files of a table have rows with the key, and how many.

    Args:
        marked: gives rows with ``_hit`` and ``_old_hit``.
        like: the columns as they are declared now.
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
    told = (
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
    for one in told:
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
) -> None:
    """One commit in which the files that had the key are written anew without it.

    Args:
        version: that they were found in.
        values: the columns that are null in an emptied row.
        document: of the commit, with its ``batch``.

    Raises:
        ConcurrentRunError: somebody else has written to the table since.
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
    )
    found.version = done.version


def without(
    rows: DataFrame, marked: Marked, strategy: Way = "remove", values: Sequence[str] = ()
) -> DataFrame:
    """What is left of rows.

    Args:
        values: the columns that are null in an emptied row.
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
    """Removes what is in no current version of a table, and the commits that led to it.

    Args:
        batch: what later ones are about to write stays.

    Returns:
        how many data files were removed.
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
