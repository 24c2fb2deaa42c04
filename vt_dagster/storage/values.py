"""Converts texts to key values, and rows to texts. Dates and times of any year, in UTC. No Spark."""

from __future__ import annotations

import re
from datetime import timedelta
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa

from vt_dagster.errors import StorageError

_DATE = re.compile(r"[+-]?\d{4,6}-\d\d-\d\d")
_TIME = re.compile(r"(?:[T ](\d\d):(\d\d)(?::(\d\d)(?:\.(\d{1,6})0*)?)?)?\s*(Z|[+-]\d\d:\d\d)?")
_DAY = 86_400_000_000


def as_key(column: str, value: Any, kind: pa.DataType) -> pa.Scalar:
    """Returns a value, or its text form, as a scalar of a key column.

    Raises:
        StorageError: the value does not fit the column's type.
    """
    try:
        given = _parsed(value, kind) if isinstance(value, str) else value
        return given if isinstance(given, pa.Scalar) else pa.scalar(given, kind)
    except (ValueError, TypeError, LookupError, ArithmeticError, pa.ArrowException):
        raise StorageError(
            f"expected --key as a {type_name(kind)} for {column}, got {value!r}; write a text that "
            "Spark casts to that type, with no more digits than the type has"
        ) from None


def _parsed(text: str, kind: pa.DataType) -> Any:
    types = pa.types
    if types.is_boolean(kind):
        return {"true": True, "false": False}[text.strip().lower()]
    if types.is_integer(kind):
        return int(text)
    if types.is_floating(kind):
        return float(text)
    if types.is_decimal(kind):
        return Decimal(text.strip())
    if types.is_date(kind):
        found = _DATE.fullmatch(text.strip())
        if found is None:
            raise ValueError(text)
        return pa.scalar(_days(found), pa.int32()).cast(kind)
    if types.is_timestamp(kind):
        return pa.scalar(_moment(text.strip()), pa.int64()).cast(pa.timestamp("us")).cast(kind)
    if types.is_binary(kind) or types.is_large_binary(kind):
        return bytes.fromhex(text.removeprefix("0x"))
    return text


def _days(found: re.Match[str]) -> int:
    return int(np.datetime64(found[0].removeprefix("+"), "D").astype(np.int64))


def _moment(text: str) -> int:
    date = _DATE.match(text)
    time = None if date is None else _TIME.fullmatch(text, date.end())
    if date is None or time is None:
        raise ValueError(text)
    hours, minutes, seconds = (int(part or 0) for part in time.groups()[:3])
    micros = int((time[4] or "").ljust(6, "0"))
    if hours > 23 or minutes > 59 or seconds > 59:
        raise ValueError(text)
    zone = time[5] or "Z"
    ahead = 0 if zone == "Z" else int(zone[0] + "1") * (int(zone[1:3]) * 60 + int(zone[4:]))
    return _days(date) * _DAY + ((hours * 60 + minutes - ahead) * 60 + seconds) * 1_000_000 + micros


def type_name(kind: pa.DataType) -> str:
    """Returns the Spark SQL name of a type."""
    if pa.types.is_struct(kind):
        return f"struct<{','.join(f'{f.name}:{type_name(f.type)}' for f in kind)}>"
    if pa.types.is_map(kind):
        return f"map<{type_name(kind.key_type)},{type_name(kind.item_type)}>"
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return f"array<{type_name(kind.value_type)}>"
    if pa.types.is_decimal(kind):
        return f"decimal({kind.precision},{kind.scale})"
    named = {
        "int8": "tinyint", "int16": "smallint", "int32": "int", "int64": "bigint",
        "float": "float", "double": "double", "bool": "boolean", "date32[day]": "date",
        "large_string": "string", "string_view": "string", "large_binary": "binary",
    }  # fmt: skip
    name = str(kind)
    return "timestamp" if pa.types.is_timestamp(kind) else named.get(name, name)


def texts(rows: pa.Table) -> list[dict[str, Any]]:
    """Returns rows as dicts with times as text in UTC, because Python's datetime lacks some of Spark's
    years."""
    found: dict[str, list[Any]] = {}
    for field, column in zip(rows.schema, rows.columns, strict=True):
        if pa.types.is_timestamp(field.type):
            micros = column.cast(pa.timestamp("us", field.type.tz)).cast(pa.int64()).to_pylist()
            found[field.name] = [None if one is None else _spoken(one) for one in micros]
        elif pa.types.is_date(field.type):
            days = column.cast(pa.int32()).to_pylist()
            found[field.name] = [None if one is None else _date(one) for one in days]
        else:
            found[field.name] = column.to_pylist()
    return [dict(zip(found, values, strict=True)) for values in zip(*found.values(), strict=True)]


def _date(days: int) -> str:
    moment = np.datetime64(days, "D")
    year = int(moment.astype("datetime64[Y]").astype(np.int64)) + 1970
    month = int(moment.astype("datetime64[M]").astype(np.int64)) % 12 + 1
    day = int((moment - moment.astype("datetime64[M]")).astype(np.int64)) + 1
    sign = "+" if year > 9999 else "-" if year < 0 else ""
    return f"{sign}{abs(year):04}-{month:02}-{day:02}"


def _spoken(micros: int) -> str:
    days, rest = divmod(micros, _DAY)
    seconds, fraction = divmod(rest, 1_000_000)
    text = str(timedelta(seconds=seconds)).rjust(8, "0")
    part = f".{fraction:06}".rstrip("0") if fraction else ""
    return f"{_date(days)} {text}{part}"
