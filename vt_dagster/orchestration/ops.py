"""Ops for graphs of your own: read -> operate -> write, each a step of a ``Run``.

Build a ``@dg.graph_asset`` from them, with your own ops in between; the ops of operators are in
``operator_ops``. The asset of ``build_asset`` is one op that does the same. Ops pass DataFrames to each
other in one process, so the job needs ``in_process_executor``; unlike that one op, they start Spark
even without new records. Every op needs the resources ``vt_dagster_spark`` (:class:`SparkResource`) and
``vt_dagster_warehouse`` (:class:`WarehouseResource`); ``resource_prefix`` sets another prefix.
"""

import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import dagster as dg
from pyspark.sql import DataFrame
from typing_extensions import TypedDict, Unpack

from vt_dagster.core.processor import RunContext
from vt_dagster.errors import ExecutorError, SourceError, TopologyError
from vt_dagster.orchestration.asset import (
    DATA_VERSION,
    data_version,
    log_arrival,
    materialized,
    needs_materialization,
    unchanged,
)
from vt_dagster.orchestration.dagster_types import (
    ArrivalType,
    considered_type,
    log_type,
    records_type,
    results_type,
)
from vt_dagster.orchestration.metadata import publication_metadata
from vt_dagster.orchestration.operator_ops import OP_MEMORY, input_nodes, log_nodes
from vt_dagster.orchestration.resources import (
    PREFIX,
    keys_of,
    spark_for,
    stores_for,
    tables_key,
    warehouse_of,
)
from vt_dagster.orchestration.run_config import SourceConfig, config_of
from vt_dagster.orchestration.translator import SpecAttributes, TopologyTranslator, asset_arguments
from vt_dagster.runs.pin import Arrival, source_of
from vt_dagster.runs.run import Results, Run
from vt_dagster.runs.truncate_log import truncate_logs
from vt_dagster.sources.kafka_sink import KafkaSink, Publication
from vt_dagster.storage.maintenance import maintain_all
from vt_dagster.topology.model import Stream, topological

TABLES = tables_key(PREFIX)
"""Resource key of the IO manager that loads tables into the user's own assets."""


def _require_one_process(context: dg.OpExecutionContext) -> None:
    """Refuses an executor with one process per step, before anything is read.

    The IO manager between the ops refuses other such executors (for example on Kubernetes).
    """
    try:
        executor = context.job_def.executor_def.name
        run_config: Any = context.run_config
        config = run_config.get("execution", {}).get("config", {})
    except dg.DagsterInvalidPropertyError:  # the op is called directly, in a test
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
    source = _declared_source(node)
    op = dg.op(
        name=name or f"read_{node.name}",
        out={
            "records": dg.Out(records_type(node), io_manager_key=OP_MEMORY),
            "arrival": dg.Out(ArrivalType, io_manager_key=OP_MEMORY),
        },
        description=f"Reads new {source.describe()}.",
        required_resource_keys=keys_of(resource_prefix),
    )

    config_type = config_of(node) or SourceConfig

    @op
    def read(
        context: dg.OpExecutionContext,
        config: config_type,  # pyright: ignore[reportInvalidTypeForm]
    ) -> tuple[DataFrame, Arrival]:
        _require_one_process(context)
        run = Run.pin(node, stores_for(context, resource_prefix), **config.asked())
        log_arrival(context.log, run.arrival)
        return run.read()[0], run.arrival

    return read


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

    def read(context: dg.OpExecutionContext, asked: dict[str, Any]) -> tuple[Any, ...]:
        _require_one_process(context)
        run = Run.pin(node, stores_for(context, resource_prefix), **asked)
        log_arrival(context.log, run.arrival)
        by_name = dict(zip((up.name for up in run.processor.consumed), run.read(), strict=True))
        return (*by_name.values(), run.arrival)

    # No return annotations: Dagster would compare the size of an annotated tuple with the outputs.
    config_type = config_of(node)
    if config_type is None:

        @op
        def read_logs(context: dg.OpExecutionContext):
            return read(context, {})

        return read_logs

    @op
    def read_logs_asked(
        context: dg.OpExecutionContext,
        config: config_type,  # pyright: ignore[reportInvalidTypeForm]
    ):
        return read(context, config.asked())

    return read_logs_asked


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
        return _output(materialized(context, stores(node), arrival, receipt))

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
        commit = way.run(context.run_id, config.from_start)
        seconds = time.monotonic() - started
        last, key = commit or way.head(), dg.AssetKey(publication)
        if commit is None:
            context.log.info(f"{publication}: nothing new in the log of {node.name}")
            if last is None or not needs_materialization(context, key, last):
                return _output(unchanged(context, key, last))
        else:
            context.log.info(
                f"{publication}: sent {commit.counts['published']:,} record(s) to {sink.describe()}, "
                f"committed batch {commit.batch} ({seconds:.1f} s)"
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
    """Op ``() -> numbers``: truncates logs, then compacts and cleans every asset of the warehouse; see
    ``truncate_logs`` and ``maintain``."""

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
            done[name]["records_cut_off"] = rows
        for name, numbers in done.items():
            context.log.info(f"{name}: {', '.join(f'{n} {what}' for what, n in numbers.items())}")
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
    node: Stream,
    *,
    translator: TopologyTranslator | None = None,
    **attributes: Unpack[SpecAttributes],
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
    ins = {
        f"after_{up.name}": dg.AssetIn(dg.AssetKey(up.path), dagster_type=dg.Nothing) for up in inputs
    }
    arguments: Any = {**about, "ins": ins}
    return arguments


def _declared_source(node: Stream) -> Any:
    try:
        return source_of(node)
    except SourceError as error:
        raise TopologyError(str(error)) from None


def _output(result: dg.MaterializeResult[Any]) -> dg.Output[None]:
    """Returns a result as the output of an op that is not an asset by itself."""
    version = result.data_version
    tags = {} if version is None else {DATA_VERSION: version.value}
    return dg.Output(None, metadata=result.metadata or {}, tags=tags)
