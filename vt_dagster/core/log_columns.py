"""The columns of logs and views, with their types in Spark, and Spark's types in Arrow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from inspect import signature
from typing import Any, cast

from pyspark.sql import Column
from pyspark.sql import functions as F
from pyspark.sql.pandas import types
from pyspark.sql.types import (
    ArrayType,
    BooleanType,
    CharType,
    DataType,
    DecimalType,
    DoubleType,
    FloatType,
    IntegerType,
    IntegralType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampType,
    VarcharType,
)

from vt_dagster.columns import (
    BY_COLUMN,
    CAUSE,
    IS_LATE,
    IS_LATEST,
    IS_TOMBSTONE,
    LEFT_OFFSET,
    LOG_COLUMNS,
    OFFSET,
    OLD,
    PARTITION,
    PROPAGATED_FROM,
    PROVIDED_COLUMNS,
    REVISION,
    TIMESTAMP,
    VALID_FROM,
    VALID_TO,
)
from vt_dagster.topology.model import Stream, Table, VersionedTable
from vt_dagster.topology.schema import named, types_in

_TYPES: dict[str, DataType] = {
    TIMESTAMP: TimestampType(),
    PARTITION: IntegerType(),
    OFFSET: LongType(),
    IS_TOMBSTONE: BooleanType(),
    IS_LATEST: BooleanType(),
    IS_LATE: BooleanType(),
    VALID_FROM: TimestampType(),
    VALID_TO: TimestampType(),
}
_OF_PARTS: dict[str, DataType] = {
    PROVIDED_COLUMNS: ArrayType(StringType()),
    PROPAGATED_FROM: IntegerType(),
}
"""Only in tables with partial updates; in other tables these names may be a user's own columns."""
POSITION_TYPE = StructType(
    [
        StructField("table", StringType()),
        StructField(PARTITION, IntegerType()),
        StructField(OFFSET, LongType()),
    ]
)
"""The type of ``cause``."""
_OF_CORRECTIONS: dict[str, DataType] = {
    REVISION: IntegerType(),
    CAUSE: POSITION_TYPE,
    LEFT_OFFSET: LongType(),
}
"""Only in logs of corrected joins; in other logs these names may be a user's own columns."""


def value_columns(node: Stream) -> list[str]:
    """Returns the value columns of a node's log: all but the key and ``timestamp``."""
    return [c for c in node.schema.names if c not in node.key and c.lower() != TIMESTAMP]


def log_columns(node: Stream) -> list[str]:
    """Returns the columns of a node's log, in order."""
    own = [c for c in node.schema.names if c.lower() != TIMESTAMP]
    of_tables = (IS_LATEST, OLD) if isinstance(node, Table) else ()
    of_operator = node.operator.log_columns if node.operator is not None else ()
    of_parts = _OF_PARTS if partial_columns(node) else ()
    ties = ties_by_column(node)
    of_ties = () if ties is None else (ties.name,)
    return [*own, *LOG_COLUMNS, *of_tables, *of_operator, *of_parts, *of_ties]


def partial_columns(node: Stream) -> dict[str, tuple[str, ...]]:
    """Returns the value columns that a partial update may omit, each with its earlier names.

    Empty for a table without partial updates. With ``tie_break`` also :func:`always_provided`.
    """
    if not isinstance(node, VersionedTable) or not node.has_partial_updates:
        return {}
    own = {node.timestamp, node.valid_until} - {*always_provided(node)}
    return {c: tuple(node.earlier.get(c, ())) for c in value_columns(node) if c not in own}


def always_provided(node: Stream) -> list[str]:
    """Returns the columns among :func:`partial_columns` that each record provides; see
    ``VersionRules.always_provided``. Empty for a table without partial updates."""
    if not isinstance(node, VersionedTable) or not node.has_partial_updates:
        return []
    return node.version_rules.always_provided


def ties_by_column(node: Stream) -> StructField | None:
    """Returns the column with the values of ``tie_break`` of single columns; None = the node has none.

    Its name has that of ``tie_break``, because another ``tie_break`` has other values and another type.
    """
    if not (always := always_provided(node)):
        return None
    tie_break, *_ = always
    before = [f"{c}{BY_COLUMN}" for c in node.earlier.get(tie_break, ())]
    kind = MapType(StringType(), _widest(node.schema[tie_break].dataType))
    return named(f"{tie_break}{BY_COLUMN}", kind, before)


def _widest(kind: DataType) -> DataType:
    """Returns the widest type that a column may get by schema evolution, because a type inside a map
    cannot change later."""
    if isinstance(kind, DecimalType):
        return DecimalType(38, kind.scale)
    if isinstance(kind, CharType | VarcharType):
        return StringType()
    wide = LongType() if isinstance(kind, IntegralType) else kind
    return DoubleType() if isinstance(kind, FloatType) else wide


def log_schema(node: Stream) -> StructType:
    """Returns the columns of a node's log with their types and earlier names."""
    return _schema(node, log_columns(node))


def view_schema(node: Table) -> StructType:
    """Returns the columns of a table's view with their types and earlier names."""
    names = [n for n in log_columns(node) if n not in (IS_LATEST, OLD)]
    if not isinstance(node, VersionedTable):
        return _schema(node, names)
    # ``old`` is the version before each row, see ``core.versioned_table``.
    before = [] if node.new_version_on is None else [OLD]
    return _schema(node, [*names, VALID_FROM, VALID_TO, *before], [OFFSET] if before else [])


def _schema(node: Stream, names: Sequence[str], of_old: Sequence[str] = ()) -> StructType:
    own: dict[str, DataType] = {f.name: f.dataType for f in node.schema.fields}
    added = node.operator.log_columns if node.operator is not None else ()
    own |= {n: kind for n, kind in _OF_CORRECTIONS.items() if n in added}
    own |= _OF_PARTS if partial_columns(node) else {}
    ties = ties_by_column(node)
    old = [*value_columns(node), TIMESTAMP, *of_old]
    own[OLD] = StructType([_field(node, n, own) for n in old])
    return StructType(
        [ties if ties is not None and n == ties.name else _field(node, n, own) for n in names]
    )


def _field(node: Stream, name: str, own: Mapping[str, DataType]) -> StructField:
    return named(name, _TYPES.get(name) or own[name], node.earlier.get(name, ()))


# Arrow


# PySpark's own functions, whose arguments and defaults differ between the supported series.
_to_arrow, _from_arrow = cast(Any, types.to_arrow_schema), cast(Any, types.from_arrow_schema)  # pyright: ignore[reportUnknownMemberType]
_UTC = {"timezone": "UTC"} if "timezone" in signature(_to_arrow).parameters else {}
"""Arguments with the time zone, which only PySpark 4.2 takes; earlier ones always use UTC."""


def comparable(value: Column, kind: DataType) -> Column:
    """Returns a value that Spark can compare: maps as arrays of their entries in order of the keys.

    Two maps with the same entries are equal, whatever their order.
    """
    if not any(isinstance(k, MapType) for k in types_in(kind)):
        return value
    if isinstance(kind, StructType):
        fields = [comparable(value[f.name], f.dataType).alias(f.name) for f in kind.fields]
        return F.when(value.isNotNull(), F.struct(*fields))
    if isinstance(kind, ArrayType):
        element = kind.elementType
        return F.transform(value, lambda one: comparable(one, element))
    assert isinstance(kind, MapType)
    inner = kind.valueType
    entries = F.transform(
        F.map_entries(value), lambda one: F.struct(one["key"], comparable(one["value"], inner))
    )
    return F.array_sort(entries)


def arrow_schema(schema: StructType) -> Any:  # a pyarrow.Schema, which has no type stubs
    """Returns a schema of Spark as one of Arrow; timestamps are in microseconds, UTC."""
    return _to_arrow(schema, **_UTC)


def spark_schema(schema: Any, ntz: bool = False) -> StructType:
    """Returns a schema of Arrow as one of Spark.

    Args:
        ntz: whether timestamps without a zone are TIMESTAMP_NTZ; otherwise they are taken as UTC.
    """
    return _from_arrow(schema, prefer_timestamp_ntz=ntz)
