"""Explains table-table, history and foreign-key joins: the triggering change, and the other row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa

from vt_dagster import rules
from vt_dagster.columns import OFFSET, PARTITION
from vt_dagster.provenance.explain_request import (
    Arrivals,
    Condition,
    Derivation,
    ExplainRequest,
    Log,
    Record,
    Update,
    as_micros,
    triggering_update,
)
from vt_dagster.provenance.expression_parser import evaluate, split, used
from vt_dagster.storage.arrow_reader import texts

Key = tuple[Any, ...]
"""A foreign key; a key with a null component matches nothing."""
LEFT, RIGHT = 0, 1


def table_table(request: ExplainRequest) -> Derivation:
    """Returns the inputs of a result of a table-table join, see ``core.table_joins``."""
    names = [request.meaning["left"], request.meaning["right"]]
    logs = [request.inputs[name] for name in names]
    found = [
        (place, record)
        for place, (name, log) in enumerate(zip(names, logs, strict=True))
        for record in _counted(
            log, log.same_key(request.record.values, request.log.key), request.end(name)
        )
    ]
    rows: list[Record | None] = [None, None]
    updates: list[Update] = []
    for place, record in Arrivals(request, names).sorted(found):
        old, other = rows[place], rows[1 - place]
        rows[place] = None if record.is_tombstone else record
        says, tombstone = _outcome(request.meaning["kind"], place == LEFT, rows, old)
        if says and request.is_new(names[place], record):
            made_of = [(logs[1 - place], other), (logs[place], old if tombstone else None)]
            updates.append(_update(logs[place], record, other, tombstone, made_of))
    return _told(request, updates)


def of_histories(request: ExplainRequest) -> Derivation:
    """Returns the inputs of a result of a history join: each side's version at the result's time, as of
    the run, see ``core.table_joins``."""
    at, made = as_micros(request.record.timestamp), list[tuple[Log, Record]]()
    for name in (request.meaning["left"], request.meaning["right"]):
        log = request.inputs[name]
        same = log.same_key(request.record.values, request.log.key)
        found = log.records(same, end=dict(request.end(name)))
        until = [one for one in found if as_micros(one.timestamp) <= at]
        version = max(until, key=lambda one: (as_micros(one.timestamp), one.offset), default=None)
        if version is None:
            request.reasoning.decide(rules.NO_MATCH, f"{name} had no version of its key then")
            continue
        decided = rules.DELETED if version.is_tombstone else rules.AS_OF
        request.reasoning.decide(decided, f"{version}, from {version.timestamp}")
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


def _counted(log: Log, condition: Condition, end: Mapping[int, int]) -> list[Record]:
    """Returns the changes of a table that trigger a join: all but those out of order."""
    found = log.records(condition, end=dict(end))
    return [one for one in found if not log.versioned or one.is_latest is not False]


def _update(
    log: Log,
    trigger: Record,
    other: Record | None,
    tombstone: bool,
    made_of: Sequence[tuple[Log, Record | None]],
) -> Update:
    times = [as_micros(one.timestamp) for one in (trigger, other) if one is not None]
    there = [(side, one) for side, one in made_of if one is not None]
    return Update(log, trigger, max(times), tombstone, other, there)


def _told(request: ExplainRequest, updates: Sequence[Update]) -> Derivation:
    """Returns the inputs of the update that became the record."""
    place = triggering_update(request, [(one.time, one.is_tombstone) for one in updates])
    if place is None:
        request.reasoning.notes.append("the change that triggered it is ambiguous")
        return Derivation()
    one, told = updates[place], request.reasoning
    told.decide(rules.TRIGGERED, f"{one.trigger}{' (a tombstone)' * one.trigger.is_tombstone}")
    if any(row is not one.other for _, row in one.made_of):
        told.notes.append(
            f"before it the key had a row in {one.log.name}: the tombstone retracts that row's result"
        )
    if one.other is None:
        told.decide(rules.NO_MATCH, "the other side had no row for it then")
    else:
        told.decide(rules.LATEST, f"{one.other}, of {one.other.timestamp}")
    if as_micros(request.record.timestamp) > one.time:
        told.notes.append("its timestamp is that of an earlier result of its key: times never decrease")
    return Derivation([*one.made_of, (one.log, one.trigger)])


# ------------------------------------------------------------------------------------- by foreign key


def foreign_key(request: ExplainRequest) -> Derivation:
    """Returns the inputs of a result of a foreign-key join, see ``core.table_joins``."""
    names = [request.meaning["left"], request.meaning["right"]]
    left, right = (request.inputs[name] for name in names)
    refers = _references(request, left, request.end(names[LEFT]))
    if refers is None:
        request.reasoning.notes.append(
            f"the foreign key {request.meaning['foreign_key']} cannot be computed without Spark: "
            f"explain the rows of {left.name} and {right.name} by key"
        )
        return Derivation()
    found = [(LEFT, record) for record, _ in refers.values()]
    wanted = {key for _, key in refers.values() if key is not None}
    of_key: dict[tuple[int, int], Key] = {}
    for key in wanted:
        same = right.same_key(dict(zip(right.key, key, strict=True)))
        for record in _counted(right, same, request.end(names[RIGHT])):
            of_key[record.place] = key
            found.append((RIGHT, record))
    kind = request.meaning["kind"]
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
                update = Update(
                    right, record, as_micros(record.timestamp), gone, row[0], [(left, row[0])]
                )
        if update is not None and request.is_new(names[place], record):
            updates.append(update)
    return _told(request, updates)


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
    request: ExplainRequest, left: Log, end: Mapping[int, int]
) -> dict[tuple[int, int], tuple[Record, Key | None]] | None:
    """Returns the left key's changes that trigger a join, by place, each with its foreign key; None =
    computing the foreign key needs Spark."""
    expressions = split(request.meaning["foreign_key"])
    found = _counted(left, left.same_key(request.record.values, request.log.key), end)
    rows = left.rows(
        left.same_key(request.record.values, request.log.key),
        end=dict(end),
        only=used(expressions, left.columns.names),
    )
    columns = [evaluate(rows, sql) for sql in expressions]
    if any(column is None for column in columns):
        return None
    table = pa.table({str(i): column for i, column in enumerate(columns)})
    keys = {
        place: tuple(row.values())
        for place, row in zip(
            zip(*(rows.column(c).to_pylist() for c in (PARTITION, OFFSET)), strict=True),
            texts(table),
            strict=True,
        )
    }
    return {one.place: (one, None if None in keys[one.place] else keys[one.place]) for one in found}
