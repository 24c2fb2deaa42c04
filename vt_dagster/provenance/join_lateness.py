"""Estimates the cost of other grace periods of a stream-table join from its commits. No Spark.

A run of the join consumes a range of the stream's log and reads the table as of one commit; the run's
own commit records both. So for any grace period, the run that would have emitted a record and the
version that the table would have returned then are known. The rules are those of
``core.stream_table_join``; a test compares both.
"""

from __future__ import annotations

import posixpath
import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import numpy as np

from vt_dagster.columns import IS_TOMBSTONE, OFFSET, PARTITION, TIMESTAMP, VALID_FROM
from vt_dagster.errors import StorageError
from vt_dagster.provenance.arrival_batches import running_time, split_ranges
from vt_dagster.provenance.bulk_lookup import Match, Versions
from vt_dagster.provenance.lateness_results import Choice, Delay
from vt_dagster.provenance.log_reader import Log, both
from vt_dagster.storage import delta
from vt_dagster.storage.arrow_reader import micros
from vt_dagster.storage.commit_log import EVER, Commit, commits
from vt_dagster.topology.durations import printed

_ONE = timedelta(microseconds=1)
_RIGHT = re.compile(r"\bright\b(?:\s*\.\s*(?:`([^`]+)`|(\w+)|(\*)))?", re.IGNORECASE)


@dataclass
class Records:
    """Stream records that one run of the join consumed, in order of arrival within a partition.

    Args:
        run: the run's index among the join's runs.
        home: the index of each record's partition.
        moment: each record's time, epoch microseconds.
        now: the buffer's stream time as of each record, epoch microseconds.
        keyed: whether each record has a key; a record without a key is joined at once, without a match.
        codes, place: see ``Versions``.
        truth: the place of the version that matches by current knowledge.
    """

    run: int
    home: Any
    moment: Any
    now: Any
    keyed: Any
    codes: Any
    place: Any
    truth: Any


@dataclass
class Cost:
    """Counts for one grace period."""

    of: int = 0
    wrong: int = 0
    late: int = 0
    expired: int = 0
    later: Counter[int] = field(default_factory=Counter[int])
    behind: Counter[int] = field(default_factory=Counter[int])


class LateJoin:
    """A stream-table join with its runs.

    Args:
        log: the join's log.
        stream, table: the logs of its inputs.

    Raises:
        StorageError: the join has ``as_known``, or its table is not versioned or has
            ``new_version_on``.
    """

    def __init__(self, log: Log, stream: Log, table: Log) -> None:
        meaning = log.meaning
        if "as_known" in meaning:
            raise StorageError(
                f"{log.name}: expected a join without as_known, got as_known={meaning['as_known']}: "
                "the cost of another grace period cannot be computed; try another as_known with "
                "vt-dagster what-if"
            )
        if table.head.shape.kind != "versioned":
            raise StorageError(
                f"{log.name}: expected a join with a versioned table, got one with {table.name}, a "
                "plain table, with which a join has no grace period; declare it as a VersionedTable"
            )
        if table.head.shape.new_version_on is not None:
            raise StorageError(
                f"{log.name}: expected a join with a table without new_version_on, got {table.name} "
                f"with new_version_on={table.head.shape.new_version_on}: the cost of another grace "
                "period cannot be computed; run vt-dagster explain for a single row"
            )
        self.log, self.stream, self.table, self.name = log, stream, table, meaning["left"]
        self.left = meaning["kind"] == "left"
        self.runs = [c for c in commits(log.root) if c.batch <= log.commit.batch]
        seen = states_of(log, self.runs, table, meaning["right"])
        numbers = [0 if one is None else one.batch for one in seen]
        batches = sorted(set(numbers))
        by_batch = dict(zip(numbers, seen, strict=True))
        self.state = np.array([batches.index(n) for n in numbers], np.int64)
        age = meaning.get("max_age")
        match = Match(
            _columns(meaning["select"], table),
            None if age is None else printed(age),
            meaning.get("at") == "before",
            table.head.shape.valid_until,
        )
        self.versions = Versions(table, [by_batch[n] for n in batches], match)
        homes = sorted({p for run in self.runs for p in run.stream_time})
        self._homes = np.array(homes, np.int64)
        self._time = np.array(
            [[run.stream_time.get(p, EVER // 2) for run in self.runs] for p in homes], np.int64
        )
        self._recorded = np.array([run.recorded_at for run in self.runs], np.int64)

    # -- the records -------------------------------------------------------------------------------

    def records(self) -> Iterator[Records]:
        """Yields all records that runs have consumed, in order of arrival, in batches."""
        for number, run in enumerate(self.runs):
            ends = run.inputs.get(self.name, {})
            before = self.runs[number - 1] if number else None
            first = {} if before is None else before.inputs.get(self.name, {})
            latest = {} if before is None else dict(before.stream_time)
            for start, end in split_ranges({p: (first.get(p, 0), e) for p, e in ends.items()}):
                yield self._taken(number, start, end, latest)

    def _taken(
        self, number: int, start: dict[int, int], end: dict[int, int], latest: dict[int, int]
    ) -> Records:
        """Returns the records of a run between two offsets.

        Args:
            latest: the buffer's stream time by partition; updated in place.
        """
        only = [PARTITION, OFFSET, TIMESTAMP, IS_TOMBSTONE, *self.stream.key]
        rows = self.stream.rows(both(), start, end, list(dict.fromkeys(only)))
        columns = [rows.column(k) for k in self.stream.key]
        empty = np.logical_or.reduce([c.is_null().to_numpy() for c in columns])
        deleted = rows.column(IS_TOMBSTONE).to_numpy()
        taken = np.flatnonzero(~deleted & (self.left | ~empty))
        home = rows.column(PARTITION).to_numpy()
        moment = micros(rows, TIMESTAMP)
        now = running_time(home, np.where(~deleted & ~empty, moment, EVER), latest)
        codes = self.versions.keys.of(columns, new=False)[taken]
        # A partition without keyed records has no stream time and no index here. Its index is not used:
        # records without a key are joined at once. The modulo only keeps it in range.
        places = np.searchsorted(self._homes, home[taken]) % max(len(self._homes), 1)
        moment = moment[taken]
        place = self.versions.place(codes, moment)
        truth, _ = self._answers(place, codes, moment, np.full(len(place), self.versions.now))
        return Records(number, places, moment, now[taken], ~empty[taken], codes, place, truth)

    def _answers(self, place: Any, codes: Any, moment: Any, state: Any) -> tuple[Any, Any]:
        return self.versions.answers(place, codes, moment, state)

    # -- a grace period ----------------------------------------------------------------------------

    def goes_out(self, records: Records, grace: int) -> tuple[Any, Any]:
        """Returns the run that emits each record (the number of runs = the record waits after the last
        one), and whether each record is late.

        Args:
            grace: the grace period, microseconds.

        Source: KIP-923, FORMAT 4.5.1; kip923-dequeue-boundary, kip923-late-is-immediate.
        """
        out = np.full(len(records.moment), records.run, np.int64)
        if not grace:
            return out, np.zeros(len(out), bool)
        late = records.keyed & (records.moment + grace < records.now)
        for home in range(len(self._time)):
            mine = (records.home == home) & records.keyed & ~late
            due = np.searchsorted(self._time[home], records.moment[mine] + grace, side="left")
            out[mine] = np.maximum(due, records.run)
        return out, late

    def cost(self, lengths: Sequence[timedelta]) -> list[Choice]:
        """Returns the cost of each grace period."""
        every = [length // _ONE for length in lengths]
        costs = [Cost() for _ in every]
        held = np.zeros((len(every), len(self.runs) + 1), np.int64)
        for records in self.records():
            for number, grace in enumerate(every):
                self._count(records, grace, costs[number], held[number])
        return [self._choice(*one) for one in zip(lengths, costs, np.cumsum(held, axis=1), strict=True)]

    def _count(self, records: Records, grace: int, cost: Cost, held: Any) -> None:
        """Adds records to the counts of a grace period.

        Args:
            held: the change in the number of waiting records at each run; updated in place.
        """
        out, late = self.goes_out(records, grace)
        cost.of += len(out)
        cost.late += int(late.sum())
        held[records.run] += len(out)
        np.subtract.at(held, out, 1)
        gone = np.flatnonzero(out < len(self.runs))
        wrong, forgotten = self._wrong(records, gone, out[gone])
        cost.wrong += int(wrong.sum())
        cost.expired += int((wrong & forgotten).sum())
        _add(cost.later, self._recorded[out[gone]] - self._recorded[records.run])
        time = self._time[records.home[gone]]
        if len(time):
            each = np.arange(len(gone))
            _add(cost.behind, time[each, out[gone]] - time[each, records.run])

    def _wrong(self, records: Records, some: Any, runs: Any) -> tuple[Any, Any]:
        """Returns which records would match another version in the given runs than by current
        knowledge, and where the reason is that the version had expired."""
        about = (records.place[some], records.codes[some], records.moment[some])
        found, forgotten = self._answers(*about, self.state[runs])
        return ~self.versions.same(found, records.truth[some]), forgotten

    def _choice(self, length: timedelta, cost: Cost, waiting: Any) -> Choice:
        after = waiting[:-1]
        return Choice(
            length,
            of=cost.of,
            wrong=cost.wrong,
            late=cost.late,
            expired=cost.expired,
            waiting=int(after[-1]) if len(after) else 0,
            waiting_average=float(after.mean()) if len(after) else 0.0,
            waiting_most=int(after.max(initial=0)),
            later=Delay.of(cost.later),
            later_in_stream_time=Delay.of(cost.behind),
        )

    # -- the shortest grace period for a share of wrong results ------------------------------------

    def needed(self) -> tuple[Any, int]:
        """Returns the grace periods (microseconds, ascending) from which on a record that its own run
        joins wrongly is joined correctly, and the number of records.

        A record has one entry for each change of its match to the correct one, including changes by
        chance before the version is in the log.
        """
        found: list[Any] = []
        total = 0
        for records in self.records():
            total += len(records.moment)
            rest = np.flatnonzero(records.keyed)
            known = self.versions.known_since(records.place[rest])
            # From the first run that reads the version on, the match is correct; before, by chance.
            right = np.searchsorted(self.state, known, side="left")
            last, turns = np.maximum(right, records.run) - 1, np.ones(len(rest), bool)
            while True:
                rest, last, turns = (a[last >= records.run] for a in (rest, last, turns))
                if not len(rest):
                    break
                wrong, _ = self._wrong(records, rest, last)
                some = wrong & turns
                time = self._time[records.home[rest[some]], last[some]]
                found.append(time - records.moment[rest[some]] + 1)
                # Runs that read the same commit of the table give the same match: skip to the commit
                # before.
                last, turns = np.searchsorted(self.state, self.state[last], side="left") - 1, ~wrong
        return np.sort(np.concatenate(found) if found else np.zeros(0, np.int64)), total

    def smallest(self, at_most: float) -> Choice | None:
        """Returns the shortest grace period with at most a given share of wrong results; None = no
        grace period is enough, because the table has expired too many versions.

        Args:
            at_most: the share, 0 to 1, inclusive.
        """
        needed, total = self.needed()
        allowed, length = int(at_most * total + 1e-9), 0
        while True:
            (found,) = self.cost([length * _ONE])
            if found.wrong <= allowed:
                return found
            # A longer grace period never has fewer expired versions: at least this many more records
            # need their own grace period.
            place = int(np.searchsorted(needed, length, side="right")) + found.wrong - allowed - 1
            if place >= len(needed):
                return None
            length = int(needed[place])


def _add(counts: Counter[int], values: Any) -> None:
    there, times = np.unique(values, return_counts=True)
    counts.update(dict(zip(there.tolist(), times.tolist(), strict=True)))


def states_of(log: Log, runs: Sequence[Commit], table: Log, name: str) -> list[Commit | None]:
    """Returns the table's commit that each run of a join read; None = the run read none.

    If the Delta versions that a run read are deleted, uses the last commit recorded at or before the
    run's.

    Args:
        name: the table's name in the join's commits.
    """
    every = list(commits(table.root))
    by_batch = {one.batch: one for one in every}
    logs, views = (_batches(posixpath.join(table.root, what)) for what in ("log", "view"))
    times = [one.recorded_at for one in every]
    found: list[Commit | None] = []
    for run in runs:
        batch = None
        for what, batches in (("log", logs), ("view", views)):
            version = run.reads.get(f"{name}/{what}")
            if version is not None and batch is None:
                place = bisect_right([v for v, _ in batches], version) - 1
                batch = batches[place][1] if place >= 0 else None
        if not any(f"{name}/{what}" in run.reads for what in ("log", "view")):
            found.append(None)
        elif batch in by_batch:
            found.append(by_batch[batch])
        else:
            place = bisect_right(times, run.recorded_at) - 1
            found.append(every[place] if place >= 0 else None)
    return found


def _batches(path: str) -> list[tuple[int, int]]:
    """Returns the remaining Delta versions with a commit of this library, each with its batch,
    ascending."""
    there = ((v, delta.our_commit(path, v)) for v in delta.versions(path))
    return [(v, int(one.document["batch"])) for v, one in there if one is not None]


def _columns(select: str, table: Log) -> list[str]:
    """Returns the table's columns that a join selects. Leaves out the end of the version, which the
    table always learns later."""
    declared = table.head.shape.columns or []
    values = [c for c in declared if c.lower() != TIMESTAMP]
    lowered = {c.lower(): c for c in [*values, VALID_FROM]}
    lowered[TIMESTAMP] = VALID_FROM
    found: list[str] = []
    for quoted, name, star in _RIGHT.findall(select):
        if star:
            found += values
        elif not (quoted or name):
            found += [*values, VALID_FROM]
        elif (quoted or name).lower() in lowered:
            found.append(lowered[(quoted or name).lower()])
    return list(dict.fromkeys(found))
