"""A question about a record of an operator's result, the shape of its answer, and the order in which
its run took records."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from vt_dagster.columns import OFFSET, TIMESTAMP
from vt_dagster.provenance.explanation import Candidate, Reasoning, Record
from vt_dagster.provenance.log_reader import Condition, Log, as_micros, at_time, both
from vt_dagster.storage.arrow_fold import micros
from vt_dagster.storage.commit_log import Commit, Offsets


@dataclass(frozen=True)
class Derivation:
    """What a record was made of.

    Args:
        parts: the records that it was made of with their logs, in order of arrival; of many the newest.
        count: of all of them; None = there are no others.
        candidates: what else may have been in it, and why it is not, see ``Explanation``.
    """

    parts: Sequence[tuple[Log, Record]] = ()
    count: int | None = None
    candidates: Sequence[Candidate] = ()
    candidates_in_all: int = 0


@dataclass(frozen=True)
class ExplainRequest:
    """A record of an operator's result whose parts are asked for.

    Args:
        log: the result's.
        commit: that the record came by.
        reasoning: to which the rules that decided are added.
        inputs: the operator's inputs, by the names that commits have of them.
        most: so many parts, and so many candidates, are named at most.
    """

    log: Log
    record: Record
    commit: Commit
    reasoning: Reasoning
    inputs: Mapping[str, Log]
    most: int

    @property
    def meaning(self) -> Mapping[str, str]:
        return self.log.meaning

    @cached_property
    def before(self) -> Commit | None:
        """The commit before the record's; None = it came by the first one."""
        return self.log.before(self.commit)

    def start(self, name: str) -> Offsets:
        """Where the run began in an input."""
        return {} if self.before is None else self.before.inputs.get(name, {})

    def end(self, name: str) -> Offsets:
        """Where it ended, exclusive."""
        return self.commit.inputs.get(name, {})

    def is_new(self, name: str, record: Record) -> bool:
        """Whether a record of an input was taken by the run, not by one before it or after it."""
        return self.turn(name, record) == 1

    def turn(self, name: str, record: Record) -> int:
        """When a record of an input was taken: 0 = before the run, 1 = by it, 2 = since."""
        place = record.partition
        if record.offset < self.start(name).get(place, 0):
            return 0
        return 1 if record.offset < self.end(name).get(place, 0) else 2

    def results(self, at: bool = False, every: bool = False) -> list[Record]:
        """The run's results of the record's key and partition, in order.

        Args:
            at: only those of its timestamp.
            every: those of earlier runs too.
        """
        place, first = self.record.partition, 0
        if not every and self.before is not None:
            first = self.before.next_offset.get(place, 0)
        same: Condition = self.log.same_key(self.record.values)
        if at:
            same = both(same, at_time(self.record.timestamp))
        return self.log.records(same, {place: first}, {place: self.commit.next_offset.get(place, 0)})

    @cached_property
    def tells_each_update(self) -> bool:
        """Whether the run has several results of a key: with ``emit="per_run"`` none has."""
        place, key = self.record.partition, list(self.log.key)
        start = {place: 0 if self.before is None else self.before.next_offset.get(place, 0)}
        end = {place: self.commit.next_offset.get(place, 0)}
        rows = self.log.rows(both(), start, end, key)
        return rows.group_by(key).aggregate([]).num_rows < rows.num_rows

    @cached_property
    def newest_before(self) -> int | None:
        """The largest timestamp of the key's results before the run: epoch microseconds."""
        place = self.record.partition
        if self.before is None:
            return None
        end = {place: self.before.next_offset.get(place, 0)}
        rows = self.log.rows(self.log.same_key(self.record.values), end=end, only=[TIMESTAMP])
        return int(micros(rows, TIMESTAMP).max()) if rows.num_rows else None


@dataclass(frozen=True)
class Update:
    """What a record gave, when the run took it.

    Args:
        trigger: that record, and ``log`` its log.
        time: of the result, epoch microseconds.
        other: of a join, the other side's row; None = there was none.
        made_of: what it was made of besides the trigger.
    """

    log: Log
    trigger: Record
    time: int
    is_tombstone: bool
    other: Record | None
    made_of: Sequence[tuple[Log, Record]]


def triggering_update(request: ExplainRequest, times: Sequence[tuple[int, bool]]) -> int | None:
    """Which of a run's updates of a key became the record; None = that cannot be told.

    Each update is a result. But a versioned table refuses what is older than its retention, and with
    ``emit="per_run"`` only a run's last update is one.

    Args:
        times: of each update in order, in the record's partition: the timestamp that it had (epoch
            microseconds), and whether it was a tombstone.
    """
    results = request.results()
    place = [one.offset for one in results].index(request.record.offset)
    if len(results) == len(times):
        return place
    if len(results) > len(times):
        request.reasoning.notes.append(
            "records of its run are not there any more: it cannot be told which one"
        )
        return None
    if not request.log.versioned:
        request.reasoning.notes.append(
            f"of {len(times)} updates of its run only the last one is a result"
        )
        return len(times) - 1 if len(results) == 1 else None
    found, rest = -1, enumerate(times)
    for one in results[: place + 1]:
        mine = as_micros(one.timestamp), one.is_tombstone
        found = next((i for i, (time, dead) in rest if dead == mine[1] and time <= mine[0]), None)
        if found is None:
            return None
    return found


class Arrivals:
    """The order in which a run took the records of an operator's inputs, see ``Processor.in_order``.

    Args:
        names: of the inputs, from left to right; one may be there twice.
        merges: whether a run orders them by time; else each partition's stay as they are.
    """

    def __init__(self, request: ExplainRequest, names: Sequence[str], merges: bool = True) -> None:
        self._asked, self._names, self._merges = request, names, merges
        self._times: dict[tuple[str, int], tuple[Any, Any]] = {}

    def sorted(self, found: Sequence[tuple[int, Record]]) -> list[tuple[int, Record]]:
        """Records, each with the number of its input, in that order. Those of earlier runs come first,
        those taken since last: of one partition by offset, of several by when they were recorded."""
        runs: tuple[list[tuple[int, Record]], ...] = ([], [], [])
        for place, record in found:
            runs[self._asked.turn(self._names[place], record)].append((place, record))
        earlier, new, later = runs
        alone = len({(self._names[place], record.partition) for place, record in new}) < 2
        new.sort(key=lambda one: (one[1].offset, one[0]) if alone else self._order(*one))
        for some in (earlier, later):
            some.sort(key=lambda one: (_recorded(one[1]), one[1].offset, one[0], one[1].partition))
        return [*earlier, *new, *later]

    def _order(self, place: int, record: Record) -> tuple[int, ...]:
        names = self._names
        name = names[place]
        twice = names.count(name) > 1
        sequence = record.offset * len(names) + place if twice else record.offset
        moment = self._stream_time(name, record) if self._merges else record.offset
        return moment, names.index(name), record.partition, sequence

    def _stream_time(self, name: str, record: Record) -> int:
        """The largest timestamp of the record's partition, from where the run began up to it."""
        key = name, record.partition
        if key not in self._times:
            place = record.partition
            start = {place: self._asked.start(name).get(place, 0)}
            end = {place: self._asked.end(name).get(place, 0)}
            rows = self._asked.inputs[name].rows(both(), start, end, [TIMESTAMP])
            newest = np.maximum.accumulate(micros(rows, TIMESTAMP))
            self._times[key] = rows.column(OFFSET).to_numpy(), newest
        offsets, newest = self._times[key]
        return int(newest[np.searchsorted(offsets, record.offset)])


def _recorded(record: Record) -> int:
    return 0 if record.recorded_at is None else as_micros(record.recorded_at)
