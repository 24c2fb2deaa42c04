"""Maintenance: compaction and cleaning change no result of any reader."""

from __future__ import annotations

import os
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import dagster as dg
import pytest
from pyspark.sql import DataFrame, SparkSession

from tests.storage.topology import Topology
from vt_dagster import SparkResource, build_maintenance, build_resources
from vt_dagster.runs.run import run_once
from vt_dagster.spark.settings import settings
from vt_dagster.storage import delta, parquet, view
from vt_dagster.storage.asset_store import AssetStore, stores_of
from vt_dagster.storage.commit_log import Commit, Shape
from vt_dagster.storage.maintenance import KEEP, is_older, maintain, remove_commits

pytestmark = pytest.mark.usefixtures("few_rows")


@pytest.fixture
def after_small_runs(tmp_path: Path, spark: SparkSession) -> Topology:
    """A table after several small runs, and a stream after one."""
    topology = Topology(tmp_path)
    for i in range(4):
        topology.land("rates", f"{i}.jsonl", [("a", i, i), (None, 1, i)])
        topology.run("rates", spark)
    topology.land("orders", "0.jsonl", [("a", 0, 0), ("a", 1, 1)])
    topology.run("orders", spark)
    return topology


def files(topology: Topology, table: str) -> int:
    return len(list((topology.root / "warehouse" / table).rglob("*.parquet")))


def view_batch(topology: Topology, spark: SparkSession) -> int:
    """The batch of the table's view."""
    base = topology.store("rates", spark)._view.base()
    assert base is not None
    return base.checkpoint.batch


def test_maintenance_changes_no_rows(
    after_small_runs: Topology, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The job, which also truncates logs, and ``maintain`` for one asset change no rows of
    ``rates``."""
    before = after_small_runs.tables("rates", spark)
    pinned = after_small_runs.store("rates", spark).head()
    assert pinned is not None
    resources = build_resources(after_small_runs.warehouse, SparkResource(master="local[2]"))
    orders = replace(after_small_runs.orders, log_retention=timedelta(0))
    defs = dg.Definitions.merge(build_maintenance(orders), dg.Definitions(resources=resources))
    job = defs.resolve_job_def("maintenance").execute_in_process()
    assert job.success
    done = job.output_for_node("maintain")
    assert done["rates"] == {
        "files_compacted": 11,
        "attempts_removed": 0,
        "commits_removed": 0,
        "conflicts": 0,
        "replaced_removed": 0,
    }
    assert done["orders"]["records_truncated"] == 2
    (schedule,) = defs.schedules or []
    assert isinstance(schedule, dg.ScheduleDefinition)
    assert schedule.cron_schedule == "0 3 * * *"
    head = after_small_runs.store("rates", spark).head()
    assert head is not None
    assert (head.commit, head.version > pinned.version) == (pinned.commit, True)
    assert after_small_runs.tables("rates", spark) == before
    # a run that pinned the version before the compaction still finds its files
    assert (
        parquet.read(spark, after_small_runs.store("rates", spark).log_path, pinned.version).count()
        == 4
    )
    # runs continue: the next batch, and one more further below
    after_small_runs.land("rates", "8.jsonl", [("a", 8, 8)])
    monkeypatch.setattr(view, "EACH_RUN", 0)  # the view is behind, as that of a large table
    monkeypatch.setattr(view, "SHARE", 100)
    receipt = after_small_runs.run("rates", spark)
    assert receipt.commit is not None
    assert receipt.commit.batch == 5
    assert view_batch(after_small_runs, spark) == 4
    paid = after_small_runs.payments.left_join(
        after_small_runs.rates, name="paid", select=["left.n", "right.n as rate"]
    )
    after_small_runs.land("payments", "0.jsonl", [("a", 1, 2.5), ("a", 2, 8)])
    after_small_runs.run("payments", spark)
    run_once(paid, stores_of(after_small_runs.warehouse, spark))
    rows = AssetStore(after_small_runs.warehouse, paid, spark).read().collect()
    assert {row.n: row.rate for row in rows} == {1: 2, 2: 8}
    # old files are removed: replaced ones, and those left by killed or sleeping runs
    left = [
        after_small_runs.root / "warehouse" / "rates" / "attempts" / "of-a-killed-run",
        after_small_runs.root
        / "warehouse"
        / "rates"
        / "log"
        / "9-of-a-run-that-sleeps"
        / "part.parquet",
    ]
    left[0].mkdir()
    left[1].parent.mkdir()
    left[1].touch()
    before = after_small_runs.tables("rates", spark)
    assert files(after_small_runs, "rates/view") > 2
    own = {
        "spark.databricks.delta.vacuum.logging.enabled": "true",
        "spark.databricks.delta.replaceWhere.constraintCheck.enabled": "false",
        "spark.sql.shuffle.partitions": "3",
    }
    with settings(spark, own):
        done = maintain(after_small_runs.warehouse, "rates", spark, keep=timedelta(0))
        assert {key: spark.conf.get(key) for key in own} == own, "the session's settings stay"
    assert (done["files_compacted"], done["attempts_removed"]) == (4, 1)
    assert not any(path.exists() for path in left)
    assert (files(after_small_runs, "rates/log"), files(after_small_runs, "rates/view")) == (1, 2)
    assert view_batch(after_small_runs, spark) == 5, "maintenance brings it up to the log"
    assert after_small_runs.tables("rates", spark) == before
    assert after_small_runs.run("rates", spark).commit is None
    after_small_runs.land("rates", "9.jsonl", [("a", 9, 9)])
    assert after_small_runs.run("rates", spark).commit is not None


def test_file_age_decides_on_object_store() -> None:
    """An object store has no directories with a time, so the files decide."""
    attempt = "memory://warehouse/rates/attempts/of-a-killed-run"
    fs, local = delta.filesystem(attempt)
    fs.pipe_file(f"{local}/state/part-0.parquet", b"")
    assert is_older(attempt, timedelta(0))
    assert not is_older(attempt, timedelta(minutes=1))


def commits(path: Path) -> list[int]:
    return sorted(int(f.name[:20]) for f in (path / "_delta_log").glob("*.json"))


def age_files(path: Path, days: int) -> None:
    """Makes all files older by this number of days: Delta and we take the age from the files' times."""
    for file in path.rglob("*"):
        then = file.stat().st_mtime - days * 86_400
        os.utime(file, (then, then))


def append(spark: SparkSession, path: Path, batch: int) -> None:
    commit = Commit(
        asset="rates", batch=batch, attempt=f"attempt-{batch}", shape=Shape(kind="stream", key=[])
    )
    parquet.write(
        spark.range(1).coalesce(1),
        str(path),
        document=commit.model_dump(),
        batch=batch,
        asset="rates",
    )


@pytest.fixture
def old_table(tmp_path: Path, spark: SparkSession) -> Path:
    """Five commits of ours, versions 0 and 2 to 5, a checkpoint at 3; forty days old."""
    path = tmp_path / "rates" / "log"
    append(spark, path, 1)
    spark.sql(f"ALTER TABLE delta.`{path}` SET TBLPROPERTIES ('delta.checkpointInterval' = '4')")
    for batch in range(2, 6):
        append(spark, path, batch)
    age_files(path, 40)
    return path


def test_commits_outlive_vacuum(
    old_table: Path, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If there are no new runs, our last commit stays. A VACUUM by another program makes commits too,
    and Delta's own cleaning would remove ours after a checkpoint."""
    append(spark, old_table, 6)
    append(spark, old_table, 7)
    last = delta.last_commit(str(old_table))
    assert (remove_commits(str(old_table), timedelta(days=41)), commits(old_table)[0]) == (0, 0)
    done = maintain(str(old_table.parent.parent), "rates", spark)
    assert (done["commits_removed"], commits(old_table)[0]) == (3, 3)
    log = sorted(f.name for f in (old_table / "_delta_log").iterdir())
    assert [name for name in log if name.lstrip(".") < f"{3:020d}"] == []
    assert last is not None
    assert commits(old_table)[-1] == last.version + 1  # files were compacted; cleaning leaves no commit
    after = delta.last_commit(str(old_table))
    assert after is not None
    assert after.document == last.document
    assert parquet.read(spark, str(old_table)).count() == 7
    assert parquet.read(spark, str(old_table), 6).count() == 6
    assert spark.sql(f"DESCRIBE HISTORY delta.`{old_table}`").count() == len(commits(old_table))
    assert remove_commits(str(old_table), KEEP) == 0, "the checkpoint of version 7 is new"
    spark.sql(f"VACUUM delta.`{old_table}` RETAIN 168 HOURS")
    assert commits(old_table)[-1] == 10
    age_files(old_table, 40)
    for version in range(11, 15):
        spark.sql(f"ALTER TABLE delta.`{old_table}` SET TBLPROPERTIES ('theirs' = '{version}')")
    assert (old_table / "_delta_log" / f"{12:020d}.checkpoint.parquet").exists()
    said, sql = list[str](), type(spark).sql

    def noted(session: SparkSession, text: str) -> DataFrame:
        said.append(text.split()[0])
        return sql(session, text)

    with monkeypatch.context() as patched:
        patched.setattr(type(spark), "sql", noted)
        maintain(str(old_table.parent.parent), "rates", spark)
    assert said == ["VACUUM"], "there is one file: nothing to compact"
    found = delta.last_commit(str(old_table))
    assert found is not None
    assert found.document == last.document


def test_shared_settings_are_restored_after_last_user(spark: SparkSession) -> None:
    wanted = {"spark.sql.shuffle.partitions": "17"}
    before = spark.conf.get("spark.sql.shuffle.partitions")
    first, second = settings(spark, wanted), settings(spark, wanted)
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert spark.conf.get("spark.sql.shuffle.partitions") == "17"
    second.__exit__(None, None, None)
    assert spark.conf.get("spark.sql.shuffle.partitions") == before
