"""A directory of files that grows, as a source: each file is consumed once.

Arrival order is the files' names, then the position in the file: a file that appears later with a
smaller name is simply consumed by a later run. A name is the path below the directory.
"""

from __future__ import annotations

import posixpath
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Literal
from urllib.parse import unquote

from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import StructType

from vt_dagster.errors import SourceError, TopologyError
from vt_dagster.sources.bad_files import columns_of, faults_of_parquet, faults_of_text, set_aside
from vt_dagster.sources.base import (
    End,
    News,
    Uncounted,
    read_by_all_names,
    require_limits,
    require_source_recorded_at,
    with_source_recorded_at,
)
from vt_dagster.sources.consumed_files import (
    FileInfo,
    Memory,
    chosen,
    files_in,
    remembered,
    require_untouched,
    unconsumed,
    written_at,
)
from vt_dagster.sources.file_rows import FileFormat, parquet_rows, text_rows
from vt_dagster.sources.nested_values import require_units
from vt_dagster.sources.text_options import checked
from vt_dagster.sources.value_reader import Reading, Timestamps
from vt_dagster.spark.jars import one_line
from vt_dagster.storage.commit_log import Commit
from vt_dagster.storage.shared_paths import address, unseen
from vt_dagster.topology.model import Stream

FILES = "files"
"""The name of a files source among a commit's inputs; its offsets count lines."""
_WORDS = ("run", "file_time")
"""Times of record that are no column's."""
_LOOKED_AT = 20
"""Of so many files a run says which columns they have besides the schema's."""


@dataclass(frozen=True)
class PinnedFiles(Uncounted):
    """The files that a run takes.

    Args:
        source: their directory.
        files: in order of arrival.
        before: the files consumed by earlier runs, see ``consumed_files.Memory``.
        left: the names of those that wait for later runs.
    """

    source: FilesSource
    files: Sequence[FileInfo]
    before: Mapping[str, Any]
    batch: int
    left: Sequence[str] = ()

    @property
    def source_end(self) -> str:
        return max((*(f.name for f in self.files), *self.left), default="")

    def reaches(self, end: End) -> bool:
        return not any(name <= str(end) for name in self.left)

    @property
    def max_bad_share(self) -> float:
        return self.source.max_bad_share

    @property
    def max_clock_skew(self) -> timedelta:
        return self.source.max_clock_skew

    @property
    def bytes(self) -> int:
        return sum(f.size for f in self.files)

    @property
    def empty(self) -> bool:
        return not self.files

    def read(self, spark: SparkSession, node: Stream) -> DataFrame:
        try:
            rows = read_by_all_names(node, lambda _, all_: self.source.read(spark, self.files, all_))
            return with_source_recorded_at(rows, self.source.recorded_at, _WORDS)
        except PySparkException as error:
            told = unseen(error) or self.explain(error)
            if told is None:
                raise
            raise told from error

    def consumed(self) -> dict[str, Any]:
        there = self.source.files()
        require_untouched(self.source.path, self.files, there)
        return remembered(self.before, self.files, there, self.batch)

    def recorded(self) -> dict[str, int] | None:
        return written_at(self.files) if self.source.recorded_at == "file_time" else None

    def position(self, before: Commit, counts: Mapping[str, int]) -> dict[str, Any]:
        first = before.inputs.get(FILES, {}).get(0, 0)
        end = first + counts["in"]
        return {"taken": {FILES: {0: (first, end)}}, "inputs": {FILES: {0: end}}, "files": True}

    def describe(self, schema: StructType) -> list[str]:
        names = ", ".join(f.name for f in self.files[:5])
        more = f" and {len(self.files) - 5:,} more" if len(self.files) > 5 else ""
        takes = f"takes {len(self.files):,} file(s), {self.bytes / 1000:,.1f} kB: {names}{more}"
        extra = self.source.more_columns(self.files[:_LOOKED_AT], schema)
        if not extra:
            return [takes]
        found = "; ".join(f"{column} (in {file})" for column, file in extra.items())
        return [takes, f"!columns that the schema has not are left out: {found}"]

    def explain(self, error: Exception) -> SourceError | None:
        there = {f.path for f in self.source.files()}
        gone = [f.name for f in self.files if f.path not in there]
        if gone:
            return SourceError(
                f"{len(gone)} file(s) in {self.source.path} were removed before the run had read "
                f"them, for example {gone[0]}; nothing was committed. Put them back, or run without"
            )
        told = unquote(str(error))
        broken = next((f for f in self.files if unquote(f.path).removeprefix("file:") in told), None)
        if broken is None:
            return None
        return SourceError(
            f"{broken.name} in {self.source.path} could not be read: {one_line(error)}; nothing was "
            "committed. Mend the file, or move it away, and run again"
        )


@dataclass(frozen=True)
class FilesSource:
    """A directory of JSON lines, CSV or Parquet files that grows.

    Args:
        path: the directory, a local path or a URL that Spark and fsspec both can read. Names that
            begin with ``.`` or ``_`` are not looked at, so write a file under such a name and
            rename it when it is whole. A file that has been consumed is known again where it was
            only touched, or moved with its directory, into a sub-directory or out of one; where its
            content is another, a run says so.
        format: ``jsonl`` (one JSON object a line), ``csv`` (one record a line, with a header line
            that names the columns, in any order), or ``parquet``.
        pattern: names that count, for example ``*.jsonl``, at any depth. One with a ``/`` is compared
            with the whole path below the directory: ``dt=*/*.jsonl``; ``**`` is any number of
            directories.
        options: Spark's CSV or JSON options, for example ``{"nullValue": "NA"}`` or
            ``{"encoding": "windows-1252"}``. One that is unknown, or that would have no effect, is an
            error that says what to do instead.
        max_files_per_run: bounds a run; None = all that are there when it starts.
        max_bad_share: a run with a larger share of quarantined rows fails before its commit.
        on_bad_file: what becomes of a file that cannot be read as a whole: a header that is no text,
            lacks columns or names one twice, Parquet with other types, a compressed file that is cut
            off. ``fail``: the run fails before its commit, and names it. ``quarantine``: it is one row
            of the quarantine, ``unreadable_file`` with what is wrong as its content, and the run goes
            on; once it is mended, deliver it under another name.
        optional: columns that a file may lack, as those do that are older than the column: null there.
            A JSON object may lack any. Others that files have besides the schema's are left out; a run
            warns of them once.
        max_clock_skew: how far in the future a timestamp may lie, by this machine's clock; one
            further off is quarantined, since it would make everything after it late.
        recorded_at: the time of record of a file's rows. ``run``: when their run commits.
            ``file_time``: when the file was written last. Else a column of type timestamp; a row
            without it, or further ahead than ``max_clock_skew``, is quarantined. It does not go back:
            not before what was taken earlier (of a column: in the partition), nor after the run.
        timestamps: the unit of numbers in columns of times, in all or by column, as of ``Json``;
            None: they are unreadable. Not of Parquet.
        recursive: whether the files of sub-directories are read, at any depth.
        path_columns: whether directories called ``column=value`` give that column to the files in them,
            as Hive and Spark write tables: percent signs are decoded, and
            ``__HIVE_DEFAULT_PARTITION__`` is null. A text that is no value of the column's type makes
            the rows unreadable; a file that has such a column itself is bad as a whole. False: the
            column is in the files.
    """

    path: str
    format: FileFormat = "jsonl"
    pattern: str = "*"
    options: dict[str, str] = field(default_factory=dict[str, str], hash=False)
    max_files_per_run: int | None = None
    max_bad_share: float = 0.1
    max_clock_skew: timedelta = timedelta(days=1)
    on_bad_file: Literal["fail", "quarantine"] = "fail"
    optional: Sequence[str] = ()
    recorded_at: str = "run"
    timestamps: Timestamps | None = field(default=None, hash=False)
    recursive: bool = True
    path_columns: bool = True

    gives_timestamp = False

    def check(self, name: str, key: Sequence[str], schema: StructType) -> None:
        """Files can give any column; what a file lacks shows when it is read.

        Raises:
            TopologyError: what is optional is no column, or of the key; nor is ``recorded_at`` one.
        """
        require_source_recorded_at(name, self.recorded_at, _WORDS, schema)
        require_units(name, self.timestamps, schema)
        odd = [c for c in self.optional if c not in schema.names or c in key]
        if odd:
            raise TopologyError(
                f"{name}: expected optional columns of the source among "
                f"{[c for c in schema.names if c not in key]}, got {odd}; correct or leave them out"
            )

    def __post_init__(self) -> None:
        object.__setattr__(self, "path", address(self.path))
        if self.format not in ("jsonl", "csv", "parquet"):
            raise SourceError(
                f"format of {self.path!r} must be 'jsonl', 'csv' or 'parquet', got {self.format!r}"
            )
        if self.on_bad_file not in ("fail", "quarantine"):
            raise SourceError(
                f"on_bad_file of {self.path!r} must be 'fail' or 'quarantine', got {self.on_bad_file!r}"
            )
        require_limits(self.max_bad_share, self.max_clock_skew)
        require_units(repr(self.path), self.timestamps)
        object.__setattr__(self, "optional", tuple(self.optional))
        object.__setattr__(self, "options", checked(repr(self.path), self.format, self.options))
        if self.max_files_per_run is not None and self.max_files_per_run < 1:
            raise SourceError(f"max_files_per_run must be 1 or more, got {self.max_files_per_run}")

    @property
    def reading(self) -> Reading:
        return Reading(self.timestamps, self.options, base64=self.format != "csv")

    def describe(self) -> str:
        """What is read, for descriptions and messages."""
        return f"{self.format} files {posixpath.join(str(self.path), self.pattern)}"

    def files(self) -> list[FileInfo]:
        """The files that are there, by name. Does not use Spark."""
        return files_in(str(self.path), self.pattern, f"{self.format} files", self.recursive)

    def pin(
        self,
        before: Commit | None,
        only: Sequence[str] | None = None,
        *,
        consumed: Mapping[str, Any] = {},
    ) -> PinnedFiles:
        """The files that a run takes; see :meth:`pending`. Does not use Spark."""
        batch = 1 if before is None else before.batch + 1
        new = unconsumed(self.path, self.files(), consumed)
        taken = chosen(self.path, new, consumed, only)[: self.max_files_per_run]
        left = {f.name for f in new} - {f.name for f in taken}
        return PinnedFiles(self, taken, consumed, batch, sorted(left))

    def taken_by(self, consumed: Mapping[str, Any]) -> dict[str, int | None]:
        """The run that consumed each file that is there, by name: see ``directory.Memory.batch_of``."""
        there = self.files()
        memory = Memory(consumed, there)
        return {f.name: memory.batch_of(f) for f in there}

    def news(self, before: Commit | None, consumed: Mapping[str, Any]) -> News:
        """The names of the new files. Does not use Spark."""
        names = [f.name for f in self.pending(consumed)]
        return News({"files": names}, f"{len(names)} new file(s)") if names else News()

    def pending(self, consumed: Mapping[str, Any], only: Sequence[str] | None = None) -> list[FileInfo]:
        """The files that have not been consumed yet, by name, as many as a run may take.

        Args:
            consumed: those that have, see ``consumed_files.Memory``.
            only: names to choose from; None = all.

        Raises:
            SourceError: a consumed file is there with another content.
        """
        return list(self.pin(None, only, consumed=consumed).files)

    def read(self, spark: SparkSession, files: Sequence[FileInfo], schema: StructType) -> DataFrame:
        """The rows of some files, in order of arrival.

        Plan: see ``file_rows``.

        Returns:
            the schema's columns (all null where a row cannot be read), ``_arrival`` (0, 1, …),
            ``_source`` (the file's name, with its sub-directories), ``_position`` (line from 1, of
            Parquet the row from 1), ``_raw`` (the line; of Parquet the row as JSON), ``_reason``
            (``unreadable`` or null). Of a file that cannot be read, where it is set aside: one row,
            ``_arrival`` below 0,
            ``_position`` 0, ``_raw`` what is wrong, ``_reason`` ``unreadable_file``.

        Raises:
            SourceError: a file cannot be read as a whole, and none is to be set aside.
        """
        bad = self._faults(spark, files, schema)
        if bad and self.on_bad_file == "fail":
            name, said = next(iter(bad.items()))
            others = f" (and {len(bad) - 1} other file(s) are bad)" if len(bad) > 1 else ""
            raise SourceError(
                f"{name}: {said}{others}. Mend or move what is bad, or set on_bad_file='quarantine' of "
                "the source: then such files are set aside"
            )
        good = [f for f in files if f.name not in bad]
        if not good:
            return set_aside(spark, bad, schema)
        if self.format == "parquet":
            rows = parquet_rows(spark, good, schema, self.path_columns)
        else:
            rows = text_rows(spark, good, schema, self.format, self.reading, self.path_columns)
        return rows.unionByName(set_aside(spark, bad, schema)) if bad else rows

    def more_columns(self, files: Sequence[FileInfo], schema: StructType) -> dict[str, str]:
        """Columns that files have besides a schema's, each with the first file that has it; of JSON by
        its first line. What cannot be read is told when it is. Does not use Spark."""
        found: dict[str, str] = {}
        for file in files:
            for column in columns_of(file, self.format, self.options):
                if column not in schema.names:
                    found.setdefault(column, file.name)
        return found

    def _faults(
        self, spark: SparkSession, files: Sequence[FileInfo], schema: StructType
    ) -> dict[str, str]:
        also = (self.optional, self.path_columns)
        if self.format == "parquet":
            return faults_of_parquet(spark, files, schema, *also)
        return faults_of_text(files, schema, self.format, self.options, *also)
