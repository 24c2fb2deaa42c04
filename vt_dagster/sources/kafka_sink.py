"""Publishes a log to a Kafka topic: resumable, at least once, with a header that tells repeats apart.

How far a publication has come is in its own Delta log, as of any asset. A run that died after some
records went out left them in the topic without a commit. Each record carries its place in the log, so
the next run looks at what the topic got since the last commit and leaves those out. What no reader can
tell is a record still on its way from a process that was just killed: so the promise is *at least
once*, and the header ``vt_dagster`` is the key by which a consumer can drop a repeat.

A position means something only together with the log and the topic that it is a position in. So the
commit also says which log and which topic these are, and a run that finds others is refused.
"""

from __future__ import annotations

import posixpath
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

from vt_dagster.columns import IS_TOMBSTONE, OFFSET, PARTITION, TIMESTAMP
from vt_dagster.errors import RecordsGoneError, SourceError, StorageError, TopologyError
from vt_dagster.sources.kafka_cluster import KafkaCluster, TopicState
from vt_dagster.sources.kafka_messages import read_messages
from vt_dagster.sources.kafka_producer import advice_for, producing
from vt_dagster.storage import delta, parquet
from vt_dagster.storage.asset_store import AssetStore
from vt_dagster.storage.commit_log import Commit, Offsets, Shape
from vt_dagster.storage.log_snapshot import Head
from vt_dagster.storage.log_truncation import consumed_commits, require_not_truncated, require_same_log
from vt_dagster.topology.model import Stream

HEADER = "vt_dagster"
"""The header of each published record: ``asset/partition/offset/log``, its place in the log that it
comes from, and that log's id. A replay and a restatement make another log, whose offsets mean other
records, and an asset of the same name in another warehouse has another one."""

_SENT = "partition int, records long"
_TOPIC = "topic "
"""Stands before the name of a topic among the inputs of a commit."""
_LAST_KEY, _LAST_OFFSET, _HOME = "_last_key", "_last_offset", "_home"


@dataclass(frozen=True)
class KafkaSink:
    """A topic that takes the records of a log.

    A record's key is the JSON object of its key columns, its value the JSON object of all columns of
    the schema, null for a tombstone; its timestamp is the record's, in whole milliseconds (rounded
    down), also where it is before 1970. Records of one key stay in order as long as the topic keeps
    its number of partitions.

    Args:
        cluster: how to reach it.
        topic: must be there. With ``cleanup.policy=compact`` a table's topic keeps its latest rows.
        max_records_per_run: bounds a run.
        at_epoch: what becomes of a record whose time is 1970-01-01T00:00:00.000, to which Kafka's
            client gives the current time. ``refuse`` (default): the run fails before anything is sent.
            ``one_millisecond_later``: it is sent with the time 00:00:00.001.

    Raises:
        TopologyError: ``at_epoch`` or ``max_records_per_run`` has another value.
    """

    cluster: KafkaCluster
    topic: str
    max_records_per_run: int = 1_000_000
    at_epoch: Literal["refuse", "one_millisecond_later"] = "refuse"

    def __post_init__(self) -> None:
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
        self._target = f"{_TOPIC}{sink.topic}"
        self._store = AssetStore(warehouse, node, spark)

    def head(self) -> Commit | None:
        """The last commit; None before the first. Does not use Spark."""
        found = delta.last_commit(self._log_path)
        return None if found is None else Commit.model_validate(found[1])

    def run(self, run_id: str | None = None, from_start: bool = False) -> Commit | None:
        """Publishes what is new in the log; None where nothing is.

        Args:
            from_start: publish the log from its first record on, whatever was published of it before:
                where the log or the topic is another one than before.

        Raises:
            RecordsGoneError: the topic was deleted and made anew, or cut off.
            StorageError: the log is another one than was published, or is gone; or a record has a time
                that Kafka's client cannot send. Nothing was sent.
            SourceError: the cluster does not answer, or does not take records.
            ConcurrentRunError: another run of the publication committed at the same time.
        """
        before, head = self.head(), self._store.head()
        if head is None:
            self._require_log(before, None)
            return None
        if not from_start:
            self._require_log(before, head.commit)
            # It may be the same log, put back from a backup.
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
        arrived = self._arrived(self._since(before, topic), topic.ends, head.commit.log)
        if arrived is not None:
            # Records of a key are taken in their order, so the ones before the last have arrived too,
            # though the topic may not have them any more: sent again they would come after it.
            there = (F.col(_HOME) == F.col(PARTITION)) & (F.col(_LAST_KEY) == F.col("key"))
            there &= F.col(_LAST_OFFSET) >= F.col(OFFSET)
            messages = messages.join(arrived, there, "left_anti")
        counted = self._send(messages)
        after = self._topic()
        topics = {} if before is None else {t: e for t, e in before.inputs.items() if _is_topic(t)}
        commit = Commit(
            asset=self.name,
            batch=1 if before is None else before.batch + 1,
            attempt=self._store.new_attempt(),
            shape=Shape(kind="stream", key=list(self.node.key)),
            logs={self.node.name: head.commit.log},
            consumed=consumed_commits({self.node.name: head.commit}),
            run_id=run_id,
            taken={self.node.name: {p: (done.get(p, 0), e) for p, e in ends.items()}},
            inputs={self.node.name: {**done, **ends}, **topics, self._target: after.ends},
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

    # -- whether to go on ------------------------------------------------------------------------

    def _require_log(self, before: Commit | None, log: Commit | None) -> None:
        """The log is the one that was published. Of commits from before that was noted it is taken for
        it."""
        if before is None:
            return
        if log is None:
            raise StorageError(
                f"{self.name}: expected the log of {self.node.name}, which batch {before.batch} has "
                f"published, but it is gone; put it back, or remove {self._log_path} too, and what is "
                "made anew is published from its start"
            )
        known = before.logs.get(self.node.name, log.log)
        if known != log.log:
            raise StorageError(
                f"{self.name}: the log of {self.node.name} is another one than in batch "
                f"{before.batch} (it was {known}, now {log.log}): it was replayed, restated or "
                f"swapped, and its offsets mean other records. Nothing was sent. {self._way_out()}"
            )

    def _require_topic(self, before: Commit, topic: TopicState) -> None:
        """The topic is the one that was published to, with all that it had."""
        name, said = self.sink.topic, ""
        if name not in before.topics:
            said = (
                f"the topic is {name}, but batch {before.batch} was sent to {', '.join(before.topics)}"
            )
        elif before.topics[name] != topic.id:
            said = (
                f"topic {name} was deleted and created anew since batch {before.batch} (its id was "
                f"{before.topics[name]}, now {topic.id})"
            )
        else:
            sent = before.inputs.get(self._target, {})
            cut = {p: end for p, end in sent.items() if topic.ends.get(p, 0) < end}
            if cut:
                partition, end = min(cut.items())
                said = (
                    f"topic {name}, partition {partition}, ended at offset {end} after batch "
                    f"{before.batch}, and ends at {topic.ends.get(partition, 0)} now: it was truncated "
                    "or restored"
                )
        if said:
            raise RecordsGoneError(
                f"{self.name}: {said}. What was published before is not there, and nothing was sent. "
                f"{self._way_out()}"
            )

    def _way_out(self) -> str:
        return (
            f"Run {self.name} once with from_start: true in its config, which publishes the whole log "
            f"of {self.node.name} as it is now; or publish it under another name to another topic"
        )

    def _require_times(self, rows: DataFrame) -> None:
        """Refuses times that the client takes for none. Spark job: the times of the rows alone."""
        if self.sink.at_epoch != "refuse":
            return
        at_epoch = F.unix_millis(TIMESTAMP) == 0
        found = rows.where(at_epoch).select(PARTITION, OFFSET).orderBy(PARTITION, OFFSET).limit(1)
        first = found.collect()
        if first:
            partition, offset = first[0]
            raise StorageError(
                f"{self.name}: expected records of other times than 1970-01-01T00:00:00.000, got one "
                f"in the log of {self.node.name}, partition {partition}, offset {offset}: Kafka's "
                "client would send it with the current time, so nothing was sent. Correct the time at "
                "the source, or declare KafkaSink(at_epoch='one_millisecond_later')"
            )

    # -- what to send ----------------------------------------------------------------------------

    def _topic(self) -> TopicState:
        return self.sink.cluster.topics([self.sink.topic])[self.sink.topic]

    def _bounded(self, done: Offsets, ends: Offsets) -> Offsets:
        new = {p: e - done.get(p, 0) for p, e in ends.items() if e > done.get(p, 0)}
        share = max(1, self.sink.max_records_per_run // max(1, len(new)))
        return {p: done.get(p, 0) + min(n, share) for p, n in new.items()}

    def _rows(self, head: Head, done: Offsets, ends: Offsets) -> DataFrame:
        rows, upto = self._store.log(done, head), F.lit(False)
        for partition, end in ends.items():
            upto = upto | ((F.col(PARTITION) == partition) & (F.col(OFFSET) < end))
        return rows.where(upto)

    def _since(self, before: Commit | None, topic: TopicState) -> Offsets:
        """From where on the topic may have records that no commit tells of."""
        sent: Offsets = {}
        if before is not None and before.topics == {self.sink.topic: topic.id}:
            sent = before.inputs.get(self._target, {})
        # Of a topic that was truncated all may be such.
        known = {p: s for p, s in sent.items() if s <= topic.ends.get(p, 0)}
        return {p: max(first, known.get(p, first)) for p, first in topic.earliest.items()}

    def _arrived(self, since: Offsets, now: Offsets, log: str) -> DataFrame | None:
        """Of each key and partition of a log the last record that the topic has got; None = the topic
        has got nothing.

        Args:
            since: the first offsets of the topic that are looked at; ``now``: after the last ones.
            log: the id of the log.
        """
        ranges = {p: (since[p], end) for p, end in now.items() if end > since[p]}
        if not ranges:
            return None
        messages = read_messages(
            self.sink.cluster, self._store.spark, {self.sink.topic: ranges}, headers=True
        )
        # Others may write to the topic too, also under a header of this name.
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
            _json(list(node.key)).alias("key"),
            F.when(~F.col(IS_TOMBSTONE), _json(node.schema.names)).alias("value"),
            millis.alias("millis"),
            F.concat_ws("/", F.lit(node.name), PARTITION, OFFSET, F.lit(log)).alias("place"),
        )

    def _send(self, messages: DataFrame) -> dict[int, int]:
        """Sends messages; how many of each partition of the log.

        Plan: one shuffle and sort by partition. Spark's own Kafka sink cannot set a record's timestamp,
        so Arrow batches go to librdkafka's idempotent producer, which keeps their order. What the
        broker refuses comes back as a row: a task that fails may be tried again, and would send all
        that it has once more.
        """
        ordered = messages.repartition(PARTITION).sortWithinPartitions(PARTITION, OFFSET)
        send = producing(self.sink.cluster, self.sink.topic, HEADER)
        sent = ordered.mapInArrow(send, f"{_SENT}, error string")
        told = sent.groupBy(PARTITION).agg(F.sum("records"), F.max("error")).collect()
        for _, count, error in told:
            if error is not None:
                raise SourceError(
                    f"{self.name}: expected the topic {self.sink.topic} at {self.sink.cluster.servers} "
                    f"to take all records, got {count:,} or more that it did not take: {error}. The "
                    "publication has not moved on, and the next run leaves out what the topic has "
                    f"taken; but first {advice_for(error)}"
                )
        return {partition: count for partition, count, _ in told}


def _is_topic(name: str) -> bool:
    return name.startswith(_TOPIC)


def _json(columns: list[str]) -> Column:
    return F.to_json(F.struct(*columns), {"ignoreNullFields": "false"})


__all__ = ["HEADER", "KafkaSink", "Publication"]
