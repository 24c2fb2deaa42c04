"""Operators as Dagster assets, with metadata and pictures, compared with runs without Dagster."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from pathlib import Path

import dagster as dg
from measure import Outputs, Result, compare, take_turns
from operators import prepare, topology
from pyspark.sql import SparkSession

from vt_dagster import SparkResource, build_asset
from vt_dagster.orchestration.factory import build_resources
from vt_dagster.runs.run import run_once
from vt_dagster.storage.asset_store import AssetStore, stores_of
from vt_dagster.topology.model import Stream

ALONE = "the same run without Dagster"
QUIET = {"loggers": {"console": {"config": {"log_level": "ERROR"}}}}
ASSETS = {"as-of join": "joined", "aggregate": "grades_once", "windowed count": "monthly"}


def run(
    spark: SparkSession, rows: int, repeat: int, outputs: Outputs
) -> tuple[list[Result], list[str]]:
    """Times one run of each asset that consumes all records."""
    home = Path(outputs.fresh("dagster"))
    warehouse, nodes = str(home / "warehouse"), topology(home)
    prepare(spark, home, rows, nodes)
    logging.getLogger("dagster").setLevel(logging.ERROR)

    def fresh(node: Stream) -> None:
        shutil.rmtree(home / "warehouse" / node.name, ignore_errors=True)

    def through(node: Stream) -> Callable[[], None]:
        def materialize() -> None:
            fresh(node)
            dg.materialize(
                [build_asset(node)],
                resources=build_resources(warehouse, SparkResource()),
                run_config=QUIET,
            )

        return materialize

    def alone(node: Stream) -> Callable[[], None]:
        def commit() -> None:
            fresh(node)
            run_once(node, stores_of(warehouse, spark))

        return commit

    results: list[Result] = []
    for what, name in ASSETS.items():
        node = nodes[name]
        times = take_turns({"through": through(node), ALONE: alone(node)}, repeat)
        what = f"{what}, {rows:,} records, through Dagster"
        results.append(compare(what, rows, times["through"], ALONE, times[ALONE], None))
        head = AssetStore(warehouse, node, spark).head()
        taken = 0 if head is None else sum(sum(p.values()) for p in head.commit.inputs.values())
        if taken < rows:
            raise AssertionError(f"{name}: expected {rows:,} records to be taken, got {taken:,}")
    return results, [f"through Dagster: {len(results)} assets have taken all records"]
