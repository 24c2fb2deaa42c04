"""A program that runs a chain of five operators over a million records, without Dagster. Tests kill it.

``python -m tests.storage.chain ROOT`` consumes the landed files one after another and runs every asset
after each file. The program ends when nothing is left to do.
"""

from __future__ import annotations

import sys
from datetime import timedelta
from pathlib import Path

from pyspark.sql import SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import LongType, StringType, StructField, StructType, TimestampType

from vt_dagster.columns import OLD, RECORDED_AT
from vt_dagster.runs.run import run_once
from vt_dagster.sources.files_source import FilesSource
from vt_dagster.spark.session import build_session
from vt_dagster.storage.asset_store import AssetStore, stores_of
from vt_dagster.topology.model import Stream, Table, VersionedTable, topological
from vt_dagster.topology.operators import UntilWindowCloses
from vt_dagster.topology.windows import TumblingWindow

RECORDS, FILES = 1_000_000, 2
SCHEMA = StructType(
    [
        StructField("vehicle", LongType()),
        StructField("region", StringType()),
        StructField("load", LongType()),
        StructField("timestamp", TimestampType()),
    ]
)


class Chain:
    """vehicles (versioned) -> filter -> aggregate by region -> stream -> hourly windows -> final."""

    def __init__(self, root: Path) -> None:
        self.warehouse, self.landing = str(root / "warehouse"), root / "vehicles"
        vehicles = VersionedTable(
            "vehicles",
            key="vehicle",
            schema=SCHEMA,
            tombstone="load is null",
            history_retention=timedelta(hours=6),
            source=FilesSource(str(self.landing), format="parquet", pattern="*.parquet"),
        )
        moving = vehicles.filter("load > 0", name="moving")
        regions = moving.group_by("region").aggregate(
            {"vehicles": "count(*)", "load": "sum(load)"}, name="regions"
        )
        changes = regions.to_stream(name="changes")
        hourly = (
            changes.group_by()
            .windowed_by(TumblingWindow(timedelta(hours=1), timedelta(minutes=30)))
            .aggregate({"changes": "count(*)", "most": "max(load)"}, name="hourly")
        )
        self.nodes = topological([hourly.suppress(UntilWindowCloses(), name="final")])

    def land(self, spark: SparkSession, records: int = RECORDS) -> None:
        """Writes this number of records into two files: out of order by up to hours, some deletions."""
        self.landing.mkdir(parents=True)
        for i in range(FILES):
            size = records // FILES
            ids = spark.range(i * size, (i + 1) * size, numPartitions=1)
            mixed = F.xxhash64("id")
            seconds = F.col("id") / 4 - F.pmod(F.shiftright(mixed, 7), F.lit(2000))
            load = F.pmod(F.shiftright(mixed, 20), F.lit(50))
            rows = ids.select(
                F.pmod(mixed, F.lit(5000)).alias("vehicle"),
                F.concat(F.lit("r"), F.pmod(F.shiftright(mixed, 30), F.lit(40))).alias("region"),
                F.when(load < 48, load).alias("load"),
                F.timestamp_seconds(seconds + 1_600_000_000).alias("timestamp"),
            )
            part = self.landing / f"part{i}"
            rows.write.parquet(str(part))
            next(part.glob("*.parquet")).rename(self.landing / f"{i}.parquet")

    def run(self, spark: SparkSession) -> None:
        """Runs every asset on each file, where that is not done yet."""
        for i in range(FILES):
            for node in self.nodes:
                asked = {} if node.source is None else {"only": [f"{i}.parquet"]}
                run_once(node, stores_of(self.warehouse, spark), **asked)

    def tables(self, spark: SparkSession) -> dict[str, object]:
        """The progress of each asset (batch, offsets, totals), and the digests of its log and view."""
        found: dict[str, object] = {}
        for node in self.nodes:
            store = AssetStore(self.warehouse, node, spark)
            head = store.catch_up().head
            assert head is not None
            commit = head.commit
            found[node.name] = [commit.batch, commit.inputs, commit.next_offset, commit.totals]
            found[f"{node.name} log"] = digest(store, "log")
            if isinstance(node, Table):
                found[f"{node.name} view"] = view_digest(store)
        return found


def digest(store: AssetStore, what: str) -> tuple[int, int]:
    """The number of rows, and the sum of their hashes."""
    rows = store.read(what).drop(RECORDED_AT)  # differs in each run
    names = [F.col(c) if c != OLD else F.to_json(c) for c in sorted(rows.columns)]
    total = rows.agg(F.count(F.lit(1)), F.sum(F.xxhash64(*names).cast("decimal(38,0)"))).first()
    assert total is not None
    return total[0], int(total[1] or 0)


def view_digest(store: AssetStore) -> tuple[int, int]:
    """The digest of a table's view."""
    return digest(store, "versions" if isinstance(store.node, VersionedTable) else "current")


def session() -> SparkSession:
    conf = {"spark.sql.shuffle.partitions": "2", "spark.driver.memory": "2g"}
    return build_session("chain", master="local[2]", conf=conf)


def node_of(chain: Chain, name: str) -> Stream:
    return next(n for n in chain.nodes if n.name == name)


if __name__ == "__main__":
    Chain(Path(sys.argv[1])).run(session())
    print("done")
