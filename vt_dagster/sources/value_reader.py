"""Converts a text, a number or bytes to the type of a column, nested values too.

Every format uses this module. A value is read exactly as written, or it is null and the record is
``unreadable``: no value is rounded, truncated or guessed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from functools import reduce
from operator import or_
from typing import Any, Literal, get_args

from pyspark.sql import Column
from pyspark.sql import functions as F
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    BooleanType,
    ByteType,
    DataType,
    DateType,
    DecimalType,
    DoubleType,
    FloatType,
    IntegerType,
    LongType,
    MapType,
    ShortType,
    StringType,
    StructField,
    StructType,
    TimestampNTZType,
    TimestampType,
)

from vt_dagster.core.source_records import are_once
from vt_dagster.errors import SourceError
from vt_dagster.topology.durations import FIRST_TIME, LAST_TIME

# Value reader


Unit = Literal["seconds", "millis", "micros", "nanos", "days"]
"""The unit of a number that is a time since 1970-01-01T00:00:00Z."""
Timestamps = Unit | Mapping[str, Unit]
"""One unit for all columns, or a unit by column; a field in a struct is ``column.field``."""

INTEGERS = (ByteType, ShortType, IntegerType, LongType)
FLOATS = (FloatType, DoubleType)
TIMES = (DateType, TimestampType, TimestampNTZType)
_MICROS = {"seconds": 1_000_000, "millis": 1_000, "micros": 1, "days": 86_400_000_000}
NO_MOMENT = "no moment"
"""Stands for the unit of a number that is a time of day, a year or a duration."""
NAMED_UNITS = {
    "io.debezium.time.Date": "days",
    "io.debezium.time.Timestamp": "millis",
    "io.debezium.time.MicroTimestamp": "micros",
    "io.debezium.time.NanoTimestamp": "nanos",
    "org.apache.kafka.connect.data.Date": "days",
    "org.apache.kafka.connect.data.Timestamp": "millis",
    **dict.fromkeys(
        (
            *("io.debezium.time.Time", "io.debezium.time.MicroTime", "io.debezium.time.NanoTime"),
            *("io.debezium.time.MicroDuration", "io.debezium.time.NanoDuration"),
            *("io.debezium.time.Year", "org.apache.kafka.connect.data.Time"),
        ),
        NO_MOMENT,
    ),
}
"""Units by type name in Kafka Connect's schemas."""
VARIABLE_DECIMAL = "io.debezium.data.VariableScaleDecimal"
DECIMALS = ("org.apache.kafka.connect.data.Decimal", VARIABLE_DECIMAL)
"""Type names of decimals there."""
_WHOLE = r"\A[+-]?[0-9]+\z"
_NUMBER = r"\A[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]{1,3})?\z"
_DATE = r"[0-9]{4}-[0-9]{2}-[0-9]{2}"
_CLOCK = r"[T ][0-9]{2}:[0-9]{2}(?::[0-9]{2}(?:\.[0-9]{1,6}0*)?)?"
_ZONE = r"(?:Z|[+-][0-9]{2}(?::?[0-9]{2})?)?"
_ENDS = {"nanvalue": "NaN", "positiveinf": "Infinity", "negativeinf": "-Infinity"}
_SHORT = {
    FloatType: r"\A-?(?:[0-9]{1,6}|(?=[0-9.]{3,10}\z)[0-9]+\.[0-9]+)\z",
    DoubleType: r"\A-?(?:[0-9]{1,15}|(?=[0-9.]{3,18}\z)[0-9]+\.[0-9]+|0\.[0-9]{1,17})\z",
}
"""Numbers with so few digits that no digit can be lost. They skip the full check, which is slow."""
_DIGITS = {FloatType: 9, DoubleType: 17}
"""Number of digits that identify any value of the type."""


@dataclass(frozen=True)
class Reading:
    """The settings for reading a source's texts and numbers.

    Args:
        timestamps: the unit of numbers in time columns; None = such a number is unreadable.
        options: Spark's options of JSON or CSV; used here are ``timestampFormat``,
            ``timestampNTZFormat``, ``dateFormat``, ``timeZone``, ``nanValue``, ``positiveInf`` and
            ``negativeInf``.
        base64: whether a text in a BINARY column is base64, as in JSON, or the bytes of the text.
        unscaled: whether a text in a DECIMAL column is base64 of an unscaled number with the column's
            scale, like Connect's Decimal.
    """

    timestamps: Timestamps | None = None
    options: Mapping[str, str] = field(default_factory=dict[str, str])
    base64: bool = True
    unscaled: bool = False

    def unit(self, path: Sequence[str]) -> Unit | None:
        """Returns the unit of numbers in a column, or in a field of it."""
        if self.timestamps is None or isinstance(self.timestamps, str):
            return self.timestamps
        return self.timestamps.get(".".join(path))

    def option(self, name: str) -> str | None:
        """Returns one of Spark's options; names match without case."""
        return {k.lower(): v for k, v in self.options.items()}.get(name.lower())


# -- texts -------------------------------------------------------------------------------------------


def of_text(text: Column, kind: DataType, how: Reading = Reading(), path: Sequence[str] = ()) -> Column:
    """Returns a text as a value of a type; null if it does not fit."""
    if isinstance(kind, StringType):
        return text
    if isinstance(kind, BinaryType):
        return _of_base64(text) if how.base64 else text.cast("binary")
    if isinstance(kind, BooleanType):
        return F.when(F.lower(text) == "true", True).when(F.lower(text) == "false", False)
    if isinstance(kind, INTEGERS):
        whole = text.try_cast(kind)
        return F.when((whole.cast("string") == text) | F.rlike(text, F.lit(_WHOLE)), whole)
    if isinstance(kind, FloatType | DoubleType):
        short = F.rlike(text, F.lit(_SHORT[type(kind)]))
        slow = rarely(text, lambda odd: _float(odd, kind, how))
        return F.when(short, text.try_cast(kind)).otherwise(slow)
    if isinstance(kind, DecimalType):
        most = rf"(?:\.[0-9]{{1,{kind.scale}}})?" if kind.scale else ""
        short = F.rlike(text, F.lit(rf"\A-?[0-9]+{most}\z"))
        slow = rarely(text, lambda odd: _decimal(odd, kind))
        return F.when(short, text.try_cast(kind)).otherwise(slow)
    if not isinstance(kind, TIMES):
        return text.try_cast(kind)
    unit, value = how.unit(path), _time(text, kind, how)
    if unit is not None:
        # Eight digits are a date only where no unit is given.
        number = F.rlike(text, F.lit(_NUMBER))
        counted = rarely(text, lambda odd: of_number(odd, kind, unit))
        return F.when(number, counted).otherwise(value)
    return value


def rarely(value: Column, make: Callable[[Column], Column]) -> Column:
    """Returns ``make(value)``, for an expression that few rows need.

    Spark does not generate code for the body of a lambda. Without the lambda, the generated method for
    some columns would exceed the JVM's size limit, and Spark would then not compile any of it.
    """
    return F.get(F.transform(F.array(value), make), F.lit(0))


def of_number(text: Column, kind: DataType, unit: str | Column | None) -> Column:
    """Returns the text of a number as a value of a type; null if it does not fit.

    Args:
        unit: the unit of a number in a time column; None = the number is unreadable there.
    """
    if isinstance(kind, BinaryType):
        return F.lit(None).cast(kind)
    if not isinstance(kind, TIMES):
        return of_text(text, kind)
    if unit is None:
        return F.lit(None).cast(kind)
    whole = F.when(F.rlike(text, F.lit(_WHOLE)), text.try_cast("bigint"))
    if isinstance(unit, str):

        def of_fraction(exact: Column) -> Column:
            same = F.when(exact == F.floor(exact), exact.try_cast("bigint"))
            return _micros_of(same, exact, unit)

        odd = rarely(_decimal(text, DecimalType(28, 9)), of_fraction)
        micros = F.coalesce(_micros_of(whole, None, unit), odd)
        return rarely(micros, lambda found: _moment(found, kind))
    factors = F.create_map(*[F.lit(part) for pair in _MICROS.items() for part in pair])
    micros = F.try_multiply(whole, F.try_element_at(factors, unit).cast("bigint"))
    nanos = F.when(unit == "nanos", _micros_of(whole, None, "nanos"))
    return _moment(F.coalesce(micros, nanos), kind)


def _float(text: Column, kind: DataType, how: Reading) -> Column:
    """Returns the nearest value; null if the text has more digits than the type, is an integer that the
    type cannot represent, or is too large or too small."""
    most = _DIGITS[type(kind)]
    fits = rf"\A[+-]?(?=[0.]*+(?:[0-9]\.?){{0,{most}}}?[0.]*(?:[eE]|\z))" + _NUMBER[len(r"\A[+-]?") :]
    value = text.try_cast(kind)
    # An integer that the type rounds to another integer: BIGINT holds numbers of so few digits.
    long = F.rlike(text, F.lit(rf"\A[+-]?0*[0-9]{{{most - 2},}}\z"))
    changed = long & ~value.try_cast("bigint").eqNullSafe(text.try_cast("bigint"))
    large = F.abs(value) == F.lit(float("inf"))
    small = (value == 0) & F.rlike(text, F.lit(r"\A[^eE]*[1-9]"))
    plain = F.when(F.rlike(text, F.lit(fits)) & ~changed & ~large & ~small, value)
    ends = {**_ENDS, **{k: v for k in _ENDS if (v := how.option(k)) is not None}}
    marks = [(ends["nanvalue"], "NaN"), ("NaN", "NaN")]
    marks += [(t, "Infinity") for t in (ends["positiveinf"], "Inf", "+Inf", "Infinity", "+Infinity")]
    marks += [(t, "-Infinity") for t in (ends["negativeinf"], "-Inf", "-Infinity")]
    special = F.create_map(*[F.lit(part) for mark in dict(marks).items() for part in mark])
    return F.coalesce(plain, F.try_element_at(special, text).cast(kind))


def _decimal(text: Column, kind: DecimalType) -> Column:
    """Returns a decimal; null if it has more significant fraction digits than its type."""
    lost = F.rlike(text, F.lit(rf"\.[0-9]{{{kind.scale}}}[0-9]*[1-9]"))
    digits = F.length(F.regexp_extract(text, r"\.([0-9]*?)0*[eE]", 1))
    power = F.regexp_extract(text, r"[eE]([+-]?[0-9]+)\z", 1).try_cast("int")
    scaled = F.rlike(text, F.lit("[eE]"))
    fits = F.when(scaled, digits - power <= kind.scale).otherwise(~lost)
    return F.when(F.rlike(text, F.lit(_NUMBER)) & fits, text.try_cast(kind))


def _time(text: Column, kind: DataType, how: Reading) -> Column:
    """Returns a time in ISO 8601, a date or a date and time with an optional zone, or in the user's
    format."""
    names = {DateType: "dateFormat", TimestampType: "timestampFormat"}
    pattern = how.option(names.get(type(kind), "timestampNTZFormat"))
    if pattern is not None:
        value = F.try_to_timestamp(text, F.lit(pattern))
        if isinstance(kind, TimestampType):
            value = _in_zone(value, how, F.lit(not _names_zone(pattern)))
        exact = ~F.rlike(text, F.lit(r"\.[0-9]{6}[0-9]*[1-9]"))
        return _moment(F.when(exact, F.unix_micros(value)), kind)
    if isinstance(kind, DateType):
        compact = F.rlike(text, F.lit(r"\A[0-9]{8}\z"))
        spread = F.regexp_replace(text, r"\A([0-9]{4})([0-9]{2})([0-9]{2})\z", "$1-$2-$3")
        # Debezium writes the zone of a date too.
        whole, day = F.rlike(text, F.lit(rf"\A{_DATE}Z?\z")), F.substring(text, 1, 10)
        value = F.when(whole, day.try_cast(kind)).when(compact, spread.try_cast(kind))
        return F.when(F.year(value) >= 1, value)
    zone = _ZONE if isinstance(kind, TimestampType) else ""
    whole = F.rlike(text, F.lit(rf"\A{_DATE}(?:{_CLOCK}{zone})?\z"))
    value = text.try_cast("timestamp")
    if isinstance(kind, TimestampType):
        minutes = F.lit("yyyy-MM-dd['T'][ ]HH:mm[XXX][XX][X]")  # after which a cast reads no zone
        value = F.coalesce(value, F.try_to_timestamp(text, minutes))
    value = F.when(whole, value)
    if isinstance(kind, TimestampType):
        value = _in_zone(value, how, ~F.rlike(text, F.lit(r"[T ].*[Z+-]")))
    # A zone shifts a time by a day at most, so only the first and the last year can exceed the range.
    inner = ~F.substring(text, 1, 4).isin("0000", "0001", "9999")
    edge = rarely(value, lambda odd: _moment(F.unix_micros(odd), kind))
    return F.when(inner, value.cast(kind)).otherwise(edge)


def _in_zone(value: Column, how: Reading, unsaid: Column) -> Column:
    zone = how.option("timeZone")
    if zone is None or zone.upper() in ("UTC", "Z", "ETC/UTC"):
        return value
    moment = F.to_utc_timestamp(value, zone)
    # An hour that a clock change skips does not exist; Spark reads another time.
    exists = F.from_utc_timestamp(moment, zone) == value
    return F.when(unsaid, F.when(exists, moment)).otherwise(value)


def _names_zone(pattern: str) -> bool:
    quoted = pattern.split("'")[::2]
    return any(c in part for part in quoted for c in "XxZzVO")


def _of_base64(text: Column) -> Column:
    value = F.try_to_binary(text, F.lit("base64"))
    return F.when(F.base64(value) == text, value)


def of_unscaled(text: Column, scale: int | Column, kind: DecimalType) -> Column:
    """Returns a decimal from base64 of its unscaled number in two's complement, big-endian."""
    power = F.lit(scale).cast("string") if isinstance(scale, int) else scale.cast("string")

    # Each step refers to the one before several times. Without a lambda, Spark computes that each time.
    def scaled(digits: Column) -> Column:
        return rarely(_scaled(digits, power), lambda number: _decimal(number, kind))

    return rarely(_unscaled(text).cast("string"), scaled)


def text_of_unscaled(text: Column, scale: Column) -> Column:
    """Returns the text of such a decimal, with all digits of its scale: ``1.50``."""
    none = F.lit("")

    def written(decimal: Column) -> Column:
        number, power = decimal["number"], decimal["scale"]
        places = F.greatest(power, F.lit(0))

        def with_point(digits: Column) -> Column:
            whole = F.substring(digits, F.lit(1), F.length(digits) - places)
            fraction = F.right(digits, places)
            return F.when(places > 0, F.concat(whole, F.lit("."), fraction)).otherwise(whole)

        zeros = F.when(number != 0, F.repeat(F.lit("0"), -power)).otherwise(none)
        digits = F.concat(F.abs(number).cast("string"), zeros)
        digits = F.lpad(digits, F.greatest(F.lit(39), places + 1), F.lit("0"))
        bare = F.regexp_replace(rarely(digits, with_point), r"\A0+(?=[0-9])", "")
        return F.concat(F.when(number < 0, F.lit("-")).otherwise(none), bare)

    # Larger scales are none of a number, and their zeros would exhaust the memory.
    power = scale.try_cast("smallint").cast("int").alias("scale")
    return rarely(F.struct(_unscaled(text).alias("number"), power), written)


def _unscaled(text: Column) -> Column:
    """Returns the number in base64 of its two's complement, big-endian, of at most 16 bytes."""

    def number(digits: Column) -> Column:
        sign = F.when(F.substring(digits, 1, 1) >= "8", "F").otherwise("0")
        return F.when(
            F.length(digits).between(2, 32), rarely(F.lpad(digits, F.lit(32), sign), of_halves)
        )

    def of_halves(digits: Column) -> Column:
        high = F.conv(F.substring(digits, 1, 16), 16, -10).try_cast("decimal(19,0)")
        low = F.conv(F.substring(digits, 17, 16), 16, 10).try_cast("decimal(20,0)")
        return F.try_add(F.try_multiply(high, F.lit(Decimal(2**64))), low).try_cast("decimal(38,0)")

    return rarely(F.hex(rarely(text, _of_base64)), number)


def _scaled(digits: Column, scale: Column) -> Column:
    """Returns a number in E notation without trailing zeros, which would count as fraction digits."""
    bare = F.regexp_replace(digits, r"(?<=[0-9])0+\z", "")
    zeros = F.length(digits) - F.length(bare)
    return F.concat(bare, F.lit("e"), (zeros - scale.try_cast("smallint")).cast("string"))


# -- numbers and bytes -------------------------------------------------------------------------------


def of_long(value: Column, kind: DataType, unit: str | None = None) -> Column:
    """Returns a BIGINT or narrower integer as a value of a type; null if it does not fit."""
    if isinstance(kind, TIMES):
        if unit is None:
            return F.lit(None).cast(kind)
        return _moment(_micros_of(value.cast("bigint"), None, unit), kind)
    if isinstance(kind, FLOATS):
        # Casting 2⁶³ back to BIGINT saturates at 2⁶³ - 1, which would look equal.
        same = _if_same(value.cast("bigint"), value.cast(kind), "bigint")
        return F.when(value < F.lit(2**63 - 1), same)
    if isinstance(kind, DecimalType):
        return value.cast("decimal(20,0)").try_cast(kind)
    if isinstance(kind, (*INTEGERS, StringType)):
        return value.try_cast(kind)
    return F.lit(None).cast(kind)


def of_double(value: Column, kind: DataType) -> Column:
    """Returns a DOUBLE as a value of a type; null if it does not fit."""
    value = value.cast("double")
    if isinstance(kind, FloatType):
        narrow = value.cast(kind)
        return F.when(narrow.cast("double").eqNullSafe(value), narrow)
    if isinstance(kind, DecimalType):
        # Spark casts the shortest digits that identify a DOUBLE, which for large ones are not all.
        near = _if_same(value, value.try_cast(kind), "double")
        large = of_long(of_double(value, LongType()), kind)
        return F.when(F.abs(value) < F.lit(2.0**53), near).otherwise(large)
    if isinstance(kind, INTEGERS):
        inside = F.abs(value) < F.lit(2.0**63) if isinstance(kind, LongType) else F.lit(True)
        return F.when(inside, _if_same(value, value.try_cast(kind), "double"))
    if isinstance(kind, DoubleType | StringType):
        return value.cast(kind)
    return F.lit(None).cast(kind)


def of_decimal(value: Column, kind: DataType) -> Column:
    """Returns a DECIMAL as a value of a type; null if it does not fit."""
    if isinstance(kind, StringType):
        return value.cast(kind)
    if isinstance(kind, (*FLOATS, DecimalType, *INTEGERS)):
        return of_text(value.cast("string"), kind)
    return F.lit(None).cast(kind)


def of_bytes(value: Column, kind: DataType) -> Column:
    """Returns bytes as BINARY, or as STRING if they are UTF-8; null otherwise."""
    if isinstance(kind, BinaryType):
        return value
    text = value.cast("string")
    if isinstance(kind, StringType):
        return F.when(F.is_valid_utf8(text), text)
    return F.lit(None).cast(kind)


def of_boolean(value: Column, kind: DataType) -> Column:
    """Returns a BOOLEAN as a value of a type; null if it does not fit."""
    return value.cast(kind) if isinstance(kind, BooleanType | StringType) else F.lit(None).cast(kind)


def _if_same(value: Column, other: Column, kind: str) -> Column:
    return F.when(other.try_cast(kind) == value, other)


def _micros_of(whole: Column, exact: Column | None, unit: str) -> Column:
    """Returns the microseconds of an integer, or of a number with a fraction; null if the result is not
    an integer or overflows."""
    if unit == "nanos":
        return F.when(whole % 1000 == 0, F.call_function("div", whole, F.lit(1000)))
    factor = _MICROS[unit]
    found = F.try_multiply(whole, F.lit(factor).cast("bigint"))
    if exact is None or unit not in ("seconds", "millis"):
        return found
    more = F.try_multiply(exact, F.lit(Decimal(factor)))
    return F.coalesce(found, F.when(more == F.floor(more), more.try_cast("bigint")))


def _moment(micros: Column, kind: DataType) -> Column:
    inside = micros.between(FIRST_TIME, LAST_TIME)
    if isinstance(kind, DateType):
        inside = inside & (F.pmod(micros, F.lit(_MICROS["days"])) == 0)
    return F.when(inside, F.timestamp_micros(micros).cast(kind))


# -- invalid text ------------------------------------------------------------------------------------


def is_no_text(value: Column, kind: DataType) -> Column:
    """Returns whether a string in a value, at any depth, is not valid UTF-8; never null."""
    no = F.lit(False)
    if isinstance(kind, StringType):
        return F.coalesce(~F.is_valid_utf8(value), no)
    if '"string"' not in kind.json():
        return no
    if isinstance(kind, StructType):
        return reduce(or_, [is_no_text(value[f.name], f.dataType) for f in kind.fields])
    if isinstance(kind, MapType):
        keys = is_no_text(F.map_keys(value), ArrayType(kind.keyType))
        return keys | is_no_text(F.map_values(value), ArrayType(kind.valueType))
    assert isinstance(kind, ArrayType)
    element = kind.elementType
    return F.coalesce(F.exists(value, lambda one: is_no_text(one, element)), no)


# Nested values


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
        of_keys, of_values = ArrayType(kind.keyType), ArrayType(kind.valueType)
        keys = read(F.map_keys(value), of_keys, lambda one, k, _: of_text(one, k), path)
        return map_of(value, keys, read(F.map_values(value), of_values, leaf, path))
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
    """Returns a value that Spark computes once per row, at this point of the plan, because the
    expression counts as nondeterministic."""
    return F.when(F.monotonically_increasing_id() >= 0, value)


def map_of(
    value: Column, keys: tuple[Column, Column], values: tuple[Column, Column]
) -> tuple[Column, Column]:
    """Returns a map, and whether a part of it is unreadable or a key occurs twice (never null).

    Args:
        value: the map before its conversion.
        keys, values: the converted arrays, each with whether a part of it is unreadable.
    """
    (own, bad_key), (theirs, bad_value) = keys, values
    twice = F.coalesce(~are_once(own), F.lit(False))
    bad = bad_key | bad_value | twice
    return F.when(~bad & value.isNotNull(), F.map_from_arrays(own, theirs)), bad


def any_of(conditions: Iterable[Column]) -> Column:
    """Returns whether one of the conditions holds; none of them may be null."""
    found = [*conditions] or [F.lit(False)]
    while len(found) > 1:  # in pairs: a chain of hundreds overflows the stack of Spark's planner
        found = [reduce(or_, found[i : i + 2]) for i in range(0, len(found), 2)]
    return found[0]


def require_units(where: str, timestamps: object, schema: StructType | None = None) -> None:
    """Checks the setting ``timestamps``.

    Args:
        where: the owner of the setting, for messages.
        schema: the columns; None = not known yet.

    Raises:
        SourceError: an unknown unit, or a name that is not a time column.
    """
    units = get_args(Unit)
    units_of = timestamps if isinstance(timestamps, Mapping) else {"": timestamps}
    wrong = {k: v for k, v in units_of.items() if v is not None and v not in units}
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


def other_case(column: str, there: Iterable[str], wanted: StructType) -> str | None:
    """Returns a name of the source that differs from a column's only in case, and is not a column
    itself; None = there is none, or the source has the column."""
    names = {*there}
    if column in names:
        return None
    return next((n for n in names - {*wanted.names} if n.lower() == column.lower()), None)


def in_other_case(column: str, other: str) -> str:
    """Returns the description of such a column, for messages."""
    return f"{column} is named {other!r}, expected the same case"


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
