"""Ops for graphs of your own: read -> operate -> write, each a step of a ``Run``.

Build a ``@dg.graph_asset`` from them, with ops of yours in between; the op of each operator is in
``operator_ops``. The asset of ``build_asset`` is one op that does the same. DataFrames pass between ops
in one process, so the job needs ``in_process_executor``; and unlike that one op they start Spark also
where nothing is new. Every op needs the resources ``vt_dagster_spark`` (:class:`SparkResource`) and
``vt_dagster_warehouse`` (:class:`WarehouseResource`); ``resource_prefix`` says another beginning.
"""

import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import dagster as dg
from pyspark.sql import DataFrame
from typing_extensions import TypedDict, Unpack

from vt_dagster.core.run_context import RunContext
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
from vt_dagster.runs.arrival import Arrival
from vt_dagster.runs.pin import source_of
from vt_dagster.runs.results import Results
from vt_dagster.runs.run import Run
from vt_dagster.runs.truncate_log import truncate_logs
from vt_dagster.sources.kafka_sink import KafkaSink, Publication
from vt_dagster.storage.maintenance import maintain_all
from vt_dagster.topology.model import Stream, topological

TABLES = tables_key(PREFIX)
"""Resource key of the IO manager that gives tables to a user's own assets."""


def _require_one_process(context: dg.OpExecutionContext) -> None:
    """Refuses an executor that gives each step a process of its own, before anything is read.

    Other such executors (on Kubernetes, say) are refused by the IO manager between the ops.
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
    """Op ``() -> (records, arrival)``: what is new in a source, as prepared records.

    ``records`` is lazy and empty where there is nothing new. Rows that are no records (unreadable,
    no key, no timestamp, too far in the future) are among them, with their reason.
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
    """Op ``(records, arrival) -> considered``: which records are applied, which are late.

    A versioned table refuses a record with ``timestamp < stream time - history retention``; streams
    and plain tables apply every record.
    """

    @dg.op(
        name=name or f"put_{node.name}",
        ins={"records": dg.In(records_type(node)), "arrival": dg.In(ArrivalType)},
        out=dg.Out(considered_type(node), io_manager_key=OP_MEMORY),
        description="Decides which records are applied and which come too late.",
        required_resource_keys=keys_of(resource_prefix),
    )
    def put(context: dg.OpExecutionContext, records: Any, arrival: Any) -> DataFrame:
        return Run(arrival, stores_for(context, resource_prefix)).operate([records]).rows

    return put


def read_logs_op(
    node: Stream, name: str | None = None, *, resource_prefix: str = PREFIX
) -> dg.OpDefinition:
    """Op ``(after upstream) -> (one DataFrame for each log, arrival)``: what is new in an operator's
    inputs.

    The outputs have the names of the inputs; they are lazy, and empty where there is nothing new. Of a
    join with grace, log rows of earlier runs that may wait are among them.
    """
    inputs, logs = input_nodes(node), log_nodes(node)

    op = dg.op(
        name=name or f"read_{node.name}",
        ins={f"after_{up.name}": dg.In(dg.Nothing) for up in inputs},
        out={
            **{up.name: dg.Out(log_type(up), io_manager_key=OP_MEMORY) for up in logs},
            "arrival": dg.Out(ArrivalType, io_manager_key=OP_MEMORY),
        },
        description=f"Takes what is new in the log of {' and of '.join(up.name for up in logs)}.",
        required_resource_keys=keys_of(resource_prefix),
    )

    def read(context: dg.OpExecutionContext, asked: dict[str, Any]) -> tuple[Any, ...]:
        _require_one_process(context)
        run = Run.pin(node, stores_for(context, resource_prefix), **asked)
        log_arrival(context.log, run.arrival)
        by_name = dict(zip((up.name for up in run.processor.consumed), run.read(), strict=True))
        return (*by_name.values(), run.arrival)

    # Without annotations of what they return: Dagster would count the parts of a tuple's.
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

    Of a source ``results`` are what ``put_op`` gives. Where nothing is new, it leaves an observation
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
    """What a run of a publication takes."""

    from_start: bool = False
    """The whole log from its first record on: where the log or the topic is another one than before."""


def publish_op(
    node: Stream, sink: KafkaSink, publication: str, *, resource_prefix: str = PREFIX
) -> dg.OpDefinition:
    """Op ``(after the node) -> asset``: sends what is new in a log to a topic, and commits how far.

    Args:
        publication: the name under which the warehouse keeps the position.
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
    """Op ``() -> numbers``: cuts logs off, then compacts and cleans every asset of the warehouse; see
    ``truncate_logs`` and ``maintain``."""

    @dg.op(
        name="maintain",
        description="Compacts logs and removes files that nobody needs any more.",
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
    """What ``dg.graph_asset`` takes of an asset's spec."""

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
    """The arguments of ``dg.graph_asset`` for the asset of a stream or table that is a graph of ops.

    Key, description, group, owners, metadata and all else are those of ``build_asset``. The graph has
    a parameter ``after_<input>`` for each stream and table that the node is made of, which
    ``read_logs_op`` takes; that of a source has none.

    Args:
        translator, attributes: as of ``build_asset``.

    Raises:
        TopologyError: a freshness policy, which Dagster takes of no graph.
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
    """The same from an op that is not an asset by itself."""
    version = result.data_version
    tags = {} if version is None else {DATA_VERSION: version.value}
    return dg.Output(None, metadata=result.metadata or {}, tags=tags)
