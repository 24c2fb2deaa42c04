"""Publishes a log to a Kafka topic: resumable, at least once, with a header that tells repeats apart.

How far a publication has come is in its own Delta log, as of any asset. A run that died after some
records went out left them in the topic without a commit. Each record carries its place in the log, so
the next run looks at what the topic got since the last commit and leaves those out. What no reader can
tell is a record still on its way from a process that was just killed: so the promise is *at least
once*, and the header ``vt_dagster`` is the key by which a consumer can drop a repeat.
"""

from __future__ import annotations

import posixpath
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

from vt_dagster.columns import IS_TOMBSTONE, OFFSET, PARTITION, TIMESTAMP
from vt_dagster.sources.kafka_cluster import KafkaCluster
from vt_dagster.sources.kafka_messages import read_messages
from vt_dagster.storage import delta, parquet
from vt_dagster.storage.kept import consumed, require_kept, require_same
from vt_dagster.storage.positions import Commit, Offsets, Shape
from vt_dagster.storage.store import AssetStore
from vt_dagster.topology.model import Stream

HEADER = "vt_dagster"
"""The header of each published record: ``asset/partition/offset`` in the log that it comes from."""

_SENT = "partition int, records long"


@dataclass(frozen=True)
class KafkaSink:
    """A topic that takes the records of a log.

    A record's key is the JSON object of its key columns, its value the JSON object of all columns of
    the schema, null for a tombstone; its timestamp is the record's. Records of one key stay in order.

    Args:
        cluster: how to reach it.
        topic: must be there. With ``cleanup.policy=compact`` a table's topic keeps its latest rows.
        max_records_per_run: bounds a run.
    """

    cluster: KafkaCluster
    topic: str
    max_records_per_run: int = 1_000_000

    def describe(self) -> str:
        return f"the Kafka topic {self.topic}"


class Publication:
    """A log's way to a topic, under ``warehouse/name``.

    Args:
        name: of the publication.
        node: the stream or table whose log is published.
        spark: a session, or what gives one when it is first needed.
    """

    def __init__(
        self,
        warehouse: str,
        name: str,
        node: Stream,
        sink: KafkaSink,
        spark: SparkSession | Callable[[], SparkSession],
    ) -> None:
        self.name, self.node, self.sink = name, node, sink
        self._log_path = posixpath.join(str(warehouse), name, "log")
        self._target = f"topic {sink.topic}"
        self._store = AssetStore(warehouse, node, spark)

    def head(self) -> Commit | None:
        """The last commit; None before the first. Does not use Spark."""
        found = delta.last_commit(self._log_path)
        return None if found is None else Commit.model_validate(found[1])

    def run(self, run_id: str | None = None) -> Commit | None:
        """Publishes what is new in the log; None where nothing is.

        Raises:
            SourceError: the cluster does not take records.
            StorageError: the log is not the one that was published, as a backup was put in its place.
            ConcurrentRunError: another run of the publication committed at the same time.
        """
        before = self.head()
        head = self._store.head()
        done = {} if before is None else before.inputs.get(self.node.name, {})
        if head is not None:
            attempt_of = self._store.attempt_of
            require_same(self.name, self.node.name, before, head.commit, attempt_of)
        if head is None or all(done.get(p, 0) >= e for p, e in head.commit.next_offset.items()):
            return None
        require_kept(self.name, self.node.name, done, head.commit)
        ends = self._bounded(done, head.commit.next_offset)
        topic = self.sink.cluster.topics([self.sink.topic])[self.sink.topic]
        rows, upto = self._store.log(done, head), F.lit(False)
        for partition, end in ends.items():
            upto = upto | ((F.col(PARTITION) == partition) & (F.col(OFFSET) < end))
        rows = rows.where(upto)
        sent = {} if before is None else before.inputs.get(self._target, {})
        if before is None or before.topics != {self.sink.topic: topic.id}:
            sent = topic.earliest
        arrived = self._arrived(sent, topic.ends)
        if arrived is not None:
            rows = rows.join(F.broadcast(arrived), [PARTITION, OFFSET], "left_anti")
        counted = {r[0]: r[1] for r in self._send(rows).groupBy(PARTITION).sum("records").collect()}
        after = self.sink.cluster.topics([self.sink.topic])[self.sink.topic]
        commit = Commit(
            asset=self.name,
            batch=1 if before is None else before.batch + 1,
            attempt=self._store.new_attempt(),
            shape=Shape(kind="stream", key=list(self.node.key)),
            logs={self.node.name: head.commit.log},
            consumed=consumed({self.node.name: head.commit}),
            run_id=run_id,
            taken={self.node.name: {p: (done.get(p, 0), e) for p, e in ends.items()}},
            inputs={self.node.name: {**done, **ends}, self._target: after.ends},
            topics={self.sink.topic: after.id},
            counts={
                "in": sum(e - done.get(p, 0) for p, e in ends.items()),
                "published": sum(counted.values()),
            },
            reads={f"{self.node.name}/log": head.version},
        )
        log = self._store.spark.createDataFrame(sorted(counted.items()), _SENT)
        parquet.write(
            log,
            self._log_path,
            document=commit.model_dump(),
            batch=commit.batch,
            asset=self.name,
        )
        return commit

    def _bounded(self, done: Offsets, ends: Offsets) -> Offsets:
        new = {p: e - done.get(p, 0) for p, e in ends.items() if e > done.get(p, 0)}
        share = max(1, self.sink.max_records_per_run // max(1, len(new)))
        return {p: done.get(p, 0) + min(n, share) for p, n in new.items()}

    def _arrived(self, since: Offsets, now: Offsets) -> DataFrame | None:
        """Places in the log whose records the topic has got since a commit; None = nothing came."""
        ranges = {p: (since.get(p, 0), end) for p, end in now.items() if end > since.get(p, 0)}
        if not ranges:
            return None
        messages = read_messages(
            self.sink.cluster, self._store.spark, {self.sink.topic: ranges}, headers=True
        )
        place = F.element_at(F.filter("headers", lambda h: h["key"] == HEADER), 1)["value"].cast(
            "string"
        )
        parts = F.split(place, "/")
        return (
            messages.where(parts[0] == self.node.name)
            .select(parts[1].cast("int").alias(PARTITION), parts[2].cast("long").alias(OFFSET))
            .distinct()
        )

    def _send(self, rows: DataFrame) -> DataFrame:
        """Sends rows and counts them.

        Plan: one shuffle and sort by partition. Spark's own Kafka sink cannot set a record's timestamp,
        so Arrow batches go to librdkafka's idempotent producer, which keeps their order.
        """
        node = self.node
        place = F.concat_ws("/", F.lit(node.name), F.col(PARTITION), F.col(OFFSET))
        messages = rows.select(
            PARTITION,
            OFFSET,
            _json(list(node.key)).alias("key"),
            F.when(~F.col(IS_TOMBSTONE), _json(node.schema.names)).alias("value"),
            F.unix_millis(TIMESTAMP).alias("millis"),
            place.alias("place"),
        )
        ordered = messages.repartition(PARTITION).sortWithinPartitions(PARTITION, OFFSET)
        return ordered.mapInArrow(_sender(self.sink), _SENT)


def _json(columns: list[str]) -> Column:
    return F.to_json(F.struct(*columns), {"ignoreNullFields": "false"})


def _sender(sink: KafkaSink) -> Any:
    topic, header = sink.topic, HEADER
    settings = {
        name: value
        for name, value in sink.cluster.client_settings().items()
        if name not in ("logger", "log_level")
    }

    def send(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        # Self-contained: workers need confluent-kafka, not this package.
        from collections import Counter

        import pyarrow as pa
        from confluent_kafka import Producer

        more = {"enable.idempotence": True, "linger.ms": 20, "partitioner": "murmur2_random"}
        producer = Producer({**settings, **more, "log_level": 0, "delivery.timeout.ms": 60000})
        failed: list[str] = []

        def delivered(error: Any, _: Any) -> None:
            if error is not None:
                failed.append(error.str())

        sent: Counter[int] = Counter()
        for batch in batches:
            for row in batch.to_pylist():
                message = {
                    "key": row["key"],
                    "value": row["value"],
                    "timestamp": row["millis"],
                    "headers": [(header, row["place"].encode())],
                }
                while True:
                    try:
                        producer.produce(topic, on_delivery=delivered, **message)
                        break
                    except BufferError:
                        producer.poll(0.1)
                sent[row["partition"]] += 1
            producer.poll(0)
        left = producer.flush(90)
        if failed or left:
            raise RuntimeError(
                f"topic {topic}: {len(failed) + left} records were not taken: {failed[:1]}"
            )
        yield pa.RecordBatch.from_pydict(
            {"partition": list(sent), "records": list(sent.values())},
            schema=pa.schema([("partition", pa.int32()), ("records", pa.int64())]),
        )

    return send


__all__ = ["HEADER", "KafkaSink", "Publication"]
