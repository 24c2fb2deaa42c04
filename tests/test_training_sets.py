"""Training sets: a row for each record of the spine, with the features known then. A set can be pinned,
and made again from its manifest."""

from __future__ import annotations

import json
import logging
import random
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import dagster as dg
import polars as pl
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import IntegerType, StringType, StructField, StructType, TimestampType

import vt_dagster
from tests.core.test_spark_plans import count, plan
from tests.test_as_known_joins import EPOCH, KEYS, Log, Row, at, random_records
from vt_dagster import FeatureView, FilesSource, Stream, VersionedTable, build_training_set
from vt_dagster.core.log_columns import log_schema, view_schema
from vt_dagster.core.stream_table_join import Feature, with_features
from vt_dagster.errors import StorageError, TopologyError
from vt_dagster.runs.export import write_in
from vt_dagster.runs.restate import restate
from vt_dagster.runs.run import run_once
from vt_dagster.runs.training_set_run import TrainingRun, manifest_of, read_manifest
from vt_dagster.storage.asset_store import stores_of
from vt_dagster.topology.feature_views import TrainingSet


def schema(*names: str) -> StructType:
    kinds = {"n": IntegerType(), "timestamp": TimestampType()}
    return StructType([StructField(n, kinds.get(n, StringType())) for n in (*names, "timestamp")])


def table(root: Path, name: str) -> VersionedTable:
    return VersionedTable(
        name,
        key="k",
        schema=schema("k", "n"),
        tombstone="n is null",
        history_retention=timedelta(minutes=25),
        source=FilesSource(str(root / name), max_bad_share=1.0),
    )


def land(root: Path, node: Any, step: int, records: Sequence[Row], spark: SparkSession) -> None:
    (root / node.name).mkdir(exist_ok=True)
    lines = [json.dumps(r, default=lambda t: t.isoformat()) for r in records]
    (root / node.name / f"{step}.json").write_text("\n".join(lines), encoding="utf-8")
    stores = stores_of(str(root / "warehouse"), spark)
    run_once(node, stores, recorded_at=at(20 * step + len(node.name)))


@pytest.mark.usefixtures("few_rows")
def test_training_set_is_pinned_and_reproducible(spark: SparkSession, tmp_path: Path) -> None:
    chance, warehouse, to = random.Random(3), str(tmp_path / "warehouse"), str(tmp_path / "set")
    rates, shops = table(tmp_path, "rates"), table(tmp_path, "shops")
    visits = Stream(
        "visits", key="k", schema=schema("k", "shop"), source=FilesSource(str(tmp_path / "visits"))
    )
    young = timedelta(minutes=6)
    features = [
        FeatureView(rates, prefix="then_", columns=["n", "valid_from"]),
        FeatureView(rates, prefix="now_", as_known="now", at="before", max_age=young),
        FeatureView(shops, key="shop", prefix="shop_", as_known=timedelta(minutes=8)),
    ]
    ripe = timedelta(minutes=4)
    declared = TrainingSet("examples", visits, tuple(features), ripe)
    for step in range(2):
        now = 40 + 15 * step
        for node in (rates, shops):
            land(tmp_path, node, step, random_records(chance, 25, now, 20), spark)
        some = [{**r, "shop": chance.choice(KEYS)} for r in random_records(chance, 25, now, 25)]
        some = [{n: r[n] for n in ("k", "shop", "timestamp")} for r in some]
        land(tmp_path, visits, step, [*some, *some[:5]], spark)
    way = TrainingRun(declared, to, warehouse, spark)
    commit = way.run()
    assert commit is not None
    made = manifest_of(commit)

    def logged(name: str) -> list[dict[str, Any]]:
        return vt_dagster.read(name, warehouse=warehouse, what="log").to_pylist()

    logs = {n.name: Log(logged(n.name), n.history_retention) for n in (rates, shops)}
    last = max(r["timestamp"] for r in logged("visits"))
    expected = [v for v in logged("visits") if v["timestamp"] + ripe <= last]
    then = max(r["recorded_at"] for r in logged("rates"))

    def row(visit: Row) -> tuple[Any, ...]:
        time: datetime = visit["timestamp"]
        one = logs["rates"].known(visit["k"], time, visit["recorded_at"]) or {}
        two = logs["rates"].known(visit["k"], time - timedelta(microseconds=1), then) or {}
        if two and time - two["since"] > young:
            two = {}
        three = logs["shops"].known(visit["shop"], time, time + timedelta(minutes=8)) or {}
        found = one.get("rate"), one.get("since"), two.get("rate"), three.get("rate")
        return (visit["k"], visit["shop"], time, *found)

    told = pl.read_delta(to)
    assert told.columns == declared.columns
    assert sorted(told.rows(), key=repr) == sorted(map(row, expected), key=repr)
    assert 20 < made.rows == len(told) < 60
    nulls = {c: told[c].null_count() for c in told.columns[3:]}
    assert 0 < sum(nulls.values()) < len(told) * len(nulls), nulls
    assert declared.labels == ["then_rates", "now_rates", "shops"]
    assert made.matched == [len(told) - nulls[c] for c in ("then_n", "now_n", "shop_n")]

    # Without new records nothing is written. After a late backfill a run makes another set; pinned,
    # it makes the same set.
    assert way.run() is None
    pinned = read_manifest(f"{to}/_manifests/1.json")
    assert pinned == made
    land(tmp_path, rates, 9, random_records(chance, 25, 68, 20), spark)
    again = way.run()
    assert again is not None
    assert manifest_of(again).hash != made.hash
    # Records that are recorded after a row's cut do not change the row.
    free = ["k", "shop", "timestamp", "then_n", "then_valid_from", "shop_n"]
    assert sorted(pl.read_delta(to)[free].rows(), key=repr) == sorted(told[free].rows(), key=repr)

    asset = build_training_set(visits, features, name="examples", to=to, matured_after=ripe)
    config = dg.RunConfig(ops={"examples": {"config": {"manifest": f"{to}/_manifests/1.json"}}})
    ended = dg.materialize([asset], run_config=config, resources=vt_dagster.build_resources(warehouse))
    (event,) = ended.get_asset_materialization_events()
    assert event.materialization.metadata["hash"].value == made.hash
    assert pl.read_delta(to).sort(pl.all()).equals(told.sort(pl.all()))
    with pytest.raises(StorageError, match="expected a manifest of the current declaration"):
        TrainingRun(TrainingSet("examples", visits, tuple(features[:2])), to, warehouse, spark).run(
            made
        )


@pytest.mark.usefixtures("few_rows")
def test_set_is_rebuilt_when_table_keeps_other_versions(spark: SparkSession, tmp_path: Path) -> None:
    rates = table(tmp_path, "rates")
    visits = Stream("visits", key="k", schema=schema("k"), source=FilesSource(str(tmp_path / "visits")))
    minute = timedelta(minutes=1)
    versions = [{"k": "a", "n": n, "timestamp": EPOCH + 10 * n * minute} for n in (0, 1, 4)]
    land(tmp_path, rates, 0, versions, spark)
    land(tmp_path, visits, 0, [{"k": "a", "timestamp": EPOCH + 5 * minute}], spark)

    def made(rates: VersionedTable) -> list[Any] | None:
        views = (FeatureView(rates, as_known="now"),)
        run = TrainingRun(
            TrainingSet("examples", visits, views), f"{tmp_path}/set", f"{tmp_path}/warehouse", spark
        )
        return None if run.run() is None else pl.read_delta(f"{tmp_path}/set")["n"].to_list()

    assert made(rates) == [None]  # it has expired by minute 40
    longer = replace(rates, history_retention=60 * minute)
    assert made(longer) == [0]
    assert made(longer) is None
    by_partition = replace(rates, history_retention={0: 25 * minute})
    assert made(by_partition) == [None]
    assert made(by_partition) is None


@pytest.mark.usefixtures("few_rows")
def test_pinned_set_of_restated_table_is_refused(spark: SparkSession, tmp_path: Path) -> None:
    warehouse, to = str(tmp_path / "warehouse"), str(tmp_path / "set")
    rates = table(tmp_path, "rates")
    visits = Stream("visits", key="k", schema=schema("k"), source=FilesSource(str(tmp_path / "visits")))
    land(tmp_path, rates, 0, [{"k": "a", "n": 1, "timestamp": EPOCH}], spark)
    land(tmp_path, visits, 0, [{"k": "a", "timestamp": EPOCH}], spark)
    way = TrainingRun(TrainingSet("examples", visits, (FeatureView(rates),)), to, warehouse, spark)
    assert way.run() is not None
    restate(warehouse, rates, EPOCH.isoformat(), spark, [rates, visits])
    with pytest.raises(StorageError, match="log of rates as of batch 1, got another log: it was"):
        way.run(read_manifest(f"{to}/_manifests/1.json"))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"features": ()}, "examples: expected features to join, got none"),
        ({"key": "nothing"}, "that hold the key of 'rates', ['k string'], got ['nothing']"),
        ({"prefix": "", "columns": ["n", "n"]}, "expected each column once, got ['n'] more than once"),
        ({"prefix": "partitio"}, "names of the log's own columns, got ['partition']; set prefix"),
        ({"columns": ["m"]}, "expected features among ['n', 'valid_from'], got ['m']"),
        ({"at": "nearest"}, "after the record's timestamp, which leaks the future"),
        ({"at": "forward"}, "after the record's timestamp, which leaks the future"),
        ({"matured_after": -timedelta(1)}, "matured_after must be between 0 and"),
        (
            {"min_match_rate": 1.5},
            "expected min_match_rate to be a share of the rows from 0 to 1, got 1.5",
        ),
    ],
    ids=str,
)
def test_refused_when_declared(change: dict[str, Any], said: str, tmp_path: Path) -> None:
    about = dict(change)

    def declare() -> dg.AssetsDefinition:
        visits = Stream("visits", key="k", schema=schema("k", "shop"))
        ripe, features = about.pop("matured_after", None), about.pop("features", None)
        rate = about.pop("min_match_rate", None)
        if features is None:
            features = [FeatureView(table(tmp_path, "rates"), **about)]
        more = {"matured_after": ripe, "min_match_rate": rate}
        return build_training_set(visits, features, name="examples", to="set", **more)

    with pytest.raises(TopologyError) as refused:
        declare()
    assert said in str(refused.value)


def test_columns_differing_only_in_case_are_refused(tmp_path: Path) -> None:
    visits, rates = Stream("visits", key="k", schema=schema("k", "shop")), table(tmp_path, "rates")
    views = [FeatureView(rates, prefix=prefix) for prefix in ("now_", "Now_")]
    with pytest.raises(TopologyError, match=r"got \['Now_n', 'now_n'\] more than once; set prefix"):
        build_training_set(visits, views, name="examples", to="set")


@pytest.mark.usefixtures("few_rows")
def test_unmatched_rows_are_reported(spark: SparkSession, tmp_path: Path) -> None:
    """A version with null values is a match. A feature view without matches gives a warning, and
    ``min_match_rate`` gives a check."""
    warehouse = str(tmp_path / "warehouse")
    rates = replace(table(tmp_path, "rates"), tombstone=None)
    shops = table(tmp_path, "shops")
    visits = Stream(
        "visits", key="k", schema=schema("k", "shop"), source=FilesSource(str(tmp_path / "visits"))
    )
    then = EPOCH + timedelta(minutes=1)
    land(tmp_path, rates, 0, [{"k": "a", "n": None, "timestamp": EPOCH}], spark)
    land(tmp_path, shops, 0, [{"k": "s1", "n": 1, "timestamp": EPOCH}], spark)
    land(tmp_path, visits, 0, [{"k": k, "shop": "S1", "timestamp": then} for k in "aba"], spark)
    views = [FeatureView(rates, as_known="now"), FeatureView(shops, key="shop", prefix="s_")]

    def made(least: float | None, to: str) -> dg.ExecuteInProcessResult:
        where = str(tmp_path / to)
        asset = build_training_set(visits, views, name="examples", to=where, min_match_rate=least)
        resources = vt_dagster.build_resources(warehouse)
        return dg.materialize([asset], resources=resources, instance=instance, raise_on_error=False)

    with dg.DagsterInstance.ephemeral() as instance:
        ended = made(None, "set")
        assert ended.success
        (event,) = ended.get_asset_materialization_events()
        told = {n: v.value for n, v in event.materialization.metadata.items() if "match_rate" in n}
        assert told == {"match_rate_rates": 2 / 3, "match_rate_shops": 0.0}
        logs = instance.all_logs(ended.run_id)
        (warned,) = [one.user_message for one in logs if one.level == logging.WARNING]
        assert "got none among 3 (feature view shops)" in warned
        assert "['shop'] of visits with those of ['k'] of shops" in warned
        ended = made(0.5, "checked")
        assert not ended.success, "the check is blocking"
        (check,) = ended.get_asset_check_evaluations()
        assert (check.check_name, check.passed) == ("features_match", False)
        assert check.description == "Expected versions for at least 50 % of the rows, got shops: 0 %"
        assert pl.read_delta(str(tmp_path / "checked")).height == 3
        views[1] = FeatureView(rates, key="k", prefix="s_", as_known="now")
        for to in ("fits", "fits"):  # the second run has nothing new
            ended = made(2 / 3, to)
            assert ended.success
            (check,) = ended.get_asset_check_evaluations()
            assert check.passed
        assert ended.get_asset_materialization_events() == []


@pytest.mark.usefixtures("few_rows")
def test_overtaken_run_rebuilds_set(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    warehouse, to = str(tmp_path / "warehouse"), str(tmp_path / "set")
    writer = "vt_dagster.runs.training_set_run.write_in"
    rates = table(tmp_path, "rates")
    visits = Stream("visits", key="k", schema=schema("k"), source=FilesSource(str(tmp_path / "visits")))
    land(tmp_path, rates, 0, [{"k": "a", "n": 1, "timestamp": EPOCH}], spark)
    land(tmp_path, visits, 0, [{"k": "a", "timestamp": EPOCH}], spark)
    views = (FeatureView(rates, as_known="now"),)

    def overtaken(*args: Any) -> int:
        monkeypatch.setattr(writer, write_in)
        other = TrainingRun(TrainingSet("examples", visits, views), to, warehouse, spark)
        assert other.run() is not None
        land(tmp_path, visits, 1, [{"k": "b", "timestamp": EPOCH}], spark)
        return write_in(*args)

    monkeypatch.setattr(writer, overtaken)
    asset = build_training_set(visits, views, name="examples", to=to)
    ended = dg.materialize([asset], resources=vt_dagster.build_resources(warehouse))
    (event,) = ended.get_asset_materialization_events()
    assert event.materialization.metadata["versions"].value == {"batch": 2}
    assert sorted(pl.read_delta(to)["k"]) == ["a", "b"]


def test_expired_deletion_in_other_partition_gives_no_older_version(
    spark: SparkSession, tmp_path: Path
) -> None:
    """A key may be in two partitions. Then the deletion that ended a version may have expired from one
    partition while the other one still has the version."""

    def moment(minute: int) -> datetime:
        return EPOCH + timedelta(minutes=minute)

    rates = table(tmp_path, "rates")
    kinds = "k string, n int, valid_from timestamp, valid_to timestamp, is_tombstone boolean"
    ended = [("a", 1, moment(10), moment(20), False, 0, moment(0))]
    rows = spark.createDataFrame(ended, f"{kinds}, partition int, recorded_at timestamp")
    asked = [("a", moment(19), 0, 0, moment(99)), ("a", moment(20), 0, 1, moment(99))]
    kinds = "k string, timestamp timestamp, partition int, _arrival long, recorded_at timestamp"
    spine = spark.createDataFrame(asked, kinds)
    views = [
        FeatureView(rates, prefix="a_", as_known="now"),
        FeatureView(rates, prefix="b_"),
        FeatureView(rates, prefix="c_", as_known="now", at="before"),
    ]
    features = [Feature(view, rows, F.lit(moment(30)), NothingInDoubt()) for view in views]
    found = with_features(spine, features, lambda made: made).orderBy("_arrival").collect()
    assert [(r["a_n"], r["b_n"], r["c_n"]) for r in found] == [(1, 1, 1), (None, None, 1)]


def test_spine_is_shuffled_once_per_key(spark: SparkSession, tmp_path: Path) -> None:
    """One shuffle for each key, however many features have it: here two of one, one of another."""
    rates = table(tmp_path, "rates")
    spine = spark.createDataFrame([], log_schema(Stream("v", key="k", schema=schema("k", "shop"))))
    spine = spine.withColumns({"_arrival": F.col("offset"), "recorded_at": F.col("timestamp")})
    rows = spark.createDataFrame([], view_schema(rates))
    rows = rows.withColumn("recorded_at", F.col("timestamp"))
    views = [
        FeatureView(rates, prefix="a_"),
        FeatureView(rates, prefix="b_", max_age=timedelta(minutes=1), at="before"),
        FeatureView(rates, prefix="c_", key="shop"),
    ]
    held, nothing = list[str](), NothingInDoubt()

    def hold(made: DataFrame) -> DataFrame:
        held.append(plan(made))
        return made

    features = [Feature(view, rows, F.lit(EPOCH), nothing) for view in views]
    assert with_features(spine, features, hold).columns[-3:] == ["a_n", "b_n", "c_n"]
    assert [count(text)["shuffles"] for text in held] == [2]
    assert count(held[0])["sorts"] == 2


class NothingInDoubt:
    """A fake of the past in which no row is in doubt."""

    def hold(self, rows: DataFrame) -> DataFrame:
        return rows

    def log(self, doubtful: DataFrame, ends: bool) -> None:
        assert not ends

    def horizons(self) -> None:
        return None
