"""Lines of CSV files as records: which columns a file has, and whether a line is one whole record."""

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
from vt_dagster.topology.column_renames import earlier_names

_CORRUPT = "_corrupt"
_LONGEST = 1 << 20
_OF_LINES = {"header", "comment", *LINE_OPTIONS}
"""Options that have had their effect once lines have been found."""
_MOST_COLUMNS = 20480
"""Spark's own limit."""
_UNIT = "\x1f"
"""Stands for a separator of several characters, of which Python's reader knows none."""


class Header(NamedTuple):
    """What the header of a CSV file says.

    Args:
        columns: their names; none where the file is empty.
        line: where it stands, from 1; 0 = the file has no header, and its columns are the schema's.
    """

    columns: tuple[str, ...]
    line: int


def header_of(file: FileInfo, options: Mapping[str, str], schema: StructType | None = None) -> Header:
    """The columns of a file, by its first line that is neither blank nor a comment. Does not use Spark.

    Args:
        schema: has the columns, in their order, of a file without a header; None = it has none.

    Raises:
        UnicodeDecodeError: it is no text.
        csv.Error: it is no line of CSV.
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
    """A line as a struct of texts, one for each of the schema's columns, and what of it could not be
    read, see :func:`read_record`.

    Args:
        line, file: the columns with a line and with its file's name.
        headers: the columns that files name, and those files.
    """
    kept = {name: text for name, text in options.items() if name not in _OF_LINES}
    options = {**kept, "mode": "PERMISSIVE", "columnNameOfCorruptRecord": _CORRUPT}
    text = _of_few_columns(F.col(line), options)
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
    """Columns to add, in this order, to what :func:`one_record` gives.

    The last one, ``<into>_row``, is a struct of the schema's columns; null where the line is no record,
    or has a text that is no value of its column.
    """
    whole = row.isNotNull() & row[_CORRUPT].isNull() & ~_is_cut_off(line, how.options)

    def leaf(text: Column, kind: DataType, path: tuple[str, ...]) -> Column:
        return of_text(text, kind, how, path)

    return read_row(row, schema, leaf, into, whole)


def _of_few_columns(line: Column, options: Mapping[str, str]) -> Column:
    """A line; null where it has more columns than Spark's parser takes, which would stop the run."""
    most = int(options.get("maxColumns", _MOST_COLUMNS))
    separator, quote = options.get("sep", ","), options.get("quote", '"')

    def has_few(text: Column) -> Column:
        bare = F.replace(text, F.lit(separator), F.lit(""))
        return F.length(text) - F.length(bare) < most * len(separator)

    found = F.when(has_few(line), line)
    if not quote:
        return found
    # What stands within quotes separates nothing; looked at only where there is much of it.
    mark = re.escape(quote)
    outside = F.regexp_replace(line, f"{mark}[^{mark}]*+{mark}", "")
    return found.when(has_few(outside), line)


def _is_cut_off(line: Column, options: Mapping[str, str]) -> Column:
    """Whether a line begins or ends within quotes: half a record, with a line break in a field.

    Spark takes what stands there for the whole value of a last field.
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
    """The same columns, each of which may be null."""
    return StructType([StructField(f.name, f.dataType) for f in schema.fields])
