"""From streams and tables to Dagster definitions: one factory per kind of asset."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from functools import cache
from os import PathLike
from typing import Any, cast

import dagster as dg
from typing_extensions import Unpack

from vt_dagster.errors import TopologyError
from vt_dagster.orchestration import ops
from vt_dagster.orchestration.asset import build_asset
from vt_dagster.orchestration.checks import build_checks
from vt_dagster.orchestration.io_manager import OP_MEMORY_IO_MANAGER, tables_io_manager
from vt_dagster.orchestration.resources import (
    PREFIX,
    PySpark,
    SparkResource,
    WarehouseResource,
    require_spark,
    require_target,
    require_warehouse,
    spark_key,
    tables_key,
    warehouse_key,
)
from vt_dagster.orchestration.sensors import build_sensor, has_sensor
from vt_dagster.orchestration.translator import SpecAttributes, TopologyTranslator
from vt_dagster.sources.kafka_sink import KafkaSink
from vt_dagster.storage import iceberg
from vt_dagster.storage.catalog import require_names
from vt_dagster.storage.delta import address
from vt_dagster.storage.maintenance import KEEP
from vt_dagster.topology.durations import check_duration
from vt_dagster.topology.model import Stream, topological
from vt_dagster.topology.options import check_arguments

_DEFAULT_SPARK = SparkResource()
"""A single instance, because Dagster merges only identical resources of one key."""


@check_arguments()
def build_publication(
    node: Stream,
    sink: KafkaSink,
    *,
    name: str | None = None,
    group: str | None = None,
    resource_prefix: str = PREFIX,
) -> dg.AssetsDefinition:
    """Returns an asset that publishes the log of a stream or table to a Kafka topic; see
    :class:`KafkaSink`.

    With ``from_start: true`` in its config, a run publishes the whole log again. Use it after a run
    failed because the log or the topic was replaced.

    Args:
        name: of the asset; None = ``<node>_to_kafka``.
    """
    named = name or f"{node.name}_to_kafka"

    publish = ops.publish_op(node, sink, named, resource_prefix=resource_prefix)

    @dg.config_mapping(config_schema=ops.PublicationConfig.to_fields_dict())
    def configured(config: Mapping[str, Any]) -> Mapping[str, Any]:
        return {publish.name: {"config": dict(config)}}

    @dg.graph_asset(
        name=named,
        ins={node.name: dg.AssetIn(dg.AssetKey(node.path), dagster_type=dg.Nothing)},
        description=f"Publishes the log of `{node.name}` to {sink.describe()}.",
        group_name=group,
        kinds={"kafka", "spark"},
        metadata={"vt_dagster/kind": "Publication", "vt_dagster/topic": sink.topic},
        config=configured,
    )
    def publication(**after: Any) -> Any:
        return publish(**after)

    return cast(dg.AssetsDefinition, publication)


@check_arguments()
def build_maintenance(
    *nodes: Stream,
    exports: Sequence[str] = (),
    cron_schedule: str = "0 3 * * *",
    keep: timedelta = KEEP,
    running: bool = False,
    resource_prefix: str = PREFIX,
) -> dg.Definitions:
    """Returns a job and its schedule that maintain all tables of a warehouse.

    The job compacts logs, and removes files and prepared results that no table has needed for a while.
    It truncates the logs of the given streams and tables, and of their inputs, by their
    ``log_retention``, but keeps what a consumer still needs: pass all consumers. From the warehouse's
    catalog it drops the names of assets whose tables were removed.

    Args:
        nodes: the streams and tables whose logs may be truncated, with their consumers.
        exports: directories of exports of these logs, which truncation waits for; of an Iceberg table
            ``catalog:schema.table``.
        cron_schedule: default 03:00 every day.
        keep: how long files outside of all current table versions are kept: longer than any run takes.
        running: whether the schedule is on from the start.
    """
    check_duration("maintenance", "keep", keep)
    for one in exports:
        if not iceberg.is_reference(one):
            require_target("maintenance: exports", one)
    upkeep = ops.maintenance_op(keep, nodes, [*map(address, exports)], resource_prefix=resource_prefix)

    @dg.job(
        name="maintenance",
        executor_def=dg.in_process_executor,
        description="Compacts logs and removes files that are no longer needed.",
    )
    def job() -> None:
        upkeep()

    status = dg.DefaultScheduleStatus.RUNNING if running else dg.DefaultScheduleStatus.STOPPED
    schedule = dg.ScheduleDefinition(
        name="nightly_maintenance", job=job, cron_schedule=cron_schedule, default_status=status
    )
    return dg.Definitions(jobs=[job], schedules=[schedule])


@check_arguments("spark", "warehouse")
def build_resources(
    warehouse: WarehouseResource | str = "data/warehouse",
    spark: PySpark | None = None,
    *,
    resource_prefix: str = PREFIX,
) -> dict[str, Any]:
    """Returns the resources of the ops, checks and sensors, by their keys.

    Equal arguments give identical objects, because Dagster merges only identical resources of one key.
    """
    if spark is not None:
        require_spark(spark)
    if isinstance(warehouse, str | PathLike):
        warehouse = warehouse_at(warehouse)
    require_warehouse(warehouse)
    return {
        warehouse_key(resource_prefix): warehouse,
        spark_key(resource_prefix): spark or _DEFAULT_SPARK,
        tables_key(resource_prefix): tables_io_manager(resource_prefix),
        ops.OP_MEMORY: OP_MEMORY_IO_MANAGER,
    }


def warehouse_at(path: str | PathLike[str], catalog: str | None = None) -> WarehouseResource:
    """Returns the resource of a warehouse, one object for equal arguments.

    Raises:
        TopologyError: the path is not valid.
    """
    if isinstance(path, dg.EnvVar):  # resolved when a run starts
        return _warehouse(path, catalog)
    require_target("warehouse", str(path))
    return _warehouse(address(path), catalog)


@cache
def _warehouse(path: str, catalog: str | None) -> WarehouseResource:
    return WarehouseResource(path=path, catalog=catalog)


@check_arguments("spark", "warehouse")
def build_definitions(
    *nodes: Stream,
    warehouse: WarehouseResource | str = "data/warehouse",
    spark: PySpark | None = None,
    graph_assets: Sequence[dg.AssetsDefinition] = (),
    translator: TopologyTranslator | None = None,
    pool: str | None = None,
    retry_policy: dg.RetryPolicy | None = None,
    resource_prefix: str = PREFIX,
    **attributes: Unpack[SpecAttributes],
) -> dg.Definitions:
    """Returns all Dagster definitions for some streams and tables and everything upstream of them.

    Assets, blocking checks, a sensor (off) for each source of files, dumps, Delta tables or topics, and
    resources. Merge them with your own definitions by ``dg.Definitions.merge``: those set the executor.

    Args:
        warehouse: a directory or URL, also as ``dagster.EnvVar``; or a :class:`WarehouseResource`.
        spark: a :class:`SparkResource`, or a ``PySparkResource`` or ``LazyPySparkResource`` of
            dagster-pyspark, whose session is used unchanged; None = a :class:`SparkResource`.
        graph_assets: assets of your own for some of the streams and tables, built from the ops of
            ``vt_dagster.ops``; they replace the assets of :func:`build_asset`.
        translator: returns the specs of all other assets; None = a :class:`TopologyTranslator`.
        pool: a Dagster concurrency pool for all assets and checks.
        retry_policy: of all assets.
        resource_prefix: prefix of the resource keys; set another one for the tables of a second
            warehouse in the same code location.
        attributes: of all specs, see :func:`build_asset`.

    Raises:
        TopologyError: the topology is invalid, a graph asset belongs to none of its nodes, or two
            assets have one name in the warehouse's catalog; nothing was started.
    """
    if not nodes:
        raise TopologyError("build_definitions needs at least one stream or table, got none")
    every = topological(nodes)
    if isinstance(warehouse, WarehouseResource) and warehouse.catalog is not None:
        require_names(every)
    where: Any = {"resource_prefix": resource_prefix}
    how: Any = {"translator": translator, "retry_policy": retry_policy, **attributes}
    made = _by_key(every, graph_assets)
    others = [node for node in every if dg.AssetKey(node.path) not in made]
    return dg.Definitions(
        assets=[*made.values(), *(build_asset(node, pool=pool, **how, **where) for node in others)],
        asset_checks=[build_checks(node, pool=pool, **where) for node in every],
        sensors=[build_sensor(node, **where) for node in every if has_sensor(node)],
        resources=build_resources(warehouse, spark, **where),
    )


def _by_key(
    nodes: Sequence[Stream], graph_assets: Sequence[dg.AssetsDefinition]
) -> dict[dg.AssetKey, dg.AssetsDefinition]:
    """Returns graph assets by the key of their stream or table."""
    keys = {dg.AssetKey(node.path) for node in nodes}
    found: dict[dg.AssetKey, dg.AssetsDefinition] = {}
    for asset in graph_assets:
        for key in asset.keys:
            if key not in keys or key in found:
                twice = "a second one" if key in found else "one with another key"
                raise TopologyError(
                    f"{key.to_user_string()}: expected one graph asset at most for each of "
                    f"{', '.join(sorted(k.to_user_string() for k in keys))} in graph_assets, got "
                    f"{twice}; make it with @dg.graph_asset(**vt_dagster.ops.graph_arguments(node))"
                )
            found[key] = asset
    return found
