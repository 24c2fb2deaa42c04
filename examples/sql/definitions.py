"""Orders with the price of their time, and SQL models on them; README.md explains them."""

import os
from datetime import timedelta
from pathlib import Path

import dagster as dg
import pandera.pyspark as pa
import pyspark.sql.types as T

from examples.sql.models import build_models
from vt_dagster import FilesSource, Stream, VersionedTable, build_definitions

DATA = Path(os.environ.get("EXAMPLE_DATA") or "data/examples/sql")
LANDING, WAREHOUSE, RESULTS = DATA / "landing", DATA / "warehouse", DATA / "models"


class Price(pa.DataFrameModel):
    product: T.StringType
    price: T.DoubleType = pa.Field(gt=0, nullable=True)
    at: T.TimestampType


class Order(pa.DataFrameModel):
    order_id: T.StringType
    product: T.StringType
    quantity: T.IntegerType
    at: T.TimestampType


prices = VersionedTable(
    "prices",
    key="product",
    schema=Price,
    timestamp="at",
    tombstone="price is null",
    history_retention=timedelta(days=365),
    freshness=timedelta(days=1),
    source=FilesSource(str(LANDING / "prices"), format="csv"),
    description="Prices. A row without a price ends the product.",
)
orders = Stream(
    "orders",
    key="product",
    schema=Order,
    timestamp="at",
    source=FilesSource(str(LANDING / "orders"), format="csv"),
)
priced = orders.left_join(
    prices,
    name="priced_orders",
    key="order_id",
    select=["left.order_id", "left.product", "left.quantity", "right.price"],
    corrected_for=timedelta(days=7),
    description="Each order with the price of its time. Prices that come later correct it.",
)
models = build_models(
    Path(__file__).with_name("models"), [prices, orders, priced], warehouse=WAREHOUSE, results=RESULTS
)

defs = dg.Definitions.merge(
    build_definitions(priced, warehouse=str(WAREHOUSE)),
    dg.Definitions(assets=models, executor=dg.in_process_executor),
)
