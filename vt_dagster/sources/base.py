"""The protocols of sources: pinning the input of a run, and reading it with fields matched by name."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import PurePath
from typing import Any, Protocol, TypeAlias, runtime_checkable

from pyspark.errors import PySparkException
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import ArrayType, DataType, MapType, StructField, StructType, TimestampType

from vt_dagster.core.source_records import SOURCE_RECORDED_AT
from vt_dagster.errors import SourceError, StorageError, TopologyError
from vt_dagster.storage.asset_store import AssetStore
from vt_dagster.storage.commit_log import Commit, Offsets, Ranges
from vt_dagster.storage.delta import address, require_address, unseen
from vt_dagster.storage.schema_evolution import by_newest_names
from vt_dagster.storage.spark_reader import Head
from vt_dagster.topology.model import Stream
from vt_dagster.topology.options import check_types
from vt_dagster.topology.schema import named, same, was

# Match by name


def by_name(value: Column, got: DataType, wanted: DataType) -> Column:
    """Converts a value to another type: fields match by name at any depth and are null if missing.

    Atomic values are cast.

    Args:
        got, wanted: types without ``topology.schema.differences``.
    """
    if same(got, wanted):
        return value
    if isinstance(got, StructType) and isinstance(wanted, StructType):
        return F.when(value.isNotNull(), F.struct(*all_by_name(lambda n: value[n], got, wanted)))
    if isinstance(got, ArrayType) and isinstance(wanted, ArrayType):
        element, other = got.elementType, wanted.elementType
        return F.transform(value, lambda one: by_name(one, element, other))
    if isinstance(got, MapType) and isinstance(wanted, MapType):
        keys = by_name(F.map_keys(value), ArrayType(got.keyType), ArrayType(wanted.keyType))
        values = by_name(F.map_values(value), ArrayType(got.valueType), ArrayType(wanted.valueType))
        return F.map_from_arrays(keys, values)
    return value.cast(wanted)


def all_by_name(value: Callable[[str], Column], got: StructType, wanted: StructType) -> list[Column]:
    """Returns the wanted fields or columns, see :func:`by_name`.

    Args:
        value: returns a field or column that is there, by name.
    """
    there = {f.name: f.dataType for f in got.fields}
    return [
        by_name(value(f.name), there[f.name], f.dataType).alias(f.name)
        if f.name in there
        else F.lit(None).cast(f.dataType).alias(f.name)
        for f in wanted.fields
    ]


# Protocols


End: TypeAlias = dict[str, Offsets] | str
"""The end of a source: offsets by partition, or the last name."""


def of_id(name: str, id_: str) -> str:
    """Returns the name under which commits keep the position in a topic or Delta table after another
    one of the same name has replaced it.

    Args:
        id_: its id, as in ``Commit.topics``.
    """
    return f"{name}/{id_.partition('@')[0]}"


def replaced(before: Commit, ids: Mapping[str, str]) -> tuple[dict[str, Offsets], dict[str, str]]:
    """Returns the positions in topics or tables that a run replaces, and their ids, as the fields
    ``inputs`` and ``topics`` of a commit. An asset that returns to one of them, for example to the
    first of two clusters, continues at that position.

    Args:
        ids: the ids that the run reads, by name.
    """
    known = {name: before.topics.get(name, id_) for name, id_ in ids.items()}
    left = {name: id_ for name, id_ in known.items() if of_id(name, id_) != of_id(name, ids[name])}
    topics = {of_id(name, id_): id_ for name, id_ in left.items()}
    return {of_id(name, id_): before.inputs[name] for name, id_ in left.items()}, topics


class Pinned(Protocol):
    """The input of one run, pinned when the run starts."""

    @property
    def taken(self) -> Ranges:
        """The offset ranges of the run, if the source has offsets; part of the commit."""
        ...

    @property
    def bytes(self) -> int | None:
        """The size of the input; None if ``taken`` counts records."""
        ...

    @property
    def counts(self) -> dict[str, int]:
        """Counts of the source besides records."""
        ...

    @property
    def empty(self) -> bool:
        """Whether there is no new input: such a run commits nothing."""
        ...

    @property
    def max_bad_share(self) -> float:
        """The largest share of quarantined records; a run above it fails before its commit."""
        ...

    @property
    def max_clock_skew(self) -> timedelta | None:
        """How far ahead of this machine's clock a timestamp may be; None = any."""
        ...

    def read(self, spark: SparkSession, node: Stream) -> DataFrame:
        """Returns the records, in the columns of ``core.source_records.prepare``."""
        ...

    @property
    def places(self) -> Mapping[int, tuple[int, int]] | None:
        """The offset range of each partition, if ``_arrival`` is the offset of a record; else None."""
        ...

    def recorded(self) -> Mapping[str, int] | None:
        """Returns the system time (epoch µs) by ``_source``, in order of arrival; None = the time of
        the commit."""
        ...

    @property
    def source_end(self) -> End:
        """The end of the source when the run started, even if the run takes less."""
        ...

    def reaches(self, end: End) -> bool:
        """Returns whether, after the run, all input up to an end is consumed.

        Args:
            end: the ``source_end`` of this run or an earlier one.
        """
        ...

    def consumed(self) -> dict[str, Any] | None:
        """Returns the files consumed after the run, once its records have been read; None if the commit
        holds offsets.

        Raises:
            SourceError: the input has changed since it was pinned.
        """
        ...

    def position(self, before: Commit, counts: Mapping[str, int]) -> dict[str, Any]:
        """Returns the position after the run: fields of ``Commit``.

        Args:
            counts: the counts of the run.
        """
        ...

    def describe(self, schema: StructType) -> list[str]:
        """Returns a description of the input in lines for the run's log; warnings begin with ``!``.

        Args:
            schema: the asset's schema; the source may have more columns.
        """
        ...

    def explain(self, error: Exception) -> SourceError | None:
        """Returns a clear error if the source caused an error of Spark; else None."""
        ...


def delivered(node: Stream) -> StructType:
    """Returns a node's columns and the earlier names of renamed ones, since the producer of the records
    may still use those."""
    own = [named(f.name, f.dataType, node.earlier.get(f.name, ())) for f in node.schema.fields]
    before = [StructField(name, f.dataType) for f in own for name in was(f)]
    return StructType([*own, *before]) if before else node.schema


def read_by_all_names(
    node: Stream, read: Callable[[Sequence[str], StructType], DataFrame]
) -> DataFrame:
    """Returns a node's records, with each column read by any of its names and returned by its newest.

    Args:
        read: returns the records for the key columns and all columns.
    """
    columns = delivered(node)
    key = [*node.key, *(name for k in node.key for name in node.earlier.get(k, ()))]
    return by_newest_names(read(key, columns), columns)


def with_source_recorded_at(rows: DataFrame, recorded_at: str, words: Collection[str]) -> DataFrame:
    """Adds the source's system time ``_source_recorded_at`` if ``recorded_at`` is a column, not one of
    ``words``."""
    return (
        rows if recorded_at in words else rows.withColumn(SOURCE_RECORDED_AT, F.col(f"`{recorded_at}`"))
    )


def require_source_recorded_at(
    name: str, recorded_at: str, words: Collection[str], schema: StructType
) -> None:
    """Checks that ``recorded_at`` is one of ``words`` or a column of type timestamp.

    Raises:
        TopologyError: ``recorded_at`` is neither of the two.
    """
    columns = [f.name for f in schema.fields if isinstance(f.dataType, TimestampType)]
    if recorded_at not in (*words, *columns):
        raise TopologyError(
            f"{name}: expected recorded_at of the source to be one of {list(words)} or a column of "
            f"type timestamp ({columns}), got {recorded_at!r}; correct it"
        )


class Uncounted:
    """Defaults for the input of one run: no offsets, no system times, no further counts. A source that
    provides one of these overrides it."""

    places: Mapping[int, tuple[int, int]] | None = None

    @property
    def taken(self) -> Ranges:
        return {}

    @property
    def counts(self) -> dict[str, int]:
        return {}

    @property
    def source_end(self) -> End:
        return {}

    def reaches(self, end: End) -> bool:
        return True

    def recorded(self) -> Mapping[str, int] | None:
        return None


@contextmanager
def explained(pinned: Pinned) -> Iterator[None]:
    """Raises a clear error instead of Spark's if the source caused it."""
    try:
        yield
    except PySparkException as error:
        reason = unseen(error) or pinned.explain(error)
        if reason is None:
            raise
        raise reason from error


class Limited(Uncounted):
    """The input of one run with the limits of its source."""

    source: Any

    @property
    def max_bad_share(self) -> float:
        return self.source.max_bad_share

    @property
    def max_clock_skew(self) -> timedelta:
        return self.source.max_clock_skew


@runtime_checkable
class Comparing(Protocol):
    """The input of one run from a source of snapshots: a ``Pinned`` whose records are the difference to
    the table."""

    def difference(
        self, spark: SparkSession, node: Stream, held: DataFrame, hold: Callable[[DataFrame], DataFrame]
    ) -> DataFrame:
        """Returns the records, in the columns of ``Pinned.read``.

        Args:
            held: the rows of the table before the run.
            hold: persists rows that are read several times; they are released after the commit.

        Raises:
            SourceError: the snapshot exceeds a limit, for example deletes too many rows.
        """
        ...


class Whole(Pinned, Comparing, Protocol):
    """A snapshot as the input of one run."""

    @property
    def what(self) -> str:
        """The snapshot, for messages."""
        ...

    @property
    def bytes(self) -> int: ...


@dataclass(frozen=True)
class News:
    """The new input of a source, for a sensor.

    Args:
        config: the run config of the asset's op; None = nothing new.
        description: the new input, for the tick's message; without new input the reason, if there is
            one.
        records: the number of waiting records; None = unknown.
        content: a digest that changes if the named input is repaired in place, for example a file under
            the same name; empty = the input cannot change.
    """

    config: Mapping[str, Any] | None = None
    description: str = ""
    records: int | None = None
    content: str = ""


class Source(Protocol):
    """A source of an asset's records."""

    def pin(
        self, before: Commit | None, *, consumed: Mapping[str, Any] = ..., **run_config: Any
    ) -> Pinned:
        """Pins the input of a run. Does not use Spark.

        Args:
            before: the asset's last commit; None = no commit yet.
            consumed: the files consumed so far, from ``Pinned.consumed``.
            run_config: the settings of the run config.
        """
        ...


class Watched(Source, Protocol):
    """A source that a sensor polls."""

    def describe(self) -> str:
        """Returns a description of the source."""
        ...

    def news(self, before: Commit | None, consumed: Mapping[str, Any]) -> News:
        """Returns the new input, for a run request. Does not use Spark.

        Args:
            before, consumed: as for :meth:`pin`.
        """
        ...


@dataclass(frozen=True)
class RepeatedRun:
    """A run of a replay, which repeats a run of the live asset.

    Args:
        run_config: the settings for :meth:`Source.pin`.
        recorded_at: the system time of its records (epoch µs); None = now.
    """

    run_config: Mapping[str, Any] = field(default_factory=dict[str, Any])
    recorded_at: int | None = None


class Repeatable:
    """What a replay asks of a source. By default, one run reads the source as it is now."""

    def from_beginning(self, live: AssetStore) -> Repeatable:
        """Returns the source with the position at which the live asset began.

        Raises:
            SourceError: the source no longer has all records that the live asset consumed.
        """
        return self

    def require_same(self, live: AssetStore) -> None:
        """Requires that what the live asset has consumed was not replaced by another of its name.

        Raises:
            SourceError: names what was replaced.
        """

    def gone(self, live: AssetStore, instead: str) -> SourceError | None:
        """Returns an error that names files or dumps that the live asset has consumed and that no
        longer exist; None = all exist.

        Args:
            instead: the other way out, for the message.
        """
        return None

    def counts_records(self, live: AssetStore) -> bool:
        """Returns whether a replay consumes as many records as the live asset. Differences between
        whole dumps or versions have no such number: it depends on what the table holds."""
        return True

    def repeated_runs(self, live: AssetStore, head: Head, keep_recorded: bool) -> Iterator[RepeatedRun]:
        """Yields the runs that read what the live asset has consumed, oldest first.

        Args:
            keep_recorded: whether records keep their system times, if the source can tell them.

        Raises:
            SourceError: the source has none of it, or it was replaced.
        """
        yield RepeatedRun()


def check_place(source: Any) -> None:
    """Checks the types of a source that reads a path, and stores the path as an address.

    Raises:
        SourceError: a value of another type, or no path.
    """
    name, path = type(source).__name__, source.path
    if isinstance(path, PurePath):
        object.__setattr__(source, "path", str(path))
    check_types(source, name, SourceError, skip={"options"})  # Spark's reader options have a check
    if not str(path).strip():
        raise SourceError(f"{name}: expected the path or URL of the data, got none; set path")
    try:
        require_address(str(path))
    except StorageError as error:
        said = f"{name}: path: {error}"
        raise SourceError(said) from None
    object.__setattr__(source, "path", address(path))


def require_limits(max_bad_share: float, max_clock_skew: timedelta) -> None:
    """Checks the limits that every source has.

    Raises:
        SourceError: a limit is not valid.
    """
    if not 0 <= max_bad_share <= 1:
        raise SourceError(f"max_bad_share must be between 0 and 1, got {max_bad_share}")
    given: object = max_clock_skew
    if not isinstance(given, timedelta):
        raise SourceError(
            f"max_clock_skew must be a timedelta, got {given!r}; to accept any time, set a long one, "
            "for example timedelta(days=36500)"
        )
    if given < timedelta(0):
        raise SourceError(
            f"max_clock_skew must be 0 or more, got {given}: it would refuse records of the present; "
            "set for example timedelta(days=1)"
        )
