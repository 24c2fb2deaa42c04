"""flat_map_values: turns each record of a stream into zero or more records."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from pyspark.sql.types import ArrayType, DataType, NullType, StructField, StructType

from vt_dagster.columns import TIMESTAMP
from vt_dagster.errors import TopologyError
from vt_dagster.topology.node import make_node
from vt_dagster.topology.operators.base import OneInput, check_not_time
from vt_dagster.topology.projection import Selection


@dataclass(frozen=True)
class FlatMapValues(OneInput):
    """Emits one record per element of an array, in the array's order, with the key and timestamp of the
    input record.

    An empty array emits nothing. A null array fails the run before its commit, as in Kafka Streams:
    write ``coalesce(..., array())`` to avoid that. A null element is a tombstone. Late: emitted like
    any other record. Null key: emitted. Tombstone: the expression is evaluated with null values.

    Args:
        expression: SQL expression over the stream's columns that returns an array.
        column: name of the value column for the elements.
        keep: further columns of the stream to keep.
    """

    expression: str = field(kw_only=True)
    column: str = field(kw_only=True)
    keep: tuple[str, ...] = field(default=(), kw_only=True)

    def __post_init__(self) -> None:
        if self.source.is_table:
            raise TopologyError(
                f"{self.name}: expected a stream for flat_map_values, got the table "
                f"{self.source.name!r}; use its changes, to_stream(name=...)"
            )
        object.__setattr__(self, "keep", tuple(self.keep))
        taken = [n for n in (*self.source.key, *self.keep) if n.lower() == self.column.lower()]
        if taken:
            raise TopologyError(
                f"{self.name}: expected a new column name for the elements, got {self.column!r}, which "
                "the result already has; choose another name"
            )
        check_not_time(self.name, [self.column, *self.keep])
        self._columns().check(self.expression)
        kind = self._columns().type_of(self.expression)
        if not isinstance(kind, ArrayType | NullType):
            raise TopologyError(
                f"{self.name}: expected an expression of type array, got {self.expression!r} of type "
                f"{kind.simpleString()}; write for example split({self.expression}, ',')"
            )

    @property
    def rekeyed(self) -> bool:
        return self.source.rekeyed

    def _columns(self) -> Selection:
        source = self.source
        return Selection(
            self.name, source.name, tuple(source.schema.fields), self.keep, tuple(source.key)
        )

    def result(self, **shown: Any) -> Any:
        kind = self._columns().type_of(self.expression)
        element: DataType = kind.elementType if isinstance(kind, ArrayType) else NullType()
        fields = [*self._columns().fields_of_result(), StructField(self.column, element)]
        return make_node(
            "stream",
            self.name,
            key=self.source.key,
            schema=StructType(fields),
            timestamp=TIMESTAMP,
            partitions=self.source.partitions,
            partition_by=self.source.partition_by,
            null_key="keep",
            operator=self,
            **shown,
        )

    def kept(self) -> tuple[str, ...]:
        """The stream's columns in the result."""
        return tuple(name for name, _ in self._columns().columns)

    def lineage(self) -> dict[str, list[tuple[str, str]]]:
        columns = self._columns()
        return {**columns.lineage(), self.column: columns.mentioned(self.expression)}

    def describe(self) -> str:
        return f"One record per element of {self.expression} in each record of {self.source.name}."
