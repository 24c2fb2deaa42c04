"""Decorators that declare a stream or table of the DataFrames that a function returns."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any, Literal, TypeVar

import dagster as dg
from typing_extensions import Required, TypedDict, Unpack

from vt_dagster.orchestration.dataframe_inputs import function_parameters
from vt_dagster.sources.frame_sources import FunctionSource
from vt_dagster.topology.durations import Duration
from vt_dagster.topology.model import Ready, Stream, Table, VersionedTable
from vt_dagster.topology.node import Freshness

N = TypeVar("N", bound=Stream)
_OF_SOURCE = (
    "ins",
    "deps",
    "partitions_def",
    "required_resource_keys",
    "max_bad_share",
    "max_clock_skew",
)


class StreamAttributes(TypedDict, total=False):
    """Options of a stream, see :class:`Stream`; for the last six see :func:`versioned_table`."""

    name: str
    key: Required[str | Sequence[str]]
    schema: Required[Any]
    timestamp: str
    tombstone: str | None
    partitions: int
    partition_by: str | None
    null_key: Literal["quarantine", "keep"]
    renamed: Mapping[str, str]
    description: str | None
    group: str | None
    owners: Sequence[str]
    key_prefix: str | Sequence[str]
    log_retention: timedelta | None
    ins: Mapping[str, dg.AssetIn]
    deps: Iterable[Any]
    partitions_def: dg.PartitionsDefinition[Any] | None
    required_resource_keys: Iterable[str]
    max_bad_share: float
    max_clock_skew: timedelta


class TableAttributes(StreamAttributes, total=False):
    """Options of a decorated table, see :class:`Table`."""

    freshness: Freshness
    broadcast: bool
    deleted_when: str | None
    deleted_at: str | None


class VersionedTableAttributes(StreamAttributes, total=False):
    """Options of a decorated versioned table, see :class:`VersionedTable`."""

    freshness: Freshness
    deleted_when: str | None
    deleted_at: str | None
    history_retention: Required[Duration]
    segment_interval: timedelta | None
    ready: Ready
    tie_break: str | None
    valid_until: str | None
    new_version_on: Sequence[str] | None
    only_columns: str | Sequence[str] | None
    ignore_null_updates: bool | Sequence[str]


def stream(**about: Unpack[StreamAttributes]) -> Callable[[Callable[..., Any]], Stream]:
    """Declares a stream of the records that a function returns; see :func:`versioned_table`."""
    return _decorator(Stream, about)


def table(**about: Unpack[TableAttributes]) -> Callable[[Callable[..., Any]], Table]:
    """Declares a table of the records that a function returns; see :func:`versioned_table`."""
    return _decorator(Table, about)


def versioned_table(
    **about: Unpack[VersionedTableAttributes],
) -> Callable[[Callable[..., Any]], VersionedTable]:
    """Declares a versioned table of the new records that a function returns, as a DataFrame.

    .. code-block:: python

        @versioned_table(key="currency", schema=Rate, timestamp="at", history_retention=MONTH)
        def rates(context: dg.AssetExecutionContext, raw_rates: pl.DataFrame) -> pl.DataFrame:
            return raw_rates.select("currency", "rate", "at")

        defs = build_definitions(orders.left_join(rates, name="priced"))

    The decorated name is the table, a node like any other. The function's parameters are Dagster's: a
    context, inputs by name (other assets, also tables of this library, as the annotated DataFrame
    type), ``config``, resources. The Spark session of the table's own commits is
    ``context.resources.vt_dagster_spark.spark_session``.

    The function returns a DataFrame of pandas, Polars (lazy too), Arrow, DuckDB or Spark with the
    columns of the schema; other columns are dropped, and logged. No rows, or None, means nothing new. A
    row that does not fit the column types is quarantined; a column of another kind is an error. Naive
    times are UTC. A DataFrame's records arrive by timestamp; those of one timestamp in row order, or
    from Spark, which has no order, by key and content.

    **The result counts once per run.** A retried step, or a run that is retried after a failure, does
    not call the function again once its records are committed. With ``partitions_def`` the result
    counts once per partition: a rerun of a partition calls the function; the same rows, in any order,
    are nothing new; other rows are an error, unless the run has the tag ``vt_dagster/take_again =
    true``: then they are new records. Concurrent runs of several partitions commit one after the
    other, in any order.

    Args:
        about: the options of the table, see :class:`VersionedTable`; name and description default to
            the function's. ``ins`` (Dagster's ``AssetIn`` by parameter), ``deps``, ``partitions_def``,
            ``required_resource_keys``: as in ``dagster.asset``. ``max_bad_share``, ``max_clock_skew``:
            as in :class:`FilesSource`.

    Raises:
        TopologyError: the function cannot return records, or the declaration is invalid.
    """
    return _decorator(VersionedTable, about)


def _decorator(kind: type[N], about: Mapping[str, Any]) -> Callable[[Callable[..., Any]], N]:
    def decorated(function: Callable[..., Any]) -> N:
        function_parameters(function)
        of_source = {name: value for name, value in about.items() if name in _OF_SOURCE}
        of_source["deps"] = tuple(of_source.get("deps", ()))
        of_source["required_resource_keys"] = frozenset(of_source.get("required_resource_keys", ()))
        of_node = {name: value for name, value in about.items() if name not in _OF_SOURCE}
        of_node.setdefault("description", inspect.getdoc(function))
        name = of_node.pop("name", function.__name__)
        return kind(name, source=FunctionSource(function=function, **of_source), **of_node)

    return decorated
