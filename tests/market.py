"""A small topology of tables, a stream and a join, for tests that need tables written by runs."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import dagster as dg
from pyspark.sql import SparkSession
from pyspark.sql.types import StringType, StructField, StructType, TimestampType

from vt_dagster import (
    FilesSource,
    SparkResource,
    Stream,
    Table,
    VersionedTable,
    build_asset,
    build_checks,
    build_resources,
)
from vt_dagster.orchestration.asset import DATA_VERSION, data_version
from vt_dagster.storage.asset_store import AssetStore

RECORD = StructType(
    [
        StructField("k", StringType()),
        StructField("v", StringType()),
        StructField("at", TimestampType()),
    ]
)
QUIET = {"loggers": {"console": {"config": {"log_level": "CRITICAL"}}}}


def record(k: str | None, v: str | None, at: str | None) -> dict[str, Any]:
    """A record of January 2024: ``at`` is ``day hour:minute``, for example ``1 06:30``."""
    if at is None:
        return {"k": k, "v": v}
    day, _, clock = at.partition(" ")
    return {"k": k, "v": v, "at": f"2024-01-{int(day):02d}T{clock}:00Z"}


def lines(*rows: Any) -> str:
    """The rows as JSON lines; a row that is a text is written unchanged."""
    return "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows)


def run(
    assets: Iterable[Any],
    warehouse: Path | str,
    *,
    instance: dg.DagsterInstance | None = None,
    run_config: dict[str, Any] | None = None,
    raise_on_error: bool = False,
    selection: Any = None,
    tags: dict[str, str] | None = None,
) -> dg.ExecuteInProcessResult:
    """Materializes assets with their checks in this process."""
    return dg.materialize(
        list(assets),
        selection=selection,
        resources=build_resources(str(warehouse), SparkResource(master="local[2]")),
        instance=instance,
        run_config={**QUIET, **(run_config or {})},
        raise_on_error=raise_on_error,
        tags=tags,
    )


def messages(result: dg.ExecuteInProcessResult) -> str:
    """The errors of a run's failed steps, with their causes, as one text."""
    found: list[str] = []
    for event in result.all_events:
        if event.is_step_failure:
            error = event.step_failure_data.error
            while error is not None:
                found.append(error.message)
                error = error.cause
    return "\n".join(found)


def materialized(result: dg.ExecuteInProcessResult, name: str) -> dict[str, Any]:
    """The values of the metadata of an asset's materialization in a run."""
    found = [
        event.materialization.metadata
        for event in result.get_asset_materialization_events()
        if event.asset_key == dg.AssetKey(name)
    ]
    assert len(found) == 1, f"{len(found)} materializations of {name}"
    assert not _observations(result, name)
    return {label: value.value for label, value in found[0].items()}


def observed(result: dg.ExecuteInProcessResult, name: str) -> dict[str, Any]:
    """The values of the metadata of the observation of a run without new records. The run must have no
    materialization of the asset."""
    made = {event.asset_key for event in result.get_asset_materialization_events()}
    assert dg.AssetKey(name) not in made
    (found,) = _observations(result, name)
    assert found["status"].value == "nothing new: no commit"
    return {label: value.value for label, value in found.items()}


def _observations(result: dg.ExecuteInProcessResult, name: str) -> list[Any]:
    return [
        event.asset_observation_data.asset_observation.metadata
        for event in result.get_asset_observation_events()
        if event.asset_key == dg.AssetKey(name)
    ]


def checks(result: dg.ExecuteInProcessResult) -> dict[str, dg.AssetCheckEvaluation]:
    """The results of a run's checks, by ``asset:check``."""
    return {
        f"{e.asset_key.to_user_string()}:{e.check_name}": e
        for e in result.get_asset_check_evaluations()
    }


@dataclass
class Market:
    """Prices (versioned), rates (plain table), sales (stream) and sales with their price (join)."""

    root: Path
    spark: SparkSession
    results: list[dg.ExecuteInProcessResult] = field(default_factory=list)
    instance: dg.DagsterInstance = field(default_factory=dg.DagsterInstance.ephemeral, repr=False)

    def __post_init__(self) -> None:
        self.warehouse = self.root / "warehouse"
        self.prices = VersionedTable(
            "prices",
            key="k",
            schema=RECORD,
            timestamp="at",
            tombstone="v is null",
            history_retention=timedelta(days=1),
            source=FilesSource(str(self.root / "landing" / "prices"), max_bad_share=0.5),
        )
        self.rates = Table("rates", key="k", schema=RECORD, timestamp="at", source=self._files("rates"))
        self.sales = Stream(
            "sales", key="k", schema=RECORD, timestamp="at", source=self._files("sales")
        )
        self.priced = self.sales.left_join(
            self.prices,
            name="priced",
            select=["left.*", "right.v as price"],
            grace_period=timedelta(hours=1),
        )

    def _files(self, name: str) -> FilesSource:
        return FilesSource(str(self.root / "landing" / name))

    @property
    def nodes(self) -> list[Stream]:
        return [self.prices, self.rates, self.sales, self.priced]

    def land(self, name: str, file: str, *rows: Any) -> None:
        """Delivers a file of JSON lines."""
        path = self.root / "landing" / name / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(lines(*rows), encoding="utf-8")

    def run(self, nodes: Sequence[Stream] | None = None, *more: Any, **options: Any) -> Any:
        """Materializes nodes, their checks, and other assets."""
        chosen = self.nodes if nodes is None else nodes
        made = [*map(build_asset, chosen), *map(build_checks, chosen), *more]
        return run(made, self.warehouse, **{"instance": self.instance, **options})

    def store(self, node: Stream) -> AssetStore:
        return AssetStore(str(self.warehouse), node, self.spark)

    def copy(self, root: Path) -> Market:
        """Copies the tables to another directory, where a test may change them."""
        shutil.copytree(self.root, root, dirs_exist_ok=True)
        copy = Market(root, self.spark)
        for node in self.nodes:
            head = self.store(node).head()
            if head is not None:
                tags = {DATA_VERSION: data_version(head.commit).value}
                told = {"versions": {"batch": head.commit.batch}}
                seen = dg.AssetMaterialization(dg.AssetKey(node.name), metadata=told, tags=tags)
                copy.instance.report_runless_asset_event(seen)
        return copy


def healthy_market(root: Path, spark: SparkSession) -> Market:
    """A market after two runs with late records, tombstones, duplicates and quarantine.

    After the runs, stream time of prices is day 2, 05:00, and its history begins at day 1, 05:00.
    """
    market = Market(root, spark)
    market.land(
        "prices",
        "1.jsonl",
        record("a", "p1", "1 00:00"),
        record("a", "p2", "1 02:00"),
        record("b", "q1", "1 01:00"),
        record("a", "p2 again", "1 02:00"),
        '{"k": "a", "v": ',
        record("a", None, "1 04:00"),
        record(None, "nobody's", "1 04:30"),
        record("a", "p3", "1 06:00"),
    )
    market.land(
        "rates",
        "1.jsonl",
        record("a", "r1", "1 02:00"),
        record("a", "r2", "1 01:00"),
        record("b", "r3", "1 01:00"),
    )
    market.land("sales", "1.jsonl", record("a", "s1", "1 03:00"), record("b", "s2", "1 05:00"))
    market.results.append(market.run(raise_on_error=True))
    market.land(
        "prices",
        "2.jsonl",
        record("a", "p4", "2 05:00"),
        record("b", "too late", "1 03:00"),
        record("b", "q2", "1 12:00"),
    )
    market.land(
        "sales",
        "2.jsonl",
        record("a", "s3", "1 07:00"),
        record("b", "s4, late", "1 05:30"),
        record("a", "s5", "1 09:00"),
    )
    market.results.append(market.run(raise_on_error=True))
    return market
