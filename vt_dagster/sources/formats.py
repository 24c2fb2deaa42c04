"""What the bytes of a message mean: JSON, Avro, Protobuf, text, and change events of Debezium.

A format turns a column of bytes into a column of a struct, which Spark evaluates. Bytes that cannot be
read give ``broken``, never an error: the record goes to quarantine.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pyspark.sql import Column
from pyspark.sql import functions as F
from pyspark.sql.types import BinaryType, LongType, StringType, StructField, StructType

from vt_dagster.core.records import Reason
from vt_dagster.errors import SourceError
from vt_dagster.sources.avro import READ, read_avro, row_of
from vt_dagster.sources.json_text import one_object, read_object
from vt_dagster.sources.kafka_cluster import setting
from vt_dagster.sources.options import checked
from vt_dagster.sources.protobuf import message_class_of, protobuf_reader
from vt_dagster.sources.values import exactly

_FRAME = 5
"""Bytes before a message in Confluent's framing: a zero and the schema's number (big endian)."""


class Decoded(NamedTuple):
    """What a format makes of a message.

    Args:
        parsed: columns to add before, in this order, by name. The others are made of them, so that a
            message is read once however often it is looked at: Spark does not see that by itself.
        row: a struct with the columns that were asked for.
        reason: a ``Reason``; null where the message could be read.
        deleted: whether the message says that its key was deleted; None = only a null message does.
        time: TIMESTAMP of the change, if the message has one.
    """

    parsed: dict[str, Column]
    row: Column
    reason: Column
    deleted: Column | None = None
    time: Column | None = None


class Format(ABC):
    """How the bytes of a message are read."""

    @abstractmethod
    def decode(self, message: Column, wanted: StructType, subject: str, into: str) -> Decoded:
        """The columns that are wanted out of a message; where it is null, no matter which.

        Args:
            subject: the name under which a schema registry keeps the message's schemas.
            into: what the names of ``parsed`` begin with.

        Raises:
            SourceError: a schema cannot be had.
        """

    def columns(self, wanted: StructType) -> list[str]:
        """Those of the columns that are wanted that a message can give."""
        return wanted.names


@dataclass(frozen=True)
class SchemaRegistry:
    """A schema registry with Confluent's HTTP interface. Texts may be ``dagster.EnvVar``.

    Args:
        url: ``https://host:port``.
        username, password: where it wants them. None of the three is ever shown.
        ca_location: file (PEM) with the certificates to trust.
    """

    url: str = field(repr=False)
    username: str | None = field(default=None, repr=False)
    password: str | None = field(default=None, repr=False)
    ca_location: str | None = None

    def schemas(self, subject: str) -> dict[int, str]:
        """All versions of a subject's schema by their number in the registry, oldest first.

        Raises:
            SourceError: the registry does not answer, or has no such subject.
        """
        try:
            from confluent_kafka.schema_registry import SchemaRegistryClient, SchemaRegistryError
        except ImportError:
            raise SourceError(
                "expected the package confluent-kafka with its schema registry client, found none; "
                'install "vt-dagster[kafka]"'
            ) from None
        url = setting(self.url, "url")
        conf: dict[str, Any] = {"url": url, "timeout": 10, "max.retries": 2}
        url = re.sub(r"//[^/]*@", "//", url)  # messages are read by many
        if self.username is not None:
            name, password = setting(self.username, "username"), setting(self.password, "password")
            conf["basic.auth.user.info"] = f"{name}:{password}"
        if self.ca_location is not None:
            conf["ssl.ca.location"] = setting(self.ca_location, "ca_location")
        try:
            client = SchemaRegistryClient(conf)
            found = [client.get_version(subject, v) for v in client.get_versions(subject)]
        except SchemaRegistryError as error:
            raise SourceError(
                f"expected schemas of {subject!r} in the schema registry at {url}, got: "
                f"{error.error_message} ({error.http_status_code}); register them, or correct the "
                "subject"
            ) from None
        except Exception as error:  # whatever its HTTP client raises
            raise SourceError(
                f"the schema registry at {url} did not answer: {type(error).__name__}; nothing was "
                "read: see that it runs and can be reached from here, then run again"
            ) from None
        return {int(one.schema_id or 0): str(one.schema.schema_str) for one in found}


@dataclass(frozen=True)
class Json(Format):
    """A JSON object a message; its fields are columns by name, and missing ones are null.

    Args:
        options: Spark's JSON options, as of a ``FilesSource``; one without effect is an error.
        framed: whether Confluent's five bytes stand before it.
    """

    options: Mapping[str, str] = field(default_factory=dict[str, str], hash=False)
    framed: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "options", checked("Json", "message", self.options))

    def decode(self, message: Column, wanted: StructType, subject: str, into: str) -> Decoded:
        text = (_unframed(message) if self.framed else message).cast("string")
        parsed = {into: one_object(text, wanted, self.options)}
        row, broken = read_object(F.col(into), text, wanted)
        return Decoded(parsed, row, _unreadable_if(broken | ~F.is_valid_utf8(text)))


@dataclass(frozen=True)
class Raw(Format):
    """The message itself as one column, of type string, binary or a number that is written as text.

    Args:
        column: its name in the schema.
    """

    column: str

    def columns(self, wanted: StructType) -> list[str]:
        return [n for n in wanted.names if n == self.column]

    def decode(self, message: Column, wanted: StructType, subject: str, into: str) -> Decoded:
        kind = wanted[self.column].dataType
        if isinstance(kind, BinaryType):
            return Decoded({}, F.struct(message.alias(self.column)), _unreadable_if(F.lit(False)))
        text = message.cast("string")
        value = text if isinstance(kind, StringType) else exactly(text, kind)
        broken = ~F.is_valid_utf8(text) | value.isNull()
        return Decoded({}, F.struct(value.alias(self.column)), _unreadable_if(broken))


@dataclass(frozen=True)
class Avro(Format):
    """An Avro record a message.

    Args:
        schema: the schema (JSON) that messages are written with, without framing; or
        registry: where the schemas of messages in Confluent's framing are. A message whose schema is
            not the subject's goes to quarantine. A column that a message's schema has by another name
            is known by the aliases of that schema and of the subject's newest one. One that it lacks
            has the newest one's default, if that is a text, a number or a boolean; else it is null.
        subject: the registry's name for them; None = ``<topic>-value`` or ``<topic>-key``.
    """

    schema: str | None = None
    registry: SchemaRegistry | None = None
    subject: str | None = None

    def __post_init__(self) -> None:
        if (self.schema is None) == (self.registry is None):
            raise SourceError("Avro: expected either a schema or a registry; give exactly one of them")

    def decode(self, message: Column, wanted: StructType, subject: str, into: str) -> Decoded:
        if self.schema is not None:
            parsed = {into: read_avro(message, self.schema, wanted)}
            row = row_of(F.col(into), self.schema, wanted)
            return Decoded(parsed, row, _unreadable_if(row[READ].isNull()))
        assert self.registry is not None
        number = F.conv(F.hex(F.substring(message, 2, 4)), 16, 10).cast("long")
        row: Any = F.lit(None)
        parsed = dict[str, Column]()
        known = self.registry.schemas(self.subject or subject)
        newest = next(reversed(known.values()), "null")
        for id_, schema in known.items():
            name = f"{into}_{id_}"
            parsed[name] = F.when(number == id_, read_avro(_unframed(message), schema, wanted))
            found = row_of(F.col(name), schema, wanted, newest)
            row = F.when(number == id_, found).otherwise(row)
        reason = F.when(~_is_framed(message), Reason.UNREADABLE)
        reason = reason.when(~number.isin(list(known)), Reason.UNKNOWN_SCHEMA)
        return Decoded(parsed, row, reason.when(row[READ].isNull(), Reason.UNREADABLE))


@dataclass(frozen=True)
class Protobuf(Format):
    """A Protobuf message; its fields are columns by their names in the ``.proto`` file.

    Spark's own Protobuf functions are a module that it does not ship, so messages go to Python in
    Arrow batches and come back as JSON.

    Args:
        descriptor: a file of descriptors, as ``protoc --include_imports --descriptor_set_out`` makes.
        message: the full name of the message, ``package.Name``.
        framed: whether Confluent's framing stands before it. Which message of the file it was written
            with does not matter: the wire format tells its fields.
    """

    descriptor: str
    message: str
    framed: bool = False

    def decode(self, message: Column, wanted: StructType, subject: str, into: str) -> Decoded:
        try:
            descriptors = Path(self.descriptor).read_bytes()
        except OSError as error:
            raise SourceError(
                f"Protobuf: cannot read {self.descriptor}: {error.strerror}; make it with "
                "protoc --include_imports --descriptor_set_out"
            ) from None
        message_class_of(descriptors, self.message)
        text = protobuf_reader(descriptors, self.message)(
            _without_indexes(_unframed(message)) if self.framed else message
        )
        # proto3's JSON writes 64-bit integers as texts and bytes as base64.
        name = f"{into}_text"
        row = F.from_json(F.col(name), _nullable(wanted), {"mode": "PERMISSIVE"})
        broken = F.col(name).isNull() | F.col(into).isNull()
        return Decoded({name: text, into: row}, F.col(into), _unreadable_if(broken))


@dataclass(frozen=True)
class Debezium(Format):
    """Debezium's change events: ``before``, ``after``, ``op``; a deletion is a tombstone.

    Of ``op`` c, u and r the row is ``after``, of d it is ``before``; t and m are no changes of a row
    and go to quarantine. The null message that Debezium sends after a deletion is one more tombstone.

    Args:
        format: of the events. JSON may have ``schema`` and ``payload`` around them.
        timestamp: ``source`` = when the database made the change (``source.ts_ms``), where the table
            has no timestamp of its own; ``record`` = the message's.
    """

    format: Json | Avro = field(default_factory=Json)
    timestamp: Literal["source", "record"] = "source"

    def decode(self, message: Column, wanted: StructType, subject: str, into: str) -> Decoded:
        image = _nullable(wanted)
        source = StructType([StructField("ts_ms", LongType())])
        event = StructType(
            [
                StructField("before", image),
                StructField("after", image),
                StructField("op", StringType()),
                StructField("source", source),
            ]
        )
        wrapped = isinstance(self.format, Json)
        asked = StructType([*event.fields, StructField("payload", event)]) if wrapped else event
        found = self.format.decode(message, asked, subject, into)

        def part(name: str) -> Column:
            plain = found.row[name]
            return F.coalesce(found.row["payload"][name], plain) if wrapped else plain

        deleted = part("op") == "d"
        known = F.coalesce(part("op").isin("c", "u", "r", "d"), F.lit(False))
        empty = ~deleted & part("after").isNull()
        reason = F.coalesce(found.reason, F.when(~known | empty, Reason.UNREADABLE))
        time = F.timestamp_millis(part("source")["ts_ms"]) if self.timestamp == "source" else None
        row = F.when(deleted, part("before")).otherwise(part("after"))
        return Decoded(found.parsed, row, reason, deleted, time)


def _unreadable_if(broken: Column) -> Column:
    return F.when(broken, Reason.UNREADABLE)


def _nullable(schema: StructType) -> StructType:
    return StructType([StructField(f.name, f.dataType) for f in schema.fields])


def _is_framed(message: Column) -> Column:
    return (F.length(message) >= _FRAME) & (F.hex(F.substring(message, 1, 1)) == "00")


def _unframed(message: Column) -> Column:
    """What stands behind the frame; null where there is none, which no format can read."""
    return F.when(_is_framed(message), F.substring(message, _FRAME + 1, 2**31 - 1))


def _without_indexes(message: Column) -> Column:
    """What stands behind Protobuf's message indexes: their number, doubled, and a byte for each."""
    number = F.conv(F.hex(F.substring(message, 1, 1)), 16, 10).cast("int") / 2
    return F.substring(message, (number + 2).cast("int"), F.length(message))


__all__ = ["Avro", "Debezium", "Decoded", "Format", "Json", "Protobuf", "Raw", "SchemaRegistry"]
