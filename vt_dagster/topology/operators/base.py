"""What every operator has, and the checks that several make."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pyspark.sql.types import StructType

from vt_dagster.columns import TIMESTAMP
from vt_dagster.errors import TopologyError
from vt_dagster.topology.durations import Duration
from vt_dagster.topology.model import Stream, Table, VersionedTable
from vt_dagster.topology.schema import same_types

Emit = Literal["every_update", "per_run"]
"""``per_run``: only the last update of each key in a run."""


@dataclass(frozen=True)
class Materialized:
    """How an operator's result is kept, in Kafka's word.

    Args:
        history_retention: the result is a versioned table with this retention, in which results are
            ordered by time and those older than the retention refused; None: a plain table, in
            which the last result counts, also where it would inherit versions.
    """

    history_retention: Duration | None = None


class Operator(ABC):
    """What a stream or table is the result of."""

    name: str
    emit: Emit = "every_update"
    """Which of a run's results count: every one, or the last of each key."""

    @property
    @abstractmethod
    def inputs(self) -> tuple[Stream, ...]:
        """The streams and tables whose logs it consumes or whose views it reads."""

    @abstractmethod
    def result(self, **shown: Any) -> Stream:
        """The stream or table that it makes; ``shown``: description, group, owners."""

    @abstractmethod
    def describe(self) -> str:
        """What it does, in a sentence."""

    @abstractmethod
    def lineage(self) -> dict[str, list[tuple[str, str]]]:
        """For each column of the result the (asset, column) pairs that it is made of."""

    @property
    def settings(self) -> dict[str, str]:
        """What an asset's metadata says of it, by name."""
        return {}

    @property
    def log_columns(self) -> tuple[str, ...]:
        """Columns that it adds to its result's log, besides those of any log."""
        return ()

    @property
    def stored(self) -> bool:
        """Whether the result has a store of its own, which decides what is latest and what was
        before; else it passes on what its input says (filter, map_values)."""
        return True

    def _table(
        self,
        source: Stream,
        schema: StructType,
        materialized: Materialized | None,
        shown: Mapping[str, Any],
        key: Sequence[str] | None = None,
        inherited: Duration | None = None,
        **more: Any,
    ) -> Table:
        retention = inherited if materialized is None else materialized.history_retention
        about: dict[str, Any] = {
            "key": source.key if key is None else tuple(key),
            "schema": schema,
            "timestamp": TIMESTAMP,
            "partitions": source.partitions,
            "partition_by": source.partition_by,
            "operator": self,
            **more,
            **shown,
        }
        if retention is None:
            return Table(self.name, **about)
        if self.emit == "per_run":
            raise TopologyError(
                f"{self.name}: emit='per_run' keeps only the last result of a run, but a versioned "
                "table is to hold them all; leave emit out, or materialize without history_retention"
            )
        return VersionedTable(self.name, history_retention=retention, **about)


def need_table(name: str, what: str, node: Any) -> None:
    """Refuses an input that is no table."""
    if not isinstance(node, Table):
        raise TopologyError(
            f"{name}: {what} needs a Table or a VersionedTable, got the "
            f"{type(node).__name__} {getattr(node, 'name', node)!r}; make a table of a stream "
            "with to_table(name=...)"
        )


def check_emit(name: str, emit: Any) -> None:
    """Refuses an ``emit`` that is none."""
    if emit not in ("every_update", "per_run"):
        raise TopologyError(f"{name}: emit must be 'every_update' or 'per_run', got {emit!r}")


def check_kind(name: str, what: str, kind: Any, kinds: tuple[str, ...]) -> None:
    """Refuses a kind of join that there is not."""
    if kind not in kinds:
        raise TopologyError(f"{name}: a {what} is one of {', '.join(kinds)}, got {kind!r}")


def check_keys(name: str, left: Stream, right: Stream) -> None:
    """Refuses a join by keys of different types."""

    def types(side: Stream) -> str:
        together = zip(side.key, side.key_types, strict=True)
        return ", ".join(f"{k} {t.simpleString()}" for k, t in together)

    if not same_types(left.key_types, right.key_types):
        raise TopologyError(
            f"{name}: the keys of both sides must have the same types in the same order: "
            f"{left.name} has ({types(left)}), {right.name} has ({types(right)}); cast the key of "
            "one side in its schema"
        )


@dataclass(frozen=True)
class OneInput(Operator, ABC):
    """An operator with one input, whose result may be materialized."""

    source: Stream
    name: str
    materialized: Materialized | None = None

    @property
    def inputs(self) -> tuple[Stream, ...]:
        return (self.source,)

    def lineage(self) -> dict[str, list[tuple[str, str]]]:
        return {c: [(self.source.name, c)] for c in self.source.schema.names}
