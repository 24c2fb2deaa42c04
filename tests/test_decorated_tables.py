"""Tables of records that Python functions return: each run, retry and partition counts once."""

import os
from collections.abc import Iterator
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import dagster as dg
import duckdb
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
from pyspark.sql import DataFrame, SparkSession

from tests import decorated_table
from tests.market import QUIET, RECORD, messages
from vt_dagster import (
    SparkResource,
    Stream,
    TopologyError,
    VersionedTable,
    build_asset,
    build_definitions,
    build_resources,
    build_sensor,
    read,
    stream,
    table,
    versioned_table,
)
from vt_dagster.errors import SourceError
from vt_dagster.runs.replay import replay
from vt_dagster.runs.run import run_once
from vt_dagster.sources.frame_sources import Delivery, Given
from vt_dagster.storage.asset_store import AssetStore, stores_of
from vt_dagster.testing import TopologyTestDriver

pytestmark = pytest.mark.usefixtures("few_rows")

MONTH = timedelta(days=30)
ABOUT: dict[str, Any] = {"key": "k", "schema": RECORD, "timestamp": "at"}
DAYS = dg.DailyPartitionsDefinition("2024-01-01", end_date="2024-01-05")


def rows(*records: tuple[str, str, int]) -> pd.DataFrame:
    """Records of January 2024: key, value, day."""
    times = [datetime(2024, 1, day) for *_, day in records]
    return pd.DataFrame({"k": [r[0] for r in records], "v": [r[1] for r in records], "at": times})


@pytest.fixture
def instance() -> Iterator[dg.DagsterInstance]:
    with dg.DagsterInstance.ephemeral() as made:
        yield made


def materialize(
    root: Path, instance: dg.DagsterInstance, *nodes: Stream, assets: Any = (), **options: Any
) -> Any:
    """Materializes all nodes and assets without their checks, in this process."""
    resources = build_resources(str(root), SparkResource(master="local[2]"))
    every = dg.Definitions([*map(build_asset, nodes), *assets], resources=resources)
    job = every.resolve_implicit_global_asset_job_def()
    about = {"run_config": QUIET, "raise_on_error": False, **options}
    return job.execute_in_process(instance=instance, **about)


def materialized_assets(result: dg.ExecuteInProcessResult) -> set[str]:
    assert result.success, messages(result)
    return {
        e.asset_key.to_user_string() for e in result.get_asset_materialization_events() if e.asset_key
    }


def values(root: Path, name: str, column: str = "v") -> list[Any]:
    return read(name, warehouse=str(root), what="log").sort_by("offset")[column].to_pylist()


def test_decorated_table_in_stream_table_join(
    spark: SparkSession, tmp_path: Path, instance: dg.DagsterInstance
) -> None:
    """A function gets the value of another asset, a context, a resource and config. In the next run the
    joined stream has no new records, and the join reports no materialization."""
    found: list[pd.DataFrame | None] = [rows(("a", "s1", 2), ("a", "s2", 4)), None]

    class Suffix(dg.ConfigurableResource[None]):
        text: str

    class Asked(dg.Config):
        currency: str = "EUR"

    def of_today(context: dg.AssetExecutionContext, config: Asked, quotes: Any, suffix: Any) -> Any:
        assert context.has_partition_key is False
        return quotes.with_columns(pl.col("v") + suffix.text + config.currency)

    of_today.__annotations__ |= {"quotes": pl.DataFrame, "suffix": Suffix, "config": Asked}
    prices = versioned_table(name="prices", history_retention=MONTH, **ABOUT)(of_today)

    @stream(**ABOUT)
    def sales() -> pd.DataFrame | None:
        """What was sold."""
        return found.pop(0)

    @dg.asset
    def quotes() -> pl.DataFrame:
        return pl.from_pandas(rows(("a", "p1", 1), ("a", "p2", 3)))

    priced = sales.left_join(prices, name="priced", select=["left.*", "right.v as price"])
    defs = dg.Definitions.merge(
        build_definitions(priced, warehouse=str(tmp_path), spark=SparkResource(master="local[2]")),
        dg.Definitions(assets=[quotes], resources={"suffix": Suffix(text=" ")}),
    )
    assert not list(defs.sensors or [])
    graph = defs.resolve_asset_graph()
    assert graph.get(dg.AssetKey("prices")).parent_keys == {dg.AssetKey("quotes")}
    assert sales.description == "What was sold."
    job = defs.resolve_implicit_global_asset_job_def()
    about = {"instance": instance, "run_config": QUIET, "raise_on_error": False}
    assert materialized_assets(job.execute_in_process(**about)) == {
        "quotes",
        "prices",
        "sales",
        "priced",
    }
    assert values(tmp_path, "priced", "price") == ["p1 EUR", "p2 EUR"]
    again = job.execute_in_process(**about)
    assert materialized_assets(again) == {
        "quotes",
        "prices",
    }  # the function returned the rows again, in a new run
    assert len(values(tmp_path, "prices")) == 4


@pytest.mark.jvm
@pytest.mark.timeout(300)
def test_retry_after_kill_between_commit_and_event(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each step is a process, and the process of the table is killed after its commit. A re-execution
    from failure reports the commit and does not call the function. A re-execution of a successful run
    calls the function again."""
    (tmp_path / "home").mkdir()

    def calls() -> int:
        return (tmp_path / "calls").read_text().count("called")

    def told() -> Any:
        event = instance.get_latest_materialization_event(dg.AssetKey("rates"))
        return event and event.asset_materialization

    def job(*, fatal: bool) -> Any:
        args: Any = (str(tmp_path), os.getpid(), fatal)
        return dg.build_reconstructable_job(decorated_table.__name__, "job_of", args)

    monkeypatch.setenv("ROOT", "")  # removed again after the test: the job sets it
    with dg.DagsterInstance.local_temp(str(tmp_path / "home")) as instance:
        with dg.execute_job(job(fatal=True), instance, run_config=QUIET) as first:
            assert not first.success
        assert (calls(), told()) == (1, None)
        assert values(tmp_path / "warehouse", "rates") == ["1", "2"]
        again, here = dg.ReexecutionOptions.from_failure(first.run_id, instance), job(fatal=False)
        with dg.execute_job(here, instance, run_config=QUIET, reexecution_options=again) as second:
            assert second.success
        assert told().metadata["log_rows"].value == 2
        assert calls() == 1
        options = dg.ReexecutionOptions(parent_run_id=second.run_id)
        with dg.execute_job(here, instance, run_config=QUIET, reexecution_options=options) as third:
            assert third.success
        assert calls() == 2
        assert values(tmp_path / "warehouse", "rates") == ["1", "2", "1", "2"]


def test_retry_before_commit_calls_function_again(
    spark: SparkSession, tmp_path: Path, instance: dg.DagsterInstance
) -> None:
    """A retry of a step that failed before its commit calls the function again."""
    answers = [rows(("a", "x", 1)).drop(columns="v"), rows(("a", "x", 1))]

    @table(**ABOUT)
    def flaky() -> pd.DataFrame:
        return answers.pop(0)

    defs = build_definitions(
        flaky,
        warehouse=str(tmp_path),
        spark=SparkResource(master="local[2]"),
        retry_policy=dg.RetryPolicy(max_retries=1),
    )
    job = defs.resolve_implicit_global_asset_job_def()
    result = job.execute_in_process(instance=instance, run_config=QUIET, raise_on_error=False)
    assert materialized_assets(result) == {"flaky"}
    assert values(tmp_path, "flaky") == ["x"]


@pytest.mark.parametrize("again", [False, True])
def test_retried_partition_is_consumed_once(
    spark: SparkSession,
    tmp_path: Path,
    instance: dg.DagsterInstance,
    monkeypatch: pytest.MonkeyPatch,
    again: bool,
) -> None:
    """A step fails after its commit, before it is reported. Its retry, or the next run, reports the
    commit and does not commit again, although the function returns other rows at each call."""
    calls, forget, faults = [0], AssetStore.remove_staged_before, [0]

    def fails(store: AssetStore, previous: Any) -> None:
        forget(store, previous)
        if faults[0]:
            faults[0] -= 1
            raise OSError("no connection")

    monkeypatch.setattr(AssetStore, "remove_staged_before", fails)

    @stream(partitions_def=DAYS, **ABOUT)
    def daily() -> pd.DataFrame:
        calls[0] += 1
        return rows(("a", f"call {calls[0]}", 1))

    def run(retries: int, **tags: str) -> Any:
        asset = build_asset(daily, retry_policy=dg.RetryPolicy(max_retries=retries))
        resources = build_resources(str(tmp_path), SparkResource(master="local[2]"))
        job = dg.Definitions([asset], resources=resources).resolve_implicit_global_asset_job_def()
        about: Any = {"run_config": QUIET, "raise_on_error": False, "instance": instance}
        return job.execute_in_process(partition_key="2024-01-01", tags=tags, **about)

    expected = ["call 1"]
    if again:
        assert materialized_assets(run(0)) == {"daily"}
        expected = ["call 1", "call 2"]
    tags = {"vt_dagster/take_again": "true"} if again else {}
    faults[0] = 1
    result = run(1, **tags)
    assert materialized_assets(result) == {"daily"}, "a retry of its step"
    (event,) = result.get_asset_materialization_events()
    assert event.materialization.metadata["status"].value == (
        f"an earlier try has committed batch {len(expected)}"
    )
    assert values(tmp_path, "daily") == expected
    if again:
        return
    # No run has reported the commit: the next run reports it, even if it is no retry.
    key = dg.AssetKey("daily")
    instance.wipe_assets([key])
    assert "expected the rows of partition 2024-01-01 as consumed by an earlier run" in messages(run(0))
    faults[0] = 1
    assert not run(0, **{"vt_dagster/take_again": "true"}).success
    assert not instance.get_materialized_partitions(key)
    assert materialized_assets(run(0)) == {"daily"}
    assert instance.get_materialized_partitions(key) == {"2024-01-01"}
    assert values(tmp_path, "daily") == ["call 1", "call 3"]


def test_retry_after_materialization_does_not_call_function(
    spark: SparkSession, tmp_path: Path, instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step fails after its materialization and is retried. The retry does not call the function,
    which returns other rows at each call."""
    calls, faults, handle = [0], [0], dg.DagsterInstance.handle_new_event

    def fails(instance: dg.DagsterInstance, entry: dg.EventLogEntry, **about: Any) -> None:
        handle(instance, entry, **about)
        event = entry.dagster_event
        if faults[0] and event is not None and event.is_step_materialization:
            faults[0] -= 1
            raise dg.RetryRequested(max_retries=1)

    monkeypatch.setattr(dg.DagsterInstance, "handle_new_event", fails)

    @stream(partitions_def=DAYS, **ABOUT)
    def daily() -> pd.DataFrame:
        calls[0] += 1
        return rows(("a", f"call {calls[0]}", 1))

    def run(**tags: str) -> Any:
        resources = build_resources(str(tmp_path), SparkResource(master="local[2]"))
        job = dg.Definitions(
            [build_asset(daily)], resources=resources
        ).resolve_implicit_global_asset_job_def()
        about: Any = {"run_config": QUIET, "raise_on_error": False, "instance": instance}
        return job.execute_in_process(partition_key="2024-01-01", tags=tags, **about)

    again = {"vt_dagster/take_again": "true"}
    expected: list[str] = []
    for tags in ({}, again):
        faults[0], before = 1, calls[0]
        assert run(**tags).success
        assert faults == [0], "the step has failed once"
        assert calls[0] == before + 1
        expected.append(f"call {calls[0]}")
        assert values(tmp_path, "daily") == expected
    # A new run calls the function again.
    assert "expected the rows of partition 2024-01-01 as consumed by an earlier run" in messages(run())


def test_backfilled_partition_is_consumed_once(
    spark: SparkSession, tmp_path: Path, instance: dg.DagsterInstance
) -> None:
    """A backfill of three days of a partitioned asset consumes each day once. One day has no records.
    During the run of another day a fourth day is committed."""
    answers = {
        "2024-01-01": rows(("a", "a1", 1), ("b", "b1", 1)),
        "2024-01-02": None,
        "2024-01-03": rows(("a", "a3", 3)),
    }

    @dg.asset(partitions_def=DAYS)
    def raw(context: dg.AssetExecutionContext) -> Any:
        return answers[context.partition_key]

    @versioned_table(partitions_def=DAYS, history_retention=MONTH, **ABOUT)
    def daily(context: dg.AssetExecutionContext, raw: Any) -> Any:
        if context.partition_key == "2024-01-03":
            other = Delivery("2024-01-04", "", lambda: rows(("c", "meanwhile", 4)))
            run_once(daily, stores_of(str(tmp_path), spark), Given(daily, daily.source, [other]))
        return raw

    def of(day: str, **options: Any) -> Any:
        return materialize(tmp_path, instance, daily, assets=[raw], partition_key=day, **options)

    for day in answers:
        assert materialized_assets(of(day)) == {"raw", "daily"}
    assert instance.get_materialized_partitions(dg.AssetKey("daily")) == set(answers)
    assert values(tmp_path, "daily") == ["a1", "b1", "meanwhile", "a3"]
    answers["2024-01-01"] = answers["2024-01-01"].iloc[::-1]
    again = of("2024-01-01")
    assert materialized_assets(again) == {"raw"}
    (seen,) = (e.asset_observation_data for e in again.all_events if e.is_asset_observation)
    assert seen.asset_observation.partition == "2024-01-01"
    answers["2024-01-01"] = rows(("a", "a1, mended", 1))
    changed = of("2024-01-01")
    assert not changed.success
    assert "expected the rows of partition 2024-01-01 as consumed by an earlier run" in messages(
        changed
    )
    assert materialized_assets(of("2024-01-01", tags={"vt_dagster/take_again": "true"})) == {
        "raw",
        "daily",
    }
    assert materialized_assets(of("2024-01-01")) == {"raw"}
    assert values(tmp_path, "daily") == ["a1", "b1", "meanwhile", "a3", "a1, mended"]

    @versioned_table(partitions_def=DAYS, history_retention=MONTH, **ABOUT)
    def alone() -> Any:
        return rows(("a", "a1", 1))

    without = messages(materialize(tmp_path, instance, alone))
    assert "alone: expected a run of one partition, got none; choose one when you" in without
    with pytest.raises(SourceError, match=r"which provides what .*daily returns; got none"):
        replay(str(tmp_path), daily, "anew", spark)


def test_inputs_and_outputs_of_every_dataframe_library(
    spark: SparkSession, tmp_path: Path, instance: dg.DagsterInstance
) -> None:
    """A function gets a table of the library in the type of its annotation, and may return any of these
    types."""

    @table(**ABOUT)
    def first() -> pd.DataFrame:
        return rows(("a", "x", 1))

    given: set[Any] = set()

    def taking(kind: Any, name: str, taken: bool) -> Stream:
        def takes(first: Any) -> Any:
            assert isinstance(first, kind)
            given.add(kind)
            return first if taken else None

        takes.__annotations__ = {"first": kind, "return": kind}
        return stream(name=name, key="k", schema=OF_VIEW)(takes)

    kinds: dict[Any, bool] = {
        pd.DataFrame: False,
        pl.DataFrame: False,
        pa.Table: False,
        pl.LazyFrame: True,
        duckdb.DuckDBPyRelation: True,
        DataFrame: True,
    }
    nodes = [taking(kind, f"made{i}", taken) for i, (kind, taken) in enumerate(kinds.items())]
    assert materialized_assets(materialize(tmp_path, instance, first, *nodes)) == {
        "first",
        "made3",
        "made4",
        "made5",
    }
    assert given == set(kinds)
    assert [values(tmp_path, f"made{i}") for i in (3, 4, 5)] == [["x"]] * 3


OF_VIEW = RECORD.__class__([*RECORD.fields[:2]]).add("timestamp", "timestamp")


def test_driver_pipes_records_for_decorated_table(spark: SparkSession) -> None:
    @versioned_table(history_retention=MONTH, **ABOUT)
    def prices() -> None: ...

    @stream(**ABOUT)
    def sales() -> None: ...

    joined = sales.join(prices, name="joined", select=["left.*", "right.v as price"])
    driver = TopologyTestDriver(joined, spark=spark)
    driver.pipe("prices", {"k": "a", "v": "p1", "at": 0})
    driver.pipe("sales", {"k": "a", "v": "s1", "at": 5})
    assert [row["price"] for row in driver.read("joined")] == ["p1"]


def test_refused_when_definitions_load() -> None:
    def gives() -> Iterator[pd.DataFrame]:
        yield rows()

    def takes(*frames: Any) -> None: ...

    def unknown(raw: Any) -> None: ...

    unknown.__annotations__["raw"] = "Nowhere"

    for function, said in (
        (gives, "expected a function that returns a DataFrame or None"),
        (takes, r"expected named parameters, which are its inputs, got 'frames'"),
        (unknown, "expected annotations that can be resolved in its module"),
    ):
        with pytest.raises(TopologyError, match=said):
            table(**ABOUT)(function)

    def nothing() -> None: ...

    plain = stream(name="plain", **ABOUT)(nothing)
    with pytest.raises(SourceError, match="plain: expected a source that a sensor can poll"):
        build_sensor(plain)
    assert isinstance(versioned_table(history_retention=MONTH, **ABOUT)(nothing), VersionedTable)
    assert build_asset(plain).keys == {dg.AssetKey("plain")}
