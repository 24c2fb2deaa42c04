"""Explains rows of joins: of tables, of a stream with a table, of two streams.

- Table-table, history and foreign-key joins: the triggering change, and the other row.
- Stream-stream joins: the two records that match, or why a record has no match.
- Stream-table joins: the version that matched, and when the record left the buffer.
- Corrected joins: the version that matches, and the records that corrected a row.
"""

from __future__ import annotations

import contextlib
import posixpath
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, TypeVar

import pyarrow as pa

from vt_dagster import rules
from vt_dagster.columns import (
    CAUSE,
    IS_TOMBSTONE,
    LEFT_OFFSET,
    LEFT_PARTITION,
    OFFSET,
    PARTITION,
    REVISION,
    RIGHT_OFFSET,
    RIGHT_PARTITION,
)
from vt_dagster.provenance.explain_request import (
    Arrivals,
    Candidate,
    Condition,
    Derivation,
    ExplainRequest,
    Log,
    Place,
    Record,
    Update,
    at_time,
    between,
    both,
    places_of,
    time_if_known,
    triggering_update,
)
from vt_dagster.provenance.explain_sources import AROUND, History, Version, horizons_of
from vt_dagster.provenance.expressions import evaluate, used
from vt_dagster.storage import delta
from vt_dagster.storage.commit_log import Commit, Offsets, last_known, last_that
from vt_dagster.storage.values import texts
from vt_dagster.topology import specification as spec
from vt_dagster.topology.durations import as_time, epoch_micros, length_at, spoken
from vt_dagster.topology.version_rules import EVER

Key = tuple[Any, ...]
"""A foreign key; a key with a null component matches nothing."""
LEFT, RIGHT = 0, 1


def table_table(request: ExplainRequest[spec.TableTableJoinSpec]) -> Derivation:
    """Returns the inputs of a result of a table-table join, see ``core.table_joins``."""
    join = request.specification
    names = [join.left, join.right]
    if request.misses_any():
        return Derivation()
    logs = [request.inputs[name] for name in names]
    found = [
        (place, record)
        for place, (name, log) in enumerate(zip(names, logs, strict=True))
        for record in _counted(log, request.same_key(log), request.end(name))
    ]
    rows: list[Record | None] = [None, None]
    updates: list[Update] = []
    for place, record in Arrivals(request, names).sorted(found):
        old, other = rows[place], rows[1 - place]
        rows[place] = None if record.is_tombstone else record
        if old is not None and repeats_version(logs[place], record, old):
            continue
        says, tombstone = _outcome(join.kind, place == LEFT, rows, old)
        if says and request.is_new(names[place], record):
            made_of = [(logs[1 - place], other), (logs[place], old if tombstone else None)]
            updates.append(_update(logs[place], record, other, tombstone, made_of))
    return _inputs_of(request, updates)


def of_histories(request: ExplainRequest[spec.HistoryJoinSpec]) -> Derivation:
    """Returns the inputs of a result of a history join: each side's version at the result's time, as of
    the run, see ``core.table_joins``."""
    made = list[tuple[Log, Record]]()
    for name in request.specification.inputs:
        log = request.inputs[name]
        if request.misses(name):
            continue
        found = log.records(request.same_key(log), end=request.end(name))
        until = [one for one in found if one.timestamp <= request.record.timestamp]
        version = max(until, key=lambda one: (one.timestamp, one.offset), default=None)
        if version is None:
            request.decide(rules.NO_MATCH, f"{name} had no version of its key then")
            continue
        decided = rules.DELETED if version.is_tombstone else rules.AS_OF
        request.decide(decided, f"{version}, from {version.timestamp}")
        made.append((log, version))
    return Derivation(made)


def _outcome(
    kind: str, from_left: bool, rows: Sequence[Record | None], old: Record | None
) -> tuple[bool, bool]:
    """Returns whether a change gives a result, and whether the result is a tombstone."""
    left, right = rows[LEFT] is not None, rows[RIGHT] is not None
    anything = left or right or old is not None
    if kind == "inner":
        return right if from_left else left, not (left and right)
    if kind == "left":
        return anything if from_left else left, not left
    return anything, not (left or right)


def repeats_version(log: Log, record: Record, old: Record) -> bool:
    """Returns whether a record equals its key's row before it in the columns of ``new_version_on``."""
    on = log.head.shape.new_version_on
    if on is None or record.is_tombstone:
        return False
    pairs = ((record.values[c], old.values[c]) for c in on)
    return all(new == before or (new != new and before != before) for new, before in pairs)  # NaN


def _counted(log: Log, condition: Condition, end: Offsets) -> list[Record]:
    """Returns the changes of a table that trigger a join: all but those out of order. If the log was
    truncated, the first one is the key's row as of the truncation."""
    found = log.records(condition, end=end)
    return [one for one in found if not log.versioned or one.is_latest]


def _update(
    log: Log,
    trigger: Record,
    other: Record | None,
    tombstone: bool,
    made_of: Sequence[tuple[Log, Record | None]],
) -> Update:
    times = [one.micros for one in (trigger, other) if one is not None]
    there = [(side, one) for side, one in made_of if one is not None]
    return Update(log, trigger, max(times), tombstone, other, there)


def _inputs_of(request: ExplainRequest[Any], updates: Sequence[Update]) -> Derivation:
    """Returns the inputs of the update that became the record."""
    place = triggering_update(request, [(one.time, one.is_tombstone) for one in updates])
    if place is None:
        request.note("the change that triggered it is ambiguous")
        return Derivation()
    one, reasoning = updates[place], request.reasoning
    reasoning.decide(rules.TRIGGERED, f"{one.trigger}{' (a tombstone)' * one.trigger.is_tombstone}")
    if any(row is not one.other for _, row in one.made_of):
        reasoning.note(
            f"before it the key had a row in {one.log.name}: the tombstone retracts that row's result"
        )
    if one.other is None:
        reasoning.decide(rules.NO_MATCH, "the other side had no row for it then")
    else:
        reasoning.decide(rules.LATEST, f"{one.other}, of {one.other.timestamp}")
    if request.record.micros > one.time:
        reasoning.note("its timestamp is that of an earlier result of its key: times never decrease")
    return Derivation([*one.made_of, (one.log, one.trigger)])


# ------------------------------------------------------------------------------------- by foreign key


def foreign_key(request: ExplainRequest[spec.ForeignKeyJoinSpec]) -> Derivation:
    """Returns the inputs of a result of a foreign-key join, see ``core.table_joins``."""
    join = request.specification
    names = [join.left, join.right]
    left, right = (request.inputs[name] for name in names)
    if request.misses_any():
        return Derivation()
    refers = _references(request, left, request.end(names[LEFT]))
    if refers is None:
        request.note(
            f"the foreign key {', '.join(join.foreign_key)} cannot be computed without Spark: "
            f"explain the rows of {left.name} and {right.name} by key"
        )
        return Derivation()
    found = [(LEFT, record) for record, _ in refers.values()]
    wanted = {key for _, key in refers.values() if key is not None}
    of_key: dict[Place, Key] = {}
    for key in wanted:
        same = right.same_key(dict(zip(right.key, key, strict=True)))
        for record in _counted(right, same, request.end(names[RIGHT])):
            of_key[record.place] = key
            found.append((RIGHT, record))
    kind = join.kind
    row: tuple[Record, Key | None] | None = None
    rights: dict[Key, Record] = {}
    updates: list[Update] = []
    for place, record in Arrivals(request, names).sorted(found):
        if place == LEFT:
            old, row = row, None if record.is_tombstone else refers[record.place]
            update = _after_left(kind, (left, right), record, old, row, rights)
        else:
            key = of_key[record.place]
            rights.pop(key, None)
            if not record.is_tombstone:
                rights[key] = record
            update = None
            if row is not None and row[1] == key and row[0].partition == request.record.partition:
                gone = kind == "inner" and record.is_tombstone
                update = Update(right, record, record.micros, gone, row[0], [(left, row[0])])
        if update is not None and request.is_new(names[place], record):
            updates.append(update)
    return _inputs_of(request, updates)


def _after_left(
    kind: str,
    logs: tuple[Log, Log],
    record: Record,
    old: tuple[Record, Key | None] | None,
    new: tuple[Record, Key | None] | None,
    rights: Mapping[Key, Record],
) -> Update | None:
    """Returns the result of a change of the left table; None = no result."""
    left, right = logs
    new_key, old_key = (None if one is None else one[1] for one in (new, old))
    wanted = new_key if kind == "left" else new_key or old_key
    found = None if wanted is None else rights.get(wanted)
    if kind == "left":
        applied, tombstone = new is not None or old is not None, new is None
    else:
        moved = old_key is not None and new_key != old_key
        applied = moved or (new_key is not None and found is not None)
        tombstone = new_key is None or found is None
    if not applied:
        return None
    before = old[0] if tombstone and old is not None else None
    return _update(left, record, found, tombstone, [(right, found), (left, before)])


def _references(
    request: ExplainRequest[spec.ForeignKeyJoinSpec], left: Log, end: Offsets
) -> dict[Place, tuple[Record, Key | None]] | None:
    """Returns the left key's changes that trigger a join, by place, each with its foreign key; None =
    computing the foreign key needs Spark."""
    expressions, same = request.specification.foreign_key, request.same_key(left)
    found = _counted(left, same, end)
    rows = left.rows(same, end=end, only=used(expressions, left.columns.names))
    columns = [evaluate(rows, sql) for sql in expressions]
    if any(column is None for column in columns):
        return None
    table = pa.table({str(i): column for i, column in enumerate(columns)})
    values = (tuple(row.values()) for row in texts(table))
    keys = dict(zip(places_of(rows), values, strict=True))
    return {one.place: (one, None if None in keys[one.place] else keys[one.place]) for one in found}


# ----------------------------------------------------------------------------- of streams with tables


Lookup = TypeVar("Lookup", bound=spec.LookupJoinSpec)


_MATCHES = (rules.AS_OF, rules.LATEST, rules.NEXT, rules.NEAREST, rules.FIRST_VERSION)
"""The rules by which a version is joined."""


@dataclass(frozen=True)
class Answer:
    """The result of a lookup.

    Args:
        version: the version at the record's time, even if it is a tombstone, too old or expired; None =
            there is none.
        rule: the rule by which the version matches, or does not.
    """

    version: Version | None
    rule: rules.Rule

    @property
    def place(self) -> Place | None:
        """The place of the version that is joined; None = no match."""
        return self.version.place if self.version is not None and self.rule in _MATCHES else None


def _stream_record(request: ExplainRequest[spec.StreamTableJoinSpec]) -> list[Record]:
    """Returns the stream record of a result; all candidates if it is ambiguous.

    A result has its record's key, time and partition. Records of one key and time leave a run in order
    of arrival and match the same version: so the n-th result belongs to the n-th record.
    """
    name, record, before = request.specification.left, request.record, request.before
    stream, start = request.inputs[name], Offsets()
    keyless = any(record.values.get(c) is None for c in request.log.key)
    emitted = EVER if before is None else before.emitted_up_to.get(record.partition, EVER)
    if keyless or record.micros <= emitted:
        # Earlier runs have already emitted all older records of that time.
        start = request.here(request.start(name))
    same = both(request.same_key(stream), at_time(record.timestamp))
    taken = stream.records(same, start, request.here(request.end(name)))
    taken = [one for one in taken if not one.is_tombstone]
    results = [one.offset for one in request.results(at=True)]
    if stream.limit and 0 < len(taken) < len(results):
        request.note(f"some records of its key and time are gone{stream.limit}")
    return taken if len(taken) != len(results) else [taken[results.index(record.offset)]]


def _note_waiting(request: ExplainRequest[spec.StreamTableJoinSpec], record: Record) -> None:
    """Adds whether a stream's record waited in the buffer, or was late, in a join with a grace
    period."""
    commit, reasoning, place = request.commit, request.reasoning, record.partition
    grace = request.of_run.grace_of(place)
    if request.record.is_late:
        now, period = commit.stream_time.get(place), spoken(grace)
        if now is None or record.micros + grace // timedelta(microseconds=1) < now:
            says = f"stream time was past {record.timestamp} by more than the grace period of {period}"
        else:
            says = f"later records had been emitted, by a shorter grace period than {period}"
        reasoning.decide(rules.LATE, f"it arrived when {says}: joined at once")
        return
    if not grace:
        reasoning.decide(rules.APPLIED, "the join has no grace period: joined by the run that read it")
        return
    taken = request.log.taken_by(request.specification.left, place, record.offset)
    if taken is None or taken.batch == commit.batch:
        when = "read and emitted by the same run"
    else:
        when = f"read by run {taken.batch}, recorded at {as_time(taken.recorded_at)}"
    reasoning.decide(
        rules.RELEASED,
        f"{when}; emitted when stream time was {time_if_known(commit.stream_time.get(place))}, at "
        f"least {spoken(grace)} after its timestamp",
    )


def _pinned(request: ExplainRequest[Lookup]) -> Commit | None:
    """Returns the last commit of the table that the run read; None = the run read none."""
    name, reasoning = request.specification.right, request.reasoning
    table, reads, batch = request.inputs[name], request.commit.reads, None
    part = next((part for part in ("log", "view") if f"{name}/{part}" in reads), None)
    if part is None:
        return None
    if request.commit.has_read(name, table.head.log):
        with contextlib.suppress(FileNotFoundError):
            batch = _batch_at(posixpath.join(table.root, part), reads[f"{name}/{part}"])
    if batch is not None:
        found = last_that(table.root, lambda one: one["batch"] <= batch)
        if found is not None:
            if table.head.truncation is not None and found.batch < table.head.truncation.batch:
                reasoning.note(f"the lookup in {name} is repeated on the rest of its log{table.limit}")
            return found
    reasoning.note(
        f"the Delta versions of {name} that the run read are gone: the lookup is repeated on its state "
        "by recorded_at"
    )
    found = last_that(table.root, lambda one: one["recorded_at"] <= request.commit.recorded_at)
    if found is None:
        reasoning.note(
            f"all records of {name} were recorded later, for example by a replay: the lookup is "
            "repeated on its state now"
        )
    return found or table.head


def _batch_at(path: str, version: int) -> int | None:
    """Returns the batch of a Delta version of a log or view; None = not known."""
    while version >= 0:
        found = delta.our_commit(path, version)
        if found is not None:
            return int(found.document["batch"])
        version -= 1  # a compaction: it has no commit of ours, and the rows of the version before
    return None


def _known_until(join: spec.LookupJoinSpec, record: Record) -> int | None:
    """Returns the system time up to which versions count for a record (inclusive), epoch microseconds;
    None = all versions count."""
    if isinstance(join.as_known, timedelta):
        return epoch_micros(record.timestamp + join.as_known)
    return None if join.as_known == "now" else epoch_micros(record.recorded_at or record.timestamp)


def _answer(
    table: Log,
    found: Sequence[Version],
    moment: datetime,
    commit: Commit,
    join: spec.LookupJoinSpec,
    drops_expired: bool = True,
) -> Answer:
    """Looks up a time among the versions of a key (oldest first; for a plain table the row), as
    ``core.as_of_join`` does. With ``drops_expired``, expired versions do not match."""
    if not table.versioned:
        return Answer(found[-1], rules.LATEST) if found else Answer(None, rules.NO_MATCH)
    horizons = horizons_of(table, commit) if drops_expired and join.before_first is None else {}

    def is_before_history(version: Version) -> bool:
        horizon = horizons.get(version.place.partition)
        return horizon is not None and moment < as_time(horizon)

    if join.looks_ahead:
        return _ahead(found, moment, join, is_before_history)
    before = join.at == "before"
    valid = next(
        (v for v in reversed(found) if v.begin < moment or (v.begin == moment and not before)), None
    )
    if valid is None:
        first = None if join.before_first is None else next(filter(_has_value, found), None)
        return Answer(first, rules.NO_MATCH if first is None else rules.FIRST_VERSION)
    if join.max_age is not None and moment - valid.begin > join.max_age:
        return Answer(valid, rules.TOO_OLD)
    if valid.end is not None and (valid.end < moment or (valid.end == moment and not before)):
        return Answer(valid, rules.ENDED)
    if valid.end is not None and is_before_history(valid):
        return Answer(valid, rules.HORIZON)
    if valid.is_tombstone:
        return Answer(valid, rules.DELETED)
    return Answer(valid, rules.AS_OF)


def _has_value(version: Version) -> bool:
    """Returns whether a version has a value, and was valid at some time."""
    return not version.is_tombstone and (version.end is None or version.end > version.begin)


def _ahead(
    found: Sequence[Version],
    moment: datetime,
    join: spec.LookupJoinSpec,
    is_before_history: Callable[[Version], bool],
) -> Answer:
    """Looks up a time with ``at_or_after``, ``after`` or ``nearest``, see :func:`_answer`."""
    exact = join.at == "at_or_after"
    later = (v for v in found if v.begin > moment or (exact and v.begin == moment))
    ahead = next(filter(_has_value, later), None)
    near = [] if ahead is None or is_before_history(ahead) else [ahead]
    if join.at == "nearest":
        back = next((v for v in reversed(found) if v.begin <= moment), None)
        if back is not None and _has_value(back):
            valid = back.end is None or (moment < back.end and not is_before_history(back))
            near = [back, *near] if valid else near
    if not near:
        return Answer(ahead, rules.NO_MATCH if ahead is None else rules.HORIZON)
    best = min(near, key=lambda v: abs(moment - v.begin))  # of two equally near the first: the earlier
    if join.max_age is not None and abs(moment - best.begin) > join.max_age:
        return Answer(best, rules.TOO_OLD)
    return Answer(best, rules.NEAREST if join.at == "nearest" else rules.NEXT)


@dataclass(frozen=True)
class Looked:
    """A lookup in a table.

    Args:
        history: the key's history.
        then: the result as of the run.
        now: the result by current knowledge.
        shown: the candidates around the record's time.
        count: the number of all versions of the key.
        expired: whether the run did not find the version of ``now`` because it had expired.
    """

    history: History
    then: Answer
    now: Answer
    shown: tuple[Candidate, ...]
    count: int
    expired: bool


def _look_up(
    request: ExplainRequest[Lookup], values: Sequence[object], moment: datetime, seen: Commit | None
) -> Looked:
    """Looks up a key at a time, as of the last commit that the run read (None = it read none), and by
    current knowledge."""
    join, table = request.specification, request.inputs[request.specification.right]
    key = None if any(one is None for one in values) else table.of_key(values)
    history = History(table, key)
    now, last_places, last_repeats = history.versions(table.commit, moment, without_expired=False)
    then, first_places, first_repeats = (
        ([], set(), set()) if seen is None else history.versions(seen, moment)
    )
    first = _answer(table, then, moment, seen or table.commit, join)
    last = _answer(table, now, moment, table.commit, join, drops_expired=False)
    then_by, now_by = {v.place: v for v in then}, {v.place: v for v in now}
    known = last.place is not None and _knows(seen, last.place)
    expired = known and last.place not in {*then_by, *first_repeats}
    if first.version is None and known:
        first = Answer(None, rules.EXPIRED)
    every = sorted((now_by | then_by).values(), key=lambda v: (v.begin, v.place.offset))
    near = [i for i, v in enumerate(every) if v.begin <= moment]
    middle = near[-1] if near else 0
    around = range(max(0, middle - AROUND), middle + AROUND + 1)

    def candidate(version: Version) -> Candidate:
        place = version.place
        known = _knows(seen, place)
        if first.version is not None and first.version.place == place:
            rule = first.rule
        elif place in (first_repeats if place in now_by else last_repeats):
            rule = rules.REPEATED
        elif place in now_by and place not in then_by:
            rule = rules.EXPIRED if known else rules.RECORDED_SINCE
        else:
            rule = rules.OTHER_TIME if place in now_by else rules.REPLACED
        return Candidate(
            history.record(place),
            version.begin if table.versioned else None,
            then_by[place].end if place in then_by else None,
            now_by[place].end if place in now_by else None,
            known,
            first.place == place,
            last.place == place,
            rule.name,
        )

    shown = [v for i, v in enumerate(every) if i in around or v.place in (first.place, last.place)]
    history.fetch([v.place for v in shown])
    count = len(last_places | first_places)
    return Looked(history, first, last, tuple(map(candidate, shown)), count, expired)


def _knows(commit: Commit | None, place: Place) -> bool:
    """Returns whether the log contains a record as of a commit."""
    return commit is not None and place.offset < commit.next_offset.get(place.partition, 0)


# ------------------------------------------------------------------------------------------- the result


def stream_table(request: ExplainRequest[spec.StreamTableJoinSpec]) -> Derivation:
    """Returns the inputs of a result of a stream-table join, see ``core.stream_table_join``."""
    left = request.specification.left
    stream, reasoning = request.inputs[left], request.reasoning
    lefts = _stream_record(request)
    if not lefts:
        reasoning.note(f"its record of {left} is gone{stream.limit}")
    elif len(lefts) > 1:
        reasoning.note(f"its input is one of {len(lefts)} records of its key and time")
    for one in lefts[:1]:
        _note_waiting(request, one)
    values = [request.record.values[c] for c in request.log.key]
    parts = [(stream, one) for one in lefts[: request.most]]
    return _joined(request, lefts[0] if lefts else request.record, values, parts)


def _joined(
    request: ExplainRequest[Lookup],
    record: Record,
    values: Sequence[object],
    parts: Sequence[tuple[Log, Record]],
) -> Derivation:
    """Repeats the lookup of a stream record in the table, by the values of its key; returns the records
    of the stream and the joined version as inputs."""
    right, seen = request.specification.right, _pinned(request)
    table, cut = request.inputs[right], _known_until(request.specification, record)
    if cut is not None and seen is not None and seen.recorded_at > cut:
        seen = last_known(table.root, cut, table.head.stepped)
        request.note(f"versions of {right} that were recorded after {as_time(cut)} do not count")
    looked = _look_up(request, values, record.timestamp, seen)
    removed, place = table.head.truncation, looked.then.place
    lost = removed is not None and seen is not None and seen.batch < removed.batch
    if not lost or None in values or (place is not None and place == looked.now.place):
        _note_looked(request, looked, record.timestamp, as_known=cut is not None)
    else:  # one that is gone may have matched, or replaced this one
        request.note(f"a version of {right} that is gone may have matched{table.limit}")
    version = [] if place is None else [(table, looked.history.record(place))]
    return Derivation([*parts, *version], None, looked.shown, looked.count)


def _note_looked(
    request: ExplainRequest[Lookup], looked: Looked, moment: datetime, as_known: bool
) -> None:
    """Adds the result of the lookup, and the result by current knowledge if it differs."""
    then, now, name = looked.then, looked.now, request.specification.right
    table, reasoning = request.inputs[name], request.reasoning
    if then.version is None:
        reasoning.decide(then.rule, f"{name} had no row of its key as of {moment} at the run's lookup")
    else:
        end = "now" if then.version.end is None else str(then.version.end)
        valid = f", valid from {then.version.begin} to {end}" if table.versioned else ""
        reasoning.decide(then.rule, f"{name} {then.version.place}{valid}")
    if then.place == now.place:
        return
    says = "nothing"
    if now.place is not None:
        recorded = looked.history.record(now.place).recorded_at or "no known time"
        says = f"{name} {now.place}, recorded at {recorded}"
    if not table.versioned:
        reasoning.note(f"{name} is a plain table, which has changed since: the match now is {says}")
    elif as_known:
        reasoning.note(f"with all that is known now, the match would be {says}")
    elif looked.expired or then.rule in (rules.HORIZON, rules.EXPIRED):
        reasoning.note(f"with a longer history retention of {name}, the match would be {says}")
    else:
        reasoning.decide(rules.CORRECTED, f"with what is known now, the match would be {says}")


def corrected(request: ExplainRequest[spec.CorrectedJoinSpec]) -> Derivation:
    """Returns the inputs of a row of a corrected join, see ``core.stream_table_join``."""
    left = request.specification.left
    stream, reasoning = request.inputs[left], request.reasoning
    mine, others = _revisions(request)
    partition, offset = mine.get(LEFT_PARTITION, request.record.partition), mine.get(LEFT_OFFSET)
    record = None if offset is None else stream.one(partition, offset)
    if record is None:
        reasoning.note(f"its record of {left} is gone{stream.limit}")
        return Derivation()
    cause, first = mine[CAUSE], "from the first join of its stream record"
    if cause is not None:
        reasoning.decide(rules.CORRECTED, f"revision {mine[REVISION]}, by {_spoken(cause)}")
    else:
        reasoning.decide(rules.APPLIED, f"revision {mine[REVISION]}: {first}")
    for one in others[-request.most :]:
        by = first if one[CAUSE] is None else f"by {_spoken(one[CAUSE])}"
        gone = ", a tombstone" * one[IS_TOMBSTONE]
        reasoning.note(f"revision {one[REVISION]} at {_place_of(one)}{gone}: {by}")
    values = [record.values[c] for c in stream.key]
    made = _joined(request, record, values, [(stream, record)])
    table = request.inputs[request.specification.right]
    there = {(log.name, part.place) for log, part in made.parts}
    causes = table.at([_place_of(cause)]) if cause and request.record.is_tombstone else []
    gone = [(table, one) for one in causes if (table.name, one.place) not in there]
    return Derivation([*made.parts, *gone], None, made.candidates, made.candidates_in_all)


def _revisions(request: ExplainRequest[Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Returns the record's row, and the other rows of its key in order; each is a revision."""
    end = request.here(request.log.commit.next_offset)
    only = [REVISION, CAUSE, IS_TOMBSTONE, LEFT_OFFSET, LEFT_PARTITION]
    rows = request.log.rows(request.same_key(request.log), end=end, only=only).to_pylist()
    place = [one[OFFSET] for one in rows].index(request.record.offset)
    return rows[place], rows[:place] + rows[place + 1 :]


def _place_of(row: Mapping[str, Any]) -> Place:
    return Place(row[PARTITION], row[OFFSET])


def _spoken(cause: Mapping[str, Any]) -> str:
    return f"{cause['table']} {_place_of(cause)}"


# ----------------------------------------------------------------------------------------- of streams


_PLACES = ((LEFT_PARTITION, LEFT_OFFSET), (RIGHT_PARTITION, RIGHT_OFFSET))
_AROUND = 2
"""Number of records shown before and after the window of a record without a match."""
Chosen = Callable[[int, Record | None], bool]
"""Whether a result's columns have the values of a side's record; None = a side without a match."""


def stream_stream(request: ExplainRequest[spec.StreamStreamJoinSpec]) -> Derivation:
    """Returns the inputs of a result of a stream-stream join, see ``core.stream_stream_join``."""
    join = request.specification
    names = [join.left, join.right]
    logs = [request.inputs[name] for name in names]
    place, reasoning = request.record.partition, request.reasoning
    before, after = length_at(join.before, place), length_at(join.after, place)
    moment, sides = request.record.timestamp, list[list[Record]]()
    gone = list[bool]()
    for name, log, back in zip(names, logs, (after, before), strict=True):
        since = epoch_micros(moment - max(back, timedelta(0)))
        gone.append(request.misses(name, since) or request.misses_earlier(name, since))
        found = log.records(both(request.same_key(log), between(since, request.record.micros)))
        sides.append([r for r in found if not r.is_tombstone and request.turn(name, r) < 2])
    lefts, rights = sides
    of_side = _chosen(request, logs)
    pairs = [
        (left, right)
        for left in lefts
        for right in rights
        if max(left.timestamp, right.timestamp) == moment
        and left.timestamp - before <= right.timestamp <= left.timestamp + after
        and (request.is_new(names[0], left) or request.is_new(names[1], right))
        and of_side(0, left)
        and of_side(1, right)
    ]
    if request.record.is_late:
        reasoning.decide(rules.LATE, "the later of the two by arrival came after the grace period")
    if pairs and any(gone) and len(pairs) < len(_alike(request)):
        request.note("its run has equal results: which of them is of the records left is not known")
        return Derivation()
    if pairs:
        return _matched(request, names, logs, pairs)
    kept = {"inner": (), "left": (0,), "outer": (0, 1)}[join.kind]
    for side in (side for side in kept if of_side(1 - side, None)):
        alone = [one for one in sides[side] if one.timestamp == moment and of_side(side, one)]
        if alone and gone[1 - side]:
            request.note("whether it had a match is not known")
            return Derivation([(logs[side], _nth(request, alone))])
        if alone:
            return _alone(request, logs, side, _nth(request, alone), (before, after))
    reasoning.note("its input records are gone")
    return Derivation()


def _chosen(request: ExplainRequest[spec.StreamStreamJoinSpec], logs: Sequence[Log]) -> Chosen:
    """Returns a predicate: whether a side's record has the values of the result's columns that are
    copied from that side."""
    columns = [log.columns.names for log in logs]
    values, key = request.record.values, request.log.key
    found = [
        (("left", "right").index(side), column, values[name])
        for name, side, column in request.specification.copied(*columns)
        if name in values and name not in key
    ]

    def has(side: int, record: Record | None) -> bool:
        mine = [(column, value) for place, column, value in found if place == side]
        if record is None:
            return all(value is None for _, value in mine)
        return all(record.values[c] == value for c, value in mine if c in record.values)

    return has


def _alike(request: ExplainRequest[Any]) -> list[Record]:
    """Returns the run's results that equal the explained one, in order."""
    return [one for one in request.results(at=True) if dict(one.values) == dict(request.record.values)]


def _nth(request: ExplainRequest[Any], found: Sequence[Any]) -> Any:
    """Returns the candidate at the position that the result has among equal results."""
    alike = _alike(request)
    if len(found) > 1 and len(found) != len(alike):
        request.note(f"{len(found)} candidates cannot be told apart: this is one of them")
        return found[0]
    return found[[one.offset for one in alike].index(request.record.offset)] if found[1:] else found[0]


def _matched(
    request: ExplainRequest[Any],
    names: Sequence[str],
    logs: Sequence[Log],
    pairs: Sequence[tuple[Record, Record]],
) -> Derivation:
    records = [(side, one) for pair in pairs for side, one in enumerate(pair)]
    turns = enumerate(Arrivals(request, names).sorted(records))
    ordered = {(side, one.place): turn for turn, (side, one) in turns}

    def place(pair: tuple[Record, Record]) -> tuple[int, datetime, int]:
        at = [ordered[side, one.place] for side, one in enumerate(pair)]
        first = pair[at.index(min(at))]
        return max(at), first.timestamp, first.offset

    left, right = _nth(request, sorted(pairs, key=place))
    late = ordered[0, left.place] > ordered[1, right.place]
    _note_match(request, left, right)
    request.decide(rules.TRIGGERED, f"{left if late else right}, which came after the other")
    parts = [(logs[0], left), (logs[1], right)]
    return Derivation(parts[::-1] if late else parts)


def _note_match(request: ExplainRequest[Any], left: Record, right: Record) -> None:
    apart = right.timestamp - left.timestamp
    where = spoken(abs(apart)) + (" before it" if apart < timedelta(0) else " after it")
    request.decide(rules.MATCHED, f"{right} lies {where if apart else 'at the time of'} {left}")


def _alone(
    request: ExplainRequest[spec.StreamStreamJoinSpec],
    logs: Sequence[Log],
    side: int,
    record: Record,
    window: tuple[timedelta, timedelta],
) -> Derivation:
    """Returns a record without a match, with the other side's records around it as candidates."""
    before, after = window if side == 0 else (window[1], window[0])
    low, high = record.timestamp - before, record.timestamp + after
    name = request.specification.inputs[1 - side]
    other = logs[1 - side]
    if any(record.values.get(c) is None for c in logs[side].key):
        request.decide(rules.NO_MATCH, "a record without a key has no match: emitted at once")
        return Derivation([(logs[side], record)])
    request.decide(
        rules.NO_MATCH,
        f"{name} had no record of its key from {low} to {high}, both inclusive, when stream time had "
        f"passed {high} and the grace period",
    )
    near = [one for one in other.records(request.same_key(other)) if not one.is_tombstone]
    near.sort(key=lambda one: (one.timestamp, one.offset))
    inside = [one for one in near if low <= one.timestamp <= high]
    around = [one for one in near if one.timestamp < low][-_AROUND:] + inside
    around += [one for one in near if one.timestamp > high][:_AROUND]
    shown = list[Candidate]()
    for one in around[: request.most]:
        rule = rules.RECORDED_SINCE if one in inside else rules.OTHER_TIME
        shown.append(Candidate.left_out(one, rule, known=request.turn(name, one) < 2))
    return Derivation([(logs[side], record)], None, shown, len(near))


def corrected_streams(request: ExplainRequest[spec.CorrectedStreamJoinSpec]) -> Derivation:
    """Returns the inputs of a row of a corrected stream-stream join, see
    ``core.stream_stream_join``: the row's key has the places of its records."""
    reasoning, parts = request.reasoning, list[tuple[Log, Record]]()
    for name, (partition, offset) in zip(request.specification.inputs, _PLACES, strict=True):
        log, place = request.inputs[name], request.record.values
        if place[offset] < 0:
            continue
        found = log.one(place[partition], place[offset])
        if found is None:
            reasoning.note(f"its record of {log.name} is gone{log.limit}")
            return Derivation(parts)
        parts.append((log, found))
    if request.record.is_late:
        reasoning.decide(rules.LATE, "the later of its records by arrival came after corrected_for")
    if len(parts) == len(_PLACES):
        _note_match(request, parts[0][1], parts[1][1])
        return Derivation(parts)
    cause = _revisions(request)[0][CAUSE]
    if cause is None:
        name, why = parts[0][0].name, "when stream time had passed its window and the grace period"
        reasoning.decide(rules.NO_MATCH, f"this record of {name} had no match {why}")
        return Derivation(parts)
    by = f"retracted by {_spoken(cause)}, a match that came later"
    reasoning.decide(rules.CORRECTED, f"revision 1: {by}")
    other = request.inputs[cause["table"]]
    return Derivation([*parts, *[(other, one) for one in other.at([_place_of(cause)])]])
