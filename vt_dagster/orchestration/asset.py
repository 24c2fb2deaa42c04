"""The asset of a stream or table: its op carries out a ``Run``, that is pin, read, operate, commit.

Without new records, the op ends before it needs Spark and logs an observation instead of a
materialization: downstream assets get no run request, and those in the same run check for new input
themselves.

The run config names the input that a run consumes from its source. Values between ops have Dagster
types: Spark DataFrames with their required columns.
"""

import re
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from inspect import Parameter
from typing import Any, TypeVar, cast

import dagster as dg
from pyspark.sql.types import StringType, StructField, StructType
from typing_extensions import Unpack

from vt_dagster.columns import ARRIVAL, IS_TOMBSTONE, OUTCOME, PARTITION, TIMESTAMP
from vt_dagster.core.arrival_order import Outcome
from vt_dagster.core.log_columns import log_columns
from vt_dagster.core.stream_table_join import TOO_LATE
from vt_dagster.errors import ConcurrentRunError, ContractError, SourceError, TopologyError, counted
from vt_dagster.orchestration.decorators import (
    Inputs,
    delivered_frames,
    partitions_of,
    reported_batch,
    reporter,
)
from vt_dagster.orchestration.metadata import (
    comments_of,
    lag_metadata,
    pictures,
    positions_of,
    run_metadata,
)
from vt_dagster.orchestration.resources import (
    PREFIX,
    catalog_of,
    expect_few_rows,
    keys_of,
    node_of_op,
    require_key,
    stores_for,
    tables_key,
)
from vt_dagster.orchestration.translator import SpecAttributes, TopologyTranslator, asset_arguments
from vt_dagster.runs.gate import misfits
from vt_dagster.runs.pin import Arrival, declares_ready, source_of
from vt_dagster.runs.run import Receipt, Results, Run
from vt_dagster.sources.base import delivered
from vt_dagster.sources.delta_source import DeltaSource
from vt_dagster.sources.files_source import FilesSource
from vt_dagster.sources.frame_sources import FrameSource, batch_of_delivery
from vt_dagster.sources.kafka_cluster import as_ranges
from vt_dagster.sources.kafka_source import KafkaSource, PinnedTopics
from vt_dagster.sources.snapshot_source import SnapshotSource
from vt_dagster.storage.asset_store import AssetStore
from vt_dagster.storage.catalog import register
from vt_dagster.storage.commit_log import Commit
from vt_dagster.storage.spark_reader import Head
from vt_dagster.topology.model import Stream
from vt_dagster.topology.options import check_arguments, set_options
from vt_dagster.topology.specification import tokens

# Dagster types


RESULTS = (TIMESTAMP, PARTITION, IS_TOMBSTONE, ARRIVAL, OUTCOME)
"""Columns that rows before the commit have in addition to their schema."""


def problems_of(node: Stream, what: str, more: tuple[str, ...], value: Any) -> str | None:
    """Returns the problems of a DataFrame before the commit of a stream or table; None = no problem."""
    # Spark DataFrames, classic or of Spark Connect, have no common class.
    if not (hasattr(value, "schema") and hasattr(value, "sparkSession")):
        return (
            f"expected a Spark DataFrame with {what} of {node.name!r}, got "
            f"{type(value).__module__}.{type(value).__qualname__}; return the Spark DataFrame "
            "itself from the op before"
        )
    problems = misfits(value, node.schema, more)
    if not problems:
        return None
    return (
        f"expected {what} of {node.name!r}: {'; '.join(problems)}; correct the op before, or the "
        "asset's schema"
    )


def _frame_type(node: Stream, what: str, more: tuple[str, ...], meaning: str) -> dg.DagsterType:
    def check(_: Any, value: Any) -> dg.TypeCheck:
        wrong = problems_of(node, what, more, value)
        return dg.TypeCheck(success=wrong is None, description=wrong)

    columns = [dg.TableColumn(f.name, f.dataType.simpleString()) for f in node.schema.fields]
    return dg.DagsterType(
        check,
        name=f"{node.name}_{what}",
        description=f"{meaning} Columns: those of {node.name!r}, {', '.join(more)}.",
        metadata={"dagster/column_schema": dg.TableSchema(columns=columns)},
    )


@cache
def records_type(node: Stream) -> dg.DagsterType:
    """Records of a source as read: the node's columns, timestamp, order of arrival."""
    return _frame_type(node, "records", RESULTS, "Records as read, without an outcome.")


@cache
def considered_type(node: Stream) -> dg.DagsterType:
    """A source's records with their outcomes: applied, late, quarantined."""
    return _frame_type(node, "considered", RESULTS, "Records with their outcomes in this run.")


@cache
def log_type(node: Stream) -> dg.DagsterType:
    """Log rows of a stream or table that are the input of a run."""
    return _frame_type(node, "log", tuple(log_columns(node)), "Log rows that a run takes.")


@cache
def results_type(node: Stream) -> dg.DagsterType:
    """The results of an operator's run with their outcomes, before the commit."""
    meaning = "An operator's results, and its state for the next run."
    frame = _frame_type(node, "results", RESULTS, meaning)

    def check(context: Any, value: Any) -> dg.TypeCheck:
        if not isinstance(value, Results):
            return dg.TypeCheck(
                success=False,
                description=f"expected the Results of {node.name!r}, got "
                f"{type(value).__module__}.{type(value).__qualname__}; return "
                "vt_dagster.runs.run.Results(rows, known) from the op before",
            )
        return cast(dg.TypeCheck, frame.type_check(context, value.rows))

    return dg.DagsterType(
        check, name=f"{node.name}_results", description=frame.description, metadata=frame.metadata
    )


ArrivalType = dg.DagsterType(
    lambda _, value: isinstance(value, Arrival),
    name="Arrival",
    description="The input of one run: files or offset ranges, pinned when it starts.",
    typing_type=Arrival,
)


# Run config


class SourceConfig(dg.Config):
    """The config of an asset with a source: arguments of the source's ``pin``."""

    def arguments(self) -> dict[str, Any]:
        """Returns the arguments of ``Source.pin``."""
        return self.model_dump()


class FilesConfig(SourceConfig):
    """Which files a run takes."""

    files: list[str] | None = None
    """Names in the source's directory; files already consumed are skipped. None = all new files."""

    def arguments(self) -> dict[str, Any]:
        return {"only": self.files}


class TopicsConfig(SourceConfig):
    """Which records a run takes from its topics."""

    ranges: dict[str, Any] | None = None
    """``{topic: {"partition": [start, end]}}``; records already consumed are skipped. None = all."""
    accept_gap: bool = False
    """Continue after a gap of lost records that were not consumed; the commit records the gap."""

    def arguments(self) -> dict[str, Any]:
        return {"wanted": as_ranges(self.ranges), "accept_gap": self.accept_gap}


class VersionsConfig(SourceConfig):
    """Which versions of a Delta table a run takes."""

    version: int | None = None
    """The last version (inclusive); versions already consumed are skipped. None = the newest."""
    accept_gap: bool = False
    """Continue after a gap of lost versions that were not consumed; the commit records the gap."""
    accept_shrink: bool = False
    """Accept a full snapshot that is empty, or deletes more than ``max_shrink``."""


class DumpConfig(SourceConfig):
    """Which dump a run takes."""

    dump: str | None = None
    """Name of the last dump; unconsumed dumps before it come first. None = the next."""
    accept_shrink: bool = False
    """Accept a dump that is empty, or deletes more than ``max_shrink``."""


class JoinConfig(SourceConfig):
    """Whether a run waits for tables to be ready."""

    accept_not_ready: bool = False
    """Join with tables that are not ready, or whose history retention no longer covers waiting records;
    the commit records which."""


_CONFIGS: dict[type[Any], type[SourceConfig]] = {
    DeltaSource: VersionsConfig,
    FilesSource: FilesConfig,
    KafkaSource: TopicsConfig,
    SnapshotSource: DumpConfig,
}


def config_of(node: Stream) -> type[SourceConfig] | None:
    """Returns the config class of an asset; None if it has no config."""
    if node.operator is not None:
        return JoinConfig if node.operator.waits_for and declares_ready(node) else None
    return next((one for kind, one in _CONFIGS.items() if isinstance(node.source, kind)), None)


def with_config(
    config_type: type[SourceConfig] | None, compute: Callable[[Any, dict[str, Any]], Any]
) -> Callable[..., Any]:
    """Returns the function of an op: it takes a config if there is a config class.

    Args:
        compute: takes the context, and the arguments of ``Source.pin``.
    """

    def plain(context: Any) -> Any:
        return compute(context, {})

    def configured(context: Any, config: Any) -> Any:
        return compute(context, config.arguments())

    # Dagster reads the class of the config, and takes no ``Any`` for a context.
    plain.__annotations__ = {}
    configured.__annotations__ = {"config": config_type}
    return plain if config_type is None else configured


# Asset


DATA_VERSION = "dagster/data_version"
"""The tag of a materialization that holds its data version."""
_TRIES = 20
"""How often a run tries again after another run of the asset, or of another partition, has committed
first."""
_Result = TypeVar("_Result")
_BACKFILL = "dagster/backfill"
"""Dagster's tag of the runs of a backfill."""
_NO_EVENT = "__source_asset_observation__"
"""Dagster's metadata key for observations of sources: it records no materialization of such outputs."""


@check_arguments()
def build_asset(
    node: Stream,
    *,
    translator: TopologyTranslator | None = None,
    pool: str | None = None,
    retry_policy: dg.RetryPolicy | None = None,
    resource_prefix: str = PREFIX,
    **attributes: Unpack[SpecAttributes],
) -> dg.AssetsDefinition:
    """Returns the asset of a stream or table: one op that ends in one commit.

    The asset returns no value: it stores the *whole* table, and its metadata counts what a run added.
    Its data version identifies the log and its number of records. A run without new records starts no
    Spark and logs an observation, not a materialization.

    Args:
        translator: returns the asset's spec; None = a :class:`TopologyTranslator`.
        pool: the Dagster concurrency pool of its runs.
        retry_policy: when a failed step is retried; records that it committed count once.
        resource_prefix: prefix of its resource keys: ``<prefix>_spark``, ``_warehouse`` and
            ``_tables``.
        attributes: added to the spec: ``tags``, ``owners``, ``kinds`` and ``metadata``; replaced in the
            spec: ``description``, ``group_name``, ``code_version``, ``automation_condition`` and
            ``freshness_policy``.

    Raises:
        TopologyError: the node has neither a source nor an operator, or its spec has another key.
    """
    about = asset_arguments(node, translator, attributes)
    about |= {"pool": pool, "retry_policy": retry_policy}
    about |= {"required_resource_keys": keys_of(resource_prefix)}
    about |= {"io_manager_key": tables_key(resource_prefix)}
    made = _asset_of(node, about, resource_prefix)
    node_of_op(made.node_def, node, resource_prefix)
    return made


def _asset_of(node: Stream, about: dict[str, Any], resource_prefix: str) -> dg.AssetsDefinition:
    if node.operator is None and isinstance(source := declared_source(node), FrameSource):
        return _of_frames(node, source, about, resource_prefix)

    def run(context: dg.AssetExecutionContext, pin_arguments: Mapping[str, Any]) -> Any:
        return _run(context, node, resource_prefix, pin_arguments)

    return cast(dg.AssetsDefinition, dg.asset(**about)(with_config(config_of(node), run)))


def declared_source(node: Stream) -> Any:
    """Returns the source of a stream or table.

    Raises:
        TopologyError: the node has no source.
    """
    try:
        return source_of(node)
    except SourceError as error:
        raise TopologyError(str(error)) from None


def _of_frames(
    node: Stream, source: FrameSource, about: dict[str, Any], prefix: str
) -> dg.AssetsDefinition:
    inputs = Inputs.of(node, source)
    about = about | {"ins": inputs.ins, "deps": [*about["deps"], *inputs.deps]}
    about["required_resource_keys"] = about["required_resource_keys"] | inputs.required_resource_keys

    def of_frames(context: dg.AssetExecutionContext, **values: Any) -> dg.MaterializeResult[Any]:
        with delivered_frames(context, node, source, values) as deliveries:
            return _run(context, node, prefix, {"source": deliveries})

    of_frames.__signature__ = inputs.signature  # type: ignore[attr-defined]
    hints = {name: one.annotation for name, one in inputs.signature.parameters.items()}
    of_frames.__annotations__ = {n: hint for n, hint in hints.items() if hint is not Parameter.empty}
    return cast(dg.AssetsDefinition, dg.asset(**about)(of_frames))


def _run(
    context: dg.AssetExecutionContext, node: Stream, prefix: str, pin_arguments: Mapping[str, Any]
) -> dg.MaterializeResult[Any]:
    require_key(node, [context.asset_key])
    stores = stores_for(context, prefix)

    def last() -> Commit | None:
        head = stores(node).head()
        return None if head is None else head.commit

    def before_spark(arrival: Arrival) -> None:
        if arrival.small:
            expect_few_rows(context, prefix, node, arrival.before.total)

    def once() -> dg.MaterializeResult[Any]:
        run = Run.pin(node, stores, before_spark=before_spark, **pin_arguments)
        log_arrival(context.log, run.arrival)
        if run.arrival.empty:
            return materialized(context, stores(node), run.arrival, Receipt(None, None), prefix)
        results = run.operate(run.read())
        wrong = problems_of(node, "results", RESULTS, results.rows)
        if wrong:
            raise ContractError(wrong)
        receipt = run.commit(results, context.run.run_id)
        return materialized(context, stores(node), run.arrival, receipt, prefix)

    return retried(context, last, once)


def retried(context: Any, last: Callable[[], Commit | None], once: Callable[[], _Result]) -> _Result:
    """Runs an asset. If another run commits first, for example because the sensors of two sources
    request the same join, it tries again with the remaining records, which would otherwise wait for the
    next input.

    Args:
        last: returns the asset's last commit.
        once: runs the asset, and returns its result.
    """

    def attempt() -> str:
        commit = last()
        return "" if commit is None else commit.attempt

    for _ in range(_TRIES):
        before = attempt()
        try:
            return once()
        except ConcurrentRunError as error:
            if attempt() == before:  # an erase, a swap of an input or a clean-up
                raise
            context.log.info(f"tries again, because of: {error}")
    return once()


def log_arrival(log: dg.DagsterLogManager, arrival: Arrival) -> None:
    """Logs the input of a run, or that there is none."""
    name = arrival.node.name
    if arrival.not_ready:
        tables, some = " and ".join(arrival.not_ready), counted(arrival.waiting, "record")
        warning = (
            f"holds {some} until {tables} is ready" if arrival.empty else f"goes on though {tables} is"
        )
        log.warning(f"{name}: {warning}{'' if arrival.empty else ' not ready (accept_not_ready)'}")
    elif arrival.empty:
        log.info(f"{name}: nothing new since batch {arrival.before.batch}, so there is no commit")
    elif arrival.source is None:
        taken = {n: sum(e - s for s, e in r.values()) for n, r in arrival.taken.items()}
        records = ", ".join(f"{number:,} of {log}" for log, number in taken.items())
        log.info(f"{name}: takes records: {records}")
    else:
        taken = [one for one in (arrival.source, arrival.start) if one is not None and not one.empty]
        columns = delivered(arrival.node)
        # Conditions such as deleted_when may read columns that the table does not have.
        columns = StructType([*columns.fields, *columns_of_expressions(arrival.node)])
        for line in (line for one in taken for line in one.describe(columns)):
            tell = log.warning if line.startswith("!") else log.info
            tell(f"{name}: {line.removeprefix('!')}")


def columns_of_expressions(node: Stream) -> list[StructField]:
    """Returns a text column for each name in the expressions over the columns of the node's source."""
    typed = [one for one in set_options(node) if one.sql is not None and one.sql.types]
    texts = [text for one in typed if isinstance(text := getattr(node, one.name), str)]
    names = set[str]()
    for text in texts:
        known = {token.value for token in tokens(text) if token.is_name}  # tokens are in lower case
        names |= {word for word in re.findall(r"\w+", text) if word.lower() in known}
    return [StructField(name, StringType()) for name in sorted(names)]


def materialized(
    context: Any, store: AssetStore, arrival: Arrival, receipt: Receipt, prefix: str
) -> dg.MaterializeResult[Any]:
    """Returns the result of an asset's op: the metadata of its run, or of an empty run. Registers the
    tables of a commit in the warehouse's catalog, if it has one."""
    node, head = store.node, store.head()
    key, last, of_another_run = dg.AssetKey(node.path), None if head is None else head.commit, False
    if receipt.commit is None:
        if partitions_of(node) is not None:
            return _of_partition(context, key, store, head)
        if head is None or not needs_materialization(context, key, head.commit):
            return unchanged(context, key, last, arrival)
        receipt = Receipt(head.commit, head.version)
        of_another_run = head.commit.run_id != context.run.run_id
    commit = receipt.commit
    assert commit is not None
    seconds = time.monotonic() - arrival.started
    shown: dict[str, Any] = {}
    if isinstance(arrival.source, PinnedTopics):
        shown |= lag_metadata(arrival.source)
    bad = commit.counts.get(Outcome.QUARANTINED, 0)
    if bad:
        context.log.warning(
            f"{node.name}: {counted(bad, 'bad record was', 'bad records were')} quarantined; see them "
            f"with their reasons in {store.quarantine_path}, where batch = {commit.batch}"
        )
    late = commit.counts.get(TOO_LATE, 0)
    if late:
        context.log.warning(
            f"{node.name}: {counted(late, 'row was', 'rows were')} not corrected, because a record of "
            f"the table came after corrected_for; see both in {store.quarantine_path}, where batch = "
            f"{commit.batch}"
        )
    if not arrival.empty:
        shown |= pictures(store, arrival, receipt, context.log)
    catalog = catalog_of(context, prefix)
    if catalog is not None:
        register(store, catalog, comments_of(node), commit.batch)
    metadata = run_metadata(node, store, receipt, seconds, shown, catalog)
    if of_another_run:
        metadata["status"] = f"nothing new: reports batch {commit.batch}, which another run committed"
    return dg.MaterializeResult(metadata=metadata, data_version=data_version(commit))


def data_version(commit: Commit) -> dg.DataVersion:
    """Returns the log's identity and number of records: it changes when consumers have input. Of an
    export as of now, also the instant, since its rows change without records."""
    now = "" if commit.export is None or commit.export.as_of is None else f":{commit.export.as_of}"
    return dg.DataVersion(f"{commit.log[:8]}:{commit.total}{now}")


def needs_materialization(context: Any, key: dg.AssetKey, last: Commit) -> bool:
    """Whether this Dagster instance lacks a commit's materialization: its run died before it reported
    the commit, or belonged to another instance."""
    event = context.instance.get_latest_materialization_event(key)
    made = None if event is None else event.asset_materialization
    if made is not None:
        same = (made.tags or {}).get(DATA_VERSION) == data_version(last).value
        batch = reported_batch(made)
        if same and batch is not None and (batch == last.batch or last.upkeep):
            return False
    name = key.to_user_string()
    context.log.info(f"{name}: reports batch {last.batch}, committed but not yet reported to Dagster")
    return True


def _of_partition(
    context: Any, key: dg.AssetKey, store: AssetStore, head: Head | None
) -> dg.MaterializeResult[Any]:
    """Returns the result of an asset with partitions whose run had no new records.

    A partition without a materialization gets one (it has no records, or its run died after its
    commit), because otherwise downstream assets that need all partitions would wait forever. So does
    one whose last materialization is older than its last commit.
    """
    last, consumed = None if head is None else head.commit, store.consumed_files(head)
    batches = {one: batch_of_delivery(consumed, one) for one in context.partition_keys}
    reporters = (reporter(context, key, partition, batch) for partition, batch in batches.items())
    if None not in reporters:
        return unchanged(context, key, last, partitions=[*batches])
    return _without_new_records(last, max(batches.values()))


def _without_new_records(last: Commit | None, earlier: int = 0) -> dg.MaterializeResult[Any]:
    """Returns the materialization of a run without new records: last batch and positions of the
    asset.

    Args:
        earlier: the batch in which an earlier try has committed the records; 0 = there are none.
    """
    status = f"an earlier try has committed batch {earlier}" if earlier else "nothing new: no commit"
    metadata: dict[str, Any] = {"status": status}
    if last is not None and last.batch:
        metadata |= {"versions": {"batch": last.batch}, "positions": positions_of(last)}
    return dg.MaterializeResult(
        metadata=metadata, data_version=None if last is None else data_version(last)
    )


def unchanged(
    context: Any,
    key: dg.AssetKey,
    last: Commit | None,
    arrival: Arrival | None = None,
    partitions: Sequence[str | None] = (None,),
) -> dg.MaterializeResult[Any]:
    """Returns the result of an asset whose run had no new records, or held them back.

    A missing output would skip all downstream assets, also those with new records of another input; a
    normal output would be a materialization. Dagster's observation key avoids both. If Dagster drops
    that key, the output is a materialization again.

    In a backfill, it is a materialization too: Dagster counts an asset without one as failed, and does
    not run the assets downstream of it.

    Args:
        partitions: of the run; None = the asset has none.
    """
    standing = _without_new_records(last)
    metadata: dict[str, Any] = {**(standing.metadata or {})}
    if arrival is not None and arrival.not_ready:
        metadata["status"] = f"held until {' and '.join(arrival.not_ready)} is ready: no commit"
        metadata["records_held"] = arrival.waiting
    for partition in partitions:
        context.log_event(dg.AssetObservation(key, metadata=metadata, partition=partition))
    if _BACKFILL in context.run.tags:
        return dg.MaterializeResult(metadata=metadata, data_version=standing.data_version)
    return dg.MaterializeResult(metadata={_NO_EVENT: True})
