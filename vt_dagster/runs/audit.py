"""Audits committed tables: queries that find the rows which break an invariant. No Dagster."""

from __future__ import annotations

import posixpath
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial, reduce
from typing import Any, TypeAlias

from pyspark.sql import Column, DataFrame
from pyspark.sql import Window as W
from pyspark.sql import functions as F

from vt_dagster import rules
from vt_dagster.columns import (
    OFFSET,
    PARTITION,
    PROPAGATED_FROM,
    SEGMENT,
    TIMESTAMP,
    VALID_FROM,
    VALID_TO,
)
from vt_dagster.core import table_store as of_table
from vt_dagster.core.arrival_order import REFUSED, by_partition, has_key
from vt_dagster.core.log_columns import log_schema, partial_columns
from vt_dagster.core.processor_registry import processor_of
from vt_dagster.runs.gate import (
    CHECKS,
    PROMISES,
    Rule,
    invariants_of_log,
    invariants_of_view,
    rule_of,
    shown_as,
    with_columns_of,
)
from vt_dagster.runs.gate import expired as expired_versions
from vt_dagster.spark.settings import is_small, small_run
from vt_dagster.storage import delta, parquet
from vt_dagster.storage.asset_store import AssetStore
from vt_dagster.storage.commit_log import Checkpoint, Commit, Offsets, Segments
from vt_dagster.storage.spark_reader import Head
from vt_dagster.storage.view import Base, segment_of, stored_as
from vt_dagster.topology.model import Stream, Table, VersionedTable

SAMPLE = 10
EVERYTHING = "everything"
NO_TABLES = "nothing: there are no tables in "
_TRIES = 5
"""Number of attempts per audit. If a run commits during an audit, the audit may read two states and
fail, so a failed one is repeated."""


@dataclass(frozen=True)
class Finding:
    """The result of one check: number of offending rows, a sample, other counts, and the scope."""

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
    """A check: its name and the invariant that it tests."""

    name: str
    promise: str


SEGMENTED = Check(
    "versions_lie_in_their_segment",
    "current versions are stored apart, history by its end time, so that readers find all versions",
)
ACCOUNTED = Check(
    "every_record_is_accounted_for",
    "input = applied + late + quarantined + duplicate, and offsets have no gap",
)


def checks_of(node: Stream) -> list[Check]:
    """Returns an asset's checks: the invariants of its contract, and those that need stored files."""
    of_view = [Check(name, PROMISES[name]) for name in invariants_of_view(node)]
    if isinstance(node, VersionedTable):
        of_view.append(SEGMENTED)
    return [*of_view, *(Check(name, PROMISES[name]) for name in invariants_of_log(node)), ACCOUNTED]


@dataclass(frozen=True)
class Scope:
    """The rows that an audit checks.

    If the audit checks history from a segment on, it does not check the transition from the segments
    before it, which the batch did not change.

    Args:
        start: first offsets of the log to check (inclusive); empty = the whole log.
        segment: first segment of a versioned table's history to check, besides all current versions;
            None = the whole view.
        rows: approximate number of log rows; ``rows_read``: of view rows.
        view: whether to check the view; false if it is unchanged since the last audit.
    """

    start: Offsets
    segment: int | None
    rows: int
    rows_read: int
    view: bool = True


def audit(store: AssetStore, run_id: str | None = None) -> list[Finding]:
    """Runs all checks of an asset on its committed tables.

    Args:
        run_id: checks only the changes of the last batch, if this run wrote it and no other writer has
            changed log or view since the batch before: the batch's rows of the log, earlier results
            that could conflict with them, and the view segments that it wrote. Audits of earlier runs
            have checked the rest. None = checks everything.

    Plan: one job, with one pass over the view for all its checks, one over the log's offsets and one
    over the quarantine table; samples are fetched only for a failed check. An operator with ordered
    results takes one more job, which finds the oldest new result.
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
        nothing = f"{NO_TABLES}{posixpath.dirname(store.log_path)}"
        return [Finding(check.name, 0, [], looked_at=nothing) for check in checks_of(store.node)]
    scope = None
    if run_id is not None and head.commit.run_id == run_id:
        scope = _scope_of_batch(store, head, there.base)
    scope = scope or Scope({}, None, sum(head.commit.next_offset.values()), 0)
    with small_run(store.spark, is_small(scope.rows, scope.rows_read), scope.rows):
        found = _findings(store, head, there.base, scope)
    if not scope.start:
        return found
    changed = f"changes of batch {head.commit.batch}"
    return [replace(one, looked_at=changed) if one.looked_at == EVERYTHING else one for one in found]


def _scope_of_batch(store: AssetStore, head: Head, base: Base | None) -> Scope | None:
    """Returns what the last batch has changed; None = the audit must check more than that."""
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
        # The batch did not write the view: it is behind the log, or the batch did not change it.
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
    log = invariants_of_log(node)
    on_rows: list[_OnRows] = []
    unchanged: list[Check] = []
    if isinstance(node, Table):
        if base is None or not scope.view:
            of_log = {*log, ACCOUNTED.name}
            unchanged = [check for check in checks_of(node) if check.name not in of_log]
        elif isinstance(node, VersionedTable):
            on_rows.append(_versions(store, node, base.checkpoint, scope))
        else:
            on_rows.append(_rows(store, node))
    on_rows += [_of_log(store, node, head, scope, name, given) for name, given in log.items()]
    accounts = _count_recorded(store, head, scope)
    counted = _count([*[one.counts for one in on_rows], *accounts.values()])
    nothing = "nothing: the view is unchanged since the last audit"
    found = [Finding(check.name, 0, [], looked_at=nothing) for check in unchanged]
    by_rule, by_account = counted[: len(on_rows)], counted[len(on_rows) :]
    for one, counts in zip(on_rows, by_rule, strict=True):
        found += one.findings(counts[None])
    of_accounts = dict(zip(accounts, by_account, strict=True))
    return [*found, _check_recorded(store, head, scope, of_accounts)]


@dataclass(frozen=True)
class _Counts:
    """Aggregates to compute over some rows, grouped by ``by`` if it is given."""

    rows: DataFrame
    columns: Mapping[str, Column]
    by: str | None = None


_Counted: TypeAlias = dict[str | None, dict[str, int]]
"""Counts by name, per value (as text) of the grouping column; None = of all rows."""


def _count(wanted: Sequence[_Counts]) -> list[_Counted]:
    """Returns the counts of several DataFrames, in the order given.

    Plan: one job, the union of their aggregates. Their stages run in parallel, and Spark plans and
    schedules once, which takes most of the time of a small audit.
    """
    parts: list[DataFrame] = []
    for number, one in enumerate(wanted):
        grouped = one.rows.groupBy(*([] if one.by is None else [one.by]))
        sums = grouped.agg(*[column.alias(name) for name, column in one.columns.items()])
        group = F.lit(None) if one.by is None else F.col(one.by)
        counts = F.array(*[F.col(name).cast("long") for name in one.columns])
        parts.append(
            sums.select(
                F.lit(number).alias("part"), group.cast("string").alias("group"), counts.alias("counts")
            )
        )
    found: list[_Counted] = [{} for _ in wanted]
    for row in reduce(DataFrame.union, parts).collect():
        names = wanted[row["part"]].columns
        found[row["part"]][row["group"]] = dict(zip(names, row["counts"], strict=True))
    return found


@dataclass(frozen=True)
class _OnRows:
    """Rows, and the rules to check on them.

    Args:
        shown: the columns of a sample, besides the rule's own columns.
    """

    rows: DataFrame
    rules: Sequence[Rule]
    shown: Sequence[str]

    @property
    def counts(self) -> _Counts:
        """Returns the number of rows that break each rule."""
        broken = {r.name: F.count_if(r.violated) for r in self.rules}
        return _Counts(with_columns_of(self.rows, self.rules), broken)

    def findings(self, counts: Mapping[str, int]) -> list[Finding]:
        """Returns the rules' findings. Plan: one more job per broken rule, for the sample."""
        return [Finding(r.name, counts[r.name], self._sample(r, counts[r.name])) for r in self.rules]

    def _sample(self, rule: Rule, broken: int) -> list[dict[str, Any]]:
        if not broken:
            return []
        bad = with_columns_of(self.rows, self.rules).where(rule.violated)
        more = [F.col(name).alias(shown_as(name)) for name in rule.columns]
        return _sample(bad.select(*[F.col(f"`{c}`") for c in self.shown], *more))


def _rules(invariants: Mapping[str, dict[str, Any]], columns: Sequence[str]) -> list[Rule]:
    """Returns the invariants of a contract as conditions."""
    found: list[Rule] = []
    for name, parameters in invariants.items():
        rule = rule_of(name, partial(CHECKS[name], **parameters), columns)
        assert rule is not None, f"{name} cannot be read as a condition"
        found.append(rule)
    return found


def _sample(rows: DataFrame) -> list[dict[str, Any]]:
    texts = rows.select(*[F.col(c).cast("string").alias(c) for c in rows.columns])
    return [row.asDict() for row in texts.limit(SAMPLE).collect()]


def _versions(store: AssetStore, node: VersionedTable, checkpoint: Checkpoint, scope: Scope) -> _OnRows:
    layout = checkpoint.segments or Segments()
    first = scope.segment

    def wanted(file: delta.File) -> bool:
        segment = file.segment
        return segment is None or first is None or segment >= first or segment < layout.first

    like = stored_as(node, store.log_path)
    rows = parquet.read(store.spark, store.view_path, wanted=wanted, parted=True, like=like)
    horizon = of_table.horizon_of(node, by_partition(checkpoint.stream_time))
    # Expired versions may stay in a segment until the whole segment is removed: readers filter them.
    gone = F.coalesce(F.col(SEGMENT) < layout.first, F.lit(True))
    expired = expired_versions(horizon, VALID_TO)
    invariants = invariants_of_view(node)
    del invariants["nothing_older_than_retention"]  # replaced below by a check per partition
    rules = _rules(invariants, rows.columns)
    kept = ~F.coalesce(expired, F.lit(False))
    rules = [
        replace(r, violated=kept & r.violated) if r.name == "versions_are_contiguous" else r
        for r in rules
    ]
    rules += [
        Rule("nothing_older_than_retention", expired & gone),
        Rule(SEGMENTED.name, ~F.col(SEGMENT).eqNullSafe(segment_of(layout))),
    ]
    return _OnRows(rows, rules, [*node.key, VALID_FROM, VALID_TO, PARTITION, OFFSET])


def _rows(store: AssetStore, node: Table) -> _OnRows:
    rows = parquet.read(store.spark, store.view_path, like=stored_as(node, store.log_path))
    rules = _rules(invariants_of_view(node), rows.columns)
    return _OnRows(rows, rules, [*node.key, TIMESTAMP, PARTITION, OFFSET])


def _stored_log(store: AssetStore) -> DataFrame:
    return parquet.read(store.spark, store.log_path, like=log_schema(store.node))


def _since(store: AssetStore, head: Head, scope: Scope, among: Column, moment: str) -> DataFrame:
    """Returns the log rows of the scope, and earlier rows at or after the oldest time among these.

    Args:
        among: condition of the rows that the check concerns.
        moment: the time column to compare.

    Plan: unless the scope is the whole log, one job finds the oldest time; Delta skips files by it.
    """
    log = _stored_log(store).where(among)
    if not scope.start:
        return log
    new = store.log(scope.start, head, counted=False).where(among)
    oldest = new.agg(F.min(moment)).collect()[0][0]
    return new if oldest is None else log.where(F.col(moment) >= F.lit(oldest))


def _of_log(
    store: AssetStore, node: Stream, head: Head, scope: Scope, name: str, given: dict[str, Any]
) -> _OnRows:
    """Returns the check of an invariant on the new rows of a log, and on the earlier rows with which
    they may break it."""
    among, moment = F.lit(True), node.key[-1]
    if name == "timestamps_do_not_decrease":
        among, moment = has_key(node.key), TIMESTAMP
    rows = _since(store, head, scope, among, moment)
    shown = [*node.key, TIMESTAMP, PARTITION, OFFSET]
    return _OnRows(rows, _rules({name: given}, rows.columns), shown)


def _log_of(store: AssetStore, head: Head, scope: Scope) -> DataFrame:
    return store.log(scope.start, head, counted=False) if scope.start else _stored_log(store)


def _count_recorded(store: AssetStore, head: Head, scope: Scope) -> dict[str, _Counts]:
    """Returns the counts that :func:`_check_recorded` needs."""
    node, log = store.node, _log_of(store, head, scope)
    spots = {"rows": F.count(F.lit(1)), "offsets": F.count_distinct(OFFSET)}
    found = {"log": _Counts(log, spots, PARTITION)}
    if node.operator is not None:
        return found
    quarantine = store.quarantine()
    if quarantine is not None:
        # The checks that a row breaks follow the rule's name: too many names for metadata.
        of_rule = quarantine.withColumn("reason", F.substring_index("reason", ": ", 1))
        found["quarantine"] = _Counts(of_rule, {"rows": F.count(F.lit(1))}, "reason")
    if not scope.start and isinstance(node, VersionedTable):
        if partial_columns(node):
            log = log.where(F.coalesce(PROPAGATED_FROM, F.lit(0)) == 0)
        again = F.count(F.lit(1)) - F.count_distinct(F.struct(*node.key, TIMESTAMP))
        found["duplicates"] = _Counts(log, {"rows": again})
    return found


def _check_recorded(
    store: AssetStore, head: Head, scope: Scope, counted: Mapping[str, _Counted]
) -> Finding:
    """Compares the stored rows with the record counts in the commits.

    Args:
        counted: the results of :func:`_count_recorded`.
    """
    node, totals, there = store.node, head.commit.totals, counted["log"]
    erased, gone = head.commit.erased, sum(head.commit.missing.values())
    problems: list[dict[str, Any]] = []
    lost = doubled = 0
    for partition, end in sorted(head.commit.next_offset.items()):
        row = there.get(str(partition), {})
        first = max(scope.start.get(partition, 0), head.commit.kept_from(partition))
        rows, offsets = row.get("rows", 0), row.get("offsets", 0)
        # An erase is a batch of its own: rows of a later batch are complete.
        wanted = end - first - (0 if scope.start else erased.get(partition, 0))
        lost += max(0, wanted - offsets)
        doubled += rows - offsets
        if rows != wanted or offsets != wanted:
            log = _log_of(store, head, scope).where(F.col(PARTITION) == partition)
            problems += _gaps(log, partition, first, end)
    # Earlier audits have read the older rows; Delta's statistics are enough to count them here.
    in_log = sum(
        (file.rows for file in delta.files(store.log_path, head.version))
        if scope.start
        else (row["rows"] for row in there.values())
    )
    numbers = {f"records_{k}": n for k, n in totals.items()}
    numbers.update(rows_in_log=in_log, rows_lost=lost, **head.commit.missing)
    taken = sum(sum(ends.values()) for ends in head.commit.inputs.values()) - totals.get("erased", 0)
    short = processor_of(node).plan().counts.accounts(totals, taken, in_log + gone)
    if node.operator is None:
        rejected = {str(reason): row["rows"] for reason, row in counted.get("quarantine", {}).items()}
        numbers.update({f"rows_in_quarantine_{k}": n for k, n in rejected.items()})
        rejected = Counter(rejected) + Counter(store.erased_rejected())
        refused = {name: rejected.get(name, 0) for name in REFUSED}
        others = sum(rejected.values()) - sum(refused.values())
        short += [
            *((f"{name} records in quarantine", totals.get(name, 0), n) for name, n in refused.items()),
            ("bad records in quarantine", totals.get("quarantined", 0), others),
        ]
        if scope.start:
            applied = totals.get("applied", 0) + totals.get(rules.CARRIED.name, 0)
            short.append(("records applied = rows in the log", applied, in_log + gone))
        elif "duplicates" in counted:
            # A row with forward-merged values has the time of an existing version: no duplicate.
            again = 0 if partial_columns(node) else totals.get(rules.CARRIED.name, 0)
            numbers["records_duplicate"] = max(0, counted["duplicates"][None]["rows"] - again)
    wrong = [{"what": w, "expected": str(a), "found": str(b)} for w, a, b in short if a != b]
    offending = lost + doubled + sum(abs(a - b) for _, a, b in short)
    return Finding(ACCOUNTED.name, offending, (problems + wrong)[:SAMPLE], numbers)


def _gaps(log: DataFrame, partition: int, start: int, end: int) -> list[dict[str, Any]]:
    """Returns the offsets from ``start`` to ``end`` (exclusive) that are missing or duplicate."""
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
