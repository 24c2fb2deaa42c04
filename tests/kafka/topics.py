"""Operations on topics for tests, by Kafka's own client: create, produce, consume, delete."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from confluent_kafka import Consumer, Message, Producer, TopicPartition
from confluent_kafka.admin import (
    AdminClient,
    AlterConfigOpType,  # pyright: ignore[reportPrivateImportUsage]
    ConfigEntry,  # pyright: ignore[reportPrivateImportUsage]
    ConfigResource,  # pyright: ignore[reportPrivateImportUsage]
    ResourceType,  # pyright: ignore[reportPrivateImportUsage]
)
from confluent_kafka.cimpl import NewPartitions, NewTopic
from pyspark.sql.types import IntegerType, StringType, StructField, StructType, TimestampType

from vt_dagster.kafka import KafkaCluster

SCHEMA = StructType(
    [
        StructField("k", StringType()),
        StructField("n", IntegerType()),
        StructField("at", TimestampType()),
    ]
)
"""A key, a number, and a time."""


class Topics:
    """The topics of a broker."""

    def __init__(self, servers: str) -> None:
        self.cluster = KafkaCluster(servers)
        self._admin = AdminClient({"bootstrap.servers": servers})
        self._servers = servers

    @staticmethod
    def nowhere() -> KafkaCluster:
        """A cluster without a broker."""
        return KafkaCluster("127.0.0.1:9")

    def create(self, name: str | None = None, partitions: int = 1, **config: str) -> str:
        """Creates a topic; without a given name, the name is unique."""
        name = name or f"t{uuid.uuid4().hex[:8]}"
        settings = {k.replace("_", "."): v for k, v in config.items()}
        self._wait(self._admin.create_topics([NewTopic(name, partitions, 1, config=settings)]))
        return name

    def configure(self, name: str, **config: str) -> None:
        """Sets the configuration of a topic."""
        wanted = ConfigResource(ResourceType.TOPIC, name)
        for key, value in config.items():
            setting, how = key.replace("_", "."), AlterConfigOpType.SET
            wanted.add_incremental_config(ConfigEntry(setting, value, incremental_operation=how))
        self._wait(self._admin.incremental_alter_configs([wanted]))

    def delete(self, name: str) -> None:
        self._wait(self._admin.delete_topics([name]))

    def add_partitions(self, name: str, total: int) -> None:
        self._wait(self._admin.create_partitions([NewPartitions(name, total)]))

    def expire(self, name: str, before: Mapping[int, int]) -> None:
        """Removes the records before some offsets, as a topic's retention does."""
        self._wait(self._admin.delete_records([TopicPartition(name, p, o) for p, o in before.items()]))

    @staticmethod
    def _wait(futures: Mapping[Any, Any]) -> None:
        for future in futures.values():
            future.result(timeout=30)

    def produce(self, name: str, messages: Iterable[Mapping[str, Any]], **settings: Any) -> None:
        """Sends messages ``{key, value, partition, timestamp, headers}``; a dict value becomes JSON."""
        producer = Producer({"bootstrap.servers": self._servers, "linger.ms": 5, **settings})
        transactional = "transactional.id" in settings
        if transactional:
            producer.init_transactions(30)
            producer.begin_transaction()
        self.send(producer, name, messages)
        if transactional:
            producer.commit_transaction(30)
        assert producer.flush(60) == 0

    @staticmethod
    def send(producer: Producer, name: str, messages: Iterable[Mapping[str, Any]]) -> None:
        for message in messages:
            sent = dict(message)
            if isinstance(sent.get("value"), Mapping):
                sent["value"] = json.dumps(sent["value"])
            while True:
                try:
                    producer.produce(name, **sent)
                    break
                except BufferError:
                    producer.poll(0.1)

    def consume(self, name: str, partitions: int = 1) -> list[Message]:
        """All records that a read_committed consumer sees, by partition and offset."""
        consumer = Consumer(
            {
                "bootstrap.servers": self._servers,
                "group.id": "tests",
                "isolation.level": "read_committed",
                "enable.partition.eof": True,
            }
        )
        found: list[Message] = []
        ended = set[int]()
        try:
            consumer.assign([TopicPartition(name, p, 0) for p in range(partitions)])
            while len(ended) < partitions:
                message = consumer.poll(10)
                assert message is not None
                if message.error() is None:
                    found.append(message)
                else:
                    ended.add(message.partition() or 0)
        finally:
            consumer.close()
        return sorted(found, key=lambda m: (m.partition() or 0, m.offset() or 0))


def record(k: str | None, n: int | None, second: int, **more: Any) -> dict[str, Any]:
    """A message whose time is this number of seconds after the begin of 2020."""
    value = {"k": k, "n": n, "at": f"2020-01-01T00:{second // 60:02d}:{second % 60:02d}Z"}
    return {"key": k, "value": value, **more}


def records(numbers: Sequence[int], keys: int = 5, **more: Any) -> list[dict[str, Any]]:
    """A message for each number."""
    return [record(f"k{n % keys}", n, n % 3600, **more) for n in numbers]
