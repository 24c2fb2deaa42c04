"""Conversion of a DataFrame of any library to the columns and types of a stream or table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, cast

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import DataType, DecimalType, StructType

from vt_dagster.core.source_records import RAW, REASON, Reason
from vt_dagster.errors import ContractError
from vt_dagster.sources.local_frames import ROW, local_frame, require_columns, wrong_type
from vt_dagster.sources.match_by_name import by_name
from vt_dagster.sources.value_reader import is_no_text
from vt_dagster.topology.model import Stream
from vt_dagster.topology.schema import differences

_WHOLE = ("tinyint", "smallint", "int", "bigint")
_WIDER = {
    ("float", "double"),
    *((kind, "double") for kind in _WHOLE[:3]),
    *((kind, wider) for place, kind in enumerate(_WHOLE) for wider in _WHOLE[place + 1 :]),
    ("date", "timestamp"),
    ("timestamp_ntz", "timestamp"),
}
_DIGITS = {"tinyint": 3, "smallint": 5, "int": 10, "bigint": 19}


class Frame(Protocol):
    """A DataFrame with the columns of a schema; see ``LocalFrame``."""

    @property
    def count(self) -> int: ...
    @property
    def extra(self) -> Sequence[str]: ...
    def digest(self) -> str: ...
    def frame(self, spark: SparkSession) -> DataFrame: ...
    def release(self) -> None: ...


class SparkFrame:
    """The rows of a Spark DataFrame, persisted so that they are computed once."""

    def __init__(self, rows: DataFrame, extra: Sequence[str]) -> None:
        self._rows, self.extra = rows.persist(), extra
        self.count = self._rows.count()

    def digest(self) -> str:
        """Returns a digest of the rows, independent of their order."""
        row = F.to_json(F.struct(*self._rows.columns), {"ignoreNullFields": "false"})
        hashed = F.xxhash64(row)
        told = self._rows.agg(
            F.coalesce(F.bit_xor(hashed), F.lit(0)),
            F.coalesce(F.sum(hashed.cast("decimal(38,0)")), F.lit(0)),
        ).collect()[0]
        return f"{self.count}:{told[0]}:{int(told[1])}"

    def frame(self, spark: SparkSession) -> DataFrame:
        """Returns the rows with ``_row``, ``_raw`` and ``_reason``."""
        rows = self._rows
        broken = is_no_text(F.struct(*rows.columns), rows.schema)
        return rows.select(
            *[F.when(~broken, F.col(c)).alias(c) for c in rows.columns],
            F.lit(None).cast("bigint").alias(ROW),
            F.lit(None).cast("string").alias(RAW),
            F.when(broken, Reason.UNREADABLE).alias(REASON),
        )

    def release(self) -> None:
        """Unpersists the rows."""
        self._rows.unpersist()


def frame_of(node: Stream, value: Any) -> Frame | None:
    """Returns a value as a DataFrame with the columns and types of a node; None = no rows, or None.

    Raises:
        ContractError: the value is not a DataFrame, lacks a column, or has a column of another type.
    """
    if value is None:
        return None
    name, schema = node.name, cast(StructType, node.schema)
    found: Frame | None = local_frame(name, value, schema)
    if found is None:
        if not (hasattr(value, "schema") and hasattr(value, "sparkSession")):
            raise ContractError(
                f"{name}: expected a DataFrame of Spark, pandas, Polars, Arrow or DuckDB, or None, got "
                f"{type(value).__module__}.{type(value).__qualname__}; return one of these"
            )
        there = cast(DataFrame, value)
        extra = require_columns(name, there.columns, schema)
        kinds = {f.name: f.dataType for f in there.schema.fields}
        for f in schema.fields:
            if differences(kinds[f.name], f.dataType, f.name, fits=_fits):
                got, wanted = kinds[f.name].simpleString(), f.dataType.simpleString()
                raise wrong_type(name, f.name, got, wanted)
        columns = [
            by_name(F.col(f"`{f.name}`"), kinds[f.name], f.dataType).cast(f.dataType).alias(f.name)
            for f in schema.fields
        ]
        found = SparkFrame(there.select(*columns), extra)
    if found.count:
        return found
    found.release()
    return None


def _fits(got: DataType, wanted: DataType) -> bool:
    """Returns whether every value of ``got`` is a value of ``wanted``."""
    one, other = got.simpleString(), wanted.simpleString()
    if one in (other, "void") or (one, other) in _WIDER:
        return True
    if not isinstance(wanted, DecimalType):
        return False
    room = wanted.precision - wanted.scale
    if isinstance(got, DecimalType):
        return got.scale <= wanted.scale and got.precision - got.scale <= room
    return _DIGITS.get(one, room + 1) <= room
