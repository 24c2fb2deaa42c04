"""Joins of tables with columns called ``left`` and ``right``, like the two sides in ``select``."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from pyspark.sql import SparkSession
from pyspark.sql.types import LongType, StringType, StructField, StructType, TimestampType

from vt_dagster import Stream, Table, VersionedTable
from vt_dagster.errors import TopologyError
from vt_dagster.testing import TopologyTestDriver
from vt_dagster.topology.schema import refuse_types

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


def test_columns_named_left_and_right(spark: SparkSession) -> None:
    """The test covers joins of a stream with a plain or versioned table, and joins of two tables by key
    or by foreign key."""
    sales, one = Stream("sales", **ABOUT), table("one", versioned=False)
    plain, versioned = table("plain", versioned=False), table("versioned", versioned=True)
    joins = [
        sales.left_join(plain, name="with_plain", select=SELECT),
        sales.left_join(versioned, name="with_versioned", select=SELECT),
        one.left_join(plain, name="by_key", select=SELECT),
        one.left_join(plain, name="by_foreign_key", select=SELECT, foreign_key="right"),
    ]
    driver = TopologyTestDriver(*joins, spark=spark)
    own = [{"k": "a", "left": 1, "right": "a", "timestamp": 5}]
    other = [{"k": "a", "left": 10, "right": "b", "timestamp": 0}]
    driver.run({"sales": own, "one": own, "plain": other, "versioned": other})
    names = ("k", "left", "right", "x", "y", "both")
    for join in joins:
        found = [tuple(row[n] for n in names) for row in driver.read(join.name)]
        assert found == [("a", 1, "a", 10, "b", 11)], join.name


def test_types_unsupported_by_delta_are_refused(spark: SparkSession) -> None:
    """The type of an expression is known only when Spark analyzes it. A type that Delta lacks is an
    error before anything is written."""
    sales, rates = Stream("sales", **ABOUT), table("rates", versioned=True)
    age = "left.timestamp - right.valid_from as age"
    driver = TopologyTestDriver(sales.join(rates, name="aged", select=["left.left", age]), spark=spark)
    record = [{"k": "a", "left": 1, "right": "a", "timestamp": 5}]
    with pytest.raises(
        TopologyError, match=r"aged: expected types .* got \['age interval day to second'\]"
    ):
        driver.run({"sales": record, "rates": record})
    for odd in ("null", "array()", "parse_json('1')", "'a' COLLATE UTF8_LCASE", "struct(null)"):
        columns = spark.sql(f"SELECT 1 AS k, {odd} AS x, struct(1 AS k, {odd} AS x) AS old").schema
        with pytest.raises(
            TopologyError, match=r"aged: expected types .* got \['x [^']*'\]; use instead"
        ):
            refuse_types(columns, "aged")


def test_keys_named_left_and_right(spark: SparkSession) -> None:
    kinds = {"right": StringType(), "left": StringType(), "timestamp": TimestampType()}
    schema = StructType([StructField(name, kind) for name, kind in kinds.items()])
    one = Table("one", key="right", schema=schema)
    other = Table("other", key="left", schema=schema)
    select = ("left.*", "right.left as x", "right.right as y")
    joins = [
        one.join(other, name="by_key", select=select),
        one.join(other, name="by_foreign_key", select=select, foreign_key="right"),
    ]
    driver = TopologyTestDriver(*joins, spark=spark)
    driver.run(
        {
            "one": [{"right": "a", "left": "l", "timestamp": 0}],
            "other": [{"right": "r", "left": "a", "timestamp": 5}],
        }
    )
    for join in joins:
        found = [tuple(row[n] for n in ("right", "left", "x", "y")) for row in driver.read(join.name)]
        assert found == [("a", "l", "a", "r")], join.name


def test_sides_in_backticks_and_string_literals(spark: SparkSession) -> None:
    sales, rates = Stream("sales", **ABOUT), table("rates", versioned=True)
    select = ["`right`.`left` + `left`.left as x", "concat('left.gone ', left.right) as y"]
    driver = TopologyTestDriver(sales.left_join(rates, name="joined", select=select), spark=spark)
    own = [{"k": "a", "left": 1, "right": "a", "timestamp": 5}]
    driver.run({"sales": own, "rates": [{"k": "a", "left": 10, "right": "b", "timestamp": 0}]})
    assert [(row["x"], row["y"]) for row in driver.read("joined")] == [(11, "left.gone a")]
