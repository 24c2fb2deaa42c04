"""Erases a key from an asset, from assets derived from it under that key, and from exports.

**Rows of the key.** Its log rows are removed, and the commit counts the missing rows (``erased``).
Offsets of all other rows, stream times and system times do not change: positions of consumers remain
valid, and no answer for another key changes. A placeholder row would need a key of its own, and every
operator would have to handle it. If a table with another key has the erased key among its values, its
row becomes a tombstone, because the versions of that other key must not change.

**Order of writes.** Inputs first, each table in one commit that is a batch of its own: a run that
started earlier is refused. Each step is idempotent, and the certificate counts the work of each, so
that the same call completes a killed erase.
"""

from __future__ import annotations

import contextlib
import posixpath
import time
from collections.abc import Sequence
from datetime import timedelta
from uuid import uuid4

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from vt_dagster.columns import OFFSET, TIMESTAMP
from vt_dagster.core.arrival_order import Outcome, by_partition
from vt_dagster.core.log_columns import log_schema
from vt_dagster.core.processor_registry import processor_of
from vt_dagster.errors import ConcurrentRunError, StorageError
from vt_dagster.runs.commit_document import next_system_time
from vt_dagster.runs.erase_certificate import Certificate, Searched, begun, elsewhere, unwritten
from vt_dagster.runs.erase_dry_run import Tell, erase_dry_run
from vt_dagster.runs.erase_plan import (
    KEPT,
    KEPT_EXPORT,
    Places,
    derived,
    exported,
    key_of,
    require_free,
)
from vt_dagster.runs.erase_residuals import erase_residuals, in_statistics
from vt_dagster.runs.erased_validity import erasures
from vt_dagster.storage import delta, erase_files
from vt_dagster.storage.asset_store import AssetStore
from vt_dagster.storage.commit_log import Checkpoint, Commit
from vt_dagster.storage.delta import address
from vt_dagster.storage.erase_files import Found, Marked
from vt_dagster.storage.log_truncation import bases_of
from vt_dagster.storage.maintenance import is_older
from vt_dagster.storage.spark_reader import Head
from vt_dagster.storage.stale_reads import forget_replaced
from vt_dagster.storage.view import stored_as
from vt_dagster.topology.model import Stream, Table, VersionedTable

_ROWS = "rows_erased"
"""Name of the count of erased rows in the commit of an erase."""


def erase(
    warehouse: str,
    node: Stream,
    spark: SparkSession,
    *,
    reason: str = "",
    key: Sequence[object] | None = None,
    where: str | None = None,
    among: Sequence[Stream] = (),
    exports: Sequence[str] = (),
    tell: Tell | None = None,
    runs: Sequence[str] | None = None,
    dry_run: bool = False,
) -> Certificate:
    """Removes a key from an asset, from assets derived from it under that key, and from exports.

    Erases from logs, views, ``old``, states, attempts and quarantine. Files and commits that had the
    key are removed at once, so that no older version can be read. Aggregates under another key keep
    what they have counted. Run nothing else meanwhile: a concurrent run, or the erase, is refused. To
    complete an interrupted erase, call again with the same arguments.

    Args:
        reason: is written into the certificate, so it must not contain the key. A dry run needs none.
        key: the values of the key columns, also as texts; None = ``where`` alone selects the keys.
        where: a SQL condition over the key columns; quarantined records are searched by ``key`` only.
        among: the streams and tables that may consume the asset.
        exports: the directories of exports of any of these (``build_export``).
        tell: is called with one line per result.
        runs: ids of the Dagster runs whose events have the key (``runs_with``); None = not searched.
        dry_run: changes nothing and reports what an erase would remove: see ``runs.erase_dry_run``.

    Returns:
        the certificate, which is also in the warehouse, in ``erased.certificates/``. The certificate of
        a dry run is not written, and not ``finished``.

    Raises:
        StorageError: the asset has never run or has no such key; an asset that consumes it is not in
            ``among``; a restatement is in progress.
        ConcurrentRunError: another run committed meanwhile. Run the erase again.
    """
    exports = [*map(address, exports)]
    asked = address(warehouse), node, spark, reason, key, where, among, exports, tell, runs
    return _Erase(*asked, dry_run).run()


class _Erase:
    def __init__(
        self,
        warehouse: str,
        node: Stream,
        spark: SparkSession,
        reason: str,
        key: Sequence[object] | None,
        where: str | None,
        among: Sequence[Stream],
        exports: Sequence[str],
        tell: Tell | None,
        runs: Sequence[str] | None,
        dry_run: bool,
    ) -> None:
        self.warehouse, self.node, self.spark, self.runs = warehouse, node, spark, runs
        self.say = tell or (lambda _: None)
        self.dry_run = dry_run
        if not dry_run and not reason.strip():
            raise StorageError("expected a reason for the erase, got none; give one, without the key")
        self.key = key_of(AssetStore(warehouse, node, spark), key, where)
        self.plan = derived(warehouse, node, [node, *among])
        for one in self.plan:
            require_free(warehouse, one.node)
        self.exports = {path: exported(self.plan, path) for path in exports}
        name = posixpath.join(*node.path)
        asked = [name, self.key.values, where]
        self.done = unwritten(name, asked, reason) if dry_run else begun(warehouse, name, asked, reason)

    def run(self) -> Certificate:
        left = dict[str, DataFrame]()
        if self.dry_run:
            look = self.warehouse, self.spark, self.key, self.plan, self.exports
            left = erase_dry_run(*look, self.done, self.say)
        else:
            self._erase()
        self.done.elsewhere = elsewhere(self.warehouse, self.key, self.spark, left)
        self.done.unreachable = erase_residuals(
            self.warehouse, self.plan, self.key, self.spark, self.runs
        )
        if not self.dry_run:
            self.done.waiting = {}
            self.done.finish()
        for line in (*self.done.elsewhere, *self.done.unreachable):
            self.say(f"! {line}")
        return self.done

    def _erase(self) -> None:
        for one in self.plan:
            if not one.columns:
                self.done.kept[one.name] = KEPT
                continue
            self._asset(one)
        for path, one in self.exports.items():
            self._export(path, one)

    # -- an asset --------------------------------------------------------------------------------

    def _asset(self, one: Places) -> None:
        store = AssetStore(self.warehouse, one.node, self.spark, None)
        store.catch_up(now=True)
        head = store.head()
        if head is None:
            return
        marked = one.marked(self.key)
        self._note_waiting(store, head, marked)
        after = self._log(store, head, one, marked)
        committed = time.time()
        bases = bases_of(store.root)
        for path in (store.view_path, *bases) if isinstance(one.node, Table) else ():
            if delta.exists(path):
                self._view(store, path, after, one, marked)
        # An operator's quarantine has offsets of records only, no values.
        of_source = one.node is self.node and one.node.operator is None
        if of_source and delta.exists(store.quarantine_path) and self.key.values:
            self._quarantine(store, after)
        removed = _forget_attempts(store, committed)
        for path in (store.log_path, store.view_path, *bases, store.quarantine_path):
            if delta.exists(path):
                removed += self._purge(path, after.batch, one)
        forget_replaced(self.warehouse, one.name, timedelta(0))
        self.done.files_removed += removed
        self.done.save()

    def _log(self, store: AssetStore, head: Head, one: Places, marked: Marked) -> Commit:
        found = erase_files.find(self.spark, store.log_path, head.version, marked, log_schema(one.node))
        attempt, commit = store.new_attempt(), head.commit
        try:
            self._stage(store, head, one, marked, attempt)
        except StorageError:
            now = store.head()
            if now is None or now.commit.batch == commit.batch:
                raise
            raise ConcurrentRunError(
                f"{one.name}: expected that nothing runs while a key is erased, but batch "
                f"{now.commit.batch} was committed meanwhile; stop other runs and run the erase again"
            ) from None
        after = self._after(commit, attempt, one, found)
        after.staged, after.erasures = store.staged(attempt), erasures(store, head, marked, found)
        # An earlier attempt was killed between its commit and the certificate: count its rows too.
        again = commit.run_id == after.run_id and f"{one.name}/log" not in self.done.searched
        before = commit.counts.get(_ROWS, 0) if again else 0
        after.counts[_ROWS] = found.rows + before
        erase_files.rewrite(
            self.spark,
            store.log_path,
            head.version,
            found,
            marked,
            one.way_of_log,
            one.values,
            document=after.model_dump(),
            asset=one.node.name,
        )
        found.rows += before
        self._tell(f"{one.name}/log", found)
        return after

    def _stage(self, store: AssetStore, head: Head, one: Places, marked: Marked, attempt: str) -> None:
        """Stages the last run's state and consumed files for the next run, without the key."""
        state = store.state(head)
        if state is not None:
            hit = marked(store.log({}, head)).where("_hit")
            state = processor_of(one.node).state_after_erase(state, hit)
            if {*one.columns.values()} <= {*state.columns}:
                state = erase_files.without(state, marked)
            store.stage_state(attempt, state)
        if head.commit.files:
            store.stage_files(attempt, store.consumed_files(head))

    def _after(self, commit: Commit, attempt: str, one: Places, found: Found) -> Commit:
        """Returns the commit of the erase: the last commit's positions, and the erased rows."""
        gone = found.by_partition if one.way_of_log == "remove" else {}
        counts, totals = dict.fromkeys(commit.counts, 0), dict(commit.totals)
        waiting = commit.counts.get(Outcome.WAITING, 0)
        run_id = f"erase:{self.done.id}"
        told = 0 if commit.run_id == run_id else self.done.waiting.get(one.name, 0)
        lost = min(waiting, told)
        if waiting:
            counts[Outcome.WAITING] = waiting - lost
        if lost:
            totals[Outcome.WAITING] = totals.get(Outcome.WAITING, 0) - lost
            totals["in"] = totals.get("in", 0) - lost
            totals["erased"] = totals.get("erased", 0) + lost
        ends = {p: commit.next_offset.get(p, 0) for p in gone}
        update = {
            "batch": commit.batch + 1,
            "attempt": attempt,
            "previous": "",  # its attempt had rows of the key and is removed
            "run_id": run_id,
            # If the source provides system times, the erase must not be recorded before later ones.
            "recorded_at": next_system_time(commit, commit.recorded_at if commit.stepped else None),
            "steps": [],
            "taken": {},
            "gaps": {},
            "rejected": False,
            "upkeep": False,
            "counts": counts,
            "totals": totals,
            "erased": {p: commit.erased.get(p, 0) + gone.get(p, 0) for p in {*commit.erased, *gone}},
            "erased_before": {**commit.erased_before, **ends},
        }
        return commit.model_copy(update=update)

    def _note_waiting(self, store: AssetStore, head: Head, marked: Marked) -> None:
        """Counts erased records that joins still buffer, so that the joins' record counts add up."""
        for other in self.plan:
            there = AssetStore(self.warehouse, other.node, self.spark).head()
            if (
                there is None
                or not there.commit.counts.get(Outcome.WAITING)
                or not there.commit.emitted_up_to
            ):
                continue
            taken = there.commit.inputs.get(store.node.name)
            if taken is None:
                continue
            out = by_partition(there.commit.emitted_up_to, "long")
            waits = F.coalesce(F.unix_micros(TIMESTAMP) > out, F.lit(True))
            ours = F.col(OFFSET) < F.coalesce(by_partition(taken, "long"), F.lit(0))
            count = marked(store.log({}, head)).where("_hit").where(waits & ours).count()
            if count:
                self.done.waiting[other.name] = count
                self.done.save()

    def _view(self, store: AssetStore, path: str, after: Commit, one: Places, marked: Marked) -> None:
        there = delta.last_commit(path)
        assert there is not None
        like = stored_as(one.node, store.log_path)
        found = erase_files.find(self.spark, path, there.version, marked, like)
        of_base = path != store.view_path
        if found.places:
            then = Checkpoint.model_validate(there.document)
            about = {"batch": after.batch, "attempt": uuid4().hex, "log_attempt": after.attempt}
            about |= {"written": int(time.time() * 1e6)}
            erase_files.rewrite(
                self.spark,
                path,
                there.version,
                found,
                marked,
                one.way_of_view,
                one.values,
                document=then.model_copy(update=about).model_dump(),
                asset=f"{one.node.name}:{'base' if of_base else 'view'}",
                parted=isinstance(one.node, VersionedTable) and not of_base,
            )
        self._tell(f"{one.name}/{'base' if of_base else 'view'}", found)

    def _quarantine(self, store: AssetStore, after: Commit) -> None:
        there = delta.last_commit(store.quarantine_path)
        assert there is not None
        found = erase_files.find(self.spark, store.quarantine_path, there.version, self.key.in_text)
        if found.places:
            then = Checkpoint.model_validate(there.document)
            rows = store.quarantine()
            assert rows is not None
            hits = self.key.in_text(rows).where("_hit").groupBy("reason").count().collect()
            erased = dict(then.erased)
            for row in hits:
                erased[row["reason"]] = erased.get(row["reason"], 0) + row["count"]
            about = {"batch": after.batch, "attempt": after.attempt, "erased": erased}
            erase_files.rewrite(
                self.spark,
                store.quarantine_path,
                there.version,
                found,
                self.key.in_text,
                "remove",
                (),
                document=then.model_copy(update=about).model_dump(),
                asset=store.node.name,
            )
        self._tell(f"{posixpath.join(*store.node.path)}/quarantine", found)

    # -- an export -------------------------------------------------------------------------------

    def _export(self, path: str, one: Places) -> None:
        there = delta.last_commit(path)
        assert there is not None
        if not one.in_export(path):
            self.done.kept[path] = KEPT_EXPORT
            return
        marked = one.marked(self.key)
        found = erase_files.find(self.spark, path, there.version, marked)
        then = Commit.model_validate(there.document)
        about = {
            "batch": then.batch + 1,
            "attempt": uuid4().hex,
            "run_id": f"erase:{self.done.id}",
            "taken": {},
            "counts": {"in": 0},
        }
        erase_files.rewrite(
            self.spark,
            path,
            there.version,
            found,
            marked,
            "remove",
            (),
            document=then.model_copy(update=about).model_dump(),
            asset=then.asset,
        )
        self._tell(path, found)
        self.done.files_removed += self._purge(path, then.batch + 1, one)
        self.done.save()

    def _purge(self, path: str, batch: int, one: Places) -> int:
        removed = erase_files.purge(path, batch)
        columns = {} if path.endswith("/quarantine") else one.columns
        left = in_statistics(self.spark, path, self.key, columns)
        self.done.statistics[path.removeprefix(f"{self.warehouse.rstrip('/')}/")] = left
        return removed

    def _tell(self, table: str, found: Found) -> None:
        told = Searched(found.searched, found.rows, found.old, found.version, len(found.places))
        self.done.add(table, told)
        self.say(f"{table}: {told}")


def _forget_attempts(store: AssetStore, until: float) -> int:
    """Removes staged files of earlier runs, except those of the last commit, which the next run needs.

    Args:
        until: time of the erase's commit, epoch seconds; attempts staged later are kept.
    """
    head = store.head()
    assert head is not None
    fs, attempts = delta.filesystem(posixpath.join(store.root, "attempts"))
    removed = 0
    if not fs.exists(attempts):
        return 0
    for path in fs.ls(attempts, detail=False, refresh=True):
        name = posixpath.basename(path.rstrip("/"))
        age = timedelta(seconds=max(0.0, time.time() - until))
        if name != head.commit.attempt and is_older(posixpath.join(store.root, "attempts", name), age):
            with contextlib.suppress(FileNotFoundError):
                removed += sum(name.endswith(".parquet") for name in fs.find(path))
                fs.rm(path, recursive=True)
    return removed
