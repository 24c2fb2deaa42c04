"""Protobuf messages as JSON text, in which every value is a text."""

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
from vt_dagster.sources.values import (
    TIMES,
    Reading,
    of_boolean,
    of_bytes,
    of_double,
    of_number,
    of_text,
)

_WRAPPED = "google.protobuf."
_SCALARS = ("Timestamp", "Duration", "FieldMask", "Struct", "Value", "ListValue")
"""Messages of Google's that are a value: as text what their JSON has."""
_WRAPPERS = ("Double", "Float", "Int64", "UInt64", "Int32", "UInt32", "Bool", "String", "Bytes")


def message_class_of(descriptors: bytes, name: str) -> Any:
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    pool = descriptor_pool.DescriptorPool()
    try:
        for file in descriptor_pb2.FileDescriptorSet.FromString(descriptors).file:
            pool.Add(file)
        return message_factory.GetMessageClass(pool.FindMessageTypeByName(name))
    except Exception as error:  # KeyError, DecodeError, TypeError: as the library pleases
        raise SourceError(
            f"Protobuf: expected the message {name!r} among the descriptors, got: {error}; give its "
            "full name, package.Name, and make the file with --include_imports"
        ) from None


def misfits(descriptor: Any, wanted: StructType, how: Reading, path: str = "") -> list[str]:
    """What of the columns no such message can ever give, in words. Does not use Spark."""
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
        if entry:
            field, kind = part.fields_by_name["value"], getattr(kind, "valueType", kind)
            part = field.message_type
        elif field.is_repeated != isinstance(kind, ArrayType):
            found.append(_said(name, "repeated" if field.is_repeated else "a single value", kind))
            continue
        elif isinstance(kind, ArrayType):
            kind = kind.elementType
        if part is not None and isinstance(kind, StructType):
            found += misfits(part, kind, how, f"{name}.")
        elif part is not None and not _is_value(part):
            found.append(_said(name, f"the message {part.full_name}", kind))
        elif part is None and not _may_fit(field, kind, how, tuple(name.split("."))):
            found.append(_said(name, _TYPES.get(field.type, "a number"), kind))
    return found


_TYPES = {8: "bool", 9: "string", 12: "bytes", 14: "enum", 1: "double", 2: "float"}
"""Numbers of types in a descriptor; all others are whole numbers."""


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


def _is_value(message: Any) -> bool:
    names = (*_SCALARS, *(f"{one}Value" for one in _WRAPPERS))
    return message.full_name in [_WRAPPED + one for one in names]


def _said(name: str, got: str, kind: DataType) -> str:
    more = "" if not isinstance(kind, TIMES) else " (of a number, say its unit with timestamps)"
    return f"{name} is {got} in the message, expected {kind.simpleString()}{more}"


def value_of(text: Column, kind: DataType, how: Reading, path: tuple[str, ...]) -> Column:
    """A value that the reader has written, as one of a type; null where it is none.

    Behind a mark stand ``n`` and a number, ``d`` and a double, ``b`` and bytes in base64, ``o`` and a
    boolean, or ``x``, which is no value.
    """
    of = F.substring(text, len(NUMBER) + 1, 1)
    bare = F.substring(text, len(NUMBER) + 2, 2**31 - 1)
    number = of_number(bare, kind, how.unit(path) if isinstance(kind, TIMES) else None)
    double = F.when(F.rlike(bare, F.lit(r"[0-9Ny]\z")), bare.try_cast("double"))
    given = (
        F.when(of == "n", number)
        .when(of == "d", of_double(double, kind))
        .when(of == "b", of_bytes(F.unbase64(bare), kind))
        .when(of == "o", of_boolean(bare == "true", kind))
    )
    return F.when(text.startswith(NUMBER), given).otherwise(of_text(text, kind, how, path))


def _plan(kind: DataType) -> Any:
    """A type in words that workers understand without Spark's types."""
    if isinstance(kind, StructType):
        return {f.name: _plan(f.dataType) for f in kind.fields}
    if isinstance(kind, ArrayType):
        return [_plan(kind.elementType)]
    if isinstance(kind, MapType):
        return (_plan(kind.valueType),)
    return "text" if isinstance(kind, StringType) else "value"


def protobuf_reader(descriptors: bytes, name: str, wanted: StructType) -> Any:
    """A function of a column of messages: the wanted fields as JSON; null where a message cannot be
    read."""

    import pandas as pd

    plan, mark, values, wrappers = _plan(wanted), NUMBER, _SCALARS, _WRAPPERS

    def read(batches: Any) -> Any:
        # Self-contained: workers need protobuf, not this package.
        import base64
        import json
        import math
        import struct

        import pandas as pd
        from google.protobuf import (
            descriptor_pb2,
            descriptor_pool,
            json_format,
            message_factory,
        )

        pool = descriptor_pool.DescriptorPool()
        for file in descriptor_pb2.FileDescriptorSet.FromString(descriptors).file:
            pool.Add(file)
        message_class = message_factory.GetMessageClass(pool.FindMessageTypeByName(name))
        known = {f"google.protobuf.{one}" for one in values}
        wrapped = {f"google.protobuf.{one}Value" for one in wrappers}

        def number(value: float) -> str:
            if math.isnan(value):
                return "NaN"
            if math.isinf(value):
                return "Infinity" if value > 0 else "-Infinity"
            return repr(value)

        def scalar(field: Any, value: Any, want: Any) -> Any:
            if field.enum_type is not None:
                named = field.enum_type.values_by_number.get(value)
                return f"{mark}n{value}" if named is None else named.name
            if isinstance(value, bytes):
                return f"{mark}b{base64.b64encode(value).decode()}"
            if isinstance(value, bool):
                return f"{mark}o{str(value).lower()}"
            if isinstance(value, float):
                shortest = field.type == field.TYPE_FLOAT and want == "text"
                return f"{mark}d{short(value) if shortest else number(value)}"
            return value if isinstance(value, str) else f"{mark}n{value}"

        def short(value: float) -> str:
            texts = (f"{value:.{digits}g}" for digits in range(6, 10))
            same = (t for t in texts if struct.unpack("f", struct.pack("f", float(t)))[0] == value)
            return next(same, number(value))

        def one(field: Any, value: Any, want: Any) -> Any:
            if field.message_type is None:
                return scalar(field, value, want) if isinstance(want, str) else f"{mark}x"
            if isinstance(want, dict):
                return plain(value, want)
            told = field.message_type.full_name
            if told in wrapped:
                return scalar(field.message_type.fields_by_name["value"], value.value, want)
            if told not in known:
                return f"{mark}x"
            found = json_format.MessageToDict(value)
            if isinstance(found, str) and not told.endswith("Value"):
                return found
            return json.dumps(found) if want == "text" else f"{mark}x"

        def plain(message: Any, wanted: Any) -> dict[str, Any]:
            found: dict[str, Any] = {}
            for part in message.DESCRIPTOR.fields:
                if part.name not in wanted:
                    continue
                value, want, kind = getattr(message, part.name), wanted[part.name], part.message_type
                if kind is not None and kind.GetOptions().map_entry:
                    of = kind.fields_by_name["value"]
                    found[part.name] = {
                        str(k).lower() if isinstance(k, bool) else str(k): one(of, value[k], want[0])
                        for k in value
                    }
                elif part.is_repeated:
                    found[part.name] = [one(part, v, want[0]) for v in value]
                elif not part.has_presence or message.HasField(part.name):
                    found[part.name] = one(part, value, want)
            return found

        def text(raw: bytes | None) -> str | None:
            try:
                if raw is None:
                    return None
                return json.dumps(plain(message_class.FromString(bytes(raw)), plan))
            except Exception:  # DecodeError and what upb raises for bad UTF-8
                return None

        for batch in batches:
            yield pd.Series([text(raw) for raw in batch], dtype="object")

    series = Iterator[pd.Series]
    read.__annotations__ = {"batches": series, "return": series}  # Spark takes its kind from them
    return F.pandas_udf(read, StringType())  # pyright: ignore[reportCallIssue, reportArgumentType]
