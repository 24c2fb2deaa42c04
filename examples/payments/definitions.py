"""Payments, exchange rates, and assets derived from them; README.md explains them."""

import os
from datetime import timedelta
from pathlib import Path

import dagster as dg
import pandera.pyspark as pa
import pyspark.sql.types as T

from vt_dagster import (
    Alert,
    FeatureView,
    FilesSource,
    SnapshotSource,
    Stream,
    TumblingWindow,
    VersionedTable,
    build_alerts,
    build_definitions,
    build_training_set,
)

DATA = Path(os.environ.get("EXAMPLE_DATA") or "data/examples/payments")
LANDING, WAREHOUSE, SETS = DATA / "landing", DATA / "warehouse", DATA / "sets"
YEAR = timedelta(days=365)


class Rate(pa.DataFrameModel):
    currency: T.StringType
    rate: T.DoubleType = pa.Field(gt=0, nullable=True)
    at: T.TimestampType


class Customer(pa.DataFrameModel):
    customer: T.StringType
    country: T.StringType


class Payment(pa.DataFrameModel):
    payment_id: T.StringType
    customer: T.StringType
    currency: T.StringType
    amount: T.DoubleType = pa.Field(gt=0)
    at: T.TimestampType


rates = VersionedTable(
    "rates",
    key="currency",
    schema=Rate,
    timestamp="at",
    tombstone="rate is null",
    history_retention=YEAR,
    source=FilesSource(str(LANDING / "rates"), format="csv", recorded_at="file_time"),
    description="Euros for one unit of a currency. A row without a rate ends the currency.",
)
customers = VersionedTable(
    "customers",
    key="customer",
    schema=Customer,
    history_retention=YEAR,
    source=SnapshotSource(str(LANDING / "customers"), format="csv", dump_time="customers_%Y-%m-%d"),
    description="Customers, from a full dump a day.",
)
payments = Stream(
    "payments",
    key="currency",
    schema=Payment,
    timestamp="at",
    unique_by="payment_id",
    within=timedelta(days=7),
    on_contract_break="quarantine",
    source=FilesSource(
        str(LANDING / "payments"), format="csv", recorded_at="file_time", max_bad_share=0.5
    ),
    description="Payments. The producer may send one twice, and some have no valid amount.",
)
in_euros = payments.left_join(
    rates,
    name="in_euros",
    key="payment_id",
    select=["left.payment_id", "left.customer", "left.amount", "right.rate"],
    corrected_for=timedelta(days=7),
    description="Each payment with the rate of its time. Rates that come later correct it.",
)
by_day = (
    payments.group_by()
    .windowed_by(TumblingWindow("1 day", zone="Europe/Berlin"))
    .aggregate(
        {"payments": "count(*)", "amount": "sum(amount)"},
        name="by_day",
        description="Payments of each currency and day in Berlin.",
    )
)
examples = build_training_set(
    payments,
    [
        FeatureView(rates, columns=["rate"]),
        # A dump has no time at which its rows became known.
        FeatureView(customers, columns=["country"], as_known="now"),
    ],
    name="examples",
    to=str(SETS / "examples"),
    min_match_rate=0.5,
)


def tell(alert: Alert) -> None:
    """Prints an alert; a real one would be a message to Slack."""
    print(f"alert: {alert.asset}: {alert.text}")


defs = dg.Definitions.merge(
    build_definitions(in_euros, by_day, customers, warehouse=str(WAREHOUSE)),
    build_alerts([payments], to=tell, quarantine_share="10%"),
    dg.Definitions(assets=[examples]),
)
