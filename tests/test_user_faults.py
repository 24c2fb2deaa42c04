"""Faults of users, and their symptoms. No record may be lost, no two records may become one, and no
read may return other data than was requested.

The tests count the expected records from the files themselves, not from the metadata of a run.
"""

from __future__ import annotations

import gzip
import json
import os
import re
import shutil
import struct
import time
from collections import Counter
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from decimal import Decimal
from pathlib import Path
from typing import Any

import dagster as dg
import duckdb
import numpy as np
import pyarrow  # pyright: ignore[reportMissingTypeStubs]
import pyarrow.parquet  # pyright: ignore[reportMissingTypeStubs]
import pytest
from deltalake import DeltaTable
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import (
    ArrayType,
    DateType,
    DecimalType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)
from typer.testing import CliRunner

from tests.market import Market, checks, messages, record, run
from vt_dagster import (
    FilesSource,
    Stream,
    Table,
    TopologyError,
    TumblingWindow,
    VersionedTable,
    build_asset,
    build_checks,
)
from vt_dagster.cli import app
from vt_dagster.errors import SourceError, StorageError, VtDagsterError
from vt_dagster.kafka import SchemaRegistry
from vt_dagster.runs import replay
from vt_dagster.runs.run import Run, run_once
from vt_dagster.sources import files_source
from vt_dagster.storage.asset_store import AssetStore, asset_names, stores_of
from vt_dagster.storage.maintenance import maintain

pytestmark = pytest.mark.usefixtures("few_rows")


pa: Any = pyarrow
pq: Any = pyarrow.parquet

SHAPE = StructType(
    [
        StructField("k", StringType()),
        StructField("n", LongType()),
        StructField("v", StringType()),
        StructField("at", TimestampType()),
    ]
)
AT = "2024-01-01T00:00:00Z"
MIDNIGHT = datetime(2024, 1, 1, tzinfo=timezone.utc)


Lines = tuple[list[tuple[Any, ...]], list[tuple[Any, ...]]]
"""Results of a file: the applied records (k, n, v) and the quarantined lines (number, text)."""


def run_over_files(
    root: Path, spark: SparkSession, files: dict[str, bytes], **about: Any
) -> dict[str, Lines]:
    """Runs once over files; returns the results by file. In a good line ``v`` ends with the file's
    name."""
    source = FilesSource(str(landing(root, **files)), max_bad_share=1, **about)
    node = Stream("sales", key="k", schema=SHAPE, timestamp="at", source=source)
    run_once(node, stores_of(str(root / "warehouse"), spark))
    store = AssetStore(str(root / "warehouse"), node, spark)
    applied = [(r["k"], r["n"], r["v"]) for r in store.read("log").orderBy("offset").collect()]
    bad = store.quarantine()
    rows = [] if bad is None else bad.orderBy("position").collect()
    assert all(r["reason"] == "unreadable" for r in rows)
    # Counted from the files themselves: no line is lost, and no line is counted twice.
    lines = sum(bool(one.strip()) for content in files.values() for one in content.split(b"\n"))
    head = store.head()
    assert head is not None
    headers = len(files) if about.get("format") == "csv" else 0
    assert lines - headers == head.commit.totals["in"] == len(applied) + len(rows)
    return {
        name: (
            [row for row in applied if row[2].endswith(name)],
            [(r["position"], r["raw"]) for r in rows if r["source"] == name],
        )
        for name in files
    }


def line(k: str, n: Any = 1, v: str = "x") -> str:
    return json.dumps({"k": k, "n": n, "v": v, "at": AT})


NO_OBJECT = [
    line("b") + line("c"),
    line("b") + " , " + line("c"),
    line("b") + " and more",
    line("b") + "}",
    line("b") + ',"more":' + line("c"),
    line("b") + '],"more":[' + line("c"),
    line("b", "one"),
    "7",
    "[" + line("b") + "]",
    "null",
]
TWICE = [line("b")[:-1] + ', "k": "c"}', line("b")[:-1] + ', "\\u006b": "c"}']
LATIN = ("café", "cafè", "cafe")
IN_QUOTES = [
    "at,k,n,v",
    f'{AT},a,1,"with ""quotes"", and a comma of quotes"',
    f'{AT},b,2,"first half',
    f'{AT},c,3,second half"',
    f"{AT},d,4,quotes",
    f'{AT},e,5,"the first of three lines',
    f"{AT},f,6,the second looks like a record with quotes",
    'the last of them, "" and not a record"',
    f'{AT},g,7,"text" after quotes',
    f"{AT},h,8,after quotes",
]
LONG = [
    "at,k,n,v",
    *(f"{AT},a,{i},before long" for i in range(200)),
    f'{AT},b,1,"a field of many lines',
    *(f"{AT},c,{i},within" for i in range(2_500)),
    'its end"',
    *(f"{AT},d,{i},after long" for i in range(200)),
    f'{AT},e,1,"a quote that is never closed',
    *(f"{AT},f,{i},after long" for i in range(200)),
    f'{AT},g,1,"another one',
    f"{AT},h,1,the last of long",
]
CONTROL = [
    "at,k,n,v",
    f"{AT},a,1,a carriage\rreturn of control",
    f'{AT},b\rc,2,"another\r, in quotes, of control"',
    f'{AT},d,3,"a zero\0, ""\0, \0""of control"',
]
NESTED = "[" * 1500 + "]" * 1500
HALVES = [line("b\ud83d"), line("b\ud83e"), line("c", v="\udc00 halves"), line("\udc00\ud83d")]


@pytest.fixture(scope="module")
def json_lines(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Lines]:
    """The results of one run over files of JSON lines; it reads the usual lines by a pattern."""
    good = {name: line("a", v=name) for name in ("objects", "twice")}
    other = line("d", v="twice")[:-1] + ', "K": "e"}'  # to Spark, another name than "k"
    files = {
        "objects": "\n".join([good["objects"], *NO_OBJECT, line("d", v="objects")]).encode(),
        "twice": "\n".join([good["twice"], *TWICE, other]).encode(),
        "halves": "\n".join([line("\U0001f600", v="halves"), *HALVES]).encode(),
        "nested": f'{{"k": "b", "more": {NESTED}}}\n{line("a", v="nested")}'.encode(),
        "latin": "\n".join(f'{{"k": "{k}", "n": 1, "v": "latin", "at": "{AT}"}}' for k in LATIN).encode(
            "latin-1"
        ),
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files_source, "MANY_BYTES", 0)
        return run_over_files(tmp_path_factory.mktemp("json"), spark, files)


@pytest.fixture(scope="module")
def csv_lines(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Lines]:
    """The results of one run over files of CSV."""
    latin = "\n".join(["k,n,v,at", *(f"{k},1,latin,{AT}" for k in LATIN)]).encode("latin-1")
    files = {"latin": latin, "quotes": "\n".join(IN_QUOTES).encode()}
    files["long"] = "\n".join(LONG).encode()
    files["control"] = "\r\n".join(CONTROL).encode()
    return run_over_files(tmp_path_factory.mktemp("csv"), spark, files, format="csv")


@pytest.mark.parametrize("format", ["csv", "jsonl"])
def test_files_without_lines(spark: SparkSession, tmp_path: Path, format: Any) -> None:
    """A run that finds only empty files and files with blank lines consumes them."""
    source = FilesSource(str(landing(tmp_path, blank=b"\n\n", empty=b"")), format=format)
    node = Stream("sales", key="k", schema=SHAPE, timestamp="at", source=source)
    stores = stores_of(str(tmp_path / "warehouse"), spark)
    receipt = run_once(node, stores)
    assert receipt.commit is not None
    assert receipt.commit.totals["in"] == 0
    assert run_once(node, stores).commit is None


def test_line_must_be_one_json_object(json_lines: dict[str, Lines]) -> None:
    applied, quarantined = json_lines["objects"]
    assert [k for k, _, _ in applied] == ["a", "d"]
    assert quarantined == list(enumerate(NO_OBJECT, start=2))


def test_duplicate_json_field_is_quarantined(json_lines: dict[str, Lines]) -> None:
    applied, quarantined = json_lines["twice"]
    assert [k for k, _, _ in applied] == ["a", "d"]
    assert quarantined == list(enumerate(TWICE, start=2))


def test_invalid_utf_8_is_quarantined(
    json_lines: dict[str, Lines], csv_lines: dict[str, Lines]
) -> None:
    for found, first in ((json_lines, 1), (csv_lines, 2)):  # CSV has a header
        applied, quarantined = found["latin"]
        assert [k for k, _, _ in applied] == ["cafe"]
        assert [position for position, _ in quarantined] == [first, first + 1]


def test_lone_surrogate_is_quarantined(json_lines: dict[str, Lines]) -> None:
    """Half of a surrogate pair is quarantined. Spark reads each half as a question mark, so two keys
    would become one."""
    applied, quarantined = json_lines["halves"]
    assert [k for k, _, _ in applied] == ["\U0001f600"]
    assert quarantined == list(enumerate(HALVES, start=2))


def test_deeply_nested_first_line_is_quarantined(json_lines: dict[str, Lines]) -> None:
    """Neither Python nor Spark can read so many levels: the line is quarantined, the next one
    applied."""
    applied, bad = json_lines["nested"]
    assert applied == [("a", 1, "nested")]
    assert [position for position, _ in bad] == [1]


def test_csv_line_break_in_quotes(csv_lines: dict[str, Lines]) -> None:
    applied, quarantined = csv_lines["quotes"]
    good = [("a", 1, 'with "quotes", and a comma of quotes'), ("d", 4, "quotes")]
    assert applied == [*good, ("h", 8, "after quotes")]
    assert quarantined == [(n, IN_QUOTES[n - 1]) for n in (3, 4, 6, 7, 8, 9)]


def test_csv_multiline_field(csv_lines: dict[str, Lines]) -> None:
    """The lines of such a field are not records. A quote that is never closed does not swallow all the
    lines after it."""
    applied, quarantined = csv_lines["long"]
    good = [("a", 200), ("d", 200), ("f", 200), ("h", 1)]
    assert [k for k, _, _ in applied] == [k for k, times in good for _ in range(times)]
    records = {"b": 1, "c": 2_500, "its end": 1, "e": 1, "g": 1}
    keys = [text.split(",")[1] if "," in text else text.strip('"') for _, text in quarantined]
    assert Counter(keys) == records


def test_csv_control_characters(csv_lines: dict[str, Lines]) -> None:
    """A carriage return without a line feed is part of a value, and so is a zero character in
    quotes."""
    assert csv_lines["control"] == (
        [
            ("a", 1, "a carriage\rreturn of control"),
            ("b\rc", 2, "another\r, in quotes, of control"),
            ("d", 3, 'a zero\0, "\0, \0"of control'),
        ],
        [],
    )


@pytest.mark.parametrize("form", ["jsonl", "csv"])
def test_decimal_is_not_rounded(tmp_path: Path, spark: SparkSession, form: Any) -> None:
    """A decimal with too many digits is quarantined, also within an array. Trailing zeros do not count
    as digits."""
    amounts = ["1.5", "1.50000", "1.499", "1E-3", "12345678.9", "123456789", "-0.010"]
    shape = StructType([StructField("k", StringType()), StructField("d", DecimalType(10, 2))])
    if form == "csv":
        lines = ["k,d", *(f"{i},{text}" for i, text in enumerate(amounts))]
    else:
        lines = [f'{{"k": "{i}", "d": {text}, "many": [{{"d": 1}}]}}' for i, text in enumerate(amounts)]
        lines.append('{"k": "7", "many": [{"d": 1}, {"d": 1.001}]}')
        many = ArrayType(StructType([StructField("d", DecimalType(3, 1))]))
        shape = shape.add("many", many)
    source = FilesSource(
        str(landing(tmp_path, one="\n".join(lines).encode())), format=form, max_bad_share=1
    )
    node = Stream("sales", key="k", schema=shape, timestamp="timestamp'2024-01-01'", source=source)
    result = run([build_asset(node)], tmp_path / "warehouse")
    assert result.success, messages(result)
    store = AssetStore(str(tmp_path / "warehouse"), node, spark)
    read = {r["k"]: str(r["d"]) for r in store.read().collect()}
    assert read == {"0": "1.50", "1": "1.50", "4": "12345678.90", "6": "-0.01"}
    quarantine = store.quarantine()
    assert quarantine is not None
    assert {r["reason"] for r in quarantine.collect()} == {"unreadable"}
    assert quarantine.count() == len(lines) - (form == "csv") - len(read)


def test_csv_custom_escape(tmp_path: Path, spark: SparkSession) -> None:
    rows = ["at,k,n,v", f'{AT},a,1,"an inch \\" more"', f'{AT},b,2,"half']
    files, options = {"more": "\n".join(rows).encode()}, {"escape": "\\"}
    applied, quarantined = run_over_files(tmp_path, spark, files, format="csv", options=options)["more"]
    assert applied == [("a", 1, 'an inch " more')]
    assert [position for position, _ in quarantined] == [3]


def landing(tmp_path: Path, **files: bytes) -> Path:
    """A directory with some files; in a name ``_dot_`` stands for a dot."""
    where = tmp_path / "landing"
    where.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (where / name.replace("_dot_", ".")).write_bytes(content)
    return where


def sales(where: Path, **about: Any) -> Stream:
    return Stream(
        "sales", key="k", schema=SHAPE, timestamp="at", source=FilesSource(str(where), **about)
    )


def logged_keys(tmp_path: Path, node: Stream, spark: SparkSession) -> list[str]:
    rows = AssetStore(str(tmp_path / "warehouse"), node, spark).read("log").orderBy("offset")
    return [r["k"] for r in rows.collect()]


def test_consumed_file_is_identified_by_content(tmp_path: Path, spark: SparkSession) -> None:
    def go(node: Stream) -> dg.ExecuteInProcessResult:
        return run([build_asset(node)], tmp_path / "warehouse")

    here = landing(tmp_path, jan=line("a").encode(), feb=line("b").encode())
    assert go(sales(here)).success
    # Moved with its directory, and with another modification time: not consumed again.
    moved = tmp_path / "moved"
    here.rename(moved)
    os.utime(moved / "jan", (1, 1))
    assert go(sales(moved)).success
    os.utime(moved / "jan", (2, 2))
    assert go(sales(moved)).success
    assert logged_keys(tmp_path, sales(moved), spark) == ["b", "a"]
    # With the same name and size in another directory: consumed.
    assert go(sales(landing(tmp_path / "other", jan=line("c").encode()))).success
    assert logged_keys(tmp_path, sales(moved), spark) == ["b", "a", "c"]
    assert go(sales(moved)).success, "the first directory is remembered as well"
    # Other contents of the same size: the run fails and names the file.
    (moved / "mar").write_text(line("e"))
    assert go(sales(moved)).success
    (moved / "feb").write_bytes(line("d").encode())
    os.utime(moved / "feb", (3, 3))
    result = go(sales(moved))
    assert not result.success
    size = len(line("d"))
    assert f"example feb: {size} bytes then and now, but rewritten since" in messages(result)


def test_hidden_and_unfinished_files_are_skipped(tmp_path: Path) -> None:
    where = landing(tmp_path, a=b"", b_dot__COPYING_=b"", _c=b"", _dot_d=b"")
    (tmp_path / "elsewhere").write_bytes(b"12345")
    (where / "link").symlink_to(tmp_path / "elsewhere")
    (where / "nowhere").symlink_to(tmp_path / "missing")
    (where / "directory").symlink_to(tmp_path)
    assert [(f.name, f.size) for f in FilesSource(str(where)).files()] == [("a", 0), ("link", 5)]


def test_symlink_is_identified_by_target(tmp_path: Path, spark: SparkSession) -> None:
    where = landing(tmp_path)
    (tmp_path / "elsewhere").write_text(line("a"))
    (where / "link").symlink_to(tmp_path / "elsewhere")
    node = sales(where)
    for _ in range(2):
        assert run([build_asset(node)], tmp_path / "warehouse").success
    assert logged_keys(tmp_path, node, spark) == ["a"]


@pytest.mark.parametrize("what", ["grows", "goes", "is another"])
def test_file_changed_during_run_fails_it(tmp_path: Path, spark: SparkSession, what: str) -> None:
    where = landing(tmp_path, jan=line("a").encode() + b"\n")
    node = sales(where)
    stores = AssetStore(str(tmp_path / "warehouse"), node, spark)
    begun = Run.pin(node, lambda _: stores)
    with (where / "jan").open("a") as file:
        file.write(line("b") + "\n")
    if what == "goes":
        (where / "jan").unlink()
    if what == "is another":
        (where / "jan").write_text(line("c") + "\n")
    said = "jan; nothing was committed" if what == "goes" else r"changed while the run was reading.*jan"
    with pytest.raises(SourceError, match=said):
        begun.commit(begun.operate(begun.read()))
    assert stores.head() is None
    if what != "goes":
        assert run([build_asset(node)], tmp_path / "warehouse").success
        assert logged_keys(tmp_path, node, spark) == (["a", "b"] if what == "grows" else ["c"])


HEADER = "k,n,v,at\n"
ROW = f"a,1,x,{AT}\n"
BAD = {
    "cut_dot_csv_dot_gz": (gzip.compress(HEADER.encode() + os.urandom(9999))[:-99], "whole compressed"),
    "false_dot_csv_dot_gz": ((HEADER + ROW).encode(), "expected a gzip file, as its name says"),
    "header": (b"\xff\xffk,n,v,at\n" + ROW.encode(), "header line in UTF-8"),
    "twice": (("k," + HEADER).encode() + b"b," + ROW.encode(), "got ['k'] more than once"),
    "colon:": (ROW.encode(), "expected a name without ':'"),
    "mac": ((HEADER + ROW).replace("\n", "\r").encode(), "a carriage return that no line feed"),
    "long": (b"k,n,v,at," + 200_000 * b"x" + b"\n" + ROW.encode(), "header line of CSV"),
    "endless": (2_000_000 * b"x,", "more than"),
    "lacks": (b"k,n,v\na,1,x\n", "expected columns ['at']"),
}


@pytest.mark.parametrize("policy", ["fail", "quarantine"])
def test_unreadable_file_fails_run_or_is_quarantined(
    tmp_path: Path, spark: SparkSession, policy: Any
) -> None:
    """A file that cannot be read fails the run, or goes to quarantine as a whole. Beside it are good
    files, also an empty one, a compressed one, and one with an odd name."""
    where = landing(tmp_path, **{name: content for name, (content, _) in BAD.items()})
    (where / "empty").write_bytes(b"")
    (where / "only a header").write_text(HEADER)
    (where / "good, 100% #1? [x] é+.csv").write_text(HEADER + ROW)
    (where / "whole.gz").write_bytes(gzip.compress((HEADER + ROW.replace("a", "b", 1)).encode()))
    node = sales(where, format="csv", on_bad_file=policy)
    result = run([build_asset(node)], tmp_path / "warehouse")
    if policy == "fail":
        assert not result.success
        assert "colon:: expected a name without ':'" in messages(result)
        assert "8 other files are bad" in messages(result)
        assert "on_bad_file='quarantine'" in messages(result)
        return
    assert result.success, messages(result)
    assert sorted(logged_keys(tmp_path, node, spark)) == ["a", "b"]
    store = AssetStore(str(tmp_path / "warehouse"), node, spark)
    quarantine = store.quarantine()
    assert quarantine is not None
    found = {r["source"]: (r["reason"], r["position"], r["raw"]) for r in quarantine.collect()}
    for name, (_, said) in BAD.items():
        reason, position, raw = found.pop(name.replace("_dot_", "."))
        assert (reason, position) == ("unreadable_file", 0)
        assert said in raw
    assert found == {}
    head = store.head()
    assert head is not None
    assert head.commit.totals["in"] == 11
    # No file is consumed twice, and a run with only bad files succeeds.
    (where / "late").write_bytes(b"k\n")
    assert run([build_asset(node)], tmp_path / "warehouse").success
    quarantine = store.quarantine()
    assert quarantine is not None
    assert quarantine.count() == 10


def test_parquet_columns_that_spark_cannot_read(tmp_path: Path, spark: SparkSession) -> None:
    """Those that the schema lacks are dropped like others."""
    where = tmp_path / "landing"
    where.mkdir()
    own = "1::uinteger as n, 'x' as v, timestamptz '2024-01-01' as at"
    for name, value in {
        "uuid": "uuid()",
        "time": "time '10:00'",
        "ns": "timestamp_ns '2024-01-01'",
    }.items():
        duckdb.sql(f"copy (select '{name}' as k, {value} as more, {own}) to '{where / name}.parquet'")
    more = {
        "half": pa.array([np.float16(1)], pa.float16()),
        "wide": pa.array([Decimal(1)], pa.decimal256(50)),
        "deep": pa.array([[1_000]], pa.list_(pa.timestamp("ns"))),
    }
    for name, column in more.items():
        row = {"k": [name], "n": [1], "v": ["x"], "at": [MIDNIGHT], "more": column}
        pq.write_table(pa.table(row), where / f"{name}.parquet")
    result = run([build_asset(node := sales(where, format="parquet"))], tmp_path / "warehouse")
    assert result.success, messages(result)
    assert logged_keys(tmp_path, node, spark) == ["deep", "half", "ns", "time", "uuid", "wide"]


def test_parquet_files_with_unsupported_types(tmp_path: Path, spark: SparkSession) -> None:
    where = landing(tmp_path, cut=b"PAR1 and no more", text=b"k,n")
    good = spark.createDataFrame([("a", 1, "x")], "k string, n long, v string")
    good = good.withColumn("at", F.lit(AT).cast("timestamp"))
    for name, rows in {
        "good": good,
        "more": good.withColumn("more", F.lit(1)).withColumn("k", F.lit("b")),
        "less": good.drop("v"),
        "other": good.withColumn("n", F.col("n").cast("double")),
    }.items():
        rows.coalesce(1).write.parquet(str(tmp_path / name))
        next((tmp_path / name).glob("*.parquet")).rename(where / name)
    clock = pa.table({"k": ["a"], "n": pa.array([1], pa.time64("us")), "v": ["x"], "at": [MIDNIGHT]})
    twice = pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"])], names=["k", "K"])
    # pandas writes times in nanoseconds.
    nanos = pa.table({"k": ["a"], "at": pa.array([1_000], pa.timestamp("ns", "UTC"))})
    for name, table in {"clock": clock, "twice": twice, "nanos": nanos}.items():
        pq.write_table(table, where / name)
    for codec in ("zstd", "lz4", "gzip", "none", "brotli"):
        rows = good.withColumn("k", F.lit(codec)).toArrow()
        pq.write_table(rows, where / codec, compression=codec)
    node = sales(where, format="parquet", on_bad_file="quarantine")
    result = run([build_asset(node)], tmp_path / "warehouse")
    assert result.success, messages(result)
    assert logged_keys(tmp_path, node, spark) == ["a", "gzip", "lz4", "b", "none", "zstd"]
    quarantine = AssetStore(str(tmp_path / "warehouse"), node, spark).quarantine()
    assert quarantine is not None
    said = {r["source"]: r["raw"] for r in quarantine.collect()}
    assert sorted(said) == ["brotli", "clock", "cut", "less", "nanos", "other", "text", "twice"]
    assert said["brotli"].startswith(
        "expected a compression that Spark has a codec for, got BROTLI "
        "(Class org.apache.hadoop.io.compress.BrotliCodec was not found); "
    )
    assert said["nanos"].startswith(
        "expected times in microseconds or milliseconds, got nanoseconds in ['at']"
    )
    assert "coerce_timestamps='us'" in said["nanos"]
    old = spark.version.startswith("4.0.")
    sign = "expected columns that Spark can read, got: " if old else "n is time(6), expected bigint"
    assert said["clock"].startswith(sign)
    assert said["twice"].startswith("expected columns that Spark can read, got: ")
    assert said["less"].startswith("expected columns ['v']")
    assert said["other"].startswith("n is double, expected bigint")


def test_unsigned_parquet_numbers(tmp_path: Path, spark: SparkSession) -> None:
    """Spark reads unsigned numbers as wider integers, but those of 64 bits only as DECIMAL(20,0)."""
    kinds = {"a": pa.uint8(), "b": pa.uint16(), "c": pa.uint32(), "d": pa.uint64()}
    most = {name: 2**kind.bit_width - 1 for name, kind in kinds.items()}
    columns = {name: pa.array([most[name]], kind) for name, kind in kinds.items()}
    pq.write_table(pa.table(columns), tmp_path / "1.parquet")
    source = FilesSource(str(tmp_path), format="parquet")
    for wanted in ("a short, b int, c long", "a long, b long, c long"):
        schema = StructType.fromDDL(f"{wanted}, d decimal(20,0)")
        (row,) = source.read(spark, source.files(), schema).collect()
        assert {name: int(row[name]) for name in kinds} == most
    with pytest.raises(SourceError, match=r"d is decimal\(20,0\), expected decimal\(38,0\); correct"):
        source.read(spark, source.files(), StructType.fromDDL("a short, d decimal(38,0)"))


def test_parquet_columns_without_values(tmp_path: Path, spark: SparkSession) -> None:
    """pandas and Arrow give a column of nulls alone the type null: it is readable as any type."""
    where = tmp_path / "sales"
    where.mkdir()
    kind = StructType.fromDDL(
        "k string, note string, tags array<string>, dt string, s struct<x:string>"
    )
    rows = {"k": ["a", "b"], "note": [None, None], "tags": [None, None], "s": [{"x": "1"}] * 2}
    pq.write_table(pa.table(rows), where / "1.parquet")
    pq.write_table(pa.table({**rows, "k": ["c", "d"], "note": ["x", None]}), where / "2.parquet")
    (where / "dt=3").mkdir()
    pq.write_table(pa.table({**rows, "s": [{"x": None}] * 2}), where / "dt=3" / "3.parquet")
    source = FilesSource(str(where), format="parquet", optional=["dt"], on_bad_file="quarantine")
    found = source.read(spark, source.files(), kind).orderBy("_arrival").collect()
    assert [(r.k, r.note, r.tags, r.dt, r._source, r._position) for r in found] == [
        (None, None, None, None, "dt=3/3.parquet", 0),
        ("a", None, None, None, "1.parquet", 1),
        ("b", None, None, None, "1.parquet", 2),
        ("c", "x", None, None, "2.parquet", 1),
        ("d", None, None, None, "2.parquet", 2),
    ]
    assert [r._arrival for r in found[1:]] == [0, 1, 2, 3]
    assert found[1]._raw == '{"k":"a","s":{"x":"1"}}'
    assert found[0]._raw.startswith("s.x is int, expected string")


@pytest.mark.parametrize("policy", ["fail", "quarantine"])
def test_parquet_file_with_damaged_page(tmp_path: Path, spark: SparkSession, policy: Any) -> None:
    """The footer is intact, so only a read of all pages detects the damage. The run fails, and names
    the file."""
    where = tmp_path / "landing"
    where.mkdir()
    node = sales(where, format="parquet", on_bad_file=policy)
    for name, count in ("1.parquet", 1), ("2.parquet", 5_000):
        keys_ = [f"k{i * 7919 % 100_003}" for i in range(count)]
        table = pa.table({"k": keys_, "n": range(count), "v": ["x"] * count})
        at = pa.array([1_000_000] * count, pa.timestamp("us", "UTC"))
        pq.write_table(table.append_column("at", at), where / name, compression="zstd")
    damaged = where / "2.parquet"
    content = bytearray(damaged.read_bytes())
    content[200:4_000] = bytes(3_800)
    whole = damaged.read_bytes()
    damaged.write_bytes(content)
    result = run([build_asset(node)], tmp_path / "warehouse")
    assert not result.success
    said = messages(result)
    assert f"2.parquet in {where} could not be read: " in said
    assert "nothing was committed. Repair the file, or move it away, and run again" in said
    damaged.write_bytes(whole)
    assert run([build_asset(node)], tmp_path / "warehouse").success


def test_parquet_invalid_utf_8_is_quarantined(tmp_path: Path, spark: SparkSession) -> None:
    """A record with a text that is not UTF-8 is quarantined, also if the text is in an array or a map:
    two keys must not become one. A time outside the years 1 to 9999, and a map with the same key twice,
    are quarantined too."""

    def texts(*values: bytes) -> Any:
        offsets = [sum(map(len, values[:i])) for i in range(len(values) + 1)]
        buffers = [None, pa.py_buffer(struct.pack(f"{len(offsets)}i", *offsets))]
        return pa.Array.from_buffers(pa.utf8(), len(values), [*buffers, pa.py_buffer(b"".join(values))])

    good = texts(*8 * [b"x"])
    each = pa.array(range(8), pa.int32())
    twice = pa.array([*range(7), 8], pa.int32())
    table = pa.table(
        {
            "k": texts(b"a", b"caf\xe9", b"caf\xe8", b"caf\xc3\xa9", b"b", b"c", b"d"),
            "times": pa.array(
                [[0, None], [], None, [], [], [10**18], []], pa.list_(pa.timestamp("us", "UTC"))
            ),
            "many": pa.ListArray.from_arrays(each, texts(b"x", b"x", b"x", b"x", b"\xff", b"x", b"x")),
            "named": pa.MapArray.from_arrays(twice, good, good),
        }
    )
    where = landing(tmp_path)
    pq.write_table(table, where / "one")
    shape = StructType([StructField("k", StringType()), StructField("many", ArrayType(StringType()))])
    shape = shape.add("named", MapType(StringType(), StringType()))
    shape = shape.add("times", ArrayType(TimestampType()))
    source = FilesSource(str(where), format="parquet", max_bad_share=1)
    node = Stream("sales", key="k", schema=shape, timestamp="timestamp'2024-01-01'", source=source)
    result = run([build_asset(node)], tmp_path / "warehouse")
    assert result.success, messages(result)
    assert sorted(logged_keys(tmp_path, node, spark)) == ["a", "café"]
    quarantine = AssetStore(str(tmp_path / "warehouse"), node, spark).quarantine()
    assert quarantine is not None
    found = sorted((r["position"], r["reason"]) for r in quarantine.collect())
    assert found == [(n, "unreadable") for n in (2, 3, 5, 6, 7)]


def test_multi_character_separator(tmp_path: Path, spark: SparkSession) -> None:
    content = f'at||"a||b"||k||n||v\n{AT}||1||a||7||x\n'.encode()
    found = run_over_files(tmp_path, spark, {"x": content}, format="csv", options={"sep": "||"})
    assert found == {"x": ([("a", 7, "x")], [])}


def test_failing_expression_quarantines_record(tmp_path: Path, spark: SparkSession) -> None:
    rows = [
        {"k": "a", "n": 1, "v": "2024-01-01"},
        {"k": "b", "n": 1, "v": "soon"},
        {"k": "c", "n": None, "v": "2024-01-01"},
        {"k": "d", "n": 2**40, "v": "2024-01-01"},
        {"k": "e", "n": 0, "v": "2024-01-01"},
        {"k": "f", "n": 1, "v": "0000-01-01"},
        {"k": "g", "n": 1, "v": "+20000-01-01"},
        {"k": "", "n": 1, "v": "2024-01-02"},
    ]
    content = "\n".join(json.dumps(r) for r in rows)
    source = FilesSource(
        str(landing(tmp_path, jan=content.encode())), max_bad_share=1, max_clock_skew=timedelta.max
    )
    node = Stream(
        "sales",
        key=("k", "n"),
        schema=SHAPE,
        timestamp="cast(v as timestamp)",
        partition_by="if(k = '', null, n)",
        tombstone="1 div n > 1",
        null_key="keep",
        source=source,
    )
    result = run([build_asset(node)], tmp_path / "warehouse")
    assert result.success, messages(result)
    assert sorted(logged_keys(tmp_path, node, spark)) == ["a", "c"]
    quarantine = AssetStore(str(tmp_path / "warehouse"), node, spark).quarantine()
    assert quarantine is not None
    found = [(r["position"], r["reason"]) for r in quarantine.orderBy("position").collect()]
    assert found == [
        (2, "null_timestamp"),
        (4, "null_partition"),
        (5, "null_tombstone"),
        (6, "impossible_timestamp"),
        (7, "impossible_timestamp"),
        (8, "null_partition"),
    ]


ODD = ["größe", "a-b", "123", "null", "quote'd", "select"]


@pytest.mark.parametrize("form", ["csv", "jsonl", "parquet"])
def test_columns_with_unusual_names(tmp_path: Path, spark: SparkSession, form: Any) -> None:
    """Columns with odd names are read, written, joined and aggregated under their names."""
    values = [StructField(name, LongType()) for name in ODD]
    shape = StructType(
        [StructField("k'ö", StringType()), *values, StructField("at-time", TimestampType())]
    )
    rows = [["x", *range(1, 7), AT], ["y", *range(11, 17), AT]]
    landing = tmp_path / "landing"
    if form == "parquet":
        texts = spark.createDataFrame([tuple(map(str, r)) for r in rows], shape.names)
        kinds = zip(shape.names, shape.fields, strict=True)
        columns = [F.col(f"`{n}`").cast(f.dataType).alias(n) for n, f in kinds]
        texts.select(*columns).coalesce(1).write.parquet(str(landing))
    else:
        landing.mkdir()
        lines = [",".join(map(str, r)) for r in (shape.names, *rows)]
        if form == "jsonl":
            lines = [json.dumps(dict(zip(shape.names, r, strict=True))) for r in rows]
        (landing / "1").write_text("\n".join(lines), encoding="utf-8")
    source = FilesSource(str(landing), format=form)
    about: dict[str, Any] = {"key": "k'ö", "schema": shape, "timestamp": "at-time", "source": source}
    sales = Stream("sales", **about)
    nodes: list[Stream] = [sales]
    if form == "csv":
        prices = VersionedTable("prices", history_retention=timedelta(days=1), **about)
        nodes += [
            prices,
            sales.left_join(
                prices, name="both", select=["left.*", *[f"right.`{n}` as `r{n}`" for n in ODD]]
            ),
            sales.group_by()
            .windowed_by(TumblingWindow(timedelta(hours=1)))
            .aggregate({f"s{n}": f"sum(`{n}`)" for n in ODD}, name="hourly"),
        ]
    made = [*map(build_asset, nodes), *map(build_checks, nodes)]
    result = run(made, tmp_path / "warehouse")
    assert result.success, messages(result)
    assert all(check.passed for check in checks(result).values())

    def read(node: Stream, names: list[str]) -> list[tuple[Any, ...]]:
        rows = AssetStore(str(tmp_path / "warehouse"), node, spark).read()
        return sorted(tuple(r) for r in rows.select(*[f"`{n}`" for n in names]).collect())

    expected = [tuple(r[:-1]) for r in rows]
    for node, prefix in zip(nodes, ("", "", "r", "s"), strict=False):
        assert read(node, ["k'ö", *[prefix + n for n in ODD]]) == expected
    if form == "csv":
        asked = ["get", "prices", "--key", "x", "--warehouse", str(tmp_path / "warehouse")]
        assert re.search(r"^quote'd +5$", CliRunner().invoke(app, asked).output, re.MULTILINE)


def test_warehouse_path_with_special_characters(tmp_path: Path, spark: SparkSession) -> None:
    """In a directory with odd characters, a table has its view and quarantine, and maintenance compacts
    a log of two commits."""
    where, source = tmp_path / "a [1] {b,c} * ? `tick` # % z", str(tmp_path / "landing")
    about: dict[str, Any] = {"key": "k", "schema": SHAPE, "timestamp": "at"}
    node = VersionedTable(
        "sales",
        history_retention=timedelta(days=1),
        source=FilesSource(source, max_bad_share=1),
        **about,
    )
    landing(tmp_path, **{"of a": (line("a") + "\nbad\n" + line("b")).encode()})
    result = run([build_asset(node), build_checks(node)], where)
    assert result.success, messages(result)
    store = AssetStore(str(where), node, spark)
    quarantine = store.quarantine()
    assert quarantine is not None
    assert quarantine.count() == 1
    assert store.read("current").count() == 2
    log = Stream("log", source=FilesSource(source, max_bad_share=0), **about)
    (tmp_path / "landing" / "of a").unlink()
    for k in ("c", "d"):
        (tmp_path / "landing" / f"of {k}").write_text(line(k))
        run_once(log, stores_of(str(where), spark))
    assert maintain(str(where), "log", spark)["files_compacted"] == 2
    assert AssetStore(str(where), log, spark).read("log").count() == 2


@pytest.mark.parametrize("where", ["a\\b", "a%20b", "a\nb", "~/a", ""])
def test_ambiguous_warehouse_path_is_refused(where: str) -> None:
    """A path is refused if Spark and the readers of Delta's log, or a shell and a program, understand
    it differently."""
    node = Stream("sales", key="k", schema=SHAPE, timestamp="at")
    said = "also valid as a URL" if where.startswith("a") else "expected a directory or a URL, got"
    for use in (asset_names, lambda where: AssetStore(where, node)):
        with pytest.raises(StorageError, match=said):
            use(where)


def test_replay_into_other_asset_is_refused(market: Market, tmp_path: Path) -> None:
    copy = market.copy(tmp_path / "copy")
    before = copy.store(copy.rates).read("log").count()
    for into in ("rates", "prices"):
        with pytest.raises(StorageError, match="an asset of its own"):
            replay.replay(str(copy.warehouse), copy.prices, into, copy.spark)
    assert copy.store(copy.rates).read("log").count() == before
    again = replay.replay(str(copy.warehouse), copy.prices, "prices2", copy.spark)
    rows = again.read("log").count()
    assert (
        replay.replay(str(copy.warehouse), copy.prices, "prices2", copy.spark).read("log").count()
        == rows
    )
    # After the swap, ``prices2`` is the former live asset, not a replay: it must not be replaced.
    replay.swap(str(copy.warehouse), "prices", "prices2")
    with pytest.raises(StorageError, match="an asset of its own"):
        replay.replay(str(copy.warehouse), copy.prices, "prices2", copy.spark)


def test_invalid_asset_names_are_refused(market: Market, tmp_path: Path) -> None:
    copy = market.copy(tmp_path / "copy")
    warehouse = str(copy.warehouse)
    with pytest.raises(StorageError, match="'prices' twice"):
        replay.swap(warehouse, "prices", "prices")
    for name in ("../outside", "prices/log", "", "a b"):
        with pytest.raises(VtDagsterError, match=r"is not a name|one of \['priced'"):
            replay.swap(warehouse, "prices", name)
        with pytest.raises(TopologyError, match="is not a name"):
            replay.replay(warehouse, copy.prices, name, copy.spark)
        with pytest.raises(VtDagsterError, match=r"is not a name|one of \['priced'"):
            AssetStore.open(warehouse, name, copy.spark)
    with pytest.raises(TopologyError, match="has 300 characters"):
        Stream("n" * 300, key="k", schema=SHAPE, timestamp="at")
    assert copy.store(copy.prices).read("log").count() > 0


def test_only_topics_are_replayed_from_a_position(market: Market) -> None:
    for node, said in ((market.prices, "jsonl files "), (market.priced, "the result of an operator")):
        with pytest.raises(SourceError, match=f"{node.name}: expected a Kafka source.*got {said}"):
            replay.replay(str(market.warehouse), node, "anew", market.spark, datetime.now(timezone.utc))


def run_reading_asset(market: Market, metadata: dict[str, Any]) -> dg.ExecuteInProcessResult:
    """Materializes a user's own asset that reads prices."""

    @dg.asset(ins={"table": dg.AssetIn("prices", metadata=metadata)})
    def mine(table: DataFrame) -> None:
        table.collect()

    return run([build_asset(market.prices), mine], market.warehouse, selection=[mine])


@pytest.mark.parametrize("key", ["vt_dagster/reed", "vt_dagster/asof", "vt_dagster/"])
def test_mistyped_metadata_key_is_refused(market: Market, key: str) -> None:
    result = run_reading_asset(market, {key: "2024-01-01T00:00:00Z"})
    assert not result.success
    assert (
        "prices: expected 'vt_dagster/read', 'vt_dagster/as_of', 'vt_dagster/as_known_at'"
        in messages(result)
    )
    assert f"[{key!r}]" in messages(result)


def test_read_before_history_is_refused_unless_partial(market: Market, tmp_path: Path) -> None:
    copy = market.copy(tmp_path / "copy")
    copy.land("prices", "9.jsonl", record("zz", "new", "9 00:00"))
    assert run([build_asset(copy.prices)], copy.warehouse).success
    asked = {"vt_dagster/as_of": "2024-01-07T23:59:59Z"}
    result = run_reading_asset(copy, asked)
    assert not result.success
    assert "expected a time from 2024-01-08T00:00:00Z on" in messages(result)
    assert run_reading_asset(copy, {"vt_dagster/as_of": "2024-01-08T00:00:00Z"}).success
    assert run_reading_asset(copy, {**asked, "vt_dagster/partial": True}).success
    get = ["get", "prices", "--key", "a", "--warehouse", str(copy.warehouse), "--as-of"]
    refused = CliRunner().invoke(app, [*get, "2024-01-07T23:59:59Z"])
    assert isinstance(refused.exception, StorageError)
    assert "--partial" in str(refused.exception)
    assert CliRunner().invoke(app, [*get, "2024-01-08T00:00:00Z"]).exit_code == 0


def hourly(size: timedelta, what: str, copy: Market) -> list[Any]:
    window = TumblingWindow(size, timedelta(minutes=1))
    counted = copy.sales.group_by().windowed_by(window).aggregate({"n": what}, name="hourly")
    return [build_asset(copy.sales), build_asset(counted)]


def test_changed_definition_is_refused(market: Market, tmp_path: Path) -> None:
    copy, hour = market.copy(tmp_path / "copy"), timedelta(hours=1)
    assert run(hourly(hour, "count(*)", copy), copy.warehouse).success
    for changed, said in (
        (
            hourly(2 * hour, "count(*)", copy),
            "window was tumbling windows of 1 hour, is tumbling windows of 2 hours",
        ),
        (hourly(hour, "count(v)", copy), "aggregates was 'count(*) as n', is 'count(v) as n'"),
    ):
        result = run(changed, copy.warehouse)
        assert not result.success
        assert f"hourly: the declaration differs from the one that wrote its log: {said}" in messages(
            result
        )
    window = TumblingWindow(hour, 3 * hour)
    grouped = copy.sales.group_by().windowed_by(window)
    same = grouped.aggregate({"n": "count(*)"}, name="hourly", description="Waits longer.")
    copy.land("sales", "7.jsonl", record("a", "s9", "3 06:00"))
    assert run([build_asset(copy.sales), build_asset(same)], copy.warehouse).success


def test_temporarily_shorter_retention_rebuilds_view(market: Market, tmp_path: Path) -> None:
    copy = market.copy(tmp_path / "copy")
    longer, shorter = copy.prices, replace(copy.prices, history_retention=timedelta(0))
    for node, day in ((shorter, 3), (longer, 4)):
        copy.land("prices", f"{day}.jsonl", record("a", f"v{day}", f"{day} 00:00"))
        assert run([build_asset(node)], copy.warehouse).success
        store = copy.store(node)
        versions = sorted((r["k"], r["v"], r["valid_from"]) for r in store.read("versions").collect())
        store.rebuild_view()
        anew = sorted((r["k"], r["v"], r["valid_from"]) for r in store.read("versions").collect())
        assert versions == anew
    assert ("a", "v3") in {(k, v) for k, v, _ in versions}


def test_foreign_write_to_log_is_refused(market: Market, tmp_path: Path) -> None:
    copy = market.copy(tmp_path / "copy")
    store = copy.store(copy.sales)
    head, before = store.head(), store.read("log").count()
    assert head is not None
    DeltaTable(store.log_path).restore(head.version - 1)
    copy.land("sales", "7.jsonl", record("a", "s9", "3 06:00"))
    result = run([build_asset(copy.sales)], copy.warehouse)
    assert not result.success
    assert f"since batch {head.commit.batch}: RESTORE to version {head.version - 1}" in messages(result)
    assert f"to version {head.version}, which is that batch" in messages(result)
    DeltaTable(store.log_path).restore(head.version)
    result = run([build_asset(copy.sales)], copy.warehouse)
    assert result.success, messages(result)
    assert store.read("log").count() == before + 1


def test_shorter_retention_warns_of_expiring_versions(market: Market, tmp_path: Path) -> None:
    copy = market.copy(tmp_path / "copy")
    shorter = replace(copy.prices, history_retention=timedelta(0))
    copy.land("prices", "9.jsonl", record("a", "new", "9 00:00"))
    told: list[str] = []
    run_once(shorter, stores_of(str(copy.warehouse), copy.spark, told.append))
    said = [
        line for line in told if "versions that ended before 2024-01-09T00:00:00Z expire now" in line
    ]
    assert len(said) == 1
    assert told.index(said[0]) < next(i for i, line in enumerate(told) if "view at version" in line)


@pytest.mark.parametrize("what", ["state", "files.json.gz"])
def test_missing_state_of_previous_run_is_reported(market: Market, tmp_path: Path, what: str) -> None:
    copy = market.copy(tmp_path / "copy")
    node = copy.sales
    if what == "state":
        window = TumblingWindow(timedelta(hours=1), timedelta(days=1))
        node = copy.sales.group_by().windowed_by(window).aggregate({"n": "count(*)"}, name="hourly")
        assert run([build_asset(copy.sales), build_asset(node)], copy.warehouse).success
    copy.land("sales", "7.jsonl", record("a", "s9", "3 06:00"))
    shutil.rmtree(copy.warehouse / node.name / "attempts")
    result = run([build_asset(n) for n in {copy.sales, node}], copy.warehouse)
    assert not result.success
    assert re.search(
        rf"{node.name}: expected the data that batch \d staged for the next run", messages(result)
    )
    assert f"/{what}, but it was removed" in messages(result)


@pytest.mark.parametrize("kept", [0, 0.1, 0.9])
def test_truncated_commit_is_reported(market: Market, tmp_path: Path, kept: float) -> None:
    copy = market.copy(tmp_path / "copy")
    newest = max((copy.warehouse / "sales" / "log" / "_delta_log").glob("*.json"))
    text = newest.read_text()
    newest.write_text(text[: int(len(text) * kept)])
    with pytest.raises(StorageError, match=f"{newest.name} is truncated"):
        copy.store(copy.sales).head()


def test_unwritable_warehouse_fails_run(tmp_path: Path, spark: SparkSession) -> None:
    """A file is at the place of a directory, so that even root cannot write. The run fails, and names
    the path; it succeeds once the file is gone."""
    where = landing(tmp_path, jan=f"{line('a')}\nbad\n".encode())
    node = sales(where, max_bad_share=1)
    for blocked in ("", "attempts", "log", "quarantine"):
        shutil.rmtree(tmp_path / "warehouse", ignore_errors=True)
        door = tmp_path / "warehouse" / "sales" / blocked
        door.parent.mkdir(parents=True)
        door.touch()
        result = run([build_asset(node)], tmp_path / "warehouse")
        assert not result.success, blocked
        assert "expected to write to " in messages(result), blocked
        door.unlink()
    assert run([build_asset(node)], tmp_path / "warehouse").success
    assert logged_keys(tmp_path, node, spark) == ["a"]


@pytest.mark.parametrize("blocked", ["view", "quarantine"])
def test_failed_write_after_commit_is_completed_by_next_run(
    tmp_path: Path, spark: SparkSession, blocked: str
) -> None:
    """The run fails, but its commit is valid. The next run, without new records, writes the view and
    the quarantine."""
    where = landing(tmp_path, jan=f"{line('a')}\nbad\n".encode())
    source = FilesSource(str(where), max_bad_share=1)
    node = Table("sales", key="k", schema=SHAPE, timestamp="at", source=source)
    door = tmp_path / "warehouse" / "sales" / blocked
    door.parent.mkdir(parents=True)
    door.touch()
    result = run([build_asset(node)], tmp_path / "warehouse")
    assert not result.success
    said = messages(result)
    assert (
        "sales: batch 1 is committed to its log, but then its view or quarantine could not be" in said
    )
    assert f"expected to write to {door}, got: " in said
    assert (
        "free disk space, and run again. The next run, also without new records, writes them;" in said
    )
    door.unlink()
    assert run([build_asset(node)], tmp_path / "warehouse").success
    assert logged_keys(tmp_path, node, spark) == ["a"]
    store = AssetStore(str(tmp_path / "warehouse"), node, spark)
    quarantine = store.quarantine()
    assert quarantine is not None
    assert (store.read("current").count(), quarantine.count()) == (1, 1)
    assert len(DeltaTable(store.view_path).file_uris()) == 1


def test_names_differing_only_in_case_are_refused(market: Market, tmp_path: Path) -> None:
    copy = market.copy(tmp_path / "copy")
    result = run([build_asset(replace(copy.sales, name="Sales"))], copy.warehouse)
    assert not result.success
    assert "an asset 'sales', which differs only in case" in messages(result)


def test_values_are_printed_unchanged_and_times_in_utc(
    market: Market, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = market.copy(tmp_path / "copy")
    copy.land("prices", "9.jsonl", record("m", "[abc] [red]x [/etc/passwd]", "2 10:00"))
    assert run([build_asset(copy.prices)], copy.warehouse).success
    monkeypatch.setenv("COLUMNS", "200")
    arguments = ["--key", "m", "--warehouse", str(copy.warehouse)]
    import time

    monkeypatch.setenv("TZ", "Asia/Tokyo")
    time.tzset()
    try:
        got = CliRunner().invoke(app, ["get", "prices", *arguments])
        history = CliRunner().invoke(app, ["history", "prices", *arguments])
    finally:
        monkeypatch.undo()
        time.tzset()
    for result in (got, history):
        assert result.exit_code == 0, result.output
        assert "[abc] [red]x [/etc/passwd]" in result.output
        assert "2024-01-02 10:00:00" in result.output


def test_single_check_can_run(market: Market) -> None:
    some = build_checks(market.prices)
    one = min(some.check_keys, key=lambda key: key.name)
    alone = dg.AssetSelection.checks(one)
    result = run([build_asset(market.prices), some], market.warehouse, selection=alone)
    assert result.success, messages(result)
    assert list(checks(result)) == [f"prices:{one.name}"]


def test_source_requires_max_clock_skew() -> None:
    with pytest.raises(SourceError, match="must be a timedelta, got None"):
        FilesSource("somewhere", max_clock_skew=None)  # pyright: ignore[reportArgumentType]


def test_non_numeric_key_is_refused(tmp_path: Path, spark: SparkSession) -> None:
    (tmp_path / "landing").mkdir()
    (tmp_path / "landing" / "1").write_text(line("a", 7) + "\n")
    source = FilesSource(str(tmp_path / "landing"))
    about: dict[str, Any] = {"schema": SHAPE, "timestamp": "at", "source": source}
    node = VersionedTable("sales", key=("n", "at"), history_retention=timedelta(days=1), **about)
    assert run([build_asset(node)], tmp_path / "warehouse").success
    for key, said in (
        (["x", AT], "as a bigint for n, got 'x'"),
        (["7", "soon"], "as a timestamp for at, got 'soon'"),
    ):
        asked = [part for one in key for part in ("--key", one)]
        got = CliRunner().invoke(
            app, ["get", "sales", *asked, "--warehouse", str(tmp_path / "warehouse")]
        )
        assert isinstance(got.exception, StorageError)
        assert said in str(got.exception)
    asked = ["get", "sales", "--key", "7", "--key", AT, "--warehouse", str(tmp_path / "warehouse")]
    assert "a\n" in CliRunner().invoke(app, asked).output


def test_key_with_excess_precision_is_refused(tmp_path: Path, spark: SparkSession) -> None:
    kinds = {"d": DecimalType(10, 2), "t": TimestampType(), "day": DateType()}
    shape = StructType([StructField(name, kind) for name, kind in kinds.items()])
    row = {"d": 1.50, "t": "2024-01-01T00:00:00.123456Z", "day": "2024-01-01"}
    source = FilesSource(str(landing(tmp_path, one=json.dumps(row).encode())))
    node = Table("sales", key=tuple(kinds), schema=shape, timestamp="t", source=source)
    assert run([build_asset(node)], tmp_path / "warehouse").success
    good = {"d": "1.500", "t": "2024-01-01T00:00:00.12345600Z", "day": "2024-01-01"}

    def get(**changed: str) -> Any:
        asked = [part for text in (good | changed).values() for part in ("--key", text)]
        return CliRunner().invoke(
            app, ["get", "sales", *asked, "--warehouse", str(tmp_path / "warehouse")]
        )

    assert get().exit_code == 0
    for name, text in (
        ("d", "1.499"),
        ("t", "2024-01-01T00:00:00.1234564Z"),
        ("day", "2024-01-01T10:00"),
    ):
        got = get(**{name: text})
        assert isinstance(got.exception, StorageError)
        assert f"for {name}, got '{text}'" in str(got.exception)


@pytest.mark.parametrize(
    ("about", "said"),
    [
        (
            {"url": "registry:8081"},
            "expected url to be an address like https://registry:8081, got",
        ),
        ({"url": ""}, "got ''; correct it"),
        ({"url": None}, "expected url to be a text, got a value of type NoneType"),
        ({"url": "user:SECRET@registry"}, "got 'registry'; correct it"),
        ({"username": "u"}, "expected both username and password, got only one"),
        ({"password": "SECRET"}, "expected both username and password, got only one"),
    ],
)
def test_registry_is_checked_when_declared(about: dict[str, Any], said: str) -> None:
    with pytest.raises(SourceError) as refused:
        SchemaRegistry(**{"url": "https://registry:8081", **about})
    assert said in str(refused.value)
    assert "SECRET" not in str(refused.value)


def test_registry_password_is_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "sleep", lambda _: None)  # the client retries after seconds
    registry = SchemaRegistry("http://user:SECRET@127.0.0.1:1")
    assert "SECRET" not in repr(registry)
    with pytest.raises(Exception, match=r"//127\.0\.0\.1:1 did not") as error:
        registry.schemas("x")
    assert "SECRET" not in str(error.value)
