"""A growing directory of files as a source: each file is consumed once.

Records arrive in order of file name, then of position in the file. A file that appears later with a
smaller name is consumed by a later run. A name is the path below the directory.

A path may have partition columns, as in tables of Hive and Spark: ``dt=2026-11-25/a.csv``. Unreadable
files and their faults are detected before Spark reads them.
"""

from __future__ import annotations

import csv
import json
import posixpath
import re
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import reduce
from typing import Any, Literal
from urllib.parse import unquote

import pyarrow as pa
from py4j.protocol import Py4JJavaError
from pyarrow.lib import ArrowException
from pyarrow.parquet import FileMetaData, ParquetFile
from pyspark.errors import PySparkException, PySparkTypeError
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.pandas.types import from_arrow_type
from pyspark.sql.types import (
    ArrayType,
    DataType,
    DecimalType,
    LongType,
    MapType,
    NullType,
    StringType,
    StructField,
    StructType,
)

from vt_dagster.columns import ARRIVAL
from vt_dagster.core.source_records import POSITION, RAW, REASON, SOURCE, Reason, as_json
from vt_dagster.errors import SourceError, TopologyError, counted
from vt_dagster.sources.base import (
    End,
    Limited,
    News,
    Repeatable,
    RepeatedRun,
    check_place,
    explained,
    read_by_all_names,
    require_limits,
    require_source_recorded_at,
    with_source_recorded_at,
)
from vt_dagster.sources.consumed_files import (
    HEAD,
    FileInfo,
    Memory,
    byte_order,
    chosen,
    chunks_of,
    ends_of,
    fault_of_bytes,
    files_in,
    is_compressed,
    known,
    remembered,
    require_untouched,
    stamp_of,
    unconsumed,
    written_at,
)
from vt_dagster.sources.text_formats import (
    FILE,
    LINE_OPTIONS,
    MANY_BYTES,
    START,
    UNDECODED,
    UTF_8,
    WITHIN,
    checked,
    encoding_of,
    file_name,
    first_lines,
    header_of,
    may_be_enveloped,
    nullable,
    numbered_lines,
    one_record,
    parse,
    read_object,
    read_record,
    running_start,
)
from vt_dagster.sources.value_reader import (
    Reading,
    Timestamps,
    in_other_case,
    is_no_text,
    of_text,
    other_case,
    require_units,
)
from vt_dagster.spark.jars import one_line
from vt_dagster.storage import delta
from vt_dagster.storage.asset_store import AssetStore
from vt_dagster.storage.commit_log import Commit, commits
from vt_dagster.storage.schema_evolution import widens
from vt_dagster.storage.spark_reader import Head
from vt_dagster.topology.model import Stream
from vt_dagster.topology.schema import differences, earlier_names, was

# Path columns


NULL = "__HIVE_DEFAULT_PARTITION__"
"""The directory value for null in Hive and Spark."""
_TEXT = "_path_"
_SAYS = "_path_says_"


def parts_of(name: str) -> list[tuple[str, str]]:
    """Returns the ``key=value`` directories of a name, outermost first, with percent escapes
    decoded."""
    found = [part.partition("=") for part in name.split("/")[:-1] if "=" in part]
    return [(_decoded(key), _decoded(value)) for key, _, value in found if key]


def columns_of_path(name: str, schema: StructType) -> dict[str, str | None]:
    """Returns the schema's columns in a file's path, as texts; None = null. Names match without case,
    as in Spark."""
    columns = {c.lower(): c for c in schema.names}
    parts = [(columns[k.lower()], v) for k, v in parts_of(name) if k.lower() in columns]
    return {column: None if value == NULL else value for column, value in parts}


def fault_of_path(name: str, schema: StructType, there: Sequence[str]) -> str | None:
    """Returns the fault of the columns in a file's path; None = no fault.

    Args:
        there: the columns in the file.
    """
    named = [k.lower() for k, _ in parts_of(name)]
    for column in columns_of_path(name, schema):
        kind = schema[column].dataType
        if named.count(column.lower()) > 1:
            return f"expected {column}= once in its path, got it more than once; rename a directory"
        if column.lower() in {c.lower() for c in there}:
            return (
                f"expected column {column!r} in its path or in the file, got it in both; remove it "
                f"from the file, rename the directory, or set path_columns=False of the source to use "
                "the file's column"
            )
        if isinstance(kind, StructType | ArrayType | MapType):
            return (
                f"expected a text or a number for {column!r} in its path, but its type is "
                f"{kind.simpleString()}; rename the directory, or set path_columns=False of the source"
            )
    return None


def with_path_columns(
    rows: DataFrame,
    spark: SparkSession,
    files: Sequence[FileInfo],
    schema: StructType,
    found: Mapping[str, Column],
    how: Reading,
    own: Column | None = None,
) -> tuple[DataFrame, dict[str, Column], Column]:
    """Adds the columns in the files' paths to rows.

    Plan: a broadcast join, if paths have columns.

    Args:
        rows: with ``_file``.
        found: the columns in the files, by name.
        how: the reading of values in paths.
        own: the field names of a row, if they differ between rows (JSON).

    Returns:
        the rows; the columns from files and paths; whether a value in a path does not fit its column,
        or the row also has that column (never null).
    """
    by_file = {f.name: columns_of_path(f.name, schema) for f in files}
    columns = [c for c in schema.names if any(c in some for some in by_file.values())]
    values, misfit = dict(found), F.lit(False)
    if not columns:
        return rows, values, misfit
    texts = [
        (name, *[part for c in columns for part in (some.get(c), c in some)])
        for name, some in by_file.items()
    ]
    kinds = [f"{_TEXT}{n} string, {_SAYS}{n} boolean" for n in range(len(columns))]
    about = spark.createDataFrame(texts, ", ".join([f"{FILE} string", *kinds]))
    for number, column in enumerate(columns):
        text, in_path = F.col(f"{_TEXT}{number}"), F.col(f"{_SAYS}{number}")
        value = of_text(text, schema[column].dataType, how, (column,))
        values[column] = F.when(in_path, value).otherwise(found[column])
        misfit = misfit | (text.isNotNull() & value.isNull())
        if own is not None:
            lowered = F.transform(own, lambda name: F.lower(name))
            both = in_path & F.array_contains(lowered, column.lower())
            misfit = misfit | F.coalesce(both, F.lit(False))
    return rows.join(F.broadcast(about), FILE), values, misfit


def _decoded(text: str) -> str:
    try:
        return unquote(text, errors="strict")
    except UnicodeDecodeError:
        return text


# Bad files


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
        options: see ``sources.text_formats``.
        optional: columns that a file may lack.
        path_columns: whether the path of a file fills columns.
    """

    def fault(file: FileInfo) -> str | None:
        try:
            broken = (
                _fault_of_name(file)
                or (fault_of_bytes(file.name, known(*ends_of(file)), format) if file.size else None)
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
        return {file.name: reason for file, reason in found if reason is not None}


def faults_of_parquet(
    spark: SparkSession,
    files: Sequence[FileInfo],
    schema: StructType,
    optional: Sequence[str] = (),
    path_columns: bool = True,
) -> tuple[dict[str, str], dict[str, tuple[str, ...]]]:
    """Returns the faults of Parquet files, by name, and the columns of files that have no values and no
    type, if Spark cannot read them. A file older than the schema may have narrower types."""
    found, untyped = dict[str, str](), dict[str, tuple[str, ...]]()
    for file in files:
        broken = _fault_of_name(file) or _fault_of_footer(spark, file)
        if broken:
            found[file.name] = broken
            continue
        wanted = _in_files(file, schema) if path_columns else schema
        try:
            there = spark.read.parquet(delta.literal(file.path)).schema.fields
            types = {c.name: c.dataType for c in there}
        except PySparkException as error:
            finer = _of_columns(_columns_like(file, "timeUnit=nanoseconds"), wanted)
            if finer:  # as pandas writes times
                found[file.name] = (
                    f"expected times in microseconds or milliseconds, got nanoseconds in {finer}; "
                    "write the file with microseconds, in pandas with to_parquet(path, "
                    "coerce_timestamps='us')"
                )
                continue
            try:
                types = _types_by_arrow(file, wanted)
            except PySparkTypeError:
                found[file.name] = f"expected columns that Spark can read, got: {one_line(error)}"
                continue
        missing = _missing(list(types), wanted, optional)
        if odd := _in_other_case(list(types), wanted):  # which Spark would read
            missing = f"{odd}: correct the file, or the names in the schema"
        if path_columns:
            missing = missing or fault_of_path(file.name, schema, list(types))
        wrong = {
            c.name: differences(
                types[c.name], c.dataType, c.name, fits=_fits_of(file, c, types[c.name])
            )
            for c in schema.fields
            if c.name in types
        }
        if any(wrong.values()):
            untyped[file.name] = tuple(_columns_like(file, "Null"))
        differ = [one for c in wrong if c not in untyped.get(file.name, ()) for one in wrong[c]]
        if missing:
            found[file.name] = missing
        elif differ:
            found[file.name] = f"{'; '.join(differ)}; correct the schema's types or the file's"
    return found, untyped


_READ_AS = {
    pa.uint8(): pa.int16(),
    pa.uint16(): pa.int32(),
    pa.uint32(): pa.int64(),
    pa.uint64(): pa.decimal128(20),
    pa.timestamp("ns"): pa.timestamp("us", "UTC"),  # INT96
}
"""The types as which Spark reads others."""


def _types_by_arrow(file: FileInfo, wanted: StructType) -> dict[str, DataType]:
    """Returns the columns of a Parquet file with the types of the wanted ones. Spark reads these also
    if it cannot read others, such as UUIDs, but then infers no types.

    Raises:
        PySparkTypeError: Spark has no such type, or cannot tell two columns apart.
    """
    fs, local = delta.filesystem(file.path)
    with fs.open(local, "rb") as content:
        there = ParquetFile(content).schema_arrow
    if len({name.lower() for name in there.names}) < len(there.names):
        raise PySparkTypeError(f"expected names that differ without case, got {there.names}")
    own = {f.name: _READ_AS.get(f.type, f.type) for f in there if f.name in wanted.names}
    return {n: from_arrow_type(own[n]) if n in own else NullType() for n in there.names}


def _of_columns(paths: Sequence[str], schema: StructType) -> list[str]:
    """Returns the paths of values that are within columns of a schema."""
    return [p for p in paths if any(f"{p}.".startswith(f"{name}.") for name in schema.names)]


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
        first = json.loads(next(first_lines(file, options), "null"))
    except (ArrowException, OSError, EOFError, ValueError, RecursionError, csv.Error, zlib.error):
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
        encoding = encoding_of(options).upper()
        return (
            f"expected a header line in {encoding}, got: {error.reason} at byte {error.start}; set the "
            "file's encoding, for example options={'encoding': 'ISO-8859-1'}, or convert the file"
        )
    except csv.Error as error:
        return f"expected a header line of CSV that ends with a line feed, got: {error}"
    if not header:
        return None
    if other := _other_separator(header, schema, options.get("sep", ",")):
        return other
    if odd := _in_other_case(header, schema):
        return f"{odd}: correct the header, or the names in the schema"
    twice = sorted({c for c in header if c in schema.names and header.count(c) > 1})
    if twice:
        return f"expected each column once in the header, got {twice} more than once"
    return _missing(header, schema, optional)


def _other_separator(header: Sequence[str], schema: StructType, separator: str) -> str:
    """Returns the fault of a header that has another separator than declared; empty if it has not."""
    line, names = separator.join(header), {*schema.names} - {*header}
    if re.fullmatch(r"sep=.", line) and names:
        return f"expected a header line, got {line!r}, which only Excel reads: remove the line"
    for other in (";", "\t", "|", ","):
        if len(header) == 1 and other in line and names & {*line.split(other)}:
            return (
                f"expected columns that are separated by {separator!r}, got {line!r}: set "
                f"options={{'sep': {other!r}}}"
            )
    return ""


def _in_other_case(there: Sequence[str], schema: StructType) -> str:
    others = [(c, other_case(c, there, schema)) for c in schema.names]
    return "; ".join(in_other_case(column, other) for column, other in others if other)


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


def _fault_of_footer(spark: SparkSession, file: FileInfo) -> str | None:
    fs, local = delta.filesystem(file.path)
    try:
        other = known(*ends_of(file)) if file.size else None
        if other is not None and other.name != "a Parquet file":
            return (
                f"expected a Parquet file, got {other.name}: decompress it, or correct the source's "
                "format"
            )
        with fs.open(local, "rb") as content:
            footer = ParquetFile(content).metadata
    except FileNotFoundError:
        return None
    except (ArrowException, OSError) as error:
        return f"expected a whole Parquet file, got: {one_line(error)}"
    return _fault_of_codec(spark, file, footer)


_CODECS = {"UNCOMPRESSED", "SNAPPY", "GZIP", "ZSTD", "LZ4"}
"""The compressions of Parquet that each Spark reads."""


def _fault_of_codec(spark: SparkSession, file: FileInfo, footer: FileMetaData) -> str | None:
    """Checks that Spark has the codecs of a Parquet file: it reads a footer without them."""
    groups = [footer.row_group(i) for i in range(footer.num_row_groups)]
    codecs = {group.column(i).compression for group in groups for i in range(group.num_columns)}
    if codecs <= _CODECS:
        return None
    try:
        spark.read.parquet(delta.literal(file.path)).head(1)
    except (PySparkException, Py4JJavaError) as error:
        # Any other error may be one of the file system, which the next run does not have.
        found = re.search(r"\bClass \S+Codec was not found\b", str(error))
        return found and (
            f"expected a compression that Spark has a codec for, got {', '.join(codecs - _CODECS)} "
            f"({found[0]}); write the file with zstd or snappy, or add the codec to Spark's jars"
        )
    return None


def _fits_of(file: FileInfo, column: StructField, got: DataType) -> Callable[[Any, Any], bool]:
    """Returns which types Spark reads as others, see ``differences``."""
    unsigned = got == DecimalType(20, 0) != column.dataType  # may be one of 64 bits: not widened
    exact = unsigned and column.name in _columns_like(file, "isSigned=false")
    return (lambda got, wanted: False) if exact else widens


def _columns_like(file: FileInfo, kind: str) -> list[str]:
    """Returns the columns of a Parquet file whose logical type has this text."""
    fs, local = delta.filesystem(file.path)
    with fs.open(local, "rb") as content:
        schema: Any = ParquetFile(content).schema
    columns = [schema.column(i) for i in range(len(schema))]
    return [c.path for c in columns if kind in str(c.logical_type)]


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
    declared = {UTF_8: None, "utf-16-le": "UTF-16LE", "utf-16-be": "UTF-16BE"}.get(encoding, order)
    if encoding == "utf-16" and order not in ("UTF-16LE", "UTF-16BE") and file.size:
        return (
            "expected UTF-16 with a byte order mark, got none: set "
            "options={'encoding': 'UTF-16LE'} or 'UTF-16BE'"
        )
    if order is None or order == declared:
        return None
    # UTF-32 has no line feed of one or two bytes.
    way = "" if order == "UTF-32" else f"set options={{'encoding': '{order}'}}, or "
    return (
        f"expected text in {encoding.upper()}, got a byte order mark of {order}: {way}convert the file"
    )


def _in_files(file: FileInfo, schema: StructType) -> StructType:
    """Returns the columns that a file must contain: those that its path does not fill."""
    in_path = columns_of_path(file.name, schema)
    return StructType([f for f in schema.fields if f.name not in in_path])


def set_aside(spark: SparkSession, bad: Mapping[str, str], schema: StructType) -> DataFrame:
    """Returns one row for the quarantine per bad file.

    Args:
        bad: the fault of each file, by name.
    """
    columns = nullable(schema).add(ARRIVAL, LongType()).add(SOURCE, StringType())
    columns = columns.add(POSITION, LongType()).add(RAW, StringType()).add(REASON, StringType())
    none = [None] * len(schema)
    rows = [
        (*none, number - len(bad), name, 0, fault, Reason.UNREADABLE_FILE)
        for number, (name, fault) in enumerate(bad.items())
    ]
    return spark.createDataFrame(rows, columns)


# File rows


FileFormat = Literal["jsonl", "csv", "parquet"]


def require_flat(name: str, format: FileFormat, schema: StructType) -> None:
    """Checks that no column of CSV files is nested.

    Raises:
        TopologyError: a column is a struct, an array or a map.
    """
    kinds = StructType | ArrayType | MapType
    nested = {f.name: f.dataType.simpleString() for f in schema.fields if isinstance(f.dataType, kinds)}
    if format == "csv" and nested:
        raise TopologyError(
            f"{name}: expected no struct, array or map among the columns of CSV files, got {nested}; "
            "declare the columns as STRING and convert them in map_values, for example with from_json"
        )


_LINE = "_line"


def parquet_rows(
    spark: SparkSession,
    files: Sequence[FileInfo],
    schema: StructType,
    path_columns: bool,
    untyped: Mapping[str, tuple[str, ...]] = {},
) -> DataFrame:
    """Returns the rows of Parquet files, in the columns of ``FilesSource.read``.

    Plan: two scans, one of them for the number of rows in each file, which is then broadcast; two more
    for each set of ``untyped`` columns.

    Args:
        untyped: columns that are null and cannot be read, by file.
    """
    alike: dict[tuple[str, ...], list[str]] = {}
    for f in files:
        alike.setdefault(untyped.get(f.name, ()), []).append(delta.literal(f.path))

    def located_in(paths: Sequence[str], without: tuple[str, ...]) -> DataFrame:
        there = StructType([f for f in schema.fields if f.name not in without])
        null = {f.name: F.lit(None).cast(f.dataType) for f in schema.fields if f.name in without}
        return (
            spark.read.schema(there)
            .parquet(*paths)
            .select(
                *[null.get(c, F.col(c)).alias(c) for c in schema.names],
                file_name(files).alias(FILE),
                F.col("_metadata.row_index").alias(_LINE),
            )
        )

    located = reduce(DataFrame.union, [located_in(paths, names) for names, paths in alike.items()])
    sizes = located.groupBy(FILE).agg(F.count(F.lit(1)).alias(START))
    starts = running_start(sizes, [FILE])
    broken = is_no_text(F.struct(*schema.names), schema)
    placed = located.join(F.broadcast(starts), FILE)
    found = {c: F.col(c) for c in schema.names}
    if path_columns:
        placed, found, misfit = with_path_columns(
            placed, spark, files, schema, found, Reading(base64=False)
        )
        broken = broken | misfit
    return placed.select(
        *[F.when(~broken, found[c]).alias(c) for c in schema.names],
        (F.col(START) + F.col(_LINE)).alias(ARRIVAL),
        F.col(FILE).alias(SOURCE),
        (F.col(_LINE) + 1).alias(POSITION),
        as_json(schema.names).alias(RAW),
        F.when(broken, Reason.UNREADABLE).alias(REASON),
    )


def text_rows(
    spark: SparkSession,
    files: Sequence[FileInfo],
    schema: StructType,
    format: FileFormat,
    how: Reading,
    path_columns: bool,
) -> DataFrame:
    """Returns the rows of JSON lines and CSV files, in the columns of ``FilesSource.read``.

    Plan: two scans, see ``text_formats.numbered_lines``; no shuffle of rows.
    """
    options = how.options
    numbered = numbered_lines(spark, files, options, quoted=format == "csv")
    given, own = numbered.where(F.trim(RAW) != ""), None
    if format == "csv":
        headers: dict[tuple[str, ...], list[str]] = {}
        above: dict[int, list[str]] = {}
        for f in files:
            header = header_of(f, options, schema)
            headers.setdefault(header.columns, []).append(f.name)
            above.setdefault(header.line, []).append(f.name)
        given = given.where(_is_below(above))
        if "comment" in options:
            given = given.where(~F.startswith(F.col(RAW), F.lit(options["comment"])))
        columns = one_record(RAW, FILE, headers, schema, options, "_")
        columns |= read_record(F.col("__texts"), F.col(RAW), schema, how, "_")
        row = F.col("__row")
    else:
        kept = {k: v for k, v in options.items() if k not in LINE_OPTIONS}
        many = sum(f.size for f in files) > MANY_BYTES
        usual = columns_of(files[0], format, options) if many else None
        enveloped = may_be_enveloped(files, options)
        parsed_line = parse(F.col(RAW), schema, kept, "_", usual=usual, enveloped=enveloped)
        columns, row = read_object(parsed_line, schema, how, "_")
        own = F.json_object_keys(RAW)
    parsed = given
    for name, column in columns.items():
        parsed = parsed.withColumn(name, column)
    broken = row.isNull() | ~F.is_valid_utf8(RAW) | F.col(UNDECODED) | F.col(WITHIN)
    found = {c: row[c] for c in schema.names}
    if path_columns:
        parsed, found, misfit = with_path_columns(
            parsed, spark, files, schema, found, _of_paths(how), own
        )
        broken = broken | misfit
    return parsed.select(
        *[F.when(~broken, found[c]).alias(c) for c in schema.names],
        ARRIVAL,
        F.col(FILE).alias(SOURCE),
        POSITION,
        F.make_valid_utf8(RAW).alias(RAW),
        F.when(broken, Reason.UNREADABLE).alias(REASON),
    )


def _of_paths(how: Reading) -> Reading:
    """Returns the settings to read values in paths: values as Hive and Spark write them in directory
    names, so the date formats of the files do not apply."""
    options = {k: v for k, v in how.options.items() if k.lower() == "timezone"}
    return replace(how, options=options, base64=False)


def _is_below(headers: Mapping[int, Sequence[str]]) -> Column:
    """Returns whether a line is below the header of its file; ``headers``: the files by its line."""
    if len(headers) == 1:
        return F.col(POSITION) > next(iter(headers))
    line = F.lit(0)
    for number, files in headers.items():
        line = F.when(F.col(FILE).isin(list(files)), number).otherwise(line)
    return F.col(POSITION) > line


# Files source


FILES = "files"
"""The name of a files source in a commit's ``inputs``; its offsets count records."""
_WORDS = ("run", "file_time")
"""Values of ``recorded_at`` that are not column names."""
_BAD = "the bad files; a FilesSource with on_bad_file='quarantine' quarantines them"
_LOOKED_AT = 20
"""Maximum number of files that a run searches for columns that the schema lacks."""


@dataclass(frozen=True)
class PinnedFiles(Limited):
    """The files that a run consumes.

    Args:
        source: the source.
        files: in order of arrival.
        before: the files consumed by earlier runs, see ``consumed_files.Memory``.
        left: the names of files left to later runs.
        other: the directory of earlier runs, if none has consumed a file of this one.
    """

    source: FilesSource
    files: Sequence[FileInfo]
    before: Mapping[str, Any]
    batch: int
    left: Sequence[str] = ()
    other: str | None = None

    @property
    def source_end(self) -> str:
        return max((*(f.name for f in self.files), *self.left), default="")

    def reaches(self, end: End) -> bool:
        return not any(name <= str(end) for name in self.left)

    @property
    def bytes(self) -> int:
        return sum(f.size for f in self.files)

    @property
    def empty(self) -> bool:
        return not self.files

    def read(self, spark: SparkSession, node: Stream) -> DataFrame:
        with explained(self):
            rows = read_by_all_names(node, lambda _, all_: self.source.read(spark, self.files, all_))
            return with_source_recorded_at(rows, self.source.recorded_at, _WORDS)

    def consumed(self) -> dict[str, Any]:
        there = self.source.files()
        require_untouched(self.source.path, self.files, there)
        return remembered(self.before, self.files, there, self.batch)

    def recorded(self) -> dict[str, int] | None:
        return written_at(self.files) if self.source.recorded_at == "file_time" else None

    def position(self, before: Commit, counts: Mapping[str, int]) -> dict[str, Any]:
        first = before.inputs.get(FILES, {}).get(0, 0)
        end = first + counts["in"]
        return {"taken": {FILES: {0: (first, end)}}, "inputs": {FILES: {0: end}}, "files": True}

    def describe(self, schema: StructType) -> list[str]:
        names = ", ".join(f.name for f in self.files[:5])
        more = f" and {len(self.files) - 5:,} more" if len(self.files) > 5 else ""
        lines = [
            f"takes {counted(len(self.files), 'file')}, {self.bytes / 1000:,.1f} kB: {names}{more}"
        ]
        if self.other is not None:
            lines.append(
                f"!reads {self.source.path} for the first time; earlier runs read {self.other}. If "
                "another definition of this asset still reads that, as in another code location, give "
                "one of the two another name: both add to the same table"
            )
        extra = self.source.more_columns(self.files[:_LOOKED_AT], schema)
        if extra:
            found = "; ".join(f"{column} (in {file})" for column, file in extra.items())
            lines.append(f"!columns that the schema lacks are left out: {found}")
        return lines

    def explain(self, error: Exception) -> SourceError | None:
        there = {f.path for f in self.source.files()}
        gone = [f.name for f in self.files if f.path not in there]
        if gone:
            removed = counted(len(gone), "file was", "files were")
            return SourceError(
                f"{self.source.path}: expected the files of the run, but {removed} removed before the "
                f"run had read them all, for example {gone[0]}; nothing was committed. Put them back, "
                "or run without them"
            )
        text = unquote(str(error))
        broken = next((f for f in self.files if unquote(f.path).removeprefix("file:") in text), None)
        if broken is None:
            return None
        return SourceError(
            f"{broken.name} in {self.source.path} could not be read: {one_line(error)}; nothing was "
            "committed. Repair the file, or move it away, and run again"
        )


@dataclass(frozen=True)
class FilesSource(Repeatable):
    """A growing directory of JSON lines, CSV or Parquet files.

    Args:
        path: the directory: a local path, or a URL that both Spark and fsspec can read. Names that
            begin with ``.`` or ``_`` are ignored: write a file under such a name and rename it when
            it is complete. A consumed file is recognized after it was touched, or moved with its
            directory, into a sub-directory or out of one. If its content has changed, a run fails.
        format: ``jsonl`` (one JSON object per line), ``csv`` (one record per line, with a header line
            that names the columns in any order), or ``parquet``.
        pattern: the file names to read, for example ``*.jsonl``, at any depth. A pattern with ``/``
            matches the whole path below the directory: ``dt=*/*.jsonl``; ``**`` matches any number of
            directories.
        options: Spark's CSV or JSON options, for example ``{"nullValue": "NA"}`` or
            ``{"encoding": "windows-1252"}``. An option that is unknown, or would have no effect, is an
            error that names the alternative.
        max_files_per_run: the limit of a run; None = all files present when it starts.
        max_bad_share: a run with a larger share of quarantined rows fails before its commit.
        on_bad_file: the handling of an unreadable file: a header that is not text, lacks columns or
            repeats one, Parquet with other types, a truncated compressed file. ``fail``: the run fails
            before its commit and names the file. ``quarantine``: the file becomes one row of the
            quarantine, ``unreadable_file`` with the reason as its content, and the run continues.
            Deliver the repaired file under another name.
        optional: columns that a file may lack, for example an older file; they are null. A JSON object
            may lack any column. Columns that the schema lacks are dropped, and a run warns about them.
        max_clock_skew: how far ahead of this machine's clock a timestamp may be; a record further
            ahead is quarantined, since it would make all later records late.
        recorded_at: the system time of a file's rows. ``run``: the time of the run's commit.
            ``file_time``: the file's modification time. Otherwise a column of type timestamp; a row
            without one, or ahead by more than ``max_clock_skew``, is quarantined. System time never
            decreases: it is raised to that of earlier records (for a column: of the partition), and
            capped at the time of the run.
        timestamps: the unit of numbers in time columns, for all columns or by column, as for ``Json``;
            None: such numbers are unreadable. Not for Parquet.
        recursive: whether files in sub-directories are read, at any depth.
        path_columns: whether directories named ``column=value`` fill that column, as in tables of Hive
            and Spark: percent escapes are decoded, and ``__HIVE_DEFAULT_PARTITION__`` is null. A value
            that does not fit the column's type makes the rows unreadable; a file that also contains
            the column is a bad file. False: the files contain the column.
        upstream: the key of the asset that writes the files, ``shop/export``: a Dagster dependency of
            the table's asset.
    """

    path: str
    format: FileFormat = "jsonl"
    pattern: str = "*"
    options: dict[str, str] = field(default_factory=dict[str, str], hash=False)
    max_files_per_run: int | None = None
    max_bad_share: float = 0.1
    max_clock_skew: timedelta = timedelta(days=1)
    on_bad_file: Literal["fail", "quarantine"] = "fail"
    optional: Sequence[str] = ()
    recorded_at: str = "run"
    timestamps: Timestamps | None = field(default=None, hash=False)
    recursive: bool = True
    path_columns: bool = True
    upstream: str | None = field(default=None, kw_only=True)

    gives_timestamp = False

    def check(self, name: str, key: Sequence[str], schema: StructType) -> None:
        """Checks the settings against the schema; missing columns of a file show when it is read.

        Raises:
            TopologyError: ``optional`` names a key column or no column; ``recorded_at`` is not valid; a
                column of CSV is nested.
        """
        require_source_recorded_at(name, self.recorded_at, _WORDS, schema)
        require_units(name, self.timestamps, schema)
        require_flat(name, self.format, schema)
        odd = [c for c in self.optional if c not in schema.names or c in key]
        if odd:
            raise TopologyError(
                f"{name}: expected optional columns of the source among "
                f"{[c for c in schema.names if c not in key]}, got {odd}; correct or leave them out"
            )

    def __post_init__(self) -> None:
        check_place(self)
        if self.format not in ("jsonl", "csv", "parquet"):
            raise SourceError(
                f"format of {self.path!r} must be 'jsonl', 'csv' or 'parquet', got {self.format!r}"
            )
        if self.on_bad_file not in ("fail", "quarantine"):
            raise SourceError(
                f"on_bad_file of {self.path!r} must be 'fail' or 'quarantine', got {self.on_bad_file!r}"
            )
        require_limits(self.max_bad_share, self.max_clock_skew)
        require_units(repr(self.path), self.timestamps)
        object.__setattr__(self, "optional", tuple(self.optional))
        object.__setattr__(self, "options", checked(repr(self.path), self.format, self.options))
        if self.max_files_per_run is not None and self.max_files_per_run < 1:
            raise SourceError(f"max_files_per_run must be 1 or more, got {self.max_files_per_run}")

    @property
    def reading(self) -> Reading:
        return Reading(self.timestamps, self.options, base64=self.format != "csv")

    def describe(self) -> str:
        """Returns a description of the source, for metadata and messages."""
        return f"{self.format} files {posixpath.join(str(self.path), self.pattern)}"

    def files(self) -> list[FileInfo]:
        """Returns the files in the directory, by name. Does not use Spark."""
        return files_in(str(self.path), self.pattern, f"{self.format} files", self.recursive)

    def pin(
        self,
        before: Commit | None,
        only: Sequence[str] | None = None,
        *,
        consumed: Mapping[str, Any] = {},
    ) -> PinnedFiles:
        """Pins the files of a run; see :meth:`pending`. Does not use Spark."""
        batch = 1 if before is None else before.batch + 1
        memory = Memory(consumed, self.files())
        new = unconsumed(self.path, memory)
        taken = chosen(self.path, new, memory, only)[: self.max_files_per_run]
        left = {f.name for f in new} - {f.name for f in taken}
        return PinnedFiles(self, taken, consumed, batch, sorted(left), memory.other_directory())

    def gone(self, live: AssetStore, instead: str) -> SourceError | None:
        gone = Memory(live.consumed_files(live.head()), self.files()).gone()
        if not gone:
            return None
        return SourceError(
            f"{live.node.name}: expected all files that its log was made of, got "
            f"{counted(len(gone), 'that is', 'that are')} no longer in {self.path}, for example "
            f"{gone[0]}: their records would be missing in the new log. Put them back, or {instead}"
        )

    def repeated_runs(self, live: AssetStore, head: Head, keep_recorded: bool) -> Iterator[RepeatedRun]:
        """Yields a run for each batch of the asset with the files up to it, if the batch of each is
        known; finally one with all consumed files."""
        there = self.files()
        memory = Memory(live.consumed_files(head), there)
        batches = {f.name: memory.batch_of(f) for f in there}
        known = {name: batch for name, batch in batches.items() if batch is not None}
        if keep_recorded and known and 0 not in known.values():
            for commit in commits(live.root):
                only = [name for name, batch in known.items() if batch <= commit.batch]
                yield RepeatedRun({"only": only}, commit.recorded_at)
        yield RepeatedRun({"only": [*known]} if known else {})

    def news(self, before: Commit | None, consumed: Mapping[str, Any]) -> News:
        """Returns the run config with the names of the new files. Does not use Spark."""
        files = self.pending(consumed)
        if not files:
            return News()
        names, count = [f.name for f in files], counted(len(files), "new file")
        return News({"files": names}, count, content=stamp_of(files))

    def pending(self, consumed: Mapping[str, Any], only: Sequence[str] | None = None) -> list[FileInfo]:
        """Returns the unconsumed files by name, up to ``max_files_per_run``.

        Args:
            consumed: the consumed files, see ``consumed_files.Memory``.
            only: names to choose from; None = all.

        Raises:
            SourceError: the content of a consumed file has changed.
        """
        return list(self.pin(None, only, consumed=consumed).files)

    def read(
        self,
        spark: SparkSession,
        files: Sequence[FileInfo],
        schema: StructType,
        repaired: str = _BAD,
    ) -> DataFrame:
        """Returns the rows of files, in order of arrival.

        Plan: see :func:`parquet_rows` and :func:`text_rows`.

        Args:
            repaired: what to repair if a file is bad, for the message.

        Returns:
            the schema's columns (all null if a row is unreadable), ``_arrival`` (0, 1, …), ``_source``
            (the file's name, with its sub-directories), ``_position`` (line from 1; for Parquet the row
            from 1), ``_raw`` (the line; for Parquet the row as JSON), ``_reason`` (``unreadable`` or
            null). With ``on_bad_file="quarantine"``, a bad file gives one row: ``_arrival`` below 0,
            ``_position`` 0, ``_raw`` the fault, ``_reason`` ``unreadable_file``.

        Raises:
            SourceError: a file is bad, and ``on_bad_file`` is ``fail``.
        """
        bad, untyped = self._faults(spark, files, schema)
        if bad and self.on_bad_file == "fail":
            name, fault = next(iter(bad.items()))
            others = (
                f" (and {counted(len(bad) - 1, 'other file is', 'other files are')} bad)"
                if len(bad) > 1
                else ""
            )
            raise SourceError(f"{name}: {fault}{others}. Repair or move {repaired}")
        good = [f for f in files if f.name not in bad]
        if not good:
            return set_aside(spark, bad, schema)
        if self.format == "parquet":
            rows = parquet_rows(spark, good, schema, self.path_columns, untyped)
        else:
            rows = text_rows(spark, good, schema, self.format, self.reading, self.path_columns)
        return rows.unionByName(set_aside(spark, bad, schema)) if bad else rows

    def more_columns(self, files: Sequence[FileInfo], schema: StructType) -> dict[str, str]:
        """Returns columns of files that the schema lacks, each with the first file that has it; for
        JSON by its first line. Unreadable files are skipped. Does not use Spark."""
        found: dict[str, str] = {}
        for file in files:
            for column in columns_of(file, self.format, self.options):
                if column not in schema.names:
                    found.setdefault(column, file.name)
        return found

    def _faults(
        self, spark: SparkSession, files: Sequence[FileInfo], schema: StructType
    ) -> tuple[dict[str, str], dict[str, tuple[str, ...]]]:
        also = (self.optional, self.path_columns)
        if self.format == "parquet":
            return faults_of_parquet(spark, files, schema, *also)
        return faults_of_text(files, schema, self.format, self.options, *also), {}
