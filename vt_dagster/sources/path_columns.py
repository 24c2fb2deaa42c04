"""Columns that the path of a file gives, as Hive and Spark lay out tables: ``dt=2026-11-25/a.csv``."""

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
"""What Hive and Spark call the directory of rows that have null there."""
_TEXT = "_path_"
_SAYS = "_path_says_"


def parts_of(name: str) -> list[tuple[str, str]]:
    """The ``key=value`` directories of a file's name, outermost first; percent signs are decoded."""
    found = [part.partition("=") for part in name.split("/")[:-1] if "=" in part]
    return [(_decoded(key), _decoded(value)) for key, _, value in found if key]


def said_by(name: str, schema: StructType) -> dict[str, str | None]:
    """The columns of a schema that a file's path gives, as texts; None = null. Upper and lower case
    are one, as in Spark."""
    columns = {c.lower(): c for c in schema.names}
    told = [(columns[k.lower()], v) for k, v in parts_of(name) if k.lower() in columns]
    return {column: None if value == NULL else value for column, value in told}


def fault_of_path(name: str, schema: StructType, there: Sequence[str]) -> str | None:
    """Why the path of a file cannot give columns; None = it can, or gives none.

    Args:
        there: the columns that are in the file.
    """
    told = [k.lower() for k, _ in parts_of(name)]
    for column in said_by(name, schema):
        kind = schema[column].dataType
        if told.count(column.lower()) > 1:
            return f"expected {column}= once in its path, found it more than once; rename a directory"
        if column.lower() in {c.lower() for c in there}:
            return (
                f"expected column {column!r} in its path or in the file, found it in both; take it out "
                f"of the file, or rename the directory, or set path_columns=False of the source: then "
                "the file's column counts"
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
    """Rows with what their files' paths give.

    Plan: a broadcast join, where they give any.

    Args:
        rows: with ``_file``.
        found: the columns as they are in the files, by name.
        how: how the texts of paths are read.
        own: the names of what a row itself has, where each row may have others.

    Returns:
        the rows; their columns out of files and paths; whether a path gives a text that is no value of
        its column, or a column that the row has itself (never null).
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
