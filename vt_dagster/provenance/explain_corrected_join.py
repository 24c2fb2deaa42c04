"""Explains corrected joins: the version that matches, and the records that corrected a row."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from vt_dagster import rules
from vt_dagster.columns import CAUSE, IS_TOMBSTONE, LEFT_OFFSET, LEFT_PARTITION, REVISION
from vt_dagster.provenance.explain_request import Derivation, ExplainRequest
from vt_dagster.provenance.explain_stream_table_join import answered, looked_up
from vt_dagster.provenance.explanation import Record
from vt_dagster.provenance.log_reader import Place


def corrected(request: ExplainRequest) -> Derivation:
    """Returns the inputs of a row of a corrected join, see ``core.stream_table_join``."""
    left, right = request.meaning["left"], request.meaning["right"]
    stream, told = request.inputs[left], request.reasoning
    rows = _revisions(request)
    place = _place(request, rows)
    record = None if place is None else stream.one(*place)
    if record is None:
        told.notes.append(f"its record of {left} is gone{stream.limit}")
        return Derivation()
    _tell_revisions(request, rows)
    looked = looked_up(request, right, record, [record.values[c] for c in stream.key])
    made = answered(request, right, looked, [(stream, record)])
    there = {(log.name, one.place) for log, one in made.parts}
    gone = [
        (request.inputs[right], one)
        for one in _causes(request, rows)
        if request.record.is_tombstone and (request.inputs[right].name, one.place) not in there
    ]
    return Derivation([*made.parts, *gone], None, made.candidates, made.candidates_in_all)


def _revisions(request: ExplainRequest) -> pa.Table:
    """Returns all rows of the key in the log, in order; each is a revision."""
    place = request.record.partition
    end = {place: request.log.commit.next_offset.get(place, 0)}
    only = [REVISION, CAUSE, IS_TOMBSTONE, LEFT_OFFSET, LEFT_PARTITION]
    return request.log.rows(request.log.same_key(request.record.values), end=end, only=only)


def _place(request: ExplainRequest, rows: pa.Table) -> Place | None:
    """Returns the place of the row's record in the stream's log; None = the row has none."""
    mine = _of_record(request, rows)
    partition = mine.get(LEFT_PARTITION, request.record.partition)
    return None if mine.get(LEFT_OFFSET) is None else (partition, mine[LEFT_OFFSET])


def _of_record(request: ExplainRequest, rows: pa.Table) -> dict[str, Any]:
    return next(one for one in rows.to_pylist() if one["offset"] == request.record.offset)


def _tell_revisions(request: ExplainRequest, rows: pa.Table) -> None:
    """Adds the row's revision with its cause, and the key's other revisions."""
    every = rows.to_pylist()
    mine = _of_record(request, rows)
    if mine[CAUSE] is not None:
        request.reasoning.decide(
            rules.CORRECTED, f"revision {mine[REVISION]}, by {_spoken(mine[CAUSE])}"
        )
    else:
        request.reasoning.decide(
            rules.APPLIED, f"revision {mine[REVISION]}: it came with its stream record"
        )
    others = [one for one in every if one["offset"] != mine["offset"]][-request.most :]
    for one in others:
        by = "with its stream record" if one[CAUSE] is None else f"by {_spoken(one[CAUSE])}"
        gone = ", a tombstone" * one[IS_TOMBSTONE]
        place = f"{request.record.partition}:{one['offset']}"
        request.reasoning.notes.append(f"revision {one[REVISION]} at {place}{gone}: {by}")


def _spoken(cause: dict[str, Any]) -> str:
    return f"{cause['table']} {cause['partition']}:{cause['offset']}"


def _causes(request: ExplainRequest, rows: pa.Table) -> list[Record]:
    cause = _of_record(request, rows)[CAUSE]
    if cause is None:
        return []
    table = request.inputs[request.meaning["right"]]
    return table.at([(cause["partition"], cause["offset"])])
