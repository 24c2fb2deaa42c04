"""Loading the worked example is quick, starts nothing, and uses stable APIs only."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def python(code: str, *options: str) -> str:
    done = subprocess.run(
        [sys.executable, *options, "-c", code],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_loading_is_quick() -> None:
    """Under 3 seconds more than Dagster alone; both measured in turn, so that load hits both."""
    timed = "import time; t = time.process_time(); import {}; print(time.process_time() - t)"
    pairs = [
        [float(python(timed.format(m))) for m in ("dagster", "assets.definitions")] for _ in range(3)
    ]
    alone, ours = (statistics.median(side) for side in zip(*pairs, strict=True))
    assert ours - alone < 3, f"import dagster {alone:.1f} s, assets.definitions {ours:.1f} s"


def test_loading_starts_no_spark_and_warns_of_nothing() -> None:
    code = """
import subprocess, warnings
import dagster as dg
from dagster_shared.utils.warnings import BetaWarning, PreviewWarning, SupersessionWarning
for category in (BetaWarning, PreviewWarning, SupersessionWarning):
    warnings.simplefilter("error", category)
for module in ("dagster", "vt_dagster", "assets", "resources"):
    warnings.filterwarnings("error", category=DeprecationWarning, module=module)

def started(*args, **kwargs):
    raise AssertionError(f"a process was started: {args}")

subprocess.Popen = started
from assets.definitions import defs
dg.Definitions.validate_loadable(defs)
job = defs.resolve_job_def("main")
print(sorted(k.to_user_string() for k in job.asset_layer.selected_asset_keys))
from pyspark import SparkContext
assert SparkContext._gateway is None and SparkContext._active_spark_context is None
"""
    assert "['flights', 'flights_with_weather', 'planes', 'weather']" in python(code)


def test_workspace_is_valid(tmp_path: Path) -> None:
    done = subprocess.run(
        [str(Path(sys.executable).parent / "dagster"), "definitions", "validate"],
        capture_output=True,
        text=True,
        timeout=180,
        cwd=ROOT,
        env={**os.environ, "DAGSTER_HOME": str(tmp_path)},
    )
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    assert "All code locations passed validation" in said


def test_public_names() -> None:
    import vt_dagster

    assert len(vt_dagster.__all__) <= 20
    for name in vt_dagster.__all__:
        assert getattr(vt_dagster, name).__doc__, f"{name} has no docstring"


@pytest.mark.parametrize("name", ["weather", "planes", "flights", "flights_with_weather"])
def test_assets_are_described(name: str) -> None:
    import dagster as dg

    from assets.definitions import defs

    spec = defs.resolve_asset_graph().get(dg.AssetKey(name))
    assert spec.description
    assert spec.group_name in {"sources", "joined"}
    assert {"spark", "deltalake"} < spec.kinds
    assert "dagster/column_schema" in spec.metadata
