"""A run of a source: take the files or offsets that are new, decide, commit."""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import datetime, timezone
from typing import Any

from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from vt_dagster.columns import ARRIVAL, FATE, PARTITION, TIMESTAMP
from vt_dagster.core import step
from vt_dagster.core.arrival import Fate, by_partition, few_records
from vt_dagster.core.records import POSITION, RAW, RAW_KEY, REASON, SOURCE, Reason, prepare
from vt_dagster.errors import ContractError, SourceError
from vt_dagster.runs.runs import Arrival, Receipt, few_files, finish, gate, next_commit
from vt_dagster.sources.files import FilesSource
from vt_dagster.sources.kafka import KafkaSource, Ranges
from vt_dagster.spark.small_runs import small_run
from vt_dagster.storage.progress import in_words
from vt_dagster.storage.store import AssetStore
from vt_dagster.topology.model import Stream, Table

Source = FilesSource | KafkaSource

FILES = "files"
"""The name of a files source among a commit's inputs; its offsets count lines."""


def pin_files(store: AssetStore, source: FilesSource, only: Sequence[str] | None = None) -> Arrival:
    """Repairs what a dead run left, then pins the files that this run takes.

    Args:
        only: names of files; others, and those consumed already, are left for another run.
    """
    found = store.catch_up()
    files = source.pending(store.consumed_files(found.head), only)
    return Arrival(store.node, found.head, store.new_attempt(), files=tuple(files), met=found.rows)


def pin_topics(
    store: AssetStore, source: KafkaSource, wanted: Ranges | None = None, accept_gap: bool = False
) -> Arrival:
    """Repairs what a dead run left, then pins the offsets that this run takes (``KafkaSource.pin``)."""
    found = store.catch_up()
    before = None if found.head is None else found.head.commit
    pinned = source.pin(before, wanted, accept_gap)
    # A first position counts, even where there is nothing to read: else ``latest`` would move on.
    new = before is None or pinned.gaps or set(pinned.ids) - set(before.topics)
    taken = pinned.ranges if new else pinned.taken
    return Arrival(
        store.node,
        found.head,
        store.new_attempt(),
        topics=pinned,
        taken=taken,
        met=found.rows,
    )


def read_records(
    store: AssetStore, source: Source, arrival: Arrival, now: datetime | None = None
) -> DataFrame:
    """The records that a run takes, prepared: timestamps, tombstones, reasons for quarantine."""
    node = store.node
    if isinstance(source, KafkaSource):
        taken = arrival.topics.taken if arrival.topics else {}
        rows = source.read(store.spark, taken, key=node.key, schema=node.schema)
    else:
        rows = source.read(store.spark, arrival.files, node.schema)
    now = now or datetime.now(timezone.utc)
    limit = F.timestamp_micros(F.lit(int((now + source.max_clock_skew).timestamp()) * 1_000_000))
    return prepare(rows, store.node, limit)


def consider(store: AssetStore, arrival: Arrival, records: DataFrame) -> DataFrame:
    """Which records the run applies, which are late; for tables also which are their key's latest."""
    view = store.current() if isinstance(store.node, Table) and arrival.previous else None
    before = by_partition(arrival.before.stream_time)
    with few_records(arrival.in_one_piece):
        return step.consider_records(store.node, records, view, before)


def commit_records(
    store: AssetStore,
    source: Source,
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
    raw = {c: F.when(rejected, F.col(c)) for c in (RAW, RAW_KEY) if c in considered.columns}
    with small_run(store.spark, arrival.small):
        kept = considered.withColumns(raw).persist()
        try:
            found = gate(node, kept)
            counts = found.counts
            _check_share(node, source, kept, counts)
            store.progress.done(f"decided: {in_words(counts)}")
            first = by_partition(arrival.before.next_offset, "long")
            with few_records(found.in_one_piece):
                rows = step.produce_records(node, kept, first)
            bad = counts["late"] + counts["quarantined"]
            if bad:
                store.stage_rejected(arrival.attempt, _rejected(kept.where(rejected)))
            commit = next_commit(
                arrival,
                found,
                counts,
                stream_time=found.times,
                run_id=run_id,
                rejected=bad > 0,
                **_position(store, arrival, counts),
            )
            head = store.commit(few_files(rows, counts["applied"]), commit)
        except (PySparkException, Py4JJavaError) as error:
            gone = _unreadable(source, error)
            if gone is None:
                raise
            raise gone from error
        finally:
            kept.unpersist()
    return finish(store, arrival, head)


def _unreadable(source: Source, error: Exception) -> SourceError | None:
    """What happened, where it was Kafka that did not give the records."""
    said = re.search(r"(?:Caused by: )?(?:org\.apache|java)[\w.]*[kK]afka[\w.$]*: (.+)", str(error))
    if not isinstance(source, KafkaSource) or said is None:
        return None
    return SourceError(
        f"the {source.describe()} could not be read to their end: {said[1].strip()}; nothing was "
        "committed: run again, and see what the topic's retention is"
    )


def _position(store: AssetStore, arrival: Arrival, counts: dict[str, int]) -> dict[str, Any]:
    """What a commit says of how far the run has come in its source."""
    pinned = arrival.topics
    if pinned is not None:
        counts["lost"] = sum(e - s for some in pinned.gaps.values() for s, e in some.values())
        inputs = {t: {p: e for p, (_, e) in of.items()} for t, of in pinned.ranges.items()}
        return {
            "taken": arrival.taken,
            "inputs": inputs,
            "topics": pinned.ids,
            "gaps": pinned.gaps,
        }
    consumed = store.consumed_files(arrival.previous)
    consumed.update({f.name: f.size for f in arrival.files})
    store.stage_files(arrival.attempt, consumed)
    first = arrival.before.inputs.get(FILES, {}).get(0, 0)
    end = first + counts["in"]
    return {"taken": {FILES: {0: (first, end)}}, "inputs": {FILES: {0: end}}, "files": True}


def _check_share(node: Stream, source: Source, kept: DataFrame, counts: dict[str, int]) -> None:
    bad, total = counts["quarantined"], counts["in"]
    if total and bad / total > source.max_bad_share:
        worst = (
            kept.where(F.col(FATE) == Fate.QUARANTINED)
            .select(SOURCE, POSITION, REASON, RAW)
            .orderBy(ARRIVAL)
            .limit(3)
            .collect()
        )
        examples = "; ".join(f"{r[0]} row {r[1]}: {r[2]}: {_text(r[3])[:80]}" for r in worst)
        raise ContractError(
            f"{node.name}: {bad} of {total} records are bad ({bad / total:.1%}), expected at most "
            f"{source.max_bad_share:.1%}; nothing was committed. {examples}. Mend the input, or "
            "raise max_bad_share of the source to send them to quarantine"
        )


def _text(raw: Any) -> str:
    return bytes(raw).decode("utf-8", "backslashreplace") if isinstance(raw, bytearray) else str(raw)


def _rejected(rows: DataFrame) -> DataFrame:
    """What the quarantine table holds: one row for each record that is not in the log."""
    return rows.select(
        F.coalesce(F.col(REASON), F.lit(Reason.LATE)).alias("reason"),
        F.col(SOURCE).alias("source"),
        F.col(POSITION).alias("position"),
        F.col(RAW).alias("raw"),
        *([F.col(RAW_KEY).alias("raw_key")] if RAW_KEY in rows.columns else []),
        TIMESTAMP,
        PARTITION,
    )
