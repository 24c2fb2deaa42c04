"""Exports of streams and tables as plain Delta tables for other engines."""

from __future__ import annotations

import shutil
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import dagster as dg
import duckdb
import polars as pl
import pytest
from deltalake import DeltaTable, TableFeatures, write_deltalake
from pyspark.sql import SparkSession
from pyspark.sql.types import StructField, StructType, TimestampType

from tests.market import RECORD, Market, lines, materialized, messages, observed, record, run
from vt_dagster import FilesSource, TopologyError, VersionedTable, build_asset, build_export
from vt_dagster.errors import StorageError
from vt_dagster.orchestration.asset import data_version
from vt_dagster.runs.export import ExportRun, export_of, write_in
from vt_dagster.runs.run import run_once
from vt_dagster.storage import delta
from vt_dagster.storage.asset_store import stores_of
from vt_dagster.topology.durations import parse_time

pytestmark = pytest.mark.usefixtures("few_rows")


@pytest.fixture
def copy(market: Market, tmp_path: Path) -> Market:
    return market.copy(tmp_path / "copy")


def export_run(market: Market, node: Any, what: Any, to: Path, **more: Any) -> ExportRun:
    return ExportRun(export_of(node, what, str(to), **more), str(market.warehouse), market.spark)


def require_readable_by_all(to: Path, spark: SparkSession) -> None:
    """All readers find the same rows. The table uses no feature that a reader may lack: no deletion
    vectors, and no column names other than those in the files."""
    table = DeltaTable(str(to))
    protocol, about = table.protocol(), table.metadata()
    assert (protocol.min_reader_version, protocol.reader_features) == (1, None)
    assert not {"delta.columnMapping.mode", "delta.enableDeletionVectors"} & set(about.configuration)
    logs = "".join(path.read_text() for path in sorted((to / "_delta_log").glob("*.json")))
    assert '"deletionVector":{' not in logs
    assert "columnMapping" not in logs
    rows, files = table.to_pyarrow_table(), table.file_uris()
    as_files = pl.concat([pl.read_parquet(file) for file in files])
    assert as_files.columns == rows.column_names
    counts = [pl.read_delta(str(to)).height, as_files.height, duckdb.from_arrow(rows).shape[0]]
    quoted = ", ".join("'" + file.replace("'", "''") + "'" for file in files)
    counts.append(len(duckdb.sql(f"select * from read_parquet([{quoted}])").fetchall()))
    counts.append(spark.read.format("delta").load(str(to)).count())
    assert {*counts} == {rows.num_rows}


def clock(moment: datetime | None) -> str | None:
    return None if moment is None else f"{moment.day} {moment:%H:%M}"


def test_exported_versions_are_readable_by_all(market: Market, tmp_path: Path) -> None:
    """The export has no row for the tombstone of a at 04:00, nor for p1 and p2, which have expired."""
    to = tmp_path / "it's" / "versions"
    assert export_run(market, market.prices, "versions", to).run()
    there = [
        ("a", "p3", "1 06:00", "2 05:00"),
        ("a", "p4", "2 05:00", None),
        ("b", "q1", "1 01:00", "1 12:00"),
        ("b", "q2", "1 12:00", None),
    ]
    columns = ["k", "v", "at", "valid_from", "valid_to"]
    by_polars = pl.read_delta(str(to)).sort("k", "valid_from")
    assert by_polars.columns == columns
    assert [
        (k, v, clock(since), clock(until)) for k, v, _, since, until in by_polars.iter_rows()
    ] == there
    arrow = DeltaTable(str(to)).to_pyarrow_table()
    assert arrow.column_names == columns
    assert duckdb.from_arrow(arrow).order("k, valid_from").select("v").fetchall() == [
        (v,) for _, v, _, _ in there
    ]
    require_readable_by_all(to, market.spark)
    assert DeltaTable(str(to)).metadata().partition_columns == []


def test_current_rows_are_overwritten_when_changed(copy: Market, tmp_path: Path) -> None:
    to = tmp_path / "current"
    way = export_run(copy, copy.prices, None, to)
    assert way.run()
    assert set(pl.read_delta(str(to)).iter_rows()) == {
        ("a", "p4", datetime.fromisoformat("2024-01-02T05:00Z")),
        ("b", "q2", datetime.fromisoformat("2024-01-01T12:00Z")),
    }
    assert way.run() is None
    copy.land("prices", "3.jsonl", record("a", None, "2 06:00"), record("c", "z1", "2 06:00"))
    copy.run([copy.prices])
    done = way.run()
    assert done is not None
    assert (done.batch, done.counts["in"]) == (2, 2)
    assert set(pl.read_delta(str(to))["v"]) == {"q2", "z1"}
    assert way.run() is None
    assert DeltaTable(str(to)).version() == 1
    # Another history retention and other columns cause a new export; a compaction does not.
    DeltaTable(str(to)).optimize.compact()
    assert way.run() is None
    longer = replace(copy.prices, history_retention=timedelta(days=2))
    assert export_run(copy, longer, None, to).run()
    more = export_run(copy, copy.prices, None, to, with_columns=["timestamp", "is_tombstone"])
    assert more.run()
    with_deleted = pl.read_delta(str(to))
    assert with_deleted.columns == ["k", "v", "at", "timestamp", "is_tombstone"]
    require_readable_by_all(to, copy.spark)
    assert set(with_deleted["v"]) == {"q2", "z1"}  # a deleted key has no current row
    assert way.run()
    assert pl.read_delta(str(to)).columns == ["k", "v", "at"]


def test_export_as_of_now(copy: Market, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The export has the rows that are valid now, and its commit says until when: for example, p4 is
    the row of a from day 2, 05:00 on."""
    to = tmp_path / "now"
    way = export_run(copy, copy.prices, None, to, as_of="now")
    told: list[str] = []

    def run_at(moment: str) -> tuple[int | None, set[str]]:
        monkeypatch.setattr("vt_dagster.runs.export.clock", lambda: of(moment))
        done = way.run()
        if done is not None:
            told.append(data_version(done).value)
        return None if done is None else done.batch, set(pl.read_delta(str(to))["v"])

    def of(moment: str) -> int:
        return parse_time(f"2024-01-0{moment.replace(' ', 'T')}:00Z")

    def said() -> tuple[Any, Any]:
        head = way.head()
        assert head is not None
        assert head.export is not None
        return head.export.as_of, head.export.valid_until

    assert run_at("1 11:00") == (1, {"p3", "q1"})
    assert said() == (of("1 11:00"), of("1 12:00"))
    assert run_at("1 11:59") == (None, {"p3", "q1"})
    assert run_at("1 12:00") == (2, {"p3", "q2"})
    assert said() == (of("1 12:00"), of("2 05:00"))
    assert run_at("2 05:00") == (3, {"p4", "q2"})
    assert said() == (of("2 05:00"), None)
    assert run_at("9 00:00") == (None, {"p4", "q2"})
    require_readable_by_all(to, copy.spark)
    # A record with a future timestamp causes a new batch, but is no row yet.
    copy.land("prices", "3.jsonl", record("a", "p5", "2 07:00"), record("b", None, "2 06:30"))
    copy.run([copy.prices])
    assert run_at("2 06:00") == (4, {"p4", "q2"})
    assert said() == (of("2 06:00"), of("2 06:30"))
    assert run_at("2 06:30") == (5, {"p4"})
    assert run_at("2 07:00") == (6, {"p5"})
    # Removing the setting causes a new export, and so does setting it again.
    assert export_run(copy, copy.prices, None, to).run()
    assert run_at("2 06:10") == (8, {"p4", "q2"})
    assert len({*told}) == len(told) == 7  # downstream sees a new data version each time
    monkeypatch.setattr("vt_dagster.runs.export.clock", lambda: of("1 06:59"))
    with pytest.raises(StorageError, match="expected a time from 2024-01-01T07:00:00Z on"):
        export_run(copy, copy.prices, None, tmp_path / "old", as_of="now").run()


def test_export_as_of_now_with_valid_until(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "offers").mkdir()
    schema = StructType([*RECORD.fields, StructField("until", TimestampType())])
    offers = VersionedTable(
        "offers",
        key="k",
        schema=schema,
        timestamp="at",
        valid_until="until",
        history_retention=timedelta(days=9),
        source=FilesSource(str(tmp_path / "offers")),
    )
    ends = {"until": "2024-01-03T00:00:00Z"}
    rows = [record("a", "x", "1 00:00") | ends, record("b", "y", "2 00:00")]
    (tmp_path / "offers" / "1.jsonl").write_text(lines(*rows))
    run([build_asset(offers)], tmp_path / "warehouse", raise_on_error=True)
    to = str(tmp_path / "now")
    way = ExportRun(export_of(offers, None, to, as_of="now"), str(tmp_path / "warehouse"), spark)
    for day, batch, found in (("2", 1, {"x", "y"}), ("3", 2, {"y"}), ("4", None, {"y"})):
        now = parse_time(f"2024-01-0{day}T00:00:00Z")
        monkeypatch.setattr("vt_dagster.runs.export.clock", lambda now=now: now)
        done = way.run()
        assert (done and done.batch, set(pl.read_delta(to)["v"])) == (batch, found)


def test_stream_export_appends(copy: Market, tmp_path: Path) -> None:
    to = tmp_path / "sales"
    assert export_of(copy.sales, None, str(to), columns="v").columns == ("v",)
    way = export_run(copy, copy.sales, None, to, columns=["offset", "v"])
    assert way.run()
    before = set(delta.files(str(to)))
    assert pl.read_delta(str(to)).sort("offset").rows() == [
        *((0, "s1"), (1, "s2"), (2, "s3"), (3, "s4, late"), (4, "s5"))
    ]
    copy.land("sales", "3.jsonl", record("a", "s6", "1 03:00"))
    copy.run([copy.sales])
    done = way.run()
    assert done is not None
    assert (done.batch, done.taken) == (2, {"sales": {0: (5, 6)}})
    (new,) = set(delta.files(str(to))) - before
    assert set(delta.files(str(to))) > before
    assert new.rows == 1
    assert pl.read_delta(str(to)).height == 6
    require_readable_by_all(to, copy.spark)
    # After a rebuild, the stream's offsets belong to other records: the whole export is written again.
    shutil.rmtree(copy.warehouse / "sales")
    copy.run([copy.sales])
    done = way.run()
    assert done is not None
    assert done.counts["in"] == 6
    assert pl.read_delta(str(to)).height == 6


def test_log_export_with_deletions(market: Market, tmp_path: Path) -> None:
    assert export_run(market, market.prices, "log", tmp_path / "plain").run()
    plain = pl.read_delta(str(tmp_path / "plain"))
    assert (plain.columns, plain.height) == (["k", "v", "at"], 7)
    asked: Any = {"columns": ["k", "v", "timestamp", "is_tombstone"]}
    assert export_run(market, market.prices, "log", tmp_path / "all", **asked).run()
    told = pl.read_delta(str(tmp_path / "all"))
    assert told.filter("is_tombstone").select("k", "v").rows() == [("a", None)]
    assert told.height == 8


def test_export_in_dagster(copy: Market, tmp_path: Path, spark: SparkSession) -> None:
    """Covers a run killed after its commit, runs without and with new records, and the metadata and
    checks that downstream sees."""
    to, at = str(tmp_path / "prices"), {"instance": copy.instance}
    spark.sql("CREATE SCHEMA IF NOT EXISTS bi")
    about: Any = {"to": to, "catalog_table": "bi.prices", "tags": {"for": "bi"}}
    export = build_export(copy.prices, "versions", warehouse=str(copy.warehouse), **about)
    assert export.key == dg.AssetKey("prices_export")
    (spec,) = export.specs
    assert (spec.tags["for"], [d.asset_key for d in spec.deps]) == ("bi", [dg.AssetKey("prices")])
    # A run that died after its commit has reported no materialization.
    assert ExportRun(export_of(copy.prices, "versions", to), str(copy.warehouse), spark).run()
    told = materialized(run([export], copy.warehouse, **at), "prices_export")
    assert DeltaTable(to).version() == 0
    assert (told["dagster/row_count"], told["dagster/uri"], told["versions"]) == (4, to, {"batch": 1})
    assert told["dagster/table_name"] == "bi.prices"
    assert [c.name for c in told["dagster/column_schema"].columns] == [
        *("k", "v", "at", "valid_from", "valid_to")
    ]
    lineage = told["dagster/column_lineage"].deps_by_column
    assert lineage["v"] == [dg.TableColumnDep(dg.AssetKey("prices"), "v")]
    by_spark = spark.table("bi.prices").collect()
    assert sorted(row["v"] for row in by_spark) == ["p3", "p4", "q1", "q2"]
    observed(run([export], copy.warehouse, **at), "prices_export")
    idle = export_of(copy.prices, "versions", to)
    started = ExportRun(idle, str(copy.warehouse), lambda: pytest.fail("Spark was started"))
    assert started.run() is None

    @dg.asset_check(asset="prices_export")
    def open_versions() -> dg.AssetCheckResult:
        rows = pl.read_delta(to).filter(pl.col("valid_to").is_null())
        return dg.AssetCheckResult(passed=rows.height == 3, metadata={"rows": rows.height})

    copy.land("prices", "3.jsonl", record("c", "z1", "2 06:00"))
    result = copy.run([copy.prices], export, open_versions)
    (found,) = [e for e in result.get_asset_check_evaluations() if e.check_name == "open_versions"]
    assert found.passed
    assert materialized(result, "prices_export")["records_in"] == 1
    assert spark.table("bi.prices").count() == 5
    taken = build_export(copy.rates, to=str(tmp_path / "rates"), catalog_table="bi.prices")
    result = run([taken], copy.warehouse)
    assert "expected bi.prices to be a new name in the catalog" in messages(result)
    assert not (tmp_path / "rates").exists()
    spark.sql("DROP SCHEMA bi CASCADE")


def test_overtaken_export_writes_remaining_rows(
    copy: Market, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    to, writer = str(tmp_path / "sales"), "vt_dagster.runs.export.write_in"
    stores = stores_of(str(copy.warehouse), copy.spark)
    before = copy.store(copy.sales).read("log").count()

    def overtaken(*args: Any) -> int:
        monkeypatch.setattr(writer, write_in)
        assert export_run(copy, copy.sales, "log", Path(to)).run() is not None
        copy.land("sales", "9.jsonl", record("a", "s9", "3 06:00"))
        run_once(copy.sales, stores)
        return write_in(*args)

    monkeypatch.setattr(writer, overtaken)
    result = run([build_export(copy.sales, to=to)], copy.warehouse)
    assert result.success, messages(result)
    assert materialized(result, "sales_export")["records_in"] == 1
    assert DeltaTable(to).version() == 1
    assert len(pl.read_delta(to)) == before + 1


@pytest.mark.parametrize(
    ("name", "asked", "said"),
    [
        ("sales", {"what": "current"}, "sales is a Stream: expected one of ['log'] to read"),
        ("rates", {"what": "versions"}, "rates is a Table: expected one of ['log', 'current']"),
        ("prices", {"columns": ["k", "offset", "valid_to"]}, "got ['valid_to']; correct columns"),
        ("prices", {"with_columns": ["is_latest"]}, "got ['is_latest']; correct columns"),
        ("prices", {"to": "a/warehouse/prices/view"}, "place outside of the warehouse a/warehouse"),
        ("prices", {"to": "a"}, "place outside of the warehouse a/warehouse"),
        ("prices", {"to": "a%20b"}, "a path can be read as a URL|path that is also valid as a URL"),
        ("prices", {"catalog_table": "bi.`x`"}, "expected catalog_table to be a name such as"),
        ("rates", {"as_of": "now"}, "(as_of needs a VersionedTable), got 'current as of now'"),
        (
            "prices",
            {"as_of": "now", "what": "versions"},
            "as_of='now' selects the current rows, but what",
        ),
        ("prices", {"as_of": "2024-01-01"}, "expected as_of to be 'now' or None, got '2024-01-01'"),
    ],
)
def test_refused_when_definitions_load(
    market: Market, name: str, asked: dict[str, Any], said: str
) -> None:
    about: Any = {"to": "a/export", "warehouse": "a/warehouse", **asked}
    with pytest.raises(TopologyError) as refused:
        build_export(getattr(market, name), **about)
    assert any(one in str(refused.value) for one in said.split("|"))


def test_foreign_table_is_refused(market: Market, tmp_path: Path) -> None:
    def refused(to: Path, **more: Any) -> str:
        with pytest.raises(StorageError) as found:
            export_run(market, market.rates, None, to, **more).run()
        return str(found.value)

    write_deltalake(str(tmp_path / "theirs"), pl.DataFrame({"x": [1]}).to_arrow())
    assert "got a Delta table of another writer; give the export" in refused(tmp_path / "theirs")
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "report.csv").touch()
    assert "got ['report.csv']; give the export another directory" in refused(tmp_path / "files")
    other = market.copy(tmp_path / "other").warehouse / "prices" / "log"
    assert "got one that 'prices' writes" in refused(other)
    to = tmp_path / "rates"
    (to / f"1-{'0' * 32}").mkdir(parents=True)  # left by a killed run
    way = export_run(market, market.rates, None, to)
    assert way.run()
    assert "got one that 'rates_export' writes" in refused(to, name="second")
    DeltaTable(str(to)).delete("k = 'a'")
    assert "another writer has changed it: DELETE at version 1. RESTORE it to version 0" in refused(to)
    DeltaTable(str(to)).restore(0)
    assert way.run() is None
    feature = TableFeatures.DeletionVectors
    DeltaTable(str(to)).alter.add_feature(feature, allow_protocol_versions_increase=True)
    assert "got one with deletionVectors" in refused(to)
