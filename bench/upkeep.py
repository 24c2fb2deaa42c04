"""The cost of a table's upkeep: gates and checks, expiry of history, and many runs in a row."""

from __future__ import annotations

import shutil
import statistics
import time
from datetime import timedelta
from pathlib import Path

import pandera.pyspark as pa
import pyspark.sql.types as T
from incremental_run import Site, prepare
from measure import Outputs, Result, compare, take_turns
from pyspark.sql import SparkSession

from vt_dagster.runs.audit import audit
from vt_dagster.storage.maintenance import maintain

GATES, EXPIRY, RUNS = 1.2, 1.3, 1.3
LAST = 10
"""The number of last runs that are compared."""


class Price(pa.DataFrameModel):
    """The contract of the records."""

    key: T.LongType = pa.Field(ge=0)
    price: T.DoubleType = pa.Field(ge=0, le=1_000)
    grade: T.StringType = pa.Field(str_startswith="grade-")
    at: T.TimestampType


def gates(
    spark: SparkSession, versions: int, new: int, repeat: int, outputs: Outputs
) -> tuple[list[Result], list[str]]:
    """Times runs with a contract and all checks after each run, compared with runs without both."""
    bare = Site(spark, versions, new, Path(outputs.fresh("without")))
    gated = Site(spark, versions, new, Path(outputs.fresh("with")), schema=Price)
    for site in (bare, gated):
        prepare(site, repeat + 1)

    def without() -> None:
        bare.deliver(new)
        bare.run()

    def with_them() -> dict[str, float]:
        gated.deliver(new)
        gated.run()
        start = time.perf_counter()
        failed = [finding.name for finding in audit(gated.store(), gated.run_id) if not finding.passed]
        if failed:
            raise AssertionError(f"gates: {failed}")
        return {"checks": time.perf_counter() - start}

    times = take_turns({"with": with_them, "without": without}, repeat)
    name, peer = f"gates and checks, run of {new:,} on {versions:,} versions", "no contract, no checks"
    results = [
        compare(name, new, times["with"], peer, times["without"], GATES),
        compare(f"{name}: checks alone", new, times["with: checks"], peer, times["without"], None),
    ]
    return results, [f"gates: {len(audit(gated.store()))} checks after each run, all passed"]


def expiry(
    spark: SparkSession, sizes: tuple[int, ...], new: int, repeat: int, outputs: Outputs
) -> tuple[list[Result], list[str]]:
    """Times a run after which all earlier history expires, on a small and on a large table."""
    times: dict[int, list[float]] = {}
    notes: list[str] = []
    for size in sizes:
        home = Path(outputs.fresh(f"expiry-{size}"))
        retention = timedelta(days=500)
        site = Site(spark, size, new, home, history_retention=retention)
        site.delivered = 3 * size  # three years after the start: everything so far is older
        prepare(site, 1)
        site.deliver(new)
        fresh = Path(site.warehouse).rename(home / "fresh")

        def forgets(site: Site = site, fresh: Path = fresh) -> dict[str, float]:
            shutil.rmtree(site.warehouse, ignore_errors=True)
            shutil.copytree(fresh, site.warehouse)
            start = time.perf_counter()
            site.run()
            return {"run": time.perf_counter() - start}

        times[size] = take_turns({"ours": forgets}, repeat)["ours: run"]
        store = site.store()
        left = store.view_at(store.snapshot()).count()
        if left > site.keys + 2 * new:
            raise AssertionError(f"expiry: {left:,} of {size:,} versions are left")
        notes.append(f"expiry: of {size:,} versions {left:,} are left after a run of {new:,}")
    small, large = sizes[0], sizes[-1]
    if small == large:
        return [], notes
    name, peer = f"run after which {large:,} versions have expired", f"the same of {small:,}"
    return [compare(name, new, times[large], peer, times[small], EXPIRY)], notes


def many_runs(
    spark: SparkSession, count: int, new: int, outputs: Outputs
) -> tuple[list[Result], list[str]]:
    """Times small runs one after another, with maintenance every hundred runs. The last ones run
    alternately with the 6th to 15th of another table: an hour after its own 6th run, the machine may be
    slower.
    """

    def one(site: Site) -> dict[str, float]:
        site.deliver(new)
        start = time.perf_counter()
        site.run()
        return {"run": time.perf_counter() - start}

    # All runs span a year: if 10,000 records spanned one, a thousand runs would end in the future.
    a_year = 10_000 + count * new
    site = Site(spark, 10_000, new, Path(outputs.fresh("many")), a_year=a_year)
    alone: list[float] = []
    for turn in range(count - LAST):
        alone.append(one(site)["run"])
        if turn % 100 == 99:
            maintain(site.warehouse, site.table.name, spark)
    young = Site(spark, 10_000, new, Path(outputs.fresh("young")), a_year=a_year)
    for _ in range(5):
        one(young)
    contenders = {"old": lambda: one(site), "young": lambda: one(young)}
    times = take_turns(contenders, LAST, warm=0)
    name = f"runs {count - LAST + 1:,} to {count:,} of {new} records"
    tenth = count // 10
    medians = [f"{statistics.median(alone[i : i + tenth]):.2f}" for i in range(0, len(alone), tenth)]
    return [compare(name, new, times["old: run"], "the 6th to 15th", times["young: run"], RUNS)], [
        f"many runs: {count:,} runs of {new} records; medians of each tenth of them: "
        f"{', '.join(medians)} s"
    ]
