"""Tables of the values of upstream assets: each materialization is consumed once."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dagster as dg
import pandas as pd
import polars as pl
import pytest
from pyspark.sql import SparkSession

from tests.market import QUIET, messages
from tests.test_decorated_tables import (
    ABOUT,
    DAYS,
    MONTH,
    materialize,
    materialized_assets,
    rows,
    values,
)
from vt_dagster import (
    AssetSource,
    Stream,
    Table,
    TopologyError,
    VersionedTable,
    build_asset,
    build_definitions,
)
from vt_dagster.storage.asset_store import AssetStore


@pytest.fixture
def instance() -> Iterator[dg.DagsterInstance]:
    with dg.DagsterInstance.ephemeral() as found:
        yield found


def test_each_materialization_is_consumed_once(
    spark: SparkSession, tmp_path: Path, instance: dg.DagsterInstance
) -> None:
    answers = [rows(("a", "1", 1)), rows(("a", "2", 2))]

    @dg.asset(key=["raw", "rates"])
    def upstream() -> pd.DataFrame:
        return answers.pop(0)

    rates = VersionedTable(
        "rates", history_retention=MONTH, source=AssetSource("raw/rates", as_type=pd.DataFrame), **ABOUT
    )
    alone: Any = {"asset_selection": [dg.AssetKey("rates")]}

    def run(**options: Any) -> Any:
        return materialize(tmp_path, instance, rates, assets=[upstream], **options)

    never = run(**alone)
    assert not never.success
    assert materialized_assets(run()) == {"raw/rates", "rates"}
    assert materialized_assets(run(**alone)) == set()
    assert materialized_assets(run()) == {"raw/rates", "rates"}
    assert values(tmp_path, "rates") == ["1", "2"]
    head = AssetStore(str(tmp_path), rates).head()
    assert head is not None
    event = instance.get_latest_materialization_event(dg.AssetKey(["raw", "rates"]))
    assert event is not None
    assert head.commit.deliveries == {"": f"{event.run_id}@{event.timestamp:.6f}"}
    assert head.commit.taken == {"asset raw/rates": {0: (1, 2)}}


@pytest.mark.parametrize("day", [None, "2024-01-01"])
def test_overtaken_run_skips_replaced_materialization(
    spark: SparkSession,
    tmp_path: Path,
    instance: dg.DagsterInstance,
    monkeypatch: pytest.MonkeyPatch,
    day: str | None,
) -> None:
    """Before a run commits, the upstream asset is materialized again, and a second run consumes the new
    value. The first run then commits nothing, and the replaced value is not consumed."""
    partitions = None if day is None else DAYS
    answers = [rows(("a", "1", 1)), rows(("a", "2", 1))]

    @dg.asset(partitions_def=partitions)
    def raw() -> pd.DataFrame:
        return answers.pop(0)

    of_raw = AssetSource("raw", as_type=pd.DataFrame, partitions_def=partitions)
    rates = Table("rates", source=of_raw, **ABOUT)

    def run(**options: Any) -> Any:
        return materialize(tmp_path, instance, rates, assets=[raw], partition_key=day, **options)

    commit = AssetStore.commit

    def overtaken(store: AssetStore, *args: Any) -> Any:
        if len(answers) == 1:
            assert materialized_assets(run()) == {"raw", "rates"}
        return commit(store, *args)

    monkeypatch.setattr(AssetStore, "commit", overtaken)
    assert materialized_assets(run()) == {"raw"}
    assert values(tmp_path, "rates") == ["2"]
    assert materialized_assets(run(asset_selection=[dg.AssetKey("rates")])) == set()
    assert values(tmp_path, "rates") == ["2"]


def test_recommitted_partition_is_reported(
    spark: SparkSession,
    tmp_path: Path,
    instance: dg.DagsterInstance,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A run of a partition fails after its commit, and a run of another partition commits before the
    retry. The retry reports the commit of its partition once."""

    @dg.asset(partitions_def=DAYS)
    def raw(context: dg.AssetExecutionContext) -> pd.DataFrame:
        return rows(("a", context.run.run_id, int(context.partition_key[-2:])))

    of_raw = AssetSource("raw", as_type=pd.DataFrame, partitions_def=DAYS)
    rates = Table("rates", source=of_raw, **ABOUT)

    def run(day: str, *names: str) -> Any:
        chosen: Any = [dg.AssetKey(name) for name in names]
        about: dict[str, Any] = {"asset_selection": chosen, "partition_key": day}
        return materialize(tmp_path, instance, rates, assets=[raw], **about)

    commit, fails = AssetStore.commit, False

    def committed(store: AssetStore, *args: Any) -> Any:
        head = commit(store, *args)
        if fails:
            raise RuntimeError("the process ends")
        return head

    monkeypatch.setattr(AssetStore, "commit", committed)
    assert materialized_assets(run("2024-01-01", "raw", "rates")) == {"raw", "rates"}
    fails = True
    failed = run("2024-01-01", "raw", "rates")
    assert not failed.success
    fails = False
    assert materialized_assets(run("2024-01-02", "raw", "rates")) == {"raw", "rates"}
    assert materialized_assets(run("2024-01-01", "rates")) == {"rates"}
    assert (
        materialized_assets(run("2024-01-01", "rates"))
        == materialized_assets(run("2024-01-02", "rates"))
        == set()
    )
    assert len(values(tmp_path, "rates")) == 3


def test_new_partitions_of_partitioned_asset_are_consumed(
    spark: SparkSession, tmp_path: Path, instance: dg.DagsterInstance
) -> None:
    """An asset without partitions consumes the upstream partitions materialized since its last run. A
    table with the same partitions consumes the partition of its run, or a range of them in one run.
    Dagster's file IO manager returns several partitions as a dict."""

    @dg.asset(partitions_def=DAYS)
    def raw(context: dg.AssetExecutionContext) -> pl.DataFrame:
        day = int(context.partition_key[-2:])
        return pl.from_pandas(rows(("a", f"of {day}", day)))

    typed: Any = {"as_type": pl.DataFrame}
    whole = Stream("whole", source=AssetSource("raw", **typed), **ABOUT)
    daily = Table("daily", source=AssetSource("raw", partitions_def=DAYS, **typed), **ABOUT)
    texts = Stream("texts", source=AssetSource("raw", as_type=str), **ABOUT)

    def run(*names: str, day: str | None = None, **options: Any) -> Any:
        chosen: Any = [dg.AssetKey(name) for name in names]
        about: dict[str, Any] = {"asset_selection": chosen, "partition_key": day, **options}
        return materialize(tmp_path, instance, whole, daily, texts, assets=[raw], **about)

    assert materialized_assets(run("raw", "daily", day="2024-01-03")) == {"raw", "daily"}
    assert materialized_assets(run("raw", "daily", day="2024-01-01")) == {"raw", "daily"}
    assert materialized_assets(run("whole")) == {"whole"}
    assert values(tmp_path, "whole") == ["of 1", "of 3"]
    assert materialized_assets(run("raw", day="2024-01-02")) == {"raw"}
    assert materialized_assets(run("whole")) == {"whole"}
    assert materialized_assets(run("whole")) == set()
    assert values(tmp_path, "whole") == ["of 1", "of 3", "of 2"]
    assert materialized_assets(run("daily", day="2024-01-03")) == set()
    assert values(tmp_path, "daily") == ["of 3", "of 1"]
    missing = run("daily", day="2024-01-04")
    assert not missing.success
    bounds = {"start": "2024-01-01", "end": "2024-01-03"}
    days = {f"dagster/asset_partition_range_{name}": day for name, day in bounds.items()}
    assert materialized_assets(run("daily", tags=days)) == {"daily"}
    assert values(tmp_path, "daily") == ["of 3", "of 1", "of 2"]
    assert materialized_assets(run("daily", tags=days)) == set()
    assert 'expected type "str for texts"' in messages(run("texts"))


def test_missing_upstream_partition_is_named(
    spark: SparkSession, tmp_path: Path, instance: dg.DagsterInstance
) -> None:
    """A partition that is mapped to no upstream partition has no records, like the first day of an
    asset that reads the day before. One whose upstream partition was not materialized is an error, and
    so is a value of None if the source has a class."""
    answers: dict[str, Any] = {"2024-01-01": rows(("a", "of 1", 1)), "2024-01-02": None}

    @dg.asset(partitions_def=DAYS)
    def raw(context: dg.AssetExecutionContext) -> Any:
        return answers[context.partition_key]

    before = dg.TimeWindowPartitionMapping(start_offset=-1, end_offset=-1)
    about: dict[str, Any] = {"partitions_def": DAYS, "partition_mapping": before}
    typed = Table("typed", source=AssetSource("raw", as_type=pd.DataFrame, **about), **ABOUT)
    plain = Table("plain", source=AssetSource("raw", **about), **ABOUT)
    last: Any = {"partition_mapping": dg.LastPartitionMapping()}
    newest = Table("newest", source=AssetSource("raw", as_type=pd.DataFrame, **last), **ABOUT)

    def run(*names: str, day: str | None = None) -> Any:
        chosen: Any = {"asset_selection": [dg.AssetKey(name) for name in names]}
        nodes = (typed, plain, newest)
        return materialize(tmp_path, instance, *nodes, assets=[raw], partition_key=day, **chosen)

    assert materialized_assets(run("typed", "plain", day="2024-01-01")) == {"typed", "plain"}
    for day in answers:
        assert materialized_assets(run("raw", day=day)) == {"raw"}
    assert materialized_assets(run("typed", "plain", day="2024-01-02")) == {"typed", "plain"}
    assert values(tmp_path, "typed") == values(tmp_path, "plain") == ["of 1"]
    assert materialized_assets(run("plain", day="2024-01-03")) == {"plain"}
    assert (
        "typed: expected a DataFrame of raw (partition 2024-01-02), got None; return an empty DataFrame"
        in messages(run("typed", day="2024-01-03"))
    )
    for name, day, lacks in (("typed", "2024-01-04", "03"), ("newest", None, "04")):
        assert (
            f"{name}: expected a materialization of raw (partition 2024-01-{lacks}) in this Dagster "
            "instance"
        ) in messages(run(name, day=day))


@pytest.mark.filterwarnings("ignore::dagster_shared.utils.warnings.BetaWarning")
def test_automation_condition_requests_table(
    spark: SparkSession, tmp_path: Path, instance: dg.DagsterInstance
) -> None:
    """With an automation condition, Dagster requests the table, and the assets downstream of it, after
    a materialization of its upstream asset."""
    answers: list[Any] = [rows(("a", "1", 1)), rows(("a", "2", 2)), rows()]

    @dg.asset
    def raw() -> pd.DataFrame:
        return answers.pop(0)

    rates = Table("rates", source=AssetSource("raw"), **ABOUT)
    long = rates.filter("length(v) > 0", name="long")
    eager = dg.AutomationCondition.eager()
    defs = dg.Definitions.merge(
        build_definitions(long, warehouse=str(tmp_path), automation_condition=eager),
        dg.Definitions(assets=[raw]),
    )
    cursor: Any = None

    def asked() -> set[str]:
        nonlocal cursor
        told = dg.evaluate_automation_conditions(defs, instance, cursor=cursor)
        cursor = told.cursor
        return {r.key.to_user_string() for r in told.results if told.get_num_requested(r.key)}

    def run(*names: str) -> set[str]:
        chosen = [dg.AssetKey(name) for name in names]
        return materialized_assets(
            materialize(tmp_path, instance, rates, long, assets=[raw], asset_selection=chosen)
        )

    assert asked() == set()
    assert run("raw") == {"raw"}
    assert asked() == {"rates", "long"}
    assert run("rates", "long") == {"rates", "long"}
    assert asked() == set()
    assert run("raw") == {"raw"}
    assert asked() == {"rates", "long"}
    assert run("rates", "long") == {"rates", "long"}
    assert asked() == set()
    assert run("raw") == {"raw"}
    assert asked() == {"rates", "long"}
    assert run("rates", "long") == set()  # the value had no rows
    assert asked() == set()


def test_refused_upstream_values(
    spark: SparkSession, tmp_path: Path, instance: dg.DagsterInstance
) -> None:
    @dg.asset
    def raw() -> dict[str, int]:
        return {"a": 1}

    rates = Table("rates", source=AssetSource("raw"), **ABOUT)
    assert "expected a DataFrame of Spark, pandas, Polars, Arrow or DuckDB, or None, got" in messages(
        materialize(tmp_path, instance, rates, assets=[raw])
    )
    unknown = Table("rates", source=AssetSource("elsewhere"), **ABOUT)

    class Elsewhere(dg.IOManager):
        def load_input(self, context: dg.InputContext) -> pd.DataFrame:
            if meanwhile.pop(0):
                instance.report_runless_asset_event(dg.AssetMaterialization("elsewhere"))
            return rows(("a", "1", 1))

        def handle_output(self, context: dg.OutputContext, obj: Any) -> None: ...

    given = dg.Definitions.merge(
        build_definitions(unknown, warehouse=str(tmp_path)),
        dg.Definitions([dg.AssetSpec("elsewhere")], resources={"io_manager": Elsewhere()}),
    )
    job = given.resolve_implicit_global_asset_job_def()
    meanwhile = [False, True, False]
    for said in (
        "expected a materialization of elsewhere in this Dagster instance",
        "expected no materialization of elsewhere while it is loaded, got one; nothing was committed",
    ):
        result = job.execute_in_process(instance=instance, run_config=QUIET, raise_on_error=False)
        assert said in messages(result)
    instance.report_runless_asset_event(dg.AssetMaterialization("elsewhere", partition="2024-01-01"))
    result = job.execute_in_process(instance=instance, run_config=QUIET, raise_on_error=False)
    assert (
        "a materialization of elsewhere without a partition, as it is declared here, got one of "
        "partition 2024-01-01; give its AssetSpec the partitions_def"
    ) in messages(result)


def test_refused_when_definitions_load() -> None:
    itself = Table("rates", source=AssetSource("rates"), **ABOUT)
    with pytest.raises(
        TopologyError, match="expected the key of another asset in AssetSource, got its"
    ):
        build_asset(itself)
    weekly = AssetSource("raw", partitions_def=dg.WeeklyPartitionsDefinition("2024-01-01"))
    assert build_asset(Table("rates", source=weekly, **ABOUT)).partitions_def == weekly.partitions_def
