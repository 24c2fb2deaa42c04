"""A growing directory of files as a source: each file is consumed once.

Records arrive in order of file name, then of position in the file. A file that appears later with a
smaller name is consumed by a later run. A name is the path below the directory.
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
from vt_dagster.storage.delta import address, unseen
from vt_dagster.topology.model import Stream

FILES = "files"
"""The name of a files source in a commit's ``inputs``; its offsets count records."""
_WORDS = ("run", "file_time")
"""Values of ``recorded_at`` that are not column names."""
_LOOKED_AT = 20
"""A run searches at most this many files for columns that the schema lacks."""


@dataclass(frozen=True)
class PinnedFiles(Uncounted):
    """The files that a run consumes.

    Args:
        source: the source.
        files: in order of arrival.
        before: the files consumed by earlier runs, see ``consumed_files.Memory``.
        left: the names of files left to later runs.
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
        return [takes, f"!columns that the schema lacks are left out: {found}"]

    def explain(self, error: Exception) -> SourceError | None:
        there = {f.path for f in self.source.files()}
        gone = [f.name for f in self.files if f.path not in there]
        if gone:
            return SourceError(
                f"{len(gone)} file(s) in {self.source.path} were removed before the run had read "
                f"them, for example {gone[0]}; nothing was committed. Put them back or run without them"
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
    """A growing directory of JSON lines, CSV or Parquet files.

    Args:
        path: the directory: a local path, or a URL that both Spark and fsspec can read. Names that
            begin with ``.`` or ``_`` are ignored: write a file under such a name and rename it when
            it is complete. A consumed file is recognized after it was touched, or moved with its
            directory, into a sub-directory or out of one. If its content has changed, a run fails.
        format: ``jsonl`` (one JSON object per line), ``csv`` (one record per line, with a header line
            that names the columns in any order), or ``parquet``.
        pattern: the file names to read, for example ``*.jsonl``, at any depth. A pattern with ``/``
            matches the whole path below the directory: ``dt=*/*.jsonl``; ``**`` matches any number of
            directories.
        options: Spark's CSV or JSON options, for example ``{"nullValue": "NA"}`` or
            ``{"encoding": "windows-1252"}``. An option that is unknown, or would have no effect, is an
            error that names the alternative.
        max_files_per_run: the limit of a run; None = all files present when it starts.
        max_bad_share: a run with a larger share of quarantined rows fails before its commit.
        on_bad_file: the handling of an unreadable file: a header that is not text, lacks columns or
            repeats one, Parquet with other types, a truncated compressed file. ``fail``: the run fails
            before its commit and names the file. ``quarantine``: the file becomes one row of the
            quarantine, ``unreadable_file`` with the reason as its content, and the run continues.
            Deliver the repaired file under another name.
        optional: columns that a file may lack, for example an older file; they are null. A JSON object
            may lack any column. Columns that the schema lacks are dropped, and a run warns about them.
        max_clock_skew: how far ahead of this machine's clock a timestamp may be; a record further
            ahead is quarantined, since it would make all later records late.
        recorded_at: the system time of a file's rows. ``run``: the time of the run's commit.
            ``file_time``: the file's modification time. Otherwise a column of type timestamp; a row
            without one, or ahead by more than ``max_clock_skew``, is quarantined. System time never
            decreases: it is raised to that of earlier records (for a column: of the partition), and
            capped at the time of the run.
        timestamps: the unit of numbers in time columns, for all columns or by column, as for ``Json``;
            None: such numbers are unreadable. Not for Parquet.
        recursive: whether files in sub-directories are read, at any depth.
        path_columns: whether directories named ``column=value`` fill that column, as in tables of Hive
            and Spark: percent escapes are decoded, and ``__HIVE_DEFAULT_PARTITION__`` is null. A value
            that does not fit the column's type makes the rows unreadable; a file that also contains
            the column is a bad file. False: the files contain the column.
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
        """Checks the settings against the schema; missing columns of a file show when it is read.

        Raises:
            TopologyError: ``optional`` names a key column or no column; ``recorded_at`` is not valid.
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
        """Returns a description of the source, for metadata and messages."""
        return f"{self.format} files {posixpath.join(str(self.path), self.pattern)}"

    def files(self) -> list[FileInfo]:
        """Returns the files in the directory, by name. Does not use Spark."""
        return files_in(str(self.path), self.pattern, f"{self.format} files", self.recursive)

    def pin(
        self,
        before: Commit | None,
        only: Sequence[str] | None = None,
        *,
        consumed: Mapping[str, Any] = {},
    ) -> PinnedFiles:
        """Pins the files of a run; see :meth:`pending`. Does not use Spark."""
        batch = 1 if before is None else before.batch + 1
        new = unconsumed(self.path, self.files(), consumed)
        taken = chosen(self.path, new, consumed, only)[: self.max_files_per_run]
        left = {f.name for f in new} - {f.name for f in taken}
        return PinnedFiles(self, taken, consumed, batch, sorted(left))

    def taken_by(self, consumed: Mapping[str, Any]) -> dict[str, int | None]:
        """Returns the batch that consumed each present file, by name; see ``Memory.batch_of``."""
        there = self.files()
        memory = Memory(consumed, there)
        return {f.name: memory.batch_of(f) for f in there}

    def news(self, before: Commit | None, consumed: Mapping[str, Any]) -> News:
        """Returns the run config with the names of the new files. Does not use Spark."""
        names = [f.name for f in self.pending(consumed)]
        return News({"files": names}, f"{len(names)} new file(s)") if names else News()

    def pending(self, consumed: Mapping[str, Any], only: Sequence[str] | None = None) -> list[FileInfo]:
        """Returns the unconsumed files by name, up to ``max_files_per_run``.

        Args:
            consumed: the consumed files, see ``consumed_files.Memory``.
            only: names to choose from; None = all.

        Raises:
            SourceError: the content of a consumed file has changed.
        """
        return list(self.pin(None, only, consumed=consumed).files)

    def read(self, spark: SparkSession, files: Sequence[FileInfo], schema: StructType) -> DataFrame:
        """Returns the rows of files, in order of arrival.

        Plan: see ``file_rows``.

        Returns:
            the schema's columns (all null if a row is unreadable), ``_arrival`` (0, 1, …), ``_source``
            (the file's name, with its sub-directories), ``_position`` (line from 1; for Parquet the row
            from 1), ``_raw`` (the line; for Parquet the row as JSON), ``_reason`` (``unreadable`` or
            null). With ``on_bad_file="quarantine"``, a bad file gives one row: ``_arrival`` below 0,
            ``_position`` 0, ``_raw`` the fault, ``_reason`` ``unreadable_file``.

        Raises:
            SourceError: a file is bad, and ``on_bad_file`` is ``fail``.
        """
        bad = self._faults(spark, files, schema)
        if bad and self.on_bad_file == "fail":
            name, said = next(iter(bad.items()))
            others = f" (and {len(bad) - 1} other file(s) are bad)" if len(bad) > 1 else ""
            raise SourceError(
                f"{name}: {said}{others}. Mend or move the bad files, or set on_bad_file='quarantine' "
                "of the source to quarantine them"
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
        """Returns columns of files that the schema lacks, each with the first file that has it; for
        JSON by its first line. Unreadable files are skipped. Does not use Spark."""
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
