"""Writes an asset's tables, with the protocol that keeps them consistent.

**The log's commit decides.** Data of a run outside the log (rejected records, list of consumed files)
is staged before the commit under an attempt's name, and is valid only if a commit names that attempt.
Tables derived from the log (view, quarantine) are written after the commit; if the run dies before
that, the next writer updates them. So a run can be killed at any point and started again.
"""

from __future__ import annotations

import gzip
import json
import posixpath
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any
from uuid import uuid4

from deltalake.exceptions import DeltaError
from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from vt_dagster.core.log_columns import log_schema
from vt_dagster.errors import ConcurrentRunError, StorageError, VtDagsterError
from vt_dagster.spark.jars import one_line
from vt_dagster.spark.settings import is_small, look_up_of_few, small_run
from vt_dagster.storage import delta, parquet
from vt_dagster.storage.arrow_reader import asset_names, require_in_place
from vt_dagster.storage.commit_log import Checkpoint, Commit, Offsets
from vt_dagster.storage.delta import gone_before_commit, require_seen
from vt_dagster.storage.spark_reader import AssetReader, Head, Snapshot
from vt_dagster.storage.view import Base
from vt_dagster.topology.model import Stream, Table
from vt_dagster.topology.schema import noted

_FAILED_WRITES = (StorageError, PySparkException, Py4JJavaError, DeltaError, OSError)


class AssetStore(AssetReader):
    """Reads and writes the tables of one stream or table, see ``AssetReader``."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self._prepared = dict[str, dict[str, tuple[int, int]]]()
        """Staged data by attempt, in the form of ``Commit.staged``."""

    # -- staged data of a run --------------------------------------------------------------------

    def new_attempt(self) -> str:
        """Returns a new attempt id for the staged data of one run."""
        return uuid4().hex

    def stage_rejected(self, attempt: str, rows: DataFrame) -> None:
        """Stages the records that the run rejects."""
        self._stage(attempt, "rejected", rows)

    def stage_state(self, attempt: str, rows: DataFrame) -> None:
        """Stages the operator's state after the run."""
        self._stage(attempt, "state", rows)

    def _stage(self, attempt: str, what: str, rows: DataFrame) -> None:
        path = self._attempt_path(attempt, what)
        with parquet.writing(path):
            rows.write.mode("overwrite").parquet(path)
            require_seen(path, self.node.name)
        self._note_staged(attempt, what)

    def _note_staged(self, attempt: str, what: str) -> None:
        found = self.staged(attempt)
        if what not in found:
            raise gone_before_commit(self.node.name, self._attempt_path(attempt, what))
        self._prepared.setdefault(attempt, {})[what] = found[what]

    def stage_files(self, attempt: str, files: dict[str, Any]) -> None:
        """Stages the list of files that are consumed after the run's commit."""
        path = self._attempt_path(attempt, "files.json.gz")
        fs, local = delta.filesystem(path)
        with parquet.writing(path):
            fs.makedirs(posixpath.dirname(local), exist_ok=True)
            fs.pipe_file(local, gzip.compress(json.dumps(files).encode("utf-8")))
        self._note_staged(attempt, "files.json.gz")

    def remove_staged_before(self, previous: Head | None) -> None:
        """Removes the staged data of the run before ``previous``. That of ``previous`` is kept until
        the next commit: if the newest commit is lost, the next run continues from there.

        Args:
            previous: the commit before the newest one.
        """
        if previous is not None and previous.commit.previous:
            parquet.remove(self._attempt_path(previous.commit.previous))

    # -- rows in memory --------------------------------------------------------------------------

    def planner_settings(self, small: bool, records: int = 0) -> AbstractContextManager[None]:
        """Returns a context with planner settings for few rows, if ``small``.

        Args:
            records: see ``small_run``.
        """
        return small_run(self.spark, small, records)

    def look_up_settings(self) -> AbstractContextManager[None]:
        """Returns a context with planner settings for the few rows of a run's keys among many."""
        return look_up_of_few(self.spark)

    def persist(self, rows: DataFrame) -> DataFrame:
        """Caches rows that are used several times."""
        return rows.persist()

    def unpersist(self, rows: DataFrame) -> None:
        """Releases cached rows."""
        rows.unpersist()

    # -- the commit ------------------------------------------------------------------------------

    def commit(
        self, rows: DataFrame, commit: Commit, count: int, before: Callable[[], None] | None = None
    ) -> Head:
        """Appends a run's rows to the log: the one atomic step that commits the run.

        Args:
            count: number of rows.
            before: called right before the commit; raises to prevent it.

        Raises:
            ConcurrentRunError: another run has committed this batch; or files of this run are gone,
                because it was suspended for longer than maintenance keeps uncommitted files.
            StorageError: the rows do not fit the log's columns, or another program has changed the log.
        """
        self.require_writable(commit.batch)
        if commit.batch > 1:
            warning = self.columns(noted(rows.schema, log_schema(self.node)), self.head()).summary
            if warning:
                self.progress.done(f"! {warning}")
        commit = commit.model_copy(update={"staged": self._prepared.get(commit.attempt, {})})

        def ready() -> None:
            if before is not None:
                before()
            self.require_staged(commit)

        written = parquet.write(
            parquet.packed(rows, count),
            self.log_path,
            document=commit.model_dump(),
            batch=commit.batch,
            asset=self.node.name,
            like=log_schema(self.node),
            count=count,
            after=commit.previous,
            before=ready,
        )
        self.progress.done(f"committed batch {commit.batch} (log version {written.version})")
        return Head(written.version, commit)

    def successor(
        self,
        head: Head,
        attempt: str,
        run_id: str,
        change: Callable[[DataFrame], DataFrame] = lambda state: state,
        **changes: Any,
    ) -> Commit:
        """Returns the commit of a batch that takes no records (``Commit.successor``), and stages for it
        what the next run continues from: the state and the consumed files of the last run.

        Args:
            change: of the rows of the state.
            changes: other fields of the new commit.
        """
        state = self.state(head)
        if state is not None:
            self.stage_state(attempt, change(state))
        if head.commit.files:
            self.stage_files(attempt, self.consumed_files(head))
        staged = self._prepared.get(attempt, {})
        return head.commit.successor(attempt, run_id, staged=staged, **changes)

    def require_staged(self, commit: Commit) -> None:
        """Checks right before a commit that the staged data which the commit names exists: the next run
        needs it, and maintenance may have removed it while this process was suspended.

        Raises:
            ConcurrentRunError: a part of the staged data is gone.
        """
        there = self.staged(commit.attempt)
        gone = [what for what, size in commit.staged.items() if there.get(what) != size]
        if gone:
            raise gone_before_commit(commit.asset, self._attempt_path(commit.attempt, gone[0]))

    def require_writable(self, batch: int) -> None:
        """Checks that a run may write a batch of the log. Does not use Spark.

        Raises:
            StorageError: for the first batch, another asset already uses the folder or the name; for
                others, another program has changed the log.
        """
        if batch > 1:
            # Consumers' positions are offsets of this log: rows of another writer would shift their
            # meaning.
            self._check_no_other_writer()
        else:
            self._check_name()

    def _check_name(self) -> None:
        name, others = "/".join(self.node.path), asset_names(self.warehouse)
        alike = [n for n in others if n != name and n.lower() == name.lower()]
        if alike:
            raise StorageError(
                f"{name}: the warehouse has an asset {alike[0]!r}, which differs only in case: some "
                "file systems and catalogs do not distinguish the two; give the new one another name"
            )
        nested = [n for n in others if n.startswith(f"{name}/") or name.startswith(f"{n}/")]
        if nested:
            raise StorageError(
                f"{name}: the warehouse has an asset {nested[0]!r}, and an asset cannot be in the "
                "folder of another one: give the new one another key prefix or name"
            )

    def _check_no_other_writer(self) -> None:
        done = delta.foreign_write(self.log_path)
        if done is None:
            return
        head = self.head()
        assert head is not None
        raise StorageError(
            f"{self.node.name}: another program has changed the log since batch {head.commit.batch}: "
            f"{done}; nothing was committed, because offsets would mean other records. RESTORE "
            f"{self.log_path} to version {head.version}, which is that batch, or replay and swap"
        )

    # -- tables derived from the log -------------------------------------------------------------

    def catch_up(
        self,
        head: Head | None = None,
        now: bool = False,
        written: DataFrame | None = None,
        most_keys: int | None = None,
    ) -> Snapshot:
        """Updates the quarantine, and the view if its ``freshness`` requires that, to the log. Safe to
        call at any time from any process.

        Args:
            head: the log's last commit, if the caller has just made it; None = it is looked up.
            now: updates the view regardless of ``freshness``.
            written: cached log rows of that commit, so that they are not read again.
            most_keys: upper bound of the keys with rows in that commit; None = unknown.

        Raises:
            StorageError: a table cannot be written; the message says that the commit, if there was one,
                is valid.
        """
        base = self._view.base() if isinstance(self.node, Table) else None
        just_made, head = head is not None, head or self.head()
        found = self._snapshot(head, base)
        if head is None:
            require_in_place(self.warehouse, "/".join(self.node.path))
            return found
        try:
            if head.commit.rejected:
                self._publish_rejected(head)
            if not isinstance(self.node, Table) or not (now or self._view.is_due(base, head.commit)):
                return found
            try:
                return Snapshot(head, self._update_view(head, written=written, most_keys=most_keys))
            except ConcurrentRunError:
                if not just_made:
                    raise
                return found  # the run has committed; the concurrent writer updates the view
        except _FAILED_WRITES as error:
            if not just_made:
                raise
            batch = head.commit.batch
            why = str(error) if isinstance(error, VtDagsterError) else one_line(error)
            raise StorageError(
                f"{self.node.name}: batch {batch} is committed to its log, but then its view or "
                f"quarantine could not be written: {why}. The next run, also without new records, "
                f"writes them; it does not consume the records of batch {batch} again"
            ) from error

    def _publish_rejected(self, head: Head) -> None:
        try:
            self._write_rejected(head)
        except Exception:
            # If a later run has already published the records, their staged files may be removed.
            if self._last_rejected(head.commit) < head.commit.batch:
                raise

    def _write_rejected(self, head: Head) -> None:
        rows, commit = self._unpublished(head), head.commit
        if rows is None:
            return
        there = delta.last_commit(self.quarantine_path)
        same = self._last_rejected(commit)
        if there is not None and there.document["batch"] != same:
            # The log has lost later batches: it was restored from a backup, or a commit was removed.
            earlier = parquet.read(self.spark, self.quarantine_path, there.version)
            rows = earlier.where(F.col("batch") <= same).unionByName(rows, allowMissingColumns=True)
            about: dict[str, Any] = {"mode": "overwrite", "over": there.version}
        else:
            about = {}
            taken = parquet.last_batch(self.quarantine_path, commit.asset) >= commit.batch
            if there is not None and taken:
                about = {"over": there.version, "pinned": True}
        # Under the asset's own name, a lost batch of this number would count as already written.
        about["asset"] = f"{commit.asset}:{commit.attempt}" if about else commit.asset
        checkpoint = Checkpoint(
            asset=commit.asset,
            batch=commit.batch,
            attempt=commit.attempt,
            erased=self.erased_rejected(),
        )
        count = sum(n for name, n in commit.counts.items() if name not in ("in", "out", "applied"))
        with small_run(self.spark, is_small(count, 0), count):
            parquet.write(
                rows,
                self.quarantine_path,
                document=checkpoint.model_dump(),
                batch=commit.batch,
                **about,
            )

    def _update_view(
        self,
        head: Head,
        rebuild: bool = False,
        written: DataFrame | None = None,
        most_keys: int | None = None,
    ) -> Base:
        def log(start: Offsets) -> DataFrame:
            count = head.commit.total - sum(start.values())
            if written is not None and count == head.commit.counts.get("out"):
                return written
            return self.log(start, head)

        return self._view.update(head.commit, log, rebuild, most_keys=most_keys)

    def rebuild_view(self) -> None:
        """Rebuilds the view from the whole log, even if the existing view is damaged.

        Raises:
            StorageError: the asset is a stream, or has no commit.
        """
        head = self.head()
        if head is None or not isinstance(self.node, Table):
            raise StorageError(
                f"{self.node.name}: expected a table with a log to rebuild its view from, got "
                f"{'a stream, which has no view' if head else 'no commit; materialize it first'}"
            )
        try:
            self._view.base()
        except StorageError:  # the view's transaction log is unreadable too
            fs, local = delta.filesystem(self.view_path)
            fs.rm(local, recursive=True)
        self._update_view(head, rebuild=True)


def stores_of(
    warehouse: str,
    spark: SparkSession | Callable[[], SparkSession] | None = None,
    tell: Callable[[str], None] | None = None,
) -> Callable[[Stream], AssetStore]:
    """Returns a function that gives the store of each stream and table of a warehouse.

    Args:
        spark: a session, or a function that creates it at first use; None = no call needs one.
        tell: receives a line for each write.
    """
    return lambda node: AssetStore(warehouse, node, spark, tell)
