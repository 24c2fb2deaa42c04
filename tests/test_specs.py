"""Asset specs for Dagster, by arguments and by a translator, and asset keys with prefixes."""

from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any

import dagster as dg
import polars as pl
import pytest
from pyspark.sql import SparkSession
from typer.testing import CliRunner

from tests.market import QUIET, RECORD, lines, messages, record
from vt_dagster import (
    FilesSource,
    SparkResource,
    Stream,
    Table,
    TopologyError,
    TopologyTranslator,
    VersionedTable,
    build_asset,
    build_checks,
    build_definitions,
    build_export,
    build_freshness_check,
    build_resources,
    ops,
    read,
)
from vt_dagster.cli import app
from vt_dagster.errors import StorageError
from vt_dagster.orchestration.translator import code_version
from vt_dagster.runs.replay import compare, replay, swap
from vt_dagster.runs.run import run_once
from vt_dagster.storage import maintenance
from vt_dagster.storage.arrow_reader import asset_names
from vt_dagster.storage.asset_store import AssetStore, stores_of

pytestmark = pytest.mark.usefixtures("few_rows")


class Catalog(TopologyTranslator):
    """A translator that adds tags for a data catalog."""

    def get_asset_spec(self, node: Stream) -> dg.AssetSpec:
        spec = super().get_asset_spec(node)
        return spec.merge_attributes(tags={"history": "yes" if node.versioned else "no"})


class Shop:
    """Prices, sales, and sales joined with prices, each with another key prefix."""

    def __init__(self, root: Path) -> None:
        self.root, self.warehouse = root, str(root / "warehouse")
        self.prices = VersionedTable(
            "prices",
            history_retention=timedelta(days=30),
            key_prefix="shop/eu",
            **self._about("prices"),
        )
        self.sales = Stream("sales", key_prefix=["shop"], **self._about("sales"))
        self.priced = self.sales.left_join(
            self.prices, name="priced", select=["left.*", "right.v as price"], key_prefix="published"
        )

    def _about(self, name: str) -> dict[str, Any]:
        source = FilesSource(str(self.root / name))
        return {"key": "k", "schema": RECORD, "timestamp": "at", "source": source}

    def land(self, name: str, *rows: Any) -> None:
        (self.root / name).mkdir(exist_ok=True)
        (self.root / name / "1.jsonl").write_text(lines(*rows), encoding="utf-8")

    def land_all(self) -> None:
        self.land("prices", record("a", "p1", "1 00:00"), record("a", "p2", "1 12:00"))
        self.land("sales", record("a", "s1", "1 03:00"), record("a", "s2", "1 13:00"))


def spec_of(defs: dg.Definitions, *path: str) -> dg.AssetSpec:
    return (
        defs.resolve_asset_graph().get(dg.AssetKey(path)).assets_def.get_asset_spec(dg.AssetKey(path))
    )


def test_default_asset_spec(tmp_path: Path) -> None:
    shop = Shop(tmp_path)
    spec = spec_of(build_definitions(shop.priced), "published", "priced")
    assert {dep.asset_key.to_user_string() for dep in spec.deps} == {"shop/sales", "shop/eu/prices"}
    assert spec.kinds == {"spark", "deltalake", "stream"}
    assert spec.code_version == code_version(shop.priced)
    lineage = spec.metadata["dagster/column_lineage"].deps_by_column["price"]  # type: ignore[union-attr]
    assert [dep.asset_key.to_user_string() for dep in lineage] == ["shop/eu/prices"]


def test_arguments_and_translator_extend_spec(tmp_path: Path) -> None:
    shop, eager = Shop(tmp_path), dg.AutomationCondition.eager()
    fresh, again = dg.FreshnessPolicy.time_window(timedelta(days=1)), dg.RetryPolicy(max_retries=2)
    defs = build_definitions(
        replace(shop.prices, owners=("team:shop",), group="tables"),
        translator=Catalog(),
        pool="spark",
        retry_policy=again,
        tags={"tier": "gold"},
        owners=["someone@example.com"],
        kinds={"parquet"},
        metadata={"runbook": "ask"},
        automation_condition=eager,
        freshness_policy=fresh,
        code_version="7",
    )
    spec = spec_of(defs, "shop", "eu", "prices")
    assert spec.tags.items() >= {"history": "yes", "tier": "gold"}.items()
    assert set(spec.owners) == {"team:shop", "someone@example.com"}
    assert spec.kinds == {"spark", "deltalake", "versioned", "parquet"}
    assert spec.metadata["runbook"] in ("ask", dg.MetadataValue.text("ask"))
    assert spec.metadata["vt_dagster/key"] in ("k", dg.MetadataValue.text("k"))
    assert (spec.group_name, spec.code_version) == ("tables", "7")
    assert (spec.automation_condition, spec.freshness_policy) == (eager, fresh)
    made = defs.resolve_asset_graph().get(spec.key).assets_def
    assert made.op.pool == "spark"
    assert made.op.retry_policy == again
    (checks,) = defs.asset_checks or []
    assert checks.op.pool == "spark"  # type: ignore[union-attr]


def test_code_version_follows_computation(tmp_path: Path) -> None:
    shop = Shop(tmp_path)

    def big(limit: int, **shown: Any) -> Table:
        return shop.prices.filter(f"length(v) > {limit}", name="big", **shown)

    assert code_version(big(1)) == code_version(big(1, description="Other words.", key_prefix="x"))
    assert code_version(big(1)) != code_version(big(2))
    assert code_version(shop.prices) != code_version(replace(shop.prices, tombstone="v is null"))


def test_translator_cannot_change_key_or_partitions(tmp_path: Path) -> None:
    class Elsewhere(TopologyTranslator):
        def get_asset_spec(self, node: Stream) -> dg.AssetSpec:
            return super().get_asset_spec(node).replace_attributes(key=["other", node.name])

    class Daily(TopologyTranslator):
        def get_asset_spec(self, node: Stream) -> dg.AssetSpec:
            spec = super().get_asset_spec(node)
            return spec.replace_attributes(partitions_def=dg.DailyPartitionsDefinition("2026-01-01"))

    sales = Shop(tmp_path).sales
    with pytest.raises(TopologyError, match=r"key shop/sales, got other/sales: .* table's key_prefix"):
        build_asset(sales, translator=Elsewhere())
    with pytest.raises(
        TopologyError, match=r"without partitions, got .* Partition the assets that read"
    ):
        build_asset(sales, translator=Daily())
    # An attribute would replace the partitions of the translator's spec, or its inputs.
    wrong: dict[str, Any] = {"partitions_def": dg.StaticPartitionsDefinition(["a"]), "deps": []}
    said = r"shop/sales: expected attributes of its spec among tags, .*, got deps, partitions_def; "
    with pytest.raises(TopologyError, match=said):
        build_definitions(sales, **wrong)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"kinds": "silver"}, "kinds to be a list of texts, got 'silver'"),
        ({"owners": "team:shop"}, "owners to be a list of texts, got 'team:shop'"),
        ({"metadata": ["runbook"]}, r"metadata to be a mapping, got \['runbook'\]"),
        ({"freshness_policy": timedelta(hours=1)}, "freshness_policy to be a FreshnessPolicy, got"),
    ],
)
def test_attributes_of_other_types_are_refused(tmp_path: Path, given: Any, said: str) -> None:
    """Letters of a text would be kinds; Dagster names no argument of the others."""
    with pytest.raises(TopologyError, match=f"shop/sales: expected {said}"):
        build_definitions(Shop(tmp_path).sales, **given)


@pytest.mark.parametrize(
    ("prefix", "said"),
    [
        ("../up", "'..' is not a name for a key prefix"),
        ("a//b", "'' is not a name for a key prefix"),
        ("a/b/c/d", "a key_prefix of at most 3 parts, got 'a/b/c/d'"),
    ],
)
def test_invalid_key_prefix_is_refused(prefix: str, said: str) -> None:
    with pytest.raises(TopologyError) as raised:
        Table("prices", key="k", schema=RECORD, timestamp="at", key_prefix=prefix)
    assert said in str(raised.value)


def test_key_prefixes_are_folders(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Key prefixes work in assets, checks, sensors, reads, commands, maintenance, replays and swaps."""
    shop = Shop(tmp_path)
    shop.land_all()
    got: list[str] = []

    @dg.asset(
        ins={"table": dg.AssetIn(["shop", "eu", "prices"], input_manager_key="vt_dagster_tables")}
    )
    def mine(table: pl.DataFrame) -> None:
        got.extend(table["v"])

    ours = build_definitions(
        shop.priced, warehouse=shop.warehouse, spark=SparkResource(master="local[2]")
    )
    defs = dg.Definitions.merge(ours, dg.Definitions(assets=[mine]))
    sensor = next(s for s in ours.sensors or [] if s.name == "sales_sensor")
    where = {"vt_dagster_warehouse": (ours.resources or {})["vt_dagster_warehouse"]}
    tick = sensor(dg.build_sensor_context(resources=where))  # type: ignore[operator]
    assert isinstance(tick, dg.SensorResult)
    (request,) = tick.run_requests or []
    result = defs.resolve_implicit_global_asset_job_def().execute_in_process(
        run_config=request.run_config
    )

    assert result.success
    assert {e.check_name for e in result.get_asset_check_evaluations() if not e.passed} == set()
    assert asset_names(shop.warehouse) == ["published/priced", "shop/eu/prices", "shop/sales"]
    assert got == ["p2"]
    assert read(shop.prices, warehouse=shop.warehouse)["v"].to_pylist() == ["p2"]
    assert read("published/priced", warehouse=shop.warehouse)["price"].to_pylist() == ["p1", "p2"]
    called = CliRunner().invoke(
        app, ["get", "shop/eu/prices", "--key", "a", "--warehouse", shop.warehouse]
    )
    assert called.exit_code == 0, called.output
    assert "p2" in called.output
    assert maintenance.maintain(shop.warehouse, "shop/sales", spark)["conflicts"] == 0
    monkeypatch.setattr(maintenance, "maintain", lambda _, name, *__: name)  # the others take long
    assert set(maintenance.maintain_all(shop.warehouse, spark)) == set(asset_names(shop.warehouse))
    anew = replay(shop.warehouse, shop.prices, "anew", spark)
    assert anew.root == str(Path(shop.warehouse) / "shop" / "eu" / "anew")
    found = compare(anew, AssetStore(shop.warehouse, shop.prices, spark))
    assert (found.missing, found.extra) == (0, 0)
    swap(shop.warehouse, "shop/eu/prices", "shop/eu/anew")
    assert read(shop.prices, warehouse=shop.warehouse)["v"].to_pylist() == ["p2"]


def test_key_prefix_of_dagster_loaders_is_refused(spark: SparkSession, tmp_path: Path) -> None:
    """Dagster's loaders can put a prefix before the keys of assets. A stream or table refuses that
    before it reads anything, since its key is also the directory of its tables; so do its checks. An
    export has a directory of its own, and takes any key."""
    shop = Shop(tmp_path)
    shop.land_all()

    @dg.graph_asset(**ops.graph_arguments(shop.sales))
    def of_ops() -> Any:
        records, arrival = ops.read_op(shop.sales)()
        return ops.write_op(shop.sales)(ops.put_op(shop.sales)(records, arrival), arrival)

    def run(*assets: dg.AssetsDefinition, checks: Any = ()) -> dg.ExecuteInProcessResult:
        module = ModuleType("theirs")
        vars(module).update({f"asset_{place}": one for place, one in enumerate(assets)})
        vars(module).update({f"check_{place}": one for place, one in enumerate(checks)})
        defs = dg.Definitions(
            dg.load_assets_from_modules([module], key_prefix="theirs"),
            asset_checks=dg.load_asset_checks_from_modules([module], asset_key_prefix="theirs"),
            resources=build_resources(shop.warehouse, SparkResource(master="local[2]")),
            executor=dg.in_process_executor,
        )
        job = defs.resolve_implicit_global_asset_job_def()
        return job.execute_in_process(instance=instance, run_config=QUIET, raise_on_error=False)

    said = (
        "sales: expected its asset to have the key shop/sales, which is also the directory of its "
        "tables, got theirs/shop/sales; set the key_prefix of the stream or table instead of that"
    )
    fresh = build_freshness_check(shop.sales, at_most=timedelta(days=1))
    with dg.DagsterInstance.ephemeral() as instance:
        for asset in (build_asset(shop.sales), of_ops):
            assert said in messages(run(asset)), asset
        for check in (build_checks(shop.sales), fresh):
            assert said in messages(run(checks=[check]))
        assert not Path(shop.warehouse).exists()
        run_once(shop.sales, stores_of(shop.warehouse, spark))
        export = build_export(shop.sales, to=str(tmp_path / "export"))
        results = [run(export) for _ in range(2)]
        assert all(one.success for one in results)
        events = [one.get_asset_materialization_events() for one in results]
        assert [[e.asset_key for e in some] for some in events] == [
            [dg.AssetKey(["theirs", "shop", "sales_export"])],
            [],
        ]


def test_nested_asset_folders_are_refused(spark: SparkSession, tmp_path: Path) -> None:
    shop = Shop(tmp_path)
    shop.land_all()
    with pytest.raises(TopologyError, match=r"'log' is a folder of an asset's own"):
        replace(shop.sales, key_prefix=("prices",), name="log")
    inner = replace(shop.sales, key_prefix=("prices",), name="sales")
    outer = replace(shop.sales, key_prefix=(), name="shop")
    run_once(replace(shop.prices, key_prefix=()), stores_of(shop.warehouse, spark))
    with pytest.raises(StorageError, match="prices/sales: the warehouse has an asset 'prices'"):
        run_once(inner, stores_of(shop.warehouse, spark))
    run_once(shop.sales, stores_of(shop.warehouse, spark))
    with pytest.raises(
        StorageError, match="shop: the warehouse has an asset 'shop/sales', and an asset"
    ):
        run_once(outer, stores_of(shop.warehouse, spark))
