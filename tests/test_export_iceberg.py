"""Streams and tables as Iceberg tables: Spark writes the files, PyIceberg commits them to a catalog."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import dagster as dg
import polars as pl
import pytest
from pyiceberg import catalog as catalogs
from pyiceberg.catalog import Catalog, load_catalog
from pyiceberg.table import Table
from pyiceberg.table.snapshots import Operation, Summary
from pyiceberg.table.update import AddSnapshotUpdate, SetSnapshotRefUpdate
from pyiceberg.utils.config import Config
from pyspark.sql import SparkSession

from tests.conftest import ROOT, ConnectServer
from tests.market import Market, materialized, messages, observed, record, run
from vt_dagster import TopologyError, build_export
from vt_dagster.errors import ConcurrentRunError, StorageError
from vt_dagster.runs.erase import KEPT_ICEBERG, erase
from vt_dagster.runs.export import ExportRun, export_of, last_export
from vt_dagster.runs.truncate_log import truncate_logs
from vt_dagster.storage.iceberg import ATTEMPT, BATCH, IcebergTable, renew

pytestmark = pytest.mark.usefixtures("few_rows")


@pytest.fixture
def lake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Catalog]:
    """A catalog in SQLite, for this process and its child processes."""
    monkeypatch.setenv("PYICEBERG_CATALOG__LAKE__TYPE", "sql")
    monkeypatch.setenv("PYICEBERG_CATALOG__LAKE__URI", f"sqlite:///{tmp_path}/catalog.db")
    monkeypatch.setenv("POLARS_ICEBERG_PLANNER", "pyiceberg")  # the default needs another package
    monkeypatch.setattr(catalogs, "_ENV_CONFIG", Config())  # read at import
    found = load_catalog("lake")
    found.create_namespace("bi")
    yield found
    found.close()


@pytest.fixture
def copy(market: Market, tmp_path: Path) -> Market:
    return market.copy(tmp_path / "copy")


def export_run(market: Market, node: Any, what: Any, to: Path, **more: Any) -> ExportRun:
    about: Any = {"format": "iceberg", "iceberg_catalog": "lake", "catalog_table": f"bi.{node.name}"}
    export = export_of(node, what, str(to), **{**about, **more})
    return ExportRun(export, str(market.warehouse), market.spark)


def rows_by_both_readers(table: Table) -> list[dict[str, Any]]:
    """Returns the rows of a table; PyIceberg and Polars' native reader must agree on them."""
    found = table.scan().to_arrow()
    by_polars = pl.scan_iceberg(table, reader_override="native").collect()
    assert by_polars.columns == found.column_names
    by_arrow = pl.DataFrame(found)
    assert sorted(map(repr, by_polars.iter_rows())) == sorted(map(repr, by_arrow.iter_rows()))
    return found.to_pylist()


def rows(table: Table) -> Counter[tuple[Any, ...]]:
    return Counter(tuple(row.values()) for row in rows_by_both_readers(table))


def as_delta(market: Market, node: Any, what: Any, to: Path) -> Counter[tuple[Any, ...]]:
    """Returns the rows of the same export as a Delta table."""
    assert ExportRun(export_of(node, what, str(to)), str(market.warehouse), market.spark).run()
    return Counter(pl.read_delta(str(to)).iter_rows())


def history(table: Table) -> list[tuple[str, str, str]]:
    """Returns of each snapshot its operation, its batch, and the number of rows after it."""
    told = [one.summary for one in table.snapshots()]
    return [(one.operation.value, str(one[BATCH]), str(one["total-records"])) for one in told if one]


def test_iceberg_export_equals_delta_export(copy: Market, lake: Catalog, tmp_path: Path) -> None:
    """The Iceberg table has the rows of a Delta export after each of two runs. A run without new
    records adds no snapshot."""
    asked = [(copy.prices, "versions"), (copy.rates, "current"), (copy.sales, "log")]
    to = tmp_path / "it's here"
    ways = [export_run(copy, node, what, to / node.name) for node, what in asked]
    for way, (node, what) in zip(ways, asked, strict=True):
        assert way.run()
        found = lake.load_table(f"bi.{node.name}")
        assert rows(found) == as_delta(copy, node, what, tmp_path / "1" / node.name)
    copy.land("prices", "3.jsonl", record("a", None, "2 06:00"), record("c", "z1", "2 06:00"))
    copy.land("rates", "3.jsonl", record("a", "r4", "2 06:00"))
    copy.land("sales", "3.jsonl", record("a", "s6", "1 03:00"))
    copy.run([copy.prices, copy.rates, copy.sales])
    for way, (node, what) in zip(ways, asked, strict=True):
        done = way.run()
        assert done is not None
        assert done.batch == 2
        found = lake.load_table(f"bi.{node.name}")
        assert rows(found) == as_delta(copy, node, what, tmp_path / "2" / node.name)
        how = "append" if what == "log" else "overwrite"
        assert [(did, batch) for did, batch, _ in history(found)] == [("append", "1"), (how, "2")]
        assert len(found.schemas()) == 1
        idle = ExportRun(way.export, str(copy.warehouse), lambda: pytest.fail("Spark was started"))
        assert idle.run() is None
        assert len(lake.load_table(f"bi.{node.name}").snapshots()) == 2
    versions = lake.load_table("bi.prices")
    assert [field.name for field in versions.schema().fields] == [
        *("k", "v", "at", "valid_from", "valid_to")
    ]
    assert str(versions.schema().find_type("valid_to")) == "timestamptz"
    # Filters work on the first snapshot too, and a scan skips files by their statistics.
    first = versions.snapshots()[0].snapshot_id
    assert versions.scan(snapshot_id=first, row_filter="k == 'b'").to_arrow().num_rows == 2
    assert versions.scan(row_filter="k == 'nobody'").plan_files() == []


def test_export_without_rows(copy: Market, lake: Catalog, tmp_path: Path) -> None:
    """A stream without rows, a table whose last rows were deleted, and new records that add no row:
    each gives a snapshot."""
    none = copy.sales.flat_map_values("cast(array() AS array<string>)", column="word", name="none")
    copy.run([none])
    way = export_run(copy, none, None, tmp_path / "none")
    assert way.run()
    assert rows(lake.load_table("bi.none")) == Counter()
    assert way.run() is None
    prices, log = (
        export_run(copy, copy.prices, what, tmp_path / what, catalog_table=f"bi.{what}")
        for what in ("current", "log")
    )
    assert prices.run()
    assert log.run()
    copy.land("prices", "3.jsonl", *(record(k, None, "2 06:00") for k in ("a", "b")))
    copy.run([copy.prices])
    assert prices.run()
    assert log.run()
    found = lake.load_table("bi.current")
    assert rows(found) == Counter()
    assert history(found) == [("append", "1", "2"), ("overwrite", "2", "0")]
    assert history(lake.load_table("bi.log")) == [("append", "1", "7"), ("append", "2", "7")]
    assert prices.run() is None
    assert log.run() is None


TYPES = """
SELECT 1, 2s, 3y, 4l, 1.5f, 2.5d, true, 'é', unhex('00ff'), cast(1.5 AS decimal(10, 2)),
 cast(12345678901234567890.123456789012345678 AS decimal(38, 18)), date'1969-07-20',
 timestamp'2024-01-01 00:00:00.123456', timestamp'1900-01-01 00:00:00.000001',
 timestamp_ntz'2024-01-01 01:00:00.5',
 named_struct('x', nullif(1, 0), 'y', if(false, null, named_struct('z', nullif('q', '')))),
 array(1, 2, null), array(named_struct('p', nullif(1, 0)), null),
 map('k', named_struct('m', nullif(1.5d, 0d)), 'n', null)
UNION ALL
SELECT null, null, null, null, null, null, null, null, null, null, null, null, null, null, null, null,
 null, array(), map()
"""
NAMES = "i s b l f d yes text bytes small large day moment old local nested numbers structs named"
"""In the second row, all are null but the last two: PyIceberg's reader returns a null array or map of
structs as empty."""


def test_exported_types(spark: SparkSession, lake: Catalog, tmp_path: Path) -> None:
    made = spark.sql(TYPES).toDF(*NAMES.split())
    table = IcebergTable("types", "lake", "bi.types", str(tmp_path / "types"))
    document = {"asset": "types", "batch": 1, "attempt": "1"}
    about: Any = {"append": False, "before": lambda: None}
    table.write(made.coalesce(1), document=document, after=None, **about)
    found = lake.load_table("bi.types")
    assert rows_by_both_readers(found) == made.toArrow().to_pylist()
    assert table.rows() == 2
    assert list(table.types().values()) == [
        *("int", "int", "int", "long", "float", "double", "boolean", "string", "binary"),
        *("decimal(10, 2)", "decimal(38, 18)", "date", "timestamptz", "timestamptz", "timestamp"),
        *(str(field.field_type) for field in found.schema().fields[-4:]),
    ]
    for condition, count in [("i == 1", 1), ("i == 2", 0), ("day < '1970-01-01'", 1), ("l is null", 1)]:
        assert found.scan(row_filter=condition).to_arrow().num_rows == count
    # A new column, removed columns, wider types, and another column order.
    other = made.selectExpr("text", "cast(i AS bigint) AS i", "cast(f AS double) AS f", "1 AS more")
    assert not other.schema["more"].nullable
    second = {**document, "batch": 2, "attempt": "2"}
    table.write(other, document=second, after="1", **about)
    assert table.types() == {"text": "string", "i": "long", "f": "double", "more": "int"}
    found = lake.load_table("bi.types")
    assert not any(field.required for field in found.schema().fields)
    assert rows(found) == Counter([("é", 1, 1.5, 1), (None, None, None, 1)])
    first = found.scan(snapshot_id=found.snapshots()[0].snapshot_id).to_arrow()
    assert first.to_pylist() == made.toArrow().to_pylist()
    # A type that the column cannot change to.
    third = {**document, "batch": 3, "attempt": "3"}
    with pytest.raises(
        StorageError, match=r"expected columns that bi.types in the catalog lake can"
    ) as e:
        table.write(other.selectExpr("text", "'x' AS i"), document=third, after="2", **about)
    assert "purge_table" in str(e.value)
    lake.purge_table("bi.types")
    assert table.last() is None
    table.write(other.selectExpr("text", "'x' AS i"), document=document, after=None, **about)
    assert table.rows() == 2


def test_infinite_timestamps_are_exported(spark: SparkSession, lake: Catalog, tmp_path: Path) -> None:
    """PostgreSQL's infinity, as Debezium sends it, is exported; file statistics then have no bounds."""
    far = "timestamp'+294247-01-01 00:00:00' AS until, date'-0044-03-15' AS day"
    table = IcebergTable("far", "lake", "bi.far", str(tmp_path / "far"))
    for batch, sql in enumerate(("SELECT 1 AS n", f"SELECT 1 AS n, {far}", f"SELECT 2 AS n, {far}"), 1):
        table.write(
            spark.sql(sql).coalesce(1),
            document={"asset": "far", "batch": batch, "attempt": str(batch)},
            after=str(batch - 1) if batch > 1 else None,
            append=batch == 3,
            before=lambda: None,
        )
    found = lake.load_table("bi.far").scan(row_filter="n == 2").to_arrow()
    assert found.column("until").cast("int64").to_pylist() == [9223371244800000000]
    assert found.column("day").cast("int32").to_pylist() == [-735525]
    assert len(lake.load_table("bi.far").scan(row_filter="n == 2").plan_files()) == 1


def test_concurrent_exports_have_one_winner(spark: SparkSession, lake: Catalog, tmp_path: Path) -> None:
    """The run that commits first wins, for the first batch and for a later one. The other run leaves
    no files."""
    table = IcebergTable("both", "lake", "bi.both", str(tmp_path / "both"))

    def write(batch: int, who: str, before: Any = lambda: None) -> None:
        document = {"asset": "both", "batch": batch, "attempt": f"{who} {batch}"}
        after = None if batch == 1 else f"theirs {batch - 1}"
        made = spark.range(2).coalesce(1)
        table.write(made, document=document, after=after, append=True, before=before)

    for batch in (1, 2):
        with pytest.raises(ConcurrentRunError, match=f"writes batch {batch}, but another run"):
            write(batch, "mine", before=lambda batch=batch: write(batch, "theirs"))
        last = table.last()
        assert last is not None
        assert last["attempt"] == f"theirs {batch}"
        assert table.rows() == 2 * batch
        assert len([*(tmp_path / "both" / "data").iterdir()]) == batch


KILLED = """
import os, signal, sys
from pathlib import Path
import pyspark.sql.connect.session
from tests.market import Market
from tests.test_export_iceberg import export_run
from vt_dagster.spark.session import build_session
from vt_dagster.storage.iceberg import IcebergTable

root, to, address = sys.argv[1:]
commit = IcebergTable._commit

def export(name, when):
    def killed(*args):
        if when == "after":
            commit(*args)
        os.kill(os.getpid(), signal.SIGKILL)
    IcebergTable._commit = killed
    market = Market(Path(root), build_session(remote=address))
    export_run(market, getattr(market, name), None, Path(to, name)).run()

for line in sys.stdin:
    if os.fork() == 0:
        export(*line.split())
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.wait()[1]), flush=True)
"""
"""For each export that the script reads from stdin, it forks a process, which is killed."""


def test_killed_export_is_completed(
    copy: Market, lake: Catalog, tmp_path: Path, connect_server: ConnectServer
) -> None:
    """The next run gives the rows of an undisturbed export: of a log killed before its first commit and
    after its second, and of a table killed before its second, on a Spark Connect server."""

    arguments = [str(copy.root), str(tmp_path), connect_server.address]
    about: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "cwd": ROOT}
    forking = subprocess.Popen([sys.executable, "-c", KILLED, *arguments], **about)

    def killed(name: str, when: str) -> None:
        assert forking.stdin is not None
        assert forking.stdout is not None
        forking.stdin.write(f"{name} {when}\n")
        forking.stdin.flush()
        assert forking.stdout.readline() == f"-{signal.SIGKILL:d}\n"

    def folders(name: str, batch: int) -> int:
        return len([*(tmp_path / name / "data").glob(f"{batch}-*/*.parquet")])

    sales, rates = (
        export_run(copy, node, None, tmp_path / node.name) for node in (copy.sales, copy.rates)
    )
    with forking:
        killed("sales", "before")
        assert not lake.table_exists("bi.sales")
        assert folders("sales", 1) == 1
        assert sales.run()
        assert rates.run()
        copy.land("sales", "3.jsonl", record("a", "s6", "1 03:00"))
        copy.land("rates", "3.jsonl", record("a", "r4", "2 06:00"))
        copy.run([copy.sales, copy.rates])
        killed("sales", "after")
        assert sales.run() is None
        killed("rates", "before")
        assert folders("rates", 2) == 1
        assert rates.run()
        assert folders("rates", 2) == 2  # the killed run's file belongs to no snapshot
    for node in (copy.sales, copy.rates):
        table = lake.load_table(f"bi.{node.name}")
        undisturbed = as_delta(copy, node, None, tmp_path / "undisturbed" / node.name)
        assert rows(table) == undisturbed
        did = "append" if node is copy.sales else "overwrite"
        assert [one[:2] for one in history(table)] == [("append", "1"), (did, "2")]
        files = [task.file.file_path for task in table.scan().plan_files()]
        assert len(files) == (2 if node is copy.sales else 1)


def test_export_in_dagster(copy: Market, lake: Catalog, tmp_path: Path) -> None:
    """Covers a run that died after its commit, a run without new records, other columns, and the
    metadata that Dagster shows."""
    to, at = str(tmp_path / "prices"), {"instance": copy.instance}
    about: Any = {"to": to, "catalog_table": "bi.prices"}
    about |= {"format": "iceberg", "iceberg_catalog": "lake", "warehouse": str(copy.warehouse)}
    export = build_export(copy.prices, "versions", **about)
    (spec,) = export.specs
    assert spec.description == f"The versions of `prices` for other engines, an Iceberg table in {to}."
    assert spec.kinds == {"spark", "iceberg"}
    assert spec.metadata["vt_dagster/iceberg_catalog"] == "lake"
    assert spec.metadata["dagster/storage_kind"] == "iceberg"
    assert export_run(copy, copy.prices, "versions", Path(to)).run()
    told = materialized(run([export], copy.warehouse, **at), "prices_export")
    assert (told["dagster/row_count"], told["dagster/uri"], told["versions"]) == (4, to, {"batch": 1})
    assert told["dagster/table_name"] == "bi.prices"
    columns = {c.name: c.type for c in told["dagster/column_schema"].columns}
    times = dict.fromkeys(("at", "valid_from", "valid_to"), "timestamptz")
    assert columns == {"k": "string", "v": "string", **times}
    observed(run([export], copy.warehouse, **at), "prices_export")
    columns = ["timestamp", "is_tombstone"]
    more = build_export(copy.prices, "versions", with_columns=columns, **about)
    told = materialized(run([more], copy.warehouse, **at), "prices_export")
    delta = export_of(copy.prices, "versions", str(tmp_path / "delta"), with_columns=columns)
    assert ExportRun(delta, str(copy.warehouse), copy.spark).run()
    count = pl.read_delta(delta.to).height
    assert (told["versions"], told["dagster/row_count"]) == ({"batch": 2}, count)
    table = lake.load_table("bi.prices")
    assert table.scan().to_arrow().column_names[-2:] == ["timestamp", "is_tombstone"]
    assert rows(table).total() == count
    told = materialized(run([export], copy.warehouse, **at), "prices_export")
    assert told["versions"] == {"batch": 3}
    assert history(lake.load_table("bi.prices")) == [
        *(("append", "1", "4"), ("overwrite", "2", str(count)), ("overwrite", "3", "4"))
    ]
    elsewhere = {**about, "to": str(tmp_path / "rates"), "catalog_table": "crm.rates"}
    said = messages(run([build_export(copy.rates, **elsewhere)], copy.warehouse))
    assert "expected a schema crm in the catalog lake, got none; create it" in said
    assert not (tmp_path / "rates").exists()


def compacted(lake: Catalog, table: Table) -> None:
    """Adds one snapshot with the operation ``replace``, as a compaction leaves it."""
    last = table.current_snapshot()
    assert last is not None
    assert last.summary is not None
    told = Summary(Operation.REPLACE, **{"total-records": last.summary["total-records"]})
    numbers = {"snapshot_id": last.snapshot_id + 1, "parent_snapshot_id": last.snapshot_id}
    then = {"sequence_number": table.metadata.last_sequence_number + 1, "summary": told}
    made = last.model_copy(update={**numbers, **then})
    about = {"snapshot-id": made.snapshot_id, "ref-name": "main", "type": "branch"}
    ref = SetSnapshotRefUpdate.model_validate(about)
    lake.commit_table(table, (), (AddSnapshotUpdate(snapshot=made), ref))


def test_foreign_snapshots(copy: Market, lake: Catalog, tmp_path: Path) -> None:
    to = tmp_path / "sales"
    way = export_run(copy, copy.sales, None, to)

    def refused(way: ExportRun = way) -> str:
        with pytest.raises(StorageError) as found:
            way.run()
        return str(found.value)

    assert way.run()
    table = lake.load_table("bi.sales")
    ours = table.current_snapshot()
    assert ours is not None
    compacted(lake, table)
    assert way.run() is None
    lake.load_table("bi.sales").maintenance.expire_snapshots().by_id(ours.snapshot_id).commit()
    assert way.run() is None
    copy.land("sales", "3.jsonl", record("a", "s6", "1 03:00"))
    copy.run([copy.sales])
    assert way.run()
    table = lake.load_table("bi.sales")
    assert rows(table).total() == 6
    last = table.current_snapshot()
    assert last is not None
    assert last.summary is not None
    table.append(table.scan(limit=1).to_arrow())
    said = refused()
    assert "another writer has changed it: append in the snapshot" in said
    assert f"{ATTEMPT}={last.summary[ATTEMPT]}" in said
    lake.load_table("bi.sales").manage_snapshots().rollback_to_snapshot(last.snapshot_id).commit()
    assert way.run() is None
    assert last.parent_snapshot_id is not None
    renew("lake:bi.sales")
    assert way.run()
    table = lake.load_table("bi.sales")
    table.manage_snapshots().rollback_to_snapshot(last.snapshot_id).commit()
    assert f"a roll-back to the snapshot {last.snapshot_id} of batch 2" in refused()
    assert "got one that sales_export writes; give another" in refused(
        export_run(copy, copy.sales, None, to, name="second")
    )
    assert f"expected the files of bi.sales in file://{tmp_path}/other, got file://{to};" in refused(
        export_run(copy, copy.sales, None, tmp_path / "other")
    )
    with pytest.raises(StorageError, match="expected the catalog mine of PyIceberg's configuration"):
        export_run(copy, copy.sales, None, to, iceberg_catalog="mine").run()
    lake.purge_table("bi.sales")
    done = way.run()
    assert done is not None
    assert done.batch == 1
    assert rows(lake.load_table("bi.sales")).total() == 6
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "report.csv").touch()
    assert "got ['report.csv']; give the export another directory" in refused(
        export_run(copy, copy.rates, None, tmp_path / "files")
    )


def test_erase_without_new_records_is_exported(copy: Market, lake: Catalog, tmp_path: Path) -> None:
    """The next export has no rows of the erased key, although the log has no new records."""
    way, place = export_run(copy, copy.sales, None, tmp_path / "sales"), "lake:bi.sales"
    assert way.run()
    found = last_export(place)
    assert found is not None
    assert found.inputs == {"sales": {0: 5}}
    with pytest.raises(StorageError, match=r"name it as catalog:schema\.table"):
        last_export(str(tmp_path / "sales"))
    about: Any = {"key": ["a"], "reason": "asked to", "among": copy.nodes}
    done = erase(str(copy.warehouse), copy.sales, copy.spark, exports=[place], **about)
    assert done.kept[place] == KEPT_ICEBERG
    assert way.run()
    assert {row[0] for row in rows(lake.load_table("bi.sales"))} == {"b"}
    assert way.run() is None


def test_erase_of_truncated_log_is_exported(copy: Market, lake: Catalog, tmp_path: Path) -> None:
    """The erased key leaves the export of a log, also if rows that the log no longer has leave with it:
    the export would keep the key if it were refused, as it is without an erase."""
    way, place = export_run(copy, copy.rates, "log", tmp_path / "rates"), "lake:bi.rates"
    assert way.run()
    (key, *_), *_ = rows(lake.load_table("bi.rates"))
    short, keep = replace(copy.rates, log_retention=timedelta(0)), timedelta(0)
    about: Any = {"exports": [place], "keep": keep, "now": 2**52}
    assert truncate_logs(str(copy.warehouse), copy.spark, [short], **about)["rates"] > 0
    wider = export_run(copy, copy.rates, "log", tmp_path / "rates", with_columns=["offset"])
    with pytest.raises(StorageError, match="rates_export: expected the log of rates from 0:0 on"):
        wider.run()
    about = {"key": [key], "reason": "asked to", "among": copy.nodes}
    erase(str(copy.warehouse), copy.rates, copy.spark, exports=[place], **about)
    assert way.run()
    assert key not in {row[0] for row in rows(lake.load_table("bi.rates"))}


NAMED: dict[str, Any] = {"iceberg_catalog": "lake", "catalog_table": "bi.prices"}


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"format": "hudi"}, "expected format to be 'delta' or 'iceberg', got 'hudi'"),
        ({"catalog_table": "bi.prices"}, "expected iceberg_catalog to name a catalog of PyIceberg's"),
        ({**NAMED, "catalog_table": "prices"}, "such as 'bi.prices', got 'prices'"),
        ({**NAMED, "catalog_table": None}, "such as 'bi.prices', got None"),
        ({"iceberg_catalog": "lake", "format": "delta"}, "with format='iceberg' only, got 'lake'"),
        ({**NAMED, "to": "a/warehouse/prices"}, "place outside of the warehouse a/warehouse"),
    ],
)
def test_refused_when_definitions_load(tmp_path: Path, asked: dict[str, Any], said: str) -> None:
    about: Any = {"to": "a/export", "format": "iceberg", "warehouse": "a/warehouse", **asked}
    with pytest.raises(TopologyError) as refused:
        build_export(Market(tmp_path, None).prices, **about)
    assert said in str(refused.value)


def test_missing_pyiceberg_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    node = Market(tmp_path, None).prices
    about: Any = {"to": "a/export", "format": "iceberg", "iceberg_catalog": "lake"}
    assert build_export(node, catalog_table="bi.prices", **about)
    monkeypatch.setattr("vt_dagster.storage.iceberg.find_spec", lambda name: None)
    with pytest.raises(TopologyError, match=r'got none; install "vt-dagster\[iceberg\]"'):
        build_export(node, catalog_table="bi.prices", **about)
    assert dg.AssetKey("prices_export") == build_export(node, to="a/export").key
