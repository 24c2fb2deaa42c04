"""Joins of tables whose columns are called ``left`` and ``right``, as the sides in ``select`` are."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from pyspark.sql import SparkSession
from pyspark.sql.types import LongType, StringType, StructField, StructType, TimestampType

from vt_dagster import Stream, Table, VersionedTable
from vt_dagster.testing import TopologyTestDriver

SCHEMA = StructType(
    [
        StructField("k", StringType()),
        StructField("left", LongType()),
        StructField("right", StringType()),
        StructField("timestamp", TimestampType()),
    ]
)
ABOUT: dict[str, Any] = {"key": "k", "schema": SCHEMA}
SELECT = ("left.*", "right.left as x", "right.right as y", "left.left + right.left as both")


def table(name: str, versioned: bool) -> Table:
    if versioned:
        return VersionedTable(name, history_retention=timedelta(hours=1), **ABOUT)
    return Table(name, **ABOUT)


def joined(driver: TopologyTestDriver, left: str) -> list[tuple[Any, ...]]:
    driver.pipe("other", {"k": "a", "left": 10, "right": "b", "timestamp": 0})
    driver.pipe(left, {"k": "a", "left": 1, "right": "a", "timestamp": 5})
    names = ("k", "left", "right", "x", "y", "both")
    return [tuple(row[n] for n in names) for row in driver.read("joined")]


FOUND = [("a", 1, "a", 10, "b", 11)]


@pytest.mark.parametrize("versioned", [False, True])
def test_of_a_stream_and_a_table(spark: SparkSession, versioned: bool) -> None:
    sales = Stream("sales", **ABOUT)
    result = sales.left_join(table("other", versioned), name="joined", select=SELECT)
    assert joined(TopologyTestDriver(result, spark=spark), "sales") == FOUND


@pytest.mark.parametrize("foreign_key", [None, "right"])
def test_of_two_tables(spark: SparkSession, foreign_key: str | None) -> None:
    one, other = table("one", versioned=False), table("other", versioned=False)
    result = one.left_join(other, name="joined", select=SELECT, foreign_key=foreign_key)
    assert joined(TopologyTestDriver(result, spark=spark), "one") == FOUND


@pytest.mark.parametrize("foreign_key", [None, "right"])
def test_keys_called_like_the_sides(spark: SparkSession, foreign_key: str | None) -> None:
    kinds = {"right": StringType(), "left": StringType(), "timestamp": TimestampType()}
    schema = StructType([StructField(name, kind) for name, kind in kinds.items()])
    one = Table("one", key="right", schema=schema)
    other = Table("other", key="left", schema=schema)
    select = ("left.*", "right.left as x", "right.right as y")
    result = one.join(other, name="joined", select=select, foreign_key=foreign_key)
    driver = TopologyTestDriver(result, spark=spark)
    driver.pipe("one", {"right": "a", "left": "l", "timestamp": 0})
    driver.pipe("other", {"right": "r", "left": "a", "timestamp": 5})
    found = [tuple(row[n] for n in ("right", "left", "x", "y")) for row in driver.read("joined")]
    assert found == [("a", "l", "a", "r")]
