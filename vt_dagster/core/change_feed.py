"""Delta's change data feed: turns its rows into puts and tombstones."""

from __future__ import annotations

from collections.abc import Sequence

from pyspark.sql import DataFrame
from pyspark.sql import Window as W
from pyspark.sql import functions as F

from vt_dagster.core.arrival_order import in_order_of_keys
from vt_dagster.core.source_records import DELETED

CHANGE = "_change_type"
"""The column in which Delta's feed gives the kind of a change."""
VERSION = "_commit_version"
"""The column in which Delta's feed gives the version that made the change."""
BUCKETS = "_buckets"
_PUTS, _PUT, _FIRST, _ROW = ("insert", "update_postimage"), "_put", "_first", "_row"


def changes(feed: DataFrame, *, key: Sequence[str], values: Sequence[str], start: int) -> DataFrame:
    """Returns the effect of a table's commits on each key.

    For each version and key, the rows that exist after the version are puts. If there are none, the row
    that was deleted, or that had the key before an update, gives one tombstone. A row that one commit
    deletes and writes again is therefore a put, and an update that changes the key deletes the old key.

    Plan: two shuffles and sorts, by version and hash of the key.

    Args:
        feed: key and value columns, ``_change_type``, ``_commit_version``, ``_buckets`` (the number of
            parts that a version is split into), and any other columns of a row.
        start: the smallest version.

    Returns:
        the rows by version, with ``_deleted`` and ``_arrival``, without ``_change_type`` and
        ``_buckets``; the values of a tombstone are null.
    """
    keys = [F.col(f"`{k}`") for k in key]
    kinds = dict(feed.dtypes)
    row = F.xxhash64(*[F.col(f"`{c}`") for c in values if "map<" not in kinds[c]], F.lit(0))
    rows = feed.withColumns({_PUT: F.col(CHANGE).isin(*_PUTS), _ROW: row})
    of_key = W.partitionBy(VERSION, *keys)
    in_turn = of_key.orderBy(F.col(_PUT).desc(), _ROW)
    # Puts sort first, so a key's first row is a deletion only if the version has no put of the key.
    judged = rows.withColumn(_FIRST, F.row_number().over(in_turn) == 1)
    taken = judged.where(F.col(_PUT) | F.col(_FIRST))
    gone = ~F.col(_PUT)
    nulled = {c: F.when(~gone, F.col(f"`{c}`")) for c in values}
    records = taken.withColumns({**nulled, DELETED: gone})
    ordered = in_order_of_keys(
        records,
        key=key,
        then=[F.col(_ROW)],
        place=F.col(VERSION) - start,
        buckets=F.col(BUCKETS),
    )
    return ordered.drop(CHANGE, BUCKETS, _PUT, _FIRST, _ROW)
