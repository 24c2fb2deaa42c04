"""Explains aggregates without windows: the rows or records of a group."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pyarrow as pa

from vt_dagster import rules
from vt_dagster.columns import (
    IS_LATEST,
    IS_TOMBSTONE,
    OFFSET,
    OLD,
    PARTITION,
    RECORDED_AT,
    TIMESTAMP,
)
from vt_dagster.provenance.explain_request import (
    Arrivals,
    Derivation,
    ExplainRequest,
    triggering_update,
)
from vt_dagster.provenance.explanation import Record
from vt_dagster.provenance.expression_parser import Group, named, replaced_rows
from vt_dagster.provenance.log_reader import Log, Place, as_micros
from vt_dagster.storage.arrow_reader import values_by_partition

_OURS = (TIMESTAMP, IS_TOMBSTONE, RECORDED_AT)


def keys_of(request: ExplainRequest, source: Log) -> list[tuple[str, str]]:
    """Returns the (name, SQL expression) pairs of an aggregate's key, without the window."""
    chosen = named(request.meaning.get("group_key", "()"))
    return chosen or [(c, c) for c in source.key]


def cannot_be_told(request: ExplainRequest, source: Log) -> Derivation:
    """Returns no inputs, with a note that computing the group's key needs Spark."""
    request.reasoning.notes.append(
        f"the group {request.meaning['group_key']} cannot be computed without Spark: explain the "
        f"rows of {source.name} by key"
    )
    return Derivation()


def members(
    request: ExplainRequest,
    source: Log,
    found: Sequence[Place],
    also: Iterable[Place] = (),
    count: int | None = None,
) -> Derivation:
    """Returns a group's newest records and the number of all.

    Args:
        found: the places of the group's records, in order of arrival.
        also: places of further records to return in any case.
        count: the number of all records, if ``found`` has only a part; None = its length.
    """
    extra = set(also)
    count = len(found) if count is None else count
    shown = [*found[-request.most :]]
    order = {place: i for i, place in enumerate(found)}
    records = source.at({*shown, *extra})
    records.sort(key=lambda one: (order.get(one.place, -1), one.place))
    if count > len(shown):
        request.reasoning.notes.append(f"the newest {len(shown)} of the {count:,} records that are in")
    return Derivation([(source, one) for one in records], count + len(extra - {*found}))


def stream_aggregate(request: ExplainRequest) -> Derivation:
    """Returns the stream records in a group, see ``core.aggregates``."""
    name = request.meaning["source"]
    source = request.inputs[name]
    group = Group(source, keys_of(request, source), request.record.values)
    rows = source.rows(group.condition(), end=request.end(name), only=[*_OURS, *group.columns])
    inside = group.has(rows)
    if inside is None:
        return cannot_be_told(request, source)
    rekeyed = request.meaning.get("group_key", "()") != "()"
    rows = rows.filter(pa.array(inside & ~rows.column(IS_TOMBSTONE).to_numpy()))
    before = values_by_partition(rows, request.start(name), 0) > rows.column(OFFSET).to_numpy()
    entries = narrow(source, rows.filter(pa.array(~before)))
    new = [one for _, one in Arrivals(request, [name], rekeyed).sorted([(0, e) for e in entries])]
    place = triggering_update(request, _times(request, new))
    new = new if place is None else new[: place + 1]
    earlier = rows.filter(pa.array(before)).sort_by([(RECORDED_AT, "ascending"), (OFFSET, "ascending")])
    count = earlier.num_rows + len(new)
    if place is not None:
        request.reasoning.decide(
            rules.TRIGGERED, f"{new[place]}, the record number {count} of its group"
        )
    shown = earlier.slice(max(0, earlier.num_rows - request.most)).select([PARTITION, OFFSET])
    taken = list(zip(*shown.to_pydict().values(), strict=True)) + [one.place for one in new]
    if request.log.versioned:
        request.reasoning.notes.append(
            "records that the result refused as older than its history retention may be among these"
        )
    return members(request, source, taken, count=count)


def narrow(source: Log, rows: pa.Table) -> list[Record]:
    """Returns records of a log without their values."""
    ours = [c for c in rows.column_names if c in (*_OURS, IS_LATEST, PARTITION, OFFSET)]
    return source.as_records(rows.select(ours))


def _times(request: ExplainRequest, updates: Sequence[Record]) -> list[tuple[int, bool]]:
    """Returns (timestamp, False) for each update of a group; timestamps never decrease."""
    newest, times = request.newest_before, list[tuple[int, bool]]()
    for one in updates:
        own = as_micros(one.timestamp)
        newest = own if newest is None else max(own, newest)
        times.append((newest, False))
    return times


# ------------------------------------------------------------------------------------------ of tables


def table_aggregate(request: ExplainRequest) -> Derivation:
    """Returns the table rows in a group, see ``core.aggregates``."""
    name = request.meaning["source"]
    source = request.inputs[name]
    group = Group(source, keys_of(request, source), request.record.values)
    columns = [*_OURS, IS_LATEST, OLD, *source.key, *group.columns]
    rows = source.rows(group.condition(replaced=True), end=request.end(name), only=columns)
    if source.versioned:
        rows = rows.filter(rows.column(IS_LATEST))
    new, old = group.has(rows), group.has(replaced_rows(rows))
    if new is None or old is None:
        return cannot_be_told(request, source)
    new &= ~rows.column(IS_TOMBSTONE).to_numpy()
    old &= ~rows.column(OLD).is_null().to_numpy()
    rows = rows.append_column("_in", pa.array(new)).filter(pa.array(new | old))
    if request.meaning["aggregates"].startswith("Aggregator("):
        request.reasoning.notes.append(
            "functions of its own: rows that have left the group may still affect the result, if "
            "their subtractor does not undo their contribution"
        )
    changes = narrow(source, rows)
    keys = list(zip(*(map(repr, rows.column(c).to_pylist()) for c in source.key), strict=True))
    about = {
        one.place: (key, inside)
        for one, key, inside in zip(changes, keys, rows.column("_in").to_pylist(), strict=True)
    }
    ordered = [one for _, one in Arrivals(request, [name]).sorted([(0, one) for one in changes])]
    earlier = [one for one in ordered if not request.is_new(name, one)]
    fresh = ordered[len(earlier) :]
    place = triggering_update(request, _times(request, fresh))
    if place is None:
        request.reasoning.notes.append(
            "the change that triggered it is ambiguous: these rows are in the group after its run"
        )
    else:
        request.reasoning.decide(rules.TRIGGERED, f"{fresh[place]}, of {fresh[place].timestamp}")
    taken = [*earlier, *(fresh if place is None else fresh[: place + 1])]
    return _rows_in(request, source, taken, about)


def _rows_in(
    request: ExplainRequest,
    source: Log,
    taken: Sequence[Record],
    about: Mapping[Place, tuple[Any, bool]],
) -> Derivation:
    """Returns the rows that are in a group after some changes.

    The group's timestamp is the maximum over all changes, also over those of rows that have left. If a
    removed row has that timestamp, or left last, the result includes the row and the change that
    removed it.
    """
    inside: dict[Any, Place] = {}
    before: dict[Place, Place | None] = {}
    last: dict[Any, Place] = {}
    for one in taken:
        key, is_in = about[one.place]
        before[one.place], last[key] = inside.pop(key, None), one.place
        if is_in:
            inside[key] = one.place
    newest = max(taken, key=lambda one: as_micros(one.timestamp), default=None)
    also: set[Place | None] = set()
    for one in (newest, taken[-1] if taken else None):
        if one is not None and one.place not in inside.values():
            key, _ = about[one.place]
            also |= {one.place, before[one.place], last[key], before[last[key]]}
    if also:
        request.reasoning.notes.append(
            "its timestamp, or its last change, comes from a row that has left the group"
        )
    return members(
        request, source, list(inside.values()), {place for place in also if place is not None}
    )
