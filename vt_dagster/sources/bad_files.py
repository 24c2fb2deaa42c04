"""Files that cannot be read as a whole: what is wrong with each, said before Spark meets it."""

from __future__ import annotations

import csv
import json
import zlib
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from pyarrow.lib import ArrowException
from pyarrow.parquet import ParquetFile
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import LongType, StringType, StructField, StructType

from vt_dagster.columns import ARRIVAL
from vt_dagster.core.records import POSITION, RAW, REASON, SOURCE, Reason
from vt_dagster.sources.csv_text import header_of, nullable
from vt_dagster.sources.directory import FileInfo
from vt_dagster.spark.jars import one_line
from vt_dagster.storage import delta
from vt_dagster.storage.evolution import widens
from vt_dagster.topology.renames import earlier_names, was

_COMPRESSED = (".gz", ".bz2")
_CHUNK = 1 << 20


def faults_of_text(
    files: Sequence[FileInfo],
    schema: StructType,
    headers: Mapping[str, str] | None,
    optional: Sequence[str] = (),
) -> dict[str, str]:
    """What is wrong with files of lines, by name. Does not use Spark.

    Compressed files are read to their end, since nothing else tells that one is whole.

    Args:
        headers: the CSV options by which their first line names the columns; None = it names none.
        optional: columns that a file may lack.
    """

    def fault(file: FileInfo) -> str | None:
        broken = _fault_of_name(file) or _fault_of_archive(file)
        return broken or (
            None if headers is None else _fault_of_header(file, schema, headers, optional)
        )

    with ThreadPoolExecutor(max_workers=8) as pool:
        found = zip(files, pool.map(fault, files), strict=True)
        return {file.name: said for file, said in found if said is not None}


def faults_of_parquet(
    spark: SparkSession, files: Sequence[FileInfo], schema: StructType, optional: Sequence[str] = ()
) -> dict[str, str]:
    """The same of Parquet files, by what each says of its columns; a type may be a shorter one, as of
    files that are older than the schema."""
    found: dict[str, str] = {}
    for file in files:
        broken = _fault_of_name(file) or _fault_of_footer(file)
        if broken:
            found[file.name] = broken
            continue
        try:
            there = spark.read.parquet(delta.literal(file.path)).schema.fields
        except PySparkException as error:
            found[file.name] = f"expected columns that Spark can read, got: {one_line(error)}"
            continue
        types = {c.name: c.dataType for c in there}
        missing = _missing(list(types), schema, optional)
        wrong = [
            f"{c.name} is {types[c.name].simpleString()}, expected {c.dataType.simpleString()}"
            for c in schema.fields
            if c.name in types and types[c.name] != c.dataType and not widens(types[c.name], c.dataType)
        ]
        if missing:
            found[file.name] = missing
        elif wrong:
            found[file.name] = f"{'; '.join(wrong)}; correct the schema's types or the file's"
    return found


def columns_of(file: FileInfo, format: str, options: Mapping[str, str]) -> list[str]:
    """The columns that a file names, of JSON lines in the first; none where it cannot be read. Does not
    use Spark."""
    try:
        if format == "csv":
            return list(header_of(file, options))
        fs, local = delta.filesystem(file.path)
        if format == "parquet":
            with fs.open(local, "rb") as content:
                return ParquetFile(content).schema_arrow.names
        with fs.open(local, "rb", compression="infer") as content:
            first = json.loads(content.readline(_CHUNK))
    except (ArrowException, OSError, EOFError, ValueError, csv.Error, zlib.error):
        return []
    return list(first) if isinstance(first, dict) else []


def _fault_of_name(file: FileInfo) -> str | None:
    return "expected a name without ':', which Hadoop cannot read" if ":" in file.name else None


def _fault_of_header(
    file: FileInfo, schema: StructType, options: Mapping[str, str], optional: Sequence[str]
) -> str | None:
    try:
        header = header_of(file, options)
    except UnicodeDecodeError as error:
        return f"expected a header line in UTF-8, got: {error.reason} at byte {error.start}"
    except csv.Error as error:
        return f"expected a header line of CSV that ends with a line feed, got: {error}"
    except FileNotFoundError:
        return None
    if not header:
        return None
    twice = sorted({c for c in header if c in schema.names and header.count(c) > 1})
    if twice:
        return f"expected each column once in the header, found {twice} more than once"
    return _missing(header, schema, optional)


def _missing(there: Sequence[str], schema: StructType, optional: Sequence[str]) -> str | None:
    names, before = {*there}, earlier_names(schema)
    missing = [
        f.name
        for f in schema.fields
        if not names & {f.name, *was(f)} and f.name not in (*optional, *before)
    ]
    if not missing:
        return None
    return (
        f"expected columns {missing}, but the file has only {list(there)}; add them to the file, "
        "take them out of the schema, or name them in the source's optional, if they may be null"
    )


def _fault_of_footer(file: FileInfo) -> str | None:
    fs, local = delta.filesystem(file.path)
    try:
        with fs.open(local, "rb") as content:
            ParquetFile(content)
    except FileNotFoundError:
        return None
    except (ArrowException, OSError) as error:
        return f"expected a whole Parquet file, got: {one_line(error)}"
    return None


def _fault_of_archive(file: FileInfo) -> str | None:
    if not file.name.endswith(_COMPRESSED):
        return None
    fs, local = delta.filesystem(file.path)
    try:
        with fs.open(local, "rb", compression="infer") as content:
            while content.read(_CHUNK):
                pass
    except FileNotFoundError:
        return None
    except (OSError, EOFError, zlib.error) as error:
        return f"expected a whole compressed file, as its name says, got: {one_line(error)}"
    return None


def set_aside(spark: SparkSession, bad: Mapping[str, str], schema: StructType) -> DataFrame:
    """A row for the quarantine of each file that cannot be read, by name what is wrong."""
    more = [(ARRIVAL, LongType()), (SOURCE, StringType()), (POSITION, LongType())]
    more += [(RAW, StringType()), (REASON, StringType())]
    fields = [StructField(n, t) for n, t in more]
    none = [None] * len(schema)
    rows = [
        (*none, number - len(bad), name, 0, said, Reason.UNREADABLE_FILE)
        for number, (name, said) in enumerate(bad.items())
    ]
    return spark.createDataFrame(rows, StructType([*nullable(schema).fields, *fields]))
