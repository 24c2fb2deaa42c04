"""Corrected joins: late table records update the rows, and each update names its cause."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from pyspark.sql import SparkSession
from pyspark.sql.types import (
    DoubleType,
    LongType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from vt_dagster import Stream, Table, TopologyError, VersionedTable
from vt_dagster.errors import RefusedRecordsError
from vt_dagster.testing import TopologyTestDriver

pytestmark = pytest.mark.usefixtures("few_rows")

MS = timedelta(milliseconds=1)
ORDER = StructType(
    [
        StructField("order_id", StringType()),
        StructField("product", StringType()),
        StructField("amount", LongType()),
        StructField("timestamp", TimestampType()),
    ]
)
PRICE = StructType(
    [
        StructField("product", StringType()),
        StructField("price", DoubleType()),
        StructField("timestamp", TimestampType()),
    ]
)


def orders(**more: Any) -> Stream:
    return Stream("orders", **{"key": "product", "schema": ORDER, **more})


def prices(retention: timedelta = 100 * MS) -> VersionedTable:
    about: dict[str, Any] = {"tombstone": "price is null", "history_retention": retention}
    return VersionedTable("prices", key="product", schema=PRICE, **about)


def priced(kind: str = "left", **more: Any) -> Any:
    about: dict[str, Any] = {"corrected_for": 50 * MS, "name": "priced", **more}
    select = ("left.*", "right.price", "left.amount * right.price as total")
    join = orders().join if kind == "inner" else orders().left_join
    return join(prices(), select=select, **about)


def order(number: int, at: int, product: str = "a", **more: Any) -> dict[str, Any]:
    return {"order_id": f"o{number}", "product": product, "amount": 2, "timestamp": at, **more}


def price(value: float | None, at: int, product: str = "a") -> dict[str, Any]:
    return {"product": product, "price": value, "timestamp": at}


def update_rows(rows: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    """For each update the order, price, revision, offset of the cause, former price, and whether it is
    a deletion."""
    return [
        (
            r["order_id"],
            r["price"],
            r["revision"],
            r["cause"] and r["cause"]["offset"],
            r["old"] and r["old"]["price"],
            r["is_tombstone"],
        )
        for r in rows
    ]


def test_rows_follow_table_corrections(spark: SparkSession) -> None:
    driver = TopologyTestDriver(priced(key="order_id"), spark=spark)
    driver.pipe("orders", order(1, 10), order(2, 20), order(3, 30), order(4, 20, "b"))
    assert [row[:4] for row in update_rows(driver.read("priced"))] == [
        (f"o{i}", None, 0, None) for i in (1, 2, 3, 4)
    ]
    # The stream was ahead. The price is not out of order, and all orders from its time on are joined
    # again.
    driver.pipe("prices", price(5.0, 15))
    assert update_rows(driver.read("priced")) == [
        ("o2", 5.0, 1, 0, None, False),
        ("o3", 5.0, 1, 0, None, False),
    ]
    # The late price of 9 is valid until 15: only the first order changes. Of two prices at 25 the last
    # counts.
    driver.pipe("prices", price(4.0, 9), price(7.0, 25), price(8.0, 25))
    assert update_rows(driver.read("priced")) == [
        ("o1", 4.0, 1, 1, None, False),
        ("o3", 8.0, 2, 3, 5.0, False),
    ]
    # A price that changes no value emits no update. A deletion is valid from its own time on.
    driver.pipe("prices", price(4.0, 10), price(None, 21))
    assert update_rows(driver.read("priced")) == []
    driver.run({"prices": [price(None, 20)], "orders": [order(5, 31)]})
    (gone, new) = driver.read("priced")
    assert update_rows([gone, new]) == [
        ("o2", None, 2, 6, 5.0, False),
        ("o5", 8.0, 0, None, None, False),
    ]
    assert gone["cause"] == {"table": "prices", "partition": 0, "offset": 6}
    assert (gone["left_offset"], new["left_offset"]) == (1, 4)
    assert [r["price"] for r in driver.table("priced")] == [4.0, None, 8.0, None, 8.0]


@pytest.mark.endurance
def test_inner_rows_are_inserted_and_retracted(spark: SparkSession) -> None:
    driver = TopologyTestDriver(priced("inner"), spark=spark)
    driver.pipe("orders", order(1, 10))
    assert driver.read("priced") == []
    for value in (5.0, None, None, 6.0):
        driver.pipe("prices", price(value, 8))
    updates = driver.read("priced")
    assert [(r["price"], r["revision"], r["is_tombstone"]) for r in updates] == [
        (5.0, 0, False),
        (None, 1, True),
        (6.0, 2, False),
    ]
    assert [r["cause"]["offset"] for r in updates] == [0, 1, 3]
    assert {
        (r["left_partition"], r["left_offset"], r["offset"] - i) for i, r in enumerate(updates)
    } == {(0, 0, 0)}


def test_keyed_inner_rows_are_inserted_and_retracted(spark: SparkSession) -> None:
    driver = TopologyTestDriver(priced("inner", key="order_id"), spark=spark)
    driver.pipe("orders", order(1, 10), order(2, 20, "b"))
    for value in (5.0, None):
        driver.pipe("prices", price(value, 8))
    # A second order with the same key has no row as long as it matches no price.
    driver.run({"orders": [order(1, 21, "b")], "prices": [price(6.0, 8), price(None, 15, "b")]})
    assert update_rows(driver.read("priced")) == [
        ("o1", 5.0, 0, 0, None, False),
        ("o1", None, 1, 1, 5.0, True),
        ("o1", 6.0, 2, 2, None, False),
    ]
    with pytest.raises(RefusedRecordsError, match=r"got 1 .*partition 0 offset 2"):
        driver.pipe("prices", price(7.0, 21, "b"))
    driver.pipe("prices", price(None, 8))
    driver.pipe("prices", price(7.0, 21, "b"))
    assert [(r["order_id"], r["price"], r["product"]) for r in driver.table("priced")] == [
        ("o1", 7.0, "b")
    ]


def test_no_correction_after_corrected_for(spark: SparkSession) -> None:
    driver = TopologyTestDriver(priced(), spark=spark)
    driver.pipe("orders", order(1, 10), order(2, 49), order(3, 100))
    # Stream time is 100: orders from 50 on can change. The second order, at 49, cannot any more.
    driver.pipe("prices", price(5.0, 1))
    head = driver._stores["priced"].head()  # pyright: ignore[reportPrivateUsage]
    assert head is not None
    assert [r["order_id"] for r in driver.read("priced")[3:]] == ["o3"]
    assert head.commit.counts["corrections_too_late"] == 2
    assert head.commit.counts["corrected"] == 1
    assert [r["is_final"] for r in driver.table("priced")] == [True, True, False]
    # The table's stream time counts too.
    driver.run({"prices": [price(6.0, 151), price(7.0, 90)]})
    assert [r["order_id"] for r in driver.read("priced")] == []


def test_aggregates_subtract_retracted_rows(spark: SparkSession) -> None:
    total = priced("inner").group_by("product").aggregate({"total": "sum(total)"}, name="totals")
    driver = TopologyTestDriver(total, spark=spark)
    driver.pipe("orders", order(1, 10), order(2, 20), order(3, 20, "b"))
    driver.pipe("prices", price(5.0, 15), price(1.0, 20, "b"))
    driver.pipe("prices", price(3.0, 1), price(4.0, 18), price(None, 20, "b"))
    assert [(r["product"], r["total"]) for r in driver.table("totals")] == [("a", 14.0), ("b", 0.0)]


def test_key_must_identify_one_record(spark: SparkSession) -> None:
    driver = TopologyTestDriver(priced(key="order_id"), spark=spark)
    with pytest.raises(RefusedRecordsError, match=r"order_id.*got 2 .*partition 0 offset 0"):
        driver.pipe("orders", order(1, 10), order(1, 11))
    driver.pipe("orders", order(1, 10), order(2, 10) | {"order_id": None})
    assert driver.metrics("priced")["dropped"] == 1
    with pytest.raises(RefusedRecordsError, match=r"got 1 .*partition 0 offset 2"):
        driver.pipe("orders", order(1, 12))
    inner = TopologyTestDriver(priced("inner", key="order_id"), spark=spark)
    inner.pipe("orders", order(1, 10), order(1, 20))
    with pytest.raises(RefusedRecordsError, match="got 2"):
        inner.pipe("prices", price(5.0, 5))


@pytest.mark.endurance  # core/test_corrections.py has random runs of a join with a grace period
def test_grace_period_precedes_corrections(spark: SparkSession) -> None:
    """A record that waits for its grace period is not corrected; the join matches it after the wait."""
    driver = TopologyTestDriver(priced(grace_period=10 * MS), spark=spark)
    driver.pipe("orders", order(1, 10), order(2, 20))
    assert [r["order_id"] for r in driver.read("priced")] == ["o1"]
    driver.pipe("prices", price(5.0, 10))
    driver.pipe("orders", order(3, 30))
    assert [(r["order_id"], r["price"], r["revision"]) for r in driver.read("priced")] == [
        ("o1", 5.0, 1),
        ("o2", 5.0, 0),
    ]


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "longer than the history": (
        lambda: priced(corrected_for=101 * MS),
        "corrected_for 0:00:00.101000 is longer than the history retention",
    ),
    "a plain table": (
        lambda: orders().join(Table("p", key="product", schema=PRICE), name="j", corrected_for=MS),
        "corrected_for needs a versioned table",
    ),
    "an end that every version moves": (
        lambda: (
            priced().operator
            and orders().join(prices(), name="j", corrected_for=MS, select=["right.valid_to"])
        ),
        "right.valid_to changes with every later version",
    ),
    "a key that is not there": (
        lambda: priced(key="id"),
        "key= of a corrected join needs columns of 'orders'",
    ),
    "a column of its own": (
        lambda: orders().join(prices(), name="j", corrected_for=MS, select=["left.amount as revision"]),
        "no selected columns named \\['revision'\\]",
    ),
    "a column that its reads add": (
        lambda: orders().join(prices(), name="j", corrected_for=MS, select=["left.amount as Is_Final"]),
        "no selected columns named \\['Is_Final'\\]",
    ),
    "a join of tables": (
        lambda: prices().left_join(prices(), name="j", corrected_for=MS),
        "already follows every change of both: remove corrected_for",
    ),
    "a key without a promise": (
        lambda: orders().join(prices(), name="j", key="order_id"),  # pyright: ignore[reportCallIssue]
        "key is only for a corrected join with a versioned table",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_refused_when_declared(what: str) -> None:
    make, message = REFUSED[what]
    with pytest.raises(TopologyError, match=message):
        make()
