"""Bad rows: where the quarantine keeps them, with which reason, and when they fail a run."""

from __future__ import annotations

import gzip
import json
import re
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pyspark.sql import SparkSession
from pyspark.sql.types import (
    IntegerType,
    ShortType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from tests.market import Market, messages, record
from vt_dagster import FilesSource, Stream
from vt_dagster.errors import SourceError
from vt_dagster.sources.text_formats import hint_of
from vt_dagster.spark.settings import settings

ROW = StructType([StructField("k", StringType()), StructField("n", IntegerType())])


def read(spark: SparkSession, source: FilesSource, schema: StructType = ROW) -> list[tuple[Any, ...]]:
    """The rows of a source by arrival: file, position, columns, and raw content if unreadable."""
    rows = source.read(spark, source.pending({}), schema).orderBy("_arrival").collect()
    return [
        (
            r["_source"],
            r["_position"],
            *[r[c] for c in schema.names],
            *([r["_raw"]] if r["_reason"] else []),
        )
        for r in rows
    ]


def write(folder: Path, name: str, text: str, encoding: str = "utf-8") -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(text.encode(encoding))


# -- through an asset ----------------------------------------------------------------------------


@pytest.mark.usefixtures("few_rows")
def test_each_reason_has_source_position_and_content(spark: SparkSession, tmp_path: Path) -> None:
    market = Market(tmp_path, spark)
    source = market.prices.source
    assert isinstance(source, FilesSource)
    table = replace(market.prices, source=replace(source, max_bad_share=0.9))
    bad: list[Any] = [
        record("a", "p1", "3 00:00"),
        "not json at all",
        '{"k": "a", "v": "p", "at": "2024-01-03T00:00:00Z"',
        "",
        '{"k": "a", "v": "p", "at": "the other day"}',
        record(None, "p", "3 00:00"),
        record("a", "p", None),
        {"k": "a", "v": "p", "at": "2124-01-01T00:00:00Z"},
    ]
    market.land("prices", "1 of 2 [first].jsonl", *bad)
    market.land(
        "prices", "2.jsonl", record("b", "early enough", "2 00:00"), record("b", "x", "1 23:59")
    )
    result = market.run([table])
    assert result.success, messages(result)
    rejected = market.store(table).quarantine()
    assert rejected is not None
    rows = rejected.orderBy("source", "position").collect()
    first = "1 of 2 [first].jsonl"
    assert [(r["source"], r["position"], r["reason"], r["batch"]) for r in rows] == [
        (first, 2, "unreadable", 1),
        (first, 3, "unreadable", 1),
        (first, 5, "unreadable", 1),
        (first, 6, "null_key", 1),
        (first, 7, "null_timestamp", 1),
        (first, 8, "future_timestamp", 1),
        ("2.jsonl", 2, "late", 1),
    ]
    for row in rows[:-1]:
        content = bad[row["position"] - 1]
        assert row["raw"] == (content if isinstance(content, str) else json.dumps(content))
    assert [(r["k"], r["v"]) for r in market.store(table).read().orderBy("k").collect()] == [
        ("a", "p1"),
        ("b", "early enough"),
    ]


@pytest.mark.usefixtures("few_rows")
def test_too_large_bad_share_fails_before_commit(spark: SparkSession, tmp_path: Path) -> None:
    market = Market(tmp_path, spark)
    good = [record("a", f"p{i}", "1 00:00") for i in range(8)]
    market.land("prices", "1.jsonl", *good[:4], "{broken", *good[4:], record(None, "x", "1 00:00"))
    source = market.prices.source
    assert isinstance(source, FilesSource)
    strict = replace(market.prices, source=replace(source, max_bad_share=0.19))
    result = market.run([strict])
    assert not result.success
    text = messages(result)
    assert "2 of 10 records are bad (20.0%), expected at most 19.0%; nothing was committed" in text
    assert "1.jsonl row 5: unreadable: {broken" in text
    assert "1.jsonl row 10: null_key" in text
    assert not (market.warehouse / "prices" / "log").exists()
    # a share equal to the limit is accepted
    assert market.run([replace(strict, source=replace(source, max_bad_share=0.2))]).success


ARRAY, OBJECT = '[{"k": "a"},\n {"k": "b"}]\n', '{\n  "k": "a",\n  "v": "p"\n}\n'
LINES = "JSON is read line by line, one object a line"
UNIT = "A number in ['at'] is a time only with its unit: set timestamps of the source"


@pytest.mark.parametrize(
    ("format", "text", "hint"),
    [
        ("jsonl", ARRAY, LINES),
        ("jsonl", ARRAY.replace("\n", ""), LINES),
        ("jsonl", OBJECT, LINES),
        ("jsonl", '{"k": "a",\n"v": "p"}\n', LINES),
        ("jsonl", '{"k": "a", "at": 1714564800250}\n', UNIT),
        ("csv", "k,v,at\na,p,1714564800\n", UNIT),
    ],
)
def test_error_for_bad_records_says_how_to_read_them(
    format: Any, text: str, hint: str, spark: SparkSession, tmp_path: Path
) -> None:
    market = Market(tmp_path, spark)
    write(tmp_path / "landing" / "prices", "1.any", text)
    source = FilesSource(str(tmp_path / "landing" / "prices"), format=format)
    said = messages(market.run([replace(market.prices, source=source)]))
    assert f". {hint}" in said, said


def test_hints_for_bad_records() -> None:
    inner = StructType().add("d", "date")
    schema = StructType().add("k", "string").add("at", "timestamp").add("s", inner)
    unit = "A number in {} is a time only with its unit"
    for text, format, timestamps, said in [
        ('{"s": {"d": 19844}, "at": "soon"}', "jsonl", None, unit.format(["s.d"])),
        ('{"s": {"d": 19844}, "at": 7}', "jsonl", {"at": "millis"}, unit.format(["s.d"])),
        ('{"payload": {"after": {"at" :-7}}}', None, None, unit.format(["at"])),
        ('{"k": 1714564800, "at": "soon"}', "jsonl", None, ""),
        ('{"at": 1714564800.5}', "jsonl", "millis", ""),
        ('{"at": "1714564800250"}', "jsonl", None, unit.format(["at"])),
        ('{"at": "1714564800250 ", "s": {"d": "20240501"}}', "jsonl", None, ""),
        ("a;1714564800250", "csv", None, unit.format(["at", "s.d"])),
        ("a;2024-05-01 12;20240501", "csv", None, ""),
        ('{"k": "a", "a', "jsonl", None, ""),
        ("[1, 2]", None, None, ""),
    ]:
        hint = hint_of([text], schema, SimpleNamespace(format=format, timestamps=timestamps))
        assert (hint[: len(said)] if said else hint) == said, text


@pytest.mark.usefixtures("few_rows")
def test_stream_may_keep_records_without_a_key(spark: SparkSession, tmp_path: Path) -> None:
    market = Market(tmp_path, spark)
    sales: Stream = replace(market.sales, null_key="keep")
    market.land("sales", "1.jsonl", record(None, "s1", "1 00:00"), record("a", "s2", "1 00:00"))
    assert market.run([sales]).success
    assert [r["k"] for r in market.store(sales).read().orderBy("offset").collect()] == [None, "a"]


# -- files ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "text", "rows"),
    [
        ("plain.csv", "k,n\na,1\nb,2\n", [(2, "a", 1), (3, "b", 2)]),
        ("other order.csv", "n,k\n1,a\n", [(2, "a", 1)]),
        ("extra [column].csv", "k,note,n\na,so it is,1\n", [(2, "a", 1)]),
        ("bom.csv", "\ufeffk,n\na,1\n", [(2, "a", 1)]),
        ("windows.csv", "k,n\r\na,1\r\nb,2\r\n", [(2, "a", 1), (3, "b", 2)]),
        ("blank lines.csv", "k,n\n\na,1\n   \nb,2\n\n", [(3, "a", 1), (5, "b", 2)]),
        ("quoted.csv", 'k,"n"\n"a,b",1\n"say ""hi""",2\n', [(2, "a,b", 1), (3, 'say "hi"', 2)]),
        ("no end.csv", "k,n\na,1", [(2, "a", 1)]),
        ("nulls.csv", "k,n\na,\n,2\n", [(2, "a", None), (3, None, 2)]),
        ("only header.csv", "k,n\n", []),
        ("too few.csv", "k,n\na\nb,2\n", [(2, None, None, "a"), (3, "b", 2)]),
        ("too many.csv", "k,n\na,1,x\nb,2\n", [(2, None, None, "a,1,x"), (3, "b", 2)]),
        ("no number.csv", "k,n\na,one\nb,2\n", [(2, None, None, "a,one"), (3, "b", 2)]),
        ("plus+percent%20.csv", "k,n\na,1\n", [(2, "a", 1)]),
        ("ümläut {1,2}*.csv", "k,n\nä,1\n", [(2, "ä", 1)]),
    ],
    ids=lambda value: value if isinstance(value, str) and value.endswith(".csv") else "",
)
def test_csv_files(spark: SparkSession, tmp_path: Path, name: str, text: str, rows: list[Any]) -> None:
    write(tmp_path, name, text)
    found = read(spark, FilesSource(str(tmp_path), format="csv"))
    assert found == [(name, *row) for row in rows]


@pytest.mark.usefixtures("few_rows")
def test_csv_header_among_rows_is_quarantined(spark: SparkSession, tmp_path: Path) -> None:
    """A header line among the rows goes to quarantine as unreadable: in a file that was concatenated
    from two, and in a file that is read without a header."""
    schema = StructType().add("k", "string").add("v", "string").add("more", "string")
    write(tmp_path, "1.csv", "v,k\n1,a\nv,k\n2,b\nv,v\n\ufeffv,k\n3,c\n")
    source = FilesSource(str(tmp_path), format="csv", optional=["more"])
    rows = source.read(spark, source.files(), schema).orderBy("_arrival").collect()
    found = [(row["_position"], row["k"], row["v"], row["_reason"]) for row in rows]
    bad = (3, None, None, "unreadable")
    good = [(2, "a", "1", None), bad, (4, "b", "2", None), (5, "v", "v", None)]
    assert found == [*good, (6, *bad[1:]), (7, "c", "3", None)]
    source = FilesSource(str(tmp_path), format="csv", options={"header": "false"})
    two = StructType().add("v", "string").add("k", "string")
    rows = source.read(spark, source.files(), two).orderBy("_arrival").collect()
    assert [row["_position"] for row in rows if row["_reason"]] == [1, 3, 6]
    # As many comparisons in one chain would overflow the stack of Spark's planner.
    wide = StructType([StructField(f"c{n}", StringType()) for n in range(500)])
    (tmp_path / "wide").mkdir()
    write(tmp_path / "wide", "1.csv", "\n".join([",".join(wide.names)] * 2))
    source = FilesSource(str(tmp_path / "wide"), format="csv")
    assert {"_reason", *wide.names} <= {*source.read(spark, source.files(), wide).columns}


@pytest.mark.usefixtures("few_rows")
def test_csv_files_with_different_headers(spark: SparkSession, tmp_path: Path) -> None:
    write(tmp_path, "1.csv", "k,n\na,1\n")
    write(tmp_path, "2.csv", "n,k\n2,b\n")
    write(tmp_path, "3.csv", "n,x,k\n3,?,c\n")
    write(tmp_path, "_not this.csv", "k,n\nz,9\n")
    write(tmp_path, ".nor this.csv", "k,n\nz,9\n")
    assert read(spark, FilesSource(str(tmp_path), format="csv")) == [
        ("1.csv", 2, "a", 1),
        ("2.csv", 2, "b", 2),
        ("3.csv", 2, "c", 3),
    ]


@pytest.mark.usefixtures("few_rows")
def test_csv_missing_column(spark: SparkSession, tmp_path: Path) -> None:
    write(tmp_path, "1.csv", "k,m\na,1\n")
    message = r"1\.csv: expected columns \['n'\], but the file has only \['k', 'm'\]"
    with pytest.raises(SourceError, match=message):
        read(spark, FilesSource(str(tmp_path), format="csv"))


@pytest.mark.parametrize(
    ("text", "options", "said"),
    [
        ("k;n\na;1\n", {}, "separated by ',', got 'k;n': set options={'sep': ';'}"),
        ("m\tn\na\t1\n", {}, "separated by ',', got 'm\\tn': set options={'sep': '\\t'}"),
        ("n,k\n1,a\n", {"sep": "|"}, "separated by '|', got 'n,k': set options={'sep': ','}"),
        ("sep=;\nk;n\na;1\n", {"sep": ";"}, "got 'sep=;', which only Excel reads: remove the line"),
        ("sep=,\nk,n\na,1\n", {}, "got 'sep=,', which only Excel reads: remove the line"),
    ],
)
def test_csv_with_another_separator(
    spark: SparkSession, tmp_path: Path, text: str, options: dict[str, str], said: str
) -> None:
    write(tmp_path, "1.csv", text)
    with pytest.raises(SourceError, match=re.escape(said)):
        read(spark, FilesSource(str(tmp_path), format="csv", options=options))


@pytest.mark.usefixtures("few_rows")
def test_csv_options(spark: SparkSession, tmp_path: Path) -> None:
    write(tmp_path, "1.csv", "k;n\na;NA\n'b;''c';2\n")
    source = FilesSource(
        str(tmp_path), format="csv", options={"sep": ";", "nullValue": "NA", "quote": "'"}
    )
    assert read(spark, source) == [("1.csv", 2, "a", None), ("1.csv", 3, "b;'c", 2)]


def test_jsonl_compressed_and_plain(spark: SparkSession, tmp_path: Path) -> None:
    (tmp_path / "1.jsonl.gz").write_bytes(
        gzip.compress(b'{"k":"a","n":1}\n{"k":"b","n":"two"}\n{"k":"c"}\n')
    )
    write(tmp_path, "2.jsonl", '{"n":4,"k":"d","more":[1]}\n[1]\n"text"\n{}\n')
    assert read(spark, FilesSource(str(tmp_path))) == [
        ("1.jsonl.gz", 1, "a", 1),
        ("1.jsonl.gz", 2, None, None, '{"k":"b","n":"two"}'),
        ("1.jsonl.gz", 3, "c", None),
        ("2.jsonl", 1, "d", 4),
        ("2.jsonl", 2, None, None, "[1]"),
        ("2.jsonl", 3, None, None, '"text"'),
        ("2.jsonl", 4, None, None, "{}"),
    ]


@pytest.mark.usefixtures("few_rows")
def test_csv_compressed(spark: SparkSession, tmp_path: Path) -> None:
    (tmp_path / "1.csv.gz").write_bytes(gzip.compress(b"n,k\n1,a\n"))
    assert read(spark, FilesSource(str(tmp_path), format="csv")) == [("1.csv.gz", 2, "a", 1)]


def test_parquet_files(spark: SparkSession, tmp_path: Path) -> None:
    import pandas as pd

    pd.DataFrame({"n": [1, 2], "k": ["a", None]}).astype({"n": "int32"}).to_parquet(
        tmp_path / "1 [a].parquet"
    )
    pd.DataFrame({"k": ["c"], "n": [3], "x": [0.5]}).astype({"n": "int32"}).to_parquet(
        tmp_path / "2.parquet"
    )
    assert read(spark, FilesSource(str(tmp_path), format="parquet")) == [
        ("1 [a].parquet", 1, "a", 1),
        ("1 [a].parquet", 2, None, 2),
        ("2.parquet", 1, "c", 3),
    ]
    short = StructType([StructField("k", StringType()), StructField("n", ShortType())])
    with pytest.raises(SourceError, match=r"1 \[a\]\.parquet: n is int, expected smallint"):
        read(spark, FilesSource(str(tmp_path), format="parquet"), short)
    more = StructType([*ROW.fields, StructField("y", StringType())])
    with pytest.raises(SourceError, match=r"expected columns \['y'\]"):
        read(spark, FilesSource(str(tmp_path), format="parquet"), more)


def test_long_file_is_numbered_across_splits(spark: SparkSession, tmp_path: Path) -> None:
    old = spark.conf.get("spark.sql.files.maxPartitionBytes")
    write(tmp_path, "1.jsonl", "".join(f'{{"k":"{i}","n":{i}}}\n' for i in range(500)))
    write(tmp_path, "2.jsonl", "".join(f'{{"k":"{i}","n":{500 + i}}}\n' for i in range(100)))
    spark.conf.set("spark.sql.files.maxPartitionBytes", "2000")
    try:
        source = FilesSource(str(tmp_path))
        rows = source.read(spark, source.pending({}), ROW).orderBy("_arrival").collect()
    finally:
        spark.conf.set("spark.sql.files.maxPartitionBytes", old)
    assert [r["_arrival"] for r in rows] == list(range(600))
    assert [r["n"] for r in rows] == list(range(600))
    assert [r["_position"] for r in rows] == [*range(1, 501), *range(1, 101)]


@pytest.mark.parametrize(("largest", "scans"), [("128MB", 1), ("2000", 2), ("2kb", 2)])
def test_line_numbers_need_no_second_scan_for_one_task(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, largest: str, scans: int
) -> None:
    """If a single task reads the file, line numbers need no second scan. Otherwise they need one."""
    write(tmp_path, "1.jsonl", "".join(f'{{"k":"{i}","n":{i}}}\n' for i in range(500)))
    source = FilesSource(str(tmp_path))
    with settings(spark, {"spark.sql.files.maxPartitionBytes": largest}):
        rows: Any = source.read(spark, source.pending({}), ROW)
        found = rows.collect()
        plan: str = rows._jdf.queryExecution().executedPlan().toString()
        # An adaptive plan shows its final and its initial plan, each with the same scans.
        assert plan.split("Initial Plan")[0].count("FileScan text") == scans
    assert [(r["_arrival"], r["n"], r["_position"]) for r in sorted(found, key=lambda r: r["n"])] == [
        (i, i, i + 1) for i in range(500)
    ]


def test_times_are_utc(spark: SparkSession, tmp_path: Path) -> None:
    schema = StructType([StructField("t", TimestampType())])
    write(
        tmp_path,
        "1.csv",
        "t\n2024-03-31T02:30:00\n2024-03-31T02:30:00Z\n2024-03-31T02:30:00.000001+02:00\n",
    )
    rows = FilesSource(str(tmp_path), format="csv")
    found = rows.read(spark, rows.files(), schema).selectExpr("cast(t as string) t", "_arrival")
    assert [r["t"] for r in found.orderBy("_arrival").collect()] == [
        "2024-03-31 02:30:00",
        "2024-03-31 02:30:00",
        "2024-03-31 00:30:00.000001",
    ]


def test_changed_consumed_file_is_refused(tmp_path: Path) -> None:
    write(tmp_path, "1.jsonl", "{}\n")
    source = FilesSource(str(tmp_path))
    consumed = source.pin(None).consumed()
    assert source.pending(consumed) == []
    write(tmp_path, "1.jsonl", "{}\n{}\n")
    with pytest.raises(
        SourceError, match=r"1 consumed file in .* changed .* 1\.jsonl: 3 bytes then, 6 now"
    ):
        source.pending(consumed)
    (tmp_path / "1.jsonl").unlink()
    assert source.pending(consumed) == [], "a consumed file may go away"


def test_files_taken_by_run(tmp_path: Path) -> None:
    for name in ("b.jsonl", "a.jsonl", "c.csv", "d.jsonl", "_tmp.jsonl", ".e.jsonl"):
        write(tmp_path, name, "{}\n")
    (tmp_path / "f.jsonl").mkdir()
    source = FilesSource(str(tmp_path), pattern="*.jsonl", max_files_per_run=2)
    assert [f.name for f in source.files()] == ["a.jsonl", "b.jsonl", "d.jsonl"]
    assert [f.name for f in source.pending({})] == ["a.jsonl", "b.jsonl"]
    before = {"a.jsonl": 3}  # the form that earlier versions of the library stored
    assert [f.name for f in source.pending(before)] == ["b.jsonl", "d.jsonl"]
    assert [f.name for f in source.pending({}, ["d.jsonl"])] == ["d.jsonl"]
    assert source.pending(before, ["a.jsonl"]) == []
    said = r"expected the files \['x\.jsonl'\] of the run config, which do not exist; put them back, "
    with pytest.raises(SourceError, match=said):
        source.pending({}, ["x.jsonl"])


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"format": "xml"}, "must be 'jsonl', 'csv' or 'parquet', got 'xml'"),
        ({"max_bad_share": 2}, "max_bad_share must be between 0 and 1, got 2"),
        ({"max_clock_skew": -timedelta(days=1)}, "max_clock_skew must be 0 or more, got -1 day"),
        ({"max_files_per_run": 0}, "max_files_per_run must be 1 or more, got 0"),
    ],
)
def test_invalid_source_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(SourceError, match=said):
        FilesSource("somewhere", **options)
