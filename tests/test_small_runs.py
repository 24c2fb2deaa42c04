"""A run with few records on small tables plans each of its jobs for few rows."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake
from pyspark import SparkContext
from pyspark.sql import DataFrameWriter, SparkSession
from pyspark.sql.types import IntegerType, StringType, StructField, StructType, TimestampType
from pyspark.sql.utils import is_remote

from vt_dagster import (
    DeltaSource,
    FilesSource,
    Materialized,
    SnapshotSource,
    Stream,
    Table,
    VersionedTable,
)
from vt_dagster.runs import pin
from vt_dagster.runs.erase import erase
from vt_dagster.runs.run import run_once
from vt_dagster.spark import settings
from vt_dagster.storage import delta
from vt_dagster.storage.asset_store import stores_of

SCHEMA = StructType(
    [
        StructField("k", StringType()),
        StructField("v", IntegerType()),
        StructField("at", TimestampType()),
    ]
)
JOBS = ("collect", "count", "isEmpty", "persist", "toArrow")


@pytest.fixture
def actions_with_session_settings(spark: SparkSession, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The Spark actions that are planned with the session's own settings, not those of a small run."""
    found: list[str] = []

    def noted(name: str, action: Any) -> Callable[..., Any]:
        def act(self: Any, *words: Any, **more: Any) -> Any:
            if spark.conf.get("spark.sql.codegen.factoryMode", None) != "NO_CODEGEN":
                found.append(name)
            return action(self, *words, **more)

        return act

    kind = type(spark.range(1))
    for name in JOBS:
        monkeypatch.setattr(kind, name, noted(name, getattr(kind, name)))
    monkeypatch.setattr(DataFrameWriter, "parquet", noted("parquet", DataFrameWriter.parquet))
    spark.range(1).count()
    assert found == ["count"], "an action outside of a run is noted"
    found.clear()
    return found


@pytest.fixture
def call_counts(spark: SparkSession, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Counts how often a run opens a Delta table and calls the JVM. With Spark Connect it counts no
    calls of the JVM. It leaves out the calls that release objects, because their number varies."""
    found = Counter[str]()

    def opened(*words: Any, **more: Any) -> DeltaTable:
        found["tables opened"] += 1
        return DeltaTable(*words, **more)

    monkeypatch.setattr(delta, "DeltaTable", opened)
    if not is_remote():
        gateway: Any = SparkContext._gateway
        client = gateway._gateway_client  # a session of this library has its own ``send_command``
        send = client.send_command

        def sent(command: str, *words: Any, **more: Any) -> Any:
            found["calls of the JVM"] += not command.startswith("m\n")
            return send(command, *words, **more)

        monkeypatch.setattr(client, "send_command", sent)
    return found


def rows(day: int) -> list[dict[str, Any]]:
    """The records of a day: two keys that stay the same, a new key, and a key whose value changes."""
    at = datetime(2024, 1, day, tzinfo=timezone.utc)
    first = datetime(2024, 1, 1, tzinfo=timezone.utc)
    kept = [{"k": k, "v": 1, "at": first} for k in "ab"]
    return [*kept, {"k": f"day {day}", "v": 1, "at": at}, {"k": "changing", "v": day, "at": at}]


def land_lines(place: Path, day: int) -> None:
    lines = [json.dumps(row | {"at": row["at"].isoformat()}) for row in rows(day)]
    (place / f"2024-01-{day:02}.jsonl").write_text("\n".join(lines), encoding="utf-8")


def land_delta(place: Path, day: int) -> None:
    kinds = pa.schema([("k", pa.string()), ("v", pa.int32()), ("at", pa.timestamp("us", "UTC"))])
    feed = {"delta.enableChangeDataFeed": "true"}
    write_deltalake(place, pa.Table.from_pylist(rows(day), kinds), mode="overwrite", configuration=feed)


SOURCES: dict[str, tuple[Callable[[Path, int], None], Callable[[str], Any], int]] = {
    "files": (land_lines, lambda place: FilesSource(place), 1_230),
    "dumps": (
        land_lines,
        lambda place: SnapshotSource(place, "jsonl", dump_time="%Y-%m-%d", max_shrink=1.0),
        1_810,
    ),
    "whole versions": (
        land_delta,
        lambda place: DeltaSource(place, "snapshots", max_shrink=1.0),
        1_390,
    ),
}
"""For each source: how its rows land, the source, and the largest number of JVM calls of a run."""


@pytest.mark.parametrize("source", SOURCES)
def test_small_run_jobs_are_planned_for_few_rows(
    source: str,
    spark: SparkSession,
    tmp_path: Path,
    actions_with_session_settings: list[str],
    call_counts: Counter[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    land, made, calls = SOURCES[source]
    place = tmp_path / "in"
    place.mkdir()
    table = VersionedTable(
        "prices",
        key="k",
        schema=SCHEMA,
        timestamp="at",
        source=made(str(place)),
        history_retention=timedelta(days=30),
    )
    stores = stores_of(str(tmp_path / "warehouse"), spark)
    for day in (1, 2):
        land(place, day)
        call_counts.clear()
        receipt = run_once(table, stores)
        assert receipt.commit is not None
        assert receipt.commit.counts["applied"] >= 2
    assert actions_with_session_settings == []
    # A run reads the log and view at the versions before its commits, and again after them.
    assert 0 < call_counts["tables opened"] <= 5, call_counts
    assert call_counts["calls of the JVM"] <= calls, call_counts
    assert is_remote() or call_counts["calls of the JVM"] > calls / 2, call_counts
    if source == "files":
        with monkeypatch.context() as patched:
            patched.setattr(pin, "MANY_ROWS", 3)  # as if the table had many keys: it has four
            patched.setattr(settings, "_FEW_READ", 3)
            land(place, 3)
            receipt = run_once(table, stores)
        assert receipt.commit is not None
        assert receipt.commit.counts["applied"] >= 2
        # Only the look-up of the records' keys in the table and the update of the view.
        assert actions_with_session_settings == ["persist", "count", "parquet"]
        actions_with_session_settings.clear()
        # An erase does not depend on the kind of source.
        erase(str(tmp_path / "warehouse"), table, spark, key=["a"], reason="asked to", among=[table])
        assert actions_with_session_settings == []


def test_stream_join_jobs_are_planned_for_few_rows(
    spark: SparkSession, tmp_path: Path, actions_with_session_settings: list[str]
) -> None:
    """The jobs of a join of streams are planned for few rows, also those that correct results."""
    sides = []
    for name in ("orders", "payments"):
        (tmp_path / name).mkdir()
        about = {"key": "k", "schema": SCHEMA, "timestamp": "at"}
        sides.append(Stream(name, source=FilesSource(str(tmp_path / name)), **about))
    orders, payments = sides
    paid = orders.outer_join(
        payments,
        name="paid",
        select=["left.*", "right.v as payment"],
        within=timedelta(days=1),
        corrected_for=timedelta(days=30),
    )
    stores = stores_of(str(tmp_path / "warehouse"), spark)
    for day in (1, 2):
        for node in sides:
            land_lines(tmp_path / node.name, day)
            run_once(node, stores)
        receipt = run_once(paid, stores)
        assert receipt.commit is not None
        assert receipt.commit.counts["out"] > 0
    assert actions_with_session_settings == []


def test_filter_of_plain_table_with_many_rows_keeps_deletions(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A small run on a large result looks up only the rows of its keys. It omits only tombstones of
    keys without a row."""
    monkeypatch.setattr(pin, "MANY_ROWS", -1)
    landing = tmp_path / "landing"
    landing.mkdir()
    about = {"key": "k", "schema": SCHEMA, "timestamp": "at", "tombstone": "v is null"}
    table = Table("prices", source=FilesSource(str(landing)), **about)
    materialized = Materialized(history_retention=timedelta(days=30))
    low = table.filter("v < 5", name="low", materialized=materialized)
    stores = stores_of(str(tmp_path / "warehouse"), spark)
    for day, landed in enumerate(({"a": 1, "b": 2, "c": 9}, {"a": None, "b": 7, "c": None, "d": 3}), 1):
        lines = [json.dumps({"k": k, "v": v, "at": f"2024-01-{day:02}"}) for k, v in landed.items()]
        (landing / f"{day}.jsonl").write_text("\n".join(lines), encoding="utf-8")
        for node in (table, low):
            run_once(node, stores)
    log = stores(low).read("log").where("date(timestamp) = '2024-01-02'").orderBy("k")
    assert [(r.k, r.v, r.old and r.old.v) for r in log.collect()] == [
        ("a", None, 1),
        ("b", None, 2),
        ("d", 3, None),
    ]
