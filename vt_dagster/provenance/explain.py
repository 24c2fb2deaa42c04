"""``explain``: why a row has its values, or does not exist, down to the sources. No Spark.

Reads the commits: each records what its operator computes, the offsets of its inputs that its run
consumed and the versions of tables that it read. So no definitions are needed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import pairwise
from typing import Any

from vt_dagster import rules
from vt_dagster.errors import StorageError, counted
from vt_dagster.provenance import explain_aggregates as aggregates
from vt_dagster.provenance import explain_joins as joins
from vt_dagster.provenance.explain_request import (
    Derivation,
    ExplainRequest,
    Explanation,
    Log,
    Place,
    Reasoning,
    Record,
    at_time,
    both,
    written,
)
from vt_dagster.provenance.explain_sources import duplicates_of, origin, place_of, rejected
from vt_dagster.provenance.expressions import in_micros, select_record
from vt_dagster.storage.arrow_reader import name_of, of_key
from vt_dagster.topology import specification as spec
from vt_dagster.topology.durations import as_time, epoch_micros, spoken
from vt_dagster.topology.options import check_arguments

# Filter, map_values, flat_map_values, to_table, to_stream, merge and select_key


@dataclass(frozen=True)
class Passing:
    """The properties that the results of an operator share with their input records.

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


PASSING: Mapping[type[spec.OperatorSpec], Passing] = {
    spec.FilterSpec: Passing(tombstone=False),
    spec.MapValuesSpec: Passing(values=False),
    spec.ToTableSpec: Passing(),
    spec.ToStreamSpec: Passing(),
    spec.MergeSpec: Passing(place=False),
    spec.SelectKeySpec: Passing(key=False, place=False),
    spec.FlatMapValuesSpec: Passing(values=False, tombstone=False, elements=True),
}
"""The operators whose result depends on one record only, by their specification."""


def row_by_row(request: ExplainRequest[spec.OperatorSpec]) -> Derivation:
    """Returns the input record of a result; all candidates if several look equal. If a filter of a
    plain table emitted a tombstone because a row left, the row that was replaced comes before it."""
    operator = request.specification
    found = _origins(request)
    if request.record.is_tombstone and isinstance(operator, spec.FilterSpec):
        condition = f"{'not ' * operator.negate}{operator.predicate}"
        request.note(f"a tombstone: its record is a tombstone, or does not meet: {condition}")
    return Derivation(found[: request.most], len(found))


def _origins(request: ExplainRequest[spec.OperatorSpec]) -> list[tuple[Log, Record]]:
    record, passing = request.record, PASSING[type(request.specification)]
    taken = [
        (request.inputs[name], one) for name in request.inputs for one in _records_of_run(request, name)
    ]
    gone = request.misses_any(epoch_micros(record.timestamp), here=passing.place)
    if passing.place and not passing.elements and len(request.inputs) == 1 and not gone:
        results = [one.offset for one in request.results(at=True)]
        if len(results) == len(taken):  # each input gave one result, in order
            taken = [taken[results.index(record.offset)]]
    alike = [(source, one) for source, one in taken if _may_be_input(request, one)]
    if gone and (record.is_tombstone or not passing.values):
        return []  # nothing tells its input from those that are gone
    befores: list[tuple[Log, Record]] = []
    filtered = isinstance(request.specification, spec.FilterSpec) and record.is_tombstone
    if filtered and alike and alike[0][0].head.shape.kind == "table":
        rows = rows_before(alike)
        alike = [(source, one) for source, one in alike if one.place in rows]
        befores = [(source, rows[one.place]) for source, one in alike]
    if len(alike) <= 1:
        return [*befores, *alike]
    what = "one of them" if not passing.elements else "one of them, or an element of it"
    request.note(
        f"{len(alike)} records of its run cannot be told apart (they give equal results or none): "
        f"its input is {what}"
    )
    both_rows = {one.place: (source, one) for source, one in (*befores, *alike)}
    return [both_rows[place] for place in sorted(both_rows)] if befores else alike


def rows_before(found: Sequence[tuple[Log, Record]]) -> dict[Place, Record]:
    """Returns the rows that records of a plain table replaced, by the partition and offset of the
    replacing record. A filter emits a tombstone only if the replaced row passed it.

    Args:
        found: records of one key and partition.
    """
    log, last = found[-1]
    end = {last.partition: last.offset + 1}
    every = log.records(log.same_key(last.values), end=end)
    before = {one.place: row for row, one in pairwise(every) if not row.is_tombstone}
    return {one.place: before[one.place] for _, one in found if one.place in before}


def _records_of_run(request: ExplainRequest[spec.OperatorSpec], name: str) -> list[Record]:
    """Returns the records of an input that the run consumed and that have the result's time."""
    source, record, passing = request.inputs[name], request.record, PASSING[type(request.specification)]
    ranges = request.commit.taken.get(name, {})
    if passing.place:
        ranges = {p: r for p, r in ranges.items() if p == record.partition}
    same = request.same_key(source) if passing.key else None
    return source.records(
        both(same, at_time(record.timestamp)),
        {p: start for p, (start, _) in ranges.items()},
        {p: end for p, (_, end) in ranges.items()},
    )


def _may_be_input(request: ExplainRequest[spec.OperatorSpec], source: Record) -> bool:
    """Returns whether a record may be the input of the result."""
    result, passing = request.record, PASSING[type(request.specification)]
    if passing.tombstone and source.is_tombstone != result.is_tombstone:
        return False
    if not passing.tombstone and source.is_tombstone and not result.is_tombstone:
        return passing.elements
    if not passing.values or result.is_tombstone:
        return True
    own = () if passing.key else request.log.key
    return all(
        source.values[c] == value
        for c, value in result.values.items()
        if c in source.values and c not in own
    )


# Explain


_DEEPEST = 50
MOST, _MOST_IN_ALL = 20, 200
"""Maximum number of named inputs of a record; maximum number of records explained in one call."""

KINDS: Mapping[type[spec.Specification], Callable[[ExplainRequest[Any]], Derivation]] = {
    **dict.fromkeys(PASSING, row_by_row),
    spec.StreamTableJoinSpec: joins.stream_table,
    spec.CorrectedJoinSpec: joins.corrected,
    spec.TableTableJoinSpec: joins.table_table,
    spec.ForeignKeyJoinSpec: joins.foreign_key,
    spec.HistoryJoinSpec: joins.of_histories,
    spec.TableAggregateSpec: aggregates.table_aggregate,
    spec.StreamAggregateSpec: aggregates.stream_aggregate,
    spec.WindowedAggregateSpec: aggregates.windowed_aggregate,
    spec.SuppressSpec: aggregates.suppress,
    spec.StreamStreamJoinSpec: joins.stream_stream,
    spec.CorrectedStreamJoinSpec: joins.corrected_streams,
}
"""Finds the inputs of a result, by the operator's specification."""
_BY_TIME_ALONE = (spec.StreamTableJoinSpec, spec.StreamStreamJoinSpec)
_SAME_KEY = {
    *(PASSING.keys() - {spec.SelectKeySpec}),
    *(spec.TableTableJoinSpec, spec.ForeignKeyJoinSpec),
    *(spec.HistoryJoinSpec, spec.StreamStreamJoinSpec),
}


@check_arguments(error=StorageError)
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
    """Explains why a row of an asset has its values, or does not exist. Needs neither Spark nor the
    asset's definition.

    Args:
        table: an asset's name (with a key prefix: ``shop/prices``), or the stream or table itself.
        key: the value of the key; a tuple or list for a composite key. Values may be texts. Without
            ``at``: the key's newest record, by timestamp in a versioned table, else by arrival.
        at: selects the key's record with the largest timestamp up to this time (inclusive).
        offset: instead of a key, a partition and an offset of the log: ``(0, 17)`` or ``"0:17"``.
        where: instead of a key, a SQL condition over the log's columns that exactly one record meets.
            With a key, only the key's records are searched. Needs the package duckdb.
        as_known_at: system time: only records up to it (inclusive) count; None = all.
        warehouse: the directory or URL of the tables.
        most: maximum number of named inputs of a row, the newest; all are counted.

    Returns:
        the explanation; if there is no such row, its ``record`` is None and ``notes`` give the reason.

    Raises:
        StorageError: there is no such asset, or the arguments do not select a row.
    """
    name = name_of(table)
    return Explainer(str(warehouse), most).explain(name, key, at, offset, where, as_known_at)


class Explainer:
    """Explains records of a warehouse, see :func:`explain`; caches the explanation of each record."""

    def __init__(self, warehouse: str, most: int = MOST) -> None:
        self._warehouse, self._most = warehouse, most
        self._known: dict[tuple[str, Place], Explanation] = {}
        self._logs: dict[tuple[str, int | None], Log] = {}
        self._inputs: dict[tuple[str, str, int | None], Log | None] = {}
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
        """Explains a row of an asset, like :func:`explain`."""
        known = None if as_known_at is None else in_micros(as_known_at)
        if (name, known) not in self._logs:
            self._logs[name, known] = Log.open(self._warehouse, name, known)
        log = self._logs[name, known]
        values = None if key is None else list(key) if isinstance(key, tuple | list) else [key]
        if offset is None and values is None and where is None:
            raise StorageError(
                f"{name}: expected a key, an offset or a condition that selects the row, got none; "
                "give --key, --offset or --where"
            )
        moment = None if at is None else in_micros(at)
        record, absent = select_record(log, values, moment, offset, where)
        self._left = _MOST_IN_ALL
        if record is None:
            return self._absent(log, values, f"{absent}{log.limit}")
        return self._of(log, record)

    # -- a row that exists -------------------------------------------------------------------------

    def _of(self, log: Log, record: Record, depth: int = 0) -> Explanation:
        place = log.name, record.place
        if place in self._known:
            return self._known[place]
        if depth > _DEEPEST or not self._left:
            note = "not explained here: the limit of records or depth is reached; explain it by itself"
            return Explanation(log.name, log.operator, record, notes=(note,))
        self._left -= 1
        self._known[place] = self._explained(log, record, depth)
        return self._known[place]

    def _explained(self, log: Log, record: Record, depth: int) -> Explanation:
        reasoning, operator, commit = Reasoning(), log.specification, log.commit_of(record)
        found = Explanation(log.name, log.operator, record, written(commit))
        if commit is None:
            reasoning.note("the commit that wrote it is gone")
        elif operator is None:
            again, count = duplicates_of(log, record)
            found = replace(found, origin=origin(log, record, commit), rejected=tuple(again))
            if count:
                columns = ", ".join(log.head.shape.unique_by or ())
                reasoning.note(f"duplicates in quarantine that mention its {columns}: {count}")
        else:
            inputs = self._all_inputs(log, reasoning)
            if len(inputs) == len(set(operator.inputs)):
                request = ExplainRequest[Any](log, record, commit, reasoning, inputs, self._most)
                made = KINDS[type(operator)](request)
                parts = tuple(self._of(up, one, depth + 1) for up, one in made.parts)
                found = replace(
                    found,
                    made_of=parts,
                    made_of_in_all=len(parts) if made.count is None else made.count,
                    candidates=tuple(made.candidates),
                    candidates_in_all=made.candidates_in_all,
                )
        if not isinstance(operator, _BY_TIME_ALONE):
            place_of(log, record, reasoning)
        return replace(found, decisions=tuple(reasoning.decisions), notes=tuple(reasoning.notes))

    def _all_inputs(self, log: Log, reasoning: Reasoning, known: int | None = None) -> dict[str, Log]:
        """Returns the logs of an operator's inputs as of a system time (None = now), without missing
        ones."""
        found: dict[str, Log] = {}
        for name in dict.fromkeys(() if log.specification is None else log.specification.inputs):
            place = log.name, name, known
            if place not in self._inputs:
                try:
                    self._inputs[place] = log.input(name, known)
                except StorageError as error:
                    if known is None:
                        raise
                    reasoning.note(str(error))  # nothing recorded by then, or truncated since
                    continue
            up = self._inputs[place]
            if up is None:
                reasoning.note(
                    f"the log of its input {name} is not in {log.warehouse}, or was created anew since"
                )
            else:
                found[name] = up
        return found

    # -- a row that does not exist -----------------------------------------------------------------

    def _absent(self, log: Log, key: Sequence[Any] | None, absent: str) -> Explanation:
        """Explains why there is no such row: the outcome of the records it would have as inputs."""
        reasoning = Reasoning(notes=[f"{log.name} has no such row: {absent}"])
        erased = sum(log.commit.erased.values())
        if erased:
            rows = counted(erased, "row of its log was", "rows of its log were")
            reasoning.note(f"{rows} erased: this may be one of them")
        found = Explanation(log.name, log.operator)
        if key is not None and log.specification is None:
            found = _in_quarantine(found, log, key, reasoning)
        elif key is not None:
            found = self._not_made(found, log, key, reasoning)
        return replace(found, decisions=tuple(reasoning.decisions), notes=tuple(reasoning.notes))

    def _not_made(
        self, found: Explanation, log: Log, key: Sequence[Any], reasoning: Reasoning
    ) -> Explanation:
        """Explains why an operator has no row for a key."""
        operator = log.specification
        inputs = self._all_inputs(log, reasoning, log.known)
        if operator is not None and operator.inputs[0] not in inputs:
            return found  # the notes say why
        asked = {"key": key, "as_known_at": None if log.known is None else as_time(log.known)}
        if isinstance(operator, spec.CorrectedJoinSpec):
            return self._not_corrected(found, log, operator, inputs[operator.left], key, reasoning)
        for name, up in inputs.items():
            if isinstance(operator, spec.WindowedAggregateSpec):
                late = aggregates.too_late(log, operator, up, key, self._most, reasoning)
                return replace(found, candidates=tuple(late), candidates_in_all=len(late))
            if isinstance(operator, spec.StreamTableJoinSpec | spec.SuppressSpec):
                records = up.records(up.of_key(key))
                if isinstance(operator, spec.SuppressSpec):
                    records = aggregates.held(log, up, name, records, reasoning)
                elif records:
                    _note_not_joined(log, name, records[-1], reasoning)
                parts = [self._of(up, one, 1) for one in records[-1:]]
                return replace(found, made_of=tuple(parts or [self.explain(up.name, **asked)]))
        if type(operator) in _SAME_KEY:
            end = 1 if isinstance(operator, spec.ForeignKeyJoinSpec) else len(inputs)
            sides = {name: self.explain(up.name, **asked) for name, up in [*inputs.items()][:end]}
            for name, side in sides.items():
                if side.record is not None and not log.has_consumed(name, side.record):
                    reasoning.note(f"no run of {log.name} has read {side.record} yet")
            return replace(found, made_of=tuple(sides.values()))
        reasoning.note(f"no run has read a record of it; its inputs are {', '.join(inputs)}")
        return found

    def _not_corrected(
        self,
        found: Explanation,
        log: Log,
        join: spec.CorrectedJoinSpec,
        stream: Log,
        key: Sequence[Any],
        reasoning: Reasoning,
    ) -> Explanation:
        """Explains why a corrected join has no row for a key, which identifies a stream record."""
        if join.key:
            records = stream.records(lambda columns: of_key(stream.path, columns, join.key, key))
        else:
            records = stream.at([Place(*map(int, key))])
        if records:
            _note_not_joined(log, join.left, records[-1], reasoning)
            return replace(found, made_of=(self._of(stream, records[-1], 1),))
        reasoning.note(f"{join.left} has no record of it in its log{stream.limit}")
        quarantined = bool(join.key) and stream.specification is None
        return _in_quarantine(found, stream, key, reasoning) if quarantined else found


def _in_quarantine(
    found: Explanation, log: Log, key: Sequence[Any], reasoning: Reasoning
) -> Explanation:
    """Adds the rows of a source's quarantine that mention a key, and counts them by reason."""
    rows, count = rejected(log, key)
    one, many = "row in quarantine that mentions the key", "rows in quarantine that mention the key"
    whole = counted(count, one, many)
    for reason in dict.fromkeys(row.reason for row in rows):
        of_it = sum(row.reason == reason for row in rows)
        reasoning.decide(reason, f"{of_it} of {whole}")
    return replace(found, rejected=tuple(rows))


def _note_not_joined(log: Log, name: str, record: Record, reasoning: Reasoning) -> None:
    """Adds the outcome of the stream's newest record of a key that has no join result."""
    commit = log.taken_by(name, *record.place)
    released = log.commit.emitted_up_to.get(record.partition)
    if commit is None:
        reasoning.note(f"no run of {log.name} has read {record} yet")
    elif record.is_tombstone:
        reasoning.decide(rules.DROPPED, f"{record} has no value")
    elif released is not None and record.micros > released:
        now = log.commit.stream_time[record.partition]
        join = log.commit.shape.specification
        assert isinstance(join, spec.LookupJoinSpec)
        grace = join.grace_of(record.partition)
        reasoning.decide(
            rules.WAITING,
            f"{record} of {record.timestamp} waits since run {commit.batch}, until stream time is "
            f"{spoken(grace)} after it; stream time is {as_time(now)}",
        )
    else:
        reasoning.decide(rules.NO_MATCH, f"{record} has no match, and the join is an inner join")
