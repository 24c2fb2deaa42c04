"""One topology with every kind of source, operator and asset. Each asset runs in its own process.

``python -m tests.full_topology ROOT [REMOTE|local [KIND ...]]`` runs each asset alone three times: for
the first time, with new records, and without new records. Each run is a fork of a process that has
imported the modules and has no Spark session. The run prints a line of JSON: its ``Outcome``.

Paths are relative to a working directory that differs from that of a Spark Connect server.
"""

import json
import logging
import os
import random
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from datetime import datetime, timedelta, timezone
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import dagster as dg
import pandera.pyspark as pandera
import pyarrow as pa
import pyarrow.parquet as pq
from deltalake import write_deltalake
from pyspark.sql.types import IntegerType, StringType, StructField, StructType, TimestampType

from tests.market import QUIET, messages
from vt_dagster import (
    Aggregator,
    AssetSource,
    DeltaSource,
    FeatureView,
    FilesSource,
    HoppingWindow,
    Materialized,
    SessionWindow,
    SlidingWindow,
    SnapshotSource,
    SparkResource,
    Stream,
    Table,
    TumblingWindow,
    UntilTimeLimit,
    UntilWindowCloses,
    VersionedTable,
    WarehouseResource,
    build_asset,
    build_checks,
    build_export,
    build_resources,
    build_training_set,
    read,
    versioned_table,
)
from vt_dagster.topology.model import topological

EPOCH = datetime(2020, 1, 1, tzinfo=timezone.utc)
MINUTE, LONG = timedelta(minutes=1), timedelta(days=900)
SCHEMA = StructType(
    [
        StructField("k", StringType()),
        StructField("g", StringType()),
        StructField("n", IntegerType()),
        StructField("timestamp", TimestampType()),
    ]
)
ABOUT: dict[str, Any] = {"key": "k", "schema": SCHEMA}
OF_TABLES: dict[str, Any] = {**ABOUT, "tombstone": "n is null", "history_retention": LONG}
JOINED = ["left.k", "left.g as lg", "left.n as ln", "right.g as rg", "right.n as rn"]
COUNTED = {"count": "count(*)", "sum": "sum(n)"}
WITHIN: dict[str, Any] = {"before": MINUTE, "after": 2 * MINUTE, "grace": 2 * MINUTE}
WINDOWS: dict[str, Any] = {
    "tumbling": TumblingWindow(4 * MINUTE, grace=MINUTE),
    "hopping": HoppingWindow(4 * MINUTE, advance=2 * MINUTE, grace=MINUTE),
    "session": SessionWindow(MINUTE, grace=MINUTE),
    "sliding": SlidingWindow(3 * MINUTE, grace=MINUTE),
}
WAREHOUSE, ROUNDS, RECORDS = "data/warehouse", 3, 12
LOADED = {"delivered": ["upstream"], "mine": ["versions"], "mine_now": ["versions"]}
"""The upstream assets that Dagster loads for an asset."""
NOTHING_NEW = 3
"""The number of the run before which no record lands."""
ALWAYS = ("upstream", "mine", "mine_now", "returned", "collected")
"""Assets that have new records in each run."""
CLIENT = "pyspark.sql.connect.logging"
"""The logger of Spark Connect's client."""
NAMED = ("guarded", "opened", "versions")
"""Assets whose tables get names, in the schema ``named`` of Spark's catalog."""


class Guarded(pandera.DataFrameModel):
    """``SCHEMA`` with a check that some records of each delivery fail."""

    k: StringType = pandera.Field(nullable=True)
    g: StringType = pandera.Field(isin=["a", "b"])
    n: IntegerType = pandera.Field(nullable=True)
    timestamp: TimestampType


@dataclass
class Outcome:
    """The outcome of one run of one asset, alone in its process.

    Args:
        run: 1, 2 or 3.
        did: ``committed``, ``nothing new``, or ``failed``.
        said: the errors.
    """

    asset: str
    run: int
    did: str
    seconds: float
    said: str = ""


# ------------------------------------------------------------------------------------ the topology


def sources() -> dict[str, Stream]:
    """Streams and tables with one source of each kind, by name."""

    def files(name: str, **more: Any) -> FilesSource:
        return FilesSource(f"data/landing/{name}", **more)

    @versioned_table(**OF_TABLES)
    def returned() -> pa.Table | None:
        at = Path("data/landing/returned")
        found = sorted(at.glob("*.parquet")) if at.is_dir() else []
        return pq.read_table(found[-1]) if found else None

    @versioned_table(**OF_TABLES)
    def collected(context: dg.AssetExecutionContext) -> Any:
        """Returns a DataFrame of Spark."""
        spark = context.resources.vt_dagster_spark.spark_session
        return spark.createDataFrame([("a", "b", _round(), EPOCH + _round() * MINUTE)], SCHEMA)

    found: list[Stream] = [
        VersionedTable("versions", **OF_TABLES, partitions=2, source=files("versions")),
        VersionedTable("others", **OF_TABLES, source=files("others", format="csv")),
        VersionedTable(
            "parts", **OF_TABLES, ignore_null_updates=["g"], tie_break="n", source=files("parts")
        ),
        Table("plain", **ABOUT, tombstone="n is null", source=files("plain", format="parquet")),
        Stream("clicks", **ABOUT, null_key="keep", source=files("clicks")),
        Stream("views", **ABOUT, source=files("views", recorded_at="file_time")),
        Stream(
            "guarded",
            key="k",
            schema=Guarded,
            on_contract_break="quarantine",
            source=files("guarded", max_bad_share=0.9),
        ),
        Stream("once", **ABOUT, unique_by=["k", "n"], within=4 * MINUTE, source=files("once")),
        Table("dumped", **ABOUT, source=SnapshotSource("data/landing/dumped", dump_time="timestamp")),
        Stream("appended", **ABOUT, source=DeltaSource("data/theirs", max_clock_skew=LONG)),
        VersionedTable(
            "compared",
            **OF_TABLES,
            new_version_on=["n"],
            source=DeltaSource("data/theirs_whole", mode="snapshots", max_shrink=1.0),
        ),
        VersionedTable(
            "begun",
            **OF_TABLES,
            start=SnapshotSource("data/landing/first", dump_time="timestamp"),
            source=files("versions"),
        ),
        Stream("delivered", **ABOUT, source=AssetSource("upstream")),
        returned,
        collected,
    ]
    return {node.name: node for node in found}


def operators(of: Mapping[str, Any]) -> list[Stream]:
    """One result of each operator, or one for each kind of input if the inputs make a difference."""
    versions, others, plain = of["versions"], of["others"], of["plain"]
    clicks, views = of["clicks"], of["views"]
    windowed = {
        name: clicks.group_by().windowed_by(window).aggregate(COUNTED, name=name)
        for name, window in WINDOWS.items()
    }
    grouped = versions.group_by("g").aggregate(COUNTED, name="grouped")
    return [
        versions.filter("n % 2 = 0", name="filtered"),
        plain.filter_not("n % 2 = 0", name="filtered_plain"),
        plain.filter("n > 2", name="refiltered", materialized=Materialized(LONG)),
        versions.map_values("n + 1 as m", name="mapped"),
        clicks.flat_map_values("array(n, n + 1)", column="n", name="flat"),
        clicks.select_key("g", name="rekeyed"),
        clicks.merge(views, name="merged"),
        clicks.to_table(name="of_clicks"),
        versions.to_stream(name="changes"),
        grouped,
        plain.group_by("g").aggregate(
            Aggregator(
                adder=lambda row, so_far: {"sum": (so_far["sum"] or 0) + (row["n"] or 0)},
                subtractor=lambda row, so_far: {"sum": (so_far["sum"] or 0) - (row["n"] or 0)},
                initializer=lambda: {"sum": 0},
                schema=StructType([StructField("sum", IntegerType())]),
            ),
            name="own_aggregate",
        ),
        clicks.group_by("g").aggregate(COUNTED, name="running"),
        *windowed.values(),
        windowed["tumbling"].suppress(UntilWindowCloses(), name="final"),
        grouped.suppress(UntilTimeLimit(2 * MINUTE), name="limited"),
        clicks.join(versions, name="priced", select=JOINED),
        clicks.left_join(versions, name="waited", select=JOINED, grace_period=2 * MINUTE),
        clicks.left_join(plain, name="looked_up", select=JOINED),
        clicks.left_join(versions, name="strict", select=JOINED, at="before", as_known="when_recorded"),
        clicks.left_join(
            versions,
            name="nearest",
            select=JOINED,
            at="nearest",
            max_age=2 * MINUTE,
            grace_period=2 * MINUTE,
        ),
        clicks.left_join(
            versions,
            name="ahead",
            select=JOINED,
            at="after",
            max_age=2 * MINUTE,
            grace_period=2 * MINUTE,
        ),
        clicks.left_join(
            versions,
            name="ahead_corrected",
            select=JOINED,
            at="at_or_after",
            max_age=2 * MINUTE,
            corrected_for=LONG,
        ),
        clicks.join(versions, name="opened", select=JOINED, before_first="first_version"),
        clicks.join(versions, name="corrected", select=JOINED, corrected_for=LONG),
        versions.outer_join(plain, name="outer", select=JOINED),
        versions.join(others, name="inner", select=JOINED),
        versions.left_join(others, name="complete", select=JOINED, history="complete"),
        versions.join(plain, foreign_key="g", name="refers", select=JOINED),
        clicks.outer_join(views, name="either", select=JOINED, **WITHIN),
        clicks.outer_join(views, name="amended", select=JOINED, within=MINUTE, corrected_for=LONG),
    ]


class Everything:
    """The assets by name, upstream assets first, and the nodes that they are built from."""

    def __init__(self) -> None:
        of = sources()
        self.nodes = {node.name: node for node in topological([*of.values(), *operators(of)])}
        versions, plain, clicks = (self.nodes[n] for n in ("versions", "plain", "clicks"))
        features = [FeatureView(versions, prefix="v_", as_known="now")]  # type: ignore[arg-type]
        self.assets: dict[str, Any] = {
            "upstream": upstream,
            **{name: build_asset(node) for name, node in self.nodes.items()},
            "current_export": build_export(versions, to="data/lake/current", name="current_export"),
            "versions_export": build_export(
                versions, "versions", to="data/lake/versions", name="versions_export"
            ),
            "log_export": build_export(clicks, to="data/lake/log", name="log_export"),
            "plain_export": build_export(plain, to="data/lake/plain", name="plain_export"),
            "training": build_training_set(clicks, features, name="training", to="data/lake/training"),
            "now_export": build_export(versions, to="data/lake/now", name="now_export", as_of="now"),
            "iceberg_export": build_export(
                versions,
                to="data/lake/iceberg",
                name="iceberg_export",
                format="iceberg",
                iceberg_catalog="lake",
                catalog_table="bi.versions",
            ),
            "mine": mine,
            "mine_now": mine_now,
        }
        self.checks = {name: build_checks(node) for name, node in self.nodes.items()}

    def made_of(self, names: list[str]) -> set[str]:
        """The named assets and all assets upstream of them."""
        found: set[str] = set()
        for name in names:
            of = {"training": ["clicks", "versions"], **LOADED}
            exports = {"plain_export": ["plain"], "log_export": ["clicks"]}
            before = of.get(name) or exports.get(name) or []
            before = ["versions"] if not before and name.endswith("_export") else before
            node = self.nodes.get(name)
            before = [*before, *(up.name for up in (node.inputs if node is not None else ()))]
            found |= {name, *self.made_of(before)}
        return found

    def resources(self, name: str, remote: str | None) -> dict[str, Any]:
        spark = SparkResource(master="local[2]", remote=remote)
        keeps = {"io_manager": dg.FilesystemIOManager(base_dir="data/values")}
        where = WarehouseResource(path=WAREHOUSE, catalog="named" if name in NAMED else None)
        return {**build_resources(where, spark), **keeps}

    def run(self, name: str, remote: str | None, instance: dg.DagsterInstance, checked: bool) -> Any:
        """Runs one asset, with its checks if ``checked``, and no other asset."""
        made = [self.assets[n] for n in (name, *LOADED.get(name, ()))]
        checks = [self.checks[name]] if name in self.checks and checked else []
        return dg.materialize(
            [*made, *checks],
            selection=dg.AssetSelection.assets(name),
            resources=self.resources(name, remote),
            instance=instance,
            run_config=QUIET,
            raise_on_error=False,
        )


def _round() -> int:
    return int(Path("data/round").read_text())


@dg.asset
def upstream() -> pa.Table:
    """An asset of another team, whose materializations a stream consumes."""
    return table(_records(random.Random(_round()), _round()))


@dg.asset(ins={"versions": dg.AssetIn(input_manager_key="vt_dagster_tables")})
def mine(context: dg.AssetExecutionContext, versions: Any) -> None:
    """A user's own asset that reads a table with Spark."""
    context.add_output_metadata({"rows": versions.count()})


@dg.asset(
    ins={
        "versions": dg.AssetIn(
            input_manager_key="vt_dagster_tables", metadata={"vt_dagster/as_of": "now"}
        )
    }
)
def mine_now(context: dg.AssetExecutionContext, versions: Any) -> None:
    """A user's own asset that reads the rows that are valid at the clock's time."""
    context.add_output_metadata({"rows": versions.count()})


# ------------------------------------------------------------------------------------ what lands


def _records(chance: random.Random, place: int) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for i in range(RECORDS):
        at = EPOCH + timedelta(minutes=8 * place, seconds=30 * chance.randrange(24))
        n = None if chance.random() < 0.2 else 100 * place + i
        found.append({"k": chance.choice("abc"), "g": chance.choice("abc"), "n": n, "timestamp": at})
    return found


def table(records: list[dict[str, Any]]) -> pa.Table:
    """The records as an Arrow table."""
    types = [("k", pa.string()), ("g", pa.string()), ("n", pa.int32())]
    return pa.Table.from_pylist(
        records, schema=pa.schema([*types, ("timestamp", pa.timestamp("us", "UTC"))])
    )


def land(place: int) -> None:
    """Writes the new records of a run to each place that a source reads."""
    root = Path("data/landing")
    names = ("versions", "others", "parts", "plain", "clicks", "views", "returned", "once", "guarded")
    for i, name in enumerate(names):
        (root / name).mkdir(parents=True, exist_ok=True)
        records = _records(random.Random(10 * place + i), place)
        records += records[:3] if name == "once" else []
        if name in ("plain", "returned"):
            pq.write_table(table(records), root / name / f"{place}.parquet")
        elif name == "others":
            lines = ["k,g,n,timestamp"]
            for r in records:
                number = "" if r["n"] is None else r["n"]
                lines.append(f"{r['k']},{r['g']},{number},{r['timestamp'].isoformat()}")
            (root / name / f"{place}.csv").write_text("\n".join(lines) + "\n")
        else:
            told = [{**r, "timestamp": r["timestamp"].isoformat()} for r in records]
            text = "".join(json.dumps(r) + "\n" for r in told)
            (root / name / f"{place}.jsonl").write_text(text)
    whole = {r["k"]: r for r in _records(random.Random(place), place) if r["n"] is not None}
    for name in ("dumped", "first")[: 1 if place > 1 else 2]:
        (root / name).mkdir(parents=True, exist_ok=True)
        pq.write_table(table([*whole.values()]), root / name / f"{place}.parquet")
    write_deltalake("data/theirs", table([*whole.values()]), mode="append")
    write_deltalake("data/theirs_whole", table([*whole.values()]), mode="overwrite")
    Path("data/round").write_text(str(place))


# ------------------------------------------------------------------------------------ the processes


def alone(work: Callable[[], Outcome | None]) -> int:
    """Forks a process that does the work and prints its outcome; returns the id of the process."""
    child = os.fork()
    if child:
        return child
    try:
        told = work()
    except BaseException:
        told = Outcome("?", 0, "failed", 0.0, traceback.format_exc())
    if told is not None:
        os.write(1, (json.dumps(asdict(told)) + "\n").encode())
    os._exit(0)


def new_home() -> None:
    """Creates the tables in which Dagster stores its runs."""
    settings = {"telemetry": {"enabled": False}}  # as for users: without settings Dagster has no logs
    with dg.DagsterInstance.local_temp("data/home", overrides=settings) as instance:
        instance.get_runs(limit=1)


def outcome(everything: Everything, name: str, run: int, remote: str | None, checked: bool) -> Outcome:
    """Runs one asset, in this process."""
    from pyspark.sql.utils import is_remote

    started = time.monotonic()
    settings = {"telemetry": {"enabled": False}}  # as for users: without settings Dagster has no logs
    with dg.DagsterInstance.local_temp("data/home", overrides=settings) as instance:
        result = everything.run(name, remote, instance, checked)
        made = {event.asset_key for event in result.get_asset_materialization_events()}
    seconds = round(time.monotonic() - started, 2)
    wrong = messages(result)
    failed = [e.check_name for e in result.get_asset_check_evaluations() if not e.passed]
    if not result.success or failed:
        return Outcome(name, run, "failed", seconds, wrong or f"checks {failed}")
    if dg.AssetKey(name) in made:
        talks = is_remote() and logging.getLogger(CLIENT).isEnabledFor(logging.ERROR)
        wrong = f"{CLIENT} is enabled: it logs refused calls that a run handles" if talks else ""
        return Outcome(
            name, run, "committed", seconds, wrong or (_misnamed(name) if name in NAMED else "")
        )
    idle = is_remote() or _has_spark()
    return Outcome(name, run, "nothing new", seconds, "it started Spark" if idle else "")


def _misnamed(name: str) -> str:
    """How the rows of the table by name in Spark's catalog differ from a ``read``; empty = equal."""
    from pyspark.sql import SparkSession

    found = SparkSession.active().table(f"named.{name}").select("k", "timestamp").collect()
    expected = read(name, warehouse=WAREHOUSE).select(["k", "timestamp"]).to_pylist()
    told = [(row["k"], row["timestamp"].timestamp()) for row in (*found, *expected)]
    by_name, by_read = sorted(told[: len(found)]), sorted(told[len(found) :])
    return "" if by_name and by_name == by_read else f"by its name {by_name}, by a read {by_read}"


def _has_spark() -> bool:
    from pyspark import SparkContext

    return SparkContext._active_spark_context is not None  # pyright: ignore[reportPrivateUsage]


def levels(everything: Everything) -> list[list[str]]:
    """The assets in levels: all inputs of an asset are in earlier levels."""
    place: dict[str, int] = {"upstream": 0}
    for name in everything.assets:
        node = everything.nodes.get(name)
        before = [up.name for up in node.inputs] if node is not None and node.operator else []
        if node is not None and not before:
            before = ["upstream"]
        place[name] = place.get(name, 1 + max((place[n] for n in before), default=8))
    return [[n for n, at in place.items() if at == level] for level in sorted({*place.values()})]


def new_catalog() -> None:
    """Creates the catalog of Iceberg tables, and a namespace in it."""
    from pyiceberg.catalog import load_catalog

    load_catalog("lake").create_namespace("bi")


def main(root: str, remote: str | None, beside: int, kinds: list[str]) -> None:
    """Runs all assets, or those of ``kinds`` and their upstream assets, in at most ``beside`` processes
    at a time. With ``kinds``, the first run of an asset has no checks; later runs have them."""
    os.chdir(root)
    # PyIceberg reads these variables at its import, in the processes below.
    os.environ["PYICEBERG_CATALOG__LAKE__TYPE"] = "sql"
    os.environ["PYICEBERG_CATALOG__LAKE__URI"] = f"sqlite:///{Path.cwd()}/data/catalog.db"
    if remote is not None:
        import_module("pyspark.sql.connect.session")  # once, not in each of the processes below
    everything = Everything()
    wanted = everything.made_of(kinds) if kinds else {*everything.assets}
    Path("data/home").mkdir(parents=True)
    os.waitpid(alone(new_home), 0)  # two processes that create Dagster's tables at once fail
    os.waitpid(alone(new_catalog), 0)
    for run in range(1, ROUNDS + 1):
        if run != NOTHING_NEW:
            os.waitpid(alone(lambda run=run: land(run)), 0)  # deltalake's threads do not survive a fork
        for level in levels(everything):
            running: set[int] = set()
            for name in level:
                always = name in ALWAYS
                if name not in wanted or (run == NOTHING_NEW and always):
                    continue
                if len(running) >= beside:
                    running.discard(os.wait()[0])
                checked = not kinds or run > 1
                work = partial(outcome, everything, name, run, remote, checked)
                running.add(alone(work))
            while running:
                running.discard(os.wait()[0])


if __name__ == "__main__":
    address = sys.argv[2] if len(sys.argv) > 2 else "local"
    beside = int(os.environ.get("BESIDE", "2"))
    main(sys.argv[1], None if address == "local" else address, beside, sys.argv[3:])
