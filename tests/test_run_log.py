"""A run logs the lines that a user needs while it works, and no others."""

import logging
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import dagster as dg
import pyspark
import pytest
from pyspark import SparkContext

from tests.market import Market, record, run
from vt_dagster import FilesSource, SparkResource
from vt_dagster.runs.replay import replay
from vt_dagster.runs.run import run_once
from vt_dagster.storage import parquet
from vt_dagster.storage.asset_store import AssetStore, stores_of

pytestmark = pytest.mark.usefixtures("few_rows")

SECONDS = re.compile(r" \(\d+\.\d s\)$")


def logged_lines(market: Market, nodes: Any = None) -> dict[str, list[str]]:
    """The log lines of each step of a run, without durations and the start of Spark. Warnings and
    errors begin with their level."""
    result = market.run(nodes)
    entries = market.instance.all_logs(result.run_id)
    lines: dict[str, list[str]] = {}
    for entry in entries:
        if not entry.is_dagster_event and not entry.user_message.startswith("Spark "):
            said = "" if entry.level == logging.INFO else f"{logging.getLevelName(entry.level)} "
            text = said + SECONDS.sub("", entry.user_message)
            lines.setdefault(entry.step_key or "", []).append(text)
    return lines


@pytest.fixture
def copy(market: Market, tmp_path: Path) -> Market:
    return market.copy(tmp_path / "copy")


def test_run_logs_each_step(copy: Market) -> None:
    copy.land("prices", "3.jsonl", record("a", "p5", "2 06:00"), record("b", "late", "1 01:00"), "{")
    copy.land("sales", "3.jsonl", record("a", "s6", "2 07:00"))
    lines = logged_lines(copy)
    quarantine = copy.warehouse / "prices" / "quarantine"
    size = (copy.root / "landing" / "prices" / "3.jsonl").stat().st_size
    assert lines.pop("prices") == [
        f"prices: takes 1 file, {size / 1000:.1f} kB: 3.jsonl",
        "prices: decided: 3 in = 1 applied + 1 late + 1 quarantined",
        "prices: committed batch 3 (log version 2)",
        "prices: view at version 2, of batch 3",
        f"WARNING prices: 1 bad record was quarantined; see them with their reasons in "
        f"{quarantine}, where batch = 3",
    ]
    assert lines.pop("check_prices") == ["prices: 8 of 8 checks passed"]
    assert lines.pop("priced") == [
        "priced: takes records: 1 of sales",
        "priced: decided: 1 in + 1 waiting before = 1 applied + 1 waiting; 1 out",
        "priced: committed batch 3 (log version 2)",
    ]
    assert lines.pop("rates") == ["rates: nothing new since batch 1, so there is no commit"]
    assert not [line for rest in lines.values() for line in rest if "WARNING" in line]


def test_condition_column_is_not_reported_as_dropped(copy: Market) -> None:
    """The source reads ``Op`` for ``deleted_when``, though the table has no such column, and warns that
    it leaves out ``note``."""
    rows = record("a", "p", "3 00:00") | {"Op": "U", "note": "x"}, record("a", "", "3 01:00")
    copy.land("deletions", "1.jsonl", rows[0], rows[1] | {"Op": "D", "note": "y"})
    source = FilesSource(str(copy.root / "landing" / "deletions"))
    table = replace(
        copy.prices, name="deletions", source=source, tombstone=None, deleted_when="Op = 'D'"
    )
    said = logged_lines(copy, [table])["deletions"]
    (warned,) = [line for line in said if line.startswith("WARNING")]
    assert warned.endswith("columns that the schema lacks are left out: note (in 1.jsonl)")
    assert copy.store(table).read().collect() == [], "the deletion took effect"


def test_new_source_directory_warns_once(copy: Market) -> None:
    """A run warns when an asset first reads another directory, and never again for the same
    directories: a second code location may declare the asset, or the directory was moved."""
    here, there = copy.root / "landing" / "prices", copy.root / "landing" / "more"
    other = replace(copy.prices, source=FilesSource(str(there)))
    warned = (
        f"WARNING prices: reads {there} for the first time; earlier runs read {here}. If another "
        "definition of this asset still reads that, as in another code location, give one of the two "
        "another name: both add to the same table"
    )
    expected = {"3": [], "4": [warned], "5": [], "6": []}
    for file, lines in expected.items():
        node, name = (copy.prices, "prices") if file in "35" else (other, "more")
        copy.land(name, f"{file}.jsonl", record("b", file, "2 07:00"))
        assert [line for line in logged_lines(copy, [node])["prices"] if "WARNING" in line] == lines


def test_completed_work_of_killed_run_is_logged(copy: Market) -> None:
    shutil.rmtree(copy.warehouse / "prices" / "view")
    lines = logged_lines(copy, [copy.prices])
    assert lines["prices"] == [
        "prices: view at version 0, of batch 2",
        "prices: nothing new since batch 2, so there is no commit",
    ]


def test_overtaken_run_retries_with_remaining_records(
    copy: Market, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If another run commits first, this run tries again and takes the rest. This happens when the
    sensors of both inputs of a join request a run at the same time."""
    stores, commit = stores_of(str(copy.warehouse), copy.spark), AssetStore.commit

    def land(file: str, *rows: Any) -> None:
        copy.land("sales", file, *rows)
        run_once(copy.sales, stores)

    def overtaken(store: AssetStore, *args: Any) -> Any:
        monkeypatch.setattr(AssetStore, "commit", commit)
        run_once(copy.priced, stores)
        land("4.jsonl", record("a", "s7", "2 07:10"), record("a", "s8", "2 07:20"))
        return commit(store, *args)

    land("3.jsonl", record("a", "s6", "2 07:00"))
    monkeypatch.setattr(AssetStore, "commit", overtaken)
    first, again, *rest = [
        line for line in logged_lines(copy, [copy.priced])["priced"] if "decided" not in line
    ]
    assert first == "priced: takes records: 1 of sales"
    assert again.startswith("tries again, because of: priced: expected to be the only run that writes")
    assert rest == ["priced: takes records: 2 of sales", "priced: committed batch 4 (log version 3)"]


def test_failed_check_logs_expectation(copy: Market) -> None:
    rates = copy.store(copy.rates)
    rows = parquet.read(copy.spark, rates.view_path)
    rows.union(rows).write.format("delta").mode("overwrite").save(rates.view_path)
    lines = logged_lines(copy, [copy.rates])
    assert lines["check_rates"][0].startswith(
        "ERROR rates: expected that no key has two current rows, got 4 offending rows: see the "
    )
    assert re.fullmatch(r"rates: \d of \d checks passed", lines["check_rates"][-1])


@pytest.mark.parametrize("pages", [None, "http://localhost:4040"])
def test_spark_ui_address_is_logged_once(
    market: Market, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pages: str | None
) -> None:
    """The tests' session has no web UI, so the test invents its address."""
    monkeypatch.setattr(SparkContext, "uiWebUrl", pages)

    @dg.asset
    def mine(vt_dagster_spark: SparkResource) -> None:
        assert vt_dagster_spark.spark_session is vt_dagster_spark.spark_session

    with dg.DagsterInstance.ephemeral() as instance:
        result = run([mine], tmp_path, instance=instance)
        said = [e.user_message for e in instance.all_logs(result.run_id) if not e.is_dagster_event]
    where = f", UI at {pages}" if pages else ""
    assert [SECONDS.sub("", line) for line in said] == [
        f"Spark {pyspark.__version__} on local[2]{where}"
    ]


def test_replay_logs_each_run(copy: Market) -> None:
    lines: list[str] = []
    about: dict[str, Any] = {"tell": lines.append, "keep_recorded": False}
    replay(str(copy.warehouse), copy.prices, "anew", copy.spark, **about)
    assert [SECONDS.sub("", line) for line in lines] == [
        "anew: decided: 11 in = 8 applied + 1 late + 2 quarantined",
        "anew: committed batch 1 (log version 0)",
        "anew: view at version 0, of batch 1",
    ]
