"""A run of a source: take the files that are new, decide, commit."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timezone

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from vt_dagster.columns import ARRIVAL, FATE, PARTITION, TIMESTAMP
from vt_dagster.core import step
from vt_dagster.core.arrival import Fate, by_partition
from vt_dagster.core.records import REASON, Reason, prepare
from vt_dagster.errors import ContractError
from vt_dagster.model import Stream, Table
from vt_dagster.storage.files import POSITION, RAW, SOURCE, FilesSource
from vt_dagster.storage.runs import Arrival, Receipt, few_files, finish, gate, next_commit
from vt_dagster.storage.store import AssetStore

FILES = "files"
"""The name of a files source among a commit's inputs; its offsets count lines."""


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
    view = store.view() if isinstance(store.node, Table) and arrival.previous else None
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
        found = gate(node, kept)
        counts, ends, times = found
        _check_share(node, source, kept, counts)
        rows = step.produce_records(node, kept, by_partition(arrival.before.next_offset, "long"))
        bad = counts["late"] + counts["quarantined"]
        if bad:
            store.stage_rejected(arrival.attempt, _rejected(kept.where(rejected)))
        consumed = store.consumed_files(arrival.previous)
        consumed.update({f.name: f.size for f in arrival.files})
        store.stage_files(arrival.attempt, consumed)
        first = arrival.before.inputs.get(FILES, {}).get(0, 0)
        commit = next_commit(
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
        store.commit(few_files(rows, counts["applied"]), commit)
    finally:
        kept.unpersist()
    return finish(store, arrival)


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
