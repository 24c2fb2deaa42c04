"""The team's own definitions: a Spark asset that writes a Delta table each day, as dbt would, an asset
that reports in Polars, a ``spark`` resource and an executor."""

import os
from datetime import date, datetime, timezone
from pathlib import Path

import dagster as dg
import polars as pl
from pyspark.sql import SparkSession

from examples.warehouse.world import DAYS, FIRST, prices
from vt_dagster.spark.server import resolve_remote
from vt_dagster.spark.session import build_session

DATA = Path(os.environ.get("EXAMPLE_DATA", "data/examples/warehouse"))
DAILY = dg.DailyPartitionsDefinition(
    start_date=FIRST.isoformat(), end_date=date.fromordinal(FIRST.toordinal() + DAYS).isoformat()
)
RAW_PRICES = DATA / "raw" / "prices"


class TeamSpark(dg.ConfigurableResource[None]):
    """The team's own Spark session, however it is built."""

    master: str = "local[2]"

    def session(self) -> SparkSession:
        return build_session("team", remote=resolve_remote(None), master=self.master)


@dg.asset(partitions_def=DAILY, group_name="staging", kinds={"spark", "deltalake"})
def raw_prices(context: dg.AssetExecutionContext, spark: TeamSpark) -> None:
    """Prices as the source system has them: each day's rows are added, once."""
    session, table = spark.session(), f"delta.`{RAW_PRICES.absolute()}`"
    rows = prices(date.fromisoformat(context.partition_key))
    session.createDataFrame(rows, "product string, price double, at timestamp").createOrReplaceTempView(
        "day"
    )
    session.sql(
        f"create table if not exists {table} (product string, price double, at timestamp) using delta"
    )
    session.sql(
        f"merge into {table} raw using day on raw.product = day.product and raw.at = day.at "
        "when not matched then insert *"
    )


AS_OF_END = {"vt_dagster/as_of": "partition_end"}


@dg.asset(
    partitions_def=DAILY,
    group_name="reports",
    ins={name: dg.AssetIn(metadata=AS_OF_END) for name in ("customers", "prices", "rates")},
    kinds={"polars"},
)
def daily_report(
    context: dg.AssetExecutionContext,
    customers: pl.DataFrame,
    prices: pl.DataFrame,
    rates: pl.LazyFrame,
) -> dg.MaterializeResult[None]:
    """What was true at the end of a day: customers by tier, the dearest price, the rates."""
    day = context.partition_key
    tiers = dict(customers.group_by("tier").len().sort("tier").iter_rows())
    report = {
        "customers": len(customers),
        **tiers,
        "highest_price": prices["price"].max(),
        **dict(rates.select("currency", "rate").sort("currency").collect().iter_rows()),
    }
    target = DATA / "reports" / f"{day}.json"
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(pl.DataFrame([report]).write_json())
    made_at = datetime.now(timezone.utc).isoformat(timespec="seconds")
    return dg.MaterializeResult(metadata={"customers": len(customers), "made_at": made_at})


week = dg.define_asset_job("week", selection=["raw_prices", "rates"])
reports = dg.define_asset_job("reports", selection=["daily_report"])

defs = dg.Definitions(
    assets=[raw_prices, daily_report],
    jobs=[week, reports],
    resources={"spark": TeamSpark()},
    executor=dg.multiprocess_executor.configured({"max_concurrent": 2}),
)
