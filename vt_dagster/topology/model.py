"""Streams and tables as typed values, with the methods that make operators.

A topology consists of :class:`Stream`, :class:`Table` and :class:`VersionedTable` values. Each is
checked on construction: whatever Kafka Streams refuses when it builds a topology raises
:class:`TopologyError` when definitions load, before any run. Nothing in this module starts Spark.

``Stream`` and ``Table`` inherit the join methods and are defined later, so they are type variables
there.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from datetime import datetime, timedelta
from typing import Any, Generic, Literal, TypeAlias, TypeVar, cast, get_args, overload

from typing_extensions import Required, TypedDict, Unpack

from vt_dagster.errors import ContractError, TopologyError
from vt_dagster.topology.durations import Duration, parse_length
from vt_dagster.topology.node import Freshness, Node, Source, derived_from, listed, topological
from vt_dagster.topology.operators import (
    Aggregator,
    CorrectedJoin,
    CorrectedStreamJoin,
    Emit,
    Filter,
    FlatMapValues,
    ForeignKeyJoin,
    HistoryJoin,
    JoinKind,
    MapValues,
    Materialized,
    Merge,
    Row,
    SelectKey,
    StreamAggregate,
    StreamStreamJoin,
    StreamTableJoin,
    Suppress,
    TableAggregate,
    TableTableJoin,
    ToStream,
    ToTable,
    UntilTimeLimit,
    UntilWindowCloses,
    WindowedAggregate,
)
from vt_dagster.topology.operators.stream_table_join import AsKnown, At, AtOrBefore, BeforeFirst
from vt_dagster.topology.version_rules import VersionRules
from vt_dagster.topology.windows import Window

# Grouping


N = TypeVar("N", bound=Node)
"""``Table``, which is defined later."""


def _pairs(aggregates: Any) -> Any:
    """Returns the items of a mapping; any other value unchanged, so that ``check_types`` refuses it."""
    return tuple(aggregates.items()) if isinstance(aggregates, Mapping) else aggregates


@dataclass(frozen=True)
class GroupedTable(Generic[N]):
    """A table grouped by another key; see :class:`vt_dagster.topology.operators.TableAggregate`."""

    table: Node
    key: tuple[str, ...]
    partitions: int | None = None
    partition_by: str | None = None

    def aggregate(
        self,
        aggregates: Mapping[str, str] | Aggregator,
        *,
        name: str,
        select: Sequence[str] = ("*",),
        materialized: Materialized | None = None,
        emit: Emit = "every_update",
        **shown: Any,
    ) -> N:
        """Makes a table with one row per group.

        Args:
            aggregates: ``{"aircraft": "count(*)", "seats": "sum(seats)"}``: count, sum and avg over
                SQL expressions; or an :class:`Aggregator`.
            select: the columns passed to an Aggregator.
            emit: ``every_update``, in order of the records, like Kafka Streams without a cache; or
                ``per_run``: only the last update of each group in a run, like Kafka Streams with a
                cache. Both sum floating-point numbers in order of the records, at the cost of a sort by
                group, so that the final bits are equal. Integers and decimals are exact in any order:
                with ``per_run`` they use a hash aggregate.
        """
        return TableAggregate(
            self.table,
            name,
            materialized,
            group_key=self.key,
            aggregates=_pairs(aggregates),
            select=listed(select),
            emit=emit,
            partitions=self.partitions,
            partition_by=self.partition_by,
        ).result(**shown)

    def count(self, *, name: str, column: str = "count", **more: Any) -> N:
        """Counts the rows of each group."""
        return self.aggregate({column: "count(*)"}, name=name, **more)

    def sum(self, expression: str, *, name: str, column: str = "sum", **more: Any) -> N:
        """Sums an expression over the rows of each group; null adds nothing."""
        return self.aggregate({column: f"sum({expression})"}, name=name, **more)

    def reduce(
        self,
        adder: Callable[[Row, Row], Row],
        subtractor: Callable[[Row, Row], Row],
        *,
        name: str,
        **more: Any,
    ) -> N:
        """Combines the rows of each group with functions ``(row, aggregate) -> aggregate``."""
        return self.aggregate(Aggregator(adder, subtractor), name=name, **more)


@dataclass(frozen=True)
class GroupedStream(Generic[N]):
    """A stream grouped by a key, to aggregate with or without windows."""

    stream: Node
    key: tuple[str, ...]
    partitions: int | None = None
    partition_by: str | None = None

    def windowed_by(self, window: Window) -> WindowedStream[N]:
        """Groups the records of each key by tumbling, hopping, session or sliding windows."""
        return WindowedStream(self, window)

    def aggregate(
        self,
        aggregates: Mapping[str, str],
        *,
        name: str,
        materialized: Materialized | None = None,
        emit: Emit = "every_update",
        **shown: Any,
    ) -> N:
        """Makes a table with one row per key; see ``StreamAggregate``.

        Args:
            aggregates: ``{"orders": "count(*)", "amount": "sum(amount)"}``: count, sum, min, max and
                avg over SQL expressions.
        """
        return StreamAggregate(
            self.stream,
            name,
            materialized,
            aggregates=_pairs(aggregates),
            group_key=self.key,
            emit=emit,
            partitions=self.partitions,
            partition_by=self.partition_by,
        ).result(**shown)

    def count(self, *, name: str, column: str = "count", **more: Any) -> N:
        """Counts the records of each key."""
        return self.aggregate({column: "count(*)"}, name=name, **more)


@dataclass(frozen=True)
class WindowedStream(Generic[N]):
    """A stream grouped by key and window; see ``WindowedAggregate``."""

    grouped: GroupedStream[N]
    window: Window

    def aggregate(
        self, aggregates: Mapping[str, str], *, name: str, emit: Emit = "every_update", **shown: Any
    ) -> N:
        """Makes a table with one row per key and window.

        Args:
            aggregates: ``{"departures": "count(*)", "mean_delay": "avg(dep_delay)"}``: count, sum,
                min, max and avg over SQL expressions.
        """
        grouped = self.grouped
        return WindowedAggregate(
            grouped.stream,
            name,
            window=self.window,
            aggregates=_pairs(aggregates),
            group_key=grouped.key,
            emit=emit,
            partitions=grouped.partitions,
            partition_by=grouped.partition_by,
        ).result(**shown)

    def count(self, *, name: str, column: str = "count", **more: Any) -> N:
        """Counts the records of each key and window."""
        return self.aggregate({column: "count(*)"}, name=name, **more)


# Stream joins


S = TypeVar("S")
"""``Stream``."""
T = TypeVar("T")
"""``Table``."""


class _Settings:
    """Settings that only some kinds of joins have, with the defaults that all others have."""

    def given(self) -> str:
        """The names of the settings that are set, for messages."""
        unset = type(self)()
        return " and ".join(n for n, value in vars(self).items() if value != getattr(unset, n))


@dataclass(frozen=True)
class _Window(_Settings):
    """The time settings of a stream-stream join."""

    within: Duration | None = None
    before: Duration | None = None
    after: Duration | None = None
    grace: Duration | None = None

    def ends(self, name: str) -> tuple[Duration, Duration, Duration]:
        """Returns before, after and grace."""
        if self.within is None and self.before is None and self.after is None:
            raise TopologyError(
                f"{name}: a join of two streams needs a time window, got none: set "
                "within=timedelta(hours=1), or before and after"
            )
        nothing = timedelta(0) if self.within is None else self.within
        before = nothing if self.before is None else self.before
        after = nothing if self.after is None else self.after
        return before, after, timedelta(0) if self.grace is None else self.grace

    def refuse_beside_table(self, name: str, table: Node) -> None:
        """Raises TopologyError if one of these settings is set for a join with a table."""
        if given := self.given():
            raise TopologyError(
                f"{name}: {given} is only for a join of two streams, but {table.name!r} "
                f"is a {type(table).__name__}: remove it, or use grace_period to wait for table records"
            )


@dataclass(frozen=True)
class _Promise(_Settings):
    """The settings of a corrected join."""

    corrected_for: Duration | None = None
    key: str | Sequence[str] = ()

    @property
    def names(self) -> tuple[str, ...]:
        return listed(self.key)

    def refuse(self, name: str, where: str) -> None:
        """Raises TopologyError if one of these settings is set for another kind of join."""
        if given := self.given():
            raise TopologyError(
                f"{name}: {given} is only for a corrected join with a versioned table, "
                f"not for {where}: remove it, or set corrected_for=timedelta(days=7)"
            )


@dataclass(frozen=True)
class _Match(_Settings):
    """The settings by which a stream-table join chooses versions."""

    as_known: AsKnown = "now"
    max_age: timedelta | None = None
    at: At = "at_or_before"
    before_first: BeforeFirst = None

    def refuse(self, name: str, where: str) -> None:
        """Raises TopologyError if one of these settings is set for another kind of join."""
        if given := self.given():
            raise TopologyError(
                f"{name}: {given} is only for a join of a stream with a versioned table, "
                f"not for {where}: remove it"
            )


class _Shown(TypedDict, total=False):
    description: str | None
    group: str | None
    owners: Sequence[str]
    key_prefix: str | Sequence[str]
    freshness: Freshness
    log_retention: timedelta | None


class LookupSettings(_Shown, total=False):
    """Settings of a join with a table, see :meth:`StreamJoins.join`."""

    select: Sequence[str]
    grace_period: Duration | None
    max_age: timedelta | None
    at: At


class WindowSettings(_Shown, total=False):
    """Settings of a join with a stream, see :meth:`StreamJoins.join`."""

    select: Sequence[str]
    within: Duration | None
    before: Duration | None
    after: Duration | None
    grace: Duration | None


class StreamJoins(Generic[S, T]):
    """The joins of a stream."""

    name: str

    @overload
    def join(
        self,
        other: T,
        *,
        name: str,
        as_known: AsKnown = "now",
        before_first: BeforeFirst = None,
        **more: Unpack[LookupSettings],
    ) -> S: ...

    @overload
    def join(
        self,
        other: T,
        *,
        name: str,
        corrected_for: timedelta,
        key: str | Sequence[str] = (),
        **more: Unpack[LookupSettings],
    ) -> T: ...

    @overload
    def join(self, other: S, *, name: str, **more: Unpack[WindowSettings]) -> S: ...

    def join(
        self,
        other: S,
        *,
        name: str,
        select: Sequence[str] = ("left.*", "right.*"),
        grace_period: Duration | None = None,
        corrected_for: Duration | None = None,
        key: str | Sequence[str] = (),
        as_known: AsKnown = "now",
        max_age: timedelta | None = None,
        at: At = "at_or_before",
        before_first: BeforeFirst = None,
        within: Duration | None = None,
        before: Duration | None = None,
        after: Duration | None = None,
        grace: Duration | None = None,
        **shown: Any,
    ) -> S | T:
        """Inner join with a table as of each record's timestamp, see ``StreamTableJoin``; or with a
        stream within a time window, see ``StreamStreamJoin``. With ``corrected_for`` late matches
        correct the result, which is a table: see ``CorrectedJoin`` and ``CorrectedStreamJoin``.

        Args:
            grace_period: join with a table: how long a record waits for table records.
            corrected_for: join with a versioned table: how long late table records correct the result;
                left or outer join with a stream: how late a match may be and still retract the
                unmatched row.
            key: corrected join with a table: columns that identify a record; none: its partition and
                offset.
            as_known: join with a versioned table: which versions can match: now, when_recorded, or a
                duration: those recorded no later than that after the record's timestamp.
            max_age: join with a versioned table: how long before the record a version may start
                (inclusive); with at_or_after, after and nearest also how long after it.
            at: join with a versioned table: match the latest version that starts at_or_before or before
                the record's timestamp, the first that starts at_or_after or after it, or the nearest.
                The last three need max_age, and a grace_period or corrected_for at least as long.
            before_first: join with a versioned table: first_version: a record from before all versions
                of its key matches the first of them; default: it matches nothing.
            within: join with a stream: how far before and after a record its matches may lie.
            before, after: join with a stream: as ``within``, for one direction; may be negative.
                Default: ``within``, else 0.
            grace: join with a stream: how late a record may be and still find every match; default 0.
            shown: description, group, owners and key_prefix of the result.
        """
        about = _Window(within, before, after, grace)
        match = _Match(as_known, max_age, at, before_first)
        more = about, _Promise(corrected_for, key), match
        made = self._joined("inner", other, name, listed(select), grace_period, *more)
        return made.result(**shown)

    @overload
    def left_join(
        self,
        other: T,
        *,
        name: str,
        as_known: AsKnown = "now",
        before_first: BeforeFirst = None,
        **more: Unpack[LookupSettings],
    ) -> S: ...

    @overload
    def left_join(
        self,
        other: T,
        *,
        name: str,
        corrected_for: timedelta,
        key: str | Sequence[str] = (),
        **more: Unpack[LookupSettings],
    ) -> T: ...

    @overload
    def left_join(self, other: S, *, name: str, **more: Unpack[WindowSettings]) -> S: ...

    @overload
    def left_join(
        self, other: S, *, name: str, corrected_for: Duration, **more: Unpack[WindowSettings]
    ) -> T: ...

    def left_join(
        self,
        other: S,
        *,
        name: str,
        select: Sequence[str] = ("left.*", "right.*"),
        grace_period: Duration | None = None,
        corrected_for: Duration | None = None,
        key: str | Sequence[str] = (),
        as_known: AsKnown = "now",
        max_age: timedelta | None = None,
        at: At = "at_or_before",
        before_first: BeforeFirst = None,
        within: Duration | None = None,
        before: Duration | None = None,
        after: Duration | None = None,
        grace: Duration | None = None,
        **shown: Any,
    ) -> S | T:
        """Left join with a table or a stream; see :meth:`join`."""
        about = _Window(within, before, after, grace)
        match = _Match(as_known, max_age, at, before_first)
        more = about, _Promise(corrected_for, key), match
        made = self._joined("left", other, name, listed(select), grace_period, *more)
        return made.result(**shown)

    @overload
    def outer_join(self, other: S, *, name: str, **more: Unpack[WindowSettings]) -> S: ...

    @overload
    def outer_join(
        self, other: S, *, name: str, corrected_for: Duration, **more: Unpack[WindowSettings]
    ) -> T: ...

    def outer_join(
        self,
        other: S,
        *,
        name: str,
        select: Sequence[str] = ("left.*", "right.*"),
        within: Duration | None = None,
        before: Duration | None = None,
        after: Duration | None = None,
        grace: Duration | None = None,
        corrected_for: Duration | None = None,
        **shown: Any,
    ) -> S | T:
        """Outer join with a stream; see :meth:`join`."""
        about, promise = _Window(within, before, after, grace), _Promise(corrected_for)
        made = self._joined("outer", other, name, listed(select), None, about, promise)
        return made.result(**shown)

    def _joined(
        self,
        kind: JoinKind,
        other: Any,
        name: str,
        select: tuple[str, ...],
        grace_period: Duration | None,
        about: _Window,
        promise: _Promise = _Promise(),
        match: _Match = _Match(),
    ) -> StreamTableJoin | StreamStreamJoin:
        if not isinstance(other, Node):
            raise TopologyError(
                f"{name}: expected a stream or a table to join {self.name!r} with, got {other!r}"
            )
        if other.is_table:
            about.refuse_beside_table(name, other)
            if promise.corrected_for is not None:
                if match.at in get_args(AtOrBefore):
                    match.refuse(name, "a corrected join that looks back, which follows all versions")
                correction = {
                    **vars(match),
                    "corrected_for": promise.corrected_for,
                    "key": promise.names,
                }
                return CorrectedJoin(self, other, kind, name, select, grace_period, **correction)
            promise.refuse(name, "a join without corrected_for")
            return StreamTableJoin(self, other, kind, name, select, grace_period, **vars(match))
        match.refuse(name, f"a join with {other.name!r}, a stream")
        if grace_period is not None:
            raise TopologyError(
                f"{name}: grace_period is only for joins with a table, but {other.name!r} is a stream: "
                "remove it, and set grace, the allowed lateness of both streams"
            )
        if promise.corrected_for is None:
            promise.refuse(name, f"a join with {other.name!r}, a stream")
            return StreamStreamJoin(self, other, kind, name, select, *about.ends(name))
        if promise.names:
            raise TopologyError(
                f"{name}: key= is only for joins with a table, but {other.name!r} is a stream; "
                "stream-stream rows are keyed by the positions of both records: remove key="
            )
        return CorrectedStreamJoin(
            self, other, kind, name, select, *about.ends(name), promise.corrected_for
        )


# Model


History: TypeAlias = Literal["latest", "complete"]
"""Which rows of two tables are joined: the latest, or all versions, see ``HistoryJoin``."""

Ready: TypeAlias = Literal["initial_load"] | datetime | None
"""When joins may start to read a table, see ``VersionedTable``."""


@dataclass(frozen=True)
class Stream(StreamJoins["Stream", "Table"], Node, kind="stream"):
    """Records with a key and a timestamp, in order of arrival.

    Args:
        name: the asset's name: letters, digits, underscores.
        key: key column, or several for a composite key (stored as a tuple). A record with a null in
            any of them has no key.
        schema: all columns of a record, key included: a pandera model for PySpark, whose checks run
            before each commit, or a StructType (stored as a StructType). A value may have any type
            of the Delta protocol but VARIANT, so no interval, TIME, VOID or text with a collation;
            CHAR and VARCHAR are stored as STRING. A key must not contain a map.
        timestamp: column, or SQL expression over the columns, with the record's event time (TIMESTAMP,
            UTC). The log stores it as ``timestamp``.
        tombstone: SQL condition for records whose *value is null*: a deletion in a table; in a stream,
            a record that joins drop. Null counts as false. None: no tombstones; null columns alone
            never make one. With files, topics and Delta tables it may use columns that are not in the
            schema; they are read as text, for this condition only. It is checked when a run starts.
        partitions: number of partitions of the log of a files source; a record's partition is the
            hash of its key modulo this number. Stream time is tracked per partition, so this setting
            affects results as well as speed.
        partition_by: SQL expression over the key columns that gives the partition, instead of the
            hash of the key.
        source: where the records come from; None for the result of an operator.
        null_key: handling of source records without a key: ``quarantine`` (default), or ``keep``, so
            that a left join can emit them unmatched.
        renamed: ``{"before": "now"}``: columns that had another name before. Old rows have their values
            under the new name, here and downstream, and so do files and messages that still use the old
            name. The rename is stored with the rows: remove it once everything downstream has run.
        description, group, owners: shown in Dagster.
        key_prefix: parts of the Dagster key before the name, and the folders of the asset's tables:
            ``"shop/eu"`` or ``["shop", "eu"]``. Names must be unique across prefixes.
        log_retention: maintenance (``build_maintenance``) truncates batches of the log that were
            recorded longer ago than this (``recorded_at``, system time, not stream time), once every
            consumer has read them and none may need them again. Reads as known after that time still
            work; earlier reads, and consumers that start at the beginning, fail with an error that
            names the limit. None (default): the log is never truncated.
        unique_by: column, or several, that identify a record, for producers that may send it twice:
            the first record of each value enters the log, in the order of its partition. Later ones are
            duplicates: counted, and in quarantine (``duplicate``). Null in any of the columns: the
            record is never a duplicate. Only for a stream with a source, and with ``within``.
        within: how long a value of ``unique_by`` is remembered, in stream time of its partition: until
            stream time is more than this ahead of the latest record with the value, duplicates
            included. A record with ``timestamp < stream time - within`` cannot be compared any more:
            unless its value is remembered, it is refused, counted and in quarantine (``late``).
        on_contract_break: handling of source records that break a check of the pandera model: ``fail``
            (default), the run fails before its commit; or ``quarantine``, a record that breaks a
            row-wise check goes to quarantine with the names of its checks, within the source's
            ``max_bad_share``. A check is row-wise if it passes exactly when a filter finds no row; a
            column that is not nullable is such a check. Others, like a sum over all rows, still fail
            the run, and so do rows of a snapshot that a table starts with. Tombstones break no check of
            values. A quarantined record does not advance stream time. Not for results of operators.
    """

    def __hash__(self) -> int:
        # Names are unique, and other fields need not be hashable (a mapping of durations, for example).
        return hash(self.name)

    def to_table(self, *, name: str, materialized: Materialized | None = None, **shown: Any) -> Table:
        """Reads the stream as the changelog of a table; see ``ToTable``."""
        return ToTable(self, name, materialized).result(**shown)

    def merge(self, *others: Stream, name: str, **shown: Any) -> Stream:
        """Combines this and other streams into one; see ``Merge``."""
        return Merge((self, *others), name).result(**shown)

    def select_key(
        self,
        *key: str,
        name: str,
        partitions: int | None = None,
        partition_by: str | None = None,
        **shown: Any,
    ) -> Stream:
        """Gives the records a new key; see ``SelectKey``.

        Args:
            key: ``column`` or ``expression as name``.
            partitions, partition_by: partitioning of the result, as for a source.
        """
        made = SelectKey(self, name, group_key=key, partitions=partitions, partition_by=partition_by)
        return made.result(**shown)

    def flat_map_values(
        self, expression: str, *, column: str, name: str, keep: Sequence[str] = (), **shown: Any
    ) -> Stream:
        """Emits one record per element of an array; see ``FlatMapValues``.

        Args:
            expression: SQL over the columns that returns an array, for example ``split(words, ' ')``.
            column: name of the value column for the elements.
            keep: further columns of the stream to keep.
        """
        made = FlatMapValues(self, name, expression=expression, column=column, keep=listed(keep))
        return made.result(**shown)

    def group_by(
        self, *key: str, partitions: int | None = None, partition_by: str | None = None
    ) -> GroupedStream[Table]:
        """Groups the records by a key; see ``StreamAggregate`` and ``WindowedAggregate``.

        Args:
            key: ``column`` or ``expression as name``; none: the stream's key.
            partitions, partition_by: partitioning of the result, as for a source.
        """
        return GroupedStream(self, key, partitions, partition_by)

    @property
    def inputs(self) -> tuple[Stream, ...]:
        """The inputs of its operator; empty for a source."""
        return cast("tuple[Stream, ...]", super().inputs)


@dataclass(frozen=True)
class Table(Stream, kind="table"):
    """A changelog in which the last record per key, by arrival, is the current row.

    A record replaces an earlier arrival whatever their timestamps, as in Kafka Streams' plain stores.
    Joins with a stream read the table as it is when the run starts. Records without a key are
    quarantined.

    Args:
        freshness: how far the view, which other engines read, may lag behind the log; reads through
            this library always see all commits. ``on_growth`` (default): each run writes the view while
            it has at most 100,000 rows; then a run writes it once the commits since the last write
            amount to a fifth of its rows, a million records, or 64 runs. ``every_run``: each run writes
            it, at a cost that grows with the table. A timedelta: the first run that finds the view
            this old writes it.
        broadcast: a small table that Spark broadcasts to every executor in joins with streams (Kafka's
            global table). A versioned table cannot be broadcast.
        deleted_when: alias of ``tombstone`` in the terms of change feeds: ``"op = 'D'"``. Set only one
            of the two; it is stored as ``tombstone``.
        deleted_at: SQL expression of type timestamp for the time of a deletion; null: as without this
            setting. It may use the columns that ``tombstone`` may use, and for dumps, Delta tables and
            topics ``record_time``: see ``docs/guides/change-feeds.md``. Only for a table with a source.
    """

    broadcast: bool = field(default=False, kw_only=True)
    deleted_when: str | None = field(default=None, kw_only=True)
    deleted_at: str | None = field(default=None, kw_only=True)

    __hash__ = Stream.__hash__

    @property
    def is_table(self) -> bool:
        """Always true."""
        return True

    def join(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        table: Table,
        *,
        name: str,
        select: Sequence[str] = ("left.*", "right.*"),
        grace_period: Duration | None = None,
        foreign_key: str | Sequence[str] | None = None,
        materialized: Materialized | None = None,
        monotone_timestamps: bool | None = None,
        emit: Emit = "every_update",
        history: History = "latest",
        **shown: Any,
    ) -> Table:
        """Inner join with another table, by the common key or a foreign key.

        See ``TableTableJoin`` and ``ForeignKeyJoin``; for ``history="complete"`` (two versioned tables,
        common key) ``HistoryJoin``. ``grace_period`` is only for streams and is refused.
        """
        how = listed(select), materialized, monotone_timestamps, emit
        return self._join("inner", table, name, shown, how, history, grace_period, foreign_key)

    def left_join(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        table: Table,
        *,
        name: str,
        select: Sequence[str] = ("left.*", "right.*"),
        grace_period: Duration | None = None,
        foreign_key: str | Sequence[str] | None = None,
        materialized: Materialized | None = None,
        monotone_timestamps: bool | None = None,
        emit: Emit = "every_update",
        history: History = "latest",
        **shown: Any,
    ) -> Table:
        """Left join with another table; see :meth:`join`."""
        how = listed(select), materialized, monotone_timestamps, emit
        return self._join("left", table, name, shown, how, history, grace_period, foreign_key)

    def outer_join(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        table: Table,
        *,
        name: str,
        select: Sequence[str] = ("left.*", "right.*"),
        materialized: Materialized | None = None,
        monotone_timestamps: bool | None = None,
        emit: Emit = "every_update",
        history: History = "latest",
        **shown: Any,
    ) -> Table:
        """Outer join with another table by the common key; see ``TableTableJoin``."""
        how = listed(select), materialized, monotone_timestamps, emit
        return self._join("outer", table, name, shown, how, history)

    def _join(
        self,
        kind: Literal["inner", "left", "outer"],
        table: Table,
        name: str,
        shown: dict[str, Any],
        how: tuple[tuple[str, ...], Materialized | None, bool | None, Emit],
        history: History,
        grace_period: Duration | None = None,
        foreign_key: str | Sequence[str] | None = None,
    ) -> Table:
        other: Any = table
        if not isinstance(other, Node):
            raise TopologyError(f"{name}: expected a table to join {self.name!r} with, got {other!r}")
        both = f"the tables {self.name!r} and {table.name!r}"
        _check_table_join(name, both, history, grace_period, foreign_key, "corrected_for" in shown)
        if foreign_key is None:
            operator = TableTableJoin if history == "latest" else HistoryJoin
            return operator(self, table, kind, name, *how).result(**shown)
        keys = listed(foreign_key)
        return ForeignKeyJoin(self, table, kind, name, *how, foreign_key=keys).result(**shown)

    def filter(
        self, predicate: str, *, name: str, materialized: Materialized | None = None, **shown: Any
    ) -> Table:
        """The rows for which a SQL condition holds; see ``Filter``."""
        return Filter(self, name, materialized, predicate=predicate).result(**shown)

    def filter_not(
        self, predicate: str, *, name: str, materialized: Materialized | None = None, **shown: Any
    ) -> Table:
        """The rows for which a SQL condition does not hold (null counts as false); see ``Filter``."""
        return Filter(self, name, materialized, predicate=predicate, negate=True).result(**shown)

    def map_values(
        self, *select: str, name: str, materialized: Materialized | None = None, **shown: Any
    ) -> Table:
        """Replaces the value columns and keeps the key; see ``MapValues``."""
        return MapValues(self, name, materialized, select=select).result(**shown)

    def group_by(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, *key: str, partitions: int | None = None, partition_by: str | None = None
    ) -> GroupedTable[Table]:
        """Groups the rows by another key; see ``TableAggregate``.

        Args:
            key: ``column`` or ``expression as name``.
            partitions, partition_by: partitioning of the result, as for a source.
        """
        return GroupedTable(self, key, partitions, partition_by)

    def suppress(self, until: UntilTimeLimit | UntilWindowCloses, *, name: str, **shown: Any) -> Table:
        """Buffers updates and emits fewer of them; see ``Suppress``."""
        return Suppress(self, name, until=until).result(**shown)

    def to_table(self, *, name: str, materialized: Materialized | None = None, **shown: Any) -> Table:
        """Raises TopologyError, because a table is no stream. Use ``to_stream(name=...)`` first."""
        return ToTable(self, name, materialized).result(**shown)

    def to_stream(self, *, name: str, **shown: Any) -> Stream:
        """Converts the table's changelog into a stream; see ``ToStream``."""
        return ToStream(self, name).result(**shown)


def _check_table_join(
    name: str, both: str, history: object, grace_period: object, foreign_key: object, corrected: bool
) -> None:
    """Raises TopologyError for settings that a join of two tables does not have.

    Args:
        both: the two tables, for messages.
        corrected: whether ``corrected_for`` is given.
    """
    if grace_period is not None:
        raise TopologyError(
            f"{name}: a grace period is only for a join of a stream with a table, but a join of {both} "
            "is updated at each change: remove grace_period"
        )
    if corrected:
        raise TopologyError(
            f"{name}: corrected_for is only for a join of a stream; a join of {both} already follows "
            "every change of both: remove corrected_for"
        )
    if history not in ("latest", "complete"):
        raise TopologyError(f"{name}: history must be 'latest' or 'complete', got {history!r}")
    if history == "complete" and foreign_key is not None:
        raise TopologyError(
            f"{name}: history='complete' is for a join by the common key, got the foreign key "
            f"{foreign_key!r}; remove one of the two"
        )


@dataclass(frozen=True)
class VersionedTable(Table, kind="versioned_table"):
    """A table that keeps the versions of each key over time (KIP-889).

    Args:
        history_retention: how far back the table can be read, and how late a record may be, in stream
            time: a record with ``timestamp < stream time - history_retention`` is refused and counted;
            a record exactly that old is accepted.
        segment_interval: width of a segment of stored history, as in Kafka. It never changes a result.
        ready: when joins may start to read the table; until then they and everything downstream read
            nothing, so that no record is joined with a partly loaded table. ``initial_load``: once all
            records that its first run saw in the source are loaded. A time (with a time zone): once
            stream time reaches it (inclusive) in each partition that has records. None: at once, as in
            Kafka Streams. Only for a table with a source.
        tie_break: value column that decides between records with the same key and timestamp: the
            largest value wins, whatever the order of arrival; the others are refused and counted as
            ``lost_tie``. Null is smaller than any value; among equal values the last arrival wins. Text
            compares by characters: use a number column. None: the last arrival wins, as in Kafka
            Streams. With partial updates it decides for each column. Another ``tie_break`` applies
            to later arrivals only. Only for a table with a source.
        valid_until: value column (TIMESTAMP) with the latest end of a version, exclusive; null: the
            version ends with the next one. It creates no tombstone: a version that starts before this
            end and arrived later has its own end. A lookup after the end finds nothing.
        start: snapshot with the initial rows, ``SnapshotSource`` or ``DeltaSource(mode="snapshots")``,
            in addition to the changes of ``source``: see ``docs/guides/start.md``. A row is valid from
            its ``timestamp``, or from the snapshot's time if that is null or not a column. It is
            skipped if the changes have a record of its key at that time or before (``covered``).
        new_version_on: value columns; a record makes a new version only if one of them differs from
            the previous version in time (null equals null). A version has the values and the
            ``valid_from`` of its first record; records that repeat it change nothing, unless a late
            record falls between them. None: every record makes a version, as in Kafka Streams.
        only_columns: value columns that a record provides (partial update); all others keep their
            values as of the record's time, whatever the record contains. A list of columns; or a SQL
            expression over the columns of the source, as in ``tombstone``, that returns an
            ARRAY<STRING> of names (or text: a JSON array or comma-separated names), null: all. None:
            all. Values of a late record carry over into later versions, up to one whose record provides
            that column; a deletion provides all. ``timestamp``, ``valid_until`` and the column of
            ``tie_break`` are always provided.
        ignore_null_updates: whether a null means "not provided", as in ``only_columns``: in all value
            columns (True; but not in that of ``tie_break``), or in a list of them.
    """

    history_retention: Duration = field(kw_only=True)
    segment_interval: timedelta | None = field(default=None, kw_only=True)
    ready: Ready = field(default=None, kw_only=True)
    tie_break: str | None = field(default=None, kw_only=True)
    valid_until: str | None = field(default=None, kw_only=True)
    start: Source | None = field(default=None, kw_only=True)
    new_version_on: Sequence[str] | None = field(default=None, kw_only=True)
    only_columns: str | Sequence[str] | None = field(default=None, kw_only=True)
    ignore_null_updates: bool | Sequence[str] = field(default=False, kw_only=True)

    __hash__ = Stream.__hash__

    @property
    def version_rules(self) -> VersionRules:
        """The rules of its versions."""
        names = [f.name for f in fields(VersionRules)]
        return VersionRules(**{name: getattr(self, name) for name in names})

    @property
    def retention(self) -> Duration:
        """Its history retention."""
        return self.history_retention

    @property
    def has_partial_updates(self) -> bool:
        """Whether a record may provide only some value columns."""
        return self.only_columns is not None or bool(self.ignore_null_updates)


# Options as arguments


class StreamOptions(TypedDict, total=False):
    """The options of a stream without a source, as arguments: see :class:`Stream`."""

    key: Required[str | Sequence[str]]
    schema: Required[Any]
    timestamp: str
    tombstone: str | None
    partitions: int
    partition_by: str | None
    null_key: Literal["quarantine", "keep"]
    renamed: Mapping[str, str]
    description: str | None
    group: str | None
    owners: Sequence[str]
    key_prefix: str | Sequence[str]
    log_retention: timedelta | None
    unique_by: str | Sequence[str] | None
    within: timedelta | None
    on_contract_break: Literal["fail", "quarantine"]


class _TableOptions(StreamOptions, total=False):
    freshness: Freshness
    deleted_when: str | None
    deleted_at: str | None


class TableOptions(_TableOptions, total=False):
    """The options of a table without a source, as arguments: see :class:`Table`."""

    broadcast: bool


class VersionedTableOptions(_TableOptions, total=False):
    """The options of a versioned table without a source, as arguments: see :class:`VersionedTable`."""

    history_retention: Required[Duration]
    segment_interval: timedelta | None
    ready: Ready
    tie_break: str | None
    valid_until: str | None
    new_version_on: Sequence[str] | None
    only_columns: str | Sequence[str] | None
    ignore_null_updates: bool | Sequence[str]


__all__ = [
    "Duration",
    "Source",
    "Stream",
    "StreamOptions",
    "Table",
    "TableOptions",
    "VersionedTable",
    "VersionedTableOptions",
    "derived_from",
    "replace",
    "topological",
]


# Node settings


_SHOWN = ("description", "group", "owners", "key_prefix")
_FIXED = frozenset(
    {"name", "schema", "operator", "contract", "inputs", "left", "right", "source", "sources"}
)


def with_settings(node: Stream, settings: Mapping[str, str]) -> Stream:
    """Returns a copy of a stream or table with changed settings of its own or of its operator.

    Args:
        settings: values by name, or by path for nested settings, ``window.grace``. Values are texts:
            durations like ``2h``, JSON, or plain text.

    Raises:
        TopologyError: an unknown setting, or an invalid value.
    """
    own = {n: t for n, t in settings.items() if node.operator is None and n in settable(node)}
    # Together: one option may need another.
    node = replace(node, **{n: _value(getattr(node, n), t) for n, t in own.items()})
    for name, text in settings.items():
        if name in own:
            continue
        first = name.partition(".")[0]
        operator: Any = node.operator
        if operator is not None and first in settable(operator):
            shown: dict[str, Any] = {one: getattr(node, one) for one in _SHOWN}
            if isinstance(node, Table):
                shown["freshness"] = node.freshness
            node = _set(node.name, operator, name, text).result(**shown)
        elif operator is None and first in settable(node):
            node = _set(node.name, node, name, text)
        else:
            raise _unknown(node.name, node if operator is None else operator, name)
    return node


def settable(owner: Any) -> list[str]:
    """Returns the names of the settings of an operator or a source asset."""
    return sorted(f.name for f in fields(owner) if f.name not in _FIXED)


def _unknown(asset: str, owner: Any, name: str) -> TopologyError:
    return TopologyError(f"{asset}: expected one of the settings {settable(owner)}, got {name!r}")


def _set(asset: str, owner: Any, name: str, text: str) -> Any:
    first, _, rest = name.partition(".")
    if first not in settable(owner):
        raise _unknown(asset, owner, first)
    value = getattr(owner, first)
    if rest:
        if not is_dataclass(value):
            raise TopologyError(
                f"{asset}: expected the name of one setting, got {name!r}: the value of {first}, "
                f"{value!r}, has no settings; correct it"
            )
        return replace(owner, **{first: _set(asset, value, rest, text)})
    return replace(owner, **{first: _value(value, text)})


def _value(now: Any, text: str) -> Any:
    """Parses a text as the type of the current value; without one, by its form."""
    if isinstance(now, str):
        return text
    if now is None or isinstance(now, timedelta):
        try:
            return parse_length(text)
        except ContractError:
            if now is not None:
                raise
    try:
        found = json.loads(text)
    except ValueError:
        return text
    return tuple(found) if isinstance(found, list) else found  # pyright: ignore
