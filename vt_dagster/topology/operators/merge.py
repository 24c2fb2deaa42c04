"""merge: several streams as one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vt_dagster.columns import TIMESTAMP
from vt_dagster.errors import TopologyError
from vt_dagster.topology.node import Input, Operator, make_node


@dataclass(frozen=True)
class Merge(Operator):
    """The records of several streams with the same columns and key, each as it is.

    Nothing is made unique or brought into order of time: a run takes the records as a Kafka Streams
    task does, always the one with the smallest timestamp among the heads. Late: passed on like any
    other. Null key: passed on. Tombstone: passed on.

    Args:
        sources: two streams or more; one may be there twice, and is then counted twice.
    """

    sources: tuple[Input, ...]
    name: str

    def __post_init__(self) -> None:
        if len(self.sources) < 2:
            raise TopologyError(
                f"{self.name}: expected two streams or more to merge, got one; add another"
            )
        for node in self.sources:
            if node.is_table:
                raise TopologyError(
                    f"{self.name}: expected streams to merge, got the {type(node).__name__} "
                    f"{node.name!r}; use its changes, to_stream(name=...)"
                )
            self._check_columns(node)

    def _check_columns(self, node: Input) -> None:
        first = self.sources[0]
        ours, theirs = (
            {f.name: f.dataType.simpleString() for f in n.schema.fields if f.name != TIMESTAMP}
            for n in (first, node)
        )
        if ours != theirs or first.key != node.key:
            raise TopologyError(
                f"{self.name}: expected streams with the same columns and the same key, got "
                f"{first.name!r} with {ours} keyed by {list(first.key)}, and {node.name!r} with "
                f"{theirs} keyed by {list(node.key)}; give both the same schema"
            )

    @property
    def inputs(self) -> tuple[Input, ...]:
        return self.sources

    @property
    def rekeyed(self) -> bool:
        return any(node.rekeyed for node in self.sources)

    def result(self, **shown: Any) -> Any:
        first = self.sources[0]
        return make_node(
            "stream",
            self.name,
            key=first.key,
            schema=first.schema,
            timestamp=TIMESTAMP,
            partitions=max(node.partitions for node in self.sources),
            partition_by=first.partition_by,
            null_key="keep",
            operator=self,
            **shown,
        )

    def lineage(self) -> dict[str, list[tuple[str, str]]]:
        names = list(dict.fromkeys(node.name for node in self.sources))
        return {c: [(name, c) for name in names] for c in self.sources[0].schema.names}

    def describe(self) -> str:
        return f"The records of {', '.join(node.name for node in self.sources)} as one stream."
