"""A directory of files that grows, as a source: each file is consumed once.

Arrival order is the files' names, then the position in the file: a file that appears later with a
smaller name is simply consumed by a later run.
"""

from __future__ import annotations

import csv
import posixpath
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from fnmatch import fnmatch
from typing import Any, Literal, NamedTuple

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import Window as W
from pyspark.sql import functions as F
from pyspark.sql.types import LongType, StringType, StructField, StructType

from vt_dagster.columns import ARRIVAL
from vt_dagster.core.records import POSITION, RAW, REASON, SOURCE, Reason
from vt_dagster.errors import SourceError
from vt_dagster.sources.base import require_limits
from vt_dagster.sources.json_text import one_object, read_object
from vt_dagster.storage import delta
from vt_dagster.storage.positions import Commit, Ranges
from vt_dagster.topology.model import Stream

FileFormat = Literal["jsonl", "csv", "parquet"]

_CORRUPT = "_corrupt"
_FILE, _BLOCK, _ID, _START, _LINE = "_file", "_block", "_id", "_start", "_line"


class FileInfo(NamedTuple):
    """A file of the directory: its name there, its path for Spark and its size in bytes."""

    name: str
    path: str
    size: int


FILES = "files"
"""The name of a files source among a commit's inputs; its offsets count lines."""


@dataclass(frozen=True)
class PinnedFiles:
    """The files that a run takes.

    Args:
        source: their directory.
        files: in order of arrival.
        before: the files consumed by earlier runs: name -> size.
    """

    source: FilesSource
    files: Sequence[FileInfo]
    before: Mapping[str, Any]

    @property
    def max_bad_share(self) -> float:
        return self.source.max_bad_share

    @property
    def max_clock_skew(self) -> timedelta:
        return self.source.max_clock_skew

    @property
    def taken(self) -> Ranges:
        return {}

    @property
    def counts(self) -> dict[str, int]:
        return {}

    @property
    def bytes(self) -> int:
        return sum(f.size for f in self.files)

    @property
    def consumed(self) -> dict[str, Any]:
        return {**self.before, **{f.name: f.size for f in self.files}}

    @property
    def empty(self) -> bool:
        return not self.files

    def read(self, spark: SparkSession, node: Stream) -> DataFrame:
        return self.source.read(spark, self.files, node.schema)

    def position(self, before: Commit, counts: Mapping[str, int]) -> dict[str, Any]:
        first = before.inputs.get(FILES, {}).get(0, 0)
        end = first + counts["in"]
        return {"taken": {FILES: {0: (first, end)}}, "inputs": {FILES: {0: end}}, "files": True}

    def describe(self) -> list[str]:
        names = ", ".join(f.name for f in self.files[:5])
        more = f" and {len(self.files) - 5:,} more" if len(self.files) > 5 else ""
        size = self.bytes / 1000
        return [f"takes {len(self.files):,} file(s), {size:,.1f} kB: {names}{more}"]

    def explain(self, error: Exception) -> SourceError | None:
        return None


@dataclass(frozen=True)
class FilesSource:
    """A directory of JSON lines, CSV or Parquet files that grows.

    Args:
        path: the directory, a local path or a URL that Spark and fsspec both can read. Names that
            begin with ``.`` or ``_`` are not looked at, so write a file under such a name and
            rename it when it is whole.
        format: ``jsonl`` (one JSON object a line), ``csv`` (one record a line, with a header line
            that names the columns, in any order), or ``parquet``.
        pattern: names that count, for example ``*.jsonl``.
        options: Spark's CSV or JSON options, for example ``{"nullValue": "NA"}``.
        max_files_per_run: bounds a run; None = all that are there when it starts.
        max_bad_share: a run with a larger share of quarantined rows fails before its commit.
        max_clock_skew: how far in the future a timestamp may lie, by this machine's clock; one
            further off is quarantined, since it would make everything after it late.
    """

    path: str
    format: FileFormat = "jsonl"
    pattern: str = "*"
    options: dict[str, str] = field(default_factory=dict[str, str], hash=False)
    max_files_per_run: int | None = None
    max_bad_share: float = 0.1
    max_clock_skew: timedelta = timedelta(days=1)

    gives_timestamp = False

    def check(self, name: str, key: Sequence[str], schema: StructType) -> None:
        """Files can give any column; what a file lacks shows when it is read."""

    def __post_init__(self) -> None:
        if self.format not in ("jsonl", "csv", "parquet"):
            raise SourceError(
                f"format of {self.path!r} must be 'jsonl', 'csv' or 'parquet', got {self.format!r}"
            )
        require_limits(self.max_bad_share, self.max_clock_skew)
        if self.max_files_per_run is not None and self.max_files_per_run < 1:
            raise SourceError(f"max_files_per_run must be 1 or more, got {self.max_files_per_run}")

    def describe(self) -> str:
        """What is read, for descriptions and messages."""
        return f"{self.format} files {posixpath.join(str(self.path), self.pattern)}"

    def files(self) -> list[FileInfo]:
        """The files that are there, by name. Does not use Spark."""
        try:
            fs, root = delta.filesystem(str(self.path))
        except (ImportError, ValueError) as error:
            raise SourceError(
                f"{self.path!r} is on a file system that fsspec cannot reach: {error}; correct the "
                "path, or install what the message names"
            ) from None
        if not fs.isdir(root):
            raise SourceError(
                f"expected a directory {self.path!r} with {self.format} files, found none; create it, "
                "or correct the path"
            )
        found = fs.ls(root, detail=True, refresh=True)
        infos = [
            FileInfo(posixpath.basename(f["name"]), fs.unstrip_protocol(f["name"]), f["size"])
            for f in found
            if f["type"] == "file"
        ]
        return sorted(
            i for i in infos if not i.name.startswith((".", "_")) and fnmatch(i.name, self.pattern)
        )

    def pin(
        self,
        before: Commit | None,
        only: Sequence[str] | None = None,
        *,
        consumed: Mapping[str, Any] = {},
    ) -> PinnedFiles:
        """The files that a run takes; see :meth:`pending`. Does not use Spark."""
        return PinnedFiles(self, self.pending(consumed, only), consumed)

    def pending(self, consumed: Mapping[str, Any], only: Sequence[str] | None = None) -> list[FileInfo]:
        """The files that have not been consumed yet, by name, as many as a run may take.

        Args:
            consumed: name -> size, of those that have.
            only: names to choose from; None = all.

        Raises:
            SourceError: a consumed file is there with another size.
        """
        there = self.files()
        changed = [f for f in there if f.name in consumed and consumed[f.name] != f.size]
        if changed:
            one = changed[0]
            raise SourceError(
                f"{len(changed)} file(s) in {self.path} changed after they were consumed, for "
                f"example {one.name}: {consumed[one.name]} bytes then, {one.size} now; a file is "
                "consumed once, so deliver what is new in a file of its own and put the old one back"
            )
        if only is not None:
            missing = sorted(set(only) - {f.name for f in there} - set(consumed))
            if missing:
                raise SourceError(f"{self.path}: the run asks for {missing}, which are not there")
        new = [f for f in there if f.name not in consumed and (only is None or f.name in only)]
        return new[: self.max_files_per_run]

    def read(self, spark: SparkSession, files: Sequence[FileInfo], schema: StructType) -> DataFrame:
        """The rows of some files, in order of arrival.

        Plan: text formats scan twice, once for the number of lines in each block, which is then
        broadcast; no shuffle of rows.

        Returns:
            the schema's columns (all null where a row cannot be read), ``_arrival`` (0, 1, …),
            ``_source`` (file name), ``_position`` (line from 1, of Parquet the row from 1),
            ``_raw`` (the line; of Parquet the row as JSON), ``_reason`` (``unreadable`` or null).

        Raises:
            SourceError: a file lacks a column, or its columns have other types.
        """
        if not files:
            more = [(ARRIVAL, LongType()), (SOURCE, StringType()), (POSITION, LongType())]
            more += [(RAW, StringType()), (REASON, StringType())]
            fields = [StructField(n, t) for n, t in more]
            return spark.createDataFrame([], StructType([*_nullable(schema.fields), *fields]))
        if self.format == "parquet":
            return self._read_parquet(spark, files, schema)
        return self._read_text(spark, files, schema)

    # -- Parquet ---------------------------------------------------------------------------------

    def _read_parquet(
        self, spark: SparkSession, files: Sequence[FileInfo], schema: StructType
    ) -> DataFrame:
        paths = [delta.literal(f.path) for f in files]
        for f, path in zip(files, paths, strict=True):
            there = {c.name: c.dataType for c in spark.read.parquet(path).schema.fields}
            self._require(f.name, list(there), schema)
            wrong = [
                f"{c.name} is {there[c.name].simpleString()}, expected {c.dataType.simpleString()}"
                for c in schema.fields
                if there[c.name] != c.dataType
            ]
            if wrong:
                raise SourceError(
                    f"{f.name}: {'; '.join(wrong)}; correct the schema's types or the file's"
                )
        rows = spark.read.schema(schema).parquet(*paths)
        located = rows.select(
            "*",
            _file_name().alias(_FILE),
            F.col("_metadata.row_index").alias(_LINE),
        )
        sizes = located.groupBy(_FILE).agg(F.count(F.lit(1)).alias(_START))
        starts = _running_start(sizes, [_FILE])
        return located.join(F.broadcast(starts), _FILE).select(
            *schema.names,
            (F.col(_START) + F.col(_LINE)).alias(ARRIVAL),
            F.col(_FILE).alias(SOURCE),
            (F.col(_LINE) + 1).alias(POSITION),
            F.to_json(F.struct(*schema.names)).alias(RAW),
            F.lit(None).cast("string").alias(REASON),
        )

    # -- lines of text ---------------------------------------------------------------------------

    def _read_text(
        self, spark: SparkSession, files: Sequence[FileInfo], schema: StructType
    ) -> DataFrame:
        lines = spark.read.text([delta.literal(f.path) for f in files]).select(
            F.col("value").alias(RAW),
            _file_name().alias(_FILE),
            F.col("_metadata.file_block_start").alias(_BLOCK),
            F.monotonically_increasing_id().alias(_ID),
        )
        blocks = lines.groupBy(_FILE, _BLOCK).agg(
            F.count(F.lit(1)).alias(_START), F.min(_ID).alias("_first")
        )
        starts = _running_start(blocks, [_FILE, _BLOCK])
        within_file = W.partitionBy(_FILE)
        starts = starts.withColumn("_file_start", F.min(_START).over(within_file))
        arrival = F.col(_START) + F.col(_ID) - F.col("_first")
        numbered = (
            lines.join(F.broadcast(starts), [_FILE, _BLOCK])
            .withColumn(ARRIVAL, arrival)
            .withColumn(POSITION, F.col(ARRIVAL) - F.col("_file_start") + 1)
        )
        if self.format == "csv":
            numbered = numbered.where(F.col(POSITION) > 1)
        given = numbered.where(F.trim(RAW) != "")
        if self.format == "csv":
            parsed, row = given.withColumn("_row", self._parse(files, schema)), F.col("_row")
            broken = row.isNull() | row[_CORRUPT].isNotNull() | self._is_cut_off()
        else:
            nullable = StructType(_nullable(schema.fields))
            parsed = given.withColumn("_row", one_object(F.col(RAW), nullable, self.options))
            row, broken = read_object(F.col("_row"))
        broken = broken | ~F.is_valid_utf8(RAW)
        return parsed.select(
            *[F.when(~broken, row[c]).alias(c) for c in schema.names],
            ARRIVAL,
            F.col(_FILE).alias(SOURCE),
            POSITION,
            F.make_valid_utf8(RAW).alias(RAW),
            F.when(broken, Reason.UNREADABLE).alias(REASON),
        )

    def _is_cut_off(self) -> Column:
        """Whether a CSV line begins or ends within quotes: half a record, with a line break in a field.

        Spark takes what stands there for the whole value of a last field.
        """
        quote = self.options.get("quote", '"')
        escape = self.options.get("escape", quote)
        if quote in ("", "\0"):
            return F.lit(False)
        line = F.col(RAW)
        if escape != quote:
            line = F.replace(line, F.lit(escape + quote), F.lit(""))
        return (F.length(line) - F.length(F.replace(line, F.lit(quote), F.lit("")))) % 2 == 1

    def _parse(self, files: Sequence[FileInfo], schema: StructType) -> Column:
        """A CSV line as a struct of the schema's columns and what of it could not be read."""
        options = {**self.options, "mode": "PERMISSIVE", "columnNameOfCorruptRecord": _CORRUPT}
        # A quote in a quoted field is doubled (RFC 4180); Spark's own default is a backslash.
        options = {"escape": options.get("quote", '"'), **options}
        variants: dict[tuple[str, ...], list[str]] = {}
        for f in files:
            variants.setdefault(self._header(f, schema), []).append(f.name)
        types = {c.name: c.dataType for c in schema.fields}
        parsed = F.lit(None)
        for header, names in variants.items():
            # a column that the schema does not have is read as text, and left out
            fields = [
                StructField(c if c in types else f"_extra{i}", types.get(c, StringType()))
                for i, c in enumerate(header)
            ]
            row = F.from_csv(F.col(RAW), _lenient(fields).simpleString(), options)
            chosen = F.struct(*[row[c].alias(c) for c in [*schema.names, _CORRUPT]])
            parsed = F.when(F.col(_FILE).isin(names), chosen).otherwise(parsed)
        return parsed

    def _header(self, file: FileInfo, schema: StructType) -> tuple[str, ...]:
        fs, local = delta.filesystem(file.path)
        with fs.open(local, "rb", compression="infer") as lines:
            first = lines.readline().decode("utf-8-sig").rstrip("\r\n")
        separator = self.options.get("sep", self.options.get("delimiter", ","))
        header = next(csv.reader([first], delimiter=separator), [])
        self._require(file.name, header, schema)
        return tuple(header)

    def _require(self, file: str, there: Sequence[str], schema: StructType) -> None:
        missing = [c for c in schema.names if c not in there]
        if missing:
            raise SourceError(
                f"{file}: expected columns {missing}, but the file has only {list(there)}; add them "
                "to the file, or take them out of the schema"
            )


def _lenient(fields: Sequence[StructField]) -> StructType:
    """Every field may be null, and one takes the text of a row that cannot be read."""
    return StructType([*_nullable(fields), StructField(_CORRUPT, StringType())])


def _nullable(fields: Sequence[StructField]) -> list[StructField]:
    return [StructField(f.name, f.dataType) for f in fields]


def _file_name() -> Column:
    """The name of a row's file; Spark has it as it stands in a URL."""
    return F.url_decode(F.replace(F.col("_metadata.file_name"), F.lit("+"), F.lit("%2B")))


def _running_start(counts: DataFrame, order: Sequence[str]) -> DataFrame:
    """Turns a count a group into the number of rows in the groups before it."""
    before = W.orderBy(*order).rowsBetween(W.unboundedPreceding, -1)
    return counts.withColumn(_START, F.coalesce(F.sum(_START).over(before), F.lit(0)))
