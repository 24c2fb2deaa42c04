"""Joins by what was known, and corrected joins, compared with the same join without either."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import generate
from measure import Outputs, Result, compare, take_turns
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from vt_dagster.columns import TIMESTAMP
from vt_dagster.runs.run import Run, run_once
from vt_dagster.sources.files_source import FilesSource
from vt_dagster.storage.asset_store import stores_of
from vt_dagster.topology.model import Stream, VersionedTable

PLAIN = "the same join by all that is known, not corrected"
FLOOR = "the floor: that join's run, and the run of a table into which the same orders go"
KEYS = 10_000
DAY = timedelta(days=1)


def topology(home: Path) -> dict[str, Stream]:
    """By name: a stream, a versioned table, their joins, and a table of the stream's records."""
    orders = Stream(
        "orders",
        key="key",
        schema=generate.RECORD,
        timestamp="at",
        partitions=generate.PARTITIONS,
        source=FilesSource(str(home / "orders")),
    )
    prices = _table("prices", home / "prices")
    select = ["left.*", "right.price as of_table"]
    nodes: list[Stream] = [
        *(orders, prices),
        orders.left_join(prices, name="plain", select=select),
        orders.left_join(prices, name="known", select=select, as_known="when_recorded"),
        orders.left_join(prices, name="corrected", select=select, corrected_for=30 * DAY),
        _table("kept", home / "orders"),
    ]
    return {node.name: node for node in nodes}


def _table(name: str, landing: Path) -> VersionedTable:
    """A versioned table of all files of a directory."""
    return VersionedTable(
        name,
        key="key",
        schema=generate.RECORD,
        timestamp="at",
        history_retention=3650 * DAY,
        partitions=generate.PARTITIONS,
        source=FilesSource(str(landing)),
    )


def run(
    spark: SparkSession, rows: int, repeat: int, outputs: Outputs
) -> tuple[list[Result], list[str]]:
    """Times the joins. There are ``rows`` stream records and a fifth as many table records. After the
    first run come a hundredth of the stream's and a fiftieth of the table's. Half of these table
    records are of times whose stream records have been joined."""
    home = Path(outputs.fresh("corrections"))
    nodes, warehouse = topology(home), home / "warehouse"
    stores = stores_of(str(warehouse), spark)
    keys = min(KEYS, rows // 50)

    def land(name: str, total: int, first: int, end: int, recorded: int) -> None:
        (home / name).mkdir(parents=True, exist_ok=True)
        day = max(1, total // 365)
        lines = generate.json_lines(spark, first, end - first, total, keys, late=100, reach=day)
        shutil.copy(lines, home / name / f"{first}.jsonl")
        run_once(nodes[name], stores, recorded_at=recorded * 1_000_000)

    sizes = {"prices": rows // 5, "orders": rows}
    after = {"prices": rows // 5 // 50, "orders": rows // 100}
    for name, total in sizes.items():
        land(name, total, 0, total - after[name], 1_600_000_000)
    for name in ("plain", "corrected", "kept"):
        run_once(nodes[name], stores)
        shutil.copytree(warehouse / name, home / "before" / name)
    # The orders are recorded first, so the new table records were not known at their time.
    for number, name in enumerate(("orders", "prices")):
        total = sizes[name]
        land(name, total, total - after[name], total, 1_600_001_000 + number)

    def run_of(name: str, before: bool) -> Callable[[], dict[str, float]]:
        def turn() -> dict[str, float]:
            shutil.rmtree(warehouse / name, ignore_errors=True)
            if before:
                shutil.copytree(home / "before" / name, warehouse / name)
            start = time.perf_counter()
            run = Run.pin(nodes[name], stores)
            run.commit(run.operate(run.read()))
            return {"run": time.perf_counter() - start}

        return turn

    results: list[Result] = []
    for about, name, before, target in (
        ("as-of join by what was known when the record was", "known", False, 2.5),
        ("corrected join, a run with 1 % of the records", "corrected", True, 2.0),
    ):
        turns = {name: run_of(name, before), "plain": run_of("plain", before)}
        if before:
            turns["kept"] = run_of("kept", before)
        times = take_turns(turns, repeat)
        ours, theirs = times[f"{name}: run"], times["plain: run"]
        label = f"{about}, {rows:,} stream records"
        results.append(compare(label, rows, ours, PLAIN, theirs, target))
        if before:
            both = [sum(pair) for pair in zip(theirs, times["kept: run"], strict=True)]
            results.append(compare(label, rows, ours, FLOOR, both, None))
    run_of("plain", False)()
    found, expected = (_digest(stores(nodes[name]).read()) for name in ("corrected", "plain"))
    if found != expected:
        raise AssertionError(f"corrected join: {found}, the plain one over everything {expected}")
    commits = {name: stores(nodes[name]).head() for name in ("known", "corrected")}
    notes = [
        f"{n}: {head.commit.strategy}; {head.commit.counts}" for n, head in commits.items() if head
    ]
    notes.append(f"corrected join: its {found[0]:,} rows are those of one run over everything")
    return results, notes


def _digest(rows: DataFrame) -> tuple[int, int]:
    """The number of rows, and the sum of their hashes."""
    of_each = F.xxhash64("key", "price", "grade", TIMESTAMP, "of_table").cast("decimal(38, 0)")
    count, total = rows.agg(F.count(F.lit(1)), F.sum(of_each)).collect()[0]
    return count, int(total)
