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

from tests.conftest import ConnectServer
from tests.storage.topology import Topology, land_first, land_second
from vt_dagster.runs.audit import audit
from vt_dagster.runs.erase import FOLDER, erase

pytestmark = pytest.mark.slow

REPOSITORY = Path(__file__).parents[2]
SOURCE_POINTS = [
    "before:log",
    "before:view",
    "during:view",
    "before:forget",
]
# Each point of some asset; in endurance the same points of others.
JOIN_POINTS = [
    ("corrected", "after:log"),
    ("paid", "during:stage_state"),
    ("amended", "before:view"),
    *(
        pytest.param(asset, point, marks=pytest.mark.endurance)
        for asset, point in (
            ("priced", "before:log"),
            ("paid", "before:log"),
            ("paid", "after:log"),
            ("paid", "before:forget"),
            ("amended", "during:stage_state"),
            ("amended", "after:log"),
        )
    ),
]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory, spark: SparkSession) -> Path:
    """The state before the disturbed run: one batch everywhere, and the second has landed."""
    root = tmp_path_factory.mktemp("prepared")
    topology = Topology(root)
    land_first(topology)
    # one that is corrected later, and one that a rate comes too late for
    topology.land("orders", "1b.jsonl", [("a", 8, 3.5), ("b", 9, 4.5)])
    topology.land("payments", "1.jsonl", [("a", 21, 2), ("q", 22, 3)])
    for name in ("rates", "orders", "priced", "corrected", "payments", "paid", "amended"):
        topology.run(name, spark)
    land_second(topology)
    topology.land("rates", "2b.jsonl", [("b", 7, 4.2)])
    # One whose match waits, one that will wait, two that are late, one in time.
    payments = [("b", 23, 5.5), ("z", 24, 16), ("a", 25, 1), ("b", 27, 9), ("c", 26, 15)]
    topology.land("payments", "2.jsonl", payments)
    for name in ("orders", "payments"):
        topology.run(name, spark)
    return root


@pytest.fixture(scope="module")
def rated(prepared: Path, tmp_path_factory: pytest.TempPathFactory, spark: SparkSession) -> Path:
    """The same where the table has taken its records: of the joins a run is due."""
    topology = _copy(prepared, tmp_path_factory.mktemp("rated"))
    topology.run("rates", spark)
    return topology.root


@pytest.fixture(scope="module")
def undisturbed(
    rated: Path, tmp_path_factory: pytest.TempPathFactory, spark: SparkSession
) -> dict[str, Any]:
    topology = _copy(rated, tmp_path_factory.mktemp("undisturbed"))
    names = ("priced", "corrected", "paid", "amended")
    for name in names:
        topology.run(name, spark)
    found = {name: topology.tables(name, spark) for name in ("rates", *names)}
    paid = {(r["n"], r["payment"]) for r in found["paid"]["log"]}
    assert paid >= {(2, 23), (6, 26), (None, 22), (None, 25)}
    assert {row["_side"] for row in found["paid"]["state"]} == {0, 1}
    totals = found["paid"]["commit"][-1]
    assert (totals["unmatched"], totals["late"], totals["waiting"]) == (3, 1, 3)
    totals = found["corrected"]["commit"][-1]
    assert (totals["corrected"], totals["corrections_too_late"]) == (1, 1)
    assert len(found["corrected"]["quarantine"]) == 1
    # The order of minute 1 had a row without a match, and a payment of its time has come.
    ends = [(r["old"]["n"], r["cause"]["offset"]) for r in found["amended"]["log"] if r["is_tombstone"]]
    assert ends == [(1, 4)]
    assert {row["_said"] for row in found["amended"]["state"]} == {True, False}
    return found


def _copy(prepared: Path, target: Path) -> Topology:
    shutil.copytree(prepared, target, dirs_exist_ok=True)
    return Topology(target)


def _killed(topology: Topology, asset: str, point: str, *remote: str) -> None:
    child = subprocess.run(
        [sys.executable, "-m", "tests.storage.crash_child", str(topology.root), asset, point, *remote],
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert child.returncode == -signal.SIGKILL, child.stdout + child.stderr


@pytest.mark.parametrize("point", SOURCE_POINTS)
def test_a_killed_source_run_leaves_no_trace(
    point: str,
    prepared: Path,
    undisturbed: dict[str, Any],
    tmp_path: Path,
    spark: SparkSession,
    connect_server: ConnectServer,
) -> None:
    """While a file is written Spark dies, too; elsewhere it matters to nobody whether it does, and a
    server is there already."""
    topology = _copy(prepared, tmp_path)
    _killed(topology, "rates", point, *([] if "during" in point else [connect_server.address]))
    topology.run("rates", spark)
    assert topology.tables("rates", spark) == undisturbed["rates"]
    assert topology.run("rates", spark).commit is None


@pytest.mark.parametrize(("asset", "point"), JOIN_POINTS)
def test_a_killed_join_run_leaves_no_trace(
    asset: str,
    point: str,
    rated: Path,
    undisturbed: dict[str, Any],
    tmp_path: Path,
    spark: SparkSession,
    connect_server: ConnectServer,
) -> None:
    """Spark is a server, which lives on: what it writes when its client dies may be finished."""
    topology = _copy(rated, tmp_path)
    _killed(topology, asset, point, connect_server.address)
    topology.run(asset, spark)
    assert topology.tables(asset, spark) == undisturbed[asset]
    assert topology.run(asset, spark).commit is None


def test_a_reader_repairs_what_a_dead_run_left(
    prepared: Path,
    undisturbed: dict[str, Any],
    tmp_path: Path,
    spark: SparkSession,
    connect_server: ConnectServer,
) -> None:
    """The table's run died right after its commit: quarantine and view lack the batch. The join that
    comes next sees the committed table all the same."""
    topology = _copy(prepared, tmp_path)
    _killed(topology, "rates", "after:log", connect_server.address)
    topology.run("priced", spark)
    assert topology.tables("priced", spark) == undisturbed["priced"]
    assert topology.tables("rates", spark) == undisturbed["rates"]


def test_a_killed_erase_goes_on(
    rated: Path,
    undisturbed: dict[str, Any],
    tmp_path: Path,
    spark: SparkSession,
    connect_server: ConnectServer,
) -> None:
    """The log of the stream is without the key then, and nothing else is."""
    topology = _copy(rated, tmp_path)
    for name in ("priced", "corrected"):
        topology.run(name, spark)
    _killed(topology, "orders", "before:purge", connect_server.address)
    about: dict[str, Any] = {"key": ["b"], "reason": "asked to", "among": topology.nodes}
    done = erase(topology.warehouse, topology.orders, spark, **about)
    assert done.finished
    assert [p.stem for p in (tmp_path / "warehouse" / FOLDER).glob("*.json")] == [Path(done.path).stem]
    for name in ("orders", "priced", "corrected"):
        assert done.searched[f"{name}/log"].erased > 0
        store = topology.store(name, spark)
        keys = {r["k"] for r in store.read("log").collect()}
        assert "b" not in keys
        assert (None in keys) == (name == "corrected")  # its rows have another key, and stay
        assert [f for f in audit(store) if not f.passed] == []
    others = [r for r in undisturbed["corrected"]["view"] if r["k"] != "b"]
    assert topology.tables("corrected", spark)["view"] == others
