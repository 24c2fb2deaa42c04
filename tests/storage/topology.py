"""A small topology, whose assets run without Dagster, for tests of the commit protocol."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession
from pyspark.sql.types import IntegerType, StringType, StructField, StructType, TimestampType

from vt_dagster.columns import RECORDED_AT
from vt_dagster.runs.run import Receipt, run_once
from vt_dagster.sources.files_source import FilesSource
from vt_dagster.spark.settings import small_run
from vt_dagster.storage.asset_store import AssetStore, stores_of
from vt_dagster.topology.model import Stream, VersionedTable

SCHEMA = StructType(
    [
        StructField("k", StringType()),
        StructField("n", IntegerType()),
        StructField("timestamp", TimestampType()),
    ]
)
EPOCH = datetime(2020, 1, 1, tzinfo=timezone.utc)


class Topology:
    """``rates`` (versioned, 10 minutes), ``orders`` (stream), ``priced`` (left join, 2 minutes),
    ``corrected`` (the same, corrected for 5 minutes), ``counts`` of orders by key, ``payments``
    (stream), and ``amended`` (orders with payments within half a minute, corrected for 15, outer)."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.warehouse = str(root / "warehouse")
        self.rates = VersionedTable(
            "rates",
            key="k",
            schema=SCHEMA,
            tombstone="n is null",
            history_retention=timedelta(minutes=10),
            source=FilesSource(str(root / "rates"), max_bad_share=1.0),
        )
        self.orders = Stream("orders", key="k", schema=SCHEMA, source=FilesSource(str(root / "orders")))
        self.priced = self.orders.left_join(
            self.rates,
            name="priced",
            select=["left.*", "right.n as rate"],
            grace_period=timedelta(minutes=2),
        )
        self.corrected = self.orders.left_join(
            self.rates,
            name="corrected",
            select=["left.*", "right.n as rate"],
            corrected_for=timedelta(minutes=5),
        )
        self.counts = self.orders.group_by("k").count(name="counts")
        self.payments = Stream(
            "payments", key="k", schema=SCHEMA, source=FilesSource(str(root / "payments"))
        )
        self.amended = self.orders.outer_join(
            self.payments,
            name="amended",
            select=["left.*", "right.n as payment"],
            within=timedelta(seconds=30),
            corrected_for=timedelta(minutes=15),
        )

    @property
    def nodes(self) -> list[Stream]:
        first = [self.rates, self.orders, self.priced, self.corrected, self.counts]
        return [*first, self.payments, self.amended]

    def land(
        self, name: str, file: str, records: Sequence[tuple[str | None, int | None, float]]
    ) -> None:
        """Writes one file of (key, number, minutes) records."""
        directory = self.root / name
        directory.mkdir(parents=True, exist_ok=True)
        lines = [
            json.dumps({"k": k, "n": n, "timestamp": (EPOCH + timedelta(minutes=t)).isoformat()})
            for k, n, t in records
        ]
        (directory / file).write_text("\n".join(lines) + "\n")

    def store(self, name: str, spark: SparkSession) -> AssetStore:
        return AssetStore(self.warehouse, getattr(self, name), spark)

    def run(self, name: str, spark: SparkSession) -> Receipt:
        """Runs an asset once."""
        return run_once(getattr(self, name), stores_of(self.warehouse, spark))

    def tables(self, name: str, spark: SparkSession) -> Mapping[str, list[Any]]:
        """All tables of an asset and the progress of its last commit, in a comparable form."""
        with small_run(spark):
            return self._tables(name, spark)

    def _tables(self, name: str, spark: SparkSession) -> Mapping[str, list[Any]]:
        store = self.store(name, spark)
        store.catch_up()
        found = {"log": _rows(store.read("log"))}
        if name == "rates":
            found["view"] = _rows(store.read("versions"))
        if name in ("corrected", "counts", "amended"):
            found["view"] = _rows(store.read())
        head = store.head()
        assert head is not None
        state = store.state(head)
        found["state"] = [] if state is None else _rows(state)
        if name != "priced":
            quarantine = store.quarantine()
            found["quarantine"] = [] if quarantine is None else _rows(quarantine)
        commit = head.commit
        found["commit"] = [
            commit.batch,
            commit.inputs,
            commit.next_offset,
            commit.stream_time,
            commit.watermarks,
            commit.totals,
        ]
        return found


def _rows(frame: Any) -> list[Any]:
    frame = frame.drop(RECORDED_AT)  # differs in each run
    return sorted(frame.select(*sorted(frame.columns)).collect(), key=repr)


def land_first(topology: Topology) -> None:
    """Lands the files of the runs before the killed run."""
    topology.land("rates", "1.jsonl", [("a", 1, 0), ("b", 1, 1), ("a", 2, 5)])
    topology.land("orders", "1.jsonl", [("a", 1, 1), ("b", 2, 4)])


def land_second(topology: Topology) -> None:
    """Lands the files of the killed run: records out of order, late, replaced or bad, and deletions."""
    topology.land(
        "rates",
        "2.jsonl",
        [("a", 3, 3), ("b", None, 12), ("a", 9, 1), ("c", 1, 14), (None, 1, 13), ("c", 2, 14)],
    )
    topology.land(
        "orders", "2.jsonl", [("a", 3, 4), ("b", 4, 13), ("a", 5, 0), ("c", 6, 15), ("z", 7, 13)]
    )
