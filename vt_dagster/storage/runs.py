"""A run of an asset: take what arrived up to a pinned end, decide, commit. No Dagster.

The order of what is written is the protocol: first, under the attempt's name, what the run rejects and
the files it consumed; then the log (**the commit**); then view and quarantine, which follow from it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from typing import Any

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from vt_dagster.columns import ARRIVAL, FATE, OFFSET, PARTITION, TIMESTAMP
from vt_dagster.contracts import Rule, contract_of, refuse
from vt_dagster.core import grace, step
from vt_dagster.core.arrival import Fate, by_partition, stream_time_of
from vt_dagster.core.records import REASON, Reason, prepare
from vt_dagster.core.stream_table_join import MATCHED
from vt_dagster.errors import ContractError
from vt_dagster.model import Stream, StreamTableJoin, Table, VersionedTable
from vt_dagster.storage.files import POSITION, RAW, SOURCE, FileInfo, FilesSource
from vt_dagster.storage.positions import Commit, Offsets
from vt_dagster.storage.store import AssetStore, Head, shape_of

FILES = "files"
"""The name of a files source among a commit's inputs; its offsets count lines."""


@dataclass(frozen=True)
class Arrival:
    """What one run takes, pinned when it starts."""

    node: Stream
    previous: Head | None
    attempt: str
    files: tuple[FileInfo, ...] = ()
    inputs: dict[str, Head] = field(default_factory=dict[str, Head])
    """Of each log that is read, the commit up to which."""
    stream_time: dict[int, int] = field(default_factory=dict[int, int])
    """A join's stream time at the end of the run."""
    released: dict[int, int] = field(default_factory=dict[int, int])
    """A join's due time at the end of the run; see ``core/grace.py``."""
    taken: dict[str, dict[int, tuple[int, int]]] = field(
        default_factory=dict[str, dict[int, tuple[int, int]]]
    )
    started: float = field(default_factory=time.monotonic)

    @property
    def empty(self) -> bool:
        """Whether there is nothing new: such a run commits nothing."""
        return not self.files and not self.taken

    @property
    def before(self) -> Commit:
        """The state that the run starts from."""
        if self.previous is not None:
            return self.previous.commit
        return Commit(asset=self.node.name, batch=0, attempt="", shape=shape_of(self.node))


@dataclass(frozen=True)
class Receipt:
    """What a run did: its commit, or None where there was nothing new."""

    commit: Commit | None
    log_version: int | None
    view_version: int | None = None


# -- sources ------------------------------------------------------------------------------------


def pin_files(store: AssetStore, source: FilesSource, only: Sequence[str] | None = None) -> Arrival:
    """Repairs what a dead run left, then pins the files that this run takes.

    Args:
        only: names of files; others, and those consumed already, are left for another run.
    """
    head = store.catch_up()
    files = source.pending(store.consumed_files(head), only)
    return Arrival(store.node, head, store.new_attempt(), files=tuple(files))


def read_files(
    store: AssetStore, source: FilesSource, arrival: Arrival, now: datetime | None = None
) -> DataFrame:
    """The records of a run's files, prepared: timestamps, tombstones, reasons for quarantine."""
    rows = source.read(store.spark, arrival.files, store.node.schema)
    now = now or datetime.now(timezone.utc)
    limit = F.timestamp_micros(F.lit(int((now + source.max_clock_skew).timestamp()) * 1_000_000))
    return prepare(rows, store.node, limit)


def consider(store: AssetStore, arrival: Arrival, records: DataFrame) -> DataFrame:
    """Which records the run applies, which are late; for tables also which are their key's latest."""
    view = store.view() if isinstance(store.node, VersionedTable) and arrival.previous else None
    before = by_partition(arrival.before.stream_time)
    return step.consider_records(store.node, records, None if view is None else view[2], before)


def commit_records(
    store: AssetStore,
    source: FilesSource,
    arrival: Arrival,
    considered: DataFrame,
    run_id: str | None = None,
) -> Receipt:
    """Gate, commit and view of a source's run.

    Raises:
        ContractError: too large a share of bad records, or records that break the schema's checks;
            nothing has been committed.
        ConcurrentRunError: another run won.
    """
    if arrival.empty:
        return Receipt(None, None)
    node = store.node
    rejected = F.col(FATE).isin(Fate.LATE, Fate.QUARANTINED)
    kept = considered.withColumn(RAW, F.when(rejected, F.col(RAW))).persist()
    try:
        gate = _gate(node, kept)
        counts, ends, times = gate
        _check_share(node, source, kept, counts)
        rows = step.produce_records(node, kept, by_partition(arrival.before.next_offset, "long"))
        bad = counts["late"] + counts["quarantined"]
        if bad:
            store.stage_rejected(arrival.attempt, _rejected(kept.where(rejected)))
        consumed = store.consumed_files(arrival.previous)
        consumed.update({f.name: f.size for f in arrival.files})
        store.stage_files(arrival.attempt, consumed)
        first = arrival.before.inputs.get(FILES, {}).get(0, 0)
        commit = _next_commit(
            arrival,
            counts,
            taken={FILES: {0: (first, first + counts["in"])}},
            inputs={FILES: {0: first + counts["in"]}},
            ends=ends,
            stream_time=times,
            run_id=run_id,
            files=True,
            rejected=bad > 0,
        )
        store.commit(_few_files(rows, counts["applied"]), commit)
    finally:
        kept.unpersist()
    return _finish(store, arrival)


def _check_share(node: Stream, source: FilesSource, kept: DataFrame, counts: dict[str, int]) -> None:
    bad, total = counts["quarantined"], counts["in"]
    if total and bad / total > source.max_bad_share:
        worst = (
            kept.where(F.col(FATE) == Fate.QUARANTINED)
            .select(SOURCE, POSITION, REASON, RAW)
            .orderBy(ARRIVAL)
            .limit(3)
            .collect()
        )
        examples = "; ".join(f"{r[0]} row {r[1]}: {r[2]}: {str(r[3])[:80]}" for r in worst)
        raise ContractError(
            f"{node.name}: {bad} of {total} records are bad ({bad / total:.1%}), expected at most "
            f"{source.max_bad_share:.1%}; nothing was committed. {examples}. Mend the files, or "
            "raise max_bad_share of the source to send them to quarantine"
        )


def _rejected(rows: DataFrame) -> DataFrame:
    """What the quarantine table holds: one row for each record that is not in the log."""
    return rows.select(
        F.coalesce(F.col(REASON), F.lit(Reason.LATE)).alias("reason"),
        F.col(SOURCE).alias("source"),
        F.col(POSITION).alias("position"),
        F.col(RAW).alias("raw"),
        TIMESTAMP,
        PARTITION,
    )


# -- joins --------------------------------------------------------------------------------------


def pin_join(store: AssetStore, join: StreamTableJoin, stream: AssetStore) -> Arrival:
    """Pins the end of the stream's log that this run of a join takes."""
    previous = store.head()
    head = stream.catch_up()
    before = previous.commit if previous else None
    start: Offsets = before.inputs.get(join.left.name, {}) if before else {}
    ends = head.commit.next_offset if head else {}
    taken = {p: (start.get(p, 0), end) for p, end in ends.items() if end > start.get(p, 0)}
    times = dict(before.stream_time) if before else {}
    if head is None or not taken:
        return Arrival(store.node, previous, "", stream_time=times)
    arrived = stream.log(start, head)
    latest = stream_time_of(arrived, grace.moves_stream_time(join.left.key))
    for row in latest.select(PARTITION, F.unix_micros("stream_time").alias("t")).collect():
        times[row[PARTITION]] = max(times.get(row[PARTITION], row["t"]), row["t"])
    return Arrival(
        store.node,
        previous,
        store.new_attempt(),
        inputs={join.left.name: head},
        stream_time=times,
        released=_released(join, before.released if before else {}, times),
        taken={join.left.name: taken},
    )


def _released(join: StreamTableJoin, before: dict[int, int], times: dict[int, int]) -> dict[int, int]:
    """The due time of each partition: stream time - grace period, and never before what it was."""
    period = join.grace_period or timedelta(0)
    if not isinstance(period, timedelta):
        raise ContractError(f"{join.name}: an asset has one grace_period for all partitions")
    due = {p: moment - period // timedelta(microseconds=1) for p, moment in times.items()}
    return {p: max(moment, before.get(p, moment)) for p, moment in due.items()}


def read_stream(stream: AssetStore, join: StreamTableJoin, arrival: Arrival) -> DataFrame:
    """The stream's records that a join run has to do with, with their fate."""
    if arrival.empty:
        empty = stream.spark.createDataFrame([], step.log_schema(join.left))
        return empty.withColumn(ARRIVAL, F.col(OFFSET)).withColumn(FATE, F.lit(Fate.WAITING))
    head = arrival.inputs[join.left.name]
    state = arrival.before
    start = state.inputs.get(join.left.name, {})
    holds = any(state.stream_time[p] > moment for p, moment in state.released.items())
    oldest = min(state.released.values()) if holds else None
    rows = stream.log(start, head, oldest).withColumn(ARRIVAL, F.col(OFFSET))
    held = None
    if holds:
        consumed = F.col(OFFSET) < F.coalesce(by_partition(start, "long"), F.lit(0))
        released = by_partition(state.released)
        held = grace.waiting(rows.where(consumed), key=join.left.key, released=released)
        rows = rows.where(~consumed)
    before, due = by_partition(state.stream_time), by_partition(arrival.released)
    return step.consider_join(join, rows, held, before, due)


def commit_join(
    store: AssetStore,
    join: StreamTableJoin,
    arrival: Arrival,
    considered: DataFrame,
    table: AssetStore,
    run_id: str | None = None,
) -> Receipt:
    """Joins what is due with the table as it is now, and commits the results.

    Raises:
        ConcurrentRunError: another run won.
        ContractError: results break the schema's checks.
    """
    if arrival.empty:
        return Receipt(None, None)
    counts = _fates(considered, arrival, join)
    reads = {f"{n}/log": head.version for n, head in arrival.inputs.items()}
    found = table.view()
    if found is None:
        schema = step.view_schema(join.right)
        view, table_time = store.spark.createDataFrame([], schema), by_partition({})
    else:
        reads[f"{join.right.name}/view"] = found[0]
        view, table_time = found[2], by_partition(found[1].stream_time)
    results = step.join_records(join, considered, view, table_time).persist()
    try:
        found_rows, ends, _ = _gate(store.node, results.withColumn(FATE, F.lit(Fate.APPLIED)))
        out, joined = found_rows["applied"], counts["applied"] + counts["late"]
        counts["out"] = out
        counts["unmatched"] = found_rows["unmatched"] if join.kind == "left" else joined - out
        first = by_partition(arrival.before.next_offset, "long")
        rows = step.produce_join(store.node, join, results, first)
        taken = arrival.taken
        commit = _next_commit(
            arrival,
            counts,
            taken=taken,
            inputs={n: {p: end for p, (_, end) in ranges.items()} for n, ranges in taken.items()},
            ends=ends,
            stream_time=arrival.stream_time,
            run_id=run_id,
            released=arrival.released,
            reads=reads,
        )
        store.commit(_few_files(rows, out), commit)
    finally:
        results.unpersist()
    return _finish(store, arrival)


def _fates(considered: DataFrame, arrival: Arrival, join: StreamTableJoin) -> dict[str, int]:
    """How many records a join run has to do with, by fate, and how many of them are new.

    A job of its own over few columns: an observation on the join's plan would be lost, and waited for
    without end, where Spark finds that an empty table makes the plan empty.
    """
    start = by_partition(arrival.before.inputs.get(join.left.name, {}), "long")
    new = F.col(OFFSET) >= F.coalesce(start, F.lit(0))
    counted = considered.groupBy(FATE).agg(F.count(F.lit(1)).alias("all"), F.count_if(new).alias("new"))
    rows = counted.collect()
    fates = (Fate.APPLIED, Fate.LATE, Fate.WAITING, Fate.DROPPED)
    found = {row[FATE]: row["all"] for row in rows}
    return {"in": sum(row["new"] for row in rows), **{f: found.get(f, 0) for f in fates}}


# -- both ---------------------------------------------------------------------------------------


def _gate(node: Stream, rows: DataFrame) -> tuple[dict[str, int], dict[int, int], dict[int, int]]:
    """One pass over what is about to be committed: counts, contract, stream time.

    Returns:
        counts by fate; the number of applied rows and the largest timestamp of each partition.
    """
    rules, probes = contract_of(node)
    applied = F.col(FATE) == Fate.APPLIED

    def count(condition: Any) -> Any:
        return F.coalesce(F.sum(condition.cast("long")), F.lit(0))

    wanted = [
        F.count(F.lit(1)).alias("in"),
        *[count(F.col(FATE) == f).alias(f) for f in (Fate.APPLIED, Fate.LATE, Fate.QUARANTINED)],
        F.max(F.when(applied, F.unix_micros(TIMESTAMP))).alias("_time"),
        *[count(applied & rule.violated).alias(f"_rule{i}") for i, rule in enumerate(rules)],
    ]
    if MATCHED in rows.columns:
        wanted.append(count(~F.col(MATCHED)).alias("unmatched"))
    found = [row.asDict() for row in rows.groupBy(PARTITION).agg(*wanted).collect()]
    names = ["in", Fate.APPLIED, Fate.LATE, Fate.QUARANTINED, "unmatched"]
    counts = {n: sum(row.get(n, 0) for row in found) for n in names}
    broken = _broken(rules, found)
    kept = rows.where(applied)
    broken.update({p.name: -1 for p in probes if not p.holds(kept)})
    refuse(node, broken, kept, rules)
    ends = {row[PARTITION]: row[Fate.APPLIED] for row in found if row[Fate.APPLIED]}
    times = {row[PARTITION]: row["_time"] for row in found if row["_time"] is not None}
    return counts, ends, times


def _broken(rules: list[Rule], found: list[dict[str, Any]]) -> dict[str, int]:
    sums = {r.name: sum(row[f"_rule{i}"] for row in found) for i, r in enumerate(rules)}
    return {name: n for name, n in sums.items() if n}


def _next_commit(
    arrival: Arrival,
    counts: dict[str, int],
    *,
    inputs: dict[str, Offsets],
    ends: dict[int, int],
    stream_time: dict[int, int],
    **more: Any,
) -> Commit:
    before = arrival.before
    offsets, times = dict(before.next_offset), dict(before.stream_time)
    for partition, rows in ends.items():
        offsets[partition] = offsets.get(partition, 0) + rows
    for partition, moment in stream_time.items():
        times[partition] = max(times.get(partition, moment), moment)
    taken = {n: {**before.inputs.get(n, {}), **positions} for n, positions in inputs.items()}
    totals = {k: before.totals.get(k, 0) + n for k, n in counts.items()}
    if Fate.WAITING in counts:
        totals[Fate.WAITING] = counts[Fate.WAITING]
    return Commit(
        asset=arrival.node.name,
        batch=before.batch + 1,
        attempt=arrival.attempt,
        shape=shape_of(arrival.node),
        inputs={**before.inputs, **taken},
        next_offset=offsets,
        stream_time=times,
        counts=counts,
        totals=totals,
        **more,
    )


def _few_files(rows: DataFrame, count: int) -> DataFrame:
    """One file for each million rows: small runs must not leave many small files."""
    return rows.coalesce(max(1, math.ceil(count / 1_000_000)))


def _finish(store: AssetStore, arrival: Arrival) -> Receipt:
    head = store.catch_up()
    store.forget(arrival.previous)
    view = store.view() if isinstance(store.node, Table) else None
    assert head is not None
    return Receipt(head.commit, head.version, None if view is None else view[0])
