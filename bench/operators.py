"""Operators in one large run that commits to Delta, compared with Spark SQL for the same result."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import generate
from measure import Outputs, Result, compare, plan_of, take_turns
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import Window as W
from pyspark.sql import functions as F
from pyspark.sql.types import DoubleType, StringType, StructField, StructType, TimestampType

from vt_dagster.columns import (
    IS_LATEST,
    OFFSET,
    OLD,
    PARTITION,
    TIMESTAMP,
    WINDOW_END,
    WINDOW_START,
)
from vt_dagster.core.processor_registry import processor_of
from vt_dagster.runs.run import Run, run_once
from vt_dagster.sources.files_source import FilesSource
from vt_dagster.storage.asset_store import AssetStore, stores_of
from vt_dagster.topology.model import Stream, VersionedTable
from vt_dagster.topology.operators import UntilWindowCloses
from vt_dagster.topology.windows import HoppingWindow, SessionWindow, TumblingWindow

KEYS, GRADES = 10_000, 50
EVERY = "Spark SQL, every update and the final state, to Delta"
FINAL = "Spark SQL, the final state, to Delta"
FLOOR = "its logs read, the same log sorted by key, and log and view written"
STREAMED = "Structured Streaming, update mode, one batch, to Delta"
CENTS = {"n": "count(*)", "total": "sum(cast(price * 100 as bigint))"}
DAY = timedelta(days=1)
GRACE = 10 * DAY
RATE = StructType(
    [
        StructField("grade", StringType()),
        StructField("rate", DoubleType()),
        StructField("at", TimestampType()),
    ]
)


def topology(home: Path) -> dict[str, Stream]:
    """By name: sources, and an asset of each operator. A key has about eight records in a window."""

    def about(name: str) -> dict[str, Any]:
        return {
            "timestamp": "at",
            "partitions": generate.PARTITIONS,
            "source": FilesSource(str(home / name)),
        }

    def prices(name: str) -> VersionedTable:
        kept = timedelta(days=3650)
        return VersionedTable(
            name, key="key", schema=generate.RECORD, history_retention=kept, **about(name)
        )

    left, right = prices("prices"), prices("others")
    rates = VersionedTable(
        "rates", key="grade", schema=RATE, history_retention=timedelta(days=3650), **about("rates")
    )
    orders = Stream("orders", key="key", schema=generate.RECORD, **about("orders"))
    both, totals = ["left.*", "right.price as other"], {"n": "count(*)", "total": "sum(price)"}
    by_grade = left.group_by("grade")
    count = {"n": "count(*)"}
    tumbling = orders.group_by().windowed_by(TumblingWindow(30 * DAY, GRACE))
    hopping = orders.group_by().windowed_by(HoppingWindow(30 * DAY, 10 * DAY, GRACE))
    sessions = orders.group_by().windowed_by(SessionWindow(2 * DAY, GRACE))
    monthly = tumbling.aggregate(count, name="monthly")
    nodes: list[Stream] = [
        *(left, right, rates, orders, monthly),
        hopping.aggregate(count, name="hopping"),
        sessions.aggregate(count, name="sessions"),
        monthly.suppress(UntilWindowCloses(), name="closed"),
        by_grade.aggregate(totals, name="grades"),
        by_grade.aggregate(totals, name="grades_once", emit="per_run"),
        by_grade.aggregate(CENTS, name="cents_once", emit="per_run"),
        tumbling.aggregate(count, name="monthly_once", emit="per_run"),
        left.join(right, name="both", select=both),
        left.join(right, name="both_once", select=both, emit="per_run"),
        orders.left_join(left, name="joined", select=["left.*", "right.price as of_table"]),
        left.join(rates, foreign_key="grade", name="rated", select=["left.*", "right.rate"]),
    ]
    return {node.name: node for node in nodes}


@dataclass(frozen=True)
class Case:
    """An operator, and Spark SQL queries for the same logs.

    Args:
        updates: the query of every update; None = the peer writes only the final state.
        streamed: the query by Structured Streaming, another peer, and the target ratio to it.
        final: the query of the final state, from the updates if there are some, else from the logs.
    """

    name: str
    asset: str
    target: float | None
    final: Callable[..., DataFrame]
    updates: Callable[..., DataFrame] | None = None
    streamed: tuple[Callable[..., DataFrame], float] | None = None


def newest(rows: DataFrame, by: Sequence[str], values: Sequence[str], *order: str) -> DataFrame:
    """The newest row of each key, as a user would write the query without this library."""
    row = F.max_by(F.struct(*values), F.struct(*order)).alias("row")
    return rows.groupBy(*by).agg(row).select(*by, "row.*")


def counted(orders: DataFrame) -> DataFrame:
    rows = orders.withColumn("w", F.window(TIMESTAMP, "30 days"))
    so_far = W.partitionBy("key", "w").orderBy(OFFSET).rowsBetween(W.unboundedPreceding, 0)
    return rows.select(
        "key",
        F.col("w.start").alias(WINDOW_START),
        F.col("w.end").alias(WINDOW_END),
        F.count(F.lit(1)).over(so_far).alias("n"),
        F.max(TIMESTAMP).over(so_far).alias(TIMESTAMP),
        PARTITION,
        OFFSET,
    )


def last_count(updates: DataFrame) -> DataFrame:
    return newest(updates, ["key", WINDOW_START, WINDOW_END], ["n", TIMESTAMP], OFFSET)


def windows(orders: DataFrame) -> DataFrame:
    by = orders.groupBy("key", F.window(TIMESTAMP, "30 days").alias("w"))
    return by.agg(F.count(F.lit(1)).alias("n")).select("key", "w.*", "n")


def watched(orders: DataFrame) -> DataFrame:
    return windows(orders.withWatermark(TIMESTAMP, f"{GRACE.days} days"))


def hopped(orders: DataFrame) -> DataFrame:
    windows = F.window(TIMESTAMP, "30 days", "10 days")
    return (
        orders.groupBy("key", windows).agg(F.count(F.lit(1)).alias("n")).select("key", "window.*", "n")
    )


def met(orders: DataFrame) -> DataFrame:
    windows = F.session_window(TIMESTAMP, "2 days")
    found = orders.groupBy("key", windows).agg(F.count(F.lit(1)).alias("n"))
    return found.select("key", "session_window.*", "n")


def closed(monthly: DataFrame) -> DataFrame:
    times = monthly.groupBy(PARTITION).agg(F.max(TIMESTAMP).alias("time"))
    by = ["key", WINDOW_START, WINDOW_END, PARTITION]
    due = F.col(WINDOW_END) + F.expr(f"INTERVAL {GRACE.days} DAYS") <= F.col("time")
    return newest(monthly, by, ["n"], OFFSET).join(F.broadcast(times), PARTITION).where(due)


def totals(prices: DataFrame) -> DataFrame:
    order = [TIMESTAMP, PARTITION, OFFSET]
    given = F.struct("grade", F.lit(1).alias("n"), F.col("price").alias("total"))
    taken = F.struct(f"{OLD}.grade", F.lit(-1).alias("n"), (-F.col(f"{OLD}.price")).alias("total"))
    changes = prices.where(IS_LATEST).select(*order, F.explode(F.array(given, taken)).alias("e"))
    changes = changes.select(*order, "e.*").where("grade is not null")
    so_far = W.partitionBy("grade").orderBy(*order).rowsBetween(W.unboundedPreceding, 0)
    sums = [F.sum(c).over(so_far).alias(c) for c in ("n", "total")]
    return changes.select("grade", *sums, *order)


def last_total(updates: DataFrame) -> DataFrame:
    return newest(updates, ["grade"], ["n", "total"], TIMESTAMP, PARTITION, OFFSET)


def total(prices: DataFrame) -> DataFrame:
    rows = newest(prices, ["key"], ["price", "grade"], TIMESTAMP, OFFSET)
    return rows.groupBy("grade").agg(F.count(F.lit(1)).alias("n"), F.sum("price").alias("total"))


def whole(prices: DataFrame) -> DataFrame:
    rows = newest(prices, ["key"], ["price", "grade"], TIMESTAMP, OFFSET)
    cents = F.sum((F.col("price") * 100).cast("long")).alias("total")
    return rows.groupBy("grade").agg(F.count(F.lit(1)).alias("n"), cents)


def pairs(prices: DataFrame, others: DataFrame) -> DataFrame:
    place = [TIMESTAMP, OFFSET, PARTITION]
    left = prices.select("key", *place, F.struct("price", "grade").alias("l"))
    right = others.select("key", *place, F.struct(F.col("price").alias("other")).alias("r"))
    rows = left.unionByName(right, allowMissingColumns=True)
    so_far = W.partitionBy("key").orderBy(*place).rowsBetween(W.unboundedPreceding, 0)
    found = rows.withColumns({side: F.last(side, True).over(so_far) for side in ("l", "r")})
    return found.where("l is not null and r is not null").select("key", *place, "l.*", "r.*")


def last_pair(updates: DataFrame) -> DataFrame:
    return newest(updates, ["key"], ["price", "grade", "other"], TIMESTAMP, OFFSET)


def pair(prices: DataFrame, others: DataFrame) -> DataFrame:
    left = newest(prices, ["key"], ["price", "grade"], TIMESTAMP, OFFSET)
    right = newest(others, ["key"], ["price"], TIMESTAMP, OFFSET)
    return left.join(right.withColumnRenamed("price", "other"), "key")


def rated(prices: DataFrame, rates: DataFrame) -> DataFrame:
    """The pairs of a price and a rate that were current at the same time."""

    def spans(rows: DataFrame, key: str, side: str) -> DataFrame:
        following = W.partitionBy(key).orderBy(TIMESTAMP, OFFSET)
        ends = rows.where(IS_LATEST).withColumn("end", F.lead(TIMESTAMP).over(following))
        return ends.withColumnsRenamed({TIMESTAMP: f"{side}_from", "end": f"{side}_to"})

    left = spans(prices, "key", "l").select("key", "grade", "price", "l_from", "l_to")
    right = spans(rates, "grade", "r").select("grade", "rate", "r_from", "r_to")
    both = F.coalesce(F.col("l_from") < F.col("r_to"), F.lit(True))
    both &= F.coalesce(F.col("r_from") < F.col("l_to"), F.lit(True))
    return left.join(right, "grade").where(both)


def last_rated(updates: DataFrame) -> DataFrame:
    return updates.where("l_to is null and r_to is null")


CASES = [
    Case("windowed count", "monthly", 1.5, last_count, counted, (watched, 1.5)),
    Case("windowed count, per run", "monthly_once", 3.0, windows, None, (watched, 1.5)),
    Case("hopping windows, three a record", "hopping", None, hopped),
    Case("sessions", "sessions", None, met),
    Case("suppress until windows close", "closed", None, closed),
    Case("aggregate, every update", "grades", 1.5, last_total, totals),
    Case("aggregate, per run", "grades_once", 3.0, total),
    Case("aggregate of whole numbers, per run", "cents_once", 3.0, whole),
    Case("table-table join, every update", "both", 1.5, last_pair, pairs),
    Case("table-table join, per run", "both_once", 3.0, pair),
    Case("foreign-key join, every update", "rated", 1.5, last_rated, rated),
]


def prepare(spark: SparkSession, home: Path, rows: int, nodes: dict[str, Stream]) -> None:
    """Writes the logs of the sources, and of the windows that are suppressed."""
    keys = min(KEYS, rows // 10)
    sizes = {"prices": rows, "others": rows // 5, "orders": rows + 1}
    for name, many in sizes.items():
        (home / name).mkdir(parents=True)
        shutil.copy(generate.json_lines(spark, 0, many, many, keys), home / name / "1.jsonl")
    (home / "rates").mkdir()
    rates = spark.range(10 * GRADES).select(
        F.concat(F.lit("grade-"), (F.col("id") % GRADES).cast("string")).alias("grade"),
        generate.price().alias("rate"),
        F.timestamp_micros(F.lit(generate.START) + F.col("id") * (generate.SPAN // 10 // GRADES)).alias(
            "at"
        ),
    )
    rates.coalesce(1).write.mode("append").json(str(home / "rates"))
    for name in ("prices", "others", "orders", "rates", "monthly"):
        run_once(nodes[name], stores_of(str(home / "warehouse"), spark))


def run(
    spark: SparkSession, rows: int, repeat: int, outputs: Outputs
) -> tuple[list[Result], list[str]]:
    """Times a run of each operator that consumes its whole logs, and the queries of its peer."""
    home = Path(outputs.fresh("operators"))
    warehouse, nodes = str(home / "warehouse"), topology(home)
    prepare(spark, home, rows, nodes)

    def stored(name: str) -> AssetStore:
        return AssetStore(warehouse, nodes[name], spark)

    def fresh(name: str) -> Run:
        shutil.rmtree(home / "warehouse" / name, ignore_errors=True)
        return Run.pin(nodes[name], stores_of(warehouse, spark))

    results: list[Result] = []
    notes: list[str] = []
    for case in CASES:

        def logs(case: Case = case) -> list[DataFrame]:
            return [stored(n.name).read("log") for n in processor_of(nodes[case.asset]).plan().consumed]

        def write(frame: DataFrame, name: str) -> DataFrame:
            told = frame.write.format("delta").mode("overwrite").option("overwriteSchema", "true")
            told.save(outputs.path(name))
            return spark.read.format("delta").load(outputs.path(name))

        def ours(case: Case = case) -> None:
            run = fresh(case.asset)
            run.commit(run.operate(run.read()))

        def theirs(case: Case = case) -> None:
            given = logs(case)
            if case.updates is not None:
                given = [write(case.updates(*given), "updates")]
            write(case.final(*given), "theirs")

        contenders: dict[str, Callable[[], None]] = {
            "ours": ours,
            FINAL if case.updates is None else EVERY: theirs,
        }
        if case.streamed is not None:

            def one_batch(query: Callable[..., DataFrame] = case.streamed[0]) -> None:
                target, log = outputs.fresh("streamed"), stored("orders").log_path
                progress = outputs.fresh("progress")
                rows = query(spark.readStream.format("delta").load(log))
                told = rows.writeStream.outputMode("update").trigger(availableNow=True)
                told = told.option("checkpointLocation", progress).foreachBatch(
                    lambda batch, _: batch.write.format("delta").mode("append").save(target)
                )
                told.start().awaitTermination()

            contenders[STREAMED] = one_batch

        def floor(case: Case = case) -> None:
            """The cost of any run with these logs and this result: reads and writes, no computation."""
            for log in logs(case):
                log.write.format("noop").mode("overwrite").save()
            made, key = stored(case.asset), list(nodes[case.asset].key)
            rows = made.read("log").repartition(*key).sortWithinPartitions(*key, PARTITION, OFFSET)
            write(rows, "log")
            write(made.read(), "view")

        contenders[FLOOR] = floor
        made = fresh(case.asset)
        plan = plan_of(made.operate(made.read()).rows)
        times = take_turns(contenders, repeat)
        found = stored(case.asset).read().count()
        there = spark.read.format("delta").load(outputs.path("theirs")).count()
        # Late records open no window in ours; Spark's windows have no grace period.
        if found != there and case.asset not in (
            "monthly",
            "monthly_once",
            "hopping",
            "sessions",
            "closed",
        ):
            raise AssertionError(f"{case.name}: ours has {found} rows, the peer {there}")
        name = f"{case.name}, {rows:,} records"
        targets = {STREAMED: case.streamed[1] if case.streamed else None, FLOOR: None}
        for peer in (p for p in contenders if p != "ours"):
            target = targets.get(peer, case.target)
            results.append(compare(name, rows, times["ours"], peer, times[peer], target))
        notes.append(
            f"{case.name}: ours ends with {found:,} rows, the peer with {there:,}; plan: {plan}"
        )
    return results, notes
