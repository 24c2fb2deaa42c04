"""Bytes of Kafka's own serializers: big-endian numbers, booleans, UUIDs and strings."""

from __future__ import annotations

from typing import Literal

from pyspark.sql import Column
from pyspark.sql import functions as F
from pyspark.sql.types import BinaryType, DataType, StringType

from vt_dagster.sources.value_reader import (
    Reading,
    of_boolean,
    of_bytes,
    of_double,
    of_long,
    of_number,
    of_text,
)

Serializer = Literal[
    "string", "short", "integer", "long", "float", "double", "boolean", "uuid", "bytes"
]
_BYTES = {"short": 2, "integer": 4, "long": 8}
_FRACTION = {"float": 23, "double": 52}
"""Bits of the fraction (IEEE 754)."""
_UUID = r"(?i)\A[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}\z"


def serialized(message: Column, serializer: Serializer | None, kind: DataType, how: Reading) -> Column:
    """Returns the bytes of a message as a value of a type; null if the type cannot represent them.

    Args:
        serializer: the serializer that wrote the message; None = a text, without the quotes of a JSON
            string.
    """
    if serializer == "bytes" or (serializer is None and isinstance(kind, BinaryType)):
        return of_bytes(message, kind)
    if serializer in _BYTES:
        size = _BYTES[serializer]
        number = _bits(message, size)
        return F.when(F.length(message) == size, of_long(number, kind, how.unit(())))
    if serializer in _FRACTION:
        return of_double(_float(message, _FRACTION[serializer]), kind)
    if serializer == "boolean":
        digits = F.hex(message)
        return of_boolean(F.when(digits == "01", True).when(digits == "00", False), kind)
    text = message.cast("string")
    text = F.when(F.is_valid_utf8(text), text)
    if serializer == "uuid":
        return of_text(F.when(F.rlike(text, F.lit(_UUID)), text), kind, how)
    if serializer is None:
        text = _unquoted(text)
    value = of_text(text, kind, how)
    if isinstance(kind, StringType):
        return value
    return F.coalesce(value, of_number(text, kind, how.unit(())))


def _unquoted(text: Column) -> Column:
    """Returns a text without the quotes and escapes of a JSON string."""
    quoted = F.rlike(text, F.lit(r'\A"(?:[^"\\\x00-\x1f]++|\\.)*+"\z'))
    inside = F.from_json(F.concat(F.lit('{"v":'), text, F.lit("}")), "v string")["v"]
    return F.when(quoted, inside).otherwise(text)


def _bits(message: Column, size: int) -> Column:
    """Returns big-endian bytes in two's complement as a BIGINT; null if the size differs."""
    digits = F.hex(message)
    negative = F.substring(digits, 1, 1) >= "8"
    padded = F.when(negative, F.lpad(digits, 16, "F")).otherwise(F.lpad(digits, 16, "0"))
    return F.when(F.length(digits) == 2 * size, F.conv(padded, 16, -10).try_cast("bigint"))


def _float(message: Column, fraction: int) -> Column:
    """Returns an IEEE 754 number as a DOUBLE. Every step is exact: none rounds."""
    size = 4 if fraction == 23 else 8
    bits = _bits(message, size)
    width = 8 * size - 1 - fraction
    bias = 2 ** (width - 1) - 1 + fraction
    power = F.shiftright(bits, fraction).bitwiseAND(F.lit(2**width - 1))
    digits = bits.bitwiseAND(F.lit(2**fraction - 1))
    sign = F.when(bits < 0, F.lit(-1.0)).otherwise(F.lit(1.0))
    whole = (digits + F.lit(2**fraction)).cast("double")
    value = (
        F.when(power == 0, digits.cast("double") * F.pow(F.lit(2.0), F.lit(1.0 - bias)))
        .when((power == 2**width - 1) & (digits != 0), F.lit(float("nan")))
        .when(power == 2**width - 1, F.lit(float("inf")))
        .otherwise(whole * F.pow(F.lit(2.0), power - bias))
    )
    return F.when(F.length(message) == size, sign * value)
