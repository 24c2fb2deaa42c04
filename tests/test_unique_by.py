"""``unique_by``: if a producer sends a record twice, only the first one enters the log."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from pyspark.sql import SparkSession
from pyspark.sql.types import (
    DoubleType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from tests.market import checks, lines, materialized, messages, observed, run
from vt_dagster import (
    FilesSource,
    Materialized,
    Stream,
    Table,
    TopologyError,
    TumblingWindow,
    VersionedTable,
    build_asset,
    build_checks,
    explain,
)
from vt_dagster.core import arrival_order
from vt_dagster.errors import RefusedRecordsError
from vt_dagster.runs import gate
from vt_dagster.runs import pin as arrivals
from vt_dagster.runs.audit import audit
from vt_dagster.runs.erase import erase
from vt_dagster.runs.replay import replay
from vt_dagster.runs.restate import restate
from vt_dagster.runs.run import run_once
from vt_dagster.runs.what_if import what_if
from vt_dagster.storage.arrow_reader import look_up
from vt_dagster.storage.asset_store import AssetStore, stores_of
from vt_dagster.testing import TopologyTestDriver
from vt_dagster.topology.model import with_settings

pytestmark = pytest.mark.usefixtures("few_rows")


MS, HOUR = timedelta(milliseconds=1), timedelta(hours=1)
EPOCH = datetime(2024, 1, 1, tzinfo=timezone.utc)
PAYMENT = StructType(
    [
        StructField("payment_id", StringType()),
        StructField("account", StringType()),
        StructField("amount", LongType()),
        StructField("timestamp", TimestampType()),
    ]
)
RATE = StructType(
    [
        StructField("account", StringType()),
        StructField("rate", DoubleType()),
        StructField("timestamp", TimestampType()),
    ]
)


def payments(**more: Any) -> Stream:
    about: dict[str, Any] = {"unique_by": "payment_id", "within": 100 * MS, **more}
    return Stream("payments", **{"key": "account", "schema": PAYMENT, **about})


def paid(payment_id: str | None, at: Any, amount: int = 1, **more: Any) -> dict[str, Any]:
    about = {"payment_id": payment_id, "account": "a", "amount": amount, "timestamp": at}
    return {**about, **more}


def outcomes(driver: TopologyTestDriver, *records: dict[str, Any]) -> dict[str, int]:
    """Runs the records. Returns the number of records for each outcome."""
    before = driver.metrics("payments")
    driver.pipe("payments", *records)
    return {n: c for n, c in (Counter(driver.metrics("payments")) - Counter(before)).items() if c}


# -- the rule ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("runs", [1, 5])
def test_value_is_remembered_for_within(spark: SparkSession, runs: int) -> None:
    """The bounds: a record exactly ``within`` behind stream time is remembered, and is not late."""
    of_each: list[tuple[dict[str, Any], str]] = [
        (paid("p1", 1000), "applied"),
        (paid("p1", 1000), "duplicate"),
        (paid("p2", 1100), "applied"),
        (paid("p1", 1000), "duplicate"),  # exactly within
        (paid("old", 1000), "applied"),  # exactly within
        (paid("p2", 1101), "duplicate"),  # and stream time is 1101 now
        (paid("p1", 1000), "late"),  # its value has expired, so it may be a duplicate
        (paid("p1", 1001), "applied"),  # its value has expired, and it is in time: a new record
        (paid("p2", 1201), "duplicate"),  # 100 after the duplicate that came last
        (paid("p2", 1302), "applied"),  # 101 after it
        (paid(None, 1302), "applied"),
        (paid(None, 1302), "applied"),
        (paid(None, 1000), "applied"),  # a null is not compared, so never late
        (paid("p9", 1302, account=None), "quarantined"),
        (paid("p9", 1302), "applied"),
    ]
    driver = TopologyTestDriver(payments(), spark=spark)
    size = len(of_each) // runs
    for start in range(0, len(of_each), size):
        some = of_each[start : start + size]
        counted = outcomes(driver, *[record for record, _ in some])
        counted.pop("quarantined/null_key", None)
        assert counted == Counter(outcome for _, outcome in some), start
    assert [r["payment_id"] for r in driver.read("payments")] == [
        record["payment_id"] for record, outcome in of_each if outcome == "applied"
    ]


def reference(records: Sequence[dict[str, Any]], within: int) -> list[str]:
    """The outcome of each record: the rule in plain Python, which keeps all values."""
    now: dict[int, int] = {}
    latest: dict[tuple[Any, ...], int] = {}
    found: list[str] = []
    for one in records:
        home, at = one["partition"], one["timestamp"]
        now[home] = max(now.get(home, at), at)
        value = (home, one["payment_id"], one["amount"])
        if None in value:
            found.append("applied")
            continue
        since = now[home] - within
        if value in latest and latest[value] >= since:
            found.append("duplicate")
        else:
            found.append("late" if at < since else "applied")
        latest[value] = max(latest.get(value, at), at)
    return found


@pytest.mark.parametrize(("seed", "chunked"), [(0, False), (2, True)])
def test_outcomes_equal_reference_for_any_split(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch, seed: int, chunked: bool
) -> None:
    """The outcomes equal the reference, however records are split into runs. ``chunked``: several
    tasks order a partition, as in runs of many records."""
    if chunked:
        for module, number in ((arrival_order, 7), (arrivals, -1), (gate, -1)):
            monkeypatch.setattr(module, "CHUNK", number)
    chance = random.Random(seed)
    records: list[dict[str, Any]] = []
    for i in range(300):
        if records and chance.random() < 0.4:  # sent again, with the same time or another
            old = chance.choice(records[-80:])
            at = old["timestamp"] if chance.random() < 0.7 else 10 * i + chance.randrange(200)
            records.append({**old, "timestamp": at})
            continue
        name = None if chance.random() < 0.05 else f"p{chance.randrange(60)}"
        at = max(0, 10 * i - chance.randrange(40) ** 2 // 2)
        amount = chance.choice([1, 1, 1, 2])
        records.append(paid(name, at, amount, partition=chance.randrange(3)))
    node = payments(unique_by=["payment_id", "amount"], within=300 * MS, partitions=3)
    expected = reference(records, 300)
    assert {*expected} == {"applied", "duplicate", "late"}
    whole, split = (TopologyTestDriver(node, spark=spark) for _ in range(2))
    whole.pipe("payments", *records)
    ends = sorted(chance.sample(range(1, len(records)), 1))
    for start, end in zip([0, *ends], [*ends, len(records)], strict=True):
        split.pipe("payments", *records[start:end])
    for home in range(3):
        own = [o for r, o in zip(records, expected, strict=True) if r["partition"] == home]
        for driver in (whole, split):
            counted = {n: c for n, c in driver.metrics("payments", home).items() if c}
            assert counted == Counter(own)

    def log(driver: TopologyTestDriver) -> list[tuple[Any, ...]]:
        names = ("partition", "offset", "payment_id", "amount")
        rows = [
            (*(row[n] for n in names), round(row["timestamp"].timestamp() * 1000))
            for row in driver.read("payments")
        ]
        return sorted(rows)

    places, wanted = Counter[int](), list[tuple[Any, ...]]()
    for one, outcome in zip(records, expected, strict=True):
        if outcome == "applied":
            home = one["partition"]
            wanted.append((home, places[home], one["payment_id"], one["amount"], one["timestamp"]))
            places[home] += 1
    assert log(whole) == sorted(wanted)
    assert log(split) == sorted(wanted)


# -- what it is for ----------------------------------------------------------------------------------


def test_corrected_join_by_unique_key(spark: SparkSession) -> None:
    rates = VersionedTable("rates", key="account", schema=RATE, history_retention=100 * MS)

    def followed(stream: Stream) -> Any:
        select = ["left.*", "right.rate"]
        about: dict[str, Any] = {"corrected_for": 50 * MS, "key": "payment_id"}
        return stream.left_join(rates, name="followed", select=select, **about)

    p3, late_rate = paid("p3", 1000), {"account": "a", "rate": 2.0, "timestamp": 990}
    stopped = TopologyTestDriver(followed(payments(unique_by=None, within=None)), spark=spark)
    stopped.pipe("payments", p3)
    with pytest.raises(RefusedRecordsError, match="set unique_by of the stream"):
        stopped.pipe("payments", p3)
    driver = TopologyTestDriver(followed(payments()), spark=spark)
    for records in ([p3], [p3, paid("p4", 1010), p3]):
        driver.pipe("payments", *records)
    driver.pipe("rates", late_rate)
    told = [(r["payment_id"], r["rate"]) for r in driver.table("followed")]
    assert told == [("p3", 2.0), ("p4", 2.0)]
    assert driver.metrics("payments")["duplicate"] == 2


def test_windowed_sum_counts_duplicate_once(spark: SparkSession) -> None:
    stream = payments()
    windows = stream.group_by().windowed_by(TumblingWindow(50 * MS, grace=50 * MS))
    driver = TopologyTestDriver(windows.aggregate({"amount": "sum(amount)"}, name="sums"), spark=spark)
    p3 = paid("p3", 1000, 30)
    driver.pipe("payments", paid("p1", 1000, 10), p3, p3)
    driver.pipe("payments", p3, paid("p2", 1010, 2))
    assert [row["amount"] for row in driver.table("sums")] == [42]


# -- through Dagster and Delta -----------------------------------------------------------------------


class Shop:
    """Payments from JSON files, and their warehouse."""

    def __init__(self, root: Path, spark: SparkSession, **more: Any) -> None:
        self.root, self.spark, self.warehouse = root, spark, str(root / "warehouse")
        source = FilesSource(str(root / "landing"))
        self.payments = payments(**{"within": HOUR, "source": source, **more})

    def land(self, file: str, *records: dict[str, Any]) -> None:
        path = self.root / "landing" / f"{file}.jsonl"
        path.parent.mkdir(exist_ok=True)
        path.write_text(lines(*records), encoding="utf-8")

    def take(self, file: str, *records: dict[str, Any], node: Stream | None = None) -> dict[str, int]:
        self.land(file, *records)
        commit = run_once(node or self.payments, stores_of(self.warehouse, self.spark)).commit
        assert commit is not None
        return {n: c for n, c in commit.counts.items() if c}

    def store(self, node: Stream | None = None) -> AssetStore:
        return AssetStore(self.warehouse, node or self.payments, self.spark)

    def remembered(self) -> set[str]:
        state = self.store().state(self.store().head())
        assert state is not None
        return {row["payment_id"] for row in state.collect()}

    def log(self, node: Stream | None = None) -> list[str]:
        name = (node or self.payments).name
        rows = look_up(self.warehouse, name, "log").sort_by("offset")
        return rows.column("payment_id").to_pylist()


def at(minute: int) -> str:
    return (EPOCH + timedelta(minutes=minute)).isoformat()


@pytest.fixture
def shop(tmp_path: Path, spark: SparkSession) -> Shop:
    return Shop(tmp_path, spark)


def test_run_reports_duplicates(shop: Shop, spark: SparkSession) -> None:
    assets = [build_asset(shop.payments), build_checks(shop.payments)]
    about: dict[str, Any] = {"instance": dg.DagsterInstance.ephemeral()}
    shop.land("1", paid("p1", at(0)), paid("p2", at(5)), paid("p1", at(0)))
    first = run(assets, shop.warehouse, **about)
    assert first.success, messages(first)
    told = materialized(first, "payments")
    assert (told["records_applied"], told["records_duplicate"], told["records_late"]) == (2, 1, 0)
    assert "1 duplicate" in told["at_a_glance"]
    shop.land("2", paid("p2", at(5)), paid("p3", at(66)), paid("p1", at(0)), paid("p2", at(5)))
    second = run(assets, shop.warehouse, **about)
    assert second.success, messages(second)
    told = materialized(second, "payments")
    # By then, p1 and the second p2 are more than an hour behind.
    assert (told["records_applied"], told["records_duplicate"], told["records_late"]) == (1, 1, 2)
    empty = run(assets, shop.warehouse, **about)
    assert empty.success, messages(empty)
    assert observed(empty, "payments")
    for result in (first, second, empty):
        found = checks(result)
        assert found
        assert all(one.passed for one in found.values())
    assert shop.log() == ["p1", "p2", "p3"]
    # Values that are more than ``within`` behind stream time are not kept.
    assert shop.remembered() == {"p3"}
    quarantine = shop.store().quarantine()
    assert quarantine is not None
    rows = quarantine.orderBy("batch", "position").collect()
    assert [(r["batch"], r["position"], r["reason"]) for r in rows] == [
        (1, 3, "duplicate"),
        (2, 1, "duplicate"),
        (2, 3, "late"),
        (2, 4, "late"),
    ]
    assert [json.loads(r["raw"])["payment_id"] for r in rows] == ["p1", "p2", "p1", "p2"]
    assert all(one.passed for one in audit(shop.store()))
    # ``explain`` needs neither Spark nor the definitions.
    of_p2 = explain("payments", offset=(0, 1), warehouse=shop.warehouse)
    assert [(one.rule, one.because) for one in of_p2.decisions] == [
        ("applied", "on arrival, no record of the last 1 hour of stream time had its payment_id")
    ]
    assert [(one.reason, one.batch) for one in of_p2.rejected] == [("duplicate", 2)]
    assert of_p2.notes == ("duplicates in quarantine that mention its payment_id: 1",)
    assert of_p2.rejected[0].description.startswith("an earlier record of its partition")


def test_replay_and_restate_make_same_log(shop: Shop, spark: SparkSession) -> None:
    counted = shop.payments.group_by().count(name="counted", materialized=Materialized())
    shop.take("1", paid("p1", at(0)), paid("p2", at(5)), paid("p1", at(0)))
    shop.take("2", paid("p2", at(5)), paid("p3", at(66)), paid("p4", at(70)), paid("p3", at(66)))
    run_once(counted, stores_of(shop.warehouse, spark))
    before = look_up(shop.warehouse, "payments", "log").to_pylist()
    again = replay(shop.warehouse, shop.payments, "again", spark)
    assert look_up(shop.warehouse, "again", "log").to_pylist() == before
    head = again.head()
    assert head is not None
    assert head.commit.totals["duplicate"] == 3
    done = restate(shop.warehouse, shop.payments, EPOCH, spark, [shop.payments, counted])
    assert done == ["payments", "counted"]
    assert shop.log() == ["p1", "p2", "p3", "p4"]
    assert [r["count"] for r in shop.store(counted).read().collect()] == [4]
    # With a shorter within, the second p2 is late instead of a duplicate, so the log stays the same.
    shorter = with_settings(shop.payments, {"within": "1m"})
    assert what_if(shop.warehouse, shorter, spark).share == 0
    neither = replace(shop.payments, unique_by=None, within=None)
    assert what_if(shop.warehouse, neither, spark).added == 3
    both = with_settings(neither, {"within": "1h", "unique_by": '["payment_id", "amount"]'})
    assert (both.within, both.unique_by) == (HOUR, ("payment_id", "amount"))


def test_unique_by_set_on_live_stream(shop: Shop, spark: SparkSession) -> None:
    """The values of records in the log are known at once, as far back as the new settings reach."""
    p1, p2 = paid("p1", at(0)), paid("p2", at(50))
    without = replace(shop.payments, unique_by=None, within=None)
    assert shop.take("1", p1, p1, p2, paid(None, at(50)), node=without)["applied"] == 4
    assert shop.take("2", p1, p2, paid("p3", at(70)), p1) == {
        **{"in": 4, "applied": 1},
        **{"duplicate": 2, "late": 1},
    }
    assert shop.remembered() == {"p2", "p3"}
    longer = replace(shop.payments, within=2 * HOUR)
    assert shop.take("3", p1, p2, node=longer) == {"in": 2, "duplicate": 2}
    assert shop.remembered() == {"p1", "p2", "p3"}
    others = replace(longer, unique_by=["payment_id", "amount"])
    assert shop.take("4", {**p1, "amount": 7}, p2, node=others) == {
        **{"in": 2, "applied": 1, "duplicate": 1}
    }
    renamed = StructType([StructField("id", StringType()), *PAYMENT.fields[1:]])
    named = replace(others, schema=renamed, unique_by=["id", "amount"], renamed={"payment_id": "id"})
    assert shop.take("5", p2, {**p2, "amount": 8}, node=named)["duplicate"] == 1
    again = {"id": "p2", "account": "a", "amount": 8, "timestamp": at(50)}
    assert shop.take("6", again, node=named) == {"in": 1, "duplicate": 1}
    assert shop.take("7", again, node=replace(named, unique_by=None, within=None))["applied"] == 1
    assert all(one.passed for one in audit(shop.store(named)))


def test_renamed_column_keeps_remembered_values(shop: Shop) -> None:
    """A duplicate is not in the log, but its value is remembered, also after its column is renamed."""
    shop.take("1", paid("p1", at(0)), paid("p1", at(50)), paid("p2", at(100)))
    renamed = StructType([StructField("id", StringType()), *PAYMENT.fields[1:]])
    names = {"payment_id": "id"}
    named = replace(shop.payments, schema=renamed, unique_by="id", renamed=names)
    again = {"id": "p1", "account": "a", "amount": 1, "timestamp": at(100)}
    assert shop.take("2", again, node=named) == {"in": 1, "duplicate": 1}


def test_longer_within_keeps_remembered_values(shop: Shop) -> None:
    """A value that a duplicate has kept remembered is no older with a longer ``within``."""
    shop.take("1", paid("p1", at(0)), paid("p1", at(50)), paid("p2", at(100)))
    longer = replace(shop.payments, within=HOUR + timedelta(minutes=1))
    assert shop.take("2", paid("p1", at(100)), node=longer) == {"in": 1, "duplicate": 1}


def test_erased_key_is_forgotten(shop: Shop, spark: SparkSession) -> None:
    own, other = paid("p1", at(0), account="erin"), paid("p2", at(0), account="bob")
    shop.take("1", own, other, own, {**other, "account": "erin"})
    assert shop.log() == ["p1", "p2"]
    done = erase(shop.warehouse, shop.payments, spark, key=["erin"], reason="asked to")
    assert done.searched["payments/log"].erased == 1
    assert done.searched["payments/quarantine"].erased == 2
    state = shop.store().state(shop.store().head())
    assert state is not None
    assert [(r["account"], r["payment_id"]) for r in state.collect()] == [("bob", "p2")]
    assert all(one.passed for one in audit(shop.store()))
    # A repeated record of the erased key is new. A repeated record of another key is a duplicate.
    assert shop.take("2", own, other) == {"in": 2, "applied": 1, "duplicate": 1}
    assert all(one.passed for one in audit(shop.store()))


# -- declarations ------------------------------------------------------------------------------------


OF_MAP = StructType([*PAYMENT.fields, StructField("tags", MapType(StringType(), StringType()))])


@pytest.mark.parametrize(
    ("about", "said"),
    [
        ({"within": None}, "unique_by needs within, .*, got none; set"),
        ({"unique_by": None}, "within needs unique_by, .*, got none; set"),
        ({"unique_by": []}, r"expected unique_by to be a list of columns, .*, got \[\]; correct it"),
        (
            {"unique_by": "id"},
            r"expected unique_by to name columns, .*, got \['id'\], which are not in",
        ),
        ({"unique_by": ["amount", "amount"]}, "expected unique_by to be a list of columns, each once"),
        ({"unique_by": "tags", "schema": OF_MAP}, r".*got \['tags map<string,string>'\]; name"),
        ({"within": "7 days"}, "within must be a datetime.timedelta, got '7 days'"),
        ({"within": timedelta(0)}, "within must be one duration longer than 0, got"),
        ({"within": {0: HOUR}}, "within must be one duration longer than 0, got"),
        ({"within": -HOUR}, "within must be between 0 and"),
    ],
)
def test_invalid_unique_by_is_refused(about: dict[str, Any], said: str) -> None:
    with pytest.raises(TopologyError, match=f"^payments: {said}"):
        payments(**about)


def test_unique_by_is_only_for_source_streams() -> None:
    about: dict[str, Any] = {"key": "account", "schema": PAYMENT}
    with pytest.raises(TopologyError, match="rows: unique_by is for streams, got a Table, in which"):
        Table("rows", **about, unique_by="payment_id", within=HOUR)
    with pytest.raises(TopologyError, match="rows: within is for streams, got a VersionedTable"):
        VersionedTable("rows", **about, history_retention=HOUR, within=HOUR)
    said = "big: unique_by needs a stream with a source, got the result of an operator, which no"
    with pytest.raises(TopologyError, match=said):
        payments().select_key("account", name="big", unique_by="payment_id", within=HOUR)
    assert payments(unique_by="account").unique_by == ("account",)
