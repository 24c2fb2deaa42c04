"""Where the rows of a versioned table's view lie: what is current apart, history by the time it ended.

The layout of KIP-889's store, as partitions of a Delta table. A run whose records are in order rewrites
the current rows and adds to the history; records out of order rewrite the segments from the earliest
of them on; what is forgotten goes by whole segments, which takes no reading. A version whose segment is
not forgotten yet may lie there for longer than the history retention: whoever reads leaves it out.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

from pydantic import BaseModel, Field
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from vt_dagster.columns import TIMESTAMP, VALID_TO
from vt_dagster.storage.delta import File, Wanted, everything

SEGMENT_ROWS = 100_000
"""A segment is closed when it may hold so many versions, or a hundredth of the table's."""


def current(file: File) -> bool:
    """The files of a view with what is current: of a plain table all."""
    return file.segment is None


class Segments(BaseModel):
    """The segments of a view. Each holds the versions whose ``valid_to`` is before its end (exclusive)
    and not before the end of the one before it; the first also takes what is older, and the last, which
    is open, what is younger."""

    first: int = 0
    """The number of the first segment that is still there."""
    ends: list[int] = Field(default_factory=list[int])
    """Epoch microseconds, ascending; of all but the last segment."""
    rows: int = 0
    """At most so many versions are in the last one."""

    @property
    def last(self) -> int:
        """The number of the segment that is open."""
        return self.first + len(self.ends)

    def number(self, moment: int) -> int:
        """The segment of the versions that end at a time."""
        return self.first + bisect_right(self.ends, moment)

    def column(self) -> Column:
        """The segment of a row by its ``valid_to``: INT, null where it is current."""
        ends = ", ".join(f"{end}L" for end in self.ends)
        later = f"size(filter(array({ends}), e -> e <= unix_micros({VALID_TO})))" if ends else "0"
        return F.expr(f"CASE WHEN {VALID_TO} IS NOT NULL THEN {self.first} + {later} END")

    def ending_after(self, moment: int) -> Wanted:
        """The files with all versions that end after a time, and some that do not."""
        first = self.number(moment)
        return lambda file: file.segment is None or file.segment >= first

    def forgotten(self, horizon: int) -> Segments:
        """Without the segments in which every version ended before the horizon."""
        gone = bisect_right(self.ends, horizon)
        return Segments(first=self.first + gone, ends=self.ends[gone:], rows=self.rows)

    def divided(self, log: DataFrame, records: int, total: int) -> Segments:
        """With the last segment cut, where so many records come at once that it takes several.

        Plan: one aggregate over the records' timestamps.
        """
        parts = records // segment_rows(total)
        if parts < 2:
            return self
        shares = F.array(*[F.lit(i / parts) for i in range(1, parts)])
        times = F.percentile_approx(F.unix_micros(TIMESTAMP), shares)
        found = log.agg(times).collect()[0][0]
        new = {end for end in found or [] if not self.ends or end > self.ends[-1]}
        return Segments(first=self.first, ends=[*self.ends, *sorted(new)])

    def closed_if_full(self, records: int, total: int, newest: int) -> Segments:
        """What the next run goes by, after one of so many records, each of which ended one version
        at most."""
        full = self.rows + records >= segment_rows(total)
        if full and (not self.ends or newest >= self.ends[-1]):
            return Segments(first=self.first, ends=[*self.ends, newest + 1])
        return Segments(first=self.first, ends=self.ends, rows=self.rows + records)


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
    layout = kept.divided(log, records, total)
    following = layout.closed_if_full(records, total, newest)
    if old is None:
        return Change(layout, following, everything, everything)
    moved = [*layout.ends[len(kept.ends) :], *([] if earliest is None else [earliest])]
    read = kept.ending_after(min(moved)) if moved else current
    first = kept.first

    def goes(file: File) -> bool:
        return read(file) or (file.segment is not None and file.segment < first)

    return Change(layout, following, read, goes)


def segment_rows(total: int) -> int:
    """How many versions a segment has in a table of so many: some hundred segments at most."""
    return max(SEGMENT_ROWS, total // 100)
