"""Operators as Dagster assets that end in commits to Delta, beside the operators alone."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import dagster as dg
import generate
from measure import Outputs, Result, compare, take_turns
from operators import GRACE, HOUR, final_state, results_of
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from vt_dagster import SparkResource, build_asset
from vt_dagster.columns import ARRIVAL, FATE, OFFSET, TIMESTAMP
from vt_dagster.core.arrival import Fate, by_partition
from vt_dagster.core.processor import Lookup
from vt_dagster.core.processors import processor_of
from vt_dagster.orchestration.factory import build_resources
from vt_dagster.runs.join_way import way_of
from vt_dagster.runs.run import run_once
from vt_dagster.sources.files import FilesSource
from vt_dagster.storage.store import AssetStore, stores_of
from vt_dagster.topology.model import Stream, Table, VersionedTable
from vt_dagster.topology.windowing import TumblingWindow

ALONE = "the operator alone, to Parquet"
QUIET = {"loggers": {"console": {"config": {"log_level": "ERROR"}}}}


def topology(home: Path) -> dict[str, Stream]:
    """Two sources, and an asset of each kind of operator, by what the result is called."""

    def records(name: str) -> dict[str, object]:
        return {
            "key": "key",
            "schema": generate.RECORD,
            "timestamp": "at",
            "partitions": generate.PARTITIONS,
            "source": FilesSource(str(home / name)),
        }

    prices = VersionedTable("prices", history_retention=timedelta(days=3650), **records("prices"))
    orders = Stream("orders", **records("orders"))
    joined = orders.left_join(prices, name="joined", select=["left.*", "right.price as of_table"])
    grades = prices.group_by("grade").aggregate(
        {"n": "count(*)", "total": "sum(price)"}, name="grades", emit="per_run"
    )
    windows = orders.group_by().windowed_by(TumblingWindow(HOUR, GRACE))
    hourly = windows.aggregate({"n": "count(*)"}, name="hourly")
    return {
        "prices": prices,
        "orders": orders,
        "as-of join": joined,
        "aggregate": grades,
        "windowed count": hourly,
    }


def run(
    spark: SparkSession, rows: int, repeat: int, outputs: Outputs
) -> tuple[list[Result], list[str]]:
    """Times one run of each asset that takes everything, and the operator on the same logs."""
    home = Path(outputs.fresh("dagster"))
    warehouse = str(home / "warehouse")
    nodes = topology(home)
    keys = min(10_000, rows // 10)
    for name, total in (("prices", rows), ("orders", rows + 1)):  # other times, and another file
        (home / name).mkdir(parents=True)
        shutil.copy(generate.json_lines(spark, 0, rows, total, keys), home / name / "1.jsonl")
        run_once(nodes[name], stores_of(warehouse, spark))
    logging.getLogger("dagster").setLevel(logging.ERROR)

    def stored(node: Stream) -> AssetStore:
        return AssetStore(warehouse, node, spark)

    def through(node: Stream) -> Callable[[], None]:
        def materialize() -> None:
            shutil.rmtree(home / "warehouse" / node.name, ignore_errors=True)
            dg.materialize(
                [build_asset(node)],
                resources=build_resources(warehouse, SparkResource()),
                run_config=QUIET,
            )

        return materialize

    def alone(node: Stream) -> Callable[[], None]:
        def write() -> None:
            results = _results(node, stored)
            results.write.mode("overwrite").parquet(outputs.path("alone"))

        return write

    results: list[Result] = []
    for name, node in list(nodes.items())[2:]:
        times = take_turns({"through": through(node), ALONE: alone(node)}, repeat)
        what = f"{name}, {rows:,} records, through Dagster and Delta"
        results.append(compare(what, rows, times["through"], ALONE, times[ALONE], None))
        head = stored(node).head()
        assert head is not None
        found = spark.read.parquet(outputs.path("alone")).count()
        there = stored(node).read()
        if there.count() != found:
            raise AssertionError(f"{name}: {there.count()} rows through Dagster, {found} without")
    return results, [f"through Dagster: {len(results)} assets have as many rows as their operators"]


def _results(node: Stream, stored: Callable[[Stream], AssetStore]) -> DataFrame:
    processor = processor_of(node)
    logs = [stored(n).read("log") for n in processor.consumed]
    table = processor.looked_up
    if table is None:
        assert isinstance(node, Table)
        return final_state(node, results_of(node, logs))
    records = logs[0].withColumns({ARRIVAL: F.col(OFFSET), FATE: F.lit(Fate.APPLIED)})
    time = F.unix_micros(TIMESTAMP)
    first, last = records.agg(F.min(time), F.max(time)).collect()[0]
    at = stored(table).snapshot()
    view = stored(table).view_at(at)
    way, _ = way_of(table, view, False, at.total, (first, last))
    return processor.look_up(records, Lookup(view, by_partition(at.stream_time), way))
