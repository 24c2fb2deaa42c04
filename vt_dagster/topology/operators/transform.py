"""Row by row: filter, map_values, stream to table, table to stream."""

from __future__ import annotations

from abc import ABC
from dataclasses import dataclass, field
from typing import Any

from pyspark.sql.types import StructType

from vt_dagster.columns import TIMESTAMP
from vt_dagster.errors import TopologyError
from vt_dagster.topology.model import Stream, Table, VersionedTable
from vt_dagster.topology.operators.base import OneInput, need_table
from vt_dagster.topology.projection import Selection


class _RowByRow(OneInput, ABC):
    """What passes on what its input says of a row, unless it is materialized."""

    @property
    def stored(self) -> bool:
        return self.materialized is not None

    def _rows(self, schema: StructType, shown: dict[str, Any]) -> Table:
        source = self.source
        inherited = source.history_retention if isinstance(source, VersionedTable) else None
        return self._table(source, schema, self.materialized, shown, inherited=inherited)


@dataclass(frozen=True)
class Filter(_RowByRow):
    """The rows of a table for which a condition holds (KIP-914).

    A row that does not pass is a tombstone in the result. Of a versioned table every record goes out,
    so that the result remembers when a row did not pass; of a plain one a record is left out where
    neither it nor the row before it passes.

    Args:
        predicate: a SQL condition over the table's columns; null counts as false.
        negate: keep what does not pass (``filter_not``).
        materialized: None: the result is versioned if the table is, and has no store of its own.
    """

    predicate: str = field(kw_only=True)
    negate: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        need_table(self.name, "a filter", self.source)
        if not str(self.predicate).strip():
            raise TopologyError(
                f"{self.name}: a filter needs a SQL condition, for example 'price > 10', got "
                f"{self.predicate!r}"
            )

    def result(self, **shown: Any) -> Table:
        return self._rows(self.source.schema, shown)

    def describe(self) -> str:
        return f"{self.source.name} where {'not ' if self.negate else ''}{self.predicate}."


@dataclass(frozen=True)
class MapValues(_RowByRow):
    """A table with other values: ``select`` gives the value columns, the key stays (KIP-914).

    Args:
        select: ``column``, ``*``, or a SQL expression over the table's columns with an alias.
        materialized: None: the result is versioned if the table is, and has no store of its own.
    """

    select: tuple[str, ...] = field(kw_only=True)

    def __post_init__(self) -> None:
        need_table(self.name, "map_values", self.source)
        object.__setattr__(self, "select", tuple(self.select))
        self.selection()

    def selection(self) -> Selection:
        """The columns of the result, checked against the table."""
        fields = tuple(self.source.schema.fields)
        return Selection(self.name, self.source.name, fields, self.select, tuple(self.source.key))

    def result(self, **shown: Any) -> Table:
        return self._rows(StructType(self.selection().fields_of_result()), shown)

    def lineage(self) -> dict[str, list[tuple[str, str]]]:
        return self.selection().lineage()

    def describe(self) -> str:
        return f"{self.source.name} with the values {', '.join(self.select)}."


@dataclass(frozen=True)
class ToTable(OneInput):
    """A stream's records as changes of a table: the last record of a key counts.

    Versioned only with a history retention of its own. Records without a key are dropped and
    counted.
    """

    def __post_init__(self) -> None:
        if isinstance(self.source, Table):
            raise TopologyError(
                f"{self.name}: to_table makes a table of a stream, but {self.source.name!r} is a "
                "table already; use it as it is, or its to_stream(name=...)"
            )

    def result(self, **shown: Any) -> Table:
        return self._table(self.source, self.source.schema, self.materialized, shown)

    def describe(self) -> str:
        return f"The records of {self.source.name} as changes of a table."


@dataclass(frozen=True)
class ToStream(OneInput):
    """The changes of a table as records of a stream, tombstones included."""

    def __post_init__(self) -> None:
        need_table(self.name, "to_stream", self.source)

    def result(self, **shown: Any) -> Stream:
        return Stream(
            self.name,
            key=self.source.key,
            schema=self.source.schema,
            timestamp=TIMESTAMP,
            partitions=self.source.partitions,
            partition_by=self.source.partition_by,
            null_key="keep",
            operator=self,
            **shown,
        )

    def describe(self) -> str:
        return f"The changes of {self.source.name} as a stream."
