"""Sends the records of a DataFrame to a topic from Spark's workers."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pyarrow as pa

from vt_dagster.sources.kafka_cluster import KafkaCluster

_ADVICE = {
    "Message size too large": "raise max.message.bytes of the topic; where each of its records is "
    "smaller than that, set batch.size in the cluster's options below it",
    "Invalid timestamp": "raise message.timestamp.after.max.ms of the topic, beyond which it refuses "
    "records of a later time than its broker's clock",
    "Topic authorization failed": "allow the user to write to the topic",
}


def advice_for(error: str) -> str:
    """What to do where a topic does not take records, after a text of :func:`producing`."""
    found = (advice for why, advice in _ADVICE.items() if why in error)
    return next(found, "see that the broker runs and takes records")


def producing(cluster: KafkaCluster, topic: str, header: str) -> Any:
    """A function for ``mapInArrow`` that sends rows ``partition, key, value, millis, place``.

    Order is kept: after a record that the topic does not take none is taken. How large a record may be
    is the topic's to say.

    Args:
        header: which holds the place of each.

    Returns:
        gives rows ``partition, records, error``: how many were sent of each partition; or one row
        without a partition, with how many were not taken and why the first one was not.
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
                # The client raises a fatal one wherever it is, also within ``delivered``.
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
                except KafkaException as error:  # refused before it was sent
                    failed.append(error.args[0].str())

        sent: Counter[int] = Counter()
        for batch in batches:
            for row in batch.to_pylist():
                produce(row)
                sent[row["partition"]] += 1
            poll(0)
            if failed:
                break
        # No flush: it would hold back a fatal error until all records have timed out.
        until = time.monotonic() + 90
        while len(producer) and not failed and time.monotonic() < until:
            poll(0.1)
        if len(producer) and not failed:
            failed.append(f"{len(producer)} records without an answer within 90 s")
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
