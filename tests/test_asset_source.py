"""Tables of what upstream assets return: each materialization counts once."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dagster as dg
import pandas as pd
import polars as pl
import pytest
from pyspark.sql import SparkSession

from tests.market import QUIET, messages
from tests.test_decorated import ABOUT, DAYS, MONTH, made, materialize, rows, values
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


def test_each_materialization_counts_once(
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
    assert made(run()) == {"raw/rates", "rates"}
    assert made(run(**alone)) == set()
    assert made(run()) == {"raw/rates", "rates"}
    assert values(tmp_path, "rates") == ["1", "2"]
    head = AssetStore(str(tmp_path), rates).head()
    assert head is not None
    event = instance.get_latest_materialization_event(dg.AssetKey(["raw", "rates"]))
    assert event is not None
    assert head.commit.deliveries == {"": f"{event.run_id}@{event.timestamp:.6f}"}
    assert head.commit.taken == {"asset raw/rates": {0: (1, 2)}}


def test_of_a_partitioned_asset_each_partition(
    spark: SparkSession, tmp_path: Path, instance: dg.DagsterInstance
) -> None:
    """A table without partitions takes those that were materialized since; one with the same takes its
    own, also as a table that has it as a node."""

    @dg.asset(partitions_def=DAYS)
    def raw(context: dg.AssetExecutionContext) -> pl.DataFrame:
        day = int(context.partition_key[-2:])
        return pl.from_pandas(rows(("a", f"of {day}", day)))

    whole = Stream("whole", source=AssetSource("raw"), **ABOUT)
    daily = Table("daily", source=AssetSource("raw", partitions_def=DAYS), **ABOUT)

    def run(*names: str, day: str | None = None) -> Any:
        chosen: Any = [dg.AssetKey(name) for name in names]
        about: dict[str, Any] = {"asset_selection": chosen, "partition_key": day}
        return materialize(tmp_path, instance, whole, daily, assets=[raw], **about)

    assert made(run("raw", "daily", day="2024-01-03")) == {"raw", "daily"}
    assert made(run("raw", "daily", day="2024-01-01")) == {"raw", "daily"}
    assert made(run("whole")) == {"whole"}
    assert values(tmp_path, "whole") == ["of 1", "of 3"]
    assert made(run("raw", day="2024-01-02")) == {"raw"}
    assert made(run("whole")) == {"whole"}
    assert made(run("whole")) == set()
    assert values(tmp_path, "whole") == ["of 1", "of 3", "of 2"]
    assert made(run("daily", day="2024-01-03")) == set()
    assert values(tmp_path, "daily") == ["of 3", "of 1"]
    missing = run("daily", day="2024-01-04")
    assert not missing.success


@pytest.mark.filterwarnings("ignore::dagster_shared.utils.warnings.BetaWarning")
def test_dagster_asks_for_it(spark: SparkSession, tmp_path: Path, instance: dg.DagsterInstance) -> None:
    """By an automation condition on its upstream asset, and for what is downstream of it."""
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
        return made(materialize(tmp_path, instance, rates, long, assets=[raw], asset_selection=chosen))

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
    assert run("rates", "long") == set()  # it was empty
    assert asked() == set()


def test_what_cannot_be_taken(
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
    meanwhile = [False, True]
    for said in (
        "expected a materialization of elsewhere in this Dagster instance",
        "expected no materialization of elsewhere while it is loaded, got one; nothing was committed",
    ):
        result = job.execute_in_process(instance=instance, run_config=QUIET, raise_on_error=False)
        assert said in messages(result)


def test_refused_when_definitions_load() -> None:
    itself = Table("rates", source=AssetSource("rates"), **ABOUT)
    with pytest.raises(
        TopologyError, match="expected the key of another asset in AssetSource, got its"
    ):
        build_asset(itself)
    weekly = AssetSource("raw", partitions_def=dg.WeeklyPartitionsDefinition("2024-01-01"))
    assert build_asset(Table("rates", source=weekly, **ABOUT)).partitions_def == weekly.partitions_def
