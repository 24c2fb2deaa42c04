"""DataFrames of pandas, Polars, Arrow and DuckDB, converted to Arrow with the types of a schema.

Does not use Spark. A value that does not fit its column makes the row unreadable. A column of another
kind of type is an error: only its author knows how to convert it.
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
"""Column with the row number in the DataFrame, from 1 (BIGINT); null for Spark, which has no order."""
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
"""Other kinds of types that a column accepts if each value converts exactly: pandas stores integers
with a null as floats."""


@dataclass(frozen=True)
class LocalFrame:
    """The rows of a DataFrame in memory.

    Args:
        rows: the schema's columns, ``_row``, ``_raw`` (a bad row as JSON; else null) and ``_reason``.
        extra: columns that the schema lacks; they are dropped.
    """

    rows: pa.Table
    extra: Sequence[str]

    @property
    def count(self) -> int:
        """The number of rows."""
        return self.rows.num_rows

    def digest(self) -> str:
        """Returns a digest of the rows, independent of their order."""
        total = 0
        for batch in self.rows.drop_columns([ROW]).to_batches(max_chunksize=10_000):
            for row in batch.to_pylist():
                told = hashlib.blake2b(repr(row).encode("utf-8"), digest_size=16).digest()
                total += int.from_bytes(told, "big")
        return f"{self.count}:{total % (1 << 128):032x}"

    def frame(self, spark: SparkSession) -> DataFrame:
        """Returns a Spark DataFrame of the rows."""
        return spark.createDataFrame(self.rows.combine_chunks(), from_arrow_schema(self.rows.schema))

    def release(self) -> None:
        """Does nothing: Spark holds no data."""


def local_frame(name: str, value: Any, schema: StructType) -> LocalFrame | None:
    """Converts a DataFrame of pandas, Polars (also lazy), Arrow or DuckDB; returns None for other
    values.

    Naive times are UTC. A pandas index is not a column: use ``reset_index`` to keep it.

    Args:
        name: the stream or table, for messages.

    Raises:
        ContractError: a column is missing, or of another kind of type.
    """
    table = _as_arrow(name, value)
    if table is None:
        return None
    extra = require_columns(name, table.column_names, schema)
    wanted, columns, bad = to_arrow_schema(schema), dict[str, pa.ChunkedArray](), set[int]()
    for field in wanted:
        column = _plain(table.column(field.name))
        if column.null_count == len(column):
            # A column of nulls has no reliable type: pandas stores it as floats.
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
    """Returns the columns of a DataFrame that the schema lacks.

    Raises:
        ContractError: the DataFrame lacks columns of the schema.
    """
    missing = [c for c in schema.names if c not in there]
    if missing:
        raise ContractError(
            f"{name}: expected a DataFrame with the columns {schema.names}, got {list(there)}, without "
            f"{missing}; return them, or remove them from the schema. Nothing was committed"
        )
    return [c for c in there if c not in schema.names]


def wrong_type(name: str, column: str, got: object, wanted: object) -> ContractError:
    """Returns the error for a column that cannot be converted exactly."""
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
    """Returns a column without dictionary encoding (pandas categories)."""
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
    """Returns the column in another type, with null for values that do not fit, and their positions.

    Arrow's cast fails as a whole, so bisection finds the misfits.
    """
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
    """Casts a column; raises if a value would change."""
    if pa.types.is_integer(column.type) and pa.types.is_decimal(wanted):
        column = column.cast(_WIDEST)  # else Arrow checks the digits of the type, not of the value
    done = column.cast(wanted)
    if pa.types.is_date(wanted) and not done.cast(column.type).equals(column):
        raise pa.ArrowInvalid("a time of day is no part of a date")
    return done
