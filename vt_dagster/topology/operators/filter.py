"""filter and filter_not: the rows for which a condition holds, or does not."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from vt_dagster.errors import TopologyError
from vt_dagster.topology.operators.base import need_table
from vt_dagster.topology.operators.row_by_row import RowByRow


@dataclass(frozen=True)
class Filter(RowByRow):
    """The rows of a table for which a condition holds (KIP-914).

    A row that does not pass is a tombstone in the result. Of a versioned table every record goes out,
    so that the result remembers when a row did not pass; of a plain one a record is left out where
    neither it nor the row before it passes.

    Late: an out-of-order change of a versioned table passes with its own timestamp; a versioned
    result of its own refuses what is older than its retention. Null key: a table has none. Tombstone:
    stays one, with ``filter_not`` too; repeated ones as rows that do not pass.

    Args:
        predicate: a SQL condition over the table's columns; null counts as false.
        negate: keep what does not pass (``filter_not``).
        materialized: None: the result is versioned if the table is, and has no store of its own.
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
