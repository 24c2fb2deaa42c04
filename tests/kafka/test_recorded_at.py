"""``recorded_at`` of messages: the broker's append time, or a column of the message."""

from __future__ import annotations

import time
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import TIMESTAMP_LOG_APPEND_TIME
from pyspark.sql import SparkSession
from pyspark.sql.types import StructField, StructType, TimestampType

import vt_dagster
from tests.kafka.topics import SCHEMA, Topics, record
from vt_dagster import Stream, Table
from vt_dagster.errors import SourceError
from vt_dagster.kafka import KafkaSource, Raw
from vt_dagster.runs.run import run_once
from vt_dagster.storage.asset_store import AssetStore, stores_of

pytestmark = pytest.mark.usefixtures("few_rows")

OLD = int(datetime(2024, 5, 1, tzinfo=timezone.utc).timestamp() * 1000)


def rows_of(name: str, warehouse: Path, **asked: Any) -> list[dict[str, Any]]:
    found = vt_dagster.read(name, warehouse=str(warehouse), what="log", **asked).to_pylist()
    return sorted(found, key=lambda row: (row["partition"], row["offset"]))


def test_recorded_at_append_time(topics: Topics, tmp_path: Path, spark: SparkSession) -> None:
    topic = topics.create(partitions=2, message_timestamp_type="LogAppendTime")
    for n in range(4):
        topics.produce(topic, [record("a", n, n, partition=n % 2, timestamp=OLD)])
        time.sleep(0.01)
    source = KafkaSource(topics.cluster, topic, recorded_at="append_time")
    node = Stream("s", key="k", schema=SCHEMA, timestamp="at", source=source)
    run_once(node, stores_of(str(tmp_path), spark))
    appended = [m.timestamp() for m in topics.consume(topic, 2)]
    assert {kind for kind, _ in appended} == {TIMESTAMP_LOG_APPEND_TIME}
    times = [datetime.fromtimestamp(0, timezone.utc) + timedelta(milliseconds=t) for _, t in appended]
    assert [row["recorded_at"] for row in rows_of("s", tmp_path)] == times
    # The message after the second one is in the first partition.
    known = [row["n"] for row in rows_of("s", tmp_path, as_known_at=times[1].isoformat())]
    assert (times[0], times[2], times[1]) == tuple(sorted(times)[:3])
    assert known == [0, 2, 1]
    assert [r["n"] for r in rows_of("s", tmp_path, as_known_at=times[2].isoformat())] == [0, 1]


def test_producer_time_is_not_append_time(topics: Topics, tmp_path: Path, spark: SparkSession) -> None:
    topic = topics.create()
    topics.produce(topic, [record("a", 1, 1, timestamp=OLD)])
    source = KafkaSource(topics.cluster, topic, recorded_at="append_time", max_bad_share=0.5)
    node = Stream("s", key="k", schema=SCHEMA, timestamp="at", source=source)
    with pytest.raises(SourceError) as refused:
        source.pin(None)
    assert str(refused.value) == (
        f"expected message.timestamp.type=LogAppendTime of the topic '{topic}' for "
        "recorded_at='append_time', got CreateTime: its timestamps come from producers. Set "
        "message.timestamp.type of the topic, or name a column as recorded_at"
    )
    topics.configure(topic, message_timestamp_type="LogAppendTime")
    topics.produce(topic, [record("a", 2, 2)])
    run_once(node, stores_of(str(tmp_path), spark))
    assert [row["n"] for row in rows_of("s", tmp_path)] == [2]
    quarantine = AssetStore(str(tmp_path), node, spark).quarantine()
    assert quarantine is not None
    assert [(r.position, r.reason) for r in quarantine.collect()] == [(0, "null_recorded_at")]


def test_recorded_at_column(topics: Topics, tmp_path: Path, spark: SparkSession) -> None:
    """A tombstone, which has no columns, counts as recorded at the message's time."""
    topic = topics.create()
    seen = ["2024-04-01T00:00:00Z", "2024-04-03T00:00:00Z"]
    messages = [record("a", n, n, timestamp=OLD) for n in range(2)]
    for message, at in zip(messages, seen, strict=True):
        message["value"]["seen"] = at
    topics.produce(topic, [*messages, {"key": "a", "value": None, "timestamp": OLD}])
    source = KafkaSource(topics.cluster, topic, key=Raw("k"), recorded_at="seen")
    schema = StructType([*SCHEMA.fields, StructField("seen", TimestampType())])
    node = Table("t", key="k", schema=schema, timestamp="at", source=source)
    run_once(node, stores_of(str(tmp_path), spark))
    found = [row["recorded_at"].isoformat() for row in rows_of("t", tmp_path)]
    assert found == [
        "2024-04-01T00:00:00+00:00",
        "2024-04-03T00:00:00+00:00",
        "2024-05-01T00:00:00+00:00",
    ]
