"""Chooses the strategy of an as-of join (``core/as_of_join.py``) from the sizes of the run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, cast

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from vt_dagster.core.as_of_join import JoinStrategy, Tiles, crowd_of, level_for
from vt_dagster.topology.model import Table, VersionedTable

VERSIONS_OF_A_TASK = 200_000
"""Versions that a task of the tiled strategy holds in memory: more would not fit a CPU cache."""

_FEW_VERSIONS, _FEW_OF_A_KEY = 20_000, 100
_FEW_IN_A_TILE = 128


def join_strategy(
    table: Table, view: DataFrame, few_records: bool, versions: int, span: tuple[int, int] | None
) -> tuple[JoinStrategy, str]:
    """Returns the strategy for one run, and the reason as text.

    Args:
        few_records: whether the run has few records.
        versions: upper bound of the number of versions in the view.
        span: smallest and largest timestamp of the records to join; None = no records.
    """
    if not isinstance(table, VersionedTable):
        return "sorted", ""
    if few_records or span is None:
        return "sorted", "sorted: the run has few records"
    if versions <= _FEW_VERSIONS:
        counts = view.groupBy(*table.key).count()
        most = counts.agg(F.max("count")).collect()[0][0] or 0
        if most <= _FEW_OF_A_KEY:
            said = f"broadcast: the table has at most {versions:,} versions, and {most} per key"
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
    """Returns tiles of time for rows from ``first`` to ``last``, and the maximum number of versions of
    a key in one tile.

    Plan: two jobs, an aggregate of the versions and one by key and tile. If a tile has more than
    ``crowd`` versions of a key, four jobs: each bucket of keys then gets a tile length by the average
    lifetime of its versions. After that, a tile is crowded only if a key changes much more often at
    some times than at others, or than the other keys of its bucket.
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
    # Spark's hash ignores collation: keys that are equal under a collation may be in two buckets.
    collated = any("collate" in versions.schema[k].dataType.simpleString() for k in key)
    if alike[1] <= crowd or collated:
        return alike
    # At most one row per bucket, without user data: collected, so that Spark does not compute it twice.
    levels = level_for(versions, key=key, **span).drop("versions")
    return tiles(spark.createDataFrame(levels.toArrow()))
