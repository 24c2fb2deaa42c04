"""A table's system-time history in a run: rows and stream time as known at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import IntegerType, LongType, StructField, StructType

from vt_dagster.columns import PARTITION, RECORDED_AT, TIMESTAMP
from vt_dagster.core import table_store as of_table
from vt_dagster.core.arrival_order import with_columns
from vt_dagster.core.as_of_join import HORIZON, KNOWN_AT, SINCE, UNTIL
from vt_dagster.runs.pin import Store
from vt_dagster.storage.spark_reader import Head
from vt_dagster.topology.model import VersionedTable


@dataclass
class TableSystemTimeHistory:
    """A table's log and its stream time at each commit, up to the one that a run has pinned.

    Args:
        persist: computes rows at once and persists them.
    """

    table: VersionedTable
    store: Store
    head: Head
    persist: Callable[[DataFrame], DataFrame]
    doubtful: int = field(default=0, init=False)
    """How many rows were looked up in the log, not in the view."""
    _since: int = field(default=0, init=False)
    """Smallest timestamp of these rows, epoch microseconds."""

    @property
    def description(self) -> str:
        """The number of rows looked up in the log, in words."""
        return f"{self.doubtful:,} records by the log, as to what was known"

    def persist_rows(self, rows: DataFrame) -> DataFrame:
        return self.persist(rows)

    def log(self, doubtful: DataFrame, ends: bool) -> DataFrame | None:
        found = doubtful.agg(
            F.count(F.lit(1)).alias("rows"),
            F.min(F.unix_micros(TIMESTAMP)).alias("first"),
            F.max(F.unix_micros(TIMESTAMP)).alias("last"),
            F.max(F.unix_micros(KNOWN_AT)).alias("known_at"),
        ).collect()[0]
        self.doubtful, self._since = found["rows"], found["first"]
        if not self.doubtful:
            return None
        rows = recorded_if(True, self.store.log({}, self.head))
        known = F.col(RECORDED_AT).isNull() | (F.col(RECORDED_AT) <= _at(found["known_at"]))
        rows = rows.where(known)
        # Later rows are needed too: a version expires only once its key has a later one.
        if ends or self._forgets:
            return rows
        return rows.where(F.col(TIMESTAMP) <= _at(found["last"]))

    @property
    def _forgets(self) -> bool:
        """Whether a row may be from before the table's history retention."""
        return self._since < self.table.version_rules.horizon(self.head.commit.stream_time)

    def horizons(self) -> DataFrame | None:
        if not self._forgets:
            return None
        rows = list[tuple[int, int, int | None, int]]()
        for partition, steps in self._steps().items():
            ends = [since for since, _ in steps[1:]]
            for (since, time), until in zip(steps, [*ends, None], strict=True):
                rows.append((partition, since, until, time))
        names = [PARTITION, SINCE, UNTIL, HORIZON]
        kinds = [IntegerType(), LongType(), LongType(), LongType()]
        schema = StructType([StructField(n, k) for n, k in zip(names, kinds, strict=True)])
        told = self.store.spark.createDataFrame(rows, schema)
        told = with_columns(told, {n: F.timestamp_micros(n) for n in names[1:]})
        return told.withColumn(HORIZON, of_table.horizon_of(self.table, F.col(HORIZON)))

    def _steps(self) -> Mapping[int, list[tuple[int, int]]]:
        """Per partition: (system time, new stream time) of each advance; epoch microseconds."""
        found = dict[int, list[tuple[int, int]]]()
        for commit in self.store.commits():
            if commit.batch > self.head.commit.batch:
                break
            for step in (*commit.steps, commit):
                for partition, time in step.stream_time.items():
                    steps = found.setdefault(partition, [])
                    if not steps or steps[-1][1] != time:
                        steps.append((step.recorded_at, time))
        return found


def recorded_if(wanted: bool, rows: DataFrame) -> DataFrame:
    """Returns rows of a log or view with their system time (null for rows written before it was
    stored), or without it if not wanted."""
    if not wanted:
        return rows.drop(RECORDED_AT)
    if RECORDED_AT in rows.columns:
        return rows
    return rows.withColumn(RECORDED_AT, F.lit(None).cast("timestamp"))


def _at(micros: int) -> Column:
    return F.timestamp_micros(F.lit(micros))
