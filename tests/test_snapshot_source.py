"""Full dumps: a run takes the difference to the table's rows, and refuses implausible dumps."""

from __future__ import annotations

import json
from datetime import timedelta
from pathlib import Path
from typing import Any

import dagster as dg
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import DoubleType, StringType, StructField, StructType

from tests.market import materialized, run
from vt_dagster import (
    FilesSource,
    SnapshotSource,
    Stream,
    Table,
    TopologyError,
    VersionedTable,
    WarehouseResource,
    build_asset,
    build_sensor,
)
from vt_dagster.core.source_records import difference
from vt_dagster.errors import ContractError, SourceError
from vt_dagster.runs.audit import audit
from vt_dagster.runs.replay import compare, replay
from vt_dagster.runs.restate import restate
from vt_dagster.runs.run import Run, run_once
from vt_dagster.storage.asset_store import AssetStore, stores_of

pytestmark = pytest.mark.usefixtures("few_rows")

ROW = StructType(
    [
        StructField("id", StringType()),
        StructField("name", StringType()),
        StructField("spent", DoubleType()),
    ]
)
Row = tuple[Any, Any, Any]


class Shop:
    """A directory of dumps, and the table that reads them."""

    def __init__(self, root: Path, spark: SparkSession, **about: Any) -> None:
        self.root, self.spark, self.path = root, spark, root / "dumps"
        self.path.mkdir()
        about = {"dump_time": "%Y-%m-%d", **about}
        self.node = VersionedTable(
            "customers",
            key="id",
            schema=ROW,
            history_retention=timedelta(days=30),
            source=SnapshotSource(str(self.path), **about),
        )
        self.stores = stores_of(str(root / "warehouse"), spark)

    def deliver(self, name: str, *rows: Row) -> None:
        columns = list(zip(*rows, strict=True)) or [(), (), ()]
        kinds = (pa.string(), pa.string(), pa.float64())
        arrays = [pa.array(c, k) for c, k in zip(columns, kinds, strict=True)]
        (self.path / name).parent.mkdir(exist_ok=True)
        pq.write_table(pa.table(arrays, ["id", "name", "spent"]), self.path / name)

    def take(self, **asked: Any) -> dict[str, int]:
        """Runs the table once. Returns the counts of the commit, empty if nothing is new."""
        commit = run_once(self.node, self.stores, **asked).commit
        return {} if commit is None else commit.counts

    @property
    def store(self) -> AssetStore:
        store = self.stores(self.node)
        assert isinstance(store, AssetStore)
        return store

    def current(self) -> dict[str, Row]:
        return {r["id"]: (r["name"], r["spent"]) for r in self.store.read("current").collect()}  # type: ignore[misc]

    def log(self) -> list[tuple[Any, ...]]:
        columns = ["id", "name", "spent", "is_tombstone"]
        rows = self.store.read("log").orderBy("offset").collect()
        return [(*(r[c] for c in columns), f"{r['timestamp']:%m-%d}") for r in rows]


@pytest.fixture
def shop(spark: SparkSession, tmp_path: Path) -> Shop:
    return Shop(tmp_path, spark)


def test_dump_is_diffed_against_table(shop: Shop) -> None:
    shop.deliver("2024-01-01.parquet", ("a", "Ann", 1.0), ("b", None, None), ("c", "Cy", 3.0))
    assert shop.take()["applied"] == 3
    assert shop.take() == {}
    # an equal dump, also in its nulls: a batch without records
    shop.deliver("2024-01-02.parquet", ("c", "Cy", 3.0), ("a", "Ann", 1.0), ("b", None, None))
    assert shop.take() == {"in": 0, "applied": 0, "late": 0, "quarantined": 0}
    # two dumps wait: a run takes one; a null becomes a value, a value null, a row goes, a row comes
    shop.deliver("2024-01-03.parquet", ("a", None, 1.0), ("b", None, 0.0), ("d", "Di", float("nan")))
    shop.deliver("2024-01-04.parquet", ("a", None, 1.0), ("c", "Cy", 4.0), ("d", "Di", float("nan")))

    def described() -> str:
        pinned: Any = Run.pin(shop.node, shop.stores).arrival.source
        return pinned.describe(shop.node.schema)[0]

    assert "1 more" in described()
    assert shop.take()["applied"] == 4
    assert "1 more" not in described()
    assert sorted(shop.log()[3:], key=str) == [
        ("a", None, 1.0, False, "01-03"),
        ("b", None, 0.0, False, "01-03"),
        ("c", None, None, True, "01-03"),
        pytest.approx(("d", "Di", float("nan"), False, "01-03"), nan_ok=True),
    ]
    # a run that was killed before its commit has changed nothing
    killed = Run.pin(shop.node, shop.stores)
    killed.operate(killed.read())
    assert shop.take()["applied"] == 2
    assert {k: v[0] for k, v in shop.current().items()} == {"a": None, "c": "Cy", "d": "Di"}
    history = shop.store.read("versions").where("id = 'c'").orderBy("valid_from").collect()
    assert [(r["spent"], r["is_tombstone"]) for r in history] == [
        (3.0, False),
        (None, True),
        (4.0, False),
    ]
    assert all(f.offending == 0 for f in audit(shop.store))
    head = shop.store.head()
    assert head is not None
    assert head.commit.taken == {"dumps": {0: (3, 4)}}


def test_implausible_dumps_are_refused(shop: Shop) -> None:
    whole = [(k, k, 1.0) for k in "abcd"]
    shop.deliver("2024-01-05.parquet", *whole)
    shop.take()

    def refused(name: str, *rows: Row) -> str:
        shop.deliver(name, *rows)
        with pytest.raises(SourceError) as error:
            shop.take()
        (shop.path / name).unlink()
        return str(error.value)

    assert "older than the last one that was consumed, 2024-01-05" in refused("2024-01-04.parquet")
    assert "2024-01-06.parquet in" in refused("2024-01-06.parquet")
    assert "is empty" in refused("2024-01-06.parquet")
    said = refused("2024-01-06.parquet", ("a", "a", 1.0))
    assert "lacks 3 of the 4 rows that the table holds (75%), expected at most 50%" in said
    # the same number of rows, but with other keys
    assert "lacks 4 of the 4" in refused("2024-01-06.parquet", *[(f"0{k}", n, s) for k, n, s in whole])
    assert "expected a name like '%Y-%m-%d'" in refused("customers.parquet", *whole)
    assert "ahead of this machine's clock" in refused("9024-01-01.parquet", *whole)
    assert "for example 'a'" in refused("2024-01-06.parquet", *whole, whole[0])
    shop.deliver("2024-01-05.parquet", *whole, ("e", "e", 1.0))
    with pytest.raises(SourceError, match="changed after it was consumed"):
        shop.take()
    # the same number of bytes, but other rows; then the same rows, rewritten
    shop.deliver("2024-01-05.parquet", *whole[:3], ("d", "D", 1.0))
    with pytest.raises(SourceError, match="bytes then and now, but rewritten since"):
        shop.take()
    shop.deliver("2024-01-05.parquet", *whole)
    head = shop.store.head()
    assert head is not None
    assert head.commit.batch == 1
    # the user accepts the smaller dump
    shop.deliver("2024-01-06.parquet", ("a", "a", 1.0))
    assert shop.take(accept_shrink=True)["applied"] == 3
    shop.deliver("2024-01-07.parquet")
    assert shop.take(accept_shrink=True)["applied"] == 1
    assert shop.current() == {}


def test_maps_are_compared_by_entries(spark: SparkSession) -> None:
    """Maps with equal entries are equal, in any order. Times in maps count to the microsecond."""

    def rows(**maps: str) -> DataFrame:
        each = [
            f"select '{key}' id, map({m}) m, named_struct('in', array(map({m}))) s, 's' _source, "
            "1L _position, cast(null as string) _reason"
            for key, m in maps.items()
        ]
        return spark.sql(" union all ".join(each))

    one, two = "'x', timestamp'2024-01-01 00:00:00'", "'y', timestamp'2024-01-01 00:00:00.000001'"
    held = rows(a=f"{one}, {two}", b=one, c=f"{one}, 'y', null", d=one)
    moved = one.replace("00'", "00.000001'")
    dump = rows(a=f"{two}, {one}", b=moved, c=f"'y', null, {one}", d=f"{one}, 'y', null")
    for compared in (["m", "s"], ["s"]):
        news = difference(dump, held, key=["id"], compared=compared, buckets=1)
        assert sorted(r["id"] for r in news.collect()) == ["b", "d"]


def test_bad_dump_rows_are_quarantined(spark: SparkSession, tmp_path: Path) -> None:
    about = {"format": "jsonl", "max_bad_share": 0.5, "on_duplicate": "quarantine"}
    shop = Shop(tmp_path, spark, dump_time="modified", ignore=["spent"], **about)

    def deliver(name: str, *lines: Any) -> None:
        folder = shop.path / name
        folder.mkdir()
        texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
        (folder / "part.jsonl").write_text("\n".join(texts) + "\n")

    deliver("1", *[{"id": k, "name": k, "spent": 1} for k in "abcd"])
    shop.take()
    # a key that is in the dump twice keeps its row; spent is ignored, so its change alone is none
    twice = [{"id": "a", "name": n} for n in "xy"]
    deliver("2", *twice, *[{"id": k, "name": k, "spent": 2} for k in "bc"])
    assert shop.take() == {"in": 3, "applied": 1, "late": 0, "quarantined": 2}
    assert shop.current() == {k: (k, 1.0) for k in "abc"}
    # a row has lost its key, so it is unknown which key is missing: the run deletes nothing
    deliver("3", '{"id": "a", "na', {"name": "?"}, {"id": "b", "name": "B"}, {"id": "e", "name": "e"})
    assert shop.take()["quarantined"] == 2
    assert shop.current() == {"a": ("a", 1.0), "b": ("B", None), "c": ("c", 1.0), "e": ("e", None)}
    rejected = shop.store.quarantine()
    assert rejected is not None
    found = rejected.orderBy("source", "position").select("source", "position", "reason", "raw")
    assert [tuple(r) for r in found.collect()] == [
        ("2/part.jsonl", 1, "duplicate_key", '{"id":"a","name":"x"}'),
        ("2/part.jsonl", 2, "duplicate_key", '{"id":"a","name":"y"}'),
        ("3/part.jsonl", 1, "unreadable", '{"id": "a", "na'),
        ("3/part.jsonl", 2, "null_key", '{"name":"?"}'),
    ]
    deliver("4", '[{"id": "c"},', '{"id": "b"}]', "?", {"id": "a"})
    with pytest.raises(ContractError, match=r"3 of 4 rows .* 4/part.jsonl row 1: .* one object a line"):
        shop.take()
    assert all(f.offending == 0 for f in audit(shop.store))


def test_dump_time_by_expression(spark: SparkSession, tmp_path: Path) -> None:
    shop = Shop(
        tmp_path, spark, dump_time="timestamp_seconds(spent)", marker="_SUCCESS", ignore=["spent"]
    )
    shop.deliver("1/p.parquet", ("a", "a", 10.0), ("b", "b", 20.0))
    assert shop.take() == {}  # without the marker the dump is not complete
    (shop.path / "1" / "_SUCCESS").touch()
    shop.take()
    shop.deliver("2.parquet", ("a", "A", 30.0), ("b", "b", 30.0))
    shop.take()
    rows = shop.store.read("log").orderBy("offset").collect()
    assert sorted((r["id"], r["timestamp"].timestamp()) for r in rows) == [
        *(("a", 20), ("a", 30), ("b", 20)),
    ]
    shop.deliver("3.parquet", ("a", "A", 29.0), ("b", "b", 29.0))
    with pytest.raises(SourceError, match="is older than the last one"):
        shop.take()


@pytest.mark.parametrize(
    ("dump_time", "wrong"),
    [
        (
            "paid_at",
            "expected dump_time to be SQL over the columns .*'spent'\\], got 'paid_at', which Spark",
        ),
        ("timestamp", "got 'timestamp', which Spark refuses"),
        ("spent > 1", "got 'spent > 1', which Spark refuses: .* cannot cast \"BOOLEAN\" to"),
        ("spent +", "which Spark refuses: Syntax error"),
        ("name", "expected dump_time 'name' to give a time, got null in every row"),
    ],
)
def test_dump_time_that_gives_no_time_is_refused(
    spark: SparkSession, tmp_path: Path, dump_time: str, wrong: str
) -> None:
    shop = Shop(tmp_path, spark, dump_time=dump_time)
    shop.deliver("1.parquet", ("a", "Ann", 1.0))
    with pytest.raises((SourceError, TopologyError), match=wrong):
        shop.take()
    assert shop.store.head() is None


def test_refused_when_declared() -> None:
    source = SnapshotSource("dumps", dump_time="modified")
    with pytest.raises(TopologyError, match="expected a Table or VersionedTable, got a Stream"):
        Stream("s", key="id", schema=ROW, source=source)
    with pytest.raises(TopologyError, match="ignore must name value columns"):
        Table("t", key="id", schema=ROW, source=SnapshotSource("d", dump_time="%Y", ignore=["id"]))
    for pattern in ("d_%Q", "d_%"):
        with pytest.raises(
            TopologyError, match="expected dump_time to be a pattern of Python's strptime"
        ):
            Table("t", key="id", schema=ROW, source=SnapshotSource("d", dump_time=pattern))
    about: dict[str, Any] = {"key": "id", "schema": ROW, "timestamp": "timestamp_seconds(spent)"}
    about["history_retention"] = timedelta(days=1)
    for option in ("source", "start"):
        dumps = {"source": FilesSource("f"), option: SnapshotSource("d", dump_time="now()")}
        with pytest.raises(
            TopologyError, match="expected dump_time to be deterministic, got 'now\\(\\)'"
        ):
            VersionedTable("t", **about, **dumps)
    with pytest.raises(SourceError, match="max_shrink"):
        SnapshotSource("d", dump_time="%Y", max_shrink=2)


@pytest.mark.parametrize("format_", ["jsonl", "csv"])
def test_dumps_may_have_earlier_column_names(spark: SparkSession, tmp_path: Path, format_: str) -> None:
    """As other files: a dump with the old name of a renamed column changes no row."""
    path = tmp_path / "dumps"
    path.mkdir()

    def deliver(day: int, column: str, spent: int) -> None:
        texts = {"jsonl": f'{{"id":"a","{column}":{spent}}}\n', "csv": f"id,{column}\na,{spent}\n"}
        (path / f"2024-01-0{day}.{format_}").write_text(texts[format_])

    def table(column: str, **renamed: Any) -> VersionedTable:
        schema = StructType.fromDDL(f"id string, {column} int")
        source = SnapshotSource(str(path), format_, dump_time="%Y-%m-%d")  # type: ignore[arg-type]
        about: dict[str, Any] = {"key": "id", "schema": schema, "source": source, **renamed}
        return VersionedTable("t", history_retention=timedelta(days=30), **about)

    stores = stores_of(str(tmp_path / "warehouse"), spark)
    deliver(1, "spent", 1)
    run_once(table("spent"), stores)
    node = table("paid", renamed={"spent": "paid"})
    for day, column, paid in ((2, "spent", 1), (3, "spent", 2), (4, "paid", 2), (5, "paid", 3)):
        deliver(day, column, paid)
        run_once(node, stores)
    rows = stores(node).read("versions").orderBy("valid_from").collect()  # type: ignore[attr-defined]
    assert [(r["paid"], r["valid_from"].day) for r in rows] == [(1, 1), (2, 3), (3, 5)]


def test_replay_and_restate_take_dumps_of_live_table(shop: Shop, tmp_path: Path) -> None:
    """They end with the last dump that the live table consumed, and accept what it accepted."""
    warehouse = str(tmp_path / "warehouse")
    shop.deliver("2024-01-01.parquet", *((k, "x", 1.0) for k in "abcd"))
    shop.deliver("2024-01-02.parquet", ("a", "x", 1.0))
    shop.take()
    shop.take(accept_shrink=True)
    shop.deliver("2024-01-03.parquet", *((k, "y", 1.0) for k in "abcdefghi"))
    log = shop.log()
    new = replay(warehouse, shop.node, "new", shop.spark)
    assert compare(shop.store, new).rows.count() == 0
    assert restate(warehouse, shop.node, "2020-01-01", shop.spark) == ["customers"]
    assert shop.log() == log


def test_restate_after_dump_was_corrected(shop: Shop, tmp_path: Path) -> None:
    """A wrong dump gave more records than the right one in its place: fewer records are no loss."""
    for day, name in ((1, "x"), (2, "wrong"), (3, "x")):
        shop.deliver(f"2024-01-0{day}.parquet", *((k, name, 1.0) for k in "abc"))
        shop.take()
    shop.deliver("2024-01-02.parquet", ("a", "x", 1.0), ("b", "y", 1.0), ("c", "x", 1.0))
    with pytest.raises(SourceError, match="changed after it was consumed"):
        shop.take()
    assert restate(str(tmp_path / "warehouse"), shop.node, "2020-01-01", shop.spark) == ["customers"]
    assert sorted(shop.log()) == [
        ("a", "x", 1.0, False, "01-01"),
        ("b", "x", 1.0, False, "01-01"),
        ("b", "x", 1.0, False, "01-03"),
        ("b", "y", 1.0, False, "01-02"),
        ("c", "x", 1.0, False, "01-01"),
    ]
    assert shop.take() == {}


def test_restate_requires_all_dumps(shop: Shop, tmp_path: Path) -> None:
    """The number of records does not show that a dump is gone whose rows the next one has too. Dumps
    that are put back are found, also by a table that has forgotten them."""
    warehouse, first = str(tmp_path / "warehouse"), shop.path / "2024-01-01.parquet"
    for day in (1, 2):
        shop.deliver(f"2024-01-0{day}.parquet", ("a", "Ann", 1.0))
        shop.take()
    aside = first.rename(tmp_path / "aside.parquet")
    shop.deliver("2024-01-03.parquet", ("a", "Bob", 1.0))
    shop.take()
    log = shop.log()
    with pytest.raises(SourceError, match="expected the 3 dumps that its log was made of, got 2"):
        restate(warehouse, shop.node, "2020-01-01", shop.spark)
    assert shop.log() == log
    aside.rename(first)
    assert restate(warehouse, shop.node, "2020-01-01", shop.spark) == ["customers"]
    assert shop.log() == log
    for dump in shop.path.iterdir():
        dump.unlink()
    shop.deliver("2024-01-04.parquet", ("a", "Cid", 1.0))
    with pytest.raises(SourceError, match="expected the 3 dumps that its log was made of, got 0"):
        replay(warehouse, shop.node, "new", shop.spark)


def test_bad_file_of_dump(shop: Shop) -> None:
    """The message does not advise a setting that only a FilesSource has."""
    (shop.path / "2024-01-01.parquet").write_bytes(b"cut off")
    with pytest.raises(SourceError, match=r"a whole Parquet file.*\. Repair or move the dump$"):
        shop.take()


def test_snapshot_source_in_dagster(spark: SparkSession, tmp_path: Path) -> None:
    """The sensor requests one dump after another. The asset that delivers the dumps is upstream."""
    shop = Shop(tmp_path, spark, upstream="crm/export")
    sensor = build_sensor(shop.node)
    asset = build_asset(shop.node)
    where = WarehouseResource(path=str(tmp_path / "warehouse"))

    def tick() -> Any:
        context = dg.build_sensor_context(resources={"vt_dagster_warehouse": where})
        said = sensor.evaluate_tick(context)
        return said.run_requests[0] if said.run_requests else said.skip_message

    assert "no new parquet dumps" in tick()
    shop.deliver("2024-01-01.parquet", ("a", "Ann", 1.0))
    shop.deliver("2024-01-02.parquet", ("a", "Anna", 1.0))
    first = tick()
    assert first.run_config["ops"]["customers"]["config"] == {"dump": "2024-01-01.parquet"}
    assert tick().run_key == first.run_key

    @dg.asset(key=["crm", "export"])
    def export() -> None:
        """Delivers the dumps."""

    done = run([export, asset], where.path, run_config=first.run_config)
    assert done.success
    assert materialized(done, "customers")["positions"] == {"dumps": {"0": 1}}
    assert asset.specs_by_key[dg.AssetKey("customers")].deps == [dg.AssetDep(["crm", "export"])]
    assert tick().run_config["ops"]["customers"]["config"] == {"dump": "2024-01-02.parquet"}
    shop.deliver("2023-01-01.parquet", ("a", "?", 0.0))
    assert "is older than the last one" in tick()


def test_unknown_dump_is_refused(spark: SparkSession, tmp_path: Path) -> None:
    """A run that names a dump which does not exist, for example by a typing error, fails."""
    shop = Shop(tmp_path, spark)
    source: Any = shop.node.source
    for name in ("2024-01-01.parquet", "day", ""):
        with pytest.raises(SourceError, match=f"expected the dump '{name}' of the run config, which"):
            source.pin(None, name)
    shop.deliver("2024-01-01.parquet", ("a", "Ann", 1.0))
    for name in ("2024-01-01", "2024-01-02.parquet", "2023-01-01.parquet"):
        with pytest.raises(SourceError, match=f"expected the dump '{name}' of the run config, which"):
            source.pin(None, name)
    assert not source.pin(None, "2024-01-01.parquet").empty
    consumed = {"2024-01-01.parquet": {"bytes": 1, "time": 0}}
    (shop.path / "2024-01-01.parquet").unlink()
    assert source.pin(None, "2024-01-01.parquet", consumed=consumed).empty, "it was consumed"
