"""Three versioned tables between a team's own assets; README.md explains them."""

from datetime import date, timedelta
from typing import Any

import dagster as dg
import pandera.pyspark as pa
import polars as pl
import pyspark.sql.types as T

from examples.warehouse import team, world
from examples.warehouse.team import DAILY, DATA, RAW_PRICES
from vt_dagster import (
    DeltaSource,
    FilesSource,
    SnapshotSource,
    Stream,
    VersionedTable,
    build_definitions,
    build_export,
    versioned_table,
)

YEAR = timedelta(days=365)


class Price(pa.DataFrameModel):
    product: T.StringType
    price: T.DoubleType = pa.Field(ge=0)
    at: T.TimestampType


class Customer(pa.DataFrameModel):
    customer: T.StringType
    tier: T.StringType = pa.Field(isin=world.TIERS)


class Rate(pa.DataFrameModel):
    currency: T.StringType
    rate: T.DoubleType = pa.Field(gt=0)
    at: T.TimestampType


class Order(pa.DataFrameModel):
    product: T.StringType
    order_id: T.StringType
    customer: T.StringType
    quantity: T.LongType
    ordered_at: T.TimestampType


prices = VersionedTable(
    "prices",
    key="product",
    schema=Price,
    timestamp="at",
    history_retention=YEAR,
    source=DeltaSource(str(RAW_PRICES), upstream="raw_prices", start="earliest"),
    description="Prices of products, from the Delta table that `raw_prices` writes.",
    group="tables",
)
customers = VersionedTable(
    "customers",
    key="customer",
    schema=Customer,
    tombstone="tier is null",
    history_retention=YEAR,
    source=SnapshotSource(str(DATA / "landing" / "customers"), dump_time="customers_%Y-%m-%d"),
    description="Customers and their tier, from a full dump a day.",
    group="tables",
)


@versioned_table(
    key="currency",
    schema=Rate,
    timestamp="at",
    history_retention=YEAR,
    partitions_def=DAILY,
    group="tables",
)
def rates(context: dg.AssetExecutionContext) -> pl.DataFrame:
    """Exchange rates, as a function fetches them for a day."""
    return world.rates(date.fromisoformat(context.partition_key))


orders = Stream(
    "orders",
    key="product",
    schema=Order,
    timestamp="ordered_at",
    source=FilesSource(str(DATA / "landing" / "orders")),
    description="Orders, a file a day.",
    group="tables",
)
priced_orders = orders.left_join(
    prices,
    name="priced_orders",
    select=["left.*", "right.price", "right.valid_from as priced_from"],
    grace_period=timedelta(hours=3),
    description="Each order with the price of its time.",
    group="reports",
)

EAGER: Any = dg.AutomationCondition.eager()
for_bi = build_export(
    customers,
    what="versions",
    to=str(DATA / "bi" / "customers"),
    warehouse=str(DATA / "warehouse"),
    group_name="reports",
    automation_condition=EAGER,
)
automation = dg.AutomationConditionSensorDefinition("automation", target=dg.AssetSelection.all())

defs = dg.Definitions.merge(
    team.defs,
    build_definitions(
        priced_orders,
        customers,
        rates,
        warehouse=str(DATA / "warehouse"),
        automation_condition=EAGER,
    ),
    dg.Definitions(assets=[for_bi], sensors=[automation]),
)
