"""A user's own assets read tables as DataFrames."""

from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Optional

import dagster as dg
import duckdb
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
from pyspark.sql import DataFrame, SparkSession

from tests.market import QUIET, Market, materialized, messages, record, run
from vt_dagster import SparkResource, build_asset, build_resources, ops
from vt_dagster.errors import ContractError
from vt_dagster.storage import commit_log
from vt_dagster.topology.durations import in_utc, parse_time

pytestmark = pytest.mark.usefixtures("few_rows")


def run_reading_asset(market: Market, upstream: str, metadata: dict[str, Any] | None = None) -> Any:
    """Materializes an asset that reads a table; returns the run's result and the rows it read."""
    rows: list[Any] = []

    @dg.asset(ins={"table": dg.AssetIn(upstream, metadata=metadata)})
    def mine(table: DataFrame) -> None:
        rows.extend(table.collect())

    every = [build_asset(node) for node in market.nodes]
    return run([*every, mine], market.warehouse, selection=[mine]), rows


@pytest.mark.parametrize(
    ("upstream", "metadata", "values"),
    [
        ("prices", None, {"p4", "q2"}),
        ("prices", {"vt_dagster/read": "current"}, {"p4", "q2"}),
        ("prices", {"vt_dagster/read": "versions"}, {"p3", "p4", "q1", "q2"}),
        ("prices", {"vt_dagster/as_of": "2024-01-01T11:59:59Z"}, {"p3", "q1"}),
        ("prices", {"vt_dagster/as_of": "2024-01-01T12:00:00"}, {"p3", "q2"}),
        ("prices", {"vt_dagster/as_of": "2024-01-01T13:00:00+01:00"}, {"p3", "q2"}),
        ("prices", {"vt_dagster/as_of": dg.MetadataValue.text("2024-01-01T12:00:00")}, {"p3", "q2"}),
        ("rates", None, {"r2", "r3"}),
        ("sales", None, {"s1", "s2", "s3", "s4, late", "s5"}),
        ("priced", {"vt_dagster/read": "log"}, {"s1", "s2", "s3", "s4, late"}),
    ],
)
def test_asset_input_rows(
    market: Market, upstream: str, metadata: dict[str, Any] | None, values: set[str]
) -> None:
    result, rows = run_reading_asset(market, upstream, metadata)
    assert result.success, messages(result)
    told = materialized(result, "mine")["vt_dagster/reads"]["table"]
    assert (told["asset"], sum(told["next_offset"].values()) > 0) == (upstream, True)
    found = {r["v"] for r in rows}
    assert (found - {None} if upstream == "prices" else found) == values


def test_as_of_now_is_recorded_in_metadata(market: Market, monkeypatch: pytest.MonkeyPatch) -> None:
    now = parse_time("2024-01-01T11:59:59.500000Z")
    monkeypatch.setattr("vt_dagster.topology.durations.clock", lambda: now)
    result, rows = run_reading_asset(market, "prices", {"vt_dagster/as_of": "now"})
    assert result.success, messages(result)
    assert {r["v"] for r in rows} == {"p3", "q1"}
    told = materialized(result, "mine")["vt_dagster/reads"]["table"]
    assert told["as_of"] == "2024-01-01T11:59:59.500000Z"


@pytest.mark.parametrize(
    "kind",
    [
        *(pd.DataFrame, pl.DataFrame, pl.LazyFrame, pa.Table, duckdb.DuckDBPyRelation),
        Optional[pl.DataFrame],  # noqa: UP045
    ],
)
def test_input_type_follows_annotation(market: Market, kind: Any) -> None:
    got: list[Any] = []

    def body(prices: Any) -> None:
        assert isinstance(prices, kind)
        made = prices.collect() if isinstance(prices, pl.LazyFrame) else prices
        if isinstance(made, pa.Table):
            rows = made.column("v").to_pylist()
        elif isinstance(made, duckdb.DuckDBPyRelation):
            rows = [row[0] for row in made.select("v").fetchall()]
        else:
            rows = list(made["v"])
        got.extend(rows)

    body.__annotations__ = {"prices": kind, "return": None}  # like annotations in a user's module
    of_then = dg.AssetIn(metadata={"vt_dagster/as_of": "2024-01-01T12:00:00"})
    mine = dg.asset(name="mine", ins={"prices": of_then})(body)

    # The run must not connect to Spark: no server listens at this address.
    resources = build_resources(str(market.warehouse), SparkResource(remote="sc://localhost:1"))
    every = [build_asset(node) for node in market.nodes]
    result = dg.materialize([*every, mine], selection=[mine], resources=resources, raise_on_error=False)
    assert result.success, messages(result)
    assert set(got) == {"p3", "q2"}


def test_read_from_other_code_location(market: Market) -> None:
    """A code location with only the spec of the table's asset, not its definition, reads the table."""
    got: list[Any] = []

    def body(prices: Any) -> None:
        got.extend(prices["v"])

    body.__annotations__ = {"prices": pl.DataFrame, "return": None}
    defs = dg.Definitions(
        [dg.AssetSpec("prices").with_io_manager_key("vt_dagster_tables"), dg.asset(name="mine")(body)],
        resources=build_resources(str(market.warehouse)),
    )
    job = defs.resolve_implicit_global_asset_job_def()
    with dg.DagsterInstance.ephemeral() as instance:
        assert job.execute_in_process(instance=instance, run_config=QUIET).success
    assert set(got) - {None} == {"p4", "q2"}


DAYS = ["2024-01-01", "2024-01-02"]
BY_PARTITION = dg.AssetIn("prices", metadata={"vt_dagster/as_of": "partition_end"})


def daily(got: dict[str, set[tuple[str, str]]], **about: Any) -> Any:
    """An asset with daily partitions, which reads prices as of the end of its partition."""
    days = dg.DailyPartitionsDefinition("2024-01-01", **about)

    @dg.asset(partitions_def=days, ins={"prices": BY_PARTITION})
    def mine(context: dg.AssetExecutionContext, prices: pl.DataFrame) -> None:
        got[context.partition_key] = {(row["k"], row["v"]) for row in prices.iter_rows(named=True)}

    return mine


def of_partition(market: Market, asset: Any, day: str | None, **more: Any) -> Any:
    resources = build_resources(str(market.warehouse), SparkResource(master="local[2]"))
    every, quiet = [build_asset(node) for node in market.nodes], {"run_config": QUIET, **more}
    return dg.materialize(
        [*every, asset], selection=[asset], partition_key=day, resources=resources, **quiet
    )


def test_backfill_reads_as_of_partition_end(spark: SparkSession, tmp_path: Path) -> None:
    """A record at midnight belongs to the day that begins."""
    at_the_time: dict[str, set[tuple[str, str]]] = {}
    market = Market(tmp_path, spark)
    market.prices = replace(market.prices, history_retention=timedelta(days=30))
    for number, day in enumerate(DAYS, 1):
        midnight, noon = record("a", f"a{number}", f"{number} 00:00"), f"{number} 12:00"
        market.land("prices", f"{number}.jsonl", midnight, record("b", f"b{number}", noon))
        market.run([market.prices])
        assert of_partition(market, daily(at_the_time), day).success
    assert at_the_time == {day: {("a", f"a{n}"), ("b", f"b{n}")} for n, day in enumerate(DAYS, 1)}
    afterwards: dict[str, set[tuple[str, str]]] = {}
    for day in reversed(DAYS):
        assert of_partition(market, daily(afterwards), day).success
    assert afterwards == at_the_time
    in_paris: dict[str, set[tuple[str, str]]] = {}  # the day ends at 23:00 UTC
    assert of_partition(market, daily(in_paris, timezone="Europe/Paris"), DAYS[0]).success
    assert in_paris == {DAYS[0]: {("a", "a1"), ("b", "b1")}}
    west: dict[str, set[tuple[str, str]]] = {}  # the day ends at 05:00 UTC of the next day
    assert of_partition(market, daily(west, timezone="America/New_York"), DAYS[0]).success
    assert west == {DAYS[0]: {("a", "a2"), ("b", "b1")}}


def test_non_time_partition_is_refused(market: Market) -> None:
    names = dg.StaticPartitionsDefinition(["x"])

    @dg.asset(partitions_def=names, ins={"prices": BY_PARTITION})
    def mine(prices: pl.DataFrame) -> None: ...

    result = run([*map(build_asset, market.nodes), mine], market.warehouse, selection=[mine])
    assert "prices: expected mine, which reads it as of 'partition_end', to be partitioned by time" in (
        messages(result)
    )
    result, _ = run_reading_asset(market, "prices", {"vt_dagster/as_of": "partition_end"})
    assert "got: it runs without a partition. Give it a partitions_def" in messages(result)
    defs = dg.Definitions(
        [*map(build_asset, market.nodes)], resources=build_resources(str(market.warehouse))
    )
    with dg.DagsterInstance.ephemeral() as instance:
        loader = defs.get_asset_value_loader(instance)
        with pytest.raises(ContractError) as raised:
            loader.load_asset_value("prices", input_definition_metadata=BY_PARTITION.metadata)
    assert "got: it is loaded outside of a run; set a time to read" in str(raised.value)


def test_as_known_at_metadata(market: Market) -> None:
    """``as_known_at`` works with and without Spark; the end of a day before the first commit is an
    error."""
    first, second = commit_log.commits(str(market.warehouse / "prices"))
    got = dict[str, set[Any]]()

    def asking(name: str, kind: Any, known: int) -> Any:
        about = {"vt_dagster/as_of": "2024-01-01T13:00:00Z", "vt_dagster/as_known_at": in_utc(known)}

        def body(prices: Any) -> None:
            got[name] = {r["v"] for r in prices.collect()} if kind is DataFrame else {*prices["v"]}

        body.__annotations__ = {"prices": kind, "return": None}
        return dg.asset(name=name, ins={"prices": dg.AssetIn(metadata=about)})(body)

    mine = [
        asking("spark_then", DataFrame, first.recorded_at),
        asking("then", pl.DataFrame, second.recorded_at - 1),
        asking("now", pl.DataFrame, second.recorded_at),
    ]
    every = [build_asset(node) for node in market.nodes]
    result = run([*every, *mine], market.warehouse, selection=mine)
    assert result.success, messages(result)
    assert got == {"spark_then": {"p3", "q1"}, "then": {"p3", "q1"}, "now": {"p3", "q2"}}
    known = dg.AssetIn(metadata={"vt_dagster/as_known_at": "partition_end"})

    @dg.asset(partitions_def=dg.DailyPartitionsDefinition("2024-01-01"), ins={"prices": known})
    def of_a_day(prices: pl.DataFrame) -> None: ...

    refused = of_partition(market, of_a_day, "2024-01-02", raise_on_error=False)
    wanted = "expected as_known_at at or after the first known commit, got 2024-01-02T23:59:59.999999Z"
    assert wanted in messages(refused)


def test_log_of_a_table_has_every_record(market: Market) -> None:
    result, rows = run_reading_asset(market, "prices", {"vt_dagster/read": "log"})
    assert result.success, messages(result)
    assert sorted(r["offset"] for r in rows) == list(range(8))


@pytest.mark.parametrize(
    ("upstream", "metadata", "said"),
    [
        ("sales", {"vt_dagster/read": "versions"}, "sales is a Stream: expected one of ['log']"),
        ("rates", {"vt_dagster/read": "versions"}, "rates is a Table: expected one of"),
        ("rates", {"vt_dagster/as_of": "2024-01-01"}, "as_of needs a VersionedTable"),
        ("prices", {"vt_dagster/read": "latest"}, "got 'latest'"),
        ("prices", {"vt_dagster/as_of": "yesterday"}, "expected a time like"),
        (
            "prices",
            {"vt_dagster/as_known_at": 5},
            "'vt_dagster/as_known_at' in an input's metadata to be",
        ),
        ("prices", {"vt_dagster/partial": "False"}, "to be True or False, got 'False'"),
    ],
)
def test_invalid_metadata_is_refused(
    market: Market, upstream: str, metadata: dict[str, Any], said: str
) -> None:
    result, _ = run_reading_asset(market, upstream, metadata)
    assert not result.success
    assert said in messages(result)


def test_input_before_first_materialization(market: Market, tmp_path: Path) -> None:
    result, _ = run_reading_asset(Market(tmp_path, market.spark), "prices")
    assert not result.success
    assert "expected an asset 'prices' in the warehouse" in messages(result)
    assert "materialize it first" in messages(result)


def test_output_to_io_manager_is_refused(market: Market, tmp_path: Path) -> None:
    @dg.asset(io_manager_key=ops.TABLES)
    def mine() -> Any:
        return market.spark.range(1)

    result = run([mine], tmp_path)
    assert not result.success
    assert "mine: this IO manager only reads tables of vt_dagster" in messages(result)
    assert "io_manager_key" in messages(result)
