"""Records of topics in the log: which are read, from which offsets, and in which order."""

from __future__ import annotations

import contextlib
import json
import time
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from confluent_kafka import KafkaException, Producer
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import LongType, StringType, StructField, StructType

from tests.kafka.pipeline import Pipeline
from tests.kafka.topics import SCHEMA, Topics, record, records
from vt_dagster import FilesSource, Stream, Table, TopologyError, VersionedTable
from vt_dagster.errors import SourceError
from vt_dagster.kafka import KafkaCluster, KafkaSink, KafkaSource, Raw
from vt_dagster.runs import gate
from vt_dagster.sources import kafka_cluster, kafka_source, text_formats
from vt_dagster.sources.kafka_source import HEADERS

pytestmark = pytest.mark.usefixtures("few_rows")

MOMENT = datetime(2024, 5, 1, 12, 0, tzinfo=timezone.utc)


@pytest.fixture
def pipeline(tmp_path: Path, spark: SparkSession) -> Pipeline:
    """A pipeline without checks, except in the first test and that of bad records."""
    return Pipeline(tmp_path, spark, checked=False)


def test_offsets_partitions_and_order(topics: Topics, pipeline: Pipeline) -> None:
    pipeline.checked = True
    topic = topics.create(partitions=2)
    topics.produce(topic, records([0, 2, 4], partition=0))
    topics.produce(topic, records([1, 3], partition=1))
    node = Stream("s", key="k", schema=SCHEMA, timestamp="at", source=pipeline.source(topics, topic))
    first = pipeline.run(node)
    assert first["taken"] == {topic: {"0": [0, 3], "1": [0, 2]}}
    assert [(r.partition, r.offset, r.n) for r in pipeline.log(node)] == [
        *((0, 0, 0), (0, 1, 2), (0, 2, 4)),
        *((1, 0, 1), (1, 1, 3)),
    ]
    pipeline.runs_idle(node)
    topics.produce(topic, records([5], partition=1))
    second = pipeline.run(node)
    assert second["taken"] == {topic: {"1": [2, 3]}}
    assert second["positions"] == {topic: {"0": 3, "1": 3}}


@pytest.mark.parametrize(
    ("first", "bad"),
    [
        (None, [1, 2]),
        ({"more": None, "k": "a", "n": 1, "at": "2024-05-01T12:00:00Z"}, [1]),
        ("[1]", [0, 1, 2]),
        ('{"\\ud800": 1, "k": "a", "n": 1, "at": "2024-05-01T12:00:00Z"}', [0, 1, 2]),
    ],
)
def test_pattern_has_names_of_first_message(
    first: Any, bad: list[int], topics: Topics, pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run of many messages reads them by the names of one, or of the columns if that is no object.
    Without the general reader, messages with other names are unreadable; with it, none is."""
    at = {"at": "2024-05-01T12:00:00Z"}
    others = [{"n": 2, "k": "b", "odd": 1, **at}, {"more": "x", "k": "c", "n": 3, **at}]
    topic, texts = topics.create(), text_formats._texts  # pyright: ignore[reportPrivateUsage]
    topics.produce(topic, [{"key": "a", "value": first}, *({"value": one} for one in others)])
    source = pipeline.source(topics, topic, max_bad_share=1)

    def offsets(quarantined: bool) -> list[int]:
        rows = source.read(pipeline.spark, {topic: {0: (0, 3)}}, key=["k"], schema=SCHEMA)
        reason = F.col("_reason")
        rows = rows.where(reason.isNotNull() if quarantined else reason.isNull())
        return sorted(row["_position"] for row in rows.collect())

    assert offsets(quarantined=True) == ([0] if isinstance(first, str) else [])
    monkeypatch.setattr(kafka_source, "MANY_MESSAGES", 0)
    assert offsets(quarantined=True) == ([0] if isinstance(first, str) else [])
    monkeypatch.setattr(text_formats, "_texts", lambda *about: F.when(F.lit(False), texts(*about)))
    assert offsets(quarantined=True) == bad


def test_source_moved_to_another_cluster_and_back(
    topics: Topics, pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A topic of the same name on another cluster has another id. Back at the first cluster, the asset
    continues at its earlier position."""
    name, other, states = topics.create(), topics.create(), KafkaCluster.topics
    topics.produce(name, records([0, 1]))
    topics.produce(other, records([2, 3, 4]))
    node = Stream("s", key="k", schema=SCHEMA, timestamp="at", source=pipeline.source(topics, name))
    pipeline.run(node)
    elsewhere = Stream(
        "s", key="k", schema=SCHEMA, timestamp="at", source=pipeline.source(topics, other)
    )
    with monkeypatch.context() as patched:
        patched.setattr(KafkaSource, "topics", (name,))
        patched.setattr(KafkaCluster, "topics", lambda self, _: {name: states(self, [other])[other]})
        patched.setattr(
            KafkaCluster, "topic_ids", lambda self, _: {name: states(self, [other])[other].id}
        )
        patched.setattr(kafka_source, "read_messages", lambda *a, **k: _renamed(other, name, *a, **k))
        assert f"topic {name} was deleted and recreated since batch 1" in pipeline.fails(elsewhere)
        assert pipeline.run(elsewhere, accept_gap=True)["taken"] == {name: {"0": [0, 3]}}
    topics.produce(name, records([5]))
    assert pipeline.run(node)["taken"] == {name: {"0": [2, 3]}}
    assert [r.n for r in pipeline.log(node)] == [0, 1, 2, 3, 4, 5]
    pipeline.runs_idle(node)


def _renamed(
    topic: str, name: str, cluster: Any, spark: SparkSession, ranges: Any, **more: Any
) -> DataFrame:
    """Messages of a topic, under the name of another one."""
    rows = kafka_cluster.read_messages(cluster, spark, {topic: ranges[name]}, **more)
    return rows.withColumn("topic", F.lit(name))


@pytest.mark.parametrize("first", ["files", "topic"])
def test_topic_named_like_another_source_is_refused(
    first: str, topics: Topics, pipeline: Pipeline, tmp_path: Path
) -> None:
    """A commit would store both positions under one name, and records would be lost."""
    with contextlib.suppress(KafkaException):  # the first test of the two has created it
        topics.create("files")
    topics.produce("files", records([0, 1, 2]))
    (tmp_path / "1.jsonl").write_text('{"k": "a", "n": 9, "at": "2020-01-01T00:00:00Z"}\n')
    of_files = FilesSource(str(tmp_path), pattern="*.jsonl", max_clock_skew=timedelta(days=99999))
    sources = {"files": of_files, "topic": pipeline.source(topics, "files")}
    here, (there,) = sources.pop(first), sources.values()
    nodes = [Stream("s", key="k", schema=SCHEMA, timestamp="at", source=one) for one in (here, there)]
    pipeline.run(nodes[0])
    said = "s: expected a topic with another name than 'files'"
    assert said in pipeline.fails(nodes[1])
    pipeline.runs_idle(nodes[0])


def test_columns_from_key_headers_and_timestamp(topics: Topics, pipeline: Pipeline) -> None:
    """Declared columns get the key and headers of a message; the timestamp is the message's."""
    schema = StructType(
        [
            StructField("id", LongType()),
            StructField("n", LongType()),
            StructField("headers", HEADERS),
        ]
    )
    topic = topics.create()
    millis = int(MOMENT.timestamp() * 1000)
    topics.produce(
        topic,
        [
            {"key": "7", "value": {"n": 1}, "timestamp": millis, "headers": [("trace", b"\x01")]},
            {"key": "7", "value": None, "timestamp": millis + 5},
            {"key": "x", "value": {"n": 3}, "timestamp": millis},
        ],
    )
    source = pipeline.source(topics, topic, key=Raw("id"), headers="headers", max_bad_share=1)
    node = Table("t", key="id", schema=schema, source=source)
    assert pipeline.run(node)["records_quarantined"] == 1
    row, deleted = pipeline.log(node)
    assert (row.id, row.n, row.timestamp) == (7, 1, MOMENT.replace(tzinfo=None))
    assert [(h.key, bytes(h.value)) for h in row.headers] == [("trace", b"\x01")]
    assert (deleted.id, deleted.n, deleted.is_tombstone) == (7, None, True)
    assert deleted.timestamp == (MOMENT + timedelta(milliseconds=5)).replace(tzinfo=None)
    assert pipeline.current(node) == []


def test_tombstone_takes_message_timestamp(topics: Topics, pipeline: Pipeline) -> None:
    topic = topics.create()
    millis = int(MOMENT.timestamp() * 1000)
    topics.produce(topic, [record("a", 1, 0), {"key": "a", "value": None, "timestamp": millis}])
    source = pipeline.source(topics, topic, key=Raw("k"))
    node = VersionedTable(
        "t",
        key="k",
        schema=SCHEMA,
        timestamp="at",
        source=source,
        history_retention=timedelta(days=9999),
    )
    pipeline.run(node)
    assert [(r.n, r.valid_from, r.valid_to) for r in pipeline.versions(node)] == [
        (1, datetime(2020, 1, 1), MOMENT.replace(tzinfo=None)),
        (None, MOMENT.replace(tzinfo=None), None),
    ]


def test_json_null_is_a_tombstone(topics: Topics, pipeline: Pipeline) -> None:
    topic = topics.create()
    connect = '{"schema": {"type": "struct", "optional": true}, "payload": null}'
    texts = ["null", " null\n", connect, "nul", "[null]", '"null"']
    produced = [{"key": key, "value": {"n": 1}} for key in "abcdef"]
    topics.produce(
        topic, produced + [{"key": k, "value": t} for k, t in zip("abcdef", texts, strict=True)]
    )
    source = pipeline.source(topics, topic, key=Raw("k"), max_bad_share=1)
    kinds = [StructField("k", StringType()), StructField("n", LongType())]
    node = Table("t", key="k", schema=StructType(kinds), source=source)
    assert pipeline.run(node)["records_quarantined"] == 3
    assert [(r.k, r.n) for r in pipeline.log(node) if r.is_tombstone] == [(k, None) for k in "abc"]
    assert sorted(r.k for r in pipeline.current(node)) == ["d", "e", "f"]


def test_poison_messages_are_quarantined_with_bytes(topics: Topics, pipeline: Pipeline) -> None:
    pipeline.checked = True
    topic = topics.create(partitions=2)
    bad = [
        {"key": "a", "value": b"\xff\xfenot json", "partition": 1},
        {"key": "b", "value": b"", "partition": 1},
        {"key": "c", "value": b"[1, 2]", "partition": 1},
        {"key": "d", "value": {"k": "d", "n": "many", "at": None}, "partition": 1},
        record(None, 1, 0, partition=1),
        {"key": "f", "value": {"k": "f", "n": 1}, "partition": 1},
        {"key": "g", "value": {"k": "g", "n": 1, "at": "2999-01-01T00:00:00Z"}, "partition": 1},
    ]
    topics.produce(topic, [*bad, record("good", 1, 1, partition=1), record("good", 2, 2, partition=0)])
    strict = Table("t", key="k", schema=SCHEMA, timestamp="at", source=pipeline.source(topics, topic))
    said = pipeline.fails(strict)
    assert "7 of 9 records are bad (77.8%), expected at most 10.0%; nothing was committed" in said
    assert f"{topic} row 0: unreadable" in said
    source = pipeline.source(topics, topic, max_bad_share=0.8)
    node = Table("t", key="k", schema=SCHEMA, timestamp="at", source=source)
    done = pipeline.run(node)
    assert (done["records_in"], done["records_applied"], done["records_quarantined"]) == (9, 2, 7)
    found = {r.position: r for r in pipeline.quarantine(node)}
    assert {p: r.reason for p, r in found.items()} == {
        **dict.fromkeys((0, 1, 2, 3), "unreadable"),
        4: "null_key",
        5: "null_timestamp",
        6: "future_timestamp",
    }
    assert {(r.source, r.partition) for r in found.values()} == {(topic, 1)}
    assert bytes(found[0].raw) == b"\xff\xfenot json"
    assert bytes(found[0].raw_key) == b"a"
    assert found[4].raw_key is None
    assert [r.n for r in pipeline.current(node)] == [1] or [r.n for r in pipeline.current(node)] == [2]


def test_topics_are_merged_by_timestamp(topics: Topics, pipeline: Pipeline) -> None:
    """The order is that of a task of Kafka Streams: the smaller head first; of equal ones, that of the
    first topic."""
    one, two = topics.create(), topics.create()
    base = int(MOMENT.timestamp() * 1000)
    for topic, times in ((one, [10, 30, 20, 40]), (two, [15, 25, 40])):
        topics.produce(
            topic, [{"value": {"k": "a", "n": t}, "timestamp": base + t} for t in times], acks="all"
        )
    schema = StructType([f for f in SCHEMA.fields if f.name != "at"])
    node = Stream("s", key="k", schema=schema, source=pipeline.source(topics, [one, two]))
    pipeline.run(node)
    assert [r.n for r in pipeline.log(node)] == [10, 15, 25, 30, 20, 40, 40]


def test_max_records_per_run_is_fair(topics: Topics, pipeline: Pipeline) -> None:
    topic = topics.create(partitions=3)
    for partition, count in ((0, 50), (1, 3), (2, 30)):
        topics.produce(topic, records(range(count), partition=partition))
    source = pipeline.source(topics, topic, max_records_per_run=33)
    node = Stream("s", key="k", schema=SCHEMA, timestamp="at", source=source)
    taken = pipeline.run(node)
    assert taken["taken"] == {topic: {"0": [0, 15], "1": [0, 3], "2": [0, 15]}}
    assert taken["lag_records"] == 50
    assert taken["lag_seconds"] > 0
    assert pipeline.run(node)["records_in"] == 33
    last = pipeline.run(node)
    assert (last["records_in"], last["lag_records"], last["lag_seconds"]) == (17, 0, 0)
    assert len(pipeline.log(node)) == 83


def test_first_run_starts_at_declared_offset(topics: Topics, pipeline: Pipeline) -> None:
    topic = topics.create()
    base = int(MOMENT.timestamp() * 1000)
    topics.produce(topic, [{**record("a", n, n), "timestamp": base + n * 1000} for n in range(5)])

    def node(name: str, **start: Any) -> Stream:
        source = pipeline.source(topics, topic, **start)
        return Stream(name, key="k", schema=SCHEMA, timestamp="at", source=source)

    timed = node("timed", start=MOMENT + timedelta(seconds=3))
    assert pipeline.run(timed)["taken"] == {topic: {"0": [3, 5]}}
    latest = node("latest", start="latest")
    assert pipeline.run(latest)["records_in"] == 0
    topics.produce(topic, records([9]))
    # the first run has committed its start offsets, though it read no records
    assert pipeline.run(latest)["taken"] == {topic: {"0": [5, 6]}}
    assert [r.n for r in pipeline.log(latest)] == [9]


def test_empty_topic(topics: Topics, pipeline: Pipeline) -> None:
    topic = topics.create(partitions=2)
    node = Stream("s", key="k", schema=SCHEMA, timestamp="at", source=pipeline.source(topics, topic))
    assert pipeline.run(node)["records_in"] == 0
    assert "no new records of the Kafka topic" in pipeline.tick(node)
    topics.produce(topic, records([1]))
    assert pipeline.run(node)["records_applied"] == 1


def test_ten_megabyte_record(topics: Topics, pipeline: Pipeline) -> None:
    topic = topics.create()
    schema = StructType([StructField("k", StringType()), StructField("text", StringType())])
    value = {"k": "a", "text": "x" * 10_000_000}
    topics.produce(
        topic, [{"value": value}, {"value": {"k": "b"}}], **{"message.max.bytes": 20_000_000}
    )
    node = Stream("s", key="k", schema=schema, source=pipeline.source(topics, topic))
    pipeline.run(node)
    assert [len(r.text or "") for r in pipeline.log(node)] == [10_000_000, 0]


def test_compacted_topic_with_gaps(topics: Topics, pipeline: Pipeline) -> None:
    """Offsets that compaction removed are no loss: a run reads exactly the remaining records."""
    topic = topics.create(
        cleanup_policy="compact",
        segment_ms="100",
        min_cleanable_dirty_ratio="0.01",
        delete_retention_ms="0",
    )
    topics.produce(topic, records(range(100), keys=4))
    deadline = time.monotonic() + 60
    while len(topics.consume(topic)) > 20:
        assert time.monotonic() < deadline
        time.sleep(0.5)
        topics.produce(topic, records([200], keys=1))  # closes the segment

    def there() -> list[int]:
        return [json.loads(m.value() or "")["n"] for m in topics.consume(topic)]

    seen = there()
    node = Stream("s", key="k", schema=SCHEMA, timestamp="at", source=pipeline.source(topics, topic))
    done = pipeline.run(node)
    left = there()  # the broker may compact again at any time
    got = [r.n for r in pipeline.log(node)]
    assert done["records_applied"] == len(got)
    assert len(left) <= len(got) <= len(seen) <= 20
    for some, more in ((got, seen), (left, got)):
        following = iter(more)
        assert all(n in following for n in some), "in the same order, and nothing else"
    assert [r.offset for r in pipeline.log(node)] == list(range(len(got)))


def test_aborted_and_open_transactions_are_not_read(
    topics: Topics, pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Aborted records are not read, open ones not yet. Control records take offsets."""
    topic = topics.create()
    topics.produce(topic, records([1, 2]), **{"transactional.id": "one"})
    aborted = Producer({"bootstrap.servers": topics.cluster.servers, "transactional.id": "two"})
    aborted.init_transactions(30)
    aborted.begin_transaction()
    topics.send(aborted, topic, records([66, 67]))
    aborted.flush(10)
    aborted.abort_transaction(30)
    node = Stream("s", key="k", schema=SCHEMA, timestamp="at", source=pipeline.source(topics, topic))
    assert pipeline.run(node)["records_in"] == 2
    assert pipeline.head(node).inputs == {topic: {0: 6}}
    aborted.begin_transaction()
    topics.send(aborted, topic, records([3]))
    aborted.flush(10)
    pipeline.runs_idle(node)
    assert "2 records consumed; 1 offset is in open transactions, or" in pipeline.tick(node)
    aborted.commit_transaction(30)
    monkeypatch.setattr(gate, "CHUNK", -1)  # a large run, which derives places from offsets
    assert pipeline.run(node)["records_in"] == 1
    assert [(r.n, r.offset) for r in pipeline.log(node)] == [(1, 0), (2, 1), (3, 2)]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"key": Raw("id")}, "the message's key is read as Raw"),
        ({"headers": "n"}, "expected headers to name a column of type array<struct<key:string,value"),
        ({"headers": "nowhere"}, "got 'nowhere', no such column"),
    ],
)
def test_refused_when_definitions_load(change: dict[str, Any], said: str) -> None:
    cluster = Topics.nowhere()
    with pytest.raises(TopologyError, match=said.replace("(", r"\(")):
        Stream("s", key="k", schema=SCHEMA, timestamp="at", source=KafkaSource(cluster, "t", **change))


@pytest.mark.parametrize(
    "start",
    [{"t": 5}, {"t": [5]}, {"t": {"0": 5}}, {"t": {0: -5}}, {"t": {0: 1.5}}, {"t": {-1: 5}}, {"u": {}}],
)
def test_start_must_be_offsets(start: Any) -> None:
    with pytest.raises(SourceError, match=r"offsets like \{'t': \{0: 100\}\}, from 0 on, got"):
        KafkaSource(Topics.nowhere(), "t", start=start)


@pytest.mark.parametrize("name", ["", "a b", "prices.*x", "a,b", "..", "x" * 250])
def test_impossible_topic_is_refused(name: str) -> None:
    said = "a name of a topic has up to 249 letters"
    with pytest.raises(SourceError, match=said):
        KafkaSource(Topics.nowhere(), ["t", name])
    with pytest.raises(TopologyError, match=said):
        KafkaSink(Topics.nowhere(), name)


def test_missing_topic_and_unreachable_broker(
    topics: Topics, pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    missing = pipeline.source(topics, "nothing-here")
    node = Stream("s", key="k", schema=SCHEMA, timestamp="at", source=missing)
    assert "expected a topic 'nothing-here'" in pipeline.fails(node)
    assert "expected a topic 'nothing-here'" in pipeline.tick(node)
    away = Stream(
        "s", key="k", schema=SCHEMA, timestamp="at", source=KafkaSource(Topics.nowhere(), "t")
    )
    with monkeypatch.context() as patched:
        patched.setattr(kafka_cluster, "_SECONDS", 2.0)  # no answer comes, however long it waits
        assert "did not answer" in pipeline.tick(away)
    with pytest.raises(SourceError, match="environment variable NO_SUCH_SERVERS"):
        KafkaSource(type(topics.cluster)(dg.EnvVar("NO_SUCH_SERVERS")), "t").pin(None)
