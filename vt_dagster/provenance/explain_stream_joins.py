"""Explains stream-stream joins: the two records that match, or why a record has no match."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime, timedelta
from typing import Any

from vt_dagster import rules
from vt_dagster.columns import (
    CAUSE,
    LEFT_OFFSET,
    LEFT_PARTITION,
    OFFSET,
    PARTITION,
    RIGHT_OFFSET,
    RIGHT_PARTITION,
)
from vt_dagster.provenance.explain_request import Arrivals, Derivation, ExplainRequest
from vt_dagster.provenance.explanation import Candidate, Record
from vt_dagster.provenance.expression_parser import length, plain, split
from vt_dagster.provenance.log_reader import Condition, Log, as_micros, between, both
from vt_dagster.topology.durations import spoken

_PLACES = ((LEFT_PARTITION, LEFT_OFFSET), (RIGHT_PARTITION, RIGHT_OFFSET))
_AROUND = 2
"""Number of records shown before and after the window of a record without a match."""
Chosen = Callable[[int, Record | None], bool]
"""Whether a result's columns have the values of a side's record; None = a side without a match."""


def stream_stream(request: ExplainRequest) -> Derivation:
    """Returns the inputs of a result of a stream-stream join, see ``core.stream_stream_join``."""
    names = [request.meaning["left"], request.meaning["right"]]
    logs = [request.inputs[name] for name in names]
    place, told = request.record.partition, request.reasoning
    before, after = (length(request.meaning[c], place) for c in ("before", "after"))
    moment, nothing = request.record.timestamp, timedelta(0)
    back = [as_micros(moment - max(one, nothing)) for one in (after, before)]
    lefts, rights = (
        [
            one
            for one in log.records(both(_same_key(request, log), between(since, as_micros(moment))))
            if not one.is_tombstone and request.turn(name, one) < 2
        ]
        for name, log, since in zip(names, logs, back, strict=True)
    )
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
        told.decide(rules.LATE, "the later of the two by arrival came after the grace period")
    if pairs:
        return _matched(request, names, logs, pairs)
    kept = {"inner": (), "left": (0,), "outer": (0, 1)}[request.meaning["kind"]]
    for side in kept:
        alone = [
            one
            for one in (lefts, rights)[side]
            if one.timestamp == moment and of_side(side, one) and of_side(1 - side, None)
        ]
        if alone:
            return _alone(request, logs, side, _nth(request, alone), (before, after))
    told.notes.append("its input records are gone")
    return Derivation()


def _same_key(request: ExplainRequest, log: Log) -> Condition:
    return log.same_key(request.record.values, request.log.key)


def _chosen(request: ExplainRequest, logs: Sequence[Log]) -> Chosen:
    """Returns a test whether a record fits the result's columns that are copied from its side."""
    found: list[tuple[int, str, str]] = []
    sides = {"left": 0, "right": 1}
    for part in split(request.meaning["select"]):
        sql, _, name = part.partition(" as ")
        side, _, column = sql.strip().partition(".")
        if side.lower() not in sides:
            continue
        place = sides[side.lower()]
        columns = [*logs[place].columns.names]
        if column == "*":
            found += [(place, c, c) for c in columns]
        elif (own := plain(column, columns)) is not None:
            found.append((place, own, name.strip().strip("`") or own))
    values, key = request.record.values, request.log.key

    def has(side: int, record: Record | None) -> bool:
        if record is None:
            return all(
                values[name] is None
                for place, _, name in found
                if place == side and name in values and name not in key
            )
        return all(
            values[name] == record.values[column]
            for place, column, name in found
            if place == side and name in values and column in record.values and name not in key
        )

    return has


def _nth(request: ExplainRequest, found: Sequence[Any]) -> Any:
    """Returns the candidate with the same position as the result has among equal results."""
    alike = [one for one in request.results(at=True) if dict(one.values) == dict(request.record.values)]
    if len(found) > 1 and len(found) != len(alike):
        request.reasoning.notes.append(
            f"{len(found)} candidates look the same from here: this is one of them"
        )
        return found[0]
    return found[[one.offset for one in alike].index(request.record.offset)] if found[1:] else found[0]


def _matched(
    request: ExplainRequest,
    names: Sequence[str],
    logs: Sequence[Log],
    pairs: Sequence[tuple[Record, Record]],
) -> Derivation:
    arrivals = Arrivals(request, names)
    ordered = {
        (place, one.place): i
        for i, (place, one) in enumerate(
            arrivals.sorted([(side, one) for pair in pairs for side, one in enumerate(pair)])
        )
    }

    def place(pair: tuple[Record, Record]) -> tuple[int, datetime, int]:
        at = [ordered[side, one.place] for side, one in enumerate(pair)]
        first = pair[at.index(min(at))]
        return max(at), first.timestamp, first.offset

    left, right = _nth(request, sorted(pairs, key=place))
    late = ordered[0, left.place] > ordered[1, right.place]
    _tell_match(request, left, right)
    request.reasoning.decide(rules.TRIGGERED, f"{left if late else right}, which came after the other")
    parts = [(logs[0], left), (logs[1], right)]
    return Derivation(parts[::-1] if late else parts)


def _tell_match(request: ExplainRequest, left: Record, right: Record) -> None:
    apart = right.timestamp - left.timestamp
    said = spoken(abs(apart)) + (" before it" if apart < timedelta(0) else " after it")
    request.reasoning.decide(
        rules.MATCHED, f"{right} lies {said if apart else 'at the time of'} {left}"
    )


def _alone(
    request: ExplainRequest,
    logs: Sequence[Log],
    side: int,
    record: Record,
    window: tuple[timedelta, timedelta],
) -> Derivation:
    """Returns a record without a match, with the other side's records around it as candidates."""
    before, after = window if side == 0 else (window[1], window[0])
    low, high = record.timestamp - before, record.timestamp + after
    name = request.meaning[("left", "right")[1 - side]]
    other = logs[1 - side]
    if any(record.values.get(c) is None for c in logs[side].key):
        request.reasoning.decide(rules.NO_MATCH, "a record without a key has no match: emitted at once")
        return Derivation([(logs[side], record)])
    request.reasoning.decide(
        rules.NO_MATCH,
        f"{name} had no record of its key from {low} to {high}, both inclusive, when stream time had "
        f"passed {high} and the grace period",
    )
    near = [one for one in other.records(_same_key(request, other)) if not one.is_tombstone]
    near.sort(key=lambda one: (one.timestamp, one.offset))
    inside = [one for one in near if low <= one.timestamp <= high]
    around = [one for one in near if one.timestamp < low][-_AROUND:] + inside
    around += [one for one in near if one.timestamp > high][:_AROUND]
    shown = [
        Candidate(
            one,
            None,
            None,
            None,
            request.turn(name, one) < 2,
            False,
            False,
            (rules.RECORDED_SINCE if one in inside else rules.OTHER_TIME).name,
        )
        for one in around
    ]
    return Derivation([(logs[side], record)], None, shown[: request.most], len(near))


def corrected_streams(request: ExplainRequest) -> Derivation:
    """Returns the inputs of a row of a corrected stream-stream join, see
    ``core.stream_stream_join``: the row's key has the places of its records."""
    told, parts = request.reasoning, list[tuple[Log, Record]]()
    for side, (partition, offset) in zip(("left", "right"), _PLACES, strict=True):
        log, place = request.inputs[request.meaning[side]], request.record.values
        if place[offset] < 0:
            continue
        found = log.one(place[partition], place[offset])
        if found is None:
            told.notes.append(f"its record of {log.name} is gone{log.limit}")
            return Derivation(parts)
        parts.append((log, found))
    if request.record.is_late:
        told.decide(rules.LATE, "the later of its records by arrival came after corrected_for")
    if len(parts) == len(_PLACES):
        _tell_match(request, parts[0][1], parts[1][1])
        return Derivation(parts)
    cause = _cause(request)
    if cause is None:
        name, why = parts[0][0].name, "when stream time had passed its window and the grace period"
        told.decide(rules.NO_MATCH, f"this record of {name} had no match {why}")
        return Derivation(parts)
    where = cause[PARTITION], cause[OFFSET]
    by = f"{cause['table']} {where[0]}:{where[1]}"
    told.decide(rules.CORRECTED, f"revision 1: retracted by {by}, a match that came later")
    other = request.inputs[cause["table"]]
    return Derivation([*parts, *[(other, one) for one in other.at([where])]])


def _cause(request: ExplainRequest) -> dict[str, Any] | None:
    """Returns the cause of a retraction: the record that matches; None = the row is no retraction."""
    place = request.record.partition
    end = {place: request.log.commit.next_offset.get(place, 0)}
    rows = request.log.rows(request.log.same_key(request.record.values), end=end, only=[CAUSE])
    return next(one[CAUSE] for one in rows.to_pylist() if one[OFFSET] == request.record.offset)
