"""``emit="per_run"`` emits the last update of each key in a run, by each plan that finds it."""

from __future__ import annotations

import random
from datetime import timedelta
from typing import Any
from unittest.mock import Mock

import pytest
from pyspark.sql import SparkSession
from pyspark.sql.types import DoubleType, LongType, StringType, StructField, StructType, TimestampType

from vt_dagster import HoppingWindow, Stream, Table, TumblingWindow, VersionedTable
from vt_dagster.core import table_joins
from vt_dagster.core.log_columns import log_schema
from vt_dagster.core.processor import Input, RunContext
from vt_dagster.core.processor_registry import processor_of
from vt_dagster.runs import run as run_module
from vt_dagster.runs.pin import Arrival
from vt_dagster.sources.files_source import FilesSource
from vt_dagster.testing import TopologyTestDriver

HOUR = timedelta(hours=1)
SCHEMA = StructType(
    [
        StructField("k", StringType()),
        StructField("g", StringType()),
        StructField("n", LongType()),
        StructField("x", DoubleType()),
        StructField("timestamp", TimestampType()),
    ]
)
ABOUT: dict[str, Any] = {
    "key": "k",
    "schema": SCHEMA,
    "partitions": 2,
    "tombstone": "n is null",
    "source": FilesSource("nowhere"),
}
SUMS = {"n": "count(*)", "some": "count(n)", "total": "sum(n)", "exact": "sum(cast(n as decimal(9,2)))"}
ENDS = {**SUMS, "least": "min(n)", "most": "max(g)"}


def nodes(emit: Any) -> list[Stream]:
    orders = Stream("orders", **ABOUT)
    hopping = HoppingWindow(2 * HOUR, HOUR, HOUR)
    return [
        Table("prices", **ABOUT).group_by("g").aggregate(SUMS, name=f"table_{emit}", emit=emit),
        orders.group_by().aggregate(ENDS, name=f"stream_{emit}", emit=emit),
        orders.group_by("g").windowed_by(hopping).aggregate(ENDS, name=f"hopping_{emit}", emit=emit),
    ]


def records(seed: int) -> list[dict[str, Any]]:
    rng = random.Random(seed)
    return [
        {
            "k": rng.choice(["a", "b", "c", "d", "e", None]),
            "g": rng.choice(["x", "y", "z", None]),
            "n": rng.choice([1, 2, -7, 10, None]),
            "x": rng.random(),
            "timestamp": (600 * seed + 20 * i + rng.choice([0, 0, 0, -30, -200]) + 300) * 60_000,
        }
        for i in range(24)
    ]


def by_key(node: Stream, rows: list[dict[str, Any]]) -> dict[tuple[Any, ...], dict[str, Any]]:
    """The last row of each key, without ``offset`` and ``old``."""
    told = [{c: v for c, v in row.items() if c not in ("offset", "old")} for row in rows]
    return {tuple(row[k] for k in node.key): row for row in told}


@pytest.mark.slow
@pytest.mark.usefixtures("few_rows")
def test_per_run_emits_last_of_every_update(spark: SparkSession) -> None:
    pairs = list(zip(nodes("every_update"), nodes("per_run"), strict=True))
    driver = TopologyTestDriver(*[node for pair in pairs for node in pair], spark=spark)
    out: dict[str, int] = {}
    for seed in range(2):
        changes = [r for r in records(seed) if r["k"]]
        driver.run({"prices": changes, "orders": records(seed)})
        for every, once in pairs:
            new = {node: driver.read(node.name) for node in (every, once)}
            out[once.name] = out.get(once.name, 0) + len(new[once])
            assert by_key(once, new[once]) == by_key(every, new[every])
            assert len(new[once]) == len(by_key(every, new[every])) < len(new[every])
            counts = {**driver.metrics(every.name), "applied": out[once.name]}
            assert driver.metrics(once.name) == counts
    for every, once in pairs:
        assert by_key(once, driver.table(once.name)) == by_key(every, driver.table(every.name))
    assert driver.metrics("hopping_per_run")["dropped"] > 0


@pytest.mark.slow
@pytest.mark.usefixtures("few_rows")
def test_join_per_run_emits_last_of_every_update(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plans of large runs leave out earlier changes of keys without tombstones."""
    monkeypatch.setattr(Arrival, "single_task", False)
    monkeypatch.setattr(run_module, "are_few_keys", lambda keys, rows: True)
    left_out = Mock(wraps=table_joins.last_changes)
    monkeypatch.setattr(table_joins, "last_changes", left_out)
    select, pairs = ["left.*", "right.n as other"], list[list[Table]]()
    kinds = {"plain": ("left", "outer"), "versioned": ("inner",)}
    for kind, about in (("plain", {}), ("versioned", {"history_retention": 2 * HOUR})):
        make: Any = VersionedTable if about else Table
        left, right = (make(f"{side}_{kind}", **ABOUT, **about) for side in ("left", "right"))
        pairs += [
            [
                join(right, name=f"{name}_{kind}_{emit}", select=select, emit=emit)
                for emit in ("every_update", "per_run")
            ]
            for name, join in (
                ("inner", left.join),
                ("left", left.left_join),
                ("outer", left.outer_join),
            )
            if name in kinds[kind]
        ]
    driver = TopologyTestDriver(*[node for pair in pairs for node in pair], spark=spark)
    for seed in range(2):
        sides = {
            side: [r for r in records(seed + n) if r["k"]] for side, n in (("left", 0), ("right", 7))
        }
        driver.run(
            {f"{side}_{kind}": rows for side, rows in sides.items() for kind in ("plain", "versioned")}
        )
        for every, once in pairs:
            new = {node: driver.read(node.name) for node in (every, once)}
            assert by_key(once, new[once]) == by_key(every, new[every]), once.name
            assert len(new[once]) < len(new[every])
            dropped = [driver.metrics(node.name).get("dropped") for node in (every, once)]
            assert dropped[0] == dropped[1]
    assert left_out.call_count == 2 * len(pairs)


@pytest.mark.parametrize(
    ("aggregate", "exact"), [("sum(n)", True), ("max(x)", False), ("sum(x)", False), ("avg(n)", False)]
)
@pytest.mark.parametrize("windowed", [False, True])
def test_floating_point_numbers_are_summed_in_order(
    spark: SparkSession, aggregate: str, exact: bool, windowed: bool
) -> None:
    grouped: Any = Stream("orders", **ABOUT).group_by("g")
    grouped = grouped.windowed_by(TumblingWindow(HOUR)) if windowed else grouped
    node = grouped.aggregate({"it": aggregate}, name="it", emit="per_run")
    orders = Input(spark.createDataFrame([], log_schema(node.operator.inputs[0])))
    processor = processor_of(node, single_task=True)
    rows: Any = processor.process(processor.in_order([orders]), [orders], RunContext.nothing())
    plan: str = rows._jdf.queryExecution().executedPlan().toString()
    assert ("HashAggregate(keys=[g" in plan) is exact, plan
