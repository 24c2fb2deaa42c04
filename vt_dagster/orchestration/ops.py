"""Ops for graphs of your own: read -> operate -> write, each a step of a ``Run``.

Build a ``@dg.graph_asset`` from them, with your own ops in between. The asset of ``build_asset`` is one
op that does the same. Ops pass DataFrames to each other in one process, so the job needs
``in_process_executor``; unlike that one op, they start Spark even without new records. Every op needs
the resources ``vt_dagster_spark`` (:class:`SparkResource`) and ``vt_dagster_warehouse``
(:class:`WarehouseResource`); ``resource_prefix`` sets another prefix.

There is an op for each operator, by its name: ``filter_op``, ``stream_table_join_op``, ``suppress_op``
… All are generated from the list of operators. Call one with the stream or table that the operator
makes, as in ``filter_op(cheap)``; it returns an op ``(one DataFrame for each log, arrival) ->
results``. Inputs and output have the Dagster types of their nodes; ``results`` are :class:`Results`.
The grace period of a join is a separate step, :func:`grace_buffer_op`: the join then takes the released
and the waiting records.
"""

import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any, Protocol

import dagster as dg
from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from typing_extensions import TypedDict, Unpack

from vt_dagster.columns import OUTCOME
from vt_dagster.core.arrival_order import Outcome, union
from vt_dagster.core.processor import RunContext
from vt_dagster.core.processor_registry import processor_of
from vt_dagster.errors import ExecutorError, TopologyError, counted
from vt_dagster.orchestration.asset import (
    DATA_VERSION,
    ArrivalType,
    SourceConfig,
    config_of,
    considered_type,
    data_version,
    declared_source,
    log_arrival,
    log_type,
    materialized,
    needs_materialization,
    records_type,
    results_type,
    retried,
    unchanged,
    with_config,
)
from vt_dagster.orchestration.metadata import KINDS, publication_metadata, steps_of
from vt_dagster.orchestration.resources import (
    PREFIX,
    catalog_of,
    keys_of,
    require_key,
    spark_for,
    stores_for,
    tables_key,
    warehouse_of,
)
from vt_dagster.orchestration.translator import SpecAttributes, TopologyTranslator, asset_arguments
from vt_dagster.runs.pin import Arrival
from vt_dagster.runs.run import Results, Run
from vt_dagster.runs.truncate_log import truncate_logs
from vt_dagster.sources.kafka_sink import KafkaSink, Publication
from vt_dagster.storage.catalog import drop_without_tables
from vt_dagster.storage.maintenance import maintain_all
from vt_dagster.topology.model import Stream, topological
from vt_dagster.topology.operators import Operator

# Ops of an operator


OP_MEMORY = "vt_dagster_op_memory"
"""Resource key of the IO manager between ops."""
_RELEASED, _WAITING = "released", "waiting"


class OperatorOp(Protocol):
    """Makes the op of a stream or table that is the result of one kind of operator.

    Args:
        node: the operator's result.
        name: of the op; None = ``<operator>_<node>``.
        resource_prefix: prefix of its resource keys.

    Raises:
        TopologyError: the node is a source, or the result of another operator.
    """

    def __call__(
        self, node: Stream, name: str | None = None, *, resource_prefix: str = PREFIX
    ) -> dg.OpDefinition: ...


def _op_of(word: str) -> OperatorOp:
    def make(
        node: Stream, name: str | None = None, *, resource_prefix: str = PREFIX
    ) -> dg.OpDefinition:
        _require(node, f"{word}_op")
        return _operate(node, name or f"{word}_{node.name}", resource_prefix)

    make.__name__ = make.__qualname__ = f"{word}_op"
    make.__doc__ = f"Op of the result of a {' or '.join(KINDS[word])}. {OperatorOp.__doc__}"
    return make


_OPS = {word: _op_of(word) for word in KINDS}

aggregate_op = _OPS["aggregate"]
"""``group_by(…).aggregate(…)`` of a table or a stream, without windows."""
corrected_join_op = _OPS["corrected_join"]
"""A stream-table join that corrects its rows when late records of the table arrive
(``corrected_for``)."""
corrected_stream_join_op = _OPS["corrected_stream_join"]
"""A stream-stream join that corrects its rows when late records arrive (``corrected_for``)."""
filter_op = _OPS["filter"]
"""``filter``: the rows for which a condition holds."""
filter_not_op = _OPS["filter_not"]
"""``filter_not``: the rows for which a condition does not hold."""
flat_map_values_op = _OPS["flat_map_values"]
"""``flat_map_values``: any number of records for each record of a stream."""
foreign_key_join_op = _OPS["foreign_key_join"]
"""Two tables joined by a foreign key."""
history_join_op = _OPS["history_join"]
"""Two versioned tables joined at all times of their history."""
map_values_op = _OPS["map_values"]
"""``map_values``: the same rows with other columns."""
merge_op = _OPS["merge"]
"""``merge``: the records of several streams."""
select_key_op = _OPS["select_key"]
"""``select_key``: the records of a stream with another key."""
stream_join_op = _OPS["stream_join"]
"""Two streams joined within a time window."""
stream_table_join_op = _OPS["stream_table_join"]
"""A stream joined with a table; with a grace period, its input is the output of ``grace_buffer_op``."""
suppress_op = _OPS["suppress"]
"""``suppress``: updates held back until a time limit, or until their window closes."""
table_join_op = _OPS["table_join"]
"""Two tables joined by their keys."""
to_stream_op = _OPS["to_stream"]
"""``to_stream``: the changes of a table."""
to_table_op = _OPS["to_table"]
"""``to_table``: the table of a stream's records."""
windowed_aggregate_op = _OPS["windowed_aggregate"]
"""A stream aggregated by window: tumbling, hopping, sliding or session."""


def grace_buffer_op(
    node: Stream, name: str | None = None, *, resource_prefix: str = PREFIX
) -> dg.OpDefinition:
    """Op ``(one DataFrame for each log, arrival) -> (released, waiting)``: the grace period of a join.

    Both outputs are records of the stream with ``_outcome``, computed once and held until the commit or
    a failure. Ops in between may read them, but must pass both to the join unchanged.

    - ``released``: records that are final in this run: ``applied`` (timestamp <= stream time - grace at
      the run's end), ``late`` (timestamp < stream time - grace on arrival: they did not wait) and
      ``dropped`` (tombstones, and in an inner join records without a key). For a corrected join
      also records to be joined again, and the changes of the table that require it.
    - ``waiting``: records of this run and earlier runs that later runs release.

    Args:
        node: the result of a stream-table join or corrected join with a ``grace_period``.
        name: of the op; None = ``grace_buffer_<node>``.

    Raises:
        TopologyError: the node has no grace period, so nothing waits.
    """
    _require(node, "grace_buffer_op")
    consumed = processor_of(node).plan().consumed
    kept = considered_type(consumed[0])

    @dg.op(
        name=name or f"grace_buffer_{node.name}",
        ins={**{up.name: dg.In(log_type(up)) for up in log_nodes(node)}, "arrival": dg.In(ArrivalType)},
        out={
            name: dg.Out(kept, description=meaning, io_manager_key=OP_MEMORY)
            for name, meaning in (
                (_RELEASED, "Records that are final in this run."),
                (_WAITING, "Records that wait for stream time to pass their grace period."),
            )
        },
        description=f"Holds records of {consumed[0].name} back until their grace period is over.",
        required_resource_keys=keys_of(resource_prefix),
    )
    def buffer(context: dg.OpExecutionContext, **given: Any):
        run = Run(given["arrival"], stores_for(context, resource_prefix))
        records = run.buffer([given[up.name] for up in consumed])
        counts = dict(run.arrival.buffered)
        if counts:
            waits = counts.pop(Outcome.WAITING, 0)
            context.add_output_metadata(
                {f"records_{outcome}": n for outcome, n in counts.items()}, _RELEASED
            )
            context.add_output_metadata({"records_waiting": waits}, _WAITING)
            done = ", ".join(f"{n:,} {outcome}" for outcome, n in sorted(counts.items())) or "none"
            context.log.info(f"{node.name}: released: {done}; waiting: {waits:,}")
        waits = F.col(OUTCOME) == Outcome.WAITING
        return records.where(~waits), records.where(waits)

    return buffer


def _operate(node: Stream, name: str, prefix: str) -> dg.OpDefinition:
    plan = processor_of(node).plan()
    consumed, buffered = plan.consumed, plan.has_grace_buffer
    if buffered:
        ins = {name: dg.In(considered_type(consumed[0])) for name in (_RELEASED, _WAITING)}
    else:
        ins = {up.name: dg.In(log_type(up)) for up in log_nodes(node)}

    @dg.op(
        name=name,
        ins={**ins, "arrival": dg.In(ArrivalType)},
        out=dg.Out(results_type(node), io_manager_key=OP_MEMORY),
        description=operator_of(node).describe(),
        required_resource_keys=keys_of(prefix),
    )
    def operate(context: dg.OpExecutionContext, **given: Any) -> Results:
        run = Run(given["arrival"], stores_for(context, prefix))
        if buffered:
            return run.join(union(given[_RELEASED], given[_WAITING]))
        return run.operate([given[up.name] for up in consumed])

    return operate


def operator_of(node: Stream) -> Operator:
    """Returns the operator of a node.

    Raises:
        TopologyError: the node is a source.
    """
    if node.operator is None:
        raise TopologyError(
            f"{node.name}: expected the result of an operator, got a source; read it with read_op"
        )
    return node.operator


def input_nodes(node: Stream) -> tuple[Stream, ...]:
    """Returns the inputs of an operator's asset, each once."""
    return tuple({up.name: up for up in operator_of(node).inputs}.values())


def log_nodes(node: Stream) -> tuple[Stream, ...]:
    """Returns the inputs whose logs an operator consumes, each once."""
    return tuple({up.name: up for up in processor_of(node).plan().consumed}.values())


def _require(node: Stream, op: str) -> None:
    """Raises TopologyError if an op is no step of a node."""
    word, steps = operator_of(node).word, steps_of(node)
    if op not in steps:
        raise TopologyError(
            f"{node.name}: expected an op of a {word.replace('_', ' ')}, got {op}; make its graph of "
            f"{' -> '.join(steps)}"
        )


# Ops


TABLES = tables_key(PREFIX)
"""Resource key of the IO manager that loads tables into the user's own assets."""


def _pinned(
    context: dg.OpExecutionContext, node: Stream, prefix: str, pin_arguments: Mapping[str, Any]
) -> Run:
    """Returns the run of a graph. Before anything is read, it refuses a graph whose asset has another
    key than the node, and another process for each step."""
    _require_one_process(context)
    if context.has_assets_def:
        require_key(node, context.assets_def.keys)
    run = Run.pin(node, stores_for(context, prefix), **pin_arguments)
    log_arrival(context.log, run.arrival)
    return run


def _require_one_process(context: dg.OpExecutionContext) -> None:
    """Refuses an executor with one process per step, before anything is read.

    The IO manager between the ops refuses other such executors (for example on Kubernetes).
    """
    try:
        executor = context.job_def.executor_def.name
        run_config: Any = context.run_config
        config = run_config.get("execution", {}).get("config", {})
    except dg.DagsterError:  # the op is called directly, in a test
        return
    default = executor == "multi_or_in_process_executor" and "in_process" not in config
    if default or executor == "multiprocess":
        raise ExecutorError(
            f"expected an executor that keeps a run in one process, got {executor!r}: vt_dagster's ops "
            "pass Spark DataFrames to each other, which cannot leave their process. Set "
            "executor=dagster.in_process_executor on the Definitions, or executor_def on the job"
        )


def read_op(node: Stream, name: str | None = None, *, resource_prefix: str = PREFIX) -> dg.OpDefinition:
    """Op ``() -> (records, arrival)``: reads new input of a source, as prepared records.

    ``records`` is lazy, and empty without new input. It includes invalid rows (unreadable, no key, no
    timestamp, too far in the future) with their reason.
    """
    op = dg.op(
        name=name or f"read_{node.name}",
        out={
            "records": dg.Out(records_type(node), io_manager_key=OP_MEMORY),
            "arrival": dg.Out(ArrivalType, io_manager_key=OP_MEMORY),
        },
        description=f"Reads new {declared_source(node).describe()}.",
        required_resource_keys=keys_of(resource_prefix),
    )

    def read(
        context: dg.OpExecutionContext, pin_arguments: dict[str, Any]
    ) -> tuple[DataFrame, Arrival]:
        run = _pinned(context, node, resource_prefix, pin_arguments)
        return run.read()[0], run.arrival

    return op(with_config(config_of(node) or SourceConfig, read))


def put_op(node: Stream, name: str | None = None, *, resource_prefix: str = PREFIX) -> dg.OpDefinition:
    """Op ``(records, arrival) -> considered``: decides which records are applied and which are late.

    A versioned table rejects a record with ``timestamp < stream time - history retention``; streams
    and plain tables apply every record.
    """

    @dg.op(
        name=name or f"put_{node.name}",
        ins={"records": dg.In(records_type(node)), "arrival": dg.In(ArrivalType)},
        out=dg.Out(considered_type(node), io_manager_key=OP_MEMORY),
        description="Decides which records are applied and which are late.",
        required_resource_keys=keys_of(resource_prefix),
    )
    def put(context: dg.OpExecutionContext, records: Any, arrival: Any) -> DataFrame:
        return Run(arrival, stores_for(context, resource_prefix)).operate([records]).rows

    return put


def read_logs_op(
    node: Stream, name: str | None = None, *, resource_prefix: str = PREFIX
) -> dg.OpDefinition:
    """Op ``(after upstream) -> (one DataFrame for each log, arrival)``: reads new log rows of an
    operator's inputs.

    The outputs have the names of the inputs; they are lazy, and empty without new rows. For a join with
    grace they include log rows of earlier runs that may still wait.
    """
    inputs, logs = input_nodes(node), log_nodes(node)

    op = dg.op(
        name=name or f"read_{node.name}",
        ins={f"after_{up.name}": dg.In(dg.Nothing) for up in inputs},
        out={
            **{up.name: dg.Out(log_type(up), io_manager_key=OP_MEMORY) for up in logs},
            "arrival": dg.Out(ArrivalType, io_manager_key=OP_MEMORY),
        },
        description=f"Reads new rows of the log of {' and of '.join(up.name for up in logs)}.",
        required_resource_keys=keys_of(resource_prefix),
    )

    def read(context: dg.OpExecutionContext, pin_arguments: dict[str, Any]) -> tuple[Any, ...]:
        run = _pinned(context, node, resource_prefix, pin_arguments)
        by_name = dict(zip((up.name for up in run.plan.consumed), run.read(), strict=True))
        return (*by_name.values(), run.arrival)

    return op(with_config(config_of(node), read))


def write_op(
    node: Stream, name: str | None = None, *, resource_prefix: str = PREFIX
) -> dg.OpDefinition:
    """Op ``(results, arrival) -> asset``: gate, state, commit to the log, then view and quarantine.

    For a source, ``results`` is the output of ``put_op``. Without new records, it logs an observation
    and no materialization.
    """
    is_source = node.operator is None

    @dg.op(
        name=name or f"write_{node.name}",
        ins={
            "results": dg.In(considered_type(node) if is_source else results_type(node)),
            "arrival": dg.In(ArrivalType),
        },
        out=dg.Out(dg.Nothing, io_manager_key=TABLES),
        description="Checks the results against their contract and commits them to the log.",
        required_resource_keys=keys_of(resource_prefix),
    )
    def write(context: dg.OpExecutionContext, results: Any, arrival: Any) -> dg.Output[None]:
        stores = stores_for(context, resource_prefix)
        given = Results(results, RunContext.nothing()) if is_source else results
        receipt = Run(arrival, stores).commit(given, context.run_id)
        return _output(materialized(context, stores(node), arrival, receipt, resource_prefix))

    return write


class PublicationConfig(dg.Config):
    """The config of a run of a publication."""

    from_start: bool = False
    """Publish the whole log from its first record on, after the log or the topic was replaced."""


def publish_op(
    node: Stream, sink: KafkaSink, publication: str, *, resource_prefix: str = PREFIX
) -> dg.OpDefinition:
    """Op ``(after the node) -> asset``: sends new log rows to a topic, and commits the position.

    Args:
        publication: the name of the position in the warehouse.
    """

    @dg.op(
        name=f"publish_{publication}",
        ins={node.name: dg.In(dg.Nothing)},
        out=dg.Out(dg.Nothing, io_manager_key=TABLES),
        description=f"Sends the log of {node.name} to {sink.describe()}.",
        required_resource_keys=keys_of(resource_prefix),
    )
    def publish(context: dg.OpExecutionContext, config: PublicationConfig) -> dg.Output[None]:
        started, spark = time.monotonic(), spark_for(context, resource_prefix)
        way = Publication(warehouse_of(context, resource_prefix), publication, node, sink, spark)
        commit = retried(context, way.head, lambda: way.run(context.run_id, config.from_start))
        seconds = time.monotonic() - started
        last = commit or way.head()
        # The loaders of Dagster may have given the asset another key.
        (key,) = context.assets_def.keys if context.has_assets_def else [dg.AssetKey(publication)]
        if commit is None:
            context.log.info(f"{publication}: nothing new in the log of {node.name}")
            if last is None or not needs_materialization(context, key, last):
                return _output(unchanged(context, key, last))
        else:
            context.log.info(
                f"{publication}: sent {counted(commit.counts['published'], 'record')} to "
                f"{sink.describe()}, committed batch {commit.batch} ({seconds:.1f} s)"
            )
        assert last is not None
        metadata = publication_metadata(last, seconds)
        return _output(dg.MaterializeResult(metadata=metadata, data_version=data_version(last)))

    return publish


def maintenance_op(
    keep: timedelta,
    nodes: Sequence[Stream] = (),
    exports: Sequence[str] = (),
    *,
    resource_prefix: str = PREFIX,
) -> dg.OpDefinition:
    """Op ``() -> numbers``: truncates logs, then compacts and cleans every asset of the warehouse, and
    drops the names of removed tables from its catalog; see ``truncate_logs``, ``maintain`` and
    ``drop_without_tables``."""

    @dg.op(
        name="maintain",
        description="Compacts logs and removes files that are no longer needed.",
        required_resource_keys=keys_of(resource_prefix),
    )
    def maintain(context: dg.OpExecutionContext) -> dict[str, dict[str, int]]:
        spark, warehouse = spark_for(context, resource_prefix), warehouse_of(context, resource_prefix)
        cut = {}
        if any(node.log_retention is not None for node in topological(nodes)):
            about: Any = {"exports": exports, "keep": keep, "tell": context.log.info}
            cut = truncate_logs(warehouse, spark(), nodes, **about)
        done = maintain_all(warehouse, spark(), keep)
        for name, rows in cut.items():
            done[name]["records_truncated"] = rows
        for name, numbers in done.items():
            context.log.info(f"{name}: {', '.join(f'{n} {what}' for what, n in numbers.items())}")
        catalog = catalog_of(context, resource_prefix)
        if catalog is not None:
            for name in drop_without_tables(spark(), catalog, warehouse):
                context.log.info(f"dropped {catalog}.{name}: its asset has no tables any more")
        return done

    return maintain


class GraphArguments(TypedDict):
    """The arguments of ``dg.graph_asset`` from an asset's spec."""

    key: dg.AssetKey
    ins: Mapping[str, dg.AssetIn]
    description: str | None
    group_name: str | None
    owners: Sequence[str] | None
    kinds: set[str]
    tags: Mapping[str, str]
    metadata: Mapping[str, Any]
    code_version: str | None
    automation_condition: dg.AutomationCondition[Any] | None
    partitions_def: dg.PartitionsDefinition[Any] | None


def graph_arguments(
    node: Stream, *, translator: TopologyTranslator | None = None, **attributes: Unpack[SpecAttributes]
) -> GraphArguments:
    """Returns the arguments of ``dg.graph_asset`` for a stream or table that is a graph of ops.

    Key, description, group, owners, metadata and all others equal those of ``build_asset``. The graph
    has a parameter ``after_<input>`` for each input stream and table, to pass to ``read_logs_op``; the
    graph of a source has none.

    Args:
        translator, attributes: as in ``build_asset``.

    Raises:
        TopologyError: a freshness policy was set, which Dagster does not accept for a graph.
    """
    about: Any = asset_arguments(node, translator, attributes)
    del about["deps"]
    if about.pop("freshness_policy") is not None:
        raise TopologyError(
            f"{node.name}: expected no freshness_policy, which a graph asset does not take, got one; "
            "attach it with dagster.apply_freshness_policy, or use build_asset"
        )
    inputs = () if node.operator is None else input_nodes(node)
    about["ins"] = {
        f"after_{up.name}": dg.AssetIn(dg.AssetKey(up.path), dagster_type=dg.Nothing) for up in inputs
    }
    return about


def _output(result: dg.MaterializeResult[Any]) -> dg.Output[None]:
    """Returns a result as the output of an op that is not an asset by itself."""
    version = result.data_version
    tags = {} if version is None else {DATA_VERSION: version.value}
    return dg.Output(None, metadata=result.metadata or {}, tags=tags)
