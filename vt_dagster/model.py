"""Tables and streams as typed values, and the rules that hold between them.

A topology is made of :class:`Stream`, :class:`Table` and :class:`VersionedTable` values. Making one
checks it: whatever Kafka Streams refuses when a topology is built raises :class:`TopologyError`
here, which is when definitions load, before any run. Nothing in this module starts Spark.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any, Literal, Protocol, cast

from pyspark.sql.types import (
    ArrayType,
    DataType,
    MapType,
    StructType,
    TimestampType,
)

from vt_dagster.columns import RESERVED, TIMESTAMP, VALID_FROM, VALID_TO
from vt_dagster.errors import TopologyError
from vt_dagster.projection import Projection, Side

Duration = timedelta | Mapping[int, timedelta]
"""A length of stream time. A mapping gives each partition a length of its own, as the conformance
runner needs, which runs scenarios of many configurations side by side as partitions."""

JoinKind = Literal["inner", "left"]

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_ODD_CHARACTERS = re.compile(r"[ .,;{}()=`\t\n]")
_MAX_RETENTION = timedelta(days=365_000)


class Source(Protocol):
    """Where the records of a source asset come from; see ``vt_dagster.storage.files``."""

    def describe(self) -> str:
        """What is read, for descriptions and messages."""
        ...


def _as_struct(schema: Any, name: str) -> StructType:
    """The Spark schema of a pandera model (``to_structtype``) or of a StructType itself."""
    if isinstance(schema, StructType):
        return schema
    convert = getattr(schema, "to_structtype", None)
    if convert is None:
        raise TopologyError(
            f"{name}: schema must be a pandera.pyspark DataFrameModel or a StructType, got {schema!r}"
        )
    return cast(StructType, convert())


def _check_duration(name: str, what: str, value: Any) -> None:
    every: list[Any] = [value]
    if isinstance(value, Mapping):
        every = list(cast(Mapping[int, Any], value).values())
    for one in every:
        if not isinstance(one, timedelta):
            raise TopologyError(
                f"{name}: {what} must be a datetime.timedelta, got {one!r}; "
                f"write for example {what}=timedelta(days=30)"
            )
        if not timedelta(0) <= one <= _MAX_RETENTION:
            raise TopologyError(
                f"{name}: {what} must be between 0 and {_MAX_RETENTION.days:,} days, got {one}"
            )


@dataclass(frozen=True)
class Stream:
    """Records with a key and a timestamp, in order of arrival.

    Args:
        name: the asset's name: letters, digits, underscores.
        key: the key column, or several for a composite key (a tuple, once made). A record lacks a
            key where any of them is null.
        schema: every column of a record, key included: a pandera model for PySpark, whose checks are
            then applied before each commit, or a StructType (which it is, once made). Any Spark type
            may be a value; a key must not hold a map.
        timestamp: the column, or a SQL expression over the columns, that says when the record was
            true (TIMESTAMP, UTC). The log has it as ``timestamp``.
        tombstone: a SQL condition that marks a record whose *value is null*: a deletion in a
            table, in a stream a record that joins drop. None: there are none. A null column alone
            never makes a tombstone.
        partitions: number of partitions of the log of a files source; a record goes to the hash of
            its key modulo this number. Stream time is kept per partition, so it is a semantic
            setting, not only one of speed.
        source: where the records come from; None for the result of an operator.
        null_key: what becomes of a source record without a key: ``quarantine`` (default), or
            ``keep`` so that a left join can emit it with nothing on the right.
        description, group, owners: shown in Dagster.
    """

    name: str
    key: Sequence[str] = field(kw_only=True)
    schema: Any = field(kw_only=True)
    timestamp: str = field(default=TIMESTAMP, kw_only=True)
    tombstone: str | None = field(default=None, kw_only=True)
    partitions: int = field(default=1, kw_only=True)
    source: Source | None = field(default=None, kw_only=True)
    null_key: Literal["quarantine", "keep"] = field(default="quarantine", kw_only=True)
    description: str | None = field(default=None, kw_only=True)
    group: str | None = field(default=None, kw_only=True)
    owners: tuple[str, ...] = field(default=(), kw_only=True)
    operator: StreamTableJoin | None = field(default=None, kw_only=True, repr=False)
    contract: Any = field(default=None, kw_only=True, repr=False)
    """The pandera model that ``schema`` was made from, if any."""

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise TopologyError(
                f"{self.name!r} is not a name for a {self._kind()}: use letters, digits and "
                "underscores, not starting with a digit"
            )
        if not isinstance(self.schema, StructType) and self.contract is None:
            object.__setattr__(self, "contract", self.schema)
        object.__setattr__(self, "schema", _as_struct(self.schema, self.name))
        key = (self.key,) if isinstance(self.key, str) else tuple(self.key)
        object.__setattr__(self, "key", key)
        object.__setattr__(self, "owners", tuple(self.owners))
        self._check_columns()
        if self.partitions < 1:
            raise TopologyError(f"{self.name}: partitions must be 1 or more, got {self.partitions}")
        if self.null_key not in ("quarantine", "keep"):
            raise TopologyError(
                f"{self.name}: null_key must be 'quarantine' or 'keep', got {self.null_key!r}"
            )

    def _kind(self) -> str:
        return type(self).__name__

    def _check_columns(self) -> None:
        names = [f.name for f in self.schema.fields]
        lowered = [n.lower() for n in names]
        twice = sorted({n for n in lowered if lowered.count(n) > 1})
        if twice:
            raise TopologyError(
                f"{self.name}: columns {twice} stand more than once in the schema (Spark does not "
                "tell upper from lower case); rename one"
            )
        taken = [n for n in names if n.lower() in RESERVED or n.startswith("_")]
        if taken:
            raise TopologyError(
                f"{self.name}: columns {taken} have names that vt_dagster needs itself "
                f"({', '.join(sorted(RESERVED))}, and names that begin with an underscore); "
                "rename them in the schema"
            )
        odd = [n for n in names if _ODD_CHARACTERS.search(n)]
        if odd:
            raise TopologyError(
                f"{self.name}: columns {odd} have characters in their names that Delta Lake or Spark's "
                "SQL does not take (blank . , ; { } ( ) = ` tab, line end); rename them in the schema"
            )
        if TIMESTAMP in lowered and self.timestamp != TIMESTAMP:
            raise TopologyError(
                f"{self.name}: the schema has a column 'timestamp', but the record's timestamp is "
                f"declared as {self.timestamp!r}; the log can hold only one 'timestamp': rename the "
                "column or declare timestamp='timestamp'"
            )
        if not self.key:
            raise TopologyError(f"{self.name}: a {self._kind()} needs at least one key column")
        missing = [k for k in self.key if k not in names]
        if missing:
            raise TopologyError(
                f"{self.name}: key columns {missing} are not in the schema, which has {names}"
            )
        for k in self.key:
            if _holds_map(self.schema[k].dataType):
                raise TopologyError(
                    f"{self.name}: key column {k!r} is {self.schema[k].dataType.simpleString()}; "
                    "a map can be neither grouped nor joined: use its entries or a string"
                )
        if self.operator is None and self.timestamp.isidentifier():
            if self.timestamp not in names:
                raise TopologyError(
                    f"{self.name}: timestamp column {self.timestamp!r} is not in the schema, "
                    f"which has {names}"
                )
            if not isinstance(self.schema[self.timestamp].dataType, TimestampType):
                got = self.schema[self.timestamp].dataType.simpleString()
                raise TopologyError(
                    f"{self.name}: timestamp column {self.timestamp!r} is {got}, expected timestamp; "
                    f"convert it in an expression, for example "
                    f"timestamp='timestamp_millis({self.timestamp})'"
                )

    @property
    def inputs(self) -> tuple[Stream, ...]:
        """The streams and tables that this one is made of; empty for a source."""
        return () if self.operator is None else (self.operator.left, self.operator.right)

    @property
    def key_types(self) -> tuple[DataType, ...]:
        """Types of the key columns, in the order of ``key``."""
        return tuple(self.schema[k].dataType for k in self.key)

    @property
    def value_columns(self) -> tuple[str, ...]:
        """The columns that are not part of the key."""
        return tuple(f.name for f in self.schema.fields if f.name not in self.key)

    def join(
        self,
        table: Table,
        *,
        name: str,
        select: Sequence[str] = ("left.*", "right.*"),
        grace_period: Duration | None = None,
        **shown: Any,
    ) -> Stream:
        """Inner join of this stream with a table; see :class:`StreamTableJoin`.

        ``shown``: description, group and owners of the result.
        """
        join = StreamTableJoin(self, table, "inner", name, tuple(select), grace_period)
        return join.result(**shown)

    def left_join(
        self,
        table: Table,
        *,
        name: str,
        select: Sequence[str] = ("left.*", "right.*"),
        grace_period: Duration | None = None,
        **shown: Any,
    ) -> Stream:
        """Left join of this stream with a table; see :class:`StreamTableJoin`.

        ``shown``: description, group and owners of the result.
        """
        join = StreamTableJoin(self, table, "left", name, tuple(select), grace_period)
        return join.result(**shown)


@dataclass(frozen=True)
class Table(Stream):
    """A stream of changes of which the latest record per key, by arrival, counts.

    A later record replaces an earlier one whatever their timestamps, as in Kafka Streams' plain
    stores. Joins with a stream use what the table holds when the run starts. Records without a key
    are quarantined.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.null_key != "quarantine":
            raise TopologyError(
                f"{self.name}: a table cannot keep records without a key; leave null_key out"
            )

    @property
    def versioned(self) -> bool:
        """Whether the table remembers what was true when."""
        return isinstance(self, VersionedTable)


@dataclass(frozen=True)
class VersionedTable(Table):
    """A table that remembers what was true when (KIP-889).

    Args:
        history_retention: how far back the table answers, and how late a record may be: one with
            ``timestamp < stream time - history_retention`` is refused and counted; one exactly
            that old is accepted.
        segment_interval: Kafka's name for the width of a piece of stored history. It never changes
            a result.
    """

    history_retention: Duration = field(kw_only=True)
    segment_interval: timedelta | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_duration(self.name, "history_retention", self.history_retention)
        if self.segment_interval is not None and self.segment_interval <= timedelta(0):
            raise TopologyError(
                f"{self.name}: segment_interval must be longer than 0, got {self.segment_interval}; "
                "leave it out for the default"
            )


@dataclass(frozen=True)
class StreamTableJoin:
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

    left: Stream
    right: Table
    kind: JoinKind
    name: str
    select: tuple[str, ...] = ("left.*", "right.*")
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
        if self.kind not in ("inner", "left"):
            raise TopologyError(
                f"{self.name}: a stream-table join is 'inner' or 'left', got {self.kind!r}"
            )
        object.__setattr__(self, "select", tuple(self.select))
        self._check_keys()
        if self.grace_period is not None:
            self._check_grace(self.grace_period)
        self.projection()

    def _check_keys(self) -> None:
        def types(side: Stream) -> str:
            pairs = zip(side.key, side.key_types, strict=True)
            return ", ".join(f"{k} {t.simpleString()}" for k, t in pairs)

        if self.left.key_types != self.right.key_types:
            raise TopologyError(
                f"{self.name}: the keys of both sides must have the same types in the same order: "
                f"{self.left.name} has ({types(self.left)}), {self.right.name} has "
                f"({types(self.right)}); cast the key of one side in its schema"
            )

    def _check_grace(self, grace: Duration) -> None:
        _check_duration(self.name, "grace_period", grace)
        if not isinstance(self.right, VersionedTable):
            raise TopologyError(
                f"{self.name}: a grace period needs a versioned table, but {self.right.name!r} is "
                "not versioned: declare it as VersionedTable with a history_retention, or leave "
                "grace_period out"
            )
        retention = self.right.history_retention
        for partition, one in _pairs(grace, retention):
            if one[0] > one[1]:
                raise TopologyError(
                    f"{self.name}: the grace period {one[0]}{partition} is longer than the history "
                    f"retention {one[1]} of {self.right.name!r}; records would leave the buffer "
                    "after the versions they need are gone: shorten one or lengthen the other"
                )

    def projection(self) -> Projection:
        """The columns of the result, checked against both sides."""

        def side(node: Stream) -> Side:
            ends = (VALID_FROM, VALID_TO) if isinstance(node, VersionedTable) else ()
            return Side(node.name, tuple(node.schema.fields), (TIMESTAMP, *ends))

        sides = {"left": side(self.left), "right": side(self.right)}
        return Projection(self.name, tuple(self.left.key), sides, self.select)

    def result(self, **shown: Any) -> Stream:
        """The stream of results; ``shown``: description, group, owners."""
        return Stream(
            self.name,
            key=self.left.key,
            schema=StructType(self.projection().fields()),
            timestamp=TIMESTAMP,
            partitions=self.left.partitions,
            null_key=self.left.null_key,
            operator=self,
            **shown,
        )


def _pairs(one: Duration, other: Duration) -> list[tuple[str, tuple[timedelta, timedelta]]]:
    """Both durations side by side: once, or once for each partition that either mentions."""
    partitions = sorted(
        {*(one if isinstance(one, Mapping) else ())} | {*(other if isinstance(other, Mapping) else ())}
    )
    if not partitions:
        return [("", (cast(timedelta, one), cast(timedelta, other)))]

    def at(value: Duration, partition: int) -> timedelta:
        return value[partition] if isinstance(value, Mapping) else value

    return [(f" of partition {p}", (at(one, p), at(other, p))) for p in partitions]


def _holds_map(kind: DataType) -> bool:
    if isinstance(kind, MapType):
        return True
    if isinstance(kind, ArrayType):
        return _holds_map(kind.elementType)
    if isinstance(kind, StructType):
        return any(_holds_map(f.dataType) for f in kind.fields)
    return False


def topological(nodes: Sequence[Stream]) -> list[Stream]:
    """The given nodes and all their inputs, each once, inputs first."""
    found: dict[str, Stream] = {}

    def visit(node: Stream) -> None:
        for source in node.inputs:
            visit(source)
        other = found.setdefault(node.name, node)
        if other != node:
            raise TopologyError(f"two different assets have the name {node.name!r}; rename one of them")

    for node in nodes:
        visit(node)
    return list(found.values())


__all__ = [
    "Duration",
    "JoinKind",
    "Source",
    "Stream",
    "StreamTableJoin",
    "Table",
    "VersionedTable",
    "replace",
    "topological",
]
