"""The streams and tables, which both code locations import: declared once, so that they agree."""

import os
from datetime import timedelta

import pandera.pyspark as pa
import pyspark.sql.types as T

from vt_dagster import FilesSource, Stream, VersionedTable
from vt_dagster.kafka import Json, KafkaCluster, KafkaSource, Raw


class Price(pa.DataFrameModel):
    product: T.StringType
    price: T.DoubleType = pa.Field(ge=0, description="in euros")
    at: T.TimestampType


class Order(pa.DataFrameModel):
    product: T.StringType
    amount: T.IntegerType
    ordered_at: T.TimestampType


prices = VersionedTable(
    "prices",
    key="product",
    schema=Price,
    timestamp="at",
    history_retention=timedelta(days=90),
    source=FilesSource(f"{os.environ['LAKE_LANDING']}/prices", format="csv"),
    description="What each product costs.",
)
orders = Stream(
    "orders",
    key="product",
    schema=Order,
    timestamp="ordered_at",
    source=KafkaSource(
        KafkaCluster(os.environ["LAKE_KAFKA"]), "orders", key=Raw("product"), value=Json()
    ),
    description="What customers have ordered.",
)
priced_orders = orders.left_join(
    prices,
    name="priced_orders",
    grace_period=timedelta(hours=1),
    select=["left.*", "right.price", "left.amount * right.price as total"],
    description="Each order with the price as of its own time.",
)
