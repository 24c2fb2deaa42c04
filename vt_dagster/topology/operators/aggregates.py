"""Aggregates without windows, and the base of all aggregates: a group key, a result with that key.

An aggregate of a stream has one row per key over all its records; an aggregate of a table has the
table's current rows, grouped by another key.
"""

from __future__ import annotations

from abc import ABC
from collections.abc import Callable
from dataclasses import dataclass, field
from dis import Instruction, get_instructions
from inspect import CO_COROUTINE, CO_GENERATOR
from itertools import pairwise
from typing import Any

from pyspark.sql.types import StructField, StructType

from vt_dagster.columns import TIMESTAMP
from vt_dagster.errors import TopologyError
from vt_dagster.topology.expressions import Aggregates, Selection, mentions
from vt_dagster.topology.node import Emit
from vt_dagster.topology.operators.base import (
    OneInput,
    check_emit,
    check_not_time,
    make_table,
    need_table,
    require_of_versions,
)
from vt_dagster.topology.options import Consumer, require_readable
from vt_dagster.topology.schema import as_struct
from vt_dagster.topology.specification import (
    AggregatorSpec,
    ColumnSpec,
    StreamAggregateSpec,
    TableAggregateSpec,
)

# Aggregate


@dataclass(frozen=True)
class Aggregate(OneInput, ABC):
    """Aggregates rows by a key, which may differ from the input's key.

    Args:
        group_key: key columns as ``column`` or ``expression as name``.
        partitions: number of partitions of a result with a new key; None = that of the input.
        partition_by: SQL expression for the partition of a result with a new key; None = hash of
            the key.
    """

    group_key: tuple[str, ...] = field(default=(), kw_only=True)
    aggregates: tuple[tuple[str, str], ...] | Aggregator = field(kw_only=True)
    emit: Emit = field(default="every_update", kw_only=True)
    partitions: int | None = field(default=None, kw_only=True)
    partition_by: str | None = field(default=None, kw_only=True)

    @property
    def partitioning(self) -> tuple[Any, ...] | None:
        return None if self.group_key else super().partitioning

    @property
    def _grouping(self) -> dict[str, Any]:
        """The fields that the specifications of all aggregates have."""
        return {
            "source": self.source.name,
            "group_key": self.keys().declared if self.group_key else (),
            "partitions": self.partitions,
            "partition_by": self.partition_by,
            "emit": self.emit,
        }

    def keys(self) -> Selection:
        """The key columns, without ``window_start`` and ``window_end``."""
        return self.selected(self.group_key or self.source.key)

    def parsed(self) -> Aggregates:
        """The parsed aggregates.

        Raises:
            TopologyError: they are an ``Aggregator``, which only a table's aggregate takes.
        """
        if isinstance(self.aggregates, Aggregator):
            raise TopologyError(
                f"{self.name}: expected SQL aggregates of a stream, for example {{'n': 'count(*)'}}, "
                "got an Aggregator, which adds and subtracts the rows of a table; aggregate a table, "
                "for example to_table(name=...), or write the aggregates in SQL"
            )
        return Aggregates(self.name, self.aggregates)

    @property
    def sums(self) -> dict[str, str]:
        return {} if isinstance(self.aggregates, Aggregator) else self.parsed().sums

    def result(self, **shown: Any) -> Any:
        keys, values = self._key_fields(), self._value_fields()
        check_not_time(self.name, [f.name for f in values])
        about: dict[str, Any] = {"key": [k.name for k in keys]}
        if self.group_key:
            about["partitions"] = self.partitions or self.source.partitions
            about["partition_by"] = self.partition_by
        schema = StructType([*keys, *values])
        return make_table(self, self.source, schema, self.materialized, shown, **about)

    def _key_fields(self) -> list[StructField]:
        return self.keys().fields_of_result()

    def _value_fields(self) -> list[StructField]:
        return self.parsed().fields(self.source.schema)

    @property
    def _columns(self) -> tuple[ColumnSpec, ...]:
        """The (name, SQL aggregate) pairs as commits store them; empty for an Aggregator."""
        given = () if isinstance(self.aggregates, Aggregator) else self.aggregates
        return tuple(ColumnSpec(*one) for one in given)

    def lineage(self) -> dict[str, list[tuple[str, str]]]:
        keys = self.keys()
        return keys.lineage() | {c: keys.mentioned(sql) for c, sql in self._columns}

    @property
    def computed(self) -> set[str]:
        return self.keys().computed | {f.name for f in self._value_fields()}

    def describe(self) -> str:
        what = ", ".join(sql for _, sql in self._columns) or "an aggregator"
        windows = "" if self.window is None else f", {self.window.describe()}"
        return f"{self.source.name} by {', '.join(self.group_key or self.source.key)}{windows}: {what}."


# Stream aggregate


@dataclass(frozen=True)
class StreamAggregate(Aggregate):
    """Aggregates all records of a stream by key, like Kafka Streams' ``groupByKey().aggregate()``.

    Each record emits one result with the largest timestamp of its group so far. Late: aggregated like
    any other record. Null key: dropped and counted; after a change of key (``group_by`` with columns,
    ``select_key``) dropped without being counted, as in Kafka Streams' repartitioning. Tombstone:
    dropped and counted.

    Args:
        group_key: empty = the stream's key.
        aggregates: (name, SQL aggregate) pairs; count, sum, min, max or avg.
        materialized: None: a plain table; with a history retention: a versioned table.
    """

    called = ("aggregate",)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.source.is_table:
            raise TopologyError(
                f"{self.name}: expected a stream, got the table {self.source.name!r}, whose old rows "
                "must be subtracted; use its group_by(...).aggregate(...)"
            )
        check_emit(self.name, self.emit)
        self.parsed()
        self.keys()

    @property
    def rekeyed(self) -> bool:
        return bool(self.group_key) or self.source.rekeyed

    @property
    def specification(self) -> StreamAggregateSpec:
        return StreamAggregateSpec(**self._grouping, aggregates=self._columns)


# Table aggregate


Row = dict[str, Any]


@dataclass(frozen=True)
class Aggregator:
    """A user-defined aggregation in Python, called once for each added or subtracted row.

    Rows and aggregates are dicts of columns. A function may change its arguments in place. If it
    returns None, the group has no row. It runs in Spark's Python workers over sorted batches, with the
    aggregate of one group in memory.

    A function must return a dict with columns of ``schema``; a struct in it is a dict of its fields. A
    missing column or field is null. If a function raises, or returns something else, the run fails with
    ``ContractError`` and commits nothing.

    Args:
        adder: ``(row, aggregate) -> aggregate``, for a new row.
        subtractor: ``(row, aggregate) -> aggregate``, for a row that is replaced or deleted.
        initializer: returns the aggregate of an empty group; None: the first row is the aggregate
            (Kafka's ``reduce``).
        schema: columns of the aggregate, a StructType; None: those of the row (``reduce``).
    """

    adder: Callable[[Row, Row], Row | None]
    subtractor: Callable[[Row, Row], Row | None]
    initializer: Callable[[], Row] | None = None
    schema: Any = None

    def specification(self, name: str) -> AggregatorSpec:
        """Returns the functions by name, as commits store them.

        Args:
            name: the asset, for messages.
        """
        return AggregatorSpec(
            adder=name_of(self.adder),
            subtractor=name_of(self.subtractor),
            initializer=None if self.initializer is None else name_of(self.initializer),
            columns=None if self.schema is None else as_struct(self.schema, name).simpleString(),
        )


def _returns_none(before: Instruction, end: Instruction) -> bool:
    """Returns whether an instruction at the end of a function returns the constant None."""
    if end.opname == "RETURN_CONST":
        return end.argval is None
    loaded = before.opname == "LOAD_CONST" and before.argval is None
    return loaded and not end.is_jump_target


def name_of(function: Any) -> str:
    """Returns the name of a function; for a callable object, such as a partial, the name of its
    function or class. The result never contains an address in memory, which differs between
    processes."""
    function = getattr(function, "func", function)
    return getattr(function, "__qualname__", None) or type(function).__qualname__


@dataclass(frozen=True)
class TableAggregate(Aggregate):
    """Aggregates a table's current rows by another key (KIP-914).

    A change subtracts the old row from its group and adds the new row to its group. Timestamps of a
    group's results never decrease; an empty group keeps its row.

    Late: an out-of-order change of a versioned table is ignored and not counted; a versioned result
    refuses records older than its history retention. Null key: a table has none; a row with a null in
    its group key belongs to no group. Tombstone: subtracts the old row from its group; without an old
    row it is ignored. A record that repeats its version (``new_version_on``) is ignored.

    Args:
        group_key: new key columns; a row with a null in any of them belongs to no group.
        select: the columns passed to an :class:`Aggregator`.
        aggregates: (name, SQL aggregate) pairs, count, sum or avg; or an Aggregator.
    """

    called = ("aggregate",)

    select: tuple[str, ...] = field(default=("*",), kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        need_table(self.name, "group_by", self.source)
        require_readable(self.name, Consumer.GROUP_BY, self.source)
        check_emit(self.name, self.emit)
        if not self.group_key:
            raise TopologyError(
                f"{self.name}: group_by needs the columns or expressions of the new key, for example "
                f"group_by({self.source.value_columns[0] if self.source.value_columns else 'x'!r})"
            )
        if isinstance(self.aggregates, Aggregator):
            self.selection()
            self._check_adder(self.aggregates.adder)
        elif not self.parsed().invertible:
            raise TopologyError(
                f"{self.name}: min and max cannot subtract a replaced row; aggregate a table with "
                "count, sum and avg, or write an Aggregator"
            )
        require_of_versions(self.name, Consumer.GROUP_BY, self.source, self._used())

    def _check_adder(self, adder: Any) -> None:
        """Raises TopologyError if an adder cannot return an aggregate: it forgets to, perhaps because
        it changes its aggregate in place. Then no group would ever have a row."""
        code = getattr(adder, "__code__", None)
        if code is None or code.co_flags & (CO_GENERATOR | CO_COROUTINE):
            return
        steps = [*get_instructions(code)]
        ends = [pair for pair in pairwise(steps) if pair[1].opname.startswith("RETURN_")]
        if ends and all(_returns_none(*one) for one in ends):
            raise TopologyError(
                f"{self.name}: expected the adder of its Aggregator to return the aggregate, but "
                f"{name_of(adder)} returns no value, and so no group would have a row; end it with "
                "return and the aggregate"
            )

    def _used(self) -> set[str]:
        """The columns of the table in the group key and the aggregates."""
        selected = isinstance(self.aggregates, Aggregator)
        columns = self.selection().columns if selected else self._columns
        expressions = [sql for _, sql in (*columns, *self.keys().columns)]
        there = [*self.source.schema.names, TIMESTAMP]
        return {c for c in there for sql in expressions if mentions(sql, c)}

    def selection(self) -> Selection:
        """The columns passed to an Aggregator."""
        return self.selected(self.select)

    @property
    def specification(self) -> TableAggregateSpec:
        aggregates = self.aggregates
        if isinstance(aggregates, Aggregator):
            return TableAggregateSpec(
                **self._grouping,
                aggregates=aggregates.specification(self.name),
                select=self.selection().declared,
            )
        return TableAggregateSpec(**self._grouping, aggregates=self._columns)

    def _value_fields(self) -> list[StructField]:
        if not isinstance(self.aggregates, Aggregator):
            return super()._value_fields()
        if self.aggregates.schema is not None:
            return list(as_struct(self.aggregates.schema, self.name).fields)
        keys = {k.name for k in self._key_fields()}
        return [f for f in self.selection().fields_of_result() if f.name not in keys]

    def lineage(self) -> dict[str, list[tuple[str, str]]]:
        if not isinstance(self.aggregates, Aggregator):
            return super().lineage()
        every = [(self.source.name, c) for c, _ in self.selection().columns]
        return self.keys().lineage() | dict.fromkeys(self.result().value_columns, every)
