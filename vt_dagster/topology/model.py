"""Tables and streams as typed values, and the rules that hold between them.

A topology is made of :class:`Stream`, :class:`Table` and :class:`VersionedTable` values. Making one
checks it: whatever Kafka Streams refuses when a topology is built raises :class:`TopologyError`
here, which is when definitions load, before any run. Nothing in this module starts Spark.
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
"""Which of their rows two tables are joined by, see ``HistoryJoin``."""

Ready: TypeAlias = Literal["initial_load"] | datetime | None
"""From when on joins look into a table, see ``VersionedTable``."""


@dataclass(frozen=True)
class Stream(StreamJoins["Stream", "Table"], Node, kind="stream"):
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
            table, in a stream a record that joins drop. Where it is null, it does not hold. None:
            there are none; a null column alone never makes a tombstone. Of files, topics and Delta
            tables it may name columns that are not in the schema: they are read as text, for it alone.
            It is checked when a run starts.
        partitions: number of partitions of the log of a files source; a record goes to the hash of
            its key modulo this number. Stream time is kept per partition, so it is a semantic
            setting, not only one of speed.
        partition_by: a SQL expression over the key columns that gives the partition, instead of the
            hash of the key.
        source: where the records come from; None for the result of an operator.
        null_key: what becomes of a source record without a key: ``quarantine`` (default), or
            ``keep`` so that a left join can emit it with nothing on the right.
        renamed: ``{"before": "now"}``: columns that had another name before. Rows of then have their
            values under the new name, here and in what is made of it, and so have files and messages
            that still come with the old one. It is noted with the rows: once all that is downstream
            has run, it may be left out.
        description, group, owners: shown in Dagster.
        key_prefix: what stands before the name in its key in Dagster, and the folders in which its
            tables are: ``"shop/eu"`` or ``["shop", "eu"]``. Names are unique whatever their prefix.
        log_retention: maintenance (``build_maintenance``) cuts off the batches of the log that were
            recorded longer ago than this (``recorded_at``, a clock's time, not stream time), as far as
            every consumer has taken them and none may read them again. What was known since then can
            still be asked for; before that, and to who begins at the start, the log answers by an error
            that names the limit. None (default): all is kept.
    """

    def __hash__(self) -> int:
        # What else they hold, a duration of each partition's own say, need not be hashable.
        return hash(self.name)

    def to_table(self, *, name: str, materialized: Materialized | None = None, **shown: Any) -> Table:
        """Its records as changes of a table; see ``ToTable``."""
        return ToTable(self, name, materialized).result(**shown)

    def merge(self, *others: Stream, name: str, **shown: Any) -> Stream:
        """Its records and those of other streams as one; see ``Merge``."""
        return Merge((self, *others), name).result(**shown)

    def select_key(
        self,
        *key: str,
        name: str,
        partitions: int | None = None,
        partition_by: str | None = None,
        **shown: Any,
    ) -> Stream:
        """Its records under another key; see ``SelectKey``.

        Args:
            key: ``column`` or ``expression as name``.
            partitions, partition_by: of the result, as of a source.
        """
        made = SelectKey(self, name, group_key=key, partitions=partitions, partition_by=partition_by)
        return made.result(**shown)

    def flat_map_values(
        self, expression: str, *, column: str, name: str, keep: Sequence[str] = (), **shown: Any
    ) -> Stream:
        """Each record as several, one for each element of an array; see ``FlatMapValues``.

        Args:
            expression: SQL over its columns that gives an array, for example ``split(words, ' ')``.
            column: the value column that takes an element.
            keep: columns that the result has besides key and element.
        """
        made = FlatMapValues(self, name, expression=expression, column=column, keep=tuple(keep))
        return made.result(**shown)

    def group_by(
        self, *key: str, partitions: int | None = None, partition_by: str | None = None
    ) -> GroupedStream[Table]:
        """Its records by another key, to be aggregated in windows; see ``WindowedAggregate``.

        Args:
            key: ``column`` or ``expression as name``; none: the stream's own key.
            partitions, partition_by: of the result, as of a source.
        """
        return GroupedStream(self, key, partitions, partition_by)

    @property
    def inputs(self) -> tuple[Stream, ...]:
        """The streams and tables that this one is made of; empty for a source."""
        return cast("tuple[Stream, ...]", super().inputs)


@dataclass(frozen=True)
class Table(Stream, kind="table"):
    """A stream of changes of which the latest record per key, by arrival, counts.

    A later record replaces an earlier one whatever their timestamps, as in Kafka Streams' plain
    stores. Joins with a stream use what the table holds when the run starts. Records without a key
    are quarantined.

    Args:
        freshness: how far the view, which other engines read, may be behind the log; whoever reads
            through this library gets what was committed, whatever it is. ``on_growth`` (default): it is
            written by each run as long as it has at most 100,000 rows, and then whenever what was
            committed since is a fifth of it, a million records, or of 64 runs. ``every_run``: by each
            run, which costs what the table holds. A timedelta: by the first run that finds it that old.
        broadcast: a small table that every executor holds a copy of in joins with streams (Kafka's
            global table). A versioned table cannot be one.
        deleted_when: the same as ``tombstone``, as change feeds say it: ``"op = 'D'"``. Give one of
            both; it is kept as ``tombstone``.
        deleted_at: a SQL expression of type timestamp that says when a deletion happened; null: as
            without it. It may name what ``tombstone`` may, and of dumps, Delta tables and topics
            ``record_time``: see ``docs/guides/change-feeds.md``. Of a table with a source.
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
        """It is one."""
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

        See ``TableTableJoin`` and ``ForeignKeyJoin``; with ``history="complete"``, of two versioned
        tables by their common key, ``HistoryJoin``. ``grace_period`` belongs to streams and is
        refused.
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
        """The same keys with other values; see ``MapValues``."""
        return MapValues(self, name, materialized, select=select).result(**shown)

    def group_by(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, *key: str, partitions: int | None = None, partition_by: str | None = None
    ) -> GroupedTable[Table]:
        """Its rows by another key, to be aggregated; see ``TableAggregate``.

        Args:
            key: ``column`` or ``expression as name``.
            partitions, partition_by: of the result, as of a source.
        """
        return GroupedTable(self, key, partitions, partition_by)

    def suppress(self, until: UntilTimeLimit | UntilWindowCloses, *, name: str, **shown: Any) -> Table:
        """Holds back updates; see ``Suppress``."""
        return Suppress(self, name, until=until).result(**shown)

    def to_table(self, *, name: str, materialized: Materialized | None = None, **shown: Any) -> Table:
        """Refused, for it is a table; ``to_stream(name=...)`` gives its changes, to make another of."""
        return ToTable(self, name, materialized).result(**shown)

    def to_stream(self, *, name: str, **shown: Any) -> Stream:
        """Its changes as records of a stream; see ``ToStream``."""
        return ToStream(self, name).result(**shown)


@dataclass(frozen=True)
class VersionedTable(Table, kind="versioned_table"):
    """A table that remembers what was true when (KIP-889).

    Args:
        history_retention: how far back the table answers, and how late a record may be: one with
            ``timestamp < stream time - history_retention`` is refused and counted; one exactly
            that old is accepted.
        segment_interval: Kafka's name for the width of a piece of stored history. It never changes
            a result.
        ready: from when on joins may look into it; until then they, and those with what is made of it,
            take nothing, so that no record is joined with the first part of a table that is still being
            loaded. ``initial_load``: once it has taken all that its first run found in the source. A
            time (with a time zone): once stream time has come to it, inclusive, in each partition that
            has records. None: at once, as in Kafka Streams. Of a table with a source.
        tie_break: a value column: of records with one key and timestamp that with its largest value
            counts, whatever the order of arrival; the others are refused and counted, ``lost_tie``.
            Null is smaller than any value; of equal values the last that arrives counts. Text is
            compared by its characters: give a number. None: the last that arrives counts, as in Kafka
            Streams. It holds for what arrives from then on. Of a table with a source.
        valid_until: a value column (TIMESTAMP) that says when a version ends at the latest: exclusive;
            null: with the next version. No tombstone is made of it: a version that begins before this
            end, and came later, has its own. Whoever looks after it finds nothing.
        start: a snapshot, ``SnapshotSource`` or ``DeltaSource(mode="snapshots")``, with which the table
            begins, beside the changes of its source: see ``docs/guides/start.md``. A row of it counts
            from its own ``timestamp`` on, or where that is null or no column from the snapshot's time,
            unless the changes tell its key something of that time or before (``covered``).
        new_version_on: value columns; a record makes a version only where one of them differs from
            the version before it in time (null equals null). A version has the values and the
            ``valid_from`` of its first record; records that repeat it change nothing, until a late
            one comes between. None: every record makes one, as in Kafka Streams.
        only_columns: the value columns that a record says; it leaves the others as they are at its
            time, whatever it has there. A list of columns; or a SQL expression over the columns of the
            source, as ``tombstone``, that gives an ARRAY<STRING> of names (or a text: a JSON array, or
            names with commas between), null: all. None: all. What a late record says also holds in the
            versions after it, up to one whose record says that column; a deletion says all. Not left
            out are ``timestamp`` and ``valid_until``: they are each record's own.
        ignore_null_updates: whether a null means "unchanged", in the same way: in all value columns
            (True), or in a list of them.
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
        """Whether a record may say a part of its row."""
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
