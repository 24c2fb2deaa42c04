"""Test driver of a topology: pipe records in, read records out, inspect the tables.

The driver runs assets like Dagster (``runs.run``) on Spark, but keeps logs and views in memory. It does
not use the wall clock: only the records' timestamps advance time. Logs are Arrow tables, and views are
computed from them. A versioned table has the methods of KIP-889: put, get, delete and history.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from datetime import datetime
from enum import Enum
from typing import Any, Final, Literal

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import (
    BooleanType,
    IntegerType,
    LongType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from vt_dagster.columns import (
    ARRIVAL,
    IS_TOMBSTONE,
    OFFSET,
    OLD,
    OUTCOME,
    PARTITION,
    RECORDED_AT,
    TIMESTAMP,
    VALID_FROM,
    VALID_TO,
)
from vt_dagster.core import arrival_order, versioned_table
from vt_dagster.core import table_store as of_table
from vt_dagster.core.arrival_order import Outcome, by_partition
from vt_dagster.core.log_columns import arrow_schema, log_columns, log_schema, spark_schema, view_schema
from vt_dagster.core.processor_registry import processor_of
from vt_dagster.core.source_records import (
    DELETED,
    POSITION,
    RAW,
    REASON,
    RECORD_TIME,
    SOURCE,
    partition_of_key,
    prepare,
)
from vt_dagster.core.stream_table_join import with_finality
from vt_dagster.errors import ConcurrentRunError, ContractError, counted
from vt_dagster.runs.pin import Store
from vt_dagster.runs.run import Receipt, run_once
from vt_dagster.sources.base import Uncounted
from vt_dagster.spark.session import FEW_QUERIES, build_session
from vt_dagster.spark.settings import small_run
from vt_dagster.storage.commit_log import Commit, Offsets
from vt_dagster.storage.spark_reader import Head, Snapshot
from vt_dagster.storage.view import Progress
from vt_dagster.topology.durations import as_time, epoch_micros
from vt_dagster.topology.model import Stream, Table, VersionedTable, topological
from vt_dagster.topology.schema import nullable


class TopologyTestDriver:
    """Runs a topology on the records of a test.

    Args:
        nodes: streams and tables; their inputs are included.
        spark: the session to use; None starts a small local one. While the driver computes, the
            session's settings are those for a few rows.

    Example:
        >>> driver = TopologyTestDriver(flights_with_weather)
        >>> driver.pipe("weather", {"origin": "JFK", "temp": 39.0, "timestamp": 0})
        >>> driver.pipe("flights", {"origin": "JFK", "flight": 1, "timestamp": 5})
        >>> driver.read("flights_with_weather")
    """

    def __init__(self, *nodes: Stream, spark: SparkSession | None = None) -> None:
        if not nodes:
            raise ContractError("expected streams or tables to run, got none; pass at least one")
        if spark is None:
            spark = build_session("vt_dagster test driver", master="local[2]", conf=FEW_QUERIES)
        self.nodes = {n.name: n for n in topological(nodes)}
        self.spark = spark
        self._stores = {name: MemoryStore(node, spark) for name, node in self.nodes.items()}
        self._read = dict.fromkeys(self.nodes, 0)

    # -- records in ------------------------------------------------------------------------------

    def pipe(self, name: str, *records: Mapping[str, Any]) -> None:
        """Runs the topology with these records of one source, in order of arrival.

        Args:
            records: values by column; a missing column is null. A timestamp is a datetime (naive = UTC)
                or an integer, epoch milliseconds. ``partition`` is optional; default: hash of the key.
                ``is_tombstone=True`` makes a record a tombstone, whatever the source's condition.
        """
        self.run({name: records})

    def run(self, inputs: Mapping[str, Iterable[Mapping[str, Any]]]) -> None:
        """Runs the topology with records of several sources; tables read theirs before streams join.

        If an operator fails (a full buffer) or records violate their contract, the whole run is rolled
        back.
        """
        sources = sorted(n for n, node in self.nodes.items() if not node.inputs)
        unknown = sorted(set(inputs) - set(sources))
        if unknown:
            raise ContractError(
                f"expected records for the sources {sources}, got some for {unknown}; pipe into a "
                "source, and read the results of operators with read()"
            )
        before = {name: store.saved() for name, store in self._stores.items()}
        try:
            with self._session():
                for name, node in self.nodes.items():
                    source = None
                    if node.operator is None:
                        source = Records(self._stores[name], list(inputs.get(name, ())))
                    self._count(name, run_once(node, lambda node: self._stores[node.name], source))
        except BaseException:
            for name, saved in before.items():
                self._stores[name].restore(saved)
            raise

    def _count(self, name: str, receipt: Receipt) -> None:
        for partition, some in receipt.outcomes.items():
            carried = some.get(Outcome.CARRIED, 0)
            counts = {**some, Outcome.APPLIED: some.get(Outcome.APPLIED, 0) - carried}
            for outcome in (
                *arrival_order.REFUSED,
                Outcome.APPLIED,
                Outcome.CARRIED,
                Outcome.DROPPED,
                Outcome.QUARANTINED,
            ):
                if counts.get(outcome):
                    self._stores[name].outcomes[partition, outcome] += counts[outcome]

    # -- results out -----------------------------------------------------------------------------

    def read(self, name: str) -> list[Row]:
        """Returns the log rows added since the last read, by partition within each run."""
        self._node(name)
        rows = self._stores[name].rows.slice(self._read[name]).to_pylist()
        self._read[name] += len(rows)
        return rows

    def table(self, name: str) -> list[Row]:
        """Returns the current rows of a table by key, without tombstones; those of a corrected join
        have ``is_final``."""
        node = self._table(name)
        with self._session():
            view = of_table.current(node, self._stores[name].view())
            at = self._stores[name].snapshot()
            watermarks = {} if at.head is None else at.head.commit.watermarks
            rows = of_table.rows_now(node, view, at.stream_time)
            return _rows_of(with_finality(rows, watermarks), node)

    def versions(self, name: str) -> list[Row]:
        """Returns all versions of a versioned table, with tombstones, by key and ``valid_from``."""
        node = self._versioned_table(name)
        with self._session():
            return _rows_of(of_table.as_read(node, self._stores[name].view()), node)

    def store(self, name: str) -> VersionedStore:
        """Returns the store of a versioned table, with the methods of KIP-889."""
        node = self._versioned_table(name)
        return VersionedStore(node, self._stores[name], self.pipe, self._session)

    def waiting(self, name: str) -> list[Row]:
        """Returns the stream records in a join's grace buffer or waiting for a match, by timestamp."""
        node, head = self._node(name), self._stores[name].head()
        if head is None or not head.commit.counts.get(Outcome.WAITING):
            return []
        stores = [self._stores[up.name] for up in processor_of(node).plan().consumed]
        with self._session():
            logs, state = [one.frame(one.rows) for one in stores], self._stores[name].state(head)
            rows = processor_of(node).waiting(logs, head.commit.emitted_up_to, state)
            return rows.orderBy(TIMESTAMP, OFFSET).toArrow().to_pylist()

    def metrics(self, name: str, partition: int | None = None) -> dict[str, int]:
        """Counts a node's records since the start by outcome, and the records waiting now.

        Args:
            partition: count one partition only.

        Returns:
            ``applied``, ``carried``, ``late``, ``lost_tie``, ``duplicate``, ``dropped``,
            ``quarantined`` and its reasons (``quarantined/null_key``, …), ``waiting``; outcomes with
            count 0 are omitted, except ``waiting``. ``late`` records of a join were joined at once;
            those of a table, or of a stream with ``unique_by``, were refused.
        """
        self._node(name)
        store = self._stores[name]
        head = store.head()
        homes = {} if head is None else head.commit.totals_by_partition
        found: Counter[str] = Counter({Outcome.WAITING: 0})
        every = [((p, Outcome.WAITING), some.get(Outcome.WAITING, 0)) for p, some in homes.items()]
        every += store.outcomes.items()
        bad = [(p, why) for p, why in store.rejected if why not in arrival_order.REFUSED]
        every += [((p, f"{Outcome.QUARANTINED}/{why}"), 1) for p, why in bad]
        for (home, outcome), n in every:
            if partition is None or partition == home:
                found[outcome] += n
        return dict(found)

    # -- inside ----------------------------------------------------------------------------------

    def _node(self, name: str) -> Stream:
        if name not in self.nodes:
            raise ContractError(
                f"expected one of {sorted(self.nodes)}, got {name!r}; correct the name, or pass that "
                "stream or table to the driver"
            )
        return self.nodes[name]

    def _table(self, name: str) -> Table:
        node = self._node(name)
        if not isinstance(node, Table):
            raise ContractError(
                f"expected a table, got {name!r}, a Stream; read its records with read()"
            )
        return node

    def _versioned_table(self, name: str) -> VersionedTable:
        node = self._table(name)
        if not isinstance(node, VersionedTable):
            raise ContractError(
                f"expected a VersionedTable, got {name!r}, a Table without history; read it with "
                "table(), or declare it as VersionedTable"
            )
        return node

    def _session(self) -> AbstractContextManager[None]:
        return small_run(self.spark)


def _rows_of(view: DataFrame, node: Table) -> list[Row]:
    order = [*node.key, VALID_FROM if VALID_FROM in view.columns else OFFSET]
    return view.orderBy(*order).toArrow().to_pylist()


__all__ = ["REFUSED", "TopologyTestDriver", "VersionedStore"]


# Memory store


_GIVEN_PARTITION = "_given_partition"


class MemoryStore(Store):
    """The store of one stream or table in memory; the counterpart of ``AssetStore`` on Delta."""

    def __init__(self, node: Stream, spark: SparkSession) -> None:
        self.node = node
        self.progress = Progress(node.name)
        self._spark = spark
        recorded = StructField(RECORDED_AT, TimestampType())
        self._log = arrow_schema(StructType([*log_schema(node), recorded])).empty_table()
        self._commits: list[tuple[Commit, int]] = []
        """Commits, each with the number of log rows after it."""
        self._state: pa.Table | None = None
        self._staged: dict[str, pa.Table] = {}
        self._views: dict[int, DataFrame] = {}
        self.held: pa.Table | None = None
        """The results of the last run, including those that the log refused."""
        self.rejected: list[tuple[int, str]] = []
        """Partition and reason of each source record that the log refused."""
        self.outcomes = Counter[tuple[int, str]]()
        """Number of records by partition and outcome."""
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
        schema = spark_schema(table.schema, ntz=True)
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
        self,
        head: Head | None = None,
        now: bool = False,
        written: DataFrame | None = None,
        most_keys: int | None = None,
    ) -> Snapshot:
        return Snapshot(head or self.head())

    def snapshot(self) -> Snapshot:
        return self.catch_up()

    def commits(self) -> list[Commit]:
        return [commit for commit, _ in self._commits]

    def attempt_of(self, batch: int) -> str | None:
        return self._commits[batch - 1][0].attempt if 0 < batch <= len(self._commits) else None

    def log(
        self, start: Offsets, head: Head, after: int | None = None, *, consumed: int = 0
    ) -> DataFrame:
        first, new = self._rows_from(start, head)
        if after is None:
            return self.frame(new)
        time = pc.scalar(as_time(after))
        earlier = self._log.slice(0, first).filter(pc.field(TIMESTAMP) > time)
        return self.frame(pa.concat_tables([earlier, new]))

    def oldest(self, start: Offsets, head: Head, consumed: int = 0) -> int | None:
        _, new = self._rows_from(start, head)
        return min(new[TIMESTAMP].cast(pa.int64()).to_pylist(), default=None)

    def _rows_from(self, start: Offsets, head: Head) -> tuple[int, pa.Table]:
        """Returns how many rows are before ``start``, and those from there to a commit."""
        ends = [0, *(end for _, end in self._commits)]
        # A consumer's start offsets are always those of a commit.
        offsets = [Offsets(), *(commit.next_offset for commit, _ in self._commits)]
        first = ends[max(i for i, one in enumerate(offsets) if one == start or i == 0)]
        return first, self._log.slice(first, ends[head.version] - first)

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
            return self.frame(arrow_schema(view_schema(self.node)).empty_table())
        return self.view_at(self.catch_up()).drop(RECORDED_AT)

    def current_at(self, at: Snapshot, keys: DataFrame | None = None) -> DataFrame:
        assert isinstance(self.node, Table)
        rows = of_table.current(self.node, self.view_at(at))
        return rows if keys is None else rows.join(keys, list(self.node.key), "left_semi")

    def current(self, keys: DataFrame | None = None) -> DataFrame | None:
        at = self.catch_up()
        return None if at.head is None else self.current_at(at, keys)

    def quarantine(self) -> DataFrame | None:
        return None if self._refused is None else self.frame(self._refused)

    def state(self, head: Head | None) -> DataFrame | None:
        return None if self._state is None else self.frame(self._state)

    def state_bytes(self, head: Head | None) -> int:
        return 0

    def consumed_files(self, head: Head | None) -> dict[str, Any]:
        return {}

    # -- writing ---------------------------------------------------------------------------------

    def planner_settings(self, small: bool, records: int = 0) -> AbstractContextManager[None]:
        return small_run(self._spark, small, records)

    def look_up_settings(self) -> AbstractContextManager[None]:
        return nullcontext()

    def persist(self, rows: DataFrame) -> DataFrame:
        if OLD in rows.columns:
            # PySpark refuses a null struct that has a field without nulls.
            old = nullable(rows.schema[OLD].dataType.jsonValue())
            rows = rows.withColumn(OLD, F.col(OLD).cast(StructType.fromJson(old)))
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

    def commit(
        self, rows: DataFrame, commit: Commit, count: int, before: Callable[[], None] | None = None
    ) -> Head:
        if commit.batch != len(self._commits) + 1:
            raise ConcurrentRunError(
                f"{self.node.name}: batch {commit.batch} was committed by another run; run again"
            )
        if before is not None:
            before()
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

    def remove_staged_before(self, previous: Head | None) -> None:
        self._staged = {}


@dataclass(frozen=True)
class Records(Uncounted):
    """A source with the records of one run of a test."""

    store: MemoryStore
    records: Sequence[Mapping[str, Any]]

    def pin(
        self, before: Commit | None, *, consumed: Mapping[str, Any] = {}, **run_config: Any
    ) -> Records:
        return self

    max_bad_share = 1.0
    max_clock_skew = None
    bytes = 0

    @property
    def empty(self) -> bool:
        return not self.records

    def consumed(self) -> None:
        """Does nothing: each instance is read by one run only."""

    def position(self, before: Commit, counts: Mapping[str, int]) -> dict[str, Any]:
        return {"inputs": {}}

    def describe(self, schema: StructType) -> list[str]:
        return [f"takes {counted(len(self.records), 'record')}"]

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
            | {_GIVEN_PARTITION: r.get(PARTITION), SOURCE: node.name}
            for i, r in enumerate(self.records)
        ]
        kinds |= {ARRIVAL: LongType(), POSITION: LongType(), DELETED: BooleanType()}
        kinds |= {_GIVEN_PARTITION: IntegerType(), SOURCE: StringType(), RAW: StringType()}
        kinds |= {REASON: StringType()}
        schema = StructType([StructField(name, kind) for name, kind in kinds.items()])
        table = _to_table(node.name, values, schema)
        home = F.coalesce(_GIVEN_PARTITION, partition_of_key(node.key, node))
        nothing = F.lit(None).cast("timestamp")
        rows = self.store.frame(table).withColumns({PARTITION: home, RECORD_TIME: nothing})
        return rows.drop(_GIVEN_PARTITION)


def to_value(value: Any, kind: Any) -> Any:
    """Converts a value for Arrow: a datetime (naive = UTC) or epoch milliseconds of a timestamp to a
    datetime; other values unchanged."""
    if isinstance(kind, TimestampType) and isinstance(value, int | datetime):
        return as_time(value * 1000 if isinstance(value, int) else epoch_micros(value))
    return value


def _to_table(name: str, rows: Sequence[Mapping[str, Any]], schema: StructType) -> pa.Table:
    """Makes an Arrow table of records or keys of a stream or table.

    Raises:
        ContractError: a value that is not of its column's type.
    """
    columns: list[pa.Array] = []
    expected = arrow_schema(schema)
    for field, kind in zip(expected, schema.fields, strict=True):
        try:
            columns.append(pa.array([row.get(field.name) for row in rows], field.type))
        except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError) as error:
            raise ContractError(
                f"{name}: expected {field.name} to be {kind.dataType.simpleString()}, got: {error}; "
                "correct the value"
            ) from None
    return pa.Table.from_arrays(columns, schema=expected)


# Versioned store


Row = dict[str, Any]

_AT = "_at"


class Refused(Enum):
    """The result of a put that the table refused."""

    REFUSED = "refused"


REFUSED: Final = Refused.REFUSED
"""A put older than the history retention; KIP-889's ``PUT_RETURN_CODE_NOT_PUT``."""


class VersionedStore:
    """The methods of KIP-889 on a versioned table of a :class:`TopologyTestDriver`.

    A key is a value, or a tuple for a composite key, without nulls. A time is a datetime (naive = UTC)
    or an integer, epoch milliseconds. The ``..._each`` methods make many calls in one run: each call
    sees the table as it was before the run, so pass distinct keys.
    """

    def __init__(
        self,
        node: VersionedTable,
        store: MemoryStore,
        pipe: Callable[..., None],
        session: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._node, self._store, self._pipe, self._session = node, store, pipe, session

    def get(self, key: Any, as_of: datetime | int | None = None) -> Row | None:
        """Returns the row of a key as of a time (inclusive) or now; None if there is none, if it was
        deleted, or if the time is older than the history retention (unless the current version was
        already valid then)."""
        return self.get_each((key, as_of))[0]

    def get_each(self, *calls: tuple[Any, datetime | int | None]) -> list[Row | None]:
        """Returns the results of many :meth:`get` calls, given as (key, as_of)."""
        node = self._node
        schema = StructType(
            [StructField(k, t) for k, t in zip(node.key, node.key_types, strict=True)]
            + [StructField(_AT, TimestampType()), StructField(ARRIVAL, LongType())]
        )
        rows = [
            {**self._key(key), _AT: to_value(as_of, TimestampType()), ARRIVAL: i}
            for i, (key, as_of) in enumerate(calls)
        ]
        table = _to_table(node.name, rows, schema)
        with self._session():
            view, calls_ = self._store.view(), self._store.frame(table)
            times = self._store.snapshot().stream_time
            now = of_table.rows_now(node, of_table.current(node, view), times)
            now = now.join(calls_.where(F.col(_AT).isNull()), list(node.key))
            dated = of_table.as_read(node, view).join(
                calls_.where(F.col(_AT).isNotNull()), list(node.key)
            )
            horizon = of_table.horizon_of(node, by_partition(times))
            then = versioned_table.get_as_of(dated, F.col(_AT), horizon)
            found = {r.pop(ARRIVAL): r for r in now.unionByName(then).toArrow().to_pylist()}
        for row in found.values():
            del row[_AT]
        return [found.get(i) for i in range(len(calls))]

    def history(self, key: Any) -> list[Row]:
        """Returns all versions of a key by ``valid_from``, with tombstones."""
        values = tuple(self._key(key).values())
        with self._session():
            view = of_table.as_read(self._node, self._store.view())
            own = versioned_table.key_range(view, key=self._node.key, lower=values, upper=values)
            return versioned_table.history(own, key=self._node.key).toArrow().to_pylist()

    def put(
        self, key: Any, value: Any, timestamp: datetime | int
    ) -> datetime | Literal[Refused.REFUSED] | None:
        """Stores a value in a run of its own.

        Args:
            value: the value columns by name; the bare value if there is only one value column;
                None = a tombstone, whatever the table's tombstone condition.

        Returns:
            the end of the value's validity (exclusive): the timestamp of the key's next version, or
            None if the value is the latest; ``REFUSED`` if the timestamp is older than the history
            retention, or the value loses a tie.
        """
        return self.put_each(self._record(key, value, timestamp))[0]

    def put_each(self, *records: Mapping[str, Any]) -> list[datetime | Literal[Refused.REFUSED] | None]:
        """Returns the results of many :meth:`put` calls, given as records for ``pipe``, in one run."""
        self._pipe(self._node.name, *records)
        assert self._store.held is not None
        outcomes = {r[ARRIVAL]: r for r in self._store.held.to_pylist()}
        versions = self._valid_to()
        answers: list[datetime | Literal[Refused.REFUSED] | None] = []
        for i in range(len(records)):
            row = outcomes[i]
            if row[OUTCOME] == Outcome.QUARANTINED:
                raise ContractError(
                    f"{self._node.name}: expected a record with a key and a timestamp, got "
                    f"{dict(records[i])} ({row[REASON]}); set both"
                )
            own = versions[tuple(_hashable(row[k]) for k in self._node.key)]
            refused = row[OUTCOME] in arrival_order.REFUSED
            begun = [begin for begin in own if begin <= row[TIMESTAMP]]
            answers.append(REFUSED if refused else own[max(begun)] if begun else None)
        return answers

    def delete(self, key: Any, timestamp: datetime | int) -> Row | None:
        """Stores a tombstone in a run of its own.

        Returns:
            the row that was valid at the timestamp; None if there was none, or if the timestamp is
            older than the history retention, and nothing is stored.
        """
        return self.delete_each(self._record(key, None, timestamp))[0]

    def delete_each(self, *records: Mapping[str, Any]) -> list[Row | None]:
        """Returns the results of many :meth:`delete` calls, as records for ``pipe``, in one run."""
        removed = self.find_each(*records)
        self.put_each(*({**r, IS_TOMBSTONE: True} for r in records))
        return removed

    def find_each(self, *records: Mapping[str, Any]) -> list[Row | None]:
        """Returns the results of :meth:`delete_each` without changing the table."""
        node, store = self._node, self._store
        with self._session():
            as_upserts = replace(node, tombstone=None)
            requests = prepare(Records(store, records).read(store.spark, as_upserts), as_upserts)
            found = versioned_table.delete(
                requests.select(*node.key, TIMESTAMP, PARTITION, ARRIVAL),
                of_table.as_read(node, store.view()),
                rules=node.version_rules,
                stream_time=by_partition(store.snapshot().stream_time),
            )
            rows = found.where("removed IS NOT NULL").select(ARRIVAL, "removed.*")
            removed = {r.pop(ARRIVAL): r for r in rows.toArrow().to_pylist()}
        return [removed.get(i) for i in range(len(records))]

    def _valid_to(self) -> Mapping[tuple[Any, ...], dict[datetime, datetime | None]]:
        """Returns ``valid_to`` by key and ``valid_from``."""
        columns = [*self._node.key, VALID_FROM, VALID_TO]
        with self._session():
            view = of_table.as_read(self._node, self._store.view()).select(*columns).toArrow()
        rows = zip(*(view[c].to_pylist() for c in columns), strict=True)
        found = defaultdict[tuple[Any, ...], dict[datetime, datetime | None]](dict)
        for *key, begin, end in rows:
            found[tuple(map(_hashable, key))][begin] = end
        return found

    def _key(self, key: Any) -> Row:
        names = self._node.key
        values = key if isinstance(key, tuple) else (key,)
        if len(values) != len(names) or any(v is None for v in values):
            raise ContractError(
                f"{self._node.name}: expected a key with a value for each of {list(names)}, got "
                f"{key!r}; a composite key is a tuple, and no part of it may be None"
            )
        kinds = self._node.key_types
        return {n: to_value(v, t) for n, v, t in zip(names, values, kinds, strict=True)}

    def _record(self, key: Any, value: Any, timestamp: datetime | int) -> Row:
        node = self._node
        if node.timestamp not in (TIMESTAMP, *node.schema.names):
            raise ContractError(
                f"{node.name}: expected a timestamp column, got the expression {node.timestamp!r}, "
                "which put() and delete() cannot fill; pipe a record instead"
            )
        record = {**self._key(key), node.timestamp: timestamp}
        names = [c for c in node.value_columns if c != node.timestamp]
        if value is None:
            return record | {IS_TOMBSTONE: True}
        if isinstance(value, Mapping) and set(value) <= set(names):
            return record | dict(value)
        if len(names) != 1:
            raise ContractError(
                f"{node.name}: expected a mapping with the value columns {names}, got {value!r}"
            )
        return record | {names[0]: value}


def _hashable(value: Any) -> Any:
    return repr(value) if isinstance(value, list | dict) else value
