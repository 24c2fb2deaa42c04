"""The fixtures that users' tests have without an import, and what a run in such a test imports."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from tests.market import lines

ROOT = Path(__file__).parent.parent
PACKAGES = ("dagster", "dagster-pyspark", "pyspark", "pandera", "pytest")

TESTS = """
from datetime import timedelta
from pyspark.sql.types import DoubleType, StringType, StructType, TimestampType
from vt_dagster import Stream, VersionedTable

price = StructType().add("product", StringType()).add("price", DoubleType()).add("at", TimestampType())
order = StructType().add("product", StringType()).add("at", TimestampType())
prices = VersionedTable(
    "prices", key="product", schema=price, timestamp="at", history_retention=timedelta(days=1)
)
orders = Stream("orders", key="product", schema=order, timestamp="at")
priced = orders.left_join(prices, name="priced", select=["right.price"])

def test_as_of(topology):
    driver = topology(priced)
    driver.pipe("prices", {"product": "apple", "price": 1.0, "at": 0},
                {"product": "apple", "price": 2.0, "at": 9_000})
    driver.pipe("orders", {"product": "apple", "at": 5_000})
    assert [row["price"] for row in driver.read("priced")] == [1.0]

def test_each_test_starts_anew(topology, spark):
    driver = topology(priced)
    assert driver.read("priced") == []
    assert driver.spark is spark
    assert "TieredStopAtLevel=1" in spark.conf.get("spark.driver.extraJavaOptions")
"""


OF_A_RUN = """
import sys
from pathlib import Path
import dagster as dg
import pandera.pyspark as pa
import pyspark.sql.types as T
from vt_dagster import FilesSource, VersionedTable, build_asset, build_checks, build_resources

assert "dagster_pyspark" not in sys.modules

def test_a_table(topology, spark, tmp_path):
    class Price(pa.DataFrameModel):
        k: T.StringType
        v: T.LongType = pa.Field(ge=0)
        at: T.TimestampType

    from datetime import timedelta
    (tmp_path / "1.jsonl").write_text({record!r})
    prices = VersionedTable("prices", key="k", schema=Price, timestamp="at",
        history_retention=timedelta(days=1), source=FilesSource(str(tmp_path)))
    driver = topology(prices)
    assert "dagster_pyspark" not in sys.modules
    result = dg.materialize([build_asset(prices), build_checks(prices)],
        resources=build_resources(str(tmp_path / "warehouse")))
    assert result.success
    print("imported:", *[p for p in {packages!r} if p.replace("-", "_") in sys.modules])
"""


def pytest_in(where: Path, *options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-s", "-p", "no:cacheprovider", *options],
        cwd=where,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.mark.jvm
def test_plugin_provides_fixtures_for_run(tmp_path: Path) -> None:
    """The wheel's plugin provides the fixtures. In the run, Dagster executes the steps, dagster-pyspark
    holds the session, PySpark computes, and pandera checks the rows before the commit."""
    for package in PACKAGES:
        assert version(package)
    landing = lines({"k": "a", "v": 1, "at": "2024-01-01T00:00:00Z"})
    (tmp_path / "test_mine.py").write_text(TESTS)
    (tmp_path / "test_run.py").write_text(OF_A_RUN.format(packages=PACKAGES, record=landing))
    done = pytest_in(tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3 passed" in done.stdout
    assert f"imported: {' '.join(PACKAGES)}\n" in done.stdout


def test_unused_plugin_imports_nothing(tmp_path: Path) -> None:
    (tmp_path / "test_mine.py").write_text(
        "import sys\ndef test_nothing():\n"
        "    assert not {'dagster', 'pyspark', 'pandera'} & set(sys.modules)\n"
    )
    done = pytest_in(tmp_path, "-p", "vt_dagster_pytest", PYTEST_DISABLE_PLUGIN_AUTOLOAD="1")
    assert done.returncode == 0, done.stdout + done.stderr
