"""Kafka topics as a source: each record is consumed once, by its offset.

The consumed offsets are stored in the asset's own commits, not in a consumer group. A run pins its
offset ranges when it starts and reads only committed transactions (``read_committed``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import Any, Literal, cast

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import ArrayType, BinaryType, StringType, StructField, StructType

from vt_dagster.columns import ARRIVAL, OFFSET, PARTITION, TIMESTAMP
from vt_dagster.core.source_records import (
    DELETED,
    MOVED,
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
from vt_dagster.errors import RecordsGoneError, SourceError, TopologyError, counted
from vt_dagster.sources.base import (
    End,
    Limited,
    News,
    Repeatable,
    RepeatedRun,
    of_id,
    read_by_all_names,
    replaced,
    require_limits,
    require_source_recorded_at,
    with_source_recorded_at,
)
from vt_dagster.sources.kafka_cluster import (
    KafkaCluster,
    TopicState,
    advice_on_reading,
    bounded,
    in_order_of_arrival,
    lost,
    of_other_ids,
    reached,
    read_messages,
    reason_of,
    require_topic,
)
from vt_dagster.sources.message_formats import UNWRAPPED, Decoded, Format, Json
from vt_dagster.sources.value_reader import any_of, require_units
from vt_dagster.storage.asset_store import AssetStore
from vt_dagster.storage.commit_log import Commit, Offsets, Ranges, commits
from vt_dagster.storage.spark_reader import Head
from vt_dagster.topology.model import Stream
from vt_dagster.topology.options import check_types

# Pinned topics


_TRUNCATED = "vt_dagster: truncated in one of several partitions"
APPEND_TIME = "append_time"
WORDS = ("run", APPEND_TIME)
"""Values of ``recorded_at`` that are not column names."""


@dataclass(frozen=True)
class PinnedTopics(Limited):
    """The offset ranges that a run reads.

    Args:
        source: the topics.
        before: the asset's last commit; None = no commit yet.
        ranges: ``[start, end)`` of every partition, also empty ones.
        ids: the topic ids.
        gaps: accepted ranges of lost offsets; of a recreated topic an empty range at the consumed
            offset, since the number of lost records is unknown.
        ends: the end offset of each partition when the run started (exclusive).
        held_back: the number of offsets after these: records in an open transaction, or behind one.
    """

    source: KafkaSource
    before: Commit | None
    ranges: Ranges
    ids: dict[str, str]
    gaps: Ranges
    ends: dict[str, Offsets]
    held_back: int

    bytes = None

    @property
    def records(self) -> Ranges:
        """The non-empty ranges."""
        some = {t: {p: r for p, r in of.items() if r[1] > r[0]} for t, of in self.ranges.items()}
        return {t: of for t, of in some.items() if of}

    @property
    def taken(self) -> Ranges:
        """The non-empty ranges; or all ranges if the commit must record positions or gaps even without
        records."""
        # The first commit stores the start offsets even without records: else ``latest`` would move on.
        new = self.before is None or self.gaps or set(self.ids) - set(self.before.topics)
        return self.ranges if new else self.records

    @property
    def empty(self) -> bool:
        return not self.taken

    @property
    def places(self) -> dict[int, tuple[int, int]] | None:
        """The ranges of the only topic; of several topics None, since their records are merged."""
        return self.ranges[self.source.topics[0]] if len(self.source.topics) == 1 else None

    def read(self, spark: SparkSession, node: Stream) -> DataFrame:
        read, records = self.source.read, self.records
        rows = read_by_all_names(node, lambda key, all_: read(spark, records, key=key, schema=all_))
        if TRUNCATES in rows.columns and sum(len(some) for some in self.ranges.values()) > 1:
            refused = F.raise_error(F.lit(_TRUNCATED)).cast("boolean")
            rows = rows.withColumn(TRUNCATES, F.when(F.col(TRUNCATES), refused).otherwise(False))
        return with_source_recorded_at(rows, self.source.recorded_at, WORDS)

    def consumed(self) -> None:
        """Returns None: the commit holds the offsets.

        Raises:
            RecordsGoneError: a topic was recreated since the run started, so the run has perhaps read
                records of the new topic at offsets of the old one.
        """
        if not self.records:
            return
        now = self.source.cluster.topic_ids(list(self.ids))
        changed = [topic for topic, known in self.ids.items() if now[topic] != known]
        if changed:
            raise RecordsGoneError(
                f"topic {changed[0]} was deleted and recreated while the run read it (its id was "
                f"{self.ids[changed[0]]}, now {now[changed[0]]}); nothing was committed. Run again"
            )

    def position(self, before: Commit, counts: Mapping[str, int]) -> dict[str, Any]:
        # A topic that the source no longer has may come back: it goes on where it was.
        ends = {t: {p: e for p, (_, e) in of.items()} for t, of in self.ranges.items()}
        positions, ids = replaced(before, self.ids)
        return {
            "taken": self.taken,
            "inputs": {**before.inputs, **positions, **ends},
            "topics": {**before.topics, **ids, **self.ids},
            "gaps": self.gaps,
        }

    @property
    def counts(self) -> dict[str, int]:
        """``lost``: the number of lost offsets that the run accepts."""
        return {"lost": sum(e - s for some in self.gaps.values() for s, e in some.values())}

    def describe(self, schema: StructType) -> list[str]:
        taken = {topic: sum(e - s for s, e in some.values()) for topic, some in self.taken.items()}
        # Not all are records: a topic is compacted, and a transaction has markers.
        lines = ["takes offsets: " + ", ".join(f"{n:,} of {topic}" for topic, n in taken.items())]
        others = of_other_ids(self.gaps, self.ids, self.before)
        gone = {topic: some for topic, some in self.gaps.items() if topic not in others}
        if gone:
            lines.append(f"!continues without {gone} (accept_gap)")
        for topic in others:
            starts = {p: start for p, (start, _) in self.ranges[topic].items()}
            lines.append(
                f"!continues with another topic {topic} (id {self.ids[topic]}), from {starts} "
                "(accept_gap)"
            )
        inputs = {} if self.before is None else self.before.inputs
        for topic, some in self.ranges.items():
            new = sorted(set(some) - set(inputs[topic])) if topic in inputs else []
            if new:
                lines.append(f"topic {topic} has new partitions {new}")
        return lines

    def explain(self, error: Exception) -> SourceError | None:
        if _TRUNCATED in str(error):
            return SourceError(
                f"the {self.source.describe()}: expected no event of op t (truncate) with several "
                "topics or partitions, where its order relative to the others is unknown; nothing was "
                "committed. Let the connector skip them (skipped.operations=t), or set "
                "Debezium(truncate='quarantine') and delete the keys in another way"
            )
        reason = reason_of(error)
        if reason is None:
            return None
        return SourceError(
            f"the {self.source.describe()} could not be read to their end: {reason}; nothing was "
            f"committed. Run again, and {advice_on_reading(reason)}"
        )

    @property
    def source_end(self) -> dict[str, Offsets]:
        return self.ends

    def reaches(self, end: End) -> bool:
        return not isinstance(end, str) and reached(self.ranges, end)

    @property
    def behind(self) -> int:
        """The number of offsets left to later runs."""
        return sum(e - self._position(t, p) for t, some in self.ends.items() for p, e in some.items())

    @property
    def waiting(self) -> dict[str, Offsets]:
        """The end of the run by partition, for partitions with records after it."""
        places = {
            t: {p: self._position(t, p) for p, e in some.items() if self._position(t, p) < e}
            for t, some in self.ends.items()
        }
        return {t: some for t, some in places.items() if some}

    def _position(self, topic: str, partition: int) -> int:
        return self.ranges[topic][partition][1]


# Kafka source


HEADERS = ArrayType(StructType([StructField("key", StringType()), StructField("value", BinaryType())]))
"""The type of a column for a record's headers: name and bytes of each."""
MANY_MESSAGES = 100_000
"""Number of messages from which on a run looks at one of them before it plans."""
_MOST_NAMES = 200
"""Number of names up to which a regular expression reads them."""
_SENT_AT = "if(unix_micros(timestamp) < 0, null, timestamp)"
"""The timestamp -1 is that of a message without one; Kafka Streams refuses all negative ones."""
_APPENDED_AT = "if(timestampType = 1, timestamp, null)"
"""Kafka stores the timestamp type per batch of messages: 1 is LOG_APPEND_TIME."""


_ELSEWHERE = (
    "Replay from a position that the topic has (--from or --from-offsets), or replay only the assets "
    "derived from it: its log has its records"
)


def _recreated(commit: Commit, ids: Mapping[str, str]) -> list[str]:
    return [topic for topic, known in commit.topics.items() if ids.get(topic, known) != known]


@dataclass(frozen=True)
class KafkaSource(Repeatable):
    """One or several topics of a Kafka cluster.

    A record keeps its topic's ``partition``. With several topics, partitions of the same number form
    one partition, as in Kafka Streams, and a run merges them by smallest timestamp first.

    The message's value fills the columns of the schema by name. The message's key fills the key columns
    if ``key`` is set; a tombstone has no other place for them. Without a column ``timestamp`` in the
    schema, the record's timestamp is the message's, or the event's with :class:`Debezium`.

    A message without a value is a tombstone, and so is a JSON object with ``"__deleted": "true"``
    unless the schema has such a column.

    Args:
        cluster: the cluster.
        topic: one name or several.
        value: the format of the message's value.
        key: the format of the message's key; None = the key is not read.
        headers: the column, of type ``HEADERS``, for the message's headers; None = headers are dropped.
        start: where the first run begins: ``earliest``, ``latest``, a time (inclusive), or offsets
            ``{topic: {partition: offset}}``. Partitions not named, or added later, begin at 0. A topic
            that was recreated begins at its earliest offset, or at the time.
        max_records_per_run: the limit of a run, shared fairly between partitions; None = no limit.
        max_bad_share: a run with a larger share of quarantined records fails before its commit.
        max_clock_skew: how far ahead of this machine's clock a timestamp may be.
        recorded_at: the system time of a record. ``run``: the time of its commit. ``append_time``:
            the broker's append time, for topics with ``message.timestamp.type=LogAppendTime``; messages
            older than that setting are quarantined. Otherwise a column of type timestamp; a tombstone
            without one has the message's time. A message without a time, or ahead by more than
            ``max_clock_skew``, is quarantined. System time never decreases: it is raised to that of
            earlier records of the partition and of earlier runs, and capped at the time of the run.
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
        """Whether the messages are changes of a table: the last one of a key is its current row."""
        return self.value.orders_changes

    @property
    def restates(self) -> bool:
        """Whether messages may repeat the current row of a key."""
        return self.value.orders_changes

    def __post_init__(self) -> None:
        check_types(self, type(self).__name__, SourceError)
        topics = (self.topic,) if isinstance(self.topic, str) else tuple(self.topic)
        object.__setattr__(self, "topic", topics)
        if not topics or len(set(topics)) < len(topics):
            raise SourceError(f"expected topic to be one or several different ones, got {list(topics)}")
        for topic in topics:
            require_topic(topic)
        require_limits(self.max_bad_share, self.max_clock_skew)
        if self.max_records_per_run is not None and self.max_records_per_run < 1:
            raise SourceError(f"max_records_per_run must be 1 or more, got {self.max_records_per_run}")
        timed = isinstance(self.start, datetime) and self.start.tzinfo is not None
        given = self.start if isinstance(self.start, Mapping) else None
        placed = given is not None and {*given} <= {*topics} and all(map(_are_offsets, given.values()))
        if not (timed or placed) and self.start not in ("earliest", "latest"):
            raise SourceError(
                "start must be 'earliest', 'latest', a datetime with a time zone or, for topics of "
                f"{list(topics)}, offsets like {{{topics[0]!r}: {{0: 100}}}}, from 0 on, got "
                f"{self.start!r}"
            )

    @property
    def topics(self) -> tuple[str, ...]:
        return tuple(self.topic)

    def describe(self) -> str:
        """Returns a description of the source, for metadata and messages."""
        names = ", ".join(self.topics)
        return f"records of the Kafka topic{'s' if len(self.topics) > 1 else ''} {names}"

    def check(self, name: str, key: Sequence[str], schema: StructType) -> None:
        """Checks that messages can fill the columns.

        Raises:
            TopologyError: a column that no message can fill; a wrong ``recorded_at`` or ``headers``.
        """
        require_source_recorded_at(name, self.recorded_at, WORDS, schema)
        keys = StructType([f for f in schema.fields if f.name in key])
        for part, format_, wanted in (("key", self.key, keys), ("value", self.value, schema)):
            if format_ is None:
                continue
            if not format_.columns(wanted):
                raise TopologyError(
                    f"{name}: the message's {part} is read as {format_}, which fills none of the "
                    f"columns {wanted.names}; name one of them"
                )
            own = StructType([f for f in wanted.fields if f.name != self.headers])
            if odd := format_.misfits(own):
                raise TopologyError(
                    f"{name}: the {part} of a message cannot fill these columns: {'; '.join(odd)}; "
                    "correct the columns' types, or the format"
                )
            require_units(name, getattr(format_, "timestamps", None), schema=own)
        if self.headers is None:
            return
        there = schema[self.headers].dataType if self.headers in schema.names else None
        if there is None or there.simpleString() != HEADERS.simpleString():
            got = "no such column" if there is None else there.simpleString()
            raise TopologyError(
                f"{name}: expected headers to name a column of type {HEADERS.simpleString()}, got "
                f"{self.headers!r}, {got}; correct it, or declare the column"
            )

    @property
    def timestamps(self) -> object:
        """The unit of numbers in time columns, if the value's format has one."""
        return getattr(self.value, "timestamps", None)

    # -- replays ---------------------------------------------------------------------------------

    def from_beginning(self, live: AssetStore) -> KafkaSource:
        """Returns the source with the offsets at which the asset began; as it is, if the asset's first
        commits are no longer known."""
        self.require_same(live)
        begun = dict[str, dict[int, int]]()
        for commit in commits(live.root):
            if not begun and commit.batch > 1:
                return self
            for topic, ranges in commit.taken.items():
                begun.setdefault(topic, {p: first for p, (first, _) in ranges.items()})
        if set(self.topics) - set(begun):
            return self
        states = self.cluster.topics(self.topics)
        gone = {
            topic: {
                p: (s, at.earliest[p]) for p, s in begun[topic].items() if s < at.earliest.get(p, s)
            }
            for topic, at in states.items()
        }
        if any(gone.values()):
            raise SourceError(
                f"{live.node.name}: expected all records since its first run, got fewer: "
                f"{lost(gone, states, None)}. {_ELSEWHERE}"
            )
        return replace(self, start={topic: begun[topic] for topic in self.topics})

    def require_same(self, live: AssetStore) -> None:
        ids = self.cluster.topic_ids(self.topics)
        for commit in commits(live.root):
            for topic in _recreated(commit, ids):
                raise SourceError(
                    f"{live.node.name}: expected the topic {topic} that batch {commit.batch} consumed, "
                    f"got one that was deleted and recreated since (its id was {commit.topics[topic]}, "
                    f"now {ids[topic]}): its offsets refer to other records. {_ELSEWHERE}"
                )

    def repeated_runs(self, live: AssetStore, head: Head, keep_recorded: bool) -> Iterator[RepeatedRun]:
        """Yields a run up to the end offsets of each run of the asset; without system times, only up to
        the last ones."""
        ids = self.cluster.topic_ids(self.topics)
        for topic in _recreated(head.commit, ids):
            raise SourceError(
                f"{live.node.name}: expected the topic {topic} that its last run consumed, got one "
                "that was deleted and recreated since, or is of another cluster; correct the source's "
                "address, or run it once with accept_gap: true first"
            )
        then = commits(live.root) if keep_recorded else iter(())
        for commit in (*(one for one in then if one.batch < head.commit.batch), head.commit):
            if _recreated(commit, ids):  # only with a start position in the new topic
                continue
            ends = {t: {p: (0, e) for p, e in some.items()} for t, some in commit.inputs.items()}
            yield RepeatedRun({"wanted": ends}, commit.recorded_at if keep_recorded else None)

    # -- offsets ---------------------------------------------------------------------------------

    def pin(
        self,
        before: Commit | None,
        wanted: Ranges | None = None,
        accept_gap: bool = False,
        *,
        consumed: Mapping[str, Any] = {},
    ) -> PinnedTopics:
        """Pins the offset ranges of a run. Does not use Spark.

        Args:
            before: the asset's last commit; None = no commit yet.
            wanted: requested ranges. Only their ends count (exclusive): a run always begins at the
                consumed offset, so that no record is skipped or taken twice. None = up to the end.
            accept_gap: continue although records were lost to retention or with the whole topic.
            consumed: not used; the commit holds the offsets.

        Raises:
            RecordsGoneError: the topic lost records that were not consumed.
            SourceError: the cluster does not answer, or has no such topic; a topic without append time
                with ``recorded_at="append_time"``.
        """
        states = self.cluster.topics(self.topics)
        if self.recorded_at == APPEND_TIME:
            self._require_append_time()
        gaps: Ranges = {}
        ranges = {topic: self._ranges(topic, state, before, gaps) for topic, state in states.items()}
        if gaps and not accept_gap:
            raise RecordsGoneError(
                f"{lost(gaps, states, before)}. {self._ways_to_continue(gaps, states, before)} "
                "(the commit records the gap), or reprocess into a new asset"
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
        held_back = sum(
            max(0, last - state.ends[p])
            for state in states.values()
            for p, last in state.high_watermarks.items()
        )
        return PinnedTopics(self, before, taken, ids, gaps, ends, held_back)

    def news(self, before: Commit | None, consumed: Mapping[str, Any]) -> News:
        """Returns the run config with the new offset ranges. Does not use Spark."""
        pinned = self.pin(before)
        ranges = pinned.records
        records = sum(e - s for some in ranges.values() for s, e in some.values())
        if before is None and not records and self.start != "earliest":
            ranges = pinned.ranges  # commit the start offsets, or ``latest`` would move on
        config = {t: {str(p): list(r) for p, r in some.items()} for t, some in ranges.items()}
        if not config:
            held = counted(pinned.held_back, "offset is", "offsets are")
            why = f"{held} in open transactions, or behind one"
            return News(description=why if pinned.held_back else "")
        return News({"ranges": config}, f"{counted(records + pinned.behind, 'offset')} behind", records)

    def _require_append_time(self) -> None:
        for topic, kind in self.cluster.timestamp_types(self.topics).items():
            if kind != "LogAppendTime":
                raise SourceError(
                    f"expected message.timestamp.type=LogAppendTime of the topic {topic!r} for "
                    f"recorded_at='append_time', got {kind}: its timestamps come from producers. Set "
                    "message.timestamp.type of the topic, or name a column as recorded_at"
                )

    def _ranges(
        self, topic: str, state: TopicState, before: Commit | None, gaps: Ranges
    ) -> dict[int, tuple[int, int]]:
        """Returns the unconsumed ``[start, end)`` by partition; adds lost ranges to ``gaps``."""
        if before is None or topic not in before.topics:
            first = self._first(topic, state)
        elif before.topics[topic] == state.id:
            first = before.inputs[topic]
        elif of_id(topic, state.id) in before.topics:
            first = before.inputs[of_id(topic, state.id)]
        else:
            gaps[topic] = {p: (offset, offset) for p, offset in before.inputs[topic].items()}
            # ``latest``, or offsets of the old topic, would skip records of the new one.
            timed = isinstance(self.start, datetime)
            first = self._first(topic, state) if timed else dict(state.earliest)
        found: dict[int, tuple[int, int]] = {}
        for partition, end in sorted(state.ends.items()):
            start, earliest = first.get(partition, 0), state.earliest[partition]
            if start < earliest:
                gaps.setdefault(topic, {})[partition] = (start, earliest)
                start = earliest
            if start > end and (before is None or topic not in before.topics):
                raise SourceError(
                    f"topic {topic}, partition {partition}: expected start to be an offset up to the "
                    f"end of the partition, {end}, got {start}; correct start"
                )
            if start > end:
                raise RecordsGoneError(
                    f"topic {topic}, partition {partition}: consumed up to offset {start}, but the "
                    f"topic ends at {end}: it was truncated or restored; reprocess into a new asset"
                )
            found[partition] = (start, end)
        return found

    def _ways_to_continue(
        self, gaps: Ranges, states: Mapping[str, TopicState], before: Commit | None
    ) -> str:
        """Returns the advice for an error about lost records: how a run with ``accept_gap`` continues,
        and which setting of the source may be wrong."""
        others = of_other_ids(gaps, {t: state.id for t, state in states.items()}, before)
        goes_on = ["without the offsets that are gone"] if {*gaps} - {*others} else []
        if others:
            start = "the time in start" if isinstance(self.start, datetime) else "the earliest offset"
            goes_on.append(f"with the new {' and '.join(others)} from {start}")
        wrong = "If it is the wrong cluster, correct its address. If not, run" if others else "Run"
        return f"{wrong} once with accept_gap: true to continue {' and '.join(goes_on)}"

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
        """Returns the records of non-empty offset ranges.

        Plan: one scan with one Kafka consumer per partition; several topics add one shuffle and sort by
        partition.

        Returns:
            the schema's columns (null if the message is unreadable), ``partition``, ``_arrival``,
            ``timestamp`` (the message's, if the schema has none), ``_deleted``, ``_record_time``,
            ``_source`` (topic), ``_position`` (offset), ``_raw`` and ``_raw_key`` (BINARY),
            ``_reason``; ``_source_recorded_at`` with ``recorded_at="append_time"``.

        Raises:
            SourceError: a schema is not available.
        """
        messages = self._messages(spark, ranges)
        message, message_key = F.col(RAW), F.col(RAW_KEY)
        own = StructType([f for f in schema.fields if f.name != self.headers])
        keys = StructType([f for f in schema.fields if f.name in key])
        flat = isinstance(self.value, Json) and UNWRAPPED.name not in own.names
        wanted = StructType([*own.fields, UNWRAPPED]) if flat else own
        into = "_read_value"
        rows = self.value.rows
        usual = None if rows is None else self._usual_names(rows, ranges)
        subjects = {f"{topic}-value": topic in ranges for topic in self.topics}
        value = self.value.decode(message, wanted, subjects, into, usual)
        absent = message.isNull() if value.null is None else message.isNull() | value.null
        parsed = value.parsed
        parts: dict[str, Column] = {"_value": F.when(~absent, value.row)}
        reason = F.when(~absent, value.reason)
        if self.key is not None:
            subjects = {f"{topic}-key": topic in ranges for topic in self.topics}
            decoded = self.key.decode(message_key, keys, subjects, "_read_key")
            parsed = {**parsed, **decoded.parsed}
            parts["_key"] = F.when(message_key.isNotNull(), decoded.row)
            reason = F.coalesce(reason, F.when(message_key.isNotNull(), decoded.reason))
        flags = _markers(value, absent, flat)
        if TRUNCATES in flags:
            reason = F.when(~flags[TRUNCATES], reason)
        record_time = F.col(RECORD_TIME)
        time = record_time if value.time is None else F.coalesce(value.time, record_time)
        if value.unchanged is not None:
            parts[UNCHANGED] = value.unchanged
        if value.images is not None:
            parts[MOVED] = _moves(*value.images, [name for name in keys.names if name in own.names])
        for name, one in parsed.items():
            messages = messages.withColumn(name, one)
        read = messages.withColumns({**parts, REASON: reason, RECORD_TIME: time, **flags})
        good = F.col(REASON).isNull()
        # The row image of a deletion holds the time of its last write, not of the deletion.
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
        more = SOURCE_RECORDED_AT, UNCHANGED, MOVED
        inside += [*flags, *(c for c in read.columns if c in more)]
        return read.select(*columns, *inside)

    def _usual_names(
        self, format_: Json, ranges: Mapping[str, Mapping[int, tuple[int, int]]]
    ) -> list[str] | None:
        """Returns the names of the first message of the longest range, which most others have as well;
        None = unknown, or the messages are too few for a look at one."""
        sizes = {
            (topic, partition): end - start
            for topic, some in ranges.items()
            for partition, (start, end) in some.items()
        }
        if sum(sizes.values()) < MANY_MESSAGES:
            return None
        topic, partition = max(sizes, key=sizes.__getitem__)
        start, _ = ranges[topic][partition]
        found = self.cluster.first_messages({topic: {partition: start}})
        names = format_.names(found[0].value()) if found else None
        return None if names is None or len(names) > _MOST_NAMES else names

    def _messages(
        self, spark: SparkSession, ranges: Mapping[str, Mapping[int, tuple[int, int]]]
    ) -> DataFrame:
        """Returns the messages of offset ranges, with their order of arrival."""
        more = [] if self.headers is None else [F.col("headers")]
        if self.recorded_at == APPEND_TIME:
            more.append(F.expr(_APPENDED_AT).alias(SOURCE_RECORDED_AT))
        return in_order_of_arrival(
            read_messages(self.cluster, spark, ranges, headers=self.headers is not None).select(
                F.col("topic").alias(SOURCE),
                PARTITION,
                F.col(OFFSET).alias(POSITION),
                F.expr(_SENT_AT).alias(RECORD_TIME),
                F.col("key").alias(RAW_KEY),
                F.col("value").alias(RAW),
                *more,
            ),
            self.topics,
        )


def _are_offsets(given: Any) -> bool:
    return isinstance(given, Mapping) and all(
        type(number) is int and number >= 0
        for place in cast("Mapping[Any, Any]", given).items()
        for number in place
    )


def _moves(before: Column, after: Column, key: Sequence[str]) -> Column:
    """Returns whether an update changes a key column; never null. A database may not send the row
    before it."""
    changed = [before[k].isNotNull() & ~before[k].eqNullSafe(after[k]) for k in key]
    return any_of([F.coalesce(one, F.lit(False)) for one in changed])


def _markers(value: Decoded, absent: Column, flat: bool) -> dict[str, Column]:
    """Returns the columns ``_deleted`` and, if the format has them, ``_restates`` and ``_truncates``.

    Args:
        value: the decoded value; ``absent``: whether the message has no value.
        flat: whether the field ``__deleted`` marks deletions.
    """
    gone = F.lit(False) if value.deleted is None else F.coalesce(value.deleted, F.lit(False))
    if flat:
        gone = F.coalesce(F.lower(value.row[UNWRAPPED.name]) == "true", F.lit(False))
    markers = {DELETED: absent | gone}
    if value.restates is not None:
        markers[RESTATES] = absent | F.coalesce(value.restates, F.lit(False))
    if value.truncates is not None:
        truncates = ~absent & F.coalesce(value.truncates, F.lit(False))
        markers = {name: condition | truncates for name, condition in markers.items()} | {
            TRUNCATES: truncates
        }
    return markers
