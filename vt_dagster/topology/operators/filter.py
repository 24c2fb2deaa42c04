"""filter and filter_not: the rows for which a condition holds or does not hold."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from vt_dagster.errors import TopologyError
from vt_dagster.topology.operators.base import need_table
from vt_dagster.topology.operators.row_by_row import RowByRow


@dataclass(frozen=True)
class Filter(RowByRow):
    """The rows of a table for which a condition holds (KIP-914).

    A row that does not pass becomes a tombstone. A versioned table emits every record, so that the
    result has a version for the time when a row did not pass. A plain table skips a record if neither
    the record nor its key's previous row passes.

    Late: an out-of-order change of a versioned table is emitted with its own timestamp; a result
    materialized with a history retention refuses records older than that. Null key: a table has none.
    Tombstone: stays a tombstone, in ``filter_not`` too; a repeated one is treated like a row that does
    not pass.

    Args:
        predicate: SQL condition over the table's columns; null counts as false.
        negate: keep the rows that do not pass (``filter_not``).
        materialized: None: the result has no store of its own, and is versioned if the table is.
    """

    called = ("filter", "filter_not")

    predicate: str = field(kw_only=True)
    negate: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        need_table(self.name, "a filter", self.source)
        if not str(self.predicate).strip():
            raise TopologyError(
                f"{self.name}: a filter needs a SQL condition, for example 'price > 10', got "
                f"{self.predicate!r}"
            )

    @property
    def word(self) -> str:
        return self.words()[self.negate]

    @property
    def condition(self) -> str:
        return self.predicate

    def result(self, **shown: Any) -> Any:
        return self._rows(self.source.schema, shown)

    def describe(self) -> str:
        return f"{self.source.name} where {'not ' if self.negate else ''}{self.predicate}."
