"""Tables of hundreds of columns."""

from __future__ import annotations

import json
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession
from pyspark.sql.types import DoubleType, StringType, StructField, StructType, TimestampType

from vt_dagster import FilesSource, VersionedTable
from vt_dagster.runs.run import run_once
from vt_dagster.storage.asset_store import stores_of
from vt_dagster.storage.read import read

COLUMNS = [f"c{i}" for i in range(400)]
SCHEMA = StructType(
    [
        StructField("k", StringType()),
        *[StructField(name, DoubleType()) for name in COLUMNS],
        StructField("timestamp", TimestampType()),
    ]
)


@pytest.mark.endurance
def test_table_of_400_columns(spark: SparkSession, tmp_path: Path) -> None:
    """Conditions over all columns do not form a chain that overflows the stack of Spark's planner."""
    landing, warehouse = tmp_path / "wide", str(tmp_path / "warehouse")
    landing.mkdir()
    source = FilesSource(str(landing))
    wide = VersionedTable(
        "wide", key="k", schema=SCHEMA, history_retention=timedelta(minutes=10), source=source
    )
    row = {"k": "a", **dict.fromkeys(COLUMNS, 1.0), "timestamp": "2020-01-01T00:00:00Z"}
    (landing / "1.jsonl").write_text(json.dumps(row) + "\n")
    assert run_once(wide, stores_of(warehouse, spark)).commit is not None
    found = read("wide", warehouse=warehouse, what="versions")
    assert found.column("c399").to_pylist() == [1.0]


def test_csv_line_is_parsed_once(spark: SparkSession, tmp_path: Path) -> None:
    """The plan parses a line once for each header of the files, and not for each column."""
    (tmp_path / "1.csv").write_text("k,c0,c1,timestamp\na,1,2,2020-01-01T00:00:00Z\n")
    (tmp_path / "2.csv").write_text("timestamp,c1,k,extra\n2020-01-02T00:00:00Z,3,b,4\n")
    kept = StructType([SCHEMA["k"], SCHEMA["c0"], SCHEMA["c1"], SCHEMA["timestamp"]])
    source = FilesSource(str(tmp_path), format="csv", optional=["c0"])
    rows: Any = source.read(spark, source.files(), kept)
    plan = rows._jdf.queryExecution().optimizedPlan().toString()
    assert plan.count("from_csv(") == 2, plan
    found = rows.orderBy("k").select("k", "c0", "c1").collect()
    assert [tuple(row) for row in found] == [("a", 1.0, 2.0), ("b", None, 3.0)]
