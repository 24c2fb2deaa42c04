"""Builds the commit document of a run, and stages rejected records beside the log."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from vt_dagster.columns import ARRIVAL, CAUSE, OUTCOME, PARTITION, PROPAGATED_FROM, TIMESTAMP
from vt_dagster.core.arrival_order import REFUSED, InPlace, Outcome
from vt_dagster.core.processor import RunPlan
from vt_dagster.core.source_processor import START_BAD, START_IN, STARTED
from vt_dagster.core.source_records import POSITION, RAW, RAW_KEY, REASON, SOURCE, START
from vt_dagster.errors import SourceError
from vt_dagster.runs.gate import GateResult, check_bad_share
from vt_dagster.runs.pin import Arrival, Store, after_run
from vt_dagster.storage.commit_log import AHEAD, Commit, Started, consumed_commits
from vt_dagster.storage.schema_evolution import shape_of
from vt_dagster.storage.view import Progress
from vt_dagster.topology.durations import in_utc

_SPANS = 8
"""A commit keeps at most this many spans in which a clock was ahead."""
_NOT_IN_LOG = (*REFUSED, Outcome.DROPPED, Outcome.QUARANTINED, Outcome.WAITING)


def stage_rejected(store: Store, attempt: str, rows: DataFrame, outcomes: Sequence[str]) -> None:
    """Stages the results with the given outcomes, which do not enter the log, for the quarantine."""
    rejected = rows.where(F.col(OUTCOME).isin(*outcomes))
    refused = F.when(F.col(OUTCOME).isin(*REFUSED), F.col(OUTCOME)).otherwise(Outcome.LATE)
    store.stage_rejected(
        attempt,
        rejected.select(
            F.coalesce(F.col(REASON), refused).alias("reason"),
            F.col(SOURCE).alias("source"),
            F.col(POSITION).alias("position"),
            F.col(RAW).alias("raw"),
            *([F.col(RAW_KEY).alias("raw_key")] if RAW_KEY in rows.columns else []),
            *([CAUSE] if CAUSE in rows.columns else []),
            TIMESTAMP,
            PARTITION,
        ),
    )


def of_source(
    arrival: Arrival, rows: DataFrame, passed: GateResult, counts: dict[str, int]
) -> dict[str, Any]:
    """Returns the fields of ``Commit`` for the position in the source. Adds the source's own counts to
    ``counts``.

    Raises:
        ContractError: too large a share of bad records, without those of an initial snapshot.
    """
    source, start, own = arrival.source, arrival.start, counts
    assert source is not None
    if start is not None:
        own = {**counts, "in": counts["in"] - passed.counts[START_IN]}
        own[Outcome.QUARANTINED] -= passed.counts[START_BAD]
        rows = rows.where(~F.col(START))
    counts |= source.counts
    check_bad_share(arrival.node, source, rows, own)
    position = source.position(arrival.before, own)
    _require_other_names(arrival, position)
    if start is None:
        return position
    offsets: dict[int, tuple[int, int]] = {}
    for partition, some in passed.by_partition.items():
        end = arrival.before.next_offset.get(partition, 0) + some[Outcome.APPLIED]
        if some[STARTED]:  # rows of the initial snapshot come after all changes
            offsets[partition] = (end - some[STARTED], end)
    batch = arrival.before.batch + 1
    return {**position, "start": Started(what=start.what, batch=batch, offsets=offsets)}


def _require_other_names(arrival: Arrival, position: Mapping[str, Any]) -> None:
    """Refuses a topic whose name a commit already uses for the position in another kind of source, such
    as ``files``. Both would share one position, so records would be lost.

    Raises:
        SourceError: names the topic.
    """
    before = arrival.before
    for name in position.get("taken", {}):
        now, then = (ids.get(name, "@") for ids in (position.get("topics", {}), before.topics))
        if name in before.inputs and ("@" in now) != ("@" in then):
            raise SourceError(
                f"{arrival.node.name}: expected a topic with another name than {name!r}, because the "
                "asset's commits use that name for its position in an earlier source of another kind; "
                "nothing was committed. Restore the earlier source, or reprocess into a new asset"
            )


def places_of(arrival: Arrival, plan: RunPlan, passed: GateResult) -> InPlace | None:
    """Returns the input offsets, if results keep the order and offsets of their records; else None."""
    source, taken = arrival.source, None
    if source is not None:
        # Rows of a snapshot, and rows derived from records, have no source offset of their own.
        own = arrival.start is None and not passed.counts.get(Outcome.CARRIED)
        own = own and plan.order.by in ((ARRIVAL,), (ARRIVAL, PROPAGATED_FROM))
        taken = source.places if own else None
    elif plan.keeps_order:
        (taken,) = arrival.taken.values()
    if taken is None:
        return None
    found = {p: some[Outcome.APPLIED] for p, some in passed.by_partition.items()}
    many = plan.results_of_record
    complete = all(found.get(p, 0) == (end - start) * many for p, (start, end) in taken.items())
    return InPlace(taken, complete, many)


def ends_of(arrival: Arrival) -> dict[str, dict[int, int]]:
    """Returns the next offsets to read after the run: ``{input: {partition: offset}}``."""
    return {n: {p: end for p, (_, end) in ranges.items()} for n, ranges in arrival.taken.items()}


def next_system_time(before: Commit, stated: int | None) -> int:
    """Returns the system time of a commit, epoch microseconds: this machine's clock, but always after
    the commit before, in case the clock is behind.

    Args:
        stated: the system time to use instead of the clock, epoch microseconds; raised to that of the
            last commit if it is before it.
    """
    if stated is not None:
        return max(before.recorded_at, stated)
    return max(before.recorded_at + 1, time.time_ns() // 1000)


def ahead_after(before: Commit, recorded_at: int) -> list[tuple[int, int]]:
    """Returns ``Commit.ahead`` of the next commit. If the commit before was recorded in
    the future of this machine's clock, the span from now to ``recorded_at`` is added.

    Args:
        recorded_at: system time of the next commit, epoch microseconds.
    """
    now, known = time.time_ns() // 1000, before.ahead
    if before.recorded_at - now <= AHEAD:
        return known
    start = now
    if known and known[-1][1] >= before.recorded_at:  # still the same clock: extend its span
        start, known = min(known[-1][0], now), known[:-1]
    return [*known, (start, recorded_at)][-_SPANS:]


def system_time_by_clock(
    before: Commit, stated: int | None, progress: Progress
) -> tuple[int, list[tuple[int, int]]]:
    """Returns ``Commit.recorded_at`` (epoch microseconds) and ``Commit.ahead`` of a run.

    Warns if the commit before was recorded in the future of this machine's clock.

    Args:
        stated: the system time to use instead of the clock, epoch microseconds; None = the clock.
        progress: gets the warning.
    """
    recorded_at = next_system_time(before, stated)
    ahead = ahead_after(before, recorded_at)
    if ahead != before.ahead:
        progress.done(
            f"! expected this machine's clock to be after {in_utc(before.recorded_at)}, when batch "
            f"{before.batch} was recorded, got {in_utc(time.time_ns() // 1000)}: the clock of that run "
            f"was ahead, or this one is behind. This run is recorded at {in_utc(recorded_at)}: reads "
            "with an earlier as_known_at miss it, reads as of now include it. Correct the wrong clock"
        )
    return recorded_at, ahead


def document(
    arrival: Arrival,
    passed: GateResult,
    counts: dict[str, int],
    outcomes: Mapping[int, Mapping[str, int]],
    *,
    inputs: dict[str, dict[int, int]],
    stream_time: Mapping[int, int],
    **more: Any,
) -> Commit:
    """Returns the document of a run's commit.

    Args:
        passed: the result of the gate.
        outcomes: number of records per outcome, by partition.
        inputs: next offsets of each input after the run.
        stream_time: per partition, at the end of the run, epoch microseconds.
        more: other fields of ``Commit``.
    """
    before = arrival.before
    offsets, times = dict(before.next_offset), dict(before.stream_time)
    for partition, some in passed.by_partition.items():
        if some[Outcome.APPLIED]:
            offsets[partition] = offsets.get(partition, 0) + some[Outcome.APPLIED]
    for partition, moment in stream_time.items():
        times[partition] = max(times.get(partition, moment), moment)
    # A topic lists all its partitions and may have fewer than before: do not merge old ones.
    if not more.get("topics"):
        inputs = {n: {**before.inputs.get(n, {}), **positions} for n, positions in inputs.items()}
    # Keep the ids of earlier topics and Delta tables: the source may return to one of them.
    more["topics"] = {**before.topics, **more.get("topics", {})}
    totals = {k: before.totals.get(k, 0) + n for k, n in counts.items()}
    # A run omits these counts if they are zero or their option was removed; their totals remain.
    rare = (Outcome.CARRIED, Outcome.NOTHING_NEW, Outcome.COVERED, *REFUSED, "erased")
    totals |= {k: before.totals[k] for k in rare if k in before.totals and k not in counts}
    if Outcome.WAITING in counts:
        totals[Outcome.WAITING] = counts[Outcome.WAITING]
    inputs = {**before.inputs, **inputs}
    start = more.pop("start", before.start)
    ready = after_run(arrival, inputs, offsets, times, start is not None)
    consumed = consumed_commits({n: h.commit for n, h in arrival.inputs.items()})
    return Commit(
        asset=arrival.node.name,
        batch=before.batch + 1,
        attempt=arrival.attempt,
        shape=shape_of(arrival.node),
        log=before.log or arrival.attempt,
        logs={**before.logs, **{name: head.commit.log for name, head in arrival.inputs.items()}},
        consumed={**before.consumed, **consumed},
        previous=before.attempt,
        inputs=inputs,
        next_offset=offsets,
        stream_time=times,
        emitted_up_to=arrival.emitted_up_to,
        watermarks=arrival.watermarks,
        disorder=before.disorder_with(passed.earliest),
        erased=before.erased,
        erased_before=before.erased_before,
        erasures=before.erasures,
        truncation=before.truncation,
        counts=counts,
        totals=totals,
        totals_by_partition=_totals_by_partition(before, outcomes),
        reads=arrival.reads,
        read_logs=arrival.read_logs,
        not_ready=arrival.not_ready,
        start=start,
        **ready,
        **more,
    )


def _totals_by_partition(
    before: Commit, outcomes: Mapping[int, Mapping[str, int]]
) -> dict[int, dict[str, int]]:
    found = {p: dict(some) for p, some in before.totals_by_partition.items()}
    for some in found.values():
        some.pop(Outcome.WAITING, None)
    for partition, some in outcomes.items():
        mine = found.setdefault(partition, {})
        for outcome in _NOT_IN_LOG:
            if some.get(outcome):
                mine[outcome] = mine.get(outcome, 0) + some[outcome]
    return {p: some for p, some in found.items() if some}
