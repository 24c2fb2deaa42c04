"""Protobuf messages as columns, by way of JSON in which every value is a string."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pyspark.sql import Column
from pyspark.sql import functions as F
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    BooleanType,
    DataType,
    MapType,
    StringType,
    StructType,
)

from vt_dagster.errors import SourceError
from vt_dagster.sources.json_text import NUMBER
from vt_dagster.sources.protobuf_text import TEXT, is_value, is_wrapper, reader
from vt_dagster.sources.value_reader import (
    TIMES,
    Reading,
    of_boolean,
    of_bytes,
    of_double,
    of_number,
    of_text,
)


def message_class_of(descriptors: bytes, name: str) -> Any:
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    pool = descriptor_pool.DescriptorPool()
    try:
        for file in descriptor_pb2.FileDescriptorSet.FromString(descriptors).file:
            pool.Add(file)
        return message_factory.GetMessageClass(pool.FindMessageTypeByName(name))
    except Exception as error:  # the library raises KeyError, DecodeError or TypeError
        raise SourceError(
            f"Protobuf: expected the message {name!r} among the descriptors, got: {error}; use its "
            "full name, package.Name, and make the file with --include_imports"
        ) from None


def misfits(descriptor: Any, wanted: StructType, how: Reading, path: str = "") -> list[str]:
    """Returns descriptions of columns that no such message can fill. Does not use Spark."""
    fields = descriptor.fields_by_name
    known = [f for f in wanted.fields if f.name in fields]
    if not known and not path:
        return [f"the message has the fields {[*fields]}, none of the columns {wanted.names}"]
    found: list[str] = []
    for f in known:
        field, name = fields[f.name], f"{path}{f.name}"
        part, kind = field.message_type, f.dataType
        entry = part is not None and part.GetOptions().map_entry
        if entry != isinstance(kind, MapType):
            found.append(_said(name, "a map" if entry else "no map", kind))
            continue
        if part is not None and entry:
            field, kind = part.fields_by_name["value"], getattr(kind, "valueType", kind)
            part = field.message_type
        elif field.is_repeated != isinstance(kind, ArrayType):
            found.append(_said(name, "repeated" if field.is_repeated else "a single value", kind))
            continue
        elif isinstance(kind, ArrayType):
            kind = kind.elementType
        if part is not None and isinstance(kind, StructType):
            found += misfits(part, kind, how, f"{name}.")
        elif part is not None and not (is_value(part) or is_wrapper(part)):
            found.append(_said(name, f"the message {part.full_name}", kind))
        elif part is None and not _may_fit(field, kind, how, tuple(name.split("."))):
            found.append(_said(name, _TYPES.get(field.type, "a number"), kind))
    return found


_TYPES = {8: "bool", 9: "string", 12: "bytes", 14: "enum", 1: "double", 2: "float"}
"""Names of type numbers in a descriptor; all others are integers."""


def _may_fit(field: Any, kind: DataType, how: Reading, path: tuple[str, ...]) -> bool:
    told = _TYPES.get(field.type, "integer")
    if isinstance(kind, StructType | ArrayType | MapType):
        return False
    if told in ("string", "enum") or isinstance(kind, StringType):
        return True
    if told in ("bool", "bytes"):
        return isinstance(kind, BooleanType if told == "bool" else BinaryType)
    if isinstance(kind, TIMES):
        return told == "integer" and how.unit(path) is not None
    return not isinstance(kind, BooleanType | BinaryType)


def _said(name: str, got: str, kind: DataType) -> str:
    more = "" if not isinstance(kind, TIMES) else " (for a number, set its unit with timestamps)"
    return f"{name} is {got} in the message, expected {kind.simpleString()}{more}"


def value_of(text: Column, kind: DataType, how: Reading, path: tuple[str, ...]) -> Column:
    """Returns a text of ``protobuf_text`` as a value of a type; null if it does not fit."""
    of = F.substring(text, len(NUMBER) + 1, 1)
    bare = F.substring(text, len(NUMBER) + 2, 2**31 - 1)
    number = of_number(bare, kind, how.unit(path) if isinstance(kind, TIMES) else None)
    double = F.when(F.rlike(bare, F.lit(r"[0-9Ny]\z")), bare.try_cast("double"))
    given = (
        F.when(of == "n", number)
        .when(of == "d", bare if isinstance(kind, StringType) else of_double(double, kind))
        .when(of == "b", of_bytes(F.unbase64(bare), kind))
        .when(of == "o", of_boolean(bare == "true", kind))
    )
    return F.when(text.startswith(NUMBER), given).otherwise(of_text(text, kind, how, path))


def _plan(kind: DataType) -> Any:
    """Returns a type in plain Python for the workers; see ``protobuf_text.TEXT``."""
    if isinstance(kind, StructType):
        return {f.name: _plan(f.dataType) for f in kind.fields}
    if isinstance(kind, ArrayType):
        return [_plan(kind.elementType)]
    if isinstance(kind, MapType):
        return (_plan(kind.valueType),)
    return TEXT if isinstance(kind, StringType) else "value"


def protobuf_reader(descriptors: bytes, name: str, wanted: StructType) -> Any:
    """Returns a UDF of messages: the wanted fields as JSON of strings; null for an unreadable
    message."""

    import pandas as pd

    plan, mark = _plan(wanted), NUMBER

    def read(batches: Any) -> Any:
        import pandas as pd

        text = reader(descriptors, name, plan, mark)
        for batch in batches:
            yield pd.Series([text(raw) for raw in batch], dtype="object")

    series = Iterator[pd.Series]
    # Spark derives the kind of UDF from the annotations.
    read.__annotations__ = {"batches": series, "return": series}
    return F.pandas_udf(read, StringType())  # pyright: ignore[reportCallIssue, reportArgumentType]
