"""Many records, 20 % out of order, into an empty versioned table, compared with a sorted append."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import duckdb
import generate
from measure import Outputs, Result, compare, plan_of, take_turns
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

from vt_dagster.columns import (
    ARRIVAL,
    IS_LATEST,
    IS_TOMBSTONE,
    OFFSET,
    OLD,
    OUTCOME,
    PARTITION,
    PROPAGATED_FROM,
    PROVIDED_COLUMNS,
    TIMESTAMP,
    VALID_FROM,
    VALID_TO,
)
from vt_dagster.core import versioned_table
from vt_dagster.core.arrival_order import FINE, Outcome
from vt_dagster.core.stream_time import Bounds, Timed, late_from, time_by_chunk
from vt_dagster.topology.version_rules import VersionRules

KEYS = 10_000
SORTED = "Delta append of the same rows, sorted"
FLOOR = "the floor: log and view written, nothing computed"
TARGET = 2.5
RETENTION = timedelta(days=3650)
COLUMNS = ("key", "price", "grade", TIMESTAMP, PARTITION, OFFSET, IS_TOMBSTONE)


VALUES = ("price", "grade")


def in_part(records: DataFrame) -> DataFrame:
    """The same records; alternately they provide both columns, only the price, or only the grade."""
    third = F.col(ARRIVAL) % 3
    said = [F.when(third == n, F.array(F.lit(c))) for n, c in enumerate(VALUES, 1)]
    return records.withColumn(PROVIDED_COLUMNS, F.coalesce(*said))


def chunk() -> Column:
    """The chunk of a record, for bounds of stream time."""
    return F.floor(F.col(ARRIVAL) / F.lit(FINE * generate.PARTITIONS))


def bounds_of(records: DataFrame) -> Bounds:
    """Bounds of stream time: the aggregate that a run with many records computes first."""
    timed = Timed(records, F.col(OUTCOME).isNull(), late_from(RETENTION))
    bounds = Bounds.of(time_by_chunk(timed, chunk()).collect(), {})
    return replace(bounds, frame=records.sparkSession.createDataFrame(*bounds.rows))


def log_of(records: DataFrame, parts: Sequence[str] = ()) -> DataFrame:
    """The log rows of a first run: the accepted records, and whether each is its key's latest.

    Args:
        parts: the columns that a record may leave out.
    """
    put = versioned_table.put(
        records,
        None,
        rules=VersionRules(("key",), RETENTION),
        values=["price", "grade"],
        order=[PARTITION, ARRIVAL],
        stream_time=F.lit(None).cast("timestamp"),
        chunk=chunk(),
        bounds=bounds_of(records),
        parts=dict.fromkeys(parts, ()),
    )
    accepted = put.where(F.col(OUTCOME) == Outcome.APPLIED).withColumn(OFFSET, F.col(ARRIVAL))
    return accepted.select(
        *COLUMNS, IS_LATEST, OLD, *([PROVIDED_COLUMNS, PROPAGATED_FROM] if parts else [])
    )


def view_of(log: DataFrame) -> DataFrame:
    """The versions that a log folds to."""
    horizon = F.timestamp_micros(F.lit(generate.START)) - F.lit(RETENTION)
    return versioned_table.fold(None, log, key=["key"], horizon=horizon)


def in_order(records: DataFrame) -> DataFrame:
    """The rows shuffled by key, and sorted by key and time."""
    partitions = records.sparkSession.conf.get("spark.sql.shuffle.partitions")
    return (
        records.select(*COLUMNS[:5], F.col(ARRIVAL).alias(OFFSET), IS_TOMBSTONE)
        .repartition(int(partitions or 4), "key")
        .sortWithinPartitions("key", TIMESTAMP)
    )


def write(rows: DataFrame, path: str) -> None:
    rows.write.format("delta").mode("append").save(path)


def check(records: Path, log: str, view: str) -> str:
    """Compares log and view with two window queries of DuckDB over the records."""
    with duckdb.connect() as db:
        db.execute(f"""
            CREATE VIEW expected AS
            SELECT key, {ARRIVAL} AS n, epoch_us({TIMESTAMP}) AS t,
                coalesce(epoch_us({TIMESTAMP}) >= max(epoch_us({TIMESTAMP})) OVER (
                    PARTITION BY key ORDER BY {ARRIVAL}
                    ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING), true) AS latest,
                lead(epoch_us({TIMESTAMP})) OVER (
                    PARTITION BY key ORDER BY epoch_us({TIMESTAMP})) AS ends
            FROM read_parquet('{records}/*.parquet')""")

        def mark(what: str, source: str) -> tuple[int, str]:
            found = db.execute(
                f"SELECT count(*), sum(hash({what})::HUGEINT)::VARCHAR FROM {source}"
            ).fetchone()
            assert found is not None
            return found

        t, ends = f"epoch_us({TIMESTAMP})", f"epoch_us({VALID_TO})"
        pairs = {
            "log": (
                mark("key, n, t, latest", "expected"),
                mark(f'key, "{OFFSET}", {t}, {IS_LATEST}', f"read_parquet('{log}/*.parquet')"),
            ),
            "view": (
                mark("key, n, t, ends", "expected"),
                mark(
                    f'key, "{OFFSET}", epoch_us({VALID_FROM}), {ends}',
                    f"read_parquet('{view}/*.parquet')",
                ),
            ),
        }
        for what, (expected, got) in pairs.items():
            if expected != got:
                raise AssertionError(f"versioned put, {what}: DuckDB gave {expected}, got {got}")
        odd = db.execute("SELECT avg((NOT latest)::INT) FROM expected").fetchone()
    assert odd is not None
    return f"versioned put: log and view agree with DuckDB; {odd[0]:.0%} out of order for their key"


def check_parts(records: Path, log: str) -> str:
    """Compares the last log row of each version, with parts of rows, with a fill by time in DuckDB."""
    with duckdb.connect() as db:
        fills = ", ".join(
            f"last_value(CASE WHEN {ARRIVAL} % 3 IN (0, {n}) THEN {{v: {c}}} END IGNORE NULLS) OVER "
            f"(PARTITION BY key ORDER BY {TIMESTAMP}).v AS {c}"
            for n, c in enumerate(VALUES, 1)
        )
        expected = (
            f"SELECT key, epoch_us({TIMESTAMP}) AS t, {fills} FROM read_parquet('{records}/*.parquet')"
        )
        last = f'arg_max({{p: price, g: grade}}, "{OFFSET}" * 1000000 + propagated_from)'
        found = f"""SELECT key, t, r.p AS price, r.g AS grade FROM (
            SELECT key, epoch_us({TIMESTAMP}) AS t, {last} AS r
            FROM read_parquet('{log}/*.parquet') GROUP BY ALL)"""
        marks = [
            db.execute(
                f"SELECT count(*), sum(hash(key, t, price, grade)::HUGEINT) FROM ({q})"
            ).fetchone()
            for q in (expected, found)
        ]
        more = db.execute(
            f"SELECT avg((propagated_from > 0)::INT) FROM read_parquet('{log}/*.parquet')"
        ).fetchone()
    if marks[0] != marks[1]:
        raise AssertionError(f"parts of rows: DuckDB gave {marks[0]}, got {marks[1]}")
    assert more is not None
    return f"parts of rows: the log agrees with DuckDB; {more[0]:.0%} of its rows are carried"


def run(
    spark: SparkSession, rows: int, repeat: int, outputs: Outputs
) -> tuple[list[Result], list[str]]:
    """Times the log, the view, and both from the same rows, which are computed once."""
    keys = min(KEYS, rows // 10)
    path = generate.arrivals(spark, rows, keys)

    def records() -> DataFrame:
        return spark.read.parquet(str(path))

    def into_log() -> None:
        write(log_of(records()), outputs.fresh("log"))

    def into_view() -> None:
        write(view_of(log_of(records())), outputs.fresh("view"))

    def into_both() -> None:
        """Computes the rows once, for log and view, as a run does."""
        rows = log_of(records()).persist()
        write(rows, outputs.fresh("log"))
        write(view_of(rows), outputs.fresh("view"))
        rows.unpersist()

    def peer() -> None:
        write(in_order(records()), outputs.fresh("sorted"))

    def floor() -> None:
        """Sorts the same rows by key once, and writes log and view: no outcome, order or end."""
        rows = in_order(records()).withColumns({IS_LATEST: F.lit(True), VALID_TO: F.col(TIMESTAMP)})
        rows = rows.persist()
        write(rows.drop(VALID_TO), outputs.fresh("floor_log"))
        write(rows.withColumnRenamed(TIMESTAMP, VALID_FROM), outputs.fresh("floor_view"))
        rows.unpersist()

    def parts_into_log() -> None:
        write(log_of(in_part(records()), VALUES), outputs.fresh("parts"))

    ways = {"log": into_log, "view": into_view, "both": into_both}
    times = take_turns({**ways, "parts": parts_into_log, SORTED: peer, FLOOR: floor}, repeat)
    name = f"versioned put of {rows:,} records"
    results = [
        compare(f"{name}: view", rows, times["view"], SORTED, times[SORTED], TARGET),
        compare(f"{name}: log", rows, times["log"], SORTED, times[SORTED], None),
        compare(f"{name}: log of parts of rows", rows, times["parts"], "log", times["log"], None),
        compare(f"{name}: log and view", rows, times["both"], SORTED, times[SORTED], TARGET),
        compare(f"{name}: log and view", rows, times["both"], FLOOR, times[FLOOR], None),
    ]
    notes = [
        check(path, outputs.path("log"), outputs.path("view")),
        check_parts(path, outputs.path("parts")),
        f"plan of the log of parts: {plan_of(log_of(in_part(records()), VALUES))}",
        f"plan of the log: {plan_of(log_of(records()))}",
        f"plan of the view: {plan_of(view_of(log_of(records())))}",
        f"plan of the peer: {plan_of(in_order(records()))}",
    ]
    return results, notes
