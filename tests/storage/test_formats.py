"""How each format decodes the bytes of messages. The schema registry is a small HTTP server in this
process with recorded answers of Confluent's API. Spark encodes Avro, Google's library Protobuf."""

from __future__ import annotations

import base64
import gzip
import json
import re
import shutil
import struct
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from confluent_kafka.schema_registry import SchemaRegistryClient
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from pyspark.sql import Column, Row, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.avro.functions import to_avro
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    DataType,
    DateType,
    DecimalType,
    DoubleType,
    IntegerType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from tests.schema_registry import Registry, framed
from tests.storage.test_decoded_values import with_columns
from vt_dagster.core.source_records import REASON, Reason, prepare
from vt_dagster.errors import SourceError, TopologyError
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
from vt_dagster.sources import kafka_source, protobuf, text_formats
from vt_dagster.sources.avro import node_of, with_types
from vt_dagster.sources.consumed_files import files_in
from vt_dagster.sources.files_source import FilesSource
from vt_dagster.sources.message_formats import Decoded, Format
from vt_dagster.sources.text_formats import may_be_enveloped, parse, read_object
from vt_dagster.topology.model import Stream, Table, VersionedTable

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
    {"name": "price", "type": "int", "default": 2},
    {"name": "due", "type": {"type": "long", "logicalType": "timestamp-millis"}, "default": 60_000},
    {
        "name": "rate",
        "type": {"type": "bytes", "logicalType": "decimal", "precision": 4, "scale": 1},
        "default": "1",
    },
]
V3 = {**V2, "fields": [*V2["fields"], *_NEWER]}
AT = datetime(2024, 5, 1, 12, 0, 0, 250_000)


Asked = tuple[Format, Sequence[bytes], StructType]
"""A format, messages, and the columns to decode from them."""
_SENT = "n int, i int, m binary"


def decoded(
    spark: SparkSession, format_: Format, messages: Sequence[bytes], wanted: StructType = WANTED
) -> list[dict[str, Any]]:
    """The values that a format decodes from each message; only ``reason`` if it cannot be read."""
    return each_decoded(spark, (format_, messages, wanted))[0]


def each_decoded(spark: SparkSession, *asked: Asked) -> list[list[dict[str, Any]]]:
    """The same for several formats in one query, in which each format reads the messages of all."""
    messages = [
        (n, i, bytearray(m)) for n, (_, some, _) in enumerate(asked) for i, m in enumerate(some)
    ]
    rows = spark.createDataFrame(messages, "n int, i int, m binary")
    each = [
        format_.decode(F.col("m"), wanted, {"orders-value": True}, f"read{n}")
        for n, (format_, _, wanted) in enumerate(asked)
    ]
    rows = with_columns(rows, [found.parsed for found in each])
    made = list[Any]()
    for n, (found, (format_, _, wanted)) in enumerate(zip(each, asked, strict=True)):
        columns = [found.row[name].alias(name) for name in format_.columns(wanted)]
        if found.deleted is not None:
            columns.append(found.deleted.alias("deleted"))
        if found.time is not None:
            columns.append(found.time.alias("time"))
        made.append(F.struct(*columns, found.reason.alias("reason")).alias(f"made{n}"))
    got = [list[dict[str, Any]]() for _ in asked]
    for row in rows.select("n", "i", *made).orderBy("n", "i").collect():
        values = {name: row[f"made{row.n}"][name] for name in row[f"made{row.n}"].__fields__}
        reason = values.pop("reason")
        got[row.n].append(values if reason is None else {"reason": reason})
    return got


def avro(spark: SparkSession, schema: dict[str, Any], *columns: str) -> bytes:
    row = spark.range(1).select(F.struct(*[F.expr(c) for c in columns]).alias("row"))
    (found,) = row.select(to_avro("row", json.dumps(schema))).collect()
    return bytes(found[0])


def of_fields(*types: tuple[str, Any], **more: Any) -> dict[str, Any]:
    fields = [{"name": name, "type": kind} for name, kind in types]
    return {"type": "record", "name": "R", "fields": fields, **more}


def logical(kind: str, of: str, **more: Any) -> dict[str, Any]:
    return {"type": kind, "logicalType": of, **more}


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


NAMED = ['{"x": 1, "z": 2}', "{}", '{"z": 1}', '{"x": 1, "x": 2}', '{"x": 1, "Y": 2}']
"""Nested objects: good ones, two without the wanted fields, a field twice, a field in another case."""


def test_json(spark: SparkSession) -> None:
    good = b'{"id": 7, "name": "x", "at": "2024-05-01T12:00:00.250Z", "more": [1]}'
    bad = {"reason": "unreadable"}
    texts = [good, b'{"id": 1', b'"text"', b'{"id": "seven"}', b"{}", b'{"name": null}']
    none = {"id": None, "name": None, "at": None}
    doubled, latin = good + good, '{"id": 7, "name": "é"}'.encode("latin-1")
    texts += [doubled, good + b" x", latin, b'{"id": 7, "id": 8}', rb'{"id": 7, "name": "\ud83d"}']
    named = ["public", 5, None, ["a"], {"fields": ["a"]}, {"name": {"id": 8}}, {"id": 8}]
    beside = [(name, value) for name in ("schema", "payload", "Payload") for value in named]
    texts += [json.dumps({**json.loads(good), name: value}).encode() for name, value in beside]
    row = StructType().add("x", "integer").add("y", "integer")
    wanted = StructType().add("id", "integer").add("s", StructType().add("in", row))
    wanted = wanted.add("rows", ArrayType(row)).add("by", MapType(StringType(), row))
    parts = ['"s": {"in": %s}', '"rows": [{}, %s]', '"by": {"k": %s}']
    nested = [f'{{"id": 1, {part % named}}}' for named in NAMED for part in parts]
    more = f'{{"payload": {nested[9]}, {nested[0][1:]}'  # a column more, with a field twice
    nested = [*nested, more, f'{{"schema": {{}}, "payload": {nested[1]}}}']
    plain, packed, within = each_decoded(
        spark,
        (Json(), texts, WANTED),
        (Json(framed=True), [framed(3, good), good, b""], WANTED),
        (Json(), [text.encode() for text in nested], wanted),
    )
    assert plain == [ORDER, *(bad, bad, bad, bad), none, *[bad] * 5, *[ORDER] * len(beside)]
    assert packed == [ORDER, bad, bad]
    right, nothing = Row(x=1, y=None), Row(x=None, y=None)
    parts = [within[0]["s"]["in"], within[1]["rows"][1], within[2]["by"]["k"], within[-1]["rows"][1]]
    assert parts == [right] * 4
    for one, two, three in (within[3:6], within[6:9]):
        assert [one["s"]["in"], *two["rows"], three["by"]["k"]] == [nothing] * 4
    assert within[9:-2] == [bad] * 6
    assert within[-2]["s"]["in"] == right


ENVELOPE = '{"schema": null, "payload": {"id": 7}}'


@pytest.mark.parametrize(
    ("texts", "options", "expected"),
    [
        (['{"id": 7, "name": "\\u00e9"}', ""], {}, False),
        (['{"id": 7}', ENVELOPE], {}, True),
        ([ENVELOPE.replace("payload", r"p\u0061yload")], {}, True),
        ([ENVELOPE.replace("payload", r"payloa\u0064")], {}, True),
        (['{"id": 7}'], {"encoding": "utf-16"}, True),
        (['{"id": 7}'], {"allowBackslashEscapingAnyCharacter": "true"}, True),
        (['{"id": 7}'] * 17, {}, True),
        (["gzip"], {}, True),
    ],
)
def test_envelope_in_files(
    tmp_path: Path, texts: list[str], options: dict[str, str], expected: bool
) -> None:
    """Small files are read before a run is planned: without the name, no line is an envelope. Otherwise
    a line may be one."""
    for number, text in enumerate(texts):
        zipped = text == "gzip"
        content = gzip.compress(b'{"id": 7}') if zipped else text.encode()
        (tmp_path / f"{number}.jsonl{'.gz' if zipped else ''}").write_bytes(content)
    files = files_in(str(tmp_path), "*", "JSON lines")
    assert len(files) == len(texts)
    assert may_be_enveloped(files, options) is expected
    shutil.rmtree(tmp_path)
    assert may_be_enveloped(files, options), "Spark's error about a file that is gone is clear"


def test_envelope_in_file_is_unwrapped(spark: SparkSession, tmp_path: Path) -> None:
    path = tmp_path / "orders.jsonl"
    names = "payload", r"p\u0061yload", r"payloa\u0064"
    path.write_text("\n".join(ENVELOPE.replace("payload", name) for name in names), encoding="utf-8")
    source = FilesSource(str(tmp_path))
    rows = source.read(spark, files_in(str(tmp_path), "*", "JSON lines"), WANTED).collect()
    assert [(row["id"], row["_reason"]) for row in rows] == [(7, None)] * len(names)


class WithoutPattern(Json):
    """Reads each object without the pattern that fits most objects."""

    def decode(
        self, message: Column, wanted: StructType, subjects: Mapping[str, bool], into: str
    ) -> Decoded:
        text = self.text(message)
        columns, row = read_object(parse(text, wanted, {}, into), wanted, self.reading, into)
        broken = row.isNull() | ~F.is_valid_utf8(text)
        return Decoded(columns, row, F.when(broken, Reason.UNREADABLE))


USUAL = {
    "id": "7", "name": '"x"', "at": '"2024-05-01T12:00:00.250Z"', "price": "1.50", "weight": "0.25",
    "ok": "true", "raw": '"YXBwbGU="', "day": '"2024-05-01"', "a.b $1": '"y"',
}  # fmt: skip
TOKENS = [
    *("null", "true", "false", "7", "-7", "-0", "0.50", "1e2", "1E+2", "01", "1.", ".5", "+1", "NaN"),
    *('""', '"7"', '"null"', '"a b"', '"é\U0001f600"', '"1.50"', '"x', '1"', 'null"', '"a"b', "'x'"),
    *(r'"\u0061"', r'"\ud83d"', r'"a\"b"', '"a\tb"', '"a\x1fb"', "\x1f", "x", "", "[1]", "{}", "1 2"),
    *("9" * 120, f"1.{'0' * 120}", "1e0000000001", "#1", "null null", '"a" "b"', "1,", "/* */ 1"),
]


def test_json_pattern_reader_equals_general_reader(spark: SparkSession) -> None:
    """Most objects are read by a pattern, with the same values and reasons as by the general reader."""
    kinds = ["integer", "string", "timestamp", "decimal(6,2)", "double", "boolean", "binary", "date"]
    wanted = StructType()
    for name, kind in zip(USUAL, [*kinds, "string"], strict=True):
        wanted = wanted.add(name, kind)
    wanted = wanted.add("__deleted", "string").add("__source_ts_ms", "long")
    added = {"__deleted": '"true"', "__source_ts_ms": "5"}

    def text(fields: Mapping[str, str], around: str = "{%s}", sep: str = ",", colon: str = ":") -> str:
        return around % sep.join(f'"{name}"{colon}{token}' for name, token in fields.items())

    texts = [text({**USUAL, name: token}) for name in USUAL for token in TOKENS]
    texts += [text(USUAL, around) for around in (" { %s } ", "{%s}}", "{%s", "%s}", "[{%s}]", "{%s} x")]
    texts += [text(USUAL, around) for around in ("{%s}\t", "\t{%s}", "{%s}\r", "\ufeff{%s}", "{%s}{}")]
    texts += [text(USUAL, sep=sep) for sep in (" , ", ",\t", ",,", " ", ";")]
    texts += [text(USUAL, colon=colon) for colon in (" : ", ":\t", "::", " ", "=")]
    texts += [text({**USUAL, more: "1"}) for more in ("Id", "ID", "more", "schema", "payload", "")]
    texts += [text({n: USUAL[n] for n in USUAL if n != gone}) for gone in USUAL]
    texts += [text({**USUAL, name: token}) for name in added for token in TOKENS]
    texts += [text({**USUAL, **added}), text({**USUAL, **added, "more": "1"}), text(added)]
    texts += [text({**USUAL, **dict(reversed(added.items()))}), text({**added, **USUAL})]
    texts += [
        text({**USUAL, "__Deleted": '"true"'}),
        text({**USUAL, **added})[:-1] + ',"__deleted":""}',
    ]
    texts += [
        text(dict(reversed(USUAL.items()))),
        text(USUAL)[:-1] + ',"id":7}',
        text({"payload": "7"}),
    ]
    by_pattern, read = each_decoded(
        spark,
        (Json(), [one.encode() for one in texts], wanted),
        (WithoutPattern(), [one.encode() for one in texts], wanted),
    )
    odd = [one for one in zip(texts, by_pattern, read, strict=True) if repr(one[1]) != repr(one[2])]
    assert not odd, odd
    assert 100 < sum("reason" in one for one in read) < len(texts) - 100


@pytest.mark.usefixtures("few_rows")
def test_usual_messages_are_read_by_pattern(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So are rows that Debezium has unwrapped, with the fields that it adds after them. Without the
    general reader, other messages are unreadable."""
    row, added = b'{"id": 1, "name": "x"', (b"", b', "__deleted": "false"', b',"__deleted":"true"')
    all_added = b', "__deleted": "false", "__op": "u", "__source_ts_ms": 5'
    usual = [*(row + more + b"}" for more in added), b'{"id":2,"name":null}']
    sent = "topic string, partition int, offset bigint, timestamp timestamp, key binary, value binary"

    def read(source: KafkaSource, values: Sequence[bytes]) -> list[tuple[Any, ...]]:
        columns = [("x", 0, n, AT, None, bytearray(value)) for n, value in enumerate(values)]
        rows = spark.createDataFrame(columns, sent)
        monkeypatch.setattr(kafka_source, "read_messages", lambda *_, **__: rows)
        found = source.read(spark, {"x": {0: (0, len(values))}}, key=["id"], schema=ROW)
        found = found.select("id", "name", "_deleted", REASON).orderBy("_position")
        return [tuple(one) for one in found.collect()]

    def without(*about: Any) -> Column:
        return F.when(F.lit(False), texts(*about))

    texts = text_formats._texts  # pyright: ignore[reportPrivateUsage]
    monkeypatch.setattr(text_formats, "_texts", without)
    one, gone = (1, "x", False, None), (1, None, True, None)
    bad = (None, None, False, "unreadable")
    cluster = KafkaCluster("localhost:1")
    other = b'{"name": "x", "id": 1}'
    found = read(KafkaSource(cluster, "x"), [*usual, other])
    assert found == [one, one, gone, (2, None, False, None), bad]
    unwrapped = KafkaSource(cluster, "x", value=Debezium(unwrapped=True))
    assert read(unwrapped, [*usual[:3], row + all_added + b"}", other]) == [one, one, gone, one, bad]
    # Of many messages, a run takes the names of the first one.
    first = [b'{"more": 5, "id": 1, "name": "x"' + more + b"}" for more in added]
    looked = [SimpleNamespace(value=lambda: first[0])]
    monkeypatch.setattr(kafka_source, "MANY_MESSAGES", 0)
    monkeypatch.setattr(KafkaCluster, "first_messages", lambda *_: looked)
    assert read(KafkaSource(cluster, "x"), [*first, row + b"}"]) == [one, one, gone, bad]
    assert read(unwrapped, [*first, row + b"}"]) == [one, one, gone, bad]


def test_raw(spark: SparkSession) -> None:
    bad = {"reason": "unreadable"}
    binary = StructType().add("b", "binary")
    assert each_decoded(
        spark,
        (Raw("name"), [b"x", b"", b"\xff"], WANTED),
        (Raw("id"), [b"12", b"12x"], WANTED),
        (Raw("b"), [b"\xff"], binary),
        (Raw("name"), [b"\0\0\0\x05", b"\0\0\0\0\x02apple", b"a\0"], WANTED),
        (Raw("name", "string"), [b"a\0"], WANTED),
    ) == [
        [{"name": "x"}, {"name": ""}, bad],
        [{"id": 12}, bad],
        [{"b": bytearray(b"\xff")}],
        [bad, bad, bad],
        [{"name": "a\0"}],
    ]


@pytest.mark.usefixtures("few_rows")
def test_times_in_rare_spellings(spark: SparkSession) -> None:
    """Java omits seconds that are zero. A number that was a float has a fraction or a power of ten."""
    wanted, bad = StructType().add("at", "timestamp"), {"reason": "unreadable"}
    texts = ["T12:00Z", " 14:00+02:00", "T04:30-0730", "T0430-0730", "T12Z"]
    numbers = ["1714564800250%s.0", "1.71456480025e%d", "1714564800250%s.5"]
    powers = {"micros": ("000", 15), "nanos": ("000000", 18)}
    sent = {u: [n % p[i % 2] for i, n in enumerate(numbers)] for u, p in powers.items()}
    noon, exact = {"at": AT.replace(microsecond=0)}, {"at": AT}
    assert each_decoded(
        spark,
        (Raw("at"), [f"2024-05-01{text}".encode() for text in texts], wanted),
        *((Json(timestamps=u), [b'{"at": %b}' % n.encode() for n in sent[u]], wanted) for u in powers),
        (Raw("at", timestamps="days"), [b"19844.0", b"19844.5"], wanted),
    ) == [
        [noon, noon, noon, bad, bad],
        [exact, exact, bad],
        [exact, exact, bad],
        [{"at": datetime(2024, 5, 1)}, bad],
    ]


@pytest.mark.parametrize(
    "kind",
    [ArrayType(StringType()), MapType(StringType(), StringType()), StructType().add("a", "long")],
)
def test_raw_refuses_nested_column(kind: DataType) -> None:
    told = (
        f"a message cannot fill these columns: tags is {kind.simpleString()}, and Raw reads one value"
    )
    source = KafkaSource(KafkaCluster("kafka:9092"), "orders", key=Raw("id"), value=Raw("tags"))
    wanted = StructType().add("id", "long").add("tags", kind)
    with pytest.raises(TopologyError, match=re.escape(told)):
        Stream("orders", key="id", schema=wanted, timestamp="timestamp", source=source)


@pytest.mark.usefixtures("few_rows")
def test_decimals_are_not_rounded(spark: SparkSession) -> None:
    kind, bad = StructType().add("d", "decimal(4,2)"), {"reason": "unreadable"}
    held = {"d": Decimal("1.50")}
    texts = [b"1.500", b"1.501", b"99.995"]
    events = [b'{"op": "c", "after": {"d": %b}}' % text for text in texts]
    assert each_decoded(
        spark,
        (Raw("d"), texts, kind),
        (Json(), [b'{"d": %b}' % text for text in texts], kind),
        (Debezium(), events, kind),
    ) == [[held, bad, bad], [held, bad, bad], [held | {"deleted": False, "time": None}, bad, bad]]


def test_avro(spark: SparkSession, orders: tuple[bytes, bytes]) -> None:
    """A record whose fields are all null is a row; other bytes are unreadable."""
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
    # Avro alone would read the first values of a framed message, or of one with another schema.
    bad = {"reason": "unreadable"}
    odd = [framed(3, orders[0]), orders[0] + b"x", orders[0] + orders[0], orders[0][:-1], b""]
    assert decoded(spark, Avro(json.dumps(V1)), odd) == [bad] * 5
    assert decoded(spark, Avro('"string"'), [framed(3, b"\x06abc"), b"\x06abcd"], key) == [bad, bad]
    with pytest.raises(SourceError, match="either a schema or a registry"):
        Avro()


def test_avro_with_registry(spark: SparkSession, orders: tuple[bytes, bytes], registry: str) -> None:
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


def test_avro_subjects_of_several_topics(
    spark: SparkSession, orders: tuple[bytes, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each topic that is read has a subject, with its own newest schema. Several may have one schema,
    and a topic may have none."""
    sent = "topic string, partition int, offset bigint, timestamp timestamp, key binary, value binary"
    first = framed(11, orders[0])
    messages = [first, first, framed(13, orders[1]), first, b"text"]
    columns = [(t, 0, 0, AT, None, bytearray(m)) for t, m in zip("vwxyz", messages, strict=True)]
    rows = spark.createDataFrame(columns, sent)
    monkeypatch.setattr(kafka_source, "read_messages", lambda *_, **__: rows)
    with Registry() as running:
        cut = {**V1, "fields": V1["fields"][:1]}
        running.subjects = {"v-value": [V1], "x-value": [cut, V2], "y-value": [V1, V3]}
        other = {**V1, "fields": [*V1["fields"], {**_NEWER[0], "default": 41}]}
        running.subjects["w-value"] = [V1, other]
        value = Avro(registry=SchemaRegistry(running.url))
        source = KafkaSource(KafkaCluster("localhost:1"), [*"uvwxyz"], value=value)
        wanted = StructType([*WANTED.fields]).add("size", "integer")

        def read(topics: str) -> list[Row]:
            ranges = {topic: {0: (0, 1)} for topic in topics}
            found = source.read(spark, ranges, key=["id"], schema=wanted)
            return found.where(F.col("_source").isin([*topics])).orderBy("_source").collect()

        found = read("vwxyz")
        alone = read("uz")
        source = KafkaSource(KafkaCluster("localhost:1"), [*"uz"], value=value)
        with pytest.raises(SourceError, match=r"'u-value' in the schema registry .* \(404\)"):
            read("u")
    assert read("") == []  # without a registry that runs
    assert [(one["id"], one["name"], one["at"], one[REASON]) for one in found] == [
        *[(7, "x", AT, None)] * 4,
        (None, None, None, "unreadable"),
    ]
    assert [one["size"] for one in found] == [None, 41, None, 40, None]
    assert [one[REASON] for one in alone] == ["unreadable"]


def test_avro_with_references_to_other_subjects(spark: SparkSession) -> None:
    """A registry returns only the names of the types that a schema refers to."""
    place = {"type": "record", "name": "Place", "namespace": "geo", "fields": [
        {"name": "code", "type": "Code"}, {"name": "near", "type": ["null", "Place"]}]}  # fmt: skip
    code = {"type": "enum", "name": "Code", "namespace": "geo", "symbols": ["A", "B"]}
    unit = {"type": "fixed", "name": "Unit", "size": 1}
    fields = [{"name": "id", "type": "long"}, {"name": "from", "type": "geo.Place"}]
    fields += [{"name": "to", "type": {"type": "array", "items": "geo.Place"}}]
    fields += [{"name": "code", "type": ["null", "geo.Code"]}, {"name": "unit", "type": "Unit"}]
    order = {"type": "record", "name": "Order", "namespace": "shop", "fields": fields}
    with Registry() as registry:
        registry.subjects = {"orders-value": [order], "geo.Place": [place], "geo.Code": [code]}
        registry.subjects["Unit"] = [unit]
        registry.references = {"orders-value": ["geo.Place", "Unit"], "geo.Place": ["geo.Code"]}
        message = framed(11, b"\x0e" + b"\x02\x00" + b"\x02\x00\x00\x00" + b"\x02\x02" + b"x")
        at = StructType().add("code", "string")
        wanted = StructType().add("id", "long").add("from", at).add("to", ArrayType(at))
        wanted = wanted.add("code", "string").add("unit", "string")
        found = decoded(spark, Avro(registry=SchemaRegistry(registry.url)), [message], wanted)
    row = {"id": 7, "from": Row(code="B"), "to": [Row(code="A")], "code": "B", "unit": "x"}
    assert found == [row]


def test_avro_recursive_records_are_skipped(spark: SparkSession) -> None:
    """Spark has no such type: the fields within are not read, all others are."""
    fields: list[Any] = [{"name": "id", "type": "long"}, {"name": "next", "type": ["null", "List"]}]
    fields += [{"name": "all", "type": {"type": "array", "items": "List"}}]
    fields += [{"name": "name", "type": "string"}]
    schema = json.dumps({"type": "record", "name": "List", "fields": fields})
    leaf = b"\x04\x00\x00\x02y"
    messages = [leaf, b"\x02\x02" + leaf + b"\x02" + leaf + b"\x00" + b"\x02x", leaf[:-1]]
    found = decoded(spark, Avro(schema), messages, ROW)
    assert found == [{"id": 2, "name": "y"}, {"id": 1, "name": "x"}, {"reason": "unreadable"}]
    inner = of_fields(("a", ["null", "A"]), ("v", "int"), name="B")
    outer = of_fields(("b", ["null", inner]), ("v", "int"), name="A")
    both = json.dumps(of_fields(("a", outer), ("b", "B"), ("c", ["null", "A", "B"])))
    v = StructType().add("v", "integer")
    wanted = StructType().add("a", StructType([*v.fields]).add("b", v))
    wanted = wanted.add("b", StructType([*v.fields]).add("a", v)).add("c", v)
    in_a, in_b = b"\x02\x00\x02\x04", b"\x02\x00\x06\x08"  # A of 2 with B of 1, B of 4 with A of 3
    found = decoded(spark, Avro(both), [in_a + in_b + b"\x04\x00\x0a"], wanted)
    assert found == [{"a": Row(v=2, b=Row(v=1)), "b": Row(v=4, a=Row(v=3)), "c": Row(v=5)}]
    (said,) = Avro(schema).misfits(StructType().add("id", "long").add("next", ROW))
    assert said.startswith("next is recursive in the schema, expected struct<")


def test_avro_defaults_fill_newer_fields(
    spark: SparkSession, orders: tuple[bytes, bytes], registry: str
) -> None:
    """A field that a message's schema lacks has the default of the newest one; without it, null."""
    wanted = StructType().add("id", "integer").add("size", "long").add("shape", "string")
    wanted = wanted.add("height", "integer").add("colour", "string")
    wanted = wanted.add("price", "decimal(9,2)").add("due", "timestamp").add("rate", "string")
    messages = [framed(11, orders[0]), framed(12, orders[1])]
    found = decoded(spark, Avro(registry=SchemaRegistry(registry)), messages, wanted)
    filled = {"size": 40, "shape": "round", "height": None, "price": Decimal("2.00"), "rate": None}
    filled |= {"due": datetime(1970, 1, 1, 0, 1)}
    assert found == [{"id": 7, **filled, "colour": None}, {"id": 7, **filled, "colour": "red"}]


def test_avro_lengths_that_no_message_has(spark: SparkSession) -> None:
    """Avro allocates what a message asks for, which ended the JVM."""
    kinds: list[Any] = [
        "string",
        "bytes",
        *({"type": t, p: "long"} for t, p in (("array", "items"), ("map", "values"))),
    ]
    asked = [
        (Avro(json.dumps(of_fields(("id", "long"), ("t", kind)))), [b"\x02" + length + b"abc"], ROW)
        for kind in kinds
        for length in (b"\x80\x80\x80\x80\x08", b"\xfc\xff\xff\xff\x0f")  # 2^30, 2^31 - 2
    ]
    assert each_decoded(spark, *asked) == [[{"reason": "unreadable"}]] * 8


def test_avro_aliases_are_resolved(spark: SparkSession, orders: tuple[bytes, bytes]) -> None:
    """Fields are found by the aliases of the newest schema or of the message's own. A value that
    does not fit its column is unreadable."""
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


def test_avro_aliases_and_defaults_of_nested_records(spark: SparkSession) -> None:
    inner = of_fields(("a", "long"), name="N")
    newer = of_fields(("b", "long"), ("c", "int"), name="N")
    newer["fields"][0]["aliases"], newer["fields"][1]["default"] = ["a"], 5
    of_map = ("by", {"type": "map", "values": "N"})
    any_, more = ["long", {"type": "array", "items": "N"}, "N"], of_fields(("a", "int"), name="M")
    versions = [
        of_fields(
            *(("one", kind), ("some", {"type": "array", "items": "N"}), of_map),
            ("any", choices),
        )
        for kind, choices in ((inner, any_), (newer, [more, "null", *any_]))
    ]
    row = StructType().add("b", "long").add("c", "integer")
    wanted = StructType().add("one", row).add("some", ArrayType(row))
    wanted = wanted.add("by", MapType(StringType(), row)).add("any", row)
    message = framed(11, b"\x02" + b"\x02\x04\x00" + b"\x02\x02k\x06\x00" + b"\x04\x08")
    with Registry() as running:
        running.subjects["orders-value"] = versions
        found = decoded(spark, Avro(registry=SchemaRegistry(running.url)), [message], wanted)
    one, two, three, four = (Row(b=n, c=5) for n in (1, 2, 3, 4))
    assert found == [{"one": one, "some": [two], "by": {"k": three}, "any": four}]


def test_misfit_names_the_schema_and_the_subject(spark: SparkSession) -> None:
    with Registry() as registry:
        registry.subjects = {"a-value": [V1], "b-value": [of_fields(("id", "string"))]}
        odd, wanted = Avro(registry=SchemaRegistry(registry.url)), StructType().add("id", "boolean")
        with pytest.raises(SourceError, match=r"schema 11 of the subject 'a-value': id is long in the"):
            odd.decode(F.col("m"), wanted, {"b-value": True, "a-value": True}, "read")


def test_unreachable_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "sleep", lambda _: None)  # the client retries after seconds
    with pytest.raises(SourceError, match=r"the schema registry at http://127\.\S+ did not answer"):
        SchemaRegistry("http://127.0.0.1:9").schemas("orders-value")
    with Registry() as registry:
        other = SchemaRegistry(registry.url.replace("http:", "https:"))
        with pytest.raises(SourceError, match=r"did not answer: ConnectError \[SSL: .* ca_location"):
            other.schemas("orders-value")
    with pytest.raises(SourceError, match=r"did not answer: FileNotFoundError .* ca_location"):
        SchemaRegistry("https://127.0.0.1:9", ca_location="/no/ca.pem").schemas("orders-value")
    with Registry() as registry:
        registry.subjects = {"orders-value": [{"type": "Unit"}], "Unit": [{}]}
        registry.references = {"orders-value": ["Unit"]}
        said = (
            r"^schema 11 of the subject 'orders-value' .* an Avro schema, got '\{\}': KeyError 'type'"
        )
        with pytest.raises(SourceError, match=said):
            SchemaRegistry(registry.url).schemas("orders-value")
        registry.subjects, registry.references = {"orders-value": [V1, {"type": "Unit"}]}, {}
        with pytest.raises(SourceError, match=r"^schema 12 of the .*'Unit' is not defined"):
            SchemaRegistry(registry.url).schemas("orders-value")

    def times_out(*_: Any) -> None:
        raise TimeoutError

    monkeypatch.setattr(SchemaRegistryClient, "get_versions", times_out)
    with pytest.raises(SourceError, match="did not answer: TimeoutError; nothing was read"):
        SchemaRegistry("http://127.0.0.1:9").schemas("orders-value")


@pytest.mark.parametrize(
    ("status", "advice"),
    [
        (401, "correct username and password"),
        (403, "let the user read the subject"),
        (404, "register them, or correct the subject"),
        (503, "check the registry, then run again"),
    ],
)
def test_registry_that_refuses(monkeypatch: pytest.MonkeyPatch, status: int, advice: str) -> None:
    monkeypatch.setattr(time, "sleep", lambda _: None)
    with Registry() as registry:
        registry.refusal = status
        with pytest.raises(SourceError, match=rf"got: No\. \({status}\); {advice}"):
            SchemaRegistry(registry.url).schemas("orders-value")


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
    # a known field of another type, only unknown fields, and a new field
    others = [b"\x0a\x01x", b"\x7a\x01x", sent + b"\x7a\x01x"]
    assert decoded(spark, plain, [sent, b"\x0a\xff", *others], wanted) == [row, bad, bad, bad, row]
    (said,) = plain.misfits(StructType().add("id", "long").add("Tags", ArrayType(StringType())))
    assert said == "Tags is named 'tags', expected the same case"
    # message indexes: [0] is a single zero; others are their number and each of them, all doubled
    starts = (b"\x00", b"\x02\x00", b"\x02\x02", b"\x02\x82\x01", b"\x04\x02\x00", b"\x06\x00\x00\x00")
    good = [framed(5, start + sent) for start in starts]
    # no index is negative; a message without indexes begins with a field
    others = [framed(5, b"\x02\x01" + sent), framed(5, b"\x02"), sent]
    others += [framed(5, order(id=7).SerializeToString()), framed(5, b""), framed(5, sent)]
    packed = Protobuf(str(path), "shop.Order", framed=True)
    assert decoded(spark, packed, [*good, *others], wanted) == [row] * 6 + [bad] * 6
    with pytest.raises(SourceError, match=r"expected the message 'shop\.Nothing'"):
        decoded(spark, Protobuf(str(path), "shop.Nothing"), [sent], wanted)


def test_connects_envelope_of_a_null(spark: SparkSession) -> None:
    """Connect's JsonConverter writes a null with a schema as an envelope."""
    some, half = b'{"schema": {"type": "struct"}, "payload": null}', b'{ "payload":null }'
    turned, twice = b'{"payload": null, "schema": null}', b'{"payload": null, "payload": null}'
    rows = [b'{"schema": {}, "payload": {"payload": null}}', b'{"schema": {}, "payload": "null"}']
    others = [twice, some + b" 1", some[:-1], b'{"schema": {"payload": null}}', *rows]
    others += [b'{"id": 7, "payload": null}', b'{"schema": "\\"payload\\": null", "payload": {}}']
    messages = [b" null\n", some, turned, half, *others]
    own = StructType().add("payload", "string").add("schema", "string")

    def nulls(format_: Format, wanted: StructType) -> list[bool]:
        found = format_.decode(F.col("m"), wanted, {}, "_m")
        rows = spark.createDataFrame([(m,) for m in messages], "m binary")
        rows = with_columns(rows, [found.parsed])
        assert found.null is not None
        return [row[0] for row in rows.select(found.null).collect()]

    for format_ in (Json(), Debezium(unwrapped=True)):
        assert nulls(format_, ROW) == [True] * 3 + [False] * 9
        assert nulls(format_, own) == [True] + [False] * 11, "columns of these names"
    assert nulls(Debezium(), ROW) == nulls(Debezium(), own) == [True] * 4 + [False] * 8


def test_debezium_json(spark: SparkSession) -> None:
    one, two = {"id": 7, "name": "x"}, {"id": 7, "name": "y"}

    def event(op: str, before: Any, after: Any) -> dict[str, Any]:
        return {"before": before, "after": after, "op": op, "source": {"ts_ms": 1714564800250}}

    payloads = [
        *(event("c", None, one), event("u", one, two), event("r", None, two), event("d", two, None)),
        *(event("t", None, None), event("u", one, None)),
    ]
    wrapped = [{"schema": {"type": "struct"}, "payload": payload} for payload in payloads]
    plain, within = ([json.dumps(message).encode() for message in some] for some in (payloads, wrapped))
    told, bad = {"deleted": False, "time": AT}, {"reason": "unreadable"}
    right = [{**one, **told}, {**two, **told}, {**two, **told}, {**two, "deleted": True, "time": AT}]
    odd = [{"id": 7, "Name": "x"}, {"id": 7, "NAME": "x", "name": None}, {"id": 7, "more": 1}]
    changes = [event("c", None, row) for row in odd]
    late = [{**payloads[0], "source": {"ts_ms": moment}} for moment in (2**63 - 1, "soon", 0)]
    more = [*changes, {"schema": None, "payload": changes[0]}, *late, event("d", None, None)]
    events = [*plain, b'{"id": 7}', b"{", *within, *(json.dumps(one).encode() for one in more)]
    found = decoded(spark, Debezium(), events, ROW)
    assert found[:14] == [*right, *[bad] * 4, *right, *[bad] * 2]
    named = {"id": 7, "name": None, **told}
    assert found[14:18] == [bad, named, named, bad], "a name in another case, where a value is null"
    assert found[18:21] == [bad, bad, {**one, **told, "time": datetime(1970, 1, 1)}]
    gone = {"id": None, "name": None, "deleted": True, "time": AT}
    assert found[21:] == [gone], "the message's key may name the row, as in Avro"


def test_debezium_avro(spark: SparkSession) -> None:
    """Debezium defines the row's schema once, in ``before``, and refers to it by name in ``after``."""
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
    none = "cast(null as struct<name: string, id: bigint>)"
    large, row = (f"named_struct('name', 'x', 'id', {n}L)" for n in (700, 7))
    source = "named_struct('ts_ms', 1714564800250L) as source"
    # Of the images of a row, the one counts that the event is about, as in JSON.
    events = [
        (none, row, "c"),
        (large, row, "u"),
        (row, large, "u"),
        (row, none, "d"),
        (large, none, "d"),
    ]
    made = [
        avro(spark, envelope, f"{before} as before", f"{after} as after", source, f"'{op}' as op")
        for before, after, op in events
    ]
    wanted = StructType().add("id", "byte").add("name", "string")
    right = {"id": 7, "name": "x", "deleted": False, "time": AT}
    bad = {"reason": "unreadable"}
    found = decoded(spark, Debezium(Avro(json.dumps(envelope))), made, wanted)
    assert found == [right, right, bad, right | {"deleted": True}, bad]


@pytest.mark.usefixtures("few_rows")
def test_connect_envelope_is_unwrapped(spark: SparkSession) -> None:
    """Connect's envelope is read; its schema names the types of times and decimals."""
    wanted = StructType().add("id", "long").add("at", "timestamp").add("day", "date")
    wanted = wanted.add("d", "decimal(9,2)")
    fields = [
        {"field": "at", "type": "int64", "name": "io.debezium.time.MicroTimestamp"},
        {"field": "day", "type": "int32", "name": "org.apache.kafka.connect.data.Date"},
        {"field": "d", "type": "bytes", "name": "org.apache.kafka.connect.data.Decimal"}
        | {"parameters": {"scale": "3"}},
    ]
    payload = {"id": 7, "at": 1714564800250000, "day": 19844, "d": "Ajo="}
    whole = {"schema": {"type": "struct", "fields": fields}, "payload": payload}
    row = {"id": 7, "at": AT, "day": AT.date(), "d": Decimal("0.57")}
    told = {"field": "after", "type": "struct", "fields": fields}
    event = {
        "schema": {"type": "struct", "fields": [{"field": "op"}, told]},
        "payload": {"op": "c", "after": payload, "source": {"ts_ms": 1714564800250}},
    }
    bad = {"reason": "unreadable"}
    others = [payload, {"schema": None, "payload": {"other": 1}}, {"other": 1}, {"ID": 7, "d": "1"}]
    messages = [json.dumps(one).encode() for one in (whole, *others)]
    more = {"deleted": False, "time": AT}
    said = Json(timestamps={"at": "micros", "day": "days"}, decimals="base64")
    plain = payload | {"d": "OQ=="}
    assert each_decoded(
        spark,
        (Json(), messages, wanted),
        (Debezium(), [json.dumps(event).encode()], wanted),
        (said, [json.dumps(plain).encode()], wanted),
    ) == [[row, *[bad] * 4], [row | more], [row]]


@pytest.mark.usefixtures("few_rows")
def test_time_of_day_is_no_time(spark: SparkSession) -> None:
    """A number that its schema calls a time of day, a year or a duration has no date, whatever the unit
    of other numbers."""
    wanted = StructType().add("id", "long").add("at", "timestamp")
    said = Json(timestamps="millis")
    names = [*(f"io.debezium.time.{n}" for n in _NO_MOMENTS), "org.apache.kafka.connect.data.Time", ""]
    messages = list[bytes]()
    for name in names:
        field = {"field": "at", "type": "int64", "name": name}
        whole = {"schema": {"type": "struct", "fields": [field]}, "payload": {"id": 7, "at": 37800000}}
        messages.append(json.dumps(whole).encode())
    read = {"id": 7, "at": datetime(1970, 1, 1, 10, 30)}
    bad = {"reason": "unreadable"}
    assert each_decoded(spark, (said, messages, wanted)) == [[*[bad] * 7, read]]
    for about in ({"logicalType": "time-micros"}, {"connect.name": "io.debezium.time.MicroTime"}):
        fields = [{"name": "id", "type": "long"}, {"name": "at", "type": {"type": "long", **about}}]
        schema = json.dumps({"type": "record", "name": "r", "fields": fields})
        found = Avro(schema, timestamps="millis").misfits(wanted)
        why = "its type is a time of day, a year or a duration"
        assert found == [f"at is long in the schema, expected timestamp ({why})"]


_NO_MOMENTS = ("Time", "MicroTime", "NanoTime", "Year", "MicroDuration", "NanoDuration")


@pytest.mark.usefixtures("few_rows")
def test_connect_decimals_in_columns_of_other_types(spark: SparkSession) -> None:
    """A column of another type gets the number, as it does from Avro, not the base64 of its bytes."""
    numbers = [(570, 3), (-150, 2), (0, 2), (5, 2), (-7, 0), (12, -2), (2**100, 5)]
    texts = ["0.570", "-1.50", "0.00", "0.05", "-7", "1200", "12676506002282294014967032.05376"]
    names = [f"d{n}" for n in range(len(numbers))]
    decimal = {"type": "bytes", "name": "org.apache.kafka.connect.data.Decimal"}
    fields = [
        decimal | {"field": name, "parameters": {"scale": str(scale)}}
        for name, (_, scale) in zip(names, numbers, strict=True)
    ]
    fields += [decimal | {"field": n, "parameters": {"scale": "2"}} for n in ("near", "bare")]
    fields += [
        decimal | {"field": "whole", "parameters": {"scale": "0"}},
        {"field": "s", "type": "string"},
    ]
    encoded = [base64.b64encode(n.to_bytes(14, "big", signed=True)).decode() for n, _ in numbers]
    payload: dict[str, Any] = dict(zip(names, encoded, strict=True))
    payload |= {"near": "AJY=", "whole": "AMg=", "bare": 1.5, "s": "AJY="}
    message = {"schema": {"type": "struct", "fields": fields}, "payload": payload}
    none = {"schema": message["schema"], "payload": dict.fromkeys(payload) | {"s": "x"}}
    wanted = StructType()
    for name in (*names, "bare", "s"):
        wanted = wanted.add(name, "string")
    wanted = wanted.add("near", "double").add("whole", "long")
    right = dict(zip(names, texts, strict=True)) | {
        "bare": "1.5",
        "s": "AJY=",
        "near": 1.5,
        "whole": 200,
    }
    messages = [json.dumps(one).encode() for one in (message, none)]
    found = each_decoded(spark, (Json(), messages, wanted))
    assert found == [[right, dict.fromkeys(right) | {"s": "x"}]]


@pytest.mark.usefixtures("few_rows")
def test_nested_connect_values(spark: SparkSession) -> None:
    """Times and decimals in structs, arrays and maps; Debezium's decimals, each with its own scale, and
    its dates with a zone."""
    scale = {"parameters": {"scale": "2"}}
    decimal = {"type": "bytes", "name": "org.apache.kafka.connect.data.Decimal"} | scale
    parts = {"type": "struct", "fields": [{"field": "scale"}, {"field": "value", "type": "bytes"}]}
    varies = parts | {"name": "io.debezium.data.VariableScaleDecimal"}
    moment = {"type": "int64", "name": "io.debezium.time.MicroTimestamp"}
    inner = {
        "type": "struct",
        "fields": [decimal | {"field": "d"}, decimal | {"field": "t"}, moment | {"field": "at"}],
    }
    fields = [
        {"field": "id", "type": "int64"},
        inner | {"field": "s"},
        {"field": "rows", "type": "array", "items": inner},
        {"field": "by", "type": "map", "values": moment},
        {"field": "ds", "type": "array", "items": decimal},
        *(varies | {"field": name} for name in ("v", "text", "near")),
        {"field": "day", "type": "string", "name": "io.debezium.time.IsoDate"},
    ]
    row = {"d": "AJY=", "t": "AJY=", "at": 1714564800250000}
    numbers: list[Any] = [{"scale": 3, "value": "AJY="}, {"scale": -1, "value": "AJY="}]
    payload = {"id": 7, "s": row, "rows": [row], "by": {"k": row["at"]}, "ds": ["AJY=", None]}
    payload |= {"v": numbers[0], "text": numbers[1], "near": numbers[0], "day": "2024-05-01Z"}
    whole = {"schema": {"type": "struct", "fields": fields}, "payload": payload}
    told = {"field": "after", "type": "struct", "fields": fields}
    event = {
        "schema": {"type": "struct", "fields": [{"field": "op"}, told]},
        "payload": {"op": "c", "after": payload, "source": {"ts_ms": 1714564800250}},
    }
    of_row = StructType().add("d", "decimal(9,2)").add("t", "string").add("at", "timestamp")
    wanted = StructType().add("id", "long").add("s", of_row).add("rows", ArrayType(of_row))
    kinds: dict[str, Any] = {"by": MapType(StringType(), TimestampType())}
    kinds |= {"ds": ArrayType(DecimalType(9, 2)), "v": DecimalType(9, 3), "text": StringType()}
    kinds |= {"near": DoubleType(), "day": DateType()}
    for name, kind in kinds.items():
        wanted = StructType([*wanted.fields, StructField(name, kind)])
    made = Row(d=Decimal("1.50"), t="1.50", at=AT)
    right = {"id": 7, "s": made, "rows": [made], "by": {"k": AT}, "ds": [Decimal("1.50"), None]}
    right |= {"v": Decimal("0.150"), "text": "1500", "near": 0.15, "day": AT.date()}
    none = {"schema": whole["schema"], "payload": dict.fromkeys(payload) | {"id": 7}}
    plain = StructType().add("v", "decimal(9,3)").add("text", "decimal(9,0)")
    assert each_decoded(
        spark,
        (Json(), [json.dumps(one).encode() for one in (whole, none)], wanted),
        (Debezium(), [json.dumps(event).encode()], wanted),
        (Json(decimals="base64"), [json.dumps(payload).encode()], plain),
    ) == [
        [right, dict.fromkeys(right) | {"id": 7}],
        [right | {"deleted": False, "time": AT}],
        [{"v": Decimal("0.150"), "text": Decimal(1500)}],
    ]


def test_avro_decimals_of_variable_scale(spark: SparkSession) -> None:
    fields = [{"name": "scale", "type": "int"}, {"name": "value", "type": "bytes"}]
    number = {"type": "record", "name": "VariableScaleDecimal", "namespace": "io.debezium.data"}
    kinds = {"d": number | {"fields": fields}, "s": "io.debezium.data.VariableScaleDecimal"}
    columns = [{"name": name, "type": ["null", kind]} for name, kind in kinds.items()]
    columns.append({"name": "day", "type": "string"})
    schema = json.dumps({"type": "record", "name": "V", "fields": columns})
    one, day = b"\x02\x06\x04\x00\x96", b"\x162024-05-01Z"
    wanted = StructType().add("d", "decimal(9,3)").add("s", "string").add("day", "date")
    found = decoded(spark, Avro(schema), [one + one + day, b"\x00\x00" + day], wanted)
    assert found == [
        {"d": Decimal("0.150"), "s": "0.150", "day": AT.date()},
        {"d": None, "s": None, "day": AT.date()},
    ]
    assert Avro(schema).misfits(StructType().add("d", StructType().add("scale", "integer"))) == []
    (said,) = Avro(schema).misfits(StructType().add("d", "date"))
    assert said == "d is decimal in the schema, expected date"


def test_json_keys(spark: SparkSession) -> None:
    """A JSON key is often a plain value, not an object."""
    text, bad = StructType().add("id", "string"), {"reason": "unreadable"}
    keys = [b'"apple"', b"1.10", b'{"id": "apple"}', b'{"schema": {}, "payload": "apple"}']
    keys += [b'{"schema": {}, "payload": {"id": "apple"}}', b'"a", "x": 1', b'{"x": 1}', b"apple"]
    apple = {"id": "apple"}
    right = [apple, {"id": "1.10"}, apple, apple, apple, bad, bad, bad]
    quoted = [b'"apple"', b"apple", rb'"a\"b"', b'"a" "b"', b'"']

    def bare(payload: Any, name: str) -> bytes:
        """The key that Connect's transform ExtractField makes."""
        said = {"type": "bytes", "name": name, "parameters": {"scale": "2"}}
        return json.dumps({"schema": said, "payload": payload}).encode()

    number = bare("MDk=", "org.apache.kafka.connect.data.Decimal")
    varies = bare({"scale": 2, "value": "MDk="}, "io.debezium.data.VariableScaleDecimal")
    moment = bare(1714564800250, "org.apache.kafka.connect.data.Timestamp")
    kinds = ("string", "decimal(9,2)", "double", "timestamp")
    of_map = StructType().add("id", MapType(StringType(), IntegerType()))
    *numbers, moments, maps = each_decoded(
        spark,
        *((Json(), [number, varies], StructType().add("id", kind)) for kind in kinds[:3]),
        (Json(), [moment], StructType().add("id", kinds[3])),
        (Json(), [b'{"schema": {}, "payload": {"id": {"a": 1}}}'], of_map),
    )
    written = "123.45", Decimal("123.45"), 123.45
    assert numbers == [[{"id": value}] * 2 for value in written]
    assert (moments, maps) == ([{"id": AT}], [{"id": {"a": 1}}])
    assert each_decoded(
        spark,
        (Json(), keys, text),
        (Raw("id"), quoted, text),
        (Raw("id", serializer="string"), [b'"apple"'], text),
    ) == [
        right,
        [{"id": one} for one in ("apple", "apple", 'a"b', '"a" "b"', '"')],
        [{"id": '"apple"'}],
    ]


@pytest.mark.usefixtures("few_rows")
def test_keys_by_kafka_serializers(spark: SparkSession) -> None:
    bad, long = {"reason": "unreadable"}, (-5).to_bytes(8, "big", signed=True)
    uuid = b"123e4567-e89b-12d3-a456-426614174000"
    cases: list[tuple[Any, str, bytes, Any]] = [
        ("long", "long", long, -5),
        ("long", "string", long, "-5"),
        ("long", "byte", (200).to_bytes(8, "big"), None),
        ("long", "long", b"\x00\x01", None),
        ("integer", "long", (2**31 - 1).to_bytes(4, "big"), 2**31 - 1),
        ("short", "long", b"\xff\xfe", -2),
        ("double", "double", struct.pack(">d", -0.1), -0.1),
        ("double", "double", struct.pack(">d", 5e-324), 5e-324),
        ("double", "double", struct.pack(">d", 1.7e308), 1.7e308),
        ("float", "double", struct.pack(">f", 1.5), 1.5),
        ("boolean", "boolean", b"\x01", True),
        ("boolean", "boolean", b"\x02", None),
        ("uuid", "string", uuid, uuid.decode()),
        ("uuid", "string", uuid[1:], None),
        ("bytes", "binary", b"\xff", bytearray(b"\xff")),
    ]
    moment = StructType().add("k", "timestamp")
    sent = (1714564800250).to_bytes(8, "big")
    *found, times, no_times = each_decoded(
        spark,
        *((Raw("k", s), [message], StructType().add("k", kind)) for s, kind, message, _ in cases),
        (Raw("k", "long", timestamps="millis"), [sent], moment),
        (Raw("k", "long"), [sent], moment),
    )
    for one, (serializer, kind, message, right) in zip(found, cases, strict=True):
        assert one == [bad if right is None else {"k": right}], (serializer, kind, message)
    assert (times, no_times) == ([{"k": AT}], [bad])


def test_debezium_unavailable_values(spark: SparkSession) -> None:
    mark = "__debezium_unavailable_value"
    wanted = StructType().add("id", "long").add("t", "string").add("b", "binary")
    wanted = wanted.add("a", ArrayType(StringType())).add("n", ArrayType(IntegerType()))
    wanted = wanted.add("m", MapType(StringType(), StringType()))
    sent = {"t": mark, "b": base64.b64encode(mark.encode()).decode(), "a": [mark]}
    sent |= {"n": list(mark.encode()), "m": {mark: mark}}
    other = {"t": f"{mark}s", "b": "AA==", "a": [mark, "x"], "n": [1], "m": {"x": mark}}

    def event(op: str, row: Any) -> bytes:
        return json.dumps({"op": op, "after" if op != "d" else "before": {"id": 1, **row}}).encode()

    coded = mark.encode()
    wanted = wanted.add("bs", ArrayType(BinaryType())).add("ds", ArrayType(DateType()))
    # PostgreSQL's uuid[], bytea[] and date[]
    rare = {"a": ["b68a35a7-17ad-35b3-af2a-ae46edb4545a"], "bs": [sent["b"]], "ds": sent["n"]}
    others = {"a": [], "bs": ["AA=="], "ds": [95]}
    messages = [event("u", sent), event("u", other), event("d", sent), event("u", {"t": mark})]
    messages += [event("u", {"t": sent["b"]}), event("u", {"t": coded.hex()})]
    messages += [event("u", rare), event("u", others)]
    assert Debezium(unavailable=None).decode(F.col("m"), wanted, {}, "r").unchanged is None
    made = Debezium(Json(timestamps="days")).decode(F.col("m"), wanted, {}, "r")
    columns = [(i, bytearray(m)) for i, m in enumerate(messages)]
    rows = spark.createDataFrame(columns, "i int, m binary")
    for name, column in made.parsed.items():
        rows = rows.withColumn(name, column)
    found = rows.select("i", made.unchanged).orderBy("i").collect()
    right = [["t", "b", "a", "n", "m"], None, None, ["t"], ["t"], ["t"], ["a", "bs", "ds"], None]
    assert [one[1] for one in found] == right


def test_table_keeps_values_missing_from_change(spark: SparkSession) -> None:
    """In streams, plain tables and tables with a tie-break, such a record is unreadable."""
    schema = StructType().add("id", "long").add("t", "string").add("n", "long")
    source = KafkaSource(KafkaCluster("localhost:1"), "x", value=Debezium())
    about: Any = {"key": "id", "schema": schema, "source": source}
    history: Any = {**about, "history_retention": timedelta(days=1)}
    columns = "id long, t string, n long, timestamp timestamp, partition int, _unchanged array<string>"
    rows = spark.createDataFrame([(1, "p", 2, AT, 0, ["t"]), (2, "x", 2, AT, 0, None)], columns)
    nodes = [VersionedTable("v", **history), VersionedTable("w", **history, tie_break="n")]
    nodes = [*nodes, Table("t", **about), Stream("s", **about)]
    found = [prepare(rows, node).orderBy("id").collect() for node in nodes]
    assert [row["_unchanged"] for row in found[0]] == [["t"], None]
    assert [row[REASON] for row in found[0]] == [None, None]
    for others in found[1:]:
        assert [row[REASON] for row in others] == ["unreadable", None]


@pytest.mark.usefixtures("few_rows")
def test_message_without_timestamp(spark: SparkSession, monkeypatch: pytest.MonkeyPatch) -> None:
    """Old producers send none. Kafka stores -1, which is no millisecond of 1969."""
    sent = "topic string, partition int, offset bigint, timestamp timestamp, key binary, value binary"
    none, last = datetime(1969, 12, 31, 23, 59, 59, 999_000), datetime(1970, 1, 1)
    value = bytearray(b'{"id": 1, "name": "x"}')
    rows = spark.createDataFrame(
        [("x", 0, n, at, None, value) for n, at in enumerate((none, last))], sent
    )
    monkeypatch.setattr(kafka_source, "read_messages", lambda *_, **__: rows)
    source = KafkaSource(KafkaCluster("localhost:1"), "x")
    found = source.read(spark, {"x": {0: (0, 2)}}, key=["id"], schema=ROW)
    node = Stream("x", key="id", schema=ROW, source=source)
    made = prepare(found, node).orderBy("_position").collect()
    assert [(row.timestamp, row[REASON]) for row in made] == [(None, "null_timestamp"), (last, None)]


def test_avro_nested_arrays_maps_and_unions(spark: SparkSession) -> None:
    """Fields are matched by name at any depth: in another order, left out, or new."""
    item = {"type": "record", "name": "Item", "fields": [
        {"name": "sku", "type": "string"}, {"name": "label", "type": "string"}]}  # fmt: skip
    fields = [
        {"name": "id", "type": "long"},
        {"name": "items", "type": {"type": "array", "items": item}},
        {"name": "by", "type": {"type": "map", "values": "Item"}},
        {"name": "u", "type": ["null", "string", "int", "Item"]},
    ]
    schema = json.dumps({"type": "record", "name": "V", "fields": fields})

    def text(said: str) -> bytes:
        return bytes([2 * len(said)]) + said.encode()

    one = text("S1") + text("Tea")
    message = b"\x02" + b"\x02" + one + b"\x00" + b"\x02" + text("k") + one + b"\x00"
    inner = StructType().add("label", "string").add("colour", "string").add("sku", "string")
    wanted = StructType().add("id", "long").add("items", ArrayType(inner))
    wanted = wanted.add("by", MapType(StringType(), inner)).add("u", "string")
    tea = {"label": "Tea", "colour": None, "sku": "S1"}
    unions = [b"\x00", b"\x02" + text("abc"), b"\x04\x0e", b"\x06" + one]
    found = decoded(spark, Avro(schema), [message + u for u in unions], wanted)
    row = {"id": 1, "items": [Row(**tea)], "by": {"k": Row(**tea)}}
    assert found[:3] == [{**row, "u": None}, {**row, "u": "abc"}, {**row, "u": "7"}]
    assert found[3] == {"reason": "unreadable"}
    number = StructType().add("u", "integer")
    right = [{"u": None}, {"reason": "unreadable"}, {"u": 7}, {"reason": "unreadable"}]
    assert decoded(spark, Avro(schema), [message + u for u in unions], number) == right
    odd = StructType().add("id", "date").add("items", StringType()).add("u", ArrayType(LongType()))
    said = Avro(schema).misfits(odd.add("By", StringType()))
    assert [one.split(" is ")[0] for one in said] == ["id", "items", "u", "By"]
    assert "timestamps" in said[0]
    cased = ArrayType(StructType().add("SKU", "string"))
    said = Avro(schema).misfits(StructType().add("id", "long").add("items", cased))
    assert said == ["items.SKU is named 'sku', expected the same case"]
    assert Avro(schema, timestamps="days").misfits(StructType().add("id", "date")) == []
    assert "none of the columns" in Avro(schema).misfits(StructType().add("x", "date"))[0]


@pytest.mark.usefixtures("few_rows")
def test_avro_unions_of_similar_types(spark: SparkSession) -> None:
    """Each member has its own unit and its own text. A member that Spark cannot read is unreadable
    only in a column that takes it."""
    day, millis = logical("int", "date"), logical("long", "timestamp-millis")
    times = of_fields(("t", ["null", day, millis]), ("c", [logical("int", "time-millis"), "long"]))
    numbers = of_fields(("f", ["float", "double"]), ("n", ["int", "long", "null"]))
    own = [{"type": "array", "items": "R"}, {"type": "map", "values": "R"}, "R"]
    tree = of_fields(("id", "long"), ("any", ["null", "string", *own]), ("name", "string"))
    leaf = b"\x04\x00\x02y"
    within = [b"\x02\x02v", b"\x04\x02" + leaf + b"\x00", b"\x08" + leaf]
    trees = [leaf, *(b"\x02" + part + b"\x02x" for part in within)]
    any_ = StructType().add("any", "string").add("name", "string")
    moments = StructType().add("t", "timestamp").add("c", "timestamp_ntz")
    texts = StructType().add("f", "string").add("n", "long")
    members = StructType().add("member1", "long").add("member0", "integer")
    short, long = b"\x00" + struct.pack("<f", 0.1), b"\x02" + struct.pack("<d", 0.1)
    some = [short + b"\x00\x02", long + b"\x02\x06", short + b"\x04"]
    timed = [b"\x02\x04\x02\x02", b"\x04\x04\x02\x02", b"\x00\x00\x02"]
    found = each_decoded(
        spark,
        (Avro(json.dumps(times), timestamps="millis"), timed, moments),
        (Avro(json.dumps(numbers)), some, texts),
        (Avro(json.dumps(numbers)), some, StructType().add("n", members)),
        (Avro(json.dumps(tree)), trees, ROW),
        (Avro(json.dumps(tree)), trees, any_),
    )
    start, bad, x = datetime(1970, 1, 1), {"reason": "unreadable"}, {"id": 1, "name": "x"}
    one, two = (start + timedelta(milliseconds=n) for n in (1, 2))
    assert found == [
        [{"t": start + timedelta(days=2), "c": one}, {"t": two, "c": one}, bad],
        [{"f": "0.1", "n": 1}, {"f": "0.1", "n": 3}, {"f": "0.1", "n": None}],
        [{"n": Row(member1=None, member0=1)}, {"n": Row(member1=3, member0=None)}, {"n": None}],
        [{"id": 2, "name": "y"}, x, x, x],
        [{"any": None, "name": "y"}, {"any": "v", "name": "x"}, bad, bad],
    ]
    third = StructType().add("member2", "long")
    (said,) = Avro(json.dumps(numbers)).misfits(StructType().add("n", third))
    assert said == "n is int or long in the schema, expected struct<member2:bigint>"


@pytest.mark.usefixtures("few_rows")
def test_avro_names_and_roots(spark: SparkSession) -> None:
    """Names that differ only in case are two; a namespace beside a dotted name is ignored. A null
    message of a schema that allows it has no value."""
    nested = of_fields(("x", "int"), ("X", "int"), name="N")
    twins = of_fields(("id", "long"), ("ID", "string"), ("n", nested))
    inner = of_fields(("k", "long"), name="P")
    dotted = of_fields(("x", inner), ("y", "a.b.P"), ("w", "P"), name="a.b.R", namespace="z")
    of_none, of_a = {**inner, "namespace": ""}, of_fields(("k", "string"), name="P")
    near = of_fields(("x", of_none), ("y", of_a), ("w", "P"), namespace="a")
    enum = {"type": "enum", "name": "E", "symbols": ["A", "B"]}
    nothing = of_fields(("id", "long"), ("t", "null"), ("u", ["null"]), ("e", enum))
    nulls = StructType().add("t", "date").add("u", "string").add("e", "binary")
    text = StructType().add("w", StructType().add("k", "string"))
    k = StructType().add("k", "long")
    two = StructType().add("id", "long").add("n", StructType().add("X", "integer"))
    three = StructType().add("x", k).add("y", k).add("w", k)
    found = each_decoded(
        spark,
        (Avro(json.dumps(twins)), [b"\x02\x02x\x04\x06"], two),
        (Avro(json.dumps(dotted)), [b"\x02\x04\x06"], three),
        (Avro(json.dumps(near)), [b"\x02\x02x\x02y"], text),
        (Avro(json.dumps(nothing)), [b"\x02\x00\x02"], nulls),
        (Avro(json.dumps({"type": inner})), [b"\x02"], k),
        (Avro(json.dumps(["null", inner])), [b"\x02\x02"], k),
    )
    assert found == [
        [{"id": 1, "n": Row(X=3)}],
        [{"x": Row(k=1), "y": Row(k=2), "w": Row(k=3)}],
        [{"w": Row(k="y")}],
        [{"t": None, "u": None, "e": bytearray(b"B")}],
        [{"k": 1}],
        [{"k": 1}],
    ]
    (said,) = Avro(json.dumps(nothing)).misfits(StructType().add("e", "integer"))
    assert said == "e is enum in the schema, expected int"
    made = Avro(json.dumps(["null", inner])).decode(F.col("m"), k, [], "r")
    messages = [(bytearray(m),) for m in (b"\x00", b"\x02\x02", b"\x00\x00")]
    rows = spark.createDataFrame(messages, "m binary")
    for name, column in made.parsed.items():
        rows = rows.withColumn(name, column)
    said = rows.select(made.null, made.reason).collect()
    assert [tuple(one) for one in said] == [(True, None), (False, None), (False, "unreadable")]


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("Unknown", "expected an Avro schema, got"),
        ("Unknown", "the type 'Unknown' is not defined"),
        ({"type": "rekord"}, "the type 'rekord' is not defined"),
        (of_fields(("a", "long"), ("a", "long")), "'a' is there twice"),
        (of_fields(("a", "long"), name="R-1"), "the name 'R-1' is not of letters, digits and _"),
        (of_fields(("my-field", "long")), "the name 'my-field' is not of letters, digits and _"),
        ({"type": "enum", "name": "E", "symbols": ["A", "A"]}, "'A' is there twice"),
        (of_fields(("a", of_fields(("b", "long")))), "the type 'R' has two definitions"),
        (["null", ["null", "long"]], "a union has another one"),
        ([{"type": "null"}, "null", "long"], "null twice"),
        (5, "TypeError 'int' object is not subscriptable"),
        ({"type": "record", "name": 5}, "AttributeError"),
    ],
)
def test_avro_refuses_schemas_that_are_none(kind: Any, why: str) -> None:
    schema = json.dumps({"type": "array", "items": kind})
    with pytest.raises(SourceError, match=re.escape(why)):
        Avro(schema).misfits(StructType().add("a", "long"))


def test_avro_definitions_that_are_equal() -> None:
    """A type may be defined again in the same way, and after its use. A namespace of null is none, and
    a field's order is ascending."""
    enum = {"type": "enum", "name": "E", "symbols": ["A"]}
    again = {**enum, "name": "a.E", "doc": "again", "aliases": ["F"]}
    one = of_fields(("e", enum), ("x", {"type": "long"}), name="P", namespace="a")
    two = of_fields(("e", "E"), ("x", "long"), name="P", namespace=None)
    two["fields"][0] |= {"doc": "again", "order": "ascending"}
    twice = of_fields(("one", one), ("two", two), ("e", again), namespace="a")
    found = node_of(json.dumps(twice)).fields
    assert [part.type for part in found.values()] == ["record", "record", "enum"]
    assert [*found["two"].fields] == ["e", "x"]
    later = of_fields(("e", "E"), ("p", "a.P"), ("one", one), namespace="a")
    assert node_of(json.dumps(later)).fields["p"].fields["e"].type == "enum"
    # A short name is first one of a type before it, as for Java.
    near = of_fields(("x", {**enum, "namespace": ""}), ("y", "E"), ("z", of_fields(name="E")))
    assert node_of(json.dumps({**near, "namespace": "a"})).fields["y"].type == "enum"


def test_avro_types_of_other_subjects() -> None:
    """They may define further types, which the schema uses before them, or without them."""
    address = of_fields(("city", "string"), name="Address", namespace="geo")
    inside = of_fields(("to", address), ("unit", "Unit"), name="Order", namespace="shop")
    unit = {"type": "enum", "name": "Unit", "namespace": None, "symbols": ["A"]}
    types = {"shop.Order": json.dumps(inside), "Unit": json.dumps(unit)}
    for names in (["geo.Address", "shop.Order"], ["geo.Address"], ["shop.Order", "Unit"]):
        kinds = ((f"f{i}", name) for i, name in enumerate(names))
        schema = json.dumps(of_fields(*kinds, namespace="own"))
        found = node_of(with_types(schema, types)).fields
        assert len(found) == len(names)
        kinds = ["enum" if name == "Unit" else "record" for name in names]
        assert [part.type for part in found.values()] == kinds
    enum = {"type": "enum", "name": "E", "namespace": "own", "symbols": ["A"]}
    types = {"own.E": json.dumps(enum), "E": json.dumps(of_fields(("v", "long"), name="E"))}
    for first in ("E", enum):  # a name within a namespace comes first, also at its second use
        found = node_of(
            with_types(json.dumps(of_fields(("a", first), ("b", "E"), namespace="own")), types)
        )
        assert [part.type for part in found.fields.values()] == ["enum", "enum"]
    with pytest.raises(SourceError, match=r"expected an Avro schema, got '\{\}': KeyError 'type'"):
        with_types(json.dumps(inside), {"Unit": "{}"})


def test_avro_schemas_for_spark_stay_small() -> None:
    """A type that is used again is not expanded again."""
    chain: Any = of_fields(("v", "long"), name="N0")
    for i in range(1, 30):
        chain = of_fields(("a", chain), ("b", f"N{i - 1}"), name=f"N{i}")
    assert len(json.dumps(node_of(json.dumps(chain)).spark)) < 10_000


def test_avro_logical_types_of_other_types_are_ignored() -> None:
    wrong = [logical("int", "timestamp-millis"), logical("long", "date"), logical("int", "time-micros")]
    for kind in wrong:
        format_ = Avro(json.dumps(of_fields(("t", kind))), timestamps="seconds")
        assert format_.misfits(StructType().add("t", "timestamp")) == []
        assert node_of(json.dumps(kind)).unit is None
    assert node_of(json.dumps(logical("int", "date"))).unit == "days"


@pytest.mark.parametrize(
    ("more", "kind"),
    [
        ({"precision": 64, "scale": 127}, "encoded"),
        ({"precision": 4, "scale": -1}, "encoded"),
        ({"precision": 0}, "encoded"),
        ({"precision": "4"}, "encoded"),
        ({"precision": 4.5}, "encoded"),
        ({"precision": 4, "scale": "2"}, "encoded"),
        ({"precision": None}, "encoded"),
        ({"scale": 39}, "encoded"),
        ({"scale": 2}, "unscaled"),
        ({}, "unscaled"),
        ({"precision": 64, "scale": 2}, "unscaled"),
        ({"precision": 4, "scale": 2}, "decimal"),
    ],
)
def test_avro_decimals_that_are_none(more: Any, kind: str) -> None:
    assert node_of(json.dumps(logical("bytes", "decimal", **more))).type == kind


@pytest.mark.usefixtures("few_rows")
def test_avro_decimals_with_wrong_digits_are_bytes(spark: SparkSession) -> None:
    """They are no text: the bytes of a number may be one by chance."""
    wrong = [
        logical("bytes", "decimal", **more)
        for more in ({"precision": 2, "scale": 4}, {"precision": 64, "scale": 127}, {"precision": 0})
    ]
    small = logical("fixed", "decimal", name="Q", size=2, precision=5, scale=2)
    kinds = [*wrong, small, {**small, "name": "P", "precision": 4}]
    schema = json.dumps(of_fields(*((f"d{i}", kind) for i, kind in enumerate(kinds))))
    wanted = StructType([StructField(f"d{i}", BinaryType()) for i in range(4)])
    message = b"\x021" + b"\x022" + b"\x00" + b"12" + b"\x00\x7d"
    found = decoded(spark, Avro(schema), [message], wanted.add("d4", "decimal(4,2)"))
    held = {f"d{i}": bytearray(one) for i, one in enumerate((b"1", b"2", b"", b"12"))}
    assert found == [held | {"d4": Decimal("1.25")}]
    said = Avro(schema).misfits(StructType([StructField(f"d{i}", StringType()) for i in range(5)]))
    assert said == [f"d{i} is bytes of a logical type in the schema, expected string" for i in range(4)]


@pytest.mark.usefixtures("few_rows")
def test_avro_bytes_and_texts(spark: SparkSession) -> None:
    """A decimal declared with more digits than Spark's is read: Connect declares 64. Bytes of another
    logical type, and bytes that are not UTF-8, are no text."""
    number = {"type": "bytes", "logicalType": "decimal", "precision": 64, "scale": 2}
    identity = {"type": "fixed", "name": "Id", "size": 2, "logicalType": "uuid"}
    kinds = {"d": number, "s": number, "id": identity, "name": "string"}
    fields = [{"name": name, "type": kind} for name, kind in kinds.items()]
    schema = json.dumps({"type": "record", "name": "V", "fields": fields})
    two, long = (-1234).to_bytes(2, "big", signed=True), b"\x10" * 17
    messages = [
        b"\x04" + two + b"\x04" + b"A1" + b"id" + b"\x02x",
        b"\x22" + long + b"\x04" + b"A1" + b"id" + b"\x02x",
        b"\x04" + two + b"\x04" + b"A1" + b"id" + b"\x02\xff",
    ]
    wanted = StructType().add("d", "decimal(10,2)").add("s", "string").add("name", "string")
    right, bad = {"d": Decimal("-12.34"), "s": "166.89", "name": "x"}, {"reason": "unreadable"}
    assert decoded(spark, Avro(schema), messages, wanted) == [right, bad, bad]
    said = Avro(schema).misfits(StructType().add("id", "string").add("d", "date"))
    assert said == [
        "id is bytes of a logical type in the schema, expected string",
        "d is decimal in the schema, expected date",
    ]


def test_protobuf_well_known_types(spark: SparkSession, tmp_path: Path) -> None:
    from google.protobuf import duration_pb2, struct_pb2, timestamp_pb2, wrappers_pb2

    kinds = descriptor_pb2.FieldDescriptorProto
    modules = (duration_pb2, struct_pb2, timestamp_pb2, wrappers_pb2)
    files = [descriptor_pb2.FileDescriptorProto.FromString(m.DESCRIPTOR.serialized_pb) for m in modules]
    file = descriptor_pb2.FileDescriptorProto(
        name="g.proto", package="g", syntax="proto3", dependency=[f.name for f in files]
    )
    names = ("StringValue", "UInt64Value", "BytesValue", "Timestamp", "Duration", "Struct")
    message = file.message_type.add(name="G")
    for n, name in enumerate(names, 1):
        kind = f".google.protobuf.{name}"
        message.field.add(name=name, number=n, type=kinds.TYPE_MESSAGE, type_name=kind)
    message.enum_type.add(name="E").value.add(name="RED", number=0)
    message.field.add(name="e", number=9, type=kinds.TYPE_ENUM, type_name=".g.G.E")
    pool = descriptor_pool.DescriptorPool()
    for one in (*files, file):
        pool.Add(one)
    made = message_factory.GetMessageClass(pool.FindMessageTypeByName("g.G"))
    path = tmp_path / "g.desc"
    path.write_bytes(descriptor_pb2.FileDescriptorSet(file=[*files, file]).SerializeToString())
    sent, large, nano = made(), made(), made()
    sent.StringValue.value, sent.UInt64Value.value, sent.BytesValue.value = "Ann", 7, b"\xff"
    sent.Timestamp.FromDatetime(AT)
    sent.Duration.FromMilliseconds(1500)
    sent.Struct.update({"a": [1.5]})
    large.UInt64Value.value, nano.Timestamp.nanos = 2**63, 1
    wanted = StructType().add("StringValue", "string").add("UInt64Value", "long")
    wanted = wanted.add("BytesValue", "binary").add("Timestamp", "timestamp")
    wanted = wanted.add("Duration", "string").add("Struct", "string").add("e", "string")
    format_, bad = Protobuf(str(path), "g.G"), {"reason": "unreadable"}
    messages = [one.SerializeToString() for one in (sent, made(), large, nano)]
    row = {"StringValue": "Ann", "UInt64Value": 7, "BytesValue": bytearray(b"\xff"), "Timestamp": AT}
    row |= {"Duration": "1.500s", "Struct": '{"a": [1.5]}', "e": "RED"}
    none = dict.fromkeys(wanted.names) | {"e": "RED"}
    assert decoded(spark, format_, messages, wanted) == [row, none, bad, bad]
    within = StructType().add("UInt64Value", StructType().add("value", "decimal(20,0)"))
    got = decoded(spark, format_, [messages[2]], within)
    assert got == [{"UInt64Value": Row(value=Decimal(2**63))}]
    local = StructType().add("Timestamp", "timestamp_ntz").add("Duration", "binary")
    times = Protobuf(str(path), "g.G", timestamps="millis")
    local = local.add("Struct", "binary").add("UInt64Value", "timestamp")
    found = decoded(spark, times, messages[:1], local)
    millis, texts = datetime(1970, 1, 1, 0, 0, 0, 7000), (b"1.500s", b'{"a": [1.5]}')
    texts = {name: bytearray(text) for name, text in zip(("Duration", "Struct"), texts, strict=True)}
    assert found == [{"Timestamp": AT, "UInt64Value": millis, **texts}]
    odd = StructType().add("Duration", StructType().add("seconds", "date")).add("e", "integer")
    odd = odd.add("Timestamp", "date").add("Struct", "long").add("BytesValue", "date")
    odd = odd.add("UInt64Value", "timestamp").add("StringValue", "date")
    said = format_.misfits(odd)
    names = ["Duration.seconds", "e", "Timestamp", "Struct", "BytesValue", "UInt64Value"]
    assert [one.split(" is ")[0] for one in said] == names
    assert said[2].startswith("Timestamp is the message google.protobuf.Timestamp in the message")


def test_protobuf_required_and_newer_fields(spark: SparkSession, tmp_path: Path) -> None:
    """A message without a required field is none, as in Google's libraries. A nested message may have
    only fields that are newer than the descriptor."""
    kinds = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name="two.proto", package="two", syntax="proto2")
    message = file.message_type.add(name="Two")
    message.field.add(name="id", number=1, type=kinds.TYPE_INT64, label=kinds.LABEL_REQUIRED)
    message.field.add(name="n", number=2, type=kinds.TYPE_INT64, label=kinds.LABEL_OPTIONAL)
    part = {"type": kinds.TYPE_MESSAGE, "type_name": ".two.Part", "label": kinds.LABEL_OPTIONAL}
    message.field.add(name="part", number=3, **part)
    one = file.message_type.add(name="Part").field.add(name="x", number=1)
    one.type, one.label = kinds.TYPE_INT64, kinds.LABEL_OPTIONAL
    path = tmp_path / "two.desc"
    path.write_bytes(descriptor_pb2.FileDescriptorSet(file=[file]).SerializeToString())
    wanted, bad = StructType().add("id", "long").add("n", "long"), {"reason": "unreadable"}
    wanted = wanted.add("part", StructType().add("x", "long"))
    newer, other = b"\x08\x01\x1a\x02\x18\x05", b"\x08\x01\x1a\x02\x0a\x00"
    messages = [b"\x08\x01", newer, other, b"", b"\x10\x05", b"\x28\x05"]
    found = decoded(spark, Protobuf(str(path), "two.Two"), messages, wanted)
    row = {"id": 1, "n": None}
    assert found == [{**row, "part": None}, {**row, "part": Row(x=None)}, bad, bad, bad, bad]


def test_protobuf_map_keys_must_fit(tmp_path: Path) -> None:
    """Without the check, the number 20240105 was read as a date."""
    kinds = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name="m.proto", package="m", syntax="proto3")
    message = file.message_type.add(name="M")
    entry = message.nested_type.add(name="ByEntry")
    entry.options.map_entry = True
    for number, name in enumerate(("key", "value"), 1):
        entry.field.add(name=name, number=number, type=kinds.TYPE_INT64, label=kinds.LABEL_OPTIONAL)
    part = {"type": kinds.TYPE_MESSAGE, "type_name": ".m.M.ByEntry", "label": kinds.LABEL_REPEATED}
    message.field.add(name="by", number=1, **part)
    for number, (name, kind) in enumerate((("n", kinds.TYPE_INT32), ("on", kinds.TYPE_BOOL)), 2):
        message.field.add(name=name, number=number, type=kind, label=kinds.LABEL_OPTIONAL)
    path = tmp_path / "m.desc"
    path.write_bytes(descriptor_pb2.FileDescriptorSet(file=[file]).SerializeToString())
    assert Protobuf(str(path), "m.M").misfits(StructType().add("n", "date").add("on", "date")) == [
        "n is a number in the message, expected date (set its unit with timestamps)",
        "on is bool in the message, expected date",
    ]

    def misfits(key: DataType) -> list[str]:
        format_ = Protobuf(str(path), "m.M", timestamps="days")
        return format_.misfits(StructType().add("by", MapType(key, LongType())))

    assert misfits(LongType()) == misfits(StringType()) == []
    assert misfits(DateType()) == ["by has a number as key, expected date"]


def test_protobuf_libraries_without_is_repeated() -> None:
    """It is new in 6.31, in which a field's label is deprecated."""
    labels = descriptor_pb2.FieldDescriptorProto
    old = SimpleNamespace(LABEL_REPEATED=labels.LABEL_REPEATED)
    for label in (labels.LABEL_REPEATED, labels.LABEL_OPTIONAL, labels.LABEL_REQUIRED):
        old.label = label
        assert protobuf.is_repeated(old) == (label == labels.LABEL_REPEATED)
    fields = descriptor_pb2.FileDescriptorSet.DESCRIPTOR.fields_by_name
    assert protobuf.is_repeated(fields["file"])


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
def test_message_is_parsed_once(spark: SparkSession, value: Format, reader: str) -> None:
    """The plan parses a message once for all columns: parsing takes most of a run's time. JSON has two
    parsers, one for envelopes and one for other messages."""
    source = KafkaSource(KafkaCluster("localhost:1"), "orders", value=value)
    rows = source.read(spark, {"orders": {0: (0, 9)}}, key=["id"], schema=WANTED)
    frame: Any = rows
    plan = frame._jdf.queryExecution().optimizedPlan().toString()
    if reader == "from_avro(":
        assert plan.count(reader) == 1, plan
        return
    # The conditions are around the parsers, for which Spark generates no code.
    asked = re.findall(r"((?:NOT )?_read_value\w+)#\d+\)? THEN from_json\(", plan)
    assert asked == ["_read_value_inside", "NOT _read_value_inside"], plan
    assert plan.count(reader) == 2, plan


def test_bytes_of_decimal_are_decoded_once(spark: SparkSession) -> None:
    """A decimal of Kafka Connect is base64 in a JSON message. The plan decodes it for its value and for
    the check of it, once by the column's scale and once by that of Connect's schema."""
    source = KafkaSource(KafkaCluster("localhost:1"), "orders", value=Json())
    wanted = StructType().add("id", LongType()).add("price", DecimalType(9, 2))
    rows: Any = source.read(spark, {"orders": {0: (0, 9)}}, key=["id"], schema=wanted)
    plan = rows._jdf.queryExecution().optimizedPlan().toString()
    assert plan.count("unbase64(") == 4, plan
