"""Formats of Kafka messages: JSON, Avro, Protobuf, raw values, and change events of Debezium.

A format turns a column of bytes into a struct column, as a Spark expression. Bytes that it cannot read
give a ``reason``, never an error: the record goes to quarantine.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from base64 import b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date, timedelta
from functools import reduce
from hashlib import md5
from importlib.util import find_spec
from itertools import islice
from operator import and_, or_
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args
from uuid import UUID

from pyspark.sql import Column
from pyspark.sql import functions as F
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    BooleanType,
    DataType,
    DateType,
    IntegerType,
    LongType,
    MapType,
    ShortType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from vt_dagster.core.source_records import SOURCE, Reason
from vt_dagster.errors import SourceError
from vt_dagster.sources import avro, protobuf
from vt_dagster.sources.avro import COUNTS_IF, NO_SCHEMA, READ, read_avro, row_of
from vt_dagster.sources.kafka_cluster import SchemaRegistry
from vt_dagster.sources.protobuf import message_class_of, protobuf_reader
from vt_dagster.sources.text_formats import (
    PAYLOAD,
    SCHEMA_OF,
    checked,
    has_half_pair,
    has_names_of,
    nullable,
    parse,
    read_object,
    value_of,
)
from vt_dagster.sources.value_reader import (
    Reading,
    Timestamps,
    Unit,
    of_boolean,
    of_bytes,
    of_double,
    of_long,
    of_number,
    of_text,
    once,
    read_row,
    require_units,
    texts_of,
)
from vt_dagster.topology.options import check_types

# Unavailable values


def _is_placeholder(value: Column, kind: DataType, placeholder: str) -> Column:
    """Returns whether a value is the placeholder. Debezium writes it by type: the text's bytes, also as
    base64 or hexadecimal digits, an array of the text, of its bytes, of its UUID or of its character
    codes (also as days), a map from the text to itself."""
    coded = placeholder.encode()
    if isinstance(kind, StringType):
        of_map = f'{{"{placeholder}":"{placeholder}"}}'  # hstore as JSON
        return value.isin(placeholder, of_map, b64encode(coded).decode(), coded.hex())
    if isinstance(kind, BinaryType):
        return value == F.lit(placeholder).cast("binary")
    if isinstance(kind, ArrayType) and isinstance(kind.elementType, StringType | BinaryType):
        one = F.get(value, F.lit(0))
        found = _is_placeholder(one, kind.elementType, placeholder)
        if isinstance(kind.elementType, StringType):
            # Java's UUID.nameUUIDFromBytes, which has no namespace.
            found = found | (
                one == str(UUID(bytes=md5(coded, usedforsecurity=False).digest(), version=3))
            )
        return (F.size(value) == 1) & found
    if isinstance(kind, ArrayType) and isinstance(kind.elementType, _CODES):
        codes: list[Any] = list(memoryview(coded).cast("b"))
        if isinstance(kind.elementType, DateType):
            codes = [date(1970, 1, 1) + timedelta(days=code) for code in codes]
        return value == F.array(*map(F.lit, codes)).cast(ArrayType(kind.elementType))
    if isinstance(kind, MapType) and isinstance(kind.keyType, StringType):
        return F.map_contains_key(value, placeholder)
    return F.lit(False)


_CODES = (ShortType, IntegerType, LongType, DateType)


# Kafka serializers


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
        # No text has a zero byte, but numbers and messages in Confluent's framing are valid UTF-8.
        text = _unquoted(F.when(~F.contains(text, F.lit("\0")), text))
    value = of_text(text, kind, how)
    if isinstance(kind, StringType):
        return value
    return F.coalesce(value, of_number(text, kind, how.unit(())))


def _unquoted(text: Column) -> Column:
    """Returns a text without the quotes and escapes of a JSON string."""
    quoted = F.rlike(text, F.lit(r'\A"(?:[^"\\\x00-\x1f]++|\\.)*+"\z'))
    inside = F.from_json(F.concat(F.lit('{"v":'), text, F.lit("}")), "v string")["v"]
    return F.when(quoted, F.when(~has_half_pair(text), inside)).otherwise(text)


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


# Message formats


_FRAME = 5
"""Bytes before a message in Confluent's framing: a zero byte and the schema id (4 bytes,
big-endian)."""


UNWRAPPED = StructField("__deleted", StringType())
"""The field that Debezium's ExtractNewRecordState adds to a row (``delete.handling.mode=rewrite``)."""
OF_DEBEZIUM = StructType([UNWRAPPED]).add("__op", StringType()).add("__source_ts_ms", LongType())
"""All fields that it may add at the end of a row."""


class Decoded(NamedTuple):
    """The columns of a decoded message.

    Args:
        parsed: intermediate columns to add first, in this order, by name. The other columns refer to
            them, so that Spark parses a message once and not once per reference.
        row: a struct with the wanted columns.
        reason: a ``Reason``; null if the message is readable.
        deleted: whether the message deletes its key; None = only a null message does.
        time: TIMESTAMP of the change, if the message has one.
        restates: whether the message repeats the current row of its key, as a snapshot does.
        truncates: whether the message deletes all rows; None = no message does.
        unchanged: names of the columns whose unchanged value the message omits; null = none.
        images: of an update, structs of the columns before and after it, to be compared; null if the
            message has none. None = no message has both.
        null: whether the message has no value, which deletes its key; never null. None = only a null
            message has none.
    """

    parsed: dict[str, Column]
    row: Column
    reason: Column
    deleted: Column | None = None
    time: Column | None = None
    restates: Column | None = None
    truncates: Column | None = None
    unchanged: Column | None = None
    images: tuple[Column, Column] | None = None
    null: Column | None = None


class Format(ABC):
    """A format of messages."""

    orders_changes = False
    """Whether the messages are changes of a table: the last one of a key is its current row."""

    @abstractmethod
    def decode(
        self,
        message: Column,
        wanted: StructType,
        subjects: Mapping[str, bool],
        into: str,
        usual: Sequence[str] | None = None,
    ) -> Decoded:
        """Returns the wanted columns of a message; any values if the message is null.

        Args:
            subjects: the subject of each topic's schemas in a schema registry, and whether the topic
                has messages to read.
            into: prefix of the names in ``parsed``.
            usual: the names of :attr:`rows` that most messages have, in order; those of ``wanted`` if
                None, or if they have none of these. Other formats ignore it.

        Raises:
            SourceError: a schema is not available.
        """

    @property
    def rows(self) -> Json | None:
        """The format of messages whose fields are the columns; None = they are no JSON, or events."""
        return None

    def columns(self, wanted: StructType) -> list[str]:
        """Returns the wanted columns that a message can fill."""
        return wanted.names

    def misfits(self, wanted: StructType) -> list[str]:
        """Returns descriptions of columns whose type no message can fill. Does not use Spark."""
        return []


@dataclass(frozen=True)
class Json(Format):
    """One JSON object per message; fields map to columns by name, and missing fields are null.

    A message without any of the columns, or with a name that differs only in case, is unreadable. The
    envelope of Kafka Connect's converter, ``{"schema": ..., "payload": ...}``, is unwrapped. For a
    single column, such as a key, the message may also be the value itself: ``"apple"``, ``17``. The
    value ``null`` is a message without a value, as a deserializer of JSON gives it to Kafka Streams; so
    is an envelope whose payload is ``null``.

    Args:
        options: Spark's JSON options, as for ``FilesSource``; an option without effect is an error.
        framed: whether the message begins with Confluent's five bytes.
        timestamps: unit since 1970 of a number in a TIMESTAMP, TIMESTAMP_NTZ or DATE column:
            ``seconds``, ``millis``, ``micros``, ``nanos`` or ``days``; for all columns, or by column.
            None: such a number is unreadable unless Connect's schema in the message has the unit.
        decimals: encoding of a string in a DECIMAL column: ``text`` = the number; ``base64`` = the
            unscaled bytes with the column's scale, the default of Connect and Debezium. Connect's
            schema in the message has precedence.
    """

    options: Mapping[str, str] = field(default_factory=dict[str, str], hash=False)
    framed: bool = False
    timestamps: Timestamps | None = field(default=None, hash=False)
    decimals: Literal["text", "base64"] = "text"

    def __post_init__(self) -> None:
        check_types(self, type(self).__name__, SourceError, skip={"options"})
        object.__setattr__(self, "options", checked("Json", "message", self.options))
        require_units("Json", self.timestamps)
        if self.decimals not in ("text", "base64"):
            raise SourceError(
                f"Json: expected decimals to be 'text' or 'base64', got {self.decimals!r}; correct it"
            )

    @property
    def reading(self) -> Reading:
        return Reading(self.timestamps, self.options, unscaled=self.decimals == "base64")

    @property
    def rows(self) -> Json:
        return self

    def text(self, message: Column) -> Column:
        """Returns the message as text, without framing."""
        return (_unframed(message) if self.framed else message).cast("string")

    def names(self, message: bytes | None) -> list[str] | None:
        """Returns the names of a message's fields, in order; None = it is no object."""
        text = message or b"null"
        try:
            found = json.loads(text[_FRAME:] if self.framed else text)
        except (ValueError, RecursionError):
            return None
        return list(found) if isinstance(found, dict) else None

    def decode(
        self,
        message: Column,
        wanted: StructType,
        subjects: Mapping[str, bool],
        into: str,
        usual: Sequence[str] | None = None,
    ) -> Decoded:
        text = self.text(message)
        if not {*(usual or ())} & {*wanted.names}:
            usual = [name for name in wanted.names if name not in OF_DEBEZIUM.names]
        parsed = parse(text, wanted, self.options, into, alone=True, usual=usual)
        columns, row = read_object(parsed, wanted, self.reading, into)
        reason = _unreadable_if(row.isNull() | ~F.is_valid_utf8(text))
        return Decoded(columns, row, reason, null=parsed.null)


@dataclass(frozen=True)
class Raw(Format):
    """The whole message as one column.

    Args:
        column: its name in the schema.
        serializer: the Kafka serializer of the message: ``short``, ``integer``, ``long``, ``float`` and
            ``double`` (big-endian), ``boolean`` (one byte), ``uuid``, ``string`` (UTF-8) or ``bytes``.
            None: the column's value as text; the quotes of a JSON string are removed, and bytes with a
            zero byte are unreadable: they are a number, or a message in Confluent's framing.
        timestamps: unit since 1970 of a number in a TIMESTAMP, TIMESTAMP_NTZ or DATE column:
            ``seconds``, ``millis``, ``micros``, ``nanos`` or ``days``. None: such a number is
            unreadable.
    """

    column: str
    serializer: Serializer | None = None
    timestamps: Unit | None = None

    def __post_init__(self) -> None:
        check_types(self, type(self).__name__, SourceError)
        require_units("Raw", self.timestamps)
        if self.serializer is not None and self.serializer not in get_args(Serializer):
            raise SourceError(
                f"Raw: expected serializer to be one of {', '.join(get_args(Serializer))}, got "
                f"{self.serializer!r}; correct it, or leave it out for texts"
            )

    def columns(self, wanted: StructType) -> list[str]:
        return [n for n in wanted.names if n == self.column]

    def misfits(self, wanted: StructType) -> list[str]:
        own = [f for f in wanted.fields if f.name == self.column]
        nested = [f for f in own if isinstance(f.dataType, StructType | ArrayType | MapType)]
        return [f"{f.name} is {f.dataType.simpleString()}, and Raw reads one value" for f in nested]

    def decode(
        self,
        message: Column,
        wanted: StructType,
        subjects: Mapping[str, bool],
        into: str,
        usual: Sequence[str] | None = None,
    ) -> Decoded:
        kind = wanted[self.column].dataType
        how = Reading(self.timestamps, base64=False)
        value = serialized(message, self.serializer, kind, how)
        broken = message.isNotNull() & value.isNull()
        return Decoded({}, F.struct(value.alias(self.column)), _unreadable_if(broken))


@dataclass(frozen=True)
class Avro(Format):
    """One Avro record per message.

    Fields map to columns by name, at any depth. A value that does not fit its column makes the record
    unreadable; a type that can never fit is an error when definitions load. The null of a schema such
    as ``["null", record]`` is a message without a value.

    Args:
        schema: the writer schema (JSON) of messages without framing; or
        registry: the registry with the schemas of messages in Confluent's framing. A message whose
            schema is not registered for the subject goes to quarantine. Fields also match, at any
            depth, by the aliases in the message's schema and in the subject's newest one. A field
            missing in the message's schema gets the newest schema's default if that is a string, a
            number or a boolean; otherwise null.
        subject: the subject in the registry; None = ``<topic>-value`` or ``<topic>-key`` of each topic
            that has messages to read. A topic without schemas does not stop the run if another topic of
            the source has some: its messages go to quarantine.
        timestamps: unit since 1970 of a number in a TIMESTAMP, TIMESTAMP_NTZ or DATE column without a
            logical type of its number type or a type name of Connect: ``seconds``, ``millis``,
            ``micros``, ``nanos`` or ``days``; for all columns, or by column.
    """

    schema: str | None = None
    registry: SchemaRegistry | None = None
    subject: str | None = None
    timestamps: Timestamps | None = field(default=None, hash=False)

    def __post_init__(self) -> None:
        check_types(self, type(self).__name__, SourceError)
        if (self.schema is None) == (self.registry is None):
            raise SourceError("Avro: expected either a schema or a registry; give exactly one of them")
        require_units("Avro", self.timestamps)

    @property
    def reading(self) -> Reading:
        return Reading(self.timestamps, base64=False)

    def misfits(self, wanted: StructType) -> list[str]:
        return [] if self.schema is None else avro.misfits(self.schema, wanted, self.reading)

    def decode(
        self,
        message: Column,
        wanted: StructType,
        subjects: Mapping[str, bool],
        into: str,
        usual: Sequence[str] | None = None,
    ) -> Decoded:
        if self.schema is not None:
            found = once(row_of(F.col(into), self.schema, wanted, self.reading))
            parsed, row = (
                {into: read_avro(message, self.schema), f"{into}_row": found},
                F.col(f"{into}_row"),
            )
            return Decoded(parsed, row, _unreadable_if(row[READ].isNull()), null=_is_null(row))
        assert self.registry is not None
        number = F.conv(F.hex(F.substring(message, 2, 4)), 16, 10).cast("long")
        row: Any = F.lit(None).cast(
            StructType([*nullable(wanted).fields, StructField(READ, BooleanType())])
        )
        parsed, known = dict[str, Column](), dict[int, tuple[str, dict[str, list[str]]]]()
        for subject, schemas in self._schemas(subjects).items():
            last, newest = next(reversed(schemas.items()), (0, NO_SCHEMA))
            if schemas and (odd := avro.misfits(newest, wanted, self.reading)):
                raise SourceError(
                    f"Avro: schema {last} of the subject {subject!r}: {'; '.join(odd)}; correct the "
                    "columns, or the schema"
                )
            for id_, schema in schemas.items():
                by_newest = known.setdefault(id_, (schema, {}))[1]
                # A topic's subject is its name with "-key" or "-value".
                by_newest.setdefault(newest, []).append(subject.rpartition("-")[0])
        for id_, (schema, by_newest) in known.items():
            name, is_own = f"{into}_{id_}", number == id_
            parsed[name] = F.when(is_own, read_avro(_unframed(message), schema))
            for place, (newest, topics) in enumerate(by_newest.items()):
                # Subjects of several topics may share a schema, each with another newest one.
                is_read = is_own & F.col(SOURCE).isin(topics) if place else is_own
                found = row_of(F.col(name), schema, wanted, self.reading, newest)
                row = F.when(is_read, found).otherwise(row)
        parsed[f"{into}_row"], row = once(row), F.col(f"{into}_row")
        reason = F.when(~_is_framed(message), Reason.UNREADABLE)
        reason = reason.when(~number.isin(list(known)), Reason.UNKNOWN_SCHEMA)
        reason = reason.when(row[READ].isNull(), Reason.UNREADABLE)
        return Decoded(parsed, row, reason, null=_is_null(row))

    def _schemas(self, subjects: Mapping[str, bool]) -> dict[str, dict[int, str]]:
        """Returns the schemas of each subject to read, by id. Those of one may be missing, if another
        one has some."""
        assert self.registry is not None
        names = sorted(subjects, key=lambda name: not subjects[name])
        asked = [name for name in names if subjects[name]]
        if self.subject is None and len(names) > 1:
            found = (self.registry.schemas(name, optional=True) for name in names)
            known = dict(zip(asked, islice(found, len(asked)), strict=True))
            if not asked or any(known.values()) or any(found):
                return known
        subject = self.subject or next(iter(asked), "")
        return {subject: self.registry.schemas(subject)} if asked else {}


def _is_null(row: Column) -> Column:
    """Returns whether a message of Avro is the null of its schema, a union."""
    return F.coalesce(~row[READ], F.lit(False))


@dataclass(frozen=True)
class Protobuf(Format):
    """One Protobuf message; fields map to columns by their names in the ``.proto`` file.

    Google's wrapper types give their value, Timestamp a time, Duration a string such as ``1.500s``;
    Struct, Value and ListValue give a JSON string, an enum the name of its value.

    Spark does not ship the module with its Protobuf functions, so messages go to Python in Arrow
    batches and come back as JSON.

    Args:
        descriptor: a descriptor file, made by ``protoc --include_imports --descriptor_set_out``.
        message: the full name of the message, ``package.Name``.
        framed: whether the message begins with Confluent's framing. Its schema id and message indexes
            are ignored: the wire format identifies the fields. A message without the indexes is
            unreadable.
        timestamps: unit since 1970 of a number in a TIMESTAMP, TIMESTAMP_NTZ or DATE column:
            ``seconds``, ``millis``, ``micros``, ``nanos`` or ``days``; for all columns, or by column.
    """

    descriptor: str
    message: str
    framed: bool = False
    timestamps: Timestamps | None = field(default=None, hash=False)

    def __post_init__(self) -> None:
        check_types(self, type(self).__name__, SourceError)
        require_units("Protobuf", self.timestamps)

    @property
    def reading(self) -> Reading:
        return Reading(self.timestamps, base64=False)

    def misfits(self, wanted: StructType) -> list[str]:
        if not Path(self.descriptor).is_file() or find_spec("google.protobuf") is None:
            return []  # the file may exist only where runs execute
        made = message_class_of(Path(self.descriptor).read_bytes(), self.message)
        return protobuf.misfits(made.DESCRIPTOR, wanted, self.reading)

    def decode(
        self,
        message: Column,
        wanted: StructType,
        subjects: Mapping[str, bool],
        into: str,
        usual: Sequence[str] | None = None,
    ) -> Decoded:
        try:
            descriptors = Path(self.descriptor).read_bytes()
        except OSError as error:
            raise SourceError(
                f"Protobuf: cannot read {self.descriptor}: {error.strerror}; make it with "
                "protoc --include_imports --descriptor_set_out"
            ) from None
        made = message_class_of(descriptors, self.message)
        if odd := protobuf.misfits(made.DESCRIPTOR, wanted, self.reading):
            raise SourceError(f"Protobuf: {'; '.join(odd)}; correct the columns, or the message")
        text = protobuf_reader(descriptors, self.message, wanted)(
            _without_indexes(_unframed(message), _depth(made.DESCRIPTOR)) if self.framed else message
        )
        name, how = f"{into}_text", self.reading
        found = F.from_json(F.col(name), texts_of(wanted), {"mode": "PERMISSIVE"})

        def leaf(value: Column, kind: DataType, path: tuple[str, ...]) -> Column:
            return protobuf.value_of(value, kind, how, path)

        parsed = {name: text, into: found, **read_row(F.col(into), wanted, leaf, into)}
        return Decoded(parsed, F.col(f"{into}_row"), _unreadable_if(F.col(f"{into}_row").isNull()))


@dataclass(frozen=True)
class Debezium(Format):
    """Debezium's change events: ``before``, ``after``, ``op``; a deletion is a tombstone.

    For ``op`` c, u and r the row is ``after``; d deletes the message's key, or that of ``before``; t
    deletes every key; m is not a row change and goes to quarantine. In a versioned table, a null
    message after a deletion and a snapshot row (r) equal to the table's row change nothing: they are
    counted (``nothing_new``) and not applied. The last message of a key is its current row, whatever
    its timestamp. A deletion has the timestamp of its event, not that of the deleted row. Of a key that
    changes, Debezium sends a deletion and an insert. An update (u) of another key column of a table is
    unreadable: the row of the key before it would remain.

    Args:
        format: the format of the events. JSON may have the ``schema`` and ``payload`` envelope.
        timestamp: for a schema without ``timestamp``: ``source`` = the time of the change in the
            database (``source.ts_ms``); ``record`` = the message's timestamp.
        truncate: ``delete`` = an event t deletes every key of the table at the event's time. This needs
            one topic with one partition: with several, the order of an event t and the records of other
            partitions is unknown, and a run that reads an event t fails before its commit.
            ``quarantine`` = the event is quarantined (``unreadable``), as always for a stream.
        unwrapped: whether Debezium's transform ExtractNewRecordState was applied, so that the message
            is the row itself: ``__deleted`` = "true" is a deletion; ``__op`` and ``__source_ts_ms``, if
            ``add.fields`` adds them, are ``op`` and ``source.ts_ms``.
        unavailable: the placeholder for an unchanged value that the database did not send
            (``unavailable.value.placeholder``; PostgreSQL's TOAST), in strings and bytes, also base64
            or hexadecimal digits, in arrays of strings, bytes, integers or dates, and in maps. A
            versioned table takes the value of the key's previous record in the topic's order. The
            record is unreadable without a previous record, in other nodes, and with ``tie_break``: in
            tables of whole rows always, with partial updates if the column of ``tie_break`` or
            ``valid_until`` is unchanged. None: an ordinary value.
    """

    format: Json | Avro = field(default_factory=Json)
    timestamp: Literal["source", "record"] = "source"
    truncate: Literal["delete", "quarantine"] = "delete"
    unwrapped: bool = False
    unavailable: str | None = "__debezium_unavailable_value"

    orders_changes = True

    def __post_init__(self) -> None:
        check_types(self, type(self).__name__, SourceError)
        if self.truncate not in ("delete", "quarantine"):
            raise SourceError(
                f"truncate of Debezium must be 'delete' or 'quarantine', got {self.truncate!r}"
            )

    @property
    def timestamps(self) -> Timestamps | None:
        return self.format.timestamps

    def misfits(self, wanted: StructType) -> list[str]:
        message_type = wanted if self.unwrapped else _event(wanted)
        return self.format.misfits(message_type) if isinstance(self.format, Avro) else []

    @property
    def rows(self) -> Json | None:
        return self.format if self.unwrapped and isinstance(self.format, Json) else None

    def decode(
        self,
        message: Column,
        wanted: StructType,
        subjects: Mapping[str, bool],
        into: str,
        usual: Sequence[str] | None = None,
    ) -> Decoded:
        if self.unwrapped:
            return self._unwrapped(message, wanted, subjects, into, usual)
        if isinstance(self.format, Json):
            part, found = self._json(self.format, message, wanted, into)
            images = F.col(f"{into}_texts")["before"], F.col(f"{into}_texts")["after"]
        else:
            found = self.format.decode(message, _event(wanted), subjects, into)
            part = {name: found.row[name] for name in ("before", "after", "op")}
            part["ts_ms"] = found.row["source"]["ts_ms"]
            part["timed"] = part["ts_ms"].isNotNull()
            part["row"] = F.when(part["op"] == "d", part["before"]).otherwise(part["after"])
            images = part["before"], part["after"]
        deleted, row = part["op"] == "d", part["row"]
        known = F.coalesce(part["op"].isin("c", "u", "r", "d"), F.lit(False))
        empty = ~deleted & reduce(and_, [row[name].isNull() for name in wanted.names])
        reason = F.coalesce(found.reason, F.when(~known | empty, Reason.UNREADABLE))
        time = self._time(part["ts_ms"])
        if time is not None:
            reason = F.coalesce(reason, _unreadable_if(part["timed"] & time.isNull()))
        unchanged = self._unchanged(row, wanted, deleted)
        truncates = part["op"] == "t" if self.truncate == "delete" else None
        before, after = (F.when(part["op"] == "u", image) for image in images)
        restates, images = part["op"] == "r", (before, after)
        return Decoded(
            found.parsed, row, reason, deleted, time, restates, truncates, unchanged, images, found.null
        )

    def _unwrapped(
        self,
        message: Column,
        wanted: StructType,
        subjects: Mapping[str, bool],
        into: str,
        usual: Sequence[str] | None,
    ) -> Decoded:
        more = [f for f in OF_DEBEZIUM.fields if f.name not in wanted.names]
        message_type = StructType([*nullable(wanted).fields, *more])
        found = self.format.decode(message, message_type, subjects, into, usual)
        deleted = F.lower(found.row[UNWRAPPED.name].cast("string")) == "true"
        deleted = F.coalesce(deleted, F.lit(False)) | F.coalesce(found.row["__op"] == "d", F.lit(False))
        moment = found.row["__source_ts_ms"]
        time, reason = self._time(moment.try_cast("long")), found.reason
        if time is not None:
            reason = F.coalesce(reason, _unreadable_if(moment.isNotNull() & time.isNull()))
        unchanged = self._unchanged(found.row, wanted, deleted)
        restates = found.row["__op"] == "r"
        row, null = found.row, found.null
        return Decoded(
            found.parsed, row, reason, deleted, time, restates, unchanged=unchanged, null=null
        )

    def _time(self, millis: Column) -> Column | None:
        """Returns the time of a change; null outside the years 1 to 9999."""
        return of_long(millis, TimestampType(), "millis") if self.timestamp == "source" else None

    def _unchanged(self, row: Column, wanted: StructType, deleted: Column) -> Column | None:
        """Returns the names of the columns whose value the database did not send; null = it sent all
        values."""
        if self.unavailable is None:
            return None
        missing = [
            (f.name, _is_placeholder(row[f.name], f.dataType, self.unavailable)) for f in wanted.fields
        ]
        found = [F.when(F.coalesce(is_one, F.lit(False)), F.lit(n)) for n, is_one in missing]
        names = F.array_compact(F.array(*found))
        return F.when(~deleted & (F.size(names) > 0), names)

    def _json(
        self, format_: Json, message: Column, wanted: StructType, into: str
    ) -> tuple[dict[str, Column], Decoded]:
        """Returns the parts of an event; reads only the image that counts, ``before`` or ``after``."""
        text, event = format_.text(message), _event(wanted)
        parsed = parse(text, event, format_.options, into, bare_payload=True)
        op = value_of(parsed.texts["op"], StringType(), format_.reading)
        ts_ms = value_of(parsed.texts["source"]["ts_ms"], LongType(), format_.reading)
        before, after = parsed.texts["before"], parsed.texts["after"]
        nothing = [F.lit(None).cast(f.dataType).alias(f.name) for f in texts_of(wanted).fields]
        image = F.when(op == "d", F.coalesce(before, F.struct(*nothing))).otherwise(after)
        of_row = F.filter(parsed.texts[SCHEMA_OF]["fields"], lambda one: one["field"] == "after")
        schema = F.get(of_row, F.lit(0))
        chosen = F.col(f"{into}_image")
        columns, row = read_object(parsed, wanted, format_.reading, into, chosen, schema)
        columns = {**parsed.columns, f"{into}_image": image, **columns}
        # A column without a value may have a name in another case; to look is slow.
        lacks = reduce(or_, [chosen[name].isNull() for name in wanted.names])
        whole = F.when(op == "d", _part_of(text, "before")).otherwise(_part_of(text, "after"))
        odd = F.when(lacks, ~has_names_of(whole, wanted)).otherwise(False)
        reason = _unreadable_if(row.isNull() | ~F.is_valid_utf8(text) | odd)
        timed = parsed.texts["source"]["ts_ms"].isNotNull()
        part = {"op": op, "ts_ms": ts_ms, "timed": timed, "row": row}
        return part, Decoded(columns, row, reason, null=parsed.null)


def _part_of(text: Column, part: str) -> Column:
    """Returns a part of an event as JSON, with or without Connect's envelope."""
    return F.coalesce(*[F.get_json_object(text, f"$.{path}{part}") for path in ("", f"{PAYLOAD}.")])


def _event(wanted: StructType) -> StructType:
    """Returns the schema of the parts of a change event that are read."""
    image, source = nullable(wanted), StructType().add("ts_ms", LongType())
    parts = StructType().add("before", image, True, {COUNTS_IF: ("op", "d")}).add("after", image)
    return parts.add("op", StringType()).add("source", source)


def _unreadable_if(broken: Column) -> Column:
    return F.when(broken, Reason.UNREADABLE)


def _is_framed(message: Column) -> Column:
    return (F.length(message) >= _FRAME) & (F.hex(F.substring(message, 1, 1)) == "00")


def _unframed(message: Column) -> Column:
    """Returns the message after the framing; null without framing, which every format rejects."""
    return F.when(_is_framed(message), F.substring(message, _FRAME + 1, 2**31 - 1))


def _depth(descriptor: Any) -> int:
    """Returns the number of messages that a message is nested in, and itself."""
    outer = descriptor.containing_type
    return 1 if outer is None else 1 + _depth(outer)


_INDEX = "(?:[0-7][02468ACE]|[89A-F][02468ACE](?:[89A-F][0-9A-F])*+[0-7][0-9A-F])"
"""A message index in hexadecimal digits: a whole number from 0 on as a zigzag varint."""


def _without_indexes(message: Column, depth: int) -> Column:
    """Returns the message after Protobuf's message indexes: their number, and one for each level at
    which the message is nested; a single zero is the first message of its file. Null without indexes.

    No message begins like up to three indexes: their number would be the tag of a field 0.

    Args:
        depth: the levels at which the message is nested in its descriptor. More than three indexes are
            read only if it has as many.
    """
    numbers = sorted({1, 2, 3, depth})
    digits = F.hex(F.substring(message, 1, 1 + 10 * numbers[-1]))
    indexes = "|".join(f"{2 * n:02X}{_INDEX}{{{n}}}" for n in numbers)
    found = F.regexp_extract(digits, rf"\A(?:00|{indexes})", 0)
    start = (F.length(found) / 2 + 1).cast("int")
    return F.when(found != "", F.substring(message, start, F.length(message)))


__all__ = ["Avro", "Debezium", "Decoded", "Format", "Json", "Protobuf", "Raw", "SchemaRegistry"]
