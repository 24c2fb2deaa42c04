"""What a change feed says of its records: which are deletions, and which of one time counts."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession
from pyspark.sql.types import LongType, StringType, StructField, StructType, TimestampType

from tests.market import messages
from tests.test_closed_doors import landing, run
from vt_dagster import FilesSource, Stream, Table, TopologyError, VersionedTable, build_asset
from vt_dagster.orchestration.translator import code_version
from vt_dagster.storage.store import AssetStore
from vt_dagster.testing import TopologyTestDriver

DAY = timedelta(days=1)
SCHEMA = StructType(
    [
        StructField("k", StringType()),
        StructField("v", StringType()),
        StructField("lsn", LongType()),
        StructField("timestamp", TimestampType()),
    ]
)
ABOUT: dict[str, Any] = {"key": "k", "schema": SCHEMA}


def table(**more: Any) -> VersionedTable:
    return VersionedTable("customers", **{**ABOUT, "history_retention": DAY, **more})


def put(k: str, v: str | None, at: int, **more: Any) -> dict[str, Any]:
    return {"k": k, "v": v, "timestamp": at, **more}


def versions(driver: TopologyTestDriver, name: str = "customers") -> list[tuple[Any, ...]]:
    """Of each version: key, when it began, value, whether it is a deletion."""
    found = driver.history(name)
    return [
        (r["k"], r["valid_from"].timestamp() * 1000, None if r["is_tombstone"] else r["v"])
        for r in found
    ]


# -- deletions ---------------------------------------------------------------------------------------


def test_a_column_that_says_what_a_record_does(spark: SparkSession) -> None:
    """It is not in the table, and null is no deletion."""
    driver = TopologyTestDriver(table(deleted_when="op = 'D'"), spark=spark)
    driver.pipe("customers", put("a", "x", 1, op="I"), put("b", "y", 2), put("a", "x", 5, op="D"))
    driver.pipe("customers", put("a", "z", 3, op="U"), put("c", None, 4, op="D"))
    assert versions(driver) == [
        ("a", 1, "x"),
        ("a", 3, "z"),
        ("a", 5, None),
        ("b", 2, "y"),
        ("c", 4, None),
    ]
    assert [(r["k"], r["v"]) for r in driver.table("customers")] == [("b", "y")]
    assert "op" not in driver.read("customers")[0]


@pytest.mark.parametrize("form", ["jsonl", "csv"])
def test_it_is_read_from_files(tmp_path: Path, spark: SparkSession, form: Any) -> None:
    rows = [put("a", "x", 1, op="r"), put("a", None, 2, op="d"), put("b", "y", 3, op="r")]
    for r in rows:
        r["timestamp"] = f"2024-01-01T00:00:0{r['timestamp']}Z"
    content = "\n".join(json.dumps(r) for r in rows)
    if form == "csv":
        content = "k,v,timestamp,op\n" + "\n".join(
            f"{r['k']},{r['v'] or ''},{r['timestamp']},{r['op']}" for r in rows
        )
    schema = StructType([f for f in SCHEMA.fields if f.name != "lsn"])
    source = FilesSource(str(landing(tmp_path, jan=content.encode())), format=form)
    node = table(schema=schema, deleted_when="op = 'd'", source=source)
    result = run([build_asset(node)], tmp_path / "warehouse")
    assert result.success, messages(result)
    store = AssetStore(str(tmp_path / "warehouse"), node, spark)
    assert [(r["k"], r["v"]) for r in store.read().collect()] == [("b", "y")]
    assert "op" not in store.read("versions").columns


def test_a_condition_that_is_none(spark: SparkSession) -> None:
    for condition, said in {
        "op =": "Spark says",
        "k": "Spark says",
        "count(*) > 1": "Spark says",
        "no_such(k)": "Spark says",
        "lsm = 1": "much like 'lsn'",
        "name is null": "'v' now",
    }.items():
        node = table(tombstone=condition, renamed={"name": "v"})
        driver = TopologyTestDriver(node, spark=spark)
        with pytest.raises(TopologyError) as error:
            driver.pipe("customers", put("a", "x", 1))
        assert said in str(error.value)
        assert condition in str(error.value)
        assert "customers: " in str(error.value)


def test_one_condition_by_either_name() -> None:
    assert table(deleted_when="v is null") == table(tombstone="v is null")
    assert replace(table(deleted_when="v is null"), tombstone=None) == table()
    assert code_version(table(deleted_when="v is null")) != code_version(table())
    for wrong, said in ({"tombstone": "v is null"}, "leave one out"), ({}, "op = 'D'"):
        with pytest.raises(TopologyError, match=said):
            table(deleted_when="lsn = 1" if wrong else " ", **wrong)
    assert not hasattr(Stream("s", **ABOUT), "deleted_when")
    assert Table("t", **ABOUT, deleted_when="v is null").tombstone == "v is null"
