"""What must hold of committed tables, as queries that find the rows where it does not. No Dagster."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from pyspark.sql import Column, DataFrame
from pyspark.sql import Window as W
from pyspark.sql import functions as F

from vt_dagster.columns import (
    CARRIED,
    IS_LATE,
    OFFSET,
    PARTITION,
    SEGMENT,
    TIMESTAMP,
    VALID_FROM,
    VALID_TO,
)
from vt_dagster.core import store as of_table
from vt_dagster.core.arrival import Fate, by_partition, has_key
from vt_dagster.core.log import log_schema, parts_of
from vt_dagster.core.processors import processor_of
from vt_dagster.core.records import Reason
from vt_dagster.spark.small_runs import is_small, small_run
from vt_dagster.storage import delta, parquet
from vt_dagster.storage.positions import Checkpoint, Commit, Offsets, Segments
from vt_dagster.storage.segments import segment_of
from vt_dagster.storage.snapshot import Head
from vt_dagster.storage.store import AssetStore
from vt_dagster.storage.view import Base, stored_as
from vt_dagster.topology.model import Stream, Table, VersionedTable

SAMPLE = 10
EVERYTHING = "everything"
_TRIES = 5
"""What is found while another run commits is a mixture of before and after: look again, so often."""


@dataclass(frozen=True)
class Finding:
    """The result of one check: how many rows offend, a few of them, other numbers, and among what."""

    name: str
    offending: int
    sample: list[dict[str, Any]]
    numbers: dict[str, int] = field(default_factory=dict[str, int])
    looked_at: str = EVERYTHING

    @property
    def passed(self) -> bool:
        """Whether no row offends."""
        return self.offending == 0


@dataclass(frozen=True)
class Check:
    """A named check: what it promises, and for which kinds of assets."""

    name: str
    promise: str


OVERLAP = Check("versions_do_not_overlap", "no version ends after the next one begins")
CONTIGUOUS = Check("versions_are_contiguous", "every version ends where the next one begins")
DUPLICATE = Check("one_version_per_key_and_timestamp", "no key has two versions at one time")
INTERVAL = Check("valid_from_before_valid_to", "every version begins before it ends")
SEGMENTED = Check(
    "versions_lie_in_their_segment",
    "current versions are stored apart, and history by the time it ended: else readers would miss it",
)
CURRENT = Check("one_current_version_per_key", "no key has two versions that are open")
RETENTION = Check("nothing_older_than_retention", "no version ended before the retention began")
ONE_ROW = Check("one_row_per_key", "no key has two current rows")
ACCOUNTED = Check(
    "every_record_is_accounted_for",
    "input = applied + late + quarantined + duplicate, and offsets have no gap",
)
ORDER = Check(
    "timestamps_do_not_decrease",
    "per key, no result is older than one before it, unless it was late",
)
FINAL = Check("one_result_per_window", "no window was released twice: results are final")


def checks_of(node: Stream) -> list[Check]:
    """The checks that an asset has."""
    found: list[Check] = []
    if isinstance(node, VersionedTable):
        found = [OVERLAP, CONTIGUOUS, DUPLICATE, INTERVAL, CURRENT, RETENTION, SEGMENTED]
    elif isinstance(node, Table):
        found = [ONE_ROW]
    if processor_of(node).goes_forward:
        found.append(ORDER)
    if processor_of(node).is_final:
        found.append(FINAL)
    return [*found, ACCOUNTED]


@dataclass(frozen=True)
class Scope:
    """What an audit looks at.

    Of a view whose history is looked at from some segment on, what joins it to the part before, which
    the batch left alone, is not.

    Args:
        start: the log from these offsets on (inclusive).
        segment: of a versioned table's view what is current, and history from this segment on; None =
            all of it.
        rows: so many of the log, and ``rows_read``, of the view, more or less.
        view: whether the view is looked at: not where it is as it was looked at before.
    """

    start: Offsets
    segment: int | None
    rows: int
    rows_read: int
    view: bool = True


def audit(store: AssetStore, run_id: str | None = None) -> list[Finding]:
    """Runs all checks of an asset on its committed tables.

    Args:
        run_id: where the last batch is this run's, and nobody else has written to log or view since the
            batch before it, only what the batch changed is looked at: its rows of the log, the results
            that they could be at odds with, and the segments of the view that it wrote. What it left
            alone has been looked at after earlier runs. None = everything.

    Plan: one pass over the view for all checks on it, one over the log's offsets; samples are only
    fetched for a check that fails.
    """
    found: list[Finding] = []
    for _ in range(_TRIES):
        before = store.versions()
        found = _audited(store, run_id)
        if all(one.passed for one in found) or store.versions() == before:
            break
    return found


def _audited(store: AssetStore, run_id: str | None) -> list[Finding]:
    there = store.snapshot(as_stored=True)
    head = there.head
    if head is None:
        return [Finding(check.name, 0, []) for check in checks_of(store.node)]
    scope = None
    if run_id is not None and head.commit.run_id == run_id:
        scope = _of_the_batch(store, head, there.base)
    scope = scope or Scope({}, None, sum(head.commit.next_offset.values()), 0)
    with small_run(store.spark, is_small(scope.rows, scope.rows_read)):
        found = _findings(store, head, there.base, scope)
    if not scope.start:
        return found
    changed = f"what batch {head.commit.batch} changed"
    return [replace(one, looked_at=changed) if one.looked_at == EVERYTHING else one for one in found]


def _of_the_batch(store: AssetStore, head: Head, base: Base | None) -> Scope | None:
    """What the last batch changed; None where more than that must be looked at."""
    batch = head.commit.batch
    before = delta.batch_before(store.log_path, batch)
    if before is None:
        return None
    start = Commit.model_validate(before.document).next_offset
    if not start:
        return None
    rows = head.commit.total - sum(start.values())
    if not isinstance(store.node, Table):
        return Scope(start, None, rows, 0)
    if base is None:
        return None
    segments = base.checkpoint.segments
    if base.checkpoint.batch != batch:
        # It has not been written: the view is behind the log, or nothing in the log has changed it.
        last = None if segments is None else segments.last
        return Scope(start, last, rows, 0, view=False)
    if delta.batch_before(store.view_path, batch) is None:
        return None
    if segments is None:
        return Scope(start, None, rows, base.rows)
    written = {file.segment for file in delta.written_by(store.view_path, batch)}
    first = min((n for n in written if n is not None), default=segments.last)
    rows_read = sum(n for s, n in base.sizes.items() if s is None or s >= first)
    return Scope(start, first, rows, rows_read)


def _findings(store: AssetStore, head: Head, base: Base | None, scope: Scope) -> list[Finding]:
    node = store.node
    found: list[Finding] = []
    if isinstance(node, Table):
        if base is None or not scope.view:
            of_log = (ORDER, FINAL, ACCOUNTED)
            found += [_passed_over(check) for check in checks_of(node) if check not in of_log]
        elif isinstance(node, VersionedTable):
            found += _versions(store, node, base.checkpoint, scope)
        else:
            found += _rows(store, node)
    if processor_of(node).goes_forward:
        found.append(_order(store, node, head, scope))
    if processor_of(node).is_final:
        found.append(_final(store, node, head, scope))
    return [*found, _accounted(store, head, scope)]


def _passed_over(check: Check) -> Finding:
    return Finding(
        check.name, 0, [], looked_at="nothing: the view is what it was when it was looked at"
    )


def _in_one_pass(
    rows: DataFrame, offending: dict[str, Column], show: Callable[[DataFrame], DataFrame]
) -> list[Finding]:
    """Counts the rows of each condition in one job, and fetches samples of those that have any."""
    counts = rows.agg(
        *[
            F.coalesce(F.sum(F.coalesce(c, F.lit(False)).cast("long")), F.lit(0)).alias(n)
            for n, c in offending.items()
        ]
    ).collect()[0]
    return [
        Finding(name, counts[name], _sample(show(rows.where(condition))) if counts[name] else [])
        for name, condition in offending.items()
    ]


def _sample(rows: DataFrame) -> list[dict[str, Any]]:
    texts = rows.select(*[F.col(c).cast("string").alias(c) for c in rows.columns])
    return [row.asDict() for row in texts.limit(SAMPLE).collect()]


def _versions(
    store: AssetStore, node: VersionedTable, checkpoint: Checkpoint, scope: Scope
) -> list[Finding]:
    layout = checkpoint.segments or Segments()
    first = scope.segment

    def wanted(file: delta.File) -> bool:
        segment = file.segment
        return segment is None or first is None or segment >= first or segment < layout.first

    like = stored_as(node, store.log_path)
    rows = parquet.read(store.spark, store.view_path, wanted=wanted, parted=True, like=like)
    in_order = W.partitionBy(*node.key).orderBy(VALID_FROM, OFFSET)
    following = F.col("_next")
    horizon = of_table.horizon_of(node, by_partition(checkpoint.stream_time))
    # Segments are forgotten as a whole; readers leave out what has expired in the others.
    gone = F.coalesce(F.col(SEGMENT) < layout.first, F.lit(True))
    expired = F.coalesce(F.col(VALID_TO) <= horizon, F.lit(False))
    chained = rows.withColumn("_next", F.lead(VALID_FROM).over(in_order))
    is_open = F.col(VALID_TO).isNull()
    offending = {
        OVERLAP.name: (following > F.col(VALID_FROM)) & ~is_open & (F.col(VALID_TO) > following),
        CONTIGUOUS.name: ~expired
        & F.when(following.isNull(), ~is_open).otherwise(F.col(VALID_TO) < following),
        DUPLICATE.name: following == F.col(VALID_FROM),
        INTERVAL.name: F.col(VALID_TO) <= F.col(VALID_FROM),
        CURRENT.name: is_open & following.isNotNull(),
        RETENTION.name: expired & gone,
        SEGMENTED.name: ~F.col(SEGMENT).eqNullSafe(segment_of(layout)),
    }
    shown = [*node.key, VALID_FROM, VALID_TO, PARTITION, OFFSET]
    return _in_one_pass(
        chained, offending, lambda bad: bad.select(*shown, F.col("_next").alias("next_valid_from"))
    )


def _rows(store: AssetStore, node: Table) -> list[Finding]:
    rows = parquet.read(store.spark, store.view_path, like=stored_as(node, store.log_path))
    counted = rows.withColumn("_count", F.count(F.lit(1)).over(W.partitionBy(*node.key)))
    shown = [*node.key, TIMESTAMP, PARTITION, OFFSET]
    return _in_one_pass(counted, {ONE_ROW.name: F.col("_count") > 1}, lambda bad: bad.select(*shown))


def _stored_log(store: AssetStore) -> DataFrame:
    return parquet.read(store.spark, store.log_path, like=log_schema(store.node))


def _since(store: AssetStore, head: Head, scope: Scope, among: Column, moment: str) -> DataFrame:
    """Rows of the log: those to be looked at, and the earlier ones that are as young as any of them.

    Args:
        among: which rows have to do with the check.
        moment: the column that says how young a row is.

    Plan: where not everything is looked at, a job that finds the oldest; Delta leaves out files by it.
    """
    log = _stored_log(store).where(among)
    if not scope.start:
        return log
    new = store.log(scope.start, head, counted=False).where(among)
    oldest = new.agg(F.min(moment)).collect()[0][0]
    return new if oldest is None else log.where(F.col(moment) >= F.lit(oldest))


def _order(store: AssetStore, node: Stream, head: Head, scope: Scope) -> Finding:
    before = W.partitionBy(PARTITION, *node.key).orderBy(OFFSET).rowsBetween(W.unboundedPreceding, -1)
    among = has_key(node.key)
    if IS_LATE in _stored_log(store).columns:
        among = among & ~F.col(IS_LATE)
    rows = _since(store, head, scope, among, TIMESTAMP)
    rows = rows.withColumn("newest_before", F.max(TIMESTAMP).over(before))
    shown = [*node.key, TIMESTAMP, "newest_before", PARTITION, OFFSET]
    return _in_one_pass(
        rows,
        {ORDER.name: F.col(TIMESTAMP) < F.col("newest_before")},
        lambda bad: bad.select(*shown),
    )[0]


def _final(store: AssetStore, node: Stream, head: Head, scope: Scope) -> Finding:
    earlier = F.row_number().over(W.partitionBy(*node.key).orderBy(PARTITION, OFFSET))
    rows = _since(store, head, scope, F.lit(True), node.key[-1]).withColumn("release", earlier)
    shown = [*node.key, TIMESTAMP, "release", PARTITION, OFFSET]
    return _in_one_pass(rows, {FINAL.name: F.col("release") > 1}, lambda bad: bad.select(*shown))[0]


def _accounted(store: AssetStore, head: Head, scope: Scope) -> Finding:
    """Counts what is there and compares it with what the commits say that came in."""
    node, totals = store.node, head.commit.totals
    log = store.log(scope.start, head, counted=False) if scope.start else _stored_log(store)
    offsets = F.count_distinct(OFFSET).alias("offsets")
    spots = log.groupBy(PARTITION).agg(F.count(F.lit(1)).alias("rows"), offsets)
    there = {r[PARTITION]: r for r in spots.collect()}
    erased, gone = head.commit.erased, sum(head.commit.missing.values())
    problems: list[dict[str, Any]] = []
    lost = doubled = 0
    for partition, end in sorted(head.commit.next_offset.items()):
        row = there.get(partition)
        first = max(scope.start.get(partition, 0), head.commit.kept_from(partition))
        rows, offsets = (row["rows"], row["offsets"]) if row else (0, 0)
        # An erase is a batch of its own: in what a later one changed nothing is missing.
        wanted = end - first - (0 if scope.start else erased.get(partition, 0))
        lost += max(0, wanted - offsets)
        doubled += rows - offsets
        if rows != wanted or offsets != wanted:
            problems += _gaps(log.where(F.col(PARTITION) == partition), partition, first, end)
    numbers = {f"records_{k}": n for k, n in totals.items()}
    numbers.update(rows_in_log=_stored_log(store).count(), rows_lost=lost, **head.commit.missing)
    taken = sum(sum(ends.values()) for ends in head.commit.inputs.values()) - totals.get("erased", 0)
    short = processor_of(node).accounts(totals, taken, numbers["rows_in_log"] + gone)
    if node.operator is None:
        rejected = _rejected_counts(store)
        numbers.update({f"rows_in_quarantine_{k}": n for k, n in rejected.items()})
        rejected = Counter(rejected) + Counter(store.erased_rejected())
        late, lost_ties = rejected.get(Reason.LATE, 0), rejected.get(Reason.LOST_TIE, 0)
        others = sum(rejected.values()) - late - lost_ties
        short += [
            ("late records in quarantine", totals.get("late", 0), late),
            ("records that lost a tie in quarantine", totals.get(Fate.LOST_TIE, 0), lost_ties),
            ("bad records in quarantine", totals.get("quarantined", 0), others),
        ]
        if scope.start:
            applied = totals.get("applied", 0) + totals.get(CARRIED, 0)
            short.append(("records applied = rows in the log", applied, numbers["rows_in_log"] + gone))
        elif isinstance(node, VersionedTable):
            log = log.where(F.coalesce(CARRIED, F.lit(0)) == 0) if parts_of(node) else log
            counted = log.agg(F.count(F.lit(1)) - F.count_distinct(F.struct(*node.key, TIMESTAMP)))
            again = 0 if parts_of(node) else totals.get(CARRIED, 0)  # each has a version's time
            numbers["records_duplicate"] = max(0, counted.collect()[0][0] - again)
    wrong = [{"what": w, "expected": str(a), "found": str(b)} for w, a, b in short if a != b]
    offending = lost + doubled + sum(abs(a - b) for _, a, b in short)
    return Finding(ACCOUNTED.name, offending, (problems + wrong)[:SAMPLE], numbers)


def _gaps(log: DataFrame, partition: int, start: int, end: int) -> list[dict[str, Any]]:
    """Where offsets from ``start`` to ``end`` (exclusive) are missing or stand twice."""
    following = F.lead(OFFSET, 1, end).over(W.partitionBy(PARTITION).orderBy(OFFSET))
    first = log.agg(F.min(OFFSET)).collect()[0][0]
    spots = (
        log.select(OFFSET, following.alias("next"), PARTITION)
        .where(F.col("next") != F.col(OFFSET) + 1)
        .orderBy(OFFSET)
        .limit(SAMPLE)
        .collect()
    )
    gaps = [(r[OFFSET] + 1, r["next"] - 1) for r in spots]
    if first is None or first > start:
        gaps.insert(0, (start, (end if first is None else first) - 1))
    return [
        {
            "what": f"offsets of partition {partition}",
            "expected": f"{a}..{b}" if a <= b else f"{b} once",
            "found": "missing" if a <= b else "more than once",
        }
        for a, b in gaps
    ]


def _rejected_counts(store: AssetStore) -> dict[str, int]:
    rows = store.quarantine()
    if rows is None:
        return {}
    return {r["reason"]: r["count"] for r in rows.groupBy("reason").count().collect()}
