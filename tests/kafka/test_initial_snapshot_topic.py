"""A table that starts with a snapshot and continues with a topic."""

from __future__ import annotations

import json
from datetime import timedelta
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from tests.kafka.pipeline import Pipeline
from tests.kafka.topics import SCHEMA, Topics, records
from vt_dagster import SnapshotSource, VersionedTable, explain
from vt_dagster.runs.run import run_once

pytestmark = pytest.mark.usefixtures("few_rows")


def test_snapshot_then_topic(topics: Topics, tmp_path: Path, spark: SparkSession) -> None:
    """If runs are bounded, the snapshot comes after the records up to the end offsets of the first run.
    Its bad rows keep their text in quarantine."""
    pipeline, dump = Pipeline(tmp_path, spark), tmp_path / "dump"
    topic = topics.create(partitions=2)
    for partition, numbers in enumerate((range(3), range(3, 5))):
        topics.produce(topic, records(numbers, partition=partition))
    dump.mkdir()
    rows = [json.dumps({"k": k, "n": n}) for k, n in (("k1", 1), ("k4", 99), ("other", 7))]
    (dump / "all.jsonl").write_text("\n".join([*rows, "?"]))
    table = VersionedTable(
        "t",
        key="k",
        schema=SCHEMA,
        timestamp="at",
        history_retention=timedelta(days=30),
        source=pipeline.source(topics, topic, max_records_per_run=4),
        start=SnapshotSource(str(dump), "jsonl", dump_time="modified", max_bad_share=0.5),
    )
    first = run_once(table, pipeline.store).commit
    assert first is not None
    assert (first.counts["in"], first.counts["covered"], first.start) == (4, 0, None)
    commit = run_once(table, pipeline.store).commit
    assert commit is not None
    assert {name: commit.counts[name] for name in ("in", "applied", "covered", "quarantined")} == {
        "in": 5,
        "applied": 2,
        "covered": 2,
        "quarantined": 1,
    }
    assert commit.inputs == {topic: {0: 3, 1: 2}}
    assert {r["k"]: r["n"] for r in pipeline.current(table)} == {
        **{f"k{n}": n for n in range(5)},
        "other": 7,
    }
    (bad,) = pipeline.quarantine(table)
    assert bytes(bad["raw"]) == b"?"
    warehouse = pipeline.store(table).root.rpartition("/")[0]
    origins = [explain("t", warehouse=warehouse, key=key).origin for key in ("other", "k4")]
    assert [(one.kind, one.position) for one in origins if one] == [("snapshot", None), ("topic", 1)]
    assert run_once(table, pipeline.store).commit is None
