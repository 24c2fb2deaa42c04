"""Plans a restatement: the kept batches of each log, and the reasons to refuse; see ``restate``."""

from __future__ import annotations

import posixpath
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pydantic import BaseModel, Field
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from vt_dagster.columns import OFFSET, PARTITION, TIMESTAMP
from vt_dagster.core.processor_registry import processor_of
from vt_dagster.errors import StorageError
from vt_dagster.runs.retention_guard import require_history, require_logs
from vt_dagster.storage import delta
from vt_dagster.storage.arrow_reader import asset_names, head_of
from vt_dagster.storage.asset_store import AssetStore
from vt_dagster.storage.commit_log import Commit, Offsets, horizons
from vt_dagster.storage.log_truncation import require_not_truncated
from vt_dagster.topology.durations import in_utc
from vt_dagster.topology.model import Stream, VersionedTable


class Step(BaseModel):
    """The plan for one asset.

    Args:
        path: its folder in the warehouse.
        keep: the last kept commit of its log; None = none is kept.
        why: the reason why none is kept.
        taken: how many records of its source the log was made of.
    """

    path: str
    keep: Commit | None = None
    why: str = ""
    taken: int = 0


class Plan(BaseModel):
    """The steps of a restatement, inputs first."""

    start: int
    steps: list[Step] = Field(default_factory=list[Step])


@dataclass(frozen=True)
class Planner:
    """Plans a restatement. Writes nothing.

    Args:
        node: the asset to restate.
        moment: first time to process again, inclusive, epoch microseconds.
        nodes: all known streams and tables, inputs first.
        say: is called with one line per asset.
    """

    warehouse: str
    node: Stream
    moment: int
    spark: SparkSession
    nodes: Sequence[Stream]
    say: Callable[[str], None]

    def plan(self) -> Plan:
        """Returns the plan; it has no steps if no record is from the time on."""
        plan = Plan(start=self.moment)
        for node in self.nodes:
            if node.name == self.node.name or self._consumes(node, plan):
                step = self._step(node, plan)
                if step is not None:
                    plan.steps.append(step)
        if plan.steps:
            self._require_all(plan)
        return plan

    def _live(self, node: Stream) -> AssetStore:
        return AssetStore(self.warehouse, node, self.spark, self.say)

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
            taken = head.commit.totals.get("in", 0)
            return Step(path=path_of(node), why="its source is read again", taken=taken)
        keep, why = self._kept(node, head.commit, plan)
        self._require_logs(node, head.commit, keep, plan)
        if keep is not None and keep.batch == head.commit.batch and not plan.steps:
            return None
        longer = "Give a later time, or lengthen the history_retention of the table first"
        require_history(node, self._live, keep, longer)
        if keep is not None:
            self._require_nothing_earlier(node, keep)
        what = f"keeps {keep.total:,} of {head.commit.total:,} results" if keep else f"replayed: {why}"
        self.say(f"{node.name}: {what}")
        return Step(path=path_of(node), keep=keep, why=why)

    def _kept(self, node: Stream, last: Commit, plan: Plan) -> tuple[Commit | None, str]:
        """Returns the last commit up to which a replay gives the same log, or None and why."""
        processor, done = processor_of(node), {step.path: step for step in plan.steps}
        table = processor.looked_up
        if last.state:
            return None, "it has a state, and only that of its last run is kept"
        if node.changed_meaning(last.shape.meaning):
            return None, "its declaration has changed"
        if table is not None and not isinstance(table, VersionedTable):
            return None, f"{table.name} has only current rows"
        if table is not None and path_of(table) in done:
            return None, f"{table.name} is made anew"
        limits = dict[str, Offsets]()
        for up in processor.consumed:
            keep = done[path_of(up)].keep if path_of(up) in done else None
            if path_of(up) in done:
                limits[up.name] = {} if keep is None else dict(keep.next_offset)
            if table is not None or node.name == self.node.name:
                ends = self._first_after(up)
                known = limits.get(up.name)
                limits[up.name] = ends if known is None else _least(ends, known)
        for found in delta.commits(self._live(node).log_path):
            commit = Commit.model_validate(found.document)
            if commit.log != last.log or commit.state:
                break
            if all(_within(commit.inputs.get(name, {}), ends) for name, ends in limits.items()):
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
        ups = [up for up in processor_of(node).consumed if path_of(up) not in made]
        require_logs(node, ups, self._live, keep)
        if keep is not None and last.truncation is not None:
            raise StorageError(
                f"{node.name}: expected its whole log, because a restatement keeps the results from "
                f"before {in_utc(self.moment)}, but {last.truncation.description()}: replay it "
                "under another name, and swap"
            )

    def _require_nothing_earlier(self, node: Stream, keep: Commit) -> None:
        """Refuses to keep results that a replay would change: joined before a matching record of the
        table arrived."""
        table = processor_of(node).looked_up
        consumed = {up.name for up in processor_of(node).consumed}
        if not isinstance(table, VersionedTable) or table.name in consumed:
            return  # a join that consumes the table's log corrects its own results
        store = self._live(table)
        head = store.head()
        if head is None:
            return
        at, unknown = _positions(store), 0
        joined: list[tuple[int, int, int]] = []
        for found in delta.commits(self._live(node).log_path):
            commit = Commit.model_validate(found.document)
            ends = at(commit.reads)
            if commit.batch > keep.batch or not commit.emitted_up_to:
                continue
            if ends is None:
                unknown += 1
                continue
            upto = max(commit.emitted_up_to.values())
            joined += [(p, ends.get(p, 0), upto) for p in head.commit.next_offset]
        if unknown:
            self.say(f"! {node.name}: of {unknown} batches it is not known what {table.name} had then")
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
        horizon = max(horizons(table.history_retention, head.commit.stream_time), default=0)
        late = late.where(F.unix_micros(TIMESTAMP) >= F.lit(horizon))
        count, first = late.agg(F.count("*"), F.min(F.unix_micros(TIMESTAMP))).collect()[0]
        if count:
            raise StorageError(
                f"{node.name}: expected that nothing for times before {in_utc(self.moment)} came to "
                f"{table.name} after it was joined, got {count} record(s) from {in_utc(first)} on: "
                "the kept results would differ from a replay. Restate from that time: run it with "
                f"--from {in_utc(first)}"
            )

    def _require_all(self, plan: Plan) -> None:
        """Refuses a plan without a consumer that would refuse its next run."""
        made = {step.path for step in plan.steps}
        names = {n.name for n in self.nodes if path_of(n) in made}
        for name in asset_names(self.warehouse):
            commit = head_of(self.warehouse, name)[1]
            consumed = sorted(names & set(commit.inputs))
            if name in made or not consumed:
                continue
            if commit.shape.meaning:
                raise StorageError(
                    f"{self.node.name}: expected the definitions of all its consumers, got none of "
                    f"{name}, which consumes {consumed[0]} and would refuse its next run; add it too"
                )
            self.say(f"! {name} has taken from the log of {consumed[0]} what is made anew now")


def path_of(node: Stream) -> str:
    """Returns the folder of an asset in its warehouse."""
    return posixpath.join(*node.path)


def _least(one: Offsets, other: Offsets) -> Offsets:
    return {p: min(one.get(p, 0), other.get(p, 0)) for p in {*one, *other}}


def _within(taken: Offsets, ends: Offsets) -> bool:
    return all(end <= ends.get(p, 0) for p, end in taken.items())


def _positions(store: AssetStore) -> Callable[[dict[str, int]], Offsets | None]:
    """Returns a function that gives a table's offsets at a run's lookup; None = no longer known."""
    name = store.node.name
    there = {
        part: [(one.version, one.document["next_offset"]) for one in delta.commits(path)]
        for part, path in (("log", store.log_path), ("view", store.view_path))
    }

    def at(reads: dict[str, int]) -> Offsets | None:
        if not {f"{name}/{part}" for part in there} & set(reads):
            return {}
        for part in ("log", "view"):
            version = reads.get(f"{name}/{part}")
            if version is None:
                continue
            for known, ends in there[part]:
                if known <= version:
                    return {int(p): end for p, end in ends.items()}
        return None

    return at
