"""A directory to which whole states are delivered, one after another: full dumps."""

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
from vt_dagster.storage.shared_paths import address, unseen
from vt_dagster.topology.deterministic_sql import require_deterministic
from vt_dagster.topology.durations import in_utc
from vt_dagster.topology.model import Stream

DUMPS = "dumps"
"""The name of such a source among a commit's inputs; its offsets count dumps."""
_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)
_MODIFIED = "modified"
_SUFFIXES = re.compile(r"(\.(parquet|csv|jsonl?|txt|gz|bz2|zst|snappy|lz4))+$")


@dataclass(frozen=True)
class PinnedDump(Uncounted):
    """The dump that a run takes; None = there is no new one.

    Args:
        waiting: the names of those that come after it.
        consumed: the dumps of earlier runs: name -> its files' sizes and its time.
        accepted: whether it may be empty, or delete more than usual.
        learned: its time, once it has been read.
    """

    source: SnapshotSource
    dump: Dump | None
    waiting: Sequence[str]
    before: Mapping[str, Any]
    accepted: bool
    learned: dict[str, int] = field(default_factory=dict[str, int])

    max_bad_share = 1.0
    """What is read knows how many rows the dump has; here only those that changed are known."""

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
        """It, in words."""
        return "" if self.dump is None else f"{self.dump.name} in {self.source.path}"

    @property
    def source_end(self) -> str:
        return max((*self.waiting, "" if self.dump is None else self.dump.name))

    def reaches(self, end: End) -> bool:
        return not any(name <= str(end) for name in self.waiting)

    def read(self, spark: SparkSession, node: Stream) -> DataFrame:
        """All rows of the dump, as ``records_of`` takes them."""
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
            lines.append("!takes it however much it deletes, as it was told")
        return lines

    def explain(self, error: Exception) -> SourceError | None:
        if self.dump is None or self.dump.name not in {d.name for d in self.source.dumps()}:
            return SourceError(
                f"the dump {self.dump.name if self.dump else ''} in {self.source.path} was removed "
                "before the run had read it; nothing was committed. Put it back, or run without"
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
    """A directory to which full dumps are delivered; the records are the difference to the table.

    What a dump has otherwise than the table is put, what it lacks is deleted, at the dump's time; what
    is the same gives nothing. Columns are compared null-safe, ``timestamp`` is not one of them. A run
    takes one dump, the first by name that was not consumed; its sensor asks again while others wait.

    Args:
        path: the directory, as of a :class:`FilesSource`. A file in it is a dump, and so is a
            sub-directory with files, at any depth.
        format: ``parquet``, ``csv`` or ``jsonl``.
        dump_time: when a dump was true. ``modified``: when its newest file was written. A text with
            ``%``: what its name is, without the ending of a file, for example ``customers_%Y-%m-%d``
            (UTC where it says no zone). Else a SQL expression over the columns, of which the largest
            value counts.
        pattern: names that count, for example ``customers_*``.
        marker: of dumps that are directories, the file that says that one is whole, for example
            ``_SUCCESS``; None = they are whole when they are there.
        ignore: value columns whose change alone is no change, for example when a row was exported.
        max_shrink: a dump that lacks a larger share of the rows that the table holds is refused, and so
            is an empty one; ``accept_shrink: true`` in a run's config takes it.
        on_duplicate: of rows that share a key: ``fail``: the run fails before its commit;
            ``quarantine``: all of them are quarantined, ``duplicate_key``, and the table keeps what it
            holds of that key.
        max_bad_share: a dump with a larger share of bad rows (unreadable, without a key, of a key that
            is there twice) is refused. Where a row lost its key, that dump deletes nothing.
        max_clock_skew: how far in the future its time may lie.
        options: Spark's CSV or JSON options.
        optional: columns that a dump may lack, null there; of JSON any may be lacking.
        upstream: the key of the asset that delivers the dumps, ``shop/export``: a dependency of this
            one in Dagster.
        timestamps: the unit of numbers in columns of times, as of a :class:`FilesSource`.
        path_columns: whether directories called ``column=value`` within a dump give that column to the
            files in them, as of a :class:`FilesSource`.
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
        # It says what formats and options there are.
        files = FilesSource(self.path, self.format, options=self.options)
        object.__setattr__(self, "options", files.options)
        object.__setattr__(self, "optional", tuple(self.optional))
        object.__setattr__(self, "ignore", tuple(self.ignore))
        require_limits(self.max_bad_share, self.max_clock_skew)
        self.limits(False).check(repr(self.path))

    def limits(self, accepted: bool) -> Limits:
        """Within which a dump is believed."""
        shares = self.max_shrink, self.max_bad_share
        return Limits(*shares, self.on_duplicate, self.ignore, accepted)

    def describe(self) -> str:
        """What is read, for descriptions and messages."""
        return f"{self.format} dumps {posixpath.join(str(self.path), self.pattern)}"

    def check(self, name: str, key: Sequence[str], schema: StructType) -> None:
        """Refuses columns to ignore that are none.

        Raises:
            TopologyError: names them.
        """
        check_ignored(name, self.ignore, key, schema)
        files = FilesSource(self.path, self.format, optional=self.optional, timestamps=self.timestamps)
        files.check(name, key, schema)
        if not self.dump_time.strip():
            raise TopologyError(
                f"{name}: expected dump_time to be 'modified', a pattern like 'customers_%Y-%m-%d' or "
                "a SQL expression, got an empty text; say when a dump was true"
            )
        if self.dump_time != _MODIFIED and "%" not in self.dump_time:
            require_deterministic(name, "dump_time", self.dump_time, schema.fields)

    # -- dumps -----------------------------------------------------------------------------------

    def dumps(self) -> list[Dump]:
        """Those that are there and whole, by name. Does not use Spark.

        Raises:
            SourceError: there is no such directory.
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
        """The dump that a run takes. Does not use Spark.

        Args:
            before: of no use; what is remembered beside it tells.
            dump: the last one that is asked for: one before it that waits comes first. None = any.
            accept_shrink: it may be empty, or delete more than ``max_shrink``.
            consumed: the dumps consumed so far, as ``PinnedDump.consumed`` gave them.

        Raises:
            SourceError: a dump is older than the last one consumed, or has changed since it was.
        """
        if consumed and not all(isinstance(said, dict) for said in consumed.values()):
            consumed = {}  # files that another kind of source took into this table
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
        """The name of the next dump. Does not use Spark."""
        pinned = self.pin(before, consumed=consumed)
        if pinned.dump is None:
            return News()
        return News({"dump": pinned.dump.name}, f"{len(pinned.waiting) + 1} new dump(s)")

    def time_of(self, dump: Dump) -> int | None:
        """A dump's time, epoch microseconds; None = its rows tell.

        Raises:
            SourceError: its name does not fit the pattern.
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
        """A dump comes after those that were consumed, by name and by time.

        Raises:
            SourceError: it does not; or its time lies in the future.
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
                f"consumed, {last} of {in_utc(newest)}: it says what was true before; nothing was "
                "committed. Move it away, or make the table anew from all dumps (vt-dagster replay)"
            )
