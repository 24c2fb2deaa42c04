"""The stream-stream join: the records of two streams within a time window of each other.

In a corrected join, a late match retracts the unmatched row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, cast

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
from vt_dagster.topology.durations import Duration, check_duration, longest, pairs, plus, spoken
from vt_dagster.topology.operators.base import Join, check_keys, check_kind, make_stream, make_table
from vt_dagster.topology.specification import CorrectedStreamJoinSpec, StreamStreamJoinSpec

# Stream-stream join


_NOTHING = timedelta(0)


@dataclass(frozen=True)
class StreamStreamJoin(Join):
    """Joins each record with the records of the other stream that have its key and lie in its window.

    A left record at ``t`` matches the right records from ``t - before`` to ``t + after``, both
    inclusive. Each match emits one result when its second record arrives, with the larger timestamp.
    Results of one record are ordered by timestamp of the other side, then by arrival. Records never
    replace each other: duplicates each match. An unmatched record of a preserved side (left in
    ``left``, both in ``outer``) is emitted once, as soon as stream time passes the end of its window
    plus ``grace``. Stream time is the maximum of both sides, per partition: both sides should be
    partitioned by the same rule.

    Late: a record with ``timestamp < stream time - grace`` is counted and still joined with the records
    later than the stream time of the other side minus (before + after + grace), as in Kafka Streams;
    its results are marked ``is_late``. Null key: dropped and counted; on a preserved side, emitted
    unmatched at once. Tombstone: dropped and counted.

    Args:
        left, right: streams with keys of the same types. The result has the left key.
        kind: ``inner``: matches only; ``left``, ``outer``: also unmatched records.
        select: as in any join; without a left record, all left columns except the key are null.
        before: how far before a left record its matches may lie, inclusive; may be negative.
        after: how far after a left record its matches may lie, inclusive; may be negative, but
            ``before + after`` must not be.
        grace: how late a record may be and still find every match, in stream time. An unmatched record
            waits this long after the end of its window.
    """

    called = ("stream_join",)

    before: Duration = _NOTHING
    after: Duration = _NOTHING
    grace: Duration = _NOTHING

    def __post_init__(self) -> None:
        super().__post_init__()
        check_kind(self.name, "stream-stream join", self.kind, ("inner", "left", "outer"))
        object.__setattr__(self, "select", tuple(self.select))
        for name, side in (("left", self.left), ("right", self.right)):
            if side.is_table:
                raise TopologyError(
                    f"{self.name}: the {name} side of a stream-stream join must be a Stream, got the "
                    f"{type(side).__name__} {side.name!r}; use its changes, to_stream(name=...)"
                )
        check_keys(self.name, self.left, self.right)
        for what in ("before", "after"):
            check_duration(self.name, what, _size(getattr(self, what)))
        check_duration(self.name, "grace", self.grace)
        for partition, (before, after) in pairs(self.before, self.after):
            if before + after < _NOTHING:
                raise TopologyError(
                    f"{self.name}: expected before + after{partition} of 0 or more, got {before} and "
                    f"{after}: the window ends before it starts; lengthen before or after"
                )
        self.projection()

    @property
    def promise(self) -> Duration:
        """How late a record may be and still find every match."""
        return self.grace

    @property
    def reach(self) -> Duration:
        """before + after + ``promise``: how long a late record may still match a record."""
        return plus(plus(self.before, self.after), self.promise)

    @property
    def rescan_span(self) -> dict[str, timedelta]:
        reach = longest(self.reach)
        return {self.left.name: reach, self.right.name: reach}

    @property
    def specification(self) -> StreamStreamJoinSpec | CorrectedStreamJoinSpec:
        return StreamStreamJoinSpec(**self._sides, **self._bounds)

    @property
    def _bounds(self) -> dict[str, Any]:
        return {"before": self.before, "after": self.after, "grace": self.grace}

    @property
    def settings(self) -> dict[str, str]:
        return {name: spoken(length) for name, length in self._bounds.items()}

    @property
    def log_columns(self) -> tuple[str, ...]:
        return (IS_LATE,)

    def result(self, **shown: Any) -> Any:
        null_key = "quarantine" if self.kind == "inner" else "keep"
        return make_stream(self, self.left, self.fields(), shown, null_key=null_key)

    def describe(self) -> str:
        alone = {"inner": "", "left": "; an unmatched left record is emitted alone"}
        missing = alone.get(self.kind, "; an unmatched record is emitted alone")
        return (
            f"{self.left.name}, each record with those of {self.right.name} from "
            f"{spoken(self.before)} before it to {spoken(self.after)} after it{missing}; late after "
            f"{spoken(self.grace)}."
        )


def _size(value: Any) -> Any:
    """Returns the absolute value of a bound; ``check_duration`` refuses what is no duration."""
    if isinstance(value, timedelta):
        return abs(value)
    if isinstance(value, Mapping):
        return {p: _size(v) for p, v in cast(Mapping[int, Any], value).items()}
    return value


# Corrected stream-stream join


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
                    f"{grace}, since unmatched rows are emitted only after it, got {promised}: "
                    "lengthen corrected_for, or shorten grace"
                )
        self._check_own_columns(self.result_key)

    @property
    def promise(self) -> Duration:
        return self.corrected_for

    @property
    def result_key(self) -> tuple[str, ...]:
        """The key columns of the result."""
        return LEFT_PARTITION, LEFT_OFFSET, RIGHT_PARTITION, RIGHT_OFFSET

    @property
    def specification(self) -> CorrectedStreamJoinSpec:
        return CorrectedStreamJoinSpec(**self._sides, **self._bounds, corrected_for=self.corrected_for)

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
        text = super().describe().partition("; late after")[0]
        return (
            f"{text} after {spoken(self.grace)}, and is retracted by a match within "
            f"{spoken(self.corrected_for)} of stream time."
        )
