"""Test a topology: pipe records in, read records out, look into the tables.

The driver runs assets through the same operators as Dagster does, on Spark, but keeps logs and
views in memory. Nothing depends on the wall clock: time advances by the records' timestamps alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.errors import PySparkException
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.pandas.types import from_arrow_schema, to_arrow_schema
from pyspark.sql.types import (
    BooleanType,
    IntegerType,
    LongType,
    StructField,
    StructType,
    TimestampType,
)

from vt_dagster.columns import (
    ARRIVAL,
    FATE,
    IS_TOMBSTONE,
    OFFSET,
    ORDER,
    PARTITION,
    TIMESTAMP,
    TURN,
    VALID_FROM,
    VALID_TO,
)
from vt_dagster.core import grace, operate, step, versioned
from vt_dagster.core.arrival import (
    Fate,
    by_partition,
    duration,
    few_records,
    small_tables,
    stream_time_of,
)
from vt_dagster.core.records import prepare
from vt_dagster.core.windows import needs_value
from vt_dagster.errors import ContractError
from vt_dagster.spark.small_runs import SETTINGS
from vt_dagster.testing.state import State, advance, see
from vt_dagster.testing.versioned_store import REFUSED, Row, VersionedStore, to_micros, to_value
from vt_dagster.topology.model import Stream, Table, VersionedTable, topological
from vt_dagster.topology.operators import Operator, StreamTableJoin, Suppress, WindowedAggregate

_SAID, _HOME = "_said", "_home"
"""What a record says beside its columns: that it is a tombstone, and its partition."""


class TopologyTestDriver:
    """Runs a topology on records that a test gives it.

    Args:
        nodes: streams and tables; their inputs come along.
        spark: the session to use; None starts a small local one. The driver works in a session of
            its own beside it (with Spark Connect: in it), tuned for a few rows a run.

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
            from vt_dagster.spark.session import FEW_QUERIES, build_session

            spark = build_session("vt_dagster test driver", master="local[2]", conf=FEW_QUERIES)
        self.nodes = {n.name: n for n in topological(nodes)}
        self.spark = spark
        self._own = _own_session(spark)
        self._states = {name: State() for name in self.nodes}
        self._views: dict[str, tuple[tuple[pa.Table, dict[int, int]], DataFrame]] = {}

    # -- records in ------------------------------------------------------------------------------

    def pipe(self, name: str, *records: Mapping[str, Any]) -> None:
        """One run with these records of one source, in order of arrival.

        Args:
            records: the source's columns by name; a column left out is null. A timestamp is a
                datetime (naive = UTC) or an integer, epoch milliseconds. ``partition`` may be
                given; else it is the key's hash. ``is_tombstone=True`` makes a record a tombstone
                whatever the source's tombstone condition says.
        """
        self.run({name: records})

    def run(self, inputs: Mapping[str, Iterable[Mapping[str, Any]]]) -> None:
        """One run with records of several sources. Tables take theirs before streams are joined.

        Where an operator refuses (a full buffer), nothing of the run has happened.
        """
        sources = sorted(n for n, node in self.nodes.items() if not node.inputs)
        unknown = sorted(set(inputs) - set(sources))
        if unknown:
            raise ContractError(
                f"expected records for the sources {sources}, got some for {unknown}; pipe into a "
                "source and read results of operators with read()"
            )
        before = {name: state.copy() for name, state in self._states.items()}
        try:
            with self._session(), few_records(), small_tables():
                for node in self.nodes.values():
                    self._run_node(node, list(inputs.get(node.name, ())))
        except BaseException:
            self._states = before
            raise

    def _run_node(self, node: Stream, records: Sequence[Mapping[str, Any]]) -> None:
        if isinstance(node.operator, StreamTableJoin):
            self._run_join(node, node.operator)
        elif node.operator is not None:
            self._run_operator(node, node.operator)
        elif records:
            self._run_source(node, records)

    def _run_source(self, node: Stream, records: Sequence[Mapping[str, Any]]) -> None:
        state = self._states[node.name]
        considered = step.consider_records(
            node, self._prepared(node, records), self._view(node), by_partition(state.stream_time)
        )
        rows = state.considered = considered.orderBy(PARTITION, ARRIVAL).toArrow()
        state.count(rows)
        see(state.stream_time, state.append(node, rows))

    def _run_operator(self, node: Stream, operator: Operator) -> None:
        state = self._states[node.name]
        sources = [self._states[n.name] for n in operator.inputs]
        ends = {n.name: s.log.num_rows for n, s in zip(operator.inputs, sources, strict=True) if s.log}
        if all(end == state.consumed.get(name, 0) for name, end in ends.items()):
            return
        taken: list[operate.Taken] = []
        logs: list[pa.Table] = []
        for one, source in zip(operator.inputs, sources, strict=True):
            consumed = state.consumed.get(one.name, 0)
            empty = to_arrow_schema(step.log_schema(one)).empty_table()
            rows = empty if source.log is None else source.log.slice(consumed)
            logs.append(rows)
            known = operate.reads_views(operator) and consumed > 0 and isinstance(one, Table)
            taken.append(operate.Taken(self._frame(rows), self._view(one) if known else None))
        before = by_partition(state.stream_time)
        times = dict(state.stream_time)
        if isinstance(operator, WindowedAggregate) and operator.group_key:
            for row in operate.with_lateness(node, taken, before).toArrow().to_pylist():
                advance(times, row[PARTITION], row["time"])
        elif operate.goes_by_time(operator):
            # Partitions and keys are the input's own: no need to ask Spark.
            windowed = isinstance(operator, WindowedAggregate)
            see(times, _counted(logs[0], operator) if windowed else logs[0])
        kept = None if state.kept is None else self._frame(state.kept)
        known = operate.Before(kept, self._view(node), before, by_partition(times))
        rows = operate.operate(node, taken, known)
        every = rows.orderBy(PARTITION, *ORDER, TURN).drop(*ORDER, TURN).toArrow()
        keeps = operate.state_after(node, self._frame(every), known)
        if keeps is not None:
            state.kept = keeps.toArrow()
        wanted = [FATE, *(c for c in step.log_columns(node) if c != OFFSET)]
        found = every.filter(pc.field(FATE) != Fate.KEPT).select(wanted)
        if isinstance(operator, Suppress):
            operator.check_buffer(state.sizes())
        state.consumed.update(ends)
        state.count(found)
        new = state.append(node, found)
        state.stream_time = times
        if not operate.goes_by_time(operator):
            see(state.stream_time, new)

    def _run_join(self, node: Stream, join: StreamTableJoin) -> None:
        state, left, right = (self._states[n.name] for n in (node, join.left, join.right))
        done = state.consumed.get(join.left.name, 0)
        if left.log is None or left.log.num_rows == done:
            return
        arrived = self._frame(left.log.slice(done)).withColumn(ARRIVAL, F.col(OFFSET))
        before = by_partition(state.stream_time)
        held = None
        if step.has_grace(join):
            earlier = self._frame(left.log.slice(0, done))
            held = _held(join, earlier, _due(join, before)).withColumn(ARRIVAL, F.col(OFFSET))
            times = stream_time_of(arrived, grace.moves_stream_time(join.left.key))
            for row in times.toArrow().to_pylist():
                advance(state.stream_time, row[PARTITION], to_micros(row["stream_time"]))
        after = by_partition(state.stream_time)
        rows = step.consider_join(join, arrived, held, before, _due(join, after)).toArrow()
        state.considered, state.consumed = rows, {join.left.name: left.log.num_rows}
        state.count(rows)
        if not {Fate.APPLIED, Fate.LATE} & set(rows[FATE].to_pylist()):
            return
        results = step.join_records(
            join,
            self._frame(rows),
            self._view_or_empty(join.right),
            by_partition(right.stream_time),
        )
        first = by_partition(state.next_offset, "long")
        state.append(node, step.produce_join(node, join, results, first).toArrow())

    # -- results out -----------------------------------------------------------------------------

    def read(self, name: str) -> list[Row]:
        """The log rows that were added since the last read, by partition within each run."""
        self._node(name)
        state = self._states[name]
        rows = [] if state.log is None else state.log.slice(state.read).to_pylist()
        state.read += len(rows)
        return rows

    def table(self, name: str) -> list[Row]:
        """The current rows of a table, by key; tombstones are not among them."""
        node = self._table(name)
        with self._session():
            view = self._view_or_empty(node)
            return _rows_of(versioned.get(view) if VALID_TO in view.columns else view, node)

    def versions(self, name: str) -> list[Row]:
        """All versions of a versioned table, tombstones included, by key and ``valid_from``."""
        node = self._versioned_table(name)
        with self._session():
            return _rows_of(self._view_or_empty(node), node)

    def store(self, name: str) -> VersionedStore:
        """A versioned table's store, with the calls of KIP-889."""
        return VersionedStore(self, self._versioned_table(name))

    def waiting(self, name: str) -> list[Row]:
        """The stream records that wait in a join's grace buffer, by timestamp."""
        join, state = self._node(name).operator, self._states[name]
        if (
            not isinstance(join, StreamTableJoin)
            or not step.has_grace(join)
            or not state.waiting.total()
        ):
            return []
        with self._session():
            consumed = self._frame(self._states[join.left.name].log)
            held = _held(join, consumed, _due(join, by_partition(state.stream_time)))
            return held.orderBy(TIMESTAMP, OFFSET).toArrow().to_pylist()

    def metrics(self, name: str, partition: int | None = None) -> dict[str, int]:
        """Counts of a node's records since the start, by fate; also those waiting now.

        Args:
            partition: count those of one partition only.

        Returns:
            ``applied``, ``late``, ``dropped``, ``quarantined`` and why (``quarantined/null_key``,
            …), ``waiting``; a fate that nothing met is left out, ``waiting`` never is. In a join,
            ``late`` records were joined at once; in a table they were refused.
        """
        self._node(name)
        state = self._states[name]
        found: Counter[str] = Counter({Fate.WAITING: 0})
        waiting = {(p, Fate.WAITING): n for p, n in state.waiting.items()}
        for (home, fate), n in [*state.counts.items(), *waiting.items()]:
            if partition is None or partition == home:
                found[fate] += n
        return dict(found)

    # -- inside ----------------------------------------------------------------------------------

    def _node(self, name: str) -> Stream:
        if name not in self.nodes:
            raise ContractError(
                f"expected one of {sorted(self.nodes)}, got {name!r}; correct the name or give the "
                "driver that stream or table"
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

    @contextmanager
    def _session(self) -> Iterator[None]:
        """Leaves the user's session the active one: creating a DataFrame activates its session."""
        try:
            yield
        finally:
            if self._own is not self.spark:
                self.spark.createDataFrame([], "nothing int")

    def _prepared(self, node: Stream, records: Sequence[Mapping[str, Any]]) -> DataFrame:
        """Records as the source of a run gives them: prepared, in order of arrival."""
        kinds = {f.name: f.dataType for f in node.schema.fields}
        for r in records:
            unknown = sorted(set(r) - {*kinds, PARTITION, TIMESTAMP, IS_TOMBSTONE})
            if unknown:
                raise ContractError(
                    f"{node.name}: expected the columns {sorted(kinds)}, got {unknown}; correct "
                    "the record or the schema"
                )
        if node.timestamp == TIMESTAMP:
            kinds[TIMESTAMP] = TimestampType()
        rows = [
            {name: to_value(r.get(name), kind) for name, kind in kinds.items()}
            | {ARRIVAL: i, _SAID: bool(r.get(IS_TOMBSTONE)), _HOME: r.get(PARTITION)}
            for i, r in enumerate(records)
        ]
        kinds |= {ARRIVAL: LongType(), _SAID: BooleanType(), _HOME: IntegerType()}
        schema = StructType([StructField(name, kind) for name, kind in kinds.items()])
        try:
            table = pa.Table.from_pylist(rows, schema=to_arrow_schema(schema))
        except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
            raise ContractError(
                f"{node.name}: expected values of the schema's types "
                f"({node.schema.simpleString()}), got: {error}; correct the record"
            ) from None
        said = {
            IS_TOMBSTONE: F.col(IS_TOMBSTONE) | F.col(_SAID),
            PARTITION: F.coalesce(_HOME, PARTITION),
        }
        return prepare(self._frame(table), node).withColumns(said).drop(_SAID, _HOME)

    def _frame(self, table: pa.Table | None) -> DataFrame:
        assert table is not None
        # Spark Connect makes no DataFrame of an empty Arrow table that comes without a Spark schema.
        return self._own.createDataFrame(table, from_arrow_schema(table.schema)).coalesce(1)

    def _view(self, node: Stream) -> DataFrame | None:
        """A table's view, made from its log; None before the first record."""
        state = self._states[node.name]
        if state.log is None or not isinstance(node, Table):
            return None
        made_of = (state.log, dict(state.stream_time))
        seen = self._views.get(node.name)
        # Logs are never changed in place; the same view serves all who read it.
        if seen is None or seen[0][0] is not made_of[0] or seen[0][1] != made_of[1]:
            rows = self._frame(state.log)
            view = step.fold(node, None, rows, by_partition(state.stream_time))
            seen = self._views[node.name] = (made_of, view)
        return seen[1]

    def _view_or_empty(self, node: Table) -> DataFrame:
        view = self._view(node)
        empty = to_arrow_schema(step.view_schema(node)).empty_table()
        return self._frame(empty) if view is None else view


def _own_session(spark: SparkSession) -> SparkSession:
    """A session beside the user's for the driver's settings; the user's own with Spark Connect."""
    try:
        own = spark.newSession()
    except PySparkException:
        return spark
    for key, value in SETTINGS.items():
        own.conf.set(key, value)
    return own


def _due(join: StreamTableJoin, stream_time: Column) -> Column:
    """Up to which timestamp a join has released its records."""
    return stream_time - duration(join.grace_period or timedelta(0))


def _held(join: StreamTableJoin, consumed: DataFrame, released: Column) -> DataFrame:
    return grace.waiting(consumed, key=join.left.key, released=released)


def _rows_of(view: DataFrame, node: Table) -> list[Row]:
    order = [*node.key, VALID_FROM if VALID_FROM in view.columns else OFFSET]
    return view.orderBy(*order).toArrow().to_pylist()


def _counted(rows: pa.Table, operator: WindowedAggregate) -> pa.Table:
    """The records that move stream time, as ``windows.moves_stream_time`` has it, without Spark."""
    for k in operator.source.key:
        rows = rows.filter(rows[k].is_valid())
    return rows.filter(~pc.field(IS_TOMBSTONE)) if needs_value(operator.window) else rows


__all__ = ["REFUSED", "TopologyTestDriver", "VersionedStore"]
