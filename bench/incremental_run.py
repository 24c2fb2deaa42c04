"""A small run on a large table, with commit and view, compared with a bare append."""

from __future__ import annotations

import shutil
import time
from collections import defaultdict
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import generate
from measure import Outputs, Result, compare, take_turns
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from vt_dagster.runs.run import run_once
from vt_dagster.sources.files_source import FilesSource
from vt_dagster.spark.settings import look_up_of_few, small_run
from vt_dagster.storage.asset_store import AssetStore
from vt_dagster.storage.commit_log import Commit
from vt_dagster.storage.spark_reader import Head, Snapshot
from vt_dagster.topology.model import VersionedTable

KEYS = 10_000
APPEND = "Delta append of the same JSON lines"
FLOOR = "the same lines joined with their keys' current rows, sorted, appended: by Spark alone"
LOOK_UP = "the current rows' keys alone read, and looked up among the run's"
FIRST_FLOOR = "the same lines sorted by key once, written as log and as view: by Spark alone"
TARGETS = {1_000_000: 4.0}
FIRST_TARGET = 4.0
GROWTH = 1.3
PARTS = ("log commit", "view update", "the rest")


class TimedStore(AssetStore):
    """A store that measures the time of its two writes."""

    def __init__(self, warehouse: str, node: VersionedTable, spark: SparkSession) -> None:
        super().__init__(warehouse, node, spark)
        self.spent: defaultdict[str, float] = defaultdict(float)

    def commit(
        self, rows: DataFrame, commit: Commit, count: int, before: Callable[[], None] | None = None
    ) -> Head:
        start = time.perf_counter()
        try:
            return super().commit(rows, commit, count, before)
        finally:
            self.spent["log commit"] += time.perf_counter() - start

    def catch_up(
        self,
        head: Head | None = None,
        now: bool = False,
        written: DataFrame | None = None,
        most_keys: int | None = None,
    ) -> Snapshot:
        start = time.perf_counter()
        try:
            return super().catch_up(head, now, written, most_keys)
        finally:
            self.spent["view update"] += time.perf_counter() - start


class Site:
    """A table of some size with its landing directory, and a Delta table to append to.

    Args:
        a_year: the number of records that span a year of event time; None = that of the first file.
        keys: the number of keys; None = one for ten versions, at most ``KEYS``.

    :meth:`fill` writes the first file to both tables.
    """

    def __init__(
        self,
        spark: SparkSession,
        versions: int,
        new: int,
        folder: Path,
        schema: Any = generate.RECORD,
        history_retention: timedelta = timedelta(days=3650),
        a_year: int | None = None,
        keys: int | None = None,
    ) -> None:
        self.spark, self.versions, self.new = spark, versions, new
        self.a_year = a_year or versions
        self.keys = keys or min(KEYS, versions // 10)
        self.landing, self.appended = folder / "landing", str(folder / "appended")
        self.landing.mkdir(parents=True)
        self.source = FilesSource(str(self.landing))
        self.table = VersionedTable(
            "prices",
            key="key",
            schema=schema,
            timestamp="at",
            partitions=generate.PARTITIONS,
            history_retention=history_retention,
            source=self.source,
        )
        self.warehouse = str(folder / "warehouse")
        self.delivered = 0
        self.file = self.deliver(versions)

    def fill(self) -> Site:
        """Writes the first file to both tables."""
        self.run()
        self.append()
        return self

    def deliver(self, rows: int) -> Path:
        """Lands the next file."""
        lines = generate.json_lines(self.spark, self.delivered, rows, self.a_year, self.keys)
        self.file = self.landing / f"{self.delivered:010}.jsonl"
        shutil.copy(lines, self.file)
        self.delivered += rows
        return self.file

    def run(self) -> dict[str, float]:
        """Runs the asset once, as the Dagster ops do."""
        start = time.perf_counter()
        store = self.store()
        receipt = run_once(self.table, lambda _: store, run_id=self.run_id)
        assert receipt.commit is not None
        writes = sum(store.spent.values())
        return {**store.spent, "the rest": time.perf_counter() - start - writes}

    @property
    def run_id(self) -> str:
        """The id of the run that consumes the newest file."""
        return f"run-{self.delivered}"

    def store(self) -> TimedStore:
        return TimedStore(self.warehouse, self.table, self.spark)

    def append(self) -> None:
        """Appends the newest file, as a user without versioned tables would."""
        self.newest().coalesce(1).write.format("delta").mode("append").save(self.appended)

    def newest(self) -> DataFrame:
        """The records of the newest file."""
        return self.spark.read.schema(generate.RECORD).json(str(self.file))

    def current(self) -> DataFrame:
        """The current rows of the newest file's keys."""
        rows = self.store().current(self.newest().select("key"))
        assert rows is not None
        return rows

    def floor(self) -> None:
        """The least that a run needs Spark for: no outcomes, gate, quarantine, state or commit."""
        with small_run(self.spark, True):
            before = self.current().select("key", F.struct("price", "grade").alias("old"))
            rows = self.newest().join(before, "key", "left").coalesce(1)
            rows = rows.sortWithinPartitions("key", "at")
            rows.write.format("delta").mode("append").save(f"{self.appended}-with-rows-before")

    def look_up(self) -> None:
        with small_run(self.spark, True), look_up_of_few(self.spark):
            self.current().select("key").write.format("noop").mode("overwrite").save()

    def first_floor(self) -> None:
        """The least that a first run needs Spark for."""
        rows = self.newest().repartition(generate.PARTITIONS, "key").sortWithinPartitions("key", "at")
        rows.persist()
        for name in ("log", "view"):
            rows.write.format("delta").mode("overwrite").save(f"{self.appended}-as-{name}")
        rows.unpersist()

    def check(self) -> None:
        """Requires that every record is a version: none was late, none has expired."""
        store = self.store()
        rows, appended = (
            store.view_at(store.snapshot()).count(),
            self.spark.read.format("delta").load(self.appended),
        )
        if not rows == appended.count() == self.delivered:
            raise AssertionError(
                f"incremental run: {self.delivered} records, {rows} versions, "
                f"{appended.count()} rows appended"
            )


def run(
    spark: SparkSession, sizes: tuple[int, ...], new: int, repeat: int, outputs: Outputs
) -> tuple[list[Result], list[str]]:
    """Times runs of ``new`` records on tables of some sizes."""
    results: list[Result] = []
    notes: list[str] = []
    medians: dict[int, list[float]] = {}
    for size in sizes:
        site = Site(spark, size, new, Path(outputs.fresh(f"table-{size}"))).fill()
        prepare(site, repeat + 1)

        def ours(site: Site = site) -> dict[str, float]:
            site.deliver(new)
            return site.run()

        times = take_turns({"ours": ours, APPEND: site.append, FLOOR: site.floor}, repeat)
        site.check()
        name = f"run of {new:,} new records on {size:,} versions"
        target = TARGETS.get(size)
        results.append(compare(name, new, times["ours"], APPEND, times[APPEND], target))
        for part in PARTS:
            spent = times[f"ours: {part}"]
            results.append(compare(f"{name}: {part}", new, spent, APPEND, times[APPEND], None))
        results.append(compare(name, new, times["ours"], FLOOR, times[FLOOR], None))
        medians[size] = times["ours"]
        notes.append(f"{name}: all {site.delivered:,} records are versions")
    small, large = sizes[0], sizes[-1]
    if small != large:
        name, peer = f"run of {new:,} on {large:,} versions", f"the same on {small:,}"
        results.append(compare(name, new, medians[large], peer, medians[small], GROWTH))
    return results, notes


def many_keys(
    spark: SparkSession, keys: tuple[int, ...], new: int, repeat: int, outputs: Outputs
) -> tuple[list[Result], list[str]]:
    """Times runs of ``new`` records on tables with few and many keys; a key has one or two versions."""
    sites: dict[str, Site] = {}
    for count in keys:
        folder = Path(outputs.fresh(f"keys-{count}"))
        sites[f"{count:,} keys"] = Site(spark, count, new, folder, keys=count).fill()
        prepare(sites[f"{count:,} keys"], repeat + 1)

    def ours(site: Site) -> dict[str, float]:
        site.deliver(new)
        return site.run()

    few, *_, many = sites
    ways = {name: partial(ours, site) for name, site in sites.items()}
    times = take_turns({**ways, LOOK_UP: sites[many].look_up}, repeat)
    name = f"run of {new:,} on {many}"
    return [
        compare(name, new, times[many], f"the same on {few}", times[few], GROWTH),
        compare(name, new, times[many], LOOK_UP, times[LOOK_UP], None),
    ], []


def first_run(
    spark: SparkSession, records: int, repeat: int, outputs: Outputs
) -> tuple[list[Result], list[str]]:
    """Times the first run of a table, of many JSON lines, each time in a new warehouse."""
    sites = [
        Site(spark, records, 0, Path(outputs.fresh(f"first-{turn}"))) for turn in range(repeat + 1)
    ]
    turns = {name: iter(sites) for name in ("ours", APPEND, FIRST_FLOOR)}
    times = take_turns(
        {
            "ours": lambda: next(turns["ours"]).run(),
            APPEND: lambda: next(turns[APPEND]).append(),
            FIRST_FLOOR: lambda: next(turns[FIRST_FLOOR]).first_floor(),
        },
        repeat,
    )
    sites[0].check()
    name = f"first run of a table, {records:,} JSON lines"
    return [
        compare(name, records, times["ours"], APPEND, times[APPEND], FIRST_TARGET),
        compare(name, records, times["ours"], FIRST_FLOOR, times[FIRST_FLOOR], None),
    ], [f"{name}: all {sites[0].delivered:,} records are versions"]


def prepare(site: Site, files: int) -> None:
    """Generates the next files, so that their generation is not timed."""
    for turn in range(files):
        first = site.delivered + turn * site.new
        generate.json_lines(site.spark, first, site.new, site.a_year, site.keys)
