"""What a run needs of a source: what it pins when the run starts, and how to read it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol, TypeAlias, runtime_checkable

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import StructField, StructType, TimestampType

from vt_dagster.core.source_records import SOURCE_RECORDED_AT
from vt_dagster.errors import SourceError, TopologyError
from vt_dagster.storage.commit_log import Commit, Offsets, Ranges
from vt_dagster.storage.schema_evolution import by_newest_names
from vt_dagster.topology.column_renames import named, was
from vt_dagster.topology.model import Stream

End: TypeAlias = dict[str, Offsets] | str
"""The end of a source, as it tells places: offsets, or the last name."""


class Pinned(Protocol):
    """What one run takes from a source."""

    @property
    def taken(self) -> Ranges:
        """The offsets that the run takes, where the source has any; part of the commit."""
        ...

    @property
    def bytes(self) -> int | None:
        """How much that is; None where ``taken`` says it in records."""
        ...

    @property
    def counts(self) -> dict[str, int]:
        """What the source counts besides records."""
        ...

    @property
    def empty(self) -> bool:
        """Whether there is nothing new: such a run commits nothing."""
        ...

    @property
    def max_bad_share(self) -> float:
        """A run with a larger share of quarantined records fails before its commit."""
        ...

    @property
    def max_clock_skew(self) -> timedelta | None:
        """How far in the future a timestamp may lie; None = any."""
        ...

    def read(self, spark: SparkSession, node: Stream) -> DataFrame:
        """The records, as ``core.source_records.prepare`` takes them."""
        ...

    @property
    def source_end(self) -> End:
        """The end of all that was there when the run started, whatever of it the run takes."""
        ...

    def reaches(self, end: End) -> bool:
        """Whether all up to an end is taken after the run.

        Args:
            end: of this run or an earlier one.
        """
        ...

    def consumed(self) -> dict[str, Any] | None:
        """The files that will have been consumed after the run, once its records have been read; None
        where offsets tell.

        Raises:
            SourceError: what was read is not what was pinned.
        """
        ...

    def position(self, before: Commit, counts: Mapping[str, int]) -> dict[str, Any]:
        """What the commit says of how far the run has come: fields of ``Commit``.

        Args:
            counts: of the run.
        """
        ...

    def describe(self, schema: StructType) -> list[str]:
        """What is taken, in lines for the run's log; warnings begin with ``!``.

        Args:
            schema: the asset's, of which the source may have more columns.
        """
        ...

    def explain(self, error: Exception) -> SourceError | None:
        """What happened, where it was the source that did not give its records."""
        ...


def delivered(node: Stream) -> StructType:
    """The columns by which a node's records may come: its own, and of those that had other names before
    these too, since what delivers them may not have followed yet."""
    own = [named(f.name, f.dataType, node.earlier.get(f.name, ())) for f in node.schema.fields]
    before = [StructField(name, f.dataType) for f in own for name in was(f)]
    return StructType([*own, *before]) if before else node.schema


def read_by_all_names(
    node: Stream, read: Callable[[Sequence[str], StructType], DataFrame]
) -> DataFrame:
    """A node's records by all names that its columns had, each column under its newest one.

    Args:
        read: gives them, by the columns of the key and all columns.
    """
    columns = delivered(node)
    key = [*node.key, *(name for k in node.key for name in node.earlier.get(k, ()))]
    return by_newest_names(read(key, columns), columns)


def with_source_recorded_at(rows: DataFrame, recorded_at: str, words: Collection[str]) -> DataFrame:
    """Rows with ``_told_at``, where that is a column of theirs, and none of the words."""
    return (
        rows if recorded_at in words else rows.withColumn(SOURCE_RECORDED_AT, F.col(f"`{recorded_at}`"))
    )


def require_source_recorded_at(
    name: str, recorded_at: str, words: Collection[str], schema: StructType
) -> None:
    """What a source is asked for as times of record is one of the words, or a column.

    Raises:
        TopologyError: it is neither.
    """
    columns = [f.name for f in schema.fields if isinstance(f.dataType, TimestampType)]
    if recorded_at not in (*words, *columns):
        raise TopologyError(
            f"{name}: expected recorded_at of the source to be one of {list(words)} or a column of "
            f"type timestamp, of which there are {columns}, got {recorded_at!r}; correct it"
        )


class Uncounted:
    """What one run takes of a source that has no offsets, and counts nothing besides records."""

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


@runtime_checkable
class Comparing(Protocol):
    """What one run takes from a source that says what is true, not what has changed: a ``Pinned`` whose
    records are the difference to what the table holds."""

    def difference(
        self,
        spark: SparkSession,
        node: Stream,
        held: DataFrame,
        hold: Callable[[DataFrame], DataFrame],
    ) -> DataFrame:
        """The records, as ``Pinned.read`` gives them.

        Args:
            held: the rows of the table before the run.
            hold: gives rows that are wanted several times: computed once, released after the commit.

        Raises:
            SourceError: it is not to be believed, for example since it would delete too much.
        """
        ...


class Whole(Pinned, Comparing, Protocol):
    """A whole state that one run takes."""

    @property
    def what(self) -> str:
        """It, in words."""
        ...

    @property
    def bytes(self) -> int: ...


@runtime_checkable
class Recorded(Protocol):
    """What one run takes from a source that can tell when its records were recorded first: a
    ``Pinned``."""

    def recorded(self) -> Mapping[str, int] | None:
        """When, epoch microseconds, by what they are read from (``_source``) in order of arrival; None
        = when the run commits."""
        ...


@dataclass(frozen=True)
class News:
    """What a source has for a run.

    Args:
        config: of the asset's op; None = nothing to run for.
        says: the state in words.
        records: how many wait; None = unknown.
    """

    config: Mapping[str, Any] | None = None
    says: str = ""
    records: int | None = None


class Source(Protocol):
    """Where the records of an asset come from."""

    def pin(self, before: Commit | None, *, consumed: Mapping[str, Any] = ..., **asked: Any) -> Pinned:
        """What a run takes after a commit. Does not use Spark.

        Args:
            before: the asset's last commit; None = there is none.
            consumed: the files consumed so far, as ``Pinned.consumed`` gave them.
            asked: what the run's config asks for.
        """
        ...


class Watched(Source, Protocol):
    """A source that a sensor looks at."""

    def describe(self) -> str:
        """What is read, in words."""
        ...

    def news(self, before: Commit | None, consumed: Mapping[str, Any]) -> News:
        """What a sensor asks a run for. Does not use Spark.

        Args:
            before, consumed: as of :meth:`pin`.
        """
        ...


def require_limits(max_bad_share: float, max_clock_skew: timedelta) -> None:
    """What every source says of bad records.

    Raises:
        SourceError: it makes no sense.
    """
    if not 0 <= max_bad_share <= 1:
        raise SourceError(f"max_bad_share must be between 0 and 1, got {max_bad_share}")
    given: object = max_clock_skew
    if not isinstance(given, timedelta):
        raise SourceError(
            f"max_clock_skew must be a timedelta, got {given!r}; to let any time pass give a long one, "
            "for example timedelta(days=36500)"
        )
