"""to_table: a stream's records as changes of a table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vt_dagster.errors import TopologyError
from vt_dagster.topology.node import MIXED
from vt_dagster.topology.operators.base import OneInput, make_table


@dataclass(frozen=True)
class ToTable(OneInput):
    """A stream's records as changes of a table: the last record of a key counts.

    Versioned only with a history retention of its own.

    Late: a versioned result refuses what is older than its retention; a plain one takes every record.
    Null key: dropped and counted. Tombstone: deletes the key's row.
    """

    def __post_init__(self) -> None:
        if self.source.is_table:
            raise TopologyError(
                f"{self.name}: to_table makes a table of a stream, but {self.source.name!r} is a "
                "table already; use it as it is, or its to_stream(name=...)"
            )

    @property
    def partitioning(self) -> tuple[Any, ...] | None:
        kept = self.source.partitioning
        return None if kept[0] == MIXED else kept

    def result(self, **shown: Any) -> Any:
        return make_table(self, self.source, self.source.schema, self.materialized, shown)

    def describe(self) -> str:
        return f"The records of {self.source.name} as changes of a table."
