"""Counts the records that other history retentions would have refused. No Spark.

A versioned table refuses a record whose timestamp is before stream time - retention. Such a record
does not advance stream time: so stream time is equal for every retention (KIP-889,
``core.versioned_table.put``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

import numpy as np
import pyarrow.compute as pc

from vt_dagster import rules
from vt_dagster.columns import OFFSET, PARTITION, PROPAGATED_FROM, TIMESTAMP
from vt_dagster.provenance.arrival_batches import running_time, split_ranges
from vt_dagster.provenance.lateness_results import Choice
from vt_dagster.provenance.log_reader import Log, both
from vt_dagster.provenance.source_origins import quarantine
from vt_dagster.rules import LATE
from vt_dagster.storage.arrow_reader import micros
from vt_dagster.storage.commit_log import commits

_ONE = timedelta(microseconds=1)
_ALL = np.iinfo(np.int64).max


class LateRecords:
    """The accepted and refused records of a versioned table.

    For a refused record only a range is known: it came between the stream times before and after its
    run.

    Args:
        log: the table's log.
    """

    def __init__(self, log: Log) -> None:
        self.log = log
        self.refused_least, self.refused_most = self._refused()

    @property
    def total(self) -> int:
        """The number of records that the table received."""
        carried = self.log.commit.totals.get(rules.CARRIED.name, 0)
        return self.log.commit.total - carried + len(self.refused_most)

    def _refused(self) -> tuple[Any, Any]:
        """Returns lower and upper bounds of the refused records' lateness: how far each was behind
        stream time, microseconds."""
        count = self.log.commit.totals.get(LATE.name, 0)
        rows = None if self.log.meaning else quarantine(self.log, pc.field("reason") == LATE.name)
        if rows is None or rows.num_rows != count:
            return np.zeros(count, np.int64), np.full(count, _ALL)
        moment, batch = micros(rows, TIMESTAMP), rows.column("batch").to_numpy()
        home = rows.column(PARTITION).to_numpy()
        before: dict[int, int] = {}
        least, most = np.zeros(count, np.int64), np.zeros(count, np.int64)
        for run in commits(self.log.root):
            for i in np.flatnonzero(batch == run.batch).tolist():
                time = run.stream_time[int(home[i])]
                least[i] = before.get(int(home[i]), moment[i]) - moment[i]
                most[i] = time - moment[i]
            before = run.stream_time
        return least, most

    def behind(self) -> Iterator[Any]:
        """Yields how far the accepted records were behind stream time, microseconds."""
        latest: dict[int, int] = {}
        # Not from the source: versions that a late partial update changed and that were written again.
        parts = self.log.head.shape.has_partial_updates and self.log.commit.totals.get(
            rules.CARRIED.name, 0
        )
        carried = [PROPAGATED_FROM] if parts else []
        for start, end in split_ranges({p: (0, e) for p, e in self.log.commit.next_offset.items()}):
            rows = self.log.rows(both(), start, end, [PARTITION, OFFSET, TIMESTAMP, *carried])
            if carried:
                rows = rows.filter(
                    pc.field(PROPAGATED_FROM).is_null() | (pc.field(PROPAGATED_FROM) == 0)
                )
            moment = micros(rows, TIMESTAMP)
            home, place = (rows.column(c).to_numpy() for c in (PARTITION, OFFSET))
            behind = running_time(home, moment, latest) - moment
            yield np.where(self._of_start(home, place), 0, behind)

    def _of_start(self, partitions: Any, offsets: Any) -> Any:
        """Returns which records are from the initial snapshot; these are never late."""
        start, found = self.log.commit.start, np.zeros(len(offsets), bool)
        for partition, (first, end) in ({} if start is None else start.offsets).items():
            found |= (partitions == partition) & (offsets >= first) & (offsets < end)
        return found

    def cost(self, lengths: Sequence[timedelta]) -> list[Choice]:
        """Returns how many records each retention would have refused; an upper bound where the lateness
        of refused records is only known as a range."""
        every = [length // _ONE for length in lengths]
        counts = [int((self.refused_most > one).sum()) for one in every]
        for behind in self.behind():
            counts = [n + int((behind > one).sum()) for n, one in zip(counts, every, strict=True)]
        return [
            Choice(length, of=self.total, wrong=n, late=n)
            for length, n in zip(lengths, counts, strict=True)
        ]

    def doubtful(self, lengths: Sequence[timedelta]) -> list[timedelta]:
        """Returns the lengths for which the count of :meth:`cost` is only an upper bound."""
        every = [(one, one // _ONE) for one in lengths]
        least, most = self.refused_least, self.refused_most
        return [one for one, n in every if (least > n).sum() != (most > n).sum()]

    def smallest(self, at_most: float) -> Choice | None:
        """Returns the shortest retention that would have refused at most a given share; None = not
        known, because a larger share was refused and the lateness of those records is not known."""
        found = [self.refused_most, *(b[b > 0] for b in self.behind())]
        needed = np.sort(np.concatenate(found))
        place = len(needed) - int(at_most * self.total + 1e-9) - 1
        length = int(needed[place]) if place >= 0 else 0
        return None if length == _ALL else self.cost([length * _ONE])[0]
