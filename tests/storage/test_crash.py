"""After kill -9 at any step of the commit protocol, the next run leaves no trace of the killed one."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from tests.conftest import ConnectServer
from tests.storage.topology import Topology, land_first, land_second
from vt_dagster.runs.audit import audit
from vt_dagster.runs.erase import FOLDER, erase
from vt_dagster.storage import delta

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("few_rows")]

REPOSITORY = Path(__file__).parents[2]
SOURCE_POINTS = ["before:log", "during:view", "before:remove_staged_before"]
# Points in assets whose runs are short and show much; endurance tests kill other assets too.
MADE_POINTS = [("corrected", "before:view"), ("counts", "during:stage_state")]
MORE_SOURCE_POINTS = ["before:view"]
MORE_POINTS = [
    ("priced", "before:log"),
    ("corrected", "after:log"),
    ("counts", "before:remove_staged_before"),
]
READ_AFTER, ERASED = ("rates", "after:log"), ("orders", "before:purge")
MADE = ("priced", "corrected", "counts")


@pytest.fixture(scope="module")
def before_kill(tmp_path_factory: pytest.TempPathFactory, spark: SparkSession) -> Path:
    """The state before the killed run: each asset has one batch, and the second files have landed."""
    root = tmp_path_factory.mktemp("before_kill")
    topology = Topology(root)
    land_first(topology)
    # an order whose row is corrected later, and one for which a rate comes too late
    topology.land("orders", "1b.jsonl", [("a", 8, 3.5), ("b", 9, 4.5)])
    for name in ("rates", "orders", "priced", "corrected", "counts"):
        topology.run(name, spark)
    land_second(topology)
    topology.land("rates", "2b.jsonl", [("b", 7, 4.2)])
    topology.run("orders", spark)
    return root


@pytest.fixture(scope="module")
def after_rates_run(
    before_kill: Path, tmp_path_factory: pytest.TempPathFactory, spark: SparkSession
) -> Path:
    """The state after the second run of ``rates``: the derived assets have new input."""
    topology = _copy(before_kill, tmp_path_factory.mktemp("after_rates_run"))
    topology.run("rates", spark)
    return topology.root


@pytest.fixture(scope="module")
def after_all_runs(
    after_rates_run: Path, tmp_path_factory: pytest.TempPathFactory, spark: SparkSession
) -> Path:
    """The state after an undisturbed run of each derived asset."""
    topology = _copy(after_rates_run, tmp_path_factory.mktemp("after_all_runs"))
    for name in MADE:
        topology.run(name, spark)
    return topology.root


@pytest.fixture(scope="module")
def undisturbed_tables(after_all_runs: Path, spark: SparkSession) -> dict[str, Any]:
    topology = Topology(after_all_runs)
    found = {name: topology.tables(name, spark) for name in ("rates", *MADE)}
    totals = found["corrected"]["commit"][-1]
    assert (totals["corrected"], totals["corrections_too_late"]) == (1, 1)
    assert len(found["corrected"]["quarantine"]) == 1
    assert len(found["counts"]["state"]) > 2
    return found


def _copy(prepared: Path, target: Path) -> Topology:
    shutil.copytree(prepared, target, dirs_exist_ok=True)
    return Topology(target)


@dataclass
class Killed:
    """Copies of the warehouse in each of which a run was killed, by asset and point.

    Args:
        root: the directory of the copies.
        states: the warehouse before a run of a source, before one of a derived asset, before an erase.
        address: the address of a Spark Connect server.
    """

    root: Path
    states: tuple[Path, Path, Path]
    address: str

    def at(self, asset: str, point: str) -> Topology:
        if not self._place(asset, point).exists():  # a point of an endurance test
            self.kill([(asset, point)])
        return Topology(self._place(asset, point))

    def _place(self, asset: str, point: str) -> Path:
        return self.root / f"{asset}-{point.replace(':', '-')}"

    def kill(self, cases: Sequence[tuple[str, str]]) -> None:
        """Kills a run of each case. At ``during:view`` Spark is local and dies with the process: a
        server would live on and might finish the file. At other points, both give the same result."""
        told = list[str]()
        for asset, point in cases:
            source, made, erased = self.states
            state = erased if "purge" in point else source if asset == "rates" else made
            place = _copy(state, self._place(asset, point)).root
            told += ["local" if point == "during:view" else self.address, str(place), asset, point]
        child = subprocess.run(
            [sys.executable, "-m", "tests.storage.crash_child", *told],
            cwd=REPOSITORY,
            env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
            capture_output=True,
            text=True,
            timeout=600,
        )
        assert child.returncode == 0, child.stdout + child.stderr


@pytest.fixture(scope="module")
def killed(
    before_kill: Path,
    after_rates_run: Path,
    after_all_runs: Path,
    tmp_path_factory: pytest.TempPathFactory,
    connect_server: ConnectServer,
) -> Killed:
    """One process forks for all cases, because the imports take longer than a run."""
    states = before_kill, after_rates_run, after_all_runs
    found = Killed(tmp_path_factory.mktemp("killed"), states, connect_server.address)
    sources = [("rates", point) for point in SOURCE_POINTS]
    found.kill([*sources, *MADE_POINTS, READ_AFTER])
    return found


@pytest.mark.parametrize(
    "point",
    [*SOURCE_POINTS, *(pytest.param(one, marks=pytest.mark.endurance) for one in MORE_SOURCE_POINTS)],
)
def test_killed_source_run_leaves_no_trace(
    point: str, killed: Killed, undisturbed_tables: dict[str, Any], spark: SparkSession
) -> None:
    topology = killed.at("rates", point)
    topology.run("rates", spark)
    store = topology.store("rates", spark)
    for path in (store.view_path, store.quarantine_path):  # ``tables`` brings both up to the log
        written = delta.last_commit(path)
        assert written is not None
        assert written.document["batch"] == 2, path
    assert topology.tables("rates", spark) == undisturbed_tables["rates"]
    assert topology.run("rates", spark).commit is None


@pytest.mark.parametrize(
    ("asset", "point"),
    [*MADE_POINTS, *(pytest.param(*one, marks=pytest.mark.endurance) for one in MORE_POINTS)],
)
def test_killed_derived_run_leaves_no_trace(
    asset: str, point: str, killed: Killed, undisturbed_tables: dict[str, Any], spark: SparkSession
) -> None:
    topology = killed.at(asset, point)
    topology.run(asset, spark)
    assert topology.tables(asset, spark) == undisturbed_tables[asset]
    assert topology.run(asset, spark).commit is None


def test_reader_completes_killed_run(
    killed: Killed, undisturbed_tables: dict[str, Any], spark: SparkSession
) -> None:
    """The run of ``rates`` is killed right after its commit, so quarantine and view lack the batch. The
    next run of the join reads the committed rows nevertheless."""
    topology = killed.at(*READ_AFTER)
    topology.run("priced", spark)
    assert topology.tables("priced", spark) == undisturbed_tables["priced"]
    assert topology.tables("rates", spark) == undisturbed_tables["rates"]


@pytest.mark.endurance  # test_erase.py stops one at four steps, by an exception that nothing handles
def test_killed_erase_is_completed_by_next_erase(
    killed: Killed, undisturbed_tables: dict[str, Any], spark: SparkSession
) -> None:
    """At the kill, only the log of the stream has lost the key. A second erase completes the first."""
    topology = killed.at(*ERASED)
    about: dict[str, Any] = {"key": ["b"], "reason": "asked to", "among": topology.nodes}
    done = erase(topology.warehouse, topology.orders, spark, **about)
    assert done.finished
    assert [p.stem for p in Path(topology.warehouse, FOLDER).glob("*.json")] == [Path(done.path).stem]
    for name in ("orders", "priced", "corrected"):
        assert done.searched[f"{name}/log"].erased > 0
        store = topology.store(name, spark)
        keys = {r["k"] for r in store.read("log").collect()}
        assert "b" not in keys
        assert (None in keys) == (name == "corrected")  # its rows have another key, and stay
        assert [f for f in audit(store) if not f.passed] == []
    others = [r for r in undisturbed_tables["corrected"]["view"] if r["k"] != "b"]
    assert topology.tables("corrected", spark)["view"] == others


@pytest.mark.endurance  # the tests above kill other assets at each of these points
def test_killed_stream_join_leaves_no_trace(
    tmp_path: Path, spark: SparkSession, connect_server: ConnectServer
) -> None:
    topology = Topology(tmp_path / "before")
    land_first(topology)
    topology.land("payments", "1.jsonl", [("a", 21, 2), ("q", 22, 3)])
    for name in ("orders", "payments", "amended"):
        topology.run(name, spark)
    land_second(topology)
    # One payment has a waiting match, one will wait, two are late, one is in time.
    payments = [("b", 23, 5.5), ("z", 24, 16), ("a", 25, 1), ("b", 27, 9), ("c", 26, 15)]
    topology.land("payments", "2.jsonl", payments)
    for name in ("orders", "payments"):
        topology.run(name, spark)
    killed = Killed(tmp_path, (topology.root,) * 3, connect_server.address)
    points = (
        "before:log",
        "during:stage_state",
        "after:log",
        "before:view",
        "before:remove_staged_before",
    )
    killed.kill([("amended", point) for point in points])
    topology.run("amended", spark)
    undisturbed = topology.tables("amended", spark)
    # The order of minute 1 had a row without a match until a payment of its time came.
    ends = [(r["old"]["n"], r["cause"]["offset"]) for r in undisturbed["log"] if r["is_tombstone"]]
    assert ends == [(1, 4)]
    assert {row["_said"] for row in undisturbed["state"]} == {True, False}
    for point in points:
        found = killed.at("amended", point)
        found.run("amended", spark)
        assert found.tables("amended", spark) == undisturbed, point
        assert found.run("amended", spark).commit is None
