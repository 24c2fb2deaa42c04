"""The asset that makes a training set: a stream's records joined with many versioned tables, one op."""

import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, cast

import dagster as dg
from typing_extensions import Unpack

from vt_dagster.columns import TIMESTAMP
from vt_dagster.orchestration.asset import data_version, needs_materialization, unchanged
from vt_dagster.orchestration.metadata import column_schema, positions_of
from vt_dagster.orchestration.resources import PREFIX, keys_of, spark_for, tables_key, warehouse_of
from vt_dagster.orchestration.translator import SpecAttributes, spec_arguments
from vt_dagster.runs.training_set_run import TrainingRun, manifest_of, read_manifest
from vt_dagster.storage.commit_log import Commit
from vt_dagster.storage.delta import address
from vt_dagster.topology.feature_views import FeatureView, TrainingSet
from vt_dagster.topology.model import Stream


class TrainingSetConfig(dg.Config):
    """The config of a run of a training set."""

    manifest: str = ""
    """The path of a manifest: the run rebuilds the set at its positions, and fails if it differs."""


def build_training_set(
    spine: Stream,
    features: Sequence[FeatureView],
    *,
    name: str,
    to: str,
    matured_after: timedelta | None = None,
    pool: str | None = None,
    retry_policy: dg.RetryPolicy | None = None,
    resource_prefix: str = PREFIX,
    **attributes: Unpack[SpecAttributes],
) -> dg.AssetsDefinition:
    """Returns an asset that joins a stream with many versioned tables, each row as of its own time.

    One row for each record of the spine, duplicates included, tombstones excluded, in a Delta table
    that is overwritten as a whole: the spine's columns, ``timestamp``, and the columns of each feature,
    null where no value was known, valid or young enough. Late records of the tables do not change what
    was known when a row was recorded. Each set has a manifest of its input positions, in its metadata,
    its Delta commit, and ``_manifests/<batch>.json`` beside the data; a run with
    ``config={"manifest": path}`` rebuilds exactly that set, or fails. A run without new records writes
    nothing and starts no Spark.

    Args:
        spine: a stream.
        features: see ``FeatureView``.
        to: the directory or URL of the table, outside of the warehouse; no other writer may use it.
        matured_after: only rows whose timestamp + this is at or before the spine's stream time
            (inclusive) are included.
        pool, retry_policy, resource_prefix, attributes: as in :func:`build_asset`.

    Raises:
        TopologyError: keys, columns or names do not match.
    """
    declared, to = TrainingSet(name, spine, tuple(features), matured_after), address(to)
    spec = _spec(declared, to)

    @dg.asset(
        **spec_arguments(spec, attributes),
        pool=pool,
        retry_policy=retry_policy,
        required_resource_keys=keys_of(resource_prefix),
        io_manager_key=tables_key(resource_prefix),
    )
    def of_training_set(
        context: dg.AssetExecutionContext, config: TrainingSetConfig
    ) -> dg.MaterializeResult[Any]:
        started, spark = time.monotonic(), spark_for(context, resource_prefix)
        warehouse = warehouse_of(context, resource_prefix)
        way = TrainingRun(declared, to, warehouse, spark, context.log.info)
        pinned = read_manifest(config.manifest) if config.manifest else None
        commit = way.run(pinned, context.run.run_id)
        if commit is None:
            commit = way.head()
            if commit is None or not needs_materialization(context, spec.key, commit):
                return unchanged(context, spec.key, commit)
        return _materialized(declared, to, commit, started)

    return cast(dg.AssetsDefinition, of_training_set)


def _spec(declared: TrainingSet, to: str) -> dg.AssetSpec:
    spine = declared.spine
    tables = ", ".join(dict.fromkeys(f"`{view.table.name}`" for view in declared.features))
    return dg.AssetSpec(
        dg.AssetKey([*spine.path[:-1], declared.name]),
        deps=[dg.AssetKey(node.path) for node in declared.inputs],
        description=f"A training set: each record of `{spine.name}` with {tables} as of its own time.",
        group_name=spine.group,
        owners=list(spine.owners) or None,
        kinds={"spark", "deltalake"},
        metadata={
            "dagster/column_schema": _columns(declared),
            "dagster/column_lineage": _lineage(declared),
            "dagster/storage_kind": "delta",
            "dagster/uri": to,
            "vt_dagster/kind": "TrainingSet",
        },
    )


def _columns(declared: TrainingSet) -> dg.TableSchema:
    def of(node: Stream, column: str, name: str) -> dg.TableColumn:
        found = next(c for c in column_schema(node).columns if c.name == column)
        return dg.TableColumn(name, found.type, description=found.description)

    own = [of(declared.spine, c, c) for c in declared.own]
    more = [of(v.table, c, name) for v in declared.features for name, c in v.named]
    return dg.TableSchema(columns=own + more)


def _lineage(declared: TrainingSet) -> dg.TableColumnLineage:
    spine = dg.AssetKey(declared.spine.path)
    found = {c: [dg.TableColumnDep(spine, c)] for c in declared.own if c != TIMESTAMP}
    for view in declared.features:
        up = dg.AssetKey(view.table.path)
        found |= {name: [dg.TableColumnDep(up, c)] for name, c in view.named}
    return dg.TableColumnLineage(found)


def _materialized(
    declared: TrainingSet, to: str, commit: Commit, started: float
) -> dg.MaterializeResult[Any]:
    made = manifest_of(commit)
    return dg.MaterializeResult(
        metadata={
            "dagster/uri": to,
            "dagster/row_count": made.rows,
            "dagster/column_schema": _columns(declared),
            "dagster/column_lineage": _lineage(declared),
            "seconds": round(time.monotonic() - started, 3),
            "hash": made.hash,
            "manifest": made.model_dump(mode="json"),
            "records_in": commit.counts["in"],
            "versions": {"batch": commit.batch},
            "positions": positions_of(commit),
            "read_versions": dict(commit.reads),
        },
        data_version=data_version(commit),
    )
