"""A sensor requests one run for the same files, says why it requests none, and needs no Spark."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import dagster as dg
import pytest
from pyspark.sql import SparkSession
from pyspark.sql.types import StructType

from tests.market import RECORD, Market, checks, materialized, observed, record
from vt_dagster import FilesSource, Stream, WarehouseResource, build_definitions, build_sensor
from vt_dagster.errors import RecordsGoneError, TopologyError
from vt_dagster.kafka import KafkaCluster, KafkaSource
from vt_dagster.orchestration import sensors
from vt_dagster.sources.kafka_cluster import TopicState
from vt_dagster.storage.commit_log import Commit, Shape


def evaluate(market: Market, node: Stream | None = None, cursor: str | None = None, **more: Any) -> Any:
    """Evaluates a sensor. Returns its run request, or the text of its skip reason."""
    where = WarehouseResource(path=str(market.warehouse))
    # Evaluate as Dagster's daemon does, so that a result that the daemon rejects fails here too.
    said = build_sensor(node or market.prices).evaluate_tick(
        dg.build_sensor_context(cursor=cursor, resources={"vt_dagster_warehouse": where}, **more)
    )
    if not said.run_requests:
        return said.skip_message
    (request,) = said.run_requests
    assert json.loads(said.cursor or "")["batch"] == int(request.run_key.split(":")[2])
    return request


def files(request: dg.RunRequest) -> list[str]:
    return request.run_config["ops"]["prices"]["config"]["files"]


def test_sensor_run_request(market: Market, tmp_path: Path) -> None:
    copy = market.copy(tmp_path / "copy")
    said = evaluate(copy)
    assert said == f"no new jsonl files {copy.root}/landing/prices/*: batch 2, 11 records consumed"
    # a tick without a request stores the table's batch in the cursor, to notice if the table is removed
    where = WarehouseResource(path=str(copy.warehouse))
    tick = dg.build_sensor_context(resources={"vt_dagster_warehouse": where})
    build_sensor(copy.prices)(tick)
    assert json.loads(tick.cursor or "") == {"epoch": 0, "batch": 2}
    copy.land("prices", "4.jsonl", record("a", "p6", "2 07:00"))
    copy.land("prices", "3.jsonl", record("a", "p5", "2 06:00"))
    first = evaluate(copy)
    assert files(first) == ["3.jsonl", "4.jsonl"]
    assert first.run_key.startswith("prices:0:2:")
    assert first.tags == {
        "vt_dagster/asset": "prices",
        "vt_dagster/batch": "3",
        "dagster/sensor_name": "prices_sensor",
    }
    # a repeated tick, an old cursor, and a lost cursor request the same run
    for cursor in ('{"epoch": 0, "batch": 2}', '{"epoch": 0, "batch": 1}', "somebody's own"):
        assert evaluate(copy, cursor=cursor).run_key == first.run_key
    copy.land("prices", "5.jsonl", record("a", "p7", "2 08:00"))
    second = evaluate(copy)
    assert second.run_key != first.run_key
    # the run takes the requested files, not files that have landed since
    result = copy.run([copy.prices], run_config=first.run_config)
    assert result.success
    assert materialized(result, "prices")["records_in"] == 2
    # some files of the second request are consumed already: the run takes the rest
    result = copy.run([copy.prices], run_config=second.run_config)
    assert materialized(result, "prices")["records_in"] == 1
    # all files of the request are consumed: the run commits nothing, and says so
    result = copy.run([copy.prices], run_config=second.run_config)
    assert result.success
    assert observed(result, "prices")["versions"] == {"batch": 4}
    assert all(check.passed for check in checks(result).values())
    assert "batch 4, 14 records consumed" in evaluate(copy)
    copy.land("prices", "6.jsonl", record("a", "p8", "2 09:00"))
    assert evaluate(copy).run_key not in {first.run_key, second.run_key}


def test_replay_gets_new_run_key(spark: SparkSession, tmp_path: Path) -> None:
    """After the tables were removed for a replay, the sensor's request has a new run key. A repeated
    tick has the same key."""
    market = Market(tmp_path, spark)
    market.land("prices", "1.jsonl", record("a", "p1", "1 00:00"))
    first = evaluate(market)
    assert evaluate(market).run_key == first.run_key
    # the cursor has seen two batches, but the table has none, so it was removed
    again = evaluate(market, cursor='{"epoch": 0, "batch": 2}')
    assert again.run_key != first.run_key
    assert files(again) == files(first)


@pytest.mark.usefixtures("few_rows")
def test_removed_table_gets_new_run_key(spark: SparkSession, tmp_path: Path) -> None:
    """The cursor was reset, or no tick came after the run. The request still needs a new run key,
    because Dagster ignores requests with the key of an earlier run."""
    market = Market(tmp_path, spark)
    market.land("prices", "1.jsonl", record("a", "p1", "1 00:00"))
    with dg.DagsterInstance.ephemeral() as instance:
        keys: list[str] = []
        for wiped in (False, False, True, False):
            request = evaluate(market, instance=instance)
            assert request.run_key not in keys
            keys.append(request.run_key)
            about = {"run_config": request.run_config, "instance": instance}
            tags = {**request.tags, "dagster/run_key": request.run_key}
            result = market.run([market.prices], tags=tags, **about)
            assert materialized(result, "prices")["records_in"] == 1
            assert "no new jsonl files" in evaluate(market, instance=instance)
            if wiped:
                instance.wipe_assets([dg.AssetKey("prices")])
            shutil.rmtree(market.warehouse)

        @dg.job
        def others() -> None: ...

        # A run of other assets has not consumed the input: the request keeps its run key.
        instance.wipe_assets([dg.AssetKey("prices")])
        last = evaluate(market, instance=instance)
        done = {"status": dg.DagsterRunStatus.SUCCESS, "tags": {"dagster/run_key": last.run_key}}
        instance.create_run_for_job(others, **done)
        assert evaluate(market, instance=instance).run_key == last.run_key


def test_input_of_failed_run_is_not_requested_again(spark: SparkSession, tmp_path: Path) -> None:
    """The input of a failed run is not requested again until a file is repaired. The tick says so."""
    market = Market(tmp_path, spark)
    market.land("prices", "1.jsonl", "half a rec")

    @dg.job
    def nothing() -> None: ...

    with dg.DagsterInstance.ephemeral() as instance:
        asked = evaluate(market, instance=instance)
        tags, failure = {**asked.tags, "dagster/run_key": asked.run_key}, dg.DagsterRunStatus.FAILURE
        failed = instance.create_run_for_job(nothing, tags=tags, status=failure)
        said = f"1 new file: the run {failed.run_id} of this input did not succeed"
        assert evaluate(market, instance=instance).startswith(said)
        market.land("prices", "1.jsonl", record("a", "p1", "1 00:00"))
        again = evaluate(market, instance=instance)
        assert (files(again), again.run_key == asked.run_key) == (["1.jsonl"], False)


def test_repeated_failures_back_off(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More input is requested at once until two runs have failed. Then the sensor waits longer after
    each failed run, up to an hour."""
    market = Market(tmp_path, spark)

    @dg.job
    def nothing() -> None: ...

    with dg.DagsterInstance.ephemeral() as instance:

        def fails(number: int, after: float) -> Any:
            """Lands more input. Returns the sensor's answer after some seconds; a requested run
            fails."""
            market.land("prices", f"{number}.jsonl", record("a", f"p{number}", "1 00:00"))
            later = SimpleNamespace(time=lambda: time.time() + after)
            monkeypatch.setattr(sensors, "time", later)
            asked = evaluate(market, instance=instance)
            if isinstance(asked, dg.RunRequest):
                tags = {**asked.tags, "dagster/run_key": str(asked.run_key)}
                failed.append(
                    instance.create_run_for_job(nothing, tags=tags, status=dg.DagsterRunStatus.FAILURE)
                )
            return asked

        failed = list[dg.DagsterRun]()
        assert [files(fails(number, 0))[-1] for number in (1, 2)] == ["1.jsonl", "2.jsonl"]
        said = fails(3, 50)
        assert said.startswith("3 new files: 2 runs for this batch have failed, the last one is ")
        assert failed[-1].run_id in said
        assert ". To run at once, re-execute that run, or materialize the asset" in said
        assert len(files(fails(4, 61))) == 4
        assert fails(5, 110).startswith("5 new files: 3 runs")
        assert len(files(fails(6, 121))) == 6
        for number in range(7, 20):
            assert len(files(fails(number, 3601))) == number
        assert "16 runs" in fails(20, 3590)


def test_assets_with_same_name_and_other_prefix(spark: SparkSession, tmp_path: Path) -> None:
    """Two code locations have a table with the same name and input, and different key prefixes. Runs
    of one do not stop requests of the other."""
    market = Market(tmp_path, spark)
    market.land("prices", "1.jsonl", record("a", "p1", "1 00:00"))
    about: Any = {"key": "k", "schema": RECORD, "timestamp": "at", "source": market.prices.source}
    eu, us = Stream("prices", key_prefix="shop/eu", **about), Stream("prices", key_prefix="us", **about)

    @dg.job
    def nothing() -> None: ...

    with dg.DagsterInstance.ephemeral() as instance:
        for status in (dg.DagsterRunStatus.STARTED, dg.DagsterRunStatus.FAILURE):
            asked = evaluate(market, eu, instance=instance)
            tags = {**asked.tags, "dagster/run_key": asked.run_key}
            run = instance.create_run_for_job(nothing, tags=tags, status=status)
            assert f"the run {run.run_id}" in evaluate(market, eu, instance=instance)
            assert evaluate(market, us, instance=instance).tags["vt_dagster/asset"] == "us/prices"
            instance.delete_run(run.run_id)


@pytest.mark.parametrize("path", ["missing", "x" * 300])
def test_unreadable_directory_is_skip_reason(spark: SparkSession, tmp_path: Path, path: str) -> None:
    market = Market(tmp_path, spark)
    source = FilesSource(str(tmp_path / path))
    node = Stream("sales", key="k", schema=market.sales.schema, timestamp="at", source=source)
    reason = evaluate(market, node)
    assert isinstance(reason, str)
    assert "expected a directory" in reason


def test_changed_file_is_skip_reason(market: Market, tmp_path: Path) -> None:
    landed = market.root / "landing" / "prices" / "1.jsonl"
    kept = shutil.copy2(landed, tmp_path)
    market.land("prices", "1.jsonl", record("a", "p1", "1 00:00"))
    try:
        said = evaluate(market)
    finally:
        shutil.copy2(kept, landed)
    assert "1 consumed file in" in said
    assert "changed later, for example" in said
    assert evaluate(market).startswith("no new jsonl files")


def test_foreign_warehouse_is_skip_reason(market: Market, tmp_path: Path) -> None:
    other = Market(tmp_path, market.spark)
    log = tmp_path / "warehouse" / "prices" / "log" / "_delta_log"
    log.mkdir(parents=True)
    (log / f"{0:020d}.json").write_text('{"commitInfo":{"operation":"WRITE"}}\n')
    assert "none of its commits was written by vt_dagster" in evaluate(other)


def test_sensor_targets_asset_and_downstream(market: Market) -> None:
    defs = build_definitions(market.priced, market.rates, warehouse=str(market.warehouse))
    sensor = defs.resolve_sensor_def("prices_sensor")
    assert sensor.job_name is not None
    job = defs.resolve_job_def(sensor.job_name)
    assert {k.to_user_string() for k in job.asset_layer.selected_asset_keys} == {"prices", "priced"}
    assert sensor.default_status == dg.DefaultSensorStatus.STOPPED


def test_sensor_starts_no_spark(market: Market) -> None:
    code = f"""
from pathlib import Path
from tests.market import Market
from tests.test_sensors import evaluate
market = Market(Path({str(market.root)!r}), None)
print(evaluate(market))
from pyspark import SparkContext
assert SparkContext._gateway is None, "a JVM was started"
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=Path(__file__).parent.parent,
    )
    assert done.returncode == 0, done.stderr
    assert "batch 2, 11 records consumed" in done.stdout


def test_sensor_target_without_its_asset_is_refused(market: Market) -> None:
    """The run config of a request is that of the asset, so a run without it would be invalid."""

    @dg.asset
    def other() -> None: ...

    node = Stream("prices", key="k", schema=RECORD, timestamp="at", source=market.prices.source)
    made = build_definitions(node, warehouse=str(market.root / "nothing yet"))
    defs = dg.Definitions.merge(made, dg.Definitions(assets=[other]))
    tick = dg.build_sensor_context(repository_def=defs.get_repository_def(), resources=defs.resources)
    for target, got in (("other", "other"), ("key:none", "no asset")):
        sensor = build_sensor(node, target=dg.AssetSelection.from_string(target))
        with pytest.raises(TopologyError, match=f"to contain the asset prices.* got {got};"):
            sensor(tick)


def test_sensor_omits_partitioned_downstream(market: Market) -> None:
    """A run that a sensor requests has no partition. So it leaves out downstream assets with
    partitions, and the assets downstream of these. Such assets may have different partitions. An asset
    outside of Dagster has no op. Assets of one op run together, or are left out together."""
    days = dg.DailyPartitionsDefinition("2024-01-01")
    weeks = dg.WeeklyPartitionsDefinition("2024-01-01")

    @dg.asset(deps=["prices"])
    def plain() -> None: ...

    @dg.asset(deps=["prices"], partitions_def=days)
    def daily() -> None: ...

    @dg.asset(deps=["prices"], partitions_def=weeks)
    def weekly() -> None: ...

    @dg.asset(deps=["daily", "prices"])
    def summary() -> None: ...

    @dg.multi_asset(specs=[dg.AssetSpec("maximum", deps=["prices"]), dg.AssetSpec("clock")])
    def two() -> tuple[None, None]: ...

    @dg.multi_asset(
        specs=[dg.AssetSpec("mean", deps=["prices"]), dg.AssetSpec("of_days", deps=["daily"])]
    )
    def both() -> tuple[None, None]: ...

    @dg.asset(deps=["mean"])
    def of_mean() -> None: ...

    # Partitions of an asset outside of Dagster do not matter: no run makes it.
    chart = dg.AssetSpec("chart", deps=["prices"], partitions_def=days)

    @dg.asset(deps=["chart"])
    def of_chart() -> None: ...

    node = Stream("prices", key="k", schema=RECORD, timestamp="at", source=market.prices.source)
    for mine, expected in (
        ([plain], None),
        ([plain, daily, summary], ["plain", "prices"]),
        (
            [plain, chart, of_chart, daily, weekly, summary, two, both, of_mean],
            ["clock", "maximum", "of_chart", "plain", "prices"],
        ),
    ):
        made = build_definitions(node, warehouse=str(market.root / "nothing yet"))
        defs = dg.Definitions.merge(made, dg.Definitions(assets=mine))
        dg.Definitions.validate_loadable(defs)
        tick = dg.build_sensor_context(
            repository_def=defs.get_repository_def(), resources=defs.resources
        )
        sensor = defs.resolve_sensor_def("prices_sensor")
        requests = sensor.evaluate_tick(tick).run_requests or []
        chosen = requests[0].asset_selection
        assert (chosen and [key.to_user_string() for key in chosen]) == expected
        assert sensor.job_name is not None
        job = defs.resolve_job_def(sensor.job_name)
        made_by_job = {k.to_user_string() for k in job.asset_layer.selected_asset_keys}
        assert made_by_job == {*(expected or ["plain", "prices"])}


def test_sensor_runs_checks_of_its_target(tmp_path: Path) -> None:
    """A target may leave out checks."""
    (tmp_path / "landing").mkdir()
    files = FilesSource(str(tmp_path / "landing"), format="jsonl")
    node = Stream("prices", key="k", schema=RECORD, timestamp="at", source=files)

    @dg.asset_check(asset="prices")
    def slow() -> dg.AssetCheckResult:
        return dg.AssetCheckResult(passed=True)

    @dg.multi_asset(
        specs=[dg.AssetSpec("maximum", deps=["prices"]), dg.AssetSpec("clock")],
        check_specs=[dg.AssetCheckSpec("exact", asset="clock")],
    )
    def two() -> tuple[None, None, dg.AssetCheckResult]: ...

    @dg.asset(deps=["prices"], partitions_def=dg.DailyPartitionsDefinition("2024-01-01"))
    def daily() -> None: ...

    @dg.asset_check(asset=daily)
    def of_daily() -> dg.AssetCheckResult:
        return dg.AssetCheckResult(passed=True)

    every = dg.AssetSelection.assets("prices").downstream()
    made = build_definitions(node, warehouse=str(tmp_path / "warehouse"))
    others = dg.Definitions(assets=[two, daily], asset_checks=[slow, of_daily])
    for target, expected in (
        (None, {"slow", "exact", "every_record_is_accounted_for"}),
        (every - dg.AssetSelection.checks_for_assets("prices"), {"exact"}),
        (dg.AssetSelection.assets("prices").without_checks(), set[str]()),
    ):
        sensor = build_sensor(node, target=target, name="mine")
        defs = dg.Definitions.merge(made, others, dg.Definitions(sensors=[sensor]))
        dg.Definitions.validate_loadable(defs)
        assert sensor.job_name is not None
        found = defs.resolve_job_def(sensor.job_name).asset_layer.asset_graph.asset_check_keys
        assert {key.name for key in found} == expected


GONE = "topic t, partition 0: 2 offsets are gone: 5 is the next offset to consume, 7 the first"
OTHER = (
    "topic t was deleted and recreated since batch 1 (its id was A, now B), or the source reads another"
)


@pytest.mark.parametrize(
    ("id", "consumed", "start", "said", "logged"),
    [
        (
            "A",
            {"t": "A"},
            "earliest",
            [GONE, ". Run once with accept_gap: true to continue without the offsets that are gone ("],
            "!continues without {'t': {0: (5, 7)}} (accept_gap)",
        ),
        (
            "B",
            {"t": "A"},
            "latest",
            [
                OTHER,
                "If it is the wrong cluster, correct its address. If not, run once with accept_gap: "
                "true to continue with the new t from the earliest offset (the commit records the gap)",
            ],
            "!continues with another topic t (id B), from {0: 7} (accept_gap)",
        ),
        (
            "A",
            {"t": "B", "t/A": "A"},
            "earliest",
            [GONE, ". Run once with accept_gap: true to continue without the offsets that are gone ("],
            "!continues without {'t': {0: (5, 7)}} (accept_gap)",
        ),
    ],
    ids=["retention", "another cluster", "back at the first cluster"],
)
def test_accept_gap_start_offsets(
    id: str,
    consumed: dict[str, str],
    start: Any,
    said: list[str],
    logged: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    there = {"t": TopicState(id, {0: 7}, {0: 9}, {0: 9})}
    monkeypatch.setattr(KafkaCluster, "topics", lambda *_: there)
    source = KafkaSource(KafkaCluster("localhost:1"), "t", start=start)
    inputs = {topic: {0: 5} for topic in consumed}
    before = Commit(
        asset="s",
        batch=1,
        attempt="a",
        shape=Shape(kind="stream", key=[]),
        inputs=inputs,
        topics=consumed,
    )
    with pytest.raises(RecordsGoneError) as refused:
        source.pin(before)
    assert all(some in str(refused.value) for some in said), refused.value
    assert logged in source.pin(before, accept_gap=True).describe(StructType())
