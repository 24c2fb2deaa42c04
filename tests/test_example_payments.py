"""The payments example: from an empty warehouse to a corrected join, a training set and an alert."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from tests.conftest import BIN, ROOT, ConnectServer
from vt_dagster import read

pytestmark = pytest.mark.usefixtures("few_rows")

README = ROOT / "examples" / "payments" / "README.md"


def lines_of(text: str) -> list[str]:
    """Returns the cells of each table row, and each other line, without table borders."""
    cells = (re.sub(r"[│┃|]", " ", line).split() for line in text.splitlines())
    return [
        " ".join(words) for words in cells if words and not re.fullmatch(r"[┏━┳┓┡╇┩└─┴┘]+", words[0])
    ]


def test_example_output_matches_its_page(
    spark: SparkSession,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("EXAMPLE_DATA", str(tmp_path / "payments"))
    monkeypatch.setenv("COLUMNS", "200")
    example = importlib.import_module("examples.payments.__main__")
    example.main()
    said = lines_of(capsys.readouterr().out)
    page = re.search(r"```text\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    assert page is not None
    assert said == lines_of(page.group(1))


def rows(warehouse: Path, name: str, *columns: str) -> list[tuple[Any, ...]]:
    found = read(name, warehouse=str(warehouse)).to_pylist()
    return sorted((tuple(row[c] for c in columns) for row in found), key=repr)


def by_dagsters_default_executor(
    root: Path, environment: dict[str, str], select: str, at_once: bool = False
) -> Path:
    """Runs the assets after each delivery (``at_once``: once, after all of them), each step in a
    separate process; returns the warehouse."""
    definitions = importlib.import_module("examples.payments.__main__")
    home, data = root / "dagster_home", root / "payments"
    home.mkdir()
    (home / "dagster.yaml").write_text(json.dumps({"telemetry": {"enabled": False}}))
    about = {"EXAMPLE_DATA": str(data), "DAGSTER_HOME": str(home), "PYTHONPATH": str(ROOT)}
    landing = definitions.LANDING
    definitions.LANDING = data / "landing"
    try:
        for number, delivery in enumerate(definitions.DELIVERIES, 1):
            definitions.land(delivery)
            if at_once and number < len(definitions.DELIVERIES):
                continue
            command = [str(BIN / "dagster"), "asset", "materialize", "--select", select]
            done = subprocess.run(
                [*command, "-m", "examples.payments.definitions"],
                cwd=ROOT,
                env={**environment, **about},
                capture_output=True,
                text=True,
                timeout=500,
            )
            assert done.returncode == 0, done.stdout + done.stderr
    finally:
        definitions.LANDING = landing
    assert rows(data / "warehouse", "in_euros", "payment_id", "amount", "rate") == [
        ("p1", 100.0, 0.92),
        ("p2", 20.0, 1.17),
        ("p3", 50.0, 0.9),
        ("p5", 30.0, None),
        ("p6", 10.0, 0.9),
    ]
    return data / "warehouse"


@pytest.mark.endurance  # test_executor.py and test_processes.py cover processes and a shared server
@pytest.mark.timeout(600)
def test_corrected_join_on_default_executor(connect_server: ConnectServer, tmp_path: Path) -> None:
    """One run with three processes on a shared Spark server writes the same rows as two runs."""
    environment = {**connect_server.environment, "VT_DAGSTER_SPARK": "server"}
    by_dagsters_default_executor(tmp_path, environment, "rates,payments,in_euros", at_once=True)


@pytest.mark.endurance
@pytest.mark.timeout(1200)
def test_all_assets_on_default_executor(tmp_path: Path) -> None:
    """Two runs of all assets, each asset with a separate Spark session, write the expected rows."""
    warehouse = by_dagsters_default_executor(tmp_path, dict(os.environ), "*")
    assert rows(warehouse, "by_day", "currency", "payments", "amount") == [
        ("GBP", 1, 20.0),
        ("GBP", 1, 30.0),
        ("USD", 1, 10.0),
        ("USD", 1, 100.0),
        ("USD", 1, 50.0),
    ]
