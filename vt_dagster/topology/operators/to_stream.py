"""to_stream: converts a table's changelog into a stream."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vt_dagster.columns import TIMESTAMP
from vt_dagster.topology.node import make_node
from vt_dagster.topology.operators.base import (
    OneInput,
    need_no_repeats,
    need_table,
)


@dataclass(frozen=True)
class ToStream(OneInput):
    """The changelog of a table as a stream.

    Late: out-of-order changes are emitted with their own timestamps; records that the table refused are
    not. Null key: a table has none. Tombstone: emitted as a record without a value.
    """

    def __post_init__(self) -> None:
        need_table(self.name, "to_stream", self.source)
        need_no_repeats(self.name, "to_stream", self.source)

    def result(self, **shown: Any) -> Any:
        return make_node(
            "stream",
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
