"""Erases, exports and restates of tables with ``new_version_on`` or with a snapshot to start with. They
do not change the rows of other keys."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from datetime import date, datetime, timedelta, timezone
from decimal import Decimal
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from pyspark.sql import SparkSession
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    BooleanType,
    DataType,
    DateType,
    DecimalType,
    DoubleType,
    FloatType,
    LongType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from tests.test_initial_snapshot import Accounts
from tests.test_new_version_on import Live, at, change
from vt_dagster import FilesSource, Materialized, Stream, read
from vt_dagster.runs.audit import audit
from vt_dagster.runs.erase import HIT, KEPT, Key, erase
from vt_dagster.runs.export import ExportRun, export_of
from vt_dagster.runs.replay import replay
from vt_dagster.runs.restate import restate
from vt_dagster.runs.run import run_once
from vt_dagster.runs.what_if import what_if
from vt_dagster.storage.arrow_reader import look_up
from vt_dagster.storage.asset_store import AssetStore, stores_of
from vt_dagster.storage.commit_log import commits
from vt_dagster.topology.durations import in_utc

pytestmark = pytest.mark.usefixtures("few_rows")

HOUR = 3_600_000_000
WHAT = ("log", "current", "versions")


def read_answers(warehouse: str, node: Stream, spark: SparkSession) -> dict[str, list[str]]:
    """All rows that reads return for keys other than ``a``, now and as known at each run."""
    runs = [c for c in commits(f"{warehouse}/{node.name}") if not (c.run_id or "").startswith("erase:")]
    store, found = AssetStore(warehouse, node, spark), dict[str, list[str]]()
    for known in (None, *(in_utc(c.recorded_at) for c in runs)):
        for what in WHAT:
            rows = look_up(warehouse, node.name, what, as_known_at=known)
            some = [rows]
            if what == "versions":
                some += [store.read(what, as_known_at=known).toArrow().select(rows.column_names)]
            told = [sorted(repr(r) for r in one.to_pylist() if r["k"] != "a") for one in some]
            assert told[0] == told[-1]
            found[f"{node.name} {what} {known}"] = told[0]
    return found


def failed_checks(store: AssetStore) -> list[str]:
    return [one.name for one in audit(store) if not one.passed]


def exported(to: str) -> list[str]:
    return sorted(map(repr, pl.read_delta(to).to_dicts()))


def test_erase_with_new_version_on(spark: SparkSession, tmp_path: Path) -> None:
    """Exports equal what reads return. An erase changes no read of other keys, also as known at an
    earlier time."""
    live = Live(tmp_path, spark)
    accounts, b, c = live.table(), {"k": "b"}, {"k": "c"}
    kept = Materialized(history_retention=timedelta(hours=1))
    names = accounts.map_values("tier", "city", "n * 10 as n", name="names", materialized=kept)
    nodes: list[Any] = [accounts, names]
    exports = [
        ExportRun(export_of(node, what, str(tmp_path / "to" / node.name / what)), live.warehouse, spark)
        for node, what in ((accounts, "versions"), (names, "current"))
    ]

    def run(hour: int, *rows: dict[str, Any]) -> None:
        live.run(accounts, *rows, at_=hour * HOUR)
        run_once(names, stores_of(live.warehouse, spark), recorded_at=hour * HOUR + 1)

    def require_exported() -> None:
        for one in exports:
            export = one.export
            rows = look_up(live.warehouse, export.node.name, export.what)
            rows = pl.from_arrow(rows.filter(~rows.column("is_tombstone").to_numpy()))
            assert isinstance(rows, pl.DataFrame)
            there = sorted(map(repr, rows.select(export.columns).to_dicts()))
            assert exported(export.to) == there != []

    run(1, change("x", 0, 10), change("x", 1, 20), change("x", 2, 30, **b), change("x", 3, 40, **b))
    # Out of order: a change between two equal rows, one before them, and a deletion.
    late = [change("z", 4, 35, **b), change("y", 5, 15), change("x", 6, 5, **b), change("w", 7, 1, **c)]
    run(2, *late, change("x", 8, 50, **b), {"k": "c", "timestamp": at(9)}, change("x", 9, 25))
    for one in exports:
        one.run()
    require_exported()
    before = [read_answers(live.warehouse, node, spark) for node in nodes]
    about: dict[str, Any] = {"key": ["a"], "reason": "asked to", "among": nodes}
    about["exports"] = [one.export.to for one in exports]
    done = erase(live.warehouse, accounts, spark, **about)
    assert done.searched["accounts/log"].erased == done.searched["names/log"].erased == 4
    assert not any("have the key in" in line for line in done.elsewhere)
    assert [read_answers(live.warehouse, node, spark) for node in nodes] == before
    require_exported()
    stores = stores_of(live.warehouse, spark)
    for node in nodes:
        assert look_up(live.warehouse, node.name, "log", key="a").num_rows == 0
        assert failed_checks(stores(node)) == []
    assert [one.run() for one in exports] == [None] * len(exports)
    # Later records, also of the erased key, are put as if there had been no erase.
    run(3, change("z", 9, 36, **b), change("x", 1, 12))
    versions = live.versions(accounts)
    assert [v[:3] for v in versions if v[2] == 12] == [("x", 1, 12)]
    assert [v for v in versions if v[0] == "z"] == [("z", 4, 35, 40)]
    for one in exports:
        one.run()
    require_exported()
    for node in nodes:
        stores(node).rebuild_view()
        assert failed_checks(stores(node)) == []
    assert live.versions(accounts) == versions


@pytest.mark.endurance  # test_restate.py restates a join, test_new_version_on.py joins such tables
@pytest.mark.parametrize("name", ["joined", "names"])
def test_restate_of_derived_assets_includes_late_records(
    spark: SparkSession, tmp_path: Path, name: str
) -> None:
    """A restate of a join or a derived table includes records that came late, as a replay does."""
    live = Live(tmp_path, spark)
    accounts, sales = live.table(), live.sales()
    kept = Materialized(history_retention=timedelta(hours=1))
    names = accounts.filter("tier <> 'q'", name="names", materialized=kept)
    select = ["left.*", "right.n", "right.valid_from as since", "right.valid_to as until"]
    joined = sales.left_join(accounts, name="joined", select=select)
    node, start = {"joined": (joined, at(8)), "names": (names, at(0))}[name]
    nodes: list[Any] = [accounts, sales, node]
    stores = stores_of(live.warehouse, spark)
    live.run(accounts, change("x", 0, 10), change("x", 1, 20), change("y", 2, 40))
    live.run(sales, *[{"timestamp": at(s)} for s in (5, 12, 18, 30, 45)])
    run_once(node, stores)
    live.run(accounts, change("z", 3, 15), change("x", 4, 8), change("q", 5, 50))
    live.run(sales, {"timestamp": at(55)})
    run_once(node, stores)

    def rows(store: AssetStore) -> list[str]:
        return sorted(map(repr, store.read("log").drop("recorded_at").toArrow().to_pylist()))

    before = rows(stores(node))
    versions = live.versions(names) if node is names else None
    assert restate(live.warehouse, node, start, spark, nodes) == [name]
    again = replay(live.warehouse, node, f"{name}_again", spark)
    assert rows(stores(node)) == rows(again)
    assert failed_checks(stores(node)) == []
    if node is names:
        assert live.versions(names) == versions
        return
    assert rows(stores(node)) != before
    told = {r["timestamp"]: r["n"] for r in stores(joined).read().toArrow().to_pylist()}
    assert [told[at(s)] for s in (5, 12, 18, 30, 45, 55)] == [None, 4, 3, 1, 2, 5]


@pytest.fixture(scope="module")
def accounts_template(tmp_path_factory: pytest.TempPathFactory, spark: SparkSession) -> Accounts:
    """``a`` and ``d`` are in the snapshot alone, ``b`` has changes after it, ``c`` before it."""
    accounts = Accounts(tmp_path_factory.mktemp("accounts"), spark)
    accounts.land("1", ("b", 12, "b12"), ("c", 4, "c4"), ("e", 3, "e3"), ("e", 7, None))
    accounts.snapshot(("a", "a0"), ("b", "b0"), ("c", "c4"), ("d", "d0"))
    accounts.take(recorded_at=HOUR)
    accounts.land("2", ("a", 20, "a20"), ("b", 8, "b8"), ("d", 22, None))
    accounts.take(recorded_at=2 * HOUR)
    return accounts


@pytest.fixture
def accounts(accounts_template: Accounts, tmp_path: Path, spark: SparkSession) -> Accounts:
    return Accounts(shutil.copytree(accounts_template.root, tmp_path / "copy"), spark)


def test_what_if_rereads_snapshot(accounts: Accounts) -> None:
    table, spark = accounts.table, accounts.spark
    warehouse = str(accounts.root / "warehouse")
    there = set(accounts.root.rglob("*"))
    # A replay takes the snapshot after all changes: b's change at 8 replaces b's row of the snapshot.
    same = what_if(warehouse, replace(table, history_retention=timedelta(days=2)), spark)
    assert (same.added, same.removed, same.changed, same.keys) == (0, 1, 1, 1)
    assert same.rows_before == len(accounts.versions()) == same.rows_after + 1
    assert set(accounts.root.rglob("*")) == there


@pytest.mark.endurance  # a replay of changes alone, as in test_what_if.py
def test_what_if_without_snapshot(accounts: Accounts) -> None:
    """Versions of ``a`` and ``d`` that come only from the snapshot count as removed too."""
    table, spark = accounts.table, accounts.spark
    warehouse = str(accounts.root / "warehouse")
    there = set(accounts.root.rglob("*"))
    alone = what_if(warehouse, replace(table, start=None), spark)
    assert (alone.added, alone.removed, alone.changed, alone.keys) == (0, 3, 1, 3)
    assert set(accounts.root.rglob("*")) == there


def test_erase_reports_key_in_initial_snapshot(accounts: Accounts) -> None:
    table, spark = accounts.table, accounts.spark
    warehouse = str(accounts.root / "warehouse")
    before = read_answers(warehouse, table, spark)
    done = erase(warehouse, table, spark, key=["a"], reason="asked to")
    assert done.searched["accounts/log"].erased == 2
    (dump,) = [line for line in done.unreachable if line.startswith("the snapshot that accounts")]
    assert "started with, 2024-01-01T000010Z.jsonl in " in dump
    assert "a replay would bring it back" in dump
    files = [line for line in done.unreachable if line.startswith("landing files: ")]
    assert [line.split(",")[0] for line in files] == [files[0].split(",")[0]]
    assert "1 of 2" in files[0]
    assert "2.jsonl (1 row)" in files[0]
    assert read_answers(warehouse, table, spark) == before
    assert failed_checks(accounts.store()) == []
    # The snapshot is not consumed again, and its keys take later changes.
    assert accounts.take() == {}
    accounts.land("3", ("d", 21, "d21"))
    assert accounts.take()["in"] == 1
    versions = [v for v in accounts.versions() if v[0] == "d"]
    assert versions == [("d", 10, 21, "d0"), ("d", 21, 22, "d21"), ("d", 22, float("inf"), None)]
    assert failed_checks(accounts.store()) == []


def stream_of(tmp_path: Path, spark: SparkSession, name: str, kind: DataType, *values: Any) -> Stream:
    """A stream with records of these keys, and one record that goes to quarantine."""
    (tmp_path / name).mkdir()
    lines = [json.dumps({"id": v, "at": "2024-01-01T00:00:00Z"}) for v in values]
    lines.append(json.dumps({"id": values[0], "at": "never"}))
    (tmp_path / name / "1.jsonl").write_text("\n".join(lines))
    schema = StructType([StructField("id", kind), StructField("at", TimestampType())])
    source = FilesSource(str(tmp_path / name), max_bad_share=1.0)
    node = Stream(name, key="id", schema=schema, timestamp="at", source=source)
    run_once(node, stores_of(str(tmp_path / "warehouse"), spark))
    return node


def test_key_search_compares_other_types_as_text(spark: SparkSession, tmp_path: Path) -> None:
    """The search for the key in other tables compares columns of another type as text."""
    numbers = stream_of(tmp_path, spark, "numbers", LongType(), 7, 8)
    stream_of(tmp_path, spark, "texts", StringType(), "A-7", "7", "7")
    stream_of(tmp_path, spark, "days", DateType(), "2024-01-07")
    for about in ({"key": [7]}, {"where": "id = 7"}):
        told = erase(str(tmp_path / "warehouse"), numbers, spark, reason="asked to", **about)
        assert told.finished is not None
        assert [at for at in told.elsewhere if at.startswith("texts: 2 rows have the key in id")]
        assert not [at for at in told.elsewhere if at.startswith("days")]


def test_keys_derived_from_erased_key(spark: SparkSession, tmp_path: Path) -> None:
    """A column with another value of the key's name does not have the key: its rows remain, and the
    certificate tells so."""
    warehouse = str(tmp_path / "warehouse")
    people = stream_of(tmp_path, spark, "people", StringType(), "Ann", "Bob")
    made = [
        people.select_key("upper(id) as id", name="upper"),
        people.group_by("upper(id) as id").count(name="counted"),
        people.select_key("id as who", name="renamed"),
        people.flat_map_values("array(id)", column="one", name="flat"),
    ]
    for node in made:
        run_once(node, stores_of(warehouse, spark))
    told = erase(warehouse, people, spark, among=made, key=["Ann"], reason="asked to")
    assert told.kept == dict.fromkeys(("upper", "counted"), KEPT)
    assert read("upper", warehouse=warehouse, what="log")["id"].to_pylist() == ["ANN", "BOB"]
    assert read("renamed", warehouse=warehouse, what="log")["who"].to_pylist() == ["Bob"]
    assert read("flat", warehouse=warehouse, what="log")["one"].to_pylist() == ["Bob"]


def test_keys_of_any_literal_type(spark: SparkSession, tmp_path: Path) -> None:
    """A record in quarantine has the key as its source wrote it. The erase finds it there too."""
    warehouse = str(tmp_path / "warehouse")

    def rejected(node: Stream) -> int:
        found = AssetStore(warehouse, node, spark).quarantine()
        return 0 if found is None else found.count()

    pair = StructType([StructField("a", LongType()), StructField("day", DateType())])
    first, half = date(1, 1, 1), datetime(2024, 1, 1, 5, 0, 0, 500_000, timezone.utc)
    for name, kind, given, gone, stays in (
        ("days", DateType(), first, "0001-01-01", "1024-01-01"),
        ("pairs", pair, {"a": 1, "day": first}, {"a": 1, "day": "0001-01-01"}, {"a": 1, "day": None}),
        ("lists", ArrayType(StringType()), ["x", None], ["x", None], ["x", "y"]),
        ("times", TimestampType(), half, "2024-01-01 05:00:00.5Z", "2024-01-01"),
        ("flags", BooleanType(), True, True, False),
        ("prices", DecimalType(9, 2), Decimal("1.10"), 1.1, 1.11),
        ("ratios", DoubleType(), 20.0, 20, 2.5),
        ("bytes", BinaryType(), b"ab?", "YWI/", "YWI="),
    ):
        node = stream_of(tmp_path, spark, name, kind, gone, stays)
        assert rejected(node) == 1
        told = erase(warehouse, node, spark, key=[given], reason="asked to")
        assert told.finished is not None
        (left,) = read(name, warehouse=warehouse, what="log")["id"].to_pylist()
        assert left != given
        assert rejected(node) == 0


@pytest.mark.parametrize(
    ("kind", "given", "written", "other"),
    [
        (
            TimestampType(),
            datetime(2024, 1, 1, tzinfo=timezone.utc),
            ["2024-01-01T01:00:00+01:00", "2023-12-31 19:00:00.000-05:00", "2024-01-01"],
            ["2024-01-01T01:00:00Z", "2024-01-01T00:00:00+01:00", "2024-01-01T00:00:00.000001Z"],
        ),
        (
            TimestampType(),
            datetime(2024, 1, 1, 0, 0, 0, 500_000, tzinfo=timezone.utc),
            [
                *(
                    "2024-01-01 01:00:00.5 Europe/Berlin",
                    "2024-01-01T01:00:00.500+01:00[Europe/Berlin]",
                ),
                *("2023-12-31T21:00:00.5 America/Argentina/Buenos_Aires", "2024-01-01 01:00:00.5 CET"),
                *("1704067200.5", "1704067200500", "1704067200500000", "1704067200500000000"),
                *("1.7040672005e9", "1704067200.500"),
            ],
            ["2024-01-01 02:00:00.5 Europe/Berlin", "1704067200", "1704067200501", "17040672005"],
        ),
        (
            DateType(),
            date(2024, 1, 5),
            ["2024-01-05", "20240105", "19727", "2024-01-05Z"],
            ["2024-01-06", "20240106", "19728", "1972", "119727"],
        ),
        (TimestampType(), datetime(1970, 1, 1, 0, 0, 7, tzinfo=timezone.utc), [], ["7", "7000"]),
        (LongType(), 1000, ["1E3", "1000.0", "+1000"], ["1E4", "10000", "-1000", "1000.5", "x1000"]),
        (
            LongType(),
            7,
            ["7", "7."],
            ["2024-01-07 07:07:07.7", "2024-07-07T07:07Z", "-7", "1.7", "7.1x"],
        ),
        (LongType(), 2**53 + 1, [f"{2**53 + 1}"], [f"{2**53}", f"{2**53 + 2}"]),
        (
            DecimalType(9, 2),
            Decimal("0.10"),
            ["0.1", ".1", "1e-1"],
            ["0.101", "0.10000000000000001", "1"],
        ),
        (DoubleType(), 2e-7, ["0.0000002", "2.0E-7", "2e-07"], ["2", "7", "2E-8"]),
        (FloatType(), 0.5, ["0.50", "5e-1"], ["5", "0.51"]),
    ],
)
def test_quarantined_keys_in_other_notation(
    spark: SparkSession, kind: DataType, given: Any, written: list[str], other: list[str]
) -> None:
    key = Key({"id": kind}, (given,))
    lines = [(text, json.dumps({"at": "never", "id": text})) for text in written + other]
    lines += [(text, f"a,{text},never") for text in written + other]
    lines += [(text, f'{{"id": {text}}}') for text in written + other]
    rows = key.in_text(spark.createDataFrame(lines, "text STRING, raw STRING"))
    found = [r["text"] for r in rows.where(HIT).collect()]
    assert sorted(found) == sorted(written * 3)
