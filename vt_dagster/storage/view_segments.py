"""File layout of a versioned table's view: current rows in one segment, history segmented by valid_to.

The layout of KIP-889's store, as partitions of a Delta table. A run with records in order rewrites the
current rows and appends to the history. Records out of order rewrite all segments from the earliest
such record on. Expired history is dropped by whole segments, without reading them. So an expired
version may remain in a live segment after the history retention; readers filter it out.
"""

from __future__ import annotations

from dataclasses import dataclass

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from vt_dagster.columns import TIMESTAMP, VALID_TO
from vt_dagster.storage.commit_log import Segments
from vt_dagster.storage.delta import File, Wanted, current, everything

SEGMENT_ROWS = 100_000
"""A segment is closed at this number of versions, or at 1% of the table's records if that is more."""


@dataclass(frozen=True)
class Change:
    """The change of a view by one batch.

    Args:
        layout: segments for the rows that this batch writes.
        following: segments for the next batch.
        read: files whose rows the batch may change; all others are left untouched.
        replaced: files that the batch removes: those of ``read``, and expired segments.
    """

    layout: Segments
    following: Segments
    read: Wanted
    replaced: Wanted


def plan(
    old: Segments | None,
    log: DataFrame,
    *,
    records: int,
    total: int,
    earliest: int | None,
    newest: int,
    horizon: int,
) -> Change:
    """Returns the change of a view by a batch.

    The latest record of a key ends the key's current version only. A record out of order changes the
    version that is valid at its timestamp, and that version ends after the record.

    Args:
        old: segments of the view; None = no view, or one that is rebuilt.
        log: the batch's rows; ``records`` is their number.
        total: records of the log so far.
        earliest: smallest timestamp of a record out of order, epoch microseconds; None = none.
        newest: largest timestamp so far, epoch microseconds.
        horizon: expiry horizon of the partition that is furthest behind, epoch microseconds.
    """
    kept = (old or Segments()).forgotten(horizon)
    layout = divided(kept, log, records, total)
    following = closed_if_full(layout, records, total, newest)
    if old is None:
        return Change(layout, following, everything, everything)
    moved = [*layout.ends[len(kept.ends) :], *([] if earliest is None else [earliest])]
    read = kept.ending_after(min(moved)) if moved else current
    first = kept.first

    def goes(file: File) -> bool:
        return read(file) or (file.segment is not None and file.segment < first)

    return Change(layout, following, read, goes)


def segment_of(layout: Segments) -> Column:
    """Returns the segment of a row by its ``valid_to``: INT, null for current rows."""
    ends = ", ".join(f"{end}L" for end in layout.ends)
    later = f"size(filter(array({ends}), e -> e <= unix_micros({VALID_TO})))" if ends else "0"
    return F.expr(f"CASE WHEN {VALID_TO} IS NOT NULL THEN {layout.first} + {later} END")


def divided(layout: Segments, log: DataFrame, records: int, total: int) -> Segments:
    """Returns the layout with the open segment split, if the batch has records for several segments.

    Plan: one aggregate over the records' timestamps.
    """
    parts = records // segment_rows(total)
    if parts < 2:
        return layout
    shares = F.array(*[F.lit(i / parts) for i in range(1, parts)])
    times = F.percentile_approx(F.unix_micros(TIMESTAMP), shares)
    found = log.agg(times).collect()[0][0]
    new = {end for end in found or [] if not layout.ends or end > layout.ends[-1]}
    return Segments(first=layout.first, ends=[*layout.ends, *sorted(new)])


def closed_if_full(layout: Segments, records: int, total: int, newest: int) -> Segments:
    """Returns the layout for the next run: the open segment is closed when full.

    Args:
        records: in this run; each ends at most one version.
    """
    full = layout.rows + records >= segment_rows(total)
    if full and (not layout.ends or newest >= layout.ends[-1]):
        return Segments(first=layout.first, ends=[*layout.ends, newest + 1])
    return Segments(first=layout.first, ends=layout.ends, rows=layout.rows + records)


def segment_rows(total: int) -> int:
    """Returns the size of a full segment in versions: a table has about a hundred segments at most."""
    return max(SEGMENT_ROWS, total // 100)
