"""Test driver of a topology: pipe records in, read records out, inspect the tables.

The driver runs assets like Dagster (``runs.run``) on Spark, but keeps logs and views in memory. It does
not use the wall clock: only the records' timestamps advance time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

from vt_dagster.columns import OFFSET, TIMESTAMP, VALID_FROM
from vt_dagster.core import arrival_order
from vt_dagster.core import table_store as of_table
from vt_dagster.core.arrival_order import Outcome
from vt_dagster.core.processor_registry import processor_of
from vt_dagster.core.stream_table_join import with_finality
from vt_dagster.errors import ContractError
from vt_dagster.runs.run import Receipt, run_once
from vt_dagster.spark.session import FEW_QUERIES, build_session
from vt_dagster.spark.settings import SETTINGS
from vt_dagster.testing.memory_store import REFUSED, MemoryStore, Records, Row, VersionedStore
from vt_dagster.topology.model import Stream, Table, VersionedTable, topological


class TopologyTestDriver:
    """Runs a topology on the records of a test.

    Args:
        nodes: streams and tables; their inputs are included.
        spark: the session to use; None starts a small local one. The driver uses a new session of the
            same application (with Spark Connect: this session), tuned for a few rows per run.

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
        self._own = _own_session(spark)
        self._stores = {name: MemoryStore(node, self._own) for name, node in self.nodes.items()}
        self._fates = {name: Counter[tuple[int, str]]() for name in self.nodes}
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
        outcomes = {name: some.copy() for name, some in self._fates.items()}
        try:
            with self._session():
                for name, node in self.nodes.items():
                    source = None
                    if node.operator is None:
                        source = Records(self._stores[name], list(inputs.get(name, ())))
                    self._count(name, run_once(node, self._store_of, source))
        except BaseException:
            for name, saved in before.items():
                self._stores[name].restore(saved)
            self._fates = outcomes
            raise

    def _store_of(self, node: Stream) -> MemoryStore:
        return self._stores[node.name]

    def _count(self, name: str, receipt: Receipt) -> None:
        for partition, some in receipt.outcomes.items():
            carried = some.get(Outcome.CARRIED, 0)
            told = {**some, Outcome.APPLIED: some.get(Outcome.APPLIED, 0) - carried}
            for outcome in (
                *arrival_order.REFUSED,
                Outcome.APPLIED,
                Outcome.CARRIED,
                Outcome.DROPPED,
                Outcome.QUARANTINED,
            ):
                if told.get(outcome):
                    self._fates[name][partition, outcome] += told[outcome]

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
            head = self._stores[name].head()
            watermarks = {} if head is None else head.commit.watermarks
            times = {} if head is None else head.commit.stream_time
            return _rows_of(with_finality(of_table.rows_now(node, view, times), watermarks), node)

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
        every += self._fates[name].items()
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

    @contextmanager
    def _session(self) -> Iterator[None]:
        """Restores the user's session as the active one: creating a DataFrame activates its session."""
        try:
            yield
        finally:
            if self._own is not self.spark:
                self.spark.createDataFrame([], "nothing int")


def _own_session(spark: SparkSession) -> SparkSession:
    """Returns a new session for the driver's settings; the user's session with Spark Connect."""
    try:
        own = spark.newSession()
    except PySparkException:
        return spark
    for key, value in SETTINGS.items():
        own.conf.set(key, value)
    return own


def _rows_of(view: DataFrame, node: Table) -> list[Row]:
    order = [*node.key, VALID_FROM if VALID_FROM in view.columns else OFFSET]
    return view.orderBy(*order).toArrow().to_pylist()


__all__ = ["REFUSED", "TopologyTestDriver", "VersionedStore"]
