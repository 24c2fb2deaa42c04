"""Protobuf messages as columns, by way of JSON in which every value is a string.

The conversion to JSON runs in Spark's workers. A mark precedes values other than strings, followed by
``n`` and a number, ``d`` and a double, ``b`` and bytes in base64, ``o`` and a boolean, or ``x`` for a
value that is not atomic.
"""

from __future__ import annotations

import base64
import json
import math
import struct
import sys
from collections.abc import Callable
from typing import Any, cast

from pyspark import cloudpickle
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
    TimestampNTZType,
    TimestampType,
)

from vt_dagster.errors import SourceError
from vt_dagster.sources.text_formats import NUMBER, text_udf
from vt_dagster.sources.value_reader import (
    TIMES,
    Reading,
    in_other_case,
    of_boolean,
    of_bytes,
    of_double,
    of_number,
    of_text,
    other_case,
)

# Protobuf text


# Spark's workers need protobuf, but not this package.
cast(Any, cloudpickle).register_pickle_by_value(sys.modules[__name__])

_GOOGLE = "google.protobuf."
VALUES = ("Timestamp", "Duration", "FieldMask", "Struct", "Value", "ListValue")
"""Google's messages that are one value: read as text, with their JSON representation."""
WRAPPERS = ("Double", "Float", "Int64", "UInt64", "Int32", "UInt32", "Bool", "String", "Bytes")
TEXT = "text"
"""Stands for a STRING or BINARY in the plain Python form of a type, in which a struct is a dict, an
array a list of one type, and a map a tuple of one type."""


def is_wrapper(message: Any) -> bool:
    """Returns whether a message is one of Google's wrappers for a nullable value."""
    return message.full_name in [f"{_GOOGLE}{one}Value" for one in WRAPPERS]


def is_value(message: Any) -> bool:
    """Returns whether a message is one of Google's types that are a single value in JSON."""
    return message.full_name in [_GOOGLE + one for one in VALUES]


def reader(descriptors: bytes, name: str, wanted: Any, mark: str) -> Callable[[Any], str | None]:
    """Returns a function from a message's bytes to JSON of the wanted fields; None if unreadable, also
    if the message has only fields that the descriptor lacks."""
    message_class = _message_class(descriptors, name)

    def text(raw: Any) -> str | None:
        try:
            found = message_class.FromString(bytes(raw))
            known = not _unknown(found) or found.ListFields()
            row = json.dumps(_fields(found, wanted, mark))
            return row if known and found.IsInitialized() else None
        except Exception:  # DecodeError, upb's errors for invalid UTF-8, or a null
            return None

    return text


def _message_class(descriptors: bytes, name: str) -> Any:
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    pool = descriptor_pool.DescriptorPool()
    for file in descriptor_pb2.FileDescriptorSet.FromString(descriptors).file:
        pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(name))


def is_repeated(field: Any) -> bool:
    """Returns whether a field is repeated. Protobuf before 6.31 has only its label, which is deprecated
    since."""
    return field.is_repeated if hasattr(field, "is_repeated") else field.label == field.LABEL_REPEATED


def _fields(message: Any, wanted: Any, mark: str) -> dict[str, Any]:
    _require_known(message)
    found: dict[str, Any] = {}
    for part in message.DESCRIPTOR.fields:
        if part.name not in wanted:
            continue
        value, want, kind = getattr(message, part.name), wanted[part.name], part.message_type
        if kind is not None and kind.GetOptions().map_entry:
            of = kind.fields_by_name["value"]
            found[part.name] = {_key(k): _one(of, value[k], want[0], mark) for k in value}
        elif is_repeated(part):
            found[part.name] = [_one(part, v, want[0], mark) for v in value]
        elif not part.has_presence or message.HasField(part.name):
            found[part.name] = _one(part, value, want, mark)
    return found


def _require_known(message: Any) -> None:
    """Raises ValueError if a field has another type or an unknown enum value. Without this check,
    Protobuf returns default values."""
    if _unknown(message) & {*message.DESCRIPTOR.fields_by_number}:
        raise ValueError("a field of another type")


def _unknown(message: Any) -> set[int]:
    """Returns the numbers of the fields that the descriptor lacks, or that have another type there."""
    from google.protobuf.unknown_fields import UnknownFieldSet

    return {one.field_number for one in UnknownFieldSet(message)}


def _key(key: Any) -> str:
    return str(key).lower() if isinstance(key, bool) else str(key)


def _one(field: Any, value: Any, want: Any, mark: str) -> Any:
    if field.message_type is None:
        return _scalar(field, value, want, mark) if isinstance(want, str) else f"{mark}x"
    if isinstance(want, dict):
        return _fields(value, want, mark)
    if is_wrapper(field.message_type):
        return _scalar(field.message_type.fields_by_name["value"], value.value, want, mark)
    if not is_value(field.message_type):
        return f"{mark}x"
    from google.protobuf import json_format

    found = json_format.MessageToDict(value)
    if isinstance(found, str) and not field.message_type.full_name.endswith("Value"):
        return found if want == TEXT else found.removesuffix("Z")  # TIMESTAMP_NTZ takes no zone
    return json.dumps(found) if want == TEXT else f"{mark}x"


def _scalar(field: Any, value: Any, want: Any, mark: str) -> str:
    if field.enum_type is not None:
        named = field.enum_type.values_by_number.get(value)
        return f"{mark}n{value}" if named is None else named.name
    if isinstance(value, bytes):
        return f"{mark}b{base64.b64encode(value).decode()}"
    if isinstance(value, bool):
        return f"{mark}o{str(value).lower()}"
    if isinstance(value, float):
        shortest = field.type == field.TYPE_FLOAT and want == TEXT
        return f"{mark}d{_shortest(value) if shortest else _double(value)}"
    return value if isinstance(value, str) else f"{mark}n{value}"


def _double(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    return repr(value) if math.isfinite(value) else "Infinity" if value > 0 else "-Infinity"


def _shortest(value: float) -> str:
    """Returns the shortest text of a 32-bit float."""
    if not math.isfinite(value):
        return _double(value)
    texts = (f"{value:.{digits}g}" for digits in range(1, 10))
    return next(t for t in texts if struct.unpack("f", struct.pack("f", float(t)))[0] == value)


# Protobuf


def message_class_of(descriptors: bytes, name: str) -> Any:
    try:
        return _message_class(descriptors, name)
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
    missing = [(f.name, other_case(f.name, fields, wanted)) for f in wanted.fields]
    found = [in_other_case(f"{path}{name}", other) for name, other in missing if other]
    for f in known:
        field, name = fields[f.name], f"{path}{f.name}"
        part, kind = field.message_type, f.dataType
        entry = part is not None and part.GetOptions().map_entry
        if entry != isinstance(kind, MapType):
            found.append(_misfit(name, "a map" if entry else "no map", kind))
            continue
        if part is not None and isinstance(kind, MapType):
            key, of_key = part.fields_by_name["key"], kind.keyType
            if not _may_fit(key, of_key, Reading(), ()):
                got = _TYPES.get(key.type, "a number")
                found.append(f"{name} has {got} as key, expected {of_key.simpleString()}")
            field, kind = part.fields_by_name["value"], kind.valueType
            part = field.message_type
        elif is_repeated(field) != isinstance(kind, ArrayType):
            found.append(_misfit(name, "repeated" if is_repeated(field) else "a single value", kind))
            continue
        elif isinstance(kind, ArrayType):
            kind = kind.elementType
        if part is not None and isinstance(kind, StructType):
            found += misfits(part, kind, how, f"{name}.")
        elif not _may_fit(field, kind, how, tuple(name.split("."))):
            number = _TYPES.get(field.type, "a number")
            got = number if part is None else f"the message {part.full_name}"
            found.append(_misfit(name, got, kind, _is_integer(field)))
    return found


_TYPES = {8: "bool", 9: "string", 12: "bytes", 14: "enum", 1: "double", 2: "float"}
"""Names of type numbers in a descriptor; all others are integers."""


def _may_fit(field: Any, kind: DataType, how: Reading, path: tuple[str, ...]) -> bool:
    part = field.message_type
    if part is not None and is_wrapper(part):
        return _may_fit(part.fields_by_name["value"], kind, how, path)
    if part is not None:
        times = (TimestampType, TimestampNTZType) if part.name == "Timestamp" else ()
        return is_value(part) and isinstance(kind, (StringType, BinaryType, *times))
    family = _TYPES.get(field.type, "integer")
    if isinstance(kind, StructType | ArrayType | MapType):
        return False
    if family == "string" or isinstance(kind, StringType):
        return True
    if family == "enum":
        return isinstance(kind, BinaryType)
    if family in ("bool", "bytes"):
        return isinstance(kind, BooleanType if family == "bool" else BinaryType)
    if isinstance(kind, TIMES):
        return family == "integer" and how.unit(path) is not None
    return not isinstance(kind, BooleanType | BinaryType)


def _is_integer(field: Any) -> bool:
    part = field.message_type
    if part is not None and is_wrapper(part):
        return _is_integer(part.fields_by_name["value"])
    return part is None and field.type not in _TYPES


def _misfit(name: str, got: str, kind: DataType, is_integer: bool = False) -> str:
    more = " (set its unit with timestamps)" if is_integer and isinstance(kind, TIMES) else ""
    return f"{name} is {got} in the message, expected {kind.simpleString()}{more}"


def value_of(text: Column, kind: DataType, how: Reading, path: tuple[str, ...]) -> Column:
    """Returns a text of :func:`reader` as a value of a type; null if it does not fit."""
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
    """Returns a type in plain Python for the workers; see ``TEXT``."""
    if isinstance(kind, StructType):
        return {f.name: _plan(f.dataType) for f in kind.fields}
    if isinstance(kind, ArrayType):
        return [_plan(kind.elementType)]
    if isinstance(kind, MapType):
        return (_plan(kind.valueType),)
    return TEXT if isinstance(kind, StringType | BinaryType) else "value"


def protobuf_reader(descriptors: bytes, name: str, wanted: StructType) -> Any:
    """Returns a UDF of messages: the wanted fields as JSON of strings; null for an unreadable
    message."""
    plan, mark = _plan(wanted), NUMBER
    return text_udf(lambda: reader(descriptors, name, plan, mark))
