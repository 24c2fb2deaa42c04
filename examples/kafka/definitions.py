"""Two topics, their join, and the topic that it is published to; README.md explains them."""

import os
from datetime import timedelta
from pathlib import Path

import dagster as dg
import pandera.pyspark as pa
import pyspark.sql.types as T

from vt_dagster import Stream, VersionedTable, build_definitions
from vt_dagster.kafka import Json, KafkaCluster, KafkaSink, KafkaSource, Raw, build_publication

DATA = Path(os.environ.get("EXAMPLE_DATA") or "data/examples/kafka")
PRICES, ORDERS, PRICED = "example-prices", "example-orders", "example-priced"
CLUSTER = KafkaCluster(dg.EnvVar("EXAMPLE_KAFKA"))


class Price(pa.DataFrameModel):
    product: T.StringType
    price: T.DoubleType = pa.Field(ge=0)
    at: T.TimestampType


class Order(pa.DataFrameModel):
    order_id: T.IntegerType
    product: T.StringType
    at: T.TimestampType


prices = VersionedTable(
    "prices",
    key="product",
    schema=Price,
    timestamp="at",
    history_retention=timedelta(days=30),
    source=KafkaSource(CLUSTER, PRICES, key=Raw("product"), value=Json()),
)
orders = Stream(
    "orders",
    key="product",
    schema=Order,
    timestamp="at",
    # With so few messages, one unreadable message is more than the default share of a tenth.
    source=KafkaSource(CLUSTER, ORDERS, key=Raw("product"), value=Json(), max_bad_share=0.5),
)
priced = orders.left_join(
    prices,
    name="priced_orders",
    grace_period=timedelta(hours=2),
    select=["left.*", "right.price", "right.valid_from as priced_from"],
)

defs = dg.Definitions.merge(
    build_definitions(priced, warehouse=str(DATA / "warehouse")),
    dg.Definitions(
        assets=[build_publication(priced, KafkaSink(CLUSTER, PRICED))],
        executor=dg.in_process_executor,
    ),
)
