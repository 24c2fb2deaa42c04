"""Produces the records of a DataFrame to a Kafka topic from Spark's workers."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pyarrow as pa

from vt_dagster.sources.kafka_cluster import KafkaCluster

_ADVICE = {
    "Message size too large": "raise max.message.bytes of the topic; if each record is already "
    "smaller, set batch.size in the cluster's options below max.message.bytes",
    "Invalid timestamp": "raise message.timestamp.after.max.ms of the topic: the broker refuses "
    "records that are further ahead of its clock",
    "Topic authorization failed": "allow the user to write to the topic",
}


def advice_for(error: str) -> str:
    """Returns what to do about an error text of :func:`producing`."""
    found = (advice for why, advice in _ADVICE.items() if why in error)
    return next(found, "check that the broker runs and accepts records")


def producing(cluster: KafkaCluster, topic: str, header: str) -> Any:
    """Returns a function for ``mapInArrow`` that sends rows ``partition, key, value, millis, place``.

    Order is kept: after a record that the broker rejects, no later one is accepted. Only the topic
    limits the size of a record.

    Args:
        header: name of the header that carries ``place``.

    Returns:
        a function that yields rows ``partition, records, error``: the number of records sent by
        partition; or, on failure, one row with a null partition, the number of rejected records and the
        first error.
    """
    settings = _settings(cluster)

    def send(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        # Self-contained: workers need confluent-kafka, not this package.
        from collections import Counter

        import pyarrow as pa
        from confluent_kafka import KafkaException, Producer

        producer, failed = Producer(settings), list[str]()

        def delivered(error: Any, _: Any) -> None:
            if error is not None:
                failed.append(error.str())

        def poll(seconds: float) -> None:
            try:
                producer.poll(seconds)
            except (KafkaException, SystemError) as error:
                # The client raises a fatal error from any call, also inside ``delivered``.
                failed.insert(0, str(error.__cause__ or error))

        def produce(row: dict[str, Any]) -> None:
            about = {name: row[name] for name in ("key", "value")}
            about |= {"timestamp": row["millis"], "headers": [(header, row["place"].encode())]}
            while not failed:
                try:
                    producer.produce(topic, on_delivery=delivered, **about)
                    break
                except BufferError:
                    poll(0.1)
                except KafkaException as error:  # rejected before sending
                    failed.append(error.args[0].str())

        sent: Counter[int] = Counter()
        for batch in batches:
            for row in batch.to_pylist():
                produce(row)
                sent[row["partition"]] += 1
            poll(0)
            if failed:
                break
        # No flush: it would delay a fatal error until all records have timed out.
        until = time.monotonic() + 90
        while len(producer) and not failed and time.monotonic() < until:
            poll(0.1)
        if len(producer) and not failed:
            failed.append(f"{len(producer)} records were not acknowledged within 90 s")
        producer.purge()
        rows = {"partition": [*sent], "records": [*sent.values()], "error": [None] * len(sent)}
        if failed:
            rows = {"partition": [None], "records": [len(failed)], "error": [failed[0]]}
        kinds = [("partition", pa.int32()), ("records", pa.int64()), ("error", pa.string())]
        yield pa.RecordBatch.from_pydict(rows, schema=pa.schema(kinds))

    return send


def _settings(cluster: KafkaCluster) -> dict[str, Any]:
    hidden = ("logger", "log_level")
    given = {name: value for name, value in cluster.client_settings().items() if name not in hidden}
    defaults = {"message.max.bytes": 1_000_000_000, "delivery.timeout.ms": 60000}
    own = {"enable.idempotence": True, "enable.gapless.guarantee": True, "linger.ms": 20}
    return {**defaults, **given, **own, "partitioner": "murmur2_random", "log_level": 0}
