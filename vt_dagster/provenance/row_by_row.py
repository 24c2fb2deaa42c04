"""filter, map_values, to_table, to_stream, merge, select_key: the record that a result was made of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vt_dagster.provenance.logs import Log, at_time, both
from vt_dagster.provenance.values import Record, Told
from vt_dagster.storage.positions import Commit


@dataclass(frozen=True)
class Passing:
    """How the results of an operator look like the records that they are made of.

    Args:
        key: whether they have their key.
        values: whether they have their values, but for a key of their own.
        place: whether they have their partition.
        tombstone: whether a tombstone is made of a tombstone alone, and nothing else of it.
        elements: whether a record may give several results.
    """

    key: bool = True
    values: bool = True
    place: bool = True
    tombstone: bool = True
    elements: bool = False


PASSING = {
    "Filter": Passing(tombstone=False),
    "MapValues": Passing(values=False),
    "ToTable": Passing(),
    "ToStream": Passing(),
    "Merge": Passing(place=False),
    "SelectKey": Passing(key=False, place=False),
    "FlatMapValues": Passing(values=False, tombstone=False, elements=True),
}
"""The operators that make results of a record alone, by the names that commits have of them."""


def origins_of(
    log: Log, inputs: Sequence[tuple[str, Log]], record: Record, commit: Commit, told: Told
) -> list[tuple[Log, Record]]:
    """The record that a result was made of, with its log; of several that look the same all.

    Args:
        inputs: the operator's inputs, by the names that commits have of them.
        commit: that the result came by.
    """
    passing = PASSING[log.meaning["operator"]]
    alike = [
        (source, one)
        for name, source in dict(inputs).items()
        for one in _taken(log, source, name, record, commit, passing)
        if _alike(log, one, record, passing)
    ]
    if len(alike) <= 1:
        return alike
    mine = _results_alike(log, record, commit, passing)
    if len(mine) == len(alike) and len(inputs) == 1 and passing.place:
        return [alike[[one.offset for one in mine].index(record.offset)]]
    what = "one of them" if not passing.elements else "one of them, or an element of it"
    told.notes.append(
        f"{len(alike)} records of its run look the same from here, and give the same results or none: "
        f"it was made of {what}"
    )
    return alike


def row_before(found: Sequence[tuple[Log, Record]]) -> list[tuple[Log, Record]]:
    """Of a plain table's filter: the row that a record replaced; a tombstone goes out since it passed.

    Args:
        found: the record that a tombstone was made of, or those that look the same.
    """
    for log, record in found[:1]:
        if log.head.shape.kind == "table":
            place = record.partition
            earlier = log.records(log.same_key(record.values), end={place: record.offset})
            return [(log, one) for one in earlier[-1:]]
    return []


def _taken(
    log: Log, source: Log, name: str, record: Record, commit: Commit, passing: Passing
) -> list[Record]:
    """What the run took of an input that has the result's time."""
    ranges = commit.taken.get(name, {})
    if passing.place:
        ranges = {p: r for p, r in ranges.items() if p == record.partition}
    same = source.same_key(record.values, log.key) if passing.key else None
    return source.records(
        both(same, at_time(record.timestamp)),
        {p: start for p, (start, _) in ranges.items()},
        {p: end for p, (_, end) in ranges.items()},
    )


def _results_alike(log: Log, record: Record, commit: Commit, passing: Passing) -> list[Record]:
    before = log.before(commit)
    place = record.partition
    first = {place: 0 if before is None else before.next_offset.get(place, 0)}
    found = log.records(
        both(log.same_key(record.values), at_time(record.timestamp)),
        first,
        {place: commit.next_offset.get(place, 0)},
    )
    return [
        one
        for one in found
        if one.is_tombstone == record.is_tombstone
        and (not passing.values or one.values == record.values)
    ]


def _alike(log: Log, source: Record, result: Record, passing: Passing) -> bool:
    """Whether a result may be made of a record."""
    if passing.tombstone and source.is_tombstone != result.is_tombstone:
        return False
    if not passing.tombstone and source.is_tombstone and not result.is_tombstone:
        return passing.elements
    if not passing.values or result.is_tombstone:
        return True
    own = () if passing.key else log.key
    return all(
        source.values[c] == value
        for c, value in result.values.items()
        if c in source.values and c not in own
    )
