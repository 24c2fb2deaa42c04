"""Recorded scenarios through real assets: files, Dagster, Delta, one run after the other.

The scenarios share two tables, a stream and a few joins: each is a partition of its own (an op of ours
between the public ones puts its records there), and all durations are scaled so that every scenario
has the same history retention. A run takes table records before stream records, so that a scenario
is cut wherever a table record follows a stream record.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from itertools import pairwise
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from pyspark.sql import SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import IntegerType, LongType, StringType, StructField, StructType

from tests.market import lines, messages, run
from vt_dagster import FilesSource, Stream, Table, VersionedTable, build_asset, ops
from vt_dagster.storage.store import AssetStore

SCENARIOS = Path(__file__).parent / "conformance"
RETENTION = 1_000
"""Milliseconds, of all scenarios once they are scaled."""
RUNS = 3
"""Of a scenario that needs more runs, only the records of these are taken."""

WORKED = [
    "kip914-expired-lookup-left",
    "kip914-probe-stream-join-nulls-left-versioned",
    "kip914-probe-stream-join-nulls-inner-versioned",
    "kip914-probe-stream-join-nulls-left-unversioned",
    "kip923-late-is-immediate",
    "kip923-dequeue-boundary",
    "kip923-probe-tie-order",
    "kip923-probe-join-at-eviction",
    "kip923-probe-left-null-key",
]
RANDOM = [
    "stream-table-join-1-00-2",  # inner, retention 1
    "stream-table-join-1-04-1",  # inner, retention 50
    "stream-table-join-1-12-1",  # left, grace 5, retention 20
    "stream-table-join-1-12-4",
]
SHAPE = StructType(
    [
        StructField("scenario", IntegerType()),
        StructField("key", StringType()),
        StructField("value", StringType()),
        StructField("at", LongType()),
    ]
)


class Scenario:
    """A recorded scenario as a partition."""

    def __init__(self, partition: int, recorded: dict[str, Any]) -> None:
        self.partition = partition
        self.name: str = recorded["name"]
        config = recorded["config"]
        self.kind: str = config["kind"]
        self.versioned: bool = config["table"]["versioned"]
        retention = config["table"].get("history_retention") or RETENTION
        self.scale = RETENTION // retention
        assert self.scale * retention == RETENTION, f"{self.name}: choose another retention"
        self.grace = (config["grace"] or 0) * self.scale
        self.records: list[dict[str, Any]] = recorded["records"]
        # Scaled times of our days would lie in a future that no source believes.
        self.start = min(r["timestamp"] for r in self.records)
        wanted = {**recorded, **recorded.get("by_design", {})}
        self.expected: list[dict[str, Any]] = wanted["expected"]
        edges = [
            0,
            *[
                i
                for i, (one, other) in enumerate(pairwise(self.records), 1)
                if (one["input"], other["input"]) == ("stream", "table")
            ],
            len(self.records),
        ]
        self.runs = [range(a, b) for a, b in pairwise(edges)][:RUNS]
        whole = self.runs[-1].stop == len(self.records)
        self.store: list[dict[str, Any]] | None = wanted.get("final_store") if whole else None

    @property
    def join(self) -> str:
        """The name of the join that it runs through."""
        table = "versions" if self.versioned else "rows"
        return f"{self.kind}_{table}" + (f"_{self.grace}" if self.grace else "")

    def time(self, timestamp: int) -> int:
        """A recorded time as it is here, epoch milliseconds."""
        return (timestamp - self.start) * self.scale

    def arriving(self, number: int, asset: str) -> Iterator[dict[str, Any]]:
        """What arrives in a run at one of the assets ``versions``, ``rows`` and ``records``."""
        table = "versions" if self.versioned else "rows"
        for i in self.runs[number] if number < len(self.runs) else ():
            r = self.records[i]
            if asset == ("records" if r["input"] == "stream" else table):
                yield {
                    "scenario": self.partition,
                    "key": r["key"],
                    "value": r["value"],
                    "at": self.time(r["timestamp"]),
                }

    def emitted(self, number: int) -> list[tuple[Any, ...]]:
        """What Kafka Streams emitted in a run: key, value, timestamp."""
        during = self.runs[number] if number < len(self.runs) else ()
        return [
            (e["key"], e["value"], self.time(e["timestamp"]))
            for e in self.expected
            if e["trigger"] in during
        ]


def load() -> list[Scenario]:
    found = [json.loads((SCENARIOS / "worked" / f"{n}.json").read_text("utf-8")) for n in WORKED]
    drawn = json.loads((SCENARIOS / "random" / "stream_table_join.json").read_text("utf-8"))
    by_name = {s["name"]: s for s in drawn}
    return [Scenario(i, s) for i, s in enumerate([*found, *(by_name[n] for n in RANDOM)])]


def sources(landing: Path) -> tuple[VersionedTable, Table, Stream]:
    def about(name: str) -> dict[str, Any]:
        return {
            "key": ("scenario", "key"),
            "schema": SHAPE,
            "timestamp": "timestamp_millis(at)",
            "tombstone": "value is null",
            "source": FilesSource(str(landing / name), max_bad_share=1),
        }

    return (
        VersionedTable(
            "versions", history_retention=timedelta(milliseconds=RETENTION), **about("versions")
        ),
        Table("rows", **about("rows")),
        Stream("records", null_key="keep", **about("records")),
    )


def partitioned_asset(node: Stream) -> Any:
    """A source asset whose records go to the partition of their scenario."""
    read, put, write = ops.read_op(node), ops.put_op(node), ops.write_op(node)

    @dg.op(name=f"partition_{node.name}", out=dg.Out(io_manager_key=ops.OP_MEMORY))
    def partition(records: Any) -> Any:
        return records.withColumn("partition", F.col("scenario"))

    @dg.graph_asset(name=node.name)
    def asset() -> Any:
        records, arrival = read()
        return write(put(partition(records), arrival), arrival)

    return asset


def millis(moment: datetime) -> int:
    return (moment.replace(tzinfo=timezone.utc) - datetime(1970, 1, 1, tzinfo=timezone.utc)) // (
        timedelta(milliseconds=1)
    )


def joins(scenarios: list[Scenario], landing: Path) -> dict[str, Stream]:
    versions, rows, records = sources(landing)
    made: dict[str, Stream] = {}
    for s in scenarios:
        join = records.left_join if s.kind == "left" else records.join
        made[s.join] = join(
            versions if s.versioned else rows,
            name=s.join,
            select=["left.*", "right.value as found"],
            grace_period=timedelta(milliseconds=s.grace) if s.grace else None,
        )
    return made


@pytest.mark.slow
def test_assets_give_what_kafka_streams_gave(spark: SparkSession, tmp_path: Path) -> None:
    scenarios = load()
    landing, warehouse = tmp_path / "landing", tmp_path / "warehouse"
    results = joins(scenarios, landing)
    origin = sources(landing)
    assets = [*map(partitioned_asset, origin), *map(build_asset, results.values())]
    ends: dict[str, list[dict[int, int]]] = {name: [{}] for name in results}
    for number in range(RUNS):
        for node in origin:
            rows = [r for s in scenarios for r in s.arriving(number, node.name)]
            (landing / node.name).mkdir(parents=True, exist_ok=True)
            if rows:
                (landing / node.name / f"{number}.jsonl").write_text(lines(*rows), "utf-8")
        result = run(assets, warehouse)
        assert result.success, messages(result)
        for name, node in results.items():
            head = AssetStore(str(warehouse), node, spark).head()
            assert head is not None
            ends[name].append(head.commit.next_offset)

    differences: list[str] = []
    logs = {
        name: AssetStore(str(warehouse), node, spark).read("log").orderBy("offset").collect()
        for name, node in results.items()
    }
    for s in scenarios:
        emitted = [r for r in logs[s.join] if r["partition"] == s.partition]
        for number, (start, end) in enumerate(pairwise(ends[s.join])):
            span = range(start.get(s.partition, 0), end.get(s.partition, 0))
            got: list[tuple[Any, ...]] = [
                (r["key"], f"({r['value']},{r['found'] or 'null'})", millis(r["timestamp"]))
                for r in emitted
                if r["offset"] in span
            ]
            expected = s.emitted(number)
            if s.grace:  # what leaves the buffer in one run is ordered within the run
                got, expected = sorted(got, key=str), sorted(expected, key=str)
            if got != expected:
                differences.append(f"{s.name}, run {number}: expected {expected}, got {got}")
    stores = {
        node.name: AssetStore(str(warehouse), node, spark)
        .read("versions" if isinstance(node, VersionedTable) else "current")
        .collect()
        for node in origin[:2]
    }
    for s in scenarios:
        if s.store is None:
            continue
        rows = stores["versions" if s.versioned else "rows"]
        kept = [
            (
                r["key"],
                r["value"],
                millis(r["timestamp"]),
                millis(r["valid_to"]) if s.versioned and r["valid_to"] else None,
            )
            for r in sorted(rows, key=lambda r: (r["key"], r["timestamp"]))
            if r["scenario"] == s.partition and not r["is_tombstone"]
        ]
        wanted = [
            (
                e["key"],
                e["value"],
                s.time(e["valid_from"]),
                None if e["valid_to"] is None else s.time(e["valid_to"]),
            )
            for e in s.store
        ]
        if kept != wanted:
            differences.append(f"{s.name}, final store: expected {wanted}, got {kept}")
    assert differences == []
    assert sum(s.store is not None for s in scenarios) >= 6
    assert all(s.emitted(0) or s.emitted(1) or s.emitted(2) for s in scenarios)
