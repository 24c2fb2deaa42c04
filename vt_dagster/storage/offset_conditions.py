"""Spark conditions on offsets that stay short with many partitions."""

from __future__ import annotations

from pyspark.sql import Column
from pyspark.sql import functions as F

from vt_dagster.columns import OFFSET, PARTITION
from vt_dagster.core.arrival_order import by_partition
from vt_dagster.storage.commit_log import Offsets

MANY = 64
"""With more distinct offsets than this, one map look-up replaces a term per offset."""


def at_or_after(start: Offsets, ends: Offsets) -> Column:
    """Returns the condition that a log row's offset is at or after ``start``.

    Partitions without new rows are left out, and partitions with equal start offsets share a term:
    planning time grows with the length of the condition.

    Args:
        start: first offset by partition (inclusive); partitions without an entry start at 0.
        ends: first free offset by partition.
    """
    begin: dict[int, list[int]] = {}
    for partition, end in sorted(ends.items()):
        first = start.get(partition, 0)
        if first < end:
            begin.setdefault(first, []).append(partition)
    if len(begin) > MANY:
        exact = F.col(OFFSET) >= F.coalesce(by_partition(start, "long"), F.lit(0))
        return (F.col(OFFSET) >= min(begin)) & exact
    wanted = F.lit(False)
    for first, partitions in begin.items():
        wanted = wanted | (F.col(PARTITION).isin(partitions) & (F.col(OFFSET) >= first))
    return wanted


def before(ends: Offsets) -> Column:
    """Returns the condition that a log row's offset is before ``ends`` (exclusive); partitions without
    an entry have no rows."""
    if len(set(ends.values())) > MANY:
        return F.col(OFFSET) < F.coalesce(by_partition(ends, "long"), F.lit(0))
    wanted = F.lit(False)
    for end in sorted(set(ends.values())):
        partitions = [p for p, one in sorted(ends.items()) if one == end]
        wanted = wanted | (F.col(PARTITION).isin(partitions) & (F.col(OFFSET) < end))
    return wanted
