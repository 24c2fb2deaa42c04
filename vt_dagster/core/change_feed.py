"""The change data feed of a Delta table: its rows become puts and tombstones."""

from __future__ import annotations

from collections.abc import Sequence

from pyspark.sql import DataFrame
from pyspark.sql import Window as W
from pyspark.sql import functions as F

from vt_dagster.core.arrival_order import in_order_of_keys
from vt_dagster.core.source_records import DELETED

CHANGE = "_change_type"
"""What Delta's feed calls the kind of a change."""
VERSION = "_commit_version"
"""And the version that made it."""
BUCKETS = "_buckets"
_PUTS, _PUT, _FIRST, _ROW = ("insert", "update_postimage"), "_put", "_first", "_row"


def changes(feed: DataFrame, *, key: Sequence[str], values: Sequence[str], start: int) -> DataFrame:
    """What the commits of a table did to each key.

    Of a version and key the rows that are there after it are puts. Where there are none, the row that
    was deleted, or had that key before an update, gives one tombstone. So a row that is deleted and
    written again by one commit is put, and an update that changes the key deletes the old one.

    Plan: two shuffles and sorts, by version and hash of the key.

    Args:
        feed: key and value columns, ``_change_type``, ``_commit_version``, ``_buckets`` (into how many
            parts a version is cut), and whatever else belongs to a row.
        start: the smallest version.

    Returns:
        the rows, of a tombstone with nulls for values, with ``_deleted`` and ``_arrival``, by version,
        without ``_change_type`` and ``_buckets``.
    """
    keys = [F.col(f"`{k}`") for k in key]
    kinds = dict(feed.dtypes)
    row = F.xxhash64(*[F.col(f"`{c}`") for c in values if "map<" not in kinds[c]], F.lit(0))
    rows = feed.withColumns({_PUT: F.col(CHANGE).isin(*_PUTS), _ROW: row})
    of_key = W.partitionBy(VERSION, *keys)
    in_turn = of_key.orderBy(F.col(_PUT).desc(), _ROW)
    # The first one of a key is a put, where there is any.
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
