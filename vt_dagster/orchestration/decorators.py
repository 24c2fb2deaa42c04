"""Streams and tables of what a function returns."""

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
    """What a decorated stream is; see :class:`Stream`, and for the last six :func:`versioned_table`."""

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
    """What a decorated table is, see :class:`Table`."""

    freshness: Freshness
    broadcast: bool
    deleted_when: str | None
    deleted_at: str | None


class VersionedTableAttributes(StreamAttributes, total=False):
    """What a decorated versioned table is, see :class:`VersionedTable`."""

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
    """A stream of what a function returns; see :func:`versioned_table`."""
    return _decorator(Stream, about)


def table(**about: Unpack[TableAttributes]) -> Callable[[Callable[..., Any]], Table]:
    """A table of what a function returns; see :func:`versioned_table`."""
    return _decorator(Table, about)


def versioned_table(
    **about: Unpack[VersionedTableAttributes],
) -> Callable[[Callable[..., Any]], VersionedTable]:
    """A versioned table of what a function returns: its new records, as a DataFrame.

    .. code-block:: python

        @versioned_table(key="currency", schema=Rate, timestamp="at", history_retention=MONTH)
        def rates(context: dg.AssetExecutionContext, raw_rates: pl.DataFrame) -> pl.DataFrame:
            return raw_rates.select("currency", "rate", "at")

        defs = build_definitions(orders.left_join(rates, name="priced"))

    The name is the table, a node of topologies as any other. The function's parameters are Dagster's:
    a context, inputs by name (other assets, tables of this library too, as the DataFrame that the
    parameter is annotated with), ``config``, resources. The Spark session of the table's own commits is
    ``context.resources.vt_dagster_spark.spark_session``.

    It returns a DataFrame of pandas, Polars (lazy too), Arrow, DuckDB or Spark with the columns of the
    schema; others are left out, and told. One without rows, or None, is nothing new. A row that does
    not fit its types goes to quarantine; a column of another kind is refused. Naive times are UTC. A
    DataFrame's records arrive by timestamp; those of one timestamp as they stand in it, in a Spark one,
    which has no order, by key and content.

    **What it returns counts once a run.** A step that is tried again, or a run that is made again after
    it failed, does not call the function once its records are committed. With ``partitions_def`` it
    counts once a partition: a run that makes a partition again calls the function; the same rows, in
    any order, are nothing new, other rows are refused, unless the run has the tag
    ``vt_dagster/take_again = true``: then they are new records. Runs of several partitions at once
    commit one after the other, in any order.

    Args:
        about: what the table is, see :class:`VersionedTable`; its name and description are by default
            the function's. ``ins`` (Dagster's ``AssetIn`` by parameter), ``deps``, ``partitions_def``,
            ``required_resource_keys``: as of ``dagster.asset``. ``max_bad_share``, ``max_clock_skew``:
            as of :class:`FilesSource`.

    Raises:
        TopologyError: the function is none that can give records, or what it is to be has no meaning.
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
