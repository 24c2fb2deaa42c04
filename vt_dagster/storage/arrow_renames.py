"""Renamed columns, for reads with Arrow; ``schema_evolution`` does the same for Spark.

A field's metadata lists the earlier names of its column; old files have the column under those names.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

import pyarrow as pa
import pyarrow.compute as pc

from vt_dagster.columns import OLD, WAS

_WAS = WAS.encode()


def was(field: pa.Field) -> list[str]:
    """Returns the earlier names of a column, newest first."""
    told = (field.metadata or {}).get(_WAS)
    return [] if told is None else json.loads(told)


def names_of(columns: pa.Schema, column: str) -> list[str]:
    """Returns all file columns that may hold a column's value; each row uses one of them."""
    return [n for n in (column, *was(columns.field(column))) if n in columns.names]


def seen_as(columns: pa.Schema, like: pa.Schema) -> pa.Schema:
    """Returns the columns of a table's files with the types and names of another table.

    Args:
        like: columns of the log; some may have been renamed after a view was written.
    """
    there = [_seen_as(f, like.field(f.name)) if f.name in like.names else f for f in columns]
    named = [f for f in like if f.name not in columns.names and {*was(f)} & {*columns.names}]
    return pa.schema([*there, *named])


def _seen_as(field: pa.Field, like: pa.Field) -> pa.Field:
    if field.name != OLD or not pa.types.is_struct(field.type):
        return like
    # ``old`` of a view has more fields than that of the log, so the two are merged.
    return pa.field(
        OLD, pa.struct(list(seen_as(pa.schema(list(field.type)), pa.schema(list(like.type)))))
    )


def by_newest_names(rows: pa.Table, columns: pa.Schema) -> pa.Table:
    """Returns rows of files with each column under its newest name, also within ``old``.

    Args:
        columns: columns of the rows, with their earlier names.
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
