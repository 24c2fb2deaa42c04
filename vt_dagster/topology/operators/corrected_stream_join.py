"""Corrected stream-stream join: a late match retracts the unmatched row."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from pyspark.sql.types import DataType, IntegerType, LongType, StructField, StructType

from vt_dagster.columns import (
    CAUSE,
    IS_LATE,
    LEFT_OFFSET,
    LEFT_PARTITION,
    OFFSET,
    PARTITION,
    REVISION,
    RIGHT_OFFSET,
    RIGHT_PARTITION,
)
from vt_dagster.errors import TopologyError
from vt_dagster.topology.durations import Duration, check_duration, pairs, spoken
from vt_dagster.topology.operators.base import make_table
from vt_dagster.topology.operators.stream_stream_join import StreamStreamJoin

_NAMES = {PARTITION: (LEFT_PARTITION, RIGHT_PARTITION), OFFSET: (LEFT_OFFSET, RIGHT_OFFSET)}
_TYPES: dict[str, DataType] = {PARTITION: IntegerType(), OFFSET: LongType()}


@dataclass(frozen=True)
class CorrectedStreamJoin(StreamStreamJoin):
    """A stream-stream join whose result is a table: one row per match, and one per unmatched record of
    a preserved side (left in ``left``, both in ``outer``).

    An unmatched record gets its row when stream time passes the end of its window plus ``grace``. A
    match that arrives later, within ``corrected_for``, inserts its own row and retracts the unmatched
    one: the deletion has ``old``, ``revision`` 1 and ``cause`` (``table, partition, offset`` of the
    record that arrived). A record has at most one unmatched row, and none after its retraction. A
    matched row never changes. The rows depend on the order of arrival only; the number of retractions
    also depends on how arrivals are split into runs.

    Late: a record with ``timestamp < stream time - corrected_for``, or that was late under an earlier
    ``corrected_for``, finds no match. It is counted and listed in the asset's quarantine table
    (``too_late``, with ``source``, ``partition`` and ``position``); on a preserved side it also gets an
    unmatched row, marked ``is_late``. Null key: dropped and counted; on a preserved side, an unmatched
    row at once. Tombstone: dropped and counted.

    The key is the position of both records: ``left_partition, left_offset, right_partition,
    right_offset``, -1 for a missing side.

    Args:
        kind: ``left`` or ``outer``.
        grace: how long an unmatched record waits before it gets a row, in stream time.
        corrected_for: how late a record may be and still find every match, in stream time; at least
            ``grace``. Both may change between runs; rows that are final stay final.
    """

    corrected_for: Duration = timedelta(0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kind == "inner":
            raise TopologyError(
                f"{self.name}: corrected_for retracts unmatched rows, and an inner join of streams has "
                "none: remove it and set grace to the allowed lateness, or use left_join or outer_join"
            )
        check_duration(self.name, "corrected_for", self.corrected_for)
        for partition, (promised, grace) in pairs(self.corrected_for, self.grace):
            if promised < grace:
                raise TopologyError(
                    f"{self.name}: expected corrected_for{partition} of at least the grace period "
                    f"{grace}, before whose end there is no row to retract, got {promised}: lengthen "
                    "corrected_for, or shorten grace"
                )
        own = {REVISION, CAUSE, *self.result_key}
        taken = sorted(name for name, _ in self.projection().columns if name.lower() in own)
        if taken:
            raise TopologyError(
                f"{self.name}: expected no selected columns named {taken}, which a corrected join adds "
                f"itself; select them under another name, for example 'left.{taken[0]} as "
                f"own_{taken[0]}'"
            )

    @property
    def promise(self) -> Duration:
        return self.corrected_for

    @property
    def result_key(self) -> tuple[str, ...]:
        """The key columns of the result."""
        return LEFT_PARTITION, LEFT_OFFSET, RIGHT_PARTITION, RIGHT_OFFSET

    @property
    def settings(self) -> dict[str, str]:
        return {**super().settings, "corrected_for": spoken(self.corrected_for)}

    @property
    def log_columns(self) -> tuple[str, ...]:
        return (IS_LATE, REVISION, CAUSE)

    def lineage(self) -> dict[str, list[tuple[str, str]]]:
        sides = (self.left.name, self.right.name)
        places = {
            name: [(side, column)]
            for column, names in _NAMES.items()
            for name, side in zip(names, sides, strict=True)
        }
        return {**places, **self.projection().lineage()}

    def result(self, **shown: Any) -> Any:
        places = [
            StructField(names[i], _TYPES[column]) for i in (0, 1) for column, names in _NAMES.items()
        ]
        chosen = [StructField(f.name, f.dataType) for f in self.projection().fields()]
        schema = StructType([*places, *chosen])
        about = {"key": self.result_key, "partition_by": None}
        return make_table(self, self.left, schema, None, shown, **about)

    def describe(self) -> str:
        said = super().describe().partition("; late after")[0]
        return (
            f"{said} after {spoken(self.grace)}, and is retracted by a match within "
            f"{spoken(self.corrected_for)} of stream time."
        )
