"""Aggregates: of a table by another key, of a stream in windows."""

from __future__ import annotations

from abc import ABC
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from pyspark.sql.types import StructField, StructType, TimestampType

from vt_dagster.columns import WINDOW_END, WINDOW_START
from vt_dagster.errors import TopologyError
from vt_dagster.topology.accumulators import Aggregates
from vt_dagster.topology.model import Table
from vt_dagster.topology.operators.base import Emit, Materialized, OneInput, check_emit, need_table
from vt_dagster.topology.projection import Selection
from vt_dagster.topology.schema import as_struct
from vt_dagster.topology.windowing import Window

Row = dict[str, Any]


@dataclass(frozen=True)
class Aggregator:
    """A user-written aggregation, in Python, called once for each added or taken-out row.

    Rows and aggregates are dicts. It runs in Spark's Python workers over sorted batches, with the
    aggregate of one group in memory.

    Args:
        initializer: gives the aggregate of an empty group; None: the first row added is taken as
            it is (Kafka's ``reduce``).
        adder: ``(row, aggregate) -> aggregate``.
        subtractor: the same, for a row that is replaced or deleted.
        schema: the columns of the aggregate, a StructType; None: those of the row (``reduce``).
    """

    adder: Callable[[Row, Row], Row]
    subtractor: Callable[[Row, Row], Row]
    initializer: Callable[[], Row] | None = None
    schema: Any = None


@dataclass(frozen=True)
class _Aggregate(OneInput, ABC):
    """Rows aggregated by a key, which may be another than the input's.

    Args:
        group_key: the key's columns as ``column`` or ``expression as name``.
        partitions: number of partitions of a result with another key, which the key's hash
            chooses; None = as many as the input has. ``partition_by``: a SQL expression instead
            of the hash.
    """

    group_key: tuple[str, ...] = field(default=(), kw_only=True)
    emit: Emit = field(default="every_update", kw_only=True)
    partitions: int | None = field(default=None, kw_only=True)
    partition_by: str | None = field(default=None, kw_only=True)

    def keys(self) -> Selection:
        """The columns of the key, of windows without their ends."""
        fields = tuple(self.source.schema.fields)
        chosen = self.group_key or tuple(self.source.key)
        return Selection(self.name, self.source.name, fields, chosen)

    def _grouped(
        self,
        keys: Sequence[StructField],
        values: Sequence[StructField],
        materialized: Materialized | None,
        shown: dict[str, Any],
    ) -> Table:
        about: dict[str, Any] = {"key": [k.name for k in keys]}
        if self.group_key:
            about["partitions"] = self.partitions or self.source.partitions
            about["partition_by"] = self.partition_by
        return self._table(self.source, StructType([*keys, *values]), materialized, shown, **about)

    def _lineage(self, aggregates: tuple[tuple[str, str], ...]) -> dict[str, list[tuple[str, str]]]:
        keys = self.keys()
        return keys.lineage() | {c: keys.mentioned(e) for c, e in aggregates}


@dataclass(frozen=True)
class TableAggregate(_Aggregate):
    """A table's rows aggregated by another key (KIP-914).

    A change takes the old row out of its group and adds the new one. Out-of-order records of a
    versioned table are ignored. Results of a group never go back in time; a group that empties
    stays.

    Args:
        group_key: the new key's columns; a row in which any is null belongs to no group.
        select: the columns that an :class:`Aggregator` sees.
        aggregates: (name, SQL aggregate) pairs, of count, sum, avg; or an Aggregator.
    """

    aggregates: tuple[tuple[str, str], ...] | Aggregator = field(kw_only=True)
    select: tuple[str, ...] = field(default=("*",), kw_only=True)

    def __post_init__(self) -> None:
        need_table(self.name, "group_by", self.source)
        check_emit(self.name, self.emit)
        if not self.group_key:
            raise TopologyError(
                f"{self.name}: group_by needs the columns or expressions of the new key, for example "
                f"group_by({self.source.value_columns[0] if self.source.value_columns else 'x'!r})"
            )
        if isinstance(self.aggregates, Aggregator):
            self.selection()
        elif not self.parsed().invertible:
            raise TopologyError(
                f"{self.name}: min and max cannot take out a row that was replaced; aggregate a "
                "table by count, sum and avg, or with an Aggregator of your own"
            )
        self.keys()

    def selection(self) -> Selection:
        """The columns that an Aggregator sees."""
        return Selection(self.name, self.source.name, tuple(self.source.schema.fields), self.select)

    def parsed(self) -> Aggregates:
        """The aggregates, parsed."""
        assert not isinstance(self.aggregates, Aggregator)
        return Aggregates(self.name, self.aggregates)

    def result(self, **shown: Any) -> Table:
        keys = self.keys().fields_of_result()
        if not isinstance(self.aggregates, Aggregator):
            values = self.parsed().fields(self.source.schema)
        elif self.aggregates.schema is None:
            names = {k.name for k in keys}
            values = [f for f in self.selection().fields_of_result() if f.name not in names]
        else:
            values = list(as_struct(self.aggregates.schema, self.name).fields)
        return self._grouped(keys, values, self.materialized, shown)

    def lineage(self) -> dict[str, list[tuple[str, str]]]:
        if not isinstance(self.aggregates, Aggregator):
            return self._lineage(self.aggregates)
        every = [(self.source.name, c) for c, _ in self.selection().columns]
        return self.keys().lineage() | dict.fromkeys(self.result().value_columns, every)

    def describe(self) -> str:
        what = (
            "an aggregator"
            if isinstance(self.aggregates, Aggregator)
            else ", ".join(e for _, e in self.aggregates)
        )
        return f"{self.source.name} by {', '.join(self.group_key)}: {what}."


@dataclass(frozen=True)
class WindowedAggregate(_Aggregate):
    """A stream's records aggregated by key and window (KIP-328's window grace).

    A window is updated while it is open; a record whose window has closed is dropped and counted.
    The result is a plain table whose key ends with ``window_start`` and ``window_end``.

    Each materialization has KIP-328's metrics: ``record_lateness_avg_seconds``,
    ``record_lateness_max_seconds``, ``late_records_dropped`` (records that found a window closed) and
    ``expired_window_records_dropped`` (closed windows that records would have updated).

    Args:
        window: tumbling, hopping, session or sliding.
        group_key: empty = the stream's own key.
        aggregates: (name, SQL aggregate) pairs, of count, sum, min, max, avg.
    """

    window: Window = field(kw_only=True)
    aggregates: tuple[tuple[str, str], ...] = field(kw_only=True)

    def __post_init__(self) -> None:
        if isinstance(self.source, Table):
            raise TopologyError(
                f"{self.name}: windows hold records of a stream, but {self.source.name!r} is a table; "
                "use its changes, to_stream(name=...), or group_by without a window"
            )
        check_emit(self.name, self.emit)
        self.parsed()
        keys = self.keys()
        taken = [n for n, _ in keys.columns if n.lower() in (WINDOW_START, WINDOW_END)]
        if taken:
            raise TopologyError(
                f"{self.name}: the key columns {taken} have the names of the window's ends; rename "
                "them, for example 'window_start as asked_from'"
            )

    def parsed(self) -> Aggregates:
        """The aggregates, parsed."""
        return Aggregates(self.name, self.aggregates)

    def result(self, **shown: Any) -> Table:
        keys = [
            *self.keys().fields_of_result(),
            StructField(WINDOW_START, TimestampType()),
            StructField(WINDOW_END, TimestampType()),
        ]
        return self._grouped(keys, self.parsed().fields(self.source.schema), None, shown)

    def lineage(self) -> dict[str, list[tuple[str, str]]]:
        return self._lineage(self.aggregates)

    def describe(self) -> str:
        what = ", ".join(e for _, e in self.aggregates)
        by = ", ".join(self.group_key or self.source.key)
        return f"{self.source.name} by {by}, {self.window.describe()}: {what}."
