"""Records of a log in order of arrival, so many at once, and stream time as of each. No Spark."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from vt_dagster.storage.commit_log import EVER, Offsets

CHUNK = 2_000_000
"""So many records are held at once."""


def running_time(home: Any, moment: Any, latest: dict[int, int]) -> Any:
    """The largest time so far as of each record, in its partition.

    Args:
        home, moment: sorted by partition, and then in order of arrival.
        latest: of what came before; it is brought up to date.
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
    """Ranges of offsets, cut into some of at most so many records: first (inclusive) and end
    (exclusive) of each partition.

    Args:
        most: None = as many as may be held at once.
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
