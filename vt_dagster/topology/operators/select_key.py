"""select_key: gives the records of a stream a new key."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from pyspark.sql.types import StructType

from vt_dagster.columns import TIMESTAMP
from vt_dagster.errors import TopologyError
from vt_dagster.topology.node import make_node
from vt_dagster.topology.operators.base import OneInput
from vt_dagster.topology.projection import Selection


@dataclass(frozen=True)
class SelectKey(OneInput):
    """Gives the records of a stream a new key and repartitions them by that key.

    All other columns are kept; a new key column replaces a column of the same name. Late: emitted like
    any other record. Null key: a record without an old key gets the new key too; a record with a null
    new key is emitted, and skipped by aggregates. Tombstone: emitted with the new key.

    Args:
        group_key: key columns as ``column`` or ``expression as name``.
        partitions: number of partitions of the result; None = that of the input.
        partition_by: SQL expression over the new key that gives the partition; None = hash of the key.
    """

    group_key: tuple[str, ...] = field(kw_only=True)
    partitions: int | None = field(default=None, kw_only=True)
    partition_by: str | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        if self.source.is_table:
            raise TopologyError(
                f"{self.name}: select_key needs a stream, got the table {self.source.name!r}; use "
                "group_by(...), or convert it with to_stream(name=...)"
            )
        if not self.group_key:
            raise TopologyError(
                f"{self.name}: expected the columns or expressions of the new key, got none; for "
                f"example select_key({self.source.schema.names[-1]!r}, name={self.name!r})"
            )
        if any(name.lower() == TIMESTAMP for name, _ in self.keys().columns):
            raise TopologyError(
                f"{self.name}: expected no key column named 'timestamp', the name of the record's own "
                "time; rename it, for example 'timestamp as at'"
            )

    @property
    def rekeyed(self) -> bool:
        return True

    @property
    def partitioning(self) -> None:
        return None

    def keys(self) -> Selection:
        """The new key columns."""
        fields = tuple(self.source.schema.fields)
        return Selection(self.name, self.source.name, fields, self.group_key)

    def result(self, **shown: Any) -> Any:
        keys = self.keys().fields_of_result()
        names = {k.name.lower() for k in keys}
        others = [f for f in self.source.schema.fields if f.name.lower() not in names]
        return make_node(
            "stream",
            self.name,
            key=[k.name for k in keys],
            schema=StructType([*keys, *others]),
            timestamp=TIMESTAMP,
            partitions=self.partitions or self.source.partitions,
            partition_by=self.partition_by,
            null_key="keep",
            operator=self,
            **shown,
        )

    def lineage(self) -> dict[str, list[tuple[str, str]]]:
        return super().lineage() | self.keys().lineage()

    def describe(self) -> str:
        return f"The records of {self.source.name} keyed by {', '.join(self.group_key)}."
