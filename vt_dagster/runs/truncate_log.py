"""Truncates logs: removes old batches past the ``log_retention`` that no consumer needs any more.

**Removed batches.** Truncation removes whole batches, oldest first, whose ``recorded_at`` is older than
the log retention. System time decides, because reads as of a system time need the log, and because one
record of the far future would advance stream time, and with it the truncation, too far. It keeps
batches that a consumer has not consumed yet or may re-read, by the consumer's own commits and
declaration.

**Order of writes.** For a table, its rows as of the last removed batch are first written as a base,
under a name of their own; then one commit of the log removes the batches and records the truncation
(``storage.rewrite``).
"""

from __future__ import annotations

import posixpath
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from uuid import uuid4

from pyspark.sql import SparkSession

from vt_dagster.columns import PARTITION
from vt_dagster.core.processor_registry import processor_of
from vt_dagster.errors import ConcurrentRunError, StorageError, counted
from vt_dagster.runs.commit_document import next_system_time
from vt_dagster.runs.export import last_export
from vt_dagster.runs.pin import retained_from
from vt_dagster.runs.restate import require_free
from vt_dagster.spark.settings import is_small
from vt_dagster.storage import delta, parquet
from vt_dagster.storage.arrow_reader import asset_names, head_of
from vt_dagster.storage.asset_store import AssetStore
from vt_dagster.storage.commit_log import (
    Checkpoint,
    Commit,
    Offsets,
    Truncation,
    base_path,
    file_before,
    last_that,
)
from vt_dagster.storage.maintenance import KEEP, remove_unused
from vt_dagster.storage.rewrite import replace
from vt_dagster.storage.spark_reader import Head, before
from vt_dagster.topology.durations import in_utc
from vt_dagster.topology.model import Stream, Table, topological

Tell = Callable[[str], None]


@dataclass(frozen=True)
class Consumer:
    """A consumer of a log, and the part of the log that it no longer needs.

    Args:
        done: the consumer has read all records before these offsets.
        back: it may re-read records after this time, epoch microseconds; None = none.
        why: why it holds the log, if its next run alone would not release it.
    """

    name: str
    done: Offsets
    back: int | None = None
    why: str = ""

    def allows(self, document: Mapping[str, Any]) -> bool:
        """Returns whether the log may be truncated up to a commit: the consumer needs no earlier
        batch."""
        taken = all(end <= self.done.get(int(p), 0) for p, end in document["next_offset"].items())
        times = document["stream_time"].values()
        return taken and (self.back is None or max(times, default=self.back) <= self.back)


def truncate_logs(
    warehouse: str,
    spark: SparkSession,
    nodes: Sequence[Stream],
    *,
    exports: Sequence[str] = (),
    keep: timedelta = KEEP,
    now: int | None = None,
    tell: Tell | None = None,
) -> dict[str, int]:
    """Truncates the logs of a topology to their ``log_retention``.

    Records that a consumer has not read remain, also if the consumer is not among the nodes. A consumer
    that may re-read records needs its definition, which says how far back: if that is not among the
    nodes, the log is not truncated.

    Args:
        nodes: the streams and tables, with all their consumers; their inputs are added.
        exports: the directories of exports of logs, for an Iceberg table ``catalog:schema.table``;
            records that are not exported yet remain.
        keep: how long a base is kept after a later truncation has replaced it.
        now: epoch microseconds; None = this machine's clock.
        tell: is called with one line per truncated log and per consumer that prevents a truncation.

    Returns:
        by truncated log, the number of removed records.

    Raises:
        StoreUnavailableError: a store does not answer. Any other failure concerns one log only, and is
            told as a line.
    """
    known, done = topological(nodes), dict[str, int]()
    for node in known:
        if node.log_retention is None:
            continue
        moment = time.time_ns() // 1000 if now is None else now
        one = _Log(str(warehouse), spark, node, known, exports, moment, tell or (lambda _: None))
        try:
            gone = one.truncate(moment - node.log_retention // timedelta(microseconds=1))
        except (ConcurrentRunError, StorageError) as error:
            # A failure concerns this log only: go on with the others.
            one.say(f"{node.name}: its log was not truncated, a later maintenance will: {error}")
            continue
        if gone:
            done["/".join(node.path)] = gone
        one.remove_bases(keep)
    return done


@dataclass(frozen=True)
class _Log:
    warehouse: str
    spark: SparkSession
    node: Stream
    known: Sequence[Stream]
    exports: Sequence[str]
    now: int
    say: Tell

    @property
    def store(self) -> AssetStore:
        return AssetStore(self.warehouse, self.node, self.spark)

    def truncate(self, moment: int) -> int:
        """Removes batches recorded up to a time, epoch microseconds; returns the number of records."""
        head = self.store.catch_up(now=True).head
        if head is None:
            return 0
        old = self._last(moment, ())
        if old is None:
            return 0
        consumers = self._consumers(head.commit)
        for one in consumers:
            if not one.allows({"next_offset": old.next_offset, "stream_time": old.stream_time}):
                self.say(f"{self.node.name}: its log is held for {one.name}{one.why}")
        upto = self._last(moment, consumers)
        if upto is None:
            return 0
        truncation = head.commit.truncation
        gone = upto.total - (0 if truncation is None else sum(truncation.next_offset.values()))
        if gone <= 0:
            return 0
        require_free(self.warehouse, posixpath.join(*self.node.path))
        self._truncate(head, upto)
        self.say(
            f"{self.node.name}: {counted(gone, 'record was', 'records were')} truncated from its log; "
            f"it can be read as known at {in_utc(upto.recorded_at)} or later"
        )
        return gone

    def _last(self, moment: int, consumers: Sequence[Consumer]) -> Commit | None:
        """Returns the last commit that may be removed with all earlier ones."""

        def early(document: dict[str, Any]) -> bool:
            return document["recorded_at"] <= moment and all(one.allows(document) for one in consumers)

        return last_that(self.store.root, early)

    # -- who consumes it -------------------------------------------------------------------------

    def _consumers(self, last: Commit) -> list[Consumer]:
        name, found = self.node.name, list[Consumer]()
        declared = {"/".join(node.path) for node in self.known}
        for node in self.known:
            if name in {up.name for up in processor_of(node).plan().consumed}:
                found.append(self._declared(node, last))
        for other in asset_names(self.warehouse):
            if other in declared:
                continue
            commit = head_of(self.warehouse, other)[1]
            if name not in commit.inputs or commit.logs.get(name, last.log) != last.log:
                continue
            # Only its definition tells what an operator re-reads: without one, it holds the whole log.
            operator = commit.shape.specification
            done = commit.inputs[name] if operator is None else Offsets()
            why = "" if operator is None else ", of which maintenance was not given the definition"
            found.append(Consumer(other, done, why=why))
        for path in self.exports:
            document = last_export(path)
            if document is not None and document.logs.get(name) == last.log:
                found.append(Consumer(path, document.inputs[name]))
        return found

    def _declared(self, node: Stream, last: Commit) -> Consumer:
        head = AssetStore(self.warehouse, node, self.spark).head()
        if head is None:
            return Consumer(node.name, {}, why=", which has never run")
        if head.commit.logs.get(self.node.name, last.log) != last.log:
            return Consumer(node.name, {}, why=", which is made of another log of that name: replay it")
        done = head.commit.inputs.get(self.node.name, {})
        back = retained_from(node, self.node, head.commit, last)
        if back is not None and head.commit.stream_time and self.node.log_retention is not None:
            # A window or grace period may be made longer, up to the log retention.
            micros = self.node.log_retention // timedelta(microseconds=1)
            back = min(back, min(head.commit.stream_time.values()) - micros)
        return Consumer(node.name, done, back)

    # -- the truncation ----------------------------------------------------------------------------

    def _truncate(self, head: Head, upto: Commit) -> None:
        store, attempt = self.store, uuid4().hex
        truncation = Truncation(
            batch=upto.batch,
            recorded_at=upto.recorded_at,
            next_offset=upto.next_offset,
            stream_time=upto.stream_time,
            log_retention=(self.node.log_retention or timedelta(0)) // timedelta(microseconds=1),
            base=attempt if isinstance(self.node, Table) else "",
        )
        with store.planner_settings(is_small(head.commit.total, 0)):
            if isinstance(self.node, Table):
                # Before the commit: after it no other table has the rows of the removed batches.
                self._write_base(store, self.node, head, upto, attempt)
            after = store.successor(
                head,
                attempt,
                f"cut:{attempt}",
                recorded_at=next_system_time(head.commit, max(self.now, head.commit.recorded_at + 1)),
                erased=self._erased(store, head, truncation),
                truncation=truncation,
                upkeep=True,
            )
            self._remove_batches(store, head, after, truncation)
        store.remove_staged_before(head)

    def _write_base(self, store: AssetStore, node: Table, head: Head, upto: Commit, name: str) -> None:
        """Writes a table's rows as of the last removed batch."""
        at = store.as_of(upto.model_copy(update={"truncation": head.commit.truncation}))
        rules = node.version_rules
        document = Checkpoint(
            asset=head.commit.asset,
            batch=upto.batch,
            attempt=name,
            next_offset=upto.next_offset,
            stream_time=upto.stream_time,
            **({} if rules is None else rules.stored()),
            written=time.time_ns() // 1000,
        )
        parquet.write(
            parquet.packed(store.view_at(at), at.total),
            base_path(store.root, name),
            document=document.model_dump(),
            batch=upto.batch,
            asset=f"{head.commit.asset}:base",
        )

    def _erased(self, store: AssetStore, head: Head, truncation: Truncation) -> Offsets:
        """Returns, per partition, how many rows of the kept part have been erased."""
        commit = head.commit
        if not commit.erased:
            return {}
        rows = store.log(truncation.next_offset, head).groupBy(PARTITION).count().collect()
        there = {row[PARTITION]: row["count"] for row in rows}
        kept = {p: end - truncation.next_offset.get(p, 0) for p, end in commit.next_offset.items()}
        return {p: n for p, end in kept.items() if (n := end - there.get(p, 0))}

    def _remove_batches(
        self, store: AssetStore, head: Head, after: Commit, truncation: Truncation
    ) -> None:
        files = delta.files(store.log_path, head.version, _both(truncation))
        rows = parquet.read(self.spark, store.log_path, head.version, _both(truncation))
        replace(
            parquet.packed(
                rows.where(~before(truncation.next_offset)), sum(file.rows for file in files)
            ),
            store.log_path,
            head.version,
            file_before(truncation.next_offset),
            after.model_dump(),
            asset=self.node.name,
            after=head.commit.attempt,
            before=lambda: store.require_staged(after),
        )

    def remove_bases(self, keep: timedelta) -> None:
        """Removes the bases of earlier and killed truncations that are no longer the base of the
        log."""
        head = self.store.head()
        truncation = None if head is None else head.commit.truncation
        needed = () if truncation is None else (truncation.base,)
        remove_unused(base_path(self.store.root, ""), needed, time.time() - keep.total_seconds())


def _both(truncation: Truncation) -> delta.Wanted:
    """Returns a filter for files that may have both removed and kept records."""
    some = file_before(truncation.next_offset)

    def wanted(file: delta.File) -> bool:
        if not some(file) or file.offsets is None or file.partitions is None:
            return some(file)
        low, high = file.partitions
        last = file.offsets[1]
        return not all(last < truncation.next_offset.get(p, 0) for p in range(low, high + 1))

    return wanted
