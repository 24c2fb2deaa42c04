"""DataFrames as sources: the result of a user's function, or an upstream asset.

A *delivery* is the result of one run of a function, one partition, or one materialization of an
upstream asset. Each is consumed once; the consumed deliveries are stored beside the commit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import StructType

from vt_dagster.columns import ARRIVAL
from vt_dagster.core.arrival_order import CHUNK
from vt_dagster.core.source_records import POSITION, RAW, REASON, SOURCE, time_of
from vt_dagster.errors import SourceError
from vt_dagster.sources.base import Uncounted, require_limits
from vt_dagster.sources.frame_conversion import Frame, frame_of
from vt_dagster.sources.local_frames import ROW
from vt_dagster.storage.commit_log import Commit, Ranges
from vt_dagster.topology.model import Stream

_DELIVERIES = "deliveries"
"""Key of the deliveries in the consumed state of a source."""
_DELIVERY = "_delivery"
_MOST_RUNS = 1_000
"""Number of runs kept in the consumed state: a retry comes soon after its run."""
_NAMED = 20
"""Number of deliveries of a run that its commit names."""


@dataclass(frozen=True)
class Delivery:
    """A DataFrame that is consumed once.

    Args:
        name: a partition, a run, or ``""`` for the whole of an upstream asset.
        version: the version under this name; a consumed version is not loaded again. None = the digest
            of its content.
        load: returns the DataFrame.
    """

    name: str
    version: str | None
    load: Callable[[], Any]


@dataclass(frozen=True, kw_only=True)
class FrameSource:
    """The base of sources of DataFrames. A run of the asset provides the deliveries.

    Args:
        partitions_def: the Dagster partitions definition of the asset; each run consumes the delivery
            of its partition.
        max_bad_share: a run with a larger share of quarantined records fails before its commit.
        max_clock_skew: how far ahead of this machine's clock a timestamp may be.
    """

    partitions_def: Any = None
    max_bad_share: float = 0.1
    max_clock_skew: timedelta = timedelta(days=1)

    gives_timestamp = False

    def __post_init__(self) -> None:
        require_limits(self.max_bad_share, self.max_clock_skew)

    def check(self, name: str, key: Sequence[str], schema: StructType) -> None:
        """Checks nothing: missing columns of a DataFrame show when it is loaded."""

    @property
    def input(self) -> str:
        """The name of the source in a commit's ``inputs``; its offsets count rows."""
        raise NotImplementedError

    def describe(self) -> str:
        """Returns a description of the source, for metadata and messages."""
        raise NotImplementedError

    def pin(self, before: Commit | None, **asked: Any) -> PinnedFrames:
        """Fails: only a run of the asset has the deliveries.

        Raises:
            SourceError: always.
        """
        raise SourceError(
            f"expected a run of the asset in Dagster, which provides {self.describe()}; got none. To "
            "rebuild its table, declare it under another name and materialize that asset"
        )


@dataclass(frozen=True, kw_only=True)
class AssetSource(FrameSource):
    """An upstream asset of this Dagster deployment as a source: each materialization is consumed once.

    The upstream asset is an ordinary input: its own IO manager loads the value, a DataFrame of Spark,
    pandas, Polars, Arrow or DuckDB. The commit records the consumed materialization; a run without a
    newer one commits nothing. All rows of a new materialization are new records, even rows that the
    previous one had. A materialization that is replaced before a run consumes it is skipped. An asset
    of another code location needs a ``dagster.AssetSpec`` in this one.

    If the upstream asset has partitions:

    - with the same ``partitions_def`` here, a run consumes the materialization of its partition;
    - without, a run consumes each partition materialized since it was last consumed, in order of
      partition key. Dagster then loads all partitions each time.

    Args:
        key: the key of the upstream asset: ``"rates"``, ``"shop/rates"`` or its parts.
        as_type: the class to load, like a type annotation of an input; None = the IO manager's choice.
        input_manager_key: the IO manager that loads the value; None = the one that stored it.
        metadata: the metadata of the input, for the IO manager.
        partition_mapping: the mapping of upstream partitions to a run; None = Dagster's default.
    """

    key: str | Sequence[str] = field(kw_only=False)
    as_type: Any = None
    input_manager_key: str | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict[str, Any], hash=False)
    partition_mapping: Any = None

    @property
    def path(self) -> tuple[str, ...]:
        """The parts of the upstream asset's key, split at ``/``."""
        return tuple(self.key.split("/") if isinstance(self.key, str) else self.key)

    @property
    def input(self) -> str:
        return f"asset {'/'.join(self.path)}"

    def describe(self) -> str:
        return f"materializations of the asset {'/'.join(self.path)}"


@dataclass(frozen=True, kw_only=True)
class FunctionSource(FrameSource):
    """The result of a decorated function as a source; see ``versioned_table``.

    Args:
        function: the user's function.
        ins: Dagster's ``AssetIn`` by parameter name, where one is needed.
        deps: further upstream assets.
        required_resource_keys: the resources that the function reads from its context.
    """

    function: Callable[..., Any]
    ins: Mapping[str, Any] = field(default_factory=dict[str, Any], hash=False)
    deps: Sequence[Any] = ()
    required_resource_keys: frozenset[str] = frozenset()

    @property
    def input(self) -> str:
        return "function"

    def describe(self) -> str:
        where = getattr(self.function, "__module__", "")
        return f"what {where}.{getattr(self.function, '__qualname__', self.function)} returns"


@dataclass(frozen=True)
class Given:
    """The deliveries of one run, as a source to pin.

    Args:
        node: the stream or table.
        source: the declared source.
        deliveries: the candidates of this run, in order.
        again: whether a consumed partition with changed rows is consumed again, see :meth:`pin`.
    """

    node: Stream
    source: FrameSource
    deliveries: Sequence[Delivery]
    again: bool = False
    _loaded: dict[str, Frame | None] = field(default_factory=dict[str, "Frame | None"], init=False)

    def pin(self, before: Commit | None, *, consumed: Mapping[str, Any] = {}) -> PinnedFrames:
        """Loads and pins the unconsumed deliveries. Uses Spark only for Spark's DataFrames.

        Raises:
            SourceError: the rows of a consumed partition have changed, and ``again`` is not set.
            ContractError: see :func:`frame_of`.
        """
        memory: Mapping[str, Any] = consumed.get(_DELIVERIES, {})
        new: list[tuple[Delivery, Frame, str]] = []
        for one in self.deliveries:
            known = memory.get(one.name)
            if known is not None and known[0] == one.version:
                continue
            found = self._frame(one)
            if found is None:
                continue
            version = one.version
            if version is None:
                version = found.digest()
                if known is not None and known[0] == version:
                    continue
                if known is not None and not self.again:
                    raise self._changed(one.name, known, found)
            new.append((one, found, version))
        first = 0 if before is None else before.inputs.get(self.source.input, {}).get(0, 0)
        return PinnedFrames(self.source, new, consumed, first)

    def _frame(self, one: Delivery) -> Frame | None:
        if one.name not in self._loaded:
            self._loaded[one.name] = frame_of(self.node, one.load())
        return self._loaded[one.name]

    def _changed(self, name: str, known: Sequence[Any], found: Frame) -> SourceError:
        return SourceError(
            f"{self.node.name}: expected the rows of partition {name} as consumed by an earlier run "
            f"({known[1]} rows), got other rows ({found.count}); nothing was committed. A partition is "
            "consumed once. To add these rows as new records (a row of the same key and time replaces "
            "the old one, others are kept), run with the tag vt_dagster/take_again = true"
        )

    def release(self) -> None:
        """Releases the loaded DataFrames."""
        for found in self._loaded.values():
            if found is not None:
                found.release()


@dataclass(frozen=True)
class PinnedFrames(Uncounted):
    """The deliveries that a run consumes.

    Args:
        source: the declared source.
        new: each delivery with its rows and the version to store.
        before: the consumed state of earlier runs.
        first: the number of rows consumed by earlier runs.
    """

    source: FrameSource
    new: Sequence[tuple[Delivery, Frame, str]]
    before: Mapping[str, Any]
    first: int

    @property
    def max_bad_share(self) -> float:
        return self.source.max_bad_share

    @property
    def max_clock_skew(self) -> timedelta:
        return self.source.max_clock_skew

    @property
    def rows(self) -> int:
        """The number of rows of all deliveries."""
        return sum(found.count for _, found, _ in self.new)

    @property
    def taken(self) -> Ranges:
        return {self.source.input: {0: (self.first, self.first + self.rows)}} if self.new else {}

    @property
    def bytes(self) -> None:
        return None

    @property
    def empty(self) -> bool:
        return not self.new

    def read(self, spark: SparkSession, node: Stream) -> DataFrame:
        """Returns the rows of all deliveries in order; within a delivery by timestamp, then by row
        number of a local DataFrame, or by key and content of a Spark DataFrame, which has no order.

        Plan: up to ``CHUNK`` rows are sorted by one task; more by a range shuffle.
        """
        parts = [
            found.frame(spark).withColumns({_DELIVERY: F.lit(place), SOURCE: F.lit(one.name)})
            for place, (one, found, _) in enumerate(self.new)
        ]
        rows = parts[0]
        for part in parts[1:]:
            rows = rows.unionByName(part)
        content = F.to_json(F.struct(*node.schema.names))
        of_spark = [F.when(F.col(ROW).isNull(), F.col(f"`{c}`")) for c in node.key]
        of_spark.append(F.when(F.col(ROW).isNull(), content))
        order = [F.col(_DELIVERY), time_of(node, rows), F.col(ROW), *of_spark]
        few = self.rows <= CHUNK
        rows = rows.coalesce(1).sortWithinPartitions(*order) if few else rows.orderBy(*order)
        return rows.select(
            *node.schema.names,
            F.monotonically_increasing_id().alias(ARRIVAL),
            SOURCE,
            F.coalesce(F.col(ROW), F.monotonically_increasing_id() + 1).alias(POSITION),
            F.coalesce(RAW, content).alias(RAW),
            REASON,
        )

    def consumed(self) -> dict[str, Any]:
        """Returns the consumed state after the run: version and number of rows by delivery."""
        memory = dict(self.before.get(_DELIVERIES, {}))
        for one, found, version in self.new:
            memory[one.name] = [version, found.count]
        runs = [name for name, (version, _) in memory.items() if name and not version]
        for name in runs[:-_MOST_RUNS]:
            del memory[name]
        return {**self.before, _DELIVERIES: memory}

    def position(self, before: Commit, counts: Mapping[str, int]) -> dict[str, Any]:
        ends = {n: {p: end for p, (_, end) in some.items()} for n, some in self.taken.items()}
        named = {one.name: version for one, _, version in self.new[:_NAMED]}
        return {"taken": self.taken, "inputs": ends, "files": True, "deliveries": named}

    def describe(self, schema: StructType) -> list[str]:
        lines = [
            f"takes {found.count:,} row(s) of {self.source.describe()}"
            f"{f': {one.name}' if one.name else ''}"
            for one, found, _ in self.new
        ]
        extra = sorted({column for _, found, _ in self.new for column in found.extra})
        if extra:
            lines.append(f"!left out columns that the schema lacks: {', '.join(extra)}")
        return lines

    def explain(self, error: Exception) -> None:
        return None
