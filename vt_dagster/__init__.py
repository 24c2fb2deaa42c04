"""Versioned tables for Dagster on Spark: tables that remember what was true when."""

from vt_dagster.errors import TopologyError, VtDagsterError
from vt_dagster.orchestration.factory import (
    build_asset,
    build_checks,
    build_definitions,
    build_maintenance,
    build_resources,
)
from vt_dagster.orchestration.io_manager import TablesIOManager, tables_io_manager
from vt_dagster.orchestration.resource import SparkResource, WarehouseResource
from vt_dagster.orchestration.sensors import build_sensor
from vt_dagster.sources.files import FilesSource
from vt_dagster.topology.model import Stream, Table, VersionedTable
from vt_dagster.topology.operators import (
    Aggregator,
    Materialized,
    StreamTableJoin,
    UntilTimeLimit,
    UntilWindowCloses,
)
from vt_dagster.topology.windowing import HoppingWindow, SessionWindow, SlidingWindow, TumblingWindow

__all__ = [
    "Aggregator",
    "FilesSource",
    "HoppingWindow",
    "Materialized",
    "SessionWindow",
    "SlidingWindow",
    "SparkResource",
    "Stream",
    "StreamTableJoin",
    "Table",
    "TablesIOManager",
    "TopologyError",
    "TumblingWindow",
    "UntilTimeLimit",
    "UntilWindowCloses",
    "VersionedTable",
    "VtDagsterError",
    "WarehouseResource",
    "build_asset",
    "build_checks",
    "build_definitions",
    "build_maintenance",
    "build_resources",
    "build_sensor",
    "tables_io_manager",
]
