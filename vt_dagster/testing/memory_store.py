"""The store of the test driver: logs in memory as Arrow tables, and views computed from them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.pandas.types import from_arrow_schema, to_arrow_schema
from pyspark.sql.types import (
    BooleanType,
    IntegerType,
    LongType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from vt_dagster.columns import ARRIVAL, IS_TOMBSTONE, OFFSET, PARTITION, RECORDED_AT, TIMESTAMP
from vt_dagster.core import table_store as of_table
from vt_dagster.core.arrival_order import by_partition
from vt_dagster.core.log_columns import log_columns, log_schema, view_schema
from vt_dagster.core.source_records import DELETED, POSITION, RAW, REASON, RECORD_TIME, SOURCE, home_of
from vt_dagster.errors import ConcurrentRunError, ContractError
from vt_dagster.runs.pin import Store
from vt_dagster.sources.base import Uncounted
from vt_dagster.storage.commit_log import Commit, Offsets
from vt_dagster.storage.spark_reader import Head, Snapshot
from vt_dagster.storage.view import Progress
from vt_dagster.topology.model import Stream, Table

_SAID = "_said_partition"
_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)


class MemoryStore(Store):
    """The store of one stream or table in memory; the counterpart of ``AssetStore`` on Delta."""

    def __init__(self, node: Stream, spark: SparkSession) -> None:
        self.node = node
        self.progress = Progress(node.name)
        self._spark = spark
        recorded = StructField(RECORDED_AT, TimestampType())
        self._log = to_arrow_schema(StructType([*log_schema(node), recorded])).empty_table()
        self._commits: list[tuple[Commit, int]] = []
        """Commits, each with the number of log rows after it."""
        self._state: pa.Table | None = None
        self._staged: dict[str, pa.Table] = {}
        self._views: dict[int, DataFrame] = {}
        self.held: pa.Table | None = None
        """The results of the last run, including those that the log refused."""
        self.rejected: list[tuple[int, str]] = []
        """Partition and reason of each source record that the log refused."""
        self._refused: pa.Table | None = None

    def saved(self) -> dict[str, Any]:
        """Returns a copy of its state for ``restore``; Arrow tables are immutable and not copied."""
        copied = {n: v.copy() for n, v in vars(self).items() if isinstance(v, list | dict)}
        return {**vars(self), **copied}

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Restores a saved state."""
        vars(self).update(saved)

    @property
    def spark(self) -> SparkSession:
        return self._spark

    def frame(self, table: pa.Table) -> DataFrame:
        """Returns an Arrow table as a DataFrame with one partition."""
        # Spark Connect cannot make a DataFrame of an empty Arrow table without a Spark schema.
        schema = from_arrow_schema(table.schema)
        # combine_chunks: Spark loses the rows after an empty chunk.
        return self._spark.createDataFrame(table.combine_chunks(), schema).coalesce(1)

    # -- reading ---------------------------------------------------------------------------------

    @property
    def rows(self) -> pa.Table:
        """The whole log without ``recorded_at``, which depends on the clock."""
        return self._log.drop_columns([RECORDED_AT])

    def head(self) -> Head | None:
        """Returns the last commit; None before the first."""
        return Head(len(self._commits), self._commits[-1][0]) if self._commits else None

    def catch_up(
        self, head: Head | None = None, now: bool = False, written: DataFrame | None = None
    ) -> Snapshot:
        return Snapshot(head or self.head())

    def snapshot(self) -> Snapshot:
        return self.catch_up()

    def commits(self) -> list[Commit]:
        return [commit for commit, _ in self._commits]

    def attempt_of(self, batch: int) -> str | None:
        return self._commits[batch - 1][0].attempt if 0 < batch <= len(self._commits) else None

    def log(self, start: Offsets, head: Head, after: int | None = None) -> DataFrame:
        ends = [0, *(end for _, end in self._commits)]
        # A consumer's start offsets are always those of a commit.
        offsets = [Offsets(), *(commit.next_offset for commit, _ in self._commits)]
        first = max(i for i, one in enumerate(offsets) if one == start or i == 0)
        new = self._log.slice(ends[first], ends[head.version] - ends[first])
        if after is None:
            return self.frame(new)
        time = pc.scalar(_EPOCH + timedelta(microseconds=after))
        earlier = self._log.slice(0, ends[first]).filter(pc.field(TIMESTAMP) > time)
        return self.frame(pa.concat_tables([earlier, new]))

    def view_at(self, at: Snapshot, since: int | None = None) -> DataFrame:
        node, head = self.node, at.head
        assert isinstance(node, Table)
        assert head is not None
        if head.version not in self._views:
            rows = self.log({}, head)
            # Cached per version: all readers share one DataFrame.
            view = of_table.fold(node, None, rows, by_partition(head.commit.stream_time))
            self._views = {head.version: view}
        return self._views[head.version]

    def view(self) -> DataFrame:
        """Returns the current view; empty before the first commit."""
        assert isinstance(self.node, Table)
        if self.head() is None:
            return self.frame(to_arrow_schema(view_schema(self.node)).empty_table())
        return self.view_at(self.catch_up()).drop(RECORDED_AT)

    def current_at(self, at: Snapshot) -> DataFrame:
        assert isinstance(self.node, Table)
        return of_table.current(self.node, self.view_at(at))

    def current(self) -> DataFrame | None:
        at = self.catch_up()
        return None if at.head is None else self.current_at(at)

    def quarantine(self) -> DataFrame | None:
        return None if self._refused is None else self.frame(self._refused)

    def state(self, head: Head | None) -> DataFrame | None:
        return None if self._state is None else self.frame(self._state)

    def state_bytes(self, head: Head | None) -> int:
        return 0

    def consumed_files(self, head: Head | None) -> dict[str, Any]:
        return {}

    # -- writing ---------------------------------------------------------------------------------

    def planner_settings(self, small: bool) -> AbstractContextManager[None]:
        return nullcontext()  # the driver's session always has them

    def persist(self, rows: DataFrame) -> DataFrame:
        self.held = rows.toArrow()
        return self.frame(self.held)

    def unpersist(self, rows: DataFrame) -> None:
        pass

    def new_attempt(self) -> str:
        return f"{self.node.name}-{len(self._commits)}"

    def stage_rejected(self, attempt: str, rows: DataFrame) -> None:
        self._staged["rejected"] = rows.toArrow()

    def stage_state(self, attempt: str, rows: DataFrame) -> None:
        self._staged["state"] = rows.toArrow()

    def stage_files(self, attempt: str, files: dict[str, Any]) -> None:
        raise AssertionError("the driver reads no files")

    def commit(self, rows: DataFrame, commit: Commit, count: int) -> Head:
        if commit.batch != len(self._commits) + 1:
            raise ConcurrentRunError(f"{self.node.name}: batch {commit.batch} is there; run again")
        new = rows.toArrow().sort_by([(PARTITION, "ascending"), (OFFSET, "ascending")])
        new = new.select([*log_columns(self.node), RECORDED_AT])
        if new.num_rows:
            self._log = pa.concat_tables([self._log, new], promote_options="default")
            if self._log.num_rows == new.num_rows:
                self._log = new
        self._commits.append((commit, self._log.num_rows))
        self._state = self._staged.get("state") if commit.state else None
        if commit.rejected:
            new = self._staged["rejected"]
            every = [new] if self._refused is None else [self._refused, new]
            self._refused = pa.concat_tables(every, promote_options="default")
            if self.node.operator is None:
                columns = new.select([PARTITION, "reason"]).to_pydict()
                self.rejected += zip(*columns.values(), strict=True)
        return Head(len(self._commits), commit)

    def forget(self, previous: Head | None) -> None:
        self._staged = {}


@dataclass(frozen=True)
class Records(Uncounted):
    """A source with the records of one run of a test."""

    store: MemoryStore
    records: Sequence[Mapping[str, Any]]

    def pin(self, before: Commit | None, *, consumed: Mapping[str, Any] = {}, **asked: Any) -> Records:
        return self

    @property
    def max_bad_share(self) -> float:
        return 1.0

    @property
    def max_clock_skew(self) -> timedelta | None:
        return None

    @property
    def bytes(self) -> int:
        return 0

    @property
    def empty(self) -> bool:
        return not self.records

    def consumed(self) -> None:
        """Does nothing: each instance is read by one run only."""

    def position(self, before: Commit, counts: Mapping[str, int]) -> dict[str, Any]:
        return {"inputs": {}}

    def describe(self, schema: StructType) -> list[str]:
        return [f"takes {len(self.records)} record(s)"]

    def explain(self, error: Exception) -> None:
        return None

    def read(self, spark: SparkSession, node: Stream) -> DataFrame:
        kinds = {f.name: f.dataType for f in node.schema.fields}
        for r in self.records:
            unknown = sorted(set(r) - {*kinds, PARTITION, TIMESTAMP, IS_TOMBSTONE})
            if unknown:
                raise ContractError(
                    f"{node.name}: expected the columns {sorted(kinds)}, got {unknown}; correct "
                    "the record or the schema"
                )
        if node.timestamp == TIMESTAMP:
            kinds[TIMESTAMP] = TimestampType()
        values = [
            {name: to_value(r.get(name), kind) for name, kind in kinds.items()}
            | {ARRIVAL: i, POSITION: i, DELETED: bool(r.get(IS_TOMBSTONE))}
            | {_SAID: r.get(PARTITION), SOURCE: node.name}
            for i, r in enumerate(self.records)
        ]
        kinds |= {ARRIVAL: LongType(), POSITION: LongType(), DELETED: BooleanType()}
        kinds |= {_SAID: IntegerType(), SOURCE: StringType(), RAW: StringType()}
        kinds |= {REASON: StringType()}
        schema = StructType([StructField(name, kind) for name, kind in kinds.items()])
        try:
            table = pa.Table.from_pylist(values, schema=to_arrow_schema(schema))
        except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
            raise ContractError(
                f"{node.name}: expected values of the schema's types "
                f"({node.schema.simpleString()}), got: {error}; correct the record"
            ) from None
        home = F.coalesce(_SAID, home_of(node.key, node))
        nothing = F.lit(None).cast("timestamp")
        rows = self.store.frame(table).withColumns({PARTITION: home, RECORD_TIME: nothing})
        return rows.drop(_SAID)


def to_value(value: Any, kind: Any) -> Any:
    """Converts a value for Arrow: times to datetimes, other values unchanged."""
    if isinstance(kind, TimestampType) and isinstance(value, int | datetime):
        return _EPOCH + timedelta(microseconds=to_micros(value))
    return value


def to_micros(moment: datetime | int) -> int:
    """Converts a datetime (naive = UTC) or epoch milliseconds to epoch microseconds."""
    if isinstance(moment, int):
        return moment * 1000
    aware = moment if moment.tzinfo else moment.replace(tzinfo=timezone.utc)
    return (aware - _EPOCH) // timedelta(microseconds=1)
