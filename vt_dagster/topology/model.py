"""Streams and tables as typed values.

A topology consists of :class:`Stream`, :class:`Table` and :class:`VersionedTable` values. Each is
checked on construction: whatever Kafka Streams refuses when it builds a topology raises
:class:`TopologyError` when definitions load, before any run. Nothing in this module starts Spark.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import Any, Literal, TypeAlias, cast

from vt_dagster.errors import TopologyError
from vt_dagster.topology.durations import Duration, check_duration
from vt_dagster.topology.grouping import GroupedStream, GroupedTable
from vt_dagster.topology.node import Node, Source, topological
from vt_dagster.topology.operators import (
    Emit,
    Filter,
    FlatMapValues,
    ForeignKeyJoin,
    HistoryJoin,
    MapValues,
    Materialized,
    Merge,
    SelectKey,
    Suppress,
    TableTableJoin,
    ToStream,
    ToTable,
    UntilTimeLimit,
    UntilWindowCloses,
)
from vt_dagster.topology.stream_joins import StreamJoins
from vt_dagster.topology.table_options import (
    check_deletions,
    check_join,
    check_versions,
    has_partial_updates,
)

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
            before each commit, or a StructType (stored as a StructType). A value may have any Spark
            type; a key must not contain a map.
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
        made = FlatMapValues(self, name, expression=expression, column=column, keep=tuple(keep))
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

    def __post_init__(self) -> None:
        check_deletions(self)
        super().__post_init__()
        if self.null_key != "quarantine":
            raise TopologyError(
                f"{self.name}: a table cannot keep records without a key; leave null_key out"
            )

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
        about = {"select": tuple(select), "materialized": materialized, "emit": emit}
        about |= {"monotone_timestamps": monotone_timestamps}
        return self._join("inner", table, name, shown, about, history, grace_period, foreign_key)

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
        about = {"select": tuple(select), "materialized": materialized, "emit": emit}
        about |= {"monotone_timestamps": monotone_timestamps}
        return self._join("left", table, name, shown, about, history, grace_period, foreign_key)

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
        about = {"select": tuple(select), "materialized": materialized, "emit": emit}
        about |= {"monotone_timestamps": monotone_timestamps}
        return self._join("outer", table, name, shown, about, history)

    def _join(
        self,
        kind: Literal["inner", "left", "outer"],
        table: Table,
        name: str,
        shown: dict[str, Any],
        about: dict[str, Any],
        history: History,
        grace_period: Duration | None = None,
        foreign_key: str | Sequence[str] | None = None,
    ) -> Table:
        both = f"the tables {self.name!r} and {table.name!r}"
        check_join(name, both, history, grace_period, foreign_key, "corrected_for" in shown)
        if foreign_key is None:
            operator = TableTableJoin if history == "latest" else HistoryJoin
            return operator(self, table, kind, name, **about).result(**shown)
        keys = (foreign_key,) if isinstance(foreign_key, str) else tuple(foreign_key)
        return ForeignKeyJoin(self, table, kind, name, foreign_key=keys, **about).result(**shown)

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
        self,
        *select: str,
        name: str,
        materialized: Materialized | None = None,
        **shown: Any,
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
        """Raises TopologyError: it is already a table. Use ``to_stream(name=...)`` first."""
        return ToTable(self, name, materialized).result(**shown)

    def to_stream(self, *, name: str, **shown: Any) -> Stream:
        """Converts the table's changelog into a stream; see ``ToStream``."""
        return ToStream(self, name).result(**shown)


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
            Streams. A change applies to later arrivals only. Only for a table with a source.
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
            that column; a deletion provides all. ``timestamp`` and ``valid_until`` are always provided.
        ignore_null_updates: whether a null means "not provided", as in ``only_columns``: in all value
            columns (True), or in a list of them.
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

    def __post_init__(self) -> None:
        super().__post_init__()
        check_duration(self.name, "history_retention", self.history_retention)
        if self.broadcast:
            raise TopologyError(
                f"{self.name}: a versioned table cannot be broadcast, since its history need not fit "
                "into an executor's memory; leave broadcast out, or declare it as a plain Table"
            )
        if self.segment_interval is not None and self.segment_interval <= timedelta(0):
            raise TopologyError(
                f"{self.name}: segment_interval must be longer than 0, got {self.segment_interval}; "
                "leave it out for the default"
            )
        check_versions(self)

    @property
    def retention(self) -> Duration:
        """Its history retention."""
        return self.history_retention

    @property
    def has_partial_updates(self) -> bool:
        """Whether a record may provide only some value columns."""
        return has_partial_updates(self)


__all__ = [
    "Duration",
    "Source",
    "Stream",
    "Table",
    "VersionedTable",
    "replace",
    "topological",
]
