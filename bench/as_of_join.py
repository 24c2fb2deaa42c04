"""The stream-table join as of the record's time, compared with other operations on the same rows."""

from __future__ import annotations

import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path

import duckdb
import generate
from measure import Outputs, Result, compare, plan_of, take_turns
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from vt_dagster.columns import ARRIVAL, IS_TOMBSTONE, TIMESTAMP, VALID_FROM
from vt_dagster.core import stream_table_join
from vt_dagster.core.as_of_join import JoinStrategy
from vt_dagster.runs.run import tiles_of
from vt_dagster.spark.session import build_session

WARM = 3
"""Rounds that do not count: in these the JVM compiles, and our join has the most code to compile."""

KEYS = 10_000
BARE, SHUFFLE, SORT, TEMPO, DUCKDB = (
    "Spark scan + shuffle + write of the rows as they were",
    "Spark scan + shuffle + write",
    "Spark scan + shuffle + sort + write",
    "dbl-tempo asofJoin",
    "DuckDB ASOF JOIN",
)
TARGETS = {SHUFFLE: 2.2, SORT: 0.9, TEMPO: 0.7, DUCKDB: 4.0, BARE: None}
OUTPUT = ("key", "quantity", "shop", TIMESTAMP, ARRIVAL, "price", "grade", VALID_FROM)
"""The columns that each contender writes: a row per stream record, in any order."""

THREADS = 2


def operator(stream: DataFrame, versions: DataFrame, how: str = "tiled") -> DataFrame:
    """The join as a user gets it: a left join with all columns of both sides. The tiled strategy
    includes the computation of its tiles.

    A run knows the time span of its records before it joins, because it has counted them.
    """
    way: JoinStrategy = "broadcast" if how == "broadcast" else "sorted"
    if how == "tiled":
        first, last = generate.START - generate.SPAN // 100, generate.START + generate.SPAN
        way, _ = tiles_of(versions, key=["key"], first=first, last=last)
    joined = stream_table_join.join(
        stream,
        versions,
        kind="left",
        stream_key=["key"],
        table_key=["key"],
        columns=[
            *[(c, f"left.{c}") for c in ("key", "quantity", "shop")],
            *[(c, f"right.{c}") for c in ("price", "grade", VALID_FROM)],
        ],
        horizon=F.timestamp_micros(F.lit(generate.START)),
        strategy=way,
    )
    return joined.select(*OUTPUT)


def both(stream: DataFrame, versions: DataFrame) -> DataFrame:
    """The rows of both sides with the columns of the output."""
    left = stream.select("key", "quantity", "shop", TIMESTAMP, ARRIVAL)
    right = versions.select("key", F.col(VALID_FROM).alias(TIMESTAMP), "price", "grade", VALID_FROM)
    return left.unionByName(right, allowMissingColumns=True).select(*OUTPUT)


def shuffled(stream: DataFrame, versions: DataFrame) -> DataFrame:
    partitions = stream.sparkSession.conf.get("spark.sql.shuffle.partitions")
    return both(stream, versions).repartition(int(partitions or 4), "key")


def shuffled_and_sorted(stream: DataFrame, versions: DataFrame) -> DataFrame:
    return shuffled(stream, versions).sortWithinPartitions("key", TIMESTAMP)


def as_if_joined(rows: DataFrame) -> DataFrame:
    """As many rows and values as a join writes: stream rows with own values for those of the table."""
    # Without rand() Spark would not even scan the versions.
    of_stream = F.coalesce(ARRIVAL, F.lit(-1)) >= F.rand() * 0
    values = {"price": "quantity", "grade": "shop", VALID_FROM: TIMESTAMP}
    filled = {c: F.coalesce(F.col(c), F.col(own)) for c, own in values.items()}
    return rows.where(of_stream).withColumns(filled)


def tempo(stream: DataFrame, versions: DataFrame) -> DataFrame:
    """The join by Tempo. It has no tombstones, so they are removed after the join."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from tempo import TSDF

        left = stream.select("key", "quantity", "shop", TIMESTAMP, ARRIVAL)
        right = versions.select("key", "price", "grade", VALID_FROM, IS_TOMBSTONE)
        joined = TSDF(left, ts_col=TIMESTAMP, partition_cols=["key"]).asofJoin(
            TSDF(
                right.withColumnRenamed(VALID_FROM, TIMESTAMP),
                ts_col=TIMESTAMP,
                partition_cols=["key"],
            ),
            right_prefix="right",
        )
    alive = ~F.col(f"right_{IS_TOMBSTONE}")
    found = {"price": "right_price", "grade": "right_grade", VALID_FROM: f"right_{TIMESTAMP}"}
    return joined.df.select(
        *[F.when(alive, F.col(found[c])).alias(c) if c in found else F.col(c) for c in OUTPUT]
    )


def in_duckdb(stream: Path, versions: Path, target: str) -> None:
    """The join by DuckDB, from the same files, in this process."""
    with duckdb.connect(config={"threads": THREADS, "preserve_insertion_order": False}) as db:
        Path(target).mkdir(parents=True)
        alive = f"CASE WHEN NOT v.{IS_TOMBSTONE} THEN v.%s END AS %s"
        db.execute(f"""
            COPY (
                SELECT s.key, s.quantity, s.shop, s.{TIMESTAMP}, s.{ARRIVAL},
                    {", ".join(alive % (c, c) for c in ("price", "grade", VALID_FROM))}
                FROM read_parquet('{stream}/*.parquet') s
                ASOF LEFT JOIN read_parquet('{versions}/*.parquet') v
                ON s.key = v.key AND s.{TIMESTAMP} >= v.{VALID_FROM}
            ) TO '{target}/rows.parquet' (FORMAT parquet)""")


def fingerprint(folder: str) -> tuple[int, int, str]:
    """Of an output: the number of rows, of rows with a version, and the sum of hashes of whole rows."""
    times = (TIMESTAMP, VALID_FROM)
    columns = ", ".join(f"epoch_us({c})" if c in times else c for c in OUTPUT)
    with duckdb.connect(config={"threads": THREADS}) as db:
        found = db.execute(
            f"SELECT count(*), count(price), sum(hash({columns})::HUGEINT)::VARCHAR "
            f"FROM read_parquet('{folder}/*.parquet')"
        ).fetchone()
    assert found is not None
    return found


def run(
    spark: SparkSession, rows: int, table_rows: int, repeat: int, outputs: Outputs
) -> tuple[list[Result], list[str]]:
    """Times all contenders. The notes are the plans, and that the results agree."""
    keys = min(KEYS, table_rows // 10)
    stream_path = generate.stream(spark, rows, keys)
    versions_path = generate.versions(spark, table_rows, keys)

    def made(build: Callable[[DataFrame, DataFrame], DataFrame]) -> DataFrame:
        return build(spark.read.parquet(str(stream_path)), spark.read.parquet(str(versions_path)))

    def through_spark(
        name: str, build: Callable[[DataFrame, DataFrame], DataFrame]
    ) -> Callable[[], None]:
        return lambda: made(build).write.parquet(outputs.fresh(name))

    times = take_turns(
        {
            "ours": through_spark("ours", operator),
            "sorted": through_spark("sorted", partial(operator, how="sorted")),
            BARE: through_spark("bare", shuffled),
            SHUFFLE: through_spark("shuffle", lambda s, v: as_if_joined(shuffled(s, v))),
            SORT: through_spark("sort", lambda s, v: as_if_joined(shuffled_and_sorted(s, v))),
            TEMPO: through_spark("tempo", tempo),
            DUCKDB: lambda: in_duckdb(stream_path, versions_path, outputs.fresh("duckdb")),
        },
        repeat,
        warm=WARM,
    )
    expected = fingerprint(outputs.path("duckdb"))
    for other in ("ours", "sorted", "tempo"):
        got = fingerprint(outputs.path(other))
        if got != expected:
            raise AssertionError(f"as-of join: DuckDB gave {expected}, {other} gave {got}")
    name = f"as-of join, {rows:,} stream rows, {table_rows:,} versions, {keys:,} keys"
    results = [
        compare(name, rows, times["ours"], peer, times[peer], target)
        for peer, target in TARGETS.items()
    ]
    results.append(compare(f"{name}: sorted", rows, times["sorted"], SHUFFLE, times[SHUFFLE], None))
    notes = [
        f"as-of join: tiled, sorted, dbl-tempo and DuckDB agree on all {expected[0]:,} rows, "
        f"{expected[1]:,} of which found a version",
        f"plan of ours, tiled: {plan_of(made(operator))}",
        f"plan of ours, sorted: {plan_of(made(partial(operator, how='sorted')))}",
        f"plan of {TEMPO}: {plan_of(made(tempo))}",
    ]
    more, said = shapes(spark, rows, table_rows, repeat, outputs)
    return results + more, notes + said


def first_turn(
    rows: int, table_rows: int, repeat: int, outputs: Outputs
) -> tuple[list[Result], list[str]]:
    """Times the join and the shuffle as the first query of a process, as in a run of Dagster."""
    keys = min(KEYS, table_rows // 10)

    def told(name: str) -> dict[str, float]:
        """The seconds from a started session to the written output."""
        call = [sys.executable, __file__, name, str(rows), str(table_rows), str(keys)]
        ended = subprocess.run(
            [*call, outputs.fresh(name)], capture_output=True, text=True, check=True, timeout=1800
        )
        return {"turn": float(ended.stdout.splitlines()[-1])}

    times = take_turns({n: partial(told, n) for n in ("ours", "shuffle")}, repeat, warm=0)
    name = f"as-of join, {rows:,} stream rows, first turn of a process"
    peer = f"{SHUFFLE}, first turn of a process"
    result = compare(name, rows, times["ours: turn"], peer, times["shuffle: turn"], 2.0)
    return [result], []


def one_turn(name: str, rows: int, table_rows: int, keys: int, target: str) -> None:
    """Runs a contender of ``first_turn`` in this process, and prints its seconds."""
    spark = build_session("vt_dagster bench", master="local[2]", conf={"spark.driver.memory": "4g"})
    paths = [str(generate.stream(spark, rows, keys)), str(generate.versions(spark, table_rows, keys))]
    start = time.perf_counter()
    stream, versions = [spark.read.parquet(path) for path in paths]
    shuffle = name == "shuffle"
    made = as_if_joined(shuffled(stream, versions)) if shuffle else operator(stream, versions)
    made.write.parquet(target)
    print(time.perf_counter() - start)
    spark.stop()


def shapes(
    spark: SparkSession, rows: int, table_rows: int, repeat: int, outputs: Outputs
) -> tuple[list[Result], list[str]]:
    """Compares the join with itself on other keys: one hot key, few and many keys, few versions."""

    def ours(keys: int, versions: int, hot: bool = False, how: str = "tiled") -> Callable[[], None]:
        left = generate.stream(spark, rows, keys, hot)
        right = generate.versions(spark, versions, keys, hot)

        def run() -> None:
            made = operator(spark.read.parquet(str(left)), spark.read.parquet(str(right)), how)
            made.write.parquet(outputs.fresh(f"{keys}-{versions}-{hot}-{how}"))

        return run

    keys, few = min(KEYS, table_rows // 10), table_rows // 100
    rare = max(2, table_rows // 10_000)
    even = f"{keys:,} keys alike"
    contenders = {
        even: ours(keys, table_rows),
        "one key with half of all rows": ours(keys, table_rows, hot=True),
        f"{rare} keys": ours(rare, table_rows),
        f"{table_rows:,} keys": ours(table_rows, table_rows),
        "sorted": ours(few // 10, few, how="sorted"),
        "broadcast": ours(few // 10, few, how="broadcast"),
    }
    times = take_turns(contenders, repeat)
    both = ("sorted", "broadcast")
    found = [fingerprint(outputs.path(f"{few // 10}-{few}-False-{how}")) for how in both]
    if found[0] != found[1]:
        raise AssertionError(f"as-of join: sorted gave {found[0]}, broadcast {found[1]}")
    name = f"as-of join, {rows:,} stream rows, {table_rows:,} versions"
    results = [
        compare(f"{name}: {what}", rows, times[what], even, times[even], 1.5)
        for what in list(contenders)[1:4]
    ]
    small = f"as-of join, {rows:,} stream rows, {few:,} versions of {few // 10:,} keys, broadcast"
    results.append(compare(small, rows, times["broadcast"], "sorted", times["sorted"], 0.7))
    return results, [f"as-of join of {few:,} versions: broadcast and sorted agree on all rows"]


if __name__ == "__main__":
    what, *numbers, folder = sys.argv[1:]
    one_turn(what, int(numbers[0]), int(numbers[1]), int(numbers[2]), folder)
