"""Sources that say what a table holds: their last word counts, whatever their clocks say."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta, timezone
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import IntegerType, StringType, StructField, StructType, TimestampType

from vt_dagster import (
    DeltaSource,
    FilesSource,
    SnapshotSource,
    Stream,
    Table,
    TopologyError,
    VersionedTable,
    explain,
)
from vt_dagster.core.records import (
    DELETED,
    POSITION,
    RAW,
    REASON,
    RECORD_TIME,
    RESTATES,
    SOURCE,
)
from vt_dagster.orchestration.metadata import definition_metadata
from vt_dagster.orchestration.translator import code_version
from vt_dagster.runs.audit import audit
from vt_dagster.runs.run import run_once
from vt_dagster.storage.store import AssetStore, stores_of
from vt_dagster.testing.memory import MemoryStore, Records

BEGIN = datetime(2024, 1, 1, tzinfo=timezone.utc)
RETENTION = timedelta(seconds=30)
SCHEMA = StructType(
    [
        StructField("k", StringType()),
        StructField("v", IntegerType()),
        StructField("changed_at", TimestampType()),
    ]
)
ROW = pa.schema([("k", pa.string()), ("v", pa.int32()), ("changed_at", pa.timestamp("us", "UTC"))])


def at(second: int) -> datetime:
    return BEGIN + timedelta(seconds=second)


def seconds(moment: datetime | None) -> int | None:
    if moment is None:
        return None
    return round((moment.replace(tzinfo=timezone.utc) - BEGIN).total_seconds())


class Change(NamedTuple):
    """A record of a feed: a put at its own time, or a deletion (``v`` is None) at the source's."""

    k: str
    v: int | None
    own: int
    source: int
    restates: bool = False

    @property
    def time(self) -> int:
        return self.source if self.v is None else self.own


class Feed(Records):
    """Changes as a source that says what a table holds, as Kafka with Debezium does."""

    orders_changes = restates = gives_timestamp = True

    def check(self, name: str, key: Sequence[str], schema: StructType) -> None:
        """Any schema is right."""

    def read(self, spark: SparkSession, node: Stream) -> DataFrame:
        rows = [
            {"k": c.k, "v": c.v, "changed_at": None if c.v is None else at(c.own)}
            | {RECORD_TIME: at(c.source), DELETED: c.v is None, RESTATES: c.restates}
            | {"_arrival": i, "partition": 0}
            for i, c in enumerate(self.records)
        ]
        extra = [(RECORD_TIME, pa.timestamp("us", "UTC")), (DELETED, pa.bool_())]
        extra += [(RESTATES, pa.bool_()), ("_arrival", pa.int64()), ("partition", pa.int32())]
        table = pa.Table.from_pylist(rows, pa.schema([*ROW, *extra]))
        none = F.lit(None).cast("string")
        about = {SOURCE: F.lit("feed"), POSITION: F.col("_arrival"), RAW: none, REASON: none}
        return self.store.frame(table).withColumns(about)


def model(changes: Sequence[Change]) -> tuple[list[Any], list[Any], dict[str, int]]:
    """The log, the versions and the current rows, by the definition."""
    log: list[tuple[str, int, int | None]] = []
    newest: dict[str, int] = {}
    held: dict[str, int | None] = {}
    for c in changes:
        if c.restates and held.get(c.k) == c.v:
            continue
        log.append((c.k, c.time, c.v))
        if c.time < newest.get(c.k, c.time):
            log.append((c.k, newest[c.k], c.v))
        newest[c.k] = max(newest.get(c.k, c.time), c.time)
        held[c.k] = c.v
    horizon = max(t for _, t, _ in log) - RETENTION // timedelta(seconds=1)
    last = {(k, t): v for k, t, v in log}
    found: list[Any] = []
    for k in held:
        times = sorted(t for one, t in last if one == k)
        for begin, end in zip(times, [*times[1:], None], strict=True):
            v = last[k, begin]
            if (end is None or end > horizon) and (v is not None or begin >= horizon):
                found.append((k, begin, end, v))
    return log, sorted(found), {k: v for k, v in held.items() if v is not None}


def of_worlds(seed: int, worlds: int = 12, length: int = 25) -> list[Change]:
    """Changes of many keys, each with clocks of its own that lead, lag and jump back."""
    random, found = Random(seed), list[Change]()
    state: dict[str, tuple[int, int] | None] = {}
    clocks = {
        f"{seed}-{w}": (random.choice([0, 0, 8, -8, 40]), random.choice([0, 0, 15]))
        for w in range(worlds)
    }
    now = 0
    for _ in range(worlds * length // 2):
        now += random.randint(0, 1)
        k = random.choice(list(clocks))
        lead, late = clocks[k]
        if random.random() < 0.1:
            clocks[k] = (random.randint(-20, 20), late)
        row, own = state.get(k), now + lead + random.randint(-5, 5)
        kind = random.random()
        if row is not None and kind < 0.3:
            found.append(Change(k, None, 0, now + late))
            if random.random() < 0.5:  # the null message after it
                found.append(Change(k, None, 0, now + late + random.randint(0, 60), restates=True))
            state[k] = None
        elif row is None and kind < 0.4:
            found.append(Change(k, None, 0, now + late, restates=True))
        elif row is not None and kind < 0.4:  # a row of another snapshot
            found.append(Change(k, row[0], row[1], now, restates=True))
        else:
            before = [c.own for c in found if c.k == k and c.v is not None]
            own = random.choice([own, own, *before[-1:]])  # it comes back with its old time
            state[k] = (random.randint(0, 4), own)
            found.append(Change(k, *state[k], now))  # type: ignore[misc]
    return found


@pytest.mark.parametrize("seed", range(4))
def test_the_last_word_of_a_feed_counts_whatever_its_clocks(spark: SparkSession, seed: int) -> None:
    """Random changes: log and versions are those of the definition, however they are cut into runs."""
    changes, random = of_worlds(seed), Random(seed)
    log, versions, current = model(changes)
    node = VersionedTable(
        "rows", key="k", schema=SCHEMA, timestamp="changed_at", history_retention=RETENTION
    )
    assert sum(1 for c in changes if c.restates) > 5
    assert len(log) > len(changes) - sum(c.restates for c in changes)
    for runs in (1, 4):
        store = MemoryStore(node, spark)
        own = replace(node, source=Feed(store, []))
        store.node = own
        cuts = sorted(random.sample(range(1, len(changes)), runs - 1))
        totals = {"in": 0, "applied": 0, "carried": 0, "nothing_new": 0, "late": 0}
        for start, end in zip([0, *cuts], [*cuts, len(changes)], strict=True):
            receipt = run_once(own, lambda _, s=store: s, Feed(store, changes[start:end]))
            assert receipt.commit is not None
            for name in totals:
                totals[name] += receipt.commit.counts[name]
        rows = store.rows.to_pylist()
        assert [(r["k"], seconds(r["timestamp"]), r["v"]) for r in rows] == log
        found = [
            (r["k"], seconds(r["valid_from"]), seconds(r["valid_to"]), r["v"])
            for r in store.view().collect()
        ]
        assert sorted(found) == versions
        latest = {r[0]: r[3] for r in found if r[2] is None and r[3] is not None}
        assert latest == current
        carried = len(log) - totals["applied"]
        said = totals["applied"] + totals["nothing_new"]
        assert (totals["in"], totals["carried"], totals["late"]) == (said, carried, 0)
        assert totals["in"] == len(changes)
