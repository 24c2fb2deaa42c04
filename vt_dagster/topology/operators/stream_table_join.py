"""stream-table join: each record with the table as of the record's own time."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal, TypeAlias

from pyspark.sql.types import StructType

from vt_dagster.columns import IS_LATE, TIMESTAMP, VALID_FROM, VALID_TO
from vt_dagster.errors import TopologyError
from vt_dagster.topology.durations import Duration, check_duration, longest, pairs, spoken
from vt_dagster.topology.node import Node, make_node
from vt_dagster.topology.operators.base import need_each_record
from vt_dagster.topology.operators.join import Join, check_keys, check_kind
from vt_dagster.topology.projection import Side

AsKnown: TypeAlias = Literal["now", "when_recorded"] | timedelta
"""By when a version must have been recorded, see ``StreamTableJoin``."""
At: TypeAlias = Literal["at_or_before", "before"]
"""Whether a version of the record's very own time is found."""

_KAFKAS = {"as_known": "now", "max_age": "None", "at": "at_or_before"}
"""What was never said of joins before these could be chosen: it is not part of their meaning."""


@dataclass(frozen=True)
class StreamTableJoin(Join):
    """A stream record joined with the table as of the record's own timestamp (KIP-914, KIP-923).

    Late: a record that comes after its grace period is joined at once; as of a time before the
    table's history it finds the latest version if that is old enough, else nothing. Null key: dropped
    and counted (inner), or kept with nulls, at once (left). Tombstone: of the stream, dropped and
    counted; of the table, the key has no row from then on.

    Args:
        left: the stream; only its records trigger results, which keep its key and timestamp.
        right: the table; a versioned one is read as of the record's timestamp (inclusive), any
            other as it is when the run starts.
        kind: ``inner``: a record without a match gives nothing; ``left``: it is kept, with nulls.
        name: name of the result.
        select: columns of the result: ``left.*``, ``right.column``, ``right.column as name``, or
            any SQL expression over them with an alias. A versioned table also offers
            ``right.valid_from`` and ``right.valid_to`` (null where nothing matched). The key
            columns are always there.
        grace_period: a record waits until stream time >= its timestamp + grace period; one that
            arrives later than that is joined at once. Needs a versioned table, and at most its
            history retention. None or 0: nothing waits.
        as_known: of a versioned table, among which versions the one of the record's timestamp is
            looked for. ``now``: all. ``when_recorded``: those recorded no later than the stream's
            record was (``recorded_at`` of both logs, inclusive), which is what a live system could
            have known. A duration: those recorded no later than timestamp + duration (inclusive)
            that are there when the run starts; a ``grace_period`` lets the record wait for them. With
            stream time and history retention of then: what ``read(as_of=, as_known_at=)`` gives. A
            row of a log from before times of record were noted counts as known from the start, and
            such a record of the stream as recorded at its timestamp.
        max_age: of a versioned table, a version that began longer before the record than this gives no
            match (exactly that long before does). A deletion never gives an older version.
        at: of a versioned table, ``at_or_before``: the version that began at the record's timestamp or
            before; ``before``: only before.
    """

    grace_period: Duration | None = None
    as_known: AsKnown = "now"
    max_age: timedelta | None = None
    at: At = "at_or_before"

    def __post_init__(self) -> None:
        left, right = self.left, self.right
        if not right.is_table:
            raise TopologyError(
                f"{self.name}: the right side of a stream-table join must be a Table or a "
                f"VersionedTable, got the {type(right).__name__} {right.name!r}"
            )
        if left.is_table:
            raise TopologyError(
                f"{self.name}: the left side of a stream-table join must be a Stream, got the "
                f"{type(left).__name__} {left.name!r}"
            )
        check_kind(self.name, "stream-table join", self.kind, ("inner", "left"))
        object.__setattr__(self, "select", tuple(self.select))
        check_keys(self.name, left, right)
        if self.grace_period is not None:
            self._check_grace(self.grace_period)
        check_match(self.name, right, self.as_known, self.max_age, self.at)
        self._check_waits_for_nothing()
        self.projection()

    @property
    def waits(self) -> bool:
        """Whether anything can wait: a grace period of zero is none."""
        return self.grace_period is not None and self.grace_period != type(self.grace_period)()

    @property
    def rescan_span(self) -> dict[str, timedelta]:
        return {self.left.name: longest(self.grace_period or timedelta(0))}

    @property
    def needs_whole_log(self) -> tuple[Node, ...]:
        return () if self.as_known == "now" else (self.right,)

    @property
    def settings(self) -> dict[str, str]:
        return {"grace_period": spoken(self.grace_period or timedelta(0)), **self._chosen}

    @property
    def meaning(self) -> dict[str, str]:
        told = super().meaning
        return {name: value for name, value in told.items() if value != _KAFKAS.get(name)}

    @property
    def _chosen(self) -> dict[str, str]:
        """What is not as in Kafka Streams, as it is said to people."""
        told = {"as_known": self.as_known, "max_age": self.max_age, "at": self.at}
        return {
            name: spoken(value) if isinstance(value, timedelta) else str(value)
            for name, value in told.items()
            if str(value) != _KAFKAS[name]
        }

    @property
    def log_columns(self) -> tuple[str, ...]:
        return (IS_LATE,) if self.waits else ()

    def _check_grace(self, grace: Duration) -> None:
        check_duration(self.name, "grace_period", grace)
        kept = self.right.retention
        if kept is None:
            raise TopologyError(
                f"{self.name}: a grace period needs a versioned table, but {self.right.name!r} is "
                "not versioned: declare it as VersionedTable with a history_retention, or leave "
                "grace_period out"
            )
        for partition, (period, retention) in pairs(grace, kept):
            if period > retention:
                raise TopologyError(
                    f"{self.name}: the grace period {period}{partition} is longer than the history "
                    f"retention {retention} of {self.right.name!r}; records would leave the buffer "
                    "after the versions they need are gone: shorten one or lengthen the other"
                )

    def _check_waits_for_nothing(self) -> None:
        if self.as_known == "when_recorded" and self.waits:
            raise TopologyError(
                f"{self.name}: as_known='when_recorded' takes what was recorded before the stream's "
                "record came, so waiting finds nothing more: leave grace_period out, or let as_known "
                "be a duration, up to which later records of the table count"
            )

    def _side(self, node: Node) -> Side:
        ends = (VALID_FROM, VALID_TO) if node.versioned else ()
        return Side(node.name, tuple(node.schema.fields), (TIMESTAMP, *ends))

    def result(self, **shown: Any) -> Any:
        return make_node(
            "stream",
            self.name,
            key=self.left.key,
            schema=StructType(self.projection().fields()),
            timestamp=TIMESTAMP,
            partitions=self.left.partitions,
            partition_by=self.left.partition_by,
            null_key=self.left.null_key,
            operator=self,
            **shown,
        )

    def describe(self) -> str:
        how = "as of its own time" if self.right.versioned else "as it is when the run starts"
        missing = "; without a match it gives nothing" if self.kind == "inner" else ""
        wait = f"; waits {spoken(self.grace_period)} of stream time first" if self.grace_period else ""
        more = "".join(f"; {name} {value}" for name, value in self._chosen.items())
        return f"{self.left.name}, each record with {self.right.name} {how}{missing}{wait}{more}."


def check_match(name: str, table: Node, as_known: Any, max_age: Any, at: Any) -> None:
    """Refuses a way to match records with versions that there is not, or not of this table.

    Raises:
        TopologyError: names the setting and what came.
    """
    if at in ("nearest", "forward", "after", "at_or_after"):
        raise TopologyError(
            f"{name}: at={at!r} would find versions that begin after a record's own time: it looks "
            "into the record's future, which nobody knew then; expected 'at_or_before' or 'before'"
        )
    if at not in ("at_or_before", "before"):
        raise TopologyError(f"{name}: at must be 'at_or_before' or 'before', got {at!r}")
    if isinstance(as_known, timedelta):
        check_duration(name, "as_known", as_known)
    elif as_known not in ("now", "when_recorded"):
        raise TopologyError(
            f"{name}: as_known must be 'now', 'when_recorded' or a datetime.timedelta after the "
            f"record's timestamp, got {as_known!r}"
        )
    if as_known != "now":
        need_each_record(name, "a join by what was known", table)
    if max_age is not None:
        if not isinstance(max_age, timedelta):
            raise TopologyError(
                f"{name}: max_age must be a datetime.timedelta, got {max_age!r}; write for example "
                "max_age=timedelta(hours=2)"
            )
        check_duration(name, "max_age", max_age)
    if (as_known, max_age, at) != ("now", None, "at_or_before") and not table.versioned:
        raise TopologyError(
            f"{name}: as_known, max_age and at choose among the versions of a table, but "
            f"{table.name!r} is not versioned: declare it as VersionedTable with a history_retention, "
            "or leave them out"
        )
