"""A folder of SQL files as Dagster assets: DuckDB runs each file on the tables that the file names."""

import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import dagster as dg
import duckdb
import pyarrow as pa
import pyarrow.parquet as pq

from vt_dagster import Stream, Table, VersionedTable, read


def build_models(
    folder: Path, nodes: Sequence[Stream], *, warehouse: Path, results: Path
) -> list[dg.AssetsDefinition]:
    """Returns an asset for each SQL file of a folder, named after the file. Its upstream assets are
    those that its query names: other models of the folder, and for a stream or table ``prices``

    - ``prices``: the current rows of a table, or the records of a stream;
    - ``prices_versions``: the versions of a versioned table, deletions included;
    - ``prices_log``: the log of a table.

    Args:
        nodes: the streams and tables that can be read.
        warehouse: the warehouse of the tables.
        results: the directory of the models' rows, one Parquet file each.

    Raises:
        ValueError: a file is no query, or reads a name that is neither a table nor a model.
    """
    files = {file.stem: file for file in sorted(folder.glob("*.sql"))}
    tables = {name: told for node in nodes for name, told in _names(node)}
    return [_model(file, {*files}, tables, warehouse, results) for file in files.values()]


def _names(node: Stream) -> Iterator[tuple[str, tuple[str, str]]]:
    """The names that queries can read of an asset, each with the asset and the rows it stands for."""
    asset, name = "/".join(node.path), "_".join(node.path)
    if not isinstance(node, Table):
        yield name, (asset, "log")
        return
    yield name, (asset, "current")
    yield f"{name}_log", (asset, "log")
    if isinstance(node, VersionedTable):
        yield f"{name}_versions", (asset, "versions")


def _model(
    file: Path, models: set[str], tables: dict[str, tuple[str, str]], warehouse: Path, results: Path
) -> dg.AssetsDefinition:
    query = file.read_text(encoding="utf-8")
    names = _read_by(query, file)
    if unknown := names - models - {*tables}:
        raise ValueError(
            f"{file}: expected the names of tables and models, got {sorted(unknown)}; choose of "
            f"{sorted(models | {*tables})}"
        )
    upstream = {tables[name][0] if name in tables else name for name in names}

    @dg.asset(
        name=file.stem,
        deps=[dg.AssetKey(asset.split("/")) for asset in sorted(upstream)],
        group_name="models",
        kinds={"duckdb", "sql"},
        description=f"```sql\n{query}```",
        code_version=hashlib.sha256(query.encode()).hexdigest()[:12],
        automation_condition=dg.AutomationCondition.eager(),
    )
    def made() -> dg.MaterializeResult[Any]:
        with duckdb.connect() as connection:
            for name in names:
                if name in tables:
                    asset, what = tables[name]
                    # Not from the files of the view, which may lack the newest rows of the log.
                    rows = read(asset, what=what, warehouse=str(warehouse))
                else:
                    rows = pq.read_table(results / f"{name}.parquet")
                connection.register(name, rows)
            found = _in_utc(connection.sql(query).to_arrow_table())
        _write(found, results / f"{file.stem}.parquet")
        columns = [dg.TableColumn(f.name, str(f.type)) for f in found.schema]
        return dg.MaterializeResult(
            metadata={
                "dagster/row_count": found.num_rows,
                "dagster/column_schema": dg.TableSchema(columns),
            }
        )

    return made


def _in_utc(rows: pa.Table) -> pa.Table:
    """Sets UTC as the time zone of timestamps; DuckDB sets that of the machine."""
    utc = pa.timestamp("us", "UTC")
    zoned = [pa.types.is_timestamp(f.type) and f.type.tz is not None for f in rows.schema]
    fields = [f.with_type(utc) if its else f for f, its in zip(rows.schema, zoned, strict=True)]
    return rows.cast(pa.schema(fields))


def _write(rows: pa.Table, to: Path) -> None:
    """Replaces a file in one step: a reader sees either the old or the new rows."""
    to.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(rows, to.with_suffix(".new"))
    to.with_suffix(".new").replace(to)


def _read_by(query: str, file: Path) -> set[str]:
    """The tables that a query names, by DuckDB's parser, without the subqueries of its WITH."""
    (said,) = duckdb.connect().execute("select json_serialize_sql(?)", [query]).fetchone() or ("{}",)
    parsed = json.loads(said)
    if parsed["error"] or len(parsed["statements"]) != 1:
        why = parsed.get("error_message") or f"{len(parsed['statements'])} statements"
        raise ValueError(f"{file}: expected one SELECT, got: {why}; correct it")
    nodes = [*_within(parsed)]
    subqueries = {one["key"] for node in nodes for one in node.get("cte_map", {}).get("map", ())}
    return {node["table_name"] for node in nodes if node.get("type") == "BASE_TABLE"} - subqueries


def _within(parsed: Any) -> Iterator[dict[str, Any]]:
    if isinstance(parsed, dict):
        yield parsed
    for one in parsed.values() if isinstance(parsed, dict) else parsed:
        if isinstance(one, dict | list):
            yield from _within(one)
