"""What ``group_by`` and ``windowed_by`` give: a step on the way to an aggregate."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from vt_dagster.topology.node import Node
from vt_dagster.topology.operators import (
    Aggregator,
    Emit,
    Materialized,
    Row,
    StreamAggregate,
    TableAggregate,
    WindowedAggregate,
)
from vt_dagster.topology.windows import Window

T = TypeVar("T", bound=Node)
"""The class of what an aggregate gives, a table: it has methods that give what is in this module."""


@dataclass(frozen=True)
class GroupedTable(Generic[T]):
    """A table's rows by another key; see :class:`vt_dagster.topology.operators.TableAggregate`."""

    table: Node
    key: tuple[str, ...]
    partitions: int | None = None
    partition_by: str | None = None

    def aggregate(
        self,
        aggregates: Mapping[str, str] | Aggregator,
        *,
        name: str,
        select: Sequence[str] = ("*",),
        materialized: Materialized | None = None,
        emit: Emit = "every_update",
        **shown: Any,
    ) -> T:
        """One row a group.

        Args:
            aggregates: ``{"aircraft": "count(*)", "seats": "sum(seats)"}``, of count, sum and avg
                over SQL expressions; or an :class:`Aggregator`.
            select: the columns that an Aggregator sees.
            emit: every update, in the order of the records, as Kafka Streams without a cache; or of
                each group the last of a run, as its cache leaves it. Floating-point numbers are
                summed in the order of the records either way, so that both end with the same bits;
                that costs a sort by group. Whole numbers and decimals are exact in any order: with
                ``per_run`` they are a hash aggregate.
        """
        chosen = aggregates if isinstance(aggregates, Aggregator) else tuple(aggregates.items())
        return TableAggregate(
            self.table,
            name,
            materialized,
            group_key=self.key,
            aggregates=chosen,
            select=tuple(select),
            emit=emit,
            partitions=self.partitions,
            partition_by=self.partition_by,
        ).result(**shown)

    def count(self, *, name: str, column: str = "count", **more: Any) -> T:
        """The number of rows of each group."""
        return self.aggregate({column: "count(*)"}, name=name, **more)

    def sum(self, expression: str, *, name: str, column: str = "sum", **more: Any) -> T:
        """The sum of an expression over each group's rows; null adds nothing."""
        return self.aggregate({column: f"sum({expression})"}, name=name, **more)

    def reduce(
        self,
        adder: Callable[[Row, Row], Row],
        subtractor: Callable[[Row, Row], Row],
        *,
        name: str,
        **more: Any,
    ) -> T:
        """The rows of each group combined by functions ``(row, aggregate) -> aggregate``."""
        return self.aggregate(Aggregator(adder, subtractor), name=name, **more)


@dataclass(frozen=True)
class GroupedStream(Generic[T]):
    """A stream's records by a key, to be aggregated as they are or cut into windows."""

    stream: Node
    key: tuple[str, ...]
    partitions: int | None = None
    partition_by: str | None = None

    def windowed_by(self, window: Window) -> WindowedStream[T]:
        """The records of each key in tumbling, hopping, session or sliding windows."""
        return WindowedStream(self, window)

    def aggregate(
        self,
        aggregates: Mapping[str, str],
        *,
        name: str,
        materialized: Materialized | None = None,
        emit: Emit = "every_update",
        **shown: Any,
    ) -> T:
        """One row for each key, of all its records; see ``StreamAggregate``.

        Args:
            aggregates: ``{"orders": "count(*)", "amount": "sum(amount)"}``, of count, sum and avg over
                SQL expressions.
        """
        return StreamAggregate(
            self.stream,
            name,
            materialized,
            aggregates=tuple(aggregates.items()),
            group_key=self.key,
            emit=emit,
            partitions=self.partitions,
            partition_by=self.partition_by,
        ).result(**shown)

    def count(self, *, name: str, column: str = "count", **more: Any) -> T:
        """The number of records of each key."""
        return self.aggregate({column: "count(*)"}, name=name, **more)


@dataclass(frozen=True)
class WindowedStream(Generic[T]):
    """A stream's records by key and window; see ``WindowedAggregate``."""

    grouped: GroupedStream[T]
    window: Window

    def aggregate(
        self,
        aggregates: Mapping[str, str],
        *,
        name: str,
        emit: Emit = "every_update",
        **shown: Any,
    ) -> T:
        """One row for each key and window.

        Args:
            aggregates: ``{"departures": "count(*)", "mean_delay": "avg(dep_delay)"}``, of count, sum,
                min, max and avg over SQL expressions.
        """
        grouped = self.grouped
        return WindowedAggregate(
            grouped.stream,
            name,
            window=self.window,
            aggregates=tuple(aggregates.items()),
            group_key=grouped.key,
            emit=emit,
            partitions=grouped.partitions,
            partition_by=grouped.partition_by,
        ).result(**shown)

    def count(self, *, name: str, column: str = "count", **more: Any) -> T:
        """The number of records of each key and window."""
        return self.aggregate({column: "count(*)"}, name=name, **more)
