"""The view of a table: a Delta table that follows from its log, and what one run changes of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import timedelta
from uuid import uuid4

from pyspark.sql import DataFrame, SparkSession

from vt_dagster.columns import SEGMENT
from vt_dagster.core import store, versioned
from vt_dagster.core.arrival import by_partition
from vt_dagster.errors import ConcurrentRunError, StorageError
from vt_dagster.spark.small_runs import is_small, small_run
from vt_dagster.storage import delta
from vt_dagster.storage.positions import Checkpoint, Commit, Offsets
from vt_dagster.storage.progress import Progress
from vt_dagster.storage.segments import EVERYTHING, plan
from vt_dagster.topology.durations import in_micros, in_utc, length_at
from vt_dagster.topology.model import Stream, Table, VersionedTable

_TRIES = 3
"""How often a view is written where its files are compacted at the same time."""


def checkpoint_at(path: str) -> tuple[int, Checkpoint] | None:
    """The version of a table that follows from a log, and the batch that it stands at; None where there
    is no table. Does not use Spark."""
    found = delta.last_commit(path)
    return None if found is None else _checkpoint(found)


def _checkpoint(commit: delta.Committed) -> tuple[int, Checkpoint]:
    checkpoint = Checkpoint.model_validate(commit.document)
    checkpoint.rows = checkpoint.total if commit.rows is None else commit.rows
    return commit.version, checkpoint


def _horizons(node: VersionedTable, stream_time: Mapping[int, int]) -> list[int]:
    """Of each partition: what ended before it has expired. Epoch microseconds."""
    one = timedelta(microseconds=1)
    return [now - length_at(node.history_retention, p) // one for p, now in stream_time.items()]


def require_remembered(node: VersionedTable, stream_time: Mapping[int, int], moment: int) -> None:
    """A table answers for times within its history retention only.

    Args:
        stream_time: by partition, epoch microseconds.
        moment: the time that is asked for.

    Raises:
        StorageError: it lies before that, in some partition.
    """
    horizon = max(_horizons(node, stream_time), default=moment)
    if moment < horizon:
        raise StorageError(
            f"{node.name}: expected a time from {in_utc(horizon)} on, since when it remembers what was "
            f"true, got {in_utc(moment)}; ask for a later one, keep a longer history_retention, or say "
            'that the rows that are left will do ("vt_dagster/partial": True, --partial)'
        )


class View:
    """The view of one asset; a stream has none."""

    def __init__(self, node: Stream, path: str, progress: Progress) -> None:
        self.node = node
        self.path = path
        self._progress = progress

    def checkpoint(self) -> tuple[int, Checkpoint] | None:
        """See ``checkpoint_at``."""
        return checkpoint_at(self.path)

    def stored(self, spark: SparkSession, version: int, versions: str) -> DataFrame:
        """The rows as they lie there; of a versioned table those that are asked for, as SQL."""
        rows = delta.read(spark, self.path, version)
        return rows.where(versions).drop(SEGMENT) if SEGMENT in rows.columns else rows

    def remembered(
        self, spark: SparkSession, version: int, checkpoint: Checkpoint, versions: str
    ) -> DataFrame:
        """The same without versions that have expired."""
        rows = self.stored(spark, version, versions)
        if not isinstance(self.node, VersionedTable):
            return rows
        horizon = store.horizon_of(self.node, by_partition(checkpoint.stream_time))
        return versioned.remembered(rows, horizon)

    def _lengthened(self, checkpoint: Checkpoint) -> list[int]:
        """By how much longer than when the view was written its partitions are remembered now."""
        then = checkpoint.history_retention
        if then is None or not isinstance(self.node, VersionedTable):
            return []
        now = self.node.history_retention
        return [
            length_at(now, p) // timedelta(microseconds=1)
            - (then if isinstance(then, int) else then.get(p, 0))
            for p in checkpoint.stream_time
        ]

    def _say_what_goes(self, commit: Commit) -> None:
        assert isinstance(self.node, VersionedTable)
        horizon = max(_horizons(self.node, commit.stream_time))
        self._progress.done(
            f"! history_retention is shorter than it was: what ended before {in_utc(horizon)} is "
            "forgotten now. The log keeps it: with a longer one the view is made anew"
        )

    def update(
        self,
        commit: Commit,
        log: Callable[[Offsets], DataFrame],
        rebuild: bool = False,
        tries: int = _TRIES,
    ) -> tuple[int, Checkpoint]:
        """Brings the view up to a commit; changes nothing where it stands there, or further.

        Args:
            log: the log's rows from some offsets (inclusive) to the commit (inclusive).
            rebuild: from the whole log, whatever is there.

        Returns:
            see ``checkpoint_at``; where another run has brought it further, that.

        Raises:
            ConcurrentRunError: another run writes to it all the time.
        """
        node = self.node
        assert isinstance(node, Table)
        done = None if rebuild else self.checkpoint()
        longer = [] if done is None else self._lengthened(done[1])
        if max(longer, default=0) > 0:
            # of which versions are not there that the log has
            self._progress.done("history_retention is longer than it was: the view is made anew")
            return self.update(commit, log, rebuild=True, tries=tries)
        if done is not None and (
            done[1].next_offset == commit.next_offset or done[1].batch > commit.batch
        ):
            return done
        if min(longer, default=0) < 0:
            self._say_what_goes(commit)
        start = {} if done is None else done[1].next_offset
        new = log(start)
        spark = new.sparkSession
        document = Checkpoint(
            asset=commit.asset,
            batch=commit.batch,
            attempt=uuid4().hex,
            next_offset=commit.next_offset,
            stream_time=commit.stream_time,
        )
        if isinstance(node, VersionedTable):
            document.history_retention = in_micros(node.history_retention)
        records = document.total - sum(start.values())
        rows_met = 0 if done is None else done[1].rows
        wanted = EVERYTHING
        segment, replaced = None, None
        if isinstance(node, VersionedTable):
            # Where it is more than a batch behind, only the last of them says what was out of order.
            one_behind = done is not None and done[1].batch == commit.batch - 1
            if done is not None:
                rows_met = done[1].reach(commit.earliest) if one_behind else done[1].total
            change = plan(
                done[1].segments if done is not None and one_behind else None,
                new,
                records=records,
                total=document.total,
                earliest=commit.earliest,
                newest=max(commit.stream_time.values(), default=0),
                horizon=min(_horizons(node, commit.stream_time), default=0),
            )
            segment, replaced = change.layout.column(), change.replaced
            document.segments = change.following
            wanted = change.read
        before = None if done is None else self.remembered(spark, *done, wanted)
        rows = store.fold(node, before, new, by_partition(commit.stream_time))
        try:
            with small_run(spark, is_small(records, rows_met)):
                written = delta.write(
                    rows if segment is None else rows.withColumn(SEGMENT, segment),
                    self.path,
                    mode="overwrite",
                    document=document.model_dump(),
                    batch=commit.batch,
                    asset=f"{commit.asset}:{document.attempt if rebuild else 'view'}",
                    partitioned_by=None if segment is None else SEGMENT,
                    replaced=replaced,
                )
        except ConcurrentRunError:
            others = self.checkpoint()
            if others is not None and others[1].batch >= commit.batch:
                return others
            if tries == 1:
                raise
            return self.update(commit, log, rebuild, tries - 1)  # it was a compaction
        self._progress.done(f"view at version {written.version}, of batch {commit.batch}")
        return _checkpoint(written)
