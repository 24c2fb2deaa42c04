"""Operators on one record at a time, like filter, map_values, select_key, merge and to_table.

- filter and filter_not: the rows for which a condition holds or does not hold.
- map_values: replaces the value columns of a table.
- flat_map_values: turns each record of a stream into zero or more records.
- select_key: gives the records of a stream a new key.
- merge: combines several streams into one.
- to_table: reads a stream as the changelog of a table.
- to_stream: converts a table's changelog into a stream.
"""

from __future__ import annotations

from abc import ABC
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from pyspark.sql.types import ArrayType, DataType, NullType, StructField, StructType

from vt_dagster.columns import TIMESTAMP
from vt_dagster.errors import TopologyError
from vt_dagster.topology.expressions import Selection, mentions
from vt_dagster.topology.node import MIXED, Input, Operator
from vt_dagster.topology.operators.base import (
    OneInput,
    check_not_time,
    make_stream,
    make_table,
    need_table,
)
from vt_dagster.topology.options import Consumer, require_readable
from vt_dagster.topology.schema import same_types
from vt_dagster.topology.specification import (
    ColumnSpec,
    FilterSpec,
    FlatMapValuesSpec,
    MapValuesSpec,
    MergeSpec,
    SelectKeySpec,
    ToStreamSpec,
    ToTableSpec,
)
from vt_dagster.topology.version_rules import new_version_on_of, valid_until_of
from vt_dagster.topology.windows import Window

# Base


class RowByRow(OneInput, ABC):
    """A stateless operator: without ``materialized`` it uses the versions of its input."""

    @property
    def stored(self) -> bool:
        return self.materialized is not None

    @property
    def window(self) -> Window | None:
        return self.source.window

    @property
    def condition(self) -> str:
        """SQL condition of the rows that pass; empty = all."""
        return ""

    def _rows(self, schema: StructType, shown: dict[str, Any]) -> Any:
        source, materialized = self.source, self.materialized
        more: dict[str, Any] = {"inherited": source.retention}
        if (column := valid_until_of(source)) is not None:
            kept = self.copied().get(column) == [(source.name, column)]
            if not kept or (materialized is not None and materialized.history_retention is None):
                raise TopologyError(
                    f"{self.name}: expected a versioned result with the column {column!r}, the "
                    f"valid_until of {source.name!r}, got one without the column or without versions; "
                    "select the column unchanged, and materialize with a history_retention"
                )
            more["valid_until"] = column
        if (columns := new_version_on_of(source)) is not None:
            self._check_repeats(columns)
            more["new_version_on"] = columns
        return make_table(self, source, schema, materialized, shown, **more)

    def _check_repeats(self, columns: Sequence[str]) -> None:
        """Raises TopologyError if two records of one version could have different results."""
        source, materialized, copied = self.source, self.materialized, self.copied()
        lost = [c for c in columns if copied.get(c) != [(source.name, c)]]
        if lost or (materialized is not None and materialized.history_retention is None):
            raise TopologyError(
                f"{self.name}: expected a versioned result with the columns {list(columns)}, the "
                f"new_version_on of {source.name!r}, got one without {lost or 'versions'}; select the "
                "columns unchanged, and materialize with a history_retention"
            )
        # A textual match: it may refuse a condition that has the name in another meaning, never the
        # reverse.
        others = [c for c in source.schema.names if c not in (*columns, *source.key)]
        named = [c for c in dict.fromkeys((*others, TIMESTAMP)) if mentions(self.condition, c)]
        if named:
            raise TopologyError(
                f"{self.name}: expected a condition over {[*source.key, *columns]}, the columns that "
                f"are equal in all records of a version of {source.name!r} (new_version_on), got one "
                f"over {named}: {self.condition!r}; add them to new_version_on, or filter after a join"
            )


# filter


@dataclass(frozen=True)
class Filter(RowByRow):
    """The rows of a table for which a condition holds (KIP-914).

    A row that does not pass becomes a tombstone. A versioned table emits every record, so that the
    result has a version for the time when a row did not pass. A plain table skips a record if neither
    the record nor its key's previous row passes.

    Late: an out-of-order change of a versioned table is emitted with its own timestamp; a result
    materialized with a history retention refuses records older than that. Null key: a table has none.
    Tombstone: stays a tombstone, in ``filter_not`` too; a repeated one is treated like a row that does
    not pass.

    Args:
        predicate: SQL condition over the table's columns; null counts as false.
        negate: keep the rows that do not pass (``filter_not``).
        materialized: None: the result has no store of its own, and is versioned if the table is.
    """

    called = ("filter", "filter_not")

    predicate: str = field(kw_only=True)
    negate: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        need_table(self.name, "a filter", self.source)
        require_readable(self.name, Consumer.FILTER, self.source)
        if not str(self.predicate).strip():
            raise TopologyError(
                f"{self.name}: a filter needs a SQL condition, for example 'price > 10', got "
                f"{self.predicate!r}"
            )

    @property
    def word(self) -> str:
        return self.words()[self.negate]

    @property
    def condition(self) -> str:
        return self.predicate

    @property
    def specification(self) -> FilterSpec:
        return FilterSpec(source=self.source.name, predicate=self.predicate, negate=self.negate)

    def result(self, **shown: Any) -> Any:
        return self._rows(self.source.schema, shown)

    def describe(self) -> str:
        return f"{self.source.name} where {'not ' if self.negate else ''}{self.predicate}."


# map_values


@dataclass(frozen=True)
class MapValues(RowByRow):
    """Replaces the value columns of a table by ``select`` and keeps the key (KIP-914).

    Late: an out-of-order change of a versioned table is emitted with its own timestamp; a result
    materialized with a history retention refuses records older than that. Null key: a table has none.
    Tombstone: stays a tombstone; repeated ones are emitted too.

    Args:
        select: ``column``, ``*``, or a SQL expression over the table's columns with an alias.
        materialized: None: the result has no store of its own, and is versioned if the table is.
    """

    select: tuple[str, ...] = field(kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        need_table(self.name, "map_values", self.source)
        require_readable(self.name, Consumer.MAP_VALUES, self.source)
        object.__setattr__(self, "select", tuple(self.select))
        check_not_time(self.name, [name for name, _ in self.selection().columns])

    def selection(self) -> Selection:
        """The columns of the result, checked against the table."""
        return self.selected(self.select, self.source.key)

    @property
    def specification(self) -> MapValuesSpec:
        return MapValuesSpec(source=self.source.name, select=self.selection().declared)

    def result(self, **shown: Any) -> Any:
        return self._rows(StructType(self.selection().fields_of_result()), shown)

    def lineage(self) -> dict[str, list[tuple[str, str]]]:
        return self.selection().lineage()

    @property
    def computed(self) -> set[str]:
        return self.selection().computed

    def describe(self) -> str:
        return f"{self.source.name} with the values {', '.join(self.select)}."


# flat_map_values


@dataclass(frozen=True)
class FlatMapValues(OneInput):
    """Emits one record per element of an array, in the array's order, with the key and timestamp of the
    input record.

    An empty array emits nothing. A null array fails the run before its commit, as in Kafka Streams:
    write ``coalesce(..., array())`` to avoid that. A null element is a tombstone. Late: emitted like
    any other record. Null key: emitted. Tombstone: the expression is evaluated with null values.

    Args:
        expression: SQL expression over the stream's columns that returns an array.
        column: name of the value column for the elements.
        keep: further columns of the stream to keep.
    """

    expression: str = field(kw_only=True)
    column: str = field(kw_only=True)
    keep: tuple[str, ...] = field(default=(), kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.source.is_table:
            raise TopologyError(
                f"{self.name}: expected a stream for flat_map_values, got the table "
                f"{self.source.name!r}; use its changes, to_stream(name=...)"
            )
        object.__setattr__(self, "keep", tuple(self.keep))
        taken = [n for n in (*self.source.key, *self.keep) if n.lower() == self.column.lower()]
        if taken:
            raise TopologyError(
                f"{self.name}: expected a new column name for the elements, got {self.column!r}, which "
                "the result already has; choose another name"
            )
        check_not_time(self.name, [self.column, *self.keep])
        self._columns().check(self.expression)
        kind = self._columns().type_of(self.expression)
        if not isinstance(kind, ArrayType | NullType):
            raise TopologyError(
                f"{self.name}: expected an expression of type array, got {self.expression!r} of type "
                f"{kind.simpleString()}; write for example split({self.expression}, ',')"
            )

    @property
    def rekeyed(self) -> bool:
        return self.source.rekeyed

    def _columns(self) -> Selection:
        return self.selected(self.keep, self.source.key)

    @property
    def specification(self) -> FlatMapValuesSpec:
        elements, keep = ColumnSpec(self.column, self.expression), self._columns().declared
        return FlatMapValuesSpec(source=self.source.name, elements=elements, keep=keep)

    def result(self, **shown: Any) -> Any:
        kind = self._columns().type_of(self.expression)
        element: DataType = kind.elementType if isinstance(kind, ArrayType) else NullType()
        fields = [*self._columns().fields_of_result(), StructField(self.column, element)]
        return make_stream(self, self.source, fields, shown)

    def kept(self) -> tuple[str, ...]:
        """The stream's columns in the result."""
        return tuple(name for name, _ in self._columns().columns)

    def lineage(self) -> dict[str, list[tuple[str, str]]]:
        columns = self._columns()
        return {**columns.lineage(), self.column: columns.mentioned(self.expression)}

    @property
    def computed(self) -> set[str]:
        return self._columns().computed | {self.column}

    def describe(self) -> str:
        return f"One record per element of {self.expression} in each record of {self.source.name}."


# select_key


@dataclass(frozen=True)
class SelectKey(OneInput):
    """Gives the records of a stream a new key and repartitions them by that key.

    All other columns are kept; a new key column replaces a column of the same name. Late: emitted like
    any other record. Null key: a record without an old key gets the new key too; a record with a null
    new key is emitted, and skipped by aggregates. Tombstone: emitted with the new key.

    Args:
        group_key: key columns as ``column`` or ``expression as name``.
        partitions: number of partitions of the result; None = that of the input.
        partition_by: SQL expression over the new key that gives the partition; None = hash of the key.
    """

    group_key: tuple[str, ...] = field(kw_only=True)
    partitions: int | None = field(default=None, kw_only=True)
    partition_by: str | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.source.is_table:
            raise TopologyError(
                f"{self.name}: select_key needs a stream, got the table {self.source.name!r}; use "
                "group_by(...), or convert it with to_stream(name=...)"
            )
        if not self.group_key:
            raise TopologyError(
                f"{self.name}: expected the columns or expressions of the new key, got none; for "
                f"example select_key({self.source.schema.names[-1]!r}, name={self.name!r})"
            )
        if any(name.lower() == TIMESTAMP for name, _ in self.keys().columns):
            raise TopologyError(
                f"{self.name}: expected no key column named 'timestamp', the name of the record's own "
                "time; rename it, for example 'timestamp as at'"
            )

    @property
    def rekeyed(self) -> bool:
        return True

    @property
    def partitioning(self) -> None:
        return None

    def keys(self) -> Selection:
        """The new key columns."""
        return self.selected(self.group_key)

    @property
    def specification(self) -> SelectKeySpec:
        return SelectKeySpec(
            source=self.source.name,
            group_key=self.keys().declared,
            partitions=self.partitions,
            partition_by=self.partition_by,
        )

    def result(self, **shown: Any) -> Any:
        keys = self.keys().fields_of_result()
        names = {k.name.lower() for k in keys}
        others = [f for f in self.source.schema.fields if f.name.lower() not in names]
        about: dict[str, Any] = {"key": [k.name for k in keys], "partition_by": self.partition_by}
        about["partitions"] = self.partitions or self.source.partitions
        return make_stream(self, self.source, [*keys, *others], shown, **about)

    def lineage(self) -> dict[str, list[tuple[str, str]]]:
        return super().lineage() | self.keys().lineage()

    @property
    def computed(self) -> set[str]:
        return self.keys().computed

    def describe(self) -> str:
        return f"The records of {self.source.name} keyed by {', '.join(self.group_key)}."


# merge


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
        super().__post_init__()
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

    @property
    def specification(self) -> MergeSpec:
        return MergeSpec(sources=tuple(node.name for node in self.sources))

    def result(self, **shown: Any) -> Any:
        first = self.sources[0]
        known = [_types(node) for node in self.sources]
        # A column whose type only Spark can infer (NullType) takes the type it has in another stream.
        fields = [
            StructField(f.name, next((k[f.name] for k in known if k[f.name] != NullType()), f.dataType))
            for f in first.schema.fields
            if f.name in known[0]
        ]
        partitions = max(node.partitions for node in self.sources)
        return make_stream(self, first, fields, shown, partitions=partitions)

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


# to_table


@dataclass(frozen=True)
class ToTable(OneInput):
    """Reads a stream as the changelog of a table: each record is an upsert of its key.

    The result is versioned only if ``materialized`` has a history retention.

    Late: a versioned result refuses records older than its history retention; a plain one accepts every
    record. Null key: dropped and counted. Tombstone: deletes the key's row.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.source.is_table:
            raise TopologyError(
                f"{self.name}: to_table needs a stream, but {self.source.name!r} is already a table; "
                "use it directly, or convert it with to_stream(name=...) first"
            )

    @property
    def partitioning(self) -> tuple[Any, ...] | None:
        kept = self.source.partitioning
        return None if kept[0] == MIXED else kept

    @property
    def specification(self) -> ToTableSpec:
        return ToTableSpec(source=self.source.name)

    def result(self, **shown: Any) -> Any:
        return make_table(self, self.source, self.source.schema, self.materialized, shown)

    def describe(self) -> str:
        return f"The records of {self.source.name} as changes of a table."


# to_stream


@dataclass(frozen=True)
class ToStream(OneInput):
    """The changelog of a table as a stream.

    Late: out-of-order changes are emitted with their own timestamps; records that the table refused are
    not. Null key: a table has none. Tombstone: emitted as a record without a value.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        need_table(self.name, "to_stream", self.source)
        require_readable(self.name, Consumer.TO_STREAM, self.source)

    @property
    def specification(self) -> ToStreamSpec:
        return ToStreamSpec(source=self.source.name)

    def result(self, **shown: Any) -> Any:
        return make_stream(self, self.source, self.source.schema, shown)

    def describe(self) -> str:
        return f"The changes of {self.source.name} as a stream."
