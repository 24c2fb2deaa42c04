"""For each format, type and odd value, the decoded value is exactly the one in the bytes, or
unreadable.

The expected value comes from plain Python code that reads the same bytes without Spark.
"""

from __future__ import annotations

import base64
import json
import math
import re
import struct
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timedelta
from decimal import Decimal, InvalidOperation
from fractions import Fraction
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import (
    BinaryType,
    BooleanType,
    DataType,
    DateType,
    DecimalType,
    DoubleType,
    FloatType,
    StringType,
    StructField,
    StructType,
    TimestampNTZType,
    TimestampType,
)

from vt_dagster.kafka import Avro, Json, Protobuf, Raw
from vt_dagster.sources.message_formats import Format
from vt_dagster.sources.text_formats import one_record, read_record
from vt_dagster.sources.value_reader import Reading

pytestmark = pytest.mark.usefixtures("few_rows")


UNREADABLE = "unreadable"
NAMES = (
    "byte", "short", "integer", "long", "float", "double", "boolean", "string", "binary", "date",
    "timestamp", "timestamp_ntz", "decimal(4,2)", "decimal(38,2)",
)  # fmt: skip
KINDS: dict[str, DataType] = {n: StructType().add("v", n)["v"].dataType for n in NAMES}

NUMBERS = [
    "0",
    "1",
    "-1",
    "7",
    "127",
    "128",
    "-128",
    "-129",
    "200",
    "32767",
    "32768",
    "40000",
    "2147483647",
    "2147483648",
    "9223372036854775807",
    "9223372036854775808",
    "16777217",
    "9007199254740993",
    "99999999999999999999",
    "1.10",
    "1.1",
    "1.5",
    "0.1",
    "1.239",
    "99.99",
    "99.995",
    "100.00",
    "1e2",
    "1E-7",
    "1e400",
    "-1e400",
    "1e-400",
    "3.5e38",
    "3.4e38",
    "1.0e0",
    "123456789.123456789",
    "0.1000000000000000055511151231257827",
    "1704448800",
    "1704448800000",
    "1704448800000000",
    "1704448800000000000",
    "20240105",
    "240105",
    "202401",
    "2024",
    "253402300800",
    "1e39",
    "1E+2",
]
TEXTS = [
    *("", "a", "12d", "5f", "0x1p3", "0x10", "1_000", "1,000", "+5", " 5", "5 ", "5.", ".5", "--5"),
    *("NaN", "Infinity", "-Infinity", "Inf", "inf", "null", "true", "TRUE", "t", "yes", "on", "no"),
    *("2024-01-05", "2024-1-5", "2024-02-30", "2024-13-01", "2024-01-05 whatever", "2024-01"),
    *("2024-01-05T10:30:00Z", "2024-01-05 10:30:00", "2024-01-05T10:30", "2024-01-05T10", "10:30"),
    *("10:30:00", "T10:30", "2024-01-05T23:30:00-08:00", "2024-01-05T10:30:00+0200", "now", "today"),
    *("2024-01-05T10:30:00.123456Z", "2024-01-05T10:30:00.1234561Z", "2024-01-05T10:30:00.1234560Z"),
    *("2024-01-05T10:30:00.1234565Z", "2024-01-05T25:00:00Z", "2024-01-05T10:30:60Z", "epoch"),
    *("9999-12-31T23:59:59-08:00", "0001-01-01T00:00:00+02:00", "10000-01-01", "0000-01-01"),
    *("2024-01-05T10:30:00 Europe/Berlin", "2024-01-05T10:30:00Z\n", "YXBwbGU=", "YXBwbGU", "YX=="),
    *("2024-01-05Z", "2024-02-30Z", "2024-01-05+01:00", "20240105Z"),
    *("apple", "5L", "+12024-01-05", "2024-005", "1704448800", "20240105", "200", "1.239"),
    *("240105", "202401", "1.10", "0b1", "٣", "5\n", "é", "1e"),
]  # fmt: skip


# -- the expected values -----------------------------------------------------------------------------


def values_of_text(text: str, kind: DataType, base64_too: bool) -> set[Any]:
    """The values that a text may correctly be read as; empty if it is unreadable."""
    if isinstance(kind, StringType):
        return {text}
    if isinstance(kind, BinaryType):
        if not base64_too:
            return {text.encode()}
        try:
            found = base64.b64decode(text, validate=True)
        except ValueError:
            return set()
        return {found} if base64.b64encode(found).decode() == text else set()
    if isinstance(kind, BooleanType):
        return {text.lower() == "true"} if text.lower() in ("true", "false") else set()
    if isinstance(kind, DateType | TimestampType | TimestampNTZType):
        return times_of_text(text, kind)
    if isinstance(kind, FloatType | DoubleType) and text.strip("+-").lower() in (
        "nan",
        "inf",
        "infinity",
    ):
        return {repr(float(text))}
    if not re.fullmatch(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", text, re.ASCII):
        return set()
    try:
        return number(Decimal(text), kind)
    except InvalidOperation:
        return set()


def number(exact: Decimal, kind: DataType, of_text: bool = True) -> set[Any]:
    """A number as a value of a type. A text may become the nearest FLOAT or DOUBLE; a number in bytes
    only one that is equal."""
    if isinstance(kind, FloatType | DoubleType):
        code = "f" if isinstance(kind, FloatType) else "d"
        try:
            near = struct.unpack(code, struct.pack(code, float(exact)))[0]
        except OverflowError:
            return set()
        same = math.isfinite(near) and Fraction(near) == Fraction(exact)
        whole = exact == exact.to_integral_value() and abs(exact) < 10**37
        if not math.isfinite(near) or (near == 0 and exact != 0):
            return set()
        return {repr(near)} if same or (of_text and not whole) else set()
    if isinstance(kind, DecimalType):
        scale = Decimal(1).scaleb(-kind.scale)
        if abs(exact.adjusted()) > 60 or abs(exact) >= Decimal(10) ** (kind.precision - kind.scale):
            return set()
        import decimal

        with decimal.localcontext() as context:
            context.prec = 80
            found = exact.quantize(scale)
        return {found} if found == exact else set()
    bits = {"tinyint": 8, "smallint": 16, "int": 32, "bigint": 64}.get(kind.simpleString())
    if bits is None:
        return set()
    whole = exact == exact.to_integral_value() if abs(exact.adjusted()) < 60 else False
    return {int(exact)} if whole and -(2 ** (bits - 1)) <= exact < 2 ** (bits - 1) else set()


def times_of_text(text: str, kind: DataType) -> set[Any]:
    if isinstance(kind, DateType) and re.fullmatch(r"\d{4}-\d\d-\d\dZ", text, re.ASCII):
        text = text[:-1]
    found = re.fullmatch(
        r"(\d{4})-?(\d\d)-?(\d\d)"
        r"(?:[T ](\d\d):(\d\d)(?::(\d\d)(?:\.(\d+))?)?(Z|[+-]\d\d(?::?\d\d)?)?)?",
        text,
        re.ASCII,
    )
    if found is None or (found[7] and found[7].rstrip("0")[6:]):
        return set()
    parts = [int(part or 0) for part in found.groups()[:6]]
    zone = found[8]
    try:
        moment = datetime(*parts, int((found[7] or "").ljust(6, "0")[:6]))  # pyright: ignore
        if zone and zone != "Z":
            digits = zone[1:].replace(":", "").ljust(4, "0")
            ahead = timedelta(hours=int(digits[:2]), minutes=int(digits[2:]))
            moment -= ahead if zone[0] == "+" else -ahead
    except (ValueError, OverflowError):
        return set()
    if isinstance(kind, DateType):
        return {moment.date()} if found[4] is None else set()
    return set() if zone and isinstance(kind, TimestampNTZType) else {moment}


def time_of_count(count: int | Decimal, kind: DataType, unit: str | None) -> set[Any]:
    """The time that a number means in a unit."""
    if unit is None:
        return set()
    micros = Fraction(count) * {"seconds": 10**6, "millis": 1000, "micros": 1, "days": 86400 * 10**6,
                                "nanos": Fraction(1, 1000)}[unit]  # fmt: skip
    if micros.denominator != 1:
        return set()
    try:
        moment = datetime(1970, 1, 1) + timedelta(microseconds=int(micros))
    except OverflowError:
        return set()
    if isinstance(kind, DateType):
        return {moment.date()} if moment.time() == datetime.min.time() else set()
    return {moment}


def is_time(kind: DataType) -> bool:
    return isinstance(kind, DateType | TimestampType | TimestampNTZType)


# -- the comparison ----------------------------------------------------------------------------------


Right = Callable[[int, DataType], set[Any]]
"""The values that a column of a type may have for the message with a given index."""


def judged(
    spark: SparkSession,
    messages: list[tuple[str, bytes]],
    reading: Mapping[str, tuple[Format, StructType]],
    right: Right,
) -> Counter[str]:
    """Reads the messages as each type in one job; one field of a message has a value.

    Args:
        messages: the label of each message in errors, and its bytes.
        reading: for each type the format, and the fields to read.
    """
    rows = spark.createDataFrame(
        [(i, bytearray(m)) for i, (_, m) in enumerate(messages)], "i int, m binary"
    )
    columns = list[Any]()
    each = [
        format_.decode(F.col("m"), wanted, ["s"], f"_{n}")
        for n, (format_, wanted) in enumerate(reading.values())
    ]
    rows = with_columns(rows, [found.parsed for found in each])
    for n, (found, (_, wanted)) in enumerate(zip(each, reading.values(), strict=True)):
        kept = F.struct(*[found.row[name].alias(name) for name in wanted.names])
        columns.append(F.struct(kept.alias("row"), found.reason.alias("reason")).alias(f"v{n}"))
    return compared(rows.select("i", *columns).orderBy("i").collect(), messages, reading, right)


def with_columns(rows: DataFrame, groups: Sequence[Mapping[str, Column]]) -> DataFrame:
    """Adds columns, each of which may refer to earlier ones of its group. Adds those of all groups at
    once, because Spark analyzes the whole plan for each call."""
    for some in zip_longest(*(group.items() for group in groups)):
        rows = rows.withColumns(dict(one for one in some if one is not None))
    return rows


def compared(
    rows: list[Any],
    messages: list[tuple[str, bytes]],
    reading: Mapping[str, tuple[Any, StructType]],
    right: Right,
) -> Counter[str]:
    counts, wrong = Counter[str](), list[str]()
    for row in rows:
        for n, (name, (_, wanted)) in enumerate(reading.items()):
            may_be, cell = right(row.i, wanted.fields[0].dataType), row[f"v{n}"]
            got = [comparable(v) for v in cell.row if v is not None] if cell.reason is None else []
            if cell.reason is not None:
                counts["rightly unreadable" if not may_be else "unreadable, though it is a value"] += 1
            elif (got[0] if got else None) in may_be:
                counts["exact"] += 1
            else:
                wrong.append(
                    f"{messages[row.i][0]} as {name}: got {got}, right: {may_be or UNREADABLE}"
                )
    assert not wrong, f"{len(wrong)} values are other ones:\n" + "\n".join(wrong)
    return counts


def comparable(value: Any) -> Any:
    if isinstance(value, bytearray | bytes):
        return bytes(value)
    if isinstance(value, float):
        return repr(value)
    return value.replace(tzinfo=None) if isinstance(value, datetime) else value


def of(kind: DataType, *names: str) -> StructType:
    return StructType([StructField(name, kind) for name in names or ("v",)])


MOST_REFUSED = 0.04
"""The largest share of cells that may be unreadable although they have a value of the type."""


def require(counts: Counter[str], cells: int) -> None:
    assert counts.total() >= cells, counts
    assert counts["exact"] > cells / 8, counts
    assert counts["unreadable, though it is a value"] <= MOST_REFUSED * counts.total(), counts


JSON_MORE = [
    "true",
    "false",
    "null",
    "NaN",
    "Infinity",
    "-Infinity",
    "01",
    "1.",
    ".5",
    "+1",
    "[1]",
    "{}",
]


@pytest.mark.parametrize("unit", [None, "millis"])
def test_json_values(spark: SparkSession, unit: Any) -> None:
    tokens = [*NUMBERS, *JSON_MORE, *([] if unit else map(json.dumps, TEXTS))]
    messages = [(token, b'{"v": %b}' % token.encode()) for token in tokens]

    def right(i: int, kind: DataType) -> set[Any]:
        token = tokens[i]
        if token == "null":
            return {None}
        if token in ("NaN", "Infinity", "-Infinity", "true", "false"):
            return values_of_text(token, kind, True) | (
                {f'"{token}"'} if isinstance(kind, StringType) else set()
            )
        if token in ("[1]", "{}"):
            return {token} if isinstance(kind, StringType) else set()
        try:
            value = json.loads(token, parse_int=Decimal, parse_float=Decimal)
        except ValueError:
            return set()
        if isinstance(value, str):
            return values_of_text(value, kind, True)
        if is_time(kind):
            return time_of_count(value, kind, unit) if abs(value) < 10**30 else set()
        return set() if isinstance(kind, BinaryType) else values_of_text(token, kind, True)

    kinds = KINDS if unit is None else {k: v for k, v in KINDS.items() if is_time(v)}
    reading: dict[str, tuple[Format, StructType]] = {
        name: (Json(timestamps=unit), of(kind)) for name, kind in kinds.items()
    }
    counts = judged(spark, messages, reading, right)
    require(counts, 1400 if unit is None else 0)


def test_raw_and_csv_values(spark: SparkSession) -> None:
    texts = [*NUMBERS, *TEXTS]
    messages = [(repr(text), text.encode()) for text in texts]

    def right(i: int, kind: DataType) -> set[Any]:
        return values_of_text(texts[i], kind, False)

    reading: dict[str, tuple[Format, StructType]] = {n: (Raw("v"), of(k)) for n, k in KINDS.items()}
    require(judged(spark, messages, reading, right), 1400)
    rows = spark.createDataFrame(
        [(i, f'"{t}"', "f") for i, t in enumerate(texts)], "i int, line string, f string"
    )
    columns, groups = list[Any](), list[dict[str, Column]]()
    for n, kind in enumerate(KINDS.values()):
        wanted, how = of(kind), Reading(base64=False)
        record = one_record("line", "f", {("v",): ["f"]}, wanted, {}, f"c{n}")
        parts = read_record(F.col(f"c{n}_texts"), F.col("line"), wanted, how, f"c{n}")
        groups.append({**record, **parts})
        row = F.col(f"c{n}_row")
        reason = F.when(row.isNull(), UNREADABLE)
        columns.append(F.struct(row.alias("row"), reason.alias("reason")).alias(f"v{n}"))
    rows = with_columns(rows, groups)

    def right_csv(i: int, kind: DataType) -> set[Any]:
        return {None} if texts[i] == "" else right(i, kind)

    got = rows.where("i not in (select 0 where false)").select("i", *columns).orderBy("i").collect()
    require(compared(got, messages, reading, right_csv), 1400)


AVRO = {
    "int": "int", "long": "long", "float": "float", "double": "double", "boolean": "boolean",
    "string": "string", "bytes": "bytes",
    "day": {"type": "int", "logicalType": "date"},
    "millis": {"type": "long", "logicalType": "timestamp-millis"},
    "nanos": {"type": "long", "logicalType": "timestamp-nanos"},
    "micros": {"type": "long", "connect.name": "io.debezium.time.MicroTimestamp"},
}  # fmt: skip
UNITS = {"day": "days", "millis": "millis", "nanos": "nanos", "micros": "micros"}
WHOLE = [
    0,
    1,
    -1,
    127,
    128,
    200,
    40000,
    2**31,
    2**53 + 1,
    2**24 + 1,
    2**63 - 1,
    1704448800000,
    19727,
    10**15,
]
FLOATS = [
    0.0,
    1.0,
    2.5,
    0.1,
    1.2399,
    200.0,
    1.9,
    2.0**24,
    2.0**31,
    2.0**63,
    -(2.0**63),
    1e300,
    float("inf"),
    float("nan"),
    -0.5,
]
VALUES: list[tuple[str, Any]] = [
    *((name, n) for name in ("long", "millis", "nanos", "micros") for n in WHOLE),
    *((name, n) for name in ("int", "day") for n in WHOLE if n < 2**31),
    *(("double", f) for f in FLOATS),
    *(("float", struct.unpack("f", struct.pack("f", f))[0]) for f in FLOATS if abs(f) != 1e300),
    *(("boolean", b) for b in (True, False)),
    *(("string", t) for t in TEXTS[::2]),
    *(("bytes", b) for b in (b"", b"abc", b"12", b"\xff", b"2024-01-05")),
]


def binary(name: str, value: Any, kind: DataType, unit: str | None) -> set[Any]:
    """The values that a value of Avro or Protobuf may correctly be read as."""
    if isinstance(value, str):
        if unit and is_time(kind) and re.fullmatch(r"[+-]?(\d+\.?\d*|\.\d+)", value, re.ASCII):
            return time_of_count(Decimal(value), kind, unit)
        return values_of_text(value, kind, False)
    if isinstance(value, bytes):
        try:
            text = {value.decode()}
        except UnicodeDecodeError:
            text = set[str]()
        return (
            {value} if isinstance(kind, BinaryType) else text if isinstance(kind, StringType) else set()
        )
    if isinstance(value, bool):
        names = {str(value).lower()} if isinstance(kind, StringType) else set[Any]()
        return {value} if isinstance(kind, BooleanType) else names
    if is_time(kind):
        return time_of_count(value, kind, unit) if isinstance(value, int) else set()
    if isinstance(kind, StringType):
        return {str(value)} if isinstance(value, int) else {ANY}
    if isinstance(value, float) and not math.isfinite(value):
        return {repr(value)} if isinstance(kind, FloatType | DoubleType) else set()
    found = number(Decimal(value), kind, of_text=False)
    if isinstance(value, float) and isinstance(kind, DecimalType) and abs(value) < 10**30:
        near = Decimal(repr(value)).quantize(Decimal(1).scaleb(-kind.scale))
        found |= {near} if float(near) == value and name == "double" else set()
    return found


ANY = "any"


def zigzag(number: int) -> bytes:
    left, found = (number << 1) ^ (number >> 63), bytearray()
    while left > 127:
        found.append(left & 127 | 128)
        left >>= 7
    return bytes([*found, left])


def in_avro(name: str, value: Any) -> bytes:
    """A record in which one field has a value."""
    body = b""
    for field in AVRO:
        if field != name:
            body += b"\x00"
            continue
        body += b"\x02"
        if isinstance(value, bool):
            body += bytes([value])
        elif isinstance(value, int):
            body += zigzag(value)
        elif isinstance(value, float):
            body += struct.pack("<f" if name == "float" else "<d", value)
        else:
            raw = value.encode() if isinstance(value, str) else value
            body += zigzag(len(raw)) + raw
    return body


def by_fields(
    spark: SparkSession,
    format_: Format,
    messages: list[tuple[str, bytes]],
    units: Mapping[str, str],
    at_once: bool = True,
) -> Counter[str]:
    """Reads each type from the fields that may fit it; others are refused when definitions load."""
    reading: dict[str, tuple[Format, StructType]] = {}
    for name, kind in KINDS.items():
        there = [n for n in dict.fromkeys(n for n, _ in VALUES) if not format_.misfits(of(kind, n))]
        if isinstance(kind, StringType):
            there = [n for n in there if n not in ("float", "double")]
        reading[name] = (format_, of(kind, *there))
    fields = {kind.simpleString(): reading[name][1].names for name, kind in KINDS.items()}

    def right(i: int, kind: DataType) -> set[Any]:
        name, value = VALUES[i]
        if name not in fields[kind.simpleString()]:
            return {None}
        return binary(name, value, kind, units.get(name))

    if at_once:
        return judged(spark, messages, reading, right)
    each = (judged(spark, messages, {name: one}, right) for name, one in reading.items())
    return sum(each, Counter[str]())


def test_avro_values(spark: SparkSession) -> None:
    fields = [{"name": n, "type": ["null", t]} for n, t in AVRO.items()]
    schema = {"type": "record", "name": "R", "fields": fields}
    messages = [(f"{n} {v!r}", in_avro(n, v)) for n, v in VALUES]
    counts = by_fields(spark, Avro(json.dumps(schema)), messages, UNITS)
    require(counts, 1400)


@pytest.mark.endurance  # one reader converts its values and Avro's; test_formats.py has its messages
def test_protobuf_values(spark: SparkSession, tmp_path: Path) -> None:
    kinds = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(
        name="v.proto", package="v", syntax="proto3", dependency=["google/protobuf/wrappers.proto"]
    )
    message = file.message_type.add(name="V")
    types = {"int": kinds.TYPE_INT32, "long": kinds.TYPE_INT64, "float": kinds.TYPE_FLOAT,
             "double": kinds.TYPE_DOUBLE, "boolean": kinds.TYPE_BOOL, "string": kinds.TYPE_STRING,
             "bytes": kinds.TYPE_BYTES, "day": kinds.TYPE_SINT32, "millis": kinds.TYPE_UINT64,
             "nanos": "Int64Value", "micros": "Int64Value"}  # fmt: skip
    for n, (name, kind) in enumerate(types.items(), 1):
        field = message.field.add(name=name, number=n, label=kinds.LABEL_OPTIONAL)
        if isinstance(kind, str):
            field.type, field.type_name = kinds.TYPE_MESSAGE, f".google.protobuf.{kind}"
            continue
        field.type, field.proto3_optional, field.oneof_index = kind, True, n - 1
        message.oneof_decl.add(name=f"_{name}")
    from google.protobuf import wrappers_pb2

    wrappers = descriptor_pb2.FileDescriptorProto.FromString(wrappers_pb2.DESCRIPTOR.serialized_pb)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(wrappers)
    pool.Add(file)
    made = message_factory.GetMessageClass(pool.FindMessageTypeByName("v.V"))
    path = tmp_path / "v.desc"
    path.write_bytes(descriptor_pb2.FileDescriptorSet(file=[wrappers, file]).SerializeToString())

    def sent(name: str, value: Any) -> bytes:
        one = made()
        if isinstance(types[name], str):
            getattr(one, name).value = value
        else:
            setattr(one, name, abs(value) if name == "millis" else value)
        return one.SerializeToString()

    messages = [(f"{n} {v!r}", sent(n, v)) for n, v in VALUES if (n, v) != ("millis", -1)]
    units = dict.fromkeys(types, "millis")
    format_ = Protobuf(str(path), "v.V", timestamps="millis")
    values = [one for one in VALUES if one != ("millis", -1)]
    before = VALUES[:]
    VALUES[:] = values
    try:
        counts = by_fields(spark, format_, messages, units, at_once=False)
    finally:
        VALUES[:] = before
    require(counts, 1300)
