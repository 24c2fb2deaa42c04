"""The difference of two full dumps, 1 % of which changes, compared with a full outer join by Spark."""

from __future__ import annotations

from pathlib import Path

from measure import Outputs, Result, compare, plan_of, take_turns
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from vt_dagster.core.source_records import POSITION, REASON, SOURCE, difference
from vt_dagster.sources.snapshot_source import buckets_of

JOINED = "Spark full outer join of both dumps, what differs, to Parquet"
TARGET = 1.5
KEY, VALUES = "id", ["name", "city", "spent", "grade"]
CHANGED = 300
"""Among this number of rows, one is changed, one is removed and one is new."""


def dump(spark: SparkSession, rows: int, day: int) -> DataFrame:
    """The table on a day: of each 300 keys, one has another value, one is removed and one is new."""
    number = F.col("id")
    kept = spark.range(rows * day // CHANGED, rows + rows * day // CHANGED)
    return kept.select(
        F.concat(F.lit("customer-"), number).alias(KEY),
        F.concat(F.lit("name of "), number % 100_003).alias("name"),
        F.when(number % 7 != 0, F.concat(F.lit("city "), number % 977)).alias("city"),
        (number % 10_007 + F.when(number % CHANGED == 0, day).otherwise(0))
        .cast("double")
        .alias("spent"),
        (number % 50).cast("int").alias("grade"),
    )


def run(
    spark: SparkSession, rows: int, repeat: int, outputs: Outputs
) -> tuple[list[Result], list[str]]:
    """Times the difference and its peer, which both write to Parquet."""
    paths = [outputs.fresh(f"dump-{day}") for day in (0, 1)]
    for day, path in enumerate(paths):
        dump(spark, rows, day).orderBy(F.xxhash64(KEY)).write.mode("overwrite").parquet(path)
    size = sum(file.stat().st_size for file in Path(paths[1]).glob("*.parquet"))

    def ours() -> DataFrame:
        none = F.lit(None).cast("string")
        place = F.col("_metadata.row_index"), F.col("_metadata.file_name")
        new = spark.read.parquet(paths[1]).select("*", place[0].alias(POSITION), place[1].alias(SOURCE))
        return difference(
            new.withColumn(REASON, none),
            spark.read.parquet(paths[0]),
            key=[KEY],
            compared=VALUES,
            buckets=buckets_of(size),
        )

    def peer() -> DataFrame:
        old, new = (spark.read.parquet(p).withColumn("there", F.lit(True)) for p in paths)
        both = new.alias("n").join(old.alias("o"), KEY, "full_outer")
        same = [F.col(f"n.{c}").eqNullSafe(F.col(f"o.{c}")) for c in (*VALUES, "there")]
        differs = ~same[0]
        for one in same[1:]:
            differs = differs | ~one
        gone = F.col("n.there").isNull().alias("gone")
        return both.where(differs).select(KEY, *[f"n.{c}" for c in VALUES], gone)

    contenders = {
        name: (lambda name=name, make=make: make().write.parquet(outputs.fresh(name)))
        for name, make in (("difference", ours), ("joined", peer))
    }
    times = take_turns(contenders, repeat)
    found = [spark.read.parquet(outputs.path(name)).count() for name in contenders]
    if found[0] != found[1]:
        raise AssertionError(f"snapshot: ours found {found[0]} differences, the peer {found[1]}")
    name = f"difference of a dump of {rows:,} rows, {found[0]:,} of them changed"
    notes = [
        f"snapshot: both found {found[0]:,} differences",
        f"plan of the difference: {plan_of(ours())}",
        f"plan of its peer: {plan_of(peer())}",
    ]
    return [compare(name, rows, times["difference"], JOINED, times["joined"], TARGET)], notes
