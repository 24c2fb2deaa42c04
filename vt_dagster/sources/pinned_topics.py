"""The offset ranges that a run reads from Kafka topics."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import StructType

from vt_dagster.core.source_records import TRUNCATES
from vt_dagster.errors import SourceError
from vt_dagster.sources.base import End, read_by_all_names, with_source_recorded_at
from vt_dagster.sources.kafka_cluster import KafkaCluster
from vt_dagster.sources.kafka_messages import reached
from vt_dagster.storage.commit_log import Commit, Offsets, Ranges
from vt_dagster.topology.model import Stream

_TRUNCATED = "vt_dagster: truncated in one of several partitions"
APPEND_TIME = "append_time"
WORDS = ("run", APPEND_TIME)
"""Values of ``recorded_at`` that are not column names."""


class Topics(Protocol):
    """A source of Kafka topics, see ``KafkaSource``."""

    @property
    def cluster(self) -> KafkaCluster: ...

    @property
    def max_bad_share(self) -> float: ...

    @property
    def max_clock_skew(self) -> timedelta: ...

    @property
    def recorded_at(self) -> str: ...

    def describe(self) -> str: ...

    def read(
        self,
        spark: SparkSession,
        ranges: Mapping[str, Mapping[int, tuple[int, int]]],
        *,
        key: Sequence[str],
        schema: StructType,
    ) -> DataFrame: ...


@dataclass(frozen=True)
class PinnedTopics:
    """The offset ranges that a run reads.

    Args:
        source: the topics.
        before: the asset's last commit; None = no commit yet.
        ranges: ``[start, end)`` of every partition, also empty ones.
        ids: the topic ids.
        gaps: accepted ranges of lost offsets; of a recreated topic an empty range at the consumed
            offset, since the number of lost records is unknown.
        ends: the end offset of each partition when the run started (exclusive).
    """

    source: Topics
    before: Commit | None
    ranges: Ranges
    ids: dict[str, str]
    gaps: Ranges
    ends: dict[str, Offsets]

    bytes = None

    @property
    def max_bad_share(self) -> float:
        return self.source.max_bad_share

    @property
    def max_clock_skew(self) -> timedelta:
        return self.source.max_clock_skew

    @property
    def records(self) -> Ranges:
        """The non-empty ranges."""
        some = {t: {p: r for p, r in of.items() if r[1] > r[0]} for t, of in self.ranges.items()}
        return {t: of for t, of in some.items() if of}

    @property
    def taken(self) -> Ranges:
        """The non-empty ranges; all ranges if there is more to commit than records."""
        # The first commit stores the start offsets even without records: else ``latest`` would move on.
        new = self.before is None or self.gaps or set(self.ids) - set(self.before.topics)
        return self.ranges if new else self.records

    @property
    def empty(self) -> bool:
        return not self.taken

    def read(self, spark: SparkSession, node: Stream) -> DataFrame:
        read, records = self.source.read, self.records
        rows = read_by_all_names(node, lambda key, all_: read(spark, records, key=key, schema=all_))
        if TRUNCATES in rows.columns and sum(len(some) for some in self.ranges.values()) > 1:
            refused = F.raise_error(F.lit(_TRUNCATED)).cast("boolean")
            rows = rows.withColumn(TRUNCATES, F.when(F.col(TRUNCATES), refused).otherwise(False))
        return with_source_recorded_at(rows, self.source.recorded_at, WORDS)

    def consumed(self) -> None:
        """Returns None: the commit holds the offsets."""

    def position(self, before: Commit, counts: Mapping[str, int]) -> dict[str, Any]:
        return {
            "taken": self.taken,
            "inputs": {t: {p: e for p, (_, e) in of.items()} for t, of in self.ranges.items()},
            "topics": self.ids,
            "gaps": self.gaps,
        }

    @property
    def counts(self) -> dict[str, int]:
        """``lost``: the number of lost offsets that the run accepts."""
        return {"lost": sum(e - s for some in self.gaps.values() for s, e in some.values())}

    def describe(self, schema: StructType) -> list[str]:
        taken = {topic: sum(e - s for s, e in some.values()) for topic, some in self.taken.items()}
        lines = ["takes records: " + ", ".join(f"{n:,} of {topic}" for topic, n in taken.items())]
        if self.gaps:
            lines.append(f"!continues without {self.gaps} (accept_gap)")
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
        said = re.search(r"(?:Caused by: )?(?:org\.apache|java)[\w.]*[kK]afka[\w.$]*: (.+)", str(error))
        if said is None:
            return None
        return SourceError(
            f"the {self.source.describe()} could not be read to their end: {said[1].strip()}; nothing "
            "was committed. Run again, and check the topic's retention"
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
