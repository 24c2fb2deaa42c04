"""The ops that assets are made of: read -> operator -> write.

They are public: build your own ``@dg.graph_asset`` from them, with ops of yours in between. DataFrames
pass between ops in one process, so the job needs ``in_process_executor``. Every op needs the resources
``spark`` (:class:`SparkResource`) and ``warehouse`` (:class:`WarehouseResource`).
"""

import re
import time
from datetime import timedelta
from typing import Any

import dagster as dg
from pyspark.sql import DataFrame

from vt_dagster.core.arrival import Fate
from vt_dagster.errors import ExecutorError, TopologyError
from vt_dagster.orchestration.metadata import lag_metadata, publication_metadata, run_metadata
from vt_dagster.orchestration.pictures import pictures
from vt_dagster.orchestration.resource import SparkResource, WarehouseResource
from vt_dagster.orchestration.types import (
    ArrivalType,
    considered_type,
    log_type,
    records_type,
    results_type,
)
from vt_dagster.runs import run_join, run_operator, run_source
from vt_dagster.runs.run_operator import Results
from vt_dagster.runs.run_source import Source
from vt_dagster.runs.runs import Arrival, Receipt
from vt_dagster.sources.files import FilesSource
from vt_dagster.sources.kafka import KafkaSource, as_ranges
from vt_dagster.sources.kafka_sink import KafkaSink, Publication
from vt_dagster.storage.maintenance import maintain_all
from vt_dagster.storage.store import AssetStore
from vt_dagster.topology.model import Stream
from vt_dagster.topology.operators import Operator, StreamTableJoin

OP_MEMORY = "vt_dagster_op_memory"
"""Resource key of the IO manager between ops."""
TABLES = "vt_dagster_tables"
"""Resource key of the IO manager that gives tables to a user's own assets."""


class FilesConfig(dg.Config):
    """Which files a run takes."""

    files: list[str] | None = None
    """Names in the source's directory; those consumed already are left out. None = all new ones."""


class TopicsConfig(dg.Config):
    """Which records a run takes from its topics."""

    ranges: dict[str, Any] | None = None
    """``{topic: {"partition": [start, end]}}``; what was consumed already is left out. None = all."""
    accept_gap: bool = False
    """Go on where records are gone that were not consumed; the commit records which."""


def source_of(node: Stream) -> Source:
    """Where a node's records come from.

    Raises:
        TopologyError: nowhere.
    """
    if not isinstance(node.source, FilesSource | KafkaSource):
        raise TopologyError(
            f"{node.name}: expected a source to read from, got {node.source!r}; give it one, for "
            "example source=FilesSource('data/landing/weather', format='csv')"
        )
    return node.source


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


def _store(
    context: dg.OpExecutionContext, node: Stream, spark: SparkResource, warehouse: WarehouseResource
) -> AssetStore:
    """The tables of an op's asset; what is written there is told in the run's log."""
    return AssetStore(warehouse.path, node, spark.spark_session, context.log.info)


def _new_partitions(arrival: Arrival) -> dict[str, list[int]]:
    before = arrival.before.inputs
    now = arrival.topics.ranges if arrival.topics else {}
    return {
        t: new for t, some in now.items() if t in before and (new := sorted(set(some) - set(before[t])))
    }


def _log_arrival(context: dg.OpExecutionContext, arrival: Arrival) -> None:
    if arrival.empty:
        context.log.info(f"{arrival.node.name}: nothing new since batch {arrival.before.batch}")
    elif arrival.files:
        files, size = arrival.files, sum(f.size for f in arrival.files)
        names = ", ".join(f.name for f in files[:5])
        more = f" and {len(files) - 5:,} more" if len(files) > 5 else ""
        context.log.info(
            f"{arrival.node.name}: takes {len(files):,} file(s), {size / 1000:,.1f} kB: {names}{more}"
        )
    else:
        taken = {n: sum(e - s for s, e in r.values()) for n, r in arrival.taken.items()}
        records = ", ".join(f"{number:,} of {name}" for name, number in taken.items())
        context.log.info(f"{arrival.node.name}: takes records: {records}")
    if arrival.topics is not None and arrival.topics.gaps:
        context.log.warning(
            f"{arrival.node.name}: goes on without {arrival.topics.gaps}, as it was told"
        )
    for topic, partitions in _new_partitions(arrival).items():
        context.log.info(f"{arrival.node.name}: topic {topic} has new partitions {partitions}")


def read_op(node: Stream, name: str | None = None) -> dg.OpDefinition:
    """Op ``() -> (records, arrival)``: what is new in a source, as prepared records.

    ``records`` is lazy and empty where there is nothing new. Rows that are no records (unreadable,
    no key, no timestamp, too far in the future) are among them, with their reason.
    """
    source = source_of(node)
    op = dg.op(
        name=name or f"read_{node.name}",
        out={
            "records": dg.Out(records_type(node), io_manager_key=OP_MEMORY),
            "arrival": dg.Out(ArrivalType, io_manager_key=OP_MEMORY),
        },
        description=f"Reads new {source.describe()}.",
    )

    def read(context: dg.OpExecutionContext, store: AssetStore, arrival: Arrival) -> Any:
        _log_arrival(context, arrival)
        return run_source.read_records(store, source, arrival), arrival

    if isinstance(source, FilesSource):

        @op
        def read_files(
            context: dg.OpExecutionContext,
            config: FilesConfig,
            spark: SparkResource,
            warehouse: WarehouseResource,
        ) -> tuple[DataFrame, Arrival]:
            _require_one_process(context)
            store = _store(context, node, spark, warehouse)
            return read(context, store, run_source.pin_files(store, source, config.files))

        return read_files

    @op
    def read_topics(
        context: dg.OpExecutionContext,
        config: TopicsConfig,
        spark: SparkResource,
        warehouse: WarehouseResource,
    ) -> tuple[DataFrame, Arrival]:
        _require_one_process(context)
        store = _store(context, node, spark, warehouse)
        wanted = as_ranges(config.ranges)
        return read(context, store, run_source.pin_topics(store, source, wanted, config.accept_gap))

    return read_topics


def put_op(node: Stream, name: str | None = None) -> dg.OpDefinition:
    """Op ``(records, arrival) -> considered``: which records are applied, which are late.

    A versioned table refuses a record with ``timestamp < stream time - history retention``; streams
    and plain tables apply every record.
    """

    @dg.op(
        name=name or f"put_{node.name}",
        ins={"records": dg.In(records_type(node)), "arrival": dg.In(ArrivalType)},
        out=dg.Out(considered_type(node), io_manager_key=OP_MEMORY),
        description="Decides which records are applied and which come too late.",
    )
    def put(
        records: Any, arrival: Any, spark: SparkResource, warehouse: WarehouseResource
    ) -> DataFrame:
        store = AssetStore(warehouse.path, node, spark.spark_session)
        return run_source.consider(store, arrival, records)

    return put


def write_op(node: Stream, name: str | None = None) -> dg.OpDefinition:
    """Op ``(considered, arrival) -> asset``: gate, commit to the log, then view and quarantine.

    The asset's value is nothing: what it stores is the *whole* table, of which this run added what
    its metadata counts.
    """
    source = source_of(node)

    @dg.op(
        name=name or f"write_{node.name}",
        ins={"considered": dg.In(considered_type(node)), "arrival": dg.In(ArrivalType)},
        out=dg.Out(dg.Nothing, io_manager_key=TABLES),
        description="Checks the records against their contract and commits them to the log.",
    )
    def write(
        context: dg.OpExecutionContext,
        considered: Any,
        arrival: Any,
        spark: SparkResource,
        warehouse: WarehouseResource,
    ) -> dg.Output[None]:
        store = _store(context, node, spark, warehouse)
        receipt = run_source.commit_records(store, source, arrival, considered, context.run_id)
        return _materialized(context, store, arrival, receipt)

    return write


def read_stream_op(node: Stream, join: StreamTableJoin, name: str | None = None) -> dg.OpDefinition:
    """Op ``(after upstream) -> (considered, arrival)``: a join's stream records with their fate."""

    @dg.op(
        name=name or f"read_{node.name}",
        ins={up.name: dg.In(dg.Nothing) for up in node.inputs},
        out={
            "considered": dg.Out(considered_type(join.left), io_manager_key=OP_MEMORY),
            "arrival": dg.Out(ArrivalType, io_manager_key=OP_MEMORY),
        },
        description=f"Takes what is new in the log of {join.left.name}, and what waited.",
    )
    def read_stream(
        context: dg.OpExecutionContext, spark: SparkResource, warehouse: WarehouseResource
    ) -> tuple[DataFrame, Arrival]:
        _require_one_process(context)
        stream = AssetStore(warehouse.path, join.left, spark.spark_session)
        arrival = run_join.pin_join(_store(context, node, spark, warehouse), join, stream)
        _log_arrival(context, arrival)
        return run_join.read_stream(stream, join, arrival), arrival

    return read_stream


def join_op(node: Stream, join: StreamTableJoin, name: str | None = None) -> dg.OpDefinition:
    """Op ``(considered, arrival) -> asset``: joins what is due with the table, and commits."""

    @dg.op(
        name=name or f"join_{node.name}",
        ins={"considered": dg.In(considered_type(join.left)), "arrival": dg.In(ArrivalType)},
        out=dg.Out(dg.Nothing, io_manager_key=TABLES),
        description=f"Joins {join.left.name} with {join.right.name} and commits to the log.",
    )
    def join_and_write(
        context: dg.OpExecutionContext,
        considered: Any,
        arrival: Any,
        spark: SparkResource,
        warehouse: WarehouseResource,
    ) -> dg.Output[None]:
        store = _store(context, node, spark, warehouse)
        table = AssetStore(warehouse.path, join.right, spark.spark_session)
        receipt = run_join.commit_join(store, join, arrival, considered, table, context.run_id)
        return _materialized(context, store, arrival, receipt)

    return join_and_write


def read_logs_op(node: Stream, name: str | None = None) -> dg.OpDefinition:
    """Op ``(after upstream) -> (one DataFrame for each input, arrival)``: what is new in their logs.

    The outputs have the names of the inputs; they are lazy, and empty where there is nothing new.
    """
    inputs = input_nodes(node)

    @dg.op(
        name=name or f"read_{node.name}",
        ins={f"after_{up.name}": dg.In(dg.Nothing) for up in inputs},
        out={
            **{up.name: dg.Out(log_type(up), io_manager_key=OP_MEMORY) for up in inputs},
            "arrival": dg.Out(ArrivalType, io_manager_key=OP_MEMORY),
        },
        description=f"Takes what is new in the log of {' and of '.join(up.name for up in inputs)}.",
    )
    def read_logs(  # Dagster would count the parts of a tuple's annotation
        context: dg.OpExecutionContext, spark: SparkResource, warehouse: WarehouseResource
    ):
        _require_one_process(context)
        stores = [AssetStore(warehouse.path, up, spark.spark_session) for up in inputs]
        arrival = run_operator.pin_logs(_store(context, node, spark, warehouse), stores)
        _log_arrival(context, arrival)
        return (*run_operator.read_logs(stores, arrival), arrival)

    return read_logs


def operate_op(node: Stream, name: str | None = None) -> dg.OpDefinition:
    """Op ``(one DataFrame for each input, arrival) -> results``: the operator itself.

    ``results`` are :class:`vt_dagster.runs.run_operator.Results`: rows with what becomes of them,
    lazy, and what the operator knew before.
    """
    inputs = input_nodes(node)

    @dg.op(
        name=name or f"{_verb(node)}_{node.name}",
        ins={
            **{up.name: dg.In(log_type(up)) for up in inputs},
            "arrival": dg.In(ArrivalType),
        },
        out=dg.Out(results_type(node), io_manager_key=OP_MEMORY),
        description=operator_of(node).describe(),
    )
    def operate(spark: SparkResource, warehouse: WarehouseResource, **given: Any) -> Results:
        session = spark.spark_session
        stores = [AssetStore(warehouse.path, up, session) for up in inputs]
        store = AssetStore(warehouse.path, node, session)
        arrival: Arrival = given["arrival"]
        return run_operator.results_of(store, stores, arrival, [given[up.name] for up in inputs])

    return operate


def write_results_op(node: Stream, name: str | None = None) -> dg.OpDefinition:
    """Op ``(results, arrival) -> asset``: gate, state, commit to the log, then view."""

    @dg.op(
        name=name or f"write_{node.name}",
        ins={"results": dg.In(results_type(node)), "arrival": dg.In(ArrivalType)},
        out=dg.Out(dg.Nothing, io_manager_key=TABLES),
        description="Checks the results against their contract and commits them to the log.",
    )
    def write_results(
        context: dg.OpExecutionContext,
        results: Any,
        arrival: Any,
        spark: SparkResource,
        warehouse: WarehouseResource,
    ) -> dg.Output[None]:
        store = _store(context, node, spark, warehouse)
        receipt = run_operator.commit_results(store, arrival, results, context.run_id)
        return _materialized(context, store, arrival, receipt)

    return write_results


def publish_op(node: Stream, sink: KafkaSink, publication: str) -> dg.OpDefinition:
    """Op ``(after the node) -> asset``: sends what is new in a log to a topic, and commits how far.

    Args:
        publication: the name under which the warehouse keeps the position.
    """

    @dg.op(
        name=f"publish_{publication}",
        ins={node.name: dg.In(dg.Nothing)},
        out=dg.Out(dg.Nothing, io_manager_key=TABLES),
        description=f"Sends the log of {node.name} to {sink.describe()}.",
    )
    def publish(
        context: dg.OpExecutionContext, spark: SparkResource, warehouse: WarehouseResource
    ) -> dg.Output[None]:
        started = time.monotonic()
        way = Publication(warehouse.path, publication, node, sink, spark.spark_session)
        commit = way.run(context.run_id)
        seconds = time.monotonic() - started
        if commit is None:
            context.log.info(f"{publication}: nothing new in the log of {node.name}")
        else:
            context.log.info(
                f"{publication}: sent {commit.counts['published']:,} record(s) to {sink.describe()}, "
                f"committed batch {commit.batch} ({seconds:.1f} s)"
            )
        return dg.Output(None, metadata=publication_metadata(way, commit, seconds))

    return publish


def maintenance_op(keep: timedelta) -> dg.OpDefinition:
    """Op ``() -> numbers``: compacts and cleans every asset of the warehouse; see ``maintain``."""

    @dg.op(name="maintain", description="Compacts logs and removes files that nobody needs any more.")
    def maintain(
        context: dg.OpExecutionContext, spark: SparkResource, warehouse: WarehouseResource
    ) -> dict[str, dict[str, int]]:
        done = maintain_all(warehouse.path, spark.spark_session, keep)
        for name, numbers in done.items():
            context.log.info(f"{name}: {', '.join(f'{n} {what}' for what, n in numbers.items())}")
        return done

    return maintain


def operator_of(node: Stream) -> Operator:
    """The operator of a node.

    Raises:
        TopologyError: it is a source.
    """
    if node.operator is None:
        raise TopologyError(
            f"{node.name}: expected the result of an operator, got a source; read it with read_op"
        )
    return node.operator


def input_nodes(node: Stream) -> tuple[Stream, ...]:
    """What an operator's asset consumes, each once."""
    return tuple({up.name: up for up in operator_of(node).inputs}.values())


def _verb(node: Stream) -> str:
    """The operator in Kafka's word, for the name of its op."""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", type(operator_of(node)).__name__).lower()


def _materialized(
    context: dg.OpExecutionContext, store: AssetStore, arrival: Arrival, receipt: Receipt
) -> dg.Output[None]:
    seconds = time.monotonic() - arrival.started
    metadata = run_metadata(store.node, store, receipt, seconds)
    if arrival.topics is not None and isinstance(store.node.source, KafkaSource):
        metadata |= lag_metadata(store.node.source, arrival.topics)
    if receipt.commit is None:
        context.log.info(f"{store.node.name}: nothing new, so there is no commit")
    else:
        bad = receipt.commit.counts.get(Fate.QUARANTINED, 0)
        if bad:
            context.log.warning(
                f"{store.node.name}: {bad:,} bad record(s) went to quarantine; which, and why: "
                f"{store.quarantine_path}, where batch = {receipt.commit.batch}"
            )
        metadata |= pictures(store, arrival, receipt, context.log)
    return dg.Output(None, metadata=metadata)
