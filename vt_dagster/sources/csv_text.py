"""Lines of CSV files as records: the header of a file, and the checks that a line is one record."""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from pyspark.sql import Column
from pyspark.sql import functions as F
from pyspark.sql.types import DataType, StringType, StructField, StructType

from vt_dagster.sources.consumed_files import FileInfo
from vt_dagster.sources.nested_values import read_row
from vt_dagster.sources.text_lines import LINE_OPTIONS, first_lines
from vt_dagster.sources.value_reader import Reading, of_text
from vt_dagster.topology.schema import earlier_names

_CORRUPT = "_corrupt"
_LONGEST = 1 << 20
_OF_LINES = {"header", "comment", *LINE_OPTIONS}
"""Options already applied when a file is split into lines."""
_MOST_COLUMNS = 20480
"""Spark's own limit."""
_UNIT = "\x1f"
"""Replaces a separator of several characters, which Python's CSV reader does not support."""


class Header(NamedTuple):
    """The header of a CSV file.

    Args:
        columns: the names; empty if the file is empty.
        line: the line of the header, from 1; 0 = no header: the columns are the schema's.
    """

    columns: tuple[str, ...]
    line: int


def header_of(file: FileInfo, options: Mapping[str, str], schema: StructType | None = None) -> Header:
    """Returns the header of a file: the first line that is not blank or a comment. Does not use Spark.

    Args:
        schema: the columns, in order, of a file without a header; None = none.

    Raises:
        UnicodeDecodeError: the line is not text in the file's encoding.
        csv.Error: the line is not CSV.
        OSError, EOFError, zlib.error: the file cannot be read.
    """
    if options.get("header") == "false":
        gone = set[str]() if schema is None else earlier_names(schema)
        return Header(tuple(n for n in (schema.names if schema else ()) if n not in gone), 0)
    comment = options.get("comment")
    for number, line in enumerate(first_lines(file, options, _LONGEST), 1):
        if len(line) > _LONGEST:
            raise csv.Error(f"more than {_LONGEST} characters")
        if "\r" in line and "lineSep" not in options:
            raise csv.Error("a carriage return that no line feed follows")
        if line.strip(" ") and not (comment and line.startswith(comment)):
            return Header(_fields(line, options), number)
    return Header((), 1)


def _fields(first: str, options: Mapping[str, str]) -> tuple[str, ...]:
    separator, quote = options.get("sep", ","), options.get("quote", '"')
    read = csv.reader(
        [first.replace(separator, _UNIT)],
        delimiter=_UNIT,
        quoting=csv.QUOTE_MINIMAL if len(quote) == 1 else csv.QUOTE_NONE,
        quotechar=quote if len(quote) == 1 else '"',
    )
    names = [column.replace(_UNIT, separator) for column in next(read, [])]
    if options.get("ignoreLeadingWhiteSpace") == "true":
        names = [name.lstrip() for name in names]
    if options.get("ignoreTrailingWhiteSpace") == "true":
        names = [name.rstrip() for name in names]
    return tuple(names)


def one_record(
    line: str,
    file: str,
    headers: Mapping[tuple[str, ...], Sequence[str]],
    schema: StructType,
    options: Mapping[str, str],
) -> Column:
    """Returns a line as a struct of texts, one per column of the schema, and Spark's corrupt record;
    see :func:`read_record`.

    Args:
        line, file: the names of the columns with the line and with its file's name.
        headers: the files of each header.
    """
    kept = {name: text for name, text in options.items() if name not in _OF_LINES}
    options = {**kept, "mode": "PERMISSIVE", "columnNameOfCorruptRecord": _CORRUPT}
    text = _of_few_columns(F.col(line), options)
    # A quote in a quoted field is doubled (RFC 4180); Spark's own default is a backslash.
    options = {"escape": options.get("quote", '"'), **options}
    parsed = F.lit(None)
    for header, names in headers.items():
        if not header:  # an empty file has no lines
            continue
        # Columns that the schema lacks are read under other names and dropped below.
        fields = [
            StructField(c if c in schema.names else f"_extra{i}", StringType())
            for i, c in enumerate(header)
        ]
        lenient = StructType(
            [*nullable(StructType(fields)).fields, StructField(_CORRUPT, StringType())]
        )
        kinds = ", ".join(f"`{f.name}` string" for f in lenient.fields)
        row = F.from_csv(text, kinds, options)
        there = {*header, _CORRUPT}
        chosen = F.struct(
            *[
                (row[c] if c in there else F.lit(None).cast("string")).alias(c)
                for c in [*schema.names, _CORRUPT]
            ]
        )
        found = F.when(text.isNotNull(), chosen)
        parsed = F.when(F.col(file).isin(list(names)), found).otherwise(parsed)
    return parsed


def read_record(
    row: Column, line: Column, schema: StructType, how: Reading, into: str
) -> dict[str, Column]:
    """Returns columns to add, in this order, to the result of :func:`one_record`.

    The last one, ``<into>_row``, is a struct of the schema's columns; null if the line is not one
    record, or a text does not fit its column.
    """
    whole = row.isNotNull() & row[_CORRUPT].isNull() & ~_is_cut_off(line, how.options)

    def leaf(text: Column, kind: DataType, path: tuple[str, ...]) -> Column:
        return of_text(text, kind, how, path)

    return read_row(row, schema, leaf, into, whole)


def _of_few_columns(line: Column, options: Mapping[str, str]) -> Column:
    """Returns a line; null if it exceeds the parser's ``maxColumns``, which would fail the run."""
    most = int(options.get("maxColumns", _MOST_COLUMNS))
    separator, quote = options.get("sep", ","), options.get("quote", '"')

    def has_few(text: Column) -> Column:
        bare = F.replace(text, F.lit(separator), F.lit(""))
        return F.length(text) - F.length(bare) < most * len(separator)

    found = F.when(has_few(line), line)
    if not quote:
        return found
    # Separators inside quotes do not count. Quotes are removed only if the cheap count is too high.
    mark = re.escape(quote)
    outside = F.regexp_replace(line, f"{mark}[^{mark}]*+{mark}", "")
    return found.when(has_few(outside), line)


def _is_cut_off(line: Column, options: Mapping[str, str]) -> Column:
    """Returns whether a line begins or ends inside quotes: half a record, with a line break in a field.

    Spark would read the rest of the line as the complete value of the last field.
    """
    quote = options.get("quote", '"')
    escape = options.get("escape", quote)
    if quote in ("", "\0"):
        return F.lit(False)
    if escape != quote:
        twice = options.get("charToEscapeQuoteEscaping", escape) + escape
        line = F.replace(F.replace(line, F.lit(twice), F.lit("")), F.lit(escape + quote), F.lit(""))
    return (F.length(line) - F.length(F.replace(line, F.lit(quote), F.lit("")))) % 2 == 1


def nullable(schema: StructType) -> StructType:
    """Returns the schema with every column nullable."""
    return StructType([StructField(f.name, f.dataType) for f in schema.fields])
