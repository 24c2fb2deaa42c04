"""In which of its ways (``core/as_of_join.py``) a join looks for versions, by what the run meets."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, cast

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from vt_dagster.core.as_of_join import JoinStrategy, Tiles, crowd_of, level_for
from vt_dagster.topology.model import Table, VersionedTable

VERSIONS_OF_A_TASK = 200_000
"""A task of the tiled way keeps so many in memory, more or less: a processor's cache is small."""

_FEW_VERSIONS, _FEW_OF_A_KEY = 20_000, 100
_FEW_IN_A_TILE = 128


def join_strategy(
    table: Table, view: DataFrame, few_records: bool, versions: int, span: tuple[int, int] | None
) -> tuple[JoinStrategy, str]:
    """The way for one run, and why.

    Args:
        few_records: whether the run has few records.
        versions: no more than these are in the view.
        span: the smallest and the largest timestamp of the records to be joined; None = none are.
    """
    if not isinstance(table, VersionedTable):
        return "sorted", ""
    if few_records or span is None:
        return "sorted", "sorted: the run has few records"
    if versions <= _FEW_VERSIONS:
        counts = view.groupBy(*table.key).count()
        most = counts.agg(F.max("count")).collect()[0][0] or 0
        if most <= _FEW_OF_A_KEY:
            said = f"broadcast: the table has at most {versions:,} versions, and {most} of a key"
            return "broadcast", said
    tiles, most = tiles_of(view, key=table.key, first=span[0], last=span[1])
    if most > _FEW_IN_A_TILE:
        return "sorted", (
            f"sorted: {most:,} versions of a key may be in one tile of time, more than {_FEW_IN_A_TILE}"
        )
    return tiles, f"tiled: at most {most} versions of a key in a tile of time"


def tiles_of(
    versions: DataFrame, *, key: Sequence[str], first: int, last: int, crowd: int = _FEW_IN_A_TILE // 2
) -> tuple[Tiles, int]:
    """Tiles for rows from ``first`` to ``last``, and how many versions of a key are in one at most.

    Plan: two jobs, an aggregate of the versions, and one by key and tile; four where more than
    ``crowd`` are in a tile: then each bucket of keys gets tiles by what its own versions live on
    average, and a tile has many only of a key that changes much more often at some times than at
    others, or than the other keys of its bucket.
    """
    span = {"first": first, "last": last}
    level, count = level_for(versions, key=(), **span).collect()[0]
    spark = cast(Any, versions.sparkSession)
    tasks = int(spark.conf.get("spark.sql.shuffle.partitions"))
    tasks = max(tasks, math.ceil(1.5 * count / VERSIONS_OF_A_TASK))

    def tiles(level: int | DataFrame) -> tuple[Tiles, int]:
        places = max(1, count // 8)
        found = crowd_of(versions, key=key, level=level, **span, places=places).collect()
        return Tiles(level, first, last, tasks), 1 + (found[0]["most"] or 0)

    alike = tiles(level or 0)
    # Spark's hash knows no collation: keys that are equal under one might be in two buckets.
    collated = any("collate" in versions.schema[k].dataType.simpleString() for k in key)
    if alike[1] <= crowd or collated:
        return alike
    # One row a bucket at most, and none of a user's: collected so that they are not made twice.
    levels = level_for(versions, key=key, **span).drop("versions")
    return tiles(spark.createDataFrame(levels.toArrow()))
