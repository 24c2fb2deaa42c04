"""Explains filter, map_values, flat_map_values, to_table, to_stream, merge and select_key."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from vt_dagster.provenance.explain_request import (
    Derivation,
    ExplainRequest,
    Log,
    Record,
    at_time,
    both,
)
from vt_dagster.storage.commit_log import Commit
from vt_dagster.topology.specification import (
    FilterSpec,
    FlatMapValuesSpec,
    MapValuesSpec,
    MergeSpec,
    SelectKeySpec,
    ToStreamSpec,
    ToTableSpec,
)


@dataclass(frozen=True)
class Passing:
    """What the results of an operator have in common with their input records.

    Args:
        key: whether a result has the key of its input.
        values: whether a result has the values of its input, except a key of its own.
        place: whether a result has the partition of its input.
        tombstone: whether a result is a tombstone exactly if its input is one.
        elements: whether an input may give several results.
    """

    key: bool = True
    values: bool = True
    place: bool = True
    tombstone: bool = True
    elements: bool = False


RowSpec = (
    FilterSpec
    | MapValuesSpec
    | ToTableSpec
    | ToStreamSpec
    | MergeSpec
    | SelectKeySpec
    | FlatMapValuesSpec
)
PASSING: Mapping[type[RowSpec], Passing] = {
    FilterSpec: Passing(tombstone=False),
    MapValuesSpec: Passing(values=False),
    ToTableSpec: Passing(),
    ToStreamSpec: Passing(),
    MergeSpec: Passing(place=False),
    SelectKeySpec: Passing(key=False, place=False),
    FlatMapValuesSpec: Passing(values=False, tombstone=False, elements=True),
}
"""The operators whose result depends on one record only, by their specification."""


def row_by_row(request: ExplainRequest[RowSpec]) -> Derivation:
    """Returns the input record of a result; all candidates if several look equal. If a filter of a
    plain table emitted a tombstone because a row left, the row that was replaced comes before it."""
    operator = request.specification
    found = _origins(request)
    if request.record.is_tombstone and isinstance(operator, FilterSpec):
        condition = f"{'not ' * operator.negate}{operator.predicate}"
        request.reasoning.notes.append(
            f"a tombstone: its record is a tombstone, or does not meet: {condition}"
        )
    return Derivation(found[: request.most], len(found))


def _origins(request: ExplainRequest[RowSpec]) -> list[tuple[Log, Record]]:
    log, record, commit, inputs = request.log, request.record, request.commit, request.inputs
    passing = PASSING[type(request.specification)]
    taken = [
        (source, one)
        for name, source in inputs.items()
        for one in _taken(log, source, name, record, commit, passing)
    ]
    if passing.place and not passing.elements and len(inputs) == 1:
        results = [one.offset for one in _results(log, record, commit)]
        if len(results) == len(taken):  # each input gave one result, in order
            taken = [taken[results.index(record.offset)]]
    alike = [(source, one) for source, one in taken if _alike(log, one, record, passing)]
    befores: list[tuple[Log, Record]] = []
    if alike and _lets_rows_out(log, alike[0][0], record):
        rows = rows_before(alike)
        alike = [(source, one) for source, one in alike if _place(one) in rows]
        befores = [(source, rows[_place(one)]) for source, one in alike]
    if len(alike) <= 1:
        return [*befores, *alike]
    what = "one of them" if not passing.elements else "one of them, or an element of it"
    request.reasoning.notes.append(
        f"{len(alike)} records of its run look the same from here, and give equal results or none: "
        f"its input is {what}"
    )
    both_rows = {_place(one): (source, one) for source, one in (*befores, *alike)}
    return [both_rows[place] for place in sorted(both_rows)] if befores else alike


def rows_before(found: Sequence[tuple[Log, Record]]) -> dict[tuple[int, int], Record]:
    """Returns the rows that records of a plain table replaced, by the partition and offset of the
    replacing record. A filter emits a tombstone only if the replaced row passed it.

    Args:
        found: records of one key and partition.
    """
    log, last = found[-1]
    end = {last.partition: last.offset + 1}
    every = log.records(log.same_key(last.values), end=end)
    before = {_place(one): row for row, one in pairwise(every) if not row.is_tombstone}
    return {_place(one): before[_place(one)] for _, one in found if _place(one) in before}


def _lets_rows_out(log: Log, source: Log, record: Record) -> bool:
    plain = source.head.shape.kind == "table"
    return isinstance(log.specification, FilterSpec) and record.is_tombstone and plain


def _place(record: Record) -> tuple[int, int]:
    return record.partition, record.offset


def _taken(
    log: Log, source: Log, name: str, record: Record, commit: Commit, passing: Passing
) -> list[Record]:
    """Returns the records of an input that the run consumed and that have the result's time."""
    ranges = commit.taken.get(name, {})
    if passing.place:
        ranges = {p: r for p, r in ranges.items() if p == record.partition}
    same = source.same_key(record.values, log.key) if passing.key else None
    return source.records(
        both(same, at_time(record.timestamp)),
        {p: start for p, (start, _) in ranges.items()},
        {p: end for p, (_, end) in ranges.items()},
    )


def _results(log: Log, record: Record, commit: Commit) -> list[Record]:
    """Returns the run's results with the key, time and partition of a record."""
    before, place = log.before(commit), record.partition
    first = {place: 0 if before is None else before.next_offset.get(place, 0)}
    same = both(log.same_key(record.values), at_time(record.timestamp))
    return log.records(same, first, {place: commit.next_offset.get(place, 0)})


def _alike(log: Log, source: Record, result: Record, passing: Passing) -> bool:
    """Returns whether a record may be the input of a result."""
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
