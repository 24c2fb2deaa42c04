"""A directory of full dumps as a source: each dump is the whole state of a table."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from fnmatch import fnmatch
from typing import Any
from urllib.parse import unquote

from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import StructType

from vt_dagster.core.source_records import POSITION, RAW, REASON, SOURCE
from vt_dagster.errors import SourceError, TopologyError
from vt_dagster.sources.base import End, News, Uncounted, require_limits
from vt_dagster.sources.consumed_files import files_in, require_untouched
from vt_dagster.sources.dump_limits import (
    UNREAD,
    Dump,
    Limits,
    OnDuplicate,
    check_ignored,
    records_of,
    require_past,
)
from vt_dagster.sources.files_source import FileFormat, FilesSource
from vt_dagster.sources.value_reader import Timestamps
from vt_dagster.spark.jars import one_line
from vt_dagster.storage import delta
from vt_dagster.storage.commit_log import Commit
from vt_dagster.storage.delta import address, unseen
from vt_dagster.topology.durations import in_utc
from vt_dagster.topology.expressions import require_deterministic
from vt_dagster.topology.model import Stream

DUMPS = "dumps"
"""The name of a dump source in a commit's ``inputs``; its offsets count dumps."""
_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)
_MODIFIED = "modified"
_SUFFIXES = re.compile(r"(\.(parquet|csv|jsonl?|txt|gz|bz2|zst|snappy|lz4))+$")


@dataclass(frozen=True)
class PinnedDump(Uncounted):
    """The dump that a run consumes.

    Args:
        dump: the dump; None = no new one.
        waiting: the names of the dumps left to later runs.
        before: the dumps of earlier runs: name -> its size in bytes and its time.
        accepted: whether the dump may be empty, or delete more than ``max_shrink``.
        learned: the dump's time, once it has been read.
    """

    source: SnapshotSource
    dump: Dump | None
    waiting: Sequence[str]
    before: Mapping[str, Any]
    accepted: bool
    learned: dict[str, int] = field(default_factory=dict[str, int])

    max_bad_share = 1.0
    """No limit here, where only the changed rows are known: ``records_of`` checks the share of the
    dump."""

    @property
    def max_clock_skew(self) -> timedelta:
        return self.source.max_clock_skew

    @property
    def bytes(self) -> int:
        return 0 if self.dump is None else self.dump.size

    @property
    def empty(self) -> bool:
        return self.dump is None

    @property
    def what(self) -> str:
        """The dump, for messages."""
        return "" if self.dump is None else f"{self.dump.name} in {self.source.path}"

    @property
    def source_end(self) -> str:
        return max((*self.waiting, "" if self.dump is None else self.dump.name))

    def reaches(self, end: End) -> bool:
        return not any(name <= str(end) for name in self.waiting)

    def read(self, spark: SparkSession, node: Stream) -> DataFrame:
        """Returns all rows of the dump, in the columns of ``records_of``."""
        source, dump = self.source, self.dump
        folder = posixpath.join(str(source.path), dump.name) if dump and dump.nested else source.path
        files = FilesSource(
            str(folder),
            source.format,
            options=source.options,
            optional=source.optional,
            timestamps=source.timestamps,
            path_columns=source.path_columns,
        )
        try:
            rows = files.read(spark, dump.files if dump else (), node.schema)
        except PySparkException as error:
            told = unseen(error) or self.explain(error)
            if told is None:
                raise
            raise told from error
        place = F.concat(F.lit(f"{dump.name}/"), SOURCE) if dump and dump.nested else F.col(SOURCE)
        unread = F.when(F.col(REASON).isNotNull(), F.col(RAW)).alias(UNREAD)
        return rows.select(*node.schema.names, place.alias(SOURCE), POSITION, REASON, unread)

    def difference(
        self,
        spark: SparkSession,
        node: Stream,
        held: DataFrame,
        hold: Callable[[DataFrame], DataFrame],
    ) -> DataFrame:
        dump, rows, name = self.dump, self.read(spark, node), self.what
        time = 0 if dump is None else self._time(name, dump, rows)
        self.learned["time"] = time
        limits = self.source.limits(self.accepted or dump is None)
        size = self.bytes
        return records_of(rows, node, held, hold, limits, what=name, time=time, size=size)

    def _time(self, name: str, dump: Dump, rows: DataFrame) -> int:
        time = self.source.time_of(dump)
        if time is None:
            moment = F.unix_micros(F.max(F.expr(self.source.dump_time).cast("timestamp")))
            time = rows.agg(moment.alias("time")).collect()[0]["time"]
        if time is None:
            raise SourceError(
                f"{name}: expected dump_time {self.source.dump_time!r} to give a time, got null in "
                "every row, or there is no row; nothing was committed. Mend the dump, or correct the "
                "expression"
            )
        self.source.require_order(dump, time, self.before)
        return time

    def consumed(self) -> dict[str, Any]:
        dump = self.dump
        assert dump is not None
        there = self.source.dumps()
        files = [f for d in there if d.name == dump.name for f in d.files]
        require_untouched(str(self.source.path), dump.files, files)
        names = {d.name for d in there}
        kept = {name: said for name, said in self.before.items() if name in names}
        return {**kept, dump.name: {"bytes": dump.size, "time": self.learned["time"]}}

    def position(self, before: Commit, counts: Mapping[str, int]) -> dict[str, Any]:
        first = before.inputs.get(DUMPS, {}).get(0, 0)
        taken, end = {DUMPS: {0: (first, first + 1)}}, {DUMPS: {0: first + 1}}
        return {"taken": taken, "inputs": end, "files": True}

    def describe(self, schema: StructType) -> list[str]:
        assert self.dump is not None
        more = f"; {len(self.waiting):,} more wait, each for a run of its own" if self.waiting else ""
        lines = [f"takes the dump {self.dump.name}, {self.dump.size / 1000:,.1f} kB{more}"]
        if self.accepted:
            lines.append("!accepts any number of deletions (accept_shrink)")
        return lines

    def explain(self, error: Exception) -> SourceError | None:
        if self.dump is None or self.dump.name not in {d.name for d in self.source.dumps()}:
            return SourceError(
                f"the dump {self.dump.name if self.dump else ''} in {self.source.path} was removed "
                "before the run had read it; nothing was committed. Put it back, or run without it"
            )
        said = unquote(str(error))
        if not any(f.name in said for f in self.dump.files):
            return None
        return SourceError(
            f"the dump {self.dump.name} in {self.source.path} could not be read: {one_line(error)}; "
            "nothing was committed. Mend it, or move it away, and run again"
        )


@dataclass(frozen=True)
class SnapshotSource:
    """A directory of full dumps; the records are the difference between a dump and the table.

    A row that differs from the table is an upsert and a missing row a tombstone, both at the dump's
    time; an equal row gives no record. Columns are compared null-safe, without ``timestamp``. A run
    consumes one dump: the first unconsumed one by name. The sensor requests further runs while more
    dumps wait.

    Args:
        path: the directory, as for :class:`FilesSource`. Each file in it is a dump, and so is each
            sub-directory with files, at any depth.
        format: ``parquet``, ``csv`` or ``jsonl``.
        dump_time: the time at which a dump was true. ``modified``: the modification time of its newest
            file. A text with ``%``: the format of its name without file extensions, for example
            ``customers_%Y-%m-%d`` (UTC if it has no zone). Otherwise a SQL expression over the columns;
            its largest value is the time.
        pattern: the names of dumps, for example ``customers_*``.
        marker: the file that marks a directory as a complete dump, for example ``_SUCCESS``; None =
            every directory is complete.
        ignore: value columns whose change alone is not a change, for example an export time.
        max_shrink: a dump that lacks a larger share of the table's rows is refused, and so is an empty
            one; ``accept_shrink: true`` in the run config accepts it.
        on_duplicate: the handling of rows that share a key. ``fail``: the run fails before its commit.
            ``quarantine``: all of them are quarantined, ``duplicate_key``, and the table keeps its row
            of that key.
        max_bad_share: a dump with a larger share of bad rows (unreadable, without a key, of a duplicate
            key) is refused. If a row has no key, the dump deletes nothing.
        max_clock_skew: how far ahead of this machine's clock a dump's time may be.
        options: Spark's CSV or JSON options.
        optional: columns that a dump may lack; they are null. A JSON object may lack any column.
        upstream: the key of the asset that writes the dumps, ``shop/export``: a Dagster dependency of
            this asset.
        timestamps: the unit of numbers in time columns, as for :class:`FilesSource`.
        path_columns: whether directories named ``column=value`` in a dump fill that column, as for
            :class:`FilesSource`.
    """

    path: str
    format: FileFormat = "parquet"
    dump_time: str = field(kw_only=True)
    pattern: str = field(default="*", kw_only=True)
    marker: str | None = field(default=None, kw_only=True)
    ignore: Sequence[str] = field(default=(), kw_only=True)
    max_shrink: float = field(default=0.5, kw_only=True)
    on_duplicate: OnDuplicate = field(default="fail", kw_only=True)
    max_bad_share: float = field(default=0.1, kw_only=True)
    max_clock_skew: timedelta = field(default=timedelta(days=1), kw_only=True)
    options: dict[str, str] = field(default_factory=dict[str, str], hash=False, kw_only=True)
    optional: Sequence[str] = field(default=(), kw_only=True)
    upstream: str | None = field(default=None, kw_only=True)
    timestamps: Timestamps | None = field(default=None, hash=False, kw_only=True)
    path_columns: bool = field(default=True, kw_only=True)

    gives_timestamp = True
    tables_only = True
    whole = True
    orders_changes = True
    restates = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "path", address(self.path))
        # Checks format and options.
        files = FilesSource(self.path, self.format, options=self.options)
        object.__setattr__(self, "options", files.options)
        object.__setattr__(self, "optional", tuple(self.optional))
        object.__setattr__(self, "ignore", tuple(self.ignore))
        require_limits(self.max_bad_share, self.max_clock_skew)
        self.limits(False).check(repr(self.path))

    def limits(self, accepted: bool) -> Limits:
        """Returns the limits within which a dump is accepted."""
        shares = self.max_shrink, self.max_bad_share
        return Limits(*shares, self.on_duplicate, self.ignore, accepted)

    def describe(self) -> str:
        """Returns a description of the source, for metadata and messages."""
        return f"{self.format} dumps {posixpath.join(str(self.path), self.pattern)}"

    def check(self, name: str, key: Sequence[str], schema: StructType) -> None:
        """Checks the settings against the schema.

        Raises:
            TopologyError: ``ignore`` or ``optional`` names no value column; ``dump_time`` is not valid.
        """
        check_ignored(name, self.ignore, key, schema)
        files = FilesSource(self.path, self.format, optional=self.optional, timestamps=self.timestamps)
        files.check(name, key, schema)
        if not self.dump_time.strip():
            raise TopologyError(
                f"{name}: expected dump_time to be 'modified', a pattern like 'customers_%Y-%m-%d' or "
                "a SQL expression, got an empty text; set the time at which a dump was true"
            )
        if self.dump_time != _MODIFIED and "%" not in self.dump_time:
            require_deterministic(name, "dump_time", self.dump_time, schema.fields)

    # -- dumps -----------------------------------------------------------------------------------

    def dumps(self) -> list[Dump]:
        """Returns the complete dumps, by name. Does not use Spark.

        Raises:
            SourceError: the directory does not exist.
        """
        path, what = str(self.path), f"{self.format} dumps"
        found = [Dump(f.name, (f,), False) for f in files_in(path, self.pattern, what, False)]
        fs, root = delta.filesystem(path)
        folders = [
            posixpath.basename(entry["name"].rstrip("/"))
            for entry in fs.ls(root, detail=True, refresh=True)
            if entry["type"] == "directory"
        ]
        for name in folders:
            if name.startswith((".", "_")) or not fnmatch(name, self.pattern):
                continue
            if self.marker and not fs.exists(posixpath.join(root, name, self.marker)):
                continue
            within = files_in(posixpath.join(path, name), "*", what)
            files = [f for f in within if f.name != self.marker]
            found += [Dump(name, tuple(files), True)] if files else []
        return sorted(found)

    def pin(
        self,
        before: Commit | None,
        dump: str | None = None,
        accept_shrink: bool = False,
        *,
        consumed: Mapping[str, Any] = {},
    ) -> PinnedDump:
        """Pins the dump of a run: the first unconsumed one. Does not use Spark.

        Args:
            before: not used; ``consumed`` holds the state.
            dump: the last dump to consider (inclusive, by name); None = no limit.
            accept_shrink: whether the dump may be empty, or delete more than ``max_shrink``.
            consumed: the dumps consumed so far, from ``PinnedDump.consumed``.

        Raises:
            SourceError: a dump is older than the last consumed one, or changed after it was consumed.
        """
        if consumed and not all(isinstance(said, dict) for said in consumed.values()):
            consumed = {}  # files of another kind of source that this table had before
        there = self.dumps()
        for one in there:
            said = consumed.get(one.name)
            if said is not None and said["bytes"] not in (one.size, one.size_above):
                raise SourceError(
                    f"the dump {one.name} in {self.path} changed after it was consumed: "
                    f"{said['bytes']} bytes then, {one.size} now; deliver what is new as a dump of its "
                    "own and put the old one back"
                )
        new = [d for d in there if d.name not in consumed]
        for one in new:
            self.require_order(one, self.time_of(one), consumed)
        asked = [d for d in new if dump is None or d.name <= dump]
        first = asked[0] if asked else None
        waiting = [d.name for d in new if d is not first]
        return PinnedDump(self, first, waiting, consumed, accept_shrink)

    def news(self, before: Commit | None, consumed: Mapping[str, Any]) -> News:
        """Returns the run config with the name of the next dump. Does not use Spark."""
        pinned = self.pin(before, consumed=consumed)
        if pinned.dump is None:
            return News()
        return News({"dump": pinned.dump.name}, f"{len(pinned.waiting) + 1} new dump(s)")

    def time_of(self, dump: Dump) -> int | None:
        """Returns a dump's time in epoch microseconds; None = ``dump_time`` is an expression over its
        rows.

        Raises:
            SourceError: the name does not match ``dump_time``.
        """
        if self.dump_time == _MODIFIED:
            return dump.modified
        if "%" not in self.dump_time:
            return None
        stem = dump.name if dump.nested else _SUFFIXES.sub("", dump.name)
        try:
            moment = datetime.strptime(stem, self.dump_time)
        except ValueError:
            raise SourceError(
                f"the dump {dump.name} in {self.path}: expected a name like {self.dump_time!r} "
                f"(dump_time), got {stem!r}; rename it, or leave it out by the source's pattern"
            ) from None
        moment = moment if moment.tzinfo else moment.replace(tzinfo=timezone.utc)
        return (moment - _EPOCH) // timedelta(microseconds=1)

    def require_order(self, dump: Dump, time: int | None, consumed: Mapping[str, Any]) -> None:
        """Checks that a dump follows the consumed ones, by name and by time.

        Raises:
            SourceError: it does not; or its time is in the future.
        """
        if time is not None:
            require_past(f"the dump {dump.name} in {self.path}", time, self.max_clock_skew)
        if not consumed:
            return
        last = max(consumed)
        newest = consumed[last]["time"]
        if dump.name < last or (time is not None and time < newest):
            told = "" if time is None else f" of {in_utc(time)}"
            raise SourceError(
                f"the dump {dump.name}{told} in {self.path} is older than the last one that was "
                f"consumed, {last} of {in_utc(newest)}; nothing was committed. Move it away, or "
                "rebuild the table from all dumps (vt-dagster replay)"
            )
