"""Placeholders of Debezium for unchanged values that a change event omits."""

from __future__ import annotations

from functools import reduce
from operator import and_

from pyspark.sql import Column
from pyspark.sql import functions as F
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    DataType,
    IntegerType,
    LongType,
    MapType,
    ShortType,
    StringType,
    StructType,
)


def all_null(row: Column, wanted: StructType) -> Column:
    """Returns whether all columns of a row are null."""
    return reduce(and_, [row[name].isNull() for name in wanted.names])


def unchanged_in(row: Column, wanted: StructType, placeholder: str) -> Column:
    """Returns the names of the columns that hold the placeholder, as an array."""
    found = [
        F.when(
            F.coalesce(_is_placeholder(row[f.name], f.dataType, placeholder), F.lit(False)),
            F.lit(f.name),
        )
        for f in wanted.fields
    ]
    return F.array_compact(F.array(*found))


def _is_placeholder(value: Column, kind: DataType, placeholder: str) -> Column:
    """Returns whether a value is the placeholder. Debezium writes it by type: the text's bytes, an
    array of the text or of its character codes, a map from the text to itself."""
    if isinstance(kind, StringType):
        of_map = f'{{"{placeholder}":"{placeholder}"}}'  # hstore as JSON
        return value.isin(placeholder, of_map)
    if isinstance(kind, BinaryType):
        return value == F.lit(placeholder).cast("binary")
    if isinstance(kind, ArrayType) and isinstance(kind.elementType, StringType):
        return value == F.array(F.lit(placeholder))
    if isinstance(kind, ArrayType) and isinstance(kind.elementType, ShortType | IntegerType | LongType):
        codes = F.array(*[F.lit(code) for code in placeholder.encode()])
        return value == codes.cast(ArrayType(kind.elementType))
    if isinstance(kind, MapType) and isinstance(kind.keyType, StringType):
        return F.map_contains_key(value, placeholder)
    return F.lit(False)
