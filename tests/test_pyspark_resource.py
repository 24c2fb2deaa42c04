"""A team's own ``PySparkResource`` or ``LazyPySparkResource``: the assets use its Spark session."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import dagster as dg
import pytest
from dagster_pyspark import LazyPySparkResource, PySparkResource
from pydantic import ValidationError
from pyspark.sql import SparkSession

from tests.market import Market, checks, materialized, messages, record
from tests.test_executor import INSTANCE, ROOT
from vt_dagster import (
    SparkResource,
    TopologyError,
    WarehouseResource,
    build_definitions,
    build_resources,
)
from vt_dagster.errors import SparkUnavailableError
from vt_dagster.orchestration import resources
from vt_dagster.orchestration.resources import session_of
from vt_dagster.spark.session import TIME_ZONE, lacking

KINDS = (PySparkResource, LazyPySparkResource)


def landed(market: Market) -> Market:
    market.land("prices", "1.jsonl", record("a", "p1", "1 00:00"))
    market.land("sales", "1.jsonl", record("a", "s1", "1 03:00"), record("a", "s2", "1 06:00"))
    return market


@pytest.mark.parametrize("kind", KINDS)
def test_tables_and_own_assets_share_session(spark: SparkSession, tmp_path: Path, kind: Any) -> None:
    """In one process, the team's own assets read the tables on the same session as the tables' runs."""
    market = landed(Market(tmp_path, spark))
    theirs = kind(spark_config={"spark.sql.shuffle.partitions": "2"})
    seen: list[Any] = []

    @dg.asset(deps=["priced"])
    def mine(pyspark: dg.ResourceParam[Any]) -> None:
        log = pyspark.spark_session.read.format("delta").load(f"{market.warehouse}/priced/log")
        seen.append((pyspark.spark_session, log.count()))

    @dg.asset
    def of_manager(prices: Any) -> None:
        seen.append((prices.sparkSession, prices.count()))

    tables = "vt_dagster_tables"
    reader = dg.asset(ins={"prices": dg.AssetIn(input_manager_key=tables)})(
        of_manager.op.compute_fn.decorated_fn
    )
    defs = dg.Definitions.merge(
        build_definitions(market.priced, warehouse=str(market.warehouse), spark=theirs),
        dg.Definitions([mine, reader], resources={"pyspark": theirs}, executor=dg.in_process_executor),
    )
    job = defs.resolve_implicit_global_asset_job_def()
    resources._logged.discard(spark)  # as if no run of this process had used the session
    with dg.DagsterInstance.ephemeral() as instance:
        result = job.execute_in_process(instance=instance)
        said = [e.user_message for e in instance.all_logs(result.run_id) if not e.is_dagster_event]
    assert materialized(result, "priced")["records_in"] == 2
    assert all(one.passed for one in checks(result).values())
    assert {(one, n) for one, n in seen} == {(spark, 1)}
    assert sum(f" of {kind.__name__} on local[2]" in line for line in said) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_session_outside_run(spark: SparkSession, kind: Any) -> None:
    """A script of the code location gets the session from the resource, as the worked example does."""
    assert session_of(kind(spark_config={})) is spark


@pytest.mark.parametrize("kind", KINDS)
def test_session_in_other_time_zone_is_refused(spark: SparkSession, tmp_path: Path, kind: Any) -> None:
    """The run is also refused if another asset has changed the time zone of the shared session.
    Nothing is written."""
    market = landed(Market(tmp_path, spark))
    defs = build_definitions(
        market.prices, warehouse=str(market.warehouse), spark=kind(spark_config={})
    )
    spark.conf.set(TIME_ZONE, "Europe/Berlin")
    try:
        result = defs.resolve_implicit_global_asset_job_def().execute_in_process(raise_on_error=False)
    finally:
        spark.conf.set(TIME_ZONE, "UTC")
    assert not result.success
    said = messages(result)
    for part in (kind.__name__, f"{TIME_ZONE}=UTC, it has 'Europe/Berlin'", "pyspark_config()"):
        assert part in said
    assert not (market.warehouse / "prices" / "log").exists()


class _Plain:
    """A session with Spark's default settings, in UTC."""

    class conf:
        @staticmethod
        def get(name: str, default: str) -> str:
            return {TIME_ZONE: "Etc/UTC"}.get(name, default)


def test_missing_session_settings_are_named() -> None:
    extensions, catalog = lacking(_Plain())  # type: ignore[arg-type]
    assert extensions.startswith("spark.sql.extensions=io.delta.sql.DeltaSparkSessionExtension")
    assert catalog.startswith("spark.sql.catalog.spark_catalog=org.apache.spark.sql.delta")


def test_sql_changing_settings_are_named() -> None:
    class Other(_Plain):
        class conf:
            @staticmethod
            def get(name: str, default: str) -> str:
                others = {
                    "timestampType": "TIMESTAMP_NTZ",
                    "ansi.enforceReservedKeywords": "true",
                    "legacy.timeParserPolicy": "LEGACY",
                }
                return others.get(name.removeprefix("spark.sql."), _Plain.conf.get(name, default))

    *_, kind, words, times = lacking(Other())  # type: ignore[arg-type]
    assert kind == "spark.sql.timestampType=TIMESTAMP_LTZ, it has 'TIMESTAMP_NTZ'"
    assert words == "spark.sql.ansi.enforceReservedKeywords=FALSE, it has 'true'"
    assert times == "spark.sql.legacy.timeParserPolicy=CORRECTED or EXCEPTION, it has 'LEGACY'"


class _OfAnotherSeries:
    """A session that has all settings, of a Spark version that is not supported."""

    version = "3.5.1-site-2"

    class conf:
        @staticmethod
        def get(name: str, default: str) -> str:
            return {
                TIME_ZONE: "UTC",
                "spark.sql.extensions": "io.delta.sql.DeltaSparkSessionExtension",
                "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
            }[name]


def test_session_of_unsupported_series_is_refused() -> None:
    says = r"^Expected a session of Spark 4\.0, 4\.1 or 4\.2, got one of Spark 3\.5\.1-site-2, .* pip"
    with pytest.raises(SparkUnavailableError, match=says):
        lacking(_OfAnotherSeries())  # type: ignore[arg-type]


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT)}


@pytest.mark.parametrize("given", ["local[2]", SparkSession, object()])
def test_non_resource_is_refused_when_definitions_load(tmp_path: Path, given: Any) -> None:
    market = Market(tmp_path, None)  # type: ignore[arg-type]
    with pytest.raises(TopologyError, match="expected a SparkResource, or a PySparkResource or Lazy"):
        build_definitions(market.prices, spark=given)


def test_resource_without_session_is_refused() -> None:
    with pytest.raises(SparkUnavailableError, match="got SimpleNamespace without one"):
        session_of(SimpleNamespace(spark_session=None))


def test_given_resource_is_used_as_is() -> None:
    theirs = LazyPySparkResource(spark_config={})
    assert build_resources(spark=theirs)["vt_dagster_spark"] is theirs


SPREAD = """
import sys
import dagster as dg
from pathlib import Path
from dagster_pyspark import LazyPySparkResource, PySparkResource
from tests.market import Market
from vt_dagster import SparkResource, build_definitions

NAMES = "prices", "rates", "mine"
market, config = Market(Path({root!r}), None), SparkResource(master="local[1]").pyspark_config()
lazy, eager = LazyPySparkResource(spark_config=config), PySparkResource(spark_config=config)

@dg.asset(deps=["prices", "rates"])
def mine(pyspark: LazyPySparkResource) -> None:
    for name in ("prices", "rates"):
        rows = pyspark.spark_session.read.format("delta").load({root!r} + f"/warehouse/{{name}}/log")
        assert rows.count() == 1

where = dict(warehouse=str(market.warehouse))
defs = dg.Definitions.merge(
    build_definitions(market.prices, spark=lazy, **where),
    build_definitions(market.rates, spark=eager, resource_prefix="eager", **where),
    dg.Definitions([mine], resources={{"pyspark": lazy}}, executor=dg.multiprocess_executor, jobs=[
        dg.define_asset_job("both", dg.AssetSelection.assets(*NAMES).without_checks())
    ]),
)
"""


@pytest.mark.endurance  # test_executor.py tests steps in processes; the tests above, both kinds
@pytest.mark.timeout(400)
def test_resources_with_process_per_step(spark: SparkSession, tmp_path: Path) -> None:
    """Assets of both resource kinds and a team's asset each run in a separate process and session."""
    market = Market(tmp_path, spark)
    for name in ("prices", "rates"):
        market.land(name, "1.jsonl", record("a", "p1", "1 00:00"))
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "dagster.yaml").write_text(INSTANCE)
    (tmp_path / "spread.py").write_text(SPREAD.format(root=str(tmp_path)))
    done = subprocess.run(
        [
            *(str(Path(sys.executable).parent / "dagster"), "job", "execute"),
            *("-f", str(tmp_path / "spread.py"), "-j", "both"),
        ],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=ROOT,
        env={**environment(), "DAGSTER_HOME": str(tmp_path / "home")},
    )
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    assert said.count("STEP_WORKER_STARTED") >= 3
    assert [row["v"] for row in market.store(market.prices).read().collect()] == ["p1"]


def test_invalid_spark_settings_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Booleans have Spark's spelling, a variable of the environment its value; a setting that is a list
    or a mapping, or a parameter with another name, is refused."""
    monkeypatch.setenv("MEMORY", "3g")
    given = {"a": "x", "b": 5, "c": True, "d": 0.5, "e": "", "spark.driver.memory": dg.EnvVar("MEMORY")}
    seen = {"a": "x", "b": "5", "c": "true", "d": "0.5", "e": "", "spark.driver.memory": "3g"}
    spark = SparkResource(spark_config=given)
    with dg.build_resources({"spark": spark}) as resources:
        for one in (spark, resources.spark):
            assert seen.items() <= one.pyspark_config().items()
    monkeypatch.delenv("MEMORY")
    with pytest.raises(
        SparkUnavailableError, match="expected the environment variable MEMORY to be set"
    ):
        spark.pyspark_config()
    for value in (["4g"], {"a": "4g"}, {}, None):
        with pytest.raises(TopologyError, match=r"expected spark.driver.memory of spark_config to be"):
            SparkResource(spark_config={"spark.driver.memory": value})
    for name in ("", "spark.driver.memory "):
        with pytest.raises(TopologyError, match="expected names of Spark settings"):
            SparkResource(spark_config={name: "4g"})
    for name, value in (("master", "local[2]"), ("remote", "sc://host:15002/;token=secret")):
        with pytest.raises(TopologyError, match=f"set it as {name} of SparkResource") as caught:
            SparkResource(spark_config={f"spark.{name}": value})
        assert "secret" not in str(caught.value)
    with pytest.raises(TopologyError, match="expected master to be a Spark master"):
        SparkResource(master=" ")
    for remote in ("localhost:15002", "spark://host:7077", " ", "local[2]"):
        with pytest.raises(TopologyError, match="expected remote to be 'server' or a Spark Connect"):
            SparkResource(remote=remote)
    for remote in ("server", "sc://host:15002/;use_ssl=true", dg.EnvVar("REMOTE"), None):
        SparkResource(remote=remote)
    other: Any = {"spark_conf": {"spark.driver.memory": "4g"}}
    for kind in (SparkResource, WarehouseResource):
        with pytest.raises(ValidationError, match="Extra inputs are not permitted"):
            kind(**other)
