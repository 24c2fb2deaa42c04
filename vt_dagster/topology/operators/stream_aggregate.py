"""aggregate of a stream without windows: one row per key over all its records."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from vt_dagster.errors import TopologyError
from vt_dagster.topology.accumulators import Aggregates
from vt_dagster.topology.operators.aggregate import Aggregate
from vt_dagster.topology.operators.base import check_emit


@dataclass(frozen=True)
class StreamAggregate(Aggregate):
    """Aggregates all records of a stream by key, like Kafka Streams' ``groupByKey().aggregate()``.

    Each record emits one result with the largest timestamp of its group so far. Late: aggregated like
    any other record. Null key: dropped and counted; after a change of key (``group_by`` with columns,
    ``select_key``) dropped without being counted, as in Kafka Streams' repartitioning. Tombstone:
    dropped and counted.

    Args:
        group_key: empty = the stream's key.
        aggregates: (name, SQL aggregate) pairs; count, sum, min, max or avg.
        materialized: None: a plain table; with a history retention: a versioned table.
    """

    called = ("aggregate",)

    aggregates: tuple[tuple[str, str], ...] = field(kw_only=True)

    def __post_init__(self) -> None:
        if self.source.is_table:
            raise TopologyError(
                f"{self.name}: expected a stream, got the table {self.source.name!r}, whose old rows "
                "must be subtracted; use its group_by(...).aggregate(...)"
            )
        check_emit(self.name, self.emit)
        self.parsed()
        self.keys()

    @property
    def rekeyed(self) -> bool:
        return bool(self.group_key) or self.source.rekeyed

    def parsed(self) -> Aggregates:
        """The aggregates, parsed."""
        return Aggregates(self.name, self.aggregates)

    def result(self, **shown: Any) -> Any:
        values = self.parsed().fields(self.source.schema)
        return self._grouped(self.keys().fields_of_result(), values, self.materialized, shown)

    def lineage(self) -> dict[str, list[tuple[str, str]]]:
        return self._lineage(self.aggregates)

    def describe(self) -> str:
        what = ", ".join(e for _, e in self.aggregates)
        return f"{self.source.name} by {', '.join(self.group_key or self.source.key)}: {what}."
