"""A run of a stream-table join: take what is new in the stream's log, and what waited; join; commit."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from vt_dagster.columns import ARRIVAL, FATE, OFFSET, PARTITION, TIMESTAMP
from vt_dagster.core import grace, step
from vt_dagster.core.arrival import Fate, by_partition, few_records, stream_time_of
from vt_dagster.runs.join_way import way_of
from vt_dagster.runs.runs import Arrival, Receipt, few_files, finish, gate, next_commit
from vt_dagster.spark.small_runs import is_small, small_run
from vt_dagster.storage.positions import Offsets
from vt_dagster.storage.progress import in_words
from vt_dagster.storage.store import AssetStore
from vt_dagster.topology.durations import length_at
from vt_dagster.topology.operators import StreamTableJoin


def pin_join(store: AssetStore, join: StreamTableJoin, stream: AssetStore) -> Arrival:
    """Pins the end of the stream's log that this run of a join takes."""
    previous = store.head()
    head = stream.catch_up().head
    before = previous.commit if previous else None
    start: Offsets = before.inputs.get(join.left.name, {}) if before else {}
    ends = head.commit.next_offset if head else {}
    taken = {p: (start.get(p, 0), end) for p, end in ends.items() if end > start.get(p, 0)}
    times = dict(before.stream_time) if before else {}
    if head is None or not taken:
        return Arrival(store.node, previous, "", stream_time=times)
    name = join.left.name
    pinned = Arrival(
        store.node, previous, store.new_attempt(), inputs={name: head}, taken={name: taken}
    )
    latest = stream_time_of(stream.log(start, head), grace.moves_stream_time(join.left.key))
    with small_run(stream.spark, pinned.small):
        found = latest.select(PARTITION, F.unix_micros("stream_time").alias("t")).collect()
    for row in found:
        times[row[PARTITION]] = max(times.get(row[PARTITION], row["t"]), row["t"])
    released = _released(join, before.released if before else {}, times)
    return replace(pinned, stream_time=times, released=released)


def _released(join: StreamTableJoin, before: dict[int, int], times: dict[int, int]) -> dict[int, int]:
    """The due time of each partition: stream time - grace period, and never before what it was."""
    period = join.grace_period or timedelta(0)
    one = timedelta(microseconds=1)
    due = {p: moment - length_at(period, p) // one for p, moment in times.items()}
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
    with few_records(arrival.in_one_piece):
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
    with small_run(store.spark, arrival.small):
        counts, due = _fates(considered, arrival, join)
    since = _NEVER if due is None else due[0]
    reads = {f"{n}/log": head.version for n, head in arrival.inputs.items()}
    found, known, met = table.view(since), 0, 0
    if found is None:
        schema = step.view_schema(join.right)
        view, table_time = store.spark.createDataFrame([], schema), by_partition({})
    else:
        reads[f"{join.right.name}/view"] = found[0]
        view, table_time = found[2], by_partition(found[1].stream_time)
        known, met = found[1].total, found[1].reach(since)
    with small_run(store.spark, arrival.small and is_small(arrival.records, met)):
        way, strategy = way_of(join.right, view, arrival.few, known, due)
        results = step.join_records(join, considered, view, table_time, way).persist()
        try:
            seen = gate(store.node, results.withColumn(FATE, F.lit(Fate.APPLIED)))
            out, joined = seen.counts["applied"], counts["applied"] + counts["late"]
            counts["out"] = out
            counts["unmatched"] = seen.counts["unmatched"] if join.kind == "left" else joined - out
            store.progress.done(f"decided: {in_words(counts)}")
            first = by_partition(arrival.before.next_offset, "long")
            with few_records(seen.in_one_piece):
                rows = step.produce_join(store.node, join, results, first)
            taken = arrival.taken
            commit = next_commit(
                arrival,
                seen,
                counts,
                taken=taken,
                inputs={n: {p: end for p, (_, end) in ranges.items()} for n, ranges in taken.items()},
                stream_time=arrival.stream_time,
                run_id=run_id,
                released=arrival.released,
                strategy=strategy,
                reads=reads,
            )
            head = store.commit(few_files(rows, out), commit)
        finally:
            results.unpersist()
    return finish(store, arrival, head)


_NEVER = 2**62


def _fates(
    considered: DataFrame, arrival: Arrival, join: StreamTableJoin
) -> tuple[dict[str, int], tuple[int, int] | None]:
    """How many records a join run has to do with, by fate, and how many of them are new; and the
    smallest and the largest timestamp of those that it joins, None where it joins none.

    A job of its own over few columns: an observation on the join's plan would be lost, and waited for
    without end, where Spark finds that an empty table makes the plan empty.
    """
    start = by_partition(arrival.before.inputs.get(join.left.name, {}), "long")
    new = F.col(OFFSET) >= F.coalesce(start, F.lit(0))
    rows = (
        considered.groupBy(FATE)
        .agg(
            F.count(F.lit(1)).alias("all"),
            F.count_if(new).alias("new"),
            F.min(F.unix_micros(TIMESTAMP)).alias("oldest"),
            F.max(F.unix_micros(TIMESTAMP)).alias("newest"),
        )
        .collect()
    )
    due = [row for row in rows if row[FATE] in (Fate.APPLIED, Fate.LATE)]
    fates = (Fate.APPLIED, Fate.LATE, Fate.WAITING, Fate.DROPPED)
    found = {row[FATE]: row["all"] for row in rows}
    counts = {"in": sum(row["new"] for row in rows), **{f: found.get(f, 0) for f in fates}}
    span = (min(row["oldest"] for row in due), max(row["newest"] for row in due)) if due else None
    return counts, span
