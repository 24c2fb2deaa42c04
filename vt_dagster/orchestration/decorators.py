"""``@stream``, ``@table``, ``@versioned_table``: declare a stream or table that a function fills.

The DataFrames of a run come from the asset's own function or from an upstream asset. Dagster identifies
the delivery: the run, its partition, or the upstream asset's materialization. The asset's own commits
record which deliveries were consumed.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar, get_origin, get_type_hints

import dagster as dg
from typing_extensions import TypedDict, Unpack

from vt_dagster.errors import ContractError, SourceError, TopologyError
from vt_dagster.orchestration.resources import asset_op
from vt_dagster.sources.frame_sources import AssetSource, Delivery, FrameSource, FunctionSource, Given
from vt_dagster.topology.model import (
    Stream,
    StreamOptions,
    Table,
    TableOptions,
    VersionedTable,
    VersionedTableOptions,
)

# DataFrames as inputs


TAKE_AGAIN = "vt_dagster/take_again"
"""Run tag that consumes a partition again with other rows than before."""
_UPSTREAM = "upstream"
_RESOURCE = getattr(dg.ResourceParam[Any], "__metadata__", ())
_RESOURCES = ("ConfigurableResourceFactory", "ResourceDefinition", "TreatAsResourceParam")
"""Dagster's classes of resources, of which the first and last have no public names."""
_STARTED = {dg.DagsterEventType.STEP_START, dg.DagsterEventType.STEP_RESTARTED}
_SUCCEEDED = dg.DagsterEventType.STEP_SUCCESS


def partitions_of(node: Stream) -> dg.PartitionsDefinition[Any] | None:
    """Returns the partitions of a node's asset; None = it has none."""
    return getattr(node.source, "partitions_def", None)


def function_parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
    """Returns the parameters of a user's function without its context, with resolved annotations.

    Raises:
        TopologyError: the function cannot return records.
    """
    named = getattr(function, "__qualname__", repr(function))
    plain = callable(function) and not inspect.isclass(function)
    if not plain or inspect.isgeneratorfunction(function) or inspect.iscoroutinefunction(function):
        raise TopologyError(
            f"{named}: expected a function that returns a DataFrame or None, got {function!r}; return "
            "all records of a run at once"
        )
    parameters = list(inspect.signature(function).parameters.values())
    for one in parameters:
        if one.kind in (one.VAR_POSITIONAL, one.VAR_KEYWORD, one.POSITIONAL_ONLY):
            raise TopologyError(
                f"{named}: expected named parameters, which are its inputs, got {one.name!r}; "
                "name each input asset"
            )
    try:
        hints = get_type_hints(function, include_extras=True)
    except NameError as error:
        raise TopologyError(
            f"{named}: expected annotations that can be resolved in its module, got: {error}; import "
            "that type outside of TYPE_CHECKING and of functions"
        ) from None
    start = 1 if wants_context(function) else 0
    return [one.replace(annotation=hints.get(one.name, one.empty)) for one in parameters[start:]]


def wants_context(function: Callable[..., Any]) -> bool:
    """Whether its first parameter is Dagster's context."""
    first = next(iter(inspect.signature(function).parameters), "")
    return first.strip("_") == "context" or first == "_"


def _is_resource(kind: Any) -> bool:
    """Whether Dagster passes a resource for an annotation. Dagster itself takes resources from
    parameters only if no required_resource_keys are set."""
    if getattr(kind, "__metadata__", None) == _RESOURCE:
        return True
    return any(base.__name__ in _RESOURCES for base in getattr(kind, "__mro__", ()))


@dataclass(frozen=True)
class Inputs:
    """The inputs of an asset with a source of DataFrames.

    Args:
        ins: as ``dagster.asset`` takes them.
        signature: of the function that Dagster calls.
        required_resource_keys: besides those of any asset.
        deps: other upstream assets, not loaded.
    """

    ins: Mapping[str, dg.AssetIn]
    signature: inspect.Signature
    required_resource_keys: frozenset[str] = frozenset()
    deps: tuple[Any, ...] = ()

    @classmethod
    def of(cls, node: Stream, source: FrameSource) -> Inputs:
        """Returns the inputs of a stream or table.

        Raises:
            TopologyError: the source of the node is the node itself.
        """
        if isinstance(source, FunctionSource):
            parameters = function_parameters(source.function)
            named = [one.name for one in parameters if _is_resource(one.annotation)]
            inputs = [one for one in parameters if one.name not in named]
            required = source.required_resource_keys.union(named)
            return cls(source.ins, _signature(inputs), required, tuple(source.deps))
        assert isinstance(source, AssetSource)
        if source.path == node.path:
            raise TopologyError(
                f"{node.name}: expected the key of another asset in AssetSource, got its own, "
                f"{'/'.join(node.path)!r}; name the asset that its records come from"
            )
        only: dict[str, Any] = {"allow_missing_partitions": True, **source.metadata}
        about: dict[str, Any] = {"metadata": only, "partition_mapping": source.partition_mapping}
        if source.input_manager_key is not None:
            about["input_manager_key"] = source.input_manager_key
        kind = source.as_type
        if _is_class(kind):
            about["dagster_type"] = _one_or_by_partition(node, kind)
        upstream = inspect.Parameter(
            _UPSTREAM,
            inspect.Parameter.POSITIONAL_OR_KEYWORD,
            annotation=inspect.Parameter.empty if kind is None else kind,
        )
        return cls({_UPSTREAM: dg.AssetIn(dg.AssetKey(source.path), **about)}, _signature([upstream]))


def _is_class(kind: Any) -> bool:
    return isinstance(kind, type) and get_origin(kind) is None


def _one_or_by_partition(node: Stream, as_type: type) -> dg.DagsterType:
    """Returns the type of an input that is a value of a class, or a dict of such values by partition:
    Dagster's file IO managers return one for a run that loads several partitions. For a partition that
    is not there they return None, which the run explains."""

    def check(_: Any, value: Any) -> dg.TypeCheck:
        if value is None:
            return dg.TypeCheck(success=True)
        found = dg.check_dagster_type(as_type, value)
        if found.success or not isinstance(value, dict):
            return found
        each = [dg.check_dagster_type(as_type, one) for one in value.values()]
        return next((one for one in each if not one.success), dg.TypeCheck(success=True))

    name = f"{as_type.__name__} for {'/'.join(node.path)}"
    return dg.DagsterType(check, name=name, typing_type=as_type)


def _signature(parameters: list[inspect.Parameter]) -> inspect.Signature:
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD  # Dagster takes no others for inputs
    context = inspect.Parameter("context", kind, annotation=dg.AssetExecutionContext)
    named = [one.replace(kind=kind) for one in parameters]
    return inspect.Signature([context, *sorted(named, key=lambda one: one.default is not one.empty)])


@contextmanager
def delivered_frames(
    context: dg.AssetExecutionContext, node: Stream, source: FrameSource, values: Mapping[str, Any]
) -> Iterator[Given]:
    """Yields the source of one run.

    Args:
        values: the inputs that Dagster loaded.
    """
    if isinstance(source, FunctionSource):
        deliveries = [_of_function(context, node, source, values)]
    else:
        assert isinstance(source, AssetSource)
        deliveries = _of_asset(context, node, source, values[_UPSTREAM])
    made = Given(node, source, deliveries, _takes_again(context))
    try:
        yield made
    finally:
        made.release()


def _of_function(
    context: dg.AssetExecutionContext, node: Stream, source: FunctionSource, values: Mapping[str, Any]
) -> Delivery:
    function = source.function
    first = (context,) if wants_context(function) else ()
    for one in function_parameters(function):
        if _is_resource(one.annotation):
            values = {**values, one.name: getattr(context.resources, one.name)}
    if source.partitions_def is None:
        return Delivery(_tries(context)[-1], "", lambda: function(*first, **values))
    partition, tries = one_partition(context, node), _tries(context)
    origin = tries[-1]

    def is_retry(batch: int, run: str) -> bool:
        """Whether this run has consumed the partition and its step has not ended, or a failed run has
        consumed the partition without reporting it. Then the function is not called again, because it
        might return other rows."""
        if run != origin and (_takes_again(context) or not _has_failed(context, run)):
            return False
        reported_by = reporter(context, dg.AssetKey(node.path), partition, batch)
        if reported_by is None or run != origin:
            return reported_by is None
        # Before that run this chain may have consumed other rows of the partition.
        since = tries[: tries.index(reported_by) + 1] if reported_by in tries else tries
        return not any(step_events(context, node, one, _SUCCEEDED) for one in since)

    def load() -> Any:
        return function(*first, **values)

    return Delivery(partition, None, load, run=origin, is_retry=is_retry)


def _takes_again(context: dg.AssetExecutionContext) -> bool:
    return context.run.tags.get(TAKE_AGAIN, "").lower() == "true"


def _has_failed(context: dg.AssetExecutionContext, run_id: str) -> bool:
    """Whether a run has not succeeded: one whose process was killed may count as unfinished."""
    run = context.instance.get_run_by_id(run_id)
    return run is not None and run.status != dg.DagsterRunStatus.SUCCESS


def step_events(
    context: Any, node: Stream, run_id: str, of_type: dg.DagsterEventType | set[dg.DagsterEventType]
) -> list[dg.EventLogRecord]:
    """Returns the events of some types of the step of a node's asset in a run."""
    events = context.instance.get_records_for_run(run_id, of_type=of_type).records
    return [one for one in events if one.event_log_entry.step_key == asset_op(node)]


def reporter(context: Any, key: dg.AssetKey, partition: str, batch: int) -> str | None:
    """Returns the run of a partition's last materialization if that is at least as new as a batch of
    its asset; None = this Dagster instance has none, or an older one."""
    wanted = dg.AssetRecordsFilter(key, asset_partitions=[partition])
    for record in context.instance.fetch_materializations(wanted, limit=1).records:
        made = record.asset_materialization
        reported = None if made is None else reported_batch(made)
        return record.run_id if reported is None or reported >= batch else None
    return None


def reported_batch(made: dg.AssetMaterialization) -> int | None:
    """Returns the batch that a materialization reports; None = it names none."""
    versions: Any = made.metadata.get("versions")
    return None if versions is None else versions.value["batch"]


def one_partition(context: Any, node: Stream) -> str:
    """Returns the partition of a run.

    Raises:
        SourceError: the run has none, or several.
    """
    found = list(context.partition_keys) if context.has_partition_key_range else []
    if context.has_partition_key:
        found = [context.partition_key]
    if len(found) != 1:
        if not found:
            raise SourceError(
                f"{node.name}: expected a run of one partition, got none; choose one when you "
                "materialize it, or start a backfill of several"
            )
        raise SourceError(
            f"{node.name}: expected a run of one partition, got {len(found)}; run each partition "
            "by itself, without BackfillPolicy.single_run"
        )
    return found[0]


def _tries(context: dg.AssetExecutionContext) -> list[str]:
    """Returns the runs of a chain of retries, this run first. A re-execution of a successful run is a
    new run, not a retry."""
    found = [context.run]
    while found[-1].parent_run_id is not None:
        parent = context.instance.get_run_by_id(found[-1].parent_run_id)
        if parent is None or parent.status == dg.DagsterRunStatus.SUCCESS:
            break
        found.append(parent)
    return [run.run_id for run in found]


def _of_asset(
    context: dg.AssetExecutionContext, node: Stream, source: AssetSource, value: Any
) -> list[Delivery]:
    if not context.get_step_execution_context().has_asset_partitions_for_input(_UPSTREAM):
        last = _materialization(context, node, source, None)
        if last.partition_key is not None:
            raise SourceError(
                f"{node.name}: expected a materialization of {_named(source, None)} without a "
                f"partition, as it is declared here, got one of partition {last.partition_key}; give "
                "its AssetSpec the partitions_def of that asset, or materialize it"
            )
        return [_delivery(context, node, source, last, value)]
    partitions = list(context.asset_partition_keys_for_input(_UPSTREAM))
    if not partitions:  # e.g. the first day of an asset that reads the day before
        return []
    if len(partitions) != 1 and not isinstance(value, dict):
        raise SourceError(
            f"{node.name}: expected the IO manager of {'/'.join(source.path)} to return a dict of its "
            f"{len(partitions)} partitions, got {type(value).__qualname__}; set the partitions_def "
            "of that asset on AssetSource, so that each run takes one partition"
        )
    frames: dict[str, Any] = value if isinstance(value, dict) else {partitions[0]: value}
    found: list[Delivery] = []
    for one in partitions:
        if one in frames:
            last = _materialization(context, node, source, one)
            found.append(_delivery(context, node, source, last, frames[one]))
    return found


def _delivery(
    context: dg.AssetExecutionContext,
    node: Stream,
    source: AssetSource,
    last: dg.EventLogRecord,
    value: Any,
) -> Delivery:
    def replaced_by() -> set[str]:
        # By id in the event storage, not by time: the clocks of two machines may differ.
        wanted = _wanted(source, last.partition_key, after_storage_id=last.storage_id)
        return {*map(_version_of, context.instance.fetch_materializations(wanted, limit=1_000).records)}

    started = step_events(context, node, context.run.run_id, _STARTED)  # before its inputs were loaded
    if last.timestamp > max((one.timestamp for one in started), default=float("inf")):
        raise SourceError(
            f"{node.name}: expected no materialization of {'/'.join(source.path)} while it is loaded, "
            "got one; nothing was committed. Run again, or put both assets into one pool"
        )
    if value is None and _is_class(source.as_type):
        named = _named(source, last.partition_key)
        raise ContractError(
            f"{node.name}: expected a {source.as_type.__name__} of {named}, got None; return an empty "
            "DataFrame from that asset, or leave out as_type of AssetSource"
        )
    return Delivery(last.partition_key or "", _version_of(last), lambda: value, replaced_by)


def _named(source: AssetSource, partition: str | None) -> str:
    return "/".join(source.path) + ("" if partition is None else f" (partition {partition})")


def _wanted(source: AssetSource, partition: str | None, **about: Any) -> dg.AssetRecordsFilter:
    only = None if partition is None else [partition]
    return dg.AssetRecordsFilter(dg.AssetKey(source.path), asset_partitions=only, **about)


def _materialization(
    context: dg.AssetExecutionContext, node: Stream, source: AssetSource, partition: str | None
) -> dg.EventLogRecord:
    """Returns the last materialization of the upstream asset, or of one of its partitions."""
    wanted = _wanted(source, partition)
    records = context.instance.fetch_materializations(wanted, limit=1).records
    if not records:
        raise SourceError(
            f"{node.name}: expected a materialization of {_named(source, partition)} in this Dagster "
            "instance, which identifies the delivery, got none; materialize it, or report a "
            "materialization with report_runless_asset_event"
        )
    return records[0]


def _version_of(materialization: dg.EventLogRecord) -> str:
    return f"{materialization.run_id}@{materialization.timestamp:.6f}"


# Decorators


N = TypeVar("N", bound=Stream)


class FunctionAttributes(TypedDict, total=False):
    """The name of the asset, and the inputs of the function; see :func:`versioned_table`."""

    name: str
    ins: Mapping[str, dg.AssetIn]
    deps: Iterable[Any]
    partitions_def: dg.PartitionsDefinition[Any] | None
    required_resource_keys: Iterable[str]
    max_bad_share: float
    max_clock_skew: timedelta


_OF_SOURCE = FunctionAttributes.__annotations__.keys() - {"name"}


class StreamAttributes(StreamOptions, FunctionAttributes, total=False):
    """Options of a decorated stream."""


class TableAttributes(TableOptions, FunctionAttributes, total=False):
    """Options of a decorated table."""


class VersionedTableAttributes(VersionedTableOptions, FunctionAttributes, total=False):
    """Options of a decorated versioned table."""


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
