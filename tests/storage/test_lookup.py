"""Reads without Spark give the same rows as Spark, for any table and time, also if views are behind."""

from __future__ import annotations

import json
import math
import random
import subprocess
import sys
import threading
import weakref
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from decimal import Decimal
from pathlib import Path
from typing import Any

import duckdb
import fsspec
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession
from pyspark.sql.types import StructType
from typer.testing import CliRunner

import vt_dagster
from tests.storage.topology import EPOCH, Topology
from vt_dagster.cli import app
from vt_dagster.errors import StorageError
from vt_dagster.runs.run import run_once
from vt_dagster.sources.files_source import FilesSource
from vt_dagster.storage import arrow_reader, view
from vt_dagster.storage.asset_store import AssetStore, stores_of
from vt_dagster.storage.read import Into
from vt_dagster.topology.durations import parse_time
from vt_dagster.topology.model import Stream, Table, VersionedTable

pytestmark = pytest.mark.usefixtures("few_rows")


def spark_rows(store: AssetStore, *asked: Any) -> list[tuple[Any, ...]]:
    return sorted_tuples(store.read(*asked).toArrow())


def sorted_tuples(rows: pa.Table) -> list[tuple[Any, ...]]:
    """The rows as tuples; the order of rows and columns does not depend on the reader."""
    columns = sorted(rows.column_names)
    values = [rows.column(c).to_pylist() for c in columns]
    return sorted(zip(*values, strict=True), key=repr)


def without_spark(topology: Topology, name: str, *asked: Any, **more: Any) -> list[tuple[Any, ...]]:
    what, as_of, partial = (*asked, None, None, False)[:3]
    about = {"what": what, "as_of": as_of, "partial": bool(partial), **more}
    return sorted_tuples(vt_dagster.read(name, warehouse=topology.warehouse, **about))


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.endurance)])
def test_lookups_equal_spark_for_random_tables(
    tmp_path: Path, spark: SparkSession, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Records are out of order, replaced, deleted or expired; some views are behind, some are not."""
    monkeypatch.setattr(view, "SEGMENT_ROWS", 5)
    monkeypatch.setattr(view, "EACH_RUN", 0)
    monkeypatch.setattr(view, "SHARE", 0.4)
    dice = random.Random(seed)
    topology = Topology(tmp_path)
    plain = Table(
        "plain",
        key="k",
        schema=topology.rates.schema,
        tombstone="n is null",
        source=FilesSource(str(tmp_path / "rates"), max_bad_share=1.0),
    )
    now, behind = 0.0, set[int]()
    for run in range(6 if seed > 1 else 4):
        records = list[tuple[str | None, int | None, float]]()
        for _ in range(25 if run == 0 else dice.choice([1, 3, 6])):
            now += dice.choice([0, 0.5, 0.5, 1])
            moment = max(0.0, now - dice.choice([0, 0, 0, 3, 8, 12]))
            records.append((dice.choice("abcdef"), dice.choice([None, 1, 2, 3]), moment))
        topology.land("rates", f"{run}.jsonl", records)
        topology.run("rates", spark)
        if run not in (3, 5):
            continue
        run_once(plain, stores_of(topology.warehouse, spark))
        store = topology.store("rates", spark)
        base, head = store.snapshot().base, store.head()
        assert base is not None
        assert head is not None
        behind.add(head.commit.batch - base.checkpoint.batch)
        times = [now - back for back in (0, 0.5, 3, 6, 9.9, 15)]
        asked: list[tuple[Any, ...]] = [("log",), ("versions",), ("current",), ()]
        asked += [("current", (EPOCH + timedelta(minutes=m)).isoformat(), True) for m in times]
        for one in asked:
            expected = spark_rows(store, *one)
            assert without_spark(topology, "rates", *one) == expected
            for key in "af":
                of_key = [row for row in expected if key in row]
                assert without_spark(topology, "rates", *one, key=key) == of_key
        others = AssetStore(topology.warehouse, plain, spark)
        for one in ((), ("log",)):
            assert without_spark(topology, "plain", *one) == spark_rows(others, *one)
    assert max(behind) > 0


KINDS = {
    "text": ("string", "a'b [x]", "a'b [x]"),
    "whole": ("bigint", -7, "-7"),
    "small": ("smallint", 7, "7"),
    "exact": ("decimal(10,2)", Decimal("1.50"), "1.5"),
    "ratio": ("double", math.nan, "nan"),
    "zero": ("double", 0.0, "-0"),
    "truth": ("boolean", True, "true"),
    "day": ("date", "2024-02-29", "2024-02-29"),
    "moment": ("timestamp", "2024-02-29T01:02:03.5Z", "2024-02-29T02:02:03.500+01:00"),
}


@pytest.fixture(scope="module")
def table_of_all_key_types(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A table whose key has a column of each allowed type, with two keys, one of which has two
    versions; and a table with a key of one type. Endurance tests have a table for each other type."""
    root = tmp_path_factory.mktemp("kinds")
    columns = ", ".join(f"`{name}` {kind}" for name, (kind, _, _) in KINDS.items())
    schema = StructType.fromDDL(f"{columns}, n int, at timestamp, raw binary")
    row = {n: str(v) if isinstance(v, Decimal) else v for n, (_, v, _) in KINDS.items()}
    rows = [{**row, "n": n, "at": f"2024-01-0{n}T00:00:00Z"} for n in (1, 2)]
    rows.append({**dict.fromkeys(row, None), "n": 3, "at": "2024-01-03T00:00:00Z"})
    (root / "landing").mkdir()
    (root / "rows.json").write_text("\n".join(json.dumps(r) for r in rows), encoding="utf-8")
    typed = spark.read.schema(schema).json(str(root / "rows.json"))
    typed.coalesce(1).write.parquet(str(root / "made"))
    next((root / "made").glob("*.parquet")).rename(root / "landing" / "1.parquet")
    for name in (EACH, ALONE):
        run_table_with_key_type(root, name, spark)
    return root


EACH, ALONE = "each", "moment"
"""The key of all types, and the single-column key that `make test` tests, not only `make endurance`."""


def run_table_with_key_type(root: Path, name: str, spark: SparkSession) -> str:
    """Runs a table whose key is of that type, and returns the warehouse."""
    columns = ", ".join(f"`{name}` {kind}" for name, (kind, _, _) in KINDS.items())
    table = VersionedTable(
        f"by_{name}",
        key=[*KINDS] if name == EACH else name,
        schema=StructType.fromDDL(f"{columns}, n int, at timestamp, raw binary"),
        timestamp="at",
        history_retention=timedelta(days=30),
        source=FilesSource(
            str(root / "landing"), format="parquet", pattern="*.parquet", max_bad_share=1
        ),
    )
    run_once(table, stores_of(str(root / "warehouse"), spark))
    return str(root / "warehouse")


@pytest.mark.parametrize(
    "name",
    [EACH, ALONE, *(pytest.param(n, marks=pytest.mark.endurance) for n in KINDS if n != ALONE)],
)
def test_lookup_by_key_of_any_type(
    table_of_all_key_types: Path, spark: SparkSession, name: str
) -> None:
    warehouse = run_table_with_key_type(table_of_all_key_types, name, spark)
    expected = AssetStore.open(warehouse, f"by_{name}", spark).read("versions").count()
    about: dict[str, Any] = {"warehouse": warehouse, "what": "versions"}
    kinds = [*KINDS.values()] if name == EACH else [KINDS[name]]
    texts = [text for _, _, text in kinds]
    for key in (texts, [value if value == value else text for _, value, text in kinds]):
        rows = vt_dagster.read(f"by_{name}", key=key, **about)
        assert rows.column("n").to_pylist() == [1, 2][:expected], key
    assert vt_dagster.read(f"by_{name}", key=texts, warehouse=warehouse).num_rows == 1
    assert vt_dagster.read(f"by_{name}", key=texts, into="spark", **about).count() == expected


@pytest.mark.parametrize(
    ("name", "key", "said"),
    [
        ("whole", "7.5", "expected --key as a bigint for whole, got '7.5'"),
        ("small", "70000", "as a smallint for small, got '70000'"),
        ("exact", "1.499", r"as a decimal\(10,2\) for exact, got '1.499'"),
        ("truth", "perhaps", "as a boolean for truth"),
        ("day", "2024-02-30", "as a date for day, got '2024-02-30'"),
        ("moment", "2024-02-29T25:00:00Z", "as a timestamp for moment"),
    ],
)
def test_lookup_refuses_value_of_wrong_type(
    table_of_all_key_types: Path, name: str, key: str, said: str
) -> None:
    warehouse = str(table_of_all_key_types / "warehouse")
    asked = [key if kind == name else text for kind, (_, _, text) in KINDS.items()]
    intos: list[Into] = ["arrow", "spark"]
    for into in intos:
        with pytest.raises(StorageError, match=said):
            vt_dagster.read(f"by_{EACH}", key=asked, warehouse=warehouse, into=into)
        with pytest.raises(
            StorageError, match=r"has the key \['moment'\]: expected --key once for each"
        ):
            vt_dagster.read(f"by_{ALONE}", key=("1", "2"), warehouse=warehouse, into=into)


@pytest.fixture(scope="module")
def topology(tmp_path_factory: pytest.TempPathFactory, spark: SparkSession) -> Topology:
    """Three rates from one run; tests only read them."""
    topology = Topology(tmp_path_factory.mktemp("rates"))
    topology.land("rates", "1.jsonl", [("a", 1, 0), ("b", 2, 1), ("a", 3, 2)])
    topology.run("rates", spark)
    return topology


def test_read_into_other_libraries(topology: Topology) -> None:
    about: dict[str, Any] = {"warehouse": topology.warehouse, "key": "a"}
    found = {
        into: vt_dagster.read(topology.rates, into=into, **about)
        for into in ("arrow", "pandas", "polars", "duckdb", "spark")
    }
    assert isinstance(found["arrow"], pa.Table)
    assert isinstance(found["pandas"], pd.DataFrame)
    assert isinstance(found["polars"], pl.DataFrame)
    assert isinstance(found["duckdb"], duckdb.DuckDBPyRelation)
    frames = [found["arrow"].to_pandas(), found["pandas"], found["polars"].to_pandas()]
    frames += [found["duckdb"].df(), found["spark"].toPandas()]
    assert [list(frame["n"]) for frame in frames] == [[3]] * 5
    moment = datetime(2020, 1, 1, 0, 1, 30, tzinfo=timezone.utc)
    then = vt_dagster.read("rates", warehouse=topology.warehouse, as_of=moment)
    assert sorted(then.column("n").to_pylist()) == [1, 2]
    then = vt_dagster.read("rates", warehouse=topology.warehouse, as_of=moment.date())
    assert then.column("n").to_pylist() == [1]
    with pytest.raises(StorageError, match="expected into to be one of"):
        vt_dagster.read("rates", warehouse=topology.warehouse, into="excel")  # type: ignore[arg-type]


def test_as_of_now(topology: Topology, monkeypatch: pytest.MonkeyPatch) -> None:
    """``as_of="now"`` omits rows of the future. With and without Spark, a read asks the clock once."""
    about: dict[str, Any] = {"warehouse": topology.warehouse}
    for second, found in ((30, {1}), (90, {1, 2}), (120, {2, 3})):
        times = iter([parse_time("2020-01-01T00:00:00Z") + second * 1_000_000] * 2)
        monkeypatch.setattr("vt_dagster.topology.durations.clock", lambda times=times: next(times))
        by_arrow = vt_dagster.read("rates", as_of="now", **about)
        by_spark = vt_dagster.read("rates", as_of="now", into="spark", **about)
        assert {*by_arrow.column("n").to_pylist()} == {r["n"] for r in by_spark.collect()} == found
        assert next(times, None) is None
    assert {*vt_dagster.read("rates", **about).column("n").to_pylist()} == {2, 3}
    asked = ["get", "rates", "--key", "a", "--as-of", "now", "--json", "--warehouse"]
    monkeypatch.setattr(
        "vt_dagster.topology.durations.clock", lambda: parse_time("2020-01-01T00:01:59Z")
    )
    done = CliRunner().invoke(app, [*asked, topology.warehouse])
    assert json.loads(done.stdout)["n"] == 1


def test_missing_asset_or_time_is_reported(tmp_path: Path, spark: SparkSession) -> None:
    """Without Spark, the messages are the same as with Spark."""
    topology = Topology(tmp_path)
    topology.land("rates", "1.jsonl", [("a", 1, 0), ("a", 3, 20)])
    topology.land("orders", "1.jsonl", [("a", 1, 0)])
    for name in ("rates", "orders"):
        topology.run(name, spark)
    for name, asked, said in (
        ("nothing", {}, r"'nothing'.*orders.*rates"),
        ("orders", {"what": "current"}, r"orders is a Stream: expected one of \['log'\]"),
        ("orders", {"as_of": "2020-01-01"}, "as_of needs a VersionedTable"),
        ("orders", {"as_of": "now"}, "as_of needs a VersionedTable"),
        ("rates", {"as_of": "now", "what": "versions"}, "selects the current rows, but what is 'vers"),
        (
            "rates",
            {"as_of": "2020-01-01", "what": "log"},
            "selects the current rows, but what is 'log'",
        ),
        (
            "rates",
            {"as_of": "2020-01-01T00:05:00Z"},
            "expected a time from 2020-01-01T00:10:00Z on.*reads by name know it after the next run",
        ),
    ):
        with pytest.raises(StorageError, match=said):
            vt_dagster.read(name, warehouse=topology.warehouse, **asked)
    wide = replace(topology.orders, name="empty")
    with pytest.raises(StorageError, match="'empty'"):
        vt_dagster.read(wide, warehouse=topology.warehouse)
    assert isinstance(wide, Stream)


def test_neither_spark_nor_dagster_is_imported(topology: Topology) -> None:
    code = f"""
import sys
from vt_dagster.cli import app
for command in ("get", "history"):
    sys.argv = ["vt-dagster", command, "rates", "--key", "a", "--warehouse", {topology.warehouse!r}]
    try:
        app()
    except SystemExit as done:
        assert done.code == 0
print(sorted({{"pyspark", "dagster", "pandera"}} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert "n             3\n" in done.stdout, done.stderr
    assert "n=3" in done.stdout
    assert done.stdout.endswith("[]\n")


def test_read_waits_for_arrow_threads_to_release_file_system() -> None:
    """For object stores, the file system is a Python object: a thread that releases it while the
    process exits aborts the process."""
    memory: Any = fsspec.filesystem("memory")
    with memory.open("/rows.parquet", "wb") as file:
        pq.write_table(pa.table({"n": [1, 2]}), file)
    held: list[weakref.ref[Any]] = []

    def rows(where: Any) -> pa.Table:
        by_a_thread = [where.handler]
        held.append(weakref.ref(where.handler))
        threading.Timer(0.3, by_a_thread.clear).start()
        return ds.dataset("/rows.parquet", filesystem=where, format="parquet").to_table()

    assert arrow_reader._by_python(memory, rows).column("n").to_pylist() == [1, 2]
    assert held[0]() is None
