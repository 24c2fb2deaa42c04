"""Kafka topics as a source: each record is consumed once, by its offset.

The position is in the asset's own commits, not in a consumer group. A run reads ranges of offsets that
are pinned when it starts; only committed records of transactions are in them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, Literal

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import ArrayType, BinaryType, StringType, StructField, StructType

from vt_dagster.columns import ARRIVAL, OFFSET, PARTITION, TIMESTAMP
from vt_dagster.core.source_records import (
    DELETED,
    POSITION,
    RAW,
    RAW_KEY,
    REASON,
    RECORD_TIME,
    RESTATES,
    SOURCE,
    SOURCE_RECORDED_AT,
    TRUNCATES,
    UNCHANGED,
)
from vt_dagster.errors import RecordsGoneError, SourceError, TopologyError
from vt_dagster.sources.base import News, require_limits, require_source_recorded_at
from vt_dagster.sources.kafka_cluster import KafkaCluster, TopicState
from vt_dagster.sources.kafka_messages import bounded, in_order_of_arrival, lost, read_messages
from vt_dagster.sources.message_formats import Decoded, Format, Json
from vt_dagster.sources.nested_values import require_units
from vt_dagster.sources.pinned_topics import APPEND_TIME, WORDS, PinnedTopics
from vt_dagster.storage.commit_log import Commit, Offsets, Ranges

HEADERS = ArrayType(StructType([StructField("key", StringType()), StructField("value", BinaryType())]))
"""The type of a column that takes a record's headers."""
_UNWRAPPED = StructField("__deleted", StringType())
"""What Debezium's transform ExtractNewRecordState adds to a row (``delete.handling.mode=rewrite``)."""
_APPENDED_AT = "if(timestampType = 1, timestamp, null)"
"""Each batch of messages says whose time it has: Kafka's LOG_APPEND_TIME is 1."""


@dataclass(frozen=True)
class KafkaSource:
    """One or several topics of a Kafka cluster.

    A record's ``partition`` in the log is the one that it has in its topic; of several topics the
    partitions of the same number are one, as in Kafka Streams, and a run takes from them the record
    with the smallest time first. A message without a value is a tombstone, and so is a JSON object with
    ``"__deleted": "true"``, unless the schema has such a column.

    Columns of the schema are taken from the message's value by name. Columns of the key are taken from
    the message's key where ``key`` says how to read it (a tombstone has nowhere else to have them).
    Without a column ``timestamp`` in the schema the record's timestamp is the message's own, or that
    of its source with :class:`Debezium`.

    Args:
        cluster: how to reach it.
        topic: the name, or several names.
        value: how the message's value is read.
        key: how its key is read; None = it is not.
        headers: the column, of type ``HEADERS``, that takes the message's headers; None = none does.
        start: where the first run begins: ``earliest``, ``latest``, a time (inclusive), or offsets
            ``{topic: {partition: offset}}``. Partitions that are not named, or added later, begin at 0.
        max_records_per_run: bounds a run, fairly over partitions; None = all that are there.
        max_bad_share: a run with a larger share of quarantined records fails before its commit.
        max_clock_skew: how far in the future a timestamp may lie, by this machine's clock.
        recorded_at: the time of record of a message. ``run``: when its run commits. ``append_time``:
            when the broker appended it, of topics with ``message.timestamp.type=LogAppendTime``;
            what is older than that setting is quarantined. Else a column of type timestamp; a tombstone
            without it has the message's time. A message without it, or further ahead than
            ``max_clock_skew``, is quarantined. It does not go back: not before what was taken of the
            partition earlier, or by an earlier run, nor after the run.
    """

    cluster: KafkaCluster
    topic: str | Sequence[str]
    value: Format = field(default_factory=Json)
    key: Format | None = None
    headers: str | None = None
    start: Literal["earliest", "latest"] | datetime | Mapping[str, Mapping[int, int]] = field(
        default="earliest", hash=False
    )
    max_records_per_run: int | None = 1_000_000
    max_bad_share: float = 0.1
    max_clock_skew: timedelta = field(default=timedelta(days=1))
    recorded_at: str = "run"

    own_partitions = True
    gives_timestamp = True
    assumes_deletions = True

    @property
    def orders_changes(self) -> bool:
        """Whether the last message of a key is what the table holds that they are changes of."""
        return self.value.orders_changes

    @property
    def restates(self) -> bool:
        """Whether messages may say what is known."""
        return self.value.orders_changes

    def __post_init__(self) -> None:
        topics = (self.topic,) if isinstance(self.topic, str) else tuple(self.topic)
        object.__setattr__(self, "topic", topics)
        if not topics or len(set(topics)) < len(topics):
            raise SourceError(f"expected one or several different topics, got {list(topics)}")
        require_limits(self.max_bad_share, self.max_clock_skew)
        if self.max_records_per_run is not None and self.max_records_per_run < 1:
            raise SourceError(f"max_records_per_run must be 1 or more, got {self.max_records_per_run}")
        timed = isinstance(self.start, datetime) and self.start.tzinfo is not None
        placed = isinstance(self.start, Mapping) and set(self.start) <= set(topics)
        if not (timed or placed) and self.start not in ("earliest", "latest"):
            raise SourceError(
                "start must be 'earliest', 'latest', a datetime with a time zone or offsets of the "
                f"topics {list(topics)}, got {self.start!r}"
            )

    @property
    def topics(self) -> tuple[str, ...]:
        return tuple(self.topic)

    def describe(self) -> str:
        """What is read, for descriptions and messages."""
        names = ", ".join(self.topics)
        return f"records of the Kafka topic{'s' if len(self.topics) > 1 else ''} {names}"

    def check(self, name: str, key: Sequence[str], schema: StructType) -> None:
        """Refuses columns that no message can give.

        Raises:
            TopologyError: names the column.
        """
        require_source_recorded_at(name, self.recorded_at, WORDS, schema)
        keys = StructType([f for f in schema.fields if f.name in key])
        for part, format_, wanted in (("key", self.key, keys), ("value", self.value, schema)):
            if format_ is not None and not format_.columns(wanted):
                raise TopologyError(
                    f"{name}: the message's {part} is read as {format_}, which gives none of the "
                    f"columns {wanted.names}; name one of them"
                )
            if format_ is not None:
                self._require_types(name, part, format_, wanted)
        if self.headers is None:
            return
        there = schema[self.headers].dataType if self.headers in schema.names else None
        if there is None or there.simpleString() != HEADERS.simpleString():
            got = "no such column" if there is None else there.simpleString()
            raise TopologyError(
                f"{name}: expected a column {self.headers!r} of type {HEADERS.simpleString()} for the "
                f"headers, got {got}"
            )

    def _require_types(self, name: str, part: str, format_: Format, wanted: StructType) -> None:
        own = StructType([f for f in wanted.fields if f.name != self.headers])
        if odd := format_.misfits(own):
            raise TopologyError(
                f"{name}: no {part} of a message can give these columns: {'; '.join(odd)}; correct the "
                "columns' types, or how the messages are read"
            )
        require_units(name, getattr(format_, "timestamps", None), schema=own)

    @property
    def timestamps(self) -> object:
        """The unit of numbers in columns of times, where the value's format says one."""
        return getattr(self.value, "timestamps", None)

    # -- offsets ---------------------------------------------------------------------------------

    def pin(
        self,
        before: Commit | None,
        wanted: Ranges | None = None,
        accept_gap: bool = False,
        *,
        consumed: Mapping[str, Any] = {},
    ) -> PinnedTopics:
        """What a run takes after a commit. Does not use Spark.

        Args:
            before: the asset's last commit; None = there is none.
            wanted: ranges that were asked for: the run goes up to their ends, and begins at the
                position all the same, so that nothing is skipped or taken twice. None = all there is.
            accept_gap: go on where records were lost: removed by the topic's retention, or with the
                whole topic.
            consumed: of no use; offsets tell.

        Raises:
            RecordsGoneError: the topic has lost records that were not consumed.
            SourceError: the cluster does not answer, or has no such topic; a topic has no append time
                where that is asked for.
        """
        states = self.cluster.topics(self.topics)
        if self.recorded_at == APPEND_TIME:
            self._require_append_time()
        gaps: Ranges = {}
        ranges = {topic: self._ranges(topic, state, before, gaps) for topic, state in states.items()}
        if gaps and not accept_gap:
            raise RecordsGoneError(
                f"{lost(gaps, states, before)}. Run once with accept_gap=true to go on without "
                "them, which the commit then records; or reprocess into a new asset"
            )
        if wanted is not None:
            ranges = {
                t: {
                    p: (s, max(s, min(wanted.get(t, {}).get(p, (0, s))[1], e)))
                    for p, (s, e) in of.items()
                }
                for t, of in ranges.items()
            }
        ids = {topic: state.id for topic, state in states.items()}
        ends = {topic: dict(state.ends) for topic, state in states.items()}
        taken = bounded(ranges, self.max_records_per_run)
        return PinnedTopics(self, before, taken, ids, gaps, ends)

    def news(self, before: Commit | None, consumed: Mapping[str, Any]) -> News:
        """The ranges of new offsets. Does not use Spark."""
        pinned = self.pin(before)
        ranges = pinned.records
        records = sum(e - s for some in ranges.values() for s, e in some.values())
        if before is None and not records and self.start != "earliest":
            ranges = pinned.ranges  # the position to begin at has to be committed
        config = {t: {str(p): list(r) for p, r in some.items()} for t, some in ranges.items()}
        if not config:
            return News()
        return News({"ranges": config}, f"{records + pinned.behind} offsets behind", records)

    def _require_append_time(self) -> None:
        for topic, kind in self.cluster.timestamp_types(self.topics).items():
            if kind != "LogAppendTime":
                raise SourceError(
                    f"expected message.timestamp.type=LogAppendTime of the topic {topic!r}, of which "
                    f"recorded_at='append_time' is wanted, got {kind}: its times are those of its "
                    "producers. Set it of the topic, or name a column as recorded_at"
                )

    def _ranges(
        self, topic: str, state: TopicState, before: Commit | None, gaps: Ranges
    ) -> dict[int, tuple[int, int]]:
        """All that is there after the position; what is missing in between goes to ``gaps``."""
        position: Offsets | None = None
        if before is not None and topic in before.topics:
            position = before.inputs[topic]
            if before.topics[topic] != state.id:
                gaps[topic] = {p: (offset, offset) for p, offset in position.items()}
                position = None
        first = self._first(topic, state) if position is None else position
        found: dict[int, tuple[int, int]] = {}
        for partition, end in sorted(state.ends.items()):
            start, earliest = first.get(partition, 0), state.earliest[partition]
            if start < earliest:
                gaps.setdefault(topic, {})[partition] = (start, earliest)
                start = earliest
            if start > end:
                raise RecordsGoneError(
                    f"topic {topic}, partition {partition}: consumed up to offset {start}, but the "
                    f"topic ends at {end}: it was truncated or restored; reprocess into a new asset"
                )
            found[partition] = (start, end)
        return found

    def _first(self, topic: str, state: TopicState) -> Offsets:
        if self.start == "earliest":
            return dict(state.earliest)
        if self.start == "latest":
            return dict(state.ends)
        if not isinstance(self.start, datetime):
            return dict(self.start.get(topic, {}))
        found = self.cluster.offsets_at(topic, list(state.ends), self.start)
        return {p: min(found.get(p, end), end) for p, end in state.ends.items()}

    # -- records ---------------------------------------------------------------------------------

    def read(
        self,
        spark: SparkSession,
        ranges: Mapping[str, Mapping[int, tuple[int, int]]],
        *,
        key: Sequence[str],
        schema: StructType,
    ) -> DataFrame:
        """The records of some ranges, each of which holds some.

        Plan: one scan, a Kafka consumer for each partition; of several topics also one shuffle and
        sort by partition.

        Returns:
            the schema's columns (null where a message cannot be read), ``partition``, ``_arrival``,
            ``timestamp`` (the message's, where the schema has none), ``_deleted``, ``_record_time``,
            ``_source`` (topic), ``_position`` (offset), ``_raw`` and ``_raw_key`` (BINARY),
            ``_reason``; ``_told_at``, where the append time is asked for.

        Raises:
            SourceError: a schema cannot be had.
        """
        messages = self._messages(spark, ranges)
        message, message_key = F.col(RAW), F.col(RAW_KEY)
        own = StructType([f for f in schema.fields if f.name != self.headers])
        keys = StructType([f for f in schema.fields if f.name in key])
        flat = isinstance(self.value, Json) and _UNWRAPPED.name not in own.names
        asked = StructType([*own.fields, _UNWRAPPED]) if flat else own
        value = self.value.decode(message, asked, f"{self.topics[0]}-value", "_read_value")
        absent = message.isNull()
        parsed = value.parsed
        parts: dict[str, Column] = {"_value": F.when(~absent, value.row)}
        reason = F.when(~absent, value.reason)
        if self.key is not None:
            decoded = self.key.decode(message_key, keys, f"{self.topics[0]}-key", "_read_key")
            parsed = {**parsed, **decoded.parsed}
            parts["_key"] = F.when(message_key.isNotNull(), decoded.row)
            reason = F.coalesce(reason, F.when(message_key.isNotNull(), decoded.reason))
        said = _said(value, absent, flat)
        if TRUNCATES in said:
            reason = F.when(~said[TRUNCATES], reason)
        told = F.col(RECORD_TIME)
        time = told if value.time is None else F.coalesce(value.time, told)
        if value.unchanged is not None:
            parts[UNCHANGED] = value.unchanged
        for name, one in parsed.items():
            messages = messages.withColumn(name, one)
        read = messages.withColumns({**parts, REASON: reason, RECORD_TIME: time, **said})
        good = F.col(REASON).isNull()
        # The row before a deletion says when that row was written, not when it was deleted.
        valued = good & ~F.col(DELETED)

        def column(name: str) -> Column:
            if name == self.headers:
                return F.col("headers")
            found: list[Column] = []
            if self.key is not None and name in self.key.columns(keys):
                found.append(F.col(f"_key.{name}"))
            if name in self.value.columns(own):
                found.append(F.when(good if name in key else valued, F.col(f"_value.{name}")))
            return F.coalesce(*found) if found else F.lit(None).cast(schema[name].dataType)

        columns = [column(name).alias(name) for name in schema.names]
        if TIMESTAMP not in schema.names:
            columns.append(F.col(RECORD_TIME).alias(TIMESTAMP))
        inside = [PARTITION, ARRIVAL, RECORD_TIME, SOURCE, POSITION, RAW, RAW_KEY, REASON]
        inside += [*said, *(c for c in read.columns if c in (SOURCE_RECORDED_AT, UNCHANGED))]
        return read.select(*columns, *inside)

    def _messages(
        self, spark: SparkSession, ranges: Mapping[str, Mapping[int, tuple[int, int]]]
    ) -> DataFrame:
        """The messages of some ranges, in order of arrival."""
        return in_order_of_arrival(
            read_messages(self.cluster, spark, ranges, headers=self.headers is not None).select(
                F.col("topic").alias(SOURCE),
                PARTITION,
                F.col(OFFSET).alias(POSITION),
                F.col(TIMESTAMP).alias(RECORD_TIME),
                F.col("key").alias(RAW_KEY),
                F.col("value").alias(RAW),
                *(["headers"] if self.headers is not None else []),
                *(
                    [F.expr(_APPENDED_AT).alias(SOURCE_RECORDED_AT)]
                    if self.recorded_at == APPEND_TIME
                    else []
                ),
            ),
            self.topics,
        )


def _said(value: Decoded, absent: Column, flat: bool) -> dict[str, Column]:
    """What messages say of deletions: ``_deleted``; where the format tells it, ``_restates`` and
    ``_truncates``.

    Args:
        value: what they are read as; ``absent``: whether there is nothing to read.
        flat: whether a row tells it by a field ``__deleted``.
    """
    gone = F.lit(False) if value.deleted is None else F.coalesce(value.deleted, F.lit(False))
    if flat:
        gone = F.coalesce(F.lower(value.row[_UNWRAPPED.name]) == "true", F.lit(False))
    said = {DELETED: absent | gone}
    if value.restates is not None:
        said[RESTATES] = absent | F.coalesce(value.restates, F.lit(False))
    if value.truncates is not None:
        truncates = ~absent & F.coalesce(value.truncates, F.lit(False))
        said = {name: told | truncates for name, told in said.items()} | {TRUNCATES: truncates}
    return said
