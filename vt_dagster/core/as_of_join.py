"""As-of join: looks up the version of a table that is valid at each row's time.

Three strategies give the same result. *Sorted*: rows and versions are shuffled and sorted together by
key and time. This suits any distribution of keys and times, and nothing has to fit into memory.
*Broadcast*: all versions go to each executor, and a row is compared with every version of its key. This
suits a table with few versions. *Tiled*: time is divided into tiles so that each holds few versions of
a key; rows and versions are shuffled by key and tile, and a row is compared with the versions in its
tile. Nothing is sorted, and the rows of one key spread over many tasks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from pyspark.sql import Column, DataFrame
from pyspark.sql import Window as W
from pyspark.sql import functions as F

from vt_dagster.columns import IS_TOMBSTONE, TIMESTAMP, VALID_FROM, VALID_TO
from vt_dagster.core.arrival_order import union

BUCKETS = 1 << 16
"""Number of hash buckets of keys; all keys of a bucket share one tile length."""

FOUND = "_found"
_BEGIN, _END, _HORIZON = "_begin", "_end", "_horizon"
_VERSION, _SIDE = "_version", "_side"
_BUCKET, _LEVEL = "_bucket", "_level"


@dataclass(frozen=True)
class Tiles:
    """The division of time into tiles: a tile of level n covers 2**n microseconds of epoch time.

    Args:
        level: one level for all keys; or, if keys differ much, a frame of ``_bucket`` (of keys) and
            ``_level``, without the buckets that have no version in that time.
        first: the earliest time of the rows that look up versions, epoch microseconds, inclusive.
        last: the latest such time, epoch microseconds, inclusive.
        tasks: the number of partitions of rows and of versions.
    """

    level: int | DataFrame
    first: int
    last: int
    tasks: int


JoinStrategy = Literal["sorted", "broadcast"] | Tiles


def as_of_join(
    left: DataFrame,
    versions: DataFrame,
    *,
    left_key: Sequence[str],
    right_key: Sequence[str],
    horizon: Column,
    name: str,
    strategy: JoinStrategy = "sorted",
) -> DataFrame:
    """Looks up for each row of ``left`` the version valid at its ``timestamp`` (inclusive).

    A key with a null component matches nothing.

    Plan: sorted, one shuffle and sort by key of both sides together; tiled, one shuffle of each side
    and a hash join; broadcast, neither shuffle nor sort.

    Args:
        strategy: see the module's docstring; for ``Tiles``, every timestamp of ``left`` must lie in
            their time range.

    Returns:
        every row of ``left`` once, with ``_found``: whether the table has a value at that time, within
        its history retention; and ``name``: a struct of the version's columns, null fields if not
        found.

    Source: KIP-889 ``get(key, asOfTimestamp)``, FORMAT 4.1.4, 4.1.5; kip889-validity-interval,
    kip889-expired-get.
    """
    names = {c: f"_version{i}" for i, c in enumerate(versions.columns)}
    table = versions.select(
        *[F.col(k).alias(n) for k, n in zip(right_key, _keys(right_key), strict=True)],
        F.col(VALID_FROM).alias(_BEGIN),
        F.col(VALID_TO).alias(_END),
        *[F.col(f"`{c}`").alias(n) for c, n in names.items()],
        horizon.alias(_HORIZON),
    )
    if strategy == "sorted":
        rows = _sorted(left, table, left_key, names[IS_TOMBSTONE])
    else:
        # Start the interval at the horizon: an expired time matches only a current version.
        begin = F.when(F.col(_END).isNull(), F.col(_BEGIN)).otherwise(F.greatest(_BEGIN, _HORIZON))
        table = table.where(~F.col(names[IS_TOMBSTONE])).withColumn(_BEGIN, begin)
        rows = (
            _tiled(left, table, left_key, strategy)
            if isinstance(strategy, Tiles)
            else _compared(left, table, left_key)
        )
    # A projection only: Spark splits the struct and prunes unused fields, as long as each expression is
    # cheap to compute twice.
    return rows.select(
        *[F.col(f"`{c}`") for c in left.columns],
        F.struct(*[F.col(n).alias(c) for c, n in names.items()]).alias(name),
        F.col(_BEGIN).isNotNull().alias(FOUND),
    )


def level_for(versions: DataFrame, *, key: Sequence[str], first: int, last: int) -> DataFrame:
    """Computes the tile level that suits the versions from ``first`` to ``last`` (microseconds,
    inclusive).

    A tile is two to four times as long as the average life of a version in that range. Versions that
    reach into more than one tile therefore add at most half as many copies as there are versions, and
    a tile holds about four versions of a key.

    Returns:
        one row per bucket of keys, with ``_bucket``; one row in total if ``key`` is empty: ``_level``,
        null if there is no version in that range; and ``versions``, the number of versions in it.
    """
    begin, end = _clipped(F.col(VALID_FROM), F.col(VALID_TO), first, last)
    life = (end - begin + 1).alias("life")
    lives = versions.select(*([_bucket(key)] if key else []), life).where("life > 0")
    level = F.floor(F.log2(4 * F.avg("life"))).cast("int").alias(_LEVEL)
    return lives.groupBy(*([_BUCKET] if key else [])).agg(level, F.count(F.lit(1)).alias("versions"))


def crowd_of(
    versions: DataFrame,
    *,
    key: Sequence[str],
    level: int | DataFrame,
    first: int,
    last: int,
    places: int,
) -> DataFrame:
    """Returns one row, ``most``: the most versions of a key that begin in one tile; null if none.

    Args:
        places: the number of hash values by which tiles are counted: a smaller one needs less memory
            and overestimates.
    """
    begin, end = _clipped(F.col(VALID_FROM), F.col(VALID_TO), first, last)
    there = _with_level(versions.where(begin <= end), key, level)
    place = F.pmod(F.xxhash64(*key, _tile(begin)), F.lit(places))
    counts = there.groupBy(place).agg(F.count(F.lit(1)).alias("versions"))
    return counts.agg(F.max("versions").alias("most"))


def _keys(key: Sequence[str]) -> list[str]:
    return [f"_key{i}" for i in range(len(key))]


def _sorted(left: DataFrame, table: DataFrame, key: Sequence[str], tombstone: str) -> DataFrame:
    """Takes the key's last version at or before each row, if it is a value and still valid.

    The version is carried as one struct, so that columns of different versions never mix.
    """
    keys, at = _keys(key), "_at"
    rows = left.select(
        *[F.col(f"`{c}`") for c in left.columns],
        *[F.col(k).alias(n) for k, n in zip(key, keys, strict=True)],
        F.col(TIMESTAMP).alias(at),
        F.lit(1).alias(_SIDE),
    )
    version = [c for c in table.columns if c not in keys]
    there = table.select(
        *keys, F.col(_BEGIN).alias(at), F.lit(0).alias(_SIDE), F.struct(*version).alias(_VERSION)
    )
    so_far = W.partitionBy(*keys).orderBy(at, _SIDE).rowsBetween(W.unboundedPreceding, W.currentRow)
    last = F.last(_VERSION, ignorenulls=True).over(so_far)
    found = union(rows, there).withColumn(_VERSION, last).where(F.col(_SIDE) == 1)
    seen = F.col(_VERSION)
    end, horizon = seen.getField(_END), seen.getField(_HORIZON)
    # The version may have ended before the next one begins.
    in_time = end.isNull() | (
        (F.col(TIMESTAMP) < end) & (horizon.isNull() | (F.col(TIMESTAMP) >= horizon))
    )
    value = F.col(key[0]).isNotNull() & ~seen.getField(tombstone)
    return found.withColumn(_VERSION, F.when(in_time & value, seen)).select(
        *[F.col(f"`{c}`") for c in left.columns], f"{_VERSION}.*"
    )


def _compared(left: DataFrame, table: DataFrame, key: Sequence[str]) -> DataFrame:
    """Takes the version of the key whose interval contains each row's time."""
    return left.join(F.broadcast(table), _matches(key), "left")


def _tiled(left: DataFrame, table: DataFrame, key: Sequence[str], tiles: Tiles) -> DataFrame:
    """Takes the key's version whose interval contains each row's time, from the row's tile."""
    mine, theirs, keys = "_of", "_tile", _keys(key)
    rows = _with_level(left, key, tiles.level).withColumn(mine, _tile(F.unix_micros(TIMESTAMP)))
    begin, end = _clipped(F.col(_BEGIN), F.col(_END), tiles.first, tiles.last)
    there = _with_level(table.where(begin <= end), keys, tiles.level)
    there = there.withColumn(theirs, F.explode(F.sequence(_tile(begin), _tile(end))))
    rows = rows.select(*[F.col(f"`{c}`") for c in left.columns], mine)
    there = there.select(*table.columns, theirs)
    return rows.repartition(tiles.tasks, *[F.col(k) for k in key], mine).join(
        there.repartition(tiles.tasks, *keys, theirs).hint("shuffle_hash"),
        _matches(key) & (F.col(mine) == F.col(theirs)),
        "left",
    )


def _matches(key: Sequence[str]) -> Column:
    end = F.col(_END)
    matches = (F.col(TIMESTAMP) >= F.col(_BEGIN)) & (end.isNull() | (F.col(TIMESTAMP) < end))
    for k, n in zip(key, _keys(key), strict=True):
        matches = matches & (F.col(k) == F.col(n))
    return matches


def _clipped(begin: Column, end: Column, first: int, last: int) -> tuple[Column, Column]:
    """Returns a version's first and last microsecond within a range; first > last if outside."""
    ends = F.coalesce(F.unix_micros(end) - 1, F.lit(last))
    return F.greatest(F.unix_micros(begin), F.lit(first)), F.least(ends, F.lit(last))


def _bucket(key: Sequence[str]) -> Column:
    return F.pmod(F.xxhash64(*key), F.lit(BUCKETS)).cast("int").alias(_BUCKET)


def _with_level(rows: DataFrame, key: Sequence[str], level: int | DataFrame) -> DataFrame:
    if isinstance(level, int):
        return rows.withColumn(_LEVEL, F.lit(level))
    return rows.withColumn(_BUCKET, _bucket(key)).join(F.broadcast(level), _BUCKET, "left")


def _tile(moment: Column) -> Column:
    """Returns the tile number of an epoch time (microseconds), at the row's ``_level``."""
    return F.call_function("shiftright", moment, F.col(_LEVEL))
