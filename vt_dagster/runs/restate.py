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
can be compared with them (``storage.stale_reads``). A killed restatement goes on as
``storage.rewrite`` says. Nothing else may run meanwhile.
"""

from __future__ import annotations

import posixpath
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any
from uuid import uuid4

from pydantic import BaseModel, Field
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from vt_dagster.columns import OFFSET, PARTITION, TIMESTAMP
from vt_dagster.core.processor_registry import processor_of
from vt_dagster.errors import RecordsGoneError, SourceError, StorageError, counted
from vt_dagster.runs.plan import require_restatable
from vt_dagster.runs.replay import (
    erased_keys_warning,
    lost_records,
    repeat_runs,
    repeatable,
    require_history,
    require_inputs,
    require_kept,
    require_logs,
)
from vt_dagster.sources.frame_sources import FrameSource
from vt_dagster.sources.kafka_source import KafkaSource
from vt_dagster.storage import delta, parquet
from vt_dagster.storage.arrow_reader import RESTATED, asset_names, head_of, restate_folder
from vt_dagster.storage.asset_store import AssetStore
from vt_dagster.storage.commit_log import (
    Checkpoint,
    Commit,
    Offsets,
    commits_read,
    require_not_truncated,
)
from vt_dagster.storage.rewrite import Intent, exchange
from vt_dagster.storage.spark_reader import before
from vt_dagster.storage.stale_reads import put_aside
from vt_dagster.topology.durations import in_utc, parse_time
from vt_dagster.topology.model import Stream, VersionedTable, derived_from, topological

_EVER = 1 << 62
"""A time after all others, epoch microseconds."""


class Step(BaseModel):
    """The plan for one asset.

    Args:
        path: its folder in the warehouse.
        keep: the last kept commit of its log; None = none is kept.
        why: the reason why none is kept.
    """

    path: str
    keep: Commit | None = None
    why: str = ""


class Plan(Intent):
    """The steps of a restatement, inputs first."""

    start: int
    steps: list[Step] = Field(default_factory=list[Step])


Tell = Callable[[str], None]
_PLAN, _READY = "plan.json", "ready"
_BESIDE = "new"


def restate(
    warehouse: str,
    node: Stream,
    start: datetime | str,
    spark: SparkSession,
    among: Sequence[Stream] = (),
    tell: Tell | None = None,
    *,
    dry_run: bool = False,
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
        dry_run: only plans: reports what each log would keep, and changes nothing.

    Returns:
        the names of all recomputed assets, inputs first; with ``dry_run`` of those that would be.

    Raises:
        StorageError: the asset has never run; a run of it or of a consumer is refused; the history of a
            looked-up table is too short; records for times before ``start`` would be missed; a consumer
            is not in ``among``; or a consumer is a join with ``as_known``.
        SourceError: the source no longer has the records.
    """
    moment = parse_time(start if isinstance(start, str) else start.isoformat())
    nodes, say = topological([node, *among]), tell or (lambda _: None)
    restatement = _Restatement(str(warehouse), node, moment, spark, nodes, say)
    return restatement.names(restatement.plan()) if dry_run else restatement.run()


@dataclass
class _Restatement:
    """A restatement.

    Args:
        node: the asset to restate.
        moment: first time to process again, inclusive, epoch microseconds.
        nodes: all known streams and tables, inputs first.
        say: is called with one line per asset and per run.
    """

    warehouse: str
    node: Stream
    moment: int
    spark: SparkSession
    nodes: Sequence[Stream]
    say: Tell

    def __post_init__(self) -> None:
        self.place = posixpath.join(self.warehouse, restate_folder(self.node.path))
        self.fs, self.root = delta.filesystem(self.place)

    def run(self) -> list[str]:
        plan = self.plan()
        if not plan.path and self.fs.exists(self.root):
            self.fs.rm(self.root, recursive=True)  # of a restatement that was killed at its very end
        if not plan.steps:
            return []
        plan.save(plan.path or posixpath.join(self.place, _PLAN))
        made = {step.path for step in plan.steps}
        steps = [(step, next(n for n in self.nodes if path_of(n) == step.path)) for step in plan.steps]
        if not self.fs.exists(posixpath.join(self.root, _READY)):
            for step, node in steps:
                self._build(step, node, made)
            self.fs.touch(posixpath.join(self.root, _READY))
        for step in plan.steps:
            live = posixpath.join(delta.filesystem(self.warehouse)[1], step.path)
            new, old = (posixpath.join(self.root, of, step.path) for of in (_BESIDE, RESTATED))
            if self.fs.exists(new) and not self.fs.exists(old):
                self.say(f"{step.path}: replaces the old tables by the new ones")
            exchange(self.fs, live, new, old)
        for step, node in steps:
            old = posixpath.join(self.root, RESTATED, step.path)
            if node.versioned and self.fs.exists(old):
                put_aside(self.warehouse, step.path, old)
        # The plan goes first: without it, the next call removes the folder as garbage.
        self.fs.rm_file(posixpath.join(self.root, _PLAN))
        self.fs.rm(self.root, recursive=True)
        return self.names(plan)

    def names(self, plan: Plan) -> list[str]:
        """Returns the names of the assets that a plan recomputes, inputs first."""
        names = {path_of(node): node.name for node in self.nodes}
        return [names[step.path] for step in plan.steps]

    def _live(self, node: Stream) -> AssetStore:
        return AssetStore(self.warehouse, node, self.spark, self.say)

    def _beside(self, node: Stream) -> AssetStore:
        return AssetStore(posixpath.join(self.place, _BESIDE), node, self.spark, self.say)

    # -- plan ------------------------------------------------------------------------------------

    def plan(self) -> Plan:
        """Returns the plan of an interrupted restatement, or a new one. Writes nothing."""
        plan = Plan.read(posixpath.join(self.place, _PLAN))
        if plan is not None:
            missing = {step.path for step in plan.steps} - {path_of(n) for n in self.nodes}
            if plan.start != self.moment or missing:
                raise StorageError(
                    f"{self.node.name}: a restatement from {in_utc(plan.start)} was interrupted, of "
                    f"{[step.path for step in plan.steps]}; complete that one first: run it again with "
                    "the same time and definitions"
                )
            self.say(f"{self.node.name}: continues an interrupted restatement")
            return plan
        plan = self._new_plan()  # first, since its errors name what a restatement can do
        require_restatable(self.warehouse, self.node, self.nodes)
        if not plan.steps:
            self.say(f"{self.node.name}: no records from {in_utc(self.moment)} on: nothing to do")
        return plan

    def _new_plan(self) -> Plan:
        """Returns a plan; it has no steps if no record is from the time on."""
        plan = Plan(start=self.moment)
        for node in derived_from(self.node, self.nodes):
            require_free(self.warehouse, path_of(node), restate_folder(self.node.path))
        for node in self.nodes:
            if node.name == self.node.name or self._consumes(node, plan):
                step = self._step(node, plan)
                if step is not None:
                    plan.steps.append(step)
        if plan.steps:
            self._require_all(plan)
        return plan

    def _consumes(self, node: Stream, plan: Plan) -> bool:
        return not {path_of(up) for up in node.inputs}.isdisjoint(step.path for step in plan.steps)

    def _step(self, node: Stream, plan: Plan) -> Step | None:
        """Returns the step of one asset; None if it has never run or all its results are kept."""
        head = self._live(node).head()
        if head is None:
            if node.name != self.node.name:
                return None
            raise StorageError(
                f"{node.name}: nothing was ever committed, so there is nothing to restate; run it first"
            )
        if node.operator is None:
            if isinstance(node.source, FrameSource):
                raise SourceError(
                    f"{node.name}: expected records that can be read again, got "
                    f"{node.source.describe()}, which are not stored. Restate only the assets derived "
                    "from it; to rebuild it, declare it under another name and materialize that asset"
                )
            repeatable(node).require_same(self._live(node))
            if warning := erased_keys_warning(self._live(node)):
                self.say(warning)
            return Step(path=path_of(node), why="its source is read again")
        require_inputs(node, self._live)
        self._require_known(node, plan)
        keep, why = self._kept(node, head.commit, plan)
        self._require_logs(node, head.commit, keep, plan)
        if keep is not None and keep.batch == head.commit.batch and not plan.steps:
            return None
        longer = "Give a later time, or lengthen the history_retention of the table first"
        require_history(node, self._live, keep, longer)
        if keep is not None:
            self._require_nothing_earlier(node, keep)
        of = counted(head.commit.total, "result")
        what = f"keeps {keep.total:,} of {of}" if keep else f"replayed: {why}"
        self.say(f"{node.name}: {what}")
        return Step(path=path_of(node), keep=keep, why=why)

    def _require_known(self, node: Stream, plan: Plan) -> None:
        """Refuses a join with ``as_known`` if one of its inputs is restated: the new rows of that input
        get the system time of the restatement, so no earlier record could have known them."""
        made = {step.path for step in plan.steps}
        again = [up.name for up in node.inputs if path_of(up) in made]
        if again and processor_of(node).plan().uses_system_time:
            raise StorageError(
                f"{node.name}: expected no restated input, because it is a join with as_known, and the "
                f"rows of a restated log get the current system time, got {again[0]}. Instead, replay "
                f"{again[0]} (vt-dagster replay, which keeps the system times of topics and files), "
                "compare and swap"
            )

    def _kept(self, node: Stream, last: Commit, plan: Plan) -> tuple[Commit | None, str]:
        """Returns the last commit up to which a replay gives the same log, or None and why."""
        run_plan, done = processor_of(node).plan(), {step.path: step for step in plan.steps}
        table = run_plan.looked_up
        if last.state:
            return None, "it has a state, and only that of its last run is kept"
        if node.changed_definition(last.shape.specification):
            return None, "its declaration has changed"
        if table is not None and not isinstance(table, VersionedTable):
            return None, f"{table.name} has only current rows"
        if table is not None and path_of(table) in done:
            return None, f"{table.name} is recomputed"
        limits = dict[str, Offsets]()
        for up in run_plan.consumed:
            step = done.get(path_of(up))
            if step is not None:
                limits[up.name] = {} if step.keep is None else step.keep.next_offset
            if table is not None or node.name == self.node.name:
                ends = self._first_after(up)
                limits[up.name] = _least(ends, limits.get(up.name, ends))
        # Newest first: the first match keeps the most results.
        for found in delta.commits(self._live(node).log_path):
            commit = Commit.model_validate(found.document)
            if commit.log != last.log or commit.state:
                break
            if all(_ends_within(commit.inputs.get(name, {}), ends) for name, ends in limits.items()):
                return commit, ""
        return None, "no batch with only older records is kept in its commit log"

    def _first_after(self, up: Stream) -> Offsets:
        """Returns, per partition, the offset of the first record from the time on, or the log's end."""
        store = self._live(up)
        head = store.head()
        if head is None:
            return {}
        later = store.log({}, head).where(F.col(TIMESTAMP) >= F.timestamp_micros(F.lit(self.moment)))
        found = later.groupBy(PARTITION).agg(F.min(OFFSET)).collect()
        return {**head.commit.next_offset, **{row[0]: row[1] for row in found}}

    def _require_logs(self, node: Stream, last: Commit, keep: Commit | None, plan: Plan) -> None:
        """Refuses a restatement if a log to read again, or to keep, has been truncated."""
        made = {step.path for step in plan.steps}
        ups = [up for up in processor_of(node).plan().consumed if path_of(up) not in made]
        require_logs(node, ups, self._live, keep)
        if keep is not None and last.truncation is not None:
            raise StorageError(
                f"{node.name}: expected its whole log, because a restatement keeps the results from "
                f"before {in_utc(self.moment)}, but {last.truncation.description()}: replay it "
                "under another name, and swap"
            )

    def _require_nothing_earlier(self, node: Stream, keep: Commit) -> None:
        """Refuses to keep results that a replay would change, because a matching record of the table
        arrived after the join."""
        plan = processor_of(node).plan()
        table, consumed = plan.looked_up, {up.name for up in plan.consumed}
        if not isinstance(table, VersionedTable) or table.name in consumed:
            return  # a join that consumes the table's log corrects its own results
        store = self._live(table)
        head = store.head()
        if head is None:
            return
        path = self._live(node).log_path
        every = (Commit.model_validate(one.document) for one in delta.commits(path))
        runs = [one for one in every if one.batch <= keep.batch and one.emitted_up_to]
        read = commits_read(store.root, table.name, head.commit.log, runs)
        unknown = sum(not known for _, known in read)
        joined: list[tuple[int, int, int]] = []
        for run, (then, _) in zip(runs, read, strict=True):
            ends = {} if then is None else then.next_offset
            upto = max(run.emitted_up_to.values())
            reach = plan.lookup_reach
            upto = _EVER if reach is None else upto + reach // timedelta(microseconds=1)
            joined += [(p, ends.get(p, 0), upto) for p in head.commit.next_offset]
        if unknown:
            self.say(
                f"! {node.name}: the versions of {table.name} that "
                f"{counted(unknown, 'batch', 'batches')} read are gone: its state then is taken from "
                "recorded_at"
            )
        if not joined:
            return
        for ends in (dict([one[:2]]) for one in joined):
            require_not_truncated(
                node.name, table.name, {**head.commit.next_offset, **ends}, head.commit
            )
        cases = self.spark.createDataFrame(joined, "at_partition int, first long, upto long")
        late = store.log({}, head).join(
            F.broadcast(cases),
            (F.col("at_partition") == F.col(PARTITION))
            & (F.col(OFFSET) >= F.col("first"))
            & (F.unix_micros(TIMESTAMP) <= F.col("upto")),
            "left_semi",
        )
        horizon = table.version_rules.horizon(head.commit.stream_time)
        late = late.where(F.unix_micros(TIMESTAMP) >= F.lit(horizon))
        count, first = late.agg(F.count("*"), F.min(F.unix_micros(TIMESTAMP))).collect()[0]
        if count:
            raise StorageError(
                f"{node.name}: expected that {table.name} got no records with times before "
                f"{in_utc(self.moment)} after it was joined, got {count} of them, from {in_utc(first)} "
                "on: the kept results would differ from a replay. Restate from that time: run it with "
                f"--from {in_utc(first)}"
            )

    def _require_all(self, plan: Plan) -> None:
        """Refuses a plan without a consumer that would refuse its next run."""
        made = {step.path for step in plan.steps}
        names = {n.name for n in self.nodes if path_of(n) in made}
        for name in asset_names(self.warehouse):
            commit = head_of(self.warehouse, name)[1]
            consumed = sorted(names & set(commit.inputs))
            looked_up = sorted(names & {*commit.read_logs} - {*consumed})
            if name not in made and looked_up:
                self.say(
                    f"! {name} looks up {looked_up[0]}, but its definition was not given: it keeps "
                    "results of the old rows. To recompute them too, add its definition"
                )
            if name in made or not consumed:
                continue
            if commit.shape.specification is not None:
                raise StorageError(
                    f"{self.node.name}: expected the definitions of all its consumers, got none of "
                    f"{name}, which consumes {consumed[0]} and would refuse its next run; add it too"
                )
            self.say(f"! {name} has consumed rows of {consumed[0]} that are now recomputed")

    # -- build -----------------------------------------------------------------------------------

    def _build(self, step: Step, node: Stream, made: set[str]) -> None:
        """Writes the new tables of one asset, or continues an interrupted attempt."""
        whose = f"restate:{self.node.name}"

        def stores(of: Stream) -> AssetStore:
            return self._beside(of) if path_of(of) in made else self._live(of)

        new = stores(node)
        if step.keep is not None and new.head() is None:
            self._write_kept(step.keep, node, new, made, whose)
        instead = (
            "restate only the assets derived from it. If they are missing on purpose, replay "
            f"{node.name} under another name, compare the two, and swap them"
        )
        try:
            repeat_runs(node, stores, self._live(node), whose, keep_recorded=False)
            require_kept(node, self._live(node), instead)
        except SourceError as error:
            # It cannot be completed. The broker of a topic may only not answer at the moment.
            if isinstance(error, RecordsGoneError) or not isinstance(node.source, KafkaSource):
                self.fs.rm(self.root, recursive=True)
            raise
        lost = lost_records(self._live(node), new)
        if lost is not None:
            self.fs.rm(self.root, recursive=True)  # start again: returning files must be read in order
            raise SourceError(
                f"{node.name}: expected the {counted(lost[0], 'record')} of its source that its log "
                f"was made of, got {lost[1]:,}: the others no longer exist and would be missing in the "
                f"new log. Put them back and run it again, or {instead}"
            )

    def _write_kept(
        self, keep: Commit, node: Stream, new: AssetStore, made: set[str], whose: str
    ) -> None:
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
        rows = live.log({}, head).where(before(keep.next_offset))
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
        rejected = live.quarantine()
        if rejected is not None:  # keep the rejected records of the kept batches
            parquet.write(
                rejected.where(F.col("batch") <= keep.batch),
                new.quarantine_path,
                document=Checkpoint(asset=node.name, batch=keep.batch, attempt=name).model_dump(),
                batch=keep.batch,
                asset=node.name,
            )


def require_free(warehouse: str, name: str, own: str = "") -> None:
    """Refuses an erase, a truncation or another restatement of an asset while an interrupted one of it
    exists, because that one continues with the rows that the asset had when it was planned.

    Args:
        name: the asset's folder in the warehouse.
        own: the folder of a restatement that does not count.

    Raises:
        StorageError: a restatement was interrupted.
    """
    fs, root = delta.filesystem(warehouse)
    others = [one for one in delta.names_in(warehouse) if one != own]
    for folder in (one for one in others if one.endswith(restate_folder(()))):
        plan = Plan.read(posixpath.join(warehouse, folder, _PLAN))
        planned = plan is not None and name in {step.path for step in plan.steps}
        if planned or fs.exists(posixpath.join(root, folder, RESTATED, name)):
            raise StorageError(
                f"{name}: expected no restatement in progress, got "
                f"{posixpath.join(warehouse, folder)}; complete it first: run vt-dagster restate again "
                "with the same arguments"
            )


def path_of(node: Stream) -> str:
    """Returns the folder of an asset in its warehouse."""
    return posixpath.join(*node.path)


def _least(one: Offsets, other: Offsets) -> Offsets:
    return {p: min(one.get(p, 0), other.get(p, 0)) for p in {*one, *other}}


def _ends_within(taken: Offsets, ends: Offsets) -> bool:
    return all(end <= ends.get(p, 0) for p, end in taken.items())
