"""``explain``: why a row is as it is, or is not there, down to the sources. No Spark.

It reads what runs have recorded: each commit says what its operator computes, which offsets of its
inputs it took and which versions of tables it read, so that no definitions are needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from importlib import import_module
from typing import Any

import numpy as np

from vt_dagster import rules
from vt_dagster.columns import OFFSET, PARTITION, RECORDED_AT, TIMESTAMP
from vt_dagster.errors import StorageError
from vt_dagster.provenance import as_of
from vt_dagster.provenance.history import Version, place_of
from vt_dagster.provenance.logs import Condition, Log, as_micros, as_time, both, written
from vt_dagster.provenance.origins import origin, rejected
from vt_dagster.provenance.row_by_row import PASSING, origins_of
from vt_dagster.provenance.values import Explanation, Record, Told
from vt_dagster.storage.folding import micros
from vt_dagster.storage.positions import Commit
from vt_dagster.topology.durations import parse_time, spoken

SOURCE = "source"
_DEEPEST = 50
_MOST_OF_A_KIND = 10
"""So many records that look the same are explained at most."""


def explain(
    table: Any,
    *,
    key: Any = None,
    at: str | datetime | None = None,
    offset: tuple[int, int] | str | None = None,
    where: str | None = None,
    as_known_at: str | datetime | None = None,
    warehouse: str = "data/warehouse",
) -> Explanation:
    """Why a row of an asset is as it is, or is not there; without Spark, and without its definition.

    Args:
        table: an asset's name (with a key prefix: ``shop/prices``), or the stream or table itself.
        key: the value of the key, of a composite key a tuple or list, also as texts. Alone: its newest
            record, of a versioned table by timestamp, else by arrival.
        at: a time: the key's record with the largest timestamp up to it (inclusive).
        offset: instead, a partition and an offset of its log: ``(0, 17)`` or ``"0:17"``.
        where: instead, a SQL condition over the log's columns that one record meets, among those of the
            key where one is given; needs the package duckdb.
        as_known_at: a time: by what had been recorded up to it (inclusive); None = by all.
        warehouse: the directory or URL of the tables.

    Returns:
        the explanation; its ``record`` is None where there is no such row, and then it says why.

    Raises:
        StorageError: there is no such asset, or the question is none.
    """
    name = table if isinstance(table, str) else "/".join(table.path)
    known = None if as_known_at is None else _micros(as_known_at)
    log = Log.open(str(warehouse), name, known)
    values = None if key is None else list(key) if isinstance(key, tuple | list) else [key]
    if offset is None and values is None and where is None:
        raise StorageError(
            f"{name}: expected a key, an offset or a condition that says which row is to be explained, "
            "got none; give --key, --offset or --where"
        )
    record, absent = _asked(log, values, None if at is None else _micros(at), offset, where)
    if record is not None:
        return _Explainer().of(log, record)
    return _absent(log, values, f"{absent}{log.limit}")


# ----------------------------------------------------------------------------------- which row is asked


def _micros(moment: str | datetime) -> int:
    return parse_time(moment.isoformat() if isinstance(moment, datetime) else moment)


def _asked(
    log: Log,
    key: Sequence[Any] | None,
    at: int | None,
    offset: tuple[int, int] | str | None,
    where: str | None,
) -> tuple[Record | None, str]:
    """The record that is asked for, or why there is none."""
    if offset is not None:
        return _at_offset(log, *_parsed(offset))
    condition: Condition = log.of_key(key) if key is not None else both()
    if where is not None:
        return _only(log, condition, where)
    rows = log.rows(condition)
    if not rows.num_rows:
        return None, f"there is no record of {_spoken(key)} in its log"
    moments = micros(rows, TIMESTAMP)
    by_time = at is not None or log.head.shape.kind == "versioned"
    first = moments if by_time else micros(rows, RECORDED_AT)
    order = np.lexsort((rows.column(OFFSET).to_numpy(), first))
    if at is not None:
        order = order[moments[order] <= at]
        if not len(order):
            first = as_time(int(moments.min()))
            return None, f"its first record of {_spoken(key)} is of {first}, after {as_time(at)}"
    return log.as_records(rows.slice(int(order[-1]), 1))[0], ""


def _parsed(offset: tuple[int, int] | str) -> tuple[int, int]:
    try:
        partition, place = offset.split(":") if isinstance(offset, str) else offset
        return int(partition), int(place)
    except ValueError:
        raise StorageError(
            f"expected an offset as PARTITION:OFFSET, for example 0:17, got {offset!r}"
        ) from None


def _at_offset(log: Log, partition: int, offset: int) -> tuple[Record | None, str]:
    ends = log.commit.next_offset
    if partition not in ends:
        return None, f"it has no partition {partition}; its log has {sorted(ends)}"
    if not 0 <= offset < ends[partition]:
        return None, f"partition {partition} of its log has the offsets 0 to {ends[partition] - 1}"
    record = log.one(partition, offset)
    return record, "" if record else "the log has been cut: it has not that offset any more"


def _only(log: Log, condition: Condition, where: str) -> tuple[Record | None, str]:
    """The one record that meets a SQL condition."""
    try:
        duckdb: Any = import_module("duckdb")
    except ModuleNotFoundError:
        raise StorageError(
            "expected the package duckdb for a condition in SQL, found none; install it, or ask by key "
            "or offset"
        ) from None
    rows = log.rows(condition)
    try:
        found = duckdb.from_arrow(rows).filter(where).limit(_MOST_OF_A_KIND + 1).arrow()
    except duckdb.Error as error:
        raise StorageError(
            f"{log.name}: expected a SQL condition over {rows.column_names}, got {where!r}: "
            f"{str(error).splitlines()[0]}"
        ) from None
    table = found.read_all() if hasattr(found, "read_all") else found
    places = list(zip(*(table.column(c).to_pylist() for c in (PARTITION, OFFSET)), strict=True))
    if len(places) > 1:
        raise StorageError(
            f"{log.name}: expected a condition that one record meets, but {where!r} is met by "
            f"{'more than ' * (len(places) > _MOST_OF_A_KIND)}{min(len(places), _MOST_OF_A_KIND)}, for "
            f"example the offsets {', '.join(f'{p}:{o}' for p, o in places[:3])}; ask by --offset"
        )
    if not places:
        return None, f"no record meets {where!r}"
    return log.one(*places[0]), ""


def _spoken(key: Sequence[Any] | None) -> str:
    return "/".join(map(str, key or ()))


# ------------------------------------------------------------------------------- why it is not there


def _absent(log: Log, key: Sequence[Any] | None, absent: str) -> Explanation:
    """Why there is no such row: what became of what it would have been made of."""
    told = Told()
    told.notes.append(f"{log.name} has no such row: {absent}")
    operator = log.meaning.get("operator", SOURCE)
    about: dict[str, Any] = {"asset": log.name, "operator": operator}
    if key is not None and not log.meaning:
        rows, count = rejected(log, key)
        for reason in dict.fromkeys(row.reason for row in rows):
            of_it = sum(row.reason == reason for row in rows)
            told.decide(reason, f"{of_it} of the {count} rows in quarantine that mention the key")
        about["rejected"] = tuple(rows)
    elif key is not None and operator == "StreamTableJoin":
        about["made_of"] = _not_joined(log, key, told)
    elif key is not None and operator in PASSING and operator != "SelectKey":
        inputs = [log.input(n) for n in dict.fromkeys(_names(log))]
        about["made_of"] = tuple(
            explain(one.name, key=key, warehouse=log.warehouse) for one in inputs if one is not None
        )
    return Explanation(**about, decisions=tuple(told.decisions), notes=tuple(told.notes))


def _not_joined(log: Log, key: Sequence[Any], told: Told) -> tuple[Explanation, ...]:
    """What became of the stream's newest record of a key that has no result."""
    name = log.meaning["left"]
    stream = log.input(name)
    if stream is None:
        told.notes.append(f"the log of {name} is not in the warehouse any more")
        return ()
    found = stream.records(stream.of_key(key))
    for record in found[-1:]:
        commit = log.taken_by(name, record.partition, record.offset)
        released = log.commit.released.get(record.partition)
        if commit is None:
            told.notes.append(f"no run of {log.name} has taken {name} {_place(record)} yet")
        elif record.is_tombstone:
            told.decide(rules.DROPPED, f"{name} {_place(record)} has no value")
        elif released is not None and as_micros(record.timestamp) > released:
            now = log.commit.stream_time[record.partition]
            grace = as_of.grace_of(log.commit, record.partition)
            told.decide(
                rules.WAITING,
                f"{name} {_place(record)} of {record.timestamp} waits since run {commit.batch}, until "
                f"stream time, which is {as_time(now)}, has passed it by {spoken(grace)}",
            )
        else:
            told.decide(rules.NO_MATCH, f"{name} {_place(record)} found nothing, in an inner join")
    if not found:
        return (explain(stream.name, key=key, warehouse=log.warehouse),)
    return (_Explainer().of(stream, found[-1]),)


def _place(record: Record | Version) -> str:
    return f"{record.partition}:{record.offset}"


def _names(log: Log) -> list[str]:
    """The names of a row-by-row operator's inputs, one for each place that it has."""
    told = log.meaning.get("sources")
    if told is not None:
        return [one.strip() for one in told.strip("()").split(",") if one.strip()]
    return [log.meaning["source"]]


# -------------------------------------------------------------------------------------- why it is so


class _Explainer:
    """Explains records, each once, however often it is met on the way down."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, int, int], Explanation] = {}

    def of(self, log: Log, record: Record, depth: int = 0) -> Explanation:
        """Why a record of a log is as it is."""
        place = log.name, record.partition, record.offset
        if place not in self._known:
            self._known[place] = self._of(log, record, depth)
        return self._known[place]

    def _of(self, log: Log, record: Record, depth: int) -> Explanation:
        told, commit = Told(), log.commit_of(record)
        operator = log.meaning.get("operator", SOURCE)
        found = Explanation(log.name, operator, record, written(commit))
        if commit is None:
            told.notes.append("the commit that it came by is not known any more")
        elif depth > _DEEPEST:
            told.notes.append(f"it is {_DEEPEST} assets deep: ask for it by itself")
        elif operator == SOURCE:
            found = replace(found, origin=origin(log, record, commit))
        elif operator == "StreamTableJoin":
            found = self._joined(found, log, record, commit, told, depth)
        elif operator in PASSING:
            found = self._passed(found, log, record, commit, told, depth)
        else:
            told.notes.append(
                f"what a row of a {operator} is made of cannot be told yet; its inputs are "
                f"{', '.join(commit.inputs)}: ask for their rows by key"
            )
        if operator != "StreamTableJoin":
            place_of(log, record, told)
        notes = (*found.notes, *told.notes)
        return replace(found, decisions=(*found.decisions, *told.decisions), notes=notes)

    def _passed(
        self, found: Explanation, log: Log, record: Record, commit: Commit, told: Told, depth: int
    ) -> Explanation:
        inputs = [(n, up) for n in _names(log) if (up := self._input(log, n, told)) is not None]
        made_of = origins_of(log, inputs, record, commit, told)
        if record.is_tombstone and log.meaning["operator"] == "Filter":
            negated = "not " if log.meaning.get("negate") == "True" else ""
            condition = f"{negated}{log.meaning['predicate']}"
            told.notes.append(f"a tombstone: its record is one, or does not meet: {condition}")
        explained = tuple(self.of(up, one, depth + 1) for up, one in made_of[:_MOST_OF_A_KIND])
        return replace(found, made_of=explained)

    def _joined(
        self, found: Explanation, log: Log, record: Record, commit: Commit, told: Told, depth: int
    ) -> Explanation:
        left, right = log.meaning["left"], log.meaning["right"]
        stream, table = self._input(log, left, told), self._input(log, right, told)
        if stream is None or table is None:
            return found
        lefts = as_of.streams_record(log, stream, left, record, commit)
        if not lefts:
            told.notes.append(f"its record of {left} is not there any more{stream.limit}")
        elif len(lefts) > 1:
            told.notes.append(f"it was made of one of {len(lefts)} records of its key and time")
        for one in lefts[:1]:
            as_of.tell_waiting(log, left, record, one, commit, told)
        values = [record.values[c] for c in log.key]
        seen = as_of.pinned(log, table, right, commit, told)
        looked = as_of.look_up(table, values, record.timestamp, seen)
        _tell_looked(looked, table, right, record, told)
        made_of = [self.of(stream, one, depth + 1) for one in lefts[:_MOST_OF_A_KIND]]
        if looked.then.found is not None:
            made_of.append(self.of(table, looked.history.record(looked.then.found.place), depth + 1))
        return replace(
            found, made_of=tuple(made_of), candidates=looked.shown, candidates_in_all=looked.count
        )

    def _input(self, log: Log, name: str, told: Told) -> Log | None:
        found = log.input(name)
        if found is None:
            told.notes.append(
                f"the log of {name} that it was made of is not in {log.warehouse} any more"
            )
        return found


def _tell_looked(looked: as_of.Looked, table: Log, name: str, record: Record, told: Told) -> None:
    """Tells what the table answered, and whether it would answer otherwise now."""
    then, now = looked.then, looked.now
    if then.version is None:
        told.decide(
            then.rule, f"{name} had no row of its key at {record.timestamp} when the run looked"
        )
    else:
        end = "now" if then.version.end is None else str(then.version.end)
        valid = f", true from {then.version.begin} to {end}"
        versioned = table.head.shape.kind == "versioned"
        told.decide(then.rule, f"{name} {_place(then.version)}{valid if versioned else ''}")
    if then.found is not None and now.found is not None and then.found.place == now.found.place:
        return
    if then.found is None and now.found is None:
        return
    says = "nothing" if now.found is None else f"{name} {_place(now.found)}"
    if now.found is not None:
        says += f", recorded at {looked.history.record(now.found.place).recorded_at or 'no known time'}"
    if table.head.shape.kind != "versioned":
        told.notes.append(f"{name} is a plain table, which has changed since: now it would be {says}")
    elif then.rule in (rules.HORIZON, rules.EXPIRED):
        told.notes.append(f"with a longer history retention of {name} it would be {says}")
    else:
        told.decide(rules.CORRECTED, f"by what is known now it would be {says}")
