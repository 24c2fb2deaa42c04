"""The asset that writes a stream or table for other engines, as a plain Delta or Iceberg table."""

import time
from collections.abc import Sequence
from typing import Any, Literal, cast

import dagster as dg
from typing_extensions import Unpack

from vt_dagster.orchestration.asset import data_version, needs_materialization, retried, unchanged
from vt_dagster.orchestration.metadata import column_schema, positions_of, with_types
from vt_dagster.orchestration.resources import PREFIX, keys_of, spark_for, tables_key, warehouse_of
from vt_dagster.orchestration.translator import SpecAttributes, spec_arguments
from vt_dagster.runs.export import AsOf, Export, ExportRun, export_of, exported_rows, exported_types
from vt_dagster.storage.commit_log import Commit
from vt_dagster.topology.durations import in_utc
from vt_dagster.topology.model import Stream
from vt_dagster.topology.options import check_arguments


@check_arguments()
def build_export(
    node: Stream,
    what: Literal["current", "versions", "log"] | None = None,
    *,
    to: str,
    name: str | None = None,
    as_of: AsOf = None,
    columns: Sequence[str] = (),
    with_columns: Sequence[str] = (),
    catalog_table: str | None = None,
    format: Literal["delta", "iceberg"] = "delta",
    iceberg_catalog: str | None = None,
    warehouse: str | None = None,
    pool: str | None = None,
    retry_policy: dg.RetryPolicy | None = None,
    resource_prefix: str = PREFIX,
    **attributes: Unpack[SpecAttributes],
) -> dg.AssetsDefinition:
    """Returns an asset that writes a stream or table as a Delta or Iceberg table for other engines.

    The table has no tombstones, no expired rows, and of the library's columns only ``valid_from``
    (inclusive) and ``valid_to`` (exclusive, null = current) of versions; neither deletion vectors nor
    column mapping. Each run makes one commit (Delta) or one snapshot (Iceberg): it appends the new rows
    of a log, and overwrites a table. A run without new records writes nothing and starts no Spark,
    except with ``as_of``. After a replay and swap it overwrites the whole table.

    Args:
        what: ``current`` (default for tables: the row of every key), ``versions`` (for versioned
            tables) or ``log`` (default for streams: every record; for a table every change).
        to: the directory or URL of the table, outside of the warehouse; no other writer may use it,
            except for OPTIMIZE and VACUUM; of an Iceberg table for what rewrites its files, expires its
            snapshots and removes files that no snapshot has.
        name: of the asset; None = ``<node>_export``. Its key has the node's prefix.
        as_of: ``now``, with ``current`` of a versioned table: the rows that are valid at the clock's
            time when a run starts, instead of the latest ones, which may begin in the future. The
            commit records the instant (metadata ``as_of``). A run without new records writes the rows
            again if a version has begun or ended since. Only a run does: schedule one.
        columns: in order, instead of the schema's; also library columns such as ``timestamp``.
        with_columns: additional columns. With ``is_tombstone``, deletions are included.
        catalog_table: ``schema.name`` of the table in Spark's catalog; of an Iceberg table in
            ``iceberg_catalog``, where the schema must exist.
        format: ``delta``, or ``iceberg`` with the extra ``vt-dagster[iceberg]``: Spark writes the
            files, PyIceberg commits them.
        iceberg_catalog: for ``iceberg``: name of the catalog in PyIceberg's configuration
            (``.pyiceberg.yaml``, ``PYICEBERG_CATALOG__<NAME>__…``).
        warehouse: of the node's tables: a ``to`` inside of it is then an error when definitions load,
            else when the export runs.
        pool, retry_policy, resource_prefix, attributes: as in :func:`build_asset`.

    Raises:
        TopologyError: the node does not have ``what``, ``as_of`` or the columns, ``to`` is within a
            warehouse, or an Iceberg table has no name, or a column of a type that Iceberg lacks.
    """
    export = export_of(
        node,
        what,
        to,
        name=name,
        columns=columns,
        with_columns=with_columns,
        catalog_table=catalog_table,
        format=format,
        iceberg_catalog=iceberg_catalog,
        as_of=as_of,
    )
    if warehouse is not None:
        export.require_outside(warehouse)
    spec = _spec(export)

    @dg.asset(
        **spec_arguments(spec, attributes),
        pool=pool,
        retry_policy=retry_policy,
        required_resource_keys=keys_of(resource_prefix),
        io_manager_key=tables_key(resource_prefix),
    )
    def of_export(context: dg.AssetExecutionContext) -> dg.MaterializeResult[Any]:
        warehouse, spark = warehouse_of(context, resource_prefix), spark_for(context, resource_prefix)
        way = ExportRun(export, warehouse, spark, context.log.info)
        return retried(context, way.head, lambda: _run_once(context, way, export))

    return cast(dg.AssetsDefinition, of_export)


def _spec(export: Export) -> dg.AssetSpec:
    node = export.node
    rows = {"current": "current rows", "versions": "versions", "log": "records"}[export.what]
    rows = rows if export.as_of is None else "rows, valid when a run starts,"
    metadata = {
        "dagster/column_schema": _columns(export),
        "dagster/column_lineage": _lineage(export),
        "dagster/storage_kind": export.format,
        "dagster/uri": export.to,
        "vt_dagster/kind": "Export",
    }
    if export.catalog_table is not None:
        metadata["dagster/table_name"] = export.catalog_table
    if export.iceberg_catalog is not None:
        metadata["vt_dagster/iceberg_catalog"] = export.iceberg_catalog
    made = {"delta": "a Delta table", "iceberg": "an Iceberg table"}[export.format]
    return dg.AssetSpec(
        dg.AssetKey([*node.path[:-1], export.name]),
        deps=[dg.AssetKey(node.path)],
        description=f"The {rows} of `{node.name}` for other engines, {made} in {export.to}.",
        group_name=node.group,
        owners=list(node.owners) or None,
        kinds={"spark", "deltalake" if export.format == "delta" else "iceberg"},
        metadata=metadata,
    )


def _columns(export: Export) -> dg.TableSchema:
    there = {column.name: column for column in column_schema(export.node).columns}
    unknown = {name: dg.TableColumn(name, "decided by Spark") for name in export.columns}
    return dg.TableSchema(columns=[(unknown | there)[name] for name in export.columns])


def _lineage(export: Export) -> dg.TableColumnLineage:
    up = dg.AssetKey(export.node.path)
    return dg.TableColumnLineage({name: [dg.TableColumnDep(up, name)] for name in export.columns})


def _run_once(
    context: dg.AssetExecutionContext, way: ExportRun, export: Export
) -> dg.MaterializeResult[Any]:
    started = time.monotonic()
    commit = way.run(context.run.run_id)
    if commit is not None:
        return _materialized(export, commit, started)
    context.log.info(f"{export.name}: nothing new in the log of {export.node.name}")
    last, key = way.head(), context.asset_key  # the loaders of Dagster may have given it another one
    if last is None or not needs_materialization(context, key, last):
        return unchanged(context, key, last)
    way.register()  # a run that died before it reported may have died before this too
    return _materialized(export, last, started)


def _materialized(export: Export, commit: Commit, started: float) -> dg.MaterializeResult[Any]:
    metadata: dict[str, Any] = {
        "dagster/uri": export.to,
        "dagster/row_count": exported_rows(export),
        "dagster/column_schema": with_types(_columns(export), exported_types(export)),
        "dagster/column_lineage": _lineage(export),
        "seconds": round(time.monotonic() - started, 3),
        "records_in": commit.counts["in"],
        "versions": {"batch": commit.batch},
        "positions": positions_of(commit),
        "read_versions": dict(commit.reads),
    }
    if commit.export is not None and commit.export.as_of is not None:
        metadata["as_of"] = in_utc(commit.export.as_of)
    if export.catalog_table is not None:
        metadata["dagster/table_name"] = export.catalog_table
    return dg.MaterializeResult(metadata=metadata, data_version=data_version(commit))
