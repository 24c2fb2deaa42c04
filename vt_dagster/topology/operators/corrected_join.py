"""Corrected join: a stream-table join that updates its results when late table records arrive."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from pyspark.sql.types import IntegerType, LongType, StructField, StructType

from vt_dagster.columns import CAUSE, LEFT_OFFSET, LEFT_PARTITION, OFFSET, PARTITION, REVISION, VALID_TO
from vt_dagster.errors import TopologyError
from vt_dagster.topology.durations import check_duration, longest, pairs, spoken
from vt_dagster.topology.operators.base import make_table, need_each_record
from vt_dagster.topology.operators.stream_table_join import StreamTableJoin
from vt_dagster.topology.projection import Projection

_POSITION = {LEFT_PARTITION: (PARTITION, IntegerType()), LEFT_OFFSET: (OFFSET, LongType())}


@dataclass(frozen=True)
class CorrectedJoin(StreamTableJoin):
    """A stream-table join whose result is a table: one row per stream record, re-joined when a late
    table record changes the version at the stream record's timestamp.

    A record or tombstone of the table is valid from its timestamp (inclusive) to the next version of
    its key (exclusive). Previously joined stream records of that key and interval are looked up again,
    and a row whose match differs is updated: ``revision`` counts up from 0, ``cause`` names the table
    record (``table, partition, offset``; null for the first revision).

    Late: a stream record always gets its row. A correction is too late if the row's timestamp is before
    ``stream time - corrected_for``, where stream time is either that of the row's partition before the
    run or that of the table record's partition when the table record arrived. The row then keeps its
    values. It is counted once (``corrections_too_late``, whatever the values of the table record) and
    listed in the asset's quarantine table (``too_late``) with ``source``, ``partition`` and
    ``position`` of its stream record, and ``cause``. Table records that arrived earlier still correct
    the row. The number of revisions depends on how arrivals are split into runs; the final rows do not.
    Null key: as in ``StreamTableJoin``; a record with a null in a column of ``key`` is dropped and
    counted. Tombstone: of the stream, dropped and counted; of the table, the row loses its match (left)
    or is deleted (inner).

    Args:
        corrected_for: how long a row can be corrected, in stream time; at most the table's history
            retention. It may change between runs; rows that are final stay final.
        key: stream columns that identify a record; a second record with the same key fails the run.
            None: the record's partition and offset, as ``left_partition`` and ``left_offset``.
    """

    corrected_for: timedelta = timedelta(0)
    key: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        key = (self.key,) if isinstance(self.key, str) else tuple(self.key)
        object.__setattr__(self, "key", key)
        unknown = [k for k in key if k not in self.left.schema.names]
        if unknown:
            raise TopologyError(
                f"{self.name}: key= of a corrected join needs columns of {self.left.name!r}, some of "
                f"{self.left.schema.names}, got {unknown}; correct it, or remove key= to key rows by "
                "the record's partition and offset"
            )
        super().__post_init__()
        need_each_record(self.name, "corrected_for", self.right)
        self._check_promise()
        self._check_columns()

    @property
    def rescan_span(self) -> dict[str, timedelta]:
        # A late table record is at most the history retention old, and its interval ends at the next
        # version: older table versions are never needed.
        late = longest(self.right.retention or timedelta(0))
        return {
            self.left.name: max(self.corrected_for, *super().rescan_span.values()),
            self.right.name: late,
        }

    def _check_promise(self) -> None:
        check_duration(self.name, "corrected_for", self.corrected_for)
        if not self.right.versioned:
            raise TopologyError(
                f"{self.name}: corrected_for needs a versioned table, but {self.right.name!r} is not "
                "versioned and has no value as of a record's timestamp: declare it as "
                "VersionedTable with a history_retention, or remove corrected_for"
            )
        for partition, (promised, retention) in pairs(self.corrected_for, self.right.retention):
            if promised > retention:
                raise TopologyError(
                    f"{self.name}: corrected_for {promised}{partition} is longer than the history "
                    f"retention {retention} of {self.right.name!r}; corrections would need expired "
                    "versions: shorten corrected_for or lengthen history_retention"
                )

    def _check_columns(self) -> None:
        chosen = self.projection()
        own = {REVISION, CAUSE, *_POSITION}
        taken = sorted(name for name, _ in chosen.columns if name.lower() in own)
        if taken:
            raise TopologyError(
                f"{self.name}: expected no selected columns named {taken}, which a corrected join adds "
                f"itself; select them under another name, for example 'left.{taken[0]} as "
                f"own_{taken[0]}'"
            )
        if VALID_TO in chosen.right_columns():
            raise TopologyError(
                f"{self.name}: right.valid_to changes with every later version, so each new version "
                "would correct earlier rows; remove it from select: right.valid_from identifies the "
                "version"
            )

    def projection(self) -> Projection:
        sides = {"left": self._side(self.left), "right": self._side(self.right)}
        return Projection(self.name, self.key, sides, self.select)

    @property
    def columns(self) -> tuple[tuple[str, str], ...]:
        """The result's (name, SQL expression over ``left.*`` and ``right.*``)."""
        position = [(name, f"left.`{column}`") for name, (column, _) in _POSITION.items()]
        return (*([] if self.key else position), *self.projection().columns)

    @property
    def result_key(self) -> tuple[str, ...]:
        """The key columns of the result."""
        return self.key or tuple(_POSITION)

    @property
    def settings(self) -> dict[str, str]:
        return {**super().settings, "corrected_for": spoken(self.corrected_for)}

    @property
    def log_columns(self) -> tuple[str, ...]:
        return (REVISION, CAUSE, *((LEFT_OFFSET,) if self.key else ()))

    def lineage(self) -> dict[str, list[tuple[str, str]]]:
        position = {name: [(self.left.name, column)] for name, (column, _) in _POSITION.items()}
        return {**({} if self.key else position), **self.projection().lineage()}

    def result(self, **shown: Any) -> Any:
        position = [StructField(name, kind) for name, (_, kind) in _POSITION.items()]
        fields = [*([] if self.key else position), *self.projection().fields()]
        return make_table(
            self, self.left, StructType(fields), None, shown, key=self.result_key, partition_by=None
        )

    def describe(self) -> str:
        said = super().describe().removesuffix(".")
        return f"{said}; one row per record, corrected for {spoken(self.corrected_for)} of stream time."
