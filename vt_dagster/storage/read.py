"""``vt_dagster.read``: the rows of an asset as Arrow, pandas, Polars, DuckDB, or with Spark."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import date
from importlib import import_module
from typing import Any, Literal, get_args

import pyarrow as pa

from vt_dagster.errors import StorageError
from vt_dagster.storage.arrow_reader import look_up, name_of, of_key
from vt_dagster.storage.values import as_key
from vt_dagster.topology.durations import at_clock
from vt_dagster.topology.options import check_arguments

Into = Literal["arrow", "polars", "pandas", "duckdb", "spark"]


@check_arguments("into", error=StorageError)
def read(
    table: Any,
    *,
    warehouse: str = "data/warehouse",
    key: Any = None,
    as_of: str | date | None = None,
    what: str | None = None,
    partial: bool = False,
    into: Into = "arrow",
    as_known_at: str | date | None = None,
) -> Any:
    """Reads an asset as of its last commit or an earlier one. Uses Spark only for ``into="spark"``.

    Args:
        table: asset name (with a key prefix: ``shop/prices``), or the stream or table itself.
        warehouse: directory or URL of the tables.
        key: value of the key, for a composite key a tuple or list; texts are accepted. None = all keys.
        as_of: valid time, ISO 8601, datetime or date (without an offset: UTC; a date: its midnight);
            returns the row of each key as of it (inclusive). ``now``: the time of this machine's clock
            when the read starts, for tables with future-dated rows; without it, such a row is the
            current one.
        what: ``current`` (default for tables; without deleted keys), ``versions`` (with tombstones) or
            ``log`` (default for streams).
        partial: for an ``as_of`` before the history horizon, return the current versions that were
            valid by then, as Kafka Streams does; otherwise such a time is an error.
        into: ``arrow``: a ``pyarrow.Table``; ``pandas``, ``polars``: a DataFrame; ``duckdb``: a
            relation; ``spark``: a lazy DataFrame of the active session. All but Spark's are in memory.
        as_known_at: system time, ISO 8601 or datetime; uses the records up to it (inclusive) and the
            stream time of then, with the history retention that is declared now. A future time means
            now.

    Raises:
        StorageError: the asset does not exist or does not have ``what``, ``as_of`` is before its
            history or set with another ``what`` than ``current``, or nothing was recorded by
            ``as_known_at``.
    """
    name = name_of(table)
    if into not in get_args(Into):
        raise StorageError(f"expected into to be one of {list(get_args(Into))}, got {into!r}")
    values = None if key is None else list(key) if isinstance(key, tuple | list) else [key]
    moment, known = (t.isoformat() if isinstance(t, date) else t for t in (as_of, as_known_at))
    moment = at_clock(moment)
    if into == "spark":
        return _by_spark(warehouse, name, what, values, moment, partial, known)
    return as_frame(look_up(warehouse, name, what, values, moment, partial, known), into)


def as_frame(rows: pa.Table, into: Into) -> Any:
    """Converts rows to a type of another library (all ``Into`` but Spark)."""
    if into == "arrow":
        return rows
    return rows.to_pandas() if into == "pandas" else import_module(into).from_arrow(rows)


def _by_spark(
    warehouse: str,
    name: str,
    what: str | None,
    key: Sequence[Any] | None,
    as_of: str | None,
    partial: bool,
    as_known_at: str | None,
) -> Any:
    session = import_module("pyspark.sql").SparkSession.getActiveSession()
    if session is None:
        raise StorageError(
            f"{name}: expected an active Spark session for into='spark', found none; start one, or set "
            "into to another library"
        )
    # A late import: it takes seconds, and only this function needs it.
    store = import_module("vt_dagster.storage.asset_store").AssetStore.open(warehouse, name, session)
    rows = store.read(what, as_of, partial, as_known_at)
    if key is None:
        return rows
    names, of_arrow = store.node.key, import_module("vt_dagster.core.log_columns").arrow_schema
    columns: pa.Schema = of_arrow(store.node.schema)
    of_key(store.log_path, columns, names, key)  # refuses a text that Spark would round

    def value(column: str, given: Any) -> Any:
        kind = columns.field(column).type
        return as_key(column, given, kind).as_py() if pa.types.is_binary(kind) else given

    values = [value(*one) for one in zip(names, key, strict=True)]
    among = import_module("vt_dagster.core.versioned_table").key_range
    return among(rows, key=names, lower=values, upper=values)
