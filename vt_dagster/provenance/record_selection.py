"""Selects the record of a log to explain."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from importlib import import_module
from typing import Any

import numpy as np

from vt_dagster.columns import OFFSET, PARTITION, RECORDED_AT, TIMESTAMP
from vt_dagster.errors import StorageError
from vt_dagster.provenance.explanation import Record
from vt_dagster.provenance.expression_parser import used
from vt_dagster.provenance.log_reader import Condition, Log, as_time, both
from vt_dagster.storage.arrow_reader import arrival_order, micros
from vt_dagster.topology.durations import parse_time

_MOST_NAMED = 10


def in_micros(moment: str | datetime) -> int:
    """Returns a time argument as epoch microseconds."""
    return parse_time(moment.isoformat() if isinstance(moment, datetime) else moment)


def asked_for(
    log: Log,
    key: Sequence[Any] | None,
    at: int | None,
    offset: tuple[int, int] | str | None,
    where: str | None,
) -> tuple[Record | None, str]:
    """Returns the selected record, or None and the reason why there is none."""
    if offset is not None:
        return _at_offset(log, *_parsed(offset))
    condition: Condition = log.of_key(key) if key is not None else both()
    if where is not None:
        return _only(log, condition, where)
    rows = log.rows(condition, only=[TIMESTAMP, RECORDED_AT])
    if not rows.num_rows:
        return None, f"there is no record of {spoken_key(key)} in its log"
    moments = micros(rows, TIMESTAMP)
    by_time = at is not None or log.head.shape.kind == "versioned"
    order = np.lexsort((*arrival_order(rows), *([moments] if by_time else [])))
    if at is not None:
        order = order[moments[order] <= at]
        if not len(order):
            first = as_time(int(moments.min()))
            return None, f"its first record of {spoken_key(key)} is of {first}, after {as_time(at)}"
    partition, place = (rows.column(c)[int(order[-1])].as_py() for c in (PARTITION, OFFSET))
    return log.one(partition, place), ""


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
        return None, f"its log has no partition {partition}, only {sorted(ends)}"
    if not 0 <= offset < ends[partition]:
        return None, f"partition {partition} of its log has the offsets 0 to {ends[partition] - 1}"
    record = log.one(partition, offset)
    gone = (
        "it was erased"
        if offset < log.head.erased_before.get(partition, 0)
        else "the log was truncated"
    )
    return record, "" if record else f"that offset is gone from its log: {gone}"


def _only(log: Log, condition: Condition, where: str) -> tuple[Record | None, str]:
    """Returns the only record that meets a SQL condition, or None and the reason."""
    try:
        duckdb: Any = import_module("duckdb")
    except ModuleNotFoundError:
        raise StorageError(
            "expected the package duckdb for a condition in SQL, found none; install it, or select "
            "the row by key or offset"
        ) from None
    rows = log.rows(condition, only=used([where], log.columns.names))
    try:
        found = duckdb.from_arrow(rows).filter(where).limit(_MOST_NAMED + 1).arrow()
    except duckdb.Error as error:
        raise StorageError(
            f"{log.name}: expected a SQL condition over {log.columns.names}, got {where!r}: "
            f"{str(error).splitlines()[0]}"
        ) from None
    table = found.read_all() if hasattr(found, "read_all") else found
    places = list(zip(*(table.column(c).to_pylist() for c in (PARTITION, OFFSET)), strict=True))
    if len(places) > 1:
        raise StorageError(
            f"{log.name}: expected a condition that one record meets, but {where!r} is met by "
            f"{'more than ' * (len(places) > _MOST_NAMED)}{min(len(places), _MOST_NAMED)}, for "
            f"example the offsets {', '.join(f'{p}:{o}' for p, o in places[:3])}; give --offset"
        )
    if not places:
        return None, f"no record meets {where!r}"
    return log.one(*places[0]), ""


def spoken_key(key: Sequence[Any] | None) -> str:
    """Returns a key as text for a message."""
    return "/".join(map(str, key or ()))
