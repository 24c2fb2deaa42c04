"""Searches a log for a bounded number of records, and counts the records that are left out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from vt_dagster.columns import IS_TOMBSTONE, OFFSET, PARTITION, RECORDED_AT, TIMESTAMP
from vt_dagster.provenance.explain_request import Condition, Log, Record
from vt_dagster.provenance.lateness import split_ranges
from vt_dagster.storage.arrow_reader import arrival_order, micros

MOST = 200
"""Maximum number of records shown."""
LOOKED_AT = 20_000_000
"""Maximum number of records searched, the newest by arrival: takes seconds on two cores."""


@dataclass(frozen=True)
class RecordSearch:
    """The newest records that meet a condition, or those around a time.

    Args:
        records: oldest first.
        rows: key, time, place and tombstone flag of ``records``, as in the log.
        count: the number of searched records that meet the condition.
        earlier: how many of them are before the first shown record.
        later: how many of them are after the last shown record.
        looked_at: the number of searched records, the newest of the log.
        of: the number of all records of the log.
    """

    records: Sequence[Record]
    rows: pa.Table
    count: int
    earlier: int
    later: int
    looked_at: int
    of: int

    @property
    def shown(self) -> int:
        """The number of shown records."""
        return len(self.records)

    @property
    def whole(self) -> bool:
        """Whether the whole log was searched."""
        return self.looked_at >= self.of


def newest(
    log: Log,
    condition: Condition,
    *,
    around: int | None = None,
    by_arrival: bool = False,
    most: int = MOST,
    looked_at: int = LOOKED_AT,
) -> RecordSearch:
    """Returns the newest records that meet a condition, by timestamp or by arrival, and their number.

    Reads the narrow columns in batches and keeps the newest records; then reads only these with all
    columns.

    Args:
        around: epoch microseconds: half of the records are the newest up to that time (inclusive), the
            others the oldest after it.
        by_arrival: whether newest means last by arrival; not together with ``around``.
        most: maximum number of records returned.
        looked_at: maximum number of records searched.
    """
    ends, total = log.commit.next_offset, log.commit.total
    share = min(1.0, looked_at / total) if total else 1.0
    ranges = {p: (end - round(end * share), end) for p, end in ends.items()}
    names = [*log.key, TIMESTAMP, RECORDED_AT, IS_TOMBSTONE]
    kept = log.rows(condition, {}, {}, names)
    count = earlier = later = 0
    for start, end in split_ranges(ranges):
        rows = log.rows(condition, start, end, names)
        count += rows.num_rows
        rows = pa.concat_tables([kept, rows], promote_options="default")
        kept, before, after = _newest(rows, around, by_arrival, most)
        earlier, later = earlier + before, later + after
    places = list(zip(*(kept.column(c).to_pylist() for c in (PARTITION, OFFSET)), strict=True))
    by_place = {one.place: one for one in log.at(places)}
    records = [by_place[place] for place in places if place in by_place]
    seen = sum(end - start for start, end in ranges.values())
    return RecordSearch(records, kept, count, earlier, later, seen, total)


def _newest(
    rows: pa.Table, around: int | None, by_arrival: bool, most: int
) -> tuple[pa.Table, int, int]:
    """Returns the rows to keep, oldest first, and how many are left out before and after them."""
    moment = micros(rows, TIMESTAMP)
    rank = np.lexsort((*arrival_order(rows), *([] if by_arrival else [moment])))
    first, last = len(rank) - most, len(rank)
    if around is not None:
        split = int(np.searchsorted(moment[rank], around, side="right"))
        first, last = split - most // 2, split + most // 2
    first, last = max(0, first), min(last, len(rank))
    return rows.take(pa.array(rank[first:last])), first, len(rank) - last
