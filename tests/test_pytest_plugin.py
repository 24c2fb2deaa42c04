"""The fixtures that users' tests have without an import."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

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


def pytest_in(where: Path, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", *options],
        cwd=where,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.mark.jvm
def test_fixtures(tmp_path: Path) -> None:
    (tmp_path / "test_mine.py").write_text(TESTS)
    done = pytest_in(tmp_path, "vt_dagster_pytest")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 passed" in done.stdout


def test_it_costs_nothing_where_it_is_not_used(tmp_path: Path) -> None:
    (tmp_path / "test_mine.py").write_text(
        "import sys\ndef test_nothing():\n"
        "    assert not {'dagster', 'pyspark', 'pandera'} & set(sys.modules)\n"
    )
    done = pytest_in(tmp_path, "vt_dagster_pytest")
    assert done.returncode == 0, done.stdout + done.stderr
