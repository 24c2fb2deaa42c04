"""Nested values: structs by field name, arrays and maps, read from texts at any depth."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import reduce
from operator import or_
from typing import Any, get_args

from pyspark.sql import Column
from pyspark.sql import functions as F
from pyspark.sql.types import ArrayType, DataType, MapType, StringType, StructField, StructType

from vt_dagster.errors import SourceError
from vt_dagster.sources.value_reader import TIMES, Unit, of_text

Leaf = Callable[[Column, DataType, tuple[str, ...]], Column]


def texts_of(kind: DataType) -> Any:
    """Returns the type with STRING for all atomic types."""
    if isinstance(kind, StructType):
        return StructType([StructField(f.name, texts_of(f.dataType)) for f in kind.fields])
    if isinstance(kind, ArrayType):
        return ArrayType(texts_of(kind.elementType))
    if isinstance(kind, MapType):
        return MapType(StringType(), texts_of(kind.valueType))
    return StringType()


def read(
    value: Column, kind: DataType, leaf: Leaf, path: tuple[str, ...] = ()
) -> tuple[Column, Column]:
    """Converts a value of type ``texts_of(kind)`` to ``kind``.

    Args:
        leaf: reads a text; returns null for an unreadable one.

    Returns:
        the value, and whether a part of it is unreadable (never null).
    """
    if isinstance(kind, StructType):
        parts = [(f.name, *read(value[f.name], f.dataType, leaf, (*path, f.name))) for f in kind.fields]
        row = F.struct(*[part.alias(name) for name, part, _ in parts])
        return F.when(value.isNotNull(), row), any_of([bad for _, _, bad in parts])
    if isinstance(kind, ArrayType):
        element = kind.elementType
        bad = F.exists(value, lambda one: read(one, element, leaf, path)[1])
        found = F.transform(value, lambda one: read(one, element, leaf, path)[0])
        return found, F.coalesce(bad, F.lit(False))
    if isinstance(kind, MapType):
        return _read_map(value, kind, leaf, path)
    found = leaf(value, kind, path)
    return found, value.isNotNull() & found.isNull()


def read_row(
    texts: Column, wanted: StructType, leaf: Leaf, into: str, whole: Column | None = None
) -> dict[str, Column]:
    """Converts a struct of texts to a struct of values.

    Each value is computed once, in a column of its own, and checked in the next. Spark pushes a filter
    below the columns that it refers to, and would compute a value once per reference: :func:`once`
    keeps the filter above.

    Args:
        into: prefix of the names of the columns.
        whole: whether the texts are a record; None = if they are not null.

    Returns:
        columns to add, in this order. The last one, ``<into>_row``, is the struct: null if the texts
        are not a record, or one of them is unreadable.
    """
    values, misfits = list[Column](), list[Column]()
    found = F.col(f"{into}_values")
    for n, f in enumerate(wanted.fields):
        value, bad = read(texts[f.name], f.dataType, leaf, (f.name,))
        values.append(value.alias(f.name))
        if isinstance(f.dataType, StructType | ArrayType | MapType):
            values.append(bad.alias(f"_bad_{n}"))
            misfits.append(found[f"_bad_{n}"])
        else:
            misfits.append(texts[f.name].isNotNull() & found[f.name].isNull())
    row = F.struct(*[found[name].alias(name) for name in wanted.names])
    there = texts.isNotNull() if whole is None else whole
    return {
        f"{into}_values": F.when(there, F.struct(*values)),
        f"{into}_row": once(F.when(found.isNotNull() & ~any_of(misfits), row)),
    }


def once(value: Column) -> Column:
    """Returns a value that Spark computes once per row and does not move: the expression counts as
    nondeterministic."""
    return F.when(F.monotonically_increasing_id() >= 0, value)


def _read_map(value: Column, kind: MapType, leaf: Leaf, path: tuple[str, ...]) -> tuple[Column, Column]:
    of_keys, of_values = ArrayType(kind.keyType), ArrayType(kind.valueType)
    keys, bad_key = read(F.map_keys(value), of_keys, lambda one, k, _: of_text(one, k), path)
    values, bad_value = read(F.map_values(value), of_values, leaf, path)
    twice = F.coalesce(F.size(keys) != F.size(F.array_distinct(keys)), F.lit(False))
    bad = bad_key | bad_value | twice
    return F.when(~bad & value.isNotNull(), F.map_from_arrays(keys, values)), bad


def any_of(conditions: Iterable[Column]) -> Column:
    """Returns whether one of the conditions holds; none of them may be null."""
    return reduce(or_, conditions, F.lit(False))


def require_units(where: str, timestamps: object, schema: StructType | None = None) -> None:
    """Checks the setting ``timestamps``.

    Args:
        where: the owner of the setting, for messages.
        schema: the columns; None = not known yet.

    Raises:
        SourceError: an unknown unit, or a name that is not a time column.
    """
    units = get_args(Unit)
    said = timestamps if isinstance(timestamps, Mapping) else {"": timestamps}
    wrong = {k: v for k, v in said.items() if v is not None and v not in units}
    if wrong:
        raise SourceError(
            f"{where}: expected timestamps to be one of {', '.join(units)}, or a mapping of columns to "
            f"them, got {timestamps!r}; correct it"
        )
    if schema is None or not isinstance(timestamps, Mapping):
        return
    times = [".".join(path) for path, kind in leaves(schema) if isinstance(kind, TIMES)]
    odd = [name for name in timestamps if name not in times]
    if odd:
        raise SourceError(
            f"{where}: timestamps names {odd}, but the schema's columns of type TIMESTAMP, "
            f"TIMESTAMP_NTZ and DATE are {times}; correct the names"
        )


def leaves(kind: DataType, path: tuple[str, ...] = ()) -> Iterable[tuple[tuple[str, ...], DataType]]:
    """Yields the atomic types in a type, each with its path; elements of an array have the array's
    path."""
    if isinstance(kind, StructType):
        for f in kind.fields:
            yield from leaves(f.dataType, (*path, f.name))
    elif isinstance(kind, ArrayType):
        yield from leaves(kind.elementType, path)
    elif isinstance(kind, MapType):
        yield from leaves(kind.valueType, path)
    else:
        yield path, kind
