"""Versioned tables for Dagster on Spark: tables with their history of valid time and system time.

Terms, here and in messages:

- *record*: a key, a value and a timestamp; *key*: the columns that identify the entity;
  *timestamp*: the time from which the value is true; *tombstone*: a record
  without a value, which deletes its key's row.
- *partition*: the part of a log that holds a record; *offset*: its position there, from 0, gap-free.
- *log*: all records of a stream, or all changes of a table, in order; append-only.
- *view*: a checkpoint of a table's log: its rows or versions, readable without the log.
- *valid from / valid to*: when a version begins to be true (inclusive) and ceases to be (exclusive).
- *as of* a time: the version that is valid at that time.
- *stream time*: the largest timestamp so far, per partition. Only records advance it, never a clock.
- *history retention*: how far behind stream time a table keeps versions and accepts records.
- *grace period*: how far stream time passes a record, or a window's end, before the result is final.
- *late*: behind stream time by more than the grace period or history retention (of a stream with
  ``unique_by``: than ``within``).
- *outcome* of a record: *applied*, *late*, *duplicate* (of a stream with ``unique_by``), *waiting* (in
  a buffer, for example of a grace period), *dropped* (unusable; counted), *quarantined* (bad; kept
  aside), or *no result* (produced no output).
- *released*: emitted from a buffer, for example at the end of a grace period.
- *arrival*: the input of a run, pinned when the run starts.
- *delivery*: one input of a source of DataFrames: of one run of a function, of one partition, or of one
  materialization of an upstream asset; each is consumed once.
- *processor*: the implementation of an operator in a run; *state*: what it keeps between runs.
- *run*: reads an arrival, applies the operator and commits; *commit*: the one atomic write to the log:
  a run takes effect as a whole or not at all; *batch*: the number of a commit.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vt_dagster.contracts import contract
    from vt_dagster.errors import TopologyError, VtDagsterError
    from vt_dagster.orchestration.alerts import Alert, build_alerts
    from vt_dagster.orchestration.checks import (
        build_freshness_check,
        build_lateness_check,
        build_quarantine_check,
        build_waiting_check,
    )
    from vt_dagster.orchestration.decorators import stream, table, versioned_table
    from vt_dagster.orchestration.export_asset import build_export
    from vt_dagster.orchestration.factory import (
        build_asset,
        build_checks,
        build_definitions,
        build_maintenance,
        build_resources,
    )
    from vt_dagster.orchestration.io_manager import tables_io_manager
    from vt_dagster.orchestration.resources import SparkResource, WarehouseResource
    from vt_dagster.orchestration.sensors import build_partition_sensor, build_sensor
    from vt_dagster.orchestration.training_set_asset import build_training_set
    from vt_dagster.orchestration.translator import TopologyTranslator
    from vt_dagster.provenance.explain import explain
    from vt_dagster.provenance.lateness import lateness
    from vt_dagster.sources.delta_source import DeltaSource
    from vt_dagster.sources.files_source import FilesSource
    from vt_dagster.sources.frame_sources import AssetSource
    from vt_dagster.sources.snapshot_source import SnapshotSource
    from vt_dagster.storage.read import read
    from vt_dagster.topology.feature_views import FeatureView
    from vt_dagster.topology.model import Stream, Table, VersionedTable
    from vt_dagster.topology.operators import (
        Aggregator,
        Materialized,
        StreamTableJoin,
        UntilTimeLimit,
        UntilWindowCloses,
    )
    from vt_dagster.topology.windows import (
        HoppingWindow,
        SessionWindow,
        SlidingWindow,
        TumblingWindow,
    )

_HOMES = {
    "Aggregator": "vt_dagster.topology.operators",
    "Alert": "vt_dagster.orchestration.alerts",
    "AssetSource": "vt_dagster.sources.frame_sources",
    "DeltaSource": "vt_dagster.sources.delta_source",
    "FeatureView": "vt_dagster.topology.feature_views",
    "FilesSource": "vt_dagster.sources.files_source",
    "HoppingWindow": "vt_dagster.topology.windows",
    "Materialized": "vt_dagster.topology.operators",
    "SessionWindow": "vt_dagster.topology.windows",
    "SlidingWindow": "vt_dagster.topology.windows",
    "SnapshotSource": "vt_dagster.sources.snapshot_source",
    "SparkResource": "vt_dagster.orchestration.resources",
    "Stream": "vt_dagster.topology.model",
    "StreamTableJoin": "vt_dagster.topology.operators",
    "Table": "vt_dagster.topology.model",
    "TopologyError": "vt_dagster.errors",
    "TopologyTranslator": "vt_dagster.orchestration.translator",
    "TumblingWindow": "vt_dagster.topology.windows",
    "UntilTimeLimit": "vt_dagster.topology.operators",
    "UntilWindowCloses": "vt_dagster.topology.operators",
    "VersionedTable": "vt_dagster.topology.model",
    "VtDagsterError": "vt_dagster.errors",
    "WarehouseResource": "vt_dagster.orchestration.resources",
    "contract": "vt_dagster.contracts",
    "explain": "vt_dagster.provenance.explain",
    "lateness": "vt_dagster.provenance.lateness",
    "read": "vt_dagster.storage.read",
    "build_alerts": "vt_dagster.orchestration.alerts",
    "build_asset": "vt_dagster.orchestration.factory",
    "build_checks": "vt_dagster.orchestration.factory",
    "build_definitions": "vt_dagster.orchestration.factory",
    "build_export": "vt_dagster.orchestration.export_asset",
    "build_freshness_check": "vt_dagster.orchestration.checks",
    "build_lateness_check": "vt_dagster.orchestration.checks",
    "build_maintenance": "vt_dagster.orchestration.factory",
    "build_partition_sensor": "vt_dagster.orchestration.sensors",
    "build_quarantine_check": "vt_dagster.orchestration.checks",
    "build_resources": "vt_dagster.orchestration.factory",
    "build_sensor": "vt_dagster.orchestration.sensors",
    "build_training_set": "vt_dagster.orchestration.training_set_asset",
    "build_waiting_check": "vt_dagster.orchestration.checks",
    "stream": "vt_dagster.orchestration.decorators",
    "table": "vt_dagster.orchestration.decorators",
    "tables_io_manager": "vt_dagster.orchestration.io_manager",
    "versioned_table": "vt_dagster.orchestration.decorators",
}
"""The module of each name, imported at first access: a read of a table needs neither Dagster nor Spark,
which take seconds to import."""


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    """Lists the public names: most are imported at first access, so they are in no dictionary yet."""
    return sorted(__all__)


__all__ = [
    "Aggregator",
    "Alert",
    "AssetSource",
    "DeltaSource",
    "FeatureView",
    "FilesSource",
    "HoppingWindow",
    "Materialized",
    "SessionWindow",
    "SlidingWindow",
    "SnapshotSource",
    "SparkResource",
    "Stream",
    "StreamTableJoin",
    "Table",
    "TopologyError",
    "TopologyTranslator",
    "TumblingWindow",
    "UntilTimeLimit",
    "UntilWindowCloses",
    "VersionedTable",
    "VtDagsterError",
    "WarehouseResource",
    "build_alerts",
    "build_asset",
    "build_checks",
    "build_definitions",
    "build_export",
    "build_freshness_check",
    "build_lateness_check",
    "build_maintenance",
    "build_partition_sensor",
    "build_quarantine_check",
    "build_resources",
    "build_sensor",
    "build_training_set",
    "build_waiting_check",
    "contract",
    "explain",
    "lateness",
    "read",
    "stream",
    "table",
    "tables_io_manager",
    "versioned_table",
]
