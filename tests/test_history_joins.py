"""Joins of two versioned tables with ``history="complete"``: a result is split where either side's
version begins or ends."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import duckdb
import pandas as pd
import pytest
from pyspark.sql import SparkSession
from pyspark.sql.types import LongType, StringType, StructField, StructType, TimestampType

from tests.core.test_spark_plans import count, plan
from tests.storage.topology import EPOCH, Topology
from vt_dagster import (
    FilesSource,
    Materialized,
    Table,
    TopologyError,
    VersionedTable,
    explain,
    read,
)
from vt_dagster.columns import OFFSET, RECORDED_AT
from vt_dagster.runs.audit import audit
from vt_dagster.runs.replay import replay
from vt_dagster.runs.run import Run, run_once
from vt_dagster.spark.jars import pyspark_series
from vt_dagster.spark.settings import settings
from vt_dagster.storage.asset_store import AssetStore, stores_of
from vt_dagster.testing import TopologyTestDriver

pytestmark = pytest.mark.usefixtures("few_rows")


class KilledError(Exception):
    pass


MS = timedelta(milliseconds=1)
KINDS = ("inner", "left", "outer")


def schema(value: str) -> StructType:
    fields = [("k", StringType()), (value, LongType()), ("timestamp", TimestampType())]
    return StructType([StructField(name, kind) for name, kind in fields])


def table(name: str, retention: timedelta = 1000 * MS, versioned: bool = True) -> Table:
    value = name[0]
    about: dict[str, Any] = {"key": "k", "schema": schema(value), "tombstone": f"{value} is null"}
    if not versioned:
        return Table(name, **about)
    return VersionedTable(name, history_retention=retention, **about)


LEFT, RIGHT = table("left"), table("right")


def joined(kind: str, **more: Any) -> Table:
    left, right = LEFT, RIGHT
    join: Callable[..., Table] = left.join if kind == "inner" else getattr(left, f"{kind}_join")
    about: dict[str, Any] = {"history": "complete", "name": f"{kind}_of_both", **more}
    return join(right, select=["left.l", "right.r"], **about)


def at(moment: datetime) -> int:
    """Milliseconds since the epoch."""
    return (moment - datetime(1970, 1, 1, tzinfo=timezone.utc)) // MS


def record(name: str, key: str, value: int | None, at: int) -> dict[str, Any]:
    return {"k": key, name[0]: value, "timestamp": at}


def versions(driver: TopologyTestDriver, name: str) -> list[tuple[Any, ...]]:
    """Returns key, values, ``valid_from`` and ``valid_to`` of each version, in order."""
    found = [
        (r["k"], r["l"], r["r"], at(r["valid_from"]), r["valid_to"] and at(r["valid_to"]))
        for r in driver.versions(f"{name}_of_both")
        if not r["is_tombstone"]
    ]
    return sorted(found, key=lambda row: (row[0], row[3]))


def test_late_version_is_split_at_other_side(spark: SparkSession) -> None:
    driver = TopologyTestDriver(joined("left"), spark=spark)
    right = [record("right", "a", 7, 20), record("right", "a", 8, 30)]
    driver.run({"left": [record("left", "a", 1, 10)], "right": right})
    driver.read("left_of_both")
    # The version at 5 is valid until 10 and replaces no result; the one at 15 splits existing results.
    driver.pipe("left", record("left", "a", 2, 5), record("left", "a", 3, 15))
    rows = driver.read("left_of_both")
    told = [(r["l"], r["r"], at(r["timestamp"]), r["is_latest"]) for r in rows]
    assert told == [(2, None, 5, False), (3, None, 15, False), (3, 7, 20, False), (3, 8, 30, True)]
    assert versions(driver, "left") == [
        ("a", 2, None, 5, 10),
        ("a", 1, None, 10, 15),
        ("a", 3, None, 15, 20),
        ("a", 3, 7, 20, 30),
        ("a", 3, 8, 30, None),
    ]


def test_deletion_ends_results(spark: SparkSession) -> None:
    nodes = [joined(kind) for kind in KINDS]
    driver = TopologyTestDriver(*nodes, spark=spark)
    driver.run({"left": [record("left", "a", 1, 10)], "right": [record("right", "a", 7, 20)]})
    names = [node.name for node in nodes]
    for name in names:
        driver.read(name)
    gone = record("right", "a", None, 20), record("left", "a", None, 15)
    driver.run({"right": [gone[0], record("right", "b", 1, 5)], "left": [gone[1]]})
    assert versions(driver, "inner") == []
    assert versions(driver, "left") == [("a", 1, None, 10, 15)]
    # No tombstone is emitted for a time that never had a row: b has a result in the outer join alone.
    assert [sum(r["k"] == "b" for r in driver.read(name)) for name in names] == [0, 0, 1]


def test_results_beyond_history_retention_are_late(spark: SparkSession) -> None:
    history = Materialized(history_retention=10 * MS)
    driver = TopologyTestDriver(joined("inner", materialized=history), spark=spark)
    right = [record("right", "a", 7, 1), record("right", "b", 7, 50)]
    driver.run({"right": right, "left": [record("left", "b", 1, 50)]})
    driver.pipe("left", record("left", "a", 1, 39), record("left", "a", 2, 40))
    told = driver.read("inner_of_both")
    assert [(r["l"], at(r["timestamp"])) for r in told] == [(1, 50), (2, 40)]
    assert driver._stores["inner_of_both"].head().commit.counts["late"] == 1


def test_expired_version_is_not_emitted_as_unmatched(spark: SparkSession) -> None:
    """A result for a time at which a side's version has expired is late, and is not emitted as a row
    without a match."""
    short = table("left", 100 * MS), table("right", 100 * MS)
    about: dict[str, Any] = {"history": "complete", "select": ["left.l", "right.r"]}
    first = short[0].left_join(short[1], name="left_of_both", **about)
    driver = TopologyTestDriver(first, spark=spark)
    right = [("a", 7, 10), ("a", 8, 20), ("b", 9, 500)]
    driver.pipe("right", *(record("right", *one) for one in right))
    driver.pipe("left", record("left", "a", 1, 12), record("left", "c", 2, 12))
    # The version of a on the right at 12 has expired; c never had a version on the right.
    assert versions(driver, "left") == [("a", 1, 8, 20, None), ("c", 2, None, 12, None)]
    assert driver._stores["left_of_both"].head().commit.counts["late"] == 1


def test_late_version_ends_at_expired_deletion(
    spark: SparkSession,
) -> None:
    short = table("left", 5 * MS), table("right", 5 * MS)
    about: dict[str, Any] = {"history": "complete", "select": ["left.l", "right.r"]}
    nodes = [
        getattr(short[0], "join" if kind == "inner" else f"{kind}_join")(
            short[1], name=f"{kind}_of_both", **about
        )
        for kind in KINDS
    ]
    driver = TopologyTestDriver(*nodes, spark=spark)
    first = [record("left", "a", 3, 11), record("left", "a", None, 13)]
    driver.run({"left": first, "right": [record("right", "a", 7, 10)]})
    # The version of 12 was valid until 13. When the join runs, the history of left starts at 14.
    late = [record("left", "a", 2, 12), record("left", "b", 1, 19)]
    driver.run({"left": late, "right": [record("right", "a", 8, 21)]})
    assert [v for v in versions(driver, "inner") if v[4] is None] == []
    assert [v for v in versions(driver, "left") if v[4] is None] == [("b", 1, None, 19, None)]
    now = [v for v in versions(driver, "outer") if v[4] is None]
    assert now == [("a", None, 8, 21, None), ("b", 1, None, 19, None)]


def test_results_of_key_are_in_one_partition(spark: SparkSession) -> None:
    """All results of a key are in one partition, so that their offsets say which is the last."""
    wide = replace(table("right"), partitions=4)
    node = LEFT.left_join(wide, history="complete", name="left_of_both", select=["left.l", "right.r"])
    driver = TopologyTestDriver(node, spark=spark)
    right = [record("right", k, v, t) for k in "abcdef" for v, t in ((7, 10), (8, 20))]
    driver.run({"left": [record("left", k, 1, 12) for k in "abcdef"], "right": right})
    assert len({r["partition"] for r in driver.read("right")}) > 1
    expected = [row for k in "abcdef" for row in ((k, 1, 7, 12, 20), (k, 1, 8, 20, None))]
    assert versions(driver, "left") == expected


def intersections(kind: str, records: dict[str, list[dict[str, Any]]]) -> list[tuple[Any, ...]]:
    """Computes the join with DuckDB from all records: the valid rows of both sides at each start of a
    version of either side."""
    frames = {
        name: pd.DataFrame(
            {"k": [r["k"] for r in rows], "v": [r[name[0]] for r in rows]}
            | {"t": [r["timestamp"] for r in rows], "n": range(len(rows))}
        ).astype({"v": "Int64"})
        for name, rows in records.items()
    }
    has = {"inner": "l.v is not null and r.v is not null", "left": "l.v is not null"}
    wanted = has.get(kind, "l.v is not null or r.v is not null")
    with duckdb.connect() as engine:
        for name, frame in frames.items():
            engine.register(f"all_{name}", frame)
            engine.execute(
                f"create view {name}s as select k, v, t, lead(t) over (partition by k order by t) as u "
                "from (select k, t, arg_max(struct_pack(v := v), n).v as v "
                f"from all_{name} group by k, t)"
            )
        found = engine.execute(
            f"""with moments as (select k, t from lefts union select k, t from rights),
            spans as (select k, t, lead(t) over (partition by k order by t) as u from moments)
            select s.k, l.v, r.v, s.t, s.u from spans s
            left join lefts l on l.k = s.k and l.t <= s.t and (l.u is null or s.t < l.u)
            left join rights r on r.k = s.k and r.t <= s.t and (r.u is null or s.t < r.u)
            where {wanted} order by s.k, s.t"""
        ).fetchall()
    return [tuple(row) for row in found]


def in_runs(rows: list[tuple[str, dict[str, Any]]], cuts: Iterable[int]) -> list[dict[str, Any]]:
    """Splits the records into runs, and each run by input."""
    places = [0, *sorted(cuts), len(rows)]
    runs: list[dict[str, Any]] = []
    for start, end in itertools.pairwise(places):
        runs.append({n: [r for name, r in rows[start:end] if name == n] for n in ("left", "right")})
    return runs


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.endurance)])
def test_history_join_equals_interval_intersection(spark: SparkSession, seed: int) -> None:
    chance = random.Random(seed)
    rows: list[tuple[str, dict[str, Any]]] = []
    for i in range(100):
        name = chance.choice(("left", "right"))
        value = None if chance.random() < 0.25 else i
        rows.append((name, record(name, chance.choice("abcdef"), value, chance.randrange(40))))
    cuts = chance.sample(range(1, len(rows)), 1)
    driver = TopologyTestDriver(*[joined(kind) for kind in KINDS], spark=spark)
    for taken in in_runs(rows, cuts):
        driver.run(taken)
    everything = {n: [r for name, r in rows if name == n] for n in ("left", "right")}
    for kind in KINDS:
        expected = intersections(kind, everything)
        assert len(expected) > 40
        assert versions(driver, kind) == expected


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (
            lambda: table("left").join(table("right", versioned=False), name="j", history="complete"),
            "right",
        ),
        (
            lambda: joined("inner", materialized=Materialized()),
            "history='complete' needs a versioned result",
        ),
        (
            lambda: joined("inner", materialized=Materialized(history_retention=2000 * MS)),
            "at most 0:00:01, the history retention of 'left', got 0:00:02",
        ),
        (lambda: joined("inner", monotone_timestamps=True), "prevents results with earlier timestamps"),
        (lambda: joined("inner", history="all"), "history must be 'latest' or 'complete', got 'all'"),
        (lambda: joined("left", foreign_key="l"), "is for a join by the common key"),
        (lambda: joined("left", emit="per_run"), "emit"),
    ],
)
def test_refused_when_declared(wrong: Callable[[], Table], says: str) -> None:
    with pytest.raises(TopologyError, match=says):
        wrong()


def test_history_retention_is_shorter_of_both() -> None:
    short = table("left", 5 * MS).join(table("right"), name="j", history="complete")
    assert isinstance(short, VersionedTable)
    assert short.history_retention == 5 * MS


def test_history_join_on_delta_without_spark_and_replay(
    tmp_path: Path, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    topology = Topology(tmp_path)
    columns, minute = ["right.n as rate"], timedelta(minutes=1)
    rates = replace(topology.rates, history_retention=60 * minute)
    other = replace(rates, name="others", source=FilesSource(str(tmp_path / "others")))
    both = other.left_join(rates, name="both", select=["left.*", *columns], history="complete")
    priced = topology.orders.left_join(both, name="priced", select=["left.n", "right.rate"])
    stores = stores_of(topology.warehouse, spark)
    topology.land("rates", "1.jsonl", [("a", 1, 1), ("a", 2, 6), ("b", 3, 2)])
    topology.land("others", "1.jsonl", [("a", 10, 0), ("b", 30, 20)])
    topology.land("orders", "1.jsonl", [("a", 100, 7)])
    for node in (rates, other, both):
        run_once(node, stores)
    # Both records of a are late: the rate from minute 4 splits the other version from minute 3.
    topology.land("rates", "2.jsonl", [("a", 4, 4)])
    topology.land("others", "2.jsonl", [("a", 11, 3), ("b", None, 15)])
    run_once(rates, stores)
    run_once(other, stores)

    def killed(*_: object, **__: object) -> None:
        raise KilledError

    run = Run.pin(both, stores)
    logs = run.read()
    with monkeypatch.context() as patched:
        # The run finds the versions that it needs by file statistics, without a Spark job.
        patched.setattr(type(logs[0]), "collect", killed)
        results = run.operate(logs)
        # A row that an op has changed may be older than the statistics say.
        with pytest.raises(KilledError):
            run.operate([rows.where("n > 0") for rows in logs])
    with settings(spark, {"spark.sql.maxPlanStringLength": "100000"}):
        # One shuffle for the versions of each side. (Spark 4.0 also shuffles each union.)
        assert pyspark_series() == "4.0" or count(plan(results.rows))["shuffles"] == 2
    with monkeypatch.context() as patched:
        patched.setattr(AssetStore, "commit", killed)
        with pytest.raises(KilledError):
            run_once(both, stores)
    run_once(both, stores)
    found = read("both", key="a", as_of=EPOCH + 5 * minute, warehouse=topology.warehouse).to_pylist()
    assert [(r["n"], r["rate"]) for r in found] == [(11, 4)]
    why = explain(both, key="a", at=EPOCH + 5 * minute, warehouse=topology.warehouse)
    assert [(str(one.record), one.operator) for one in why.made_of] == [
        ("others 0:2", "source"),
        ("rates 0:3", "source"),
    ]
    assert [one.rule for one in why.decisions] == ["as_of", "as_of", "out_of_order"]
    run_once(topology.orders, stores)
    run_once(priced, stores)
    joined = read("priced", key="a", warehouse=topology.warehouse).to_pylist()
    assert [(r["n"], r["rate"]) for r in joined] == [(100, 2)]
    assert [one.name for one in audit(stores(both)) if not one.passed] == []
    # A replay in one run gives the same versions.
    again = replay(topology.warehouse, both, "both_again", spark)
    assert rows_of(again) == rows_of(AssetStore(topology.warehouse, both, spark))


def rows_of(store: AssetStore) -> list[Any]:
    versions = store.read("versions")
    own = [c for c in versions.columns if c not in (RECORDED_AT, OFFSET)]
    return sorted(map(tuple, versions.where("not is_tombstone").select(*own).collect()), key=repr)
