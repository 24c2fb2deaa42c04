"""Columns of live tables are renamed while others change. The tables and their downstream assets, with
joins by key and foreign key, continue in place and equal tables that had the new names from the
start."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable
from pyspark.sql import SparkSession
from pyspark.sql.types import (
    DataType,
    DoubleType,
    FloatType,
    IntegerType,
    LongType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

import vt_dagster
from vt_dagster.errors import StorageError, TopologyError
from vt_dagster.runs.audit import audit
from vt_dagster.runs.export import ExportRun, export_of
from vt_dagster.runs.replay import compare, replay
from vt_dagster.runs.run import Run, run_once
from vt_dagster.sources.files_source import FilesSource
from vt_dagster.storage import view
from vt_dagster.storage.asset_store import AssetStore, stores_of
from vt_dagster.storage.commit_log import commits
from vt_dagster.storage.schema_evolution import evolve, kept_by_newest_names, require_declared_renames
from vt_dagster.topology.durations import in_utc
from vt_dagster.topology.model import Stream, Table, VersionedTable
from vt_dagster.topology.schema import named, noted

pytestmark = pytest.mark.usefixtures("few_rows")


EPOCH = datetime(2020, 1, 1, tzinfo=timezone.utc)
RENAMED = {"k": "product", "n": "amount", "cat": "category", "maker": "vendor"}
OF_SUPPLIERS = {"city": "town", "heads": "staff"}
BIG = 2**40


def schema(**kinds: DataType) -> StructType:
    return StructType([StructField(name, kind) for name, kind in kinds.items()])


class Live:
    """``prices``, ``orders``, ``suppliers`` and their downstream assets, before or after a change:
    columns of all three are renamed and get wider types, and a new column is added."""

    def __init__(self, root: Path, *, after: bool, warehouse: str = "warehouse") -> None:
        self.root, self.warehouse = root, str(root / warehouse)
        k, n, cat, maker = RENAMED.values() if after else RENAMED
        town, staff = OF_SUPPLIERS.values() if after else OF_SUPPLIERS
        more: dict[str, DataType] = {"note": StringType()} if after else {}
        whole, real = (LongType(), DoubleType()) if after else (IntegerType(), FloatType())
        columns = schema(
            **{k: StringType(), cat: StringType(), maker: StringType(), n: whole},
            **{"share": real, "at": TimestampType()},
            **more,
        )
        about: dict[str, Any] = {"key": k, "schema": columns, "timestamp": "at"}
        about["renamed"] = RENAMED if after else {}
        self.prices = VersionedTable(
            "prices",
            history_retention=timedelta(hours=1),
            tombstone=f"{cat} is null",
            source=self.source("prices"),
            **about,
        )
        self.orders = Stream("orders", source=self.source("orders"), **about)
        self.suppliers = Table(
            "suppliers",
            key="s",
            schema=schema(
                **{"s": StringType(), town: StringType(), staff: whole, "at": TimestampType()}, **more
            ),
            timestamp="at",
            source=self.source("suppliers"),
            renamed=OF_SUPPLIERS if after else {},
        )
        groups = self.prices.group_by(cat).aggregate(
            {"rows": "count(*)", "total": f"sum({n})", "share": "avg(share)"}, name="groups"
        )
        self.nodes: list[Stream] = [
            self.prices,
            self.orders,
            self.suppliers,
            self.orders.left_join(
                self.prices,
                name="priced",
                select=["left.*", f"right.{n} as table_n"],
                grace_period=timedelta(minutes=5),
            ),
            self.prices.left_join(
                self.suppliers,
                name="both",
                select=["left.*", f"right.{town}", f"right.{staff} as of_it"],
            ),
            # The column from the right side keeps its name in the result.
            self.prices.left_join(
                self.suppliers,
                foreign_key=maker,
                name="supplied",
                select=["left.*", "right.town as city" if after else "right.city", f"right.{staff}"],
            ),
            groups,
        ]

    def source(self, name: str) -> FilesSource:
        return FilesSource(str(self.root / name))

    def land(self, name: str, file: str, *records: Mapping[str, Any]) -> None:
        (self.root / name).mkdir(parents=True, exist_ok=True)
        lines = [
            json.dumps({**r, "at": (EPOCH + timedelta(minutes=r["at"])).isoformat()}) for r in records
        ]
        (self.root / name / file).write_text("\n".join(lines) + "\n")

    def run(self, spark: SparkSession, told: list[str] | None = None) -> None:
        for node in self.nodes:
            run_once(node, stores_of(self.warehouse, spark, None if told is None else told.append))

    def store(self, spark: SparkSession, name: str) -> AssetStore:
        return AssetStore(self.warehouse, next(n for n in self.nodes if n.name == name), spark)


def land_first(live: Live) -> None:
    for name in ("prices", "orders"):
        live.land(
            name,
            "1.jsonl",
            *(
                {"k": k, "cat": cat, "maker": maker, "n": n, "share": 0.5, "at": at}
                for k, cat, maker, n, at in [
                    *(("a", "x", "m", 1, 0), ("b", "y", "m", 2, 1), ("c", "x", "l", -3, 2)),
                    ("a", "y", "l", 4, 4),
                ]
            ),
        )
    made = [{"s": s, "city": "Rome", "heads": n, "at": n} for n, s in enumerate("mab")]
    live.land("suppliers", "1.jsonl", *made)


def land_second(live: Live) -> None:
    """Records with the new names: of known keys, out of order, of a new key, and a deletion. Another
    file still has the old names."""
    for name in ("prices", "orders"):
        live.land(
            name,
            "2.jsonl",
            *(
                {"product": k, "category": cat, "vendor": v, "amount": n, "share": 0.1, "at": at}
                | {"note": "new"}
                for k, cat, v, n, at in [
                    *(("a", "x", "m", BIG, 30), ("a", "x", "m", 7, 3), ("d", "y", "l", BIG + 1, 31)),
                    ("b", None if name == "prices" else "y", "m", 8, 40),
                ]
            ),
        )
        live.land(
            name, "3.jsonl", {"k": "c", "cat": "y", "maker": "m", "n": 5, "share": 0.25, "at": 41}
        )
    live.land(
        "suppliers",
        "2.jsonl",
        {"s": "m", "town": "Bonn", "staff": BIG, "note": "moved", "at": 50},
        {"s": "l", "town": "Oslo", "staff": 1, "at": 51},
        {"s": "a", "town": "Riga", "staff": 2, "at": 52},
    )


@dataclass(frozen=True)
class Changed:
    live: Live
    anew: Live
    told: list[str]


@pytest.fixture(scope="module")
def changed(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Changed]:
    """``live``: tables after a run with the old names and one with the new names, with views still
    from the first run. ``anew``: tables with the same records that had the new names from the
    start."""
    root = tmp_path_factory.mktemp("renamed")
    patch = pytest.MonkeyPatch()
    patch.setattr(view, "EACH_RUN", 0)
    patch.setattr(view, "SHARE", 100)
    first = Live(root, after=False)
    land_first(first)
    first.run(spark)
    exported(first, spark)
    live, anew = Live(root, after=True), Live(root, after=True, warehouse="anew")
    land_second(live)
    told: list[str] = []
    live.run(spark, told)
    anew.run(spark)
    yield Changed(live, anew, told)
    patch.undo()


def exported(live: Live, spark: SparkSession) -> None:
    export = export_of(live.prices, "versions", str(live.root / "export"))
    ExportRun(export, live.warehouse, spark).run()


NAMES = ["prices", "orders", "suppliers", "priced", "both", "supplied", "groups"]
HELD_BACK = ("priced",)


def rows(table: pa.Table, *but: str) -> list[str]:
    """Rows in a form that ignores the order of rows and of columns, also of the columns in ``old``."""
    flat = table.flatten() if "old" in table.column_names else table
    left_out = {"recorded_at", *but}
    names = sorted(n for n in flat.column_names if n.removeprefix("old.") not in left_out)
    return [str(names), *sorted(map(repr, flat.select(names).to_pylist()))]


@pytest.mark.parametrize("name", NAMES)
def test_renamed_tables_equal_rebuilt_tables(changed: Changed, spark: SparkSession, name: str) -> None:
    """Log, current rows and versions: read by Spark, without Spark, and without the definition."""
    live = changed.live.store(spark, name)
    but = ("offset",) if name in HELD_BACK else ()
    kinds = [*(["current"] if live.node.is_table else []), *(["versions"] * live.node.versioned), "log"]
    for what in kinds:
        found, expected = (
            rows(vt_dagster.read(name, warehouse=t.warehouse, what=what), *but)
            for t in (changed.live, changed.anew)
        )
        assert found == expected
        assert rows(live.read(what).toArrow(), *but) == expected
    opened = AssetStore.open(changed.live.warehouse, name, spark)
    assert rows(opened.read("log").toArrow(), *but) == expected
    if live.node.is_table:
        base = live.snapshot().base
        assert base is not None
        assert base.checkpoint.batch == 1


@pytest.mark.parametrize("key", ["a", "b", "c", "d"])
def test_lookup_by_new_key_name(changed: Changed, key: str) -> None:
    """A look-up without Spark finds the key by its new name. This holds as of a time, and as known
    before the rename too."""
    first = next(commits(str(Path(changed.live.warehouse, "prices"))))
    known = in_utc(first.recorded_at)
    asked: list[dict[str, Any]] = [
        {},
        {"as_of": EPOCH + timedelta(minutes=3, seconds=30)},
        {"what": "log"},
        {"what": "versions"},
    ]
    for one in asked:
        found, expected = (
            vt_dagster.read("prices", warehouse=t.warehouse, key=key, partial=True, **one)
            for t in (changed.live, changed.anew)
        )
        assert rows(found) == rows(expected)
    then = vt_dagster.read(
        "prices", warehouse=changed.live.warehouse, key=key, as_known_at=known, what="versions"
    )
    assert "amount" in then.column_names
    amounts = {"a": [1, 4], "b": [2], "c": [-3], "d": []}
    assert sorted(then.column("amount").to_pylist()) == amounts[key]


def test_spark_read_as_known_at(changed: Changed, spark: SparkSession) -> None:
    prices = changed.live.store(spark, "prices")
    first = next(prices.commits())
    moment = in_utc(first.recorded_at)
    found = prices.read("versions", as_known_at=moment).toArrow()
    without = vt_dagster.read(
        "prices", warehouse=changed.live.warehouse, what="versions", as_known_at=moment
    )
    assert rows(found, "note") == rows(without)
    assert sorted(found.column("amount").to_pylist()) == [-3, 1, 2, 4]


def test_commit_records_rename(changed: Changed) -> None:
    """The commit that first uses the new names records the rename. It rewrites no file."""
    (said,) = [line for line in changed.told if line.startswith("prices: ! columns change: ")]
    assert "n: int -> bigint" in said or "amount: int -> bigint" in said
    assert "renamed: k -> product, cat -> category, maker -> vendor, n -> amount" in said
    log = Path(changed.live.warehouse, "prices", "log")
    text = (log / "_delta_log" / f"{1:020}.json").read_text()
    assert "remove" not in [next(iter(json.loads(line))) for line in text.splitlines()]
    notes = {f.name: f.metadata for f in DeltaTable(str(log)).schema().fields}
    assert notes["amount"] == {"vt_dagster.was": ["n"]}


def test_rewritten_view_mixes_old_and_new_names(changed: Changed, spark: SparkSession) -> None:
    """A view is rewritten in part, and keeps files with the old names. The checks of the view pass."""
    live, anew = (t.store(spark, "prices") for t in (changed.live, changed.anew))
    for store in (live, anew):
        store.catch_up(now=True)
    expected = rows(anew.read("versions").toArrow())
    assert rows(live.read("versions").toArrow()) == expected
    found = vt_dagster.read("prices", warehouse=changed.live.warehouse, what="versions")
    assert rows(found) == expected
    assert [one for one in audit(live) if not one.passed] == []
    spark.sql(f"OPTIMIZE delta.`{changed.live.warehouse}/prices/log`")
    log = changed.live.store(spark, "prices").read("log").toArrow()
    assert rows(log) == rows(changed.anew.store(spark, "prices").read("log").toArrow())


def test_export_has_only_new_names(changed: Changed, spark: SparkSession) -> None:
    exported(changed.live, spark)
    found = DeltaTable(str(changed.live.root / "export")).to_pyarrow_dataset().to_table()
    assert {*RENAMED.values()} < {*found.column_names}
    assert not {*RENAMED} & {*found.column_names}
    versions = changed.anew.store(spark, "prices").read("versions").where("not is_tombstone")
    assert rows(found) == rows(versions.select(*found.column_names).toArrow())


@pytest.mark.endurance  # ``anew`` is compared by the same names above; test_schema_changes.py replays
def test_replay_equals_live_table(changed: Changed, spark: SparkSession) -> None:
    live = changed.live.store(spark, "prices")
    copy = replay(changed.live.warehouse, live.node, "prices_anew", spark)
    found = compare(live, copy)
    assert (found.missing, found.extra) == (0, 0)


def test_explain_uses_new_names(changed: Changed) -> None:
    told = vt_dagster.explain("priced", key="a", warehouse=changed.live.warehouse)
    assert "table_n" in str(told)


def renamed_again(live: Live, before: str, now: str) -> Stream:
    kinds = {now if f.name == before else f.name: f.dataType for f in live.orders.schema.fields}
    key = now if before == "product" else "product"
    return replace(live.orders, key=key, schema=schema(**kinds), renamed={before: now}, tombstone=None)


@pytest.mark.parametrize("now", ["value", "n"])
def test_column_renamed_again_and_back(changed: Changed, spark: SparkSession, now: str) -> None:
    """A read uses the newly declared name before a run has written it."""
    node = renamed_again(changed.live, "amount", now)
    found = AssetStore(changed.live.warehouse, node, spark).read("log").toArrow()
    expected = vt_dagster.read("orders", warehouse=changed.anew.warehouse, what="log")
    names = [now if n == "amount" else n for n in expected.column_names]
    assert rows(found) == rows(expected.rename_columns(names))


def test_column_renamed_back_and_to_third_name(tmp_path: Path, spark: SparkSession) -> None:
    """A column is renamed from a to b, to a again, and to c, with a run after each. The log's schema
    notes the earlier names each time."""
    warehouse, landing = str(tmp_path / "warehouse"), tmp_path / "landing"
    landing.mkdir()
    renamed: list[dict[str, str]] = [{}, {"a": "b"}, {"b": "a"}, {"b": "a", "a": "c"}]
    for i, said in enumerate(renamed):
        name = ["a", "b", "a", "c"][i]
        (landing / f"{i}.jsonl").write_text(
            json.dumps({"k": "x", name: i, "at": "2020-01-01T00:00:00Z"}) + "\n"
        )
        node = Table(
            "t",
            key="k",
            schema=schema(k=StringType(), **{name: LongType()}, at=TimestampType()),
            timestamp="at",
            source=FilesSource(str(landing)),
            renamed=said,
        )
        run_once(node, stores_of(warehouse, spark))
        log = vt_dagster.read("t", warehouse=warehouse, what="log")
        assert sorted(log.column(name).to_pylist()) == list(range(i + 1))
        by_spark = AssetStore(warehouse, node, spark).read("log").toArrow()
        assert rows(log) == rows(by_spark)
        assert vt_dagster.read("t", warehouse=warehouse).column(name).to_pylist() == [i]
    columns = {f.name: f.metadata for f in DeltaTable(f"{warehouse}/t/log").schema().fields}
    assert columns["c"] == {"vt_dagster.was": ["a", "b"]}
    assert not columns["a"]
    assert not columns["b"]
    left_out = replace(node, renamed={})
    assert rows(AssetStore(warehouse, left_out, spark).read("log").toArrow()) == rows(log)


@pytest.mark.parametrize(
    ("kinds", "renamed", "said"),
    [
        (
            {"amount": None, "n": LongType()},
            {},
            "amount is missing and its earlier name n is declared again",
        ),
        ({"n": LongType()}, {}, "n is the name of amount in old rows"),
        ({"amount": None, "cost": LongType()}, {}, "declare renamed={'amount': 'cost'}"),
        ({"amount": None, "cost": IntegerType()}, {"amount": "cost"}, "cost: bigint -> int"),
        ({"amount": None, "cost": StringType()}, {"amount": "cost"}, "cost: bigint -> string"),
        (
            {"amount": None, "share": None, "cost": DoubleType()},
            {"amount": "cost", "share": "cost"},
            "share and amount are declared as one column, cost, but are two",
        ),
        ({"amount": None, "share": LongType()}, {"amount": "share"}, "are two"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_refused_when_run_starts(
    changed: Changed, kinds: Mapping[str, DataType | None], renamed: Mapping[str, str], said: str
) -> None:
    """The refusal needs no Spark. It names the column, both types, and what to do."""
    there: dict[str, DataType | None] = {f.name: f.dataType for f in changed.live.prices.schema.fields}
    found = {name: kind for name, kind in {**there, **kinds}.items() if kind is not None}
    refused(changed, replace(changed.live.prices, schema=schema(**found), renamed=renamed), said)


def refused(changed: Changed, node: Stream, said: str) -> None:
    def no_spark() -> SparkSession:
        raise AssertionError("Spark is asked for")

    with pytest.raises(StorageError) as raised:
        Run.pin(node, stores_of(changed.live.warehouse, no_spark))
    assert said in str(raised.value)
    assert "vt-dagster replay" in str(raised.value)


def test_rename_removed_before_all_consumers_ran() -> None:
    """A rename may be left out only after all downstream assets have run: an asset that has not run
    would have null in its old rows. So it is refused."""
    upstream = noted(schema(amount=LongType()), StructType([named("amount", LongType(), ["n"])]))
    found = evolve(schema(n=LongType()), schema(amount=LongType()), derived=True)
    with pytest.raises(StorageError, match=r"priced: .* declare renamed={'n': 'amount'} there again"):
        require_declared_renames("priced", found, [upstream])
    require_declared_renames("priced", found, [schema(n=LongType(), amount=LongType())])


@pytest.mark.parametrize(
    ("renamed", "names"),
    [
        ({"a": "b"}, ["a", "b"]),
        ({"a": "z"}, ["b"]),
        ({"a": "b", "b": "a"}, ["b"]),
        ({"a": "timestamp"}, ["b"]),
    ],
)
def test_invalid_rename_is_refused(renamed: dict[str, str], names: list[str]) -> None:
    kinds: dict[str, DataType] = {name: StringType() for name in names}
    about = schema(k=StringType(), timestamp=TimestampType(), **kinds)
    with pytest.raises(
        TopologyError, match="expected renamed to map earlier column names to current ones"
    ):
        Stream("s", key="k", schema=about, renamed=renamed)


def test_source_files_with_old_names(tmp_path: Path, spark: SparkSession) -> None:
    """CSV and Parquet files may have a column's earlier name. It does not count as an extra column."""
    at = pa.array([datetime(2020, 1, 1)], pa.timestamp("us", "UTC"))
    for format_ in ("csv", "parquet"):
        folder = tmp_path / format_
        folder.mkdir()
        if format_ == "csv":
            (folder / "1.csv").write_text("k,price,at\na,1,2020-01-01T00:00:00Z\n")
            (folder / "2.csv").write_text("at,cost,k\n2020-01-01T00:00:00Z,2,b\n")
        else:
            for file, column, key, n in (("1", "price", "a", 1), ("2", "cost", "b", 2)):
                values = {"k": [key], column: pa.array([n], pa.int64()), "at": at}
                pq.write_table(pa.table(values), folder / f"{file}.parquet")
        node = Stream(
            format_,
            key="k",
            schema=schema(k=StringType(), cost=LongType(), at=TimestampType()),
            timestamp="at",
            source=FilesSource(str(folder), format=format_),
            renamed={"price": "cost"},
        )
        assert node.source is not None
        found = node.source.pin(None).read(spark, node)
        assert sorted(map(tuple, found.select("k", "cost").collect())) == [("a", 1), ("b", 2)]
        assert "price" not in found.columns


def test_operator_state_is_renamed(spark: SparkSession) -> None:
    """An operator's state gets the new names: its columns, and the fields of an aggregated row."""
    kept = spark.sql("select 'a' as k, named_struct('price', 1, 'x', 2) as _acc, 3 as price")
    found = kept_by_newest_names(kept, {"product": ("k",), "cost": ("price",)})
    assert found.first() == (("a", (1, 2), 3))
    assert found.schema.simpleString() == "struct<product:string,_acc:struct<cost:int,x:int>,cost:int>"
