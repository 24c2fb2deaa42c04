"""Windowed aggregate of a stream: its records by key and window."""

from __future__ import annotations

from dataclasses import dataclass, field

from pyspark.sql.types import StructField, TimestampType

from vt_dagster.columns import WINDOW_END, WINDOW_START
from vt_dagster.errors import TopologyError
from vt_dagster.topology.operators.aggregates import Aggregate
from vt_dagster.topology.operators.base import check_emit
from vt_dagster.topology.specification import WindowedAggregateSpec
from vt_dagster.topology.windows import Window


@dataclass(frozen=True)
class WindowedAggregate(Aggregate):
    """Aggregates a stream's records by key and window (grace period as in KIP-328).

    A record updates its windows while they are open. The result is a plain table whose key ends with
    ``window_start`` and ``window_end`` (timestamps).

    Each materialization has KIP-328's metrics: ``record_lateness_avg_seconds``,
    ``record_lateness_max_seconds``, ``late_records_dropped`` (records whose window was closed) and
    ``expired_window_records_dropped`` (closed windows that records would have updated; from the first
    one on). If a run reads more than 100,000 records of a partition, the lateness metrics assume that
    stream time advances evenly within each thousand of them; which records are late is decided
    exactly.

    Late: a record updates its open windows; each closed window is counted as dropped. Null key: dropped
    and counted, does not advance stream time. Tombstone: aggregated like any record, with null values;
    sliding windows drop and count it.

    Args:
        window: tumbling, hopping, session or sliding.
        group_key: empty = the stream's key.
        aggregates: (name, SQL aggregate) pairs; count, sum, min, max or avg.
    """

    window: Window = field(kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.source.is_table:
            raise TopologyError(
                f"{self.name}: windowed_by needs a stream, but {self.source.name!r} is a table; "
                "convert it with to_stream(name=...), or use group_by without a window"
            )
        check_emit(self.name, self.emit)
        self.parsed()
        keys = self.keys()
        taken = [n for n, _ in keys.columns if n.lower() in (WINDOW_START, WINDOW_END)]
        if taken:
            raise TopologyError(
                f"{self.name}: the key columns {taken} have the names of the result's window bounds; "
                "rename them, for example 'window_start as own_window_start'"
            )

    @property
    def specification(self) -> WindowedAggregateSpec:
        window = self.window.specification
        return WindowedAggregateSpec(**self._grouping, aggregates=self._columns, window=window)

    def _key_fields(self) -> list[StructField]:
        bounds = [StructField(name, TimestampType()) for name in (WINDOW_START, WINDOW_END)]
        return [*super()._key_fields(), *bounds]
