"""``python -m tests.memory_child MASTER FOLDER``: a shop's runs with a driver and executors of 1 GB.

FOLDER has the landed files. Prints counts and sums of the tables at the end as JSON.
"""

from __future__ import annotations

import json
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

from pyspark.sql import Column, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import LongType, StructField, StructType, TimestampType

from vt_dagster.runs.run import run_once
from vt_dagster.sources.files_source import FilesSource
from vt_dagster.spark.session import build_session
from vt_dagster.storage.asset_store import AssetStore, stores_of
from vt_dagster.topology.model import Stream, VersionedTable
from vt_dagster.topology.operators import UntilWindowCloses
from vt_dagster.topology.windows import (
    HoppingWindow,
    SessionWindow,
    SlidingWindow,
    TumblingWindow,
)

START = 1_600_000_000
FILES = 4
NEAR = timedelta(seconds=500)
"""Twice this time has a thousand offers of a product."""
SETTINGS = {
    "spark.driver.memory": "1g",
    "spark.executor.memory": "1g",
    "spark.sql.shuffle.partitions": "8",
}


def _schema(value: str) -> StructType:
    types = {"product": LongType(), value: LongType(), "at": TimestampType()}
    return StructType([StructField(name, kind) for name, kind in types.items()])


class Shop:
    """``prices`` (versioned), ``orders`` (stream), ``priced``: each order with the price of its time.

    A product has a new price each second: the number of that second. So each order has the expected
    price in its column ``due``.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.warehouse = folder, str(folder / "warehouse")
        self.prices = VersionedTable(
            "prices",
            key="product",
            schema=_schema("price"),
            timestamp="at",
            history_retention=timedelta(days=3650),
            source=FilesSource(str(folder / "prices"), pattern="*.txt"),
        )
        self.orders = Stream(
            "orders",
            key="product",
            schema=_schema("due"),
            timestamp="at",
            source=FilesSource(str(folder / "orders"), pattern="*.txt"),
        )
        self.priced = self.orders.left_join(
            self.prices, name="priced", select=["left.*", "right.price"]
        )
        self.offers = Stream(
            "offers",
            key="product",
            schema=_schema("price"),
            timestamp="at",
            source=FilesSource(str(folder / "prices"), pattern="*.txt"),
        )
        self.near = self.orders.join(
            self.offers,
            within=NEAR,
            grace=timedelta(hours=1),
            name="near",
            select=["left.*", "right.price"],
        )

    @property
    def of_each_operator(self) -> list[Stream]:
        """A result of each operator that processes all rows of a key together."""
        counts, day, hour = {"n": "count(*)"}, timedelta(days=1), timedelta(hours=1)
        grouped, chosen = self.orders.group_by(), ["left.*", "right.price as other"]
        daily = grouped.windowed_by(TumblingWindow(day, hour)).aggregate(counts, name="daily")
        by_product = self.prices.group_by("product as same")
        return [
            daily,
            daily.suppress(UntilWindowCloses(), name="closed"),
            grouped.windowed_by(HoppingWindow(day, day / 2, hour)).aggregate(counts, name="hopping"),
            grouped.windowed_by(SessionWindow(hour, hour)).aggregate(counts, name="session"),
            grouped.windowed_by(SlidingWindow(timedelta(seconds=1), hour)).aggregate(
                counts, name="sliding"
            ),
            grouped.aggregate(counts, name="counted"),
            by_product.aggregate({"n": "sum(price)"}, name="summed"),
            by_product.aggregate({"n": "sum(price)"}, name="summed_once", emit="per_run"),
            self.prices.join(self.prices, name="paired", select=chosen),
            self.prices.join(self.prices, foreign_key="product", name="foreign", select=chosen),
            self.prices.filter("price % 2 = 0", name="even"),
        ]

    def land(self, spark: SparkSession, prices: int, orders: int, products: int) -> None:
        """Writes the files. Prices come in pairs, the later one first; orders are up to 600 s late."""
        seconds = prices // products
        assert seconds % 2 == 0, "prices come in pairs"
        price = F.expr(f"(id div {products}) ^ 1")
        self._write(spark, "prices", prices, F.col("id") % products, "price", price)
        late = F.pmod(F.xxhash64("id"), F.lit(600))
        due = F.greatest(F.expr(f"id * {seconds} div {orders}") - late, F.lit(0))
        product = F.pmod(F.xxhash64(F.lit(1), "id"), F.lit(products))
        self._write(spark, "orders", orders, product, "due", due)

    def _write(
        self, spark: SparkSession, name: str, rows: int, product: Column, field: str, value: Column
    ) -> None:
        at = F.timestamp_seconds(value + START)
        row = F.struct(product.alias("product"), value.alias(field), at.alias("at"))
        lines = spark.range(0, rows, numPartitions=FILES).select(F.to_json(row))
        lines.write.text(str(self.folder / name))

    def run(self, spark: SparkSession) -> dict[str, int]:
        """Runs each asset once; returns counts and sums of the tables."""
        for node in (self.prices, self.orders, self.priced):
            run_once(node, stores_of(self.warehouse, spark))
        versions = AssetStore(self.warehouse, self.prices, spark).read("versions")
        joined = AssetStore(self.warehouse, self.priced, spark).read()
        wrong = ~F.col("price").eqNullSafe(F.col("due"))
        found = joined.agg(F.count(F.lit(1)), F.count_if(wrong), F.sum("price")).collect()[0]
        ends = versions.agg(
            F.count(F.lit(1)), F.count_if(F.col("valid_to").isNull()), F.sum("price")
        ).collect()[0]
        names = ["joined", "wrong", "joined_sum", "versions", "current", "versions_sum"]
        return dict(zip(names, [*found, *ends], strict=True))

    def run_near(self, spark: SparkSession) -> list[int]:
        """Runs both streams and their join once; returns the number of matches and their sums."""
        for node in (self.orders, self.offers, self.near):
            run_once(node, stores_of(self.warehouse, spark))
        found = AssetStore(self.warehouse, self.near, spark).read()
        return [*found.agg(F.count(F.lit(1)), F.sum("price"), F.sum("due")).collect()[0]]

    def run_operators(self, spark: SparkSession) -> dict[str, list[int]]:
        """Runs each operator once; returns the row counts of its log and its table, and a sum."""
        for node in (self.prices, self.orders):
            run_once(node, stores_of(self.warehouse, spark))
        found: dict[str, list[int]] = {}
        for node in self.of_each_operator:
            start = time.monotonic()
            run_once(node, stores_of(self.warehouse, spark))
            print(f"{node.name}: {time.monotonic() - start:.0f} s", file=sys.stderr, flush=True)
            store = AssetStore(self.warehouse, node, spark)
            value = "n" if "n" in node.schema.names else "price"
            current = store.read().agg(F.count(F.lit(1)), F.sum(value)).collect()[0]
            found[node.name] = [store.read("log").count(), *current]
        return found


if __name__ == "__main__":
    session = build_session("memory", master=sys.argv[1], conf=SETTINGS)
    jvm: Any = session.sparkContext._jvm
    assert jvm.java.lang.Runtime.getRuntime().maxMemory() <= 2**30, "the driver has more than 1 GB"
    shop = Shop(Path(sys.argv[2]))
    runs = {"operators": shop.run_operators, "near": shop.run_near}
    print(json.dumps(runs.get(sys.argv[-1], shop.run)(session)))
