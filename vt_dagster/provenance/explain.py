"""``explain``: why a row is as it is, or is not there, down to the sources. No Spark.

It reads what runs have recorded: each commit says what its operator computes, which offsets of its
inputs it took and which versions of tables it read, so that no definitions are needed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any

from vt_dagster import rules
from vt_dagster.errors import StorageError
from vt_dagster.provenance import explain_stream_table_join
from vt_dagster.provenance.explain_aggregates import stream_aggregate, table_aggregate
from vt_dagster.provenance.explain_corrected_join import corrected
from vt_dagster.provenance.explain_request import Derivation, ExplainRequest
from vt_dagster.provenance.explain_row_by_row import PASSING, row_by_row
from vt_dagster.provenance.explain_stream_joins import corrected_streams, stream_stream
from vt_dagster.provenance.explain_suppress import held, suppress
from vt_dagster.provenance.explain_table_joins import foreign_key, of_histories, table_table
from vt_dagster.provenance.explain_windows import too_late, windowed_aggregate
from vt_dagster.provenance.explanation import Explanation, Reasoning, Record
from vt_dagster.provenance.expression_parser import split
from vt_dagster.provenance.log_reader import Log, as_micros, as_time, written
from vt_dagster.provenance.record_selection import asked_for, in_micros
from vt_dagster.provenance.source_origins import origin, rejected
from vt_dagster.provenance.version_history import place_of
from vt_dagster.storage.commit_log import Commit
from vt_dagster.topology.durations import spoken

SOURCE = "source"
_DEEPEST = 50
MOST, _MOST_IN_ALL = 20, 200
"""So many records that one was made of are named; so many are explained, down to the sources."""

KINDS: Mapping[str, Callable[[ExplainRequest], Derivation]] = {
    **dict.fromkeys(PASSING, row_by_row),
    "StreamTableJoin": explain_stream_table_join.stream_table,
    "CorrectedJoin": corrected,
    "TableTableJoin": table_table,
    "ForeignKeyJoin": foreign_key,
    "HistoryJoin": of_histories,
    "TableAggregate": table_aggregate,
    "StreamAggregate": stream_aggregate,
    "WindowedAggregate": windowed_aggregate,
    "Suppress": suppress,
    "StreamStreamJoin": stream_stream,
    "CorrectedStreamJoin": corrected_streams,
}
"""What each operator's results are made of, by the names that commits have of them."""
_BY_TIME_ALONE = ("StreamTableJoin", "StreamStreamJoin")
_SAME_KEY = {
    *PASSING,
    *("TableTableJoin", "ForeignKeyJoin", "HistoryJoin", "StreamStreamJoin"),
} - {"SelectKey"}


def explain(
    table: Any,
    *,
    key: Any = None,
    at: str | datetime | None = None,
    offset: tuple[int, int] | str | None = None,
    where: str | None = None,
    as_known_at: str | datetime | None = None,
    warehouse: str = "data/warehouse",
    most: int = MOST,
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
        most: so many of the records that a row was made of are named, the newest; all are counted.

    Returns:
        the explanation; its ``record`` is None where there is no such row, and then it says why.

    Raises:
        StorageError: there is no such asset, or the question is none.
    """
    name = table if isinstance(table, str) else "/".join(table.path)
    return Explainer(str(warehouse), most).explain(name, key, at, offset, where, as_known_at)


class Explainer:
    """Explains records of a warehouse, each once, however often it is met on the way down.

    Args:
        warehouse: the directory or URL of the tables.
        most: so many of the records that one was made of are named.
    """

    def __init__(self, warehouse: str, most: int = MOST) -> None:
        self._warehouse, self._most = warehouse, most
        self._known: dict[tuple[str, int, int], Explanation] = {}
        self._logs: dict[tuple[str, int | None], Log] = {}
        self._inputs: dict[tuple[str, str], Log | None] = {}
        self._left = _MOST_IN_ALL

    def explain(
        self,
        name: str,
        key: Any = None,
        at: str | datetime | None = None,
        offset: tuple[int, int] | str | None = None,
        where: str | None = None,
        as_known_at: str | datetime | None = None,
    ) -> Explanation:
        """See :func:`explain`."""
        known = None if as_known_at is None else in_micros(as_known_at)
        if (name, known) not in self._logs:
            self._logs[name, known] = Log.open(self._warehouse, name, known)
        log = self._logs[name, known]
        values = None if key is None else list(key) if isinstance(key, tuple | list) else [key]
        if offset is None and values is None and where is None:
            raise StorageError(
                f"{name}: expected a key, an offset or a condition that says which row is to be "
                "explained, got none; give --key, --offset or --where"
            )
        moment = None if at is None else in_micros(at)
        record, absent = asked_for(log, values, moment, offset, where)
        self._left = _MOST_IN_ALL
        if record is None:
            return self._absent(log, values, f"{absent}{log.limit}")
        return self._of(log, record)

    # -- why it is so ------------------------------------------------------------------------------

    def _of(self, log: Log, record: Record, depth: int = 0) -> Explanation:
        place = log.name, record.partition, record.offset
        if place in self._known:
            return self._known[place]
        if depth > _DEEPEST or not self._left:
            note = "it is one of many, or many assets deep: ask for it by itself"
            return Explanation(log.name, log.meaning.get("operator", SOURCE), record, notes=(note,))
        self._left -= 1
        self._known[place] = self._explained(log, record, depth)
        return self._known[place]

    def _explained(self, log: Log, record: Record, depth: int) -> Explanation:
        told = Reasoning()
        operator = log.meaning.get("operator", SOURCE)
        found = Explanation(log.name, operator, record)
        commit = log.commit_of(record)
        found = replace(found, written=written(commit))
        if commit is None:
            told.notes.append("the commit that it came by is not known any more")
        elif operator == SOURCE:
            found = replace(found, origin=origin(log, record, commit))
        elif operator in KINDS:
            found = self._made(found, log, record, commit, told, depth)
        else:
            told.notes.append(
                f"what a row of a {operator} is made of cannot be told; its inputs are "
                f"{', '.join(commit.inputs)}: ask for their rows by key"
            )
        if operator not in _BY_TIME_ALONE:
            place_of(log, record, told)
        return replace(found, decisions=tuple(told.decisions), notes=tuple(told.notes))

    def _made(
        self,
        found: Explanation,
        log: Log,
        record: Record,
        commit: Commit,
        reasoning: Reasoning,
        depth: int,
    ) -> Explanation:
        inputs = self._all_inputs(log, reasoning)
        if len(inputs) < len(set(_names(log))):
            return found
        made = KINDS[found.operator](ExplainRequest(log, record, commit, reasoning, inputs, self._most))
        parts = tuple(self._of(up, one, depth + 1) for up, one in made.parts)
        return replace(
            found,
            made_of=parts,
            made_of_in_all=len(parts) if made.count is None else made.count,
            candidates=tuple(made.candidates),
            candidates_in_all=made.candidates_in_all,
        )

    def _all_inputs(self, log: Log, reasoning: Reasoning) -> dict[str, Log]:
        """The logs of an operator's inputs, those that are there."""
        found: dict[str, Log] = {}
        for name in dict.fromkeys(_names(log)):
            place = log.name, name
            if place not in self._inputs:
                self._inputs[place] = log.input(name)
            up = self._inputs[place]
            if up is None:
                reasoning.notes.append(
                    f"the log of {name} that it was made of is not in {log.warehouse} any more"
                )
            else:
                found[name] = up
        return found

    # -- why it is not there -----------------------------------------------------------------------

    def _absent(self, log: Log, key: Sequence[Any] | None, absent: str) -> Explanation:
        """Why there is no such row: what became of what it would have been made of."""
        told = Reasoning()
        told.notes.append(f"{log.name} has no such row: {absent}")
        erased = sum(log.commit.erased.values())
        if erased:
            told.notes.append(
                f"{erased:,} rows of its log have been erased: it may have been one of them"
            )
        operator = log.meaning.get("operator", SOURCE)
        found = Explanation(log.name, operator)
        if key is not None and operator == SOURCE:
            rows, count = rejected(log, key)
            for reason in dict.fromkeys(row.reason for row in rows):
                of_it = sum(row.reason == reason for row in rows)
                told.decide(reason, f"{of_it} of the {count} rows in quarantine that mention the key")
            found = replace(found, rejected=tuple(rows))
        elif key is not None:
            found = self._not_made(found, log, key, told)
        return replace(found, decisions=tuple(told.decisions), notes=tuple(told.notes))

    def _not_made(
        self, found: Explanation, log: Log, key: Sequence[Any], reasoning: Reasoning
    ) -> Explanation:
        """Why an operator has made no row of a key."""
        inputs = self._all_inputs(log, reasoning)
        for name, up in inputs.items():
            if found.operator == "WindowedAggregate":
                late = too_late(log, up, key, self._most, reasoning)
                return replace(found, candidates=tuple(late), candidates_in_all=len(late))
            if found.operator in ("StreamTableJoin", "Suppress"):
                records = up.records(up.of_key(key))
                if found.operator == "Suppress":
                    records = held(log, up, name, records, reasoning)
                elif records:
                    _tell_not_joined(log, name, records[-1], reasoning)
                parts = [self._of(up, one, 1) for one in records[-1:]]
                return replace(found, made_of=tuple(parts or [self._by_key(up, key)]))
        if found.operator in _SAME_KEY:
            sides = list(inputs.values())[: 1 if found.operator == "ForeignKeyJoin" else None]
            return replace(found, made_of=tuple(self._by_key(up, key) for up in sides))
        reasoning.notes.append(f"nothing of it has come; it is made of {', '.join(inputs)}")
        return found

    def _by_key(self, log: Log, key: Sequence[Any]) -> Explanation:
        return self.explain(log.name, key=list(key))


def _tell_not_joined(log: Log, name: str, record: Record, reasoning: Reasoning) -> None:
    """Tells what became of the stream's newest record of a key that has no result."""
    commit = log.taken_by(name, record.partition, record.offset)
    released = log.commit.emitted_up_to.get(record.partition)
    if commit is None:
        reasoning.notes.append(f"no run of {log.name} has taken {record} yet")
    elif record.is_tombstone:
        reasoning.decide(rules.DROPPED, f"{record} has no value")
    elif released is not None and as_micros(record.timestamp) > released:
        now = log.commit.stream_time[record.partition]
        grace = explain_stream_table_join.grace_of(log.commit, record.partition)
        reasoning.decide(
            rules.WAITING,
            f"{record} of {record.timestamp} waits since run {commit.batch}, until stream time, which "
            f"is {as_time(now)}, has passed it by {spoken(grace)}",
        )
    else:
        reasoning.decide(rules.NO_MATCH, f"{record} found nothing, in an inner join")


def _names(log: Log) -> list[str]:
    """The names of an operator's inputs, one for each place that it has."""
    told, meaning = log.meaning.get("sources"), log.meaning
    if told is not None:
        return split(told)
    return [meaning["source"]] if "source" in meaning else [meaning["left"], meaning["right"]]
