"""Kill -9 at every step of the commit protocol, run again: as if nothing had happened."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from tests.storage.topology import Topology, land_first, land_second

pytestmark = pytest.mark.slow

REPOSITORY = Path(__file__).parents[2]
SOURCE_POINTS = [
    "before:log",
    "before:view",
    "during:view",
    "before:forget",
]
JOIN_POINTS = ["before:log", "after:log"]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory, spark: SparkSession) -> Path:
    """The state before the disturbed run: one batch everywhere, and the second has landed."""
    root = tmp_path_factory.mktemp("prepared")
    topology = Topology(root)
    land_first(topology)
    for name in ("rates", "orders", "priced"):
        topology.run(name, spark)
    land_second(topology)
    topology.run("orders", spark)
    return root


@pytest.fixture(scope="module")
def undisturbed(
    prepared: Path, tmp_path_factory: pytest.TempPathFactory, spark: SparkSession
) -> dict[str, Any]:
    topology = _copy(prepared, tmp_path_factory.mktemp("undisturbed"))
    for name in ("rates", "priced"):
        topology.run(name, spark)
    return {name: topology.tables(name, spark) for name in ("rates", "priced")}


def _copy(prepared: Path, target: Path) -> Topology:
    shutil.copytree(prepared, target, dirs_exist_ok=True)
    return Topology(target)


def _killed(topology: Topology, asset: str, point: str) -> None:
    child = subprocess.run(
        [sys.executable, "-m", "tests.storage.crash_child", str(topology.root), asset, point],
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert child.returncode == -signal.SIGKILL, child.stdout + child.stderr


@pytest.mark.parametrize("point", SOURCE_POINTS)
def test_a_killed_source_run_leaves_no_trace(
    point: str, prepared: Path, undisturbed: dict[str, Any], tmp_path: Path, spark: SparkSession
) -> None:
    topology = _copy(prepared, tmp_path)
    _killed(topology, "rates", point)
    topology.run("rates", spark)
    assert topology.tables("rates", spark) == undisturbed["rates"]
    assert topology.run("rates", spark).commit is None


@pytest.mark.parametrize("point", JOIN_POINTS)
def test_a_killed_join_run_leaves_no_trace(
    point: str, prepared: Path, undisturbed: dict[str, Any], tmp_path: Path, spark: SparkSession
) -> None:
    topology = _copy(prepared, tmp_path)
    topology.run("rates", spark)
    _killed(topology, "priced", point)
    topology.run("priced", spark)
    assert topology.tables("priced", spark) == undisturbed["priced"]
    assert topology.run("priced", spark).commit is None


def test_a_reader_repairs_what_a_dead_run_left(
    prepared: Path, undisturbed: dict[str, Any], tmp_path: Path, spark: SparkSession
) -> None:
    """The table's run died right after its commit: quarantine and view lack the batch. The join that
    comes next sees the committed table all the same."""
    topology = _copy(prepared, tmp_path)
    _killed(topology, "rates", "after:log")
    topology.run("priced", spark)
    assert topology.tables("priced", spark) == undisturbed["priced"]
    assert topology.tables("rates", spark) == undisturbed["rates"]
