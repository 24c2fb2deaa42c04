"""Loading the worked example imports few modules, starts no process, and uses only stable APIs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import dagster as dg
import pytest

from tests.market import RECORD
from vt_dagster import FilesSource, Stream, WarehouseResource, build_asset, build_resources
from vt_dagster.orchestration.resources import warehouse_of

ROOT = Path(__file__).parent.parent


def run_python(code: str, *options: str) -> str:
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


@pytest.mark.slow
def test_definitions_load_few_modules() -> None:
    """Dagster loads definitions for each step, and most of that time is the import of modules. The test
    counts them, since the time depends on the machine."""
    code = """
import sys, dagster
before = {*sys.modules}
import assets.definitions
loaded = {*sys.modules} - before
print(len(loaded), *sorted({name.split(".")[0] for name in loaded}))
"""
    count, *packages = run_python(code).split()
    assert int(count) < 1_200, "pandera imports 800 of them, with pandas and PySpark"
    of_a_run = {"confluent_kafka", "dagster_pyspark", "jgo", "polars", "pyiceberg"}
    of_commands = {"jinja2", "rich", "starlette", "typer", "uvicorn"}
    assert not {*packages} & (of_a_run | of_commands)


def test_definitions_load_without_spark_or_warnings() -> None:
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
from assets import topology
from vt_dagster.topology.model import Stream
declared = {node.name for node in vars(topology).values() if isinstance(node, Stream)}
assert {k.to_user_string() for k in job.asset_layer.selected_asset_keys} == declared
print(len(declared))
from pyspark import SparkContext
assert SparkContext._gateway is None and SparkContext._active_spark_context is None
"""
    assert run_python(code).endswith("18\n")


@pytest.mark.slow
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


def test_public_names_have_docstrings() -> None:
    import vt_dagster

    assert len(vt_dagster.__all__) <= 45
    for name in vt_dagster.__all__:
        assert getattr(vt_dagster, name).__doc__, f"{name} has no docstring"


def test_assets_have_description_and_owners() -> None:
    from assets.definitions import defs

    graph = defs.resolve_asset_graph()
    groups: dict[str, int] = {}
    for key in graph.get_all_asset_keys():
        spec = graph.get(key)
        assert spec.description, key
        assert spec.owners, key
        assert {"spark", "deltalake"} < spec.kinds, key
        assert "dagster/column_schema" in spec.metadata, key
        groups[spec.group_name] = groups.get(spec.group_name, 0) + 1
    assert groups == {"sources": 5, "tables": 4, "joined": 4, "published": 5}


def test_asset_that_writes_files_is_upstream() -> None:
    source = FilesSource("landing/prices", upstream="crm/export")
    about: Any = {"key": "k", "schema": RECORD, "timestamp": "at"}
    asset = build_asset(Stream("prices", source=source, **about))
    assert asset.dependency_keys == {dg.AssetKey(["crm", "export"])}
    alone = build_asset(Stream("prices", source=FilesSource("landing/prices"), **about))
    assert asset.code_versions_by_key == alone.code_versions_by_key


@pytest.mark.parametrize(
    ("path", "seen"),
    [
        ("data/warehouse", "{here}/data/warehouse"),
        ("/data/warehouse", "/data/warehouse"),
        *((url, url) for url in ("s3a://lake/warehouse", "file:/data/warehouse")),
    ],
)
def test_relative_warehouse_resolves_to_process_directory(
    path: str, seen: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A relative warehouse is relative to the working directory of the process, even if Spark was
    started in another directory."""
    monkeypatch.chdir(tmp_path)
    context = SimpleNamespace(
        resources=SimpleNamespace(vt_dagster_warehouse=WarehouseResource(path=path))
    )
    assert warehouse_of(context, "vt_dagster") == seen.format(here=tmp_path)


def test_warehouse_from_environment_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    """The variable is read when a run starts, not when definitions load."""
    made = [build_resources(dg.EnvVar("LAKE"))["vt_dagster_warehouse"] for _ in range(2)]
    assert made[0] is made[1]
    monkeypatch.setenv("LAKE", "s3a://lake/warehouse")
    with dg.build_resources({"vt_dagster_warehouse": made[0]}) as resources:
        assert (
            warehouse_of(SimpleNamespace(resources=resources), "vt_dagster") == "s3a://lake/warehouse"
        )
