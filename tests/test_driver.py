"""The behaviour of ``TopologyTestDriver`` for its users."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
from pyspark.sql import SparkSession
from pyspark.sql.types import (
    DoubleType,
    IntegerType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from vt_dagster.errors import ContractError, TopologyError
from vt_dagster.testing import REFUSED, TopologyTestDriver
from vt_dagster.topology.model import Stream, Table, VersionedTable

pytestmark = pytest.mark.usefixtures("few_rows")


def ms(number: int) -> timedelta:
    return timedelta(milliseconds=number)


def at(number: int) -> datetime:
    return datetime(1970, 1, 1, tzinfo=timezone.utc) + ms(number)


def schema(**columns: Any) -> StructType:
    return StructType([StructField(name, kind) for name, kind in columns.items()])


weather = VersionedTable(
    "weather",
    key=("origin",),
    schema=schema(origin=StringType(), temp=DoubleType(), wind=DoubleType(), timestamp=TimestampType()),
    tombstone="temp IS NULL AND wind IS NULL",
    history_retention=ms(100),
)
flights = Stream(
    "flights",
    key=("origin",),
    schema=schema(origin=StringType(), flight=IntegerType(), timestamp=TimestampType()),
    tombstone="flight IS NULL",
    null_key="keep",
)
seats = VersionedTable(
    "seats",
    key=("flight", "row"),
    schema=schema(flight=IntegerType(), row=StringType(), person=StringType(), ms=TimestampType()),
    timestamp="ms",
    history_retention=ms(10),
)


def columns(rows: list[dict[str, Any]], *names: str) -> list[tuple[Any, ...]]:
    return [tuple(row[n] for n in names) for row in rows]


def test_stream_record_joins_version_at_its_time(spark: SparkSession) -> None:
    driver = TopologyTestDriver(flights.left_join(weather, name="joined"), spark=spark)
    driver.pipe("weather", {"origin": "JFK", "temp": 39.0, "timestamp": 0})
    driver.pipe("weather", {"origin": "JFK", "temp": 41.0, "timestamp": 10})
    driver.pipe(
        "flights",
        {"origin": "JFK", "flight": 1, "timestamp": 9},
        {"origin": "JFK", "flight": 2, "timestamp": 10},
        {"origin": "LGA", "flight": 3, "timestamp": 10},
        {"origin": None, "flight": 4, "timestamp": 11},
    )
    assert columns(driver.read("joined"), "flight", "temp", "timestamp", "offset") == [
        (1, 39.0, at(9), 0),
        (2, 41.0, at(10), 1),
        (3, None, at(10), 2),
        (4, None, at(11), 3),
    ]
    assert driver.read("joined") == []


def test_null_column_is_not_tombstone(spark: SparkSession) -> None:
    driver = TopologyTestDriver(weather, spark=spark)
    driver.pipe("weather", {"origin": "JFK", "temp": 39.0, "wind": 3.0, "timestamp": 0})
    driver.pipe("weather", {"origin": "JFK", "wind": 4.0, "timestamp": 1})
    assert columns(driver.table("weather"), "temp", "wind") == [(None, 4.0)]
    driver.pipe("weather", {"origin": "JFK", "timestamp": 2})
    assert driver.table("weather") == []
    assert columns(driver.versions("weather"), "wind", "valid_from", "valid_to", "is_tombstone") == [
        (3.0, at(0), at(1), False),
        (4.0, at(1), at(2), False),
        (None, at(2), None, True),
    ]


def test_late_table_record_is_rejected_and_counted(spark: SparkSession) -> None:
    driver = TopologyTestDriver(weather, spark=spark)
    driver.pipe("weather", {"origin": "JFK", "temp": 1.0, "timestamp": 200})
    driver.pipe(
        "weather",
        {"origin": "LGA", "temp": 2.0, "timestamp": 99},
        {"origin": "LGA", "temp": 3.0, "timestamp": 100},
    )
    assert columns(driver.table("weather"), "origin", "temp") == [("JFK", 1.0), ("LGA", 3.0)]
    assert driver.metrics("weather") == {"applied": 2, "late": 1, "waiting": 0}
    assert columns(driver.read("weather"), "is_latest") == [(True,), (True,)]


def test_invalid_record_is_quarantined_with_reason(spark: SparkSession) -> None:
    driver = TopologyTestDriver(weather, spark=spark)
    driver.pipe(
        "weather",
        {"origin": None, "temp": 1.0, "timestamp": 0},
        {"origin": "JFK", "temp": 1.0},
        {"origin": "JFK", "temp": 2.0, "timestamp": 1, "partition": 0},
    )
    assert driver.metrics("weather") == {
        "applied": 1,
        "quarantined": 2,
        "quarantined/null_key": 1,
        "quarantined/null_timestamp": 1,
        "waiting": 0,
    }
    assert len(driver.read("weather")) == 1


def test_records_wait_for_grace_period(spark: SparkSession) -> None:
    joined = flights.join(weather, name="joined", grace_period=ms(5))
    driver = TopologyTestDriver(joined, spark=spark)
    driver.run(
        {
            "flights": [{"origin": "JFK", "flight": 1, "timestamp": 10}],
            "weather": [{"origin": "JFK", "temp": 39.0, "timestamp": 0}],
        }
    )
    assert driver.read("joined") == []
    assert columns(driver.waiting("joined"), "flight") == [(1,)]
    driver.pipe("weather", {"origin": "JFK", "temp": 40.0, "timestamp": 8})
    driver.pipe("flights", {"origin": "JFK", "flight": 2, "timestamp": 15})
    assert columns(driver.read("joined"), "flight", "temp") == [(1, 40.0)]
    driver.pipe("flights", {"origin": "JFK", "flight": 3, "timestamp": 9})
    assert columns(driver.read("joined"), "flight", "temp") == [(3, 40.0)]
    driver.pipe("flights", {"origin": "JFK", "timestamp": 16}, {"flight": 5, "timestamp": 16})
    assert columns(driver.waiting("joined"), "flight") == [(2,)]
    assert driver.metrics("joined") == {"applied": 1, "late": 1, "dropped": 2, "waiting": 1}
    assert driver.metrics("joined", partition=7) == {"waiting": 0}


def test_unversioned_table_has_latest_record(spark: SparkSession) -> None:
    planes = Table("planes", key=("origin",), schema=flights.schema, tombstone="flight IS NULL")
    joined = flights.left_join(planes, name="joined", select=("left.flight", "right.flight as plane"))
    driver = TopologyTestDriver(joined, spark=spark)
    driver.pipe("flights", {"origin": "JFK", "flight": 0, "timestamp": 1})
    driver.pipe(
        "planes",
        {"origin": "JFK", "flight": 7, "timestamp": 9},
        {"origin": "JFK", "flight": 8, "timestamp": 3},
    )
    driver.pipe("flights", {"origin": "JFK", "flight": 1, "timestamp": 1})
    driver.pipe("planes", {"origin": "JFK", "timestamp": 2})
    driver.pipe("flights", {"origin": "JFK", "flight": 2, "timestamp": 9})
    assert columns(driver.read("joined"), "flight", "plane") == [(0, None), (1, 8), (2, None)]
    assert driver.table("planes") == []


def test_store_follows_kip_889(spark: SparkSession) -> None:
    driver = TopologyTestDriver(weather, spark=spark)
    store = driver.store("weather")
    assert store.get("JFK") is None
    assert store.put("JFK", {"temp": 1.0}, 100) is None
    assert store.put("JFK", {"temp": 2.0, "wind": None}, at(50)) == at(100)
    assert store.put("LGA", {"temp": 3.0}, 160) is None
    assert store.put("JFK", {"temp": 4.0}, 59) is REFUSED
    assert store.delete("JFK", 59) is None
    found = store.get_each(("JFK", None), ("JFK", 99), ("JFK", 59))
    assert [row and row["temp"] for row in found] == [1.0, 2.0, None]
    assert (store.delete("JFK", 100) or {})["temp"] == 1.0
    assert store.get("JFK") is None
    assert store.put("JFK", None, 110) is None
    assert columns(store.history("JFK"), "temp", "valid_from", "valid_to") == [
        (2.0, at(50), at(100)),
        (None, at(100), at(110)),
        (None, at(110), None),
    ]
    assert driver.metrics("weather")["late"] == 2


def test_composite_keys_and_custom_timestamp_column(spark: SparkSession) -> None:
    driver = TopologyTestDriver(seats, spark=spark)
    store = driver.store("seats")
    assert store.put((1, "A"), "Ada", 5) is None
    assert store.put((1, "B"), "Bob", 5) is None
    assert store.put((1, "A"), "Cay", datetime(1970, 1, 1, 0, 0, 0, 3000)) == at(5)
    assert (store.get((1, "A"), as_of=4) or {})["person"] == "Cay"
    assert store.get((2, "A")) is None
    assert (store.delete((1, "A"), 6) or {})["person"] == "Ada"
    driver.pipe("seats", {"flight": 1, "row": None, "person": "Dan", "ms": 7})
    driver.pipe("seats", {"flight": 1, "row": "B", "ms": 7, "is_tombstone": True})
    assert driver.table("seats") == []
    assert driver.metrics("seats")["quarantined/null_key"] == 1


def test_store_refuses_null_key(spark: SparkSession) -> None:
    store = TopologyTestDriver(weather, seats, spark=spark).store("seats")
    for key in [None, (1, None), 1, (1, "A", 2)]:
        with pytest.raises(ContractError, match="expected a key with a value for each of"):
            store.get(key)
        with pytest.raises(ContractError, match="expected a key with a value for each of"):
            store.history(key)
        with pytest.raises(ContractError, match="expected a key with a value for each of"):
            store.put(key, "Ada", 1)
        with pytest.raises(ContractError, match="expected a key with a value for each of"):
            store.delete(key, 1)


def test_invalid_calls_are_refused(spark: SparkSession) -> None:
    joined = flights.join(weather, name="joined")
    driver = TopologyTestDriver(joined, spark=spark)
    with pytest.raises(ContractError, match=r"sources \['flights', 'weather'\], got some for \['joi"):
        driver.pipe("joined", {"flight": 1})
    with pytest.raises(ContractError, match=r"got \['tmp'\]"):
        driver.pipe("weather", {"origin": "JFK", "tmp": 1.0, "timestamp": 1})
    with pytest.raises(ContractError, match=r"weather: expected temp to be double, got: .*warm"):
        driver.pipe("weather", {"origin": "JFK", "temp": "warm", "timestamp": 1})
    with pytest.raises(ContractError, match="weather: expected origin to be string, got: "):
        driver.store("weather").get(4)
    with pytest.raises(ContractError, match="expected one of"):
        driver.read("nothing")
    with pytest.raises(ContractError, match="expected a table, got 'flights'"):
        driver.table("flights")
    with pytest.raises(ContractError, match="expected a mapping with the value columns"):
        driver.store("weather").put("JFK", 3.0, 1)
    with pytest.raises(TopologyError, match="grace"):
        flights.join(weather, name="late", grace_period=ms(101))


def test_store_of_a_key_with_a_time(spark: SparkSession) -> None:
    """A time in a key is given like any other time of a test."""
    shifts = VersionedTable(
        "shifts",
        key=("began",),
        schema=schema(began=TimestampType(), who=StringType(), timestamp=TimestampType()),
        history_retention=ms(100),
    )
    store = TopologyTestDriver(shifts, spark=spark).store("shifts")
    store.put(1_000, "Ada", 5)
    for key in (1_000, at(1_000), at(1_000).replace(tzinfo=None)):
        row = store.get(key)
        assert row is not None
        assert row["who"] == "Ada"
        assert [one["who"] for one in store.history(key)] == ["Ada"]


def test_users_session_stays_active(spark: SparkSession) -> None:
    before = spark.conf.get("spark.sql.shuffle.partitions")
    driver = TopologyTestDriver(weather, spark=spark)
    driver.pipe("weather", {"origin": "JFK", "temp": 1.0, "timestamp": 0})
    assert SparkSession.active() is spark
    assert spark.conf.get("spark.sql.shuffle.partitions") == before


def test_to_table_keeps_non_nullable_column(spark: SparkSession) -> None:
    """The first record of a key replaces no row, so its ``old`` is null, even if a column of the table
    never is."""
    select = ("left.flight", "coalesce(right.temp, 0.0) as temp")
    matched = flights.left_join(weather, name="matched", select=select)
    driver = TopologyTestDriver(matched.to_table(name="latest"), spark=spark)
    driver.pipe("flights", *({"origin": "JFK", "flight": n, "timestamp": n} for n in (1, 2)))
    assert columns(driver.read("latest"), "flight", "temp") == [(1, 0.0), (2, 0.0)]
