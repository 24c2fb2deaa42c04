"""A live table's schema changes: downstream assets continue, and equal those made with the new
schema."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pandera.pyspark as pa_model
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import CommitProperties, DeltaTable, Transaction
from pyspark.sql import SparkSession
from pyspark.sql.types import (
    ArrayType,
    BooleanType,
    DataType,
    DecimalType,
    DoubleType,
    FloatType,
    IntegerType,
    LongType,
    ShortType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

import vt_dagster
from vt_dagster.errors import ConcurrentRunError, SourceError, StorageError, TopologyError
from vt_dagster.runs.replay import compare, replay, swap
from vt_dagster.runs.run import Run, run_once
from vt_dagster.sources.files_source import FilesSource
from vt_dagster.spark.settings import settings
from vt_dagster.storage import schema_evolution, view
from vt_dagster.storage.asset_store import AssetStore, stores_of
from vt_dagster.topology.model import Stream, VersionedTable
from vt_dagster.topology.operators import UntilTimeLimit
from vt_dagster.topology.windows import TumblingWindow

pytestmark = pytest.mark.usefixtures("few_rows")


EPOCH = datetime(2020, 1, 1, tzinfo=timezone.utc)
BEFORE: dict[str, DataType] = {
    "k": StringType(),
    "cat": StringType(),
    "short": ShortType(),
    "n": IntegerType(),
    "share": FloatType(),
    "price": DecimalType(5, 2),
    "gone": BooleanType(),
    "must": IntegerType(),
    "at": TimestampType(),
}
AFTER: dict[str, DataType] = {
    "at": TimestampType(),
    "note": StringType(),
    "price": DecimalType(12, 2),
    "share": DoubleType(),
    "n": LongType(),
    "short": IntegerType(),
    "must": IntegerType(),
    "cat": StringType(),
    "k": StringType(),
}
"""Another order; ``note`` is new, numbers are wider, ``gone`` is left out, ``must`` may be null."""
BIG = 2**40


def schema(kinds: Mapping[str, DataType], never_null: Sequence[str] = ()) -> StructType:
    return StructType([StructField(n, kind, n not in never_null) for n, kind in kinds.items()])


class Live:
    """Versioned ``prices``, a stream of ``orders``, and their downstream assets. Joins are in
    ``test_renamed_columns.py``, where columns get wider types and a column is added too."""

    def __init__(self, root: Path, columns: StructType, warehouse: str = "warehouse") -> None:
        self.root, self.warehouse = root, str(root / warehouse)
        about: dict[str, Any] = {"key": "k", "schema": columns, "timestamp": "at"}
        self.prices = VersionedTable(
            "prices",
            history_retention=timedelta(hours=1),
            tombstone="cat is null",
            source=FilesSource(str(root / "prices")),
            **about,
        )
        self.orders = Stream("orders", source=FilesSource(str(root / "orders")), **about)
        limit = UntilTimeLimit(timedelta(minutes=10))
        groups = self.prices.group_by("cat").aggregate(
            {"rows": "count(*)", "n": "sum(n)", "price": "sum(price)", "share": "avg(share)"},
            name="groups",
        )
        windows = self.orders.group_by("k").windowed_by(
            TumblingWindow(timedelta(hours=1), grace=timedelta(hours=1))
        )
        self.nodes: list[Stream] = [
            self.prices,
            self.orders,
            self.prices.map_values("*", "n * 2 as twice", name="doubled"),
            groups,
            groups.suppress(limit, name="held"),
            windows.aggregate({"most": "max(n)", "price": "sum(price)"}, name="hourly"),
        ]

    def land(self, name: str, file: str, *records: Mapping[str, Any]) -> None:
        (self.root / name).mkdir(parents=True, exist_ok=True)
        lines = [
            json.dumps({**r, "at": (EPOCH + timedelta(minutes=r["at"])).isoformat()}) for r in records
        ]
        (self.root / name / file).write_text("\n".join(lines) + "\n")

    def run(self, spark: SparkSession, *names: str) -> None:
        for node in self.nodes:
            if not names or node.name in names:
                run_once(node, stores_of(self.warehouse, spark))

    def store(self, spark: SparkSession, name: str) -> AssetStore:
        return AssetStore(self.warehouse, next(n for n in self.nodes if n.name == name), spark)


def price(k: str, at: float, n: int, **more: Any) -> dict[str, Any]:
    values = {"k": k, "cat": "xy"[n % 2], "short": 1, "n": n, "share": 0.5, "price": 1.25, "must": 1}
    return {**values, "at": at, **more}


def land_first(live: Live) -> None:
    for name in ("prices", "orders"):
        live.land(
            name,
            "1.jsonl",
            *(price(k, at, n, gone=True) for k, at, n in [("a", 0, 1), ("b", 1, 2), ("c", 2, -3)]),
            price("a", 4, 4, gone=True),
        )


def land_second(live: Live) -> None:
    """Wider values and the new column: of a known key, out of order, of a new key, and a deletion."""
    more = {"note": "new", "must": None, "share": 0.1, "short": 70_000}
    for name in ("prices", "orders"):
        live.land(
            name,
            "2.jsonl",
            price("a", 30, BIG, price=12345678.25, **more),
            price("a", 3, 7, **more),
            price("d", 31, BIG + 1, **more),
            price("b", 40, 8, **more) | ({"cat": None} if name == "prices" else {}),
        )


@dataclass(frozen=True)
class Changed:
    live: Live
    anew: Live
    told: list[str]


@pytest.fixture(scope="module")
def changed(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Changed]:
    """``live``: tables after a run with the old schema and one with the new, with views still from the
    first run. ``anew``: tables with the same records that had the new schema from the start."""
    root = tmp_path_factory.mktemp("changed")
    patch = pytest.MonkeyPatch()
    patch.setattr(view, "EACH_RUN", 0)
    patch.setattr(view, "SHARE", 100)
    first = Live(root, schema(BEFORE, never_null=["must"]))
    land_first(first)
    first.run(spark)
    live, anew = Live(root, schema(AFTER)), Live(root, schema(AFTER), "anew")
    land_second(live)
    told: list[str] = []
    for node in live.nodes:
        run_once(node, stores_of(live.warehouse, spark, told.append))
    anew.run(spark)
    yield Changed(live, anew, told)
    patch.undo()


NAMES = ["prices", "doubled", "groups", "held", "hourly"]


def rows(table: pa.Table, but: Sequence[str] = ()) -> list[str]:
    """Rows in a form that ignores the order of rows and columns (also in ``old``) and
    ``recorded_at``."""
    flat = table.flatten() if "old" in table.column_names else table
    names = sorted(
        n for n in flat.column_names if n.removeprefix("old.") not in ("gone", "recorded_at", *but)
    )
    return sorted(map(repr, flat.select(names).to_pylist()))


@pytest.mark.parametrize("name", NAMES)
def test_changed_tables_equal_rebuilt_tables(changed: Changed, spark: SparkSession, name: str) -> None:
    """Log, current rows and versions are equal, read by Spark and without Spark. The stored view still
    has the first schema."""
    live = changed.live.store(spark, name)
    # The order of rows that a run releases from ``held`` depends on what was waiting.
    but = ("offset",) if name == "held" else ()
    kinds = [*(["current"] if live.node.is_table else []), *(["versions"] * live.node.versioned), "log"]
    for what in kinds:
        looked_up, expected = (
            rows(vt_dagster.read(name, warehouse=t.warehouse, what=what), but)
            for t in (changed.live, changed.anew)
        )
        assert looked_up == expected
        assert rows(live.read(what).toArrow(), but) == expected
    if live.node.is_table and name != "held":  # the first run made no rows of held
        base = live.snapshot().base
        assert base is not None
        assert base.checkpoint.batch == 1
    opened = AssetStore.open(changed.live.warehouse, name, spark)
    assert rows(opened.read("log").toArrow(), but) == expected


def test_schema_changes_in_first_commit_with_new_rows(changed: Changed) -> None:
    """Columns change in the commit of the first rows that use them. So a run that dies leaves no new
    column without rows."""
    log = Path(changed.live.warehouse, "prices", "log")
    text = (log / "_delta_log" / f"{1:020}.json").read_text()
    kinds = sorted(next(iter(json.loads(line))) for line in text.splitlines())
    assert kinds == ["add", "commitInfo", "metaData", "txn"]
    assert len(list((log / "_delta_log").iterdir())) == 2
    kinds = {f.name: str(f.type.type) for f in DeltaTable(str(log)).schema().fields if f.name in AFTER}
    assert kinds == {
        **{"k": "string", "cat": "string", "note": "string", "must": "integer", "at": "timestamp"},
        **{"short": "integer", "n": "long", "share": "double", "price": "decimal(12,2)"},
    }
    (said,) = [line for line in changed.told if line.startswith("prices: ! columns change: ")]
    assert "new, null in old rows: note; " in said
    assert "price: decimal(5,2) -> decimal(12,2), " in said
    assert "null from now on: gone" in said


@pytest.mark.parametrize("what", ["log", "view"])
def test_polars_and_deltalake_read_both_schemas(
    changed: Changed, spark: SparkSession, what: str
) -> None:
    """Polars and ``deltalake`` (by Arrow) read files with the old and the new columns. They also read
    a view that was rewritten in part, and tables that Delta's own writer compacted."""
    table = str(Path(changed.live.warehouse, "prices", what))
    if what == "view":
        changed.live.store(spark, "prices").catch_up(now=True)
        changed.anew.store(spark, "prices").catch_up(now=True)
    expected = DeltaTable(str(Path(changed.anew.warehouse, "prices", what))).to_pyarrow_dataset()
    wanted = rows(expected.to_table())

    def seen() -> list[list[str]]:
        by_arrow = DeltaTable(table).to_pyarrow_dataset().to_table()
        by_polars = pl.read_delta(table).to_arrow().select(by_arrow.column_names)
        return [rows(by_arrow), rows(by_polars.cast(by_arrow.schema))]

    assert seen() == [wanted, wanted]
    by_name = pl.read_delta(table).filter(pl.col("note").is_null())
    assert by_name.get_column("gone").null_count() == 0
    spark.sql(f"OPTIMIZE delta.`{table}`")
    assert seen() == [wanted, wanted]


def test_row_based_parquet_reader_reads_both_schemas(changed: Changed, spark: SparkSession) -> None:
    """Spark's Parquet reader that is not vectorized reads the same from files with the old columns."""
    with settings(spark, {"spark.sql.parquet.enableVectorizedReader": "false"}):
        found = changed.live.store(spark, "prices").read("log").toArrow()
    assert rows(found) == rows(vt_dagster.read("prices", warehouse=changed.anew.warehouse, what="log"))


def test_replay_equals_live_table(changed: Changed, spark: SparkSession) -> None:
    """A replay equals the live table in the declared columns; others are not compared."""
    live = changed.live.store(spark, "prices")
    copy = replay(changed.live.warehouse, live.node, "prices_anew", spark)
    assert "gone" not in copy.read().columns
    found = compare(live, copy)
    assert (found.missing, found.extra) == (0, 0)


def test_read_has_declared_columns_before_run(changed: Changed, spark: SparkSession) -> None:
    """A read has the declared columns before a run has written them: new ones are null, wider ones
    have the new type."""
    kinds = {**AFTER, "must": LongType(), "later": StringType(), "flag": BooleanType()}
    table = replace(changed.live.prices, schema=schema(kinds))
    store = AssetStore(changed.live.warehouse, table, spark)
    for what in ("log", "current", "versions"):
        read = store.read(what)
        assert dict(read.dtypes)["must"] == "bigint"
        assert read.where("later is not null or flag is not null").isEmpty()


class Priced(pa_model.DataFrameModel):
    """The columns after the change, and one that is never null, which is pandera's default."""

    k: StringType
    n: LongType = pa_model.Field(nullable=True)
    must_have: StringType
    at: TimestampType


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"n": IntegerType()}, "n: bigint -> int"),
        ({"n": StringType()}, "n: bigint -> string"),
        ({"price": DecimalType(14, 4)}, "price: decimal(12,2) -> decimal(14,4)"),
        ({"share": DecimalType(12, 2)}, "share: double -> decimal(12,2)"),
        ({"k": LongType()}, "k: string -> bigint"),
        (
            {"cat": None, "category": StringType()},
            "cat is missing and category is new: if it is one column",
        ),
        ({"note": None, "Note": StringType()}, "note is now declared as Note"),
        ({"gone": StringType()}, "gone: boolean -> string"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_refused_when_run_starts(
    changed: Changed, change: Mapping[str, DataType | None], said: str
) -> None:
    """The refusal comes before anything is read, and needs no Spark."""
    kinds = {name: kind for name, kind in {**AFTER, **change}.items() if kind is not None}
    table = replace(changed.live.prices, schema=schema(kinds), tombstone=None)
    refused(changed.live, table, said)


def refused(live: Live, table: Stream, said: str) -> None:
    def no_spark() -> SparkSession:
        raise AssertionError("Spark is asked for")

    with pytest.raises(StorageError) as raised:
        Run.pin(table, stores_of(live.warehouse, no_spark))
    assert said in str(raised.value)
    assert "vt-dagster replay" in str(raised.value)


def test_new_non_nullable_column(changed: Changed) -> None:
    """Columns of a pandera model are never null unless the model says so."""
    table = replace(changed.live.prices, schema=Priced, contract=None, tombstone=None)
    refused(changed.live, table, "must_have is new and must not be null")


def test_partition_column_keeps_its_type(changed: Changed) -> None:
    """A column of the partitioning keeps its type: else a key's records could get another partition."""
    kinds = {**AFTER, "must": LongType()}
    table = replace(changed.live.prices, schema=schema(kinds), partition_by="pmod(hash(must), 4)")
    refused(changed.live, table, "must: int -> bigint, which is part of the key or the partitioning")


def test_other_kind_and_key_by_replay_and_swap(tmp_path: Path, spark: SparkSession) -> None:
    """The way out that the refusal names."""
    live = Live(tmp_path, schema(BEFORE))
    land_first(live)
    run_once(live.prices, stores_of(live.warehouse, spark))
    stream = Stream(
        "prices", key="cat", schema=schema(BEFORE), timestamp="at", source=live.prices.source
    )
    refused(
        live, stream, "declared as stream keyed by ['cat'], but its tables were written as versioned"
    )
    copy = replay(live.warehouse, stream, "prices_anew", spark).head()
    swap(live.warehouse, "prices", "prices_anew")
    live.land("prices", "2.jsonl", price("d", 30, 1, gone=True))
    assert copy is not None
    commit = run_once(stream, stores_of(live.warehouse, spark)).commit
    assert commit is not None
    assert (commit.batch, commit.shape.kind) == (copy.commit.batch + 1, "stream")


def test_concurrent_runs_add_columns_once(tmp_path: Path, spark: SparkSession) -> None:
    """Both runs add the new columns: one run commits, and the columns are added once."""
    first = Live(tmp_path, schema(BEFORE))
    land_first(first)
    first.run(spark, "orders")
    live = Live(tmp_path, schema(AFTER))
    land_second(live)
    stores = stores_of(live.warehouse, spark)
    one, other = (Run.pin(live.orders, stores) for _ in range(2))
    results = other.operate(other.read())
    one.commit(one.operate(one.read()))
    with pytest.raises(ConcurrentRunError):
        other.commit(results)
    log = DeltaTable(str(Path(live.warehouse, "orders", "log")))
    assert log.version() == 1
    assert log.to_pyarrow_dataset().count_rows() == 8
    with pytest.raises(FileExistsError):
        schema_evolution.commit_with_columns(
            str(Path(live.warehouse, "orders", "log")),
            DeltaTable(log.table_uri, version=0),
            schema(BEFORE),
            [],
            [],
            CommitProperties(app_transactions=[Transaction("late", 1)]),
        )


def test_files_with_older_schema(tmp_path: Path, spark: SparkSession) -> None:
    """Files may lack optional columns and have narrower numbers. A run reports further columns."""
    kinds = {"k": StringType(), "n": LongType(), "note": StringType(), "at": TimestampType()}
    at = datetime(2020, 1, 1)
    for format_ in ("csv", "parquet"):
        folder = tmp_path / format_
        folder.mkdir()
        file = folder / f"old.{format_}"
        moments = pa.array([at], pa.timestamp("us", "UTC"))
        columns = {"k": ["a"], "n": pa.array([1], pa.int32()), "extra": ["e"], "at": moments}
        if format_ == "csv":
            file.write_text("k,n,extra,at\na,1,e,2020-01-01T00:00:00Z\n")
        else:
            pq.write_table(pa.table(columns), file)
        source = FilesSource(str(folder), format=format_, optional=["note"])
        orders = Stream(format_, key="k", schema=schema(kinds), timestamp="at", source=source)
        files = source.pin(None)
        (told,) = [line for line in files.describe(orders.schema) if line.startswith("!")]
        assert told == f"!columns that the schema lacks are left out: extra (in old.{format_})"
        (row,) = files.read(spark, orders).select("k", "n", "note").collect()
        assert tuple(row) == ("a", 1, None)
        strict = replace(source, optional=()).pin(None)
        with pytest.raises(SourceError, match=r"expected columns \['note'\]"):
            strict.read(spark, orders)
    pq.write_table(pa.table({"k": ["a"], "Note": ["x"]}), folder / "other.parquet")
    cased = FilesSource(str(folder), "parquet", "other.*", optional=["n", "at", "note"])
    with pytest.raises(SourceError, match=r"note is named 'Note', expected the same case"):
        cased.pin(None).read(spark, replace(orders, source=cased))
    nested, lines = schema({**kinds, "tags": ArrayType(StringType())}), replace(source, format="csv")
    with pytest.raises(TopologyError, match=r"no struct, array or map among .* \{'tags': 'array<st"):
        replace(orders, schema=nested, source=lines)
    with pytest.raises(TopologyError, match=r"expected optional columns of the source among"):
        replace(orders, source=replace(source, optional=("k",)))


@pytest.mark.parametrize(
    "format_",
    [  # test_files_with_older_schema reads such files of the other formats
        "jsonl",
        *(pytest.param(one, marks=pytest.mark.endurance) for one in ("csv", "parquet")),
    ],
)
def test_late_records_with_old_columns_apply(tmp_path: Path, spark: SparkSession, format_: str) -> None:
    """An added column makes no new version. It is null in existing versions, and in versions that late
    records without the column make between versions that have it."""
    old = schema({"k": StringType(), "n": LongType(), "at": TimestampType()})
    new = schema({**{f.name: f.dataType for f in old.fields}, "note": StringType()})
    folder = tmp_path / "landing"
    folder.mkdir()

    def land(name: str, *records: tuple[Any, ...]) -> None:
        columns = ["k", "n", "at", "note"][: len(records[0])]
        rows = [
            dict(zip(columns, (k, n, EPOCH + timedelta(minutes=at), *more), strict=True))
            for k, n, at, *more in records
        ]
        file = folder / f"{name}.{format_}"
        if format_ == "parquet":
            pq.write_table(pa.Table.from_pylist(rows), file)
            return
        rows = [{**row, "at": row["at"].isoformat()} for row in rows]
        if format_ == "jsonl":
            file.write_text("\n".join(map(json.dumps, rows)))
        else:
            file.write_text(
                "\n".join([",".join(columns), *(",".join(map(str, row.values())) for row in rows)])
            )

    def table(kinds: StructType, **about: Any) -> VersionedTable:
        source = FilesSource(str(folder), format=format_, **about)  # type: ignore[arg-type]
        hour = timedelta(hours=1)
        return VersionedTable(
            "table", key="k", schema=kinds, timestamp="at", history_retention=hour, source=source
        )

    stores = stores_of(str(tmp_path / "warehouse"), spark)
    land("1", ("a", 1, 0), ("a", 2, 10), ("b", 3, 5))
    before = run_once(table(old), stores).commit
    added = table(new, optional=["note"])
    kept = added.map_values("n", "note", name="kept")
    assert before is not None
    assert run_once(added, stores).commit is None
    land("2", ("a", 4, 20, "new"), ("b", 5, 30, "new"))
    land("3", ("a", 6, 15), ("a", 7, 25), ("b", 3, 5))
    for node in (added, kept):
        run_once(node, stores)
    for node in (added, kept):
        read = stores(node).read("versions").orderBy("k", "valid_from").collect()
        minutes = [
            (r["valid_from"].astimezone(timezone.utc) - EPOCH) // timedelta(minutes=1) for r in read
        ]
        assert [(r["k"], at, r["n"], r["note"]) for r, at in zip(read, minutes, strict=True)] == [
            *[("a", 0, 1, None), ("a", 10, 2, None), ("a", 15, 6, None)],
            *[("a", 20, 4, "new"), ("a", 25, 7, None)],
            *[("b", 5, 3, None), ("b", 30, 5, "new")],
        ]
    log = [r["is_latest"] for r in stores(added).read("log").orderBy("offset").collect()]
    assert log == [True] * 5 + [False, True, False]
