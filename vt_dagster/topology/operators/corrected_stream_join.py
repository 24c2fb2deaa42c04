"""corrected stream-stream join: what was said to have no match is taken back where one comes later."""

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
    """A stream-stream join whose result is a table: one row for each match, and one for each record of
    a side that is kept which has none.

    A record that has found no match gets its row when stream time has passed its window and ``grace``.
    A match that comes after that, and no later than ``corrected_for``, gets its own row, and that of
    the record is deleted: with ``old``, ``revision`` 1 and ``cause`` (``table, partition, offset`` of
    the record that came). A record has one such row at most, and once it is deleted none any more. A
    match's row never changes. Which rows there are depends on the order of arrival alone, and how many
    were deleted on how that is cut into runs.

    Late: one with ``timestamp < stream time - corrected_for``, or that was so by an earlier
    ``corrected_for``, finds no match: it is counted, listed in the asset's quarantine (``too_late``,
    its place as ``source``, ``partition`` and ``position``), and if its side is kept, has a row without
    one, marked ``is_late``. Null key: dropped and counted; of a side that is kept, a row without a
    match, at once. Tombstone: dropped and counted.

    The key is where both records are: ``left_partition, left_offset, right_partition, right_offset``,
    -1 of a side that has none.

    Args:
        kind: ``left`` or ``outer``.
        grace: how long a record waits for a match before it gets a row without one.
        corrected_for: how late a record may be and still find every match, in stream time; at least
            ``grace``. Both may be changed from run to run; what was final stays so.
    """

    corrected_for: Duration = timedelta(0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kind == "inner":
            raise TopologyError(
                f"{self.name}: corrected_for takes back that a record has no match, which an inner "
                "join of streams never says: leave it out, and say by grace how late a match may be; "
                "or use left_join or outer_join"
            )
        check_duration(self.name, "corrected_for", self.corrected_for)
        for partition, (promised, grace) in pairs(self.corrected_for, self.grace):
            if promised < grace:
                raise TopologyError(
                    f"{self.name}: expected corrected_for{partition} of at least the grace period, "
                    f"{grace}, for which nothing is said that could be taken back, got {promised}: "
                    "lengthen it, or shorten grace"
                )
        own = {REVISION, CAUSE, *self.result_key}
        taken = sorted(name for name, _ in self.projection().columns if name.lower() in own)
        if taken:
            raise TopologyError(
                f"{self.name}: expected other names than {taken}, which a corrected join gives its own "
                f"columns; select them under another name, for example 'left.{taken[0]} as "
                f"own_{taken[0]}'"
            )

    @property
    def promise(self) -> Duration:
        return self.corrected_for

    @property
    def result_key(self) -> tuple[str, ...]:
        """What names a row."""
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
            f"{said} after {spoken(self.grace)}, and is taken back where one comes within "
            f"{spoken(self.corrected_for)} of stream time."
        )
