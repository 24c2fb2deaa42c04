"""Joins: of a stream with a table, of two tables by a common key, by a foreign key."""

from __future__ import annotations

from abc import ABC
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal, cast

from pyspark.sql.types import StructField, StructType

from vt_dagster.columns import IS_LATE, TIMESTAMP, VALID_FROM, VALID_TO
from vt_dagster.errors import TopologyError
from vt_dagster.topology.durations import Duration, check_duration, pairs, spoken
from vt_dagster.topology.model import Stream, Table, VersionedTable
from vt_dagster.topology.operators.base import (
    Emit,
    Materialized,
    Operator,
    check_emit,
    check_keys,
    check_kind,
    need_table,
)
from vt_dagster.topology.projection import Projection, Selection, Side
from vt_dagster.topology.schema import same_types

JoinKind = Literal["inner", "left", "outer"]


@dataclass(frozen=True)
class _Join(Operator, ABC):
    left: Stream
    right: Table
    kind: JoinKind
    name: str
    select: tuple[str, ...] = ("left.*", "right.*")

    @property
    def inputs(self) -> tuple[Stream, ...]:
        return (self.left, self.right)

    def projection(self) -> Projection:
        """The columns of the result, checked against both sides."""
        sides = {"left": self._side(self.left), "right": self._side(self.right)}
        return Projection(self.name, tuple(self.left.key), sides, self.select)

    def _side(self, node: Stream) -> Side:
        return Side(node.name, tuple(node.schema.fields), (TIMESTAMP,))

    def lineage(self) -> dict[str, list[tuple[str, str]]]:
        return self.projection().lineage()


@dataclass(frozen=True)
class StreamTableJoin(_Join):
    """A stream record joined with the table as of the record's own timestamp (KIP-914, KIP-923).

    Args:
        left: the stream; only its records trigger results, which keep its key and timestamp.
        right: the table; a versioned one is read as of the record's timestamp (inclusive), any
            other as it is when the run starts.
        kind: ``inner``: a record without a match gives nothing; ``left``: it is kept, with nulls.
        name: name of the result.
        select: columns of the result: ``left.*``, ``right.column``, ``right.column as name``, or
            any SQL expression over them with an alias. A versioned table also offers
            ``right.valid_from`` and ``right.valid_to`` (null where nothing matched). The key
            columns are always there.
        grace_period: a record waits until stream time >= its timestamp + grace period; one that
            arrives later than that is joined at once. Needs a versioned table, and at most its
            history retention. None or 0: nothing waits.
    """

    grace_period: Duration | None = None

    def __post_init__(self) -> None:
        right, left = cast(Stream, self.right), self.left
        if not isinstance(right, Table):
            raise TopologyError(
                f"{self.name}: the right side of a stream-table join must be a Table or a "
                f"VersionedTable, got the {type(right).__name__} {right.name!r}"
            )
        if isinstance(left, Table):
            raise TopologyError(
                f"{self.name}: the left side of a stream-table join must be a Stream, got the "
                f"{type(left).__name__} {left.name!r}"
            )
        check_kind(self.name, "stream-table join", self.kind, ("inner", "left"))
        object.__setattr__(self, "select", tuple(self.select))
        check_keys(self.name, left, right)
        if self.grace_period is not None:
            self._check_grace(self.grace_period)
        self.projection()

    @property
    def waits(self) -> bool:
        """Whether anything can wait: a grace period of zero is none."""
        return self.grace_period is not None and self.grace_period != type(self.grace_period)()

    @property
    def settings(self) -> dict[str, str]:
        return {"grace_period": spoken(self.grace_period or timedelta(0))}

    @property
    def log_columns(self) -> tuple[str, ...]:
        return (IS_LATE,) if self.waits else ()

    def _check_grace(self, grace: Duration) -> None:
        check_duration(self.name, "grace_period", grace)
        if not isinstance(self.right, VersionedTable):
            raise TopologyError(
                f"{self.name}: a grace period needs a versioned table, but {self.right.name!r} is "
                "not versioned: declare it as VersionedTable with a history_retention, or leave "
                "grace_period out"
            )
        for partition, (period, retention) in pairs(grace, self.right.history_retention):
            if period > retention:
                raise TopologyError(
                    f"{self.name}: the grace period {period}{partition} is longer than the history "
                    f"retention {retention} of {self.right.name!r}; records would leave the buffer "
                    "after the versions they need are gone: shorten one or lengthen the other"
                )

    def _side(self, node: Stream) -> Side:
        ends = (VALID_FROM, VALID_TO) if isinstance(node, VersionedTable) else ()
        return Side(node.name, tuple(node.schema.fields), (TIMESTAMP, *ends))

    def result(self, **shown: Any) -> Stream:
        return Stream(
            self.name,
            key=self.left.key,
            schema=StructType(self.projection().fields()),
            timestamp=TIMESTAMP,
            partitions=self.left.partitions,
            partition_by=self.left.partition_by,
            null_key=self.left.null_key,
            operator=self,
            **shown,
        )

    def describe(self) -> str:
        how = "as of its own time" if self.right.versioned else "as it is when the run starts"
        missing = "; without a match it gives nothing" if self.kind == "inner" else ""
        wait = f"; waits {spoken(self.grace_period)} of stream time first" if self.grace_period else ""
        return f"{self.left.name}, each record with {self.right.name} {how}{missing}{wait}."


@dataclass(frozen=True)
class TableTableJoin(_Join):
    """The current rows of two tables with the same key, joined anew at each change (KIP-914).

    A change that is out of order for its key in a versioned side is dropped and counted. The result's
    timestamp is the larger of the change's and the other side's row's.

    Args:
        kind: ``inner``, ``left`` or ``outer``.
        materialized: None: a plain table; with a history retention: a versioned one.
        monotone_timestamps: a result is never older than the last one of its key, tombstones
            included; None = where both sides are versioned. False: Kafka Streams' own timestamps.
        emit: ``every_update``, or ``per_run``: only the last update of each key in a run.
    """

    left: Table
    materialized: Materialized | None = None
    monotone_timestamps: bool | None = None
    emit: Emit = "every_update"

    def __post_init__(self) -> None:
        need_table(self.name, "the left side of a table-table join", self.left)
        need_table(self.name, "the right side of a table-table join", self.right)
        check_kind(self.name, "table-table join", self.kind, ("inner", "left", "outer"))
        check_emit(self.name, self.emit)
        object.__setattr__(self, "select", tuple(self.select))
        check_keys(self.name, self.left, self.right)
        self.projection()

    @property
    def monotone(self) -> bool:
        """Whether results are kept from going back in time."""
        if self.monotone_timestamps is None:
            return self.left.versioned and self.right.versioned
        return self.monotone_timestamps

    def result(self, **shown: Any) -> Table:
        fields = self.projection().fields()
        if self.kind == "outer":
            fields = [StructField(f.name, f.dataType, True) for f in fields]
        return self._table(self.left, StructType(fields), self.materialized, shown)

    def describe(self) -> str:
        return (
            f"{self.left.name} and {self.right.name} by their common key ({self.kind}), joined anew "
            "at each change of either."
        )


@dataclass(frozen=True)
class ForeignKeyJoin(TableTableJoin):
    """Each row of a table with the row of another that it refers to (KIP-914, KIP-213).

    Both sides trigger: a change of the right row gives one result for each left row that refers to
    it. The result has the left's key.

    Args:
        kind: ``inner`` or ``left``.
        foreign_key: SQL expressions over the left's columns, one for each column of the right's key.
            A row in which any is null refers to nothing.
    """

    foreign_key: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        need_table(self.name, "the left side of a foreign-key join", self.left)
        need_table(self.name, "the right side of a foreign-key join", self.right)
        check_kind(self.name, "foreign-key join", self.kind, ("inner", "left"))
        check_emit(self.name, self.emit)
        object.__setattr__(self, "select", tuple(self.select))
        if len(self.foreign_key) != len(self.right.key):
            raise TopologyError(
                f"{self.name}: the foreign key {list(self.foreign_key)} must have one expression for "
                f"each key column of {self.right.name!r}, which has {list(self.right.key)}"
            )
        own = Selection(self.name, self.left.name, tuple(self.left.schema.fields))
        types = [own.type_of(expression) for expression in self.foreign_key]
        if not same_types(types, self.right.key_types):
            theirs = [t.simpleString() for t in self.right.key_types]
            raise TopologyError(
                f"{self.name}: the foreign key {list(self.foreign_key)} has the types "
                f"{[t.simpleString() for t in types]}, but the key of {self.right.name!r} has "
                f"{theirs}; cast it, for example 'cast({self.foreign_key[0]} as {theirs[0]})'"
            )
        self.projection()

    def describe(self) -> str:
        by = ", ".join(self.foreign_key)
        return f"{self.left.name}, each row with the row of {self.right.name} that {by} refers to."
