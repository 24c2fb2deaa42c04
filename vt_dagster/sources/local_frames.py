"""DataFrames of pandas, Polars, Arrow and DuckDB: as Arrow with the columns and types of a schema.

No Spark. What cannot be a value of its column's type is told by row; a column of another kind of type
is refused as a whole, for only its author knows how to convert it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.pandas.types import from_arrow_schema, to_arrow_schema
from pyspark.sql.types import StructType

from vt_dagster.core.source_records import RAW, REASON, Reason
from vt_dagster.errors import ContractError

ROW = "_row"
"""The place of a row in its DataFrame, from 1: BIGINT; null in a Spark one, which has no order."""
_WIDEST = pa.decimal128(38, 0)
_KINDS = (
    ("boolean", pa.types.is_boolean),
    ("decimal", pa.types.is_decimal),
    ("float", pa.types.is_floating),
    ("integer", pa.types.is_integer),
    ("time", lambda t: pa.types.is_timestamp(t) or pa.types.is_date(t)),
    ("text", lambda t: pa.types.is_string(t) or pa.types.is_large_string(t) or str(t) == "string_view"),
    ("bytes", lambda t: "binary" in str(t)),
    ("list", lambda t: "list" in str(t).partition("<")[0]),
    ("struct", pa.types.is_struct),
    ("map", pa.types.is_map),
)
_ALSO = {"float": {"integer"}, "decimal": {"integer"}, "integer": {"float", "decimal"}}
"""Which other kinds a column takes, value by value, where nothing is lost: pandas has whole numbers
beside a null as floats."""


@dataclass(frozen=True)
class LocalFrame:
    """The rows of a DataFrame in memory.

    Args:
        rows: the schema's columns, ``_row``, ``_raw`` (a bad row as JSON; else null) and ``_reason``.
        extra: columns that it has besides; they are left out.
    """

    rows: pa.Table
    extra: Sequence[str]

    @property
    def count(self) -> int:
        """How many rows it has."""
        return self.rows.num_rows

    def digest(self) -> str:
        """Of what is in it, whatever the order of its rows."""
        total = 0
        for batch in self.rows.drop_columns([ROW]).to_batches(max_chunksize=10_000):
            for row in batch.to_pylist():
                told = hashlib.blake2b(repr(row).encode("utf-8"), digest_size=16).digest()
                total += int.from_bytes(told, "big")
        return f"{self.count}:{total % (1 << 128):032x}"

    def frame(self, spark: SparkSession) -> DataFrame:
        """For Spark."""
        return spark.createDataFrame(self.rows.combine_chunks(), from_arrow_schema(self.rows.schema))

    def release(self) -> None:
        """Nothing is held in Spark."""


def local_frame(name: str, value: Any, schema: StructType) -> LocalFrame | None:
    """A DataFrame of pandas, Polars (lazy too), Arrow or DuckDB; None = it is none of them.

    Naive times are UTC. A pandas index is no column: reset it where it holds one.

    Args:
        name: of the stream or table, for messages.

    Raises:
        ContractError: it lacks a column, or has one of another kind of type.
    """
    table = _as_arrow(name, value)
    if table is None:
        return None
    extra = require_columns(name, table.column_names, schema)
    wanted, columns, bad = to_arrow_schema(schema), dict[str, pa.ChunkedArray](), set[int]()
    for field in wanted:
        column = _plain(table.column(field.name))
        if column.null_count == len(column):
            # It says nothing of its type: pandas takes one without values for floats.
            columns[field.name] = pa.chunked_array([pa.nulls(len(column), field.type)])
            continue
        _require_kind(name, field.name, column.type, field.type)
        columns[field.name], misfits = _fitting(column, field.type)
        bad.update(misfits)
    count = table.num_rows
    raw, reason = [None] * count, [None] * count
    places = pa.array(sorted(bad), pa.int64())
    for place, row in zip(places.to_pylist(), table.take(places).to_pylist(), strict=True):
        raw[place], reason[place] = json.dumps(row, default=str), Reason.UNREADABLE
    columns[ROW] = pa.array(range(1, count + 1), pa.int64())
    columns[RAW], columns[REASON] = pa.array(raw, pa.string()), pa.array(reason, pa.string())
    return LocalFrame(pa.table(columns), extra)


def require_columns(name: str, there: Sequence[str], schema: StructType) -> list[str]:
    """The columns of a DataFrame that the schema has not.

    Raises:
        ContractError: the schema has some that the DataFrame has not.
    """
    missing = [c for c in schema.names if c not in there]
    if missing:
        raise ContractError(
            f"{name}: expected a DataFrame with the columns {schema.names}, got {list(there)}, without "
            f"{missing}; return them, or take them out of the schema. Nothing was committed"
        )
    return [c for c in there if c not in schema.names]


def wrong_type(name: str, column: str, got: object, wanted: object) -> ContractError:
    """That a column cannot be converted without losing something, or guessing."""
    return ContractError(
        f"{name}: column {column!r} is {got}, expected {wanted}; convert it before it is returned, or "
        "change the schema. Nothing was committed"
    )


def _as_arrow(name: str, value: Any) -> pa.Table | None:
    library = type(value).__module__.partition(".")[0]
    if isinstance(value, pa.Table):
        return value
    if isinstance(value, pa.RecordBatch):
        return pa.Table.from_batches([value])
    if isinstance(value, pa.RecordBatchReader):
        return value.read_all()
    if library == "polars":
        value = value.collect() if hasattr(value, "collect") else value
        return value.to_arrow() if hasattr(value, "get_columns") else None
    if library == "pandas" and hasattr(value, "columns"):
        try:
            return pa.Table.from_pandas(value, preserve_index=False)
        except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
            raise ContractError(
                f"{name}: expected pandas columns of values of one type each, got: {error}; convert "
                "that column before it is returned. Nothing was committed"
            ) from None
    if library in ("duckdb", "_duckdb"):
        return value.to_arrow_table() if hasattr(value, "to_arrow_table") else None
    return None


def _plain(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Without a dictionary, which categories are kept by."""
    kind = column.type
    return column.cast(kind.value_type) if pa.types.is_dictionary(kind) else column


def _kind(kind: pa.DataType) -> str:
    return next((name for name, is_one in _KINDS if is_one(kind)), str(kind))


def _require_kind(name: str, column: str, got: pa.DataType, wanted: pa.DataType) -> None:
    if pa.types.is_null(got) or _kind(got) in {_kind(wanted), *_ALSO.get(_kind(wanted), ())}:
        try:
            pa.array([], got).cast(wanted)
            return
        except pa.ArrowException:
            pass
    raise wrong_type(name, column, got, wanted)


def _fitting(column: pa.ChunkedArray, wanted: pa.DataType) -> tuple[pa.ChunkedArray, list[int]]:
    """The column in another type, null where a value does not fit in, and the places of those."""
    try:
        return _cast(column, wanted), []
    except pa.ArrowException:
        if len(column) == 1:
            return pa.chunked_array([pa.nulls(1, wanted)]), [0]
    half = len(column) // 2
    (first, bad), (second, more) = (
        _fitting(part, wanted) for part in (column.slice(0, half), column.slice(half))
    )
    return pa.chunked_array([*first.chunks, *second.chunks], wanted), [*bad, *(half + p for p in more)]


def _cast(column: pa.ChunkedArray, wanted: pa.DataType) -> pa.ChunkedArray:
    """Raises where a value would be changed."""
    if pa.types.is_integer(column.type) and pa.types.is_decimal(wanted):
        column = column.cast(_WIDEST)  # else the type's digits count, not the value's
    done = column.cast(wanted)
    if pa.types.is_date(wanted) and not done.cast(column.type).equals(column):
        raise pa.ArrowInvalid("a time of day is no part of a date")
    return done
