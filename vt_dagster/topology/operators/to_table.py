"""to_table: reads a stream as the changelog of a table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vt_dagster.errors import TopologyError
from vt_dagster.topology.node import MIXED
from vt_dagster.topology.operators.base import OneInput, make_table


@dataclass(frozen=True)
class ToTable(OneInput):
    """Reads a stream as the changelog of a table: each record is an upsert of its key.

    The result is versioned only if ``materialized`` has a history retention.

    Late: a versioned result refuses records older than its history retention; a plain one accepts every
    record. Null key: dropped and counted. Tombstone: deletes the key's row.
    """

    def __post_init__(self) -> None:
        if self.source.is_table:
            raise TopologyError(
                f"{self.name}: to_table needs a stream, but {self.source.name!r} is already a table; "
                "use it directly, or convert it with to_stream(name=...) first"
            )

    @property
    def partitioning(self) -> tuple[Any, ...] | None:
        kept = self.source.partitioning
        return None if kept[0] == MIXED else kept

    def result(self, **shown: Any) -> Any:
        return make_table(self, self.source, self.source.schema, self.materialized, shown)

    def describe(self) -> str:
        return f"The records of {self.source.name} as changes of a table."
