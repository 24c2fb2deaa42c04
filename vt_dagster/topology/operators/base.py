"""What several operators have, and the checks that they make."""

from __future__ import annotations

from abc import ABC
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pyspark.sql.types import StructType

from vt_dagster.columns import TIMESTAMP
from vt_dagster.errors import TopologyError
from vt_dagster.topology.durations import Duration
from vt_dagster.topology.node import Input, Node, Operator, make_node


@dataclass(frozen=True)
class Materialized:
    """How an operator's result is kept, in Kafka's word.

    Args:
        history_retention: the result is a versioned table with this retention, in which results are
            ordered by time and those older than the retention refused; None: a plain table, in
            which the last result counts, also where it would inherit versions.
    """

    history_retention: Duration | None = None


@dataclass(frozen=True)
class OneInput(Operator, ABC):
    """An operator with one input, whose result may be materialized."""

    source: Input
    name: str
    materialized: Materialized | None = None

    @property
    def inputs(self) -> tuple[Input, ...]:
        return (self.source,)

    def lineage(self) -> dict[str, list[tuple[str, str]]]:
        return {c: [(self.source.name, c)] for c in self.source.schema.names}


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
    """The table that an operator makes.

    Args:
        source: whose key and partitions it has, where ``key`` and ``more`` give no others.
        inherited: the history retention of a result that is not materialized.
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
        **shown,
    }
    if retention is None:
        return make_node("table", operator.name, **about)
    if operator.emit == "per_run":
        raise TopologyError(
            f"{operator.name}: emit='per_run' keeps only the last result of a run, but a versioned "
            "table is to hold them all; leave emit out, or materialize without history_retention"
        )
    return make_node("versioned_table", operator.name, history_retention=retention, **about)


def need_table(name: str, what: str, node: Any) -> None:
    """Refuses an input that is no table."""
    if not (isinstance(node, Node) and node.is_table):
        raise TopologyError(
            f"{name}: {what} needs a Table or a VersionedTable, got the "
            f"{type(node).__name__} {getattr(node, 'name', node)!r}; make a table of a stream "
            "with to_table(name=...)"
        )


def check_not_time(name: str, columns: Sequence[str]) -> None:
    """Refuses values by the name of the time that each result has."""
    if any(c.lower() == TIMESTAMP for c in columns):
        raise TopologyError(
            f"{name}: expected other names than 'timestamp' for the result's values, got "
            f"{list(columns)}: a result has a timestamp of its own; leave it out, or rename it"
        )


def check_emit(name: str, emit: Any) -> None:
    """Refuses an ``emit`` that is none."""
    if emit not in ("every_update", "per_run"):
        raise TopologyError(f"{name}: emit must be 'every_update' or 'per_run', got {emit!r}")


def need_each_record(name: str, what: str, node: Any) -> None:
    """Refuses a table whose versions are not those of its records, one by one."""
    if (column := valid_until_of(node)) is not None:
        raise TopologyError(
            f"{name}: {what} follows the records of {node.name!r}, but its versions end by their "
            f"valid_until, {column!r}, without one: expected a table without valid_until. Join a "
            "stream with it as of its records' times, or leave valid_until out"
        )
    need_no_repeats(name, what, node)


def need_no_repeats(name: str, what: str, node: Any) -> None:
    """Refuses a table in which records may repeat a version."""
    if (columns := new_version_on_of(node)) is not None:
        raise TopologyError(
            f"{name}: {what} follows each record of {node.name!r}, but only some make a version, by "
            f"its new_version_on, {list(columns)}: expected a table without new_version_on. Join a "
            "stream with it as of its records' times, or leave new_version_on out"
        )


def valid_until_of(node: Any) -> str | None:
    """The column by which versions of a table end, if any."""
    return getattr(node, "valid_until", None)


def new_version_on_of(node: Any) -> tuple[str, ...] | None:
    """The columns that make a version of a table, if not every record does."""
    return getattr(node, "new_version_on", None)
