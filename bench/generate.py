"""The data of all contenders. Spark computes it from row numbers, so it is the same on every machine.

The files are kept in ``bench/.data``; only missing ones are generated.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import DoubleType, LongType, StringType, StructField, StructType, TimestampType

from vt_dagster.columns import (
    ARRIVAL,
    IS_TOMBSTONE,
    OFFSET,
    OUTCOME,
    PARTITION,
    TIMESTAMP,
    VALID_FROM,
    VALID_TO,
)
from vt_dagster.core.arrival_order import Outcome

DATA = Path(__file__).parent / ".data"
LAYOUT = 2
"""The version of the data: increased when the data changes, so that old files are not used."""

START = 1_577_836_800_000_000
"""2020-01-01, epoch microseconds."""
SPAN = 365 * 24 * 3600 * 1_000_000
PARTITIONS = 4
FILES = 4

RECORD = StructType(
    [
        StructField("key", LongType()),
        StructField("price", DoubleType()),
        StructField("grade", StringType()),
        StructField("at", TimestampType()),
    ]
)
"""The schema of a JSON line with a record of the versioned table ``prices``."""


def noise(seed: int, *columns: str) -> Column:
    """A pseudo-random number from 0 to 2**31 - 1, computed from columns."""
    return F.xxhash64(F.lit(seed), *columns).bitwiseAND(F.lit(2**31 - 1))


def part_of(span: Column, seed: int, *columns: str) -> Column:
    """A pseudo-random whole number from 0 (inclusive) to ``span`` (exclusive)."""
    return F.pmod(noise(seed, *columns) * F.lit(1_000_003), span)


def partition_of(key: str) -> Column:
    """The record's partition: the hash of the key, as for a files source."""
    return F.pmod(F.xxhash64(key), F.lit(PARTITIONS)).cast("int")


def price() -> Column:
    return (noise(1, "id") % 100_000) / 100


def grade() -> Column:
    return F.concat(F.lit("grade-"), (noise(2, "id") % 50).cast("string"))


def cached(name: str, rows: DataFrame) -> Path:
    """The directory with the rows as Parquet files, which are written once."""
    path = DATA / f"{name}-v{LAYOUT}"
    if not (path / "_SUCCESS").exists():
        rows.write.mode("overwrite").parquet(str(path))
    return path


def stream(spark: SparkSession, rows: int, keys: int, hot: bool = False) -> Path:
    """Stream records to be joined, in log order: by arrival, which is roughly by time.

    Args:
        hot: every other record has the key -1, which no other record has.
    """
    step = SPAN // rows
    late = part_of(F.lit(SPAN // 100), 3, "id")
    records = spark.range(0, rows, 1, FILES).select(
        (F.when(F.lit(hot) & (F.col("id") % 2 == 0), -1).otherwise(noise(4, "id") % keys)).alias("key"),
        (noise(5, "id") % 1_000).cast("double").alias("quantity"),
        F.concat(F.lit("shop-"), (noise(6, "id") % 200).cast("string")).alias("shop"),
        F.timestamp_micros(F.lit(START) + F.col("id") * step - late).alias(TIMESTAMP),
        (noise(4, "id") % keys % PARTITIONS).cast("int").alias(PARTITION),
        F.col("id").alias(ARRIVAL),
        F.lit(Outcome.APPLIED).alias(OUTCOME),
    )
    return cached(f"stream-{rows}-{keys}{'-hot' if hot else ''}", records)


def versions(spark: SparkSession, rows: int, keys: int, hot: bool = False) -> Path:
    """A view: the versions of each key, spread over the time of the stream; 2 % are tombstones.

    Args:
        hot: half of the versions have the key -1, which no other version has.
    """
    if not hot:
        return cached(f"versions-{rows}-{keys}", _versions(spark, rows, keys))
    of_one = _versions(spark, rows // 2, 1).withColumn("key", F.lit(-1).cast("long"))
    both = of_one.unionByName(_versions(spark, rows // 2, keys))
    return cached(f"versions-{rows}-{keys}-hot", both)


def _versions(spark: SparkSession, rows: int, keys: int) -> DataFrame:
    each = rows // keys
    width = SPAN // each

    def begin(n: Column, *of: str) -> Column:
        return F.timestamp_micros(F.lit(START) + n * width + part_of(F.lit(width), 7, *of))

    numbered = spark.range(0, each * keys, 1, FILES).withColumn("n", F.col("id") % each)
    numbered = numbered.withColumn("next", F.col("id") + 1)
    following = F.when(F.col("n") < each - 1, begin(F.col("n") + 1, "next"))
    return numbered.select(
        F.floor(F.col("id") / each).alias("key"),
        price().alias("price"),
        grade().alias("grade"),
        begin(F.col("n"), "id").alias(TIMESTAMP),
        (F.floor(F.col("id") / each) % PARTITIONS).cast("int").alias(PARTITION),
        F.col("id").alias(OFFSET),
        (noise(8, "id") % 50 == 0).alias(IS_TOMBSTONE),
        begin(F.col("n"), "id").alias(VALID_FROM),
        following.alias(VALID_TO),
    )


def arrivals(spark: SparkSession, rows: int, keys: int) -> Path:
    """Records for a versioned table in order of arrival, 20 % of them out of order."""
    records = _arrivals(spark, 0, rows, rows, keys, FILES, rows // 5)
    prepared = records.select(
        "key",
        "price",
        "grade",
        F.col("at").alias(TIMESTAMP),
        partition_of("key").alias(PARTITION),
        F.col("id").alias(ARRIVAL),
        F.lit(False).alias(IS_TOMBSTONE),
        F.lit(None).cast("string").alias(OUTCOME),
    )
    return cached(f"arrivals-{rows}-{keys}", prepared)


def json_lines(
    spark: SparkSession,
    first: int,
    rows: int,
    total: int,
    keys: int,
    late: int = 5,
    reach: int | None = None,
    step: int | None = None,
    seed: int = 4,
) -> Path:
    """One file of JSON lines: arrivals ``first`` to ``first + rows`` of ``total``.

    The lateness of a feed does not depend on the table's history: it is at most 20,000 records.

    Args:
        late, reach: one in ``late`` records is late, by up to the time of ``reach`` records.
        step: microseconds from one record to the next; None: ``total`` records span a year.
        seed: the seed of the keys.
    """
    reach = min(total // 5, 20_000) if reach is None else reach
    told = "" if step is None else f"-{step}-{seed}"
    path = DATA / f"lines-{first}-{rows}-{total}-{keys}-{late}-{reach}{told}-v{LAYOUT}.jsonl"
    if not path.exists():
        records = _arrivals(spark, first, rows, total, keys, 1, reach, late, step, seed)
        whole = records.drop("id").withColumn(
            "at", F.date_format("at", "yyyy-MM-dd'T'HH:mm:ss.SSSSSS'Z'")
        )
        folder = path.with_suffix(".parts")
        whole.write.mode("overwrite").json(str(folder))
        next(folder.glob("part-*")).rename(path)
        shutil.rmtree(folder)
    return path


def _arrivals(
    spark: SparkSession,
    first: int,
    rows: int,
    total: int,
    keys: int,
    files: int,
    reach: int,
    one_in: int = 5,
    step: int | None = None,
    seed: int = 4,
) -> DataFrame:
    """``id, key, price, grade, at``; no two records of a key have the same time.

    Args:
        reach: one record in ``one_in`` is late, by up to the time of ``reach`` records.
    """
    step = SPAN // total if step is None else step
    late = F.when(noise(9, "id") % one_in == 0, 1 + noise(10, "id") % reach).otherwise(F.lit(0))
    return spark.range(first, first + rows, 1, files).select(
        "id",
        (noise(seed, "id") % keys).alias("key"),
        price().alias("price"),
        grade().alias("grade"),
        F.timestamp_micros(
            F.lit(START) + (F.col("id") - late) * step + F.pmod(F.col("id"), F.lit(step))
        ).alias("at"),
    )
