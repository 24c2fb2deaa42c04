"""A run of a history join with a few new records, compared with the same join recomputed."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import generate
from measure import Outputs, Result, compare, plan_of, take_turns
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from vt_dagster.columns import IS_TOMBSTONE, VALID_FROM, VALID_TO
from vt_dagster.runs.run import Run, run_once
from vt_dagster.sources.files_source import FilesSource
from vt_dagster.spark.settings import look_up_of_few, small_run
from vt_dagster.storage.asset_store import AssetStore, stores_of
from vt_dagster.topology.model import VersionedTable

ANEW = "Spark SQL's interval join of both final histories, to Delta"
TENTH = "the same run on a tenth of the versions"
FLOOR = "the new records' versions joined with the other history, appended: by Spark alone"
KEYS = 10_000
SIDES = ("prices", "offers")


class Site:
    """Two tables of ``rows`` records each and their join. New records have landed in both. Sites have
    the same new records, because a smaller site has the last records of a larger one."""

    def __init__(self, spark: SparkSession, home: Path, rows: int, of: int, change: int) -> None:
        self.spark, self.home, self.warehouse = spark, home, home / "warehouse"
        self.rows = rows
        keys, step = min(KEYS, of // 100), generate.SPAN // of
        tables: list[VersionedTable] = []
        for name in SIDES:
            (home / name).mkdir(parents=True)
            tables.append(
                VersionedTable(
                    name,
                    key="key",
                    schema=generate.RECORD,
                    timestamp="at",
                    tombstone="grade = 'grade-7'",
                    history_retention=timedelta(days=3650),
                    partitions=generate.PARTITIONS,
                    source=FilesSource(str(home / name)),
                )
            )
        self.both = tables[0].join(
            tables[1],
            history="complete",
            name="both",
            select=["left.*", "right.price as offered", "right.grade as offered_grade"],
        )
        stores = stores_of(str(self.warehouse), spark)
        for first, end in ((of - rows, of), (of, of + change)):
            for seed, node in enumerate(tables, 4):
                landed = generate.json_lines(
                    spark, first, end - first, of, keys, reach=of // 50, step=step, seed=seed
                )
                shutil.copy(landed, home / node.name / f"{first}.jsonl")
                run_once(node, stores)
            if end == of:
                run_once(self.both, stores)
                shutil.copytree(self.warehouse / "both", home / "before")
        # The input of the peer and the floor is prepared: they need not compute it from the logs.
        for node in tables:
            versions = AssetStore(str(self.warehouse), node, spark).read("versions")
            versions.write.format("delta").save(self.history(node.name))
            lines = spark.read.schema(generate.RECORD).json(str(home / node.name / f"{of}.jsonl"))
            places = lines.select("key", F.col("at").alias(VALID_FROM))
            places.write.format("delta").save(self.landed(node.name))

    def history(self, name: str) -> str:
        return str(self.home / f"history-{name}")

    def landed(self, name: str) -> str:
        """The table with the keys and times of the records that landed last."""
        return str(self.home / f"landed-{name}")

    def pin(self, anew: bool = False) -> Run:
        shutil.rmtree(self.warehouse / "both", ignore_errors=True)
        if not anew:
            shutil.copytree(self.home / "before", self.warehouse / "both")
        return Run.pin(self.both, stores_of(str(self.warehouse), self.spark))

    def turn(self, anew: bool = False) -> Callable[[], dict[str, float]]:
        def turn() -> dict[str, float]:
            self.pin(anew)
            start = time.perf_counter()
            run = Run.pin(self.both, stores_of(str(self.warehouse), self.spark))
            run.commit(run.operate(run.read()))
            return {"run": time.perf_counter() - start}

        return turn

    def result(self) -> DataFrame:
        found = AssetStore(str(self.warehouse), self.both, self.spark).read("versions")
        return found.where(~F.col(IS_TOMBSTONE))

    def versions(self) -> list[DataFrame]:
        """Both histories, without tombstones."""
        read = (self.spark.read.format("delta").load(self.history(name)) for name in SIDES)
        return [rows.where(~F.col(IS_TOMBSTONE)) for rows in read]

    def joined_anew(self) -> DataFrame:
        """The peer's join of both whole histories, by Spark."""
        return self.joined(*self.versions())

    def floor(self) -> None:
        """The least that a run needs Spark for: no ended results, gate, positions or order."""
        with small_run(self.spark, True), look_up_of_few(self.spark):
            new: list[DataFrame] = []
            for name, rows in zip(SIDES, self.versions(), strict=True):
                landed = F.broadcast(self.spark.read.format("delta").load(self.landed(name)))
                new.append(F.broadcast(rows.join(landed, ["key", VALID_FROM], "left_semi")))
            left, right = self.versions()
            changed = self.joined(new[0], right).union(self.joined(left, new[1]))
            changed.write.format("delta").mode("append").save(str(self.home / "changed"))

    def joined(self, left: DataFrame, right: DataFrame) -> DataFrame:
        """Pairs of rows of two histories that are valid at the same time."""
        there = right.select(
            F.col("key").alias("of"),
            F.col("price").alias("offered"),
            F.col("grade").alias("offered_grade"),
            F.col(VALID_FROM).alias("_from"),
            F.col(VALID_TO).alias("_to"),
        )
        begun = F.coalesce(F.col("_from") < F.col(VALID_TO), F.lit(True))
        not_over = F.coalesce(F.col(VALID_FROM) < F.col("_to"), F.lit(True))
        found = left.join(there, (F.col("key") == F.col("of")) & begun & not_over)
        return found.select(
            *("key", "price", "grade", "offered", "offered_grade"),
            F.greatest(VALID_FROM, "_from").alias(VALID_FROM),
            F.least(VALID_TO, "_to").alias(VALID_TO),
        )


def run(
    spark: SparkSession, rows: int, repeat: int, outputs: Outputs
) -> tuple[list[Result], list[str]]:
    """Times three kinds of runs. The first adds a five-hundredth of ``rows`` to each side, on ``rows``
    records and on a tenth of them; every fifth new record is late by up to a fiftieth of the year. The
    second recomputes all. The third is the first with a tenth of all records, also of the new ones."""
    change, home = rows // 500, Path(outputs.fresh("history-join"))
    many = Site(spark, home / "many", rows, rows, change)
    few = Site(spark, home / "few", rows // 10, rows, change)
    small = Site(spark, home / "small", rows // 10, rows // 10, change // 10)

    def peer(site: Site) -> Callable[[], None]:
        def turn() -> None:
            found = site.joined_anew().write.format("delta").mode("overwrite")
            found.option("overwriteSchema", "true").save(str(site.home / "joined"))

        return turn

    pinned = many.pin()
    plan = plan_of(pinned.operate(pinned.read()).rows)
    times = take_turns(
        {
            "anew": many.turn(anew=True),
            ANEW: peer(many),
            "few": few.turn(),
            # The last contender of this site: its rows are compared.
            "many": many.turn(),
            "small": small.turn(),
            f"small: {ANEW}": peer(small),
            FLOOR: small.floor,
        },
        repeat,
    )
    theirs = {site: site.joined_anew() for site in (many, few, small)}
    found = {site: _digest(site.result()) for site in theirs}
    for site, told in theirs.items():
        if (expected := _digest(told)) != found[site]:
            raise AssertionError(f"history join: ours has {found[site]}, Spark {expected}")
    name = f"history join, {change:,} new records of each side on {rows:,}"
    whole = f"history join of {rows:,} beside {rows:,}, all in one run"
    of_few = f"history join, {change // 10:,} new records of each side on {rows // 10:,}"
    results = [
        compare(name, rows, times["many: run"], ANEW, times[ANEW], 0.5),
        compare(name, rows, times["many: run"], TENTH, times["few: run"], 1.5),
        compare(whole, rows, times["anew: run"], ANEW, times[ANEW], None),
        compare(of_few, rows // 10, times["small: run"], ANEW, times[f"small: {ANEW}"], 0.7),
        compare(of_few, rows // 10, times["small: run"], FLOOR, times[FLOOR], None),
    ]
    notes = [
        f"history join: {found[many][0]:,} rows, {found[few][0]:,} of the tenth, are those of the join "
        f"made anew; a run's plan: {plan}"
    ]
    return results, notes


def _digest(rows: DataFrame) -> tuple[int, int]:
    """The number of rows, and the sum of their hashes."""
    columns = ("key", "price", "grade", "offered", "offered_grade", VALID_FROM, VALID_TO)
    of_each = F.xxhash64(*columns).cast("decimal(38, 0)")
    count, total = rows.agg(F.count(F.lit(1)), F.sum(of_each)).collect()[0]
    return count, int(total)
