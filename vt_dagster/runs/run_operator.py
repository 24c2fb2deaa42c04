"""A run of an operator: take what is new in the logs of its inputs, operate, commit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from pyspark.sql import DataFrame

from vt_dagster.columns import PARTITION
from vt_dagster.core import operate, step, suppress
from vt_dagster.core.arrival import by_partition, few_records
from vt_dagster.runs.runs import Arrival, Receipt, few_files, finish, gate, next_commit
from vt_dagster.spark.small_runs import small_run
from vt_dagster.storage.progress import in_words
from vt_dagster.storage.store import AssetStore, Head
from vt_dagster.topology.model import Stream, Table
from vt_dagster.topology.operators import Operator, Suppress, WindowedAggregate


@dataclass(frozen=True)
class Results:
    """What an operator made of a run: its rows with their fate, lazy, and what it knew before."""

    rows: DataFrame
    before: operate.Before


def _operator(node: Stream) -> Operator:
    assert node.operator is not None
    return node.operator


def pin_logs(store: AssetStore, inputs: Sequence[AssetStore]) -> Arrival:
    """Pins the ends of the logs that this run of an operator takes, and the views that go with them."""
    node, found = store.node, store.catch_up()
    operator, previous = _operator(node), found.head
    pinned = Arrival(node, previous, store.new_attempt())
    before = pinned.before
    heads: dict[str, Head] = {}
    views: dict[str, int] = {}
    taken: dict[str, dict[int, tuple[int, int]]] = {}
    met = found.rows
    for one in inputs:
        name = one.node.name
        pin_view = operate.reads_views(operator)
        up = one.pinned_view() if pin_view else one.catch_up()
        if up.head is None:
            continue
        if pin_view and up.version is not None:
            views[name] = up.version
            met += up.rows
        head = heads[name] = up.head
        start = before.inputs.get(name, {})
        ends = head.commit.next_offset.items()
        ranges = {p: (start.get(p, 0), end) for p, end in ends if end > start.get(p, 0)}
        if ranges:
            taken[name] = ranges
    times, gauges = dict(before.stream_time), dict[str, float]()
    arrival = replace(
        pinned,
        inputs=heads,
        views=views,
        taken=taken,
        met=met,
        state_bytes=store.state_bytes(previous),
    )
    if taken and operate.goes_by_time(operator):
        times, gauges = _own_time(node, arrival, read_logs(inputs, arrival))
    return replace(arrival, stream_time=times, gauges=gauges)


def _own_time(
    node: Stream, arrival: Arrival, logs: Sequence[DataFrame]
) -> tuple[dict[int, int], dict[str, float]]:
    """An operator's stream time at the end of a run, and how late its records were (seconds)."""
    before = arrival.before.stream_time
    with few_records(arrival.in_one_piece):
        taken = [operate.Taken(rows) for rows in logs]
        timed = operate.with_lateness(node, taken, by_partition(before))
    times = dict(before)
    with small_run(logs[0].sparkSession, arrival.small):
        found = timed.collect()
    for row in found:
        times[row[PARTITION]] = max(times.get(row[PARTITION], row["time"]), row["time"])
    count = sum(row["records"] for row in found)
    if not count:
        return times, {}
    return times, {
        "lateness_avg": sum(row["lateness"] for row in found) / count / 1e6,
        "lateness_max": max(row["most"] for row in found) / 1e6,
    }


def read_logs(inputs: Sequence[AssetStore], arrival: Arrival) -> list[DataFrame]:
    """The log rows that a run takes from each input; none where there is nothing new."""
    rows: list[DataFrame] = []
    for one in inputs:
        name = one.node.name
        if name in arrival.taken:
            rows.append(one.log(arrival.before.inputs.get(name, {}), arrival.inputs[name]))
        elif name in arrival.inputs:
            rows.append(one.log({}, arrival.inputs[name]).limit(0))
        else:
            rows.append(one.spark.createDataFrame([], step.log_schema(one.node)))
    return rows


def results_of(
    store: AssetStore, inputs: Sequence[AssetStore], arrival: Arrival, logs: Sequence[DataFrame]
) -> Results:
    """The results of a run with all that is counted, and what the operator keeps."""
    taken: list[operate.Taken] = []
    for one, rows in zip(inputs, logs, strict=True):
        name = one.node.name
        # Where nothing was consumed before, every row of the table is among the changes.
        known = name in arrival.views and bool(arrival.before.inputs.get(name))
        taken.append(operate.Taken(rows, one.current_at(arrival.views[name]) if known else None))
    before = operate.Before(
        state=store.state(arrival.previous),
        view=store.current() if isinstance(store.node, Table) and arrival.previous else None,
        stream_time=by_partition(arrival.before.stream_time),
        after=by_partition(arrival.stream_time),
    )
    with few_records(arrival.in_one_piece):
        return Results(operate.operate(store.node, taken, before), before)


def commit_results(
    store: AssetStore,
    arrival: Arrival,
    results: Results,
    run_id: str | None = None,
) -> Receipt:
    """Gate, state, commit and view of an operator's run.

    Raises:
        ConcurrentRunError: another run won.
        ContractError: results break the schema's checks.
        BufferFullError: a suppression buffer is full and is to stop the run; nothing is lost, the
            next run with a larger limit takes the same records.
    """
    if arrival.empty:
        return Receipt(None, None)
    node = store.node
    operator = _operator(node)
    with small_run(store.spark, arrival.small):
        kept = results.rows.persist()
        held = operate.state_after(node, kept, results.before)
        try:
            found = gate(node, kept)
            done = found.counts
            taken = arrival.taken
            counts = {
                "in": sum(end - start for ranges in taken.values() for start, end in ranges.values()),
                "out": done["applied"],
                "late": done["late"],
                "dropped": done["dropped"],
            }
            store.progress.done(f"decided: {in_words(counts)}")
            gauges = dict(arrival.gauges)
            if isinstance(operator, WindowedAggregate):
                counts["late_records_dropped"] = done["late_records_dropped"]
                counts["expired_window_records_dropped"] = done["expired_window_records_dropped"]
            if isinstance(operator, Suppress):
                assert held is not None
                gauges |= _buffer(operator, held, arrival)
                counts["suppression_emit"] = done["applied"]
            if held is not None:
                store.stage_state(arrival.attempt, held)
            with few_records(found.in_one_piece):
                rows = operate.produce(node, kept, by_partition(arrival.before.next_offset, "long"))
            commit = next_commit(
                arrival,
                found,
                counts,
                taken=taken,
                inputs={n: {p: end for p, (_, end) in ranges.items()} for n, ranges in taken.items()},
                stream_time=arrival.stream_time if operate.goes_by_time(operator) else found.times,
                run_id=run_id,
                reads={f"{n}/log": head.version for n, head in arrival.inputs.items()}
                | {f"{n}/view": version for n, version in arrival.views.items()},
                gauges=gauges,
                state=held is not None,
            )
            head = store.commit(few_files(rows, done["applied"]), commit)
        finally:
            kept.unpersist()
    return finish(store, arrival, head)


def _buffer(operator: Suppress, buffer: DataFrame, arrival: Arrival) -> dict[str, float]:
    """How full a suppression buffer is after a run.

    Raises:
        BufferFullError: it is over its limit and is to stop the run.
    """
    full = suppress.fullness(buffer).collect()
    sizes = {row[PARTITION]: (row["records"], row["bytes"]) for row in full}
    operator.check_buffer(sizes)
    count = sum(n for n, _ in sizes.values())
    size = sum(n for _, n in sizes.values())
    gauges: dict[str, float] = {}
    earlier = arrival.before.gauges
    for name, now in (("count", count), ("size", size)):
        key = f"suppression_buffer_{name}"
        batches = arrival.before.batch
        average = (earlier.get(f"{key}_avg", 0.0) * batches + now) / (batches + 1)
        gauges |= {
            f"{key}_current": now,
            f"{key}_avg": average,
            f"{key}_max": max(now, earlier.get(f"{key}_max", 0.0)),
        }
    return gauges
