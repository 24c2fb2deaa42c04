"""Tables by name in Spark's catalog: a query by name returns the rows of a read of the asset."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from random import Random
from typing import Any

import dagster as dg
import pandera.pyspark as pa
import pyspark.sql.types as T
import pytest
from pyspark.sql import SparkSession
from typer.testing import CliRunner

from tests.conftest import ROOT
from tests.market import QUIET, Market, materialized, messages, record
from vt_dagster import (
    FilesSource,
    SparkResource,
    Stream,
    Table,
    TopologyError,
    VersionedTable,
    WarehouseResource,
    build_asset,
    build_definitions,
    build_export,
    build_maintenance,
    build_resources,
)
from vt_dagster.cli import app
from vt_dagster.errors import DefinitionsError
from vt_dagster.orchestration.metadata import comments_of
from vt_dagster.runs.replay import swap
from vt_dagster.runs.run import run_once
from vt_dagster.spark.settings import small_run
from vt_dagster.storage.asset_store import AssetStore, stores_of
from vt_dagster.storage.catalog import drop_without_tables, names_of, register

pytestmark = pytest.mark.usefixtures("few_rows")


@pytest.fixture
def bronze(spark: SparkSession) -> Iterator[str]:
    """The name of a schema that does not exist yet; the schema is dropped after the test."""
    yield "bronze"
    spark.sql("DROP SCHEMA IF EXISTS bronze CASCADE")


def require_same(spark: SparkSession, store: AssetStore, schema: str = "bronze") -> None:
    """Requires that each name of an asset has the columns and rows of a read."""
    for what, name in names_of(store.node).items():
        found, expected = spark.table(f"{schema}.{name}"), store.read(what)
        expected = expected.drop("is_final")
        assert found.columns == expected.columns, (name, what)
        assert [f.dataType for f in found.schema] == [f.dataType for f in expected.schema], (name, what)
        with small_run(spark):  # takes less time
            rows = sorted(map(str, found.collect()))
            assert rows == sorted(map(str, expected.collect())), (name, what)
        assert rows, (name, what)


def run(market: Market, schema: str, nodes: list[Any] | None = None) -> dg.ExecuteInProcessResult:
    """Runs assets of a market without checks, in a warehouse whose tables get names in a catalog."""
    where = WarehouseResource(path=str(market.warehouse), catalog=schema)
    return dg.materialize(
        [build_asset(node) for node in nodes or market.nodes],
        resources=build_resources(where, SparkResource(master="local[2]")),
        instance=market.instance,
        run_config=QUIET,
        raise_on_error=False,
    )


def names_in(spark: SparkSession, schema: str = "bronze") -> set[str]:
    return {row["tableName"] for row in spark.sql(f"SHOW TABLES IN {schema}").collect()}


def test_runs_register_names(market: Market, tmp_path: Path, spark: SparkSession, bronze: str) -> None:
    """A run that reports an existing commit also registers the names; a further registration writes
    none."""
    copy = market.copy(tmp_path / "copy")
    copy.instance = dg.DagsterInstance.ephemeral()
    result = run(copy, "spark_catalog.bronze")
    assert result.success, messages(result)
    told = materialized(result, "prices")
    assert told["dagster/table_name"] == "spark_catalog.bronze.prices"
    assert names_in(spark) == {
        *("prices", "prices_versions", "prices_log", "rates", "rates_log", "sales", "priced")
    }
    for node in copy.nodes:
        require_same(spark, copy.store(node))
    found = spark.sql("SELECT k, v FROM spark_catalog.bronze.prices").collect()
    assert sorted(map(tuple, found)) == [("a", "p4"), ("b", "q2")]
    assert {row["v"] for row in spark.sql("SELECT v FROM bronze.prices_versions").collect()} == {
        *("p3", "p4", "q1", "q2")  # without p1, p2 and the deletion, which have expired
    }
    comments = {c.name: c.description for c in spark.catalog.listColumns("bronze.prices_versions")}
    assert comments["valid_to"] == "end of the version, exclusive, UTC; null = current"
    about = {row[0]: row[1] for row in spark.sql("DESCRIBE EXTENDED bronze.prices").collect()}
    assert about["Comment"] == "The current rows of prices."
    copy.land("prices", "3.jsonl", record("a", None, "2 06:00"), record("c", "z1", "3 06:00"))
    written: list[str] = []
    store = AssetStore(str(copy.warehouse), copy.prices, spark, written.append)
    result = run(copy, "spark_catalog.bronze", [copy.prices])
    assert materialized(result, "prices")["records_in"] == 2
    require_same(spark, store)
    register(store, "spark_catalog.bronze", comments_of(copy.prices))
    assert written == []
    # after a changed declaration or a dropped name, the names are registered again
    spark.sql("DROP VIEW bronze.prices_log")
    longer = replace(copy.prices, history_retention=timedelta(hours=30))
    store = AssetStore(str(copy.warehouse), longer, spark, written.append)
    register(store, "spark_catalog.bronze", comments_of(longer))
    assert [line.split(" (")[0] for line in written] == [
        f"prices: registered spark_catalog.bronze.{name}" for name in ("prices_versions", "prices_log")
    ]


def test_names_follow_swap(market: Market, tmp_path: Path, spark: SparkSession, bronze: str) -> None:
    """After a swap, a name selects the rows of the new folder. Names that a plain table does not have
    are dropped when a plain table replaces a versioned one."""
    copy, warehouse = market.copy(tmp_path / "copy"), str(tmp_path / "copy" / "warehouse")
    register(copy.store(copy.prices), bronze)
    shutil.copytree(copy.warehouse / "prices", copy.warehouse / "other")
    copy.land("prices", "3.jsonl", record("c", "z1", "2 06:00"))
    run_once(copy.prices, stores_of(warehouse, spark))
    assert spark.table("bronze.prices").count() == 3
    swap(warehouse, "prices", "other")
    assert spark.table("bronze.prices").count() == 2
    require_same(spark, copy.store(copy.prices))
    swap(warehouse, "prices", "rates")
    plain = Table("prices", key="k", schema=copy.rates.schema, timestamp="at")
    register(AssetStore(warehouse, plain, spark), bronze)
    assert names_in(spark) == {"prices", "prices_log"}
    require_same(spark, AssetStore(warehouse, plain, spark))


def test_maintenance_drops_names_of_removed_tables(
    market: Market, tmp_path: Path, spark: SparkSession, bronze: str
) -> None:
    """Maintenance drops the names of removed tables, and no other names."""
    copy, other = market.copy(tmp_path / "copy"), market.copy(tmp_path / "copy2")
    for node in (copy.prices, copy.rates):
        register(copy.store(node), bronze)
    register(other.store(other.sales), bronze)
    spark.sql("CREATE VIEW bronze.theirs AS SELECT 1 AS x")
    spark.sql("CREATE TEMPORARY VIEW passing AS SELECT 1 AS x")
    where = WarehouseResource(path=str(copy.warehouse), catalog=bronze)
    upkeep = dg.Definitions.merge(
        build_maintenance(), dg.Definitions(resources=build_resources(where, SparkResource()))
    ).resolve_job_def("maintenance")

    shutil.rmtree(other.warehouse / "sales")
    shutil.move(copy.warehouse / "prices", tmp_path / "away")
    for name in ("sales", "priced"):  # they have no names here, and their maintenance takes long
        shutil.rmtree(copy.warehouse / name)
    before = names_in(spark)
    assert upkeep.execute_in_process(run_config=QUIET).success
    gone = {"prices", "prices_versions", "prices_log"}
    assert before - names_in(spark) == gone
    assert drop_without_tables(spark, bronze, str(copy.warehouse)) == []
    require_same(spark, copy.store(copy.rates))
    shutil.move(copy.warehouse, tmp_path / "all")  # like storage that is not mounted
    assert drop_without_tables(spark, bronze, str(copy.warehouse)) == []
    assert names_in(spark) == before - gone
    spark.catalog.dropTempView("passing")


DEFINITIONS = """
from pathlib import Path
from tests.market import Market
from vt_dagster import WarehouseResource, build_definitions

market = Market(Path({root!r}), None)
defs = build_definitions(market.{name}, warehouse=WarehouseResource(path={path!r}, catalog={catalog!r}))
"""


def test_catalog_command_drops_names_of_removed_assets(
    market: Market, tmp_path: Path, spark: SparkSession, bronze: str
) -> None:
    """``vt-dagster catalog`` shows and drops the names of assets that no code location declares."""
    copy = market.copy(tmp_path / "copy")
    for node in copy.nodes:
        register(copy.store(node), bronze)
    files = {}
    for name, schema in (("priced", bronze), ("sales", None)):
        files[name] = tmp_path / f"of_{name}.py"
        about: Any = {"root": str(copy.root), "path": str(copy.warehouse), "catalog": schema}
        files[name].write_text(DEFINITIONS.format(name=name, **about))

    def told(*words: str) -> list[str]:
        done = CliRunner().invoke(app, ["catalog", *words], catch_exceptions=False)
        assert done.exit_code == 0
        return done.stdout.splitlines()

    of, every = f"names of assets in {copy.warehouse}", names_in(spark)
    shown = told("--file", str(files["priced"]))
    assert shown == [
        "bronze.rates: its asset rates is not in the definitions",
        "bronze.rates_log: its asset rates is not in the definitions",
        f"bronze: 7 {of}, 2 of them of removed assets; drop these: --drop",
    ]
    assert names_in(spark) == every
    assert told("--file", str(files["priced"]), "--drop") == [
        "bronze.rates: dropped, its asset rates is not in the definitions",
        "bronze.rates_log: dropped, its asset rates is not in the definitions",
        f"bronze: 7 {of}, 2 of them dropped",
    ]
    assert names_in(spark) == every - {"rates", "rates_log"}
    assert (copy.warehouse / "rates" / "log").is_dir()
    assert told("--file", str(files["priced"]), "--drop") == [f"bronze: 5 {of}, 0 of them dropped"]
    with pytest.raises(DefinitionsError, match=r"expected a WarehouseResource\(catalog=…\) in"):
        told("--file", str(files["sales"]))


SCHEMA = T.StructType(
    [
        T.StructField("k", T.StringType()),
        T.StructField("tier", T.StringType()),
        T.StructField("n", T.IntegerType()),
        T.StructField("until", T.TimestampType()),
        T.StructField("at", T.TimestampType()),
    ]
)
RENAMED = T.StructType(
    [
        SCHEMA["k"],
        T.StructField("level", T.StringType()),
        T.StructField("n", T.LongType()),
        SCHEMA["until"],
        SCHEMA["at"],
        T.StructField("note", T.StringType()),
    ]
)


@pytest.mark.parametrize(
    ("on", "until"),
    [
        ("tier", "until"),
        *(
            pytest.param(*one, marks=pytest.mark.endurance)
            for one in ((None, None), (None, "until"), ("tier", None))
        ),
    ],
)
def test_names_honor_options_and_new_columns(
    tmp_path: Path, spark: SparkSession, bronze: str, on: str | None, until: str | None
) -> None:
    """Names return the rows of a read with repeated versions, versions with an end (``valid_until``),
    expired versions and deletions; and then with a renamed column, a wider type and a new column."""
    random, landing = Random(f"{on} {until}"), tmp_path / "landing"
    landing.mkdir()

    def time(minute: int) -> str:
        return f"2024-01-{1 + minute // 1440:02d}T{minute // 60 % 24:02d}:{minute % 60:02d}:00Z"

    def land(day: int, level: str) -> None:
        lines = []
        for _ in range(40):
            at = random.randrange(day * 600, day * 600 + 900)
            values: dict[str, Any] = {"k": random.choice("abcdef"), "at": time(at)}
            if random.random() < 0.85:
                values |= {level: random.choice(["low", "high"]), "n": random.randrange(3)}
                values["until"] = random.choice([None, time(at + random.randrange(1, 400))])
            lines.append(json.dumps(values))
        (landing / f"{day}.jsonl").write_text("\n".join(lines) + "\n")

    def store(after: bool = False) -> AssetStore:
        level = "level" if after else "tier"
        table = VersionedTable(
            "it_s",
            key="k",
            key_prefix="shop",
            schema=RENAMED if after else SCHEMA,
            timestamp="at",
            tombstone=f"{level} is null",
            history_retention=timedelta(hours=9),
            source=FilesSource(str(landing)),
            new_version_on=None if on is None else [level, *([until] if until else [])],
            valid_until=until,
            renamed={"tier": "level"} if after else {},
            description="It's a 'table' with a \\ in it.",
        )
        return AssetStore(str(tmp_path / "it's" / "warehouse"), table, spark)

    land(0, "tier")
    run_once(store().node, stores_of(store().warehouse, spark))
    register(store(), bronze)
    require_same(spark, store())
    assert names_in(spark) == {"shop_it_s", "shop_it_s_versions", "shop_it_s_log"}
    land(1, "level")
    now = store(after=True)
    run_once(now.node, stores_of(now.warehouse, spark))
    register(now, bronze)
    require_same(spark, now)


def test_column_types_known_after_run(tmp_path: Path, spark: SparkSession) -> None:
    """The type of a computed column is known after a run. Dagster's panel of columns also has the key
    and the checks of the schema."""

    class Price(pa.DataFrameModel):
        product: T.StringType
        price: T.DoubleType = pa.Field(ge=0, nullable=True)
        at: T.TimestampType

    landing = tmp_path / "landing"
    landing.mkdir()
    (landing / "1.jsonl").write_text('{"product": "a", "price": 2.5, "at": "2024-01-01T00:00:00Z"}\n')
    about: Any = {"key": "product", "schema": Price, "timestamp": "at"}
    prices = VersionedTable(
        "prices", history_retention=timedelta(days=1), source=FilesSource(str(landing)), **about
    )
    doubled = prices.map_values("product", "price * 2 as twice", "at", name="doubled")
    export = build_export(doubled, to=str(tmp_path / "export"), with_columns=["is_tombstone"])
    assets = [build_asset(prices), build_asset(doubled), export]
    before = assets[1].metadata_by_key[dg.AssetKey("doubled")]["dagster/column_schema"]
    assert {c.name: c.type for c in before.columns}["twice"] == "decided by Spark"
    result = dg.materialize(
        assets, resources=build_resources(str(tmp_path / "w"), SparkResource()), run_config=QUIET
    )
    for name in ("doubled", "doubled_export"):
        after = materialized(result, name)["dagster/column_schema"]
        assert {c.name: c.type for c in after.columns}["twice"] == "double", name
    panel = materialized(result, "prices")["dagster/column_schema"]
    told = {c.name: c.constraints for c in panel.columns}
    assert (told["product"].nullable, told["product"].other) == (False, ["key"])
    assert (told["price"].nullable, told["price"].other) == (True, ["greater_than_or_equal_to(0)"])
    assert panel.constraints.other == ["one row for each product, valid_from"]


def test_foreign_names_are_refused(
    market: Market, tmp_path: Path, spark: SparkSession, bronze: str
) -> None:
    copy = market.copy(tmp_path / "copy")
    copy.instance = dg.DagsterInstance.ephemeral()
    spark.sql("CREATE SCHEMA bronze")
    spark.sql("CREATE VIEW bronze.rates AS SELECT 1 AS x")
    result = run(copy, bronze, [copy.rates])
    assert not result.success
    assert "expected bronze.`rates` to be a new name in the catalog" in messages(result)
    assert "got one of another writer. Batch 1 is committed. Give" in messages(result)
    assert [c.name for c in spark.table("bronze.rates").schema.fields] == ["x"]
    spark.sql("DROP VIEW bronze.rates")
    assert run(copy, bronze, [copy.rates]).success  # the commit exists, and is reported now
    require_same(spark, copy.store(copy.rates))
    other = market.copy(tmp_path / "other")
    other.instance = dg.DagsterInstance.ephemeral()
    said = messages(run(other, bronze, [other.rates]))
    assert f"got one of the asset in {copy.warehouse / 'rates'}" in said
    said = messages(run(copy, "lake.bronze", [copy.sales]))
    assert "expected the catalog of the Spark session to" in said
    assert "needs a catalog with views" in said


def test_refused_when_definitions_load() -> None:
    with pytest.raises(TopologyError, match="expected catalog to be a schema such as 'bronze'"):
        WarehouseResource(path="w", catalog="a.b.c")
    about: Any = {"key": "k", "schema": T.StructType([SCHEMA["k"], SCHEMA["at"]]), "timestamp": "at"}
    rates = Table("rates", source=FilesSource("a"), **about)
    log = Stream("Rates_log", source=FilesSource("b"), **about)
    where = WarehouseResource(path="w", catalog="bronze")
    with pytest.raises(TopologyError, match="got 'Rates_log', which rates has too"):
        build_definitions(rates, log, warehouse=where)
    assert build_definitions(rates, log, warehouse=WarehouseResource(path="w"))


PERSISTENT = """
import sys
from pathlib import Path
import dagster as dg
from tests.market import QUIET, Market, messages
from vt_dagster import SparkResource, WarehouseResource, build_asset, build_resources

root, home, what = sys.argv[1:]
spark = SparkResource(master="local[2]", spark_config={
    "spark.sql.catalogImplementation": "hive",
    "spark.sql.warehouse.dir": f"{home}/warehouse",
    "spark.hadoop.javax.jdo.option.ConnectionURL":
        f"jdbc:derby:;databaseName={home}/metastore;create=true",
    "spark.driver.extraJavaOptions": f"-Dderby.system.home={home}",
})
market = Market(Path(root), None)
if what == "run":
    where = WarehouseResource(path=str(market.warehouse), catalog="bronze")
    result = dg.materialize(
        [build_asset(market.prices), build_asset(market.priced)],
        resources=build_resources(where, spark),
        run_config=QUIET, raise_on_error=False, selection=["prices"],
    )
    print(messages(result) or "done")
else:
    session = spark.spark_session
    print(sorted(tuple(row) for row in session.sql("SELECT k, v FROM bronze.prices").collect()))
    columns = session.catalog.listColumns("bronze.prices")
    print([c.description for c in columns if c.name == "timestamp"])
"""


@pytest.mark.endurance
@pytest.mark.jvm
def test_names_in_persistent_metastore(market: Market, tmp_path: Path) -> None:
    """With a Hive metastore in a directory, another process selects by name."""
    copy = market.copy(tmp_path / "copy")

    def process(what: str) -> str:
        done = subprocess.run(
            [sys.executable, "-c", PERSISTENT, str(copy.root), str(tmp_path / "hive"), what],
            **{"capture_output": True, "text": True, "timeout": 300, "cwd": ROOT},
        )
        return done.stdout if done.returncode == 0 else done.stdout + done.stderr

    assert process("run") == "done\n"
    assert process("select").splitlines() == [
        "[('a', 'p4'), ('b', 'q2')]",
        "['valid time of the record, UTC']",
    ]
