"""Logs in topics: keys, tombstones, timestamps, order; each record once, also after a kill."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from confluent_kafka import Message
from pyspark.sql import SparkSession

from tests.kafka.pipeline import Pipeline
from tests.kafka.topics import SCHEMA, Topics, record, records
from tests.market import materialized, messages, run, unchanged
from vt_dagster import Stream, Table, build_asset
from vt_dagster.kafka import Json, KafkaSink, Raw, build_publication
from vt_dagster.testing_kafka import KafkaBroker

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture
def pipeline(tmp_path: Path, spark: SparkSession) -> Pipeline:
    return Pipeline(tmp_path, spark)


def publish(pipeline: Pipeline, node: Stream, sink: KafkaSink) -> dict[str, Any]:
    return materialized(run_publication(pipeline, node, sink), f"{node.name}_to_kafka")


def run_publication(pipeline: Pipeline, node: Stream, sink: KafkaSink) -> dg.ExecuteInProcessResult:
    made = [build_asset(node), build_publication(node, sink)]
    selection = [f"{node.name}_to_kafka"]
    where = pipeline.root / "warehouse"
    result = run(made, where, selection=selection, instance=pipeline.instance)
    assert result.success, messages(result)
    return result


def place(message: Message) -> str:
    ((name, value),) = message.headers() or []
    assert name == "vt_dagster"
    return bytes(value or b"").decode()


def test_records_go_out_as_they_are(topics: Topics, pipeline: Pipeline) -> None:
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
    found = {place(m): m for m in topics.consume(target, 3)}
    assert sorted(found) == ["t/0/0", "t/0/1", "t/1/0"]
    first, deleted = found["t/0/0"], found["t/0/1"]
    assert json.loads(first.value() or b"") == {"k": "a", "n": 1, "at": "2020-01-01T00:00:05.000Z"}
    assert json.loads(first.key() or b"") == {"k": "a"}
    assert first.timestamp()[1] == 1_577_836_805_000
    assert deleted.value() is None
    assert deleted.timestamp()[1] == 1_700_000_000_123
    assert (deleted.partition(), deleted.key()) == (first.partition(), first.key())
    unchanged(run_publication(pipeline, node, sink), f"{node.name}_to_kafka")
    # what was published is a source again
    back = pipeline.source(topics, target, key=Json())
    again = Table("u", key="k", schema=SCHEMA, timestamp="at", source=back)
    assert pipeline.run(again)["records_quarantined"] == 0
    assert [(r.k, r.n) for r in pipeline.current(again)] == [("b", 2)]


@pytest.mark.parametrize("point", ["before:log", "after:log"])
def test_killed_publication_repeats_nothing(
    point: str, topics: Topics, broker: KafkaBroker, pipeline: Pipeline
) -> None:
    origin, target = topics.create(partitions=2), topics.create(partitions=2)
    for partition in (0, 1):
        topics.produce(origin, records(range(50), keys=50, partition=partition))
    node = Stream("s", key="k", schema=SCHEMA, timestamp="at", source=pipeline.source(topics, origin))
    pipeline.run(node)
    child = subprocess.run(
        [
            *(sys.executable, "-m", "tests.kafka.sink_child"),
            *(str(pipeline.root), broker.bootstrap_servers, origin, target, point),
        ],
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert child.returncode == -signal.SIGKILL, child.stdout + child.stderr
    assert len(topics.consume(target, 2)) == 100
    publish(pipeline, node, KafkaSink(topics.cluster, target))
    places = [place(m) for m in topics.consume(target, 2)]
    assert sorted(places) == sorted(f"s/{p}/{o}" for p in (0, 1) for o in range(50))
    topics.produce(origin, records([7], partition=1))
    pipeline.run(node)
    assert publish(pipeline, node, KafkaSink(topics.cluster, target))["records_published"] == 1
    # in each topic partition, records of one log partition are in their order
    for partition in (0, 1):
        mine = [place(m).split("/") for m in topics.consume(target, 2) if m.partition() == partition]
        for home in ("0", "1"):
            offsets = [int(offset) for _, p, offset in mine if p == home]
            assert offsets == sorted(offsets)


def test_a_run_is_bounded(topics: Topics, pipeline: Pipeline) -> None:
    """Also where the topic has the name of the asset."""
    origin, target = topics.create(), topics.create()
    topics.produce(origin, records(range(25)))
    node = Stream(
        target, key="k", schema=SCHEMA, timestamp="at", source=pipeline.source(topics, origin)
    )
    pipeline.run(node)
    sink = KafkaSink(topics.cluster, target, max_records_per_run=10)
    assert [publish(pipeline, node, sink)["records_published"] for _ in range(3)] == [10, 10, 5]
    assert [json.loads(m.value() or b"")["n"] for m in topics.consume(target)] == list(range(25))
