"""A chain of five operators over a million records, killed at random moments and run again."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from tests.storage.chain import RECORDS, Chain, node_of, view_digest
from vt_dagster.storage.asset_store import AssetStore
from vt_dagster.topology.model import Table

KILLS = 10
REPOSITORY = Path(__file__).parents[2]
STARTED = 9.0
"""Seconds that a process needs to start, about."""


def _start(root: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "tests.storage.chain", str(root)],
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.endurance
@pytest.mark.timeout(3600)
def test_chain_killed_ten_times_equals_undisturbed_chain(tmp_path: Path, spark: SparkSession) -> None:
    undisturbed, killed = tmp_path / "undisturbed", tmp_path / "killed"
    chain = Chain(undisturbed)
    chain.land(spark)
    shutil.copytree(undisturbed, killed)
    started = time.monotonic()
    chain.run(spark)
    seconds = time.monotonic() - started

    chance = random.Random(889)
    interrupted = 0
    for _ in range(KILLS):
        child = _start(killed)
        try:
            child.wait(STARTED + chance.uniform(0, seconds / 8))
        except subprocess.TimeoutExpired:
            child.send_signal(signal.SIGKILL)
            interrupted += 1
        said, _ = child.communicate(timeout=60)
        assert child.returncode in (0, -signal.SIGKILL), said
    last = _start(killed)
    said, _ = last.communicate(timeout=900)
    assert last.returncode == 0, said
    assert interrupted >= 5, "the kills came too late to disturb anything"

    expected, found = Chain(undisturbed).tables(spark), Chain(killed).tables(spark)
    assert found == expected
    logged = Chain(killed).tables(spark)["vehicles log"]
    assert isinstance(logged, tuple)
    assert logged[0] > RECORDS * 0.9

    # The view of each table equals a rebuild from its log.
    for name in ("vehicles", "moving", "regions", "hourly", "final"):
        node = node_of(chain, name)
        assert isinstance(node, Table)
        store = AssetStore(chain.warehouse, node, spark)
        before = view_digest(store)
        store.rebuild_view()
        assert view_digest(store) == before, name
