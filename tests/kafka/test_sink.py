"""Publication of logs: keys, tombstones, timestamps, order; each record once, also after a kill."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import dagster as dg
import pyarrow as pa
import pytest
from confluent_kafka import Message, Producer
from pyspark.sql import SparkSession
from pyspark.sql.types import StringType, StructField, StructType

from tests.conftest import ConnectServer
from tests.kafka.conftest import Broker
from tests.kafka.pipeline import Pipeline
from tests.kafka.topics import SCHEMA, Topics, record, records
from tests.market import materialized, messages, observed, run
from vt_dagster import Stream, Table, build_asset
from vt_dagster.errors import RecordsGoneError, SourceError, StorageError, TopologyError
from vt_dagster.kafka import Json, KafkaSink, Raw, build_publication
from vt_dagster.runs.replay import replay, swap
from vt_dagster.runs.restate import restate
from vt_dagster.runs.run import run_once
from vt_dagster.sources.kafka_cluster import TopicState
from vt_dagster.sources.kafka_sink import Publication, producing
from vt_dagster.storage import parquet
from vt_dagster.storage.asset_store import stores_of

pytestmark = pytest.mark.usefixtures("few_rows")

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture
def pipeline(tmp_path: Path, spark: SparkSession) -> Pipeline:
    """A pipeline without checks: the tests of sources check the commits of sources."""
    return Pipeline(tmp_path, spark, checked=False)


def publish(pipeline: Pipeline, node: Stream, sink: KafkaSink, **config: Any) -> dict[str, Any]:
    return materialized(run_publication(pipeline, node, sink, **config), f"{node.name}_to_kafka")


def run_publication(
    pipeline: Pipeline, node: Stream, sink: KafkaSink, **config: Any
) -> dg.ExecuteInProcessResult:
    made = [build_asset(node), build_publication(node, sink)]
    name = f"{node.name}_to_kafka"
    where = pipeline.root / "warehouse"
    about = {"run_config": {"ops": {name: {"config": config}}}} if config else {}
    result = run(made, where, selection=[name], instance=pipeline.instance, **about)
    assert result.success, messages(result)
    return result


def log_position(message: Message) -> str:
    """The place of a record in its log, without the log's id."""
    ((name, value),) = message.headers() or []
    assert name == "vt_dagster"
    return bytes(value or b"").decode().rpartition("/")[0]


def numbers(topics: Topics, topic: str) -> list[int | None]:
    """The ``n`` of each record of a topic with one partition; None for a tombstone."""
    return [json.loads(m.value() or b"{}").get("n") for m in topics.consume(topic)]


def test_records_are_published_unchanged(topics: Topics, pipeline: Pipeline) -> None:
    origin, target = topics.create(partitions=2), topics.create(partitions=3)
    topics.produce(origin, [record("a", 1, 5, partition=0), record("b", 2, 3, partition=1)])
    topics.produce(
        origin, [{"key": "a", "value": None, "partition": 0, "timestamp": 1_700_000_000_123}]
    )
    source = pipeline.source(topics, origin, key=Raw("k"))
    node = Table("t", key="k", schema=SCHEMA, timestamp="at", source=source)
    pipeline.run(node)
    sink = KafkaSink(topics.cluster, target)
    assert publish(pipeline, node, sink)["records_published"] == 3
    found = {log_position(m): m for m in topics.consume(target, 3)}
    assert sorted(found) == ["t/0/0", "t/0/1", "t/1/0"]
    first, deleted = found["t/0/0"], found["t/0/1"]
    assert json.loads(first.value() or b"") == {"k": "a", "n": 1, "at": "2020-01-01T00:00:05.000000Z"}
    assert json.loads(first.key() or b"") == {"k": "a"}
    assert first.timestamp()[1] == 1_577_836_805_000
    assert deleted.value() is None
    assert deleted.timestamp()[1] == 1_700_000_000_123
    assert (deleted.partition(), deleted.key()) == (first.partition(), first.key())
    observed(run_publication(pipeline, node, sink), f"{node.name}_to_kafka")
    # under another key, which Dagster's loaders may give it, its first run is a materialization
    keys = {dg.AssetKey("t_to_kafka"): dg.AssetKey(["theirs", "t_to_kafka"])}
    moved = build_publication(node, sink).with_attributes(asset_key_replacements=keys)
    for made in (1, 0):
        result = run(
            [build_asset(node), moved],
            pipeline.root / "warehouse",
            selection=[*keys.values()],
            instance=pipeline.instance,
        )
        assert len(result.get_asset_materialization_events()) == made
    # the published topic can be consumed as a source
    back = pipeline.source(topics, target, key=Json())
    again = Table("u", key="k", schema=SCHEMA, timestamp="at", source=back)
    assert pipeline.run(again)["records_quarantined"] == 0
    assert [(r.k, r.n) for r in pipeline.current(again)] == [("b", 2)]


def test_overtaken_publication_sends_remaining_records(
    topics: Topics, pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    origin, target = topics.create(), topics.create()
    topics.produce(origin, [record("a", 1, 5)])
    node = Stream("s", key="k", schema=SCHEMA, timestamp="at", source=pipeline.source(topics, origin))
    pipeline.run(node)
    sink, send = KafkaSink(topics.cluster, target), Publication._send  # pyright: ignore[reportPrivateUsage]

    def overtaken(publication: Publication, messages: Any) -> Any:
        monkeypatch.setattr(Publication, "_send", send)
        counted = send(publication, messages)
        assert publication.run() is not None
        topics.produce(origin, [record("a", 2, 6)])
        pipeline.run(node)
        return counted

    monkeypatch.setattr(Publication, "_send", overtaken)
    assert publish(pipeline, node, sink)["records_published"] == 1
    assert numbers(topics, target) == [1, 2]


def test_killed_publication_repeats_no_record(
    topics: Topics, broker: Broker, pipeline: Pipeline, connect_server: ConnectServer
) -> None:
    """A publication is killed before or after the commit of its progress. The next run sends
    no record again."""
    origin = topics.create(partitions=2)
    for partition in (0, 1):
        topics.produce(origin, records(range(50), keys=50, partition=partition))
    node = Stream("s", key="k", schema=SCHEMA, timestamp="at", source=pipeline.source(topics, origin))
    pipeline.run(node)
    killed: list[tuple[Pipeline, str]] = []
    cases: list[str] = []
    for point in ("before:log", "after:log"):
        root, target = pipeline.root / point.replace(":", "_"), topics.create(partitions=2)
        one = Pipeline(root, pipeline.spark, checked=False)
        shutil.copytree(pipeline.root / "warehouse", root / "warehouse")
        killed.append((one, target))
        cases += [
            str(one.root),
            broker.bootstrap_servers,
            origin,
            target,
            point,
            connect_server.address,
        ]
    child = subprocess.run(
        [sys.executable, "-m", "tests.kafka.sink_child", *cases],
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert child.returncode == 0, child.stdout + child.stderr
    for one, target in killed:
        assert len(topics.consume(target, 2)) == 100
        publish(one, node, KafkaSink(topics.cluster, target))
        places = [log_position(m) for m in topics.consume(target, 2)]
        assert sorted(places) == sorted(f"s/{p}/{o}" for p in (0, 1) for o in range(50))
    topics.produce(origin, records([7], partition=1))
    one, target = killed[-1]
    one.run(node)
    assert publish(one, node, KafkaSink(topics.cluster, target))["records_published"] == 1
    # in each topic partition, records of one log partition keep their order
    found = topics.consume(target, 2)
    for partition in (0, 1):
        mine = [log_position(m).split("/") for m in found if m.partition() == partition]
        for home in ("0", "1"):
            offsets = [int(offset) for _, p, offset in mine if p == home]
            assert offsets == sorted(offsets)


def test_max_records_per_run_bounds_publication(topics: Topics, pipeline: Pipeline) -> None:
    """``max_records_per_run`` also holds if the topic has the name of the asset."""
    origin, target = topics.create(), topics.create()
    topics.produce(origin, records(range(15)))
    node = Stream(
        target, key="k", schema=SCHEMA, timestamp="at", source=pipeline.source(topics, origin)
    )
    pipeline.run(node)
    sink = KafkaSink(topics.cluster, target, max_records_per_run=10)
    assert [publish(pipeline, node, sink)["records_published"] for _ in range(2)] == [10, 5]
    assert [json.loads(m.value() or b"")["n"] for m in topics.consume(target)] == list(range(15))


def test_publication_refuses_another_log(
    topics: Topics, pipeline: Pipeline, tmp_path: Path, spark: SparkSession
) -> None:
    """The offsets of another warehouse, a restatement or a replay are those of other records."""
    target, sources = topics.create(), [topics.create(), topics.create()]
    topics.produce(sources[0], records([1, 2, 3]))
    topics.produce(sources[1], records([11, 12, 13]))
    sink = KafkaSink(topics.cluster, target)
    nodes = [
        Table("s", key="k", schema=SCHEMA, timestamp="at", source=pipeline.source(topics, one))
        for one in sources
    ]
    node = nodes[0]

    def publication(warehouse: Path, name: str = "out") -> Publication:
        return Publication(str(warehouse), name, node, sink, spark)

    here, there = tmp_path / "warehouse", tmp_path / "other"
    run_once(node, stores_of(str(here), spark))
    run_once(nodes[1], stores_of(str(there), spark))
    # two warehouses have an asset of the same name, and publish to one topic
    for warehouse in (here, there):
        commit = publication(warehouse).run()
        assert commit is not None
        assert commit.counts["published"] == 3
    assert numbers(topics, target) == [1, 2, 3, 11, 12, 13]
    # after a restatement, without and with new records
    assert publication(here).run() is None
    restate(str(here), node, "2020-01-01T00:00:00Z", spark)
    said = r"the log of s that batch \d has published, got another one .*restated.* from_start: true"
    with pytest.raises(StorageError, match=said):
        publication(here).run()
    topics.produce(sources[0], records([4]))
    run_once(node, stores_of(str(here), spark))
    with pytest.raises(StorageError, match=said):
        publication(here).run()
    assert len(topics.consume(target)) == 6
    again = publication(here).run(from_start=True)
    assert again is not None
    assert (again.batch, again.counts["published"]) == (2, 4)
    assert numbers(topics, target)[6:] == [1, 2, 3, 4]
    assert publication(here).run() is None
    # after a replay and a swap, a new publication: the topic has no record of the new log yet
    replay(str(here), node, "s2", spark)
    swap(str(here), "s", "s2")
    with pytest.raises(StorageError, match=said):
        publication(here).run()
    shutil.rmtree(here / "out")
    anew = publication(here).run()
    assert anew is not None
    assert (anew.batch, anew.counts["published"]) == (1, 4)
    # a new publication of the same log: the topic has all its records
    shutil.rmtree(here / "out")
    same = publication(here).run()
    assert same is not None
    assert same.counts == {"in": 4, "published": 0}
    # without the log
    shutil.rmtree(here / "s")
    with pytest.raises(StorageError, match=r"expected the log of s, which batch 1 .* it is gone; put"):
        publication(here).run()


def test_publication_refuses_restored_log(
    topics: Topics, pipeline: Pipeline, tmp_path: Path, spark: SparkSession
) -> None:
    """The restored log has the id of the published log, but other records at published offsets."""
    target, source = topics.create(), topics.create()
    topics.produce(source, records([1, 2]))
    sink = KafkaSink(topics.cluster, target)
    node = Table("s", key="k", schema=SCHEMA, timestamp="at", source=pipeline.source(topics, source))
    warehouse, backup = tmp_path / "warehouse", tmp_path / "backup"
    stores = stores_of(str(warehouse), spark)
    publication = Publication(str(warehouse), "out", node, sink, spark)
    run_once(node, stores)
    assert publication.run() is not None
    shutil.copytree(warehouse / "s", backup)
    topics.produce(source, records([3]))
    run_once(node, stores)
    assert publication.run() is not None
    shutil.rmtree(warehouse / "s")
    shutil.copytree(backup, warehouse / "s")
    said = "out: .*restored from a backup"
    with pytest.raises(StorageError, match=said):
        publication.run()
    topics.produce(source, records([4]))
    run_once(node, stores)  # consumes 3 again, and 4
    with pytest.raises(StorageError, match=said):
        publication.run()
    assert numbers(topics, target) == [1, 2, 3]
    again = publication.run(from_start=True)
    assert again is not None
    assert numbers(topics, target) == [1, 2, 3, 1, 2, 3, 4]
    assert publication.run() is None


def test_publication_refuses_another_topic(
    topics: Topics, pipeline: Pipeline, spark: SparkSession
) -> None:
    origin, target, other = topics.create(), topics.create(), topics.create()
    topics.produce(origin, records([1, 2]))
    node = Stream("s", key="k", schema=SCHEMA, timestamp="at", source=pipeline.source(topics, origin))
    pipeline.run(node)
    sink = KafkaSink(topics.cluster, target)
    publish(pipeline, node, sink)
    way = Publication(str(pipeline.root / "warehouse"), "s_to_kafka", node, sink, spark)
    topics.delete(target)
    topics.create(target)
    time.sleep(1)  # until all of the broker knows it
    with pytest.raises(RecordsGoneError, match=f"topic {target} was deleted and recreated since"):
        way.run()  # also without new records
    topics.produce(origin, records([3]))
    pipeline.run(node)
    with pytest.raises(RecordsGoneError, match="from_start: true in its config"):
        way.run()
    assert publish(pipeline, node, sink, from_start=True)["records_published"] == 3
    assert numbers(topics, target) == [1, 2, 3]
    # commits keep the position in each topic that got records: an erase names these topics
    elsewhere = Publication(
        str(pipeline.root / "warehouse"), "s_to_kafka", node, KafkaSink(topics.cluster, other), spark
    )
    with pytest.raises(RecordsGoneError, match=f"topic is {other}, but batch 2 was sent to {target}"):
        elsewhere.run()
    moved = elsewhere.run(from_start=True)
    assert moved is not None
    assert {*moved.inputs} == {"s", f"topic {target}", f"topic {other}"}
    # a topic that ends before the sent records
    short = TopicState(moved.topics[other], {0: 0}, {0: 1}, {0: 1})
    with pytest.raises(RecordsGoneError, match=r"partition 0, ended at offset 3 .* ends at 1 now"):
        elsewhere._require_topic(moved, short)  # pyright: ignore[reportPrivateUsage]


def test_timestamps_outside_kafkas_range(
    topics: Topics, pipeline: Pipeline, spark: SparkSession
) -> None:
    origin, target = topics.create(), topics.create()
    times = ["1969-12-31T23:59:59.999Z", "1970-01-01T00:00:00.000400Z", "1900-01-01T00:00:00Z"]
    early = [{"key": "a", "value": {"k": "a", "n": n, "at": at}} for n, at in enumerate(times)]
    topics.produce(origin, early)
    node = Stream("s", key="k", schema=SCHEMA, timestamp="at", source=pipeline.source(topics, origin))
    pipeline.run(node)
    where = str(pipeline.root / "warehouse"), "out", node
    with pytest.raises(StorageError, match="partition 0, offset 1: Kafka's client would send"):
        Publication(*where, KafkaSink(topics.cluster, target), spark).run()
    assert topics.consume(target) == []
    sink = KafkaSink(topics.cluster, target, at_epoch="one_millisecond_later")
    Publication(*where, sink, spark).run()
    assert [m.timestamp()[1] for m in topics.consume(target)] == [-1, 1, -2_208_988_800_000]
    assert numbers(topics, target) == [0, 1, 2]
    for wrong in ({"at_epoch": "now"}, {"max_records_per_run": 0}):
        with pytest.raises(TopologyError, match="must be"):
            KafkaSink(topics.cluster, target, **wrong)  # pyright: ignore[reportArgumentType]


def test_record_refused_by_topic_fails_publication(
    topics: Topics, pipeline: Pipeline, spark: SparkSession
) -> None:
    """A record that is too large, or whose timestamp is too far ahead, is an error, and no later record
    overtakes it."""
    origin, target = topics.create(), topics.create(max_message_bytes="1000000")
    schema = StructType([*SCHEMA.fields, StructField("text", StringType())])
    sent = [record("a", n, n) for n in range(4)]
    sent[2]["value"]["text"] = "x" * 1_500_000
    topics.produce(origin, sent, **{"message.max.bytes": 4_000_000})
    node = Stream("s", key="k", schema=schema, timestamp="at", source=pipeline.source(topics, origin))
    pipeline.run(node)
    way = Publication(
        str(pipeline.root / "warehouse"), "out", node, KafkaSink(topics.cluster, target), spark
    )
    with pytest.raises(SourceError, match=r"Message size too large.*raise max.message.bytes of the"):
        way.run()
    assert way.head() is None
    assert 3 not in numbers(topics, target)
    topics.configure(target, max_message_bytes="4000000", message_timestamp_after_max_ms="1000")
    way.run()
    assert numbers(topics, target) == [0, 1, 2, 3]
    topics.produce(origin, [{"key": "a", "value": {"k": "a", "n": 5, "at": "2999-01-01T00:00:00Z"}}])
    source = pipeline.source(topics, origin, max_clock_skew=timedelta(days=10**6))
    pipeline.run(replace(node, source=source))
    with pytest.raises(SourceError, match=r"Invalid timestamp.*raise message.timestamp.after.max"):
        way.run()


def test_progress_is_recovered_from_last_record_per_key(
    topics: Topics, pipeline: Pipeline, spark: SparkSession
) -> None:
    """Compaction or retention may have removed the earlier records of the key. If they were sent again
    after the last one, a reader would take them as the latest."""
    origin, target = topics.create(), topics.create()
    topics.produce(origin, [record(k, n, n) for n, k in enumerate("abaab")])
    node = Table("s", key="k", schema=SCHEMA, timestamp="at", source=pipeline.source(topics, origin))
    pipeline.run(node)
    log = pipeline.head(node).log
    # the last record that a killed run sent, the others are compacted; and records of other programs
    left = {"key": '{"k":"a"}', "value": {"k": "a", "n": 2}}
    topics.produce(
        target,
        [
            {"key": "x", "value": {"n": 7}},
            {"key": "x", "value": {"n": 7}, "headers": [("other", b"x")]},
            {"key": "x", "value": {"n": 7}, "headers": [("vt_dagster", b"nonsense")]},
            {"key": "x", "value": {"n": 7}, "headers": [("vt_dagster", f"s/a/b/{log}".encode())]},
            {**left, "headers": [("vt_dagster", f"s/0/2/{log}".encode())]},
        ],
    )
    way = Publication(
        str(pipeline.root / "warehouse"), "out", node, KafkaSink(topics.cluster, target), spark
    )
    commit = way.run()
    assert commit is not None
    assert commit.counts == {"in": 5, "published": 3}
    assert numbers(topics, target) == [7, 7, 7, 7, 2, 1, 3, 4]
    # records that have expired from the topic since the last run are not needed
    topics.produce(target, [{"value": {"n": 7}}] * 4)
    topics.expire(target, {0: 10})
    topics.produce(origin, [record("a", 9, 9)])
    pipeline.run(node)
    commit = way.run()
    assert commit is not None
    assert commit.counts["published"] == 1


def test_topic_change_during_publication(
    topics: Topics, pipeline: Pipeline, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The topic is recreated after it got the records, or its records expire before the publication
    reads them."""
    origin, target = topics.create(), topics.create()
    topics.produce(origin, records(range(5)))
    topics.produce(target, records([7, 7]))
    node = Stream("s", key="k", schema=SCHEMA, timestamp="at", source=pipeline.source(topics, origin))
    pipeline.run(node)
    sink = KafkaSink(topics.cluster, target)
    way = Publication(str(pipeline.root / "warehouse"), "out", node, sink, spark)

    def beside(name: str, before: Callable[[], None], after: Callable[[], None]) -> None:
        """Calls a function before a step of the publication, and another one after it."""
        step = getattr(Publication, name)

        def with_more(self: Publication, *args: Any) -> Any:
            before()
            found = step(self, *args)
            after()
            return found

        monkeypatch.setattr(Publication, name, with_more)

    def nothing() -> None:
        pass

    def recreate() -> None:
        topics.delete(target)
        topics.create(target)
        time.sleep(1)  # until all of the broker knows it

    beside("_arrived", lambda: topics.expire(target, {0: 2}), nothing)
    with pytest.raises(SourceError, match=f"which records the topic {target} .* nothing was committed"):
        way.run()
    monkeypatch.undo()
    beside("_send", nothing, recreate)
    with pytest.raises(
        RecordsGoneError, match=f"{target} was deleted and recreated while records were"
    ):
        way.run()
    monkeypatch.undo()
    assert way.head() is None
    assert way.run() is not None
    assert numbers(topics, target) == [0, 1, 2, 3, 4]


def test_open_transaction_hides_records_of_killed_publication(
    topics: Topics, pipeline: Pipeline, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    origin, target = topics.create(), topics.create()
    topics.produce(origin, records(range(5)))
    node = Stream("s", key="k", schema=SCHEMA, timestamp="at", source=pipeline.source(topics, origin))
    pipeline.run(node)
    other = Producer({"bootstrap.servers": topics.cluster.servers, "transactional.id": target})
    other.init_transactions(30)
    other.begin_transaction()
    topics.send(other, target, records([66]))
    other.flush(10)
    sink = KafkaSink(topics.cluster, target)
    way = Publication(str(pipeline.root / "warehouse"), "out", node, sink, spark)

    def die(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as killed:
        killed.setattr(parquet, "write", die)
        with pytest.raises(KeyboardInterrupt):
            way.run()
    commit = way.run()
    assert commit is not None
    assert commit.counts == {"in": 5, "published": 0}
    other.abort_transaction(30)
    assert way.run() is None
    assert numbers(topics, target) == [0, 1, 2, 3, 4]


def test_rejected_records_are_counted(topics: Topics) -> None:
    """All records of the call that are missing in the topic count, not only those with an error: the
    client stops at the first error."""
    topic = topics.create(max_message_bytes="100000")
    values = ["x", "x", "x" * 150_000, "x"]
    rows = [
        {"partition": 0, "key": "a", "value": value, "millis": n + 1, "place": f"s/0/{n}/log"}
        for n, value in enumerate(values)
    ]
    send = producing(topics.cluster, topic, "vt_dagster")
    ((failed,),) = (one.to_pylist() for one in send(iter([pa.RecordBatch.from_pylist(rows)])))
    assert "Message size too large" in failed["error"]
    assert 4 - len(topics.consume(topic)) <= failed["records"] <= 4
