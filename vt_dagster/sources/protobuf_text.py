"""Conversion of Protobuf messages to JSON in which every value is a string; runs in Spark's workers.

A mark precedes values other than strings, followed by ``n`` and a number, ``d`` and a double, ``b`` and
bytes in base64, ``o`` and a boolean, or ``x`` for a value that is not atomic.
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

# Spark's workers need protobuf, but not this package.
cast(Any, cloudpickle).register_pickle_by_value(sys.modules[__name__])

_GOOGLE = "google.protobuf."
VALUES = ("Timestamp", "Duration", "FieldMask", "Struct", "Value", "ListValue")
"""Google's messages that are one value: read as text, with their JSON representation."""
WRAPPERS = ("Double", "Float", "Int64", "UInt64", "Int32", "UInt32", "Bool", "String", "Bytes")
TEXT = "text"
"""Stands for a STRING in the plain form of a type: a struct is a dict, an array a list of one type, a
map a tuple of one type."""


def is_wrapper(message: Any) -> bool:
    """Returns whether a message is one of Google's wrappers for a nullable value."""
    return message.full_name in [f"{_GOOGLE}{one}Value" for one in WRAPPERS]


def is_value(message: Any) -> bool:
    """Returns whether a message is one of Google's that are one value in JSON."""
    return message.full_name in [_GOOGLE + one for one in VALUES]


def reader(descriptors: bytes, name: str, wanted: Any, mark: str) -> Callable[[Any], str | None]:
    """Returns a function from a message's bytes to JSON of the wanted fields; None if unreadable."""
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    pool = descriptor_pool.DescriptorPool()
    for file in descriptor_pb2.FileDescriptorSet.FromString(descriptors).file:
        pool.Add(file)
    message_class = message_factory.GetMessageClass(pool.FindMessageTypeByName(name))

    def text(raw: Any) -> str | None:
        try:
            found = message_class.FromString(bytes(raw))
            return json.dumps(_fields(found, wanted, mark))
        except Exception:  # DecodeError, upb's errors for invalid UTF-8, or a null
            return None

    return text


def _fields(message: Any, wanted: Any, mark: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for part in message.DESCRIPTOR.fields:
        if part.name not in wanted:
            continue
        value, want, kind = getattr(message, part.name), wanted[part.name], part.message_type
        if kind is not None and kind.GetOptions().map_entry:
            of = kind.fields_by_name["value"]
            found[part.name] = {_key(k): _one(of, value[k], want[0], mark) for k in value}
        elif part.is_repeated:
            found[part.name] = [_one(part, v, want[0], mark) for v in value]
        elif not part.has_presence or message.HasField(part.name):
            found[part.name] = _one(part, value, want, mark)
    return found


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
        return found
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
