"""Offset ranges of Kafka topics, and the messages in them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import Window as W
from pyspark.sql import functions as F

from vt_dagster.columns import ARRIVAL, PARTITION
from vt_dagster.core.source_records import POSITION, RECORD_TIME, SOURCE
from vt_dagster.errors import SourceError
from vt_dagster.sources.kafka_cluster import KafkaCluster, TopicState
from vt_dagster.storage.commit_log import Commit, Offsets, Ranges

_MESSAGE = (
    "key binary, value binary, topic string, partition int, offset long, timestamp timestamp, "
    "timestampType int, "
    "headers array<struct<key:string,value:binary>>"
)
_PLACE = "_place"


def read_messages(
    cluster: KafkaCluster,
    spark: SparkSession,
    ranges: Mapping[str, Mapping[int, tuple[int, int]]],
    headers: bool = False,
) -> DataFrame:
    """Returns the committed messages of offset ranges, in the columns of Spark's Kafka source.

    Args:
        ranges: ``[start, end)`` by topic and partition; none of them empty.
    """

    def offsets(which: int) -> str:
        return json.dumps({t: {str(p): r[which] for p, r in s.items()} for t, s in ranges.items()})

    if not ranges:
        return spark.createDataFrame([], _MESSAGE)
    return (
        spark.read.format("kafka")
        # After each poll Spark requests the partition's end offsets. The broker answers only after the
        # consumer's prefetch, which at the end of a topic waits for records: 500 ms by default.
        .option("kafka.fetch.max.wait.ms", "10")
        .options(**cluster.spark_options())
        .option("assign", json.dumps({t: sorted(some) for t, some in ranges.items()}))
        .option("startingOffsets", offsets(0))
        .option("endingOffsets", offsets(1))
        .option("includeHeaders", str(headers).lower())
        .option("kafka.isolation.level", "read_committed")
        .option("failOnDataLoss", "true")
        .load()
    )


def in_order_of_arrival(messages: DataFrame, topics: Sequence[str]) -> DataFrame:
    """Adds ``_arrival``: the offset; with several topics a row number by stream time per partition."""
    if len(topics) == 1:
        return messages.withColumn(ARRIVAL, F.col(POSITION))
    place = F.array_position(F.array(*[F.lit(t) for t in topics]), F.col(SOURCE))
    so_far = W.partitionBy(PARTITION, SOURCE).orderBy(POSITION)
    merged = W.partitionBy(PARTITION).orderBy("_time", _PLACE, POSITION)
    timed = messages.withColumns({_PLACE: place, "_time": F.max(RECORD_TIME).over(so_far)})
    return timed.withColumn(ARRIVAL, F.row_number().over(merged).cast("long")).drop(_PLACE, "_time")


def bounded(ranges: Ranges, most: int | None) -> Ranges:
    """Limits ranges to ``most`` offsets in total, shared fairly between partitions; None = no limit."""
    sizes = {(t, p): e - s for t, some in ranges.items() for p, (s, e) in some.items()}
    if most is None or sum(sizes.values()) <= most:
        return ranges
    left = most
    shares: dict[tuple[str, int], int] = {}
    # Smallest first: a partition below its share leaves the rest of the share to the others.
    for i, (place, size) in enumerate(sorted(sizes.items(), key=lambda item: item[1])):
        shares[place] = min(size, left // (len(sizes) - i))
        left -= shares[place]
    return {t: {p: (s, s + shares[t, p]) for p, (s, _) in some.items()} for t, some in ranges.items()}


def as_ranges(given: Mapping[str, Any] | None) -> Ranges | None:
    """Parses the ranges of a run config: ``{topic: {"0": [start, end]}}``, ``end`` exclusive.

    Raises:
        SourceError: the value has another form.
    """
    if given is None:
        return None
    try:
        return {
            topic: {int(p): (int(start), int(end)) for p, (start, end) in some.items()}
            for topic, some in given.items()
        }
    except (AttributeError, TypeError, ValueError):
        raise SourceError(
            f'expected ranges like {{"topic": {{"0": [start, end]}}}}, got {given!r}; correct the '
            "run config"
        ) from None


def as_offsets(text: str) -> dict[str, dict[int, int]]:
    """Parses offsets in JSON: ``{"topic": {"0": 100}}``.

    Raises:
        SourceError: the text has another form.
    """
    try:
        return {t: {int(p): int(o) for p, o in some.items()} for t, some in json.loads(text).items()}
    except (AttributeError, TypeError, ValueError):
        raise SourceError(
            f'expected offsets like {{"topic": {{"0": 100}}}}, got {text!r}; correct the text'
        ) from None


def reached(ranges: Ranges, ends: Mapping[str, Offsets]) -> bool:
    """Returns whether ranges reach the ends of topics; a partition that no longer exists counts as
    reached."""
    places = [(t, p, end) for t, some in ends.items() for p, end in some.items()]
    return all(ranges.get(t, {}).get(p, (0, end))[1] >= end for t, p, end in places)


def lost(gaps: Ranges, states: Mapping[str, TopicState], before: Commit | None) -> str:
    """Returns a description of lost offsets for an error message.

    Args:
        before: the asset's last commit.
    """
    assert before is not None
    said: list[str] = []
    for topic, missing in gaps.items():
        old, new = before.topics[topic], states[topic].id
        if old != new:
            said.append(
                f"topic {topic} was deleted and recreated since batch {before.batch} (its id "
                f"was {old}, now {new}): its offsets refer to other records"
            )
            continue
        said += [
            f"topic {topic}, partition {p}: {there - first} offsets are gone: {first} is the next "
            f"offset to consume, {there} the first available one (the topic's retention has passed)"
            for p, (first, there) in missing.items()
        ]
    return "; ".join(said)
