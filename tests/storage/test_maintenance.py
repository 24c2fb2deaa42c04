"""Tables stay in shape: compaction and cleaning change no result, for nobody."""

from __future__ import annotations

import shutil
from datetime import timedelta
from pathlib import Path

import dagster as dg
import pytest
from pyspark.sql import SparkSession

from tests.storage.topology import Topology
from vt_dagster import SparkResource, build_maintenance, build_resources
from vt_dagster.storage import delta
from vt_dagster.storage.maintenance import maintain


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, spark: SparkSession) -> Topology:
    topology = Topology(tmp_path_factory.mktemp("made"))
    for i in range(4):
        topology.land("rates", f"{i}.jsonl", [("a", i, i), (None, 1, i)])
        topology.land("orders", f"{i}.jsonl", [("a", i, i)])
        for name in ("rates", "orders"):
            topology.run(name, spark)
    return topology


@pytest.fixture
def grown(made: Topology, tmp_path: Path) -> Topology:
    """A table and a stream after several small runs."""
    return Topology(Path(shutil.copytree(made.root, tmp_path / "grown")))


def files(topology: Topology, table: str) -> int:
    return len(list((topology.root / "warehouse" / table).rglob("*.parquet")))


def test_compaction_is_seen_and_changes_nothing(
    grown: Topology, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = grown.tables("rates", spark)
    pinned = grown.store("rates", spark).head()
    assert pinned is not None
    done = maintain(grown.warehouse, "rates", spark)
    assert done == {"files_compacted": 11, "attempts_removed": 0, "conflicts": 0}
    head = grown.store("rates", spark).head()
    assert head is not None
    assert (head.commit, head.version > pinned.version) == (pinned.commit, True)
    assert grown.tables("rates", spark) == before
    # a run that pinned the version before still finds its files
    assert delta.read(spark, grown.store("rates", spark).log_path, pinned.version).count() == 4
    # runs go on: the next batch, and again after that
    grown.land("rates", "8.jsonl", [("a", 8, 8)])
    receipt = grown.run("rates", spark)
    assert receipt.commit is not None
    assert receipt.commit.batch == 5
    grown.run("priced", spark)
    assert maintain(grown.warehouse, "rates", spark)["files_compacted"] == 4
    assert grown.run("rates", spark).commit is None


def test_old_files_go(grown: Topology, spark: SparkSession) -> None:
    left = grown.root / "warehouse" / "rates" / "attempts" / "of-a-killed-run"
    left.mkdir()
    before = grown.tables("rates", spark)
    spark.conf.set("spark.databricks.delta.retentionDurationCheck.enabled", "false")
    try:
        assert files(grown, "rates/view") > 1
        done = maintain(grown.warehouse, "rates", spark, keep=timedelta(0))
    finally:
        spark.conf.unset("spark.databricks.delta.retentionDurationCheck.enabled")
    assert done["attempts_removed"] == 1
    assert not left.exists()
    assert (files(grown, "rates/log"), files(grown, "rates/view")) == (1, 2)
    assert grown.tables("rates", spark) == before
    grown.land("rates", "9.jsonl", [("a", 9, 9)])
    assert grown.run("rates", spark).commit is not None


def test_the_job(grown: Topology, spark: SparkSession) -> None:
    resources = build_resources(grown.warehouse, SparkResource(master="local[2]"))
    defs = dg.Definitions.merge(build_maintenance(), dg.Definitions(resources=resources))
    done = defs.resolve_job_def("maintenance").execute_in_process()
    assert done.success
    assert done.output_for_node("maintain")["orders"]["files_compacted"] == 4
    (schedule,) = defs.schedules or []
    assert isinstance(schedule, dg.ScheduleDefinition)
    assert schedule.cron_schedule == "0 3 * * *"
