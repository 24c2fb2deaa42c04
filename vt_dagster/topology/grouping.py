"""The results of ``group_by`` and ``windowed_by``, whose methods make aggregates."""

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
"""``Table``, which this module cannot import (import cycle)."""


@dataclass(frozen=True)
class GroupedTable(Generic[T]):
    """A table grouped by another key; see :class:`vt_dagster.topology.operators.TableAggregate`."""

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
        """Makes a table with one row per group.

        Args:
            aggregates: ``{"aircraft": "count(*)", "seats": "sum(seats)"}``: count, sum and avg over
                SQL expressions; or an :class:`Aggregator`.
            select: the columns passed to an Aggregator.
            emit: ``every_update``, in order of the records, like Kafka Streams without a cache; or
                ``per_run``: only the last update of each group in a run, like Kafka Streams with a
                cache. Both sum floating-point numbers in order of the records, at the cost of a sort by
                group, so that the final bits are equal. Integers and decimals are exact in any order:
                with ``per_run`` they use a hash aggregate.
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
        """Counts the rows of each group."""
        return self.aggregate({column: "count(*)"}, name=name, **more)

    def sum(self, expression: str, *, name: str, column: str = "sum", **more: Any) -> T:
        """Sums an expression over the rows of each group; null adds nothing."""
        return self.aggregate({column: f"sum({expression})"}, name=name, **more)

    def reduce(
        self,
        adder: Callable[[Row, Row], Row],
        subtractor: Callable[[Row, Row], Row],
        *,
        name: str,
        **more: Any,
    ) -> T:
        """Combines the rows of each group with functions ``(row, aggregate) -> aggregate``."""
        return self.aggregate(Aggregator(adder, subtractor), name=name, **more)


@dataclass(frozen=True)
class GroupedStream(Generic[T]):
    """A stream grouped by a key, to aggregate with or without windows."""

    stream: Node
    key: tuple[str, ...]
    partitions: int | None = None
    partition_by: str | None = None

    def windowed_by(self, window: Window) -> WindowedStream[T]:
        """Groups the records of each key by tumbling, hopping, session or sliding windows."""
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
        """Makes a table with one row per key; see ``StreamAggregate``.

        Args:
            aggregates: ``{"orders": "count(*)", "amount": "sum(amount)"}``: count, sum, min, max and
                avg over SQL expressions.
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
        """Counts the records of each key."""
        return self.aggregate({column: "count(*)"}, name=name, **more)


@dataclass(frozen=True)
class WindowedStream(Generic[T]):
    """A stream grouped by key and window; see ``WindowedAggregate``."""

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
        """Makes a table with one row per key and window.

        Args:
            aggregates: ``{"departures": "count(*)", "mean_delay": "avg(dep_delay)"}``: count, sum,
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
        """Counts the records of each key and window."""
        return self.aggregate({column: "count(*)"}, name=name, **more)
