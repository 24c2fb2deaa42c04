"""Parts and checks that several operators share, and the base of the joins."""

from __future__ import annotations

from abc import ABC
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pyspark.sql.types import StructField, StructType

from vt_dagster.columns import CAUSE, IS_FINAL, REVISION, TIMESTAMP
from vt_dagster.errors import TopologyError
from vt_dagster.topology.durations import Duration
from vt_dagster.topology.expressions import Projection, Selection, Side
from vt_dagster.topology.node import Input, Kind, Node, Operator, make_node, settings_of
from vt_dagster.topology.options import Consumer
from vt_dagster.topology.schema import same_types
from vt_dagster.topology.specification import JoinKind
from vt_dagster.topology.version_rules import new_version_on_of

# Base


@dataclass(frozen=True)
class Materialized:
    """How an operator's result is stored (Kafka Streams' ``Materialized``).

    Args:
        history_retention: the result is a versioned table with this retention: it orders results by
            timestamp and refuses results older than the retention. None: a plain table, in which the
            last result of a key wins, even if the operator would otherwise inherit versions.
    """

    history_retention: Duration | None = None


@dataclass(frozen=True)
class OneInput(Operator, ABC):
    """An operator with one input and a result that may be materialized."""

    source: Input
    name: str
    materialized: Materialized | None = None

    @property
    def inputs(self) -> tuple[Input, ...]:
        return (self.source,)

    def lineage(self) -> dict[str, list[tuple[str, str]]]:
        return {c: [(self.source.name, c)] for c in self.source.schema.names}

    def selected(self, select: Sequence[str], key: Sequence[str] = ()) -> Selection:
        """Returns columns selected from the input, checked; ``key``: see ``Selection``."""
        source = self.source
        fields = tuple(source.schema.fields)
        return Selection(self.name, source.name, fields, tuple(select), tuple(key))


def make_stream(
    operator: Operator,
    source: Node,
    columns: Iterable[StructField],
    shown: Mapping[str, Any],
    **more: Any,
) -> Any:
    """Makes the result stream of an operator.

    Args:
        source: gives key and partitions unless ``more`` overrides them.
    """
    about: dict[str, Any] = {
        "key": source.key,
        "schema": StructType([*columns]),
        "timestamp": TIMESTAMP,
        "partitions": source.partitions,
        "partition_by": source.partition_by,
        "null_key": "keep",
        "operator": operator,
    }
    return _make_result("stream", operator, about | more, shown)


def make_table(
    operator: Operator,
    source: Node,
    schema: StructType,
    materialized: Materialized | None,
    shown: Mapping[str, Any],
    key: Sequence[str] | None = None,
    inherited: Duration | None = None,
    **more: Any,
) -> Any:
    """Makes the result table of an operator.

    Args:
        source: gives key and partitions unless ``key`` and ``more`` override them.
        inherited: history retention of a result that is not materialized.
    """
    retention = inherited if materialized is None else materialized.history_retention
    about: dict[str, Any] = {
        "key": source.key if key is None else tuple(key),
        "schema": schema,
        "timestamp": TIMESTAMP,
        "partitions": source.partitions,
        "partition_by": source.partition_by,
        "operator": operator,
        **more,
    }
    if retention is None:
        return _make_result("table", operator, about, shown)
    if operator.emit == "per_run":
        raise TopologyError(
            f"{operator.name}: emit='per_run' keeps only the last result of a key in a run, but a "
            "versioned table needs every result; remove emit, or materialize without history_retention"
        )
    about["history_retention"] = retention
    return _make_result("versioned_table", operator, about, shown)


def _make_result(
    kind: Kind, operator: Operator, about: Mapping[str, Any], shown: Mapping[str, Any]
) -> Any:
    """Makes the result of an operator.

    Args:
        about: the settings that the operator gives its result.
        shown: those that the user gives.

    Raises:
        TopologyError: the user gives one that the result does not have, or that the operator gives.
    """
    for one in shown:
        if one in about or one not in settings_of(kind):
            instead = "remove it"
            if one == "history_retention" and hasattr(operator, "materialized"):
                instead = "set materialized=Materialized(history_retention=...)"
            elif one == "foreign_key":
                instead = "make it the key of the stream with select_key"
            raise TopologyError(
                f"{operator.name}: expected settings that the result of a "
                f"{operator.specification.operator} has, got {one!r}; {instead}, or correct its name"
            )
    return make_node(kind, operator.name, **about, **shown)


def need_table(name: str, what: str, node: Any) -> None:
    """Raises TopologyError if an input is not a table."""
    if not (isinstance(node, Node) and node.is_table):
        raise TopologyError(
            f"{name}: {what} needs a Table or a VersionedTable, got the "
            f"{type(node).__name__} {getattr(node, 'name', node)!r}; convert a stream into a table "
            "with to_table(name=...)"
        )


def check_not_time(name: str, columns: Sequence[str]) -> None:
    """Raises TopologyError if a value column is named ``timestamp``, which every result has."""
    if any(c.lower() == TIMESTAMP for c in columns):
        raise TopologyError(
            f"{name}: expected no value column named 'timestamp', got {list(columns)}: every result "
            "already has a timestamp; remove the column, or rename it"
        )


def check_emit(name: str, emit: Any) -> None:
    """Raises TopologyError if ``emit`` is not a known mode."""
    if emit not in ("every_update", "per_run"):
        raise TopologyError(f"{name}: emit must be 'every_update' or 'per_run', got {emit!r}")


def require_of_versions(name: str, consumer: Consumer, node: Any, used: Collection[str]) -> None:
    """Raises TopologyError if a consumer uses columns that may differ between the records of one
    version.

    Args:
        used: the columns of ``node`` that the consumer uses.
    """
    columns = new_version_on_of(node)
    others = [] if columns is None else sorted({*used} - {*columns, *node.key})
    if others:
        raise TopologyError(
            f"{name}: expected {consumer.value} to use only {[*node.key, *(columns or ())]}, the "
            f"columns that are equal in all records of a version of {node.name!r} (new_version_on), "
            f"got {others}; add them to new_version_on, or leave them out"
        )


# Join


@dataclass(frozen=True)
class Join(Operator, ABC):
    """Two sides and the columns selected from them."""

    left: Input
    right: Input
    kind: JoinKind
    name: str
    select: tuple[str, ...] = ("left.*", "right.*")

    @property
    def inputs(self) -> tuple[Input, ...]:
        return (self.left, self.right)

    @property
    def waits_for(self) -> tuple[Input, ...]:
        return tuple(side for side in self.inputs if side.is_table)

    @property
    def _sides(self) -> dict[str, Any]:
        """The fields that the specifications of all joins have."""
        return {
            "left": self.left.name,
            "right": self.right.name,
            "kind": self.kind,
            "select": self.projection().declared,
        }

    def projection(self) -> Projection:
        """The columns of the result, checked against both sides."""
        sides = {"left": self._side(self.left), "right": self._side(self.right)}
        return Projection(self.name, tuple(self.left.key), sides, self.select)

    def fields(self) -> list[StructField]:
        """Returns the columns of the result; those of an outer join may all be null."""
        fields = self.projection().fields()
        outer = self.kind == "outer"
        return [StructField(f.name, f.dataType, True) for f in fields] if outer else fields

    def _side(self, node: Node) -> Side:
        return Side(node.name, tuple(node.schema.fields), (TIMESTAMP,))

    def lineage(self) -> dict[str, list[tuple[str, str]]]:
        return self.projection().lineage()

    @property
    def computed(self) -> set[str]:
        return self.projection().computed

    def _check_own_columns(self, key: Sequence[str]) -> None:
        """Raises TopologyError for selected columns that a corrected join adds itself.

        Args:
            key: the added key columns.
        """
        own = {REVISION, CAUSE, IS_FINAL, *key}
        taken = sorted(name for name, _ in self.projection().columns if name.lower() in own)
        if taken:
            raise TopologyError(
                f"{self.name}: expected no selected columns named {taken}, which a corrected join adds "
                f"itself; select them under another name, for example 'left.{taken[0]} as "
                f"own_{taken[0]}'"
            )


def check_kind(name: str, what: str, kind: Any, kinds: tuple[str, ...]) -> None:
    """Raises TopologyError if a kind of join is not one of ``kinds``."""
    if kind not in kinds:
        raise TopologyError(f"{name}: a {what} is one of {', '.join(kinds)}, got {kind!r}")


def check_keys(name: str, left: Node, right: Node) -> None:
    """Raises TopologyError if the keys of both sides have different types."""

    def types(side: Node) -> str:
        together = zip(side.key, side.key_types, strict=True)
        return ", ".join(f"{k} {t.simpleString()}" for k, t in together)

    if not same_types(left.key_types, right.key_types):
        raise TopologyError(
            f"{name}: the keys of both sides must have the same types in the same order: "
            f"{left.name} has ({types(left)}), {right.name} has ({types(right)}); cast the key of "
            "one side in its schema"
        )
