"""The documentation on topics, tested with a real broker: the example, and the start page."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from pyspark.sql import SparkSession

from tests.kafka.topics import Topics
from tests.market import materialized
from vt_dagster import read
from vt_dagster.testing_kafka import KafkaBroker

pytestmark = pytest.mark.usefixtures("few_rows")

ROOT = Path(__file__).parents[2]


def test_example_output_matches_its_page(
    broker: KafkaBroker,
    spark: SparkSession,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("EXAMPLE_DATA", str(tmp_path / "kafka"))
    monkeypatch.setenv("EXAMPLE_KAFKA", broker.bootstrap_servers)
    monkeypatch.setenv("COLUMNS", "200")
    example = importlib.import_module("examples.kafka.__main__")
    example.walk(broker.bootstrap_servers)
    printed = capsys.readouterr().out.splitlines()
    page = (ROOT / "examples" / "kafka" / "README.md").read_text(encoding="utf-8")
    block = re.search(r"```text\n.*?\n(.*?)```", page, re.DOTALL)
    assert block is not None
    rows = [" ".join(line.replace("│", " ").split()) for line in printed if "│" in line]
    told = [line for line in printed if re.match(r"\w+: records: ", line)]
    shown = block.group(1).replace("\n  ", " ").splitlines()  # long lines continue indented
    assert rows + told == [" ".join(line.split()) for line in shown]


def test_start_page_code_consumes_topic(
    topics: Topics,
    broker: KafkaBroker,
    spark: SparkSession,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The page's first block runs, only with another broker's address; its second block imports."""
    monkeypatch.chdir(tmp_path)
    page = (ROOT / "docs" / "start" / "kafka.md").read_text(encoding="utf-8")
    first, last = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    topics.create("prices")
    value = {"product": "apple", "price": 1.0, "at": "2026-01-31T10:00:00Z"}
    topics.produce("prices", [{"key": "apple", "value": value}, {"key": "pear", "value": None}])
    words = (ROOT / "tests" / "docs_namespace.py").read_text(encoding="utf-8")
    names: dict[str, Any] = {}
    exec(compile(words, "docs_namespace.py", "exec", dont_inherit=True), names)
    assert "localhost:9092" in first
    exec(compile(first.replace("localhost:9092", broker.bootstrap_servers), "kafka.md", "exec"), names)
    spark_of = dg.Definitions(executor=dg.in_process_executor)
    defs = dg.Definitions.merge(names["defs"], spark_of)
    run = defs.resolve_implicit_global_asset_job_def().execute_in_process()
    assert run.success
    said = materialized(run, "prices")
    assert (said["records_in"], said["records_applied"], said["lag_records"]) == (2, 2, 0)
    assert next(iter(said)) == "at_a_glance"
    assert list(said).index("lag_records") < list(said).index("timeline")
    (row,) = read("prices", warehouse="warehouse").to_pylist()
    assert (row["product"], row["price"]) == ("apple", 1.0)
    exec(compile(last, "kafka.md", "exec"), names)
    assert names["KafkaBroker"] is KafkaBroker
