"""aggregate of a table: its current rows, grouped by another key."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from vt_dagster.errors import TopologyError
from vt_dagster.topology.accumulators import Aggregates
from vt_dagster.topology.operators.aggregate import Aggregate
from vt_dagster.topology.operators.base import check_emit, need_each_record, need_table
from vt_dagster.topology.projection import Selection
from vt_dagster.topology.schema import as_struct

Row = dict[str, Any]


@dataclass(frozen=True)
class Aggregator:
    """A user-defined aggregation in Python, called once for each added or subtracted row.

    Rows and aggregates are dicts. It runs in Spark's Python workers over sorted batches, with the
    aggregate of one group in memory.

    Args:
        adder: ``(row, aggregate) -> aggregate``, for a new row.
        subtractor: ``(row, aggregate) -> aggregate``, for a row that is replaced or deleted.
        initializer: returns the aggregate of an empty group; None: the first row is the aggregate
            (Kafka's ``reduce``).
        schema: columns of the aggregate, a StructType; None: those of the row (``reduce``).
    """

    adder: Callable[[Row, Row], Row]
    subtractor: Callable[[Row, Row], Row]
    initializer: Callable[[], Row] | None = None
    schema: Any = None


@dataclass(frozen=True)
class TableAggregate(Aggregate):
    """Aggregates a table's current rows by another key (KIP-914).

    A change subtracts the old row from its group and adds the new row to its group. Timestamps of a
    group's results never decrease; an empty group keeps its row.

    Late: an out-of-order change of a versioned table is ignored and not counted; a versioned result
    refuses records older than its history retention. Null key: a table has none; a row with a null in
    its group key belongs to no group. Tombstone: subtracts the old row from its group; without an old
    row it is ignored.

    Args:
        group_key: new key columns; a row with a null in any of them belongs to no group.
        select: the columns passed to an :class:`Aggregator`.
        aggregates: (name, SQL aggregate) pairs, count, sum or avg; or an Aggregator.
    """

    called = ("aggregate",)

    aggregates: tuple[tuple[str, str], ...] | Aggregator = field(kw_only=True)
    select: tuple[str, ...] = field(default=("*",), kw_only=True)

    def __post_init__(self) -> None:
        need_table(self.name, "group_by", self.source)
        need_each_record(self.name, "group_by", self.source)
        check_emit(self.name, self.emit)
        if not self.group_key:
            raise TopologyError(
                f"{self.name}: group_by needs the columns or expressions of the new key, for example "
                f"group_by({self.source.value_columns[0] if self.source.value_columns else 'x'!r})"
            )
        if isinstance(self.aggregates, Aggregator):
            self.selection()
        elif not self.parsed().invertible:
            raise TopologyError(
                f"{self.name}: min and max cannot subtract a replaced row; aggregate a table with "
                "count, sum and avg, or write an Aggregator"
            )
        self.keys()

    def selection(self) -> Selection:
        """The columns passed to an Aggregator."""
        return Selection(self.name, self.source.name, tuple(self.source.schema.fields), self.select)

    def parsed(self) -> Aggregates:
        """The aggregates, parsed."""
        assert not isinstance(self.aggregates, Aggregator)
        return Aggregates(self.name, self.aggregates)

    def result(self, **shown: Any) -> Any:
        keys = self.keys().fields_of_result()
        if not isinstance(self.aggregates, Aggregator):
            values = self.parsed().fields(self.source.schema)
        elif self.aggregates.schema is None:
            names = {k.name for k in keys}
            values = [f for f in self.selection().fields_of_result() if f.name not in names]
        else:
            values = list(as_struct(self.aggregates.schema, self.name).fields)
        return self._grouped(keys, values, self.materialized, shown)

    def lineage(self) -> dict[str, list[tuple[str, str]]]:
        if not isinstance(self.aggregates, Aggregator):
            return self._lineage(self.aggregates)
        every = [(self.source.name, c) for c, _ in self.selection().columns]
        return self.keys().lineage() | dict.fromkeys(self.result().value_columns, every)

    def describe(self) -> str:
        what = (
            "an aggregator"
            if isinstance(self.aggregates, Aggregator)
            else ", ".join(e for _, e in self.aggregates)
        )
        return f"{self.source.name} by {', '.join(self.group_key)}: {what}."
