"""merge: combines several streams into one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pyspark.sql.types import DataType, NullType, StructField, StructType

from vt_dagster.columns import TIMESTAMP
from vt_dagster.errors import TopologyError
from vt_dagster.topology.node import MIXED, Input, Operator, make_node
from vt_dagster.topology.schema import same_types


@dataclass(frozen=True)
class Merge(Operator):
    """The unchanged records of several streams with the same columns and key.

    Records are neither deduplicated nor sorted by time: like a Kafka Streams task, a run always takes
    the smallest timestamp among the next records of all streams. Late: emitted like any other. Null
    key: emitted. Tombstone: emitted.

    Args:
        sources: two streams or more; a stream given twice emits each record twice.
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
        ours, theirs = _types(first), _types(node)
        same = sorted(ours) == sorted(theirs)
        same = same and same_types(list(ours.values()), [theirs[c] for c in ours])
        if not same or first.key != node.key:
            raise TopologyError(
                f"{self.name}: expected streams with the same columns and the same key, got "
                f"{first.name!r} with {_shown(ours)} keyed by {list(first.key)}, and {node.name!r} "
                f"with {_shown(theirs)} keyed by {list(node.key)}; give both the same schema"
            )

    @property
    def inputs(self) -> tuple[Input, ...]:
        return self.sources

    @property
    def rekeyed(self) -> bool:
        return any(node.rekeyed for node in self.sources)

    @property
    def partitioning(self) -> tuple[Any, ...]:
        return self.sources[0].partitioning if self.copartitioned else (MIXED, self.name)

    def result(self, **shown: Any) -> Any:
        first = self.sources[0]
        known = [_types(node) for node in self.sources]
        # A column whose type only Spark can infer (NullType) takes the type it has in another stream.
        told = [
            StructField(f.name, next((k[f.name] for k in known if k[f.name] != NullType()), f.dataType))
            for f in first.schema.fields
            if f.name in known[0]
        ]
        return make_node(
            "stream",
            self.name,
            key=first.key,
            schema=StructType(told),
            timestamp=TIMESTAMP,
            partitions=max(node.partitions for node in self.sources),
            partition_by=first.partition_by,
            null_key="keep",
            operator=self,
            **shown,
        )

    def lineage(self) -> dict[str, list[tuple[str, str]]]:
        names = list(dict.fromkeys(node.name for node in self.sources))
        return {c: [(name, c) for name in names] for c in _types(self.sources[0])}

    def describe(self) -> str:
        return f"The records of {', '.join(node.name for node in self.sources)} as one stream."


def _types(node: Input) -> dict[str, DataType]:
    """Returns the types of a stream's columns, except the timestamp, which every record has."""
    return {f.name: f.dataType for f in node.schema.fields if f.name.lower() != TIMESTAMP}


def _shown(types: dict[str, DataType]) -> dict[str, str]:
    return {name: kind.simpleString() for name, kind in types.items()}
