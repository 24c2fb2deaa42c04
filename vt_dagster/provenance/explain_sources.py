"""Explains records of sources and versions of tables: where they come from, and which rule decided.

It finds the origin of a source's record, rejected rows in its quarantine, the versions of a key, and
the place of a record among them.
"""

from __future__ import annotations

import gzip
import json
import posixpath
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from vt_dagster import rules
from vt_dagster.columns import (
    IS_TOMBSTONE,
    OFFSET,
    PARTITION,
    PROPAGATED_FROM,
    PROVIDED_COLUMNS,
    RECORDED_AT,
    TIMESTAMP,
    VALID_TO,
)
from vt_dagster.provenance.explain_request import (
    Condition,
    Log,
    Origin,
    Place,
    Reasoning,
    Record,
    Rejected,
    both,
    places_of,
)
from vt_dagster.storage import delta
from vt_dagster.storage.arrow_reader import (
    clip_at_valid_until,
    fold,
    micros,
    rows_of,
    values_by_partition,
)
from vt_dagster.storage.commit_log import Commit
from vt_dagster.topology.durations import as_time, epoch_micros, spoken

NAMED = 20
"""Maximum number of named files, or rejected rows."""
_RAW = 500


def origin(log: Log, record: Record, commit: Commit) -> Origin | None:
    """Returns the origin of a source's record; None = not recorded.

    Args:
        commit: the commit that wrote the record.
    """
    taken, snapshot = commit.taken, commit.start
    if snapshot is not None and snapshot.batch == commit.batch:
        first, end = snapshot.offsets.get(record.partition, (0, 0))
        if first <= record.offset < end:
            return Origin("snapshot", (snapshot.what,), 1)
    # The id of a Delta table is there too, with a time.
    if len(taken) == 1 and all("@" not in commit.topics.get(one, "@") for one in taken):
        return _of_topic(log, record, commit)
    ranges = [one for some in taken.values() for one in some.values()]
    start, end = ranges[0] if len(taken) == 1 == len(ranges) else (None, None)
    if commit.deliveries:
        kind, names = "deliveries", sorted(commit.deliveries)
    elif "files" in taken:
        kind, names = "files", _files(log, commit.batch)
    elif taken:
        kind, names = "versions", sorted(taken)
    else:
        return None
    return Origin(kind, tuple(names[:NAMED]), len(names), start, end)


def _files(log: Log, batch: int) -> list[str]:
    """Returns the files that a run consumed; empty = not recorded any more."""
    path = posixpath.join(log.root, "attempts", log.head.attempt, "files.json.gz")
    fs, local = delta.filesystem(path)
    try:
        known = json.loads(gzip.decompress(fs.cat_file(local)))
    except OSError:
        return []
    return sorted(n for n, one in known.items() if isinstance(one, list) and one[-1] == batch)


def _of_topic(log: Log, record: Record, commit: Commit) -> Origin:
    """Returns the topic of a record, with its partition's range of offsets. The record's own offset is
    known only if all missing offsets of the run are in quarantine."""
    ((topic, ranges),) = commit.taken.items()
    if record.partition not in ranges:
        return Origin("topic", (topic,), 1)
    start, end = ranges[record.partition]
    before = log.before(commit)
    first = 0 if before is None else before.next_offset.get(record.partition, 0)
    applied = commit.next_offset.get(record.partition, 0) - first
    if commit.start is not None and commit.start.batch == commit.batch:
        begin, end_ = commit.start.offsets.get(record.partition, (0, 0))
        applied -= end_ - begin
    if commit.counts.get(rules.CARRIED.name) or commit.counts.get(rules.NOTHING_NEW.name):
        return Origin("topic", (topic,), 1, start, end)
    batch, partition = pc.field("batch") == commit.batch, pc.field(PARTITION) == record.partition
    rows = quarantine(log, batch & partition)
    gone = set[Any]() if rows is None else {*rows.column("position").to_pylist()}
    there = [offset for offset in range(start, end) if offset not in gone]
    place = there[record.offset - first] if len(there) == applied else None
    return Origin("topic", (topic,), 1, start, end, place)


def quarantine(log: Log, condition: Any) -> pa.Table | None:
    """Returns the rows of an asset's quarantine that meet a condition; None = it has no quarantine."""
    path = posixpath.join(log.root, "quarantine")
    found = delta.last_commit(path)
    return None if found is None else rows_of(path, found.version, lambda _: condition)


def rejected(log: Log, key: Sequence[Any], reason: str | None = None) -> tuple[list[Rejected], int]:
    """Returns rows of an asset's quarantine that mention a key, newest first, and the number of all.

    Args:
        key: the key's values; a row mentions the key if its raw text contains all of them.
        reason: only rows with this reason; None = any.
    """
    rows = quarantine(log, None if reason is None else pc.field("reason") == reason)
    if rows is None:
        return [], 0
    rows = rows.filter(pc.field("batch") <= log.commit.batch)
    for value in key:
        text = value if isinstance(value, bytes) else str(value)
        raw = rows.column("raw")
        if pa.types.is_binary(raw.type) or pa.types.is_large_binary(raw.type):
            text = text.encode() if isinstance(text, str) else text
        options = pc.MatchSubstringOptions(text)
        mentions = pc.call_function("match_substring", [raw], options)
        rows = rows.filter(mentions)  # a null raw text does not match
    rows = rows.sort_by([("batch", "descending")])
    names = ["reason", "source", "position", "raw", "batch"]
    found: list[Rejected] = []
    for row in rows.slice(0, NAMED).select(names).to_pylist():
        raw = row.pop("raw")
        text = raw.decode("utf-8", "backslashreplace") if isinstance(raw, bytes) else str(raw)
        found.append(Rejected(**row, raw=text[:_RAW]))
    return found, rows.num_rows


# Version history


AROUND = 2
"""Number of versions shown before and after a version."""


@dataclass(frozen=True)
class Version:
    """A row of a table with its validity.

    Args:
        place: partition and offset of its record.
        begin: start of validity (inclusive).
        end: end of validity (exclusive); None = current.
    """

    place: Place
    begin: datetime
    end: datetime | None
    is_tombstone: bool


class History:
    """The versions of a key in a table.

    Args:
        log: the table's log.
        key: the condition that a record has the key; None = a null key, which has no records.
    """

    def __init__(self, log: Log, key: Condition | None) -> None:
        self.log = log
        shape = log.head.shape
        self._valid_until, self._new_version_on = shape.valid_until, shape.new_version_on
        more = [*filter(None, [self._valid_until]), *(self._new_version_on or ())]
        only = dict.fromkeys([*log.key, TIMESTAMP, RECORDED_AT, IS_TOMBSTONE, *more])
        self._rows = log.rows(key or both(), end=None if key else {}, only=list(only))
        self._records: dict[Place, Record] = {}

    def versions(
        self, commit: Commit, moment: datetime, without_expired: bool = True
    ) -> tuple[list[Version], set[Place], set[Place]]:
        """Returns the versions around a time as of a commit, oldest first: the valid one, some before
        it, and some after it, at least up to the first with a value; for a plain table the row. Also
        returns the places of all records with a version, and of all records that repeat the version
        before them (``new_version_on``).

        Args:
            without_expired: whether to leave out expired versions.
        """
        rows = self._as_of(commit)
        if not rows.num_rows:
            return [], set(), set()
        versioned, limits = self.log.versioned, None
        if versioned:
            limits = horizons_of(self.log, commit) if without_expired else {}
        on = self._new_version_on
        found = fold(None, rows, self.log.key, limits, on).sort_by(TIMESTAMP)
        places, repeats = {*places_of(found)}, set[Place]()
        if on is not None:
            repeats = {*places_of(fold(None, rows, self.log.key, limits))} - places
        if versioned:
            valid = int(np.searchsorted(micros(found, TIMESTAMP), epoch_micros(moment), "right"))
            values = np.flatnonzero(~found.column(IS_TOMBSTONE).to_numpy()[valid:])
            first, ahead = max(0, valid - AROUND - 2), int(values[0]) + 1 if len(values) else 0
            found = found.slice(first, max(2 * AROUND + 4, valid + ahead - first))
            found = clip_at_valid_until(found, self._valid_until)
        return self._listed(found), places, repeats

    def last_at(self, commit: Commit, record: Record) -> Place:
        """Returns the place of the key's last record with a record's timestamp, as of a commit; it may
        repeat a version."""
        rows = self._as_of(commit)
        same = rows.filter(pa.array(micros(rows, TIMESTAMP) == record.micros))
        return places_of(fold(None, same, self.log.key, {}))[-1]

    def _as_of(self, commit: Commit) -> pa.Table:
        ends = values_by_partition(self._rows, commit.next_offset, 0)
        return self._rows.filter(pa.array(self._rows.column(OFFSET).to_numpy() < ends))

    def _listed(self, rows: pa.Table) -> list[Version]:
        deleted = rows.column(IS_TOMBSTONE).to_pylist()
        return [
            Version(place, as_time(begin), None if end is None else as_time(end), is_tombstone)
            for (place, begin, end), is_tombstone in zip(validity(rows), deleted, strict=True)
        ]

    def base_of(self, record: Record) -> Version | None:
        """Returns the row that was valid right before a record's time when the record entered the log;
        None = there was none."""
        rows, (partition, offset) = self._rows, record.place
        home, place = (rows.column(c).to_numpy() for c in (PARTITION, OFFSET))
        recorded, head = micros(rows, RECORDED_AT), self.log.head
        if offset < head.kept_from(partition):
            # The rows as of the truncation: those of any earlier time are gone.
            kept_from = {p: head.kept_from(p) for p in head.next_offset}
            known = place < values_by_partition(rows, kept_from, 0)
        else:
            own = recorded[(home == partition) & (place == offset)][0]
            there = (home < partition) | ((home == partition) & (place <= offset))
            known = (recorded < own) | ((recorded == own) & there)
        # Not by version: a record that repeats one has values of its own.
        folded = fold(None, rows.filter(pa.array(known)), self.log.key, {})
        found = folded.filter(pa.array(micros(folded, TIMESTAMP) < record.micros)).sort_by(TIMESTAMP)
        return self._listed(found)[-1] if found.num_rows else None

    def fetch(self, places: Collection[Place]) -> None:
        """Reads the records at some places in one pass."""
        self._records |= {one.place: one for one in self.log.at(places)}

    def record(self, place: Place) -> Record:
        """Returns the record at a partition and offset."""
        if place not in self._records:
            self.fetch([place])
        return self._records[place]


def validity(folded: pa.Table) -> list[tuple[Place, int, int | None]]:
    """Returns the versions of folded rows as (place, start, end): epoch microseconds, start inclusive,
    end exclusive; end None = the current version, or the row of a plain table."""
    ends: list[int | None] = [None] * folded.num_rows
    if VALID_TO in folded.column_names:
        current = folded.column(VALID_TO).is_null().to_pylist()
        until = micros(folded, VALID_TO).tolist()
        ends = [None if is_open else end for is_open, end in zip(current, until, strict=True)]
    return list(zip(places_of(folded), micros(folded, TIMESTAMP).tolist(), ends, strict=True))


def horizons_of(log: Log, commit: Commit) -> Mapping[int, int]:
    """Returns the horizon by partition, epoch microseconds: a version that ended at or before it has
    expired."""
    rules = log.head.shape.version_rules
    return {} if rules is None else rules.horizons(commit.stream_time)


def place_of(log: Log, record: Record, reasoning: Reasoning) -> None:
    """Adds the place of a record in the history of its key."""
    if log.head.shape.kind == "stream":
        reasoning.decide(rules.APPLIED, _first_of_its_value(log, record))
        return
    history = History(log, log.same_key(record.values))
    others, _, repeats = history.versions(log.commit, record.timestamp, without_expired=False)
    here = next((v for v in others if v.place == record.place), None)
    if log.head.shape.kind == "table":
        if here is not None:
            reasoning.decide(rules.LATEST, "it is the row of its key")
        elif others:
            reasoning.decide(rules.REPLACED, f"offset {others[-1].place} came later")
        else:
            reasoning.decide(rules.LATEST, "its key has no row now: the last record is a tombstone")
        return
    if log.head.shape.has_partial_updates:
        done = _carried(log, record, history, reasoning)
    else:
        done = _in_force_again(log, record, reasoning)
    if not done:
        _place_on_arrival(record, reasoning)
    if here is None and record.place in repeats:
        first = [v for v in others if v.begin <= record.timestamp][-1].place
        columns = ", ".join(log.head.shape.new_version_on or ())
        reasoning.decide(rules.REPEATED, f"offset {first} began its version, with the same {columns}")
        return
    if here is None:
        same = history.last_at(log.commit, record)
        reasoning.decide(rules.REPLACED, f"offset {same} has the same timestamp and came later")
        return
    horizon = horizons_of(log, log.commit).get(record.partition)
    if here.end is not None and horizon is not None and here.end <= as_time(horizon):
        reasoning.decide(
            rules.EXPIRED, f"it ended at {here.end}, and the history starts at {as_time(horizon)}"
        )
    until = "now" if here.end is None else str(here.end)
    reasoning.note(f"valid from {record.timestamp} (inclusive) to {until} (exclusive)")


def _first_of_its_value(log: Log, record: Record) -> str:
    """Returns why a stream has applied a record, as text."""
    commit = log.commit_of(record)
    shape = log.head.shape if commit is None else commit.shape
    if shape.unique_by is None or shape.within is None:
        return "a stream accepts every record, whatever its timestamp"
    named = ", ".join(shape.unique_by)
    if any(record.values.get(c) is None for c in shape.unique_by):
        return f"it has a null in {named}, so it is compared with no other record"
    return f"on arrival, no record of the last {spoken(shape.within)} of stream time had its {named}"


def duplicates_of(log: Log, record: Record) -> tuple[list[Rejected], int]:
    """Returns the duplicates of a record in quarantine, newest first, and the number of all: those that
    mention its value of ``unique_by``."""
    columns = log.head.shape.unique_by
    values = [record.values.get(c) for c in columns or ()]
    if columns is None or any(value is None for value in values):
        return [], 0
    return rejected(log, values, rules.DUPLICATE.name)


def _place_on_arrival(record: Record, reasoning: Reasoning) -> None:
    if record.is_latest is False:
        why = "on arrival, its key already had a record with a later timestamp"
    elif record.is_latest:
        why = "on arrival, no record of its key had a later timestamp"
    else:
        why = (
            "its log was truncated after it arrived: it is no longer known whether its key had a "
            "record with a later timestamp by then"
        )
    reasoning.decide(rules.OUT_OF_ORDER if record.is_latest is False else rules.APPLIED, why)


def _carried(log: Log, record: Record, history: History, reasoning: Reasoning) -> bool:
    """Adds which columns a partial update provided, and the origin of the others. Returns whether a
    late record propagated its values into this row."""
    only, (partition, offset) = (PROVIDED_COLUMNS, PROPAGATED_FROM), record.place
    rows = log.rows(both(), {partition: offset}, {partition: offset + 1}, only)
    given, carried = (rows.column(c)[0].as_py() for c in only)
    if given is not None:
        before, rest = history.base_of(record), "null, since it has no row before"
        if before is not None and not before.is_tombstone:
            rest = f"as offset {before.place} has them"
        reasoning.note(
            f"its own records provide {', '.join(given) or 'nothing'}; the others are {rest}"
        )
    if carried:
        place = Place(partition, offset - carried)
        cause = log.one(*place)
        of = "" if cause is None else f" of {cause.timestamp}"
        reasoning.decide(
            rules.CARRIED,
            f"offset {place}{of} came after it, and provides columns that its own records do not",
        )
    return bool(carried)


def _in_force_again(log: Log, record: Record, reasoning: Reasoning) -> bool:
    """Returns whether ``core.source_order`` added a row, not the source. Such a row repeats the values
    of the record before it at a later time, because the source sent that record later."""
    if not log.commit.totals.get(rules.CARRIED.name, 0) or not record.is_latest:
        return False
    partition, offset = record.place
    cause = log.one(partition, offset - 1) if offset else None
    if cause is None or cause.is_latest is not False or cause.timestamp >= record.timestamp:
        return False
    one, other = (
        [r.is_tombstone, {c: v for c, v in r.values.items() if c != TIMESTAMP}] for r in (cause, record)
    )
    if one != other:
        return False
    reasoning.decide(
        rules.CARRIED,
        f"offset {cause.place} of {cause.timestamp} came after the version of "
        f"{record.timestamp} in the order of the source, so it is in force again from then on",
    )
    return True
