"""Bad files: detects unreadable files and their faults before Spark reads them."""

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
from vt_dagster.core.source_records import POSITION, RAW, REASON, SOURCE, Reason
from vt_dagster.sources.consumed_files import FileInfo
from vt_dagster.sources.csv_text import header_of, nullable
from vt_dagster.sources.file_signatures import (
    HEAD,
    byte_order,
    chunks_of,
    ends_of,
    fault_of_bytes,
    is_compressed,
    known,
)
from vt_dagster.sources.path_columns import fault_of_path, said_by
from vt_dagster.sources.text_lines import first_lines
from vt_dagster.sources.text_options import UTF_8, encoding_of
from vt_dagster.spark.jars import one_line
from vt_dagster.storage import delta
from vt_dagster.storage.schema_evolution import widens
from vt_dagster.topology.schema import differences, earlier_names, was

_LONGEST = 1 << 20
"""Number of characters read of a first line of JSON."""


def faults_of_text(
    files: Sequence[FileInfo],
    schema: StructType,
    format: str,
    options: Mapping[str, str],
    optional: Sequence[str] = (),
    path_columns: bool = True,
) -> dict[str, str]:
    """Returns the faults of JSON lines or CSV files, by name. Does not use Spark.

    Compressed files are read to their end: only that shows that a file is complete.

    Args:
        format: ``jsonl`` or ``csv``.
        options: see ``sources.text_options``.
        optional: columns that a file may lack.
        path_columns: whether the path of a file fills columns.
    """

    def fault(file: FileInfo) -> str | None:
        try:
            broken = (
                _fault_of_name(file)
                or _fault_of_content(file, format)
                or _fault_of_archive(file, format)
                or _fault_of_encoding(file, encoding_of(options))
            )
            if broken:
                return broken
            wanted = _in_files(file, schema) if path_columns else schema
            if format == "csv":
                broken = _fault_of_header(file, wanted, options, optional)
            if broken or not path_columns:
                return broken
            return fault_of_path(file.name, schema, columns_of(file, format, options))
        except FileNotFoundError:  # the run fails with a clear error when it reads the file
            return None

    with ThreadPoolExecutor(max_workers=8) as pool:
        found = zip(files, pool.map(fault, files), strict=True)
        return {file.name: said for file, said in found if said is not None}


def faults_of_parquet(
    spark: SparkSession,
    files: Sequence[FileInfo],
    schema: StructType,
    optional: Sequence[str] = (),
    path_columns: bool = True,
) -> dict[str, str]:
    """Returns the faults of Parquet files, by name. A file older than the schema may have narrower
    types."""
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
        wanted = _in_files(file, schema) if path_columns else schema
        missing = _missing(list(types), wanted, optional)
        if path_columns:
            missing = missing or fault_of_path(file.name, schema, list(types))
        wrong = [
            said
            for c in schema.fields
            if c.name in types
            for said in differences(types[c.name], c.dataType, c.name, fits=widens)
        ]
        if missing:
            found[file.name] = missing
        elif wrong:
            found[file.name] = f"{'; '.join(wrong)}; correct the schema's types or the file's"
    return found


def columns_of(file: FileInfo, format: str, options: Mapping[str, str]) -> list[str]:
    """Returns the columns of a file, for JSON lines those of the first line; none if it is unreadable.
    Does not use Spark."""
    try:
        if format == "csv":
            return list(header_of(file, options).columns)
        if format == "parquet":
            fs, local = delta.filesystem(file.path)
            with fs.open(local, "rb") as content:
                return ParquetFile(content).schema_arrow.names
        first = json.loads(next(first_lines(file, options, _LONGEST), "null"))
    except (ArrowException, OSError, EOFError, ValueError, csv.Error, zlib.error):
        return []
    return list(first) if isinstance(first, dict) else []


def _fault_of_name(file: FileInfo) -> str | None:
    return "expected a name without ':', which Hadoop cannot read" if ":" in file.name else None


def _fault_of_header(
    file: FileInfo, schema: StructType, options: Mapping[str, str], optional: Sequence[str]
) -> str | None:
    try:
        header = header_of(file, options, schema).columns
    except UnicodeDecodeError as error:
        said = encoding_of(options).upper()
        return (
            f"expected a header line in {said}, got: {error.reason} at byte {error.start}; set the "
            "file's encoding, for example options={'encoding': 'ISO-8859-1'}, or convert the file"
        )
    except csv.Error as error:
        return f"expected a header line of CSV that ends with a line feed, got: {error}"
    if not header:
        return None
    twice = sorted({c for c in header if c in schema.names and header.count(c) > 1})
    if twice:
        return f"expected each column once in the header, got {twice} more than once"
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
        "remove them from the schema, or name them in the source's optional, if they may be null"
    )


def _fault_of_footer(file: FileInfo) -> str | None:
    fs, local = delta.filesystem(file.path)
    try:
        other = known(*ends_of(file)) if file.size else None
        if other is not None and other.name != "a Parquet file":
            return (
                f"expected a Parquet file, got {other.name}: decompress it, or correct the source's "
                "format"
            )
        with fs.open(local, "rb") as content:
            ParquetFile(content)
    except FileNotFoundError:
        return None
    except (ArrowException, OSError) as error:
        return f"expected a whole Parquet file, got: {one_line(error)}"
    return None


def _fault_of_content(file: FileInfo, format: str) -> str | None:
    """Checks the first bytes of a file, as stored."""
    if not file.size:
        return None
    head, tail = ends_of(file)
    return fault_of_bytes(file.name, known(head, tail), format)


def _fault_of_archive(file: FileInfo, format: str) -> str | None:
    """Checks that a compressed file is complete, and its decompressed content."""
    if not is_compressed(file.name):
        return None
    head = b""
    try:
        for chunk in chunks_of(file):
            head = head or chunk[:HEAD]
    except FileNotFoundError:
        raise
    except (OSError, EOFError, zlib.error) as error:
        return f"expected a whole compressed file, as its name says, got: {one_line(error)}"
    inside = known(head)
    return None if inside is None else fault_of_bytes("", inside._replace(suffix=None), format)


def _fault_of_encoding(file: FileInfo, encoding: str) -> str | None:
    """Checks the byte order mark of a file."""
    order = byte_order(next(chunks_of(file), b""))
    said = {UTF_8: None, "utf-16-le": "UTF-16LE", "utf-16-be": "UTF-16BE"}.get(encoding, order)
    if encoding == "utf-16" and order not in ("UTF-16LE", "UTF-16BE") and file.size:
        return (
            "expected UTF-16 with a byte order mark, got none: set "
            "options={'encoding': 'UTF-16LE'} or 'UTF-16BE'"
        )
    if order is None or order == said:
        return None
    return (
        f"expected text in {encoding.upper()}, got a byte order mark of {order}: set "
        f"options={{'encoding': '{order}'}}, or convert the file"
    )


def _in_files(file: FileInfo, schema: StructType) -> StructType:
    """Returns the columns that a file must contain: those that its path does not fill."""
    told = said_by(file.name, schema)
    return StructType([f for f in schema.fields if f.name not in told])


def set_aside(spark: SparkSession, bad: Mapping[str, str], schema: StructType) -> DataFrame:
    """Returns one row for the quarantine per bad file.

    Args:
        bad: the fault of each file, by name.
    """
    more = [(ARRIVAL, LongType()), (SOURCE, StringType()), (POSITION, LongType())]
    more += [(RAW, StringType()), (REASON, StringType())]
    fields = [StructField(n, t) for n, t in more]
    none = [None] * len(schema)
    rows = [
        (*none, number - len(bad), name, 0, said, Reason.UNREADABLE_FILE)
        for number, (name, said) in enumerate(bad.items())
    ]
    return spark.createDataFrame(rows, StructType([*nullable(schema).fields, *fields]))
