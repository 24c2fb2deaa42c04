"""Restates an asset and its consumers from a time on: recomputes their results from logs, in place.

**Kept batches.** A log is a chain of batches, and the division of records into runs does not change any
result. So batches that consumed only records from before the time are kept, and runs continue after the
last of them, with the current tables. The result equals a full replay if a replay would give the same
kept batches. Operators without state and without a table do so by construction. For a join with a
versioned table, the plan checks whether a table record for earlier times arrived after the join; if so,
the restatement is refused, because it would miss that record. Operators with state (aggregates,
suppress) and joins with a plain table are replayed from the start: their earlier state is gone, and a
plain table has only current rows.

**Order of writes.** The new logs are written beside the old ones, in a folder of the warehouse; then
they are exchanged, inputs first. The old logs of a versioned table are kept for a while, so that reads
can be compared with them (``storage.stale_reads``). Each step is idempotent, so that a killed
restatement continues where it stopped. Nothing else may run meanwhile.
"""

from __future__ import annotations

import posixpath
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Any
from uuid import uuid4

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from vt_dagster.columns import OFFSET, PARTITION
from vt_dagster.core.arrival_order import by_partition
from vt_dagster.errors import SourceError, StorageError
from vt_dagster.runs.replay import as_far_as
from vt_dagster.runs.restate_plan import Plan, Planner, Step, path_of
from vt_dagster.runs.run import run_once
from vt_dagster.storage import delta, parquet
from vt_dagster.storage.asset_store import AssetStore
from vt_dagster.storage.commit_log import Checkpoint, Commit
from vt_dagster.storage.stale_reads import put_aside
from vt_dagster.topology.durations import in_utc, parse_time
from vt_dagster.topology.model import Stream, topological

Tell = Callable[[str], None]
_PLAN, _READY = "plan.json", "ready"
_BESIDE, _OLD = "new", "old"


def restate(
    warehouse: str,
    node: Stream,
    start: datetime | str,
    spark: SparkSession,
    among: Sequence[Stream] = (),
    tell: Tell | None = None,
) -> list[str]:
    """Recomputes the results of an asset and of all its consumers from a time on, in place.

    The result equals a full replay of each asset: records in the same order, and the same set of
    buffered records. The logs are new ones: a consumer that is not among the definitions would refuse
    its next run. Nothing else may run meanwhile. To complete an interrupted restatement, call again
    with the same arguments.

    Args:
        start: first time to process again (inclusive; UTC if it has no offset).
        among: the streams and tables that may consume the asset.
        tell: is called with one line per kept log and per run.

    Returns:
        the names of all recomputed assets, inputs first.

    Raises:
        StorageError: the asset has never run; the history of a looked-up table is too short; records
            for times before ``start`` would be missed; or a consumer is not in ``among``.
        SourceError: the source no longer has the records.
    """
    moment = parse_time(start if isinstance(start, str) else start.isoformat())
    return _Restatement(str(warehouse), node, moment, spark, among, tell).run()


class _Restatement:
    def __init__(
        self,
        warehouse: str,
        node: Stream,
        moment: int,
        spark: SparkSession,
        among: Sequence[Stream],
        tell: Tell | None,
    ) -> None:
        self.warehouse, self.node, self.moment, self.spark = warehouse, node, moment, spark
        self.nodes = topological([node, *among])
        self.say = tell or (lambda _: None)
        self.place = posixpath.join(warehouse, f"{'.'.join(node.path)}.restate")
        self.fs, self.root = delta.filesystem(self.place)

    def run(self) -> list[str]:
        plan = self._plan()
        if not plan.steps:
            self.say(f"{self.node.name}: no records from {in_utc(self.moment)} on: nothing to do")
            return []
        made = {step.path for step in plan.steps}
        steps = [(step, next(n for n in self.nodes if path_of(n) == step.path)) for step in plan.steps]
        if not self._exists(_READY):
            for step, node in steps:
                self._build(step, node, made)
            self.fs.touch(posixpath.join(self.root, _READY))
        for step in plan.steps:
            self._exchange(step.path)
        for step, node in steps:
            old = posixpath.join(self.root, _OLD, step.path)
            if node.versioned and self.fs.exists(old):
                put_aside(self.warehouse, step.path, old)
        # The plan goes first: without it, the next call removes the folder as garbage.
        self.fs.rm_file(posixpath.join(self.root, _PLAN))
        self.fs.rm(self.root, recursive=True)
        return [node.name for _, node in steps]

    def _exists(self, *parts: str) -> bool:
        return self.fs.exists(posixpath.join(self.root, *parts))

    def _live(self, node: Stream) -> AssetStore:
        return AssetStore(self.warehouse, node, self.spark, self.say)

    def _beside(self, node: Stream) -> AssetStore:
        return AssetStore(posixpath.join(self.place, _BESIDE), node, self.spark, self.say)

    # -- plan ------------------------------------------------------------------------------------

    def _plan(self) -> Plan:
        place = posixpath.join(self.root, _PLAN)
        if self.fs.exists(place):
            plan = Plan.model_validate_json(self.fs.cat_file(place))
            missing = {step.path for step in plan.steps} - {path_of(n) for n in self.nodes}
            if plan.start != self.moment or missing:
                raise StorageError(
                    f"{self.node.name}: a restatement from {in_utc(plan.start)} was interrupted, of "
                    f"{[step.path for step in plan.steps]}; complete it first: run it again with the "
                    "same time and definitions"
                )
            self.say(f"{self.node.name}: continues an interrupted restatement")
            return plan
        if self.fs.exists(self.root):
            self.fs.rm(self.root, recursive=True)
        planner = Planner(self.warehouse, self.node, self.moment, self.spark, self.nodes, self.say)
        plan = planner.plan()
        if not plan.steps:
            return plan
        self.fs.makedirs(self.root, exist_ok=True)
        self.fs.pipe_file(f"{place}.part", plan.model_dump_json().encode())
        self.fs.mv(f"{place}.part", place)
        return plan

    # -- build -----------------------------------------------------------------------------------

    def _build(self, step: Step, node: Stream, made: set[str]) -> None:
        """Writes the new tables of one asset, or continues an interrupted attempt."""
        whose = f"restate:{self.node.name}"

        def stores(of: Stream) -> AssetStore:
            return self._beside(of) if path_of(of) in made else self._live(of)

        new = stores(node)
        if step.keep is not None and new.head() is None:
            self._begin(step.keep, node, new, made, whose)
        asked = dict[str, Any]()
        if node.operator is None:
            head = self._live(node).head()
            assert head is not None
            asked = as_far_as(node.source, head.commit)
        while run_once(node, stores, run_id=whose, **asked).commit is not None:
            pass
        done = new.head()
        found = 0 if done is None else done.commit.totals.get("in", 0)
        if found < step.taken:
            self.fs.rm(self.root, recursive=True)  # start again: returning files must be read in order
            raise SourceError(
                f"{node.name}: expected the {step.taken:,} records of its source that its log was made "
                f"of, got {found:,}: the others no longer exist and would be missing in the new "
                "log. Put them back and run it again, or restate only the assets derived from it"
            )

    def _begin(self, keep: Commit, node: Stream, new: AssetStore, made: set[str], whose: str) -> None:
        """Writes the kept rows as one commit, with the positions of the last kept batch."""
        live = self._live(node)
        head = live.head()
        assert head is not None
        logs, consumed = dict(keep.logs), dict(keep.consumed)
        for up in node.inputs:
            there = self._beside(up).head() if path_of(up) in made else None
            if there is not None:
                logs[up.name] = there.commit.log
                consumed.pop(up.name, None)
        name = uuid4().hex
        more: dict[str, Any] = {
            "log": name,
            "attempt": name,
            "logs": logs,
            "consumed": consumed,
            "previous": "",
            "staged": {},
            "run_id": whose,
            "rejected": False,
        }
        rows: DataFrame = live.log({}, head)
        kept = F.col(OFFSET) < F.coalesce(by_partition(keep.next_offset, "long"), F.lit(0))
        rows = rows.where(kept)
        if head.commit.erased:
            there = {r[PARTITION]: r["count"] for r in rows.groupBy(PARTITION).count().collect()}
            gone = {p: end - there.get(p, 0) for p, end in keep.next_offset.items()}
            more |= {"erased": gone, "erased_before": keep.next_offset}
        parquet.write(
            parquet.packed(rows, keep.total),
            new.log_path,
            document=keep.model_copy(update=more).model_dump(),
            batch=keep.batch,
            asset=node.name,
        )
        told = live.quarantine()
        if told is not None:  # keep the rejected records of the kept batches
            parquet.write(
                told.where(F.col("batch") <= keep.batch),
                new.quarantine_path,
                document=Checkpoint(asset=node.name, batch=keep.batch, attempt=name).model_dump(),
                batch=keep.batch,
                asset=node.name,
            )

    # -- exchange --------------------------------------------------------------------------------

    def _exchange(self, path: str) -> None:
        """Replaces the old tables of an asset by the new ones, unless that is done."""
        new, old = posixpath.join(self.root, _BESIDE, path), posixpath.join(self.root, _OLD, path)
        live = posixpath.join(delta.filesystem(self.warehouse)[1], path)
        if not self.fs.exists(new):
            return
        if not self.fs.exists(old):
            self.fs.makedirs(posixpath.dirname(old), exist_ok=True)
            self.say(f"{path}: replaces the old tables by the new ones")
            self.fs.mv(live, old, recursive=True)
        elif self.fs.exists(live):
            raise StorageError(
                f"{path}: expected that nothing runs while it is restated, but somebody has written to "
                f"{live} between its old tables and the new ones; move that away and run it again"
            )
        self.fs.mv(new, live, recursive=True)
