"""stream-stream join: the records of two streams that are near each other in time."""

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
    """Each record with those of the other stream that have its key and lie within a window of time.

    A left record at ``t`` matches the right ones from ``t - before`` to ``t + after``, both inclusive.
    One result for each match, when the later of the two arrives, with the larger timestamp; those of
    one record in order of the other side's time, then of its arrival. Nothing is replaced: equal
    records each count. A record whose side is kept (the left one in ``left``, both in ``outer``) and
    that has found no match leaves without one as soon as stream time has passed its window and the
    grace period, once. Stream time is that of both sides together, by partition: both should be
    partitioned alike.

    Late: one with ``timestamp < stream time - grace`` is counted and still joined with what is later
    than the other side's time - (before + after + grace), as in Kafka Streams; its results are marked
    ``is_late``. Null key: dropped and counted; of a side that is kept, kept without a match, at once.
    Tombstone: dropped and counted.

    Args:
        left, right: streams with keys of the same types. The result has the left one's key.
        kind: ``inner``: matches alone; ``left``, ``outer``: also what has none.
        select: as of any join; where a left record is missing, all of it but the key is null.
        before: how far before a left record a right one may lie, inclusive; may be negative.
        after: how far after it, likewise; ``before + after`` must not be negative.
        grace: how late a record may be and still find every match; so long an unmatched one waits
            after its window has ended.
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
                    f"{after}: such a window ends before it starts; make one of them longer"
                )
        self.projection()

    @property
    def waits(self) -> bool:
        """Whether records may wait, and be late."""
        return True

    @property
    def promise(self) -> Duration:
        """How late a record may be and still find every match."""
        return self.grace

    @property
    def reach(self) -> Duration:
        """The window and the promise: so long a record is of use to those that are late."""
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
        alone = {"inner": "", "left": "; a left one without a match leaves alone"}
        missing = alone.get(self.kind, "; one without a match leaves alone")
        return (
            f"{self.left.name}, each record with those of {self.right.name} from "
            f"{_spoken(self.before)} before it to {_spoken(self.after)} after it{missing}; late after "
            f"{spoken(self.grace)}."
        )


def _size(value: Any) -> Any:
    """A bound without its sign; what is none stays as it is, to be refused."""
    if isinstance(value, timedelta):
        return abs(value)
    if isinstance(value, Mapping):
        return {p: _size(v) for p, v in cast(Mapping[int, Any], value).items()}
    return value


def _spoken(value: Duration) -> str:
    if isinstance(value, timedelta) and value < _NOTHING:
        return f"minus {spoken(-value)}"
    return spoken(value)
