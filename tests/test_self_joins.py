"""A table joined with itself: each record is first a change of the left side, then one of the right."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession
from pyspark.sql.types import IntegerType, LongType, StringType, StructField, StructType, TimestampType

from tests.market import lines
from vt_dagster import FilesSource, Table, VersionedTable, read
from vt_dagster.runs.run import run_once
from vt_dagster.storage.asset_store import stores_of
from vt_dagster.testing import TopologyTestDriver

pytestmark = pytest.mark.usefixtures("few_rows")

SCHEMA = StructType(
    [
        StructField("room", IntegerType()),
        StructField("k", StringType()),
        StructField("boss", StringType()),
        StructField("n", LongType()),
        StructField("timestamp", TimestampType()),
    ]
)
ABOUT: dict[str, Any] = {
    "key": ["room", "k"],
    "schema": SCHEMA,
    "tombstone": "n is null",
    "partitions": 9,
    "partition_by": "room",
}
BOTH = ["left.n", "left.boss", "right.n as other"]
BY_BOSS = ["room", "boss"]
Record = dict[str, Any]


def employees(versioned: bool, **more: Any) -> Table:
    if versioned:
        kept = timedelta(days=1)
        return VersionedTable("versioned_staff", history_retention=kept, **{**ABOUT, **more})
    return Table("plain_staff", **{**ABOUT, **more})


def joins(of: Table) -> dict[tuple[str, str], Table]:
    """All joins of the table with itself, by (join key: "boss" or "key"; kind: "inner" or "left")."""
    about: dict[str, Any] = {"select": BOTH, "monotone_timestamps": False}
    by_boss: dict[str, Any] = {**about, "foreign_key": BY_BOSS}
    return {
        ("boss", "inner"): of.join(of, name=f"{of.name}_bosses", **by_boss),
        ("boss", "left"): of.left_join(of, name=f"{of.name}_all_bosses", **by_boss),
        ("key", "inner"): of.join(of, name=f"{of.name}_pairs", **about),
        ("key", "left"): of.left_join(of, name=f"{of.name}_left_pairs", **about),
    }


def record(room: int, k: str, boss: str | None, n: int | None, at: int) -> Record:
    return {"room": room, "k": k, "boss": boss, "n": n, "timestamp": at}


@dataclass
class Sides:
    """Both sides of a join as a Kafka Streams task has them: each record changes the left side, then
    the right side."""

    on: str
    kind: str
    versioned: bool
    left: dict[str, Record] = field(default_factory=dict[str, Record])
    right: dict[str, Record] = field(default_factory=dict[str, Record])
    newest: dict[str, int] = field(default_factory=dict[str, int])
    log: list[tuple[Any, ...]] = field(default_factory=list[tuple[Any, ...]])

    def take(self, r: Record) -> None:
        if self.versioned:
            if r["timestamp"] < self.newest.get(r["k"], -1):
                return  # 4.6.1, 4.7.1
            self.newest[r["k"]] = r["timestamp"]
        before, was = self.left.get(r["k"]), self.right.get(r["k"])
        self._put(self.left, r)
        (self._left_by_boss if self.on == "boss" else self._left_by_key)(r, before)
        self._put(self.right, r)
        (self._right_by_boss if self.on == "boss" else self._right_by_key)(r, was)

    @staticmethod
    def _put(side: dict[str, Record], r: Record) -> None:
        if r["n"] is None:
            side.pop(r["k"], None)
        else:
            side[r["k"]] = r

    def _tell(self, k: str, left: Record | None, right: Record | None, at: int) -> None:
        value = None if left is None else (left["n"], left["boss"], right and right["n"])
        self.log.append((k, value, at))

    def _left_by_key(self, r: Record, before: Record | None) -> None:
        here, there = self.left.get(r["k"]), self.right.get(r["k"])
        at = max(r["timestamp"], there["timestamp"] if there else -1)
        if there is None and (self.kind == "inner" or (here is None and before is None)):
            return
        self._tell(r["k"], here, there, at)

    def _right_by_key(self, r: Record, was: Record | None) -> None:
        here, there = self.left.get(r["k"]), self.right.get(r["k"])
        if here is None:
            return
        at = max(r["timestamp"], here["timestamp"])
        self._tell(r["k"], None if self.kind == "inner" and there is None else here, there, at)

    def _left_by_boss(self, r: Record, before: Record | None) -> None:
        here, at = self.left.get(r["k"]), r["timestamp"]
        new, old = here and here["boss"], before and before["boss"]
        there = self.right.get(new) if new else None
        if self.kind == "left":
            if here is None and before is None:
                return
            self._tell(r["k"], here, there, max(at, there["timestamp"] if there else -1))
        elif new:
            if there is None and (old is None or old == new):
                return
            shown = None if there is None else here
            self._tell(r["k"], shown, there, max(at, there["timestamp"] if there else -1))
        elif old:
            former = self.right.get(old)
            self._tell(r["k"], None, None, max(at, former["timestamp"] if former else -1))

    def _right_by_boss(self, r: Record, was: Record | None) -> None:
        there = self.right.get(r["k"])
        for k, row in sorted(self.left.items()):
            if row["boss"] == r["k"]:
                gone = self.kind == "inner" and there is None
                self._tell(k, None if gone else row, there, r["timestamp"])


def evaluated(records: Sequence[Record], on: str, kind: str, versioned: bool) -> list[tuple[Any, ...]]:
    sides = Sides(on, kind, versioned)
    for r in records:
        sides.take(r)
    return sides.log


def row_summary(row: Record) -> tuple[Any, ...]:
    at = row["timestamp"].replace(tzinfo=row["timestamp"].tzinfo or timezone.utc)
    value = None if row["is_tombstone"] else (row["n"], row["boss"], row["other"])
    return row["k"], value, int(at.timestamp() * 1000)


def logs_of(driver: TopologyTestDriver, node: Table) -> dict[int, list[tuple[Any, ...]]]:
    """The log of each room. A room is a partition."""
    found: dict[int, list[tuple[Any, ...]]] = {}
    for row in driver.read(node.name):
        assert row["partition"] == row["room"]
        found.setdefault(row["room"], []).append(row_summary(row))
    return found


def any_records(room: int, number: int) -> list[Record]:
    chosen = random.Random(room)
    records: list[Record] = []
    for i in range(number):
        n = None if chosen.random() < 0.25 else i
        boss = chosen.choice(["a", "b", "c", None])
        at = max(0, 10 * i - chosen.choice([0, 0, 15, 30]))
        records.append(record(room, chosen.choice("abc"), boss, n, at))
    return records


SCRIPT = [
    record(0, "a", None, 1, 10),
    record(0, "b", "a", 2, 20),
    record(0, "a", None, 3, 30),
    record(0, "c", "b", 4, 40),
    record(0, "b", "c", 5, 50),
    record(0, "c", "c", 6, 60),  # its own boss
    record(0, "a", None, None, 70),
    record(0, "b", "a", 7, 80),
    record(0, "c", None, None, 90),
    record(0, "c", None, None, 95),
    record(0, "a", "b", 8, 99),
]
"""The records of room 0: updates, deletions and changes of the boss."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cuts", "every"),
    [((5,), False), *(pytest.param(c, True, marks=pytest.mark.endurance) for c in ((), (5,), (2, 7)))],
)
def test_self_join_equals_kafka_streams_for_any_split(
    spark: SparkSession, cuts: Sequence[int], every: bool
) -> None:
    """Each join's log is that of Kafka Streams, however the records are split into runs. Room 0 has
    the script, each other room a random history; a room is a partition. In the short variant each join
    runs on one of both tables."""
    number, rooms = len(SCRIPT), range(9)
    arrived = {room: SCRIPT if room == 0 else any_records(room, number) for room in rooms}
    tables = [employees(False), employees(True)]
    made = {
        (table.name, *how): node
        for number, table in enumerate(tables)
        for place, (how, node) in enumerate(joins(table).items())
        if every or place in ((0, 3) if number else (1, 2))
    }
    driver = TopologyTestDriver(*made.values(), spark=spark)
    for start, end in pairwise((0, *cuts, number)):
        records = [r for room in rooms for r in arrived[room][start:end]]
        driver.run({t.name: records for t in tables})
    for (name, on, kind), node in made.items():
        versioned = node.operator is not None and name == "versioned_staff"
        logs = logs_of(driver, node)
        for room in rooms:
            wanted = evaluated(arrived[room], on, kind, versioned)
            assert logs.get(room, []) == wanted, (name, on, kind, room)
    for (_, on, kind), node in made.items():
        if kind == "inner":
            now = {r["k"]: (r["n"], r["other"]) for r in driver.table(node.name) if r["room"] == 0}
            assert now == ({"b": (7, 8), "a": (8, 7)} if on == "boss" else {"b": (7, 7), "a": (8, 8)})


@pytest.mark.slow
def test_self_join_on_delta(spark: SparkSession, tmp_path: Path) -> None:
    """A self-join of a table that reads files, in two runs. For a self-join as a Dagster asset see
    ``itself`` in ``test_ops``."""
    table, warehouse = (
        employees(False, source=FilesSource(str(tmp_path / "landing"))),
        str(tmp_path / "w"),
    )
    node, stores = joins(table)["boss", "left"], stores_of(warehouse, spark)
    epoch = datetime(1970, 1, 1, tzinfo=timezone.utc)
    runs = [
        [record(0, "a", None, 1, 10), record(0, "b", "a", 2, 20), record(0, "c", "b", 3, 30)],
        [record(0, "b", "c", 4, 40), record(0, "a", None, None, 50), record(0, "c", "c", 5, 60)],
    ]
    (tmp_path / "landing").mkdir()
    for number, records in enumerate(runs):
        rows = [
            {**r, "timestamp": (epoch + timedelta(milliseconds=r["timestamp"])).isoformat()}
            for r in records
        ]
        (tmp_path / "landing" / f"{number}.jsonl").write_text(lines(*rows), "utf-8")
        for each in (table, node):
            run_once(each, stores)
    log = read(node.name, what="log", warehouse=warehouse).sort_by("offset").to_pylist()
    every = [r for records in runs for r in records]
    assert [row_summary(r) for r in log] == evaluated(every, "boss", "left", False)
