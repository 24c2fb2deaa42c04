"""Which rows of a log a run takes, as a condition that stays short where there are many partitions."""

from __future__ import annotations

from pyspark.sql import Column
from pyspark.sql import functions as F

from vt_dagster.columns import OFFSET, PARTITION
from vt_dagster.core.arrival_order import by_partition
from vt_dagster.storage.commit_log import Offsets

MANY = 64
"""Of so many different offsets each is not worth a part of the plan."""


def at_or_after(start: Offsets, ends: Offsets) -> Column:
    """Whether a log row is at an offset or after it; of partitions without one every row is.

    Partitions with nothing new are not asked for, and those that begin at the same offset are asked for
    together: planning takes as long as the condition is.

    Args:
        start: the first offset of each partition.
        ends: the first free one.
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
    """Whether a log row is before an offset; of partitions without one no row is."""
    if len(set(ends.values())) > MANY:
        return F.col(OFFSET) < F.coalesce(by_partition(ends, "long"), F.lit(0))
    wanted = F.lit(False)
    for end in sorted(set(ends.values())):
        partitions = [p for p, one in sorted(ends.items()) if one == end]
        wanted = wanted | (F.col(PARTITION).isin(partitions) & (F.col(OFFSET) < end))
    return wanted
