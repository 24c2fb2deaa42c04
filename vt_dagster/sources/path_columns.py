"""Partition columns in the path of a file, as in tables of Hive and Spark: ``dt=2026-11-25/a.csv``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from urllib.parse import unquote

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import ArrayType, MapType, StructType

from vt_dagster.sources.consumed_files import FileInfo
from vt_dagster.sources.text_lines import FILE
from vt_dagster.sources.value_reader import Reading, of_text

NULL = "__HIVE_DEFAULT_PARTITION__"
"""The directory value for null in Hive and Spark."""
_TEXT = "_path_"
_SAYS = "_path_says_"


def parts_of(name: str) -> list[tuple[str, str]]:
    """Returns the ``key=value`` directories of a name, outermost first, with percent escapes
    decoded."""
    found = [part.partition("=") for part in name.split("/")[:-1] if "=" in part]
    return [(_decoded(key), _decoded(value)) for key, _, value in found if key]


def said_by(name: str, schema: StructType) -> dict[str, str | None]:
    """Returns the schema's columns in a file's path, as texts; None = null. Names match without case,
    as in Spark."""
    columns = {c.lower(): c for c in schema.names}
    told = [(columns[k.lower()], v) for k, v in parts_of(name) if k.lower() in columns]
    return {column: None if value == NULL else value for column, value in told}


def fault_of_path(name: str, schema: StructType, there: Sequence[str]) -> str | None:
    """Returns the fault of the columns in a file's path; None = no fault.

    Args:
        there: the columns in the file.
    """
    told = [k.lower() for k, _ in parts_of(name)]
    for column in said_by(name, schema):
        kind = schema[column].dataType
        if told.count(column.lower()) > 1:
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
    told = {f.name: said_by(f.name, schema) for f in files}
    columns = [c for c in schema.names if any(c in some for some in told.values())]
    values, misfit = dict(found), F.lit(False)
    if not columns:
        return rows, values, misfit
    texts = [
        (name, *[part for c in columns for part in (some.get(c), c in some)])
        for name, some in told.items()
    ]
    kinds = [f"{_TEXT}{n} string, {_SAYS}{n} boolean" for n in range(len(columns))]
    about = spark.createDataFrame(texts, ", ".join([f"{FILE} string", *kinds]))
    for number, column in enumerate(columns):
        text, said = F.col(f"{_TEXT}{number}"), F.col(f"{_SAYS}{number}")
        value = of_text(text, schema[column].dataType, how, (column,))
        values[column] = F.when(said, value).otherwise(found[column])
        misfit = misfit | (text.isNotNull() & value.isNull())
        if own is not None:
            lowered = F.transform(own, lambda name: F.lower(name))
            both = said & F.array_contains(lowered, column.lower())
            misfit = misfit | F.coalesce(both, F.lit(False))
    return rows.join(F.broadcast(about), FILE), values, misfit


def _decoded(text: str) -> str:
    try:
        return unquote(text, errors="strict")
    except UnicodeDecodeError:
        return text


__all__ = ["NULL", "fault_of_path", "parts_of", "said_by", "with_path_columns"]
