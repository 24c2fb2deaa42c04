"""History join: two versioned tables with the same key, at every time of both their histories."""

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
    """Two versioned tables at every time: the result's versions are the intersections of both sides'.

    Where a record of either side changes what is true from its timestamp to its key's next version,
    the result is told anew from each begin of a version of either side in that time. So, other than
    Kafka Streams' table-table join, whatever the order of arrival and however arrivals are cut into
    runs, the result has the same versions in the end. A run says each of them once.

    Late: a record out of order is a record like any other; the result refuses what is older than its
    own retention in stream time, which is that of both sides. Null key: a table has none. Tombstone:
    it ends what is true of that side; the result has one from where the kind of join wants the side.

    Args:
        kind: ``inner``, ``left`` or ``outer``.
        materialized: None: a history as long as the shorter of both sides'.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        for side in self.inputs:
            if not side.versioned:
                raise TopologyError(
                    f"{self.name}: expected two versioned tables to join by their whole history, but "
                    f"{side.name!r} remembers its latest rows alone; make it a VersionedTable (of a "
                    "result: materialized=Materialized(history_retention=...)), or leave history out"
                )
        if self.materialized is not None and self.materialized.history_retention is None:
            raise TopologyError(
                f"{self.name}: expected a history for the result of history='complete', got none; give "
                "materialized=Materialized(history_retention=...), or leave it out"
            )
        self._check_length()
        if self.monotone_timestamps:
            raise TopologyError(
                f"{self.name}: monotone_timestamps keeps results from going back in time, but with "
                "history='complete' that is what they do; leave one of them out"
            )

    def _check_length(self) -> None:
        kept = None if self.materialized is None else self.materialized.history_retention
        if kept is None:
            return
        for side in self.inputs:
            for partition, (asked, there) in pairs(kept, side.retention):
                if asked > there:
                    raise TopologyError(
                        f"{self.name}: expected a history of the result of at most {there}{partition}, "
                        f"the history retention of {side.name!r}, got {asked}: older results would be "
                        "made of versions that are gone; shorten it, or lengthen that"
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
            f"{self.left.name} and {self.right.name} by their common key ({self.kind}), at every time "
            "of both their histories."
        )


def _shorter(one: Duration, other: Duration) -> Duration:
    if isinstance(one, timedelta) and isinstance(other, timedelta):
        return min(one, other)
    return one
