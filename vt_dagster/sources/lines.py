"""Lines of JSON and CSV files as rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import StructType

from vt_dagster.sources.csv_text import one_record, read_record
from vt_dagster.sources.json_text import parse, read_object
from vt_dagster.sources.values import Reading

_TEXTS, _ROW = "_texts", "_row"


def with_object(
    lines: DataFrame, line: str, schema: StructType, how: Reading
) -> tuple[DataFrame, Column]:
    """Lines, and the JSON object of each as a row: null where it is none.

    Args:
        line: the column with the lines.
    """
    columns, row = read_object(parse(F.col(line), schema, how.options, "_"), schema, how, "_")
    for name, column in columns.items():
        lines = lines.withColumn(name, column)
    return lines, row


def with_record(
    lines: DataFrame,
    line: str,
    file: str,
    headers: Mapping[tuple[str, ...], Sequence[str]],
    schema: StructType,
    how: Reading,
) -> tuple[DataFrame, Column]:
    """The same of lines of CSV.

    Args:
        line, file: the columns with a line and with its file's name.
        headers: the columns that files name, and those files.
    """
    lines = lines.withColumn(_TEXTS, one_record(line, file, headers, schema, how.options))
    lines = lines.withColumn(_ROW, read_record(F.col(_TEXTS), F.col(line), schema, how))
    return lines, F.col(_ROW)
