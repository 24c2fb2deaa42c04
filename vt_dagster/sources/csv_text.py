"""Lines of CSV files as records: which columns a file has, and whether a line is one whole record."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence

from pyspark.sql import Column
from pyspark.sql import functions as F
from pyspark.sql.types import StringType, StructField, StructType

from vt_dagster.sources.directory import FileInfo
from vt_dagster.sources.nested import read_row
from vt_dagster.sources.values import Reading, of_text
from vt_dagster.storage import delta

_CORRUPT = "_corrupt"
_LONGEST = 1 << 20
_UNIT = "\x1f"
"""Stands for a separator of several characters, of which Python's reader knows none."""


def header_of(file: FileInfo, options: Mapping[str, str]) -> tuple[str, ...]:
    """The columns that a file's first line names; none where the file is empty. Does not use Spark.

    Raises:
        UnicodeDecodeError: it is no text.
        csv.Error: it is no line of CSV.
    """
    fs, local = delta.filesystem(file.path)
    with fs.open(local, "rb", compression="infer") as lines:
        first = lines.readline(_LONGEST + 1).decode("utf-8-sig").rstrip("\r\n")
    if len(first) > _LONGEST:
        raise csv.Error(f"more than {_LONGEST} characters")
    if "\r" in first:
        raise csv.Error("a carriage return that no line feed follows")
    separator, quote = options.get("sep", options.get("delimiter", ",")), options.get("quote", '"')
    read = csv.reader(
        [first.replace(separator, _UNIT)],
        delimiter=_UNIT,
        quoting=csv.QUOTE_MINIMAL if len(quote) == 1 else csv.QUOTE_NONE,
        quotechar=quote if len(quote) == 1 else '"',
    )
    return tuple(column.replace(_UNIT, separator) for column in next(read, []))


def one_record(
    line: str,
    file: str,
    headers: Mapping[tuple[str, ...], Sequence[str]],
    schema: StructType,
    options: Mapping[str, str],
) -> Column:
    """A line as a struct of texts, one for each of the schema's columns, and what of it could not be
    read, see :func:`read_record`.

    Args:
        line, file: the columns with a line and with its file's name.
        headers: the columns that files name, and those files.
    """
    options = {**options, "mode": "PERMISSIVE", "columnNameOfCorruptRecord": _CORRUPT}
    # A quote in a quoted field is doubled (RFC 4180); Spark's own default is a backslash.
    options = {"escape": options.get("quote", '"'), **options}
    parsed = F.lit(None)
    for header, names in headers.items():
        if not header:  # an empty file has no line
            continue
        # a column that the schema does not have is left out
        fields = [
            StructField(c if c in schema.names else f"_extra{i}", StringType())
            for i, c in enumerate(header)
        ]
        lenient = StructType(
            [*nullable(StructType(fields)).fields, StructField(_CORRUPT, StringType())]
        )
        kinds = ", ".join(f"`{f.name}` string" for f in lenient.fields)
        row = F.from_csv(F.col(line), kinds, options)
        there = {*header, _CORRUPT}
        chosen = F.struct(
            *[
                (row[c] if c in there else F.lit(None).cast("string")).alias(c)
                for c in [*schema.names, _CORRUPT]
            ]
        )
        parsed = F.when(F.col(file).isin(list(names)), chosen).otherwise(parsed)
    return parsed


def read_record(row: Column, line: Column, schema: StructType, how: Reading) -> Column:
    """Of what :func:`one_record` gives: a struct of the columns; null where the line is no record, or
    has a text that is no value of its column."""
    whole = row.isNotNull() & row[_CORRUPT].isNull() & ~_is_cut_off(line, how.options)
    return read_row(row, schema, lambda text, kind, path: of_text(text, kind, how, path), whole)


def _is_cut_off(line: Column, options: Mapping[str, str]) -> Column:
    """Whether a line begins or ends within quotes: half a record, with a line break in a field.

    Spark takes what stands there for the whole value of a last field.
    """
    quote = options.get("quote", '"')
    escape = options.get("escape", quote)
    if quote in ("", "\0"):
        return F.lit(False)
    if escape != quote:
        line = F.replace(line, F.lit(escape + quote), F.lit(""))
    return (F.length(line) - F.length(F.replace(line, F.lit(quote), F.lit("")))) % 2 == 1


def nullable(schema: StructType) -> StructType:
    """The same columns, each of which may be null."""
    return StructType([StructField(f.name, f.dataType) for f in schema.fields])
