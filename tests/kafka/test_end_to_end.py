"""Records over eight partitions are published while runs that sensors asked for consume them and are
killed in between: the tables equal those of one undisturbed run."""

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

import pyarrow as pa
import pytest
from pyspark.sql import Row, SparkSession
from pyspark.sql.types import IntegerType, LongType, StringType, StructField, StructType

from tests.kafka.pipeline import Pipeline
from tests.kafka.topics import Topics
from vt_dagster import Stream, VersionedTable, read
from vt_dagster.columns import RECORDED_AT
from vt_dagster.kafka import KafkaSource
from vt_dagster.testing_kafka import KafkaBroker

REPOSITORY = Path(__file__).parents[2]
PARTITIONS = 8
LONGEST = 12.0
"""So many seconds after a run has begun it is killed at most."""
SCHEMA = StructType(
    [
        StructField("k", StringType()),
        StructField("n", IntegerType()),
        StructField("millis", LongType()),
    ]
)


def topology(topics: Topics, prices: str, sales: str, most: int | None) -> dict[str, Stream]:
    """A versioned table and a stream, each of its own topic, of which a run takes so many records."""

    def source(topic: str) -> KafkaSource:
        return KafkaSource(topics.cluster, topic, max_records_per_run=most, max_bad_share=0.01)

    about = {"key": "k", "schema": SCHEMA, "timestamp": "timestamp_millis(millis)"}
    table = VersionedTable(
        "prices", **about, source=source(prices), history_retention=timedelta(minutes=30)
    )
    return {"prices": table, "sales": Stream("sales", **about, source=source(sales))}


@pytest.fixture
def children() -> Iterator[list[subprocess.Popen[str]]]:
    running: list[subprocess.Popen[str]] = []
    yield running
    for child in running:
        child.kill()
        child.wait()


def child(module: str, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", f"tests.kafka.{module}", *arguments],
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def begins(worker: subprocess.Popen[str]) -> bool:
    """Waits for a worker's first run; False where there is none."""
    assert worker.stdout is not None
    return any(line == "asked\n" for line in worker.stdout)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("each", "in_all", "share"),
    [(8_000, 1, 0.6), pytest.param(500_000, 3, 0.3, marks=pytest.mark.endurance)],
)
def test_many_records_and_kills(
    topics: Topics,
    broker: KafkaBroker,
    tmp_path: Path,
    spark: SparkSession,
    children: list[subprocess.Popen[str]],
    each: int,
    in_all: int,
    share: float,
) -> None:
    """So many records of each topic, of which a run takes this share, and so many kills."""
    names, most = [topics.create(partitions=PARTITIONS) for _ in range(2)], int(each * share)
    publisher = child("publisher", broker.bootstrap_servers, *names, str(each))
    children.append(publisher)
    chance, kills, ended = random.Random(4), 0, False
    while not ended:
        published = publisher.poll() is not None
        worker = child("worker", str(tmp_path), broker.bootstrap_servers, *names, str(most))
        children.append(worker)
        if kills < in_all and begins(worker):
            time.sleep(chance.uniform(0, LONGEST))
            if worker.poll() is None:
                os.killpg(worker.pid, signal.SIGKILL)
                kills += 1
        said = worker.communicate(timeout=900)[0]
        assert worker.returncode in (0, -signal.SIGKILL), said
        ended = published and worker.returncode == 0
    assert publisher.returncode == 0
    assert kills == in_all
    disturbed, other = (
        Pipeline(root, spark, checked=False) for root in (tmp_path, tmp_path / "undisturbed")
    )
    at_once = topology(topics, *names, most=None)
    for name, node in topology(topics, *names, most=most).items():
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
        # by content: every number that was published is in the log or in quarantine, once
        late = [json.loads(bytes(one["raw"]))["n"] for one in rejected if one["reason"] == "late"]
        assert sorted([*log["n"].to_pylist(), *late]) == [n for n in range(each) if n % 1000]


def rows(pipeline: Pipeline, name: str, what: str, *order: str) -> pa.Table:
    """What a reader without Spark has of an asset, but for the clock's time."""
    found = read(name, warehouse=str(pipeline.root / "warehouse"), what=what)
    return found.drop_columns([RECORDED_AT]).sort_by([(column, "ascending") for column in order])


def _rejected(row: Row) -> dict[str, Any]:
    return {name: value for name, value in row.asDict().items() if name not in ("batch", RECORDED_AT)}
