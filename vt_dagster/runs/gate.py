"""The gate before a commit: one pass over what is about to be committed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from vt_dagster.columns import IS_LATE, IS_LATEST, OLD, OUTCOME, PARTITION, TIMESTAMP
from vt_dagster.core.arrival_order import CHUNK, Outcome
from vt_dagster.core.processor import Processor
from vt_dagster.core.source_order import follows_source
from vt_dagster.core.source_records import START
from vt_dagster.core.table_store import horizon_of
from vt_dagster.runs.invariants import decreasing, repeated_results
from vt_dagster.runs.pandera_checks import Rule, contract_of, refuse, with_columns_of
from vt_dagster.topology.model import Table, VersionedTable

_REFUSED = (Outcome.LATE, Outcome.LOST_TIE, Outcome.QUARANTINED, Outcome.TOO_LATE)
_COUNTED = (Outcome.APPLIED, Outcome.DROPPED, Outcome.COVERED, Outcome.NOTHING_NEW, *_REFUSED)


@dataclass(frozen=True)
class Passed:
    """Counts and times of rows that have passed the gate and may be committed.

    Args:
        counts: records by outcome, and the processor's tallies.
        by_partition: these counts per partition.
        times: per partition, the largest timestamp of an applied row.
        earliest: the smallest timestamp of an applied row that is not its key's latest.
    """

    counts: dict[str, int]
    by_partition: dict[int, dict[str, int]]
    times: dict[int, int]
    earliest: int | None

    @property
    def single_task(self) -> bool:
        """Whether a partition has so few applied records that one task can sort them."""
        return max((c[Outcome.APPLIED] for c in self.by_partition.values()), default=0) <= CHUNK


def gate(processor: Processor[Any], rows: DataFrame, stream_time: Column) -> Passed:
    """Checks contract and invariants of a run's results and counts them, in one aggregate.

    Args:
        stream_time: stream time of the row's partition before the run, TIMESTAMP; null = none yet.

    Raises:
        ContractError: rows break their schema's checks, or an invariant.
    """
    node = processor.node
    rules, probes = contract_of(node, rows.columns)
    rules += invariants_before_commit(processor, rows.columns, stream_time)
    applied = F.col(OUTCOME) == Outcome.APPLIED
    tallies = processor.tallies(rows.columns)
    wanted: dict[str, Column] = {
        "in": F.count(F.lit(1)),
        **{outcome: F.count_if(F.col(OUTCOME) == outcome) for outcome in _COUNTED},
        **tallies,
        "_time": F.max(F.when(applied, F.unix_micros(TIMESTAMP))),
        **{f"_rule{i}": F.count_if(applied & rule.violated) for i, rule in enumerate(rules)},
    }
    if IS_LATEST in rows.columns:
        out_of_order = F.when(applied & ~F.col(IS_LATEST), F.unix_micros(TIMESTAMP))
        wanted["_earliest"] = F.min(out_of_order)
    checked = with_columns_of(rows, rules)
    found = checked.groupBy(PARTITION).agg(*[c.alias(name) for name, c in wanted.items()]).collect()
    by_partition = {
        row[PARTITION]: {name: row[name] for name in ("in", *_COUNTED, *tallies)} for row in found
    }
    names = ("in", *_COUNTED, *tallies)
    counts = {name: sum(some[name] for some in by_partition.values()) for name in names}
    broken = _broken(rules, found)
    kept = rows.where(applied)
    broken.update({p.name: -1 for p in probes if not p.holds(kept)})
    refuse(node, broken, rows, [replace(r, violated=applied & r.violated) for r in rules])
    times = {row[PARTITION]: row["_time"] for row in found if row["_time"] is not None}
    earliest = [row["_earliest"] for row in found if "_earliest" in wanted]
    return Passed(
        counts, by_partition, times, min((t for t in earliest if t is not None), default=None)
    )


def invariants_before_commit(
    processor: Processor[Any], columns: Sequence[str], stream_time: Column
) -> list[Rule]:
    """Returns the invariants of the rows that a run is about to commit, and of the changed intervals.

    - A row of a table that becomes the current one is compared with the row it replaces, its ``old``: a
      version begins where the version before ends, so it must not begin earlier. No other row is read.
    - No row applied to a versioned table is older than the table's retention before the run.
    - Results of a stream, which have no ``old``, are compared among the rows of the run.

    Only the asset checks compare with all rows of earlier runs. Needs a running Spark session.
    """
    node = processor.node
    promised = (isinstance(node, VersionedTable), processor.monotonic, processor.emits_once)
    if not any(promised):
        return []
    found = list[Rule]()
    replaces = None
    if isinstance(node, Table) and OLD in columns:
        before = F.col(OLD)[TIMESTAMP]
        latest = F.col(IS_LATEST) if IS_LATEST in columns else F.lit(True)
        replaces = latest & (F.col(TIMESTAMP) < before)
    if isinstance(node, VersionedTable):
        if replaces is not None:
            found.append(Rule("versions_do_not_overlap", replaces))
        old = F.coalesce(F.col(TIMESTAMP) < horizon_of(node, stream_time), F.lit(False))
        if START in columns:  # rows of an initial snapshot are current, however old
            old = old & ~F.col(START)
        if not follows_source(node):  # such a table takes the source's rows, however old
            found.append(Rule("nothing_older_than_retention", old))
    # The outcome is part of the key: applied rows must not be compared with the others.
    key = [OUTCOME, PARTITION, *node.key]
    if processor.monotonic and replaces is not None:
        found.append(Rule("timestamps_do_not_decrease", replaces))
    elif processor.monotonic:
        among = ~F.coalesce(F.col(IS_LATE), F.lit(False)) if IS_LATE in columns else None
        broken = decreasing(key, TIMESTAMP, processor.result_order, among)
        found.append(Rule("timestamps_do_not_decrease", broken.where, broken.columns))
    if processor.emits_once:
        broken = repeated_results(key, processor.result_order)
        found.append(Rule("one_result_per_window", broken.where, broken.columns))
    return found


def _broken(rules: list[Rule], found: list[Any]) -> dict[str, int]:
    sums = {rule.name: sum(row[f"_rule{i}"] for row in found) for i, rule in enumerate(rules)}
    return {name: n for name, n in sums.items() if n}
