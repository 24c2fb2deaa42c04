"""JSON and CSV: options, lines, encodings, rows.

Each of Spark's options has its effect, or is refused when definitions load. Files are read line by
line, values by ``sources.value_reader``, and bad records go to quarantine. A Spark option that
contradicts this would have no effect, so it is an error that names the alternative.

A JSON object is read with each value as the text in which it is written. Spark's JSON reader changes
numbers: 1.10 becomes 1.1 in a STRING, 1e400 Infinity, 200 becomes -56 in a BYTE. Each number is
therefore quoted before Spark parses the object, behind a mark that distinguishes it from a string.
"""

from __future__ import annotations

import codecs
import csv
import difflib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import reduce
from string import ascii_letters
from typing import Any, Literal, NamedTuple
from uuid import uuid4

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import Window as W
from pyspark.sql import functions as F
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    BooleanType,
    DataType,
    DecimalType,
    MapType,
    StringType,
    StructField,
    StructType,
)

from vt_dagster.columns import ARRIVAL
from vt_dagster.core.source_records import POSITION, RAW, are_once
from vt_dagster.errors import SourceError
from vt_dagster.sources.consumed_files import FileInfo, byte_order, chunks_of, is_compressed
from vt_dagster.sources.value_reader import (
    DECIMALS,
    FLOATS,
    INTEGERS,
    NAMED_UNITS,
    TIMES,
    VARIABLE_DECIMAL,
    Reading,
    any_of,
    leaves,
    of_number,
    of_text,
    of_unscaled,
    rarely,
    read_row,
    text_of_unscaled,
    texts_of,
)
from vt_dagster.spark.settings import in_one_task
from vt_dagster.storage import delta
from vt_dagster.topology.schema import earlier_names

# Options


Kind = Literal["jsonl", "csv", "parquet", "message"]
"""JSON lines, CSV files, Parquet files, or a JSON message of Kafka."""

UTF_8 = "utf-8"
WIDE = {"utf-16-le": "utf-16-le", "utf-16-be": "utf-16-be", "utf-16": "utf-16"}
"""Encodings whose line feed has two bytes."""

_ESCAPES = {"t": "\t", "r": "\r", "n": "\n", "b": "\b", "f": "\f", "\\": "\\", '"': '"', "'": "'"}
_SYNONYMS = {"delimiter": "sep", "charset": "encoding", "codec": "compression"}
_LONGEST_SEPARATOR = 2
"""Maximum length of a line separator in characters, as in Spark's CSV reader."""


def _flag(name: str, text: str) -> str:
    if text.lower() not in ("true", "false"):
        raise SourceError(f"expected {name} to be 'true' or 'false', got {text!r}")
    return text.lower()


def _count(name: str, text: str) -> str:
    if re.fullmatch(r"[1-9][0-9]{0,8}", text) is None:
        raise SourceError(f"expected {name} to be a whole number from 1 on, got {text!r}")
    return text


def _text(name: str, text: str) -> str:
    return text


def unescaped(text: str) -> str:
    r"""Returns a separator or quote with Spark's escapes resolved: ``\t`` in two characters is a
    tab."""

    def one(found: re.Match[str]) -> str:
        if found[1].startswith("u"):
            return chr(int(found[1][1:], 16))
        return _ESCAPES.get(found[1], found[0])

    return re.sub(r"\\(u[0-9a-fA-F]{4}|.)", one, text) if len(text) > 1 else text


def _separator(name: str, text: str) -> str:
    found = unescaped(text)
    if not found or "\n" in found or "\r" in found:
        raise SourceError(f"expected {name} to be one character or more within a line, got {text!r}")
    return found


def _character(name: str, text: str) -> str:
    found = unescaped(text)
    if len(found) != 1 or found in "\r\n":
        raise SourceError(f"expected {name} to be one character, got {text!r}")
    return found


def _character_or_none(name: str, text: str) -> str:
    return _character(name, text) if text else text


def _line_end(name: str, text: str) -> str:
    found = unescaped(text)
    if not 1 <= len(found) <= _LONGEST_SEPARATOR:
        raise SourceError(f"expected {name} to be one or two characters, got {text!r}")
    return found


def _one_of(*values: str) -> Callable[[str, str], str]:
    def check(name: str, text: str) -> str:
        found = next((v for v in values if v.lower() == text.lower()), None)
        if found is None:
            raise SourceError(f"expected {name} to be one of {', '.join(values)}, got {text!r}")
        return found

    return check


def _encoding(name: str, text: str) -> str:
    """Returns Python's name of an encoding. Its line feed must be the single byte of ASCII, or the two
    bytes of UTF-16."""
    try:
        # Java prefixes some names of Windows and IBM encodings that Python knows without the prefix.
        found = codecs.lookup(
            re.sub(r"^x-|^windows-(?=31j$)", "", text.strip(), flags=re.IGNORECASE)
        ).name
        ends = "\n".encode(found)
    except (LookupError, UnicodeError, ValueError):
        raise SourceError(
            f"expected {name} to be an encoding that Python knows, for example 'UTF-8', 'ISO-8859-1', "
            f"'windows-1252' or 'UTF-16LE', got {text!r}"
        ) from None
    if found == "utf-8-sig":
        return UTF_8
    if ends != b"\n" and found not in WIDE:
        raise SourceError(
            f"{name} {text!r} has no line feed of one byte, which separates lines: expected UTF-8, "
            "UTF-16 or an encoding that contains ASCII; convert the files"
        )
    return found


_UNREAD_LETTERS = frozenset("ABEFNQWYcenpquw")
"""Letters of a date pattern that Spark does not read, or only writes."""


def _pattern(name: str, text: str) -> str:
    letters = {*"".join(text.split("'")[::2])}
    if odd := sorted(letters & _UNREAD_LETTERS):
        raise SourceError(
            f"expected {name} to be a pattern that Spark can read, without the letters {odd}, got "
            f"{text!r}"
        )
    for needs, needed, what in _NEEDED:
        if needs & letters and not needed & letters:
            raise SourceError(
                f"expected {name} to have {what}, got {text!r}: without it, Spark reads another time"
            )
    return text


_LETTERS = frozenset(ascii_letters)
_NEEDED = (
    (_LETTERS, {"y"}, "a year"),
    ({"d"}, {"M", "L"}, "a month (M) for its day"),
    ({"h", "K"}, {"a"}, "a (AM or PM) for its hour of 12"),
)
"""Letters of a date pattern that need one of other letters."""

_FORMATS = {
    "timeZone": _text,
    **dict.fromkeys(("dateFormat", "timestampFormat", "timestampNTZFormat"), _pattern),
}
_LINES = {"encoding": _encoding, "lineSep": _line_end}
_JSON = dict.fromkeys(
    (
        *("allowComments", "allowUnquotedFieldNames", "allowSingleQuotes", "allowNumericLeadingZeros"),
        *("allowNonNumericNumbers", "allowBackslashEscapingAnyCharacter", "allowUnquotedControlChars"),
    ),
    _flag,
)
_CSV = {
    "sep": _separator,
    "quote": _character_or_none,
    "escape": _character,
    "charToEscapeQuoteEscaping": _character,
    "comment": _character,
    **dict.fromkeys(("header", "ignoreLeadingWhiteSpace", "ignoreTrailingWhiteSpace"), _flag),
    **dict.fromkeys(("nullValue", "emptyValue", "nanValue", "positiveInf", "negativeInf"), _text),
    "maxColumns": _count,
    "unescapedQuoteHandling": _one_of(
        "STOP_AT_CLOSING_QUOTE", "BACK_TO_DELIMITER", "STOP_AT_DELIMITER", "SKIP_VALUE"
    ),
}
FOLLOWED: dict[Kind, dict[str, Callable[[str, str], str]]] = {
    "jsonl": {**_FORMATS, **_LINES, **_JSON},
    "csv": {**_FORMATS, **_LINES, **_CSV},
    "parquet": {},
    "message": {**_FORMATS, **_JSON},
}
"""The supported options, with the check of their values."""

_TYPES = "the schema defines the types of columns: remove it"
_WRITES = "it is an option for writing, and a source only reads: remove it"
_COUNTS = (
    "bad records go to quarantine, and max_bad_share is the share that a run accepts: remove it, and "
    "set max_bad_share"
)
_LISTS = "the source's own settings select the files: remove it, and set pattern or path"
REFUSED = {
    "mode": _COUNTS,
    "columnNameOfCorruptRecord": _COUNTS,
    "multiLine": "a record is one line, which defines its position: deliver JSON lines, CSV without "
    "line breaks in fields, or Parquet",
    "locale": "numbers and dates are read without a locale, with a point before the fraction: declare "
    "the column as STRING and convert it in map_values, for example try_to_number(replace(price, ',', "
    "'.'), '999999.99')",
    "timeFormat": "a text is read as a TIME without it: remove it, and declare a column with another "
    "format as STRING",
    "enableDateTimeParsingFallback": "a time in another format is unreadable: remove it, and set "
    "dateFormat or timestampFormat",
    "maxCharsPerColumn": "a longer value would fail the run: remove it, values of any length are read",
    "compression": "the first bytes and the name of a file define its compression: remove it",
    **dict.fromkeys(
        (
            *("inferSchema", "samplingRatio", "preferDate", "prefersDecimal", "primitivesAsString"),
            *("inferTimestamp", "dropFieldIfAllNull", "singleVariantColumn", "mergeSchema"),
        ),
        _TYPES,
    ),
    "enforceSchema": "columns match by the names in the header: remove it",
    "columnPruning": "every line is checked as a whole: remove it",
    "inputBufferSize": "lines are parsed one by one: remove it",
    "useUnsafeRow": "it is internal to Spark: remove it",
    **dict.fromkeys(
        (
            *("extension", "escapeQuotes", "quoteAll", "pretty", "ignoreNullFields", "sortKeys"),
            "writeNonAsciiCharacterAsCodePoint",
        ),
        _WRITES,
    ),
    **dict.fromkeys(("pathGlobFilter", "modifiedBefore", "modifiedAfter"), _LISTS),
    "recursiveFileLookup": "sub-directories are read; set recursive=False of the source to skip them",
    "ignoreCorruptFiles": "set on_bad_file='quarantine' of the source instead",
    "ignoreMissingFiles": "a file that is removed while a run reads it fails the run: remove it",
}
"""The options that are refused, with the reason and the way out."""
_AS_IT_IS = {
    "mode": "permissive",
    "multiline": "false",
    "inferschema": "false",
    "locale": "en-us",
    "recursivefilelookup": "true",
    "maxcharspercolumn": "-1",
}
"""Values of refused options that are accepted, since they match the behaviour."""


def checked(what: str, kind: Kind, options: Mapping[str, Any]) -> dict[str, str]:
    """Returns a user's options in Spark's spelling, with strings as values.

    Args:
        what: the owner of the options, for messages.

    Raises:
        SourceError: an option is unknown, has no effect, is given twice, or has a wrong value.
    """
    unchecked: Any = options
    if not isinstance(unchecked, Mapping):
        raise SourceError(f"{what}: expected options to be a mapping, got {unchecked!r}; correct it")
    followed = FOLLOWED[kind]
    of_other_kinds = {name for some in FOLLOWED.values() for name in some} - {*followed}
    spelled = {n.lower(): n for n in (*followed, *REFUSED, *of_other_kinds)}
    found: dict[str, str] = {}
    for given, value in options.items():
        name = spelled.get(str(given).lower())
        name = name or _SYNONYMS.get(str(given).lower())
        if name is None:
            raise SourceError(
                f"{what}: expected an option of Spark, got {given!r}{_near(str(given), followed)}"
            )
        text = value if isinstance(value, str) else _as_text(what, name, value)
        if name not in followed:
            if _AS_IT_IS.get(name.lower()) == text.lower() and name in REFUSED:
                continue
            why = REFUSED.get(name) or f"it is an option of other sources, not of {_NAMES[kind]}"
            raise SourceError(f"{what}: expected no option {given!r}, which has no effect: {why}")
        if name in found:
            raise SourceError(f"{what}: the option {name!r} is given twice; remove one of them")
        try:
            found[name] = followed[name](f"the option {given!r}", text)
        except SourceError as error:
            raise SourceError(f"{what}: {error}; correct it") from None
    return found


_NAMES = {"jsonl": "JSON lines", "csv": "CSV", "parquet": "Parquet", "message": "JSON messages"}


def _as_text(what: str, name: str, value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return str(value)
    raise SourceError(f"{what}: expected a text for the option {name!r}, got {value!r}; correct it")


def _near(given: str, followed: Mapping[str, Any]) -> str:
    known = {n.lower(): n for n in (*followed, *_SYNONYMS, *REFUSED)}
    near = difflib.get_close_matches(given.lower(), known, 1)
    meant = f"; did you mean {known[near[0]]!r}?" if near else ""
    some = f"some of {', '.join(sorted(followed))}" if followed else "none"
    return f"{meant or ';'} expected {some}"


def encoding_of(options: Mapping[str, str]) -> str:
    """Returns the declared encoding of files; UTF-8 by default."""
    return options.get("encoding", UTF_8)


# Lines


FILE, UNDECODED, WITHIN = "_file", "_undecoded", "_within"
"""Columns with a line's file, whether the line is not text in the declared encoding, and whether it is
within a quoted field of CSV that an earlier line opens."""
_BLOCK, _ID, START, _ODD = "_block", "_id", "_start", "_odd"
_STRETCH, _STRETCH_BITS = "_stretch", 10
"""Number of CSV lines in a stretch. For each stretch there is a list of its odd lines, see
:func:`_odd_lines`."""
LINE_OPTIONS = ("encoding", "lineSep")
_TEXT, _ALL = "_text", 2**31 - 1
_MARK = "\ufeff"
_LONGEST = 1 << 20
"""Number of characters read of a line without Spark."""


def own_encoding(file: FileInfo, encoding: str) -> str:
    """Returns the encoding of one file; for UTF-16 the byte order mark decides the byte order."""
    if encoding != "utf-16":
        return encoding
    order = byte_order(next(chunks_of(file), b""))
    return "utf-16-be" if order == "UTF-16BE" else "utf-16-le"


def first_lines(file: FileInfo, options: Mapping[str, str]) -> Iterator[str]:
    """Yields the lines of a file, as in :func:`numbered_lines`. A line of more than ``_LONGEST``
    characters is truncated to one more than that, and is the last. Does not use Spark.

    Raises:
        UnicodeDecodeError: a line is not text in the encoding.
        OSError, EOFError, zlib.error: the file cannot be read.
    """
    encoding, separator = own_encoding(file, encoding_of(options)), options.get("lineSep")
    end, rest, number = (separator or "\n").encode(encoding), b"", 0
    width = 4 * _LONGEST
    for chunk in chunks_of(file):
        rest += chunk
        while (place := _find(rest, end, encoding)) >= 0:
            number += 1
            yield _line(rest[:place], encoding, separator, number)
            rest = rest[place + len(end) :]
        if len(rest) > width:
            yield _line(rest[:width], encoding, separator, number + 1, whole=False)
            return
    if rest:
        yield _line(rest, encoding, separator, number + 1)


def _find(text: bytes, end: bytes, encoding: str) -> int:
    """Returns the position of a line end; in UTF-16 at even bytes only."""
    place = text.find(end)
    while encoding in WIDE and place % 2 == 1:
        place = text.find(end, place + 1)
    return place


def _line(some: bytes, encoding: str, separator: str | None, number: int, whole: bool = True) -> str:
    if number == 1 and encoding not in WIDE:
        some = some.removeprefix(codecs.BOM_UTF8)  # as Hadoop does, in any encoding
    text = codecs.getincrementaldecoder(encoding)("strict").decode(some, final=whole)
    text = text.removeprefix(_MARK) if number == 1 else text
    text = text.removesuffix("\r") if separator is None else text
    return text[: _LONGEST + 1]


_SPLITS = ("maxPartitionBytes", "openCostInBytes")
"""Settings of Spark: it does not split a file that is smaller than both."""


def numbered_lines(
    spark: SparkSession, files: Sequence[FileInfo], options: Mapping[str, str], quoted: bool = False
) -> DataFrame:
    """Returns the lines of files, in order of arrival.

    Plan: two scans, one of them for the number of lines per block, which is then broadcast; no shuffle
    of lines. A single file that one task reads takes one scan (of CSV: if it has no quotes). In an
    encoding other than UTF-8, lines go through Python in Arrow batches.

    Args:
        quoted: whether the lines are CSV, in which a quoted field may have line breaks.

    Returns:
        ``_raw`` (the line; its bytes if it is not text in the encoding), ``_file``, ``_arrival``
        (0, 1, …), ``_position`` (from 1 in each file), ``_undecoded``, ``_within``.
    """
    encoding = encoding_of(options)
    groups: dict[str, list[FileInfo]] = {}
    for file in files:
        groups.setdefault(own_encoding(file, encoding), []).append(file)
    lines = None
    for one, some in groups.items():
        more = _lines_of(spark, some, one, options.get("lineSep"), quoted)
        lines = more if lines is None else lines.unionByName(more)
    assert lines is not None
    # The bytes of UTF-16 are no text yet.
    quoted = quoted and encoding not in WIDE and options.get("quote", '"') not in _NO_QUOTE
    no = F.lit(False)
    one_task = encoding == UTF_8 and _in_one_task(spark, files)
    if one_task and not (quoted and _has_quotes(files[0], options)):
        position = (F.col(_ID) + 1).alias(POSITION)
        flags = no.alias(UNDECODED), no.alias(WITHIN)
        return lines.select(RAW, FILE, F.col(_ID).alias(ARRIVAL), position, *flags)
    place, odds = [FILE, _BLOCK], list[Column]()
    if quoted:
        place.append(_STRETCH)
        lines = lines.withColumn(_STRETCH, F.shiftright(_ID, _STRETCH_BITS))
        odds.append(_odd_lines(options).alias(_ODD))
    counts = F.count(F.lit(1)).alias(START), F.min(_ID).alias("_first")
    starts = running_start(lines.groupBy(*place).agg(*counts, *odds), place)
    starts = starts.withColumn("_file_start", F.min(START).over(W.partitionBy(FILE)))
    if quoted:
        for name, column in _around(place).items():
            starts = starts.withColumn(name, column)
    arrival = F.col(START) + F.col(_ID) - F.col("_first")
    numbered = (
        lines.join(F.broadcast(starts), place)
        .withColumn(ARRIVAL, arrival)
        .withColumn(POSITION, F.col(ARRIVAL) - F.col("_file_start") + 1)
        .withColumn(WITHIN, _is_within() if quoted else no)
    )
    if encoding == UTF_8:
        return numbered.withColumn(UNDECODED, F.lit(False))
    decoded = numbered.withColumn(_TEXT, _decoded(groups))
    text = F.col(_TEXT)
    first = (F.col(POSITION) == 1) & F.startswith(text, F.lit(_MARK))
    text = F.when(first, F.substring(text, 2, _ALL)).otherwise(text)
    if encoding in WIDE and "lineSep" not in options:
        text = F.regexp_replace(text, r"\r\z", "")
    return decoded.withColumns({RAW: F.coalesce(text, RAW), UNDECODED: F.col(_TEXT).isNull()})


def _odd_lines(options: Mapping[str, str]) -> Column:
    """Returns the lines of a stretch that begin or end inside quotes, in order: their number, whether
    they open a field, and whether they close one."""
    line = F.col(RAW)
    about = F.struct(_ID, _opens(line, options).alias("opens"), _closes(line, options).alias("closes"))
    odd = F.contains(line, F.lit(options.get("quote", '"'))) & _is_cut_off(line, options)
    return F.array_sort(F.collect_list(F.when(odd, about)))


def _around(place: Sequence[str]) -> dict[str, Column]:
    """Returns whether the last odd line before a stretch opens a field, and whether the first one after
    it closes one."""
    order = [F.col(name) for name in place[1:]]
    before = W.partitionBy(FILE).orderBy(*order).rowsBetween(W.unboundedPreceding, -1)
    # Spark computes a frame to the end of its partition anew for each row: so the other way round.
    after = W.partitionBy(FILE).orderBy(*[c.desc() for c in order])
    last, first = F.get(_ODD, F.size(_ODD) - 1)["opens"], F.get(_ODD, F.lit(0))["closes"]
    return {
        "_opened": F.last(last, True).over(before),
        "_closed": F.last(first, True).over(after.rowsBetween(W.unboundedPreceding, -1)),
    }


def _is_within() -> Column:
    """Returns whether a line is within a quoted field: the last odd line before it opens the field, and
    the first one after it closes it. A quote that is never closed affects its own line alone."""
    earlier = F.filter(_ODD, lambda one: one[_ID] < F.col(_ID))
    later = F.filter(_ODD, lambda one: one[_ID] > F.col(_ID))
    opened = F.coalesce(F.get(earlier, F.size(earlier) - 1)["opens"], F.col("_opened"))
    closed = F.coalesce(F.get(later, F.lit(0))["closes"], F.col("_closed"))
    return F.coalesce(opened & closed, F.lit(False))


def _has_quotes(file: FileInfo, options: Mapping[str, str]) -> bool:
    quote = options.get("quote", '"').encode()
    return any(quote in chunk for chunk in chunks_of(file))


def _in_one_task(spark: SparkSession, files: Sequence[FileInfo]) -> bool:
    """Returns whether one task reads all lines in order: there is one file, and Spark does not split a
    file of its size."""
    if len(files) > 1:
        return False
    settings = [spark.conf.get(f"spark.sql.files.{name}") or "" for name in _SPLITS]
    found = [re.fullmatch(r"(\d+)([bkm]?)b?", text.lower()) for text in settings]
    units = {"": 1, "b": 1, "k": 1 << 10, "m": 1 << 20}
    return all(one and files[0].size <= int(one[1]) * units[one[2]] for one in found)


def _lines_of(
    spark: SparkSession, files: Sequence[FileInfo], encoding: str, end: str | None, csv: bool
) -> DataFrame:
    reader, line = spark.read, F.col("value")
    if encoding in WIDE:
        name = "UTF-16BE" if encoding == "utf-16-be" else "UTF-16LE"
        reader = reader.option("encoding", name).option("lineSep", end or "\n")
    elif end is not None:
        reader = reader.option("lineSep", end)
    elif csv:
        # Spark also ends a line at a carriage return alone, which in CSV is part of a value. The last
        # byte is cut off, not the last character: the text may have another encoding than UTF-8.
        reader = reader.option("lineSep", "\n")
        cut = F.substring(line.cast("binary"), F.lit(1), F.octet_length(line) - 1).cast("string")
        line = F.when(F.endswith(line, F.lit("\r")), cut).otherwise(line)
    lines = reader.text([delta.literal(f.path) for f in files]).select(
        line.alias(RAW),
        file_name(files).alias(FILE),
        F.col("_metadata.file_block_start").alias(_BLOCK),
        F.monotonically_increasing_id().alias(_ID),
    )
    return in_one_task(lines, [f.size for f in files])


def _decoded(groups: Mapping[str, Sequence[FileInfo]]) -> Column:
    """Returns lines as text; null if they are not text in their file's encoding."""
    found = F.lit(None).cast("string")
    for encoding, files in groups.items():
        text = _decoder(encoding)(F.col(RAW).cast("binary"))
        found = F.when(F.col(FILE).isin([f.name for f in files]), text).otherwise(found)
    return found


def _decoder(encoding: str) -> Any:
    """Returns a UDF from bytes to text in an encoding; null if they are not text."""

    def text(raw: bytes | None) -> str | None:
        try:
            return None if raw is None else bytes(raw).decode(encoding)
        except UnicodeDecodeError:
            return None

    return text_udf(lambda: text)


def text_udf(reader: Callable[[], Callable[[Any], str | None]]) -> Any:
    """Returns a UDF that turns each value of a column into text or null.

    Args:
        reader: called in each worker, which need not have this package; returns the function of a
            value.
    """
    import pandas as pd

    def read(batches: Any) -> Any:
        import pandas as pd

        text = reader()
        for batch in batches:
            yield pd.Series([text(raw) for raw in batch], dtype="object")

    series = Iterator[pd.Series]
    # Spark derives the kind of UDF from the annotations.
    read.__annotations__ = {"batches": series, "return": series}
    return F.pandas_udf(read, StringType())  # pyright: ignore[reportCallIssue, reportArgumentType]


def file_name(files: Sequence[FileInfo]) -> Column:
    """Returns the name of a row's file, with sub-directories."""
    if len(files) == 1:
        return F.lit(files[0].name)
    _, place = delta.filesystem(files[0].path)
    root = "/" + place.removesuffix(files[0].name).lstrip("/")
    return F.substring(file_path(), len(root) + 1, _ALL)


def file_path() -> Column:
    """Returns the path of a row's file without the protocol; Spark has it URL-encoded."""
    path = F.url_decode(F.replace(F.col("_metadata.file_path"), F.lit("+"), F.lit("%2B")))
    return F.regexp_replace(path, "^[A-Za-z0-9]+:/+", "/")


def running_start(counts: DataFrame, order: Sequence[str]) -> DataFrame:
    """Replaces the count of each group by the number of rows in the groups before."""
    before = W.orderBy(*order).rowsBetween(W.unboundedPreceding, -1)
    return counts.withColumn(START, F.coalesce(F.sum(START).over(before), F.lit(0)))


# JSON


MANY_BYTES = 1 << 22
"""Size in bytes of files from which on JSON lines are first read by a pattern. The pattern is fast, but
takes time to plan."""
_CORRUPT = "_corrupt"
_JSON_ALL, _END = f"_all_{uuid4().hex}", f"_end_{uuid4().hex}"
NUMBER = f"#{uuid4().hex[:12]}"
"""Random names that no text contains."""
PAYLOAD, SCHEMA = "payload", "schema"
SCHEMA_OF = "_schema"
_BARE = (*INTEGERS, *FLOATS, BooleanType)
"""Types whose values in JSON may be written with or without quotes."""
_LOGICAL = (*TIMES, *INTEGERS, *FLOATS, DecimalType, StringType)
"""Types that a value of a logical type of Connect fits into."""


class Parsed(NamedTuple):
    """A parsed text.

    Args:
        columns: intermediate columns to add first, in this order, by name. Each refers to those before
            it, so that a text is parsed once, however many columns refer to it.
        texts: a struct with the columns as texts, and Connect's ``schema``; null if the text is not one
            whole object with the expected names.
        enveloped: whether a text may be in Connect's envelope.
        null: whether a text is ``null``, alone or in the envelope; never null.
    """

    columns: dict[str, Column]
    texts: Column
    enveloped: bool
    null: Column


def parse(
    text: Column,
    wanted: StructType,
    options: Mapping[str, str],
    into: str,
    alone: bool = False,
    bare_payload: bool = False,
    usual: Sequence[str] | None = None,
    enveloped: bool = True,
) -> Parsed:
    """Parses a text as one JSON object of texts, and unwraps Connect's envelope: an object that has a
    schema and a payload, and nothing else.

    Spark reads only the first value of a text and ignores the rest. The text is therefore wrapped as
    the first element of an array with an end marker as the second. An object that has a field twice,
    none of the columns, or a name that differs only in case is invalid; so is a text with half of a
    surrogate pair, which Spark replaces by a question mark.

    Args:
        wanted: the fields.
        options: Spark's JSON options.
        into: prefix of the names of the columns.
        alone: whether a text may be the bare value of a single column instead of an object.
        bare_payload: whether an envelope may lack its schema, as for Debezium. The names in nested
            objects are then not checked: Kafka Connect generates them.
        usual: the names that most objects have, in order, or the wanted ones that some lack after
            them: such an object is read by one regular expression, see :func:`_usual_pattern`, which
            takes a third of the time. None = unknown.
        enveloped: whether an envelope is expected, if no wanted column has the name of a part of it.
    """
    columns, tokens = dict[str, Column](), None
    null = F.trim(text, F.lit(" \t\r\n")) == "null"
    usual = _sound_names(wanted, usual)
    in_order = [*usual, *(name for name in wanted.names if name not in usual)]
    pattern = _usual_pattern(wanted, in_order, len(usual)) if usual else None
    if pattern is not None:
        split, tokens = f"{into}_split", F.col(f"{into}_tokens")
        columns[split] = F.regexp_replace(text, pattern, _groups(wanted, in_order))
        is_usual = F.startswith(split, F.lit(NUMBER))
        columns[f"{into}_tokens"] = F.when(is_usual, F.split(split, _TOKEN_END))
        text = F.when(tokens.isNull(), text)
    by_itself = None
    if alone and len(wanted.fields) == 1:
        by_itself = ~F.rlike(text, F.lit(r"\A\s*\{"))
        only = F.concat(F.lit(f'{{"{wanted.names[0]}":'), text, F.lit("}"))
        text = F.when(by_itself, only).otherwise(text)
    whole = F.concat(
        F.lit(f'{{"{_JSON_ALL}":['), _marked(text, options), F.lit(f',{{"{_END}":true}}]}}')
    )
    options = {**options, "mode": "PERMISSIVE", "columnNameOfCorruptRecord": _CORRUPT}
    name, enveloped = f"{into}_keys", enveloped and not {PAYLOAD, SCHEMA} & {*wanted.names}
    keys, inside, packed = F.col(name), F.col(f"{into}_inside"), F.col(f"{into}_packed")
    columns[name] = F.json_object_keys(text)
    if enveloped:
        columns[f"{into}_inside"] = _is_envelope(keys, bare_payload)
        schema = _in_array(_envelope_of(wanted))
        columns[f"{into}_packed"] = F.when(inside, F.from_json(whole, schema, options))
    # Spark has no generated code for from_json and what it reads: so the conditions are around it.
    elsewhere = text.isNotNull() & ~inside if enveloped else text.isNotNull()
    columns[into] = F.when(elsewhere, F.from_json(whole, _in_array(texts_of(wanted)), options))
    sound = ~has_half_pair(text)
    if not bare_payload and any(_has_objects(f.dataType) for f in wanted.fields):
        proper = _has_proper_names(text, wanted, inside if enveloped else None)
        columns[f"{into}_sound"] = sound & proper
        sound = F.col(f"{into}_sound")
    texts = _texts(F.col(into), keys, wanted, by_itself, (usual, in_order) if usual else ())
    if enveloped:
        unpacked = _unpacked(packed, keys, text, wanted, bare_payload)
        texts = F.when(inside, unpacked).otherwise(texts)
        row, whole = _only_row(packed)
        null = null | (inside & whole & row[PAYLOAD].isNull())
    texts = F.when(sound, texts)
    if tokens is not None:
        places = enumerate((name for name in in_order if name in wanted.names), 1)
        found = {name: tokens[n] for n, name in places}
        texts = F.when(tokens.isNotNull(), _texts_of_tokens(found, wanted)).otherwise(texts)
    columns[f"{into}_texts"] = texts
    return Parsed(columns, F.col(f"{into}_texts"), enveloped, F.coalesce(null, F.lit(False)))


_TOKEN_END = "\x1f"
"""Separates the values of an object; no text in JSON has this character."""
_QUOTED = r'"[^"\\\x00-\x1f]*+'
_BARE_NUMBER = r"-?+(?:[1-9][0-9]{0,99}+|0)(?:\.[0-9]{1,99}+)?+(?:[eE][+-]?+[0-9]{1,9}+)?+"
_HALF = re.compile("[\ud800-\udfff]")
_ODD_NAME = re.compile(r'["\\\x00-\x1f]')


def _sound_names(wanted: StructType, names: Sequence[str] | None) -> Sequence[str]:
    """Returns the names of an object if they are sound: one is wanted, and none occurs twice, differs
    from a wanted one only in case, or has half of a surrogate pair; else none."""
    lowered, found = {name.lower() for name in wanted.names}, {*(names or ())}
    alike = [name for name in found if name not in wanted.names and name.lower() in lowered]
    if names is None or alike or not found & {*wanted.names} or len(found) < len(names):
        return ()
    if any(_HALF.search(name) for name in names):
        return ()
    return names


def _usual_pattern(wanted: StructType, names: Sequence[str], usual: int) -> str | None:
    """Returns the pattern of an object with exactly these fields, in order, whose values have no
    escapes. Its groups are the tokens of the wanted fields, see :func:`_token`.

    Args:
        names: names of fields; an object may lack those after the first ``usual`` ones.

    Returns:
        None = such an object cannot be read by its tokens alone: a value is nested, or a name escaped.
    """
    if any(_ODD_NAME.search(name) for name in names):
        return None
    if any(isinstance(f.dataType, StructType | ArrayType | MapType) for f in wanted.fields):
        return None
    others = rf'(?:{_QUOTED}"|{_BARE_NUMBER}|null|true|false)'
    tokens = [_token(wanted[n].dataType) if n in wanted.names else others for n in names]
    fields = [rf'"{re.escape(n)}": ?+{token}' for n, token in zip(names, tokens, strict=True)]
    more = "".join(f"(?:, ?+{field})?+" for field in fields[usual:])
    return rf"\A\{{{', ?+'.join(fields[:usual])}{more}\}}\z"


def _token(kind: DataType) -> str:
    """Returns the pattern of a value. Its groups are the value as written, a string without the quote
    at its end, or empty for null."""
    if isinstance(kind, BooleanType):
        return "(?:(true|false)|null)"
    if isinstance(kind, StringType):
        return f'(?:({_QUOTED})"|null)'
    if isinstance(kind, _BARE):
        return f"(?:({_BARE_NUMBER})|null)"
    return f'(?:({_QUOTED})"|({_BARE_NUMBER})|null)'


def _groups(wanted: StructType, names: Sequence[str]) -> str:
    """Returns the replacement for :func:`_usual_pattern`: a mark, and the token of each field."""
    found, group = [NUMBER], 1
    for name in names:
        if name in wanted.names:
            one = isinstance(wanted[name].dataType, (StringType, *_BARE))
            found.append(f"${group}" if one else f"${group}${group + 1}")
            group += 1 if one else 2
    return _TOKEN_END.join(found)


def _texts_of_tokens(tokens: Mapping[str, Column], wanted: StructType) -> Column:
    """Returns the struct of :func:`_texts` for the groups of :func:`_usual_pattern`, by name."""
    texts = list[Column]()
    for f in wanted.fields:
        token = tokens[f.name]
        there, quoted = token != "", F.substring(token, 2, _ALL)
        if isinstance(f.dataType, StringType):
            text = F.when(there, quoted)
        elif isinstance(f.dataType, _BARE):
            text = F.when(there, token)
        else:
            number = F.when(there, F.concat(F.lit(NUMBER), token))
            text = F.when(F.startswith(token, F.lit('"')), quoted).otherwise(number)
        texts.append(text.alias(f.name))
    return F.struct(*texts, F.lit(None).cast(_connect(wanted)).alias(SCHEMA_OF))


_PAIRS = (
    r"(?s)\A(?:[^\\]++|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}"
    r"|\\(?!u[dD][89a-fA-F]).)*+\z"
)


def has_half_pair(text: Column) -> Column:
    """Returns whether a JSON text escapes half of a surrogate pair, which is no character; may be null
    if the text is."""
    escapes = F.contains(text, F.lit(r"\ud")) | F.contains(text, F.lit(r"\uD"))
    return escapes & ~F.rlike(text, F.lit(_PAIRS))


def _has_objects(kind: DataType) -> bool:
    if isinstance(kind, ArrayType):
        return _has_objects(kind.elementType)
    return isinstance(kind, StructType) or (isinstance(kind, MapType) and _has_objects(kind.valueType))


def _has_proper_names(text: Column, wanted: StructType, inside: Column | None) -> Column:
    """Returns whether each object in a column has each field once, and no name that differs from a
    wanted one only in case; never null. An object may have none of the wanted fields: it may be of
    another kind.

    Args:
        inside: whether the columns are in Connect's envelope; None = they never are.
    """
    found = F.lit(True)
    for f in wanted.fields:
        if _has_objects(f.dataType):
            one = _part(text, f.name)
            if inside is not None:
                one = F.when(inside, _part(_part(text, PAYLOAD), f.name)).otherwise(one)
            found = found & _is_proper(one, f.dataType)
    return found


def _part(text: Column, name: str) -> Column:
    """Returns a field of an object as JSON. ``from_json`` takes any name, but is slow."""
    if re.fullmatch(r"\w+", name):
        return F.get_json_object(text, f"$.{name}")
    return F.from_json(text, StructType([StructField(name, StringType())]))[name]


def _is_proper(text: Column, kind: DataType) -> Column:
    if isinstance(kind, ArrayType):
        texts, inner = F.from_json(text, ArrayType(StringType())), kind.elementType
        return F.coalesce(F.forall(texts, lambda one: _is_proper(one, inner)), F.lit(True))
    if isinstance(kind, MapType):
        texts, inner = F.map_values(F.from_json(text, "map<string,string>")), kind.valueType
        return F.coalesce(F.forall(texts, lambda one: _is_proper(one, inner)), F.lit(True))
    assert isinstance(kind, StructType)
    found = has_names_of(text, kind)
    for f in kind.fields:
        if _has_objects(f.dataType):
            found = found & _is_proper(_part(text, f.name), f.dataType)
    return found


def has_names_of(text: Column, wanted: StructType) -> Column:
    """Returns whether an object has no field twice, and no name that differs from a wanted one only in
    case; never null."""

    def are_proper(keys: Column) -> Column:
        same = keys == F.array(*map(F.lit, wanted.names))
        return F.when(same, True).otherwise(are_once(keys) & _are_alike(keys, wanted))

    # Not an expression that refers to the names several times: each would parse the text.
    return F.coalesce(rarely(F.json_object_keys(text), are_proper), F.lit(True))


def _known(keys: Column, wanted: StructType) -> Column:
    return F.size(F.array_intersect(keys, F.array(*map(F.lit, wanted.names))))


def _are_alike(keys: Column, wanted: StructType) -> Column:
    """Returns whether no name differs from a wanted one only in case."""
    lowered = F.array(*[F.lit(n) for n in dict.fromkeys(n.lower() for n in wanted.names)])
    return F.size(F.array_intersect(F.transform(keys, F.lower), lowered)) <= _known(keys, wanted)


_SPELLED = re.compile(rb"payload|\\u00[67]")
"""The name in an envelope, or a letter of it as an escape sequence."""
_FEW_FILES = 16


def may_be_enveloped(files: Sequence[FileInfo], options: Mapping[str, str]) -> bool:
    """Returns whether a line of JSON may be Connect's envelope, by the text of the files. To plan for
    envelopes doubles the time of a small run. Does not use Spark.

    Returns:
        true also if it is not known: large, compressed and many files are not read, and other encodings
        or escape sequences spell the name in other ways.
    """
    ways = "allowbackslashescapinganycharacter"
    if encoding_of(options) != UTF_8 or any(k.lower() == ways for k in options):
        return True
    if len(files) > _FEW_FILES or any(is_compressed(f.name) for f in files):
        return True
    if sum(f.size for f in files) > MANY_BYTES:
        return True
    try:
        return any(_SPELLED.search(b"".join(chunks_of(f))) for f in files)
    except OSError:  # the run fails with a clear error when it reads the file
        return True


def _in_array(fields: StructType) -> StructType:
    """Returns the type of an array of an object and the end marker, see :func:`parse`."""
    one = StructType([*fields.fields, StructField(_END, BooleanType())])
    return StructType([StructField(_JSON_ALL, ArrayType(one)), StructField(_CORRUPT, StringType())])


def _only_row(parsed: Column) -> tuple[Column, Column]:
    """Returns the object before the end marker, and whether it is all that the text has."""
    found = parsed[_JSON_ALL]
    row, last = F.get(found, 0), F.get(found, 1)[_END]
    return row, parsed[_CORRUPT].isNull() & row.isNotNull() & last & (F.size(found) == 2)


def _texts(
    parsed: Column,
    keys: Column,
    wanted: StructType,
    by_itself: Column | None,
    sound: Sequence[Sequence[str]],
) -> Column:
    """Returns the columns as texts.

    Args:
        sound: lists of names that need no further look.
    """
    row, whole = _only_row(parsed)
    # ``json_object_keys`` returns null for JSON that only options allow, such as comments: then the
    # columns decide.
    unnamed = keys.isNull()
    lists = dict.fromkeys(map(tuple, (wanted.names, *sound)))
    is_one = [keys == F.array(*map(F.lit, names)) for names in lists]
    same = F.coalesce(any_of(is_one), F.lit(False))
    whole = whole & (same | unnamed | are_once(keys))
    if by_itself is not None:
        whole = whole & (~by_itself | (~unnamed & (F.size(keys) == 1)))
    no_schema = F.lit(None).cast(_connect(wanted)).alias(SCHEMA_OF)
    some = any_of([row[n].isNotNull() for n in wanted.names])
    ours = F.when(unnamed, some).otherwise((_known(keys, wanted) > 0) & _are_alike(keys, wanted))
    return F.when(whole & (same | ours), F.struct(*[row[n].alias(n) for n in wanted.names], no_schema))


def _is_envelope(keys: Column, bare_payload: bool) -> Column:
    """Returns whether an object has the names of Connect's envelope and no others; never null. In an
    object with other names too, these are columns like others, which are ignored."""
    parts = F.size(F.array_intersect(keys, F.array(F.lit(PAYLOAD), F.lit(SCHEMA))))
    there = F.array_contains(keys, PAYLOAD) if bare_payload else (parts == 2)
    # The number of names is fast to compare, and decides for most objects.
    return F.coalesce((F.size(keys) <= 2) & there & (F.size(keys) == parts), F.lit(False))


def _unpacked(
    parsed: Column, keys: Column, text: Column, wanted: StructType, bare_payload: bool
) -> Column:
    row, whole = _only_row(parsed)
    payload = _payload(row, wanted)
    some = any_of([payload[n].isNotNull() for n in wanted.names])
    if not bare_payload:
        some = some & has_names_of(_part(text, PAYLOAD), wanted)
    schema = row[SCHEMA]
    if not isinstance(wanted.fields[0].dataType, ArrayType | MapType | StructType) and len(wanted) == 1:
        # The schema of a bare value is that of the value itself.
        field = F.struct(F.lit(wanted.names[0]).alias("field"), schema["name"], schema["parameters"])
        of_value = schema.withField("fields", F.array(field))
        schema = F.when(_has_columns(row), schema).otherwise(of_value)
    inner = F.struct(*[payload[n].alias(n) for n in wanted.names], schema.alias(SCHEMA_OF))
    return F.when(whole & are_once(keys) & some, inner)


def read_object(
    parsed: Parsed,
    wanted: StructType,
    how: Reading,
    into: str,
    texts: Column | None = None,
    schema: Column | None = None,
) -> tuple[dict[str, Column], Column]:
    """Returns a parsed text as a row.

    Args:
        texts, schema: the row as texts, and Connect's schema of it; None = those of ``parsed``.

    Returns:
        the columns to add first, and the row: null if the text is invalid, or a value does not fit its
        column.
    """
    texts = parsed.texts if texts is None else texts
    schema = parsed.texts[SCHEMA_OF] if schema is None else schema
    columns, named = dict(parsed.columns), f"{into}_named"
    exact = dict[tuple[str, ...], str]()  # the values whose field in Connect's schema is looked up
    for path, kind in leaves(wanted) if parsed.enveloped else ():
        alone = path[1:] == () and kind == wanted[path[0]].dataType
        if isinstance(kind, (*TIMES, DecimalType) if alone else _LOGICAL):
            exact[path] = f"_{len(exact)}"
    if exact:
        fields = [_named(schema, wanted, path).alias(name) for path, name in exact.items()]
        columns[named] = F.when(schema.isNotNull(), F.struct(*fields))

    plain, numbers, own = f"{into}_plain", f"{into}_numbers", {n: texts[n] for n in wanted.names}
    others = [f.name for f in wanted.fields if isinstance(f.dataType, (StringType, *INTEGERS, *FLOATS))]
    if others and parsed.enveloped:
        columns[numbers] = _with_decimals({name: texts[name] for name in others}, schema)
        found = F.col(numbers)
        for n, name in enumerate(others):
            own[name] = F.when(found.isNotNull(), F.get(found, F.lit(n))).otherwise(own[name])
    bare = [f.name for f in wanted.fields if isinstance(f.dataType, _BARE)]
    own |= {name: F.replace(own[name], F.lit(NUMBER), F.lit("")) for name in bare}
    fields = [text.alias(name) for name, text in own.items()]
    columns[plain] = F.when(texts.isNotNull(), F.struct(*fields))

    def leaf(text: Column, kind: DataType, path: tuple[str, ...]) -> Column:
        if len(path) == 1 and path[0] in bare:
            return of_text(text, kind, how)
        return value_of(text, kind, how, path, F.col(named)[exact[path]] if path in exact else None)

    return columns | read_row(F.col(plain), wanted, leaf, into), F.col(f"{into}_row")


def _with_decimals(texts: Mapping[str, Column], schema: Column) -> Column:
    """Returns an array of the texts of columns: of a decimal in Connect's schema, the number instead of
    its bytes. Null if the schema has no decimal."""

    def with_decimal(one: Column) -> Column:
        of_column = F.filter(decimals, lambda field: field["field"] == one["column"])
        scale = F.get(of_column, F.lit(0))["parameters"]["scale"]
        is_encoded = (F.size(of_column) > 0) & ~one["text"].startswith(NUMBER)
        number = F.when(is_encoded, text_of_unscaled(*_encoded(one["text"], scale)))
        return F.coalesce(number, one["text"])

    decimals = F.filter(schema["fields"], lambda field: field["name"].isin(*DECIMALS))
    each = [F.struct(F.lit(name).alias("column"), text.alias("text")) for name, text in texts.items()]
    # Spark has no generated code for filter.
    some = schema.isNotNull() & (F.size(decimals) > 0)
    return F.when(some, F.transform(F.array(*each), with_decimal))


def _encoded(text: Column, scale: Column) -> tuple[Column, Column]:
    """Returns the base64 and the scale of a decimal; Debezium's of variable scale is an object that has
    both."""
    varies = text.startswith("{")
    value = F.when(varies, F.get_json_object(text, "$.value")).otherwise(text)
    own = F.replace(F.get_json_object(text, "$.scale"), F.lit(NUMBER), F.lit(""))
    return value, F.when(varies, own).otherwise(scale)


def _named(schema: Column, wanted: DataType, path: Sequence[str]) -> Column:
    """Returns the logical type of a value in Connect's schema, and the scale of a decimal."""
    field, kind = schema, wanted
    for name in path:
        assert isinstance(kind, StructType)
        field, kind = _field_of(field, name), kind[name].dataType
        while isinstance(kind, ArrayType | MapType):
            field = field["items" if isinstance(kind, ArrayType) else "values"]
            kind = kind.elementType if isinstance(kind, ArrayType) else kind.valueType
    return F.struct(field["name"].alias("name"), field["parameters"]["scale"].alias("scale"))


def _field_of(schema: Column, name: str) -> Column:
    return F.get(F.filter(schema["fields"], lambda one: one["field"] == name), F.lit(0))


def value_of(
    text: Column, kind: DataType, how: Reading, path: tuple[str, ...] = (), field: Column | None = None
) -> Column:
    """Returns a marked text as a value of a type; null if it does not fit.

    Args:
        field: the field in Connect's schema, with the logical type of a number.
    """
    if field is not None and isinstance(kind, (StringType, *INTEGERS, *FLOATS)):
        is_encoded = field["name"].isin(*DECIMALS) & ~text.startswith(NUMBER)
        number = rarely(text, lambda odd: text_of_unscaled(*_encoded(odd, field["scale"])))
        text = F.coalesce(F.when(is_encoded, number), text)
    if isinstance(kind, StringType):
        marked = F.contains(text, F.lit(NUMBER))
        bare = F.regexp_replace(text, f'"?{NUMBER}([^"]*)"?', "$1")
        return F.when(marked, bare).otherwise(text)
    number = F.replace(text, F.lit(NUMBER), F.lit(""))
    if isinstance(kind, DecimalType):
        plain = of_text(number, kind, how)
        if how.unscaled:
            unscaled = of_unscaled(*_encoded(text, F.lit(str(kind.scale))), kind)
            plain = F.when(text.startswith(NUMBER), plain).otherwise(unscaled)
        if field is None:
            return plain
        by_name = rarely(text, lambda odd: of_unscaled(*_encoded(odd, field["scale"]), kind))
        return F.when(field["name"].isin(*DECIMALS), by_name).otherwise(plain)
    if not isinstance(kind, (*TIMES, BinaryType)):
        return of_text(number, kind, how)
    counted = rarely(number, lambda odd: _counted(odd, kind, how.unit(path), field))
    return F.when(text.startswith(NUMBER), counted).otherwise(of_text(text, kind, how, path))


def _counted(number: Column, kind: DataType, unit: str | None, field: Column | None) -> Column:
    """Returns a number as a value of a time or BINARY column."""
    counted = of_number(number, kind, unit)
    if field is None or not isinstance(kind, TIMES):
        return counted
    names = F.create_map(*[F.lit(part) for pair in NAMED_UNITS.items() for part in pair])
    named = F.try_element_at(names, field["name"])
    return F.when(named.isNotNull(), of_number(number, kind, named)).otherwise(counted)


def _envelope_of(wanted: StructType) -> StructType:
    own = texts_of(wanted)
    inner = own if len(own.fields) > 1 else StringType()
    return StructType([StructField(PAYLOAD, inner), StructField(SCHEMA, _connect(wanted))])


def _connect(kind: DataType) -> StructType:
    """Returns the type of the schema in Connect's envelope, with the parts that values of a type
    have."""
    scale = StructType([StructField("scale", StringType())])
    fields = [StructField(n, StringType()) for n in ("field", "name")]
    fields.append(StructField("parameters", scale))
    if isinstance(kind, StructType):
        parts = [_connect(f.dataType) for f in kind.fields]
        fields.append(StructField("fields", ArrayType(reduce(_merged, parts))))
    elif isinstance(kind, ArrayType):
        fields.append(StructField("items", _connect(kind.elementType)))
    elif isinstance(kind, MapType):
        fields.append(StructField("values", _connect(kind.valueType)))
    return StructType(fields)


def _merged(one: Any, other: Any) -> Any:
    """Returns a type with the fields of both types, at any depth."""
    if isinstance(one, ArrayType):
        return ArrayType(_merged(one.elementType, other.elementType))
    if not isinstance(one, StructType):
        return one
    fields = {f.name: f.dataType for f in one.fields}
    for f in other.fields:
        fields[f.name] = _merged(fields[f.name], f.dataType) if f.name in fields else f.dataType
    return StructType([StructField(name, kind) for name, kind in fields.items()])


def _payload(row: Column, wanted: StructType) -> Column:
    """Returns the content of Connect's envelope; for a single column it may be the value itself."""
    payload = row[PAYLOAD]
    if len(wanted.fields) > 1:
        return payload
    own, name, packed = texts_of(wanted), wanted.names[0], _has_columns(row)
    inner = F.when(packed, F.from_json(payload, own))
    if isinstance(wanted.fields[0].dataType, ArrayType | MapType | StructType):
        return inner
    value = F.when(packed, inner[name]).otherwise(payload)
    return F.struct(value.alias(name))


def _has_columns(row: Column) -> Column:
    """Returns whether a payload is an object of columns, not the value of a single one. Debezium's
    decimal of variable scale is an object too."""
    varies = F.coalesce(row[SCHEMA]["name"] == VARIABLE_DECIMAL, F.lit(False))
    return row[PAYLOAD].startswith("{") & ~varies


def _marked(text: Column, options: Mapping[str, str]) -> Column:
    """Returns a JSON text with its numbers in quotes, behind a mark; invalid JSON remains invalid."""
    enabled = {k.lower(): v.lower() == "true" for k, v in options.items()}
    skipped = [r"[\s{}\[\]:,]++", r'"(?:[^"\\]++|\\.)*+"', r"(?:true|false|null)(?![\w$])"]
    number = r"-?(?:0|[1-9][0-9]*+)(?:\.[0-9]++)?+(?:[eE][+-]?[0-9]++)?+"
    if enabled.get("allowsinglequotes", True):
        skipped.append(r"'(?:[^'\\]++|\\.)*+'")
    if enabled.get("allownumericleadingzeros"):
        number = r"-?[0-9]++(?:\.[0-9]++)?+(?:[eE][+-]?[0-9]++)?+"
    if enabled.get("allownonnumericnumbers", True):
        number = rf"(?:{number}|NaN|[+-]?INF|[+-]?Infinity)"
    if enabled.get("allowcomments"):
        skipped += [r"/\*.*?\*/", r"//[^\n]*+"]
    if enabled.get("allowunquotedfieldnames"):
        skipped.append(r"[\w$]++(?=\s*+:)")
    pattern = rf"(?s)\G((?:{'|'.join(skipped)})*+)({number})(?=[\s,/\]}}]|\z)"
    return F.regexp_replace(text, pattern, f'$1"{NUMBER}$2"')


_OF_SEVERAL_LINES = re.compile(r"\[|\{\Z|\{.*,\Z", re.DOTALL)
_MANY_DIGITS = re.compile(r"(?<![\w.:+-])-?[0-9]{9,19}(?![\w:-])")


def hint_of(texts: Sequence[str], schema: StructType, source: object) -> str:
    """Returns a sentence on how to read unreadable records of JSON or CSV, for a message; empty if it
    is not known.

    Args:
        texts: some of these records.
    """
    cut = any(_OF_SEVERAL_LINES.match(text.strip()) for text in texts)
    if cut and getattr(source, "format", None) == "jsonl":
        return (
            "JSON is read line by line, one object a line: convert a file with an array by "
            "jq -c '.[]', and one with objects of several lines by jq -c . "
        )
    if not hasattr(source, "timestamps"):
        return ""
    how, found = Reading(getattr(source, "timestamps", None)), list[str]()
    for path, kind in leaves(schema):
        number = r'(?:-?[0-9]|"-?[0-9]{9,19}(?:\.[0-9]+)?")'
        named = re.compile(rf'"{re.escape(path[-1])}"\s*:\s*{number}')
        numbers = [named if text.lstrip().startswith("{") else _MANY_DIGITS for text in texts]
        some = any(number.search(text) for number, text in zip(numbers, texts, strict=True))
        if isinstance(kind, TIMES) and how.unit(path) is None and some:
            found.append(".".join(path))
    if not found:
        return ""
    return (
        f"A number in {found} is a time only with its unit: set timestamps of the source, or of its "
        "format, for example timestamps='millis'. "
    )


# CSV


_OF_LINES = {"header", "comment", *LINE_OPTIONS}
"""Options already applied when a file is split into lines."""
_MOST_COLUMNS = 20480
"""Spark's own limit."""
_NO_CHARACTER = "\uffff"
"""Stands for no quote; no text has it."""
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
    for number, line in enumerate(first_lines(file, options), 1):
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
    into: str,
) -> dict[str, Column]:
    """Returns columns to add, in this order, so that a line with any number of columns is parsed once.

    The last one, ``<into>_texts``, is the line as a struct of texts, one per column of the schema, and
    Spark's corrupt record; see :func:`read_record`.

    Args:
        line, file: the names of the columns with the line and with its file's name.
        headers: the files of each header.
    """
    kept = {name: text for name, text in options.items() if name not in _OF_LINES}
    options = {**kept, "mode": "PERMISSIVE", "columnNameOfCorruptRecord": _CORRUPT}
    text = _of_few_columns(F.col(line), options)
    # A quote in a quoted field is doubled (RFC 4180); Spark's own default is a backslash. Its other
    # defaults are a zero character, which is a character like others.
    quote = options.get("quote", '"')
    escape = options.get("escape", quote)
    if quote in _NO_QUOTE:
        quote = escape = _NO_CHARACTER
    options = {"escape": escape, "charToEscapeQuoteEscaping": escape, **options, "quote": quote}
    texts = StructType([StructField(name, StringType()) for name in [*schema.names, _CORRUPT]])
    columns, parsed = dict[str, Column](), F.lit(None).cast(texts)
    for number, (header, names) in enumerate(headers.items()):
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
        own, there = f"{into}_{number}", {*header, _CORRUPT}
        row = F.col(own)
        columns[own] = F.when(F.col(file).isin(list(names)), F.from_csv(text, kinds, options))
        chosen = F.struct(
            *[
                (row[c] if c in there else F.lit(None).cast("string")).alias(c)
                for c in [*schema.names, _CORRUPT]
            ]
        )
        parsed = F.when(row.isNotNull(), chosen).otherwise(parsed)
    return {**columns, f"{into}_texts": parsed}


def read_record(
    row: Column, line: Column, schema: StructType, how: Reading, into: str
) -> dict[str, Column]:
    """Returns columns to add, in this order, to the result of :func:`one_record`.

    The last one, ``<into>_row``, is a struct of the schema's columns; null if the line is not one
    record, or a text does not fit its column.
    """
    odd = _is_cut_off(line, how.options) | _is_malformed(line, how.options) | _is_header(row, schema)
    whole = row.isNotNull() & row[_CORRUPT].isNull() & ~odd

    def leaf(text: Column, kind: DataType, path: tuple[str, ...]) -> Column:
        return of_text(text, kind, how, path)

    return read_row(row, schema, leaf, into, whole)


def _is_header(row: Column, schema: StructType) -> Column:
    """Returns whether a line has the names of the columns: a header within a file, as of two that were
    concatenated, or of one that is read without a header. A column of another type than STRING cannot
    have its name as a value, and a single column may."""
    if len(schema.fields) == 1 or any(f.dataType != StringType() for f in schema.fields):
        return F.lit(False)
    # Of files that were concatenated, each may begin with a byte order mark.
    names = [(row[name], (name, _MARK + name)) for name in schema.names]
    others = any_of([F.coalesce(~value.isin(*some), F.lit(False)) for value, some in names])
    # A column that the file lacks is null.
    there = F.array_compact(F.array(*[row[name] for name in schema.names]))
    return ~others & (F.size(there) > 1)


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


def _is_malformed(line: Column, options: Mapping[str, str]) -> Column:
    """Returns whether text follows a closing quote: Spark would read the field with its quotes. The
    user's choice of ``unescapedQuoteHandling`` has precedence."""
    quote = options.get("quote", '"')
    if quote in _NO_QUOTE or "unescapedQuoteHandling" in options:
        return F.lit(False)
    field, last = _field_patterns(options)
    whole = F.rlike(line, F.lit(rf"(?s)\A(?:{field})*+{last}\z"))
    return F.contains(line, F.lit(quote)) & ~whole


def _opens(line: Column, options: Mapping[str, str]) -> Column:
    """Returns whether the last field of a line begins with a quote that the line does not close."""
    field, _ = _field_patterns(options)
    quote, inner = re.escape(options.get("quote", '"')), _inner_pattern(options)
    return F.rlike(line, F.lit(rf"(?s)\A(?:{field})*+{_blank(options)}{quote}{inner}\z"))


def _closes(line: Column, options: Mapping[str, str]) -> Column:
    """Returns whether a line that begins inside a quoted field closes it and ends outside of quotes."""
    field, last = _field_patterns(options)
    quote, separator = (re.escape(options.get(n, d)) for n, d in (("quote", '"'), ("sep", ",")))
    begin = rf"{_inner_pattern(options)}{quote}{_blanks(options)}"
    return F.rlike(line, F.lit(rf"(?s)\A{begin}(?:{separator}(?:{field})*+{last})?\z"))


def _field_patterns(options: Mapping[str, str]) -> tuple[str, str]:
    """Returns the patterns of a field with its separator, and of the last field."""
    quote, separator = (re.escape(options.get(n, d)) for n, d in (("quote", '"'), ("sep", ",")))
    quoted = rf"{quote}{_inner_pattern(options)}{quote}{_blanks(options)}"
    field = rf"{_blank(options)}(?:{quoted}|(?!{quote})(?:(?!{separator}).)*+)"
    return rf"{field}{separator}", field


def _inner_pattern(options: Mapping[str, str]) -> str:
    quote = options.get("quote", '"')
    escape = options.get("escape", quote)
    if escape == quote:
        return rf"(?:[^{re.escape(quote)}]|{re.escape(quote)}{{2}})*+"
    twice = re.escape(options.get("charToEscapeQuoteEscaping", escape) + escape)
    return rf"(?:{twice}|[^{re.escape(quote)}{re.escape(escape)}]|{re.escape(escape)}.?)*+"


def _blank(options: Mapping[str, str]) -> str:
    return _blanks(options) if options.get("ignoreLeadingWhiteSpace") == "true" else ""


def _blanks(options: Mapping[str, str]) -> str:
    """Returns the pattern of blanks beside a quote; the separator may be a tab."""
    return rf"(?:(?!{re.escape(options.get('sep', ','))})[ \t])*+"


_NO_QUOTE = ("", "\0")


def _is_cut_off(line: Column, options: Mapping[str, str]) -> Column:
    """Returns whether a line begins or ends inside quotes: half a record, with a line break in a field.

    Spark would read the rest of the line as the complete value of the last field.
    """
    quote = options.get("quote", '"')
    escape = options.get("escape", quote)
    if quote in _NO_QUOTE:
        return F.lit(False)
    if escape != quote:
        twice = options.get("charToEscapeQuoteEscaping", escape) + escape
        line = F.replace(F.replace(line, F.lit(twice), F.lit("")), F.lit(escape + quote), F.lit(""))
    return (F.length(line) - F.length(F.replace(line, F.lit(quote), F.lit("")))) % 2 == 1


def nullable(schema: StructType) -> StructType:
    """Returns the schema with every column nullable."""
    return StructType([StructField(f.name, f.dataType) for f in schema.fields])
