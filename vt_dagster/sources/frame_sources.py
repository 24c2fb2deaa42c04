"""DataFrames as sources: what a function of the user returns, or an upstream asset.

They come as *deliveries*: what one run of a function gives, one partition, or one materialization of an
upstream asset. Each is taken once; which ones were, lies beside the commit that took them.
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
"""What the memory of a source has them under."""
_DELIVERY = "_delivery"
_MOST_RUNS = 1_000
"""So many runs are remembered: a retry comes soon."""
_NAMED = 20
"""So many deliveries of one run its commit names."""


@dataclass(frozen=True)
class Delivery:
    """What can be taken once.

    Args:
        name: a partition, a run, or ``""`` for the whole of an upstream asset.
        version: which of its name it is: one with the version that was taken is not loaded again.
            None = what is in it tells.
        load: gives its DataFrame.
    """

    name: str
    version: str | None
    load: Callable[[], Any]


@dataclass(frozen=True, kw_only=True)
class FrameSource:
    """What sources of DataFrames have in common. A run of the asset gives it its deliveries.

    Args:
        partitions_def: a Dagster partitions definition, which the asset then has; each run takes what
            is of its partition.
        max_bad_share: a run with a larger share of quarantined records fails before its commit.
        max_clock_skew: how far in the future a timestamp may lie, by this machine's clock.
    """

    partitions_def: Any = None
    max_bad_share: float = 0.1
    max_clock_skew: timedelta = timedelta(days=1)

    gives_timestamp = False

    def __post_init__(self) -> None:
        require_limits(self.max_bad_share, self.max_clock_skew)

    def check(self, name: str, key: Sequence[str], schema: StructType) -> None:
        """A DataFrame can have any column; what it lacks shows when it is there."""

    @property
    def input(self) -> str:
        """Its name among a commit's inputs; its offsets count rows."""
        raise NotImplementedError

    def describe(self) -> str:
        """What is taken, for descriptions and messages."""
        raise NotImplementedError

    def pin(self, before: Commit | None, **asked: Any) -> PinnedFrames:
        """Nobody but a run of its asset has what it gives.

        Raises:
            SourceError: always.
        """
        raise SourceError(
            f"expected a run of the asset in Dagster, which gives it {self.describe()}; got none. To "
            "make its table anew, declare it under another name and materialize that"
        )


@dataclass(frozen=True, kw_only=True)
class AssetSource(FrameSource):
    """What an upstream asset of this Dagster deployment returns or stores: each materialization once.

    It is an ordinary input: its value is loaded by the upstream asset's own IO manager, and may be a
    DataFrame of Spark, pandas, Polars, Arrow or DuckDB. The commit says which materialization was
    taken; a run that finds the same one commits nothing. What a new materialization holds are new
    records, also those that the one before held. One that was replaced before any run took it is
    never seen. An asset of another code location needs a ``dagster.AssetSpec`` in this one.

    Where the upstream asset has partitions:

    - with the same ``partitions_def`` here, a run takes the materialization of its partition;
    - without, a run takes each partition that was materialized since it was last taken, in the order of
      their keys. Dagster then loads all of them each time.

    Args:
        key: of the upstream asset: ``"rates"``, ``"shop/rates"`` or its parts.
        as_type: the class that its IO manager is asked for, as an annotation would; None = it chooses.
        input_manager_key: of the IO manager that loads it; None = the one that it was stored by.
        metadata: of the input, for that IO manager.
        partition_mapping: which of its partitions belong to a run; None = as Dagster chooses.
    """

    key: str | Sequence[str] = field(kw_only=False)
    as_type: Any = None
    input_manager_key: str | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict[str, Any], hash=False)
    partition_mapping: Any = None

    @property
    def path(self) -> tuple[str, ...]:
        """The parts of the upstream asset's key."""
        return tuple(self.key.split("/") if isinstance(self.key, str) else self.key)

    @property
    def input(self) -> str:
        return f"asset {'/'.join(self.path)}"

    def describe(self) -> str:
        return f"materializations of the asset {'/'.join(self.path)}"


@dataclass(frozen=True, kw_only=True)
class FunctionSource(FrameSource):
    """What a decorated function returns: see ``versioned_table``.

    Args:
        function: the user's.
        ins: Dagster's ``AssetIn`` of its parameters, by name, where one is needed.
        deps: other assets that it comes after.
        required_resource_keys: of the resources that it asks its context for.
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
    """The deliveries of one run: the source that the run pins.

    Args:
        node: the stream or table.
        source: what it declares.
        deliveries: those that this run may take, in order.
        again: a partition that was taken with other rows is taken again, see :meth:`pin`.
    """

    node: Stream
    source: FrameSource
    deliveries: Sequence[Delivery]
    again: bool = False
    _loaded: dict[str, Frame | None] = field(default_factory=dict[str, "Frame | None"], init=False)

    def pin(self, before: Commit | None, *, consumed: Mapping[str, Any] = {}) -> PinnedFrames:
        """The deliveries that were not taken before, loaded. Uses Spark only for Spark's DataFrames.

        Raises:
            SourceError: a partition was taken with other rows, and is not to be taken again.
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
            f"{self.node.name}: expected of partition {name} what was taken of it in an earlier run "
            f"({known[1]} rows), got other rows ({found.count}); nothing was committed. A partition is "
            "taken once. To add these rows as new records (a row of the same key and time replaces the "
            "old one, others stay), run with the tag vt_dagster/take_again = true"
        )

    def release(self) -> None:
        """What was loaded is not wanted any more."""
        for found in self._loaded.values():
            if found is not None:
                found.release()


@dataclass(frozen=True)
class PinnedFrames(Uncounted):
    """The deliveries that a run takes.

    Args:
        source: what the node declares.
        new: each with its rows and the version to be remembered.
        before: the memory of earlier runs.
        first: how many rows they have taken.
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
        """How many there are in all of them."""
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
        """The rows of all deliveries, one after the other; in each by timestamp, those of one timestamp
        as they stand in a local DataFrame, and by key and content in a Spark one, which has no order.

        Plan: few rows are sorted by one task; many in a shuffle by range.
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
        """What is remembered after the run: of each delivery its version and number of rows."""
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
            lines.append(f"!left out columns that the schema has not: {', '.join(extra)}")
        return lines

    def explain(self, error: Exception) -> None:
        return None
