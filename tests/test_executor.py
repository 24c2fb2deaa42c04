"""A run that is spread over processes is refused at once, in words."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.market import lines, record

ROOT = Path(__file__).parent.parent

MODULE = """
import dagster as dg
from datetime import timedelta
from pathlib import Path
from tests.market import Market

market = Market(Path({root!r}), None)
from vt_dagster import build_asset, build_resources, SparkResource

defs = dg.Definitions(
    assets=[build_asset(node) for node in market.nodes],
    resources=build_resources(str(market.warehouse), SparkResource(master="local[1]")),
    jobs=[
        dg.define_asset_job("default", selection="sales"),
        dg.define_asset_job("spread", selection="sales", executor_def=dg.multiprocess_executor),
        dg.define_asset_job("joined", selection="priced", executor_def=dg.multiprocess_executor),
    ],
)
"""


@pytest.mark.parametrize("job", ["spread", "default", "joined"])
def test_process_per_step_is_refused(tmp_path: Path, job: str) -> None:
    (tmp_path / "landing" / "sales").mkdir(parents=True)
    (tmp_path / "landing" / "sales" / "1.jsonl").write_text(lines(record("a", "s1", "1 00:00")))
    (tmp_path / "home").mkdir()
    module = tmp_path / "spread.py"
    module.write_text(MODULE.format(root=str(tmp_path)))
    done = subprocess.run(
        [str(Path(sys.executable).parent / "dagster"), "job", "execute", "-f", str(module), "-j", job],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=ROOT,
        env={**os.environ, "DAGSTER_HOME": str(tmp_path / "home"), "PYTHONPATH": str(ROOT)},
    )
    said = done.stdout + done.stderr
    assert done.returncode != 0
    assert "ExecutorError" in said
    assert "in_process_executor" in said
    assert "KeyError" not in said
    assert not (tmp_path / "warehouse").exists(), "nothing was written"
