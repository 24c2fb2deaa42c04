"""Visits, a score per customer, and two training sets from them; README.md explains them."""

import os
from datetime import timedelta
from pathlib import Path

import dagster as dg
import pandera.pyspark as pa
import pyspark.sql.types as T

from vt_dagster import (
    FeatureView,
    FilesSource,
    Stream,
    VersionedTable,
    build_definitions,
    build_training_set,
)

DATA = Path(os.environ.get("EXAMPLE_DATA") or "data/examples/features")
LANDING, WAREHOUSE, SETS = DATA / "landing", DATA / "warehouse", DATA / "sets"


class Score(pa.DataFrameModel):
    customer: T.StringType
    score: T.DoubleType = pa.Field(ge=0, le=1)
    at: T.TimestampType


class Visit(pa.DataFrameModel):
    customer: T.StringType
    bought: T.BooleanType
    at: T.TimestampType


def landed(name: str) -> FilesSource:
    """A source whose rows count as known at their file's time, not when a backfill consumes them."""
    return FilesSource(str(LANDING / name), format="csv", recorded_at="file_time")


scores = VersionedTable(
    "scores",
    key="customer",
    schema=Score,
    timestamp="at",
    history_retention=timedelta(days=365),
    source=landed("scores"),
    description="How likely a customer buys: of a day, but delivered two days later.",
)
visits = Stream("visits", key="customer", schema=Visit, timestamp="at", source=landed("visits"))

examples = build_training_set(
    visits,
    [FeatureView(scores, columns=["score"])],
    name="examples",
    to=str(SETS / "examples"),
)
leaky = build_training_set(
    visits,
    [FeatureView(scores, columns=["score"], as_known="now")],
    name="leaky",
    to=str(SETS / "leaky"),
)

defs = dg.Definitions.merge(
    build_definitions(visits, scores, warehouse=str(WAREHOUSE)),
    dg.Definitions(assets=[examples, leaky], executor=dg.in_process_executor),
)
