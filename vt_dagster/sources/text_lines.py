"""Files as numbered lines of text: their encoding, what ends a line, and which lines say nothing."""

from __future__ import annotations

import codecs
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import Window as W
from pyspark.sql import functions as F
from pyspark.sql.types import StringType

from vt_dagster.columns import ARRIVAL
from vt_dagster.core.source_records import POSITION, RAW
from vt_dagster.sources.consumed_files import FileInfo
from vt_dagster.sources.file_signatures import byte_order, chunks_of
from vt_dagster.sources.text_options import UTF_8, WIDE, encoding_of
from vt_dagster.storage import delta

FILE, UNDECODED = "_file", "_undecoded"
"""The columns with a line's file, and whether it is no text in the encoding that its user says."""
_BLOCK, _ID, START = "_block", "_id", "_start"
LINE_OPTIONS = ("encoding", "lineSep")
_TEXT, _ALL = "_text", 2**31 - 1
_MARK = "\ufeff"


def own_encoding(file: FileInfo, encoding: str) -> str:
    """The encoding of one file. Of UTF-16 its first two bytes say which of the two it is."""
    if encoding != "utf-16":
        return encoding
    order = byte_order(next(chunks_of(file), b""))
    return "utf-16-be" if order == "UTF-16BE" else "utf-16-le"


def first_lines(file: FileInfo, options: Mapping[str, str], longest: int) -> Iterator[str]:
    """The lines of a file, as :func:`numbered_lines` gives them. Does not use Spark.

    Args:
        longest: line in characters; a longer one is cut off after one more, and is the last.

    Raises:
        UnicodeDecodeError: a line is no text in its encoding.
        OSError, EOFError, zlib.error: the file cannot be read.
    """
    encoding, said = own_encoding(file, encoding_of(options)), options.get("lineSep")
    end, rest, number = (said or "\n").encode(encoding), b"", 0
    width = 4 * longest
    for chunk in chunks_of(file):
        rest += chunk
        while (place := _find(rest, end, encoding)) >= 0:
            number += 1
            yield _line(rest[:place], encoding, said, number, longest)
            rest = rest[place + len(end) :]
        if len(rest) > width:
            yield _line(rest[:width], encoding, said, number + 1, longest, whole=False)
            return
    if rest:
        yield _line(rest, encoding, said, number + 1, longest)


def _find(text: bytes, end: bytes, encoding: str) -> int:
    """Where a line ends; in UTF-16 at whole characters only."""
    place = text.find(end)
    while encoding in WIDE and place % 2 == 1:
        place = text.find(end, place + 1)
    return place


def _line(
    some: bytes, encoding: str, said: str | None, number: int, longest: int, whole: bool = True
) -> str:
    if number == 1 and encoding not in WIDE:
        some = some.removeprefix(codecs.BOM_UTF8)  # as Hadoop does, whatever the encoding
    text = codecs.getincrementaldecoder(encoding)("strict").decode(some, final=whole)
    text = text.removeprefix(_MARK) if number == 1 else text
    text = text.removesuffix("\r") if said is None else text
    return text[: longest + 1]


def numbered_lines(
    spark: SparkSession, files: Sequence[FileInfo], options: Mapping[str, str]
) -> DataFrame:
    """The lines of files, in order of arrival.

    Plan: two scans, one of them for the number of lines in each block, which is then broadcast; no
    shuffle of lines. Of another encoding than UTF-8 the lines go through Python in Arrow batches.

    Returns:
        ``_raw`` (the line; of one that is no text in its encoding its bytes), ``_file``, ``_arrival``
        (0, 1, …), ``_position`` (from 1 in each file), ``_undecoded``.
    """
    encoding = encoding_of(options)
    groups: dict[str, list[FileInfo]] = {}
    for file in files:
        groups.setdefault(own_encoding(file, encoding), []).append(file)
    lines = None
    for one, some in groups.items():
        more = _lines_of(spark, some, one, options.get("lineSep"))
        lines = more if lines is None else lines.unionByName(more)
    assert lines is not None
    blocks = lines.groupBy(FILE, _BLOCK).agg(F.count(F.lit(1)).alias(START), F.min(_ID).alias("_first"))
    starts = running_start(blocks, [FILE, _BLOCK])
    within_file = W.partitionBy(FILE)
    starts = starts.withColumn("_file_start", F.min(START).over(within_file))
    arrival = F.col(START) + F.col(_ID) - F.col("_first")
    numbered = (
        lines.join(F.broadcast(starts), [FILE, _BLOCK])
        .withColumn(ARRIVAL, arrival)
        .withColumn(POSITION, F.col(ARRIVAL) - F.col("_file_start") + 1)
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


def _lines_of(
    spark: SparkSession, files: Sequence[FileInfo], encoding: str, end: str | None
) -> DataFrame:
    reader = spark.read
    if encoding in WIDE:
        name = "UTF-16BE" if encoding == "utf-16-be" else "UTF-16LE"
        reader = reader.option("encoding", name).option("lineSep", end or "\n")
    elif end is not None:
        reader = reader.option("lineSep", end)
    return reader.text([delta.literal(f.path) for f in files]).select(
        F.col("value").alias(RAW),
        file_name(files).alias(FILE),
        F.col("_metadata.file_block_start").alias(_BLOCK),
        F.monotonically_increasing_id().alias(_ID),
    )


def _decoded(groups: Mapping[str, Sequence[FileInfo]]) -> Column:
    """Lines as text; null where they are none in the encoding of their file."""
    found = F.lit(None).cast("string")
    for encoding, files in groups.items():
        text = _decoder(encoding)(F.col(RAW).cast("binary"))
        found = F.when(F.col(FILE).isin([f.name for f in files]), text).otherwise(found)
    return found


def _decoder(encoding: str) -> Any:
    """A function of a column of bytes: their text; null where they are none in an encoding."""
    import pandas as pd

    def read(batches: Any) -> Any:
        # Self-contained: workers need not have this package.
        import pandas as pd

        def text(raw: bytes | None) -> str | None:
            try:
                return None if raw is None else bytes(raw).decode(encoding)
            except UnicodeDecodeError:
                return None

        for batch in batches:
            yield pd.Series([text(raw) for raw in batch], dtype="object")

    series = Iterator[pd.Series]
    read.__annotations__ = {"batches": series, "return": series}  # Spark takes its kind from them
    return F.pandas_udf(read, StringType())  # pyright: ignore[reportCallIssue, reportArgumentType]


def file_name(files: Sequence[FileInfo]) -> Column:
    """The name of a row's file, with its sub-directories; Spark has its path as it stands in a URL."""
    _, place = delta.filesystem(files[0].path)
    root = "/" + place.removesuffix(files[0].name).lstrip("/")
    path = F.url_decode(F.replace(F.col("_metadata.file_path"), F.lit("+"), F.lit("%2B")))
    path = F.regexp_replace(path, "^[A-Za-z0-9]+:/+", "/")
    return F.substring(path, len(root) + 1, _ALL)


def running_start(counts: DataFrame, order: Sequence[str]) -> DataFrame:
    """Turns a count a group into the number of rows in the groups before it."""
    before = W.orderBy(*order).rowsBetween(W.unboundedPreceding, -1)
    return counts.withColumn(START, F.coalesce(F.sum(START).over(before), F.lit(0)))


__all__ = [
    "FILE",
    "LINE_OPTIONS",
    "START",
    "UNDECODED",
    "file_name",
    "first_lines",
    "numbered_lines",
    "running_start",
]
