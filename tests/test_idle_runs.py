"""A run without new records starts no JVM, computes no check, makes no materialization, and requests no
downstream run."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dagster as dg
import pytest

from tests.market import Market, checks, materialized, observed, record, run
from vt_dagster import (
    FeatureView,
    build_asset,
    build_checks,
    build_export,
    build_resources,
    build_training_set,
)
from vt_dagster.orchestration.asset import DATA_VERSION
from vt_dagster.storage import parquet

pytestmark = pytest.mark.usefixtures("few_rows")

ROOT = Path(__file__).parent.parent

IDLE = """
import sys
from pathlib import Path
import dagster as dg
from pyspark import SparkContext
from tests.market import Market, checks, observed

market = Market(Path({root!r}), None)
with dg.DagsterInstance.local_temp({home!r}) as instance:
    result = market.run(instance=instance, raise_on_error=True)
    for node in market.nodes:
        observed(result, node.name)
    assert len(checks(result)) > 10
    assert SparkContext._active_spark_context is None
assert "dagster_pyspark" not in sys.modules
print("idle")
"""


@pytest.fixture
def instance() -> Iterator[dg.DagsterInstance]:
    with dg.DagsterInstance.ephemeral() as made:
        yield made


@pytest.fixture
def copy(market: Market, tmp_path: Path) -> Market:
    return market.copy(tmp_path / "copy")


def test_idle_run_starts_no_jvm(copy: Market, tmp_path: Path) -> None:
    copy.land("rates", "2.jsonl", record("a", "r9", "3 00:00"))
    (tmp_path / "home").mkdir()
    with dg.DagsterInstance.local_temp(str(tmp_path / "home")) as instance:
        assert copy.run(instance=instance).success  # now the checks have passed on the current rows
    code = IDLE.format(root=str(copy.root), home=str(tmp_path / "home"))
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=ROOT,
        env={**os.environ, "JAVA_HOME": "/there/is/none", "PATH": "", "PYTHONPATH": str(ROOT)},
    )
    assert done.stdout.endswith("idle\n"), done.stdout + done.stderr


@pytest.mark.filterwarnings("ignore::dagster_shared.utils.warnings.BetaWarning")
def test_idle_run_requests_no_downstream(copy: Market, instance: dg.DagsterInstance) -> None:
    @dg.asset(deps=["priced"], automation_condition=dg.AutomationCondition.eager())
    def report() -> None: ...

    defs = dg.Definitions(
        [*map(build_asset, copy.nodes), report], resources=build_resources(str(copy.warehouse))
    )

    def asked(cursor: Any = None) -> tuple[int, Any]:
        told = dg.evaluate_automation_conditions(defs, instance, cursor=cursor)
        return told.total_requested, told.cursor

    sold = [build_asset(copy.sales), build_asset(copy.priced)]
    copy.land("sales", "3.jsonl", record("a", "s9", "3 00:00"))
    assert run([*sold, report], copy.warehouse, instance=instance).success
    _, cursor = asked()
    idle = run(sold, copy.warehouse, instance=instance)
    observed(idle, "priced")
    number, cursor = asked(cursor)
    assert number == 0
    copy.land("sales", "4.jsonl", record("a", "s10", "3 03:00"))
    materialized(run(sold, copy.warehouse, instance=instance), "priced")
    number, _ = asked(cursor)
    assert number == 1


def test_idle_backfill_materializes_each_asset(copy: Market, instance: dg.DagsterInstance) -> None:
    """Without a materialization, Dagster counts the asset as failed, and runs no asset downstream."""
    export = build_export(copy.prices, to=str(copy.root / "export"))
    features = [FeatureView(copy.prices, prefix="p_", as_known="now")]
    training = build_training_set(copy.sales, features, name="training", to=str(copy.root / "training"))
    names = {*(node.name for node in copy.nodes), "prices_export", "training"}
    assert copy.run(None, export, training, instance=instance).success
    assets = [*map(build_asset, copy.nodes), *map(build_checks, copy.nodes), export, training]

    def version(event: dg.AssetMaterialization | None) -> str:
        return ((event and event.tags) or {})[DATA_VERSION]

    last = {n: instance.get_latest_materialization_event(dg.AssetKey(n)) for n in names}
    before = {n: version(event and event.asset_materialization) for n, event in last.items()}
    result = run(assets, copy.warehouse, instance=instance, tags={"dagster/backfill": "b"})
    assert result.success
    made = {
        str(event.asset_key.to_user_string()): event.materialization
        for event in result.get_asset_materialization_events()
        if event.asset_key is not None
    }
    assert {*made} == names
    assert {name: version(event) for name, event in made.items()} == before
    assert {str(event.metadata["status"].value) for event in made.values()} == {
        "nothing new: no commit"
    }
    looked_at = {str(one.metadata["looked_at"].value) for one in checks(result).values()}
    assert {one.partition(":")[0] for one in looked_at} == {"nothing"}
    for name in sorted(names):  # a run outside of a backfill has nothing to report
        result = run(assets, copy.warehouse, instance=instance, selection=[name])
        assert result.success
        assert not result.get_asset_materialization_events()


def test_join_with_one_new_input_runs(copy: Market) -> None:
    copy.land("sales", "3.jsonl", record("a", "s9", "3 00:00"))
    result = copy.run()
    observed(result, "prices")
    assert materialized(result, "priced")["records_in"] == 1


def test_data_version_follows_log(copy: Market, instance: dg.DagsterInstance) -> None:
    def version(name: str) -> str:
        event = instance.get_latest_materialization_event(dg.AssetKey(name))
        made = None if event is None else event.asset_materialization
        return ((made and made.tags) or {})["dagster/data_version"]

    made = [build_asset(copy.prices), build_asset(copy.priced)]
    copy.land("prices", "3.jsonl", record("a", "p9", "3 00:00"))
    run(made, copy.warehouse, instance=instance)
    before = version("prices")
    # A run with refused records alone makes a commit, but gives nothing new to downstream assets.
    copy.land("prices", "4.jsonl", record("a", "far too late", "1 00:00"))
    result = run(made, copy.warehouse, instance=instance)
    assert materialized(result, "prices")["records_late"] == 1
    observed(result, "priced")
    assert version("prices") == before
    copy.land("prices", "5.jsonl", record("a", "p10", "3 01:00"))
    run(made[:1], copy.warehouse, instance=instance)
    assert version("prices") != before


def test_checks_skip_unchanged_tables(copy: Market, instance: dg.DagsterInstance) -> None:
    def looked_at() -> set[str]:
        found = checks(copy.run([copy.rates], instance=instance))
        return {str(one.metadata["looked_at"].value).partition(":")[0] for one in found.values()}

    assert looked_at() == {"everything"}  # no check has run in this instance before
    assert looked_at() == {"nothing"}
    # A run of the checks alone always computes them.
    alone = run(
        [build_asset(copy.rates), build_checks(copy.rates)],
        copy.warehouse,
        instance=instance,
        selection=dg.AssetSelection.checks_for_assets("rates"),
    )
    assert {str(one.metadata["looked_at"].value) for one in checks(alone).values()} == {"everything"}
    rates = copy.store(copy.rates)
    rows = parquet.read(copy.spark, rates.view_path)
    rows.union(rows).write.format("delta").mode("overwrite").save(rates.view_path)
    for _ in range(2):  # a failed check is computed again in each run
        found = checks(copy.run([copy.rates], instance=instance))
        assert not found["rates:one_row_per_key"].passed
