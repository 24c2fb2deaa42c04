"""What every run of an asset has: what it takes, the gate before its commit, the commit. No Dagster.

The order of what is written is the protocol: first, under the attempt's name, what the run rejects,
what it keeps for the next one and the files it consumed; then the log (**the commit**); then view and
quarantine, which follow from it. ``run_source``, ``run_join`` and ``run_operator`` go this way.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from vt_dagster.columns import FATE, HOME, IS_LATEST, PARTITION, SEQUENCE, TIMESTAMP
from vt_dagster.core.arrival import CHUNK, Fate, has_key
from vt_dagster.core.stream_table_join import MATCHED
from vt_dagster.errors import StorageError
from vt_dagster.runs.contracts import Rule, contract_of, refuse
from vt_dagster.sources.files import FileInfo
from vt_dagster.sources.kafka import Pinned
from vt_dagster.spark.small_runs import is_small
from vt_dagster.storage.positions import Commit, Offsets
from vt_dagster.storage.store import AssetStore, Head, shape_of
from vt_dagster.topology.model import Stream
from vt_dagster.topology.operators import WindowedAggregate

_FEW_BYTES, _SMALL_BYTES = 4_000_000, 2_000_000
"""Of files: so many bytes are some ten thousand lines."""


@dataclass(frozen=True)
class Arrival:
    """What one run takes, pinned when it starts."""

    node: Stream
    previous: Head | None
    attempt: str
    files: tuple[FileInfo, ...] = ()
    topics: Pinned | None = None
    inputs: dict[str, Head] = field(default_factory=dict[str, Head])
    """Of each log that is read, the commit up to which."""
    views: dict[str, int] = field(default_factory=dict[str, int])
    """Of each table that is read, the version of its view at that commit."""
    stream_time: dict[int, int] = field(default_factory=dict[int, int])
    """An operator's own stream time at the end of the run."""
    gauges: dict[str, float] = field(default_factory=dict[str, float])
    released: dict[int, int] = field(default_factory=dict[int, int])
    """A join's due time at the end of the run; see ``core/grace.py``."""
    taken: dict[str, dict[int, tuple[int, int]]] = field(
        default_factory=dict[str, dict[int, tuple[int, int]]]
    )
    met: int = 0
    """How many rows of tables the run meets, as far as one knows before it (``Applied.reach``)."""
    state_bytes: int = 0
    """Of what an operator keeps from run to run."""
    started: float = field(default_factory=time.monotonic)

    @property
    def empty(self) -> bool:
        """Whether there is nothing new: such a run commits nothing."""
        return not self.files and not self.taken

    def __post_init__(self) -> None:
        for name, head in self.inputs.items():
            known = self.before.logs.get(name, head.commit.log)
            if known != head.commit.log:
                raise StorageError(
                    f"{self.node.name}: the log of {name} is another one than in batch "
                    f"{self.before.batch}: its offsets mean other records. Replay {self.node.name} "
                    "into tables of another name, compare, and swap them too"
                )

    @property
    def records(self) -> int:
        """How many records of logs or topics the run takes, those included that waited."""
        new = sum(end - start for ranges in self.taken.values() for start, end in ranges.values())
        return new + self.before.counts.get(Fate.WAITING, 0)

    @property
    def few(self) -> bool:
        """Whether the run takes few records."""
        return self.records <= CHUNK and sum(f.size for f in self.files) <= _FEW_BYTES

    @property
    def in_one_piece(self) -> bool:
        """Whether one task can well put into order what the run takes of a partition."""
        if self.files:
            return self.few
        of_each = Counter[int]()
        for ranges in self.taken.values():
            of_each.update({partition: end - start for partition, (start, end) in ranges.items()})
        waiting = self.before.counts.get(Fate.WAITING, 0)
        return max(of_each.values(), default=0) + waiting <= CHUNK

    @property
    def small(self) -> bool:
        """Whether there is so little, also in the tables that the run meets, that planning is most of
        the work."""
        size = self.state_bytes + sum(f.size for f in self.files)
        return size <= _SMALL_BYTES and is_small(self.records, self.met)

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


_COUNTED = (Fate.APPLIED, Fate.LATE, Fate.DROPPED, Fate.QUARANTINED)


@dataclass(frozen=True)
class Found:
    """What the gate sees of the rows that are about to be committed.

    Args:
        counts: by fate.
        ends: of each partition, the number of applied rows.
        times: of each partition, the largest timestamp.
        earliest: the smallest timestamp of an applied row that is not its key's latest.
    """

    counts: dict[str, int]
    ends: dict[int, int]
    times: dict[int, int]
    earliest: int | None

    @property
    def in_one_piece(self) -> bool:
        """Whether one task can well put into order what is applied of a partition."""
        return max(self.ends.values(), default=0) <= CHUNK


def gate(node: Stream, rows: DataFrame) -> Found:
    """One pass over what is about to be committed: counts, contract, stream time."""
    rules, probes = contract_of(node)
    applied = F.col(FATE) == Fate.APPLIED

    def count(condition: Any) -> Any:
        return F.coalesce(F.sum(condition.cast("long")), F.lit(0))

    wanted = [
        F.count(F.lit(1)).alias("in"),
        *[count(F.col(FATE) == f).alias(f) for f in _COUNTED],
        F.max(F.when(applied, F.unix_micros(TIMESTAMP))).alias("_time"),
        *[count(applied & rule.violated).alias(f"_rule{i}") for i, rule in enumerate(rules)],
    ]
    if IS_LATEST in rows.columns:
        out_of_order = F.when(applied & ~F.col(IS_LATEST), F.unix_micros(TIMESTAMP))
        wanted.append(F.min(out_of_order).alias("_earliest"))
    if MATCHED in rows.columns:
        wanted.append(count(~F.col(MATCHED)).alias("unmatched"))
    if isinstance(node.operator, WindowedAggregate):
        # A record that is no record for windows, for its null key or value, has no window either.
        late = (F.col(FATE) == Fate.DROPPED) & has_key(node.key)
        wanted.append(count(late).alias("expired_window_records_dropped"))
        record = F.when(late, F.struct(HOME, SEQUENCE))
        wanted.append(F.count_distinct(record).alias("late_records_dropped"))
    found = [row.asDict() for row in rows.groupBy(PARTITION).agg(*wanted).collect()]
    names = ["in", *_COUNTED, "unmatched"]
    names += ["late_records_dropped", "expired_window_records_dropped"]
    counts = {n: sum(row.get(n, 0) for row in found) for n in names}
    broken = _broken(rules, found)
    kept = rows.where(applied)
    broken.update({p.name: -1 for p in probes if not p.holds(kept)})
    refuse(node, broken, kept, rules)
    ends = {row[PARTITION]: row[Fate.APPLIED] for row in found if row[Fate.APPLIED]}
    times = {row[PARTITION]: row["_time"] for row in found if row["_time"] is not None}
    earliest = [row["_earliest"] for row in found if row.get("_earliest") is not None]
    return Found(counts, ends, times, min(earliest, default=None))


def _broken(rules: list[Rule], found: list[dict[str, Any]]) -> dict[str, int]:
    sums = {r.name: sum(row[f"_rule{i}"] for row in found) for i, r in enumerate(rules)}
    return {name: n for name, n in sums.items() if n}


def next_commit(
    arrival: Arrival,
    found: Found,
    counts: dict[str, int],
    *,
    inputs: dict[str, Offsets],
    stream_time: dict[int, int],
    **more: Any,
) -> Commit:
    before = arrival.before
    offsets, times = dict(before.next_offset), dict(before.stream_time)
    for partition, rows in found.ends.items():
        offsets[partition] = offsets.get(partition, 0) + rows
    for partition, moment in stream_time.items():
        times[partition] = max(times.get(partition, moment), moment)
    if arrival.topics is None:  # a topic says all its partitions, and may have fewer than before
        inputs = {n: {**before.inputs.get(n, {}), **positions} for n, positions in inputs.items()}
    totals = {k: before.totals.get(k, 0) + n for k, n in counts.items()}
    if Fate.WAITING in counts:
        totals[Fate.WAITING] = counts[Fate.WAITING]
    return Commit(
        asset=arrival.node.name,
        batch=before.batch + 1,
        attempt=arrival.attempt,
        shape=shape_of(arrival.node),
        log=before.log or arrival.attempt,
        logs={**before.logs, **{name: head.commit.log for name, head in arrival.inputs.items()}},
        inputs={**before.inputs, **inputs},
        next_offset=offsets,
        stream_time=times,
        earliest=found.earliest,
        counts=counts,
        totals=totals,
        **more,
    )


def few_files(rows: DataFrame, count: int) -> DataFrame:
    """One file for each quarter of a million rows, and a task for each: small runs must not leave many
    small files, and large ones must not wait for one task."""
    return rows.coalesce(max(1, math.ceil(count / 250_000)))


def finish(store: AssetStore, arrival: Arrival, head: Head) -> Receipt:
    view_version = store.catch_up(head).version
    store.forget(arrival.previous)
    return Receipt(head.commit, head.version, view_version)
