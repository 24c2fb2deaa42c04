"""Columns that had other names before, as Arrow reads them from files; Spark's side is ``evolution``.

A table's field says by its metadata under which names rows of before know its column.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

import pyarrow as pa
import pyarrow.compute as pc

from vt_dagster.columns import OLD, WAS

_WAS = WAS.encode()


def was(field: pa.Field) -> list[str]:
    """The names that a column had before, the newest first."""
    told = (field.metadata or {}).get(_WAS)
    return [] if told is None else json.loads(told)


def names_of(columns: pa.Schema, column: str) -> list[str]:
    """All columns of files that may have a column's value; in a row one of them has it."""
    return [n for n in (column, *was(columns.field(column))) if n in columns.names]


def seen_as(columns: pa.Schema, like: pa.Schema) -> pa.Schema:
    """The columns of a table's files with the types and names that another table has them by.

    Args:
        like: the columns of the log, which may have been renamed since a view was written.
    """
    there = [_seen_as(f, like.field(f.name)) if f.name in like.names else f for f in columns]
    named = [f for f in like if f.name not in columns.names and {*was(f)} & {*columns.names}]
    return pa.schema([*there, *named])


def _seen_as(field: pa.Field, like: pa.Field) -> pa.Field:
    if field.name != OLD or not pa.types.is_struct(field.type):
        return like
    # A view's has more in it than the log's.
    return pa.field(
        OLD, pa.struct(list(seen_as(pa.schema(list(field.type)), pa.schema(list(like.type)))))
    )


def by_newest_names(rows: pa.Table, columns: pa.Schema) -> pa.Table:
    """Rows as files have them, with each column under its newest name; within ``old`` too.

    Args:
        columns: those of the rows, with the names that they had before.
    """
    inner = pa.schema([])
    if OLD in columns.names and pa.types.is_struct(columns.field(OLD).type):
        inner = pa.schema(list(columns.field(OLD).type))
    if not any(was(f) for f in (*columns, *inner)):
        return rows
    parts = {f.name: rows.column(f.name) for f in columns}
    found = dict(_newest(parts, columns))
    if any(was(f) for f in inner):
        found[OLD] = _within(found[OLD], inner)
    return pa.table(found)


def _within(column: pa.ChunkedArray, columns: pa.Schema) -> pa.ChunkedArray:
    whole: pa.StructArray = column.combine_chunks()
    parts = {f.name: whole.field(i) for i, f in enumerate(columns)}
    found = dict(_newest(parts, columns))
    return pa.chunked_array(
        [pa.StructArray.from_arrays(list(found.values()), list(found), mask=whole.is_null())]
    )


def _newest(parts: dict[str, pa.Array], columns: pa.Schema) -> Iterator[tuple[str, pa.Array]]:
    gone = {name for field in columns for name in was(field)}
    for field in columns:
        if field.name not in gone:
            values = [parts[n].cast(field.type) for n in names_of(columns, field.name)]
            alone = len(values) == 1
            yield field.name, values[0] if alone else pc.call_function("coalesce", values)
