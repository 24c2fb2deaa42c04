"""map_values: replaces the value columns of a table."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from pyspark.sql.types import StructType

from vt_dagster.topology.operators.base import check_not_time, need_table
from vt_dagster.topology.operators.row_by_row import RowByRow
from vt_dagster.topology.projection import Selection


@dataclass(frozen=True)
class MapValues(RowByRow):
    """Replaces the value columns of a table by ``select`` and keeps the key (KIP-914).

    Late: an out-of-order change of a versioned table is emitted with its own timestamp; a result
    materialized with a history retention refuses records older than that. Null key: a table has none.
    Tombstone: stays a tombstone; repeated ones are emitted too.

    Args:
        select: ``column``, ``*``, or a SQL expression over the table's columns with an alias.
        materialized: None: the result has no store of its own, and is versioned if the table is.
    """

    select: tuple[str, ...] = field(kw_only=True)

    def __post_init__(self) -> None:
        need_table(self.name, "map_values", self.source)
        object.__setattr__(self, "select", tuple(self.select))
        check_not_time(self.name, [name for name, _ in self.selection().columns])

    def selection(self) -> Selection:
        """The columns of the result, checked against the table."""
        fields = tuple(self.source.schema.fields)
        return Selection(self.name, self.source.name, fields, self.select, tuple(self.source.key))

    def result(self, **shown: Any) -> Any:
        return self._rows(StructType(self.selection().fields_of_result()), shown)

    def lineage(self) -> dict[str, list[tuple[str, str]]]:
        return self.selection().lineage()

    def describe(self) -> str:
        return f"{self.source.name} with the values {', '.join(self.select)}."
