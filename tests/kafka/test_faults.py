"""What goes wrong with topics, brokers and processes, and what the user sees of it. At the end every
record is in the log once, or in quarantine."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from pyspark.sql import SparkSession

from tests.conftest import ConnectServer
from tests.kafka.pipeline import Pipeline
from tests.kafka.topics import SCHEMA, Topics, record, records
from vt_dagster import Stream, VersionedTable
from vt_dagster.errors import ConcurrentRunError, RecordsGoneError, SourceError
from vt_dagster.kafka import KafkaSource
from vt_dagster.runs.run import Receipt, Run
from vt_dagster.sources import kafka_cluster
from vt_dagster.storage.commit_log import Commit, Shape
from vt_dagster.testing_kafka import KafkaBroker

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture
def pipeline(tmp_path: Path, spark: SparkSession) -> Pipeline:
    return Pipeline(tmp_path, spark)


@pytest.fixture
def own_broker(tmp_path: Path) -> Iterator[KafkaBroker]:
    """A broker that the test may stop."""
    with KafkaBroker(tmp_path / "broker") as running:
        yield running


def stream(pipeline: Pipeline, topics: Topics, topic: str | Sequence[str], **options: Any) -> Stream:
    source = pipeline.source(topics, topic, **options)
    return Stream("s", key="k", schema=SCHEMA, timestamp="at", source=source)


def pin(pipeline: Pipeline, node: Stream) -> Run:
    return Run.pin(node, pipeline.store)


def finish(run: Run) -> Receipt:
    return run.commit(run.operate(run.read()))


def test_retention_has_passed(topics: Topics, pipeline: Pipeline) -> None:
    topic = topics.create(partitions=2)
    topics.produce(topic, records(range(10), partition=0))
    topics.produce(topic, records(range(10, 13), partition=1))
    node = stream(pipeline, topics, topic, max_records_per_run=6)
    pipeline.run(node)
    assert pipeline.head(node).inputs == {topic: {0: 3, 1: 3}}
    topics.expire(topic, {0: 8})
    said = pipeline.fails(node)
    assert (
        f"topic {topic}, partition 0: 5 offsets are gone: 3 is the next offset to consume, 8 the"
        in said
    )
    assert "accept_gap: true" in said
    assert pipeline.head(node).batch == 1
    with pytest.raises(RecordsGoneError, match="5 offsets are gone"):  # a red tick, not a skipped one
        pipeline.tick(node)
    done = pipeline.run(node, accept_gap=True)
    assert (done["records_lost"], done["records_in"]) == (5, 2)
    assert done["accepted_gaps"] == {topic: {"0": [3, 8]}}
    assert pipeline.head(node).gaps == {topic: {0: (3, 8)}}
    assert sorted(r.n for r in pipeline.log(node)) == [0, 1, 2, 8, 9, 10, 11, 12]
    pipeline.runs_idle(node)


def test_topic_deleted_and_created_anew(topics: Topics, pipeline: Pipeline) -> None:
    """The new topic has as many records as the old one: the offsets alone look valid."""
    topic = topics.create(partitions=2)
    topics.produce(topic, records(range(4), partition=1))
    node = stream(pipeline, topics, topic)
    pipeline.run(node)
    topics.delete(topic)
    topics.create(topic)
    topics.produce(topic, records(range(100, 105), partition=0))
    said = pipeline.fails(node)
    assert f"topic {topic} was deleted and recreated since batch 1 (its id was" in said
    with pytest.raises(RecordsGoneError, match="recreated since batch 1"):
        pipeline.tick(node)
    done = pipeline.run(node, accept_gap=True)
    assert done["records_in"] == 5
    assert pipeline.head(node).inputs == {topic: {0: 5}}
    pipeline.runs_idle(node)
    assert sorted(r.n for r in pipeline.log(node)) == [0, 1, 2, 3, *range(100, 105)]


def test_topic_created_anew_while_a_run_reads(topics: Topics, pipeline: Pipeline) -> None:
    """The new topic has records at the same offsets: read as those of the old one, they would be taken
    twice, for the next run begins at the new topic's start."""
    topic = topics.create()
    topics.produce(topic, records(range(10)))
    node = stream(pipeline, topics, topic)
    run = pin(pipeline, node)
    topics.delete(topic)
    topics.create(topic)
    topics.produce(topic, records(range(100, 120)))
    with pytest.raises(RecordsGoneError, match=f"{topic} was deleted and recreated while the run read"):
        finish(run)
    assert pipeline.store(node).head() is None
    pipeline.run(node)
    assert [r.n for r in pipeline.log(node)] == [*range(100, 120)]


def test_where_a_source_begins(topics: Topics, pipeline: Pipeline) -> None:
    """By offsets of which records are gone, or that are not there yet; in a new or recreated topic."""
    topic = topics.create(partitions=2)
    for partition in (0, 1):
        topics.produce(topic, records(range(10), partition=partition))
    topics.expire(topic, {0: 5})

    def source(start: Any) -> KafkaSource:
        return pipeline.source(topics, topic, start=start)

    def commit(topic_id: str | None) -> Commit:
        topics = {"other": "id"} if topic_id is None else {topic: topic_id}
        inputs = {name: {0: 7, 1: 7} for name in topics}
        shape = Shape(kind="stream", key=["k"])
        return Commit(asset="s", batch=1, attempt="", shape=shape, topics=topics, inputs=inputs)

    for before in (None, commit(None)):  # a first run, and a topic added to the source
        for start, first in (({topic: {0: 2}}, 2), ({topic: {1: 0}}, 0)):
            said = (
                f"partition 0: {5 - first} offsets are gone: {first} is the next offset to consume, 5"
            )
            with pytest.raises(RecordsGoneError, match=said):
                source(start).pin(before)
            pinned = source(start).pin(before, accept_gap=True)
            assert pinned.ranges == {topic: {0: (5, 10), 1: (0, 10)}}
            assert pinned.gaps == {topic: {0: (first, 5)}}
        with pytest.raises(SourceError, match=r"partition 1: expected start .* up to .* 10, got 11;"):
            source({topic: {0: 5, 1: 11}}).pin(before)
    # of a recreated topic all records are new, wherever the source began in the old one
    for start in ("earliest", "latest", {topic: {0: 8, 1: 40}}):
        with pytest.raises(RecordsGoneError, match="was deleted and recreated since batch 1"):
            source(start).pin(commit("old"))
        pinned = source(start).pin(commit("old"), accept_gap=True)
        assert pinned.ranges == {topic: {0: (5, 10), 1: (0, 10)}}
    assert source("latest").pin(commit(topics.cluster.topic_ids([topic])[topic])).ranges == {
        topic: {0: (7, 10), 1: (7, 10)}
    }


def test_topic_taken_out_of_a_source_and_put_back(topics: Topics, pipeline: Pipeline) -> None:
    one, two = topics.create(), topics.create()
    topics.produce(one, records([1]))
    topics.produce(two, records([11]))
    both = stream(pipeline, topics, [one, two])
    pipeline.run(both)
    topics.produce(one, records([2]))
    topics.produce(two, records([12]))
    pipeline.run(stream(pipeline, topics, one))
    assert pipeline.run(both)["taken"] == {two: {"0": [1, 2]}}
    assert sorted(r.n for r in pipeline.log(both)) == [1, 2, 11, 12]


def test_partitions_are_added(topics: Topics, pipeline: Pipeline) -> None:
    topic = topics.create()
    topics.produce(topic, records(range(3)))
    node = stream(pipeline, topics, topic, start="latest")
    pipeline.run(node)
    topics.add_partitions(topic, 3)
    time.sleep(1)
    topics.produce(topic, records(range(5), partition=2))
    # the new partition is read from its beginning, though the first run began at the end
    assert pipeline.run(node)["taken"] == {topic: {"2": [0, 5]}}
    assert pipeline.head(node).inputs == {topic: {0: 3, 1: 0, 2: 5}}


def test_two_runs_at_once(topics: Topics, pipeline: Pipeline) -> None:
    topic = topics.create()
    topics.produce(topic, records(range(5)))
    node = stream(pipeline, topics, topic)
    one, other = pin(pipeline, node), pin(pipeline, node)
    assert finish(one).commit is not None
    with pytest.raises(ConcurrentRunError, match="another run committed"):
        finish(other)
    assert [r.n for r in pipeline.log(node)] == [0, 1, 2, 3, 4]


def test_records_vanish_while_a_run_reads(topics: Topics, pipeline: Pipeline) -> None:
    topic = topics.create()
    topics.produce(topic, records(range(10)))
    node = stream(pipeline, topics, topic)
    run = pin(pipeline, node)
    topics.expire(topic, {0: 4})
    with pytest.raises(SourceError, match="nothing was committed"):
        finish(run)
    assert pipeline.store(node).head() is None


def test_broker_stops_and_starts_while_a_run_reads(
    own_broker: KafkaBroker, pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    topics = Topics(own_broker.bootstrap_servers)
    topic = topics.create(partitions=2)
    for partition in (0, 1):
        topics.produce(topic, records(range(500), partition=partition))
    node = stream(pipeline, topics, topic)
    run = pin(pipeline, node)
    own_broker.kill()
    with monkeypatch.context() as patched:
        patched.setattr(kafka_cluster, "_SECONDS", 2.0)  # nobody answers, however long it waits
        assert "did not answer" in pipeline.tick(node)
        assert "did not answer" in pipeline.fails(node)
    restart = threading.Timer(3, own_broker.start)
    restart.start()
    finish(run)
    restart.join()
    assert Counter(r.n for r in pipeline.log(node)) == Counter([*range(500), *range(500)])
    # that run was none of Dagster's: the next finds nothing new, and tells of its commit
    assert pipeline.run(node)["versions"]["batch"] == 1
    pipeline.runs_idle(node)


def test_a_cluster_id_may_begin_with_a_dash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of 64 does: such a broker did not start."""
    monkeypatch.setattr(uuid, "uuid4", lambda: uuid.UUID(bytes=b"\xf8" * 16))
    with KafkaBroker(tmp_path / "broker") as running:
        assert Topics(running.bootstrap_servers).create()


@pytest.mark.parametrize(
    "point",
    [
        "before:log",
        "after:log",
        *(pytest.param(point, marks=pytest.mark.endurance) for point in ("before:read", "during:view")),
    ],
)
def test_run_killed(
    point: str, topics: Topics, broker: KafkaBroker, pipeline: Pipeline, connect_server: ConnectServer
) -> None:
    """Every record once, in log, view and quarantine, wherever the process was killed."""
    topic = topics.create(partitions=2)
    good = [record(f"k{n % 7}", n, (n * 37) % 3600, partition=n % 2) for n in range(200)]
    topics.produce(topic, [*good, {"value": b"poison", "partition": 1}])
    child = subprocess.run(
        [
            *(sys.executable, "-m", "tests.kafka.crash_child"),
            *(str(pipeline.root), broker.bootstrap_servers, topic, point),
            # While files are written Spark dies, too.
            *([] if point.startswith("during") else [connect_server.address]),
        ],
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert child.returncode == -signal.SIGKILL, child.stdout + child.stderr
    node = crash_table(topics, topic)
    pipeline.run(node)
    pipeline.runs_idle(node)
    totals = pipeline.head(node).totals
    assert totals["in"] == 201 == totals["applied"] + totals["late"] + totals["quarantined"]
    assert totals["quarantined"] == 1
    late = [r for r in pipeline.quarantine(node) if r.reason == "late"]
    assert len(late) == totals["late"] > 0
    assert len(pipeline.quarantine(node)) == totals["late"] + 1
    consumed = [(r.partition, r.n) for r in pipeline.log(node)]
    consumed += [(r.partition, int(bytes(r.raw).split(b'"n": ')[1].split(b",")[0])) for r in late]
    assert sorted(consumed) == sorted((n % 2, n) for n in range(200))
    other = Pipeline(pipeline.root / "undisturbed", pipeline.spark)
    other.run(node)
    assert pipeline.versions(node) == other.versions(node)
    assert pipeline.log(node) == other.log(node)


def crash_table(topics: Topics, topic: str) -> VersionedTable:
    source = KafkaSource(topics.cluster, topic)
    return VersionedTable(
        "t",
        key="k",
        schema=SCHEMA,
        timestamp="at",
        history_retention=timedelta(minutes=40),
        source=source,
    )


def test_sensor_asks_once(topics: Topics, pipeline: Pipeline) -> None:
    """A doubled tick, a lost cursor, two sensors: the same run. A replay on purpose: another one."""
    topic = topics.create(partitions=2)
    node = stream(pipeline, topics, topic)
    assert "batch 0, 0 records consumed" in pipeline.tick(node)
    topics.produce(topic, records(range(6), partition=1))
    first = pipeline.tick(node)
    config = first.run_config["ops"]["s"]["config"]
    assert config == {"ranges": {topic: {"1": [0, 6]}}}
    assert first.tags["vt_dagster/asset"] == "s"
    for cursor in ('{"epoch": 0, "batch": 0}', "somebody's own", None):
        assert pipeline.tick(node, cursor).run_key == first.run_key
    assert pipeline.tick(node, '{"epoch": 0, "batch": 3}').run_key != first.run_key
    # the run takes what it was asked to take, not what has come since
    topics.produce(topic, records([6, 7], partition=1))
    assert pipeline.run(node, **config)["records_in"] == 6
    # asked again, it finds its range consumed
    pipeline.runs_idle(node, **config)
    second = pipeline.tick(node)
    assert second.run_config["ops"]["s"]["config"] == {"ranges": {topic: {"1": [6, 8]}}}
    assert second.run_key != first.run_key


def test_sensor_waits_for_enough_or_long_enough(topics: Topics, pipeline: Pipeline) -> None:
    topic = topics.create()
    topics.produce(topic, records(range(3)))
    node = stream(pipeline, topics, topic)
    options = {"minimum_records": 10, "maximum_wait": timedelta(minutes=1)}
    said = pipeline.tick(node, **options)
    assert "3 offsets behind: waits for 10 records or for 0:01:00 (waited " in said
    long_ago = f'{{"epoch": 0, "batch": 0, "since": {int(time.time()) - 61}}}'
    assert isinstance(pipeline.tick(node, long_ago, **options), dg.RunRequest)
    topics.produce(topic, records(range(7)))
    assert isinstance(pipeline.tick(node, **options), dg.RunRequest)


def test_sensor_lets_an_unfinished_run_finish(topics: Topics, pipeline: Pipeline) -> None:
    topic = topics.create()
    topics.produce(topic, records(range(3)))
    node = stream(pipeline, topics, topic)
    with dg.DagsterInstance.ephemeral() as instance:
        asked = pipeline.tick(node, instance=instance)
        run = instance.create_run_for_job(
            dg.define_asset_job("nothing").resolve(
                asset_graph=dg.Definitions(
                    assets=[dg.asset(name="x")(lambda: None)]
                ).resolve_asset_graph()
            ),
            tags=asked.tags,
        )
        assert f"the run {run.run_id} is still in progress" in pipeline.tick(node, instance=instance)
