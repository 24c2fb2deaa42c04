"""stream-table join: each record with the table as of the record's own time."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from pyspark.sql.types import StructType

from vt_dagster.columns import IS_LATE, TIMESTAMP, VALID_FROM, VALID_TO
from vt_dagster.errors import TopologyError
from vt_dagster.topology.durations import Duration, check_duration, pairs, spoken
from vt_dagster.topology.node import Node, make_node
from vt_dagster.topology.operators.join import Join, check_keys, check_kind
from vt_dagster.topology.projection import Side


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
    """

    grace_period: Duration | None = None

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
        self.projection()

    @property
    def waits(self) -> bool:
        """Whether anything can wait: a grace period of zero is none."""
        return self.grace_period is not None and self.grace_period != type(self.grace_period)()

    @property
    def settings(self) -> dict[str, str]:
        return {"grace_period": spoken(self.grace_period or timedelta(0))}

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
        return f"{self.left.name}, each record with {self.right.name} {how}{missing}{wait}."
