"""Runs assets of topics through Dagster, and reads their tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import dagster as dg
from pyspark.sql import DataFrame, Row, SparkSession

from tests.kafka.topics import Topics
from tests.market import checks, materialized, messages, observed, run
from vt_dagster import Stream, WarehouseResource, build_asset, build_checks, build_sensor
from vt_dagster.kafka import KafkaSource
from vt_dagster.storage.asset_store import AssetStore
from vt_dagster.storage.commit_log import Commit


@dataclass
class Pipeline:
    """A warehouse, and runs of single assets, with their checks unless ``checked`` is false."""

    root: Path
    spark: SparkSession
    checked: bool = True
    instance: dg.DagsterInstance = field(default_factory=dg.DagsterInstance.ephemeral)

    def source(self, topics: Topics, topic: str | Sequence[str], **options: Any) -> KafkaSource:
        return KafkaSource(topics.cluster, topic, **options)

    def execute(self, node: Stream, **options: Any) -> dg.ExecuteInProcessResult:
        """Runs one asset."""
        made = [build_asset(node), *([build_checks(node)] if self.checked else [])]
        return run(made, self.root / "warehouse", **{"instance": self.instance, **options})

    def run(self, node: Stream, **config: Any) -> dict[str, Any]:
        """Requires that a run succeeds and commits; returns its metadata."""
        return materialized(self._succeeds(node, config), node.name)

    def runs_idle(self, node: Stream, **config: Any) -> None:
        """Requires that a run succeeds and finds no new records."""
        observed(self._succeeds(node, config), node.name)

    def _succeeds(self, node: Stream, config: dict[str, Any]) -> dg.ExecuteInProcessResult:
        result = self.execute(node, run_config=self._config(node, config))
        assert result.success, messages(result)
        assert [name for name, check in checks(result).items() if not check.passed] == []
        return result

    def fails(self, node: Stream, **config: Any) -> str:
        """Requires that a run fails; returns its messages."""
        result = self.execute(node, run_config=self._config(node, config))
        assert not result.success
        return messages(result)

    @staticmethod
    def _config(node: Stream, config: dict[str, Any]) -> dict[str, Any]:
        return {"ops": {node.name: {"config": config}}}

    def tick(self, node: Stream, cursor: str | None = None, **options: Any) -> Any:
        """The result of a sensor's tick: a run request, or the text of a skip reason."""
        with dg.DagsterInstance.ephemeral() as own:
            instance = options.pop("instance", own)
            said = build_sensor(node, **options).evaluate_tick(
                dg.build_sensor_context(
                    instance=instance,
                    cursor=cursor,
                    resources={
                        "vt_dagster_warehouse": WarehouseResource(path=str(self.root / "warehouse"))
                    },
                )
            )
        if not said.run_requests:
            return said.skip_message
        (request,) = said.run_requests
        return request

    def store(self, node: Stream) -> AssetStore:
        return AssetStore(str(self.root / "warehouse"), node, self.spark)

    def head(self, node: Stream) -> Commit:
        head = self.store(node).head()
        assert head is not None
        return head.commit

    # Rows are compared with those of other runs, which have other recording times.

    def log(self, node: Stream) -> list[Row]:
        return self._rows(node, "log").orderBy("partition", "offset").collect()

    def current(self, node: Stream) -> list[Row]:
        return self._rows(node, "current").orderBy(*node.key).collect()

    def versions(self, node: Stream) -> list[Row]:
        return self._rows(node, "versions").orderBy(*node.key, "valid_from").collect()

    def _rows(self, node: Stream, what: str) -> DataFrame:
        return self.store(node).read(what).drop("recorded_at")

    def quarantine(self, node: Stream) -> list[Row]:
        found = self.store(node).quarantine()
        return [] if found is None else found.orderBy("source", "partition", "position").collect()
