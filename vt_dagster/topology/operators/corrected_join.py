"""corrected join: a stream-table join whose results follow what the table learns later."""

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
    """A stream-table join whose result is a table: one row for each stream record, joined anew when the
    table learns more about its time.

    A record or tombstone of the table holds from its timestamp to the next version's. The stream
    records of its key in that time that have been joined already are looked up again, and where the
    answer differs the row is updated: ``revision`` counts up from 0, ``cause`` names the table's record
    (``table, partition, offset``; null where the row came with its stream record).

    Late: a stream record is never too late for its row. A correction is, where the row's timestamp is
    before the stream time of its partition, as it was before the run, less ``corrected_for``; or before
    the stream time of the table record's partition, as it was on that record's arrival, less
    ``corrected_for``. Then the row stays as it is, is counted once (``corrections_too_late``, whatever
    the record says) and listed in the asset's quarantine (``too_late``): its record's place as
    ``source``, ``partition`` and ``position``, and ``cause``. Records of the table that came before
    still correct it. So nothing but how often a row was corrected depends on how what arrives is cut
    into runs. Null key: as in ``StreamTableJoin``; a record without a value in a column of ``key``
    is dropped and counted. Tombstone: of the stream, dropped and counted; of the table, a row loses its
    match (left) or is deleted (inner).

    Args:
        corrected_for: how long rows are corrected, in stream time; at most the table's history
            retention. It may be changed from run to run; what was final stays so.
        key: columns of the stream that name a record; another record with the key of a row is refused.
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
                f"{self.name}: expected columns of {self.left.name!r} as the key of a corrected join, "
                f"{self.left.schema.names}, got {unknown}; or leave key out: then a row's key is its "
                "record's partition and offset"
            )
        super().__post_init__()
        need_each_record(self.name, "corrected_for", self.right)
        self._check_promise()
        self._check_columns()

    @property
    def rescan_span(self) -> dict[str, timedelta]:
        # A late record of the table is bounded by its later ones, and lies so far behind at most.
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
                "versioned, and cannot say what was true at a record's time: declare it as "
                "VersionedTable with a history_retention, or leave corrected_for out"
            )
        for partition, (promised, retention) in pairs(self.corrected_for, self.right.retention):
            if promised > retention:
                raise TopologyError(
                    f"{self.name}: corrected_for {promised}{partition} is longer than the history "
                    f"retention {retention} of {self.right.name!r}; rows would be joined anew with "
                    "versions that are gone: shorten one or lengthen the other"
                )

    def _check_columns(self) -> None:
        chosen = self.projection()
        own = {REVISION, CAUSE, *_POSITION}
        taken = sorted(name for name, _ in chosen.columns if name.lower() in own)
        if taken:
            raise TopologyError(
                f"{self.name}: expected other names than {taken}, which a corrected join gives its own "
                f"columns; select them under another name, for example 'left.{taken[0]} as "
                f"own_{taken[0]}'"
            )
        if VALID_TO in chosen.right_columns():
            raise TopologyError(
                f"{self.name}: right.valid_to changes with every later version, so that each would "
                "correct the rows before it; leave it out of select, right.valid_from tells the version"
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
        """What names a row."""
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
        return f"{said}; a row of each, corrected for {spoken(self.corrected_for)} of stream time."
