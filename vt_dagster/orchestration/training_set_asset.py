"""The asset that makes a training set: a stream's records joined with many versioned tables."""

import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any, cast

import dagster as dg
from typing_extensions import Unpack

from vt_dagster.columns import TIMESTAMP
from vt_dagster.errors import TopologyError
from vt_dagster.orchestration.asset import data_version, needs_materialization, retried, unchanged
from vt_dagster.orchestration.metadata import column_schema, positions_of, types_of, with_types
from vt_dagster.orchestration.resources import (
    PREFIX,
    keys_of,
    require_target,
    spark_for,
    tables_key,
    warehouse_of,
)
from vt_dagster.orchestration.translator import SpecAttributes, spec_arguments
from vt_dagster.provenance.lateness import share
from vt_dagster.runs.training_set_run import (
    Manifest,
    TrainingRun,
    manifest_of,
    match_rates,
    read_manifest,
)
from vt_dagster.storage import parquet
from vt_dagster.storage.commit_log import Commit
from vt_dagster.storage.delta import address
from vt_dagster.topology.feature_views import FeatureView, TrainingSet
from vt_dagster.topology.model import Stream
from vt_dagster.topology.options import check_arguments

MATCH_CHECK = "features_match"


class TrainingSetConfig(dg.Config):
    """The config of a run of a training set."""

    manifest: str = ""
    """The path of a manifest: the run rebuilds the set at its positions, and fails if it differs."""


@check_arguments()
def build_training_set(
    spine: Stream,
    features: Sequence[FeatureView],
    *,
    name: str,
    to: str,
    matured_after: timedelta | None = None,
    min_match_rate: float | None = None,
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

    Its metadata has the match rate of each feature view, ``match_rate_<table>`` (several views of one
    table: ``match_rate_<prefix><table>``): the share of the rows for which a version was found,
    whatever its values; 0 to 1. A feature view that matched no row is a warning in the run's log.

    Args:
        spine: a stream.
        features: see ``FeatureView``.
        to: the directory or URL of the table, outside of the warehouse; no other writer may use it.
        matured_after: only rows whose timestamp + this is at or before the spine's stream time
            (inclusive) are included.
        min_match_rate: adds the blocking check ``features_match``, which fails if the match rate of a
            feature view is below this, 0 to 1 (inclusive). The set is written all the same. It passes
            without rows. None: no check.
        pool, retry_policy, resource_prefix, attributes: as in :func:`build_asset`.

    Raises:
        TopologyError: keys, columns or names do not match, or ``min_match_rate`` is no share.
    """
    declared = TrainingSet(name, spine, tuple(features), matured_after)
    require_target(f"{name}: to", to)
    to = address(to)
    if min_match_rate is not None and not 0 <= min_match_rate <= 1:
        raise TopologyError(
            f"{name}: expected min_match_rate to be a share of the rows from 0 to 1, got "
            f"{min_match_rate!r}; correct it, or leave it out"
        )
    spec, checks = _spec(declared, to), list[dg.AssetCheckSpec]()
    if min_match_rate is not None:
        about = f"Each feature view has a version for at least {share(min_match_rate)} of the rows."
        checks = [dg.AssetCheckSpec(MATCH_CHECK, asset=spec.key, blocking=True, description=about)]

    @dg.asset(
        **spec_arguments(spec, attributes),
        check_specs=checks,
        pool=pool,
        retry_policy=retry_policy,
        required_resource_keys=keys_of(resource_prefix),
        io_manager_key=tables_key(resource_prefix),
    )
    def of_training_set(
        context: dg.AssetExecutionContext,
        config: TrainingSetConfig,
        # Beside the output of a check, Dagster knows only the bare class.
    ) -> dg.MaterializeResult:  # pyright: ignore[reportMissingTypeArgument]
        started, spark = time.monotonic(), spark_for(context, resource_prefix)
        # The loaders of Dagster may have given the asset another key.
        warehouse, key = warehouse_of(context, resource_prefix), context.asset_key
        way = TrainingRun(declared, to, warehouse, spark, context.log.info)
        pinned = read_manifest(config.manifest) if config.manifest else None
        commit = retried(context, way.head, lambda: way.run(pinned, context.run.run_id))
        if commit is not None:
            _warn(context, declared, manifest_of(commit))
        last = commit or way.head()
        rates = {} if last is None else match_rates(declared, manifest_of(last))
        checks = [] if min_match_rate is None else [_checked(key, rates, min_match_rate)]
        if last is None or (commit is None and not needs_materialization(context, key, last)):
            idle = unchanged(context, key, last)
            about: Any = {"metadata": idle.metadata, "data_version": idle.data_version}
            return dg.MaterializeResult(**about, check_results=checks)
        metadata = _metadata(declared, to, last, started)
        return dg.MaterializeResult(
            metadata=metadata, data_version=data_version(last), check_results=checks
        )

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


def _warn(context: dg.AssetExecutionContext, declared: TrainingSet, made: Manifest) -> None:
    """Warns of feature views that matched no row."""
    rates = match_rates(declared, made)
    for label, view in zip(declared.labels, declared.features, strict=True):
        if rates.get(label) == 0:
            keys = f"{list(view.of_spine)} of {declared.spine.name}", f"{list(view.table.key)}"
            context.log.warning(
                f"{declared.name}: expected rows with a version of {view.table.name!r}, got none among "
                f"{made.rows:,} (feature view {label}): compare the values of {keys[0]} with those of "
                f"{keys[1]} of {view.table.name}, and the times; with as_known='when_recorded' no row "
                "has a version that was recorded after it, such as a backfill"
            )


def _checked(key: dg.AssetKey, rates: Mapping[str, float], least: float) -> dg.AssetCheckResult:
    few = ", ".join(f"{label}: {share(rate)}" for label, rate in rates.items() if rate < least)
    text = f"Expected versions for at least {share(least)} of the rows, got {few}"
    return dg.AssetCheckResult(
        asset_key=key,
        check_name=MATCH_CHECK,
        passed=not few,
        severity=dg.AssetCheckSeverity.ERROR,
        description=text if few else None,
        metadata={"at_least": least, **{f"match_rate_{n}": rate for n, rate in rates.items()}},
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


def _metadata(declared: TrainingSet, to: str, commit: Commit, started: float) -> dict[str, Any]:
    made = manifest_of(commit)
    return {
        "dagster/uri": to,
        "dagster/row_count": made.rows,
        "dagster/column_schema": with_types(_columns(declared), types_of(parquet.schema(to))),
        "dagster/column_lineage": _lineage(declared),
        "seconds": round(time.monotonic() - started, 3),
        "hash": made.hash,
        "manifest": made.model_dump(mode="json"),
        "records_in": commit.counts["in"],
        **{f"match_rate_{n}": rate for n, rate in match_rates(declared, made).items()},
        "versions": {"batch": commit.batch},
        "positions": positions_of(commit),
        "read_versions": dict(commit.reads),
    }
