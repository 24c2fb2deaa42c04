"""File pruning by offset, from Delta's file statistics. No Spark."""

from __future__ import annotations

from vt_dagster.storage.commit_log import Offsets
from vt_dagster.storage.delta import File, Wanted


def file_at_or_after(start: Offsets, ends: Offsets) -> Wanted:
    """Returns a filter for log files that may have rows in ``[start, ends)``; files without statistics
    pass.

    Args:
        start, ends: by partition, the first offset to read and the first free one.
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


def file_before(ends: Offsets) -> Wanted:
    """Returns a filter for log files that may have rows before ``ends``; files without statistics pass.

    Args:
        ends: end offset (exclusive) by partition; partitions without an entry are not read.
    """

    def wanted(file: File) -> bool:
        if file.offsets is None or file.partitions is None:
            return True
        (low, high), first = file.partitions, file.offsets[0]
        return any(low <= p <= high and first < end for p, end in ends.items())

    return wanted
