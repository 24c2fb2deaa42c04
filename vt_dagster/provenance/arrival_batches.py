"""Reads a log in batches in order of arrival, and computes stream time per record. No Spark."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from vt_dagster.storage.commit_log import EVER, Offsets

CHUNK = 2_000_000
"""Maximum number of records in memory at once."""


def running_time(home: Any, moment: Any, latest: dict[int, int]) -> Any:
    """Returns the running maximum of the time of each record, per partition.

    Args:
        home, moment: partitions and times, sorted by partition, then by order of arrival.
        latest: the maximum of earlier records by partition; updated in place.
    """
    found = np.empty(len(moment), np.int64)
    starts = np.flatnonzero(np.diff(home, prepend=home[:1] - 1)) if len(home) else []
    for start, end in zip(starts, [*starts[1:], len(home)], strict=True):
        part = int(home[start])
        so_far = np.maximum.accumulate(moment[start:end])
        found[start:end] = np.maximum(so_far, latest.get(part, EVER))
        latest[part] = int(found[end - 1])
    return found


def split_ranges(
    ranges: Mapping[int, tuple[int, int]], most: int | None = None
) -> Iterator[tuple[Offsets, Offsets]]:
    """Yields parts of offset ranges: first (inclusive) and end (exclusive) offset by partition.

    Args:
        most: maximum number of records in a part; None = ``CHUNK``.
    """
    most = CHUNK if most is None else most
    ranges = {p: (start, end) for p, (start, end) in ranges.items() if start < end}
    if sum(end - start for start, end in ranges.values()) <= most:
        if ranges:
            yield {p: s for p, (s, _) in ranges.items()}, {p: e for p, (_, e) in ranges.items()}
        return
    for partition, (start, end) in ranges.items():
        for first in range(start, end, most):
            yield {partition: first}, {partition: min(first + most, end)}
