"""Stream-stream join: the records of two streams within a time window of each other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, cast

from pyspark.sql.types import StructField, StructType

from vt_dagster.columns import IS_LATE, TIMESTAMP
from vt_dagster.errors import TopologyError
from vt_dagster.topology.durations import Duration, check_duration, longest, pairs, plus, spoken
from vt_dagster.topology.node import make_node
from vt_dagster.topology.operators.join import Join, check_keys, check_kind

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
    def waits(self) -> bool:
        """Whether records may wait for a match, and can be late."""
        return True

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
    def settings(self) -> dict[str, str]:
        ends = {"before": self.before, "after": self.after, "grace": self.grace}
        return {name: _spoken(value) for name, value in ends.items()}

    @property
    def log_columns(self) -> tuple[str, ...]:
        return (IS_LATE,)

    def result(self, **shown: Any) -> Any:
        fields = self.projection().fields()
        if self.kind == "outer":
            fields = [StructField(f.name, f.dataType, True) for f in fields]
        return make_node(
            "stream",
            self.name,
            key=self.left.key,
            schema=StructType(fields),
            timestamp=TIMESTAMP,
            partitions=self.left.partitions,
            partition_by=self.left.partition_by,
            null_key="quarantine" if self.kind == "inner" else "keep",
            operator=self,
            **shown,
        )

    def describe(self) -> str:
        alone = {"inner": "", "left": "; an unmatched left record is emitted alone"}
        missing = alone.get(self.kind, "; an unmatched record is emitted alone")
        return (
            f"{self.left.name}, each record with those of {self.right.name} from "
            f"{_spoken(self.before)} before it to {_spoken(self.after)} after it{missing}; late after "
            f"{spoken(self.grace)}."
        )


def _size(value: Any) -> Any:
    """Returns the absolute value of a bound; ``check_duration`` refuses what is no duration."""
    if isinstance(value, timedelta):
        return abs(value)
    if isinstance(value, Mapping):
        return {p: _size(v) for p, v in cast(Mapping[int, Any], value).items()}
    return value


def _spoken(value: Duration) -> str:
    if isinstance(value, timedelta) and value < _NOTHING:
        return f"minus {spoken(-value)}"
    return spoken(value)
