"""Runs requested by sensors consume records of eight partitions while these are published; some runs
are killed. The tables equal those of one undisturbed run."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import dagster as dg
import pyarrow as pa
import pytest
from pyspark.sql import Row, SparkSession
from pyspark.sql.types import IntegerType, LongType, StringType, StructField, StructType

from tests.kafka.pipeline import Pipeline
from tests.kafka.topics import Topics
from tests.market import messages
from vt_dagster import Stream, VersionedTable, read
from vt_dagster.columns import RECORDED_AT
from vt_dagster.kafka import KafkaSource
from vt_dagster.testing_kafka import KafkaBroker

pytestmark = pytest.mark.usefixtures("few_rows")

REPOSITORY = Path(__file__).parents[2]
PARTITIONS = 8
LONGEST = 8.0
"""The most seconds after a run's begin until it is killed."""
SCHEMA = StructType(
    [
        StructField("k", StringType()),
        StructField("n", IntegerType()),
        StructField("millis", LongType()),
    ]
)


def topology(topics: Topics, prices: str, sales: str, most: int | None) -> dict[str, Stream]:
    """A versioned table and a stream, each with its own topic; runs take at most ``most`` records."""

    def source(topic: str) -> KafkaSource:
        return KafkaSource(topics.cluster, topic, max_records_per_run=most, max_bad_share=0.01)

    about = {"key": "k", "schema": SCHEMA, "timestamp": "timestamp_millis(millis)"}
    table = VersionedTable(
        "prices", **about, source=source(prices), history_retention=timedelta(minutes=30)
    )
    return {"prices": table, "sales": Stream("sales", **about, source=source(sales))}


def ticks(pipeline: Pipeline, nodes: dict[str, Stream]) -> Iterator[str]:
    """Ticks each asset's sensor. If it requests a run, yields the asset's name, then does the run."""
    for name, node in nodes.items():
        said = pipeline.tick(node)
        if isinstance(said, dg.RunRequest):
            yield name
            done = pipeline.execute(node, run_config=said.run_config)
            assert done.success, messages(done)


@pytest.fixture
def child_processes() -> Iterator[list[subprocess.Popen[str]]]:
    running: list[subprocess.Popen[str]] = []
    yield running
    for child in running:
        child.kill()
        child.wait()


def start_child(module: str, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", f"tests.kafka.{module}", *arguments],
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def wait_for_run(worker: subprocess.Popen[str]) -> bool:
    """Waits for a worker's next run; False if the sensors request none."""
    assert worker.stdout is not None
    said: list[str] = []
    for line in worker.stdout:
        if line in ("asked\n", "idle\n"):
            return line == "asked\n"
        said.append(line)
    raise AssertionError("".join(said))


def allow_tick(worker: subprocess.Popen[str]) -> None:
    """Lets a worker tick once more."""
    time.sleep(0.5)
    assert worker.stdin is not None
    worker.stdin.write("go on\n")
    worker.stdin.flush()


def release_publisher(publisher: subprocess.Popen[str]) -> None:
    """Lets a publisher publish its second half; a second call has no effect."""
    assert publisher.stdin is not None
    publisher.stdin.close()


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("each", "kills", "share"),
    [(8_000, 1, 0.6), pytest.param(500_000, 3, 0.3, marks=pytest.mark.endurance)],
)
def test_sensors_and_runs_survive_kills_without_loss(
    topics: Topics,
    broker: KafkaBroker,
    tmp_path: Path,
    spark: SparkSession,
    child_processes: list[subprocess.Popen[str]],
    each: int,
    kills: int,
    share: float,
) -> None:
    """Each topic gets ``each`` records, and a run consumes at most ``share`` of them. ``kills`` workers
    are killed in their first run. Then this process consumes the rest, while the second half is
    published."""
    names, most = [topics.create(partitions=PARTITIONS) for _ in range(2)], int(each * share)
    publisher = start_child("publisher", broker.bootstrap_servers, *names, str(each))
    child_processes.append(publisher)
    chance = random.Random(4)
    for _ in range(kills):
        one = start_child("worker", str(tmp_path), broker.bootstrap_servers, *names, str(most))
        child_processes.append(one)
        while not wait_for_run(one):  # all published records are consumed
            release_publisher(publisher)
            allow_tick(one)
        time.sleep(chance.uniform(0, LONGEST))
        assert one.poll() is None
        os.killpg(one.pid, signal.SIGKILL)
        one.wait()
    disturbed, other = (
        Pipeline(root, spark, checked=False) for root in (tmp_path, tmp_path / "undisturbed")
    )
    few_at_a_time, meanwhile = topology(topics, *names, most=most), 0
    asked, published = True, False
    while asked or not published:
        published, asked = publisher.poll() is not None, False
        for _ in ticks(disturbed, few_at_a_time):
            release_publisher(publisher)
            asked = True
            meanwhile += publisher.poll() is None
        release_publisher(publisher)
    assert meanwhile > 0, "runs began while records were published"
    assert publisher.returncode == 0
    at_once = topology(topics, *names, most=None)
    for name, node in few_at_a_time.items():
        assert other.run(at_once[name])["versions"]["batch"] == 1
        totals = disturbed.head(node).totals
        assert totals == other.head(node).totals
        assert totals["in"] == each
        assert totals["in"] == totals["applied"] + totals["late"] + totals["quarantined"]
        assert totals["quarantined"] == each // 1000
        assert disturbed.head(node).next_offset == other.head(node).next_offset
        log = rows(disturbed, name, "log", "partition", "offset")
        assert log.equals(rows(other, name, "log", "partition", "offset"))
        if name == "prices":
            order = "versions", "k", "valid_from"
            assert rows(disturbed, name, *order).equals(rows(other, name, *order))
            assert totals["late"] > 0
        rejected, others = ([_rejected(r) for r in p.quarantine(node)] for p in (disturbed, other))
        assert rejected == others
        # by content: each published number is once in the log or in quarantine
        late = [json.loads(bytes(one["raw"]))["n"] for one in rejected if one["reason"] == "late"]
        assert sorted([*log["n"].to_pylist(), *late]) == [n for n in range(each) if n % 1000]


def rows(pipeline: Pipeline, name: str, what: str, *order: str) -> pa.Table:
    """The rows of an asset, read without Spark, without their recording time."""
    found = read(name, warehouse=str(pipeline.root / "warehouse"), what=what)
    return found.drop_columns([RECORDED_AT]).sort_by([(column, "ascending") for column in order])


def _rejected(row: Row) -> dict[str, Any]:
    return {name: value for name, value in row.asDict().items() if name not in ("batch", RECORDED_AT)}
