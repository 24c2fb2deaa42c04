"""flat_map_values: each record of a stream as several, or none."""

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
    """Each record of a stream as several with the same key and timestamp, one for each element of an
    array, in the array's order.

    An empty array gives nothing. A null array stops the run before its commit, as in Kafka Streams:
    write ``coalesce(..., array())`` for it. A null element is a tombstone. Late: passed on like any
    other. Null key: passed on. Tombstone: the expression is made of it too, with null values.

    Args:
        expression: a SQL expression over the stream's columns that gives an array.
        column: the name of the result's value column, which takes an element.
        keep: columns of the stream that the result has besides.
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
                f"{self.name}: expected a new name for the elements, got {self.column!r}, which is a "
                "column of the result already; take another one"
            )
        check_not_time(self.name, [self.column, *self.keep])
        self._columns().check(self.expression)
        kind = self._columns().type_of(self.expression)
        if not isinstance(kind, ArrayType | NullType):
            raise TopologyError(
                f"{self.name}: expected an expression that gives an array, got {self.expression!r}, "
                f"which is {kind.simpleString()}; for example split({self.expression}, ',')"
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
        """The columns that the result has of the stream."""
        return tuple(name for name, _ in self._columns().columns)

    def lineage(self) -> dict[str, list[tuple[str, str]]]:
        columns = self._columns()
        return {**columns.lineage(), self.column: columns.mentioned(self.expression)}

    def describe(self) -> str:
        return f"Each record of {self.source.name} once for each element of {self.expression}."
