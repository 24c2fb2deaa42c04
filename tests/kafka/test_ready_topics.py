"""A join waits for a table whose topic is loaded in several runs."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from tests.kafka.pipeline import Pipeline
from tests.kafka.topics import SCHEMA, Topics, records
from vt_dagster import Stream, VersionedTable
from vt_dagster.runs.run import run_once

pytestmark = pytest.mark.usefixtures("few_rows")


def test_join_waits_for_initial_load_of_topic(
    topics: Topics, tmp_path: Path, spark: SparkSession
) -> None:
    pipeline = Pipeline(tmp_path, spark)
    topic, other = topics.create(partitions=2), topics.create(partitions=2)
    for partition in (0, 1):
        topics.produce(topic, records(range(4), partition=partition))
    topics.produce(other, records(range(2), partition=1))
    table = VersionedTable(
        "t",
        key="k",
        schema=SCHEMA,
        timestamp="at",
        history_retention=timedelta(days=30),
        source=pipeline.source(topics, topic, max_records_per_run=4),
        ready="initial_load",
    )
    stream = Stream("s", key="k", schema=SCHEMA, timestamp="at", source=pipeline.source(topics, other))
    join = stream.left_join(table, select=("left.n", "right.n as found"), name="j")
    for node in (stream, table):
        run_once(node, pipeline.store)
    assert run_once(join, pipeline.store).commit is None
    topics.produce(topic, records(range(4, 40), partition=0))
    run_once(table, pipeline.store)
    head = pipeline.head(table)
    assert head.initial_load == {topic: {0: 4, 1: 4}}
    commit = run_once(join, pipeline.store).commit
    assert commit is not None
    assert commit.counts["in"] == 2
