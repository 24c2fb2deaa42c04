"""aggregate of a stream: its records by key and window."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from pyspark.sql.types import StructField, TimestampType

from vt_dagster.columns import WINDOW_END, WINDOW_START
from vt_dagster.errors import TopologyError
from vt_dagster.topology.accumulators import Aggregates
from vt_dagster.topology.operators.aggregate import Aggregate
from vt_dagster.topology.operators.base import check_emit
from vt_dagster.topology.windows import Window


@dataclass(frozen=True)
class WindowedAggregate(Aggregate):
    """A stream's records aggregated by key and window (KIP-328's window grace).

    A window is updated while it is open; a record whose window has closed is dropped and counted.
    The result is a plain table whose key ends with ``window_start`` and ``window_end``.

    Each materialization has KIP-328's metrics: ``record_lateness_avg_seconds``,
    ``record_lateness_max_seconds``, ``late_records_dropped`` (records that found a window closed) and
    ``expired_window_records_dropped`` (closed windows that records would have updated; from the first
    of them on). Where a run takes more than 100,000 records of a partition, the lateness is told as if
    stream time moved evenly within each thousand of them; what is late is decided exactly.

    Late: a record updates those of its windows that are open; each that is closed counts as dropped.
    Null key: dropped and counted; it does not move stream time. Tombstone: a record like any other,
    whose values are null; sliding windows drop and count it.

    Args:
        window: tumbling, hopping, session or sliding.
        group_key: empty = the stream's own key.
        aggregates: (name, SQL aggregate) pairs, of count, sum, min, max, avg.
    """

    window: Window = field(kw_only=True)
    aggregates: tuple[tuple[str, str], ...] = field(kw_only=True)

    def __post_init__(self) -> None:
        if self.source.is_table:
            raise TopologyError(
                f"{self.name}: windows hold records of a stream, but {self.source.name!r} is a table; "
                "use its changes, to_stream(name=...), or group_by without a window"
            )
        check_emit(self.name, self.emit)
        self.parsed()
        keys = self.keys()
        taken = [n for n, _ in keys.columns if n.lower() in (WINDOW_START, WINDOW_END)]
        if taken:
            raise TopologyError(
                f"{self.name}: the key columns {taken} have the names of the window's ends; rename "
                "them, for example 'window_start as asked_from'"
            )

    def parsed(self) -> Aggregates:
        """The aggregates, parsed."""
        return Aggregates(self.name, self.aggregates)

    def result(self, **shown: Any) -> Any:
        keys = [
            *self.keys().fields_of_result(),
            StructField(WINDOW_START, TimestampType()),
            StructField(WINDOW_END, TimestampType()),
        ]
        return self._grouped(keys, self.parsed().fields(self.source.schema), None, shown)

    def lineage(self) -> dict[str, list[tuple[str, str]]]:
        return self._lineage(self.aggregates)

    def describe(self) -> str:
        what = ", ".join(e for _, e in self.aggregates)
        by = ", ".join(self.group_key or self.source.key)
        return f"{self.source.name} by {by}, {self.window.describe()}: {what}."
