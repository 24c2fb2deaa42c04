"""The example of payments: from nothing to a corrected join, a training set and an alert."""

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
    """The cells of tables, and other lines, without borders."""
    cells = (re.sub(r"[│┃|]", " ", line).split() for line in text.splitlines())
    return [
        " ".join(words) for words in cells if words and not re.fullmatch(r"[┏━┳┓┡╇┩└─┴┘]+", words[0])
    ]


def test_what_it_prints_is_what_its_page_says(
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
    """Runs assets after each delivery, or after all of them, each in a process of its own; returns the
    warehouse."""
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


@pytest.mark.endurance  # test_executor.py has processes, test_processes.py a corrected join on a server
@pytest.mark.timeout(600)
def test_the_corrected_join_by_dagsters_default_executor(
    connect_server: ConnectServer, tmp_path: Path
) -> None:
    """One run of three processes that share a server: the same rows as of two runs."""
    environment = {**connect_server.environment, "VT_DAGSTER_SPARK": "server"}
    by_dagsters_default_executor(tmp_path, environment, "rates,payments,in_euros", at_once=True)


@pytest.mark.endurance
@pytest.mark.timeout(1200)
def test_by_dagsters_default_executor(tmp_path: Path) -> None:
    """All assets, each with a session of its own."""
    warehouse = by_dagsters_default_executor(tmp_path, dict(os.environ), "*")
    assert rows(warehouse, "by_day", "currency", "payments", "amount") == [
        ("GBP", 1, 20.0),
        ("GBP", 1, 30.0),
        ("USD", 1, 10.0),
        ("USD", 1, 100.0),
        ("USD", 1, 50.0),
    ]
