"""History join: two versioned tables with the same key, joined over their whole histories."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from pyspark.sql.types import StructType

from vt_dagster.errors import TopologyError
from vt_dagster.topology.durations import Duration, pairs
from vt_dagster.topology.operators.base import make_table
from vt_dagster.topology.operators.table_table_join import TableTableJoin


@dataclass(frozen=True)
class HistoryJoin(TableTableJoin):
    """A temporal join of two versioned tables: the result's versions are the intersections of the
    validity intervals of both sides.

    A record of either side changes the table from its timestamp (inclusive) to the next version of its
    key (exclusive). The result is recomputed at each start of a version of either side in that
    interval. Unlike Kafka Streams' table-table join, the final versions depend neither on the order of
    arrival nor on how arrivals are split into runs. A run emits each version once.

    Late: an out-of-order record is processed like any other; the result refuses versions older than its
    history retention, in the stream time of both sides together. Null key: a table has none. Tombstone:
    ends the version of its side; the result has a tombstone from then on if the kind of join needs that
    side.

    Args:
        kind: ``inner``, ``left`` or ``outer``.
        materialized: None: the shorter history retention of the two sides.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        for side in self.inputs:
            if not side.versioned:
                raise TopologyError(
                    f"{self.name}: history='complete' needs two versioned tables, but {side.name!r} "
                    "keeps only its latest rows; declare it as VersionedTable (for an operator's "
                    "result: materialized=Materialized(history_retention=...)), or remove history"
                )
        if self.materialized is not None and self.materialized.history_retention is None:
            raise TopologyError(
                f"{self.name}: history='complete' needs a versioned result, got a Materialized without "
                "history_retention; set Materialized(history_retention=...), or remove materialized"
            )
        self._check_length()
        if self.monotone_timestamps:
            raise TopologyError(
                f"{self.name}: monotone_timestamps prevents results with earlier timestamps, but "
                "history='complete' emits them for late records; remove one of the two settings"
            )

    def _check_length(self) -> None:
        kept = None if self.materialized is None else self.materialized.history_retention
        if kept is None:
            return
        for side in self.inputs:
            for partition, (asked, there) in pairs(kept, side.retention):
                if asked > there:
                    raise TopologyError(
                        f"{self.name}: expected a history_retention of at most {there}{partition}, "
                        f"the history retention of {side.name!r}, got {asked}: older results would "
                        f"need expired versions; shorten it, or lengthen that of {side.name!r}"
                    )

    @property
    def monotone(self) -> bool:
        return False

    def made(self, schema: StructType, shown: dict[str, Any]) -> Any:
        lengths = [side.history_retention for side in self.inputs]
        return make_table(
            self, self.left, schema, self.materialized, shown, inherited=_shorter(*lengths)
        )

    def describe(self) -> str:
        return (
            f"{self.left.name} and {self.right.name} by their common key ({self.kind}), over their "
            "whole histories."
        )


def _shorter(one: Duration, other: Duration) -> Duration:
    if isinstance(one, timedelta) and isinstance(other, timedelta):
        return min(one, other)
    return one
