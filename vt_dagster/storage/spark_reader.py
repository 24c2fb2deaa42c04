"""Reads an asset's tables with Spark, as of the last commit of the log or of an earlier one.

Reading writes nothing. If a dead run has not updated the view and the quarantine table to its commit,
they are read as if it had. Existing tables are checked against the declaration.
"""

from __future__ import annotations

import gzip
import json
import posixpath
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import StructType
from typing_extensions import Self

from vt_dagster.columns import (
    IS_LATE,
    IS_LATEST,
    LOG_COLUMNS,
    OFFSET,
    OLD,
    PARTITION,
    RECORDED_AT,
    TIMESTAMP,
)
from vt_dagster.core import table_store as of_table
from vt_dagster.core import versioned_table
from vt_dagster.core.arrival_order import by_partition
from vt_dagster.core.log_columns import log_schema
from vt_dagster.core.stream_table_join import with_finality
from vt_dagster.errors import ConcurrentRunError, StorageError, counted
from vt_dagster.storage import commit_log, delta, parquet
from vt_dagster.storage.arrow_reader import exchanged, head_of, require_in_place
from vt_dagster.storage.commit_log import (
    Checkpoint,
    Commit,
    Offsets,
    choose,
    file_at_or_after,
    file_between,
    require_within_retention,
)
from vt_dagster.storage.delta import address
from vt_dagster.storage.schema_evolution import (
    Evolution,
    evolved,
    kept_by_newest_names,
    never_null,
    require_declared_renames,
    require_shape,
    shape_of,
)
from vt_dagster.storage.view import Base, Progress, View
from vt_dagster.topology.durations import parse_time
from vt_dagster.topology.expressions import mentions
from vt_dagster.topology.model import Stream, Table, VersionedTable
from vt_dagster.topology.node import require_path
from vt_dagster.topology.options import options_in_commit

# Log snapshot


@dataclass(frozen=True)
class Head:
    """A commit of a log: the last one or an earlier one.

    Args:
        version: a Delta version that contains the commit's rows; for the last commit, its own version.
        later: whether that version also contains rows of later commits.
    """

    version: int
    commit: Commit
    later: bool = False


@dataclass(frozen=True)
class Snapshot:
    """A stream or table as of one commit: a table's view, and the log's tail that the view lacks.

    Args:
        head: the log's commit; None before the first.
        base: the view that the tail is folded into; None = no view (always for streams): all rows are
            read from the log.
    """

    head: Head | None = None
    base: Base | None = None

    @property
    def stream_time(self) -> dict[int, int]:
        """Stream time by partition, epoch microseconds."""
        return {} if self.head is None else self.head.commit.stream_time

    @property
    def total(self) -> int:
        """Number of records that the log has had, removed ones included."""
        return 0 if self.head is None else self.head.commit.total

    @property
    def tail(self) -> int:
        """Number of log records that are not in the view."""
        return self.total - (0 if self.base is None else self.base.checkpoint.total)

    def reach(self, moment: int | None = None) -> int:
        """Returns an upper bound of the rows that are current or may end after a time, tail included.

        Args:
            moment: epoch microseconds; None = count current rows only.
        """
        return self.tail + (0 if self.base is None else self.base.reach(moment))


# Offset conditions


MANY = 64
"""Number of distinct offsets above which one lookup in a map replaces a term for each offset."""


def at_or_after(start: Offsets, ends: Offsets) -> Column:
    """Returns the condition that a log row's offset is at or after ``start``.

    Partitions without new rows are left out, and partitions with equal start offsets share a term:
    planning time grows with the length of the condition.

    Args:
        start: first offset by partition (inclusive); partitions without an entry start at 0.
        ends: first free offset by partition.
    """
    begin: dict[int, list[int]] = {}
    for partition, end in sorted(ends.items()):
        first = start.get(partition, 0)
        if first < end:
            begin.setdefault(first, []).append(partition)
    if len(begin) > MANY:
        exact = F.col(OFFSET) >= F.coalesce(by_partition(start, "long"), F.lit(0))
        # The constant bound can be pushed down to the Parquet files, the look-up in a map cannot.
        return (F.col(OFFSET) >= min(begin)) & exact
    return F.expr(_any_of((some, f"`{OFFSET}` >= {first}L") for first, some in begin.items()))


def before(ends: Offsets) -> Column:
    """Returns the condition that a log row's offset is before ``ends`` (exclusive); partitions without
    an entry have no rows."""
    if len(set(ends.values())) > MANY:
        return F.col(OFFSET) < F.coalesce(by_partition(ends, "long"), F.lit(0))
    until = {end: [p for p, one in sorted(ends.items()) if one == end] for end in ends.values()}
    return F.expr(_any_of((some, f"`{OFFSET}` < {end}L") for end, some in sorted(until.items())))


def _any_of(conditions: Iterable[tuple[Sequence[int], str]]) -> str:
    """Returns, as SQL text, whether the condition of the row's partition holds. A column expression
    would need a call of the JVM for each of its steps."""
    terms = [f"`{PARTITION}` IN ({', '.join(map(str, some))}) AND {text}" for some, text in conditions]
    return " OR ".join(f"({term})" for term in terms) or "false"


# Spark reader


class AssetReader:
    """The tables of one stream or table under ``warehouse/name``.

    Args:
        warehouse: directory or URL that both Spark and fsspec can read and write.
        spark: a session, or a function that creates it at first use; methods marked "Does not use
            Spark" never create it.
        tell: receives a line for each write.
    """

    def __init__(
        self,
        warehouse: str,
        node: Stream,
        spark: SparkSession | Callable[[], SparkSession] | None = None,
        tell: Callable[[str], None] | None = None,
    ) -> None:
        self.node = node
        self.progress = Progress(node.name, tell)
        delta.require_place(str(warehouse))
        self.warehouse = address(warehouse)
        self.root = posixpath.join(self.warehouse, *node.path)
        self.log_path = posixpath.join(self.root, "log")
        self.view_path = posixpath.join(self.root, "view")
        self.quarantine_path = posixpath.join(self.root, "quarantine")
        self._spark = spark
        self._view = View(node, self.view_path, self.log_path, self.progress)

    @classmethod
    def open(
        cls,
        warehouse: str,
        name: str,
        spark: SparkSession | Callable[[], SparkSession] | None,
        tell: Callable[[str], None] | None = None,
    ) -> Self:
        """Opens the tables of an asset by name, as described in its last commit.

        Raises:
            StorageError: the warehouse has no such asset.
        """
        shape = head_of(warehouse, name)[1].shape
        *prefix, last = require_path(name, "an asset")
        fields = parquet.schema(posixpath.join(str(warehouse), name, "log")).fields
        added = {*LOG_COLUMNS, RECORDED_AT, IS_LATEST, IS_LATE, OLD} - {TIMESTAMP}
        declared = shape.columns or [f.name for f in fields if f.name not in added]
        own = [f for f in fields if f.name in (*declared, TIMESTAMP)]
        about: dict[str, Any] = {"key": tuple(shape.key), "schema": StructType(own)}
        about["key_prefix"] = prefix
        if shape.kind == "versioned":
            about |= options_in_commit(shape)
            about["ignore_null_updates"] = shape.has_partial_updates
            table = VersionedTable(last, history_retention=shape.retention(), **about)
            return cls(warehouse, table, spark, tell)
        kind = Table if shape.kind == "table" else Stream
        return cls(warehouse, kind(last, **about), spark, tell)

    @property
    def spark(self) -> SparkSession:
        if self._spark is None:
            raise StorageError(
                f"{self.node.name}: expected a Spark session, got none; pass one to read or write rows"
            )
        if callable(self._spark):
            self._spark = self._spark()
        return self._spark

    # -- commits and the log ---------------------------------------------------------------------

    def head(self) -> Head | None:
        """Returns the last commit of the log; None before the first. Does not use Spark."""
        found = delta.last_commit(self.log_path)
        return None if found is None else Head(found[0], Commit.model_validate(found[1]))

    def commits(self) -> Iterator[Commit]:
        """Returns the known commits of the log, oldest first. Does not use Spark."""
        return commit_log.commits(self.root)

    def log(
        self,
        start: Offsets,
        head: Head,
        after: int | None = None,
        counted: bool = True,
        *,
        consumed: int = 0,
    ) -> DataFrame:
        """Returns the log rows from ``start`` (inclusive) to a commit (inclusive), without truncated
        rows.

        Plan: files without such rows, by their statistics, are not opened.

        Args:
            after: also returns rows before ``start`` with a timestamp after this (exclusive, epoch
                microseconds): rows that a grace buffer may still hold.
            counted: whether to check the files' row counts against the commit; an audit counts the
                rows itself.
            consumed: see ``file_at_or_after``.

        Raises:
            StorageError: the row counts differ, or a file is missing or has another size.
        """
        ends, stored = head.commit.next_offset, head.commit.total - sum(head.commit.missing.values())
        upto = file_between if head.later else file_at_or_after
        recent = upto(start, ends, consumed)

        def needed(file: delta.File) -> bool:
            may_wait = after is not None and (file.newest is None or file.newest > after)
            return recent(file) or (not head.later and (not start or may_wait))

        # A version with later commits has more rows than this commit counts.
        count = stored if counted and not head.later else None
        like = log_schema(self.node)
        with self._of_one_log(head):
            rows = parquet.read(self.spark, self.log_path, head.version, needed, like=like, count=count)
        if not start and not head.later:
            return rows
        # After the read, which starts the session: Spark columns need an active session.
        wanted = at_or_after(start, ends)
        if head.later:
            return rows.where(wanted & before(ends))
        if after is None:
            return rows.where(wanted)
        return rows.where(wanted | (F.col(TIMESTAMP) > F.timestamp_micros(F.lit(after))))

    def oldest(self, start: Offsets, head: Head, consumed: int = 0) -> int | None:
        """Returns a lower bound of the timestamps of the log rows from ``start`` to a commit, by the
        statistics of its files (epoch microseconds); None = unknown. Does not use Spark.

        Args:
            consumed: see ``file_at_or_after``.
        """
        recent = file_at_or_after(start, head.commit.next_offset, consumed)
        with self._of_one_log(head):
            times = [file.oldest for file in delta.files(self.log_path, head.version, recent)]
        known = [moment for moment in times if moment is not None]
        return min(known) if known and len(known) == len(times) else None

    @contextmanager
    def _of_one_log(self, head: Head | None) -> Iterator[None]:
        """Replaces errors of a read of pinned versions, if these are now versions of another log."""
        try:
            yield
        except (ConcurrentRunError, StorageError) as error:
            if head is None or not self._was_exchanged(head):
                raise
            raise exchanged(self.node.name, head.commit) from error

    def _was_exchanged(self, head: Head | None) -> bool:
        if head is None:
            return False
        now = self.head()
        return now is None or now.commit.log != head.commit.log

    def attempt_of(self, batch: int) -> str | None:
        """Returns the attempt that wrote a batch of the log; None = no such batch, or no longer known.
        Does not use Spark."""
        return commit_log.attempt_at(self.root, batch)

    # -- staged data of a run --------------------------------------------------------------------

    def _attempt_path(self, attempt: str, *parts: str) -> str:
        return posixpath.join(self.root, "attempts", attempt, *parts)

    def _staged(self, commit: Commit, what: str) -> str:
        """Returns the path of staged data that a commit names.

        Raises:
            StorageError: the data or some of its files are missing, or have another size.
            ConcurrentRunError: the same, because the log has gone on since, or is another one now.
        """
        path = self._attempt_path(commit.attempt, what)
        expected, found = commit.staged.get(what), self.staged(commit.attempt).get(what)
        if found is None or (expected is not None and found != expected):
            now = self.head()
            if now is not None and now.commit.attempt != commit.attempt:
                raise ConcurrentRunError(
                    f"{commit.asset}: expected batch {commit.batch} of run {commit.attempt} to be the "
                    f"last one of its log, because this run continues it, got batch {now.commit.batch} "
                    f"of run {now.commit.attempt}: another run, an erase or a swap has committed "
                    "since, and the data that the earlier one staged is gone. Nothing was committed: "
                    "run again"
                )
            got = "but it was removed"
            if found is not None and expected is not None:
                got = f"with {_files(expected)}, got {_files(found)}"
            raise StorageError(
                f"{commit.asset}: expected the data that batch {commit.batch} staged for the next run, "
                f"{path}, {got}. Restore it from a backup, or rebuild the asset beside the old one "
                "(vt-dagster replay) and swap"
            )
        return path

    def staged(self, attempt: str) -> dict[str, tuple[int, int]]:
        """Returns what a run has staged under an attempt, see ``Commit.staged``. Does not use Spark."""
        fs, root = delta.filesystem(self._attempt_path(attempt))
        # Spark has written the files without fsspec, whose cached listing may lack them.
        fs.invalidate_cache()
        found = dict[str, tuple[int, int]]()
        for name, about in fs.find(root, detail=True).items():
            place = name[len(root.rstrip("/")) + 1 :]
            if delta.is_hidden(place):
                continue
            what = place.split("/")[0]
            count, size = found.get(what, (0, 0))
            found[what] = count + 1, size + int(about["size"])
        return found

    def _read_staged(self, commit: Commit, what: str) -> DataFrame:
        return self.spark.read.parquet(delta.literal(self._staged(commit, what)))

    def state(self, head: Head | None) -> DataFrame | None:
        """Returns the operator's state after a commit; None if it has none."""
        if head is None or not head.commit.state:
            return None
        return kept_by_newest_names(self._read_staged(head.commit, "state"), self.node.earlier)

    def state_bytes(self, head: Head | None) -> int:
        """Returns the size of the operator's state in bytes. Does not use Spark."""
        if head is None or not head.commit.state:
            return 0
        fs, local = delta.filesystem(self._staged(head.commit, "state"))
        return fs.du(local)

    def consumed_files(self, head: Head | None) -> dict[str, Any]:
        """Returns the files consumed so far, by name. Does not use Spark."""
        if head is None or not head.commit.files:
            return {}
        fs, local = delta.filesystem(self._staged(head.commit, "files.json.gz"))
        return json.loads(gzip.decompress(fs.cat_file(local)))

    # -- as of a commit --------------------------------------------------------------------------

    def snapshot(self, as_stored: bool = False) -> Snapshot:
        """Returns the asset as of its last commit. Writes nothing, and does not use Spark.

        Args:
            as_stored: uses the view even if it was made from another state of the log, for audits.
        """
        # The view is read before the log: a view never includes more than the log at a later moment.
        base = self._view.base() if isinstance(self.node, Table) else None
        return self._snapshot(self.head(), base, not as_stored)

    def known_at(self, moment: int) -> Snapshot:
        """Returns the asset as of the last commit up to a system time. Does not use Spark.

        Args:
            moment: epoch microseconds, inclusive.

        Raises:
            StorageError: nothing was recorded by then.
        """
        at = self.snapshot()
        if at.head is None or at.head.commit.recorded_at <= moment:
            return at
        return self.as_of(
            commit_log.known_at(self.root, self.node.name, moment, at.head.commit.truncation)
        )

    def as_of(self, commit: Commit) -> Snapshot:
        """Returns the asset as of one of its commits. Does not use Spark.

        Args:
            commit: must carry the current truncation of the log.
        """
        at = self.snapshot()
        assert at.head is not None
        ahead = at.base is not None and at.base.checkpoint.batch > commit.batch
        base = self._view.at_truncation(commit) if ahead else at.base
        return Snapshot(Head(at.head.version, commit, later=True), base)

    def _snapshot(self, head: Head | None, base: Base | None, of_log: bool = True) -> Snapshot:
        """Returns the view that a head's reader can use, after a check of the asset's definition."""
        if head is None:
            return Snapshot()
        require_shape(self.node, head.commit.shape)
        self.columns(log_schema(self.node), head)
        return Snapshot(head, self._view.usable(base, head.commit, of_log))

    def columns(self, now: StructType, head: Head | None) -> Evolution:
        """Returns the evolution of the log's columns for new rows. Does not use Spark.

        Args:
            now: columns of the new rows.
            head: the log's last commit.

        Raises:
            NeedsReplayError: the log cannot take the new columns.
        """
        node = self.node
        placed = [c for c in node.schema.names if mentions(node.partition_by or "", c)]
        found = evolved(
            node.name,
            parquet.stored_schema(self.log_path, None if head is None else head.version),
            now,
            fixed={*node.key, *placed},
            required=never_null(node),
            declared=None if head is None else head.commit.shape.columns,
            derived=node.operator is not None,
        )
        if found.added and found.dropped:
            logs = [posixpath.join(self.warehouse, *up.path, "log") for up in node.inputs]
            stored = [parquet.stored_schema(path) for path in logs if delta.exists(path)]
            require_declared_renames(node.name, found, stored)
        return found

    def view_at(self, at: Snapshot, since: int | None = None) -> DataFrame:
        """Returns the rows of a table as of a snapshot: versions, or current rows.

        Args:
            since: versions that ended by this time (epoch microseconds) may be left out.
        """
        with self._of_one_log(at.head):
            return self._view.rows(self.spark, at.base, self._tail(at), self._commit_of(at), since)

    def current_at(self, at: Snapshot, keys: DataFrame | None = None) -> DataFrame:
        """Returns the current row of each key as of a snapshot; for a versioned table also
        tombstones.

        Args:
            keys: see ``View.current``.
        """
        with self._of_one_log(at.head):
            return self._view.current(self.spark, at.base, self._tail(at), self._commit_of(at), keys)

    def _commit_of(self, at: Snapshot) -> Commit:
        assert at.head is not None
        return at.head.commit

    def _tail(self, at: Snapshot) -> DataFrame | None:
        """Returns the log rows that are not in the view; None = none."""
        if at.head is None or (at.base is not None and not at.tail):
            return None
        return self.log({} if at.base is None else at.base.checkpoint.next_offset, at.head)

    def current(self, keys: DataFrame | None = None) -> DataFrame | None:
        """Returns :meth:`current_at` as of the log's last commit; None before the first."""
        at = self.snapshot()
        return None if at.head is None else self.current_at(at, keys)

    def quarantine(self) -> DataFrame | None:
        """Returns the rejected records with their reasons; None if there never were any."""
        head = self.head()
        last = self._unpublished(head) if head is not None and head.commit.rejected else None
        if not delta.exists(self.quarantine_path):
            return last
        rows = parquet.read(self.spark, self.quarantine_path)
        if head is not None:
            rows = rows.where(F.col("batch") <= self._last_rejected(head.commit))
        return rows if last is None else rows.unionByName(last, allowMissingColumns=True)

    def _unpublished(self, head: Head) -> DataFrame | None:
        """Returns the records that the last run rejected; None = they are in the quarantine table."""
        commit = head.commit
        if self._last_rejected(commit) >= commit.batch:
            return None
        return self._read_staged(commit, "rejected").withColumn("batch", F.lit(commit.batch))

    def _last_rejected(self, commit: Commit) -> int:
        """Returns the last batch of the quarantine table that the log also has; 0 = none. It may be
        later than ``commit``. The table may have later batches that the log has lost."""
        for found in delta.commits(self.quarantine_path):
            then = Checkpoint.model_validate(found.document)
            same = then.batch == commit.batch and then.attempt == commit.attempt
            there = commit.attempt if same else self.attempt_of(then.batch)
            # An unknown attempt, or one of an erase (which has its own), counts as the log's if the log
            # has a later batch.
            trusted = then.batch < commit.batch and (there is None or bool(then.erased))
            if there == then.attempt or trusted:
                return then.batch
        return 0

    def erased_rejected(self) -> dict[str, int]:
        """Returns the number of erased quarantine rows by reason. Does not use Spark."""
        done = delta.last_commit(self.quarantine_path)
        return {} if done is None else Checkpoint.model_validate(done.document).erased

    def versions(self) -> dict[str, int]:
        """Returns the Delta versions of the existing tables by name. Does not use Spark."""
        paths = {"log": self.log_path, "view": self.view_path, "quarantine": self.quarantine_path}
        tables = {name: delta.open_table(path) for name, path in paths.items()}
        return {name: table.version() for name, table in tables.items() if table is not None}

    def stored_rows(self) -> int:
        """Returns the number of rows in the table for readers: the view, or the log of a stream. Does
        not use Spark."""
        path = self.view_path if isinstance(self.node, Table) else self.log_path
        return sum(file.rows for file in delta.files(path))

    def read(
        self,
        what: str | None = None,
        as_of: str | None = None,
        partial: bool = False,
        as_known_at: str | None = None,
        at: Snapshot | None = None,
    ) -> DataFrame:
        """Reads the asset as of its last commit, or of an earlier one.

        Args:
            what: ``current``, ``versions`` or ``log``; None = current of a table, log of a stream.
            as_of: valid time, ISO 8601; returns the row of every key as of it (inclusive).
            partial: for an ``as_of`` before the history horizon, return the current versions that were
                valid by then, as Kafka Streams does; otherwise such a time is an error.
            as_known_at: system time, ISO 8601; uses the records up to it (inclusive) and the stream
                time of then, with the history retention that is declared now.
            at: a known snapshot of the last commit; None = it is looked up, again if the log was
                swapped or restated meanwhile.

        Raises:
            ConcurrentRunError: the log of ``at`` was swapped or restated.
            StorageError: the asset does not have ``what``, ``as_of`` is before its history, or nothing
                was recorded by ``as_known_at``.
        """
        head = self.head() if at is None else at.head
        try:
            rows = self._read(what, as_of, partial, as_known_at, at)
        except Exception:
            if not self._was_exchanged(head):
                raise
        else:
            if not self._was_exchanged(head):
                return rows
        # Versions of the new log mean other rows.
        if at is not None and at.head is not None:
            raise exchanged(self.node.name, at.head.commit)
        return self.read(what, as_of, partial, as_known_at)

    def _read(
        self, what: str | None, as_of: str | None, partial: bool, known: str | None, at: Snapshot | None
    ) -> DataFrame:
        node = self.node
        what = choose(node.name, shape_of(node).kind, what, as_of)
        at = at if known is None else self.known_at(parse_time(known))
        at = at or (Snapshot(self.head()) if what == "log" else self.snapshot())
        if at.head is None:
            require_in_place(self.warehouse, "/".join(node.path))
            raise StorageError(f"{node.name}: nothing was ever committed; materialize it first")
        if what == "log":
            return self.log({}, at.head)
        if what == "current" and as_of is None:
            rows = self.current_at(at)
            rows = of_table.rows_now(node, rows, at.stream_time) if isinstance(node, Table) else rows
            return with_finality(rows, at.head.commit.watermarks)
        moment = None if as_of is None else parse_time(as_of)
        view = of_table.as_read(node, self.view_at(at, since=moment))
        if moment is None or not isinstance(node, VersionedTable):
            return view
        if not partial:
            require_within_retention(node.name, node.version_rules, at.stream_time, moment)
        horizon = of_table.horizon_of(node, by_partition(at.stream_time))
        return versioned_table.get_as_of(view, F.timestamp_micros(F.lit(moment)), horizon)


def _files(count_and_bytes: tuple[int, int]) -> str:
    return f"{counted(count_and_bytes[0], 'file')} of {count_and_bytes[1]:,} bytes"
