"""Files as numbered lines of text, by encoding and line separator."""

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
"""Columns with a line's file, and whether the line is not text in the declared encoding."""
_BLOCK, _ID, START = "_block", "_id", "_start"
LINE_OPTIONS = ("encoding", "lineSep")
_TEXT, _ALL = "_text", 2**31 - 1
_MARK = "\ufeff"


def own_encoding(file: FileInfo, encoding: str) -> str:
    """Returns the encoding of one file; for UTF-16 the byte order mark decides the byte order."""
    if encoding != "utf-16":
        return encoding
    order = byte_order(next(chunks_of(file), b""))
    return "utf-16-be" if order == "UTF-16BE" else "utf-16-le"


def first_lines(file: FileInfo, options: Mapping[str, str], longest: int) -> Iterator[str]:
    """Yields the lines of a file, as in :func:`numbered_lines`. Does not use Spark.

    Args:
        longest: the maximum length in characters; a longer line is truncated to ``longest + 1``, and is
            the last.

    Raises:
        UnicodeDecodeError: a line is not text in the encoding.
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
    """Returns the position of a line end; in UTF-16 at even bytes only."""
    place = text.find(end)
    while encoding in WIDE and place % 2 == 1:
        place = text.find(end, place + 1)
    return place


def _line(
    some: bytes, encoding: str, said: str | None, number: int, longest: int, whole: bool = True
) -> str:
    if number == 1 and encoding not in WIDE:
        some = some.removeprefix(codecs.BOM_UTF8)  # as Hadoop does, in any encoding
    text = codecs.getincrementaldecoder(encoding)("strict").decode(some, final=whole)
    text = text.removeprefix(_MARK) if number == 1 else text
    text = text.removesuffix("\r") if said is None else text
    return text[: longest + 1]


def numbered_lines(
    spark: SparkSession, files: Sequence[FileInfo], options: Mapping[str, str]
) -> DataFrame:
    """Returns the lines of files, in order of arrival.

    Plan: two scans, one of them for the number of lines per block, which is then broadcast; no shuffle
    of lines. In an encoding other than UTF-8, lines go through Python in Arrow batches.

    Returns:
        ``_raw`` (the line; its bytes if it is not text in the encoding), ``_file``, ``_arrival``
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
    """Returns lines as text; null if they are not text in their file's encoding."""
    found = F.lit(None).cast("string")
    for encoding, files in groups.items():
        text = _decoder(encoding)(F.col(RAW).cast("binary"))
        found = F.when(F.col(FILE).isin([f.name for f in files]), text).otherwise(found)
    return found


def _decoder(encoding: str) -> Any:
    """Returns a UDF from bytes to text in an encoding; null if they are not text."""
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
    # Spark derives the kind of UDF from the annotations.
    read.__annotations__ = {"batches": series, "return": series}
    return F.pandas_udf(read, StringType())  # pyright: ignore[reportCallIssue, reportArgumentType]


def file_name(files: Sequence[FileInfo]) -> Column:
    """Returns the name of a row's file, with sub-directories; Spark has only its URL-encoded path."""
    _, place = delta.filesystem(files[0].path)
    root = "/" + place.removesuffix(files[0].name).lstrip("/")
    path = F.url_decode(F.replace(F.col("_metadata.file_path"), F.lit("+"), F.lit("%2B")))
    path = F.regexp_replace(path, "^[A-Za-z0-9]+:/+", "/")
    return F.substring(path, len(root) + 1, _ALL)


def running_start(counts: DataFrame, order: Sequence[str]) -> DataFrame:
    """Replaces the count of each group by the number of rows in the groups before."""
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
