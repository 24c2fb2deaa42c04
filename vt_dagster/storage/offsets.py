"""Which rows of a log a run takes, as a condition that stays short where there are many partitions."""

from __future__ import annotations

from pyspark.sql import Column
from pyspark.sql import functions as F

from vt_dagster.columns import OFFSET, PARTITION
from vt_dagster.core.arrival import by_partition
from vt_dagster.storage.delta import File, Wanted
from vt_dagster.storage.positions import Offsets

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


def file_at_or_after(start: Offsets, ends: Offsets) -> Wanted:
    """Whether a file of a log may have rows at an offset or after it, as far as that is known.

    Args:
        start, ends: as in :func:`at_or_after`.
    """
    first = {p: start.get(p, 0) for p, end in ends.items() if start.get(p, 0) < end}
    least = min(first.values(), default=None)

    def wanted(file: File) -> bool:
        if least is None:
            return False
        if file.offsets is None or file.partitions is None:
            return True
        low, high = file.partitions
        last = file.offsets[1]
        if last < least:
            return False
        some = first if len(first) < high - low else range(low, high + 1)
        return any(low <= p <= high and first.get(p, last + 1) <= last for p in some)

    return wanted
