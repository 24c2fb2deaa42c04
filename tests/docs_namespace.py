"""Names that the pages of the documentation use without declaring them: a shop's orders, prices …"""

# ruff: noqa: F401, F403
from datetime import timedelta

import dagster as dg
import pandas as pd
import pandera.pyspark as pa
import polars as pl
import pyspark.sql.types as T

import vt_dagster
from vt_dagster import *
from vt_dagster import FilesSource, Stream, TumblingWindow, VersionedTable, build_definitions


class Price(pa.DataFrameModel):
    product: T.StringType
    category: T.StringType = pa.Field(nullable=True)
    price: T.DoubleType = pa.Field(ge=0)
    at: T.TimestampType


class Cost(pa.DataFrameModel):
    product: T.StringType
    cost: T.DoubleType = pa.Field(ge=0)
    at: T.TimestampType


class Order(pa.DataFrameModel):
    order_id: T.LongType = pa.Field(nullable=True)
    product: T.StringType
    shop: T.StringType = pa.Field(nullable=True)
    note: T.StringType = pa.Field(nullable=True)
    amount: T.DoubleType = pa.Field(nullable=True)
    ordered_at: T.TimestampType


class Payment(pa.DataFrameModel):
    payment_id: T.StringType = pa.Field(nullable=True)
    product: T.StringType
    amount: T.DoubleType
    at: T.TimestampType


class Product(pa.DataFrameModel):
    product: T.StringType
    supplier: T.StringType
    at: T.TimestampType


class Supplier(pa.DataFrameModel):
    supplier: T.StringType
    city: T.StringType
    at: T.TimestampType


class Account(pa.DataFrameModel):
    account: T.StringType
    balance: T.DoubleType
    lsn: T.LongType
    tier: T.StringType
    city: T.StringType
    changed_at: T.TimestampType


class Customer(pa.DataFrameModel):
    customer: T.StringType
    segment: T.StringType


class Visit(pa.DataFrameModel):
    visit: T.StringType
    product: T.StringType
    customer: T.StringType
    at: T.TimestampType


class Purchase(pa.DataFrameModel):
    customer: T.StringType
    at: T.TimestampType


class Rate(pa.DataFrameModel):
    currency: T.StringType
    rate: T.DoubleType
    at: T.TimestampType


class Sale(pa.DataFrameModel):
    currency: T.StringType
    amount: T.DoubleType
    at: T.TimestampType


def _landing(name: str, *optional: str) -> FilesSource:
    return FilesSource(f"landing/{name}", format="csv", optional=list(optional))


def _table(name: str, key: str, schema: type) -> VersionedTable:
    about = {"schema": schema, "timestamp": "at", "history_retention": timedelta(days=30)}
    return VersionedTable(name, key=key, source=FilesSource(f"landing/{name}", format="csv"), **about)


prices = VersionedTable(
    "prices",
    key="product",
    schema=Price,
    timestamp="at",
    history_retention=timedelta(days=30),
    source=_landing("prices", "category"),
)
orders = Stream(
    "orders",
    key="product",
    schema=Order,
    timestamp="ordered_at",
    source=_landing("orders", "shop", "note", "amount"),
)
returns = Stream(
    "returns",
    key="product",
    schema=Order,
    timestamp="ordered_at",
    source=_landing("returns", "shop", "note", "amount"),
)
payments = Stream(
    "payments", key="product", schema=Payment, timestamp="at", source=FilesSource("landing/payments")
)
sales = Stream(
    "sales", key="currency", schema=Sale, timestamp="at", source=FilesSource("landing/sales")
)
purchases = Stream(
    "purchases", key="customer", schema=Purchase, timestamp="at", source=FilesSource("landing/bought")
)
products = _table("products", "product", Product)
suppliers = _table("suppliers", "supplier", Supplier)
customers = VersionedTable(
    "customers",
    key="customer",
    schema=Customer,
    history_retention=timedelta(days=3650),
    source=vt_dagster.SnapshotSource("landing/customers", "parquet", dump_time="customers_%Y-%m-%d"),
)
priced = orders.left_join(
    prices,
    name="priced_orders",
    grace_period=timedelta(hours=1),
    select=["left.*", "right.price", "right.valid_from as priced_from"],
)
ranges = prices.group_by("category").aggregate({"n": "count(*)", "mean": "avg(price)"}, name="ranges")
hourly = (
    orders.group_by("product")
    .windowed_by(TumblingWindow(timedelta(hours=1), grace=timedelta(minutes=5)))
    .aggregate({"orders": "count(*)", "amount": "sum(amount)"}, name="hourly")
)
