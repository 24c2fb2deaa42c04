"""Random chains of operators, through assets and tables, give the model's results, however they are
split into runs.

A seed always has the same chain and runs (``random_runs.random_chain``), so a chain that differs can be
run again alone: ``differing([random_chain(seed)], directory, spark)``.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from tests.asset_scenarios import Warehouse, leave_views_behind
from tests.storage.random_runs import RandomChain, RandomRuns, as_scenarios, random_chain
from vt_dagster.conformance.steps import layout, nodes_of
from vt_dagster.errors import TopologyError
from vt_dagster.runs.erase import erase
from vt_dagster.runs.truncate_log import truncate_logs
from vt_dagster.storage.maintenance import maintain, maintain_all
from vt_dagster.topology.model import Stream

SEEDS = (
    *(6, 14, 29, 62, 129, 206, 215, 224, 230, 254),
    *(256, 471, 647, 751, 797, 1534, 1631, 1632, 1732, 1881),
)
"""Chains of 18 shapes with all operators. They share nodes, as a run of a node takes seconds."""
FEW = (14, 256, 471, 647)
"""The seeds that ``make test`` runs."""
OF_CHAINS = {
    *("table", "stream", "filter", "map_values", "to_table", "aggregate", "suppress"),
    *("table_join", "foreign_key_join", "stream_table_join"),
}
"""All operators of random chains."""
ENDURING, TOGETHER = 500, 100
MAINTAINED = 0.1
"""The share of the assets that are maintained after each run."""
KILLED_SEEDS = SEEDS[:8]
ERASED_SEEDS = SEEDS[:3]
KILLS = 10
STARTED = 12.0
"""Seconds that a process needs to start, about."""
WORKS = 40.0
"""The most seconds that a process works before it is killed."""
REPOSITORY = Path(__file__).parents[2]


def differences(
    chains: Sequence[RandomChain], root: Path, spark: SparkSession, maintained: float = 0
) -> list[str]:
    """The differences between the results of chains and the model; each with its seed.

    Args:
        maintained: the share of the assets that are maintained after each run, chosen at random.
    """
    runs = RandomRuns(chains, root, spark)
    chance = random.Random(len(chains))
    for step in runs.left:
        runs.step(step)
        for name in runs.warehouse.nodes:
            if chance.random() < maintained and runs.warehouse.commit(name) is not None:
                maintain(str(runs.warehouse.path), name, spark, timedelta(0))
    return difference_lines(runs)


def difference_lines(runs: RandomRuns) -> list[str]:
    """The differences of all chains as lines; those of a chain follow its seed."""
    found = runs.differences(counted=True)
    assert len(found) == len(runs.layouts)
    return [line for name, lines in found.items() if lines for line in (f"{name}:", *lines)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "seeds", [FEW, pytest.param(SEEDS, marks=pytest.mark.endurance)], ids=["few", "all"]
)
def test_random_chains_in_two_runs_equal_model(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seeds: Sequence[int]
) -> None:
    leave_views_behind(monkeypatch, many_rows=True)
    chains = [random_chain(seed, most_runs=2) for seed in seeds]
    assert all(c.content["expected"] for c in chains)
    assert {step["op"] for c in chains for step in c.content["config"]["steps"]} == OF_CHAINS
    assert {len(c.runs) for c in chains} == {2}
    assert differences(chains, tmp_path, spark) == []


@pytest.mark.endurance
@pytest.mark.timeout(10_800)
@pytest.mark.parametrize(
    "seeds",
    [range(first, first + TOGETHER) for first in range(0, ENDURING, TOGETHER)],
    ids=lambda seeds: f"seeds={seeds[0]}-{seeds[-1]}",
)
def test_many_random_chains_with_maintenance(
    seeds: range, spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    leave_views_behind(monkeypatch, many_rows=True)
    chains = [random_chain(seed) for seed in seeds]
    for chain in chains:
        if chain.refused:
            (scenario,) = as_scenarios([chain], tmp_path / "refused")
            with pytest.raises(TopologyError):
                nodes_of([layout(scenario)])
    assert differences([c for c in chains if not c.refused], tmp_path, spark, MAINTAINED) == []


@pytest.mark.endurance
@pytest.mark.timeout(3600)
def test_random_chains_with_truncation_and_erase(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sources keep the records that their consumers still need, and an erase of a key that does not
    exist removes no row."""
    source = Warehouse.source

    def truncated(self: Warehouse, kind: type[Stream], name: str, **more: Any) -> Any:
        return source(self, kind, name, log_retention=timedelta(0), **more)

    monkeypatch.setattr(Warehouse, "source", truncated)
    runs = RandomRuns([random_chain(seed) for seed in ERASED_SEEDS], tmp_path, spark)
    warehouse, nodes = str(runs.warehouse.path), list(runs.warehouse.nodes.values())
    chance, cut = random.Random(1), 0
    for step in runs.left:
        runs.step(step)
        cut += sum(truncate_logs(warehouse, spark, nodes, keep=timedelta(0)).values())
        begun = [n for n in nodes if n.operator is None and runs.warehouse.commit(n.name) is not None]
        about: dict[str, Any] = {"key": [-1, "nobody"], "reason": "asked to", "among": nodes}
        erase(warehouse, chance.choice(begun), spark, **about)
    assert cut > 0
    assert difference_lines(runs) == []


def _start(root: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "tests.storage.random_runs", str(root), *map(str, KILLED_SEEDS)],
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.endurance
@pytest.mark.timeout(3600)
def test_random_chains_with_kills_and_maintenance(spark: SparkSession, tmp_path: Path) -> None:
    chance = random.Random(889)
    interrupted = 0
    for _ in range(KILLS):
        child = _start(tmp_path)
        try:
            child.wait(STARTED + chance.uniform(0, WORKS))
        except subprocess.TimeoutExpired:
            child.send_signal(signal.SIGKILL)
            interrupted += 1
        said, _ = child.communicate(timeout=60)
        assert child.returncode in (0, -signal.SIGKILL), said
        maintain_all(str(tmp_path / "warehouse"), spark, timedelta(0))
    last = _start(tmp_path)
    said, _ = last.communicate(timeout=900)
    assert last.returncode == 0, said
    assert interrupted >= 5, "the kills came too late to disturb anything"

    runs = RandomRuns([random_chain(seed) for seed in KILLED_SEEDS], tmp_path, spark)
    assert list(runs.left) == []
    assert difference_lines(runs) == []
