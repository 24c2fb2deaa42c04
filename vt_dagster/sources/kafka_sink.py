"""Publishes a log to a Kafka topic: resumable, at least once, with a header for deduplication.

A publication stores its progress in its own Delta log, like any asset. A run that dies after sending
some records leaves them in the topic without a commit. Each record carries its offset in the log, so
the next run reads what the topic received since the last commit and skips those records. It cannot see
a record still in flight from a process that was just killed. The guarantee is therefore *at least
once*, and consumers can deduplicate by the header ``vt_dagster``.

Offsets are valid only for one log and one topic. The commit therefore records the ids of both, and a
run with another log or topic is refused.
"""

from __future__ import annotations

import posixpath
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import pyarrow as pa
from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from vt_dagster.columns import IS_TOMBSTONE, OFFSET, PARTITION, TIMESTAMP
from vt_dagster.core.source_records import as_json
from vt_dagster.errors import RecordsGoneError, SourceError, StorageError, TopologyError
from vt_dagster.sources.kafka_cluster import (
    KafkaCluster,
    TopicState,
    advice_on_reading,
    read_messages,
    reason_of,
    require_topic,
)
from vt_dagster.storage import delta, parquet
from vt_dagster.storage.asset_store import AssetStore
from vt_dagster.storage.commit_log import (
    Commit,
    Offsets,
    Shape,
    consumed_commits,
    require_not_truncated,
    require_same_log,
)
from vt_dagster.storage.spark_reader import Head, before
from vt_dagster.topology.model import Stream
from vt_dagster.topology.options import check_types

# Kafka producer


_LONGER = (
    "let token_provider give tokens that live longer than a run, or lower max_records_per_run: a run "
    "sends with the token of its start"
)
_ADVICE = {
    "Message size too large": "raise max.message.bytes of the topic; if each record is already "
    "smaller, set batch.size in the cluster's options below max.message.bytes",
    "Invalid timestamp": "raise message.timestamp.after.max.ms of the topic: the broker refuses "
    "records that are further ahead of its clock",
    "Topic authorization failed": "allow the user to write to the topic",
    "Authentication failed": "correct username and password of the cluster",
    "OAUTHBEARER token": _LONGER,
    "OAuth token not set": _LONGER,
    "Unknown topic or partition": "create the topic, or correct its name",
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
        partition; or, on failure, one row with a null partition, the number of records that the topic
        has not acknowledged and the first error.

    Raises:
        SourceError: the cluster's ``token_provider`` gave no token.
    """
    settings = _settings(cluster)
    # One token for all workers, from this process: they may lack the module of token_provider.
    give = settings.pop("oauth_cb", None)
    token = None if give is None else give("")

    def send(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        # Self-contained: workers need confluent-kafka, not this package.
        from collections import Counter

        import pyarrow as pa
        from confluent_kafka import KafkaError, KafkaException, Producer

        failed, reasons, acknowledged = list[str](), list[str](), 0

        def noticed(error: Any) -> None:
            if error.code() != KafkaError._ALL_BROKERS_DOWN:
                reasons.append(error.str())

        def answer(*columns: list[Any]) -> pa.RecordBatch:
            kinds = [("partition", pa.int32()), ("records", pa.int64()), ("error", pa.string())]
            return pa.RecordBatch.from_arrays(
                [pa.array(c, kind) for c, (_, kind) in zip(columns, kinds, strict=True)],
                schema=pa.schema(kinds),
            )

        login = {} if token is None else {"oauth_cb": lambda _: token}
        try:
            producer = Producer({**settings, **login, "error_cb": noticed})
        except KafkaException as error:  # the token has expired
            yield answer([None], [sum(b.num_rows for b in batches)], [error.args[0].str()])
            return

        def delivered(error: Any, _: Any) -> None:
            nonlocal acknowledged
            if error is None:
                acknowledged += 1
            elif error.code() == KafkaError._MSG_TIMED_OUT and reasons:
                failed.append(f"{error.str()} ({reasons[-1]})")
            else:
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
            failed.append(f"records not acknowledged within 90 s: {len(producer)}")
        producer.purge()
        poll(0)
        if failed:
            yield answer([None], [sent.total() - acknowledged], [failed[0]])
        else:
            yield answer([*sent], [*sent.values()], [None] * len(sent))

    return send


def _settings(cluster: KafkaCluster) -> dict[str, Any]:
    hidden = ("logger", "log_level")
    given = {name: value for name, value in cluster.client_settings().items() if name not in hidden}
    defaults = {"message.max.bytes": 1_000_000_000, "delivery.timeout.ms": 60000}
    own = {"enable.idempotence": True, "enable.gapless.guarantee": True, "linger.ms": 20}
    return {**defaults, **given, **own, "partitioner": "murmur2_random", "log_level": 0}


# Kafka sink


HEADER = "vt_dagster"
"""The header of each published record: ``asset/partition/offset/log``, with the record's partition and
offset in the source log and that log's id. A replay or restatement creates a log with another id, since
its offsets refer to other records. An asset of the same name in another warehouse also has another
id."""

_SENT = "partition int, records long"
_TOPIC = "topic "
"""Prefix of topic names in a commit's ``inputs``."""
_LAST_KEY, _LAST_OFFSET, _HOME = "_last_key", "_last_offset", "_home"


@dataclass(frozen=True)
class KafkaSink:
    """A topic to which the records of a log are published.

    The message's key is the JSON object of the key columns. Its value is the JSON object of all columns
    of the schema, null for a tombstone. Its timestamp is the record's in milliseconds, rounded down;
    it may be before 1970. Records of one key keep their order as long as the topic keeps its number of
    partitions.

    Args:
        cluster: the cluster.
        topic: an existing topic. With ``cleanup.policy=compact``, a table's topic keeps the latest
            rows.
        max_records_per_run: the limit of a run.
        at_epoch: the handling of a record with the timestamp 1970-01-01T00:00:00.000, which Kafka's
            client would replace by the current time. ``refuse`` (default): the run fails before it
            sends a record. ``one_millisecond_later``: sends it with the timestamp 00:00:00.001.

    Raises:
        TopologyError: ``topic``, ``at_epoch`` or ``max_records_per_run`` is not valid.
    """

    cluster: KafkaCluster
    topic: str
    max_records_per_run: int = 1_000_000
    at_epoch: Literal["refuse", "one_millisecond_later"] = "refuse"

    def __post_init__(self) -> None:
        check_types(self, type(self).__name__)
        require_topic(self.topic, TopologyError)
        if self.at_epoch not in ("refuse", "one_millisecond_later"):
            raise TopologyError(
                f"{self.describe()}: at_epoch must be 'refuse' or 'one_millisecond_later', got "
                f"{self.at_epoch!r}"
            )
        if self.max_records_per_run < 1:
            raise TopologyError(
                f"{self.describe()}: max_records_per_run must be 1 or more, got "
                f"{self.max_records_per_run}"
            )

    def describe(self) -> str:
        return f"the Kafka topic {self.topic}"


class Publication:
    """The publication of a log to a topic, with its progress under ``warehouse/name``.

    Args:
        name: of the publication.
        node: the stream or table whose log is published.
        spark: a session, or a function that returns one on first use.
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
        self._target = f"{_TOPIC}{sink.topic}"
        self._store = AssetStore(warehouse, node, spark)

    def head(self) -> Commit | None:
        """Returns the last commit; None before the first. Does not use Spark."""
        found = delta.last_commit(self._log_path)
        return None if found is None else Commit.model_validate(found[1])

    def run(self, run_id: str | None = None, from_start: bool = False) -> Commit | None:
        """Publishes the new records of the log. Returns the commit, or None without new records.

        Args:
            from_start: publish the log from its first record, even if it was published before. Needed
                when the log or the topic has been replaced.

        Raises:
            RecordsGoneError: the topic was deleted and recreated, or truncated.
            StorageError: the log was replaced or is gone; or a record has a timestamp that Kafka's
                client cannot send. Nothing was sent.
            SourceError: the cluster does not answer, or rejects records.
            ConcurrentRunError: another run of the publication committed at the same time.
        """
        before, head = self.head(), self._store.head()
        if head is None:
            self._require_log(before, None)
            return None
        if not from_start:
            self._require_log(before, head.commit)
            # The same log id may still be a log restored from a backup.
            require_same_log(self.name, self.node.name, before, head.commit, self._store.attempt_of)
        topic = self._topic()
        if before is not None and not from_start:
            self._require_topic(before, topic)
        done = Offsets() if before is None or from_start else before.inputs.get(self.node.name, {})
        if all(done.get(p, 0) >= e for p, e in head.commit.next_offset.items()):
            return None
        require_not_truncated(self.name, self.node.name, done, head.commit)
        ends = self._bounded(done, head.commit.next_offset)
        rows = self._rows(head, done, ends)
        self._require_times(rows)
        messages = self._messages(rows, head.commit.log)
        arrived = self._arrived(self._since(before, topic), topic.high_watermarks, head.commit.log)
        if arrived is not None:
            # Records of a key arrive in order, so all records up to the last one have arrived. The
            # topic may have deleted some since; sent again, they would follow newer records of the key.
            there = (F.col(_HOME) == F.col(PARTITION)) & (F.col(_LAST_KEY) == F.col("key"))
            there &= F.col(_LAST_OFFSET) >= F.col(OFFSET)
            messages = messages.join(arrived, there, "left_anti")
        counted = self._send(messages)
        after = self._topic()
        if after.id != topic.id:
            raise RecordsGoneError(
                f"{self.name}: topic {self.sink.topic} was deleted and recreated while records were "
                f"sent to it (its id was {topic.id}, now {after.id}): the old topic has some of them. "
                "Nothing was committed: run again"
            )
        inputs = {} if before is None else before.inputs
        topics = {name: ends for name, ends in inputs.items() if name.startswith(_TOPIC)}
        commit = Commit(
            asset=self.name,
            batch=1 if before is None else before.batch + 1,
            attempt=self._store.new_attempt(),
            shape=Shape(kind="stream", key=list(self.node.key)),
            logs={self.node.name: head.commit.log},
            consumed=consumed_commits({self.node.name: head.commit}),
            run_id=run_id,
            taken={self.node.name: {p: (done.get(p, 0), e) for p, e in ends.items()}},
            inputs={self.node.name: {**done, **ends}, **topics, self._target: after.high_watermarks},
            topics={self.sink.topic: after.id},
            counts={
                "in": sum(e - done.get(p, 0) for p, e in ends.items()),
                "published": sum(counted.values()),
            },
            reads={f"{self.node.name}/log": head.version},
        )
        log = self._store.spark.createDataFrame(sorted(counted.items()), _SENT)
        parquet.write(
            log, self._log_path, document=commit.model_dump(), batch=commit.batch, asset=self.name
        )
        return commit

    # -- checks ----------------------------------------------------------------------------------

    def _require_log(self, before: Commit | None, log: Commit | None) -> None:
        """Checks that the log is the published one. Older commits without a log id pass."""
        if before is None:
            return
        if log is None:
            raise StorageError(
                f"{self.name}: expected the log of {self.node.name}, which batch {before.batch} has "
                f"published, but it is gone; put it back, or remove {self._log_path} too to publish "
                "the recreated log from its start"
            )
        known = before.logs.get(self.node.name, log.log)
        if known != log.log:
            raise StorageError(
                f"{self.name}: expected the log of {self.node.name} that batch {before.batch} has "
                f"published, got another one (it was {known}, now {log.log}): it was replayed, "
                "restated or swapped, and its offsets refer to other records. Nothing was sent. "
                f"{self._way_out()}"
            )

    def _require_topic(self, before: Commit, topic: TopicState) -> None:
        """Checks that the topic is the one of the last commit, and was not truncated."""
        name, fault = self.sink.topic, ""
        if name not in before.topics:
            fault = (
                f"the topic is {name}, but batch {before.batch} was sent to {', '.join(before.topics)}"
            )
        elif before.topics[name] != topic.id:
            fault = (
                f"topic {name} was deleted and recreated since batch {before.batch} (its id was "
                f"{before.topics[name]}, now {topic.id})"
            )
        else:
            sent = before.inputs.get(self._target, {})
            cut = {p: end for p, end in sent.items() if topic.high_watermarks.get(p, 0) < end}
            if cut:
                partition, end = min(cut.items())
                fault = (
                    f"topic {name}, partition {partition}, ended at offset {end} after batch "
                    f"{before.batch}, and ends at {topic.high_watermarks.get(partition, 0)} now: it "
                    "was truncated or restored"
                )
        if fault:
            raise RecordsGoneError(
                f"{self.name}: {fault}. The records published before are gone, and nothing was sent. "
                f"{self._way_out()}"
            )

    def _way_out(self) -> str:
        return (
            f"Run {self.name} once with from_start: true in its config to publish the whole current "
            f"log of {self.node.name}, or publish it under another name to another topic"
        )

    def _require_times(self, rows: DataFrame) -> None:
        """Refuses timestamps of 0 ms, which the client treats as unset. Spark job: reads the timestamps
        only."""
        if self.sink.at_epoch != "refuse":
            return
        at_epoch = F.unix_millis(TIMESTAMP) == 0
        found = rows.where(at_epoch).select(PARTITION, OFFSET).orderBy(PARTITION, OFFSET).limit(1)
        first = found.collect()
        if first:
            partition, offset = first[0]
            raise StorageError(
                f"{self.name}: expected no record with the time 1970-01-01T00:00:00.000, got one "
                f"in the log of {self.node.name}, partition {partition}, offset {offset}: Kafka's "
                "client would send it with the current time, so nothing was sent. Correct the time at "
                "the source, or set KafkaSink(at_epoch='one_millisecond_later')"
            )

    # -- what to send ----------------------------------------------------------------------------

    def _topic(self) -> TopicState:
        return self.sink.cluster.topics([self.sink.topic])[self.sink.topic]

    def _bounded(self, done: Offsets, ends: Offsets) -> Offsets:
        new = {p: e - done.get(p, 0) for p, e in ends.items() if e > done.get(p, 0)}
        share = max(1, self.sink.max_records_per_run // max(1, len(new)))
        return {p: done.get(p, 0) + min(n, share) for p, n in new.items()}

    def _rows(self, head: Head, done: Offsets, ends: Offsets) -> DataFrame:
        return self._store.log(done, head).where(before(ends))

    def _since(self, before: Commit | None, topic: TopicState) -> Offsets:
        """Returns the first offset by partition of the topic that may hold uncommitted records."""
        sent: Offsets = {}
        if before is not None and before.topics == {self.sink.topic: topic.id}:
            sent = before.inputs.get(self._target, {})
        # In a truncated partition all records may be uncommitted.
        known = {p: s for p, s in sent.items() if s <= topic.high_watermarks.get(p, 0)}
        return {p: max(first, known.get(p, first)) for p, first in topic.earliest.items()}

    def _arrived(self, since: Offsets, now: Offsets, log: str) -> DataFrame | None:
        """Returns the last offset in the topic of each key and partition of the log; None = no
        messages.

        Args:
            since: the topic's first offsets to read (inclusive); ``now``: the last ones (exclusive).
            log: the id of the log.
        """
        ranges = {p: (since[p], end) for p, end in now.items() if end > since[p]}
        if not ranges:
            return None
        # A record that follows one of another producer's open transaction is hidden from readers of
        # committed records, but it is in the topic.
        messages = read_messages(
            self.sink.cluster,
            self._store.spark,
            {self.sink.topic: ranges},
            headers=True,
            uncommitted=True,
        )
        # Other producers may write to the topic, even with a header of this name.
        ours = F.try_element_at(F.filter("headers", lambda h: h["key"] == HEADER), F.lit(1))
        parts = F.split(ours["value"].cast("string"), "/")
        places = messages.where((F.get(parts, 0) == self.node.name) & (F.get(parts, 3) == log)).select(
            F.get(parts, 1).try_cast("int").alias(_HOME),
            F.col("key").cast("string").alias(_LAST_KEY),
            F.get(parts, 2).try_cast("long").alias(_LAST_OFFSET),
        )
        return places.groupBy(_HOME, _LAST_KEY).agg(F.max(_LAST_OFFSET).alias(_LAST_OFFSET))

    def _messages(self, rows: DataFrame, log: str) -> DataFrame:
        node, millis = self.node, F.unix_millis(TIMESTAMP)
        if self.sink.at_epoch == "one_millisecond_later":
            millis = F.when(millis == 0, 1).otherwise(millis)
        return rows.select(
            PARTITION,
            OFFSET,
            as_json(node.key, nulls=True).alias("key"),
            F.when(~F.col(IS_TOMBSTONE), as_json(node.schema.names, nulls=True)).alias("value"),
            millis.alias("millis"),
            F.concat_ws("/", F.lit(node.name), PARTITION, OFFSET, F.lit(log)).alias("place"),
        )

    def _send(self, messages: DataFrame) -> dict[int, int]:
        """Sends messages. Returns their number by partition of the log.

        Plan: one shuffle and sort by partition. Spark's own Kafka sink cannot set a record's timestamp,
        so Arrow batches go to librdkafka's idempotent producer, which keeps their order. Errors come
        back as rows: Spark would retry a failed task, which would send all its records again.
        """
        ordered = messages.repartition(PARTITION).sortWithinPartitions(PARTITION, OFFSET)
        send = producing(self.sink.cluster, self.sink.topic, HEADER)
        sent = ordered.mapInArrow(send, f"{_SENT}, error string")
        try:
            acknowledged = sent.groupBy(PARTITION).agg(F.sum("records"), F.max("error")).collect()
        except (PySparkException, Py4JJavaError) as error:
            reason = reason_of(error)
            if reason is None:
                raise
            raise SourceError(
                f"{self.name}: expected to read which records the topic {self.sink.topic} at "
                f"{self.sink.cluster.servers} already has, got: {reason}; nothing was committed. Run "
                f"again, and {advice_on_reading(reason)}"
            ) from error
        for _, count, error in acknowledged:
            if error is not None:
                raise SourceError(
                    f"{self.name}: expected the topic {self.sink.topic} at {self.sink.cluster.servers} "
                    f"to accept all records, but it rejected {count:,} or more: {error}. Nothing "
                    "was committed; the next run skips the records that the topic already has. First "
                    f"{advice_for(error)}"
                )
        return {partition: count for partition, count, _ in acknowledged}


__all__ = ["HEADER", "KafkaSink", "Publication"]
