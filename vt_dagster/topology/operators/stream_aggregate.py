"""aggregate of a stream without windows: all records of a key so far."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from vt_dagster.errors import TopologyError
from vt_dagster.topology.accumulators import Aggregates
from vt_dagster.topology.operators.aggregate import Aggregate
from vt_dagster.topology.operators.base import check_emit


@dataclass(frozen=True)
class StreamAggregate(Aggregate):
    """A stream's records aggregated by key (Kafka's ``groupByKey`` and ``groupBy`` without windows).

    Every record gives a result at once, with the largest timestamp of its key so far. A late record
    counts like any other, but for a result with a history of its own, which refuses one that is too
    old. A record without a value (a tombstone) is dropped and counted. So is one without a key; but
    where the key was made on the way (``group_by`` with a key, ``select_key``) that is left out without
    being counted.

    Args:
        group_key: empty = the stream's own key.
        aggregates: (name, SQL aggregate) pairs, of count, sum, min, max, avg.

    Source: FORMAT 4.12.4-4.12.6; merge-then-count-counts-both-and-drops-nulls,
    select-key-then-count-null-keys-vanish, select-key-then-count-null-values,
    select-key-then-count-time-goes-back.
    """

    aggregates: tuple[tuple[str, str], ...] = field(kw_only=True)

    def __post_init__(self) -> None:
        if self.source.is_table:
            raise TopologyError(
                f"{self.name}: an aggregate of records needs a Stream, but {self.source.name!r} is a "
                f"table; aggregate its rows, {self.source.name}.group_by(key), or take its changes, "
                "to_stream(name=...)"
            )
        check_emit(self.name, self.emit)
        self.parsed()
        self.keys()

    @property
    def regrouped(self) -> bool:
        """Whether records have another key than when they came, and are repartitioned by it."""
        operator = self.source.operator
        return bool(self.group_key) or (operator is not None and operator.new_key)

    def parsed(self) -> Aggregates:
        """The aggregates, parsed."""
        return Aggregates(self.name, self.aggregates)

    def result(self, **shown: Any) -> Any:
        keys = self.keys().fields_of_result()
        values = self.parsed().fields(self.source.schema)
        return self._grouped(keys, values, self.materialized, shown)

    def lineage(self) -> dict[str, list[tuple[str, str]]]:
        return self._lineage(self.aggregates)

    def describe(self) -> str:
        what = ", ".join(e for _, e in self.aggregates)
        return f"{self.source.name} by {', '.join(self.group_key or self.source.key)}: {what}."
