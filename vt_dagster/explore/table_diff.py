"""Compares two tables, or one table at two system times. No Spark.

Compares the same rows as ``vt-dagster compare``: versions of versioned tables, current rows of tables,
records of streams; ignores offsets.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from vt_dagster.columns import TIMESTAMP
from vt_dagster.errors import StorageError
from vt_dagster.provenance.explain_request import Log
from vt_dagster.storage.arrow_reader import look_up
from vt_dagster.storage.commit_log import columns_to_compare, require_whole_stream
from vt_dagster.storage.values import texts
from vt_dagster.topology.durations import parse_time

MOST, SHOWN = 1_000_000, 50
"""Maximum number of records of a log, and of differing rows shown."""
_COUNT = "_count"


@dataclass(frozen=True)
class Side:
    """A table, as known at a system time; None = now."""

    name: str
    known: str | None = None


@dataclass(frozen=True)
class Difference:
    """A row that one table has more often than the other.

    Args:
        first: whether it is the first table that has the row more often.
        values: the row's values.
        differs: the columns in which it differs from the row above, if that has the same key and time.
    """

    first: bool
    values: dict[str, Any]
    differs: frozenset[str]


@dataclass(frozen=True)
class TableDiff:
    """The difference between two tables.

    Args:
        what: the kind of rows: ``versions``, ``records`` or ``current rows``.
        columns: the compared columns.
        rows: the number of rows in each table.
        only: the number of rows in each table that the other lacks.
        shown: some of these rows, by key.
    """

    what: str
    columns: Sequence[str]
    rows: tuple[int, int]
    only: tuple[int, int]
    shown: Sequence[Difference]


def table_diff(warehouse: str, one: Side, other: Side) -> TableDiff:
    """Returns the rows that differ between two tables.

    Raises:
        StorageError: the tables have different columns, or are too large for a page; or the log of one
            of two streams was truncated.
    """
    logs = [Log.open(warehouse, side.name) for side in (one, other)]
    for log in logs:
        if log.commit.total > MOST:
            raise StorageError(
                f"{log.name}: expected at most {MOST:,} records to compare on a page, got "
                f"{log.commit.total:,}; run vt-dagster compare {one.name} {other.name} instead"
            )
        if one.name != other.name:  # at two times, one asset lacks the same records
            require_whole_stream(log.name, log.head)
    what = "versions" if all(log.versioned for log in logs) else None
    sides = [_rows(warehouse, s, log, what) for s, log in zip((one, other), logs, strict=True)]
    names = [sorted(rows.column_names) for rows in sides]
    if names[0] != names[1]:
        raise StorageError(
            f"expected the same columns in {one.name} and {other.name}, got {names[0]} and {names[1]}; "
            "choose two tables with the same columns"
        )
    columns = sides[0].column_names
    only = [_more(ours, theirs, columns) for ours, theirs in (sides, reversed(sides))]
    key = [c for c in logs[0].key if c in columns]
    kind = logs[0].head.shape.kind
    what_differs = what or ("records" if kind == "stream" else "current rows")
    counts = tuple(int(pc.call_function("sum", [rows.column(_COUNT)]).as_py() or 0) for rows in only)
    return TableDiff(
        what_differs,
        columns,
        (sides[0].num_rows, sides[1].num_rows),
        (counts[0], counts[1]),
        _shown(only, columns, key),
    )


def _rows(warehouse: str, side: Side, log: Log, what: str | None) -> pa.Table:
    if side.known is not None:
        parse_time(side.known)
    rows = look_up(warehouse, side.name, what, as_known_at=side.known)
    return rows.select(columns_to_compare(rows.column_names, log.head))


def _more(ours: pa.Table, theirs: pa.Table, columns: Sequence[str]) -> pa.Table:
    """Returns the rows that the first table has more often than the second, each with the surplus."""
    parts: list[pa.Table] = []
    for rows, sign in ((ours, 1), (theirs, -1)):
        flat = {c: _flat(rows.column(c)) for c in columns}
        counts = pa.array([sign] * rows.num_rows, pa.int64())
        parts.append(pa.table({**flat, _COUNT: counts}))
    both = pa.concat_tables(parts, promote_options="permissive")
    counted = both.group_by(list(columns)).aggregate([(_COUNT, "sum")])
    counted = counted.rename_columns([*columns, _COUNT])
    return counted.filter(pc.field(_COUNT) > 0)


def _flat(column: pa.ChunkedArray) -> Any:
    """Returns nested values as texts: Arrow cannot group by nested values."""
    if not pa.types.is_nested(column.type):
        return column
    return pa.array([None if one is None else repr(one) for one in column.to_pylist()], pa.string())


def _shown(only: Sequence[pa.Table], columns: Sequence[str], key: Sequence[str]) -> list[Difference]:
    order = [c for c in (*key, TIMESTAMP) if c in columns]
    some = [rows.sort_by([(c, "ascending") for c in order]).slice(0, SHOWN) for rows in only]
    both = [(i == 0, row) for i, rows in enumerate(some) for row in texts(rows.select(list(columns)))]
    both.sort(key=lambda one: ([str(one[1][c]) for c in order], not one[0]))
    found: list[Difference] = []
    for first, row in both[:SHOWN]:
        before = found[-1].values if found and found[-1].first and not first else None
        if before is not None and any(before[c] != row[c] for c in order):
            before = None
        differs = () if before is None else [c for c in columns if before[c] != row[c]]
        found.append(Difference(first, row, frozenset(differs)))
    return found
