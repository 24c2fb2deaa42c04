"""An external Delta table as a source: each of its versions is consumed once.

The asset's own commits store the next version, the table's id and the commit time of the last consumed
version. These detect a table that was replaced or restored.
"""

from __future__ import annotations

import json
import posixpath
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import cached_property
from typing import Any, Literal, NamedTuple
from urllib.parse import unquote

import pyarrow as pa
from deltalake import DeltaTable
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import StructType

from vt_dagster.columns import ARRIVAL, TIMESTAMP
from vt_dagster.core.arrival_order import STRIDE, in_order_of_keys
from vt_dagster.core.source_records import (
    BUCKETS,
    CHANGE,
    DELETED,
    POSITION,
    RAW,
    REASON,
    RECORD_TIME,
    SOURCE,
    VERSION,
    as_json,
    changes,
)
from vt_dagster.errors import (
    ConcurrentRunError,
    RecordsGoneError,
    SourceError,
    StorageError,
    StoreUnavailableError,
    counted,
)
from vt_dagster.sources.base import (
    End,
    Limited,
    News,
    Repeatable,
    RepeatedRun,
    Whole,
    all_by_name,
    check_place,
    delivered,
    of_id,
    replaced,
)
from vt_dagster.sources.snapshot_source import (
    UNREAD,
    OnDuplicate,
    SnapshotSource,
    buckets_of,
    check_ignored,
    check_limits,
    records_of,
)
from vt_dagster.sources.text_formats import file_path, nullable
from vt_dagster.spark.jars import one_line
from vt_dagster.storage import delta
from vt_dagster.storage.asset_store import AssetStore
from vt_dagster.storage.commit_log import Commit, Offsets, commits
from vt_dagster.storage.schema_evolution import by_newest_names
from vt_dagster.storage.spark_reader import Head
from vt_dagster.topology.durations import in_utc
from vt_dagster.topology.model import Stream
from vt_dagster.topology.schema import differences, was

# Delta log


FEED = "delta.enableChangeDataFeed"
"""The table property that enables the change data feed."""
_MAPPING = "delta.columnMapping.mode"
_CHECKPOINT = re.compile(r"(\d{20})\.checkpoint\b.*\.(parquet|json)")


class Added(NamedTuple):
    """A file that a commit added.

    Args:
        path: the file's path for Spark.
        place: the path without the protocol.
        parts: the values of the partition columns, as texts.
    """

    path: str
    place: str
    size: int
    parts: Mapping[str, str | None]


@dataclass(frozen=True)
class Change:
    """The changes of a commit.

    Args:
        time: its time in epoch microseconds, by the writer's clock.
        operation: Delta's name of the operation, for messages.
        added: files with new rows; not those of a compaction.
        removes: whether rows were removed or rewritten; a compaction does neither.
        bytes: the size of all files to read.
        properties: the table's properties, if the commit changed them.
    """

    version: int
    time: int
    operation: str
    added: tuple[Added, ...]
    removes: bool
    bytes: int
    properties: Mapping[str, str] | None

    @property
    def changes_rows(self) -> bool:
        """Whether the commit changed rows."""
        return bool(self.added) or self.removes

    @property
    def changes_state(self) -> bool:
        """Whether the commit changed rows or, with column mapping, perhaps the names of their
        columns."""
        return self.changes_rows or (self.properties or {}).get(_MAPPING, "none") != "none"


class ForeignTable:
    """An external Delta table at its current version.

    Raises:
        SourceError: there is no table, or its log cannot be read.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        try:
            table = delta.open_table(path)
        except (StorageError, ValueError, OSError) as error:
            raise SourceError(
                f"expected a Delta table that can be read in {path!r}, got: {one_line(error)}; correct "
                "the path, or restore its _delta_log"
            ) from None
        if table is None:
            raise SourceError(
                f"expected a Delta table in {path!r}, found none; correct the path, or run again when "
                "it has been written"
            )
        self._table = table
        names = delta.log_files(path)
        self._commits = {int(m[1]) for n in names if (m := delta.COMMIT_FILE.fullmatch(n))}
        self._checkpoints = {int(m[1]) for n in names if (m := _CHECKPOINT.fullmatch(n))}

    @property
    def version(self) -> int:
        """The newest version."""
        return self._table.version()

    @property
    def id(self) -> str:
        """The table id; a replaced table has another one."""
        return str(self._table.metadata().id)

    def first_commit(self, until: int) -> int:
        """Returns the first of the gapless commits up to ``until`` (inclusive); ``until + 1`` if there
        is none."""
        first = until + 1
        while first - 1 in self._commits:
            first -= 1
        return first

    def first_state(self) -> int:
        """Returns the oldest readable version after which all commits are available."""
        first = self.first_commit(self.version)
        if first == 0:
            return 0
        return min((v for v in self._checkpoints if v + 1 >= first), default=self.version)

    def at(self, version: int) -> DeltaTable:
        """Returns the table at a version.

        Raises:
            SourceError: the version can no longer be read.
        """
        if version == self.version:
            return self._table
        try:
            found = delta.open_table(self.path, version)
        except (ConcurrentRunError, StorageError, StoreUnavailableError) as error:
            raise SourceError(
                f"expected version {version} of {self.path}, got: {one_line(error)}; run again"
            ) from None
        assert found is not None
        return found

    def properties(self, version: int) -> Mapping[str, str | None]:
        """Returns the table's properties at a version."""
        return self.at(version).metadata().configuration

    def schema(self, version: int) -> StructType:
        """Returns the table's columns at a version."""
        return StructType.fromJson(json.loads(self.at(version).schema().to_json()))

    def bytes(self, version: int) -> int:
        """Returns the size of all files of a version."""
        files = pa.RecordBatchReader.from_stream(self.at(version).get_add_actions(flatten=True))
        return sum(files.read_all().column("size_bytes").to_pylist())

    def require_plain_files(self, version: int) -> None:
        """Checks that the files have the table's column names.

        Raises:
            SourceError: the table has column mapping.
        """
        if (self.properties(version).get(_MAPPING) or "none") != "none":
            raise SourceError(
                f"{self.path} has column mapping ({_MAPPING}), which mode='append' does not support: "
                "expected mode='changes' or 'snapshots'; use one of them"
            )

    def time(self, version: int) -> int | None:
        """Returns the commit time of a version in epoch microseconds; None if its commit is gone."""
        return self.change(version).time if version in self._commits else None

    def change(self, version: int) -> Change:
        """Returns the changes of one commit.

        Raises:
            SourceError: the commit file is truncated.
        """
        fs, root = delta.filesystem(self.path)
        place = posixpath.join(root, "_delta_log", f"{version:020}.json")
        # Of a str, Python's splitlines also splits within texts that contain a Unicode line separator.
        lines = fs.cat_file(place).splitlines()
        try:
            actions: list[dict[str, Any]] = [json.loads(line) for line in lines if line]
        except ValueError:
            raise SourceError(
                f"{place} is truncated: expected a whole commit; restore it from a backup and run again"
            ) from None
        info: dict[str, Any] = next((a["commitInfo"] for a in actions if "commitInfo" in a), {})
        stamp = info.get("inCommitTimestamp") or info.get("timestamp")
        time = int(stamp) * 1000 if stamp else int(fs.modified(place).timestamp() * 1_000_000)
        adds = [a["add"] for a in actions if a.get("add", {}).get("dataChange")]
        removes = [a["remove"] for a in actions if a.get("remove", {}).get("dataChange")]
        feed = [a["cdc"] for a in actions if "cdc" in a]
        configuration = next((a["metaData"]["configuration"] for a in actions if "metaData" in a), None)
        return Change(
            version,
            time,
            str(info.get("operation", "a commit")),
            tuple(self._added(a) for a in adds),
            bool(removes),
            sum(int(a.get("size") or 0) for a in (feed or [*adds, *removes])),
            configuration,
        )

    def _added(self, add: Mapping[str, Any]) -> Added:
        name = unquote(add["path"])
        path = name if "://" in name or name.startswith("/") else posixpath.join(self.path, name)
        place = "/" + delta.filesystem(path)[1].lstrip("/")
        return Added(path, place, add["size"], add["partitionValues"])


# Pinned versions


DELTA = "delta"
"""The name of a Delta source in a commit's ``inputs``; its offsets are versions."""
_PLACE, _ROW, _TIME, _RANK, _PART = "_place", "_row", "_time", "_rank", "_part_"
_GONE = (
    "FILE_NOT_EXIST",
    "PATH_NOT_FOUND",
    "FileNotFoundException",
    "FILE_NOT_FOUND",
    "VERSION_NOT_FOUND",
)
"""Texts of Spark's errors about missing files of a version."""
_BY_STATE = "Set mode='snapshots' of the source for one run, which reads the current table. "
_TWICE, _END = "vt_dagster: key twice in version ", " (end of the key)"
"""Around a version and a key in the error of a feed that writes a key twice."""
_OTHER_COLUMNS = "DELTA_CHANGE_DATA_FEED_INCOMPATIBLE"
"""The beginning of Delta's error classes for a change feed that spans other columns."""


@dataclass(frozen=True)
class PinnedVersions(Limited):
    """The versions of a table that a run consumes.

    Args:
        first: the first version (inclusive); ``end``: the last one (exclusive).
        changes: the commits; empty if a full snapshot is read.
        time: the commit time of the last version in epoch microseconds.
        gap: an accepted range of missing versions, end exclusive; None = none.
        state: the version that is read as a full snapshot; None = the commits are read.
        accepted: whether a full snapshot may be empty, or delete more than ``max_shrink``.
    """

    source: DeltaSource
    table: ForeignTable
    first: int
    end: int
    changes: tuple[Change, ...]
    time: int | None
    gap: tuple[int, int] | None
    state: int | None = None
    accepted: bool = False

    @cached_property
    def compacted(self) -> int:
        """The last version with the rows of ``state``, perhaps in other files, which are read: VACUUM
        may have removed those that a compaction has replaced."""
        assert self.state is not None
        version, known = self.state, self.table.first_commit(self.table.version)
        while known <= version + 1 <= self.table.version:
            if self.table.change(version + 1).changes_state:
                break
            version += 1
        return version

    @property
    def bytes(self) -> int:
        if self.state is not None:
            return self.table.bytes(self.compacted)
        return sum(change.bytes for change in self.changes)

    @property
    def empty(self) -> bool:
        return self.end == self.first

    @property
    def source_end(self) -> dict[str, Offsets]:
        return {DELTA: {0: self.table.version + 1}}

    def reaches(self, end: End) -> bool:
        assert not isinstance(end, str)
        left = range(self.end, end.get(DELTA, {}).get(0, 0))
        return not any(self.table.change(version).changes_rows for version in left)

    def consumed(self) -> None:
        """Returns None: the commit holds the version."""

    def position(self, before: Commit, counts: Mapping[str, int]) -> dict[str, Any]:
        known = {DELTA: f"{self.table.id}@{self.time or ''}"}
        positions, ids = replaced(before, known)
        return {
            "taken": {DELTA: {0: (self.first, self.end)}},
            "inputs": {**positions, DELTA: {0: self.end}},
            "topics": {**ids, **known},
            "gaps": {} if self.gap is None else {DELTA: {0: self.gap}},
        }

    def describe(self, schema: StructType) -> list[str]:
        if self.state is not None:
            lines = [f"takes {self.table.path} as it is at version {self.state}"]
        else:
            lines = [f"takes versions {self.first} to {self.end - 1} of {self.table.path}"]
        if self.gap is not None:
            first, end = self.gap
            gone = f"without versions {first} to {end - 1}" if end > first else "with another table"
            lines.append(f"!continues {gone} (accept_gap)")
        return lines

    def explain(self, error: Exception) -> SourceError | None:
        if _OTHER_COLUMNS in str(error):
            return SourceError(
                f"the change data feed of versions {self.first} to {self.end - 1} of {self.table.path} "
                "cannot be read: its columns were renamed, dropped or got another type; nothing was "
                f"committed. {_BY_STATE.strip()}"
            )
        twice = rf"{re.escape(_TWICE)}(\d+) (.*?){re.escape(_END)}"
        if found := re.search(twice, str(error), re.DOTALL):
            return SourceError(
                f"version {found[1]} of {self.table.path} writes several rows with the key {found[2]}: "
                "expected one row per key in mode='changes'; nothing was committed. For a table of "
                "events, use mode='append'. Else correct the asset's key; or correct the table, and "
                "set mode='snapshots' of the source for one run; or set on_duplicate='quarantine': "
                "then the asset keeps its rows of these keys"
            )
        if not any(sign in str(error) for sign in _GONE):
            return None
        other_mode = _BY_STATE if self.source.mode == "changes" else ""
        return RecordsGoneError(
            f"files of versions {self.first} to {self.end - 1} of {self.table.path} are gone "
            f"({one_line(error)[:200]}): VACUUM removed them before they were consumed; nothing was "
            f"committed. {other_mode}Reprocess into a new asset with start='current', or have their "
            "files restored and run again"
        )

    # -- records ---------------------------------------------------------------------------------

    def read(self, spark: SparkSession, node: Stream) -> DataFrame:
        """Returns the records, in order of arrival.

        Plan: appended rows: one scan of their files, no shuffle; changes: that of
        ``core.source_records.changes``; a full snapshot: one shuffle.
        """
        if self.empty:
            return self._records(_no_rows(spark, node), node)
        if self.state is not None:
            return self._records(self._ordered(self.rows(spark, node), node), node)
        self._require_columns(node, self.end - 1)
        if self.source.mode == "append":
            return self._records(self._appended(spark, node), node)
        return self._records(self._changed(spark, node), node)

    def rows(self, spark: SparkSession, node: Stream) -> DataFrame:
        """Returns all rows of the version, with ``_time``, ``_source`` and ``_position``."""
        assert self.state is not None
        self._require_columns(node, self.compacted)
        rows = spark.read.format("delta").option("versionAsOf", self.compacted).load(self.table.path)
        return _by_name(
            rows,
            node,
            F.lit(self.time).alias(_TIME),
            F.lit(self.table.path).alias(SOURCE),
            F.lit(self.state).cast("long").alias(POSITION),
        )

    def _ordered(self, rows: DataFrame, node: Stream) -> DataFrame:
        kinds = dict(rows.dtypes)
        row = F.xxhash64(*[F.col(f"`{c}`") for c in node.schema.names if "map<" not in kinds[c]])
        buckets = F.lit(buckets_of(self.bytes))
        return in_order_of_keys(rows, key=node.key, then=[row], place=F.lit(0), buckets=buckets)

    def _appended(self, spark: SparkSession, node: Stream) -> DataFrame:
        parted, wanted = set(self.table.at(self.end - 1).metadata().partition_columns), delivered(node)
        parts = [c for c in wanted.names if c in parted]
        files = [(c, f) for c in self.changes for f in sorted(c.added, key=lambda one: one.place)]
        if not files:
            return _no_rows(spark, node)
        listed = [
            (f.place, rank, c.version, c.time, *[f.parts.get(p) for p in parts])
            for rank, (c, f) in enumerate(files)
        ]
        columns = f"{_PLACE} string, {_RANK} long, {VERSION} long, {_TIME} long"
        about = spark.createDataFrame(
            listed, ", ".join([columns, *[f"{_PART}{n} string" for n in range(len(parts))]])
        )
        own = StructType([f for f in wanted.fields if f.name not in parted])
        rows = spark.read.schema(own).parquet(*[delta.literal(f.path) for _, f in files])
        located = rows.select(
            *[F.col(f"`{c}`") for c in own.names],
            file_path().alias(_PLACE),
            F.col("_metadata.row_index").alias(_ROW),
        )

        def column(name: str) -> Column:
            if name not in parts:
                return F.col(f"`{name}`")
            # Cast as Delta's readers do, not by ``value_reader``: a whole version is read by them. An
            # empty text is null, except in STRING and BINARY.
            text = F.col(f"{_PART}{parts.index(name)}")
            return text.try_cast(wanted[name].dataType).alias(name)

        file = F.element_at(F.split(_PLACE, "/"), -1)
        rows = located.join(F.broadcast(about), _PLACE).select(
            *[column(c) for c in wanted.names],
            _TIME,
            F.format_string("version %d: %s", VERSION, file).alias(SOURCE),
            (F.col(_ROW) + 1).alias(POSITION),
            (F.col(_RANK) * STRIDE + F.col(_ROW)).alias(ARRIVAL),
        )
        return by_newest_names(rows, wanted)

    def _changed(self, spark: SparkSession, node: Stream) -> DataFrame:
        feed = (
            spark.read.format("delta")
            .option("readChangeFeed", "true")
            .option("startingVersion", self.first)
            .option("endingVersion", self.end - 1)
            .load(self.table.path)
        )
        about = [(c.version, c.time, buckets_of(c.bytes)) for c in self.changes]
        versions = spark.createDataFrame(about, f"{VERSION} long, {_TIME} long, {BUCKETS} int")
        changed = _by_name(feed, node, CHANGE, VERSION).join(F.broadcast(versions), VERSION)
        values = [c for c in node.schema.names if c not in node.key]
        done = changes(changed, key=node.key, values=values, start=self.first)
        own = [F.col(f"`{c}`") for c in node.schema.names]
        table, reason = F.lit(self.table.path).alias(SOURCE), F.col(REASON)
        if self.source.on_duplicate == "fail":
            found = F.concat(F.lit(_TWICE), VERSION, F.lit(" "), as_json(node.key), F.lit(_END))
            reason = F.when(reason.isNotNull(), F.raise_error(found).cast("string")).alias(REASON)
        return done.select(*own, _TIME, table, F.col(VERSION).alias(POSITION), ARRIVAL, DELETED, reason)

    def _records(self, rows: DataFrame, node: Stream) -> DataFrame:
        """Adds the columns that every source provides."""
        moment = F.timestamp_micros(F.col(_TIME))
        raw = as_json(node.schema.names)
        timed = {} if TIMESTAMP in node.schema.names else {TIMESTAMP: moment}
        more = {DELETED: F.lit(False), REASON: F.lit(None).cast("string")}
        more = {name: value for name, value in more.items() if name not in rows.columns}
        rows = rows.withColumns({**timed, **more, RECORD_TIME: moment, RAW: raw})
        return rows.drop(_TIME)

    def _require_columns(self, node: Stream, version: int) -> None:
        """Checks that the table has the schema's columns; a version may lack columns added later."""
        columns = delivered(node)
        there = {f.name: f.dataType for f in self.table.schema(version).fields}
        known = {*there, *self.table.schema(self.table.version).names}
        missing = [c for c in node.schema.names if known.isdisjoint((c, *was(columns[c])))]
        if missing:
            raise SourceError(
                f"{self.table.path}: expected columns {missing}, but version {version} has only "
                f"{list(there)}; take them out of the schema, or correct their names"
            )
        wrong = [
            difference
            for f in columns.fields
            if f.name in there
            for difference in differences(there[f.name], f.dataType, f.name)
        ]
        if wrong:
            raise SourceError(
                f"{self.table.path}, version {version}: {'; '.join(wrong)}; correct the schema's types"
            )


@dataclass(frozen=True)
class PinnedState(PinnedVersions):
    """A version that is compared with the asset's table."""

    @property
    def max_bad_share(self) -> float:
        # Only the changed rows are known here: ``records_of`` checks the share of the version.
        return 1.0

    @property
    def what(self) -> str:
        """The version, for messages."""
        return f"version {self.state} of {self.table.path}"

    def difference(
        self, spark: SparkSession, node: Stream, held: DataFrame, hold: Callable[[DataFrame], DataFrame]
    ) -> DataFrame:
        none = F.lit(None).cast("string")
        rows = self.rows(spark, node).drop(_TIME).withColumns({REASON: none, UNREAD: none})
        about = {"accepted": self.accepted, "what": self.what, "size": self.bytes}
        return records_of(rows, node, held, hold, self.source, time=self.time or 0, **about)


def _by_name(rows: DataFrame, node: Stream, *more: Column | str) -> DataFrame:
    """Returns a node's columns and others, with nested fields by name; null for columns that the rows
    lack."""
    columns = delivered(node)
    found = all_by_name(lambda name: F.col(f"`{name}`"), rows.schema, columns)
    return by_newest_names(rows.select(*found, *more), columns)


def _no_rows(spark: SparkSession, node: Stream) -> DataFrame:
    none = spark.createDataFrame([], nullable(node.schema))
    numbers = {name: F.lit(None).cast("long") for name in (_TIME, ARRIVAL, POSITION)}
    return none.withColumns({**numbers, SOURCE: F.lit(None).cast("string")})


# Delta source


Mode = Literal["append", "changes", "snapshots"]
_UPKEEP = 100
"""A run without row changes commits its position only after this many versions, so that it moves past
them before Delta cleans up their commits."""


@dataclass(frozen=True)
class _Place:
    """The version at which a run begins.

    Args:
        first: the first version (inclusive).
        whole: whether the run takes the whole table at that version instead of the commit's changes.
        gap: an accepted range of missing versions, end exclusive; None = none.
    """

    first: int
    whole: bool
    gap: tuple[int, int] | None = None


@dataclass(frozen=True)
class DeltaSource(Repeatable):
    """An external Delta table, written by another process.

    Without a column ``timestamp`` in the schema, a record's timestamp is the commit time of its version
    by the writer's clock; for a tombstone always. Records arrive in order of version, and within a
    version by file and row (``append``), or by the key's hash and key. A compaction (OPTIMIZE) gives no
    records.

    Args:
        path: the table's directory or URL, readable by both Spark and ``deltalake``.
        mode: ``append``: the appended rows; a commit that removes or rewrites rows is refused.
            ``changes``: the change data feed, which must be enabled: inserts and updates are upserts;
            deletes are tombstones, and so is the old key of an update that changes the key.
            ``snapshots``: the newest version is a full snapshot, and the records are the difference to
            the asset's table, as for :class:`SnapshotSource`; versions in between are skipped, unless
            ``max_versions_per_run=1``. The last two modes are for tables only.
        start: where the first run begins. ``current``: all rows of the newest version, then the commits
            after it. ``earliest``: the oldest available version. A number: the changes of that version
            (inclusive; ``snapshots``: its state).
        max_versions_per_run: the limit of versions with row changes per run; None = no limit.
        ignore, max_shrink, on_duplicate: for comparisons of a full snapshot, as for
            :class:`SnapshotSource`. ``on_duplicate`` also applies to rows that one version writes in
            mode ``changes``. A key that two versions write is not seen to be twice in the table.
        max_bad_share: a run with a larger share of quarantined records fails before its commit.
        max_clock_skew: how far ahead of this machine's clock a timestamp may be.
        upstream: the key of the asset that writes the table, ``shop/export``: a Dagster dependency of
            this asset.
    """

    path: str
    mode: Mode = "append"
    start: Literal["current", "earliest"] | int = field(default="current", kw_only=True)
    max_versions_per_run: int | None = field(default=None, kw_only=True)
    ignore: Sequence[str] = field(default=(), kw_only=True)
    max_shrink: float = field(default=0.5, kw_only=True)
    on_duplicate: OnDuplicate = field(default="fail", kw_only=True)
    max_bad_share: float = field(default=0.1, kw_only=True)
    max_clock_skew: timedelta = field(default=timedelta(days=1), kw_only=True)
    upstream: str | None = field(default=None, kw_only=True)

    gives_timestamp = True

    def __post_init__(self) -> None:
        check_place(self)
        if self.mode not in ("append", "changes", "snapshots"):
            raise SourceError(
                f"mode of {self.path!r} must be 'append', 'changes' or 'snapshots', got {self.mode!r}"
            )
        start: object = self.start
        number = isinstance(start, int) and not isinstance(start, bool) and start >= 0
        if not number and start not in ("current", "earliest"):
            raise SourceError(
                f"start of {self.path!r} must be 'current', 'earliest' or a version, got {start!r}"
            )
        if self.max_versions_per_run is not None and self.max_versions_per_run < 1:
            raise SourceError(
                f"max_versions_per_run must be 1 or more, got {self.max_versions_per_run}"
            )
        check_limits(self)

    @property
    def tables_only(self) -> bool:
        """Whether only tables can have this source."""
        return self.mode != "append"

    @property
    def orders_changes(self) -> bool:
        """Whether the records are changes of a table: the last one of a key is its current row."""
        return self.mode != "append"

    @property
    def restates(self) -> bool:
        """Whether a record may repeat the current row: a row marked as deleted is in each version."""
        return self.whole

    @property
    def whole(self) -> bool:
        """Whether the source gives full snapshots instead of changes."""
        return self.mode == "snapshots"

    def describe(self) -> str:
        """Returns a description of the source, for metadata and messages."""
        what = {"append": "appended rows", "changes": "changes", "snapshots": "versions"}[self.mode]
        return f"{what} of the Delta table {self.path}"

    def check(self, name: str, key: Sequence[str], schema: StructType) -> None:
        """Checks ``ignore`` against the schema; missing columns of the table show when it is read."""
        check_ignored(name, self.ignore, key, schema)

    # -- replays ---------------------------------------------------------------------------------

    def counts_records(self, live: AssetStore) -> bool:
        return not (self.whole and all(DELTA in one.taken for one in commits(live.root) if one.taken))

    def repeated_runs(self, live: AssetStore, head: Head, keep_recorded: bool) -> Iterator[RepeatedRun]:
        """Yields a run for each run of the asset, up to its version; without system times, only the
        runs that a longer one would not equal."""
        every = [one for one in commits(live.root) if DELTA in one.taken]
        self._require_same_table(live, every)
        for commit, after in zip(every, [*every[1:], None], strict=True):
            gaps = DELTA in commit.gaps, after is not None and DELTA in after.gaps
            # How rows or changes are split into runs does not change the log, but for its system times.
            if keep_recorded or self.whole or commit is every[0] or after is None or any(gaps):
                # Nobody accepts again what was accepted in the run that is repeated.
                accepted = {"accept_gap": gaps[0], "accept_shrink": True}
                yield RepeatedRun(
                    {"version": commit.taken[DELTA][0][1] - 1, **accepted},
                    commit.recorded_at if keep_recorded else None,
                )
        if not every:
            yield RepeatedRun()

    def require_same(self, live: AssetStore) -> None:
        self._require_same_table(live, [one for one in commits(live.root) if DELTA in one.taken])

    def _require_same_table(self, live: AssetStore, every: Sequence[Commit]) -> None:
        now = ForeignTable(str(self.path)).id if every else ""
        for commit in every:
            then = commit.topics[DELTA].partition("@")[0]
            if then != now:
                raise RecordsGoneError(
                    f"{live.node.name}: expected the Delta table that batch {commit.batch} consumed, "
                    f"got another one in {self.path} (the id was {then}, now {now}): its versions "
                    "refer to other rows. Replay only the assets derived from it: its log has its "
                    "records. Or declare a new asset, which begins with the table as it is now"
                )

    # -- versions --------------------------------------------------------------------------------

    def pin(
        self,
        before: Commit | None,
        version: int | None = None,
        accept_gap: bool = False,
        accept_shrink: bool = False,
        *,
        consumed: Mapping[str, Any] = {},
    ) -> PinnedVersions:
        """Pins the versions of a run. Does not use Spark.

        Args:
            before: the asset's last commit; None = no commit yet.
            version: the last version to read (inclusive); None = the newest.
            accept_gap: continue although versions are gone or the table was replaced: ``append`` with
                the first available commit, or from ``start``; other modes with the difference to the
                current table. In ``append``, also skip a commit that rewrites rows.
            accept_shrink: whether a full snapshot may be empty, or delete more than ``max_shrink``.
            consumed: not used; the commit holds the version.

        Raises:
            RecordsGoneError: unconsumed versions are gone, or the table was replaced.
            SourceError: there is no table; a commit rewrites rows, or has no change data feed.
        """
        table = ForeignTable(str(self.path))
        newest = table.version if version is None else min(version, table.version)
        place = self._place(table, before, accept_gap, newest)
        if place.whole:
            # A table that was only created has no rows yet, and its feed has all of them.
            new = self.mode == "changes" and before is None and not table.bytes(place.first)
            return self._pinned(table, place, state=place.first, accepted=accept_shrink or new)
        if self.mode == "snapshots" and table.first_commit(newest) > place.first:
            return self._pinned(table, place, state=newest, accepted=accept_shrink)
        changes = self._bounded(table, place.first, newest)
        if self.mode == "snapshots":
            newest = max((c.version for c in changes if c.changes_state), default=-1)
            if before is None and not any(c.changes_rows for c in changes):
                newest = -1  # a new table has no rows yet
            if newest < 0:
                return self._pinned(table, place, changes)
            return self._pinned(table, place, state=newest, accepted=accept_shrink)
        if self.mode == "append":
            table.require_plain_files(max(newest, 0))
            changes, place = self._appended(changes, place, accept_gap)
        else:
            self._require_feed(table, place.first, changes)
        return self._pinned(table, place, changes)

    def news(self, before: Commit | None, consumed: Mapping[str, Any]) -> News:
        """Returns the run config with the newest version. Does not use Spark."""
        pinned = self.pin(before)
        if pinned.empty:
            return News()
        number = pinned.end - pinned.first
        return News({"version": pinned.end - 1}, counted(number, "new version"))

    def _bounded(self, table: ForeignTable, first: int, newest: int) -> list[Change]:
        """Returns the commits up to a version, limited by ``max_versions_per_run``."""
        found: list[Change] = []
        taken = 0
        for version in range(first, newest + 1):
            change = table.change(version)
            taken += change.changes_rows
            if self.max_versions_per_run is not None and taken > self.max_versions_per_run:
                break
            found.append(change)
        return found

    def _place(
        self, table: ForeignTable, before: Commit | None, accept_gap: bool, newest: int
    ) -> _Place:
        known = None if before is None else before.topics.get(DELTA)
        if before is None or known is None:
            return self._beginning(table, newest)
        first, back = before.inputs[DELTA][0], of_id(DELTA, table.id)
        # Other modes take the difference to the table: what the other table brought may be outdated.
        if self.mode == "append" and of_id(DELTA, known) != back and back in before.topics:
            known, first = before.topics[back], before.inputs[back][0]
        fault = self._missing(table, known, first)
        if fault is None:
            return _Place(first, False)
        if not accept_gap:
            raise RecordsGoneError(
                f"{self.path}: {fault}. Run once with accept_gap: true to continue "
                f"{'without them' if self.mode == 'append' else 'with the table as it is now'} (the "
                "commit records the gap), or reprocess into a new asset"
            )
        if self.mode != "append":
            return _Place(table.version, True, (first, table.version + 1))
        if table.version >= first and known.startswith(f"{table.id}@"):
            there = table.first_commit(table.version)
            return _Place(there, False, (first, max(first, there)))
        begun = self._beginning(table, newest)
        return _Place(begun.first, begun.whole, (first, first))

    def _beginning(self, table: ForeignTable, newest: int) -> _Place:
        if isinstance(self.start, int):
            if self.mode != "snapshots" and table.first_commit(table.version) > self.start:
                raise RecordsGoneError(
                    f"{self.path}: expected the commits from version {self.start} on, got commits from "
                    f"version {table.first_commit(table.version)} on; choose a later start or 'current'"
                )
            return _Place(self.start, False)
        first = table.first_state()
        if newest < first:
            raise RecordsGoneError(
                f"expected version {newest} of {self.path}, got versions from {first} on: the commits "
                "of the earlier ones were cleaned up (delta.logRetentionDuration has passed). Choose a "
                "later version, or declare a new asset, which begins with the table as it is now"
            )
        if self.start == "current":
            return _Place(newest, True)
        return _Place(first, first > 0 and self.mode != "snapshots")

    def _missing(self, table: ForeignTable, known: str, first: int) -> str | None:
        """Returns a description of what is missing after a version, for messages; None = nothing."""
        before, _, time = known.rpartition("@")
        if before != table.id:
            return (
                f"the table was replaced since version {first - 1} was consumed (its id was {before}, "
                f"now {table.id}): its versions refer to other rows"
            )
        if table.version < first - 1:
            return (
                f"consumed up to version {first - 1}, but the table ends at {table.version}: it was "
                "restored to an earlier state"
            )
        last = table.time(first - 1)
        if last is not None and time and last != int(time):
            return (
                f"version {first - 1} was committed at {in_utc(int(time))} when it was consumed, now "
                f"at {in_utc(last)}: the table was restored to an earlier state and got other commits"
            )
        there = table.first_commit(table.version)
        if self.mode == "snapshots" or there <= first:
            return None
        return (
            f"the commits of versions {first} to {there - 1} were cleaned up before they were consumed "
            "(delta.logRetentionDuration has passed)"
        )

    def _appended(
        self, changes: list[Change], place: _Place, accept_gap: bool
    ) -> tuple[list[Change], _Place]:
        rewrites = next((c for c in changes if c.removes), None)
        if rewrites is None:
            return changes, place
        version = rewrites.version
        if not accept_gap or place.gap is not None:
            raise SourceError(
                f"{self.path}: version {version} ({rewrites.operation}) removes or rewrites rows, "
                "which mode='append' does not support; nothing was committed. Set mode='changes' (with "
                f"{FEED}) or mode='snapshots' of the source, or run once with accept_gap: true to skip "
                "that commit"
            )
        kept = [c for c in changes if c.version < version]
        left_out = Change(version, rewrites.time, rewrites.operation, (), False, 0, None)
        return [*kept, left_out], replace(place, gap=(version, version + 1))

    def _require_feed(self, table: ForeignTable, first: int, changes: Sequence[Change]) -> None:
        if not changes:
            return
        on = table.properties(max(first - 1, 0)).get(FEED) if first else None
        for change in changes:
            if change.properties is not None:
                on = change.properties.get(FEED)
            if change.changes_rows and str(on).lower() != "true":
                raise SourceError(
                    f"{self.path}: version {change.version} ({change.operation}) has no change data "
                    f"feed: expected {FEED}=true, got {on}. Enable it (ALTER TABLE … SET "
                    f"TBLPROPERTIES ({FEED} = true)); to skip that version, set mode='snapshots' for "
                    "one run, or create a new asset with start='current'"
                )

    def _pinned(
        self,
        table: ForeignTable,
        place: _Place,
        changes: Sequence[Change] = (),
        *,
        state: int | None = None,
        accepted: bool = False,
    ) -> PinnedVersions:
        end = place.first + len(changes) if state is None else state + 1
        state_time = None if state is None else table.time(state)
        upkeep = state is None and not any(c.changes_rows for c in changes)
        idle = upkeep and place.gap is None and len(changes) < _UPKEEP
        kind = PinnedVersions if state is None or self.mode == "append" else PinnedState
        return kind(
            self,
            table,
            place.first if state is None or not place.whole else 0,
            place.first if idle else end,
            changes=() if idle else tuple(changes),
            time=changes[-1].time if changes else state_time,
            gap=place.gap,
            state=state,
            accepted=accepted,
        )


# Start snapshot


def pin_start(source: SnapshotSource | DeltaSource) -> Whole | None:
    """Pins the initial snapshot; returns None if there is none yet. Does not use Spark.

    Raises:
        SourceError: there are several, or the directory or table does not exist.
    """
    if isinstance(source, DeltaSource):
        version = source.start if isinstance(source.start, int) else None
        found = source.pin(None, version)
        return found if isinstance(found, PinnedState) else None
    pinned = source.pin(None)
    if pinned.waiting:
        there = [d.name for d in source.dumps()]
        where = posixpath.join(str(source.path), source.pattern)
        raise SourceError(
            f"expected one dump to start with in {where}, found {len(there)}: "
            f"{', '.join(there[:3])}{' …' if len(there) > 3 else ''}; nothing was committed. Select "
            "one by the pattern of start, or move the others away"
        )
    return None if pinned.empty else pinned
