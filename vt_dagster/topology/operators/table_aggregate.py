"""aggregate of a table: its rows by another key."""

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
    """A user-written aggregation, in Python, called once for each added or taken-out row.

    Rows and aggregates are dicts. It runs in Spark's Python workers over sorted batches, with the
    aggregate of one group in memory.

    Args:
        initializer: gives the aggregate of an empty group; None: the first row added is taken as
            it is (Kafka's ``reduce``).
        adder: ``(row, aggregate) -> aggregate``.
        subtractor: the same, for a row that is replaced or deleted.
        schema: the columns of the aggregate, a StructType; None: those of the row (``reduce``).
    """

    adder: Callable[[Row, Row], Row]
    subtractor: Callable[[Row, Row], Row]
    initializer: Callable[[], Row] | None = None
    schema: Any = None


@dataclass(frozen=True)
class TableAggregate(Aggregate):
    """A table's rows aggregated by another key (KIP-914).

    A change takes the old row out of its group and adds the new one. Out-of-order records of a
    versioned table are ignored. Results of a group never go back in time; a group that empties
    stays.

    Late: an out-of-order change of a versioned table is ignored and not counted; a versioned result
    refuses what is older than its retention. Null key: a table has none; a row in whose group key
    anything is null belongs to no group. Tombstone: takes the old row out of its group; of a row that
    is not there it does nothing.

    Args:
        group_key: the new key's columns; a row in which any is null belongs to no group.
        select: the columns that an :class:`Aggregator` sees.
        aggregates: (name, SQL aggregate) pairs, of count, sum, avg; or an Aggregator.
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
                f"{self.name}: min and max cannot take out a row that was replaced; aggregate a "
                "table by count, sum and avg, or with an Aggregator of your own"
            )
        self.keys()

    def selection(self) -> Selection:
        """The columns that an Aggregator sees."""
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
