"""The view of a table: a checkpoint of its log, and the rules that decide when it is updated from the
log.

**File layout** of a versioned table's view: current rows in one segment, history segmented by valid_to.
This is the layout of KIP-889's store, as partitions of a Delta table. A run with records in order
rewrites the current rows and appends to the history. Records out of order rewrite all segments from the
earliest such record on. Expired history is dropped by whole segments, without reading them. So an
expired version may remain in a live segment after the history retention; readers filter it out.
"""

from __future__ import annotations

import posixpath
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from uuid import uuid4

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import StructType

from vt_dagster.columns import SEGMENT, TIMESTAMP, VALID_TO
from vt_dagster.core import table_store, versioned_table
from vt_dagster.core.arrival_order import CHUNK, by_partition, by_reference
from vt_dagster.core.log_columns import view_schema
from vt_dagster.errors import ConcurrentRunError
from vt_dagster.spark.settings import is_small, small_run
from vt_dagster.storage import delta, parquet
from vt_dagster.storage.commit_log import (
    Checkpoint,
    Commit,
    Offsets,
    Segments,
    base_of,
    base_path,
    is_of_log,
    require_history,
    usable,
)
from vt_dagster.storage.delta import File, Wanted, current, everything
from vt_dagster.topology.durations import in_utc
from vt_dagster.topology.model import Stream, Table, VersionedTable
from vt_dagster.topology.schema import with_all_names

# Progress


_ALWAYS = ("in", "applied", "out")


class Progress:
    """Reports each finished step of a run and its duration.

    Args:
        name: the asset; each line begins with it.
        tell: receives each line; None = lines are dropped.
    """

    def __init__(self, name: str, tell: Callable[[str], None] | None = None) -> None:
        self._name, self._tell = name, tell
        self._since = time.monotonic()

    def done(self, what: str) -> None:
        """Reports a finished step, and starts the clock of the next one."""
        now = time.monotonic()
        if self._tell is not None:
            self._tell(f"{self._name}: {what} ({now - self._since:.1f} s)")
        self._since = now


def in_words(counts: Mapping[str, int]) -> str:
    """Returns the counts of a commit as text; zeros are left out, except for in, applied and out."""
    return ", ".join(
        f"{n:,} {name.replace('_', ' ')}" for name, n in counts.items() if n or name in _ALWAYS
    )


# View segments


SEGMENT_ROWS = 100_000
"""A segment is closed at this number of versions, or at 1% of the table's records if that is more."""


@dataclass(frozen=True)
class Change:
    """The change of a view by one batch.

    Args:
        layout: segments for the rows that this batch writes.
        following: segments for the next batch.
        read: files whose rows the batch may change; all others are left untouched.
        replaced: files that the batch removes: those of ``read``, and expired segments.
    """

    layout: Segments
    following: Segments
    read: Wanted
    replaced: Wanted


def plan(
    old: Segments | None,
    log: DataFrame,
    *,
    records: int,
    total: int,
    earliest: int | None,
    newest: int,
    horizon: int,
) -> Change:
    """Returns the change of a view by a batch.

    The latest record of a key ends the key's current version only. A record out of order changes the
    version that is valid at its timestamp, and that version ends after the record.

    Args:
        old: segments of the view; None = no view, or one that is rebuilt.
        log: the batch's rows; ``records`` is their number.
        total: records of the log so far.
        earliest: smallest timestamp of a record out of order, epoch microseconds; None = none.
        newest: largest timestamp so far, epoch microseconds.
        horizon: expiry horizon of the partition that is furthest behind, epoch microseconds.
    """
    kept = (old or Segments()).without_expired(horizon)
    layout = divided(kept, log, records, total)
    following = closed_if_full(layout, records, total, newest)
    if old is None:
        return Change(layout, following, everything, everything)
    moved = [*layout.ends[len(kept.ends) :], *([] if earliest is None else [earliest])]
    read = kept.ending_after(min(moved)) if moved else current
    first = kept.first

    def goes(file: File) -> bool:
        return read(file) or (file.segment is not None and file.segment < first)

    return Change(layout, following, read, goes)


def segment_of(layout: Segments) -> Column:
    """Returns the segment of a row by its ``valid_to``: INT, null for current rows."""

    def later(first: int, last: int) -> str:
        """Returns the search among segments by halves as nested IFs of SQL. A lambda over all segments
        would be slower, because Spark interprets it."""
        if first == last:
            return str(first)
        middle = (first + last) // 2
        # By reference, see ``arrival_order.by_reference``.
        end = f"get(array({layout.ends[middle]}L, 0L), CAST({VALID_TO} IS NULL AS INT))"
        halves = f"{later(first, middle)}, {later(middle + 1, last)}"
        return f"IF(unix_micros({VALID_TO}) < {end}, {halves})"

    number = f"{layout.first} + {later(0, len(layout.ends))}"
    return F.expr(f"CASE WHEN {VALID_TO} IS NOT NULL THEN {number} END")


def divided(layout: Segments, log: DataFrame, records: int, total: int) -> Segments:
    """Returns the layout with the open segment split, if the batch has records for several segments.

    Plan: one aggregate over the records' timestamps.
    """
    parts = records // segment_rows(total)
    if parts < 2:
        return layout
    shares = F.array(*[F.lit(i / parts) for i in range(1, parts)])
    times = F.percentile_approx(F.unix_micros(TIMESTAMP), shares)
    found = log.agg(times).collect()[0][0]
    new = {end for end in found or [] if not layout.ends or end > layout.ends[-1]}
    return Segments(first=layout.first, ends=[*layout.ends, *sorted(new)])


def closed_if_full(layout: Segments, records: int, total: int, newest: int) -> Segments:
    """Returns the layout for the next run: the open segment is closed when full.

    Args:
        records: in this run; each ends at most one version.
    """
    full = layout.rows + records >= segment_rows(total)
    if full and (not layout.ends or newest >= layout.ends[-1]):
        return Segments(first=layout.first, ends=[*layout.ends, newest + 1])
    return Segments(first=layout.first, ends=layout.ends, rows=layout.rows + records)


def segment_rows(total: int) -> int:
    """Returns the size of a full segment in versions: a table has about a hundred segments at most."""
    return max(SEGMENT_ROWS, total // 100)


# View


EACH_RUN = 100_000
"""A view of at most this many rows is updated by each run: the cost is negligible."""
SHARE, MANY, BATCHES = 0.2, 1_000_000, 64
"""A larger view is updated if the log's tail reaches this share of its rows, or this many rows, or
batches."""
MANY_ROWS = 200_000
"""With more stored rows than this and a small tail, only rows of the tail's keys are folded."""
_FEW_KEYS, _ROWS_OF_EACH = 200_000, 4
_TRIES = 3
"""Number of attempts to write a view if a concurrent compaction conflicts."""


def are_few_keys(keys: int, rows: int) -> bool:
    """Returns whether rows have so few keys that all keys can be sent to every task, and so many rows
    per key that finding the last row of each key first saves time."""
    return keys <= min(_FEW_KEYS, rows // _ROWS_OF_EACH)


@dataclass(frozen=True)
class Base:
    """Stored rows that the log's tail is folded into: the view, or the base of a truncated log.

    Args:
        path: the Delta table.
        version: its Delta version; readers pin it.
        sizes: number of rows by segment; the segment None has the current rows.
    """

    path: str
    version: int
    checkpoint: Checkpoint
    sizes: Mapping[int | None, int] = field(default_factory=dict[int | None, int])

    @property
    def is_view(self) -> bool:
        """Whether this is the view, and not the base of a truncated log."""
        return posixpath.basename(self.path) == "view"

    @property
    def rows(self) -> int:
        """Number of all rows."""
        return sum(self.sizes.values())

    def reach(self, moment: int | None) -> int:
        """Returns an upper bound of the rows that are current or end after ``moment`` (epoch
        microseconds); None = counts current rows only."""
        segments = self.checkpoint.segments
        if segments is None or moment is None:
            return self.sizes.get(None, 0)
        first = segments.number(moment)
        return sum(n for segment, n in self.sizes.items() if segment is None or segment >= first)


def stored_as(node: Stream, log_path: str) -> StructType:
    """Returns the declared columns of a table's view with all their earlier names: the log's schema
    lists columns that were renamed after the view was written."""
    assert isinstance(node, Table)
    return with_all_names(view_schema(node), parquet.stored_schema(log_path))


def _base(path: str, found: delta.Committed) -> Base:
    sizes = dict[int | None, int]()
    for file in delta.files(path, found.version):
        sizes[file.segment] = sizes.get(file.segment, 0) + file.rows
    return Base(path, found.version, Checkpoint.model_validate(found.document), sizes)


class View:
    """The view of one table."""

    def __init__(self, node: Stream, path: str, log_path: str, progress: Progress) -> None:
        self.node = node
        self.path = path
        self.log_path = log_path
        self._progress = progress

    def base(self) -> Base | None:
        """Returns the current view; None if it does not exist. Does not use Spark."""
        found = delta.last_commit(self.path)
        return None if found is None else _base(self.path, found)

    def usable(self, base: Base | None, commit: Commit, of_log: bool = True) -> Base | None:
        """Returns the rows that the log's tail can be folded into, as of a commit; None = the whole log
        must be read.

        Args:
            of_log: whether to refuse a view that was made from another state of the log.

        Raises:
            StorageError: the truncated part of the log is needed.
        """
        root, rules = posixpath.dirname(self.path), self.node.version_rules
        there = base is not None and usable(root, base.checkpoint, commit, rules, of_log)
        return base if there else self.at_truncation(commit)

    def at_truncation(self, commit: Commit) -> Base | None:
        """Returns the rows as of the truncation of the log; None if the log is not truncated.

        Raises:
            StorageError: the rows lack versions that the current history retention covers.
        """
        truncation, node = commit.truncation, self.node
        if truncation is None or not isinstance(node, Table):
            return None
        root = posixpath.dirname(self.path)
        found = _base(base_path(root, truncation.base), base_of(node.name, root, truncation))
        require_history(node.name, found.checkpoint, node.version_rules, commit)
        return found

    def stored(
        self, spark: SparkSession, base: Base, wanted: delta.Wanted = delta.everything
    ) -> DataFrame:
        """Returns the stored rows of the wanted files, with the declared columns; expired versions are
        included."""
        like = stored_as(self.node, self.log_path)
        return parquet.read(spark, base.path, base.version, wanted, like=like)

    def drop_expired(self, rows: DataFrame, stream_time: Mapping[int, int]) -> DataFrame:
        """Returns the rows without expired versions."""
        if not isinstance(self.node, VersionedTable):
            return rows
        return versioned_table.drop_expired(
            rows, table_store.horizon_of(self.node, by_partition(stream_time))
        )

    def is_due(self, base: Base | None, commit: Commit) -> bool:
        """Returns whether the view must be updated to a commit, by the table's ``freshness``."""
        node = self.node
        assert isinstance(node, Table)
        if base is None or self.usable(base, commit) is not base:
            return True
        then, wanted = base.checkpoint, node.freshness
        tail = commit.total - then.total
        if wanted == "every_run" or not tail:
            return tail > 0
        # Each reader folds the tail, so it is bounded whatever `freshness` says.
        many = tail >= MANY or commit.batch - then.batch >= BATCHES
        if isinstance(wanted, timedelta):
            return many or time.time() - then.written / 1e6 >= wanted.total_seconds()
        return many or base.rows <= EACH_RUN or tail >= SHARE * base.rows

    def _report_expiry(self, commit: Commit) -> None:
        assert isinstance(self.node, VersionedTable)
        horizon = self.node.version_rules.horizon(commit.stream_time)
        self._progress.done(
            f"! history_retention is shorter than before: versions that ended before {in_utc(horizon)} "
            "expire now. The log keeps them: a longer history_retention rebuilds the view with them"
        )

    def update(
        self,
        commit: Commit,
        log: Callable[[Offsets], DataFrame],
        rebuild: bool = False,
        tries: int = _TRIES,
        most_keys: int | None = None,
    ) -> Base:
        """Updates the view to a commit; does nothing if the view includes the commit already.

        Args:
            log: returns the log's rows from some offsets (inclusive) to the commit (inclusive).
            rebuild: ignores the existing view, and folds the whole log (or the base of a truncated log
                and the rest).
            most_keys: upper bound of the keys with rows in the commit; None = unknown.

        Returns:
            the view, or the newer view of a concurrent run.

        Raises:
            ConcurrentRunError: other writers conflict on every attempt.
        """
        node = self.node
        assert isinstance(node, Table)
        there = self.base()
        if there is not None and not rebuild:
            rules, then = node.version_rules, there.checkpoint
            longer = [] if rules is None else then.lengthened(rules)
            if self.usable(there, commit) is not there:
                # The view lacks versions that the log has, so only a rebuild restores them.
                if max(longer, default=0) > 0:
                    why = "history_retention is longer than before"
                elif not then.suits(rules):
                    why = "new_version_on has changed"
                elif not is_of_log(posixpath.dirname(self.path), then, commit):
                    why = "the log was restored from a backup after the view was written"
                else:
                    why = "the log was truncated beyond the view"
                self._progress.done(f"{why}: the view is rebuilt")
                return self.update(commit, log, rebuild=True, tries=tries, most_keys=most_keys)
            if then.next_offset == commit.next_offset or then.batch > commit.batch:
                return there
            if min(longer, default=0) < 0:
                self._report_expiry(commit)
        document = Checkpoint(
            asset=commit.asset,
            batch=commit.batch,
            attempt=uuid4().hex,
            log_attempt=commit.attempt,
            next_offset=commit.next_offset,
            stream_time=commit.stream_time,
            written=int(time.time() * 1e6),
        )
        try:
            anew = rebuild or there is None
            done = self.at_truncation(commit) if anew else there
            written = self._write(commit, log, document, there, done, most_keys)
        except ConcurrentRunError:
            others = self.base()
            if others is not None and others.checkpoint.batch >= commit.batch:
                return others
            if tries == 1:
                raise
            # A compaction caused the conflict.
            return self.update(commit, log, rebuild, tries - 1, most_keys)
        self._progress.done(f"view at version {written.version}, of batch {commit.batch}")
        made = self.base()
        assert made is not None
        return made

    def _write(
        self,
        commit: Commit,
        log: Callable[[Offsets], DataFrame],
        document: Checkpoint,
        there: Base | None,
        done: Base | None,
        most_keys: int | None,
    ) -> delta.Committed:
        """Folds the log after ``done`` into it, and overwrites the view ``there``; None = no view."""
        node = self.node
        assert isinstance(node, Table)
        old = done if done is there else None
        new = log({} if done is None else done.checkpoint.next_offset)
        spark = new.sparkSession
        records = commit.total - (0 if done is None else done.checkpoint.total)
        read = replaced = delta.everything
        segment = None
        if isinstance(node, VersionedTable):
            rules = node.version_rules
            document = document.model_copy(update=rules.stored())
            change = plan(
                None if old is None else old.checkpoint.segments,
                new,
                records=records,
                total=commit.total,
                earliest=None if old is None else commit.earliest_since(old.checkpoint.batch),
                newest=max(commit.stream_time.values(), default=0),
                horizon=min(rules.horizons(commit.stream_time).values(), default=0),
            )
            segment, document.segments = segment_of(change.layout), change.following
            read, replaced = change.read, change.replaced
        before, rows_met = None, 0
        if done is not None:
            rows_met = sum(f.rows for f in delta.files(done.path, done.version, read))
            stored = self.stored(spark, done, read)
            before = self.drop_expired(stored, done.checkpoint.stream_time)
        few_keys = (
            most_keys is not None
            and records == commit.counts.get("out")
            and are_few_keys(most_keys, records)
        )
        rows = table_store.fold(node, before, new, by_partition(commit.stream_time), few_keys)
        # A rebuilt view may have a lower batch than before (the log was restored from a backup). Delta
        # refuses a lower transaction version, so such a commit uses an application id of its own.
        asset = f"{commit.asset}:view"
        if old is None or parquet.last_batch(self.path, asset) >= commit.batch:
            asset = f"{commit.asset}:{document.attempt}"
        with small_run(spark, is_small(records, rows_met), records + rows_met):
            return parquet.write(
                rows if segment is None else rows.withColumn(SEGMENT, segment),
                self.path,
                mode="overwrite",
                document=document.model_dump(),
                batch=commit.batch,
                asset=asset,
                parted=segment is not None,
                over=None if there is None else there.version,
                replaced=replaced if old is not None else delta.everything,
                like=stored_as(node, self.log_path),
            )

    def rows(
        self,
        spark: SparkSession,
        base: Base | None,
        tail: DataFrame | None,
        commit: Commit,
        since: int | None,
    ) -> DataFrame:
        """Returns the rows as of a commit: the stored rows with the log's tail folded in.

        Args:
            base: stored rows; None = none.
            tail: log rows after ``base``, up to the commit; None = none.
            since: versions that ended by this time (epoch microseconds) may be left out; None = all
                versions are returned.
        """
        layout = None if base is None else base.checkpoint.segments
        if base is None or layout is None or since is None:
            stored = None if base is None else self.stored(spark, base)
            return self._folded(stored, tail, commit, base, delta.everything)
        # A record out of order ends at the start of the next version, so that version must be read.
        earliest = commit.earliest_since(base.checkpoint.batch) if tail else None
        since = since if earliest is None else min(since, earliest)
        wanted = layout.ending_after(since)
        # A segment may begin long before: what is not needed is neither shuffled nor sorted.
        ends_later = F.unix_micros(VALID_TO) > by_reference(since, VALID_TO)
        stored = self.stored(spark, base, wanted).where(F.col(VALID_TO).isNull() | ends_later)
        return self._folded(stored, tail, commit, base, wanted)

    def current(
        self,
        spark: SparkSession,
        base: Base | None,
        tail: DataFrame | None,
        commit: Commit,
        keys: DataFrame | None = None,
    ) -> DataFrame:
        """Returns the current row of each key as of a commit; for a versioned table also tombstones.

        Plan with ``keys``: one scan of the stored rows, and a broadcast of the keys.

        Args:
            keys: few keys, perhaps repeated: only their rows are returned; None = all.
        """
        node = self.node
        assert isinstance(node, Table)
        rows = None if base is None else self.stored(spark, base, current)
        if keys is not None:
            key, few = list(node.key), F.broadcast(keys)
            # Before the tail is folded in: of many stored rows only those of the keys are shuffled.
            rows = None if rows is None else rows.join(few, key, "left_semi")
            tail = None if tail is None else tail.join(few, key, "left_semi")
        if rows is not None and tail is None:
            return rows
        return table_store.current(
            node, self._folded(rows, tail, commit, base, current, few=keys is not None)
        )

    def _folded(
        self,
        stored: DataFrame | None,
        tail: DataFrame | None,
        commit: Commit,
        base: Base | None,
        wanted: delta.Wanted,
        few: bool = False,
    ) -> DataFrame:
        """Folds the log's tail into stored rows.

        Args:
            few: whether the stored rows are few, regardless of the row counts of the files.
        """
        node, stream_time = self.node, by_partition(commit.stream_time)
        assert isinstance(node, Table)
        if stored is None or base is None:
            assert tail is not None
            return table_store.fold(node, None, tail, stream_time)
        if tail is None:
            return self.drop_expired(stored, commit.stream_time)
        # An expired version may still be stored while its later tombstone is gone: folding it would
        # revive it.
        stored = self.drop_expired(stored, base.checkpoint.stream_time)
        folds_few = not few and commit.total - base.checkpoint.total <= CHUNK
        rows = sum(f.rows for f in delta.files(base.path, base.version, wanted)) if folds_few else 0
        fold = table_store.fold_few if rows > MANY_ROWS else table_store.fold
        return fold(node, stored, tail, stream_time)
