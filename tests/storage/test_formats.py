"""What the bytes of messages mean. The schema registry is a small HTTP server in this process that
gives recorded answers of Confluent's API; Avro bytes are Spark's, Protobuf's are Google's."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from datetime import datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from pyspark.sql import SparkSession
from pyspark.sql import functions as F
from pyspark.sql.avro.functions import to_avro
from pyspark.sql.types import ArrayType, StringType, StructType

from tests.registry import Registry, framed
from vt_dagster.errors import SourceError
from vt_dagster.kafka import (
    Avro,
    Debezium,
    Json,
    KafkaCluster,
    KafkaSource,
    Protobuf,
    Raw,
    SchemaRegistry,
)
from vt_dagster.sources.formats import Format

ROW = StructType().add("id", "long").add("name", "string")
WANTED = StructType([*ROW.fields]).add("at", "timestamp")

V1 = {
    "type": "record",
    "name": "Order",
    "namespace": "shop",
    "fields": [
        {"name": "name", "type": ["null", "string"], "default": None},
        {"name": "id", "type": "long"},
        {"name": "at", "type": {"type": "long", "logicalType": "timestamp-millis"}},
    ],
}
V2 = {**V1, "fields": [{"name": "colour", "type": "string"}, *V1["fields"]]}
_NEWER: list[dict[str, Any]] = [
    {"name": "size", "type": "int", "default": 40},
    {"name": "shape", "type": ["string", "null"], "default": "round"},
    {"name": "height", "type": ["null", "int"], "default": None},
]
V3 = {**V2, "fields": [*V2["fields"], *_NEWER]}
AT = datetime(2024, 5, 1, 12, 0, 0, 250_000)


def decoded(
    spark: SparkSession, format_: Format, messages: Sequence[bytes], wanted: StructType = WANTED
) -> list[dict[str, Any]]:
    """What a format makes of each message; ``reason`` alone where it cannot be read."""
    rows = spark.createDataFrame([(i, bytearray(m)) for i, m in enumerate(messages)], "i int, m binary")
    found = format_.decode(F.col("m"), wanted, "orders-value", "read")
    for name, parsed in found.parsed.items():
        rows = rows.withColumn(name, parsed)
    columns = [found.row[n].alias(n) for n in format_.columns(wanted)]
    if found.deleted is not None:
        columns.append(found.deleted.alias("deleted"))
    if found.time is not None:
        columns.append(found.time.alias("time"))
    got = rows.select("i", *columns, found.reason.alias("reason")).orderBy("i").collect()
    return [
        {k: v for k, v in row.asDict().items() if k != "i" and (k != "reason" or v)}
        if row.reason is None
        else {"reason": row.reason}
        for row in got
    ]


def avro(spark: SparkSession, schema: dict[str, Any], *columns: str) -> bytes:
    row = spark.range(1).select(F.struct(*[F.expr(c) for c in columns]).alias("row"))
    (found,) = row.select(to_avro("row", json.dumps(schema))).collect()
    return bytes(found[0])


@pytest.fixture(scope="module")
def orders(spark: SparkSession) -> tuple[bytes, bytes]:
    """The same order in both versions of the schema."""
    at = "timestamp_millis(1714564800250) as at"
    return (
        avro(spark, V1, "'x' as name", "7L as id", at),
        avro(spark, V2, "'red' as colour", "'x' as name", "7L as id", at),
    )


ORDER = {"id": 7, "name": "x", "at": AT}


@pytest.fixture
def registry() -> Iterator[str]:
    """``/subjects/orders-value``: version 1 is schema 11, and so on."""
    with Registry() as running:
        running.subjects["orders-value"] = [V1, V2, V3]
        yield running.url


def test_json(spark: SparkSession) -> None:
    good = b'{"id": 7, "name": "x", "at": "2024-05-01T12:00:00.250Z", "more": [1]}'
    bad = {"reason": "unreadable"}
    texts = [good, b'{"id": 1', b'"text"', b'{"id": "seven"}', b"{}", b'{"name": null}']
    none = {"id": None, "name": None, "at": None}
    assert decoded(spark, Json(), texts) == [ORDER, *(bad, bad, bad, bad), none]
    doubled, latin = good + good, '{"id": 7, "name": "é"}'.encode("latin-1")
    assert decoded(spark, Json(), [doubled, good + b" x", latin]) == [bad, bad, bad]
    twice = b'{"id": 7, "id": 8}'
    assert decoded(spark, Json(), [twice]) == [bad]
    assert decoded(spark, Json(framed=True), [framed(3, good), good, b""]) == [ORDER, bad, bad]


def test_raw(spark: SparkSession) -> None:
    bad = {"reason": "unreadable"}
    assert decoded(spark, Raw("name"), [b"x", b"", b"\xff"]) == [{"name": "x"}, {"name": ""}, bad]
    assert decoded(spark, Raw("id"), [b"12", b"12x"]) == [{"id": 12}, bad]
    binary = StructType().add("b", "binary")
    assert decoded(spark, Raw("b"), [b"\xff"], binary) == [{"b": bytearray(b"\xff")}]


def test_decimals_are_not_rounded(spark: SparkSession) -> None:
    kind, bad = StructType().add("d", "decimal(4,2)"), {"reason": "unreadable"}
    held = {"d": Decimal("1.50")}
    texts = [b"1.500", b"1.501", b"99.995"]
    assert decoded(spark, Raw("d"), texts, kind) == [held, bad, bad]
    assert decoded(spark, Json(), [b'{"d": %b}' % text for text in texts], kind) == [held, bad, bad]
    events = [b'{"op": "c", "after": {"d": %b}}' % text for text in texts]
    more = {"deleted": False, "time": None}
    assert decoded(spark, Debezium(), events, kind) == [held | more, bad, bad]


def test_avro(spark: SparkSession, orders: tuple[bytes, bytes]) -> None:
    """A row of nulls is a row, garbage is not."""
    nothing = {
        "type": "record",
        "name": "N",
        "fields": [{"name": "name", "type": ["null", "string"], "default": None}],
    }
    empty = {"id": None, "name": None, "at": None}
    assert decoded(spark, Avro(json.dumps(nothing)), [b"\x00", b"\x09"]) == [
        empty,
        {"reason": "unreadable"},
    ]
    assert decoded(spark, Avro(json.dumps(V1)), [orders[0], b"\x02"]) == [
        ORDER,
        {"reason": "unreadable"},
    ]
    key = StructType().add("id", "string")
    assert decoded(spark, Avro('"string"'), [b"\x06abc"], key) == [{"id": "abc"}]
    with pytest.raises(SourceError, match="either a schema or a registry"):
        Avro()


def test_avro_with_a_registry(spark: SparkSession, orders: tuple[bytes, bytes], registry: str) -> None:
    format_ = Avro(registry=SchemaRegistry(registry))
    messages = [framed(11, orders[0]), framed(12, orders[1]), framed(99, orders[0]), orders[0], b"\x00"]
    assert decoded(spark, format_, messages) == [
        ORDER,
        ORDER,
        {"reason": "unknown_schema"},
        *({"reason": "unreadable"}, {"reason": "unreadable"}),
    ]
    with pytest.raises(SourceError, match=r"'nothing-value' in the schema registry .* \(404\)"):
        SchemaRegistry(registry).schemas("nothing-value")


def test_avro_fills_in_what_is_newer(
    spark: SparkSession, orders: tuple[bytes, bytes], registry: str
) -> None:
    """A field that a message's schema lacks has the default of the newest one; without it, null."""
    wanted = StructType().add("id", "integer").add("size", "long").add("shape", "string")
    wanted = wanted.add("height", "integer").add("colour", "string")
    messages = [framed(11, orders[0]), framed(12, orders[1])]
    found = decoded(spark, Avro(registry=SchemaRegistry(registry)), messages, wanted)
    filled = {"size": 40, "shape": "round", "height": None}
    assert found == [{"id": 7, **filled, "colour": None}, {"id": 7, **filled, "colour": "red"}]


def test_avro_fields_have_other_names(spark: SparkSession, orders: tuple[bytes, bytes]) -> None:
    """By the aliases of the newest schema or the message's own; and what a column cannot have is no
    value that it has."""
    later = {**V2, "fields": [{"name": "hue", "type": "string", "default": "", "aliases": ["colour"]}]}
    made = avro(spark, later, "'blue' as hue")
    with Registry() as other:
        other.subjects["orders-value"] = [V1, V2, later]
        format_ = Avro(registry=SchemaRegistry(other.url))
        wanted = StructType().add("hue", "string").add("colour", "string").add("id", "byte")
        messages = [framed(12, orders[1]), framed(13, made), framed(11, orders[0])]
        assert decoded(spark, format_, messages, wanted) == [
            {"hue": "red", "colour": "red", "id": 7},
            {"hue": "blue", "colour": "blue", "id": None},
            {"hue": "", "colour": None, "id": 7},
        ]
        large = avro(spark, V1, "'x' as name", "700L as id", "timestamp_millis(0) as at")
        assert decoded(spark, format_, [framed(11, large)], wanted) == [{"reason": "unreadable"}]


def test_unreachable_registry() -> None:
    with pytest.raises(SourceError, match=r"the schema registry at http://127\.\S+ did not answer"):
        SchemaRegistry("http://127.0.0.1:9").schemas("orders-value")


def test_protobuf(spark: SparkSession, tmp_path: Path) -> None:
    file = descriptor_pb2.FileDescriptorProto(name="shop.proto", package="shop", syntax="proto3")
    message = file.message_type.add(name="Order")
    kinds = descriptor_pb2.FieldDescriptorProto
    for i, (name, kind, label) in enumerate(
        [
            ("id", kinds.TYPE_INT64, kinds.LABEL_OPTIONAL),
            ("name", kinds.TYPE_STRING, kinds.LABEL_OPTIONAL),
            ("tags", kinds.TYPE_STRING, kinds.LABEL_REPEATED),
            ("blob", kinds.TYPE_BYTES, kinds.LABEL_OPTIONAL),
        ],
        1,
    ):
        message.field.add(name=name, number=i, type=kind, label=label)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    order = message_factory.GetMessageClass(pool.FindMessageTypeByName("shop.Order"))
    sent = order(id=2**60, name="x", tags=["a", "b"], blob=b"\x01\xff").SerializeToString()
    path = tmp_path / "shop.desc"
    path.write_bytes(descriptor_pb2.FileDescriptorSet(file=[file]).SerializeToString())
    tags = ArrayType(StringType())
    wanted = StructType([*ROW.fields]).add("tags", tags).add("blob", "binary").add("more", "integer")
    row = {"id": 2**60, "name": "x", "tags": ["a", "b"], "blob": bytearray(b"\x01\xff"), "more": None}
    bad = {"reason": "unreadable"}
    plain = Protobuf(str(path), "shop.Order")
    assert decoded(spark, plain, [sent, b"\x0a\xff"], wanted) == [row, bad]
    # message indexes: [0] is a single zero; [1, 0] is their number and each of them, all doubled
    messages = [framed(5, b"\x00" + sent), framed(5, b"\x04\x02\x00" + sent), sent]
    assert decoded(spark, Protobuf(str(path), "shop.Order", framed=True), messages, wanted) == [
        row,
        row,
        bad,
    ]
    with pytest.raises(SourceError, match=r"expected the message 'shop\.Nothing'"):
        decoded(spark, Protobuf(str(path), "shop.Nothing"), [sent], wanted)


@pytest.mark.parametrize("wrapped", [False, True])
def test_debezium_json(spark: SparkSession, wrapped: bool) -> None:
    one, two = {"id": 7, "name": "x"}, {"id": 7, "name": "y"}

    def event(op: str, before: Any, after: Any) -> bytes:
        payload = {"before": before, "after": after, "op": op, "source": {"ts_ms": 1714564800250}}
        return json.dumps(
            {"schema": {"type": "struct"}, "payload": payload} if wrapped else payload
        ).encode()

    events = [
        *(event("c", None, one), event("u", one, two), event("r", None, two), event("d", two, None)),
        *(event("t", None, None), event("u", one, None), b'{"id": 7}', b"{"),
    ]
    told = {"deleted": False, "time": AT}
    assert decoded(spark, Debezium(), events, ROW) == [
        *({**one, **told}, {**two, **told}, {**two, **told}, {**two, "deleted": True, "time": AT}),
        *[{"reason": "unreadable"}] * 4,
    ]


def test_debezium_avro(spark: SparkSession) -> None:
    """Debezium names the row's schema once, in ``before``, and refers to it in ``after``."""
    row = {
        "type": "record",
        "name": "Value",
        "fields": [{"name": "name", "type": ["null", "string"]}, {"name": "id", "type": "long"}],
    }
    source = {"type": "record", "name": "Source", "fields": [{"name": "ts_ms", "type": "long"}]}
    envelope = {
        "type": "record",
        "name": "Envelope",
        "namespace": "shop.orders",
        "fields": [
            {"name": "before", "type": ["null", row], "default": None},
            {"name": "after", "type": ["null", "Value"], "default": None},
            {"name": "source", "type": source},
            {"name": "op", "type": "string"},
        ],
    }
    made = avro(
        spark,
        envelope,
        "cast(null as struct<name: string, id: bigint>) as before",
        "named_struct('name', 'x', 'id', 7L) as after",
        "named_struct('ts_ms', 1714564800250L) as source",
        "'c' as op",
    )
    assert decoded(spark, Debezium(Avro(json.dumps(envelope))), [made], ROW) == [
        {"id": 7, "name": "x", "deleted": False, "time": AT}
    ]


@pytest.mark.parametrize(
    ("value", "reader"),
    [
        (Json(), "from_json("),
        (Debezium(), "from_json("),
        (Avro(schema=json.dumps(V1)), "from_avro("),
        (Debezium(Avro(schema=json.dumps(V1))), "from_avro("),
    ],
    ids=str,
)
def test_a_message_is_read_once(spark: SparkSession, value: Format, reader: str) -> None:
    """However many columns and reasons are made of it: reading is what a run spends its time with."""
    source = KafkaSource(KafkaCluster("localhost:1"), "orders", value=value)
    rows = source.read(spark, {"orders": {0: (0, 9)}}, key=["id"], schema=WANTED)
    frame: Any = rows
    plan = frame._jdf.queryExecution().optimizedPlan().toString()
    assert plan.count(reader) == 1, plan
