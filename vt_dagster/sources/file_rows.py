"""The rows of files: each record with its columns, its file and its position in the file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import StructType

from vt_dagster.columns import ARRIVAL
from vt_dagster.core.source_records import POSITION, RAW, REASON, SOURCE, Reason
from vt_dagster.sources.consumed_files import FileInfo
from vt_dagster.sources.csv_text import header_of, one_record, read_record
from vt_dagster.sources.json_text import parse, read_object
from vt_dagster.sources.path_columns import with_path_columns
from vt_dagster.sources.text_lines import (
    FILE,
    LINE_OPTIONS,
    START,
    UNDECODED,
    file_name,
    numbered_lines,
    running_start,
)
from vt_dagster.sources.value_reader import Reading, is_no_text
from vt_dagster.storage import delta

FileFormat = Literal["jsonl", "csv", "parquet"]

_LINE = "_line"


def parquet_rows(
    spark: SparkSession, files: Sequence[FileInfo], schema: StructType, path_columns: bool
) -> DataFrame:
    """Returns the rows of Parquet files, in the columns of ``FilesSource.read``.

    Plan: two scans, one of them for the number of rows in each file, which is then broadcast.
    """
    rows = spark.read.schema(schema).parquet(*[delta.literal(f.path) for f in files])
    located = rows.select(
        "*",
        file_name(files).alias(FILE),
        F.col("_metadata.row_index").alias(_LINE),
    )
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
        F.to_json(F.struct(*schema.names)).alias(RAW),
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

    Plan: two scans, see ``text_lines.numbered_lines``; no shuffle of rows.
    """
    options = how.options
    numbered = numbered_lines(spark, files, options)
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
        parsed = given.withColumn("_texts", one_record(RAW, FILE, headers, schema, options))
        columns = read_record(F.col("_texts"), F.col(RAW), schema, how, "_")
        row = F.col("__row")
    else:
        kept = {k: v for k, v in options.items() if k not in LINE_OPTIONS}
        columns, row = read_object(parse(F.col(RAW), schema, kept, "_"), schema, how, "_")
        parsed = given
        own = F.json_object_keys(RAW)
    for name, column in columns.items():
        parsed = parsed.withColumn(name, column)
    broken = row.isNull() | ~F.is_valid_utf8(RAW) | F.col(UNDECODED)
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
    """Returns the reading of values in paths: as Hive and Spark write them, without the files'
    formats."""
    options = {k: v for k, v in how.options.items() if k.lower() == "timezone"}
    return replace(how, options=options, base64=False)


def _is_below(headers: Mapping[int, Sequence[str]]) -> Column:
    """Returns whether a line is below the header of its file.

    Args:
        headers: the files by line number of their header.
    """
    if len(headers) == 1:
        return F.col(POSITION) > next(iter(headers))
    line = F.lit(0)
    for number, files in headers.items():
        line = F.when(F.col(FILE).isin(list(files)), number).otherwise(line)
    return F.col(POSITION) > line
