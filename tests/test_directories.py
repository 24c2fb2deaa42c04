"""Directories of other writers: sub-directories, columns in paths, compression, encodings."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import posixpath
import re
import tarfile
import zipfile
import zlib
from dataclasses import replace
from datetime import datetime, timezone
from decimal import Decimal
from pathlib import Path
from typing import Any, cast

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import (
    ArrayType,
    CharType,
    DataType,
    IntegerType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
    VarcharType,
)

from tests.market import Market, messages, record
from tests.test_quarantine import ROW, read, write
from vt_dagster import FilesSource, SnapshotSource
from vt_dagster.errors import SourceError
from vt_dagster.sources.consumed_files import (
    Consumed,
    FileInfo,
    Memory,
    files_in,
    matches,
    remembered,
)
from vt_dagster.sources.message_formats import Json
from vt_dagster.sources.text_formats import FOLLOWED, REFUSED
from vt_dagster.spark.settings import small_run
from vt_dagster.topology.schema import differences, same_types

pytestmark = pytest.mark.usefixtures("few_rows")


# -- which files are there ---------------------------------------------------------------------------


def test_subdirectories_are_read(spark: SparkSession, tmp_path: Path) -> None:
    market = Market(tmp_path, spark)
    names = [
        "dt=2026-11-24/hour=23/part-0.jsonl",
        "dt=2026-11-25/part-0.jsonl",
        "dt=2026-11-25/part-1 +%20é.jsonl",
        "part-0.jsonl",
    ]
    for number, name in enumerate(names):
        Path(market.prices.source.path, name).parent.mkdir(parents=True, exist_ok=True)
        market.land("prices", name, record(f"k{number}", "p", "1 00:00"), "{broken")
    for name in ("_temporary/0/x.jsonl", ".hidden/x.jsonl", "a._COPYING_/x.jsonl", "dt=1/_x.jsonl"):
        Path(market.prices.source.path, name).parent.mkdir(parents=True, exist_ok=True)
        market.land("prices", name, record("hidden", "p", "1 00:00"))
    source = cast(FilesSource, market.prices.source)
    table = replace(market.prices, source=replace(source, max_bad_share=0.5))
    result = market.run([table])
    assert result.success, messages(result)
    store = market.store(table)
    assert [r["k"] for r in store.read().orderBy("k").collect()] == ["k0", "k1", "k2", "k3"]
    rejected = store.quarantine()
    assert rejected is not None
    assert [(r["source"], r["position"]) for r in rejected.orderBy("source").collect()] == [
        (name, 2) for name in names
    ]
    late = "dt=2026-11-23/part-0.jsonl"
    Path(source.path, late).parent.mkdir()
    market.land("prices", late, record("k4", "p", "1 00:00"))
    head = store.head()
    assert head is not None
    news = source.news(head.commit, store.consumed_files(head))
    assert news.config == {"files": [late]}, "a sensor asks for what is new, whatever its name"
    assert market.run([table]).success
    assert store.read().count() == 5
    only_top = replace(source, recursive=False)
    assert [f.name for f in only_top.files()] == ["part-0.jsonl"]


@pytest.mark.parametrize(
    ("pattern", "name", "fits"),
    [
        ("*", "a/b/c.csv", True),
        ("*.csv", "a/b/c.csv", True),
        ("*.csv", "a/b.csv/c", False),
        ("dt=*/*.csv", "dt=1/c.csv", True),
        ("dt=*/*.csv", "c.csv", False),
        ("dt=*/*.csv", "x/dt=1/c.csv", False),
        ("dt=*/*.csv", "dt=1/hour=2/c.csv", False),
        ("dt=*/**/*.csv", "dt=1/hour=2/c.csv", True),
        ("**/*.csv", "c.csv", True),
        ("**/hour=0?/*", "dt=1/hour=02/c.csv", True),
        ("dt=1/**", "dt=1/hour=2/c.csv", True),
        ("/dt=1/c.csv", "dt=1/c.csv", True),
    ],
)
def test_path_patterns(pattern: str, name: str, fits: bool) -> None:
    assert matches(name, pattern) is fits


def test_symbolic_links(tmp_path: Path) -> None:
    landing, outside = tmp_path / "landing", tmp_path / "outside"
    write(landing / "dt=1", "a.jsonl", "{}\n")
    write(outside / "deep", "b.jsonl", "{}\n")
    (landing / "latest").symlink_to(landing / "dt=1")
    (landing / "dt=1" / "up").symlink_to(landing)
    (landing / "dt=1" / "far up").symlink_to(tmp_path)
    (landing / "elsewhere").symlink_to(outside)
    (landing / "once more").symlink_to(outside / "deep")
    (outside / "back").symlink_to(landing)
    (landing / "nothing").symlink_to(tmp_path / "gone")
    names = [f.name for f in FilesSource(str(landing)).files()]
    assert names == ["dt=1/a.jsonl", "elsewhere/deep/b.jsonl"]


@pytest.mark.parametrize(
    ("log", "kind"),
    [
        ("_delta_log/00000000000000000000.json", "a Delta table"),
        (".hoodie/hoodie.properties", "a Hudi table"),
        (
            "metadata/00000-7d1e5d8c-6a0b-4a3e-9f43-2a9d1c7b6e55.metadata.json",
            "an Iceberg table",
        ),
    ],
)
def test_files_of_a_table_are_refused(tmp_path: Path, log: str, kind: str) -> None:
    """The files of a table also have rows that it has deleted or replaced."""
    fs = fsspec.filesystem("memory")
    for name in ("a/b.parquet", "sales/dt=1/c.parquet", f"sales/{log}"):
        write(tmp_path / "landing" / posixpath.dirname(name), posixpath.basename(name), "")
        fs.pipe_file(f"/landing/{name}", b"")
    try:
        for place in (str(tmp_path / "landing"), "memory://landing"):
            with pytest.raises(SourceError, match=f"'sales' in '.*landing' is {kind}"):
                files_in(place, "*.parquet", "files")
            with pytest.raises(SourceError, match=f"'.*landing/sales' is {kind}"):
                files_in(f"{place}/sales", "*.parquet", "files")
            assert [f.name for f in files_in(place, "a/*", "files")] == ["a/b.parquet"]
            assert files_in(f"{place}/sales", "*.jsonl", "files", recursive=False) == []
    finally:
        fs.rm("/landing", recursive=True)


def test_object_store_is_listed_once() -> None:
    fs = fsspec.filesystem("memory")
    calls = list[str]()
    for name in ("a.csv", "dt=1/b.csv", "_x/c.csv", "dt=1/.tmp/d.csv", "_dt=2/e.csv", "dt=1/_f.csv"):
        fs.pipe_file(f"/landing/{name}", b"{}")
    original = fs.find
    try:
        type(fs).find = lambda self, *args, **more: calls.append("find") or original(*args, **more)
        assert [f.name for f in files_in("memory://landing", "*", "files")] == [
            "_dt=2/e.csv",
            "a.csv",
            "dt=1/b.csv",
        ]
    finally:
        del type(fs).find
        fs.rm("/landing", recursive=True)
    assert calls == ["find"]


def test_s3_and_s3a_paths_are_equal() -> None:
    """A consumed S3 file is stored with ``s3://``, and known under ``s3://`` and ``s3a://``."""
    known = Memory({"s3://lake/landing/a.csv": Consumed(1, "stamp", "digest", 7)})
    for scheme in ("s3", "s3a"):
        assert known.batch_of(FileInfo("a.csv", f"{scheme}://lake/landing/a.csv", 1, "stamp")) == 7


def _moved(tmp_path: Path, before: str, after: str, keep: bool = False) -> bool:
    """Whether a consumed file is consumed again if it is at another place."""
    source = FilesSource(str(tmp_path))
    write((tmp_path / before).parent, Path(before).name, "{}\n")
    consumed = source.pin(None).consumed()
    assert source.pending(consumed) == []
    write((tmp_path / after).parent, Path(after).name, "{}\n")
    if not keep:
        (tmp_path / before).unlink()
    return source.pending(consumed) != []


@pytest.mark.parametrize(
    ("before", "after", "keep", "taken"),
    [
        ("a.jsonl", "archive/a.jsonl", False, False),
        ("incoming/a.jsonl", "a.jsonl", False, False),
        ("2026/11/a.jsonl", "archive/2026/11/a.jsonl", False, False),
        # the same content for another day is another delivery, even if the first file is gone
        ("dt=1/a.jsonl", "dt=2/a.jsonl", True, True),
        ("dt=1/a.jsonl", "dt=2/a.jsonl", False, True),
        ("2026/11/24/a.jsonl", "2026/11/25/a.jsonl", False, True),
        ("a.jsonl", "dt=1/a.jsonl", False, True),
        ("a.jsonl", "b/a.jsonl", True, True),
        ("dt=1/a.jsonl", "archive/dt=1/a.jsonl", False, False),
    ],
)
def test_moved_files_are_not_consumed_again(
    tmp_path: Path, before: str, after: str, keep: bool, taken: bool
) -> None:
    assert _moved(tmp_path, before, after, keep) is taken


def test_consumed_files_stay_known_after_directory_move(tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    for name in ("a.jsonl", "dt=1/b.jsonl"):
        write((old / name).parent, Path(name).name, "{}\n")
    consumed = FilesSource(str(old)).pin(None).consumed()
    old.rename(new)
    assert FilesSource(str(new)).pending(consumed) == []
    there = FilesSource(str(new)).files()
    again = remembered(consumed, [], there, 7)
    assert {f.path: Memory(again, there).batch_of(f) for f in there} == {f.path: 1 for f in there}
    # a run may request a consumed file by its whole name: then it has no new files
    assert FilesSource(str(new)).pin(None, ["dt=1/b.jsonl"], consumed=again).empty


def test_removed_consumed_files_are_detected(tmp_path: Path) -> None:
    """Files with the same name in two directories are two files. A file that was moved is not gone."""
    for name in ("dt=1/a.jsonl", "dt=2/a.jsonl", "b.jsonl"):
        write((tmp_path / name).parent, Path(name).name, f'{{"k": "{name}"}}\n')
    source = FilesSource(str(tmp_path))
    consumed = source.pin(None).consumed()
    of_another_source = {"deliveries": {"a run": ["", 1]}}
    assert Memory({**consumed, **of_another_source}, source.files()).gone() == []
    (tmp_path / "dt=1" / "a.jsonl").unlink()
    (tmp_path / "archive").mkdir()
    (tmp_path / "b.jsonl").rename(tmp_path / "archive" / "b.jsonl")
    (gone,) = Memory(consumed, source.files()).gone()
    assert gone.endswith("/dt=1/a.jsonl")
    # also if it was moved twice
    known = remembered(consumed, [], source.files(), 2)
    (tmp_path / "old").mkdir()
    (tmp_path / "archive").rename(tmp_path / "old" / "archive")
    assert Memory(known, source.files()).gone() == [gone]


# -- columns in paths --------------------------------------------------------------------------------

KINDS = "k string, n int, dt date, at timestamp, price decimal(10,2), country string, hour int"


def _schema(spark: SparkSession, kinds: str) -> StructType:
    made: Any = StructType.fromDDL(kinds)
    return made


def test_partition_columns_in_paths(spark: SparkSession, tmp_path: Path) -> None:
    def line(n: int, **more: Any) -> str:
        return json.dumps({"k": "a", "n": n, **more}) + "\n"

    places = {
        "1.jsonl": line(1, hour=5),
        "at=2024-01-05 10%3A00%3A00.123456/1.jsonl": line(2),
        "country=__HIVE_DEFAULT_PARTITION__/dt=2024-01-05/1.jsonl": line(3),
        "country=a%2Fb%25 +=é/HOUR=07/x=y/1.jsonl": line(4),
        "dt=yesterday/1.jsonl": line(5),
        "hour=1/1.jsonl": line(6) + line(7, hour=1) + line(8, Hour=2),
        "hour=3000000000/1.jsonl": line(9),
        "price=1.5/1.jsonl": line(10),
        "price=1.50/dt=2024-02-30/1.jsonl": line(11),
        "price=1.555/1.jsonl": line(12),
    }
    for name, text in places.items():
        write((tmp_path / name).parent, Path(name).name, text)
    source, schema = FilesSource(str(tmp_path)), _schema(spark, KINDS)
    rows = {r["_arrival"]: r for r in source.read(spark, source.files(), schema).collect()}
    assert [rows[n]["_source"] for n in sorted(rows)] == [
        name for name, text in places.items() for _ in text.splitlines()
    ]
    found = {
        n + 1: {c: r[c] for c in schema.names[2:] if r[c] is not None}
        if r["_reason"] is None
        else r["_reason"]
        for n, r in rows.items()
    }
    moment = datetime(2024, 1, 5, 10, 0, 0, 123456, tzinfo=timezone.utc)
    assert found.pop(2)["at"].timestamp() == moment.replace(tzinfo=None).timestamp()
    assert found == {
        1: {"hour": 5},
        3: {"dt": datetime(2024, 1, 5).date()},
        4: {"country": "a/b% +=é", "hour": 7},
        5: "unreadable",
        6: {"hour": 1},
        7: "unreadable",
        8: "unreadable",
        9: "unreadable",
        10: {"price": Decimal("1.50")},
        11: "unreadable",
        12: "unreadable",
    }


def test_spark_partitioned_table(spark: SparkSession, tmp_path: Path) -> None:
    rows = [("a", 1, "x/y"), ("b", 2, None), ("c", 3, "")]
    schema = _schema(spark, "k string, n int, part string")
    for format in ("parquet", "csv", "json"):
        frame = spark.createDataFrame(rows, schema).coalesce(1)
        frame.write.option("header", True).partitionBy("part").format(format).save(
            f"{tmp_path}/{format}"
        )
        kind: Any = "jsonl" if format == "json" else format
        source = FilesSource(str(tmp_path / format), kind)
        found = source.read(spark, source.files(), schema).orderBy("n").collect()
        # Spark writes an empty text as null
        assert [(r["k"], r["n"], r["part"]) for r in found] == [*rows[:2], ("c", 3, None)], format
    shop = tmp_path / "dumps"
    (tmp_path / "parquet").rename(shop / "2026-11-25") if shop.mkdir() is None else None
    dumps = SnapshotSource(str(shop), dump_time="%Y-%m-%d")
    dump = dumps.dumps()[0]
    assert [Path(f.name).parent.name for f in dump.files] == [
        "part=__HIVE_DEFAULT_PARTITION__",
        "part=x%2Fy",
    ]
    before = {"2026-11-25": {"bytes": 0, "time": 0}}  # sub-directories were not read before
    assert dumps.pin(None, consumed=before).dump is None


def test_column_in_path_and_file_is_refused(spark: SparkSession, tmp_path: Path) -> None:
    schema = _schema(spark, "k string, n int")
    write(tmp_path / "csv" / "n=1", "1.csv", "k,n\na,2\n")
    write(tmp_path / "jsonl" / "n=1", "1.jsonl", '{"k":"a","n":2}\n')
    (tmp_path / "parquet" / "n=1").mkdir(parents=True)
    pq.write_table(pa.table({"k": ["a"], "n": pa.array([2], "int32")}), tmp_path / "parquet/n=1/1")
    for format in ("csv", "jsonl", "parquet"):
        source = FilesSource(str(tmp_path / format), cast(Any, format))
        with pytest.raises(SourceError, match=r"expected column 'n' in its path or in the file, got"):
            source.read(spark, source.files(), schema)
        in_file = replace(source, path_columns=False)
        assert [r["n"] for r in in_file.read(spark, in_file.files(), schema).collect()] == [2]
    write(tmp_path / "twice" / "k=1" / "K=2", "1.jsonl", '{"n":2}\n')
    write(tmp_path / "tags" / "tags=1", "1.jsonl", '{"n":2}\n')
    write(tmp_path / "lacks" / "x=1", "1.csv", "k\na\n")
    for name, kinds, said in (
        ("twice", "k string, n int", "expected k= once in its path, got it more than once"),
        ("tags", "k string, n int, tags array<string>", "its type is array<string>; rename"),
        ("lacks", "k string, n int", r"expected columns \['n'\]"),
    ):
        source = FilesSource(str(tmp_path / name), "csv" if name == "lacks" else "jsonl")
        with pytest.raises(SourceError, match=said):
            source.read(spark, source.files(), _schema(spark, kinds))


# -- what a file is ----------------------------------------------------------------------------------

LINES = b'{"k":"a","n":1}\n'


def _zipped(text: bytes) -> bytes:
    found = io.BytesIO()
    with zipfile.ZipFile(found, "w") as archive:
        archive.writestr("1.jsonl", text)
    return found.getvalue()


def _tarred(text: bytes) -> bytes:
    found = io.BytesIO()
    with tarfile.open(fileobj=found, mode="w") as archive:
        about = tarfile.TarInfo("1.jsonl")
        about.size = len(text)
        archive.addfile(about, io.BytesIO(text))
    return found.getvalue()


def _parquet() -> bytes:
    found = io.BytesIO()
    pq.write_table(pa.table({"k": ["a"]}), found)
    return found.getvalue()


def _orc() -> bytes:
    from pyarrow import orc

    found = io.BytesIO()
    orc.write_table(pa.table({"k": ["a"]}), found)
    return found.getvalue()


GOOD = {
    "plain.jsonl": LINES,
    "gzip.jsonl.gz": gzip.compress(LINES),
    "upper.jsonl.GZ": gzip.compress(LINES),
    "two members.gz": gzip.compress(LINES) + gzip.compress(LINES),
    "bzip2.bz2": bz2.compress(LINES),
    "zlib.deflate": zlib.compress(LINES),
    "empty.jsonl": b"",
    "empty.gz": b"",
    "nothing.gz": gzip.compress(b""),
    "mark.jsonl": "\ufeff".encode() + LINES,
    "mark.gz": gzip.compress("\ufeff".encode() + LINES),
}
BAD: dict[str, tuple[bytes, str]] = {
    "1.xz": (lzma.compress(LINES), "got an xz file: decompress it"),
    "1.jsonl": (lzma.compress(LINES), "got an xz file"),
    "1.lzma": (lzma.compress(LINES, lzma.FORMAT_ALONE), "got an LZMA file"),
    "1.zip": (_zipped(LINES), "got a zip archive"),
    "zip.jsonl": (_zipped(LINES), "got a zip archive"),
    "1.gzip": (gzip.compress(LINES), "name that ends with .gz, .* got a gzip file under another name"),
    "gzip.jsonl": (gzip.compress(LINES), "got a gzip file under another name: rename it"),
    "1.zlib": (zlib.compress(LINES), "name that ends with .deflate, .* got a zlib file under another"),
    "best.jsonl": (zlib.compress(LINES, 9), "got a zlib file under another name: rename it"),
    "bz.jsonl": (bz2.compress(LINES), "got a bzip2 file under another name: rename it"),
    "bz.gz": (bz2.compress(LINES), "got a bzip2 file under another name"),
    "1.jsonl.gz": (LINES, "expected a gzip file, as its name says, got another content"),
    "1.bz2": (LINES, "expected a bzip2 file, as its name says, got another content"),
    "cut.gz": (gzip.compress(LINES * 50)[:-9], "expected a whole compressed file"),
    "cut.deflate": (zlib.compress(LINES)[:-6], "expected a whole compressed file"),
    "plain.deflate": (LINES, "expected a whole compressed file"),
    "1.zst": (b"\x28\xb5\x2f\xfd\x20\x00\x01\x00\x00", "got a zstd file"),
    "plain.zst": (LINES, "got a name that ends with .zst"),
    "plain.lz4": (LINES, "got a name that ends with .lz4"),
    "plain.snappy": (LINES, "got a name that ends with .snappy"),
    "1.lz4": (b"\x04\x22\x4d\x18\x64\x40", "got an lz4 file"),
    "1.sz": (b"\xff\x06\x00\x00sNaPpY", "got a snappy file"),
    "twice.gz": (gzip.compress(gzip.compress(LINES)), "got a gzip file"),
    "1.tar.gz": (gzip.compress(_tarred(LINES)), "got a tar archive"),
    "1.tar": (_tarred(LINES), "got a tar archive"),
    "1.parquet": (_parquet(), "got a Parquet file: correct the source's format"),
    "parquet.gz": (gzip.compress(_parquet()), "got a Parquet file"),
    "1.orc": (_orc(), "got an ORC file"),
    "1.avro": (b"Obj\x01\x04\x14avro.codec", "got an Avro file"),
    "1.xls": (bytes.fromhex("d0cf11e0a1b11ae1"), "got a Microsoft Office file"),
    "u16.jsonl": (LINES.decode().encode("utf-16"), "got a byte order mark of UTF-16LE: set options="),
    "u16be.jsonl": (b"\xfe\xff" + LINES.decode().encode("utf-16-be"), "mark of UTF-16BE"),
    "u32.jsonl": (LINES.decode().encode("utf-32"), "mark of UTF-32: convert the file"),
    "u16.gz": (gzip.compress(LINES.decode().encode("utf-16")), "mark of UTF-16LE"),
}


def test_file_format_is_detected_by_magic_bytes(spark: SparkSession, tmp_path: Path) -> None:
    for folder, some in (
        ("good", GOOD),
        ("bad", {name: content for name, (content, _) in BAD.items()}),
    ):
        for name, content in some.items():
            (tmp_path / folder / "day").mkdir(parents=True, exist_ok=True)
            (tmp_path / folder / "day" / name).write_bytes(content)
    good = FilesSource(str(tmp_path / "good"))
    found = read(spark, good)
    assert {row[1:] for row in found} == {(1, "a", 1), (2, "a", 1)}
    some = {f"day/{name}" for name, content in GOOD.items() if name[:5] not in ("empty", "nothi")}
    assert {row[0] for row in found} == some
    bad = FilesSource(str(tmp_path / "bad"), on_bad_file="quarantine")
    rows = bad.read(spark, bad.files(), ROW).collect()
    said = {r["_source"]: (r["_position"], r["_reason"], r["_raw"]) for r in rows}
    assert {*said} == {f"day/{name}" for name in BAD}
    for name, (_, wanted) in BAD.items():
        position, reason, raw = said[f"day/{name}"]
        assert (position, reason) == (0, "unreadable_file"), name
        assert re.search(wanted, raw), (name, raw)
    csv = FilesSource(str(tmp_path / "bad"), "csv", on_bad_file="quarantine")
    assert {r["_reason"] for r in csv.read(spark, csv.files(), ROW).collect()} == {"unreadable_file"}
    parquet = FilesSource(str(tmp_path / "bad"), "parquet", on_bad_file="quarantine")
    told = {r["_source"]: r["_raw"] for r in parquet.read(spark, parquet.files(), ROW).collect()}
    assert "expected a Parquet file, got a zip archive: decompress" in told["day/1.zip"]


@pytest.mark.parametrize("header", ["ORC,n", "PAR1,n", "BZh9,n", "PK,n", "Obj,n", "%PDF,n", "x^2,n"])
def test_text_starting_like_magic_bytes(spark: SparkSession, tmp_path: Path, header: str) -> None:
    write(tmp_path, "1.csv", f"{header}\n" + 300 * "a,1\n")  # more than what is looked at
    schema = StructType([StructField(header.split(",")[0], StringType()), ROW.fields[1]])
    found = read(spark, FilesSource(str(tmp_path), "csv"), schema)
    assert found == [("1.csv", line, "a", 1) for line in range(2, 302)]


# -- options -----------------------------------------------------------------------------------------


def test_every_spark_reader_option_is_known(spark: SparkSession) -> None:
    """Each option in Spark's own lists either has its effect, or is refused."""
    catalyst = cast(Any, spark)._jvm.org.apache.spark.sql.catalyst
    for kind, names in (
        ("csv", catalyst.csv.CSVOptions.getAllOptions()),
        ("jsonl", catalyst.json.JSONOptions.getAllOptions()),
        ("message", catalyst.json.JSONOptions.getAllOptions()),
    ):
        there = {str(names.toSeq().apply(n)) for n in range(names.size())}
        known = {*FOLLOWED[kind], *REFUSED, "charset", "codec", "delimiter"}
        if kind == "message":
            known |= {"encoding", "lineSep"}
        assert there <= known, sorted(there - known)


def _refused() -> list[tuple[str, str]]:
    kinds = ("jsonl", "csv", "parquet", "message")
    names = {n for some in FOLLOWED.values() for n in some} | {*REFUSED}
    return [(k, n) for k in kinds for n in sorted(names) if n not in FOLLOWED[k]]


def _made(kind: str, options: dict[str, Any]) -> Any:
    if kind == "message":
        return Json(options=options)
    FilesSource("somewhere", cast(Any, kind), options=options)
    return SnapshotSource("somewhere", cast(Any, kind), options=options, dump_time="modified")


@pytest.mark.parametrize(("kind", "name"), _refused())
def test_ineffective_option_is_refused(kind: str, name: str) -> None:
    for written in (name, name.upper()):
        with pytest.raises(SourceError) as error:
            _made(kind, {written: "something"})
        assert f"expected no option {written!r}, which has no effect: " in str(error.value)


@pytest.mark.parametrize(
    ("kind", "options", "said"),
    [
        (
            "csv",
            {"nullvalues": "NA"},
            r"an option of Spark, got 'nullvalues'; did you mean 'nullValue'\? expected some",
        ),
        ("csv", {"seperator": ";"}, "expected an option of Spark, got 'seperator'; "),
        ("jsonl", {"allowComment": "true"}, "did you mean 'allowComments'"),
        ("message", {"allowComment": "true"}, "did you mean 'allowComments'"),
        (
            "csv",
            {"multiline": "true"},
            "'multiline', which has no effect: a record is one",
        ),
        ("csv", {"mode": "DROPMALFORMED"}, "bad records go to quarantine"),
        ("csv", {"locale": "de-DE"}, "numbers and dates are read without a locale"),
        ("jsonl", {"sep": ";"}, "an option of other sources, not of JSON lines"),
        ("csv", {"sep": ";", "delimiter": ";"}, "the option 'sep' is given twice"),
        ("csv", {"charset": "latin1", "encoding": "latin1"}, "'encoding' is given twice"),
        ("csv", {"encoding": "latin-99"}, "expected the option 'encoding' to be an encoding that"),
        ("csv", {"encoding": "cp500"}, "has no line feed of one byte"),
        ("csv", {"encoding": "utf-32"}, "has no line feed of one byte"),
        ("csv", {"encoding": "hex"}, "to be an encoding that"),
        ("csv", {"header": "yes"}, "expected the option 'header' to be 'true' or 'false', got 'yes'"),
        ("csv", {"quote": "''"}, "expected the option 'quote' to be one character"),
        ("csv", {"comment": "//"}, "expected the option 'comment' to be one character"),
        ("csv", {"sep": ""}, "expected the option 'sep' to be one character or more"),
        ("csv", {"lineSep": "abc"}, "expected the option 'lineSep' to be one or two characters"),
        ("csv", {"maxColumns": "many"}, "expected the option 'maxColumns' to be a whole number"),
        ("csv", {"unescapedQuoteHandling": "GUESS"}, "to be one of STOP_AT_CLOSING_QUOTE"),
        ("csv", {"nullValue": None}, "expected a text for the option 'nullValue', got None"),
        ("csv", {"timestampFormat": "EEE, d MMM y 'at' H"}, r"without the letters \['E'\], got "),
        ("csv", {"timestampFormat": "HH:mm"}, "to have a year, got 'HH:mm'"),
        ("csv", {"timestampNTZFormat": "dd.MM. HH:mm"}, "to have a year, got"),
        ("jsonl", {"dateFormat": "yyyy-mm-dd"}, r"to have a month \(M\) for its day, got 'yyyy-mm-dd'"),
        ("csv", {"timestampFormat": "d.M.yy hh:mm"}, r"to have a \(AM or PM\) for its hour of 12, got"),
        ("parquet", {"mergeSchema": "true"}, "'mergeSchema', which has no effect"),
    ],
)
def test_invalid_option_is_refused(kind: str, options: dict[str, Any], said: str) -> None:
    with pytest.raises(SourceError, match=said):
        _made(kind, options)


def test_default_options_are_accepted() -> None:
    given = {"mode": "PERMISSIVE", "multiLine": False, "inferSchema": "false", "Header": True}
    assert FilesSource("somewhere", "csv", options=cast(Any, given)).options == {"header": "true"}
    tab = FilesSource("somewhere", "csv", options={"delimiter": "\\t", "charset": "UTF8"})
    assert tab.options == {"sep": "\t", "encoding": "utf-8"}
    for pattern in ("yyyy-MM", "yyyy-DDD", "M/d/yy h:mm a", "yyyy LLL d 'at' HH"):
        options = {"timestampFormat": pattern}
        assert FilesSource("somewhere", "csv", options=options).options == options


CSV: dict[str, tuple[dict[str, str], str, list[tuple[Any, ...]]]] = {
    "sep": ({"sep": "\\t"}, "k\tn\na\t1\n", [(2, "a", 1)]),
    "quote": ({"quote": "'"}, "k,'n'\n'a,b',1\n", [(2, "a,b", 1)]),
    "quote off": ({"quote": ""}, 'k,n\n"a,1\n', [(2, '"a', 1)]),
    "escape": ({"escape": "\\"}, 'k,n\n"a\\"b",1\n"c\\\\",2\n', [(2, 'a"b', 1), (3, "c\\", 2)]),
    "charToEscapeQuoteEscaping": (
        {"escape": "/", "charToEscapeQuoteEscaping": "\\"},
        'k,n\n"a\\/",1\n"b/"",2\n',
        [(2, "a/", 1), (3, 'b"', 2)],
    ),
    "comment": (
        {"comment": "#"},
        "# of 2026\n\nk,n\n#a,0\na,1\n # b,2\n",
        [(5, "a", 1), (6, " # b", 2)],
    ),
    "header": ({"header": "false"}, "a,1\nb,2\nc,3,4\nd\n", [(1, "a", 1), (2, "b", 2), (3,), (4,)]),
    "ignoreLeadingWhiteSpace": ({"ignoreLeadingWhiteSpace": "true"}, "k, n\n a,1\n", [(2, "a", 1)]),
    "ignoreTrailingWhiteSpace": ({"ignoreTrailingWhiteSpace": "true"}, "k ,n\na ,1\n", [(2, "a", 1)]),
    "nullValue": ({"nullValue": "NA"}, "k,n\nNA,NA\n", [(2, None, None)]),
    "empty texts": ({"nullValue": "NA"}, 'k,n\n"",1\n,2\n', [(2, "", 1), (3, None, 2)]),
    "emptyValue": ({"emptyValue": "none"}, 'k,n\n"",1\n', [(2, "none", 1)]),
    "lineSep": ({"lineSep": "|"}, "k,n|a,1|b,2", [(2, "a", 1), (3, "b", 2)]),
    "lineSep of two": ({"lineSep": "\\r\\n"}, "k,n\r\na,1\r\n", [(2, "a", 1)]),
    "maxColumns": ({"maxColumns": "2"}, "k,n\na,1\nb,2,3\n", [(2, "a", 1), (3,)]),
    "unescapedQuoteHandling": (
        {"unescapedQuoteHandling": "SKIP_VALUE"},
        'k,n\n"a"b"c",1\n',
        [(2, None, 1)],
    ),
    "line breaks in quotes": (
        {"sep": ";", "quote": "'"},
        "k;n\n'a;\nb;2\n''c''';3\nd';4\ne;5'\n'f''s';6\n",
        [(2,), (3,), (4,), (5,), (6,), (7, "f's", 6)],
    ),
    "tab after quotes": (
        {"sep": "\\t", "ignoreLeadingWhiteSpace": "true"},
        'k\tn\n"a\tb"\t1\n "c" \t2\n\t3\n',
        [(2, "a\tb", 1), (3, "c", 2), (4, None, 3)],
    ),
    "zero character": ({"quote": ""}, "k,n\n\0a,1\n", [(2, "\0a", 1)]),
    "text after quotes": ({}, 'k,n\n"a"b,1\n"a "b" c",2\nd"e"f,3\n', [(2,), (3,), (4, 'd"e"f', 3)]),
}
TEXT = "k,n\nJosé €,1\nb,2\n"
ENCODED = {
    "ISO-8859-1": "José",
    "Shift_JIS": "日本ソ表",
    "UTF-16LE": "José 中文€𝄞",
    "UTF-16BE": "José 中文€",
    "UTF-16": "José 中文€",
}


def read_all(spark: SparkSession, sources: dict[str, FilesSource]) -> dict[str, list[tuple[Any, ...]]]:
    """The rows of many sources by name, read in one query: file, position and columns of each readable
    row, file and position of each other row."""
    rows = None
    for name, source in sources.items():
        more = source.read(spark, source.files(), ROW).withColumn("name", F.lit(name))
        rows = more if rows is None else rows.unionByName(more)
    found: dict[str, list[tuple[Any, ...]]] = {name: [] for name in sources}
    assert rows is not None
    with small_run(spark):  # as in runs of few records; otherwise compilation takes longest
        collected = rows.collect()
    for r in sorted(collected, key=lambda r: r["_arrival"]):
        place = (r["_source"], r["_position"])
        found[r["name"]].append(place if r["_reason"] else (*place, r["k"], r["n"]))
    return found


def test_csv_options_take_effect(spark: SparkSession, tmp_path: Path) -> None:
    sources = dict[str, FilesSource]()
    for name, (options, text, _) in CSV.items():
        write(tmp_path / name, "1.csv", text)
        sources[name] = FilesSource(str(tmp_path / name), "csv", options=options)
    wanted = {name: [("1.csv", *row) for row in rows] for name, (_, _, rows) in CSV.items()}
    assert read_all(spark, sources) == wanted


def test_local_times_around_clock_change(spark: SparkSession, tmp_path: Path) -> None:
    """A local time that a clock change skips cannot be read. A repeated local time is the first one."""
    right = {
        "2024-03-31 01:59:59": "2024-03-31 00:59:59",
        "2024-03-31 02:00": None,
        "2024-03-31 02:59:59.999999": None,
        "2024-03-31 03:00:00": "2024-03-31 01:00:00",
        "2024-03-31T02:30:00+01:00": "2024-03-31 01:30:00",
        "2024-10-27 02:30:00": "2024-10-27 00:30:00",
        "2024-10-27 03:00:00": "2024-10-27 02:00:00",
    }
    write(tmp_path, "1.csv", "\n".join(["t", *right]))
    source = FilesSource(str(tmp_path), "csv", options={"timeZone": "Europe/Berlin"})
    rows = source.read(spark, source.files(), StructType().add("t", "timestamp"))
    rows = rows.orderBy("_arrival").select(F.col("t").cast("string"))
    assert [r["t"] for r in rows.collect()] == [*right.values()]


def test_declared_encoding_is_used(spark: SparkSession, tmp_path: Path) -> None:
    sources, wanted = dict[str, FilesSource](), dict[str, list[tuple[Any, ...]]]()
    for number, (encoding, word) in enumerate(ENCODED.items()):
        wide = encoding.startswith("UTF-16")
        for format in ("csv", "jsonl") if encoding == "UTF-16" else (("csv", "jsonl")[number % 2],):
            text, first = f'{{"k":"{word}","n":1}}\n{{"k":"b","n":2}}\n', 1
            if format == "csv":
                text, first = f"n,k\r\n1,{word}\r\n2,b\r\n", 2
            folder = tmp_path / f"{encoding}-{format}"
            write(folder, "1", text, encoding)
            if wide:
                mark = "" if encoding == "UTF-16" else "\ufeff"
                (folder / "2.gz").write_bytes(gzip.compress((mark + text).encode(encoding)))
            if encoding == "UTF-16":
                write(folder, "3", "\ufeff" + text, "utf-16-be")
            sources[folder.name] = FilesSource(
                str(folder), cast(Any, format), options={"encoding": encoding}
            )
            wanted[folder.name] = [
                (place.name, first + row, *values)
                for place in sorted(folder.iterdir())
                for row, values in enumerate([(word, 1), ("b", 2)])
            ]
    assert read_all(spark, sources) == wanted


def test_undecodable_bytes_are_quarantined(spark: SparkSession, tmp_path: Path) -> None:
    (tmp_path / "1.csv").write_bytes(b"k,n\na\x81,1\nb\x80,2\n")
    source = FilesSource(str(tmp_path), "csv", options={"encoding": "cp1252"})
    wanted = [("1.csv", 2), ("1.csv", 3, "b€", 2)]
    assert read_all(spark, {"": source}) == {"": wanted}, "a byte that the encoding has not"
    (tmp_path / "1.csv").write_bytes(b"k\x81,n\na,1\n")
    with pytest.raises(SourceError, match="expected a header line in CP1252, got"):
        read(spark, source)
    (tmp_path / "1.csv").write_bytes("k,n\na,1\n".encode("utf-16-le"))
    both = replace(source, options={"encoding": "utf-16"})
    with pytest.raises(SourceError, match="expected UTF-16 with a byte order mark, got none"):
        read(spark, both)


def test_json_options_take_effect(spark: SparkSession, tmp_path: Path) -> None:
    cases: dict[str, tuple[str, str]] = {
        "allowComments": ("true", '{"k":"a",/* of */"n":1}'),
        "allowUnquotedFieldNames": ("true", '{k:"a","n":1}'),
        "allowSingleQuotes": ("false", "{'k':'a','n':1}"),
        "allowNumericLeadingZeros": ("true", '{"k":"a","n":01}'),
        "allowBackslashEscapingAnyCharacter": ("true", '{"k":"\\a","n":1}'),
        "allowUnquotedControlChars": ("true", '{"k":"a\u0001","n":1}'),
        "lineSep": ("|", '{"k":"a","n":1}|'),
    }
    sources = dict[str, FilesSource]()
    for name, (value, text) in cases.items():
        write(tmp_path / name, "1.jsonl", text)
        sources[f"{name} not"] = FilesSource(str(tmp_path / name))
        sources[name] = FilesSource(str(tmp_path / name), options={name: value})
    found = read_all(spark, sources)
    for name, (value, _) in cases.items():
        good, bad = (f"{name} not", name) if value == "false" else (name, f"{name} not")
        assert [len(row) for row in found[good]] == [4], name
        assert [len(row) for row in found[bad]] == [2], name


# -- types -------------------------------------------------------------------------------------------

INNER = StructType([StructField("a", StringType()), StructField("b", LongType())])
OTHER = StructType([StructField("b", LongType(), False), StructField("a", StringType(), False)])


@pytest.mark.parametrize(
    ("got", "wanted", "said"),
    [
        (ArrayType(StringType(), False), ArrayType(StringType()), []),
        (OTHER, INNER, []),
        (ArrayType(OTHER, False), ArrayType(INNER), []),
        (MapType(StringType(), OTHER, False), MapType(StringType(), INNER), []),
        (VarcharType(3), StringType(), []),
        (StringType(), CharType(3), []),
        (StructType([*INNER.fields, StructField("c", LongType())]), INNER, []),
        (INNER, StructType([*INNER.fields, StructField("c", LongType())]), []),
        (ArrayType(LongType()), ArrayType(StringType()), ["x[] is bigint, expected string"]),
        (
            ArrayType(INNER),
            ArrayType(StructType([StructField("a", StringType()), StructField("b", IntegerType())])),
            ["x[].b is bigint, expected int"],
        ),
        (
            MapType(LongType(), INNER),
            MapType(StringType(), StructType([StructField("z", LongType())])),
            ["x.key is bigint, expected string", "x.value has the fields ['a', 'b'], expected some of"],
        ),
        (StringType(), INNER, ["x is string, expected struct<a:string,b:bigint>"]),
        (
            ArrayType(StructType([StructField("A", StringType()), StructField("b", LongType())])),
            ArrayType(INNER),
            ["x[].a is named 'A', expected the same case"],
        ),
        (StructType([*INNER.fields, StructField("A", LongType())]), INNER, []),
    ],
)
def test_differences_between_types(got: DataType, wanted: DataType, said: list[str]) -> None:
    found = differences(got, wanted, "x")
    assert len(found) == len(said)
    assert all(one.startswith(other) for one, other in zip(found, said, strict=True)), found


def test_key_types_ignore_nullability() -> None:
    assert same_types([ArrayType(StringType(), False)], [ArrayType(StringType())])
    assert not same_types([OTHER], [INNER]), "keys are compared by the order of their fields"


def test_nested_columns_are_matched_by_name(spark: SparkSession, tmp_path: Path) -> None:
    struct = pa.struct([pa.field("b", pa.int32(), False), pa.field("a", pa.string())])
    table = pa.table(
        {
            "s": pa.array([{"b": 1, "a": "x"}], struct),
            "tags": pa.array([["t"]], pa.list_(pa.field("element", pa.string(), False))),
            "rows": pa.array([[{"b": 1, "a": "x"}]], pa.list_(struct)),
            "by": pa.array([[("k", {"b": 1, "a": "x"})]], pa.map_(pa.string(), struct)),
        }
    )
    pq.write_table(table, tmp_path / "1.parquet")
    source = FilesSource(str(tmp_path), "parquet")
    inner = "struct<a:string,b:bigint,c:int>"
    kinds = f"s {inner}, tags array<string>, rows array<{inner}>, by map<string,{inner}>"
    found = source.read(spark, source.files(), _schema(spark, kinds)).collect()[0]
    one = {"a": "x", "b": 1, "c": None}
    assert found["_reason"] is None
    row = found.asDict(recursive=True)
    assert (row["s"], row["tags"], row["rows"], row["by"]) == (one, ["t"], [one], {"k": one})
    wrong = _schema(spark, "rows array<struct<a:string,b:smallint>>, by map<string,struct<z:int>>")
    with pytest.raises(SourceError) as error:
        source.read(spark, source.files(), wrong)
    assert (
        "1.parquet: rows[].b is int, expected smallint; by.value has the fields ['b', 'a'], expected "
        "some of ['z']"
    ) in str(error.value)
