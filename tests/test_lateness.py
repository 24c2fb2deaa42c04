"""``lateness``: its numbers are those of real runs with each length, on Spark."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pyspark.sql import SparkSession
from pyspark.sql.types import IntegerType, StringType, StructField, StructType, TimestampType

from vt_dagster import FilesSource, HoppingWindow, Stream, TumblingWindow, VersionedTable, lateness
from vt_dagster.provenance.choices import Choice
from vt_dagster.runs.run import run_once
from vt_dagster.storage.store import stores_of
from vt_dagster.testing.memory import MemoryStore

EPOCH = datetime(2020, 1, 1, tzinfo=timezone.utc)
START, MINUTE = int(EPOCH.timestamp()) * 1_000_000, 60_000_000
VALUES = [StructField("k", StringType()), StructField("n", IntegerType())]
SCHEMA = StructType([*VALUES, StructField("timestamp", TimestampType())])
RETENTION = timedelta(minutes=15)
GRACES = [timedelta(0), timedelta(minutes=3), timedelta(minutes=8), timedelta(minutes=15)]
NONE = timedelta(0)
STEPS = 4
FOUND = ["left.n as id", "right.n as rate"]
Row = Mapping[str, Any]


class Lab:
    """A stream and a table whose records come out of order, in steps; joins and windows of them with
    several graces, of which the first of each is on Delta, the others in memory."""

    def __init__(self, root: Path, spark: SparkSession) -> None:
        self.root, self.spark, self.warehouse = root, spark, str(root / "warehouse")
        self.rates = VersionedTable(
            "rates",
            key="k",
            schema=SCHEMA,
            tombstone="n is null",
            history_retention=RETENTION,
            partitions=2,
            source=FilesSource(str(root / "rates"), max_bad_share=1.0),
        )
        self.orders = Stream(
            "orders",
            key="k",
            schema=SCHEMA,
            tombstone="n is null",
            partitions=2,
            null_key="keep",
            source=FilesSource(str(root / "orders"), max_bad_share=1.0),
        )
        self.joins = {
            grace: self.orders.left_join(self.rates, name=f"join{i}", select=FOUND, grace_period=grace)
            for i, grace in enumerate(GRACES)
        }
        self.inner = self.orders.join(
            self.rates, name="inner", select=FOUND, max_age=timedelta(minutes=9), at="before"
        )
        self.inner_waits = self.orders.join(
            self.rates,
            name="inner_waits",
            select=FOUND,
            max_age=timedelta(minutes=9),
            at="before",
            grace_period=GRACES[2],
        )
        size, advance = timedelta(minutes=4), timedelta(minutes=2)
        self.windows = {
            f"{kind}{i}": self.orders.group_by()
            .windowed_by(
                TumblingWindow(size, grace=grace)
                if kind == "tumbling"
                else HoppingWindow(size, advance, grace=grace)
            )
            .aggregate({"many": "count(*)"}, name=f"{kind}{i}")
            for kind in ("tumbling", "hopping")
            for i, grace in enumerate(GRACES[:2])
        }
        on_delta = stores_of(self.warehouse, spark)
        kept = {"rates", "orders", "join0", "inner", "tumbling0", "hopping0"}
        every = [*self.joins.values(), self.inner, self.inner_waits, *self.windows.values()]
        self.made = every
        self.memory = {n.name: MemoryStore(n, spark) for n in every if n.name not in kept}
        self.stores = lambda node: self.memory.get(node.name) or on_delta(node)

    def land(self, node: Stream, step: int, rows: Sequence[Row]) -> None:
        (self.root / node.name).mkdir(exist_ok=True)
        lines = [json.dumps(r, default=lambda t: t.isoformat()) for r in rows]
        (self.root / node.name / f"{step}.json").write_text("\n".join(lines), encoding="utf-8")

    def run(self) -> None:
        chance, ids = random.Random(3), iter(range(10_000))
        for step in range(STEPS):
            now = 12 * step
            # The table is behind: some of its records come a step or two later than they are true.
            rates = [
                {"k": chance.choice("abcd"), "n": chance.choice([None, *range(5)]), "timestamp": moment}
                for moment in times(chance, 40, now, [0, 0, 1, 4, 13])
            ]
            orders = [
                {
                    "k": chance.choice(["a", "b", "c", "d", "e", None]),
                    "n": None if chance.random() < 0.1 else next(ids),
                    "timestamp": moment,
                }
                for moment in times(chance, 60, now, [0, 0, 1, 5, 14])
            ]
            self.land(self.rates, step, rates)
            self.land(self.orders, step, orders)
            run_once(self.rates, self.stores)
            run_once(self.orders, self.stores)
            for node in self.made:
                run_once(node, self.stores, recorded_at=recorded(step))

    def rows(self, name: str) -> list[dict[str, Any]]:
        node = next(n for n in [self.rates, self.orders, *self.made] if n.name == name)
        store = self.stores(node)
        head = store.head()
        assert head is not None
        return store.log({}, head).toArrow().to_pylist()

    def commits(self, name: str) -> list[Any]:
        node = next(n for n in self.made if n.name == name)
        return [*self.stores(node).commits()]


def recorded(step: int) -> int:
    """When the joins' runs of a step are recorded; not evenly apart."""
    return START + (step * step + 100) * 3600 * 1_000_000


def times(chance: random.Random, number: int, now: int, back: Sequence[int]) -> list[datetime]:
    found = [now + 12 * i / number - chance.choice(back) for i in range(number)]
    return [EPOCH + timedelta(minutes=max(0.0, round(one * 4) / 4)) for one in found]


@pytest.fixture(scope="module")
def lab(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Lab:
    made = Lab(tmp_path_factory.mktemp("lateness"), spark)
    made.run()
    return made


def truth(lab: Lab, before: bool = False, max_age: timedelta | None = None) -> dict[int, int | None]:
    """What each order should find, by all that is known: row by row."""
    rates = sorted(lab.rows("rates"), key=lambda r: r["offset"])
    found: dict[int, int | None] = {}
    for order in lab.rows("orders"):
        if order["is_tombstone"]:
            continue
        mine = {r["timestamp"]: r for r in rates if r["k"] == order["k"]}
        moment = order["timestamp"]
        earlier = [t for t in mine if (t < moment if before else t <= moment)]
        best = mine[max(earlier)] if earlier else None
        young = best is not None and (max_age is None or moment - best["timestamp"] <= max_age)
        found[order["n"]] = best["n"] if best is not None and young else None
    return found


def assert_as_run(lab: Lab, name: str, choice: Choice, should: dict[int, int | None]) -> None:
    """A choice has the numbers of a left join that has run with it."""
    commits, rows = lab.commits(name), lab.rows(name)
    assert choice.late == sum(c.counts["late"] for c in commits)
    waiting = [c.counts["waiting"] for c in commits]
    assert choice.waiting == waiting[-1]
    assert choice.waiting_most == max(waiting)
    assert choice.waiting_average == np.mean(waiting)
    wrong = [r for r in rows if should[r["id"]] != r["rate"]]
    assert choice.wrong == len(wrong)
    assert choice.of == len(rows) + waiting[-1] == len(should)
    first = {r["id"]: r["recorded_at"] for r in lab.rows("join0")}
    later = sorted(r["recorded_at"] - first[r["id"]] for r in rows)
    steps = {datetime.fromtimestamp(recorded(s) / 1e6, timezone.utc): s for s in range(STEPS)}
    behind = sorted(
        commits[steps[r["recorded_at"]]].stream_time[r["partition"]]
        - commits[steps[first[r["id"]]]].stream_time[r["partition"]]
        for r in rows
    )
    assert choice.later is not None
    assert choice.later_in_stream_time is not None
    for share, at, time in (
        (50, choice.later.p50, choice.later_in_stream_time.p50),
        (99, choice.later.p99, choice.later_in_stream_time.p99),
    ):
        place = -(-len(rows) * share // 100) - 1
        assert at == later[place]
        assert time // timedelta(microseconds=1) == behind[place]


def test_each_grace_period_costs_what_a_run_with_it_does(lab: Lab) -> None:
    found = lateness("join0", grace=GRACES, warehouse=lab.warehouse)
    should = truth(lab)
    for grace, node in lab.joins.items():
        assert_as_run(lab, node.name, found.of(grace), should)
    wrong = [found.of(grace).wrong for grace in GRACES]
    print(found)
    assert wrong[0] > wrong[1] > 0
    assert found.of(GRACES[2]).late > 0
    assert found.of(GRACES[3]).late == 0
    assert any(one.expired for one in found.choices)
