"""Where the rows of a versioned table's view lie: what is current apart, history by the time it ended.

The layout of KIP-889's store, as partitions of a Delta table. A run whose records are in order rewrites
the current rows and adds to the history; records out of order rewrite the segments from the earliest
of them on; what is forgotten goes by whole segments, which takes no reading. A version whose segment is
not forgotten yet may lie there for longer than the history retention: whoever reads leaves it out.
"""

from __future__ import annotations

from dataclasses import dataclass

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from vt_dagster.columns import TIMESTAMP, VALID_TO
from vt_dagster.storage.commit_log import Segments
from vt_dagster.storage.delta import File, Wanted, current, everything

SEGMENT_ROWS = 100_000
"""A segment is closed when it may hold so many versions, or a hundredth of the table's."""


@dataclass(frozen=True)
class Change:
    """How one batch changes a view.

    Args:
        layout: where the rows that it writes go.
        following: what the next batch goes by.
        read: the files whose rows it may change; all others stay as they are.
        replaced: the files that go, the same and what is forgotten.
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
    """What a batch changes in a view of this layout.

    A record that is its key's latest ends the key's current version and no other. A record out of order
    changes the version that it falls into, which ends after it.

    Args:
        old: None = there is no view, or not one that is to be gone on with.
        log: the batch's rows, and ``records``, how many.
        total: records of the log so far.
        earliest: the smallest timestamp of a record out of order; None = there is none.
        newest: the largest timestamp so far.
        horizon: of the partition that is furthest behind.
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
    """The segment of a row by its ``valid_to``: INT, null where it is current."""
    ends = ", ".join(f"{end}L" for end in layout.ends)
    later = f"size(filter(array({ends}), e -> e <= unix_micros({VALID_TO})))" if ends else "0"
    return F.expr(f"CASE WHEN {VALID_TO} IS NOT NULL THEN {layout.first} + {later} END")


def divided(layout: Segments, log: DataFrame, records: int, total: int) -> Segments:
    """With the last segment cut, where so many records come at once that it takes several.

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
    """What the next run goes by, after one of so many records, each of which ended one version at
    most."""
    full = layout.rows + records >= segment_rows(total)
    if full and (not layout.ends or newest >= layout.ends[-1]):
        return Segments(first=layout.first, ends=[*layout.ends, newest + 1])
    return Segments(first=layout.first, ends=layout.ends, rows=layout.rows + records)


def segment_rows(total: int) -> int:
    """How many versions a segment has in a table of so many: some hundred segments at most."""
    return max(SEGMENT_ROWS, total // 100)
