"""Faults of topics, brokers and processes, and what the user sees of them. In the end, each record is
once in the log, or in quarantine."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from confluent_kafka.admin import AdminClient
from pyspark.sql import SparkSession

from tests.conftest import ConnectServer
from tests.kafka.conftest import Broker
from tests.kafka.pipeline import Pipeline
from tests.kafka.topics import SCHEMA, Topics, record, records
from vt_dagster import Stream, VersionedTable
from vt_dagster.errors import ConcurrentRunError, RecordsGoneError, SourceError
from vt_dagster.kafka import KafkaSource
from vt_dagster.runs.run import Receipt, Run
from vt_dagster.sources import kafka_cluster
from vt_dagster.storage.commit_log import Commit, Shape

pytestmark = pytest.mark.usefixtures("few_rows")

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture
def pipeline(tmp_path: Path, spark: SparkSession) -> Pipeline:
    """A pipeline without checks, except in tests that lose records."""
    return Pipeline(tmp_path, spark, checked=False)


def stream(pipeline: Pipeline, topics: Topics, topic: str | Sequence[str], **options: Any) -> Stream:
    source = pipeline.source(topics, topic, **options)
    return Stream("s", key="k", schema=SCHEMA, timestamp="at", source=source)


def pin(pipeline: Pipeline, node: Stream) -> Run:
    return Run.pin(node, pipeline.store)


def finish(run: Run) -> Receipt:
    return run.commit(run.operate(run.read()))


def test_expired_offsets_are_reported_as_gap(topics: Topics, pipeline: Pipeline) -> None:
    pipeline.checked = True
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
    with pytest.raises(RecordsGoneError, match="5 offsets are gone"):  # a failed tick
        pipeline.tick(node)
    done = pipeline.run(node, accept_gap=True)
    assert (done["records_lost"], done["records_in"]) == (5, 2)
    assert done["accepted_gaps"] == {topic: {"0": [3, 8]}}
    assert pipeline.head(node).gaps == {topic: {0: (3, 8)}}
    assert sorted(r.n for r in pipeline.log(node)) == [0, 1, 2, 8, 9, 10, 11, 12]
    pipeline.runs_idle(node)


def test_recreated_topic_is_refused(topics: Topics, pipeline: Pipeline) -> None:
    """The new topic has as many records as the old one, so the offsets alone look valid."""
    pipeline.checked = True
    topic = topics.create(partitions=2)
    topics.produce(topic, records(range(4), partition=1))
    node = stream(pipeline, topics, topic)
    pipeline.run(node)
    old = f"{topic}/{pipeline.head(node).topics[topic]}"
    topics.delete(topic)
    topics.create(topic)
    topics.produce(topic, records(range(100, 105), partition=0))
    said = pipeline.fails(node)
    assert f"topic {topic} was deleted and recreated since batch 1 (its id was" in said
    with pytest.raises(RecordsGoneError, match="recreated since batch 1"):
        pipeline.tick(node)
    done = pipeline.run(node, accept_gap=True)
    assert done["records_in"] == 5
    assert pipeline.head(node).inputs == {topic: {0: 5}, old: {0: 0, 1: 4}}
    pipeline.runs_idle(node)
    assert sorted(r.n for r in pipeline.log(node)) == [0, 1, 2, 3, *range(100, 105)]


def test_topic_recreated_during_run_is_refused(topics: Topics, pipeline: Pipeline) -> None:
    """The new topic has records at the same offsets. A run that read them as the old ones would consume
    them twice, because the next run begins at the new topic's start."""
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


def test_start_offsets_outside_topic(topics: Topics, pipeline: Pipeline) -> None:
    """A source starts at offsets whose records are removed or do not exist yet, in a topic that is new
    to the source or recreated."""
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
    # all records of a recreated topic are new, wherever the source began in the old one
    for start in ("earliest", "latest", {topic: {0: 8, 1: 40}}):
        with pytest.raises(RecordsGoneError, match="was deleted and recreated since batch 1"):
            source(start).pin(commit("old"))
        pinned = source(start).pin(commit("old"), accept_gap=True)
        assert pinned.ranges == {topic: {0: (5, 10), 1: (0, 10)}}
    assert source("latest").pin(commit(topics.cluster.topic_ids([topic])[topic])).ranges == {
        topic: {0: (7, 10), 1: (7, 10)}
    }


def test_topic_removed_from_source_and_added_back(topics: Topics, pipeline: Pipeline) -> None:
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


def test_added_partitions_are_consumed(topics: Topics, pipeline: Pipeline) -> None:
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


def test_concurrent_runs_have_one_winner(topics: Topics, pipeline: Pipeline) -> None:
    topic = topics.create()
    topics.produce(topic, records(range(5)))
    node = stream(pipeline, topics, topic)
    one, other = pin(pipeline, node), pin(pipeline, node)
    assert finish(one).commit is not None
    with pytest.raises(ConcurrentRunError, match="another run committed"):
        finish(other)
    assert [r.n for r in pipeline.log(node)] == [0, 1, 2, 3, 4]


def test_records_expired_during_run_fail_it(topics: Topics, pipeline: Pipeline) -> None:
    topic = topics.create()
    topics.produce(topic, records(range(10)))
    node = stream(pipeline, topics, topic)
    run = pin(pipeline, node)
    topics.expire(topic, {0: 4})
    with pytest.raises(SourceError, match="nothing was committed"):
        finish(run)
    assert pipeline.store(node).head() is None


def test_run_survives_broker_restart(
    topics: Topics, broker: Broker, pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = topics.create(partitions=2)
    for partition in (0, 1):
        topics.produce(topic, records(range(500), partition=partition))
    node = stream(pipeline, topics, topic)
    run = pin(pipeline, node)
    broker.kill()
    restart = threading.Thread(target=broker.start)
    try:
        with monkeypatch.context() as patched:
            patched.setattr(kafka_cluster, "_SECONDS", 1.0)  # no answer comes, however long it waits
            assert "did not answer" in pipeline.tick(node)
            assert "did not answer" in pipeline.fails(node)
    finally:
        restart.start()
    finish(run)
    restart.join()
    assert Counter(r.n for r in pipeline.log(node)) == Counter([*range(500), *range(500)])
    # that run was not a Dagster run: the next one finds no new records, and reports its commit
    assert pipeline.run(node)["versions"]["batch"] == 1
    pipeline.runs_idle(node)


def test_cluster_id_may_start_with_dash(broker: Broker) -> None:
    """One of 64 ids begins with a dash; formerly, a broker with such an id did not start."""
    admin = AdminClient({"bootstrap.servers": broker.bootstrap_servers})
    assert str(admin.describe_cluster().result(30).cluster_id).startswith("-")


@pytest.mark.parametrize(
    "points",
    [
        ("before:log", "after:log"),
        pytest.param(("before:read", "during:view"), marks=pytest.mark.endurance),
    ],
)
def test_killed_run_loses_and_repeats_no_record(
    points: Sequence[str],
    topics: Topics,
    broker: Broker,
    pipeline: Pipeline,
    connect_server: ConnectServer,
) -> None:
    """Each record is once in log, view or quarantine, wherever the process was killed."""
    topic = topics.create(partitions=2)
    good = [record(f"k{n % 7}", n, (n * 37) % 3600, partition=n % 2) for n in range(200)]
    topics.produce(topic, [*good, {"value": b"poison", "partition": 1}])
    killed = {point: Pipeline(pipeline.root / str(n), pipeline.spark) for n, point in enumerate(points)}
    cases: list[str] = []
    for point, of_it in killed.items():
        # While files are written, Spark dies too.
        where = "local" if point.startswith("during") else connect_server.address
        cases += [str(of_it.root), broker.bootstrap_servers, topic, point, where]
    child = subprocess.run(
        [sys.executable, "-m", "tests.kafka.crash_child", *cases],
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert child.returncode == 0, child.stdout + child.stderr
    node = crash_table(topics, topic)
    pipeline.run(node)
    for one in killed.values():
        one.run(node)
        one.runs_idle(node)
        totals = one.head(node).totals
        assert totals["in"] == 201 == totals["applied"] + totals["late"] + totals["quarantined"]
        assert totals["quarantined"] == 1
        rejected = one.quarantine(node)
        late = [r for r in rejected if r.reason == "late"]
        assert len(late) == totals["late"] > 0
        assert len(rejected) == totals["late"] + 1
        log = one.log(node)
        consumed = [(r.partition, r.n) for r in log]
        consumed += [(r.partition, int(bytes(r.raw).split(b'"n": ')[1].split(b",")[0])) for r in late]
        assert sorted(consumed) == sorted((n % 2, n) for n in range(200))
        assert one.versions(node) == pipeline.versions(node)
        assert log == pipeline.log(node)


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


def test_sensor_requests_same_run_once(topics: Topics, pipeline: Pipeline) -> None:
    """A repeated tick, a lost cursor or a second sensor requests the same run. After a replay, the
    sensor requests another run."""
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
    # the run consumes the requested range, not the records that have come since
    topics.produce(topic, records([6, 7], partition=1))
    assert pipeline.run(node, **config)["records_in"] == 6
    # requested again, the run finds its range consumed
    pipeline.runs_idle(node, **config)
    second = pipeline.tick(node)
    assert second.run_config["ops"]["s"]["config"] == {"ranges": {topic: {"1": [6, 8]}}}
    assert second.run_key != first.run_key


def test_sensor_waits_for_minimum_records_or_maximum_wait(topics: Topics, pipeline: Pipeline) -> None:
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


def test_sensor_skips_while_run_is_unfinished(topics: Topics, pipeline: Pipeline) -> None:
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
