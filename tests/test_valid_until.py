"""Versions with their own end: ``valid_until``."""

from __future__ import annotations

import json
from datetime import datetime, timedelta, timezone
from pathlib import Path
from random import Random
from typing import Any

import pyarrow.compute as pc
import pytest
from pyspark.sql import SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import StringType, StructField, StructType, TimestampType

from vt_dagster import (
    FeatureView,
    FilesSource,
    Materialized,
    Stream,
    TopologyError,
    VersionedTable,
    explain,
    lateness,
)
from vt_dagster.core.as_of_join import as_of_join
from vt_dagster.core.versioned_table import clip_at_valid_until
from vt_dagster.orchestration.translator import code_version
from vt_dagster.runs.audit import audit
from vt_dagster.runs.run import run_once, tiles_of
from vt_dagster.runs.training_set_run import TrainingRun
from vt_dagster.storage.arrow_reader import look_up
from vt_dagster.storage.asset_store import stores_of
from vt_dagster.testing import TopologyTestDriver
from vt_dagster.topology.feature_views import TrainingSet
from vt_dagster.topology.model import Table

DAY = timedelta(days=1)
SCHEMA = StructType(
    [
        StructField("k", StringType()),
        StructField("v", StringType()),
        StructField("expires_at", TimestampType()),
        StructField("timestamp", TimestampType()),
    ]
)
START = datetime(2024, 1, 1, tzinfo=timezone.utc)


def at(second: int) -> datetime:
    return START + timedelta(seconds=second)


def table(**more: Any) -> VersionedTable:
    about = {"key": "k", "schema": SCHEMA, "history_retention": DAY, "valid_until": "expires_at"}
    return VersionedTable("offers", **{**about, **more})


def stream(**more: Any) -> Stream:
    return Stream("sales", key="k", schema=StructType([SCHEMA["k"], SCHEMA["timestamp"]]), **more)


def offer(v: str | None, second: int, until: int | None = None, k: str = "a") -> dict[str, Any]:
    end = None if until is None else at(until)
    return {"k": k, "v": v, "timestamp": at(second), "expires_at": end}


def sale(second: int) -> dict[str, Any]:
    return {"k": "a", "timestamp": at(second)}


def seconds(moment: datetime | None) -> int | None:
    return None if moment is None else round((moment - START).total_seconds())


def versions(driver: TopologyTestDriver, name: str = "offers") -> list[tuple[Any, ...]]:
    return [(r["v"], seconds(r["valid_from"]), seconds(r["valid_to"])) for r in driver.versions(name)]


def test_version_ends_at_its_valid_until(spark: SparkSession) -> None:
    """A version ends at its ``valid_until``. A late version that begins before that end ends it
    earlier, and has its own end."""
    offers = table(tombstone="v is null")
    joined = stream().left_join(offers, name="joined", select=["right.v", "right.valid_to as until"])
    before = stream().left_join(offers, name="before", select=["right.v"], at="before")
    good = offers.filter("v <> 'z'", name="good")
    kept = stream().left_join(good, name="kept", select=["right.v"])
    driver = TopologyTestDriver(joined, before, kept, spark=spark)
    driver.pipe("offers", offer("x", 1, 10), offer("w", 20, 30))
    assert versions(driver) == [("x", 1, 10), ("w", 20, 30)]
    sales = [sale(n) for n in (1, 9, 10, 15, 20, 29, 30, 99)]
    driver.pipe("sales", *sales)
    told = [(r["v"], seconds(r["until"])) for r in driver.read("joined")]
    assert (
        told
        == [("x", 10), ("x", 10), (None, None), (None, None)] + [("w", 30)] * 2 + [(None, None)] * 2
    )
    assert [r["v"] for r in driver.read("before")] == [None, *"xx", None, None, *"ww", None]
    driver.pipe("offers", offer("z", 5), offer(None, 25))
    assert versions(driver) == [("x", 1, 5), ("z", 5, 20), ("w", 20, 25), (None, 25, None)]
    driver.read("kept")
    driver.pipe("sales", *[sale(n) for n in (1, 5, 15, 20, 25)])
    assert [r["v"] for r in driver.read("joined")] == ["x", "z", "z", "w", None]
    assert [r["v"] for r in driver.read("kept")] == ["x", None, None, "w", None]


def test_ended_version_is_not_current(spark: SparkSession) -> None:
    driver = TopologyTestDriver(table(), spark=spark)
    driver.pipe("offers", offer("x", 1, 10), offer("y", 9, k="b"))
    assert [r["v"] for r in driver.table("offers")] == ["x", "y"]
    assert driver.store("offers").get("a") is not None
    driver.pipe("offers", offer("y", 10, k="b"))
    assert [r["v"] for r in driver.table("offers")] == ["y"]
    store = driver.store("offers")
    assert store.get("a") is None
    assert store.get("a", at(10)) is None
    assert store.get("a", at(9)) is not None
    # The ended version still counts as the newest of its key, until a newer record comes.
    driver.read("offers")
    driver.pipe("offers", offer("late", 0), offer("next", 12))
    assert [r["is_latest"] for r in driver.read("offers")] == [False, True]
    assert versions(driver)[:3] == [("late", 0, 1), ("x", 1, 10), ("next", 12, None)]


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.endurance)])
def test_every_join_strategy_gives_same_result(spark: SparkSession, seed: int) -> None:
    random = Random(seed)
    stored: list[tuple[Any, ...]] = []
    for key in "ab":
        begins = sorted(random.sample(range(100), 12))
        for n, (begin, end) in enumerate(zip(begins, [*begins[1:], None], strict=True)):
            until = random.choice([None, begin - 1, begin, begin + 3, begin + 50])
            ends = None if end is None else at(end)
            own = None if until is None else at(until)
            stored.append((key, 0, at(begin), ends, own, n % 5 == 4, n))
    kinds = "k string, partition int, valid_from timestamp, valid_to timestamp, u timestamp"
    rows = clip_at_valid_until(
        spark.createDataFrame(stored, f"{kinds}, is_tombstone boolean, n int"), "u"
    )
    moments = [
        (k, at(t), i) for i, (k, t) in enumerate((k, t) for k in "abc" for t in range(0, 130, 2))
    ]
    left = spark.createDataFrame(moments, "k string, timestamp timestamp, i int")
    first, last = (int(m.timestamp() * 1e6) for m in (moments[0][1], moments[-1][1]))
    horizon = F.lit(at(20))

    def expected(key: str, moment: datetime) -> int | None:
        for k, _, begin, end, until, deleted, n in stored:
            ends = min((m for m in (end, until) if m is not None), default=None)
            if k == key and begin <= moment and (ends is None or moment < ends):
                return n if not deleted and (ends is None or moment >= at(20)) else None
        return None

    tiles, _ = tiles_of(rows, key=["k"], first=first, last=last, crowd=100)
    for way in ("sorted", "broadcast", tiles):
        found = as_of_join(
            left, rows, left_key=["k"], right_key=["k"], horizon=horizon, name="found", strategy=way
        )
        told = {row.i: row.n for row in found.select("i", "found.n").collect()}
        assert told == {i: expected(k, moment) for k, moment, i in moments}, way


@pytest.mark.usefixtures("few_rows")
def test_explain_ended_version(spark: SparkSession, tmp_path: Path) -> None:
    """``explain`` says that the version had ended. Reads with Spark and without it give the same
    versions."""
    for name in ("offers", "sales"):
        (tmp_path / name).mkdir()
    offers = table(source=FilesSource(str(tmp_path / "offers")))
    sales = stream(source=FilesSource(str(tmp_path / "sales")))
    joined = sales.left_join(offers, name="joined", select=["right.v"])
    warehouse = str(tmp_path / "warehouse")
    stores = stores_of(warehouse, spark)

    def land(name: str, file: str, *records: dict[str, Any]) -> None:
        lines = "\n".join(json.dumps(r, default=datetime.isoformat) for r in records)
        (tmp_path / name / f"{file}.jsonl").write_text(lines)

    land("offers", "1", offer("x", 1, 10), offer("y", 20, 30), offer("b", 25, k="b"))
    land("sales", "1", sale(5), sale(15))
    for node in (offers, sales, joined):
        run_once(node, stores)
    store = stores(offers)

    def both(what: str, as_of: int | None = None) -> list[tuple[Any, ...]]:
        moment = None if as_of is None else at(as_of).isoformat()
        here = store.read(what, as_of=moment).select("v", "valid_from", "valid_to").toArrow()
        there = look_up(warehouse, "offers", what, as_of=moment).select(here.column_names)
        told = [sorted(map(str, rows.to_pylist())) for rows in (here, there)]
        assert told[0] == told[1]
        rows = here.to_pylist()
        return sorted((r["v"], seconds(r["valid_from"]), seconds(r["valid_to"])) for r in rows)

    assert both("versions") == [("b", 25, None), ("x", 1, 10), ("y", 20, 30)]
    assert both("current") == [("b", 25, None), ("y", 20, 30)]
    assert both("current", 9) == [("x", 1, 10)]
    assert both("current", 10) == both("current", 15) == []
    found = [explain("joined", warehouse=warehouse, offset=f"0:{n}") for n in (0, 1)]
    assert [[d.rule for d in one.decisions][-1] for one in found] == ["as_of", "ended"]
    land("offers", "2", offer("b", 30, k="b"), offer("m", 5))
    run_once(offers, stores)
    assert both("versions") == [
        ("b", 25, 30),
        ("b", 30, None),
        ("m", 5, 20),
        ("x", 1, 5),
        ("y", 20, 30),
    ]
    assert both("current") == [("b", 30, None)]
    assert both("current", 15) == [("m", 5, 20)]
    assert [one.name for one in audit(store) if not one.passed] == []
    rows = look_up(warehouse, "joined")
    assert pc.sum(rows.column("v").is_null()).as_py() == 1


@pytest.mark.usefixtures("few_rows")
def test_training_set_has_no_match_after_end(spark: SparkSession, tmp_path: Path) -> None:
    """A version ends at the next version, or before that at its ``valid_until``."""
    warehouse, random = str(tmp_path / "warehouse"), Random(11)
    source = {name: FilesSource(str(tmp_path / name)) for name in ("offers", "sales")}
    offers = table(source=source["offers"], partitions=1)
    sales = stream(source=source["sales"], partitions=1)
    times = random.sample(range(0, 60, 2), 12)
    ends = {time: random.choice([None, time + 3, time + 9]) for time in times}
    rows = {
        "offers": [offer(f"v{time}", time, end) for time, end in ends.items()],
        "sales": [sale(second) for second in range(70)],
    }
    for node in (offers, sales):
        (tmp_path / node.name).mkdir()
        lines = "\n".join(json.dumps(one, default=datetime.isoformat) for one in rows[node.name])
        (tmp_path / node.name / "1.jsonl").write_text(lines)
        run_once(node, stores_of(warehouse, spark))
    views = (FeatureView(offers, columns=["v"], as_known="now"),)
    TrainingRun(TrainingSet("examples", sales, views), str(tmp_path / "set"), warehouse, spark).run()
    found = spark.read.format("delta").load(str(tmp_path / "set")).toArrow().to_pylist()
    right: dict[int | None, str | None] = {}
    for second in range(70):
        last = max((time for time in times if time <= second), default=None)
        end = None if last is None else ends[last]
        right[second] = None if last is None or (end is not None and second >= end) else f"v{last}"
    assert {seconds(r["timestamp"]): r["v"] for r in found} == right
    assert list(right.values()).count(None) > 9


def test_record_based_consumers_are_refused() -> None:
    offers, other = table(), VersionedTable("o", key="k", schema=SCHEMA, history_retention=DAY)
    for make, said in (
        (lambda: offers.join(other, name="m", select=["left.v"]), "a table-table join"),
        (lambda: other.join(offers, name="m", select=["left.v"]), "a table-table join"),
        (lambda: offers.join(other, foreign_key="v", name="m", select=["left.v"]), "foreign-key join"),
        (lambda: offers.group_by("v").count(name="m"), "group_by"),
        (lambda: stream().join(offers, name="m", corrected_for=DAY), "corrected_for"),
        (lambda: stream().join(offers, name="m", as_known="when_recorded"), "what was known"),
        (lambda: FeatureView(offers), "what was known"),
        (lambda: offers.map_values("v", name="m"), "without the column"),
        (lambda: offers.filter("true", name="m", materialized=Materialized()), "without versions"),
        (lambda: table(valid_until="v"), "type timestamp"),
        (lambda: table(valid_until="no"), "type timestamp"),
    ):
        with pytest.raises(TopologyError, match=said) as error:
            make()
        assert "valid_until" in str(error.value)
    longer = offers.map_values("*", name="m", materialized=Materialized(history_retention=DAY))
    assert longer.valid_until == "expires_at"  # type: ignore[attr-defined]
    assert code_version(table()) != code_version(table(valid_until=None))
    assert not hasattr(Table("t", key="k", schema=SCHEMA), "valid_until")


@pytest.mark.usefixtures("few_rows")
def test_lateness_counts_ended_versions(spark: SparkSession, tmp_path: Path) -> None:
    """``lateness`` counts a result as wrong if all known versions give another one, also if the right
    version has expired from the history."""
    warehouse, retention = str(tmp_path / "warehouse"), timedelta(seconds=60)
    source = {name: FilesSource(str(tmp_path / name)) for name in ("offers", "sales")}
    offers = table(source=source["offers"], partitions=1, history_retention=retention)
    sales = stream(source=source["sales"], partitions=1)
    joins = [
        sales.left_join(offers, name=f"sold_{when}", select=["left.*", "right.v"], at=when)
        for when in ("at_or_before", "before")
    ]
    stores = stores_of(warehouse, spark)

    def run(file: int, rows: dict[Any, list[dict[str, Any]]]) -> None:
        for node, some in rows.items():
            (tmp_path / node.name).mkdir(exist_ok=True)
            lines = [json.dumps(one, default=datetime.isoformat) for one in some]
            (tmp_path / node.name / f"{file}.jsonl").write_text("\n".join(lines))
            run_once(node, stores)
        for join in joins:
            run_once(join, stores)

    run(1, {offers: [offer("x", 0, 10)], sales: [sale(s) for s in (3, 5, 6, 8, 9, 10, 11, 12)]})
    run(2, {offers: [offer("y", 5, 8)]})
    # After y has ended at 8 there is no match: x, which would last until 10, does not return.
    right = [["x", "y", "y", *[None] * 5], ["x", "x", "y", "y", *[None] * 4]]
    for join, should in zip(joins, right, strict=True):
        found = [r["v"] for r in stores(join).read().orderBy("timestamp").collect()]
        told = lateness(join, grace=["0s"], warehouse=warehouse).choices[0]
        wrong = sum(one != other for one, other in zip(found, should, strict=True))
        assert (told.of, told.wrong, told.expired) == (8, wrong, 0)
        assert wrong == 4
    # A version that ended by itself expires from the history like one that a newer version ended.
    run(3, {offers: [offer("z", 20, 500), offer("far", 200, k="b")], sales: [sale(30)]})
    for join in joins:
        found = {r["timestamp"]: r["v"] for r in stores(join).read().toArrow().to_pylist()}
        assert found[at(30)] is None
        told = lateness(join, grace=["0s"], warehouse=warehouse).choices[0]
        assert (told.of, told.wrong, told.expired) == (9, 5, 1)
