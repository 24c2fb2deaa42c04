"""Corrected join: the version that answers now, and which records have corrected a row."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from vt_dagster import rules
from vt_dagster.columns import CAUSE, IS_TOMBSTONE, LEFT_OFFSET, LEFT_PARTITION, REVISION
from vt_dagster.provenance.explain_request import Asked, Made
from vt_dagster.provenance.explain_stream_table_join import answered, looked_up
from vt_dagster.provenance.explanation import Record
from vt_dagster.provenance.log_reader import Place


def corrected(asked: Asked) -> Made:
    """What a row of a corrected join was made of, see ``core.corrected_join``."""
    left, right = asked.meaning["left"], asked.meaning["right"]
    stream, told = asked.inputs[left], asked.told
    rows = _revisions(asked)
    place = _place(asked, rows)
    record = None if place is None else stream.one(*place)
    if record is None:
        told.notes.append(f"its record of {left} is not there any more{stream.limit}")
        return Made()
    _tell_revisions(asked, rows)
    looked = looked_up(asked, right, record, [record.values[c] for c in stream.key])
    made = answered(asked, right, looked, [(stream, record)])
    there = {(log.name, one.place) for log, one in made.parts}
    gone = [
        (asked.inputs[right], one)
        for one in _causes(asked, rows)
        if asked.record.is_tombstone and (asked.inputs[right].name, one.place) not in there
    ]
    return Made([*made.parts, *gone], None, made.candidates, made.candidates_in_all)


def _revisions(asked: Asked) -> pa.Table:
    """All rows of the key that the log has, in order: a revision each."""
    place = asked.record.partition
    end = {place: asked.log.commit.next_offset.get(place, 0)}
    only = [REVISION, CAUSE, IS_TOMBSTONE, LEFT_OFFSET, LEFT_PARTITION]
    return asked.log.rows(asked.log.same_key(asked.record.values), end=end, only=only)


def _place(asked: Asked, rows: pa.Table) -> Place | None:
    """Where the row's record is in the stream's log."""
    mine = _of_record(asked, rows)
    partition = mine.get(LEFT_PARTITION, asked.record.partition)
    return None if mine.get(LEFT_OFFSET) is None else (partition, mine[LEFT_OFFSET])


def _of_record(asked: Asked, rows: pa.Table) -> dict[str, Any]:
    return next(one for one in rows.to_pylist() if one["offset"] == asked.record.offset)


def _tell_revisions(asked: Asked, rows: pa.Table) -> None:
    """Tells which revision the row is and what caused it, and the others that there are."""
    every = rows.to_pylist()
    mine = _of_record(asked, rows)
    if mine[CAUSE] is not None:
        asked.told.decide(rules.CORRECTED, f"revision {mine[REVISION]}, by {_spoken(mine[CAUSE])}")
    else:
        asked.told.decide(rules.APPLIED, f"revision {mine[REVISION]}: it came with its stream record")
    others = [one for one in every if one["offset"] != mine["offset"]][-asked.most :]
    for one in others:
        by = "with its stream record" if one[CAUSE] is None else f"by {_spoken(one[CAUSE])}"
        gone = ", a tombstone" * one[IS_TOMBSTONE]
        place = f"{asked.record.partition}:{one['offset']}"
        asked.told.notes.append(f"revision {one[REVISION]} at {place}{gone}: {by}")


def _spoken(cause: dict[str, Any]) -> str:
    return f"{cause['table']} {cause['partition']}:{cause['offset']}"


def _causes(asked: Asked, rows: pa.Table) -> list[Record]:
    cause = _of_record(asked, rows)[CAUSE]
    if cause is None:
        return []
    table = asked.inputs[asked.meaning["right"]]
    return table.at([(cause["partition"], cause["offset"])])
