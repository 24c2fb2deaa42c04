"""The versions that a run reads from an external Delta table."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

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
    changes,
)
from vt_dagster.errors import RecordsGoneError, SourceError
from vt_dagster.sources.base import End, Uncounted
from vt_dagster.sources.csv_text import nullable
from vt_dagster.sources.delta_log import Change, ForeignTable
from vt_dagster.sources.dump_limits import UNREAD, Limits, buckets_of, records_of
from vt_dagster.sources.match_by_name import by_name
from vt_dagster.spark.jars import one_line
from vt_dagster.storage import delta
from vt_dagster.storage.commit_log import Commit, Offsets
from vt_dagster.topology.model import Stream
from vt_dagster.topology.schema import differences

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


@dataclass(frozen=True)
class PinnedVersions(Uncounted):
    """The versions of a table that a run consumes.

    Args:
        mode: the mode of the source.
        first: the first version (inclusive); ``end``: the last one (exclusive).
        changes: the commits; empty if a whole state is read.
        time: the commit time of the last version in epoch microseconds.
        gap: an accepted range of missing versions, end exclusive; None = none.
        state: the version that is read as a whole state; None = the commits are read.
        limits: the limits within which a whole state is accepted.
    """

    table: ForeignTable
    mode: str
    first: int
    end: int
    changes: tuple[Change, ...]
    time: int | None
    gap: tuple[int, int] | None
    max_bad_share: float
    max_clock_skew: timedelta
    state: int | None = None
    limits: Limits | None = None

    @property
    def bytes(self) -> int:
        if self.state is not None:
            return self.table.bytes(self.state)
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
        return {
            "taken": {DELTA: {0: (self.first, self.end)}},
            "inputs": {DELTA: {0: self.end}},
            "topics": {DELTA: f"{self.table.id}@{self.time or ''}"},
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
        if not any(sign in str(error) for sign in _GONE):
            return None
        return RecordsGoneError(
            f"files of versions {self.first} to {self.end - 1} of {self.table.path} are gone "
            f"({one_line(error)[:200]}): VACUUM removed them before they were consumed; nothing was "
            f"committed. {'' if self.mode == 'append' else _BY_STATE}Reprocess into a new asset with "
            "start='current', or have their files restored and run again"
        )

    # -- records ---------------------------------------------------------------------------------

    def read(self, spark: SparkSession, node: Stream) -> DataFrame:
        """Returns the records, in order of arrival.

        Plan: appended rows: one scan of their files, no shuffle; changes: that of
        ``core.source_records.changes``; a whole state: one shuffle.
        """
        if self.empty:
            return self._records(_nothing(spark, node), node)
        if self.state is not None:
            return self._records(self._ordered(self.rows(spark, node), node), node)
        self._require_columns(node, self.end - 1)
        if self.mode == "append":
            return self._records(self._appended(spark, node), node)
        return self._records(self._changed(spark, node), node)

    def rows(self, spark: SparkSession, node: Stream) -> DataFrame:
        """Returns all rows of the version, with ``_time``, ``_source`` and ``_position``."""
        assert self.state is not None
        self._require_columns(node, self.state)
        rows = spark.read.format("delta").option("versionAsOf", self.state).load(self.table.path)
        return rows.select(
            *_columns(rows, node),
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
        parted = set(self.table.parted_by(self.end - 1))
        parts = [c for c in node.schema.names if c in parted]
        files = [(c, f) for c in self.changes for f in sorted(c.added, key=lambda one: one.place)]
        if not files:
            return _nothing(spark, node)
        told = [
            (f.place, rank, c.version, c.time, *[f.parts.get(p) for p in parts])
            for rank, (c, f) in enumerate(files)
        ]
        columns = f"{_PLACE} string, {_RANK} long, {VERSION} long, {_TIME} long"
        about = spark.createDataFrame(
            told, ", ".join([columns, *[f"{_PART}{n} string" for n in range(len(parts))]])
        )
        own = StructType([f for f in node.schema.fields if f.name not in parted])
        decoded = F.url_decode(F.replace(F.col("_metadata.file_path"), F.lit("+"), F.lit("%2B")))
        rows = spark.read.schema(own).parquet(*[delta.literal(f.path) for _, f in files])
        located = rows.select(
            *[F.col(f"`{c}`") for c in own.names],
            F.regexp_replace(decoded, "^[A-Za-z0-9]+:/+", "/").alias(_PLACE),
            F.col("_metadata.row_index").alias(_ROW),
        )

        def column(name: str) -> Column:
            if name not in parts:
                return F.col(f"`{name}`")
            # Cast as Delta's readers do, not by ``value_reader``: a whole version is read by them. An
            # empty text is null, except in STRING and BINARY.
            text = F.col(f"{_PART}{parts.index(name)}")
            return text.try_cast(node.schema[name].dataType).alias(name)

        file = F.element_at(F.split(_PLACE, "/"), -1)
        return located.join(F.broadcast(about), _PLACE).select(
            *[column(c) for c in node.schema.names],
            _TIME,
            F.format_string("version %d: %s", VERSION, file).alias(SOURCE),
            (F.col(_ROW) + 1).alias(POSITION),
            (F.col(_RANK) * STRIDE + F.col(_ROW)).alias(ARRIVAL),
        )

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
        told = feed.select(*_columns(feed, node), CHANGE, VERSION).join(F.broadcast(versions), VERSION)
        values = [c for c in node.schema.names if c not in node.key]
        done = changes(told, key=node.key, values=values, start=self.first)
        own = [F.col(f"`{c}`") for c in node.schema.names]
        table = F.lit(self.table.path).alias(SOURCE)
        return done.select(*own, _TIME, table, F.col(VERSION).alias(POSITION), ARRIVAL, DELETED)

    def _records(self, rows: DataFrame, node: Stream) -> DataFrame:
        """Adds the columns that every source provides."""
        moment = F.timestamp_micros(F.col(_TIME))
        raw = F.to_json(F.struct(*[F.col(f"`{c}`") for c in node.schema.names]))
        timed = {} if TIMESTAMP in node.schema.names else {TIMESTAMP: moment}
        none = F.lit(None).cast("string")
        gone = {} if DELETED in rows.columns else {DELETED: F.lit(False)}
        return rows.withColumns(
            {**timed, **gone, RECORD_TIME: moment, RAW: raw, REASON: none},
        ).drop(_TIME)

    def _require_columns(self, node: Stream, version: int) -> None:
        """Checks that the table has the schema's columns; a version may lack columns added later.

        Raises:
            SourceError: the table lacks columns, or has them with other types.
        """
        there = {f.name: f.dataType for f in self.table.schema(version).fields}
        newest = self.table.schema(self.table.version).names
        missing = [c for c in node.schema.names if c not in there and c not in newest]
        if missing:
            raise SourceError(
                f"{self.table.path}: expected columns {missing}, but version {version} has only "
                f"{list(there)}; take them out of the schema, or correct their names"
            )
        wrong = [
            said
            for f in node.schema.fields
            if f.name in there
            for said in differences(there[f.name], f.dataType, f.name)
        ]
        if wrong:
            raise SourceError(
                f"{self.table.path}, version {version}: {'; '.join(wrong)}; correct the schema's types"
            )


@dataclass(frozen=True)
class PinnedState(PinnedVersions):
    """A version that is compared with the asset's table."""

    @property
    def what(self) -> str:
        """The version, for messages."""
        return f"version {self.state} of {self.table.path}"

    def difference(
        self,
        spark: SparkSession,
        node: Stream,
        held: DataFrame,
        hold: Callable[[DataFrame], DataFrame],
    ) -> DataFrame:
        assert self.state is not None
        assert self.limits is not None
        none = F.lit(None).cast("string")
        rows = self.rows(spark, node).drop(_TIME).withColumns({REASON: none, UNREAD: none})
        about = {"what": self.what, "time": self.time or 0, "size": self.bytes}
        return records_of(rows, node, held, hold, self.limits, **about)


def _columns(rows: DataFrame, node: Stream) -> list[Column]:
    """Returns a node's columns, with nested fields by name; null for columns that the rows lack."""
    kinds = {f.name: f.dataType for f in rows.schema.fields}
    return [
        by_name(F.col(f"`{f.name}`"), kinds[f.name], f.dataType).alias(f.name)
        if f.name in kinds
        else F.lit(None).cast(f.dataType).alias(f.name)
        for f in node.schema.fields
    ]


def _nothing(spark: SparkSession, node: Stream) -> DataFrame:
    none = spark.createDataFrame([], nullable(node.schema))
    numbers = {name: F.lit(None).cast("long") for name in (_TIME, ARRIVAL, POSITION)}
    return none.withColumns({**numbers, SOURCE: F.lit(None).cast("string")})
