"""A directory of full dumps as a source: each dump is a full snapshot of a table.

A dump is compared with the table, and accepted within limits on its changes.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from fnmatch import fnmatch
from typing import Any, Literal, NamedTuple
from urllib.parse import unquote

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import StructType

from vt_dagster.columns import ARRIVAL, TIMESTAMP
from vt_dagster.core.arrival_order import MOST_BUCKETS, has_key
from vt_dagster.core.log_columns import value_columns
from vt_dagster.core.source_records import (
    DELETED,
    POSITION,
    RAW,
    REASON,
    RECORD_TIME,
    RESTATES,
    SOURCE,
    Reason,
    as_json,
    difference,
)
from vt_dagster.errors import ContractError, SourceError, TopologyError, counted
from vt_dagster.sources.base import (
    End,
    Limited,
    News,
    Repeatable,
    RepeatedRun,
    check_place,
    explained,
    read_by_all_names,
    require_limits,
)
from vt_dagster.sources.consumed_files import (
    FileInfo,
    digest_of,
    files_in,
    require_untouched,
    stamp_of,
    written_at,
)
from vt_dagster.sources.files_source import FileFormat, FilesSource
from vt_dagster.sources.text_formats import hint_of
from vt_dagster.sources.value_reader import Timestamps
from vt_dagster.spark.jars import one_line
from vt_dagster.storage import delta
from vt_dagster.storage.asset_store import AssetStore
from vt_dagster.storage.commit_log import Commit, commits
from vt_dagster.storage.spark_reader import Head
from vt_dagster.topology.durations import epoch_micros, in_utc
from vt_dagster.topology.model import Stream

# Dump limits


OnDuplicate = Literal["fail", "quarantine"]
_BUCKET_BYTES = 4_000_000
UNREAD = "_unread"
"""Column with the raw content of an unreadable row; null for others."""


class Dump(NamedTuple):
    """A full snapshot: a file, or a directory of files.

    Args:
        name: in the source's directory.
        nested: whether the dump is a directory.
    """

    name: str
    files: tuple[FileInfo, ...]
    nested: bool

    @property
    def size(self) -> int:
        """The size of all files in bytes."""
        return sum(f.size for f in self.files)

    @property
    def size_above(self) -> int:
        """The size in bytes of the files without those in sub-directories, which earlier versions of
        the library skipped."""
        return sum(f.size for f in self.files if "/" not in f.name)

    @property
    def modified(self) -> int:
        """The modification time of the newest file in epoch microseconds."""
        return max(written_at(self.files).values())


def check_limits(source: Any) -> None:
    """Checks the limits of a source of full snapshots, and stores ``ignore`` as a tuple.

    Raises:
        SourceError: a setting is not valid.
    """
    object.__setattr__(source, "ignore", tuple(source.ignore))
    require_limits(source.max_bad_share, source.max_clock_skew)
    what = repr(source.path)
    if not 0 <= source.max_shrink <= 1:
        raise SourceError(
            f"max_shrink of {what} must be between 0 and 1, a share of the rows that the table "
            f"holds, got {source.max_shrink}"
        )
    if source.on_duplicate not in ("fail", "quarantine"):
        raise SourceError(
            f"on_duplicate of {what} must be 'fail' or 'quarantine', got {source.on_duplicate!r}"
        )


def check_ignored(name: str, ignore: Sequence[str], key: Sequence[str], schema: StructType) -> None:
    """Checks that ``ignore`` names value columns.

    Raises:
        TopologyError: ``ignore`` names other columns.
    """
    wrong = [c for c in ignore if c not in schema.names or c in key]
    if wrong:
        others = [c for c in schema.names if c not in key]
        raise TopologyError(
            f"{name}: ignore must name value columns, some of {others}, got {wrong}; correct the names"
        )


def buckets_of(size: int) -> int:
    """Returns the number of buckets in which ``size`` bytes are numbered in order of arrival."""
    return max(1, min(MOST_BUCKETS, size // _BUCKET_BYTES))


def records_of(
    dump: DataFrame,
    node: Stream,
    held: DataFrame,
    hold: Callable[[DataFrame], DataFrame],
    source: Any,
    *,
    accepted: bool,
    what: str,
    time: int,
    size: int,
) -> DataFrame:
    """Returns the difference of a dump to the table as upserts and tombstones.

    If the key of a row is unknown (unreadable, or with a null), any key may be missing by mistake: the
    dump then deletes nothing.

    Plan: that of ``core.source_records.difference``, persisted; one job that counts it; with deletions,
    one job that counts the rows of the table.

    Args:
        dump: the schema's columns, ``_source``, ``_position``, ``_unread`` and ``_reason``.
        held, hold: see ``Comparing``.
        source: the source of the dump, with the limits within which the dump is accepted.
        accepted: whether the dump may be empty, or delete more than ``max_shrink``.
        what: the name of the dump, for messages.
        time: the time of the dump in epoch microseconds.
        size: its size in bytes.

    Raises:
        SourceError: the dump is empty, deletes too many rows, or has duplicate keys.
        ContractError: the share of bad rows is too large.
    """
    compared = [c for c in value_columns(node) if c not in source.ignore]
    news = hold(difference(dump, held, key=node.key, compared=compared, buckets=buckets_of(size)))
    lost = ~F.col(DELETED) & ~has_key(node.key)
    twice = F.coalesce(F.col(REASON) == Reason.DUPLICATE_KEY, F.lit(False))
    found = _counted(
        news, deleted=F.col(DELETED), lost=lost, twice=twice, bad=lost | F.col(REASON).isNotNull()
    )
    if found["twice"] and source.on_duplicate == "fail":
        _refuse_duplicates(news.where(twice), node.key, what, found["twice"])
    if found["bad"]:
        _check_share(what, found["bad"], dump, source, node)
    if not accepted:
        _check_size(what, found, held, source.max_shrink)
    if found["lost"]:
        news = news.where(~F.col(DELETED))
    moment = F.timestamp_micros(F.lit(time))
    raw = F.coalesce(F.col(UNREAD), as_json(node.schema.names))
    timed = {} if TIMESTAMP in node.schema.names else {TIMESTAMP: moment}
    return news.withColumns(
        {
            **timed,
            RECORD_TIME: moment,
            # A row marked as deleted is in every dump, so it may repeat the table's state.
            RESTATES: ~F.col(DELETED),
            RAW: raw,
            SOURCE: F.coalesce(F.col(SOURCE), F.lit(what)),
        }
    ).select(
        *[F.col(f"`{c}`") for c in node.schema.names],
        *timed,
        *(ARRIVAL, DELETED, RECORD_TIME, RESTATES, SOURCE, POSITION, RAW, REASON),
    )


def _counted(rows: DataFrame, **conditions: Any) -> dict[str, int]:
    sums = [F.sum(F.when(c, 1).otherwise(0)).alias(name) for name, c in conditions.items()]
    found = rows.agg(F.count(F.lit(1)).alias("all"), *sums).collect()[0]
    return {name: int(number or 0) for name, number in found.asDict().items()}


def _refuse_duplicates(rows: DataFrame, key: Sequence[str], what: str, count: int) -> None:
    keys = [F.col(f"`{k}`") for k in key]
    some = [tuple(row) for row in rows.select(*keys).distinct().orderBy(*keys).limit(3).collect()]
    shown = ", ".join(repr(one[0] if len(one) == 1 else one) for one in some)
    raise SourceError(
        f"{what} has {count:,} rows that share their key with another one, for example {shown}; "
        "expected one row per key; nothing was committed. Repair the dump, or set "
        "on_duplicate='quarantine' of the source: then the table keeps its rows of these keys"
    )


def _check_share(what: str, bad: int, dump: DataFrame, source: Any, node: Stream) -> None:
    rows, most = dump.count(), source.max_bad_share
    if bad > most * rows:
        unread = dump.where(F.col(UNREAD).isNotNull()).orderBy(SOURCE, POSITION).limit(3)
        some = unread.select(SOURCE, POSITION, UNREAD).collect()
        shown = "".join(f"{row[0]} row {row[1]}: unreadable: {str(row[2])[:80]}. " for row in some)
        hint = hint_of([str(row[2]) for row in some], node.schema, source)
        raise ContractError(
            f"{what}: {bad:,} of {counted(rows, 'row is', 'rows are')} bad ({bad / rows:.1%}): "
            f"unreadable, without a key, or with a duplicate key; expected at most {most:.1%}; nothing "
            f"was committed. {shown}{hint}Repair the dump, or raise max_bad_share of the source to "
            "send them to quarantine"
        )


def _check_size(what: str, found: Mapping[str, int], held: DataFrame, most: float) -> None:
    deleted = 0 if found["lost"] else found["deleted"]
    if not deleted and found["all"]:
        return
    there = held.count()
    if there == deleted and found["all"] == deleted:
        raise SourceError(
            f"{what} is empty: expected rows; nothing was committed. Put a whole dump in its place, or "
            "run once with accept_shrink: true, which deletes all rows of the table"
        )
    if deleted > most * there:
        raise SourceError(
            f"{what} lacks {deleted:,} of the {counted(there, 'row')} that the table holds "
            f"({deleted / there:.0%}), expected at most {most:.0%} (max_shrink); nothing was committed."
            " Check whether it is complete; if it is, run once with accept_shrink: true"
        )


def require_past(what: str, time: int, skew: timedelta) -> None:
    """Checks that a dump's time is not in the future by this machine's clock.

    Raises:
        SourceError: the time is ahead by more than ``skew``.
    """
    now = datetime.now(timezone.utc)
    limit = int((now.timestamp() + skew.total_seconds()) * 1_000_000)
    if time > limit:
        raise SourceError(
            f"{what} has the time {in_utc(time)}, which is more than max_clock_skew ({skew}) "
            f"ahead of this machine's clock ({now:%Y-%m-%dT%H:%M:%SZ}): all later dumps would be "
            "out of order. Correct its time, or raise max_clock_skew of the source"
        )


# Snapshot source


DUMPS = "dumps"
"""The name of a dump source in a commit's ``inputs``; its offsets count dumps."""
_MODIFIED = "modified"
_SUFFIXES = re.compile(r"(\.(parquet|csv|jsonl?|txt|gz|bz2|zst|snappy|lz4))+$")


@dataclass(frozen=True)
class PinnedDump(Limited):
    """The dump that a run consumes.

    Args:
        dump: the dump; None = no new one.
        waiting: the names of the dumps left to later runs.
        before: the dumps of earlier runs: name -> its size in bytes, time, stamp and digest; it also
            has the entries of other kinds of sources that the table had.
        accepted: whether the dump may be empty, or delete more than ``max_shrink``.
        learned: the dump's time, once it has been read.
    """

    source: SnapshotSource
    dump: Dump | None
    waiting: Sequence[str]
    before: Mapping[str, Any]
    accepted: bool
    learned: dict[str, int] = field(default_factory=dict[str, int])

    @property
    def max_bad_share(self) -> float:
        # Only the changed rows are known here: ``records_of`` checks the share of the dump.
        return 1.0

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
        files, reader = dump.files if dump else (), source.files_of(str(folder))
        with explained(self):
            rows = read_by_all_names(node, lambda _, all_: reader.read(spark, files, all_, "the dump"))
        place = F.concat(F.lit(f"{dump.name}/"), SOURCE) if dump and dump.nested else F.col(SOURCE)
        unread = F.when(F.col(REASON).isNotNull(), F.col(RAW)).alias(UNREAD)
        return rows.select(*node.schema.names, place.alias(SOURCE), POSITION, REASON, unread)

    def difference(
        self, spark: SparkSession, node: Stream, held: DataFrame, hold: Callable[[DataFrame], DataFrame]
    ) -> DataFrame:
        dump, rows, name = self.dump, self.read(spark, node), self.what
        time = 0 if dump is None else self._time(name, dump, rows)
        self.learned["time"] = time
        about = {"accepted": self.accepted or dump is None, "what": name, "size": self.bytes}
        return records_of(rows, node, held, hold, self.source, time=time, **about)

    def _time(self, name: str, dump: Dump, rows: DataFrame) -> int:
        time = self.source.time_of(dump)
        if time is None:
            moment = F.unix_micros(F.max(F.expr(self.source.dump_time).try_cast("timestamp")))
            time = rows.agg(moment.alias("time")).collect()[0]["time"]
        if time is None:
            raise SourceError(
                f"{name}: expected dump_time {self.source.dump_time!r} to give a time, got null in "
                "every row, or there is no row; nothing was committed. Repair the dump, or correct the "
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
        dumps = dumps_among(self.before)
        kept = {n: entry for n, entry in self.before.items() if n in names or n not in dumps}
        about = {"stamp": stamp_of(dump.files), "digest": digest_of(dump.files)}
        return {**kept, dump.name: {"bytes": dump.size, "time": self.learned["time"], **about}}

    def position(self, before: Commit, counts: Mapping[str, int]) -> dict[str, Any]:
        first = before.inputs.get(DUMPS, {}).get(0, 0)
        taken, end = {DUMPS: {0: (first, first + 1)}}, {DUMPS: {0: first + 1}}
        return {"taken": taken, "inputs": end, "files": True}

    def describe(self, schema: StructType) -> list[str]:
        assert self.dump is not None
        many = counted(len(self.waiting), "more waits", "more wait, each")
        more = f"; {many} for a run of its own" if self.waiting else ""
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
        text = unquote(str(error))
        if not any(f.name in text for f in self.dump.files):
            return None
        return SourceError(
            f"the dump {self.dump.name} in {self.source.path} could not be read: {one_line(error)}; "
            "nothing was committed. Repair it, or move it away, and run again"
        )


def dumps_among(consumed: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the consumed dumps, without the entries of other kinds of sources."""
    entries = consumed.items()
    return {name: one for name, one in entries if isinstance(one, Mapping) and "bytes" in one}


def _changed(dump: Dump, entry: Mapping[str, Any] | None) -> str | None:
    """Returns how a consumed dump has changed; None = it has not, or was only touched.

    Args:
        entry: its state when it was consumed; None = not consumed.
    """
    if entry is None:
        return None
    if entry["bytes"] not in (dump.size, dump.size_above):
        return f"{entry['bytes']} bytes then, {dump.size} now"
    # Earlier versions of the library stored neither.
    if entry.get("stamp") in (None, stamp_of(dump.files)) or entry["digest"] == digest_of(dump.files):
        return None
    return f"{entry['bytes']} bytes then and now, but rewritten since"


@dataclass(frozen=True)
class SnapshotSource(Repeatable):
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
        check_place(self)
        # Checks format and options.
        files = FilesSource(self.path, self.format, options=self.options)
        object.__setattr__(self, "options", files.options)
        object.__setattr__(self, "optional", tuple(self.optional))
        check_limits(self)

    def files_of(self, path: str) -> FilesSource:
        """Returns the reader of the files in a directory of dumps."""
        return FilesSource(
            path,
            self.format,
            options=self.options,
            optional=self.optional,
            timestamps=self.timestamps,
            path_columns=self.path_columns,
        )

    def describe(self) -> str:
        """Returns a description of the source, for metadata and messages."""
        return f"{self.format} dumps {posixpath.join(str(self.path), self.pattern)}"

    def check(self, name: str, key: Sequence[str], schema: StructType) -> None:
        """Checks the settings against the schema.

        Raises:
            TopologyError: ``ignore`` or ``optional`` names no value column; ``dump_time`` is not valid.
        """
        check_ignored(name, self.ignore, key, schema)
        self.files_of(self.path).check(name, key, schema)
        if not self.dump_time.strip():
            raise TopologyError(
                f"{name}: expected dump_time to be 'modified', a pattern like 'customers_%Y-%m-%d' or "
                "a SQL expression, got an empty text; set the time at which a dump was true"
            )
        if "%" in self.dump_time:
            try:
                datetime.strptime("", self.dump_time)
            except ValueError as error:
                if "does not match" not in str(error):
                    raise TopologyError(
                        f"{name}: expected dump_time to be a pattern of Python's strptime, got "
                        f"{self.dump_time!r}: {error}; correct it"
                    ) from None

    @property
    def expressions(self) -> dict[str, str]:
        """The SQL expressions over the columns of a dump, by the name of the setting."""
        return (
            {}
            if self.dump_time == _MODIFIED or "%" in self.dump_time
            else {"dump_time": self.dump_time}
        )

    # -- replays ---------------------------------------------------------------------------------

    def counts_records(self, live: AssetStore) -> bool:
        return not all(DUMPS in one.taken for one in commits(live.root) if one.taken)

    def gone(self, live: AssetStore, instead: str) -> SourceError | None:
        head = live.head()
        if head is None:
            return None
        # By name, since a run forgets dumps that are gone.
        last = max(dumps_among(live.consumed_files(head)), default="")
        there = sum(dump.name <= last for dump in self.dumps())
        taken = head.commit.inputs.get(DUMPS, {}).get(0, 0)
        if taken <= there:
            return None
        return SourceError(
            f"{live.node.name}: expected the {counted(taken, 'dump')} that its log was made of, got "
            f"{there:,} of them in {self.path}: the history of the others would be missing in the new "
            f"log. Put them back, or {instead}"
        )

    def repeated_runs(self, live: AssetStore, head: Head, keep_recorded: bool) -> Iterator[RepeatedRun]:
        """Yields one run up to the last consumed dump that is there."""
        known = dumps_among(live.consumed_files(head))
        there = [dump.name for dump in self.dumps() if dump.name in known]
        instead = "replay only the assets derived from it"
        if known and not there and (error := self.gone(live, instead)) is not None:
            raise error
        yield RepeatedRun({"dump": there[-1], "accept_shrink": True} if there else {})

    # -- dumps -----------------------------------------------------------------------------------

    def dumps(self) -> list[Dump]:
        """Returns the complete dumps, by name. Does not use Spark.

        Raises:
            SourceError: the directory does not exist, or cannot be reached or listed.
        """
        path, what = str(self.path), f"{self.format} dumps"
        found = [Dump(f.name, (f,), False) for f in files_in(path, self.pattern, what, False)]
        for name in self._folders(path):
            within = files_in(posixpath.join(path, name), "*", what)
            files = [f for f in within if f.name != self.marker]
            found += [Dump(name, tuple(files), True)] if files else []
        return sorted(found)

    def _folders(self, path: str) -> list[str]:
        with delta.listing_source(path):
            fs, root = delta.filesystem(path)
            there = fs.ls(root, detail=True, refresh=True)
            names = [
                posixpath.basename(entry["name"].rstrip("/"))
                for entry in there
                if entry["type"] == "directory"
            ]
            return [
                name
                for name in names
                if not name.startswith((".", "_"))
                and fnmatch(name, self.pattern)
                and (not self.marker or fs.exists(posixpath.join(root, name, self.marker)))
            ]

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
            SourceError: a dump is older than the last consumed one, or its content changed after it was
                consumed; or there is no dump of the given name.
        """
        there, known = self.dumps(), dumps_among(consumed)
        if dump is not None and dump not in known and dump not in [d.name for d in there]:
            raise SourceError(
                f"{self.path}: expected the dump {dump!r} of the run config, which does not exist or "
                "is not complete; put it back, correct the name, or run without it in the config"
            )
        for one in there:
            change = _changed(one, known.get(one.name))
            if change is not None:
                raise SourceError(
                    f"the dump {one.name} in {self.path} changed after it was consumed: {change}; "
                    "deliver the new rows as another dump, and put the old one back"
                )
        new = [d for d in there if d.name not in known]
        for one in new:
            self.require_order(one, self.time_of(one), consumed)
        requested = [d for d in new if dump is None or d.name <= dump]
        first = requested[0] if requested else None
        waiting = [d.name for d in new if d is not first]
        return PinnedDump(self, first, waiting, consumed, accept_shrink)

    def news(self, before: Commit | None, consumed: Mapping[str, Any]) -> News:
        """Returns the run config with the name of the next dump. Does not use Spark."""
        pinned = self.pin(before, consumed=consumed)
        if pinned.dump is None:
            return News()
        config, count = {"dump": pinned.dump.name}, counted(len(pinned.waiting) + 1, "new dump")
        return News(config, count, content=stamp_of(pinned.dump.files))

    def time_of(self, dump: Dump) -> int | None:
        """Returns a dump's time in epoch microseconds; None = ``dump_time`` is an expression over its
        rows.

        Raises:
            SourceError: the name does not match ``dump_time``.
        """
        if self.dump_time == _MODIFIED:
            return dump.modified
        if self.expressions:
            return None
        stem = dump.name if dump.nested else _SUFFIXES.sub("", dump.name)
        try:
            moment = datetime.strptime(stem, self.dump_time)
        except ValueError:
            raise SourceError(
                f"the dump {dump.name} in {self.path}: expected a name like {self.dump_time!r} "
                f"(dump_time), got {stem!r}; rename it, or leave it out by the source's pattern"
            ) from None
        return epoch_micros(moment)

    def require_order(self, dump: Dump, time: int | None, consumed: Mapping[str, Any]) -> None:
        """Checks that a dump follows the consumed ones, by name and by time.

        Raises:
            SourceError: the dump does not follow them, or its time is in the future.
        """
        if time is not None:
            require_past(f"the dump {dump.name} in {self.path}", time, self.max_clock_skew)
        known = dumps_among(consumed)
        if not known:
            return
        last = max(known)
        newest = known[last]["time"]
        if dump.name < last or (time is not None and time < newest):
            of_time = "" if time is None else f" of {in_utc(time)}"
            raise SourceError(
                f"the dump {dump.name}{of_time} in {self.path} is older than the last one that was "
                f"consumed, {last} of {in_utc(newest)}; nothing was committed. Move it away, or "
                "rebuild the table from all dumps (vt-dagster replay)"
            )
