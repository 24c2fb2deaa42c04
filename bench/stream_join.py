"""A join of two streams, with many keys or one, compared with Spark's joins: batch and streaming."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import generate
from measure import Outputs, Result, compare, plan_of, take_turns
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

from vt_dagster.columns import TIMESTAMP
from vt_dagster.core.processor_registry import processor_of
from vt_dagster.runs.run import Run, run_once
from vt_dagster.sources.files_source import FilesSource
from vt_dagster.storage.asset_store import AssetStore, stores_of
from vt_dagster.topology.model import Stream

KEYS = 10_000
MINUTE = timedelta(minutes=1)
GRACE = 5 * MINUTE
"""Records are late by at most the time of 20,000 records, which is two minutes."""
BATCH = "Spark SQL's interval join, to Delta"
STREAMED = "Structured Streaming, one batch, to Delta"
SAME = "the same of 10,000 keys"
INNER = "their inner join"
STATE = {
    # The default keeps the state in the heap, which is too small for ten million records.
    "spark.sql.streaming.stateStore.providerClass": (
        "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
    ),
    # One batch, without another one that drops the state.
    "spark.sql.streaming.noDataMicroBatches.enabled": "false",
}


class Site:
    """Two streams of ``rows`` records each, their join, and their left join. A window contains as many
    records of a key as a minute of a stream with ``KEYS`` keys: one, on average."""

    def __init__(self, spark: SparkSession, home: Path, rows: int, keys: int) -> None:
        self.spark, self.warehouse = spark, str(home / "warehouse")
        self.within = MINUTE / 2 * keys / KEYS
        step = MINUTE // timedelta(microseconds=1) // KEYS
        streams: list[Stream] = []
        for seed, name in enumerate(("orders", "payments"), 4):
            landed = generate.json_lines(spark, 0, rows, rows, keys, step=step, seed=seed)
            (home / name).mkdir(parents=True)
            shutil.copy(landed, home / name / "1.jsonl")
            source = FilesSource(str(home / name))
            about = {"timestamp": "at", "partitions": generate.PARTITIONS, "source": source}
            streams.append(Stream(name, key="key", schema=generate.RECORD, **about))
            run_once(streams[-1], stores_of(self.warehouse, spark))
        about: dict[str, Any] = {"within": self.within, "grace": GRACE}
        about["select"] = ["left.*", "right.price as paid"]
        self.paid = streams[0].join(streams[1], name="paid", **about)
        self.placed = streams[0].left_join(streams[1], name="placed", **about)

    def fresh(self, node: Stream) -> Run:
        shutil.rmtree(f"{self.warehouse}/{node.name}", ignore_errors=True)
        return Run.pin(node, stores_of(self.warehouse, self.spark))

    def ours(self) -> None:
        self.run(self.paid)

    def ours_left(self) -> None:
        self.run(self.placed)

    def run(self, node: Stream) -> None:
        run = self.fresh(node)
        run.commit(run.operate(run.read()))

    def logs(self) -> list[str]:
        inputs = processor_of(self.paid).plan().consumed
        return [AssetStore(self.warehouse, node, self.spark).log_path for node in inputs]

    def result(self) -> DataFrame:
        return AssetStore(self.warehouse, self.paid, self.spark).read()

    def matches_of_left(self) -> DataFrame:
        """The rows of the left join that have a match. Some of its other records still wait."""
        return AssetStore(self.warehouse, self.placed, self.spark).read().where("paid is not null")

    def near(self, orders: DataFrame, payments: DataFrame) -> DataFrame:
        """Spark's interval join of the logs."""
        right = payments.select(
            F.col("key").alias("of"), F.col(TIMESTAMP).alias("paid_at"), F.col("price").alias("paid")
        )
        time, span = F.col("paid_at"), F.lit(self.within)
        within = time.between(F.col(TIMESTAMP) - span, F.col(TIMESTAMP) + span)
        left = orders.select("key", "price", "grade", TIMESTAMP)
        found = left.join(right, (F.col("key") == F.col("of")) & within)
        time = F.greatest(TIMESTAMP, time).alias(TIMESTAMP)
        return found.select("key", "price", "grade", "paid", time)

    def near_by_tile(self, orders: DataFrame, payments: DataFrame) -> DataFrame:
        """Spark's join for one key, by tiles of time: else Spark would compare all pairs of records."""
        wide = 2 * self.within // timedelta(microseconds=1)
        tile = F.floor(F.unix_micros(TIMESTAMP) / wide)
        beside = F.explode(F.array(tile - 1, tile, tile + 1))

        def of(tile: Column) -> Column:
            return F.concat_ws(" ", "key", tile)

        return self.near(
            orders.withColumn("key", of(tile)),
            payments.withColumn("tile", beside).withColumn("key", of(F.col("tile"))),
        )


def run(
    spark: SparkSession, rows: int, repeat: int, outputs: Outputs
) -> tuple[list[Result], list[str]]:
    """Times one run that consumes both whole logs, and Spark's joins of the same logs.

    Structured Streaming compares each record with all records of its key in the state, which in one
    batch are all there are. So ten times the records take a hundred times as long.
    """
    many = Site(spark, Path(outputs.fresh("stream-join")), rows, KEYS)
    hot = Site(spark, Path(outputs.fresh("stream-join-hot")), rows, 1)
    few = Site(spark, Path(outputs.fresh("stream-join-few")), rows // 10, KEYS)

    def batch() -> None:
        read = [spark.read.format("delta").load(log) for log in many.logs()]
        told = many.near(*read).write.format("delta").mode("overwrite")
        told.option("overwriteSchema", "true").save(outputs.path("batch"))

    def streamed() -> None:
        target, progress = outputs.fresh("streamed"), outputs.fresh("progress")
        read = [
            spark.readStream.format("delta")
            .load(log)
            .withWatermark(TIMESTAMP, f"{GRACE.seconds} seconds")
            for log in few.logs()
        ]
        told = few.near(*read).writeStream.trigger(availableNow=True)
        told = told.option("checkpointLocation", progress).foreachBatch(
            lambda rows, _: rows.write.format("delta").mode("append").save(target)
        )
        with _settings(spark):
            told.start().awaitTermination()

    contenders: dict[str, Callable[[], None]] = {
        "ours": many.ours,
        "left": many.ours_left,
        BATCH: batch,
        "hot": hot.ours,
        "few": few.ours,
        STREAMED: streamed,
    }
    run = many.fresh(many.paid)
    plan = plan_of(run.operate(run.read()).rows)
    times = take_turns(contenders, repeat)
    found = {site: _digest(site.result()) for site in (many, few, hot)}
    logs = [spark.read.format("delta").load(log) for log in hot.logs()]
    theirs = {
        many: spark.read.format("delta").load(outputs.path("batch")),
        few: spark.read.format("delta").load(outputs.path("streamed")),
        hot: hot.near_by_tile(*logs),
    }
    for site, told in theirs.items():
        if (expected := _digest(told)) != found[site]:
            raise AssertionError(f"stream-stream join: ours has {found[site]}, Spark {expected}")
    if (of_left := _digest(many.matches_of_left())) != found[many]:
        raise AssertionError(
            f"left join of streams: its matches have {of_left}, the inner {found[many]}"
        )
    name, tenth = (f"stream-stream join, {n:,} beside {n:,} records" for n in (rows, rows // 10))
    results = [
        compare(name, rows, times["ours"], BATCH, times[BATCH], 1.3),
        compare(tenth, rows // 10, times["few"], STREAMED, times[STREAMED], 1.0),
        compare(f"{name}, left", rows, times["left"], INNER, times["ours"], None),
        compare(f"{name} of one key", rows, times["hot"], SAME, times["ours"], 1.5),
    ]
    notes = [
        f"stream-stream join: found {found[many][0]:,} matches, {found[few][0]:,} of the tenth, of one "
        f"key {found[hot][0]:,}; plan: {plan}"
    ]
    return results, notes


@contextmanager
def _settings(spark: SparkSession) -> Iterator[None]:
    for name, value in STATE.items():
        spark.conf.set(name, value)
    yield
    for name in STATE:
        spark.conf.unset(name)


def _digest(rows: DataFrame) -> tuple[int, ...]:
    """The number of rows, and the sums of their values."""
    cents = [F.sum((F.col(c) * 100).cast("long")) for c in ("price", "paid")]
    newest = F.sum(F.unix_micros(TIMESTAMP).cast("decimal(38, 0)"))
    return tuple(int(n) for n in rows.agg(F.count(F.lit(1)), *cents, newest).collect()[0])
