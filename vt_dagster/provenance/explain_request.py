"""The request to explain a result, the shape of the answer, and the order in which a run consumes
records."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from vt_dagster.columns import OFFSET, TIMESTAMP
from vt_dagster.provenance.explanation import Candidate, Reasoning, Record
from vt_dagster.provenance.log_reader import Condition, Log, as_micros, at_time, both
from vt_dagster.storage.arrow_reader import micros
from vt_dagster.storage.commit_log import Commit, Offsets


@dataclass(frozen=True)
class Derivation:
    """The inputs of a record.

    Args:
        parts: input records with their logs, in order of arrival; only the newest if there are many.
        count: the number of all input records; None = ``parts`` has all.
        candidates: other records, with the rule that selected or excluded each, see ``Explanation``.
        candidates_in_all: the number of all candidates.
    """

    parts: Sequence[tuple[Log, Record]] = ()
    count: int | None = None
    candidates: Sequence[Candidate] = ()
    candidates_in_all: int = 0


@dataclass(frozen=True)
class ExplainRequest:
    """A record of an operator's result, to find its inputs.

    Args:
        log: the result's log.
        record: the record.
        commit: the commit that wrote the record.
        reasoning: collects the rules that decided.
        inputs: the logs of the operator's inputs, by their names in commits.
        most: maximum number of inputs, and of candidates.
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
        """The commit before the record's; None = the record is from the first commit."""
        return self.log.before(self.commit)

    def start(self, name: str) -> Offsets:
        """Returns the run's start offsets in an input (inclusive)."""
        return {} if self.before is None else self.before.inputs.get(name, {})

    def end(self, name: str) -> Offsets:
        """Returns the run's end offsets in an input (exclusive)."""
        return self.commit.inputs.get(name, {})

    def is_new(self, name: str, record: Record) -> bool:
        """Returns whether this run consumed a record of an input, not an earlier or later run."""
        return self.turn(name, record) == 1

    def turn(self, name: str, record: Record) -> int:
        """Returns which run consumed a record of an input: 0 = an earlier run, 1 = this run, 2 = a
        later run, or none yet."""
        place = record.partition
        if record.offset < self.start(name).get(place, 0):
            return 0
        return 1 if record.offset < self.end(name).get(place, 0) else 2

    def results(self, at: bool = False, every: bool = False) -> list[Record]:
        """Returns the run's results of the record's key and partition, in order.

        Args:
            at: only results with the record's timestamp.
            every: also results of earlier runs.
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
        """Whether the run has several results for a key; never with ``emit="per_run"``."""
        place, key = self.record.partition, list(self.log.key)
        start = {place: 0 if self.before is None else self.before.next_offset.get(place, 0)}
        end = {place: self.commit.next_offset.get(place, 0)}
        rows = self.log.rows(both(), start, end, key)
        return rows.group_by(key).aggregate([]).num_rows < rows.num_rows

    @cached_property
    def newest_before(self) -> int | None:
        """The largest timestamp of the key's results before the run, epoch microseconds; None = there
        are none."""
        place = self.record.partition
        if self.before is None:
            return None
        end = {place: self.before.next_offset.get(place, 0)}
        rows = self.log.rows(self.log.same_key(self.record.values), end=end, only=[TIMESTAMP])
        return int(micros(rows, TIMESTAMP).max()) if rows.num_rows else None


@dataclass(frozen=True)
class Update:
    """The result of one input record in a run.

    Args:
        log: the log of the trigger.
        trigger: the input record.
        time: the result's timestamp, epoch microseconds.
        other: joins only: the other side's row; None = no match.
        made_of: the inputs besides the trigger.
    """

    log: Log
    trigger: Record
    time: int
    is_tombstone: bool
    other: Record | None
    made_of: Sequence[tuple[Log, Record]]


def triggering_update(request: ExplainRequest, times: Sequence[tuple[int, bool]]) -> int | None:
    """Returns the index of the update that became the record; None = it is ambiguous.

    Each update of a key is a result, with two exceptions: a versioned table refuses updates older than
    its retention, and with ``emit="per_run"`` only the last update of a run is a result.

    Args:
        times: the run's updates of the key in the record's partition, in order: timestamp (epoch
            microseconds) and whether it is a tombstone.
    """
    results = request.results()
    place = [one.offset for one in results].index(request.record.offset)
    if len(results) == len(times):
        return place
    if len(results) > len(times):
        request.reasoning.notes.append(
            "input records of its run are gone: the one that triggered it is not known"
        )
        return None
    if not request.log.versioned:
        request.reasoning.notes.append(
            f"its run had {len(times)} updates of its key; only the last one is a result"
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
    """The order in which a run consumes the records of its inputs, see ``Processor.in_order``.

    Args:
        names: the names of the inputs, from left to right; a name may be there twice.
        merges: whether a run merges partitions by time; else each partition keeps its offset order.
    """

    def __init__(self, request: ExplainRequest, names: Sequence[str], merges: bool = True) -> None:
        self._asked, self._names, self._merges = request, names, merges
        self._times: dict[tuple[str, int], tuple[Any, Any]] = {}

    def sorted(self, found: Sequence[tuple[int, Record]]) -> list[tuple[int, Record]]:
        """Returns records, each with the index of its input, in the order in which they were consumed.

        Records of earlier runs come first and those of later runs last; both are ordered by system
        time, and within a partition by offset.
        """
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
        """Returns stream time as of a record: the largest timestamp of its partition, from the run's
        start offset up to the record."""
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
