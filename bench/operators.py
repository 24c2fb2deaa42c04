"""Operators on tables and windows in one large run, beside plain Spark SQL for the final state."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta

import generate
from measure import Outputs, Result, compare, plan_of, take_turns
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import DoubleType, LongType, StringType, StructField, StructType, TimestampType
from versioned_put import log_of

from vt_dagster.columns import (
    IS_TOMBSTONE,
    OFFSET,
    PARTITION,
    TIMESTAMP,
    WINDOW_END,
    WINDOW_START,
)
from vt_dagster.core import store
from vt_dagster.core.arrival import by_partition
from vt_dagster.core.processor import Input, Known
from vt_dagster.core.processors import processor_of
from vt_dagster.sources.files import FilesSource
from vt_dagster.topology.model import Stream, Table, VersionedTable
from vt_dagster.topology.operators import UntilWindowCloses
from vt_dagster.topology.windowing import TumblingWindow

KEYS = 10_000
TARGET = 2.5
PEER = "Spark SQL, the final state only"
HOUR, GRACE = timedelta(hours=1), timedelta(days=7)

NOWHERE = FilesSource("nowhere")
PRICE = StructType(
    [
        StructField("key", LongType()),
        StructField("price", DoubleType()),
        StructField("grade", StringType()),
        StructField(TIMESTAMP, TimestampType()),
    ]
)


def prices(name: str) -> VersionedTable:
    return VersionedTable(
        name,
        key="key",
        schema=PRICE,
        partitions=generate.PARTITIONS,
        history_retention=timedelta(days=3650),
        source=NOWHERE,
    )


@dataclass(frozen=True)
class Case:
    """An operator, what it takes, and the query that makes its final state."""

    name: str
    node: Stream
    inputs: Sequence[str]
    peer: Callable[[Sequence[DataFrame]], DataFrame]


def results_of(node: Stream, logs: Sequence[DataFrame]) -> DataFrame:
    """What an operator makes of one run that takes everything."""
    processor, inputs = processor_of(node), [Input(rows) for rows in logs]
    times: dict[int, int] = {}
    if processor.goes_by_time:
        timed = processor.own_time(inputs, Known.nothing())
        times = {row[PARTITION]: row["time"] for row in timed.collect()}
    return processor.results(inputs, Known.nothing(times))


def log_rows(node: Stream, results: DataFrame) -> DataFrame:
    return processor_of(node).produce(results, by_partition({}, "long"), few=False)


def final_state(node: Stream, results: DataFrame) -> DataFrame:
    """The view of the operator's result."""
    assert isinstance(node, Table)
    return store.fold(node, None, log_rows(node, results), by_partition({}))


def latest(log: DataFrame, *names: str) -> DataFrame:
    """The newest row of each key, as one would write it without the library."""
    row = F.max_by(F.struct(*names), F.struct(TIMESTAMP, OFFSET)).alias("row")
    return log.groupBy("key").agg(row).select("key", "row.*")


def joined(logs: Sequence[DataFrame]) -> DataFrame:
    left, right = latest(logs[0], "price", "grade"), latest(logs[1], "price")
    return left.join(right.withColumnRenamed("price", "other"), "key")


def grades(logs: Sequence[DataFrame]) -> DataFrame:
    rows = latest(logs[0], "price", "grade")
    return rows.groupBy("grade").agg(F.count(F.lit(1)).alias("n"), F.sum("price").alias("total"))


def counts(logs: Sequence[DataFrame]) -> DataFrame:
    return logs[0].groupBy("key", F.window(TIMESTAMP, "1 hour")).agg(F.count(F.lit(1)).alias("n"))


def closed(logs: Sequence[DataFrame]) -> DataFrame:
    times = logs[0].groupBy(PARTITION).agg(F.max(TIMESTAMP).alias("time"))
    row = F.max_by("n", OFFSET).alias("n")
    rows = logs[0].groupBy("key", WINDOW_START, WINDOW_END, PARTITION).agg(row)
    due = F.col(WINDOW_END) + F.expr(f"INTERVAL {GRACE.days} DAYS") <= F.col("time")
    return rows.join(F.broadcast(times), PARTITION).where(due)


def inputs(spark: SparkSession, rows: int, keys: int, windows: Stream) -> dict[str, str]:
    """The logs that the operators take, as Parquet."""
    found: dict[str, str] = {}
    for name, many in (("prices", rows), ("others", rows // 5)):
        records = spark.read.parquet(str(generate.arrivals(spark, many, keys)))
        found[name] = str(generate.cached(f"log-{many}-{keys}", log_of(records)))
    stream = spark.read.parquet(str(generate.stream(spark, rows, keys)))
    ordered = stream.select(
        *("key", "quantity", TIMESTAMP, PARTITION),
        F.col("_arrival").alias(OFFSET),
        F.lit(False).alias(IS_TOMBSTONE),
    )
    found["orders"] = str(generate.cached(f"orders-{rows}-{keys}", ordered))
    found["hourly"] = str(
        generate.cached(
            f"hourly-{rows}-{keys}",
            log_rows(windows, results_of(windows, [spark.read.parquet(found["orders"])])),
        )
    )
    return found


def run(
    spark: SparkSession, rows: int, repeat: int, outputs: Outputs
) -> tuple[list[Result], list[str]]:
    """Times each operator and its peer; both write their final state to Parquet."""
    left, right = prices("prices"), prices("others")
    schema = StructType([PRICE["key"], StructField("quantity", DoubleType()), PRICE[TIMESTAMP]])
    orders = Stream("orders", key="key", schema=schema, partitions=generate.PARTITIONS, source=NOWHERE)
    hourly = (
        orders.group_by()
        .windowed_by(TumblingWindow(HOUR, GRACE))
        .aggregate({"n": "count(*)"}, name="hourly")
    )
    cases = [
        Case(
            "table-table join",
            left.join(right, name="both", select=["left.*", "right.price as other"], emit="per_run"),
            ("prices", "others"),
            joined,
        ),
        Case(
            "aggregate",
            left.group_by("grade").aggregate(
                {"n": "count(*)", "total": "sum(price)"}, name="grades", emit="per_run"
            ),
            ("prices",),
            grades,
        ),
        Case("windowed count", hourly, ("orders",), counts),
        Case(
            "suppress until windows close",
            hourly.suppress(UntilWindowCloses(), name="final"),
            ("hourly",),
            closed,
        ),
    ]
    paths = inputs(spark, rows, min(KEYS, rows // 10), hourly)
    results: list[Result] = []
    notes: list[str] = []
    for case in cases:

        def logs(case: Case = case) -> list[DataFrame]:
            return [spark.read.parquet(paths[name]) for name in case.inputs]

        def write(frame: DataFrame, name: str) -> None:
            frame.write.mode("overwrite").parquet(outputs.path(name))

        def ours(case: Case = case) -> None:
            kept = results_of(case.node, logs(case)).persist()  # as a run does it
            write(final_state(case.node, kept), "ours")
            kept.unpersist()

        def theirs(case: Case = case) -> None:
            write(case.peer(logs(case)), "theirs")

        times = take_turns({"ours": ours, PEER: theirs}, repeat)
        found = [spark.read.parquet(outputs.path(n)).count() for n in ("ours", "theirs")]
        if found[0] != found[1]:
            raise AssertionError(f"{case.name}: ours has {found[0]} rows, the peer {found[1]}")
        name = f"{case.name}, {rows:,} records"
        results.append(compare(name, rows, times["ours"], PEER, times[PEER], TARGET))
        notes.append(f"{case.name}: both end with {found[0]:,} rows")
        notes.append(f"plan of the {case.name}: {plan_of(results_of(case.node, logs()))}")
    return results, notes
