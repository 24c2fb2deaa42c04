"""The gate before a commit: one pass over what is about to be committed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from vt_dagster.columns import FATE, IS_LATEST, PARTITION, TIMESTAMP
from vt_dagster.core.arrival import CHUNK, Fate
from vt_dagster.core.processor import Processor
from vt_dagster.runs.contracts import Rule, contract_of, refuse

_REFUSED = (Fate.LATE, Fate.LOST_TIE, Fate.QUARANTINED, Fate.TOO_LATE)
_COUNTED = (Fate.APPLIED, Fate.DROPPED, Fate.COVERED, Fate.NOTHING_NEW, *_REFUSED)


@dataclass(frozen=True)
class Passed:
    """What the gate has seen of rows that may be committed.

    Args:
        counts: by fate, and the processor's tallies.
        by_partition: the same of each partition.
        times: of each partition, the largest timestamp of an applied row.
        earliest: the smallest timestamp of an applied row that is not its key's latest.
    """

    counts: dict[str, int]
    by_partition: dict[int, dict[str, int]]
    times: dict[int, int]
    earliest: int | None

    @property
    def few(self) -> bool:
        """Whether one task can well put into order what is applied of a partition."""
        return max((c[Fate.APPLIED] for c in self.by_partition.values()), default=0) <= CHUNK


def gate(processor: Processor[Any], rows: DataFrame) -> Passed:
    """Counts, contract and stream time of a run's results, in one aggregate by partition.

    Raises:
        ContractError: rows break their schema's checks.
    """
    node = processor.node
    rules, probes = contract_of(node)
    applied = F.col(FATE) == Fate.APPLIED
    tallies = processor.tallies(rows.columns)
    wanted: dict[str, Column] = {
        "in": F.count(F.lit(1)),
        **{fate: F.count_if(F.col(FATE) == fate) for fate in _COUNTED},
        **tallies,
        "_time": F.max(F.when(applied, F.unix_micros(TIMESTAMP))),
        **{f"_rule{i}": F.count_if(applied & rule.violated) for i, rule in enumerate(rules)},
    }
    if IS_LATEST in rows.columns:
        out_of_order = F.when(applied & ~F.col(IS_LATEST), F.unix_micros(TIMESTAMP))
        wanted["_earliest"] = F.min(out_of_order)
    found = rows.groupBy(PARTITION).agg(*[c.alias(name) for name, c in wanted.items()]).collect()
    by_partition = {
        row[PARTITION]: {name: row[name] for name in ("in", *_COUNTED, *tallies)} for row in found
    }
    names = ("in", *_COUNTED, *tallies)
    counts = {name: sum(some[name] for some in by_partition.values()) for name in names}
    broken = _broken(rules, found)
    kept = rows.where(applied)
    broken.update({p.name: -1 for p in probes if not p.holds(kept)})
    refuse(node, broken, kept, rules)
    times = {row[PARTITION]: row["_time"] for row in found if row["_time"] is not None}
    earliest = [row["_earliest"] for row in found if "_earliest" in wanted]
    return Passed(
        counts, by_partition, times, min((t for t in earliest if t is not None), default=None)
    )


def _broken(rules: list[Rule], found: list[Any]) -> dict[str, int]:
    sums = {rule.name: sum(row[f"_rule{i}"] for row in found) for i, rule in enumerate(rules)}
    return {name: n for name, n in sums.items() if n}
