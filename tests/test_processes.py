"""Each kind of asset in a separate process, on a local Spark or a Spark Connect server: its first run,
a run with new records, and a run without new records."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from deltalake import DeltaTable

from tests.conftest import ROOT, ConnectServer
from tests.full_topology import ALWAYS, WAREHOUSE

SOME = ("corrected", "guarded", "training", "iceberg_export")
"""Kinds that also read or write files on the machine of the run's process, kinds with names in Spark's
catalog, and a join that reads its own log. The stream and the table upstream of them run too."""


def outcomes(
    root: Path, environment: dict[str, str], where: str, *kinds: str
) -> dict[tuple[str, int], tuple[str, str]]:
    """Runs the kinds in a new process. Returns the outcome and message of each run of each asset."""
    root.mkdir()
    done = subprocess.run(
        [sys.executable, "-m", "tests.full_topology", str(root), where, *kinds],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=environment,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "pyspark.sql.connect" not in done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"asset"')]
    return {(one["asset"], one["run"]): (one["did"], one["said"]) for one in found}


def require_outcomes(found: dict[tuple[str, int], tuple[str, str]], least: int) -> None:
    failed = {run: said for run, (did, said) in found.items() if did == "failed"}
    assert not failed
    for (name, run), (did, said) in found.items():
        expected = "committed" if run < 3 or name in ALWAYS else "nothing new"
        assert (did, said) == (expected, ""), (name, run)
    assert Counter(run for _, run in found)[1] >= least


@pytest.mark.jvm
@pytest.mark.timeout(900)
def test_some_asset_kinds_on_connect(connect_server: ConnectServer, tmp_path: Path) -> None:
    found = outcomes(tmp_path / "runs", connect_server.environment, "server", *SOME)
    require_outcomes(found, len(SOME))
    lake = tmp_path / "runs" / "data" / "lake"
    files = [*(lake / "training").glob("*/*.parquet")]
    assert files, "the files are where the run's process is"
    quarantine = DeltaTable(str(tmp_path / "runs" / WAREHOUSE / "guarded" / "quarantine"))
    rejected = quarantine.to_pyarrow_table(columns=["reason", "batch"]).to_pylist()
    assert {row["reason"] for row in rejected} == {"broken_contract: g isin(['a', 'b'])"}
    assert {row["batch"] for row in rejected} == {1, 2}


def require_modules_pass(server: ConnectServer, *modules: str) -> None:
    """Requires that these test modules pass on the server's Spark session."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", *modules],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**server.environment, "SPARK_REMOTE": server.address},
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-1000:]


@pytest.mark.endurance
@pytest.mark.timeout(3_600)
def test_gates_checks_and_ops_on_connect(connect_server: ConnectServer) -> None:
    names = ("test_contracts", "test_ops", "test_gates", "test_checks")
    require_modules_pass(connect_server, *(f"tests/{name}.py" for name in names))


@pytest.mark.endurance
@pytest.mark.timeout(7_200)
def test_all_asset_kinds_on_connect(connect_server: ConnectServer, tmp_path: Path) -> None:
    require_outcomes(outcomes(tmp_path / "runs", connect_server.environment, "server"), 57)


@pytest.mark.endurance
@pytest.mark.timeout(7_200)
def test_all_asset_kinds_on_local_session(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    require_outcomes(outcomes(tmp_path / "runs", environment, "local"), 57)
